"""The exact tests of whether failures are more frequent in one part of a sample."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.core.stats.excess_test import Stratum, excess_p_value, sign_test_p_value


def probability_by_counting(strata: list[Stratum]) -> float:
    """Count the ways to choose the failures of each stratum that are at least as extreme."""
    observed = sum(stratum.suspect_failures for stratum in strata)
    ways_by_stratum = [
        {
            in_suspect: math.comb(stratum.suspect_trials, in_suspect)
            * math.comb(stratum.trials - stratum.suspect_trials, stratum.failures - in_suspect)
            for in_suspect in range(stratum.failures + 1)
        }
        for stratum in strata
    ]
    extreme_ways = sum(
        math.prod(ways[count] for ways, count in zip(ways_by_stratum, counts, strict=True))
        for counts in itertools.product(*ways_by_stratum)
        if sum(counts) >= observed
    )
    all_ways = math.prod(math.comb(stratum.trials, stratum.failures) for stratum in strata)
    return extreme_ways / all_ways


def test_fishers_lady_tasting_tea_has_the_published_p_value() -> None:
    assert excess_p_value([Stratum(8, 4, 4, 4)]) == pytest.approx(1 / 70)
    assert excess_p_value([Stratum(8, 4, 4, 3)]) == pytest.approx(17 / 70)


@st.composite
def a_stratum(draw: st.DrawFn) -> Stratum:
    outcomes = draw(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=7))
    return Stratum(
        trials=len(outcomes),
        failures=sum(failed for failed, _ in outcomes),
        suspect_trials=sum(suspect for _, suspect in outcomes),
        suspect_failures=sum(failed and suspect for failed, suspect in outcomes),
    )


@settings(max_examples=200, deadline=None)
@given(st.lists(a_stratum(), min_size=1, max_size=3))
def test_the_p_value_equals_that_of_a_full_enumeration(strata: list[Stratum]) -> None:
    assert excess_p_value(strata) == pytest.approx(probability_by_counting(strata))


def test_questions_that_always_fail_or_never_fail_do_not_count() -> None:
    decisive = Stratum(20, 5, 10, 5)
    always = Stratum(50, 50, 40, 40)
    never = Stratum(50, 0, 40, 0)
    assert excess_p_value([decisive, always, never]) == pytest.approx(excess_p_value([decisive]))
    assert excess_p_value([always, never]) == 1.0
    assert excess_p_value([]) == 1.0


def test_the_p_value_of_many_strata_is_a_probability() -> None:
    strata = [Stratum(200, 100, 100, 50)] * 40
    assert 0.5 < excess_p_value(strata) < 0.53


@pytest.mark.parametrize(
    ("worse", "better", "p_value"),
    [(0, 0, 1.0), (0, 9, 1.0), (5, 0, 1 / 32), (1, 0, 0.5), (2, 1, 0.5), (8, 2, 56 / 1024)],
)
def test_the_p_value_of_the_sign_test_equals_that_of_fair_coins(
    worse: int, better: int, p_value: float
) -> None:
    assert sign_test_p_value(worse, better) == pytest.approx(p_value)
