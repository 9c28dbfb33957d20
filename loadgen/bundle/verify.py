"""Makes a bundle of a result folder, and checks one: every hash, and every derived file made again from what was kept.

IO. No network. What is compared are values, sentences and bytes; a hash guards against accident, and only a signature
against somebody who makes the whole bundle anew.
"""

from __future__ import annotations

import datetime
import hashlib
import tempfile
from contextlib import nullcontext
from pathlib import Path, PurePosixPath
from typing import Literal

import msgspec

from loadgen import plugins
from loadgen.bundle import archive, remake, signature
from loadgen.bundle.archive import MANIFEST, RESULT, SIGNATURE, SUMS, Manifest
from loadgen.bundle.differences import Mismatch, MismatchCode, compare
from loadgen.core import format, run_folder
from loadgen.core.errors import UserError
from loadgen.core.execution.host_facts import loadgen_version
from loadgen.core.results import checksums
from loadgen.core.results.files import refuse_links
from loadgen.core.results.manifest import decode
from loadgen.figures import FIGURES

PAGES = "a page: `loadgen report` makes it from what is here"
PROMPTS = "texts of prompts or answers: --keep-content puts them in"


class Made(msgspec.Struct, frozen=True, kw_only=True):
    """A derived file and what came of it. `same`: values or lines that came out again.

    `given`: values that nothing kept gives, like what a trial was asked.
    """

    file: str
    basis: str
    same: int = 0
    differs: int = 0
    given: int = 0


class Verification(msgspec.Struct, frozen=True, kw_only=True):
    """The result of `loadgen verify`. `not_made`: derived file -> why it cannot be made again.

    verified: "all" of what is derived came out again; "part": so did what could be made again; "no": something differs.
    """

    schema: int = 1
    bundle: str
    manifest: Manifest
    verified: Literal["all", "part", "no"]
    files: int
    made: tuple[Made, ...]
    not_made: dict[str, str]
    differences: tuple[Mismatch, ...]
    signature: Literal["none", "broken", "other key", "some key", "given key"]
    signed_by: str = ""


# -- making one --------------------------------------------------------------------------------------------------------


def bundle(folder: Path, out: Path, *, key: Path | None = None, content: bool = False) -> Manifest:
    """Write the bundle of a result folder. Raises UserError for a folder that is none, or not as it was written."""
    refuse_links(folder)
    kind = remake.kind_of(folder)
    if changed := _changed(folder):
        listed = ", ".join(f"{name} ({what})" for name, what in list(changed.items())[:5])
        hint = "bundle the folder as its command left it"
        raise UserError(
            "changed_file", f"the folder is not as it was written: {listed}", str(folder), hint
        )
    if out.exists():
        raise UserError(
            "file_exists",
            "this file exists",
            f"--out {out}",
            "give another name: evidence is not written over",
        )
    files: dict[str, Path | bytes] = {}
    left_out: dict[str, str] = {}
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = file.relative_to(folder).as_posix()
        if why := _left_out(file, content):
            left_out[name] = why
        else:
            files[f"{RESULT}/{name}"] = file
    manifest = Manifest(
        kind=kind.bundled_as or kind.name,
        name=folder.resolve().name,
        made=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        version=loadgen_version(),
        content=content,
        left_out=left_out,
    )
    files[MANIFEST] = format.document(manifest)
    sums = "".join(f"{_sha256(content)}  {name}\n" for name, content in files.items()).encode()
    signed = {} if key is None else {SIGNATURE: signature.sign(key, sums)}
    archive.write(out, {**files, SUMS: sums, **signed})
    return manifest


def _changed(folder: Path) -> dict[str, str]:
    """The files that differ from the lists of hashes in the folder and in those inside it."""
    return {
        (path.parent.relative_to(folder) / name).as_posix(): what
        for path in sorted(folder.rglob(checksums.FILE))
        for name, what in checksums.changed(path.parent).items()
    }


def _left_out(file: Path, content: bool) -> str:
    if remake.is_text(file) and not content:
        return PROMPTS
    return PAGES if remake.is_page(file) else ""


def _sha256(content: Path | bytes) -> str:
    if isinstance(content, bytes):
        return hashlib.sha256(content).hexdigest()
    with content.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# -- checking one ------------------------------------------------------------------------------------------------------


