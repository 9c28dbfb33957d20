"""Exact quantiles by the index of MLPerf LoadGen, and how many samples support a quantile.

Pure. Values are integer nanoseconds. Only `Distribution`, which is for people and for JSON, is in
milliseconds. `histogram` has quantiles with a bounded error for samples that are too large to keep.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec
import numpy as np

from loadgen.core.stats import early_stopping

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from numpy.typing import NDArray

BLOCK_ROWS = 131_072
"""A column of so many rows fits into the cache of a processor."""

QUANTILES: tuple[tuple[str, float], ...] = (
    ("p50", 0.5),
    ("p90", 0.9),
    ("p95", 0.95),
    ("p99", 0.99),
    ("p99_9", 0.999),
)

NEEDED_SAMPLES: dict[str, int] = {"p50": 11, "p90": 64, "p95": 130, "p99": 662, "p99_9": 6636}
"""How many samples a quantile needs. With fewer it is not *supported*, and reports mark its value.
From this number on, LoadGen's early stopping allows one sample over the limit."""

SMALL_VALUE_LIMIT = 1 << 31
"""Values below this are kept as int32, which takes half the memory and is sorted faster."""

MAX_PARTIAL_SUM = 2**62
"""The values of a sample are added in parts whose sums stay below this, within int64."""


