"""The table of commands: each row has a command, and imports are limited to what it needs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from inspect import isfunction
from pathlib import Path
from typing import Any

import pytest
from command_line import exits, find_command
from plugin_packages import forgetting, install

from loadgen.cli.run_options import COMMAND_OPTIONS, SET_KEYS
from loadgen.commands import COMMANDS, load_command
from loadgen.core.errors import UNSOUND, USAGE

GROUPS = ["start", "measure", "evidence", "cost", "tools"]


@pytest.mark.parametrize("row", COMMANDS.builtin_rows, ids=lambda row: row.name)
def test_every_row_of_the_command_table_loads_its_command(row: Any) -> None:
    command = find_command(row.name)
    assert command.name == row.name and command.help
    assert len(row.help) <= 64 and row.help.endswith("."), "one line at 80 columns"


def test_the_rows_of_the_command_table_are_grouped() -> None:
    assert list(dict.fromkeys(row.group for row in COMMANDS.builtin_rows)) == GROUPS
    assert [row.group for row in COMMANDS.builtin_rows] == sorted(
        (row.group for row in COMMANDS.builtin_rows), key=GROUPS.index
    )
    assert len({row.name for row in COMMANDS.builtin_rows}) == len(COMMANDS.builtin_rows)


def test_there_are_at_most_19_commands() -> None:
    assert len(COMMANDS.builtin_rows) <= 19, (
        "one more needs one less: what people have to choose from is the surface"
    )


def flags_of(*path: str) -> set[str]:
    """Return all names of the options of a command."""
    return {flag for param in find_command(*path).params for flag in param.opts}


@pytest.mark.parametrize(
    ("flag", "replacement"),
    [(flag, option.flags[0]) for option in COMMAND_OPTIONS.values() for flag in option.other_tools],
)
def test_a_flag_of_another_tool_is_a_usage_error_that_names_the_option(
    flag: str, replacement: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exits("run", "qa", flag, "1") == USAGE
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == f"error: unknown option: {flag}"
    assert replacement in lines[2]
    assert lines[3].startswith("  type: loadgen run qa ")


@pytest.mark.parametrize("key", SET_KEYS)
def test_a_key_of_set_that_is_typed_as_a_flag_has_a_hint(
    key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exits("run", "qa", f"--{key.replace('_', '-')}", "1") == USAGE
    hint, command = capsys.readouterr().err.splitlines()[2:]
    assert f"--set {key}=" in hint
    assert command == f"  type: loadgen run qa --set {key}=1"


def test_run_has_at_most_62_options() -> None:
    """A new option replaces another one, or becomes a key of --set."""
    assert (
        len([param for param in find_command("run").params if param.param_type_name == "option"])
        <= 62
    )


def modules_after(*command_line: str, completing: str = "") -> tuple[set[str], str]:
    """Return the modules that a process has imported after a command, and what it printed."""
    code = (
        "import sys\nfrom loadgen.cli.app import main\nsys.argv[0] = 'loadgen'\n"
        "try:\n    main()\nfinally:\n    print(*sys.modules, file=sys.stderr)"
    )
    environment = {
        "COMP_WORDS": completing,
        "COMP_CWORD": str(completing.count(" ")),
        "_LOADGEN_COMPLETE": "complete_bash",
    }
    process = subprocess.run(
        [sys.executable, "-c", code, *command_line],
        env=os.environ | (environment if completing else {}),
        capture_output=True,
        text=True,
        check=True,
    )
    return set(process.stderr.splitlines()[-1].split()), process.stdout


COMMAND_MODULES = {
    function.__module__
    for function in (load_command(row) for row in COMMANDS.builtin_rows)
    if isfunction(function)
}


@pytest.mark.processes
@pytest.mark.parametrize("flag", ["--help", "--version"])
def test_help_and_version_import_no_command(flag: str) -> None:
    modules, output = modules_after(flag)
    assert output
    assert not modules & COMMAND_MODULES
    assert not modules & {"numpy", "pyarrow"}


@pytest.mark.processes
def test_completing_a_name_imports_no_command() -> None:
    modules, output = modules_after(completing="loadgen re")
    assert output.split() == ["report"]
    assert not modules & COMMAND_MODULES


@pytest.mark.processes
def test_only_the_requested_command_is_imported() -> None:
    modules, output = modules_after("verify", "--help")
    assert output.startswith("Usage: loadgen verify")
    assert modules & COMMAND_MODULES == {"loadgen.bundle.verify_command"}
    assert not modules & {"numpy", "pyarrow"}


@pytest.mark.processes
def test_a_plain_run_imports_no_module_of_traces() -> None:
    modules, output = modules_after(
        "run", "qa", "--url", "sim:gb300-vm", "-c", "4", "-n", "8", "--dry-run"
    )
    assert "4 in flight" in output
    assert not modules & {"http.client", "xml.etree.ElementTree", "loadgen.telemetry.otel"}
    assert not modules & {
        f"loadgen.core.{name}" for name in ("workload.traces", "requests.trace_prompts")
    }


@pytest.fixture
def fresh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[dict[str, str]], None]]:
    """Provide a function that installs a plugin with the given commands for one test."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("LOADGEN_PLUGINS", raising=False)
    with forgetting(COMMANDS, "greeter"):
        yield lambda points: install(
            tmp_path, "greeter", {"greeter": GREETER}, {"loadgen.commands": points}
        )


GREETER = """
from loadgen.commands import CommandRow
from loadgen.core.errors import UserError
def greet(whom: str, loud: bool = False) -> int:
    '''Greet.'''
    if whom == "nobody":
        raise UserError("invalid_value", "nobody is greeted", "greet nobody")
    print(whom.upper() if loud else 1 // len(whom.strip()) or whom)
    return 3
GREET = CommandRow("greet", "tools", "Greet whom you name.", lambda: greet)
"""


def test_a_plugin_can_add_a_command(fresh: Any, capsys: pytest.CaptureFixture[str]) -> None:
    fresh({"greet": "greeter:GREET"})

    assert exits("greet", "all", "--loud") == UNSOUND
    assert capsys.readouterr().out == "ALL\n"
    assert exits("--help") == 0
    listed = capsys.readouterr().out.partition("\nTools:\n")[2]
    assert "\n  greet       Greet " in listed
    assert exits("greet", "nobody") == USAGE
    assert "error: nobody is greeted" in capsys.readouterr().err
    assert exits("greet", " ") == USAGE
    assert "greeter 1.0 failed: ZeroDivisionError" in capsys.readouterr().err
    assert exits("greeet", "all") == USAGE
    assert 'did you mean "greet"?' in capsys.readouterr().err


def test_a_broken_plugin_command_leaves_the_others_usable(
    fresh: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    fresh({"greet": "greeter:GONE", "run": "greeter:GREET"})

    assert exits("export", "--schema", "workload") == 0
    assert "plug-in" not in capsys.readouterr().err, "a name of ours looks for none"
    assert exits("--help") == 0
    captured = capsys.readouterr()
    assert "Start:" in captured.out and "greet " not in captured.out
    assert "greet of greeter 1.0" in captured.err and "run of greeter 1.0" in captured.err
    assert exits("greet") == USAGE
    assert "greeter 1.0 failed" in capsys.readouterr().err
