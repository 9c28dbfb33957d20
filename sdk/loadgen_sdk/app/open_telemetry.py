"""An observer that reports calls by OpenTelemetry's semantic conventions for generative AI.

Nothing of a prompt or a completion leaves the process, unless both `content=True` here and
`keep_content=True` of the client request it.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import measures
from ..errors import WrongUse
from ..request import NEVER
from ..version import __version__
from .agent_spans import AGENT, OPERATIONS, SCHEMA_URL, TOOL, WORKFLOW, OperationRecorder
from .background import flush
from .backlog import Backlog
from .measurement import Choice, Measurement
from .metric_labels import (
    DURATION_BOUNDS_S,
    TPOT_BOUNDS_S,
    error_type_of,
    validate_label_names,
)

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import TracerProvider

    from .call import Call

log = logging.getLogger("loadgen_sdk")

TOKEN_BOUNDS = (
    1,
    4,
    16,
    64,
    256,
    1024,
    4096,
    16384,
    65536,
    262144,
    1048576,
    4194304,
    16777216,
    67108864,
)
"""The bucket bounds of token counts in the conventions."""

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
"""API -> the value of `gen_ai.operation.name`."""

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
"""Parameter of a request -> the name of its attribute."""

_OTHER_INSTRUMENTATIONS = {
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
"""Package -> the modules and classes of other instrumentations of it.

