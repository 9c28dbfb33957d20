"""Reads the events of an answer: text, finish reason, usage, errors, and the arrival instant of each. Pure.

Each request has one `Reading`. Chat and completions, streamed or not, are so similar that one reader serves all four.
A request is `ok` by the rules of metrics.md: the HTTP framing has ended, the finish reason is one of ENDINGS, and there
was no error event.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from operator import sub
from typing import Any

import msgspec

from ..request import NEVER, Failure, Usage
from .sse import Named

ENDINGS = frozenset(("stop", "length", "tool_calls", "function_call", "content_filter"))
ERROR_TEXT_CHARS = 500


ABSENT = msgspec.Raw(b"null")
"""The value of a field that was not sent. (msgspec would decode a union of Raw and None as None only.)"""


def _is_set(raw: msgspec.Raw) -> bool:
    return raw is not ABSENT and bytes(raw) != b"null"


class _Delta(msgspec.Struct, gc=False):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: msgspec.Raw = ABSENT
    function_call: msgspec.Raw = ABSENT
    refusal: str | None = None
    token_ids: list[int] | None = None


class _Choice(msgspec.Struct, gc=False):
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    message: _Delta | None = None


class _Event(msgspec.Struct, gc=False):
    choices: list[_Choice] | None = None
    usage: msgspec.Raw = ABSENT
    error: msgspec.Raw = ABSENT
    message: msgspec.Raw = ABSENT  # trtllm-serve and SGLang put the error at the top level
    detail: msgspec.Raw = ABSENT
    timings: msgspec.Raw = ABSENT  # llama-server
    nvext: msgspec.Raw = ABSENT  # Dynamo
    metrics: msgspec.Raw = ABSENT  # vLLM


class _Id(msgspec.Struct, gc=False):
    id: str = ""


_decode = msgspec.json.Decoder(_Event).decode
_decode_id = msgspec.json.Decoder(_Id).decode
_decode_any = msgspec.json.decode
_has_output_count = re.compile(rb'"(?:completion|output)_tokens"\s*:\s*[1-9]').search  # above zero
_NOT_JSON = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
_PLAIN_BYTES = bytes(byte for byte in range(0x20, 0x100) if byte not in b'"\\')  # in a JSON string without escapes
_EMPTY = (b"null", b"[]", b"{}", b'""')


def is_plain_text(text: bytes) -> bool:
    """Whether these bytes in a JSON string are a text that is not empty, without escapes."""
    if not text or text.translate(None, _PLAIN_BYTES):
        return False
    if not text.isascii():
        try:
            text.decode()
        except UnicodeDecodeError:
            return False
    return True


Events = bytes | Named | int
"""What a read brings: an event, or a number, which stands for so many plain events (`Reading._learn`)."""


def events_in(events: Sequence[Events]) -> int:
    """How many events these are."""
    return sum([event if isinstance(event, int) else 1 for event in events])


def _split(events: Sequence[Events], count: int) -> tuple[list[Events], list[Events]]:
    """The first `count` events, and the others."""
    first: list[Events] = []
    for position, event in enumerate(events):
        size = event if isinstance(event, int) else 1
        if size > count:
            others = [size - count if isinstance(event, int) else event, *events[position + 1 :]]
            return ([*first, count] if count else first), others
        first.append(event)
        count -= size
    return first, []


class Flow:
    """Arrival instants of the output events of one stage and the gaps between them (ns): histogram, timeline.

    `errors`: the stamp errors (ns) of the events whose stamp is unsure. Every other event of `instants` has error 0.
    """

    __slots__ = ("errors", "gaps", "instants")

    def __init__(self) -> None:
        self.gaps: list[int] = []
        self.instants: list[int] = []
        self.errors: list[int] = []


class Reading:
    """The state of one answer while it arrives. `take` is given complete events.

    Instants are monotonic ns. An event's instant is its read's `stamp`: the arrival of the newest bytes of that read.
    An event that came in an earlier packet of the read may have arrived at any time since the socket was last known to
    be empty; the time from there to `stamp` is its stamp error.
    """

    __slots__ = (
        "done_marker",
        "end",
        "error",
        "finish_reason",
        "first_answer",
        "first_event",
        "first_event_tokens",
        "first_token",
        "flow",
        "last_token",
        "learned",
        "malformed",
        "max_gap",
        "max_gap_error",
        "output_events",
        "pieces",
        "plain_events",
        "reasoning_pieces",
        "response_id",
        "server_timing",
        "sink",
        "stamp_error",
        "template",
        "tool_deltas",
        "unsure_at",
        "unsure_error",
        "usage_raw",
    )

    def __init__(self, flow: Flow, keep_text: bool = False, sink: Any = None) -> None:
        self.flow = flow
        self.first_event = self.first_token = self.first_answer = self.last_token = self.end = NEVER
        self.output_events = self.max_gap = self.stamp_error = self.first_event_tokens = 0
        self.max_gap_error = self.unsure_error = 0
        self.unsure_at = NEVER  # stamp of the last output event of a read, if that stamp was unsure by `unsure_error`
        self.finish_reason = ""
        self.error = ""
        self.malformed = ""
        self.usage_raw: msgspec.Raw | None = None
        self.pieces: list[str] | None = [] if keep_text else None
        self.reasoning_pieces: list[str] | None = [] if keep_text else None
        self.server_timing: dict[str, Any] | None = None
        self.response_id = ""  # this and the tool calls are read only if texts are kept
        self.tool_deltas: list[msgspec.Raw] = []
        self.done_marker = False
        self.template: tuple[bytes, bytes] | None = None  # bytes before and after the text of a plain event: `_learn`
        self.learned = self.plain_events = 0  # templates so far, and events that were found by them
        self.sink = sink  # called with (text, reasoning, stamp) for each output event; None on the hot path

    @property
    def last_token_error(self) -> int:
        """How wrong the stamp of the last output event can be, ns."""
        return self.unsure_error if self.unsure_at == self.last_token else 0

    def take_unsure(
        self, events: Sequence[Events], stamp: int, error: int, unsure: int, *, one_write: bool = False
    ) -> None:
        """Process the events of one read. The first `unsure` of them may have come earlier, by at most `error` ns.

        The end of an answer (finish, usage, `[DONE]`) is sent right after its last output. Where only that follows an
        output event in its read, the first and the last token keep the error, but `Flow.errors` and the largest gap
        count the event as exact: it would judge servers, not this client. `one_write`: the same for all events, which
        came in one write.
        """
        before, largest = self.output_events, self.max_gap
        unsure_events, sure_events = _split(events, unsure)
        self.take(unsure_events, stamp, error)
        outputs = self.output_events - before
        self.take(sure_events, stamp)
        if self.output_events > before + outputs:
            self.unsure_at = NEVER
        elif outputs:
            self.unsure_at, self.unsure_error = stamp, error
            if self.finish_reason:
                outputs -= 1
        if not one_write:
            self.flow.errors.extend([error] * outputs)
        if (one_write or not outputs) and self.max_gap > largest:
            self.max_gap_error = 0

    def take_plain(self, count: int, stamp: int, error: int = 0) -> None:
        """Count plain events (`_learn`) that came together at `stamp`, or earlier by at most `error` ns."""
        if not count:
            return
        gap = stamp - self.last_token
        if gap > self.max_gap:
            self.max_gap = gap
            self.max_gap_error = error
        self.flow.gaps.append(gap)
        if count > 1:
            self.flow.gaps.extend([0] * (count - 1))
        self.flow.instants.extend([stamp] * count)
        self.output_events += count
        self.plain_events += count
        self.last_token = self.end = stamp

    def take_run(self, stamps: list[int]) -> None:
        """Count plain events, each with its own stamp, which is exact."""
        gaps = list(map(sub, stamps, [self.last_token, *stamps]))
        longest = max(gaps)
        if longest > self.max_gap:
            self.max_gap = longest
            self.max_gap_error = 0
        self.flow.gaps.extend(gaps)
        self.flow.instants.extend(stamps)
        self.output_events += len(stamps)
        self.plain_events += len(stamps)
        self.last_token = self.end = stamps[-1]

    def _learn(self, event: _Event, payload: bytes) -> None:
        """Make the template of plain events from one that was decoded.

        A plain event differs from it in its text alone, by which it needs no decoding: what stands before and after the
        text is the same, so it is the same JSON, and all that it says is that output came. The text must be in the
        payload exactly once as a string, which then is the string that was decoded (nothing in it is escaped).
        """
        choice = event.choices[0] if event.choices and len(event.choices) == 1 else None
        if choice is None or choice.finish_reason or b"\\" in payload or b"\n" in payload:
            return
        part = choice.delta or choice.message
        text = (part.content or part.reasoning_content or part.reasoning) if part is not None else choice.text
        if not text:
            return
        for raw in (event.usage, event.error, event.message, event.detail, event.timings, event.nvext, event.metrics):
            if raw is not ABSENT and _is_set(raw):
                return
        string = b'"%s"' % text.encode()
        at = payload.find(string)
        if at >= 0 and payload.rfind(string) == at:
            self.learned += 1
            self.template = payload[: at + 1], payload[at + len(string) - 1 :]

    def take(self, events: Sequence[Events], stamp: int, error: int = 0) -> None:
        """Process events that came at `stamp`, or earlier by at most `error` ns."""
        if events and self.first_event < 0:
            self.first_event = stamp
        flow = self.flow
        pieces = self.pieces
        before, after = self.template or (b"", b"")
        plain = 0
        for payload in events:
            if isinstance(payload, int):
                plain += payload
                continue
            if (
                before
                and payload[: len(before)] == before
                and payload[-len(after) :] == after
                and is_plain_text(payload[len(before) : -len(after)])  # type: ignore[arg-type]  # a Named is not equal
            ):
                plain += 1
                continue
            if plain:
                self.take_plain(plain, stamp, error)
                plain = 0
            try:
                event = _decode(payload)  # type: ignore[arg-type]  # a Named raises TypeError: cheaper than a test per event
                usual = pieces is None and self.sink is None
            except (*_NOT_JSON, TypeError):
                unusual = self._unusual_event(payload)
                if unusual is None:
                    continue
                event = unusual
                usual = False
            choices = event.choices
            if pieces is not None and not self.response_id:
                self.response_id = _id_of(payload)
            if choices:
                output = False
                for choice in choices:
                    delta = choice.delta
                    if delta is None:
                        delta = choice.message
                    if delta is not None:
                        text = delta.content
                    else:
                        text = choice.text
                    if text:
                        output = answer = True
                        if pieces is not None:
                            pieces.append(text)
                            if delta is not None and _is_set(delta.tool_calls):
                                self.tool_deltas.append(delta.tool_calls)
                    else:
                        output, answer = self._classify_without_text(choice, delta, output)
                    if output and self.last_token < 0:
                        self.first_token = stamp
                        self.stamp_error = error
                    if output and answer and self.first_answer < 0:
                        self.first_answer = stamp
                    if choice.finish_reason:
                        self.finish_reason = choice.finish_reason
                        self.end = stamp
                if output:
                    previous_output = self.last_token
                    if previous_output >= 0:
                        gap = stamp - previous_output
                        flow.gaps.append(gap)
                        if gap > self.max_gap:
                            self.max_gap = gap
                            self.max_gap_error = error
                    flow.instants.append(stamp)
                    self.output_events += 1
                    self.last_token = self.end = stamp
                    if self.sink is not None:
                        self._call_sink(choices, stamp)
                    # A stream whose events differ in more (a time, a usage) is not tried for ever.
                    if usual and self.learned <= 3 + self.plain_events // 4:
                        self._learn(event, payload)  # type: ignore[arg-type]
                        before, after = self.template or (b"", b"")
            if event.usage is not ABSENT and _is_set(event.usage):
                self._read_usage(event.usage)
            if event.error is not ABSENT or event.message is not ABSENT or event.detail is not ABSENT:
                self._read_error(event, payload)
            if event.timings is not ABSENT or event.nvext is not ABSENT or event.metrics is not ABSENT:
                self._read_timing(event)
        self.take_plain(plain, stamp, error)

    def _classify_without_text(self, choice: _Choice, delta: _Delta | None, output: bool) -> tuple[bool, bool]:
        """Whether a choice without content text is output, and whether that output is answer (not reasoning).

        Output without text: reasoning, a tool call, a refusal, token ids. `output`: what an earlier choice was.
        """
        if delta is not None:
            reasoning = delta.reasoning_content or delta.reasoning
            if reasoning:
                if self.reasoning_pieces is not None:
                    self.reasoning_pieces.append(reasoning)
                return True, False
            for raw in (delta.tool_calls, delta.function_call):
                if raw is not ABSENT and bytes(raw) not in _EMPTY:
                    if self.pieces is not None:
                        self.tool_deltas.append(raw)
                    return True, True
            if delta.refusal or delta.token_ids:
                return True, True
        if choice.token_ids:
            return True, True
        return output, False

    def _call_sink(self, choices: list[_Choice], stamp: int) -> None:
        for choice in choices:
            delta = choice.delta or choice.message
            text = (delta.content if delta is not None else choice.text) or ""
            reasoning = (delta.reasoning_content or delta.reasoning or "") if delta is not None else ""
            self.sink(text, reasoning, stamp)

    def _read_usage(self, raw: msgspec.Raw) -> None:
        """Keep the last usage with output tokens, else the first. With the first output event it gives n1 of TPOT."""
        if not _has_output_count(raw):
            self.usage_raw = self.usage_raw or raw
            return
        self.usage_raw = raw
        if self.output_events == 1 and not self.first_event_tokens and not self.finish_reason:
            self.first_event_tokens = parse_usage(raw).output or 0

    def _unusual_event(self, payload: bytes | Named) -> _Event | None:
        """Handle named events, `[DONE]`, `data: null`, and JSON of an unexpected shape; None: nothing more to read."""
        if isinstance(payload, Named):
            if payload.event == b"error":
                self.error = self.error or error_text(payload.data)
                return None
            if payload.event.endswith(b"metrics"):
                self._keep_timing(payload.event.decode("latin-1"), payload.data)
                return None
        text = (payload.data if isinstance(payload, Named) else payload).strip()  # a named event counts by its data
        if text == b"[DONE]":
            self.done_marker = True
            return None
        try:
            value = _decode_any(text)
        except _NOT_JSON:
            if not isinstance(payload, Named):
                self.malformed = self.malformed or f"an event that is not JSON: {text[:120]!r}"
            return None
        return _lenient_event(value) if isinstance(value, dict) else None

    def _read_error(self, event: _Event, payload: bytes | Named) -> None:
        if not (_is_set(event.error) or _is_set(event.message) or _is_set(event.detail)):
            return
        if bytes(event.error) not in _EMPTY or not (event.choices or _is_set(event.usage)):
            self.error = self.error or error_text(payload if isinstance(payload, bytes) else payload.data)

    def _read_timing(self, event: _Event) -> None:
        for name in ("timings", "nvext", "metrics"):
            raw = getattr(event, name)
            if _is_set(raw):
                self._keep_timing(name, bytes(raw))

    def _keep_timing(self, name: str, raw: bytes) -> None:
        try:
            value = _decode_any(raw)
        except _NOT_JSON:
            return
        if value is not None:
            self.server_timing = {**(self.server_timing or {}), name: value}

    def tool_calls(self) -> tuple[dict[str, str], ...]:
        """The tool calls of the answer, put together from their pieces: id, name, arguments (JSON, as text)."""
        calls: dict[int, dict[str, str]] = {}
        for raw in self.tool_deltas:
            value = _decode_any(raw)
            pieces = value if isinstance(value, list) else [{"function": value}]
            for position, piece in enumerate(pieces):
                if not isinstance(piece, dict):
                    continue
                index = piece.get("index")
                call = calls.setdefault(
                    index if isinstance(index, int) else position, {"id": "", "name": "", "arguments": ""}
                )
                function = piece.get("function")
                function = function if isinstance(function, dict) else {}
                call["id"] = call["id"] or str(piece.get("id") or "")
                call["name"] = call["name"] or str(function.get("name") or "")
                call["arguments"] += str(function.get("arguments") or "")
        return tuple(calls[index] for index in sorted(calls))

    def usage(self) -> Usage:
        """The last usage with a count of output tokens that the server sent; empty if it sent none."""
        return parse_usage(self.usage_raw) if self.usage_raw is not None else Usage()

    def judge(self, framing_ended: bool, until_close: bool, streamed: bool) -> Failure | None:
        """None when the request is ok, else its failure, by the rules of metrics.md.

        `framing_ended`: the body ended as its HTTP framing announced. `until_close`: the end of the connection ended
        it. `streamed`: the answer is an event stream.
        """
        if self.error:
            return Failure("error_event", self.error[:ERROR_TEXT_CHARS])
        if not framing_ended or (until_close and streamed and not self.finish_reason):
            return Failure("truncated", f"the body ended early, after {self.output_events} output events")
        if self.malformed:
            return Failure("malformed", self.malformed[:ERROR_TEXT_CHARS])
        if self.first_event < 0:
            return Failure("empty", "an answer without a single event")
        if self.finish_reason not in ENDINGS:
            reason = f"finish reason {self.finish_reason!r}" if self.finish_reason else "no finish reason"
            return Failure("no_finish_reason", f"{reason} after {self.output_events} output events")
        return None


def parse_usage(raw: msgspec.Raw | bytes) -> Usage:
    """The token counts of a server's usage object. A count that is missing or of another type is None."""
    try:
        value = _decode_any(raw)
    except _NOT_JSON:
        return Usage()
    if not isinstance(value, dict):
        return Usage()
    return Usage(
        input=_count(value.get("prompt_tokens", value.get("input_tokens"))),
        output=_count(value.get("completion_tokens", value.get("output_tokens"))),
        cached=_count(_nested(value, "prompt_tokens_details", "cached_tokens")),
        reasoning=_count(_nested(value, "completion_tokens_details", "reasoning_tokens")),
    )


