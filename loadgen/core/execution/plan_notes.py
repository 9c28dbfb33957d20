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


def plan_notes(plan: Plan, coded_sentences: Iterable[str]) -> Iterator[str]:
    """Yield all notes on a plan as sentences, in the order in which they are shown.

    Args:
        plan: The plan.
        coded_sentences: The sentences of the notes that also have a code (see `coded_notes`).
    """
    job = plan.job
    if job.known is not None:  # a target, such as a simulation, that is known without a probe
        yield from job.known.notes

    uses_tls = any(result.target.tls for result in job.probe_results)
    if uses_tls and not job.settings.tls.verify:
        yield (
            "The server's certificate was not verified (--insecure), so someone on "
            "the network could read the API key and the prompts"
        )

    if plan.oversized_requests is not None:
        yield f"{plan.oversized_requests.text}, so these will fail"

    yield from coded_sentences
    yield from replaced_stages_notes(job.workload)
    yield from lost_keys_notes(job.workload)
    yield from trace_notes(job.workload)
    probe_notes = [note for result in job.probe_results for note in result.warnings]
    yield from dict.fromkeys(probe_notes)  # Several targets may have the same note.

    # Each request has a slot. Their number is not known if only a duration limits the load.
    request_count = plan.schedule.slot_count or ASSUMED_REQUESTS
    yield from plan.requests.warnings(request_count)


def trace_notes(workload: Workload) -> list[str]:
    """Return a note for each trace of a workload whose unit of time had to be guessed.

    A trace is a file of recorded requests. Some formats have times without a unit. The trace then
    has the guessed one as `time_unit`, which is otherwise empty.
    """
    replays = _replayed_traces(workload)
    if not replays:
        return []

    # Runs without a trace do not need this module.
    from loadgen.core.workload.traces import read_replayed_trace

    traces = [read_replayed_trace(replay) for replay in replays]
    notes = [
        f"{trace.path.name}: times are read as {trace.time_unit} ({format.quantity(trace.rate)} "
        "req/s on average). If that is wrong, set the unit with --set "
        "trace_unit=s, ms, us or ns"
        for trace in traces
        if trace.time_unit
    ]

    # The same trace may be the source of requests and of arrival times, and is mentioned once.
    return list(dict.fromkeys(notes))


def _replayed_traces(workload: Workload) -> list[FromTrace | Replay]:
    """Return the parts of a workload that use a trace: as requests, or as arrival times."""
    all_requests = (workload.requests, *requests_by_class(workload.requests).values())
    arrivals = [stage.arrival for stage in workload.stages]
    return [
        *[requests for requests in all_requests if isinstance(requests, FromTrace)],
        *[arrival for arrival in arrivals if isinstance(arrival, Replay)],
    ]


def replaced_stages_notes(workload: Workload) -> list[str]:
    """Return a note if options of the command line replaced several stages of the workload file.

    A stage is one phase of the load. Options such as `--request-rate` describe a load with a single
    stage, which takes the place of all stages in the file. Otherwise the list is empty.
    """
    stage_names = workload.replaced_stages
    if not stage_names:
        return []

    note = (
        f"the load on the command line replaces {len(stage_names)} stages of the file: "
        f"{', '.join(stage_names)}"
    )
    return [note]


def lost_keys_notes(workload: Workload) -> list[str]:
    """Return a note if the file has keys for recorded sessions, and other requests are sent.

    A trace or a data set of the command line replaces the recorded sessions of the file.
    """
    if not workload.lost_trajectory_keys:
        return []
    keys = ", ".join(workload.lost_trajectory_keys)
    return [
        f"the requests of the command line replace the trajectories of the file, so these keys of "
        f"the file have no effect: {keys}"
    ]


def repeated_rows_notes(prompts: Prompts, slot_count: int | None) -> CodedNotes:
    """Return a note for each file of prompts whose rows are sent more than once.

    The server may have the prompt of a repeated row in its prefix cache. A load can be a mix of
    request classes, each of which has a file of its own and sends a share of the requests.

    Args:
        prompts: The requests of the load, perhaps a mix of classes.
        slot_count: The number of requests, or None if the load has no end.

    Returns:
        The notes by their sentences. Files with equal numbers of requests and rows share one note.
    """
    request_count = slot_count or ASSUMED_REQUESTS
    if isinstance(prompts, MixPrompts):
        prompts_with_shares = list(zip(prompts.class_prompts, prompts.session_shares, strict=True))
    else:
        prompts_with_shares = [(prompts, 1.0)]

    notes: CodedNotes = {}
    for class_prompts, class_share in prompts_with_shares:
        if not isinstance(class_prompts, FilePrompts):
            continue
        requests_of_class = round(request_count * class_share)
        row_count = len(class_prompts.rows)
        if requests_of_class > row_count:
            values = {"requests": requests_of_class, "rows": row_count}
            notes |= reasons.make_note("rows_repeated", values)

    return notes


def _resonance_note(plan: Plan) -> CodedNotes:
    """Return a note if round robin keeps sending each target the same part of a data set.

    Requests use the rows of a data set in turn, and round robin uses the targets in turn. With 8
    rows and 2 targets, one target therefore gets only the rows 0, 2, 4 and 6, again and again. This
    is called resonance here. It happens if the two numbers have a common divisor, and gives the
    targets unequal loads if some rows are longer than others.
    """
    job = plan.job
    uses_round_robin = job.settings.route in ("auto", "round-robin")
    has_sessions = plan.schedule.max_turns > 1
    if not uses_round_robin or has_sessions:
        return {}

    values = resonance.find_resonance(
        requests=job.workload.requests,
        prompts=plan.requests,
        server_count=len(job.settings.endpoints),
        kind="target",
        planned_requests=plan.schedule.slot_count,
    )
    return reasons.make_note("resonance", values)


def _disclosure_note(plan: Plan, target: TargetFacts) -> CodedNotes:
    """Return a note on facts that the user's description of the server leaves out.

    The description is metadata whose keys begin with `format.SYSTEM`. There is no note if the user
    gives no such metadata, or if nothing is missing.
    """
    metadata = dict(plan.job.settings.metadata)
    has_description = any(key.startswith(format.SYSTEM) for key in metadata)
    if not has_description:
        return {}

    # Only runs with such a description need this module.
    from loadgen.core.execution import system_file

    missing_facts = system_file.missing_facts(metadata, target)
    if not missing_facts:
        return {}

    return reasons.make_note("undisclosed", {"missing": missing_facts})
