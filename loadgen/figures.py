"""The table of metrics: how each one is computed, named and shown.

A metric has one value per request, or per inter-token gap or event of all requests together. The
summary has the distribution of the values. Everything that shows or limits a metric reads this
table: summary, SLO, reports, `compare`, Prometheus and `docs/reference/summary.md`. The built-in
rows are in `core/metrics/metric_definitions.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from loadgen.plugins import OpenTable

if TYPE_CHECKING:
    from loadgen.core.metrics.bounds import Bounds
    from loadgen.core.metrics.columns import Columns

Place = Literal["slo", "contract", "latency", "client", "requests", "prometheus"]
PLACES: dict[Place, str] = {
    "slo": "what `--slo`, `--stop-when` and the `slo` of a workload may limit",
    "contract": "what a term of a contract may limit",
    "latency": "latency table of reports",
    "client": "table of client overhead",
    "requests": "column of `Run.requests()`",
    "prometheus": "histogram of `--prometheus`",
}
"""Where a metric can be shown or named. summary.json and `compare` have all metrics."""

PerRequest = Callable[["Columns"], NDArray[np.int64]]
"""A function that computes one value for each request of the columns."""


class MetricDefinition(Struct, frozen=True, kw_only=True):
    """One metric.

    Times are in ns. Values with another unit than ms are in millionths of that unit, like ns of ms.

    Attributes:
        name: Its key.
        label: Its name in reports.
        meaning: Its definition, in one line.
        values: Computes its value for each request, with `columns.UNDEFINED` where there is none.
            None if it has no value per request.
        sample: Which requests have values: successful ones ("ok") or all that were sent. "gaps" and
            "events" pool the values of all requests.
        unit: Its unit in the summary.
        needs: What a response must have: nothing, output, a stream, or enough tokens.
        least: Computes a lower bound of the value of each unfinished request. None if there is no
            bound.
        bounds: Computes the smallest and the largest value that each request may have had.
            None if its values are sure.
        uncertainty_limit: The field of `ValidityLimits` that says by how much its statistics may be
            off. "" if they are sure.
        guards: Codes of `metrics.reasons` that cause the metric to be omitted.
        better: -1 if lower is better, +1 if higher is, 0 if neither.
        compared: The quantiles that `compare` shows by default.
        block: The block of the summary that contains it. If empty, it is a field of the summary.
        places: Where it is shown or may be named, see PLACES.
        under: Its label in a table where it stands below the previous metric.
        hidden_if_same_as: The name of a similar metric. A table of latencies shows this one only
            if the two differ.
    """

    name: str
    label: str
    meaning: str
    values: PerRequest | None = None
    sample: Literal["ok", "sent", "gaps", "events"] = "ok"
    unit: str = "ms"
    needs: Literal["", "output", "stream", "tokens"] = "output"
    least: PerRequest | None = None
    bounds: Callable[[Columns], Bounds] | None = None
    uncertainty_limit: str = ""
    guards: tuple[str, ...] = ()
    better: Literal[-1, 0, 1] = -1
    compared: tuple[str, ...] = ()
    block: str = "figures"
    places: tuple[Place, ...] = ()
    under: str = ""
    hidden_if_same_as: str = ""

    @property
    def field(self) -> str:
        """Its key in its block of the summary, for example `ttft_ms`."""
        return f"{self.name}_ms" if self.unit == "ms" else self.name

    @property
    def path(self) -> str:
        """The path of its distribution in the summary: `ttft_ms`, `figures.thinking_ms`."""
        return f"{self.block}.{self.field}" if self.block else self.field


class MetricTable(OpenTable[MetricDefinition]):
    """The table of metrics.

    Every run needs all rows, so a cache remembers whether any plug-in has rows.
    """

    def available(self) -> tuple[MetricDefinition, ...]:
        """Return all rows. Those of plug-ins count as used."""
        if not self._is_enabled or self._has_no_plugins:
            return self.builtin_rows
        for plugin in self.plugins:
            if plugin.row is not None:
                self._record_use(plugin)
        return (*self.builtin_rows, *self.plugin_rows())

    @cached_property
    def _has_no_plugins(self) -> bool:
        return not self.cached_fields("name")

    def get(self, name: str) -> MetricDefinition | None:
        """Return the row with this name, or None."""
        return next((row for row in self.available() if row.name == name), None)

    def shown_in(self, place: Place) -> tuple[MetricDefinition, ...]:
        """Return the metrics that a place has: a table, or a part of an input file.

        For example, "latency" is a table of a report. "slo" and "contract" are the files in which
        users set a limit for a metric. They have only those metrics of plug-ins that are times per
        request, because others cannot have a limit.
        """
        metrics = [metric for metric in self.available() if place in metric.places]
        is_input_with_limits = place in ("slo", "contract")
        if is_input_with_limits:
            metrics = [metric for metric in metrics if self._can_be_limited(metric)]
        return tuple(metrics)

    def _can_be_limited(self, row: MetricDefinition) -> bool:
        """Return True for every built-in metric, and for times per request of plug-ins."""
        is_time_per_request = row.values is not None and row.unit == "ms"
        return row in self.builtin_rows or is_time_per_request

    def values(self, name: str) -> PerRequest:
        """Return the function of a metric that has a value per request.

        Raises KeyError if no metric has this name, or the metric has no value per request.
        """
        row = self.get(name)
        if row is None or row.values is None:
            raise KeyError(name)
        return self.guard(row, row.values, _check_values)


def _check_values(values: object, columns: Columns) -> None:
    """Raise TypeError unless a metric of a plug-in computed an integer for each request."""
    if not isinstance(values, np.ndarray):
        description = type(values).__name__
    elif values.shape == (len(columns),) and values.dtype.kind in "iu":
        return
    else:
        description = f"{values.dtype} of shape {values.shape}"
    raise TypeError(f"it returned {description}, not an int64 for each of {len(columns)} requests")


def _load_rows() -> tuple[MetricDefinition, ...]:
    from loadgen.core.metrics.metric_definitions import ROWS

    return ROWS


METRICS = MetricTable("loadgen.figures", MetricDefinition, _load_rows)


def metric_label(name: str) -> str:
    """Return the label of a metric, or its key if there is no such metric."""
    row = METRICS.get(name)
    return name if row is None else row.label


def needs(name: str) -> str:
    """Return what a response must have for a metric, or "" if there is no such metric."""
    row = METRICS.get(name)
    return "" if row is None else row.needs


def per_request(name: str) -> bool:
    """Return True if there is such a metric and it has a value per request."""
    row = METRICS.get(name)
    return row is not None and row.values is not None


def metrics_withheld_for(code: str) -> tuple[str, ...]:
    """Return the names of the metrics that a run withholds for a reason with this code.

    The definition of each metric lists these codes in `guards`.
    """
    return tuple(row.name for row in METRICS.available() if code in row.guards)


def pooled_metrics() -> tuple[str, ...]:
    """Return the names of the built-in metrics over all inter-token gaps.

    They have quantiles, but no value per request.
    """
    return tuple(row.name for row in METRICS.builtin_rows if row.sample == "gaps")
