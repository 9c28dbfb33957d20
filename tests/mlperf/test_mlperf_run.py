"""From an MLPerf test to a workload, a run, log files and a result; LoadGen as the harness."""

from __future__ import annotations

import html
import importlib.util
import json
import re
from pathlib import Path

import msgspec
import pytest
from command_line import exits
from msgspec import structs
from servers import start

from loadgen.bundle.bundle_writer import write_bundle
from loadgen.bundle.verification import verify_bundle
from loadgen.core.errors import UserError
from loadgen.core.execution import run
from loadgen.core.execution.plan import Settings
from loadgen.core.schedule.build import build_schedule
from loadgen.core.workload import Closed
from loadgen.mlperf import log_files, official_loadgen, rules
from loadgen.mlperf import result as mlperf
from loadgen.mlperf import run as mlperf_run
from loadgen.mlperf.loadgen_log import read_log
from loadgen.repeated import capacity
from loadgen.sim.server.options import Options

pytestmark = pytest.mark.commands

SERVER = rules.create_test("llama2-70b", "server")
QUICK = Options(ttft="2ms", itl="0.02ms")
SMALL = structs.replace(SERVER, samples=300, min_queries=100, min_duration_ns=5 * 10**9)


def _small_data(folder: Path, rows: int = 300) -> Path:
    path = folder / "set.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": "word " * (3 + i % 7)}) for i in range(rows)))
    return path


def test_the_workload_of_an_official_run_has_the_official_schedule() -> None:
    mlperf_test = rules.create_test("llama2-70b", "server", "v5.1")
    planned_scheduled_stage = build_schedule(
        mlperf_run.build_workload(mlperf_test, mlperf_run.synthetic_data(mlperf_test), qps=182.0), 5
    ).stages[0]
    assert (planned_scheduled_stage.session_count, planned_scheduled_stage.length_ns) == (
        122880,
        675012366669,
    )


def test_every_pass_of_the_synthetic_set_has_the_order_of_mlperf_loadgen() -> None:
    from loadgen.core.requests import tokenizer
    from loadgen.core.requests.build import build_prompts
    from loadgen.mlperf import dataset

    data = mlperf_run.synthetic_data(SERVER)
    requests = build_prompts(
        mlperf_run.build_workload(SERVER, data, qps=1.0), 1, 2, tokenizer.load_tokenizer()
    )
    lengths = dataset.synthetic_lengths(
        rules.load_rules().benchmarks["llama2-70b"], benchmark_name="llama2-70b"
    )
    first = dataset.issue_order(SERVER)[0]
    request, second_request = requests[0], requests[SERVER.samples]
    assert (request.input_tokens, request.max_tokens) == (
        lengths.input[first],
        lengths.output[first],
    )
    assert (second_request.input_tokens, second_request.max_tokens) == (
        request.input_tokens,
        request.max_tokens,
    )
    assert request.prompt != second_request.prompt


def _judged(folder: Path, qps: float, mlperf_test: rules.Test = SMALL) -> mlperf.MlperfResult:
    data = mlperf_run.synthetic_data(SERVER)
    settings = Settings(url="sim:gb200-vm", out=folder)
    summary, directory = run.execute(
        mlperf_run.build_workload(mlperf_test, data, qps=qps), settings
    )
    return mlperf_run.judge_run(directory, mlperf_test, summary, data_name=data.name, qps=qps)


def test_the_result_of_a_simulated_mlperf_run_is_marked_as_simulated(tmp_path: Path) -> None:
    result = _judged(tmp_path, 100.0)

    assert (result.simulated, result.queries, result.resolved) == (True, 600, 600)
    assert "not MLPerf's data" in result.dataset
    assert any("below the 600 s" in note for note in result.notes)
    stored = mlperf_run.read_result(tmp_path)
    assert stored == result
    log = read_log(tmp_path)
    assert (log.ttft, log.tpot, log.unofficial) == (result.ttft, result.tpot, True)
    assert log.sut.startswith("SIMULATED")
    begin = (tmp_path / log_files.SUMMARY).read_text().partition("=====")[0]
    assert "llama2-70b server" in begin
    assert all(note in begin for note in result.notes)


