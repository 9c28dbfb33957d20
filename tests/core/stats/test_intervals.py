"""Intervals: published quantiles, worked ratios and coverage for correlated runs."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pytest

from loadgen.compare import block_errors
from loadgen.contracts import quantile_interval
from loadgen.contracts.sample_sizes import compute_requests_without_miss
from loadgen.core import seeds
from loadgen.core.stats import intervals, students_t
from loadgen.core.stats.intervals import Interval


def _holds(interval: intervals.Interval, value: float) -> bool:
    return interval.low <= value <= interval.high


@pytest.mark.parametrize(
    ("p", "freedom", "expected"),
    [  # tables of Student's t
        (0.975, 1, 12.7062047),
        (0.975, 4, 2.7764451),
        (0.975, 19, 2.0930241),
        (0.995, 9, 3.2498355),
        (0.95, 100, 1.6602343),
        (0.975, 1e6, 1.9599664),
        (0.025, 4, -2.7764451),
    ],
)
def test_quantiles_of_students_t_equal_tabulated_values(
    p: float, freedom: float, expected: float
) -> None:
    assert students_t.t_quantile(p, freedom) == pytest.approx(expected, abs=2e-5)
    assert students_t.t_cdf(expected, freedom) == pytest.approx(p, abs=1e-7)


def test_the_interval_of_a_mean_of_runs_equals_a_worked_example() -> None:
    interval = intervals.mean_of_runs([10.0, 12.0, 14.0, 16.0, 18.0])
    assert interval.value == 14.0
    assert interval.half_width == pytest.approx(2.7764451 * math.sqrt(10) / math.sqrt(5), abs=1e-5)
    assert not _holds(interval, 9.0) and _holds(interval, 11.0)


@pytest.mark.parametrize("values", [[], [3.0]])
def test_an_interval_of_too_few_values_is_unbounded(values: list[float]) -> None:
    for interval in (intervals.mean_of_runs(values), intervals.batch_means(values)):
        assert (interval.low, interval.high) == (-math.inf, math.inf) or math.isnan(interval.value)
        assert _holds(interval, 1e9)


def _walk(seed: int, n: int, r: float) -> np.ndarray:  # type: ignore[type-arg]
    """Values of mean 0 and variance 1, each correlated by r with the one before."""
    noise = seeds.generator(seed, "walk").standard_normal(n) * math.sqrt(1 - r * r)
    out = np.empty(n)
    value = noise[0] / math.sqrt(1 - r * r)
    for i in range(n):
        value = r * value + noise[i] if i else value
        out[i] = value
    return out


@pytest.mark.parametrize(
    ("r", "n", "least"), [(0.0, 2000, 91), (0.9, 4000, 88), (0.99, 20_000, 85)]
)
def test_intervals_of_batch_means_cover_the_mean_of_correlated_values(
    r: float, n: int, least: int
) -> None:
    """Coin flips would cover it in 9 of 100 runs at r = 0.99."""
    covered = sum(_holds(intervals.batch_means(_walk(seed, n, r)), 0.0) for seed in range(100))
    assert covered >= least


def test_intervals_of_the_block_bootstrap_cover_a_high_quantile() -> None:
    truth = 1.2815516  # p90 of a standard normal
    covered = 0
    for seed in range(40):
        values = _walk(seed, 3000, 0.8)
        interval = block_errors.block_bootstrap(
            values,
            lambda part: float(np.quantile(part, 0.9)),
            seeds.generator(seed, "bootstrap"),
            resamples=200,
        )
        covered += _holds(interval, truth)

    assert covered >= 34


def test_a_ratio_has_the_interval_of_fieller() -> None:
    above, below = [20.0, 22.0, 24.0], [10.0, 11.0, 12.0]
    exact = intervals.ratio_of_means(above, below, paired=True)

    assert (exact.low, exact.high) == (pytest.approx(2.0), pytest.approx(2.0))
    apart = intervals.ratio_of_means(above, below)
    assert apart.low < 2.0 < apart.high
    assert not math.isinf(apart.low)
    assert intervals.ratio_of_means([1.0, 1.1], [-1.0, 1.0]).high == math.inf
    with pytest.raises(ValueError, match="paired"):
        intervals.ratio_of_means([1.0, 2.0], [1.0, 2.0, 3.0], paired=True)


def test_intervals_of_ratios_cover_the_true_ratio() -> None:
    covered = 0
    for seed in range(200):
        rng = seeds.generator(seed, "ratio")
        covered += _holds(
            intervals.ratio_of_means(rng.normal(3.0, 0.3, 6), rng.normal(2.0, 0.4, 6)), 1.5
        )
    assert covered >= 180


def test_degrees_of_freedom_of_welch_equal_a_worked_example() -> None:
    """Two samples of 10, variances of the mean 1 and 4: 25 / (1/9 + 16/9)."""
    assert students_t.welch_degrees_of_freedom(1.0, 9, 4.0, 9) == pytest.approx(25 / (17 / 9))
    assert students_t.welch_degrees_of_freedom(0.0, 9, 0.0, 9) == 18


def test_the_standard_error_of_an_interval_is_that_of_its_mean() -> None:
    assert intervals.mean_of_runs([10.0, 12.0, 14.0, 16.0, 18.0]).standard_error == pytest.approx(
        math.sqrt(2)
    )


def test_intervals_of_wilson_equal_a_worked_example() -> None:
    """Newcombe (1998), table I: 81 of 263, and 0 of 20."""
    assert intervals.wilson_interval(81 / 263, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)
    assert intervals.wilson_interval(0.0, 20) == pytest.approx((0.0, 0.1611), abs=1e-4)
    assert intervals.wilson_interval(0.5, 0) == (0.0, 1.0)
    n = compute_requests_without_miss(0.01)
    assert intervals.wilson_interval(0.0, n)[1] <= 0.01 < intervals.wilson_interval(0.0, n - 1)[1]


def test_the_effective_size_of_correlated_marks_is_smaller() -> None:
    marks = [np.repeat((seeds.generator(1, "marks").random(400) < 0.2).astype(float), 50)]
    sample_size = quantile_interval.estimate_effective_sample_size(marks)
    assert 150 < sample_size < 1000, "20,000 marks in stretches of 50 equal ones: 400 by nature"
    assert quantile_interval.estimate_effective_sample_size([np.zeros(30)]) == 30


def test_marks_in_few_clusters_have_a_small_effective_size() -> None:
    alone, once, often = np.zeros(6000), np.zeros(6000), np.zeros(6000)
    alone[3000], once[3000:3060] = 1, 1
    for start in range(0, 6000, 300):
        often[start : start + 3] = 1

    assert quantile_interval.estimate_effective_sample_size([alone]) == pytest.approx(
        6000, rel=0.01
    ), "a single one is no cluster"
    assert 30 < quantile_interval.estimate_effective_sample_size([once]) < 60, (
        "not the 100 that 60 marks in one piece would be by nature"
    )
    assert quantile_interval.estimate_effective_sample_size([often]) == 6000, "evenly spread"


@pytest.mark.parametrize("memory", [0.0, 0.5])
def test_tolerance_limits_cover_correlated_values(memory: float) -> None:
    """The limit is below the true p99 of a normal law in about 2.5 % of samples of 20."""
    below = 0
    for seed in range(400):
        draw = seeds.generator(seed, "tolerance").normal(size=20)
        values = [draw[0]]
        for value in draw[1:]:
            values.append(memory * values[-1] + math.sqrt(1 - memory**2) * value)
        below += intervals.upper_tolerance_limit(values, 0.99) < NormalDist().inv_cdf(0.99)

    assert below <= (16 if memory == 0 else 24)
    assert intervals.upper_tolerance_limit([1.0, 2.0], 0.99) == math.inf
    assert intervals.upper_tolerance_limit(np.arange(20.0), 0.99) == math.inf, (
        "one long rise is one value"
    )


def test_ratios_of_intervals_cover_the_true_ratio() -> None:
    """Of two means, exponential values: skewed, as latencies are."""
    rng, covered = seeds.generator(2, "quotient"), 0
    for _ in range(200):
        over = intervals.mean_of_runs(rng.exponential(2.0, 40))
        under = intervals.mean_of_runs(rng.exponential(1.0, 40))
        _, low, high = intervals.divide_intervals(over, under)
        covered += low <= 2.0 <= high

    assert 184 <= covered <= 198
    assert (
        intervals.divide_intervals(Interval(1.0, 0.9, math.inf), Interval(1.0, 0.9, 1.1)).high
        == math.inf
    )
    assert math.isnan(
        intervals.divide_intervals(Interval(0.0, 0.0, 1.0), Interval(1.0, 0.9, 1.1)).value
    )


def test_the_length_of_the_start_up_of_a_series_is_estimated() -> None:
    rng = seeds.generator(1, "transient")
    rise = 100 * (1 - np.exp(-np.arange(60) / 4.0)) + rng.normal(0, 1, 60)
    place = intervals.startup_length(rise)
    assert place is not None
    assert 8 <= place <= 25
    assert intervals.startup_length(np.arange(60.0)) is None  # still growing
    assert intervals.startup_length([1.0, 2.0]) is None


def test_growth_of_a_series_is_extrapolated() -> None:
    extrapolated, bound = intervals.extrapolate_growth([5.0 + 0.5 * i for i in range(20)], 10)
    assert (extrapolated, bound) == (pytest.approx(5.0), pytest.approx(5.0))
    flat, high = intervals.extrapolate_growth(seeds.generator(2, "flat").normal(50, 1, 40), 40)
    assert abs(flat) < high < 10
    assert intervals.extrapolate_growth([1.0, 2.0], 5)[1] == math.inf


def test_the_normal_distribution_is_exact_in_both_tails() -> None:
    z = np.linspace(-12, 12, 97)
    exact = np.array([0.5 * math.erfc(-value / math.sqrt(2)) for value in z])
    assert np.allclose(students_t.normal_cdf(z), exact, rtol=1.3e-7, atol=0)
