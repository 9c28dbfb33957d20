"""Figures of a summary by their path (`ttft_ms.p99`, `tokens.output_per_s`): their names, units, and which way is
better.

Pure. The paths are those of `summary.json`. One more path, `ok_share`, is not in it: ok requests / all
but cancelled and unfinished.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

from loadgen.core.stats.quantiles import QUANTILES
from loadgen.figures import FIGURES

if TYPE_CHECKING:
    from loadgen.core.metrics.summary import Summary


class Metric(Struct, frozen=True):
    """A figure that can be compared.

    `better`: -1 lower is better, +1 higher is better, 0 neither. `per_request`: the figure of `loadgen.figures`, with
    `p` its quantile (None: the mean); "" where it is no latency of single requests.
    """

    path: str
    name: str
    unit: str
    better: int
    per_request: str = ""
    p: float | None = None


SHARE_PATHS = (
    "ok_share",
    "goodput.share",
    "sessions.goodput.share",
    "tokens.cached_share",
    "tokens.length_mismatch_share",
)


_SHOWN = (
    "tokens.steady_output_per_s",
    "ok_share",
    "goodput.share",
    "sessions.duration_ms.p50",
    "sessions.longest_wait_ms.p50",
    "sessions.goodput.share",
)


def default_metric_paths() -> tuple[str, ...]:
    """The metrics compared by default, between sides and between repeats, each where all have it."""
    return (
        *(f"{row.path}.{quantile}" for row in FIGURES.here() for quantile in row.compared),
        *_SHOWN,
    )


_QUANTILES = dict(QUANTILES)
_STATS = (*_QUANTILES, "mean", "min", "max")


def find_metric(path: str) -> Metric | None:
    """The metric of a path of `summary.json` (`ttft_ms.p99`, `tokens.output_per_s`), or of `ok_share`.

    None when there is no such figure.
    """
    first, _, _ = path.partition(".")
    where, _, stat = path.rpartition(".")
    if (row := next((row for row in FIGURES.here() if row.path == where), None)) is not None:
        if stat not in _STATS:
            return None
        name = f"{row.words} {stat.replace('_', '.')}"
        exact = row.name if row.values and (stat in _QUANTILES or stat == "mean") else ""
        return Metric(path, name, row.unit, row.better, exact, _QUANTILES.get(stat))
    if path == "ok_share":
        return Metric(path, "requests ok", "", 1)
    if first == "sessions":
        return _of_tasks(path)
    if path not in _paths():
        return None
    name = {
        "tokens.steady_output_per_s": "steady output tokens",
        "tokens.output_per_s": "output tokens, measurement window",
        "load.completed_rps": "requests, measurement window",
        "load.steady_completed_rps": "completed requests",
        "goodput.steady_rps": "goodput",
        "goodput.share": "SLO attainment",
    }.get(path, path)
    better = 1 if first == "goodput" or path.endswith(("_per_s", "completed_rps")) else 0
    if path in (
        "requests.failed",
        "requests.lost",
        "requests.dropped",
        "stalls.share",
        "stalls.requests",
    ):
        better = -1
    return Metric(path, name, "/s" if path.endswith(("_per_s", "rps")) else "", better)


_TASK_TIMES = {
    "duration_ms": "task time",
    "wait_ms": "task waits",
    "longest_wait_ms": "longest wait of a task",
}
_TASK_FIGURES = {
    "sessions.steady_ok_per_s": ("tasks", "/s", 1),
    "sessions.ok_per_s": ("tasks, measurement window", "/s", 1),
    "sessions.goodput.share": ("tasks within the SLO", "", 1),
    "sessions.goodput.steady_rps": ("tasks within the SLO", "/s", 1),
    "sessions.goodput.rps": ("tasks within the SLO, measurement window", "/s", 1),
    "sessions.requests": ("requests of a task", "", 0),
    "sessions.input_tokens": ("prompt tokens of a task", "", 0),
    "sessions.cached_tokens": ("cached tokens of a task", "", 1),
    "sessions.output_tokens": ("output tokens of a task", "", 0),
}


def _of_tasks(path: str) -> Metric | None:
    """The metric of a path below `sessions`."""
    if path in _TASK_FIGURES:
        return Metric(path, *_TASK_FIGURES[path])
    _, _, rest = path.partition(".")
    time, _, last = rest.partition(".")
    if time not in _TASK_TIMES or last not in _STATS:
        return None
    return Metric(path, f"{_TASK_TIMES[time]} {last.replace('_', '.')}", "ms", -1)


def metric_paths() -> list[str]:
    """All paths that `metric` accepts."""
    latency_paths = [f"{row.path}.{stat}" for row in FIGURES.here() for stat in _STATS]
    task_paths = [f"sessions.{name}.{stat}" for name in _TASK_TIMES for stat in _STATS] + list(
        _TASK_FIGURES
    )
    return [
        path
        for path in [*latency_paths, "ok_share", *sorted(_paths()), *task_paths]
        if find_metric(path) is not None
    ]


def _paths() -> set[str]:
    from loadgen.core.metrics.blocks import ClientUse, RequestCounts, Stalls, Tokens
    from loadgen.core.metrics.goodput import Goodput
    from loadgen.core.metrics.load import Load

    struct_types = (
        ("tokens", Tokens),
        ("load", Load),
        ("goodput", Goodput),
        ("requests", RequestCounts),
        ("client", ClientUse),
    )
    not_numbers = ("sources", "by_error", "by_finish", "arrival", "slo", "met")
    block_paths = {
        f"{name}.{field}"
        for name, block in struct_types
        for field in block.__struct_fields__
        if field not in not_numbers
    }
    return block_paths | {f"stalls.{field}" for field in Stalls.__struct_fields__}


def metric_value(summary: Summary, path: str) -> float | None:
    """The number at a path of a summary; None where the summary has none."""
    if path == "ok_share":
        counted = summary.requests.decided
        return summary.requests.ok / counted if counted else None
    value: object = summary
    for part in path.split("."):
        value = value.get(part) if isinstance(value, dict) else getattr(value, part, None)
    return float(value) if isinstance(value, int | float) else None
