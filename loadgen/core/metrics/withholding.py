"""Removes from a summary the statistics that must not be shown.

Pure. A metric is *unsound* if no statistic of it can be trusted. Single statistics are *withheld*
if they are too uncertain (`uncertainty`). The outcomes of an SLO are removed if the run is not
valid.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from loadgen.core.metrics import drift, timing_evidence, uncertainty, untrusted_metrics
from loadgen.core.metrics.goodput import without_slo_outcomes
from loadgen.core.metrics.part_summaries import TargetSummary
from loadgen.core.metrics.token_usage import itl_absent_reason, without_output_counts
from loadgen.core.slo import missing_metrics
from loadgen.core.stats import quantiles
from loadgen.core.stats.quantiles import Distribution
from loadgen.figures import METRICS, pooled_metrics

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from loadgen.core.limits import ValidityLimits
    from loadgen.core.metrics.accumulator import MetricAccumulator
    from loadgen.core.metrics.drift import Drift
    from loadgen.core.metrics.part_summaries import PartSummary
    from loadgen.core.metrics.summary import Summary
    from loadgen.core.metrics.timing_evidence import TimingEvidence
    from loadgen.core.metrics.uncertainty import GapBounds, RangesMs, WithheldStatistics
    from loadgen.core.results.manifest import RunManifest
    from loadgen.core.slo import Term


class ReportedStatistics(NamedTuple):
    """The distributions that a run reports, and why other statistics are not reported.

    Attributes:
        distributions: The distribution of each metric, without withheld statistics.
        itl_absent: Why there is no ITL, "" if there is one.
        unsound: Metrics of which no statistic is reported, with the reason.
        withheld: The statistics of other metrics that are withheld.
    """

    distributions: dict[str, Distribution]
    itl_absent: str
    unsound: dict[str, str]
    withheld: dict[str, WithheldStatistics]

    def undecided_metrics(self, manifest: RunManifest) -> dict[str, str]:
        """Return the metrics on which no SLO term can be decided, with the reason for each.

        They are ITL if this run has none, the unsound metrics, and gaps between events whose
        limited quantile is withheld.
        """
        reason_by_metric = {}
        if self.itl_absent:
            reason_by_metric["itl"] = f"ITL is not defined: {self.itl_absent}"

        reason_by_metric.update(self.unsound)
        for term in _terms_on_gaps(manifest):
            if self._is_withheld(term):
                reason_by_metric[term.metric] = "it is too uncertain to be reported"

        return reason_by_metric

    def _is_withheld(self, term: Term) -> bool:
        """Return True if the quantile that an SLO term is about is withheld."""
        withheld = self.withheld.get(term.metric)
        return withheld is not None and quantiles.quantile_name(term.quantile) in withheld.ranges


def _terms_on_gaps(manifest: RunManifest) -> list[Term]:
    """Return the SLO terms on the gaps between events, which are one sample of all requests."""
    metrics_of_gaps = pooled_metrics()
    terms = [term for slo in manifest.slos for term in slo.terms]
    return [term for term in terms if term.metric in metrics_of_gaps]


def select_statistics(
    manifest: RunManifest,
    measured: MetricAccumulator,
    distributions: Mapping[str, Distribution],
    gap_bounds: GapBounds | None,
    evidence: TimingEvidence,
) -> ReportedStatistics:
    """Return the statistics that the run reports, and why it does not report others.

    There are three reasons not to report a statistic, such as the p99 of TTFT:

    - The metric is unsound: none of its statistics can be trusted.
    - The statistic is withheld: errors of timestamps or token counts may change it too much.
    - It belongs to the inter-token latency (ITL), which is absent because events carry several
      tokens.

    Args:
        manifest: The manifest of the run.
        measured: All measured requests.
        distributions: The distribution of each metric, before anything is withheld.
        gap_bounds: The bounds of the gaps between events, None if all gaps are certain.
        evidence: What is known of the cause of uncertain timestamps.
    """
    unsound = _find_unsound_metrics(manifest, measured, evidence)
    itl_absent = itl_absent_reason(measured, distributions["inter_chunk"])

    uncertain_ranges = uncertainty.find_uncertain_statistics(
        distributions, measured, gap_bounds, manifest.limits
    )
    is_tpot_uncertain_by_tokens = _is_tpot_uncertain_by_tokens_only(
        uncertain_ranges, measured, distributions["tpot"], manifest.limits
    )
    withheld = timing_evidence.explain_withheld(
        uncertain_ranges, evidence, is_tpot_uncertain_by_tokens=is_tpot_uncertain_by_tokens
    )
    if not itl_absent and "inter_chunk" in withheld:
        # ITL is then the gap between events, whose metric is "inter_chunk".
        withheld["itl"] = withheld["inter_chunk"]

    return ReportedStatistics(
        distributions=_without_statistics(distributions, uncertain_ranges),
        itl_absent=itl_absent,
        unsound=unsound,
        withheld={metric: reason for metric, reason in withheld.items() if metric not in unsound},
    )


def _without_statistics(
    distributions: Mapping[str, Distribution], uncertain_ranges: Mapping[str, RangesMs]
) -> dict[str, Distribution]:
    """Return the distribution of each metric without its statistics that are too uncertain."""
    return {
        metric: distribution.without(uncertain_ranges.get(metric, ()))
        for metric, distribution in distributions.items()
    }


def _is_tpot_uncertain_by_tokens_only(
    uncertain_ranges: Mapping[str, RangesMs],
    measured: MetricAccumulator,
    tpot: Distribution,
    limits: ValidityLimits,
) -> bool:
    """Return True if TPOT is too uncertain only because of the token counts.

    TPOT is a time divided by a number of tokens. The time is uncertain by the errors of timestamps,
    and the number is uncertain if the server does not report the tokens of the first event.

    Args:
        uncertain_ranges: The uncertain statistics of each metric. It has no "tpot" if TPOT is
            certain.
        measured: All measured requests.
        tpot: The distribution of TPOT.
        limits: The shares by which statistics may be off.
    """
    if "tpot" not in uncertain_ranges:
        return False
    return not uncertainty.is_tpot_uncertain_by_timestamps(measured, tpot, limits)


def _find_unsound_metrics(
    manifest: RunManifest, measured: MetricAccumulator, evidence: TimingEvidence
) -> dict[str, str]:
    """Return the metrics of which no statistic can be trusted, with the reason for each.

    - Metrics of tokens, if the token counts conflict with the responses.
    - Metrics of a package that is not installed here, which an SLO limits.
    - Metrics of the first token, if streams did not show when it came.
    - Metrics of kernel timestamps, if there are none.
    - Stalls, if the errors of timestamps may have caused them.
    """
    unsound = untrusted_metrics.find_untrusted_token_metrics(measured)
    unsound.update(missing_metrics(manifest.slos))
    if manifest.stream:
        unsound.update(untrusted_metrics.find_untrusted_first_token_metrics(measured))

    untrusted_by_kernel = untrusted_metrics.find_untrusted_kernel_time_metrics(measured, manifest)
    if untrusted_by_kernel:
        unsound.update(untrusted_by_kernel)  # these include the stalls
    elif uncertainty.are_stalls_uncertain(measured, manifest.limits):
        unsound["stalls"] = timing_evidence.explain_uncertain_times(evidence)

    return unsound


_PARTS = ("stages", "targets", "regions", "nodes", "classes", "models", "steps")
"""The fields of a summary that list the summaries of parts of the run."""
_PARTS_WITH_SLO = ("stages", "targets", "regions", "nodes", "classes", "models")
"""Those of the fields above whose parts have the outcomes of SLOs."""


def withhold_unsound_metrics(summary: Summary) -> Summary:
    """Return the summary without the metrics that its field `unsound` lists.

    The metrics are removed from the run and from its stages, targets, classes and other parts. The
    drift, which is how latencies change over time, also loses the single statistics that the field
    `withheld` lists.
    """
    summary = msgspec.structs.replace(summary, drift=_reported_drift(summary))
    unsound = summary.unsound
    if not unsound:
        return summary

    changes: dict[str, object] = {}
    # A run has the fields that its parts have, such as `ttft_ms`, and some that only a run has.
    changes.update(_withhold_in_part(summary, unsound))
    changes.update(_withhold_in_run(summary, unsound))

    for field in _PARTS:
        parts: tuple[PartSummary, ...] = getattr(summary, field)
        changes[field] = tuple(
            msgspec.structs.replace(part, **_withhold_in_part(part, unsound)) for part in parts
        )

    return msgspec.structs.replace(summary, **changes)


def _withhold_in_run(summary: Summary, unsound: Mapping[str, str]) -> dict[str, object]:
    """Return the fields that only the summary of a run has and that change, with the new values.

    Everything that is computed from an unsound metric is removed.

    Args:
        summary: The summary of the run.
        unsound: The unsound metrics, with the reason for each.
    """
    changes: dict[str, object] = {
        "other_metrics": _without_other_unsound_metrics(summary, unsound),
        "percentiles": _without_unsound_percentiles(summary, unsound),
    }
    if "itl" in unsound:
        changes["itl_ms"] = None
        changes["itl_absent"] = summary.itl_absent or unsound["itl"]
    if "stalls" in unsound:
        changes["stalls"] = msgspec.structs.replace(summary.stalls, requests=None, share=None)
    if "tokens" in unsound:
        changes.update(_withhold_tokens_in_run(summary))

    return changes


def _withhold_tokens_in_run(summary: Summary) -> dict[str, object]:
    """Return the fields of a run that have numbers of output tokens, without these numbers."""
    changes: dict[str, object] = {
        "drift": drift.without_tokens(summary.drift),
        "rack": None,  # has output rates, and nothing else
    }
    if summary.sessions is not None:
        changes["sessions"] = msgspec.structs.replace(summary.sessions, output_tokens=None)
    return changes


def _without_unsound_percentiles(
    summary: Summary, unsound: Mapping[str, str]
) -> dict[str, dict[str, float]]:
    """Return the percentiles that the user requested, without those of unsound metrics."""
    unsound_fields = {f"{metric}_ms" for metric in unsound}
    return {
        field: percentiles
        for field, percentiles in summary.percentiles.items()
        if field not in unsound_fields
    }


def _without_other_unsound_metrics(
    summary: Summary, unsound: Mapping[str, str]
) -> dict[str, Distribution]:
    """Return `summary.other_metrics` with an empty distribution for each unsound metric.

    They are the metrics that have no field of the summary to themselves, by name with unit.
    """
    unsound_fields = {
        definition.field for definition in METRICS.available() if definition.name in unsound
    }
    distributions = dict(summary.other_metrics)
    for field in unsound_fields.intersection(distributions):
        distributions[field] = distributions[field].withheld()
    return distributions


def _withhold_in_part(part: Summary | PartSummary, unsound: Mapping[str, str]) -> dict[str, object]:
    """Return the summary fields that change if unsound metrics are removed, with the new values.

    For example, an unsound TTFT changes the field "ttft_ms" to an empty distribution.

    Args:
        part: The summary of a run, or of a part of it, such as a stage or a target.
        unsound: The unsound metrics, with the reason for each.
    """
    changes: dict[str, object] = {}
    for field, distribution in _distributions_of(part, unsound).items():
        changes[field] = distribution.withheld()

    if "tokens" in unsound:
        changes["tokens"] = without_output_counts(part.tokens)
        if isinstance(part, TargetSummary):
            changes["own_output_per_s"] = None  # only the summary of a target has this field

    return changes


def _distributions_of(
    part: Summary | PartSummary, metrics: Iterable[str]
) -> dict[str, Distribution]:
    """Return the distributions of some metrics in a summary, by field.

    The field of a metric is its name with the unit, such as `ttft_ms`. Metrics that the summary
    does not have are left out.
    """
    distributions = {}
    for metric in metrics:
        field = f"{metric}_ms"
        value = getattr(part, field, None)
        if isinstance(value, Distribution):
            distributions[field] = value
    return distributions


def _reported_drift(summary: Summary) -> Drift:
    """Return the drift of a run without withheld statistics and without unsound metrics."""
    reported = summary.drift
    for metric, withheld in summary.withheld.items():
        reported = drift.without_statistics(reported, metric, withheld.ranges)
    for metric in summary.unsound:
        reported = drift.without_statistics(reported, metric, uncertainty.STATISTICS)
    return reported


def without_outcomes_if_invalid(summary: Summary) -> Summary:
    """Return the summary, without the outcomes of its SLOs if its verdict is not valid.

    An outcome is whether an SLO is met. An invalid measurement shows neither that it is met nor
    that it is missed. The outcomes of the stages, targets and other parts are removed too.
    """
    if summary.verdict.valid:
        return summary

    parts_by_field = {}
    for field in _PARTS_WITH_SLO:
        parts = getattr(summary, field)
        parts_by_field[field] = tuple(without_slo_outcomes(part) for part in parts)

    return msgspec.structs.replace(without_slo_outcomes(summary), **parts_by_field)
