"""The estimated saturation rate of a simulated machine against capacities from searches."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from loadgen.core.execution.plan import Settings
from loadgen.core.workload import loading
from loadgen.core.workload.flags import read_flags
from loadgen.sim import roofline

VM = "sim:gb300-vm"


def filling(profile: str, url: str = VM, **flags: str) -> float:
    workload = loading.load(
        profile, read_flags(request_rate="1", duration="60s", warmup="0", **flags)
    )
    rate = roofline.estimate_saturation_rate(workload, Settings(url=url))
    assert rate is not None
    return rate


@pytest.mark.parametrize(
    ("profile", "url", "expected_rate"),
    [
        ("qa", VM, 114.2),
        ("rag", VM, 33.9),
        ("summarization", VM, 40.3),
        ("agentic", VM, 12.8),
        ("mixed", VM, 37.6),
        ("noisy-neighbour", VM, 38.7),
        ("rag-pipeline", VM, 8.0),
        ("coding-agent", f"{VM}-128k", 0.89),
        ("research-agent", f"{VM}-128k", 0.76),
    ],
)
def test_the_saturation_rate_is_near_the_capacity_of_searches(
    profile: str, url: str, expected_rate: float
) -> None:
    """Half of all runs of ten minutes pass there: search PROFILE --url sim:gb300-vm, 2026-11-27."""
    assert 0.85 * expected_rate < filling(profile, url) < 1.12 * expected_rate


def test_longer_task_limits_raise_the_saturation_rate() -> None:
    """As many answers are written side by side as leave each task its time."""
    workload = loading.load(
        "coding-agent", read_flags(request_rate="1", duration="60s", warmup="0")
    )
    slo = workload.slo

    assert slo is not None and slo.task is not None

    rates = []
    for within_s in (20, 90, 180, 360):
        task = replace(slo.task, within_ns=within_s * 10**9)
        changed_workload = workload.model_copy(update={"slo": replace(slo, task=task)})
        rates.append(
            roofline.estimate_saturation_rate(changed_workload, Settings(url=f"{VM}-128k")) or 0.0
        )

    assert rates == sorted(rates) and rates[3] > 1.5 * rates[2] > 3 * rates[1]
    assert rates[0] == 0, "nine of ten tasks do not end in 20 s even on an idle machine"


def test_the_saturation_rate_grows_with_machines_and_the_tpot_limit() -> None:
    assert filling("qa", "sim:gb300-rack") == pytest.approx(18 * filling("qa"), rel=0.01)
    assert filling("rag", slo=("tpot:30ms",)) < 0.75 * filling("rag", slo=("tpot:60ms",))  # type: ignore[arg-type]


def test_cached_tokens_of_earlier_turns_are_not_recomputed() -> None:
    """Turns meet four machines by chance: some find their conversation there."""
    workload = loading.load("agentic", read_flags(request_rate="1", duration="60s", warmup="0"))
    work = roofline._average_session_work(roofline._sample_work(workload, Settings(url=VM)))
    assert work is not None
    prompt_tokens = sum(
        750 * turn + 250 * (turn - 1) + 750 for turn in range(1, 5)
    )  # see workloads/agentic.yaml
    assert 0.5 * prompt_tokens < work.computed_tokens < 0.9 * prompt_tokens
    assert work.generated_tokens == 1000


def test_the_saturation_rate_of_embeddings_counts_only_prompts() -> None:
    workload = loading.load("qa", read_flags(request_rate="1", duration="60s", warmup="0"))
    rate = roofline.estimate_saturation_rate(workload, Settings(url=VM, api="embeddings"))
    assert rate is not None and rate > 3 * filling("qa")
