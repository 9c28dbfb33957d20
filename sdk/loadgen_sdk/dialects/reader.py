"""Reads the events of an answer: text, finish reason, usage, errors, and the arrival instant of each. Pure.

Each request has one `Reading`. Chat and completions, streamed or not, are so similar that one reader serves all four.
A request is `ok` by the rules of metrics.md: the HTTP framing has ended, the finish reason is one of ENDINGS, and there
was no error event.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from operator import sub
from typing import Any

import msgspec

from ..compiled import module as _compiled
from ..request import NEVER, Failure, Usage
from .events import (
    ABSENT,
    EMPTY,
    ERROR_TEXT_CHARS,
    NOT_JSON,
    ChoiceFields,
    DeltaFields,
    EventFields,
    UsageFields,
    decode_any,
    decode_event,
    error_text,
    id_of,
    is_response,
    is_set,
    lenient_event,
    of_response,
    with_choices,
)
from .sse import Named

ENDINGS = frozenset(("stop", "length", "tool_calls", "function_call", "content_filter"))
<<<<<<< HEAD
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
    meta_info: msgspec.Raw = ABSENT  # SGLang's account of a whole answer


class _Details(msgspec.Struct, gc=False):
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None


class _Counts(msgspec.Struct, gc=False):
    """A usage object as a server sends it."""

    prompt_tokens: int | msgspec.UnsetType | None = msgspec.UNSET
    completion_tokens: int | msgspec.UnsetType | None = msgspec.UNSET
    input_tokens: int | None = None  # read where the names above are not sent
    output_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    completion_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None  # of the Responses API
    output_tokens_details: _Details | None = None

    def output(self) -> int | None:
        return _count(self.output_tokens if self.completion_tokens is msgspec.UNSET else self.completion_tokens)

    def usage(self) -> Usage:
        before = self.prompt_tokens_details or self.input_tokens_details
        after = self.completion_tokens_details or self.output_tokens_details
        return Usage(
            input=_count(self.input_tokens if self.prompt_tokens is msgspec.UNSET else self.prompt_tokens),
            output=self.output(),
            cached=None if before is None else _count(before.cached_tokens),
            reasoning=None if after is None else _count(after.reasoning_tokens),
        )


class _Event(msgspec.Struct, gc=False):
    choices: list[_Choice] | None = None
    usage: _Counts | None = None
    error: msgspec.Raw = ABSENT
    message: msgspec.Raw = ABSENT  # trtllm-serve and SGLang put the error at the top level
    detail: msgspec.Raw = ABSENT
    timings: msgspec.Raw = ABSENT  # llama-server
    nvext: msgspec.Raw = ABSENT  # Dynamo
    metrics: msgspec.Raw = ABSENT  # vLLM
    data: msgspec.Raw = ABSENT  # embeddings
    results: msgspec.Raw = ABSENT  # rerank
    output: msgspec.Raw = ABSENT  # a whole answer of the Responses API
    type: str = ""  # of an event of the Responses API


class _Id(msgspec.Struct, gc=False):
    id: str = ""
    response: _Id | None = None  # of the Responses API


_decode = msgspec.json.Decoder(_Event).decode
_decode_id = msgspec.json.Decoder(_Id).decode
_decode_any = msgspec.json.decode
_NOT_JSON = (msgspec.MsgspecError, ValueError, RecursionError)


def _decode_odd(text: bytes) -> Any:
    """The value of JSON as servers write it: also with half of a surrogate pair, which becomes U+FFFD (an answer was
    cut there), and with numbers beyond a double. Raises one of _NOT_JSON."""
    try:
        return _decode_any(text)
    except msgspec.MsgspecError:
        return _whole_texts(json.loads(text))


def _whole_texts(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {_whole_texts(key): _whole_texts(one) for key, one in value.items()}
    return [_whole_texts(one) for one in value] if isinstance(value, list) else value


=======
>>>>>>> 2f5e30e6 (SDK: signatures of at most 12 parameters, functions of 80 lines, files of 500: Client and Pool take typed options, a call ends with what was observed)
_PLAIN_BYTES = bytes(byte for byte in range(0x20, 0x100) if byte not in b'"\\')  # in a JSON string without escapes


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


def without_last(events: list[Events]) -> tuple[list[Events], list[Events]]:
    """All events but the last one, and that one."""
    last = events[-1]
    if isinstance(last, int) and last > 1:
        return [*events[:-1], last - 1], [1]
    return events[:-1], [last]


def plain_run(events: Sequence[Events], start: int, before: bytes, after: bytes) -> tuple[int, int]:
    """How many items of `events` from `start` on are plain events of this template, and how many events these are."""
    items = found = 0
    for position in range(start, len(events)):
        payload = events[position]
        if isinstance(payload, int):
            found += payload
        elif (
            isinstance(payload, bytes)
            and payload.startswith(before)
            and payload.endswith(after)
            and is_plain_text(payload[len(before) : -len(after)])
        ):
            found += 1
        else:
            break
        items += 1
    return items, found


pure_plain_run = plain_run
if _compiled is not None:
    plain_run = _compiled.plain_run


class Flow:
    """Arrival instants of the output events of one stage and the gaps between them (ns): histogram, timeline.

    `together`: plain events that came with the last event before them: its instant, and how many, each with a gap of 0.
    They are not in `gaps` and `instants`. `errors`: the stamp errors (ns) of the
    events whose stamp is unsure, and how many have it. Every other event has error 0.
    """

    __slots__ = ("errors", "gaps", "instants", "together")

    def __init__(self) -> None:
        self.gaps: list[int] = []
        self.instants: list[int] = []
        self.together: list[tuple[int, int]] = []
        self.errors: list[tuple[int, int]] = []

    def each_instant(self) -> list[int]:
        """The instant of every output event, in order."""
        return sorted([*self.instants, *(stamp for stamp, many in self.together for _ in range(many))])


class Reading:
    """The state of one answer while it arrives. `take` is given complete events.

    Instants are monotonic ns. An event's instant is its read's `stamp`: the arrival of the newest bytes of that read.
    An event that came in an earlier packet of the read may have arrived at any time since the socket was last known to
    be empty; the time from there to `stamp` is its stamp error.
    """

    __slots__ = (
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
        "usage_counts",
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
        self.usage_counts: UsageFields | None = None  # the last ones with output tokens that came, else the first
        self.pieces: list[str] | None = [] if keep_text else None
        self.reasoning_pieces: list[str] | None = [] if keep_text else None
        self.server_timing: dict[str, Any] | None = None
        self.response_id = ""  # this and the tool calls are read only if texts are kept
        self.tool_deltas: list[msgspec.Raw] = []
        self.template: tuple[bytes, bytes] | None = None  # bytes before and after the text of a plain event: `_learn`
        self.learned = self.plain_events = 0  # templates so far, and events that were found by them
        self.sink = sink  # called with (text, reasoning, stamp) for each output event; None on the hot path

    @property
    def last_token_error(self) -> int:
        """How wrong the stamp of the last output event can be, ns."""
        return self.unsure_error if self.unsure_at == self.last_token else 0

    def take_unsure(
        self,
        unsure: Sequence[Events],
        sure: Sequence[Events],
        stamp: int,
        error: int,
        *,
        one_write: bool = False,
    ) -> None:
        """Process the events of one read. Those that are `unsure` may have come earlier, by at most `error` ns.

        The end of an answer (finish, usage, `[DONE]`) is sent right after its last output, or with the next step of
        the server. Where only that follows an output event in its read, the first token keeps the error, the last one
        is wrong by a mean gap at most, and `Flow.errors` and the largest gap count the event as exact: it would judge
        servers, not this client. `one_write`: the same for all events, which came in one write.
        """
        before, largest = self.output_events, self.max_gap
        if unsure:
            self.take(unsure, stamp, error)
        outputs = self.output_events - before
        if sure:
            self.take(sure, stamp)
        if self.output_events > before + outputs:
            self.unsure_at = NEVER
        elif outputs:
            self.unsure_at, self.unsure_error = stamp, error
            if self.finish_reason:
                outputs -= 1
                if self.output_events > 1:
                    mean_gap = (stamp - self.first_token) // (self.output_events - 1)
                    self.unsure_error = min(error, mean_gap)
        if outputs and not one_write:
            self.flow.errors.append((error, outputs))
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
        self.flow.instants.append(stamp)
        if count > 1:
            self.flow.together.append((stamp, count - 1))
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

    def _learn(self, event: EventFields, payload: bytes) -> None:
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
        if event.usage is not None:
            return
        for raw in (event.error, event.message, event.detail, event.timings, event.nvext, event.metrics):
            if raw is not ABSENT and is_set(raw):
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
        position, size = 0, len(events)
        while position < size:
            if self.template is not None:
                items, plain = plain_run(events, position, *self.template)
                if items:
                    self.take_plain(plain, stamp, error)
                    position += items
                    continue
            payload: bytes | Named = events[position]  # type: ignore[assignment]  # no number without a template
            position += 1
            if payload == b"[DONE]":
                continue
            try:
                event = decode_event(payload)  # type: ignore[arg-type]  # a Named raises TypeError: cheaper than a test per event
                usual = pieces is None and self.sink is None
            except (*NOT_JSON, TypeError):
                unusual = self._unusual_event(payload)
                if unusual is None:
                    continue
                event = unusual
                usual = False
            choices = event.choices
            if choices is None and (made := with_choices(event, payload)) is not None:
                event, choices, usual = made, made.choices, False
            if pieces is not None and not self.response_id:
                self.response_id = id_of(payload)
            if choices:
                output = False
                for choice in choices:
                    delta = choice.delta
                    if delta is None:
                        delta = choice.message
                    text = choice.text if delta is None else delta.content
                    if text:
                        output = answer = True
                        if pieces is not None:
                            pieces.append(text)
                            if delta is not None and is_set(delta.tool_calls):
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
                        if choice.meta_info is not ABSENT:
                            self._keep_timing("meta_info", bytes(choice.meta_info))
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
            if event.usage is not None:
                self._read_usage(event.usage)
            if event.error is not ABSENT or event.message is not ABSENT or event.detail is not ABSENT:
                self._read_error(event, payload)
            if event.timings is not ABSENT or event.nvext is not ABSENT or event.metrics is not ABSENT:
                self._read_timing(event)

    def _classify_without_text(
        self, choice: ChoiceFields, delta: DeltaFields | None, output: bool
    ) -> tuple[bool, bool]:
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
                if raw is not ABSENT and bytes(raw) not in EMPTY:
                    if self.pieces is not None:
                        self.tool_deltas.append(raw)
                    return True, True
            if delta.refusal or delta.token_ids:
                return True, True
        if choice.token_ids:
            return True, True
        return output, False

    def _call_sink(self, choices: list[ChoiceFields], stamp: int) -> None:
        for choice in choices:
            delta = choice.delta or choice.message
            text = (delta.content if delta is not None else choice.text) or ""
            reasoning = (delta.reasoning_content or delta.reasoning or "") if delta is not None else ""
            self.sink(text, reasoning, stamp)

    def _read_usage(self, counts: UsageFields) -> None:
        """Keep the last usage with output tokens, else the first. With the first output event it gives n1 of TPOT."""
        output = counts.output()
        if not output:
            self.usage_counts = self.usage_counts or counts
            return
        self.usage_counts = counts
        if self.output_events == 1 and not self.first_event_tokens and not self.finish_reason:
            self.first_event_tokens = output

    def _unusual_event(self, payload: bytes | Named) -> EventFields | None:
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
            return None
        try:
<<<<<<< HEAD
            value = _decode_odd(text)
        except _NOT_JSON:
=======
            value = decode_any(text)
        except NOT_JSON:
>>>>>>> 2f5e30e6 (SDK: signatures of at most 12 parameters, functions of 80 lines, files of 500: Client and Pool take typed options, a call ends with what was observed)
            if not isinstance(payload, Named):
                self.malformed = self.malformed or f"an event that is not JSON: {text[:120]!r}"
            return None
        if not isinstance(value, dict):
            return None
        return of_response(value) if is_response(value) else lenient_event(value)

    def _read_error(self, event: EventFields, payload: bytes | Named) -> None:
        if not (is_set(event.error) or is_set(event.message) or is_set(event.detail)):
            return
        if bytes(event.error) not in EMPTY or not (event.choices or event.usage is not None):
            self.error = self.error or error_text(payload if isinstance(payload, bytes) else payload.data)

    def _read_timing(self, event: EventFields) -> None:
        for name in ("timings", "nvext", "metrics"):
            raw = getattr(event, name)
            if is_set(raw):
                self._keep_timing(name, bytes(raw))

    def _keep_timing(self, name: str, raw: bytes) -> None:
        try:
            value = decode_any(raw)
        except NOT_JSON:
            return
        if value is not None:
            self.server_timing = {**(self.server_timing or {}), name: value}

    def tool_calls(self) -> tuple[dict[str, str], ...]:
        """The tool calls of the answer, put together from their pieces: id, name, arguments (JSON, as text)."""
        calls: dict[int, dict[str, str]] = {}
        for raw in self.tool_deltas:
            value = decode_any(raw)
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
        return self.usage_counts.usage() if self.usage_counts is not None else Usage()

    @property
    def usage_is_absurd(self) -> bool:
        """Whether the server sent a number of output tokens that no answer can have, so that `usage` has none."""
        counts = self.usage_counts
        if counts is None:
            return False
        told = counts.output_tokens if counts.completion_tokens is msgspec.UNSET else counts.completion_tokens
        return told is not None and counts.output() is None

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
            reason = f"finish reason {self.finish_reason[:60]!r}" if self.finish_reason else "no finish reason"
            return Failure("no_finish_reason", f"{reason} after {self.output_events} output events")
        return None
<<<<<<< HEAD


def _without_choices(event: _Event, payload: bytes | Named) -> _Event | None:
    """Another API's event as one with choices: the numbers of embeddings or rerank, or of the Responses API."""
    if event.data is not ABSENT or event.results is not ABSENT:
        values = event.data if event.data is not ABSENT else event.results
        ended = [] if bytes(values) in _EMPTY else [_Choice(finish_reason="stop")]
        return _Event(choices=ended, usage=event.usage, error=event.error)
    if event.output is ABSENT and not event.type:
        return None
    try:
        value = _decode_any(payload if isinstance(payload, bytes) else payload.data)
    except _NOT_JSON:  # a name that the decoder above had no need to look at
        return None
    return _of_response(value) if _is_response(value) else None


