"""Within-run intervals by batch means, checked against closed forms."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from make_examples import blank

from loadgen.compare import block_errors
from loadgen.core.analysis import within_run_variance
from loadgen.core.execution.plan import Settings
from loadgen.core.execution.run import execute
from loadgen.core.metrics.columns import Columns
from loadgen.core.metrics.summary import Summary
from loadgen.core.stats.students_t import t_quantile
from loadgen.core.workload import load
from loadgen.runs import text
from loadgen.runs.within_run_variance import COVERAGE

N, PHI = 4000, 0.9
MEDIAN_NS = 50_000_000


def correlated(seed: int) -> Columns:
    """Return requests with TTFT exp(x), where x is an AR(1) process with variance 1/4."""
    rng = np.random.default_rng(seed)
    steps = rng.normal(0, 0.5 * math.sqrt(1 - PHI**2), N)
    x = np.empty(N)
    x[0] = rng.normal(0, 0.5)
    for n in range(1, N):
        x[n] = PHI * x[n - 1] + steps[n]
    rows = blank(N)
    rows["due_ns"] = np.arange(N) * 10_000_000
    rows["first_token_ns"] = rows["due_ns"] + (MEDIAN_NS * np.exp(x)).astype(np.int64)
    order = rng.permutation(N)  # the blocks are of time, whatever the order of the rows
    return Columns(rows[order])


@pytest.mark.parametrize(("p", "z"), [(0.5, 0.0), (0.9, 1.2816)])
def test_within_run_intervals_cover_the_true_quantile(p: float, z: float) -> None:
    """200 runs at 95 % may show 90.5 % (p = 0.003). Independence would give about 60 %."""
    truth, hits = MEDIAN_NS * math.exp(z * 0.5), 0
    for seed in range(200):
        values = block_errors.select_samples(correlated(seed), "ttft").astype(float)
        ordered = np.sort(values)
        error = max(
            within_run_variance.estimate_log_percentile_error(values, ordered, p, blocks)
            for blocks in within_run_variance.BLOCK_COUNTS
        )
        freedom = max(
            min(
                within_run_variance.BLOCK_COUNTS[1],
                within_run_variance.count_blocks_above(values, ordered, p),
            )
            - 1.0,
            1.0,
        )
        value = float(np.sort(values)[int(N * p)])
        interval = within_run_variance.ScaledEstimate(math.log(value), error, freedom).interval(
            math.exp
        )
        hits += interval.low <= truth <= interval.high

    assert hits >= 181


def test_the_interval_of_a_rate_equals_one_computed_by_hand() -> None:
    """The standard error of 20 values that alternate between 9 and 11 is sqrt(20/19) / sqrt(20)."""
    known_scaled_estimate = within_run_variance.estimate_log_rate([9.0, 11.0] * 10, 10.0)
    assert known_scaled_estimate is not None
    half = t_quantile(0.975, 19) * math.sqrt(20 / 19) / math.sqrt(20) / 10
    interval = known_scaled_estimate.interval(math.exp)
    assert (interval.value, interval.low, interval.high) == pytest.approx(
        (10, 10 * math.exp(-half), 10 * math.exp(half))
    )
    assert within_run_variance.estimate_log_rate([0.0] * 20, 1.0) is None


def test_a_fraction_of_one_has_a_standard_error_above_zero() -> None:
    """Of 100, two more of either kind: p = 102/104."""
    known_scaled_estimate = within_run_variance.estimate_fraction([np.ones(100)], 1.0)
    assert known_scaled_estimate is not None and known_scaled_estimate.error == pytest.approx(
        math.sqrt(102 / 104 * 2 / 104 / 104)
    )
    assert within_run_variance.estimate_fraction([np.ones(79)], 1.0) is None


def ran(folder: Path, output_tokens: int, length: str = "60s") -> Summary:
    """Twenty requests a second, in virtual time."""
    folder.mkdir()
    prompt_tokens = "{uniform: {min: 50, max: 900}}"
    (folder / "w.yaml").write_text(
        f"name: w\n"
        f"requests: {{input_tokens: {prompt_tokens}, output_tokens: {output_tokens}}}\n"
        f"stages: [{{arrival: {{poisson: 20/s}}, duration: {length}}}]\n"
        f"slo: {{ttft: 1s}}\n"
        f"seed: 1\n"
    )
    return execute(load(str(folder / "w.yaml")), Settings(url="sim:gb300-vm", out=folder / "out"))[
        0
    ]


def test_text_and_json_have_the_same_intervals_and_a_short_run_has_none(tmp_path: Path) -> None:
    long = ran(tmp_path / "long", 10)

    assert set(long.within) >= {
        "ttft_ms.p50",
        "e2e_ms.p50",
        "tokens.steady_output_per_s",
        "goodput.share",
    }
    for path, interval in long.within.items():
        assert interval.low <= interval.value <= interval.high and interval.level == 0.95, path
    assert long.within["ttft_ms.p50"].value == pytest.approx(long.ttft_ms.p50)
    rendered_text = " ".join(text.render(long).split())
    assert "Confidence intervals" in rendered_text and " ".join(COVERAGE.split()) in rendered_text
    value, low, high = (f"{value:.1f}" for value in long.within["ttft_ms.p50"])
    assert f"TTFT p50, ms {value} {low} {high}" in rendered_text
    for short in (ran(tmp_path / "in-time", 1000), ran(tmp_path / "in-requests", 10, "3s")):
        assert short.within == {} and "Confidence intervals" not in text.render(short)
