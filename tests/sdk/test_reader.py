"""Tests of the response reader on responses of real servers and their known defects."""

from __future__ import annotations

import gzip
import json
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import repository_paths
from hypothesis import given
from hypothesis import strategies as st
from loadgen_sdk.request import NEVER, Completion, Usage
from loadgen_sdk.transport.exchange import Exchange
from loadgen_sdk.wire_formats.event_fields import error_text
from loadgen_sdk.wire_formats.event_timeline import EventTimeline
from loadgen_sdk.wire_formats.response_reader import NOT_STREAMED, NOT_UTF8, ResponseReader
from loadgen_sdk.wire_formats.sse import NamedEvent
from loadgen_sdk.wire_formats.usage import without_doubtful_counts

TRANSCRIPTS = repository_paths.DATA / "transcripts"


def exchange(*, keep_text: bool = True) -> tuple[Exchange, list[Completion]]:
    completions: list[Completion] = []
    exchange_state = Exchange(
        None,
        b"",
        b"",
        0,
        completions.append,
        EventTimeline(),
        is_stream_requested=True,
        keep_text=keep_text,
    )
    exchange_state.sent_at = 1
    return exchange_state, completions


def answered(*pieces: bytes, reset: str = "") -> Completion:
    """Return the completion of a response that arrives in these pieces, 10 ns apart."""
    exchange_state, completions = exchange()
    at = 100
    for piece in pieces:
        if piece and exchange_state.feed_reads([(piece, at, at + 3, at - 10, True)]):
            break
        at += 10
    else:
        exchange_state.end_with_connection(at, reset)
    exchange_state.report_completion()
    return completions[0]


def splits(data: bytes) -> list[list[bytes]]:
    """In one piece, byte by byte, and in pieces of sizes that fall nowhere in particular."""
    return [
        [data],
        *([data[i : i + step] for i in range(0, len(data), step)] for step in (1, 7, 97, 1460)),
    ]


def comparable_facts(completion: Completion) -> tuple[Any, ...]:
    """All that must not depend on how the bytes were cut."""
    counts = (
        completion.output_events,
        completion.first_event_tokens,
        completion.bytes_received,
        completion.http_status,
    )
    return (
        completion.text,
        completion.reasoning_text,
        completion.usage,
        completion.finish_reason,
        completion.failure,
        completion.server_timing,
        *counts,
    )


class Case(NamedTuple):
    text: str
    events: int
    usage: tuple[int, int, int | None] | None  # input, output, cached
    kind: str = ""
    error_text: str = ""  # in the failure's text
    status: int = 200


