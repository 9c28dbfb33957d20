"""Numbers of a summary by their path (`ttft_ms.p99`, `tokens.output_per_s`): what each is called, which way is better.

Pure. Paths are those of `summary.json`; `ok_share`, which is not in it, is requests ok of those that were to be sent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from loadgen.metrics import columns
from loadgen.stats.quantiles import QUANTILES

if TYPE_CHECKING:
    from loadgen.metrics.summary import Summary

NAMES = {"ttft": "TTFT", "tpot": "TPOT", "tpot_mlperf": "TPOT (MLPerf)", "e2e": "E2E", "itl": "ITL"}
NAMES |= {"ttft_from_sent": "TTFT from sent", "first_answer": "First answer", "inter_chunk": "Gap between events"}
NAMES |= {"max_gap": "Largest gap"}


class Metric(NamedTuple):
    """Something to compare. `better`: -1 lower is, +1 higher is, 0 neither. `per_request`: its name in
    `metrics.MEASURES`, with `p` its quantile (None: the mean); "" where it is no latency."""

    path: str
    name: str
    unit: str
    better: int
    per_request: str = ""
    p: float | None = None


SHARES = ("ok_share", "goodput.share", "tokens.cached_share", "tokens.length_mismatch_share")


def metric(path: str) -> Metric | None:
    """The metric of a path as in `summary.json` (`ttft_ms.p99`, `tokens.output_per_s`), also `ok_share`; None if there
    is no such number."""
    first, _, last = path.partition(".")
    measure = first.removesuffix("_ms")
    if first.endswith("_ms") and measure in (*columns.TERMS, "connect", "send_lag", "client_lag", "stamp_error"):
        ps = dict(QUANTILES)
        if last not in ps and last not in ("mean", "min", "max"):
            return None
        name = f"{NAMES.get(measure, measure.replace('_', ' '))} {last.replace('_', '.')}"
        exact = measure if measure in columns.MEASURES and (last in ps or last == "mean") else ""
        return Metric(path, name, "ms", -1, exact, ps.get(last))
    if path == "ok_share":
        return Metric(path, "requests ok", "", 1)
    if path not in _paths():
        return None
    name = {
        "tokens.steady_output_per_s": "output tokens",
        "tokens.output_per_s": "output tokens, whole window",
        "load.completed_rps": "requests",
        "goodput.share": "within the SLO",
    }.get(path, path)
    better = 1 if first == "goodput" or path.endswith(("_per_s", "completed_rps")) else 0
    if path in ("requests.failed", "requests.lost", "requests.dropped", "stalls.share", "stalls.requests"):
        better = -1
    return Metric(path, name, "/s" if path.endswith(("_per_s", "rps")) else "", better)


def paths() -> list[str]:
    """Every path that `metric` knows."""
    from loadgen.metrics.summary import Summary

    latencies = [name for name in Summary.__struct_fields__ if name.endswith("_ms")]
    stats = [name for name, _ in QUANTILES] + ["mean", "min", "max"]
    found = [f"{name}.{stat}" for name in latencies for stat in stats]
    return [path for path in [*found, "ok_share", *sorted(_paths())] if metric(path) is not None]


def _paths() -> set[str]:
    from loadgen.metrics.blocks import ClientUse, RequestCounts, Stalls, Tokens
    from loadgen.metrics.columns import Goodput, Load

    kinds = (
        ("tokens", Tokens),
        ("load", Load),
        ("goodput", Goodput),
        ("requests", RequestCounts),
        ("client", ClientUse),
    )
    text = ("sources", "by_error", "arrival", "slo", "met")
    found = {f"{name}.{field}" for name, kind in kinds for field in kind.__struct_fields__ if field not in text}
    return found | {f"stalls.{field}" for field in Stalls.__struct_fields__}


def figure(summary: Summary, path: str) -> float | None:
    """The number at a path of a summary; None where it has none."""
    if path == "ok_share":
        counted = summary.requests.scheduled - summary.requests.cancelled
        return summary.requests.ok / counted if counted else None
    value: object = summary
    for part in path.split("."):
        value = getattr(value, part, None)
    return float(value) if isinstance(value, int | float) else None
