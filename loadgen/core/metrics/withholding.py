"""Removes from a summary the statistics that must not be shown.

Pure. A metric is *unsound* if no statistic of it can be trusted. Single statistics are *withheld*
if they are too uncertain (`uncertainty`). The outcomes of an SLO are removed if the run is not
valid.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from loadgen.core.metrics import drift, timing_evidence, uncertainty, untrusted_metrics
from loadgen.core.metrics.goodput import without_slo_result
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
    from loadgen.core.metrics.summary import Summary
    from loadgen.core.metrics.timing_evidence import TimingEvidence
    from loadgen.core.metrics.uncertainty import GapBounds, WithheldStatistics
    from loadgen.core.results.manifest import RunManifest


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
        """Return the metrics on which no term of an SLO can be decided, with the reason."""
        no_itl = {"itl": f"there is no ITL: {self.itl_absent}"} if self.itl_absent else {}
        uncertain_gaps = {
            term.metric: "it is too uncertain to be reported"
            for slo in manifest.slos
            for term in slo.terms
            if term.metric in pooled_metrics()
            and term.metric in self.withheld
            and quantiles.quantile_name(term.quantile) in self.withheld[term.metric].ranges
        }
        return no_itl | self.unsound | uncertain_gaps


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
    """
    limits = manifest.limits
    ranges = uncertainty.find_withheld(distributions, measured, gap_bounds, limits)
    by_first_event = "tpot" in ranges and uncertainty.is_tpot_limited_by_first_event(
        measured, distributions["tpot"], limits
    )
    withheld = timing_evidence.explain_withheld(ranges, evidence, by_first_event=by_first_event)
    shown = {
        metric: distribution.without(withheld[metric].ranges if metric in withheld else ())
        for metric, distribution in distributions.items()
    }
    itl_absent = itl_absent_reason(measured, distributions["inter_chunk"])
    if "inter_chunk" in withheld and not itl_absent:
        withheld["itl"] = withheld["inter_chunk"]
    unsound = _find_unsound(manifest, measured, evidence)
    partly = {metric: found for metric, found in withheld.items() if metric not in unsound}
    return ShownStatistics(shown, itl_absent, unsound, partly)


def _find_unsound(
    manifest: RunManifest, measured: MetricAccumulator, evidence: TimingEvidence
) -> dict[str, str]:
    """Return the metrics of which no statistic can be trusted, with the reason."""
    unsound = untrusted_metrics.token_count_conflicts(measured) | missing_metrics(manifest.slos)
    if manifest.stream:
        unsound |= untrusted_metrics.without_first_token(measured)
    if uncertainty.are_stalls_uncertain(measured, manifest.limits):
        unsound["stalls"] = timing_evidence.timing_reason(evidence)
    return unsound


_PARTS = ("stages", "targets", "regions", "nodes", "classes", "models", "steps")
_PARTS_WITH_SLO = ("stages", "targets", "regions", "nodes", "classes", "models")


def withhold(summary: Summary) -> Summary:
    """Return the summary without its unsound metrics, also those of its parts.

    Parts are the stages, targets, classes and so on, which have the same fields as the run.
    """
    summary = msgspec.structs.replace(summary, drift=_shown_drift(summary))
    unsound = summary.unsound
    if not unsound:
        return summary
    changes = _without_unsound(summary, unsound) | _changed_sections(summary, unsound)
    for field in _PARTS:
        changes[field] = tuple(
            msgspec.structs.replace(part, **_without_unsound(part, unsound))
            for part in getattr(summary, field)
        )
    return msgspec.structs.replace(summary, **changes)


def _changed_sections(summary: Summary, unsound: Mapping[str, str]) -> dict[str, Any]:
    """Return the sections that only the summary of a run has, without unsound metrics."""
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


def _without_unsound(part: Any, unsound: Mapping[str, str]) -> dict[str, Any]:
    """Return the changed fields of a summary, or of a part, without unsound metrics."""
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
    """Return the summary, without the outcomes of its SLOs if its verdict is not valid."""
    if summary.verdict.valid:
        return summary
    parts = {
        field: tuple(without_slo_result(part) for part in getattr(summary, field))
        for field in _PARTS_WITH_SLO
    }
    without_outcome: Summary = without_slo_result(summary)
    return msgspec.structs.replace(without_outcome, **parts)
