"""The page of a run: its content, and its display in a real browser without a network."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import numpy as np
import pytest
import run_fixtures
import run_page
from browser import Browser
from command_line import exits
from queueing import fail, rows

from loadgen import result_kinds
from loadgen.core.metrics.columns import UNDEFINED, Columns
from loadgen.core.metrics.summary import Summary
from loadgen.core.metrics.task_summary import Sessions
from loadgen.core.results import store
from loadgen.core.results.manifest import (
    Fingerprints,
    Host,
    RunManifest,
    StagePlan,
    TargetFacts,
    WorkerSample,
)
from loadgen.core.run_folder import OpenedRun, add_server_metrics
from loadgen.core.run_summary import summarize
from loadgen.core.server_metrics.series import FILE, UP, MetricSample
from loadgen.core.sidecars.compactor_process import Compactor
from loadgen.core.stats.histogram import Histogram
from loadgen.core.stats.quantiles import Distribution, needed_samples
from loadgen.render import page
from loadgen.runs import page_data as run_data
from loadgen.runs import percentile_curves
from loadgen.runs.notices import notices
from loadgen.runs.part_sections import statistics_over_targets
from loadgen.runs.rates import select_headline_rates
from loadgen.runs.slo_text import describe_result
from loadgen.runs.tiles import headline_tiles

S = 1_000_000_000


def page_of(folder: Path) -> str:
    stored = store.read_run(folder)
    summary = add_server_metrics(store.read_server_samples(folder), summarize(*stored))
    chart_data = run_data.compute_chart_data(*stored[:5], store.read_heat(folder))
    added = result_kinds.additions_to(folder, OpenedRun(summary, stored))
    return run_page.render(
        summary, stored.manifest, chart_data, store.read_server_samples(folder), added
    )


def summary_of(records: np.ndarray, **changes: object) -> Summary:
    gaps, timeline = run_fixtures.gaps_of(records)
    return summarize(
        run_fixtures.manifest("r", len(records), **changes), records, [gaps], [timeline]
    )


# -- words -----------------------------------------------------------------------------------------


def late(records: np.ndarray) -> np.ndarray:
    records["sent_ns"] = records["due_ns"] + S // 10
    return records


def failing(records: np.ndarray) -> np.ndarray:
    fail(records, 0.1)
    return records


SIMULATED = (TargetFacts(simulated=True, url="http://127.0.0.1:1/v1"),)


@pytest.mark.parametrize(
    ("records", "changes", "expected"),
    [
        (rows(1, 300), {}, []),
        (rows(1, 300), {"targets": SIMULATED}, ["SIMULATED"]),
        (late(rows(1, 300)), {}, ["INVALID"]),
        (failing(rows(1, 300)), {}, []),
        (rows(1, 300), {"state": "interrupted"}, ["INVALID", "INTERRUPTED"]),
        (rows(1, 300), {"state": "running"}, ["CUT OFF"]),
    ],
    ids=["valid", "simulated", "late client", "errors", "interrupted", "cut off"],
)
def test_notices_of_a_page_precede_the_result(
    records: np.ndarray, changes: dict[str, object], expected: list[str]
) -> None:
    summary = summary_of(records, **changes)
    assert [notice.label for notice in notices(summary)] == expected
    text = run_page.render(summary)
    assert all(f"<b>{word}</b>" in text for word in expected)


@pytest.mark.parametrize(("failing", "is_missed"), [(False, False), (True, True)])
def test_requests_lost_with_a_killed_client_do_not_miss_the_slo(
    failing: bool, is_missed: bool
) -> None:
    """The requests lost by kill -9 once made the report say that the SLO is missed."""
    records = rows(1, 300)
    if failing:
        fail(records, 0.5)
    sent_worker_samples = (
        [] if failing else [WorkerSample(t_s=2, sent=400)]
    )  # 100 of them have no record
    summary = summarize(
        run_fixtures.manifest("r", len(records), state="running"),
        records,
        worker_samples=sent_worker_samples,
    )

    assert summary.run.state == "cut_off" and summary.verdict.valid is failing
    assert (summary.requests.lost, summary.requests.failed > 0) == (0 if failing else 100, failing)
    assert ("SLO missed" in describe_result(summary)) is is_missed


def test_a_met_slo_on_too_few_samples_states_the_needed_number() -> None:
    few = describe_result(summary_of(rows(1, 300)))
    enough = describe_result(summary_of(rows(1, 700)))

    assert few.startswith("SLO met: ") and "300 of 300 requests (100 %)" in few
    assert "needs 662 samples" in few and few.endswith("this run has 300.")
    assert "needs" not in enough


def test_a_missed_slo_states_its_value_and_limit() -> None:
    summary = summary_of(rows(1, 300, slower=20))

    result = describe_result(summary)

    assert re.match(r"SLO missed: .* [\d,]+ ms, limit 20,000 ms", result)


def test_a_value_just_above_its_limit_is_printed_with_enough_digits() -> None:
    summary = summary_of(rows(1, 300, slower=20))
    terms = [term for term in summary.goodput.slo if term.met is False]
    missed = [msgspec.structs.replace(term, value_ms=term.limit_ms + 0.03) for term in terms]
    goodput = msgspec.structs.replace(summary.goodput, slo=tuple(missed))

    result = describe_result(msgspec.structs.replace(summary, goodput=goodput))

    assert "20,000.03 ms" in result


def test_the_result_of_a_run_without_slo_states_how_many_requests_succeeded() -> None:
    result = describe_result(summary_of(rows(1, 300), slo=None))

    assert "300 of 300 requests" in result and "(100 %)" in result


def test_a_percentile_that_falls_on_a_request_without_response_has_no_value() -> None:
    result = describe_result(summary_of(failing(rows(1, 300))))

    assert result.startswith("SLO missed") and "without a response" in result


def test_a_tile_with_too_few_samples_for_its_percentile_is_marked() -> None:
    few_tile = headline_tiles(summary_of(rows(1, 300)))[0]  # p99 needs 662 samples
    assert few_tile.value.startswith("~") and "too few samples for p99" in few_tile.note
    assert not headline_tiles(summary_of(rows(1, 700)))[0].value.startswith("~")


def test_tiles_show_rates_of_one_window() -> None:
    summary = summary_of(rows(1, 700))
    load = msgspec.structs.replace(
        summary.load, offered_rps=9.0, completed_rps=7.0, steady_completed_rps=8.0
    )
    goodput = msgspec.structs.replace(summary.goodput, share=1.0, rps=7.0, steady_rps=8.0)
    summary = msgspec.structs.replace(summary, load=load, goodput=goodput)
    *_, completed, within = headline_tiles(summary)

    assert (completed.value, within.note) == ("8.00", "goodput 8.00 req/s")
    assert "9.00 req/s offered" in completed.note

    talk = Sessions(count=7, ok=7, ok_per_s=1.0, steady_ok_per_s=1.0, duration_ms=Distribution())
    *_, completed, within = headline_tiles(msgspec.structs.replace(summary, sessions=talk))
    assert "offered" not in completed.note


# -- figures ---------------------------------------------------------------------------------------


def test_a_curve_ends_at_the_highest_supported_percentile() -> None:
    for n in (11, 64, 662, 6636):
        share = 1 - 10 ** -percentile_curves.highest_supported_position(n)
        assert needed_samples(share - 1e-6) <= n < needed_samples(share + 2e-3 * (1 - share))
    assert percentile_curves.highest_supported_position(1) == 0


def test_points_of_a_percentile_curve_are_samples() -> None:
    values = np.random.default_rng(1).integers(1_000_000, 9_000_000, 500)
    percentile_curve = percentile_curves.curve_of_values("x", values)

    assert percentile_curve is not None
    assert {round(ms * 1e6, -3) for ms in percentile_curve.values_ms} <= {
        float(f"{v:.4g}") for v in values.tolist()
    }
    assert percentile_curve.values_ms[-1] == pytest.approx(values.max() / 1e6, rel=1e-3)
    assert list(percentile_curve.values_ms) == sorted(percentile_curve.values_ms)
    assert percentile_curves.curve_of_values("x", np.full(3, UNDEFINED)) is None


def test_the_number_in_flight_is_the_exact_mean_of_each_bin() -> None:
    records = rows(3, 40)
    bins = run_data.compute_chart_data(run_fixtures.manifest("r", 40), records).load.in_flight
    width = round(bins.width_s * S)
    for i in (0, 7, len(bins.series["in flight"]) - 1):
        low, high = i * width, (i + 1) * width
        busy = sum(
            max(0, min(int(r["done_ns"]), high) - max(int(r["sent_ns"]), low)) for r in records
        )
        assert bins.series["in flight"][i] == pytest.approx(busy / width, rel=1e-3, abs=1e-6)


def test_quantiles_over_time_equal_those_of_each_bin() -> None:
    columns = Columns(rows(4, 2000))
    bins = run_data.quantiles_over_time(
        columns["due_ns"], columns.measure("ttft"), columns.has_status(0), 220.0
    )
    inside = np.sort(columns.measure("ttft")[columns["due_ns"] // round(bins.width_s * S) == 3])
    assert bins.series["p50"][3] == pytest.approx(inside[len(inside) // 2] / 1e6, rel=1e-3)
    assert bins.series["max"][3] == pytest.approx(inside[-1] / 1e6, rel=1e-3)


def test_counts_of_requests_tokens_and_errors_in_charts_equal_those_of_the_records() -> None:
    records = rows(5, 400)
    fail(records, 0.2)
    gaps, timeline = run_fixtures.gaps_of(records)
    chart_data = run_data.compute_chart_data(
        run_fixtures.manifest("r", 400), records, [gaps], [timeline]
    )
    ok = int((records["status"] == 0).sum())

    assert sum(
        v or 0 for v in chart_data.load.request_rates.series["ok"]
    ) * chart_data.load.request_rates.width_s == pytest.approx(ok, rel=1e-3)
    assert sum(
        v or 0 for v in chart_data.load.request_rates.series["scheduled"]
    ) * chart_data.load.request_rates.width_s == pytest.approx(400, rel=1e-3)
    assert sum(v or 0 for v in chart_data.load.errors.series["http_5xx"]) == 400 - ok
    tokens = int(records["output_tokens"][records["status"] == 0].sum())
    assert sum(
        v or 0 for v in chart_data.load.output_rate.series["output"]
    ) * chart_data.load.output_rate.width_s == pytest.approx(tokens, rel=0.02)


def test_the_page_size_does_not_grow_with_the_number_of_requests() -> None:
    few_records, many_records = rows(6, 3000), np.tile(rows(6, 3000), 20)
    sizes = [
        len(
            run_page.render(
                summary_of_rows(records),
                None,
                run_data.compute_chart_data(run_fixtures.manifest("r", len(records)), records),
            )
        )
        for records in (few_records, many_records)
    ]

    assert max(sizes) < 400_000 and sizes[1] < 1.3 * sizes[0]


def summary_of_rows(records: np.ndarray) -> Summary:
    return summarize(run_fixtures.manifest("r", len(records)), records)


def test_the_heat_map_counts_every_gap_in_its_range(tmp_path: Path) -> None:
    stored = store.read_run(run_fixtures.write(tmp_path / "r"))
    lines = store.read_heat(tmp_path / "r")
    cells = run_data.count_inter_chunk_latencies(lines, 30.0)
    assert sum(count for *_, count in cells) == stored.gaps[0].count
    low, high = min(cell[2] for cell in cells), max(cell[3] for cell in cells)
    spread = stored.gaps[0].distribution()
    assert low <= (spread.min or 0) * 1.01 and (spread.max or 0) <= high * 1.01
    assert run_data.count_inter_chunk_latencies(lines[:0], 30.0) == ()


# -- the file --------------------------------------------------------------------------------------


def test_the_page_is_one_file_that_loads_nothing(tmp_path: Path) -> None:
    text = page_of(run_fixtures.write(tmp_path / "r"))
    assert len(text) < 2_000_000
    assert not re.search(r"""(?:src|href)\s*=\s*["'](?!data:|#)|@import|url\(""", text)
    assert "default-src 'none'" in text


