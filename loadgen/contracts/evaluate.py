"""Evaluates each term of a contract: computes its figure and confidence interval from the records of a level's runs.

Pure. A figure that cannot be computed raises `Missing` with the reason. `verdict.py` decides whether a promise is kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise, permutations
from typing import NamedTuple

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from loadgen.contracts import quantile_interval, steady_state
from loadgen.contracts import steady_samples as steady
from loadgen.contracts.quantile_interval import Series
from loadgen.contracts.schema import OF_TASKS, Promise, kind_of
from loadgen.contracts.steady_samples import (
    MARGIN,
    QUEUED,
    Missing,
    RecordedRun,
    Shortage,
    SteadySample,
    Timed,
)
from loadgen.core import format
from loadgen.core.analysis import fairness
from loadgen.core.errors import CombinedError, LoadgenError
from loadgen.core.metrics import outcomes, windows
from loadgen.core.metrics.columns import OK, Columns
from loadgen.core.metrics.summary import Summary
from loadgen.core.metrics.windows import Span
from loadgen.core.slo import not_here
from loadgen.core.stats import intervals
from loadgen.core.stats.intervals import Interval
from loadgen.core.stats.quantiles import QUANTILES, element
from loadgen.figures import pooled_figures

CENTRES = 200  # values that the tenants may have had in common, of which the most even one is taken
RATE_BATCHES = intervals.BATCHES  # for the batch means of a rate, over all runs together


class MeasuredLevel(Struct, frozen=True, kw_only=True):
    """The recorded runs of a level. `trouble` says why a run is missing; "" when none is."""

    runs: tuple[RecordedRun, ...] = ()
    trouble: str = ""


Money = Callable[[RecordedRun, Interval], tuple[Interval, str]]
"""Function of a run and the interval of its good requests per second. Returns the cost per thousand good requests and
its currency. Raises Fault or Faults where no price fits."""


class Held(NamedTuple):
    """The evaluated figure of a term: `found`, with its interval, in the unit of the term's limit.

    `sample` is the number of requests behind the figure. `caveat` says why the sample bounds the figure on one side
    only ("" when it bounds both). `of` names the part of the load that was used ("" for all of it). `length_s` and
    `looks`: how long a load, and how many independent looks at the server, the figure rests on. `enough_s`: the load of
    all runs that leaves no caveat at the next look; 0 where none can be named.
    """

    found: Interval
    sample: int
    caveat: str = ""
    enough_s: float = 0.0
    of: str = ""
    length_s: float = 0.0
    looks: float | None = None


def _withheld_reason(summary: Summary, metric: str, p: float) -> str:
    """Return why a percentile of a metric is withheld; "" if it is not.

    A percentile that a summary does not have is withheld with the next higher one that it has.
    """
    higher = [name for name, share in QUANTILES if share >= p]
    return summary.withheld_reason(metric, higher[0] if higher and p else "mean")


class Evaluator:
    """Evaluates terms on the recorded runs of one level.

    `measured` holds the runs of all levels by name, for terms that compare two levels.
    """

    def __init__(
        self,
        confidence: float,
        measured: Mapping[str, MeasuredLevel],
        level: MeasuredLevel,
        money: Money | None,
        horizon_s: float,
    ) -> None:
        self.confidence, self.measured, self.runs, self.money = (
            confidence,
            measured,
            level.runs,
            money,
        )
        self.horizon_s = horizon_s
        self._columns = [run.columns() for run in level.runs]

    def held(self, term: Promise) -> Held:
        """The figure of a term. Raises Missing where the records cannot give it."""
        runs = self.runs
        if term.class_name:
            runs = tuple(run.only(term.class_name) for run in runs)
        if term.kind in OF_TASKS:
            runs = tuple(run.of_tasks() for run in runs)
        with_windows = tuple(run for run in runs if _has_windows(run, term.window_ns))
        if (
            0 < len(with_windows) < len(runs)
        ):  # the first of a validation that was extended may have been short
            runs = with_windows
        if runs is self.runs:
            return self._figure(term)
        level = MeasuredLevel(runs=runs)
        return Evaluator(self.confidence, self.measured, level, self.money, self.horizon_s)._figure(
            term
        )

    def _figure(self, term: Promise) -> Held:
        self._refuse_withheld(term)
        evaluated = FIGURES.get(term.kind, Evaluator.own_latency)(self, term)
        evaluated = evaluated._replace(found=evaluated.found.each(kind_of(term.kind).limit.in_unit))
        if evaluated.length_s:
            return evaluated
        timed = [steady.figures(columns, "e2e") for columns in self._columns]
        length_s = steady.load_length_s([due for due, _ in timed])
        return evaluated._replace(
            length_s=length_s, looks=steady.independent_looks(self.runs, timed)
        )

    def own_latency(self, term: Promise) -> Held:
        metric = OF_TASKS.get(term.kind, term.kind)
        bounds, sample = self._latency(
            self.runs, self._columns, metric, term.quantile, term.limit, term.kind
        )
        return _of_sample(bounds, sample.total, sample)

    def errors(self, term: Promise) -> Held:
        return self._share(
            [
                (columns["status"] != OK)[steady.counted(columns)].astype(float)
                for columns in self._columns
            ]
        )

    def goodput(self, term: Promise) -> Held:
        misses = [_slo_misses(run, columns) for run, columns in self._runs_and_columns()]
        what = f"a share of {format.percent(term.limit)}"
        sample = steady.settle(
            self.runs, misses, QUEUED[0], term.limit, self.confidence, what, self.horizon_s
        )
        kept = self._share([1 - missed for missed in sample.values])
        found = replace(kept.found, low=0.0) if sample.short else kept.found
        return _of_sample(found, kept.sample, sample)

    def recovery(self, term: Promise) -> Held:
        """The longest way back of all events, to the spacing of the groups of requests that it is seen by."""
        events = [each for run in self.runs for each in run.summary.recovery]
        told = [each for each in events if not each.why]
        if len(told) < len(events):
            raise Missing(next(each.why for each in events if each.why))
        if not told:
            raise Missing(
                "there was no spike, no loss and no scale-up, or no SLO of the whole load"
            )
        ends = [
            (math.inf, each.seen_s, math.inf)
            if each.back_s is None
            else (each.back_s, max(each.back_s - each.spacing_s, 0.0), each.back_s + each.spacing_s)
            if each.back_s
            else (0.0, 0.0, 0.0)
            for each in told
        ]
        seen = [format.duration(each.seen_s) for each in told if each.back_s is None]
        caveat = (
            f"what is seen after it ends after {seen[0]}: a longer load behind it shows more"
            if seen
            else ""
        )
        return Held(
            Interval(*(max(values) * 1e9 for values in zip(*ends, strict=True))), len(told), caveat
        )

    def fairness(self, term: Promise) -> Held:
        """Jain's index of the tenants' shares of good requests, each of which may be anywhere in its own interval.

        That all are at their ends at once is rarer than that one is, so the interval is at least as sure as theirs.
        """
        plans = self.runs[0].header.classes
        tenants = fairness.tenants_of({plan.name: plan.tenant for plan in plans})
        if not tenants:
            raise Missing("all requests are of one tenant")
        of_classes = {
            plan.name: self.held(term._replace(kind="goodput", class_name=plan.name))
            for plan in plans
        }
        shares = [_together([of_classes[name] for name in names]) for names in tenants.values()]
        index = jain_bounds(shares)
        if index is None:
            raise Missing("no request of any tenant was good")
        caveats = {held.caveat: None for held in of_classes.values() if held.caveat}
        enough_s = max(held.enough_s for held in of_classes.values())
        return Held(
            index, sum(held.sample for held in of_classes.values()), "; ".join(caveats), enough_s
        )

    def sustained(self, term: Promise) -> Held:
        first, last = self._first_and_last_windows(term.window_ns)
        rates = self._batch_rates(last, _ok_in_span), self._batch_rates(first, _ok_in_span)
        ratio = intervals.ratio(*rates, level=self.confidence)
        of_runs = [np.array(each).reshape(len(self.runs), -1).mean(axis=1) for each in rates]
        return Held(self._differing_runs(ratio, *of_runs), self._ok_requests())

    def steady_rate(self, term: Promise) -> Held:
        per_gpu = "gpus" in kind_of(term.kind).needs
        bounds, caveat = self._rate(_COUNTED[OF_TASKS.get(term.kind, term.kind)])
        return Held(
            bounds.each((1 / self._gpus()).__mul__) if per_gpu else bounds,
            self._ok_requests(),
            caveat,
        )

    def _refuse_withheld(self, term: Promise) -> None:
        """Raise Missing where the term rests on figures that a run withholds."""
        other = self.measured.get(term.level, MeasuredLevel())
        for run in (*self.runs, *other.runs):
            summary = run.summary
            terms = () if run.header.slo is None else run.header.slo.terms
            of_slo = [one.metric for one in terms if one.metric not in pooled_figures()]
            needs_slo = not {"slo", "task_slo"}.isdisjoint(kind_of(term.kind).needs)
            of_term = term.of or OF_TASKS.get(term.kind, term.kind)
            if needs_slo and run.header.slo and (lacking := not_here([run.header.slo])):
                raise Missing("; ".join(lacking.values()))
            for name in of_slo if needs_slo else [_REST_ON.get(of_term, of_term)]:
                if reason := _withheld_reason(summary, name, term.quantile):
                    raise Missing(f"withheld in {run.folder}: {reason}")

    def _ok_requests(self) -> int:
        return sum(run.summary.requests.ok for run in self.runs)

    def _gpus(self) -> int:
        gpus = self.runs[0].summary.target.gpus
        if not gpus:
            raise Missing("nobody says how many GPUs there are: --gpus")
        return gpus

    def _latency(
        self,
        runs: Sequence[RecordedRun],
        columns: Sequence[Columns],
        metric: str,
        p: float,
        limit_ns: int | None = None,
        name: str = "",
    ) -> tuple[Interval, SteadySample]:
        """A latency percentile in ns, and the sample behind it. `name`: of the latency, for readers; "": its metric.

        The upper end is infinite, or at least the sample's `bound`, where the runs cannot bound the latency from above.
        """
        samples = [
            steady.figures(run_columns, metric, limit_ns=limit_ns) for run_columns in columns
        ]
        name = name or metric
        length_s = steady.load_length_s([due for due, _ in samples])
        steady.supported([values for _, values in samples], p, name, length_s)
        sample = steady.settle(
            runs, samples, metric, p, self.confidence, f"{name} p{p * 100:g}", self.horizon_s
        )
        bounds, of_cluster = _bounded(
            sample.values, p, self.confidence, length_s, steady.waits(runs, metric)
        )
        enough_s = max(sample.short.enough_s, of_cluster.enough_s)
        if sample.short:
            sample = sample._replace(short=Shortage(sample.short.words, enough_s))
            bounds = self._between_runs(
                quantile_interval.quantile(sample.values, p, self.confidence), sample.values, p
            )
            return replace(bounds, high=max(bounds.high, sample.bound)), sample
        if of_cluster and math.isfinite(bounds.high):
            sample = sample._replace(
                of=", ".join(
                    filter(None, (sample.of, "upper end from how much it varied over the load"))
                )
            )
        return self._between_runs(bounds, sample.values, p), sample._replace(
            short=Shortage(of_cluster.words, enough_s)
        )

    def _between_runs(self, bounds: Interval, values: Series, p: float) -> Interval:
        """The interval of a percentile, at least as wide as the percentiles of the single runs differ."""
        return intervals.widened(bounds, _of_runs(values, p), log=True)

    def _differing_runs(
        self, ratio: Interval, above: Sequence[float], below: Sequence[float]
    ) -> Interval:
        """The interval of `above / below`, at least as wide as that ratio differs between the single runs."""
        if len(above) != len(below) or not all(below):
            return ratio
        per_run = [a / b for a, b in zip(above, below, strict=True)]
        return intervals.widened(ratio, per_run, log=True)

    def _quantile(
        self, values: Series, p: float, what: str, length_s: float, confidence: float
    ) -> tuple[Interval, Shortage]:
        """A percentile of values that were already selected from `length_s` of load; and why it has no upper end."""
        steady.supported(values, p, what, length_s)
        queued = steady.waits(self.runs, what)
        if queued and (stays := steady.looks(self.runs)):
            looks_in_part = stays[0] * length_s / stays[1]
            if short := steady.tail(
                looks_in_part, (looks_in_part, length_s), p, confidence, f"p{p * 100:g}"
            ):
                return replace(
                    quantile_interval.quantile(values, p, confidence), high=math.inf
                ), short
        return _bounded(values, p, confidence, length_s, queued)

    def _share(self, marks: Series) -> Held:
        n = steady.size(marks)
        if n == 0:
            raise Missing("no request was counted")
        per_run = [float(run.mean()) for run in marks if len(run)]
        found = intervals.widened(quantile_interval.share(marks, self.confidence), per_run)
        return Held(replace(found, low=max(found.low, 0.0), high=min(found.high, 1.0)), n)

    def pooled_gaps(self, term: Promise) -> Held:
        for run in self.runs:
            if term.kind == "itl" and run.summary.itl_ms is None:
                raise Missing(f"there is no ITL: {run.summary.itl_absent}")
            if not run.gaps.count:
                raise Missing("no answer had two events, so there are no gaps")
        p = term.quantile
        per_run = [run.gaps.quantile(p) for run in self.runs]
        bounds = intervals.replications(per_run, self.confidence)
        length_s = steady.load_length_s(
            [steady.figures(columns, "e2e")[0] for columns in self._columns]
        )
        short = steady.too_short(
            length_s, self.confidence, self.horizon_s, f"{term.kind} p{p * 100:g}"
        )
        bounds = replace(bounds, high=math.inf) if short else bounds
        return Held(bounds, self._ok_requests(), short.sentence(), _known(short))

    def _rate(self, count_in_span: _CountInSpan) -> tuple[Interval, str]:
        """The rate per second after the start-up. Where the start-up did not end: no upper end, and the caveat.

        There is no upper end either if not one request ended in the steady-state window, because
        the end of the load cut them off.
        """
        spans = [_steady_span(run, columns) for run, columns in self._runs_and_columns()]
        settled_spans, caveat = [], ""
        for (run, columns), span in zip(self._runs_and_columns(), spans, strict=True):
            pieces = _pieces(span, steady_state.BATCHES)
            first_settled = steady_state.rising(
                np.array([count_in_span(run, columns, piece) for piece in pieces])
            )
            if first_settled is None:
                caveat = steady.unsettled(span.duration_s or 0.0).sentence()
            settled_spans.append(
                span
                if not first_settled
                else windows.span(
                    (pieces[first_settled].start_s or 0) * 1e9, (span.end_s or 0) * 1e9
                )
            )
        caveat = _nothing_ended(self._columns, spans) or caveat
        batch_rates = self._batch_rates(settled_spans, count_in_span)
        within = intervals.batch_means(batch_rates, batches=len(batch_rates), level=self.confidence)
        per_run = [
            float(np.mean(run_rates)) for run_rates in np.split(np.array(batch_rates), len(spans))
        ]
        bounds = intervals.widened(within, per_run)
        return (replace(bounds, high=math.inf) if caveat else bounds), caveat

    def _runs_and_columns(self) -> Iterator[tuple[RecordedRun, Columns]]:
        return zip(self.runs, self._columns, strict=True)

    def _batch_rates(self, spans: Sequence[Span], count_in_span: _CountInSpan) -> list[float]:
        """Rates per second in equal parts of one span of each run."""
        parts = max(RATE_BATCHES // len(self.runs), 2)
        return [
            count_in_span(run, columns, piece) / (piece.duration_s or 1)
            for (run, columns), span in zip(self._runs_and_columns(), spans, strict=True)
            for piece in _pieces(span, parts)
        ]

    def _first_and_last_windows(self, window_ns: int) -> tuple[list[Span], list[Span]]:
        """The first and the last window of each run, by due instants. Raises Missing for a load of less than two."""
        first, last = [], []
        for run, columns in self._runs_and_columns():
            span = _steady_span(run, columns)
            assert span.start_s is not None and span.end_s is not None
            start, end = round(span.start_s * 1e9), round(span.end_s * 1e9)
            if not _has_windows(run, window_ns):
                length, window = (
                    format.duration((end - start) / 1e9),
                    format.duration(window_ns / 1e9),
                )
                missing_s = MARGIN * 2 * window_ns / 1e9 * len(self.runs)  # in runs of their own
                raise Missing(f"a load of {length} has no two windows of {window}", missing_s)
            first.append(windows.span(start, start + window_ns))
            last.append(windows.span(end - window_ns, end))
        return first, last

    def drift(self, term: Promise) -> Held:
        halves, of_runs = [], []
        for spans in self._first_and_last_windows(term.window_ns):
            values = [
                steady.latencies(columns, term.of, windows.within(columns["due_ns"], span))
                for columns, span in zip(self._columns, spans, strict=True)
            ]
            length_s = len(self.runs) * term.window_ns / 1e9
            bounds, short = self._quantile(
                values, term.quantile, term.of, length_s, self.confidence
            )
            halves.append(
                (
                    bounds,
                    f"in a window {short.sentence()} in each" if short else "",
                    steady.size(values),
                )
            )
            of_runs.append(_of_runs(values, term.quantile))
        ratio = self._differing_runs(
            _ratio(halves[1][0], halves[0][0], "the first window"), of_runs[1], of_runs[0]
        )
        caveat = halves[0][1] or halves[1][1]
        return Held(ratio.each(_change), min(size for *_, size in halves), caveat)

    def between_nodes(self, term: Promise) -> Held:
        count = len(self.runs[0].header.targets)
        if count < 2:
            raise Missing("there was one target: nothing to compare between nodes")
        pairs = count * (count - 1) / 2
        confidence = (
            1 - (1 - self.confidence) / pairs
        )  # Bonferroni: all pairs together keep the confidence
        nodes, of_runs, sizes, short = [], [], [], []
        length_s = sum(run.summary.window.steady.duration_s or 0.0 for run in self.runs)
        for node in range(count):
            values = [
                steady.latencies(columns, term.of, columns["target"] == node)
                for columns in self._columns
            ]
            bounds, of_node = self._quantile(values, term.quantile, term.of, length_s, confidence)
            nodes.append(bounds)
            of_runs.append(_of_runs(values, term.quantile))
            short.append(
                of_node._replace(words=of_node.words and f"node {node + 1}: {of_node.words}")
            )
            sizes.append(steady.size(values))
        if failed := [
            f"node {node + 1}" for node, bounds in enumerate(nodes) if math.isinf(bounds.value)
        ]:
            raise Missing(
                f"too many requests failed at {', '.join(failed)}: no {term.at} to compare"
            )
        ratios = [
            self._differing_runs(intervals.quotient(nodes[a], nodes[b]), of_runs[a], of_runs[b])
            for a, b in permutations(range(count), 2)
        ]
        value, low, high = map(max, zip(*ratios, strict=True))
        largest_ratio = Interval(value, low, high, self.confidence)
        worst = steady.all_of(short)
        return Held(largest_ratio.each(_change), min(sizes), worst.sentence(), _known(worst))

    def against(self, term: Promise) -> Held:
        other = self.measured.get(term.level, MeasuredLevel())
        if not other.runs or other.trouble:
            raise Missing(f"there is no run of {term.level}: {other.trouble or 'it was not run'}")
        of_others = [
            run.only(term.class_name) if _has_class(run, term) else run for run in other.runs
        ]
        other_columns = [run.columns() for run in of_others]
        p = term.quantile
        own_latency, own_sample = self._latency(self.runs, self._columns, term.of, p)
        other_latency, other_sample = self._latency(of_others, other_columns, term.of, p)
        of_other = other_sample.short
        of_other = of_other._replace(words=of_other.words and f"{term.level}: {of_other.words}")
        short = steady.all_of([own_sample.short, of_other])
        bounds = _ratio(own_latency, other_latency, term.level)
        return Held(
            bounds, min(own_sample.total, other_sample.total), short.sentence(), _known(short)
        )

    def energy(self, term: Promise) -> Held:
        """Watts by their reading error over a rate by its interval, as wide as the single runs differ."""
        field, counted = _ENERGY_OF[term.of]
        used = [run.summary.energy for run in self.runs]
        each = [None if one is None else getattr(one, field) for one in used]
        for one, value in zip(used, each, strict=True):
            if one is None or value is None:
                raise Missing(
                    one.why
                    if one is not None and one.why
                    else "nothing says what the accelerators used"
                )
        rate, caveat = self._rate(_COUNTED[counted])
        watts = [one.watts or 0.0 for one in used if one is not None]
        error = max(
            (one.error_j or 0.0) / one.joules for one in used if one is not None and one.joules
        )
        mean = math.fsum(watts) / len(watts)
        drawn = Interval(mean, mean * max(1 - error, 0.0), mean * (1 + error), self.confidence)
        bounds = replace(
            intervals.quotient(drawn, rate), value=math.fsum(filter(None, each)) / len(each)
        )
        found = intervals.widened(bounds, [value for value in each if value is not None])
        return Held(found, self._ok_requests(), caveat)

    def cost(self, term: Promise) -> Held:
        if self.money is None:
            raise Missing("there are no prices")
        good_rate, caveat = self._rate(_good_in_span)
        if caveat:
            raise Missing(caveat)
        if good_rate.value <= 0:
            noun = "task" if term.kind in OF_TASKS else "request"
            raise Missing(f"no {noun} was good: there is no cost per good one")
        try:
            bounds, price_currency = self.money(self.runs[0], good_rate)
        except LoadgenError as fault:
            raise Missing(f"no cost: {fault.what}") from None
        except CombinedError as faults:
            raise Missing(f"no cost: {'; '.join(fault.what for fault in faults.faults)}") from None
        if price_currency != term.currency:
            raise Missing(f"the promise is in {term.currency}, the prices are in {price_currency}")
        return Held(bounds, self._ok_requests())


_CountInSpan = Callable[[RecordedRun, Columns, Span], float]


def _together(held: Sequence[Held]) -> Interval:
    """The share of several classes together."""
    requests = sum(one.sample for one in held)
    weighted = [[end * one.sample for end in one.found] for one in held]
    value, low, high = (math.fsum(ends) / requests for ends in zip(*weighted, strict=True))
    return Interval(value, low, high)


def _has_class(run: RecordedRun, term: Promise) -> bool:
    """Whether a run of another level has the class of a term; one that has none is of that class as a whole."""
    return bool(term.class_name) and any(
        plan.name == term.class_name for plan in run.header.classes
    )


def _of_sample(found: Interval, requests: int, sample: SteadySample) -> Held:
    short = sample.short
    return Held(
        found, requests, short.sentence(), _known(short), sample.of, sample.length_s, sample.looks
    )


def _known(short: Shortage) -> float:
    """The load that will do; 0 where it is not known."""
    return short.enough_s if math.isfinite(short.enough_s) else 0.0


def _bounded(
    values: Series, p: float, confidence: float, length_s: float, queued: bool
) -> tuple[Interval, Shortage]:
    """A quantile with its interval, and why the sample alone does not bound it from above, if it does not.

    A figure without queueing time still gets an upper end, from the spread of the batches of the load. Queueing time
    gets none: it is either near zero or long, so the spread of batches says nothing about it.
    """
    bounds = quantile_interval.quantile(values, p, confidence)
    short = steady.together(values, p, confidence, length_s)
    from_spread = (
        short or quantile_interval.known(values, p, confidence) < quantile_interval.LEAST_WORTH
    )  # its range may hold a failed request
    if from_spread and not queued and math.isinf(bounds.high):
        bounds = replace(
            bounds, high=max(bounds.value, quantile_interval.tolerance(values, p, confidence))
        )
    return replace(bounds, high=max(bounds.high, quantile_interval.other_state(values, p))), short


def _ratio(numerator: Interval, denominator: Interval, what: str) -> Interval:
    """`numerator / denominator`. Infinite where the numerator is a failed request (infinite).

    Raises Missing where the denominator, named `what` in the message, is a failed request.
    """
    if math.isinf(denominator.value):
        raise Missing(f"so many requests of {what} failed that there is no latency to compare with")
    if math.isinf(
        numerator.value
    ):  # the log-scale interval needs finite values: divide the ends, each at its own confidence
        low = max(numerator.low, 0.0) / denominator.high if math.isfinite(denominator.high) else 0.0
        return Interval(math.inf, low, math.inf, numerator.level)
    return intervals.quotient(numerator, denominator)


def _of_runs(values: Series, p: float) -> list[float]:
    """The percentile of each run that has values."""
    return [element(run, p) for run in values if len(run)]


def _change(ratio: float) -> float:
    """A ratio as a relative change: 1.2 becomes 0.2."""
    return ratio - 1


def _nothing_ended(columns: Sequence[Columns], spans: Sequence[Span]) -> str:
    """Why a load was too short for a rate: answers that take longer than the load lasts. "" when it was not.

    A server of which no request is ok has a rate, and it is 0.
    """
    for run_columns, span in zip(columns, spans, strict=True):
        ok = run_columns.where(OK)
        if not ok.any():
            continue
        stay_s = float((run_columns["end_ns"] - run_columns["due_ns"])[ok].mean()) / 1e9
        length_s = span.duration_s or 0.0
        if length_s < 2 * stay_s:
            return (
                f"a load of {format.duration(length_s)} is too short for a rate: an answer takes "
                f"{format.duration(stay_s)} on average, so most ended after the load did; a load of "
                f"{format.duration(10 * stay_s)} or more"
            )
    return ""


def _slo_misses(run: RecordedRun, columns: Columns) -> Timed:
    """1.0 for each request that misses the run's SLO and 0.0 for each that meets it, in order of due instants."""
    return steady.ordered(
        columns,
        steady.counted(columns, run.header.slo),
        (~_meets_slo(run, columns)).astype(np.float64),
    )


