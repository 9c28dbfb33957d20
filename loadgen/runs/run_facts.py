"""The facts of a run for the full report: target, load, time, tokens, rates and trends. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from loadgen.core import format
from loadgen.core.execution import staggered_start
from loadgen.core.workload.cache_fill import CACHE_FILL
from loadgen.render.section import Facts, named_facts
from loadgen.repeated.capacity import rate_unit
from loadgen.runs import load_fidelity
from loadgen.runs.interactivity_text import describe_interactivity
from loadgen.runs.latency_text import describe_connect_time
from loadgen.runs.rates import HeadlineRates, compute_full_run_rates, select_headline_rates
from loadgen.runs.run_title import describe_target, workload_name
from loadgen.runs.task_text import describe_tasks

if TYPE_CHECKING:
    from loadgen.core.metrics.drift import Drift
    from loadgen.core.metrics.load import Load
    from loadgen.core.metrics.summary import Summary
    from loadgen.core.metrics.sustainable import Sustainable
    from loadgen.core.metrics.token_usage import Tokens
    from loadgen.core.results.manifest import ChunkReuse

MIN_TREND_BLOCK_S = 2.0
"""Trends are shown if the blocks of a run are at least so long. In a shorter run, the difference
between its thirds mostly shows how the run starts."""

STATUSES = ("scheduled", "ok", "failed", "dropped", "cancelled", "unfinished", "lost", "resent")
NOT_COUNTED = ("none", "unasked")
"""The sources of output tokens that are unknown, and of requests for no output."""

ALWAYS_SHOWN = ("scheduled", "ok", "failed")
"""The other statuses are shown if a request has them."""

_TREND_LABELS = (
    ("TTFT p50", "ttft_p50"),
    ("TTFT p99", "ttft_p99"),
    ("TPOT p50", "tpot_p50"),
    ("TPOT p99", "tpot_p99"),
    ("E2E p99", "e2e_p99"),
    ("output tok/s", "output_per_s"),
)
"""The label of each trend and its field in `Drift`."""


def run_facts(summary: Summary) -> Facts:
    """Return what was run and what it delivered, one fact per line.

    Each keyword is the name of a fact, with `_` for a space. A fact with several texts shows them
    in one line, separated by commas, and a fact without text is left out.
    """
    run = summary.run
    run_texts = (
        f"{workload_name(summary)}: {run.id}",
        "" if run.seed is None else f"seed {run.seed}",
        f"loadgen {run.version} on {run.host.name or 'an unnamed host'}",
    )
    hardware_texts = [] if summary.hardware is None else summary.hardware.descriptions
    task_texts = describe_tasks(summary.sessions) if summary.sessions else []

    return named_facts(
        # What was run
        Target=describe_target(summary.target),
        Model=summary.target.model,
        Run=run_texts,
        Machine=_describe_machine(summary),
        Software=summary.target.software,
        Hardware=hardware_texts,
        **format.metadata_by_heading(run.metadata),
        # What it delivered
        Requests=describe_request_counts(summary),
        Load=_describe_load(summary),
        Load_check=load_fidelity.describe_checks(summary.stimulus),
        Duration=_describe_duration(summary),
        Trend=describe_trends(summary.drift),
        Stability=describe_stability(summary.sustainable),
        Tasks=task_texts,
        Tokens=_describe_tokens(summary),
        Throughput=_describe_throughput(summary),
        Per_user=describe_interactivity(summary.interactivity),
    )


def _describe_machine(summary: Summary) -> Iterator[str]:
    """Yield the GPUs, the machine type and the region of the target, and how far away it is."""
    target = summary.target
    if target.gpus is not None:
        yield format.counted(target.gpus, "GPU")

    yield target.shape
    yield target.region

    connect_time = describe_connect_time(summary)
    if connect_time:
        yield f"connection time {connect_time}"


def describe_request_counts(summary: Summary) -> list[str]:
    """Return how many requests were scheduled, and how many had which outcome.

    The last text also says how many requests before the measured load are not included.
    """
    counts = []
    for status in STATUSES:
        count = getattr(summary.requests, status)
        if count or status in ALWAYS_SHOWN:
            counts.append(f"{format.count(count)} {status}")

    excluded = describe_excluded_requests(summary)
    if excluded:
        counts[-1] += f" ({excluded})"

    return counts


def describe_excluded_requests(summary: Summary) -> str:
    """Return how many requests before the measured load are in no count, or "" if there are none.

    They are those of the warm-up, and those that fill the prefix cache of the server before agent
    trajectories that begin in the middle. For example: `8 cache fill, 20 warm-up excluded`.
    """
    excluded_count = summary.warmup.scheduled
    fill_count = sum(
        stage.requests.scheduled for stage in summary.stages if stage.name == CACHE_FILL
    )
    warmup_count = excluded_count - fill_count

    phrases = []
    if fill_count:
        phrases.append(f"{format.count(fill_count)} cache fill")
    if warmup_count:
        phrases.append(f"{format.count(warmup_count)} warm-up")
    return f"{', '.join(phrases)} excluded" if phrases else ""


# -- load and time ---------------------------------------------------------------------------------


def _describe_load(summary: Summary) -> Iterator[str]:
    """Yield the arrival process, the request rates, the concurrency, and how regular arrivals are.

    For example: `poisson 10/s`, `sent 9.98/s`, `concurrency 31 on average`, `58 maximum`.
    """
    load = summary.load

    # An open loop with sessions starts tasks at the rate of its arrival process, not requests.
    arrivals_are_tasks = summary.sessions is not None and load.offered_rps is not None
    if load.arrival:
        unit = f" ({rate_unit(summary)})" if arrivals_are_tasks else ""
        yield f"{load.arrival}{unit}"

    yield from _describe_virtual_user_starts(summary)
    yield from _describe_request_rates(summary, load, arrivals_are_tasks=arrivals_are_tasks)
    yield f"concurrency {format.quantity(load.in_flight_mean)} on average"
    yield f"{format.count(load.in_flight_max)} maximum"

    if load.gap_variation is not None:
        yield _describe_inter_arrival_cv(load.gap_variation, load.gap_variation_planned)


def _describe_inter_arrival_cv(measured_cv: float, planned_cv: float | None) -> str:
    """Return the coefficient of variation (CV) of the times between two requests, as text.

    It is their standard deviation divided by their mean: 0 if all times are equal, and 1 for a
    Poisson process. A schedule without a planned value has equal times, so its target is 0.
    """
    target_cv = 0.0 if planned_cv is None else planned_cv
    return f"inter-arrival CV {measured_cv:.2f} (target {target_cv:.2f})"


def _describe_virtual_user_starts(summary: Summary) -> Iterator[str]:
    """Yield how the virtual users of closed-loop stages started, each text once."""
    texts = (
        staggered_start.describe_start(stage.ramp_s, stage.ramp_from, stage.concurrency)
        for stage in summary.stages
    )
    yield from dict.fromkeys(text for text in texts if text)


def _describe_request_rates(
    summary: Summary, load: Load, *, arrivals_are_tasks: bool
) -> Iterator[str]:
    """Yield the offered, sent and completed rates of requests.

    Args:
        summary: The results of the run.
        load: The measured load of the run, with the rates at which requests were offered and sent.
        arrivals_are_tasks: Whether the arrival process starts tasks, each of which sends several
            requests, and not single requests.
    """
    if load.offered_rps is not None and arrivals_are_tasks:
        yield _describe_request_rate_of_tasks(load, load.offered_rps)
    elif load.offered_rps is not None:
        yield f"offered {format.rate(load.offered_rps)}"

    yield f"sent {format.rate(load.achieved_rps)}"
    rates = select_headline_rates(summary)
    completed = format.rate(rates.requests)
    completed_in_full_run = format.rate(compute_full_run_rates(summary).requests)
    yield f"completed {completed} in the {rates.window} ({completed_in_full_run} full run)"


def _describe_request_rate_of_tasks(load: Load, offered_rps: float) -> str:
    """Return the rate at which the tasks of a load offered requests: `requests offered 40/s`.

    A task sends several requests, and its arrival process counts tasks, so the text has the word
    "requests". If the run has a steady state, the other rates in the report cover only that. This
    one covers the time until the last request of all tasks, so the text adds "until the last
    request".
    """
    has_steady_state = load.steady_completed_rps is not None
    window = " until the last request" if has_steady_state else ""
    return f"requests offered {format.rate(offered_rps)}{window}"


def _describe_duration(summary: Summary) -> Iterator[str]:
    """Yield when the run started, and the lengths of the windows that rates refer to."""
    window = summary.window
    yield summary.run.started.replace("T", " ")

    for duration_s, label in (
        (window.duration_s, "measured"),
        (window.steady.duration_s, "steady-state window"),
        (window.full_run.duration_s, "full run"),
    ):
        if duration_s is not None:
            yield f"{format.duration(duration_s)} {label}"


def describe_trends(drift: Drift) -> list[str]:
    """Return how the last third of the steady-state window differs from its first third.

    For example: `["last vs. first third of steady state: TTFT p50 +3.1 %", "E2E p99 -0.4 %"]`.
    The list is empty if a third is shorter than MIN_TREND_BLOCK_S, because the differences mostly
    show how the run starts then.
    """
    if drift.block_s is None or drift.block_s < MIN_TREND_BLOCK_S:
        return []

    trends = []
    for label, field in _TREND_LABELS:
        relative_change = getattr(drift, field)
        if relative_change is not None:
            trends.append(f"{label} {relative_change * 100:+.1f} %")

    if trends:
        trends[0] = f"last vs. first third of steady state: {trends[0]}"

    return trends


def describe_stability(sustainable: Sustainable) -> str:
    """Return whether the server could sustain the load, with the reason."""
    labels = {True: "stable", False: "NOT SUSTAINED", None: "not assessed"}
    return f"{labels[sustainable.sustained]}: {sustainable.reason}"


# -- tokens and rates ------------------------------------------------------------------------------


def _describe_tokens(summary: Summary) -> Iterator[str]:
    """Yield the numbers of prompt and output tokens, how prompts were reused, and who counted.

    For example: `12,000 prompt (31 % cached)`, `3,000 output`, `output counted by: server`.
    """
    tokens = summary.tokens
    cache_details = list(_describe_cached_prompts(summary))
    suffix = f" ({', '.join(cache_details)})" if cache_details else ""
    yield f"{format.count(tokens.input)} prompt{suffix}"
    yield _describe_output_tokens(tokens)

    if summary.chunks is not None:
        yield from _describe_reused_chunks(summary.chunks)

    counters = [source for source in tokens.sources.output if source not in NOT_COUNTED]
    if counters:
        yield f"output counted by: {' + '.join(counters)}"


def _describe_reused_chunks(chunks: ChunkReuse) -> Iterator[str]:
    """Yield how often prompts repeated a chunk, which is a text such as a retrieved document.

    The first text has the fraction of chunks that an earlier prompt had too. The second one has the
    fraction that a prefix cache can reuse: a cache needs all text before the chunk to be the same.
    """
    yield f"chunks: {format.percent(chunks.reused_share)} sent before"
    yield f"{format.percent(chunks.leading_share)} after the same chunks"


def _describe_output_tokens(tokens: Tokens) -> str:
    """Return the number of output tokens, and how many were requested if these are not as many."""
    output = f"{format.count(tokens.output)} output"
    requested_tokens = tokens.asked_output
    if requested_tokens is None or requested_tokens == tokens.output:
        return output
    return f"{output} of {format.count(requested_tokens)} requested"


def _describe_cached_prompts(summary: Summary) -> Iterator[str]:
    """Yield what is known about the use of the prefix cache of the server, one text per fact.

    The facts are the fraction of prompt tokens that came from the cache, with the fraction that the
    workload requests; the number of tokens that the server wrote to the cache; and, for a recorded
    trace, the fraction of its prompt tokens that repeat an earlier prompt. Unknown facts are left
    out. For example: `31 % cached, target 30 %`, `8,000 written to the cache`.
    """
    tokens = summary.tokens
    if tokens.cached_share is not None:
        cached = f"{format.percent(tokens.cached_share)} cached"
        if summary.requested_cache_share is not None:
            cached += f", target {format.percent(summary.requested_cache_share)}"
        yield cached

    if tokens.cache_written is not None:
        yield f"{format.count(tokens.cache_written)} written to the cache"

    if summary.trace_cache_share is not None:
        yield f"{format.percent(summary.trace_cache_share)} repeated in the trace"


def _describe_throughput(summary: Summary) -> Iterator[str]:
    """Yield token rates in the headline window and over the full run."""
    rates = select_headline_rates(summary)
    full_run = compute_full_run_rates(summary)
    if rates.output is None:
        return

    yield f"{format.rate(rates.output, ' output tok/s')}"
    yield f"{format.rate(rates.total, ' total tok/s')} in the {rates.window}"
    yield f"full run {format.rate(full_run.output, ' output tok/s')}"
    yield from _describe_throughput_per_gpu(rates, full_run.output_per_gpu)


def _describe_throughput_per_gpu(
    rates: HeadlineRates, full_run_per_gpu: float | None
) -> Iterator[str]:
    if rates.output_per_gpu is None:
        return
    unit = " output tok/s per GPU"
    yield f"{format.rate(rates.output_per_gpu, unit)} in the {rates.window}"
    yield f"full run {format.rate(full_run_per_gpu, unit)}"