FILES = {
    "dynamo/chat_annotations": Case("finitstarts into", 3, (11, 3, 0)),
    "dynamo/chat_nostream": Case("netsidetent over", 1, (21, 4, 0)),
    "dynamo/chat_stream_both_max": Case("']__)nalCHparts", 5, (21, 5, 0)),
    "dynamo/chat_stream_contusage": Case("stat())endward", 4, (21, 4, 0)),
    "dynamo/chat_stream_ignore_eos": Case("Testbytesappthemax async", 6, (21, 6, 0)),
    "dynamo/chat_stream_nousage": Case(" itemfor also process", 4, None),
    "dynamo/chat_stream_usage": Case("32stead supportizedwidthlector remove__.", 8, (21, 8, 0)),
    "dynamo/cmpl_batch_stream": Case("vingmittendedkwargswrapceback", 6, (4, 6, 0)),
    "dynamo/cmpl_nostream": Case(" Sestderrexitstru", 1, (3, 4, 0)),
    "dynamo/cmpl_stream_contusage": Case(
        " exist action                             prefix", 4, (3, 4, 0)
    ),
    "dynamo/cmpl_stream_ignore_eos": Case("cesUN fin Extendedfileobjrence", 6, (3, 6, 0)),
    "dynamo/cmpl_stream_one": Case("TE", 1, (3, 1, 0)),
    "dynamo/cmpl_stream_tokenids": Case(" obj datezinfo IP", 4, (5, 4, 0)),
    "dynamo/cmpl_stream_usage": Case('andardXXmonDe cmd." roundest', 8, (3, 8, 0)),
    "dynamo/err_bad_json": Case(
        "", 0, None, "http_4xx", "Failed to deserialize the JSON body", 400
    ),
    "dynamo/err_bad_model": Case("", 0, None, "http_4xx", "Model not found", 404),
    "dynamo/err_ctx_overflow_c": Case(" indexday cacheormal", 4, None),
    "dynamo/err_ctx_overflow_ch": Case("TPIPlatform /", 4, None),
    "dynamo/err_missing_msgs": Case("", 0, None, "http_4xx", "missing field `messages`", 400),
    "dynamo/err_neg_max": Case("", 0, None, "http_4xx", "expected u32", 400),
    "dynamo/err_streamopts_nostream": Case("", 0, None, "http_4xx", "'stream_options' field", 400),
    "dynamo/err_unknown_field": Case(
        "", 0, None, "http_4xx", "Unsupported parameter(s): `no_such_field_xyz`", 400
    ),
    "llamaserver/chat_nostream": Case('",#chunkschunkschunks', 1, (21, 4, 20)),
    "llamaserver/chat_return_progress": Case(" modes raiseser", 3, None),
    "llamaserver/chat_stream_both_max": Case('",#chunkschunkschunkschunks', 5, (21, 5, 20)),
    "llamaserver/chat_stream_contusage": Case('",#chunkschunkschunks', 4, (21, 4, 20)),
    "llamaserver/chat_stream_ignore_eos": Case('",#chunkschunkschunkschunksHEAD', 6, (21, 6, 20)),
    "llamaserver/chat_stream_nousage": Case('",#chunkschunkschunks', 4, None),
    "llamaserver/chat_stream_usage": Case('",#chunkschunkschunkschunksHEADited go', 8, (21, 8, 0)),
    "llamaserver/cmpl_batch_stream": Case(" coordin ``mon cachedsome cached", 6, (2, 3, 1)),
    "llamaserver/cmpl_nostream": Case(" truncated `` explicit conflict", 1, (3, 4, 2)),
    "llamaserver/cmpl_stream_contusage": Case(" truncated `` explicit conflict", 4, (3, 4, 2)),
    "llamaserver/cmpl_stream_ignore_eos": Case(
        " truncated `` explicit conflictpliespartial", 6, (3, 6, 2)
    ),
    "llamaserver/cmpl_stream_one": Case(" truncated", 1, (3, 1, 2)),
    "llamaserver/cmpl_stream_tokenids": Case(" pickled First First First", 4, (5, 4, 0)),
    "llamaserver/cmpl_stream_usage": Case(
        " truncated `` explicit conflictpliespartialpartialpartial", 8, (3, 8, 0)
    ),
    "llamaserver/err_bad_json": Case(
        "", 0, None, "http_5xx", "[json.exception.parse_error.101]", 500
    ),
    "llamaserver/err_bad_model": Case('",# slash Raise indicate', 4, None),
    "llamaserver/err_ctx_overflow_c": Case(
        "", 0, None, "http_4xx", "request (9001 tokens) exceeds", 400
    ),
    "llamaserver/err_ctx_overflow_ch": Case(
        "", 0, None, "http_4xx", "request (9011 tokens) exceeds", 400
    ),
    "llamaserver/err_missing_msgs": Case("", 0, None, "http_4xx", "'messages' is required", 400),
    "llamaserver/err_neg_max": Case("", 0, None, "http_4xx", "Field 'max_tokens'", 400),
    "llamaserver/err_no_key": Case("", 0, None, "http_4xx", "Invalid API Key", 401),
    "llamaserver/err_streamopts_nostream": Case('",#chunks (%",#', 1, (21, 4, 20)),
    "llamaserver/err_unknown_field": Case('",# regchunkschunks', 1, (21, 4, 20)),
    "tfserve/chat_nostream": Case('",#chunkschunkschunks', 1, (21, 4, None)),
    "tfserve/chat_stream_both_max": Case('",#chunkschunkschunksHEAD', 5, (21, 5, None)),
    "tfserve/chat_stream_contusage": Case('",#chunkschunkschunks', 4, (21, 4, None)),
    "tfserve/chat_stream_ignore_eos": Case(
        "", 0, None, "http_4xx", "Unexpected fields in the request", 422
    ),
    "tfserve/chat_stream_nousage": Case('",#chunkschunkschunks', 4, (21, 4, None)),
    "tfserve/chat_stream_usage": Case('",#chunkschunkschunksHEADchunksHEADited', 8, (21, 8, None)),
    "tfserve/cmpl_batch_stream": Case("", 0, None, "http_4xx", "prompt must be a string.", 400),
    "tfserve/cmpl_nostream": Case(" truncated `` explicit conflict", 1, (3, 4, None)),
    "tfserve/cmpl_stream_contusage": Case(" truncated `` explicit conflict", 4, (3, 4, None)),
    "tfserve/cmpl_stream_ignore_eos": Case(
        "", 0, None, "http_4xx", "Unexpected fields in the request", 422
    ),
    "tfserve/cmpl_stream_one": Case(" truncated", 1, (3, 1, None)),
    "tfserve/cmpl_stream_tokenids": Case("", 0, None, "http_4xx", "prompt must be a string.", 400),
    "tfserve/cmpl_stream_usage": Case(
        " truncated `` explicit conflictpliespartialpartialpartial", 8, (3, 8, None)
    ),
    "tfserve/err_bad_json": Case("", 0, None, "http_4xx", "JSON decode error", 422),
    "tfserve/err_bad_model": Case("", 0, None, "http_4xx", "requested 'no-such-model'", 400),
    "tfserve/err_ctx_overflow_c": Case("fgetSEDfgetSED", 4, (9001, 4, None)),
    "tfserve/err_ctx_overflow_ch": Case("fgetSEDfgetSED", 4, (9011, 4, None)),
    "tfserve/err_missing_msgs": Case("", 0, None, "http_5xx", "Internal Server Error", 500),
    "tfserve/err_neg_max": Case(
        "", 0, None, "error_event", "`max_new_tokens` must be greater than 0"
    ),
    "tfserve/err_streamopts_nostream": Case('",#chunkschunkschunks', 1, (21, 4, None)),
    "tfserve/err_unknown_field": Case("", 0, None, "http_4xx", "'no_such_field_xyz'", 422),
}


@pytest.mark.parametrize("name", FILES)
def test_transcripts_of_real_servers_are_read_to_the_expected_results(name: str) -> None:
    case, data = FILES[name], (TRANSCRIPTS / f"{name}.http").read_bytes()
    completions = [answered(*pieces) for pieces in splits(data)]
    completion = completions[0]

    assert (completion.text, completion.output_events, completion.http_status) == (
        case.text,
        case.events,
        case.status,
    )
    usage = completion.usage
    assert (usage.input, usage.output, usage.cached) == (case.usage or (None, None, None))
    assert completion.finish_reason == ("" if case.kind else "length")
    assert (completion.failure.kind if completion.failure else "") == case.kind
    assert case.error_text in (completion.failure.text if completion.failure else "")
    assert [comparable_facts(other) for other in completions[1:]] == [
        comparable_facts(completion)
    ] * (len(completions) - 1)
    assert completion.bytes_received == len(data)


def test_every_transcript_file_is_tested() -> None:
    files = {f"{file.parent.name}/{file.stem}" for file in TRANSCRIPTS.glob("*/*.http")}
    assert files == set(FILES)


def test_any_truncation_of_a_real_stream_is_a_failure_with_its_partial_output() -> None:
    data = (TRANSCRIPTS / "dynamo/chat_stream_usage.http").read_bytes()
    full_text = answered(data).text or ""
    kinds = set()
    for end in range(0, len(data), 5):
        for reset in ("", "Connection reset by owner"):
            completion = answered(data[:end], reset=reset)
            assert completion.failure is not None, end
            assert full_text.startswith(completion.text or "")
            kinds.add((completion.failure.kind, bool(reset)))

    assert kinds == {("reset", False), ("truncated", False), ("reset", True)}


