"""Command lines of other tools get one error, with the whole command line of this tool."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from command_line import exits, find_command

from loadgen.cli.command_translation import REPLACEMENTS, KnownOption, translate
from loadgen.cli.invocation import expand_slo_flag
from loadgen.cli.run_options import COMMAND_OPTIONS, SET_KEYS
from loadgen.core.errors import USAGE

ROOT = Path(__file__).parents[2]


def _options_of(*path: str) -> dict[str, KnownOption]:
    return {
        name: KnownOption(takes_value=not param.is_flag)
        for param in find_command(*path).params
        if param.param_type_name == "option"
        for name in param.opts
    }


def _typed_command(text: str) -> list[str]:
    """Return the words of the command line that an error message asks to type."""
    line = next(
        line for line in text.splitlines() if "type: loadgen" in line or "example: " in line
    )
    return shlex.split(re.split("type: |example: ", line, maxsplit=1)[1])


@pytest.mark.parametrize(
    ("command_line", "expected"),
    [
        (
            "run --base-url http://h:8000 --model m --dataset-name random --random-input-len 1024"
            " --random-output-len 128 --num-prompts 100 --max-concurrency 8 --ignore-eos"
            " --goodput ttft:500 tpot:50 --temperature 0 --top-p 0.9",
            "loadgen run --url http://h:8000 --model m --input-tokens 1024 --output-tokens 128"
            " --num-requests 100 --concurrency 8 --slo ttft:500ms --slo tpot:50ms --extra-body"
            """ '{"temperature": 0, "top_p": 0.9}'""",
        ),
        (
            "run qa --url http://h --request-rate 10 --max-concurrency 64",
            "loadgen run qa --url http://h --request-rate 10 --max-in-flight 64",
        ),
        (
            "run qa --url http://h --rps inf --max-concurrency 64",
            "loadgen run qa --url http://h --concurrency 64",
        ),
        ("run qa --host h --port 80 -c 1", "loadgen run qa -c 1 --url http://h:80"),
        ("run qa --url http://h --threads 4", "loadgen run qa --url http://h --concurrency 4"),
        (
            "run qa --url http://h --arrival constant --qps 5",
            "loadgen run qa --url http://h --set burstiness=1000 --request-rate 5",
        ),
        (
            "run --url http://h --data prompt_tokens=256,output_tokens=128",
            "loadgen run --url http://h --input-tokens 256 --output-tokens 128",
        ),
        (
            "run --backend vllm --base-url=http://h --isl 5 --osl 5",
            "loadgen run --server vllm --api completions --url http://h --isl 5 --osl 5",
        ),
        ("bench serve --base-url http://h -c 1", "loadgen run --url http://h -c 1"),
        ("benchmark run --target http://h -c 1", "loadgen run --url http://h -c 1"),
        ("version", "loadgen --version"),
        ("help run", "loadgen run --help"),
        ("mlperf --url http://h", "loadgen mlperf server --url http://h"),
    ],
)
def test_an_unknown_option_of_another_tool_has_a_hint_with_the_translated_command(
    command_line: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exits(*shlex.split(command_line)) == USAGE
    assert _typed_command(capsys.readouterr().err) == shlex.split(expected)


def test_all_unknown_options_are_reported_in_one_error(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--nope", "1", "--base-url", "http://h", "--bogus", "--num-prompts", "5")
    assert exits("run", "qa", *arguments) == USAGE
    text = capsys.readouterr().err
    assert text.count("error:") == 1
    first_line = text.splitlines()[0]
    for flag in ("--nope", "--base-url", "--bogus", "--num-prompts"):
        assert flag in first_line
    assert "--nope" not in _typed_command(text)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("run", "qa", "-u", "10"), "-c 10"),
        (("run", "qa", "--url", "http://h", "-c", "0"), "--request-rate"),
        (("report", ROOT / "workloads/qa.yaml"), "loadgen run"),
        (("report", ROOT / "contracts/rag.yaml"), "loadgen validate"),
        (("export", ROOT / "workloads/qa.yaml", "--as", "csv"), "loadgen run"),
        (("compare", ROOT / "workloads/qa.yaml", ROOT / "workloads/rag.yaml"), "loadgen run"),
    ],
)
def test_a_frequent_mistake_has_a_hint_with_the_correct_option(
    arguments: tuple[object, ...], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exits(*arguments) == USAGE
    assert expected in capsys.readouterr().err.partition("hint:")[2]


@pytest.mark.parametrize("flag", REPLACEMENTS)
def test_the_replacement_of_an_option_of_another_tool_is_accepted(flag: str) -> None:
    replacement = REPLACEMENTS[flag]
    command = "export" if flag == "--format" else "run"
    value = {"--goodput": "ttft:500 tpot:50", "--endpoint": "/v1/completions"}.get(flag, "5")
    arguments = [] if replacement.translate is None else replacement.translate(value)
    known_options_by_name = _options_of(command)

    assert {word for word in arguments if word.startswith("-")} <= known_options_by_name.keys()
    assert set(re.findall(r"--set ([a-z_]+)=", replacement.hint)) <= set(SET_KEYS)
    named = set(re.findall(r"(?<![a-z-])--[a-z-]+", replacement.hint))
    assert named <= known_options_by_name.keys() | _options_of("export").keys()


def test_an_option_of_another_tool_has_one_replacement() -> None:
    api_flavors = {"--backend", "--endpoint-type"}
    renamed = {flag for option in COMMAND_OPTIONS.values() for flag in option.other_tools}
    assert renamed & REPLACEMENTS.keys() <= api_flavors


def test_a_translated_command_line_is_accepted() -> None:
    typed = "run qa --base-url http://h --ttft 500 --users 3 --quiet --max-seconds 5 --seed 1"
    translation = translate(typed.split(), 1, _options_of("run"))
    arguments = expand_slo_flag(list(translation.arguments[1:]))
    find_command("run").make_context("run", arguments)
    assert translation.unknown == ("--base-url", "--ttft", "--users", "--quiet", "--max-seconds")
