"""Every kind of result works in every place: opened, listed, printed, drawn and compared.

This includes a kind that a plug-in adds.
"""

from __future__ import annotations

import ast
import json
import shutil
import sys
import urllib.request
from collections.abc import Iterator
from html import unescape
from importlib import import_module
from pathlib import Path
from urllib.parse import quote

import msgspec
import pytest
import repository_paths
from command_line import exits
from expected_errors import refused
from loadgen_sdk import plugins as sdk_plugins
from make_packages import ROOT
from msgspec.structs import replace
from plugin_packages import install
from report_text import find_numbers, of_page
from scripted_server import answering

import loadgen
from loadgen import plugins, result_kinds
from loadgen.answers import answer_files as answers
from loadgen.answers.comparison import AnswersResult, score_prompts, summarize_scores
from loadgen.answers.questions import AnswerKey
from loadgen.bundle.bundle_writer import write_bundle
from loadgen.bundle.verification import verify_bundle
from loadgen.compare.side_reader import read_sides
from loadgen.core import run_folder
from loadgen.core.errors import CombinedError, UserError
from loadgen.core.format import quantity
from loadgen.core.metrics.summary import dump_summary
from loadgen.core.results import checksums
from loadgen.mlperf.accuracy import AccuracyMean, AccuracyResult, AccuracyTarget
from loadgen.plugins import OpenTable
from loadgen.render import html as as_page
from loadgen.render import markdown as as_markdown
from loadgen.render import text as as_text
from loadgen.render.section import Section
from loadgen.result_kinds import KINDS, OpenedResult, kind_of, opened
from loadgen.ui.page import render_text
from loadgen.ui.results_list import json_row, results_in
from loadgen.ui.server import ResultsServer

pytestmark = pytest.mark.commands

DATA = Path(__file__).parent / "data"
SIM = ("--url", "sim:gb300-vm", "--seed", "3")
KIND_BY_NAME = {
    "raw": "run",
    "sweep": "sweep",
    "search": "search",
    "tiers": "tiers",
    "contract": "validation",
    "mlperf": "mlperf",
    "official": "mlperf",
    "repeats": "repeats",
    "swept-twice": "repeats",
    "answers": "answers",
    "accuracy": "accuracy",
    "size": "size",
    "levels": "runs",
    "guidellm": "other tool",
    "vllm.json": "other tool",
    "calls.jsonl": "calls",
    "lengths": "sweep",
}


