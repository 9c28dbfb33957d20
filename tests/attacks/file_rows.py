"""Attacks by files: damaged data sets, traces, records, bundles and pickles. All are refused."""

from __future__ import annotations

import io
import os
import pickle
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import repository_paths
from scene import LENIENT, NOTHING, UNHARMED, Row, Scene, unhurried

from loadgen.bundle.bundle_writer import write_bundle

SEND = f"--url {{url}} -c 10 -n 40 --warmup 0 --server-metrics off --energy off --out out {LENIENT}"
DATASET = f"run --dataset a.parquet {SEND}"
TRACE = "run --trace a.parquet --url {url} --server-metrics off --energy off --out out"
ACCURACY = "mlperf accuracy -b llama2-70b --dataset a.parquet --url {url} --tokenizer t --out out"
VERIFY, REPORT = "verify b.zip", "report run"
ROWS, TEXT = 50, "one and one?"
Damage = Callable[[bytes], bytes]


# -- Parquet --


def _written(table: pa.Table) -> bytes:
    with io.BytesIO() as file:
        pq.write_table(table, file)
        return file.getvalue()


def _sound() -> bytes:
    return _written(pa.table({"prompt": [f"{TEXT} {n}" for n in range(ROWS)]}))


def _footer(data: bytes) -> tuple[bytes, bytes]:
    """Return the file up to its footer, and the footer."""
    size = int.from_bytes(data[-8:-4], "little")
    return data[: -8 - size], data[-8 - size : -8]


def _with_footer(data: bytes, footer: bytes) -> bytes:
    return data + footer + len(footer).to_bytes(4, "little") + b"PAR1"


def _long(value: int) -> bytes:
    """Encode a number in Thrift's compact protocol, with the head of the next field."""
    rest, out = (value << 1) ^ (value >> 63), b"\x16"
    while rest > 127:
        out, rest = out + bytes([rest & 127 | 128]), rest >> 7
    return out + bytes([rest])


def claims(rows: int) -> Damage:
    """Return a damage that makes a file claim so many rows."""

    def damage(data: bytes) -> bytes:
        before, footer = _footer(data)
        encoded = _long(pq.read_metadata(io.BytesIO(data)).num_rows)
        assert encoded in footer
        return _with_footer(before, footer.replace(encoded, _long(rows), 1))

    return damage


def junk_footer(data: bytes) -> bytes:
    before, footer = _footer(data)
    return _with_footer(before, b"\xee" * len(footer))


def bomb(_: bytes) -> bytes:
    """Return 200 GB of text in a kilobyte: every row is the one long entry of a dictionary."""
    entry = pa.DictionaryArray.from_arrays(
        pa.array(np.zeros(200_000, np.int32)), pa.array(["x" * (1 << 20)])
    )
    with io.BytesIO() as file:
        table = pa.table({"prompt": entry})
        with pq.ParquetWriter(file, table.schema, compression="zstd") as writer:
            writer.write_table(table)
        return file.getvalue()


def deep(_: bytes) -> bytes:
    value: object = TEXT
    for _level in range(900):
        value = [value]
    return _written(pa.table({"prompt": [value]}))


def long_list(_: bytes) -> bytes:
    """Return a file that claims a list of 2^31 numbers, by one number and its repetition."""
    file, value_count = io.BytesIO(), 1 << 20
    numbers = pa.ListArray.from_arrays(
        pa.array([0, value_count], pa.int32()), pa.array(np.zeros(value_count, np.int8))
    )
    pq.write_table(pa.table({"prompt": numbers}), file)
    before, footer = _footer(file.getvalue())
    encoded = _long(value_count)
    assert encoded in footer
    return _with_footer(before, footer.replace(encoded, _long(1 << 31)))


def groups(_: bytes) -> bytes:
    table = pa.table({"prompt": [TEXT]})
    with io.BytesIO() as file:
        with pq.ParquetWriter(file, table.schema) as writer:
            for _group in range(20_000):
                writer.write_table(table)
        return file.getvalue()