Each class has one instance, which knows whether it is active.
"""


class CallSpan(NamedTuple):
    """The span of a call while it runs.

    Without a span, another instrumentation reports the call.
    """

    span: Any = None
    trace: Any = None
    context: Any = None

    def current(self) -> AbstractContextManager[Any]:
        """Return a context in which the span is the current one."""
        return nullcontext() if self.span is None else _CurrentSpan(self)


class _CurrentSpan:
    """Makes a span the current one, like `trace.use_span`.

    The options of that function would cost half as much as the span.
    """

    def __init__(self, call_span: CallSpan) -> None:
        self._call_span = call_span

    def __enter__(self) -> None:
        span, trace, context = self._call_span
        self._token = context.attach(trace.set_span_in_context(span))

    def __exit__(self, *error: object) -> None:
        self._call_span.context.detach(self._token)


class _EndedCall(NamedTuple):
    """A call whose metrics are to be recorded.

    Attributes:
        measurement: Its measurement.
        context: The context of OpenTelemetry in which it ended.
    """

    measurement: Measurement
    context: Any


class OpenTelemetry:
    """An observer that reports each call through the providers of the application.

    Metrics, all of them histograms:

    - `gen_ai.client.operation.duration` in s
    - `gen_ai.client.token.usage` in {token}, by `gen_ai.token.type`, with the counts of the server
      only
    - `gen_ai.client.operation.time_to_first_chunk` in s, of streams, from the start of the last
      attempt
    - `gen_ai.client.operation.time_per_output_chunk` in s, if `chunks` is set
    - `loadgen.client.time_per_output_token` in s, for which the conventions have no name

    Each call has a span of kind CLIENT with its own start and end, under the span that was current
    when the call was made. It is current itself while the request is sent.

    The conventions have the status "development".
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
        """Create the tracer and the instruments (the histograms of the metrics).

        Args:
            meter_provider: The provider of meters, or None for the global one.
            tracer_provider: The provider of tracers, or None for the global one.
            provider: The value of `gen_ai.provider.name`, or None to take it from the server's
                name.
            content: Whether spans contain the messages of calls, if the client keeps them.
            spans: Whether each call gets a span.
            chunks: Whether each gap between output events is recorded, of which a call may have
                thousands. That happens in a background thread, and `flush` waits for it.
            metric_labels: The names of the labels that become attributes of the metrics. Each of
                them should have few values. Spans have all labels as `loadgen.label.NAME`.

        Raises:
            WrongUse: opentelemetry-api is not installed, or the names of labels are not valid.
        """
        try:
            from opentelemetry import context, metrics, trace
        except ImportError:
            raise WrongUse(
                "not_installed",
                "opentelemetry-api is not installed",
                "pip install opentelemetry-api",
            ) from None

        self._trace = trace
        self._context = context
        self._provider = provider
        self._keeps_content = content
        self._metric_labels = validate_label_names(metric_labels, "metric_labels")
        self._reported_instrumentations: set[str] = set()

        self._tracer: Any = None
        if spans:
            self._tracer = trace.get_tracer("loadgen_sdk", __version__, tracer_provider, SCHEMA_URL)

        meter = metrics.get_meter("loadgen_sdk", __version__, meter_provider, SCHEMA_URL)
        self._create_call_instruments(meter, has_chunk_gaps=chunks)
        self._operations = self._create_operation_recorder(meter)

        # Calls that have ended wait here, because recording them takes too long for a call of the
        # application. It happens in the background, and before somebody reads the metrics.
        self._backlog = Backlog(self._record_metrics)
        self._process_backlog_at_each_collection(meter)

    def workflow(self, name: str) -> AbstractContextManager[Any]:
        """Return a context with a span `invoke_workflow NAME`, for several agents and calls.

        The context yields the span. An exception passes through: the span gets its class, and
        never its text.
        """
        return self._operations.record(WORKFLOW, name, {})

    def agent(
        self,
        name: str,
        *,
        id: str | None = None,
        conversation: str | None = None,
        model: str | None = None,
    ) -> AbstractContextManager[Any]:
        """Return a context with a span `invoke_agent NAME`, for the calls and tools of an agent."""
        attributes = {
            "gen_ai.agent.id": id,
            "gen_ai.conversation.id": conversation,
            "gen_ai.request.model": model,
            "gen_ai.provider.name": self._provider,
        }
        return self._operations.record(AGENT, name, attributes)

    def tool(
        self, name: str, *, call_id: str | None = None, type: str = "function"
    ) -> AbstractContextManager[Any]:
        """Return a context with a span `execute_tool NAME`, for a tool that a completion requested.

        The arguments of the tool and its result are not recorded.
        """
        attributes = {"gen_ai.tool.call.id": call_id, "gen_ai.tool.type": type}
        return self._operations.record(TOOL, name, attributes)

    def begin_call(self, call: Call) -> CallSpan | None:
        """Start the span of a call, and return it.

        The policy of the client calls this when a call starts, and passes the returned value to
        `__call__` when it ends.

        Returns:
            The span. An empty CallSpan if another instrumentation reports the call, so that
            `__call__` does nothing. None if calls have metrics but no spans.
        """
        other_instrumentation = _active_instrumentation(call.settings.package)
        if other_instrumentation:
            self._log_other_instrumentation(other_instrumentation, call.settings.package)
            return CallSpan()

        if self._tracer is None:
            return None

        span_name = f"{_OPERATIONS[call.api]} {call.model}".rstrip()
        span = self._tracer.start_span(
            span_name,
            kind=self._trace.SpanKind.CLIENT,
            attributes=self._span_attributes(call),
            start_time=call.started_unix_ns,
        )
        return CallSpan(span, self._trace, self._context)

    def _span_attributes(self, call: Call) -> dict[str, Any]:
        """Return the attributes of the span of a call, with its request parameters and labels."""
        attributes = self._call_attributes(call)
        if call.is_streamed:
            attributes["gen_ai.request.stream"] = True

        for name, value in call.parameters.items():
            attributes[_PARAMETERS[name]] = value

        for name, label in call.labels.items():
            attributes[f"loadgen.label.{name}"] = label

        return attributes

    def __call__(self, measurement: Measurement, call_span: CallSpan | None = None) -> None:
        """Report a call that has ended: its span ends now, and metrics follow in the background.

        Args:
            measurement: The measurement of the call.
            call_span: The result of `begin_call` for this call. It has one of three forms: a
                CallSpan with a span to end, None for a call with metrics but without a span, and
                an empty CallSpan for a call that another instrumentation reports.
        """
        is_reported_elsewhere = call_span is not None and call_span.span is None
        if is_reported_elsewhere:
            return
        opentelemetry_context = self._context.get_current()
        self._backlog.add(_EndedCall(measurement, opentelemetry_context))
        if call_span is not None:
            self._end_span(measurement, call_span.span)

    def flush(self, timeout_s: float = 5.0) -> bool:
        """Record every call that has ended. Return False if that takes longer than `timeout_s`."""
        self._backlog.process_all()
        return flush(timeout_s)

    def _process_backlog_at_each_collection(self, meter: Any) -> None:
        """Record all calls that have ended whenever OpenTelemetry collects the metrics.

        Otherwise the collected metrics would lack the calls that still wait in the backlog.
        OpenTelemetry has no hook for that. But it calls the callbacks of observable instruments
        before it collects the other ones. The counter that is created here never has a value: it
        exists only for its callback.
        """

        def process_backlog(_options: object) -> Sequence[Any]:
            self._backlog.process_all()
            return ()  # no value of the counter

        meter.create_observable_counter("loadgen.client.uncounted", callbacks=[process_backlog])

    def _create_call_instruments(self, meter: Any, *, has_chunk_gaps: bool) -> None:
        """Create the histograms of calls, as the semantic conventions name and divide them.

        `has_chunk_gaps` says whether the gaps between output events get a histogram.
        """
        self._duration_histogram = _create_histogram(
            meter,
            "gen_ai.client.operation.duration",
            unit="s",
            description="GenAI operation duration.",
            bounds=DURATION_BOUNDS_S,
        )

        self._token_histogram = _create_histogram(
            meter,
            "gen_ai.client.token.usage",
            unit="{token}",
            description="Input and output tokens used.",
            bounds=TOKEN_BOUNDS,
        )

        self._first_chunk_histogram = _create_histogram(
            meter,
            "gen_ai.client.operation.time_to_first_chunk",
            unit="s",
            description="From the request to the first output.",
            bounds=DURATION_BOUNDS_S,
        )
        self._chunk_gap_histogram: Any = None
        if has_chunk_gaps:
            self._chunk_gap_histogram = _create_histogram(
                meter,
                "gen_ai.client.operation.time_per_output_chunk",
                unit="s",
                description="Between successive output events.",
                bounds=DURATION_BOUNDS_S,
            )

        self._tpot_histogram = _create_histogram(
            meter,
            "loadgen.client.time_per_output_token",
            unit="s",
            description="Per output token after the first event.",
            bounds=TPOT_BOUNDS_S,
        )

    def _create_operation_recorder(self, meter: Any) -> OperationRecorder:
        """Return the recorder of agents, tools and workflows, each with a histogram."""
        durations = {
            operation.name: _create_histogram(
                meter,
                operation.metric,
                unit="s",
                description=f"Duration of {operation.name}.",
                bounds=operation.bounds_s,
            )
            for operation in OPERATIONS
        }
        return OperationRecorder(self._trace, self._tracer, durations)

    def _log_other_instrumentation(self, other: str, package: str) -> None:
        """Log once that another instrumentation reports the calls of a package."""
        if other in self._reported_instrumentations:
            return

        self._reported_instrumentations.add(other)
        log.warning(
            "%s already reports the calls of %s, so OpenTelemetry() of loadgen_sdk does not",
            other,
            package,
        )

    def _record_metrics(self, ended_call: _EndedCall) -> None:
        """Record the metrics of a call that has ended, with the token counts of the server only.

        The context of the call is passed on for the exemplars: a histogram keeps some of its values
        as examples, each with a reference to the trace of its call.
        """
        measurement = ended_call.measurement
        context = ended_call.context
        attributes = self._metric_attributes(measurement)
        duration_s = (measurement.done - measurement.started) / 1e9
        duration_attributes = {**attributes, **_error_attributes(measurement)}
        self._duration_histogram.record(duration_s, duration_attributes, context)

        if measurement.streamed:
            self._record_stream_metrics(measurement, attributes, context)

        # The number of input tokens is always that of the server. Without a count of the output
        # tokens, a measurement has the number of output events in place of it.
        is_output_counted_by_server = measurement.token_source == "server"
        if measurement.input_tokens is not None:
            input_attributes = {**attributes, "gen_ai.token.type": "input"}
            self._token_histogram.record(measurement.input_tokens, input_attributes, context)

        if measurement.output_tokens and is_output_counted_by_server:
            output_attributes = {**attributes, "gen_ai.token.type": "output"}
            self._token_histogram.record(measurement.output_tokens, output_attributes, context)

    def _record_stream_metrics(
        self, measurement: Measurement, attributes: dict[str, Any], context: Any
    ) -> None:
        """Record the times of the output events (chunks) of a streamed call, in seconds.

        These are the time to the first chunk, the gaps between successive chunks if the application
        has chosen them (`chunks=True`), and the time per output token.

        Args:
            measurement: The measurement of the call.
            attributes: The attributes of the metrics.
            context: The context of OpenTelemetry in which the call ended.
        """
        first_chunk_ms = measurement.ttft_from_sent_ms
        if first_chunk_ms is not None:
            self._first_chunk_histogram.record(first_chunk_ms / 1e3, attributes, context)

        if self._chunk_gap_histogram is not None:
            for gap_ns in measures.gaps(measurement.instants):
                self._chunk_gap_histogram.record(gap_ns / 1e9, attributes, context)

        tpot_ms = measurement.tpot_ms
        if tpot_ms is not None:
            self._tpot_histogram.record(tpot_ms / 1e3, attributes, context)

    def _metric_attributes(self, measurement: Measurement) -> dict[str, Any]:
        """Return the attributes of the metrics of a call: what it called, and the chosen labels."""
        attributes = self._call_attributes(measurement)
        if measurement.response_model:
            attributes["gen_ai.response.model"] = measurement.response_model
        for name in self._metric_labels:
            if name in measurement.labels:
                attributes[f"loadgen.label.{name}"] = measurement.labels[name]
        return attributes

    def _call_attributes(self, call: Call | Measurement) -> dict[str, Any]:
        """Return the attributes that spans and metrics of a call have in common.

        `call.server` is "HOST:PORT", where an IPv6 address is in brackets.
        """
        host, _, port = call.server.rpartition(":")
        attributes: dict[str, Any] = {
            "gen_ai.operation.name": _OPERATIONS[call.api],
            "gen_ai.provider.name": self._provider or _provider_of(call.api, host),
        }
        if call.model:
            attributes["gen_ai.request.model"] = call.model

        if host:
            attributes["server.address"] = host.strip("[]")
            attributes["server.port"] = int(port)

        return attributes

    def _end_span(self, measurement: Measurement, span: Any) -> None:
        """Add what is known of a call to its span, and end it at the time when the call ended."""
        span.set_attributes(_response_attributes(measurement))
        if self._keeps_content:
            span.set_attributes(_content_attributes(measurement))

        self._add_span_events(measurement, span)
        if measurement.status == "failed":
            # The text of the failure may quote the prompt, so that the span gets its type only.
            span.set_status(self._trace.StatusCode.ERROR, error_type_of(measurement))

        span.end(_unix_ns(measurement, measurement.done))

    def _add_span_events(self, measurement: Measurement, span: Any) -> None:
        """Add an event for the first token and one for each retry to a span.

        The event of a retry has the time at which the attempt before it failed.
        """
        if measurement.streamed and measurement.first_token != NEVER:
            timestamp = _unix_ns(measurement, measurement.first_token)
            span.add_event("first_token", timestamp=timestamp)
        for number, attempt in enumerate(measurement.attempts[:-1], 1):
            attributes = {
                "attempt": number,
                "error.type": "" if attempt.failure is None else attempt.failure.kind,
                "waited_s": attempt.waited_ms / 1e3,
            }
            timestamp = _unix_ns(measurement, attempt.ended)
            span.add_event("retry", attributes, timestamp=timestamp)


