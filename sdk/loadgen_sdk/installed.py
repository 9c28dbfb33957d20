"""Which packages are installed: their versions and entry points, read from the folders that Python looks through.

A leaf. `importlib.metadata` says the same and brings the email package with it. It is asked where a group is there,
where a package is not found, and where not all can be seen from here: in an archive, or by a finder of somebody else.
"""

from __future__ import annotations

import os
import re
import sys
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

NOT_INSTALLED = "none"
_KINDS = (".dist-info", ".egg-info")
_FILES = ("METADATA", "PKG-INFO", "")  # an .egg-info may be the file itself


def version_of(package: str) -> str:
    """The version of a package on this host; "none" where it is not installed."""
    wanted = _plain(package)
    for folder in _folders() or ():
        if _plain(os.path.basename(folder).rpartition(".")[0].partition("-")[0]) == wanted:
            told = (_version_in(os.path.join(folder, file)) for file in _FILES)
            return next(filter(None, told), None) or _asked(package)
    return _asked(package)


def entry_points(group: str) -> tuple[EntryPoint, ...]:
    """Those of a group."""
    named = _groups(state())
    if named is not None and group not in named:
        return ()
    from importlib import metadata

    return tuple(metadata.entry_points(group=group))


def state() -> tuple[str, ...]:
    """What changes when a package comes or goes: the folders that are looked through, with their times."""
    found = [sys.version]
    for folder in sys.path:
        try:
            found.append(f"{folder} {os.stat(folder or '.').st_mtime_ns}")
        except OSError:
            continue
    return tuple(found)


def _asked(package: str) -> str:
    """What importlib.metadata says, where nothing was found here."""
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return NOT_INSTALLED


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "_", name).lower()


@lru_cache(maxsize=1)
def _groups(_: tuple[str, ...]) -> frozenset[str] | None:
    """The groups of all entry points. None: not all packages can be seen from here."""
    folders = _folders()
    if folders is None:
        return None
    found: set[str] = set()
    for folder in folders:
        try:
            with open(os.path.join(folder, "entry_points.txt"), encoding="utf-8") as file:
                found.update(
                    line.strip()[1:-1].strip() for line in file if line.lstrip().startswith("[")
                )
        except (OSError, UnicodeDecodeError):
            continue
    return frozenset(found)


def _folders() -> tuple[str, ...] | None:
    """Where packages say what they are, in the order of the path. None: not all of them can be seen from here."""
    finders = [finder for finder in sys.meta_path if hasattr(finder, "find_distributions")]
    if [getattr(finder, "__name__", "") for finder in finders] != ["PathFinder"]:
        return None
    return _listed(state())


@lru_cache(maxsize=1)
def _listed(_: tuple[str, ...]) -> tuple[str, ...] | None:
    found: list[str] = []
    for folder in sys.path:
        try:
            names = os.listdir(folder or ".")
        except FileNotFoundError:
            continue
        except OSError:
            return None  # an archive
        if folder.endswith(".egg"):
            return None
        found += (os.path.join(folder, name) for name in names if name.lower().endswith(_KINDS))
    return tuple(found)


def _version_in(file: str) -> str | None:
    try:
        with open(file, encoding="utf-8") as lines:
            return next(
                (line[8:].strip() for line in lines if line.lower().startswith("version:")), None
            )
    except (OSError, UnicodeDecodeError):
        return None
