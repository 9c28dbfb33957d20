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
from typing import TYPE_CHECKING, TypeVar

import msgspec

from loadgen.core import limits
from loadgen.core.metrics import drift, timing_evidence, token_usage, uncertainty
from loadgen.core.metrics.part_summaries import TargetSummary
from loadgen.core.metrics.reasons import format_reason
from loadgen.core.metrics.run_evidence import make_code
from loadgen.core.metrics.uncertainty import WithheldStatistics
from loadgen.core.slo import missing_metrics
from loadgen.core.stats import quantiles
from loadgen.core.stats.quantiles import Distribution
from loadgen.figures import METRICS, guarded, pooled_metrics

if TYPE_CHECKING:
    from collections.abc import Mapping

    from loadgen.core.metrics.accumulator import MetricAccumulator
    from loadgen.core.metrics.drift import Drift
    from loadgen.core.metrics.part_summaries import PartSummary
    from loadgen.core.metrics.sample_bounds import GapBounds
    from loadgen.core.metrics.summary import Summary
    from loadgen.core.metrics.timing_evidence import TimingEvidence
    from loadgen.core.results.manifest import RunManifest
    from loadgen.core.slo import Term

AnySummary = TypeVar("AnySummary", bound="Summary | PartSummary")


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
    withheld_metrics: dict[str, str]
    withheld_statistics: dict[str, WithheldStatistics]
    itl_undefined_reason: str

    def withheld_from_slos(self, manifest: RunManifest) -> dict[str, str]:
        """Return the metrics whose latency limits cannot be judged, with the reason for each.

        An SLO consists of terms, such as "the p99 of TTFT is at most 1 s". A metric or a quantile
        is withheld, which means not reported, if it is too uncertain.
        """
        reason_by_metric: dict[str, str] = {}
        if self.itl_undefined_reason:
            reason_by_metric["itl"] = f"ITL is not defined: {self.itl_undefined_reason}"

        reason_by_metric.update(self.withheld_metrics)

        for term in _list_gap_terms(manifest):
            if self._is_quantile_withheld(term):
                reason_by_metric[term.metric] = "it is too uncertain to be reported"

        return reason_by_metric

    def _is_quantile_withheld(self, term: Term) -> bool:
        """Return True if the quantile that a term of an SLO limits, such as p99, is withheld."""
        withheld = self.withheld_statistics.get(term.metric)
        if withheld is None:
            return False

        limited_quantile = quantiles.quantile_name(term.quantile)
        return limited_quantile in withheld.ranges


def _list_gap_terms(manifest: RunManifest) -> list[Term]:
    """Return the SLO terms that limit the gaps between output events."""
    gap_metrics = pooled_metrics()
    terms = [term for slo in manifest.slos for term in slo.terms]
    return [term for term in terms if term.metric in gap_metrics]


def select_statistics(measured: MeasuredStatistics) -> ReportedStatistics:
    """Decide which of the measured statistics the run reports, and which it withholds."""
    withheld_metrics = _find_withheld_metrics(measured)
    withheld_statistics = _find_withheld_statistics(measured)

    reported_distributions = dict(measured.distributions)
    for metric, withheld in withheld_statistics.items():
        reported_distributions[metric] = measured.distributions[metric].without(withheld.ranges)

    # The time between tokens (ITL), where it can be measured, is the gap between output events.
    itl_undefined_reason = token_usage.itl_undefined_reason(
        measured.requests, measured.distributions["inter_chunk"]
    )
    has_itl = not itl_undefined_reason
    withheld_of_gaps = withheld_statistics.get("inter_chunk")
    if has_itl and withheld_of_gaps is not None:
        withheld_statistics["itl"] = withheld_of_gaps

    # If a metric is withheld as a whole, its single statistics are not listed.
    for metric in withheld_metrics:
        withheld_statistics.pop(metric, None)

    return ReportedStatistics(
        distributions=reported_distributions,
        withheld_metrics=withheld_metrics,
        withheld_statistics=withheld_statistics,
        itl_undefined_reason=itl_undefined_reason,
    )


# -- withheld statistics ---------------------------------------------------------------------------


def _find_withheld_statistics(measured: MeasuredStatistics) -> dict[str, WithheldStatistics]:
    """Return the statistics of each metric that are too uncertain to report, with the reason."""
    run_limits = measured.manifest.limits
    ranges_by_metric = uncertainty.find_uncertain_statistics(
        measured.distributions, measured.requests, measured.gap_bounds, run_limits
    )
    timing_reason = timing_evidence.explain_uncertain_times(measured.timing_evidence)
    reason_by_metric = dict.fromkeys(ranges_by_metric, timing_reason)

    # TPOT is a time divided by a number of tokens, which may be uncertain instead of the time.
    if "tpot" in ranges_by_metric:
        is_uncertain_by_timestamps = uncertainty.is_tpot_uncertain_by_timestamps(
            measured.requests, measured.distributions["tpot"], run_limits
        )
        if not is_uncertain_by_timestamps:
            reason_by_metric["tpot"] = format_reason(make_code("first_event_uncertain"))

    return {
        metric: WithheldStatistics(ranges=ranges, reason=reason_by_metric[metric])
        for metric, ranges in ranges_by_metric.items()
    }