def _is_response(value: dict[str, Any]) -> bool:
    kind = value.get("type")
    return value.get("object") == "response" or (isinstance(kind, str) and kind.startswith("response."))


_RESPONSE_DELTAS = {
    "response.output_text.delta": "content",
    "response.reasoning_text.delta": "reasoning",
    "response.reasoning_summary_text.delta": "reasoning",
    "response.refusal.delta": "refusal",
}
_RESPONSE_ENDS = {"max_output_tokens": "length", "content_filter": "content_filter"}


def _of_response(value: dict[str, Any]) -> _Event:
    """An event of the Responses API, or its whole answer, as one of chat. Events that only announce have no choices."""
    kind, delta = value.get("type"), value.get("delta")
    if kind in _RESPONSE_DELTAS and isinstance(delta, str):
        part: dict[str, Any] = {_RESPONSE_DELTAS[kind]: delta}
        return _Event(choices=[_Choice(delta=_Delta(**part))])
    if kind == "response.function_call_arguments.delta" and isinstance(delta, str):
        call = {"index": value.get("output_index"), "function": {"arguments": delta}}
        return _Event(choices=[_Choice(delta=_Delta(tool_calls=msgspec.Raw(msgspec.json.encode([call]))))])
    whole = value.get("object") == "response"
    response = value if whole else value.get("response")
    status = response.get("status") if isinstance(response, dict) else None
    if not isinstance(response, dict) or status not in ("completed", "incomplete", "failed"):
        return _Event()
    if status == "failed":
        return _Event(
            error=msgspec.Raw(msgspec.json.encode(response.get("error") or {"message": "the response failed"}))
        )
    items = [item for item in response.get("output") or () if isinstance(item, dict)]
    finish = "tool_calls" if any(item.get("type") == "function_call" for item in items) else "stop"
    if status == "incomplete":
        reason = str(_nested(response, "incomplete_details", "reason"))
        finish = _RESPONSE_ENDS.get(reason, reason)
    message = _whole_message(items) if whole else None
    usage = response.get("usage")
    counts = _counts_of(usage) if isinstance(usage, dict) else None
    return _Event(choices=[_Choice(message=message, finish_reason=finish)], usage=counts)


