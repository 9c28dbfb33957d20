"""Computes confidence intervals of the metrics of one run from blocks of its time.

Pure. Requests of a run are correlated, because they share a queue and a batch. So the standard
error of a metric is that of blocks of time, never that of single requests. The formulas are in
`core.stats.intervals`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct

from loadgen.core.metrics import outcomes
from loadgen.core.metrics.columns import OK, UNDEFINED, Columns, as_selection
from loadgen.core.metrics.windows import Span, span
from loadgen.core.slo import Slo
from loadgen.core.stats import intervals, students_t
from loadgen.core.stats.intervals import LEVEL, Interval
from loadgen.core.stats.quantiles import QUANTILES, SUPPORT, Distribution, quantile_index
from loadgen.figures import METRICS

if TYPE_CHECKING:
    from numpy.typing import NDArray

BLOCKS = (20, 10)
"""Numbers of blocks of a run.

More blocks miss long disturbances, and fewer estimate the variance badly, so both are tried and
the wider interval is used.
"""

LEAST_SAMPLES = 4 * max(BLOCKS)
"""Values that are needed for blocks."""

PIECES = 20
"""Pieces of the steady-state window, for the error of a rate."""

MOST_SAMPLES = 100_000
"""Values that an interval is computed from. Of more values, every second, third and so on is used.
"""

METHOD = "blocks of time"


class ScaledEstimate(Struct, frozen=True):
    """An estimate with its standard error, on the scale on which it is compared.

    Latencies and rates are compared as logarithms, and fractions as they are.

    Attributes:
        value: The estimate.
        error: Its standard error.
        freedom: The degrees of freedom of the standard error.
    """

    value: float
    error: float
    freedom: float

    def interval(self, to_metric: Callable[[float], float]) -> Interval:
        """Return the confidence interval. `to_metric` converts from this scale to the metric."""
        half_width = students_t.t_quantile(0.5 + LEVEL / 2, self.freedom) * self.error
        return Interval(
            to_metric(self.value),
            to_metric(self.value - half_width),
            to_metric(self.value + half_width),
            LEVEL,
            round(self.freedom) + 1,
            METHOD,
        )


def in_order(
    columns: Columns, values: NDArray[Any], is_selected: NDArray[np.bool_]
) -> NDArray[Any]:
    """Return the selected values, ordered by scheduled time."""
    indexes = as_selection(is_selected)
    order = np.argsort(columns["due_ns"][indexes], kind="stable")
    ordered: NDArray[Any] = values[indexes][order]
    return ordered


def rank_error(
    values: NDArray[np.float64], ordered: NDArray[np.float64], p: float, blocks: int
) -> float:
    """Return the standard error of the logarithm of a percentile.

    The fraction of values above the percentile is computed block by block, and its error is
    converted to values by the ordered sample.

    Args:
        values: The values, in order of time.
        ordered: The same values, sorted.
        p: The percentile, from 0 to 1.
        blocks: The number of blocks.
    """
    count = len(values)
    is_above = (values > ordered[quantile_index(count, p)]).astype(np.float64)
    share_error = intervals.batch_means(is_above, batches=blocks).standard_error
    low = ordered[quantile_index(count, max(p - share_error, 0.0))]
    high = ordered[quantile_index(count, min(p + share_error, 1.0))]
    return float(math.log(high) - math.log(low)) / 2


def blocks_beyond(values: NDArray[np.float64], ordered: NDArray[np.float64], p: float) -> int:
    """Return in how many of the smaller blocks a value lies above a percentile.

    Args:
        values: The values, in order of time.
        ordered: The same values, sorted.
        p: The percentile, from 0 to 1.
    """
    blocks = max(BLOCKS)
    size = len(values) // blocks
    is_above = values > ordered[quantile_index(len(values), p)]
    in_blocks = is_above[len(values) - blocks * size :].reshape(blocks, size)
    return int(in_blocks.any(axis=1).sum())


def estimate_mean(values: NDArray[np.float64]) -> ScaledEstimate | None:
    """Return the mean with the widest error by BLOCKS, or None if the error is unbounded."""
    estimates = [intervals.batch_means(values, batches=blocks) for blocks in BLOCKS]
    widest = max(estimates, key=lambda interval: interval.half_width)
    if not math.isfinite(widest.half_width):
        return None
    return ScaledEstimate(float(values.mean()), widest.standard_error, widest.count - 1)


def marks(
    columns: Columns, is_good: NDArray[np.bool_], slo: Slo | None = None
) -> NDArray[np.float64]:
    """Return 1 for each good request and 0 for each other one, ordered by scheduled time.

    Requests that the SLO does not count are left out.
    """
    return in_order(columns, is_good, outcomes.is_counted(columns, slo)).astype(np.float64)


def estimate_share(
    marks_of_runs: Sequence[NDArray[np.float64]], value: float
) -> ScaledEstimate | None:
    """Return a fraction with its error by blocks, or None if there are too few values.

    The error is at least that of independent requests with two more of either kind, because a run
    without a failure does not show that there are none.

    Args:
        marks_of_runs: The marks of each run, as `marks` returns them.
        value: The fraction in the summary.
    """
    all_marks = np.concatenate(marks_of_runs)
    if len(all_marks) < LEAST_SAMPLES:
        return None
    least_error = least_share_error(float(all_marks.sum()), len(all_marks))
    mean = estimate_mean(all_marks)
    if mean is None:
        return ScaledEstimate(value, least_error, BLOCKS[1] - 1)
    return ScaledEstimate(value, max(least_error, mean.error), mean.freedom)


def least_share_error(marked: float, count: int) -> float:
    """Return the standard error of a fraction, with two more independent requests of each."""
    share = (marked + 2) / (count + 4)
    return math.sqrt(share * (1 - share) / (count + 4))


def estimate_rate(rates_of_pieces: Sequence[float], value: float) -> ScaledEstimate | None:
    """Return a rate with the error that follows from the rates in pieces of time.

    Returns None if nothing arrived.
    """
    mean = estimate_mean(np.array(rates_of_pieces))
    if mean is None or mean.value <= 0:
        return None
    return ScaledEstimate(math.log(value), mean.error / mean.value, mean.freedom)


def pieces_of(steady: Span) -> list[Span]:
    """Return the steady-state window in PIECES pieces, or an empty list if there is none."""
    if steady.start_s is None or steady.end_s is None:
        return []
    edges_ns = np.linspace(steady.start_s * 1e9, steady.end_s * 1e9, PIECES + 1)
    return [span(float(start_ns), float(end_ns)) for start_ns, end_ns in pairwise(edges_ns)]


def metric_intervals(
    parts: Sequence[Columns],
    summary: Any,
    slo: Slo | None,
    tokens_in: Callable[[Span], float | None],
) -> dict[str, Interval]:
    """Return the intervals of the metrics of a run, by the paths of the metrics.

    Returns an empty dictionary if a block would be shorter than ten median response times, or would
    have fewer than four requests.

    Args:
        parts: The records of the run, by worker.
        summary: The summary of the run.
        slo: The SLO, or None.
        tokens_in: Returns the output tokens that arrived within a span, or None if not known.
    """
    response_ms = summary.e2e_ms.p50
    steady_ms = (summary.window.steady.duration_s or 0.0) * 1e3
    if response_ms is None or steady_ms < min(BLOCKS) * response_ms:
        return {}
    if summary.requests.ok < LEAST_SAMPLES:
        return {}
    metrics = {
        **dict(_percentile_intervals(parts, summary)),
        "tokens.steady_output_per_s": _rate_interval(summary, tokens_in),
        "goodput.share": _goodput_interval(parts, summary, slo),
    }
    return {path: interval for path, interval in metrics.items() if interval is not None}


def _percentile_intervals(
    parts: Sequence[Columns], summary: Any
) -> Iterator[tuple[str, Interval | None]]:
    """Yield the path of each percentile in the summary with its interval, if it has one."""
    orders = [np.argsort(part["due_ns"], kind="stable") for part in parts]
    percentiles = dict(QUANTILES)
    for row in METRICS.available():
        distribution: Distribution | None
        if row.block:
            distribution = summary.figures.get(row.field)
        else:
            distribution = getattr(summary, row.field)
        if distribution is None or not row.values:
            continue
        known = {name: getattr(distribution, name) or 0.0 for name in row.compared}
        known = {name: value for name, value in known.items() if value > 0}
        if not known:
            continue
        values = np.maximum(_thinned_values(parts, orders, row.name).astype(np.float64), 1.0)
        ordered = np.sort(values)
        for name, value in known.items():
            interval = None
            if len(values) >= max(LEAST_SAMPLES, SUPPORT[name]):
                p = percentiles[name]
                error = max(rank_error(values, ordered, p, blocks) for blocks in BLOCKS)
                freedom = max(min(BLOCKS[1], blocks_beyond(values, ordered, p)) - 1.0, 1.0)
                estimate = ScaledEstimate(math.log(value), error, freedom)
                interval = estimate.interval(math.exp)
            yield f"{row.path}.{name}", interval


def _thinned_values(
    parts: Sequence[Columns], orders: Sequence[NDArray[np.int64]], metric: str
) -> NDArray[np.int64]:
    """Return the values of successful requests, part by part and each part in its order.

    Of more than MOST_SAMPLES values, every second, third and so on is returned, counted across
    parts.
    """
    values_of_parts = [part.measure(metric) for part in parts]
    indexes_of_parts = []
    for part, values, order in zip(parts, values_of_parts, orders, strict=True):
        is_known = part.where(OK) & (values != UNDEFINED)
        indexes_of_parts.append(order[is_known[order]])
    counts = [len(indexes) for indexes in indexes_of_parts]
    stride = max(math.ceil(sum(counts) / MOST_SAMPLES), 1)
    counts_before = accumulate(counts, initial=0)
    return np.concatenate(
        [
            values[indexes[-count_before % stride :: stride]]
            for values, indexes, count_before in zip(
                values_of_parts, indexes_of_parts, counts_before, strict=False
            )
        ]
    )


def _rate_interval(summary: Any, tokens_in: Callable[[Span], float | None]) -> Interval | None:
    value = summary.tokens.steady_output_per_s
    steady = summary.window.steady
    tokens = [tokens_in(piece) for piece in pieces_of(steady)]
    if not value or not tokens or None in tokens:
        return None
    piece_s = (steady.duration_s or 1.0) / PIECES
    estimate = estimate_rate([(count or 0.0) / piece_s for count in tokens], value)
    return None if estimate is None else estimate.interval(math.exp)


def _goodput_interval(parts: Sequence[Columns], summary: Any, slo: Slo | None) -> Interval | None:
    value = summary.goodput.share
    if slo is None or value is None:
        return None
    marks_of_parts = [marks(part, outcomes.meets(part, slo), slo) for part in parts]
    estimate = estimate_share(marks_of_parts, value)
    return None if estimate is None else estimate.interval(_clamp_share)


def _clamp_share(value: float) -> float:
    return min(max(value, 0.0), 1.0)