def test_the_columns_of_a_verdict_equal_those_of_the_records(tmp_path: Path) -> None:
    from loadgen.core.results import store

    _judged(tmp_path, 100.0)
    rows = store.read_run(tmp_path).rows
    columns = mlperf_run.read_columns(tmp_path)
    assert all((columns[name] == rows[name]).all() for name in mlperf_run.COLUMNS)


def test_an_offline_run_with_a_concurrency_measures_from_its_start(tmp_path: Path) -> None:
    mlperf_test = structs.replace(
        rules.create_test("llama2-70b", "offline"), samples=300, min_queries=300, min_duration_ns=1
    )
    data = mlperf_run.synthetic_data(SERVER)
    workload = mlperf_run.build_workload(mlperf_test, data, qps=1.0, concurrency=16)

    assert workload.stages[0].arrival == Closed(concurrency=16, ramp_ns=0), (
        "all samples at once, as the rules have it"
    )

    summary, folder = run.execute(workload, Settings(url="sim:gb200-vm", out=tmp_path))
    result = mlperf_run.judge_run(folder, mlperf_test, summary, data_name=data.name, qps=1.0)
    assert (result.queries, result.valid) == (300, True)
    assert result.latency.max is not None
    assert result.completed_tokens_per_s == pytest.approx(
        result.tokens / (result.latency.max / 1e9)
    )


def test_requests_of_a_data_file_have_the_order_of_mlperf_loadgen(tmp_path: Path) -> None:
    from loadgen.mlperf import dataset as mlperf_data

    data, mlperf_test = mlperf_run.write_official_requests(
        SERVER, _small_data(tmp_path, 30), tmp_path / "out"
    )
    assert (mlperf_test.samples, mlperf_test.min_queries) == (30, 30)
    rows = [
        msgspec.json.decode(line)
        for line in (tmp_path / "out" / mlperf_run.REQUESTS).read_bytes().splitlines()
    ]
    assert len(rows) == 30
    assert len(rows[0]["prompt"].split()) == 3 + mlperf_data.issue_order(mlperf_test)[0] % 7
    assert rows[0]["max_tokens"] == 1024
    assert data.api is None
    assert "30 of 30 rows" in data.name


def test_tokens_counted_without_server_usage_cause_a_warning(tmp_path: Path) -> None:
    data = mlperf_run.synthetic_data(SERVER)
    workload = mlperf_run.build_workload(SMALL, data, qps=100.0)
    summary, folder = run.execute(workload, Settings(url="sim:gb200-vm", out=tmp_path))
    counted_mlperf_result = mlperf_run.judge_run(
        folder, SMALL, summary, data_name=data.name, qps=100.0
    )

    assert not any("without the server's usage" in text for text in counted_mlperf_result.notes)

    sources = msgspec.structs.replace(
        summary.tokens.sources, output={"server": 100, "estimate": 500}
    )
    without = msgspec.structs.replace(
        summary, tokens=msgspec.structs.replace(summary.tokens, sources=sources)
    )
    result = mlperf_run.judge_run(folder, SMALL, without, data_name=data.name, qps=100.0)
    warning = "the output tokens of 500 of 600 responses were counted by a packaged vocabulary"

    assert (
        [text for text in result.warnings if warning in text]
        == [text for text in result.notes if warning in text]
        != []
    )
    assert all(
        warning in (folder / name).read_text() for name in (log_files.SUMMARY, log_files.DETAIL)
    )


def test_the_mlperf_verdict_of_a_folder_without_a_result_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"mlperf\.json"):
        mlperf_run.read_result(tmp_path)


