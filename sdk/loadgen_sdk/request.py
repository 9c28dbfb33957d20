"""The values that go into the client and come out of it. Immutable; no behaviour beyond construction.

All instants are integer nanoseconds on the monotonic clock (`time.monotonic_ns`); -1 means "never happened".
"""

from __future__ import annotations

from typing import Any

import msgspec

NEVER = -1


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One thing to send: exactly one of `messages` (chat) and `prompt` (completions; text or token ids) is set.

    A chat request sent to the completions API has its messages' contents joined by newlines; a prompt sent to the
    chat API becomes one user message. `max_tokens` is the output length asked for; with `exact_output` the dialect
    adds whatever forces exactly that length on the server at hand.
    """

    id: str
    messages: list[dict[str, Any]] | None = None
    prompt: str | list[int] | None = None
    max_tokens: int | None = None
    exact_output: bool = True
    input_tokens: int | None = None  # content tokens as built or counted; None when nobody counted
    input_source: str = ""  # tag of that count: server, tokenizer, estimate, events
    extra: dict[
        str, Any
    ] = {}  # further body fields of this request (tools, temperature, ...); merged before --extra-body
    session: int = -1
    turn: int = 0


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts as the server reported them; None where it said nothing."""

    input: int | None = None
    output: int | None = None
    cached: int | None = None
    reasoning: int | None = None


class Failure(msgspec.Struct, frozen=True):
    """Why a request is not `ok`. `kind` is one of loadgen_sdk.errors.KINDS, `text` the first words about it."""

    kind: str
    text: str
    http_status: int = 0


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """What the wire saw of one request. `failure` is None exactly when the request is ok (metrics.md)."""

    request: Request | None
    due: int
    ready: int = NEVER  # a connection was available
    sent: int = NEVER  # first byte handed to the kernel
    first_byte: int = NEVER  # response head
    first_event: int = NEVER  # first SSE event of any kind
    first_token: int = NEVER  # first event with generated output
    first_answer: int = NEVER  # first event with output that is not reasoning
    last_token: int = NEVER  # last event with output
    end: int = NEVER  # last output or finish event: where E2E ends
    done: int = NEVER  # end of the body
    output_events: int = 0
    first_event_tokens: int = 0  # tokens of the first output event when the server says; 0 = it does not say
    max_gap: int = 0  # largest gap between successive output events
    client_lag: int = 0  # first token: kernel stamp -> read
    stamp_error: int = 0  # first token: how wrong the stamp can be
    kernel_stamp: bool = False  # False: the read's own clock was the stamp
    reused: bool = False  # sent on a connection that had served before
    resent: int = 0
    http_status: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    finish_reason: str = ""
    usage: Usage = Usage()
    text: str | None = None  # output text, only when the client was asked to keep it
    reasoning_text: str | None = None
    headers: dict[str, str] | None = None  # response head, only when asked to keep it
    server_timing: dict[str, Any] | None = None  # what the server said of its own timing, as it came
    failure: Failure | None = None
