"""Traces of OpenTelemetry spans that follow the semantic conventions for generative AI.

They come from an OTLP export, which has many spans in a line, from the console exporter of an SDK,
which writes one span per line, or from a table of spans.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from loadgen.core.workload.trace_formats import (
    UNKNOWN_NS,
    TraceRow,
    parse_time_ns,
    parse_token_count,
)
from loadgen.interop.trace_values import dicts_in, parse_utc_date

MODEL_CALL_OPERATIONS = ("chat", "text_completion", "generate_content")
"""Values of `gen_ai.operation.name` of a span that is one request to a model."""
INPUT_TOKEN_NAMES = ("gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens")
OUTPUT_TOKEN_NAMES = ("gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens")
"""Names of the numbers of tokens in the current and in older conventions."""
MAX_NS_DIGITS = 19
"""Integers of 64 bits have no more digits."""


class _Span(NamedTuple):
    """A span.

    Attributes:
        fields: Its fields, as they are in the file.
        attributes: Its attributes by name.
        trace_id: The id of its trace, "" if it has none.
        span_id: Its id, "" if it has none.
        parent_id: The id of the span around it, "" if there is none.
    """

    fields: dict[str, Any]
    attributes: dict[str, Any]
    trace_id: str
    span_id: str
    parent_id: str


class _SequentialSessions:
    """Divides calls of models into sessions whose calls follow each other without overlap."""

    def __init__(self) -> None:
        self._last_end_ns: dict[str, int] = {}

    def name_session(self, call: TraceRow, call_index: int) -> str:
        """Return the name of the session of a call. Calls must come in order of time.

        It is the session that the spans name or, without one, the group of the call. A call that
        begins before the previous one of this session has ended did not wait for it. It starts a
        session of its own, whose name ends with the index of the call, such as "trace-7::12".
        """
        session = call.session or call.group
        previous_end_ns = self._last_end_ns.get(session)
        overlaps_previous_call = previous_end_ns is not None and call.at_ns < previous_end_ns
        if overlaps_previous_call:
            session = f"{session}::{call_index}"
        self._last_end_ns[session] = call.at_ns + max(call.duration_ns, 0)
        return session


def parse_span_line(line: dict[str, Any]) -> Iterator[TraceRow]:
    """Yield the calls of models among the spans of a line, in order of time.

    The `group` of a call is its conversation or, without one, its trace. Its `session` is a part of
    the group in which each call waits for the response to the one before. A call that is alone in
    its group has neither.

    Raises:
        InvalidValueError: A field has a wrong value.
    """
    spans = [_parse_span(fields) for fields in _spans_in(line)]
    calls = sorted(_find_calls(spans), key=lambda call: call.at_ns)
    calls_per_group = Counter(call.group for call in calls)

    sessions = _SequentialSessions()
    for call_index, call in enumerate(calls):
        is_only_call_of_group = calls_per_group[call.group] == 1 and not call.session
        if not call.group or is_only_call_of_group:
            yield call._replace(group="")
        else:
            yield call._replace(session=sessions.name_session(call, call_index))


def _find_calls(spans: Sequence[_Span]) -> Iterator[TraceRow]:
    """Yield a request for each span that is a call of a model, in the order of the spans.

    The other spans, such as those of agents and tools, only say where a call belongs.
    """
    spans_by_id = {span.span_id: span for span in spans if span.span_id}
    for span in spans:
        if not _is_model_call(span):
            continue
        conversation = _find_conversation(span.attributes)
        group = str(conversation or span.trace_id)
        agents = list(_agents_around(span, spans_by_id))
        session = _name_session(group, agents, has_conversation=bool(conversation))
        yield _parse_call(span)._replace(session=session, group=group)


def _name_session(group: str, agents: Sequence[str], *, has_conversation: bool) -> str:
    """Return the name of the session of a call, or "" if spans do not say that it has one.

    Args:
        group: The conversation or the trace of the call.
        agents: The ids of the agents around the call, the innermost first. With several of them,
            the innermost is a sub-agent, which has a session of its own.
        has_conversation: Whether the call has the id of a conversation.
    """
    if len(agents) > 1:
        sub_agent = agents[0]
        return f"{group}::{sub_agent}"
    return group if has_conversation or agents else ""


def _is_model_call(span: _Span) -> bool:
    """Return True if a span is a request to a model. A span with input tokens is one by default."""
    has_input_tokens = _first_value(span.attributes, INPUT_TOKEN_NAMES) is not None
    default_operation = "chat" if has_input_tokens else None
    operation = span.attributes.get("gen_ai.operation.name", default_operation)
    return operation in MODEL_CALL_OPERATIONS


def _parse_call(span: _Span) -> TraceRow:
    """Return the times and lengths of a call.

    A failed call has no token counts. It becomes the smallest possible request.
    """
    input_tokens = _first_value(span.attributes, INPUT_TOKEN_NAMES)
    output_tokens = _first_value(span.attributes, OUTPUT_TOKEN_NAMES) or 0
    if input_tokens is None:
        input_tokens = 1
        output_tokens = 0

    start_ns = _parse_span_time(span.fields, "start")
    end_ns = _parse_span_time(span.fields, "end")
    assert start_ns is not None

    return TraceRow(
        at_ns=start_ns,
        input_tokens=parse_token_count(input_tokens, INPUT_TOKEN_NAMES[0], minimum=1),
        output_tokens=parse_token_count(output_tokens, OUTPUT_TOKEN_NAMES[0], minimum=0),
        duration_ns=UNKNOWN_NS if end_ns is None else max(0, end_ns - start_ns),
    )


def _first_value(attributes: Mapping[str, object], names: Sequence[str]) -> Any:
    """Return the value of the first of several names that occurs, or None if none does."""
    for name in names:
        if name in attributes:
            return attributes[name]
    return None


def _find_conversation(attributes: Mapping[str, object]) -> Any:
    """Return the id of the conversation of a span, or None.

    Libraries that do not follow the conventions have an attribute such as `langfuse.session.id`.
    """
    conversation = attributes.get("gen_ai.conversation.id")
    if conversation:
        return conversation

    for name, value in attributes.items():
        is_session_id = name == "session.id" or name.endswith(".session.id")
        if is_session_id and value:
            return value

    return None


def _agents_around(span: _Span, spans_by_id: Mapping[str, _Span]) -> Iterator[str]:
    """Yield the ids of the agents around a span, the innermost first."""
    visited = set[str]()
    parent_id = span.parent_id

    # Damaged data can contain a cycle.
    while parent_id in spans_by_id and parent_id not in visited:
        visited.add(parent_id)
        parent = spans_by_id[parent_id]
        if parent.attributes.get("gen_ai.operation.name") == "invoke_agent":
            yield parent_id
        parent_id = parent.parent_id


def _spans_in(line: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the spans of a line: of an OTLP export, of a list `spans`, or the line itself."""
    if "resourceSpans" in line:
        for resource in dicts_in(line["resourceSpans"]):
            for scope in dicts_in(resource.get("scopeSpans")):
                yield from dicts_in(scope.get("spans"))
    elif isinstance(line.get("spans"), list):
        yield from dicts_in(line["spans"])
    else:
        yield line


