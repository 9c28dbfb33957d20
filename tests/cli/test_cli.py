"""Usage errors, help texts, progress and completion of the command line."""

import asyncio
import contextlib
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import exits

from loadgen.cli import completion
from loadgen.cli.invocation import expand_slo_flag
from loadgen.cli.options import PACKAGED_WORKLOADS
from loadgen.cli.run_options import COMMAND_OPTIONS, PANELS
from loadgen.core.errors import OK, USAGE
from loadgen.core.execution.events import Counters
from loadgen.core.execution.plan import Settings
from loadgen.core.workload.workload_files import packaged_files
from loadgen.runs.command import suggest_next_step
from loadgen.runs.progress import (
    Progress,
    RemainingSteps,
    StepCounter,
    describe_progress,
    describe_step,
)

CONTRACT, WORKLOAD = (
    str(packaged_files(kind)[name]) for kind, name in (("contracts", "rag"), ("workloads", "qa"))
)


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "qa", "--nope"],
        ["run", "qa", "--gpus", "none"],
        ["nonsense"],
        ["report"],
        ["run", "no-such-workload"],
        ["run", "qa", "--slo", "ttft:2x", "--server", "unknown", "--workers", "0"],
    ],
)
def test_wrong_usage_exits_with_code_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert exits(*arguments) == USAGE
    stderr = capsys.readouterr().err
    assert "bug" not in stderr and "Traceback" not in stderr and stderr


SENDING = ("run", "sweep", "search", "mlperf", "validate")
"""The commands that need a URL."""


@pytest.mark.parametrize(
    ("arguments", "expected_text", "hint"),
    [
        (["sise", "rag"], "unknown command: sise", 'did you mean "size"?'),
        (["mlperf", "srever"], "unknown command: srever", 'did you mean "server"?'),
        (["run", "rag", "--ulr", "x"], "unknown option: --ulr", "did you mean --url?"),
        (["run", "rag", "--api-key", "x"], "unknown option: --api-key", "OPENAI_API_KEY"),
        (["size", "rag"], "SOURCES is missing", "sim:PRESET"),
        (["cost"], "FOLDERS is missing", "cost --help"),
        (["run", "rag", "--url"], "--url needs a value", "--help"),
        (["size", "rag", "vm", "--spare", "x"], "integer", "--help"),
        (["fit", "x", "--on-bad-row", "no"], "error: 'no' is not one of 'fail', 'skip'", "--help"),
        (["run", "rag", "more"], "more", "--help"),
        (
            ["run", "rag", "--max-tokens", "5"],
            "unknown option: --max-tokens",
            "did you mean --output-tokens?",
        ),
        (
            ["mlperf", "offline", "-b", "llama2-70b", "--min-duration", "9ms"],
            "must be at least 1 s",
            "10m",
        ),
        (
            ["mlperf", "server", "--request-rate", "5"],
            "unknown option: --request-rate",
            "--target-qps",
        ),
        (["run", "rag", "--nosuchflag", "5"], "unknown option: --nosuchflag", " run --help-all"),
        (
            ["run", "rag", "--percentiles", "5"],
            "unknown option: --percentiles",
            "--set percentiles=",
        ),
        (["run", "rag", "--set", "start=middle"], "unknown key: start", '"trajectory_start"'),
        (["run", "rag", "--qps", "5"], "unknown option: --qps", "did you mean --request-rate?"),
        (["run", "rag", "--users", "5"], "unknown option: --users", "loadgen size"),
        (["run", "rag", "--port", "8000"], "unknown option: --port", "--url http://HOST:PORT"),
        (["export", "run", "--format", "csv"], "unknown option: --format", "--as"),
        (
            ["cost", "run", "--qps", "5"],
            "unknown option: --qps",
            "cost --help",
        ),  # has no --request-rate
        (["run", "rag", "-d", "10", "min"], "min", "together: 10min"),
        (["sim", "gb300-vm"], "gb300-vm", "--preset gb300-vm"),
        (
            ["run", "rag", "--slo", "p95_ttft:2s"],
            "has the unknown metric",
            'did you mean "ttft:2s:p95"?',
        ),
        (["run", "rag", "--input-tokens", "8k"], '"8k" is not an integer', "8000, not 8k"),
        (["run", "rag", "--url", "localhost:8000"], "has no scheme", "http://localhost:8000"),
        (["sweep", "rag", "-c", "1-8"], '"1-8" is not a load', "1,2,4,...,64"),
        (["doctor", "http://h:8000"], "http://h:8000 is a URL", "--url http://h:8000"),
        (["run", "qa", "sim:gb300-vm"], "sim:gb300-vm is a URL", "--url sim:gb300-vm"),
        (
            ["run", "qa", "-c", "4", "http://h:8000"],
            "http://h:8000 is a URL",
            "--url http://h:8000",
        ),
        (["size", "rag", "here", "--users", "many"], '"many" must be an integer', "5000 or 5k"),
        (["run", "chatbot"], "no such workload", "loadgen validate chatbot"),
        (["run", CONTRACT], "this is a contract, not a workload", f"loadgen validate {CONTRACT}"),
        (["validate", "qa"], "no such contract", "loadgen run qa"),
        (["validate", WORKLOAD], "a workload, not a contract", f"loadgen run {WORKLOAD}"),
        (["run", "--isl", "100"], "--input-tokens alone", "add --output-tokens"),
        (["run", "--dataset", __file__], "", ""),
    ],
)
def test_usage_errors_look_like_other_errors(
    arguments: list[str],
    expected_text: str,
    hint: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)  # a run makes its folder before it looks at the URL
    if arguments[0] in SENDING and "--url" not in arguments:
        arguments = [*arguments, "--url", "sim:gb300-vm"]

    assert exits(*arguments) == USAGE

    stderr = capsys.readouterr().err
    first, place, last, *command = stderr.splitlines()
    assert first.startswith("error: ") and expected_text in first
    assert place.startswith("  --> ") and "(mapping)" not in place
    assert last.startswith("hint: ") and hint in last
    assert not command or command[0].startswith("  type: loadgen ")


