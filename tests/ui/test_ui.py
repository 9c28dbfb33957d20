"""Tests of the result list and of the web server behind `loadgen ui`."""

from __future__ import annotations

import http.client
import json
import os
import re
import time
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any

import msgspec
import pytest
import repository_paths
import run_fixtures
from browser import Browser, find
from scripted_server import answering

import loadgen
from loadgen.cli.app import run_command_line
from loadgen.core.metrics.summary import NamedSummary, Summary, dump_summary, load_summary
from loadgen.pricing.price_file import load_prices
from loadgen.repeated.capacity import Capacity, dump_capacity
from loadgen.repeated.repeats import summarize_repeats
from loadgen.search.experiment import ExperimentPlan
from loadgen.ui import page as results_page
from loadgen.ui.charts import Choice
from loadgen.ui.results_list import is_collection, results_in
from loadgen.ui.server import ResultsServer
from loadgen.ui.stored_result import distinct_workloads

DATA = repository_paths.DATA
RAG = load_summary((DATA / "summary_example_rag_gpus.json").read_bytes())
PER_REQUEST = RAG.tokens.steady_output_per_s or 0.0


def _store(folder: Path, summary: Summary = RAG) -> Path:
    folder.mkdir(parents=True)
    (folder / "summary.json").write_bytes(dump_summary(summary))
    return folder


def _at(rate: float, factor: float) -> Summary:
    """Return the example at another load: its tokens and its TPOT multiplied by a factor."""
    tokens = msgspec.structs.replace(RAG.tokens, steady_output_per_s=PER_REQUEST * factor)
    tpot = msgspec.structs.replace(RAG.tpot_ms, p50=(RAG.tpot_ms.p50 or 1.0) * factor)
    return msgspec.structs.replace(
        RAG,
        tokens=tokens,
        tpot_ms=tpot,
        load=msgspec.structs.replace(RAG.load, arrival=f"poisson {rate:g}/s"),
    )


def grew(run: Path, unix_s: float) -> None:
    """Set the modification time of the files by this process's clock.

    The clock of the file system may differ.
    """
    for file in (*(run / "spool").iterdir(), run / "run.json"):
        os.utime(file, (unix_s, unix_s))


@pytest.fixture
def results(tmp_path: Path) -> Path:
    root = tmp_path / "results"
    _store(root / "one-run")
    _store(root / "<b>odd & name")
    for rate, factor in ((1, 1.0), (2, 1.5), (4, 2.0)):
        _store(root / "swept" / f"r{rate}", _at(rate, factor))
    (root / "swept" / "plan.json").write_text("{}")
    rate = Capacity(
        rate_per_s=2.0, low_per_s=1.9, high_per_s=2.2, method="sweep", recipe="r", evidence="r2"
    )
    (root / "swept" / "capacity.json").write_bytes(dump_capacity(rate))
    _store(root / "deep" / "er" / "run")
    (root / "damaged").mkdir()
    (root / "damaged" / "summary.json").write_text("{")
    going_on = root / "going-on"
    run_fixtures.write(going_on)
    grew(going_on, time.time())
    (going_on / "notes").mkdir()
    return root


def test_the_list_has_every_result_and_nothing_else(results: Path) -> None:
    stored_results_by_name = {result.name: result for result in results_in(results)}

    assert stored_results_by_name.keys() == {
        "one-run",
        "<b>odd & name",
        "swept",
        "deep/er/run",
        "damaged",
        "going-on",
    }
    assert (stored_results_by_name["swept"].kind, stored_results_by_name["one-run"].kind) == (
        "sweep",
        "run",
    )
    assert (
        stored_results_by_name["damaged"].curve is None
        and "cannot be read" in stored_results_by_name["damaged"].reported_outcome
    )
    assert stored_results_by_name["going-on"].is_running


def test_a_run_whose_files_stopped_growing_is_not_running(results: Path) -> None:
    grew(results / "going-on", time.time() - 60)
    stored_results_by_name = {result.name: result for result in results_in(results)}
    assert not stored_results_by_name["going-on"].is_running