@pytest.fixture(scope="module")
def results_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a result of each kind, by its name in KIND_BY_NAME."""
    root = tmp_path_factory.mktemp("results")
    for name in ("raw", "sweep", "search", "contract", "mlperf"):
        repository_paths.unpack(name, root)
    exits(
        "sweep",
        "qa",
        *SIM,
        "-c",
        "1,2",
        "-n",
        "30",
        "--isl",
        "100,200",
        "--osl",
        "20",
        "-o",
        root / "lengths",
    )
    tiers = ("--over", "sessions", "--tier", "10:8s", "--tier", "60:5s", "--low", "4")
    trials = ("--high", "6", "-d", "20s", "--no-sustain", "--precision", "50%")
    exits("search", "agentic", *SIM, *tiers, *trials, "-o", root / "tiers")
    (root / "official" / "ours").mkdir(parents=True)
    for name in ("mlperf.json", "mlperf_log_summary.txt", "mlperf_log_detail.txt"):
        shutil.copy(root / "mlperf" / name, root / "official" / name)
    load = ("qa", *SIM, "--duration", "20s", "--request-rate")
    exits("run", *load, "5", "--repeat", "2", "-o", root / "repeats")
    exits("sweep", *load, "2,4", "--repeat", "2", "-o", root / "swept-twice")
    for level in ("r10", "r40"):
        shutil.copytree(root / "sweep" / level, root / "levels" / level)
    for run_dir in (root / "levels").iterdir():
        # The stored folders hold records; their summaries are computed again from these.
        (run_dir / "summary.json").write_bytes(dump_summary(run_folder.summary(run_dir)))
        checksums.write(run_dir)
    keys = [AnswerKey(reference=f"the answer is {n}") for n in range(40)]
    prompts = score_prompts(
        keys, [f"the answer is {n}" if n % 4 else "no idea" for n in range(40)], None
    )
    result = AnswersResult(
        dataset="d.jsonl",
        url="http://h",
        model="m",
        prompts=40,
        failed=0,
        simulated=True,
        groups=summarize_scores(prompts),
    )
    answers.write_result(root / "answers", result, prompts)
    accuracy = AccuracyResult(
        benchmark="llama2-70b",
        round="v6.1",
        dataset="d.pkl",
        dataset_sha256="",
        url="http://h",
        model="m",
        version="0.1.0",
        samples=2,
        samples_of_rules=24576,
        answered=2,
        means=(AccuracyMean(metric="rouge1", mean=44.5, low=44.0, high=45.0),),
        targets=tuple(
            AccuracyTarget(tier=tier, metric="rouge1", least=43.9, met=True)
            for tier in (0.99, 0.999)
        ),
    )
    (root / "accuracy").mkdir()
    (root / "accuracy" / "mlperf_accuracy.json").write_bytes(msgspec.json.encode(accuracy))
    assert (
        exits(
            "size",
            "open",
            root / "search",
            "--users",
            "500",
            "--allow-invalid",
            "-o",
            root / "size",
        )
        == 0
    )
    (root / "guidellm").mkdir()
    shutil.copy(DATA / "rivals" / "guidellm_benchmarks.json", root / "guidellm" / "benchmarks.json")
    shutil.copy(DATA / "rivals" / "vllm_bench_serve.json", root / "vllm.json")
    call = {
        "api": "chat",
        "status": "ok",
        "started_unix_ns": 1,
        "labels": {},
        "ttft_ms": 120.0,
        "tpot_ms": 10.0,
        "e2e_ms": 210.0,
        "input_tokens": 5,
        "output_tokens": 10,
        "cost": None,
    }
    (root / "calls.jsonl").write_text(f"{json.dumps(call)}\n{json.dumps(call)}\n")
    return root


@pytest.fixture
def results(results_dir: Path, tmp_path: Path) -> Path:
    """Return copies of the results that a test may change."""
    shutil.copytree(results_dir, tmp_path / "results")
    return tmp_path / "results"


# -- the table itself ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS.builtin_rows, ids=lambda kind: kind.name)
def test_a_result_kind_that_can_be_opened_has_the_functions_of_a_report(
    kind: result_kinds.ResultKind,
) -> None:
    functions = kind.functions
    if functions.load is not None:
        assert functions.headline is not None and functions.document is not None
        assert (functions.report is None) is not (functions.text is None), "one or the other"
        assert (functions.text is None) is (functions.page is None)
    assert kind.has_runs is (functions.runs is not None)
    assert (functions.schema is None) is (not kind.markers), "the content of the first marker"


def test_rows_of_the_table_of_result_kinds_have_unique_names() -> None:
    names = KINDS.names(include_plugins=False)
    assert len(set(names)) == len(names) and set(KIND_BY_NAME.values()) <= set(names)


def _changed(value: object, text: str, number: float) -> object:
    """Return a document with texts and numbers from an untrusted source."""
    if isinstance(value, dict):
        return {key: _changed(child, text, number) for key, child in value.items()}
    if isinstance(value, list):
        return [_changed(child, text, number) for child in value][: 9 if number else 0]
    if isinstance(value, str):
        return text or value
    return (
        type(value)(number)
        if number and isinstance(value, int | float) and type(value) is not bool
        else value
    )


@pytest.mark.commands
@pytest.mark.parametrize(
    ("text", "number"), [("\x1b[2J VALID", 3.0), ("", 10.0**18), ("", -7.5), ("", 0.0)]
)
@pytest.mark.parametrize("name", KIND_BY_NAME)
def test_a_foreign_result_is_printed_safely_or_refused(
    results_dir: Path,
    tmp_path: Path,
    name: str,
    text: str,
    number: float,
    capsys: pytest.CaptureFixture[str],
) -> None:
    its = tmp_path / name
    (shutil.copytree if (results_dir / name).is_dir() else shutil.copy)(results_dir / name, its)
    for file in [its] if its.is_file() else its.glob("*.json"):
        lines = file.read_text().splitlines() if file.suffix == ".jsonl" else [file.read_text()]
        file.write_text(
            "\n".join(json.dumps(_changed(json.loads(line), text, number)) for line in lines)
        )

    for command in (
        ("report",),
        ("report", "--json"),
        ("bundle", "-o", tmp_path / "b.zip"),
        ("compare", results_dir / "raw"),
    ):
        assert exits(command[0], its, *command[1:]) in (0, 1, 2, 3), capsys.readouterr().err[-600:]
    assert "\x1b" not in render_text(results_in(tmp_path))


@pytest.mark.commands
def test_a_comparison_of_a_run_whose_header_does_not_fit_its_records_is_refused(
    results_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    its = Path(shutil.copytree(results_dir / "repeats", tmp_path / "its"))
    header = its / "r1" / "run.json"
    header.write_text(json.dumps(_changed(json.loads(header.read_bytes()), "", 0.0)))
    assert exits("compare", results_dir / "raw", its, "--anyway") == 2
    assert "the files are damaged" in capsys.readouterr().err


def test_infinite_and_undefined_numbers_are_printed() -> None:
    assert (quantity(float("inf")), quantity(float("-inf")), quantity(float("nan"))) == (
        "inf",
        "-inf",
        "nan",
    )


OWNERS = {  # a file that names a marker -> why
    "answers/answer_files.py": "writes it",
    "compare/live_plan.py": "its file",
    "cost/size_result.py": "writes it",
    "contracts/outputs.py": "writes it",
    "contracts/stored_validation.py": "writes it, and reads the runs of a level",
    "mlperf/run.py": "writes it",
    "mlperf/accuracy_run.py": "writes it",
    "mlperf/endpoints/curve_result.py": "writes it",
    "search/agent_tiers.py": "writes it",
    "search/experiment.py": "writes it, and writes over no run",
    "search/trials_csv.py": "names the file that it renders",
    "shards/merge.py": "writes the manifest of the merged run",
    "shards/parts.py": "reads the headers of the parts",
    "sim/virtual_backend.py": "writes the summary of a run",
    "sim/virtual_run_files.py": "writes the other files of a run",
    "runs/dashboard.py": "reads the manifest of the run that goes on",
    "cli/output.py": "asks whether a run below a folder has ended",
    "ui/results_list.py": "asks when the manifest of a run was last written",
    "bundle/verification.py": "definitions that have changed, by file; manifests of runs",
    "interop/trackers.py": "the files that a tracker is given",
    "mlperf/extra_sections.py": "whether a run has anything to add, before more is imported",
    "repeated/capacity.py": "its file",
    "repeated/repeats.py": "its file",
    "result_kinds.py": "the table",
    "telemetry/otel.py": "reads the manifest of the run that it follows",
    "telemetry/prometheus.py": "reads the manifest of the run that it follows",
    "cli/exit_codes.py": "which run was going on when a command broke off",
}


def test_only_the_table_of_result_kinds_checks_the_files_of_a_folder() -> None:
    """A marker file is named only in the table of kinds and where it is written."""
    named = {marker for kind in KINDS.builtin_rows for marker in kind.markers} | {
        "search.json",
        "curve.csv",
        "sweep.json",
    }
    package = ROOT / "loadgen"
    modules = {
        file.relative_to(package).as_posix()
        for file in package.rglob("*.py")
        if not file.is_relative_to(package / "core")
        and any(name in file.read_text("utf-8") for name in named)
        for node in ast.walk(ast.parse(file.read_bytes()))
        if isinstance(node, ast.Constant) and node.value in named
    }

    assert modules == set(OWNERS)


@pytest.mark.parametrize("name", KIND_BY_NAME)
def test_the_kind_of_a_result_is_detected(results_dir: Path, name: str) -> None:
    kind = kind_of(results_dir / name)
    assert kind is not None and kind.name == KIND_BY_NAME[name]


def test_a_folder_of_results_is_a_collection(results_dir: Path) -> None:
    opened_result = opened(results_dir)
    assert opened_result.kind == "results" and "2 repeats" in opened_result.headline
    assert "swept-twice" in opened_result.text and "swept-twice" in (opened_result.page or "")


def test_a_folder_without_a_result_has_no_result_kind(tmp_path: Path) -> None:
    assert kind_of(tmp_path) is None
    with refused(UserError, "no_result"):
        opened(tmp_path)
    with refused(UserError, "missing_file"):
        opened(tmp_path / "nowhere")


# -- every kind in every place ---------------------------------------------------------------------


@pytest.mark.parametrize("name", KIND_BY_NAME)
def test_every_result_kind_is_reported(
    results: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its text; its page beside it, or none; its document; one exit code for all."""
    path = results / name
    kind = kind_of(path)

    assert kind is not None

    before = {file: file.read_bytes() for file in results.rglob("*") if file.is_file()}
    code = exits("report", path)
    captured = capsys.readouterr()

    assert code in (0, 1, 3) and captured.out.count("\n") > 2

    page = path / kind.page_name
    functions = kind.functions
    if (functions.page or functions.report) and kind.page_name:
        assert page.read_text().startswith("<!doctype html>") and f"page: {page}" in captured.err

    after = {file: file.read_bytes() for file in results.rglob("*") if file.is_file()}
    changed = {file.name for file in after if before.get(file) != after[file]}
    assert changed <= {kind.page_name, checksums.FILE}, (
        "a page made of the records, and nothing of the result"
    )
    assert exits("report", path, "--json") == code
    assert json.loads(capsys.readouterr().out)
    assert exits("report", path, "--markdown") == code
    pasted = capsys.readouterr().out
    assert (
        "### " in pasted
        if functions.report is not None
        else pasted.startswith("```text\n") and pasted.endswith("```\n")
    )
    assert exits("report", path, "--no-html") == code