# -- withheld metrics ------------------------------------------------------------------------------


def _find_withheld_metrics(measured: MeasuredStatistics) -> dict[str, str]:
    """Return the metrics that are not reported at all, and the reason for each.

    If a metric has several reasons, the last one is returned.
    """
    requests = measured.requests
    manifest = measured.manifest

    reason_by_metric = _metrics_of_wrong_token_counts(requests)

    metrics_of_missing_plugins = missing_metrics(manifest.slos)
    reason_by_metric.update(metrics_of_missing_plugins)

    if manifest.stream:
        metrics_of_hidden_first_tokens = _metrics_of_hidden_first_tokens(requests)
        reason_by_metric.update(metrics_of_hidden_first_tokens)

    # If kernel times are missing, the stalls are among the metrics without kernel times.
    metrics_without_kernel_times = _metrics_of_missing_kernel_times(requests, manifest)
    if metrics_without_kernel_times:
        reason_by_metric.update(metrics_without_kernel_times)
    elif uncertainty.are_stalls_uncertain(requests, manifest.limits):
        explanation = timing_evidence.explain_uncertain_times(measured.timing_evidence)
        reason_by_metric["stalls"] = explanation

    return reason_by_metric


def _metrics_of_wrong_token_counts(requests: MetricAccumulator) -> dict[str, str]:
    """Return the metrics that use token counts, with the reason, if many counts are wrong.

    A count is wrong if it is lower than the number of output events (understated), or higher than
    the number of requested tokens (overstated).
    """
    checked_counts = requests.sum("exact_counts")
    wrong_counts = requests.sum("conflicting_counts")
    are_few_wrong = wrong_counts <= limits.CONTRADICTING_SHARE * checked_counts
    if are_few_wrong:
        return {}

    understated_counts = requests.sum("understated_counts")
    reason = make_code(
        "counts_contradict",
        contradicting=wrong_counts,
        answers=checked_counts,
        share=wrong_counts / checked_counts,
        understated=understated_counts,
        overstated=wrong_counts - understated_counts,
        limit=limits.CONTRADICTING_SHARE,
    )
    metrics_that_use_counts = ("tokens", *guarded(reason.code))
    return dict.fromkeys(metrics_that_use_counts, format_reason(reason))


def _metrics_of_hidden_first_tokens(requests: MetricAccumulator) -> dict[str, str]:
    """Return the metrics that need the time of the first token, if many responses have none.

    A response has no first token if the server counted tokens, but no event carried a token. The
    result has the reason for each metric. It is empty if few responses are such.
    """
    ok_responses = requests.sum("ok")
    responses_without_output = requests.sum("tpot_no_output")
    are_few_without_output = responses_without_output <= limits.UNSEEN_OUTPUT * ok_responses
    if are_few_without_output:
        return {}

    reason = make_code(
        "output_unseen",
        unseen=responses_without_output,
        answers=ok_responses,
        share=responses_without_output / ok_responses,
        limit=limits.UNSEEN_OUTPUT,
    )
    metrics_of_first_token = guarded(reason.code)
    return dict.fromkeys(metrics_of_first_token, format_reason(reason))


def _metrics_of_missing_kernel_times(
    requests: MetricAccumulator, manifest: RunManifest
) -> dict[str, str]:
    """Return the metrics that need kernel timestamps, with the reason, if there are none.

    The kernel stamps received packets on Linux. Without a stamp, a client does not know how late it
    read a response.
    """
    has_kernel_times = requests.sum("kernel_timestamps") > 0
    has_first_tokens = requests.sum("with_first_token") > 0

    # The manifest names the implementation that read the sockets. A simulation has no sockets.
    is_simulated = manifest.host.hot_path == ""
    are_kernel_times_missing = has_first_tokens and not has_kernel_times and not is_simulated
    if not are_kernel_times_missing:
        return {}

    reason = make_code("no_kernel_times")
    metrics_of_kernel_times = (*guarded(reason.code), "stalls")
    return dict.fromkeys(metrics_of_kernel_times, format_reason(reason))


# -- removal from the summary ----------------------------------------------------------------------


_PART_FIELDS = ("stages", "targets", "regions", "nodes", "classes", "models", "steps")
"""The fields of a summary that list the summaries of parts of the run."""


def without_withheld_values(summary: Summary) -> Summary:
    """Return a summary without withheld values, for the run and for each of its parts.

    A value is withheld, which means not reported, if it is too uncertain. A part is, for example,
    the requests of one target.
    """
    summary = msgspec.structs.replace(summary, drift=_reported_drift(summary))

    withheld_metrics = summary.withheld_metrics
    if not withheld_metrics:
        return summary

    summary = _without_metrics_of_parts(summary, withheld_metrics)
    summary = _without_metrics(summary, withheld_metrics)
    return _without_metrics_of_run(summary, withheld_metrics)


