"""The highest load at which an SLO holds: which load to try next, and when a trial has shown enough.

Sans-IO. `LoadSearch` names the next trial and is told its result. `Watch` examines the records of a running trial and
says when its outcome is decided. Nothing here runs a load or reads a clock, so a search is resumed by telling it the
same results again.

The search estimates the load at which a full-length run from an empty server passes with probability one half. Near
that point it is not certain whether a run passes, because the arrivals and lengths of one run differ from their
distribution. So each outcome is evidence about a psychometric curve P(pass) = Phi((theta - log load) / sigma), held as
a grid of (theta, sigma). A trial at the median of theta amounts to bisection where outcomes are clear, and stays
calibrated where they are not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec
import numpy as np

from loadgen.metrics import columns as metrics
from loadgen.metrics import outcomes, sustainable
from loadgen.metrics.columns import Columns
from loadgen.slo import Slo
from loadgen.stats import early_stopping, intervals, trend
from loadgen.stats.quantiles import element, support

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

Outcome = Literal["over", "under", "invalid"]
Kind = Literal["bracket", "probe", "confirm", "sustain", "level"]
"""sustain: as confirm, and it must not grow either; level: a load of a grid that the user gave."""

PRECISION = 0.02
SURE = 0.90  # probability that the answer lies within the precision, required before it is confirmed
LEVEL = 0.95  # confidence level of the reported interval
MOST_PROBES = 40
STEP = 2.0  # factor between loads while no bracket is known
CONFIRM_AT = 0.80  # a confirmation runs at the load that passes with this probability
CONFIRMATIONS = 4  # failed ones, after which the search gives up
LAPSE = 0.01  # probability that the outcome of a full-length trial says nothing about the load
LAPSE_EARLY = 0.05  # the same for a trial that ended early as under
SIGMA_OF_NOISE = 1.5  # expected sigma, in units of 1 / sqrt(n): lengths and their order add to the noise of arrivals
SUSTAINS = 10  # trials, at most, for the highest load that is sustained
RUN_SPREAD = 0.015  # of a measured server whose run-to-run variation nobody told: the median of what it may be
RUN_SPREAD_FACTOR = 2.0  # one standard deviation, as a factor, of that variation around its median
SIGMA_FACTOR = 1.4  # one standard deviation, as a factor, of sigma around its expected value
SIGMAS = tuple(float(sigma) for sigma in np.geomspace(1e-3, 0.1, 24))

# -- the goal, and how many misses it allows ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What must hold: each SLO term at its quantile, and the joint share if one is set.

    `mlperf`: the limits of MLPerf early stopping must hold too.
    """

    slo: Slo
    mlperf: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        joint = ("goodput",) if self.slo.goodput_share is not None else ()
        return (*(f"{term.metric} p{term.quantile * 100:g}" for term in self.slo.terms), *joint)

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
        return np.array(masks)


# -- a running trial, watched ------------------------------------------------------------------------------------------


class Look(NamedTuple):
    """The state of a running trial. `outcome` None: not decided yet. `misses`: per name of the goal, so far."""

    outcome: Outcome | None
    why: str
    misses: tuple[int, ...]


class Watch:
    """Decides the outcome of a trial before its end, where possible.

    *over* is exact: the misses known already are more than the planned number of requests allows, whatever the other
    requests do. It needs no independence. *under* is possible only with `early_under`: the start-up transient has
    passed (MSER), the requests in flight do not grow, and by batch means of the arrival-ordered prefix after the
    transient, with every unresolved request counted as a miss, neither the quantiles of the terms nor the misses will
    reach their limits by the planned end.
    """

    LEVEL = 0.99
    BATCHES = 10  # after the transient
    MOST = 120  # batches in all; a longer run has longer batches, not more
    SHORTEST_NS = 5_000_000_000
    GROWTH = 0.15  # allowed growth of requests in flight up to the planned end

    def __init__(self, goal: Goal, due_ns: NDArray[np.int64], *, early_under: bool = True) -> None:
        self.goal, self.due_ns = goal, np.sort(due_ns)
        self.planned = len(due_ns)
        self.allowed = goal.allowed(self.planned)
        self.early_under = early_under

    def look(self, now_ns: int, rows: NDArray[np.void]) -> Look:
        """Examine the trial at `now_ns`. `rows`: all records so far, in any order.

        Instants count from the start of the schedule.
        """
        missed = self.goal.misses(rows)
        known = tuple(int(count) for count in missed.sum(axis=1))
        for name, count, allowed in zip(self.goal.names, known, self.allowed, strict=True):
            if count > max(allowed, -1):
                why = f"{count:,} of {self.planned:,} planned requests miss {name}, {max(allowed, 0):,} allowed"
                return Look("over", why, known)
        if self.early_under and self.planned and now_ns < self.due_ns[-1]:
            why = self._steady(now_ns, rows, missed)
            if why:
                return Look("under", why, known)
        return Look(None, "", known)

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
        (unfinished,) = np.nonzero(open_share > 0.001)  # the prefix ends before the first batch with open requests
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
        columns, batch_of_row = Columns(rows[in_prefix]), batch_of_row[in_prefix]
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
        series.append((flying - np.searchsorted(np.sort(own["done_ns"]), instants, "right")).astype(float))
    return any(found and found.grows and found.growth > sustainable.GROWTH * found.level for found in trend.of(series))


