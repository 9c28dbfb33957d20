"""Every trace format, by its own words; what is wrong with one, by its line; and what a replay sends."""

from __future__ import annotations

import base64
import functools
import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused

from loadgen.core.errors import Fault, Faults, UserError
from loadgen.core.requests import tokenizer as tokens
from loadgen.core.requests.build import build
from loadgen.core.requests.trace_prompts import TracePrompts
from loadgen.core.schedule import arrivals
from loadgen.core.workload import (
    FromTrace,
    Replay,
    load,
    of_trace,
    read_flags,
    recipe_fingerprint,
    trace_files,
    trace_formats,
    traces,
)

MS, S = 1_000_000, 1_000_000_000


def written(path: Path, *rows: Any) -> Path:
    text = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    path.write_text(text, "utf-8")
    return path


def mooncake(at: float, read: int, write: int, *hashes: int) -> dict[str, Any]:
    return {"timestamp": at, "input_length": read, "output_length": write, "hash_ids": list(hashes)}


def bailian(chat: int, parent: int, at: float, read: int, write: int, *hashes: int) -> dict[str, Any]:
    return {"chat_id": chat, "parent_chat_id": parent, "timestamp": at, "input_length": read, "output_length": write,
            "type": "text", "turn": 1, "hash_ids": list(hashes)}  # fmt: skip


def shape(at: float, read: int, write: int, *hashes: int, **more: Any) -> dict[str, Any]:
    size = {"block_size": read / len(hashes), "input_source": "server", "status": "ok", "stream": True}
    return {**mooncake(at, read, write, *hashes), **size, **more}


def weka(name: str, *requests: dict[str, Any]) -> dict[str, Any]:
    return {"id": name, "models": ["m"], "block_size": 64, "hash_id_scope": "local", "requests": list(requests)}


def call(at: float, read: int, write: int, *hashes: int, kind: str = "n") -> dict[str, Any]:
    return {"t": at, "type": kind, "model": "m", "in": read, "out": write, "hash_ids": list(hashes)}


def subagent(at: float, *requests: dict[str, Any]) -> dict[str, Any]:
    return {"type": "subagent", "t": at, "agent_id": "x", "requests": list(requests)}


def tracelab(session: str, second: int, prefix: int, added: int, write: int) -> dict[str, Any]:
    events = [
        {"event_type": "tool_result", "timestamp": "2026-06-08T10:00:00Z"},
        {"event_type": "user_message", "timestamp": f"2026-06-08T10:00:{second:02d}.500Z"},
        {"event_type": "text", "timestamp": "2026-06-08T10:09:00Z"},
    ]
    return {"session_id": session, "round_index": 0, "input_tokens_total": prefix + added, "prefix_tokens": prefix,
            "newly_append_tokens": added, "output_tokens": write, "timing_events": events}  # fmt: skip


def span(start_ns: int, read: int | None, write: int | None, operation: str = "chat") -> dict[str, Any]:
    usage = (("input_tokens", read), ("output_tokens", write))
    counts = [{"key": f"gen_ai.usage.{name}", "value": {"intValue": str(n)}} for name, n in usage if n is not None]
    kind = {"key": "gen_ai.operation.name", "value": {"stringValue": operation}}
    talk = {"key": "gen_ai.conversation.id", "value": {"stringValue": "talk"}}
    return {"startTimeUnixNano": str(start_ns), "attributes": [kind, talk, *counts]}


def otlp(*spans: dict[str, Any]) -> dict[str, Any]:
    return {"resourceSpans": [{"scopeSpans": [{"spans": list(spans)}]}]}


def captured(second: int, read: int, write: int, *, binary: bool = False, usage: bool = True) -> dict[str, Any]:
    answer = json.dumps({"usage": {"prompt_tokens": read, "completion_tokens": write}} if usage else {})
    data = base64.b64encode(answer.encode()).decode() if binary else answer
    return {"captureData": {"endpointInput": {"data": "{}", "encoding": "JSON"},
                            "endpointOutput": {"data": data, "encoding": "BASE64" if binary else "JSON"}},
            "eventMetadata": {"inferenceTime": f"2026-04-29T00:03:{second:02d}Z"}}  # fmt: skip


EPOCH = 1_784_000_000 * S