def _meets_slo(run: RecordedRun, columns: Columns) -> NDArray[np.bool_]:
    if run.header.slo is None or not run.header.slo.terms:
        raise Missing("the run has no SLO: nothing says when a request is good")
    return outcomes.meets(columns, run.header.slo)


def _steady_span(run: RecordedRun, columns: Columns) -> Span:
    span = run.summary.window.steady
    if span.duration_s is None:
        due = columns["due_ns"][columns.attempted]
        if len(np.unique(due)) < 2:
            raise Missing("all requests were due at one instant, so there is no rate")
        raise Missing(
            f"no rate: as long as the {len(due):,} measured requests were due, warm-up was in flight, or lanes were "
            "beginning or ending; give the level a longer load"
        )
    return span


def _has_windows(run: RecordedRun, window_ns: int) -> bool:
    """Whether a run has two windows of this length."""
    return (run.summary.window.steady.duration_s or 0.0) * 1e9 >= 2 * window_ns * 0.99


def _pieces(span: Span, n: int) -> list[Span]:
    assert span.start_s is not None and span.end_s is not None
    edges = np.linspace(span.start_s * 1e9, span.end_s * 1e9, n + 1)
    return [windows.span(float(a), float(b)) for a, b in pairwise(edges)]


def _ended_in_span(columns: Columns, piece: Span) -> NDArray[np.bool_]:
    end = columns["end_ns"]
    return (
        (end >= round((piece.start_s or 0) * 1e9))
        & (end < round((piece.end_s or 0) * 1e9))
        & columns.where(OK)
    )


