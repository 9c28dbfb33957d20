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
from loadgen.core.results import manifest
from loadgen.core.workload import FromTrace, Replay, Workload, requests_by_class

CodedNotes = dict[str, manifest.ReasonCode]
"""Notes as sentences, each with its code and values."""

# For a run without a number of requests, notes are based on its first requests.
ASSUMED_REQUESTS = 1000


def coded_notes(plan: Plan, target: manifest.TargetFacts) -> CodedNotes:
    """Return the notes on a plan that have a code. `target` is the first target."""
    return (
        _resonance_note(plan)
        | _disclosure_note(plan, target)
        | repeated_rows_notes(plan.requests, plan.schedule.slot_count)
    )


def plan_notes(plan: Plan, coded: Iterable[str]) -> Iterator[str]:
    """Yield all notes on a plan as sentences. `coded` are those that also have a code."""
    job = plan.job
    if job.known is not None:
        yield from job.known.notes
    if not job.settings.tls.verify and any(result.target.tls for result in job.probe_results):
        yield (
            "the server's certificate was not verified (--insecure): whoever is on the way can "
            "read key and prompts"
        )
    if plan.oversized_requests is not None:
        yield f"{plan.oversized_requests.text}; these will fail"
    yield from coded
    yield from replaced_stages_notes(job.workload)
    yield from trace_notes(job.workload)
    yield from dict.fromkeys(note for result in job.probe_results for note in result.warnings)
    yield from plan.requests.warnings(plan.schedule.slot_count or ASSUMED_REQUESTS)


def trace_notes(workload: Workload) -> list[str]:
    """Return a note for each trace of a workload whose unit of time had to be decided."""
    replays: list[FromTrace | Replay] = [
        part
        for part in (workload.requests, *requests_by_class(workload.requests).values())
        if isinstance(part, FromTrace)
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
                f"{trace.path.name}: times read as {trace.time_unit}: {rate} requests/s "
                "on average; --set trace_unit=s, ms, us or ns states the unit"
            )
    return list(dict.fromkeys(notes))


def replaced_stages_notes(workload: Workload) -> list[str]:
    """Return a note if the load of the command line replaced several stages of the file."""
    names = workload.replaced
    if not names:
        return []
    return [
        f"one load of the command line in place of {len(names)} stages of the file: "
        f"{', '.join(names)}"
    ]


def repeated_rows_notes(prompts: Prompts, slot_count: int | None) -> CodedNotes:
    """Return a note for each file whose rows are sent more than once."""
    count = slot_count or ASSUMED_REQUESTS
    parts_with_shares = [(prompts, 1.0)]
    if isinstance(prompts, MixPrompts):
        parts_with_shares = list(zip(prompts.parts, prompts.shares, strict=True))
    notes: CodedNotes = {}
    for part, share in parts_with_shares:
        requests = round(count * share)
        if isinstance(part, FilePrompts) and requests > len(part.rows):
            values = {"requests": requests, "rows": len(part.rows)}
            notes |= reasons.make_note("rows_repeated", values)
    return notes


def _resonance_note(plan: Plan) -> CodedNotes:
    """Return a note if round robin keeps sending each target the same part of a data set."""
    job = plan.job
    has_sessions = plan.schedule.max_turns > 1
    if job.settings.route not in ("auto", "round-robin") or has_sessions:
        return {}
    found = resonance.find_resonance(
        job.workload.requests,
        plan.requests,
        len(job.settings.endpoints),
        "target",
        plan.schedule.slot_count,
    )
    return reasons.make_note("resonance", found)


def _disclosure_note(plan: Plan, target: manifest.TargetFacts) -> CodedNotes:
    """Return a note on what a description of the system under test leaves out, if there is one."""
    metadata = dict(plan.job.settings.metadata)
    if not any(key.startswith(format.SYSTEM) for key in metadata):
        return {}
    # Only runs with such a description need this module.
    from loadgen.core.execution import system_file

    missing = system_file.missing_facts(metadata, target)
    return reasons.make_note("undisclosed", {"missing": missing} if missing else None)
