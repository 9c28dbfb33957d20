"""Read and write the file of a bundle: a ZIP archive with a result directory and file hashes.

    bundle.json       what the bundle is (`Manifest`)
    SHA256SUMS        the hash of every other file, as `sha256sum -c SHA256SUMS` reads it
    SHA256SUMS.sig    the signature of SHA256SUMS, if the bundle is signed (`signature.py`)
    result/           the result as its command wrote it, without `Manifest.omitted_files`

Nothing in a bundle is trusted. Names, sizes and the number of files are checked before anything is
unpacked.
"""

from __future__ import annotations

import os
import shlex
import shutil
import stat
import zipfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

import msgspec

from loadgen.core import format
from loadgen.core.errors import UserError, missing_result
from loadgen.core.results.json_files import decode_json

SCHEMA = 1
MANIFEST = "bundle.json"
SUMS = "SHA256SUMS"
SIGNATURE = "SHA256SUMS.sig"
RESULT = "result"

MAX_FILES = 200_000
MAX_EXPANSION = 200
"""Times its own size that a bundle may unpack to, if that is more than ALWAYS_ALLOWED_BYTES."""
ALWAYS_ALLOWED_BYTES = 1 << 30
RESERVED_BYTES = 1 << 28
"""Bytes that stay free on the disk."""
COPY_BYTES = 1 << 20

_ENCRYPTED_FLAG = 1
_SOURCE_HINT = "use a file written by `loadgen bundle` or by `--bundle`"


class Manifest(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    rename={"created": "made", "omitted_files": "left_out"},
):
    """The content of `bundle.json`.

    Attributes:
        schema: Version of the format.
        kind: Kind of the result, such as "run" or "search".
        name: Name of the directory of the result.
        created: When the bundle was made, in ISO 8601.
        version: Version of loadgen that made the bundle.
        content: True if texts of prompts and responses were requested.
        omitted_files: Files of the directory that are not in the bundle, and why.
    """

    schema: int = SCHEMA
    kind: str
    name: str
    created: str
    version: str
    content: bool = False
    omitted_files: dict[str, str] = {}


def write_archive(path: Path, files: dict[str, Path | bytes]) -> None:
    """Write an archive of files, by their names in it. The same files give the same bytes.

    Raises:
        UserError: The archive cannot be written.
    """
    temporary = path.with_name(path.name + ".part")
    try:
        with zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as archive:
            for name, content in files.items():
                _add_file(archive, name, content)
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise UserError(
            "unwritable_file", f"cannot be written: {error.strerror}", str(path)
        ) from None


def _add_file(archive: zipfile.ZipFile, name: str, content: Path | bytes) -> None:
    """Add a file, or bytes as a file, without its time and permissions.

    The same files give the same bytes in this way.
    """
    entry = zipfile.ZipInfo(name)
    entry.compress_type = zipfile.ZIP_DEFLATED

    # The upper 16 bits hold the mode of a Unix file.
    entry.external_attr = 0o644 << 16
    if isinstance(content, bytes):
        archive.writestr(entry, content)
        return

    with content.open("rb") as source, archive.open(entry, "w", force_zip64=True) as target:
        shutil.copyfileobj(source, target, COPY_BYTES)


def unpack_archive(path: Path, folder: Path) -> Manifest:
    """Unpack a bundle into an empty folder and return its manifest.

    Nothing is unpacked before all entries have been found to be safe and the manifest is decoded.

    Raises:
        UserError: The file is no bundle, is damaged, or is not safe to unpack.
    """
    try:
        return _unpack_checked_entries(path, folder)
    except UserError:
        raise
    except FileNotFoundError:
        raise missing_result(path, _SOURCE_HINT, "no such file") from None
    except IsADirectoryError:
        raise _directory_error(path) from None
    except OSError as error:
        problem = f"cannot be read: {error.strerror or error}"
        raise UserError("unreadable_file", problem, str(path), _SOURCE_HINT) from None
    except Exception as error:
        # zipfile and zlib raise many kinds of errors for a damaged archive.
        problem = f"not a bundle, or damaged: {error}"
        raise UserError("wrong_format", problem, str(path), _SOURCE_HINT) from None


def _unpack_checked_entries(path: Path, folder: Path) -> Manifest:
    """Unpack a bundle and return its manifest, without translating errors to UserError."""
    with zipfile.ZipFile(path) as archive:
        entries = _checked_entries(archive, path, shutil.disk_usage(folder).free)
        manifest = _read_manifest(archive, path)
        for entry in entries:
            _unpack_entry(archive, entry, folder / entry.filename)
    return manifest


def _directory_error(path: Path) -> UserError:
    """Return the error for a directory in place of a bundle, with the command that bundles it."""
    bundle = shlex.quote(f"{path.name}.zip")
    return UserError(
        "wrong_format",
        "a directory, not a bundle",
        str(path),
        f"to bundle a result: loadgen bundle {shlex.quote(str(path))} -o {bundle}",
    )


