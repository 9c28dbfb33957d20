"""`SHA256SUMS`: the hash of every file of a results folder, as `sha256sum -c SHA256SUMS` reads it. IO.

Written last and at once, so that a folder with this file is complete. It covers the folders inside,
too. A file that comes later (a page of `loadgen report`) is not in it, unless `renew` says that
loadgen itself has written it again.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path, PurePosixPath

from loadgen.core.results.files import refuse_links, replace

_LINE = r"[0-9a-f]{64} [ *].+"
FILE = "SHA256SUMS"


def write(folder: Path) -> None:
    """Write the file anew, over everything that is in the folder now."""
    replace(folder / FILE, _text({name: _sha256(folder / name) for name in _names(folder)}))


def begin(folder: Path) -> None:
    """Remove the file from a folder that is going to be continued: until its end, nothing vouches for it."""
    (folder / FILE).unlink(missing_ok=True)


def renew(folder: Path, file: Path) -> None:
    """Write the hash of one file of the folder anew, where it is listed; the others stay as they are."""
    listed = read(folder)
    name = file.relative_to(folder).as_posix() if file.is_relative_to(folder) else ""
    if listed is not None and name in listed:
        replace(folder / FILE, _text(listed | {name: _sha256(file)}))


def read(folder: Path) -> dict[str, str] | None:
    """Return the listed digest of each file, or None if the folder has no list that can be read.

    A list with a line that is no digest and name lists only itself, with an empty digest, so that
    it counts as changed.
    """
    if not (folder / FILE).is_file():
        return None
    try:
        lines = (folder / FILE).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    if not all(re.fullmatch(_LINE, line) and _is_inside(line[66:]) for line in lines):
        return {FILE: ""}
    return {line[66:]: line[:64] for line in lines}


def _is_inside(name: str) -> bool:
    """Whether a name that a list gives is one of its own folder."""
    return not name.startswith("/") and ".." not in PurePosixPath(name).parts


def changed(folder: Path) -> dict[str, str]:
    """Return `changed` or `gone` for each listed file that is not as listed. Without a list nothing is returned.

    A run that was killed has no list. Raises UserError as `refuse_links`.
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
    """The files of the folder that are not in its list."""
    listed = read(folder) or {}
    return [name for name in _names(folder) if name not in listed]


def _names(folder: Path) -> list[str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / FILE)
    return [path.relative_to(folder).as_posix() for path in files]


def _text(digests: dict[str, str]) -> bytes:
    return "".join(f"{digest}  {name}\n" for name, digest in digests.items()).encode()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
