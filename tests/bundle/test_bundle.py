"""Tests of bundles: every result is reproduced, every change is named, no file is trusted."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import repository_paths
from command_line import exits
from golden import check_golden

from loadgen.bundle import archive
from loadgen.bundle.bundle_writer import write_bundle
from loadgen.bundle.differences import Mismatch, compare_file
from loadgen.bundle.verification import CheckedFile, Verification, verify_bundle
from loadgen.bundle.verification_text import report
from loadgen.core.errors import UserError
from loadgen.render import text as as_text

pytestmark = pytest.mark.commands

FOLDERS = repository_paths.DATA / "oracle" / "folders"
SIM = ("--url", "sim:gb300-vm", "--seed", "3")
CONTRACT = """
name: poc
horizon: 5s
prices: prices.yaml
levels:
  - name: steady
    workload: qa
    rate: "${RATE}/s"
    duration: 60s
    must: [{errors: 5%}, {requests: 2/s}]
"""
PRICES = """
currency: USD
prices: [{name: ours, per: gpu-hour, price: 2.5, date: 2026-11-01, source: quote}]
"""


@pytest.fixture(scope="module")
def results_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a result of each kind, in virtual time."""
    root = tmp_path_factory.mktemp("results")
    (root / "prices.yaml").write_text(PRICES)
    (root / "poc.yaml").write_text(CONTRACT.replace("prices: prices.yaml\n", ""))
    load = ("qa", *SIM, "--request-rate", "5", "--duration", "20s")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RATE", "5")
        assert exits("validate", root / "poc.yaml", *SIM, "--out", root / "validation") in (0, 3)
    exits("run", *load, "--out", root / "run")
    exits("run", *load, "--repeat", "2", "--out", root / "repeats")
    exits(
        "sweep",
        "qa",
        *SIM,
        "--request-rate",
        "2,4",
        "--duration",
        "20s",
        "--slo",
        "ttft:2s",
        "--out",
        root / "sweep",
    )
    exits(
        "search",
        "qa",
        *SIM,
        "--slo",
        "ttft:1s",
        "--duration",
        "20s",
        "--max-probes",
        "3",
        "--out",
        root / "search",
    )
    exits(
        "mlperf",
        "server",
        *SIM,
        "--benchmark",
        "llama2-70b",
        "--target-qps",
        "20",
        "--min-duration",
        "1",
        "--out",
        root / "mlperf",
    )
    return root


def bundled(folder: Path, to: Path) -> Path:
    path = to / f"{folder.name}.zip"
    write_bundle(folder, path)
    return path


@pytest.mark.parametrize(
    ("kind", "files"),
    [
        ("run", {"summary.json"}),
        ("repeats", {"repeats.json", "r1/summary.json", "r2/summary.json"}),
        (
            "sweep",
            {
                "sweep.md",
                "report.html",
                "curve.csv",
                "capacity.json",
                "probes.jsonl",
                "r2/summary.json",
            },
        ),
        ("search", {"search.json", "curve.csv", "capacity.json", "probes.jsonl"}),
        ("validation", {"verdict.json", "verdict.html", "junit.xml", "steady/r1/summary.json"}),
        (
            "mlperf",
            {"mlperf.json", "mlperf_log_summary.txt", "mlperf_log_detail.txt", "summary.json"},
        ),
    ],
)
def test_every_derived_file_of_a_bundle_is_reproduced(
    results_dir: Path, tmp_path: Path, kind: str, files: set[str]
) -> None:
    verification = verify_bundle(bundled(results_dir / kind, tmp_path))

    assert (verification.verified, verification.differences, verification.skipped) == (
        "all",
        (),
        {},
    )
    assert files <= {checked_file.file for checked_file in verification.reproduced} and all(
        checked_file.same for checked_file in verification.reproduced
    )
    assert verification.manifest.kind == ("run" if kind == "mlperf" else kind)
    assert as_text.render(report(verification)).startswith("VERIFIED: all ")


# -- a change is found and named -------------------------------------------------------------------


