"""Result files of other tools, real and damaged, and exports that are read back."""

from __future__ import annotations

import csv
import io
import json
import re
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import repository_paths
import run_fixtures
import yaml
from command_line import exits
from expected_errors import refused
from hypothesis import given
from hypothesis import strategies as st
from queueing import fail, rows

import loadgen
from loadgen.core.errors import UserError
from loadgen.core.metrics.summary import Summary
from loadgen.core.results import store
from loadgen.core.results.manifest import StagePlan
from loadgen.core.results.parquet import Frame, to_table, write_tables
from loadgen.core.results.record import KINDS, STATUSES
from loadgen.core.run_summary import summarize
from loadgen.formats import definitions_of
from loadgen.interop import aiperf_records, benchmark_report, export, export_mlcommons, reader
from loadgen.interop import text as other_tools
from loadgen.interop.sample_statistics import (
    PooledGaps,
    WeightedValues,
    interpolated_percentiles,
)
from loadgen.interop.tool_samples import compute_tool_samples
from loadgen.mlperf import loadgen_log
from loadgen.render import html as as_page
from loadgen.render import text as as_text
from loadgen.runs import records_csv, request_gaps
from loadgen.runs.export import json_parts

DATA = repository_paths.DATA / "rivals"
EXPORTED_FIELDS = repository_paths.ROOT / "docs/reference/exports.md"
FILES = {
    "vllm_bench_serve.json": "vllm bench serve",
    "sglang_bench_serving.jsonl": "SGLang bench_serving",
    "aiperf_profile_export.json": "AIPerf",
    "aiperf_profile_export.jsonl": "AIPerf",
    "guidellm_benchmarks.json": "GuideLLM",
    "inference_perf_summary_lifecycle_metrics.json": "inference-perf",
    "genai_bench_concurrency.json": "genai-bench",
    "mlcommons_endpoints_result_summary.json": "mlcommons/endpoints",
}


@pytest.mark.parametrize(("name", "tool"), FILES.items())
def test_real_files_of_other_tools_are_recognised(name: str, tool: str) -> None:
    foreign_result = reader.read_result(DATA / name)
    assert foreign_result.tool == tool and foreign_result.counts == definitions_of(tool)
    assert foreign_result.metrics["e2e_ms.p50"] > foreign_result.metrics["ttft_ms.p50"] > 0
    assert foreign_result.metrics["requests.ok"] > 0
    assert foreign_result.metrics.get("ok_share") == (None if tool == "SGLang bench_serving" else 1)
    assert set(foreign_result.called) >= {
        path.partition(".")[0] for path in foreign_result.metrics if "_ms" in path
    }


@pytest.mark.parametrize(
    ("name", "path", "value"),
    [
        ("vllm_bench_serve.json", "ttft_ms.p50", 57.48122749992035),
        ("vllm_bench_serve.json", "inter_chunk_ms.p99", 10.07882921992405),
        ("vllm_bench_serve.json", "tokens.total_per_s", 3128.2628072701677),
        ("sglang_bench_serving.jsonl", "e2e_ms.p99", 1060.7498638299057),
        ("sglang_bench_serving.jsonl", "tokens.input", 9600),
        ("aiperf_profile_export.json", "tpot_ms.p50", 5.194771555276382),
        ("aiperf_profile_export.json", "load.completed_rps", 12.688936909998795),
        ("aiperf_profile_export.jsonl", "requests.ok", 3),
        ("guidellm_benchmarks.json", "e2e_ms.p50", 1058.4373474121094),  # seconds there
        ("guidellm_benchmarks.json", "tpot_ms.mean", 4.944916365284416),  # its ITL
        ("guidellm_benchmarks.json", "tpot_with_first_ms.mean", 5.283993259072304),  # its TPOT
        (
            "inference_perf_summary_lifecycle_metrics.json",
            "ttft_ms.p50",
            52.27621849962816,
        ),  # seconds there
        ("genai_bench_concurrency.json", "ttft_ms.p99", 251.54940618019273),
        ("mlcommons_endpoints_result_summary.json", "ttft_ms.p99", 992.706750),  # ns there
    ],
)
def test_metrics_of_other_tools_are_read_unchanged(name: str, path: str, value: float) -> None:
    assert reader.read_result(DATA / name).metrics[path] == pytest.approx(value, rel=1e-12)


