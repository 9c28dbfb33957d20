"""The traces of other tools: how each is told by its fields, and the requests that one of its lines holds. Pure."""

from __future__ import annotations

import base64
import binascii
import datetime
import functools
import hashlib
import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from loadgen.core.format import shortened
from loadgen.core.units import MOST_TOKENS, UNIT_NS, InvalidValueError, TimeUnit
from loadgen.core.workload.dataset_rows import BODY_FIELDS, is_finish_reason
from loadgen.core.workload.trace_formats import (
    MAX_TIME_NS,
    TraceColumns,
    TraceFormat,
    TraceRow,
    duration_ns,
    json_object,
    one_request_per_line,
    parse_number,
    time_ns,
    token_count,
)
from loadgen.core.workload.trace_units import TRIAL_UNIT

BAILIAN_BLOCK = 16
AIPERF_BLOCK, UNTOLD_BLOCK = 512, 64
TRACELAB_BLOCK = 512  # tokens per block of the prefixes that TraceLab counts
_ID_BITS = (1 << 48) - 1


def shape_trace(first: Mapping[str, Any]) -> TraceFormat | None:
    known = {"block_size", "input_source"} <= first.keys()
    return (
        TraceFormat("shape trace", one_request_per_line(_sdk_shape_row), in_order=False)
        if known
        else None
    )


def bailian(first: Mapping[str, Any]) -> TraceFormat | None:
    known = "chat_id" in first
    return (
        TraceFormat("Bailian", one_request_per_line(functools.partial(_bailian_row, {})))
        if known
        else None
    )


def mooncake(first: Mapping[str, Any]) -> TraceFormat | None:
    """Return the format of rows with the lengths of a request, as Mooncake, vLLM and GuideLLM write.

    Mooncake's times are milliseconds and GuideLLM's are seconds. AIPerf's rows of sessions may have
    no timestamp.
    """
    if not {"input_length", "output_length"} <= first.keys() or not first.keys() & {
        "timestamp",
        "session_id",
    }:
        return None
    return _mooncake_in("session_id" not in first, TRIAL_UNIT)


def _mooncake_in(in_order: bool, unit: TimeUnit) -> TraceFormat:
    """Return Mooncake's format with times in a unit."""
    scale = float(UNIT_NS[unit])
    return TraceFormat(
        "Mooncake",
        one_request_per_line(functools.partial(_mooncake_row, scale, _Talks())),
        in_order=in_order,
        parse_lines=functools.partial(_mooncake_together, scale),
        in_unit=functools.partial(_mooncake_in, in_order),
    )


def weka(first: Mapping[str, Any]) -> TraceFormat | None:
    known = {"requests", "block_size"} <= first.keys()
    return TraceFormat("Weka", _several(_weka_rows), in_order=False) if known else None


def tracelab(first: Mapping[str, Any]) -> TraceFormat | None:
    known = {"prefix_tokens", "newly_append_tokens", "timing_events"} <= first.keys()
    return (
        TraceFormat("TraceLab", one_request_per_line(_TraceLab().row), in_order=False)
        if known
        else None
    )


def otel_spans(first: Mapping[str, Any]) -> TraceFormat | None:
    known = "resourceSpans" in first or {"start_time", "attributes"} <= first.keys()
    known = known or isinstance(first.get("spans"), list)
    return (
        TraceFormat("OpenTelemetry GenAI", _several(_span_rows), in_order=False) if known else None
    )


def sagemaker(first: Mapping[str, Any]) -> TraceFormat | None:
    known = "captureData" in first
    return (
        TraceFormat("SageMaker data capture", one_request_per_line(_sagemaker_row), in_order=False)
        if known
        else None
    )


def _several(
    parse: Callable[[dict[str, Any]], Iterator[TraceRow]],
) -> Callable[[str], Sequence[TraceRow]]:
    return lambda line: tuple(parse(json_object(line)))


# ------------------------------------------------------------------------------------------------ lengths and hashes


_ASKS = ("model", *BODY_FIELDS)
"""Fields of a row that its request is sent with."""
_WEKA_PARAMETERS = tuple(name for name in _ASKS if name != "stop")
"""Those of Weka's rows, whose `stop` is the reason why the recorded response ended."""