def changed(
    bundle: Path, name: str, change: Callable[[bytes], bytes] | None, *, hashes: bool = True
) -> Path:
    """Return a copy of a bundle with one file changed, or removed if `change` is None.

    With `hashes`, the list of hashes is written again, as a forger would do.
    """
    with zipfile.ZipFile(bundle) as old:
        files = {entry: old.read(entry) for entry in old.namelist()}
    before = files.pop(name)
    if change is not None:
        files[name] = change(before)
        assert files[name] != before
    if hashes:
        listed = {
            entry: data for entry, data in files.items() if not entry.startswith("SHA256SUMS")
        }
        sums = "".join(
            f"{hashlib.sha256(data).hexdigest()}  {entry}\n" for entry, data in listed.items()
        )
        files["SHA256SUMS"] = sums.encode()
    path = bundle.with_name("changed.zip")
    archive.write_archive(path, dict(files))
    return path


def edited(*keys: str | int, to: object) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        document = part = json.loads(data)
        for key in keys[:-1]:
            part = part[key]
        part[keys[-1]] = to
        return json.dumps(document).encode()

    return change


NUMBER = edited("ttft_ms", "p99", to=1.5)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("kind", "name", "change", "at"),
    [
        ("run", "summary.json", NUMBER, "ttft_ms.p99"),
        ("run", "summary.json", edited("verdict", "valid", to=False), "verdict.valid"),
        (
            "run",
            "summary.json",
            edited("verdict", "warnings", to=["all is well"]),
            "verdict.warnings",
        ),
        ("run", "summary.json", edited("praise", to="the best"), "praise"),
        ("repeats", "repeats.json", edited("figures", 0, "high", to=0.1), "figures[0].high"),
        ("repeats", "r2/summary.json", NUMBER, "ttft_ms.p99"),
        ("sweep", "sweep.md", lambda data: data.replace(b"TTFT", b"ttft"), "line"),
        ("sweep", "capacity.json", edited("rate_per_s", to=400.0), "rate_per_s"),
        ("search", "search.json", edited("answer", "held", to=999.0), "answer.held"),
        ("search", "curve.csv", lambda data: data.replace(b"under", b"over "), "line"),
        (
            "validation",
            "verdict.json",
            edited("levels", 0, "terms", 1, "low", to=99.0),
            "levels[0].terms[1].low",
        ),
        ("validation", "verdict.json", edited("sentence", to="3 of 3 terms passed"), "sentence"),
        ("validation", "verdict.html", lambda data: data.replace(b"terms", b"TERMS"), "line"),
        ("mlperf", "mlperf.json", edited("checks", 0, "value_ns", to=1), "checks[0].value_ns"),
        (
            "mlperf",
            "mlperf_log_summary.txt",
            lambda data: data.replace(b"Result is", b"Result was"),
            "line",
        ),
    ],
)
def test_a_changed_value_or_sentence_is_detected_even_with_a_new_hash(
    results_dir: Path,
    tmp_path: Path,
    kind: str,
    name: str,
    change: Callable[[bytes], bytes],
    at: str,
) -> None:
    verification = verify_bundle(
        changed(bundled(results_dir / kind, tmp_path), f"result/{name}", change)
    )
    assert verification.verified == "no"
    named = [(mismatch.file, mismatch.location) for mismatch in verification.differences]
    assert any(file == f"result/{name}" and place.startswith(at) for file, place in named), named


