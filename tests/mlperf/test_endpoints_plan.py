"""The regions, points and plan of a curve of MLPerf Endpoints."""

from __future__ import annotations

import itertools
import json
import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.cli.app import run_command_line
from loadgen.core.errors import OK, SLO_MISSED, UserError
from loadgen.mlperf.endpoints import accuracy_runs, rules
from loadgen.mlperf.endpoints.plan import PlanSettings, plan_curve, plan_point
from loadgen.mlperf.endpoints.points import (
    OfflineChoice,
    build_curve,
    find_structure_problems,
    required_points,
    spread_concurrencies,
)
from loadgen.mlperf.endpoints.rates import ConcurrencyRate, interpolate_rate
from loadgen.mlperf.endpoints.regions import REGION_LABELS, compute_regions
from loadgen.mlperf.endpoints.workloads import draw_salts, draw_samples

APPENDIX_B = [
    (2, 64, (3, 6), (7, 18), (19, 64), 71),
    (2, 128, (3, 7), (8, 27), (28, 128), 141),
    (2, 256, (3, 8), (9, 42), (43, 256), 282),
    (8, 256, (9, 14), (15, 47), (48, 256), 282),
    (8, 512, (9, 16), (17, 71), (72, 512), 564),
    (8, 1024, (9, 18), (19, 109), (110, 1024), 1127),
    (16, 512, (17, 24), (25, 79), (80, 512), 564),
    (16, 1024, (17, 26), (27, 117), (118, 1024), 1127),
    (16, 2048, (17, 29), (30, 176), (177, 2048), 2253),
    (32, 1024, (33, 42), (43, 131), (132, 1024), 1127),
    (32, 4096, (33, 48), (49, 287), (288, 4096), 4506),
    (32, 16384, (33, 57), (58, 676), (677, 16384), 18023),
]
"""Boundaries that Appendix B of the rules publishes: C_min, C_max, three regions, margin."""

SETTINGS = PlanSettings(
    benchmark="llama3.1-8b",
    dataset_size=10_000,
    accuracy_samples=5_000,
    seed_set="A",
    target_cohort="2026-10-C1",
    max_point_s=10_000.0,
    price_per_hour=36.0,
    currency="USD",
)


@pytest.mark.parametrize(("c_min", "c_max", "low", "medium", "high", "margin"), APPENDIX_B)
def test_regions_equal_the_published_table(
    c_min: int,
    c_max: int,
    low: tuple[int, int],
    medium: tuple[int, int],
    high: tuple[int, int],
    margin: int,
) -> None:
    regions = compute_regions(c_min, c_max)
    ends = [(region.start, region.end) for region in regions.regions]
    assert ends == [(1, c_min), low, medium, high]
    assert regions.margin_end == margin


@given(c_min=st.integers(1, 32), c_max=st.integers(33, 100_000))
def test_regions_cover_every_concurrency_once(c_min: int, c_max: int) -> None:
    regions = compute_regions(c_min, c_max).regions
    assert regions[0].start == 1
    assert regions[-1].end == c_max
    for lower, upper in itertools.pairwise(regions):
        assert upper.start == lower.end + 1


@pytest.mark.parametrize(("c_min", "c_max"), [(0, 64), (33, 64), (1, 32)])
def test_regions_outside_the_rules_are_refused(c_min: int, c_max: int) -> None:
    with pytest.raises(UserError) as error:
        compute_regions(c_min, c_max)
    assert error.value.code == "out_of_range"


@pytest.mark.parametrize("c_min", [1, 8, 32])
def test_a_window_lasts_600_s_up_to_a_concurrency_of_32_and_1200_s_above(c_min: int) -> None:
    concurrencies = sorted({c_min, 32, 33, 512, 560})
    curve = build_curve(concurrencies, c_max=512, dataset_size=1000, offline="dedicated")
    windows_s = {point.concurrency: point.min_window_s for point in curve.points}
    assert windows_s == {c_min: 600, 32: 600, 33: 1200, 512: 1200, 560: 1200, 1000: 1200}


