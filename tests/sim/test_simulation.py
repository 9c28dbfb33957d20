"""Compiled replicas give the same records as the reference, under every form of load."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.core.execution.events import InterimCheck
from loadgen.core.requests.task_graphs import Abandonment
from loadgen.core.schedule.schedule import Schedule, ScheduledStage
from loadgen.core.schedule.sessions import (
    SINGLE_REQUEST,
    Ints,
    Session,
    SessionColumns,
    SessionSequence,
    SingleRequests,
)
from loadgen.sim.engine.implementation import compiled_module
from loadgen.sim.engine.replica import NEVER, Costs, Replica, ServerLimits
from loadgen.sim.engine.routing import create_router
from loadgen.sim.engine.system import ReplicaChange
from loadgen.sim.load_bounds import LoadBounds
from loadgen.sim.request_lengths import RequestSize
from loadgen.sim.simulation import Simulation

if compiled_module is None:
    pytest.skip("built by pip install where a C compiler is", allow_module_level=True)

MS = 1_000_000
COSTS = Costs(
    overhead_ns=10 * MS, weights_ns=5.3 * MS, kv_token_ns=20.7, token_ns=30_000.3, attended_ns=0.57
)


class Graphs(SessionSequence):
    """Draw sessions: single requests, conversations, and tasks whose users may leave."""

    max_parallel_turns = 1

    def __init__(self, draw: random.Random, turns: int) -> None:
        self.max_turns = turns
        self._made = [self._chain(draw) for _ in range(40)]

    def get(self, index: int) -> Session:
        return self._made[index % len(self._made)]

    def turn_counts(self, first: int, count: int) -> Ints:
        raise NotImplementedError

    def columns(self, first: int, count: int) -> SessionColumns:
        raise NotImplementedError

    def _chain(self, draw: random.Random) -> Session:
        if draw.random() < 0.2:
            return SINGLE_REQUEST
        slots = draw.randint(1, self.max_turns)
        later = range(1, slots)
        after = [
            set[int](),
            *(set(draw.choices(range(turn), k=draw.choice([1, 1, 2, 3]))) for turn in later),
        ]
        successors = tuple(
            tuple(slot for slot in range(slots) if turn in after[slot]) for turn in range(slots)
        )
        pauses = [draw.choice([0, 0, 5 * MS, 60 * MS]) for _ in range(slots)]
        leaving = (
            Abandonment(draw.randrange(slots), draw.randint(1, 30)) if draw.random() < 0.3 else None
        )
        return Session(tuple(map(len, after)), successors, pauses, abandonment=leaving)


def stages_of(draw: random.Random, turns: int) -> list[ScheduledStage]:
    """One to three stages, open and closed, with and without a count, a ramp, a fixed start."""
    spans: list[ScheduledStage] = []
    begins: int | None = 0
    first, before = 0, 0
    for index in range(draw.randint(1, 3)):
        concurrency = draw.choice([0, 1, 3, 9])
        chains = draw.choice([4, 15, 30]) if not concurrency or draw.random() < 0.6 else None
        length = (
            draw.choice([200, 900, 2000]) * MS
            if not concurrency or chains is None or draw.random() < 0.3
            else None
        )
        gaps = [draw.choice([0, 3 * MS, 40 * MS]) for _ in range(chains or 0)]
        spans.append(
            ScheduledStage(
                index=index,
                name=str(index),
                measured=True,
                start_ns=begins,
                length_ns=length,
                first_session=first,
                session_count=chains,
                concurrency=concurrency,
                arrivals_ns=np.array([] if concurrency else np.cumsum(gaps), np.int64),
                slot_count=None,
                max_turns=turns,
                ramp_ns=draw.choice([0, 100 * MS]) if concurrency else 0,
                inherited_users=min(before, concurrency),
            )
        )
        begins = None if begins is None or length is None else begins + length
        first, before = first + (1000 if chains is None else chains), concurrency
    return spans


def lengths_of(draw: random.Random, per_block: int, values: bool) -> Any:
    longest = [
        8,
        200,
        draw.choice([60, 200]),
    ]  # a lane whose prompts are all refused would not come to an end
    sizes = [
        (draw.randint(1, longest[i % 3]), draw.choice([1, 2, 20, 90]), draw.randint(0, 3))
        for i in range(50)
    ]

    def of(number: int) -> Any:
        tokens, output, prefix = sizes[number % len(sizes)]
        if values and prefix == 3:
            parts = (tokens, 1 + tokens // 2, 7)[: 1 + number % 3]
            return RequestSize(sum(parts), 0, sequence_lengths=parts)
        return RequestSize(
            tokens,
            output,
            [(prefix, place) if prefix else place for place in range(tokens // per_block)],
        )

    return of


def simulate_any_load(seed: int, replica_class: Any) -> Any:
    """Return what a simulation of a load of any form has recorded, with replicas of this class."""
    draw = random.Random(seed)
    turns = draw.choice([1, 1, 3, 6])
    schedule = Schedule(
        stages=tuple(stages_of(draw, turns)),
        sessions=Graphs(draw, turns) if turns > 1 else SingleRequests(),
    )
    limits = ServerLimits(
        max_batch_size=draw.randint(1, 8),
        max_num_tokens=draw.choice([8, 64, 500]),
        kv_blocks=draw.randint(20, 60),
        tokens_per_block=draw.choice([1, 16]),
        max_seq_len=draw.choice([150, 320]),
        chunked_prefill=draw.random() < 0.5,
        reserves_output_blocks=draw.random() < 0.5,
        block_reuse=draw.random() < 0.5,
    )
    sizes = lengths_of(draw, limits.tokens_per_block, draw.random() < 0.3)
    speeds = [1.0, 1.3, 0.8][: draw.randint(1, 3)]
    times = sorted(draw.choices(range(1, 40), k=4))
    changes = (
        [ReplicaChange(at * 50 * MS, draw.randint(1, len(speeds))) for at in times]
        if draw.random() < 0.3
        else []
    )
    seen: list[Any] = []

    def ends(now_ns: int, rows: Any) -> bool:
        seen.append((now_ns, rows.tobytes()))
        return len(seen) == ended_by

    ended_by = draw.choice([2, 9, 10**9])
    checks = [InterimCheck(draw.choice([70, 300]) * MS, ends)] if draw.random() < 0.4 else []
    drain_ns, stop_ns = (
        draw.choice([0, 300 * MS, NEVER]),
        draw.choice([NEVER, NEVER, 150 * MS, 700 * MS]),
    )
    simulation = Simulation(
        schedule,
        sizes,
        [replica_class(COSTS.at_speed(speed), limits) for speed in speeds],
        create_router(speeds, draw.choice(["round_robin", "weighted"])),
        LoadBounds(
            max_in_flight=draw.choice([None, None, 2, 6]),
            max_in_prefill=draw.choice([None, None, 1, 3]),
            timeout_ns=draw.choice([NEVER, 400 * MS, 2000 * MS]),
            drain_ns=10_000 * MS if checks else drain_ns,
            stop_ns=stop_ns,
        ),
        checks=checks,
        changes=changes,
    )
    simulation.run()
    collected = simulation.requests
    tables = (collected.sent_columns(), collected.unsent_columns(), collected.pause_columns())
    columns = [
        {name: getattr(table, name).tolist() for name in table.__struct_fields__}
        for table in tables
    ]
    replicas = [
        (
            list(replica.iteration_ends_ns),
            replica.decoded_tokens,
            replica.pause_count,
            replica.cache_hits,
            replica.cache_misses,
            replica.active_count,
        )
        for replica in simulation.replicas
    ]
    return columns, simulation.is_ended_by_check, seen, replicas


class OneByOne(Replica):
    """A replica whose iterations are all simulated one by one."""

    @staticmethod
    def advance_to_next_event(replicas: Sequence[Replica], before_ns: int) -> tuple[int, int]:
        return Replica.advance_to_next_event(replicas, min(before_ns, 0))


@settings(deadline=None, max_examples=150)
@given(seed=st.integers(0, 1 << 40))
def test_compiled_replicas_give_the_records_of_the_reference(seed: int) -> None:
    assert simulate_any_load(seed, compiled_module.Replica) == simulate_any_load(seed, OneByOne)
