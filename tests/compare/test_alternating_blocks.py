"""Tests of the statistics of alternating blocks: order, drift, intervals, and false alarms."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.compare.alternating_blocks import (
    FIRST_STAGE_GROUPS,
    MIN_TRIMMED_GROUPS,
    count_needed_groups,
    estimate_difference,
    estimate_trimmed_mean,
    list_groups,
    seed_of_pair,
)
from loadgen.compare.significance import p_value
from loadgen.core.analysis.within_run_variance import ScaledEstimate
from loadgen.core.stats import students_t


@given(seed=st.integers(0, 2**53), count=st.integers(1, 30))
def test_linear_drift_cancels_out_within_every_group_of_blocks(seed: int, count: int) -> None:
    for group in list_groups(seed, count):
        numbers_of_a = [block.number for block in group.blocks if block.side == "A"]
        numbers_of_b = [block.number for block in group.blocks if block.side == "B"]
        assert sum(numbers_of_a) == sum(numbers_of_b)


@given(seed=st.integers(0, 2**53))
def test_the_orders_of_groups_alternate_and_each_pair_has_both_sides(seed: int) -> None:
    groups = list_groups(seed, 6)
    orders = ["".join(block.side for block in group.blocks) for group in groups]
    assert set(orders[::2]) | set(orders[1::2]) == {"ABBA", "BAAB"}
    assert len(set(orders[::2])) == len(set(orders[1::2])) == 1
    blocks = [block for group in groups for block in group.blocks]
    assert [block.number for block in blocks] == list(range(1, 25))
    for pair in range(12):
        sides = {block.side for block in blocks if block.pair == pair}
        assert sides == {"A", "B"}
    assert len({seed_of_pair(seed, pair) for pair in range(12)}) == 12


def test_the_seed_determines_which_side_is_first() -> None:
    first_sides = {list_groups(seed, 1)[0].blocks[0].side for seed in range(20)}
    assert first_sides == {"A", "B"}


@given(st.lists(st.floats(-1, 1), min_size=3, max_size=MIN_TRIMMED_GROUPS - 1))
def test_the_estimate_of_few_groups_equals_that_of_students_t(differences: list[float]) -> None:
    values = np.array(differences)
    estimate = estimate_difference(values)
    assert estimate.value == pytest.approx(values.mean(), abs=1e-12)
    assert estimate.error == pytest.approx(values.std(ddof=1) / math.sqrt(len(values)), abs=1e-12)
    assert estimate.degrees_of_freedom == len(values) - 1


def test_a_trimmed_mean_has_the_error_of_winsorized_values() -> None:
    """Yuen's example by hand: 1..10 without two at each end, and each of these counts as 3 or 8."""
    estimate = estimate_trimmed_mean(np.arange(1.0, 11.0), 2)
    winsorized = np.array([3, 3, 3, 4, 5, 6, 7, 8, 8, 8])
    squares = ((winsorized - winsorized.mean()) ** 2).sum()
    assert estimate.value == 5.5 and estimate.degrees_of_freedom == 5
    assert estimate.error == pytest.approx(math.sqrt(squares / (6 * 5)))


def test_a_trimmed_mean_detects_a_difference_despite_a_few_disturbed_groups() -> None:
    rng = np.random.default_rng(1)
    differences = 0.03 + rng.normal(0, 0.005, 40)
    differences[[3, 17, 30]] += [0.4, -0.5, 0.6]
    assert p_value(estimate_difference(differences)) < 1e-6
    assert p_value(estimate_trimmed_mean(differences, 0)) > 0.05


@pytest.mark.parametrize("count", [5, 10, 20, 40])
@pytest.mark.parametrize("tail", ["normal", "heavy"])
def test_the_false_alarms_of_equal_sides_stay_below_the_level(count: int, tail: str) -> None:
    """4,000 comparisons at 5 %: three standard errors of the count are 1 point."""
    rng = np.random.default_rng(count)
    repeats = 4000
    samples = rng.normal(0, 1, (repeats, count))
    if tail == "heavy":
        samples = rng.standard_t(3, (repeats, count))
    alarms = 0
    for sample in samples:
        estimate = estimate_difference(sample)
        limit = students_t.t_quantile(0.975, estimate.degrees_of_freedom) * estimate.error
        alarms += abs(estimate.value) > limit
    assert alarms / repeats < 0.06


def test_a_number_of_groups_chosen_from_the_data_keeps_false_alarms_below_the_level() -> None:
    """Stein's procedure at 5 %, with the variance of the first stage alone."""
    rng = np.random.default_rng(7)
    repeats = 3000
    half_width = 0.3
    alarms = 0
    counts = []
    for _ in range(repeats):
        first_stage = rng.normal(0, 1, FIRST_STAGE_GROUPS)
        needed = count_needed_groups([estimate_difference(first_stage)], half_width, 0.05)
        further = rng.normal(0, 1, needed - FIRST_STAGE_GROUPS)
        estimate = estimate_difference(np.concatenate([first_stage, further]), is_two_stage=True)
        t_quantile = students_t.t_quantile(0.975, estimate.degrees_of_freedom)
        assert t_quantile * estimate.error <= half_width * (1 + 1e-9)
        alarms += abs(estimate.value) > t_quantile * estimate.error
        counts.append(needed)
    assert alarms / repeats < 0.062
    assert np.std(counts) > 0


def test_more_metrics_need_more_groups_in_the_second_stage() -> None:
    estimate = ScaledEstimate(value=0.0, error=0.01, degrees_of_freedom=FIRST_STAGE_GROUPS - 1)
    groups_for_one_metric = count_needed_groups([estimate], 0.01, 0.01)
    groups_for_four_metrics = count_needed_groups([estimate] * 4, 0.01, 0.01)
    assert FIRST_STAGE_GROUPS < groups_for_one_metric < groups_for_four_metrics