def _create_histogram(
    meter: Any, name: str, *, unit: str, description: str, bounds: tuple[float, ...]
) -> Any:
    """Return a new histogram of a meter, with the upper bounds of its buckets."""
    return meter.create_histogram(
        name, unit=unit, description=description, explicit_bucket_boundaries_advisory=bounds
    )


def _active_instrumentation(package: str) -> str:
    """Return the module of another instrumentation that is active for a package, or "".

    Such an instrumentation (`_OTHER_INSTRUMENTATIONS`) already reports the calls of the package.
    """
    for module_name, class_name in _OTHER_INSTRUMENTATIONS.get(package, ()):
        module = sys.modules.get(module_name)  # None if the application has not imported it
        instrumentor = getattr(module, class_name, None)
        # Instrumentors of OpenTelemetry are singletons with these two attributes.
        instance = getattr(instrumentor, "_instance", None)
        if getattr(instance, "_is_instrumented_by_opentelemetry", False):
            return module_name
    return ""


def _provider_of(api: str, host: str) -> str:
    """Return the value of `gen_ai.provider.name` for a server."""
    if api == "messages":
        return "anthropic"
    return "azure.ai.openai" if ".azure.com" in host else "openai"


def _unix_ns(measurement: Measurement, timestamp: int) -> int:
    """Return a monotonic timestamp of a call by the wall clock."""
    return measurement.started_unix_ns + timestamp - measurement.started