def test_the_page_names_the_reader_of_the_sockets(tmp_path: Path) -> None:
    matches = [
        re.findall(
            "sockets read by [a-zA-Z ]*",
            page_of(run_fixtures.write(tmp_path / f"r{read_by}", host=Host(hot_path=read_by))),
        )
        for read_by in ("compiled", "python", "")
    ]
    assert matches == [["sockets read by compiled code"], ["sockets read by Python"], []]


def test_untrusted_text_is_escaped_in_the_page(tmp_path: Path) -> None:
    bad = "</script><script>alert(1)</script><img src=x>"
    records = rows(1, 300)
    fail(records, 0.1)
    records["text"][records["status"] != 0] = 0
    folder = run_fixtures.write(
        tmp_path / "r",
        records,
        texts=(bad,),
        workload=bad,
        source_text=bad,
        command=("loadgen", bad),
        targets=(TargetFacts(url=bad, model=bad),),
        stages=(StagePlan(name=bad, arrival=bad, slots=300),),
    )
    text = page_of(folder)

    assert "<script>alert" not in text and "<img" not in text
    assert text.count("</script>") == 2


def test_a_run_without_records_has_a_page() -> None:
    text = run_page.render(
        summary_of_rows(rows(1, 0)), None, run_data.compute_chart_data(RunManifest(), rows(1, 0))
    )
    assert "INVALID" in text
    assert 'id="time"' in text and 'id="lengths"' in text
    assert "- of memory" not in text and ">-, -" not in text
    assert Histogram().distribution().count == 0


