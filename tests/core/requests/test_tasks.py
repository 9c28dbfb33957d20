"""Agent tasks: their graphs, requests, times and responses, also among classes."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scripted_server
from expected_errors import refused
from loadgen_sdk.price_file import PerToken
from run_fixtures import NO_PAGES

from loadgen.core.errors import CombinedError
from loadgen.core.execution.plan import Settings
from loadgen.core.execution.run import execute
from loadgen.core.metrics.summary import exit_code
from loadgen.core.requests.build import build_prompts as build_requests
from loadgen.core.requests.mix import MixPrompts
from loadgen.core.requests.task_graphs import TaskGraphs
from loadgen.core.requests.task_prompts import TaskPrompts
from loadgen.core.requests.tokenizer import load_tokenizer
from loadgen.core.results import store
from loadgen.core.results.record import FINISH, KIND, STATUS
from loadgen.core.schedule.build import build_schedule
from loadgen.core.schedule.dispatched_slots import DispatchedSlot
from loadgen.core.schedule.dispatcher import Dispatcher
from loadgen.core.schedule.schedule import Schedule, shard
from loadgen.core.schedule.sessions import NOT_APPLICABLE
from loadgen.core.workload import Workload, load, read_flags, recipe_fingerprint
from loadgen.cost.comparison import compare_costs
from loadgen.cost.cost_report import create_report as cost_report
from loadgen.cost.evidence_reader import read_evidence
from loadgen.pricing.price_file import load_prices
from loadgen.pricing.priced_result import price_result as price_of
from loadgen.render import text as as_text
from loadgen.runs.text import render

RESEARCH = """
requests:
  tools:
    search:
      schema_tokens: 90
      time: {uniform: {min: 100ms, max: 900ms}}
      result_tokens: {uniform: {min: 30, max: 90}}
    fetch: {schema_tokens: 120, time: {lognormal: {median: 2s, sigma: 0.5}}, result_tokens: 200}
  steps:
    plan: {system_tokens: 40, input_tokens: 50, output_tokens: 10}
    look:
      after: plan
      context: new
      system_tokens: 20
      input_tokens: 12
      think_time: 5ms
      tool: {search: 3, fetch: 1}
      turns: {uniform: {min: 1, max: 4}}
      parallel: {uniform: {min: 1, max: 3}}
      output_tokens: {uniform: {min: 5, max: 9}}
    write: {after: [plan, look], output_tokens: 30}
    check: {after: write, tool: search, output_tokens: 4}