def _ok_in_span(run: RecordedRun, columns: Columns, piece: Span) -> float:
    return float(_ended_in_span(columns, piece).sum())


def _good_in_span(run: RecordedRun, columns: Columns, piece: Span) -> float:
    return float((_ended_in_span(columns, piece) & _meets_slo(run, columns)).sum())


def _tokens_counter(with_input: bool) -> _CountInSpan:
    def tokens_in_span(run: RecordedRun, columns: Columns, piece: Span) -> float:
        ok = columns.where(OK)
        if bool((columns["output_tokens"][ok] < 0).any()):
            raise Missing("the output tokens of some answers were not counted")
        total = windows.spread_tokens(columns, piece)
        if with_input:
            counts = columns["input_tokens"]
            if bool((counts[ok] < 0).any()):
                raise Missing("the prompt tokens of some requests were not counted")
            total += float(counts[_ended_in_span(columns, piece)].sum())
        return total

    return tokens_in_span


_COUNTED: dict[str, _CountInSpan] = {
    "requests": _ok_in_span,
    "good_requests": _good_in_span,
    "output_per_gpu": _tokens_counter(with_input=False),
    "tokens_per_gpu": _tokens_counter(with_input=True),
}
_ENERGY_OF = {
    "token": ("joules_per_output_token", "output_per_gpu"),
    "request": ("joules_per_request", "requests"),
}
"""What an energy is for -> its field of the summary, and what is counted per second of it."""

