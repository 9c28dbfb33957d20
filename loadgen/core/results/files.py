"""Write files of a results folder atomically, and refuse folders that are not safe to read.

Files are readable by their user alone. A folder may come from a stranger.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from loadgen.core.errors import UserError

PRIVATE = 0o600
"""The mode of new files, because the files of a run contain texts of the server."""


def replace(path: Path, data: bytes, *, shared: bool = False) -> None:
    """Replace a file atomically, so that a reader sees either the old or the new content.

    The data is written to a new file next to it, which then takes its name. A symbolic link of
    that name is replaced, not followed.

    Args:
        path: The file.
        data: Its new content.
        shared: Whether other users may read it, as far as the umask allows. Otherwise only the
            owner may.
    """
    scratch_path = path.with_name(path.name + ".new")
    scratch_path.unlink(missing_ok=True)  # It may be from a killed process, or a link.

    try:
        with open(scratch_path, "xb", opener=None if shared else open_private) as file:
            file.write(data)
    except OSError as error:
        # The error of a full disk does not name the file.
        error.filename = error.filename or str(path)
        scratch_path.unlink(missing_ok=True)
        raise

    scratch_path.replace(path)


def open_private(path: str, flags: int) -> int:
    """Open a file for this user alone without following links.

    It is the `opener` of `open`: it gets the flags of the open mode and returns a descriptor.
    """
    return os.open(path, flags | os.O_NOFOLLOW, PRIVATE)


def refuse_links(folder: Path, *, deep: bool = True) -> None:
    """Raise UserError if a folder has a link to its outside, a pipe or a device.

    A folder may come from a stranger, so nothing outside of it may be read or written. The path to
    the folder is the user's own and may contain links. With `deep`, folders inside it are checked
    too.
    """
    root = os.path.realpath(folder)
    for entry in _entries(root, deep):
        name = os.path.relpath(entry.path, root)
        if entry.is_symlink():
            target = os.path.realpath(entry.path)
            if os.path.commonpath((root, target)) != root:
                message = f"the folder has a link that points outside it: {name} -> {target}"
                raise UserError("unsafe_file", message, str(folder), _LINK_HINT)
        elif not entry.is_dir() and not entry.is_file():
            message = f"the folder has a pipe or device instead of a file: {name}"
            raise UserError("unsafe_file", message, str(folder), "remove it")


_LINK_HINT = "if you trust the folder, copy it with files instead of links: cp -rL FOLDER COPY"


def _entries(folder: str, deep: bool) -> Iterator[os.DirEntry[str]]:
    """Yield what a folder contains. Links are not followed. An unreadable folder yields nothing."""
    try:
        with os.scandir(folder) as iterator:
            entries = list(iterator)
    except OSError:
        return
    for entry in entries:
        yield entry
        if deep and entry.is_dir(follow_symlinks=False):
            yield from _entries(entry.path, deep)