# -- traps -----------------------------------------------------------------------------------------


def event(*, finish: str | None = None, usage: Any = None, **delta: Any) -> dict[str, Any]:
    document: dict[str, Any] = {
        "id": "x",
        "choices": [{"index": 0, "delta": delta, "finish_reason": finish}],
    }
    return document | ({"usage": usage} if usage is not None else {})


def piece(text: str, finish: str | None = None, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish}], **more}


def stream(*events: Any, end: bytes = b"0\r\n\r\n") -> bytes:
    """Return a chunked response with one event per chunk. Bytes are sent as they are."""
    out = (
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n"
    )
    for value in events:
        data = (
            value if isinstance(value, bytes) else b"data: " + json.dumps(value).encode() + b"\n\n"
        )
        out += b"%X\r\n%s\r\n" % (len(data), data)
    return out + end


def counted(output: int, input: int = 9, **more: Any) -> dict[str, Any]:
    return {
        "prompt_tokens": input,
        "completion_tokens": output,
        "total_tokens": input + output,
        **more,
    }


DONE = b"data: [DONE]\n\n"
ROLE = event(role="assistant", content="")
A, B = event(content="a"), event(content="b")
STOP = event(finish="stop")
ERROR = {"error": {"message": "engine died", "type": "server_error", "code": 503}}
TOOL = [{"index": 0, "id": "c", "type": "function", "function": {"name": "f", "arguments": ""}}]