@pytest.mark.parametrize(
    ("flags", "fragments"),
    [
        (["server", "-b", "llama2-70b"], ["--target-qps"]),
        (
            ["server", "-b", "llama9", "--target-qps", "1", "--server", "nobody"],
            ["unknown benchmark", "--server"],
        ),
        (["interactive", "-b", "mixtral-8x7b", "--target-qps", "1"], ["no interactive"]),
        (
            ["server", "-b", "llama2-70b", "--target-qps", "1", "--mean-output", "2000"],
            ["--mean-output 2000"],
        ),
        (
            ["server", "-b", "llama2-70b", "--target-qps", "1", "--dataset", "none.pkl"],
            ["no such file"],
        ),
    ],
)
def test_an_invalid_mlperf_command_names_the_option(
    flags: list[str], fragments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exits("mlperf", *flags, "--url", "sim:gb200-vm", "--out", str(tmp_path / "o")) == 2
    errors = capsys.readouterr().err
    assert all(fragment in errors for fragment in fragments)


def test_the_command_prints_the_verdict_and_the_disclosure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [
        "--target-qps",
        "40",
        "--min-duration",
        "20",
        "--dataset",
        str(_small_data(tmp_path, 800)),
    ]
    flags += ["--url", "sim:gb200-vm", "--out", str(tmp_path / "o"), "--gpus", "4"]

    assert exits("mlperf", "server", "-b", "llama2-70b", *flags) == 0
    out = capsys.readouterr().out
    assert out.startswith("SIMULATED")
    assert "VALID" in out
    assert "not verified by MLCommons" in " ".join(out.split())
    assert exits("mlperf", "verdict", str(tmp_path / "o")) == 0
    assert capsys.readouterr().out == out

    stored = msgspec.structs.replace(mlperf_run.read_result(tmp_path / "o"), tokens=1)
    (tmp_path / "o" / mlperf_run.RESULT).write_bytes(msgspec.json.encode(stored))
    assert exits("mlperf", "verdict", str(tmp_path / "o")) == 3
    assert "was changed" in capsys.readouterr().err


def test_the_verdict_command_accepts_a_stored_result_with_other_sentences(tmp_path: Path) -> None:
    run_dir = tmp_path / "o"
    flags = ["--target-qps", "4", "--min-duration", "5", "--gpus", "4", "--out", str(run_dir)]
    flags += ["--dataset", str(_small_data(tmp_path, 80)), "--url", "sim:gb200-vm"]
    exit_code = exits("mlperf", "server", "-b", "llama2-70b", *flags)
    stored = mlperf_run.read_result(run_dir)
    assert stored.reasons, "the run must be INVALID"
    reasons = tuple(
        msgspec.structs.replace(reason, text="As an older version worded it")
        for reason in stored.reasons
    )
    reworded = msgspec.structs.replace(stored, reasons=reasons)
    (run_dir / mlperf_run.RESULT).write_bytes(msgspec.json.encode(reworded))

    assert exits("mlperf", "verdict", str(run_dir)) == exit_code


@pytest.mark.parametrize("scenario", ["server", "offline"])
def test_page_and_report_of_a_run_have_the_mlperf_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], scenario: str
) -> None:
    """Verdict, report and page agree on the outcome, early stopping and tokens/s."""
    flags = [
        "--target-qps",
        "40",
        "--min-duration",
        "20",
        "--dataset",
        str(_small_data(tmp_path, 800)),
    ]
    flags += ["--url", "sim:gb200-vm", "--out", str(tmp_path / "o"), "--gpus", "4"]

    assert exits("mlperf", scenario, "-b", "llama2-70b", *flags, "--full") == 0
    printed = capsys.readouterr().out
    assert exits("report", str(tmp_path / "o"), "--full") == 0

    reported = capsys.readouterr().out  # has the sections of the run as well
    mlperf_lines = printed.partition("MLPerf-style result, unofficial")[2].splitlines()
    assert set(mlperf_lines) <= set(reported.splitlines())

    page = html.unescape((tmp_path / "o" / "report.html").read_text())
    (rate,) = re.findall(r"^Tokens/s +([0-9,.]+)", printed, re.M)
    (tile,) = re.findall(r"<dt>Output throughput</dt><dd>([0-9,.]+) ", page)

    assert tile == rate
    assert "<b>MLPerf-style, unofficial</b>not verified by MLCommons" in page
    assert (
        f"MLPerf-style {scenario.capitalize()}, llama2-70b, round v6.1, unofficial: VALID." in page
    )
    if scenario == "server":
        assert "<th>early stopping</th>" in page and "TTFT p99 at most 2,000 ms" in page
        assert (
            f"{mlperf_run.read_result(tmp_path / 'o').checks[1].percentile_ns / 1e6:,.3f} ms"
            in page
        )  # type: ignore[operator]
    else:
        assert "no limit on latency" in page
    assert "its other checks" in page


