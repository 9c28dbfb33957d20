"""The file of a bundle: a ZIP archive with a result folder, what it is, and the hash of every file in it. IO.

    bundle.json       what it is (Manifest)
    SHA256SUMS        of every other file, as `sha256sum -c SHA256SUMS` reads it
    SHA256SUMS.sig    its signature, where there is one (`signature.py`)
    result/           the folder of the result, as the command left it, but for what `left_out` names

Nothing in a bundle is trusted: names, sizes and the number of files are checked before one byte is unpacked.
"""

from __future__ import annotations

import os
import shlex
import shutil
import stat
import zipfile
from collections import Counter
from pathlib import Path, PurePosixPath

import msgspec

from loadgen.core import format
from loadgen.core.errors import UserError, nothing_there
from loadgen.core.results.manifest import decoded

SCHEMA = 1
MANIFEST, SUMS, SIGNATURE, RESULT = "bundle.json", "SHA256SUMS", "SHA256SUMS.sig", "result"
MOST_FILES = 200_000
MOST_GROWTH, FREE_GROWTH = (
    200,
    1 << 30,
)  # a bundle may unpack to 1 GiB, or to so many times its own size
SPARE = 1 << 28  # bytes that stay free on the disk
_FROM = "give the file that `loadgen bundle` or `--bundle` has written"


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `bundle.json`."""

    schema: int = SCHEMA
    kind: str  # run, runs, repeats, sweep, search, validation, answers
    name: str  # of the folder
    made: str  # when, ISO 8601
    version: str  # of the loadgen that made the bundle
    content: bool = False  # whether texts of prompts were asked for
    left_out: dict[str, str] = {}  # file of the folder -> why it is not in the bundle


def write(path: Path, files: dict[str, Path | bytes]) -> None:
    """Write an archive of these files, name -> content. Raises UserError. The same files give the same bytes."""
    scratch = path.with_name(path.name + ".part")
    try:
        with zipfile.ZipFile(scratch, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as archive:
            for name, content in files.items():
                entry = zipfile.ZipInfo(name)
                entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
                if isinstance(content, bytes):
                    archive.writestr(entry, content)
                else:
                    with (
                        content.open("rb") as source,
                        archive.open(entry, "w", force_zip64=True) as target,
                    ):
                        shutil.copyfileobj(source, target, 1 << 20)
        os.replace(scratch, path)
    except OSError as error:
        scratch.unlink(missing_ok=True)
        raise UserError(
            "unwritable_file", f"cannot be written: {error.strerror}", str(path)
        ) from None


def unpack(path: Path, folder: Path) -> Manifest:
    """Unpack a bundle into an empty folder. Raises UserError for whatever is not one, before anything is unpacked."""
    try:
        with zipfile.ZipFile(path) as archive:
            entries = _checked(archive, path, shutil.disk_usage(folder).free)
            what = f"the {MANIFEST} of a bundle"
            manifest = decoded(
                archive.read(MANIFEST), Manifest, str(path), what, _FROM, schema=SCHEMA
            )
            for entry in entries:
                target = folder / entry.filename
                target.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(entry) as source, target.open("wb") as file:
                    shutil.copyfileobj(source, file, 1 << 20)
    except FileNotFoundError:
        raise nothing_there(path, _FROM, "no such file") from None
    except UserError:
        raise
    except IsADirectoryError:
        bundle = shlex.quote(f"{path.name}.zip")
        hint = (
            f"if it is a result: loadgen bundle {shlex.quote(str(path))} -o {bundle}, and then "
            f"loadgen verify {bundle}"
        )
        raise UserError("wrong_format", "a folder, not a bundle", str(path), hint) from None
    except OSError as error:
        raise UserError(
            "unreadable_file", f"cannot be read: {error.strerror or error}", str(path), _FROM
        ) from None
    except Exception as error:  # a damaged archive can raise anything at all
        raise UserError(
            "wrong_format", f"not a bundle, or a damaged one: {error}", str(path), _FROM
        ) from None
    return manifest


def _checked(archive: zipfile.ZipFile, path: Path, free: int) -> list[zipfile.ZipInfo]:
    entries = [entry for entry in archive.infolist() if not entry.is_dir()]
    names = [entry.filename for entry in entries]
    if MANIFEST not in names:
        raise UserError(
            "wrong_format", f"not a bundle: there is no {MANIFEST} in it", str(path), _FROM
        )
    if len(names) > MOST_FILES:
        raise UserError(
            "too_large",
            f"{len(names):,} files: more than a bundle has ({MOST_FILES:,})",
            str(path),
            _FROM,
        )
    for entry in entries:
        if why := _unsafe(entry):
            raise UserError(
                "unsafe_file", f"{why}: {entry.filename!r}; nothing was unpacked", str(path), _FROM
            )
    (twice, times), *_ = Counter(names).most_common(1)
    if times > 1:
        raise UserError(
            "unsafe_file",
            f"two files of one name: {twice!r}; nothing was unpacked",
            str(path),
            _FROM,
        )
    size, own = sum(entry.file_size for entry in entries), path.stat().st_size
    if size > max(FREE_GROWTH, MOST_GROWTH * own):
        what = f"it would unpack to {format.size(size)}, {size / max(own, 1):,.0f} times its size; nothing was unpacked"
        raise UserError("unsafe_file", what, str(path), "no bundle is like that")
    if size > free - SPARE:
        what = f"it unpacks to {format.size(size)}, and {format.size(free)} of the disk are free"
        raise UserError(
            "resource_limit", what, str(path), "TMPDIR=/a/larger/disk loadgen verify ..."
        )
    return entries


def _unsafe(entry: zipfile.ZipInfo) -> str:
    """Why an entry may not be unpacked; "" when it may."""
    name, kind = entry.filename, stat.S_IFMT(entry.external_attr >> 16)
    parts = PurePosixPath(name).parts
    if (
        not parts
        or name.startswith("/")
        or ".." in parts
        or "\\" in name
        or ":" in name
        or "\0" in name
    ):
        return "a name that leads out of the folder"
    if kind not in (0, stat.S_IFREG):
        return "a link or device, not a file"
    if parts[0] not in (MANIFEST, SUMS, SIGNATURE, RESULT) or (len(parts) > 1) != (
        parts[0] == RESULT
    ):
        return "a file that no bundle has"
    if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        return "a file compressed as in no bundle"
    return "an encrypted file" if entry.flag_bits & 1 else ""