# -- the posterior of the answer ---------------------------------------------------------------------------------------


class Belief:
    """The posterior of (theta, sigma) on a grid.

    The prior of theta is flat in the logarithm of the load between two bounds. The prior of sigma is lognormal around
    the value expected from the sampling of one run and from `run_spread`, how much servers differ from run to run
    (None: not told, so that the outcomes have to show it), with SIGMA_FACTOR as its standard deviation.
    """

    POINTS = 2000

    def __init__(self, low: float, high: float, *, sigma: float, run_spread: float | None = 0.0) -> None:
        self.theta = np.linspace(math.log(low), math.log(high), self.POINTS)
        self.sigma = np.array(SIGMAS)
        density = np.zeros(len(self.sigma))
        for weight, spread in _spreads(run_spread):
            middle = math.log(math.hypot(sigma, spread))
            density += weight * np.exp(-0.5 * ((np.log(self.sigma) - middle) / math.log(SIGMA_FACTOR)) ** 2)
        prior = np.log(np.maximum(density, 1e-300))
        self._log = np.broadcast_to(prior, (self.POINTS, len(self.sigma))).copy()

    @property
    def spread(self) -> float:
        """The median of sigma: how much the load that a run just passes differs from run to run, as a share."""
        mass = np.cumsum(self.weights.sum(axis=0))
        return float(self.sigma[int(np.searchsorted(mass, 0.5))])

    def tell(self, load: float, passed: bool, lapse: float) -> None:
        """Update with one outcome at one load. `lapse`: probability that the outcome says nothing about the load."""
        z = (self.theta[:, None] - math.log(load)) / self.sigma[None, :]
        below = _phi(z if passed else -z)
        self._log += np.log(lapse / 2 + (1 - lapse) * below)

    @property
    def weights(self) -> NDArray[np.float64]:
        """Posterior mass of every (theta, sigma)."""
        raw = np.exp(self._log - self._log.max())
        mass: NDArray[np.float64] = raw / raw.sum()
        return mass

    def quantile(self, p: float) -> float:
        """The load below which theta lies with probability p."""
        mass = np.cumsum(self.weights.sum(axis=1))
        return math.exp(float(np.interp(p, mass, self.theta)))

    def interval(self, level: float = LEVEL) -> intervals.Interval:
        """The median of theta and its credible interval, as loads."""
        return intervals.Interval(
            value=self.quantile(0.5),
            low=self.quantile((1 - level) / 2),
            high=self.quantile((1 + level) / 2),
            level=level,
            method="posterior of the load that half of all full-length runs pass",
        )

    def passing(self, p: float) -> float:
        """The highest load at which the next full-length run passes with probability p."""
        weights = self.weights
        low, high = float(self.theta[0]), float(self.theta[-1])
        for _ in range(16):
            x = (low + high) / 2
            chance = float((weights * _phi((self.theta[:, None] - x) / self.sigma[None, :])).sum())
            low, high = (x, high) if chance >= p else (low, x)
        return math.exp(low)


def _spreads(run_spread: float | None) -> list[tuple[float, float]]:
    """The run-to-run variation, as weights and values: the one that was told, or what it may be (None: not told)."""
    if run_spread is not None:
        return [(1.0, run_spread)]
    steps = np.linspace(-2, 2, 9)
    weights = np.exp(-0.5 * steps**2)
    values = RUN_SPREAD * RUN_SPREAD_FACTOR**steps
    return list(zip((weights / weights.sum()).tolist(), values.tolist(), strict=True))