TRAPS: dict[
    str, tuple[bytes, str, int, int | None, str]
] = {  # bytes, text, output events, output tokens, kind
    "plain": (stream(ROLE, A, B, STOP, DONE), "ab", 2, None, ""),
    "1 role first": (
        stream(ROLE, event(role="assistant"), event(role="assistant", content=None), A, STOP),
        "a",
        1,
        None,
        "",
    ),
    "1 Azure: choices [] first": (
        stream(
            {"choices": [], "prompt_filter_results": [{"prompt_index": 0}]}, ROLE, A, STOP, DONE
        ),
        "a",
        1,
        None,
        "",
    ),
    "3 error event after tokens": (stream(ROLE, A, ERROR, DONE), "a", 1, None, "error_event"),
    "3 error event, then a finish": (
        stream(ROLE, A, ERROR, STOP, DONE),
        "a",
        1,
        None,
        "error_event",
    ),
    "3 only an error event": (stream(ERROR, DONE), "", 0, None, "error_event"),
    "3 error as a string": (stream(A, {"error": "engine died"}), "a", 1, None, "error_event"),
    "3 error at the top level": (
        stream(A, {"object": "error", "message": "engine died", "code": 400}),
        "a",
        1,
        None,
        "error_event",
    ),
    "3 error as detail": (stream(A, {"detail": "engine died"}), "a", 1, None, "error_event"),
    "3 named error": (
        stream(A, b"event: error\ndata: engine died\n\n"),
        "a",
        1,
        None,
        "error_event",
    ),
    "3 error event, then the line is cut": (stream(A, ERROR, end=b""), "a", 1, None, "error_event"),
    "error: null is none": (
        stream(A | {"error": None}, STOP | {"error": None}, {"choices": [], "error": None}),
        "a",
        1,
        None,
        "",
    ),
    "4 empty": (stream(), "", 0, None, "empty"),
    "4 empty, by length": (
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 0\r\n\r\n",
        "",
        0,
        None,
        "empty",
    ),
    "4 null": (
        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 4\r\n\r\nnull",
        "",
        0,
        None,
        "no_finish_reason",
    ),
    "4 comments only": (stream(b": ping\n\n", b": ping\n\n"), "", 0, None, "empty"),
    "5 cut": (stream(ROLE, A, B, end=b""), "ab", 2, None, "truncated"),
    "5 cut after the finish": (stream(ROLE, A, STOP, DONE, end=b""), "a", 1, None, "truncated"),
    "6 no DONE": (stream(ROLE, A, STOP), "a", 1, None, ""),
    "6 close-delimited": (
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: "
        + json.dumps(event(content="a", finish="stop")).encode()
        + b"\n\n",
        "a",
        1,
        None,
        "",
    ),
    "close-delimited without a finish": (
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: "
        + json.dumps(A).encode()
        + b"\n\n",
        "a",
        1,
        None,
        "truncated",
    ),
    "7 two DONE": (stream(A, STOP, DONE, DONE), "a", 1, None, ""),
    "7 metrics after DONE": (
        stream(A, STOP, DONE, b'event: trtllm.perf_metrics\ndata: {"ttft": 1.5}\n\n'),
        "a",
        1,
        None,
        "",
    ),
    "8 several tokens per event": (
        stream(event(content="a b c"), event(content=" d e", finish="length", usage=counted(5))),
        "a b c d e",
        2,
        5,
        "",
    ),
    "9 empty content between": (
        stream(A, event(content=""), B, event(content="", finish="stop", usage=counted(4))),
        "ab",
        2,
        4,
        "",
    ),
    "9 no event for a token at all": (
        stream(STOP, {"choices": [], "usage": counted(3)}),
        "",
        0,
        3,
        "",
    ),
    "10 usage with choices []": (
        stream(A, STOP, {"choices": [], "usage": counted(7)}, DONE),
        "a",
        1,
        7,
        "",
    ),
    "10 usage on the finish chunk": (stream(A, STOP | {"usage": counted(7)}), "a", 1, 7, ""),
    "10 usage with an empty choice": (
        stream(A, STOP, {"choices": [{"index": 0, "delta": {}}], "usage": counted(7)}),
        "a",
        1,
        7,
        "",
    ),
    "10 usage null everywhere": (
        stream(A | {"usage": None}, STOP | {"usage": None}, {"choices": [], "usage": counted(7)}),
        "a",
        1,
        7,
        "",
    ),
    "10 zeros everywhere": (
        stream(A | {"usage": counted(0, 0)}, STOP | {"usage": counted(0, 0)}),
        "a",
        1,
        0,
        "",
    ),
    "10 the last usage that counts": (
        stream(
            A | {"usage": counted(1)},
            B | {"usage": counted(2)},
            STOP | {"usage": counted(2)},
            {"choices": [], "usage": counted(0)},
        ),
        "ab",
        2,
        2,
        "",
    ),
    "10 usage in the middle, late": (
        stream(A, B, A, A | {"usage": counted(4)}, STOP | {"usage": counted(0)}),
        "abaa",
        4,
        4,
        "",
    ),
    "10 none": (stream(A, STOP, DONE), "a", 1, None, ""),
    "10 usage that is nonsense": (
        stream(A | {"usage": 5}, STOP | {"usage": {"completion_tokens": "x"}}),
        "a",
        1,
        None,
        "",
    ),
    "10 usage beyond all sense": (stream(A, STOP | {"usage": counted(10**13)}), "a", 1, None, ""),
    "11 data: null": (
        stream(b"data: null\n\n", A, STOP, b"data: 7\n\n", b"data: []\n\n"),
        "a",
        1,
        None,
        "",
    ),
    "12 no text key": (
        stream(piece("a"), {"choices": [{"index": 0, "finish_reason": "length"}]}),
        "a",
        1,
        None,
        "",
    ),
    "12 no finish_reason key": (
        stream(
            {"choices": [{"delta": {"content": "a"}}]}, {"choices": [{"finish_reason": "stop"}]}
        ),
        "a",
        1,
        None,
        "",
    ),
    "12 delta null": (
        stream({"choices": [{"delta": None, "finish_reason": None}]}, A, STOP),
        "a",
        1,
        None,
        "",
    ),
    "12 choices null": (stream({"choices": None}, {}, A, STOP), "a", 1, None, ""),
    "13 comments between": (
        stream(b": ping - x\n\n", b":\n\n", A, b": ping\n\n", STOP),
        "a",
        1,
        None,
        "",
    ),
    "14 fewer than asked": (stream(A, event(finish="length", usage=counted(1))), "a", 1, 1, ""),
    "trailing blank": (
        stream(b'data: {"choices":[{"delta":{"role":"assistant"}}]} \n\n', A, STOP),
        "a",
        1,
        None,
        "",
    ),
    "CRLF, no space": (
        stream(b'data:{"choices":[{"text":"a","finish_reason":"stop"}]}\r\n\r\n'),
        "a",
        1,
        None,
        "",
    ),
    "several events in one chunk": (
        stream(
            b"".join(b"data: " + json.dumps(v).encode() + b"\n\n" for v in (ROLE, A, B, STOP))
            + DONE
        ),
        "ab",
        2,
        None,
        "",
    ),
    "tool call": (
        stream(ROLE, event(tool_calls=TOOL), event(finish="tool_calls")),
        "",
        1,
        None,
        "",
    ),
    "empty tool calls": (stream(event(content="", tool_calls=[]), A, STOP), "a", 1, None, ""),
    "function call": (
        stream(event(function_call={"name": "f"}), event(finish="function_call")),
        "",
        1,
        None,
        "",
    ),
    "refusal": (stream(event(refusal="no"), STOP), "", 1, None, ""),
    "content filter": (stream(A, event(finish="content_filter")), "a", 1, None, ""),
    "abort": (stream(A, event(finish="abort")), "a", 1, None, "error_event"),
    "ERROR": (stream(A, event(finish="ERROR")), "a", 1, None, "error_event"),
    "another word for the end": (stream(A, event(finish="eos")), "a", 1, None, ""),
    "a heartbeat of empty data": (
        stream(b"data:\n\n", A, b"data: \n\n", STOP, b"data\n\n"),
        "a",
        1,
        None,
        "",
    ),
    "only heartbeats": (stream(b"data: \n\n", b"data: \n\n"), "", 0, None, "empty"),
    "an error as a field": (
        stream(A, b'error: {"message":"engine died"}\n\n'),
        "a",
        1,
        None,
        "error_event",
    ),
    "a media type in capitals": (
        stream(A, STOP).replace(b"text/event-stream", b"Text/Event-Stream"),
        "a",
        1,
        None,
        "",
    ),
    "a stream that is called JSON": (
        stream(A, STOP).replace(b"text/event-stream", b"application/json"),
        "",
        0,
        None,
        "malformed",
    ),
    "a response that was cancelled": (
        stream({"type": "response.cancelled", "response": {"status": "cancelled"}}),
        "",
        0,
        None,
        "error_event",
    ),
    "a delta of the Responses API that is not known": (
        stream(
            {"type": "response.mcp_call_arguments.delta", "delta": "{"},
            {"type": "response.completed", "response": {"status": "completed"}},
        ),
        "",
        1,
        None,
        "",
    ),
    "no finish reason": (stream(ROLE, A, DONE), "a", 1, None, "no_finish_reason"),
    "token ids without text": (
        stream(
            {"choices": [{"text": "", "token_ids": [1, 2]}]},
            {"choices": [{"text": "", "token_ids": [3], "finish_reason": "length"}]},
        ),
        "",
        2,
        None,
        "",
    ),
    "token ids empty": (
        stream({"choices": [{"text": "", "token_ids": []}]}, piece("a", "stop")),
        "a",
        1,
        None,
        "",
    ),
    "content as parts": (
        stream(event(content=[{"type": "text", "text": "a"}, {"type": "image"}]), STOP),
        "a",
        1,
        None,
        "",
    ),
    "odd types": (
        stream(
            {"choices": [None, 5, {"delta": "x"}]}, {"choices": {"0": 1}}, A, event(finish=7), STOP
        ),
        "a",
        1,
        None,
        "",
    ),
    "a named event that is not JSON": (
        stream(b"event: ping\ndata: 17 s\n\n", A, STOP),
        "a",
        1,
        None,
        "",
    ),
    "an event of another name": (
        stream(b"event: chunk\n" + b"data: " + json.dumps(A).encode() + b"\n\n", STOP),
        "a",
        1,
        None,
        "",
    ),
    "broken JSON": (
        stream(A, b'data: {"choices": [{"del\n\n', STOP, DONE),
        "a",
        1,
        None,
        "malformed",
    ),
    "not UTF-8": (
        stream(b'data: {"choices":[{"text":"\xff"}]}\n\n', STOP),
        "\ufffd",
        1,
        None,
        "",
    ),
    "not UTF-8, of the Responses API": (
        stream(
            b'data: {"type":"response.output_text.delta","delta":"\xff"}\n\n',
            {"type": "response.completed", "response": {"status": "completed"}},
        ),
        "\ufffd",
        1,
        None,
        "",
    ),
    "a lone surrogate": (
        stream(b'data: {"choices":[{"text":"\\ud800"}]}\n\n', STOP),
        "\ufffd",
        1,
        None,
        "",
    ),
    "deep nesting": (
        stream(b'data: {"choices":' + b"[" * 5000 + b"\n\n", STOP),
        "",
        0,
        None,
        "malformed",
    ),
    "deep nesting in usage": (
        stream(A | {"usage": json.loads("[" * 500 + "]" * 500)}, STOP),
        "a",
        1,
        None,
        "",
    ),
    "a chunk size in words": (
        stream(A, end=b"zz\r\n"),
        "",
        0,
        None,
        "malformed",
    ),  # the read's own events are not read
    "not HTTP": (b"SSH-2.0-x\r\n", "", 0, None, "malformed"),
    "a redirect": (
        b"HTTP/1.1 307 x\r\nLocation: /y\r\nContent-Length: 0\r\n\r\n",
        "",
        0,
        None,
        "malformed",
    ),
    "429": (
        b"HTTP/1.1 429 x\r\nContent-Length: 16\r\n\r\n" + b'{"error":"wait"}',
        "",
        0,
        None,
        "http_429",
    ),
    "503, cut": (b"HTTP/1.1 503 x\r\nContent-Length: 99\r\n\r\nbusy", "", 0, None, "http_5xx"),
    "nothing": (b"", "", 0, None, "reset"),
    "a stream answered whole": (
        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n"
        + json.dumps(
            {
                "choices": [{"message": {"content": "ab"}, "finish_reason": "stop"}],
                "usage": counted(2),
            }
        ).encode(),
        "ab",
        1,
        2,
        "",
    ),
    "U+2028 in text": (
        stream(event(content="a\u2028b"), b'data: {"choices":[{"text":"\xe2\x80\xa8"}]}\n\n', STOP),
        "a\u2028b\u2028",
        2,
        None,
        "",
    ),
}


