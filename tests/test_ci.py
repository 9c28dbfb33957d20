"""Tests for build servers: JUnit, step summary, named baselines, strict fixture, templates."""

from __future__ import annotations

import os
import runpy
import shlex
import subprocess
import sys
from datetime import datetime, timedelta
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest
import repository_paths
import yaml
from command_line import exits

from loadgen import pytest_plugin
from loadgen.core.execution.folder_names import locked_folder
from loadgen.core.metrics.goodput import Goodput, without_outcomes_if_invalid
from loadgen.core.metrics.part_summaries import ClassSummary
from loadgen.core.metrics.summary import load_summary
from loadgen.core.metrics.task_summary import Sessions, TaskGoodput
from loadgen.core.metrics.verdict import make_verdict
from loadgen.core.results.manifest import ReasonCode
from loadgen.core.run_folder import read_summary
from loadgen.runs import outcome
from loadgen.runs.ci_report import create_ci_report
from loadgen.runs.slo_text import judge_objectives

pytestmark = pytest.mark.commands

ROOT = Path(__file__).parent.parent
RUN = ("run", "qa", "--url", "sim:gb300-vm", "--seed", "3", "-n", "300", "--slo", "ttft:1s:p95")
pytest_plugins = ["pytester"]


def outcomes(file: Path) -> dict[str, str]:
    cases = ElementTree.parse(file).getroot().iter("testcase")
    return {
        case.attrib["name"]: next(
            (child.tag for child in case if child.tag != "system-out"), "passed"
        )
        for case in cases
    }


