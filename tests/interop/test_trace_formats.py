"""Every trace format, by its own words; and what is wrong with one, by its line."""

from __future__ import annotations

import functools
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from expected_errors import refused
from hypothesis import given, settings
from hypothesis import strategies as st
from trace_rows import (
    bailian,
    call,
    captured,
    mooncake,
    otlp,
    shape,
    span,
    subagent,
    tracelab,
    weka,
    written,
)

import loadgen
from loadgen.core.errors import CombinedError, LoadgenError
from loadgen.core.requests.prompts import PromptTarget
from loadgen.core.requests.tokenizer import load_tokenizer
from loadgen.core.requests.trace_prompts import TracePrompts
from loadgen.core.schedule.build import build_schedule
from loadgen.core.workload import (
    read_flags,
    trace_formats,
    trace_sessions,
    traces,
    workload_from_trace,
)
from loadgen.core.workload.trace_builder import TraceBuilder

MS, S = 1_000_000, 1_000_000_000


EPOCH = 1_784_000_000 * S

FILES: dict[str, tuple[list[Any], str, list[int], list[int], list[int]]] = {
    "mooncake.jsonl": (
        [mooncake(27_482, 6955, 52, *range(14)), mooncake(30_535, 6472, 26, *range(13))],
        "Mooncake",
        [0, 3053 * MS],
        [6955, 6472],
        [52, 26],
    ),
    "seconds.jsonl": (
        [mooncake(0.5, 20, 3, 1, 2), mooncake(2.25, 20, 4, 1, 3)],
        "Mooncake",
        [0, 1_750 * MS],
        [20, 20],
        [3, 4],
    ),
    "unsorted shape.jsonl": (
        [shape(9, 5, 1, 7), shape(2, 6, 2, 8, 9)],
        "shape trace",
        [0, 7 * MS],
        [6, 5],
        [2, 1],
    ),
    "bailian.jsonl": (
        [
            bailian(1, -1, 0.0, 30, 9, 7, 8),
            bailian(2, -1, 0.125, 16, 1, 9),
            bailian(3, 1, 61.5, 60, 8, 7, 8, 4, 5),
        ],
        "Bailian",
        [0, 125 * MS, 61_500 * MS],
        [30, 16, 60],
        [9, 1, 8],
    ),
    "shape.jsonl": (
        [
            shape(1_700_000_000_123.456, 700, 7, 1, 2, session_id="a-1", turn=0),
            shape(1_700_000_000_125.0, 900, 8, 1, 2, 3, session_id="a-1", turn=1, delay=3.5),
        ],
        "shape trace",
        [0, 1_544_000],
        [700, 900],
        [7, 8],
    ),
    # Sub-agents count time from their marker in trace 1 and from the start in trace 2.
    "weka.jsonl": (
        [
            weka(
                "a",
                call(0, 130, 5, 1, 2),
                subagent(10, call(0.5, 64, 7, 9)),
                call(20, 200, 6, 1, 2, 3),
            ),
            weka("b", call(1, 64, 8, 1), subagent(3, call(4, 64, 9, 1))),
        ],
        "Weka",
        [0, S, 4 * S, 10_500 * MS, 20 * S],
        [130, 64, 64, 64, 200],
        [5, 8, 9, 7, 6],
    ),
    "tracelab.jsonl": (
        [
            tracelab("c:1", 5, 0, 1100, 30),
            tracelab("c:2", 7, 0, 600, 20),
            tracelab("c:1", 9, 1030, 500, 10),
        ],
        "TraceLab",
        [0, 2 * S, 4 * S],
        [1100, 600, 1530],
        [30, 20, 10],
    ),
    # Only spans of model calls count, because an agent's span repeats the tokens of its calls.
    "spans.jsonl": (
        [
            otlp(span(EPOCH + S, 40, 4), span(EPOCH, 30, 3)),
            otlp(span(EPOCH, 70, 7, "invoke_agent"), span(EPOCH, None, None)),
        ],
        "OpenTelemetry GenAI",
        [0, S],
        [30, 40],
        [3, 4],
    ),
    "console.jsonl": (
        [
            {
                "name": "chat m",
                "start_time": "2026-11-22T10:00:00.250000Z",
                "attributes": {"gen_ai.usage.input_tokens": 5, "gen_ai.usage.output_tokens": 6},
            },
            {
                "name": "GET",
                "start_time": "2026-11-22T10:00:00Z",
                "attributes": {"http.method": "GET"},
            },
        ],
        "OpenTelemetry GenAI",
        [0],
        [5],
        [6],
    ),
    "capture.jsonl": (
        [captured(9, 12, 30), captured(4, 13, 31, binary=True)],
        "SageMaker data capture",
        [0, 5 * S],
        [13, 12],
        [31, 30],
    ),
    "azure.csv": (
        [
            "TIMESTAMP,ContextTokens,GeneratedTokens",
            "2023-11-16 18:15:46.6805900,374,44",
            "2023-11-16 18:15:50.9951690,396,109",
            "2023-11-16 18:15:51.0000000+00:00,5,2",
        ],
        "Azure LLM inference",
        [0, 4_314_579_000, 4_319_410_000],
        [374, 396, 5],
        [44, 109, 2],
    ),
    "burst.csv": (
        [
            "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type",
            "5,ChatGPT,472,18,490,Log",
            "45,ChatGPT,1087,0,1087,Conversation log",
            "118.5,GPT-4,417,276,693,API",
        ],
        "BurstGPT",
        [0, 113_500 * MS],
        [472, 417],
        [18, 276],
    ),
    "plain.csv": (
        ["timestamp,input_length,output_length", "0,10,2", "0.5,20,3"],
        "timestamp,input_length,output_length",
        [0, 500 * MS],
        [10, 20],
        [2, 3],
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_every_trace_format_is_recognised_by_its_fields(name: str, tmp_path: Path) -> None:
    rows, called, due, read, write = FILES[name]
    trace = traces.read_trace(written(tmp_path / name, *rows))
    assert trace.format == called
    assert trace.due_ns.tolist() == due
    assert (trace.input_tokens.tolist(), trace.output_tokens.tolist()) == (read, write)
    assert trace.rows_without_output == (1 if name in ("burst.csv", "spans.jsonl") else 0)


def test_block_hashes_and_sessions_are_read_with_their_sizes(tmp_path: Path) -> None:
    trace = traces.read_trace(written(tmp_path / "m", *FILES["mooncake.jsonl"][0]))
    assert [trace.tokens_by_hash[number] for number in (0, 12, 13)] == [512, 512, 6955 - 13 * 512]
    chats = traces.read_trace(written(tmp_path / "b", *FILES["bailian.jsonl"][0]))
    assert chats.session.tolist() == [0, 1, 0]
    assert [chats.tokens_by_hash[number] for number in (7, 8, 4, 5)] == [16, 14, 16, 12]
    shape_trace = traces.read_trace(written(tmp_path / "s", *FILES["shape.jsonl"][0]))
    assert shape_trace.session.tolist() == [0, 0]
    assert [shape_trace.tokens_by_hash[number] for number in (1, 2, 3)] == [350, 350, 300]


def test_agent_traces_are_read_with_sessions_and_blocks(tmp_path: Path) -> None:
    agents = traces.read_trace(written(tmp_path / "w", *FILES["weka.jsonl"][0]))

    assert agents.session.tolist() == [0, 2, 3, 1, 0]
    assert agents.block_hashes(4)[:2] == agents.block_hashes(0)  # within a trace hashes are shared,
    assert agents.block_hashes(1) == agents.block_hashes(2) and agents.block_hashes(1)[
        0
    ] not in agents.block_hashes(0)  # between two they are not
    assert agents.tokens_by_hash[agents.block_hashes(0)[1]] == 64
    rounds = traces.read_trace(written(tmp_path / "t", *FILES["tracelab.jsonl"][0]))
    assert [len(rounds.block_hashes(index)) for index in range(3)] == [2, 1, 2]
    assert rounds.block_hashes(2) == rounds.block_hashes(0) and rounds.session.tolist() == [0, 1, 0]
    talks = traces.read_trace(written(tmp_path / "s", *FILES["spans.jsonl"][0]))
    assert talks.session.tolist() == [0, 0]


def test_burstgpt_rows_are_read_with_sessions_and_ends(tmp_path: Path) -> None:
    head = (
        "Timestamp,Session ID,Elapsed time,Model,"
        "Request tokens,Response tokens,Total tokens,Log Type"
    )
    lines = (
        "5,s-1,2.5,ChatGPT,472,18,490,Conversation log",
        "6,,1,GPT-4,30,9,39,API log",
        "9,s-1,,ChatGPT,90,0,90,Conversation log",
        "12.5,s-1,4,ChatGPT,500,20,520,Conversation log",
    )
    trace = traces.read_trace(written(tmp_path / "burst.csv", head, *lines))

    assert trace.session.tolist() == [0, -1, 0] and trace.duration_ns.tolist() == [
        2_500 * MS,
        S,
        4 * S,
    ]
    sessions = trace_sessions.build_sessions(trace)
    assert sessions.turn_counts.tolist() == [2, 1]
    assert sessions.graph(0) == (((), (0,)), (0, 5 * S)), (
        "12.5 s is 5 s after the end of the answer at 7.5 s"
    )

    columns = {
        "Timestamp": [5.0, 6.0, 9.0, 12.5],
        "Session ID": ["s-1", None, "s-1", "s-1"],
        "Elapsed time": [2.5, 1.0, None, 4.0],
        "Request tokens": [472, 30, 90, 500],
        "Response tokens": [18, 9, 0, 20],
    }
    table = traces.read_trace(parquet(tmp_path / "burst.parquet", **columns))

    for name in ("due_ns", "session", "group", "duration_ns", "input_tokens"):
        assert getattr(table, name).tolist() == getattr(trace, name).tolist(), name
    bad = written(tmp_path / "bad.csv", head, "5,s-1,-2,ChatGPT,472,18,490,Conversation log")
    with pytest.raises(CombinedError) as exc_info:
        traces.read_trace(bad)
    assert [fault.message for fault in exc_info.value.errors] == ["elapsed time is -2"]

    for took in (-2.0, float("nan"), 1e10):
        unlike = columns | {"Elapsed time": [2.5, took, None, 4.0]}
        with pytest.raises(CombinedError) as exc_info:
            traces.read_trace(parquet(tmp_path / "bad.parquet", **unlike))
        assert [
            (fault.message.partition(" is not ")[0], fault.where.rpartition(" ")[2])
            for fault in exc_info.value.errors
        ] == [("Elapsed time", "2")]


def test_session_rows_without_timestamps_are_read(tmp_path: Path) -> None:
    """In AIPerf's format the first turn may have a start time and later turns a delay."""

    def row(session: str, **more: Any) -> dict[str, Any]:
        return {"session_id": session, "input_length": 300, "output_length": 40, **more}

    file = written(
        tmp_path / "aiperf.jsonl",
        row("b", timestamp=2000),
        row("b", delay=1500, hash_ids=[1, 2]),
        row("b"),
        row("a"),
        row("a", delay=250.5),
    )
    trace = traces.read_trace(file)
    assert (trace.format, len(trace), trace.untimed_rows) == ("Mooncake", 5, 4)
    sessions = trace_sessions.build_sessions(trace)
    assert sessions.due_ns.tolist() == [0, 2 * S] and sessions.turn_counts.tolist() == [2, 3]
    assert sessions.graph(0).pauses_ns == (0, 250_500_000) and sessions.graph(1).pauses_ns == (
        0,
        1500 * MS,
        0,
    )
    assert sessions.graph(1).predecessors == ((), (0,), (1,))
    with pytest.raises(CombinedError, match="4 of 5 rows have no timestamp"):
        workload_from_trace(file)
    stages = build_schedule(
        workload_from_trace(file, read_flags(trace_replay="sessions")), 1
    ).stages
    assert [stage.arrivals_ns.tolist() for stage in stages] == [[0, 2 * S]]
    nothing = written(tmp_path / "bad.jsonl", row("a"), {"input_length": 3, "output_length": 4})
    with refused(CombinedError, "invalid_value", "timestamp"):
        traces.read_trace(nothing)


def parquet(path: Path, **columns: Any) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table(columns), path)
    return path


def test_rows_of_a_trace_send_their_options_and_a_model_that_the_server_lists(
    tmp_path: Path,
) -> None:
    plain = [mooncake(1000 * n, 20, 3) for n in range(3)]
    options = {"model": "small", "priority": 3, "min_tokens": 2, "guided_json": {"type": "object"}}
    rows = [shape(1000 * (9 - n), 20, 3, 1, session_id="s") for n in range(2)]
    ordered = traces.read_trace(
        written(tmp_path / "m", plain[0], plain[1] | options, plain[2] | {"model": "other"})
    )
    sorted_by_time = traces.read_trace(written(tmp_path / "s", rows[0] | options, rows[1]))
    tokenizer = load_tokenizer(None)
    without = {name: value for name, value in options.items() if name != "model"}
    prompts = TracePrompts(ordered, 1, 2, tokenizer, PromptTarget(models=("small",)))

    assert [prompts[n].extra for n in range(3)] == [{}, options, {}]
    assert [
        TracePrompts(ordered.select_times(S, None), 1, 2, tokenizer)[n].extra for n in range(2)
    ] == [
        without,
        {},
    ]
    assert [TracePrompts(sorted_by_time, 1, 2, tokenizer)[n].extra for n in range(2)] == [
        {},
        without,
    ]
    sent_fields, missing_model = prompts.warnings(3)
    assert "guided_json, min_tokens, model, priority" in sent_fields
    assert "does not list other" in missing_model


@pytest.mark.parametrize(
    "name", ["weka.jsonl", "tracelab.jsonl", "spans.jsonl", "bailian.jsonl", "burst.csv"]
)
def test_a_trace_in_its_published_format_is_replayed(name: str, tmp_path: Path) -> None:
    rows, _, due, read, write = FILES[name]
    file = written(tmp_path / name, *rows)
    result = loadgen.run(trace=file, url="sim:gb300-vm-128k", seed=1, out=tmp_path / "out")
    columns = result.rows.sort_by("due_ns")

    assert columns["due_ns"].to_pylist() == due
    assert (columns["input_tokens"].to_pylist(), columns["output_tokens"].to_pylist()) == (
        read,
        write,
    )
    assert result.requests.ok == len(due)


def test_parquet_tables_are_read_as_traces(tmp_path: Path) -> None:
    lengths: dict[str, Any] = {"input_length": [10, 20, 30], "output_length": [1, 0, 3]}
    seconds = traces.read_trace(parquet(tmp_path / "s", timestamp=[0.25, 0.5, 2.0], **lengths))

    assert (seconds.due_ns.tolist(), seconds.input_tokens.tolist()) == ([0, 1750 * MS], [10, 30])
    assert (seconds.output_tokens.tolist(), seconds.rows_without_output) == ([1, 3], 1)
    trace = traces.read_trace(parquet(tmp_path / "m", timestamp=[250, 500, 2000], **lengths))
    assert trace.due_ns.tolist() == seconds.due_ns.tolist()
    burst = {"Timestamp": [5, 7], "Request tokens": [4, 5], "Response tokens": [6, 7]}
    assert traces.read_trace(parquet(tmp_path / "b", **burst)).due_ns.tolist() == [0, 2 * S]

    bad: dict[str, Any] = {
        "input_length": [10, None, 30, -4, 5, 6],
        "output_length": [1, 1, 10**9, 1, 2, 3],
    }
    times = [1.5, 2.0, 3.0, 4.0, 0.5, 6.5]

    with pytest.raises(CombinedError) as exc_info:
        traces.read_trace(parquet(tmp_path / "bad", timestamp=times, **bad))
    assert [
        (fault.where.partition(", row ")[2], fault.code, fault.key)
        for fault in exc_info.value.errors
    ] == [
        ("2", "invalid_value", "input_length"),
        ("3", "invalid_value", "output_length"),
        ("4", "invalid_value", "input_length"),
        ("5", "unordered", "timestamp"),
    ]
    readable_trace = traces.read_trace(tmp_path / "bad", skip_bad=True)
    assert (readable_trace.due_ns.tolist(), readable_trace.bad_rows) == ([0, 5 * S], 4)
    assert "input_length is missing" in readable_trace.first_error
    with refused(LoadgenError, "wrong_format"):
        traces.read_trace(parquet(tmp_path / "o", a=[1], b=[2]))
    with refused(LoadgenError, "wrong_type", "timestamp"):
        traces.read_trace(
            parquet(tmp_path / "t", timestamp=["a"], input_length=[1], output_length=[1])
        )
    (tmp_path / "cut").write_bytes((tmp_path / "s").read_bytes()[:-20])
    with refused(LoadgenError, "damaged_file"):
        traces.read_trace(tmp_path / "cut")


def test_a_date_beyond_64_bits_is_refused_with_its_line(tmp_path: Path) -> None:
    path = written(
        tmp_path / "t.csv",
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        "1103-11-16 18:15:46.805900,374,44",
    )
    with pytest.raises(CombinedError) as exc_info:
        traces.read_trace(path)
    assert f"{path}:2" in str(exc_info.value)


@settings(deadline=None)
@given(
    st.lists(
        st.fixed_dictionaries(
            {
                "timestamp": st.integers(0, 50) | st.floats(0, 50),
                "input_length": st.integers(-1, 9),
                "output_length": st.integers(-1, 3) | st.just(1.5),
            },
            optional={
                "hash_ids": st.lists(st.integers(-1, 1 << 50), max_size=3),
                "session_id": st.sampled_from("ab"),
            },
        ),
        min_size=1,
        max_size=12,
    )
)
def test_parse_lines_returns_the_same_rows_as_parse_line(rows: list[dict[str, Any]]) -> None:
    import tempfile

    plain = functools.partial(trace_formats.TraceFormat, "x", must_be_ordered=True)
    outcomes = []
    for one_by_one in (False, True):
        finding = trace_formats.find_json_format(rows[0])  # it remembers sessions
        assert finding is not None and finding.parse_lines is not None
        with tempfile.NamedTemporaryFile("w") as file:
            builder = TraceBuilder(Path(file.name), skip_bad=True, must_be_ordered=True)
            lines = iter([(number, json.dumps(row)) for number, row in enumerate(rows, 1)])
            traces.add_lines(builder, plain(finding.parse_line) if one_by_one else finding, lines)
            try:
                trace = builder.build("x")
            except LoadgenError as fault:
                outcomes.append([str(fault.message)])
            else:
                columns = (
                    trace.due_ns,
                    trace.input_tokens,
                    trace.output_tokens,
                    trace.session,
                    trace.hashes,
                    trace.hash_starts,
                )
                outcomes.append(
                    [
                        *(column.tolist() for column in columns),
                        trace.tokens_by_hash,
                        trace.rows_without_output,
                        trace.bad_rows,
                    ]
                )
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize(
    ("rows", "code", "key", "line"),
    [
        (["", "  "], "empty_file", "", ""),
        ([mooncake(0, 5, 0)], "empty_file", "", ""),
        ([{"prompt": "Hello"}], "wrong_format", "", ":1"),
        ([{"a": 1}], "wrong_format", "", ":1"),
        (["a,b", "1,2"], "wrong_format", "", ":1"),
        ([mooncake(5, 5, 1), mooncake(3, 5, 1)], "unordered", "", ":2"),
        (["Timestamp,Request tokens,Response tokens", "5,5,1", "4,5,1"], "unordered", "", ":3"),
        ([weka("a", call(0, 0, 5))], "invalid_value", "in", ":1"),
        ([{"requests": 3, "block_size": 64}], "wrong_type", "requests", ":1"),
        ([{"requests": [], "block_size": 0}], "invalid_value", "block_size", ":1"),
        ([{**weka("a"), "hash_id_scope": "global"}], "unsupported", "hash_id_scope", ":1"),
        (
            [{**tracelab("a", 1, 0, 5, 1), "timing_events": []}],
            "missing_value",
            "timing_events",
            ":1",
        ),
        (
            [tracelab("a", 1, 0, 5, 1), tracelab("a", 1, -3, 5, 1)],
            "invalid_value",
            "prefix_tokens",
            ":2",
        ),
        ([otlp(span(EPOCH, -4, 1))], "invalid_value", "gen_ai.usage.input_tokens", ":1"),
        ([otlp({"name": "GET /"})], "empty_file", "", ""),
        ([captured(3, 4, 5, usage=False)], "missing_key", "usage", ":1"),
        ([{"captureData": {}}], "missing_key", "endpointOutput.data", ":1"),
        ([mooncake(0, 5, 1), "{broken"], "invalid_syntax", "", ":2"),
        ([mooncake(0, 5, 1), [1]], "wrong_type", "", ":2"),
        (
            [mooncake(0, 5, 1), {**mooncake(1, 5, 1), "priority": "high"}],
            "wrong_type",
            "priority",
            ":2",
        ),
        ([mooncake(0, 5, 1), {**mooncake(1, 5, 1), "model": 7}], "wrong_type", "model", ":2"),
        ([mooncake(0, 5, 1), mooncake("soon", 5, 1)], "invalid_value", "timestamp", ":2"),  # type: ignore[arg-type]
        ([mooncake(0, 0, 1)], "invalid_value", "input_length", ":1"),
        ([mooncake(0, 5, 1), mooncake(1, 5, 1.5)], "invalid_value", "output_length", ":2"),  # type: ignore[arg-type]
        (
            [mooncake(0, 5, 1), {**mooncake(1, 5, 1), "hash_ids": "x"}],
            "wrong_type",
            "hash_ids",
            ":2",
        ),
        (
            ["TIMESTAMP,ContextTokens,GeneratedTokens", "yesterday,1,2"],
            "invalid_value",
            "timestamp",
            ":2",
        ),
        (["timestamp,input_length,output_length", "1,2"], "missing_value", "", ":2"),
        (["timestamp,input_length,output_length", "nan,2,3"], "invalid_value", "timestamp", ":2"),
        (
            ["timestamp,input_length,output_length", "1,2,3.5"],
            "invalid_value",
            "output_length",
            ":2",
        ),
    ],
)
def test_an_invalid_trace_is_refused_with_the_line_of_its_error(
    rows: list[Any], code: str, key: str, line: str, tmp_path: Path
) -> None:
    path = written(tmp_path / "t", *rows)
    with refused((LoadgenError, CombinedError), code, key, f"{path}{line}"):
        traces.read_trace(path)


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_as_a_trace_raise_only_reported_errors(data: bytes) -> None:
    import tempfile

    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        with suppress(LoadgenError, CombinedError):
            traces.read_trace(file.name)