@pytest.mark.parametrize("c_max", [64, 512, 4096])
def test_seven_spread_points_cover_every_region_and_reach_c_max(c_max: int) -> None:
    concurrencies = spread_concurrencies(1, c_max, 7)
    assert concurrencies[0] == 1
    assert concurrencies[-1] == c_max
    curve = build_curve(concurrencies, c_max=c_max, dataset_size=13_368, offline="dedicated")
    assert not list(find_structure_problems(curve))
    mandatory = [point.region for point in curve.fixed_points if point.is_mandatory]
    assert mandatory == ["low_latency", "low_concurrency", "med_concurrency", "high_concurrency"]
    assert len(curve.points) == required_points("dedicated") == 8


def test_each_missed_rule_of_a_plan_is_reported_with_its_section() -> None:
    curve = build_curve([1, 2, 900, 2000], c_max=1024, dataset_size=500, offline="dedicated")
    problems = list(find_structure_problems(curve))
    sections = [problem.partition("section ")[2][:5] for problem in problems]
    assert sections == ["5.3)", "5.3)", "5.4)", "5.7.2"]


def test_an_elected_offline_result_needs_a_point_at_c_max() -> None:
    curve = build_curve([1, 4, 40, 512], c_max=512, dataset_size=100, offline="elected")
    assert [point.offline for point in curve.points] == ["none", "none", "none", "elected"]
    with pytest.raises(UserError) as error:
        build_curve([1, 4, 40, 500], c_max=512, dataset_size=100, offline="elected")
    assert error.value.code == "missing_value"


@given(
    st.dictionaries(st.integers(1, 4096), st.floats(0.01, 100), min_size=1, max_size=6),
    st.integers(1, 8192),
)
def test_an_interpolated_rate_lies_between_its_neighbours(
    measured: dict[int, float], concurrency: int
) -> None:
    rates = [ConcurrencyRate(value, response_s) for value, response_s in measured.items()]
    response_s = interpolate_rate(rates, concurrency).response_s
    if concurrency in measured:
        assert response_s == pytest.approx(measured[concurrency])
    if concurrency <= max(measured):
        slack = 1 + 1e-9
        assert min(measured.values()) / slack <= response_s <= max(measured.values()) * slack


def test_the_number_of_passes_of_a_point_follows_from_its_window_and_the_time_limit() -> None:
    curve = build_curve([1, 4, 40, 512], c_max=512, dataset_size=10_000, offline="dedicated")

    def passes(index: int, rate: float, limit_s: float | None) -> tuple[int, str]:
        point = curve.points[index]
        estimate = ConcurrencyRate(point.concurrency, point.concurrency / rate)
        plan = plan_point(
            point,
            estimate,
            dataset_size=10_000,
            accuracy_samples=0,
            max_point_s=limit_s,
            price_per_hour=None,
        )
        return plan.passes, plan.outlook

    assert passes(3, 10.0, None) == (5, "window expected")  # 4 passes and the ramp
    assert passes(3, 100.0, None) == (15, "window expected")  # 1.1 x 1200 s in passes of 100 s
    assert passes(0, 10.0, 3500.0) == (3, "too few passes")
    assert passes(0, 10.0, 900.0) == (1, "less than one pass")
    assert passes(4, 100.0, None) == (14, "not needed")  # Offline: the time, but no window


def test_the_time_and_the_cost_of_a_plan_are_the_sums_of_its_points() -> None:
    curve = build_curve([1, 4, 40, 512], c_max=512, dataset_size=10_000, offline="elected")
    rates = [ConcurrencyRate(1, 1.0), ConcurrencyRate(512, 5.12)]
    plan = plan_curve(curve, rates, SETTINGS, rate_source="test", is_simulated=False)
    first, last = plan.points[0], plan.points[-1]
    assert last.requests_per_s == pytest.approx(100.0)
    assert last.duration_s == pytest.approx(15 * 100 + 5.12)
    assert last.accuracy_s == pytest.approx(50.0)
    assert first.outlook == "too few passes"  # one pass takes the limit of 10,000 s
    assert plan.total_cost == pytest.approx(sum(point.cost or 0 for point in plan.points))
    assert plan.total_cost == pytest.approx(plan.total_s * 0.01)
    assert plan.lowest_concurrency_in_limit is not None
    assert plan.lowest_concurrency_in_limit > 1


def test_samples_and_salts_equal_those_of_the_reference_client() -> None:
    seed_set = rules.find_seed_set("A")
    oracle = random.Random(586478644936801402)
    assert draw_samples(seed_set, 13_368, 100) == [oracle.randint(0, 13_367) for _ in range(100)]
    salts = draw_salts(seed_set)
    thousand_salts = [next(salts) for _ in range(1000)]
    assert len(set(thousand_salts)) == 1000
    assert all(len(bytes.fromhex(salt)) == 8 for salt in thousand_salts)


