"""The table of commands: every row leads to a command, and nothing is imported that was not asked for."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import typer
from command_line import exits
from plugin_packages import forgetting, install
from typer.core import TyperCommand

from loadgen.commands import COMMANDS
from loadgen.core.errors import UNSOUND, USAGE
from loadgen.shell import parsing, removed
from loadgen.shell.help import Command
from loadgen.shell.overview import OPTIONS
from loadgen.shell.run_options import COMMAND_OPTIONS

GROUPS = ["start", "judge", "evidence", "money", "tools"]
HEAVY = {
    "numpy",
    "pyarrow",
    "pydantic",
    "msgspec",
    "rich",
    "dataclasses",
    "logging",
    "pathlib",
    "tempfile",
}
SHELL = {
    "loadgen.shell",
    *(f"loadgen.shell.{name}" for name in ("app", "at_once", "ending", "overview", "streams")),
}


@pytest.mark.parametrize("row", COMMANDS.own, ids=lambda row: row.name)
def test_every_row_leads_to_its_command(row: Any) -> None:
    command = parsing.parser().commands[row.name]
    assert command.name == row.name and command.help
    assert len(row.help) <= 64 and row.help.endswith("."), "one line at 80 columns"


def test_the_rows_stand_group_by_group() -> None:
    assert list(dict.fromkeys(row.group for row in COMMANDS.own)) == GROUPS
    assert [row.group for row in COMMANDS.own] == sorted(
        (row.group for row in COMMANDS.own), key=GROUPS.index
    )
    assert len({row.name for row in COMMANDS.own}) == len(COMMANDS.own)


def test_there_are_at_most_18_commands() -> None:
    assert len(COMMANDS.own) <= 18, (
        "one more needs one less: what people have to choose from is the surface"
    )


@pytest.mark.parametrize(("old", "now"), removed.COMMANDS.items())
def test_a_command_that_is_gone_names_what_is_typed_now(
    old: str, now: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exits(old, "qa") == USAGE
    assert capsys.readouterr().err.splitlines()[-1] == f"hint: {now}"
    assert_taken(now, "")


@pytest.mark.parametrize(("old", "now"), removed.OPTIONS.items())
def test_an_option_that_is_gone_names_what_is_typed_now(
    old: str, now: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exits("run", "qa", old, "1") == USAGE
    said = capsys.readouterr().err.splitlines()
    assert (said[0], said[-1]) == (f"error: no flag is called {old}", f"hint: {now}")
    assert_taken(now, "run")


BY_KEY = {name for name, option in COMMAND_OPTIONS.items() if option.sets}


def assert_taken(now: str, by: str) -> None:
    """Each flag that a hint names is one of the command that it names, else of `by`."""
    (command,) = set(re.findall(r"loadgen ([a-z]+)", now)) or {by}
    flags = {flag for param in parsing.parser().commands[command].params for flag in param.opts}
    assert set(re.findall(r"(?<![a-z])--[a-z-]+", now)) <= flags
    assert set(re.findall(r"--set ([a-z_]+)=", now)) <= BY_KEY


def test_a_run_has_at_most_55_options() -> None:
    """What a load can be is in its file: who adds one here takes another away, or makes it a key of --set."""
    assert (
        len(
            [
                param
                for param in parsing.parser().commands["run"].params
                if param.param_type_name == "option"
            ]
        )
        <= 55
    )


def test_the_help_lists_the_options_that_the_parser_takes() -> None:
    root = parsing.parser()
    taken = [(", ".join(param.opts), param.help) for param in root.params]
    assert taken == [(name, text) for name, text in OPTIONS if name != "-h, --help"]


def modules_after(*typed: str, completing: str = "") -> tuple[set[str], str]:
    """The modules that a process has imported when it has carried out a command line, and what it printed."""
    code = (
        "import sys\nfrom loadgen.shell.app import main\nsys.argv[0] = 'loadgen'\n"
        "try:\n    main()\nfinally:\n    print(*sys.modules, file=sys.stderr)"
    )
    words = {
        "COMP_WORDS": completing,
        "COMP_CWORD": str(completing.count(" ")),
        "_LOADGEN_COMPLETE": "complete_bash",
    }
    done = subprocess.run(
        [sys.executable, "-c", code, *typed],
        env=os.environ | (words if completing else {}),
        capture_output=True,
        text=True,
        check=True,
    )
    return set(done.stderr.splitlines()[-1].split()), done.stdout


def ours(modules: set[str]) -> set[str]:
    return {name for name in modules if name.startswith("loadgen.shell")}


@pytest.mark.processes
@pytest.mark.parametrize("asked", ["--help", "--version"])
def test_help_and_version_import_no_command_and_no_parser(asked: str) -> None:
    modules, told = modules_after(asked)
    assert told and ours(modules) == SHELL
    assert not modules & (HEAVY | {"typer", "click"})


@pytest.mark.processes
def test_completing_a_name_imports_no_command() -> None:
    modules, told = modules_after(completing="loadgen re")
    assert told.split() == ["report"]
    assert ours(modules) == SHELL
    assert not modules & (HEAVY | {"typer", "click"})


@pytest.mark.processes
def test_only_the_asked_command_is_imported() -> None:
    modules, told = modules_after("verify", "--help")
    assert told.startswith("Usage: loadgen verify")
    commands = {row.function.partition(":")[0] for row in COMMANDS.own}
    assert modules & commands == {"loadgen.evidence.verify_command"}
    assert not modules & {"numpy", "pyarrow", "pydantic"}


@pytest.mark.processes
def test_a_plain_run_imports_nothing_of_other_runs() -> None:
    modules, told = modules_after(
        "run", "qa", "--url", "sim:gb300-vm", "-c", "4", "-n", "8", "--dry-run"
    )
    assert "4 in flight" in told
    assert not modules & {
        "http.client",
        "xml.etree.ElementTree",
        "loadgen.telemetry.otel",
        "typer",
    }
    assert not modules & {
        f"loadgen.core.{name}" for name in ("workload.traces", "requests.trace_prompts")
    }


@pytest.mark.processes
def test_a_command_ends_without_giving_its_memory_back() -> None:
    """Which took 3,000 page faults; what asked to be called at the end is called."""
    code = (
        "import atexit\nfrom loadgen.shell.app import main\nclass Thing:\n    def __del__(self): print('gone')\n"
        "kept = Thing()\ntry:\n    main()\nfinally:\n    atexit.register(print, 'the end')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "nothing"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (USAGE, "the end\n")


@pytest.mark.processes
def test_options_of_every_kind_make_no_schema(tmp_path: Path) -> None:
    """Typer would: for --help, --version and every option with a value or a default, texts and numbers alike."""
    (tmp_path / "r").mkdir()
    code = (
        "import sys\nfrom loadgen.shell.app import main\nsys.argv[0] = 'loadgen'\n"
        "try:\n    main()\nfinally:\n    print('pydantic' in sys.modules, file=sys.stderr)"
    )
    for typed in (
        ["report", "r", "--json", "--html", "p.html"],
        ["compare", "r", "r", "--in", "kept"],
    ):
        done = subprocess.run(
            [sys.executable, "-P", "-c", code, *typed],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            check=False,
        )
        assert "no flag" not in done.stderr
        assert (done.returncode, done.stderr.splitlines()[-1]) == (USAGE, "False")


GIVEN = [
    ("--whole", "7"),
    ("--whole", "0"),
    ("--whole", "11"),
    ("--whole", "-3"),
    ("--whole", " 7 "),
    ("--whole", "7.0"),
    ("--whole", "7.5"),
    ("--whole", "1_0"),
    ("--whole", "x"),
    ("--whole", ""),
    ("--whole", "٣"),
    ("--number", "0.25"),
    ("--number", "1"),
    ("--number", "2.5"),
    ("--number", "1e-1"),
    ("--number", "nan"),
    ("--number", "-1"),
    ("--number", ".5"),
    ("--number", "x"),
    ("--word", "x"),
    ("--word", ""),
    ("--word", "plain"),
    ("--text", ""),
    ("--text", " a "),
    ("--file", "a/b"),
    ("--file", ""),
    ("--file", "."),
    ("--folder", "."),
    ("--folder", __file__),
    ("--many", "a"),
    ("--many", ""),
    ("--many-files", "x"),
    ("--yes",),
    ("--off",),
    (),
    ("a",),
    ("a", "b", "--whole", "3", "--many", "x", "--many", "y", "--number", "0.5"),
]


@pytest.mark.parametrize("typed", GIVEN, ids=" ".join)
def test_what_is_taken_as_it_stands_is_what_the_parser_makes_of_it(typed: tuple[str, ...]) -> None:
    found = []
    for kind in (Command, TyperCommand):
        app, taken = typer.Typer(add_completion=False), dict[str, Any]()

        @app.command(cls=kind)
        def take(
            names: Annotated[list[Path], typer.Argument()] = [Path("x")],  # noqa: B006 - typer takes it as a default
            whole: Annotated[int, typer.Option(min=1, max=10)] = 3,
            number: Annotated[float | None, typer.Option(min=0, max=2)] = None,
            word: Annotated[Literal["plain", "json"], typer.Option()] = "plain",
            text: Annotated[str | None, typer.Option()] = None,
            file: Annotated[Path, typer.Option()] = Path("y"),
            folder: Annotated[Path | None, typer.Option(file_okay=False, exists=True)] = None,
            many: Annotated[list[str] | None, typer.Option()] = None,
            many_files: Annotated[list[Path] | None, typer.Option()] = None,
            yes: Annotated[bool, typer.Option("--yes")] = False,
            on: Annotated[bool, typer.Option("--on/--off")] = True,
        ) -> None:
            taken.update(locals())  # noqa: B023

        try:
            typer.main.get_command(app)(list(typed), standalone_mode=False)
        except parsing.WrongUsage as error:
            found.append(error.format_message())
        else:
            found.append(
                {name: (type(value), value) for name, value in taken.items() if name != "taken"}
            )
    assert found[0] == found[1]


@pytest.fixture
def fresh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[dict[str, str]], None]]:
    """Installs the package of somebody else, with these commands; afterwards nobody remembers it."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("LOADGEN_PLUGINS", raising=False)
    with forgetting(COMMANDS, "greeter"):
        yield lambda points: install(
            tmp_path, "greeter", {"greeter": GREETER}, {"loadgen.commands": points}
        )


