"""A command line that is plainly right, read without the parser of all of them, whose modules are a sixteenth of a run.

What the parser would make of such a line is the same, which a test holds. All else is left to it: help, faults, short
options and values in one word, values that begin with a dash, options that take a number or a file.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, get_args

from loadgen.plugins import resolve
from loadgen.shell.given import Given, chosen, spread
from loadgen.shell.run_options import COMMAND_OPTIONS

RUN = "loadgen.runs.command:run"
SWITCHES = {"--json": "as_json", "--strict": "strict", "--dry-run": "dry_run"}
"""Of those that `run` has beside the table."""


def carry_out(typed: Sequence[str]) -> int:
    """Carry out a command line; returns the exit code of its command. Raises Fault or Faults."""
    if (
        typed[:1] == ["run"]
        and "_LOADGEN_COMPLETE" not in os.environ
        and (plain := plainly(spread(typed[1:])))
    ):
        values, own = plain
        by_key = {name: option for name, option in COMMAND_OPTIONS.items() if option.sets}
        given = Given("run", chosen(values, COMMAND_OPTIONS, by_key), typed, _again)
        code: int = resolve(RUN)(given, **own)
        return code
    from loadgen.shell import parsing

    return parsing.carry_out(typed)


def _again(arguments: list[str]) -> int:
    from loadgen.shell.parsing import parser

    code: int = parser().main(arguments, standalone_mode=False, obj=arguments)
    return code


def plainly(words: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """What is typed after `run`: values of the options of the table, and what of its own is given. None: not plain."""
    flags = {flag: name for name, option in COMMAND_OPTIONS.items() for flag in option.names}
    values: dict[str, Any] = {
        name: () if option.type == list[str] else option.default
        for name, option in COMMAND_OPTIONS.items()
        if option.flags
    }
    own: dict[str, Any] = {}
    seen = set[str]()
    rest = iter(words)
    for word in rest:
        if word in SWITCHES:
            own[SWITCHES[word]] = True
        elif word in flags:
            name = flags[word]
            kind = COMMAND_OPTIONS[name].type
            value = True if kind is bool else next(rest, "-")
            if kind == list[str]:
                values[name] = [*values[name], value]
            elif name in seen or (kind not in (bool, str) and value not in get_args(kind)):
                return None
            else:
                values[name] = value
            seen.add(name)
            if str(value).startswith("-"):
                return None
        elif not word or word.startswith("-") or "://" in word or "workload" in own:
            return None
        else:
            own["workload"] = word
    return values, own