def test_a_run_with_several_targets_has_a_table_of_nodes() -> None:
    records = rows(9, 900)
    records["target"] = np.arange(900) % 3
    nodes = tuple(TargetFacts(name=f"node-{i}", gpus=4) for i in range(3))
    summary = summary_of(records, targets=nodes)
    spread = {name: cells for name, *cells in statistics_over_targets(summary.targets)}
    rates = sorted(select_headline_rates(target).output or 0 for target in summary.targets)
    least, most, mean, median, total = (
        float(cell.replace(",", "")) for cell in spread["output tok/s"]
    )

    assert (least, median, most) == pytest.approx(rates, rel=0.01)
    assert mean == pytest.approx(sum(rates) / 3, rel=0.01) and total == pytest.approx(
        sum(rates), rel=0.01
    )
    assert spread["TTFT p50, ms"][-1] == "-", "times of targets do not add up"
    text = run_page.render(summary)
    assert all(node.name in text for node in nodes) and "over the targets" in text


def test_the_page_has_every_section(tmp_path: Path) -> None:
    text = page_of(run_fixtures.write(tmp_path / "r"))

    for part in (
        "Latency",
        "throughput over time",
        "Lengths and cache",
        "No errors",
        "Client overhead",
        "Definitions",
        "How other tools would have reported this run",
        "How to reproduce",
        "loadgen run chat",
        "b1946ac92492d234",
    ):
        assert part in text


