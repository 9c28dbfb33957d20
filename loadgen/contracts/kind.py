"""The result kind of a validation: how other commands load, list, compare and regenerate it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from loadgen.contracts import outputs, stored_validation
from loadgen.contracts.outputs import VERDICT_FILE
from loadgen.contracts.stored_validation import ValidationFacts
from loadgen.contracts.verdict import Validation, get_exit_code
from loadgen.core import format, run_folder
from loadgen.core.errors import UserError
from loadgen.core.results.json_files import decode_json
from loadgen.render.section import Report
from loadgen.result_kinds import RECORDS, ListRow, RegeneratedFile, ResultFunctions
from loadgen.runs.comparison_side import Side
from loadgen.runs.kind import stored_summaries
from loadgen.runs.run_directory_kind import repeats_as_side


@dataclass(frozen=True)
class StoredValidation:
    """The directory of a validation. Its verdict is computed when it is first used."""

    directory: Path

    @cached_property
    def verdict(self) -> Validation:
        """The verdict, recomputed from the records."""
        return stored_validation.judge_again(self.directory)


def load(directory: Path) -> StoredValidation:
    """Return the validation in a directory."""
    return StoredValidation(directory)


def headline(stored: StoredValidation) -> str:
    """Return the verdict in one sentence."""
    return f"{stored.verdict.verdict}: {stored.verdict.sentence}."


def report(stored: StoredValidation) -> Report:
    """Return the report, made from the records and not from the stored page."""
    return outputs.build_report(stored.directory, stored.verdict)


def document(stored: StoredValidation) -> bytes:
    """Return the verdict as JSON."""
    return format.document(stored.verdict)


def code(stored: StoredValidation, strict: bool) -> int:  # noqa: ARG001 - as for other kinds
    """Return the exit code. It does not depend on `strict`, which other kinds of result use."""
    return get_exit_code(stored.verdict)


def list_run_directories(directory: Path) -> list[Path]:
    """Return the directories of all runs of a validation, level by level.

    A level is one load of the contract. Its runs are in a directory of its name. The levels are in
    order of their names.
    """
    level_dirs = sorted(directory.glob("*/"))
    return [run_dir for level_dir in level_dirs for run_dir in run_folder.runs_in(level_dir)]


def list_row(directory: Path) -> ListRow:
    """Return the row of a validation in a list of results: its stored verdict, and its runs."""
    file = directory / VERDICT_FILE
    stored = decode_json(file.read_bytes(), dict[str, Any], str(file), "a verdict")
    summaries = stored_summaries(directory, list_run_directories(directory))
    return ListRow(outcome=str(stored.get("verdict", "")), runs=summaries)


def read_compared_side(directory: Path) -> Side:
    """Return a validation as one of the two results that `loadgen compare` compares.

    A side of a comparison consists of runs that repeat the same load. So a validation can be
    compared if it has one level, which is one load with its runs.

    Raises:
        UserError: The validation has several levels, which are different loads, or none.
    """
    run_dirs = list_run_directories(directory)
    level_dirs = list(dict.fromkeys(run_dir.parent for run_dir in run_dirs))
    if len(level_dirs) != 1:
        names = ", ".join(level_dir.name for level_dir in level_dirs) or "none"
        text = f"only a validation with one level can be compared (levels: {names})"
        example = level_dirs[0] if level_dirs else directory
        raise UserError("mismatch", text, str(directory), f"give the folder of a level: {example}")

    return repeats_as_side(directory, run_dirs)


def regenerate(directory: Path) -> Iterator[RegeneratedFile]:
    """Yield the files about the verdict, made again from the records."""
    stored = msgspec.json.decode((directory / VERDICT_FILE).read_bytes())
    regenerated = outputs.regenerate_outputs(directory, str(stored["version"]))
    for name, data in regenerated.items():
        yield RegeneratedFile(name, data, RECORDS)


FUNCTIONS = ResultFunctions(
    load=load,
    headline=headline,
    report=report,
    document=document,
    code=code,
    runs=list_run_directories,
    list_row=list_row,
    compare_side=read_compared_side,
    regenerate=regenerate,
    schema=ValidationFacts,
)
