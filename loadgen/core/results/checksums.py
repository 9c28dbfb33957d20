"""The file `SHA256SUMS`, with the hash of every file of a results folder and its subfolders.

IO. `sha256sum -c SHA256SUMS` reads it. It is written last and atomically, so a folder with this
file is complete. A file that is added later, such as a page of `loadgen report`, is not listed. If
loadgen writes a listed file again, `renew` updates its hash.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path, PurePosixPath

from loadgen.core.results.files import refuse_links, replace

FILE = "SHA256SUMS"

_DIGEST_CHARS = 64
_NAME_START = _DIGEST_CHARS + 2
"""Where the name begins in a line: after the digest, a space, and a space or an asterisk."""

_LINE = rf"[0-9a-f]{{{_DIGEST_CHARS}}} [ *].+"


def write(folder: Path) -> None:
    """Write the hashes of all files that are in the folder now."""
    digests = {name: _sha256(folder / name) for name in _file_names(folder)}
    replace(folder / FILE, _format_lines(digests))


def begin(folder: Path) -> None:
    """Remove the list of a folder whose results are going to be continued and so will change."""
    (folder / FILE).unlink(missing_ok=True)


def renew(folder: Path, file: Path) -> None:
    """Update the hash of one file, if the list of the folder has it."""
    listed = read(folder)
    if listed is None or not file.is_relative_to(folder):
        return
    name = file.relative_to(folder).as_posix()
    if name in listed:
        replace(folder / FILE, _format_lines(listed | {name: _sha256(file)}))


def read(folder: Path) -> dict[str, str] | None:
    """Return the listed digest of each file, or None if the folder has no list that can be read.

    A damaged list, in which a line is not a digest and a path in the folder, counts as a list of
    only itself with an empty digest. `find_changes` then reports it as changed.
    """
    if not (folder / FILE).is_file():
        return None
    try:
        lines = (folder / FILE).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    digests = {}
    for line in lines:
        name = line[_NAME_START:]
        if not re.fullmatch(_LINE, line) or not _is_inside(name):
            return {FILE: ""}
        digests[name] = line[:_DIGEST_CHARS]
    return digests


def _is_inside(name: str) -> bool:
    """Return whether a listed name is a path below the folder of its list."""
    return not name.startswith("/") and ".." not in PurePosixPath(name).parts


def find_changes(folder: Path) -> dict[str, str]:
    """Return what happened to each listed file that is not as listed: "changed" or "gone".

    The result is empty if nothing has changed, and also without a list, since a run that was killed
    has none.

    Raises:
        UserError: The folder has links that lead out of it (see `refuse_links`).
    """
    differences: dict[str, str] = {}
    listed = read(folder) or {}
    if listed:
        refuse_links(folder)
    for name, digest in listed.items():
        try:
            if _sha256(folder / name) != digest:
                differences[name] = "changed"
        except OSError:
            differences[name] = "gone"
    return differences


def unlisted(folder: Path) -> list[str]:
    """Return the files of the folder that are not in its list."""
    listed = read(folder) or {}
    return [name for name in _file_names(folder) if name not in listed]


def _file_names(folder: Path) -> list[str]:
    """Return all files of the folder but the list, by their paths in the folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / FILE)
    return [path.relative_to(folder).as_posix() for path in files]


def _format_lines(digests: dict[str, str]) -> bytes:
    """Return the lines of `sha256sum` for the digests of files."""
    return "".join(f"{digest}  {name}\n" for name, digest in digests.items()).encode()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
