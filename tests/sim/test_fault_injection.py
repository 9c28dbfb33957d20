"""Failure plans are parsed from text and drawn by seed and request number."""

from __future__ import annotations

from collections import Counter

import pytest

from loadgen.core.errors import CombinedError, UserError
from loadgen.sim.server.fault_injection import (
    COUNT_FAILURES,
    DURATION_FAILURES,
    FAILURE_EFFECTS,
    TOKEN_FAILURES,
    FailureFraction,
    FailurePlan,
    InjectedFailure,
    parse_failure,
    parse_failure_fractions,
    parse_failure_plan,
)
from loadgen.sim.server.request_parser import change_one_word


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("truncate", InjectedFailure("truncate")),
        ("truncate@3", InjectedFailure("truncate", 3)),
        ("http_429", InjectedFailure("http_429", 1_000_000_000)),
        ("http_429@250ms", InjectedFailure("http_429", 250_000_000)),
        (" slow_first_byte @ 2s ", InjectedFailure("slow_first_byte", 2_000_000_000)),
        ("no_done", InjectedFailure("no_done")),
    ],
)
def test_an_injected_failure_is_parsed_into_name_and_argument(
    text: str, expected: InjectedFailure
) -> None:
    assert parse_failure(text) == expected


@pytest.mark.parametrize(
    "text", ["", "explode", "truncate@soon", "truncate@-1", "no_done@3", "http_429@often"]
)
def test_an_invalid_injected_failure_is_refused_with_a_hint(text: str) -> None:
    with pytest.raises(UserError) as exc_info:
        parse_failure(text, "X-Sim-Fault")
    assert exc_info.value.hint


def test_a_flag_and_a_mapping_give_the_same_failure_plan() -> None:
    flag = parse_failure_plan("truncate@3:0.05,http_429:0.1", seed=4)
    assert flag == parse_failure_fractions({"truncate@3": 0.05, "http_429": 0.1}, seed=4)
    assert parse_failure_plan("") == FailurePlan()
    assert parse_failure_plan("stall").fractions == (
        FailureFraction(InjectedFailure("stall"), 1.0),
    )


def test_all_errors_of_a_failure_plan_are_reported_together() -> None:
    with pytest.raises(CombinedError) as exc_info:
        parse_failure_plan("explode:0.1,truncate:2,stall:often")
    assert len(exc_info.value.errors) == 3
    with pytest.raises(CombinedError, match="--> --fault"):
        parse_failure_plan("truncate:0.6,stall:0.6")


def test_random_failures_have_their_fractions_and_are_deterministic() -> None:
    plan = parse_failure_plan("truncate:0.05,http_500:0.2", seed=9)
    injected_failures = [plan.draw_failure(number, 100) for number in range(8000)]
    counts = Counter(fault.name for fault in injected_failures if fault)

    assert counts["truncate"] == pytest.approx(400, rel=0.15)
    assert counts["http_500"] == pytest.approx(1600, rel=0.1)
    assert injected_failures[4000:] == [
        plan.draw_failure(number, 100) for number in range(4000, 8000)
    ]
    assert injected_failures != [
        parse_failure_plan("truncate:0.05,http_500:0.2", seed=10).draw_failure(number, 100)
        for number in range(8000)
    ]


@pytest.mark.parametrize("name", sorted(TOKEN_FAILURES))
def test_a_failure_is_injected_at_a_token_of_the_response(name: str) -> None:
    plan = parse_failure_plan(name, seed=1)
    tokens = {fault.argument for number in range(200) if (fault := plan.draw_failure(number, 7))}
    assert tokens == set(range(7))
    fixed = parse_failure_plan(f"{name}@90").draw_failure(0, 7)
    assert fixed is not None and fixed.argument == 6


def test_every_injected_failure_has_a_description() -> None:
    assert TOKEN_FAILURES | set(DURATION_FAILURES) | set(COUNT_FAILURES) <= set(FAILURE_EFFECTS)
    assert all(FAILURE_EFFECTS.values())


def test_responses_are_corrupted_only_above_a_number_of_requests_in_flight() -> None:
    corrupt = parse_failure("corrupt@256")
    assert corrupt == InjectedFailure("corrupt", 256)
    assert not corrupt.happens_at(256)
    assert corrupt.happens_at(257)
    assert parse_failure("corrupt") == InjectedFailure("corrupt", 0)
    assert parse_failure("truncate@3").happens_at(1)


def test_a_corrupted_text_differs_in_one_word_within_its_length() -> None:
    digest = bytes(range(64))
    for request_number in range(50):
        changed = change_one_word(digest, output_tokens=5, seed=1, request_number=request_number)
        positions = [
            position
            for position, (before, after) in enumerate(zip(digest, changed, strict=True))
            if before != after
        ]
        assert len(positions) == 1
        assert positions[0] < 5