def test_all_errors_of_a_command_line_are_reported_at_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    exits(
        "run",
        "qa",
        "--slo",
        "ttft:2x",
        "--server",
        "unknown",
        "--workers",
        "0",
        "--extra-body",
        "[1]",
    )
    stderr = capsys.readouterr().err

    for flag in ("--slo ttft:2x", "--server unknown", "--workers 0", "--extra-body"):
        assert flag in stderr


def test_help_and_version_are_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")  # a narrower terminal has room for fewer options
    assert exits("--help") == OK
    assert "run" in capsys.readouterr().out
    assert exits("--version") == OK
    assert capsys.readouterr().out.startswith("loadgen ")
    assert exits("run", "--help") == OK
    text = capsys.readouterr().out

    for flag in (
        "--url",
        "--request-rate",
        "--concurrency",
        "--slo",
        "--json",
        "--dry-run",
        "--help-all",
    ):
        assert flag in text


@pytest.mark.parametrize("command", [(), ("mlperf",), ("run",)])
def test_a_help_lists_the_full_help_only_if_the_command_has_one(
    command: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert exits(*command, "--help") == OK
    is_listed = "--help-all" in capsys.readouterr().out

    assert (exits(*command, "--help-all") == OK) == is_listed


@pytest.mark.processes
def test_the_command_runs_as_a_python_module() -> None:
    process = subprocess.run(
        [sys.executable, "-m", "loadgen", "run", "nope"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (process.returncode, process.stdout) == (USAGE, "")
    assert "--> nope" in process.stderr


@pytest.mark.parametrize(
    ("arguments", "spread"),
    [
        (
            ["run", "--slo", "ttft:2s", "tpot:200ms"],
            ["run", "--slo", "ttft:2s", "--slo", "tpot:200ms"],
        ),
        (["run", "--slo", "ttft:2s", "qa"], ["run", "--slo", "ttft:2s", "qa"]),
        (["run", "qa", "--url", "http://h:1"], ["run", "qa", "--url", "http://h:1"]),
    ],
)
def test_several_values_of_an_slo_option_are_accepted_after_one_name(
    arguments: list[str], spread: list[str]
) -> None:
    assert expand_slo_flag(arguments) == spread


@pytest.mark.processes
def test_two_endpoints_for_a_command_with_one_target_are_refused() -> None:
    arguments = ["doctor", "--url", "http://127.0.0.1:1", "-u", "http://127.0.0.1:2"]
    code = "from loadgen.cli.app import main; main()"
    process = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False
    )
    assert (process.returncode, process.stdout) == (2, "")
    assert "--url" in process.stderr


def test_a_dry_run_sends_no_request_and_states_the_load(capsys: pytest.CaptureFixture[str]) -> None:
    assert exits("run", "rag", "--dry-run", "--url", "http://127.0.0.1:9", "--seed", "1") == OK
    text = capsys.readouterr().out
    assert "220 requests" in text and "1,302" in text


@pytest.mark.commands
def test_progress_as_json_has_the_step_and_the_number_of_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [
        "sweep",
        "qa",
        "--url",
        "sim:gb300-vm",
        "--request-rate",
        "10,20",
        "-d",
        "8s",
        "-o",
        str(tmp_path / "s"),
    ]

    assert exits(*command, "--progress", "json") == 0

    lines = [
        json.loads(line) for line in capsys.readouterr().err.splitlines() if line.startswith("{")
    ]

    assert [list(line) for line in lines] == [["step"], ["finished"], ["step"], ["finished"]]
    assert [
        (line["step"]["name"], line["step"]["step"], line["step"]["of"]) for line in lines[::2]
    ] == [
        ("Load point r10", 1, 2),
        ("Load point r20", 2, 2),
    ]
    assert lines[1]["finished"]["valid"] and lines[1]["finished"]["ttft_p50_ms"] > 0

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

    assert exits(*search, "-o", str(tmp_path / "p")) == 0
    stderr = capsys.readouterr().err
    assert re.search(r"Trial at .*: 2 of about \d+", stderr)
    assert exits(*command[:-1], str(tmp_path / "off"), "--progress", "off") == 0
    assert "1 of 2" not in capsys.readouterr().err


def test_progress_states_the_time_left() -> None:
    steps = StepCounter(4)
    steps._start_ns -= 30_000_000_000
    first_step, second_step = steps.begin_step(), steps.begin_step()
    assert first_step.left_s is None and second_step.left_s == pytest.approx(90, abs=1)
    assert re.fullmatch(r"c2: 2 of 4, .* 1 min 30 s .* \d\d:\d\d", describe_step("c2", second_step))


def test_the_time_left_of_a_search_uses_its_estimated_trials_and_not_their_limit() -> None:
    """The estimate once multiplied by the largest number of trials and was 12 times too long."""
    steps = StepCounter(40, at_most=True)
    steps._start_ns -= 30_000_000_000
    steps.begin_step()
    second_step = steps.begin_step()

    assert second_step.left_s is None and second_step.mean_s == pytest.approx(30, abs=1)
    assert describe_step("8/s", second_step).startswith("8/s: 2 of at most 40, about 30.0 s")
    third_step = steps.begin_step(RemainingSteps(8.4, 240.0))
    assert (third_step.number, third_step.expected_count, third_step.left_s) == (3, 10, 240.0)
    assert re.fullmatch(
        r"8/s: 3 of about 10, .* 4 min 00 s .* \d\d:\d\d", describe_step("8/s", third_step)
    )


def test_the_time_left_weights_steps_by_their_known_length() -> None:
    """Of levels of 1, 2, 4 and 8 in virtual time the last costs more than the others together."""
    steps = StepCounter(4, weights=[1, 2, 4, 8])
    steps._start_ns -= 30_000_000_000
    steps.begin_step(), steps.begin_step()
    third_step = steps.begin_step()
    assert third_step.left_s == pytest.approx(120, abs=1)


def test_progress_without_a_terminal_is_a_plain_line() -> None:
    out = io.StringIO()
    progress = Progress(10, None, out)
    counters = Counters()
    counters.ok, counters.in_flight = 3, 2
    assert (
        describe_progress(progress.update(counters, progress._start_ns + 10**9))
        == "3/10 done · 2 in flight · 0 events/s"
    )

    async def follow() -> None:
        progress.start_printing(lambda: counters)
        assert progress._timer is not None, "without being asked for"
        progress.clear()

    asyncio.run(follow())


def helps(path: tuple[str, ...] = (), columns: int = 60) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield each command and its help text as a terminal of `columns` columns shows it."""
    command = [*path, "--help"]
    out = io.StringIO()
    with contextlib.redirect_stdout(out), pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", str(columns))
        assert exits(*command) == OK
    text = out.getvalue()
    yield path, text
    listed = text.partition("\nCommands:\n" if path else "\nStart:\n")[2]
    for name in re.findall(r"^  ([a-z]+)\b", listed, re.M):
        yield from helps((*path, name), columns)


def test_every_help_fits_60_columns_and_has_an_example_that_its_command_accepts() -> None:
    help_texts = dict(helps())

    assert list(help_texts)[1:4] == [("doctor",), ("run",), ("report",)], (
        "in the order in which people meet them"
    )
    assert len(help_texts) > 15

    for path, text in help_texts.items():
        assert max(map(len, text.splitlines())) <= 60, path
        if "\nCommands:" in text or not path:
            continue
        example = " ".join(text.partition("Example: ")[2].partition("\n\n")[0].split())
        assert example.startswith(" ".join(("loadgen", *path))), path
        flags = set(re.findall(r"(?<= )--?[a-z][a-z-]*", example))
        assert flags <= set(re.findall(r"(?<=[ \[])--?[a-z][a-z-]*", text.replace(example, ""))), (
            path
        )


def test_every_help_fits_a_screen_and_names_the_full_help() -> None:
    for path, text in helps(columns=80):
        longest = 40 if path else 44  # the list of all commands has a line for each of them
        assert len(text.splitlines()) <= longest, path
        if path and "\nCommands:" not in text:
            assert "--help-all" in text, path


def test_a_short_help_ends_a_sentence_at_its_end_and_not_at_an_ellipsis() -> None:
    help_text = next(text for _, text in helps(("sim",), 80))
    assert "gb300-vm, b200x8, ..." in " ".join(help_text.split())


def test_a_help_has_panels_defaults_and_values_of_options(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    exits("run", "--help-all")
    text = capsys.readouterr().out
    at = [
        text.index(f"\n{panel}:\n")
        for panel in ("Options", "Load", "Target", "SLO", "Output", "TLS", "Advanced")
    ]

    assert at == sorted(at)
    assert (
        "  -c, --concurrency N " in text
        and "  --timeout TIME " in text
        and "[default: 600s]" in text
    )
    assert "<" not in text.partition("Options:")[2]


def test_every_option_of_the_table_has_a_panel_and_a_name_of_its_value() -> None:
    for name, option in COMMAND_OPTIONS.items():
        assert option.panel in PANELS, name
        if option.flags:
            assert (option.metavar is None) == (option.cli_type is bool), name


@pytest.mark.processes
@pytest.mark.parametrize(
    ("command_line", "completed"),
    [
        ("loadgen re", ["report"]),
        ("loadgen run --pro", ["--profile", "--progress", "--prometheus"]),
        ("loadgen run --server vl", ["vllm"]),
        ("loadgen mlperf s", ["server"]),
    ],
)
def test_shell_completion_lists_commands_and_options(
    command_line: str, completed: list[str]
) -> None:
    environment = {
        "COMP_WORDS": command_line,
        "COMP_CWORD": str(command_line.count(" ")),
        "_LOADGEN_COMPLETE": "complete_bash",
    }
    code = "import sys; sys.argv = ['loadgen']; from loadgen.cli.app import main; main()"
    run = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=True,
    )

    assert run.stdout.split() == completed


@pytest.mark.parametrize(
    ("settings", "expected_text"),
    [
        (Settings(), "  loadgen run qa -c 4 --url sim:gb300-vm"),
        (Settings(out=Path("a b")), "  loadgen run qa -c 4 --url sim:gb300-vm -o 'a b-virtual'"),
        (Settings(url="http://h"), "loadgen doctor"),
    ],
)
def test_the_result_of_a_busy_host_suggests_a_next_command(
    settings: Settings, expected_text: str
) -> None:
    arguments = ["run", "qa", "-c", "4", *(["--out", str(settings.out)] if settings.out else [])]
    assert expected_text in suggest_next_step(arguments, settings)


def test_the_hint_for_a_missing_workload_suggests_no_contract(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rag1.yaml").write_text("name: c\nslo: {ttft: 1s}\nlevels: []\n")
    (tmp_path / "rag2.yaml").write_text("name: w\nrequests: {input_tokens: 1, output_tokens: 1}\n")
    assert exits("run", "rag3.yaml") == USAGE
    stderr = capsys.readouterr().err
    assert "rag2.yaml" in stderr and "rag1.yaml" not in stderr


@pytest.mark.parametrize(
    ("text", "expected_text", "hint"),
    [
        (
            "input_tokens: 5\noutput_tokens: 6\n",
            "input_tokens, output_tokens: stand under requests:",
            "requests: {",
        ),
        (
            "requests: {input_tokens: 1, output_tokens: 1}\nduration: 5s\n",
            "duration: stands under stages:",
            "stages: [",
        ),
        (
            "requests: {input_tokens: 1, output_tokens: 1}\nrate: 2/s\nduration: 5s\n",
            "rate, duration: stand under stages:",
            "arrival: {poisson: 10/s}",
        ),
    ],
)
def test_a_misplaced_key_is_one_error_with_a_hint(
    text: str, expected_text: str, hint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "w.yaml").write_text(f"name: w\n{text}")
    assert exits("run", str(tmp_path / "w.yaml"), "--url", "sim:gb300-vm") == USAGE
    first, place, last = capsys.readouterr().err.splitlines()
    assert expected_text in first and "w.yaml:1" in place and hint in last


def test_shell_completion_completes_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").touch()
    (tmp_path / "results" / "qa-1").mkdir(parents=True)

    assert completion.complete_workload("r") == [
        "rag",
        "rag-pipeline",
        "research-agent",
        "results/",
    ]
    assert completion.complete_workload("mi") == ["mixed", "mine.yaml"]
    assert completion.complete_contract("chat") == ["chatbot"]
    assert "sim:gb300-vm" in completion.complete_target(
        "sim:gb3"
    ) and "sim:h100x8" not in completion.complete_target("sim:gb3")
    assert completion.complete_server("vl") == ["vllm"] and completion.complete_slo_term("tp") == [
        "tpot:"
    ]
    assert "sim:gb300-vm" in completion.complete_capacity_source(
        "sim:gb"
    ) and completion.complete_capacity_source("results/q") == ["results/qa-1/"]
    assert completion.complete_choice(completion.list_presets)("gb300") == [
        "gb300-rack",
        "gb300-vm",
        "gb300-vm-128k",
    ]
    (tmp_path / "baselines" / "main").mkdir(parents=True)
    assert completion.complete_baseline("m") == ["main"]
    assert completion.complete_result("")[0] == "results/qa-1" and completion.complete_result(
        "results/q"
    ) == ["results/qa-1/"]


def test_the_help_of_a_run_names_every_packaged_workload() -> None:
    assert (
        PACKAGED_WORKLOADS.split(", ")
        == sorted(packaged_files())
        == completion.complete_workload("")[: len(packaged_files())]
    )
