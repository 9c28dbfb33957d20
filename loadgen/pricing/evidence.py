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
from loadgen.pricing.reasons import make_note
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
        is_offline: True if all requests were due at once, as in the Offline scenario of MLPerf.
            Such a run has no steady-state window, so its rates are those of the measurement window.
        run_folders: The folders of the summaries, in the same order.
        excluded_repeats: Names of INVALID repeats, which are not among the summaries.
        read_runs: Reads the records of the runs, or None if they are not available.
    """

    name: str
    folder: str
    summaries: tuple[Summary, ...]
    capacity: Capacity | None = None
    is_offline: bool = False
    run_folders: tuple[str, ...] = ()
    excluded_repeats: tuple[str, ...] = ()
    read_runs: Callable[[], Sequence[RunRecords]] | None = None

    @property
    def summary(self) -> Summary:
        """The first summary, for fields that all repeats share."""
        return self.summaries[0]

    @property
    def is_valid(self) -> bool:
        """True if every run is VALID."""
        return all(summary.verdict.valid for summary in self.summaries)

    @property
    def is_simulated(self) -> bool:
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


def compute_mean_interaction_ms(summary: Summary) -> float | None:
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

    if not interaction_count:
        return None

    return total_ms / interaction_count


def exclude_separate_endpoints(summary: Summary) -> Summary:
    """Return the summary without the tokens and bytes of steps that separate endpoints serve.

    A step of a task, such as the computation of embeddings, may be sent to a separate endpoint.
    That endpoint has another price, so `step_cost` prices these tokens.
    """
    separate_steps = [step for step in summary.steps if step.targets]
    if not separate_steps:
        return summary

    # The number of tokens that is left in each field of the token summary, by the field.
    remaining_tokens = {
        field: _subtract_steps(summary, separate_steps, field) for field in _SUMMED_TOKEN_FIELDS
    }
    separate_bytes = sum(step.bytes.received for step in separate_steps)
    remaining_bytes = summary.bytes.received - separate_bytes

    return msgspec.structs.replace(
        summary,
        tokens=msgspec.structs.replace(summary.tokens, **remaining_tokens),
        bytes=msgspec.structs.replace(summary.bytes, received=remaining_bytes),
    )


# The fields of `TokenSummary` that are sums over all requests, so that steps can be subtracted.
_SUMMED_TOKEN_FIELDS = (
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
    """Return a token count or token rate of a run without that of some of its steps.

    Args:
        summary: The run.
        steps: The steps to subtract. A step that did not count these tokens is taken as 0.
        field: The field of `TokenSummary`, such as "cached".

    Returns:
        The difference, or None if the run did not count these tokens.
    """
    total: float | int | None = getattr(summary.tokens, field)
    if total is None:
        return None
    return total - sum(getattr(step.tokens, field) or 0 for step in steps)


def list_evidence_notes(evidence: Evidence) -> Iterator[ReasonCode]:
    """Yield the notes to show beside every number that follows from this evidence.

    They say how valid the measurement is, whether it met its SLO, how certain its capacity is, and
    whether the server can sustain the load.
    """
    yield from _list_validity_notes(evidence)
    summaries = evidence.summaries

    is_slo_missed = any(summary.goodput.met is False for summary in summaries)
    if is_slo_missed:
        yield make_note("slo_missed_at_capacity" if evidence.capacity else "slo_missed")

    if evidence.capacity is not None:
        yield from _list_capacity_notes(evidence.capacity)

    if any(summary.goodput.undecided for summary in summaries):
        yield make_note("slo_undecided")

    if evidence.is_offline:
        # All requests were due at once, so whether the load can be sustained is no question.
        yield make_note("at_once")
        return

    yield from _list_sustained_notes(evidence)
    if not summaries[0].goodput.has_slo:
        yield make_note("no_slo")


def _list_validity_notes(evidence: Evidence) -> Iterator[ReasonCode]:
    """Yield the notes on whether the runs behind the evidence can be relied on.

    They name, in this order: a simulated server, the reasons of an INVALID verdict, repeats that
    were excluded, the caveats of a VALID verdict, and warnings about the work that was done, unless
    a caveat says the same. Repeats of a run share many of these texts, so each is named once.
    """
    summaries = evidence.summaries
    if evidence.is_simulated:
        yield make_note("simulated", error=format.shares(MODEL_ERROR))

    if not evidence.is_valid:
        verdicts = [summary.verdict for summary in summaries]
        yield make_note(
            "invalid",
            reasons=sorted({reason for verdict in verdicts for reason in verdict.reasons}),
            codes=sorted({reason.code for verdict in verdicts for reason in verdict.codes}),
        )

    if evidence.excluded_repeats:
        run_count = len(evidence.excluded_repeats) + len(summaries)
        yield make_note("repeats_left_out", names=list(evidence.excluded_repeats), runs=run_count)

    caveats = [caveat for summary in summaries for caveat in summary.verdict.caveats]
    if caveats:
        yield make_note("reserved", caveats=_remove_duplicates(caveats))

    work_warnings = [text for summary in summaries for text in describe_work_warnings(summary)]
    further_warnings = [text for text in _remove_duplicates(work_warnings) if text not in caveats]
    if further_warnings:
        yield make_note("other_work", warnings=further_warnings)


def _list_capacity_notes(capacity: Capacity) -> Iterator[ReasonCode]:
    """Yield the notes that say how certain the capacity that a search found is.

    There is a note if the capacity is only a lower bound, if it equals an end of its confidence
    interval, and on the length of time that the interval holds for. The capacity is the load that
    passed at full length, but its interval follows from all trials, so the two may coincide.
    """
    if capacity.lower_bound:
        yield make_note("lower_bound", why=capacity.lower_bound_reason or HIGHEST_LOAD_PASSED)

    if capacity.low_per_s is None or capacity.high_per_s is None:
        return

    interval_ends = {"lower": capacity.low_per_s, "upper": capacity.high_per_s}
    ends_at_capacity = [
        end_name for end_name, rate in interval_ends.items() if rate == capacity.rate_per_s
    ]
    if ends_at_capacity:
        yield make_note("at_an_end", ends=ends_at_capacity)

    if capacity.horizon_s is not None:
        yield make_note(
            "horizon", horizon_s=capacity.horizon_s, within=describe_horizon(capacity.horizon_s)
        )


def _list_sustained_notes(evidence: Evidence) -> Iterator[ReasonCode]:
    """Yield a note if it is not known that the server can sustain the load behind the numbers.

    A load is sustained if its queue does not grow, so that it could go on for any length of time.
    """
    if evidence.capacity is None:
        yield from _list_sustained_notes_on_runs(evidence.summaries)
    elif evidence.capacity.method == "search":
        yield from _list_sustained_notes_on_search(evidence.capacity)


def _list_sustained_notes_on_search(capacity: Capacity) -> Iterator[ReasonCode]:
    """Yield a note if it is not certain that the capacity that a search found can be sustained.

    A search confirms its capacity by a run at full length. There is one note if this run is missing
    and another if its result leaves open whether the load can be sustained.
    """
    if capacity.confirmed is False:
        yield make_note("unconfirmed")
        return

    if capacity.sustained or not capacity.sustained_reason:
        return

    reason = capacity.sustained_reason
    if capacity.resume_command:
        reason += f"; the search was stopped, {capacity.resume_hint}"

    yield make_note("not_sustained", why=reason)


def _list_sustained_notes_on_runs(summaries: Sequence[Summary]) -> Iterator[ReasonCode]:
    """Yield a note if a run did not sustain its load, or else if a run was too short to tell.

    Repeats have one note between them, with the reason of the first such run.
    """
    judgments = [summary.sustainable for summary in summaries]
    overloaded = [judgment for judgment in judgments if judgment.sustained is False]

    # None means that the run was too short to tell.
    undecided = [judgment for judgment in judgments if judgment.sustained is None]
    if overloaded:
        yield make_note("overloaded", why=overloaded[0].reason)
    elif undecided:
        yield make_note("not_sustained", why=undecided[0].reason)


def _remove_duplicates(texts: Sequence[str]) -> list[str]:
    """Return the texts in order, each once."""
    return list(dict.fromkeys(texts))
