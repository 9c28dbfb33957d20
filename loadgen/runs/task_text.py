"""Texts and rows about tasks and conversations: completed ones, durations and steps.

Pure. A task is a sequence of requests in which each step waits for the response of the step before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from loadgen.core import format
from loadgen.runs.cells import quantile_ms, quantile_s
from loadgen.runs.rates import select_requests_per_s
from loadgen.runs.slo_text import describe_outcome, describe_task_limits, format_limit

if TYPE_CHECKING:
    from loadgen.core.metrics.part_summaries import StepSummary
    from loadgen.core.metrics.summary import Summary
    from loadgen.core.metrics.task_summary import Sessions, TaskGoodput

STEP_HEAD = (
    "step",
    "sends",
    "ok",
    "failed",
    "req/s",
    "E2E p50",
    "E2E p99",
    "TTFT p50",
    "tokens in",
    "out",
    "of the time",
)
"""The heads of `step_rows`. Latencies are in ms."""

STEP_LEGEND = (
    "Of the time: percentage of the duration of completed tasks that was spent waiting for this "
    "step. Latencies in ms."
)

_EMPTY_COUNTS = (format.NONE,) * 4
_EMPTY_TOKENS = (format.NONE,) * 3


def step_rows(summary: Summary) -> list[tuple[str, ...]]:
    """Return a row for each step of the tasks, and one for each pause before a step.

    A pause is the time that a tool runs or a user thinks.
    """
    rows = []
    for step in summary.steps:
        if step.pause:
            rows.append(_pause_row(step))
        rows.append(_step_row(step))
    return rows


def _step_name(step: StepSummary) -> str:
    return f"{step.of_class}: {step.name}" if step.of_class else step.name


def _pause_row(step: StepSummary) -> tuple[str, ...]:
    return (
        f"{step.pause}, before {_step_name(step)}",
        *_EMPTY_COUNTS,
        quantile_ms(step.pause_ms, "p50"),
        quantile_ms(step.pause_ms, "p99"),
        *_EMPTY_TOKENS,
        format.percent(step.pause_share),
    )


def _step_row(step: StepSummary) -> tuple[str, ...]:
    """Return the cells of a step of a task, in the order of the columns in STEP_HEAD.

    The second cell says what the step sends, and where: `chat node-1 llama`. Lost requests count as
    failed. Only chat requests have output tokens. The last cell is the fraction of the duration of
    tasks that is spent waiting for this step.
    """
    destination_parts = (step.kind, ", ".join(step.targets), step.model)
    destination = " ".join(part for part in destination_parts if part)
    failed = step.requests.failed + step.requests.lost
    has_output = step.kind == "chat"
    output_tokens = format.count(step.tokens.output) if has_output else format.NONE

    return (
        _step_name(step),
        destination,
        format.count(step.requests.ok),
        format.count(failed),
        format.quantity(select_requests_per_s(step)),
        quantile_ms(step.e2e_ms, "p50"),
        quantile_ms(step.e2e_ms, "p99"),
        quantile_ms(step.ttft_ms, "p50"),
        format.count(step.tokens.input),
        output_tokens,
        format.percent(step.time_share),
    )


def describe_tasks(sessions: Sessions) -> list[str]:
    """Return lines about the tasks: completed ones and durations, waits and tokens, and the SLO."""
    lines = [describe_completed_tasks(sessions)]
    if sessions.requests is not None:
        lines.append(_describe_waits(sessions))
        lines.append(_describe_mean_task(sessions))
    if sessions.goodput is not None:
        lines.append(_describe_task_slo(sessions, sessions.goodput))
    return lines


def describe_completed_tasks(sessions: Sessions) -> str:
    """Return how many tasks completed, their rate, and percentiles of their duration.

    For example: `90 of 100 completed (10 abandoned by their users), 1.5/s, duration p50 12 s, p95
    30 s`. The rate is that of the steady state if there is one, else that of the whole run.

    Args:
        sessions: The results of the sessions of a run. A session is a task or a conversation.
    """
    completed = f"{format.count(sessions.ok)} of {format.count(sessions.count)} completed"
    reasons = _describe_incomplete_tasks(sessions)
    if reasons:
        completed += f" ({', '.join(reasons)})"

    has_steady_rate = sessions.steady_ok_per_s is not None
    completed_per_s = sessions.steady_ok_per_s if has_steady_rate else sessions.ok_per_s
    rate = format.rate(completed_per_s)
    duration_p50 = quantile_s(sessions.duration_ms, "p50")
    duration_p95 = quantile_s(sessions.duration_ms, "p95")

    return f"{completed}, {rate}, duration p50 {duration_p50}, p95 {duration_p95}"


def _describe_incomplete_tasks(sessions: Sessions) -> list[str]:
    """Return how many tasks ended with the run, and how many their simulated users gave up."""
    reasons = []
    if sessions.cut:
        reasons.append(f"{format.count(sessions.cut)} cut off by the end of the run")
    if sessions.abandoned:
        reasons.append(f"{format.count(sessions.abandoned)} abandoned by their users")
    return reasons


def _describe_waits(sessions: Sessions) -> str:
    return (
        f"waiting for first tokens: p50 {quantile_s(sessions.wait_ms, 'p50')} in total, "
        f"longest wait p95 {quantile_s(sessions.longest_wait_ms, 'p95')}"
    )


def _describe_mean_task(sessions: Sessions) -> str:
    cached = ""
    if sessions.cached_tokens is not None:
        cached = f" ({format.quantity(sessions.cached_tokens)} cached)"

    return (
        f"on average {format.quantity(sessions.requests)} requests, "
        f"{format.quantity(sessions.input_tokens)} prompt tokens{cached} and "
        f"{format.quantity(sessions.output_tokens)} output tokens"
    )


def _describe_task_slo(sessions: Sessions, goodput: TaskGoodput) -> str:
    rate_per_s = goodput.rps if goodput.steady_rps is None else goodput.steady_rps
    return (
        f"SLO {describe_outcome(goodput.met)}: {format.count(goodput.good)} of "
        f"{format.count(sessions.count)} {describe_task_limits(goodput)} "
        f"({format.percent(goodput.share)}, {format_limit(goodput.share_limit)} required), "
        f"goodput {format.rate(rate_per_s)}"
    )
