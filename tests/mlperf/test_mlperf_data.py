"""The synthetic set's shape, LoadGen's order of issue, and official files that are good, damaged or hostile."""

from __future__ import annotations

import gzip
import json
import pickle
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import places
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from refusals import refused

from loadgen.core.errors import FAULTS_SHOWN, Faults, UserError
from loadgen.mlperf import dataset, pickle_reader, rules

DATA = places.DATA
LLAMA = rules.rules().benchmarks["llama2-70b"]


def read(path: Path) -> dataset.File:
    return dataset.read_dataset(path, LLAMA, benchmark="llama2-70b")


@pytest.mark.parametrize("benchmark", rules.rules().benchmarks)
def test_synthetic_sets_have_the_published_size_means_and_maxima(benchmark: str) -> None:
    found = rules.rules().benchmarks[benchmark]
    made = dataset.synthetic(found, benchmark=benchmark)
    assert len(made.input) == len(made.output) == found.samples
    assert round(float(made.output.mean()), 2) == found.mean_output
    assert round(float(made.input.mean()), 1) == found.mean_input
    assert (made.output.max() <= found.max_output) & (made.input.max() <= found.max_input)
    assert (made.output.min() >= 2) & (made.input.min() >= 4)
    assert abs(np.corrcoef(made.input, made.output)[0, 1]) < 0.05
    assert "not MLPerf's data" in made.name


def test_the_mean_output_of_a_published_row_can_be_asked() -> None:
    made = dataset.synthetic(LLAMA, benchmark="llama2-70b", mean_output=276.56)
    assert round(float(made.output.mean()), 2) == 276.56
    with pytest.raises(UserError, match="1024"):
        dataset.synthetic(LLAMA, benchmark="llama2-70b", mean_output=1024)


def test_order_of_issue_is_loadgens() -> None:
    """The first samples that the official LoadGen 6.0.17 issued with 600 samples and the seeds of v6.1."""
    asked = structs.replace(rules.test("llama2-70b", "server", "v6.1"), samples=600)
    order = dataset.issue_order(asked)
    assert order[:10] == [13, 556, 333, 533, 227, 202, 435, 350, 225, 458]
    assert sorted(order) == list(range(600))
    loaded = dataset.issue_order(structs.replace(asked, scenario="offline"))
    assert loaded[:6] == [216, 267, 112, 232, 498, 580]


@pytest.mark.parametrize("name", ["mlperf_pandas1.pkl", "mlperf_pandas2.pkl", "mlperf_pandas3.pkl"])
def test_frames_pickled_by_three_pandas(name: str) -> None:
    found = read(DATA / name)
    assert found.prompts == ([1, 5, 9], [1, 7], [1, 2, 3, 4])
    assert found.tokens
    assert "3 of 3 rows" in found.name


ROWS = [{"prompt": "a b", "output_tokens": 3}, {"prompt": "c", "output_tokens": 2}]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet", ".pkl", ".pkl.gz"])
def test_other_formats(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"set{suffix}"
    if suffix == ".jsonl":
        path.write_text("\n".join(map(json.dumps, ROWS)))
    elif suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist([row | {"else": 1} for row in ROWS]), path)
    else:
        data = pickle.dumps(ROWS)
        path.write_bytes(gzip.compress(data) if suffix.endswith("gz") else data)
    assert read(path).prompts == ("a b", "c")


@pytest.mark.parametrize("protocol", range(2, 6))
def test_columns_of_arrays_and_numbers_of_numpy(tmp_path: Path, protocol: int) -> None:
    path = tmp_path / "set.pkl"
    inputs = np.array([[1, 2], [3, 4]], ">i4")
    rows = [{"tok_input": inputs[row], "output_tokens": np.int64(row + 5)} for row in (0, 1)]
    path.write_bytes(pickle.dumps(rows, protocol))
    assert read(path).prompts == ([1, 2], [3, 4])
    path.write_bytes(
        pickle.dumps({"tok_input": inputs, "output_tokens": np.array([5, 6])}, protocol)
    )
    assert read(path).prompts == ([1, 2], [3, 4])


class Hostile:
    def __reduce__(self) -> Any:
        import os

        return os.system, ("touch /tmp/loadgen-was-here",)


class Sneaky:
    """A known name with an attribute path behind it."""

    def __reduce__(self) -> Any:
        return np.ndarray.tofile, ()


def test_a_gzipped_pickle_is_unpacked_to_a_bound(tmp_path: Path) -> None:
    (tmp_path / "a.pkl").write_bytes(gzip.compress(pickle.dumps([{"text": "x" * 1_000_000}])))
    assert len(pickle_reader.read_pickle(tmp_path / "a.pkl")["text"][0]) == 1_000_000
    with refused(UserError, "too_large"):
        pickle_reader.read_pickle(tmp_path / "a.pkl", most_bytes=100_000)


@pytest.mark.parametrize(
    "op", [pickle.BYTEARRAY8, pickle.BINBYTES8, pickle.BINUNICODE8, pickle.FRAME]
)
def test_a_length_that_is_a_lie_takes_no_memory(tmp_path: Path, op: bytes) -> None:
    (tmp_path / "a.pkl").write_bytes(
        pickle.PROTO + b"\x05" + op + (1 << 31).to_bytes(8, "little") + b"short"
    )
    tracemalloc.start()
    try:
        with refused(UserError, "damaged_file"):
            read(tmp_path / "a.pkl")
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("name", "data", "code"),
    [
        ("a.pkl", pickle.dumps(Hostile()), "unsafe_file"),
        ("a.pkl", pickle.dumps([Sneaky()]), "unsafe_file"),
        ("a.pkl", pickle.dumps(ROWS)[:-9], "damaged_file"),
        ("a.pkl", b"", "damaged_file"),
        ("a.pkl", pickle.dumps(7), "damaged_file"),
        ("a.parquet", b"PAR1 nonsense", "damaged_file"),
        ("a.jsonl", b'{"prompt": "a"}\n{"prompt"', "invalid_syntax"),
        ("a.jsonl", b'{"text": "a"}', "missing_key"),
        ("a.jsonl", b"", "missing_key"),
        ("a.jsonl", b'{"tok_input": [1, -2]}', "wrong_type"),
        ("a.jsonl", json.dumps({"tok_input": [1] * 1025}).encode(), "out_of_range"),
        ("a.jsonl", b'{"prompt": "a"}\n{"prompt": [1]}', "wrong_type"),
        ("a.csv", b"prompt\na\n", "wrong_format"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, name: str, data: bytes, code: str) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    with refused((UserError, Faults), code) as caught:
        read(path)
    assert name in str(caught.value)


def test_long_rows_are_told_all_at_once(tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    path.write_text("\n".join(json.dumps({"tok_input": [1] * 2000}) for _ in range(50)))
    with pytest.raises(Faults) as caught:
        read(path)
    assert len(caught.value.faults) == FAULTS_SHOWN + 1


@given(st.data())
def test_damaged_pickles_raise_nothing_else(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    good = bytearray((DATA / "mlperf_pandas2.pkl").read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "damaged.pkl"
    path.write_bytes(bytes(good))
    try:
        read(path)
    except (UserError, Faults):
        pass
