"""The reference client sends the same fields and reads the same response as ours."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from time import monotonic_ns
from typing import Any

import pytest
from expected_errors import refused
from loadgen_sdk.errors import KINDS, TargetUnusable
from loadgen_sdk.request import Completion, Failure, Request
from loadgen_sdk.transport.pool import Pool
from loadgen_sdk.transport.target import Target
from loadgen_sdk.wire_formats.event_timeline import EventTimeline
from loadgen_sdk.wire_formats.response_reader import ResponseReader
from loadgen_sdk.wire_formats.server_profiles import SERVER_PROFILES
from loadgen_sdk.wire_formats.sse import SseDecoder
from openai_client import OpenAIClient
from servers import start

from loadgen.sim.server.options import Options

KEY = "sk-very-secret-key-1234"
REQUEST = Request(
    id="r7", messages=[{"role": "user", "content": "Hi"}], max_tokens=3, extra={"temperature": 0}
)
EVENTS = "Content-Type: text/event-stream\r\n"
Heard = list[tuple[str, dict[str, str], Any]]
Drive = Callable[[OpenAIClient], Awaitable[None]]


def answer(text: bytes, head: str = EVENTS, status: str = "200 OK") -> bytes:
    return f"HTTP/1.1 {status}\r\n{head}Content-Length: {len(text)}\r\n\r\n".encode() + text


def events(*values: Any) -> bytes:
    return b"".join(
        b"data: %s\n\n" % (v if isinstance(v, bytes) else json.dumps(v).encode()) for v in values
    )


def chunk(finish: str | None = None, **delta: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return {
        "id": "x",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "m",
        "choices": [choice],
    }


def meet(
    response: bytes | None,
    drive: Drive,
    *,
    url: str = "http://127.0.0.1:{}",
    server: str = "vllm",
    serves: int = 99,
    **options: Any,
) -> Heard:
    """Run `drive` with a client and a server that always sends `said`. Return its requests."""
    received_requests: Heard = []
    serving: list[asyncio.Task[None]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            left = serves  # answers this connection gives before it hangs up on the next request
            while line := (await reader.readline()).decode().strip():
                headers = {}
                while field := (await reader.readline()).decode().strip():
                    name, _, value = field.partition(":")
                    headers[name.lower()] = value.strip()
                received_requests.append(
                    (
                        line,
                        headers,
                        json.loads(await reader.readexactly(int(headers["content-length"]))),
                    )
                )
                left -= 1
                if left < 0:
                    return
                if response is None:
                    await reader.read()
                    return
                writer.write(response)
                await writer.drain()
                if b"Content-Length" not in response:
                    return
        except asyncio.IncompleteReadError:
            pass  # the client's timeout ended the connection before the body was sent
        finally:
            writer.close()

    async def run() -> None:
        listening_server = await asyncio.start_server(
            lambda *ends: serving.append(asyncio.create_task(serve(*ends))), "127.0.0.1", 0
        )
        target = Target.parse(
            url.format(listening_server.sockets[0].getsockname()[1]), server=server
        )
        client = OpenAIClient(target, model="m", server_profile=SERVER_PROFILES[server], **options)
        try:
            await client.open()
            await drive(client)
            await client.aclose()
            assert client.in_flight == 0
        finally:
            listening_server.close()
            await asyncio.gather(*serving)

    asyncio.run(run())
    return received_requests


def send(
    client: OpenAIClient, timeline: EventTimeline | None = None
) -> tuple[Any, asyncio.Future[Completion]]:
    future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
    task = client.send(
        REQUEST,
        client.prepare(REQUEST),
        monotonic_ns(),
        future.set_result,
        timeline or EventTimeline(),
    )
    return task, future


def completion(
    response: bytes | None, timeline: EventTimeline | None = None, **options: Any
) -> Completion:
    completions: list[Completion] = []

    async def drive(client: OpenAIClient) -> None:
        completions.append(await send(client, timeline)[1])

    meet(response, drive, keep_text=True, **options)
    return completions[0]


USAGE = {
    "prompt_tokens": 9,
    "completion_tokens": 3,
    "total_tokens": 12,
    "prompt_tokens_details": {"cached_tokens": 4},
}
STREAMS = {
    "vllm": [
        chunk(role="assistant", content=""),
        chunk(content="Hel"),
        chunk("length", content="lo"),
        {"choices": [], "usage": USAGE},
        b"[DONE]",
    ],
    "role with null": [chunk(role="assistant", content=None), chunk(content="x"), chunk("stop")],
    "reasoning first": [
        chunk(reasoning_content="hm"),
        chunk(reasoning="so"),
        chunk(content="42"),
        chunk("stop"),
    ],
    "tool call": [
        chunk(role="assistant", content=None),
        chunk(
            tool_calls=[
                {
                    "index": 0,
                    "id": "c",
                    "type": "function",
                    "function": {"name": "f", "arguments": ""},
                }
            ]
        ),
        chunk("tool_calls"),
    ],
    "empty tool calls": [
        chunk(content="", tool_calls=[]),
        chunk(content="x", tool_calls=[]),
        chunk("stop"),
    ],
    "usage on the finish chunk": [chunk(content="x"), chunk("length") | {"usage": USAGE}],
    "continuous usage": [
        chunk(content="xy") | {"usage": USAGE | {"completion_tokens": 2}},
        chunk("length", content="z") | {"usage": USAGE},
    ],
    "zeros, then usage, then zeros": [
        chunk(content="x") | {"usage": USAGE | {"completion_tokens": 0}},
        chunk("length") | {"usage": USAGE},
        {"choices": [], "usage": USAGE | {"completion_tokens": 0}},
    ],
    "timings": [chunk(content="x"), chunk("stop") | {"timings": {"prompt_ms": 1.5}}],
    "no finish reason": [chunk(content="x"), b"[DONE]"],
    "abort": [chunk(content="x"), chunk("abort"), b"[DONE]"],
    "error event": [
        chunk(content="x"),
        {"error": {"message": "engine died", "code": 500}},
        b"[DONE]",
    ],
    "error string": [chunk(content="x"), {"error": "engine died"}],
    "error at the top": [
        chunk(content="x"),
        {"object": "error", "message": "engine died", "code": 400},
    ],
    "nothing": [],
}


@pytest.mark.parametrize("name", STREAMS)
def test_the_openai_client_measures_the_same_as_the_loadgen_reader(name: str) -> None:
    body = events(*STREAMS[name])
    our_response_reader, their_event_timeline = (
        ResponseReader(EventTimeline(), keep_text=True),
        EventTimeline(),
    )
    decoder = SseDecoder()
    our_response_reader.feed([*decoder.feed(body), *decoder.end()], 1)
    response_completion = completion(answer(body), their_event_timeline)
    failure = our_response_reader.find_failure(True, False, True)

    assert (response_completion.failure and response_completion.failure.kind) == (
        failure and failure.kind
    )
    assert (
        "engine died" in response_completion.failure.text
        if failure
        and failure.kind == "error_event"
        and response_completion.failure
        and name != "abort"
        else True
    )
    assert (response_completion.text, response_completion.reasoning_text) == (
        "".join(our_response_reader.text_pieces or ()),
        "".join(our_response_reader.reasoning_pieces or ()),
    )
    assert (response_completion.finish_reason, response_completion.output_events) == (
        our_response_reader.finish_reason,
        our_response_reader.output_events,
    )
    assert response_completion.usage == our_response_reader.usage()
    assert response_completion.first_event_tokens == our_response_reader.first_event_tokens
    assert (response_completion.server_timing or {}) == (our_response_reader.server_timing or {})
    assert len(their_event_timeline.gaps) == max(0, our_response_reader.output_events - 1)
    assert len(their_event_timeline.timestamps) == our_response_reader.output_events
    assert (response_completion.first_answer >= 0) is (our_response_reader.first_answer >= 0)


def test_timestamps_of_the_openai_client_are_in_order() -> None:
    response_completion = completion(answer(events(*STREAMS["reasoning first"])))
    stamps = (
        response_completion.due,
        response_completion.sent,
        response_completion.first_byte,
        response_completion.first_event,
        response_completion.first_answer,
        response_completion.last_token,
        response_completion.end,
        response_completion.done,
    )

    assert list(stamps) == sorted(stamps)
    assert response_completion.ready == response_completion.sent > response_completion.due
    assert (
        response_completion.first_token
        == response_completion.first_event
        < response_completion.first_answer
        == response_completion.last_token
    )
    assert (
        response_completion.kernel_stamp,
        response_completion.http_status,
        response_completion.request,
    ) == (False, 200, REQUEST)
    assert response_completion.bytes_received == len(events(*STREAMS["reasoning first"]))


def test_the_openai_client_measures_a_response_without_streaming() -> None:
    message = {"role": "assistant", "content": "Hello", "reasoning_content": "hm"}
    document = {
        "id": "x",
        "choices": [{"index": 0, "message": message, "finish_reason": "length"}],
        "usage": USAGE,
    }
    response_completion = completion(
        answer(json.dumps(document).encode(), "Content-Type: application/json\r\n"), stream=False
    )

    assert (
        response_completion.failure,
        response_completion.text,
        response_completion.usage.output,
        response_completion.first_event_tokens,
    ) == (
        None,
        "Hello",
        3,
        3,
    )
    assert (
        response_completion.first_token == response_completion.last_token == response_completion.end
    )


@pytest.mark.parametrize(
    ("response", "kind", "expected_text", "status"),
    [
        (
            answer(b'{"error":{"message":"bad sk-very-secret-key-1234"}}', status="401 No"),
            "http_4xx",
            "bad ***",
            401,
        ),
        (
            answer(b'{"object":"error","message":"too long"}', status="400 No"),
            "http_4xx",
            "too long",
            400,
        ),
        (answer(b'{"error":"wait"}', "Retry-After: 1\r\n", "429 No"), "http_429", "wait", 429),
        (answer(b"", status="503 No"), "http_5xx", "without a body", 503),
        (answer(b"", "Location: http://127.0.0.1:1/\r\n", "307 No"), "malformed", "", 307),
        (b"", "reset", "", 0),
        (
            b"HTTP/1.1 200 OK\r\n" + EVENTS.encode() + b"Transfer-Encoding: chunked\r\n\r\n",
            "truncated",
            "after 0 output",
            200,
        ),
        (b"SSH-2.0-x\r\n\r\n", "malformed", "", 0),
        (answer(events(b"{no json")), "malformed", "", 200),
    ],
)
def test_failures_of_the_openai_client_have_standard_kinds_and_no_secrets(
    response: bytes, kind: str, expected_text: str, status: int
) -> None:
    response_completion = completion(response, api_key=KEY)
    assert response_completion.failure is not None
    assert (response_completion.failure.kind, response_completion.failure.http_status) == (
        kind,
        status,
    )
    assert expected_text in response_completion.failure.text
    assert KEY not in response_completion.failure.text
    assert kind in KINDS


def test_an_unreachable_server_and_an_unknown_host_are_failures() -> None:
    failures = [
        completion(b"", url=url).failure
        for url in ("http://127.0.0.1:1/{}", "http://nosuch.invalid/{}")
    ]
    assert [failure and failure.kind for failure in failures] == ["connect", "dns"]


def test_a_request_on_a_closed_reused_connection_is_sent_again_and_counted() -> None:
    completions: list[Completion] = []

    async def drive(client: OpenAIClient) -> None:
        completions.extend([await send(client)[1] for _ in range(2)])

    received = meet(answer(events(*STREAMS["vllm"])), drive, serves=1)
    assert [(item.failure, item.resent, item.reused) for item in completions] == [
        (None, 0, False),
        (None, 1, False),
    ]
    assert len(received) == 3


def test_each_timeout_ends_a_call_with_its_failure_kind() -> None:
    total = completion(None, timeout_ns=20_000_000).failure

    assert total is not None
    assert total.kind == "timeout_total"
    assert "0.02 s" in total.text

    opening = (
        b"HTTP/1.1 200 OK\r\n"
        + EVENTS.encode()
        + b"Content-Length: 9999\r\n\r\n"
        + events(chunk(content="x"))
    )
    stalled = completion(opening, stall_timeout_ns=20_000_000)

    assert stalled.failure is not None
    assert (stalled.failure.kind, stalled.text, stalled.output_events) == ("timeout_stall", "x", 1)


def test_a_cancelled_request_is_reported_once() -> None:
    completions: list[Completion] = []

    async def drive(client: OpenAIClient) -> None:
        first, done = send(client)
        client.cancel(first, Failure("interrupted", "the user left"))
        completions.append(await done)
        send(client)[1].add_done_callback(lambda future: completions.append(future.result()))
        await client.aclose()

    meet(None, drive)
    assert [item.failure and item.failure.kind for item in completions] == [
        "interrupted",
        "interrupted",
    ]
    assert completions[0].failure == Failure("interrupted", "the user left")


@pytest.mark.parametrize(
    ("url", "server", "key", "path", "auth"),
    [
        ("http://127.0.0.1:{}", "trtllm", None, "/v1/chat/completions", {}),
        (
            "http://127.0.0.1:{}/x?k=a%2Fb",
            "vllm",
            KEY,
            "/x/v1/chat/completions?k=a%2Fb",
            {"authorization": f"Bearer {KEY}"},
        ),
        (
            "http://u:p@127.0.0.1:{}",
            "vllm",
            None,
            "/v1/chat/completions",
            {"authorization": "Basic dTpw"},
        ),
        (
            "http://127.0.0.1:{}/openai/deployments/D?api-version=1",
            "azure",
            KEY,
            "/openai/deployments/D/chat/completions?api-version=1",
            {"api-key": KEY},
        ),
    ],
)
def test_the_openai_client_sends_the_same_body_as_the_loadgen_client(
    monkeypatch: pytest.MonkeyPatch,
    url: str,
    server: str,
    *,
    key: str | None,
    path: str,
    auth: dict[str, str],
) -> None:
    for name in ("OPENAI_API_KEY", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID"):
        monkeypatch.setenv(name, "of-somebody-else")
    prepared: list[bytes] = []

    async def drive(client: OpenAIClient) -> None:
        prepared.append(client.prepare(REQUEST))
        await send(client)[1]

    ok = answer(events(*STREAMS["vllm"]))
    received = meet(
        ok,
        drive,
        url=url,
        server=server,
        api_key=key,
        extra_body={"top_k": 5},
        headers=(("X-Mine", "1"),),
    )
    ((line, headers, body),) = received
    assert line == f"POST {path} HTTP/1.1"
    assert body == json.loads(prepared[0])
    assert body["temperature"] == 0
    assert body["top_k"] == 5
    assert {name: headers[name] for name in headers.keys() & {"authorization", "api-key"}} == auth
    assert (headers["x-mine"], headers["x-request-id"]) == ("1", "r7")
    assert "of-somebody-else" not in str(headers)


def test_a_missing_openai_package_is_reported_as_not_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "openai", None)
    client = OpenAIClient(
        Target.parse("http://h"), model="m", server_profile=SERVER_PROFILES["vllm"]
    )
    with refused(TargetUnusable, "not_installed"):
        asyncio.run(client.open())


@pytest.mark.processes
@pytest.mark.parametrize("stream", [True, False])
def test_both_clients_receive_the_same_responses(stream: bool) -> None:
    requests = [Request(id=f"r{i}", prompt="word " * i, max_tokens=i) for i in range(1, 20)]

    async def run(client: Pool | OpenAIClient) -> list[Completion]:
        await client.open()
        waiting = []
        for request in requests:
            future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
            client.send(
                request, client.prepare(request), monotonic_ns(), future.set_result, EventTimeline()
            )
            waiting.append(future)
        return await asyncio.gather(*waiting)

    async def both(url: str) -> None:
        options: Any = {
            "model": "sim",
            "server_profile": SERVER_PROFILES["trtllm"],
            "stream": stream,
            "keep_text": True,
        }
        target = Target.parse(url)
        pool, reference = Pool(target, **options), OpenAIClient(target, **options)
        completions, response_completions = await run(pool), await run(reference)
        pool.close()
        await reference.aclose()
        for our_completion, other in zip(completions, response_completions, strict=True):
            assert (
                our_completion.failure,
                our_completion.text,
                our_completion.usage,
            ) == (other.failure, other.text, other.usage)
            assert (our_completion.output_events, our_completion.finish_reason) == (
                other.output_events,
                other.finish_reason,
            )
            assert our_completion.usage.output == (
                our_completion.request and our_completion.request.max_tokens
            )

    with start(Options(ttft="1ms", itl="0")) as endpoint:
        asyncio.run(both(endpoint.url))