def test_the_report_command_writes_the_page_into_the_run_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run_fixtures.write(tmp_path / "r")

    assert exits("report", str(folder)) == 0
    out, err = capsys.readouterr()
    assert "Measurement  valid" in out and f"page: {folder / 'report.html'}" in err
    assert (folder / "report.html").read_text("utf-8") == page_of(folder)
    other = tmp_path / "other.html"
    assert exits("report", str(folder), "--html", str(other), "--json") == 0
    msgspec.json.decode(capsys.readouterr().out)
    assert other.is_file()
    (folder / "report.html").unlink()
    assert exits("report", str(folder), "--no-html") == 0
    assert not (folder / "report.html").exists()
    assert exits("report", str(folder), "--html", str(tmp_path / "no" / "where.html")) == 2


def test_a_killed_run_is_reported_up_to_its_last_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run_fixtures.write(tmp_path / "r", state="running", ended="")
    for name in ("rows", "seconds", "texts"):  # the last write stopped in its middle
        path = folder / "spool" / f"w0.{name}"
        path.write_bytes(path.read_bytes()[:-17])
    heat = folder / "flows" / "w0.heat"
    heat.write_bytes(heat.read_bytes()[:-5])

    assert exits("report", str(folder)) in (0, 3)
    assert "cut off" in capsys.readouterr().out
    assert "CUT OFF" in (folder / "report.html").read_text()


@pytest.mark.parametrize(
    ("text", "expected_text"),
    [
        ('{"schema": 99, "run": "x"}', "written by a newer loadgen (schema 99"),
        ('{"schema": 0}', "schema 0 does not exist"),
        ("{", "not the manifest of a run"),
        (None, "not the folder of a run"),
    ],
)
def test_a_report_of_a_path_without_a_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, expected_text: str
) -> None:
    if text is not None:
        (tmp_path / "run.json").write_text(text)
    assert exits("report", str(tmp_path)) == 2
    assert expected_text in capsys.readouterr().err


