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

MIN_TREND_BLOCK_S = 2.0
"""Trends are shown if the blocks of a run are at least so long. In a shorter run, the difference
between its thirds mostly shows how the run starts."""

STATUSES = ("scheduled", "ok", "failed", "dropped", "cancelled", "unfinished", "lost", "resent")
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
        Machine=list(_machine(summary)),
        Software=summary.target.software,
        Hardware=[] if summary.hardware is None else summary.hardware.descriptions,
        **format.metadata_by_heading(run.metadata),
        Requests=request_counts(summary),
        Load=list(_load(summary)),
        Load_check=load_fidelity.describe_checks(summary.stimulus),
        Duration=list(_times(summary)),
        Trend=describe_trends(summary.drift),
        Stability=describe_stability(summary.sustainable),
        Tasks=describe_tasks(summary.sessions) if summary.sessions else [],
        Tokens=list(_tokens(summary)),
        Throughput=list(_throughput(summary)),
    )


def _machine(summary: Summary) -> Iterator[str]:
    target = summary.target
    if target.gpus is not None:
        yield format.counted(target.gpus, "GPU")
    yield target.shape
    yield target.region
    connect_time = describe_connect_time(summary)
    if connect_time:
        yield f"connection time {connect_time}"


def request_counts(summary: Summary) -> list[str]:
    """Return how many requests were scheduled, and how many had which outcome."""
    counts = []
    for status in STATUSES:
        count = getattr(summary.requests, status)
        if count or status in ALWAYS_SHOWN:
            counts.append(f"{format.count(count)} {status}")
    if summary.warmup.scheduled:
        counts[-1] += f" ({format.count(summary.warmup.scheduled)} warm-up excluded)"
    return counts


# -- load and time ---------------------------------------------------------------------------------


def _load(summary: Summary) -> Iterator[str]:
    """Yield the arrival process, the rates, the concurrency and the spacing of requests."""
    load = summary.load
    has_task_rate = summary.sessions is not None and load.offered_rps is not None
    if load.arrival:
        yield f"{load.arrival} ({rate_unit(summary)})" if has_task_rate else load.arrival
    yield from _virtual_user_starts(summary)
    yield from _request_rates(summary, load, has_task_rate=has_task_rate)
    yield f"concurrency {format.quantity(load.in_flight_mean)} on average"
    yield f"{format.count(load.in_flight_max)} maximum"
    if load.gap_variation is not None:
        planned = load.gap_variation_planned or 0.0
        yield f"inter-arrival CV {load.gap_variation:.2f} (target {planned:.2f})"


def _virtual_user_starts(summary: Summary) -> Iterator[str]:
    """Yield how the virtual users of closed-loop stages started, each text once."""
    texts = (
        staggered_start.describe_start(stage.ramp_s, stage.ramp_from, stage.concurrency)
        for stage in summary.stages
    )
    yield from dict.fromkeys(text for text in texts if text)


def _request_rates(summary: Summary, load: Load, *, has_task_rate: bool) -> Iterator[str]:
    """Yield the offered, sent and completed rates of requests.

    The rate of a workload with tasks counts tasks, so the rate of requests is named as such. It
    includes requests after the end of the load, when tasks that started before go on.
    """
    if load.offered_rps is not None:
        offered = format.rate(load.offered_rps)
        goes_on = has_task_rate and load.steady_completed_rps is not None
        suffix = " until the last request" if goes_on else ""
        yield f"{'requests ' if has_task_rate else ''}offered {offered}{suffix}"
    yield f"sent {format.rate(load.achieved_rps)}"
    rates = select_headline_rates(summary)
    full_run = format.rate(compute_full_run_rates(summary).requests)
    yield f"completed {format.rate(rates.requests)} in the {rates.window} ({full_run} full run)"


def _times(summary: Summary) -> Iterator[str]:
    """Yield when the run started, and the lengths of the windows that rates refer to."""
    window = summary.window
    yield summary.run.started.replace("T", " ")
    for duration_s, label in (
        (window.duration_s, "measured"),
        (window.steady.duration_s, "steady-state window"),
        (window.whole.duration_s, "full run"),
    ):
        if duration_s is not None:
            yield f"{format.duration(duration_s)} {label}"


def describe_trends(drift: Drift) -> list[str]:
    """Return how the last third of the steady-state window differs from its first third.

    The list is empty for a short run (MIN_TREND_BLOCK_S).
    """
    if drift.block_s is None or drift.block_s < MIN_TREND_BLOCK_S:
        return []
    trends = []
    for label, field in _TREND_LABELS:
        change = getattr(drift, field)
        if change is not None:
            trends.append(f"{label} {change * 100:+.1f} %")
    if not trends:
        return []
    return [f"last vs. first third of steady state: {trends[0]}", *trends[1:]]


def describe_stability(sustainable: Sustainable) -> str:
    """Return whether the server could sustain the load, with the reason."""
    labels = {True: "stable", False: "NOT SUSTAINED", None: "not assessed"}
    return f"{labels[sustainable.sustained]}: {sustainable.why}"


# -- tokens and rates ------------------------------------------------------------------------------


def _tokens(summary: Summary) -> Iterator[str]:
    """Yield the numbers of prompt and output tokens, how many were cached, and who counted them."""
    tokens = summary.tokens
    prompt_details = list(_prompt_details(summary))
    details = f" ({', '.join(prompt_details)})" if prompt_details else ""
    yield f"{format.count(tokens.input)} prompt{details}"
    output = f"{format.count(tokens.output)} output"
    if tokens.asked_output is not None and tokens.asked_output != tokens.output:
        output += f" of {format.count(tokens.asked_output)} requested"
    yield output
    if summary.chunks is not None:
        yield f"chunks: {format.percent(summary.chunks.reused_share)} sent before"
        yield f"{format.percent(summary.chunks.leading_share)} after the same chunks"
    sources = [tag for tag in tokens.sources.output if tag not in ("none", "unasked")]
    if sources:
        yield f"output counted by: {' + '.join(sources)}"


def _prompt_details(summary: Summary) -> Iterator[str]:
    """Yield how much of the prompts was cached, requested to be cached, and cacheable."""
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


def _throughput(summary: Summary) -> Iterator[str]:
    """Yield token rates in the headline window and over the full run."""
    rates = select_headline_rates(summary)
    full_run = compute_full_run_rates(summary)
    if rates.output is None:
        return
    yield f"{format.rate(rates.output, ' output tok/s')}"
    yield f"{format.rate(rates.total, ' total tok/s')} in the {rates.window}"
    yield f"full run {format.rate(full_run.output, ' output tok/s')}"
    yield from _throughput_per_gpu(rates, full_run.output_per_gpu)


def _throughput_per_gpu(rates: HeadlineRates, full_run_per_gpu: float | None) -> Iterator[str]:
    if rates.output_per_gpu is None:
        return
    unit = " output tok/s per GPU"
    yield f"{format.rate(rates.output_per_gpu, unit)} in the {rates.window}"
    yield f"full run {format.rate(full_run_per_gpu, unit)}"