@pytest.mark.parametrize("name", KIND_BY_NAME)
def test_every_result_kind_is_loaded(results_dir: Path, name: str) -> None:
    loaded_result = loadgen.load(results_dir / name)
    runs_here = KIND_BY_NAME[name] == "run" or name == "mlperf"

    assert isinstance(loaded_result, loadgen.Result if runs_here else OpenedResult)
    assert loaded_result.kind == KIND_BY_NAME[name]
    assert loaded_result.headline.rstrip(".") and "\n" not in loaded_result.headline
    assert loaded_result.headline.endswith(".") and loaded_result.text.endswith("\n")
    assert str(loaded_result).splitlines()[
        0
    ] in loaded_result.text and loaded_result._repr_html_().startswith(("<div", "<pre"))
    assert loaded_result.page is not None and loaded_result.page.startswith("<!doctype html>")
    assert results_dir.name in repr(loaded_result) or name in repr(loaded_result) or runs_here


def test_a_loaded_result_has_its_value_and_its_runs(results_dir: Path) -> None:
    search = loadgen.load(results_dir / "search")

    assert search.value.result.stop_reason and len(search.runs) == len(search.value.runs) > 2
    repeats = loadgen.load(results_dir / "swept-twice")
    assert list(repeats.value.by_load_point) == ["r2", "r4"]
    assert repeats.value.by_load_point["r4"].runs == ("r1/r4", "r2/r4")
    assert list(loadgen.load_runs(results_dir / "swept-twice")) == [
        "r1/r2",
        "r2/r2",
        "r1/r4",
        "r2/r4",
    ]
    assert list(loadgen.load_runs(results_dir / "contract")) == ["steady/r1"]
    assert loadgen.load(results_dir / "contract").value.verdict.verdict in (
        "PASS",
        "FAIL",
        "INCONCLUSIVE",
    )
    assert (
        loadgen.load(results_dir / "answers").value.prompts == 40
        and loadgen.load(results_dir / "answers").runs == ()
    )