@pytest.mark.processes
def test_a_report_of_damaged_records_or_mixed_runs_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = run_fixtures.write(tmp_path / "both" / "a")
    run_fixtures.write(
        tmp_path / "both" / "b", workload="other", fingerprints=Fingerprints(recipe="0"), slo=None
    )

    assert exits("report", str(tmp_path / "both")) == 2
    assert "values of: workload, SLO" in capsys.readouterr().err
    recorder = Compactor(run_dir)
    assert recorder.finish()

    store.delete_record_log(run_dir)
    file = run_dir / "requests" / store.MERGED
    file_bytes = file.read_bytes()
    for damaged in (file_bytes[:300], b"", file_bytes[:2000] + bytes(4000) + file_bytes[6000:]):
        file.write_bytes(damaged)
        assert exits("report", str(run_dir)) == 2
        assert "records cannot be read" in capsys.readouterr().err


# -- in a browser ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a page with every kind of chart and return its path."""
    records = rows(8, 700)
    draw = np.random.default_rng(8)
    records["input_tokens"] = draw.integers(50, 900, 700)
    records["cached_tokens"] = records["input_tokens"] // 3
    records["asked_output"] = draw.integers(100, 300, 700)
    records["stage"][100:] = 1
    fail(records, 0.03)
    boundary = int(records["due_ns"][100])
    stages = (
        StagePlan(
            name="warm-up", arrival="poisson 10/s", measured=False, slots=100, end_ns=boundary
        ),
        StagePlan(name="load", arrival="poisson 10/s", slots=600, start_ns=boundary),
    )
    folder = run_fixtures.write(tmp_path_factory.mktemp("page") / "r", records, stages=stages)
    sample_values = (
        (t, name, value)
        for t in range(70)
        for name, value in (
            ("vllm:num_requests_running", t % 9),
            ("vllm:num_requests_waiting", t % 4),
            ("vllm:kv_cache_usage_perc", t / 70),
            ("vllm:generation_tokens_total", 2000 * t),
            (UP, 1.0),
        )
    )
    samples = (
        MetricSample(t_s=t, target=0, page="http://h/metrics", name=n, labels="", value=v)
        for t, n, v in sample_values
    )
    (folder / FILE).write_bytes(b"".join(msgspec.json.encode(sample) + b"\n" for sample in samples))
    path = folder / "report.html"
    path.write_text(page_of(folder))
    return path


@pytest.mark.processes
def test_a_browser_reports_no_error_and_renders_every_chart(
    browser: Browser, page_file: Path
) -> None:
    for view_options in ({}, {"dark": True}, {"width": 390, "height": 844}):
        browser.set_view(**view_options)
        browser.open(page_file)
        assert browser.complaints == [] and browser.requests == []
        marks = browser.evaluate(
            "[...document.querySelectorAll('figure')].map(f => ["
            "f.querySelector('figcaption').textContent, "
            "[...f.querySelectorAll('path, circle, rect')]"
            ".filter(n => n.getBoundingClientRect().width > 1).length])"
        )
        assert len(marks) >= 15
        assert [title for title, count in marks if count == 0] == []
        wide = browser.evaluate("document.documentElement.scrollWidth - window.innerWidth")
        assert wide <= 0, "the page is wider than the window"


@pytest.mark.processes
def test_texts_in_charts_of_the_page_do_not_overlap(browser: Browser, page_file: Path) -> None:
    for view_options in ({}, {"width": 390, "height": 844}):
        browser.set_view(**view_options)
        browser.open(page_file)
        over = browser.evaluate(
            "[...document.querySelectorAll('figure')].flatMap(f => { "
            "const texts = [...f.querySelectorAll('svg text')].filter(t => t.textContent)"
            ".map(t => [t.textContent, t.getBoundingClientRect()]); "
            "return texts.flatMap(([a, p], i) => texts.slice(i + 1).filter(([b, q]) => "
            "Math.min(p.right, q.right) - Math.max(p.left, q.left) > 2 && "
            "Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top) > 4)"
            ".map(([b]) => f.querySelector('figcaption').textContent + ': ' + a + ' / ' + b)); })"
        )
        assert over == []


