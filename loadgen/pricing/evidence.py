"""The measurements behind a cost or a plan: a run, repeats of a run, or a capacity.

Pure values. `loadgen.cost.evidence_reader` reads them from result folders.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec

from loadgen.core import format
from loadgen.core.limits import MODEL_ERROR
from loadgen.core.metrics.part_summaries import StepSummary
from loadgen.core.metrics.summary import Summary
from loadgen.core.results.manifest import ReasonCode
from loadgen.pricing.prompt_lengths import RunRecords
from loadgen.pricing.reasons import note
from loadgen.repeated.capacity import HIGHEST_LOAD_PASSED, Capacity, describe_horizon
from loadgen.repeated.run_warnings import describe_other_work


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """The measurements behind a cost or a plan.

    Attributes:
        name: How reports call it.
        folder: The result folder, as the user named it.
        summaries: The summary of one run or of each of its repeats. With a capacity, the summary of
            the run that confirms it.
        capacity: The result of a search, if there is one.
        at_once: True if all requests were due at once, as in an Offline run. Such a run has no
            steady-state window, so its rates are those of the measurement window.
        run_folders: The folders of the summaries, in the same order.
        left_out: Names of INVALID repeats, which are not among the summaries.
        read_runs: Reads the records of the runs, or None if they are not available.
    """

    name: str
    folder: str
    summaries: tuple[Summary, ...]
    capacity: Capacity | None = None
    at_once: bool = False
    run_folders: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    read_runs: Callable[[], Sequence[RunRecords]] | None = None

    @property
    def summary(self) -> Summary:
        """The first summary, for fields that all repeats share."""
        return self.summaries[0]

    @property
    def valid(self) -> bool:
        """True if every run is VALID."""
        return all(summary.verdict.valid for summary in self.summaries)

    @property
    def simulated(self) -> bool:
        """True if a simulated server was measured."""
        return any(summary.target.simulated for summary in self.summaries)


def count_interactions(summary: Summary) -> int:
    """Return the number of interactions of a run: what a rate in conversations counts.

    An interaction is a conversation, a task, or a request of a class of single requests.
    """
    if summary.sessions is None:
        return summary.requests.decided
    single_requests = sum(
        part.requests.decided for part in summary.classes if part.sessions is None
    )
    return summary.sessions.count + single_requests


def mean_interaction_duration_ms(summary: Summary) -> float | None:
    """Return how long an interaction takes on average, or None if it is not known.

    An interaction is a single request or a whole conversation. A conversation lasts from its first
    request to its last response, pauses for tools included. In a mix of both, the mean is over all
    interactions.
    """
    if summary.sessions is None:
        return summary.e2e_ms.mean
    durations = [summary.sessions.duration_ms]
    durations += [part.e2e_ms for part in summary.classes if part.sessions is None]
    known = [(times.mean, times.count) for times in durations if times.mean is not None]
    if not known:
        return None
    return sum(mean * count for mean, count in known) / sum(count for _, count in known)


def without_separate_endpoints(summary: Summary) -> Summary:
    """Return the summary without the tokens and bytes of steps that endpoints of their own serve.

    Those endpoints have prices of their own.
    """
    steps = [step for step in summary.steps if step.targets]
    if not steps:
        return summary
    tokens = msgspec.structs.replace(
        summary.tokens,
        **{name: _subtract_steps(summary, steps, name) for name in _TOKEN_FIELDS},
    )
    received = summary.bytes.received - sum(step.bytes.received for step in steps)
    return msgspec.structs.replace(
        summary,
        tokens=tokens,
        bytes=msgspec.structs.replace(summary.bytes, received=received),
    )


_TOKEN_FIELDS = (
    "input",
    "cached",
    "cache_written",
    "output",
    "failed_input",
    "failed_output",
    "total_per_s",
    "steady_total_per_s",
)


def _subtract_steps(
    summary: Summary, steps: Sequence[StepSummary], field: str
) -> float | int | None:
    total: float | int | None = getattr(summary.tokens, field)
    if total is None:
        return None
    return total - sum(getattr(step.tokens, field) or 0 for step in steps)


def evidence_notes(evidence: Evidence) -> Iterator[ReasonCode]:
    """Yield the notes to show beside every number that follows from this evidence."""
    yield from _measurement_notes(evidence)
    summaries = evidence.summaries
    if any(summary.goodput.met is False for summary in summaries):
        yield note("slo_missed_at_capacity" if evidence.capacity else "slo_missed")
    if evidence.capacity is not None:
        yield from _capacity_notes(evidence.capacity)
    if any(summary.goodput.undecided for summary in summaries):
        yield note("slo_undecided")
    # An Offline run is not judged, because all its requests were due at once.
    if not evidence.at_once:
        yield from _sustained_notes(evidence)
    if evidence.at_once:
        yield note("at_once")
    elif not summaries[0].goodput.has_slo:
        yield note("no_slo")


def _measurement_notes(evidence: Evidence) -> Iterator[ReasonCode]:
    """Yield the notes on how far the runs behind the evidence can be relied on."""
    summaries = evidence.summaries
    if evidence.simulated:
        yield note("simulated", error=format.shares(MODEL_ERROR))
    if not evidence.valid:
        verdicts = [summary.verdict for summary in summaries]
        yield note(
            "invalid",
            reasons=sorted({reason for verdict in verdicts for reason in verdict.reasons}),
            codes=sorted({reason.code for verdict in verdicts for reason in verdict.codes}),
        )
    if evidence.left_out:
        run_count = len(evidence.left_out) + len(summaries)
        yield note("repeats_left_out", names=list(evidence.left_out), runs=run_count)
    caveats = [caveat for summary in summaries for caveat in summary.verdict.caveats]
    if caveats:
        yield note("reserved", caveats=_unique(caveats))
    warnings = [text for summary in summaries for text in describe_other_work(summary)]
    new_warnings = [text for text in _unique(warnings) if text not in caveats]
    if new_warnings:
        yield note("other_work", warnings=new_warnings)


def _capacity_notes(capacity: Capacity) -> Iterator[ReasonCode]:
    """Yield the notes on the interval of a capacity."""
    if capacity.lower_bound:
        yield note("lower_bound", why=capacity.lower_bound_reason or HIGHEST_LOAD_PASSED)
    if capacity.low_per_s is None or capacity.high_per_s is None:
        return
    ends = {"lower": capacity.low_per_s, "upper": capacity.high_per_s}
    equal_ends = [end for end, rate in ends.items() if rate == capacity.rate_per_s]
    if equal_ends:
        yield note("at_an_end", ends=equal_ends)
    if capacity.horizon_s is not None:
        yield note(
            "horizon", horizon_s=capacity.horizon_s, within=describe_horizon(capacity.horizon_s)
        )


def _sustained_notes(evidence: Evidence) -> Iterator[ReasonCode]:
    """Yield a note if the load behind the numbers is not known to be sustained.

    A search may not have confirmed its capacity at all, or may not know whether the confirmed load
    can be sustained for long. `sustained_reason` says why that is not known.
    """
    capacity = evidence.capacity
    if capacity is None:
        yield from _sustained_notes_on_runs(evidence.summaries)
    elif capacity.method == "search" and capacity.confirmed is False:
        yield note("unconfirmed")
    elif capacity.method == "search" and not capacity.sustained and capacity.sustained_reason:
        resume = (
            f"; the search was stopped, {capacity.resume_hint}" if capacity.resume_command else ""
        )
        yield note("not_sustained", why=capacity.sustained_reason + resume)


def _sustained_notes_on_runs(summaries: Sequence[Summary]) -> Iterator[ReasonCode]:
    judgments = [summary.sustainable for summary in summaries]
    failed = [judgment for judgment in judgments if judgment.sustained is False]
    unknown = [judgment for judgment in judgments if judgment.sustained is None]
    if failed:
        yield note("overloaded", why=failed[0].why)
    elif unknown:
        yield note("not_sustained", why=unknown[0].why)


def _unique(texts: Sequence[str]) -> list[str]:
    """Return the texts in order, each once."""
    return list(dict.fromkeys(texts))
