"""The schedule: columns, worker shares and fingerprints of every mode, and MLPerf's draw."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import repository_paths
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_workloads import MS, S, closed, constant, gamma, poisson, ramp, stage, workload

from loadgen.core.schedule.build import build_schedule
from loadgen.core.schedule.schedule import (
    RESERVED_SESSIONS,
    Schedule,
    Slot,
    schedule_fingerprint,
    shard,
)
from loadgen.core.workload import (
    Delay,
    EmpiricalDuration,
    FixedDuration,
    LogNormalDuration,
    NormalDuration,
    Poisson,
    UniformDuration,
    load,
)

ORACLE = json.loads((repository_paths.DATA / "loadgen_oracle.json").read_text())["poisson_schedule"]


def lines(schedule: Schedule) -> list[Slot]:
    return [
        Slot(*row) for row in zip(*(column.tolist() for column in schedule.columns()), strict=True)
    ]


def slot(
    number: int,
    due_ns: int,
    after: int,
    pause_ns: int,
    stage: int,
    session: int,
    turn: int,
    user: int,
) -> Slot:
    return Slot(number, due_ns, after, pause_ns, stage, session, turn, user)


TABLES = {
    "open": (
        workload(constant(2.0, count=3)),
        [
            slot(0, 0, -1, 0, 0, -1, 0, -1),
            slot(1, S // 2, -1, 0, 0, -1, 0, -1),
            slot(2, S, -1, 0, 0, -1, 0, -1),
        ],
    ),
    "closed": (
        workload(closed(2, count=5)),
        [
            slot(0, 0, -1, 0, 0, -1, 0, 0),
            slot(1, 0, -1, 0, 0, -1, 0, 1),
            slot(2, -1, 0, 0, 0, -1, 0, 0),
            slot(3, -1, 1, 0, 0, -1, 0, 1),
            slot(4, -1, 2, 0, 0, -1, 0, 0),
        ],
    ),
    "conversations, open": (
        workload(constant(2.0, count=2), turns=2, tool_ns=7),
        [
            slot(0, 0, -1, 0, 0, 0, 0, -1),
            slot(1, -1, 0, 7, 0, 0, 1, -1),
            slot(2, S // 2, -1, 0, 0, 1, 0, -1),
            slot(3, -1, 2, 7, 0, 1, 1, -1),
        ],
    ),
    "conversations, closed": (
        workload(closed(1, count=2), turns=2, tool_ns=7),
        [
            slot(0, 0, -1, 0, 0, 0, 0, 0),
            slot(1, -1, 0, 7, 0, 0, 1, 0),
            slot(2, -1, 1, 0, 0, 1, 0, 0),
            slot(3, -1, 2, 7, 0, 1, 1, 0),
        ],
    ),
    "stages": (  # offsets from the stage's own start after a stage without a fixed end
        workload(constant(2.0, count=1), closed(1, count=1), constant(2.0, count=2)),
        [
            slot(0, 0, -1, 0, 0, -1, 0, -1),
            slot(1, S // 2, -1, 0, 1, -1, 0, 0),
            slot(2, 0, -1, 0, 2, -1, 0, -1),
            slot(3, S // 2, -1, 0, 2, -1, 0, -1),
        ],
    ),
}


@pytest.mark.parametrize("name", TABLES)
def test_columns_and_single_slots_agree_with_the_expected_schedule(name: str) -> None:
    requested_workload, expected = TABLES[name]
    schedule = build_schedule(requested_workload, 1)

    assert lines(schedule) == expected
    assert [schedule.slot(number) for number in range(len(expected))] == expected
    assert list(schedule.slot_ids()) == list(range(len(expected)))
    assert schedule.slot_count == len(expected)
    for number in (-1, len(expected)):
        with pytest.raises(IndexError):
            schedule.slot(number)


TASKS_OF_UNLIKE_SIZE = """
name: tasks
requests:
  tools: {search: {result_tokens: 5}}
  steps:
    plan: {input_tokens: 5, output_tokens: 5}
    look: {after: plan, tool: search, parallel: {uniform: {min: 1, max: 4}}, output_tokens: 5}
    write: {after: [plan, look], output_tokens: 5}