FILES: dict[str, tuple[list[Any], str, list[int], list[int], list[int]]] = {
    "mooncake.jsonl": (
        [mooncake(27_482, 6955, 52, *range(14)), mooncake(30_535, 6472, 26, *range(13))],
        "Mooncake", [0, 3053 * MS], [6955, 6472], [52, 26],
    ),
    "seconds.jsonl": ([mooncake(0.5, 20, 3, 1, 2), mooncake(2.25, 20, 4, 1, 3)], "Mooncake",
                      [0, 1_750 * MS], [20, 20], [3, 4]),
    "unsorted shape.jsonl": ([shape(9, 5, 1, 7), shape(2, 6, 2, 8, 9)], "shape trace", [0, 7 * MS], [6, 5], [2, 1]),
    "bailian.jsonl": (
        [bailian(1, -1, 0.0, 30, 9, 7, 8), bailian(2, -1, 0.125, 16, 1, 9), bailian(3, 1, 61.5, 60, 8, 7, 8, 4, 5)],
        "Bailian", [0, 125 * MS, 61_500 * MS], [30, 16, 60], [9, 1, 8],
    ),
    "shape.jsonl": (
        [shape(1_700_000_000_123.456, 700, 7, 1, 2, session_id="a-1", turn=0),
         shape(1_700_000_000_125.0, 900, 8, 1, 2, 3, session_id="a-1", turn=1, delay=3.5)],
        "shape trace", [0, 1_544_000], [700, 900], [7, 8],
    ),
    "weka.jsonl": (  # a sub-agent counts from its marker in the first trace, from the start of the trace in the second
        [weka("a", call(0, 130, 5, 1, 2), subagent(10, call(0.5, 64, 7, 9)), call(20, 200, 6, 1, 2, 3)),
         weka("b", call(1, 64, 8, 1), subagent(3, call(4, 64, 9, 1)))],
        "Weka", [0, S, 4 * S, 10_500 * MS, 20 * S], [130, 64, 64, 64, 200], [5, 8, 9, 7, 6],
    ),
    "tracelab.jsonl": (
        [tracelab("c:1", 5, 0, 1100, 30), tracelab("c:2", 7, 0, 600, 20), tracelab("c:1", 9, 1030, 500, 10)],
        "TraceLab", [0, 2 * S, 4 * S], [1100, 600, 1530], [30, 20, 10],
    ),
    "spans.jsonl": (  # of calls of models only: an agent's span has the tokens of its calls once more
        [otlp(span(EPOCH + S, 40, 4), span(EPOCH, 30, 3)),
         otlp(span(EPOCH, 70, 7, "invoke_agent"), span(EPOCH, None, None))],
        "OpenTelemetry GenAI", [0, S], [30, 40], [3, 4],
    ),
    "console.jsonl": (
        [{"name": "chat m", "start_time": "2026-11-22T10:00:00.250000Z",
          "attributes": {"gen_ai.usage.input_tokens": 5, "gen_ai.usage.output_tokens": 6}},
         {"name": "GET", "start_time": "2026-11-22T10:00:00Z", "attributes": {"http.method": "GET"}}],
        "OpenTelemetry GenAI", [0], [5], [6],
    ),
    "capture.jsonl": ([captured(9, 12, 30), captured(4, 13, 31, binary=True)],
                      "SageMaker data capture", [0, 5 * S], [13, 12], [31, 30]),
    "azure.csv": (
        ["TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:15:46.6805900,374,44",
         "2023-11-16 18:15:50.9951690,396,109", "2023-11-16 18:15:51.0000000+00:00,5,2"],
        "Azure LLM inference", [0, 4_314_579_000, 4_319_410_000], [374, 396, 5], [44, 109, 2],
    ),
    "burst.csv": (
        ["Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type", "5,ChatGPT,472,18,490,Log",
         "45,ChatGPT,1087,0,1087,Conversation log", "118.5,GPT-4,417,276,693,API"],
        "BurstGPT", [0, 113_500 * MS], [472, 417], [18, 276],
    ),
    "plain.csv": (["timestamp,input_length,output_length", "0,10,2", "0.5,20,3"],
                  "timestamp,input_length,output_length", [0, 500 * MS], [10, 20], [2, 3]),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_every_format_is_told_by_its_fields(name: str, tmp_path: Path) -> None:
    rows, called, due, read, write = FILES[name]
    trace = traces.read_trace(written(tmp_path / name, *rows))
    assert trace.format == called
    assert trace.due_ns.tolist() == due
    assert (trace.input_tokens.tolist(), trace.output_tokens.tolist()) == (read, write)
    assert trace.skipped == (1 if name in ("burst.csv", "spans.jsonl") else 0)


def test_blocks_sessions_and_their_sizes(tmp_path: Path) -> None:
    trace = traces.read_trace(written(tmp_path / "m", *FILES["mooncake.jsonl"][0]))
    assert [trace.tokens_of[number] for number in (0, 12, 13)] == [512, 512, 6955 - 13 * 512]
    chats = traces.read_trace(written(tmp_path / "b", *FILES["bailian.jsonl"][0]))
    assert chats.session.tolist() == [0, 1, 0]
    assert [chats.tokens_of[number] for number in (7, 8, 4, 5)] == [16, 14, 16, 12]
    own = traces.read_trace(written(tmp_path / "s", *FILES["shape.jsonl"][0]))
    assert own.session.tolist() == [0, 0]
    assert [own.tokens_of[number] for number in (1, 2, 3)] == [350, 350, 300]


def test_sessions_and_blocks_of_agents(tmp_path: Path) -> None:
    agents = traces.read_trace(written(tmp_path / "w", *FILES["weka.jsonl"][0]))
    assert agents.session.tolist() == [0, 2, 3, 1, 0]
    assert agents.blocks(4)[:2] == agents.blocks(0)  # within a trace hashes are shared,
    assert agents.blocks(1) == agents.blocks(2) and agents.blocks(1)[0] not in agents.blocks(
        0
    )  # between two they are not
    assert agents.tokens_of[agents.blocks(0)[1]] == 64
    rounds = traces.read_trace(written(tmp_path / "t", *FILES["tracelab.jsonl"][0]))
    assert [len(rounds.blocks(index)) for index in range(3)] == [2, 1, 2]
    assert rounds.blocks(2) == rounds.blocks(0) and rounds.session.tolist() == [0, 1, 0]
    talks = traces.read_trace(written(tmp_path / "s", *FILES["spans.jsonl"][0]))
    assert talks.session.tolist() == [0, 0]


def parquet(path: Path, **columns: Any) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table(columns), path)
    return path


