"""Stores results by name: `loadgen compare --save NAME RESULT` and `--against NAME RESULT`."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from loadgen import result_kinds
from loadgen.compare.side_reader import read_sides
from loadgen.core.errors import UserError
from loadgen.core.results import files

UNREAD_FILE_PATTERNS = ("*.html", "spool")
"""Parts of a result that a comparison does not read: reports, and the folder of the record log."""


def save_baseline(name: str, result: Path, baselines: Path, *, force: bool) -> Path:
    """Save a result as a baseline: copy what a comparison reads of it, and return the copy's path.

    Args:
        name: The name of the baseline.
        result: The folder of a run or of repeats.
        baselines: The folder that contains the folders of all baselines.
        force: True to replace a baseline of the same name.

    Raises:
        UserError: The name is not valid or already taken, the folder is no result that can be
            compared, or it has links to files outside of it.
        CombinedError: The result is damaged.
    """
    baseline_dir = _baseline_path(baselines, name, "--save")

    # Not every kind of result can be compared. Those that can have a function "compare_side".
    is_comparable = result.is_dir() and result_kinds.kind_of(result, "compare_side") is not None
    if not is_comparable:
        raise UserError(
            "no_result",
            "the folder has no run and no repeated runs",
            str(result),
            "give a folder written by loadgen run",
        )

    files.refuse_links(result)

    # This raises for a damaged result, which could not be compared with later. Its return value is
    # not needed.
    read_sides([result])
    if baseline_dir.exists():
        if not force:
            raise UserError(
                "file_exists",
                "a baseline with this name exists already",
                str(baseline_dir),
                "choose another name, or replace it with --force",
            )
        shutil.rmtree(baseline_dir)

    shutil.copytree(result, baseline_dir, ignore=shutil.ignore_patterns(*UNREAD_FILE_PATTERNS))
    return baseline_dir


def find_baseline(name: str, baselines: Path) -> Path:
    """Return the folder of a baseline.

    Raises:
        UserError: There is no baseline of this name.
    """
    baseline_dir = _baseline_path(baselines, name, "--against")
    if not baseline_dir.is_dir():
        saved_names = ", ".join(sorted(path.name for path in baselines.glob("*/"))) or "none"
        raise UserError(
            "unknown_name",
            f'unknown baseline "{name}"',
            str(baselines),
            f"saved baselines: {saved_names}. Save one with loadgen compare --save NAME RESULT",
        )

    return baseline_dir


def _baseline_path(baselines: Path, name: str, option: str) -> Path:
    """Return the path of a baseline's folder, whether or not it exists.

    Raises UserError for a name with other characters than letters, digits, ".", "_" and "-",
    because a name such as "../x" would be a path outside the folder of the baselines. `option` is
    the command line option that the name belongs to.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
        text = f'"{name}" is not a valid name'
        raise UserError("invalid_value", text, option, "use letters, digits, . _ and -")
    return baselines / name
