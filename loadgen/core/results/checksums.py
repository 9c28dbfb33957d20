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
"""Where the name begins in a line: after the digest, a space, and a space or an asterisk."""

_CHECKSUM_LINE = re.compile(rf"(?P<digest>[0-9a-f]{{{_DIGEST_CHARS}}}) [ *](?P<name>.+)")
"""A line of `sha256sum`: the digest, a space, a space or (for binary files) an asterisk, the name.

Example: `e3b0...b855  run.json`.
"""


def write(folder: Path) -> None:
    """Write the hashes of all files that are in the folder now."""
    digests = {name: _sha256(folder / name) for name in _file_names(folder)}
    replace(folder / FILE, _format_lines(digests))


def begin(folder: Path) -> None:
    """Remove the list of a folder whose results are going to be continued and so will change."""
    (folder / FILE).unlink(missing_ok=True)


def renew(folder: Path, file: Path) -> None:
    """Update the hash of one file, if the checksum file of the folder lists it."""
    digests = read_checksums(folder)
    if digests is None or not file.is_relative_to(folder):
        return
    name = file.relative_to(folder).as_posix()
    if name in digests:
        digests[name] = _sha256(file)
        replace(folder / FILE, _format_lines(digests))


def read_checksums(folder: Path) -> dict[str, str] | None:
    """Return the SHA-256 digest of each file that the folder's checksum file lists.

    Return None if the folder has no checksum file or it cannot be opened. If a line of it is not a
    digest and a path in the folder, the checksum file itself is damaged. The result is then its own
    name with an empty digest, so that `find_changes` reports it as changed.
    """
    path = folder / FILE
    if not path.is_file():
        return None

    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None

    digests = {}
    for line in lines:
        match = _CHECKSUM_LINE.fullmatch(line)
        if match is None or not _is_inside(match["name"]):
            return {FILE: ""}
        digests[match["name"]] = match["digest"]

    return digests


def _is_inside(name: str) -> bool:
    """Return whether a listed name is a path below the folder of its list."""
    return not name.startswith("/") and ".." not in PurePosixPath(name).parts


def find_changes(folder: Path) -> dict[str, str]:
    """Compare the files of a folder with its checksum file, and return those that differ.

    The result says of each such file whether it is "changed" or "gone". It is empty if all files
    are intact, and if the folder has no checksum file, as after a run that was killed.

    Raises:
        UserError: The folder has links that lead out of it (see `refuse_links`).
    """
    digests = read_checksums(folder)
    if not digests:
        return {}

    refuse_links(folder)
    changes: dict[str, str] = {}
    for name, digest in digests.items():
        try:
            if _sha256(folder / name) != digest:
                changes[name] = "changed"
        except OSError:
            changes[name] = "gone"

    return changes


def unlisted(folder: Path) -> list[str]:
    """Return the files of the folder that its checksum file does not list, such as later pages."""
    digests = read_checksums(folder) or {}
    return [name for name in _file_names(folder) if name not in digests]


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