def test_tables_in_parquet(tmp_path: Path) -> None:
    lengths: dict[str, Any] = {"input_length": [10, 20, 30], "output_length": [1, 0, 3]}
    seconds = traces.read_trace(parquet(tmp_path / "s", timestamp=[0.25, 0.5, 2.0], **lengths))
    assert (seconds.due_ns.tolist(), seconds.input_tokens.tolist()) == ([0, 1750 * MS], [10, 30])
    assert (seconds.output_tokens.tolist(), seconds.skipped) == ([1, 3], 1)
    whole = traces.read_trace(parquet(tmp_path / "m", timestamp=[250, 500, 2000], **lengths))
    assert whole.due_ns.tolist() == seconds.due_ns.tolist()
    burst = {"Timestamp": [5, 7], "Request tokens": [4, 5], "Response tokens": [6, 7]}
    assert traces.read_trace(parquet(tmp_path / "b", **burst)).due_ns.tolist() == [0, 2 * S]
    bad: dict[str, Any] = {"input_length": [10, None, 30, -4, 5, 6], "output_length": [1, 1, 10**9, 1, 2, 3]}
    times = [1.0, 2.0, 3.0, 4.0, 0.5, 6.0]
    with pytest.raises(Faults) as found:
        traces.read_trace(parquet(tmp_path / "bad", timestamp=times, **bad))
    assert [(fault.where.partition(", row ")[2], fault.code, fault.key) for fault in found.value.faults] == [
        ("2", "invalid_value", "input_length"),
        ("3", "invalid_value", "output_length"),
        ("4", "invalid_value", "input_length"),
        ("5", "unordered", "timestamp"),
    ]
    kept = traces.read_trace(tmp_path / "bad", skip_bad=True)
    assert (kept.due_ns.tolist(), kept.bad_rows) == ([0, 5 * S], 4)
    assert "row 2: input_length is missing" in kept.first_bad
    with refused(Fault, "wrong_format"):
        traces.read_trace(parquet(tmp_path / "o", a=[1], b=[2]))
    with refused(Fault, "wrong_type", "timestamp"):
        traces.read_trace(parquet(tmp_path / "t", timestamp=["a"], input_length=[1], output_length=[1]))
    (tmp_path / "cut").write_bytes((tmp_path / "s").read_bytes()[:-20])
    with refused(Fault, "damaged_file"):
        traces.read_trace(tmp_path / "cut")