def _read_manifest(archive: zipfile.ZipFile, path: Path) -> Manifest:
    """Decode the manifest of a bundle. `path` is its file, for error messages."""
    return decode_json(
        archive.read(MANIFEST),
        Manifest,
        str(path),
        f"the {MANIFEST} of a bundle",
        _SOURCE_HINT,
        schema=SCHEMA,
    )


def _unpack_entry(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, target: Path) -> None:
    """Write the content of an entry to a file, and create the folders above the file."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with archive.open(entry) as source, target.open("wb") as file:
        shutil.copyfileobj(source, file, COPY_BYTES)


def _checked_entries(
    archive: zipfile.ZipFile, path: Path, free_bytes: int
) -> list[zipfile.ZipInfo]:
    """Return the files of an archive after checking that they are safe to unpack.

    Args:
        archive: The archive.
        path: Its file, for error messages.
        free_bytes: The free space of the disk.

    Raises:
        UserError: The archive has no manifest, so it is no bundle; it has too many files, or they
            are too large; a file would be written outside the directory; or two files have the same
            name, so that one would overwrite the other.
    """
    entries = [entry for entry in archive.infolist() if not entry.is_dir()]
    names = [entry.filename for entry in entries]
    if MANIFEST not in names:
        problem = f"not a bundle: it has no {MANIFEST}"
        raise UserError("wrong_format", problem, str(path), _SOURCE_HINT)

    if len(names) > MAX_FILES:
        problem = f"it has {len(names):,} files, but a bundle has at most {MAX_FILES:,}"
        raise UserError("too_large", problem, str(path), _SOURCE_HINT)

    unsafe_problem = _find_unsafe_entry(entries) or _find_duplicate_name(names)
    if unsafe_problem:
        problem = f"{unsafe_problem}. Nothing was extracted"
        raise UserError("unsafe_file", problem, str(path), _SOURCE_HINT)

    _check_size(sum(entry.file_size for entry in entries), path, free_bytes)
    return entries


def _find_unsafe_entry(entries: Sequence[zipfile.ZipInfo]) -> str:
    """Return which entry may not be unpacked and why, for a message, or "" if all may."""
    for entry in entries:
        unsafe_reason = _find_unsafe_reason(entry)
        if unsafe_reason:
            return f"unsafe entry {entry.filename!r}: {unsafe_reason}"
    return ""


def _find_duplicate_name(names: Sequence[str]) -> str:
    """Return which name several files have, for a message, or "" if all names differ."""
    most_common_name, count = Counter(names).most_common(1)[0]
    return f"more than one file is named {most_common_name!r}" if count > 1 else ""


def _check_size(unpacked_bytes: int, path: Path, free_bytes: int) -> None:
    """Check that the unpacked files are not absurdly large (a "zip bomb") and fit on the disk.

    Raises:
        UserError: They are too large.
    """
    packed_bytes = path.stat().st_size
    if unpacked_bytes > max(ALWAYS_ALLOWED_BYTES, MAX_EXPANSION * packed_bytes):
        expansion = unpacked_bytes / max(packed_bytes, 1)
        raise UserError(
            "unsafe_file",
            (
                f"it would expand to {format.size(unpacked_bytes)}, {expansion:,.0f} "
                "times its size. Nothing was extracted"
            ),
            str(path),
            "do not trust this file",
        )

    if unpacked_bytes > free_bytes - RESERVED_BYTES:
        raise UserError(
            "resource_limit",
            f"needs {format.size(unpacked_bytes)} of disk space; "
            f"{format.size(free_bytes)} are free",
            str(path),
            "set TMPDIR to a directory on a larger disk",
        )


def _find_unsafe_reason(entry: zipfile.ZipInfo) -> str:
    """Return why an entry may not be unpacked, or "" if it may."""
    if not _is_safe_name(entry.filename):
        return "a path outside the directory"

    # The upper 16 bits hold the mode of a Unix file, and are 0 in archives of other systems.
    unix_mode = entry.external_attr >> 16
    file_type = stat.S_IFMT(unix_mode)
    if file_type not in (0, stat.S_IFREG):
        return "not a regular file"

    path = PurePosixPath(entry.filename)
    is_result_file = PurePosixPath(RESULT) in path.parents
    if not is_result_file and str(path) not in (MANIFEST, SUMS, SIGNATURE):
        return "not part of a bundle"
    if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        return "unsupported compression"
    if entry.flag_bits & _ENCRYPTED_FLAG:
        return "an encrypted file"

    return ""


def _is_safe_name(name: str) -> bool:
    """Return True if a name stays inside the folder on every operating system."""
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts:
        return False
    return not any(character in name for character in "\\:\0")
