"""Runs that replay recorded sessions: what the server receives, and when the load ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from run_fixtures import NO_PAGES
from scripted_server import Heard, events, serving

from loadgen.core.execution.plan import Settings
from loadgen.core.execution.run import execute
from loadgen.core.metrics.summary import Summary
from loadgen.core.results import store
from loadgen.core.results.store import Stored
from loadgen.core.workload.loading import workload_from_mapping
from loadgen.sim import presets

TURNS = 4


def sessions(folder: Path, count: int, delay_s: float = 0.0) -> Path:
    """Write sessions of TURNS turns, whose questions are long enough for blocks of a cache."""
    rows = []
    for number in range(count):
        for turn in range(1, 2 * TURNS + 1):
            role = "user" if turn % 2 else "assistant"
            content = f"message {turn} of session {number} " * 40
            row = {"conversation_id": f"s{number}", "turn": turn, "role": role, "content": content}
            if role == "user":
                row["delay_seconds"] = delay_s
            rows.append(row)
    path = folder / "sessions.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(
    folder: Path, url: str | None, *, users: int = 3, count: int = 6, **requests: object
) -> tuple[Summary, Stored]:
    content = {
        "name": "t",
        "requests": {"trajectories": str(folder / "sessions.jsonl"), "output_tokens": 3} | requests,
        "stages": [{"arrival": {"closed": users}, "count": count}],
        "seed": 5,
    }
    known = {"model": "sim", "server": "trtllm"} if url and url.startswith("http") else {}
    settings = Settings(url=url, out=folder / "out", **known, **NO_PAGES)
    summary, out = execute(workload_from_mapping(content), settings)
    return summary, store.read_run(out)


REPLY = events(
    {"choices": [{"delta": {"content": "real"}}]},
    {
        "choices": [{"delta": {"content": "!"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 9, "completion_tokens": 2},
    },
)


def contents(heard: list[Heard]) -> list[list[str]]:
    """Return the texts of the messages of each request that was no probe."""
    bodies = [request.body for request in heard if request.body and "messages" in request.body]
    return [[message["content"] for message in body["messages"]] for body in bodies]


def test_a_server_receives_the_recorded_conversation_in_each_turn(tmp_path):
    sessions(tmp_path, 2)
    with serving(REPLY) as server:
        summary, _ = run(tmp_path, server.url, users=2, count=2, salt="none")
        received = [texts for texts in contents(server.heard) if texts[0].startswith("message")]

    expected = [
        [f"message {turn} of session {number} " * 40 for turn in range(1, 2 * length)]
        for number in range(2)
        for length in range(1, TURNS + 1)
    ]
    assert sorted(received) == sorted(expected)
    assert summary.requests.ok == 2 * TURNS


def test_real_responses_of_the_server_are_sent_in_later_turns(tmp_path):
    row = {"turns": ["One?", "Two?", "Three?"]}
    (tmp_path / "sessions.jsonl").write_text(json.dumps(row) + "\n")
    with serving(REPLY) as server:
        run(tmp_path, server.url, users=1, count=1, salt="none")
        longest = max(contents(server.heard), key=len)

    assert longest == ["One?", "real!", "Two?", "real!", "Three?"]


def one_replica(folder: Path) -> str:
    """Return the URL of a simulated server with one replica, whose cache serves all requests."""
    preset = (Path(presets.__file__).parent / "gb300-vm.yaml").read_text("utf-8")
    path = folder / "one.yaml"
    path.write_text(preset.replace("gpus_per_vm: 4", "gpus_per_vm: 1"))
    return f"sim:{path}"


def test_measured_sessions_hit_the_cache_that_was_filled_before_the_load(tmp_path):
    sessions(tmp_path, 8)
    warm, stored = run(tmp_path, one_replica(tmp_path), users=8, count=8, start="middle")
    rows = stored.rows
    fills = rows[rows["stage"] == 0]
    first_turns = rows[(rows["stage"] == 1) & (rows["turn"] == 0)]

    assert len(fills) == 8
    assert (fills["output_tokens"] == 1).all()
    assert fills["end_ns"].max() <= first_turns["sent_ns"].min(), "the fill ends before the load"
    assert (first_turns["cached_tokens"] > 0).all()
    assert warm.requests.scheduled == len(rows) - 8

    cold, cold_stored = run(tmp_path, one_replica(tmp_path), users=8, count=8)
    cold_first = cold_stored.rows[cold_stored.rows["turn"] == 0]
    assert (cold_first["cached_tokens"] <= 0).all()
    assert cold.requests.ok == 8 * TURNS


def test_a_salt_prevents_cache_hits_between_copies_of_a_session(tmp_path):
    sessions(tmp_path, 1)
    _, salted = run(tmp_path, one_replica(tmp_path), users=1, count=4)
    _, plain = run(tmp_path, one_replica(tmp_path), users=1, count=4, salt="none")

    def cached_of_first_turns(stored: Stored) -> list[Any]:
        rows = stored.rows[stored.rows["turn"] == 0]
        return np.sort(rows["cached_tokens"])[-3:].tolist()

    assert max(cached_of_first_turns(salted)) <= 0
    assert min(cached_of_first_turns(plain)) > 0


def test_a_load_ends_when_the_first_user_has_no_further_session(tmp_path):
    sessions(tmp_path, 5, delay_s=1.0)
    complete, _ = run(tmp_path, one_replica(tmp_path), users=3, count=7)
    first, stored = run(tmp_path, one_replica(tmp_path), users=3, count=7, end="first")

    assert complete.requests.ok == 7 * TURNS
    assert first.requests.ok < 7 * TURNS
    rows = stored.rows
    ends_of_sessions = rows[rows["turn"] == TURNS - 1]
    user_of_end = ends_of_sessions["virtual_user"]
    # Users 1 and 2 send two sessions each, and the first of them to end its second ends the load.
    second_ends = [
        np.sort(ends_of_sessions["end_ns"][user_of_end == user])[1]
        for user in (1, 2)
        if (user_of_end == user).sum() == 2
    ]
    assert rows["sent_ns"].max() <= min(second_ends)
    assert first.verdict.valid
    assert first.requests.dropped == 0


def test_pauses_between_turns_are_capped(tmp_path):
    sessions(tmp_path, 1, delay_s=100.0)
    _, stored = run(tmp_path, one_replica(tmp_path), users=1, count=1, idle_cap="2s")
    rows = np.sort(stored.rows, order="turn")
    pauses_s = (rows["due_ns"][1:] - rows["end_ns"][:-1]) / 1e9
    assert np.allclose(pauses_s, 2.0, atol=1e-3)
