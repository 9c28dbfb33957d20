"""Interactivity: the speed that one user sees, by three definitions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import exits
from load_point_results import make_load_point_result

from loadgen.core.metrics.interactivity import DEFINITIONS, Interactivity
from loadgen.runs.interactivity_text import describe_interactivity
from loadgen.runs.sweep_curve import mark_pareto_front

pytestmark = pytest.mark.commands


@pytest.fixture(scope="module")
def sweep_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run a small sweep of two loads over a simulated server in virtual time."""
    output_dir = tmp_path_factory.mktemp("interactivity") / "sweep"
    arguments = [
        "sweep",
        "qa",
        "--url",
        "sim:gb300-vm",
        "--request-rate",
        "5,10",
        "-n",
        "30",
        "--seed",
        "1",
    ]
    assert exits(*arguments, "-o", output_dir) == 0
    return output_dir


def test_the_summary_has_interactivity_by_each_definition(sweep_dir: Path) -> None:
    summary = json.loads((sweep_dir / "r5" / "summary.json").read_text("utf-8"))

    speeds = summary["interactivity"]
    assert speeds["tpot50"] == pytest.approx(1000 / summary["tpot_ms"]["p50"])
    assert speeds["endpoints"] == pytest.approx(1000 / summary["tpot_ms"]["p90"])
    e2e_per_token = summary["figures"]["e2e_per_token_ms"]
    assert speeds["agentx"] == pytest.approx(1000 / e2e_per_token["p90"])
    assert speeds["agentx"] < speeds["tpot50"]


def test_the_table_and_the_csv_of_a_sweep_have_interactivity_by_all_definitions(
    sweep_dir: Path,
) -> None:
    header, first_row, _ = (sweep_dir / "curve.csv").read_text("utf-8").splitlines()
    cell_by_column = dict(zip(header.split(","), first_row.split(","), strict=True))

    summary = json.loads((sweep_dir / "r5" / "summary.json").read_text("utf-8"))
    speeds = summary["interactivity"]
    assert float(cell_by_column["tokens_per_s_per_user"]) == pytest.approx(speeds["tpot50"])
    endpoints = cell_by_column["tokens_per_s_per_user_endpoints"]
    assert float(endpoints) == pytest.approx(speeds["endpoints"])
    assert float(cell_by_column["tokens_per_s_per_user_agentx"]) == pytest.approx(speeds["agentx"])


@pytest.mark.parametrize("definition", DEFINITIONS, ids=lambda definition: definition.name)
def test_the_report_draws_the_pareto_chart_by_the_selected_definition(
    sweep_dir: Path, definition: tuple[str, str, str]
) -> None:
    name, formula, _ = definition

    assert exits("report", sweep_dir, "--interactivity", name) == 0

    page_name = "report.html" if name == "tpot50" else f"report-{name}.html"
    page = (sweep_dir / page_name).read_text("utf-8")
    assert f"tokens/s per user ({formula})" in page


def test_the_report_of_a_run_refuses_the_interactivity_option(sweep_dir: Path) -> None:
    arguments = ["report", str(sweep_dir / "r5"), "--interactivity", "agentx", "--no-html"]
    assert exits(*arguments) == 2


def test_the_pareto_front_depends_on_the_definition_of_interactivity() -> None:
    # At the higher throughput, half of the requests are slower and the tail is faster.
    points = [
        make_load_point_result(
            name="low",
            load_label="low",
            load_value=1.0,
            output_per_s=100.0,
            per_user=50.0,
            per_user_endpoints=20.0,
        ),
        make_load_point_result(
            name="high",
            load_label="high",
            load_value=2.0,
            output_per_s=200.0,
            per_user=40.0,
            per_user_endpoints=30.0,
        ),
    ]

    by_tpot50 = mark_pareto_front(points, "tpot50")
    by_endpoints = mark_pareto_front(points, "endpoints")

    assert [point.on_pareto_front for point in by_tpot50] == [True, True]
    assert [point.on_pareto_front for point in by_endpoints] == [False, True]


def test_the_text_of_interactivity_omits_unknown_values() -> None:
    assert describe_interactivity(Interactivity()) == ""
    assert describe_interactivity(Interactivity(endpoints=25.0)) == "25.0 tok/s (MLPerf Endpoints)"