@pytest.mark.parametrize("compression", ["gzip", "zstd"])
def test_compressed_files_and_such_as_are_cut_short(compression: str, tmp_path: Path) -> None:
    import pyarrow as pa

    plain = written(
        tmp_path / "t.jsonl", *(mooncake(number, 5 + number % 7, 1, number * 977) for number in range(5000))
    )
    packed = tmp_path / "t.packed"
    with pa.output_stream(str(packed), compression=compression) as stream:
        stream.write(plain.read_bytes())
    assert traces.read_trace(packed).input_tokens.tolist() == traces.read_trace(plain).input_tokens.tolist()
    packed.write_bytes(packed.read_bytes()[:-100])
    with refused(Fault, "damaged_file") as found:
        traces.read_trace(packed)
    assert "t.packed" in str(found.value) and "copy it again" in str(found.value)


def test_a_compressed_line_is_read_to_a_bound(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl.gz").write_bytes(gzip.compress(b"{}\n" + b"x" * 1_000_000))
    with trace_files.opened(tmp_path / "t.jsonl.gz", longest=1_000_000) as lines:
        assert [number for number, _ in lines] == [1, 2]
    with (
        refused(UserError, "too_large", where="t.jsonl.gz:2"),
        trace_files.opened(tmp_path / "t.jsonl.gz", longest=1_000) as lines,
    ):
        list(lines)


def test_a_date_beyond_64_bits_is_a_fault_with_its_line(tmp_path: Path) -> None:
    path = written(tmp_path / "t.csv", "TIMESTAMP,ContextTokens,GeneratedTokens", "1103-11-16 18:15:46.805900,374,44")
    with pytest.raises(Faults) as found:
        traces.read_trace(path)
    assert f"{path}:2" in str(found.value)


def test_bad_rows_are_left_out_and_counted_where_asked(tmp_path: Path) -> None:
    rows = [
        mooncake(1, 5, 1),
        mooncake(2, -5, 1),
        "{broken",
        mooncake(0.5, 5, 1),
        mooncake(4e11, 7, 7),
        mooncake(9, 6, 2),
    ]
    path = written(tmp_path / "t", *rows)
    with pytest.raises(Faults) as found:
        traces.read_trace(path)
    assert [(fault.where, fault.code) for fault in found.value.faults] == [
        (f"{path}:2", "invalid_value"),
        (f"{path}:3", "invalid_syntax"),
        (f"{path}:4", "unordered"),
        (f"{path}:5", "out_of_range"),
    ]
    trace = traces.read_trace(path, skip_bad=True)
    assert (trace.due_ns.tolist(), trace.bad_rows) == ([0, 8 * MS], 4)
    notes = TracePrompts(trace, 1, 2, tokens.load_tokenizer(None)).warnings(2)
    assert any(
        f"4 bad rows of the trace are left out, the first {path}:2: input_length is -5" in note for note in notes
    )
    with refused(Fault, "empty_file"):
        traces.read_trace(written(tmp_path / "u", mooncake(1, -5, 1)), skip_bad=True)


@settings(deadline=None)
@given(
    st.lists(
        st.fixed_dictionaries(
            {"timestamp": st.integers(0, 50) | st.floats(0, 50), "input_length": st.integers(-1, 9),
             "output_length": st.integers(-1, 3) | st.just(1.5)},
            optional={"hash_ids": st.lists(st.integers(-1, 1 << 50), max_size=3), "session_id": st.sampled_from("ab")},
        ),
        min_size=1, max_size=12,
    )
)  # fmt: skip
def test_many_rows_at_once_are_the_same_rows(rows: list[dict[str, Any]]) -> None:
    import tempfile

    plain = functools.partial(trace_formats.TraceFormat, "x", in_order=True)
    found = trace_formats.of_json(rows[0])
    assert found is not None and found.together is not None
    made = []
    for one_by_one in (False, True):
        with tempfile.NamedTemporaryFile("w") as file:
            index = traces._Index(Path(file.name), True, in_order=True)
            lines = iter([(number, json.dumps(row)) for number, row in enumerate(rows, 1)])
            traces._add_rows(index, plain(found.rows) if one_by_one else found, lines)
            try:
                trace = index.trace("x")
            except Fault as fault:
                made.append([str(fault.what)])
            else:
                columns = (
                    trace.due_ns,
                    trace.input_tokens,
                    trace.output_tokens,
                    trace.session,
                    trace.hashes,
                    trace.starts,
                )
                made.append([*(column.tolist() for column in columns), trace.tokens_of, trace.skipped, trace.bad_rows])
    assert made[0] == made[1]


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
        ([{**tracelab("a", 1, 0, 5, 1), "timing_events": []}], "missing_value", "timing_events", ":1"),
        ([tracelab("a", 1, 0, 5, 1), tracelab("a", 1, -3, 5, 1)], "invalid_value", "prefix_tokens", ":2"),
        ([otlp(span(EPOCH, -4, 1))], "invalid_value", "gen_ai.usage.input_tokens", ":1"),
        ([otlp({"name": "GET /"})], "empty_file", "", ""),
        ([captured(3, 4, 5, usage=False)], "missing_key", "usage", ":1"),
        ([{"captureData": {}}], "missing_key", "endpointOutput.data", ":1"),
        ([mooncake(0, 5, 1), "{broken"], "invalid_syntax", "", ":2"),
        ([mooncake(0, 5, 1), [1]], "wrong_type", "", ":2"),
        ([mooncake(0, 5, 1), mooncake("soon", 5, 1)], "invalid_value", "timestamp", ":2"),  # type: ignore[arg-type]
        ([mooncake(0, 0, 1)], "invalid_value", "input_length", ":1"),
        ([mooncake(0, 5, 1), mooncake(1, 5, 1.5)], "invalid_value", "output_length", ":2"),  # type: ignore[arg-type]
        ([mooncake(0, 5, 1), {**mooncake(1, 5, 1), "hash_ids": "x"}], "wrong_type", "hash_ids", ":2"),
        (["TIMESTAMP,ContextTokens,GeneratedTokens", "yesterday,1,2"], "invalid_value", "timestamp", ":2"),
        (["timestamp,input_length,output_length", "1,2"], "missing_value", "", ":2"),
        (["timestamp,input_length,output_length", "nan,2,3"], "invalid_value", "timestamp", ":2"),
        (["timestamp,input_length,output_length", "1,2,3.5"], "invalid_value", "output_length", ":2"),
    ],
)
def test_what_is_wrong_is_said_with_its_line(rows: list[Any], code: str, key: str, line: str, tmp_path: Path) -> None:
    path = written(tmp_path / "t", *rows)
    with refused((Fault, Faults), code, key, f"{path}{line}"):
        traces.read_trace(path)


