"""Renders the plan of a curve: its regions, its points, its time and cost. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator

from loadgen.core import format
from loadgen.mlperf.endpoints import accuracy_runs, rules
from loadgen.mlperf.endpoints.plan import SECONDS_PER_HOUR, CurvePlan, PointPlan
from loadgen.mlperf.endpoints.points import CurvePoint
from loadgen.mlperf.endpoints.regions import MARGIN_LABEL, REGION_LABELS, Regions
from loadgen.mlperf.text import disclosure_notice
from loadgen.render.section import (
    Bullets,
    Facts,
    Paragraph,
    Report,
    Table,
    section,
    simulated_notice,
)

OFFLINE_LABEL = "Offline"

SIMULATED_RATES = (
    "rates come from a performance model of the preset, which serves a language model of its own"
)


def create_report(plan: CurvePlan) -> Report:
    """Return the report of the plan of a curve, for the terminal and as a page."""
    notices = [disclosure_notice(plan.disclosure)]
    if plan.is_simulated:
        notices = [simulated_notice(SIMULATED_RATES), *notices]

    return Report(
        title=f"MLPerf Endpoints rehearsal, unofficial: plan of {plan.benchmark}",
        generated_by="loadgen mlperf endpoints plan",
        notices=notices,
        headline=[Paragraph(describe_total(plan), large=True)],
        headline_last=True,
        sections=[
            section("", _describe_conditions(plan)),
            section("Regions", regions_table(plan.curve.regions)),
            section("Points", points_table(plan)),
            section("Accuracy runs", Bullets(list(_accuracy_requirements(plan)))),
            section("Before you rent the system", Bullets(list(_warnings(plan)), "warn")),
        ],
    )


def describe_total(plan: CurvePlan) -> str:
    """Return the time and the cost of all points in one sentence."""
    runs = f"{len(plan.points)} points take {format.duration(plan.total_s)} with accuracy runs"
    cost = plan.total_cost
    if cost is None:
        return f"{runs}. Add --price-per-hour for the cost."
    return f"{runs} and cost {cost:,.0f} {plan.currency}."


def describe_region(point: CurvePoint) -> str:
    """Return the region of a point for a table."""
    if point.is_offline_run:
        return OFFLINE_LABEL
    if point.region is None:
        return MARGIN_LABEL
    return _region_label(point.region).removesuffix(" Concurrency")


def regions_table(regions: Regions) -> Table:
    """Return a table of the regions, which are ranges of concurrency, and of the margin above.

    Each region needs at least one measurement point.
    """
    rows = []
    for region in regions.regions:
        is_empty = region.start > region.end
        concurrencies = (
            "empty" if is_empty else format.value_range(f"{region.start:,}", f"{region.end:,}")
        )
        rows.append((region.label, concurrencies, "1"))

    c_max = regions.regions[-1].end
    rows.append(
        (MARGIN_LABEL, format.value_range(f"{c_max + 1:,}", f"{regions.margin_end:,}"), "0")
    )
    return Table(("region", "concurrency", "points at least"), rows)


def points_table(plan: CurvePlan) -> Table:
    """Return a table with the load, the time and the cost of each measurement point."""
    head = ["point", "region", "requests/s", "passes", "run", "accuracy run"]
    if plan.price_per_hour is not None:
        head.append(plan.currency)
    head.append("steady window")
    rows = [_point_row(point_plan) for point_plan in plan.points]
    return Table(head, rows, label_columns=2)


def _point_row(point_plan: PointPlan) -> list[str]:
    """Return the table row of a measurement point.

    The row has a cell for the cost only if the user stated the price of the system. Its last cell
    says whether the run is expected to have a steady window.
    """
    point = point_plan.point
    accuracy_time = format.NONE
    if point.needs_accuracy:
        accuracy_time = format.duration(point_plan.accuracy_s)

    cost_cells = []
    if point_plan.cost is not None:
        cost_cells = [f"{point_plan.cost:,.0f}"]

    return [
        point.name,
        describe_region(point),
        format.quantity(point_plan.requests_per_s),
        f"{point_plan.passes:,}",
        format.duration(point_plan.duration_s),
        accuracy_time,
        *cost_cells,
        _describe_expected_window(point_plan),
    ]


def _describe_expected_window(point_plan: PointPlan) -> str:
    """Return whether the run is expected to have a steady window, in a word or two."""
    if point_plan.misses_window:
        return "MISSED"
    return "not needed" if point_plan.point.is_offline_run else "expected"


def _describe_conditions(plan: CurvePlan) -> Facts:
    """Return what the plan rests on, for the top of the report: benchmark, rates, limits and price.

    C_min and C_max are the lowest and the highest concurrency of the curve. The cohort is the round
    of submissions to which the random seeds (the seed set) belong.
    """
    time_limit = "no limit"
    if plan.max_point_s is not None:
        time_limit = f"at most {format.duration(plan.max_point_s)} for each run"

    price = ""
    if plan.price_per_hour is not None:
        price = f"{plan.price_per_hour:,.2f} {plan.currency}/h"

    return Facts(
        [
            ("Benchmark", f"{plan.benchmark}, {plan.dataset_size:,} samples"),
            ("C_min, C_max", f"{plan.curve.c_min}, {plan.curve.c_max:,}"),
            ("Seed set", f"{plan.seed_set}, cohort {plan.target_cohort}"),
            ("Rates", plan.rate_source),
            ("Time", time_limit),
            ("Price", price),
        ]
    )


def _accuracy_requirements(plan: CurvePlan) -> Iterator[str]:
    """Yield sentences about the accuracy runs that the rules require (section 4.3)."""
    benchmark = rules.find_benchmark(plan.benchmark)
    yield (
        f"Exactly one at each of {accuracy_runs.describe_accuracy_points(plan.curve)}. An accuracy "
        "run at any other point is rejected."
    )
    yield (
        f"Each sends {benchmark.accuracy_samples:,} queries without a salt, right after the "
        "performance run of its point, with the same concurrency on the same instance."
    )
    yield f"Each reaches at least {accuracy_runs.describe_required_scores(benchmark)}."
    yield accuracy_runs.describe_reference_run(benchmark)


def _warnings(plan: CurvePlan) -> Iterator[str]:
    """Yield the rules that the planned curve does not meet, and what to change.

    C_max is the highest concurrency of the curve. The rules allow a very low C_max only with the
    approval of the working group, which is a hint and no error.
    """
    for problem in plan.problems:
        yield f"The curve does not meet the rules: {problem}."

    for point_plan in plan.points:
        if point_plan.misses_window:
            yield _describe_missed_window(point_plan, plan)

    needs_approval = plan.curve.c_max <= rules.MAX_C_MAX_WITH_APPROVAL
    if needs_approval:
        limit = rules.MAX_C_MAX_WITH_APPROVAL
        yield f"A C_max of {limit} or less needs the approval of the working group (section 5.4)."


def _describe_missed_window(point_plan: PointPlan, plan: CurvePlan) -> str:
    """Return why the run of a measurement point is too short for a steady window, with advice.

    A steady window is the part of a run in which the load is constant. A pass sends each sample of
    the data set once.

    Args:
        point_plan: The plan of a point whose run does not fit the limit on time.
        plan: The plan of the curve, with the limit.
    """
    assert plan.max_point_s is not None, "only a limit on time makes a run too short"
    limit = format.duration(plan.max_point_s)
    problem = f"No steady window at {point_plan.point.name}: {point_plan.outlook} in {limit}"

    needed_time = format.duration(point_plan.needed_s)
    need = f"It needs {point_plan.needed_passes} passes, {needed_time}"

    advice = f"Use --max-point-time {_round_up_hours(point_plan.needed_s):g}h"
    lowest_concurrency = plan.lowest_concurrency_in_limit
    if lowest_concurrency is not None and lowest_concurrency > plan.curve.c_min:
        advice += (
            f", or --c-min {lowest_concurrency}, the lowest concurrency with a window in this time"
        )

    return f"{problem}. {need}. {advice}."


def _round_up_hours(seconds: float) -> float:
    """Return a time in hours, rounded up to a tenth of an hour: 2.3 for 8,000 seconds."""
    tenths_of_hours = 10 * seconds / SECONDS_PER_HOUR
    return math.ceil(tenths_of_hours) / 10


def _region_label(name: str) -> str:
    """Return the label of a region of concurrencies, by its name."""
    label_by_name = {str(region_name): label for region_name, label in REGION_LABELS.items()}
    return label_by_name[name]