def test_every_result_kind_that_a_command_writes_is_listed(results_dir: Path) -> None:
    stored_results_by_name = {result.name: result for result in results_in(results_dir)}
    folders = {name for name in KIND_BY_NAME if (results_dir / name).is_dir()} - {
        "levels",
        "guidellm",
    }

    assert (
        folders <= stored_results_by_name.keys()
        and {"levels/r10", "levels/r40"} <= stored_results_by_name.keys()
    )
    assert {name: stored_results_by_name[name].kind for name in folders} == {
        name: KIND_BY_NAME[name] for name in folders
    }
    assert not [
        result.name
        for result in stored_results_by_name.values()
        if "cannot be read" in result.reported_outcome
    ]
    of_answers = stored_results_by_name["answers"]
    assert (
        of_answers.reported_outcome.startswith("ROUGE-1 75.0 %")
        and "m" in of_answers.description
        and of_answers.simulated
    )
    curve = stored_results_by_name["swept-twice"].curve
    assert curve is not None and {level.name for level in curve.load_points} == {
        "r1/r2",
        "r2/r2",
        "r1/r4",
        "r2/r4",
    }

    for result in stored_results_by_name.values():
        row, line = json_row(result), render_text([result]).splitlines()[1]
        assert row["word"] and row["word"] in line, (
            row
        )  # the list as JSON and as text say the same outcome