@pytest.mark.parametrize("name", TRAPS)
def test_unusual_streams_are_read_to_the_expected_results_in_any_split(name: str) -> None:
    data, text, events, tokens, kind = TRAPS[name]
    completions = [answered(*pieces) for pieces in splits(data)]
    completion = completions[0]

    assert (completion.failure.kind if completion.failure else "") == kind, completion.failure
    assert (completion.text, completion.output_events, completion.usage.output) == (
        text,
        events,
        tokens,
    )
    assert (completion.last_token >= 0) is (events > 0)
    assert (completion.first_token >= 0) is (events > 0 and completion.remark != NOT_STREAMED)
    if kind == "error_event" and not completion.finish_reason:
        assert completion.failure is not None and completion.failure.text == "engine died"
    if kind != "malformed":
        assert [comparable_facts(other) for other in completions[1:]] == [
            comparable_facts(completion)
        ] * (len(completions) - 1)
    else:
        assert {other.failure.kind for other in completions if other.failure} == {"malformed"}


def test_reasoning_has_a_separate_text_and_a_later_first_answer() -> None:
    for field in ("reasoning_content", "reasoning"):
        data = stream(
            ROLE,
            event(**{field: "hm"}, content=""),
            event(**{field: "so"}, content=None),
            event(content="42"),
            STOP,
        )
        completion = answered(*(data[:-1].partition(b'"hm"')[i] for i in range(3)), data[-1:])
        assert (completion.text, completion.reasoning_text, completion.output_events) == (
            "42",
            "hmso",
            3,
        )
        assert completion.first_answer >= completion.first_token >= 0
    response_completion = answered(stream(event(content="x", reasoning_content=""), STOP))

    assert (response_completion.first_answer, response_completion.reasoning_text) == (
        response_completion.first_token,
        "",
    )


def test_the_first_token_is_the_first_output_and_the_end_precedes_that_of_the_body() -> None:
    head, role, first, last, finish, done = (
        stream(end=b""),
        *(stream(e, end=b"")[len(stream(end=b"")) :] for e in (ROLE, A, B, STOP, DONE)),
    )
    completion = answered(head, role, first, last, finish, done, b"0\r\n\r\n")

    assert (
        completion.first_byte,
        completion.first_event,
        completion.first_token,
        completion.last_token,
    ) == (
        100,
        110,
        120,
        130,
    )
    assert (
        completion.end,
        completion.done,
        completion.max_gap,
        completion.client_lag,
        completion.kernel_stamp,
    ) == (
        140,
        160,
        10,
        3,
        True,
    )


def chunk(*events: Any) -> bytes:
    return stream(*events, end=b"")[len(stream(end=b"")) :]