@pytest.mark.processes
def test_a_changed_byte_of_the_records_is_detected(
    results_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "result/requests/requests.parquet"
    path = changed(
        bundled(results_dir / "run", tmp_path),
        name,
        lambda data: data[:5000] + b"\x01" + data[5001:],
        hashes=False,
    )

    assert exits("verify", path) == 1
    stdout = " ".join(capsys.readouterr().out.split())
    assert f"{name} does not have" in stdout and "NOT VERIFIED" in stdout


@pytest.mark.processes
def test_records_of_another_run_do_not_reproduce_the_metrics(
    results_dir: Path, tmp_path: Path
) -> None:
    other = (results_dir / "repeats" / "r2" / "requests" / "requests.parquet").read_bytes()
    path = changed(
        bundled(results_dir / "run", tmp_path), "result/requests/requests.parquet", lambda _: other
    )
    assert any(
        mismatch.location.startswith("ttft_ms") for mismatch in verify_bundle(path).differences
    )


@pytest.mark.processes
def test_missing_and_damaged_files_of_a_bundle_are_named_without_a_traceback(
    results_dir: Path, tmp_path: Path
) -> None:
    bundle = bundled(results_dir / "validation", tmp_path)
    gone_verification = verify_bundle(changed(bundle, "result/verdict.html", None))

    assert [(mismatch.file, mismatch.code) for mismatch in gone_verification.differences] == [
        ("result/verdict.html", "missing")
    ]

    for name in (
        "steady/r1/requests/requests.parquet",
        "steady/r1/run.json",
        "target.json",
        "contract.yaml",
    ):
        damaged = changed(bundle, f"result/{name}", lambda _: b"\x00\xff")
        verification = verify_bundle(damaged)
        assert verification.verified == "no" and verification.differences, name


def test_a_file_that_cannot_be_reproduced_is_named(results_dir: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(results_dir / "run", folder)
    (folder / "praise.html").write_text("VALID, and the fastest")
    verification = verify_bundle(bundled(folder, tmp_path))

    assert verification.verified == "part" and list(verification.skipped) == ["praise.html"]

    shutil.copytree(results_dir / "search", folder := tmp_path / "search")
    (folder / "SHA256SUMS").unlink()
    capacity = json.loads((results_dir / "sweep" / "capacity.json").read_text())
    (folder / "capacity.json").write_text(json.dumps(capacity | {"rate_per_s": 400.0}))
    verification = verify_bundle(bundled(folder, tmp_path))

    assert "result/capacity.json" in {mismatch.file for mismatch in verification.differences}


# -- what goes in ----------------------------------------------------------------------------------


def test_a_bundle_has_no_prompt_text_unless_requested(results_dir: Path, tmp_path: Path) -> None:
    folder = tmp_path / "official"
    shutil.copytree(results_dir / "mlperf", folder)
    (folder / "SHA256SUMS").unlink()
    (folder / "mlperf_requests.jsonl").write_text('{"prompt": "the secret question"}\n')
    for content in (False, True):
        path = tmp_path / f"{content}.zip"
        manifest = write_bundle(folder, path, with_texts=content)
        with zipfile.ZipFile(path) as bundle_zip:
            assert ("result/mlperf_requests.jsonl" in bundle_zip.namelist()) is content
            assert (
                any(b"secret question" in bundle_zip.read(name) for name in bundle_zip.namelist())
                is content
            )
        assert ("mlperf_requests.jsonl" in manifest.omitted_files) is not content
        assert verify_bundle(path).verified == "all"


def test_a_contract_with_variables_is_judged_with_their_values(results_dir: Path) -> None:
    """The other side does not have them."""
    assert "${RATE}" in (results_dir / "validation" / "contract.yaml").read_text()
    assert (
        json.loads((results_dir / "validation" / "contract.resolved.yaml").read_text())["levels"][
            0
        ]["rate"]
        == "5/s"
    )


def test_validate_writes_a_bundle_of_its_result(
    results_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "poc.zip"
    assert exits("validate", results_dir / "validation", "--bundle", path) in (0, 3)
    assert exits("verify", path, "--json") == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out[captured.out.index('{\n  "schema"') :])["verified"] == "all"
    assert "not signed" in captured.err


def test_a_changed_folder_and_one_without_a_result_are_refused(
    results_dir: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(results_dir / "run", folder)
    (folder / "summary.json").write_bytes(NUMBER((folder / "summary.json").read_bytes()))

    with pytest.raises(UserError, match=r"summary\.json"):
        write_bundle(folder, tmp_path / "x.zip")
    with pytest.raises(UserError, match="oracle/folders"):
        write_bundle(FOLDERS, tmp_path / "x.zip")
    (tmp_path / "x.zip").write_text("")
    with pytest.raises(UserError, match="exists"):
        write_bundle(results_dir / "run", tmp_path / "x.zip")


# -- nothing in a file is trusted ------------------------------------------------------------------


def hostile(
    to: Path, *entries: tuple[str, bytes], manifest: bytes | None = None, mode: int = 0o644
) -> Path:
    path = to / "hostile.zip"
    run_manifest = {"kind": "run", "name": "x", "made": "", "version": "0", "schema": 1}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("bundle.json", json.dumps(run_manifest) if manifest is None else manifest)
        for name, data in entries:
            entry = zipfile.ZipInfo(name)
            entry.external_attr, entry.compress_type = mode << 16, zipfile.ZIP_DEFLATED
            file.writestr(entry, data)
    return path


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize(
    ("entries", "mode", "expected_text"),
    [
        ([("../../evil", b"x")], 0o644, "outside the directory"),
        ([("result/../../evil", b"x")], 0o644, "outside the directory"),
        ([("/etc/evil", b"x")], 0o644, "outside the directory"),
        ([("result\\..\\evil", b"x")], 0o644, "outside the directory"),
        ([("C:/evil", b"x")], 0o644, "outside the directory"),
        ([("result/link", b"/etc/passwd")], 0o120777, "not a regular file"),
        ([("setup.py", b"x")], 0o644, "not part of a bundle"),
        ([("result/run.json", b"{}"), ("result/run.json", b"[]")], 0o644, "more than one file"),
    ],
)
def test_paths_that_lead_outside_the_bundle_are_refused(
    tmp_path: Path, entries: list[tuple[str, bytes]], mode: int, expected_text: str
) -> None:
    inside = tmp_path / "a" / "b"
    inside.mkdir(parents=True)

    with pytest.raises(UserError, match=expected_text):
        archive.unpack_archive(hostile(tmp_path, *entries, mode=mode), inside)
    assert (
        not list(inside.iterdir())
        and not (tmp_path / "evil").exists()
        and not (tmp_path / "a" / "evil").exists()
    )


def test_a_decompression_bomb_is_not_unpacked(tmp_path: Path) -> None:
    """The directory of the archive announces a gigabyte, so that no byte need be unpacked."""
    path = tmp_path / "bomb.zip"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("bundle.json", "{}")
        file.writestr("result/zeros", bytes(5 << 20))
        file.filelist[1].file_size = 1100 << 20  # as if they were compressed
    with pytest.raises(UserError, match=r"1\.15 GB.* 220 "):
        archive.unpack_archive(path, tmp_path)


def zipped(name: bytes, method: int) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archived:
        archived.writestr("bundle.json", "{}")
        archived.writestr(name.decode(), "{}")
    return file.getvalue()


@pytest.mark.parametrize(
    ("data", "expected_text"),
    [
        (b"", "not a bundle"),
        (b"PK\x03\x04 and no more", "not a bundle"),
        (b"name: a workload\n", "not a bundle"),
        (
            zipped(b"result/\xc3\xa9", zipfile.ZIP_STORED).replace(b"\xc3\xa9", b"\xff\xa9"),
            "can't decode byte 0xff",
        ),
        (zipped(b"result/a", zipfile.ZIP_LZMA), "unsupported compression"),
        (zipped(b"result/a", zipfile.ZIP_BZIP2), "unsupported compression"),
        (
            zipped(b"result/a", zipfile.ZIP_STORED).replace(b"result/a", b"\0esult/a"),
            "not a bundle",
        ),
    ],
)
def test_a_file_that_is_no_bundle_is_refused(
    tmp_path: Path, data: bytes, expected_text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "poc.zip"
    path.write_bytes(data)
    assert exits("verify", path) == 2
    assert expected_text in capsys.readouterr().err


def test_a_missing_file_or_a_directory_is_refused_as_a_bundle(
    results_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exits("verify", tmp_path / "none.zip") == 2
    assert exits("verify", results_dir / "run") == 2
    assert f"loadgen bundle {results_dir / 'run'} -o run.zip" in capsys.readouterr().err

    bundle = bundled(results_dir / "run", tmp_path)
    cut = tmp_path / "cut.zip"
    cut.write_bytes(bundle.read_bytes()[:-500])

    assert exits("verify", cut) == 2

    with zipfile.ZipFile(tmp_path / "plain.zip", "w") as file:
        file.writestr("readme.txt", "hello")
    with pytest.raises(UserError, match=r"bundle\.json"):
        verify_bundle(tmp_path / "plain.zip")
    with pytest.raises(UserError, match=r"loadgen-verify-.*/result"):
        verify_bundle(hostile(tmp_path, ("result/readme.txt", b"hello")))


def test_a_bundle_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    manifest = {"kind": "run", "name": "x", "made": "", "version": "9", "schema": 2}
    path = hostile(tmp_path, ("result/run.json", b"{}"), manifest=json.dumps(manifest).encode())
    with pytest.raises(UserError, match=r"hostile\.zip"):
        verify_bundle(path)


def test_another_version_may_change_sentences_but_not_values() -> None:
    stored, recomputed = (
        b'{"a": 1.0, "why": "too few requests", "code": "few"}',
        b'{"a": 1, "why": "few", "code": "few"}',
    )

    assert [
        mismatch.location for mismatch in compare_file("x.json", stored, recomputed).differences
    ] == ["why"]

    longer = recomputed.replace(b'"few", "code"', b'"there are too few", "code"').replace(
        b"}", b', "more": 2}'
    )

    assert compare_file("x.json", stored, longer, is_other_version=True).differences == ()
    assert [
        mismatch.location for mismatch in compare_file("x.json", stored, longer).differences
    ] == [
        "why",
        "more",
    ]

    other = compare_file(
        "x.json", stored, recomputed.replace(b": 1", b": 1.001"), is_other_version=True
    ).differences

    assert {mismatch.location for mismatch in other} == {"a", "why"}


# -- signatures ------------------------------------------------------------------------------------


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, Path]:
    if shutil.which("ssh-keygen") is None:
        pytest.skip("no ssh-keygen")
    for name in ("own", "other"):
        key = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(tmp_path / name)]
        subprocess.run(key, check=True)
    return tmp_path / "own", tmp_path / "other"


@pytest.mark.processes
def test_a_signature_is_verified_only_by_its_key(
    results_dir: Path, tmp_path: Path, keys: tuple[Path, Path]
) -> None:
    key, other = keys
    path = tmp_path / "poc.zip"
    write_bundle(results_dir / "run", path, key=key)
    verification = verify_bundle(path)

    assert (verification.verified, verification.signature) == (
        "all",
        "some key",
    ) and verification.signed_by.startswith("ED25519 SHA256:")
    assert "--signed-by KEY.pub" in as_text.render(report(verification))
    signed_verification = verify_bundle(path, signed_by=key.with_suffix(".pub"))
    assert (signed_verification.verified, signed_verification.signature) == ("all", "given key")
    wrong_verification = verify_bundle(path, signed_by=other.with_suffix(".pub"))
    assert (wrong_verification.verified, wrong_verification.signature) == ("no", "other key")


@pytest.mark.processes
def test_a_change_invalidates_the_signature_even_with_new_hashes(
    results_dir: Path, tmp_path: Path, keys: tuple[Path, Path]
) -> None:
    path = tmp_path / "poc.zip"
    write_bundle(results_dir / "run", path, key=keys[0])
    verification = verify_bundle(changed(path, "result/seconds.jsonl", lambda data: data + b"\n"))
    assert (verification.verified, verification.signature, verification.differences) == (
        "no",
        "broken",
        (),
    )


def test_invalid_signing_keys_are_refused(
    results_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        exits("bundle", results_dir / "run", "-o", tmp_path / "x.zip", "--sign", tmp_path / "none")
        == 2
    )
    assert "ssh-keygen -t ed25519" in capsys.readouterr().err
    path = bundled(results_dir / "run", tmp_path)
    assert exits("verify", path, "--signed-by", tmp_path / "none.pub") == 2
    assert "not signed" in capsys.readouterr().err


def test_the_report_of_a_verification_states_its_outcome() -> None:
    manifest = archive.Manifest(
        kind="run",
        name="r1",
        created="2026-11-29T22:00:00+00:00",
        version="1.0.0",
        omitted_files={"report.html": "a page, which `loadgen report` can write again"},
    )
    verification = Verification(
        bundle="poc.zip",
        manifest=manifest,
        verified="no",
        files=14,
        reproduced=(CheckedFile(file="summary.json", basis="records", same=1250, differs=1),),
        skipped={"notes.txt": "not a file of loadgen; only its hash was checked"},
        differences=(
            Mismatch(
                file="result/summary.json",
                location="ttft_ms.p99",
                stored="1.5",
                regenerated="152.9",
            ),
        ),
        signature="some key",
        signed_by="ED25519 SHA256:abc",
    )
    check_golden("verify_brief", as_text.render(report(verification)))
    check_golden("verify_full", as_text.render(report(verification), full=True))
