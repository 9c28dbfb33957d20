"""A histogram of durations that can be merged, and whose quantiles have a bounded relative error.

Pure. Values are integer nanoseconds.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from loadgen.core.stats.quantiles import Distribution, describe_sample, quantile_index

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

MAX_RELATIVE_ERROR = 0.001
"""The largest relative error of a quantile, for values from 1 ns to LARGEST_NS."""

BUCKET_RATIO = 1.0019
"""The ratio of the edges of a bucket. Half a bucket is (ratio - 1) / (ratio + 1) = 0.00095 of its
middle, which leaves something of MAX_RELATIVE_ERROR for rounding."""

LARGEST_NS = 10**14
"""28 hours. Larger values share one bucket, and only their maximum is exact."""

_BUCKETS_PER_LOG2 = 1 / math.log2(BUCKET_RATIO)

BUCKETS = 2 + math.ceil(math.log2(LARGEST_NS) * _BUCKETS_PER_LOG2)
"""The number of buckets, some 17,000, whose counts take 136 kB. Bucket 0 has the values <= 0."""

_FORMAT = 1
"""The first number of a stored histogram. Another format would have another number."""

_HEAD_NUMBERS = 4
"""The numbers before the counts of a stored histogram: format, sum, minimum and maximum."""

_BYTES_PER_NUMBER = 8

_NO_VALUE = 2**63 - 1
"""The minimum of no values; its negative is their maximum."""


def bucket_numbers(values_ns: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the number of the bucket of each value.

    Bucket 0 is for 0 and negative values. Bucket 1 begins at the value 1, and each further bucket
    begins at BUCKET_RATIO times the beginning of the previous one. The last bucket is also for all
    larger values.
    """
    positive_values = np.maximum(values_ns, 1)
    logarithms = np.log2(positive_values) * _BUCKETS_PER_LOG2
    numbers_of_positive = 1 + logarithms.astype(np.int64)

    last_bucket = BUCKETS - 1
    numbers = np.minimum(numbers_of_positive, last_bucket)
    numbers[values_ns <= 0] = 0
    return numbers


