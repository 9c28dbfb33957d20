"""Figures of one run, or of several as one, with their standard error: by blocks of time, since requests hang together.

Pure. Intervals are `uncertainty.py`'s; here is only which values in which order speak for which figure.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from loadgen.metrics import columns as metrics
from loadgen.metrics.columns import CANCELLED, OK, Columns, Span
from loadgen.stats import intervals
from loadgen.stats.quantiles import QUANTILES, SUPPORT, index

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from loadgen.metrics.registry import Metric

BLOCKS = (20, 10)  # of a run: more see little of what lasts long, fewer know their own spread badly; the wider is used
RESAMPLES = 300  # enough to know a standard error to 4 %
MANY = 20_000  # samples from which the quantile's own rank is blocked instead of the quantile: the same, and cheap
PIECES = 20  # of the steady window, for a rate


class Known(NamedTuple):
    """A figure on the scale on which it is compared (log, or plain for shares), with its standard error."""

    value: float
    error: float
    freedom: float


def _in_order(columns: Columns, values: NDArray[np.int64], chosen: NDArray[np.bool_]) -> NDArray[np.int64]:
    which = np.flatnonzero(chosen)
    ordered: NDArray[np.int64] = values[which][np.argsort(columns["due_ns"][which], kind="stable")]
    return ordered


def latency(parts: Sequence[Columns], one: Metric, value: float) -> tuple[Known | None, str]:
    """A quantile or a mean of ok requests in order of due: the error by blocks."""
    runs = []
    for part in parts:
        values = part.measure(one.per_request)
        runs.append(_in_order(part, values, part.where(OK) & (values != metrics.UNDEFINED)))
    everything = np.concatenate(runs).astype(np.float64)
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


def _quantile_error(values: NDArray[np.float64], p: float) -> tuple[float, float]:
    """Standard error of the log of a quantile, and its degrees of freedom.

    The widest of those by BLOCKS. What lies beyond the quantile may come from a few stretches of time (one long queue);
    then as many values stand behind it, however many blocks there are, and Student's t grows accordingly.
    """
    found = []
    positive = np.maximum(values, 1.0)
    for blocks in BLOCKS:
        if len(values) <= MANY:
            interval = intervals.block_bootstrap(
                np.log(positive), _quantile_of(p), np.random.default_rng(blocks), blocks=blocks, resamples=RESAMPLES,
                level=_ONE_SIGMA,
            )  # fmt: skip
            error = interval.half_width
        else:
            error = _rank_error(positive, p, blocks)
        found.append((error * _small(blocks), float(blocks - 1)))
    error, freedom = max(found)
    return error, max(min(freedom, _stretches(values, p) - 1.0), 1.0)


def _stretches(values: NDArray[np.float64], p: float) -> int:
    """In how many of the finer blocks something lies beyond the quantile."""
    blocks = max(BLOCKS)
    size = len(values) // blocks
    beyond = values > np.sort(values)[index(len(values), p)]
    return int(beyond[len(values) - blocks * size :].reshape(blocks, size).any(axis=1).sum())


_ONE_SIGMA = math.erf(1 / math.sqrt(2))  # of a normal law: half the width of this interval is its standard error


def _small(blocks: int) -> float:
    """Resampled blocks vary by (b - 1) / b too little."""
    return math.sqrt(blocks / (blocks - 1))


def _quantile_of(p: float) -> Callable[[NDArray[np.float64]], float]:
    def statistic(values: NDArray[np.float64]) -> float:
        place = index(len(values), p)
        return float(np.partition(values, place)[place])

    return statistic


def _rank_error(values: NDArray[np.float64], p: float, blocks: int) -> float:
    """By the share of values above the quantile, block by block, carried over to values by the sample itself."""
    ordered = np.sort(values)
    middle = ordered[index(len(values), p)]
    share = intervals.batch_means((values > middle).astype(np.float64), batches=blocks)
    n = len(values)
    low, high = index(n, max(p - share.error, 0.0)), index(n, min(p + share.error, 1.0))
    return float(math.log(ordered[high]) - math.log(ordered[low])) / 2


def _by_means(values: NDArray[np.float64]) -> Known | None:
    found = [intervals.batch_means(values, batches=blocks) for blocks in BLOCKS]
    widest = max(found, key=lambda interval: interval.half_width)
    if not math.isfinite(widest.half_width):
        return None
    return Known(float(values.mean()), widest.error, widest.count - 1)


def marks(columns: Columns, good: NDArray[np.bool_]) -> NDArray[np.float64]:
    counted = ~columns.where(CANCELLED)
    return _in_order(columns, good.astype(np.int64), counted).astype(np.float64)


def share(marks: Sequence[NDArray[np.float64]], value: float) -> Known | None:
    """A share, its error by blocks, never less than that of independent requests with two more of either kind."""
    everything = np.concatenate(marks)
    n = len(everything)
    if n < 4 * max(BLOCKS):
        return None
    known = _by_means(everything)
    p = (float(everything.sum()) + 2) / (n + 4)
    least = math.sqrt(p * (1 - p) / (n + 4))
    return Known(value, max(least, known.error if known else 0.0), known.freedom if known else BLOCKS[1] - 1)


def rate(windows: Sequence[Span], parts: Sequence[Columns], value: float) -> tuple[Known | None, str]:
    """Output tokens per second while load was offered: by pieces of that time."""
    each: list[float] = []
    for steady, part in zip(windows, parts, strict=True):
        if steady.start_s is None or steady.end_s is None:
            return None, "no time under load"
        edges = np.linspace(steady.start_s * 1e9, steady.end_s * 1e9, PIECES + 1)
        pieces = [metrics.span(float(a), float(b)) for a, b in pairwise(edges)]
        each += [metrics.spread_tokens(part, piece) / (piece.duration_s or 1) for piece in pieces]
    mean = float(np.mean(each))
    known = _by_means(np.array(each))
    if known is None or mean <= 0:
        return None, "no tokens under load"
    return Known(math.log(value), known.error / mean, known.freedom), ""
