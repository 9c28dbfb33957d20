"""Recorded sessions: how data sets are read, which turns are sent, with which salts and pauses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from expected_errors import refused
from hypothesis import given
from hypothesis import strategies as st

from loadgen.core.errors import MAX_ERRORS, CombinedError, UserError
from loadgen.core.execution.plan_notes import lost_keys_notes
from loadgen.core.requests.build import build_prompts
from loadgen.core.requests.prompts import AssistantTurn
from loadgen.core.requests.tokenizer import load_tokenizer
from loadgen.core.requests.trajectory_prompts import TrajectoryPrompts
from loadgen.core.schedule.build import build_schedule
from loadgen.core.workload import Workload, read_flags, recipe_fingerprint
from loadgen.core.workload.cache_fill import with_cache_fill
from loadgen.core.workload.loading import (
    load_from_options,
    workload_from_dataset,
    workload_from_mapping,
)
from loadgen.core.workload.row_errors import BadRowError
from loadgen.core.workload.trajectory_data import read_trajectories
from loadgen.core.workload.trajectory_rows import parse_session_row

S = 1_000_000_000
SYSTEM = "You are a coding agent."
TOOLS = [{"type": "function", "function": {"name": "read"}}]
CALL = {"id": "x1", "type": "function", "function": {"name": "read", "arguments": "{}"}}


def message(name: str, turn: int, role: str, **fields: Any) -> dict[str, Any]:
    return {"conversation_id": name, "turn": turn, "role": role} | fields


def agent(name: str = "a") -> list[dict[str, Any]]:
    """Return a session of three turns in the format of MLPerf Endpoints."""
    return [
        message(name, 1, "user", system=SYSTEM, content="Fix it.", tools=TOOLS, delay_seconds=0.4),
        message(name, 2, "assistant", tool_calls=[CALL]),
        message(
            name,
            3,
            "tool",
            tool_results=[{"tool_call_id": "x1", "content": "line one"}],
            delay_seconds=1.5,
        ),
        message(name, 4, "assistant", content="Fixed.", reasoning_content="It was easy."),
        message(name, 5, "user", content="Test it.", delay_seconds=300),
        message(name, 6, "assistant", content="Tested."),
    ]


def chat(name: str = "b") -> list[dict[str, Any]]:
    return [
        message(name, 1, "user", content="Hello", max_tokens=7),
        message(name, 2, "assistant", content="Hi"),
        message(name, 3, "user", content="Bye"),
    ]


def written(folder: Path, rows: list[Any]) -> Path:
    path = folder / "sessions.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def load(path: Path, users: int = 2, count: int = 6, **requests: object) -> Workload:
    content = {
        "name": "t",
        "requests": {"trajectories": str(path), **requests},
        "stages": [{"arrival": {"closed": users}, "count": count}],
        "seed": 3,
    }
    return workload_from_mapping(content)


def built(workload: Workload, salt: int = 1) -> TrajectoryPrompts:
    prompts = build_prompts(workload, workload.seed or 0, salt, load_tokenizer())
    assert isinstance(prompts, TrajectoryPrompts)
    return prompts


def texts(prompts: TrajectoryPrompts, session: int, turn: int) -> list[str]:
    """Return the contents of the messages of a turn of a session."""
    for request_id in range(session * prompts.turns, (session + 1) * prompts.turns):
        try:
            sent = prompts.locate(request_id)
        except IndexError:
            continue
        if sent.position == turn:
            return [message["content"] for message in prompts[request_id].messages or []]
    raise AssertionError("the session has no such turn")


# -- reading -------------------------------------------------------------------------------------


def test_a_session_with_one_message_per_row_becomes_turns_with_results_of_tools(tmp_path):
    data = read_trajectories(written(tmp_path, [{"_type": "dataset_metadata"}, *agent(), *chat()]))

    assert data.turn_counts.tolist() == [3, 2]
    first, second, third = data[0].turns
    assert first.messages == [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": "Fix it."},
    ]
    assert first.response == {"role": "assistant", "content": None, "tool_calls": [CALL]}
    assert second.messages == [{"role": "tool", "tool_call_id": "x1", "content": "line one"}]
    assert second.response is not None
    assert second.response["reasoning_content"] == "It was easy."
    assert [turn.delay_ns for turn in data[0].turns] == [0.4 * S, 1.5 * S, 300 * S]
    assert data[0].extra == {"tools": TOOLS}
    assert third.response == {"role": "assistant", "content": "Tested."}
    assert data[1].turns[0].output_tokens == 7
    assert data[1].turns[1].response is None


def test_all_turns_of_speed_bench_and_sharegpt_are_read():
    speed_bench = parse_session_row({"question_id": 1, "turns": ["One?", "Two?", "Three?"]})
    sharegpt = parse_session_row(
        {
            "conversations": [
                {"from": "gpt", "value": "Welcome"},
                {"from": "human", "value": "One?"},
                {"from": "gpt", "value": "1"},
                {"from": "human", "value": "Two?"},
            ]
        }
    )

    contents = [[message["content"] for message in turn.messages] for turn in speed_bench.turns]
    assert contents == [["One?"], ["Two?"], ["Three?"]]
    assert [turn.response for turn in speed_bench.turns] == [None] * 3
    assert [turn.messages[0]["content"] for turn in sharegpt.turns] == ["One?", "Two?"]
    assert sharegpt.turns[0].response == {"role": "assistant", "content": "1"}


@pytest.mark.parametrize(
    ("change", "code", "key"),
    [
        ({"turn": 7}, "unordered", "turn"),
        ({"role": "tool"}, "invalid_value", "role"),
        ({"role": "robot"}, "invalid_value", "role"),
        ({"delay_seconds": -1}, "wrong_type", "delay_seconds"),
        ({"delay_seconds": "soon"}, "wrong_type", "delay_seconds"),
        ({"content": ""}, "wrong_type", "content"),
        ({"max_tokens": 0}, "wrong_type", "max_tokens"),
        ({"tools": "all"}, "wrong_type", "tools"),
        ({"conversation_id": ""}, "wrong_type", "conversation_id"),
    ],
)
def test_an_invalid_trajectory_row_is_reported_with_its_line(tmp_path, change, code, key):
    rows = [*chat("first"), message("a", 1, "user", content="Hi") | change]
    with refused(CombinedError, code, key, "sessions.jsonl:4"):
        read_trajectories(written(tmp_path, rows))


def test_a_tool_result_without_its_tool_call_is_reported_with_its_line(tmp_path):
    rows = agent()
    rows[2]["tool_results"] = [
        {"tool_call_id": "x1", "content": "line one"},
        {"tool_call_id": "x2", "content": "line two"},
    ]
    key = "tool_results[1].tool_call_id"
    with refused(CombinedError, "mismatch", key, "sessions.jsonl:3"):
        read_trajectories(written(tmp_path, rows))


def test_tool_results_may_refer_to_any_earlier_call_of_their_session(tmp_path):
    repeated_result = {"tool_call_id": "x1", "content": "once more"}
    rows = agent()
    rows[3] = message("a", 4, "assistant", tool_calls=[CALL | {"id": "x2"}])
    rows[4] = message("a", 5, "tool", tool_results=[repeated_result])

    assert read_trajectories(written(tmp_path, rows)).turn_counts.tolist() == [3]

    other_session = agent("b")
    other_session[1] = message("b", 2, "assistant", tool_calls=[CALL | {"id": "y1"}])
    with refused(CombinedError, "mismatch", "tool_results[0].tool_call_id", "sessions.jsonl:9"):
        read_trajectories(written(tmp_path, [*rows, *other_session]))


def test_a_tool_result_in_a_row_with_all_messages_needs_its_tool_call():
    messages = [
        {"role": "user", "content": "Fix it."},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "x1", "content": "line one"},
    ]
    assert len(parse_session_row({"messages": messages}).turns) == 2

    with pytest.raises(BadRowError) as caught:
        parse_session_row({"messages": [messages[0], messages[2]]})
    assert (caught.value.code, caught.value.key) == ("mismatch", "messages[1].tool_call_id")


def test_rows_of_a_session_must_follow_each_other(tmp_path):
    rows = [*chat("a"), *chat("b"), *chat("a")]
    with refused(CombinedError, "unordered", None, "sessions.jsonl:7"):
        read_trajectories(written(tmp_path, rows))


def test_only_the_first_invalid_rows_are_listed(tmp_path):
    rows = [message(f"c{turn}", turn, "user", content="x") for turn in range(2, MAX_ERRORS + 7)]
    with pytest.raises(CombinedError) as caught:
        read_trajectories(written(tmp_path, rows))
    assert len(caught.value.errors) == MAX_ERRORS + 1


def test_an_error_that_many_rows_share_is_counted(tmp_path):
    rows = [message(f"c{number}", 1, "user", delay_seconds=-1.2) for number in range(40)]
    rows = [row | {"content": "x"} for row in rows]
    last_row = message("last", 7, "user", content="x")
    with pytest.raises(CombinedError) as caught:
        read_trajectories(written(tmp_path, [*rows, last_row]))

    *of_rows, further_rows = caught.value.errors
    assert [error.key for error in of_rows] == ["delay_seconds"] * 3 + ["turn"]
    assert further_rows.code == "more_faults"
    assert "37 more rows" in further_rows.message


def test_a_file_without_sessions_is_refused(tmp_path):
    with refused(UserError, "empty_file"):
        read_trajectories(written(tmp_path, [{"_type": "dataset_metadata"}]))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=5), values),
    max_leaves=5,
)


@given(
    st.dictionaries(st.sampled_from(["turns", "conversations", "messages", "tools"]), json_values)
)
def test_any_trajectory_row_is_read_or_refused_with_a_reason(row):
    try:
        trajectory = parse_session_row(row)
    except BadRowError as error:
        assert str(error)
    else:
        assert all(turn.messages for turn in trajectory.turns)


# -- requests ------------------------------------------------------------------------------------


def test_each_turn_sends_the_recorded_conversation_so_far(tmp_path):
    prompts = built(load(written(tmp_path, [*agent(), *chat()]), salt="none"))

    assert prompts.history == "scripted"
    assert texts(prompts, 0, 2) == [SYSTEM, "Fix it.", None, "line one", "Fixed.", "Test it."]
    assert texts(prompts, 1, 0) == ["Hello"]
    request = prompts[0]
    assert request.extra == {"tools": TOOLS}
    assert (request.session, request.turn) == (0, 0)


def test_a_response_is_as_long_as_the_recorded_one_unless_the_row_limits_it(tmp_path):
    prompts = built(load(written(tmp_path, [*agent(), *chat()])))
    count = load_tokenizer().count
    lengths = [
        (prompts[request_id].max_tokens, prompts[request_id].exact_output)
        for request_id in prompts.request_ids(5)
    ]
    reasoning_and_text = count("It was easy.") + count("Fixed.")
    assert lengths[1:3] == [(reasoning_and_text, True), (count("Tested."), True)]
    assert lengths[3] == (7, False)
    assert lengths[4] == (1024, False), "a turn without a recorded response has the default limit"


def test_the_tokens_of_a_prompt_include_all_of_its_messages(tmp_path):
    prompts = built(load(written(tmp_path, agent()), salt="none"))
    count = load_tokenizer().count
    expected = sum(count(text) for text in (SYSTEM, "Fix it.", json.dumps([CALL]), "line one"))
    assert prompts.input_tokens(1) == expected


def test_real_responses_take_the_place_of_recorded_ones(tmp_path):
    rows = [{"turns": ["One?", "Two?", "Three?"]}]
    prompts = built(load(written(tmp_path, rows), salt="none"))

    assert prompts.history == "server", "a data set without responses uses those of the server"
    assert [prompts.needs_replies(request_id) for request_id in range(3)] == [False, True, True]
    request = prompts.with_replies(2, {0: AssistantTurn("first"), 1: AssistantTurn("second")})
    contents = [message["content"] for message in request.messages or []]
    assert contents == ["One?", "first", "Two?", "second", "Three?"]


def test_sessions_with_tool_results_are_refused_for_real_responses(tmp_path):
    with refused(UserError, "unsupported"):
        built(load(written(tmp_path, agent()), history="server"))


def test_each_play_of_a_session_has_a_different_salt(tmp_path):
    path = written(tmp_path, [*agent(), *chat()])
    prompts = built(load(path))
    first_texts = [texts(prompts, session, 0)[0] for session in range(6)]

    assert len(set(first_texts)) == 6
    assert texts(prompts, 0, 2)[0] == texts(prompts, 0, 0)[0], "turns share the salt of the session"
    other_run = built(load(path), salt=2)
    assert texts(other_run, 0, 0)[0] not in first_texts


def test_the_salt_rule_of_mlperf_shares_the_system_prompt_within_a_pass(tmp_path):
    prompts = built(load(written(tmp_path, [*agent("a"), *agent("b")]), salt="pass"))
    systems = [texts(prompts, session, 0)[0] for session in range(4)]
    questions = [texts(prompts, session, 0)[1] for session in range(4)]

    assert systems[0] == systems[1]
    assert systems[2] == systems[3]
    assert systems[0] != systems[2]
    assert len(set(questions)) == 4


def test_the_salt_rule_of_agentx_does_not_change_the_system_prompt(tmp_path):
    prompts = built(load(written(tmp_path, agent()), salt="user"))
    assert texts(prompts, 0, 0)[0] == texts(prompts, 1, 0)[0] == SYSTEM
    assert texts(prompts, 0, 0)[1] != texts(prompts, 1, 0)[1]


@pytest.mark.parametrize(
    ("salt", "shares_system", "shares_rest"),
    [
        ("session", False, False),
        ("user", True, False),
        ("pass", False, False),
        ("none", True, True),
    ],
)
def test_simulated_prompts_share_the_messages_that_have_no_salt(
    tmp_path, salt, shares_system, shares_rest
):
    prompts = built(load(written(tmp_path, agent()), salt=salt))
    first_play = prompts.prompt_parts(0)
    second_play = prompts.prompt_parts(prompts.turns)
    assert (first_play[0].owner == second_play[0].owner) == shares_system
    assert (first_play[1].owner == second_play[1].owner) == shares_rest


# -- sessions ------------------------------------------------------------------------------------


def test_pauses_equal_the_recorded_ones_up_to_the_idle_cap(tmp_path):
    path = written(tmp_path, agent())
    by_default = build_schedule(load(path), 3).sessions.get(0)
    capped = build_schedule(load(path, idle_cap="1s"), 3).sessions.get(0)

    assert list(by_default.pauses_ns) == [0, 1.5 * S, 60 * S]
    assert list(capped.pauses_ns) == [0, S, S]
    assert by_default.successors == ((1,), (2,), ())


def test_pauses_that_the_idle_cap_cuts_are_counted_in_a_note(tmp_path):
    path = written(tmp_path, [*agent("a"), *agent("b")])
    (note,) = built(load(path)).warnings(6)
    assert "2 of 4 recorded pauses" in note
    assert "idle_cap=300s" in note
    assert not built(load(path, idle_cap="300s")).warnings(6)
    assert not built(load(path, idle_cap="366d")).warnings(6)


def test_the_first_sessions_continue_after_the_turns_that_filled_the_cache(tmp_path):
    rows = [row for number in range(5) for row in agent(f"s{number}")]
    workload = with_cache_fill(load(written(tmp_path, rows), users=4, count=9, start="middle"))
    prompts = built(workload)
    plays = [prompts.plays.play(session) for session in range(12)]
    fills, continued, complete = plays[:4], plays[4:8], plays[8:]

    assert [play.fills_cache for play in plays] == [True] * 4 + [False] * 8
    for fill, play in zip(fills, continued, strict=True):
        assert (play.number, play.trajectory) == (fill.number, fill.trajectory)
        assert (fill.turn_count, play.first_turn) == (1, fill.first_turn + 1)
        assert play.first_turn + play.turn_count == 3
    assert [(play.first_turn, play.turn_count) for play in complete] == [(0, 3)] * 4
    assert [play.trajectory for play in complete] == [4, 0, 1, 2]
    assert len({play.first_turn for play in continued}) == 2, "turns are drawn"

    fill_texts = texts(prompts, 0, 0)
    assert texts(prompts, 4, 0)[: len(fill_texts)] == fill_texts, "the prompt continues the filled"
    assert prompts[2].max_tokens == 1, (
        "session 0 has the ids 0 to 2, and its only turn the last one"
    )


def test_turn_counts_of_a_range_of_sessions_equal_those_of_each_session(tmp_path):
    rows = [*agent("a"), *chat("b"), *agent("c")]
    workload = with_cache_fill(load(written(tmp_path, rows), users=3, count=9, start="middle"))
    sessions = build_schedule(workload, 3).sessions
    counts = [sessions.get(index).turn_count for index in range(20)]
    assert sessions.turn_counts(0, 20).tolist() == counts
    assert sessions.turn_counts(7, 10).tolist() == counts[7:17]
    columns = sessions.columns(0, 20)
    assert columns.turn_counts.tolist() == counts
    assert len(columns.pause_ns) == sum(counts)


def test_the_cache_is_filled_by_one_request_per_user_before_the_load(tmp_path):
    workload = with_cache_fill(load(written(tmp_path, agent()), users=8, count=3, start="middle"))
    schedule = build_schedule(workload, 3)
    fill, stage = schedule.stages
    assert (fill.session_count, fill.measured, fill.is_drained_at_end) == (3, False, True)
    assert (stage.first_session, stage.inherited_users) == (3, 0)
    affinities = [schedule.sessions.affinity(index) for index in range(9)]
    assert affinities == [0, 1, 2, 0, 1, 2, 3, 4, 5], "a router sends both to the same server"
    assert with_cache_fill(workload) is workload


def test_a_start_in_the_middle_is_refused_for_single_turns(tmp_path):
    rows = [{"turns": ["One?"]}]
    with refused(UserError, "unsupported"):
        built(load(written(tmp_path, rows), start="middle"))


def test_shuffled_sessions_are_all_sent_in_each_pass(tmp_path):
    rows = [row for number in range(20) for row in chat(f"s{number}")]
    path = written(tmp_path, rows)
    plays = built(load(path, order="shuffled")).plays
    order = [plays.play(session).trajectory for session in range(40)]
    assert sorted(order[:20]) == list(range(20))
    assert order[:20] == order[20:]
    assert order[:20] != list(range(20))


# -- options -------------------------------------------------------------------------------------


def test_a_data_set_with_messages_is_sent_session_by_session(tmp_path):
    path = written(tmp_path, agent())
    flags = {"concurrency": "2", "warmup": "0"}
    options = read_flags(**flags, idle_cap="5s", trajectory_salt="pass", output_tokens="9")
    workload = workload_from_dataset(path, options, "qa")
    requests: Any = workload.requests
    assert (requests.idle_cap_ns, requests.salt) == (5 * S, "pass")
    assert built(workload)[0].max_tokens == 9
    alone = workload_from_dataset(path, read_flags(concurrency="2"))
    assert alone.stages[0].count == 1, "every session once"

    rows = written(tmp_path, [{"turns": ["One?", "Two?"]}])
    first_turns = workload_from_dataset(rows, read_flags(**flags), "qa")
    all_turns = workload_from_dataset(rows, read_flags(**flags, turns="all"), "qa")
    assert hasattr(first_turns.requests, "path")
    assert built(all_turns).turns == 2


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        ({"request_rate": "2", "trajectory_start": "middle"}, "conflict"),
        ({"concurrency": "2", "warmup": "3s", "trajectory_start": "middle"}, "conflict"),
        ({"concurrency": "2", "duration": "9s", "trajectory_end": "first"}, "conflict"),
        ({"concurrency": "2", "input_tokens": "9"}, "conflict"),
        ({"concurrency": "2", "trajectory_salt": "sea"}, "unknown_name"),
    ],
)
def test_conflicting_options_of_sessions_are_refused(tmp_path, flags, code):
    with refused(CombinedError, code):
        workload_from_dataset(
            written(tmp_path, agent()), read_flags(**({"warmup": "0"} | flags)), "qa"
        )


def test_the_hint_for_a_load_with_a_duration_names_the_end_key(tmp_path):
    with pytest.raises(CombinedError) as caught:
        load_from_options(workload_file(tmp_path), None, read_flags(duration="9s"))
    (error,) = caught.value.errors
    assert "end: first" in error.hint


def test_options_for_sessions_are_refused_without_sessions(tmp_path):
    rows = written(tmp_path, [{"prompt": "One?"}])
    with refused(CombinedError, "no_effect"):
        workload_from_dataset(rows, read_flags(concurrency="2", idle_cap="3s"), "qa")


def test_the_content_of_the_data_set_decides_the_fingerprint(tmp_path):
    path = written(tmp_path, agent())
    first = recipe_fingerprint(load(path), "server")
    moved = path.rename(tmp_path / "moved.jsonl")
    assert recipe_fingerprint(load(moved), "server") == first
    assert recipe_fingerprint(load(moved, idle_cap="1s"), "server") != first
    assert recipe_fingerprint(load(written(tmp_path, chat())), "server") != first


def test_random_first_turns_are_uniformly_distributed(tmp_path):
    rows = []
    for turn in range(1, 22):
        role = "user" if turn % 2 else "assistant"
        rows.append(message("long", turn, role, content="x"))
    workload = with_cache_fill(
        load(written(tmp_path, rows), users=2000, count=2000, start="middle")
    )
    plays = built(workload).plays
    first_turns = [plays.play(session).first_turn for session in range(2000)]
    counts = np.bincount(first_turns, minlength=11)
    assert counts[10] == 0, "at least one turn follows"
    assert counts[:10].min() > 150
    assert counts[:10].max() < 250


# -- a data set on the command line, with a workload file that has trajectories ------------------


def workload_file(folder: Path) -> str:
    """Write a workload with recorded sessions, and return its path."""
    (folder / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in agent()))
    requests = "{trajectories: own.jsonl, start: middle, idle_cap: 10s, salt: pass, end: first}"
    stages = "[{arrival: {closed: 2}, count: 10}]"
    path = folder / "sessions.yaml"
    path.write_text(f"name: own\nrequests: {requests}\nstages: {stages}\n")
    return str(path)


@pytest.mark.parametrize("rows", [[{"turns": ["One?", "Two?"]}], agent("z")])
def test_a_data_set_option_preserves_the_session_keys_of_the_workload(tmp_path, rows):
    base = workload_file(tmp_path)
    data_set = written(tmp_path, rows)
    workload = load_from_options(base, None, read_flags(), data_set)

    requests: Any = workload.requests
    assert requests.trajectories == data_set
    assert (requests.start, requests.end, requests.salt) == ("middle", "first", "pass")
    assert requests.idle_cap_ns == 10 * S
    assert not lost_keys_notes(workload)


def test_a_note_names_the_keys_that_single_prompts_do_not_have(tmp_path):
    base = workload_file(tmp_path)
    prompts = written(tmp_path, [{"prompt": "One?"}])
    (tmp_path / "turns").mkdir()
    turns = written(tmp_path / "turns", [{"turns": ["One?", "Two?"]}])

    for data_set, flags in ((prompts, {}), (turns, {"turns": "first"})):
        workload = load_from_options(base, None, read_flags(**flags), data_set)
        assert workload.lost_trajectory_keys == ("start", "end", "idle_cap", "salt")
        (note,) = lost_keys_notes(workload)
        assert "start, end, idle_cap, salt" in note


@pytest.mark.parametrize("turns", ["first", "all"])
def test_the_turns_option_is_refused_without_a_data_set_option(tmp_path, turns):
    with refused(CombinedError, "no_effect"):
        load_from_options(workload_file(tmp_path), None, read_flags(turns=turns))


def test_the_hint_for_an_empty_data_set_has_a_valid_example(tmp_path):
    with pytest.raises(CombinedError) as caught:
        load_from_options(workload_file(tmp_path), None, read_flags(), written(tmp_path, []))
    example = caught.value.errors[0].hint.removeprefix("write rows like ")
    assert len(read_trajectories(written(tmp_path, [json.loads(example)]))) == 1
