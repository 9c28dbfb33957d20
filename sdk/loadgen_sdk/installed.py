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
    return _cached_entry_points(group, installation_fingerprint())


def installation_fingerprint() -> tuple[str, ...]:
    """Return a fingerprint that changes when a package is installed or removed.

    Caches of entry points are valid as long as it does not change. It consists of the version of
    Python and the directories of the import path with their modification times.
    """
    fingerprint = [sys.version]
    for path in sys.path:
        try:
            modified_ns = os.stat(path or ".").st_mtime_ns
        except OSError:
            continue
        fingerprint.append(f"{path} {modified_ns}")

    return tuple(fingerprint)


@lru_cache(maxsize=_MAX_CACHED_GROUPS)
def _cached_entry_points(group: str, _fingerprint: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    """Return the entry points of a group. The fingerprint is only a key of the cache."""
    from importlib import metadata

    return tuple(metadata.entry_points(group=group))