def test_an_offline_run_without_a_rate_runs_a_trial_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The query is sized by a trial pass, so that it is long enough and not many times so."""
    flags = [
        "--min-duration",
        "1m",
        "--dataset",
        str(_small_data(tmp_path, 800)),
        "--url",
        "sim:gb200-vm",
    ]

    assert exits("mlperf", "offline", "-b", "llama2-70b", *flags, "--out", str(tmp_path / "o")) == 0
    captured = capsys.readouterr()
    assert "one pass of" in captured.err
    result = mlperf_run.read_result(tmp_path / "o")
    assert result.valid and result.queries > 800
    assert 60 <= result.queries / (result.full_run_samples_per_s or 1) < 120
    assert (tmp_path / "o-trial-1" / "summary.json").is_file()


def test_the_peak_search_writes_a_capacity(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [
        "--min-duration",
        "6",
        "--dataset",
        str(_small_data(tmp_path, 50)),
        "--url",
        "sim:gb200-vm",
    ]
    flags += ["--find-peak", "--target-qps", "150"]

    assert (
        exits("mlperf", "interactive", "-b", "llama2-70b", *flags, "--out", str(tmp_path / "o"))
        == 0
    )

    peak_capacity = capacity.load_capacity((tmp_path / "o" / capacity.CAPACITY_FILE).read_bytes())
    result = mlperf_run.read_result(tmp_path / "o")
    assert peak_capacity.low_per_s is not None and peak_capacity.high_per_s is not None
    assert peak_capacity.low_per_s <= peak_capacity.rate_per_s < peak_capacity.high_per_s
    assert (
        peak_capacity.evidence.endswith("-sustain") and peak_capacity.sustained is result.sustained
    )
    assert result.rules_qps is not None and result.rules_qps >= peak_capacity.rate_per_s
    assert result.target_qps == pytest.approx(peak_capacity.rate_per_s, rel=0.1)

    capsys.readouterr()
    resume_arguments = [
        "mlperf",
        "interactive",
        "-b",
        "llama2-70b",
        *flags,
        "--resume",
        str(tmp_path / "o"),
        "--json",
    ]

    assert exits(*resume_arguments) == 0  # nothing is left to ask
    assert json.loads(capsys.readouterr().out)["target_qps"] == result.target_qps
    assert exits("mlperf", "interactive", "--resume", str(tmp_path / "o"), "--json") == 0, (
        "without its flags"
    )
    assert json.loads(capsys.readouterr().out)["target_qps"] == result.target_qps
    assert exits("mlperf", "server", "--resume", str(tmp_path / "o")) == 2
    assert "by loadgen mlperf interactive" in capsys.readouterr().err
    assert exits("mlperf", "server", "--target-qps", "1") == 2
    assert "the test needs a benchmark" in capsys.readouterr().err
    assert (
        exits("mlperf", "server", "-b", "llama2-70b", *flags, "--resume", str(tmp_path / "o")) == 2
    )
    assert "another search" in capsys.readouterr().err
    assert exits("report", str(tmp_path / "o"), "--full") in (0, 1)

    stdout, page = capsys.readouterr().out, (tmp_path / "o" / "report.html").read_text()
    rate = f"{result.completed_tokens_per_s:,.0f}"
    assert f"{rate} output tokens/s until" in " ".join(stdout.split())
    assert (
        "<b>MLPerf-style, unofficial</b>" in page and "unofficial: VALID." in page and rate in page
    )
    assert "<th>early stopping</th>" in page


def test_the_mlperf_search_runs_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [
        "--slo",
        "tpot:40ms",
        "--percentile",
        "95",
        "--low",
        "60",
        "--high",
        "240",
        "--duration",
        "20s",
    ]
    flags += ["--precision", "0.1", "--seed", "5", "--url", "sim:gb200-vm", "--out", str(tmp_path)]
    code = exits("search", "qa", *flags)
    out = capsys.readouterr().out

    assert out.startswith("SIMULATED")
    assert code == 0
    assert "Capacity  " in out
    stored_trials = (tmp_path / "probes.jsonl").read_bytes()
    assert exits("search", "qa", *flags[:-2], "--resume", str(tmp_path)) == 0
    assert (tmp_path / "probes.jsonl").read_bytes() == stored_trials  # nothing was left to ask


@pytest.mark.parametrize(
    "seed", ["1", "6595476841533595"]
)  # with the second, a trial ends after 9 requests
def test_a_search_without_a_passing_rate_reports_that_the_lowest_load_failed(
    seed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [
        "--slo",
        "ttft:1ms",
        "--low",
        "1",
        "--high",
        "2",
        "--start",
        "1",
        "--duration",
        "20s",
        "--seed",
        seed,
    ]

    assert exits("search", "qa", *flags, "--url", "sim:gb200-vm", "--out", str(tmp_path)) == 1
    assert "even the lowest load" in capsys.readouterr().out


def test_a_trial_of_the_mlperf_search_is_as_long_as_its_confirmation() -> None:
    """What builds up for minutes passes in a run of 30 s: such a peak was never confirmed."""
    trial = structs.replace(SERVER, min_duration_ns=30 * 10**9)
    assert mlperf_run.create_trial_test(trial, 300.0) == trial  # a pass takes 82 s
    assert mlperf_run.create_trial_test(SERVER, 182.0) == SERVER
    assert (
        mlperf_run.create_trial_test(SERVER, 3450.0).samples == 1
    )  # 84 passes: the rest of the last one is nothing


def test_a_search_of_an_unreachable_endpoint_leaves_no_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dead = ["--url", "http://127.0.0.1:1", "--out", str(tmp_path / "o")]
    small = ["-b", "llama2-70b", "--dataset", str(_small_data(tmp_path, 30))]

    for command in (
        ["mlperf", "server", *small, "--find-peak"],
        ["mlperf", "offline", *small],
        ["search", "qa", "--slo", "ttft:1s"],
        ["sweep", "qa", "-c", "1,2"],
    ):
        assert exits(*command, *dead) == 3
        assert "nothing listens" in capsys.readouterr().err
        assert [path.name for path in tmp_path.iterdir()] == ["set.jsonl"]


@pytest.mark.processes
def test_several_endpoints_count_as_one_system(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The report has the records and totals of each, one verdict, and the disclosure once."""
    flags = ["-b", "llama2-70b", "--dataset", str(_small_data(tmp_path, 40)), "--min-duration", "1"]
    with start(QUICK) as first_server, start(QUICK) as second_server:
        urls = [
            "--url",
            first_server.url,
            "--url",
            second_server.url,
            "--server-metrics",
            "off",
            "--energy",
            "off",
        ]
        served = [
            *flags,
            *urls,
            "--workers",
            "2",
            "--target-qps",
            "60",
            "--out",
            str(tmp_path / "s"),
            "--full",
        ]
        code = exits("mlperf", "server", *served)
        captured = capsys.readouterr()
        offline = [*flags, *urls, "--target-qps", "60", "-c", "3", "--out", str(tmp_path / "f")]
        assert exits("mlperf", "offline", *offline) in (0, 3)
        assert "concurrency 6" in capsys.readouterr().err  # three per target
        assert exits("mlperf", "server", *served, "--harness", "loadgen") == 2
        stderr = capsys.readouterr().err

    assert code in (
        1,
        3,
    )  # 80 queries are too few for early stopping; on a busy host the sender was late besides
    result = mlperf_run.read_result(tmp_path / "s")
    assert result.resolved == 80
    lines = captured.out.splitlines()
    assert (
        sum(line.split()[1:3] == ["40", "0"] for line in lines if line.startswith("http://")) == 2
    )
    assert "sum of 2 rates" in captured.out
    assert (captured.out + captured.err).count("registered and unregistered") == 1
    assert "registered and unregistered" in " ".join(lines[:4])
    assert any(note.startswith("served by 2 targets: http://") for note in result.notes)
    assert (
        "drives one endpoint, but 2" in stderr
        and "not from 2" in stderr
        and "metrics" not in stderr
    )