def test_irregularities_of_a_foreign_file_are_reported() -> None:
    negative = reader.read_result(DATA / "mlcommons_endpoints_result_summary.json").notes

    assert any("negative" in note for note in negative)
    late_notes = reader.read_result(DATA / "inference_perf_summary_lifecycle_metrics.json").notes
    assert len(late_notes) == 1 and "2,611 ms (p99)" in late_notes[0]

    line = (DATA / "sglang_bench_serving.jsonl").read_bytes()
    metrics = reader.parse_result(
        line
    ).metrics  # its file counts no failures: that is not the same as none

    assert metrics["requests.ok"] and not {
        "requests.failed",
        "requests.scheduled",
        "ok_share",
    } & set(metrics)
    notes = reader.parse_result(line * 3).notes
    assert len(notes) == 1 and "last of 3 results" in notes[0]


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[]", b"{}", b"name: x\n", b"null", b"\xff\xfe", b'{"benchmarks": []}', b"3\n"],
)
def test_a_file_of_an_unknown_tool_is_refused(data: bytes) -> None:
    with pytest.raises(UserError, match="--> file"):
        reader.parse_result(data, "file")


VALUES = {name: json.loads((DATA / name).read_text()) for name in FILES if name.endswith(".json")}


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value[:3])
        if isinstance(value, list)
        else ()
    )
    return [
        path,
        *(place for key, entry_value in inner for place in places(entry_value, (*path, key))),
    ]


PLACES = {name: places(value)[1:] for name, value in VALUES.items()}


@given(st.data())
def test_damaged_files_of_other_tools_are_read_or_refused(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(VALUES)))
    value = json.loads(json.dumps(VALUES[name]))
    for place in data.draw(st.lists(st.sampled_from(PLACES[name]), min_size=1, max_size=3)):
        inner: Any = value
        try:
            for key in place[:-1]:
                inner = inner[key]
            inner[place[-1]] = data.draw(st.sampled_from([None, "x", [], {}, -1, 1e400, True]))
        except (KeyError, TypeError, IndexError):
            continue
    try:
        foreign_result = reader.parse_result(json.dumps(value).encode(), name)
    except UserError:
        return

    assert all(isinstance(entry_value, float) for entry_value in foreign_result.metrics.values())

    as_text.render(other_tools.report(foreign_result))
    as_page.render(other_tools.report(foreign_result))


def test_a_damaged_record_is_named_with_its_line() -> None:
    first, *_ = (DATA / "aiperf_profile_export.jsonl").read_text().splitlines()
    with pytest.raises(UserError) as fault:
        reader.parse_result((first + "\n{broken\n").encode(), "profile.jsonl")
    assert fault.value.where == "profile.jsonl:2"


def test_text_and_page_name_the_tool_that_measured_the_result() -> None:
    foreign_result = reader.read_result(DATA / "guidellm_benchmarks.json")
    text, page = (
        as_text.render(other_tools.report(foreign_result)),
        as_page.render(other_tools.report(foreign_result)),
    )

    for rendered_text in ("GuideLLM 0.8.1", "which includes the wait for the first token"):
        assert rendered_text in " ".join(text.split()) and rendered_text in page.replace(
            "&#x27;", "'"
        )
    assert "FOREIGN" in text and "FOREIGN" in page


# -- what they would have reported -----------------------------------------------------------------


