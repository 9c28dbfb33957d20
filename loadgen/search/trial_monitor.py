"""Decides from the records of a running trial whether it passes or fails, before it ends."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from loadgen.core.metrics import columns as metrics
from loadgen.core.metrics import tasks
from loadgen.core.metrics.columns import Columns
from loadgen.core.metrics.replica_keys import replica_keys
from loadgen.core.metrics.shortfall import MIN_GROWTH_SHARE
from loadgen.core.results.record import ROW, concatenate_rows, select_rows
from loadgen.core.stats import intervals, trend
from loadgen.core.stats.quantiles import needed_samples, quantile_of
from loadgen.search.goal import FAILED, PASSED, ROUNDING, Decision

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from loadgen.core.slo import TaskTerm
    from loadgen.search.goal import Goal

NS_PER_S = 1_000_000_000
CONFIDENCE = 0.99
"""The probability with which a series stays below its upper bound."""
TWO_SIDED_CONFIDENCE = 0.98
"""The level of an interval whose upper end alone has the probability CONFIDENCE."""
MIN_STEADY_BATCHES = 10
"""The least number of batches after the start-up from which a trial may pass early."""
MIN_START_UP_BATCHES = 2
"""The least number of batches before those, so that a start-up can be recognized at all."""
MIN_BATCHES = MIN_START_UP_BATCHES + MIN_STEADY_BATCHES
"""The least number of batches from which a trial may pass early."""
MAX_BATCHES = 120
"""The largest number of batches. A longer run has longer batches, not more."""
MIN_BATCH_NS = 5 * NS_PER_S
MAX_GROWTH_SHARE = 0.15
"""How much the requests in flight may grow until the planned end, as a share of their mean."""
MAX_GROWTH_REQUESTS = 2
"""How many requests they may grow in addition, for loads with few requests in flight."""
MAX_PENDING_SHARE = 0.001
"""The share of the requests of a batch that may be open without delaying the use of the batch."""
DEFAULT_BATCH_REQUESTS = 100
"""The number of requests that a batch should have if no term names a quantile."""
LOG_OF_FAILURE = 40.0
"""The value in place of the logarithm of a quantile that falls on a failed request.

