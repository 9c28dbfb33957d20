"""How a file of a results folder is made, and which folders may be read: they may be a stranger's. IO.

A file is made for its user alone, and as a whole or not at all.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from loadgen.core.errors import UserError

PRIVATE = 0o600  # texts that a server said are in the files of a run


def replace(path: Path, data: bytes, *, shared: bool = False) -> None:
    """Replace a file atomically: a reader sees the old content or the new content, never a part of either.

    A link of that name is replaced, not followed. `shared`: a page made to be handed on; others may read it as the
    user's umask says.
    """
    scratch = path.with_name(path.name + ".new")
    scratch.unlink(
        missing_ok=True
    )  # left by a killed process, or a link that somebody has laid there
    try:
        with open(scratch, "xb", opener=None if shared else private) as file:
            file.write(data)
    except OSError as error:
        error.filename = error.filename or str(
            path
        )  # a full disk does not say which file was too much
        scratch.unlink(missing_ok=True)
        raise
    scratch.replace(path)


def private(path: str, flags: int) -> int:
    """For `open(opener=private)`: a new file can be read by this user alone, and a link is not followed."""
    return os.open(path, flags | os.O_NOFOLLOW, PRIVATE)


def refuse_links(folder: Path, *, deep: bool = True) -> None:
    """Raises UserError where a folder holds a link that leads out of it, or what is neither a file nor a folder.

    A folder may come from a stranger: what it holds is read and written in it, and nowhere else. The path to the folder
    is the user's own and may hold links. `deep`: in the folders inside too.
    """
    root = os.path.realpath(folder)
    for entry in _entries(root, deep):
        name = os.path.relpath(entry.path, root)
        if entry.is_symlink():
            end = os.path.realpath(entry.path)
            if os.path.commonpath((root, end)) != root:
                what = f"a link that leads out of the folder: {name} -> {end}; nothing was read"
                raise UserError("unsafe_file", what, str(folder), _COPY)
        elif not entry.is_dir() and not entry.is_file():
            raise UserError(
                "unsafe_file", f"a pipe or device, no file: {name}", str(folder), "remove it"
            )


_COPY = "where you trust it: cp -rL FOLDER COPY puts the files themselves in the place of links"


def _entries(folder: str, deep: bool) -> Iterator[os.DirEntry[str]]:
    """Everything below a folder. Links are told and not followed; a folder that cannot be listed is its reader's."""
    try:
        with os.scandir(folder) as listed:
            found = list(listed)
    except OSError:
        return
    for entry in found:
        yield entry
        if deep and entry.is_dir(follow_symlinks=False):
            yield from _entries(entry.path, deep)