def verify(
    path: Path, *, signed_by: Path | None = None, with_plugins: bool = False
) -> Verification:
    """Check a bundle; `with_plugins`: also what plug-ins of this host know.

    Raises UserError for what is no bundle, and for one of a newer version.
    """
    with (
        nullcontext() if with_plugins else plugins.without_plugins(),
        tempfile.TemporaryDirectory(prefix="loadgen-verify-") as scratch,
    ):
        root = Path(scratch)
        manifest = archive.unpack(path, root)
        differences = _hashes(root)
        state, signer = _signature(root, signed_by)
        folder = root / RESULT
        kind = remake.kind_of(folder)
        kind_name = kind.bundled_as or kind.name
        if manifest.kind != kind_name:
            differences.append(
                Mismatch(file=MANIFEST, at="kind", stored=manifest.kind, again=kind_name)
            )
        made, not_made, found = _again(folder, manifest)
        files = sum(1 for file in root.rglob("*") if file.is_file())
    wrong = differences or found or state in ("broken", "other key")
    return Verification(
        bundle=str(path),
        manifest=manifest,
        verified="no" if wrong else "part" if not_made else "all",
        files=files,
        made=tuple(made),
        not_made=not_made,
        differences=(*differences, *found),
        signature=state,
        signed_by=signer,
    )


def _hashes(root: Path) -> list[Mismatch]:
    """The files that are not as SHA256SUMS says, that it does not list, and those that it lists and are not there."""
    listed = checksums.read(root)
    if listed is None:
        return [
            Mismatch(file=SUMS, code="no_hashes", what="is missing: nothing vouches for any file")
        ]
    found = checksums.changed(root) | dict.fromkeys(checksums.unlisted(root), "unlisted")
    found.pop(SIGNATURE, None)
    said: dict[str, tuple[MismatchCode, str]] = {
        "changed": ("changed", "is changed: its hash is another one"),
        "gone": ("missing", "is gone"),
        "unlisted": ("unlisted", "is not in the list of hashes"),
    }
    return [
        Mismatch(file=name, code=said[how][0], what=said[how][1]) for name, how in found.items()
    ]


def _signature(
    root: Path, signed_by: Path | None
) -> tuple[Literal["none", "broken", "other key", "some key", "given key"], str]:
    """What the signature is worth, and its key."""
    file = root / SIGNATURE
    if not file.is_file():
        if signed_by is not None:
            raise UserError(
                "not_signed",
                "the bundle is not signed",
                f"--signed-by {signed_by}",
                "ask for one that is",
            )
        return "none", ""
    signed, data = file.read_bytes(), (root / SUMS).read_bytes() if (root / SUMS).is_file() else b""
    key = signature.signer(signed, data)
    if not key:
        return "broken", ""
    if signed_by is None:
        return "some key", key
    return ("given key" if signature.is_by(signed_by, signed, data) else "other key"), key


def _again(folder: Path, manifest: Manifest) -> tuple[list[Made], dict[str, str], list[Mismatch]]:
    older = manifest.version != loadgen_version()
    made: list[Made] = []
    not_made: dict[str, str] = {}
    found: list[Mismatch] = []
    for one in remake.remade(folder):
        stored = folder / one.name
        name = f"{RESULT}/{one.name}"
        if one.damaged:
            found.append(
                Mismatch(file=name, code="not_remade", what=f"cannot be made again: {one.basis}")
            )
        elif one.data is None:
            not_made[one.name] = one.basis
        elif older and not one.name.endswith((".json", ".jsonl")):
            not_made[one.name] = f"another version of loadgen ({manifest.version}) has worded it"
        elif not stored.is_file():
            found.append(Mismatch(file=name, code="missing", what="is missing"))
        else:
            strange = _of_other_packages(stored)
            for place, package in strange.items():
                not_made[f"{one.name}: {place}"] = (
                    f"defined by {package}, which is not loaded here: --plugins"
                )
            leave = (*one.leave, *strange)
            came = compare(name, stored.read_bytes(), one.data, leave=leave, older=older)
            made.append(
                Made(
                    file=one.name,
                    basis=one.basis,
                    same=came.same,
                    differs=len(came.differences),
                    given=len(set(came.left) - strange.keys()),
                )
            )
            found += came.differences
    known = (
        {one.file for one in made}
        | not_made.keys()
        | {one.file.removeprefix(f"{RESULT}/") for one in found}
    )
    for file in sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file()):
        if file.as_posix() not in known and not remake.is_kept(PurePosixPath(file.as_posix())):
            not_made[file.as_posix()] = "nothing here makes it: its hash alone was looked at"
    return made, not_made, found


def _of_other_packages(file: Path) -> dict[str, str]:
    """Places of the figures in a summary whose packages the run names and that are not loaded here, each with its
    package.
    """
    header = file.with_name("run.json")
    if file.name != run_folder.SUMMARY or not header.is_file():
        return {}
    here = {row.name for row in FIGURES.here()}
    return {
        f"figures.{field}": f"{one.package} {one.version}"
        for one in decode(header.read_bytes(), str(header)).plugins
        if one.table == FIGURES.group and one.name not in here
        for field in (one.name, f"{one.name}_ms")
        if f'"{field}"'.encode() in file.read_bytes()
    }