It is above the logarithm of any limit: exp(40) ns are seven years.
"""
NEVER_NS = np.iinfo(np.int64).max
"""The latency that is assumed for a failed request, so that it exceeds every limit."""


class PlannedLoad(NamedTuple):
    """What the schedule of a trial starts.

    Attributes:
        due_ns: When each request, or the first request of each session, is due, from the start of
            the schedule.
        start_ns: When the measured load begins, after a warm-up, from the start of the schedule.
        session_requests: The number of requests of all sessions, or None if every session has one
            request.
        max_turns: The largest number of turns of a session.
    """

    due_ns: NDArray[np.int64]
    start_ns: int = 0
    session_requests: int | None = None
    max_turns: int = 1

    @property
    def request_count(self) -> int:
        """The number of planned requests."""
        return len(self.due_ns) if self.session_requests is None else self.session_requests


@dataclass(frozen=True)
class _Batches:
    """The requests of a trial by the time at which they were due, for the method of batch means.

    A batch is a period of the measured load, such as 5 s, with the requests that were due in it.
    All batches are equally long and follow each other. Latencies of neighbouring requests depend on
    each other; the values of batches hardly do, so that they can be tested for a trend.

    A request is pending if it was due but has not ended yet. The batches end before the first one
    in which too many requests are pending.

    Attributes:
        width_ns: The length of a batch.
        count: The number of batches.
        due_counts: The number of requests that were due in each batch.
        pending_counts: The number of these that are pending.
        batch_of_row: The index of the batch in which each ended request was due. It is `count` or
            more for a request that was due after the last batch.
        ends_ns: The end of each batch, from the start of the measured load.
        in_flight: The number of requests in flight at the end of each batch.
    """

    width_ns: int
    count: int
    due_counts: NDArray[np.int64]
    pending_counts: NDArray[np.int64]
    batch_of_row: NDArray[np.int64]
    ends_ns: NDArray[np.int64]
    in_flight: NDArray[np.float64]


class _EndedRequests:
    """The requests of a running trial that have ended, and the terms of the SLO that they missed.

    Attributes:
        miss_counts: How many requests have missed each term so far.
        rows: The records of the requests, or no records if they are not kept.
        misses: The mask of shape (terms, rows) of which of these requests missed which term.
    """

    def __init__(self, goal: Goal, *, keeps_rows: bool) -> None:
        """Start without any request.

        Args:
            goal: The terms that have to hold.
            keeps_rows: Whether the records are kept, as an early pass needs them. A failure only
                needs the counts.
        """
        self._goal = goal
        self._keeps_rows = keeps_rows
        self.miss_counts = np.zeros(len(goal.request_terms), np.int64)
        self.rows = np.zeros(0, ROW)
        self.misses = goal.find_misses(self.rows)

    def add(self, ended_rows: NDArray[np.void]) -> None:
        """Add the records of requests that have ended since the last call."""
        misses = self._goal.find_misses(ended_rows)
        self.miss_counts += misses.sum(axis=1)
        if self._keeps_rows:
            self.rows = concatenate_rows((self.rows, ended_rows))
            self.misses = np.concatenate((self.misses, misses), axis=1)


class _MissedTasks:
    """Counts the tasks of a running trial that missed their objective.

    A task is a session of several requests, and is judged when all of its requests are known.

    Attributes:
        count: How many tasks have missed their objective so far.
    """

    def __init__(self, term: TaskTerm, max_turns: int) -> None:
        """Start without any task. `max_turns` is the largest number of requests of a task."""
        self._term = term
        self._max_turns = max_turns
        self._rows_of_open_tasks = np.zeros(0, ROW)
        self.count = 0

    def add(self, new_rows: NDArray[np.void]) -> None:
        """Add the records of requests that have ended since the last call.

        The records of tasks that have not ended are kept until the next call. A task that the end
        of the run cut off says nothing about its objective and is not counted.
        """
        rows = concatenate_rows((self._rows_of_open_tasks, new_rows))
        table = tasks.tabulate_tasks(Columns(rows), self._max_turns)
        open_task_numbers = table.numbers[~table.has_ended]
        self._rows_of_open_tasks = select_rows(rows, np.isin(rows["session"], open_task_numbers))

        was_cancelled = table.columns.cancelled.astype(bool)
        is_unfinished = table.columns.unfinished.astype(bool)
        is_complete = table.has_ended & ~was_cancelled & ~is_unfinished
        has_met_term = tasks.meets_task_term(table.columns, self._term)
        self.count += int((is_complete & ~has_met_term).sum())

    def describe_failure(self, task_count: int) -> str:
        """Return that more tasks missed their objective than it allows, or "" if they did not.

        The objective names the share of the planned `task_count` tasks that has to meet it, such as
        0.9.
        """
        needed_count = math.ceil(self._term.share * task_count - ROUNDING)
        allowed = task_count - needed_count
        if self.count <= allowed:
            return ""
        return (
            f"{self.count:,} of {task_count:,} tasks missed their objective ({allowed:,} allowed)"
        )


class TrialMonitor:
    """Decides the outcome of a trial before its end, where that is possible.

    A failure is exact: the misses that are known exceed what the planned number of requests, or
    tasks, allows, whatever the other requests do. It needs no independence of the requests.

    A pass is an extrapolation, and only made with `may_pass_early`. It needs a steady state: the
    start-up, in which an empty server fills, is over, and the number of requests in flight does not
    grow. In addition, neither the quantiles of the terms nor the misses may reach their limits by
    the planned end. This is judged by batch means over the requests in the order of their arrival,
    with every pending request counted as a miss.
    """

    def __init__(self, goal: Goal, load: PlannedLoad, *, may_pass_early: bool = True) -> None:
        """Prepare to watch a trial, before any of its requests has ended.

        Args:
            goal: What has to hold for the trial to pass.
            load: The requests that the trial plans to send.
            may_pass_early: Whether the trial may pass before its end. It never does if terms of the
                goal need the full run, or with sessions of several requests, because it is not
                known beforehand when their later requests are due.
        """
        self._goal = goal
        self._request_count = load.request_count
        self._allowed_misses = goal.allowed_misses(load.request_count)
        has_known_arrivals = load.session_requests is None
        self._may_pass_early = may_pass_early and has_known_arrivals and not goal.full_run_terms

        # Records, and the times that callers pass, count from the start of the schedule. Arrivals
        # and batches count from the start of the measured load, which follows the warm-up.
        self._load_start_ns = load.start_ns
        self._arrivals_ns = np.sort(load.due_ns) - load.start_ns

        self._ended_requests = _EndedRequests(goal, keeps_rows=self._may_pass_early)
        self._missed_tasks: _MissedTasks | None = None
        if goal.slo.task is not None:
            self._missed_tasks = _MissedTasks(goal.slo.task, load.max_turns)

    @property
    def last_due_ns(self) -> int:
        """When the last request, or the first request of the last session, is due."""
        return int(self._arrivals_ns[-1]) + self._load_start_ns

    def add_rows(self, now_ns: int, new_rows: NDArray[np.void]) -> Decision | None:
        """Return the decision at `now_ns`, or None while there is none.

        `new_rows` are the measured records since the last call, in any order. Times are relative to
        the start of the schedule.
        """
        if self._missed_tasks is not None:
            self._missed_tasks.add(new_rows)
        ended_requests = self._ended_requests
        ended_requests.add(select_ended(new_rows))
        return self._decide(
            now_ns, ended_requests.miss_counts, ended_requests.rows, ended_requests.misses
        )

    def find_first_decision(self, rows: NDArray[np.void], interval_ns: int) -> Decision | None:
        """Return the first decision of a finished trial, or None if it had to run to its end.

        A simulated trial is computed to its end before it is judged. This method then finds out
        when it would have been decided: every `interval_ns` it looks at the requests that had ended
        by then, as `add_rows` does in a running trial.

        Args:
            rows: The records of all requests that ended, in the order in which they ended.
            interval_ns: The time between two checks, such as 5 s.
        """
        done_ns = rows["done_ns"]
        misses = self._goal.find_misses(rows)
        miss_counts = np.zeros(len(misses), np.int64)
        ended_count = 0

        last_done_ns = int(done_ns.max(initial=0))
        for now_ns in range(interval_ns, last_done_ns, interval_ns):
            previous_count = ended_count
            ended_count = int(np.searchsorted(done_ns, now_ns, "right"))  # done by `now_ns`
            miss_counts += misses[:, previous_count:ended_count].sum(axis=1)
            decision = self._decide(
                now_ns, miss_counts, rows[:ended_count], misses[:, :ended_count]
            )
            if decision is not None:
                return decision

        return None

    def _decide(
        self,
        now_ns: int,
        miss_counts: NDArray[np.int64],
        ended_rows: NDArray[np.void],
        misses: NDArray[np.bool_],
    ) -> Decision | None:
        """Return the decision at `now_ns`, or None if the outcome is still open.

        - FAILED: more requests or tasks have missed a term than the whole trial may miss.
        - PASSED: the trial is in a steady state that lets it pass. This is only decided while a
          part of the load could still be saved; after that, all requests are waited for.

        Args:
            now_ns: The time of the check, from the start of the schedule.
            miss_counts: How many requests have missed each term so far.
            ended_rows: The records of the requests that have ended. Only a pass needs them.
            misses: The mask of shape (terms, rows) of which request missed which term.
        """
        failure = self._explain_missed_terms(miss_counts) or self._explain_missed_tasks()
        if failure:
            return Decision(FAILED, "misses", failure, now_ns)
        has_load_left = len(self._arrivals_ns) > 0 and now_ns < self.last_due_ns
        if not self._may_pass_early or not has_load_left:
            return None
        return self._decide_pass(now_ns, ended_rows, misses)

    def _decide_pass(
        self, now_ns: int, ended_rows: NDArray[np.void], misses: NDArray[np.bool_]
    ) -> Decision | None:
        """Return that the trial passes at `now_ns`, or None if that is not certain enough."""
        batches = self._cut_into_batches(now_ns, ended_rows)
        if batches is None:
            return None
        steady_start = self._find_steady_start(batches, ended_rows, misses)
        if steady_start is None:
            return None
        return Decision(PASSED, "steady", _describe_steady_state(batches, steady_start), now_ns)

    def _explain_missed_terms(self, miss_counts: NDArray[np.int64]) -> str:
        """Return which term too many requests have missed, or "" if there is none.

        The misses are compared with what all planned requests together may miss. A trial that
        exceeds this has failed, even if every later request meets the term.
        """
        counted_terms = zip(miss_counts.tolist(), self._allowed_misses, strict=True)
        for term_index, (miss_count, allowed) in enumerate(counted_terms):
            if miss_count > allowed:
                return self._goal.describe_misses(
                    term_index, miss_count, self._request_count, allowed
                )
        return ""

    def _explain_missed_tasks(self) -> str:
        """Return that too many tasks have missed their objective, or "" if they have not."""
        if self._missed_tasks is None:
            return ""
        task_count = len(self._arrivals_ns)  # Each planned session is a task.
        return self._missed_tasks.describe_failure(task_count)

    def _find_steady_start(
        self, batches: _Batches, ended_rows: NDArray[np.void], misses: NDArray[np.bool_]
    ) -> int | None:
        """Return the index of the first batch of the steady state, if the trial may pass early.

        Return None unless all of these hold:

        1. The start-up, in which an empty server fills, is over, and MIN_STEADY_BATCHES follow it.
        2. The number of requests in flight does not grow, neither in total nor at one replica.
        3. Until the planned end, the latency quantiles of the SLO stay below their limits.
        4. Until the planned end, no more requests miss a term than it allows.

        Args:
            batches: The requests so far by batches of time.
            ended_rows: The records of the requests that have ended.
            misses: The mask of shape (terms, rows) of which request missed which term.
        """
        quantiles_by_term = self._log_quantiles_by_batch(ended_rows, batches)
        start = _end_of_start_up([batches.in_flight, *quantiles_by_term])
        if start is None or batches.count - start < MIN_STEADY_BATCHES:
            return None

        batches_ahead = self._batches_to_extrapolate(batches, start)
        if _will_grow(batches.in_flight[start:], batches_ahead):
            return None

        steady_ends_ns = batches.ends_ns[start:] + self._load_start_ns
        if has_growing_replica(ended_rows, steady_ends_ns):
            return None

        steady_quantiles = [log_quantiles[start:] for log_quantiles in quantiles_by_term]
        if not self._will_meet_latency_limits(steady_quantiles, batches_ahead):
            return None

        return start if self._will_stay_within_allowed_misses(batches, start, misses) else None

    def _batches_to_extrapolate(self, batches: _Batches, start: int) -> float:
        """Return for how many batches ahead the trends of the steady state are continued.

        They are continued until the planned end of the load, but not for longer than the steady
        state has lasted, because a straight line says little about a time further away.
        """
        planned_batches = int(self._arrivals_ns[-1]) / batches.width_ns
        batches_left = planned_batches - batches.count
        steady_batches = batches.count - start
        return min(batches_left, steady_batches)

    def _will_meet_latency_limits(
        self, steady_quantiles: Sequence[NDArray[np.float64]], batches_ahead: float
    ) -> bool:
        """Return whether the latency quantile of each term is expected to stay below its limit.

        `steady_quantiles` has for each term the logarithm of its quantile in each steady batch.
        """
        return all(
            _will_stay_below(log_quantiles, math.log(term.limit_ns), batches_ahead)
            for term, log_quantiles in zip(self._goal.slo.terms, steady_quantiles, strict=True)
        )

    def _cut_into_batches(self, now_ns: int, ended_rows: NDArray[np.void]) -> _Batches | None:
        """Return the requests until `now_ns` by batches of time, or None if these are too few.

        Two kinds of batches are left out:

        - Batches that have not elapsed yet: some of their requests are not due yet.
        - The first batch with too many pending requests, and all later ones. The slow requests of
          such a batch have not ended, so that it would look faster than it is.

        Args:
            now_ns: The time of the check, from the start of the schedule.
            ended_rows: The records of the requests that have ended.
        """
        width_ns = self._batch_width_ns()
        elapsed_batches = int((now_ns - self._load_start_ns) // width_ns)
        if elapsed_batches < MIN_BATCHES:
            return None

        batch_of_row = (ended_rows["due_ns"] - self._load_start_ns) // width_ns
        due_counts = _count_by_batch(self._arrivals_ns // width_ns, elapsed_batches)
        ended_counts = _count_by_batch(batch_of_row, elapsed_batches)
        pending_counts = due_counts - ended_counts
        count = _count_complete_batches(due_counts, pending_counts)
        if count < MIN_BATCHES:
            return None

        ends_ns = np.arange(1, count + 1) * width_ns
        done_ns = np.sort(ended_rows["done_ns"] - self._load_start_ns)
        return _Batches(
            width_ns=width_ns,
            count=count,
            due_counts=due_counts[:count],
            pending_counts=pending_counts[:count],
            batch_of_row=batch_of_row,
            ends_ns=ends_ns,
            in_flight=_count_in_flight(self._arrivals_ns, done_ns, ends_ns),
        )

    def _batch_width_ns(self) -> int:
        """Return the length of a batch, so that the values of batches can be tested for a trend.

        A batch has enough requests for the highest quantile of the goal, for example 662 for p99.
        It lasts at least MIN_BATCH_NS, and the run has at most MAX_BATCHES batches.
        """
        sample_counts = [needed_samples(term.quantile) for term in self._goal.slo.terms]
        requests_per_batch = max(sample_counts, default=DEFAULT_BATCH_REQUESTS)
        load_ns = max(1, int(self._arrivals_ns[-1]))
        width_for_quantile_ns = math.ceil(load_ns * requests_per_batch / self._request_count)
        return max(MIN_BATCH_NS, width_for_quantile_ns, load_ns // MAX_BATCHES)

    def _log_quantiles_by_batch(
        self, ended_rows: NDArray[np.void], batches: _Batches
    ) -> list[NDArray[np.float64]]:
        """Return for each term of the SLO the logarithm of its latency quantile in each batch.

        Latencies grow by factors rather than by steps, so that a straight line fits their logarithm
        better. The value is LOG_OF_FAILURE in a batch without requests, and where the quantile
        falls on a failed request.

        Args:
            ended_rows: The records of the requests that have ended.
            batches: The batches in which these were due. Requests that were due later are left out.
        """
        is_in_batch = batches.batch_of_row < batches.count
        columns = Columns(select_rows(ended_rows, is_in_batch))
        has_failed = ~columns.has_status(metrics.OK)
        rows_by_batch = _group_rows_by_batch(batches.batch_of_row[is_in_batch], batches.count)

        quantiles_by_term = []
        for term in self._goal.slo.terms:
            latencies_ns = np.where(has_failed, NEVER_NS, columns.measure(term.metric))
            log_quantiles = [
                _log_quantile(latencies_ns[row_indices], term.quantile)
                for row_indices in rows_by_batch
            ]
            quantiles_by_term.append(np.array(log_quantiles))

        return quantiles_by_term

    def _will_stay_within_allowed_misses(
        self, batches: _Batches, start: int, misses: NDArray[np.bool_]
    ) -> bool:
        """Return whether each term is expected to be missed by no more requests than it allows.

        Args:
            batches: The requests so far by batches of time.
            start: The first batch of the steady state.
            misses: The mask of shape (terms, rows) of which request missed which term.
        """
        is_in_batch = batches.batch_of_row < batches.count
        for is_missed, allowed in zip(misses, self._allowed_misses, strict=True):
            batch_of_miss = batches.batch_of_row[is_missed & is_in_batch]
            if self._forecast_misses(batches, start, batch_of_miss) > allowed:
                return False
        return True

    def _forecast_misses(
        self, batches: _Batches, start: int, batch_of_miss: NDArray[np.int64]
    ) -> float:
        """Return how many requests of the whole trial may miss a term, as a cautious estimate.

        It is the sum of two numbers:

        - The misses in the batches so far. A pending request counts as a miss.
        - The misses among the requests of later batches. Their share is the upper confidence bound
          of the mean share of misses in the batches of the steady state.

        Args:
            batches: The requests so far by batches of time.
            start: The first batch of the steady state.
            batch_of_miss: The index of the batch of each request that missed the term.
        """
        ended_misses = np.bincount(batch_of_miss, minlength=batches.count)
        misses_by_batch = ended_misses + batches.pending_counts
        steady_miss_shares = misses_by_batch[start:] / batches.due_counts[start:]
        mean_miss_share = intervals.batch_means(
            steady_miss_shares, batches=MIN_STEADY_BATCHES, level=TWO_SIDED_CONFIDENCE
        )

        # A steady state without any miss does not show that misses never occur, so that at least
        # one miss in the whole trial is assumed.
        min_miss_share = 1 / self._request_count
        upper_miss_share = max(mean_miss_share.high, min_miss_share)
        later_requests = self._request_count - int(batches.due_counts.sum())

        return int(misses_by_batch.sum()) + upper_miss_share * later_requests


def _describe_steady_state(batches: _Batches, start: int) -> str:
    """Return since when a trial has been steady, and its concurrency.

    An example is "steady state since 30 s, concurrency 12".
    """
    width_s = batches.width_ns / NS_PER_S
    concurrency = float(batches.in_flight[start:].mean())
    return f"steady state since {start * width_s:.0f} s, concurrency {concurrency:,.0f}"


def _end_of_start_up(all_series: Sequence[NDArray[np.float64]]) -> int | None:
    """Return the first batch after the start-up of every series, or None if a start-up goes on.

    A series has the value of each batch: the requests in flight, or a latency quantile. The
    start-up of a trial is as long as that of its slowest series, because latencies may still rise
    when the number of requests in flight does not change any more.
    """
    last_start = 0
    for series in all_series:
        start = intervals.startup_length(series)
        if start is None:
            return None
        last_start = max(last_start, start)
    return last_start


def _will_grow(in_flight: NDArray[np.float64], batches_ahead: float) -> bool:
    """Return whether the requests in flight may grow noticeably in the batches ahead.

    The upper confidence bound of their growth is compared with a share of their mean, and with a
    few requests in addition, because small numbers of requests vary by chance.
    """
    _, upper_growth = intervals.extrapolate_growth(in_flight, batches_ahead, CONFIDENCE)
    max_growth = MAX_GROWTH_SHARE * float(in_flight.mean()) + MAX_GROWTH_REQUESTS
    return upper_growth > max_growth


def _count_in_flight(
    sorted_due_ns: NDArray[np.int64], sorted_done_ns: NDArray[np.int64], times_ns: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return at each time the number of requests that are due but have not ended."""
    due_counts = np.searchsorted(sorted_due_ns, times_ns, "right")
    ended_counts = np.searchsorted(sorted_done_ns, times_ns, "right")
    return (due_counts - ended_counts).astype(float)