def test_a_search_without_a_capacity_is_listed_as_a_search(tmp_path: Path) -> None:
    _store(tmp_path / "s" / "r1")
    plan = ExperimentPlan(
        command_name="search",
        load_kind="request_rate",
        workload="qa",
        source_text="",
        target="t",
        options={},
    )
    (tmp_path / "s" / "plan.json").write_bytes(msgspec.json.encode(plan))

    assert [result.kind for result in results_in(tmp_path)] == ["search"]


def test_runs_next_to_a_damaged_plan_are_reported(
    results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command_line(["report", str(results / "swept"), "--no-html"]) == 0
    assert "4/s" in capsys.readouterr().out


def test_the_interval_of_a_capacity_is_in_tokens_per_second(results: Path) -> None:
    (swept,) = (result for result in results_in(results) if result.name == "swept")
    assert swept.interval is not None
    assert (swept.interval.low, swept.interval.high) == pytest.approx(
        (PER_REQUEST * 1.5 / 2 * 1.9, PER_REQUEST * 1.5 / 2 * 2.2)
    )


def _invalid(summary: Summary) -> Summary:
    """Return the same run with an INVALID verdict."""
    verdict = msgspec.structs.replace(summary.verdict, valid=False, reasons=("too few",))
    return msgspec.structs.replace(summary, verdict=verdict)


def _store_repeats(folder: Path, *repeats: Summary) -> None:
    """Store runs in a folder as `run --repeat` leaves it."""
    named_summaries = [
        NamedSummary(f"r{number}", summary) for number, summary in enumerate(repeats, 1)
    ]
    for name, summary in named_summaries:
        _store(folder / name, summary)
    (folder / "repeats.json").write_bytes(msgspec.json.encode(summarize_repeats(named_summaries)))


def test_repeats_are_listed_with_their_mean(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """List a server with one lucky run of three below one that is faster on average."""
    _store_repeats(tmp_path / "lucky", _at(2, 0.7), _at(2, 0.7), _at(2, 1.3))
    _store_repeats(tmp_path / "steady", _at(2, 1.0), _at(2, 1.0), _at(2, 1.0))

    assert run_command_line(["report", str(tmp_path), "--json"]) == 0
    listed = {document["name"]: document for document in json.loads(capsys.readouterr().out)}
    assert listed["lucky"]["shown"]["output_tokens_per_s"] == pytest.approx(PER_REQUEST * 0.9)
    assert listed["steady"]["shown"]["output_tokens_per_s"] == pytest.approx(PER_REQUEST)
    assert listed["lucky"]["loads"] == 1

    chart = _chart(results_page.render("r", results_in(tmp_path), version="1", served=True))
    points = {series["name"]: series for series in chart["series"] if series.get("name")}
    assert len(points["lucky"]["y"]) == 1 and points["lucky"]["links"] == ["result/lucky/"]


def test_the_mean_of_repeats_excludes_an_invalid_one(tmp_path: Path) -> None:
    _store_repeats(tmp_path / "a", _at(2, 1.0), _at(2, 1.0), _invalid(_at(2, 7.0)))
    (stored_result,) = results_in(tmp_path)
    assert (
        stored_result.selected_load_point is not None
        and stored_result.selected_load_point.output_per_s == pytest.approx(PER_REQUEST)
    )
    assert "1 of 3 INVALID" in stored_result.outcome


def test_a_repeated_sweep_is_listed_with_the_mean_of_its_best_load(tmp_path: Path) -> None:
    folder = tmp_path / "swept"
    levels: dict[str, list[NamedSummary]] = {"r1": [], "r2": []}
    for number, factor in ((1, 1.0), (2, 1.4)):
        for level, rate in (("r1", 1), ("r2", 2)):
            name = f"r{number}/{level}"
            summary = _at(rate, factor * rate)
            load = msgspec.structs.replace(summary.load, offered_rps=float(rate))
            summary = msgspec.structs.replace(summary, load=load)
            _store(folder / name, summary)
            levels[level].append(NamedSummary(name, summary))
    repeat_summaries_by_name = {
        level: summarize_repeats(named_summaries) for level, named_summaries in levels.items()
    }
    (folder / "repeats.json").write_bytes(msgspec.json.encode({"levels": repeat_summaries_by_name}))
    (stored_result,) = results_in(tmp_path)

    assert len(stored_result.load_points) == 2
    assert (
        stored_result.selected_load_point is not None
        and stored_result.selected_load_point.output_per_s == pytest.approx(PER_REQUEST * 2.4)
    )


@pytest.mark.parametrize("objectives", [("+answers:95%",), ("answers:95%",)])
def test_the_list_says_that_a_run_does_not_decide_its_slo(
    tmp_path: Path, objectives: tuple[str, ...]
) -> None:
    loadgen.run(
        "qa",
        url="sim:gb300-vm",
        check_answers=str(repository_paths.ROOT / "examples" / "questions.jsonl"),
        slo=objectives,
        seed=1,
        out=tmp_path / "undecided",
    )
    _store(tmp_path / "decided")

    results_by_name = {result.name: result for result in results_in(tmp_path)}

    assert results_by_name["undecided"].runs[0].slo_undecided
    assert not results_by_name["decided"].runs[0].slo_undecided
    assert "SLO undecided" in results_by_name["undecided"].outcome
    assert "SLO undecided" in results_page.render_text(list(results_by_name.values()))


def test_only_a_folder_of_several_results_is_a_collection(results: Path) -> None:
    assert is_collection(results)
    assert not is_collection(results / "swept") and not is_collection(results / "one-run")
    assert not is_collection(results / "nothing")


def test_the_report_of_a_folder_writes_one_page(
    results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command_line(["report", str(results)]) == 0
    assert "swept" in capsys.readouterr().out

    page = (results / "report.html").read_text()
    charts = json.loads(re.findall(r'id="charts">(.*?)</script>', page)[0])
    assert charts[0]["y"]["label"] == "output tokens/s per GPU"
    of_sweep = next(series for series in charts[0]["series"] if series.get("name") == "swept")
    assert of_sweep["y"] == pytest.approx(
        [PER_REQUEST * f / (RAG.target.gpus or 1) for f in (2.0, 1.5, 1.0)]
    )
    assert of_sweep["labels"] == ["4/s", "2/s", "1/s"]  # as asked for, not as drawn by chance
    assert "<b>odd" not in page and "&lt;b&gt;odd &amp; name" in page


def test_only_selected_results_are_drawn_and_filtered_results_are_listed(results: Path) -> None:
    stored_results = results_in(results)

    assert [
        result.name
        for result in results_page.select_results_to_draw(stored_results, Choice(names=("swept",)))
    ] == ["swept"]

    page = results_page.render(
        "results",
        stored_results,
        Choice(names=("swept",)),
        version="1",
        filter_text="SWEPT",
        served=True,
    )

    assert 'value="swept" checked' in page and "result/one-run/" not in page


@pytest.fixture
def server(results: Path) -> Iterator[ResultsServer]:
    with answering(ResultsServer(results, 0, None)) as running:
        yield running


def _get(server: ResultsServer, path: str, host: str = "", method: str = "GET") -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    headers = {"Host": host} if host else {}
    connection.request(
        method, path if path.startswith("/") else f"/{server.token}/{path}", headers=headers
    )
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text


def test_the_ui_server_listens_on_loopback_and_serves_every_linked_page(
    server: ResultsServer,
) -> None:
    assert server.server_address[0] == "127.0.0.1"
    assert server.address.endswith(f"/{server.token}/")
    status, page = _get(server, "")
    assert status == 200 and "swept" in page
    for link in set(re.findall(r'href="((?:result/|live\?)[^"]*)"', page)):
        assert _get(server, unescape(link))[0] == 200
    status, page = _get(server, "compare?r=one-run&r=deep/er/run")
    assert status == 200 and "TTFT" in page


@pytest.mark.parametrize(
    ("path", "host"),
    [
        ("/", ""),
        ("/wrong/", ""),
        ("/../etc/passwd", ""),
        ("", "evil.example"),
        ("", "127.0.0.1"),
        ("", "localhost:1"),
    ],
)
def test_a_request_without_the_token_or_for_another_host_is_refused(
    server: ResultsServer, path: str, host: str
) -> None:
    status, page = _get(server, path, host)
    assert status == 403 and "swept" not in page


@pytest.mark.parametrize("name", ["../..", "/etc", "swept/../..", "nowhere", "", ".", "a%00b"])
def test_the_ui_server_opens_no_file_outside_its_folder(server: ResultsServer, name: str) -> None:
    status, page = _get(server, f"result?r={name}")
    assert status == 200 and "Cannot be shown" in page and "root:x:" not in page


def test_the_ui_server_writes_no_file(server: ResultsServer, results: Path) -> None:
    before = sorted(str(path) for path in results.rglob("*"))
    for link in ("", "result?r=swept", "compare?r=one-run&r=deep/er/run", "live?r=going-on"):
        _get(server, link)
    assert sorted(str(path) for path in results.rglob("*")) == before
    assert _get(server, "", method="POST")[0] == 501
    assert _get(server, "", method="HEAD") == (200, "")


def _chart(page: str) -> dict[str, Any]:
    first_document: dict[str, Any] = json.loads(re.findall(r'id="charts">(.*?)</script>', page)[0])[
        0
    ]
    return first_document


def _with_other_objective(limit_ms: float, **of_target: Any) -> Summary:
    """Return the example with another TPOT objective and another target."""
    slo = tuple(
        msgspec.structs.replace(term, limit_ms=limit_ms)
        for term in RAG.goodput.slo
        if term.metric == "tpot"
    )
    assert slo
    goodput = msgspec.structs.replace(RAG.goodput, slo=slo)
    return msgspec.structs.replace(
        RAG, goodput=goodput, target=msgspec.structs.replace(RAG.target, **of_target)
    )


def test_the_chart_has_one_workload_and_the_list_greys_out_others(results: Path) -> None:
    """Requests of another length are another workload. It is drawn when it is chosen."""
    tokens = msgspec.structs.replace(RAG.tokens, output=(RAG.tokens.output or 0) * 4)
    _store(results / "long", msgspec.structs.replace(RAG, tokens=tokens))
    stored_results = results_in(results)
    short = results_page.select_results_to_draw(stored_results, Choice(workload_of="one-run"))

    assert {result.name for result in short} == {"one-run", "<b>odd & name", "swept", "deep/er/run"}
    assert [
        result.name
        for result in results_page.select_results_to_draw(
            stored_results, Choice(names=("one-run",), workload_of="long")
        )
    ] == ["long"]
    assert len(distinct_workloads(stored_results)) == 2

    page = results_page.render(
        "results", stored_results, Choice(workload_of="one-run"), version="1", served=True
    )
    (grey,) = re.findall(r'<tr class="soft".*?</tr>', page)

    assert 'value="long"' in grey and "1 other workload not drawn" in page
    assert "about 1,320 input, 1,200 output tokens" in page


def test_each_slo_limit_has_the_color_of_its_result(tmp_path: Path) -> None:
    _store(tmp_path / "a", _with_other_objective(80, shape="A100"))
    _store(tmp_path / "b", _with_other_objective(60, shape="H100"))
    stored_results = results_in(tmp_path)
    chart = _chart(results_page.render("r", stored_results, version="1"))
    colors = {series["name"]: series["color"] for series in chart["series"] if series.get("name")}

    assert {(mark["label"], mark["color"]) for mark in chart["marks"]} == {
        ("SLO: TPOT ≤ 80 ms", colors["a"]),
        ("SLO: TPOT ≤ 60 ms", colors["b"]),
    }
    assert "bands" not in chart

    _store(tmp_path / "c", _with_other_objective(60, shape="H100"))
    drawn_chart = _chart(
        results_page.render("r", results_in(tmp_path), Choice(color_by="hardware"), version="1")
    )
    named = {
        series["name"]: series["color"] for series in drawn_chart["series"] if series.get("name")
    }

    assert named["H100: b"] == named["H100: c"] != named["A100: a"]

    same = _chart(
        results_page.render("r", results_in(tmp_path), Choice(names=("b", "c")), version="1")
    )

    assert [band["label"] for band in same["bands"]] == [
        "meets SLO: TPOT ≤ 60 ms"
    ] and "marks" not in same


def test_the_chart_of_costs_names_the_results_without_a_price(tmp_path: Path) -> None:
    _store(tmp_path / "a", _with_other_objective(80, shape="ND128isr_GB300_v6", gpus=4))
    _store(tmp_path / "b", _with_other_objective(80, shape=""))
    example = Path(__file__).parents[2] / "docs" / "prices.example.yaml"
    stored_results = results_in(tmp_path, load_prices(example, accept_sample=True, currency="USD"))
    page = results_page.render("r", stored_results, version="1", currency="USD", served=True)
    charts = json.loads(re.findall(r'id="charts">(.*?)</script>', page)[0])

    assert [chart["y"]["label"] for chart in charts][1:] == ["USD per million output tokens"]
    assert 'value="usd"' in page and "No cost for b." in page
    bare = results_page.render("r", results_in(tmp_path), version="1", served=True)
    assert 'value="usd"' not in bare and "No cost for" not in bare


@pytest.mark.parametrize(
    ("x", "y", "labels"),
    [
        ("e2e", "all", ("E2E latency p50 (s)", "output tokens/s")),
        ("ttft", "gpu", ("TTFT p99 (ms)", "output tokens/s per GPU")),
        ("nonsense", "", ("tokens/s per user (1 / TPOT p50)", "output tokens/s per GPU")),
    ],
)
def test_the_chart_has_the_selected_axes(
    server: ResultsServer, x: str, y: str, labels: tuple[str, str]
) -> None:
    chart = _chart(_get(server, f"?x={x}&y={y}")[1])
    assert (chart["x"]["label"], chart["y"]["label"]) == labels


def test_each_point_links_to_the_page_of_its_run(server: ResultsServer) -> None:
    chart = _chart(_get(server, "?r=swept&r=one-run")[1])
    links = [link for series in chart["series"] for link in series.get("links", ())]
    assert {"result/swept/r4/", "result/one-run/"} <= set(links)
    for link in links:
        status, page = _get(server, link)
        assert status == 200 and "Cannot be shown" not in page


def test_the_page_of_a_result_links_to_the_pages_of_its_runs(server: ResultsServer) -> None:
    """As a browser follows a link: relative to the address of the page."""
    status, page = _get(server, "result/swept/")
    links = {
        link
        for chart in json.loads(re.findall(r'id="charts">(.*?)</script>', page)[0])
        for series in chart["series"]
        for link in series.get("links", ())
    }

    assert status == 200 and links == {"r1/summary.json", "r2/summary.json", "r4/summary.json"}

    for link in links:
        status, page = _get(server, f"result/swept/{link}")
        assert status == 200 and "<h1>" in page and "Cannot be shown" not in page

    assert "Cannot be shown" in _get(server, "result/../../etc/")[1]
    assert f'href="/{server.token}/"' in _get(server, "result/nowhere/")[1]


def test_a_shared_page_has_only_the_drawn_results(server: ResultsServer) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    connection.request("GET", f"/{server.token}/share?r=swept")
    answer = connection.getresponse()
    page = answer.read().decode()
    connection.close()

    assert answer.getheader("Content-Disposition") == 'attachment; filename="results.html"'
    body = page.partition("<body>")[2].replace('<a href="#glossary">', "")
    assert "swept" in page and "one-run" not in page and "href=" not in body
    assert server.token not in page and _chart(page)["series"]


def test_a_list_with_a_running_run_refreshes_itself(results: Path) -> None:
    page = results_page.render("results", results_in(results), version="1", served=True)
    assert 'http-equiv="refresh"' in page
    grew(results / "going-on", time.time() - 60)
    assert 'http-equiv="refresh"' not in results_page.render(
        "r", results_in(results), version="1", served=True
    )


@pytest.mark.processes
def test_keys_and_pointer_select_points_and_zoom(results: Path, tmp_path: Path) -> None:
    if find() is None:
        pytest.skip("no Chromium on this machine (Debian: apt-get install chromium)")
    page = tmp_path / "page.html"
    page.write_text(
        results_page.render("results", results_in(results), Choice(names=("swept",)), version="1")
    )
    ticks = (
        "[...document.querySelectorAll('figure svg text[text-anchor=middle]')]"
        ".map(t => t.textContent).join()"
    )
    hidden = "document.querySelector('.all').hidden"
    with Browser() as browser:
        browser.set_view(width=1400, height=900)
        browser.open(page)
        initial_ticks = browser.evaluate(ticks)
        browser.evaluate("document.querySelector('figure svg').focus()")
        texts = []
        for key in ("ArrowRight", "ArrowRight", "Home", "End"):
            browser.call("Input.dispatchKeyEvent", type="keyDown", key=key)
            texts.append(browser.evaluate("document.querySelector('.tip').textContent"))
        assert (
            all("swept" in text for text in texts) and texts[0] == texts[2] != texts[1] != texts[3]
        )
        browser.call("Input.dispatchKeyEvent", type="keyDown", key="+")
        assert browser.evaluate(ticks) != initial_ticks and browser.evaluate(hidden) is False
        browser.call("Input.dispatchKeyEvent", type="keyDown", key="Escape")
        assert browser.evaluate(ticks) == initial_ticks and browser.evaluate(hidden) is True
        for kind, x in (("mousePressed", 500), ("mouseMoved", 700), ("mouseReleased", 900)):
            y = browser.evaluate(
                "document.querySelector('figure svg').getBoundingClientRect().top + 100"
            )
            browser.call(
                "Input.dispatchMouseEvent",
                type=kind,
                x=x,
                y=y,
                button="left",
                buttons=1,
                clickCount=1,
            )
        assert browser.evaluate(ticks) != initial_ticks
        browser.evaluate("document.querySelector('.all').click()")
        assert browser.evaluate(ticks) == initial_ticks and browser.complaints == []


@pytest.mark.processes
def test_the_page_fits_phone_and_desktop_screens(results: Path, tmp_path: Path) -> None:
    if find() is None:
        pytest.skip("no Chromium on this machine (Debian: apt-get install chromium)")
    page = tmp_path / "page.html"
    page.write_text(results_page.render("results", results_in(results), version="1", served=True))
    with Browser() as browser:
        for width in (390, 1400, 1920):
            browser.set_view(width=width, height=900)
            browser.open(page)
            assert browser.complaints == [] and browser.requests == []
            assert browser.evaluate("document.documentElement.scrollWidth - window.innerWidth") <= 0
            assert (
                browser.evaluate(
                    "(s => s.scrollWidth - s.clientWidth)(document.querySelector('.scroll'))"
                )
                <= 0
            )
            long_name = "a workload with a long name (about 1,302 input, 1,200 output tokens)"
            browser.evaluate(
                f"document.querySelector('.choice option').textContent = '{long_name}'"
            )
            right_edges = browser.evaluate(
                "[...document.querySelectorAll('.choice select')]"
                ".map(s => s.getBoundingClientRect().right)"
            )
            assert right_edges and max(right_edges) <= width
            outside = browser.evaluate(
                "[...document.querySelectorAll('figure')].flatMap(f => { "
                "const box = f.getBoundingClientRect(); "
                "return [...f.querySelectorAll('svg text')]"
                ".filter(t => t.getBoundingClientRect().right > box.right + 1)"
                ".map(t => t.textContent); })"
            )
            assert outside == []


def test_an_axis_is_logarithmic_if_one_value_is_far_above_the_others(tmp_path: Path) -> None:
    for number, factor in enumerate((1.0, 1.1, 1.2, 40.0)):
        _store(tmp_path / f"run-{number}", _at(2, factor))

    chart = _chart(results_page.render("r", results_in(tmp_path), version="1"))

    assert chart["y"]["log"] is True
    assert "log scale" in chart["y"]["label"]


def test_each_drawn_result_has_a_different_color(tmp_path: Path) -> None:
    for number in range(12):
        _store(tmp_path / f"run-{number}")

    chart = _chart(results_page.render("r", results_in(tmp_path), version="1"))

    assert len({series["color"] for series in chart["series"]}) == 12
