"""The links of the documentation lead somewhere, and its commands are valid."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import NamedTuple

import pytest
import typer
from command_line import find_command

from loadgen.cli.invocation import expand_slo_flag
from loadgen.cli.usage_errors import ClickException

ROOT = Path(__file__).parent.parent
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "loadgen/README.md",
    ROOT / "sdk/README.md",
    *sorted((ROOT / "benchmarks").glob("*.md")),
    *sorted(ROOT.glob("results/*/README.md")),
    *sorted((ROOT / "examples/recipes").glob("*.md")),
]
LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE_BLOCK = re.compile(r"(?m)^(?:    (?!    ).*|```\w*\n[\s\S]*?^```)$")
"""Matches an indented line of code, or a fenced block."""
COMMAND_IN_SENTENCE = re.compile(r"`(loadgen [a-z][^`]*)`")
COMMAND_IN_BLOCK = re.compile(r"\s*(\$ )?loadgen [a-z]")
ELLIPSES = ("...", "…")
SHELL_OPERATORS = (">", "|", "&&")


class CommandLine(NamedTuple):
    """A command line of a page."""

    page: Path
    text: str
    is_in_sentence: bool  # then required arguments may be left out

    @property
    def label(self) -> str:
        """Return the name of the tests of this command line."""
        return f"{self.page.name}:{self.text[:60]}"

    def split_words(self) -> list[str]:
        """Return the words after `loadgen`, without those that belong to the shell.

        An ellipsis that is not the value of an option stands for more arguments, and is left out.
        """
        command_words = shlex.split(self.text, comments=True)[1:]
        end = next(
            (i for i, word in enumerate(command_words) if word in SHELL_OPERATORS),
            len(command_words),
        )
        command_words = command_words[:end]
        return [
            word
            for previous, word in zip(["", *command_words], command_words, strict=False)
            if word not in ELLIPSES or previous.startswith("-")
        ]


def _find_command_lines(page: Path) -> list[CommandLine]:
    """Return the command lines of a page. A line that ends with a backslash continues."""
    text = page.read_text("utf-8")
    in_sentences = [
        CommandLine(page, match.replace("\n", " "), True)
        for match in COMMAND_IN_SENTENCE.findall(text)
    ]
    code = "\n".join(CODE_BLOCK.findall(text)).replace("\\\n", " ")
    in_blocks = [
        CommandLine(page, line.strip().removeprefix("$ "), False)
        for line in code.splitlines()
        if COMMAND_IN_BLOCK.match(line)
    ]
    return in_sentences + in_blocks


COMMAND_LINES = [line for page in PAGES for line in _find_command_lines(page)]
BLOCK_COMMAND_LINES = [line for line in COMMAND_LINES if not line.is_in_sentence]
COMMANDS_WITH_TARGET = ("run", "sweep", "search", "validate", "mlperf", "answers")
TARGET_OPTIONS = {"-u", "--url", "--targets", "--target", "--resume", "--extend"}


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"(?m)^#+ (.*)$", page.read_text("utf-8"))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_of_the_documentation_has_a_target(page: Path) -> None:
    for target in LINK.findall(page.read_text("utf-8")):
        if target.startswith(("https://", "http://", "data:")):
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), f"{page.name} points at {target}"
        has_anchors = file.suffix == ".md"
        assert not anchor or not has_anchors or anchor in _anchors(file), (
            f"{page.name} points at {target}"
        )


def test_the_documentation_has_more_than_150_commands() -> None:
    assert len(COMMAND_LINES) > 150


@pytest.mark.parametrize(
    "line", BLOCK_COMMAND_LINES, ids=[line.label for line in BLOCK_COMMAND_LINES]
)
def test_every_documented_command_that_sends_a_load_names_its_target(line: CommandLine) -> None:
    arguments = line.split_words()
    judges_a_folder = arguments[0] == "validate" and arguments[1].endswith("/")
    reads_a_result = arguments[:2] == ["mlperf", "verdict"] or "check" in arguments[:3]
    if arguments[0] in COMMANDS_WITH_TARGET and not judges_a_folder and not reads_a_result:
        options = {word.partition("=")[0] for word in arguments}
        assert options & TARGET_OPTIONS, f"{line.page}: {line.text}"


@pytest.mark.parametrize("line", COMMAND_LINES, ids=[line.label for line in COMMAND_LINES])
def test_every_documented_command_is_valid(line: CommandLine) -> None:
    arguments = line.split_words()
    path: list[str] = []
    command = find_command()
    while hasattr(command, "list_commands"):
        if line.is_in_sentence and not arguments:
            return
        assert arguments, f"{line.label}: no command"
        path.append(arguments.pop(0))
        command = find_command(*path)
        assert command is not None, f"{line.label}: no command {path}"
    try:
        command.make_context("loadgen", expand_slo_flag(arguments))
    except typer.Exit:  # of --help
        return
    except ClickException as error:
        is_incomplete = type(error).__name__ == "MissingParameter"
        if not (line.is_in_sentence and is_incomplete):
            pytest.fail(f"{line.page.name}: {line.text}: {error.format_message()}")
