"""The validation of a contract: its verdict, judged again of the records."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from loadgen.contracts import run as contracts
from loadgen.contracts import stored_validation
from loadgen.contracts.stored_validation import ValidationFacts
from loadgen.contracts.verdict import Validation, exit_code
from loadgen.core import format, run_folder
from loadgen.core.errors import UserError
from loadgen.core.results.manifest import decoded
from loadgen.render.section import Report
from loadgen.result_kinds import RECORDS, ListRow, RegeneratedFile, ResultFunctions
from loadgen.runs.compared import Side
from loadgen.runs.kind import stored_summaries
from loadgen.runs.levels_kind import of_repeats


@dataclass(frozen=True)
class StoredValidation:
    """A folder, whose verdict is made when it is asked for: that takes as long as reading all of its records."""

    folder: Path

    @cached_property
    def verdict(self) -> Validation:
        return stored_validation.again(self.folder)


def load(folder: Path) -> StoredValidation:
    return StoredValidation(folder)


def headline(found: StoredValidation) -> str:
    return f"{found.verdict.verdict}: {found.verdict.sentence}."


def report(found: StoredValidation) -> Report:
    """Made of the records: the page that lies there is whatever its sender has written."""
    return contracts.report(found.folder, found.verdict)


def document(found: StoredValidation) -> bytes:
    return format.document(found.verdict)


def code(found: StoredValidation, strict: bool) -> int:
    return exit_code(found.verdict)


def runs(folder: Path) -> list[Path]:
    """The runs of each level, by the names of the levels."""
    return [run for level in sorted(folder.glob("*/")) for run in run_folder.runs_in(level)]


def list_row(folder: Path) -> ListRow:
    file = folder / contracts.VERDICT
    told = decoded(file.read_bytes(), dict[str, Any], str(file), "a verdict")
    return ListRow(word=str(told.get("verdict", "")), runs=stored_summaries(folder, runs(folder)))


def compare_side(folder: Path) -> Side:
    """The runs of its level. Raises UserError where it has several: they are other loads."""
    found = runs(folder)
    levels = dict.fromkeys(run.parent for run in found)
    if len(levels) != 1:
        names = ", ".join(level.name for level in levels) or "none was run"
        what = f"a validation is one side where it has one level: {names}"
        raise UserError(
            "mismatch", what, str(folder), f"name one of them: {next(iter(levels), folder)}"
        )
    return of_repeats(folder, found)


def regenerate(folder: Path) -> Iterator[RegeneratedFile]:
    before = msgspec.json.decode((folder / contracts.VERDICT).read_bytes())
    for name, data in contracts.outputs_again(folder, str(before["version"])).items():
        yield RegeneratedFile(name, data, RECORDS)


FUNCTIONS = ResultFunctions(
    load=load,
    headline=headline,
    report=report,
    document=document,
    code=code,
    runs=runs,
    list_row=list_row,
    compare_side=compare_side,
    regenerate=regenerate,
    schema=ValidationFacts,
)