def test_metrics_by_definitions_of_other_tools_equal_those_computed_by_hand() -> None:
    """Two requests are sent at 10 and 20 ms.

    Role events arrive at 50 and 60 ms, first tokens at 110 and 120 ms; each response has five
    tokens.
    """
    records = rows(1, 2)
    ms = 1_000_000
    for field, values in (
        ("due_ns", (0, 0)),
        ("sent_ns", (10, 20)),
        ("first_event_ns", (50, 60)),
        ("first_token_ns", (110, 120)),
        ("last_token_ns", (150, 200)),
        ("end_ns", (160, 210)),
        ("output_tokens", (5 / ms, 5 / ms)),
    ):
        records[field] = np.array([round(value * ms) for value in values])
    tool_samples_by_name = compute_tool_samples(run_fixtures.manifest("r", 2), records, [])
    vllm, guidellm, sglang = (
        tool_samples_by_name["vllm bench serve"],
        tool_samples_by_name["GuideLLM"],
        tool_samples_by_name["SGLang bench_serving"],
    )

    assert vllm.ttft.values.tolist() == [40 * ms, 40 * ms]  # the role event counts
    assert vllm.tpot is not None and vllm.tpot.values.tolist() == [110 * ms / 4, 150 * ms / 4]
    assert (
        isinstance(vllm.itl, PooledGaps) and vllm.itl.histogram.count == 2
    )  # from the role events to the first tokens
    assert sglang.ttft.values.tolist() == [100 * ms, 100 * ms]
    assert sglang.tpot is not None and sglang.tpot.values.tolist() == [50 * ms / 4, 90 * ms / 4]
    assert guidellm.tpot is not None and guidellm.tpot.values.tolist() == [
        140 * ms / 5,
        180 * ms / 5,
    ]
    assert (
        tool_samples_by_name["AIPerf"].tpot is None
        and tool_samples_by_name["genai-bench"].itl is None
    )
    assert tool_samples_by_name["inference-perf"].tpot is not None
    assert tool_samples_by_name["inference-perf"].tpot.values.tolist() == [40 * ms / 4, 80 * ms / 4]

    completions = compute_tool_samples(
        run_fixtures.manifest("r", 2, api="completions"), records, []
    )["vllm bench serve"]

    assert completions.ttft.values.tolist() == [100 * ms, 100 * ms]  # no role event there


def test_statistics_of_weighted_values_equal_those_of_repeated_values() -> None:
    draw = np.random.default_rng(1)
    values, weights = draw.lognormal(15, 1, 50), draw.integers(0, 9, 50)
    mine, plain = WeightedValues(values, weights).statistics(), np.repeat(values, weights) / 1e6
    assert mine["count"] == len(plain)
    assert mine["mean"] == pytest.approx(plain.mean()) and mine["std"] == pytest.approx(plain.std())
    assert mine["p99"] in np.sort(plain)[-6:].round(6)


def test_percentiles_of_ordered_values_equal_numpy_to_the_last_bit() -> None:
    draw = np.random.default_rng(1)
    for count in (1, 2, 3, 10, 101, 1_000, 4_097):
        ordered = np.sort(draw.lognormal(18, 2, count))
        shares = [
            *(100 * p for p in (0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.999)),
            *draw.random(50) * 100,
        ]
        assert (
            interpolated_percentiles(ordered, shares).tolist()
            == np.percentile(ordered, shares).tolist()
        )


@pytest.mark.parametrize("weighted", [False, True])
def test_two_selected_percentiles_equal_those_of_the_full_list_of_percentiles(
    weighted: bool,
) -> None:
    draw = np.random.default_rng(1)
    sample = WeightedValues(
        draw.lognormal(15, 1, 500), draw.integers(0, 9, 500) if weighted else None
    )
    all_statistics, two = sample.statistics(), sample.percentiles(("p50", "p99"))
    assert two == {name: all_statistics[name] for name in ("p50", "p99")}


# -- there and back --------------------------------------------------------------------------------

WRITERS = {
    "vllm": export.export_vllm,
    "aiperf": export.export_aiperf,
    "guidellm": export.export_guidellm,
    "inference-perf": export.export_inference_perf,
    "mlcommons": export_mlcommons.export_mlcommons,
    "llm-d": benchmark_report.write,
}
NAMES = {
    "vllm": "vllm bench serve",
    "aiperf": "AIPerf",
    "guidellm": "GuideLLM",
    "inference-perf": "inference-perf",
    "mlcommons": "mlcommons/endpoints",
}


@pytest.mark.parametrize(("form", "tool"), NAMES.items())
def test_an_export_is_read_back_as_a_file_of_that_tool(
    tmp_path: Path, form: str, tool: str
) -> None:
    records = rows(3, 700)
    fail(records, 0.1)
    stored = store.read_run(run_fixtures.write(tmp_path / "r", records))
    summary = summarize(*stored)
    exported = WRITERS[form](summary, stored)
    back = reader.parse_result(b"".join(json_parts(exported)))

    assert back.tool == tool and exported["loadgen"]["definitions"].endswith(definitions_of(tool))
    assert back.metrics["requests.ok"] == summary.requests.ok
    assert back.metrics["requests.failed"] == summary.requests.failed
    assert back.metrics["tokens.output_per_s"] > 0
    their_tool_samples = compute_tool_samples(stored.manifest, stored.rows, stored.gaps)[tool]
    if form != "mlcommons":  # which takes elements of the sample
        assert back.metrics["ttft_ms.p99"] == pytest.approx(
            their_tool_samples.ttft.statistics()["p99"]
        )
    assert back.metrics["ttft_ms.p50"] == pytest.approx(
        their_tool_samples.ttft.statistics()["p50"], rel=0.01
    )
    assert back.metrics["e2e_ms.mean"] == pytest.approx(their_tool_samples.e2e.statistics()["mean"])