def test_all_faults_up_to_a_point(tmp_path: Path) -> None:
    with pytest.raises(Faults) as found:
        traces.read_trace(written(tmp_path / "t", mooncake(0, 5, 1), *(mooncake(1, 0, 1) for _ in range(50))))
    assert len(found.value.faults) == 21 and found.value.faults[-1].code == "more_faults"
    with refused(Fault, "missing_file"):
        traces.read_trace(tmp_path / "nowhere")
    (tmp_path / "latin").write_bytes(b"{\xff}")
    with refused(Fault, "wrong_encoding"):
        traces.read_trace(tmp_path / "latin")


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_garbage_is_a_fault_never_a_crash(data: bytes) -> None:
    import tempfile

    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        try:
            traces.read_trace(file.name)
        except (Fault, Faults):
            pass


def test_prompts_have_the_lengths_and_share_the_beginnings(tmp_path: Path) -> None:
    rows = [mooncake(0, 1200, 5, 1, 2, 3), mooncake(1, 1300, 6, 1, 2, 4), mooncake(2, 700, 7, 9, 8), mooncake(3, 40, 8)]
    trace, tokenizer = traces.read_trace(written(tmp_path / "t", *rows)), tokens.load_tokenizer(None)
    prompts = TracePrompts(trace, 5, 6, tokenizer)
    texts = [prompts[number].prompt for number in range(8)]
    assert all(isinstance(text, str) for text in texts)
    lengths = [tokenizer.count(str(text)) for text in texts]
    assert lengths == [1200, 1300, 700, 40] * 2
    assert [prompts[number].max_tokens for number in range(4)] == [5, 6, 7, 8]
    words = [str(text).split(" ") for text in texts]
    assert words[0][:1024] == words[1][:1024] and words[0][1024] != words[1][1024]
    assert words[0][0] != words[2][0]
    assert words[0][1] != words[4][1]  # the second time round it is other text
    other = TracePrompts(trace, 5, 7, tokenizer)
    assert other[0].prompt != texts[0] and prompts[0] == TracePrompts(trace, 5, 6, tokenizer)[0]
    assert tokenizer.count(str(TracePrompts(trace, 5, 6, tokenizer, 9)[0].prompt)) == 1191
    assert any("comes again" in note for note in prompts.warnings(5)) and not prompts.warnings(4)