@pytest.mark.processes
def test_text_of_the_page_is_readable_on_a_phone(browser: Browser, page_file: Path) -> None:
    browser.set_view(width=390, height=844)
    browser.open(page_file)
    sizes = browser.evaluate(
        "[...document.querySelectorAll('svg text, p, td, dd, dt')]"
        ".filter(n => n.textContent.trim())"
        ".map(n => parseFloat(getComputedStyle(n).fontSize) * (n.ownerSVGElement ? "
        "n.ownerSVGElement.getBoundingClientRect().width / "
        "n.ownerSVGElement.viewBox.baseVal.width : 1))"
    )

    assert min(sizes) >= 11


@pytest.mark.processes
def test_the_dark_mode_of_the_page_follows_the_system_and_the_theme_button(
    browser: Browser, page_file: Path
) -> None:
    ground = "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)[0]"
    browser.set_view(dark=True)
    browser.open(page_file)

    assert browser.evaluate(ground) < 60
    browser.evaluate("document.getElementById('theme').click()")
    assert browser.evaluate(ground) > 200

    browser.set_view()
    browser.open(page_file)
    assert browser.evaluate(ground) > 200


@pytest.mark.processes
def test_the_page_is_printed_on_few_sheets_with_a_white_background(
    browser: Browser, page_file: Path
) -> None:
    browser.set_view()
    browser.open(page_file)
    data = browser.pdf()

    assert (
        data.startswith(b"%PDF") and data.count(b"/Type /Page\n") + data.count(b"/Type /Page ") >= 3
    )
    browser.set_view(dark=True, media="print")
    assert (
        browser.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    )
    browser.set_view()


@pytest.mark.processes
def test_the_legend_hides_a_line_and_the_pointer_displays_its_values(
    browser: Browser, page_file: Path
) -> None:
    browser.set_view()
    browser.open(page_file)
    lines = "document.querySelector('figure').querySelectorAll('svg path').length"
    before = browser.evaluate(lines)
    browser.evaluate("document.querySelector('.legend button').click()")

    assert browser.evaluate(lines) < before

    browser.evaluate("document.querySelector('.legend button').click()")
    tip = browser.evaluate(
        "(() => { const s = document.querySelector('svg'), b = s.getBoundingClientRect(); "
        "const at = {clientX: b.left + b.width / 2, clientY: b.top + b.height / 2}; "
        "s.dispatchEvent(new PointerEvent('pointermove', at)); "
        "return document.querySelector('.tip').innerText })()"
    )

    assert re.search(r"p\d", tip) and "ms" in tip


@pytest.mark.processes
def test_the_test_browser_reports_requests_and_script_errors(
    browser: Browser, tmp_path: Path
) -> None:
    path = tmp_path / "bad.html"
    path.write_text(
        "<img src='http://example.invalid/x.png'><script>console.error('no'); nothing()</script>"
    )
    browser.open(path)

    assert any("example.invalid" in url for url in browser.requests)
    assert any("no" in text for text in browser.complaints) and any(
        "nothing" in text for text in browser.complaints
    )


@pytest.mark.processes
def test_the_security_policy_of_a_page_blocks_external_images(
    browser: Browser, tmp_path: Path
) -> None:
    sheet = page.Page("x", "x")
    sheet.add_html("<img src='http://example.invalid/x.png'>")
    path = tmp_path / "asks.html"
    path.write_text(sheet.render())
    browser.open(path)
    assert any("Content Security Policy" in text for text in browser.complaints)


def test_curves_from_send_and_due_times_share_their_values_if_no_send_is_late() -> None:
    """In virtual time, of millions: they were measured and put in order twice."""
    records = rows(2, 50)
    late_percentile_curves_by_name = run_data.compute_chart_data(
        run_fixtures.manifest("r", 50), records
    ).percentile_curves

    assert (
        late_percentile_curves_by_name["ttft_from_sent"].values_ms
        != late_percentile_curves_by_name["ttft"].values_ms
    )

    records["sent_ns"] = records["due_ns"]
    at_once = run_data.compute_chart_data(run_fixtures.manifest("r", 50), records).percentile_curves
    assert (
        at_once["ttft_from_sent"].values_ms is at_once["ttft"].values_ms
        and at_once["ttft_from_sent"].name == "TTFT from sent"
    )
