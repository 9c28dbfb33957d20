"""Reads the results to compare, each as its kind says, and reports what cannot be compared. IO."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from loadgen import result_kinds
from loadgen.core import format
from loadgen.core.errors import CombinedError, LoadgenError, UserError, nothing_there
from loadgen.runs.compared import Side


def read_sides(paths: Sequence[Path]) -> list[Side]:
    """One side per path, named by the shortest end of the path that is unique.

    A kind of result says what of it is compared (`result_kinds`). Raises Faults with every fault found.
    """
    faults: list[LoadgenError] = []
    sides = []
    for path, name in zip(paths, format.short_names(paths), strict=True):
        try:
            sides.append(msgspec.structs.replace(_side(path), name=name))
        except LoadgenError as fault:
            faults.append(fault)
    if faults:
        raise CombinedError(faults)
    return sides


def _side(path: Path) -> Side:
    kind = result_kinds.kind_of(path, "compare_side")
    if kind is not None:
        return result_kinds.compare_side(kind, path)
    other = result_kinds.kind_of(path)
    hint = "give the folder that `loadgen run` named, or the result file of another tool"
    if other is not None and (runs := result_kinds.runs_of(other, path)):
        hint = f"name its runs, like {runs[-1]}"
    if other is not None:
        raise UserError(
            "unsupported", f"no figures of a load to compare: {other.name}", str(path), hint
        )
    if path.is_dir():
        raise UserError(
            "no_result", "no run, and no folder of runs: no run.json here", str(path), hint
        )
    raise nothing_there(path, hint, "no such file or folder")
