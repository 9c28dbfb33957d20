"""Measurements for the telemetry a team already has: OpenTelemetry's GenAI conventions, and Prometheus.

Both are observers: `instrument(client, OpenTelemetry())`. Their packages are imported when one is made. Nothing of a
prompt or an answer leaves the process unless `content=True` was said here and `keep_content=True` to the client.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from ..errors import WrongUse
from ..request import NEVER
from .measurement import Measurement

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import TracerProvider
    from prometheus_client import CollectorRegistry

SECONDS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144, 1048576, 4194304, 16777216, 67108864)
TPOT_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
"""Bucket bounds. The first two are those of the conventions; the third begins where fast servers are."""

_OPERATIONS = {"chat": "chat", "completions": "text_completion", "responses": "chat"}


class OpenTelemetry:
    """An observer that reports each call through the user's own providers (by default the global ones).

    Metrics, all histograms: `gen_ai.client.operation.duration` (s), `gen_ai.client.token.usage` ({token}, by
    `gen_ai.token.type`; only counts of the server), `gen_ai.client.operation.time_to_first_chunk` (s) and
    `gen_ai.client.operation.time_per_output_chunk` (s, one value per gap) of streams, and this project's
    `loadgen.client.time_per_output_token` (s), for which the conventions have no client-side name. One span per call,
    kind CLIENT, with the call's own start and end, under the span that was current when it was made. provider: the
    value of `gen_ai.provider.name`; None: from the server's name.

    Source of names, units and buckets: OpenTelemetry semantic conventions for generative AI (status: development).
    Raises WrongUse when opentelemetry-api is not installed.
    """

    def __init__(
        self,
        *,
        meter_provider: MeterProvider | None = None,
        tracer_provider: TracerProvider | None = None,
        provider: str | None = None,
        content: bool = False,
        spans: bool = True,
    ) -> None:
        try:
            from opentelemetry import metrics, trace
        except ImportError:
            raise WrongUse("opentelemetry-api is not installed", "pip install 'loadgen[otel]'") from None
        meter = metrics.get_meter("loadgen_sdk", meter_provider=meter_provider)
        self._trace = trace
        self._tracer = trace.get_tracer("loadgen_sdk", tracer_provider=tracer_provider) if spans else None
        self._provider, self._content = provider, content

        def histogram(name: str, unit: str, description: str, bounds: tuple[float, ...]) -> Any:
            return meter.create_histogram(
                name, unit=unit, description=description, explicit_bucket_boundaries_advisory=bounds
            )

        self._duration = histogram("gen_ai.client.operation.duration", "s", "GenAI operation duration.", SECONDS)
        self._tokens = histogram("gen_ai.client.token.usage", "{token}", "Input and output tokens used.", TOKENS)
        self._first = histogram(
            "gen_ai.client.operation.time_to_first_chunk", "s", "From the request to the first output.", SECONDS
        )
        self._chunk = histogram(
            "gen_ai.client.operation.time_per_output_chunk", "s", "Between successive output events.", SECONDS
        )
        self._tpot = histogram(
            "loadgen.client.time_per_output_token", "s", "Per output token after the first event.", TPOT_SECONDS
        )

    def __call__(self, measurement: Measurement) -> None:
        """Report one call."""
        shared = self._attributes(measurement)
        failure = measurement.failure
        error = {"error.type": _error_type(measurement)} if failure is not None else {}
        self._duration.record((measurement.done - measurement.started) / 1e9, {**shared, **error})
        if measurement.streamed:
            if measurement.ttft_ms is not None:
                self._first.record(measurement.ttft_ms / 1e3, shared)
            for gap in measurement.inter_chunk_ms:
                self._chunk.record(gap / 1e3, shared)
            if measurement.tpot_ms is not None:
                self._tpot.record(measurement.tpot_ms / 1e3, shared)
        if measurement.input_tokens is not None:
            self._tokens.record(measurement.input_tokens, {**shared, "gen_ai.token.type": "input"})
        if measurement.output_tokens is not None and measurement.token_source == "server":
            self._tokens.record(measurement.output_tokens, {**shared, "gen_ai.token.type": "output"})
        if self._tracer is not None:
            self._span(measurement, {**shared, **error})

    def _attributes(self, measurement: Measurement) -> dict[str, Any]:
        host, _, port = measurement.server.rpartition(":")
        attributes: dict[str, Any] = {
            "gen_ai.operation.name": _OPERATIONS[measurement.api],
            "gen_ai.provider.name": self._provider or ("azure.ai.openai" if ".azure.com" in host else "openai"),
        }
        if measurement.model:
            attributes["gen_ai.request.model"] = measurement.model
        if measurement.response_model:
            attributes["gen_ai.response.model"] = measurement.response_model
        if host:
            attributes |= {"server.address": host.strip("[]"), "server.port": int(port)}
        return attributes

    def _span(self, measurement: Measurement, attributes: dict[str, Any]) -> None:
        assert self._tracer is not None
        ttft_ms = measurement.ttft_ms
        first_chunk_s = ttft_ms / 1e3 if ttft_ms is not None and measurement.streamed else None
        optional = {
            "gen_ai.response.id": measurement.response_id,
            "gen_ai.response.finish_reasons": [measurement.finish_reason] if measurement.finish_reason else None,
            "gen_ai.usage.input_tokens": measurement.input_tokens,
            "gen_ai.usage.output_tokens": measurement.output_tokens,
            "gen_ai.usage.cache_read.input_tokens": measurement.cached_tokens,
            "gen_ai.usage.reasoning.output_tokens": measurement.reasoning_tokens,
            "gen_ai.response.time_to_first_chunk": first_chunk_s,
            "http.request.resend_count": measurement.retries or None,
            "loadgen.cost": measurement.cost,
            "loadgen.token_source": measurement.token_source,
        }
        attributes |= {name: value for name, value in optional.items() if value not in (None, "")}
        content = measurement.content
        if self._content and content is not None:
            attributes["gen_ai.input.messages"] = json.dumps(_messages(content.input), default=str)
            output_messages = [{"role": "assistant", "parts": [{"type": "text", "content": content.output}]}]
            attributes["gen_ai.output.messages"] = json.dumps(output_messages)
        started_ns = measurement.started_unix_ns
        name = f"{_OPERATIONS[measurement.api]} {measurement.model}".rstrip()
        span = self._tracer.start_span(
            name, kind=self._trace.SpanKind.CLIENT, attributes=attributes, start_time=started_ns
        )
        if measurement.first_token != NEVER and measurement.streamed:
            span.add_event("first_token", timestamp=started_ns + measurement.first_token - measurement.started)
        for number, attempt in enumerate(measurement.attempts[:-1], 1):
            kind = attempt.failure.kind if attempt.failure is not None else ""
            retry_info: dict[str, Any] = {
                "attempt": number,
                "error.type": kind,
                "waited_s": attempt.waited_ns / 1e9,
            }
            span.add_event("retry", retry_info, timestamp=started_ns + attempt.ended - measurement.started)
        if measurement.status == "failed":
            span.set_status(self._trace.StatusCode.ERROR, _error_type(measurement))  # never the text: it may quote
        span.end(end_time=started_ns + measurement.done - measurement.started)


class Prometheus:
    """An observer that keeps Prometheus metrics, in `registry` or the default one; serve them as you always do.

    `llm_client_requests_total{api,model,status,error}`, `llm_client_duration_seconds`, and of streams
    `llm_client_time_to_first_token_seconds`, `llm_client_time_per_output_token_seconds` (histograms by api and model),
    `llm_client_tokens_total{api,model,type}` (input, output, cached; server's counts), `llm_client_retries_total` and
    `llm_client_cost_total` (in the currency of your prices) by api and model. Make one per registry.
    Raises WrongUse when prometheus-client is not installed.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        try:
            import prometheus_client as client
        except ImportError:
            raise WrongUse("prometheus-client is not installed", "pip install 'loadgen[prometheus]'") from None
        into = client.REGISTRY if registry is None else registry
        labels_by = ("api", "model")

        def counter(name: str, text: str, labels: tuple[str, ...] = labels_by) -> Any:
            return client.Counter(f"llm_client_{name}", text, labels, registry=into)

        def histogram(name: str, text: str, bounds: tuple[float, ...]) -> Any:
            return client.Histogram(f"llm_client_{name}_seconds", text, labels_by, buckets=bounds, registry=into)

        self._requests = counter("requests", "Calls that ended.", (*labels_by, "status", "error"))
        self._tokens = counter("tokens", "Tokens, as the server counts them.", (*labels_by, "type"))
        self._retries = counter("retries", "Attempts after the first.")
        self._cost = counter("cost", "Cost of the calls.")
        self._duration = histogram("duration", "From call to end.", SECONDS)
        self._ttft = histogram("time_to_first_token", "From call to first output, streams.", SECONDS)
        self._tpot = histogram("time_per_output_token", "Per output token after the first, streams.", TPOT_SECONDS)

    def __call__(self, measurement: Measurement) -> None:
        """Count one call."""
        labels_by = (measurement.api, measurement.model)
        error = _error_type(measurement) if measurement.failure is not None else ""
        self._requests.labels(*labels_by, measurement.status, error).inc()
        self._duration.labels(*labels_by).observe((measurement.done - measurement.started) / 1e9)
        if measurement.streamed:
            if measurement.ttft_ms is not None:
                self._ttft.labels(*labels_by).observe(measurement.ttft_ms / 1e3)
            if measurement.tpot_ms is not None:
                self._tpot.labels(*labels_by).observe(measurement.tpot_ms / 1e3)
        counts = [("input", measurement.input_tokens), ("cached", measurement.cached_tokens)]
        if measurement.token_source == "server":
            counts.append(("output", measurement.output_tokens))
        for name, count in counts:
            if count:
                self._tokens.labels(*labels_by, name).inc(count)
        if measurement.retries:
            self._retries.labels(*labels_by).inc(measurement.retries)
        if measurement.cost:
            self._cost.labels(*labels_by).inc(measurement.cost)


def _error_type(measurement: Measurement) -> str:
    """The HTTP status where there is one, else the kind of failure: few values, no text."""
    failure = measurement.failure
    if failure is None:
        return ""
    return str(failure.http_status) if failure.http_status >= 400 else failure.kind


def _messages(input_content: Any) -> list[Any]:
    """What was sent, in the shape of `gen_ai.input.messages`."""
    if isinstance(input_content, str):
        return [{"role": "user", "parts": [{"type": "text", "content": input_content}]}]
    messages = []
    for message in input_content or ():
        if isinstance(message, dict) and isinstance(content := message.get("content"), str):
            parts = [{"type": "text", "content": content}]
            messages.append({"role": message.get("role", ""), "parts": parts})
        else:
            messages.append(message)
    return messages
