"""The metrics of a run for tables and plots of several runs, and for progress lines. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loadgen.core.metrics.interactivity import compute_interactivity
from loadgen.core.metrics.token_usage import per_gpu

if TYPE_CHECKING:
    from loadgen.core.metrics.summary import Summary

TABLE_METRICS = (
    "simulated",
    "offered_rps",
    "steady_completed_rps",
    "goodput_rps",
    "output_tokens_per_s",
    "output_tokens_per_s_per_gpu",
    "tokens_per_s_per_user",
    "tokens_per_s_per_user_endpoints",
    "tokens_per_s_per_user_agentx",
    "ttft_p50_ms",
    "ttft_p99_ms",
    "tpot_p50_ms",
    "tpot_p99_ms",
    "answers_checked",
    "answers_right",
    "answers_right_low",
    "answers_right_high",
)
"""The names of the metrics. They are columns of `curve.csv` and keys of `probes.jsonl`."""


def table_metrics(summary: Summary) -> dict[str, float | None]:
    """Return the metrics of a run by the names of TABLE_METRICS. A value is None if not known."""
    interactivity = compute_interactivity(summary)
    score = None if summary.answers is None else summary.answers.overall
    output_per_s = summary.tokens.steady_output_per_s
    return {
        "simulated": float(summary.target.simulated),
        "offered_rps": summary.load.offered_rps,
        "steady_completed_rps": summary.load.steady_completed_rps,
        "goodput_rps": summary.goodput.steady_rps,
        "output_tokens_per_s": output_per_s,
        "output_tokens_per_s_per_gpu": per_gpu(output_per_s, summary.target.gpus),
        "tokens_per_s_per_user": interactivity.tpot50,
        "tokens_per_s_per_user_endpoints": interactivity.endpoints,
        "tokens_per_s_per_user_agentx": interactivity.agentx,
        "ttft_p50_ms": summary.ttft_ms.p50,
        "ttft_p99_ms": summary.ttft_ms.p99,
        "tpot_p50_ms": summary.tpot_ms.p50,
        "tpot_p99_ms": summary.tpot_ms.p99,
        "answers_checked": None if score is None else float(score.checked),
        "answers_right": None if score is None else score.score,
        "answers_right_low": None if score is None else score.low,
        "answers_right_high": None if score is None else score.high,
    }
