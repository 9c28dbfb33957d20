"""Check a bundle: every hash, the signature, and every derived file, which is regenerated.

No network is used. Hashes show accidental changes. Only a signature shows that someone has changed
the records and written all files that follow from them again.
"""

from __future__ import annotations

import tempfile
from contextlib import nullcontext
from pathlib import Path, PurePosixPath
from typing import Literal, NamedTuple

import msgspec

from loadgen import plugins
from loadgen.bundle import derived_files, signature
from loadgen.bundle.archive import (
    MANIFEST,
    RESULT,
    SIGNATURE,
    SUMS,
    Manifest,
    unpack_archive,
)
from loadgen.bundle.differences import Mismatch, MismatchCode, compare_file
from loadgen.core import run_folder
from loadgen.core.errors import UserError
from loadgen.core.execution.host_facts import loadgen_version
from loadgen.core.results import checksums
from loadgen.core.results.manifest import decode_manifest
from loadgen.figures import METRICS
from loadgen.result_kinds import RegeneratedFile

SignatureState = Literal["none", "broken", "other key", "some key", "given key"]

_HASH_MISMATCHES: dict[str, tuple[MismatchCode, str]] = {
    "changed": ("changed", "does not have the listed hash"),
    "gone": ("missing", "is missing"),
    "unlisted": ("unlisted", "is not in the list of hashes"),
}


class CheckedFile(msgspec.Struct, frozen=True, kw_only=True, rename={"not_derivable": "given"}):
    """A derived file that was regenerated and compared.

    Attributes:
        file: The file.
        basis: What it was regenerated from.
        same: The number of values or lines that are equal.
        differs: The number of values or lines that differ.
        not_derivable: The number of values that do not follow from raw data, such as the load of a
            trial.
    """

    file: str
    basis: str
    same: int = 0
    differs: int = 0
    not_derivable: int = 0


class Verification(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    rename={"reproduced": "made", "skipped": "not_made"},
):
    """The result of `loadgen verify`.

    Attributes:
        schema: Version of the format.
        bundle: The file of the bundle.
        manifest: The manifest of the bundle.
        verified: "all" if every derived file was reproduced, "part" if those were that can be
            regenerated here, and "no" if something differs.
        files: The number of files in the bundle.
        reproduced: The derived files that were regenerated.
        skipped: Files that cannot be regenerated, and why.
        differences: The places that differ.
        signature: Whether the bundle is signed, and by whom.
        signed_by: The key of the signature.
    """

    schema: int = 1
    bundle: str
    manifest: Manifest
    verified: Literal["all", "part", "no"]
    files: int
    reproduced: tuple[CheckedFile, ...]
    skipped: dict[str, str]
    differences: tuple[Mismatch, ...]
    signature: SignatureState
    signed_by: str = ""


def verify_bundle(
    path: Path, *, signed_by: Path | None = None, with_plugins: bool = False
) -> Verification:
    """Check a bundle: its hashes, its signature, and its derived files.

    The bundle is unpacked into a temporary directory. Each derived file is regenerated from the raw
    data there and compared with the stored one.

    Args:
        path: The file of the bundle.
        signed_by: The public key that must have signed it, or None.
        with_plugins: True to use the plug-ins of this host.

    Raises:
        UserError: The file is no bundle, or was written by a newer version.
    """
    with (
        nullcontext() if with_plugins else plugins.without_plugins(),
        tempfile.TemporaryDirectory(prefix="loadgen-verify-") as temporary_directory,
    ):
        root = Path(temporary_directory)
        manifest = unpack_archive(path, root)
        result_folder = root / RESULT
        differences = _check_hashes(root)
        signature_check = _check_signature(root, signed_by)
        differences += _check_kind(manifest, result_folder)
        checker = _DerivedFileChecker(result_folder, manifest)
        checker.check_all()
        file_count = sum(1 for file in root.rglob("*") if file.is_file())
    differences += checker.differences
    has_valid_signature = signature_check.state not in ("broken", "other key")
    return Verification(
        bundle=str(path),
        manifest=manifest,
        verified=_rate_verification(
            has_problems=bool(differences) or not has_valid_signature,
            has_skipped_files=bool(checker.skipped),
        ),
        files=file_count,
        reproduced=tuple(checker.checked),
        skipped=checker.skipped,
        differences=tuple(differences),
        signature=signature_check.state,
        signed_by=signature_check.key,
    )


