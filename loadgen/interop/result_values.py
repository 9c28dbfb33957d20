"""Reads metrics from the JSON of another tool's result file by the paths of its fields.

Other tools define TTFT, TPOT and ITL differently. The row of each tool in `loadgen.formats` states
its definitions, which reports show with the metrics.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

from loadgen.core import format
from loadgen.formats import ForeignResult, ToolFile

TPOT_WITH_TTFT = "tpot_with_first_ms"
"""E2E / n, which includes the TTFT. loadgen has no such metric: it is shown and never compared."""

SECONDS_MS = 1e3
NANOSECONDS_MS = 1e-6
"""Units of latencies in ms."""

MAX_VALUE = 1e15
"""No count, rate or latency in ms is larger: 10^15 ms are 30,000 years."""

_STATISTIC_NAMES = {
    "p50": ("p50", "median", "50.0"),
    "p90": ("p90", "90.0"),
    "p95": ("p95", "95.0"),
    "p99": ("p99", "99.0"),
    "p99_9": ("p999", "p99_9", "p99.9", "99.9"),
    "mean": ("mean", "avg"),
    "min": ("min",),
    "max": ("max",),
}
"""The names that tools have for each statistic, by our name."""

_UNITS_MS = {"ms": 1.0, "s": SECONDS_MS, "sec": SECONDS_MS, "us": 1e-3, "ns": NANOSECONDS_MS}


class LatencyField(NamedTuple):
    """Where a result has the statistics of a latency.

    Attributes:
        path: The dotted path of the object with the statistics.
        label: The tool's name for the latency.
        unit_ms: The unit of the statistics in ms, if the object does not name one.
    """

    path: str
    label: str
    unit_ms: float = 1.0


class ResultLayout(NamedTuple):
    """Where the result file of a tool has its metrics.

    Attributes:
        latencies: By the name of our nearest metric, the field of the tool.
        metrics: By the path of our nearest metric, the dotted path of the tool's number.
        ok: The path of the number of successful requests.
        failed: The paths whose sum is the number of failed requests. Empty if the file does not
            say how many failed.
    """

    latencies: Mapping[str, LatencyField]
    metrics: Mapping[str, str]
    ok: str
    failed: Sequence[str]


class RunDescription(NamedTuple):
    """What a result file says about the run. None or "" where it says nothing.

    Attributes:
        version: The version of the tool.
        model: The model.
        target: The URL of the server.
        load: The load in words, for example "10/s".
        started: When the run started.
        notes: What a reader of the metrics should know.
    """

    version: object = ""
    model: object = ""
    target: object = ""
    load: str = ""
    started: object = ""
    notes: Sequence[str] = ()


def read_by_layout(
    file: ToolFile, document: Mapping[str, Any], layout: ResultLayout, run: RunDescription
) -> ForeignResult:
    """Return the result in a file of another tool whose metrics are at known paths.

    Args:
        file: The file.
        document: The JSON object that the paths start from: that of the file, or a part of it.
        layout: Where the document has each of our metrics.
        run: What the file says about the run.
    """
    labels = {metric: field.label for metric, field in layout.latencies.items()}
    metrics = {
        **_read_latencies(document, layout),
        **find_numbers(document, layout.metrics),
        **_read_request_counts(document, layout),
    }

    result_count = file.lines  # 0 if the file is a single result
    if result_count:
        note = f"only the last of {format.counted(result_count, 'result')} in the file is read"
        run = run._replace(notes=(*run.notes, note))

    return create_result(file.where, metrics, labels, run)


def _read_latencies(document: Mapping[str, object], layout: ResultLayout) -> dict[str, float]:
    """Return the statistics of all latencies in ms, by paths such as `ttft_ms.p50`."""
    metrics: dict[str, float] = {}
    for metric, field in layout.latencies.items():
        statistics = find_value(document, field.path)
        metrics |= latency_metrics(metric, statistics, field.unit_ms)
    return metrics


def _read_request_counts(document: Mapping[str, Any], layout: ResultLayout) -> dict[str, float]:
    """Return the counts of requests.

    A tool may count failed requests in several fields, which are added up, or in none.
    """
    failed = None
    if layout.failed:
        failed = sum(find_value(document, path) or 0 for path in layout.failed)
    return request_metrics(find_value(document, layout.ok), failed)


def create_result(
    where: str, metrics: dict[str, float], labels: dict[str, str], run: RunDescription
) -> ForeignResult:
    """Return the result of another tool with its metrics and what is known about the run.

    The name and the definitions of the tool are added by the caller of the reader.

    Args:
        where: The path of the file.
        metrics: The values by the paths of our metrics, such as `ttft_ms.p50`.
        labels: By the name of our metric, the tool's name for it.
        run: What the file says about the run.
    """
    return ForeignResult(
        file=where,
        metrics=metrics,
        called=labels,
        version=str(run.version or ""),
        model=str(run.model or ""),
        target=str(run.target or ""),
        load=run.load,
        started=str(run.started or ""),
        notes=tuple(run.notes),
    )


def find_value(document: Any, path: str) -> Any:
    """Return the value at a dotted path such as `models.0.name`, or None if there is none.

    A number in the path is an index of a list, and "-1" is its last element.
    """
    value = document
    for key in path.split("."):
        if isinstance(value, Mapping):
            value = value.get(key)
        elif isinstance(value, list) and key == "-1":
            value = value[-1] if value else None
        elif isinstance(value, list) and key.isdigit():
            index = int(key)
            value = value[index] if index < len(value) else None
        else:
            return None

    return value


def find_number(document: object, path: str) -> float | None:
    """Return the number at a dotted path, or None if there is no finite number."""
    return finite_number(find_value(document, path))


def find_numbers(document: object, paths: Mapping[str, str]) -> dict[str, float]:
    """Return the numbers at several paths, by the keys of `paths`, without missing ones."""
    numbers = {}
    for key, path in paths.items():
        number = find_number(document, path)
        if number is not None:
            numbers[key] = number
    return numbers


def finite_number(value: Any) -> float | None:
    """Return a value as a float, or None if it is no finite number. A boolean is no number."""
    if not is_number(value):
        return None
    number = to_float(value)
    return number if math.isfinite(number) else None


def is_number(value: object) -> TypeGuard[int | float]:
    """Return whether a JSON value is a number. A boolean is none, although Python counts it."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def to_float(number: float) -> float:
    """Return a number of a JSON document as a float, infinite if it is an integer too large."""
    try:
        return float(number)
    except OverflowError:
        return math.inf if number > 0 else -math.inf