def _whole_message(items: list[dict[str, Any]]) -> _Delta:
    """What an answer that was not streamed says: its text, its reasoning, and its tool calls."""

    def texts(kind: str) -> str | None:
        parts = [part for item in items if item.get("type") == kind for part in item.get("content") or ()]
        return "".join(str(part["text"]) for part in parts if isinstance(part, dict) and part.get("text")) or None

    calls = [
        {"id": item.get("call_id"), "function": {"name": item.get("name"), "arguments": item.get("arguments")}}
        for item in items
        if item.get("type") == "function_call"
    ]
    raw = msgspec.Raw(msgspec.json.encode(calls)) if calls else ABSENT
    return _Delta(content=texts("message"), reasoning=texts("reasoning"), tool_calls=raw)


def _counts_of(value: dict[str, Any]) -> _Counts:
    try:
        return msgspec.convert(value, _Counts)
    except msgspec.ValidationError:
        return _lenient_counts(value)


def _lenient_counts(value: Any) -> _Counts:
    """Counts of which some have another type than a number. Output tokens that are no count: -1."""
    if not isinstance(value, dict):
        return _Counts()
    output = value.get("completion_tokens", value.get("output_tokens"))
    return _Counts(
        prompt_tokens=_count(value.get("prompt_tokens", value.get("input_tokens"))),
        completion_tokens=-1 if output is not None and _count(output) is None else output,
        prompt_tokens_details=_Details(cached_tokens=_count(_nested(value, "prompt_tokens_details", "cached_tokens"))),
        completion_tokens_details=_Details(
            reasoning_tokens=_count(_nested(value, "completion_tokens_details", "reasoning_tokens"))
        ),
    )


def _id_of(payload: bytes | Named) -> str:
    try:
        found = _decode_id(payload if isinstance(payload, bytes) else payload.data)
        return found.id or (found.response.id if found.response is not None else "")
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
    usage = None if value.get("usage") is None else _lenient_counts(value["usage"])
    names = ("error", "message", "detail", "timings", "nvext", "metrics")
    others: dict[str, Any] = {name: raw(value.get(name)) for name in names}
    return _Event(choices=choices, usage=usage, **others)
=======
>>>>>>> 2f5e30e6 (SDK: signatures of at most 12 parameters, functions of 80 lines, files of 500: Client and Pool take typed options, a call ends with what was observed)
