"""Sessions of agent traces: the order of their requests, and what a server receives."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from expected_errors import refused
from run_fixtures import NO_PAGES
from servers import start
from trace_rows import bailian, captured, mooncake, otlp, shape, span, subagent, tracelab, weka

from loadgen.core.errors import CombinedError, LoadgenError
from loadgen.core.execution.plan import Settings
from loadgen.core.execution.run import execute
from loadgen.core.requests.build import build_prompts
from loadgen.core.requests.tokenizer import load_tokenizer
from loadgen.core.results import store
from loadgen.core.schedule.build import build_schedule
from loadgen.core.workload import (
    Workload,
    load,
    read_flags,
    recipe_fingerprint,
    trace_sessions,
    traces,
    workload_from_trace,
)
from loadgen.sim.server.options import Options
from loadgen.sim.server.send_log import parse_log

S, MS = 1_000_000_000, 1_000_000


def call(at: float, took: float | None, read: int, write: int, *hashes: int) -> dict[str, Any]:
    lasting = {} if took is None else {"api_time": took}
    return {
        "t": at,
        "type": "n",
        "model": "m",
        "in": read,
        "out": write,
        "hash_ids": list(hashes),
        **lasting,
    }


AGENT = weka(
    "a",
    call(0, 2.0, 130, 5, 1, 2),
    subagent(3, call(3.5, 1.0, 64, 7, 9), call(5.0, 2.0, 90, 6, 9, 10)),
    subagent(3, call(4.0, 1.0, 64, 7, 8)),
    call(8.0, 1.0, 200, 6, 1, 2, 3),
    call(9.5, 0.5, 260, 9, 1, 2, 3, 4),
)
AGENT["requests"][2]["agent_id"] = "y"


def ended(start_ns: int, end_ns: int, read: int, talk: str) -> dict[str, Any]:
    agent_span = span(start_ns, read, 5)
    agent_span["attributes"][1]["value"]["stringValue"] = talk
    return {**agent_span, "endTimeUnixNano": str(end_ns)}


EPOCH = 1_784_000_000 * S
FILES: dict[str, tuple[list[Any], list[list[tuple[tuple[int, ...], int]]]]] = {
    # of each session, in order of its start: what each request waits for, and the pause after it
    "weka": (
        [AGENT, weka("b", call(1, 1.0, 64, 8, 1))],
        [
            [
                ((), 0),
                ((0,), 1500 * MS),  # sub-agent x, 1.5 s after the end of what spawned it
                ((0,), 2 * S),  # sub-agent y
                ((1,), 500 * MS),  # x again
                ((0, 2, 3), S),  # the agent goes on a second after the last sub-agent
                ((4,), 500 * MS),
            ],
            [((), 0)],
        ],
    ),
    "tracelab": (
        [tracelab("c:1", 5, 0, 1100, 30), tracelab("c:1", 9, 1030, 500, 10)],
        [[((), 0), ((0,), 0)]],  # by its file the answer of the first ended after the second began
    ),
    "spans": (
        [
            otlp(
                ended(EPOCH, EPOCH + 2 * S, 30, "talk"),
                ended(EPOCH + 5 * S, EPOCH + 6 * S, 60, "talk"),
            ),
            otlp(ended(EPOCH + S, EPOCH + 2 * S, 40, "other")),
        ],
        [[((), 0), ((0,), 3 * S)], [((), 0)]],
    ),
    "shape": (
        [
            shape(1_700_000_000_123.0, 700, 7, 1, 2, session_id="a-1", turn=0),
            shape(1_700_000_009_125.0, 900, 8, 1, 2, 3, session_id="a-1", turn=1, delay=3500.0),
        ],
        [[((), 0), ((0,), 3500 * MS)]],
    ),
    "mooncake": (
        [
            {**mooncake(0, 700, 7, 1), "session_id": "a"},
            {**mooncake(100, 300, 9), "session_id": "b"},
            {**mooncake(9000, 900, 8, 1, 2), "session_id": "a", "delay": 250},
        ],
        [[((), 0), ((0,), 250 * MS)], [((), 0)]],
    ),
    "alone": ([captured(4, 13, 31), captured(9, 12, 30)], [[((), 0)], [((), 0)]]),
}


def written(folder: Path, rows: list[Any], name: str = "trace.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def sessions(path: Path, **flags: str) -> Workload:
    return workload_from_trace(path, read_flags(trace_replay="sessions", **flags))


@pytest.mark.parametrize("name", FILES)
def test_a_request_waits_for_its_predecessors_of_the_trace(tmp_path: Path, name: str) -> None:
    rows, expected = FILES[name]
    built_sessions = trace_sessions.build_sessions(traces.read_trace(written(tmp_path, rows)))
    graphs = [built_sessions.graph(session) for session in range(len(built_sessions))]
    assert [list(zip(*graph, strict=True)) for graph in graphs] == expected
    assert (np.diff(built_sessions.due_ns) >= 0).all()


def agent_spans() -> dict[str, Any]:
    """Return spans as agent traces have them: dates as texts and usage under older names."""

    def build_span(
        span_id: str, around: str | None, start: float, end: float, operation: str, *usage: int
    ) -> dict[str, Any]:
        names = ("gen_ai.usage.prompt_tokens", "gen_ai.usage.completion_tokens")
        attributes = {
            "gen_ai.operation.name": operation,
            "exgentic.session.id": "s",
            **dict(zip(names, usage, strict=False)),
        }
        dates = (f"2026-02-25T10:00:{at:09.6f}" for at in (start, end))
        keys = ("trace_id", "span_id", "parent_span_id", "start_time", "end_time", "attributes")
        return dict(zip(keys, ("t1", span_id, around, *dates, attributes), strict=True))

    spans = [
        build_span("root", None, 0, 20, "invoke_agent"),
        build_span("a", "root", 0, 2, "chat", 100, 10),
        build_span("b", "root", 2.5, 4.5, "chat", 120, 10),
        build_span("c", "root", 3, 5, "chat", 130, 10),  # beside b
        build_span("tool", "root", 5, 6, "execute_tool"),
        build_span("inner", "tool", 5.5, 9, "invoke_agent"),
        build_span("d", "inner", 6, 8, "chat", 50, 5),
        build_span("e", "inner", 8.5, 9, "chat", 70, 5),
        build_span("f", "root", 10, 11, "chat", 400, 20),
    ]
    return {"trace_id": "t1", "span_count": len(spans), "spans": spans}


def test_sessions_without_hashes_cause_a_warning(tmp_path: Path) -> None:
    """Their prompts were all new, with no word: "0 % cached" looked like the server's."""
    columns = (
        "Timestamp",
        "Session ID",
        "Elapsed time",
        "Model",
        "Request tokens",
        "Response tokens",
        "Total tokens",
        "Log Type",
    )
    csv = [",".join(columns)]
    csv += [f"{at},s,1.5,m,{100 + at},20,{120 + at},Conversation log" for at in (0, 9, 20)]
    file = tmp_path / "burst.csv"
    file.write_text("\n".join(csv) + "\n")
    warning_text = "the trace does not record which prompts share"
    built_prompts: Any = build_prompts(sessions(file), 7, 1, load_tokenizer())

    assert warning_text in " ".join(built_prompts.warnings(3))
    other: Any = build_prompts(workload_from_trace(file, read_flags()), 7, 1, load_tokenizer())
    assert warning_text not in " ".join(other.warnings(3)), "instants promise no conversation"


