"""The latency model: due times are absolute, and slots are served in order of arrival."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import astuple

from loadgen.core.errors import UserError
from loadgen.sim.engine.latency_model import (
    DurationDistribution,
    LatencyModel,
    LatencyOptions,
    draw_uniform,
    parse_distribution,
)

MS = 1_000_000
FIXED = {
    "ttft": DurationDistribution(center_ns=100 * MS),
    "itl": DurationDistribution(center_ns=10 * MS),
}


def drain(pace: LatencyModel) -> list[tuple[Any, int, bool, int]]:
    out = []
    while (at := pace.next_event_ns()) is not None:
        out += map(astuple, pace.advance(at))
    return out


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("5ms", DurationDistribution(center_ns=5 * MS)),
        ("0.02", DurationDistribution(center_ns=20 * MS)),  # flags without a unit are seconds
        ("fixed:50us", DurationDistribution(center_ns=50_000)),
        ("normal:5ms,1ms", DurationDistribution(kind="normal", center_ns=5 * MS, spread=MS)),
        (
            "lognormal:120ms,0.25",
            DurationDistribution(kind="lognormal", center_ns=120 * MS, spread=0.25),
        ),
    ],
)
def test_a_latency_distribution_is_parsed_into_kind_and_parameters(
    text: str, expected: DurationDistribution
) -> None:
    assert parse_distribution(text) == expected


@pytest.mark.parametrize(
    "text", ["", "fast", "5 parsecs", "pareto:1ms,2", "normal:5ms", "lognormal:1ms,x", "-3ms"]
)
def test_an_invalid_latency_distribution_is_refused_with_a_hint(text: str) -> None:
    with pytest.raises(UserError) as exc_info:
        parse_distribution(text, "--itl")
    assert exc_info.value.where == "--itl" and exc_info.value.hint


@pytest.mark.parametrize(
    ("step", "sizes"), [(1, [1] * 12), (5, [1, 5, 5, 1]), (11, [1, 11]), (50, [1, 11])]
)
def test_the_first_token_is_emitted_alone_and_each_further_one_after_an_interval(
    step: int, sizes: list[int]
) -> None:
    pace = LatencyModel(LatencyOptions(**FIXED, tokens_per_emission=step))
    pace.submit(7, "a", 10, 12)
    events = drain(pace)

    assert [tokens for _, tokens, _, _ in events] == sizes
    assert [finished for _, _, finished, _ in events] == [False] * (len(sizes) - 1) + [True]

    count = 0
    for _, tokens, _, due in events:  # an event is due with its last token
        count += tokens
        assert due == 7 + 100 * MS + (count - 1) * 10 * MS


@given(st.lists(st.integers(1, 80 * MS), min_size=1, max_size=40), st.booleans())
def test_due_times_do_not_depend_on_when_the_caller_advances(
    waits: list[int], lockstep: bool
) -> None:
    def filled() -> LatencyModel:
        pace = LatencyModel(LatencyOptions(**FIXED, lockstep=lockstep, tokens_per_emission=2))
        for i in range(5):
            pace.submit(i * 3 * MS, i, 0, 9)
        return pace

    pace, now, got = filled(), 12 * MS, []
    for wait in waits:
        now += wait
        due = list(map(astuple, pace.advance(now)))
        assert all(at <= now for _, _, _, at in due)
        got += due
    got += drain(pace)
    all_emissions = drain(filled())
    assert sorted(got, key=lambda e: (e[3], e[0])) == sorted(
        all_emissions, key=lambda e: (e[3], e[0])
    )


def test_lockstep_emits_tokens_of_all_requests_at_the_same_instants() -> None:
    pace = LatencyModel(LatencyOptions(**FIXED, lockstep=True))
    for i in range(8):
        pace.submit(1 + 1_000_003 * i, i, 0, 20)
    dues = [due for _, _, _, due in drain(pace)]
    assert all(due % (10 * MS) == 0 for due in dues)
    assert len(set(dues)) == 20


def test_requests_get_slots_in_order_of_arrival_and_are_timed_from_then_on() -> None:
    pace = LatencyModel(LatencyOptions(**FIXED, slots=2))
    for key in "abcd":
        pace.submit(0, key, 0, 3)

    assert (pace.active_count, pace.queued_count) == (2, 2)

    first = {}
    for key, _, _, due in drain(pace):
        first.setdefault(key, due)

    assert first == {"a": 100 * MS, "b": 100 * MS, "c": 220 * MS, "d": 220 * MS}
    assert (pace.active_count, pace.queued_count) == (0, 0)


def test_a_cancelled_request_emits_no_token_and_frees_its_slot() -> None:
    pace = LatencyModel(LatencyOptions(**FIXED, slots=1))
    for key in "abc":
        pace.submit(0, key, 0, 5)
    pace.advance(110 * MS)
    pace.cancel("b")  # waits
    pace.cancel("a")  # runs
    pace.cancel("a")
    left = drain(pace)

    assert {key for key, _, _, _ in left} == {"c"}
    assert left[0][3] == 210 * MS
    assert (pace.active_count, pace.queued_count, pace.next_event_ns()) == (0, 0, None)


def test_input_tokens_delay_the_first_token() -> None:
    pace = LatencyModel(LatencyOptions(**FIXED, per_input_token_ns=1000.5))
    pace.submit(0, "a", 2000, 1)
    assert list(map(astuple, pace.advance(10**10))) == [("a", 1, True, 100 * MS + 2_001_000)]


def test_flooding_streams_take_turns() -> None:
    pace = LatencyModel(
        LatencyOptions(
            ttft=DurationDistribution(),
            itl=DurationDistribution(center_ns=MS),
            tokens_per_emission=50,
            flood=True,
        )
    )
    pace.submit(0, "a", 0, 101)
    pace.submit(0, "b", 0, 101)
    turns = [
        [(emission.key, emission.tokens) for emission in pace.advance(now)] for now in range(1, 4)
    ]

    assert turns == [[("a", 1), ("b", 1)], [("a", 50), ("b", 50)], [("a", 50), ("b", 50)]]


def test_random_durations_follow_their_distribution_and_depend_on_the_seed_only() -> None:
    normal = [
        DurationDistribution(kind="normal", center_ns=20 * MS, spread=2 * MS).draw(1, 2, i)
        for i in range(4000)
    ]

    assert statistics.mean(normal) == pytest.approx(20 * MS, rel=0.01)
    assert statistics.stdev(normal) == pytest.approx(2 * MS, rel=0.05)

    lognormal = [
        DurationDistribution(kind="lognormal", center_ns=120 * MS, spread=0.25).draw(1, 2, i)
        for i in range(4000)
    ]

    assert statistics.median(lognormal) == pytest.approx(120 * MS, rel=0.02)
    assert draw_uniform(1, 2, 3) == draw_uniform(1, 2, 3) != draw_uniform(2, 2, 3)


def test_random_gaps_differ_between_streams_and_are_reproduced_by_the_seed() -> None:
    def dues(seed: int) -> list[int]:
        pace = LatencyModel(
            LatencyOptions(
                ttft=DurationDistribution(center_ns=MS),
                itl=DurationDistribution(kind="normal", center_ns=5 * MS, spread=MS),
                seed=seed,
            )
        )
        pace.submit(0, "a", 0, 30)
        pace.submit(0, "b", 0, 30)
        return [due for _, _, _, due in drain(pace)]

    assert dues(1) == dues(1) != dues(2)
    assert len(set(dues(1))) > 55


@pytest.mark.parametrize(
    "wrong",
    [{"tokens_per_emission": 0}, {"slots": 0}, {"lockstep": True, "itl": DurationDistribution()}],
)
def test_contradicting_latency_options_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UserError):
        LatencyModel(LatencyOptions(**{**FIXED, **wrong}))