def test_a_trace_is_a_workload(tmp_path: Path) -> None:
    path = written(tmp_path / "busy.day.jsonl", *(mooncake(100 * number, 10, 2) for number in range(11)))
    workload = of_trace(path)
    assert workload.name == "busy" and isinstance(workload.requests, FromTrace)
    assert isinstance(workload.stages[0].arrival, Replay) and workload.stages[0].count == 11
    timetable = arrivals.build(workload, 1)
    assert timetable.columns().due_ns.tolist() == [100 * MS * number for number in range(11)]
    assert timetable.stages[0].offered_rps == pytest.approx(10)
    assert len(build(workload, 1, 2, tokens.load_tokenizer(None)).trace) == 11  # type: ignore[attr-defined]
    moved = tmp_path / "elsewhere.jsonl"
    moved.write_bytes(path.read_bytes())
    assert recipe_fingerprint(of_trace(moved), "server") == recipe_fingerprint(workload, "server")


def test_a_trace_under_flags_and_in_a_file(tmp_path: Path) -> None:
    written(tmp_path / "t.jsonl", *(mooncake(100 * number, 10, 2) for number in range(11)))
    file = tmp_path / "w.yaml"
    file.write_text("name: w\nrequests: {trace: t.jsonl}\nstages: [{arrival: {trace: {file: t.jsonl, speed: 4}}}]\n")
    assert arrivals.build(load(str(file)), 1).columns().due_ns.tolist() == [25 * MS * n for n in range(11)]
    short = of_trace(tmp_path / "t.jsonl", read_flags(duration="0.45s"))
    assert len(arrivals.build(short, 1).columns().due_ns) == 5
    longer = of_trace(tmp_path / "t.jsonl", read_flags(num_requests=25))
    assert arrivals.build(longer, 1).columns().due_ns.tolist()[11:13] == [1100 * MS, 1200 * MS]
    poisson = of_trace(tmp_path / "t.jsonl", read_flags(request_rate="50"))
    assert poisson.stages[0].arrival.tag == "poisson" and poisson.stages[0].count == 11
    warm = of_trace(tmp_path / "t.jsonl", read_flags(warmup="1s"))
    assert [stage.arrival.tag for stage in warm.stages] == ["poisson", "trace"]
    promised = of_trace(tmp_path / "t.jsonl", read_flags(), "qa")
    assert promised.slo is not None and promised.name == "qa" and promised.stages[0].count == 11
    with refused(Faults, "conflict", "--input-tokens"):
        of_trace(tmp_path / "t.jsonl", read_flags(input_tokens=5))
    with refused(Faults, "invalid_syntax", where="bad.jsonl:2"):
        of_trace(written(tmp_path / "bad.jsonl", mooncake(0, 5, 1), "{"))


