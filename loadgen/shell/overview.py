"""The help of the whole program, made of the rows of its commands. Values in, text out; no command is imported."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from loadgen.commands import COMMANDS
from loadgen.plugins import version_of

WHAT = "Measure what users of an LLM endpoint feel: TTFT, TPOT, ITL, E2E, throughput and goodput under load."
VERSION = "Print the version and leave."
OPTIONS = (
    ("--version", VERSION),
    ("--install-completion", "Install completion for the current shell."),
    (
        "--show-completion",
        "Show completion for the current shell, to copy it or customize the installation.",
    ),
    ("-h, --help", "Show this message and exit."),
)
WIDEST, NARROWEST = 100, 50  # columns of a help
INDENT = 26  # of what is said of a name; a longer name stands on a line of its own


def overview() -> str:
    """The help, as wide as the terminal."""
    import shutil

    width = max(
        min(shutil.get_terminal_size().columns, WIDEST) - 2, NARROWEST
    )  # as the help of each command
    return "\n".join(_lines(width)) + "\n"


def first_words(line: str) -> list[str]:
    """The commands that complete the second word of a line: for them the parser need not be made."""
    begun = "".join(line.split()[1:2])
    told = (name for name, _ in COMMANDS.told("name", "group"))
    return [name for name in (*(row.name for row in COMMANDS.own), *told) if name.startswith(begun)]


def version() -> str:
    """What `--version` prints."""
    return f"loadgen {version_of('loadgen')}"


def _lines(width: int) -> Iterator[str]:
    yield from ("Usage: loadgen [OPTIONS] COMMAND [ARGS]...", "")
    yield from textwrap.wrap(
        WHAT, width, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False
    )
    yield from ("", "Options:")
    for name, text in (
        OPTIONS[0],
        *OPTIONS[3:],
        OPTIONS[1],
    ):  # the help of a screen; both completions are taken
        yield from row(name, text, width)
    commands = [(row.name, row.group, row.help) for row in COMMANDS.own]
    commands += [
        (name, group, said) for name, group, said in COMMANDS.told("name", "group", "help")
    ]
    for group in dict.fromkeys(group for _, group, _ in commands):
        yield from ("", f"{group.capitalize()}:")
        for name, of, said in commands:
            if of == group:
                yield from row(name, said, width, indent=14)
    yield from ("", "loadgen COMMAND --help says more of one.")


def row(name: str, text: str, width: int, indent: int = INDENT) -> Iterator[str]:
    """A name in the margin, and its text beside it, or below it where the name is long."""
    lines = textwrap.wrap(text, width - indent, break_on_hyphens=False) or [""]
    head = f"  {name}"
    if len(head) > indent - 2:
        yield from textwrap.wrap(
            name, width, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False
        )
        head = ""
    yield f"{head:<{indent}}{lines[0]}".rstrip()
    for line in lines[1:]:
        yield " " * indent + line
