"""Stores results by name: `loadgen compare --save NAME RESULT` and `--against NAME RESULT`."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from loadgen import result_kinds
from loadgen.compare.side_reader import read_sides
from loadgen.core.errors import UserError
from loadgen.core.results import files


def save_baseline(name: str, result: Path, baselines: Path, *, force: bool) -> Path:
    """Copy everything of a result that a comparison reads, and return the new folder.

    Args:
        name: The name of the baseline.
        result: The folder of a run or of repeats.
        baselines: The folder of all baselines.
        force: True to replace a baseline of the same name.

    Raises:
        UserError: The folder is no result, or the name is taken.
    """
    folder = _baseline_folder(baselines, name, "--save")
    if not result.is_dir() or result_kinds.kind_of(result, "compare_side") is None:
        raise UserError(
            "no_result",
            "the folder has no run and no repeated runs",
            str(result),
            "give a folder written by loadgen run",
        )
    files.refuse_links(result)
    read_sides([result])  # A result that cannot be read now could not be compared with later.
    if folder.exists():
        if not force:
            raise UserError(
                "file_exists",
                "a baseline with this name exists already",
                str(folder),
                "choose another name, or replace it with --force",
            )
        shutil.rmtree(folder)
    shutil.copytree(result, folder, ignore=shutil.ignore_patterns("*.html", "spool"))
    return folder


def find_baseline(name: str, baselines: Path) -> Path:
    """Return the folder of a baseline.

    Raises:
        UserError: There is no baseline of this name.
    """
    folder = _baseline_folder(baselines, name, "--against")
    if not folder.is_dir():
        known = ", ".join(sorted(path.name for path in baselines.glob("*/"))) or "none"
        raise UserError(
            "unknown_name",
            f'unknown baseline "{name}"',
            str(baselines),
            f"saved baselines: {known}. Save one with loadgen compare --save NAME RESULT",
        )
    return folder


def _baseline_folder(baselines: Path, name: str, flag: str) -> Path:
    """Return the folder of a baseline. Raises UserError if the name could be another path."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
        text = f'"{name}" is not a valid name'
        raise UserError("invalid_value", text, flag, "use letters, digits, . _ and -")
    return baselines / name
