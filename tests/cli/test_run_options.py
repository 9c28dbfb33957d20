"""The command line and Python share one table of options and refuse the same values.

Every command takes what `run` takes, or a table here says why not.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import exits
from expected_errors import refused
from msgspec.structs import fields

import loadgen
from loadgen.cli.run_options import COMMAND_OPTIONS, OPTIONS
from loadgen.cli.settings import build_settings
from loadgen.core.errors import CombinedError
from loadgen.core.execution.plan import Settings
from loadgen.core.workload import read_flags
from loadgen.core.workload.flags import LOAD_OPTIONS, SET_OPTIONS

SIM = {
    "url": "sim:gb300-vm",
    "concurrency": 2,
    "num_requests": 20,
    "input_tokens": 60,
    "output_tokens": 4,
    "seed": 1,
}


BAD: list[tuple[str, Any, str]] = [
    ("url", ["http://h", "http://h/v1"], "duplicate"),
    ("url", ["sim:gb300-vm", "http://h"], "conflict"),
    ("targets", "/nowhere.yaml", "missing_file"),
    ("session_header", "X Session", "invalid_value"),
    ("route", "leastinflight", "unknown_name"),
    ("on_target_failure", "stopp", "unknown_name"),
    ("server", "vlm", "unknown_name"),
    ("api", "chats", "unknown_name"),
    ("keep", "all", "unknown_name"),
    ("keep", "sample", "unknown_name"),
    ("keep", "histogram", "unknown_name"),
    ("trace", "/nowhere.jsonl", "missing_file"),
    ("trace_speed", "0", "invalid_value"),
    ("trace_slice", "20m..10m", "out_of_range"),
    ("trace_loop", 0, "invalid_value"),
    ("on_bad_row", "drop", "unknown_name"),
    ("trace_unit", "min", "unknown_name"),
    ("trace_replay", "chains", "unknown_name"),
    ("request_rate", "fast", "invalid_value"),
    ("burstiness", -1, "invalid_value"),
    ("concurrency", 0, "invalid_value"),
    ("stagger", "soon", "invalid_value"),
    ("max_in_flight", "0", "invalid_value"),
    ("max_in_prefill", "0", "invalid_value"),
    ("check_share", "many", "invalid_value"),
    ("trajectory_start", "late", "unknown_name"),
    ("idle_cap", "soon", "invalid_value"),
    ("turns", "some", "unknown_name"),
    ("trajectory_salt", "sugar", "unknown_name"),
    ("trajectory_end", "never", "unknown_name"),
    ("trajectory_history", "none", "unknown_name"),
    ("num_requests", -5, "invalid_value"),
    ("duration", "0s", "out_of_range"),
    ("warmup", "ten", "invalid_value"),
    ("num_warmups", "x", "invalid_value"),
    ("percentiles", "50,100", "invalid_value"),
    ("percentiles", "most", "invalid_value"),
    ("grace", "1 week", "invalid_value"),
    ("timeout", 0, "out_of_range"),
    ("stall_timeout", "-1s", "invalid_value"),
    ("slo", "ttft:2x", "invalid_value"),
    ("slo", ["ttft", "tpot:1q"], "invalid_value"),
    ("goodput", "ttf:2000", "unknown_name"),
    ("input_tokens", "1.5", "invalid_value"),
    ("output_tokens", 10**9, "out_of_range"),
    ("seed", "one", "invalid_value"),
    ("seed", 2**64, "invalid_value"),
    ("schedule_seed", -1, "invalid_value"),
    ("salt", "two words", "invalid_value"),
    ("limit", "speed:3%", "unknown_name"),
    ("stop_when", "errors:2", "invalid_value"),
    ("workers", 0, "invalid_value"),
    ("workers", True, "invalid_value"),
    ("workers", "many", "invalid_value"),
    ("extra_body", "[1]", "invalid_value"),
    ("extra_body", "{", "invalid_value"),
    ("extra_body", '{"n": 2}', "unsupported"),
    ("extra_body", '{"best_of": 3, "top_k": 1}', "unsupported"),
    ("extra_body", '{"max_tokens": 5}', "unsupported"),
    ("extra_body", '{"max_completion_tokens": null}', "unsupported"),
    ("extra_body", '{"max_output_tokens": 5}', "unsupported"),
    ("extra_body", '{"stream": false}', "unsupported"),
    ("extra_body", '{"messages": []}', "unsupported"),
    ("headers", "no colon here", "invalid_value"),
    ("headers", "X: a\nY: b", "invalid_value"),
    ("headers", "a b: c", "invalid_value"),
    ("headers", ["X: 1", "content-length: 5"], "unsupported"),
    ("api_key_file", "/nowhere", "missing_file"),
    ("cacert", "/nowhere.pem", "missing_file"),
    ("cert", "/nowhere.pem", "missing_file"),
    ("key", "/nowhere.pem", "missing_file"),
    ("server_metrics", ["auto", "http://h/metrics"], "conflict"),
    ("energy", "watts", "invalid_url"),
    ("profile", ":3s", "invalid_value"),
    ("server_metrics", "ftp://h", "invalid_url"),
    ("accepted_length", "many", "invalid_value"),
    ("gpus", 0, "invalid_value"),
    ("gpus", -4, "invalid_value"),
    ("metadata", "key", "invalid_value"),
    ("metadata", ["password=hunter2"], "secret"),
    ("system", "/nowhere.yaml", "missing_file"),
    ("dataset", "/nowhere.csv", "missing_file"),
]


ONLY_PYTHON = {"goodput", "num_warmups"}  # a second spelling of --slo and --warmup
PLACED_ELSEWHERE = {
    "url",
    "targets",
    "server_metrics",
    "energy",
    "headers",
    "trace",
    "dataset",
    "system",
}


@pytest.mark.parametrize(("name", "value", "code"), BAD)
def test_command_line_and_python_refuse_the_same_values(
    name: str, value: Any, code: str, capsys: pytest.CaptureFixture[str]
) -> None:
    option, values = OPTIONS[name], value if isinstance(value, list) else [value]

    with refused(CombinedError, code) as faults:
        loadgen.run("qa", **{name: value})
    assert (
        str(faults.value).count(f"--> {option.describe(name, '')}".rstrip()) >= 1
        or name in PLACED_ELSEWHERE
    )

    if name in ONLY_PYTHON:
        return
    arguments = [
        f"--set={name}={option_value}"
        if option.set_metavar
        else f"{option.flags[0]}={option_value}"
        for option_value in values
    ]

    assert exits("run", "qa", *arguments) == 2
    assert str(faults.value) == capsys.readouterr().err.rstrip("\n")


def test_every_option_is_tested_with_an_invalid_value() -> None:
    no_wrong_text = {
        "model",
        "check_answers",
        "ray",
        "sources",
        "tokenizer",
        "insecure",
        "stream",
        "shape",
        "region",
        "out",
        "api_key",
        "embedded",
        "server_timing",
        "reset_cache",
        "slo_headers",
    }

    assert {name for name, _, _ in BAD} == OPTIONS.keys() - no_wrong_text


@pytest.mark.parametrize(
    "options",
    [
        {"url": ["http://a", "http://b"], "targets": "t.yaml"},
        {"ray": "auto", "sources": "127.0.0.1"},
    ],
)
def test_options_that_exclude_each_other_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(CombinedError):
        build_settings(options)


@pytest.mark.parametrize(
    ("name", "value", "code"),
    [
        ("insecure", "no", "wrong_type"),
        ("stream", 0, "wrong_type"),
        ("model", 7, "wrong_type"),
        ("api_key", b"sk-secret", "wrong_type"),
        ("headers", {"X": "a\nb"}, "invalid_value"),
        ("embedded", "fast", "wrong_type"),
    ],
)
def test_python_values_of_wrong_types_are_refused(name: str, value: Any, code: str) -> None:
    with refused(CombinedError, code) as faults:
        loadgen.run("qa", **{name: value})
    assert "secret" not in str(faults.value)


@pytest.mark.parametrize(
    ("typed", "python"),
    [
        ({"headers": ["X: 1", "Y=2"]}, {"headers": {"X": "1", "Y": "2"}}),
        ({"headers": ["X: 1"]}, {"headers": [("X", "1")]}),
        ({"metadata": ["a=1"]}, {"metadata": {"a": 1}}),
        ({"extra_body": '{"top_k": 1}'}, {"extra_body": {"top_k": 1}}),
        ({"extra_body": '{"n": 1, "stop": "x"}'}, {"extra_body": {"n": 1, "stop": "x"}}),
        ({"workers": "3"}, {"workers": 3}),
        ({"ray": "auto"}, {"ray": "auto", "workers": "auto"}),
        ({"server_metrics": ["off"]}, {"server_metrics": "off"}),
        ({"url": ["http://h"], "gpus": 4}, {"url": "http://h", "gpus": "4"}),
        ({"out": "there"}, {"out": Path("there")}),
    ],
)
def test_command_line_and_python_build_the_same_run(
    typed: dict[str, Any], python: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a folder that can be written into
    url = {"url": "http://h"}
    assert build_settings(url | typed) == build_settings(url | python)


def test_the_api_key_is_read_from_a_file_option_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "key").write_text("k-file\n")
    monkeypatch.setenv("OPENAI_API_KEY", "k-env")
    monkeypatch.setenv("AZURE_OPENAI_API_KEY", "k-azure")
    url = {"url": "http://h"}

    assert build_settings(url).api_key == "k-env"
    assert build_settings(url | {"server": "azure"}).api_key == "k-azure"
    assert build_settings(url | {"api_key_file": tmp_path / "key"}).api_key == "k-file"
    assert build_settings(url | {"api_key": "k", "api_key_file": tmp_path / "key"}).api_key == "k"
    assert build_settings({"url": "sim:gb300-vm"}).api_key is None
    assert build_settings({"url": ["http://a", "http://b"]}).targets[1].api_key == "k-env"


def test_the_option_table_agrees_with_the_settings() -> None:
    defaults = {field.name: field.default for field in fields(Settings)}

    for name, option in OPTIONS.items():
        assert option.default is None or option.default == defaults[name]

    of_load = {name for name, option in OPTIONS.items() if option.used_by == "load"}
    keys = {"slo", "goodput", "limit", "stop_when", "trace_slice", "on_bad_row", "trace_replay"}
    keys |= {"trace_unit", "check_share"}
    keys |= {f"trajectory_{field}" for field in ("start", "salt", "end", "history")} | {"turns"}

    assert not read_flags(**dict.fromkeys(of_load - keys, "1")).errors
    assert of_load == set(LOAD_OPTIONS)
    assert {name for name in of_load if OPTIONS[name].set_metavar} == SET_OPTIONS
    assert {
        name for name in of_load if not OPTIONS[name].flags and not OPTIONS[name].set_metavar
    } == ONLY_PYTHON
    assert read_flags(slo="ttft:2s", duration=None, seed=3, url="x") == read_flags(
        slo=("ttft:2s",), seed=3
    )


def test_the_signature_of_run_has_every_option() -> None:
    for function in (loadgen.run, loadgen.arun):
        parameters = inspect.signature(function).parameters
        assert list(parameters) == ["workload", *OPTIONS]
        assert (
            parameters["route"].default,
            parameters["stream"].default,
            parameters["url"].default,
        ) == (
            "auto",
            True,
            None,
        )


# -- which command takes which ---------------------------------------------------------------------

REPEATS = tuple(name for name in COMMAND_OPTIONS if name.startswith("repeat"))
CHOSEN = "the search chooses the load"
COLD_START = "a trial starts from an empty server unless the search's own --warmup is given"
ITS_OWN_SPREAD = "a probe that is in doubt is repeated by the search itself"
RECORDS = "it has several runs, and the gaps of each request are exported from one run"
CONTRACT = "the contract and its workloads say it: both parties have to read it there"
RULES = "the rules of the round say it"
NOT_TAKEN: dict[str, dict[str, str]] = {
    "run": {},
    "sweep": {"keep": RECORDS},
    "search": {
        "trace_speed": CHOSEN,
        "trace_loop": CHOSEN,
        "request_rate": CHOSEN,
        "concurrency": CHOSEN,
        "burstiness": "a probe is Poisson or a closed loop: its interval rests on that",
        "num_requests": "a probe has a length",
        "warmup": COLD_START,
        "num_warmups": COLD_START,
        "schedule_seed": "every probe has arrivals of its own",
        "keep": RECORDS,
        **dict.fromkeys(REPEATS, ITS_OWN_SPREAD),
    },
    "validate": {
        **{name: CONTRACT for name, option in OPTIONS.items() if option.used_by != "settings"},
        "keep": RECORDS,
    },
    "mlperf server": {
        **{name: RULES for name, option in OPTIONS.items() if option.used_by != "settings"},
        "keep": RECORDS,
        "stream": "its limits are on tokens as they arrive",
        **dict.fromkeys(REPEATS, "the rules ask for one run; --find-peak repeats what is in doubt"),
    },
}
for _name in ("seed", "salt", "duration"):
    del NOT_TAKEN["validate"][_name]
for _name in ("seed", "salt", "grace"):
    del NOT_TAKEN["mlperf server"][_name]
NOT_TAKEN["mlperf interactive"] = NOT_TAKEN["mlperf offline"] = NOT_TAKEN["mlperf server"]

NOT_STRICT = {
    "search": "a search that comes to no end exits 3 without it",
    "validate": "INCONCLUSIVE exits 3 without it",
    "mlperf server": "VALID or INVALID, nothing between",
    "compare": "an undecided condition exits 3 without it",
}


@pytest.mark.parametrize("command", NOT_TAKEN)
def test_commands_that_send_a_load_take_the_options_of_run(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exits(*command.split(), "--help-all") == 0

    text = capsys.readouterr().out
    options_in_help = set(re.findall(r"(?<=[ ,])--?[a-z][a-z-]*", text))
    keys = set(re.findall(r"(?m)^  ([a-z_]+)=", text))
    for name, option in COMMAND_OPTIONS.items():
        assert (name in keys) == (bool(option.set_metavar) and name not in NOT_TAKEN[command]), name
        flags = set(option.flags)
        expected = set() if name in NOT_TAKEN[command] else flags
        if command == "mlperf offline" and name == "concurrency":  # its own: in flight over HTTP
            expected = {"--concurrency", "-c"}
        if command == "search" and name == "warmup":  # its own: a load that rises before each trial
            expected = {"--warmup"}
        if command.startswith("mlperf") and name == "dataset":  # its own: the official data set
            expected = {"--dataset"}
        assert {flag for flag in flags & options_in_help if flag.startswith("--")} == {
            flag for flag in expected if flag.startswith("--")
        }, name


@pytest.mark.parametrize("command", ["run", "sweep", "report", *NOT_STRICT])
def test_commands_with_undecided_verdicts_have_the_option_strict(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exits(*command.split(), "--help-all") == 0
    assert ("--strict" in capsys.readouterr().out) == (command not in NOT_STRICT)


# -- what was typed --------------------------------------------------------------------------------


def small(**changes: Any) -> list[str]:
    return [f"{OPTIONS[name].flags[0]}={value}" for name, value in (SIM | changes).items()]


def test_the_stored_command_has_no_secrets(tmp_path: Path) -> None:
    arguments = [
        "run",
        "qa",
        *small(),
        "-H",
        "X-Key: sesame",
        "--header=Y=sesame",
        "--slo",
        "ttft:2s",
        "tpot:200ms",
    ]

    assert exits(*arguments, "-o", str(tmp_path / "a")) == 0
    stored = json.loads((tmp_path / "a" / "run.json").read_bytes())["command"]
    assert stored[:3] == ["loadgen", "run", "qa"] and stored[-4:-2] == ["ttft:2s", "tpot:200ms"]
    assert "X-Key: ***" in stored and "sesame" not in str(stored)
    result = loadgen.run("qa", **SIM, out=tmp_path / "b")
    assert result.summary.run.id == "b"
    assert json.loads((tmp_path / "b" / "run.json").read_bytes())["command"] == ["loadgen.run"]


UNDECIDED = {"slo": "tpot:1s", "output_tokens": 1}  # answers of one token have no TPOT


@pytest.mark.parametrize(("strict", "code"), [([], 0), (["--strict"], 4)])
@pytest.mark.parametrize(
    "call",
    [
        lambda folder: ["run", "qa", *small(**UNDECIDED), "-o", folder],
        lambda folder: ["sweep", "qa", *small(**UNDECIDED, concurrency="1,2"), "-o", folder],
    ],
)
def test_the_option_strict_turns_an_undecided_result_into_a_failure(
    call: Callable[[str], list[str]], strict: list[str], code: int, tmp_path: Path
) -> None:
    assert exits(*call(str(tmp_path / "a")), *strict) == code
    assert exits("report", str(tmp_path / "a"), "--no-html", *strict) == code


def test_commands_other_than_run_refuse_a_store_as_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in (
        ["sweep", "qa", "-c", "1"],
        ["search", "qa", "--slo", "ttft:2s"],
        ["validate", "rag"],
    ):
        assert exits(*command, "--url", "sim:gb300-vm", "--out", f"file://{tmp_path}/s") == 2
        assert "copies its results" in capsys.readouterr().err


def test_a_search_accepts_lengths_traces_and_timeouts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "t.jsonl"
    trace.write_text(
        "".join(
            json.dumps({"timestamp": n * 100, "input_length": 30, "output_length": 3}) + "\n"
            for n in range(50)
        )
    )
    common = [
        "--url",
        "sim:gb300-vm",
        "--slo",
        "ttft:2s",
        "--max-probes",
        "2",
        "--seed",
        "1",
        "-d",
        "5s",
        "--start",
        "2",
    ]
    exits("search", "--trace", str(trace), *common, "--timeout", "9s", "-o", str(tmp_path / "s"))
    plan = json.loads((tmp_path / "s" / "plan.json").read_bytes())

    assert plan["workload"] == str(trace) and plan["flags"]["timeout"] == "9s"
    assert (
        exits(
            "search", "--trace", str(trace), *common, "--timeout", "8s", "-o", str(tmp_path / "s")
        )
        == 2
    )
    assert "timeout" in capsys.readouterr().err


def test_a_dry_run_of_a_sweep_prints_its_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    call = [
        "sweep",
        "qa",
        *small(concurrency="1,2"),
        "--set",
        "stall_timeout=5s",
        "-o",
        str(tmp_path / "s"),
    ]

    assert exits(*call, "--dry-run") == 0
    assert capsys.readouterr().out.count("workload: qa\n") == 2 and not (tmp_path / "s").exists()


def test_the_grace_option_limits_the_drain_of_mlperf_offline(tmp_path: Path) -> None:
    small_set = ["--target-qps", "20", "--min-duration", "1", "--mean-output", "8", "--seed", "1"]
    call = ["mlperf", "offline", "-b", "llama2-70b", "--url", "sim:gb300-vm", *small_set]
    exits(*call, "--grace", "5s", "-o", str(tmp_path / "m"))
    assert json.loads((tmp_path / "m" / "run.json").read_bytes())["grace_s"] == 5
    assert exits(*call, "--grace", "soon") == 2


@pytest.mark.parametrize(
    ("boolean_text", "code"), [("yes", 0), ("false", 0), ("maybe", 2), ("True", 2), ("", 2)]
)
def test_a_boolean_key_accepts_only_boolean_values(
    boolean_text: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        "run",
        "qa",
        "--url",
        "sim:gb300-vm",
        "-n",
        "3",
        "--dry-run",
        "-o",
        str(tmp_path / "out"),
    ]

    assert exits(*arguments, "--set", f"reset_cache={boolean_text}") == code
    assert code == 0 or "use yes or no" in capsys.readouterr().err
