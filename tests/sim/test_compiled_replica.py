"""The compiled replica has the same state as the reference after each step."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.sim.engine.implementation import compiled_module
from loadgen.sim.engine.replica import (
    NEVER,
    REQUEST_FIELDS,
    Costs,
    Replica,
    ServerLimits,
    SimRequest,
)

if compiled_module is None:
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
    reserves_output_blocks=st.booleans(),
    block_reuse=st.booleans(),
)
REQUEST = st.tuples(
    st.integers(0, 200 * MS), st.integers(1, 200), st.integers(0, 130), st.integers(0, 3)
)
FIELDS = (*REQUEST_FIELDS, "prefill_tokens", "remaining_output_tokens", "state")
STATE = (
    "active_count",
    "decoding_count",
    "decoded_tokens",
    "iteration",
    "end_ns",
    "context_requests",
    "context_tokens",
    "pause_count",
    "cache_hits",
    "cache_misses",
    "queued_count",
    "next_due_ns",
    "used_block_count",
    "iteration_ends_ns",
)


def blocks_of(prefix: int, tokens: int, per_block: int) -> list[Any]:
    return [(prefix, place) if prefix else place for place in range(tokens // per_block)]


def script(
    cls: Any,
    limits: ServerLimits,
    request_shapes: list[tuple[int, int, int, int]],
    cancelled: list[int],
) -> list[Any]:
    """Return what a replica reports after each step, with some requests cancelled."""
    replica = cls(COSTS, limits)
    due, waiting = 0, []
    for key, (apart, tokens, output, prefix) in enumerate(request_shapes):
        due += apart
        if replica.can_serve(tokens):
            blocks = blocks_of(prefix, tokens, limits.tokens_per_block)
            waiting.append(replica.Request(key, due, tokens, output, blocks))
    everyone, states, leaving = list(waiting), [], list(cancelled)
    while (waiting or replica.end_ns != NEVER) and len(states) < 3000:
        if waiting and waiting[0].due_ns <= replica.end_ns:
            request = waiting.pop(0)
            replica.submit(request)
            if replica.end_ns == NEVER:
                replica.begin_iteration(request.due_ns)
        else:
            end = replica.end_ns
            done = [sim_request.key for sim_request in replica.end_iteration()]
            states.append((done, [sim_request.key for sim_request in replica.first_token_requests]))
            if leaving and replica.iteration % 3 == 0:
                request = everyone[leaving.pop() % len(everyone)]
                if request not in waiting:
                    states.append(replica.count_generated_tokens(request))
                    replica.cancel(request)
            if leaving and leaving[-1] == 7:
                replica.reset_cache()
            states.append(replica.begin_iteration(end))
        states.append(
            [(sim_request.key, first, last) for sim_request, first, last in replica.recent_pauses]
        )
        states.append(
            [
                [*getattr(replica, name)] if name == "iteration_ends_ns" else getattr(replica, name)
                for name in STATE
            ]
        )
        states.append([replica.count_generated_tokens(sim_request) for sim_request in everyone])
    states += [[getattr(sim_request, name) for name in FIELDS] for sim_request in everyone]
    if replica.iteration_ends_ns:
        assert (
            replica.iteration_end_ns(len(replica.iteration_ends_ns) - 1)
            == replica.iteration_ends_ns[-1]
        )
        last = replica.iteration_ends_ns[-1]
        replica.discard_iteration_ends()
        assert list(replica.iteration_ends_ns) == [last]
    return states


@settings(deadline=None, max_examples=60)
@given(
    limits=LIMITS,
    request_shapes=st.lists(REQUEST, min_size=1, max_size=25),
    cancelled=st.lists(st.integers(0, 30)),
)
def test_both_implementations_have_the_same_state_after_each_step(
    limits: ServerLimits, request_shapes: list[tuple[int, int, int, int]], cancelled: list[int]
) -> None:
    assert script(compiled_module.Replica, limits, request_shapes, cancelled) == script(
        Replica, limits, request_shapes, cancelled
    )


@settings(deadline=None, max_examples=60)
@given(
    limits=LIMITS,
    sequences=st.lists(st.tuples(st.integers(1, 200), st.integers(1, 130)), min_size=1, max_size=8),
    replica_count=st.integers(1, 3),
    step_ns=st.sampled_from([15 * MS, 90 * MS, 400 * MS, NEVER]),
)
def test_both_implementations_end_quiet_iterations_alike(
    limits: ServerLimits, sequences: list[tuple[int, int]], replica_count: int, step_ns: int
) -> None:
    """Iterations at which no request starts or ends are simulated together."""

    def events(replica_class: Any, before_ns: int) -> list[Any]:
        replicas = [
            replica_class(COSTS.at_speed(1 + index / 10), limits) for index in range(replica_count)
        ]
        for number, (input_tokens, output_tokens) in enumerate(sequences):
            replica = replicas[number % replica_count]
            if replica.can_serve(input_tokens):
                replica.submit(replica.Request(number, 0, input_tokens, output_tokens))
        for replica in replicas:
            replica.begin_iteration(0)
        seen = []
        until_ns = before_ns
        while len(seen) < 3000:
            end_ns, index = replica_class.advance_to_next_event(replicas, until_ns)
            if end_ns == NEVER:
                break
            until_ns = min(NEVER, end_ns + before_ns)
            replica = replicas[index]
            done = [request.key for request in replica.end_iteration()]
            started = [request.key for request in replica.first_token_requests]
            replica.begin_iteration(end_ns)
            paused = [(request.key, first, last) for request, first, last in replica.recent_pauses]
            seen.append((end_ns, index, done, started, paused))
        return [seen, [list(replica.iteration_ends_ns) for replica in replicas]]

    compiled, reference = (
        events(implementation, step_ns) for implementation in (compiled_module.Replica, Replica)
    )
    assert compiled == reference
    one_by_one = events(Replica, 0)
    assert reference[1] == one_by_one[1]
    is_event = lambda event: bool(event[2] or event[3] or event[4])  # noqa: E731
    assert [*filter(is_event, reference[0])] == [*filter(is_event, one_by_one[0])]


def test_packed_requests_have_their_fields_in_order() -> None:
    def packed(request_class: Any) -> list[list[int]]:
        requests = [request_class(number, 10 + number, 20, 30) for number in range(3)]
        for request in requests:
            for place, name in enumerate(REQUEST_FIELDS[2:]):
                setattr(request, name, 100 * request.key + place)
        rows = np.zeros((3, len(REQUEST_FIELDS)), np.int64)
        request_class.pack(requests, rows)
        return rows.tolist()

    assert packed(compiled_module.SimRequest) == packed(SimRequest)
    assert packed(compiled_module.SimRequest)[2] == [2, 12, *range(200, 211)]


def test_the_garbage_collector_frees_cycles_through_requests() -> None:
    """A response that is the key of its request refers to itself and must be collectable."""

    class Answer:
        served: Any

    answer = Answer()
    replica: Any = compiled_module.Replica(
        COSTS, ServerLimits(max_batch_size=4, max_num_tokens=64, kv_blocks=20)
    )
    answer.served = replica.Request(answer, 0, 10, 3)
    replica.submit(answer.served)
    assert gc.is_tracked(answer.served) and answer in gc.get_referents(answer.served)
    for _ in range(3):  # it waits, is prefilled, decodes
        assert gc.get_referents(replica).count(answer.served) >= 1
        if replica.end_ns != NEVER:
            replica.end_iteration()
        replica.begin_iteration(0 if replica.end_ns == NEVER else replica.end_ns)


def test_invalid_arguments_of_the_compiled_replica_raise_errors() -> None:
    replica: Any = compiled_module.Replica(
        COSTS, ServerLimits(max_batch_size=4, max_num_tokens=64, kv_blocks=20)
    )

    for wrong in (
        lambda: replica.submit(1),
        lambda: replica.begin_iteration("x"),
        lambda: replica.cancel(None),
    ):
        with pytest.raises(TypeError):
            wrong()
    with pytest.raises(ValueError, match="not submitted"):
        replica.cancel(replica.Request(1, 0, 10, 3))
    with pytest.raises(IndexError):
        replica.iteration_end_ns(0)
    with pytest.raises(TypeError):
        compiled_module.Replica.advance_to_next_event([replica, 1], 0)
    with pytest.raises(ValueError, match="no replicas"):
        compiled_module.Replica.advance_to_next_event([], 0)
    with pytest.raises(ValueError, match="size of the requests"):
        compiled_module.SimRequest.pack(
            [compiled_module.SimRequest(1, 0, 10, 3)], np.zeros((1, 2), np.int64)
        )
    with pytest.raises(TypeError):
        compiled_module.SimRequest.pack([1], np.zeros((1, len(REQUEST_FIELDS)), np.int64))