def test_a_part_of_a_trace_faster_and_more_than_once(tmp_path: Path) -> None:
    path = written(tmp_path / "t.jsonl", *(mooncake(100 * number, 10 + number, 2, number) for number in range(11)))

    def due(**flags: Any) -> list[float]:
        return [ns / S for ns in arrivals.build(of_trace(path, read_flags(**flags)), 1).columns().due_ns.tolist()]

    assert due(trace_speed=4) == [n / 40 for n in range(11)]
    assert due(trace_slice="0.3..0.6") == [0, 0.1, 0.2] and due(trace_slice="900ms..") == [0, 0.1]
    assert len(due(trace_loop=3)) == 33 and due(trace_loop=3)[11] == pytest.approx(1.1)
    assert len(due(trace_loop=1000, duration="2.15s")) == 22
    assert len(due(trace_slice="..0.5", trace_loop=2, trace_speed=2)) == 10
    workload = of_trace(path, read_flags(trace_slice="0.3..0.6"))
    prompts = build(workload, 1, 2, tokens.load_tokenizer(None))
    assert [prompts.asked_input(number) for number in range(3)] == [13, 14, 15]  # type: ignore[attr-defined]
    assert recipe_fingerprint(workload, "server") != recipe_fingerprint(of_trace(path), "server")
    again = of_trace(path, read_flags(trace_slice="0.3..0.6"), "qa")
    assert again.stages[0].count == 3
    for flags, code in (
        ({"trace_slice": "5m.."}, "empty_file"),
        ({"trace_speed": 2, "request_rate": 5}, "no_effect"),
        ({"trace_loop": 1_000_000, "num_requests": 10**9}, "too_large"),
    ):
        with refused((Fault, Faults), code):
            of_trace(path, read_flags(**flags))
    with refused(Faults, "no_effect", "--set on_bad_row"):
        load("qa", read_flags(on_bad_row="skip"))
    file = tmp_path / "w.yaml"
    file.write_text(
        "name: w\nrequests: {trace: t.jsonl, slice: 300ms..600ms, on_bad_row: skip}\n"
        "stages: [{arrival: {trace: {file: t.jsonl, slice: 300ms..600ms, loop: 2, speed: 2}}}]\n"
    )
    assert len(arrivals.build(load(str(file)), 1).columns().due_ns) == 6
    by_hand = load(str(file))
    file.write_text(file.read_text().replace("300ms..600ms", "600ms"))
    with refused(Faults, "invalid_value", where="w.yaml:2"):
        load(str(file))
    block = "slice: 300ms..600ms, on_bad_row: skip, loop: 2, speed: 2"
    file.write_text(f"name: w\ntrace: {{file: t.jsonl, {block}}}\n")
    short = load(str(file))
    assert (short.requests, [stage.arrival for stage in short.stages]) == (
        by_hand.requests, [stage.arrival.model_copy(update={"on_bad_row": "skip"}) for stage in by_hand.stages],
    )  # fmt: skip
    assert load(str(file), read_flags(trace_loop=1)).stages[0].count == 3, "a flag stands over the file"
    file.write_text(f"name: w\nslo: {{ttft: 2s}}\ntrace: {{{block}}}\n")
    played = of_trace(path, base=str(file))
    assert played.slo is not None and len(arrivals.build(played, 1).columns().due_ns) == 6
    assert len(arrivals.build(of_trace(path, read_flags(trace_loop=1), str(file)), 1).columns().due_ns) == 3


@pytest.mark.parametrize(
    ("block", "code"),
    [
        ("trace: {speed: 2}", "missing_key"),
        ("trace: {file: t.jsonl, sped: 2}", "unknown_key"),
        ("trace: t.jsonl\nstages: [{arrival: {closed: 2}, count: 2}]", "conflict"),
        ("trace: {file: t.jsonl, speed: fast}", "wrong_type"),
    ],
)
def test_a_block_that_cannot_be_played_is_told(block: str, code: str, tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(json.dumps({"timestamp": 0, "input_length": 3, "output_length": 3}) + "\n")
    (tmp_path / "w.yaml").write_text(f"name: w\n{block}\n")
    with refused(Faults, code, where="w.yaml:"):
        load(str(tmp_path / "w.yaml"))


@given(
    gaps=st.lists(st.integers(0, S), min_size=1, max_size=30),
    speed=st.sampled_from([0.5, 1.0, 3.0]),
    count=st.none() | st.integers(1, 100),
    seconds=st.none() | st.integers(1, 20),
)
def test_written_arrivals_ascend_and_end(gaps: list[int], speed: float, count: int | None, seconds: int | None) -> None:
    offsets = np.cumsum([0, *gaps])
    end = int(offsets[-1]) + int(offsets[-1]) // len(gaps)
    duration = None if seconds is None else seconds * S
    made = arrivals.given(offsets, end, speed=speed, duration_ns=duration, count=count)
    assert (np.diff(made.offsets) >= 0).all()
    if count is not None:
        assert len(made.offsets) <= count and (duration is not None or len(made.offsets) == count)
    if duration is not None:
        assert not len(made.offsets) or made.offsets[-1] < duration
    if count is None and duration is None:
        assert made.offsets.tolist() == np.rint(offsets / speed).astype(np.int64).tolist()