@pytest.fixture
def address(results_dir: Path) -> Iterator[str]:
    with answering(ResultsServer(results_dir, 0, None)) as server:
        yield server.address


def test_the_ui_displays_every_listed_result_kind(results_dir: Path, address: str) -> None:
    def page(path: str) -> str:
        with urllib.request.urlopen(address + path, timeout=60) as answer:
            return unescape(answer.read().decode())

    listed = page("")
    for name in ("answers", "size", "repeats", "swept-twice", "contract", "accuracy", "official"):
        assert f"result/{quote(name)}/" in listed
        page_html = page(f"result?r={quote(name)}")
        assert "Cannot be shown" not in page_html
        opened_result = opened(results_dir / name)
        assert (
            opened_result.headline.partition(": ")[2] in page_html
            if opened_result.kind == "repeats"
            else opened_result.text.splitlines()[-1] in page_html or opened_result.page
        )
    assert "Student" in page("result?r=repeats")


# -- comparison ------------------------------------------------------------------------------------


def test_a_search_is_compared_by_the_run_at_its_capacity(
    results_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evidence = json.loads((results_dir / "search" / "capacity.json").read_text())["evidence"]
    search, run = read_sides([results_dir / "search", results_dir / "search" / evidence])

    assert [compared_run.name for compared_run in search.runs] == [evidence] and search.runs[
        0
    ].summary == run.runs[0].summary
    assert evidence in search.notes[0]
    trial = results_dir / "search" / "p00-15.9889"
    assert exits("compare", results_dir / "search", trial, "--anyway", "--full") in (0, 3)
    assert evidence in capsys.readouterr().out
    assert (
        exits("compare", "--save", "peak", results_dir / "search", "--in", tmp_path / "kept") == 0
    )
    assert (
        exits("compare", "--save", "levels", results_dir / "sweep", "--in", tmp_path / "kept") == 2
    ), "no one side"
    assert "different config fingerprints" in capsys.readouterr().err
    assert not (tmp_path / "kept" / "levels").exists()

    shutil.copytree(results_dir / "search", tmp_path / "none")
    (tmp_path / "none" / "capacity.json").unlink()
    with refused(CombinedError, "no_figure"):
        read_sides([tmp_path / "none"])


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("answers", "unsupported"),
        ("size", "unsupported"),
        ("sweep", "mismatch"),
        ("swept-twice", "mismatch"),
        ("accuracy", "unsupported"),
    ],
)
def test_a_result_that_cannot_be_compared_is_refused(
    results_dir: Path, name: str, code: str
) -> None:
    with refused(CombinedError, code):
        read_sides([results_dir / name])


