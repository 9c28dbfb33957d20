"""Decides from the records of a running trial whether it passes or fails, before it ends."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
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
MAX_BATCHES = 120
"""The largest number of batches. A longer run has longer batches, not more."""
MIN_BATCH_NS = 5 * NS_PER_S
MAX_GROWTH_SHARE = 0.15
"""How much the requests in flight may grow until the planned end, as a share of their mean."""
MAX_GROWTH_REQUESTS = 2
"""How many requests they may grow in addition, for loads with few requests in flight."""
MAX_UNRESOLVED_SHARE = 0.001
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
        due_ns: When each request, or the first request of each session, is due.
        start_ns: When the measured load begins, after a warm-up.
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
    """The requests of a trial by batches of time, up to the first batch with open requests.

    A batch is a period of equal length, such as 5 s. Single latencies of a run depend on each
    other; the values of batches hardly do, so that they can be tested for a trend.

    Attributes:
        width_ns: The length of a batch.
        count: The number of batches.
        arrived: The number of requests that were due in each batch.
        unresolved: The number of these that have not ended.
        batch_of_row: The batch in which each row was due.
        ends_ns: The end of each batch.
        in_flight: The number of requests in flight at the end of each batch.
    """

    width_ns: int
    count: int
    arrived: NDArray[np.int64]
    unresolved: NDArray[np.int64]
    batch_of_row: NDArray[np.int64]
    ends_ns: NDArray[np.int64]
    in_flight: NDArray[np.float64]


class TrialMonitor:
    """Decides the outcome of a trial before its end, where that is possible.

    A failure is exact: the misses that are known exceed what the planned number of requests, or
    tasks, allows, whatever the other requests do. It needs no independence of the requests.

    A pass is an extrapolation, and only made with `may_pass_early`. It needs a steady state: the
    start-up, in which an empty server fills, is over, and the number of requests in flight does not
    grow. In addition, neither the quantiles of the terms nor the misses may reach their limits by
    the planned end. This is judged by batch means over the requests in the order of their arrival,
    with every unresolved request counted as a miss.
    """

    def __init__(self, goal: Goal, load: PlannedLoad, *, may_pass_early: bool = True) -> None:
        """Watch a trial of this load. Sessions of several requests never pass early.

        When the later turns of a session are due is not known beforehand.
        """
        self._goal = goal
        self._start_ns = load.start_ns
        self._due_ns = np.sort(load.due_ns) - load.start_ns
        self._request_count = load.request_count
        self._allowed_misses = goal.allowed_misses(load.request_count)
        has_known_arrivals = load.session_requests is None
        self._may_pass_early = may_pass_early and has_known_arrivals and not goal.full_run_terms
        self._miss_counts = np.zeros(len(goal.request_terms), np.int64)
        self._rows = np.zeros(0, ROW)
        self._misses = goal.find_misses(self._rows)
        self._max_turns = load.max_turns
        self._rows_of_open_tasks = self._rows
        self._missed_tasks = 0

    @property
    def last_due_ns(self) -> int:
        """When the last request, or the first request of the last session, is due."""
        return int(self._due_ns[-1]) + self._start_ns

    def add_rows(self, now_ns: int, new_rows: NDArray[np.void]) -> Decision | None:
        """Return the decision at `now_ns`, or None while there is none.

        `new_rows` are the measured records since the last call, in any order. Times are relative to
        the start of the schedule.
        """
        if self._goal.slo.task is not None:
            self._count_missed_tasks(self._goal.slo.task, new_rows)
        ended_rows = select_ended(new_rows)
        misses = self._goal.find_misses(ended_rows)
        self._miss_counts += misses.sum(axis=1)
        if self._may_pass_early:
            self._rows = concatenate_rows((self._rows, ended_rows))
            self._misses = np.concatenate((self._misses, misses), axis=1)
        return self._decide(now_ns, self._miss_counts, self._rows, self._misses)

    def find_first_decision(self, rows: NDArray[np.void], interval_ns: int) -> Decision | None:
        """Return the decision that checks during a finished trial would have made, or None.

        A simulated trial is computed to its end before it is judged. This method replays it: it
        checks every `interval_ns` with the requests that had ended by then, as `add_rows` does in a
        running trial, and returns the first decision.

        Args:
            rows: The records of all requests that ended, in the order in which they ended.
            interval_ns: The time between two checks, such as 5 s.
        """
        done_ns = rows["done_ns"]
        misses = self._goal.find_misses(rows)
        # Column n has the misses of each term among the first n rows, with n from 0.
        miss_counts_by_row_count = np.pad(misses.cumsum(axis=1), ((0, 0), (1, 0)))
        last_done_ns = int(done_ns.max(initial=0))
        for now_ns in range(interval_ns, last_done_ns, interval_ns):
            ended_count = int(np.searchsorted(done_ns, now_ns, "right"))
            decision = self._decide(
                now_ns,
                miss_counts_by_row_count[:, ended_count],
                rows[:ended_count],
                misses[:, :ended_count],
            )
            if decision is not None:
                return decision
        return None

    def _count_missed_tasks(self, term: TaskTerm, new_rows: NDArray[np.void]) -> None:
        """Add the tasks that have ended since the last check and missed their term to the count.

        A task, which is a session of several requests, can only be judged when all of its requests
        are known. The rows of open tasks are therefore kept until the next check.
        """
        rows = concatenate_rows((self._rows_of_open_tasks, new_rows))
        table = tasks.tabulate_tasks(Columns(rows), self._max_turns)
        open_task_numbers = table.numbers[~table.has_ended]
        self._rows_of_open_tasks = select_rows(rows, np.isin(rows["session"], open_task_numbers))
        was_cancelled = table.columns.cancelled.astype(bool)
        is_unfinished = table.columns.unfinished.astype(bool)
        # A task that the end of the run cut off says nothing about its term.
        is_complete = table.has_ended & ~was_cancelled & ~is_unfinished
        has_met_term = tasks.meets_task_term(table.columns, term)
        self._missed_tasks += int((is_complete & ~has_met_term).sum())

    def _decide(
        self,
        now_ns: int,
        miss_counts: NDArray[np.int64],
        rows: NDArray[np.void],
        misses: NDArray[np.bool_],
    ) -> Decision | None:
        """Return the decision at `now_ns`, or None if the outcome is still open.

        A pass is only decided while load is left to be saved. After that, the trial is judged by
        all of its requests.

        Args:
            now_ns: The time of the check, from the start of the schedule.
            miss_counts: How many requests have missed each term so far.
            rows: The records of the requests that have ended. Only a pass needs them.
            misses: The mask of shape (terms, rows) of which request missed which term.
        """
        failure = self._explain_missed_terms(miss_counts) or self._explain_missed_tasks()
        if failure:
            return Decision(FAILED, "misses", failure, now_ns)
        has_load_left = len(self._due_ns) > 0 and now_ns < self.last_due_ns
        if not self._may_pass_early or not has_load_left:
            return None
        batches = self._cut_into_batches(now_ns, rows)
        if batches is None:
            return None
        steady_start = self._find_steady_start(batches, rows, misses)
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
        """Return that more tasks have missed their term than it allows, or "" if they have not.

        The term names the share of all planned tasks that has to meet it, such as 0.9.
        """
        term = self._goal.slo.task
        if term is None:
            return ""
        task_count = len(self._due_ns)
        needed_count = math.ceil(term.share * task_count - ROUNDING)
        allowed = task_count - needed_count
        if self._missed_tasks <= allowed:
            return ""
        return (
            f"{self._missed_tasks:,} of {task_count:,} tasks missed their objective "
            f"({allowed:,} allowed)"
        )

    def _find_steady_start(
        self, batches: _Batches, rows: NDArray[np.void], misses: NDArray[np.bool_]
    ) -> int | None:
        """Return the first batch of the steady state, if it lets the trial pass early.

        Return None if the start-up is not over, if anything grows, or if the rest of the trial
        could still make it fail.
        """
        quantile_series = self._log_quantiles_by_batch(rows, batches)
        start = _end_of_start_up([batches.in_flight, *quantile_series])
        if start is None or batches.count - start < MIN_STEADY_BATCHES:
            return None
        # A line is extrapolated no further than the time that it was fitted to.
        batches_left = int(self._due_ns[-1]) / batches.width_ns - batches.count
        batches_ahead = min(batches_left, batches.count - start)
        if _will_grow(batches.in_flight[start:], batches_ahead):
            return None
        if any_part_grows(rows, batches.ends_ns[start:] + self._start_ns):
            return None
        for term, series in zip(self._goal.slo.terms, quantile_series, strict=True):
            if not _stays_below(series[start:], math.log(term.limit_ns), batches_ahead):
                return None
        return start if self._will_allow_misses(batches, start, misses) else None

    def _cut_into_batches(self, now_ns: int, rows: NDArray[np.void]) -> _Batches | None:
        """Return the batches before the first one with open requests, or None if too few.

        A batch whose slow requests are still open would look faster than it is, so that it and all
        later batches are left out.
        """
        min_count = MIN_STEADY_BATCHES + MIN_START_UP_BATCHES
        width_ns = self._batch_width_ns()
        elapsed_count = int((now_ns - self._start_ns) // width_ns)
        if elapsed_count < min_count:
            return None
        batch_of_row = (rows["due_ns"] - self._start_ns) // width_ns
        arrived = _count_by_batch(self._due_ns // width_ns, elapsed_count)
        unresolved = arrived - _count_by_batch(batch_of_row, elapsed_count)
        count = _count_resolved_batches(arrived, unresolved)
        if count < min_count:
            return None
        ends_ns = np.arange(1, count + 1) * width_ns
        done_ns = np.sort(rows["done_ns"]) - self._start_ns
        started_counts = np.searchsorted(self._due_ns, ends_ns, "right")
        ended_counts = np.searchsorted(done_ns, ends_ns, "right")
        return _Batches(
            width_ns=width_ns,
            count=count,
            arrived=arrived[:count],
            unresolved=unresolved[:count],
            batch_of_row=batch_of_row,
            ends_ns=ends_ns,
            in_flight=(started_counts - ended_counts).astype(float),
        )

    def _batch_width_ns(self) -> int:
        """Return the length of a batch.

        A batch has enough requests for the highest quantile of the goal, for example 662 for p99,
        and the run has at most MAX_BATCHES batches.
        """
        sample_counts = [needed_samples(term.quantile) for term in self._goal.slo.terms]
        requests_per_batch = max(sample_counts, default=DEFAULT_BATCH_REQUESTS)
        load_ns = max(1, int(self._due_ns[-1]))
        width_for_quantile_ns = math.ceil(load_ns * requests_per_batch / self._request_count)
        return max(MIN_BATCH_NS, width_for_quantile_ns, load_ns // MAX_BATCHES)

    def _log_quantiles_by_batch(
        self, rows: NDArray[np.void], batches: _Batches
    ) -> list[NDArray[np.float64]]:
        """Return for each term a series: the logarithm of its quantile in each batch.

        Latencies grow by factors rather than by steps, so that a straight line fits their logarithm
        better. The value is LOG_OF_FAILURE in a batch without requests, and where the quantile
        falls on a failed request.
        """
        is_in_batch = batches.batch_of_row < batches.count
        columns = Columns(select_rows(rows, is_in_batch))
        batch_of_row = batches.batch_of_row[is_in_batch]
        order = np.argsort(batch_of_row, kind="stable")
        # The rows of batch n are those from batch_starts[n] to batch_starts[n + 1].
        batch_starts = np.searchsorted(batch_of_row[order], np.arange(batches.count + 1))
        has_failed = ~columns.where(metrics.OK)
        all_series = []
        for term in self._goal.slo.terms:
            values_ns = np.where(has_failed, NEVER_NS, columns.measure(term.metric))[order]
            log_quantiles = [
                _log_quantile(values_ns[first:end], term.quantile)
                for first, end in pairwise(batch_starts)
            ]
            all_series.append(np.array(log_quantiles))
        return all_series

    def _will_allow_misses(self, batches: _Batches, start: int, misses: NDArray[np.bool_]) -> bool:
        """Return whether the misses stay allowed, if unresolved requests count as misses.

        The share of misses after batch `start` is extrapolated to the requests that are not due
        yet. It is never taken to be less than one request in all.
        """
        requests_left = self._request_count - int(batches.arrived.sum())
        is_in_batch = batches.batch_of_row < batches.count
        for is_missed, allowed in zip(misses, self._allowed_misses, strict=True):
            batch_of_miss = batches.batch_of_row[is_missed & is_in_batch]
            known_misses = np.bincount(batch_of_miss, minlength=batches.count)
            misses_by_batch = known_misses + batches.unresolved
            miss_share = intervals.batch_means(
                misses_by_batch[start:] / batches.arrived[start:],
                batches=MIN_STEADY_BATCHES,
                level=TWO_SIDED_CONFIDENCE,
            )
            expected_share = max(miss_share.high, 1 / self._request_count)
            expected_misses = int(misses_by_batch.sum()) + expected_share * requests_left
            if expected_misses > allowed:
                return False
        return True


def _describe_steady_state(batches: _Batches, start: int) -> str:
    """Return since when a trial has been steady, and its concurrency.

    An example is "steady state since 30 s, concurrency 12".
    """
    width_s = batches.width_ns / NS_PER_S
    concurrency = float(batches.in_flight[start:].mean())
    return f"steady state since {start * width_s:.0f} s, concurrency {concurrency:,.0f}"


def _end_of_start_up(all_series: Sequence[NDArray[np.float64]]) -> int | None:
    """Return the first batch after the start-up of every series, or None if one has not settled.

    The start-up of a trial is as long as that of its slowest series: latencies may still rise when
    the number of requests in flight does not change any more.
    """
    last_start = 0
    for series in all_series:
        start = intervals.startup_length(series)
        if start is None:
            return None
        last_start = max(last_start, start)
    return last_start


def _will_grow(in_flight: NDArray[np.float64], batches_ahead: float) -> bool:
    """Return whether the requests in flight may grow noticeably in the batches ahead."""
    _, upper_growth = intervals.extrapolate_growth(in_flight, batches_ahead, CONFIDENCE)
    max_growth = MAX_GROWTH_SHARE * float(in_flight.mean()) + MAX_GROWTH_REQUESTS
    return upper_growth > max_growth


def _count_by_batch(batch_numbers: NDArray[np.int64], batch_count: int) -> NDArray[np.int64]:
    """Return how often each of the first `batch_count` batches is in `batch_numbers`."""
    in_range = batch_numbers[batch_numbers < batch_count]
    return np.bincount(in_range, minlength=batch_count)


def _count_resolved_batches(arrived: NDArray[np.int64], unresolved: NDArray[np.int64]) -> int:
    """Return the number of batches before the first one with too many unresolved requests."""
    # A batch without arrivals has nothing unresolved; 1 keeps it from being divided by zero.
    unresolved_shares = unresolved / np.maximum(arrived, 1)
    (open_batches,) = np.nonzero(unresolved_shares > MAX_UNRESOLVED_SHARE)
    return int(open_batches[0]) if len(open_batches) else len(arrived)


def _log_quantile(values_ns: NDArray[np.int64], quantile: float) -> float:
    """Return the logarithm of a quantile, or LOG_OF_FAILURE if it is not known or a failure."""
    defined_ns = values_ns[values_ns != metrics.UNDEFINED]
    if not len(defined_ns):
        return LOG_OF_FAILURE
    value_ns = quantile_of(defined_ns, quantile)
    return LOG_OF_FAILURE if value_ns >= NEVER_NS else math.log(max(value_ns, 1))


def _stays_below(series: NDArray[np.float64], limit: float, batches_ahead: float) -> bool:
    """Return whether a series of batches stays below a limit for the batches ahead.

    Both the upper bound of its mean and the upper bound of a straight line that continues it have
    to be below the limit.
    """
    _, upper_growth = intervals.extrapolate_growth(series, batches_ahead, CONFIDENCE)
    mean = intervals.batch_means(series, batches=len(series), level=TWO_SIDED_CONFIDENCE)
    return max(mean.high, mean.value + upper_growth) < limit


def select_ended(rows: NDArray[np.void]) -> NDArray[np.void]:
    """Return the rows without the requests that the end of the run cut off.

    Those requests say nothing about the load.
    """
    return select_rows(rows, (rows["status"] != metrics.CANCELLED) & (rows["done_ns"] >= 0))


def any_part_grows(rows: NDArray[np.void], instants_ns: NDArray[np.int64]) -> bool:
    """Return whether the requests in flight at any target or replica grow over these instants.

    The queue of one overloaded replica grows unnoticed if the other replicas have many requests in
    flight, so that each part of the load is tested alone. Only finished requests are counted. With
    a single target and replica the answer is False, because the caller looks at all requests
    together anyway.
    """
    replica_of_row = replica_keys(Columns(rows))
    replicas = np.unique(replica_of_row)
    if len(replicas) < 2:
        return False
    all_series = []
    for replica in replicas:
        replica_rows = rows[replica_of_row == replica]
        started_counts = np.searchsorted(np.sort(replica_rows["due_ns"]), instants_ns, "right")
        ended_counts = np.searchsorted(np.sort(replica_rows["done_ns"]), instants_ns, "right")
        all_series.append((started_counts - ended_counts).astype(float))
    return any(
        in_flight_trend is not None
        and in_flight_trend.grows
        and in_flight_trend.growth > MIN_GROWTH_SHARE * in_flight_trend.mean
        for in_flight_trend in trend.find_trends(all_series)
    )