_PlainRow: Any = msgspec.defstruct(
    "_PlainRow",
    [
        ("timestamp", float),
        ("input_length", int),
        ("output_length", int),
        ("hash_ids", list[int] | None, None),
        *((name, None, None) for name in ("session_id", *_ASKS)),
    ],
    gc=False,
)
"""A row of Mooncake as it mostly is; any other is read field by field."""


def _mooncake_together(scale: float, lines: Sequence[str]) -> TraceColumns | None:
    try:
        text = "[" + ",".join(lines) + "]"
        rows = _PLAIN_ROWS.decode(text)
        at = np.array([row.timestamp for row in rows])
        latest_ns = float(np.abs(at).max()) * scale  # infinite, where numpy would warn
        read = np.array([row.input_length for row in rows], np.int64)
        write = np.array([row.output_length for row in rows], np.int64)
        lists = [row.hash_ids or () for row in rows] if '"hash_ids"' in text else ()
        hashes = list(itertools.chain.from_iterable(lists))
    except (msgspec.DecodeError, RecursionError, OverflowError):
        return None
    if (
        len(rows) != len(lines)
        or latest_ns > MAX_TIME_NS
        or read.min() < 1
        or write.min() < 0
        or max(read.max(), write.max()) > MOST_TOKENS
        or (hashes and not 0 <= min(hashes) <= max(hashes) <= _ID_BITS)
    ):
        return None
    whole = np.trunc(at)
    at_ns = whole.astype(np.int64) * int(scale) + np.rint((at - whole) * scale).astype(np.int64)
    return TraceColumns(at_ns, read, write, hashes, [len(one) for one in lists])


_PLAIN_ROWS: msgspec.json.Decoder[list[Any]] = msgspec.json.Decoder(list[_PlainRow])


def _mooncake_row(scale: float, talks: _Talks, row: dict[str, Any]) -> TraceRow:
    """A row without an instant stands right after the one before it in its session."""
    session, pause_ns = str(row.get("session_id") or ""), _length_ns(row, "delay", 1e6)
    timed = not session or row.get("timestamp") is not None
    if timed:
        at_ns = time_ns(row.get("timestamp"), scale)
    else:
        at_ns, pause_ns = talks.begun_ns.get(session, 0), max(pause_ns, 0)
    one = _row(row, at_ns, session=session, pause_ns=pause_ns, timed=timed)
    return talks.whole(one) if session else one