@pytest.mark.parametrize(
    ("pieces", "exact"),
    [
        ([chunk(A)], True),
        ([chunk(ROLE, A)], True),  # the newest stamp is the last event's
        ([chunk(A, B)], False),
        ([chunk(ROLE, A, STOP)], False),
        ([chunk(A) + chunk(B)[:20]], False),  # part of the next event
        ([chunk(A) + b"8"], False),  # part of the next chunk's size
        ([chunk(A) + b"0\r\n\r\n"], False),  # the end may have come later than the token
        ([chunk(A)[:30], chunk(A)[30:]], True),
        ([chunk(A)[:30], chunk(A)[30:] + chunk(B)], False),
        ([chunk(ROLE), chunk(A)], True),
        ([chunk(A), chunk(B, B, B)], True),  # only the first token's stamp is judged
    ],
)
def test_only_the_last_event_of_a_read_has_an_exact_timestamp(
    pieces: list[bytes], exact: bool
) -> None:
    exchange_state, completions = exchange()
    exchange_state.feed_reads([(stream(end=b""), 50, 50, 40, True)])
    for i, data in enumerate(pieces):
        exchange_state.feed_reads([(data, 100 + 10 * i, 105 + 10 * i, 93 + 10 * i, True)])
    exchange_state.end_with_connection(200, "")
    exchange_state.report_completion()
    assert completions[0].stamp_error == (0 if exact else 7)


def test_tokens_of_the_first_event_are_read_where_the_server_reports_them() -> None:
    first_completion = answered(
        stream(A | {"usage": counted(3)}, B | {"usage": counted(5)}, STOP | {"usage": counted(5)})
    )

    assert (first_completion.first_event_tokens, first_completion.usage.output) == (3, 5)
    assert answered(stream(A, B, STOP | {"usage": counted(5)})).first_event_tokens == 0
    assert answered(stream(A, STOP | {"usage": counted(5)})).first_event_tokens == 0
    assert (
        answered(
            stream(ROLE | {"usage": counted(0)}, A | {"usage": counted(2)}, STOP)
        ).first_event_tokens
        == 2
    )


def test_server_timing_is_stored_unchanged() -> None:
    metrics = b'event: trtllm.perf_metrics\ndata: {"server_ttft": 1.5}\n\n'
    completion = answered(
        stream(
            A,
            STOP | {"timings": {"prompt_ms": 2}},
            {"choices": [], "nvext": {"timing": 1}},
            DONE,
            metrics,
        )
    )

    assert completion.server_timing == {
        "timings": {"prompt_ms": 2},
        "nvext": {"timing": 1},
        "trtllm.perf_metrics": {"server_ttft": 1.5},
    }

    drafts = {"total_draft_tokens": 9, "total_accepted_draft_tokens": 4}
    choice = STOP["choices"][0] | {
        "speculative_decoding": drafts
    }  # of trtllm-serve, where the finish reason is

    assert answered(stream(A, STOP | {"choices": [choice]}, DONE)).server_timing == {
        "speculative_decoding": drafts
    }

    body = json.dumps({"choices": [choice | {"delta": None, "message": {"content": "a"}}]}).encode()
    head = (
        b"HTTP/1.1 200 OK\r\nServer-Timing: server_queue;dur=1\r\nContent-Length: %d\r\n\r\n"
        % len(body)
    )
    timing = {"server-timing": "server_queue;dur=1", "speculative_decoding": drafts}

    assert answered(head + body).server_timing == timing


def test_a_usage_of_every_format_is_read() -> None:
    full = counted(
        5,
        prompt_tokens_details={"cached_tokens": 4},
        completion_tokens_details={"reasoning_tokens": 2},
    )
    odd = {"prompt_tokens": True, "completion_tokens": -1, "prompt_tokens_details": 3}

    for usage_document, usage in (
        (full, Usage(input=9, output=5, cached=4, reasoning=2)),
        ({"input_tokens": 1, "output_tokens": 2}, Usage(input=1, output=2)),
        *((nothing, Usage()) for nothing in (None, [], 7, odd)),
    ):
        assert answered(stream(A, STOP | {"usage": usage_document}, DONE)).usage == usage, (
            usage_document
        )


@pytest.mark.parametrize(
    ("body", "expected_text"),
    [
        (b'{"error":{"message":"m","code":1}}', "m"),
        (b'{"error":"m"}', "m"),
        (b'{"message":"m","code":4}', "m"),
        (b'{"detail":"m"}', "m"),
        (b'{"detail":[{"msg":"m"}]}', '[{"msg":"m"}]'),
        (b'{"error":{"code":4}}', '{"code":4}'),
        (b" plain words ", "plain words"),
        (b"\xff\xfe", "\ufffd\ufffd"),
        (b"", ""),
        (b"x" * 900, "x" * 500),
        (b"[" * 5000, "[" * 500),
        (b'{"error":%d}' % 10**40, str(10**40)),
    ],
)
def test_the_text_of_an_error_is_extracted(body: bytes, expected_text: str) -> None:
    assert error_text(body) == expected_text


JSONS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "choices",
                    "delta",
                    "text",
                    "content",
                    "usage",
                    "error",
                    "message",
                    "finish_reason",
                    "token_ids",
                    "timings",
                    "tool_calls",
                    "completion_tokens",
                    "prompt_tokens_details",
                    "reasoning",
                    "detail",
                ]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=25,
)
PAYLOADS = st.one_of(
    st.binary(max_size=60),
    JSONS.map(lambda value: json.dumps(value).encode()),
    st.lists(JSONS, max_size=2).map(lambda choices: json.dumps({"choices": choices}).encode()),
)


@given(
    st.lists(
        st.one_of(
            PAYLOADS,
            st.builds(NamedEvent, st.sampled_from([b"error", b"x", b"y.metrics"]), PAYLOADS),
        ),
        max_size=5,
    )
)
def test_no_sequence_of_payloads_raises_an_exception(payloads: list[bytes | NamedEvent]) -> None:
    reading = ResponseReader(EventTimeline(), keep_text=True)
    reading.feed(payloads, 10)
    reading.find_failure(True, False, True)
    usage = reading.usage()
    assert all(
        count is None or 0 <= count < 1 << 31 for count in (usage.input, usage.output, usage.cached)
    )
    "".join(reading.text_pieces or ()).encode()


def cut(data: bytes, places: list[int]) -> list[bytes]:
    bounds = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[a:b] for a, b in pairwise(bounds)]