@pytest.mark.parametrize("name", ["llama2-70b", "gpt-5"])
def test_a_model_outside_the_suite_is_refused(name: str) -> None:
    with pytest.raises(UserError) as error:
        rules.find_benchmark(name)
    assert error.value.code == "unknown_name"
    assert ("loadgen mlperf server" in error.value.hint) == (name == "llama2-70b")


def test_every_benchmark_has_lengths_and_a_size() -> None:
    sizes = {name: rules.dataset_lengths(name).samples for name in rules.load_rules().benchmarks}
    assert sizes == {"llama3.1-8b": 13_368, "gpt-oss-120b": 6_396, "deepseek-r1": 4_388}


@pytest.mark.parametrize(("offline", "runs"), [("dedicated", 5), ("elected", 4)])
def test_each_region_and_the_offline_point_have_exactly_one_accuracy_run(
    offline: OfflineChoice, runs: int
) -> None:
    curve = build_curve([1, 2, 3, 20, 30, 90, 200], c_max=200, dataset_size=13_368, offline=offline)
    points = accuracy_runs.find_accuracy_points(curve)
    assert len(points) == runs
    regions = [point.region for point in points if point.region is not None]
    assert regions == list(REGION_LABELS)
    assert any(point.offline == offline for point in points)


def test_an_accuracy_run_must_reach_99_percent_of_every_published_score() -> None:
    for benchmark in rules.load_rules().benchmarks.values():
        assert benchmark.required_accuracy.keys() == benchmark.accuracy.keys()
        for metric, required in benchmark.required_accuracy.items():
            assert required == pytest.approx(0.99 * benchmark.accuracy[metric])
    text = accuracy_runs.describe_required_scores(rules.find_benchmark("gpt-oss-120b"))
    assert text == "exact_match 82.2987"


def test_the_command_plans_a_simulated_curve(capsys: pytest.CaptureFixture[str]) -> None:
    command = "mlperf endpoints plan -b gpt-oss-120b --c-max 64 --url sim:gb300-vm-128k --json"
    arguments = [*command.split(), "--max-point-time", "500h", "--price-per-hour", "10"]
    assert run_command_line(arguments) == OK
    plan = json.loads(capsys.readouterr().out)
    names = [point["point"]["name"] for point in plan["points"]]
    assert names[0] == "r1"
    assert names[-2:] == ["r64", "offline"]
    rates = [point["requests_per_s"] for point in plan["points"]]
    assert rates == sorted(rates)
    assert all(point["requests"] % 6_396 == 0 for point in plan["points"])
    assert "unofficial" in plan["disclosure"]


def test_a_point_without_a_window_gives_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    command = "mlperf endpoints plan -b llama3.1-8b --c-max 64 --url sim:gb300-vm"
    assert run_command_line([*command.split(), "--max-point-time", "1h"]) == SLO_MISSED
    assert "SIMULATED" in capsys.readouterr().out


@pytest.mark.parametrize(
    "options",
    [
        "--c-max 64",
        "--c-max 64 --url http://localhost:1",
        "--url sim:gb300-vm",
        "--c-max 32 --url sim:gb300-vm",
        "--c-max 64 --points 6 --url sim:gb300-vm",
        "--c-max 64 --offline maybe --url sim:gb300-vm",
        "--c-max 64 --seed-set Z --url sim:gb300-vm",
        "--c-max 64 --max-point-time 0 --url sim:gb300-vm",
        "--concurrency 1,x --url sim:gb300-vm",
    ],
)
def test_invalid_options_of_an_endpoints_plan_are_refused(options: str) -> None:
    with pytest.raises(UserError):
        run_command_line(["mlperf", "endpoints", "plan", "-b", "llama3.1-8b", *options.split()])


def test_a_plan_equals_its_stored_and_decoded_form() -> None:
    curve = build_curve([1, 4, 40, 512], c_max=512, dataset_size=10_000, offline="elected")
    plan = plan_curve(
        curve, [ConcurrencyRate(1, 1.0)], SETTINGS, rate_source="test", is_simulated=False
    )
    assert msgspec.json.decode(msgspec.json.encode(plan), type=type(plan)) == plan