class Distribution(msgspec.Struct, frozen=True, kw_only=True):
    """The distribution of a sample, in milliseconds. All statistics are None if `count` is 0.

    `supported` names the quantiles for which `count` samples are enough (`NEEDED_SAMPLES`); reports
    mark the others.
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
        """Return the same distribution with these statistics, such as "p99", set to None."""
        none_by_name = dict.fromkeys(statistics)
        return msgspec.structs.replace(self, **none_by_name)

    def without_statistics(self) -> Distribution:
        """Return the same distribution without any statistic: only `count` and `supported` stay."""
        return Distribution(count=self.count, supported=self.supported)


class NamedQuantile(NamedTuple):
    """A quantile of a distribution: its name, for example "p99", and its value."""

    name: str
    value_ms: float


def deciding_quantile(distribution: Distribution) -> NamedQuantile | None:
    """Return the highest quantile up to p99 that has enough samples, or None if none has.

    With too few samples, a quantile is decided by a single large value. The p99 of 30 samples, for
    example, is the largest of them.
    """
    # The names are in ascending order of the quantiles.
    all_names = [name for name, _ in QUANTILES]
    position_of_p99 = all_names.index("p99")
    names_up_to_p99 = all_names[: position_of_p99 + 1]

    supported_names = [name for name in names_up_to_p99 if name in distribution.supported]
    if not supported_names:
        return None

    highest_name = supported_names[-1]
    value_ms = getattr(distribution, highest_name)
    if value_ms is None:
        return None

    return NamedQuantile(highest_name, value_ms)


def quantile_index(n: int, p: float) -> int:
    """Return the index of quantile `p` in `n` >= 1 sorted samples.

    The index is floor(n * p), as in `GetPercentile` of MLPerf LoadGen.
    """
    return min(int(n * p), n - 1)


def quantile_of(values: NDArray[Any], p: float) -> float:
    """Return quantile `p` of at least one value in any order, which is one of the values."""
    index = quantile_index(len(values), p)
    return float(np.partition(values, index)[index])


def needed_samples(p: float) -> int:
    """Return how many samples quantile `p` needs.

    So many samples show, at a confidence of 99 %, that a share of at least `p` is under a limit,
    even if one sample is over the limit.
    """
    return early_stopping.needed_queries(1, p)


def quantile_name(p: float) -> str:
    """Return the field name of a quantile: 0.99 is `p99`, 0.999 is `p99_9`."""
    return "p" + f"{p * 100:.6f}".rstrip("0").rstrip(".").replace(".", "_")


def milliseconds(ns: float) -> float:
    """Return nanoseconds as milliseconds, rounded to a nanosecond."""
    return round(ns / 1e6, 6)


class Sample(Protocol):
    """A sample of values in ns: all of them, or a histogram."""

    @property
    def count(self) -> int:
        """The number of values."""

    def quantile(self, p: float) -> float:
        """Return a quantile of at least one value."""


def quantiles_ms(sample: Sample, shares: Iterable[float]) -> dict[str, float]:
    """Return quantiles of a sample by their names, such as "p99", or {} for an empty sample."""
    if not sample.count:
        return {}
    return {quantile_name(p): milliseconds(sample.quantile(p)) for p in shares}


def distribution_of(values_ns: NDArray[np.int64]) -> Distribution:
    """Return the distribution of values. Each quantile is one of the values."""
    values = Values()
    values.add(values_ns)
    return values.distribution()


def describe_sample(sample: Sample, mean_ns: float, min_ns: int, max_ns: int) -> Distribution:
    """Return the distribution of a sample with at least one value, in milliseconds.

    The result also names the quantiles for which the sample has enough values, NEEDED_SAMPLES.

    Args:
        sample: All values, or a histogram of them, which only gives quantiles.
        mean_ns: The exact mean of the values.
        min_ns: The smallest value.
        max_ns: The largest value.
    """
    quantiles_ms = {name: milliseconds(sample.quantile(p)) for name, p in QUANTILES}
    supported_quantiles = [
        name for name, needed_count in NEEDED_SAMPLES.items() if sample.count >= needed_count
    ]

    return Distribution(
        count=sample.count,
        mean=milliseconds(mean_ns),
        min=milliseconds(min_ns),
        p50=quantiles_ms["p50"],
        p90=quantiles_ms["p90"],
        p95=quantiles_ms["p95"],
        p99=quantiles_ms["p99"],
        p99_9=quantiles_ms["p99_9"],
        max=milliseconds(max_ns),
        supported=tuple(supported_quantiles),
    )


class Values:
    """All values of a sample, so that quantiles are exact. Merging adds the values."""

    def __init__(self) -> None:
        self._arrays: list[NDArray[np.int64]] = []
        self._is_sorted = False  # True if there is only one array, which is sorted

    @classmethod
    def of_arrays(cls, arrays: Iterable[NDArray[np.int64]], max_count: int) -> Values:
        """Return the values of several arrays as one sorted sample, in little memory.

        Args:
            arrays: The arrays. Each can be freed before the next one is computed.
            max_count: An upper bound of the number of values in all arrays.
        """
        sample = cls()
        sample.add(_concatenate_one_by_one(arrays, max_count))
        sample._join_and_sort()
        return sample

    def _join_and_sort(self) -> NDArray[np.int64]:
        """Join all arrays into one sorted array, which is stored instead of them and returned."""
        if self._is_sorted:
            return self._arrays[0]

        if len(self._arrays) != 1:
            self._arrays = [np.concatenate(self._arrays)]
        values = self._arrays[0]

        # The values are often in order already, for example if all are equal. This test is faster
        # than a sort.
        is_ascending = bool((values[1:] >= values[:-1]).all())
        if not is_ascending:
            values.sort()  # changes the array in place

        self._is_sorted = True
        return values

    def add(self, values_ns: NDArray[np.int64]) -> None:
        """Add values, which are kept as int32 if all of them fit."""
        fit_into_int32 = (
            len(values_ns) > 0 and values_ns.min() >= 0 and values_ns.max() < SMALL_VALUE_LIMIT
        )

        self._arrays.append(values_ns.astype(np.int32) if fit_into_int32 else values_ns)
        self._is_sorted = False

    def merge(self, other: Values) -> None:
        """Add the values of another sample. The order of merging does not matter."""
        self._arrays += other._arrays
        self._is_sorted = False

    @property
    def count(self) -> int:
        """The number of values."""
        return sum(map(len, self._arrays))

    def nth(self, index: int) -> float:
        """Return the value at an index of the ordered sample."""
        if self._is_sorted:
            return int(self._arrays[0][index])

        values = np.concatenate(self._arrays)
        return int(np.partition(values, index)[index])

    def quantile(self, p: float) -> float:
        """Return a quantile of at least one value, which is one of the values."""
        return self.nth(quantile_index(self.count, p))

    def distribution(self) -> Distribution:
        """Return the distribution. Each quantile is one of the values, and the mean is exact."""
        count = self.count
        if count == 0:
            return Distribution()

        values = self._join_and_sort()
        smallest = int(values[0])
        largest = int(values[-1])
        mean = _sum_exactly(values, largest) / count
        return describe_sample(self, mean, smallest, largest)


def _concatenate_one_by_one(
    arrays: Iterable[NDArray[np.int64]], max_count: int
) -> NDArray[np.int64]:
    """Return the values of all arrays as one array. Only one of the arrays is in memory at once.

    Args:
        arrays: The arrays.
        max_count: An upper bound of the number of values in all arrays.
    """
    buffer = np.empty(max_count, np.int64)
    count = 0
    for array in arrays:
        end = count + len(array)
        buffer[count:end] = array
        count = end

    return buffer[:count]


def _sum_exactly(values: NDArray[np.int64], largest: int) -> int:
    """Return the sum of values as a Python integer, which does not overflow."""
    # The values are divided into chunks whose sums fit into int64.
    chunk_count = 1 + len(values) * largest // MAX_PARTIAL_SUM
    chunks = np.array_split(values, chunk_count)
    return sum(int(chunk.sum(dtype=np.int64)) for chunk in chunks)


def block_slices(count: int) -> list[slice]:
    """Return slices that divide `count` rows into blocks of BLOCK_ROWS, to save memory."""
    return [slice(first, first + BLOCK_ROWS) for first in range(0, count, BLOCK_ROWS)]


def sort_times(times: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return times in ascending order.

    The stable sort of numpy is the fastest for times that are nearly in order.
    """
    return np.sort(times, kind="stable")


