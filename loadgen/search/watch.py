"""What must hold at a load, and when a running trial has shown enough of it.

Pure. `Watch` examines the records of a running trial and says when its outcome is decided.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
from msgspec import Struct

from loadgen.core.metrics import columns as metrics
from loadgen.core.metrics import outcomes, sustainable, tasks
from loadgen.core.metrics.columns import Columns
from loadgen.core.results.record import KIND, ROW, joined, picked
from loadgen.core.slo import Slo, TaskTerm
from loadgen.core.stats import early_stopping, intervals, trend
from loadgen.core.stats.quantiles import element, support

if TYPE_CHECKING:
    from numpy.typing import NDArray

Outcome = Literal["over", "under", "invalid"]
BROKEN = tuple(KIND[name] for name in ("dns", "connect", "tls", "reset"))
"""Kinds of failure of a server that is gone. One that is overloaded responds late, or with errors."""


class Goal(Struct, frozen=True, kw_only=True):
    """What must hold: each SLO term at its quantile, and the joint share if one is set.

    `mlperf`: the limits of MLPerf early stopping must hold too. `whole`: names of what only a trial at full length
    shows to hold: promises of tasks, and of classes with an SLO of their own. No trial is called under before its end
    then.
    """

    slo: Slo
    mlperf: bool = False
    whole: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        joint = ("goodput",) if self.slo.goodput_share is not None else ()
        return (*(f"{term.metric} p{term.quantile * 100:g}" for term in self.slo.terms), *joint)

    @property
    def promised(self) -> tuple[str, ...]:
        """All names, for readers: what is judged request by request, and what is judged of a whole trial."""
        return self.names + self.whole

    def allowed(self, n: int) -> tuple[int, ...]:
        """Per name, the most misses that `n` requests allow; -1 when `n` is too small even without misses."""
        limits = [n - 1 - min(int(n * term.quantile), n - 1) for term in self.slo.terms]
        if self.mlperf:
            limits = [
                min(limit, early_stopping.allowed(n, term.quantile))
                for limit, term in zip(limits, self.slo.terms, strict=True)
            ]
        if self.slo.goodput_share is not None:
            limits.append(n - math.ceil(self.slo.goodput_share * n - 1e-9))
        return tuple(limits)

    def misses(self, rows: NDArray[np.void]) -> NDArray[np.bool_]:
        """Which of these finished requests miss which term: a mask of shape (names, rows).

        Failed and dropped requests miss every term; unfinished ones those terms that they were over when cut.
        """
        columns = Columns(rows)
        unfinished = columns.where(metrics.UNFINISHED)
        not_ok = ~(columns.where(metrics.OK) | unfinished)
        masks = [
            not_ok
            | (~unfinished & (columns.measure(term.metric) > term.limit_ns))
            | outcomes.is_over_when_cut(columns, term)
            for term in self.slo.terms
        ]
        if self.slo.goodput_share is not None:
            masks.append(np.logical_or.reduce([not_ok, *masks]))
        return np.array(masks, bool).reshape(len(masks), len(rows))


class Decision(NamedTuple):
    """The outcome of a trial: `code` and `why` say what it rests on, `at_ns` when it was certain."""

    outcome: Outcome
    code: str  # misses, steady
    why: str
    at_ns: int


class Watch:
    """Decides the outcome of a trial before its end, where possible.

    *over* is exact: the misses known already are more than the planned number of requests, or tasks, allows, whatever
    the others do. It needs no independence. *under* is possible only with `early_under`: the start-up transient has
    passed (MSER), the requests in flight do not grow, and by batch means of the arrival-ordered prefix after the
    transient, with every unresolved request counted as a miss, neither the quantiles of the terms nor the misses will
    reach their limits by the planned end.
    """

    LEVEL = 0.99
    BATCHES = 10  # after the transient
    MOST = 120  # batches in all; a longer run has longer batches, not more
    SHORTEST_NS = 5_000_000_000
    GROWTH = 0.15  # allowed growth of requests in flight up to the planned end

    def __init__(
        self,
        goal: Goal,
        due_ns: NDArray[np.int64],
        *,
        planned: int | None = None,
        early_under: bool = True,
        turns: int = 1,
    ) -> None:
        """`due_ns`: of what the schedule starts: requests, or conversations and tasks of at most so many `turns`, of
        which `planned` requests come. Of these only *over* is decided early: when their later turns are due, nobody
        knows beforehand.
        """
        self.goal, self.due_ns = goal, np.sort(due_ns)
        self.planned = len(due_ns) if planned is None else planned
        self.allowed = goal.allowed(self.planned)
        self.early_under = early_under and planned is None and not goal.whole
        self._counts = np.zeros(len(goal.names), np.int64)
        self._rows = np.zeros(0, ROW)
        self._missed = goal.misses(self._rows)
        self._turns, self._of_open_tasks, self._tasks_missed = turns, self._rows, 0

    def look(self, now_ns: int, news: NDArray[np.void]) -> Decision | None:
        """Examine the trial at `now_ns`. `news`: the records since the last look, in any order. None: not decided yet.

        Instants count from the start of the schedule.
        """
        if self.goal.slo.task is not None:
            self._look_at_tasks(self.goal.slo.task, news)
        news = that_ended(news)
        missed = self.goal.misses(news)
        self._counts += missed.sum(axis=1)
        if self.early_under:
            self._rows = joined((self._rows, news))
            self._missed = np.concatenate((self._missed, missed), axis=1)
        return self._decide(now_ns, self._counts, self._rows, self._missed)

    def _look_at_tasks(self, term: TaskTerm, news: NDArray[np.void]) -> None:
        """Count the tasks that have ended since the last look and missed what was promised of them."""
        rows = joined((self._of_open_tasks, news))
        found = tasks.of_requests(Columns(rows), self._turns)
        self._of_open_tasks = picked(rows, np.isin(rows["session"], found.numbers[~found.over]))
        judged = (
            found.over
            & ~found.columns.cancelled.astype(bool)
            & ~found.columns.unfinished.astype(bool)
        )
        self._tasks_missed += int((judged & ~tasks.kept(found.columns, found.end, term)).sum())

    def first(self, rows: NDArray[np.void], every_ns: int) -> Decision | None:
        """What looks at a finished trial would have decided first. `rows`: in the order in which the requests ended."""
        missed = self.goal.misses(rows)
        counts = np.pad(missed.cumsum(axis=1), ((0, 0), (1, 0)))
        for now_ns in range(every_ns, int(rows["done_ns"].max(initial=0)), every_ns):
            seen = np.searchsorted(rows["done_ns"], now_ns, "right")
            if decision := self._decide(now_ns, counts[:, seen], rows[:seen], missed[:, :seen]):
                return decision
        return None

    def _decide(
        self,
        now_ns: int,
        counts: NDArray[np.int64],
        rows: NDArray[np.void],
        missed: NDArray[np.bool_],
    ) -> Decision | None:
        """`counts`: the misses so far, per name. `rows`, `missed`: what they are counted over, where `early_under`."""
        for name, count, allowed in zip(
            self.goal.names, counts.tolist(), self.allowed, strict=True
        ):
            if count > max(allowed, -1):
                why = f"{count:,} of {self.planned:,} planned requests miss {name}, {max(allowed, 0):,} allowed"
                return Decision("over", "misses", why, now_ns)
        if (task := self.goal.slo.task) is not None:
            allowed = len(self.due_ns) - math.ceil(task.share * len(self.due_ns) - 1e-9)
            if self._tasks_missed > allowed:
                why = f"{self._tasks_missed:,} of {len(self.due_ns):,} planned tasks miss what was promised"
                return Decision("over", "misses", f"{why}, {allowed:,} allowed", now_ns)
        if self.early_under and self.planned and now_ns < self.due_ns[-1]:
            why = self._steady(now_ns, rows, missed)
            if why:
                return Decision("under", "steady", why, now_ns)
        return None

    def _steady(self, now_ns: int, rows: NDArray[np.void], missed: NDArray[np.bool_]) -> str:
        """Why the rest of the run cannot change the outcome "under"; "" when that cannot be said."""
        width = self._width()
        last = int(self.due_ns[-1])
        count = int(now_ns // width)
        if count < self.BATCHES + 2:
            return ""
        arrived = np.bincount(np.minimum(self.due_ns // width, count), minlength=count + 1)[:count]
        batch_of_row = rows["due_ns"] // width
        in_batches = batch_of_row < count
        done = np.bincount(batch_of_row[in_batches], minlength=count)[:count]
        open_share = (arrived - done) / np.maximum(arrived, 1)
        (unfinished,) = np.nonzero(
            open_share > 0.001
        )  # the prefix ends before the first batch with open requests
        prefix = int(unfinished[0]) if len(unfinished) else count
        if prefix < self.BATCHES + 2:
            return ""
        edges = np.arange(1, prefix + 1) * width
        in_flight = np.searchsorted(self.due_ns, edges, "right") - np.searchsorted(
            np.sort(rows["done_ns"]), edges, "right"
        )
        quantiles = self._quantiles(rows, batch_of_row, prefix)
        begin = 0
        for series in (in_flight.astype(float), *quantiles):
            start = intervals.transient(series)
            if start is None:
                return ""
            begin = max(begin, start)
        if prefix - begin < self.BATCHES:
            return ""
        # extrapolate a line no further than the time it was fitted over
        ahead = min((last - prefix * width) / width, prefix - begin)
        _, growth = intervals.growth(in_flight[begin:].astype(float), ahead, self.LEVEL)
        level = float(in_flight[begin:].mean())
        if growth > self.GROWTH * level + 2:
            return ""
        if any_part_grows(rows, edges[begin:]):
            return ""
        for term, series in zip(self.goal.slo.terms, quantiles, strict=True):
            if not self._stays_below(series[begin:], math.log(term.limit_ns), ahead):
                return ""
        unresolved = (arrived - done)[:prefix]
        rest = self.planned - int(arrived[:prefix].sum())
        for number, allowed in enumerate(self.allowed):
            known_misses = batch_of_row[missed[number] & (batch_of_row < prefix)]
            misses_by_batch = np.bincount(known_misses, minlength=prefix) + unresolved
            share = intervals.batch_means(
                misses_by_batch[begin:] / arrived[begin:prefix], batches=self.BATCHES, level=0.98
            )
            if int(misses_by_batch.sum()) + max(share.high, 1 / self.planned) * rest > allowed:
                return ""
        return (
            f"steady since {begin * width / 1e9:.0f} s: {prefix - begin} batches of {width / 1e9:.0f} s, "
            f"{level:,.0f} in flight"
        )

    def _width(self) -> int:
        """Length of a batch in ns.

        Long enough for the highest quantile of the goal, and for at most MOST batches in the run.
        """
        needed = max((support(term.quantile) for term in self.goal.slo.terms), default=100)
        length = max(1, int(self.due_ns[-1]))
        return max(self.SHORTEST_NS, math.ceil(length * needed / self.planned), length // self.MOST)

    def _quantiles(
        self, rows: NDArray[np.void], batch_of_row: NDArray[np.int64], prefix: int
    ) -> list[NDArray[np.float64]]:
        """Per term, the logarithm of its quantile in each batch of the prefix; 40 where that falls on a failure."""
        in_prefix = batch_of_row < prefix
        columns, batch_of_row = Columns(picked(rows, in_prefix)), batch_of_row[in_prefix]
        order = np.argsort(batch_of_row, kind="stable")
        bounds = np.searchsorted(batch_of_row[order], np.arange(prefix + 1))
        not_ok = ~columns.where(metrics.OK)
        all_series = []
        for term in self.goal.slo.terms:
            values = columns.measure(term.metric)
            values = np.where(not_ok, np.iinfo(np.int64).max, values)[order]
            series = np.full(prefix, 40.0)
            for k in range(prefix):
                batch = values[bounds[k] : bounds[k + 1]]
                batch = batch[batch != metrics.UNDEFINED]
                if len(batch):
                    value = element(batch, term.quantile)
                    series[k] = math.log(max(value, 1)) if value < np.iinfo(np.int64).max else 40.0
            all_series.append(series)
        return all_series

    def _stays_below(self, series: NDArray[np.float64], limit: float, ahead: float) -> bool:
        """Whether the mean of batches like these, and the line continued through them, stay below a limit at LEVEL."""
        _, growth = intervals.growth(series, ahead, self.LEVEL)
        mean = intervals.batch_means(series, batches=len(series), level=2 * self.LEVEL - 1)
        return max(mean.high, mean.value + growth) < limit


def that_ended(rows: NDArray[np.void]) -> NDArray[np.void]:
    """The rows without the requests that the end of the run cut off: those say nothing about the load."""
    return picked(rows, (rows["status"] != metrics.CANCELLED) & (rows["done_ns"] >= 0))


def any_part_grows(rows: NDArray[np.void], instants: NDArray[np.int64]) -> bool:
    """Whether the number in flight of any target or replica grows over these instants, by the finished requests."""
    keys = sustainable.keys(Columns(rows))
    names = np.unique(keys)
    if len(names) < 2:
        return False  # all together are looked at anyway
    series = []
    for name in names:
        own = rows[keys == name]
        flying = np.searchsorted(np.sort(own["due_ns"]), instants, "right")
        series.append(
            (flying - np.searchsorted(np.sort(own["done_ns"]), instants, "right")).astype(float)
        )
    return any(
        found and found.grows and found.growth > sustainable.GROWTH * found.level
        for found in trend.of(series)
    )
