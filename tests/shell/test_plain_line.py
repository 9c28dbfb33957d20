"""A plain command line is read as the parser reads it; what is not plain is left to the parser."""

from __future__ import annotations

import random
from typing import Any

import pytest

from loadgen.shell.given import chosen, spread
from loadgen.shell.parsing import parser
from loadgen.shell.plain_line import SWITCHES, plainly
from loadgen.shell.run_options import COMMAND_OPTIONS

BY_KEY = {name: option for name, option in COMMAND_OPTIONS.items() if option.sets}
FLAGS = [flag for option in COMMAND_OPTIONS.values() for flag in option.names]
WORDS = (
    "qa",
    "a b",
    "é",
    "auto",
    "off",
    "plain",
    "16",
    "1,2,4",
    "60s",
    "ttft:2s",
    "tpot:50ms",
    "http://h:1",
    "a=b",
    "seed=1",
    "route=sticky",
    "sources=::1",
    "reset_cache=yes",
    "set",
    "",
)


def taken(values: dict[str, Any]) -> dict[str, Any]:
    """What a command is given of its flags; a list is a tuple where it has nothing."""
    return {
        name: tuple(value) if isinstance(value, list) else value for name, value in values.items()
    }


def piece(drawn: random.Random) -> list[str]:
    name, word = drawn.choice(list(COMMAND_OPTIONS)), drawn.choice(WORDS)
    if not (names := COMMAND_OPTIONS[name].names) or drawn.random() < 0.1:
        return [word]
    return (
        [drawn.choice(names)] if COMMAND_OPTIONS[name].type is bool else [drawn.choice(names), word]
    )


def by_parser(words: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    params = parser().commands["run"].make_context("run", list(words)).params
    table = {name: params.pop(name) for name, option in COMMAND_OPTIONS.items() if option.flags}
    return table, {name: value for name, value in params.items() if value}


def test_plain_lines_are_read_as_the_parser_reads_them() -> None:
    drawn, plain = random.Random(1), 0
    for _ in range(400):
        line = [word for _ in range(drawn.randrange(6)) for word in piece(drawn)]
        if (found := plainly(spread(line))) is not None:
            table, own = by_parser(spread(line))
            given = [{**values, "set": ()} for values in (found[0], table)]
            read, told = (taken(chosen(values, COMMAND_OPTIONS, BY_KEY)) for values in given)
            assert (read, found[1]) == (told, own), line
            assert list(found[0]["set"]) == list(table["set"])
            plain += 1
    assert plain > 60


@pytest.mark.parametrize("flag", [*FLAGS, *SWITCHES])
def test_each_flag_alone(flag: str) -> None:
    for value in ([], ["json"], ["16"]):
        if (found := plainly([flag, *value])) is not None:
            table, own = by_parser([flag, *value])
            read, told = (
                taken(chosen({**one, "set": ()}, COMMAND_OPTIONS, BY_KEY))
                for one in (found[0], table)
            )
            assert (read, found[1]) == (told, own)


@pytest.mark.parametrize(
    "line",
    [
        "qa --url http://h:1 -c 16 -n 64 --warmup 0 --seed 1 --slo ttft:2s tpot:50ms -o r --json",
        "w.yaml --set route=sticky --set seed=2 --no-stream -k --progress off --dry-run",
        "--strict",
    ],
)
def test_what_people_type_is_plain(line: str) -> None:
    assert plainly(spread(line.split())) is not None


@pytest.mark.parametrize(
    "line",
    [
        "--help",
        "-c16",
        "--slo=ttft:2s",
        "-c -1",
        "-c",
        "-c 1 -c 2",
        "a b",
        "--gpus 4",
        "-- qa",
        "http://h",
        "--x",
    ],
)
def test_what_is_not_plain_is_for_the_parser(line: str) -> None:
    assert plainly(spread(line.split())) is None