PARQUET: tuple[tuple[str, str, Damage, str], ...] = (
    ("cut", "cut in the middle", lambda data: data[: len(data) // 2], "magic bytes"),
    ("footer", "a footer of other bytes", junk_footer, "thrift"),
    (
        "footer-size",
        "a footer of 4 GiB, it says",
        lambda data: data[:-8] + b"\xff" * 4 + b"PAR1",
        "footer",
    ),
    ("encrypted", "encrypted, it says", lambda data: data[:-4] + b"PARE", "encrypted"),
    ("bomb", "200 GB in a kilobyte", bomb, "times the size"),
    ("list", "a list of 2^31 numbers in a kilobyte, it says", long_list, "times the size"),
    ("deep", "lists in lists, 900 deep", deep, "deep"),
    (
        "types",
        "prompts that are numbers",
        lambda _: _written(pa.table({"prompt": [1.5]})),
        "prompt is 1.5",
    ),
    (
        "bytes",
        "prompts that are no UTF-8",
        lambda _: _written(pa.table({"prompt": [b"\xff"]})),
        "prompt",
    ),
)


def _parquet(command: str, damage: Damage) -> Callable[[Scene], None]:
    def do(scene: Scene) -> None:
        (scene.folder / "a.parquet").write_bytes(damage(_sound()))
        scene.go(command)

    return do


# -- a stored run, and bundles of it --


def _stored(scene: Scene) -> Path:
    repository_paths.unpack("raw", scene.folder)
    run_dir = next(scene.folder.glob("*/run.json")).parent
    run_dir.rename(scene.folder / "run")
    return scene.folder / "run"


def records(command: str, damage: Damage) -> Callable[[Scene], None]:
    """Damage the records of a stored run."""

    def do(scene: Scene) -> None:
        run = _stored(scene)
        for name in ("summary.json", "SHA256SUMS"):
            (run / name).unlink(missing_ok=True)
        for file in (run / "requests").glob("*.parquet"):
            file.write_bytes(damage(file.read_bytes()))
        scene.go(command)

    return do


Entry = tuple[str, bytes, int]


def bundle(
    *entries: Entry, change: Callable[[dict[str, bytes]], object] = len
) -> Callable[[Scene], None]:
    """Verify a bundle of a valid run with additional entries and changed files.

    An entry is (name, content, mode).
    """

    def do(scene: Scene) -> None:
        write_bundle(_stored(scene), scene.folder / "sound.zip")
        with zipfile.ZipFile(scene.folder / "sound.zip") as sound:
            files = {name: sound.read(name) for name in sound.namelist()}
        change(files)
        with zipfile.ZipFile(scene.folder / "b.zip", "w", zipfile.ZIP_DEFLATED) as archive:
            for name, data, mode in (
                *((name, data, 0o100644) for name, data in files.items()),
                *entries,
            ):
                entry = zipfile.ZipInfo(name)
                entry.external_attr, entry.compress_type = mode << 16, zipfile.ZIP_DEFLATED
                with (
                    warnings.catch_warnings()
                ):  # of a name that is there twice, which is the attack
                    warnings.simplefilter("ignore")
                    archive.writestr(entry, data)
        inner = scene.folder / "a" / "b" / "c"
        inner.mkdir(parents=True)
        scene.go(VERIFY, {"TMPDIR": str(inner)})

    return do


def _each(suffix: str, damage: Damage) -> Callable[[dict[str, bytes]], object]:
    def change(files: dict[str, bytes]) -> None:
        names = [name for name in files if name.endswith(suffix)]
        assert names, sorted(files)
        files.update({name: damage(files[name]) for name in names})

    return change


def nested(_: bytes) -> bytes:
    return b'{"a":' * 200_000 + b"1" + b"}" * 200_000


def _many(files: dict[str, bytes]) -> None:
    files.update((f"result/{n}", b"") for n in range(200_001))


def _zeros(files: dict[str, bytes]) -> None:
    files["result/zeros"] = bytes(1200 << 20)


FILE = 0o100644
UNLIKE = "NOT VERIFIED"  # it is unpacked, read and held against its hashes
BUNDLES: tuple[tuple[str, str, str, Callable[[Scene], None]], ...] = (
    (
        "above",
        "a name that leads above the folder",
        "leads out",
        bundle(("result/../../../evil", b"x", FILE)),
    ),
    ("root", "a name from the root", "leads out", bundle(("/tmp/evil", b"x", FILE))),
    ("link", "a symbolic link", "a link", bundle(("result/link", b"/etc/passwd", 0o120777))),
    ("pipe", "a named pipe", "a link or device", bundle(("result/pipe", b"", 0o010644))),
    ("twice", "a name twice", "two files", bundle(("result/run.json", b"{}", FILE))),
    (
        "tangle",
        "a file that is a folder, too",
        "File exists",
        bundle(("result/run.json/x", b"x", FILE)),
    ),
    (
        "long",
        "a name of 5,000 letters",
        "name too long",
        bundle(("result/" + "x" * 5000, b"x", FILE)),
    ),
    ("many", "200,001 files", "more than a bundle has", bundle(change=_many)),
    ("bomb", "1.2 GB of zeros", "unpack to", bundle(change=_zeros)),
    (
        "nested",
        "a header of 200,000 levels",
        UNLIKE,
        bundle(change=_each("result/run.json", nested)),
    ),
    (
        "rows",
        "records that say that they are 2^40",
        UNLIKE,
        bundle(change=_each(".parquet", claims(1 << 40))),
    ),
    (
        "records",
        "records that are cut",
        UNLIKE,
        bundle(change=_each(".parquet", lambda data: data[:-9])),
    ),
)


# -- pickles --


class _Evil:
    """An object whose pickle creates a folder `pwned` where it is read."""

    def __reduce__(self) -> tuple[object, ...]:
        return (os.mkdir, ("pwned",))


def _npy() -> bytes:
    with io.BytesIO() as file:
        np.save(file, np.array([_Evil()], dtype=object), allow_pickle=True)
        return file.getvalue()


PICKLES: tuple[tuple[str, str, Callable[[], bytes]], ...] = (
    ("pkl", "a pickle that runs a command", lambda: pickle.dumps(_Evil())),
    ("npy", "an array of objects that run a command", _npy),
)
NO_TOOL = "the result of no known tool"
READERS: dict[str, tuple[str, str, str]] = {
    "dataset": (f"run --dataset {{file}} {SEND}", "not UTF-8", "not UTF-8"),
    "trace": (
        "run --trace {file} --url {url} --out out",
        "not a UTF-8 text file",
        "not a UTF-8 text file",
    ),
    "mlperf": (
        "mlperf accuracy -b llama2-70b --dataset {file} --url {url} --tokenizer t --out out",
        "a program that runs when it is read",
        "is no format of a data set",
    ),
    "answers": ("answers {file} --url {url} --out out", "not UTF-8", "not UTF-8"),
    "report": ("report {file}", NO_TOOL, NO_TOOL),
    "compare": ("compare {file} {file}", NO_TOOL, NO_TOOL),
    "verify": ("verify {file}", "not a bundle", "not a bundle"),
    "fit": ("fit {file} -o out.yaml", "not a UTF-8 text file", "not a UTF-8 text file"),
}


def unread(command: str, name: str, create_content: Callable[[], bytes]) -> Callable[[Scene], None]:
    def do(scene: Scene) -> None:
        (scene.folder / name).write_bytes(create_content())
        scene.go(command)

    return do


def among_records(scene: Scene) -> None:
    """Place pickles among the records and under their names."""
    run = _stored(scene)
    for name in ("requests/more.pkl", "requests/more.npy", "spool.pkl"):
        (run / name).write_bytes(pickle.dumps(_Evil()))
    scene.go("report run --json")


def rows() -> list[Row]:
    when = "it reads"
    attacks = [
        Row(
            f"parquet-{name}",
            f"data set: {attack}",
            DATASET,
            when,
            (2,),
            marker,
            NOTHING,
            _parquet(DATASET, damage),
            name in ("bomb", "list"),
        )
        for name, attack, damage, marker in PARQUET
    ]
    attacks.append(
        Row(
            "parquet-groups",
            "data set: 20,000 row groups",
            DATASET,
            when,
            (0,),
            "",
            UNHARMED,
            unhurried(_parquet(DATASET, groups)),
        )
    )
    for attack, damage in (
        ("2^40 rows, it says", claims(1 << 40)),
        ("-1 rows, it says", claims(-1)),
    ):
        # The rows that are there are read
        name = f"parquet-{'negative' if '-1' in attack else 'many'}-rows"
        attacks.append(
            Row(
                name,
                f"data set: {attack}",
                DATASET,
                when,
                (0,),
                "",
                UNHARMED,
                unhurried(_parquet(DATASET, damage)),
            )
        )
    for name in ("footer", "footer-size"):
        attack, damage = next(
            (attack, damage) for known, attack, damage, _ in PARQUET if known == name
        )
        attacks += [
            Row(
                f"trace-{name}",
                f"trace: {attack}",
                TRACE,
                when,
                (2,),
                "truncated or damaged",
                NOTHING,
                _parquet(TRACE, damage),
            ),
            Row(
                f"samples-{name}",
                f"official data set: {attack}",
                ACCURACY,
                when,
                (2,),
                "not Parquet",
                NOTHING,
                _parquet(ACCURACY, damage),
            ),
            Row(
                f"records-{name}",
                f"records: {attack}",
                REPORT,
                when,
                (2,),
                "cannot be read",
                NOTHING,
                records(REPORT, damage),
            ),
        ]
    attacks += [
        Row(
            f"bundle-{name}",
            f"bundle: {attack}",
            VERIFY,
            when,
            (1,) if marker == UNLIKE else (2,),
            marker,
            NOTHING,
            do,
        )
        for name, attack, marker, do in BUNDLES
    ]
    for reader, (command, *markers) in READERS.items():
        for (suffix, attack, create_content), marker in zip(PICKLES, markers, strict=True):
            command_line = command.replace("{file}", f"a.{suffix}")
            attacks.append(
                Row(
                    f"pickle-{reader}-{suffix}",
                    attack,
                    command_line,
                    when,
                    (2,),
                    marker,
                    NOTHING,
                    unread(command_line, f"a.{suffix}", create_content),
                )
            )
    attacks.append(
        Row(
            "pickle-folder",
            "pickles among the records",
            "report run --json",
            when,
            (0,),
            "",
            NOTHING,
            among_records,
        )
    )
    return attacks
