"""Tests of the Python API: names, errors, `Result` and the pytest fixture."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import warnings
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from expected_errors import refused

import loadgen
from loadgen import pytest_plugin
from loadgen.core.errors import CombinedError, LoadgenError
from loadgen.core.workload import load as load_workload

FEW = {"name": "few", "requests": {"input_tokens": 12, "output_tokens": 4}}
QUICK = {"embedded": {"ttft": "3ms", "itl": "1ms"}}


@pytest.fixture(autouse=True)
def _nothing_is_judged_by_a_busy_machine() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pytest_plugin.NotValid)
        yield


@pytest.mark.processes
def test_importing_loadgen_imports_no_heavy_module() -> None:
    script = "import sys, loadgen, loadgen.pytest_plugin, loadgen_sdk; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    ).stdout.split()
    heavy = {
        "asyncio",
        "httpx",
        "msgspec",
        "numpy",
        "openai",
        "pyarrow",
        "pydantic",
        "typer",
        "uvloop",
        "yaml",
    }

    assert not heavy & set(loaded)


@pytest.mark.processes
def test_a_run_equals_its_loaded_folder(tmp_path: Path) -> None:
    result = loadgen.run(
        FEW, concurrency=2, num_requests=10, seed=7, slo="ttft:10s", out=tmp_path / "run", **QUICK
    )

    assert isinstance(result, loadgen.Result)
    assert (result.requests.scheduled, result.requests.ok) == (10, 10)
    assert result.folder == tmp_path / "run" and result.summary.run.seed == 7
    assert result.ttft_ms is result.summary.ttft_ms and result.ttft_ms.count == 10
    # a busy host makes it not valid: then nothing is judged
    assert (result.goodput.met, result.exit_code) in ((True, 0), (None, 3))
    assert result.rows.num_rows == 10 and {"due_ns", "sent_ns", "first_token_ns"} <= set(
        result.rows.column_names
    )
    assert loadgen.load(result.folder).summary == result.summary
    assert "10 of 10 ok" in repr(result) and "TTFT" in str(result)


def test_results_convert_to_data_frames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stages = [{"arrival": {"poisson": "20/s"}, "count": 30}]
    workload = {
        "name": "few",
        "requests": {"input_tokens": 30, "output_tokens": 5},
        "stages": stages,
    }
    result = loadgen.run(workload, url="sim:h100x8", out=tmp_path / "sweep" / "c1")
    frame = result.frame()

    assert len(frame) == 30 and set(frame["status"]) == {"ok"}
    assert float(frame["ttft_ms"].max()) == pytest.approx(result.ttft_ms.max)
    assert float(frame["e2e_ms"].mean()) == pytest.approx(result.e2e_ms.mean, rel=1e-6)
    assert frame["session"].isna().all() and frame["cached_tokens"].dtype.kind == "i"
    polars = result.frame("polars", unit="s")
    assert polars["tpot_s"].max() == pytest.approx((result.tpot_ms.max or 0) / 1e3)
    assert (
        result.frame("pyarrow", unit="ns")["due_ns"].to_pylist()
        == result.rows["due_ns"].to_pylist()
    )
    notebook = result._repr_html_()
    assert (
        "<table>" in notebook
        and "TTFT" in notebook
        and "<svg" in notebook
        and "<script" not in notebook
    )
    with refused(loadgen.core.errors.UserError, "unknown_name"):
        result.frame(unit="h")  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "pandas", None)  # as where it is not installed
    with refused(loadgen.core.errors.UserError, "not_installed"):
        result.frame()
    runs = loadgen.load_runs(tmp_path / "sweep")
    assert list(runs) == ["c1"] and runs["c1"].ttft_ms == result.ttft_ms
    assert list(loadgen.load_runs(tmp_path)) == ["sweep/c1"]
    with refused(loadgen.core.errors.UserError, "no_result", where="/c1/flows"):
        loadgen.load_runs(tmp_path / "sweep" / "c1" / "flows")


def test_a_workload_is_checked_and_run_on_a_virtual_target(tmp_path: Path) -> None:
    path = tmp_path / "few.yaml"
    path.write_text(
        "name: few\nrequests: {input_tokens: 30, output_tokens: 5}\n"
        "stages: [{arrival: {poisson: 20/s}, count: 30}]\n"
    )
    result = loadgen.run(load_workload(str(path)), url="sim:h100x8", out=tmp_path / "a")
    two = loadgen.run(path, url="sim:h100x8", out=tmp_path / "b")

    assert result.requests.ok == two.requests.ok == 30
    assert result.summary.fingerprints.recipe == two.summary.fingerprints.recipe


@pytest.mark.processes
def test_a_blocking_run_in_an_event_loop_is_refused_with_a_hint_to_use_a_thread(
    tmp_path: Path,
) -> None:
    async def go() -> Any:
        with refused(LoadgenError, "event_loop") as exc_info:
            loadgen.run(FEW, concurrency=1, num_requests=1)
        assert "await loadgen.arun(...)" in str(exc_info.value)
        return await asyncio.to_thread(
            loadgen.run, FEW, concurrency=1, num_requests=3, out=tmp_path / "run", **QUICK
        )

    assert asyncio.run(go()).requests.ok == 3


@pytest.mark.parametrize(
    ("use", "error", "code"),
    [
        (lambda: loadgen.run("nowhere.yaml"), CombinedError, "missing_file"),
        (loadgen.run, CombinedError, "missing_option"),
        (lambda: loadgen.run(7), LoadgenError, "wrong_type"),
        (lambda: loadgen.run("qa", duration="soon", seed=-1), CombinedError, "invalid_value"),
        (lambda: loadgen.run("qa", server="x", keep="y", workers=0), CombinedError, "unknown_name"),
        (lambda: loadgen.run("qa", cacert="/nowhere.pem"), CombinedError, "missing_file"),
        (lambda: loadgen.run({"name": "x"}), CombinedError, "missing_key"),
        (lambda: loadgen.run("qa", trace="/nowhere.jsonl"), CombinedError, "missing_file"),
        (lambda: loadgen.run(load_workload("qa"), duration="3s"), LoadgenError, "conflict"),
        (lambda: loadgen.run("qa", url="http://127.0.0.1:9"), LoadgenError, "connect"),
        (lambda: loadgen.load("/nowhere"), LoadgenError, "missing_file"),
    ],
)
def test_errors_in_python_equal_those_of_the_command_line(
    use: Callable[[], Any],
    error: type[Exception],
    code: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)  # its results/
    with refused(error, code):
        use()


def test_an_unknown_option_of_run_is_refused_with_a_suggestion() -> None:
    with pytest.raises(TypeError, match="no option 'durtion'; did you mean 'duration'"):
        loadgen.run("qa", durtion="3s")  # type: ignore[call-arg]


def test_an_unknown_name_of_the_package_raises_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'walk'"):
        loadgen.walk()


pytest_plugins = ["pytester"]

TESTS = """
FEW = {"name": "few", "requests": {"input_tokens": 12, "output_tokens": 4}}
QUICK = {"ttft": "3ms", "itl": "1ms"}

