"""The evidence behind a cost or plan: one run, repeats of one run, or a capacity with the run that shows it.

Pure values; `inputs.py` reads them from folders.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from loadgen.metrics.summary import Summary
from loadgen.results.capacity import STILL_KEPT, Capacity


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """The evidence behind a figure. `summaries`: one run, or its repeats; with a capacity the run that shows it."""

    name: str
    folder: str
    summaries: tuple[Summary, ...]
    capacity: Capacity | None = None

    @property
    def summary(self) -> Summary:
        """The first summary, for fields that all repeats share."""
        return self.summaries[0]

    @property
    def valid(self) -> bool:
        return all(summary.verdict.valid for summary in self.summaries)

    @property
    def simulated(self) -> bool:
        return any(summary.target.simulated for summary in self.summaries)


def notes(evidence: Evidence) -> Iterator[str]:
    """Notes to show beside every figure from this evidence."""
    summaries = evidence.summaries
    if evidence.simulated:
        yield "SIMULATED: no real server was measured"
    if not evidence.valid:
        reasons = {reason for summary in summaries for reason in summary.verdict.reasons}
        yield "INVALID measurement: " + "; ".join(sorted(reasons)) + "; an invalid run has no good requests"
    if any(summary.goodput.met is False for summary in summaries):
        yield "the run behind the capacity missed its SLO" if evidence.capacity else "the SLO was missed at this load"
    if evidence.capacity is not None and evidence.capacity.lower_bound:
        yield (
            f"a lower bound: {evidence.capacity.bound_why or STILL_KEPT}. The capacity is at least this; a cost and a "
            "number of machines that follow from it are at most what stands here"
        )
    if summaries[0].goodput.met is None:
        yield "no SLO: nothing says which requests were good"
