"""The dispatcher in virtual time: each slot is returned once, in time and within limits."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import astuple
from schedule_workloads import MS, S, closed, constant, gamma, poisson, workload

from loadgen.core.schedule.build import build_schedule
from loadgen.core.schedule.dispatched_slots import DispatchedSlot
from loadgen.core.schedule.dispatcher import Dispatcher
from loadgen.core.schedule.schedule import Schedule, schedule_fingerprint, shard
from loadgen.core.schedule.sessions import NOT_APPLICABLE
from loadgen.core.workload import load

Service = Callable[
    [DispatchedSlot], tuple[int, bool]
]  # how long a request takes, and whether it is ok


@dataclass
class Run:
    """What a virtual-time run saw: every start with its instant, every end, the most in flight."""

    starts: list[tuple[int, DispatchedSlot]] = field(default_factory=list)
    ends: dict[int, int] = field(default_factory=dict)
    most: int = 0
    in_prefill: set[int] = field(default_factory=set)
    most_in_prefill: int = 0
    unsent: list[DispatchedSlot] = field(default_factory=list)

    @property
    def all(self) -> list[DispatchedSlot]:
        return [start for _, start in self.starts] + self.unsent

    @property
    def sent(self) -> list[DispatchedSlot]:
        return [start for _, start in self.starts if not start.drop_reason]


def drive(
    dispatcher: Dispatcher,
    service: Service,
    *,
    stop_ns: int | None = None,
    limit: int = 64,
    late_ns: int = 0,
    prefill_ns: int | None = None,
) -> Run:
    """Run a dispatcher on a virtual clock and return what it started and dropped.

    From `stop_ns` on only the requests in flight end. With `late_ns` the dispatcher is polled that
    much after the instant that it named. `prefill_ns` is the time to the first output.
    """
    run, now, ends, prefilled = Run(), 0, list[tuple[int, int, bool]](), list[tuple[int, int]]()
    while not dispatcher.is_done:
        due = dispatcher.next_due_ns()
        if prefilled and (due is None or prefilled[0][0] <= due) and prefilled[0][0] <= ends[0][0]:
            now, number = heapq.heappop(prefilled)
            dispatcher.report_first_output(number, now)
            run.in_prefill.discard(number)
            continue
        if ends and (due is None or ends[0][0] <= due):
            now, number, ok = heapq.heappop(ends)
            run.ends[number] = now
            dispatcher.report_finished(number, now, ok)
            run.in_prefill.discard(number)
            continue
        assert due is not None, "neither anything in flight nor anything to come, and yet not done"
        now = max(now, due + late_ns)
        if stop_ns is not None and now >= stop_ns:
            dispatcher.stop()
            run.unsent, stop_ns = list(dispatcher.unsent_slots()), None
            continue
        full = True
        while full:
            starts = dispatcher.take_due_slots(now, limit)
            sent_dues = [start.due_ns for start in starts if not start.drop_reason]
            assert sent_dues == sorted(sent_dues)
            full = len(starts) == limit
            for start in starts:
                run.starts.append((now, start))
                if not start.drop_reason:
                    took, ok = service(start)
                    heapq.heappush(ends, (now + took, start.slot_id, ok))
                    run.in_prefill.add(start.slot_id)
                    if prefill_ns is not None and prefill_ns < took:
                        heapq.heappush(prefilled, (now + prefill_ns, start.slot_id))
            run.most_in_prefill = max(run.most_in_prefill, len(run.in_prefill))
            run.most = max(run.most, dispatcher.in_flight)
    assert dispatcher.in_flight == 0
    assert dispatcher.next_due_ns() is None
    assert dispatcher.take_due_slots(now + S) == []
    return run


def at_random(seed: int, failing: float = 0.0, longest_ns: int = 300 * MS) -> Service:
    random = Random(seed)
    return lambda _start: (random.randrange(1, longest_ns), random.random() >= failing)


def lasting(ns: int) -> Service:
    return lambda _start: (ns, True)


def numbers(starts: list[DispatchedSlot]) -> list[int]:
    return sorted(start.slot_id for start in starts)


bounded_stages = st.lists(
    st.one_of(
        st.builds(
            lambda rate, count: constant(rate, count=count),
            st.sampled_from([5.0, 40.0]),
            st.integers(1, 30),
        ),
        st.builds(
            lambda rate, s: poisson(rate, duration_ns=s * S),
            st.sampled_from([3.0, 20.0]),
            st.integers(1, 3),
        ),
        st.builds(
            lambda users, count, ramp: closed(users, ramp * MS, count=count),
            st.integers(1, 9),
            st.integers(1, 40),
            st.sampled_from([0, 1, 700, 5_000]),
        ),
    ),
    min_size=1,
    max_size=3,
)


@st.composite
def worker_schedules(draw: st.DrawFn) -> Schedule:
    """Return the part of a random schedule that one of up to five workers sends."""
    turns = draw(st.integers(1, 4))
    seed = draw(st.integers(0, 1000))
    schedule = build_schedule(workload(*draw(bounded_stages), turns=turns, tool_ns=200 * MS), seed)
    worker, workers = draw(st.sampled_from([(0, 1), (0, 2), (1, 2), (4, 5)]))
    return shard(schedule, worker, workers)


@given(
    schedule=worker_schedules(),
    cap=st.none() | st.integers(1, 5),
    failing=st.sampled_from([0.0, 0.3, 1.0]),
    seed=st.integers(0, 1000),
    stop_ns=st.none() | st.integers(0, 4 * S),
    limit=st.sampled_from([1, 3, 64]),
    late_ns=st.sampled_from([0, 0, 700 * MS]),
)
def test_every_slot_is_returned_exactly_once(
    schedule: Schedule,
    cap: int | None,
    failing: float,
    seed: int,
    stop_ns: int | None,
    limit: int,
    late_ns: int,
) -> None:
    run = drive(
        Dispatcher(schedule, max_in_flight=cap),
        at_random(seed, failing),
        stop_ns=stop_ns,
        limit=limit,
        late_ns=late_ns,
    )
    columns = schedule.columns()

    assert numbers(run.all) == columns.slot_id.tolist()
    assert len(run.all) == schedule.slot_count
    by_status = Counter(start.drop_reason for start in run.all)
    assert by_status[""] == len(run.ends)
    if stop_ns is None:
        assert not by_status["interrupted"]
    if cap is None:
        assert not by_status["in_flight_cap"]

    for start in run.all:  # the dispatcher's own arithmetic is that of the columns
        slot = schedule.slot(start.slot_id)
        assert astuple(start)[:5] == (
            slot.slot_id,
            slot.stage,
            to_none(slot.session),
            slot.turn,
            to_none(slot.virtual_user),
        )
    check_sessions(schedule, run)
    check_virtual_users(schedule, run, cap, late_ns > 0)


def to_none(column_value: int) -> int | None:
    return None if column_value == NOT_APPLICABLE else column_value


def check_sessions(schedule: Schedule, run: Run) -> None:
    """Check that a turn follows the previous one after its pause and only if that was sent."""
    sent = {start.slot_id: start for start in run.sent}
    for number, start in sent.items():
        slot = schedule.slot(number)
        if slot.predecessor >= 0 and slot.turn:
            assert start.due_ns == run.ends[slot.predecessor] + slot.pause_ns
        elif slot.predecessor >= 0 and slot.predecessor in run.ends:
            assert start.due_ns == run.ends[slot.predecessor]
        elif slot.due_ns >= 0 and schedule.stages[slot.stage].start_ns is not None:
            waits = (
                slot.stage > 0 and slot.virtual_user >= 0
            )  # a user takes over when the stage before leaves it a place
            assert start.due_ns >= slot.due_ns if waits else start.due_ns == slot.due_ns
    for start in run.all:
        before = start.slot_id - 1 if start.turn else None
        if start.drop_reason == "previous_turn_failed":
            assert before is not None
        if not start.drop_reason and before is not None:
            assert before in sent


def check_virtual_users(schedule: Schedule, run: Run, cap: int | None, late: bool) -> None:
    """Check the limits in flight of users and open loops, and the order of the starts."""
    assert [now for now, _ in run.starts] == sorted(now for now, _ in run.starts)
    busy: dict[tuple[int, int], int] = {}
    for now, start in run.starts:
        if start.drop_reason:
            continue
        assert now >= start.due_ns
        if not late:
            assert now == start.due_ns
        if start.virtual_user is not None:
            assert busy.get((start.stage, start.virtual_user), 0) <= now
            busy[start.stage, start.virtual_user] = run.ends.get(start.slot_id, now)
            assert 0 <= start.virtual_user < schedule.stages[start.stage].concurrency
    users = max(span.concurrency for span in schedule.stages)
    if cap is not None:
        assert run.most <= cap + sum(span.concurrency for span in schedule.stages)
    elif len(schedule.stages) == 1 and users:
        assert run.most <= users


def test_open_loop_starts_equal_the_columns_of_the_schedule() -> None:
    schedule = build_schedule(
        workload(poisson(200.0, duration_ns=20 * S), constant(50.0, count=99)), 3
    )
    run = drive(Dispatcher(schedule), at_random(3, longest_ns=2 * S))
    columns = schedule.columns()
    assert [start.slot_id for start in run.sent] == columns.slot_id.tolist()
    assert [start.due_ns for start in run.sent] == columns.due_ns.tolist()


def test_thirty_thousand_slots_of_three_stages_are_each_sent_once() -> None:
    """The size at which blocks, heap and cursors have all turned over many times."""
    mixed = workload(
        gamma(3000.0, 0.3, count=12_000), closed(100, count=9_000), constant(1e5, count=9_000)
    )
    schedule = build_schedule(mixed, 1)
    run = drive(Dispatcher(schedule), lambda start: (1 + start.slot_id * 7919 % (9 * MS), True))
    assert numbers(run.sent) == list(range(30_000))


def test_the_limit_in_flight_drops_requests_and_never_delays_them() -> None:
    schedule = build_schedule(workload(constant(10.0, count=20)), 1)
    run = drive(
        Dispatcher(schedule, max_in_flight=2), lasting(250 * MS)
    )  # 2.5 gaps long: one of three finds no place
    kinds = [start.drop_reason for _, start in run.starts]
    assert kinds[:6] == ["", "", "in_flight_cap", "", "", "in_flight_cap"]
    assert all(now == start.due_ns == 100 * MS * start.slot_id for now, start in run.starts)
    assert run.most == 2


def test_a_dropped_or_failed_turn_drops_the_rest_of_its_conversation_once() -> None:
    schedule = build_schedule(workload(constant(1.0, count=3), turns=4, tool_ns=MS), 1)
    run = drive(
        Dispatcher(schedule), lambda start: (10 * MS, start.slot_id != 5)
    )  # conversation 1 fails in turn 1

    assert [start.slot_id for start in run.all if start.drop_reason == "previous_turn_failed"] == [
        6,
        7,
    ]
    assert [(s.session, s.turn) for s in run.sent] == [
        *[(0, turn) for turn in range(4)],
        *[(1, turn) for turn in range(2)],
        *[(2, turn) for turn in range(4)],
    ]

    capped = drive(
        Dispatcher(schedule, max_in_flight=1), lasting(900 * MS)
    )  # turn 1 of each overlaps the next turn 0

    assert Counter(start.drop_reason for start in capped.all).keys() == {
        "",
        "in_flight_cap",
        "previous_turn_failed",
    }


def test_the_limit_in_flight_does_not_apply_to_a_closed_loop() -> None:
    run = drive(
        Dispatcher(build_schedule(workload(closed(8, count=50)), 1), max_in_flight=2), lasting(MS)
    )
    assert len(run.sent) == 50
    assert run.most == 8


def test_virtual_users_wait_in_order_for_room_in_prefill() -> None:
    """A request starts each 10 ms, when the previous one has its first output.

    Eight users share one place in prefill of 10 ms; seven responses of 70 ms are in flight.
    """
    run = drive(
        Dispatcher(build_schedule(workload(closed(8, count=24)), 1), max_in_prefill=1),
        lasting(70 * MS),
        prefill_ns=10 * MS,
    )

    assert [(now, start.due_ns, start.virtual_user) for now, start in run.starts] == [
        (10 * MS * n, 10 * MS * n, n % 8) for n in range(24)
    ]
    assert (run.most, run.most_in_prefill) == (7, 1)


def test_an_open_loop_drops_requests_above_the_limit_in_prefill() -> None:
    """At one arrival per 100 ms and 250 ms of prefill, two places drop one of three."""
    schedule = build_schedule(workload(constant(10.0, count=20)), 1)
    run = drive(Dispatcher(schedule, max_in_prefill=2), lasting(900 * MS), prefill_ns=250 * MS)

    assert [start.drop_reason for _, start in run.starts][:6] == [
        "",
        "",
        "prefill_cap",
        "",
        "",
        "prefill_cap",
    ]
    assert run.most > run.most_in_prefill == 2


@settings(deadline=None)
@given(
    st.integers(0, 2**32),
    st.integers(1, 4),
    st.booleans(),
    st.integers(1, 3),
    st.floats(0, 0.3),
    st.booleans(),
)
def test_a_limit_in_prefill_loses_no_slot(
    seed: int, cap: int, is_open: bool, turns: int, failing: float, stopped: bool
) -> None:
    stages = (
        (gamma(40.0, 0.5, count=25), closed(6, count=30))
        if is_open
        else (closed(3, count=9), closed(6, count=30))
    )
    schedule = build_schedule(workload(*stages, turns=turns, tool_ns=MS), seed)
    stop_ns = 400 * MS if stopped else None
    ran = drive(
        Dispatcher(schedule, max_in_prefill=cap),
        at_random(seed, failing),
        stop_ns=stop_ns,
        prefill_ns=20 * MS,
    )

    assert numbers(ran.all) == schedule.columns().slot_id.tolist()
    assert ran.most_in_prefill <= cap
    assert {start.drop_reason for start in ran.all if start.virtual_user is not None} <= {
        "",
        "previous_turn_failed",
        "interrupted",
    }


def test_virtual_users_that_wait_for_prefill_end_with_their_stage() -> None:
    """Of conversations too: the stage is over at 1 s, and nothing starts from then on."""
    schedule = build_schedule(workload(closed(4, duration_ns=S), turns=3, tool_ns=MS), 1)
    run = drive(Dispatcher(schedule, max_in_prefill=1), lasting(300 * MS), prefill_ns=90 * MS)
    assert {now for now, _ in run.starts} == {90 * MS * n for n in range(12)}
    assert run.most_in_prefill == 1 and not run.unsent


def test_a_closed_loop_with_a_duration_ends_there_and_schedules_only_what_it_reached() -> None:
    schedule = build_schedule(workload(closed(3, duration_ns=S)), 1)
    run = drive(Dispatcher(schedule), lambda start: ((1 + start.virtual_user) * 100 * MS, True))

    assert all(start.due_ns < S for start in run.all)
    assert not run.unsent
    starts_by_user = Counter(start.virtual_user for start in run.sent)
    assert starts_by_user == {0: 10, 1: 5, 2: 4}
    for start in run.sent:  # number = i * users + k
        assert start.slot_id % 3 == start.virtual_user
    stopped = drive(Dispatcher(schedule), lasting(100 * MS), stop_ns=S // 2)
    assert len(stopped.sent) == 15
    assert not stopped.unsent

    both = workload(
        closed(3, count=100, duration_ns=S), closed(2, count=100, duration_ns=S)
    )  # nor with a count
    stopped = drive(Dispatcher(build_schedule(both, 1)), lasting(100 * MS), stop_ns=S // 2)

    assert len(stopped.all) == 15


@pytest.mark.parametrize("parts", [1, 3])
def test_virtual_users_start_one_after_the_other(parts: int) -> None:
    schedule = build_schedule(
        workload(constant(2.0, duration_ns=S), closed(4, 200 * MS, duration_ns=S)), 1
    )
    begun: dict[int, int] = {}
    for part in range(parts):
        run = drive(Dispatcher(shard(schedule, part, parts)), lasting(300 * MS))
        for start in run.sent:
            if start.virtual_user is not None:
                begun.setdefault(start.virtual_user, start.due_ns)

    assert begun == {0: S, 1: S + 50 * MS, 2: S + 100 * MS, 3: S + 150 * MS}

    slots = (
        [slot for slot in schedule if slot.stage == 1 and slot.due_ns >= 0]
        if schedule.slot_count
        else []
    )

    assert [slot.due_ns for slot in slots] in ([], list(begun.values()))
    at_once = workload(constant(2.0, duration_ns=S), closed(4, duration_ns=S))
    assert schedule_fingerprint(schedule) != schedule_fingerprint(build_schedule(at_once, 1))


@pytest.mark.parametrize("failing", [False, True])
def test_turns_after_the_end_of_a_closed_loop_are_never_scheduled(
    failing: bool,
) -> None:
    schedule = build_schedule(workload(closed(2, duration_ns=S), turns=3, tool_ns=200 * MS), 1)
    run = drive(
        Dispatcher(schedule), lambda start: (150 * MS, not (failing and start.due_ns >= 900 * MS))
    )
    user = [
        (start.session, start.turn, start.due_ns // MS)
        for start in run.all
        if start.virtual_user == 0
    ]

    assert user == [
        (0, 0, 0),
        (0, 1, 350),
        (0, 2, 700),
        (2, 0, 850),
    ]  # the next turn would be due at 1200
    slow = drive(Dispatcher(schedule), lambda _start: (1100 * MS, not failing))
    assert [start.turn for start in slow.all] == [0, 0]


def test_a_virtual_user_sends_one_conversation_after_another() -> None:
    schedule = build_schedule(workload(closed(2, count=4), turns=3, tool_ns=50 * MS), 1)
    run = drive(Dispatcher(schedule), lasting(100 * MS))
    user = [
        (start.session, start.turn, now) for now, start in run.starts if start.virtual_user == 1
    ]
    expected = [0, 150, 300, 400, 550, 700]  # no pause between conversations

    assert user == [(1 + 2 * (i // 3), i % 3, at * MS) for i, at in enumerate(expected)]
    failing = drive(Dispatcher(schedule), lambda _start: (100 * MS, False))
    assert [
        (start.session, now)
        for now, start in failing.starts
        if start.virtual_user == 0 and not start.drop_reason
    ] == [
        (0, 0),
        (2, 100 * MS),
    ]


@pytest.mark.parametrize(
    ("first", "service_ns", "expected_ns"),
    [
        (constant(10.0, count=10), 5 * S, S),  # an open loop's end is fixed: ten gaps
        (
            closed(2, duration_ns=S),
            300 * MS,
            S,
        ),  # as is a duration's, though 4 * 300 ms are not over then
        (closed(2, count=10), 300 * MS, 1500 * MS),  # five rounds, then all have finished
        (closed(2, count=10, duration_ns=S), 300 * MS, S),  # whichever comes first
        (closed(2, count=4, duration_ns=S), 300 * MS, 600 * MS),
    ],
)
def test_the_start_of_a_stage_follows_the_end_of_the_previous_stage(
    first, service_ns: int, expected_ns: int
) -> None:
    schedule = build_schedule(workload(first, constant(10.0, count=3)), 1)
    run = drive(Dispatcher(schedule), lasting(service_ns))
    second_dispatched_slots = [start for start in run.sent if start.stage == 1]
    assert [start.due_ns for start in second_dispatched_slots] == [
        expected_ns + i * 100 * MS for i in range(3)
    ]
    numbers_seen = numbers(run.sent)
    assert len(set(numbers_seen)) == len(numbers_seen)


def test_a_stage_that_ends_late_does_not_end_the_next_stage() -> None:
    schedule = build_schedule(
        workload(
            closed(2, count=2, duration_ns=S), constant(10.0, count=20), constant(1.0, count=1)
        ),
        1,
    )
    run = drive(Dispatcher(schedule), lasting(1500 * MS))
    assert [start.due_ns for start in run.sent if start.stage == 2] == [3 * S]


def test_a_late_driver_does_not_change_due_times() -> None:
    dispatcher = Dispatcher(
        build_schedule(workload(closed(1, count=1, duration_ns=S), constant(10.0, count=3)), 1)
    )
    dispatcher.take_due_slots(0)
    dispatcher.report_finished(
        0, 2 * S, True
    )  # told before it was asked again: the stage had ended at its duration

    assert dispatcher.next_due_ns() == S
    assert [start.due_ns for start in dispatcher.take_due_slots(5 * S)] == [S, 1100 * MS, 1200 * MS]

    talk = Dispatcher(
        build_schedule(
            workload(constant(2.0, count=1), closed(1, count=1), turns=2, tool_ns=100 * MS), 1
        )
    )
    talk.take_due_slots(0)
    talk.report_finished(0, 100 * MS, True)

    assert [(start.slot_id, start.due_ns) for start in talk.take_due_slots(S)] == [(1, 200 * MS)]

    talk.report_finished(
        1, 300 * MS, True
    )  # told late: the user that waited for the conversation begins at its stage's start

    assert [(start.slot_id, start.due_ns) for start in talk.take_due_slots(S)] == [(2, 500 * MS)]


def test_simultaneous_arrivals_keep_the_order_of_their_stages() -> None:
    schedule = build_schedule(
        workload(constant(float("inf"), count=3), constant(float("inf"), count=2)), 1
    )
    assert [(start.stage, start.due_ns) for start in Dispatcher(schedule).take_due_slots(0)] == [
        (0, 0)
    ] * 3 + [(1, 0)] * 2


def test_conversations_continue_after_the_end_of_an_open_loop_stage() -> None:
    schedule = build_schedule(
        workload(
            constant(2.0, duration_ns=S), constant(2.0, duration_ns=S), turns=3, tool_ns=400 * MS
        ),
        1,
    )
    run = drive(Dispatcher(schedule), lasting(100 * MS))

    assert len(run.sent) == 12
    assert max(start.due_ns for start in run.sent if start.stage == 0) == 1500 * MS


@settings(max_examples=50, deadline=None)
@given(
    stages=bounded_stages, turns=st.integers(1, 3), n=st.integers(1, 5), seed=st.integers(0, 100)
)
def test_shards_together_start_the_slots_of_one_worker(
    stages, turns: int, n: int, seed: int
) -> None:
    schedule = build_schedule(workload(*stages, turns=turns, tool_ns=MS), seed)

    def took(start: DispatchedSlot) -> tuple[int, bool]:
        return 1 + start.slot_id * 7919 % (50 * MS), True

    full_run = drive(Dispatcher(schedule), took)
    parts = [drive(Dispatcher(shard(schedule, i, n)), took) for i in range(n)]
    together = sorted((astuple(start) for part in parts for start in part.sent), key=itemgetter(0))
    # each share begins such a stage by itself, and its users take over from its own requests
    if any(span.start_ns is None or (span.concurrency and span.index) for span in schedule.stages):
        assert [start[:5] for start in together] == [
            start[:5] for start in sorted(map(astuple, full_run.sent), key=itemgetter(0))
        ]
    else:
        assert together == sorted(map(astuple, full_run.sent), key=itemgetter(0))


def test_after_stop_nothing_starts_and_unsent_slots_have_a_reason() -> None:
    schedule = build_schedule(workload(constant(10.0, count=5), closed(2, count=6)), 1)
    dispatcher = Dispatcher(schedule)

    with pytest.raises(RuntimeError):
        next(dispatcher.unsent_slots())

    first_dispatched_slot, second_dispatched_slot = dispatcher.take_due_slots(100 * MS)
    dispatcher.stop()
    dispatcher.stop()

    assert dispatcher.next_due_ns() is None
    assert not dispatcher.is_done

    dispatcher.report_finished(second_dispatched_slot.slot_id, 200 * MS, True)
    dispatcher.report_finished(first_dispatched_slot.slot_id, 210 * MS, False)
    assert dispatcher.is_done
    assert dispatcher.take_due_slots(S) == []
    unsent = list(dispatcher.unsent_slots())
    assert {start.drop_reason for start in unsent} == {"interrupted"}
    assert numbers(unsent) == list(range(2, 11))
    assert [start.due_ns for start in unsent[:3]] == [200 * MS, 300 * MS, 400 * MS]
    assert [start.due_ns for start in unsent[3:]] == [
        -1
    ] * 6  # when the users would have come to them is not known
    with pytest.raises(KeyError):
        dispatcher.report_finished(first_dispatched_slot.slot_id, S, True)


def test_only_the_next_unsent_slot_of_a_virtual_user_has_a_due_time() -> None:
    dispatcher = Dispatcher(build_schedule(workload(closed(1, count=3), turns=2), 1))
    dispatcher.take_due_slots(0)
    dispatcher.report_finished(0, 5 * MS, True)
    dispatcher.stop()

    assert [(start.slot_id, start.due_ns) for start in dispatcher.unsent_slots()] == [
        (1, 5 * MS),
        (2, -1),
        (3, -1),
        (4, -1),
        (5, -1),
    ]


def test_slots_contain_plain_integers() -> None:
    """NumPy scalars are several times slower in Python code and cannot be packed."""
    mixed = workload(poisson(100.0, count=10), closed(2, count=10), turns=2, tool_ns=MS)
    run = drive(Dispatcher(build_schedule(mixed, 1)), lasting(MS), stop_ns=60 * MS)
    assert {type(value) for start in run.all for value in astuple(start)} == {int, str, type(None)}


# -- one stage takes over from another -------------------------------------------------------------


def most_in_flight(run: Run, since_ns: int = 0) -> int:
    """Return the largest number in flight from an instant on, with ends before starts."""
    changes = [(now, 1) for now, _ in run.starts] + [(end, -1) for end in run.ends.values()]
    level = most = 0
    for now, change in sorted(changes):
        level += change
        most = max(most, level if now >= since_ns and change > 0 else 0)
    return most


@given(
    laws=st.lists(
        st.tuples(st.integers(1, 9), st.sampled_from([0, 1, 400]), st.none() | st.integers(1, 40)),
        min_size=2,
        max_size=4,
    ),
    turns=st.integers(1, 3),
    failing=st.sampled_from([0.0, 0.3]),
    seed=st.integers(0, 1000),
    parts=st.integers(1, 3),
)
def test_virtual_users_of_successive_stages_never_exceed_the_concurrency(
    laws, turns, failing, seed, parts
) -> None:
    """No stage starts requests while earlier users leave no room for its own."""
    stages = [
        closed(users, ramp * MS, duration_ns=S)
        if count is None
        else closed(users, ramp * MS, count=count)
        for users, ramp, count in laws
    ]
    schedule = build_schedule(workload(*stages, turns=turns, tool_ns=50 * MS), seed)
    for part in range(parts):
        share = shard(schedule, part, parts)
        run = drive(Dispatcher(share), at_random(seed, failing))
        level = begun = 0
        changes = [(end, 0, -1) for end in run.ends.values()]
        changes += [(now, 1, start.stage) for now, start in run.starts if not start.drop_reason]
        for _, is_start, stage in sorted(changes):
            level += 1 if is_start else -1
            if is_start:
                begun = max(begun, stage)
                allowed = [
                    len(share.virtual_users_of(span)) for span in share.stages[stage : begun + 2]
                ]
                # users left over from earlier stages count among those of the new stage
                assert level <= max(allowed), (stage, level)


@pytest.mark.parametrize("parts", [1, 2])
def test_virtual_users_of_a_warm_up_are_replaced_one_by_one(parts: int) -> None:
    warm = closed(4, duration_ns=2 * S).model_copy(update={"measured": False})
    schedule = build_schedule(workload(warm, closed(4, count=20)), 1)
    for part in range(parts):
        run = drive(Dispatcher(shard(schedule, part, parts)), lasting(1225 * MS))
        assert most_in_flight(run) == 4 // parts
        first_due_ns = [start.due_ns for start in run.sent if start.stage == 1][: 4 // parts]
        assert first_due_ns == [2450 * MS] * (4 // parts), (
            "each when the warm-up request of its user has ended"
        )
        assert len([start for start in run.sent if start.stage == 1]) == 20 // parts


def test_a_warm_up_with_a_count_leaves_no_virtual_user_idle() -> None:
    warm = closed(3, count=7).model_copy(update={"measured": False})
    schedule = build_schedule(workload(warm, closed(3, count=9)), 1)
    run = drive(Dispatcher(schedule), lasting(100 * MS))

    assert [start.due_ns // MS for start in run.sent if start.stage == 1] == [
        200,
        200,
        300,
        300,
        300,
        400,
        400,
        400,
        500,
    ]
    assert most_in_flight(run) == 3


def test_a_stage_with_fewer_users_waits_and_new_users_start_staggered() -> None:
    down = build_schedule(workload(closed(8, duration_ns=S), closed(3, duration_ns=S)), 1)
    run = drive(Dispatcher(down), lambda start: ((300 + 50 * start.virtual_user) * MS, True))
    second_dispatched_slots = [start for start in run.sent if start.stage == 1]

    assert second_dispatched_slots and most_in_flight(run, second_dispatched_slots[0].due_ns) <= 3

    up = build_schedule(workload(closed(2, duration_ns=S), closed(6, 400 * MS, duration_ns=S)), 1)
    run = drive(Dispatcher(up), lasting(300 * MS))
    begun = {
        start.virtual_user: start.due_ns // MS for start in reversed(run.sent) if start.stage == 1
    }

    assert begun == {0: 1200, 1: 1200, 2: 1000, 3: 1100, 4: 1200, 5: 1300}


def test_a_closed_loop_after_an_open_one_waits_for_its_requests() -> None:
    schedule = build_schedule(workload(constant(10.0, duration_ns=S), closed(2, count=6)), 1)
    run = drive(Dispatcher(schedule), lasting(500 * MS))  # five in flight when the stage ends
    second = [start.due_ns // MS for start in run.sent if start.stage == 1]

    assert second[:2] == [1300, 1400] and most_in_flight(run, 1300 * MS) == 2

    talks = build_schedule(
        workload(constant(2.0, count=2), closed(1, count=1), turns=2, tool_ns=300 * MS), 1
    )
    run = drive(Dispatcher(talks), lasting(100 * MS))

    assert next(start.due_ns for start in run.sent if start.stage == 1) == 1000 * MS, (
        "after the last turn of both"
    )


TASK_OF_TWO_BRANCHES = """
name: tasks
requests:
  tools: {slow: {result_tokens: 5, time: 100ms}, fast: {result_tokens: 5, time: 0ms}}
  steps:
    plan: {input_tokens: 5, output_tokens: 5}
    slow_branch: {after: plan, tool: slow, output_tokens: 5}
    fast_branch: {after: plan, tool: fast, output_tokens: 5}
    join: {after: [slow_branch, fast_branch], output_tokens: 5}
