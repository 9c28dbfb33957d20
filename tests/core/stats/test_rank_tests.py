"""Tests by ranks: values computed by hand or by the definition, and properties."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.core.stats.rank_tests import (
    ChangePoint,
    find_change_point,
    find_monotonic_trend,
    relative_linear_growth,
)

SERIES = st.lists(st.integers(1, 30), min_size=4, max_size=24).map(
    lambda values: np.array(values, dtype=np.float64)
)


def mann_kendall_by_definition(values: np.ndarray) -> tuple[int, float]:
    """Return S and its corrected variance, by the formulas of the papers with plain loops."""
    count = len(values)
    score = sum(
        (later > earlier) - (later < earlier) for earlier, later in combinations(values.tolist(), 2)
    )
    ties = [list(values).count(value) for value in set(values)]
    tie_term = sum(size * (size - 1) * (2 * size + 5) for size in ties)
    variance = (count * (count - 1) * (2 * count + 5) - tie_term) / 18

    order = sorted(range(count), key=lambda index: values[index])
    ranks = [order.index(index) + 1 for index in range(count)]
    mean = (count + 1) / 2
    total = sum((rank - mean) ** 2 for rank in ranks)
    correction = 0.0
    for lag in range(1, count):
        products = [
            (ranks[index] - mean) * (ranks[index + lag] - mean) for index in range(count - lag)
        ]
        correlation = sum(products) / total
        if abs(correlation) > 1.96 / math.sqrt(count):
            weight = (count - lag) * (count - lag - 1) * (count - lag - 2)
            correction += weight * correlation
    factor = 1 + 2 / (count * (count - 1) * (count - 2)) * correction
    return int(score), variance * (factor if factor > 0 else 1)


def test_four_rising_values_are_not_enough_for_a_significant_trend() -> None:
    # S = 6 and its variance is 4 * 3 * 13 / 18 = 8.667, so z = 5 / 2.944 = 1.698.
    trend = find_monotonic_trend(np.array([1.0, 2.0, 3.0, 4.0]))
    assert trend.direction == "none"
    assert trend.p_value == pytest.approx(0.0894, abs=1e-4)


def test_five_rising_values_are_a_significant_trend() -> None:
    # S = 10 and its variance is 5 * 4 * 15 / 18 = 16.667, so z = 9 / 4.082 = 2.205.
    rising = find_monotonic_trend(np.arange(5.0))
    assert rising.direction == "up"
    assert rising.p_value == pytest.approx(0.0275, abs=1e-4)
    assert find_monotonic_trend(np.arange(5.0)[::-1]).direction == "down"


@given(SERIES)
def test_the_p_value_of_a_trend_equals_that_of_the_published_formulas(values: np.ndarray) -> None:
    score, variance = mann_kendall_by_definition(values)
    expected = 1.0
    if score and variance > 0:
        z_score = (abs(score) - 1) / math.sqrt(variance)
        expected = math.erfc(z_score / math.sqrt(2))
    assert find_monotonic_trend(values).p_value == pytest.approx(expected, abs=1e-12)


def test_autocorrelation_makes_a_trend_less_significant() -> None:
    # Two waves that rise together: neighbours resemble each other, so there is less evidence.
    waves = np.array([1.0, 2, 3, 4, 5, 6, 5, 4, 3, 4, 5, 6, 7, 8, 9, 8, 7, 6, 5, 6])
    score, _ = mann_kendall_by_definition(waves)
    uncorrected = 20 * 19 * 45 / 18
    without_correction = math.erfc((abs(score) - 1) / math.sqrt(uncorrected) / math.sqrt(2))
    assert without_correction < 0.01
    assert find_monotonic_trend(waves).p_value > without_correction


@given(SERIES, st.floats(0.01, 100), st.floats(-1000, 1000))
def test_a_trend_depends_on_the_order_of_the_values_only(
    values: np.ndarray, scale: float, shift: float
) -> None:
    moved = np.round(values * scale + shift, 6)
    same_ties = len(np.unique(moved)) == len(np.unique(values))
    if same_ties:
        assert find_monotonic_trend(moved) == find_monotonic_trend(values)


def test_equal_values_have_neither_trend_nor_step() -> None:
    equal = np.full(9, 4.0)
    assert find_monotonic_trend(equal).direction == "none"
    assert find_change_point(equal) == ChangePoint(0, 1.0)
    assert relative_linear_growth(equal) == 0


def test_a_step_is_located_at_its_index() -> None:
    # Ranks 1 to 6 come first. U(6) = 2 * 21 - 6 * 13 = -36, so K = 36.
    values = np.array([1.0, 1.1, 1.2, 1.05, 1.15, 1.25, 2.0, 2.1, 2.2, 2.05, 2.15, 2.25])
    step = find_change_point(values)
    assert step.index == 6
    assert step.p_value == pytest.approx(2 * math.exp(-6 * 36**2 / (12**3 + 12**2)))
    assert step.is_significant


@given(SERIES)
def test_pettitts_statistic_equals_its_definition_by_pairs(values: np.ndarray) -> None:
    count = len(values)
    statistics = [
        abs(int(np.sign(values[:length, None] - values[None, length:]).sum()))
        for length in range(1, count)
    ]
    largest = max(statistics)
    expected = min(1.0, 2 * math.exp(-6 * largest**2 / (count**3 + count**2)))
    step = find_change_point(values)
    assert step.p_value == pytest.approx(expected)
    if largest:
        assert statistics[step.index - 1] == largest


@given(SERIES, st.floats(0.001, 1000))
def test_relative_change_does_not_depend_on_the_unit(values: np.ndarray, scale: float) -> None:
    assert relative_linear_growth(values * scale) == pytest.approx(
        relative_linear_growth(values), abs=1e-9
    )


def test_relative_change_is_the_change_along_the_line_over_the_median() -> None:
    assert relative_linear_growth(np.array([10.0, 11.0, 12.0])) == pytest.approx(2 / 11)
    assert relative_linear_growth(np.array([0.0, 0.0, 0.0, 1.0])) == math.inf
