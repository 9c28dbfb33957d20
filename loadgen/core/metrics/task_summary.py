"""Summarizes conversations and agentic tasks, and counts those that meet the SLO. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from loadgen.core.metrics.windows import per_second
from loadgen.core.stats.quantiles import Distribution, milliseconds

if TYPE_CHECKING:
    from loadgen.core.metrics.accumulator import MetricAccumulator
    from loadgen.core.metrics.run_accumulator import CutConversations
    from loadgen.core.metrics.windows import Span, Window
    from loadgen.core.stats.amounts import Amounts


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
        count: All but those that were cut.
        cut: Those that the end of their stage or of the drain cut short, and those with a cancelled
            request, for example because the run was interrupted.
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
    accumulator: MetricAccumulator, cut_conversations: CutConversations, window: Window
) -> Sessions | None:
    """Return the summary of the tasks of a run, or None if there are none.

    A task is a series of requests: a conversation, or the requests of an agent. A task has no
    outcome if it was cut off: if it has a cancelled or an unfinished request, or if its last
    request was never due.

    Args:
        accumulator: The requests, and the tasks whose last request has a record.
        cut_conversations: The number of tasks whose last request was never due.
        window: The measurement window and the steady state, for rates.
    """
    recorded_tasks = accumulator.sum("tasks")
    cut_before_last_request = cut_conversations.by_end_of_load + cut_conversations.cancelled
    if recorded_tasks == 0 and cut_before_last_request == 0:
        return None

    recorded_but_cut = accumulator.sum("tasks_cut") + accumulator.sum("tasks_cancelled")
    tasks_with_outcome = recorded_tasks - recorded_but_cut
    ok_tasks = accumulator.sum("tasks_ok")
    task_times = accumulator.task_times

    return Sessions(
        # The tasks by outcome, and the rate of ok ones.
        count=tasks_with_outcome,
        cut=cut_before_last_request + recorded_but_cut,
        abandoned=accumulator.sum("tasks_abandoned"),
        ok=ok_tasks,
        ok_per_s=per_second(ok_tasks, window),
        steady_ok_per_s=_steady_tasks_per_s(task_times.ok_ends, window.steady),
        goodput=_measure_task_goodput(accumulator, window, counted_tasks=tasks_with_outcome),
        # Times of the ok tasks.
        duration_ms=task_times.durations_ns.distribution(),
        wait_ms=task_times.waits_ns.distribution(),
        longest_wait_ms=task_times.longest_waits_ns.distribution(),
        # Means per ok task.
        requests=_mean_of_ok(accumulator, "task_requests"),
        input_tokens=_mean_of_ok(accumulator, "task_input"),
        cached_tokens=_mean_cached_tokens(accumulator),
        output_tokens=_mean_of_ok(accumulator, "task_output"),
    )


def _mean_cached_tokens(accumulator: MetricAccumulator) -> float | None:
    """Return the mean cached tokens per ok task, None if no response reports cached tokens."""
    if not accumulator.sum("cached_tokens_known"):
        return None
    return _mean_of_ok(accumulator, "task_cached")


def _mean_of_ok(accumulator: MetricAccumulator, sum_name: str) -> float | None:
    """Return a sum over the ok tasks divided by their number, or None if no task is ok."""
    ok_tasks = accumulator.sum("tasks_ok")
    if ok_tasks == 0:
        return None
    return accumulator.sum(sum_name) / ok_tasks


def _measure_task_goodput(
    accumulator: MetricAccumulator, window: Window, counted_tasks: int
) -> TaskGoodput | None:
    """Return how many tasks are good, which means within the limits of the SLO on whole tasks.

    A task is a conversation or an agentic task. Return None if the SLO has no limits on tasks.

    Args:
        accumulator: The requests and tasks.
        window: The measurement window and the steady state, for rates of good tasks.
        counted_tasks: The number of all tasks with an outcome, good or not.
    """
    slo = accumulator.slo
    if slo is None or slo.task is None:
        return None

    objective = slo.task
    good_tasks = accumulator.sum("tasks_good")

    # Without any task, the share of good tasks is not known.
    good_share = None
    is_met = None
    if counted_tasks > 0:
        good_share = good_tasks / counted_tasks
        is_met = good_tasks >= objective.share * counted_tasks

    return TaskGoodput(
        # The limits of the SLO.
        within_ms=_optional_ms(objective.within_ns),
        wait_ms=_optional_ms(objective.wait_ns),
        share_limit=objective.share,
        # The good tasks.
        good=good_tasks,
        share=good_share,
        rps=per_second(good_tasks, window),
        steady_rps=_steady_tasks_per_s(accumulator.task_times.good_ends, window.steady),
        # Whether the SLO is met.
        met=is_met,
    )


def _optional_ms(limit_ns: int | None) -> float | None:
    """Return a limit in ms, or None if there is no limit."""
    return None if limit_ns is None else milliseconds(limit_ns)


def _steady_tasks_per_s(task_ends: Amounts, steady_state: Span) -> float | None:
    """Return how many tasks ended per second of the steady state.

    A task is a series of requests, such as a conversation. The steady state is the time without the
    start and the end of the load.

    Args:
        task_ends: An amount of 1 at the end of each task.
        steady_state: The interval.
    """
    ended_tasks = task_ends.between(steady_state.start_s, steady_state.end_s)
    return per_second(ended_tasks, steady_state)