def _without_metrics_of_parts(summary: Summary, withheld_metrics: Mapping[str, str]) -> Summary:
    """Return the summary of a run without some metrics in the summaries of its parts.

    Args:
        summary: The summary of a run.
        withheld_metrics: The metrics to remove, with the reason for each.
    """
    reported_parts: dict[str, tuple[PartSummary, ...]] = {}
    for field in _PART_FIELDS:
        parts: tuple[PartSummary, ...] = getattr(summary, field)
        reported_parts[field] = tuple(_without_metrics(part, withheld_metrics) for part in parts)

    return msgspec.structs.replace(summary, **reported_parts)


def _without_metrics(summary: AnySummary, withheld_metrics: Mapping[str, str]) -> AnySummary:
    """Return the summary of a run, or of a part of a run, without some metrics.

    Args:
        summary: The summary of a run, stage, target, class or other part.
        withheld_metrics: The metrics to remove, with the reason for each.
    """
    changed_fields: dict[str, object] = {}

    # A latency such as "ttft" has a field such as `ttft_ms`. Some metrics have no field.
    possible_fields = {f"{metric}_ms" for metric in withheld_metrics}
    for field in possible_fields.intersection(summary.__struct_fields__):
        distribution = getattr(summary, field)
        if isinstance(distribution, Distribution):
            changed_fields[field] = distribution.without_statistics()

    if "tokens" in withheld_metrics:
        changed_fields["tokens"] = token_usage.without_output_counts(summary.tokens)

        # The summary of a target has another token rate, which is not in the field `tokens`.
        if isinstance(summary, TargetSummary):
            changed_fields["active_output_per_s"] = None

    return msgspec.structs.replace(summary, **changed_fields)


def _without_metrics_of_run(summary: Summary, withheld_metrics: Mapping[str, str]) -> Summary:
    """Return the summary of a run without some metrics in fields that summaries of parts lack.

    Args:
        summary: The summary of a run.
        withheld_metrics: The metrics to remove, with the reason for each.
    """
    withheld_fields = {f"{metric}_ms" for metric in withheld_metrics}
    reported_percentiles = {
        field: percentiles
        for field, percentiles in summary.percentiles.items()
        if field not in withheld_fields
    }
    summary = msgspec.structs.replace(
        summary,
        other_metrics=_without_other_metrics(summary.other_metrics, withheld_metrics),
        percentiles=reported_percentiles,
    )

    if "itl" in withheld_metrics:
        summary = _without_itl(summary, withheld_reason=withheld_metrics["itl"])
    if "stalls" in withheld_metrics:
        summary = _without_stalls(summary)
    if "tokens" in withheld_metrics:
        summary = _without_tokens_of_run(summary)

    return summary


def _without_itl(summary: Summary, withheld_reason: str) -> Summary:
    """Return the summary of a run without the time between tokens (ITL).

    Args:
        summary: The summary of a run.
        withheld_reason: Why ITL is not reported, unless the summary says why it has none.
    """
    reason = summary.itl_undefined_reason or withheld_reason
    return msgspec.structs.replace(summary, itl_ms=None, itl_undefined_reason=reason)


def _without_stalls(summary: Summary) -> Summary:
    """Return the summary of a run without the number and the share of responses that stalled."""
    stalls = msgspec.structs.replace(summary.stalls, requests=None, share=None)
    return msgspec.structs.replace(summary, stalls=stalls)


def _without_other_metrics(
    distributions: Mapping[str, Distribution], withheld_metrics: Mapping[str, str]
) -> dict[str, Distribution]:
    """Return the less common metrics of a run, without the statistics of withheld metrics.

    Args:
        distributions: The distribution of each metric, by the field of the metric.
        withheld_metrics: The names of the withheld metrics, with the reason for each.
    """
    reported_by_field = dict(distributions)
    for definition in METRICS.available():
        field = definition.field
        is_withheld = definition.name in withheld_metrics
        if is_withheld and field in reported_by_field:
            reported_by_field[field] = reported_by_field[field].without_statistics()

    return reported_by_field


def _without_tokens_of_run(summary: Summary) -> Summary:
    """Return the summary of a run without output tokens outside of its field `tokens`."""
    # The tasks of agents and the conversations are called sessions.
    sessions = summary.sessions
    if sessions is not None:
        sessions = msgspec.structs.replace(sessions, output_tokens=None)

    return msgspec.structs.replace(
        summary,
        drift=drift.without_tokens(summary.drift),
        rack=None,  # describes only rates of output tokens
        sessions=sessions,
    )


def _reported_drift(summary: Summary) -> Drift:
    """Return the drift of a run without withheld metrics and without withheld statistics."""
    reported = summary.drift
    for metric, withheld in summary.withheld_statistics.items():
        reported = drift.without_statistics(reported, metric, withheld.ranges)

    for metric in summary.withheld_metrics:
        reported = drift.without_statistics(reported, metric, uncertainty.STATISTICS)

    return reported