"""
STAGES = "stages: [{name: load, arrival: {poisson: 5/s}, count: 40}]\n"
CLOSED = "stages: [{arrival: {closed: {concurrency: 3, ramp: 0s}}, count: 17}]\n"


def workload(folder: Path, requests: str = RESEARCH, more: str = STAGES, **flags: str) -> Workload:
    file = folder / "w.yaml"
    file.write_text(f"name: t\n{requests}\n{more}")
    return load(str(file), read_flags(**({"seed": "7"} | flags)))


def prompts(requested_workload: Workload, seed: int = 7) -> Any:
    return build_requests(requested_workload, seed, 1, load_tokenizer())


def steps(text: str) -> str:
    return f"requests:\n  tools: {{run: {{result_tokens: 5}}}}\n  steps:\n{text}"


PLAN = "    plan: {input_tokens: 5, output_tokens: 5}\n"
C = "    c: {after: plan, tool: run, output_tokens: 5}"


@pytest.mark.parametrize(
    ("text", "place", "code"),
    [
        (
            PLAN + "    b: {after: paln, tool: run, output_tokens: 5}",
            "6:16 (requests.steps.b.after)",
            "unknown_name",
        ),
        (
            PLAN
            + "    b: {after: [plan, c], tool: run, output_tokens: 5}\n"
            + C.replace("plan", "b"),
            "(requests.steps.",
            "cycle",
        ),
        (
            PLAN + "    b: {after: b, tool: run, output_tokens: 5}",
            "6:16 (requests.steps.b.after)",
            "cycle",
        ),
        (
            PLAN + "    b: {input_tokens: 5, output_tokens: 5}",
            "6:5 (requests.steps.b)",
            "unsupported",
        ),
        (
            PLAN + "    b: {after: plan, tool: run, output_tokens: 5}\n" + C,
            "6:5 (requests.steps.b)",
            "unsupported",
        ),
        (
            PLAN + "    b: {after: plan, tool: rnu, output_tokens: 5}",
            "6:28 (requests.steps.b.tool)",
            "unknown_name",
        ),
        (PLAN + "    b: {after: plan, output_tokens: 5}", "6:5 (requests.steps.b)", "missing_key"),
        (
            PLAN + "    b: {after: plan, context: new, turns: 3, output_tokens: 5}",
            "6:5",
            "missing_key",
        ),
        ("    b: {tool: run, output_tokens: 5}", "5:5 (requests.steps.b)", "missing_key"),
        (
            PLAN + "    b: {after: plan, tool: run, system_tokens: 9, output_tokens: 5}",
            "b.system_tokens",
            "conflict",
        ),
        (
            PLAN + "    b: {after: plan, tool: run, think_time: 1s, output_tokens: 5}",
            "b.think_time",
            "conflict",
        ),
        (
            PLAN
            + "    b: {after: plan, tool: run, parallel: 2, output_tokens: 5}\n"
            + C.replace("plan", "b"),
            "7:16 (requests.steps.c.after)",
            "conflict",
        ),
        (PLAN.replace("5}", "5, turns: {normal: {mean: 5, stddev: 2}}}"), "plan.turns", "endless"),
        (PLAN.replace("5}", "5, turns: 20000}"), "requests", "too_large"),
        (PLAN.replace("plan", "a plan"), "5:", "invalid_value"),
        (PLAN.replace("5}", "5, turn: 2}"), "5:47", "unknown_key"),
    ],
)
def test_steps_that_form_no_graph_are_refused_with_their_location(
    tmp_path: Path, text: str, place: str, code: str
) -> None:
    with refused(CombinedError, code) as exc_info:
        workload(tmp_path, steps(text))
    assert place in str(exc_info.value)


def test_the_graph_of_a_task_follows_from_seed_and_number(tmp_path: Path) -> None:
    task = workload(tmp_path).requests
    graphs, repeated_graphs, other = TaskGraphs(task, 7), TaskGraphs(task, 7), TaskGraphs(task, 8)

    assert [graphs[n] for n in range(50)] == [repeated_graphs[n] for n in range(49, -1, -1)][::-1]
    assert [graphs[n] for n in range(50)] != [other[n] for n in range(50)]

    copies, turns = set(), set()
    for number in range(200):
        nodes = graphs[number]
        look_turns = [turn for turn, node in enumerate(nodes) if node.step == "look"]
        begins = [turn for turn in look_turns if nodes[turn].continued_turn is None]
        ends = [turn for turn in look_turns if turn + 1 not in look_turns or turn + 1 in begins]
        copies.add(len(begins))
        turns.add(len(look_turns) / len(begins))
        write = nodes[-2]
        assert (write.step, write.predecessors, write.continued_turn, write.branch_turns) == (
            "write",
            (0, *ends),
            0,
            tuple(ends),
        )
        assert all(
            nodes[turn].predecessors == (0,) and nodes[turn].pause_ns == 5_000_000
            for turn in begins
        )
        for turn in set(look_turns) - set(begins):
            assert nodes[turn].predecessors == (turn - 1,) and nodes[turn].tool_of_result in (
                "search",
                "fetch",
            )
            if nodes[turn].tool_of_result == "search":
                assert 100_000_000 <= nodes[turn].pause_ns <= 900_000_000

    assert copies == {1, 2, 3} and turns == {1, 2, 3, 4}

    fetched = [
        node.pause_ns
        for number in range(200)
        for node in graphs[number]
        if node.tool_of_result == "fetch"
    ]

    assert 1.5e9 < float(np.median(fetched)) < 2.5e9


def test_a_request_has_exactly_the_tokens_of_its_place_in_the_graph(tmp_path: Path) -> None:
    task_prompts, count = prompts(workload(tmp_path)), load_tokenizer().count

    assert isinstance(task_prompts, TaskPrompts)

    for number in task_prompts.request_ids(60):
        request, (task, turn) = task_prompts[number], task_prompts.task_and_turn(number)
        node = task_prompts.graphs[task][turn]
        tokens = sum(
            count(json.dumps(tool, separators=(",", ":"))) for tool in request.extra["tools"]
        )
        assert tokens == 210
        for message in request.messages or ():
            for call in message.get("tool_calls", ()):
                tokens += count(json.loads(call["function"]["arguments"]).get("input", ""))
            tokens += count(message["content"] or "")
        assert (
            request.input_tokens
            == tokens
            == task_prompts.requested_input_tokens(number)
            == sum(n for _, n in task_prompts.prompt_segments(number))
        )
        calls = [
            call["id"]
            for message in request.messages or ()
            for call in message.get("tool_calls", ())
        ]
        assert calls == [
            message["tool_call_id"]
            for message in request.messages or ()
            if message["role"] == "tool"
        ]
        assert len(set(calls)) == len(calls)
        if node.step == "write":
            assert [message["role"] for message in request.messages or ()] == [
                "system",
                "user",
                "assistant",
                *["tool"] * len(node.branch_turns),
            ]


def test_the_lengths_of_a_task_are_drawn_once() -> None:
    task_prompts = prompts(load("coding-agent"))
    numbers = list(task_prompts.ids_of_task(0))
    assert len(numbers) > 5 and sum(
        len(list(task_prompts.prompt_segments(number))) for number in numbers
    ) > 3 * len(numbers)
    assert task_prompts._lengths.added_by.cache_info().misses == len(numbers)


class Clock:
    """Carries a schedule out in virtual time: a request takes `service` of its number."""

    def __init__(self, schedule: Schedule, service: Any, **options: Any) -> None:
        self.dispatcher = Dispatcher(schedule, **options)
        self.starts: dict[int, DispatchedSlot] = {}
        self.ended: dict[int, int] = {}
        self.most = 0
        in_flight: list[tuple[int, int]] = []
        while True:
            due = self.dispatcher.next_due_ns()
            end = min(in_flight)[0] if in_flight else None
            if due is None and end is None:
                return
            if due is not None and (end is None or due <= end):
                for start in self.dispatcher.take_due_slots(due):
                    assert start.slot_id not in self.starts
                    self.starts[start.slot_id] = start
                    if not start.drop_reason:
                        in_flight.append((due + service(start.slot_id)[0], start.slot_id))
                self.most = max(self.most, len(in_flight))
                continue
            at, number = min(in_flight)
            in_flight.remove((at, number))
            self.ended[number] = at
            self.dispatcher.report_finished(number, at, service(number)[1])


def test_a_request_begins_with_the_messages_of_the_context_it_continues() -> None:
    """As they are: neither their texts nor their lengths are made anew."""
    requested_workload = load("coding-agent", read_flags())
    task_prompts, repeated_prompts = prompts(requested_workload), prompts(requested_workload)
    numbers = list(task_prompts.request_ids(120))
    requests = {number: task_prompts[number] for number in numbers}
    continued = 0
    for number, request in requests.items():
        node = task_prompts.graphs[request.session][request.turn]
        if node.continued_turn is None:
            continue
        before = requests.get(number - request.turn + node.continued_turn)
        if before is not None:
            continued += all(
                message is other
                for message, other in zip(before.messages, request.messages, strict=False)
            )

    assert continued > 80
    assert {number: repeated_prompts[number] for number in reversed(numbers)} == requests


@pytest.mark.parametrize("stages", [STAGES, CLOSED])
def test_a_request_starts_after_its_predecessors_and_its_tool(tmp_path: Path, stages: str) -> None:
    requested_workload = workload(tmp_path, more=stages)
    schedule = build_schedule(requested_workload, 7)
    clock = Clock(schedule, lambda number: (1_000_000 * (1 + number % 13), True))
    graphs, width = (
        TaskGraphs(requested_workload.requests, 7),
        requested_workload.requests.max_requests,
    )
    tasks = requested_workload.stages[0].count or 0

    assert (
        sorted(clock.starts)
        == sorted(schedule.slot_ids())
        == sorted(schedule.columns().slot_id.tolist())
    )
    assert (
        len(clock.starts) == schedule.slot_count == sum(len(graphs[task]) for task in range(tasks))
    )

    for number, start in clock.starts.items():
        nodes = graphs[start.session]
        assert number == start.session * width + (
            width - 1 if start.turn == len(nodes) - 1 else start.turn
        )
        assert schedule.slot(number)[4:] == (
            start.stage,
            start.session,
            start.turn,
            NOT_APPLICABLE if start.virtual_user is None else start.virtual_user,
        )
        if nodes[start.turn].predecessors:
            ends = [
                clock.ended[start.session * width + turn] for turn in nodes[start.turn].predecessors
            ]
            assert start.due_ns == max(ends) + nodes[start.turn].pause_ns
    if stages == CLOSED:
        sessions_by_user = defaultdict(list)
        for start in clock.starts.values():
            sessions_by_user[start.virtual_user].append(start.session)
        assert {
            virtual_user: sorted(set(sessions))
            for virtual_user, sessions in sessions_by_user.items()
        } == {virtual_user: list(range(virtual_user, tasks, 3)) for virtual_user in range(3)}
        assert clock.most > 3  # sub-agents are in flight beside each other


def test_a_join_is_due_after_the_latest_end_in_any_order_of_reading(tmp_path: Path) -> None:
    text = steps(
        PLAN
        + "    a: {after: plan, context: new, parallel: 2, input_tokens: 5, output_tokens: 5}\n"
        "    b: {after: [plan, a], output_tokens: 5}"
    )
    dispatcher = Dispatcher(
        build_schedule(workload(tmp_path, text, request_rate="inf", num_requests="1"), 7)
    )
    dispatcher.take_due_slots(0)
    dispatcher.report_finished(0, 100, True)

    assert [start.slot_id for start in dispatcher.take_due_slots(100)] == [1, 2]

    dispatcher.report_finished(1, 900, True)
    dispatcher.report_finished(2, 800, True)
    assert dispatcher.next_due_ns() == 900 and dispatcher.take_due_slots(900)[0].due_ns == 900


@pytest.mark.parametrize("stages", [STAGES, CLOSED])
def test_a_failed_request_ends_its_task_and_each_slot_is_reported_once(
    tmp_path: Path, stages: str
) -> None:
    schedule = build_schedule(workload(tmp_path, more=stages), 7)
    clock = Clock(schedule, lambda number: (1_000_000 * (1 + number % 13), number % 11 != 5))
    assert sorted(clock.starts) == sorted(schedule.slot_ids())
    dropped = [start for start in clock.starts.values() if start.drop_reason]
    assert dropped and {start.drop_reason for start in dropped} == {"previous_turn_failed"}
    failed = {number // schedule.max_turns for number in clock.ended if number % 11 == 5}
    assert {start.session for start in dropped} <= failed


def test_a_task_over_the_cap_is_dropped_and_each_slot_is_reported_once(tmp_path: Path) -> None:
    schedule = build_schedule(workload(tmp_path, request_rate="50"), 7)
    clock = Clock(schedule, lambda _number: (40_000_000, True), max_in_flight=4)
    assert sorted(clock.starts) == sorted(schedule.slot_ids())
    reasons = {start.drop_reason for start in clock.starts.values()}
    assert reasons == {"", "in_flight_cap", "previous_turn_failed"} and clock.most == 4


@pytest.mark.parametrize("after", [0, 3, 20, 60])
@pytest.mark.parametrize("stages", [STAGES, CLOSED])
def test_a_stopped_run_reports_each_slot_once(tmp_path: Path, stages: str, after: int) -> None:
    schedule = build_schedule(workload(tmp_path, more=stages), 7)
    dispatcher, reported_slots, in_flight = Dispatcher(schedule), list[int](), list[int]()
    for _ in range(after):
        due = dispatcher.next_due_ns()
        if due is not None and (not in_flight or len(in_flight) < 4):
            started = dispatcher.take_due_slots(due, max_slots=1)
            reported_slots += [start.slot_id for start in started]
            in_flight += [start.slot_id for start in started]
        elif in_flight:
            dispatcher.report_finished(in_flight.pop(0), due or 10**9, True)
    dispatcher.stop()
    reported_slots += [start.slot_id for start in dispatcher.unsent_slots()]

    assert sorted(reported_slots) == sorted(schedule.slot_ids())


@pytest.mark.parametrize("shares", [2, 3])
def test_shards_contain_complete_tasks_and_together_all_of_them(
    tmp_path: Path, shares: int
) -> None:
    schedule = build_schedule(workload(tmp_path), 7)
    parts = [shard(schedule, i, shares) for i in range(shares)]
    numbers = [list(part.slot_ids()) for part in parts]

    assert [len(shard_numbers) for shard_numbers in numbers] == [part.slot_count for part in parts]
    assert sorted(number for shard_numbers in numbers for number in shard_numbers) == sorted(
        schedule.slot_ids()
    )
    assert [sorted(part.columns().slot_id.tolist()) for part in parts] == [
        sorted(shard_numbers) for shard_numbers in numbers
    ]


def test_due_times_and_cached_tokens_of_the_simulated_rack_follow_the_graph(
    tmp_path: Path,
) -> None:
    requested_workload = workload(tmp_path)
    summary, folder = execute(
        requested_workload, Settings(url="sim:gb300-vm", out=tmp_path / "out")
    )
    rows = store.read_run(folder).rows
    task_prompts = prompts(requested_workload)
    by_number = {int(row["slot"]): row for row in rows}

    assert sorted(by_number) == sorted(build_schedule(requested_workload, 7).slot_ids())

    for number, row in by_number.items():
        task, turn = task_prompts.task_and_turn(number)
        node = task_prompts.graphs[task][turn]
        assert (row["session"], row["turn"], row["asked_output"]) == (
            task,
            turn,
            task_prompts.requested_output_tokens(number),
        )
        assert row["input_tokens"] == task_prompts.requested_input_tokens(number)
        if node.predecessors:
            ends = [
                by_number[task * task_prompts.turns + before]["end_ns"]
                for before in node.predecessors
            ]
            assert row["due_ns"] == max(ends) + node.pause_ns

    assert summary.sessions is not None and summary.sessions.count == summary.sessions.ok == 40
    assert summary.requests.scheduled == len(rows)
    for slow in summary.slowest:
        assert (slow.session, slow.turn) == task_prompts.task_and_turn(slow.slot)
        assert (
            f"session {slow.session}, turn {(slow.turn or 0) + 1}" in render(summary)
            or slow.by == "e2e"
        )

    first = {task: by_number[task * task_prompts.turns]["due_ns"] for task in range(40)}
    times = sorted(
        by_number[task * task_prompts.turns + task_prompts.turns - 1]["end_ns"] - first[task]
        for task in range(40)
    )

    assert summary.sessions.duration_ms.max == times[-1] / 1e6


def heard_requests(
    server: scripted_server.Canned,
) -> Iterator[tuple[int, dict[str, Any], dict[str, str]]]:
    """Yield the number, body and headers of each request of the load."""
    for received_request in server.heard:
        name = received_request.headers.get("x-request-id", "")
        if received_request.body and name.startswith("wire-"):
            yield int(name.rpartition("-")[2]), received_request.body, received_request.headers


def streamed_reply(text: str, *calls: dict[str, Any]) -> bytes:
    delta: dict[str, Any] = {"role": "assistant", "content": text}
    if calls:
        delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
    start = {"id": "x", "object": "chat.completion.chunk", "model": "m"}
    usage = {"prompt_tokens": 9, "completion_tokens": 2, "total_tokens": 11}
    return scripted_server.events(
        {**start, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
        {
            **start,
            "choices": [
                {"index": 0, "delta": {}, "finish_reason": "tool_calls" if calls else "stop"}
            ],
        },
        {**start, "choices": [], "usage": usage},
    )


FAST = RESEARCH.replace("{uniform: {min: 100ms, max: 900ms}}", "2ms").replace(
    "{lognormal: {median: 2s, sigma: 0.5}}", "4ms"
)


@pytest.mark.processes
@pytest.mark.parametrize("history", ["scripted", "server"])
def test_the_server_receives_the_graph_with_joins_and_real_responses(
    tmp_path: Path, history: str
) -> None:
    call = {
        "id": "real12345",
        "type": "function",
        "function": {"name": "search", "arguments": '{"q": 1}'},
    }
    requested_workload = workload(
        tmp_path,
        FAST.replace("  steps:", f"  history: {history}\n  steps:"),
        request_rate="40",
        num_requests="6",
    )
    with scripted_server.serving(streamed_reply("so be it", call)) as server:
        settings = Settings(
            url=server.url,
            model="m",
            session_header="X-Session-ID",
            out=tmp_path / "wire",
            **NO_PAGES,
        )
        summary, folder = execute(requested_workload, settings)
        received_request = {number: body for number, body, _ in heard_requests(server)}
        sessions = {
            number: headers["x-session-id"] for number, _, headers in heard_requests(server)
        }
    rows = {int(row["slot"]): row for row in store.read_run(folder).rows}

    assert store.read_run(folder).manifest.session_header == "X-Session-ID"
    task_prompts = prompts(requested_workload)
    assert summary.requests.ok == len(rows) and sorted(received_request) == sorted(rows)
    assert sessions == {
        number: f"wire-{number // task_prompts.turns}" for number in received_request
    }

    for number, body in received_request.items():
        task, turn = task_prompts.task_and_turn(number)
        node, messages = task_prompts.graphs[task][turn], body["messages"]
        assert [tool["function"]["name"] for tool in body["tools"]] == ["search", "fetch"]
        if node.predecessors:
            ends = [
                rows[task * task_prompts.turns + before]["done_ns"] for before in node.predecessors
            ]
            assert rows[number]["due_ns"] == max(ends) + node.pause_ns <= rows[number]["sent_ns"]
        path = [turn]
        while task_prompts.graphs[task][path[-1]].continued_turn is not None:
            path.append(task_prompts.graphs[task][path[-1]].continued_turn)
        answers = [message for message in messages if message["role"] == "assistant"]
        assert len(answers) == len(path) - 1
        for answer, next_slot in zip(answers, reversed(path[:-1]), strict=True):
            follows = task_prompts.graphs[task][next_slot]
            assert len(answer["tool_calls"]) == len(follows.branch_turns) + bool(
                follows.tool_of_result
            )
            if history == "server":
                assert (answer["content"], answer["tool_calls"][0]) == ("so be it", call)
        results = [message["content"] for message in messages if message["role"] == "tool"]
        if node.branch_turns:
            assert len(results) == len(node.branch_turns)
            assert (set(results) == {"so be it"}) == (history == "server")


MIX = f"""
classes:
  qa: {{weight: 60%, requests: {{input_tokens: 15, output_tokens: 5}}}}
  rag: {{weight: 25%, requests: {{input_tokens: 130, output_tokens: 9, shared_prefix_tokens: 64}}}}
  talk:
    weight: 10%
    requests:
      input_tokens: 20
      output_tokens: 6
      turns: {{count: 3, tool_result_tokens: 7, tool_time: 20ms}}
  agentic:
    weight: 5%
    {RESEARCH.strip().replace(chr(10), chr(10) + "    ")}
