"""The pages of the documentation: every link leads somewhere, and every command line is one that the tool takes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer
from command_line import find_command

from loadgen.cli.invocation import expand_repeated_values
from loadgen.cli.usage_errors import ClickException

ROOT = Path(__file__).parent.parent
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "loadgen/README.md",
    ROOT / "sdk/README.md",
    *sorted((ROOT / "benchmarks").glob("*.md")),
    *sorted(ROOT.glob("results/*/README.md")),
]
LINK = re.compile(r"\]\(([^)\s]+)\)")
BLOCK = re.compile(
    r"(?m)^(?:    (?!    ).*|```\w*\n[\s\S]*?^```)$"
)  # indented text, or between fences
DOTS = ("...", "…")


def _anchors(page: Path) -> set[str]:
    heads = re.findall(r"(?m)^#+ (.*)$", page.read_text("utf-8"))
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in LINK.findall(page.read_text("utf-8")):
        if target.startswith(("https://", "http://", "data:")):
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), f"{page.name} points at {target}"
        assert not anchor or file.suffix != ".md" or anchor in _anchors(file), (
            f"{page.name} points at {target}"
        )


def _commands(page: Path) -> list[tuple[str, bool]]:
    """The command lines of a page, and whether each stands within a sentence, where arguments may be left out.

    After a backslash a line goes on in the next.
    """
    text = page.read_text("utf-8")
    lines = "\n".join(BLOCK.findall(text)).replace("\\\n", " ").splitlines()
    told = [
        (match.replace("\n", " "), True) for match in re.findall(r"`(loadgen [a-z][^`]*)`", text)
    ]
    return told + [
        (line.strip().removeprefix("$ "), False)
        for line in lines
        if re.match(r"\s*(\$ )?loadgen [a-z]", line)
    ]


LINES = [(page, line, told) for page in PAGES for line, told in _commands(page)]


def test_there_are_commands_to_check() -> None:
    assert len(LINES) > 150


SENDING = ("run", "sweep", "search", "validate", "mlperf", "answers")
"""The commands that send a load, and so need a target."""
TARGET_OPTIONS = ("-u", "--url", "--targets", "--target", "--resume", "--extend")
BLOCK_LINES = [(page, line) for page, line, is_in_sentence in LINES if not is_in_sentence]


@pytest.mark.parametrize(
    ("page", "line"), BLOCK_LINES, ids=[f"{page.name}:{line[:60]}" for page, line in BLOCK_LINES]
)
def test_every_command_that_sends_a_load_names_its_target(page: Path, line: str) -> None:
    words = shlex.split(line, comments=True)[1:]
    judges_a_folder = words[0] == "validate" and words[1].endswith("/")
    reads_a_verdict = words[:2] == ["mlperf", "verdict"]
    if words[0] in SENDING and not judges_a_folder and not reads_a_verdict:
        assert {word.partition("=")[0] for word in words} & {*TARGET_OPTIONS}, f"{page}: {line}"


@pytest.mark.parametrize(
    ("page", "line", "told"), LINES, ids=[f"{page.name}:{line[:60]}" for page, line, _ in LINES]
)
def test_every_command_is_one_that_the_tool_takes(page: Path, line: str, told: bool) -> None:
    words = shlex.split(line, comments=True)[1:]
    words = words[
        : next((place for place, word in enumerate(words) if word in (">", "|", "&&")), None)
    ]
    # dots that are no value of a flag stand for more of the same
    words = [
        word
        for before, word in zip(["", *words], words, strict=False)
        if word not in DOTS or before[:1] == "-"
    ]
    path: list[str] = []
    command = find_command()
    while hasattr(command, "list_commands"):
        if told and not words:
            return
        assert words, f"{page.name}: {line}: no command"
        path.append(words.pop(0))
        command = find_command(*path)
        assert command is not None, f"{page.name}: {line}: no command {path}"
    try:
        command.make_context("loadgen", expand_repeated_values(words))
    except typer.Exit:  # of --help
        return
    except ClickException as error:
        if not (told and type(error).__name__ == "MissingParameter"):
            pytest.fail(f"{page.name}: {line}: {error.format_message()}")
