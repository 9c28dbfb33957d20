"""Capacities as they are stored, and the rate that a result was seen to carry."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import repository_paths
from expected_errors import refused
from hypothesis import given
from hypothesis import strategies as st

from loadgen.core.errors import CombinedError, UserError
from loadgen.core.metrics.summary import dump_summary, load_summary
from loadgen.cost.capacity_planning import derive_measured_rate, scale_rate
from loadgen.cost.evidence_reader import read_evidence
from loadgen.cost.size_sources import derive_rate_for_workload
from loadgen.pricing.estimate import Estimate, estimate_rate
from loadgen.pricing.evidence import Evidence
from loadgen.repeated.capacity import Capacity, dump_capacity, load_capacity

DATA = repository_paths.DATA
RAG = load_summary((DATA / "summary_example_rag_gpus.json").read_bytes())
GOOD = {
    "schema": 1,
    "rate_per_s": 20.0,
    "low_per_s": 19.0,
    "high_per_s": 21.5,
    "method": "search",
    "recipe": "r",
}


def test_a_capacity_is_read_unchanged_and_one_without_bounds_has_no_interval():
    capacity = load_capacity(json.dumps(GOOD).encode())

    assert (
        capacity.low_per_s,
        capacity.rate_per_s,
        capacity.high_per_s,
        capacity.unit,
        capacity.evidence,
    ) == (
        19,
        20,
        21.5,
        "requests",
        ".",
    )
    assert load_capacity(dump_capacity(capacity)) == capacity
    assert load_capacity(b'{"schema": 1, "rate_per_s": 3, "method": "sweep"}').low_per_s is None


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"rate_per_s": 0}, "out_of_range"),
        ({"rate_per_s": -3}, "out_of_range"),
        ({"low_per_s": None}, "missing_key"),
        ({"low_per_s": 20.5}, "out_of_range"),
        ({"high_per_s": 19.5}, "out_of_range"),
        ({"low_per_s": 0}, "out_of_range"),
        ({"confidence": 95}, "out_of_range"),
        ({"unit": "users"}, "damaged_file"),
        ({"method": "guess"}, "damaged_file"),
        ({"schema": 2}, "newer_version"),
        ({"rate_per_s": "fast"}, "damaged_file"),
        ({"output_tokens_per_s": -1}, "out_of_range"),
    ],
)
def test_an_invalid_capacity_is_refused_with_its_location(change: dict[str, Any], code: str):
    with refused(UserError, code) as exc_info:
        load_capacity(json.dumps(GOOD | change).encode(), "x/capacity.json")
    assert exc_info.value.where.startswith("x/capacity.json")


@given(st.binary(max_size=40))
def test_any_bytes_load_as_a_capacity_or_raise_a_reported_error(data: bytes):
    with contextlib.suppress(UserError):
        load_capacity(data)


def test_the_rate_of_repeats_has_an_interval_of_students_t():
    estimate = estimate_rate([9.0, 10.0, 11.0, 10.0])
    assert estimate.mid == 10
    assert estimate.high == pytest.approx(10 + 3.1824463 * (2 / 3) ** 0.5 / 2)
    assert estimate_rate([4.0]) == Estimate(mid=4.0)
    assert (estimate_rate([0.1, 10.0]).low or 0) == 0.1  # a rate is positive


def test_rates_are_scaled_by_the_number_of_gpus():
    assert scale_rate(Estimate(mid=10, low=8, high=12.5), 4 / 8) == Estimate(
        mid=5, low=4, high=6.25
    )


def evidence(**capacity: Any) -> Evidence:
    stored_capacity = Capacity(method="search", **capacity) if capacity else None
    return Evidence(name="x", folder="x", summaries=(RAG,), capacity=stored_capacity)


def test_a_single_run_is_counted_by_its_good_requests_and_a_capacity_by_its_rate():
    measured_rate, best = (
        derive_measured_rate(evidence(), 4),
        derive_measured_rate(evidence(rate_per_s=21.0, low_per_s=20.0, high_per_s=22.0), 4),
    )

    assert (
        measured_rate.basis,
        measured_rate.unit,
        measured_rate.rate.mid,
        measured_rate.rate.low,
    ) == (
        "at this load",
        "good requests",
        RAG.goodput.steady_rps,
        None,
    )
    assert (best.basis, best.unit, best.rate.mid, best.rate.high) == (
        "capacity by search",
        "requests",
        21,
        22,
    )
    assert measured_rate.response_s == pytest.approx(10.972, abs=1e-3)


@pytest.mark.parametrize(
    ("profile", "gpus", "code"), [("qa", None, "mismatch"), ("rag", 72, "conflict")]
)
def test_a_capacity_that_contradicts_its_run_is_refused(profile: str, gpus: int | None, code: str):
    with refused(UserError, code):
        derive_rate_for_workload(evidence(), profile, gpus)


def test_an_offline_run_is_refused_as_a_rate_of_users():
    offline_evidence = Evidence(name="x", folder="x", summaries=(RAG,), is_offline=True)
    with refused(UserError, "no_figure"):
        derive_measured_rate(offline_evidence, 4)


def test_a_capacity_is_read_with_the_run_that_it_names_as_evidence(tmp_path: Path):
    (tmp_path / "summary.json").write_bytes(dump_summary(RAG))
    (tmp_path / "capacity.json").write_bytes(json.dumps(GOOD | {"evidence": "confirm"}).encode())
    with refused(CombinedError, "no_result") as exc_info:
        read_evidence([tmp_path], allow_invalid=False)
    assert "capacity.json" in exc_info.value.errors[0].hint
