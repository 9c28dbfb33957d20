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
from loadgen.core.results.record import ROW, joined, picked
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
MISS_CONFIDENCE = 0.98
MIN_BATCHES = 10  # after the start-up
START_UP_BATCHES = 2  # at least, in front of them
MAX_BATCHES = 120  # a longer run has longer batches, not more
MIN_BATCH_NS = 5 * NS_PER_S
MAX_GROWTH = 0.15  # of the requests in flight, up to the planned end
MAX_GROWTH_REQUESTS = 2  # in addition, for loads with few requests in flight
MAX_UNRESOLVED_SHARE = 0.001  # of the requests of a batch, for the batch to be looked at
DEFAULT_SUPPORT = 100  # requests in a batch if no term names a quantile
LOG_OF_FAILURE = 40.0  # in place of the logarithm of a quantile that falls on a failed request
NEVER_NS = np.iinfo(np.int64).max


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
    """The requests of a trial by batches of time, up to the first batch with an open request.

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

    A pass is an extrapolation, and only made with `may_pass_early`. The start-up has passed (by
    MSER), the number of requests in flight does not grow, and neither the quantiles of the terms
    nor the misses will reach their limits by the planned end. This is judged by batch means over
    the requests in the order of their arrival, with every unresolved request counted as a miss.
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
        is_predictable = load.session_requests is None and not goal.full_run_terms
        self._may_pass_early = may_pass_early and is_predictable
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
            self._rows = joined((self._rows, ended_rows))
            self._misses = np.concatenate((self._misses, misses), axis=1)
        return self._decide(now_ns, self._miss_counts, self._rows, self._misses)

    def find_first_decision(self, rows: NDArray[np.void], interval_ns: int) -> Decision | None:
        """Return what regular checks of a finished trial would have decided first.

        `rows` are in the order in which the requests ended.
        """
        misses = self._goal.find_misses(rows)
        miss_counts = np.pad(misses.cumsum(axis=1), ((0, 0), (1, 0)))
        last_done_ns = int(rows["done_ns"].max(initial=0))
        for now_ns in range(interval_ns, last_done_ns, interval_ns):
            count = int(np.searchsorted(rows["done_ns"], now_ns, "right"))
            decision = self._decide(now_ns, miss_counts[:, count], rows[:count], misses[:, :count])
            if decision is not None:
                return decision
        return None

    def _count_missed_tasks(self, term: TaskTerm, new_rows: NDArray[np.void]) -> None:
        """Count the tasks that have ended since the last check and missed their term."""
        rows = joined((self._rows_of_open_tasks, new_rows))
        seen_tasks = tasks.tabulate_tasks(Columns(rows), self._max_turns)
        open_tasks = seen_tasks.numbers[~seen_tasks.has_ended]
        self._rows_of_open_tasks = picked(rows, np.isin(rows["session"], open_tasks))
        was_cut = seen_tasks.columns.cancelled.astype(bool) | seen_tasks.columns.unfinished.astype(
            bool
        )
        has_met_term = tasks.meets_task_term(seen_tasks.columns, term)
        self._missed_tasks += int((seen_tasks.has_ended & ~was_cut & ~has_met_term).sum())

    def _decide(
        self,
        now_ns: int,
        miss_counts: NDArray[np.int64],
        rows: NDArray[np.void],
        misses: NDArray[np.bool_],
    ) -> Decision | None:
        """Return the decision from the misses of each term so far, counted over `rows`."""
        failure = self._explain_missed_terms(miss_counts) or self._explain_missed_tasks()
        if failure:
            return Decision(FAILED, "misses", failure, now_ns)
        has_load_left = now_ns < self.last_due_ns if len(self._due_ns) else False
        if self._may_pass_early and has_load_left:
            steadiness = self._explain_pass(now_ns, rows, misses)
            if steadiness:
                return Decision(PASSED, "steady", steadiness, now_ns)
        return None

    def _explain_missed_terms(self, miss_counts: NDArray[np.int64]) -> str:
        """Return which term more requests have missed than it allows, or "" if there is none."""
        terms = self._goal.request_terms
        counted_terms = zip(terms, miss_counts.tolist(), self._allowed_misses, strict=True)
        for name, count, allowed in counted_terms:
            if count > allowed:
                return (
                    f"{count:,} of {self._request_count:,} planned requests miss {name}, "
                    f"{max(allowed, 0):,} allowed"
                )
        return ""

    def _explain_missed_tasks(self) -> str:
        """Return how many tasks have missed their term if it allows fewer, else ""."""
        term = self._goal.slo.task
        if term is None:
            return ""
        task_count = len(self._due_ns)
        allowed = task_count - math.ceil(term.share * task_count - ROUNDING)
        if self._missed_tasks <= allowed:
            return ""
        return (
            f"{self._missed_tasks:,} of {task_count:,} planned tasks miss what was promised, "
            f"{allowed:,} allowed"
        )

    def _explain_pass(self, now_ns: int, rows: NDArray[np.void], misses: NDArray[np.bool_]) -> str:
        """Return why the rest of the trial cannot make it fail, or "" if that cannot be said."""
        batches = self._cut_into_batches(now_ns, rows)
        if batches is None:
            return ""
        quantile_series = self._log_quantiles_by_batch(rows, batches)
        start = _end_of_start_up([batches.in_flight, *quantile_series])
        if start is None or batches.count - start < MIN_BATCHES:
            return ""
        # A line is extrapolated no further than the time that it was fitted to.
        batches_left = int(self._due_ns[-1]) / batches.width_ns - batches.count
        batches_ahead = min(batches_left, batches.count - start)
        in_flight = batches.in_flight[start:]
        is_steady = not _will_grow(in_flight, batches_ahead) and not any_part_grows(
            rows, batches.ends_ns[start:] + self._start_ns
        )
        stays_within_limits = all(
            _stays_below(series[start:], math.log(term.limit_ns), batches_ahead)
            for term, series in zip(self._goal.slo.terms, quantile_series, strict=True)
        )
        if not is_steady or not stays_within_limits:
            return ""
        if not self._will_allow_misses(batches, start, misses):
            return ""
        width_s = batches.width_ns / NS_PER_S
        return (
            f"steady since {start * width_s:.0f} s: {len(in_flight)} batches of "
            f"{width_s:.0f} s, {float(in_flight.mean()):,.0f} in flight"
        )

    def _cut_into_batches(self, now_ns: int, rows: NDArray[np.void]) -> _Batches | None:
        """Return the batches before the first one with an open request, or None if too few."""
        width_ns = self._batch_width_ns()
        elapsed_count = int((now_ns - self._start_ns) // width_ns)
        if elapsed_count < MIN_BATCHES + START_UP_BATCHES:
            return None
        batch_of_row = (rows["due_ns"] - self._start_ns) // width_ns
        arrived = _count_by_batch(self._due_ns // width_ns, elapsed_count)
        unresolved = arrived - _count_by_batch(batch_of_row, elapsed_count)
        count = _count_resolved_batches(arrived, unresolved)
        if count < MIN_BATCHES + START_UP_BATCHES:
            return None
        ends_ns = np.arange(1, count + 1) * width_ns
        done_ns = np.sort(rows["done_ns"]) - self._start_ns
        started = np.searchsorted(self._due_ns, ends_ns, "right")
        ended = np.searchsorted(done_ns, ends_ns, "right")
        return _Batches(
            width_ns=width_ns,
            count=count,
            arrived=arrived[:count],
            unresolved=unresolved[:count],
            batch_of_row=batch_of_row,
            ends_ns=ends_ns,
            in_flight=(started - ended).astype(float),
        )

    def _batch_width_ns(self) -> int:
        """Return the length of a batch.

        A batch has enough requests for the highest quantile of the goal, and the run has at most
        MAX_BATCHES of them.
        """
        needed = max(
            (needed_samples(term.quantile) for term in self._goal.slo.terms),
            default=DEFAULT_SUPPORT,
        )
        length_ns = max(1, int(self._due_ns[-1]))
        width_for_quantile = math.ceil(length_ns * needed / self._request_count)
        return max(MIN_BATCH_NS, width_for_quantile, length_ns // MAX_BATCHES)

    def _log_quantiles_by_batch(
        self, rows: NDArray[np.void], batches: _Batches
    ) -> list[NDArray[np.float64]]:
        """Return for each term the logarithm of its quantile in each batch.

        It is LOG_OF_FAILURE in a batch without requests, and where the quantile falls on a failed
        request.
        """
        is_in_batch = batches.batch_of_row < batches.count
        columns = Columns(picked(rows, is_in_batch))
        batch_of_row = batches.batch_of_row[is_in_batch]
        order = np.argsort(batch_of_row, kind="stable")
        bounds = np.searchsorted(batch_of_row[order], np.arange(batches.count + 1))
        has_failed = ~columns.where(metrics.OK)
        all_series = []
        for term in self._goal.slo.terms:
            values_ns = np.where(has_failed, NEVER_NS, columns.measure(term.metric))[order]
            log_quantiles = [
                _log_quantile(values_ns[first:end], term.quantile)
                for first, end in pairwise(bounds)
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
            missed_in = batches.batch_of_row[is_missed & is_in_batch]
            by_batch = np.bincount(missed_in, minlength=batches.count) + batches.unresolved
            share = intervals.batch_means(
                by_batch[start:] / batches.arrived[start:],
                batches=MIN_BATCHES,
                level=MISS_CONFIDENCE,
            )
            expected_share = max(share.high, 1 / self._request_count)
            if int(by_batch.sum()) + expected_share * requests_left > allowed:
                return False
        return True


def _end_of_start_up(all_series: Sequence[NDArray[np.float64]]) -> int | None:
    """Return the first batch after the start-up of every series, or None if one has not settled."""
    last_start = 0
    for series in all_series:
        start = intervals.startup_length(series)
        if start is None:
            return None
        last_start = max(last_start, start)
    return last_start


def _will_grow(in_flight: NDArray[np.float64], batches_ahead: float) -> bool:
    """Return whether the requests in flight may grow noticeably in the batches ahead."""
    _, growth = intervals.extrapolate_growth(in_flight, batches_ahead, CONFIDENCE)
    return growth > MAX_GROWTH * float(in_flight.mean()) + MAX_GROWTH_REQUESTS


def _count_by_batch(batch_numbers: NDArray[np.int64], batch_count: int) -> NDArray[np.int64]:
    """Return how often each of the first `batch_count` batches is in `batch_numbers`."""
    in_range = batch_numbers[batch_numbers < batch_count]
    return np.bincount(in_range, minlength=batch_count)


def _count_resolved_batches(arrived: NDArray[np.int64], unresolved: NDArray[np.int64]) -> int:
    """Return the number of batches before the first one with too many unresolved requests."""
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
    """Return whether the mean of a series, and a line continued through it, stay below a limit."""
    _, growth = intervals.extrapolate_growth(series, batches_ahead, CONFIDENCE)
    mean = intervals.batch_means(series, batches=len(series), level=2 * CONFIDENCE - 1)
    return max(mean.high, mean.value + growth) < limit


def select_ended(rows: NDArray[np.void]) -> NDArray[np.void]:
    """Return the rows without the requests that the end of the run cut off.

    Those requests say nothing about the load.
    """
    return picked(rows, (rows["status"] != metrics.CANCELLED) & (rows["done_ns"] >= 0))


def any_part_grows(rows: NDArray[np.void], instants_ns: NDArray[np.int64]) -> bool:
    """Return whether the requests in flight at any target or replica grow over these instants.

    Only finished requests are counted. With a single target and replica the answer is False,
    because the caller looks at all requests together anyway.
    """
    part_of_row = replica_keys(Columns(rows))
    parts = np.unique(part_of_row)
    if len(parts) < 2:
        return False
    all_series = []
    for part in parts:
        part_rows = rows[part_of_row == part]
        started = np.searchsorted(np.sort(part_rows["due_ns"]), instants_ns, "right")
        ended = np.searchsorted(np.sort(part_rows["done_ns"]), instants_ns, "right")
        all_series.append((started - ended).astype(float))
    return any(
        found is not None and found.grows and found.growth > MIN_GROWTH_SHARE * found.mean
        for found in trend.find_trends(all_series)
    )
