"""Describe what a run would do without using the network, for `--dry-run`."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from loadgen.core import format, seeds
from loadgen.core.errors import LoadgenError
from loadgen.core.execution import backend
from loadgen.core.execution.context import OversizedRequests, find_oversized_requests
from loadgen.core.execution.plan import Settings
from loadgen.core.execution.plan_notes import (
    ASSUMED_REQUESTS,
    lost_keys_notes,
    repeated_rows_notes,
    replaced_stages_notes,
    trace_notes,
)
from loadgen.core.execution.stage_plans import create_stage_plan, describe_bounds
from loadgen.core.requests import lengths
from loadgen.core.requests import tokenizer as tokens
from loadgen.core.requests.build import build_prompts
from loadgen.core.requests.mix import MixPrompts
from loadgen.core.requests.prompts import Prompts, PromptTarget
from loadgen.core.schedule.build import build_schedule
from loadgen.core.schedule.forecast import Forecast, forecast_load, mean_tokens
from loadgen.core.schedule.schedule import Schedule, schedule_fingerprint
from loadgen.core.slo import Slo, describe_slo
from loadgen.core.workload import (
    Arrival,
    Closed,
    Mix,
    Synthetic,
    Workload,
    recipe_fingerprint,
)
from loadgen.core.workload.cache_fill import with_cache_fill

_CONTINUATION_INDENT = " " * len("load: ")
_DEFAULT_RAMP_TEXT = "starts staggered over one response time, which the preflight request measures"


class LoadDescription(msgspec.Struct, frozen=True):
    """What a run would do.

    Attributes:
        text: The description as several lines of text.
        load: How many requests and tokens the run would send, and how long it would take.
        error: Why the run would be refused, if too many requests are longer than the context of a
            target that loadgen simulates. Other targets show that only when they are probed.
    """

    text: str
    load: Forecast
    error: LoadgenError | None


def describe_load(
    workload: Workload, settings: Settings, *, command_seed: int | None = None
) -> LoadDescription:
    """Return what a run would do: its load, the size of its requests, and its fingerprints.

    Everything is computed as in a run, from the seed of the workload or from a fresh one. The seed
    decides all random choices, and the salt how prompts begin. What only the probe of a target
    shows is left out, such as the tokens of its chat template.

    Args:
        workload: The load.
        settings: The settings of the run.
        command_seed: The seed that reproduces the command, if the seed of the workload is derived
            from it. None if it is the seed of the workload.
    """
    workload = with_cache_fill(workload)
    seed = workload.seed if workload.seed is not None else seeds.random_seed()
    salt = seeds.resolve_salt(seed, workload.salt)
    schedule = build_schedule(workload, seed)
    tokenizer = tokens.load_tokenizer(settings.tokenizer)
    prompts = build_prompts(
        workload,
        seed=seed,
        salt=seeds.salt_number(salt),
        tokenizer=tokenizer,
        target=PromptTarget(api=settings.api),
    )
    forecast = forecast_load(schedule, mean_tokens(prompts))
    oversized = _check_oversized_requests(workload, prompts, schedule, settings)
    lines = [
        f"workload: {workload.name}",
        f"target: {settings.display_name}",
        f"reproduce with {_describe_reproduction(workload, seed, command_seed)}",
        *_stage_lines(workload, schedule),
        *slo_lines(workload.slo, slo_by_class(workload)),
        *_length_lines(workload, prompts, schedule.slot_count),
        f"estimated: about {forecast.text}",
        _fingerprint_line(workload, schedule, tokenizer),
        *(f"note: {note}" for note in _notes(workload, prompts, schedule)),
        *(f"note: {note}" for note in oversized.notes),
    ]

    return LoadDescription("\n".join(lines), forecast, oversized.error)


def _describe_reproduction(workload: Workload, run_seed: int, command_seed: int | None) -> str:
    """Return the options that reproduce a command: its seed, and its salt if that was specified."""
    seed = run_seed if command_seed is None else command_seed
    return seeds.reproduction_options(seed, seeds.resolve_salt(seed, workload.salt))


class _OversizedRequestCheck(NamedTuple):
    """The consequences of requests that are longer than the target allows.

    Many such requests are an error that refuses the run, and a few only a note. None has neither.
    """

    error: LoadgenError | None
    notes: list[str]


def _check_oversized_requests(
    workload: Workload, prompts: Prompts, schedule: Schedule, settings: Settings
) -> _OversizedRequestCheck:
    """Check whether all requests fit the context of the target, and return an error or a note.

    The context is known only of a target that loadgen simulates. For others, nothing is checked.
    """
    oversized_requests = _find_oversized_requests(prompts, schedule, settings)
    if oversized_requests is None:
        return _OversizedRequestCheck(error=None, notes=[])

    # There is an error only if many requests are too long.
    error = oversized_requests.to_error(workload, settings.display_name)
    if error is None:
        notes = [f"{oversized_requests.text}, so these requests will fail"]
    else:
        notes = []

    return _OversizedRequestCheck(error, notes)


def _fingerprint_line(workload: Workload, schedule: Schedule, tokenizer: tokens.Tokenizer) -> str:
    """Return a line with the fingerprints that the manifest of the run would have.

    One of them also depends on who counts tokens. It is assumed that the server does, because most
    servers report token counts.
    """
    recipe = recipe_fingerprint(workload, "server", tokenizer.file_sha256)
    return f"config fingerprint: {recipe}  schedule fingerprint: {schedule_fingerprint(schedule)}"


def slo_lines(slo: Slo | None, class_slos: Mapping[str, Slo | None]) -> list[str]:
    """Return lines that state by which SLO a run is judged.

    There is one line for the SLO of the workload, and one for each request class whose SLO differs
    from it.
    """
    differing_slos = {
        name: class_slo
        for name, class_slo in class_slos.items()
        if class_slo is not None and class_slo != slo
    }
    lines = [
        f"SLO of {name}: {describe_slo(class_slo)}" for name, class_slo in differing_slos.items()
    ]
    if slo is not None:
        return [f"SLO: {describe_slo(slo)}", *lines]

    return lines or ["SLO: none"]


def slo_by_class(workload: Workload) -> dict[str, Slo | None]:
    """Return the SLO of each class of a workload, by name; None for a class without its own."""
    if not isinstance(workload.requests, Mix):
        return {}
    return {name: request_class.slo for name, request_class in workload.requests.classes.items()}


def _find_oversized_requests(
    prompts: Prompts, schedule: Schedule, settings: Settings
) -> OversizedRequests | None:
    """Return the requests that do not fit the context of a target that loadgen simulates."""
    known_target = backend.known(settings)
    context = None if known_target is None else known_target.context
    return find_oversized_requests(prompts, schedule.slot_count, context)


def _stage_lines(workload: Workload, schedule: Schedule) -> Iterator[str]:
    """Yield a line for each stage of a load, for example "load: poisson 10/s: 600 requests, 60 s".

    A closed loop has a fixed number of virtual users. If the workload does not set the time over
    which they start (the ramp), it will be one response time, which is not known before the run. A
    second line, indented below the first one, says so.
    """
    for index, stage in enumerate(workload.stages):
        stage_plan = create_stage_plan(workload, schedule, index)
        bounds = ", ".join(describe_bounds(stage_plan, schedule, index, workload))
        suffix = "" if stage_plan.measured else ", warm-up, not measured"
        yield f"load: {stage_plan.arrival}: {bounds}{suffix}"
        if _gets_default_ramp(stage.arrival):
            yield f"{_CONTINUATION_INDENT}{_DEFAULT_RAMP_TEXT}"


def _gets_default_ramp(arrival: Arrival) -> bool:
    """Return True for a closed loop of several users for whose start the workload sets no ramp."""
    if not isinstance(arrival, Closed):
        return False
    return arrival.ramp_ns is None and arrival.concurrency > 1


def _length_lines(workload: Workload, prompts: Prompts, count: int | None) -> Iterator[str]:
    """Yield lines that describe the lengths of the first requests of a load.

    - one line on the tokens of a request,
    - one line on the size of a conversation or task, if requests belong to these,
    - one line for each request class of a mix, on its share of requests and tokens.

    Drawing the lengths of all requests would take too long.

    Args:
        workload: The workload.
        prompts: Its requests.
        count: The number of requests of the load, or None if it has no end.
    """
    first_requests = lengths.first_request_lengths(prompts, count)
    yield _request_lengths_line(first_requests)

    tasks = lengths.task_lengths(prompts, first_requests)
    if tasks:
        yield _task_lengths_line(workload, tasks)

    if isinstance(prompts, MixPrompts):
        for share in lengths.class_shares(prompts, first_requests):
            yield (
                f"class {share.name}: {format.percent(share.sessions)} of all sessions, "
                f"{format.percent(share.requests)} of these requests, "
                f"{format.percent(share.tokens)} of their tokens"
            )


def _request_lengths_line(first_requests: dict[int, lengths.RequestedLengths]) -> str:
    """Return a line on how many tokens the first requests of a load have.

    Example: "first 100 requests: 80 to 2,000 prompt tokens, 256 output tokens, largest context
    2,256". The context of a request is its prompt and its response together.

    Args:
        first_requests: The numbers of tokens of each request, by its id.
    """
    input_tokens = [request.input_tokens for request in first_requests.values()]
    output_tokens = [request.output_tokens for request in first_requests.values()]
    request_count = format.counted(len(first_requests), "request")

    text = f"first {request_count}: {_format_range(input_tokens)} prompt tokens"
    if any(output_tokens):
        text += f", {_format_range(output_tokens)} output tokens"
    else:
        text += ", output length chosen by the server"

    contexts = lengths.context_lengths(first_requests)
    if contexts:
        text += f", largest context {max(contexts):,}"

    return text


def _task_lengths_line(workload: Workload, tasks: Sequence[lengths.RequestedLengths]) -> str:
    """Return a line on the size of the first conversations or tasks.

    The mean number of requests is left out if all tasks have equally many.
    """
    noun = "conversation" if isinstance(workload.requests, Synthetic) else "task"
    request_counts = [task.requests for task in tasks]

    mean = ""
    if min(request_counts) < max(request_counts):
        mean = f" ({statistics.fmean(request_counts):.1f} on average)"

    input_range = _format_range(task.input_tokens for task in tasks)
    output_range = _format_range(task.output_tokens for task in tasks)
    return (
        f"a {noun}: {_format_range(request_counts)} requests{mean}, "
        f"{input_range} prompt and {output_range} output tokens"
    )


def _format_range(values: Iterable[int]) -> str:
    """Return the smallest and the largest of values as text, or one number if they are equal."""
    ordered = sorted(values)
    smallest = ordered[0]
    largest = ordered[-1]
    return f"{smallest:,}" if smallest == largest else f"{smallest:,} to {largest:,}"


def _notes(workload: Workload, prompts: Prompts, schedule: Schedule) -> Iterator[str]:
    """Yield the notes on a load that are known before its targets are probed."""
    yield from replaced_stages_notes(workload)
    yield from lost_keys_notes(workload)
    yield from trace_notes(workload)
    yield from prompts.warnings(schedule.slot_count or ASSUMED_REQUESTS)
    yield from repeated_rows_notes(prompts, schedule.slot_count)
