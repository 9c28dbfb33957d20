"""Write the bundle of a result directory."""

from __future__ import annotations

import datetime
import hashlib
from pathlib import Path

from loadgen.bundle import derived_files, signature
from loadgen.bundle.archive import MANIFEST, RESULT, SIGNATURE, SUMS, Manifest, write_archive
from loadgen.core import format
from loadgen.core.errors import UserError
from loadgen.core.execution.host_facts import loadgen_version
from loadgen.core.results import checksums
from loadgen.core.results.files import refuse_links

NAMED_CHANGES = 5
"""Changed files that an error message names."""

PAGE_REASON = "a page, which `loadgen report` can write again"
TEXT_REASON = "texts of prompts or responses; --keep-content includes them"


def write_bundle(
    folder: Path, out: Path, *, key: Path | None = None, content: bool = False
) -> Manifest:
    """Write the bundle of a result folder and return its manifest.

    Args:
        folder: The result folder.
        out: The file to write.
        key: The private key to sign with, or None.
        content: True to include texts of prompts and responses.

    Raises:
        UserError: The folder is no result, was changed, or the file exists.
    """
    refuse_links(folder)
    kind = derived_files.bundled_kind(folder)
    _check_unchanged(folder)
    if out.exists():
        raise UserError(
            "file_exists",
            "the file exists already",
            f"--out {out}",
            "choose another name",
        )
    files: dict[str, Path | bytes] = {}
    omitted_files: dict[str, str] = {}
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = file.relative_to(folder).as_posix()
        reason = _omission_reason(file, content)
        if reason:
            omitted_files[name] = reason
        else:
            files[f"{RESULT}/{name}"] = file
    manifest = Manifest(
        kind=kind.bundled_as or kind.name,
        name=folder.resolve().name,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        version=loadgen_version(),
        content=content,
        omitted_files=omitted_files,
    )
    files[MANIFEST] = format.document(manifest)
    lines = [f"{_sha256(file_content)}  {name}\n" for name, file_content in files.items()]
    sums = "".join(lines).encode()
    files[SUMS] = sums
    if key is not None:
        files[SIGNATURE] = signature.sign(key, sums)
    write_archive(out, files)
    return manifest


def _check_unchanged(folder: Path) -> None:
    """Raise UserError if a file differs from the lists of hashes in the folder and inside it."""
    changes: dict[str, str] = {}
    for sums_file in sorted(folder.rglob(checksums.FILE)):
        prefix = sums_file.parent.relative_to(folder)
        for name, change in checksums.find_changes(sums_file.parent).items():
            changes[(prefix / name).as_posix()] = change
    if changes:
        named = [f"{name} ({change})" for name, change in list(changes.items())[:NAMED_CHANGES]]
        raise UserError(
            "changed_file",
            f"files were changed after they were written: {', '.join(named)}",
            str(folder),
            "bundle the original result",
        )


def _omission_reason(file: Path, content: bool) -> str:
    """Return why a file is not part of the bundle, or "" if it is."""
    if derived_files.has_texts(file) and not content:
        return TEXT_REASON
    if derived_files.is_page(file):
        return PAGE_REASON
    return ""


def _sha256(content: Path | bytes) -> str:
    if isinstance(content, bytes):
        return hashlib.sha256(content).hexdigest()
    with content.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