def _parse_span(fields: dict[str, Any]) -> _Span:
    """Return a span with its ids and attributes.

    Exporters spell the ids in different ways: OTLP has `traceId`, and the console exporter of an
    SDK has `trace_id` in the object `context`.
    """
    context = fields.get("context")
    fields_with_ids = dict(fields)
    if isinstance(context, dict):
        fields_with_ids.update(context)

    return _Span(
        fields=fields,
        attributes=_parse_attributes(fields.get("attributes")),
        trace_id=_first_id(fields_with_ids, ("traceId", "trace_id")),
        span_id=_first_id(fields_with_ids, ("spanId", "span_id")),
        parent_id=_first_id(fields_with_ids, ("parentSpanId", "parent_span_id", "parent_id")),
    )


def _first_id(fields: Mapping[str, object], names: Sequence[str]) -> str:
    """Return the first of several fields that is not empty as text, or "" if all are empty."""
    for name in names:
        if fields.get(name):
            return str(fields[name])
    return ""


def _parse_attributes(value: object) -> dict[str, Any]:
    """Return the attributes of a span by name.

    They are an object, or OTLP's list of keys and typed values, for example
    `{"key": "n", "value": {"intValue": "7"}}`.
    """
    if isinstance(value, dict):
        return value

    attributes: dict[str, Any] = {}
    for item in dicts_in(value):
        typed_value = item.get("value")
        if isinstance(typed_value, dict):
            for type_name, content in typed_value.items():
                attributes[str(item.get("key"))] = _parse_typed_value(type_name, content)

    return attributes


def _parse_typed_value(type_name: str, content: object) -> Any:
    """Return a value of an OTLP attribute. Its JSON encoding writes integers as text."""
    if type_name == "intValue" and isinstance(content, str) and content.lstrip("-").isdecimal():
        return int(content)
    return content


def _parse_span_time(fields: Mapping[str, object], side: Literal["start", "end"]) -> int | None:
    """Return when a span started or ended in ns since 1970.

    The result is None for a span without an end, which had not ended when it was exported.

    Raises:
        InvalidValueError: The start is missing, or a value is not a time.
    """
    unix_ns = fields.get(f"{side}TimeUnixNano")  # OTLP
    if unix_ns is not None:
        return _parse_unix_ns(unix_ns)
    date_text = fields.get(f"{side}_time")  # the console exporter
    if date_text is None and side == "end":
        return None
    return parse_utc_date(str(date_text))


def _parse_unix_ns(value: Any) -> int:
    """Return a time in ns since 1970. OTLP writes it as text, and some exporters as a number.

    Raises:
        InvalidValueError: It is no time.
    """
    is_digits = isinstance(value, str) and value.isdecimal() and len(value) <= MAX_NS_DIGITS
    if is_digits:
        return int(value)
    return parse_time_ns(value, unit_ns=1.0)
