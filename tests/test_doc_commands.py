"""Every command of the documentation that sends a load passes a dry run, with its files."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from command_line import exits
from test_doc_blocks import BLOCKS, reader_files  # noqa: F401 - the fixture
from test_docs import DOTS, LINES, ROOT

from loadgen.contracts.loading import load_contract

PLACEHOLDERS = {
    "WORKLOAD": "qa",
    "HOST": "host.example",
    "LOAD": "40",
    "$START": "1",
    "TOKENIZER": "cl100k",
    "Qwen/Qwen3-8B": "cl100k",
}
"""What a reader puts in the place of a word, so that the command can be checked."""
FILES_OF_PAGES = {
    "rack.yaml": "# rack.yaml",
    "targets.yaml": "# rack.yaml",
    "truth.yaml": "name: truth",
    "poc.yaml": "# poc.yaml",
    "mine.yaml": "name: chatbot",
    "contract.yaml": "name: traffic",
}
"""Maps a file that commands name to the first words of the block of a page that shows it."""
NEEDS_MORE = {"--shard", "--resume", "--ray", "--target", "--extend", "--bundle"}
"""Options whose commands need results or machines that a dry run does not have."""


def _words(line: str) -> list[str]:
    """Return the words of a command line, without what a shell does with its output."""
    words = shlex.split(line, comments=True)[1:]
    end = next((place for place, word in enumerate(words) if word in (">", "|", "&&")), None)
    words = words[:end]
    return [
        word
        for before, word in zip(["", *words], words, strict=False)
        if word not in DOTS or before[:1] == "-"
    ]


def _commands(*names: str) -> list[tuple[Path, list[str]]]:
    commands = []
    for page, line, is_in_sentence in LINES:
        words = _words(line)
        options = {word.partition("=")[0] for word in words}
        is_checkable = not is_in_sentence and not options & NEEDS_MORE
        is_of_plugin = "acme" in line  # test_worked_package.py installs it and runs these
        if is_checkable and words[0] in names and "$" not in line and not is_of_plugin:
            commands.append((page, words))
    return commands


def _name(value: object) -> str:
    return value.name if isinstance(value, Path) else " ".join(map(str, value))[:60]  # type: ignore[call-overload]


@pytest.fixture
def reader_folder(reader_files: Path, monkeypatch: pytest.MonkeyPatch) -> Path:  # noqa: F811
    """Return a folder with the files of the documentation, as the current directory."""
    monkeypatch.chdir(reader_files)
    for name in ("docs", "contracts", "workloads", "deploy"):
        (reader_files / name).symlink_to(ROOT / name)
    for name, first_words in FILES_OF_PAGES.items():
        text = next(block.text for block in BLOCKS if block.text.startswith(first_words))
        (reader_files / name).write_text(text)
    (reader_files / "trace.jsonl").symlink_to(ROOT / "tests/data/oracle/trace.jsonl")
    return reader_files


LOADS = _commands("run", "sweep", "search")
CONTRACTS = [(page, words) for page, words in _commands("validate") if words[1][-1] != "/"]


def test_there_are_commands_to_check() -> None:
    assert len(LOADS) > 30
    assert len(CONTRACTS) > 4


@pytest.mark.commands
@pytest.mark.usefixtures("reader_folder")
@pytest.mark.parametrize(("page", "words"), LOADS, ids=_name)
def test_every_command_with_a_load_passes_a_dry_run(
    page: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    typed = [re.sub("|".join(map(re.escape, PLACEHOLDERS)), _filled, word) for word in words]
    extra = [] if "--dry-run" in typed else ["--dry-run"]
    code = exits(*typed, *extra)
    assert code == 0, f"{page.name}: {' '.join(words)}: {capsys.readouterr().err}"


def _filled(match: re.Match[str]) -> str:
    return PLACEHOLDERS[match[0]]


@pytest.mark.usefixtures("reader_folder")
@pytest.mark.parametrize("words", [words for _, words in CONTRACTS], ids=_name)
def test_every_contract_that_a_command_names_can_be_carried_out(words: list[str]) -> None:
    gpus = int(words[words.index("--gpus") + 1]) if "--gpus" in words else None
    load_contract(Path(words[1]), gpus=gpus)
