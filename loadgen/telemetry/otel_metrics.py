"""Exports the metrics of a run to OpenTelemetry by the conventions for GenAI clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

from loadgen_sdk.app.agent_spans import SCHEMA_URL
from loadgen_sdk.app.metric_labels import DURATION_BOUNDS_S, TPOT_BOUNDS_S
from loadgen_sdk.app.open_telemetry import TOKEN_BOUNDS
from opentelemetry.metrics import Histogram
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricExporter, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource

from loadgen.core.metrics.columns import UNDEFINED, Columns
from loadgen.core.results.manifest import RunManifest, WorkerSample
from loadgen.core.results.record import SOURCES
from loadgen.telemetry.otel_requests import SentRequest, sent_requests, target_attributes
from loadgen.telemetry.prometheus import rate_unit

EXPORT_INTERVAL_MS = 5_000
NS_PER_S = 1e9


class MetricsSender:
    """Records the metrics of a run and sends them to a collector."""

    def __init__(
        self, header: RunManifest, resource: Resource, exporter: MetricExporter, timeout_s: float
    ) -> None:
        self._header = header
        self._timeout_ms = timeout_s * 1e3
        self._target_attributes = [
            target_attributes(header, target) for target in range(len(header.targets))
        ]
        reader = PeriodicExportingMetricReader(exporter, EXPORT_INTERVAL_MS, self._timeout_ms)
        self._provider = MeterProvider([reader], resource, shutdown_on_exit=False)
        self._meter = self._provider.get_meter("loadgen", header.version, SCHEMA_URL)
        self._duration = self._create_histogram("gen_ai.client.operation.duration")
        self._ttft = self._create_histogram("gen_ai.client.operation.time_to_first_chunk")
        self._tokens = self._create_histogram(
            "gen_ai.client.token.usage", unit="{token}", bounds=TOKEN_BOUNDS
        )
        self._tpot = self._create_histogram(
            "loadgen.client.time_per_output_token", bounds=TPOT_BOUNDS_S
        )
        self._send_lag = self._create_histogram("loadgen.send_lag")
        self._in_flight = self._meter.create_gauge("loadgen.in_flight", "{request}")
        self._offered = self._meter.create_gauge("loadgen.offered", "{start}/s")

    def record(self, parts: Sequence[Columns], samples: Mapping[int, WorkerSample]) -> None:
        """Record new requests, and the latest sample of each worker."""
        for request in chain.from_iterable(map(sent_requests, parts)):
            self._record_request(request)
        self._record_load(samples)

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown(self._timeout_ms)

    def _create_histogram(
        self, name: str, unit: str = "s", bounds: Sequence[float] = DURATION_BOUNDS_S
    ) -> Histogram:
        return self._meter.create_histogram(name, unit, explicit_bucket_boundaries_advisory=bounds)

    def _record_request(self, request: SentRequest) -> None:
        attributes = self._target_attributes[request.target]
        duration_s = max(request.done_ns - request.sent_ns, 0) / NS_PER_S
        send_lag_s = max(request.sent_ns - request.due_ns, 0) / NS_PER_S
        self._send_lag.record(send_lag_s, attributes)
        if request.error:
            self._duration.record(duration_s, {**attributes, "error.type": request.error})
            return
        self._duration.record(duration_s, attributes)
        if request.ttft != UNDEFINED and self._header.stream:
            self._ttft.record((request.first_token_ns - request.sent_ns) / NS_PER_S, attributes)
        if request.tpot != UNDEFINED:
            self._tpot.record(request.tpot / NS_PER_S, attributes)
        if request.input_tokens >= 0:
            self._tokens.record(request.input_tokens, {**attributes, "gen_ai.token.type": "input"})
        if request.output_tokens >= 0 and SOURCES[request.output_source] == "server":
            self._tokens.record(
                request.output_tokens, {**attributes, "gen_ai.token.type": "output"}
            )

    def _record_load(self, samples: Mapping[int, WorkerSample]) -> None:
        attributes = {"loadgen.run": self._header.run}
        self._in_flight.set(sum(sample.in_flight for sample in samples.values()), attributes)
        elapsed_ns = max((sample.t_s for sample in samples.values()), default=0.0) * NS_PER_S
        begun = [stage for stage in self._header.stages if stage.start_ns <= elapsed_ns]
        if begun and begun[-1].rate is not None:
            self._offered.set(begun[-1].rate, {**attributes, "loadgen.of": rate_unit(self._header)})
