"""An observer that keeps the metrics of calls for Prometheus."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from ..errors import WrongUse
from .backlog import MAX_PENDING, Backlog
from .measurement import Measurement
from .metric_labels import (
    DURATION_BOUNDS_S,
    TPOT_BOUNDS_S,
    error_type_of,
    validate_label_names,
)

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

_MAX_CACHED_SERIES = 4096


class Prometheus:
    """An observer that keeps metrics in a registry, which the application serves as it always does.

    Counters: `llm_client_requests_total{api,model,status,error}`,
    `llm_client_tokens_total{api,model,type}` (input, output, cached, cache_written, by the
    server's counts), `llm_client_retries_total` and `llm_client_cost_total` (in the currency of
    the prices) by API and model.

    Histograms by API and model: `llm_client_duration_seconds`, and of streams
    `llm_client_time_to_first_token_seconds` and `llm_client_time_per_output_token_seconds`.

    A call is counted in the background, or when the registry is read, whichever comes first, so
    that what is read is exact. With PROMETHEUS_MULTIPROC_DIR, where another process reads, the
    background thread counts each call at once. Create one observer per registry.
    """

    def __init__(
        self, registry: CollectorRegistry | None = None, *, labels: Sequence[str] = ()
    ) -> None:
        """Register the metrics.

        Args:
            registry: The registry, or None for the default one.
            labels: The names of labels of calls (see `labelled`) that become labels of every
                metric. Only those with few values are suitable.

        Raises:
            WrongUse: prometheus-client is not installed, or the names of labels are not valid.
        """
        self._client = _import_prometheus_client()
        self._label_names = validate_label_names(labels, "labels")
        self._metrics: list[Any] = []
        self._create_metrics()

        self._backlog = Backlog(self._record, _max_pending())
        if registry is None:
            registry = self._client.REGISTRY

        registry.register(self)

    def _create_metrics(self) -> None:
        """Create the counters and histograms of calls."""
        self._requests = self._add_counter("requests", "Calls that ended.", "status", "error")
        self._tokens = self._add_counter("tokens", "Tokens, as the server counts them.", "type")
        self._retries = self._add_counter("retries", "Attempts after the first.")
        self._cost = self._add_counter("cost", "Cost of the calls.")
        self._duration = self._add_histogram("duration", "From call to end.", DURATION_BOUNDS_S)
        self._ttft = self._add_histogram(
            "time_to_first_token", "From call to first output, streams.", DURATION_BOUNDS_S
        )
        self._tpot = self._add_histogram(
            "time_per_output_token", "Per output token after the first, streams.", TPOT_BOUNDS_S
        )

    def __call__(self, measurement: Measurement) -> None:
        """Keep one call, to be counted."""
        self._backlog.add(measurement)

    def describe(self) -> Iterator[Any]:
        """Yield the names of the metrics, for the registry."""
        for metric in self._metrics:
            yield from metric.describe()

    def collect(self) -> Iterator[Any]:
        """Yield the metrics with every call that has ended, for the registry."""
        self._backlog.process_all()
        for metric in self._metrics:
            yield from metric.collect()

    def _add_counter(self, name: str, text: str, *more_labels: str) -> Any:
        """Return a new counter by API, model, the chosen labels of calls, and `more_labels`.

        Like a histogram, it is returned by `collect`, and not registered by itself.
        """
        labels = ("api", "model", *self._label_names, *more_labels)
        counter = self._client.Counter(f"llm_client_{name}", text, labels, registry=None)
        self._metrics.append(counter)
        return counter

    def _add_histogram(self, name: str, text: str, bounds: tuple[float, ...]) -> Any:
        """Return a new histogram of seconds by API, model and the chosen labels of calls.

        It is added to the metrics that `collect` returns, and not to a registry, because this
        collector is registered as a whole.
        """
        histogram = self._client.Histogram(
            f"llm_client_{name}_seconds",
            text,
            ("api", "model", *self._label_names),
            buckets=bounds,
            registry=None,
        )
        self._metrics.append(histogram)
        return histogram

    def _record(self, measurement: Measurement) -> None:
        """Add one call that has ended to the metrics. Only token counts of the server are added.

        A metric has a series for each combination of the values of its labels. prometheus_client
        takes the values by position, in the order in which `_add_counter` and `_add_histogram` name
        the labels: API, model, the chosen labels of calls, and further labels of this metric.
        """
        chosen_label_values = [measurement.labels.get(name, "") for name in self._label_names]
        label_values = (measurement.api, measurement.model, *chosen_label_values)
        status_and_error = (measurement.status, error_type_of(measurement))
        _series(self._requests, *label_values, *status_and_error).inc()
        duration_s = (measurement.done - measurement.started) / 1e9
        _series(self._duration, *label_values).observe(duration_s)

        if measurement.streamed:
            self._record_stream(measurement, label_values)

        for token_type, tokens in _server_counts(measurement).items():
            if tokens:
                _series(self._tokens, *label_values, token_type).inc(tokens)

        if measurement.retries:
            _series(self._retries, *label_values).inc(measurement.retries)

        if measurement.cost:
            _series(self._cost, *label_values).inc(measurement.cost)

    def _record_stream(self, measurement: Measurement, label_values: tuple[str, ...]) -> None:
        """Add the times of the output events of a streamed call, in seconds."""
        if measurement.ttft_ms is not None:
            _series(self._ttft, *label_values).observe(measurement.ttft_ms / 1e3)
        if measurement.tpot_ms is not None:
            _series(self._tpot, *label_values).observe(measurement.tpot_ms / 1e3)


def _import_prometheus_client() -> Any:
    """Return the module prometheus_client. Raises WrongUse if it is not installed."""
    try:
        import prometheus_client
    except ImportError:
        raise WrongUse(
            "not_installed",
            "prometheus-client is not installed",
            "pip install prometheus-client",
        ) from None
    return prometheus_client


def _max_pending() -> int:
    """Return how many calls may wait in the backlog.

    With PROMETHEUS_MULTIPROC_DIR, another process reads the metrics from files, and never calls
    `collect`, which would process the backlog. Each call is then processed at once.
    """
    return 1 if "PROMETHEUS_MULTIPROC_DIR" in os.environ else MAX_PENDING


def _server_counts(measurement: Measurement) -> dict[str, int | None]:
    """Return the token counts of the server by their types. One that is not known is None."""
    is_counted_by_server = measurement.token_source == "server"
    return {
        "input": measurement.input_tokens,
        "cached": measurement.cached_tokens,
        "cache_written": measurement.cache_written_tokens,
        "output": measurement.output_tokens if is_counted_by_server else None,
    }


@lru_cache(maxsize=_MAX_CACHED_SERIES)
def _series(metric: Any, *label_values: str) -> Any:
    """Return the series of a metric with these values of its labels.

    The result is cached, because the lookup in prometheus_client takes longer than to count.
    """
    return metric.labels(*label_values)
