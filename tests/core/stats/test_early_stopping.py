"""Early stopping against its definition."""

from __future__ import annotations

import itertools

import pytest

from loadgen.core.stats.early_stopping import allowed_over, binomial_cdf, needed_queries


@pytest.mark.parametrize("p", [0.35, 0.5, 0.9, 0.97, 0.99])
@pytest.mark.parametrize("over", range(8))
def test_needed_queries_are_the_fewest_with_an_error_probability_below_one_percent(
    p: float, over: int
) -> None:
    smallest = next(
        queries
        for queries in itertools.count(over + 1)
        if binomial_cdf(queries, over, 1 - p) < 0.01 and queries >= over / (1 - p)
    )
    assert needed_queries(over, p) == smallest


@pytest.mark.parametrize("over", range(1, 8))
def test_one_query_fewer_allows_one_query_fewer_over_the_limit(over: int) -> None:
    queries = needed_queries(over)
    assert allowed_over(queries) == over
    assert allowed_over(queries - 1) == over - 1


def test_too_few_queries_allow_no_query_over_the_limit() -> None:
    assert allowed_over(needed_queries(0)) == 0
    assert allowed_over(needed_queries(0) - 1) == -1
