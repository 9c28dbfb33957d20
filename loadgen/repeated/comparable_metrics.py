"""The metrics of a run that can be compared, by their path in `summary.json`.

A path names an object of that file and a field of it, for example `ttft_ms.p99` or
`sessions.duration_ms.p50`.

One more path, `ok_share`, is not in `summary.json`: the share of ok requests among all that were
neither cancelled nor unfinished.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from msgspec import Struct, structs

from loadgen.core.stats.quantiles import QUANTILES
from loadgen.figures import METRICS

if TYPE_CHECKING:
    from loadgen.core.metrics.summary import Summary

LOWER_IS_BETTER = -1
HIGHER_IS_BETTER = 1
NO_DIRECTION = 0

OK_SHARE = "ok_share"
ANSWER_SCORE = "answers.overall.score"
"""The path of the share of checked answers that are right."""

SHARE_PATHS = (
    OK_SHARE,
    ANSWER_SCORE,
    "goodput.share",
    "sessions.goodput.share",
    "fluidity.index",
    "tokens.cached_share",
    "tokens.length_mismatch_share",
)
"""The paths of metrics that are shares, from 0 to 1."""

DEFAULT_PATHS = (
    "tokens.steady_output_per_s",
    OK_SHARE,
    "goodput.share",
    "fluidity.index",
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
    "fluidity.index": "fluidity index",
    "accepted_length.realised": "accepted length",
}
"""The names of metrics that are not called by their path."""

LOWER_IS_BETTER_PATHS = (
    "requests.failed",
    "requests.lost",
    "requests.dropped",
    "stalls.share",
    "stalls.requests",
)

FLUIDITY_COUNTS = (
    "fluidity.first_token_ms",
    "fluidity.per_token_ms",
    "fluidity.requests",
    "fluidity.deadlines",
    "fluidity.missed",
)
"""The numbers about token deadlines that are no fluidity index."""

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
    "sessions.steady_ok_per_s": SessionMetric("tasks", "/s", HIGHER_IS_BETTER),
    "sessions.ok_per_s": SessionMetric("tasks, measurement window", "/s", HIGHER_IS_BETTER),
    "sessions.goodput.share": SessionMetric("tasks within the SLO", "", HIGHER_IS_BETTER),
    "sessions.goodput.steady_rps": SessionMetric("tasks within the SLO", "/s", HIGHER_IS_BETTER),
    "sessions.goodput.rps": SessionMetric(
        "tasks within the SLO, measurement window", "/s", HIGHER_IS_BETTER
    ),
    "sessions.requests": SessionMetric("requests of a task", "", NO_DIRECTION),
    "sessions.input_tokens": SessionMetric("prompt tokens of a task", "", NO_DIRECTION),
    "sessions.cached_tokens": SessionMetric("cached tokens of a task", "", HIGHER_IS_BETTER),
    "sessions.output_tokens": SessionMetric("output tokens of a task", "", NO_DIRECTION),
}
"""The metrics of sessions that have a single value, by their path."""

NOT_COMPARABLE_FIELDS = (
    "sources",
    "by_error",
    "by_finish",
    "arrival",
    "slo",
    "met",
    "absent",
    "objective",
    "target_name",
    "source",
    "comparable",
    "reason",
)
"""The fields of the objects in `summary.json` that are not numbers."""

_QUANTILES = dict(QUANTILES)
_STATISTICS = (*_QUANTILES, "mean", "min", "max")


class Metric(Struct, frozen=True):
    """A metric that can be compared.

    Attributes:
        path: Its path in `summary.json`.
        name: Its name for readers.
        unit: Its unit.
        better: LOWER_IS_BETTER, HIGHER_IS_BETTER or NO_DIRECTION.
        request_metric: The name of the metric of single requests in `loadgen.figures` that it
            summarizes. Empty if it has no value for each request.
        quantile: The quantile of these values. None for their mean.
    """

    path: str
    name: str
    unit: str
    better: int
    request_metric: str = ""
    quantile: float | None = None


def default_metric_paths() -> tuple[str, ...]:
    """Return the paths of the metrics that are compared by default, where all sides have them."""
    latency_paths = [
        f"{row.path}.{quantile}" for row in METRICS.available() for quantile in row.compared
    ]
    return (*latency_paths, *DEFAULT_PATHS)


def metric_paths() -> list[str]:
    """Return all paths that `find_metric` knows."""
    latency_paths = [
        f"{definition.path}.{statistic}"
        for definition in METRICS.available()
        for statistic in _STATISTICS
    ]
    session_time_paths = [
        f"sessions.{time}.{statistic}" for time in SESSION_TIMES for statistic in _STATISTICS
    ]
    return [
        *latency_paths,
        OK_SHARE,
        ANSWER_SCORE,
        *sorted(_field_paths()),
        *session_time_paths,
        *SESSION_METRICS,
    ]


def find_metric(path: str) -> Metric | None:
    """Return the metric that a path in `summary.json` names, or None if it names none.

    There are five groups of paths:

    - A statistic of a latency, such as `ttft_ms.p99`.
    - `ok_share`, the share of ok requests.
    - `answers.overall.score`, the share of checked answers that are right.
    - A time or a number of sessions, such as `sessions.requests`.
    - A single number in an object, such as `goodput.share`.
    """
    if path == OK_SHARE:
        return Metric(path, "requests ok", "", HIGHER_IS_BETTER)
    if path == ANSWER_SCORE:
        return Metric(path, "right answers", "", HIGHER_IS_BETTER)

    latency_metric = _find_latency_metric(path)
    if latency_metric is not None:
        return latency_metric
    if path.startswith("sessions."):
        return _find_session_metric(path)

    return _find_single_number(path)


def _find_single_number(path: str) -> Metric | None:
    """Return the metric with a path if it is a single number in an object, else None."""
    if path not in _field_paths():
        return None
    is_rate = path.endswith(("_per_s", "rps"))
    name = NAMES.get(path, path)
    return Metric(path, name, "/s" if is_rate else "", _field_direction(path))


def metric_value(summary: Summary, path: str) -> float | None:
    """Return the value at a path of a summary, or None if the summary has no number there."""
    if path == OK_SHARE:
        return _ok_share(summary)
    node: object = summary
    for key in path.split("."):
        node = _value_at_key(node, key)
    return float(node) if isinstance(node, int | float) else None


def _value_at_key(node: object, key: str) -> object:
    """Return the value that a part of a summary has at a key of its JSON text, None without one."""
    if isinstance(node, dict):
        return node.get(key)
    if not isinstance(node, Struct):
        return None
    # The key of a field may differ from its name.
    field_of_key = dict(zip(node.__struct_encode_fields__, node.__struct_fields__, strict=True))
    return getattr(node, field_of_key.get(key, key), None)


def _ok_share(summary: Summary) -> float | None:
    """Return the share of ok requests, or None if no request succeeded or failed."""
    decided_count = summary.requests.decided
    return summary.requests.ok / decided_count if decided_count else None


def _find_latency_metric(path: str) -> Metric | None:
    """Return the metric with a path if it is a statistic of a latency, else None.

    The path `ttft_ms.p99` has two parts: "ttft_ms" is the path of the distribution, which a metric
    of `loadgen.figures` defines, and "p99" is the statistic.
    """
    distribution_path, _, statistic = path.rpartition(".")
    definition_by_path = {definition.path: definition for definition in METRICS.available()}
    definition = definition_by_path.get(distribution_path)
    if definition is None or statistic not in _STATISTICS:
        return None

    # A confidence interval is computed from the values of single requests. It exists for quantiles
    # and the mean, but not for the minimum and the maximum.
    can_have_interval = statistic in _QUANTILES or statistic == "mean"
    has_request_values = definition.values is not None

    request_metric = ""
    if can_have_interval and has_request_values:
        request_metric = definition.name

    return Metric(
        path=path,
        name=f"{definition.label} {_statistic_label(statistic)}",
        unit=definition.unit,
        better=definition.better,
        request_metric=request_metric,
        quantile=_QUANTILES.get(statistic),
    )


def _find_session_metric(path: str) -> Metric | None:
    """Return the metric with a path below `sessions`, or None if no metric has it.

    It is a single number, such as `sessions.requests`, or a statistic of a time, such as
    `sessions.duration_ms.p50`.
    """
    single_value = SESSION_METRICS.get(path)
    if single_value is not None:
        return Metric(path, single_value.name, single_value.unit, single_value.better)

    time_name, _, statistic = path.removeprefix("sessions.").partition(".")
    if time_name not in SESSION_TIMES or statistic not in _STATISTICS:
        return None

    name = f"{SESSION_TIMES[time_name]} {_statistic_label(statistic)}"
    return Metric(path, name, "ms", LOWER_IS_BETTER)


def _statistic_label(statistic: str) -> str:
    """Return a statistic for readers. JSON keys have no dot, so that `p99_9` stands for p99.9."""
    return statistic.replace("_", ".")


def _field_direction(path: str) -> int:
    """Return LOWER_IS_BETTER, HIGHER_IS_BETTER or NO_DIRECTION for a number of `summary.json`.

    `path` is one of `_field_paths`. Rates and goodput are better if they are higher, and failures
    if they are lower. Most other numbers, such as numbers of tokens, are neither.
    """
    if path in LOWER_IS_BETTER_PATHS:
        return LOWER_IS_BETTER
    is_rate = path.endswith(("_per_s", "completed_rps"))
    is_goodput = path.startswith("goodput.")
    is_fluidity = path.startswith("fluidity.") and path not in FLUIDITY_COUNTS
    return HIGHER_IS_BETTER if is_rate or is_goodput or is_fluidity else NO_DIRECTION


def _field_paths() -> set[str]:
    """Return the paths of the single numbers in `summary.json`, for example `goodput.share`.

    A single number is not a distribution, which has percentiles. The paths are read from the types
    of the objects in the summary, so that a new field can be compared without a change here.
    """
    from loadgen.core.metrics import (
        accepted_length,
        client_use,
        fluidity,
        goodput,
        load,
        request_counts,
        token_usage,
    )

    # The keys are fields of `Summary`, and the values their types.
    type_by_field: dict[str, type[Struct]] = {
        "tokens": token_usage.Tokens,
        "load": load.Load,
        "goodput": goodput.Goodput,
        "fluidity": fluidity.Fluidity,
        "accepted_length": accepted_length.AcceptedLengthCheck,
        "requests": request_counts.RequestCounts,
        "client": client_use.ClientUse,
        "stalls": request_counts.Stalls,
    }

    return {
        f"{object_name}.{field.name}"
        for object_name, object_type in type_by_field.items()
        for field in structs.fields(object_type)
        if field.name not in NOT_COMPARABLE_FIELDS
    }