def test_a_validation_of_one_level_can_be_compared(results_dir: Path) -> None:
    (side,) = read_sides([results_dir / "contract"])
    assert [run.name for run in side.runs] == ["r1"]


# -- bundles ---------------------------------------------------------------------------------------


def check_bundle(result: Path, bundle: Path, kind: str) -> None:
    """Assert that everything in a bundle of this result can be made again and is equal."""
    exits("report", result)
    write_bundle(result, bundle)
    verification = verify_bundle(bundle)
    assert (verification.manifest.kind, verification.differences) == (kind, ())
    assert verification.verified in ("all", "part")
    pages = {file for file in verification.manifest.omitted_files if file.endswith(".html")}
    assert pages == {"report.html"}, "the page of a sweep is part of it"
    assert not [file for file in verification.skipped if file.endswith(".html")]


@pytest.mark.parametrize(
    ("name", "kind"), [("swept-twice", "repeats"), ("answers", "answers"), ("levels", "runs")]
)
def test_a_bundle_of_each_result_kind_is_reproduced(
    results: Path, tmp_path: Path, name: str, kind: str
) -> None:
    check_bundle(results / name, tmp_path / "x.zip", kind)


def test_the_bundle_of_an_mlperf_test_is_reproduced(tmp_path: Path) -> None:
    load = ("-b", "llama2-70b", *SIM, "--min-duration", "5", "--target-qps", "10")
    exits("mlperf", "server", *load, "-o", tmp_path / "mlperf")
    check_bundle(tmp_path / "mlperf", tmp_path / "x.zip", "run")


def test_a_result_that_cannot_be_reproduced_is_not_bundled(
    results_dir: Path, tmp_path: Path
) -> None:
    with refused(UserError, "unsupported"):
        write_bundle(results_dir / "size", tmp_path / "x.zip")


# -- pages -----------------------------------------------------------------------------------------


