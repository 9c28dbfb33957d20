"""The highest load at which an SLO holds: which load to try next, and when a probe has shown enough.

Sans-IO. `Search` is asked for the next probe and told how it came out; `Watch` looks at a probe's records while it runs
and says when it is decided. Nobody here runs anything or knows a clock, so a search is resumed by telling it again.

What is searched for is the load at which a full-length run from empty passes with probability one half. Whether such a
run passes is not certain near that point (a run's own arrivals and lengths differ from their law), so each outcome is
evidence about a psychometric curve P(pass) = Phi((theta - log load) / sigma), held as a grid of (theta, sigma). Asking
at the median of theta is bisection where outcomes are clear and stays calibrated where they are not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec
import numpy as np

from loadgen.metrics import columns as metrics
from loadgen.metrics.columns import Columns
from loadgen.slo import Slo
from loadgen.stats import early_stopping, intervals
from loadgen.stats.quantiles import support

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

Outcome = Literal["over", "under", "invalid"]
Kind = Literal["bracket", "probe", "confirm", "level"]  # a level: of a grid that somebody gave

PRECISION = 0.02
SURE = 0.90  # that the answer lies within the precision, before it is confirmed
LEVEL = 0.95  # of the interval that is reported
MOST_PROBES = 40
STEP = 2.0  # while no bracket is known
CONFIRM_AT = 0.80  # the confirmation is asked where it should pass so surely
CONFIRMATIONS = 4
LAPSE = 0.01  # of a probe at full length: that its outcome says nothing
LAPSE_EARLY = 0.05  # of one that ended early as under
SIGMA_OF_NOISE = 1.5  # sigma as it is expected, over 1 / sqrt(n): the rest is lengths, and in which order they come
SIGMA_FACTOR = 1.4  # one standard deviation of what sigma may differ by from the sampling of a run
SIGMAS = tuple(float(sigma) for sigma in np.geomspace(1e-3, 0.1, 24))

# -- a goal, and what of it a number of requests allows ----------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What must hold: each term at its quantile, the joint share if one is asked for. `mlperf`: early stopping too."""

    slo: Slo
    mlperf: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        joint = ("goodput",) if self.slo.goodput_share is not None else ()
        return (*(f"{term.metric} p{term.quantile * 100:g}" for term in self.slo.terms), *joint)

    def allowed(self, n: int) -> tuple[int, ...]:
        """Per name, the most misses that `n` requests allow; -1 when even none is too few."""
        most = [n - 1 - min(int(n * term.quantile), n - 1) for term in self.slo.terms]
        if self.mlperf:
            most = [
                min(one, early_stopping.allowed(n, term.quantile))
                for one, term in zip(most, self.slo.terms, strict=True)
            ]
        if self.slo.goodput_share is not None:
            most.append(n - math.ceil(self.slo.goodput_share * n - 1e-9))
        return tuple(most)

    def misses(self, rows: NDArray[np.void]) -> NDArray[np.bool_]:
        """Shape (names, rows): which of these finished requests miss what. Failed and dropped ones miss everything."""
        columns = Columns(rows)
        bad = ~columns.where(metrics.OK)
        found = [bad | (columns.measure(term.metric) > term.limit_ns) for term in self.slo.terms]
        if self.slo.goodput_share is not None:
            found.append(np.logical_or.reduce([bad, *found]))
        return np.array(found)


# -- a probe, watched --------------------------------------------------------------------------------------------------


class Look(NamedTuple):
    """What a look at a running probe says. `outcome` None: not decided."""

    outcome: Outcome | None
    why: str
    misses: tuple[int, ...]


