"""Figures of one run, or of several runs taken as one, with their standard errors by blocks of time.

Pure. Blocks are needed because requests of a run are correlated. The formulas are those of `stats/intervals.py`; this
module decides which values, in which order, stand for which figure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from loadgen.core.metrics import columns as metrics
from loadgen.core.metrics import outcomes
from loadgen.core.metrics.columns import OK, Columns
from loadgen.core.metrics.windows import Span, span, spread_tokens
from loadgen.core.slo import Slo
from loadgen.core.stats import intervals
from loadgen.core.stats.quantiles import QUANTILES, SUPPORT, element, index
from loadgen.repeated.registry import Metric

BLOCKS = (20, 10)  # per run: more blocks miss long disturbances, fewer estimate the spread badly; the wider is used
RESAMPLES = 300  # enough to know a standard error to 4 %
MANY = 20_000  # samples from which the rank of the quantile is blocked instead: the same result, and cheap
PIECES = 20  # pieces of the steady window, for the error of a rate


class Known(NamedTuple):
    """A figure on the scale of the comparison (log, or plain for shares) with its standard error.

    `freedom`: the degrees of freedom of that error.
    """

    value: float
    error: float
    freedom: float


def _in_order(columns: Columns, values: NDArray[np.int64], chosen: NDArray[np.bool_]) -> NDArray[np.int64]:
    """The chosen values in order of their due instants."""
    places = np.flatnonzero(chosen)
    ordered: NDArray[np.int64] = values[places][np.argsort(columns["due_ns"][places], kind="stable")]
    return ordered


def _samples(columns: Columns, one: Metric) -> NDArray[np.int64]:
    """The values of the ok requests that have one, in order of their due instants."""
    values = columns.measure(one.per_request)
    return _in_order(columns, values, columns.where(OK) & (values != metrics.UNDEFINED))


def latency(parts: Sequence[Columns], one: Metric, value: float) -> tuple[Known | None, str]:
    """A quantile or a mean of the ok requests, with its error by blocks in order of due instant; or None and the
    reason.

    `value`: the figure of the summary, in its unit.
    """
    everything = np.concatenate([_samples(part, one) for part in parts]).astype(np.float64)
    n = len(everything)
    quantile = next((name for name, p in QUANTILES if p == one.p), "")
    if quantile and n < SUPPORT[quantile]:
        return None, f"{n:,} samples, {quantile.replace('_', '.')} needs {SUPPORT[quantile]:,}"
    if n < 4 * max(BLOCKS):
        return None, f"{n:,} samples are too few for blocks"
    if one.p is None:
        known = _by_means(everything)
        return (known and Known(math.log(value), known.error / known.value, known.freedom)), ""
    error, freedom = _quantile_error(everything, one.p)
    return (Known(math.log(value), error, freedom), "") if math.isfinite(error) else (None, "too few samples beyond it")


def within_runs(parts: Sequence[Columns], one: Metric) -> tuple[float, float]:
    """The error that blocks of time within the runs explain, on the scale of the comparison, and its freedom.

    Repeats are never surer than this: three runs that agree by chance hide it. By the rank of the quantile, which is
    cheap. (0, inf) where the figure is no latency, or the runs are too short for blocks.
    """
    everything = np.maximum(np.concatenate([_samples(part, one) for part in parts]).astype(np.float64), 1.0)
    if len(everything) < 4 * max(BLOCKS):
        return 0.0, math.inf
    if one.p is None:
        known = _by_means(everything)
        return (known.error / known.value, known.freedom) if known else (0.0, math.inf)
    freedom = max(min(BLOCKS[0] - 1.0, _blocks_beyond(everything, one.p) - 1.0), 1.0)
    return _rank_error(everything, one.p, BLOCKS[0]), freedom


def stretches_above(parts: Sequence[Columns], one: Metric, level: float) -> tuple[int, int]:
    """In how many stretches of time of the runs the quantile lies above `level` (ns), and of how many stretches."""
    above = total = 0
    for part in parts:
        for stretch in np.array_split(_samples(part, one), max(BLOCKS[0] // len(parts), 2)):
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
    for blocks in BLOCKS:
        if len(values) <= MANY:
            interval = intervals.block_bootstrap(
                np.log(positive), partial(element, p=p), np.random.default_rng(blocks), blocks=blocks,
                resamples=RESAMPLES, level=_ONE_SIGMA,
            )  # fmt: skip
            error = interval.half_width
        else:
            error = _rank_error(positive, p, blocks)
        errors.append((error * _bootstrap_correction(blocks), float(blocks - 1)))
    error, freedom = max(errors)
    return error, max(min(freedom, _blocks_beyond(values, p) - 1.0), 1.0)


def _blocks_beyond(values: NDArray[np.float64], p: float) -> int:
    """In how many of the smaller blocks some value lies beyond the quantile."""
    blocks = max(BLOCKS)
    size = len(values) // blocks
    beyond = values > element(values, p)
    return int(beyond[len(values) - blocks * size :].reshape(blocks, size).any(axis=1).sum())


# level of a normal interval whose half width is the standard error
_ONE_SIGMA = math.erf(1 / math.sqrt(2))


def _bootstrap_correction(blocks: int) -> float:
    """Correction of a standard error: resampled blocks have only (b - 1) / b of the true variance."""
    return math.sqrt(blocks / (blocks - 1))


def _rank_error(values: NDArray[np.float64], p: float, blocks: int) -> float:
    """Standard error of the log of a quantile by the share of values above it.

    The share is computed block by block, and its error is carried over to values through the ordered sample.
    """
    ordered = np.sort(values)
    middle = ordered[index(len(values), p)]
    share = intervals.batch_means((values > middle).astype(np.float64), batches=blocks)
    n = len(values)
    low, high = index(n, max(p - share.error, 0.0)), index(n, min(p + share.error, 1.0))
    return float(math.log(ordered[high]) - math.log(ordered[low])) / 2


def _by_means(values: NDArray[np.float64]) -> Known | None:
    estimates = [intervals.batch_means(values, batches=blocks) for blocks in BLOCKS]
    widest = max(estimates, key=lambda interval: interval.half_width)
    if not math.isfinite(widest.half_width):
        return None
    return Known(float(values.mean()), widest.error, widest.count - 1)


def marks(columns: Columns, good: NDArray[np.bool_], slo: Slo | None = None) -> NDArray[np.float64]:
    """1 for each good request and 0 for each other one, in order of due instant; only those that an SLO counts."""
    return _in_order(columns, good.astype(np.int64), outcomes.is_counted(columns, slo)).astype(np.float64)


def share(marks: Sequence[NDArray[np.float64]], value: float) -> Known | None:
    """A share with its error by blocks; None with too few values.

    The error is never less than that of independent requests with two more of either kind.
    """
    everything = np.concatenate(marks)
    n = len(everything)
    if n < 4 * max(BLOCKS):
        return None
    known = _by_means(everything)
    least = least_share_error(float(everything.sum()), n)
    return Known(value, max(least, known.error if known else 0.0), known.freedom if known else BLOCKS[1] - 1)


def least_share_error(marked: float, n: int) -> float:
    """The standard error of a share of `n` independent requests with two more of either kind."""
    p = (marked + 2) / (n + 4)
    return math.sqrt(p * (1 - p) / (n + 4))


def rate(windows: Sequence[Span], parts: Sequence[Columns], value: float) -> tuple[Known | None, str]:
    """Output tokens per second in the steady windows, with the error by pieces of that time; or None and the reason."""
    rates: list[float] = []
    for steady, part in zip(windows, parts, strict=True):
        if steady.start_s is None or steady.end_s is None:
            return None, "no time under load"
        edges = np.linspace(steady.start_s * 1e9, steady.end_s * 1e9, PIECES + 1)
        pieces = [span(float(a), float(b)) for a, b in pairwise(edges)]
        rates += [spread_tokens(part, piece) / (piece.duration_s or 1) for piece in pieces]
    mean = float(np.mean(rates))
    known = _by_means(np.array(rates))
    if known is None or mean <= 0:
        return None, "no tokens under load"
    return Known(math.log(value), known.error / mean, known.freedom), ""
