"""The unit of the times of a trace, and what of its rows is sent."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from command_line import exits

from loadgen.core.errors import CombinedError, UserError
from loadgen.core.requests.prompts import PromptTarget
from loadgen.core.requests.tokenizer import load_tokenizer
from loadgen.core.requests.trace_prompts import TracePrompts
from loadgen.core.workload import read_flags
from loadgen.core.workload.loading import workload_from_trace
from loadgen.core.workload.trace_units import decide_unit
from loadgen.core.workload.traces import read_trace

SECONDS = (0, 0.4, 0.9, 1.3, 4.9)


def write_jsonl(tmp_path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    file = tmp_path / "trace.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return file


def write_times(tmp_path: Path, times: Sequence[float], form: str = "jsonl") -> Path:
    """Write a trace with these times, as JSONL, CSV or Parquet."""
    rows = [{"timestamp": at, "input_length": 20, "output_length": 4} for at in times]
    if form == "jsonl":
        return write_jsonl(tmp_path, rows)
    file = tmp_path / f"trace.{form}"
    if form == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), file)
    else:
        lines = [",".join(map(str, row.values())) for row in rows]
        file.write_text("\n".join(["timestamp,input_length,output_length", *lines]) + "\n", "utf-8")
    return file


@pytest.mark.parametrize("form", ["jsonl", "csv", "parquet"])
@pytest.mark.parametrize("first", [0.0, 0.4, 1_234_500.0])
def test_times_are_seconds_if_any_row_has_a_fraction(
    tmp_path: Path, first: float, form: str
) -> None:
    trace = read_trace(write_times(tmp_path, [first + at for at in SECONDS], form))
    assert trace.due_ns[-1] == pytest.approx(4.9e9, abs=1)
    assert trace.time_unit.startswith("seconds")


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_whole_numbers_in_jsonl_and_parquet_are_milliseconds(tmp_path: Path, form: str) -> None:
    trace = read_trace(write_times(tmp_path, [0, 400, 900, 4_900], form))
    assert trace.due_ns[-1] == 4_900_000_000
    assert trace.time_unit.startswith("milliseconds")


def test_whole_numbers_in_csv_are_seconds(tmp_path: Path) -> None:
    assert read_trace(write_times(tmp_path, [0, 4, 49], "csv")).due_ns[-1] == 49_000_000_000


def test_an_implausible_rate_decides_for_the_other_unit() -> None:
    whole_seconds = np.arange(3_000) * 1_000_000  # read as if they were milliseconds
    assert decide_unit(whole_seconds).unit == "s"
    milliseconds_with_fractions = np.arange(300) * 5_000_250_000
    assert decide_unit(milliseconds_with_fractions).unit == "ms"
    assert decide_unit(np.zeros(5, np.int64)).unit == "ms"


@pytest.mark.parametrize("form", ["jsonl", "csv", "parquet"])
@pytest.mark.parametrize(("unit", "span_ns"), [("s", 9e9), ("ms", 9e6), ("us", 9e3), ("ns", 9)])
def test_an_option_states_the_time_unit_of_a_trace(
    tmp_path: Path, form: str, unit: Any, span_ns: float
) -> None:
    file = write_times(tmp_path, [0, 3, 9], form)
    assert read_trace(file, unit=unit).due_ns[-1] == span_ns
    workload = workload_from_trace(file, read_flags(trace_unit=unit))
    assert workload.stages[0].arrival.unit == workload.requests.unit == unit  # type: ignore[union-attr]


def test_a_time_unit_is_refused_for_a_format_that_defines_it(tmp_path: Path) -> None:
    row = {"chat_id": 1, "parent_chat_id": -1, "timestamp": 1.5, "input_length": 9}
    file = write_jsonl(tmp_path, [row | {"output_length": 3}])
    with pytest.raises(UserError) as exc_info:
        read_trace(file, unit="s")
    assert exc_info.value.code == "no_effect"


def test_an_unknown_time_unit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CombinedError) as exc_info:
        workload_from_trace(write_times(tmp_path, SECONDS), read_flags(trace_unit="min"))
    assert [fault.code for fault in exc_info.value.errors] == ["unknown_name"]


def test_a_run_prints_the_unit_that_it_assumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_times(tmp_path, SECONDS)
    assert exits("run", "--trace", file, "--url", "sim:gb300-vm", "--dry-run") == 0
    assert "read as seconds" in capsys.readouterr().out


def test_lengths_with_a_zero_fraction_are_whole_numbers(tmp_path: Path) -> None:
    rows = [{"timestamp": at, "input_length": 20.0, "output_length": 4.0} for at in SECONDS]
    trace = read_trace(write_jsonl(tmp_path, rows))
    assert trace.input_tokens.tolist() == [20] * 5
    assert trace.output_tokens.tolist() == [4] * 5


def test_a_trace_with_semicolons_is_refused_with_their_name(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text("timestamp;input_length;output_length\n0;1;1\n", "utf-8")
    with pytest.raises(UserError) as exc_info:
        read_trace(file)
    assert exc_info.value.code == "wrong_format" and "semicolon" in exc_info.value.hint


def prompts_of(file: Path) -> TracePrompts:
    return TracePrompts(read_trace(file), 1, 2, load_tokenizer(None), PromptTarget(models=("m",)))


def test_a_recorded_reason_to_stop_is_not_sent_as_a_stop_sequence(tmp_path: Path) -> None:
    call = {"t": 0.5, "type": "s", "model": "m", "in": 90, "out": 5, "hash_ids": [1, 2]}
    weka = {"id": "a", "block_size": 64, "requests": [call | {"stop": "tool_use"}]}
    assert prompts_of(write_jsonl(tmp_path, [weka]))[0].extra == {"model": "m"}
    mooncake = {"timestamp": 0, "input_length": 9, "output_length": 3}
    rows = [mooncake | {"stop": "length"}, mooncake | {"stop": ["###"]}]
    prompts = prompts_of(write_jsonl(tmp_path, rows))
    assert [prompts[number].extra for number in (0, 1)] == [{}, {"stop": ["###"]}]


def test_sessions_that_are_sent_as_unrelated_requests_cause_a_note(tmp_path: Path) -> None:
    calls = [
        {"t": at, "type": "n", "model": "m", "in": 90, "out": 5, "api_time": 0.5} for at in (0, 2)
    ]
    weka = {"id": "a", "block_size": 64, "requests": calls}

    assert any(
        "1 session " in note for note in prompts_of(write_jsonl(tmp_path, [weka])).warnings(2)
    )
    alone = {"id": "a", "block_size": 64, "requests": calls[:1]}
    assert not any(
        "session" in note for note in prompts_of(write_jsonl(tmp_path, [alone])).warnings(1)
    )
