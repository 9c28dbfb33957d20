"""The synthetic data set, LoadGen's sample order, and official files, damaged ones included."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import repository_paths
from expected_errors import refused
from msgspec import structs

from loadgen.core.errors import MAX_ERRORS, CombinedError, UserError
from loadgen.mlperf import dataset, rules

DATA = repository_paths.DATA
LLAMA = rules.load_rules().benchmarks["llama2-70b"]


def read(path: Path) -> dataset.DatasetFile:
    return dataset.read_dataset(path, LLAMA, benchmark_name="llama2-70b")


@pytest.mark.parametrize("benchmark", rules.load_rules().benchmarks)
def test_synthetic_sets_have_the_published_size_means_and_maxima(benchmark: str) -> None:
    benchmark_rules = rules.load_rules().benchmarks[benchmark]
    lengths = dataset.synthetic_lengths(benchmark_rules, benchmark_name=benchmark)

    assert len(lengths.input) == len(lengths.output) == benchmark_rules.samples
    assert round(float(lengths.output.mean()), 2) == benchmark_rules.mean_output
    assert round(float(lengths.input.mean()), 1) == benchmark_rules.mean_input
    assert (lengths.output.max() <= benchmark_rules.max_output) & (
        lengths.input.max() <= benchmark_rules.max_input
    )
    assert (lengths.output.min() >= 2) & (lengths.input.min() >= 4)
    assert abs(np.corrcoef(lengths.input, lengths.output)[0, 1]) < 0.05
    assert "not MLPerf's data" in lengths.name


def test_the_mean_output_of_a_synthetic_set_can_be_specified() -> None:
    lengths = dataset.synthetic_lengths(LLAMA, benchmark_name="llama2-70b", mean_output=276.56)
    assert round(float(lengths.output.mean()), 2) == 276.56
    with pytest.raises(UserError, match="1024"):
        dataset.synthetic_lengths(LLAMA, benchmark_name="llama2-70b", mean_output=1024)


def test_the_order_of_issue_equals_that_of_mlperf_loadgen() -> None:
    """The first samples equal those of LoadGen 6.0.17 with 600 samples and the seeds of v6.1."""
    mlperf_test = structs.replace(rules.create_test("llama2-70b", "server", "v6.1"), samples=600)
    order = dataset.issue_order(mlperf_test)
    assert order[:10] == [13, 556, 333, 533, 227, 202, 435, 350, 225, 458]
    assert sorted(order) == list(range(600))
    loaded = dataset.issue_order(structs.replace(mlperf_test, scenario="offline"))
    assert loaded[:6] == [216, 267, 112, 232, 498, 580]


ROWS = [{"prompt": "a b", "output_tokens": 3}, {"prompt": "c", "output_tokens": 2}]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_data_sets_in_jsonl_and_parquet_are_read(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"set{suffix}"
    if suffix == ".jsonl":
        path.write_text("\n".join(map(json.dumps, ROWS)))
    else:
        pq.write_table(pa.Table.from_pylist([row | {"else": 1} for row in ROWS]), path)
    assert read(path).prompts == ("a b", "c")


class Hostile:
    def __reduce__(self) -> Any:
        import os

        return os.system, ("touch /tmp/loadgen-was-here",)


@pytest.mark.parametrize(
    ("name", "data", "code"),
    [
        ("a.pkl", pickle.dumps(Hostile()), "unsafe_file"),
        ("a.pkl", b"", "unsafe_file"),
        ("a.pickle.gz", b"", "unsafe_file"),
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
def test_invalid_data_files_are_refused(tmp_path: Path, name: str, data: bytes, code: str) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    with refused((UserError, CombinedError), code) as exc_info:
        read(path)
    assert name in str(exc_info.value)


def test_rows_that_are_too_long_are_reported_together_up_to_a_limit(tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    path.write_text("\n".join(json.dumps({"tok_input": [1] * 2000}) for _ in range(50)))
    with pytest.raises(CombinedError) as exc_info:
        read(path)
    assert len(exc_info.value.errors) == MAX_ERRORS + 1