def count_open_spans(
    start_ns: NDArray[np.int64], end_ns: NDArray[np.int64], at_ns: NDArray[np.number]
) -> NDArray[np.int64]:
    """Return how many spans of time are open at each of the times `at_ns`.

    With spans from 1 to 5 and from 2 to 3, there are two open spans at 2, and one at 4. A span that
    never ends has a start and no end.
    """
    # `searchsorted` counts the sorted values up to each time.
    started = np.searchsorted(sort_times(start_ns), at_ns, side="right")
    ended = np.searchsorted(sort_times(end_ns), at_ns, side="right")
    return started - ended


def ks_distance(
    ordered: NDArray[np.float64],
    cdf: Callable[[NDArray[np.float64]], NDArray[np.float64]],
    cdf_below: Callable[[NDArray[np.float64]], NDArray[np.float64]],
) -> float:
    """Return the Kolmogorov-Smirnov distance of sorted values from a distribution.

    The distance is the largest difference, over all x, between the share of the values up to x and
    the probability of the distribution up to x. The share of the values jumps at each value, so the
    difference is computed right below each value and at the value.

    Args:
        ordered: The values, at least one, in ascending order.
        cdf: Returns the probability P(X <= x) of the distribution, for an array of x.
        cdf_below: Returns P(X < x). For a continuous distribution, it is the same function.
    """
    # For 3, 3, 7, 9, the distinct values begin at the indexes 0, 2 and 3. So 0, 2 and 3 values are
    # below 3, 7 and 9, and 2, 3 and 4 values are up to 3, 7 and 9.
    value_count = len(ordered)
    first_index = _first_indexes_of_distinct(ordered)
    count_below = first_index
    count_up_to = np.append(first_index[1:], value_count)

    largest_difference = 0.0
    for block in block_slices(len(first_index)):  # in blocks, to need little memory
        distinct_values = ordered[first_index[block]]
        share_below = count_below[block] / value_count
        share_up_to = count_up_to[block] / value_count

        difference_below = np.abs(share_below - cdf_below(distinct_values)).max()
        difference_up_to = np.abs(share_up_to - cdf(distinct_values)).max()
        largest_difference = max(largest_difference, difference_below, difference_up_to)

    return float(largest_difference)


def _first_indexes_of_distinct(ordered: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the index at which each distinct value begins: 0, 2, 3 for the values 3, 3, 7, 9."""
    differs_from_previous = np.append(True, ordered[1:] != ordered[:-1])
    return np.flatnonzero(differs_from_previous)
