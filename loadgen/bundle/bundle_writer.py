"""Write the bundle of a result directory."""

from __future__ import annotations

import datetime
import hashlib
from pathlib import Path
from typing import NamedTuple

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


class _SelectedFiles(NamedTuple):
    """The files of a result directory, by whether they are part of its bundle.

    Attributes:
        included: The path of each included file, by its name in the directory.
        omitted: For each omitted file, by its name, the reason.
    """

    included: dict[str, Path]
    omitted: dict[str, str]


def write_bundle(
    folder: Path, out: Path, *, key: Path | None = None, with_texts: bool = False
) -> Manifest:
    """Write the bundle of a result directory and return its manifest.

    The bundle consists of the result, the manifest, the hashes of both, and the signature of the
    hashes.

    Args:
        folder: The result directory.
        out: The file to write.
        key: The private key to sign with, or None.
        with_texts: True to include texts of prompts and responses.

    Raises:
        UserError: The directory is no result, was changed, or the file exists.
    """
    refuse_links(folder)
    kind = derived_files.find_bundled_kind(folder)
    _check_unchanged(folder)

    if out.exists():
        raise UserError(
            "file_exists",
            "the file exists already",
            f"--out {out}",
            "choose another name",
        )

    selected = _select_files(folder, with_texts=with_texts)
    manifest = Manifest(
        kind=kind.bundled_as or kind.name,  # some kinds have another name in a bundle
        name=folder.resolve().name,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        version=loadgen_version(),
        content=with_texts,
        omitted_files=selected.omitted,
    )
    write_archive(out, _collect_entries(selected, manifest, key))

    return manifest


def _collect_entries(
    selected: _SelectedFiles, manifest: Manifest, key: Path | None
) -> dict[str, Path | bytes]:
    """Return the files of a bundle by name. Each is a file to copy, or the content itself.

    The list of hashes covers the result and the manifest, and the signature covers the list.
    """
    entries: dict[str, Path | bytes] = {
        f"{RESULT}/{name}": path for name, path in selected.included.items()
    }
    entries[MANIFEST] = format.document(manifest)
    hash_list = _list_hashes(entries)

    entries[SUMS] = hash_list
    if key is not None:
        entries[SIGNATURE] = signature.sign(key, hash_list)

    return entries


def _select_files(folder: Path, *, with_texts: bool) -> _SelectedFiles:
    """Return the files of a result directory that are part of its bundle, and the other ones."""
    selected = _SelectedFiles(included={}, omitted={})
    for path in sorted(folder.rglob("*")):
        if not path.is_file():
            continue

        name = path.relative_to(folder).as_posix()
        reason = _omission_reason(path, with_texts=with_texts)
        if reason:
            selected.omitted[name] = reason
        else:
            selected.included[name] = path

    return selected


def _list_hashes(files: dict[str, Path | bytes]) -> bytes:
    """Return the list of the hashes of files, in the format of `sha256sum`."""
    lines = [f"{_sha256(content)}  {name}\n" for name, content in files.items()]
    return "".join(lines).encode()


def _check_unchanged(folder: Path) -> None:
    """Check that no file was changed after its command wrote it.

    Each result in the directory, such as each run of a sweep, has a list of the hashes of its
    files.

    Raises:
        UserError: A file differs from such a list, or is missing.
    """
    changes: dict[str, str] = {}
    for hash_list in sorted(folder.rglob(checksums.FILE)):
        result_dir = hash_list.parent
        for name, change in checksums.find_changes(result_dir).items():
            path = (result_dir / name).relative_to(folder)
            changes[path.as_posix()] = change

    if changes:
        first_changes = list(changes.items())[:NAMED_CHANGES]
        named_changes = ", ".join(f"{name} ({change})" for name, change in first_changes)
        raise UserError(
            "changed_file",
            f"files were changed after they were written: {named_changes}",
            str(folder),
            "bundle the original result",
        )


def _omission_reason(file: Path, *, with_texts: bool) -> str:
    """Return why a file is not part of the bundle, or "" if it is."""
    if derived_files.has_texts(file) and not with_texts:
        return TEXT_REASON
    if derived_files.is_page(file):
        return PAGE_REASON
    return ""


def _sha256(content: Path | bytes) -> str:
    if isinstance(content, bytes):
        return hashlib.sha256(content).hexdigest()
    with content.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