stages: [{arrival: {constant: 5/s}, count: 20}]
"""


def test_a_slot_id_selects_its_slot_in_tasks_of_different_size(tmp_path: Path) -> None:
    file = tmp_path / "workload.yaml"
    file.write_text(TASKS_OF_UNLIKE_SIZE)
    schedule = build_schedule(load(str(file)), seed=1)
    slots = lines(schedule)
    assert len({slot.turn for slot in slots if not schedule.next_slot_ids(slot.slot_id)}) > 1
    for expected in slots:
        assert schedule.slot(expected.slot_id) == expected
        assert schedule.turn_of(expected.slot_id) == expected.turn


@pytest.mark.parametrize("run", ORACLE["official_runs_v5.1"], ids=lambda run: run["run"])
def test_an_explicit_schedule_seed_reproduces_the_schedule_of_mlperf_loadgen(
    run: dict[str, int],
) -> None:
    measured = poisson(float(run["qps"]), count=run["queries"])
    warm_up = stage(Poisson(rate=float(run["qps"])), count=1000, measured=False)
    schedule = build_schedule(
        workload(warm_up, measured, schedule_seed=ORACLE["seed_v5.1"]["schedule"]), 99
    )
    first_scheduled_stage, second_scheduled_stage = schedule.stages

    assert second_scheduled_stage.length_ns == run["duration_ns"]
    assert (
        schedule.columns().due_ns[1000]
        == first_scheduled_stage.length_ns
        == second_scheduled_stage.start_ns
    )
    assert second_scheduled_stage.offered_rps == pytest.approx(
        run["queries"] / (run["duration_ns"] / 1e9)
    )
    assert not np.array_equal(
        first_scheduled_stage.arrivals_ns, second_scheduled_stage.arrivals_ns[:1000]
    )  # no two stages draw alike


@pytest.mark.parametrize(
    "law", [poisson(50.0, count=100), gamma(50.0, 0.5, count=100), ramp(10.0, 90.0, count=100)]
)
def test_arrivals_depend_on_the_seed_and_the_stage(law) -> None:
    def offsets(seed: int, schedule_seed: int | None = None) -> list[list[int]]:
        schedule = build_schedule(workload(law, law, schedule_seed=schedule_seed), seed)
        return [span.arrivals_ns.tolist() for span in schedule.stages]

    assert offsets(1) == offsets(1)
    assert offsets(1) != offsets(2)
    assert offsets(1, 7) == offsets(2, 7)
    assert offsets(1)[0] != offsets(1)[1]
    assert offsets(1, 0) != offsets(1)  # a seed of 0 is a seed


def test_session_numbers_continue_through_the_stages() -> None:
    schedule = build_schedule(
        workload(constant(5.0, count=4), closed(2, duration_ns=S), closed(3, count=5), turns=3), 1
    )
    first_scheduled_stage, second_scheduled_stage, third_scheduled_stage = schedule.stages

    assert (
        first_scheduled_stage.first_session,
        second_scheduled_stage.first_session,
        third_scheduled_stage.first_session,
    ) == (
        0,
        4,
        4 + RESERVED_SESSIONS,
    )
    assert schedule.slot_count is None
    assert schedule.slot(12) == slot(12, 800 * MS, -1, 0, 1, 4, 0, 0)
    assert schedule.slot(12 + 3 * 2 + 1) == slot(19, -1, 18, 0, 1, 6, 1, 0)
    assert schedule.slot((4 + RESERVED_SESSIONS) * 3).stage == 2
    numbers = schedule.slot_ids()
    assert [next(numbers) for _ in range(30)] == list(range(30))
    with pytest.raises(ValueError):
        schedule.columns()


@pytest.mark.parametrize(
    ("stages", "starts", "horizon"),
    [
        (
            [constant(10.0, duration_ns=S), closed(2, duration_ns=S), poisson(9.0, duration_ns=S)],
            [0, S, 2 * S],
            3 * S,
        ),
        (
            [constant(10.0, count=5), constant(10.0, duration_ns=S, count=2)],
            [0, S // 2],
            7 * S // 10,
        ),
        (
            [closed(2, count=5), constant(10.0, duration_ns=S), closed(2, duration_ns=S)],
            [0, None, None],
            None,
        ),
        ([closed(2, count=5, duration_ns=S), constant(10.0, count=5)], [0, None], None),
        ([constant(float("inf"), count=5), closed(1, count=1)], [0, 0], None),
    ],
)
def test_stages_start_in_order_and_the_schedule_ends_with_the_last(stages, starts, horizon) -> None:
    schedule = build_schedule(workload(*stages), 1)
    assert [span.start_ns for span in schedule.stages] == starts
    assert schedule.horizon_ns == horizon


def test_each_stage_has_its_offered_rate() -> None:
    stages = constant(10.0, duration_ns=2 * S), closed(3, count=5), constant(float("inf"), count=5)
    schedule = build_schedule(workload(*stages, turns=4), 1)
    assert [span.offered_rps for span in schedule.stages] == [40.0, None, float("inf")]


any_stages = st.lists(
    st.one_of(
        st.builds(
            lambda rate, n: poisson(rate, count=n), st.sampled_from([1.0, 30.0]), st.integers(1, 40)
        ),
        st.builds(
            lambda rate, s: ramp(rate, 20.0, duration_ns=s * S),
            st.sampled_from([1.0, 9.0]),
            st.integers(1, 4),
        ),
        st.builds(lambda users, n: closed(users, count=n), st.integers(1, 12), st.integers(1, 50)),
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=50, deadline=None)
@given(
    stages=any_stages,
    turns=st.integers(1, 4),
    n=st.integers(1, 6),
    m=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_shards_have_complete_sessions_and_add_up_to_the_schedule(
    stages, turns: int, n: int, m: int, seed: int
) -> None:
    tool_time = UniformDuration(min=0, max=S)
    schedule = build_schedule(workload(*stages, turns=turns, tool_time=tool_time), seed)
    parts = [shard(shard(schedule, i, n), j, m) for i in range(n) for j in range(m)]
    shares = [lines(part) for part in parts]

    assert sorted(line for share in shares for line in share) == lines(schedule)

    for part, share in zip(parts, shares, strict=True):
        slot_ids = {line.slot_id for line in share}
        assert part.slot_count == len(share)
        assert sorted(part.slot_ids()) == sorted(slot_ids)
        assert all(line.predecessor in slot_ids for line in share if line.predecessor >= 0)
        assert [part.slot(line.slot_id) for line in share] == share

    with pytest.raises(ValueError, match="no shard"):
        shard(schedule, n, n)


def test_shards_of_a_closed_loop_without_a_count_have_different_virtual_users() -> None:
    schedule = build_schedule(workload(closed(5, duration_ns=S), turns=2), 1)
    numbers = shard(schedule, 1, 3).slot_ids()  # users 1 and 4
    assert [next(numbers) for _ in range(8)] == [2, 3, 8, 9, 12, 13, 18, 19]
    assert list(shard(schedule, 5, 6).slot_ids()) == []


@pytest.mark.parametrize(
    ("tool_time", "low", "high", "mean"),
    [
        (FixedDuration(value=3 * MS), 3 * MS, 3 * MS, 3.0),
        (UniformDuration(min=MS, max=3 * MS), MS, 3 * MS, 2.0),
        (NormalDuration(mean=2 * MS, stddev=MS // 2), 0, 5 * MS, 2.0),
        (
            NormalDuration(mean=0, stddev=MS, min=MS, max=2 * MS),
            MS,
            2 * MS,
            1.383,
        ),  # the tail between one and two deviations
        (LogNormalDuration(median=2 * MS, sigma=0.5), 0, 40 * MS, 2.266),
        (LogNormalDuration(mean=2 * MS, sigma=0.5), 0, 40 * MS, 2.0),
        (EmpiricalDuration(values=(MS, 5 * MS), weights=(3.0, 1.0)), MS, 5 * MS, 2.0),
        (
            NormalDuration(mean=0, stddev=0, min=7),
            7,
            7,
            7e-6,
        ),  # nothing to draw inside the bounds: the nearest one
    ],
)
def test_tool_time_is_a_function_of_seed_conversation_and_turn(
    tool_time: Delay, low: int, high: int, mean: float
) -> None:
    few_schedule = build_schedule(
        workload(constant(9.0, count=300), turns=5, tool_time=tool_time), 1
    )
    many_schedule = build_schedule(workload(closed(8, count=3000), turns=5, tool_time=tool_time), 1)
    pauses = many_schedule.columns().pause_ns.reshape(-1, 5)

    assert np.array_equal(few_schedule.columns().pause_ns.reshape(-1, 5), pauses[:300])
    assert (pauses[:, 0] == 0).all()
    assert low <= pauses[:, 1:].min() <= pauses[:, 1:].max() <= high
    assert pauses[:, 1:].mean() / MS == pytest.approx(mean, rel=0.03)
    assert [many_schedule.sessions.pauses_ns(session) for session in (0, 203, 204, 2999)] == pauses[
        [0, 203, 204, 2999], 1:
    ].tolist()

    if low != high:
        assert len(np.unique(pauses[:, 1:])) > 1
        other = build_schedule(workload(closed(8, count=3000), turns=5, tool_time=tool_time), 2)
        assert not np.array_equal(other.columns().pause_ns.reshape(-1, 5), pauses)


def test_the_fingerprint_depends_on_the_schedule_only() -> None:
    def of(*stages, seed: int = 1, **how) -> str:
        return schedule_fingerprint(build_schedule(workload(*stages, **how), seed))

    base = of(poisson(9.0, count=50), turns=2, tool_time=UniformDuration(min=0, max=S))
    assert base == of(poisson(9.0, count=50), turns=2, tool_time=UniformDuration(min=0, max=S))
    other_fingerprints = [
        of(poisson(9.0, count=50), turns=2, tool_time=UniformDuration(min=0, max=S), seed=2),
        of(poisson(9.0, count=51), turns=2, tool_time=UniformDuration(min=0, max=S)),
        of(poisson(9.0, count=50), turns=2, tool_time=UniformDuration(min=0, max=2 * S)),
        of(
            poisson(9.0, count=50),
            turns=2,
            tool_time=UniformDuration(min=0, max=S),
            schedule_seed=1,
        ),
        of(poisson(9.0, count=100)),
        of(closed(3, duration_ns=S)),
        of(closed(4, duration_ns=S)),
        of(closed(4, duration_ns=2 * S)),
        of(closed(4, count=100)),
    ]
    assert len({base, *other_fingerprints}) == len(other_fingerprints) + 1
    with pytest.raises(ValueError):
        schedule_fingerprint(shard(build_schedule(workload(closed(4, count=9)), 1), 0, 2))


def test_two_million_slots_use_memory_for_their_arrivals_only() -> None:
    schedule = build_schedule(workload(constant(3500.0, duration_ns=600 * S)), 1)

    assert schedule.slot_count == 2_100_000
    assert sum(span.arrivals_ns.nbytes for span in schedule.stages) == 8 * 2_100_000
    assert (
        sum(
            span.arrivals_ns.nbytes
            for span in build_schedule(workload(closed(9, count=2**40)), 1).stages
        )
        == 0
    )