def test_all_requests_succeed(loadgen_run, tmp_path):
    result = loadgen_run(FEW, concurrency=1, num_requests=4, embedded=QUICK)
    assert result.folder.parent == tmp_path
    assert result.requests.ok == 4

def test_no_request_succeeds(loadgen_run):
    result = loadgen_run(FEW, concurrency=1, num_requests=4, embedded=QUICK)
    assert result.requests.ok == 0
"""


@pytest.mark.processes
def test_the_pytest_fixture_passes_or_fails_and_prints_the_report(
    pytester: pytest.Pytester,
) -> None:
    """The tests depend on counts, because latencies are withheld on a busy machine."""
    pytester.makepyfile(TESTS)
    loaded = any(
        plugin is pytest_plugin for plugin in pytester._request.config.pluginmanager.get_plugins()
    )
    result = pytester.runpytest_inprocess(
        "-p", "no:xdist", *(() if loaded else ("-p", "loadgen.pytest_plugin"))
    )
    result.assert_outcomes(passed=1, failed=1, warnings=None)
    result.stdout.fnmatch_lines(["*Captured loadgen call*", "*4 succeeded, 0 failed*"])


@pytest.mark.processes
def test_the_function_arun_runs_within_an_event_loop(tmp_path: Path) -> None:
    async def go() -> loadgen.Result:
        with pytest.raises(LoadgenError, match=r"--> loadgen.run") as exc_info:
            loadgen.run(FEW, concurrency=1, num_requests=3, out=tmp_path / "run", **QUICK)
        assert "await loadgen.arun(...)" in exc_info.value.hint
        return await loadgen.arun(FEW, concurrency=1, num_requests=3, out=tmp_path / "run", **QUICK)

    assert asyncio.run(go()).requests.ok == 3


def test_public_names_are_listed_by_dir() -> None:
    assert {*loadgen.__all__, "__version__"} <= {*dir(loadgen)}
    assert loadgen.__version__ == metadata.version("loadgen")
