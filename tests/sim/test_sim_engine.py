"""The engine against closed formulas and its own invariants."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import astuple

from loadgen.sim.engine import replica as reference
from loadgen.sim.engine.fleet import Fleet
from loadgen.sim.engine.implementation import Replica, SimRequest
from loadgen.sim.engine.replica import (
    DONE,
    NEVER,
    Costs,
    ServerLimits,
)
from loadgen.sim.engine.routing import build_routing_order
from loadgen.sim.engine.system import SimulatedSystem

MS = 1_000_000
COSTS = Costs(
    overhead_ns=10 * MS, weights_ns=5 * MS, kv_token_ns=20.0, token_ns=30_000.0, attended_ns=0.5
)
WIDE = ServerLimits(
    max_batch_size=64, max_num_tokens=512, kv_blocks=4096, tokens_per_block=16, max_seq_len=4096
)


def drive(replica: Replica, requests: list[SimRequest]) -> list[SimRequest]:
    """Everything to its end, in virtual time; the requests as they finish."""
    sim_requests: list[SimRequest] = []
    waiting = sorted(requests, key=lambda request: request.due_ns)
    while waiting or replica.end_ns != NEVER:
        if waiting and waiting[0].due_ns <= replica.end_ns:
            request = waiting.pop(0)
            replica.submit(request)
            if replica.end_ns == NEVER:
                replica.begin_iteration(request.due_ns)
            continue
        end = replica.end_ns
        sim_requests += replica.end_iteration()
        replica.begin_iteration(end)
    return sim_requests


def assert_all_blocks_are_free(replica: Replica) -> None:
    assert (
        replica.active_count,
        replica.decoding_count,
        replica.queued_count,
        replica.used_block_count,
    ) == (0, 0, 0, 0)
    if isinstance(replica, reference.Replica):
        assert (
            not replica._decoding_requests
            and not replica._requests_by_last_iteration
            and not any(replica._block_demand._count_by_phase)
            and replica._kv_tokens == 0
        )


# -- one iteration is the formula ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("costs", "prompt", "expected_ns"),
    [
        (
            COSTS,
            100,
            10 * MS + 5 * MS + 100 * 20,
        ),  # bytes bind: weights and the cache that is written
        (
            COSTS,
            500,
            10 * MS + 500 * 30_000 + 500 * 250 * 0.5,
        ),  # FLOPs bind: tokens, and half of the square
    ],
)
def test_the_duration_of_a_single_prompt_follows_the_roofline(
    costs: Costs, prompt: int, expected_ns: float
) -> None:
    replica = Replica(costs, WIDE)
    [sim_request] = drive(replica, [SimRequest("a", 0, prompt, 1)])
    assert list(replica.iteration_ends_ns) == [math.floor(expected_ns) + 1]
    assert (sim_request.first_iteration, sim_request.last_iteration) == (0, 0)


def test_a_decode_iteration_reads_all_caches_and_computes_one_token_per_sequence() -> None:
    replica = Replica(COSTS, WIDE)
    drive(replica, [SimRequest(i, 0, 16, 3) for i in range(2)])
    # The first begins alone at its arrival. Its second token is computed with the next prompt.
    lengths = np.diff([0, *replica.iteration_ends_ns])
    weights = 15 * MS

    assert lengths.tolist() == [
        weights + 16 * 20 + 1,
        weights + (17 + 16) * 20 + 1,
        weights + (18 + 17) * 20 + 1,
        weights + 18 * 20 + 1,
    ]


def test_a_long_prompt_is_spread_over_iterations_while_others_decode() -> None:
    replica = Replica(COSTS, WIDE)
    first_sim_request, long = SimRequest("first", 0, 10, 50), SimRequest("long", 1, 1300, 2)
    drive(replica, [first_sim_request, long])
    # 512 tokens an iteration, one of them the other sequence's: 511 + 511 + 278.
    assert (first_sim_request.first_iteration, first_sim_request.last_iteration) == (0, 49)
    assert (long.first_iteration, long.last_iteration) == (3, 4)


def test_without_chunked_prefill_a_prompt_waits_until_it_fits() -> None:
    limits = ServerLimits(
        max_batch_size=64,
        max_num_tokens=512,
        kv_blocks=4096,
        tokens_per_block=16,
        max_seq_len=4096,
        chunked_prefill=False,
    )
    replica = Replica(COSTS, limits)
    requests = [SimRequest("a", 0, 10, 3), SimRequest("b", 0, 512, 1), SimRequest("c", 0, 10, 1)]
    drive(replica, requests)

    assert [request.first_iteration for request in requests] == [
        0,
        3,
        4,
    ]  # b needs an empty iteration; c waits behind b
    assert replica.can_serve(512) and not replica.can_serve(513)


# -- admission -------------------------------------------------------------------------------------


def test_the_batch_size_limits_active_sequences() -> None:
    limits = ServerLimits(
        max_batch_size=2, max_num_tokens=512, kv_blocks=4096, tokens_per_block=16, max_seq_len=4096
    )
    requests = [SimRequest(i, 0, 10, 5) for i in range(5)]
    drive(Replica(COSTS, limits), requests)

    # 0 alone at its arrival, 1 beside it; each next one takes the first free place, in order.
    assert [(request.first_iteration, request.last_iteration) for request in requests] == [
        (0, 4),
        (1, 5),
        (5, 9),
        (6, 10),
        (10, 14),
    ]


@pytest.mark.parametrize(("guaranteed", "at_once"), [(True, 2), (False, 8)])
def test_cache_blocks_are_reserved_at_admission_or_allocated_when_needed(
    guaranteed: bool, at_once: int
) -> None:
    """With 128 blocks of 16, a request of 956 tokens reserves 60 blocks, or 16 at first."""
    limits = ServerLimits(
        max_batch_size=64,
        max_num_tokens=4096,
        kv_blocks=128,
        tokens_per_block=16,
        max_seq_len=2048,
        reserves_output_blocks=guaranteed,
    )
    replica = Replica(COSTS, limits)
    requests = [SimRequest(i, 0, 256, 700) for i in range(10)]
    for request in requests:
        replica.submit(request)
    replica.begin_iteration(0)
    most = replica.active_count
    while replica.end_ns != NEVER:
        end = replica.end_ns
        replica.end_iteration()
        assert replica.used_block_count <= limits.kv_blocks
        replica.begin_iteration(end)
        most = max(most, replica.active_count)

    assert most == at_once
    assert (replica.pause_count > 0) is not guaranteed
    assert all(request.state == DONE for request in requests)
    assert_all_blocks_are_free(replica)


def test_a_paused_sequence_resumes_and_recomputes_its_tokens() -> None:
    limits = ServerLimits(
        max_batch_size=8, max_num_tokens=512, kv_blocks=8, tokens_per_block=16, max_seq_len=128
    )
    replica = Replica(COSTS, limits)
    older, newer = SimRequest("older", 0, 60, 40), SimRequest("newer", 0, 60, 20)
    replica.submit(older)
    replica.submit(newer)
    replica.begin_iteration(0)
    paused: list[tuple[Any, int, int]] = []
    while replica.end_ns != NEVER:
        end = replica.end_ns
        replica.end_iteration()
        replica.begin_iteration(end)
        paused += [(request.key, first, last) for request, first, last in replica.recent_pauses]

    # 4 blocks each. At its 5th token (60 + 4 = 64) a sequence needs a 5th block, but none is free.
    assert paused == [("newer", 0, 4)]
    assert (older.first_iteration, older.last_iteration) == (0, 39)
    assert (
        newer.resumed_iteration == 40
        and newer.prefill_tokens == 65
        and newer.last_iteration == 40 + 20 - 5 - 1
    )
    assert_all_blocks_are_free(replica)


# -- prefix cache ----------------------------------------------------------------------------------

REUSE = ServerLimits(
    max_batch_size=8,
    max_num_tokens=512,
    kv_blocks=64,
    tokens_per_block=16,
    max_seq_len=512,
    block_reuse=True,
)


def test_shared_prefixes_are_computed_once() -> None:
    replica = Replica(COSTS, REUSE)
    requests = [
        SimRequest("a", 0, 100, 2, list(range(6))),
        SimRequest("b", 10**9, 100, 2, [0, 1, 2, 13, 14, 15]),  # shares three blocks
        SimRequest(
            "c", 2 * 10**9, 96, 2, list(range(6))
        ),  # all of it: but its last block is computed for its logits
    ]
    drive(replica, requests)

    assert [request.cached_tokens for request in requests] == [0, 48, 80]
    assert_all_blocks_are_free(replica)


def test_least_recently_used_blocks_are_evicted_first_and_used_ones_never() -> None:
    replica = Replica(COSTS, REUSE)
    running_request = SimRequest("held", 0, 160, 200, list(range(10)))
    other_requests = [
        SimRequest(i, (i + 1) * 10**8, 160, 2, list(range(100 * i, 100 * i + 10)))
        for i in range(1, 7)
    ]
    repeated_requests = [
        SimRequest("first of them", 10**9, 160, 2, list(range(100, 110))),
        SimRequest("last of them", 12 * 10**8, 160, 2, list(range(600, 610))),
        SimRequest("held", 14 * 10**8, 160, 2, list(range(10))),
    ]
    drive(replica, [running_request, *other_requests, *repeated_requests])

    # 64 blocks: six times ten and the ten in use do not fit; of the oldest the end went first.
    assert [request.cached_tokens for request in repeated_requests] == [16, 144, 144]
    assert_all_blocks_are_free(replica)


class CountedCache(OrderedDict[Any, None]):
    """Counts the searches from its front, and the entries that were taken there."""

    searches = taken = 0

    def __iter__(self) -> Iterator[Any]:
        self.searches += 1
        return super().__iter__()

    def popitem(self, last: bool = True) -> tuple[Any, None]:
        self.taken += 1
        return super().popitem(last)


def test_evicting_a_cache_block_does_not_search_the_cache() -> None:
    """A plain dict would have to step over the holes of all entries that were removed."""
    replica = reference.Replica(COSTS, REUSE)

    assert type(replica._shared._unused) is OrderedDict

    cache = replica._shared._unused = CountedCache()
    requests = [
        reference.SimRequest(i, i * 10**8, 160, 2, list(range(100 * i, 100 * i + 10)))
        for i in range(200)
    ]
    drive(replica, requests)

    assert (cache.searches, cache.taken) == (0, 10 * len(requests) - len(cache))
    assert cache.taken > 1900
    assert_all_blocks_are_free(replica)


# -- anything that may come ------------------------------------------------------------------------

REQUESTS = st.lists(
    st.tuples(
        st.integers(0, 2 * 10**9), st.integers(1, 200), st.integers(1, 120), st.integers(0, 3)
    ),
    min_size=1,
    max_size=40,
)


@given(
    request_shapes=REQUESTS,
    blocks=st.integers(20, 60),
    reserves_output_blocks=st.booleans(),
    reuse=st.booleans(),
    data=st.data(),
)
def test_every_request_gets_its_tokens_and_all_blocks_are_freed(
    request_shapes: list[tuple[int, int, int, int]],
    blocks: int,
    reserves_output_blocks: bool,
    reuse: bool,
    data: st.DataObject,
) -> None:
    limits = ServerLimits(
        max_batch_size=6,
        max_num_tokens=64,
        kv_blocks=blocks,
        tokens_per_block=16,
        max_seq_len=320,
        reserves_output_blocks=reserves_output_blocks,
        block_reuse=reuse,
    )
    apart_ns = data.draw(st.sampled_from((0, 1, 20_000, 10**12)))
    system = SimulatedSystem(
        costs=COSTS, limits=limits, speeds=(1.0, 0.8), tokens_per_event=data.draw(st.integers(1, 5))
    )
    fleet = Fleet(system, emission_spacing_ns=apart_ns)
    waiting = sorted(enumerate(request_shapes), key=lambda item: (item[1][0], item[0]))
    left = {key: tokens for key, (_, _, tokens, _) in waiting}
    doomed = set(data.draw(st.lists(st.integers(0, len(request_shapes) - 1), max_size=4)))
    got: Counter[int] = Counter()
    finished: set[int] = set()
    last = 0
    while waiting or fleet.next_event_ns() is not None:
        due = fleet.next_event_ns()
        if waiting and (due is None or waiting[0][1][0] <= due):
            key, (at, prompt, tokens, prefix) = waiting.pop(0)
            fleet.submit(at, key, prompt, tokens, [1000 * prefix + i for i in range(prompt // 16)])
            continue
        assert due is not None
        for key, tokens, over, at in map(astuple, fleet.advance(due)):
            assert at >= last and key not in finished
            last = at
            got[key] += tokens
            if over:
                finished.add(key)
            elif key in doomed:
                fleet.cancel(key)
                finished.add(key)

    assert {key: got[key] for key in left if key not in doomed} == {
        k: n for k, n in left.items() if k not in doomed
    }
    assert finished == set(left)

    for replica in fleet.replicas:
        assert_all_blocks_are_free(replica)


def test_emissions_of_an_iteration_are_spaced_within_its_length() -> None:
    def emitted(apart_ns: int) -> list[Any]:
        fleet = Fleet(SimulatedSystem(costs=COSTS, limits=WIDE), emission_spacing_ns=apart_ns)
        for key in range(10):
            fleet.submit(key, key, 20, 3)
        out: list[Any] = []
        while (due := fleet.next_event_ns()) is not None:
            out += map(astuple, fleet.advance(due))
        return out

    together, apart, slow = emitted(0), emitted(20_000), emitted(10**12)
    assert (
        [step_emission[:3] for step_emission in together]
        == [step_emission[:3] for step_emission in apart]
        == [step_emission[:3] for step_emission in slow]
    )
    ends = sorted({end for *_, end in together})
    places = {end: [at for *_, at in together].count(end) for end in ends}
    assert [at for *_, at in apart] == [
        end + 100_000 * (place // 5) for end in ends for place in range(places[end])
    ]
    for emission, at_once in zip(
        slow, together, strict=True
    ):  # done within half an iteration, however slow
        length = at_once[3] - max((end for end in ends if end < at_once[3]), default=0)
        assert at_once[3] <= emission[3] < at_once[3] + length / 2


# -- closed forms ----------------------------------------------------------------------------------


def test_the_waiting_time_without_batching_equals_that_of_an_md1_queue() -> None:
    """M/D/1: the mean wait is rho D / (2 (1 - rho)). Independent runs are compared."""
    service = 10 * MS
    costs = Costs(
        overhead_ns=service - 1, weights_ns=0.0, kv_token_ns=0.0, token_ns=0.0, attended_ns=0.0
    )
    limits = ServerLimits(
        max_batch_size=1, max_num_tokens=16, kv_blocks=8, tokens_per_block=16, max_seq_len=64
    )
    rho = 0.7
    means = []
    for seed in range(60):
        rng = np.random.default_rng(seed)
        due = np.cumsum(rng.exponential(service / rho, 2500)).astype(np.int64).tolist()
        replica = Replica(costs, limits)
        requests = [SimRequest(i, at, 8, 1) for i, at in enumerate(due)]
        drive(replica, requests)
        waits = [
            replica.iteration_ends_ns[request.first_iteration] - service - request.due_ns
            for request in requests
        ]
        assert min(waits) >= 0
        means.append(float(np.mean(waits[500:])))  # the first ones find an empty server
    expected = rho * service / (2 * (1 - rho))
    error = float(np.std(means, ddof=1)) / math.sqrt(len(means))

    assert error < 0.03 * expected
    assert abs(float(np.mean(means)) - expected) < 3 * error


def test_littles_law_holds_over_a_busy_period() -> None:
    """The mean number of requests in the system equals the sum of their stays (Little's law)."""
    rng = np.random.default_rng(7)
    requests = [
        SimRequest(i, int(at), int(rng.integers(1, 300)), int(rng.integers(1, 200)))
        for i, at in enumerate(np.cumsum(rng.exponential(20 * MS, 400)))
    ]
    replica = Replica(COSTS, WIDE)
    waiting, inside, area, before, stays = list(requests), 0, 0, 0, 0
    while waiting or replica.end_ns != NEVER:
        now = min(replica.end_ns, waiting[0].due_ns if waiting else NEVER)
        area += inside * (now - before)
        before = now
        if waiting and waiting[0].due_ns == now:
            request = waiting.pop(0)
            replica.submit(request)
            if replica.end_ns == NEVER:
                replica.begin_iteration(now)
        else:
            stays += sum(now - request.due_ns for request in replica.end_iteration())
            replica.begin_iteration(now)
        inside = replica.active_count + replica.queued_count

    assert inside == 0 and area == stays


# -- routing and both faces ------------------------------------------------------------------------


def test_weighted_routing_spreads_turns_in_proportion_to_speed() -> None:
    speeds = (1.0, 0.5, 1.5)

    assert build_routing_order(speeds, "round_robin") == [0, 1, 2]

    weighted = build_routing_order(speeds, "weighted")
    counts = Counter(weighted)
    assert [counts[i] / len(weighted) for i in range(3)] == pytest.approx(
        [1 / 3, 1 / 6, 1 / 2], abs=1e-3
    )

    for i, share in enumerate(
        (1 / 3, 1 / 6, 1 / 2)
    ):  # at no point more than a turn or so from its share
        taken = np.cumsum(np.array(weighted) == i)
        assert np.abs(taken - share * np.arange(1, len(weighted) + 1)).max() < 1.01


@pytest.mark.parametrize("apart_ns", [0, 20_000])
@pytest.mark.parametrize("every_ns", [7 * MS, 200 * MS, 2_000 * MS])  # busy; some gaps; each alone
def test_emissions_of_a_fleet_do_not_depend_on_when_the_caller_advances(
    apart_ns: int, every_ns: int
) -> None:
    """Times over HTTP are absolute, however seldom the engine is polled."""

    def emitted(step_ns: int) -> list[Any]:
        fleet = Fleet(
            SimulatedSystem(costs=COSTS, limits=WIDE, speeds=(1.0, 0.9), tokens_per_event=3),
            emission_spacing_ns=apart_ns,
        )
        arrivals = [(i * every_ns, i, 40 + i % 90, 5 + i % 40) for i in range(60)]
        out: list[Any] = []
        now = 0
        while arrivals or fleet.next_event_ns() is not None:
            now += step_ns
            while arrivals and arrivals[0][0] <= now:
                fleet.submit(*arrivals.pop(0))
            out += map(astuple, fleet.advance(now))
        return sorted(out, key=lambda emission: (emission[3], emission[0]))

    emissions = emitted(1 * MS)
    assert {key for key, _, finished, _ in emissions if finished} == set(range(60))
    assert emissions == emitted(250 * MS) == emitted(5_000 * MS)