def _id_of(payload: bytes | Named) -> str:
    try:
        return _decode_id(payload if isinstance(payload, bytes) else payload.data).id
    except _NOT_JSON:
        return ""


def _nested(value: dict[str, Any], outer: str, name: str) -> Any:
    nested = value.get(outer)
    return nested.get(name) if isinstance(nested, dict) else None


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 31 else None


def error_text(body: bytes) -> str:
    """The message in an error body of any server, else the beginning of the body."""
    try:
        value = _decode_any(body)
    except _NOT_JSON:
        return body[:ERROR_TEXT_CHARS].decode("utf-8", "replace").strip()
    inner = value
    if isinstance(value, dict):
        inner = value.get("error", value)
    if isinstance(inner, dict):
        for key in ("message", "detail", "msg"):
            if inner.get(key):
                inner = inner[key]
                break
    text = inner if isinstance(inner, str) else msgspec.json.encode(inner).decode()
    return text[:ERROR_TEXT_CHARS]


def _lenient_event(value: dict[str, Any]) -> _Event:
    """An event whose known fields have unexpected types: keep what can be read, drop the rest."""

    def text(item: Any) -> str | None:
        if isinstance(item, str):
            return item
        if isinstance(item, list):  # content as parts
            return "".join(p["text"] for p in item if isinstance(p, dict) and isinstance(p.get("text"), str)) or None
        return None

    def raw(item: Any) -> msgspec.Raw:
        return ABSENT if item is None else msgspec.Raw(msgspec.json.encode(item))

    def ids(item: Any) -> list[int] | None:
        return [i for i in item if isinstance(i, int)] if isinstance(item, list) else None

    def delta(item: Any) -> _Delta | None:
        if not isinstance(item, dict):
            return None
        return _Delta(
            content=text(item.get("content")),
            reasoning_content=text(item.get("reasoning_content")),
            reasoning=text(item.get("reasoning")),
            tool_calls=raw(item.get("tool_calls")),
            function_call=raw(item.get("function_call")),
            refusal=text(item.get("refusal")),
            token_ids=ids(item.get("token_ids")),
        )

    choices = [
        _Choice(
            delta=delta(choice.get("delta")),
            text=text(choice.get("text")),
            finish_reason=text(choice.get("finish_reason")),
            token_ids=ids(choice.get("token_ids")),
            message=delta(choice.get("message")),
        )
        for choice in value.get("choices") or ()
        if isinstance(choice, dict)
    ] if isinstance(value.get("choices"), list) else None  # fmt: skip
    names = ("usage", "error", "message", "detail", "timings", "nvext", "metrics")
    return _Event(choices=choices, **{name: raw(value.get(name)) for name in names})
