"""Exact quantiles by the index of MLPerf LoadGen, what a sample size supports, and a mergeable histogram.

Pure. The histogram has a stated error bound. Values are integer nanoseconds; only `Distribution`, which is for people
and for JSON, is in milliseconds.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from loadgen.core.stats import early_stopping

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from numpy.typing import NDArray

BLOCK_ROWS = 131_072  # a column of so many rows is in the cache of a processor

QUANTILES: tuple[tuple[str, float], ...] = (
    ("p50", 0.5),
    ("p90", 0.9),
    ("p95", 0.95),
    ("p99", 0.99),
    ("p99_9", 0.999),
)

SUPPORT: dict[str, int] = {"p50": 11, "p90": 64, "p95": 130, "p99": 662, "p99_9": 6636}
"""Number of samples from which a quantile is *supported*: there LoadGen's early stopping allows one over the limit."""


class Distribution(msgspec.Struct, frozen=True, kw_only=True):
    """The distribution of a sample, in milliseconds. Every figure is null when `count` is 0.

    `supported` names the quantiles that `count` samples support (`SUPPORT`); reports mark the others.
    """

    count: int = 0
    mean: float | None = None
    min: float | None = None
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None
    p99_9: float | None = None
    max: float | None = None
    supported: tuple[str, ...] = ()

    def without(self, statistics: Collection[str]) -> Distribution:
        """Return the same sample with these statistics null."""
        return msgspec.structs.replace(self, **dict.fromkeys(statistics)) if statistics else self

    def withheld(self) -> Distribution:
        """The same sample without its figures: only `count` and `supported` are kept."""
        return Distribution(count=self.count, supported=self.supported)


def deciding(distribution: Distribution) -> tuple[str, float] | None:
    """The highest quantile that the sample supports, at most the p99, and its value; None when it supports none.

    Limits are judged by it: a p99 of 30 samples is the largest of them, and one late request would decide.
    """
    names = [name for name, _ in QUANTILES]
    for name in reversed(names[: names.index("p99") + 1]):
        if name in distribution.supported:
            value = getattr(distribution, name)
            return None if value is None else (name, value)
    return None


def index(n: int, p: float) -> int:
    """The index of quantile `p` in `n` >= 1 sorted samples: floor(n * p), as MLPerf LoadGen's `GetPercentile`."""
    return min(int(n * p), n - 1)


def element(values: NDArray[Any], p: float) -> float:
    """Quantile `p` of at least one value in any order: `sorted[floor(n * p)]`, an element of the sample."""
    place = index(len(values), p)
    return float(np.partition(values, place)[place])


def support(p: float) -> int:
    """The number of samples that supports quantile `p`: early stopping allows one of them over the limit.

    From there, one sample over the limit still shows, at LoadGen's confidence of 99 %, that a share of at least `p` is
    under it. `SUPPORT` holds the common values.
    """
    return early_stopping.needed(1, p)


def name(p: float) -> str:
    """The field name of a quantile: 0.99 is `p99`, 0.999 is `p99_9`."""
    return "p" + f"{p * 100:.6f}".rstrip("0").rstrip(".").replace(".", "_")


def milliseconds(ns: float) -> float:
    """Nanoseconds as milliseconds, rounded to a nanosecond."""
    return round(ns / 1e6, 6)


def asked(sample: Values | Histogram, shares: Iterable[float]) -> dict[str, float]:
    """These quantiles of a sample in milliseconds, by their field names; none of an empty one."""
    return {name(p): milliseconds(sample.quantile(p)) for p in shares if sample.count}


def exact(values_ns: NDArray[np.int64]) -> Distribution:
    """The distribution of values per request: every quantile is `sorted[floor(n * p)]`, an element of the sample."""
    values = Values()
    values.add(values_ns)
    return values.distribution()


def _distribution(
    sample: Values | Histogram, n: int, mean: float, least: int, largest: int
) -> Distribution:
    return Distribution(
        count=n,
        mean=milliseconds(mean),
        min=milliseconds(least),
        max=milliseconds(largest),
        supported=tuple(key for key, _ in QUANTILES if n >= SUPPORT[key]),
        **{key: milliseconds(sample.quantile(p)) for key, p in QUANTILES},
    )