def _count_by_batch(batch_numbers: NDArray[np.int64], batch_count: int) -> NDArray[np.int64]:
    """Return how often each of the first `batch_count` batches is in `batch_numbers`."""
    in_range = batch_numbers[batch_numbers < batch_count]
    return np.bincount(in_range, minlength=batch_count)


def _group_rows_by_batch(
    batch_of_row: NDArray[np.int64], batch_count: int
) -> list[NDArray[np.int64]]:
    """Return for each batch the indices of its rows, in ascending order.

    For example, rows of the batches [1, 0, 1] are grouped as [[1], [0, 2]].
    """
    rows_in_order_of_batch = np.argsort(batch_of_row, kind="stable")
    row_counts = np.bincount(batch_of_row, minlength=batch_count)
    first_position_of_next_batch = np.cumsum(row_counts)[:-1]
    return np.split(rows_in_order_of_batch, first_position_of_next_batch)


def _count_complete_batches(
    due_counts: NDArray[np.int64], pending_counts: NDArray[np.int64]
) -> int:
    """Return the number of batches before the first one with too many pending requests."""
    # A batch in which nothing was due has no pending requests; 1 avoids a division by zero.
    pending_shares = pending_counts / np.maximum(due_counts, 1)
    (incomplete_batches,) = np.nonzero(pending_shares > MAX_PENDING_SHARE)
    return int(incomplete_batches[0]) if len(incomplete_batches) else len(due_counts)