def test_repeats_have_a_text_and_a_page(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert exits("report", results / "repeats", "--full") == 0

    text = capsys.readouterr().out
    page = unescape((results / "repeats" / "report.html").read_text())
    (mean,) = (line.split() for line in text.splitlines() if line.startswith("TTFT p50, ms"))

    assert f">{mean[3]}</td>" in page and "SIMULATED" in page and ">r2</td>" in page
    assert json.loads(page.split('id="charts">')[1].split("</script>")[0])[0]["title"] == "TTFT p50"
    assert exits("report", results / "swept-twice") == 0
    page = (results / "swept-twice" / "report.html").read_text()
    assert ">r1/r4</td>" in page and "±" in page


@pytest.mark.parametrize(
    "name",
    [name for name, kind in KIND_BY_NAME.items() if result_kinds.named(kind).functions.report],
)
def test_text_markdown_and_page_of_each_result_have_the_same_numbers(
    results_dir: Path, name: str
) -> None:
    """Drawings aside, and what stands on a page only."""
    opened_result = opened(results_dir / name)
    report = opened_result.row.functions.report(opened_result.value)
    shared = replace(
        report,
        # The page shows a section for texts inside another section, which is left out here.
        sections=[
            replace(section, text_only=False)
            for section in report.sections
            if isinstance(section, Section) and not section.page_only
        ],
    )
    numbers = find_numbers(as_text.render(report, full=True)) | find_numbers(report.title)

    assert (
        numbers
        == find_numbers(as_markdown.render(shared))
        == find_numbers(of_page(as_page.render(shared)))
    )
    assert len(numbers) > 5


@pytest.mark.parametrize(
    ("name", "file", "field"),
    [
        ("raw", "run.json", "schema"),
        ("mlperf", "mlperf.json", "samples"),
        ("search", "search.json", "settings"),
        ("size", "size.json", "made"),
    ],
)
def test_a_file_without_a_required_value_is_refused_as_damaged(
    results: Path, name: str, file: str, field: str, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(results / name, tmp_path / name))
    content = json.loads((folder / file).read_bytes())
    del content[field]
    (folder / file).write_text(json.dumps(content))
    with pytest.raises(UserError) as exc_info:
        assert opened(folder).text
    assert exc_info.value.exit_code == 2
    assert exc_info.value.where == str(folder / file) and f"`{field}`" in str(exc_info.value)


def test_a_report_leaves_the_files_of_a_verdict_unchanged(results: Path) -> None:
    folder = results / "contract"
    assert exits("report", folder) in (0, 1, 3)
    assert not checksums.find_changes(folder) and not (folder / "report.html").exists()
    before = (folder / "verdict.html").read_bytes()
    (folder / "verdict.html").unlink()
    checksums.write(folder)
    assert opened(folder).page
    assert len(before) > 1000


# -- a kind of somebody else -----------------------------------------------------------------------

PACKAGE = '''
"""Soak tests of somebody else: one file with the hours that were survived."""
import json
from loadgen.render.section import Section
from loadgen.result_kinds import ListRow, ResultFunctions, ResultKind
from loadgen.runs.comparison_side import Side

def load(folder):
    return json.loads((folder / "soak.json").read_text())

def headline(soak):
    return f"Survived {soak['hours']} hours."

def text(soak, color):
    return headline(soak) + "\\n"

def page(soak):
    return f"<!doctype html><p>{headline(soak)}</p>"

def document(soak):
    return json.dumps(soak).encode()

def code(soak, strict):
    return 0 if soak["hours"] >= 24 else 1

def list_row(folder):
    return ListRow(outcome=f"{load(folder)['hours']} h", description="soak")

def compare_side(folder):
    return Side(name="", reported_metrics={"hours": load(folder)["hours"]})

FUNCTIONS = ResultFunctions(
    load=load, headline=headline, text=text, page=page, document=document, code=code,
    list_row=list_row, compare_side=compare_side,
)
SOAK = ResultKind(name="soak", load_functions=lambda: FUNCTIONS, markers=("soak.json",))
'''


@pytest.fixture
def soaked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Create a result of a kind that an installed plug-in adds."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(site)
    install(
        site, "soak-tests", {"soak_kind": PACKAGE}, {"loadgen.results": {"soak": "soak_kind:SOAK"}}
    )
    (tmp_path / "results" / "s").mkdir(parents=True)
    (tmp_path / "results" / "s" / "soak.json").write_text('{"hours": 12.0}')
    forget()
    yield tmp_path / "results" / "s"
    forget()
    sys.modules.pop("soak_kind", None)


def forget() -> None:
    """Look for plug-ins again."""
    vars(KINDS).pop("_plugins", None)
    sdk_plugins._USED.clear()


def test_a_result_kind_of_a_plugin_works_like_a_built_in_one(
    soaked: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exits("report", soaked) == 1
    assert capsys.readouterr().out == "Survived 12.0 hours.\n"
    assert "Survived" in (soaked / "report.html").read_text()
    assert exits("report", soaked, "--json") == 1
    assert json.loads(capsys.readouterr().out) == {"hours": 12.0}
    assert [
        (stored_result.name, stored_result.kind, stored_result.reported_outcome)
        for stored_result in results_in(soaked.parent)
    ] == [("s", "soak", "12.0 h")]
    assert loadgen.load(soaked).headline == "Survived 12.0 hours."
    assert read_sides([soaked])[0].reported_metrics == {"hours": 12.0}


def test_no_plugin_is_loaded_if_plugins_are_switched_off(
    soaked: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with plugins.without_plugins():
        assert kind_of(soaked) is None and results_in(soaked.parent) == []
    assert "soak_kind" not in sys.modules, "nothing of a package was imported"
    monkeypatch.setenv("LOADGEN_PLUGINS", "0")
    assert exits("report", soaked) == 2
    assert "has no run.json" in capsys.readouterr().err


def test_a_failing_kind_of_a_plugin_names_its_package_and_stops_nothing(
    soaked: Path, results_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (soaked / "soak.json").write_text('{"days": 3}')

    assert exits("report", soaked) == 2
    stderr = capsys.readouterr().err
    assert "plug-in soak of soak-tests 1.0 failed: KeyError: 'hours'" in stderr

    shutil.copytree(results_dir / "raw", soaked.parent / "raw")
    stored_results_by_name = {
        stored_result.name: stored_result for stored_result in results_in(soaked.parent)
    }

    assert (
        stored_results_by_name["raw"].curve is not None
        and "soak-tests" in stored_results_by_name["s"].reported_outcome
    )


def test_the_table_of_kinds_accepts_rows_of_plugins() -> None:
    assert isinstance(KINDS, OpenTable) and KINDS.group == "loadgen.results"
    assert import_module("loadgen.result_kinds").RUN.name == "run"


def test_the_list_states_when_a_size_was_computed(results_dir: Path) -> None:
    (row,) = [row for row in results_in(results_dir) if row.kind == "size"]
    assert row.started.startswith("20") and row.outcome.startswith("machines: ")
    assert row.started[:16].replace("T", " ") in render_text([row])


def test_a_failure_on_unchanged_files_is_reported_as_a_bug(tmp_path: Path) -> None:
    """And on others a fault of the files."""
    (tmp_path / "run.json").write_text("{}")

    with refused(UserError, "damaged_file"), result_kinds.reporting_damage(tmp_path):
        raise KeyError("nobody vouches for the folder")
    checksums.write(tmp_path)
    with pytest.raises(KeyError), result_kinds.reporting_damage(tmp_path):
        raise KeyError("ours")
    (tmp_path / "run.json").write_text("[]")
    with refused(UserError, "damaged_file"), result_kinds.reporting_damage(tmp_path):
        raise KeyError("changed")


@pytest.mark.parametrize(
    "command_line",
    [
        "report",
        "compare other",
        "bundle -o b.zip",
        "export --as vllm",
        "verify",
        "ui",
        "cost --accept-sample-prices",
        "size rag --users 5",
        "validate --extend",
        "search --resume",
        "mlperf server --find-peak --resume",
        "mlperf verdict",
    ],
)
def test_a_url_in_place_of_a_result_is_refused(
    command_line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for url in ("http://h", "http:/h", "https://h/v1"):
        assert exits(*command_line.split(), url) == 2
        assert "not a URL" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command_line",
    [
        "run qa --dataset",
        "run qa --trace",
        "run qa --targets",
        "run qa --prices",
        "run qa --api-key-file",
        "run qa --cacert",
        "run qa --system",
        "run qa --junit",
        "report x --html",
        "bundle x -o",
        "verify x --signed-by",
        "compare x y --in",
        "answers q.jsonl -o",
        "fit t.jsonl -o",
        "ui --prices",
        "size rag x -o",
        "validate",
        "fit",
        "answers",
        "run",
        "sweep",
        "search",
    ],
)
def test_a_url_in_place_of_a_file_is_refused_without_printing_its_password(
    command_line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without its password."""
    assert exits(*command_line.split(), "https://user:secret@h/x.jsonl") == 2
    stderr = capsys.readouterr().err
    assert "not a URL" in stderr and "secret" not in stderr
