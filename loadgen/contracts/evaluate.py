"""The figure of each term of a contract, from the rows of a level's runs, with its interval and its promise.

Pure. What cannot be said raises `Missing` with the reason; whether a promise is kept is judged in `judge.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import pairwise, permutations
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from loadgen import format
from loadgen.contracts import schema
from loadgen.contracts.schema import tag
from loadgen.contracts.steady_samples import (
    QUEUED,
    Missing,
    RecordedRun,
    SteadySample,
    Timed,
    counted,
    figures,
    latencies,
    looks,
    ordered,
    settle,
    size,
    supported,
    tail,
    together,
    unsettled,
    waits,
)
from loadgen.errors import Fault, Faults
from loadgen.metrics import columns as metrics
from loadgen.metrics.columns import OK, Columns, Span
from loadgen.stats import intervals, quantile_interval, steady_state
from loadgen.stats.quantile_interval import Bounds, Series

RATE_BATCHES = intervals.BATCHES  # of all runs together


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredLevel:
    """What came of a level: its runs, or why there are none."""

    runs: tuple[RecordedRun, ...] = ()
    trouble: str = ""


Money = Callable[[RecordedRun, Bounds], tuple[Bounds, str]]
"""A run and the interval of its good requests per second -> cost per thousand of them, and its currency. Raises Fault
or Faults where no price fits."""


class Held(NamedTuple):
    """A figure against its promise: kept by `at_most` or at least `limit`. `caveat`: why the sample bounds it on one
    side only; `of`: which part of the load it is of, where that is not all of it."""

    found: Bounds
    limit: float
    at_most: bool
    unit: str
    sample: int
    caveat: str = ""
    of: str = ""


class Evaluator:
    """What the terms of one level are held against."""

    def __init__(
        self, confidence: float, measured: Mapping[str, MeasuredLevel], found: MeasuredLevel, money: Money | None
    ) -> None:
        self.confidence, self.measured, self.runs, self.money = confidence, measured, found.runs, money
        self._columns = [run.columns() for run in found.runs]

    def held(self, term: Any) -> Held:
        """Raises Missing."""
        if isinstance(term, schema.Itl | schema.InterChunk):
            return self._pooled(term)
        if isinstance(term, schema.Latency):
            found, sample = self._latency(self.runs, self._columns, tag(term), term.quantile)
            return Held(_scaled(found, 1e-6), term.limit_ns / 1e6, True, "ms", sample.total, sample.caveat, sample.of)
        match term:
            case schema.Errors():
                marks = [(columns["status"] != OK)[counted(columns)].astype(np.float64) for columns in self._columns]
                return self._share(marks, term.limit, True)
            case schema.GoodputTerm():
                what = f"a share of {format.percent(term.share)}"
                misses = [_misses(run, columns) for run, columns in self._pairs()]
                sample = settle(self.runs, misses, QUEUED[0], term.share, self.confidence, what)
                held = self._share([1 - missed for missed in sample.values], term.share, False)
                low = 0.0 if sample.caveat else held.found.low
                return held._replace(found=held.found._replace(low=low), caveat=sample.caveat, of=sample.of)
            case schema.DriftTerm():
                return self._drift(term)
            case schema.Sustained():
                first, last = self._ends(term.window_ns)
                of = intervals.ratio(self._of_spans(last, _ok), self._of_spans(first, _ok), level=self.confidence)
                return Held(_scaled(quantile_interval.plain(of), 100), term.share * 100, False, "%", self._answered())
            case schema.BetweenNodes():
                return self._nodes(term)
            case schema.Against():
                return self._against(term)
            case schema.CostTerm():
                return self._cost(term)
        weigh = {"requests": _ok, "good_requests": _good_ends}.get(tag(term)) or _tokens(tag(term) == "tokens_per_gpu")
        found, caveat = self._rate(weigh)
        if isinstance(term, schema.OutputPerGpu | schema.TokensPerGpu):
            found = _scaled(found, 1 / self._gpus())
        return Held(found, term.rate, False, "/s", self._answered(), caveat)

    def _answered(self) -> int:
        return sum(run.summary.requests.ok for run in self.runs)

    def _gpus(self) -> int:
        gpus = self.runs[0].summary.target.gpus
        if not gpus:
            raise Missing("nobody says how many GPUs there are: --gpus")
        return gpus

    def _latency(
        self, runs: Sequence[RecordedRun], columns: Sequence[Columns], metric: str, p: float
    ) -> tuple[Bounds, SteadySample]:
        """A latency at a percentile; without an upper end where the runs cannot show that it is not more."""
        timed = [figures(one, metric) for one in columns]
        supported([values for _, values in timed], p, metric)
        sample = settle(runs, timed, metric, p, self.confidence, f"p{p * 100:g}")
        if sample.caveat:
            found = quantile_interval.quantile(sample.values, p, self.confidence)
            return found._replace(high=max(found.high, sample.bound)), sample
        length_s = sum(float(due[-1] - due[0]) / 1e9 for due, _ in timed if len(due))
        found, caveat = _bounded(sample.values, p, self.confidence, length_s, waits(runs, metric))
        if caveat and math.isfinite(found.high):
            sample = sample._replace(of=", ".join(filter(None, (sample.of, "upper end from the spread of its swings"))))
        return found, sample._replace(caveat=caveat)

    def _quantile(self, values: Series, p: float, what: str, length_s: float, confidence: float) -> tuple[Bounds, str]:
        """The same of a part that was chosen already, and lasted so long; and why it has no upper end."""
        supported(values, p, what)
        queued = waits(self.runs, what)
        if queued and (stays := looks(self.runs)):
            seen = stays[0] * length_s / stays[1]
            if caveat := tail(seen, (seen, length_s), p, confidence, f"p{p * 100:g}"):
                return quantile_interval.quantile(values, p, confidence)._replace(high=math.inf), caveat
        return _bounded(values, p, confidence, length_s, queued)

    def _share(self, marks: Series, limit: float, at_most: bool) -> Held:
        n = size(marks)
        if n == 0:
            raise Missing("no request was counted")
        return Held(_scaled(quantile_interval.share(marks, self.confidence), 100), limit * 100, at_most, "%", n)

    def _pooled(self, term: Any) -> Held:
        for run in self.runs:
            if tag(term) == "itl" and run.summary.itl_ms is None:
                raise Missing(f"there is no ITL: {run.summary.itl_absent}")
            if not run.gaps.count:
                raise Missing("no answer had two events, so there are no gaps")
        each = [run.gaps.quantile(term.quantile) for run in self.runs]
        found = quantile_interval.plain(intervals.replications(each, self.confidence))
        return Held(_scaled(found, 1e-6), term.limit_ns / 1e6, True, "ms", self._answered())

    def _rate(self, weigh: _Weigh) -> tuple[Bounds, str]:
        """Per second, after the start-up; without an upper end, and why, where that was not over."""
        spans = [_steady(run, columns) for run, columns in self._pairs()]
        begun, caveat = [], ""
        for (run, columns), span in zip(self._pairs(), spans, strict=True):
            pieces = _pieces(span, steady_state.BATCHES)
            start = steady_state.rising(np.array([weigh(run, columns, piece) for piece in pieces]))
            if start is None:
                caveat = unsettled(span.duration_s or 0.0)
            begun.append(
                span if not start else metrics.span((pieces[start].start_s or 0) * 1e9, (span.end_s or 0) * 1e9)
            )
        parts = self._of_spans(begun, weigh)
        found = quantile_interval.plain(intervals.batch_means(parts, batches=len(parts), level=self.confidence))
        return (found._replace(high=math.inf) if caveat else found), caveat

    def _pairs(self) -> Iterator[tuple[RecordedRun, Columns]]:
        return zip(self.runs, self._columns, strict=True)

    def _of_spans(self, spans: Sequence[Span], weigh: _Weigh) -> list[float]:
        """A rate in one stretch of each run, by equal parts of the stretches."""
        parts = max(RATE_BATCHES // len(self.runs), 2)
        return [
            weigh(run, columns, piece) / (piece.duration_s or 1)
            for (run, columns), span in zip(self._pairs(), spans, strict=True)
            for piece in _pieces(span, parts)
        ]

    def _ends(self, window_ns: int) -> tuple[list[Span], list[Span]]:
        """First and last window of each run, by due instants."""
        first, last = [], []
        for run, columns in self._pairs():
            steady = _steady(run, columns)
            assert steady.start_s is not None and steady.end_s is not None
            start, end = round(steady.start_s * 1e9), round(steady.end_s * 1e9)
            if end - start < 2 * window_ns * 0.99:
                length, window = format.duration((end - start) / 1e9), format.duration(window_ns / 1e9)
                raise Missing(f"a load of {length} has no two windows of {window}")
            first.append(metrics.span(start, start + window_ns))
            last.append(metrics.span(end - window_ns, end))
        return first, last

    def _drift(self, term: Any) -> Held:
        sides = []
        for spans in self._ends(term.window_ns):
            values = [
                latencies(columns, term.of, metrics.within(columns["due_ns"], span))
                for columns, span in zip(self._columns, spans, strict=True)
            ]
            length_s = len(self.runs) * term.window_ns / 1e9
            found, caveat = self._quantile(values, term.quantile, term.of, length_s, self.confidence)
            sides.append((found, caveat and f"in a window {caveat} in each", size(values)))
        ratio = _over(sides[1][0], sides[0][0], "the first window")
        caveat = sides[0][1] or sides[1][1]
        return Held(_less_one(ratio), term.limit * 100, True, "%", min(size for *_, size in sides), caveat)

    def _nodes(self, term: Any) -> Held:
        count = len(self.runs[0].header.targets)
        if count < 2:
            raise Missing("there was one target: nothing to compare between nodes")
        pairs = count * (count - 1) / 2
        confidence = 1 - (1 - self.confidence) / pairs  # Bonferroni: all pairs hold together
        nodes, sizes, caveats = [], [], []
        length_s = sum(run.summary.window.steady.duration_s or 0.0 for run in self.runs)
        for node in range(count):
            values = [latencies(columns, term.of, columns["target"] == node) for columns in self._columns]
            one, caveat = self._quantile(values, term.quantile, term.of, length_s, confidence)
            nodes.append(one)
            caveats.append(caveat and f"node {node + 1}: {caveat}")
            sizes.append(size(values))
        if failed := [f"node {node + 1}" for node, one in enumerate(nodes) if math.isinf(one.value)]:
            raise Missing(f"too many requests failed at {', '.join(failed)}: no p{term.quantile * 100:g} to compare")
        ratios = [quantile_interval.ratio(a, b) for a, b in permutations(nodes, 2)]
        found = Bounds(*(max(ratio[i] for ratio in ratios) for i in range(3)))
        caveat = next(filter(None, caveats), "")
        return Held(_less_one(found), term.limit * 100, True, "%", min(sizes), caveat)

    def _against(self, term: Any) -> Held:
        other = self.measured.get(term.level, MeasuredLevel())
        if not other.runs or other.trouble:
            raise Missing(f"there is no run of {term.level}: {other.trouble or 'it was not run'}")
        theirs = [run.columns() for run in other.runs]
        over, mine = self._latency(self.runs, self._columns, term.of, term.quantile)
        under, its = self._latency(other.runs, theirs, term.of, term.quantile)
        found = _scaled(_over(over, under, term.level), 100)
        caveat = mine.caveat or (its.caveat and f"{term.level}: {its.caveat}")
        return Held(found, term.limit * 100, True, "%", min(mine.total, its.total), caveat)

    def _cost(self, term: Any) -> Held:
        limit, currency = term.limit
        if self.money is None:
            raise Missing("there are no prices")
        good, caveat = self._rate(_good_ends)
        if caveat:
            raise Missing(caveat)
        if good.value <= 0:
            raise Missing("no request was good: there is no cost per good one")
        try:
            found, kept_in = self.money(self.runs[0], good)
        except Fault as fault:
            raise Missing(f"no cost: {fault.what}") from None
        except Faults as faults:
            raise Missing(f"no cost: {'; '.join(fault.what for fault in faults.faults)}") from None
        if kept_in != currency:
            raise Missing(f"the promise is in {currency}, the prices are in {kept_in}")
        return Held(found, float(Decimal(limit)), True, currency, self._answered())


_Weigh = Callable[[RecordedRun, Columns, Span], float]


def _bounded(values: Series, p: float, confidence: float, length_s: float, queued: bool) -> tuple[Bounds, str]:
    """A quantile, and why the sample alone does not bound it from above. What has no wait in it is bounded all the same
    by how far the batches of the load swing; a wait is nothing or long, and follows no such law."""
    found = quantile_interval.quantile(values, p, confidence)
    caveat = together(values, p, confidence, length_s)
    swings = (
        caveat or quantile_interval.known(values, p, confidence) < quantile_interval.LEAST_WORTH
    )  # its range may hold a failed request
    if swings and not queued and math.isinf(found.high):
        found = found._replace(high=max(found.value, quantile_interval.tolerance(values, p, confidence)))
    return found, caveat


def _over(found: Bounds, under: Bounds, what: str) -> Bounds:
    """`found / under`; infinite where that is a failed request. Raises Missing where `under`, that of `what`, is."""
    if math.isinf(under.value):
        raise Missing(f"so many requests of {what} failed that there is no latency to compare with")
    if math.isinf(found.value):  # quotients of logarithms know no infinite value: the ends, each at its own confidence
        low = max(found.low, 0.0) / under.high if math.isfinite(under.high) else 0.0
        return Bounds(math.inf, low, math.inf)
    return quantile_interval.ratio(found, under)


def _scaled(found: Bounds, by: float) -> Bounds:
    return Bounds(found.value * by, found.low * by, found.high * by)


def _less_one(ratio: Bounds) -> Bounds:
    """A ratio as a change in percent."""
    return Bounds(*((end - 1) * 100 for end in ratio))


def _misses(run: RecordedRun, columns: Columns) -> Timed:
    """1 for each request that does not meet the SLO of the run."""
    return ordered(columns, counted(columns), (~_meets(run, columns)).astype(np.float64))


def _meets(run: RecordedRun, columns: Columns) -> NDArray[np.bool_]:
    if run.header.slo is None or not run.header.slo.terms:
        raise Missing("the run has no SLO: nothing says when a request is good")
    return metrics.meets(columns, run.header.slo)


def _steady(run: RecordedRun, columns: Columns) -> Span:
    steady = run.summary.window.steady
    if steady.duration_s is None:
        raise Missing("fewer than two requests were due: no rate")
    return steady


def _pieces(span: Span, n: int) -> list[Span]:
    assert span.start_s is not None and span.end_s is not None
    edges = np.linspace(span.start_s * 1e9, span.end_s * 1e9, n + 1)
    return [metrics.span(float(a), float(b)) for a, b in pairwise(edges)]


def _ended(columns: Columns, piece: Span) -> NDArray[np.bool_]:
    end = columns["end_ns"]
    return (end >= round((piece.start_s or 0) * 1e9)) & (end < round((piece.end_s or 0) * 1e9)) & columns.where(OK)


def _ok(run: RecordedRun, columns: Columns, piece: Span) -> float:
    return float(_ended(columns, piece).sum())


def _good_ends(run: RecordedRun, columns: Columns, piece: Span) -> float:
    return float((_ended(columns, piece) & _meets(run, columns)).sum())


def _tokens(with_input: bool) -> _Weigh:
    def weigh(run: RecordedRun, columns: Columns, piece: Span) -> float:
        ok = columns.where(OK)
        if bool((columns["output_tokens"][ok] < 0).any()):
            raise Missing("the output tokens of some answers were not counted")
        total = metrics.spread_tokens(columns, piece)
        if with_input:
            counts = columns["input_tokens"]
            if bool((counts[ok] < 0).any()):
                raise Missing("the prompt tokens of some requests were not counted")
            total += float(counts[_ended(columns, piece)].sum())
        return total

    return weigh