def _log_quantile(latencies_ns: NDArray[np.int64], quantile: float) -> float:
    """Return the logarithm of a latency quantile.

    Return LOG_OF_FAILURE if no request has this latency, or if the quantile falls on a failed
    request, whose latency is NEVER_NS.
    """
    defined_ns = latencies_ns[latencies_ns != metrics.UNDEFINED]
    if not len(defined_ns):
        return LOG_OF_FAILURE
    quantile_ns = quantile_of(defined_ns, quantile)
    return LOG_OF_FAILURE if quantile_ns >= NEVER_NS else math.log(max(quantile_ns, 1))


def _will_stay_below(series: NDArray[np.float64], limit: float, batches_ahead: float) -> bool:
    """Return whether the values of batches stay below a limit for the batches ahead.

    Both the upper confidence bound of their mean, and that of a straight line that continues them,
    have to be below the limit.
    """
    _, upper_growth = intervals.extrapolate_growth(series, batches_ahead, CONFIDENCE)
    mean = intervals.batch_means(series, batches=len(series), level=TWO_SIDED_CONFIDENCE)
    return max(mean.high, mean.value + upper_growth) < limit


def select_ended(rows: NDArray[np.void]) -> NDArray[np.void]:
    """Return the rows without the requests that the end of the run cut off.

    Those requests say nothing about the load.
    """
    return select_rows(rows, (rows["status"] != metrics.CANCELLED) & (rows["done_ns"] >= 0))