def _response_attributes(measurement: Measurement) -> dict[str, Any]:
    """Return the attributes of a span that are known at the end of its call.

    Those without a value (None or "") are left out.
    """
    first_chunk_ms = measurement.ttft_from_sent_ms if measurement.streamed else None
    attributes = {
        "gen_ai.response.model": measurement.response_model,
        "gen_ai.response.id": measurement.response_id,
        "gen_ai.response.finish_reasons": _finish_reasons(measurement) or None,
        "gen_ai.usage.input_tokens": measurement.input_tokens,
        "gen_ai.usage.output_tokens": measurement.output_tokens,
        "gen_ai.usage.cache_read.input_tokens": measurement.cached_tokens,
        "gen_ai.usage.cache_creation.input_tokens": measurement.cache_written_tokens,
        "gen_ai.usage.reasoning.output_tokens": measurement.reasoning_tokens,
        "gen_ai.response.time_to_first_chunk": _seconds(first_chunk_ms),
        "http.request.resend_count": measurement.retries or None,
        "loadgen.wait_s": _seconds(measurement.wait_ms),
        "loadgen.cost": measurement.cost,
        "loadgen.token_source": measurement.token_source,
    }
    known_attributes = {
        name: value for name, value in attributes.items() if value not in (None, "")
    }

    return {**_error_attributes(measurement), **known_attributes}