def _phi(z: NDArray[np.float64]) -> NDArray[np.float64]:
    """The standard normal distribution, to 7.5e-8 (Abramowitz and Stegun 26.2.17)."""
    x = np.abs(z)
    t = 1 / (1 + 0.2316419 * x)
    tail = np.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    tail *= t * (0.319381530 + t * (-0.356563782 + t * (1.781477937 + t * (-1.821255978 + t * 1.330274429))))
    return np.where(z >= 0, 1 - tail, tail)


# -- the search --------------------------------------------------------------------------------------------------------


class NextTrial(msgspec.Struct, frozen=True, kw_only=True):
    """The next trial: its load, and whether it may end early as under. `number` counts from 0.

    `lengths`: its duration, in full lengths of a trial.
    """

    number: int
    load: float
    kind: Kind
    early_under: bool
    lengths: float = 1.0


class TrialResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a trial. `spent_s` includes the drain; `why` is the reason in words.

    `offered`: the load that the timetable of the trial really offered until it was decided (arrivals / time). The
    requested load is only a mean, and the real one differs by chance, so the outcome is judged at `offered`. `noise`: 1
    / sqrt(n) for n requests of a full-length run, the scale of the remaining chance (lengths and their order).
    """

    ask: NextTrial
    outcome: Outcome
    early: bool
    spent_s: float
    offered: float
    noise: float
    why: str = ""
    folder: str = ""
    figures: dict[str, float | None] = {}
    sustained: bool | None = None  # null: not known, as of every trial that ended early
    sustained_why: str = ""


class SearchAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a search. `load` None: nothing is known yet, or even the lowest load does not hold (`reason`
    "none").

    reason: "" not finished; "found" precise and confirmed; "none" as above; "highest" the highest load allowed holds;
    "unconfirmed" the confirmations failed; "probes", "time", "invalid", "gone" (no endpoint any more), "interrupted":
    the search stopped with what it knew then.
    """

    load: float | None
    interval: intervals.Interval | None
    confirmed: float | None  # highest load whose confirmation passed: a full-length run from empty
    held: float | None  # highest load of a trial with the outcome under
    missed: float | None  # lowest load of a trial with the outcome over
    reason: str
    probes: int
    spent_s: float
    confirming_s: float  # part of spent_s: the confirmations
    sustained: bool | None = None  # whether `steady` was confirmed over `lengths`; null: not known, "rules only"
    sustained_why: str = ""
    steady: float | None = None  # the steady knee: the highest load that held and did not grow
    not_steady: float | None = None  # the lowest load that held by the rules and grew, or missed them when it went on
    lengths: float = 1.0  # duration of the trials behind `steady`, in full lengths
    run_spread: float | None = None  # variation from run to run in `interval`, as a share
    run_spread_from: Literal["", "told", "learned", "simulated"] = ""

    @property
    def rules_only(self) -> bool:
        """Whether a load was confirmed by the rules, and it is not shown that it can go on for ever."""
        return self.confirmed is not None and self.sustained is not True


