"""Jain's index over tenants, its ends, and how it is told."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest

from loadgen.contracts.tenant_fairness import estimate_jain_index
from loadgen.core.analysis import fairness
from loadgen.core.analysis.fairness import jain_index
from loadgen.core.metrics.sections import Fairness, TenantShare
from loadgen.core.stats.intervals import Interval
from loadgen.render import text
from loadgen.render.section import Report
from loadgen.runs.fairness import fairness_section


def test_jain_index_is_1_for_equal_shares_and_1_over_n_if_one_tenant_has_all() -> None:
    assert jain_index([0.4, 0.4, 0.4]) == pytest.approx(1)
    assert jain_index([1, 0, 0, 0]) == pytest.approx(1 / 4)
    assert jain_index([3, 1]) == pytest.approx(16 / 20)
    assert jain_index([0, 0]) is None and jain_index([]) is None


def test_jain_bounds_are_the_extreme_indexes_of_shares_in_their_intervals() -> None:
    rng = np.random.default_rng(3)
    for _ in range(40):
        ends = np.sort(rng.uniform(0, 1, (3, 2)), axis=1)
        shares = [Interval((low + high) / 2, low, high) for low, high in ends]
        estimate = estimate_jain_index(shares)
        assert estimate is not None and estimate.low <= estimate.value <= estimate.high <= 1 + 1e-12
        grid = [
            jain_index(values) or 1
            for values in itertools.product(*(np.linspace(pair[0], pair[1], 9) for pair in ends))
        ]
        assert estimate.high >= max(grid) - 1e-4, "the most even shares"
        in_order = all(
            lower[1] <= other[1] for lower, other in itertools.pairwise(sorted(ends.tolist()))
        )
        assert not in_order or estimate.low <= min(grid) + 1e-12, "the most uneven ones"

    assert estimate_jain_index([Interval(0, 0, 0.1), Interval(0, 0, 0.1)]) is None


def test_classes_of_a_tenant_are_pooled() -> None:
    assert fairness.group_by_tenant({"a": "x", "b": None, "c": "x"}) == {
        "x": ("a", "c"),
        "b": ("b",),
    }
    assert fairness.group_by_tenant({"a": "x", "b": "x"}) == {} == fairness.group_by_tenant({})


def test_the_report_names_the_tenant_with_the_lowest_share() -> None:
    shares = (
        TenantShare(
            name="x",
            classes=("a", "c"),
            decided=100,
            ok_share=1.0,
            good_share=0.5,
            output_per_s=10.0,
        ),
        TenantShare(name="y", classes=("b",), decided=10, ok_share=1.0, good_share=1.0),
    )
    tenant_fairness = Fairness(tenants=shares, ok_index=1.0, good_index=0.9, worst="x")
    lines = text.render(
        Report(title="", generated_by="", sections=(fairness_section(tenant_fairness),))
    )
    rendered = " ".join(lines.split())

    assert re.findall(r"\d\.\d{3}", rendered) == ["1.000", "0.900"]
    assert rendered.endswith("Served worst: x.")
    assert not fairness_section(None).parts
