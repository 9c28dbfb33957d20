"""The command line in the process of a test, and the commands that typer makes of it."""

from __future__ import annotations

from typing import Any

import pytest
import typer

from loadgen.cli.app import main, root_command


def exits(*typed: object) -> int:
    """Return the exit code of a command."""
    with pytest.raises(SystemExit) as ending:
        main([str(word) for word in typed])
    assert isinstance(ending.value.code, int)
    return ending.value.code


def find_command(*path: str) -> Any:
    """Return the command of these names; None if there is none."""
    command = root_command()
    for name in path:
        command = command.get_command(typer.Context(command), name)
    return command


def all_commands(*path: str) -> dict[str, Any]:
    """Return every command that is no group, by its names: `run`, `mlperf server`."""
    command = find_command(*path)
    if not hasattr(command, "list_commands"):
        return {" ".join(path): command}
    commands: dict[str, Any] = {}
    for name in command.list_commands(typer.Context(command)):
        commands |= all_commands(*path, name)
    return commands
