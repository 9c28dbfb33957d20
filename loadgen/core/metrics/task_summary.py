"""Summarizes conversations and agentic tasks, and counts those that meet the SLO. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from loadgen.core.metrics.windows import per_second
from loadgen.core.stats.quantiles import Distribution, milliseconds

if TYPE_CHECKING:
    from loadgen.core.metrics.accumulator import MetricAccumulator
    from loadgen.core.metrics.run_accumulator import CutConversations
    from loadgen.core.metrics.windows import Window


class TaskGoodput(msgspec.Struct, frozen=True, kw_only=True):
    """Conversations and tasks that meet the part of the SLO about whole tasks.

    Attributes:
        within_ms: The limit of the time from the due time of the first request to the end of the
            last one.
        wait_ms: The limit of the time to each first token.
        good: The number of tasks within these limits.
        rps: Good tasks per second of the measurement window.
        steady_rps: Good tasks that ended in the steady-state window, per second of it.
        share: `good` divided by `Sessions.count`. Failed tasks are not good.
        share_limit: The share that the SLO requires.
        met: Whether the share is at least `share_limit`. None if no task is counted.
    """

    within_ms: float | None
    wait_ms: float | None
    good: int
    rps: float | None
    steady_rps: float | None = None
    share: float | None
    share_limit: float
    met: bool | None


class Sessions(msgspec.Struct, frozen=True, kw_only=True):
    """Conversations and agentic tasks of measured stages.

    The fields from `duration_ms` to `output_tokens` describe the ok ones, whose requests are all
    ok.

    Attributes:
        count: All but those with a cancelled request and those that were cut.
        cut: Those that the end of their stage or of the drain cut short.
        abandoned: Those whose user went away in the middle of a response.
        ok: Those whose requests are all ok.
        ok_per_s: Ok ones per second of the measurement window.
        steady_ok_per_s: Ok ones that ended in the steady-state window, per second of it.
        duration_ms: From the due time of the first request to the end of the last one.
        wait_ms: The wait for first tokens, all requests of a task together.
        longest_wait_ms: The longest wait of a task for a first token.
        requests: Mean number of requests.
        input_tokens: Mean number of prompt tokens.
        cached_tokens: Mean number of cached prompt tokens. None if the server does not report them.
        output_tokens: Mean number of output tokens.
        goodput: None if the SLO has no part about whole tasks.
    """

    count: int
    cut: int = 0
    abandoned: int = 0
    ok: int
    ok_per_s: float | None
    steady_ok_per_s: float | None
    duration_ms: Distribution
    wait_ms: Distribution = Distribution()
    longest_wait_ms: Distribution = Distribution()
    requests: float | None = None
    input_tokens: float | None = None
    cached_tokens: float | None = None
    output_tokens: float | None = None
    goodput: TaskGoodput | None = None


def summarize_tasks(
    accumulator: MetricAccumulator, cut: CutConversations, window: Window
) -> Sessions | None:
    """Return the summary of conversations and agentic tasks, or None if there are none.

    Both are sequences of requests, and are called sessions in the summary. Those that were
    cancelled, or that the end of the load or of the run cut, are neither ok nor failed. So they
    do not count as sessions with an outcome.

    Args:
        accumulator: The requests, and the sessions whose last request is recorded.
        cut: The number of sessions whose last request was never scheduled.
        window: The measurement window and the steady state, which rates are divided by.
    """
    recorded_to_the_last = accumulator.sum("sessions")
    if not recorded_to_the_last and not cut.by_end_of_load and not cut.cancelled:
        return None

    ok = accumulator.sum("sessions_ok")
    cancelled = accumulator.sum("sessions_cancelled")
    cut_by_end_of_run = accumulator.sum("sessions_cut")
    with_outcome = recorded_to_the_last - cancelled - cut_by_end_of_run
    has_cached_tokens = accumulator.sum("cached_tokens_known") > 0

    return Sessions(
        count=with_outcome,
        cut=cut.by_end_of_load + cut_by_end_of_run,
        abandoned=accumulator.sum("sessions_abandoned"),
        ok=ok,
        ok_per_s=per_second(ok, window),
        steady_ok_per_s=_steady_per_s(accumulator, "session", window),
        duration_ms=accumulator.distribution("session"),
        wait_ms=accumulator.distribution("session_wait"),
        longest_wait_ms=accumulator.distribution("session_longest_wait"),
        requests=_mean_of_ok(accumulator, "session_requests"),
        input_tokens=_mean_of_ok(accumulator, "session_input"),
        cached_tokens=_mean_of_ok(accumulator, "session_cached") if has_cached_tokens else None,
        output_tokens=_mean_of_ok(accumulator, "session_output"),
        goodput=_measure_task_goodput(accumulator, window, counted_tasks=with_outcome),
    )


def _mean_of_ok(accumulator: MetricAccumulator, sum_name: str) -> float | None:
    """Return a sum over the ok tasks divided by their number, or None without any."""
    ok = accumulator.sum("sessions_ok")
    return accumulator.sum(sum_name) / ok if ok else None


def _measure_task_goodput(
    accumulator: MetricAccumulator, window: Window, counted_tasks: int
) -> TaskGoodput | None:
    """Return how many tasks are good, which means within the limits of the SLO for whole tasks.

    A task is a sequence of requests, called a session in the names of sums. An SLO may limit the
    duration of a task and the wait for each of its first tokens, and requires that a share of the
    tasks is within these limits. Returns None if the SLO has no such part.

    Args:
        accumulator: The tasks.
        window: The intervals that rates are over.
        counted_tasks: The number of tasks that count: all but cancelled ones and those that the end
            of the run cut.
    """
    if accumulator.slo is None or accumulator.slo.task is None:
        return None

    term = accumulator.slo.task
    good = accumulator.sum("sessions_good")
    share = None

    is_met = None
    if counted_tasks:
        share = good / counted_tasks
        is_met = good >= term.share * counted_tasks

    return TaskGoodput(
        within_ms=None if term.within_ns is None else milliseconds(term.within_ns),
        wait_ms=None if term.wait_ns is None else milliseconds(term.wait_ns),
        good=good,
        rps=per_second(good, window),
        steady_rps=_steady_per_s(accumulator, "good_session", window),
        share=share,
        share_limit=term.share,
        met=is_met,
    )


def _steady_per_s(accumulator: MetricAccumulator, amount: str, window: Window) -> float | None:
    """Return the rate, per second, at which tasks ended in the steady state.

    Args:
        accumulator: The tasks.
        amount: Which tasks count: "session" for ok ones, or "good_session".
        window: The intervals of the run, of which the steady state is used.
    """
    steady = window.steady
    ended = accumulator.amount(amount).between(steady.start_s, steady.end_s)
    return per_second(ended, steady)
