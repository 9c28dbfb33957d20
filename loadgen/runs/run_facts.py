"""The facts of a run for the full report: target, load, time, tokens, rates and trends. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from loadgen.core import format
from loadgen.core.execution import staggered_start
from loadgen.render.section import Facts, named_facts
from loadgen.repeated.capacity import rate_unit
from loadgen.runs import load_fidelity
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
    """Return what was run and what it delivered, one fact per line."""
    run = summary.run
    return named_facts(
        Target=describe_target(summary.target),
        Model=summary.target.model,
        Run=(
            f"{workload_name(summary)}: {run.id}",
            "" if run.seed is None else f"seed {run.seed}",
            f"loadgen {run.version} on {run.host.name or 'an unnamed host'}",
        ),
        Machine=list(_describe_machine(summary)),
        Software=summary.target.software,
        Hardware=[] if summary.hardware is None else summary.hardware.descriptions,
        **format.metadata_by_heading(run.metadata),
        Requests=describe_request_counts(summary),
        Load=list(_describe_load(summary)),
        Load_check=load_fidelity.describe_checks(summary.stimulus),
        Duration=list(_describe_duration(summary)),
        Trend=describe_trends(summary.drift),
        Stability=describe_stability(summary.sustainable),
        Tasks=describe_tasks(summary.sessions) if summary.sessions else [],
        Tokens=list(_describe_tokens(summary)),
        Throughput=list(_describe_throughput(summary)),
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

    The last text also says how many requests of the warm-up are not included in the counts.
    """
    counts = []
    for status in STATUSES:
        count = getattr(summary.requests, status)
        if count or status in ALWAYS_SHOWN:
            counts.append(f"{format.count(count)} {status}")
    if summary.warmup.scheduled:
        counts[-1] += f" ({format.count(summary.warmup.scheduled)} warm-up excluded)"
    return counts


# -- load and time ---------------------------------------------------------------------------------


def _describe_load(summary: Summary) -> Iterator[str]:
    """Yield the arrival process, the rates, the concurrency and the spacing of requests.

    The spacing is the coefficient of variation (CV) of the times between two requests: 0 if they
    are equal, 1 for a Poisson process.
    """
    load = summary.load
    # With sessions, the rate of the arrival process counts the tasks that start.
    arrivals_are_tasks = summary.sessions is not None and load.offered_rps is not None
    if load.arrival and arrivals_are_tasks:
        yield f"{load.arrival} ({rate_unit(summary)})"
    elif load.arrival:
        yield load.arrival
    yield from _describe_virtual_user_starts(summary)
    yield from _describe_request_rates(summary, load, arrivals_are_tasks=arrivals_are_tasks)
    yield f"concurrency {format.quantity(load.in_flight_mean)} on average"
    yield f"{format.count(load.in_flight_max)} maximum"
    measured_cv = load.gap_variation
    planned_cv = load.gap_variation_planned or 0.0
    if measured_cv is not None:
        yield f"inter-arrival CV {measured_cv:.2f} (target {planned_cv:.2f})"


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
    """Return the offered rate of requests for a load that consists of tasks.

    A task sends several requests. The text says "requests", because the arrival process counts the
    tasks that start. Tasks go on after the last one has started, so a run with a steady state has a
    rate that covers the time until the last request, which the text says too.
    """
    covers_end_of_tasks = load.steady_completed_rps is not None
    suffix = " until the last request" if covers_end_of_tasks else ""
    return f"requests offered {format.rate(offered_rps)}{suffix}"


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
    """Yield the numbers of prompt and output tokens, how many were cached, and who counted them.

    Prompts may be assembled from chunks of text that several of them share, such as retrieved
    documents. Then two more texts state the fraction of chunks that were in an earlier prompt, and
    the fraction that a prefix cache can reuse, because all chunks before them were the same too.
    """
    tokens = summary.tokens
    cache_details = list(_describe_cached_prompts(summary))
    suffix = f" ({', '.join(cache_details)})" if cache_details else ""
    yield f"{format.count(tokens.input)} prompt{suffix}"
    yield _describe_output_tokens(tokens)
    if summary.chunks is not None:
        yield f"chunks: {format.percent(summary.chunks.reused_share)} sent before"
        yield f"{format.percent(summary.chunks.leading_share)} after the same chunks"
    counters = [source for source in tokens.sources.output if source not in NOT_COUNTED]
    if counters:
        yield f"output counted by: {' + '.join(counters)}"


def _describe_output_tokens(tokens: Tokens) -> str:
    """Return the number of output tokens, and how many were requested if these are not as many."""
    output = f"{format.count(tokens.output)} output"
    requested_tokens = tokens.asked_output
    if requested_tokens is None or requested_tokens == tokens.output:
        return output
    return f"{output} of {format.count(requested_tokens)} requested"


def _describe_cached_prompts(summary: Summary) -> Iterator[str]:
    """Yield texts about the use of the prefix cache of the server, as far as it is known.

    They state the fraction of prompt tokens that came from the cache, and the fraction that the
    workload aims at. The next one states how many tokens the server wrote to the cache. For a
    trace, the last one states which fraction of its tokens repeats an earlier prompt.
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
