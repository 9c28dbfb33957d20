"""The input and output values of the client. They are immutable and have no methods.

All instants are integer nanoseconds on the monotonic clock (`time.monotonic_ns`); -1 means "never happened".
"""

from __future__ import annotations

from typing import Any

import msgspec

NEVER = -1


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One request: exactly one of `messages` (chat) and `prompt` (completions; text or token ids) is set.

    For the completions API, the contents of `messages` are joined with newlines. For the chat API, a prompt becomes one
    user message. `max_tokens` is the requested output length. With `exact_output`, the fields that force exactly this
    length on the server at hand are added to the body.
    """

    id: str
    messages: list[dict[str, Any]] | None = None
    prompt: str | list[int] | None = None
    max_tokens: int | None = None
    exact_output: bool = True
    input_tokens: int | None = None  # content tokens as built or counted; None: not counted
    input_source: str = ""  # source of that count: server, tokenizer, estimate, events
    extra: dict[
        str, Any
    ] = {}  # further body fields of this request (tools, temperature, ...); merged before --extra-body
    session: int = -1
    turn: int = 0


class Usage(msgspec.Struct, frozen=True):
    """Token counts as reported by the server; None: not reported.

    Where they cannot all be true, `contradiction` says which. Then no cost and no rate is computed
    from them.
    """

    input: int | None = None
    output: int | None = None
    cached: int | None = None
    reasoning: int | None = None
    cache_written: int | None = (
        None  # of the input, by servers that bill what is written to their cache
    )
    contradiction: str = ""


class Failure(msgspec.Struct, frozen=True):
    """Why a request is not `ok`. `kind`: one of loadgen_sdk.errors.KINDS; `text`: the beginning of the message."""

    kind: str
    text: str
    http_status: int = 0


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """What was observed of one request. `failure` is None exactly when the request is ok (metrics.md)."""

    request: Request | None
    due: int
    ready: int = NEVER  # a connection was available
    tcp: int = (
        NEVER  # how long TCP took (ns) of a connection that it was the first on; -1: it was not
    )
    tls: int = NEVER  # how long its TLS handshake took; 0 without TLS
    sent: int = NEVER  # first byte handed to the kernel
    first_byte: int = NEVER  # response head
    first_event: int = NEVER  # first SSE event of any kind
    first_token: int = (
        NEVER  # first event with generated output; never where output may have come before, unread
    )
    first_answer: int = NEVER  # first event with output that is not reasoning
    last_token: int = NEVER  # last event with output
    end: int = NEVER  # last output or finish event: where E2E ends
    done: int = NEVER  # end of the body
    output_events: int = 0
    first_event_tokens: int = (
        0  # tokens of the first output event by the server's count; 0: not reported
    )
    max_gap: int = 0  # largest gap between successive output events
    max_gap_error: int = 0  # the largest error of the stamp at the end of that gap
    client_lag: int = 0  # of the first token: time from its stamp to the read
    stamp_error: int = 0  # of the first token: the largest error of its stamp
    last_token_error: int = 0  # the same of the last token
    kernel_stamp: bool = False  # False: the stamp is the time of the read
    reused: bool = False  # sent on a connection that had carried a request before
    resent: int = 0
    http_status: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    finish_reason: str = ""
    usage: Usage = Usage()
    text: str | None = None  # output text, only if the client keeps texts
    reasoning_text: str | None = None
    headers: dict[str, str] | None = None  # response headers, only if the client keeps them
    server_timing: dict[str, Any] | None = None  # the server's own timing, unchanged
    failure: Failure | None = None
    tool_calls: tuple[
        dict[str, str], ...
    ] = ()  # id, name, arguments (JSON, as text); only if the client keeps texts
    response_id: str = ""  # the server's id of the answer; only if the client keeps texts
    remark: str = ""  # what is unusual about a response that is ok all the same