def test_later_rows_of_aiperf_sessions_contain_only_new_messages(tmp_path: Path) -> None:
    """Read as whole prompts, the longest request had 167,000 instead of 10,000 tokens."""
    rows = [
        {
            "session_id": "s",
            "input_length": 1536,
            "output_length": 320,
            "hash_ids": [0, 1, 2],
            "timestamp": 0.0,
        },
        {
            "session_id": "s",
            "input_length": 768,
            "output_length": 180,
            "hash_ids": [1000, 1001],
            "delay": 2450.3,
        },
        {
            "session_id": "s",
            "input_length": 100,
            "output_length": 10,
            "hash_ids": [1002],
            "delay": 10,
        },
        {
            "session_id": "t",
            "input_length": 1600,
            "output_length": 5,
            "hash_ids": [0, 1, 2, 9],
            "timestamp": 5.0,
        },
        {"session_id": "u", "input_length": 200, "output_length": 50, "timestamp": 6.0},
        {"session_id": "u", "input_length": 70, "output_length": 50, "delay": 1},
    ]
    trace = traces.read_trace(written(tmp_path, rows))
    by_session = {
        session: trace.input_tokens[trace.session == session].tolist() for session in range(3)
    }

    assert by_session == {0: [1536, 1536 + 320 + 768, 2624 + 180 + 100], 1: [1600], 2: [200, 320]}

    first, second, third, other, talk, more = (
        list(trace.block_hashes(row)) for row in np.lexsort((trace.due_ns, trace.session))
    )

    assert (
        second[: len(first)] == first
        and third[: len(second)] == second
        and more[: len(talk)] == talk
    )
    assert other[:3] == first[:3] and (len(first), len(second), len(third)) == (3, 5, 6)
    assert trace.reused_share() == pytest.approx(
        (1536 + 2560 + 1536 + 192) / (1536 + 2624 + 2904 + 1600 + 200 + 320), 0.01
    )


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("listed", [False, True])
def test_published_spans_of_agents_are_read_as_sessions(
    tmp_path: Path, indent: int | None, listed: bool
) -> None:
    """Such a file was refused, and calls without `gen_ai.conversation.id` stood alone."""
    file = tmp_path / "agents.json"
    file.write_text(json.dumps([agent_spans()] if listed else agent_spans(), indent=indent))
    trace = traces.read_trace(file)

    assert (trace.format, trace.input_tokens.tolist()) == (
        "OpenTelemetry GenAI",
        [100, 120, 130, 50, 70, 400],
    )
    built_sessions = trace_sessions.build_sessions(trace)
    assert [
        list(zip(*built_sessions.graph(session), strict=True))
        for session in range(len(built_sessions))
    ] == [
        [
            ((), 0),
            ((0,), 500 * MS),
            ((0,), S),
            ((1,), 1500 * MS),
            ((3,), 500 * MS),
            ((1, 2, 4), S),
        ]
    ]


