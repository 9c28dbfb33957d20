"""Notes on a planned run that a reader of its results should know."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from loadgen.core import format
from loadgen.core.execution.plan import Plan
from loadgen.core.metrics import reasons
from loadgen.core.requests import resonance
from loadgen.core.requests.file_prompts import FilePrompts
from loadgen.core.requests.mix import MixPrompts
from loadgen.core.requests.prompts import Prompts
from loadgen.core.results.manifest import ReasonCode, TargetFacts
from loadgen.core.workload import FromTrace, Replay, Workload, requests_by_class

CodedNotes = dict[str, ReasonCode]
"""Notes as sentences, each with its code and values."""

# For a run without a number of requests, notes are based on its first requests.
ASSUMED_REQUESTS = 1000


def coded_notes(plan: Plan, target: TargetFacts) -> CodedNotes:
    """Return the notes on a plan that have a code. `target` is the first target."""
    return (
        _resonance_note(plan)
        | _disclosure_note(plan, target)
        | repeated_rows_notes(plan.requests, plan.schedule.slot_count)
    )


def plan_notes(plan: Plan, sentences_with_code: Iterable[str]) -> Iterator[str]:
    """Yield all notes on a plan as sentences, in the order in which they are shown.

    Args:
        plan: The plan.
        sentences_with_code: The sentences of `coded_notes`. They also have a code, because programs
            should be able to recognise them.
    """
    job = plan.job
    if job.known is not None:
        yield from job.known.notes
    if not job.settings.tls.verify and any(result.target.tls for result in job.probe_results):
        yield (
            "The server's certificate was not verified (--insecure), so someone on "
            "the network could read the API key and the prompts"
        )
    if plan.oversized_requests is not None:
        yield f"{plan.oversized_requests.text}, so these will fail"
    yield from sentences_with_code
    yield from replaced_stages_notes(job.workload)
    yield from trace_notes(job.workload)
    probe_notes = [note for result in job.probe_results for note in result.warnings]
    yield from dict.fromkeys(probe_notes)  # Several targets may have the same note.
    request_count = plan.schedule.slot_count or ASSUMED_REQUESTS
    yield from plan.requests.warnings(request_count)


def trace_notes(workload: Workload) -> list[str]:
    """Return a note for each trace of a workload whose unit of time had to be guessed.

    A trace may be the source of requests (`FromTrace`), of arrival times (`Replay`), or of both.
    """
    all_requests = (workload.requests, *requests_by_class(workload.requests).values())
    replays: list[FromTrace | Replay] = [
        requests for requests in all_requests if isinstance(requests, FromTrace)
    ]
    replays += [stage.arrival for stage in workload.stages if isinstance(stage.arrival, Replay)]
    if not replays:
        return []
    # Runs without a trace do not need this module.
    from loadgen.core.workload.traces import read_replayed_trace

    notes = []
    for replay in replays:
        trace = read_replayed_trace(replay)
        if trace.time_unit:
            rate = format.quantity(trace.rate)
            notes.append(
                f"{trace.path.name}: times are read as {trace.time_unit} ({rate} "
                "req/s on average). If that is wrong, set the unit with --set "
                "trace_unit=s, ms, us or ns"
            )
    # Requests and arrivals of one trace have the same note. A dictionary removes the second one and
    # keeps the order.
    return list(dict.fromkeys(notes))


def replaced_stages_notes(workload: Workload) -> list[str]:
    """Return a note if the load of the command line replaced several stages of the file."""
    names = workload.replaced
    if not names:
        return []
    return [
        (
            f"the load on the command line replaces {len(names)} stages of the file: "
            f"{', '.join(names)}"
        )
    ]


def repeated_rows_notes(prompts: Prompts, slot_count: int | None) -> CodedNotes:
    """Return a note for each file whose rows are sent more than once.

    The server may have the prompt of a repeated row in its prefix cache. `slot_count` is the number
    of requests, or None if the load has no end.
    """
    request_count = slot_count or ASSUMED_REQUESTS
    shares_of_classes: list[tuple[Prompts, float]] = [(prompts, 1.0)]
    if isinstance(prompts, MixPrompts):
        shares_of_classes = list(zip(prompts.class_prompts, prompts.session_shares, strict=True))
    notes: CodedNotes = {}
    for class_prompts, share in shares_of_classes:
        requests_of_class = round(request_count * share)
        if isinstance(class_prompts, FilePrompts) and requests_of_class > len(class_prompts.rows):
            values = {"requests": requests_of_class, "rows": len(class_prompts.rows)}
            notes |= reasons.make_note("rows_repeated", values)
    return notes


def _resonance_note(plan: Plan) -> CodedNotes:
    """Return a note if round robin keeps sending each target the same part of a data set.

    That happens if the number of rows and the number of targets have a common divisor. If some rows
    are longer than others, the targets then have unequal loads.
    """
    job = plan.job
    has_sessions = plan.schedule.max_turns > 1
    if job.settings.route not in ("auto", "round-robin") or has_sessions:
        return {}
    values = resonance.find_resonance(
        job.workload.requests,
        plan.requests,
        len(job.settings.endpoints),
        "target",
        plan.schedule.slot_count,
    )
    return reasons.make_note("resonance", values)


def _disclosure_note(plan: Plan, target: TargetFacts) -> CodedNotes:
    """Return a note on what a description of the system under test leaves out, if there is one."""
    metadata = dict(plan.job.settings.metadata)
    if not any(key.startswith(format.SYSTEM) for key in metadata):
        return {}
    # Only runs with such a description need this module.
    from loadgen.core.execution import system_file

    missing = system_file.missing_facts(metadata, target)
    return reasons.make_note("undisclosed", {"missing": missing} if missing else None)
