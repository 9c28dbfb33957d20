"""The metrics of a run that can be compared, by their path in `summary.json`.

An example of a path is `ttft_ms.p99`.

One more path, `ok_share`, is not in `summary.json`: the share of ok requests among all that were
neither cancelled nor unfinished.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from msgspec import Struct

from loadgen.core.stats.quantiles import QUANTILES
from loadgen.figures import FIGURES

if TYPE_CHECKING:
    from loadgen.core.metrics.summary import Summary

OK_SHARE = "ok_share"
SHARE_PATHS = (
    OK_SHARE,
    "goodput.share",
    "sessions.goodput.share",
    "tokens.cached_share",
    "tokens.length_mismatch_share",
)
"""The paths of metrics that are shares, from 0 to 1."""

DEFAULT_PATHS = (
    "tokens.steady_output_per_s",
    OK_SHARE,
    "goodput.share",
    "sessions.duration_ms.p50",
    "sessions.longest_wait_ms.p50",
    "sessions.goodput.share",
)
"""The paths that are compared by default, beside those of latencies."""

NAMES = {
    "tokens.steady_output_per_s": "steady output tokens",
    "tokens.output_per_s": "output tokens, measurement window",
    "load.completed_rps": "requests, measurement window",
    "load.steady_completed_rps": "completed requests",
    "goodput.steady_rps": "goodput",
    "goodput.share": "SLO attainment",
}
"""The names of metrics that are not called by their path."""

LOWER_IS_BETTER_PATHS = (
    "requests.failed",
    "requests.lost",
    "requests.dropped",
    "stalls.share",
    "stalls.requests",
)

SESSION_TIMES = {
    "duration_ms": "task time",
    "wait_ms": "task waits",
    "longest_wait_ms": "longest wait of a task",
}
"""The times of sessions, each with quantiles, by their key below `sessions`."""


class SessionMetric(NamedTuple):
    """The name, the unit and the direction of a metric of sessions."""

    name: str
    unit: str
    better: int


SESSION_METRICS = {
    "sessions.steady_ok_per_s": SessionMetric("tasks", "/s", 1),
    "sessions.ok_per_s": SessionMetric("tasks, measurement window", "/s", 1),
    "sessions.goodput.share": SessionMetric("tasks within the SLO", "", 1),
    "sessions.goodput.steady_rps": SessionMetric("tasks within the SLO", "/s", 1),
    "sessions.goodput.rps": SessionMetric("tasks within the SLO, measurement window", "/s", 1),
    "sessions.requests": SessionMetric("requests of a task", "", 0),
    "sessions.input_tokens": SessionMetric("prompt tokens of a task", "", 0),
    "sessions.cached_tokens": SessionMetric("cached tokens of a task", "", 1),
    "sessions.output_tokens": SessionMetric("output tokens of a task", "", 0),
}
"""The metrics of sessions that have a single value, by their path."""

NOT_COMPARABLE_FIELDS = ("sources", "by_error", "by_finish", "arrival", "slo", "met")
"""The fields of the blocks of a summary that are not numbers."""

_QUANTILES = dict(QUANTILES)
_STATISTICS = (*_QUANTILES, "mean", "min", "max")


class Metric(Struct, frozen=True):
    """A metric that can be compared.

    Attributes:
        path: Its path in `summary.json`.
        name: Its name for readers.
        unit: Its unit.
        better: -1 if lower is better, +1 if higher is, 0 if neither.
        per_request: The name of the metric of single requests in `loadgen.figures` that it
            summarizes. Empty if it has no value for each request.
        p: The quantile of these values. None for their mean.
    """

    path: str
    name: str
    unit: str
    better: int
    per_request: str = ""
    p: float | None = None


def default_metric_paths() -> tuple[str, ...]:
    """Return the paths of the metrics that are compared by default, where all sides have them."""
    latency_paths = [
        f"{row.path}.{quantile}" for row in FIGURES.here() for quantile in row.compared
    ]
    return (*latency_paths, *DEFAULT_PATHS)


def metric_paths() -> list[str]:
    """Return all paths that `find_metric` knows."""
    latency_paths = [f"{row.path}.{name}" for row in FIGURES.here() for name in _STATISTICS]
    session_time_paths = [
        f"sessions.{time}.{name}" for time in SESSION_TIMES for name in _STATISTICS
    ]
    return [
        *(path for path in latency_paths if find_metric(path) is not None),
        OK_SHARE,
        *sorted(_block_paths()),
        *session_time_paths,
        *SESSION_METRICS,
    ]


def find_metric(path: str) -> Metric | None:
    """Return the metric with a path, or None if there is none."""
    latency = _find_latency(path)
    if latency is not None:
        return latency
    if path == OK_SHARE:
        return Metric(path, "requests ok", "", 1)
    if path.startswith("sessions."):
        return _find_session_metric(path)
    if path not in _block_paths():
        return None
    unit = "/s" if path.endswith(("_per_s", "rps")) else ""
    return Metric(path, NAMES.get(path, path), unit, _block_direction(path))


def metric_value(summary: Summary, path: str) -> float | None:
    """Return the value at a path of a summary, or None if it has none."""
    if path == OK_SHARE:
        decided_count = summary.requests.decided
        return summary.requests.ok / decided_count if decided_count else None
    value: object = summary
    for key in path.split("."):
        value = value.get(key) if isinstance(value, dict) else getattr(value, key, None)
    return float(value) if isinstance(value, int | float) else None


def _find_latency(path: str) -> Metric | None:
    """Return the metric with a path if it is a statistic of a row of `loadgen.figures`."""
    row_path, _, statistic = path.rpartition(".")
    row = next((row for row in FIGURES.here() if row.path == row_path), None)
    if row is None or statistic not in _STATISTICS:
        return None
    has_samples = row.values is not None and (statistic in _QUANTILES or statistic == "mean")
    return Metric(
        path,
        f"{row.words} {statistic.replace('_', '.')}",
        row.unit,
        row.better,
        per_request=row.name if has_samples else "",
        p=_QUANTILES.get(statistic),
    )


def _find_session_metric(path: str) -> Metric | None:
    """Return the metric with a path below `sessions`."""
    single_value = SESSION_METRICS.get(path)
    if single_value is not None:
        return Metric(path, single_value.name, single_value.unit, single_value.better)
    _, _, time_path = path.partition(".")
    time, _, statistic = time_path.partition(".")
    if time not in SESSION_TIMES or statistic not in _STATISTICS:
        return None
    return Metric(path, f"{SESSION_TIMES[time]} {statistic.replace('_', '.')}", "ms", -1)


def _block_direction(path: str) -> int:
    """Return +1 if a metric of a block is better if it is higher, -1 if lower, 0 if neither."""
    if path in LOWER_IS_BETTER_PATHS:
        return -1
    is_rate = path.endswith(("_per_s", "completed_rps"))
    return 1 if is_rate or path.startswith("goodput.") else 0


def _block_paths() -> set[str]:
    """Return the paths of the numbers in the blocks of a summary."""
    from loadgen.core.metrics.client_use import ClientUse
    from loadgen.core.metrics.goodput import Goodput
    from loadgen.core.metrics.load import Load
    from loadgen.core.metrics.request_counts import RequestCounts, Stalls
    from loadgen.core.metrics.token_usage import Tokens

    blocks: dict[str, type[Struct]] = {
        "tokens": Tokens,
        "load": Load,
        "goodput": Goodput,
        "requests": RequestCounts,
        "client": ClientUse,
    }
    paths = {f"stalls.{field}" for field in Stalls.__struct_fields__}
    for name, block in blocks.items():
        for field in block.__struct_fields__:
            if field not in NOT_COMPARABLE_FIELDS:
                paths.add(f"{name}.{field}")
    return paths