def has_growing_replica(rows: NDArray[np.void], times_ns: NDArray[np.int64]) -> bool:
    """Return whether the requests in flight at one target or replica grow over these times.

    The queue of one overloaded replica grows unnoticed in the total if the other replicas have many
    requests in flight, so that each replica is tested alone. With only one replica the result is
    False, because the caller tests the total.

    Args:
        rows: The records of the requests that have ended.
        times_ns: When the requests in flight are counted, such as the ends of batches, from the
            start of the schedule.
    """
    replica_of_row = replica_keys(Columns(rows))
    replicas = np.unique(replica_of_row)
    if len(replicas) < 2:
        return False

    in_flight_by_replica = []
    for replica in replicas:
        replica_rows = rows[replica_of_row == replica]
        due_ns = np.sort(replica_rows["due_ns"])
        done_ns = np.sort(replica_rows["done_ns"])
        in_flight_by_replica.append(_count_in_flight(due_ns, done_ns, times_ns))

    return any(map(_is_noticeable_growth, trend.find_trends(in_flight_by_replica)))


def _is_noticeable_growth(in_flight_trend: trend.Trend | None) -> bool:
    """Return whether a trend is a growth that is significant and a noticeable share of the mean."""
    if in_flight_trend is None or not in_flight_trend.grows:
        return False
    return in_flight_trend.growth > MIN_GROWTH_SHARE * in_flight_trend.mean