BOUND = (
    0.001  # largest relative error of a quantile of a histogram, for values from 1 ns to LARGEST_NS
)
RATIO = 1.0019  # between the edges of a bucket: (RATIO - 1) / (RATIO + 1) is 0.00095; the rest is for rounding
LARGEST_NS = 10**14  # 28 hours; larger values share one bucket, and only their maximum is exact
_PER_LOG2 = 1 / math.log2(RATIO)
SIZE = 2 + math.ceil(
    math.log2(LARGEST_NS) * _PER_LOG2
)  # bucket 0 holds values <= 0; some 17,000 buckets, 136 kB
_FORMAT = 1
_NONE_YET = 2**63 - 1


def bucket(values_ns: NDArray[np.int64]) -> NDArray[np.int64]:
    """The bucket numbers of values: 0 for values <= 0, else 1 + floor(log(value) / log(RATIO)), at most SIZE - 1."""
    places = np.log2(np.maximum(values_ns, 1)) * _PER_LOG2
    numbers = np.minimum(places.astype(np.int64) + 1, SIZE - 1)
    numbers[values_ns <= 0] = 0
    return numbers


class Values:
    """All values of a sample: exact, where a `Histogram` is within BOUND. Merging adds the values."""

    __slots__ = ("_in_order", "_parts")

    def __init__(self) -> None:
        self._parts: list[NDArray[np.int64]] = []
        self._in_order = False  # there is one part, in order

    @classmethod
    def of(cls, parts: Iterable[NDArray[np.int64]], most: int) -> Values:
        """The values of arrays, `most` at most, put in order in one array: of millions there is no second one."""
        values, whole, count = cls(), np.empty(most, np.int64), 0
        for part in parts:
            whole[count : (count := count + len(part))] = part
        values.add(whole[:count])
        values._parts[0].sort()
        values._in_order = True
        return values

    def add(self, values_ns: NDArray[np.int64]) -> None:
        """Add the values of an int64 array."""
        small = len(values_ns) and values_ns.min() >= 0 and values_ns.max() < 1 << 31
        self._parts.append(
            values_ns.astype(np.int32) if small else values_ns
        )  # half as large, and sooner in order
        self._in_order = False

    def merge(self, other: Values) -> None:
        """Add the values of another sample; the order of merging does not matter."""
        self._parts += other._parts
        self._in_order = False

    @property
    def count(self) -> int:
        return sum(map(len, self._parts))

    def nth(self, place: int) -> float:
        """The value at a place of the sample in order of size, from 0."""
        if self._in_order:
            return int(self._parts[0][place])
        return int(np.partition(np.concatenate(self._parts), place)[place])

    def quantile(self, p: float) -> float:
        """`sorted[floor(n * p)]`; count >= 1."""
        return self.nth(index(self.count, p))

    def distribution(self) -> Distribution:
        """The distribution, each quantile an element of the sample."""
        n = self.count
        if n == 0:
            return Distribution()
        if not self._in_order:
            self._parts, self._in_order = [np.concatenate(self._parts)], True
            self._parts[0].sort()  # faster than to part them at five places
        values = self._parts[0]
        largest = int(values[-1])
        total = sum(
            int(part.sum(dtype=np.int64))
            for part in np.array_split(values, 1 + n * largest // 2**62)
        )  # each within int64
        return _distribution(self, n, total / n, int(values[0]), largest)


class Histogram:
    """Counts of values in buckets whose edges grow by RATIO. Merging adds the counts.

    Count, sum, minimum and maximum are exact. A quantile has a relative error of at most BOUND, for values up to
    LARGEST_NS.
    """

    __slots__ = ("counts", "largest_ns", "least_ns", "total_ns")

    def __init__(self) -> None:
        self.counts: NDArray[np.int64] = np.zeros(SIZE, np.int64)
        self.total_ns = 0
        self.least_ns = _NONE_YET
        self.largest_ns = -_NONE_YET

    def add(self, values_ns: NDArray[np.int64], times: NDArray[np.int64] | None = None) -> None:
        """Count the values of an int64 array, each once, or as many `times` as said."""
        if times is not None:
            values_ns, times = values_ns[times > 0], times[times > 0]
        if len(values_ns) == 0:
            return
        self.least_ns = min(self.least_ns, int(values_ns.min()))
        self.largest_ns = max(self.largest_ns, int(values_ns.max()))
        self.total_ns += int((values_ns if times is None else values_ns * times).sum())
        bucket_counts = np.bincount(bucket(values_ns), weights=times).astype(np.int64)
        self.counts[: len(bucket_counts)] += bucket_counts

    def add_zeros(self, count: int) -> None:
        """Count the value 0 `count` times, without an array of them."""
        if count > 0:
            self.least_ns, self.largest_ns = min(self.least_ns, 0), max(self.largest_ns, 0)
            self.counts[0] += count

    def merge(self, other: Histogram) -> None:
        """Add the counts of another histogram; the order of merging does not matter."""
        self.least_ns = min(self.least_ns, other.least_ns)
        self.largest_ns = max(self.largest_ns, other.largest_ns)
        self.total_ns += other.total_ns
        self.counts += other.counts

    @property
    def count(self) -> int:
        return int(self.counts.sum())

    def quantile(self, p: float) -> float:
        """The value that stands for the bucket of `sorted[floor(n * p)]`, within BOUND of it; count >= 1."""
        return self.nth(index(self.count, p))

    def nth(self, place: int) -> float:
        """The value that stands for the bucket of the value at a place of the ordered sample, from 0."""
        return self.middle(int(np.searchsorted(np.cumsum(self.counts), place, side="right")))

    def middle(self, place: int) -> float:
        """The value that stands for a bucket: at the same relative distance from both edges, inside the sample."""
        if place == 0:
            return float(min(0, self.largest_ns))
        low = RATIO ** (place - 1)
        return float(min(max(2 * low * RATIO / (1 + RATIO), self.least_ns), self.largest_ns))

    def middles(self, places: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return `middle` of many buckets."""
        edges = RATIO ** (places - 1.0)
        values: NDArray[np.float64] = np.clip(
            2 * edges * RATIO / (1 + RATIO), self.least_ns, self.largest_ns
        )
        return np.where(places == 0, float(min(0, self.largest_ns)), values)

    def over(self, limit_ns: int) -> int:
        """The number of values over a limit, within BOUND: values in the bucket of the limit count as not over."""
        place = int(bucket(np.array([limit_ns], np.int64))[0])
        return int(self.counts[place + 1 :].sum())

    def distribution(self) -> Distribution:
        """The distribution, with quantiles within BOUND; count, mean, min and max are exact."""
        n = self.count
        return (
            _distribution(self, n, self.total_ns / n, self.least_ns, self.largest_ns)
            if n
            else Distribution()
        )

    def to_bytes(self) -> bytes:
        """Little-endian int64: format, sum, minimum, maximum, then the counts up to the last one that is not zero."""
        used = int(np.flatnonzero(self.counts)[-1]) + 1 if self.counts.any() else 0
        head = np.array([_FORMAT, self.total_ns, self.least_ns, self.largest_ns], "<i8")
        return head.tobytes() + self.counts[:used].astype("<i8").tobytes()

    @classmethod
    def from_bytes(cls, data: bytes) -> Histogram:
        """The inverse of `to_bytes`. Raises ValueError for anything else."""
        if len(data) < 32 or len(data) % 8 or len(data) // 8 - 4 > SIZE:
            raise ValueError(f"{len(data)} bytes are no histogram")
        numbers = np.frombuffer(data, "<i8")
        if numbers[0] != _FORMAT or (numbers[4:] < 0).any():
            raise ValueError(f"no histogram of format {_FORMAT}")
        histogram = cls()
        histogram.total_ns, histogram.least_ns, histogram.largest_ns = (
            int(number) for number in numbers[1:4]
        )
        histogram.counts[: len(numbers) - 4] = numbers[4:]
        return histogram


def pooled(histograms: Iterable[Histogram]) -> Histogram:
    """Several histograms as one."""
    whole = Histogram()
    for histogram in histograms:
        whole.merge(histogram)
    return whole


def in_parts(count: int) -> list[slice]:
    """So many rows or numbers, a part after the other: of millions, what is worked out of one stays small."""
    return [slice(first, first + BLOCK_ROWS) for first in range(0, count, BLOCK_ROWS)]


def distance(
    ordered: NDArray[np.float64],
    at: Callable[[NDArray[np.float64]], NDArray[np.float64]],
    below: Callable[[NDArray[np.float64]], NDArray[np.float64]],
) -> float:
    """The Kolmogorov-Smirnov distance: the largest difference from the distribution function of sorted values.

    `at`, `below`: the chance of a value up to each one, and of one below it; the same for a law without steps.
    """
    lasts = np.append(
        np.flatnonzero(ordered[1:] != ordered[:-1]), len(ordered) - 1
    )  # of each value
    farthest = reached = 0.0
    for last in np.array_split(
        lasts, 1 + len(lasts) // BLOCK_ROWS
    ):  # of millions a part after the other
        known, after = ordered[last], (last + 1) / len(ordered)
        before, reached = np.append(reached, after[:-1]), float(after[-1])
        farthest = max(
            farthest, np.abs(after - at(known)).max(), np.abs(before - below(known)).max()
        )
    return float(farthest)