class _Talks:
    """AIPerf's sessions, whose later rows have only what is new: each prompt is what was said before it, and that."""

    def __init__(self) -> None:
        self.begun_ns: dict[str, int] = {}  # of the last row of each session that has an instant
        self._said: dict[
            str, tuple[int, float, list[int]]
        ] = {}  # tokens so far, block, blocks of the last prompt
        self._made = 0

    def whole(self, row: TraceRow) -> TraceRow:
        """The row with its whole prompt. Blocks that no id is told of, as those of answers, get one."""
        self.begun_ns[row.session] = row.at_ns
        said, block, blocks = self._said.get(row.session, (0, 0.0, []))
        block = block or _block_of(row)
        tokens = said + row.input_tokens
        fresh = max(int(tokens // block) - len(blocks) - len(row.hashes), 0)
        made = [_id_of(f"{row.session} {self._made + i}") for i in range(fresh)]
        self._made += fresh
        blocks = [*blocks, *made, *row.hashes][: -int(-tokens // block)]
        self._said[row.session] = tokens + row.output_tokens, block, blocks
        return row._replace(input_tokens=tokens, hashes=blocks, block=block)


def _block_of(row: TraceRow) -> float:
    """Tokens of a block, by the first row of a session: AIPerf's 512 where they fit; smaller ones where it has none."""
    if not row.hashes:
        return float(UNTOLD_BLOCK)
    sizes = (AIPERF_BLOCK, *(16 << power for power in range(7)))
    fits = (size for size in sizes if -(-row.input_tokens // size) == len(row.hashes))
    return float(next(fits, AIPERF_BLOCK))


def _row(row: dict[str, Any], at_ns: int, **more: Any) -> TraceRow:
    return TraceRow(
        at_ns=at_ns,
        input_tokens=token_count(row.get("input_length"), "input_length", 1),
        output_tokens=token_count(row.get("output_length"), "output_length", 0),
        hashes=_hash_ids(row),
        fields=_fields(row),
        **more,
    )


def _fields(row: dict[str, Any], names: Sequence[str] = _ASKS) -> str:
    """Return JSON of the request parameters of a row, beside its lengths; "" if it has none.

    A `stop` that is the name of a finish reason was recorded with the response and is no parameter.
    Raises InvalidValueError for a parameter of another type.
    """
    found = {name: row[name] for name in names if row.get(name) is not None}
    if is_finish_reason(found.get("stop")):
        del found["stop"]
    for name, value in found.items():
        what, kind = BODY_FIELDS.get(name, ("a text", str))
        try:
            msgspec.convert(value, kind)
        except msgspec.ValidationError:
            raise InvalidValueError(
                "wrong_type", f"{name} is {shortened(value)}", what, name
            ) from None
    return json.dumps(found, sort_keys=True) if found else ""


def _sdk_shape_row(row: dict[str, Any]) -> TraceRow:
    # The precision it was written with: a float cannot hold more.
    microseconds = (time_ns(row.get("timestamp"), 1e6) + 500) // 1000
    block = float(row["block_size"]) if _is_number(row.get("block_size")) else 0.0
    session, pause_ns = str(row.get("session_id") or ""), _length_ns(row, "delay", 1e6)
    labels = row.get("labels")
    label = (
        " ".join(str(value) for _, value in sorted(labels.items()))
        if isinstance(labels, dict)
        else ""
    )
    return _row(
        row, microseconds * 1000, block=block, session=session, pause_ns=pause_ns, label=label
    )


def _bailian_row(chats: dict[str, str], row: dict[str, Any]) -> TraceRow:
    """Each turn names its parent turn; the id of the first turn becomes the name of the conversation."""
    own, parent = str(row.get("chat_id")), str(row.get("parent_chat_id"))
    chats[own] = session = chats.get(parent, own)
    at_ns = time_ns(row.get("timestamp"), 1e9)
    return _row(row, at_ns, block=float(BAILIAN_BLOCK), session=session)


# -------------------------------------------------------------------------------------------------------------- agents


def _weka_rows(trace: dict[str, Any]) -> Iterator[TraceRow]:
    """One line is one session of an agent: its requests, and those of its sub-agents. Hashes are its own."""
    name = str(trace.get("id"))
    size = trace.get("block_size")
    if not _is_number(size) or not isinstance(size, int | float) or size <= 0:
        raise InvalidValueError(
            "invalid_value",
            f"block_size is {shortened(size)}",
            "a number of tokens above 0",
            "block_size",
        )
    if trace.get("hash_id_scope", "local") != "local":
        raise InvalidValueError(
            "unsupported",
            f"hash_id_scope is {shortened(trace['hash_id_scope'])}",
            "local: each trace has hashes of its own",
            "hash_id_scope",
        )
    own_hashes = _id_of(name) & 0x7FFFFFFF
    for request in _requests(trace):
        if request.get("type") == "subagent":
            inner = list(_requests(request))
            begin = time_ns(request.get("t"), 1e9)
            instants = [time_ns(call.get("t"), 1e9) for call in inner]
            since_marker = (
                bool(instants) and min(instants) < begin
            )  # else they count from the start of the trace
            session = f"{name}::{request.get('agent_id')}"
            for call, at_ns in zip(inner, instants, strict=True):
                yield _weka_row(
                    call, at_ns + begin * since_marker, float(size), own_hashes, session, name
                )
        else:
            at_ns = time_ns(request.get("t"), 1e9)
            yield _weka_row(request, at_ns, float(size), own_hashes, name, name)


def _requests(of: dict[str, Any]) -> Iterator[dict[str, Any]]:
    requests = of.get("requests")
    if not isinstance(requests, list):
        raise InvalidValueError(
            "wrong_type", f"requests is {shortened(requests)}", "a list of calls", "requests"
        )
    for request in requests:
        if not isinstance(request, dict):
            raise InvalidValueError(
                "wrong_type",
                f"a request is {shortened(request)}",
                "an object with t, in and out",
                "requests",
            )
        yield request


def _weka_row(
    call: dict[str, Any], at_ns: int, block: float, own_hashes: int, session: str, group: str
) -> TraceRow:
    return TraceRow(
        at_ns=at_ns,
        input_tokens=token_count(call.get("in"), "in", 1),
        output_tokens=token_count(call.get("out"), "out", 0),
        hashes=[own_hashes << 32 | number & 0xFFFFFFFF for number in _hash_ids(call)],
        block=block,
        session=session,
        group=group,
        fields=_fields(call, _WEKA_PARAMETERS),
        took_ns=_length_ns(call, "api_time", 1e9),
        pause_ns=_length_ns(call, "think_time", 1e9),
    )


class _TraceLab:
    """Rounds of coding agents. Blocks are made of the share of each prompt that was cached: it begins as the one
    before it in the session.
    """

    def __init__(self) -> None:
        self._sessions: dict[str, list[int]] = {}
        self._next = 0

    def row(self, row: dict[str, Any]) -> TraceRow:
        at_ns, ended_ns = self._sent_and_ended_ns(row)
        total = token_count(row.get("input_tokens_total"), "input_tokens_total", 1)
        known = token_count(row.get("prefix_tokens"), "prefix_tokens", 0)
        session = str(row.get("session_id") or "")
        reused = self._sessions.get(session, [])[: min(known, total) // TRACELAB_BLOCK]
        fresh = total // TRACELAB_BLOCK - len(reused)
        blocks = [*reused, *range(self._next, self._next + fresh)]
        self._next += fresh
        self._sessions[session] = blocks
        written = token_count(
            row.get("output_tokens") or 0, "output_tokens", 0
        )  # reasoning is counted in it
        took_ns = max(0, ended_ns - at_ns) if ended_ns else -1
        return TraceRow(
            at_ns, total, written, blocks, float(TRACELAB_BLOCK), session, took_ns=took_ns
        )

    @staticmethod
    def _sent_and_ended_ns(row: dict[str, Any]) -> tuple[int, int]:
        """When its last input was there, without one its first output; and its last output, 0 without one."""
        events = row.get("timing_events")
        events = (
            [event for event in events if isinstance(event, dict)]
            if isinstance(events, list)
            else []
        )
        inputs = [
            utc_date_ns(str(e.get("timestamp")))
            for e in events
            if e.get("event_type") in _TRACELAB_INPUTS
        ]
        outputs = [
            utc_date_ns(str(e.get("timestamp")))
            for e in events
            if e.get("event_type") in _TRACELAB_OUTPUTS
        ]
        if not inputs and not outputs:
            raise InvalidValueError(
                "missing_value",
                "timing_events has no instant",
                "a user_message or a tool_result with a timestamp",
                "timing_events",
            )
        return max(inputs) if inputs else min(outputs), max(outputs, default=0)


_TRACELAB_INPUTS = ("user_message", "tool_result")
_TRACELAB_OUTPUTS = ("text", "reasoning", "tool_call")


# --------------------------------------------------------------------------------------------------------------- spans

_CALLS = (
    "chat",
    "text_completion",
    "generate_content",
)  # of gen_ai.operation.name: one request to a model each


def _span_rows(line: dict[str, Any]) -> Iterator[TraceRow]:
    """The calls of models among the spans: an OTLP export has many in a line, the console exporter writes one.

    A call is of its conversation, else of its trace where that holds an agent or more calls; of the innermost agent
    around it; and one that began before the agent's call before it had ended is beside it, like a sub-agent.
    """
    spans = [(span, _attributes(span.get("attributes"))) for span in _spans(line)]
    calls = sorted(_calls(spans), key=lambda row: row.at_ns)
    of_group = Counter(row.group for row in calls)
    ended: dict[str, int] = {}
    for place, row in enumerate(calls):
        session = row.session
        if not row.group or (not session and of_group[row.group] == 1):
            row = row._replace(group="")
        elif row.at_ns < ended.get(session or row.group, row.at_ns):
            row = row._replace(session=f"{session or row.group}::{place}")
        else:
            session = session or row.group
            row, ended[session] = row._replace(session=session), row.at_ns + max(row.took_ns, 0)
        yield row


def _calls(spans: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> Iterator[TraceRow]:
    """The calls among the spans of a line; `session` is "" where only the trace may say what they belong to."""
    above = {
        own: (parent, attributes)
        for span, attributes in spans
        for _, own, parent in [_span_ids(span)]
        if own
    }
    for span, attributes in spans:
        usage = [
            next((attributes[name] for name in names if name in attributes), None)
            for names in (
                ("gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens"),
                ("gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens"),
            )
        ]
        operation = attributes.get(
            "gen_ai.operation.name", "chat" if usage[0] is not None else None
        )
        if operation not in _CALLS:
            continue
        trace, _, parent = _span_ids(span)
        talk = attributes.get("gen_ai.conversation.id") or next(
            (
                value
                for name, value in attributes.items()
                if f".{name}".endswith(".session.id") and value
            ),
            None,
        )
        agents = list(_agents(parent, above))
        group = str(talk or trace)
        session = f"{group}::{agents[0]}" if len(agents) > 1 else group if talk or agents else ""
        input_tokens, output_tokens = (
            (1, 0) if usage[0] is None else (usage[0], usage[1] or 0)
        )  # a failed call has none
        start_ns, end_ns = _span_ns(span, "start"), _span_ns(span, "end")
        assert start_ns is not None
        yield TraceRow(
            start_ns,
            token_count(input_tokens, "gen_ai.usage.input_tokens", 1),
            token_count(output_tokens, "gen_ai.usage.output_tokens", 0),
            session=session,
            group=group,
            took_ns=-1 if end_ns is None else max(0, end_ns - start_ns),
        )


def _span_ids(span: dict[str, Any]) -> tuple[str, str, str]:
    """Trace, own id and that of the span around it, as OTLP, the console exporter or a table of spans writes them."""
    context = span.get("context")
    fields = {**span, **(context if isinstance(context, dict) else {})}
    names = (
        ("traceId", "trace_id"),
        ("spanId", "span_id"),
        ("parentSpanId", "parent_span_id", "parent_id"),
    )
    trace, own, parent = (
        next((str(fields[name]) for name in kind if fields.get(name)), "") for kind in names
    )
    return trace, own, parent


def _agents(parent: str, above: dict[str, tuple[str, dict[str, Any]]]) -> Iterator[str]:
    """The agents around a span, the innermost first."""
    seen = set[str]()
    while parent in above and parent not in seen:
        seen.add(parent)
        outer, attributes = above[parent]
        if attributes.get("gen_ai.operation.name") == "invoke_agent":
            yield parent
        parent = outer


def _spans(line: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if "resourceSpans" not in line:
        yield from _objects(line["spans"]) if isinstance(line.get("spans"), list) else (line,)
        return
    for resource in _objects(line["resourceSpans"]):
        for scope in _objects(resource.get("scopeSpans")):
            yield from _objects(scope.get("spans"))


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    return (
        (item for item in value if isinstance(item, dict)) if isinstance(value, list) else iter(())
    )


def _attributes(value: Any) -> dict[str, Any]:
    """Attributes of a span: an object, or OTLP's list of keys and typed values, where whole numbers are texts."""
    if isinstance(value, dict):
        return value
    found: dict[str, Any] = {}
    for item in _objects(value):
        typed = item.get("value")
        for kind, content in typed.items() if isinstance(typed, dict) else ():
            is_whole = (
                kind == "intValue" and isinstance(content, str) and content.lstrip("-").isdecimal()
            )
            found[str(item.get("key"))] = int(content) if is_whole else content
    return found


def _span_ns(span: dict[str, Any], side: str) -> int | None:
    """When a span started or ended; None for an end that is not told."""
    instant = span.get(f"{side}TimeUnixNano")
    if instant is None:
        text = span.get(f"{side}_time")
        return utc_date_ns(str(text)) if text is not None or side == "start" else None
    if isinstance(instant, str) and instant.isdecimal() and len(instant) < 20:
        return int(instant)
    return time_ns(instant, 1.0)


def _sagemaker_row(row: dict[str, Any]) -> TraceRow:
    capture, event = row["captureData"], row.get("eventMetadata")
    answer = _captured(capture, "endpointOutput")
    usage = answer.get("usage")
    if not isinstance(usage, dict):
        hint = "token counts come from the answer's `usage`, which streamed answers are captured without"
        raise InvalidValueError("missing_key", "the captured answer has no usage", hint, "usage")
    return TraceRow(
        utc_date_ns(str(event.get("inferenceTime") if isinstance(event, dict) else None)),
        token_count(usage.get("prompt_tokens"), "usage.prompt_tokens", 1),
        token_count(usage.get("completion_tokens"), "usage.completion_tokens", 0),
    )


def _captured(capture: Any, part: str) -> dict[str, Any]:
    """The JSON of what was captured, which is stored as a text or as base64."""
    stored = capture.get(part) if isinstance(capture, dict) else None
    data = stored.get("data") if isinstance(stored, dict) else None
    if not isinstance(stored, dict) or not isinstance(data, str):
        raise InvalidValueError(
            "missing_key",
            f"captureData has no {part}.data",
            "capture both input and output",
            f"{part}.data",
        )
    if str(stored.get("encoding", "JSON")).upper() == "BASE64":
        try:
            data = base64.b64decode(data, validate=True).decode()
        except (binascii.Error, UnicodeDecodeError):
            raise InvalidValueError(
                "invalid_value", f"{part}.data is not base64 of a text", "", f"{part}.data"
            ) from None
    try:
        return json_object(data)
    except InvalidValueError as wrong:
        raise InvalidValueError(
            wrong.code, f"{part}.data is {wrong}", "a captured chat completion", f"{part}.data"
        ) from None


# -------------------------------------------------------------------------------------------------------------- values


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _length_ns(row: dict[str, Any], name: str, scale: float) -> int:
    """A length of time of a row; -1 where it is not told."""
    value = row.get(name)
    return -1 if value is None else duration_ns(value, name, scale)


def seconds_ns(text: str) -> int:
    return time_ns(parse_number(text), 1e9)


def _hash_ids(row: dict[str, Any]) -> list[int]:
    value = row.get("hash_ids") or []
    if not isinstance(value, list):
        raise InvalidValueError(
            "wrong_type", f"hash_ids is {shortened(value)}", "a list", "hash_ids"
        )
    is_id = [
        isinstance(item, int) and not isinstance(item, bool) and 0 <= item <= _ID_BITS
        for item in value
    ]
    return (
        value
        if all(is_id)
        else [item if good else _id_of(item) for item, good in zip(value, is_id, strict=True)]
    )


def _id_of(item: Any) -> int:
    """A large number or a text, reduced to 48 bits."""
    return int.from_bytes(hashlib.blake2b(str(item).encode(), digest_size=6).digest(), "little")


_DATE_HINT = "a date like 2023-11-16 18:15:46.6805900"


def utc_date_ns(text: str) -> int:
    """Ns since 1970 of `2023-11-16 18:15:46.6805900`; UTC unless the text has an offset. Raises InvalidValueError."""
    to_seconds, _, fraction_and_offset = text.partition(".")
    digits = fraction_and_offset[
        : len(fraction_and_offset) - len(fraction_and_offset.lstrip("0123456789"))
    ]
    try:
        date = datetime.datetime.fromisoformat(to_seconds + fraction_and_offset[len(digits) :])
    except ValueError:
        raise InvalidValueError(
            "invalid_value", f"timestamp is {text!r}", _DATE_HINT, "timestamp"
        ) from None
    if date.tzinfo is None:
        date = date.replace(tzinfo=datetime.UTC)
    since_epoch = date - datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
    at_ns = (since_epoch.days * 86_400 + since_epoch.seconds) * 10**9 + int(
        (digits + "000000000")[:9]
    )
    if abs(at_ns) > MAX_TIME_NS:
        raise InvalidValueError("invalid_value", f"timestamp is {text!r}", _DATE_HINT, "timestamp")
    return at_ns
