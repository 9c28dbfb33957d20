"""How a file of a results folder is made: for its user alone, and as a whole or not at all. IO."""

from __future__ import annotations

import os
from pathlib import Path

PRIVATE = 0o600  # texts that a server said are in the files of a run


def replace(path: Path, data: bytes, *, shared: bool = False) -> None:
    """Replace a file atomically: a reader sees the old content or the new content, never a part of either.

    `shared`: a page made to be handed on; others may read it as the user's umask says.
    """
    scratch = path.with_name(path.name + ".new")
    with open(scratch, "wb", opener=None if shared else private) as file:
        file.write(data)
    scratch.replace(path)


def private(path: str, flags: int) -> int:
    """For `open(opener=private)`: a new file can be read by this user alone."""
    return os.open(path, flags, PRIVATE)
