"""Exports the metrics of a run to OpenTelemetry by the conventions for GenAI clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
from loadgen.telemetry.otel_requests import (
    SentRequest,
    build_target_attributes,
    iterate_sent_requests,
)
from loadgen.telemetry.prometheus import find_planned_rate, get_rate_unit

EXPORT_INTERVAL_MS = 5_000
NS_PER_S = 1e9


class MetricsSender:
    """Records the metrics of a run and sends them to a collector.

    Args:
        manifest: The manifest of the run.
        resource: The attributes that name this program in every export.
        exporter: Sends metrics to the collector.
        timeout_s: The time limit of one export.
    """

    def __init__(
        self, manifest: RunManifest, resource: Resource, exporter: MetricExporter, timeout_s: float
    ) -> None:
        """Create the instruments: histograms of latencies and tokens, and gauges of the load."""
        self._manifest = manifest
        self._timeout_ms = timeout_s * 1e3
        self._target_attributes = [
            build_target_attributes(manifest, target) for target in range(len(manifest.targets))
        ]
        reader = PeriodicExportingMetricReader(
            exporter,
            export_interval_millis=EXPORT_INTERVAL_MS,
            export_timeout_millis=self._timeout_ms,
        )

        # `close` shuts the provider down with a time limit, so it is not done once more at exit.
        self._provider = MeterProvider([reader], resource, shutdown_on_exit=False)
        self._meter = self._provider.get_meter("loadgen", manifest.version, SCHEMA_URL)
        self._duration = self._create_histogram("gen_ai.client.operation.duration")
        self._ttft = self._create_histogram("gen_ai.client.operation.time_to_first_chunk")
        self._tokens = self._create_histogram(
            "gen_ai.client.token.usage", unit="{token}", bounds=TOKEN_BOUNDS
        )
        self._tpot = self._create_histogram(
            "loadgen.client.time_per_output_token", bounds=TPOT_BOUNDS_S
        )
        self._send_lag = self._create_histogram("loadgen.send_lag")
        self._in_flight = self._meter.create_gauge("loadgen.in_flight", unit="{request}")
        self._offered = self._meter.create_gauge("loadgen.offered", unit="{start}/s")

    def record(self, records: Sequence[Columns], samples: Mapping[int, WorkerSample]) -> None:
        """Record new requests, and the load by the latest sample of each worker.

        Args:
            records: Records of requests that were not recorded before.
            samples: The latest sample by worker.
        """
        for columns in records:
            for request in iterate_sent_requests(columns):
                self._record_request(request)
        self._record_load(samples)

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown(self._timeout_ms)

    def _create_histogram(
        self, name: str, unit: str = "s", bounds: Sequence[float] = DURATION_BOUNDS_S
    ) -> Histogram:
        """Create a histogram. Most measure times, so that is the default of unit and buckets."""
        return self._meter.create_histogram(name, unit, explicit_bucket_boundaries_advisory=bounds)

    def _record_request(self, request: SentRequest) -> None:
        """Record the latencies and the token counts of one request in the histograms.

        A failed request has a duration with the type of its error, and no latencies. Output tokens
        are recorded only if the server counted them, because an estimate would look exact there.
        """
        attributes = self._target_attributes[request.target]

        # A duration is from sending the request to the end of its response. The send lag is how
        # much later than scheduled the request was sent.
        # The times come from different sources (the kernel, the schedule, this process), so a
        # difference can be slightly negative, which a histogram does not accept.
        duration_s = max(request.done_ns - request.sent_ns, 0) / NS_PER_S
        send_lag_s = max(request.sent_ns - request.due_ns, 0) / NS_PER_S
        self._send_lag.record(send_lag_s, attributes)

        if request.error:
            self._duration.record(duration_s, {**attributes, "error.type": request.error})
            return

        self._duration.record(duration_s, attributes)
        if request.ttft != UNDEFINED and self._manifest.stream:
            self._ttft.record((request.first_token_ns - request.sent_ns) / NS_PER_S, attributes)

        if request.tpot != UNDEFINED:
            self._tpot.record(request.tpot / NS_PER_S, attributes)

        if request.input_tokens >= 0:  # -1 means that the server did not count them.
            self._tokens.record(request.input_tokens, {**attributes, "gen_ai.token.type": "input"})

        if request.output_tokens >= 0 and SOURCES[request.output_source] == "server":
            self._tokens.record(
                request.output_tokens, {**attributes, "gen_ai.token.type": "output"}
            )

    def _record_load(self, samples: Mapping[int, WorkerSample]) -> None:
        """Record the requests in flight, and the planned rate of the current stage if it has one.

        The time of the run is that of the latest sample, because this process has no other clock of
        the run.
        """
        attributes = {"loadgen.run": self._manifest.run}
        in_flight = sum(sample.in_flight for sample in samples.values())
        self._in_flight.set(in_flight, attributes)
        elapsed_ns = max((sample.t_s for sample in samples.values()), default=0.0) * NS_PER_S

        planned_rate_per_s = find_planned_rate(self._manifest, elapsed_ns)
        if planned_rate_per_s is not None:
            rate_attributes = {**attributes, "loadgen.of": get_rate_unit(self._manifest)}
            self._offered.set(planned_rate_per_s, rate_attributes)