@pytest.mark.parametrize(
    "rows", [[AGENT, weka("b", call(1, 1.0, 64, 8, 1))], FILES["spans"][0], FILES["shape"][0]]
)
def test_requests_of_a_session_are_due_after_responses_and_the_recorded_pause(
    tmp_path: Path, rows: list[Any]
) -> None:
    workload = sessions(written(tmp_path, rows), trace_loop="2", seed="7")
    trace = traces.read_replayed_trace(workload.requests)  # type: ignore[arg-type]
    built_sessions = trace_sessions.build_sessions(trace)
    summary, folder = execute(workload, Settings(url="sim:gb300-vm", out=tmp_path / "out"))
    records_by_slot = {int(row["slot"]): row for row in store.read_run(folder).rows}
    built_prompts: Any = build_prompts(workload, 7, 1, load_tokenizer())

    assert len(records_by_slot) == 2 * len(trace) == summary.requests.ok
    assert summary.sessions is not None and summary.sessions.count == 2 * len(built_sessions)
    assert sorted(records_by_slot) == sorted(built_prompts.request_ids(2 * len(trace)))

    (starts,) = (stage.arrivals_ns.tolist() for stage in build_schedule(workload, 7).stages)
    for number, row in records_by_slot.items():
        chain, turn = int(row["session"]), int(row["turn"])
        waits, pauses = built_sessions.graph(chain % len(built_sessions))
        source = int(built_sessions.rows(chain % len(built_sessions))[turn])
        assert (row["input_tokens"], row["output_tokens"]) == (
            trace.input_tokens[source],
            trace.output_tokens[source],
        )
        assert built_prompts.locate(number)[:2] == (chain // len(built_sessions), source)
        numbers = [
            chain * built_prompts.turns
            + (built_prompts.max_turns - 1 if turn == len(waits) - 1 else turn)
            for turn in waits[turn]
        ]
        ends = [int(records_by_slot[before]["end_ns"]) for before in numbers]
        assert row["due_ns"] == (max(ends) + pauses[turn] if ends else starts[chain])


@pytest.mark.processes
def test_a_server_receives_the_requests_of_a_session_in_order(tmp_path: Path) -> None:
    quick = weka(
        "a",
        call(0, 0.02, 130, 5, 1, 2),
        subagent(0, call(0.03, 0.02, 64, 7, 9), call(0.08, 0.02, 90, 6, 9, 10)),
        call(0.15, 0.02, 200, 6, 1, 2, 3),
    )
    workload = sessions(written(tmp_path, [quick, weka("b", call(0.05, 0.02, 64, 8, 1))]), seed="7")
    built_sessions = trace_sessions.build_sessions(traces.read_replayed_trace(workload.requests))  # type: ignore[arg-type]
    with start(Options(ttft="20ms", itl="2ms", log_events="ends")) as server:
        execute(workload, Settings(url=server.url, out=tmp_path / "out", **NO_PAGES))
        log = parse_log(urllib.request.urlopen(server.url + "/_log").read())
    built_prompts: Any = build_prompts(workload, 7, 1, load_tokenizer())
    arrived, answered = {}, {}
    for heard in log.requests:
        if "-" in heard.id:  # those of the probe have no name
            request = built_prompts[int(heard.id.rpartition("-")[2])]
            place = (request.session, request.turn)
            assert (
                heard.input_tokens >= request.input_tokens
                and heard.output_tokens == request.max_tokens
            )
            arrived[place] = heard.arrival_ns
            answered[place] = int(log.sent_ns[log.request == heard.number].max())

    assert sorted(arrived) == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0)]
    for turn, (before, pause_ns) in enumerate(zip(*built_sessions.graph(0), strict=True)):
        assert all(arrived[0, turn] > answered[0, other] + pause_ns for other in before)
        assert (
            not before
            or arrived[0, turn] < max(answered[0, other] for other in before) + pause_ns + S
        )


