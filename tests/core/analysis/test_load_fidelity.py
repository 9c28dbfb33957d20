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


def checked(records: Any, **changes: object) -> dict[str, StimulusCheck]:
    return {
        check.code: check
        for check in summarize(
            run_fixtures.manifest("r", len(records), **changes), records
        ).stimulus
    }


def test_a_correct_poisson_load_passes_for_any_seed() -> None:
    """A check of a sound run may fail once in a thousand times."""
    wrong = sum(
        check.ok is False for seed in range(40) for check in checked(rows(seed, 600, 10.0)).values()
    )

    assert wrong <= 1
    checks = checked(rows(1, 600, 10.0))
    assert {"arrivals", "spacing", "rate", "prompts", "repeats", "cache"} <= checks.keys()
    assert checks["arrivals"].n == 599 and checks["rate"].requested == 10.0
    texts = fidelity_text.describe_checks(tuple(checks.values()))
    assert len(texts) == 1 and texts[0].startswith("arrival process, inter-arrival CV")


def _even(records: Any) -> None:
    records["sent_ns"] = records["due_ns"] = np.linspace(0, 60 * S, len(records)).astype(np.int64)


def _bursts(records: Any) -> None:
    records["sent_ns"] = records["due_ns"] = np.sort(records["due_ns"] // (2 * S) * (2 * S))


def _late(records: Any) -> None:
    records["sent_ns"] += np.arange(len(records)) % 20 * (S // 20)


def _cached(records: Any) -> None:
    records["cached_tokens"] = 100


def _prompts(records: Any) -> None:
    records["input_tokens"] = 170


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
    checks = checked(records, template_tokens=0)
    assert checks[code].ok is False
    assert any(
        text.startswith("DIFFERS") for text in fidelity_text.describe_checks(tuple(checks.values()))
    )


def test_a_rate_that_was_not_reached_is_reported() -> None:
    stages = (StagePlan(name="load", arrival="poisson 15/s", slots=600, rate=15.0),)
    checks = checked(rows(1, 600, 10.0), stages=stages)
    assert (checks["rate"].ok, checks["arrivals"].ok) == (False, False)
    assert fidelity_text.rows(checks.values())[2][1:] == (
        "15.0/s",
        f"{checks['rate'].delivered:.1f}/s",
        "DIFFERS",
    )


def test_idle_virtual_users_are_reported() -> None:
    for concurrency, ok in ((5, True), (500, False)):
        stages = (
            StagePlan(
                name="load",
                arrival=f"{concurrency} in flight",
                closed=True,
                concurrency=concurrency,
            ),
        )
        checks = checked(rows(1, 600, 10.0), stages=stages)
        assert checks["lanes"].ok is ok and "arrivals" not in checks


def test_declared_prompt_reuse_is_no_error_and_an_unreported_cache_is_unknown() -> None:
    records = rows(1, 600, 10.0)
    _cached(records)
    checks = checked(records, shares_prompts=True)
    assert checks["cache"].ok is None and "repeats" not in checks
    records["cached_tokens"] = -1
    assert checked(records)["cache"] == StimulusCheck(
        code="cache", requested=0.0, delivered=None, ok=None, n=600
    )


def _short(records: Any) -> None:
    records["asked_output"], records["output_tokens"] = 200, 150
    records["output_events"] = 150


def _repeat_prompts(records: Any) -> None:
    records["request"] = np.arange(len(records)) % 100


@pytest.mark.parametrize(("change", "code"), [(_short, "outputs"), (_repeat_prompts, "repeats")])
def test_shorter_responses_and_repeated_prompts_are_reported(change: Any, code: str) -> None:
    sound = rows(1, 600, 10.0)
    sound["asked_output"], sound["request"] = 200, np.arange(600)

    assert checked(sound)[code].ok is True

    change(sound)
    checks = checked(sound)
    assert checks[code].ok is False
    assert any(
        text.startswith("DIFFERS") for text in fidelity_text.describe_checks(tuple(checks.values()))
    )


@pytest.mark.parametrize(("cached", "ok"), [(75, True), (45, False), (-1, None)])
def test_a_requested_cache_hit_rate_is_checked(cached: int, ok: bool | None) -> None:
    """Half of 150 prompt tokens should be cached. A server may also not report cached tokens."""
    records = rows(1, 600, 10.0)
    records["cached_tokens"] = cached
    check = checked(records, requested_cache_share=0.5, shares_prompts=True)["cache"]
    assert (check.requested, check.ok) == (0.5, ok)
    assert fidelity_text.rows([check])[0][1] == "50.0 %"


def test_a_mix_with_too_few_requests_of_a_class_is_reported() -> None:
    classes = (ClassPlan(name="chat", share=0.7), ClassPlan(name="batch", share=0.3))
    records = rows(1, 600, 10.0)
    records["request"] = np.arange(600)
    class_indexes = seeds.draw_classes(7, [0.7, 0.3], records["request"])
    check = checked(records[(class_indexes == 0) | (np.arange(600) % 4 == 0)], classes=classes)[
        "classes"
    ]

    assert (
        check.ok is False
        and check.delivered is not None
        and abs(check.delivered - (check.requested or 0)) > 0.1
    )


def test_a_planned_mix_of_classes_passes() -> None:
    classes = (ClassPlan(name="chat", share=0.7), ClassPlan(name="batch", share=0.3))
    records = rows(1, 600, 10.0)
    checks = checked(records, classes=classes)
    assert (
        checks["classes"].ok
        and checks["classes"].n == 600
        and checks["classes"].requested in (0.7, 0.3)
    )