stages: [{arrival: {closed: {concurrency: 1, ramp: 0s}}, duration: 50ms}]
"""


def test_a_failed_branch_after_the_end_of_its_stage_drops_no_unscheduled_request(
    tmp_path: Path,
) -> None:
    """The slow branch would be due after the end of the stage: it was never scheduled."""
    file = tmp_path / "workload.yaml"
    file.write_text(TASK_OF_TWO_BRANCHES)
    dispatcher = Dispatcher(build_schedule(load(str(file)), seed=1))
    (plan,) = dispatcher.take_due_slots(0)
    dispatcher.report_finished(plan.slot_id, 10 * MS, True)
    (fast_branch,) = dispatcher.take_due_slots(10 * MS)
    dispatcher.report_finished(fast_branch.slot_id, 20 * MS, False)
    (next_task,) = dispatcher.take_due_slots(20 * MS)

    assert (next_task.session, next_task.turn, next_task.drop_reason) == (plan.session + 1, 0, "")


def test_the_first_conversation_ends_when_its_second_turn_meets_the_limit_in_flight() -> None:
    load_of_two = workload(constant(200, count=2), turns=3, tool_ns=5 * MS)
    dispatcher = Dispatcher(build_schedule(load_of_two, 1), max_in_flight=1)
    (first_dispatched_slot,) = dispatcher.take_due_slots(0)
    dispatcher.report_finished(first_dispatched_slot.slot_id, MS, True)
    (second_dispatched_slot,) = dispatcher.take_due_slots(5 * MS)

    assert second_dispatched_slot.session != first_dispatched_slot.session

    dropped = [
        (start.session, start.turn, start.drop_reason)
        for start in dispatcher.take_due_slots(6 * MS)
    ]

    assert dropped == [
        (first_dispatched_slot.session, 1, "in_flight_cap"),
        (first_dispatched_slot.session, 2, "previous_turn_failed"),
    ]
