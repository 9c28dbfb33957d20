"""The requests and results of the client, as immutable values. Pure.

All timestamps are in ns on the monotonic clock (`time.monotonic_ns`). NEVER means that the event
did not happen.
"""

from __future__ import annotations

from typing import Any

import msgspec

NEVER = -1

NO_SESSION = -1
"""The session of a request that belongs to none."""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One request. Exactly one of `messages` and `prompt` is set.

    The completions API joins the contents of messages by newlines. The chat API sends a prompt as
    one user message.

    Attributes:
        id: The id of the request, unique in its load.
        messages: The messages of a chat.
        prompt: The prompt as text, or as token ids.
        max_tokens: The requested output length, or None for no limit.
        exact_output: The body has the fields that force exactly this length at this server.
        input_tokens: The content tokens of the prompt, or None if they were not counted.
        input_source: Where that count comes from: server, tokenizer, estimate or events.
        extra: Further body fields of this request (tools, temperature, ...), merged before those of
            the whole load.
        session: The index of the session, or NO_SESSION.
        turn: The index of the turn within its session.
    """

    id: str
    messages: list[dict[str, Any]] | None = None
    prompt: str | list[int] | None = None
    max_tokens: int | None = None
    exact_output: bool = True
    input_tokens: int | None = None
    input_source: str = ""
    extra: dict[str, Any] = {}
    session: int = NO_SESSION
    turn: int = 0


class Usage(msgspec.Struct, frozen=True):
    """The token counts of a response by the server. None means that it does not report a count.

    Attributes:
        input: The prompt tokens.
        output: The output tokens, reasoning included.
        cached: The prompt tokens that came from a cache.
        reasoning: The output tokens that are reasoning.
        cache_written: The prompt tokens that were written to a cache, if the server bills them.
        contradiction: Which counts cannot all be true, or "". No cost and no rate is then computed.
    """

    input: int | None = None
    output: int | None = None
    cached: int | None = None
    reasoning: int | None = None
    cache_written: int | None = None
    contradiction: str = ""


class Failure(msgspec.Struct, frozen=True):
    """Why a request is not ok.

    Attributes:
        kind: One of `loadgen_sdk.errors.KINDS`.
        text: The beginning of the error message.
        http_status: The HTTP status, or 0 if there was no response.
    """

    kind: str
    text: str
    http_status: int = 0


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """What was observed of one request. Timestamps are in ns.

    Attributes:
        request: The request.
        due: When the request was due.
        ready: When a connection was available.
        tcp: How long TCP took to connect, if the request was the first one of its connection.
        tls: How long the TLS handshake took, 0 without TLS.
        sent: When the first byte was passed to the kernel.
        first_byte: When the head of the response arrived.
        first_event: When the first event of any kind arrived.
        first_token: When the first event with output arrived. It is NEVER if output may have come
            earlier in fields that are not known.
        first_answer: When the first output arrived that is not reasoning.
        last_token: When the last event with output arrived.
        end: When the last output or finish event arrived. E2E latency ends here.
        done: When the body ended.
        output_events: The number of events with output.
        first_event_tokens: The tokens of the first output event, or 0 if that is not reported.
        max_gap: The largest gap between successive output events.
        max_gap_error: How wrong the timestamp at the end of that gap may be.
        client_lag: The time from the timestamp of the first token to its read.
        stamp_error: How wrong the timestamp of the first token may be.
        last_token_error: How wrong the timestamp of the last token may be.
        kernel_stamp: Timestamps come from the kernel. Otherwise they are the times of reads.
        reused: The connection had carried a request before.
        resent: How often the request was sent again.
        http_status: The HTTP status.
        bytes_sent: The bytes that were sent, head and body.
        bytes_received: The bytes that were received, head and body.
        finish_reason: The finish reason by the server.
        usage: The token counts by the server.
        text: The output text, if the client keeps texts.
        reasoning_text: The text of the reasoning, if the client keeps texts.
        headers: The headers of the response, if the client keeps headers.
        server_timing: The server's own timing by the names of its formats, unchanged.
        failure: Why the request is not ok, or None (metrics.md has the rules).
        tool_calls: The tool calls, if the client keeps texts: id, name and arguments (JSON, as
            text).
        response_id: The server's id of the response, if the client keeps texts.
        remark: What is unusual about a response that is ok, or "".
    """

    request: Request | None
    due: int
    ready: int = NEVER
    tcp: int = NEVER
    tls: int = NEVER
    sent: int = NEVER
    first_byte: int = NEVER
    first_event: int = NEVER
    first_token: int = NEVER
    first_answer: int = NEVER
    last_token: int = NEVER
    end: int = NEVER
    done: int = NEVER
    output_events: int = 0
    first_event_tokens: int = 0
    max_gap: int = 0
    max_gap_error: int = 0
    client_lag: int = 0
    stamp_error: int = 0
    last_token_error: int = 0
    kernel_stamp: bool = False
    reused: bool = False
    resent: int = 0
    http_status: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    finish_reason: str = ""
    usage: Usage = Usage()
    text: str | None = None
    reasoning_text: str | None = None
    headers: dict[str, str] | None = None
    server_timing: dict[str, Any] | None = None
    failure: Failure | None = None
    tool_calls: tuple[dict[str, str], ...] = ()
    response_id: str = ""
    remark: str = ""