def keys(value: Any) -> set[str]:
    return {key for key, child in value.items() if child is not None}


@pytest.mark.parametrize(
    ("form", "file", "lacking"),
    [
        ("vllm", "vllm_bench_serve.json", {"queue_times", "rtfx", "max_output_tokens_per_s"}),
        ("aiperf", "aiperf_profile_export.json", {"aiperf_version"}),
        ("inference-perf", "inference_perf_summary_lifecycle_metrics.json", set()),
        ("mlcommons", "mlcommons_endpoints_result_summary.json", set()),
    ],
)
def test_exports_have_the_fields_of_real_files(
    tmp_path: Path, form: str, file: str, lacking: set[str]
) -> None:
    stored = store.read_run(run_fixtures.write(tmp_path / "r", rows(3, 700)))
    exported = WRITERS[form](summarize(*stored), stored)

    assert keys(VALUES[file]) - set(exported) == lacking

    if form == "inference-perf":
        their_successes = VALUES[file]["successes"]
        assert keys(their_successes["latency"]) == keys(exported["successes"]["latency"])
        for name, block in their_successes["latency"].items():
            assert set(block) <= set(exported["successes"]["latency"][name])
        assert keys(VALUES[file]["load_summary"]) <= set(exported["load_summary"])

    if form == "mlcommons":
        for block in ("ttft", "tpot", "latency", "output_sequence_lengths"):
            assert set(exported[block]) == set(VALUES[file][block])
            assert sum(exported[block]["histogram"]["counts"]) == 700
        assert set(exported["ttft"]["percentiles"]) == set(VALUES[file]["ttft"]["percentiles"])


def test_large_exports_are_written_in_parts(tmp_path: Path) -> None:
    """Neither all rows nor the file are in memory at once, which once took 2.2 to 2.8 GB."""
    folder = run_fixtures.write(tmp_path / "r", records := rows(3, 700))
    (folder / "requests").mkdir()
    write_tables(
        folder / "requests" / store.MERGED,
        [to_table(records[:400], []), to_table(records[400:], [])],
    )
    full_run, stored = store.read_run(folder), store.read_run(folder, max_rows=0, by_stage=False)

    assert isinstance(stored.rows, Frame) and (stored.rows["slot"] == records["slot"]).all()

    summary = summarize(*stored)
    in_parts = [
        list(records_csv.write_csv(summary, stored, 100)),
        list(json_parts(export.export_vllm(summary, stored), 100)),
    ]

    assert all(max(map(len, parts)) < sum(map(len, parts)) / 4 for parts in in_parts)

    named = export.export_vllm(summary, full_run).items()
    plain = {
        name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in named
    }

    assert b"".join(in_parts[1]) == json.dumps(plain, indent=2).encode() + b"\n"
    assert b"".join(in_parts[0]) == b"".join(records_csv.write_csv(summary, full_run))
    assert [*aiperf_records.write(summary, stored)] == [*aiperf_records.write(summary, full_run)]


@given(
    st.dictionaries(
        st.text(),
        st.lists(st.floats(allow_nan=False, allow_infinity=False) | st.text() | st.none()),
    )
)
def test_a_document_written_in_parts_equals_the_complete_document(
    document: dict[str, list[Any]],
) -> None:
    arrays = {
        "empty": np.zeros(0),
        "some": np.array([1e22, 1e-7, -0.0, 5]),
        **document,
        "whole": np.arange(3),
    }
    plain = {"empty": [], "some": [1e22, 1e-7, -0.0, 5.0], **document, "whole": [0, 1, 2]}

    for document_parts, expected in ((arrays, plain), (document, document)):
        assert (
            b"".join(json_parts(document_parts)) == json.dumps(expected, indent=2).encode() + b"\n"
        )