def latency_metrics(metric: str, statistics: object, unit_ms: float = 1.0) -> dict[str, float]:
    """Return the statistics of a latency in ms, by paths such as `ttft_ms.p50`.

    For example, {"unit": "s", "avg": 0.2, "percentiles": {"50.0": 0.1}} of the metric "ttft_ms"
    becomes {"ttft_ms.p50": 100.0, "ttft_ms.mean": 200.0}.

    Args:
        metric: The name of the metric in loadgen.
        statistics: A JSON object with the statistics by their names in the tool. Percentiles may be
            in an object `percentiles` inside it, and `unit` may name the unit.
        unit_ms: The unit of the statistics in ms, if they do not name one.

    Returns:
        The known statistics. {} if `statistics` is not an object.
    """
    if not isinstance(statistics, Mapping):
        return {}

    values_by_tool_name: dict[str, Any] = {}
    percentiles = statistics.get("percentiles")
    if isinstance(percentiles, Mapping):
        values_by_tool_name.update(percentiles)

    values_by_tool_name.update(statistics)

    # A missing unit becomes the text "None", which is not in the table.
    unit_name = str(statistics.get("unit"))
    factor_to_ms = _UNITS_MS.get(unit_name, unit_ms)

    metrics = {}
    for statistic, tool_names in _STATISTIC_NAMES.items():
        value = _first_number(values_by_tool_name, tool_names)
        if value is not None:
            metrics[f"{metric}.{statistic}"] = value * factor_to_ms

    return metrics


def _first_number(values: Mapping[str, object], names: Sequence[str]) -> float | None:
    """Return the first value with one of the names that is a finite number, or None."""
    for name in names:
        number = finite_number(values.get(name))
        if number is not None:
            return number
    return None


def request_metrics(ok: object, failed: object) -> dict[str, float]:
    """Return the counts of requests and the share of successful ones, by paths of our metrics.

    Args:
        ok: The number of successful requests. {} is returned if it is no number.
        failed: The number of failed requests, or None if the tool does not count them. The number
            of all requests is then unknown, too.
    """
    ok_count = finite_number(ok)
    if ok_count is None:
        return {}
    if failed is None:
        return {"requests.ok": ok_count}

    failed_count = finite_number(failed) or 0.0
    total = ok_count + failed_count

    metrics = {
        "requests.ok": ok_count,
        "requests.failed": failed_count,
        "requests.scheduled": total,
    }
    if total:
        metrics["ok_share"] = ok_count / total

    return metrics
