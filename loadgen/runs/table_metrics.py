"""The figures of a run for tables and plots of several: a curve over loads, the lines of a command's progress."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loadgen.core.metrics.token_usage import per_gpu

if TYPE_CHECKING:
    from loadgen.core.metrics.summary import Summary

FIGURES = (
    "simulated",
    "offered_rps",
    "steady_completed_rps",
    "goodput_rps",
    "output_tokens_per_s",
    "output_tokens_per_s_per_gpu",
    "tokens_per_s_per_user",
    "ttft_p50_ms",
    "ttft_p99_ms",
    "tpot_p50_ms",
    "tpot_p99_ms",
)


def figures(summary: Summary) -> dict[str, float | None]:
    """The figures of a run for tables and plots, by the names in FIGURES; None where a figure is not known."""
    tokens = summary.tokens.steady_output_per_s
    p50 = summary.tpot_ms.p50
    values = (
        float(summary.target.simulated),
        summary.load.offered_rps,
        summary.load.steady_completed_rps,
        summary.goodput.steady_rps,
        tokens,
        per_gpu(tokens, summary.target.gpus),
        1000 / p50 if p50 else None,
        summary.ttft_ms.p50,
        summary.ttft_ms.p99,
        p50,
        summary.tpot_ms.p99,
    )
    return dict(zip(FIGURES, values, strict=True))
