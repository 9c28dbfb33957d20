"""Quantiles compared with sorting, the binomial rule and every value of the histogram."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.core.stats.histogram import LARGEST_NS, MAX_RELATIVE_ERROR, Histogram
from loadgen.core.stats.quantiles import (
    NEEDED_SAMPLES,
    QUANTILES,
    Distribution,
    distribution_of,
    milliseconds,
    needed_samples,
    quantile_index,
    quantile_name,
)

values = st.lists(st.integers(-5, LARGEST_NS), min_size=1, max_size=60)


def histogram(numbers: list[int]) -> Histogram:
    filled_histogram = Histogram()
    filled_histogram.add(np.array(numbers, np.int64))
    return filled_histogram


@pytest.mark.parametrize(
    ("n", "p", "place"),
    [
        (1, 0.5, 0),
        (2, 0.5, 1),
        (10, 0.5, 5),
        (100, 0.99, 99),
        (101, 0.99, 99),
        (10, 0.999, 9),
        (3, 1.0, 2),
        (662, 0.99, 655),
    ],
)
def test_the_index_of_a_quantile_is_floor_of_n_times_p(n: int, p: float, place: int) -> None:
    assert quantile_index(n, p) == place


def binomial_at_most_one(n: int, p: float) -> float:
    return sum(math.comb(n, k) * (1 - p) ** k * p ** (n - k) for k in (0, 1))


@pytest.mark.parametrize(("key", "p"), QUANTILES)
def test_a_quantile_is_supported_when_early_stopping_allows_one_over(key: str, p: float) -> None:
    n = NEEDED_SAMPLES[key]
    assert binomial_at_most_one(n, p) < 0.01 <= binomial_at_most_one(n - 1, p)
    assert needed_samples(p) == n
    assert quantile_name(p) == key


def test_quantiles_of_values_are_elements_of_the_sample() -> None:
    # 1..200 ms, so that every quantile is its place + 1: p50 at 100, p90 at 180, p95 at 190, p99
    # at 198, p99.9 at 199
    shuffled = np.random.default_rng(1).permutation(np.arange(1, 201) * 1_000_000)

    assert distribution_of(shuffled) == Distribution(
        count=200,
        mean=100.5,
        min=1,
        p50=101,
        p90=181,
        p95=191,
        p99=199,
        p99_9=200,
        max=200,
        supported=("p50", "p90", "p95"),
    )
    assert distribution_of(shuffled[:0]) == Distribution()


@given(values, st.sampled_from([p for _, p in QUANTILES]))
def test_quantiles_of_a_histogram_are_within_the_relative_error(
    numbers: list[int], p: float
) -> None:
    quantile, true = (
        histogram(numbers).quantile(p),
        sorted(numbers)[quantile_index(len(numbers), p)],
    )
    assert abs(quantile - max(true, 0)) <= MAX_RELATIVE_ERROR * true if true > 0 else quantile <= 0


@given(st.lists(values, max_size=4), st.randoms())
def test_histograms_merged_in_any_order_equal_that_of_all_values(
    shards: list[list[int]], random: object
) -> None:
    combined_histogram = Histogram()
    for shard in shards:
        combined_histogram.add(np.array(shard, np.int64))
    merged = Histogram()
    random.shuffle(shards)  # type: ignore[attr-defined]
    for shard in [*shards, []]:
        merged.merge(Histogram.from_bytes(histogram(shard).to_bytes()))

    assert merged.to_bytes() == combined_histogram.to_bytes()
    assert merged.distribution() == combined_histogram.distribution()
    numbers = [number for shard in shards for number in shard]
    assert merged.count == len(numbers)

    if numbers:
        expected = (sum(numbers), min(numbers), max(numbers))
        assert (merged.total_ns, merged.smallest_ns, merged.largest_ns) == expected


@given(values, st.integers(1, LARGEST_NS))
def test_values_over_a_limit_are_counted_within_the_relative_error(
    numbers: list[int], limit: int
) -> None:
    count = histogram(numbers).count_over(limit)
    low, high = (
        sum(number > limit * edge for number in numbers)
        for edge in (1 + 2 * MAX_RELATIVE_ERROR, 1 - 2 * MAX_RELATIVE_ERROR)
    )
    assert low <= count <= high


@pytest.mark.parametrize(
    "data", [b"", b"x" * 40, b"\0" * 33, b"\0" * 32, b"\1" + b"\0" * 8 * 40_000]
)
def test_bytes_that_are_no_histogram_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="histogram"):
        Histogram.from_bytes(data)


def test_milliseconds_are_rounded_to_a_nanosecond() -> None:
    assert milliseconds(1_234_567.4) == 1.234567
    assert milliseconds(1_234_567.6) == 1.234568