"""


def test_conversations_and_tasks_can_be_classes_of_a_mix(tmp_path: Path) -> None:
    requested_workload = workload(
        tmp_path, MIX, STAGES.replace("count: 40", "count: 400").replace("5/s", "20/s")
    )
    task_prompts = prompts(requested_workload)

    assert isinstance(task_prompts, MixPrompts)

    summary, folder = execute(
        requested_workload, Settings(url="sim:gb300-vm", out=tmp_path / "out")
    )
    rows = store.read_run(folder).rows

    assert (
        sorted(rows["slot"].tolist())
        == sorted(build_schedule(requested_workload, 7).slot_ids())
        == sorted(task_prompts.request_ids(len(rows)))
    )
    assert (rows["status"] == STATUS["ok"]).all()

    started = np.array([task_prompts.class_of(start) for start in range(400)])
    for index, (part, turns) in enumerate(zip(summary.classes, (1, 1, 3, None), strict=True)):
        class_records = rows[started[rows["slot"] // task_prompts.turns] == index]
        assert part.requests.ok == len(class_records)
        assert abs((started == index).mean() - part.share) < 0.06
        if turns:
            assert len(class_records) == turns * (started == index).sum()
            assert (class_records["session"] >= 0).all() == (turns > 1) and class_records[
                "turn"
            ].max() == turns - 1

    assert summary.sessions is not None
    assert summary.sessions.count == summary.sessions.ok == (started >= 2).sum()


ONE_STEP_MIX = """classes:
  chat:
    weight: 50%
    requests:
      input_tokens: 50
      output_tokens: 20
      turns: {count: 4, tool_result_tokens: 30, tool_time: 500ms}
  task:
    weight: 50%
    requests:
      steps:
        only: {input_tokens: 60, output_tokens: 10}
