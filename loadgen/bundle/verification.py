"""Check a bundle: every hash, the signature, and every derived file, which is regenerated.

No network is used. Hashes show accidental changes. Only a signature shows that someone has changed
the records and written all files that follow from them again.
"""

from __future__ import annotations

import tempfile
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
    if not with_plugins:
        with plugins.without_plugins():
            return _verify_bundle(path, signed_by)
    return _verify_bundle(path, signed_by)


def _verify_bundle(path: Path, signed_by: Path | None) -> Verification:
    """Check a bundle with the plug-ins that are loaded. See `verify_bundle`."""
    with tempfile.TemporaryDirectory(prefix="loadgen-verify-") as temporary_directory:
        root = Path(temporary_directory)
        manifest = unpack_archive(path, root)
        hash_differences = _check_hashes(root)
        signature_check = _check_signature(root, signed_by)
        kind_differences = _check_kind(manifest, root / RESULT)
        checker = _DerivedFileChecker(root / RESULT, manifest)
        checker.check_all()
        file_count = sum(1 for file in root.rglob("*") if file.is_file())

    differences = (*hash_differences, *kind_differences, *checker.differences)
    is_badly_signed = signature_check.state in ("broken", "other key")
    return Verification(
        bundle=str(path),
        manifest=manifest,
        verified=_rate_verification(
            has_problems=bool(differences) or is_badly_signed,
            has_skipped_files=bool(checker.skipped),
        ),
        files=file_count,
        reproduced=tuple(checker.checked),
        skipped=checker.skipped,
        differences=differences,
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
    """Whether a signature is valid, and the key that made it.

    Attributes:
        state: One of these:
            "none": the bundle is not signed.
            "broken": the signature does not match the files.
            "some key": it is valid, and the user did not name a key.
            "given key": it is valid, and was made with the key that the user named.
            "other key": it is valid, but was made with another key.
        key: The type and fingerprint of the key, "" without a valid signature.
    """

    state: SignatureState
    key: str = ""


def _check_signature(root: Path, signed_by: Path | None) -> _SignatureCheck:
    """Check the signature of the list of hashes, and with it every other file of a bundle.

    Args:
        root: The unpacked bundle.
        signed_by: The public key that must have signed it, or None to accept any key.

    Raises:
        UserError: A key is required and the bundle is not signed.
    """
    signature_file = root / SIGNATURE
    if not signature_file.is_file():
        if signed_by is None:
            return _SignatureCheck("none")
        raise UserError(
            "not_signed",
            "the bundle is not signed",
            f"--signed-by {signed_by}",
            "ask the sender for a signed bundle, or verify this one without --signed-by",
        )

    signature_bytes = signature_file.read_bytes()
    hash_list_file = root / SUMS
    hash_list = hash_list_file.read_bytes() if hash_list_file.is_file() else b""
    key = signature.describe_valid_key(signature_bytes, hash_list)
    if not key:
        return _SignatureCheck("broken")
    if signed_by is None:
        return _SignatureCheck("some key", key)

    is_required_key = signature.is_signed_by(signed_by, signature_bytes, hash_list)
    return _SignatureCheck("given key" if is_required_key else "other key", key)


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
        """Compare one regenerated file with the stored one, or record why this is not possible.

        It is a difference if the raw data are damaged, or if the bundle does not have the file. A
        file that cannot be regenerated on this host, for example without a plug-in, is skipped.
        """
        if file.damaged:
            reason = file.basis
            self._add_difference(file, "not_remade", f"cannot be reproduced: {reason}")
        elif file.data is None:
            reason = file.basis
            self.skipped[file.name] = reason
        elif self._is_worded_by_other_version(file):
            reason = f"written by another version of loadgen ({self._version})"
            self.skipped[file.name] = reason
        elif not (self._folder / file.name).is_file():
            self._add_difference(file, "missing", "is missing")
        else:
            self._compare(self._folder / file.name, file, file.data)

    def _is_worded_by_other_version(self, file: RegeneratedFile) -> bool:
        """Return True for a page or text of another version of loadgen.

        The layout and the words of pages and texts change with each version. JSON can be compared.
        """
        is_json = file.name.endswith((".json", ".jsonl"))
        return self._is_other_version and not is_json

    def _add_difference(self, file: RegeneratedFile, code: MismatchCode, description: str) -> None:
        name_in_bundle = f"{RESULT}/{file.name}"
        self.differences.append(Mismatch(file=name_in_bundle, code=code, description=description))

    def _compare(self, stored_file: Path, file: RegeneratedFile, regenerated: bytes) -> None:
        """Compare a stored file with its regenerated content, and record the result.

        Two kinds of values are not compared. Metrics that a plug-in defined cannot be computed
        without the plug-in, so they are recorded as skipped. The others do not follow from raw data
        (`file.leave` lists their keys), and are only counted, as `not_derivable`.

        Args:
            stored_file: The file as unpacked from the bundle.
            file: The regenerated file.
            regenerated: Its content.
        """
        plugin_metrics = _metrics_of_missing_plugins(stored_file)
        for metric_path, package in plugin_metrics.items():
            reason = f"defined by {package}, which is not loaded; use --plugins"
            self.skipped[f"{file.name}: {metric_path}"] = reason

        comparison = compare_file(
            f"{RESULT}/{file.name}",
            stored_file.read_bytes(),
            regenerated,
            ignored=(*file.leave, *plugin_metrics),
            is_other_version=self._is_other_version,
        )
        not_derivable_paths = set(comparison.not_compared) - plugin_metrics.keys()
        self.checked.append(
            CheckedFile(
                file=file.name,
                basis=file.basis,
                same=comparison.same,
                differs=len(comparison.differences),
                not_derivable=len(not_derivable_paths),
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
    """Return the metrics in a summary that cannot be computed again, because a plug-in is missing.

    A plug-in can define a metric. The manifest of a run, `run.json`, lists the plug-ins that the
    run used, but this host may not have them.

    Args:
        summary_file: A stored file. Only the `summary.json` of a run can have such metrics.

    Returns:
        The package of each metric with its version, by the path of the metric in the summary. For
        example, {"figures.ttft_per_word": "my-plugin 1.2"}.
    """
    manifest_file = summary_file.with_name("run.json")
    is_summary_of_run = summary_file.name == run_folder.SUMMARY and manifest_file.is_file()
    if not is_summary_of_run:
        return {}

    manifest = decode_manifest(manifest_file.read_bytes(), str(manifest_file))
    loaded_metrics = {row.name for row in METRICS.available()}
    summary = summary_file.read_bytes()

    packages: dict[str, str] = {}
    for plugin in manifest.plugins:
        defines_metric = plugin.table == METRICS.group
        if defines_metric and plugin.name not in loaded_metrics:
            for key in _find_metric_keys(plugin.name, summary):
                # The object `figures` of a summary has the metrics of plug-ins.
                packages[f"figures.{key}"] = f"{plugin.package} {plugin.version}"

    return packages


def _find_metric_keys(metric: str, summary: bytes) -> list[str]:
    """Return the keys of a plug-in's metric that occur in the JSON text of a summary.

    The key of a number is the name of the metric, and that of a distribution in ms ends with `_ms`.
    The text is searched for the quoted key, because a damaged summary cannot be decoded.
    """
    possible_keys = (metric, f"{metric}_ms")
    return [key for key in possible_keys if f'"{key}"'.encode() in summary]