def test_a_run_is_reported_as_junit_cases_and_step_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)

    assert exits(*RUN, "--github") == 2
    assert "of a GitHub workflow" in capsys.readouterr().err

    page = tmp_path / "page.md"
    page.write_text("before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(page))
    met = exits(*RUN, "-o", str(tmp_path / "met"), "--github", "--junit", str(tmp_path / "met.xml"))

    assert met == 0
    assert set(outcomes(tmp_path / "met.xml").values()) == {"passed"}
    assert "TTFT p95 at most 1,000 ms" in outcomes(tmp_path / "met.xml")
    page_text = page.read_text()
    assert (
        page_text.startswith("before\n### loadgen: qa: SIMULATED, VALID, SLO met")
        and "| TTFT p95 at most 1,000 ms |" in page_text
    )

    missed = (
        *RUN[:-1],
        "ttft:1ms:p95",
        "-o",
        str(tmp_path / "c"),
        "-c",
        "1,2",
        "--junit",
        str(tmp_path / "c.xml"),
    )

    assert exits(*missed) == 1
    root = ElementTree.parse(tmp_path / "c.xml").getroot()
    assert {case.attrib["classname"] for case in root.iter("testcase")} == {
        "loadgen.c1",
        "loadgen.c2",
    }
    assert outcomes(tmp_path / "c.xml")["TTFT p95 at most 1 ms"] == "failure"


def test_an_unfinished_command_leaves_no_outcome_of_an_earlier_one(tmp_path: Path) -> None:
    file = tmp_path / "j.xml"
    file.write_text("<testsuites/>")
    gone = (
        "run",
        "qa",
        "--url",
        "http://127.0.0.1:9",
        "-n",
        "4",
        "-c",
        "1",
        "-o",
        str(tmp_path / "r"),
    )

    assert exits(*gone, "--junit", str(file)) == 3
    assert outcomes(file) == {"the command finished": "error"}

    ci_report = create_ci_report(file, github=False, strict=False)
    ci_report.write("loadgen run", [], is_complete=False)
    assert outcomes(file) == {"the command finished": "error"}, "one of several runs was cut off"


def test_no_term_of_an_invalid_run_is_judged(tmp_path: Path) -> None:
    assert exits(*RUN, "-o", str(tmp_path / "r")) == 0

    summary = read_summary(tmp_path / "r")
    spoiled = without_outcomes_if_invalid(
        msgspec.structs.replace(
            summary,
            verdict=make_verdict(
                summary.verdict.limits, [ReasonCode(code="note", values={"text": "spoiled"})]
            ),
        )
    )
    first_junit_case, *terms = outcome.build_cases([("r", spoiled)])

    assert "SIMULATED" in first_junit_case.name
    assert (first_junit_case.outcome, first_junit_case.text) == ("error", "spoiled") and {
        term.outcome for term in terms
    } == {"skipped"}
    assert "INVALID" in outcome.render_markdown([("r", spoiled)])
    assert "NOT JUDGED" in outcome.render_markdown([("r", spoiled)])
    assert (spoiled.goodput.met, {term.met for term in spoiled.goodput.slo}) == (None, {None})
    assert (
        spoiled.goodput.not_judged
        and not spoiled.goodput.undecided
        and without_outcomes_if_invalid(spoiled) == spoiled
    )

    term = msgspec.structs.replace(summary.goodput.slo[0], met=None, undecided="too few")
    undecided = msgspec.structs.replace(
        summary, goodput=msgspec.structs.replace(summary.goodput, slo=(term,))
    )

    for strict, word in ((False, "skipped"), (True, "error")):
        assert outcome.build_cases([("r", undecided)], strict=strict)[1].outcome == word


def test_each_objective_of_classes_and_tasks_is_a_test_case() -> None:
    """The JUnit file and the exit code agree for a missed class SLO or task objective."""
    rag = load_summary((repository_paths.DATA / "summary_example_rag_gpus.json").read_bytes())
    tasks = Sessions(
        count=10,
        ok=10,
        ok_per_s=1.0,
        steady_ok_per_s=1.0,
        duration_ms=rag.e2e_ms,
        goodput=TaskGoodput(
            within_ms=9e4, wait_ms=2e3, good=5, rps=1.0, share=0.5, share_limit=0.9, met=False
        ),
    )
    chat = ClassSummary(
        name="chat",
        share=1.0,
        starts=rag.requests.decided,
        requests=rag.requests,
        bytes=rag.bytes,
        load=rag.load,
        tokens=rag.tokens,
        ttft_ms=rag.ttft_ms,
        tpot_ms=rag.tpot_ms,
        e2e_ms=rag.e2e_ms,
        goodput=rag.goodput,
        sessions=tasks,
    )
    mix = msgspec.structs.replace(
        rag, classes=(chat,), goodput=Goodput(good=1, counted=2, met=False)
    )
    cases = {case.name: case for case in outcome.build_cases([("r", mix)])}

    assert {f"chat: {term.objective}" for term in rag.goodput.slo} <= cases.keys()
    (missed,) = (case for case in cases.values() if case.outcome == "failed")
    assert (
        missed.name.startswith("chat: 90 % of tasks within 90 s")
        and "2 s" in missed.name
        and missed.text == "5 of 10 (50.0 %)"
    )
    assert [objective for objective, _ in judge_objectives(mix)] == [*cases][1:], (
        "in the words that reports have for them"
    )


def test_earlier_results_are_not_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "r"
    assert exits(*RUN, "-o", str(out)) == 0
    before = (out / "summary.json").read_bytes()
    assert exits(*RUN, "-o", str(out)) == 2
    assert "already holds results" in capsys.readouterr().err
    assert exits(*RUN, "-o", str(out), "--force") == 0
    (moved_dir,) = tmp_path.glob("r-before-*")
    assert (moved_dir / "summary.json").read_bytes() == before and (out / "summary.json").is_file()


def test_results_of_the_same_second_have_separate_folders(tmp_path: Path) -> None:
    out = tmp_path / "r"

    assert exits(*RUN, "-o", str(out)) == 0

    now = datetime.now().astimezone()
    for second in range(60):
        (
            tmp_path / f"r-before-{now + timedelta(seconds=second):%Y%m%d-%H%M%S}" / "of another"
        ).mkdir(parents=True)

    assert exits(*RUN, "-o", str(out), "--force") == 0
    (moved_dir,) = tmp_path.glob("r-before-*-2")
    assert (moved_dir / "summary.json").is_file()


def test_a_baseline_is_stored_by_name_and_may_consist_of_repeats(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    baseline_arguments = ("--in", str(tmp_path / "baselines"))

    assert exits(*RUN, "--repeat", "3", "-o", str(tmp_path / "a")) == 0
    assert exits(*RUN[:5], "4", *RUN[6:], "--repeat", "3", "-o", str(tmp_path / "b")) == 0
    assert exits("compare", "--save", "main", str(tmp_path / "a"), *baseline_arguments) == 0
    assert exits("compare", "--save", "main", str(tmp_path / "a"), *baseline_arguments) == 2
    assert (
        exits("compare", "--save", "main", str(tmp_path / "a"), *baseline_arguments, "--force") == 0
    )
    assert exits("compare", "--save", "../main", str(tmp_path / "a"), *baseline_arguments) == 2
    assert exits("compare", "--save", "none", str(tmp_path), *baseline_arguments) == 2
    two = (str(tmp_path / "a"), str(tmp_path / "b"))
    assert exits("compare", "--save", "main", *two, *baseline_arguments, "--force") == 2, (
        "one result is kept"
    )
    capsys.readouterr()
    assert (
        exits(
            "compare",
            "--against",
            "main",
            str(tmp_path / "b"),
            *baseline_arguments,
            "--fail-on",
            "ttft_ms.p50 > +50%",
        )
        == 0
    )
    assert "passed  ttft_ms.p50 > +50%" in capsys.readouterr().out
    assert (
        exits(
            "compare",
            "--against",
            "main",
            str(tmp_path / "b"),
            *baseline_arguments,
            "--fail-on",
            "ttft_ms.p50 > -50%",
        )
        == 1
    )
    assert exits("compare", "--against", "mian", str(tmp_path / "b"), *baseline_arguments) == 2
    assert "baselines: main" in capsys.readouterr().err


TESTS = """
FEW = {"name": "few", "requests": {"input_tokens": 12, "output_tokens": 4}}

def test_valid(loadgen_strict):
    assert loadgen_strict("qa", url="sim:gb300-vm", num_requests=300, seed=3).valid

def test_not_valid(loadgen_strict):
    loadgen_strict("qa", url="sim:gb300-vm", num_requests=3, warmup=0, seed=3)
"""


def test_the_strict_fixture_fails_invalid_runs(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(TESTS)
    loaded = any(
        plugin is pytest_plugin for plugin in pytester._request.config.pluginmanager.get_plugins()
    )
    result = pytester.runpytest_inprocess(
        "-p", "no:xdist", *(() if loaded else ("-p", "loadgen.pytest_plugin"))
    )
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*the measurement is not valid: Only 3 requests measured*"])


def slower_preset(folder: Path) -> str:
    """Return the simulated machine with all its times 10 % longer."""
    text = (ROOT / "loadgen/sim/presets/gb300-vm.yaml").read_text()
    for name, value, slower in (
        ("bandwidth_tb_s", "8.0", "7.2"),
        ("peak_tflops", "15000", "13500"),
        ("overhead_ms", "14.7", "16.2"),
    ):
        assert text.count(f"{name}: {{value: {value}") == 1
        text = text.replace(f"{name}: {{value: {value}", f"{name}: {{value: {slower}")
    (folder / "slower.yaml").write_text(text.replace("name: gb300-vm", "name: slower", 1))
    return f"sim:{folder / 'slower.yaml'}"


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Run the commands of docs/guides/ci.md in order; the first one creates a result."""
    monkeypatch.chdir(tmp_path)
    lines = [
        line.strip()
        for line in (ROOT / "docs/guides/ci.md").read_text().splitlines()
        if line.startswith("    loadgen ")
    ]
    return [tuple(shlex.split(line)[1:]) for line in lines]


def test_the_documented_recipe_passes_and_fails_on_a_slower_server(
    recipe: list[tuple[str, ...]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def typed(arguments: tuple[str, ...], url: str) -> int:
        return exits(*(word.replace("http://localhost:8000", url) for word in arguments))

    assert len(recipe) == 5
    first_command, *baseline, run, compare = recipe
    for command in (first_command, *baseline):
        assert typed(command, "sim:gb300-vm") == 0, command
    (tmp_path / "results" / "new").rename(tmp_path / "results" / "one")
    for url, code in (("sim:gb300-vm", 0), (slower_preset(tmp_path), 1)):
        assert typed(run, url) == 0
        capsys.readouterr()
        assert typed(compare, url) == code, capsys.readouterr().out
        (tmp_path / "results" / "new").rename(tmp_path / "results" / f"new{code}")


TEMPLATES = ("action.yml", "ci/gitlab/loadgen.yml")


@pytest.mark.processes
@pytest.mark.parametrize("template", TEMPLATES)
def test_the_templates_pass_equal_and_fail_slower_and_missed_runs(
    template: str, tmp_path: Path
) -> None:
    """Run the scripts of a template as a build server does, but only record calls of pip."""
    content = yaml.safe_load((ROOT / template).read_text())
    job = content.get(".loadgen", {})
    steps = (
        [step["run"] for step in content["runs"]["steps"] if "run" in step]
        if "runs" in content
        else []
    )
    install, script = steps or (*job["before_script"], *job["script"])
    tools = tmp_path / "tools"
    tools.mkdir()
    of_pip = 'if [ "$1" = -m ]; then printf "%s\\n" "$*" >> "$LOG"; else exec '
    (tools / "python").write_text(f'#!/bin/bash\n{of_pip}{shlex.quote(sys.executable)} "$@"; fi\n')
    (tools / "loadgen").write_text(
        f'#!/bin/bash\nexec {shlex.quote(sys.executable)} -P -m loadgen "$@"\n'
    )
    for tool in tools.iterdir():
        tool.chmod(0o755)
    defaults = {
        name: input_spec.get("default", "")
        for name, input_spec in content.get("inputs", {}).items()
    } | job.get("variables", {})
    assert not defaults.get("package") and not defaults.get("LOADGEN_PACKAGE"), (
        "no name that anybody may take"
    )
    conditions = defaults.get("fail-on") or defaults["LOADGEN_FAIL_ON"]
    environment = {
        "PATH": f"{tools}:{os.environ['PATH']}",
        "LOG": str(tmp_path / "log"),
        "GITHUB_STEP_SUMMARY": str(tmp_path / "page"),
        "PACKAGE": "a.whl",
        "OUT": "loadgen-results",
        "BASELINES": "baselines",
        "REPEAT": "3",
        "BASELINE": "",
        "FAIL_ON": conditions,
    }
    environment |= {
        f"LOADGEN_{name}": environment[name]
        for name in ("PACKAGE", "REPEAT", "BASELINE", "FAIL_ON")
    }

    def build(url: str, slo: str, baseline: str) -> int:
        arguments = f"qa --url {url} -c 8 -d 2m --slo '{slo}' --metadata 'note=$(touch planted)'"
        variables = {
            f"{prefix}{name}": value
            for prefix in ("", "LOADGEN_")
            for name, value in (("ARGUMENTS", arguments), ("BASELINE", baseline))
        }
        command = ["bash", "-e", "-o", "pipefail", "-c", script]
        return subprocess.run(
            command, check=False, env=environment | variables, cwd=tmp_path, capture_output=True
        ).returncode

    subprocess.run(["bash", "-e", "-c", install], check=True, env=environment, cwd=tmp_path)
    assert (tmp_path / "log").read_text().split()[-1] == "a.whl"
    assert build("sim:gb300-vm", "ttft:2s:p90", "") == 0
    save = (
        "compare",
        "--save",
        "main",
        str(tmp_path / "loadgen-results"),
        "--in",
        str(tmp_path / "baselines"),
    )
    assert exits(*save) == 0
    assert build("sim:gb300-vm", "ttft:2s:p90", "main") == 0
    assert build(slower_preset(tmp_path), "ttft:2s:p90", "main") == 1
    if "runs" in content:
        (tmp_path / "page").write_text("")
        assert build("sim:gb300-vm", "ttft:1ms", "main") == 1, "the SLO is missed"
        assert "TTFT p50" in (tmp_path / "page").read_text(), "and compared all the same"
    assert not (tmp_path / "planted").exists(), "an input is no program"


SIM = ("--url", "sim:gb300-vm", "--seed", "3")
SHORT = """
name: c
horizon: 1s
levels:
  - name: a
    workload: qa
    rate: 20/s
    duration: 20s
    warmup: 0
    must: [{ttft: {limit: 60s, at: p90}}]
"""
IN_A_FOLDER = {
    "sweep": ("sweep", "qa", "-c", "1,2", "-n", "10", *SIM),
    "repeats": ("sweep", "qa", "-c", "1,2", "-n", "10", "--repeat", "2", *SIM),
    "search": (
        "search",
        "qa",
        "--slo",
        "ttft:60s",
        "-d",
        "5s",
        "--high",
        "20",
        "--max-probes",
        "1",
        *SIM,
    ),
    "validate": ("validate", "{contract}", *SIM),
    "mlperf": (
        "mlperf",
        "server",
        "-b",
        "llama2-70b",
        "--target-qps",
        "1",
        "--min-duration",
        "1",
        *SIM,
    ),
}


@pytest.mark.parametrize("name", IN_A_FOLDER)
def test_a_folder_accepts_one_command_at_a_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    (tmp_path / "c.yaml").write_text(SHORT)
    command = [word.format(contract=tmp_path / "c.yaml") for word in IN_A_FOLDER[name]]
    out = tmp_path / "out"
    with locked_folder(out):
        assert exits(*command, "-o", str(out)) == 2
        assert "is using this folder" in capsys.readouterr().err
        assert out.is_dir() and not any(out.iterdir())
        (out / "run.json").write_text("{}")
        assert exits(*command, "-o", str(out), "--force") == 2
        assert (out / "run.json").is_file()


@pytest.mark.parametrize("name", ["sweep", "search", "validate", "mlperf"])
def test_a_folder_with_results_is_refused_or_moved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    (tmp_path / "c.yaml").write_text(SHORT)
    command = [word.format(contract=tmp_path / "c.yaml") for word in IN_A_FOLDER[name]]
    out = tmp_path / "out"

    assert exits(*RUN, "-o", str(out)) == 0
    before = (out / "summary.json").read_bytes()
    assert exits(*command, "-o", str(out)) == 2
    assert "--out" in capsys.readouterr().err

    if name != "mlperf":  # which takes long
        assert exits(*command, "-o", str(out), "--force") in (0, 1, 3, 4)
        (moved_dir,) = tmp_path.glob("out-before-*")
        assert (moved_dir / "summary.json").read_bytes() == before and not (
            out / "summary.json"
        ).is_file()


@pytest.mark.parametrize("name", ["run", *IN_A_FOLDER])
def test_an_address_for_prometheus_is_checked_before_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    (tmp_path / "c.yaml").write_text(SHORT)
    arguments = IN_A_FOLDER.get(name, (*RUN, "--dry-run"))
    command = [word.format(contract=tmp_path / "c.yaml") for word in arguments]

    assert (
        exits(
            *command,
            "--prometheus",
            "here",
            "--set",
            "route=everywhere",
            "-o",
            str(tmp_path / "out"),
        )
        == 2
    )
    stderr = capsys.readouterr().err
    assert "--prometheus here" in stderr and "everywhere" in stderr


def test_a_dry_run_refuses_a_folder_with_results_unless_forced(tmp_path: Path) -> None:
    assert exits(*RUN, "-o", str(tmp_path / "r")) == 0
    assert exits(*RUN, "-o", str(tmp_path / "r"), "--dry-run") == 2
    assert exits(*RUN, "-o", str(tmp_path / "r"), "--dry-run", "--force") == 0
    assert (tmp_path / "r" / "summary.json").is_file()


@pytest.mark.parametrize(
    ("subject", "is_accepted"),
    [
        ("Read prices from a file", True),
        ("Embed the glossary in every page", True),
        ("Added a reader of prices", False),
        ("Adding a reader of prices", False),
        ("read prices from a file", False),
        ("Read prices from a file.", False),
        ("Read " + "x" * 67, True),
        ("Read " + "x" * 68, False),
    ],
)
def test_commit_subjects_are_imperative_and_short(subject: str, is_accepted: bool) -> None:
    script = runpy.run_path(str(ROOT / ".ci" / "commit_subjects"))
    assert (script["subject_problem"](subject) is None) == is_accepted
