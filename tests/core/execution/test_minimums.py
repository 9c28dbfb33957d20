"""Minimum counts and durations of stages, and listed lengths, as MLPerf mode needs them."""

from __future__ import annotations

from pathlib import Path

import pytest
from expected_errors import refused

from loadgen.core.errors import CombinedError
from loadgen.core.requests import tokenizer
from loadgen.core.requests.build import build_prompts
from loadgen.core.schedule import arrivals
from loadgen.core.schedule.build import build_schedule
from loadgen.core.workload import Overrides, load, read_flags, recipe_fingerprint

TEXT = """
name: shape
requests: {input_tokens: {listed: [10, 20, 30]}, output_tokens: {listed: lengths.txt}}
stages:
  - {name: load, arrival: {poisson: 100/s}, at_least: {duration: 2s, count: 20, passes_of: 30}}
schedule_seed: 7
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "lengths.txt").write_text("# of answers\n5\n6\n7\n")
    path = tmp_path / "shape.yaml"
    path.write_text(TEXT)
    return path


def test_the_schedule_meets_both_minimums_in_complete_passes(file: Path) -> None:
    planned_scheduled_stage = build_schedule(load(str(file)), 1).stages[0]
    expected = arrivals.poisson_arrivals_at_least(
        100.0, seed=7, min_duration_ns=2 * 10**9, min_count=20, multiple_of=30
    )
    assert planned_scheduled_stage.arrivals_ns.tolist() == expected.offsets_ns.tolist()
    assert len(planned_scheduled_stage.arrivals_ns) % 30 == 0
    assert planned_scheduled_stage.arrivals_ns[-1] >= 2 * 10**9
    assert planned_scheduled_stage.length_ns == expected.end_ns


def test_listed_lengths_are_used_pairwise_in_order_and_repeated(file: Path) -> None:
    prompts = build_prompts(load(str(file)), 3, 4, tokenizer.load_tokenizer())

    assert [(prompts[i].input_tokens, prompts[i].max_tokens) for i in range(5)] == [
        (10, 5),
        (20, 6),
        (30, 7),
        (10, 5),
        (20, 6),
    ]
    assert prompts[0].prompt != prompts[3].prompt


def test_load_flags_replace_the_minimums_of_a_stage(file: Path) -> None:
    faster = load(str(file), read_flags(request_rate=200))
    assert faster.stages[0].at_least is not None
    bounded = load(str(file), read_flags(num_requests=5))
    assert (bounded.stages[0].count, bounded.stages[0].at_least) == (5, None)
    assert load(str(file), read_flags(concurrency=2, num_requests=5)).stages[0].at_least is None
    assert recipe_fingerprint(bounded, "server") != recipe_fingerprint(load(str(file)), "server")


@pytest.mark.parametrize(
    ("old", "new", "code"),
    [
        ("{poisson: 100/s}", "{constant: 100/s}", "unsupported"),
        ("at_least:", "count: 5, at_least:", "conflict"),
        ("passes_of: 30", "passes: 30", "unknown_key"),
        ("[10, 20, 30]", "[]", "missing_value"),
    ],
)
def test_invalid_minimums_are_refused(file: Path, old: str, new: str, code: str) -> None:
    file.write_text(TEXT.replace(old, new))
    with refused(CombinedError, code) as exc_info:
        load(str(file))
    assert "shape.yaml" in str(exc_info.value)


@pytest.mark.parametrize("flags", [read_flags(burstiness=2), read_flags(concurrency=4)])
def test_options_that_conflict_with_minimums_are_refused(file: Path, flags: Overrides) -> None:
    with pytest.raises(CombinedError):
        load(str(file), flags)
