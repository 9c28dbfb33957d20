"""The evidence behind a cost or plan: one run, repeats of one run, or a capacity with the run that shows it.

Pure values; `inputs.py` reads them from folders.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec

from loadgen.core import format
from loadgen.core.limits import MODEL_ERROR
from loadgen.core.metrics.summary import Summary
from loadgen.core.results.manifest import ReasonCode
from loadgen.pricing.prompt_lengths import RunRecords
from loadgen.pricing.reasons import note
from loadgen.repeated.capacity import HIGHEST_LOAD_PASSED, Capacity, describe_horizon
from loadgen.repeated.run_warnings import describe_other_work


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """The evidence behind a figure. `summaries`: one run, or its repeats; with a capacity the run that shows it.

    `at_once`: an Offline run, or another whose requests were all due at once. Its rates are those of
    the measurement window, because it has no steady-state window.
    """

    name: str
    folder: str
    summaries: tuple[Summary, ...]
    capacity: Capacity | None = None
    at_once: bool = False
    run_folders: tuple[str, ...] = ()  # of the summaries, in their order
    left_out: tuple[str, ...] = ()  # names of the INVALID repeats beside the summaries
    read_runs: Callable[[], Sequence[RunRecords]] | None = None  # reads the records of the runs

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


def starts(summary: Summary) -> int:
    """What a rate in conversations counts: conversations and tasks, and beside them each request of a class of single
    ones.
    """
    if summary.sessions is None:
        return summary.requests.decided
    return summary.sessions.count + sum(
        part.requests.decided for part in summary.classes if part.sessions is None
    )


def mean_answer_ms(summary: Summary) -> float | None:
    """How long a start of `starts` lasts on average: a request, a conversation with its pauses for tools."""
    if summary.sessions is None:
        return summary.e2e_ms.mean
    lasted = [
        summary.sessions.duration_ms,
        *(part.e2e_ms for part in summary.classes if part.sessions is None),
    ]
    known = [(times.mean, times.count) for times in lasted if times.mean is not None]
    return (
        sum(mean * count for mean, count in known) / sum(count for _, count in known)
        if known
        else None
    )


def _notes_on_measurement(evidence: Evidence) -> Iterator[ReasonCode]:
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
        runs = len(evidence.left_out) + len(summaries)
        yield note("repeats_left_out", names=list(evidence.left_out), runs=runs)
    caveats = [caveat for summary in summaries for caveat in summary.verdict.caveats]
    if caveats:
        yield note("reserved", caveats=list(dict.fromkeys(caveats)))
    warnings = [text for summary in summaries for text in describe_other_work(summary)]
    if others := [text for text in dict.fromkeys(warnings) if text not in caveats]:
        yield note("other_work", warnings=others)


def notes(evidence: Evidence) -> Iterator[ReasonCode]:
    """Yield the notes to show beside every figure from this evidence."""
    yield from _notes_on_measurement(evidence)
    summaries, capacity = evidence.summaries, evidence.capacity
    if any(summary.goodput.met is False for summary in summaries):
        yield note("slo_missed_at_capacity" if capacity else "slo_missed")
    if capacity is not None and capacity.lower_bound:
        yield note("lower_bound", why=capacity.lower_bound_reason or HIGHEST_LOAD_PASSED)
    if capacity is not None and capacity.low_per_s is not None and capacity.high_per_s is not None:
        ends = {"lower": capacity.low_per_s, "upper": capacity.high_per_s}
        if at := [end for end, value in ends.items() if value == capacity.rate_per_s]:
            yield note("at_an_end", ends=at)
        if capacity.horizon_s is not None:
            yield note(
                "horizon", horizon_s=capacity.horizon_s, within=describe_horizon(capacity.horizon_s)
            )
    if any(summary.goodput.undecided for summary in summaries):
        yield note("slo_undecided")
    yield from _notes_on_sustained(evidence)
    if evidence.at_once:
        yield note("at_once")
    elif not summaries[0].goodput.has_slo:
        yield note("no_slo")


def _notes_on_sustained(evidence: Evidence) -> Iterator[ReasonCode]:
    """Yield a note if the load behind the figures is not known to be sustained.

    An Offline run is not judged, because all its requests were due at once.
    """
    capacity = evidence.capacity
    if evidence.at_once:
        return
    if capacity is None:
        judgments = [summary.sustainable for summary in evidence.summaries]
        failed = [judgment for judgment in judgments if judgment.sustained is False]
        unknown = [judgment for judgment in judgments if judgment.sustained is None]
        if failed:
            yield note("overloaded", why=failed[0].why)
        elif unknown:
            yield note("not_sustained", why=unknown[0].why)
        return
    if capacity.method != "search":
        return
    if capacity.confirmed is False:
        yield note("unconfirmed")
    elif not capacity.sustained and capacity.sustained_reason:
        resume = (
            f"; the search was stopped, {capacity.resume_hint}" if capacity.resume_command else ""
        )
        yield note("not_sustained", why=capacity.sustained_reason + resume)


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

    names = (
        "input",
        "cached",
        "cache_written",
        "output",
        "failed_input",
        "failed_output",
        "total_per_s",
        "steady_total_per_s",
    )
    tokens = msgspec.structs.replace(tokens, **{name: without(name) for name in names})
    received = sent.received - sum(step.bytes.received for step in apart)
    return msgspec.structs.replace(
        summary, tokens=tokens, bytes=msgspec.structs.replace(sent, received=received)
    )
