"""How sure the figures of one run are by what happened within it: intervals by blocks of its time.

Pure. Requests of a run are correlated, since they share a queue and a batch; so its errors are those of blocks of time,
never of single requests. The formulas are those of `stats/intervals.py`; `compare` judges by the same ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct

from loadgen.core.metrics import outcomes
from loadgen.core.metrics.columns import OK, UNDEFINED, Columns, or_all
from loadgen.core.metrics.windows import Span, span
from loadgen.core.slo import Slo
from loadgen.core.stats import intervals
from loadgen.core.stats.intervals import LEVEL, Interval
from loadgen.core.stats.quantiles import QUANTILES, SUPPORT, Distribution, index
from loadgen.figures import FIGURES

if TYPE_CHECKING:
    from numpy.typing import NDArray

BLOCKS = (
    20,
    10,
)  # per run: more blocks miss long disturbances, fewer estimate the spread badly; the wider is used
PIECES = 20  # pieces of the steady window, for the error of a rate
MOST = 100_000  # requests of which a block error is made; of more, every second, third ... in order of due instant
METHOD = "blocks of time"


class Known(Struct, frozen=True):
    """A figure on the scale of a comparison (log, or plain for shares) with its standard error.

    `freedom`: the degrees of freedom of that error.
    """

    value: float
    error: float
    freedom: float

    def interval(self, back: Callable[[float], float]) -> Interval:
        """The interval at LEVEL, on the scale of the figure."""
        half = intervals.t_quantile(0.5 + LEVEL / 2, self.freedom) * self.error
        value, low, high = (back(self.value + sign * half) for sign in (0, -1, 1))
        return Interval(value, low, high, LEVEL, round(self.freedom) + 1, METHOD)


def in_order(columns: Columns, values: NDArray[Any], chosen: NDArray[np.bool_]) -> NDArray[Any]:
    """The chosen values in order of their due instants."""
    own = or_all(chosen)
    ordered: NDArray[Any] = values[own][np.argsort(columns["due_ns"][own], kind="stable")]
    return ordered


def _thinned(
    parts: Sequence[Columns], orders: Sequence[NDArray[np.int64]], figure: str
) -> NDArray[np.int64]:
    """The values of ok requests that have one, in the `orders` of the parts; of more than MOST every second, third."""
    measured = [part.measure(figure) for part in parts]
    known = [
        part.where(OK) & (values != UNDEFINED) for part, values in zip(parts, measured, strict=True)
    ]
    places = [order[chosen[order]] for order, chosen in zip(orders, known, strict=True)]
    stride = max(-(-sum(map(len, places)) // MOST), 1)
    of_parts = zip(measured, places, accumulate(map(len, places), initial=0), strict=False)
    return np.concatenate([values[of[-first % stride :: stride]] for values, of, first in of_parts])


def rank_error(
    values: NDArray[np.float64], ordered: NDArray[np.float64], p: float, blocks: int
) -> float:
    """Standard error of the log of a quantile by the share of values above it. `ordered`: the same values, sorted.

    The share is computed block by block, and its error is carried over to values through the ordered sample.
    """
    middle = ordered[index(len(values), p)]
    share = intervals.batch_means((values > middle).astype(np.float64), batches=blocks)
    n = len(values)
    low, high = index(n, max(p - share.error, 0.0)), index(n, min(p + share.error, 1.0))
    return float(math.log(ordered[high]) - math.log(ordered[low])) / 2


def blocks_beyond(values: NDArray[np.float64], ordered: NDArray[np.float64], p: float) -> int:
    """In how many of the smaller blocks some value lies beyond the quantile. `ordered`: the same values, sorted."""
    blocks = max(BLOCKS)
    size = len(values) // blocks
    beyond = values > ordered[index(len(values), p)]
    return int(beyond[len(values) - blocks * size :].reshape(blocks, size).any(axis=1).sum())


def by_means(values: NDArray[np.float64]) -> Known | None:
    """The mean with the widest error of those by BLOCKS; None where it has no bound."""
    estimates = [intervals.batch_means(values, batches=blocks) for blocks in BLOCKS]
    widest = max(estimates, key=lambda interval: interval.half_width)
    if not math.isfinite(widest.half_width):
        return None
    return Known(float(values.mean()), widest.error, widest.count - 1)


def marks(columns: Columns, good: NDArray[np.bool_], slo: Slo | None = None) -> NDArray[np.float64]:
    """1 for each good request and 0 for each other one, in order of due instant; only those that an SLO counts."""
    return in_order(columns, good, outcomes.is_counted(columns, slo)).astype(np.float64)


def share(marks: Sequence[NDArray[np.float64]], value: float) -> Known | None:
    """A share with its error by blocks; None with too few values.

    The error is never less than that of independent requests with two more of either kind.
    """
    everything = np.concatenate(marks)
    n = len(everything)
    if n < 4 * max(BLOCKS):
        return None
    known = by_means(everything)
    least = least_share_error(float(everything.sum()), n)
    return Known(
        value, max(least, known.error if known else 0.0), known.freedom if known else BLOCKS[1] - 1
    )


def least_share_error(marked: float, n: int) -> float:
    """The standard error of a share of `n` independent requests with two more of either kind."""
    p = (marked + 2) / (n + 4)
    return math.sqrt(p * (1 - p) / (n + 4))


def rate(pieces: Sequence[float], value: float) -> Known | None:
    """A rate with its error by those of pieces of time; None where nothing came."""
    known = by_means(np.array(pieces))
    if known is None or known.value <= 0:
        return None
    return Known(math.log(value), known.error / known.value, known.freedom)


def pieces_of(steady: Span) -> list[Span]:
    """The steady window in PIECES; [] where there is none."""
    if steady.start_s is None or steady.end_s is None:
        return []
    edges = np.linspace(steady.start_s * 1e9, steady.end_s * 1e9, PIECES + 1)
    return [span(float(a), float(b)) for a, b in pairwise(edges)]


def of_run(
    parts: Sequence[Columns],
    summary: Any,
    slo: Slo | None,
    tokens_in: Callable[[Span], float | None],
) -> dict[str, Interval]:
    """Intervals of the figures of a run by their path, of those that its summary has.

    Empty where a block would not be as long as a request (ten times E2E p50 is the least), or have four of them.
    `tokens_in`: output tokens that came in an interval.
    """
    steady = summary.window.steady
    usual_ms = summary.e2e_ms.p50
    if usual_ms is None or (steady.duration_s or 0.0) * 1e3 < min(BLOCKS) * usual_ms:
        return {}
    if summary.requests.ok < 4 * max(BLOCKS):
        return {}
    return {
        path: interval
        for path, interval in _of_run(parts, summary, slo, tokens_in)
        if interval is not None
    }


def _of_run(
    parts: Sequence[Columns],
    summary: Any,
    slo: Slo | None,
    tokens_in: Callable[[Span], float | None],
) -> Iterator[tuple[str, Interval | None]]:
    quantiles = dict(QUANTILES)
    orders = [np.argsort(part["due_ns"], kind="stable") for part in parts]
    for row in FIGURES.here():
        shown: Distribution | None = (
            summary.figures.get(row.field) if row.block else getattr(summary, row.field)
        )
        told = [
            (q, value)
            for q in row.compared
            if shown is not None and (value := getattr(shown, q) or 0.0) > 0
        ]
        if not row.values or not told:
            continue
        values = np.maximum(_thinned(parts, orders, row.name).astype(np.float64), 1.0)
        ordered = np.sort(values)
        for q, value in told:
            known = None
            if len(values) >= max(4 * max(BLOCKS), SUPPORT[q]):
                error = max(rank_error(values, ordered, quantiles[q], blocks) for blocks in BLOCKS)
                freedom = max(
                    min(BLOCKS[1], blocks_beyond(values, ordered, quantiles[q])) - 1.0, 1.0
                )
                known = Known(math.log(value), error, freedom)
            yield f"{row.path}.{q}", None if known is None else known.interval(math.exp)
    value = summary.tokens.steady_output_per_s
    rates = [tokens_in(piece) for piece in pieces_of(summary.window.steady)]
    if value and rates and None not in rates:
        seconds = (summary.window.steady.duration_s or 1.0) / PIECES
        found = rate([(tokens or 0.0) / seconds for tokens in rates], value)
        yield "tokens.steady_output_per_s", None if found is None else found.interval(math.exp)
    if slo is not None and summary.goodput.share is not None:
        found = share(
            [marks(part, outcomes.meets(part, slo), slo) for part in parts], summary.goodput.share
        )
        yield (
            "goodput.share",
            None if found is None else found.interval(lambda value: min(max(value, 0.0), 1.0)),
        )
