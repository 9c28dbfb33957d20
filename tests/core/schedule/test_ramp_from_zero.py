"""A ramp may start or end at a rate of zero."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from loadgen.core.errors import CombinedError
from loadgen.core.schedule.build import build_schedule
from loadgen.core.units import NS_PER_S
from loadgen.core.workload import Poisson, Workload, load, read_flags
from loadgen.core.workload.flags import Overrides


def load_ramp(tmp_path: Path, ramp: str, overrides: Overrides | None = None) -> Workload:
    file = tmp_path / "ramp.yaml"
    file.write_text(
        "name: ramp\nrequests: {input_tokens: 16, output_tokens: 4}\n"
        f"stages: [{{arrival: {{ramp: {ramp}}}, duration: 100s}}]\n",
        "utf-8",
    )
    return load(str(file), overrides or Overrides())


@pytest.mark.parametrize("zero", ["0/s", "0", "0.0/min"])
def test_a_ramp_from_zero_sends_a_quarter_in_its_first_half(tmp_path: Path, zero: str) -> None:
    workload = load_ramp(tmp_path, f"{{from: {zero}, to: 100/s}}")
    due_ns = build_schedule(workload, 1).stages[0].arrivals_ns
    assert len(due_ns) == pytest.approx(5_000, rel=0.1)
    assert np.mean(due_ns < 50 * NS_PER_S) == pytest.approx(0.25, abs=0.03)


def test_a_ramp_to_zero_sends_three_quarters_in_its_first_half(tmp_path: Path) -> None:
    due_ns = build_schedule(load_ramp(tmp_path, "{from: 100/s, to: 0/s}"), 1).stages[0].arrivals_ns
    assert np.mean(due_ns < 50 * NS_PER_S) == pytest.approx(0.75, abs=0.03)


def test_a_ramp_from_zero_to_zero_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CombinedError) as exc_info:
        load_ramp(tmp_path, "{from: 0/s, to: 0/s}")
    assert [fault.code for fault in exc_info.value.errors] == ["out_of_range"]


def test_a_rate_of_zero_outside_of_a_ramp_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CombinedError) as exc_info:
        load_ramp(tmp_path, "{from: 0/s, to: 1/s}", read_flags(request_rate="0/s"))
    assert [fault.code for fault in exc_info.value.errors] == ["out_of_range"]


def test_the_warm_up_before_a_ramp_from_zero_has_its_mean_rate(tmp_path: Path) -> None:
    workload = load_ramp(tmp_path, "{from: 0/s, to: 20/s}", read_flags(warmup="5s"))
    assert workload.stages[0].arrival == Poisson(rate=10)
