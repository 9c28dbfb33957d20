"""Load checks: each is tried on a load that matches its workload and on one that does not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import run_fixtures
from queueing import rows

from loadgen.core import seeds
from loadgen.core.metrics.sections import StimulusCheck
from loadgen.core.results.manifest import ClassPlan, StagePlan
from loadgen.core.run_summary import summarize
from loadgen.runs import load_fidelity as fidelity_text

S = 1_000_000_000


def checked(found: Any, **changed: object) -> dict[str, StimulusCheck]:
    return {
        check.code: check
        for check in summarize(run_fixtures.manifest("r", len(found), **changed), found).stimulus
    }


def test_a_correct_poisson_load_passes_for_any_seed() -> None:
    """A check of a sound run may fail once in a thousand times."""
    wrong = sum(
        check.ok is False for seed in range(40) for check in checked(rows(seed, 600, 10.0)).values()
    )
    assert wrong <= 1
    found = checked(rows(1, 600, 10.0))
    assert {"arrivals", "spacing", "rate", "prompts", "repeats", "cache"} <= found.keys()
    assert found["arrivals"].n == 599 and found["rate"].requested == 10.0
    told = fidelity_text.describe_checks(tuple(found.values()))
    assert len(told) == 1 and told[0].startswith("arrival process, inter-arrival CV")


def _even(found: Any) -> None:
    found["sent_ns"] = found["due_ns"] = np.linspace(0, 60 * S, len(found)).astype(np.int64)


def _bursts(found: Any) -> None:
    found["sent_ns"] = found["due_ns"] = np.sort(found["due_ns"] // (2 * S) * (2 * S))


def _late(found: Any) -> None:
    found["sent_ns"] += np.arange(len(found)) % 20 * (S // 20)


def _cached(found: Any) -> None:
    found["cached_tokens"] = 100


def _prompts(found: Any) -> None:
    found["input_tokens"] = 170


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (_even, "arrivals"),
        (_bursts, "arrivals"),
        (_late, "spacing"),
        (_cached, "cache"),
        (_prompts, "prompts"),
    ],
)
def test_a_load_that_differs_from_its_workload_is_reported(change: Any, code: str) -> None:
    records = rows(1, 600, 10.0)
    change(records)
    told = checked(records, template_tokens=0)
    assert told[code].ok is False
    assert any(
        text.startswith("DIFFERS") for text in fidelity_text.describe_checks(tuple(told.values()))
    )


def test_a_rate_that_was_not_reached_is_reported() -> None:
    stages = (StagePlan(name="load", arrival="poisson 15/s", slots=600, rate=15.0),)
    told = checked(rows(1, 600, 10.0), stages=stages)
    assert (told["rate"].ok, told["arrivals"].ok) == (False, False)
    assert fidelity_text.rows(told.values())[2][1:] == (
        "15.0/s",
        f"{told['rate'].seen:.1f}/s",
        "DIFFERS",
    )


def test_idle_virtual_users_are_reported() -> None:
    for lanes, ok in ((5, True), (500, False)):
        stages = (
            StagePlan(name="load", arrival=f"{lanes} in flight", closed=True, concurrency=lanes),
        )
        told = checked(rows(1, 600, 10.0), stages=stages)
        assert told["lanes"].ok is ok and "arrivals" not in told


def test_declared_prompt_reuse_is_no_error_and_an_unreported_cache_is_unknown() -> None:
    records = rows(1, 600, 10.0)
    _cached(records)
    told = checked(records, shares_prompts=True)
    assert told["cache"].ok is None and "repeats" not in told
    records["cached_tokens"] = -1
    assert checked(records)["cache"] == StimulusCheck(
        code="cache", requested=0.0, seen=None, ok=None, n=600
    )


def _short(found: Any) -> None:
    found["asked_output"], found["output_tokens"] = 200, 150
    found["output_events"] = 150


def _again(found: Any) -> None:
    found["request"] = np.arange(len(found)) % 100


@pytest.mark.parametrize(("change", "code"), [(_short, "outputs"), (_again, "repeats")])
def test_shorter_responses_and_repeated_prompts_are_reported(change: Any, code: str) -> None:
    sound = rows(1, 600, 10.0)
    sound["asked_output"], sound["request"] = 200, np.arange(600)
    assert checked(sound)[code].ok is True
    change(sound)
    told = checked(sound)
    assert told[code].ok is False
    assert any(
        text.startswith("DIFFERS") for text in fidelity_text.describe_checks(tuple(told.values()))
    )


@pytest.mark.parametrize(("cached", "ok"), [(75, True), (45, False), (-1, None)])
def test_a_requested_cache_hit_rate_is_checked(cached: int, ok: bool | None) -> None:
    """Half of 150 prompt tokens should be cached. A server may also not report cached tokens."""
    records = rows(1, 600, 10.0)
    records["cached_tokens"] = cached
    told = checked(records, requested_cache_share=0.5, shares_prompts=True)["cache"]
    assert (told.requested, told.ok) == (0.5, ok)
    assert fidelity_text.rows([told])[0][1] == "50.0 %"


def test_a_mix_with_too_few_requests_of_a_class_is_reported() -> None:
    classes = (ClassPlan(name="chat", share=0.7), ClassPlan(name="batch", share=0.3))
    records = rows(1, 600, 10.0)
    records["request"] = np.arange(600)
    drawn = seeds.draw_classes(7, [0.7, 0.3], records["request"])
    told = checked(records[(drawn == 0) | (np.arange(600) % 4 == 0)], classes=classes)["classes"]
    assert (
        told.ok is False and told.seen is not None and abs(told.seen - (told.requested or 0)) > 0.1
    )


def test_a_planned_mix_of_classes_passes() -> None:
    classes = (ClassPlan(name="chat", share=0.7), ClassPlan(name="batch", share=0.3))
    records = rows(1, 600, 10.0)
    told = checked(records, classes=classes)
    assert (
        told["classes"].ok and told["classes"].n == 600 and told["classes"].requested in (0.7, 0.3)
    )