def test_an_exported_llm_d_benchmark_report_is_accepted_by_llm_d_and_read_back(
    tmp_path: Path,
) -> None:
    records = rows(3, 700)
    fail(records, 0.1)
    stored = store.read_run(run_fixtures.write(tmp_path / "r", records))
    summary = summarize(*stored)
    report_json = json.dumps(benchmark_report.write(summary, stored), allow_nan=False)
    back = reader.parse_result(report_json.encode())

    assert (back.tool, back.model, back.version) == (
        "llm-d Benchmark Report",
        summary.target.model,
        "0.2.1",
    )
    for path, expected_value in (
        ("ttft_ms.p99", summary.ttft_ms.p99),
        ("ttft_ms.p99_9", summary.ttft_ms.p99_9),
        ("tpot_ms.p50", summary.tpot_ms.p50),
        ("e2e_ms.mean", summary.e2e_ms.mean),
        ("tokens.output_per_s", summary.tokens.steady_output_per_s),
        ("load.completed_rps", summary.load.steady_completed_rps),
        ("requests.ok", summary.requests.ok),
        ("requests.failed", summary.requests.failed),
    ):
        assert back.metrics[path] == pytest.approx(expected_value), path

    theirs = pytest.importorskip(
        "llmd_benchmark_report.schema_v0_2"
    )  # forbids what it does not know
    report = theirs.BenchmarkReportV02(**json.loads(report_json))

    assert report.results.request_performance.aggregate.requests.failures == summary.requests.failed
    assert report.scenario.load.native.config["valid"] is summary.verdict.valid


def test_a_benchmark_report_of_llm_d_is_read_in_yaml(tmp_path: Path) -> None:
    package = pytest.importorskip("llmd_benchmark_report")
    example = Path(package.__file__).parent / "br_v0_2_example.yaml"
    foreign_result = reader.read_result(example)
    document = yaml.safe_load(example.read_text("utf-8"))["results"]["request_performance"][
        "aggregate"
    ]
    scale = {"s": 1e3, "ms": 1.0}[document["latency"]["time_to_first_token"]["units"]]

    assert foreign_result.metrics["ttft_ms.p99"] == pytest.approx(
        document["latency"]["time_to_first_token"]["p99"] * scale
    )
    assert foreign_result.metrics["requests.scheduled"] == document["requests"]["total"]
    assert foreign_result.model == "Qwen/Qwen3-0.6B" and foreign_result.notes

    (tmp_path / "cut.yaml").write_text(
        example.read_text("utf-8")[:4000] + "request_performance: [", "utf-8"
    )

    with refused(UserError, "wrong_format"):
        reader.read_result(tmp_path / "cut.yaml")


def test_early_stopping_percentiles_are_not_below_plain_percentiles() -> None:
    values = np.random.default_rng(2).lognormal(15, 1, 700)
    described = export_mlcommons.describe_values(values, with_early_stopping=True)
    assert described is not None
    early, plain = described["early_stopping_percentiles"], described["percentiles"]
    assert early["99.9"] is None  # 700 samples do not carry it
    assert early["99.0"] == values.max()  # with 662 to 1,000 or so, one may be over: the largest
    assert all(early[p] >= plain[p] for p in ("95.0", "90.0", "50.0"))