# -- the official LoadGen --------------------------------------------------------------------------

INSTALLED = importlib.util.find_spec("mlperf_loadgen") is not None


@pytest.mark.skipif(INSTALLED, reason="about a machine without the package")
def test_the_error_for_a_missing_mlperf_package_names_the_extra_to_install(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not installed") as exc_info:
        official_loadgen.run_official_test(
            SMALL, mlperf_run.synthetic_data(SERVER), Settings(), output_dir=tmp_path, qps=1.0
        )
    assert "loadgen[mlperf]" in exc_info.value.hint


@pytest.mark.processes
@pytest.mark.skipif(not INSTALLED, reason="needs the optional package mlcommons-loadgen")
def test_the_official_loadgen_issues_the_queries(tmp_path: Path) -> None:
    mlperf_test = structs.replace(SERVER, min_duration_ns=10**9, min_queries=20)
    data, mlperf_test = mlperf_run.write_official_requests(
        mlperf_test, _small_data(tmp_path, 20), tmp_path
    )
    settings = Settings(embedded={"ttft": "20ms", "flood": True})
    result = official_loadgen.run_official_test(
        mlperf_test, data, settings, output_dir=tmp_path / "run", qps=40.0
    ).result
    log = read_log(tmp_path / "run")
    planned_arrivals = rules.create_schedule(mlperf_test, 40.0)

    assert result.queries == log.queries == len(planned_arrivals.offsets_ns)
    assert log.detail["generated_query_duration"] == planned_arrivals.end_ns
    assert not log.unofficial
    assert result.resolved == result.queries
    assert result.ttft is not None and log.ttft is not None
    assert any("by LoadGen's timestamps" in note for note in result.notes)
    assert read_log(tmp_path / "run" / official_loadgen.OWN_DIR).unofficial

    write_bundle(tmp_path / "run", tmp_path / "poc.zip")
    verification = verify_bundle(tmp_path / "poc.zip")
    assert verification.differences == () and verification.verified == "part"
    assert {file.file for file in verification.reproduced} == {
        "mlperf.json",
        *(f"own/{name}" for name in mlperf_run.FILES),
    }
    assert "its timestamps" in verification.skipped["mlperf_log_summary.txt"]

    result_path = tmp_path / "run" / official_loadgen.OWN_DIR / mlperf_run.RESULT
    result_path.write_text(
        result_path.read_text().replace(
            f'"tokens": {result.tokens}', f'"tokens": {result.tokens + 1}'
        )
    )
    for sums in (tmp_path / "run").rglob("SHA256SUMS"):
        sums.unlink()
    write_bundle(tmp_path / "run", tmp_path / "forged.zip")
    forged = verify_bundle(tmp_path / "forged.zip")

    assert forged.verified == "no" and "result/own/mlperf.json" in {
        mismatch.file for mismatch in forged.differences
    }
