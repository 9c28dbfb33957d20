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
from loadgen.repeated.run_warnings import describe_work_warnings


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
        request_class.requests.decided
        for request_class in summary.classes
        if request_class.sessions is None
    )
    return summary.sessions.count + single_requests


def mean_interaction_duration_ms(summary: Summary) -> float | None:
    """Return how long an interaction takes on average, or None if it is not known.

    An interaction is a single request or a whole conversation. A conversation lasts from its first
    request to its last response, pauses for tools included. In a mix of both, the mean of each kind
    is weighted by its number of interactions.
    """
    if summary.sessions is None:
        return summary.e2e_ms.mean
    duration_summaries = [summary.sessions.duration_ms]
    for request_class in summary.classes:
        is_single_requests = request_class.sessions is None
        if is_single_requests:
            duration_summaries.append(request_class.e2e_ms)
    total_ms = 0.0
    interaction_count = 0
    for durations in duration_summaries:
        if durations.mean is not None:
            total_ms += durations.mean * durations.count
            interaction_count += durations.count
    return total_ms / interaction_count if interaction_count else None


def without_separate_endpoints(summary: Summary) -> Summary:
    """Return the summary without the tokens and bytes of steps that separate endpoints serve.

    A step of a task, such as the computation of embeddings, may be sent to a separate endpoint.
    That endpoint has another price, so `step_cost` prices these tokens.
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


# The fields of `TokenSummary` that are sums over all requests, so that steps can be subtracted.
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
    """Return a field of the run's tokens without the steps, or None if the run did not count it.

    A step that did not count it is taken as 0.
    """
    total: float | int | None = getattr(summary.tokens, field)
    if total is None:
        return None
    return total - sum(getattr(step.tokens, field) or 0 for step in steps)


def evidence_notes(evidence: Evidence) -> Iterator[ReasonCode]:
    """Yield the notes to show beside every number that follows from this evidence.

    They say how valid the measurement is, whether it met its SLO, how certain its capacity is, and
    whether the load can be sustained.
    """
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
    """Yield the notes on how far the runs behind the evidence can be relied on.

    Repeats of a run share many reasons and caveats, so each is named once. A warning that is also a
    caveat of the verdict is not repeated.
    """
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
    warnings = [text for summary in summaries for text in describe_work_warnings(summary)]
    new_warnings = [text for text in _unique(warnings) if text not in caveats]
    if new_warnings:
        yield note("other_work", warnings=new_warnings)


def _capacity_notes(capacity: Capacity) -> Iterator[ReasonCode]:
    """Yield the notes on a capacity that is only a lower bound, and on its interval.

    The capacity is the load that passed at full length. Its interval follows from all trials of the
    search, so the capacity may be an end of the interval.
    """
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
    """Yield a note if it is not known that the server can sustain the load behind the numbers.

    A load is sustained if its queue does not grow, so that it could go on for any length of time.
    """
    if evidence.capacity is None:
        yield from _sustained_notes_on_runs(evidence.summaries)
    elif evidence.capacity.method == "search":
        yield from _sustained_notes_on_search(evidence.capacity)


def _sustained_notes_on_search(capacity: Capacity) -> Iterator[ReasonCode]:
    """Yield a note if a search did not confirm its capacity, or not as a load that lasts.

    A confirmation is a run at full length. Its result may leave open whether the load can be
    sustained, and `sustained_reason` says why.
    """
    if capacity.confirmed is False:
        yield note("unconfirmed")
        return
    if capacity.sustained or not capacity.sustained_reason:
        return
    reason = capacity.sustained_reason
    if capacity.resume_command:
        reason += f"; the search was stopped, {capacity.resume_hint}"
    yield note("not_sustained", why=reason)


def _sustained_notes_on_runs(summaries: Sequence[Summary]) -> Iterator[ReasonCode]:
    """Yield one note for all repeats: the first overload, or else the first open judgment.

    A run is judged as sustained, as not sustained, or (None) as too short to tell.
    """
    judgments = [summary.sustainable for summary in summaries]
    overloaded = [judgment for judgment in judgments if judgment.sustained is False]
    undecided = [judgment for judgment in judgments if judgment.sustained is None]
    if overloaded:
        yield note("overloaded", why=overloaded[0].why)
    elif undecided:
        yield note("not_sustained", why=undecided[0].why)


def _unique(texts: Sequence[str]) -> list[str]:
    """Return the texts in order, each once."""
    return list(dict.fromkeys(texts))