def test_an_exported_csv_file_has_a_line_for_each_request(
    tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    records = rows(1, 50)
    fail(records, 0.2)
    folder = run_fixtures.write(tmp_path / "r", records)

    assert exits("export", str(folder), "--as", "csv") == 0
    lines = list(csv.DictReader(io.StringIO(capsysbinary.readouterr().out.decode())))
    assert len(lines) == 50 and {"ttft_ms", "tpot_ms", "e2e_ms", "input_tokens"} <= set(lines[0])
    columns = loadgen.load(folder).frame("pyarrow").column_names
    assert list(lines[0]) == [*columns, "simulated"]
    assert [line["status"] for line in lines] == [
        "ok" if s == 0 else "failed" for s in records["status"]
    ]
    assert [float(line["due_ms"]) for line in lines] == (records["due_ns"] / 1e6).tolist()
    assert {line["ttft_ms"] for line in lines if line["status"] == "failed"} == {""}


def test_an_exported_csv_file_marks_the_rows_that_the_report_excludes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An export once had 104 warm-up requests among 13,303 without marking them."""
    stages = (
        StagePlan(name="warm-up", arrival="poisson 8/s", measured=False),
        StagePlan(name="load"),
    )
    warmed = rows(1, 50)
    warmed["stage"][10:] = 1
    folders = (
        run_fixtures.write(tmp_path / "w", warmed, stages=stages),
        run_fixtures.write(tmp_path / "r", rows(1, 50)),
    )

    for folder, is_marked in zip(folders, (True, False), strict=True):
        assert exits("export", str(folder), "--as", "csv", "-o", str(tmp_path / "r.csv")) == 0
        assert ("rows of stage warm-up" in capsys.readouterr().err) is is_marked


def test_exported_files_are_read_by_report_and_compare(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run_fixtures.write(tmp_path / "r", rows(1, 50))
    out = tmp_path / "vllm.json"

    assert exits("export", str(folder), "--as", "vllm", "-o", str(out)) == 0
    assert exits("report", str(out), "--html", str(tmp_path / "page.html")) == 0
    captured = capsys.readouterr()
    assert "vllm bench serve" in captured.out and "page.html" in captured.err
    assert exits("compare", str(folder), str(out)) == 0
    assert "not judged" in capsys.readouterr().out
    assert exits("export", str(folder), "--as", "excel") == 2
    assert (
        "known: vllm, aiperf, aiperf-records, guidellm, inference-perf, mlcommons, llm-d, csv"
        in capsys.readouterr().err
    )
    assert exits("export", str(tmp_path), "--as", "csv") == 2


@pytest.mark.parametrize(
    "arguments",
    [
        ("report", "b.zip"),
        ("compare", "b.zip", "b.zip"),
        ("export", "b.zip", "--as", "csv"),
        ("cost", "b.zip", "--accept-sample-prices"),
        ("bundle", "b.zip", "-o", "c.zip"),
    ],
)
def test_an_export_of_a_bundle_is_refused_with_a_hint(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
) -> None:
    monkeypatch.chdir(tmp_path)
    with zipfile.ZipFile("b.zip", "w") as archive:
        archive.writestr("result/run.json", "{}")
    assert exits(*arguments) == 2
    assert "unzip b.zip" in capsys.readouterr().err


def test_an_export_accepts_one_run_of_a_folder_with_several(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("r1", "r2"):
        run_fixtures.write(tmp_path / "repeated" / name, rows(1, 50))
    (tmp_path / "repeated" / "repeats.json").write_text("{}")
    assert exits("export", str(tmp_path / "repeated"), "--as", "csv") == 2
    assert "several runs" in capsys.readouterr().err


def test_a_folder_of_another_tool_is_recognised_by_its_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "benchmarks.json").write_bytes((DATA / "guidellm_benchmarks.json").read_bytes())
    assert exits("report", str(tmp_path)) == 0
    assert "GuideLLM" in capsys.readouterr().out


def test_an_official_mlperf_log_is_compared_with_a_run_of_loadgen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "mlperf_log_summary.txt"
    log.write_text(OFFICIAL)
    foreign_result = reader.read_result(log)

    assert (
        foreign_result.tool == "MLPerf LoadGen"
        and foreign_result.metrics["tokens.output_per_s"] == 1000.5
    )
    assert (
        foreign_result.metrics["ttft_ms.p99"] == 1.5
        and foreign_result.notes[0] == "MLPerf Server, VALID"
    )
    run_dir = run_fixtures.write(tmp_path / "r", rows(1, 50))
    assert exits("compare", str(run_dir), str(tmp_path), "--full") == 0
    assert "MLPerf LoadGen" in capsys.readouterr().out

    line = {"key": "result_invalid_reason", "value": "Increase the duration."}
    (tmp_path / "mlperf_log_detail.txt").write_text(f":::MLLOG {json.dumps(line)}\n")
    assert exits("report", str(log)) == 0
    stdout = capsys.readouterr().out
    assert "Increase the duration\n" in stdout and ".." not in stdout


OFFICIAL = """================================================
MLPerf Results Summary
================================================
SUT name : PySUT
Scenario : Server
Mode     : PerformanceOnly
Completed samples per second    : 12.50
Completed tokens per second: 1000.50
Result is : VALID
  Performance constraints satisfied : Yes
  Min duration satisfied : Yes
  Min queries satisfied : Yes

================================================
Additional Stats
================================================
Scheduled samples per second : 12.75
Min First Token latency (ns)               : 1000000
Max First Token latency (ns)               : 2000000
Mean First Token latency (ns)              : 1250000
50.00 percentile first token latency (ns)  : 1200000
90.00 percentile first token latency (ns)  : 1400000
95.00 percentile first token latency (ns)  : 1450000
97.00 percentile first token latency (ns)  : 1475000
99.00 percentile first token latency (ns)  : 1500000
99.90 percentile first token latency (ns)  : 1900000

================================================
Test Parameters Used
================================================
target_qps : 12.5
"""


@pytest.mark.parametrize(
    "text", ["[" * 100_000 + "]" * 100_000, '{"benchmarks":' + "[" * 100_000 + "]" * 100_000 + "}"]
)
def test_deeply_nested_json_is_a_user_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "deep.json").write_text(text)
    with refused(UserError, "wrong_format"):
        reader.read_result(tmp_path / "deep.json")


def test_a_percentile_without_a_number_in_an_mlperf_log_is_ignored() -> None:
    log = (
        "MLPerf Results Summary\n"
        "Scenario : Server\n"
        "Result is : VALID\n"
        ".. percentile latency (ns)   : 5\n"
    )
    assert loadgen_log.parse_log(log).valid


# -- durations and rates of exports ----------------------------------------------------------------


def run_whose_last_request_fails_late(tmp_path: Path) -> tuple[Summary, store.Stored]:
    """1,000 requests, of which the last one fails 5 s after all the others have ended."""
    records = rows(3, 1000)
    last = int(np.argmax(records["sent_ns"]))
    records["done_ns"][last] = records["done_ns"].max() + 5_000_000_000
    records["status"][last] = STATUSES.index("failed")
    records["kind"][last] = KINDS.index("http_5xx")
    for column in ("first_token_ns", "last_token_ns", "end_ns", "output_tokens"):
        records[column][last] = -1
    stored = store.read_run(run_fixtures.write(tmp_path / "r", records))
    return summarize(*stored), stored


def test_exported_durations_end_with_the_last_response_including_failed_requests(
    tmp_path: Path,
) -> None:
    summary, stored = run_whose_last_request_fails_late(tmp_path)
    sent_ns, done_ns = stored.rows["sent_ns"], stored.rows["done_ns"]
    duration_s = (done_ns.max() - sent_ns.min()) / 1e9

    assert duration_s > (summary.window.duration_s or 0) + 4
    vllm = export.export_vllm(summary, stored)
    assert vllm["duration"] == pytest.approx(duration_s)
    assert vllm["request_throughput"] == pytest.approx(999 / duration_s)
    assert vllm["output_throughput"] == pytest.approx(vllm["total_output_tokens"] / duration_s)
    guidellm = export.export_guidellm(summary, stored)["benchmarks"][0]
    assert guidellm["duration"] == pytest.approx(duration_s)
    rates = guidellm["metrics"]["requests_per_second"]["successful"]
    assert rates["mean"] == pytest.approx(999 / duration_s)
    inference_perf = export.export_inference_perf(summary, stored)
    assert inference_perf["benchmark_time_seconds"] == pytest.approx(duration_s)
    throughput = inference_perf["successes"]["throughput"]
    assert throughput["requests_per_sec"] == pytest.approx(999 / duration_s)
    endpoints = export_mlcommons.export_mlcommons(summary, stored)
    assert endpoints["duration_ns"] == pytest.approx(duration_s * 1e9)
    assert (endpoints["n_samples_completed"], endpoints["n_samples_failed"]) == (1000, 1)
    assert endpoints["qps"] == pytest.approx(
        999 / (endpoints["legacy_loadgen_window_duration_ns"] / 1e9)
    )


def test_exported_aiperf_duration_spans_its_valid_records(tmp_path: Path) -> None:
    summary, stored = run_whose_last_request_fails_late(tmp_path)
    is_ok = stored.rows["status"] == STATUSES.index("ok")
    sent, end = stored.rows["sent_ns"][is_ok], stored.rows["end_ns"][is_ok]
    duration_s = (end.max() - sent.min()) / 1e9
    aiperf = export.export_aiperf(summary, stored)
    assert aiperf["benchmark_duration"]["avg"] == pytest.approx(duration_s)
    assert aiperf["request_throughput"]["avg"] == pytest.approx(999 / duration_s)


def test_goodput_is_not_above_throughput_in_any_export(tmp_path: Path) -> None:
    run = loadgen.run(
        {"name": "w", "requests": {"input_tokens": 100, "output_tokens": 300}},
        url="sim:gb300-vm",
        request_rate=20,
        num_requests=200,
        slo="ttft:1s",
        seed=1,
        out=tmp_path / "r",
    )
    stored = store.read_run(tmp_path / "r")
    vllm = export.export_vllm(run.summary, stored)

    assert 0 < vllm["request_goodput"] <= vllm["request_throughput"]
    aiperf = export.export_aiperf(run.summary, stored)
    assert 0 < aiperf["goodput"]["avg"] <= aiperf["request_throughput"]["avg"]


def field_paths(value: Any, path: str = "") -> set[str]:
    """Return the dotted paths of the leaves of an exported document.

    The note of loadgen is a leaf. Of a list of objects the first one is read, as `name.0`.
    """
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return field_paths(value[0], f"{path}.0")
    if not isinstance(value, dict) or not value or path == "loadgen":
        return {path}
    prefix = f"{path}." if path else ""
    return {leaf for key, child in value.items() for leaf in field_paths(child, f"{prefix}{key}")}


def documented_fields() -> dict[str, list[str]]:
    """Return the fields that docs/reference/exports.md lists, by format."""
    fields: dict[str, list[str]] = {}
    form = ""  # the format of the section
    for line in EXPORTED_FIELDS.read_text("utf-8").splitlines():
        if line.startswith("## "):
            form = line.partition("`--as ")[2].partition("`")[0]
        elif form and line.startswith("| `"):
            first_cell = line.split("|")[1]
            fields.setdefault(form, []).extend(re.findall(r"`([^`]+)`", first_cell))
    return fields


@pytest.mark.parametrize("form", WRITERS)
def test_the_table_of_exported_fields_lists_every_written_field(tmp_path: Path, form: str) -> None:
    run = loadgen.run(
        {"name": "w", "requests": {"input_tokens": 100, "output_tokens": 30}},
        url="sim:gb300-vm",
        request_rate=20,
        num_requests=700,
        keep="gaps",
        gpus=4,
        slo="ttft:1s",
        seed=1,
        out=tmp_path / "r",
    )
    stored = request_gaps.read_run_with_gaps(tmp_path / "r")
    written = field_paths(WRITERS[form](run.summary, stored))
    documented = documented_fields()[form]
    patterns = {field: field_pattern(field) for field in documented}
    unlisted = [path for path in written if not any(p.fullmatch(path) for p in patterns.values())]
    unwritten = [
        field for field, p in patterns.items() if not any(p.fullmatch(path) for path in written)
    ]

    assert (sorted(unlisted), unwritten) == ([], [])


def field_pattern(field: str) -> re.Pattern[str]:
    """Compile a documented field, where `*` stands for a part of a name and `**` for a path."""
    escaped = re.escape(field).replace(r"\*\*", ".+").replace(r"\*", r"[^.]+")
    return re.compile(escaped)


@pytest.mark.parametrize(
    ("load", "burstiness", "pattern"),
    [
        ({"request_rate": 20}, 1.0, "poisson"),
        ({"request_rate": 20, "burstiness": "0.3"}, 0.3, None),
        ({"request_rate": "inf"}, 1.0, "max_throughput"),
        ({"concurrency": 4}, 1.0, "concurrency"),
    ],
)
def test_exported_arrivals_equal_those_of_the_load(
    tmp_path: Path, load: dict[str, Any], burstiness: float | None, pattern: str | None
) -> None:
    run = loadgen.run(
        {"name": "w", "requests": {"input_tokens": 100, "output_tokens": 30}},
        url="sim:gb300-vm",
        num_requests=40,
        seed=1,
        out=tmp_path / "r",
        **load,
    )
    stored = store.read_run(tmp_path / "r")

    assert export.export_vllm(run.summary, stored)["burstiness"] == burstiness

    exported_pattern = export_mlcommons.export_mlcommons(run.summary, stored)["run_config"][
        "load_pattern"
    ]

    assert exported_pattern["type"] == pattern
