"""Every command of the documentation that sends a load passes a dry run, with its files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest
from command_line import exits
from test_doc_blocks import BLOCKS, reader_files  # noqa: F401 - the fixture
from test_docs import BLOCK_COMMAND_LINES, ROOT

from loadgen.contracts.loading import load_contract

PLACEHOLDERS = {
    "WORKLOAD": "qa",
    "HOST": "host.example",
    "LOAD": "40",
    "$START": "1",
    "TOKENIZER": "cl100k",
    "Qwen/Qwen3-8B": "cl100k",
    "tiny-model": "cl100k",
}
"""What a reader puts in the place of a word, so that the command can be checked."""
PLACEHOLDER = re.compile("|".join(map(re.escape, PLACEHOLDERS)))
FILES_OF_PAGES = {
    "rack.yaml": "# rack.yaml",
    "targets.yaml": "# rack.yaml",
    "truth.yaml": "name: truth",
    "poc.yaml": "# poc.yaml",
    "small.yaml": "# small.yaml",
    "mine.yaml": "name: chatbot",
    "defect.yaml": "# defect.yaml",
    "contract.yaml": "name: traffic",
    "azure.yaml": "# azure.yaml",
    "cloud.yaml": "# cloud.yaml",
    "system.yaml": "# system.yaml",
}
"""Maps a file that commands name to the first words of the block of a page that shows it."""
NEEDS_MORE = {"--shard", "--resume", "--ray", "--target", "--extend", "--bundle"}
"""Options whose commands need results or machines that a dry run does not have."""


class PageCommand(NamedTuple):
    """A command of a page, as the words after `loadgen`."""

    page: Path
    arguments: list[str]

    @property
    def label(self) -> str:
        """Return the name of the tests of this command."""
        return f"{self.page.name}-{' '.join(self.arguments)[:60]}"


def _find_commands(*names: str) -> list[PageCommand]:
    """Return the commands of these names that a dry run can check."""
    commands = []
    for line in BLOCK_COMMAND_LINES:
        arguments = line.split_words()
        options = {word.partition("=")[0] for word in arguments}
        has_shell_variable = "$" in line.text
        is_of_plugin = "acme" in line.text  # test_worked_package.py installs it and runs these
        is_checkable = not (options & NEEDS_MORE or has_shell_variable or is_of_plugin)
        if is_checkable and arguments[0] in names:
            commands.append(PageCommand(line.page, arguments))
    return commands


LOADS = _find_commands("run", "sweep", "search")
CONTRACTS = [
    command for command in _find_commands("validate") if not command.arguments[1].endswith("/")
]


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


def test_the_documentation_has_commands_with_loads_and_contracts() -> None:
    assert len(LOADS) > 30
    assert len(CONTRACTS) > 4


@pytest.mark.commands
@pytest.mark.usefixtures("reader_folder")
@pytest.mark.parametrize("command", LOADS, ids=[command.label for command in LOADS])
def test_every_documented_command_with_a_load_passes_a_dry_run(
    command: PageCommand, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [PLACEHOLDER.sub(_replace_placeholder, word) for word in command.arguments]
    if "--dry-run" not in arguments:
        arguments.append("--dry-run")
    exit_code = exits(*arguments)
    assert exit_code == 0, f"{command.page.name}: {' '.join(arguments)}: {capsys.readouterr().err}"


def _replace_placeholder(match: re.Match[str]) -> str:
    return PLACEHOLDERS[match[0]]


@pytest.mark.usefixtures("reader_folder")
@pytest.mark.parametrize("command", CONTRACTS, ids=[command.label for command in CONTRACTS])
def test_every_contract_of_a_documented_command_can_be_loaded(command: PageCommand) -> None:
    arguments = command.arguments
    gpus = int(arguments[arguments.index("--gpus") + 1]) if "--gpus" in arguments else None
    load_contract(Path(arguments[1]), gpus=gpus)