"""


def test_a_task_of_one_step_is_a_single_request_of_a_mix(tmp_path: Path) -> None:
    requested_workload = workload(tmp_path, ONE_STEP_MIX, STAGES)

    _, folder = execute(requested_workload, Settings(url="sim:gb300-vm", out=tmp_path / "out"))
    rows = store.read_run(folder).rows

    schedule_ids = sorted(build_schedule(requested_workload, 7).slot_ids())
    assert sorted(rows["slot"].tolist()) == schedule_ids
    assert schedule_ids == sorted(prompts(requested_workload).request_ids(len(rows)))
    assert (rows["status"] == STATUS["ok"]).all()


@pytest.mark.parametrize("priced", ["rented", "per_token"])
def test_the_costs_of_all_classes_add_up_to_that_of_the_run(tmp_path: Path, priced: str) -> None:
    requested_workload = workload(
        tmp_path, MIX, STAGES.replace("count: 40", "count: 200").replace("5/s", "20/s")
    )
    execute(requested_workload, Settings(url="sim:gb300-vm", gpus=4, out=tmp_path / "out"))
    prices = tmp_path / "prices.yaml"
    dated = "as_of: 2026-11, source: mine"
    prices.write_text(
        "currency: USD\n"
        f"rented: [{{provider: here, shape: box, gpu: GB300, gpus: 4, per_hour: 20.00, {dated}}}]\n"
        "per_token: [{provider: api, model: m, per_million_input: 1, per_million_output: 3, "
        "per_million_cached: 1, "
        f"{dated}}}]\n"
    )
    book = load_prices(prices)
    (evidence,) = read_evidence([tmp_path / "out"])
    price = next(
        entry for entry in book.entries if isinstance(entry, PerToken) == (priced == "per_token")
    )
    offer = price_of(evidence, price, "mix", "", gpus=4, utilization=Decimal(1))
    counts = {part.name: part.requests.ok for part in offer.evidence.summary.classes}
    unit_costs_by_name = {
        part: of_class.costs["request"] for part, of_class in offer.class_costs.items()
    }
    request_cost = offer.costs["request"]

    assert (
        request_cost is not None
        and offer.costs["task"] is None
        and set(unit_costs_by_name) == set(counts)
    )
    total = sum(
        float(cost.total) * counts[part] for part, cost in unit_costs_by_name.items() if cost
    )
    assert total == pytest.approx(float(request_cost.total) * sum(counts.values()), rel=1e-6)

    task, request = (
        offer.class_costs["agentic"].costs["task"],
        offer.class_costs["agentic"].costs["request"],
    )

    assert task is not None and request is not None and task.total > 5 * request.total
    rendered_text = as_text.render(cost_report(compare_costs([offer], book)), full=True)
    assert "mix: agentic" in rendered_text and offer.class_costs["qa"].costs["task"] is None


def test_the_recipe_of_a_task_depends_on_its_steps_and_tools(tmp_path: Path) -> None:
    fingerprint = recipe_fingerprint(workload(tmp_path), "server")

    assert (
        recipe_fingerprint(workload(tmp_path, RESEARCH.replace("900ms", "0.9s")), "server")
        == fingerprint
    )
    assert (
        recipe_fingerprint(workload(tmp_path, RESEARCH.replace("900ms", "901ms")), "server")
        != fingerprint
    )


@pytest.mark.processes
@pytest.mark.parametrize("api_flavor", ["trtllm", "openai"])
def test_the_embedded_server_calls_a_tool_if_the_request_requires_it(
    tmp_path: Path, api_flavor: str
) -> None:
    text = FAST.replace("  steps:", "  history: server\n  tool_choice: required\n  steps:")
    requested_workload = workload(tmp_path, text, request_rate="40", num_requests="5")
    quick = {"api_flavor": api_flavor, "ttft": "1ms", "itl": "200us"}
    _, folder = execute(
        requested_workload, Settings(embedded=quick, **NO_PAGES, out=tmp_path / "calls")
    )
    task_prompts = prompts(requested_workload)
    for row in store.read_run(folder).rows:
        task, turn = task_prompts.task_and_turn(int(row["slot"]))
        called = any(
            node.continued_turn == turn and node.tool_of_result
            for node in task_prompts.graphs[task]
        )
        assert (
            row["status"] == STATUS["ok"]
            and (row["finish_reason"] == FINISH["tool_calls"]) == called
        )


LEAVING = RESEARCH.replace("requests:", "requests:\n  abandoned: 30%")


def test_the_requested_share_of_users_abandons_its_tasks(tmp_path: Path) -> None:
    graphs = TaskGraphs(workload(tmp_path, LEAVING).requests, 7)
    leaving = [graphs.abandonment(number) for number in range(2000)]

    assert (
        abs(sum(user_abandonment is not None for user_abandonment in leaving) / 2000 - 0.3)
        < 4 * (0.3 * 0.7 / 2000) ** 0.5
    )
    for number, abandonment in enumerate(leaving):
        if abandonment is not None:
            assert abandonment.turn < len(graphs[number])
            assert 1 <= abandonment.tokens < graphs.output_tokens(number, abandonment.turn)


def test_abandoned_tasks_end_within_a_response_and_do_not_count_as_failed(
    tmp_path: Path,
) -> None:
    requested_workload = workload(tmp_path, LEAVING, more=CLOSED.replace("17", "60"))
    summary, folder = execute(
        requested_workload, Settings(url="sim:gb300-vm", out=tmp_path / "out")
    )
    rows, task_prompts = store.read_run(folder).rows, prompts(requested_workload)
    leaving = {
        task: abandonment
        for task in range(60)
        if (abandonment := task_prompts.graphs.abandonment(task))
    }

    assert summary.sessions is not None and summary.requests.failed == summary.requests.dropped == 0
    assert (summary.sessions.abandoned, summary.sessions.ok) == (len(leaving), 60 - len(leaving))
    assert len(rows) == build_schedule(requested_workload, 7).slot_count

    for task, left in leaving.items():
        task_records = rows[rows["session"] == task]
        cut = task_records[task_records["turn"] == left.turn][0]
        assert (cut["status"], cut["kind"]) == (STATUS["cancelled"], KIND["abandoned"])
        assert left.tokens <= cut["output_tokens"] < cut["asked_output"]
        assert set(task_records["status"].tolist()) <= {STATUS["ok"], STATUS["cancelled"]}
        assert (task_records["due_ns"] <= cut["done_ns"]).all() and (
            task_records["done_ns"] <= cut["done_ns"]
        ).all()

    assert (
        (rows["status"] == STATUS["cancelled"]).sum() == summary.requests.cancelled > len(leaving)
    )


@pytest.mark.processes
def test_users_abandon_tasks_over_http(tmp_path: Path) -> None:
    text = FAST.replace("requests:", "requests:\n  abandoned: 50%").replace(
        "output_tokens: 30", "output_tokens: 300"
    )
    requested_workload = workload(tmp_path, text, request_rate="40", num_requests="12")
    quick = {"ttft": "1ms", "itl": "1ms"}
    summary, folder = execute(
        requested_workload, Settings(embedded=quick, **NO_PAGES, out=tmp_path / "out")
    )
    rows, task_prompts = store.read_run(folder).rows, prompts(requested_workload)
    leaving = [task for task in range(12) if task_prompts.graphs.abandonment(task)]

    assert summary.sessions is not None and summary.requests.failed == 0

    gone = (
        summary.sessions.abandoned
    )  # an answer of a few tokens may be over before its user has left

    assert 0 < gone <= len(leaving) and summary.sessions.ok == 12 - gone
    assert set(rows["session"][rows["status"] == STATUS["cancelled"]].tolist()) <= set(leaving)


def test_metrics_of_tasks_equal_those_of_their_records(tmp_path: Path) -> None:
    slo_text = "slo: {task: {within: 8s, wait: 55ms, attainment: 40%}}"
    requested_workload = workload(tmp_path, more=STAGES + slo_text)
    summary, folder = execute(
        requested_workload, Settings(url="sim:gb300-vm", out=tmp_path / "out")
    )
    rows = store.read_run(folder).rows
    seen = []
    for task in range(40):
        task_records = rows[rows["session"] == task]
        waits = task_records["first_token_ns"] - task_records["due_ns"]
        took = task_records["end_ns"].max() - task_records["due_ns"].min()
        seen.append(
            (
                took,
                waits.sum(),
                waits.max(),
                len(task_records),
                task_records["input_tokens"].sum(),
                task_records["output_tokens"].sum(),
            )
        )
    took, waited, longest, requests, inputs, outputs = (
        np.array(column) for column in zip(*seen, strict=True)
    )
    good = int(((took <= 8e9) & (longest <= 55e6)).sum())
    tasks = summary.sessions

    assert tasks is not None and tasks.goodput is not None and 0 < good < 40
    assert (tasks.count, tasks.goodput.good, tasks.goodput.met) == (40, good, good >= 16)
    assert summary.goodput.met == tasks.goodput.met and exit_code(summary) == (
        0 if good >= 16 else 1
    )
    assert (tasks.requests, tasks.input_tokens, tasks.output_tokens) == (
        pytest.approx(requests.mean()),
        pytest.approx(inputs.mean()),
        pytest.approx(outputs.mean()),
    )
    for distribution, values in (
        (tasks.duration_ms, took),
        (tasks.wait_ms, waited),
        (tasks.longest_wait_ms, longest),
    ):
        assert distribution.p50 == pytest.approx(np.sort(values)[20] / 1e6, rel=0)
