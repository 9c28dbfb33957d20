"""Exports requests as OpenTelemetry spans, in the traces that they carried to the server."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import Any

from loadgen_sdk.app.agent_spans import SCHEMA_URL
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from loadgen.core.metrics.columns import Columns
from loadgen.core.requests.trace_context import TraceContext
from loadgen.core.results.manifest import RunManifest
from loadgen.core.results.record import FINISH_REASONS
from loadgen.telemetry.otel_requests import (
    SentRequest,
    build_target_attributes,
    get_operation_name,
    iterate_sent_requests,
)

SPANS_PER_EXPORT = 512
NS_PER_MS = 1e6


class SpanSender:
    """Sends the spans of a run to a collector, one span for each request.

    The id of a request's trace follows from the run and the slot of the request, as in the header
    that the request carried to the server. Spans of the server are therefore in the same trace.

    Args:
        manifest: The manifest of the run.
        resource: The attributes that name this program in every export.
        start_unix_ns: The wall-clock time at which the load began. Times of records count from it.
        exporter: Sends spans to the collector.

    Attributes:
        lost: The number of spans that could not be delivered.
    """

    def __init__(
        self, manifest: RunManifest, resource: Resource, start_unix_ns: int, exporter: SpanExporter
    ) -> None:
        """Prepare what the spans of all requests share. Nothing is sent yet."""
        self._manifest = manifest
        self._resource = resource
        self._start_unix_ns = start_unix_ns
        self._exporter = exporter
        self._operation = get_operation_name(manifest)
        self._trace = TraceContext(manifest.run)
        self._scope = InstrumentationScope("loadgen", manifest.version, SCHEMA_URL)
        self.lost = 0

    def send(self, records: Sequence[Columns]) -> None:
        """Send spans for records, in batches that fit in one export request of a collector."""
        spans = chain.from_iterable(map(self.spans, records))
        while batch := list(islice(spans, SPANS_PER_EXPORT)):
            if self._exporter.export(batch) is not SpanExportResult.SUCCESS:
                self.lost += len(batch)

    def spans(self, columns: Columns) -> Iterator[ReadableSpan]:
        """Yield a span for each request that was sent, from its first byte to its last."""
        for request in iterate_sent_requests(columns):
            yield self._create_span(request)

    def _create_span(self, request: SentRequest) -> ReadableSpan:
        """Return the span of a request that has ended, with the first token as an event.

        A tracer of OpenTelemetry would start the span now and choose its ids. This span was in the
        past, and its ids were already sent to the server with the request, so it is constructed
        directly.
        """
        attributes = self._build_attributes(request)
        events = []
        if request.first_token_ns >= 0:
            timestamp = self._start_unix_ns + request.first_token_ns
            events.append(Event("first token", timestamp=timestamp))

        return ReadableSpan(
            name=f"{self._operation} {attributes['gen_ai.request.model']}",
            context=SpanContext(
                self._trace.trace_id(request.slot),
                self._trace.span_id(request.slot),
                is_remote=False,
                trace_flags=TraceFlags(TraceFlags.SAMPLED),
            ),
            kind=SpanKind.CLIENT,
            resource=self._resource,
            instrumentation_scope=self._scope,
            attributes=attributes,
            events=events,
            start_time=self._start_unix_ns + request.sent_ns,
            end_time=self._start_unix_ns + max(request.done_ns, request.sent_ns),
            status=Status(StatusCode.ERROR if request.error else StatusCode.UNSET),
        )

    def _build_attributes(self, request: SentRequest) -> dict[str, Any]:
        """Return the attributes of the span of a request, by the GenAI conventions.

        Attributes whose values are not known are left out. `loadgen.slot` is the number of the
        request in the run, which its record has too.
        """
        attributes = build_target_attributes(self._manifest, request.target)
        attributes["loadgen.slot"] = request.slot
        attributes["loadgen.due_ms"] = request.due_ns / NS_PER_MS
        attributes["loadgen.send_lag_ms"] = (request.sent_ns - request.due_ns) / NS_PER_MS

        token_counts = {
            "gen_ai.usage.input_tokens": request.input_tokens,
            "gen_ai.usage.output_tokens": request.output_tokens,
            "gen_ai.usage.cache_read.input_tokens": request.cached_tokens,
        }
        for name, count in token_counts.items():
            is_reported = count >= 0  # The server did not report a count of -1.
            if is_reported:
                attributes[name] = count

        finish_reason = FINISH_REASONS[request.finish_reason]
        if finish_reason:
            attributes["gen_ai.response.finish_reasons"] = (finish_reason,)

        if request.http_status:
            attributes["http.response.status_code"] = request.http_status

        if request.error:
            attributes["error.type"] = request.error

        return attributes
