"""Results that are kept by name: `loadgen compare --save NAME RESULT`, `loadgen compare --against NAME RESULT`."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from loadgen.compare.inputs import read_sides
from loadgen.core.errors import UserError


def save(name: str, result: Path, kept: Path, *, force: bool) -> Path:
    """Keep everything of a result that a comparison reads, without its pages; the folder. `force`: over an older one.

    Raises UserError for what is no result, and for a name that is taken.
    """
    from loadgen import result_kinds
    from loadgen.core.results import files

    folder = _folder(kept, name, "--save")
    if not result.is_dir() or result_kinds.kind_of(result, "compare_side") is None:
        raise UserError(
            "no_result",
            "neither a run nor a folder of repeats",
            str(result),
            "give what loadgen run -o wrote",
        )
    files.refuse_links(result)
    read_sides([result])  # what is more than one side could not be compared with later
    if folder.exists():
        if not force:
            raise UserError(
                "file_exists",
                "there is a baseline of this name",
                str(folder),
                "another name, or --force",
            )
        shutil.rmtree(folder)
    shutil.copytree(result, folder, ignore=shutil.ignore_patterns("*.html", "spool"))
    return folder


def find(name: str, kept: Path) -> Path:
    """The folder of a result that was kept by this name. Raises UserError."""
    folder = _folder(kept, name, "--against")
    if not folder.is_dir():
        known = ", ".join(sorted(path.name for path in kept.glob("*/"))) or "none"
        hint = f"known: {known}; loadgen compare --save NAME RESULT keeps one"
        raise UserError("unknown_name", f'no baseline is called "{name}"', str(kept), hint)
    return folder


def _folder(kept: Path, name: str, flag: str) -> Path:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
        raise UserError(
            "invalid_value", f'"{name}" is no name of a baseline', flag, "letters, digits, . _ -"
        )
    return kept / name