def _finish_reasons(measurement: Measurement) -> list[str]:
    """Return the finish reason of each completion, or that of the call."""
    choices = measurement.content.choices if measurement.content else ()
    reasons = [choice.finish_reason for choice in choices if choice.finish_reason]
    if not reasons and measurement.finish_reason:
        reasons = [measurement.finish_reason]
    return reasons


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3


def _error_attributes(measurement: Measurement) -> dict[str, str]:
    if measurement.failure is None:
        return {}
    return {"error.type": error_type_of(measurement)}


def _content_attributes(measurement: Measurement) -> dict[str, str]:
    """Return the messages of a call, if the client keeps them."""
    content = measurement.content
    if content is None:
        return {}

    output_messages = [_output_message(choice) for choice in content.choices]
    return {
        "gen_ai.input.messages": json.dumps(_input_messages(content.input), default=str),
        "gen_ai.output.messages": json.dumps(output_messages),
    }


def _input_messages(prompt: str | Iterable[Any] | None) -> list[Any]:
    """Return a prompt or messages in the form of `gen_ai.input.messages`."""
    if isinstance(prompt, str):
        return [_text_message("user", prompt)]
    return [_input_message(message) for message in prompt or ()]


def _input_message(message: Any) -> Any:
    """Return a message in the form of the conventions. One whose content is no string is kept."""
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, str):
        return message
    return _text_message(message.get("role", ""), content)


def _text_message(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "parts": [{"type": "text", "content": text}]}


def _output_message(choice: Choice) -> dict[str, Any]:
    """Return a completion in the form of `gen_ai.output.messages`."""
    parts: list[dict[str, Any]] = []
    if choice.text:
        parts.append({"type": "text", "content": choice.text})
    parts += [{"type": "tool_call", **tool_call} for tool_call in choice.tool_calls]
    return {"role": "assistant", "parts": parts, "finish_reason": choice.finish_reason}
