"""The replica in C and its twin in Python do the same: step by step, and over a whole open loop."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.core.schedule.chains import Singles
from loadgen.core.schedule.timetable import Schedule, StageSpan
from loadgen.sim import open_loop
from loadgen.sim.course import Course
from loadgen.sim.engine import replica as engine
from loadgen.sim.engine.replica import NEVER, Costs, PurePythonReplica, ServerLimits
from loadgen.sim.engine.routing import route
from loadgen.sim.load_bounds import LoadBounds

if engine.module is None:
    pytest.skip("built by pip install where a C compiler is", allow_module_level=True)

MS = 1_000_000
COSTS = Costs(
    overhead_ns=10 * MS, weights_ns=5.3 * MS, kv_token_ns=20.7, token_ns=30_000.3, attended_ns=0.57
)
LIMITS = st.builds(
    ServerLimits,
    max_batch_size=st.integers(1, 8),
    max_num_tokens=st.sampled_from([8, 64, 500]),
    kv_blocks=st.integers(20, 60),
    tokens_per_block=st.sampled_from([1, 16]),
    max_seq_len=st.just(320),
    chunked_prefill=st.booleans(),
    guaranteed=st.booleans(),
    block_reuse=st.booleans(),
)
REQUEST = st.tuples(
    st.integers(0, 200 * MS), st.integers(1, 200), st.integers(0, 130), st.integers(0, 3)
)
FIELDS = (
    "key",
    "due_ns",
    "input_tokens",
    "asked",
    "output_tokens",
    "total",
    "todo",
    "admitted_ns",
    "cached",
    "first",
)
FIELDS += ("from_iteration", "last", "state")
STATE = (
    "active",
    "decoding",
    "decoded",
    "iteration",
    "end_ns",
    "context_requests",
    "context_tokens",
    "pauses",
    "hits",
)
STATE += ("misses", "queued", "next_due_ns", "blocks_used", "ends")


def blocks_of(prefix: int, tokens: int, per_block: int) -> list[Any]:
    return [(prefix, place) if prefix else place for place in range(tokens // per_block)]


def script(
    cls: Any, limits: ServerLimits, asked: list[tuple[int, int, int, int]], cancelled: list[int]
) -> list[Any]:
    """What a replica says after each step; after every so many ends some request is cancelled, done or not."""
    replica = cls(COSTS, limits)
    due, waiting = 0, []
    for key, (apart, tokens, output, prefix) in enumerate(asked):
        due += apart
        if replica.admissible(tokens):
            blocks = blocks_of(prefix, tokens, limits.tokens_per_block)
            waiting.append(replica.Request(key, due, tokens, output, blocks))
    everyone, said, leaving = list(waiting), [], list(cancelled)
    while (waiting or replica.end_ns != NEVER) and len(said) < 3000:
        if waiting and waiting[0].due_ns <= replica.end_ns:
            one = waiting.pop(0)
            replica.submit(one)
            if replica.end_ns == NEVER:
                replica.begin(one.due_ns)
        else:
            end = replica.end_ns
            done = [one.key for one in replica.finish()]
            said.append((done, [one.key for one in replica.started]))
            if leaving and replica.iteration % 3 == 0:
                one = everyone[leaving.pop() % len(everyone)]
                if one not in waiting:
                    said.append(replica.generated(one))
                    replica.cancel(one)
            if leaving and leaving[-1] == 7:
                replica.reset_cache()
            said.append(replica.begin(end))
        said.append([(one.key, first, last) for one, first, last in replica.paused])
        said.append(
            [
                [*getattr(replica, name)] if name == "ends" else getattr(replica, name)
                for name in STATE
            ]
        )
        said.append([replica.generated(one) for one in everyone])
    said += [[getattr(one, name) for name in FIELDS] for one in everyone]
    if replica.ends:
        assert replica.end_of(len(replica.ends) - 1) == replica.ends[-1]
        last = replica.ends[-1]
        replica.forget()
        assert list(replica.ends) == [last]
    return said


@settings(deadline=None, max_examples=60)
@given(
    limits=LIMITS,
    asked=st.lists(REQUEST, min_size=1, max_size=25),
    cancelled=st.lists(st.integers(0, 30)),
)
def test_the_twins_say_the_same_at_each_step(
    limits: ServerLimits, asked: list[tuple[int, int, int, int]], cancelled: list[int]
) -> None:
    assert script(engine.Replica, limits, asked, cancelled) == script(
        PurePythonReplica, limits, asked, cancelled
    )


@settings(deadline=None, max_examples=40)
@given(
    limits=LIMITS,
    asked=st.lists(REQUEST, min_size=1, max_size=40),
    replicas=st.integers(1, 3),
    drain_ns=st.sampled_from([0, 300 * MS, NEVER]),
    timeout_ns=st.sampled_from([600 * MS, NEVER]),
    stopped=st.sampled_from([None, 0.2, 0.7]),
)
def test_an_open_loop_at_once_is_the_one_step_by_step(
    limits: ServerLimits,
    asked: list[tuple[int, int, int, int]],
    replicas: int,
    drain_ns: int,
    timeout_ns: int,
    stopped: float | None,
) -> None:
    offsets = np.cumsum([apart for apart, *_ in asked]).astype(np.int64)
    span = StageSpan(
        index=0,
        name="",
        measured=True,
        start_ns=0,
        length_ns=int(offsets[-1]) + 1,
        first_chain=0,
        chains=len(asked),
        lanes=0,
        offsets=offsets,
        slots=len(asked),
        turns=1,
    )
    schedule = Schedule(stages=(span,), chains=Singles())

    def sizes(number: int) -> Any:
        _, tokens, output, prefix = asked[number]
        return tokens, max(output, 1), blocks_of(prefix, tokens, limits.tokens_per_block)

    made = [engine.Replica(COSTS, limits) for _ in range(replicas)]
    speeds = [1.0] * replicas
    stop_ns = NEVER if stopped is None else int(stopped * offsets[-1])
    bounds = LoadBounds(timeout_ns=timeout_ns, drain_ns=drain_ns, stop_ns=stop_ns)
    flights = open_loop.carried(schedule, sizes, made, route(speeds, "round_robin"), bounds)
    theirs = [PurePythonReplica(COSTS, limits) for _ in range(replicas)]
    course = Course(schedule, sizes, theirs, route(speeds, "round_robin"), bounds)
    course.run()
    rows = np.array(course.flights.sent).reshape(-1, 13)
    if (
        flights is None
    ):  # a request is refused, or late, or waits for ever: all replicas are looked at together
        refused = not all(theirs[0].admissible(tokens) for _, tokens, *_ in asked)
        stuck = any(one.queued for one in theirs) or len(rows) + len(
            course.flights.unsent
        ) // 3 < len(asked)
        ends = [row[11] if row[10] else theirs[row[2]].ends[max(row[3], row[5])] for row in rows]
        late = any(end >= row[1] + timeout_ns for row, end in zip(rows, ends, strict=True))
        assert refused or stuck or late
        return
    assert np.array_equal(np.stack(list(flights.by_column().values()), 1), rows)
    assert flights.unsent == course.flights.unsent
    assert sorted(np.array(flights.stretches).reshape(-1, 4).tolist()) == sorted(
        np.array(course.flights.stretches).reshape(-1, 4).tolist()
    )
    assert [(one.ends, one.decoded, one.pauses) for one in made] == [
        (one.ends, one.decoded, one.pauses) for one in theirs
    ]


def test_what_a_request_holds_is_seen_by_the_collector() -> None:
    """An endpoint keeps an answer as the key of its request, and the request in the answer: a circle."""

    class Answer:
        served: Any

    answer = Answer()
    replica: Any = engine.Replica(
        COSTS, ServerLimits(max_batch_size=4, max_num_tokens=64, kv_blocks=20)
    )
    answer.served = replica.Request(answer, 0, 10, 3)
    replica.submit(answer.served)
    assert gc.is_tracked(answer.served) and answer in gc.get_referents(answer.served)
    for _ in range(3):  # it waits, is prefilled, decodes
        assert gc.get_referents(replica).count(answer.served) >= 1
        if replica.end_ns != NEVER:
            replica.finish()
        replica.begin(0 if replica.end_ns == NEVER else replica.end_ns)


def test_what_cannot_be_is_refused() -> None:
    replica: Any = engine.Replica(
        COSTS, ServerLimits(max_batch_size=4, max_num_tokens=64, kv_blocks=20)
    )
    for wrong in (
        lambda: replica.submit(1),
        lambda: replica.begin("x"),
        lambda: replica.cancel(None),
    ):
        with pytest.raises(TypeError):
            wrong()
    with pytest.raises(ValueError, match="not submitted"):
        replica.cancel(replica.Request(1, 0, 10, 3))
    with pytest.raises(IndexError):
        replica.end_of(0)
    with pytest.raises(ValueError, match="different lengths"):
        columns = [np.zeros(n, np.int64) for n in (1, 2, 1, 1)]
        replica.carry(*columns, None, 0, NEVER, NEVER, 1)
    with pytest.raises(ZeroDivisionError):
        replica.carry(
            np.zeros(1, np.int64),
            np.zeros(1, np.int64),
            None,
            None,
            lambda number: 1 // 0,
            0,
            NEVER,
            NEVER,
            1,
        )