class Histogram:
    """Counts of values in buckets whose edges grow by BUCKET_RATIO. Merging adds the counts.

    Count, sum, minimum and maximum are exact. A quantile has a relative error of at most
    MAX_RELATIVE_ERROR, for values up to LARGEST_NS.
    """

    __slots__ = ("counts", "largest_ns", "smallest_ns", "total_ns")

    def __init__(self) -> None:
        self.counts: NDArray[np.int64] = np.zeros(BUCKETS, np.int64)
        self.total_ns = 0
        self.smallest_ns = _NO_VALUE
        self.largest_ns = -_NO_VALUE

    def add(self, values_ns: NDArray[np.int64]) -> None:
        """Count each value once."""
        if len(values_ns) == 0:
            return

        self._extend_range(values_ns)
        self.total_ns += int(values_ns.sum())

        bucket_counts = np.bincount(bucket_numbers(values_ns))
        self.counts[: len(bucket_counts)] += bucket_counts

    def add_repeated(self, values_ns: NDArray[np.int64], repetitions: NDArray[np.int64]) -> None:
        """Count each value as often as it is repeated.

        The values 5 and 8 with the repetitions 3 and 0 are the values 5, 5 and 5.
        """
        is_counted = repetitions > 0
        counted_values_ns = values_ns[is_counted]
        counts_of_values = repetitions[is_counted]
        if len(counted_values_ns) == 0:
            return

        self._extend_range(counted_values_ns)
        sums_ns = counted_values_ns * counts_of_values
        self.total_ns += int(sums_ns.sum())

        # With weights, `bincount` adds up the counts of the values of each bucket, as floats.
        buckets = bucket_numbers(counted_values_ns)
        bucket_counts = np.bincount(buckets, weights=counts_of_values).astype(np.int64)
        self.counts[: len(bucket_counts)] += bucket_counts

    def _extend_range(self, values_ns: NDArray[np.int64]) -> None:
        """Extend the range from the minimum to the maximum so that it includes the values."""
        self.smallest_ns = min(self.smallest_ns, int(values_ns.min()))
        self.largest_ns = max(self.largest_ns, int(values_ns.max()))

    def add_zeros(self, count: int) -> None:
        """Count the value 0 `count` times, without an array of them."""
        if count > 0:
            self.smallest_ns = min(self.smallest_ns, 0)
            self.largest_ns = max(self.largest_ns, 0)
            self.counts[0] += count

    def merge(self, other: Histogram) -> None:
        """Add the counts of another histogram. The order of merging does not matter."""
        self.smallest_ns = min(self.smallest_ns, other.smallest_ns)
        self.largest_ns = max(self.largest_ns, other.largest_ns)
        self.total_ns += other.total_ns
        self.counts += other.counts

    @property
    def count(self) -> int:
        """The number of values."""
        return int(self.counts.sum())

    def quantile(self, p: float) -> float:
        """Return a quantile of at least one value, within MAX_RELATIVE_ERROR of the exact one."""
        return self.nth(quantile_index(self.count, p))

    def nth(self, index: int) -> float:
        """Return the value at an index of the ordered sample, as the middle of its bucket."""
        # The bucket of the value is the first one up to which there are more than `index` values.
        counts_up_to_bucket = np.cumsum(self.counts)
        bucket = int(np.searchsorted(counts_up_to_bucket, index, side="right"))
        return self.bucket_middle(bucket)

    def bucket_middle(self, bucket: int) -> float:
        """Return the value in ns that stands for all values of a bucket.

        This value is the harmonic mean of the edges of the bucket, 2 / (1 / lower + 1 / upper),
        which makes the largest relative error as small as possible. For example, 120 is 20 % from
        both edges of a bucket from 100 to 150.
        """
        if bucket == 0:  # for the values up to 0
            return float(min(0, self.largest_ns))

        # The upper edge is lower_edge * BUCKET_RATIO.
        lower_edge = BUCKET_RATIO ** (bucket - 1)
        harmonic_mean = 2 * lower_edge * BUCKET_RATIO / (1 + BUCKET_RATIO)
        return float(min(max(harmonic_mean, self.smallest_ns), self.largest_ns))

    def bucket_middles(self, buckets: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return `bucket_middle` of many buckets, in one operation on arrays."""
        lower_edges = BUCKET_RATIO ** (buckets - 1.0)
        harmonic_means = 2 * lower_edges * BUCKET_RATIO / (1 + BUCKET_RATIO)
        middles: NDArray[np.float64] = np.clip(harmonic_means, self.smallest_ns, self.largest_ns)
        middle_of_bucket_0 = float(min(0, self.largest_ns))
        return np.where(buckets == 0, middle_of_bucket_0, middles)

    def count_over(self, limit_ns: int) -> int:
        """Return the number of values over a limit, without those in the bucket of the limit."""
        bucket_of_limit = int(bucket_numbers(np.array([limit_ns], np.int64))[0])
        return int(self.counts[bucket_of_limit + 1 :].sum())

    def distribution(self) -> Distribution:
        """Return the distribution. Count, mean, min and max are exact."""
        count = self.count
        if not count:
            return Distribution()
        return describe_sample(self, self.total_ns / count, self.smallest_ns, self.largest_ns)

    def to_bytes(self) -> bytes:
        """Return the histogram as little-endian int64 numbers.

        The numbers are the format, the sum, the minimum and the maximum, and then the counts up to
        the last one that is not zero.
        """
        used_buckets = np.flatnonzero(self.counts)
        used_length = int(used_buckets[-1]) + 1 if len(used_buckets) else 0

        head = np.array([_FORMAT, self.total_ns, self.smallest_ns, self.largest_ns], "<i8")
        counts = self.counts[:used_length].astype("<i8")
        return head.tobytes() + counts.tobytes()

    @classmethod
    def from_bytes(cls, data: bytes) -> Histogram:
        """Return a histogram from the bytes that `to_bytes` returned.

        Raises:
            ValueError: The bytes are not a histogram, or have another format.
        """
        number_count, trailing_bytes = divmod(len(data), _BYTES_PER_NUMBER)
        has_valid_length = _HEAD_NUMBERS <= number_count <= _HEAD_NUMBERS + BUCKETS
        if trailing_bytes or not has_valid_length:
            raise ValueError(f"{len(data)} bytes are no histogram")

        numbers = np.frombuffer(data, "<i8")
        file_format, total_ns, smallest_ns, largest_ns = map(int, numbers[:_HEAD_NUMBERS])
        counts = numbers[_HEAD_NUMBERS:]
        if file_format != _FORMAT or (counts < 0).any():
            raise ValueError(f"no histogram of format {_FORMAT}")

        histogram = cls()
        histogram.total_ns = total_ns
        histogram.smallest_ns = smallest_ns
        histogram.largest_ns = largest_ns
        histogram.counts[: len(counts)] = counts

        return histogram


def merge_histograms(histograms: Iterable[Histogram]) -> Histogram:
    """Return several histograms as one."""
    merged = Histogram()
    for histogram in histograms:
        merged.merge(histogram)
    return merged
