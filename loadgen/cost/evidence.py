"""The evidence behind a cost or plan: one run, repeats of one run, or a capacity with the run that shows it.

Pure values; `inputs.py` reads them from folders.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from loadgen.metrics.summary import Summary
from loadgen.results.capacity import STILL_KEPT, Capacity


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """The evidence behind a figure. `summaries`: one run, or its repeats; with a capacity the run that shows it.

    `at_once`: an Offline run, or another whose requests were all due at once: its rates are those of the whole run,
    because no time passed in which load was offered. `lowered_from_per_s`: what the capacity file of an earlier version
    gave as the rate, where its run was offered less.
    """

    name: str
    folder: str
    summaries: tuple[Summary, ...]
    capacity: Capacity | None = None
    at_once: bool = False
    lowered_from_per_s: float | None = None

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
    if any(summary.goodput.undecided for summary in summaries):
        yield "the SLO is undecided at this load: its figures are withheld, or too many requests unfinished (--grace)"
    if evidence.lowered_from_per_s is not None and evidence.capacity is not None:
        yield (
            f"capacity.json says {evidence.lowered_from_per_s:.4g}/s, without tokens (an earlier version, or by hand); "
            f"its run was in fact offered {evidence.capacity.rate_per_s:.4g}/s, and no more than that is used"
        )
    if evidence.capacity is not None and evidence.capacity.method == "search" and evidence.capacity.confirmed is False:
        yield "the search ended before a confirmation: a probe at full length is the evidence"
    if evidence.at_once:
        yield (
            "Offline: everything was due at once, without a limit on latency; rates are over the whole run. Under a "
            "limit the same machines carry less"
        )
    elif not summaries[0].goodput.has_slo:
        yield "no SLO: nothing says which requests were good"


def own_target(summary: Summary) -> Summary:
    """The summary without the tokens and bytes of steps at endpoints of their own, which have prices of their own."""
    apart = [step for step in summary.steps if step.targets]
    if not apart:
        return summary
    tokens, sent = summary.tokens, summary.bytes

    def without(name: str) -> float | int | None:
        values = [getattr(step.tokens, name) for step in apart]
        whole = getattr(tokens, name)
        return None if whole is None else whole - sum(value or 0 for value in values)

    names = ("input", "cached", "output", "failed_input", "failed_output", "total_per_s", "steady_total_per_s")
    tokens = msgspec.structs.replace(tokens, **{name: without(name) for name in names})
    received = sent.received - sum(step.bytes.received for step in apart)
    return msgspec.structs.replace(summary, tokens=tokens, bytes=msgspec.structs.replace(sent, received=received))
