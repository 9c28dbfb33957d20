"""Every trace format, by its own words; what is wrong with one, by its line; and what a replay sends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.errors import Fault, Faults
from loadgen.requests import tokenizer as tokens
from loadgen.requests.build import build
from loadgen.requests.trace_prompts import TracePrompts
from loadgen.schedule import arrivals
from loadgen.schedule import timetable as schedule
from loadgen.workload import FromTrace, Replay, load, of_trace, read_flags, recipe_fingerprint, traces

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


FILES: dict[str, tuple[list[Any], str, list[int], list[int], list[int]]] = {
    "mooncake.jsonl": (
        [mooncake(27_482, 6955, 52, *range(14)), mooncake(30_535, 6472, 26, *range(13))],
        "Mooncake", [0, 3053 * MS], [6955, 6472], [52, 26],
    ),
    "seconds.jsonl": ([mooncake(0.5, 20, 3, 1, 2), mooncake(2.25, 20, 4, 1, 3)], "Mooncake",
                      [0, 1_750 * MS], [20, 20], [3, 4]),
    "unsorted.jsonl": ([mooncake(9, 5, 1), mooncake(2, 6, 2)], "Mooncake", [0, 7 * MS], [6, 5], [2, 1]),
    "bailian.jsonl": (
        [bailian(1, -1, 0.0, 30, 9, 7, 8), bailian(2, -1, 0.125, 16, 1, 9), bailian(3, 1, 61.5, 60, 8, 7, 8, 4, 5)],
        "Bailian", [0, 125 * MS, 61_500 * MS], [30, 16, 60], [9, 1, 8],
    ),
    "shape.jsonl": (
        [shape(1_700_000_000_123.456, 700, 7, 1, 2, session_id="a-1", turn=0),
         shape(1_700_000_000_125.0, 900, 8, 1, 2, 3, session_id="a-1", turn=1, delay=3.5)],
        "shape trace", [0, 1_544_000], [700, 900], [7, 8],
    ),
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
    assert trace.skipped == (1 if name == "burst.csv" else 0)


def test_blocks_sessions_and_their_sizes(tmp_path: Path) -> None:
    trace = traces.read_trace(written(tmp_path / "m", *FILES["mooncake.jsonl"][0]))
    assert [trace.tokens_of[number] for number in (0, 12, 13)] == [512, 512, 6955 - 13 * 512]
    chats = traces.read_trace(written(tmp_path / "b", *FILES["bailian.jsonl"][0]))
    assert (chats.session.tolist(), chats.turn.tolist()) == ([0, 1, 0], [0, 0, 1])
    assert [chats.tokens_of[number] for number in (7, 8, 4, 5)] == [16, 14, 16, 12]
    own = traces.read_trace(written(tmp_path / "s", *FILES["shape.jsonl"][0]))
    assert (own.session.tolist(), own.turn.tolist()) == ([0, 0], [0, 1])
    assert [own.tokens_of[number] for number in (1, 2, 3)] == [350, 350, 300]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (["", "  "], "no requests in the trace"),
        ([mooncake(0, 5, 0)], "none of its 1 rows has an answer"),
        ([{"prompt": "Hello"}], "(?s)these are prompts, not a trace.*requests: {from:"),
        ([{"a": 1}], "(?s)not a trace that is known here.*Mooncake"),
        (["a,b", "1,2"], "not a trace that is known here"),
        ([mooncake(0, 5, 1), "{broken"], "(?s)not JSON.*:2"),
        ([mooncake(0, 5, 1), [1]], "(?s)not a JSON object.*:2"),
        ([mooncake(0, 5, 1), mooncake("soon", 5, 1)], '(?s)timestamp is "soon".*:2'),  # type: ignore[arg-type]
        ([mooncake(0, 0, 1)], "(?s)input_length is 0.*:1"),
        ([mooncake(0, 5, 1), mooncake(1, 5, 1.5)], "output_length is 1.5"),  # type: ignore[arg-type]
        ([mooncake(0, 5, 1), {**mooncake(1, 5, 1), "hash_ids": "x"}], 'hash_ids is "x"'),
        (["TIMESTAMP,ContextTokens,GeneratedTokens", "yesterday,1,2"], "(?s)timestamp is 'yesterday'.*:2"),
        (["timestamp,input_length,output_length", "1,2"], "(?s)2 fields, the first line names 3.*:2"),
        (["timestamp,input_length,output_length", "nan,2,3"], 'timestamp is "nan"'),
        (["timestamp,input_length,output_length", "1,2,3.5"], "output_length is 3.5"),
    ],
)
def test_what_is_wrong_is_said_with_its_line(rows: list[Any], words: str, tmp_path: Path) -> None:
    import re

    with pytest.raises((Fault, Faults)) as found:
        traces.read_trace(written(tmp_path / "t", *rows))
    assert re.search(words, str(found.value)), str(found.value)


def test_all_faults_up_to_a_point(tmp_path: Path) -> None:
    with pytest.raises(Faults) as found:
        traces.read_trace(written(tmp_path / "t", mooncake(0, 5, 1), *(mooncake(1, 0, 1) for _ in range(50))))
    assert len(found.value.faults) == 21 and "stopped after 20" in str(found.value)
    with pytest.raises(Fault, match="cannot read"):
        traces.read_trace(tmp_path / "nowhere")
    (tmp_path / "latin").write_bytes(b"{\xff}")
    with pytest.raises(Fault, match="not a text file"):
        traces.read_trace(tmp_path / "latin")


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
    timetable = schedule.build(workload, 1)
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
    assert schedule.build(load(str(file)), 1).columns().due_ns.tolist() == [25 * MS * n for n in range(11)]
    short = of_trace(tmp_path / "t.jsonl", read_flags(duration="0.45s"))
    assert len(schedule.build(short, 1).columns().due_ns) == 5
    longer = of_trace(tmp_path / "t.jsonl", read_flags(num_requests=25))
    assert schedule.build(longer, 1).columns().due_ns.tolist()[11:13] == [1100 * MS, 1200 * MS]
    poisson = of_trace(tmp_path / "t.jsonl", read_flags(request_rate="50"))
    assert poisson.stages[0].arrival.tag == "poisson" and poisson.stages[0].count == 11
    warm = of_trace(tmp_path / "t.jsonl", read_flags(warmup="1s"))
    assert [stage.arrival.tag for stage in warm.stages] == ["poisson", "trace"]
    promised = of_trace(tmp_path / "t.jsonl", read_flags(), "qa")
    assert promised.slo is not None and promised.name == "qa" and promised.stages[0].count == 11
    with pytest.raises(Faults) as found:
        of_trace(tmp_path / "t.jsonl", read_flags(input_tokens=5))
    assert "the lengths are those of the trace" in str(found.value)
    with pytest.raises(Faults) as found:
        of_trace(written(tmp_path / "bad.jsonl", mooncake(0, 5, 1), "{"))
    assert "bad.jsonl:2" in str(found.value)


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
