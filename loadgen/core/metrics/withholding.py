"""Removes from a summary the statistics that must not be shown.

Pure. A metric is *unsound* if no statistic of it can be trusted. Single statistics are *withheld*
if they are too uncertain (`uncertainty`). The outcomes of an SLO are removed if the run is not
valid.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

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
    from collections.abc import Mapping

    from loadgen.core.metrics.accumulator import MetricAccumulator
    from loadgen.core.metrics.drift import Drift
    from loadgen.core.metrics.part_summaries import PartSummary
    from loadgen.core.metrics.summary import Summary
    from loadgen.core.metrics.timing_evidence import TimingEvidence
    from loadgen.core.metrics.uncertainty import GapBounds, WithheldStatistics
    from loadgen.core.results.manifest import RunManifest
    from loadgen.core.slo import Term


class ShownStatistics(NamedTuple):
    """The distributions of a run that are shown, and why others are not.

    Attributes:
        distributions: The distribution of each metric, without withheld statistics.
        itl_absent: Why there is no ITL, "" if there is one.
        unsound: Metrics of which no statistic is shown, with the reason.
        withheld: The statistics of other metrics that are withheld.
    """

    distributions: dict[str, Distribution]
    itl_absent: str
    unsound: dict[str, str]
    withheld: dict[str, WithheldStatistics]

    def undecided_metrics(self, manifest: RunManifest) -> dict[str, str]:
        """Return the metrics on which no term of an SLO can be decided, with the reason for each.

        They are ITL if there is none, unsound metrics, and metrics of pooled gaps for which an SLO
        asks for a quantile that is withheld.
        """
        undecided = {}
        if self.itl_absent:
            undecided["itl"] = f"ITL is not defined: {self.itl_absent}"
        undecided |= self.unsound
        for slo in manifest.slos:
            for term in slo.terms:
                if term.metric in pooled_metrics() and self._is_withheld(term):
                    undecided[term.metric] = "it is too uncertain to be reported"
        return undecided

    def _is_withheld(self, term: Term) -> bool:
        """Return True if the quantile that an SLO term is about is withheld."""
        withheld = self.withheld.get(term.metric)
        return withheld is not None and quantiles.quantile_name(term.quantile) in withheld.ranges


def select_statistics(
    manifest: RunManifest,
    measured: MetricAccumulator,
    distributions: Mapping[str, Distribution],
    gap_bounds: GapBounds | None,
    evidence: TimingEvidence,
) -> ShownStatistics:
    """Return the distributions without the statistics that are too uncertain, and the reasons.

    A statistic is too uncertain if its range, by the errors of timestamps and token counts, is wide
    against its value. A metric is unsound if no statistic of it can be trusted.

    Args:
        manifest: The manifest of the run.
        measured: All measured requests.
        distributions: The distribution of each metric, before anything is withheld.
        gap_bounds: The bounds of the gaps between events, None if all gaps are certain.
        evidence: What is known of the cause of uncertain timestamps.
    """
    ranges = uncertainty.find_uncertain_statistics(
        distributions, measured, gap_bounds, manifest.limits
    )
    # If the size of first events were known, TPOT would be certain enough.
    is_first_event_to_blame = "tpot" in ranges and uncertainty.would_first_event_make_tpot_certain(
        measured, distributions["tpot"], manifest.limits
    )
    withheld = timing_evidence.explain_withheld(
        ranges, evidence, is_first_event_to_blame=is_first_event_to_blame
    )
    shown = {
        metric: distribution.without(withheld[metric].ranges if metric in withheld else ())
        for metric, distribution in distributions.items()
    }
    itl_absent = itl_absent_reason(measured, distributions["inter_chunk"])
    if "inter_chunk" in withheld and not itl_absent:
        withheld["itl"] = withheld["inter_chunk"]
    unsound = _find_unsound_metrics(manifest, measured, evidence)
    for metric in unsound:
        withheld.pop(metric, None)  # all of its statistics are withheld, for another reason
    return ShownStatistics(shown, itl_absent, unsound, withheld)


def _find_unsound_metrics(
    manifest: RunManifest, measured: MetricAccumulator, evidence: TimingEvidence
) -> dict[str, str]:
    """Return the metrics of which no statistic can be trusted, with the reason for each.

    They rest on token counts that conflict with the responses, are not available in this
    installation, need first tokens that the stream did not show, need timestamps of the kernel
    where there are none, or are stalls that the errors of timestamps may have caused.
    """
    unsound = untrusted_metrics.find_token_count_conflicts(measured)
    unsound |= missing_metrics(manifest.slos)
    if manifest.stream:
        unsound |= untrusted_metrics.find_missing_first_tokens(measured)
    without_kernel_times = untrusted_metrics.find_metrics_of_kernel_times(measured, manifest)
    unsound |= without_kernel_times
    if not without_kernel_times and uncertainty.are_stalls_uncertain(measured, manifest.limits):
        unsound["stalls"] = timing_evidence.explain_uncertain_times(evidence)
    return unsound


_PARTS = ("stages", "targets", "regions", "nodes", "classes", "models", "steps")
_PARTS_WITH_SLO = ("stages", "targets", "regions", "nodes", "classes", "models")


def withhold_unsound_metrics(summary: Summary) -> Summary:
    """Return the summary without the metrics that it lists as unsound.

    They are removed from the run, from the drift, and from stages, targets, classes and other
    parts, which have the same fields as the run. The drift also loses withheld statistics.
    """
    summary = msgspec.structs.replace(summary, drift=_shown_drift(summary))
    unsound = summary.unsound
    if not unsound:
        return summary
    changes = _withhold_in_part(summary, unsound) | _withhold_in_run(summary, unsound)
    for field in _PARTS:
        changes[field] = tuple(
            msgspec.structs.replace(part, **_withhold_in_part(part, unsound))
            for part in getattr(summary, field)
        )
    return msgspec.structs.replace(summary, **changes)


def _withhold_in_run(summary: Summary, unsound: Mapping[str, str]) -> dict[str, Any]:
    """Return the changes of fields that only the summary of a run has, not that of a part.

    Args:
        summary: The summary.
        unsound: The unsound metrics, with the reason for each.

    Returns:
        The new value of each changed field, without the unsound metrics.
    """
    unsound_fields = {f"{metric}_ms" for metric in unsound}
    changes: dict[str, Any] = {
        "figures": _without_unsound_figures(summary, unsound),
        "percentiles": {
            field: percentiles
            for field, percentiles in summary.percentiles.items()
            if field not in unsound_fields
        },
    }
    if "itl" in unsound:
        changes["itl_ms"] = None
        changes["itl_absent"] = summary.itl_absent or unsound["itl"]
    if "stalls" in unsound:
        changes["stalls"] = msgspec.structs.replace(summary.stalls, requests=None, share=None)
    if "tokens" in unsound:
        changes["drift"] = drift.without_tokens(summary.drift)
        changes["rack"] = None
        if summary.sessions is not None:
            changes["sessions"] = msgspec.structs.replace(summary.sessions, output_tokens=None)
    return changes


def _without_unsound_figures(
    summary: Summary, unsound: Mapping[str, str]
) -> dict[str, Distribution]:
    """Return the block `figures` without the statistics of unsound metrics."""
    unsound_fields = {
        definition.field for definition in METRICS.available() if definition.name in unsound
    }
    return {
        field: distribution.withheld() if field in unsound_fields else distribution
        for field, distribution in summary.figures.items()
    }


def _withhold_in_part(part: Summary | PartSummary, unsound: Mapping[str, str]) -> dict[str, Any]:
    """Return the changes of fields that the summaries of a run and of its parts have in common.

    Args:
        part: The summary of the run, or of a stage, target, class or other part.
        unsound: The unsound metrics, with the reason for each.

    Returns:
        The new value of each changed field: distributions of unsound metrics without statistics,
        and tokens without counts if these cannot be trusted.
    """
    changes: dict[str, Any] = {}
    for metric in unsound:
        distribution = getattr(part, f"{metric}_ms", None)
        if isinstance(distribution, Distribution):
            changes[f"{metric}_ms"] = distribution.withheld()
    if "tokens" in unsound:
        changes["tokens"] = without_output_counts(part.tokens)
        if isinstance(part, TargetSummary):
            changes["own_output_per_s"] = None
    return changes


def _shown_drift(summary: Summary) -> Drift:
    """Return the drift of a run without the statistics that are withheld."""
    shown = summary.drift
    for metric, withheld in summary.withheld.items():
        shown = drift.without_statistics(shown, metric, withheld.ranges)
    for metric in summary.unsound:
        shown = drift.without_statistics(shown, metric, uncertainty.STATISTICS)
    return shown


def without_outcomes_if_invalid(summary: Summary) -> Summary:
    """Return the summary, without the outcomes of its SLOs if its verdict is not valid.

    An invalid measurement shows neither that an SLO is met nor that it is missed.
    """
    if summary.verdict.valid:
        return summary
    parts = {
        field: tuple(without_slo_outcomes(part) for part in getattr(summary, field))
        for field in _PARTS_WITH_SLO
    }
    return msgspec.structs.replace(without_slo_outcomes(summary), **parts)
