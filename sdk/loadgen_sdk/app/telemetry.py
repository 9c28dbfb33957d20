"""Measurements for the telemetry a team already has: OpenTelemetry's GenAI conventions, and
Prometheus.

Both are observers: `instrument(client, OpenTelemetry())`. Their packages are imported when one is
made. Nothing of a prompt or an answer leaves the process unless `content=True` was said here and
`keep_content=True` to the client.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import measures
from ..errors import WrongUse
from ..request import NEVER
from ..version import __version__
from .agent_spans import (
    AGENT,
    OPERATIONS,
    SCHEMA_URL,
    SECONDS,
    TOOL,
    WORKFLOW,
    Operation,
    operation_span,
)
from .backlog import MOST_UNCOUNTED, Backlog
from .finishing import flush
from .measurement import Choice, Measurement

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import TracerProvider
    from prometheus_client import CollectorRegistry

    from .call import Call

log = logging.getLogger("loadgen_sdk")

TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144, 1048576, 4194304, 16777216, 67108864)
TPOT_SECONDS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1.0,
    2.5,
)
"""Bucket bounds. The first are those of the conventions; the second begin where fast servers are.
"""

_OPERATIONS = {
    "chat": "chat",
    "completions": "text_completion",
    "responses": "chat",
    "messages": "chat",
    "embeddings": "embeddings",
    "batches": "batches",
    "images": "generate_content",
    "speech": "generate_content",
    "transcriptions": "generate_content",
}
_PARAMETERS = {
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "max_tokens": "gen_ai.request.max_tokens",
    "max_completion_tokens": "gen_ai.request.max_tokens",
    "max_output_tokens": "gen_ai.request.max_tokens",
    "seed": "gen_ai.request.seed",
    "n": "gen_ai.request.choice.count",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
    "presence_penalty": "gen_ai.request.presence_penalty",
}


class OpenTelemetry:
    """An observer that reports each call through the user's own providers (by default the global
    ones).

    Metrics, all histograms: `gen_ai.client.operation.duration` (s), `gen_ai.client.token.usage`
    ({token}, by `gen_ai.token.type`; only counts of the server),
    `gen_ai.client.operation.time_to_first_chunk` (s, from the last attempt's start) of streams,
    and this project's `loadgen.client.time_per_output_token` (s), for which the conventions have
    no client-side name. chunks: also `gen_ai.client.operation.time_per_output_chunk` (s, one value
    per gap: thousands for a long answer), recorded in a background thread; `flush` waits for it.
    One span per call, kind CLIENT, with the call's own start and end, under the span that was
    current when it was made, and current itself while the request is sent. provider: the value of
    `gen_ai.provider.name`; None: from the server's name. metric_labels: the labels of a call that
    metrics carry too (few values!); spans carry all as `loadgen.label.NAME`.

    Source of names, units and buckets: OpenTelemetry semantic conventions for generative AI
    (status: development). Raises WrongUse when opentelemetry-api is not installed.
    """

    def __init__(
        self,
        *,
        meter_provider: MeterProvider | None = None,
        tracer_provider: TracerProvider | None = None,
        provider: str | None = None,
        content: bool = False,
        spans: bool = True,
        chunks: bool = False,
        metric_labels: Sequence[str] = (),
    ) -> None:
        try:
            from opentelemetry import context, metrics, trace
        except ImportError:
            raise WrongUse(
                "not_installed",
                "opentelemetry-api is not installed",
                "pip install opentelemetry-api",
            ) from None
        meter = metrics.get_meter("loadgen_sdk", __version__, meter_provider, SCHEMA_URL)
        self._trace, self._context = trace, context
        self._tracer = (
            trace.get_tracer("loadgen_sdk", __version__, tracer_provider, SCHEMA_URL)
            if spans
            else None
        )
        self._provider, self._content = provider, content
        self._said: set[str] = set()  # of other instrumentations
        self._metric_labels = _label_names(metric_labels, "metric_labels")

        def histogram(name: str, unit: str, description: str, bounds: tuple[float, ...]) -> Any:
            return meter.create_histogram(
                name, unit=unit, description=description, explicit_bucket_boundaries_advisory=bounds
            )

        operation = "gen_ai.client.operation"
        self._duration = histogram(
            f"{operation}.duration", "s", "GenAI operation duration.", SECONDS
        )
        self._tokens = histogram(
            "gen_ai.client.token.usage", "{token}", "Input and output tokens used.", TOKENS
        )
        first_text, gap_text = (
            "From the request to the first output.",
            "Between successive output events.",
        )
        self._first = histogram(f"{operation}.time_to_first_chunk", "s", first_text, SECONDS)
        self._chunk = (
            histogram(f"{operation}.time_per_output_chunk", "s", gap_text, SECONDS)
            if chunks
            else None
        )
        self._tpot = histogram(
            "loadgen.client.time_per_output_token",
            "s",
            "Per output token after the first event.",
            TPOT_SECONDS,
        )
        self._backlog = Backlog(self._count)
        # It has no value: a reader asks observable instruments first, and this one counts what is
        # not counted yet.
        meter.create_observable_counter(
            "loadgen.client.uncounted", callbacks=[self._before_reading]
        )
        self._durations = {
            one.name: histogram(one.metric, "s", f"Duration of {one.name}.", one.bounds)
            for one in OPERATIONS
        }

    def workflow(self, name: str) -> AbstractContextManager[Any]:
        """`with telemetry.workflow("checkout"):` a span `invoke_workflow NAME` around several
        agents and calls.
        """
        return self._around(WORKFLOW, name, {})

    def agent(
        self,
        name: str,
        *,
        id: str | None = None,
        conversation: str | None = None,
        model: str | None = None,
    ) -> AbstractContextManager[Any]:
        """`with telemetry.agent("planner"):` a span `invoke_agent NAME` around the calls and tools
        of an agent that runs in this process.
        """
        more = {
            "gen_ai.agent.id": id,
            "gen_ai.conversation.id": conversation,
            "gen_ai.request.model": model,
        }
        return self._around(AGENT, name, {**more, "gen_ai.provider.name": self._provider})

    def tool(
        self, name: str, *, call_id: str | None = None, type: str = "function"
    ) -> AbstractContextManager[Any]:
        """`with telemetry.tool("search", call_id=call.id):` a span `execute_tool NAME` around a
        tool that an answer asked for. Its arguments and its result are not written.
        """
        return self._around(TOOL, name, {"gen_ai.tool.call.id": call_id, "gen_ai.tool.type": type})

    def _around(
        self, operation: Operation, name: str, attributes: dict[str, Any]
    ) -> AbstractContextManager[Any]:
        """What these three give yields the span, for attributes of one's own.

        An exception goes through: the span has its class, never its text.
        """
        return operation_span(
            self._trace, self._tracer, self._durations, operation, name, attributes
        )

    def begin_call(self, call: Call) -> CallSpan | None:
        """Start the span of a call. What is returned comes back to `__call__`."""
        if (other := _other_instrumentation(call.settings.package)) is not None:
            if other not in self._said:
                self._said.add(other)
                log.warning(
                    "%s reports the calls of %s: OpenTelemetry() of loadgen_sdk leaves them to it",
                    other,
                    call.settings.package,
                )
            return CallSpan()
        if self._tracer is None:
            return None
        attributes = self._attributes(call)
        if call.streamed:
            attributes["gen_ai.request.stream"] = True
        for name, value in call.parameters.items():
            attributes[_PARAMETERS[name]] = value
        for name, label in call.labels.items():
            attributes[f"loadgen.label.{name}"] = label
        span = self._tracer.start_span(
            f"{_OPERATIONS[call.api]} {call.model}".rstrip(),
            kind=self._trace.SpanKind.CLIENT,
            attributes=attributes,
            start_time=call.started_unix_ns,
        )
        return CallSpan(span, self._trace, self._context)

    def __call__(self, measurement: Measurement, call_span: CallSpan | None = None) -> None:
        """Report one call, unless another instrumentation does: its span now, its metrics in the
        background.
        """
        if call_span is None:
            self._backlog.add((measurement, self._context.get_current()))
        elif call_span.span is not None:
            self._backlog.add((measurement, self._context.get_current()))
            self._end_span(measurement, call_span.span)

    def _before_reading(self, options: object) -> Sequence[Any]:
        self._backlog.count_all()
        return ()

    def _count(self, ended: tuple[Measurement, Any]) -> None:
        measurement, context = ended
        shared = self._attributes(measurement)
        if measurement.response_model:
            shared["gen_ai.response.model"] = measurement.response_model
        for name in self._metric_labels:
            if name in measurement.labels:
                shared[f"loadgen.label.{name}"] = measurement.labels[name]
        seconds = (measurement.done - measurement.started) / 1e9
        self._duration.record(seconds, {**shared, **_error(measurement)}, context)
        if measurement.streamed:
            if measurement.ttft_from_sent_ms is not None:
                self._first.record(measurement.ttft_from_sent_ms / 1e3, shared, context)
            if self._chunk is not None:
                for gap in measures.gaps(measurement.instants):
                    self._chunk.record(gap / 1e9, shared, context)
            if measurement.tpot_ms is not None:
                self._tpot.record(measurement.tpot_ms / 1e3, shared, context)
        if measurement.input_tokens is not None:
            self._tokens.record(
                measurement.input_tokens, {**shared, "gen_ai.token.type": "input"}, context
            )
        if measurement.output_tokens and measurement.token_source == "server":
            self._tokens.record(
                measurement.output_tokens, {**shared, "gen_ai.token.type": "output"}, context
            )

    def flush(self, timeout_s: float = 5.0) -> bool:
        """Count every call that has ended, and wait for what the background thread has begun.

        False: it took longer.
        """
        self._backlog.count_all()
        return flush(timeout_s)

    def _attributes(self, call: Call | Measurement) -> dict[str, Any]:
        host, _, port = call.server.rpartition(":")
        named = (
            "anthropic"
            if call.api == "messages"
            else "azure.ai.openai"
            if ".azure.com" in host
            else "openai"
        )
        attributes: dict[str, Any] = {
            "gen_ai.operation.name": _OPERATIONS[call.api],
            "gen_ai.provider.name": self._provider or named,
        }
        if call.model:
            attributes["gen_ai.request.model"] = call.model
        if host:
            attributes |= {"server.address": host.strip("[]"), "server.port": int(port)}
        return attributes

    def _end_span(self, measurement: Measurement, span: Any) -> None:
        first_chunk_ms = measurement.ttft_from_sent_ms if measurement.streamed else None
        content = measurement.content
        reasons = (
            [choice.finish_reason for choice in content.choices if choice.finish_reason]
            if content
            else []
        )
        reasons = reasons or ([measurement.finish_reason] if measurement.finish_reason else [])
        optional = {
            "gen_ai.response.model": measurement.response_model,
            "gen_ai.response.id": measurement.response_id,
            "gen_ai.response.finish_reasons": reasons or None,
            "gen_ai.usage.input_tokens": measurement.input_tokens,
            "gen_ai.usage.output_tokens": measurement.output_tokens,
            "gen_ai.usage.cache_read.input_tokens": measurement.cached_tokens,
            "gen_ai.usage.cache_creation.input_tokens": measurement.cache_written_tokens,
            "gen_ai.usage.reasoning.output_tokens": measurement.reasoning_tokens,
            "gen_ai.response.time_to_first_chunk": None
            if first_chunk_ms is None
            else first_chunk_ms / 1e3,
            "http.request.resend_count": measurement.retries or None,
            "loadgen.wait_s": None if measurement.wait_ms is None else measurement.wait_ms / 1e3,
            "loadgen.cost": measurement.cost,
            "loadgen.token_source": measurement.token_source,
        }
        attributes = {
            **_error(measurement),
            **{name: value for name, value in optional.items() if value not in (None, "")},
        }
        if self._content and content is not None:
            attributes["gen_ai.input.messages"] = json.dumps(_messages(content.input), default=str)
            attributes["gen_ai.output.messages"] = json.dumps(
                [_output_message(choice) for choice in content.choices]
            )
        span.set_attributes(attributes)
        started_ns = measurement.started_unix_ns
        if measurement.first_token != NEVER and measurement.streamed:
            span.add_event(
                "first_token", timestamp=started_ns + measurement.first_token - measurement.started
            )
        for number, attempt in enumerate(measurement.attempts[:-1], 1):
            kind = attempt.failure.kind if attempt.failure is not None else ""
            retry_info = {
                "attempt": number,
                "error.type": kind,
                "waited_s": attempt.waited_ms / 1e3,
            }
            span.add_event(
                "retry", retry_info, timestamp=started_ns + attempt.ended - measurement.started
            )
        if measurement.status == "failed":
            span.set_status(
                self._trace.StatusCode.ERROR, _error_type(measurement)
            )  # never the text: it may quote
        span.end(started_ns + measurement.done - measurement.started)


_OTHERS = {
    "openai": (
        ("opentelemetry.instrumentation.openai", "OpenAIInstrumentor"),  # OpenLLMetry
        ("opentelemetry.instrumentation.openai_v2", "OpenAIInstrumentor"),
        ("openinference.instrumentation.openai", "OpenAIInstrumentor"),
    ),
    "anthropic": (
        ("opentelemetry.instrumentation.anthropic", "AnthropicInstrumentor"),
        ("openinference.instrumentation.anthropic", "AnthropicInstrumentor"),
    ),
    "litellm": (("openinference.instrumentation.litellm", "LiteLLMInstrumentor"),),
}
"""Other instrumentations of a package: module and class.

Each has one object, which knows whether it is active.
"""


def _other_instrumentation(package: str) -> str | None:
    for name, kind in _OTHERS.get(package, ()):
        one = getattr(getattr(sys.modules.get(name), kind, None), "_instance", None)
        if getattr(one, "_is_instrumented_by_opentelemetry", False):
            return name
    return None


class CallSpan(NamedTuple):
    """The span of a call while it runs. No span: another instrumentation reports the call."""

    span: Any = None
    trace: Any = None
    context: Any = None

    def current(self) -> AbstractContextManager[Any]:
        """Makes the span the current one."""
        return nullcontext() if self.span is None else _Current(self)


class _Current:
    """As `trace.use_span` without its options, which cost half as much as the span."""

    def __init__(self, call_span: CallSpan) -> None:
        self._of = call_span

    def __enter__(self) -> None:
        of = self._of
        self._token = of.context.attach(of.trace.set_span_in_context(of.span))

    def __exit__(self, *error: object) -> None:
        self._of.context.detach(self._token)


def _label_names(names: Sequence[str], what: str) -> tuple[str, ...]:
    if isinstance(names, str) or not all(
        isinstance(name, str) and name.isidentifier() for name in names
    ):
        raise WrongUse(
            "wrong_type", f"{what}={names!r}", f'give the names of labels: {what}=("feature",)'
        )
    return tuple(names)


def _output_message(choice: Choice) -> dict[str, Any]:
    """One answer, in the shape of `gen_ai.output.messages`."""
    parts: list[dict[str, Any]] = [{"type": "text", "content": choice.text}] if choice.text else []
    parts += ({"type": "tool_call", **tool} for tool in choice.tool_calls)
    return {"role": "assistant", "parts": parts, "finish_reason": choice.finish_reason}


class Prometheus:
    """An observer that keeps Prometheus metrics, in `registry` or the default one; serve them as
    you always do.

    `llm_client_requests_total{api,model,status,error}`, `llm_client_duration_seconds`, and of
    streams `llm_client_time_to_first_token_seconds`, `llm_client_time_per_output_token_seconds`
    (histograms by api and model), `llm_client_tokens_total{api,model,type}` (input, output,
    cached, cache_written; server's counts), `llm_client_retries_total` and `llm_client_cost_total`
    (in the currency of your prices) by api and model. Make one per registry. labels: names of
    labels of calls (see `labelled`) that become labels of every metric: those with few values.

    A call is counted in the background, or when the registry is read, whichever is first: what is
    read is exact. With PROMETHEUS_MULTIPROC_DIR, where another process reads, the background
    thread counts each call at once. Raises WrongUse when prometheus-client is not installed.
    """

    def __init__(
        self, registry: CollectorRegistry | None = None, *, labels: Sequence[str] = ()
    ) -> None:
        try:
            import prometheus_client as client
        except ImportError:
            raise WrongUse(
                "not_installed",
                "prometheus-client is not installed",
                "pip install prometheus-client",
            ) from None
        self._labels = _label_names(labels, "labels")
        labels_by = ("api", "model", *self._labels)
        self._metrics: list[Any] = []

        def counter(name: str, text: str, labels: tuple[str, ...] = labels_by) -> Any:
            self._metrics.append(client.Counter(f"llm_client_{name}", text, labels, registry=None))
            return self._metrics[-1]

        def histogram(name: str, text: str, bounds: tuple[float, ...]) -> Any:
            name = f"llm_client_{name}_seconds"
            self._metrics.append(
                client.Histogram(name, text, labels_by, buckets=bounds, registry=None)
            )
            return self._metrics[-1]

        self._requests = counter("requests", "Calls that ended.", (*labels_by, "status", "error"))
        self._tokens = counter("tokens", "Tokens, as the server counts them.", (*labels_by, "type"))
        self._retries = counter("retries", "Attempts after the first.")
        self._cost = counter("cost", "Cost of the calls.")
        self._duration = histogram("duration", "From call to end.", SECONDS)
        self._ttft = histogram(
            "time_to_first_token", "From call to first output, streams.", SECONDS
        )
        self._tpot = histogram(
            "time_per_output_token", "Per output token after the first, streams.", TPOT_SECONDS
        )
        most = 1 if "PROMETHEUS_MULTIPROC_DIR" in os.environ else MOST_UNCOUNTED
        self._backlog = Backlog(self._count, most)
        (client.REGISTRY if registry is None else registry).register(self)

    def __call__(self, measurement: Measurement) -> None:
        """Keep one call, to be counted."""
        self._backlog.add(measurement)

    def describe(self) -> Iterator[Any]:
        """For the registry: the names of the metrics."""
        for metric in self._metrics:
            yield from metric.describe()

    def collect(self) -> Iterator[Any]:
        """For the registry: the metrics, with every call that has ended."""
        self._backlog.count_all()
        for metric in self._metrics:
            yield from metric.collect()

    def _count(self, measurement: Measurement) -> None:
        labels_by = (
            measurement.api,
            measurement.model,
            *(measurement.labels.get(name, "") for name in self._labels),
        )
        series = _series
        series(self._requests, *labels_by, measurement.status, _error_type(measurement)).inc()
        series(self._duration, *labels_by).observe((measurement.done - measurement.started) / 1e9)
        if measurement.streamed:
            for histogram, ms in (
                (self._ttft, measurement.ttft_ms),
                (self._tpot, measurement.tpot_ms),
            ):
                if ms is not None:
                    series(histogram, *labels_by).observe(ms / 1e3)
        output = measurement.output_tokens if measurement.token_source == "server" else None
        for kind, tokens in (
            ("input", measurement.input_tokens),
            ("cached", measurement.cached_tokens),
            ("cache_written", measurement.cache_written_tokens),
            ("output", output),
        ):
            if tokens:
                series(self._tokens, *labels_by, kind).inc(tokens)
        if measurement.retries:
            series(self._retries, *labels_by).inc(measurement.retries)
        if measurement.cost:
            series(self._cost, *labels_by).inc(measurement.cost)


@lru_cache(maxsize=4096)
def _series(metric: Any, *values: str) -> Any:
    """The series of a metric with these labels.

    Cached: the package's own look-up costs more than the counting.
    """
    return metric.labels(*values)


def _error(measurement: Measurement) -> dict[str, str]:
    return {} if measurement.failure is None else {"error.type": _error_type(measurement)}


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
    return [
        {"role": message.get("role", ""), "parts": [{"type": "text", "content": content}]}
        if isinstance(message, dict) and isinstance(content := message.get("content"), str)
        else message
        for message in input_content or ()
    ]