class Watch:
    """Decides a probe before its end, if that can be.

    *over*, exactly: the misses known already are more than the planned number of requests allows, whatever the others
    do. Needs no independence. *under*, only where `early_under`: the start-up transient has passed by MSER, requests in
    flight do not grow, and by batch means of the arrival-ordered prefix after it, every unresolved request counted as a
    miss, neither the terms' quantiles nor the misses will reach their limits by the planned end.
    """

    LEVEL = 0.99
    BATCHES = 10  # after the transient
    MOST = 120  # batches in all: longer ones rather than more
    SHORTEST_NS = 5_000_000_000
    GROWTH = 0.15  # of requests in flight, up to the planned end

    def __init__(self, goal: Goal, due_ns: NDArray[np.int64], *, early_under: bool = True) -> None:
        self.goal, self.due_ns = goal, np.sort(due_ns)
        self.planned = len(due_ns)
        self.allowed = goal.allowed(self.planned)
        self.early_under = early_under

    def look(self, now_ns: int, rows: NDArray[np.void]) -> Look:
        """`rows`: all records so far, in any order; instants from the start of the schedule."""
        missed = self.goal.misses(rows)
        known = tuple(int(count) for count in missed.sum(axis=1))
        for name, count, most in zip(self.goal.names, known, self.allowed, strict=True):
            if count > max(most, -1):
                why = f"{count:,} of {self.planned:,} planned requests miss {name}, {max(most, 0):,} allowed"
                return Look("over", why, known)
        if self.early_under and self.planned and now_ns < self.due_ns[-1]:
            why = self._steady(now_ns, rows, missed)
            if why:
                return Look("under", why, known)
        return Look(None, "", known)

    def _steady(self, now_ns: int, rows: NDArray[np.void], missed: NDArray[np.bool_]) -> str:
        """Why the rest of the run will not change that it is under; "" when that cannot be said."""
        width = self._width()
        last = int(self.due_ns[-1])
        count = int(now_ns // width)
        if count < self.BATCHES + 2:
            return ""
        arrived = np.bincount(np.minimum(self.due_ns // width, count), minlength=count + 1)[:count]
        place = rows["due_ns"] // width
        inside = place < count
        done = np.bincount(place[inside], minlength=count)[:count]
        open_share = (arrived - done) / np.maximum(arrived, 1)
        (late,) = np.nonzero(open_share > 0.001)  # from the first batch on that is not as good as resolved
        prefix = int(late[0]) if len(late) else count
        if prefix < self.BATCHES + 2:
            return ""
        edges = np.arange(1, prefix + 1) * width
        flying = np.searchsorted(self.due_ns, edges, "right") - np.searchsorted(
            np.sort(rows["done_ns"]), edges, "right"
        )
        quantiles = self._quantiles(rows, place, prefix)
        begin = 0
        for series in (flying.astype(float), *quantiles):
            start = intervals.transient(series)
            if start is None:
                return ""
            begin = max(begin, start)
        if prefix - begin < self.BATCHES:
            return ""
        # a line is continued no further than it has been seen
        ahead = min((last - prefix * width) / width, prefix - begin)
        _, more = intervals.growth(flying[begin:].astype(float), ahead, self.LEVEL)
        level = float(flying[begin:].mean())
        if more > self.GROWTH * level + 2:
            return ""
        for term, series in zip(self.goal.slo.terms, quantiles, strict=True):
            if not self._stays_below(series[begin:], math.log(term.limit_ns), ahead):
                return ""
        unresolved = (arrived - done)[:prefix]
        rest = self.planned - int(arrived[:prefix].sum())
        for number, most in enumerate(self.allowed):
            of_batch = np.bincount(place[missed[number] & (place < prefix)], minlength=prefix)[:prefix] + unresolved
            share = intervals.batch_means(of_batch[begin:] / arrived[begin:prefix], batches=self.BATCHES, level=0.98)
            if int(of_batch.sum()) + max(share.high, 1 / self.planned) * rest > most:
                return ""
        return (
            f"steady since {begin * width / 1e9:.0f} s: {prefix - begin} batches of {width / 1e9:.0f} s, "
            f"{level:,.0f} in flight"
        )

    def _width(self) -> int:
        """Of a batch, ns: long enough for the highest quantile asked about, and for MOST of them in the run."""
        most = max((support(term.quantile) for term in self.goal.slo.terms), default=100)
        length = max(1, int(self.due_ns[-1]))
        return max(self.SHORTEST_NS, math.ceil(length * most / self.planned), length // self.MOST)

    def _quantiles(self, rows: NDArray[np.void], place: NDArray[np.int64], prefix: int) -> list[NDArray[np.float64]]:
        """Per term, the logarithm of its quantile in each batch of the prefix, +40 where that fell on a failure."""
        chosen = rows[place < prefix]
        columns = Columns(chosen)
        order = np.argsort(chosen["due_ns"] // self._width(), kind="stable")
        bounds = np.searchsorted((chosen["due_ns"] // self._width())[order], np.arange(prefix + 1))
        bad = ~columns.where(metrics.OK)
        found = []
        for term in self.goal.slo.terms:
            values = columns.measure(term.metric)
            values = np.where(bad, np.iinfo(np.int64).max, values)[order]
            series = np.full(prefix, 40.0)
            for k in range(prefix):
                part = values[bounds[k] : bounds[k + 1]]
                part = part[part != metrics.UNDEFINED]
                if len(part):
                    at = min(int(len(part) * term.quantile), len(part) - 1)
                    value = int(np.partition(part, at)[at])
                    series[k] = math.log(max(value, 1)) if value < np.iinfo(np.int64).max else 40.0
            found.append(series)
        return found

    def _stays_below(self, series: NDArray[np.float64], limit: float, ahead: float) -> bool:
        """Whether the mean of batches like these, and their line continued, stay below a limit at LEVEL."""
        _, more = intervals.growth(series, ahead, self.LEVEL)
        mean = intervals.batch_means(series, batches=len(series), level=2 * self.LEVEL - 1)
        return max(mean.high, mean.value + more) < limit


# -- what is believed about the point ----------------------------------------------------------------------------------


class Belief:
    """The posterior of (theta, sigma) on a grid: theta flat in the logarithm of the load between two bounds, sigma
    lognormal around what a run's own sampling makes of it, within SIGMA_FACTOR either way."""

    POINTS = 2000

    def __init__(self, low: float, high: float, *, sigma: float) -> None:
        self.theta = np.linspace(math.log(low), math.log(high), self.POINTS)
        self.sigma = np.array(SIGMAS)
        prior = -0.5 * ((np.log(self.sigma) - math.log(sigma)) / math.log(SIGMA_FACTOR)) ** 2
        self._log = np.broadcast_to(prior, (self.POINTS, len(self.sigma))).copy()

    def tell(self, load: float, passed: bool, lapse: float) -> None:
        """One outcome at one load."""
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


def _phi(z: NDArray[np.float64]) -> NDArray[np.float64]:
    """The standard normal distribution, to 7.5e-8 (Abramowitz and Stegun 26.2.17)."""
    x = np.abs(z)
    t = 1 / (1 + 0.2316419 * x)
    tail = np.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    tail *= t * (0.319381530 + t * (-0.356563782 + t * (1.781477937 + t * (-1.821255978 + t * 1.330274429))))
    return np.where(z >= 0, 1 - tail, tail)


# -- asking and telling ------------------------------------------------------------------------------------------------


class NextTrial(msgspec.Struct, frozen=True, kw_only=True):
    """The next probe: at which load, and whether it may end early as under. `number` counts from 0."""

    number: int
    load: float
    kind: Kind
    early_under: bool


class TrialResult(msgspec.Struct, frozen=True, kw_only=True):
    """How a probe came out. `spent_s` with its drain; `why` in words.

    `offered`: the load that its timetable in fact offered until it was decided (its arrivals over that time), where the
    asked one is a mean; by it, not by the asked one, the outcome is judged, which takes most of the luck out of it.
    `noise`: 1 / sqrt(n) of a full length, the scale of the luck that is left (lengths, and in which order they come).
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


class SearchAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Where a search stands. `load` None: not even the lowest load holds (`reason` "none"), or nothing is known yet.

    reason: "" not finished; "found" precise and confirmed; "none"; "highest" the highest load allowed holds;
    "unconfirmed"; "probes", "time", "invalid", "gone" (no endpoint any more), "interrupted": stopped with what it knew.
    """

    load: float | None
    interval: intervals.Interval | None
    confirmed: float | None  # highest load that a full-length run from empty has passed, as confirmation
    held: float | None  # highest load that any probe was under at
    missed: float | None  # lowest load that any probe was over at
    reason: str
    probes: int
    spent_s: float
    confirming_s: float  # of it


@dataclass(slots=True)
class LoadSearch:
    """Ask, run, tell, until `ask` is None. Loads are rates per second, or lanes where `whole`."""

    low: float  # not below this
    high: float  # not above this
    start: float | None = None  # None: the geometric mean of low and high, taken as a bracket to bisect
    precision: float = PRECISION  # how near the answer must be, SURE of it
    most_probes: int = MOST_PROBES
    most_s: float = math.inf
    whole: bool = False
    told: list[TrialResult] = field(default_factory=list)
    stopped: str = ""

    @property
    def _sound(self) -> list[TrialResult]:
        return [one for one in self.told if one.outcome != "invalid"]

    def tell(self, told: TrialResult) -> None:
        """An INVALID probe says nothing about the load, and ends the search with what it knows."""
        self.told.append(told)
        if told.outcome == "invalid":
            self.stopped = "invalid"

    def stop(self, reason: str) -> None:
        """From outside: interrupted, out of time."""
        self.stopped = self.stopped or reason

    def ask(self) -> NextTrial | None:
        """The next probe, or None: see `answer`. The same until it is told."""
        if self._reason():
            return None
        bounds = self._bracket()
        if not isinstance(bounds, tuple):
            return self._next(bounds, "bracket")
        belief = self._belief(bounds)
        end = self._at_an_end(belief)
        if end is not None:
            return self._next(end, "bracket")
        if self._precise(belief):
            return self._next(self._confirmable(belief), "confirm")
        return self._next(belief.quantile(0.5), "probe")

    def _at_an_end(self, belief: Belief) -> float | None:
        """The end of a given bracket at which all probes so far point, to be asked itself: what is searched for may lie
        outside."""
        middle = belief.quantile(0.5)
        near = max(self.precision * middle, 1.5 if self.whole else 0.0)
        if self._highest("over") is None and middle + near >= self.high:
            return self.high
        if self._highest("under") is None and middle - near <= self.low:
            return self.low
        return None

    def _next(self, load: float, kind: Kind) -> NextTrial:
        load = min(max(load, self.low), self.high)
        if self.whole:
            load = float(round(load))
            if kind == "probe" and any(one.ask.load == load for one in self._sound):
                load += 1 if self._highest("under") == load else -1
        over = min((one.ask.load for one in self._sound if one.outcome == "over"), default=math.inf)
        # nearer to what is over than the answer's precision, only a run at full length tells
        early = kind != "confirm" and load * (1 + self.precision) <= over
        return NextTrial(number=len(self.told), load=load, kind=kind, early_under=early)

    def _highest(self, outcome: Outcome) -> float | None:
        loads = [one.ask.load for one in self._sound if one.outcome == outcome]
        if not loads:
            return None
        return max(loads) if outcome == "under" else min(loads)

    def _bracket(self) -> tuple[float, float] | float:
        """Bounds for theta, or the load to try while there are none."""
        if self.start is None:
            return self.low, self.high
        held, missed = self._highest("under"), self._highest("over")
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
        noise = [one.noise for one in self._sound if one.noise > 0]
        belief = Belief(*bounds, sigma=SIGMA_OF_NOISE * noise[-1] if noise else 0.01)
        for one in self._sound:
            lapse = LAPSE_EARLY if one.early and one.outcome == "under" else LAPSE
            belief.tell(one.offered, one.outcome == "under", lapse)
        return belief

    def _precise(self, belief: Belief) -> bool:
        found = belief.interval(SURE)
        if self.whole and found.high - found.low < 1.5:
            return True
        return found.half_width <= self.precision * found.value

    def _confirmable(self, belief: Belief) -> float:
        load = max(belief.passing(CONFIRM_AT), belief.quantile((1 - LEVEL) / 2))
        return math.floor(load) if self.whole else load

    @property
    def _confirmed(self) -> float | None:
        return max(
            (one.ask.load for one in self._sound if one.ask.kind == "confirm" and one.outcome == "under"), default=None
        )

    def _reason(self) -> str:
        if self.stopped:
            return self.stopped
        held, missed = self._highest("under"), self._highest("over")
        tries = [one for one in self._sound if one.ask.kind == "confirm"]
        if missed is not None and missed <= self.low and held is None:
            return "none"
        if held is not None and held >= self.high and missed is None:
            return "highest"
        if self._confirmed is not None:
            bounds = self._bracket()
            if isinstance(bounds, tuple) and self._precise(self._belief(bounds)):
                return "found"
        if len(tries) >= CONFIRMATIONS and self._confirmed is None:
            return "unconfirmed"
        if len(self.told) >= self.most_probes:
            return "probes"
        if sum(one.spent_s for one in self.told) >= self.most_s:
            return "time"
        return ""

    @property
    def answer(self) -> SearchAnswer:
        """The best that is known now."""
        held, missed = self._highest("under"), self._highest("over")
        reason = self._reason()
        interval = None
        load = held
        bounds = self._bracket()
        if isinstance(bounds, tuple) and missed is not None and reason != "none":
            interval = self._belief(bounds).interval()
            load = interval.value
        return SearchAnswer(
            load=None if reason == "none" else load,
            interval=interval,
            confirmed=self._confirmed,
            held=held,
            missed=missed,
            reason=reason,
            probes=len(self.told),
            spent_s=sum(one.spent_s for one in self.told),
            confirming_s=sum(one.spent_s for one in self.told if one.ask.kind == "confirm"),
        )


def resume(search: LoadSearch, told: Iterable[TrialResult]) -> LoadSearch:
    """The search as it stood when these had been told."""
    for one in told:
        search.tell(one)
    return search
