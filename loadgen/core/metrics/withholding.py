"""Decides which metrics and statistics a run withholds, and removes them from its summary. Pure.

A run withholds values that would mislead its readers, and stores the reason. There are two cases:

- A *withheld metric* has no statistics at all, because its values cannot be trusted. For example,
  all metrics of tokens are withheld if the server's token counts contradict its responses.
- The *withheld statistics* of a metric, such as its p99, may be wrong by more than a limit, because
  timestamps or token counts are uncertain (`uncertainty`). Its other statistics are reported.

`select_statistics` decides both, and `without_withheld_values` removes the values from the summary
of the run and of its parts. An SLO term on a withheld value is undecided.

A run without an inter-token latency (ITL) withholds nothing: ITL is not defined for its responses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import msgspec

from loadgen.core import limits
from loadgen.core.metrics import drift, timing_evidence, token_usage, uncertainty
from loadgen.core.metrics.reasons import format_reason
from loadgen.core.metrics.run_evidence import make_code
from loadgen.core.metrics.uncertainty import WithheldStatistics
from loadgen.core.slo import missing_metrics
from loadgen.core.stats import quantiles
from loadgen.figures import METRICS, metrics_withheld_for, pooled_metrics

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from loadgen.core.metrics.accumulator import MetricAccumulator
    from loadgen.core.metrics.drift import Drift
    from loadgen.core.metrics.part_summaries import PartSummary, TargetSummary
    from loadgen.core.metrics.request_counts import Stalls
    from loadgen.core.metrics.sample_bounds import GapBounds
    from loadgen.core.metrics.summary import Summary
    from loadgen.core.metrics.task_summary import Sessions
    from loadgen.core.metrics.timing_evidence import TimingEvidence
    from loadgen.core.metrics.token_usage import Tokens
    from loadgen.core.results.manifest import RunManifest
    from loadgen.core.slo import Term
    from loadgen.core.stats.quantiles import Distribution

PartT = TypeVar("PartT", bound="PartSummary")

WithheldMetrics: TypeAlias = dict[str, str]
"""The names of withheld metrics, each with the reason as a sentence."""

TOKENS = "tokens"
"""The name under which all counts and rates of output tokens are withheld."""

STALLS = "stalls"
"""The name under which the number of responses that stalled is withheld."""

NO_SOCKETS = ""
"""The name of the code that read the sockets (`Host.hot_path`) of a simulation, which has none."""


@dataclass(frozen=True)
class MeasuredStatistics:
    """All statistics of a run, before any of them is withheld, and what shows their quality.

    Attributes:
        manifest: The manifest of the run.
        requests: All measured requests.
        distributions: The distribution of each metric.
        gap_bounds: The bounds of the gaps between output events, None if all gaps are certain.
        timing_evidence: What is known of the cause of uncertain timestamps.
    """

    manifest: RunManifest
    requests: MetricAccumulator
    distributions: Mapping[str, Distribution]
    gap_bounds: GapBounds | None
    timing_evidence: TimingEvidence


@dataclass(frozen=True)
class ReportedStatistics:
    """The statistics that a run reports, and why it does not report others.

    Attributes:
        distributions: The distribution of each metric, without its withheld statistics.
        withheld_metrics: The metrics that are withheld with all of their statistics, and why.
        withheld_statistics: The statistics of other metrics that are withheld, and why.
        itl_undefined_reason: Why the run has no inter-token latency, "" if it has one.
    """

    distributions: dict[str, Distribution]
    withheld_metrics: WithheldMetrics
    withheld_statistics: dict[str, WithheldStatistics]
    itl_undefined_reason: str

    def metrics_without_slo_result(self, manifest: RunManifest) -> WithheldMetrics:
        """Return the metrics whose SLO terms are undecided in this run, with the reason for each.

        These are the withheld metrics, the inter-token latency (ITL) if it is not defined, and the
        gaps between output events if a quantile that an SLO limits, such as their p99, is withheld.
        """
        reason_by_metric: WithheldMetrics = {}
        if self.itl_undefined_reason:
            reason_by_metric["itl"] = f"ITL is not defined: {self.itl_undefined_reason}"

        # If ITL is withheld too, that reason replaces the one above.
        reason_by_metric.update(self.withheld_metrics)

        for term in _list_gap_terms(manifest):
            if self._is_limited_quantile_withheld(term):
                reason_by_metric[term.metric] = "it is too uncertain to be reported"

        return reason_by_metric

    def _is_limited_quantile_withheld(self, term: Term) -> bool:
        """Return True if the run withholds the quantile that a term of an SLO limits."""
        withheld = self.withheld_statistics.get(term.metric)
        if withheld is None:
            return False

        limited_quantile = quantiles.quantile_name(term.quantile)  # such as "p99"
        return limited_quantile in withheld.ranges


def _list_gap_terms(manifest: RunManifest) -> list[Term]:
    """Return the SLO terms that limit the gaps between output events."""
    gap_metrics = pooled_metrics()
    terms = [term for slo in manifest.slos for term in slo.terms]
    return [term for term in terms if term.metric in gap_metrics]


def select_statistics(measured: MeasuredStatistics) -> ReportedStatistics:
    """Decide which of the measured statistics the run reports, and which it withholds."""
    itl_undefined_reason = token_usage.itl_undefined_reason(
        measured.requests, measured.distributions["inter_chunk"]
    )
    has_itl = not itl_undefined_reason

    withheld_metrics = _find_withheld_metrics(measured)
    uncertain_statistics = _find_uncertain_statistics(measured, has_itl=has_itl)

    # A metric that is withheld as a whole does not list its uncertain statistics.
    withheld_statistics = {
        metric: statistics
        for metric, statistics in uncertain_statistics.items()
        if metric not in withheld_metrics
    }

    return ReportedStatistics(
        distributions=_without_statistics(measured.distributions, uncertain_statistics),
        withheld_metrics=withheld_metrics,
        withheld_statistics=withheld_statistics,
        itl_undefined_reason=itl_undefined_reason,
    )


def _without_statistics(
    distributions: Mapping[str, Distribution], withheld: Mapping[str, WithheldStatistics]
) -> dict[str, Distribution]:
    """Return the distribution of each metric, in which its withheld statistics are None."""
    reported_distributions = dict(distributions)
    for metric, statistics in withheld.items():
        if metric in reported_distributions:  # "itl" has no distribution of its own
            reported_distributions[metric] = distributions[metric].without(statistics.ranges)

    return reported_distributions


# -- withheld statistics ---------------------------------------------------------------------------


def _find_uncertain_statistics(
    measured: MeasuredStatistics, *, has_itl: bool
) -> dict[str, WithheldStatistics]:
    """Return the statistics of each metric that are too uncertain to report, with the reason.

    Args:
        measured: The statistics of the run, and what shows their quality.
        has_itl: Whether each output event has one token, so that the gaps between events are the
            inter-token latency (ITL).
    """
    ranges_by_metric = uncertainty.find_uncertain_statistics(
        measured.distributions, measured.requests, measured.gap_bounds, measured.manifest.limits
    )

    timing_reason = timing_evidence.explain_uncertain_times(measured.timing_evidence)
    uncertain_statistics = {}
    for metric, ranges in ranges_by_metric.items():
        reason = timing_reason
        if metric == "tpot" and not _is_tpot_uncertain_by_timestamps(measured):
            # TPOT is a time divided by a number of tokens, which is uncertain here.
            reason = format_reason(make_code("first_event_uncertain"))
        uncertain_statistics[metric] = WithheldStatistics(ranges=ranges, reason=reason)

    # ITL has the values of the gaps between events, so the same statistics are uncertain.
    if has_itl and "inter_chunk" in uncertain_statistics:
        uncertain_statistics["itl"] = uncertain_statistics["inter_chunk"]

    return uncertain_statistics


def _is_tpot_uncertain_by_timestamps(measured: MeasuredStatistics) -> bool:
    """Return True if timestamps alone make the time per output token (TPOT) too uncertain."""
    return uncertainty.is_tpot_uncertain_by_timestamps(
        measured.requests, measured.distributions["tpot"], measured.manifest.limits
    )


# -- withheld metrics ------------------------------------------------------------------------------


def _find_withheld_metrics(measured: MeasuredStatistics) -> WithheldMetrics:
    """Return the metrics that are not reported at all, and the reason for each.

    A metric with several reasons has the last one of these.
    """
    return {
        **_find_metrics_of_wrong_token_counts(measured.requests),
        **missing_metrics(measured.manifest.slos),  # an SLO needs a plug-in that is not installed
        **_find_metrics_of_hidden_first_tokens(measured.requests, measured.manifest),
        **_find_metrics_of_unknown_arrivals(measured),
    }


def _find_metrics_of_wrong_token_counts(requests: MetricAccumulator) -> WithheldMetrics:
    """Return the metrics that use token counts, with the reason, if too many counts are wrong.

    A server's count is wrong if it is lower than the number of output events of the response, or
    higher than the number of tokens that the client requested.
    """
    checked_counts = requests.sum("exact_counts")
    wrong_counts = requests.sum("conflicting_counts")
    are_few_wrong = wrong_counts <= limits.CONTRADICTING_SHARE * checked_counts
    if are_few_wrong:
        return {}

    too_low_counts = requests.sum("understated_counts")
    reason = make_code(
        "counts_contradict",
        contradicting=wrong_counts,
        answers=checked_counts,
        share=wrong_counts / checked_counts,
        understated=too_low_counts,
        overstated=wrong_counts - too_low_counts,
        limit=limits.CONTRADICTING_SHARE,
    )
    metrics = (TOKENS, *metrics_withheld_for(reason.code))
    return dict.fromkeys(metrics, format_reason(reason))


def _find_metrics_of_hidden_first_tokens(
    requests: MetricAccumulator, manifest: RunManifest
) -> WithheldMetrics:
    """Return the metrics that need the time of the first token, with the reason, if many lack it.

    A streamed response lacks this time if the server counted its tokens, but none of its events
    carried text.
    """
    if not manifest.stream:
        return {}

    ok_responses = requests.sum("ok")
    responses_without_text = requests.sum("tpot_no_output")
    are_few_without_text = responses_without_text <= limits.UNSEEN_OUTPUT * ok_responses
    if are_few_without_text:
        return {}

    reason = make_code(
        "output_unseen",
        unseen=responses_without_text,
        answers=ok_responses,
        share=responses_without_text / ok_responses,
        limit=limits.UNSEEN_OUTPUT,
    )
    metrics = metrics_withheld_for(reason.code)
    return dict.fromkeys(metrics, format_reason(reason))


def _find_metrics_of_unknown_arrivals(measured: MeasuredStatistics) -> WithheldMetrics:
    """Return the metrics that need exact arrival times, with the reason, if these are not known.

    The kernel records when a packet arrived. Without that time, the client does not know how late
    it read a packet, nor if a pause between output events was a stall of the server. With it, the
    number of stalls may still be too uncertain.
    """
    if _are_kernel_times_missing(measured.requests, measured.manifest):
        reason = make_code("no_kernel_times")
        metrics = (*metrics_withheld_for(reason.code), STALLS)
        return dict.fromkeys(metrics, format_reason(reason))

    if uncertainty.are_stalls_uncertain(measured.requests, measured.manifest.limits):
        return {STALLS: timing_evidence.explain_uncertain_times(measured.timing_evidence)}

    return {}


def _are_kernel_times_missing(requests: MetricAccumulator, manifest: RunManifest) -> bool:
    """Return True if responses came through sockets, but none has a timestamp of the kernel."""
    has_first_tokens = requests.sum("with_first_token") > 0
    has_kernel_times = requests.sum("kernel_timestamps") > 0
    has_sockets = manifest.host.hot_path != NO_SOCKETS
    return has_sockets and has_first_tokens and not has_kernel_times


# -- removal from the summary ----------------------------------------------------------------------


def without_withheld_values(summary: Summary) -> Summary:
    """Return the summary of a run in which withheld values are None, also in those of its parts.

    A value is withheld if it would mislead the readers. A part of a run is, for example, a target
    with its requests.
    """
    withheld = summary.withheld_metrics
    are_tokens_withheld = TOKENS in withheld

    return msgspec.structs.replace(
        summary,
        # Latencies of the run.
        ttft_ms=_reported_latency("ttft", summary.ttft_ms, withheld),
        ttft_from_sent_ms=_reported_latency("ttft_from_sent", summary.ttft_from_sent_ms, withheld),
        tpot_ms=_reported_latency("tpot", summary.tpot_ms, withheld),
        tpot_mlperf_ms=_reported_latency("tpot_mlperf", summary.tpot_mlperf_ms, withheld),
        itl_ms=None if "itl" in withheld else summary.itl_ms,
        itl_undefined_reason=summary.itl_undefined_reason or withheld.get("itl", ""),
        client_lag_ms=_reported_latency("client_lag", summary.client_lag_ms, withheld),
        stalls=_reported_stalls(summary.stalls, withheld),
        other_metrics=_reported_other_metrics(summary.other_metrics, withheld),
        percentiles=_reported_percentiles(summary.percentiles, withheld),
        # Tokens of the run, and latencies and tokens over time.
        tokens=_reported_tokens(summary.tokens, withheld),
        rack=None if are_tokens_withheld else summary.rack,  # has only rates of output tokens
        sessions=_reported_tasks(summary.sessions, withheld),
        drift=_reported_drift(summary),
        # The parts of the run.
        stages=_reported_parts(summary.stages, withheld),
        targets=_reported_targets(summary.targets, withheld),
        regions=_reported_targets(summary.regions, withheld),
        nodes=_reported_targets(summary.nodes, withheld),
        classes=_reported_parts(summary.classes, withheld),
        models=_reported_parts(summary.models, withheld),
        steps=_reported_parts(summary.steps, withheld),
    )


def _reported_parts(parts: Sequence[PartT], withheld: WithheldMetrics) -> tuple[PartT, ...]:
    """Return the summaries of parts of a run, such as its stages, without withheld metrics."""
    return tuple(
        msgspec.structs.replace(
            part,
            ttft_ms=_reported_latency("ttft", part.ttft_ms, withheld),
            tpot_ms=_reported_latency("tpot", part.tpot_ms, withheld),
            tokens=_reported_tokens(part.tokens, withheld),
        )
        for part in parts
    )


def _reported_targets(
    targets: Sequence[TargetSummary], withheld: WithheldMetrics
) -> tuple[TargetSummary, ...]:
    """Return the summaries of targets, regions or nodes, without withheld metrics."""
    reported_targets = _reported_parts(targets, withheld)
    if TOKENS not in withheld:
        return reported_targets

    # Besides `tokens`, a target has the token rate of the time in which it was in use.
    return tuple(
        msgspec.structs.replace(target, active_output_per_s=None) for target in reported_targets
    )


def _reported_latency(
    metric: str, distribution: Distribution, withheld: WithheldMetrics
) -> Distribution:
    """Return the distribution of a latency, without its statistics if the metric is withheld."""
    return distribution.without_statistics() if metric in withheld else distribution


def _reported_tokens(tokens: Tokens, withheld: WithheldMetrics) -> Tokens:
    """Return the tokens of a run or a part, without output tokens if these are withheld."""
    return token_usage.without_output_counts(tokens) if TOKENS in withheld else tokens


def _reported_stalls(stalls: Stalls, withheld: WithheldMetrics) -> Stalls:
    """Return the stalls of a run, without how many responses stalled if that is withheld."""
    if STALLS not in withheld:
        return stalls
    return msgspec.structs.replace(stalls, requests=None, share=None)


def _reported_tasks(tasks: Sessions | None, withheld: WithheldMetrics) -> Sessions | None:
    """Return the summary of tasks and conversations, without output tokens if withheld."""
    if tasks is None or TOKENS not in withheld:
        return tasks
    return msgspec.structs.replace(tasks, output_tokens=None)


def _reported_other_metrics(
    distributions: Mapping[str, Distribution], withheld: WithheldMetrics
) -> dict[str, Distribution]:
    """Return the distributions of the metrics that have no field of their own in a summary.

    Args:
        distributions: The distributions by name in summary.json, such as "e2e_per_token_ms".
        withheld: The withheld metrics, whose statistics are removed.
    """
    withheld_fields = _fields_of(withheld)
    return {
        field: distribution.without_statistics() if field in withheld_fields else distribution
        for field, distribution in distributions.items()
    }


def _reported_percentiles(
    percentiles: Mapping[str, dict[str, float]], withheld: WithheldMetrics
) -> dict[str, dict[str, float]]:
    """Return the percentiles that the user requested, without those of withheld metrics.

    Args:
        percentiles: The percentiles of each metric, by its name in summary.json, such as "ttft_ms".
        withheld: The withheld metrics.
    """
    withheld_fields = _fields_of(withheld)
    return {field: values for field, values in percentiles.items() if field not in withheld_fields}


def _fields_of(metrics: WithheldMetrics) -> set[str]:
    """Return the names of metrics in summary.json: "ttft_ms" for TTFT, which is in ms."""
    return {definition.field for definition in METRICS.available() if definition.name in metrics}


def _reported_drift(summary: Summary) -> Drift:
    """Return the change of metrics over time, without withheld metrics and withheld statistics."""
    reported = summary.drift
    for metric, withheld in summary.withheld_statistics.items():
        reported = drift.without_statistics(reported, metric, withheld.ranges)

    for metric in summary.withheld_metrics:
        reported = drift.without_statistics(reported, metric, uncertainty.STATISTICS)

    if TOKENS in summary.withheld_metrics:
        reported = drift.without_tokens(reported)

    return reported