def test_sessions_without_durations_are_refused(tmp_path: Path) -> None:
    silent = written(tmp_path, [weka("a", call(0, None, 130, 5, 1), call(3, None, 140, 5, 1))])

    with refused((LoadgenError, CombinedError), "unsupported") as exc_info:
        sessions(silent)
    assert "replay instants" in str(exc_info.value)

    chats = written(
        tmp_path, [bailian(1, -1, 0.0, 30, 9), bailian(3, 1, 61.5, 60, 8)], "chats.jsonl"
    )

    with refused((LoadgenError, CombinedError), "unsupported"):
        sessions(chats)
    with refused(CombinedError, "no_effect", "--set trace_replay"):
        load("qa", read_flags(trace_replay="sessions"))
    with refused(CombinedError, "invalid_value", "--set trace_speed"):
        sessions(silent, trace_speed="x")


def test_sessions_start_by_any_arrival_law_and_are_refused_in_a_class(tmp_path: Path) -> None:
    written(tmp_path, [AGENT, weka("b", call(1, 1.0, 64, 8, 1))])
    (tmp_path / "w.yaml").write_text(
        "name: w\n"
        "requests: {trace: trace.jsonl, replay: sessions}\n"
        "stages: [{arrival: {poisson: 2/s}, count: 6}]\n"
    )
    workload = load(str(tmp_path / "w.yaml"), read_flags(seed="3"))
    schedule = build_schedule(workload, 3)

    assert schedule.slot_count == 3 * 7
    summary, _ = execute(workload, Settings(url="sim:gb300-vm", out=tmp_path / "out"))
    assert summary.sessions is not None and (summary.sessions.ok, summary.requests.ok) == (6, 21)

    (tmp_path / "m.yaml").write_text(
        "name: m\nclasses: {a: {weight: 1, requests: {trace: trace.jsonl, replay: sessions}}}\n"
        "stages: [{arrival: {poisson: 2/s}, count: 6}]\n"
    )

    with refused(CombinedError, "unsupported", "classes.a.requests"):
        load(str(tmp_path / "m.yaml"))


def test_the_fingerprint_depends_on_whether_sessions_are_replayed(tmp_path: Path) -> None:
    path = written(tmp_path, FILES["mooncake"][0])
    plain, replayed_workload = (
        workload_from_trace(path),
        workload_from_trace(path, read_flags(trace_replay="instants")),
    )
    chains = workload_from_trace(path, read_flags(trace_replay="sessions"))
    recipes = [
        recipe_fingerprint(requested_workload, "server")
        for requested_workload in (plain, replayed_workload, chains)
    ]

    assert recipes[0] == recipes[1] != recipes[2]
