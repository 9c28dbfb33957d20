"""Every parser survives damaged input: stored inputs of fuzzing, and new damage to them."""

from __future__ import annotations

from pathlib import Path

import pytest
from expected_errors import refused
from fuzz_targets import ROOT, TARGETS, corpus, run_target
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import loadgen
from loadgen.core import run_folder
from loadgen.core.errors import UserError
from loadgen.core.results import store

PIECES = st.one_of(
    st.binary(max_size=8),
    st.sampled_from(
        [
            b"null",
            b"-1",
            b"1e999",
            b"NaN",
            b"[]",
            b"{}",
            b'""',
            b"\\ud800",
            b"\xff\xfe",
            b"[" * 3000,
            b"\0",
        ]
    ),
    st.integers(10**17, 10**25).map(lambda number: str(number).encode()),
)


@st.composite
def damaged(draw: st.DrawFn, name: str) -> bytes:
    """Return a stored input with a few places cut, doubled or replaced."""
    data = draw(st.sampled_from(corpus(name) or [b""]))
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(data)))
        end = min(start + draw(st.integers(0, 40)), len(data))
        data = data[:start] + draw(st.one_of(PIECES, st.just(data[start:end] * 2))) + data[end:]
    return data


def test_every_parser_has_a_seed_corpus() -> None:
    assert [name for name in TARGETS if not corpus(name)] == []
    assert [
        glob for _, globs in TARGETS.values() for glob in globs if not any(ROOT.glob(glob))
    ] == []


@pytest.mark.parametrize("name", TARGETS)
def test_stored_inputs_of_fuzzing_raise_only_reported_errors(name: str) -> None:
    for data in corpus(name):
        run_target(name, data)


@pytest.mark.parametrize("name", TARGETS)
def test_damaged_input_raises_only_reported_errors(name: str) -> None:
    @settings(
        max_examples=60,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(damaged(name))
    def holds(data: bytes) -> None:
        run_target(name, data)

    holds()


@pytest.mark.parametrize(
    ("name", "column"), [("dataset", b"prompt"), ("trace", b"TIMESTAMP"), ("folder", b"status")]
)
def test_a_parquet_column_whose_name_is_no_text_is_refused(name: str, column: bytes) -> None:
    """Of a damaged Parquet file: it was "a bug in loadgen"."""
    (data, *_) = (data for data in corpus(name) if b"PAR1" in data)
    assert run_target(name, data.replace(column, b"\xc9" * len(column)))


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("status", 9),
        ("kind", 250),
        ("input_source", 7),
        ("finish_reason", 99),
        ("due_ns", -5),
        ("sent_ns", 2**62),
    ],
)
def test_records_that_no_run_writes_are_refused(tmp_path: Path, column: str, value: int) -> None:
    """Of a damaged disk: each was "a bug in loadgen" in another place."""
    run = tmp_path / "run"
    loadgen.run("qa", url="sim:gb300-vm", request_rate="10", num_requests=20, out=run, seed=1)
    rows = store.read_run(run).rows.copy()
    (run / "requests" / store.MERGED).unlink()
    rows[column][3] = value
    (run / "spool").mkdir(exist_ok=True)
    (run / "spool" / "w0.rows").write_bytes(rows.tobytes())

    with refused(UserError, "damaged_file"):
        run_folder.open_run(run)


@pytest.mark.parametrize(
    ("sound", "damaged"), [(b'"ttft"', b'"qtft"'), (b'"quantile": 0.95', b'"quantile": 9.5')]
)
def test_a_header_with_an_impossible_slo_is_refused(sound: bytes, damaged: bytes) -> None:
    """It was "a bug in loadgen"."""
    data = corpus("folder")[0]
    assert sound in data
    assert run_target("folder", data.replace(sound, damaged))