@dataclass(slots=True)
class LoadSearch:
    """The search: call `ask`, run the trial, call `tell`, until `ask` returns None.

    Loads are rates per second, or numbers of lanes when `whole`.
    """

    low: float  # not below this
    high: float  # not above this
    start: float | None = None  # None: low and high are a bracket; begin at their geometric mean
    precision: float = PRECISION  # relative precision of the answer, to reach with probability SURE
    most_probes: int = MOST_PROBES
    most_s: float = math.inf
    whole: bool = False
    longer: float = 1.0  # duration of the trials that confirm a sustained load, in full lengths; 1: no such trials
    run_spread: float | None = 0.0  # of the server, as a share; None: not told, to be learned
    told: list[TrialResult] = field(default_factory=list)
    stopped: str = ""

    @property
    def _valid_results(self) -> list[TrialResult]:
        return [result for result in self.told if result.outcome != "invalid" and result.ask.kind != "sustain"]

    def tell(self, told: TrialResult) -> None:
        """Record the result of a trial. An invalid trial says nothing about the load, and ends the search."""
        self.told.append(told)
        if told.outcome == "invalid":
            self.stopped = "invalid"

    def stop(self, reason: str) -> None:
        """End the search for a reason from outside: interrupted, out of time. The first reason stands."""
        self.stopped = self.stopped or reason

    def ask(self) -> NextTrial | None:
        """The next trial; None when the search has ended (see `answer`). The same trial until its result is told."""
        if reason := self._stop_reason():
            load = self._next_sustain() if reason in ("found", "highest") else None
            return None if load is None else self._trial(load, "sustain")
        bounds = self._bracket()
        if not isinstance(bounds, tuple):
            return self._trial(bounds, "bracket")
        belief = self._belief(bounds)
        end = self._bracket_end(belief)
        if end is not None:
            return self._trial(end, "bracket")
        if self._precise(belief):
            return self._trial(self._confirmation_load(belief), "confirm")
        return self._trial(belief.quantile(0.5), "probe")

    def _bracket_end(self, belief: Belief) -> float | None:
        """The end of the bracket that all trials so far point to, to be tried itself; None when they do not.

        The answer may lie outside the bracket that the user gave.
        """
        middle = belief.quantile(0.5)
        near = max(self.precision * middle, 1.5 if self.whole else 0.0)
        if self._missed is None and middle + near >= self.high:
            return self.high
        if self._held is None and middle - near <= self.low:
            return self.low
        return None

    def _trial(self, load: float, kind: Kind) -> NextTrial:
        load = min(max(load, self.low), self.high)
        if self.whole:
            load = float(round(load))
            if kind == "probe" and any(result.ask.load == load for result in self._valid_results):
                load += 1 if self._held == load else -1
        over = math.inf if self._missed is None else self._missed
        # within the precision of a load known to be over, only a full-length run can tell the outcome
        early = kind not in ("confirm", "sustain") and load * (1 + self.precision) <= over
        lengths = self.longer if kind == "sustain" else 1.0
        return NextTrial(number=len(self.told), load=load, kind=kind, early_under=early, lengths=lengths)

    # -- the highest load that is sustained ----------------------------------------------------------------------------

    @property
    def _sustain_results(self) -> list[TrialResult]:
        """The trials that say whether a load is sustained: longer ones, and confirmations that grew."""
        return [
            result
            for result in self.told
            if result.outcome != "invalid"
            and (result.ask.kind == "sustain" or (result.ask.kind == "confirm" and result.sustained is False))
        ]

    def _steady_bracket(self) -> tuple[TrialResult | None, TrialResult | None]:
        """The trial at the highest load that held and did not grow, and the one at the lowest load that did not."""
        results = self._sustain_results
        held = [result for result in results if _is_steady(result)]
        missed = [result for result in results if not _is_steady(result)]
        return (
            max(held, key=lambda result: result.ask.load, default=None),
            min(missed, key=lambda result: result.ask.load, default=None),
        )

    def _next_sustain(self) -> float | None:
        """The load of the next trial that must be sustained; None when there is none to try."""
        tried = [result for result in self.told if result.ask.kind == "sustain"]
        spent_s = sum(result.spent_s for result in self.told)
        held, missed = self._steady_bracket()
        if len(tried) >= SUSTAINS or len(self.told) >= self.most_probes + SUSTAINS or spent_s >= self.most_s:
            return None
        if held is None and missed is None:
            return self._top if self.longer > 1 else None
        if missed is None:
            return None  # the rules' own load is sustained
        if held is None:
            failed = len({result.ask.load for result in self._sustain_results})
            load = self._top * (1 - min(self.precision * 2 ** (failed - 1), 0.5))
            return self._not_again(load if load < missed.ask.load else missed.ask.load * (1 - self.precision))
        if missed.ask.load <= held.ask.load * (1 + 1.1 * self.precision) + (1.5 if self.whole else 0.0):
            return None
        return self._not_again(math.sqrt(held.ask.load * missed.ask.load))

    def _not_again(self, load: float) -> float | None:
        load = float(round(load)) if self.whole else load
        tried = {result.ask.load for result in self._sustain_results}
        return None if load < self.low or load in tried else load

    @property
    def _top(self) -> float:
        """The load that the rules allow: the highest confirmed one, or the highest that held."""
        return self._confirmed or self._held or self.low

    def _loads(self, outcome: Outcome) -> list[float]:
        return [result.ask.load for result in self._valid_results if result.outcome == outcome]

    @property
    def _held(self) -> float | None:
        """The highest load with the outcome under."""
        return max(self._loads("under"), default=None)

    @property
    def _missed(self) -> float | None:
        """The lowest load with the outcome over."""
        return min(self._loads("over"), default=None)

    def _bracket(self) -> tuple[float, float] | float:
        """Bounds for theta, or the load to try while there are no bounds."""
        if self.start is None:
            return self.low, self.high
        held, missed = self._held, self._missed
        if held is None and missed is None:
            return self.start
        if missed is None:
            assert held is not None
            return min(held * STEP, self.high)
        if held is None:
            return max(missed / STEP, self.low)
        low, high = min(held, missed), max(held, missed)
        return max(low / 1.1, self.low), min(high * 1.1, self.high)

    def _belief(self, bounds: tuple[float, float]) -> Belief:
        noise = [result.noise for result in self._valid_results if result.noise > 0]
        sigma = SIGMA_OF_NOISE * noise[-1] if noise else 0.01
        belief = Belief(*bounds, sigma=sigma, run_spread=self.run_spread)
        for result in self._valid_results:
            lapse = LAPSE_EARLY if result.early and result.outcome == "under" else LAPSE
            belief.tell(result.offered, result.outcome == "under", lapse)
        return belief

    def _precise(self, belief: Belief) -> bool:
        interval = belief.interval(SURE)
        if self.whole and interval.high - interval.low < 1.5:
            return True
        return interval.half_width <= self.precision * interval.value

    def _confirmation_load(self, belief: Belief) -> float:
        load = max(belief.passing(CONFIRM_AT), belief.quantile((1 - LEVEL) / 2))
        return math.floor(load) if self.whole else load

    @property
    def _confirmed(self) -> float | None:
        passed = [result.ask for result in self._valid_results if result.outcome == "under"]
        return max((ask.load for ask in passed if ask.kind == "confirm"), default=None)

    def _stop_reason(self) -> str:
        if self.stopped:
            return self.stopped
        held, missed = self._held, self._missed
        confirmations = [result for result in self._valid_results if result.ask.kind == "confirm"]
        if missed is not None and missed <= self.low and held is None:
            return "none"
        if held is not None and held >= self.high and missed is None:
            return "highest"
        if self._confirmed is not None:
            bounds = self._bracket()
            if isinstance(bounds, tuple) and self._precise(self._belief(bounds)):
                return "found"
        if len(confirmations) >= CONFIRMATIONS and self._confirmed is None:
            return "unconfirmed"
        if len(self.told) >= self.most_probes:
            return "probes"
        if sum(result.spent_s for result in self.told) >= self.most_s:
            return "time"
        return ""

    @property
    def answer(self) -> SearchAnswer:
        """The best answer known now."""
        held, missed = self._held, self._missed
        reason = self._stop_reason()
        interval, spread = None, self.run_spread
        load = held
        bounds = self._bracket()
        if isinstance(bounds, tuple) and missed is not None and reason != "none":
            belief = self._belief(bounds)
            interval = belief.interval()
            load = interval.value
            spread = belief.spread if spread is None else spread
        steady, not_steady = self._steady_bracket()
        sustained, sustained_why = self._sustained(steady, not_steady)
        return SearchAnswer(
            load=None if reason == "none" else load,
            interval=interval,
            confirmed=self._confirmed,
            held=held,
            missed=missed,
            reason=reason,
            probes=len(self.told),
            spent_s=sum(result.spent_s for result in self.told),
            confirming_s=sum(result.spent_s for result in self.told if result.ask.kind in ("confirm", "sustain")),
            sustained=sustained,
            sustained_why=sustained_why,
            steady=None if steady is None else steady.ask.load,
            not_steady=None if not_steady is None else not_steady.ask.load,
            lengths=self.longer,
            run_spread=spread,
            run_spread_from="learned" if self.run_spread is None else "told" if self.run_spread else "simulated",
        )

    def _sustained(self, steady: TrialResult | None, not_steady: TrialResult | None) -> tuple[bool | None, str]:
        """Whether the load of `steady` is sustained, and why: only a longer trial can show that it is."""
        if steady is not None and steady.ask.lengths > 1:
            times = f"held over {steady.ask.lengths:g} times the length of a trial; "
            return steady.sustained, times + steady.sustained_why
        if not_steady is not None:
            return False, not_steady.sustained_why if not_steady.sustained is False else not_steady.why
        if self._confirmed is None:
            return None, "no load was confirmed"
        return None, "no trial was longer than the rules ask for"


def _is_steady(result: TrialResult) -> bool:
    return result.outcome == "under" and result.sustained is not False


def resume(search: LoadSearch, told: Iterable[TrialResult]) -> LoadSearch:
    """The search in the state after these results."""
    for result in told:
        search.tell(result)
    return search