def _rate_verification(
    *, has_problems: bool, has_skipped_files: bool
) -> Literal["all", "part", "no"]:
    """Return what was verified: "no" with any problem, "part" if files were skipped, else "all"."""
    if has_problems:
        return "no"
    return "part" if has_skipped_files else "all"


def _check_hashes(root: Path) -> list[Mismatch]:
    """Return the files that differ from SHA256SUMS, are not listed in it, or are missing."""
    if checksums.read_checksums(root) is None:
        description = "is missing, so no hash can be checked"
        return [Mismatch(file=SUMS, code="no_hashes", description=description)]
    problems = dict(checksums.find_changes(root))
    problems.update(dict.fromkeys(checksums.unlisted(root), "unlisted"))
    problems.pop(SIGNATURE, None)
    mismatches = []
    for name, problem in problems.items():
        code, description = _HASH_MISMATCHES[problem]
        mismatches.append(Mismatch(file=name, code=code, description=description))
    return mismatches


def _check_kind(manifest: Manifest, folder: Path) -> list[Mismatch]:
    """Return a mismatch if the manifest names another kind of result than the directory has.

    Raises:
        UserError: The directory is no result that can be regenerated.
    """
    kind = derived_files.find_bundled_kind(folder)
    kind_name = kind.bundled_as or kind.name
    if manifest.kind == kind_name:
        return []
    return [Mismatch(file=MANIFEST, location="kind", stored=manifest.kind, regenerated=kind_name)]


class _SignatureCheck(NamedTuple):
    """Whether a signature is valid, and the key that made it."""

    state: SignatureState
    key: str = ""


def _check_signature(root: Path, signed_by: Path | None) -> _SignatureCheck:
    """Check the signature of the list of hashes, which covers every other file.

    The state of the signature is one of these:

    - "none": the bundle is not signed.
    - "broken": the signature does not match the files.
    - "some key": it is valid, and the caller requires no key.
    - "given key": it is valid, and was made with the key that the caller requires.
    - "other key": it is valid, but was made with another key.

    Args:
        root: The unpacked bundle.
        signed_by: The public key that must have signed it, or None to accept any key.

    Raises:
        UserError: A key is required and the bundle is not signed.
    """
    file = root / SIGNATURE
    if not file.is_file():
        if signed_by is not None:
            raise UserError(
                "not_signed",
                "the bundle is not signed",
                f"--signed-by {signed_by}",
                "request a signed bundle, or verify it without --signed-by",
            )
        return _SignatureCheck("none")
    signature_bytes = file.read_bytes()
    hash_list_file = root / SUMS
    hash_list = hash_list_file.read_bytes() if hash_list_file.is_file() else b""
    key = signature.describe_valid_key(signature_bytes, hash_list)
    if not key:
        return _SignatureCheck("broken")
    if signed_by is None:
        return _SignatureCheck("some key", key)
    if signature.is_signed_by(signed_by, signature_bytes, hash_list):
        return _SignatureCheck("given key", key)
    return _SignatureCheck("other key", key)


