"""The formats of traces that consist of JSON lines: rows of the table `loadgen.formats`.

Each `detect_...` function is called with the first row of a file. It returns the format of the file
or None if the file has another format.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from loadgen.core.units import NS_PER_S, UNIT_NS, InvalidValueError
from loadgen.core.workload.trace_formats import (
    TraceFormat,
    TraceRow,
    is_finite_number,
    one_request_per_line,
    parse_json_object,
    parse_time_ns,
    parse_token_count,
)
from loadgen.core.workload.trace_units import TRIAL_UNIT
from loadgen.interop.agent_traces import TraceLabParser, parse_weka_trace
from loadgen.interop.mooncake_traces import mooncake_format
from loadgen.interop.span_traces import parse_span_line
from loadgen.interop.trace_values import (
    parse_delay,
    parse_request,
    parse_session,
    parse_utc_date,
)

BAILIAN_BLOCK_TOKENS = 16
"""The block size of Alibaba's Bailian traces, which their rows do not contain."""
INFERRED_BLOCK_TOKENS = 0.0
"""The block size of a row that does not state it. It is then inferred for the whole file."""

NS_PER_US = UNIT_NS["us"]
NS_PER_MS = UNIT_NS["ms"]
USAGE_HINT = "token counts come from `usage` in the response, which captured streams do not contain"


def detect_shape_trace(first_row: Mapping[str, object]) -> TraceFormat | None:
    """Recognise a shape trace, which the SDK records without texts."""
    if not {"block_size", "input_source"} <= first_row.keys():
        return None
    return TraceFormat("shape trace", one_request_per_line(_parse_shape_row), must_be_ordered=False)


def detect_bailian(first_row: Mapping[str, object]) -> TraceFormat | None:
    """Recognise a trace of Alibaba's Bailian, in which each turn names its parent turn."""
    if "chat_id" not in first_row:
        return None
    parser = _BailianParser()
    return TraceFormat("Bailian", one_request_per_line(parser.parse_turn))


def detect_mooncake(first_row: Mapping[str, object]) -> TraceFormat | None:
    """Recognise rows with the lengths of a request, as Mooncake, vLLM and GuideLLM write them.

    AIPerf's rows of sessions may have no timestamp. Mooncake's times are milliseconds and
    GuideLLM's are seconds: the rows are first read with TRIAL_UNIT, and the reader of traces
    decides by the resulting rate which unit is the right one.
    """
    has_lengths = {"input_length", "output_length"} <= first_row.keys()
    has_session = "session_id" in first_row
    if not has_lengths or not ("timestamp" in first_row or has_session):
        return None
    return mooncake_format(has_sessions=has_session, unit=TRIAL_UNIT)


def detect_weka(first_row: Mapping[str, object]) -> TraceFormat | None:
    """Recognise Weka's traces, in which one line is the session of an agent."""
    if not {"requests", "block_size"} <= first_row.keys():
        return None
    return TraceFormat("Weka", _many_requests_per_line(parse_weka_trace), must_be_ordered=False)


def detect_tracelab(first_row: Mapping[str, object]) -> TraceFormat | None:
    """Recognise TraceLab's rounds of coding agents."""
    if not {"prefix_tokens", "newly_append_tokens", "timing_events"} <= first_row.keys():
        return None
    parser = TraceLabParser()
    return TraceFormat("TraceLab", one_request_per_line(parser.parse_round), must_be_ordered=False)


def detect_otel_spans(first_row: Mapping[str, object]) -> TraceFormat | None:
    """Recognise OpenTelemetry spans: an OTLP export, a list of spans, or one span per line."""
    is_otlp_export = "resourceSpans" in first_row
    is_span = {"start_time", "attributes"} <= first_row.keys()
    is_list = isinstance(first_row.get("spans"), list)
    if not (is_otlp_export or is_span or is_list):
        return None

    return TraceFormat(
        "OpenTelemetry GenAI", _many_requests_per_line(parse_span_line), must_be_ordered=False
    )


def detect_sagemaker(first_row: Mapping[str, object]) -> TraceFormat | None:
    """Recognise the data capture of Amazon SageMaker, which records requests and responses."""
    if "captureData" not in first_row:
        return None
    return TraceFormat(
        "SageMaker data capture", one_request_per_line(_parse_sagemaker_row), must_be_ordered=False
    )


def _many_requests_per_line(
    parse: Callable[[dict[str, Any]], Iterator[TraceRow]],
) -> Callable[[str], Sequence[TraceRow]]:
    """Return a parser of lines for a format with several requests in each line."""
    return lambda line: tuple(parse(parse_json_object(line)))