GREETER = """
from loadgen.commands import CommandRow
from loadgen.core.errors import UserError
GREET = CommandRow("greet", "tools", "Greet whom you name.", "greeter:greet")
def greet(whom: str, loud: bool = False) -> int:
    '''Greet.'''
    if whom == "nobody":
        raise UserError("invalid_value", "nobody is greeted", "greet nobody")
    print(whom.upper() if loud else 1 // len(whom.strip()) or whom)
    return 3
"""


def test_a_command_of_another_package(fresh: Any, capsys: pytest.CaptureFixture[str]) -> None:
    fresh({"greet": "greeter:GREET"})
    assert exits("greet", "all", "--loud") == UNSOUND
    assert capsys.readouterr().out == "ALL\n"
    assert exits("--help") == 0
    listed = capsys.readouterr().out.partition("\nTools:\n")[2]
    assert "  greet       Greet whom you name.\n" in listed
    assert exits("greet", "nobody") == USAGE
    assert "error: nobody is greeted" in capsys.readouterr().err
    assert exits("greet", " ") == USAGE
    assert "plug-in greet of greeter 1.0 failed: ZeroDivisionError" in capsys.readouterr().err
    assert exits("greeet", "all") == USAGE
    assert 'did you mean "greet"?' in capsys.readouterr().err


def test_a_command_that_cannot_be_had_stops_no_other(
    fresh: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    fresh({"greet": "greeter:GONE", "run": "greeter:GREET"})
    assert exits("export", "--schema", "workload") == 0
    assert "plug-in" not in capsys.readouterr().err, "a name of ours looks for none"
    assert exits("--help") == 0
    said = capsys.readouterr()
    assert "Start:" in said.out and "greet " not in said.out
    assert (
        "greet of greeter 1.0 is left out" in said.err
        and "run of greeter 1.0 is left out" in said.err
    )
    assert exits("greet") == USAGE
    assert "plug-in greet of greeter 1.0 failed" in capsys.readouterr().err