class _DerivedFileChecker:
    """Regenerates the derived files of a result folder and compares them with the stored ones.

    Attributes:
        checked: The files that were regenerated and compared.
        skipped: Files that cannot be regenerated, and why.
        differences: The places that differ.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder = folder
        self._version = manifest.version
        self._is_other_version = manifest.version != loadgen_version()
        self.checked: list[CheckedFile] = []
        self.skipped: dict[str, str] = {}
        self.differences: list[Mismatch] = []

    def check_all(self) -> None:
        """Check every file of the folder."""
        for file in derived_files.regenerate(self._folder):
            self._check(file)
        self._find_other_files()

    def _check(self, file: RegeneratedFile) -> None:
        """Compare one regenerated file with the stored one, or note why this is not possible.

        A file whose raw data are damaged, and one that is missing in the bundle, are differences.
        A file that cannot be regenerated here is skipped. So are texts and pages of another version
        of loadgen, because they change with each version; JSON is compared.
        """
        if file.damaged:
            problem = f"cannot be reproduced: {file.basis}"
            self._add_difference(file, "not_remade", problem)
            return
        if file.data is None:
            # `basis` is then the reason why it cannot be regenerated.
            self.skipped[file.name] = file.basis
            return
        is_json = file.name.endswith((".json", ".jsonl"))
        if self._is_other_version and not is_json:
            reason = f"written by another version of loadgen ({self._version})"
            self.skipped[file.name] = reason
            return
        stored_file = self._folder / file.name
        if not stored_file.is_file():
            self._add_difference(file, "missing", "is missing")
            return
        self._compare(stored_file, file, file.data)

    def _add_difference(self, file: RegeneratedFile, code: MismatchCode, description: str) -> None:
        name_in_bundle = f"{RESULT}/{file.name}"
        self.differences.append(Mismatch(file=name_in_bundle, code=code, description=description))

    def _compare(self, stored_file: Path, file: RegeneratedFile, regenerated: bytes) -> None:
        """Compare a stored file with its regenerated content, and note the result.

        Metrics that a plug-in defined cannot be computed without the plug-in, so they are noted as
        skipped.

        Args:
            stored_file: The file as unpacked from the bundle.
            file: The regenerated file.
            regenerated: Its content.
        """
        plugin_metrics = _metrics_of_missing_plugins(stored_file)
        for metric_path, package in plugin_metrics.items():
            reason = f"defined by {package}, which is not loaded; use --plugins"
            self.skipped[f"{file.name}: {metric_path}"] = reason
        # `file.leave` lists the keys whose values do not follow from raw data.
        ignored_keys = (*file.leave, *plugin_metrics)
        comparison = compare_file(
            f"{RESULT}/{file.name}",
            stored_file.read_bytes(),
            regenerated,
            ignored=ignored_keys,
            is_other_version=self._is_other_version,
        )
        self.checked.append(
            CheckedFile(
                file=file.name,
                basis=file.basis,
                same=comparison.same,
                differs=len(comparison.differences),
                not_derivable=len(set(comparison.not_compared) - plugin_metrics.keys()),
            )
        )
        self.differences += comparison.differences

    def _find_other_files(self) -> None:
        """Note the files that are neither raw data nor regenerated."""
        known = {checked.file for checked in self.checked} | self.skipped.keys()
        known |= {mismatch.file.removeprefix(f"{RESULT}/") for mismatch in self.differences}
        for path in sorted(self._folder.rglob("*")):
            name = path.relative_to(self._folder).as_posix()
            if not path.is_file() or name in known or derived_files.is_raw(PurePosixPath(name)):
                continue
            self.skipped[name] = "not a file of loadgen; only its hash was checked"


def _metrics_of_missing_plugins(summary_file: Path) -> dict[str, str]:
    """Return the metrics in a summary that only a plug-in that is not loaded can compute.

    Args:
        summary_file: A stored file. Only `summary.json` beside a `run.json` can have such metrics.

    Returns:
        The package of each metric with its version, by the key of the metric in the summary. For
        example, {"figures.ttft_per_word": "my-plugin 1.2"}.
    """
    manifest_file = summary_file.with_name("run.json")
    if summary_file.name != run_folder.SUMMARY or not manifest_file.is_file():
        return {}
    manifest = decode_manifest(manifest_file.read_bytes(), str(manifest_file))
    loaded_metrics = {row.name for row in METRICS.available()}
    summary = summary_file.read_bytes()
    packages: dict[str, str] = {}
    for plugin in manifest.plugins:
        is_metric = plugin.table == METRICS.group
        if not is_metric or plugin.name in loaded_metrics:
            continue
        for key in _find_metric_keys(plugin.name, summary):
            packages[f"figures.{key}"] = f"{plugin.package} {plugin.version}"
    return packages


def _find_metric_keys(metric: str, summary: bytes) -> list[str]:
    """Return the keys of a plug-in's metric that occur in the JSON text of a summary.

    The key of a number is the name of the metric, and that of a distribution in ms ends with `_ms`.
    The text is searched for the quoted key, because a damaged summary cannot be decoded.
    """
    possible_keys = (metric, f"{metric}_ms")
    return [key for key in possible_keys if f'"{key}"'.encode() in summary]