@given(st.sampled_from(sorted(TRAPS)), st.lists(st.integers(0, 100_000), max_size=6))
def test_any_split_of_a_stream_gives_the_same_result(name: str, places: list[int]) -> None:
    data, *_, kind = TRAPS[name]
    if kind != "malformed":
        assert comparable_facts(answered(*cut(data, places))) == comparable_facts(answered(data))


# -- the stamp error of every output event ---------------------------------------------------------


def one_chunk(*events: Any) -> bytes:
    return chunk(b"".join(b"data: " + json.dumps(value).encode() + b"\n\n" for value in events))


def read_errors(reads: list[tuple[bytes, int, int]]) -> tuple[EventTimeline, Any]:
    """Return the timeline and the completion of reads given as (bytes, timestamp, empty_at)."""
    timeline = EventTimeline()
    received: list[Any] = []
    exchange_state = Exchange(
        None, b"", b"", 0, received.append, timeline, is_stream_requested=True
    )
    exchange_state.sent_at = 1
    for data, timestamp_ns, empty_at in reads:
        exchange_state.feed_reads([(data, timestamp_ns, timestamp_ns, empty_at, True)])
    exchange_state.end_with_connection(10**12, "")
    exchange_state.report_completion()
    return timeline, received[0]


@pytest.mark.parametrize(
    ("read", "errors", "last_error"),
    [
        (chunk(A), [], 0),
        (one_chunk(A, B, A), [], 0),  # several tokens in one write of the server
        (
            chunk(A) + chunk(B) + chunk(A),
            [7, 7],
            0,
        ),  # three packets: the newest has the exact stamp
        (
            chunk(A) + chunk(B)[:20],
            [7],
            7,
        ),  # a part of a later one came too: the whole one is older
        (chunk(A) + chunk(STOP), [], 7),  # the end of the answer follows its last token at once
        (chunk(A) + chunk(B) + chunk(STOP) + chunk(DONE) + b"0\r\n\r\n", [7], 7),
        (one_chunk(A, B) + b"0\r\n\r\n", [], 0),  # one write, and the end
    ],
)
def test_output_events_have_the_expected_timestamp_uncertainty(
    read: bytes, errors: list[int], last_error: int
) -> None:
    start = stream(end=b"")
    timeline, done = read_errors([(start, 50, 40), (chunk(A), 60, 55), (read, 100, 93)])
    each_error = [error for error, many in timeline.uncertainties for _ in range(many)]
    assert (each_error, done.last_token_error, done.stamp_error) == (errors, last_error, 0)
    assert len(timeline.all_timestamps()) == done.output_events


def test_the_last_token_read_with_the_end_has_an_error_of_at_most_a_mean_gap() -> None:
    """The client paused while the last token and the end came; TPOT is still reliable."""
    tokens = [(chunk(A), at, at - 1) for at in (60, 65, 70, 75)]
    ending = (chunk(A) + chunk(STOP) + chunk(DONE) + b"0\r\n\r\n", 80, -100)
    _, done = read_errors([(stream(end=b""), 50, 40), *tokens, ending])
    assert (done.output_events, done.last_token_error) == (5, 5)


def test_events_of_a_body_without_chunks_have_the_uncertainty_of_one_packet_each() -> None:
    body = stream(end=b"").replace(b"Transfer-Encoding: chunked\r\n", b"")

    assert b"hunked" not in body

    event_bytes = b"data: " + json.dumps(A).encode() + b"\n\n"
    timeline, done = read_errors(
        [(body, 50, 40), (event_bytes, 60, 55), (event_bytes * 3, 100, 93), (event_bytes, 110, 105)]
    )

    assert (timeline.uncertainties, done.max_gap, done.max_gap_error, done.last_token_error) == (
        [(7, 2)],
        40,
        7,
        0,
    )


def test_the_largest_gap_has_the_timestamp_error_of_its_end() -> None:
    start = [(stream(end=b""), 50, 40), (chunk(A), 60, 55)]
    _, late = read_errors([*start, (chunk(A) + chunk(A), 100, 61), (chunk(A), 120, 115)])

    assert (late.max_gap, late.max_gap_error) == (40, 39)
    _, end = read_errors([*start, (chunk(A) + chunk(STOP) + chunk(DONE) + b"0\r\n\r\n", 100, 61)])
    assert (end.max_gap, end.max_gap_error, end.last_token_error) == (40, 0, 39), (
        "only the end came after it"
    )
    _, sound = read_errors([*start, (chunk(A), 100, 95), (chunk(A) + chunk(A), 120, 115)])
    assert (sound.max_gap, sound.max_gap_error) == (40, 0)


def test_truncated_and_compressed_responses_have_the_expected_failure_kind() -> None:
    packed = (
        b"HTTP/1.1 200 OK\r\n"
        + b"Content-Type: text/event-stream\r\nContent-Encoding: gzip\r\n\r\n\x1f\x8b\x08"
    )
    packed_chunks = (
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: gzip, chunked"
        b"\r\n\r\n3\r\n\x1f\x8b\x08\r\n"
    )
    refused = b"HTTP/1.1 503 Busy\r\nContent-Encoding: br\r\nContent-Length: 2\r\n\r\n\x1f\x8b"
    half = b"HTTP/1.1 200 OK\r\n" + b"Content-Type: text/eve"
    for data, kind, expected_text, status in (
        (
            packed,
            "malformed",
            "the body has the Content-Encoding gzip, which was not requested",
            200,
        ),
        (packed_chunks, "malformed", "the body has the Content-Encoding gzip", 200),
        (
            refused,
            "http_5xx",
            "HTTP 503, with a body in the Content-Encoding br, which was not requested",
            503,
        ),
        (half, "truncated", "the connection ended within the response head", 0),
        (
            b"HTTP/1.1 200 OK\nContent-Length: 1\n\na",
            "malformed",
            "the lines of the response head end with LF",
            0,
        ),
    ):
        for pieces in splits(data):
            failure = answered(*pieces).failure
            assert failure is not None
            assert (failure.kind, failure.http_status) == (kind, status)
            assert expected_text in failure.text


