"""Trace files: compressed, damaged, with bad rows, and their replay (formats: tests/interop)."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from expected_errors import refused
from hypothesis import given
from hypothesis import strategies as st
from trace_rows import mooncake, written

from loadgen.core.errors import CombinedError, LoadgenError, UserError
from loadgen.core.requests import tokenizer as tokens
from loadgen.core.requests.build import build_prompts
from loadgen.core.requests.prompts import PromptTarget
from loadgen.core.requests.trace_prompts import TracePrompts
from loadgen.core.schedule import arrivals
from loadgen.core.schedule.build import build_schedule
from loadgen.core.workload import (
    FromTrace,
    Replay,
    load,
    read_flags,
    recipe_fingerprint,
    trace_files,
    traces,
    workload_from_trace,
)

MS, S = 1_000_000, 1_000_000_000


@pytest.mark.parametrize("compression", ["gzip", "zstd"])
def test_compressed_and_truncated_traces_are_read(compression: str, tmp_path: Path) -> None:
    import pyarrow as pa

    plain = written(
        tmp_path / "t.jsonl",
        *(mooncake(number, 5 + number % 7, 1, number * 977) for number in range(5000)),
    )
    packed = tmp_path / "t.packed"
    with pa.output_stream(str(packed), compression=compression) as stream:
        stream.write(plain.read_bytes())
    assert (
        traces.read_trace(packed).input_tokens.tolist()
        == traces.read_trace(plain).input_tokens.tolist()
    )
    packed.write_bytes(packed.read_bytes()[:-100])
    with refused(LoadgenError, "damaged_file") as exc_info:
        traces.read_trace(packed)
    assert "t.packed" in str(exc_info.value) and "copy it again" in str(exc_info.value)


def test_a_compressed_line_above_the_size_limit_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl.gz").write_bytes(gzip.compress(b"{}\n" + b"x" * 1_000_000))
    with trace_files.open_lines(tmp_path / "t.jsonl.gz", max_characters=1_000_000) as lines:
        assert [number for number, _ in lines] == [1, 2]
    with (
        refused(UserError, "too_large", where="t.jsonl.gz:2"),
        trace_files.open_lines(tmp_path / "t.jsonl.gz", max_characters=1_000) as lines,
    ):
        list(lines)


def test_invalid_rows_are_skipped_and_counted_with_on_bad_row_skip(tmp_path: Path) -> None:
    rows = [
        mooncake(1, 5, 1),
        mooncake(2, -5, 1),
        "{broken",
        mooncake(0.5, 5, 1),
        mooncake(4e11, 7, 7),
        mooncake(9, 6, 2),
    ]
    path = written(tmp_path / "t", *rows)

    with pytest.raises(CombinedError) as exc_info:
        traces.read_trace(path)
    assert [(fault.where, fault.code) for fault in exc_info.value.errors] == [
        (f"{path}:2", "invalid_value"),
        (f"{path}:3", "invalid_syntax"),
        (f"{path}:4", "unordered"),
        (f"{path}:5", "out_of_range"),
    ]
    trace = traces.read_trace(path, skip_bad=True)
    assert (trace.due_ns.tolist(), trace.bad_rows) == ([0, 8 * MS], 4)
    notes = TracePrompts(trace, 1, 2, tokens.load_tokenizer(None)).warnings(2)
    assert any(f"{path}:2: input_length is -5" in note for note in notes)
    with refused(LoadgenError, "empty_file"):
        traces.read_trace(written(tmp_path / "u", mooncake(1, -5, 1)), skip_bad=True)


def test_errors_of_a_trace_are_reported_up_to_a_limit(tmp_path: Path) -> None:
    with pytest.raises(CombinedError) as exc_info:
        traces.read_trace(
            written(tmp_path / "t", mooncake(0, 5, 1), *(mooncake(1, 0, 1) for _ in range(50)))
        )
    assert len(exc_info.value.errors) == 21 and exc_info.value.errors[-1].code == "more_faults"
    with refused(LoadgenError, "missing_file"):
        traces.read_trace(tmp_path / "nowhere")
    (tmp_path / "latin").write_bytes(b"{\xff}")

    with refused(LoadgenError, "wrong_encoding"):
        traces.read_trace(tmp_path / "latin")


def test_prompts_of_a_trace_have_its_lengths_and_shared_beginnings(tmp_path: Path) -> None:
    rows = [
        mooncake(0, 1200, 5, 1, 2, 3),
        mooncake(1, 1300, 6, 1, 2, 4),
        mooncake(2, 700, 7, 9, 8),
        mooncake(3, 40, 8),
    ]
    trace, tokenizer = (
        traces.read_trace(written(tmp_path / "t", *rows)),
        tokens.load_tokenizer(None),
    )
    prompts = TracePrompts(trace, 5, 6, tokenizer)
    texts = [prompts[number].prompt for number in range(8)]

    assert all(isinstance(text, str) for text in texts)
    lengths = [tokenizer.count(str(text)) for text in texts]
    assert lengths == [1200, 1300, 700, 40] * 2
    assert [prompts[number].max_tokens for number in range(4)] == [5, 6, 7, 8]
    word_lists = [str(text).split(" ") for text in texts]
    assert (
        word_lists[0][:1024] == word_lists[1][:1024] and word_lists[0][1024] != word_lists[1][1024]
    )
    assert word_lists[0][0] != word_lists[2][0]
    assert word_lists[0][1] != word_lists[4][1]  # the second time round it is other text
    other = TracePrompts(trace, 5, 7, tokenizer)
    assert other[0].prompt != texts[0] and prompts[0] == TracePrompts(trace, 5, 6, tokenizer)[0]
    assert (
        tokenizer.count(
            str(TracePrompts(trace, 5, 6, tokenizer, PromptTarget(template_tokens=9))[0].prompt)
        )
        == 1191
    )
    assert any(
        "the trace is repeated" in note for note in prompts.warnings(5)
    ) and not prompts.warnings(4)


def test_a_trace_is_loaded_as_a_workload(tmp_path: Path) -> None:
    path = written(
        tmp_path / "busy.day.jsonl", *(mooncake(100 * number, 10, 2) for number in range(11))
    )
    workload = workload_from_trace(path)

    assert workload.name == "busy" and isinstance(workload.requests, FromTrace)
    assert isinstance(workload.stages[0].arrival, Replay) and workload.stages[0].count == 11
    schedule = build_schedule(workload, 1)
    assert schedule.columns().due_ns.tolist() == [100 * MS * number for number in range(11)]
    assert schedule.stages[0].offered_rps == pytest.approx(10)
    assert len(build_prompts(workload, 1, 2, tokens.load_tokenizer(None)).trace) == 11  # type: ignore[attr-defined]

    moved = tmp_path / "elsewhere.jsonl"
    moved.write_bytes(path.read_bytes())
    assert recipe_fingerprint(workload_from_trace(moved), "server") == recipe_fingerprint(
        workload, "server"
    )


def test_a_trace_in_options_equals_one_in_a_file(tmp_path: Path) -> None:
    written(tmp_path / "t.jsonl", *(mooncake(100 * number, 10, 2) for number in range(11)))
    file = tmp_path / "w.yaml"
    file.write_text(
        "name: w\n"
        "requests: {trace: t.jsonl}\n"
        "stages: [{arrival: {trace: {file: t.jsonl, speed: 4}}}]\n"
    )

    assert build_schedule(load(str(file)), 1).columns().due_ns.tolist() == [
        25 * MS * n for n in range(11)
    ]
    short = workload_from_trace(tmp_path / "t.jsonl", read_flags(duration="0.45s"))
    assert len(build_schedule(short, 1).columns().due_ns) == 5
    longer = workload_from_trace(tmp_path / "t.jsonl", read_flags(num_requests=25))
    assert build_schedule(longer, 1).columns().due_ns.tolist()[11:13] == [1100 * MS, 1200 * MS]
    poisson = workload_from_trace(tmp_path / "t.jsonl", read_flags(request_rate="50"))
    assert poisson.stages[0].arrival.tag == "poisson" and poisson.stages[0].count == 11
    warm = workload_from_trace(tmp_path / "t.jsonl", read_flags(warmup="1s"))
    assert [stage.arrival.tag for stage in warm.stages] == ["poisson", "trace"]
    promised_workload = workload_from_trace(tmp_path / "t.jsonl", read_flags(), "qa")
    assert (
        promised_workload.slo is not None
        and promised_workload.name == "qa"
        and promised_workload.stages[0].count == 11
    )
    with refused(CombinedError, "conflict", "--input-tokens"):
        workload_from_trace(tmp_path / "t.jsonl", read_flags(input_tokens=5))
    with refused(CombinedError, "invalid_syntax", where="bad.jsonl:2"):
        workload_from_trace(written(tmp_path / "bad.jsonl", mooncake(0, 5, 1), "{"))


def test_a_part_of_a_trace_is_replayed_faster_and_repeatedly(tmp_path: Path) -> None:
    path = written(
        tmp_path / "t.jsonl",
        *(mooncake(100 * number, 10 + number, 2, number) for number in range(11)),
    )

    def due(**flags: Any) -> list[float]:
        return [
            ns / S
            for ns in build_schedule(workload_from_trace(path, read_flags(**flags)), 1)
            .columns()
            .due_ns.tolist()
        ]

    assert due(trace_speed=4) == [n / 40 for n in range(11)]
    assert due(trace_slice="0.3..0.6") == [0, 0.1, 0.2] and due(trace_slice="900ms..") == [0, 0.1]
    assert len(due(trace_loop=3)) == 33 and due(trace_loop=3)[11] == pytest.approx(1.1)
    assert len(due(trace_loop=1000, duration="2.15s")) == 22
    assert len(due(trace_slice="..0.5", trace_loop=2, trace_speed=2)) == 10
    workload = workload_from_trace(path, read_flags(trace_slice="0.3..0.6"))
    prompts = build_prompts(workload, 1, 2, tokens.load_tokenizer(None))
    assert [prompts.requested_input_tokens(number) for number in range(3)] == [13, 14, 15]  # type: ignore[attr-defined]
    assert recipe_fingerprint(workload, "server") != recipe_fingerprint(
        workload_from_trace(path), "server"
    )
    part_workload = workload_from_trace(path, read_flags(trace_slice="0.3..0.6"), "qa")
    assert part_workload.stages[0].count == 3
    for flags, code in (
        ({"trace_slice": "5m.."}, "empty_file"),
        ({"trace_speed": 2, "request_rate": 5}, "no_effect"),
        ({"trace_loop": 1_000_000, "num_requests": 10**9}, "too_large"),
    ):
        with refused((LoadgenError, CombinedError), code):
            workload_from_trace(path, read_flags(**flags))
    with refused(CombinedError, "no_effect", "--set on_bad_row"):
        load("qa", read_flags(on_bad_row="skip"))
    file = tmp_path / "w.yaml"
    file.write_text(
        "name: w\nrequests: {trace: t.jsonl, slice: 300ms..600ms, on_bad_row: skip}\n"
        "stages: [{arrival: {trace: {file: t.jsonl, slice: 300ms..600ms, loop: 2, speed: 2}}}]\n"
    )
    assert len(build_schedule(load(str(file)), 1).columns().due_ns) == 6
    by_hand = load(str(file))
    file.write_text(file.read_text().replace("300ms..600ms", "600ms"))
    with refused(CombinedError, "invalid_value", where="w.yaml:2"):
        load(str(file))
    block = "slice: 300ms..600ms, on_bad_row: skip, loop: 2, speed: 2"
    file.write_text(f"name: w\ntrace: {{file: t.jsonl, {block}}}\n")
    short = load(str(file))
    assert (short.requests, [stage.arrival for stage in short.stages]) == (
        by_hand.requests,
        [stage.arrival.model_copy(update={"on_bad_row": "skip"}) for stage in by_hand.stages],
    )
    assert load(str(file), read_flags(trace_loop=1)).stages[0].count == 3, (
        "a flag stands over the file"
    )
    file.write_text(f"name: w\nslo: {{ttft: 2s}}\ntrace: {{{block}}}\n")
    played = workload_from_trace(path, base=str(file))
    assert played.slo is not None and len(build_schedule(played, 1).columns().due_ns) == 6
    assert (
        len(
            build_schedule(workload_from_trace(path, read_flags(trace_loop=1), str(file)), 1)
            .columns()
            .due_ns
        )
        == 3
    )


@pytest.mark.parametrize(
    ("block", "code"),
    [
        ("trace: {speed: 2}", "missing_key"),
        ("trace: {file: t.jsonl, sped: 2}", "unknown_key"),
        ("trace: t.jsonl\nstages: [{arrival: {closed: 2}, count: 2}]", "conflict"),
        ("trace: {file: t.jsonl, speed: fast}", "wrong_type"),
    ],
)
def test_an_invalid_trace_block_of_a_workload_is_refused(
    block: str, code: str, tmp_path: Path
) -> None:
    (tmp_path / "t.jsonl").write_text(
        json.dumps({"timestamp": 0, "input_length": 3, "output_length": 3}) + "\n"
    )
    (tmp_path / "w.yaml").write_text(f"name: w\n{block}\n")
    with refused(CombinedError, code, where="w.yaml:"):
        load(str(tmp_path / "w.yaml"))


@given(
    gaps=st.lists(st.integers(0, S), min_size=1, max_size=30),
    speed=st.sampled_from([0.5, 1.0, 3.0]),
    count=st.none() | st.integers(1, 100),
    seconds=st.none() | st.integers(1, 20),
)
def test_replayed_arrivals_ascend_and_end_at_the_limit(
    gaps: list[int], speed: float, count: int | None, seconds: int | None
) -> None:
    offsets = np.cumsum([0, *gaps])
    end = int(offsets[-1]) + int(offsets[-1]) // len(gaps)
    duration = None if seconds is None else seconds * S
    arrival_times = arrivals.replayed_arrivals(
        offsets, end, speed=speed, duration_ns=duration, count=count
    )

    assert (np.diff(arrival_times.offsets_ns) >= 0).all()
    if count is not None:
        assert len(arrival_times.offsets_ns) <= count and (
            duration is not None or len(arrival_times.offsets_ns) == count
        )
    if duration is not None:
        assert not len(arrival_times.offsets_ns) or arrival_times.offsets_ns[-1] < duration
    if count is None and duration is None:
        assert (
            arrival_times.offsets_ns.tolist() == np.rint(offsets / speed).astype(np.int64).tolist()
        )


@pytest.mark.parametrize(
    ("loop", "expected_ns"), [(1, [0, 4 * S]), (2, [0, 4 * S, 10 * S, 14 * S])]
)
def test_a_duration_beyond_the_recording_adds_no_arrival(loop: int, expected_ns: list[int]) -> None:
    """A recording of 10 s with two arrivals: its end is no arrival, also if the stage is longer."""
    recorded_ns = np.array([0, 4 * S])
    replayed = arrivals.replayed_arrivals(recorded_ns, 10 * S, loop=loop, duration_ns=100 * S)
    assert replayed.offsets_ns.tolist() == expected_ns
    assert replayed.end_ns == loop * 10 * S


@pytest.mark.parametrize("field", ["timestamp", "input_length"])
def test_an_integer_that_no_float_can_hold_is_refused(tmp_path: Path, field: str) -> None:
    row = {"timestamp": 0, "input_length": 10, "output_length": 10, "hash_ids": [1]}
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps(row) + "\n" + json.dumps(row | {field: 10**400}) + "\n", "utf-8")
    with refused(CombinedError, "invalid_value", where=f"{path}:2"):
        traces.read_trace(path)
