"""Reads the results to compare, and reports which cannot be compared."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from loadgen import result_kinds
from loadgen.core import format
from loadgen.core.errors import CombinedError, LoadgenError, UserError, collecting, missing_result
from loadgen.runs.comparison_side import Side


def read_sides(paths: Sequence[Path]) -> list[Side]:
    """Return one side per path, named by the shortest end of the path that is unique.

    Raises:
        CombinedError: Everything that is wrong with the results.
    """
    errors: list[LoadgenError] = []
    sides = []
    for path, name in zip(paths, format.short_names(paths), strict=True):
        with collecting(errors):
            sides.append(msgspec.structs.replace(_read_side(path), name=name))

    if errors:
        raise CombinedError(errors)

    return sides


def _read_side(path: Path) -> Side:
    """Return the result at a path as a side. Raises UserError if it cannot be compared."""
    comparable_kind = result_kinds.kind_of(path, "compare_side")
    if comparable_kind is not None:
        return result_kinds.compare_side(comparable_kind, path)

    hint = "give a folder written by loadgen run, or a result file of another tool"
    kind = result_kinds.kind_of(path)
    if kind is not None:
        runs = result_kinds.runs_of(kind, path)
        if runs:
            hint = f"give one of its runs, like {runs[-1]}"
        text = f"a result of the kind {kind.name} cannot be compared"
        raise UserError("unsupported", text, str(path), hint)

    if path.is_dir():
        raise UserError("no_result", "the folder has no run (run.json)", str(path), hint)

    raise missing_result(path, hint, "no such file or folder")
