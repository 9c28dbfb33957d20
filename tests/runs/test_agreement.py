"""Text, page, list, JSON and JUnit of a result print the same value for each metric."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path

import pytest
from report_text import of_page

import loadgen
from loadgen.cli.app import main
from loadgen.core import format
from loadgen.render import html as as_html
from loadgen.repeated.capacity import describe_sustained_period
from loadgen.runs import kind, outcome
from loadgen.runs.text import render as text
from loadgen.ui import page as results_page
from loadgen.ui.results_list import results_in


def one_line(page: str) -> str:
    """Return the text of a page without markup, scripts and styles."""
    page = re.sub(r"<(script|style)\b.*?</\1>", " ", page, flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", page)).split())


def listed(root: Path) -> dict[str, str]:
    """Return the list row of the only result under a folder, by column heading."""
    (result,) = results_in(root)
    return dict(zip(results_page.LIST_HEAD, results_page._list_cells(result), strict=True))


@pytest.mark.parametrize("name", ["mixed", "agentic", "rag-pipeline"])
def test_goodput_is_never_larger_than_throughput(tmp_path: Path, name: str) -> None:
    """This also holds for request classes with their own SLOs, and for tasks."""
    run = loadgen.run(
        name,
        url="sim:gb300-vm",
        request_rate=4,
        duration="60s",
        warmup=0,
        seed=3,
        out=tmp_path / "r",
    )
    summary = run.summary
    parts = [summary, *summary.classes, *summary.models, *summary.stages]
    rated = [part for part in parts if part.goodput.steady_rps is not None]

    assert summary in rated
    for part in rated:
        assert part.goodput.steady_rps <= part.load.steady_completed_rps  # type: ignore[operator]
        assert part.goodput.rps <= part.load.completed_rps * (1 + 1e-12)  # type: ignore[operator]


@pytest.mark.parametrize("warmup", ["0", "10s"])
def test_goodput_counts_completed_and_not_offered_requests(tmp_path: Path, warmup: str) -> None:
    """Responses of 8 s at 10/s: the window starts before the first of them is complete."""
    workload = {"name": "long", "requests": {"input_tokens": 100, "output_tokens": 400}}
    run = loadgen.run(
        workload,
        url="sim:gb300-vm",
        request_rate=10,
        duration="30s",
        warmup=warmup,
        slo="ttft:10s:p50",
        seed=1,
        out=tmp_path / "r",
    )
    goodput, load = run.summary.goodput, run.summary.load

    assert goodput.share == 1
    assert goodput.steady_rps == pytest.approx(load.steady_completed_rps)


def test_the_goodput_of_tasks_is_measured_in_the_window_of_their_rate(tmp_path: Path) -> None:
    turns = {"count": 4, "tool_result_tokens": 750, "tool_time": "500ms"}
    workload = {
        "name": "tasks",
        "requests": {"input_tokens": 750, "output_tokens": 250, "turns": turns},
        "slo": {"task": {"within": "10m"}},
    }
    run = loadgen.run(
        workload,
        url="sim:gb300-vm",
        request_rate=1,
        duration="240s",
        warmup="60s",
        seed=1,
        out=tmp_path / "r",
    )
    sessions = run.summary.sessions

    assert sessions is not None and sessions.goodput is not None
    assert sessions.goodput.good == sessions.ok
    assert sessions.goodput.steady_rps == pytest.approx(sessions.steady_ok_per_s)


@pytest.mark.parametrize(
    "load",
    [
        {"request_rate": 20, "duration": "20s", "warmup": "5s"},
        {"concurrency": 8, "duration": "20s", "warmup": "5s"},
        {
            "request_rate": 20,
            "num_requests": 60,
            "warmup": 0,
            "max_in_flight": 4,
        },  # most starts are dropped
    ],
)
def test_each_metric_of_a_run_has_the_same_value_in_every_output(
    tmp_path: Path, load: dict[str, object]
) -> None:
    folder = tmp_path / "all" / "r"
    run = loadgen.run(
        "qa", url="sim:h100x8", slo=("ttft:200ms:p90", "tpot:40ms:p90"), seed=1, out=folder, **load
    )  # type: ignore[arg-type]
    document = json.loads((folder / "summary.json").read_text())
    completed, output = (
        document["load"]["steady_completed_rps"],
        document["tokens"]["steady_output_per_s"],
    )
    goodput, share = document["goodput"]["steady_rps"], document["goodput"]["share"]
    ttft, tpot = document["ttft_ms"]["p99"], document["tpot_ms"]["p99"]
    assert None not in (completed, output, goodput, share)
    assert goodput <= completed
    if completed == 0:
        # Requests succeeded, but none ended in the window: a text does not call that a rate.
        completed = None
        goodput = None

    rendered_text = " ".join(text(run.summary).split())
    assert f"completed {format.rate(completed)}" in rendered_text
    assert f"{format.quantity(output)} output tok/s" in rendered_text
    if run.valid:
        assert f"goodput {format.rate(goodput, ' req/s')}" in rendered_text
        assert f"({format.percent(share)})" in rendered_text

    brief = " ".join(text(run.summary, full=False).split())
    assert f"Throughput {format.quantity(completed)} req/s" in brief
    assert f"{format.quantity(output)} output tok/s" in brief
    if run.valid:
        assert f"Goodput {format.quantity(goodput)} req/s; {format.percent(share)}" in brief

    shown_page = as_html.render(kind.report(kind.load(folder)))
    page = one_line(shown_page)
    assert f"Output throughput {format.quantity(output)} tok/s" in page
    assert f"Request throughput {format.rate(completed, ' req/s')}" in page
    if run.valid:
        assert f"SLO attainment {format.percent(share)}" in page
        assert f"goodput {format.quantity(goodput)} req/s" in page

    junit = outcome.build_cases([("r", run.summary)])
    rates = outcome.describe_rates(run.summary)
    assert f"{format.rate(completed, ' req/s')} completed" in rates
    assert f"{format.quantity(output)} output tok/s" in rates
    assert run.valid == junit[0].text.startswith(rates)

    row = listed(folder.parent)
    assert row["tokens/s"] == format.quantity(output)
    for cell, value in ((row["TTFT p99"], ttft), (row["TPOT p99"], tpot)):
        assert cell.removeprefix("~") == format.milliseconds(value)
    valid = document["verdict"]["valid"]
    met = document["goodput"]["met"]
    assert row["outcome"] == (f"VALID, SLO {'met' if met else 'missed'}" if valid else "INVALID")
    assert ("INVALID" in rendered_text) is ("INVALID" in of_page(shown_page)) is not valid
    assert [case.outcome for case in junit[:1]] == ["passed" if valid else "error"]


@pytest.mark.commands
def test_the_capacity_of_a_search_has_the_same_value_in_every_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "all" / "s"
    search = [
        "search",
        "qa",
        "--url",
        "sim:gb300-vm",
        "-d",
        "20s",
        "--low",
        "20",
        "--high",
        "30",
        "--precision",
        "0.2",
    ]
    with pytest.raises(SystemExit):
        main([*search, "--slo", "ttft:2s:p90", "--seed", "1", "-o", str(folder)])
    printed = " ".join(capsys.readouterr().out.split())
    document = json.loads((folder / "capacity.json").read_text())
    rate = f"{document['rate_per_s']:.4g}"
    run = json.loads((folder / document["evidence"] / "summary.json").read_text())
    assert document["output_tokens_per_s"] == run["tokens"]["steady_output_per_s"]
    assert f"{rate} req" in printed

    row = listed(folder.parent)
    bound = "at least " if document["lower_bound"] else ""
    time_covered = describe_sustained_period(document["state"], document["sustained_s"])
    assert row["outcome"] == f"{bound}{rate} requests/s, {document['state']}{time_covered}"
    assert row["tokens/s"] == format.quantity(document["output_tokens_per_s"])
    assert row["TTFT p99"].removeprefix("~") == format.milliseconds(run["ttft_ms"]["p99"])
    assert "shown" not in row["load"]  # the outcome says it

    loaded_result = loadgen.load(folder)
    assert rate in " ".join(loaded_result.text.split()) and rate in one_line(loaded_result.page)
