"""Find the versions and entry points of installed packages."""

from __future__ import annotations

import os
import sys
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

NOT_INSTALLED = "none"
"""The version of a package that is not installed."""

_MAX_CACHED_GROUPS = 32


def version_of(package: str) -> str:
    """Return the version of a package, or NOT_INSTALLED."""
    # Imported here, because it is slow to import and most programs need no version.
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return NOT_INSTALLED


def entry_points(group: str) -> tuple[EntryPoint, ...]:
    """Return the entry points of a group."""
    return _cached_entry_points(group, installation_state())


def installation_state() -> tuple[str, ...]:
    """Return texts that change when a package is installed or removed.

    They are the version of Python and the directories of the import path with their modification
    times.
    """
    state = [sys.version]
    for path in sys.path:
        try:
            modified_ns = os.stat(path or ".").st_mtime_ns
        except OSError:
            continue
        state.append(f"{path} {modified_ns}")
    return tuple(state)


@lru_cache(maxsize=_MAX_CACHED_GROUPS)
def _cached_entry_points(group: str, _state: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    """Return the entry points of a group in this state of the installation."""
    from importlib import metadata

    return tuple(metadata.entry_points(group=group))
