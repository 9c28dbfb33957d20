"""Figures of one run, or of several runs taken as one, with their standard errors by blocks of time.

Pure. The errors of one run by itself are those of `core/metrics/within_run_variance.py`; here are those of several taken as one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from loadgen.core.analysis import within_run_variance
from loadgen.core.analysis.within_run_variance import (
    BLOCKS,
    Known,
    blocks_beyond,
    by_means,
    in_order,
    rank_error,
)
from loadgen.core.metrics.columns import OK, UNDEFINED, Columns
from loadgen.core.metrics.windows import Span, spread_tokens
from loadgen.core.stats import intervals
from loadgen.core.stats.intervals import Interval
from loadgen.core.stats.quantiles import QUANTILES, SUPPORT, element
from loadgen.repeated.comparable_metrics import Metric

RESAMPLES = 300  # enough to know a standard error to 4 %
MANY = 20_000  # samples from which the rank of the quantile is blocked instead: the same result, and cheap


def samples(columns: Columns, figure: str) -> NDArray[np.int64]:
    """The values of the ok requests that have one, in order of their due instants."""
    values = columns.measure(figure)
    return in_order(columns, values, columns.where(OK) & (values != UNDEFINED))


def too_few_samples(parts: Sequence[Columns], one: Metric) -> str:
    """Return why the samples of all parts together do not support a percentile; "" if they do."""
    quantile = next((name for name, p in QUANTILES if p == one.p), "")
    count = sum(len(samples(part, one.per_request)) for part in parts)
    if not quantile or count >= SUPPORT[quantile]:
        return ""
    return f"{count:,} samples, {quantile.replace('_', '.')} needs {SUPPORT[quantile]:,}"


def latency(parts: Sequence[Columns], one: Metric, value: float) -> tuple[Known | None, str]:
    """A quantile or a mean of the ok requests, with its error by blocks in order of due instant; or None and the
    reason.

    `value`: the figure of the summary, in its unit.
    """
    everything = np.concatenate([samples(part, one.per_request) for part in parts]).astype(
        np.float64
    )
    n = len(everything)
    if too_few := too_few_samples(parts, one):
        return None, too_few
    if n < 4 * max(BLOCKS):
        return None, f"{n:,} samples are too few for blocks"
    if one.p is None:
        known = by_means(everything)
        return (known and Known(math.log(value), known.error / known.value, known.freedom)), ""
    error, freedom = _quantile_error(everything, one.p)
    return (
        (Known(math.log(value), error, freedom), "")
        if math.isfinite(error)
        else (None, "too few samples beyond it")
    )


def within_runs(parts: Sequence[Columns], one: Metric) -> tuple[float, float]:
    """The error that blocks of time within the runs explain, on the scale of the comparison, and its freedom.

    Repeats are never surer than this: three runs that agree by chance hide it. By the rank of the quantile, which is
    cheap. (0, inf) where the figure is no latency, or the runs are too short for blocks.
    """
    everything = np.maximum(
        np.concatenate([samples(part, one.per_request) for part in parts]).astype(np.float64), 1.0
    )
    if len(everything) < 4 * max(BLOCKS):
        return 0.0, math.inf
    if one.p is None:
        known = by_means(everything)
        return (known.error / known.value, known.freedom) if known else (0.0, math.inf)
    ordered = np.sort(everything)
    freedom = max(min(BLOCKS[0] - 1.0, blocks_beyond(everything, ordered, one.p) - 1.0), 1.0)
    return rank_error(everything, ordered, one.p, BLOCKS[0]), freedom


def stretches_above(parts: Sequence[Columns], one: Metric, level: float) -> tuple[int, int]:
    """In how many stretches of time of the runs the quantile lies above `level` (ns), and of how many stretches."""
    above = total = 0
    for part in parts:
        for stretch in np.array_split(
            samples(part, one.per_request), max(BLOCKS[0] // len(parts), 2)
        ):
            if len(stretch):
                total += 1
                above += element(stretch, one.p or 0.5) > level
    return above, total


def _quantile_error(values: NDArray[np.float64], p: float) -> tuple[float, float]:
    """Standard error of the logarithm of a quantile, and its degrees of freedom.

    The error is the widest of those by BLOCKS. The values beyond the quantile may come from a few intervals of time
    (one long queue). Then the estimate rests on that few values, however many blocks there are, so the degrees of
    freedom are limited by the number of those intervals.
    """
    errors = []
    positive = np.maximum(values, 1.0)
    ordered = np.sort(values)
    for blocks in BLOCKS:
        if len(values) <= MANY:
            interval = block_bootstrap(
                np.log(positive),
                partial(element, p=p),
                np.random.default_rng(blocks),
                blocks=blocks,
                resamples=RESAMPLES,
                level=_ONE_SIGMA,
            )
            error = interval.half_width
        else:
            error = rank_error(positive, np.maximum(ordered, 1.0), p, blocks)
        errors.append((error * _bootstrap_correction(blocks), float(blocks - 1)))
    error, freedom = max(errors)
    return error, max(min(freedom, blocks_beyond(values, ordered, p) - 1.0), 1.0)


# level of a normal interval whose half width is the standard error
_ONE_SIGMA = math.erf(1 / math.sqrt(2))


def block_bootstrap(
    values: NDArray[np.float64],
    statistic: Callable[[NDArray[np.float64]], float],
    rng: np.random.Generator,
    *,
    blocks: int = intervals.BATCHES,
    level: float = intervals.LEVEL,
    resamples: int = RESAMPLES,
) -> Interval:
    """The interval of any statistic of the values of one run, in their order, by resampling whole blocks (Kuensch
    1989).

    The statistic may be a p99, for example. Blocks have equal length and overlap, so the places of the cuts do not
    matter. `count` is the number of blocks that fit. With fewer than two values per block the interval is unbounded.
    """
    n = len(values)
    if n < 2 * blocks:
        return Interval(
            statistic(values) if n else math.nan, -math.inf, math.inf, level, 0, "block bootstrap"
        )
    size = n // blocks
    starts = rng.integers(0, n - size + 1, (resamples, blocks))
    offsets = np.arange(size)
    resampled = np.array([statistic(values[(row[:, None] + offsets).ravel()]) for row in starts])
    low, high = np.quantile(resampled, [(1 - level) / 2, (1 + level) / 2])
    return Interval(statistic(values), float(low), float(high), level, blocks, "block bootstrap")


def _bootstrap_correction(blocks: int) -> float:
    """Correction of a standard error: resampled blocks have only (b - 1) / b of the true variance."""
    return math.sqrt(blocks / (blocks - 1))


def rate(
    windows: Sequence[Span], parts: Sequence[Columns], value: float
) -> tuple[Known | None, str]:
    """Output tokens per second in the steady windows, with the error by pieces of that time; or None and the reason."""
    rates: list[float] = []
    for steady, part in zip(windows, parts, strict=True):
        pieces = within_run_variance.pieces_of(steady)
        if not pieces:
            return None, "no time under load"
        rates += [spread_tokens(part, piece) / (piece.duration_s or 1) for piece in pieces]
    known = within_run_variance.rate(rates, value)
    return known, "" if known is not None else "no tokens under load"