@pytest.mark.parametrize(
    "usage", [b"[]", b"7", b'{"completion_tokens":2.5}', b'{"completion_tokens":"2"}', b"{}"]
)
def test_a_usage_of_an_unknown_format_gives_no_counts_and_no_failure(usage: bytes) -> None:
    events = (b'{"choices":[{"delta":{"content":"a"}}]}', b'{"choices":[],"usage":%s}' % usage)
    ending = b'{"choices":[{"delta":{},"finish_reason":"stop"}]}'
    completion = answered(stream(*(b"data: " + event + b"\n\n" for event in (*events, ending))))
    assert (completion.failure, completion.usage, completion.output_events) == (None, Usage(), 1)


@pytest.mark.parametrize(
    "odd",
    [
        b'{"choices":[{"delta":{"content":"\\ud800"}}]}',
        b'{"choices":[],"usage":{"completion_tokens":1e400}}',
    ],
)
def test_an_event_that_only_a_strict_decoder_refuses_does_not_fail_the_response(
    odd: bytes,
) -> None:
    ending = b'{"choices":[{"delta":{"content":"a"},"finish_reason":"stop"}]}'
    completion = answered(stream(*(b"data: " + event + b"\n\n" for event in (odd, ending))))
    assert completion.failure is None and completion.usage == Usage()
    assert completion.output_events == 1 + (b"ud800" in odd)


def after_usage(**counts: Any) -> Completion:
    return answered(stream(ROLE, A, B, STOP, {"choices": [], "usage": counts}, DONE))


def test_whole_numbers_with_a_decimal_point_are_counts() -> None:
    completion = after_usage(
        prompt_tokens=12.0,
        completion_tokens=2.0,
        prompt_tokens_details={"cached_tokens": 4.0},
        cache_creation_input_tokens=3.0,
    )
    assert completion.usage == Usage(input=12, output=2, cached=4, cache_written=3)


@pytest.mark.parametrize(
    "counts",
    [
        {"prompt_tokens_details": {"cached_tokens": 5}},
        {"prompt_cache_hit_tokens": 5, "prompt_cache_miss_tokens": 4},
        {"cache_read_input_tokens": 5},
        {"cached_tokens": 5},
        {"prompt_tokens_details": {"cached_tokens": None}, "cached_tokens": 5.0},
    ],
)
def test_cached_tokens_are_read_under_every_name_that_servers_use(counts: dict[str, Any]) -> None:
    completion = after_usage(**counted(2), **counts)
    assert completion.usage == Usage(input=9, output=2, cached=5)


@pytest.mark.parametrize(
    ("counts", "unbelievable"),
    [
        ({"prompt_tokens_details": {"cached_tokens": 10}}, {"input", "cached", "cache_written"}),
        ({"cache_creation_input_tokens": 10}, {"input", "cached", "cache_written"}),
        (
            {"cached_tokens": 5, "cache_creation_input_tokens": 5},
            {"input", "cached", "cache_written"},
        ),
        ({"completion_tokens_details": {"reasoning_tokens": 3}}, {"output", "reasoning"}),
        (
            {"total_tokens": 12},
            {"input", "output", "cached", "cache_written", "reasoning"},
        ),
    ],
)
def test_contradictory_token_counts_are_not_used(
    counts: dict[str, Any], unbelievable: set[str]
) -> None:
    usage = after_usage(**counted(2) | counts).usage
    assert usage.contradiction
    assert {
        name
        for name in ("input", "output")
        if getattr(without_doubtful_counts(usage), name) is None
    } == (unbelievable & {"input", "output"})
    assert all(getattr(without_doubtful_counts(usage), name) is None for name in unbelievable)


def test_reasoning_tokens_visible_in_the_total_count_as_output() -> None:
    details = {"completion_tokens_details": {"reasoning_tokens": 94}}
    usage = after_usage(prompt_tokens=32, completion_tokens=9, total_tokens=135, **details).usage
    assert usage == Usage(input=32, output=103, reasoning=94)


def test_output_in_an_unknown_field_leaves_the_first_token_undecided() -> None:
    thought = event(thinking="hm")
    completion = answered(stream(ROLE, thought, thought, A, B, STOP))
    assert (completion.first_token, completion.output_events, completion.failure) == (
        NEVER,
        2,
        None,
    )
    name_beside_the_role = event(role="assistant", content="", channel="final")
    response_completion = answered(stream(name_beside_the_role, A, B, STOP))
    assert response_completion.first_token > 0
    later = answered(stream(ROLE, A, thought, thought, STOP))
    assert later.first_token > 0


def test_one_object_where_a_stream_was_requested_has_no_first_token() -> None:
    body = json.dumps(
        {
            "choices": [{"message": {"content": "ab"}, "finish_reason": "stop"}],
            "usage": counted(2),
        }
    ).encode()
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n"
    completion = answered(head + body)

    assert (completion.first_token, completion.failure, completion.remark) == (
        NEVER,
        None,
        NOT_STREAMED,
    )
    assert completion.end > 0


def test_bytes_that_are_not_utf_8_are_remarked() -> None:
    assert answered(stream(b'data: {"choices":[{"text":"\xff"}]}\n\n', STOP)).remark == NOT_UTF8
    assert answered(stream(A, STOP)).remark == ""


def test_the_message_of_a_compressed_error_is_read() -> None:
    body = gzip.compress(b'{"error":{"message":"model is loading"}}')
    head = b"HTTP/1.1 503 x\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(body)
    failure = answered(head + body).failure
    assert failure is not None and (failure.kind, failure.text) == ("http_5xx", "model is loading")


def test_a_byte_order_mark_before_json_is_skipped() -> None:
    body = (
        b"\xef\xbb\xbf"
        + json.dumps(
            {"choices": [{"message": {"content": "ab"}, "finish_reason": "stop"}]}
        ).encode()
    )
    completion = answered(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n" + body)
    assert (completion.failure, completion.text) == (None, "ab")