_REST_ON = dict.fromkeys(("output_per_gpu", "tokens_per_gpu", "token"), "tokens")
"""What a term is of -> the family of figures that it rests on, where the names differ: see `Summary.unsound`."""

FIGURES: dict[str, Callable[[Evaluator, Promise], Held]] = {
    **dict.fromkeys(pooled_figures(), Evaluator.pooled_gaps),
    **dict.fromkeys(_COUNTED, Evaluator.steady_rate),
    "errors": Evaluator.errors,
    "goodput": Evaluator.goodput,
    "cost": Evaluator.cost,
    **dict.fromkeys(("task_time", "task_wait", "task_longest_wait"), Evaluator.own_latency),
    **dict.fromkeys(("tasks", "good_tasks"), Evaluator.steady_rate),
    "task_goodput": Evaluator.goodput,
    "task_cost": Evaluator.cost,
    "energy": Evaluator.energy,
    "drift": Evaluator.drift,
    "sustained": Evaluator.sustained,
    "between_nodes": Evaluator.between_nodes,
    "against": Evaluator.against,
    "slowdown": Evaluator.against,
    "fairness": Evaluator.fairness,
    "recovery": Evaluator.recovery,
}
"""Keyword -> how its figure is computed; of a figure of requests, ours or not, by `own_latency`."""


def jain_bounds(shares: Sequence[Interval]) -> Interval | None:
    """Jain's index of shares, and its ends where each share may be anywhere in its own interval; None: all are 0.

    The index grows with a value below a centre and falls with one above it. So the most even values are those nearest
    to one centre, and the most uneven ones the low ends of the smaller shares with the high ends of the larger ones.
    """
    value = fairness.jain([share.value for share in shares])
    if value is None:
        return None
    ordered = sorted(shares, key=lambda share: share.low + share.high)
    corners = [
        [*(share.low for share in ordered[:i]), *(share.high for share in ordered[i:])]
        for i in range(len(shares) + 1)
    ]
    least, most = min(share.low for share in shares), max(share.high for share in shares)
    centres = [least + (most - least) * i / CENTRES for i in range(CENTRES + 1)]
    evened = [[min(max(centre, share.low), share.high) for share in shares] for centre in centres]
    found = [
        value,
        *(index for values in (*corners, *evened) if (index := fairness.jain(values)) is not None),
    ]
    return Interval(value, min(found), max(found))