def _parse_shape_row(row: Mapping[str, object]) -> TraceRow:
    """Convert a row of a shape trace to a request.

    A shape trace is what the SDK records inside an application: when each request was sent and how
    many tokens it had, but no texts. The application may label a request, for example with
    {"feature": "search", "tier": "free"}. The label of the request is then "search free".
    """
    exact_sent_ns = parse_time_ns(row.get("timestamp"), float(NS_PER_MS))
    pause_ns = parse_delay(row)
    block_size = row.get("block_size")
    block_tokens = float(block_size) if is_finite_number(block_size) else INFERRED_BLOCK_TOKENS

    # Timestamps are written in ms with three decimals, which a float does not represent exactly.
    sent_ns = _round_to_us(exact_sent_ns)
    return parse_request(row, sent_ns)._replace(
        block_tokens=block_tokens,
        session=parse_session(row),
        pause_ns=pause_ns,
        label=_join_label_values(row.get("labels")),
    )


def _round_to_us(time_ns: int) -> int:
    """Return a time in ns, rounded to the nearest whole microsecond."""
    rounded_us = (time_ns + NS_PER_US // 2) // NS_PER_US
    return rounded_us * NS_PER_US


def _join_label_values(labels: object) -> str:
    """Return the values of all labels of a request, in the order of their names.

    Return "" if the request has no labels.
    """
    if not isinstance(labels, dict):
        return ""
    return " ".join(str(value) for _, value in sorted(labels.items()))


class _BailianParser:
    """Parses the rows of one Bailian trace, each of which is one turn of a conversation.

    A row has the id of its turn and the id of the turn before it (its parent). All turns of a
    conversation form one session, which is named after the id of the first turn.
    """

    def __init__(self) -> None:
        self._session_by_turn_id: dict[str, str] = {}

    def parse_turn(self, row: Mapping[str, object]) -> TraceRow:
        """Return the request of a turn, and store its session for the turns that follow it.

        A turn whose parent is not in the trace begins a session of its own.

        Raises:
            InvalidValueError: A field of the row has a wrong value.
        """
        turn_id = str(row.get("chat_id"))
        parent_turn_id = str(row.get("parent_chat_id"))
        session = self._session_by_turn_id.get(parent_turn_id, turn_id)
        self._session_by_turn_id[turn_id] = session
        sent_ns = parse_time_ns(row.get("timestamp"), float(NS_PER_S))
        request = parse_request(row, sent_ns)
        return request._replace(block_tokens=float(BAILIAN_BLOCK_TOKENS), session=session)


def _parse_sagemaker_row(row: Mapping[str, object]) -> TraceRow:
    """Convert a response that SageMaker captured to a request of the trace.

    The token counts are those in the `usage` of the response, and the time is that of the
    inference.

    Raises:
        InvalidValueError: The response has no `usage`, or a value is missing or has a wrong form.
    """
    usage = _find_usage(_decode_capture(row["captureData"], "endpointOutput"))
    sent_ns = _parse_inference_time(row.get("eventMetadata"))
    input_tokens = parse_token_count(usage.get("prompt_tokens"), "usage.prompt_tokens", minimum=1)
    output_tokens = parse_token_count(
        usage.get("completion_tokens"), "usage.completion_tokens", minimum=0
    )
    return TraceRow(at_ns=sent_ns, input_tokens=input_tokens, output_tokens=output_tokens)


def _find_usage(completion: Mapping[str, object]) -> dict[str, Any]:
    """Return the object `usage` of a captured completion, which has its token counts.

    Raises:
        InvalidValueError: The completion has no such object.
    """
    usage = completion.get("usage")
    if not isinstance(usage, dict):
        problem = "the captured response has no usage"
        raise InvalidValueError("missing_key", problem, USAGE_HINT, "usage")
    return usage


def _parse_inference_time(event_metadata: object) -> int:
    """Return when SageMaker served a request, in ns since 1970.

    Raises:
        InvalidValueError: The time is missing or no date.
    """
    if not isinstance(event_metadata, dict):
        event_metadata = {}
    # A missing time becomes the text "None", which is reported as an invalid date.
    return parse_utc_date(str(event_metadata.get("inferenceTime")))


def _decode_capture(
    capture: object, key: Literal["endpointInput", "endpointOutput"]
) -> dict[str, Any]:
    """Return the JSON object of a request or response that SageMaker captured.

    For example, `{"endpointOutput": {"data": "{...}", "encoding": "JSON"}}` has a response as text.
    With the encoding BASE64, the text is base64-encoded.

    Raises:
        InvalidValueError: It was not captured, or it is no JSON object.
    """
    path = f"{key}.data"
    message = capture.get(key) if isinstance(capture, dict) else None
    data = message.get("data") if isinstance(message, dict) else None
    if not isinstance(message, dict) or not isinstance(data, str):
        raise InvalidValueError(
            "missing_key", f"captureData has no {path}", "capture both input and output", path
        )

    is_base64 = str(message.get("encoding", "JSON")).upper() == "BASE64"
    text = _decode_base64(data, path) if is_base64 else data
    try:
        return parse_json_object(text)
    except InvalidValueError as error:
        raise InvalidValueError(
            error.code, f"{path} is {error}", "a captured chat completion", path
        ) from None


def _decode_base64(data: str, path: str) -> str:
    """Return base64-encoded text. Raises InvalidValueError, with `path` as its place."""
    try:
        return base64.b64decode(data, validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        raise InvalidValueError(
            "invalid_value", f"{path} is not base64-encoded text", "", path
        ) from None
