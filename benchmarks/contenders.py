"""Provide the contenders of `events.py`: clients that read many streams from one server.

Each one reads `streams` streams of `tokens` events in the way its users do, under uvloop. It opens
its connections and imports and warms everything before the window opens, and returns the events,
CPU-seconds and seconds of the window and the number of reads.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterator
from time import monotonic
from typing import Any
from urllib.parse import urlsplit

import rig

WARM_UP_TOKENS = 1  # tokens of the request that opens a connection


def request_body(tokens: int) -> dict[str, object]:
    """Return the JSON body of a chat request for exactly this many tokens."""
    value: dict[str, Any] = {
        "model": "sim",
        "messages": [{"role": "user", "content": "tell me"}],
        "stream": True,
    }
    return value | {
        "stream_options": {"include_usage": True},
        "max_tokens": tokens,
        "ignore_eos": True,
    }


class ByteCounter(asyncio.Protocol):
    """The baseline protocol: it only adds up the lengths of what it receives."""

    def __init__(self, over: asyncio.Future[None]) -> None:
        self.closed = over
        self.length = 0
        self.reads = 0

    def data_received(self, data: bytes) -> None:
        """Add the length of a chunk."""
        self.length += len(data)

    def connection_lost(self, _: Exception | None) -> None:
        """Report that the server closed the connection."""
        self.closed.set_result(None)


async def run_baseline(url: str, streams: int, tokens: int, window: rig.MeasurementWindow) -> int:
    """Read all streams with a bare asyncio protocol and return the number of events."""
    loop = asyncio.get_running_loop()
    address = urlsplit(url)
    assert address.hostname is not None and address.port is not None
    host, port = address.hostname, address.port
    connections = [
        await loop.create_connection(lambda: ByteCounter(loop.create_future()), host, port)
        for _ in range(streams)
    ]
    request = encode_request(address.netloc, tokens)
    window.begin()

    for transport, _ in connections:
        transport.write(request)

    await asyncio.gather(*(protocol.closed for _, protocol in connections))
    window.end()
    min_length = tokens * MIN_EVENT_BYTES
    assert all(protocol.length > min_length for _, protocol in connections), "an answer was cut"

    return streams * tokens


MIN_EVENT_BYTES = 100  # of a chat completion chunk, which is longer


def encode_request(host: str, tokens: int) -> bytes:
    """Return the bytes of a chat request over HTTP/1.1, after which the server closes."""
    body = json.dumps(request_body(tokens)).encode()
    head_lines = [
        "POST /v1/chat/completions HTTP/1.1",
        f"Host: {host}",
        "Content-Type: application/json",
        "Connection: close",
        f"Content-Length: {len(body)}",
    ]
    head = "\r\n".join(head_lines) + "\r\n\r\n"

    return head.encode() + body


async def _read_line_by_line(session: Any, url: str, tokens: int) -> int:
    """Read one response line by line and return how many events had text.

    Raises AssertionError if the server did not send `tokens` tokens.
    """
    # As in home-made load generators, each event gets a timestamp. That is part of the cost.
    event_times_s = []
    usage = None
    async with session.post(f"{url}/v1/chat/completions", json=request_body(tokens)) as response:
        response.raise_for_status()
        async for line in response.content:
            if not line.startswith(b"data: "):
                continue

            payload = line[6:].strip()
            if payload == b"[DONE]":
                continue

            event = json.loads(payload)
            usage = event.get("usage") or usage

            if event["choices"] and event["choices"][0]["delta"].get("content"):
                event_times_s.append(monotonic())

    assert usage is not None and usage["completion_tokens"] == tokens, "a response was cut"
    return len(event_times_s)


async def run_aiohttp_lines(
    url: str, streams: int, tokens: int, window: rig.MeasurementWindow
) -> int:
    """Read all streams with aiohttp, as the usual home-made load generator does.

    Each line is decoded by `json.loads`, and the arrival times go into a list.
    """
    import aiohttp

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        await asyncio.gather(
            *(_read_line_by_line(session, url, WARM_UP_TOKENS) for _ in range(streams))
        )
        window.begin()
        counts = await asyncio.gather(
            *(_read_line_by_line(session, url, tokens) for _ in range(streams))
        )
        window.end()

    return sum(counts)


def run_closed_loop(url: str, concurrency: int, tokens: int, requests: int) -> dict[str, object]:
    """Send requests with aiohttp from `concurrency` virtual users, and return the events received.

    Each virtual user sends its next request when it has read the response line by line. Together
    they send `requests` requests. It is a contender of clients.py.
    """
    import aiohttp
    import uvloop

    async def run_virtual_user(session: aiohttp.ClientSession, remaining: Iterator[int]) -> int:
        """Send requests while some remain, and return the events received."""
        events = 0
        for _ in remaining:  # all virtual users take from the same iterator
            events += await _read_line_by_line(session, url, tokens)
        return events

    async def run_all() -> int:
        """Run all virtual users, and return the events of all of them."""
        remaining = iter(range(requests))
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as session:
            users = (run_virtual_user(session, remaining) for _ in range(concurrency))
            return sum(await asyncio.gather(*users))

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return {"events": runner.run(run_all())}


async def run_openai(url: str, streams: int, tokens: int, window: rig.MeasurementWindow) -> int:
    """Read all streams with AsyncOpenAI, as an application does."""
    from openai import AsyncOpenAI

    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=120, max_retries=0)

    async def read_stream(max_tokens: int) -> int:
        """Read one response and return how many events had text."""
        times = []
        usage = None

        stream = await client.chat.completions.create(
            model="sim",
            messages=[{"role": "user", "content": "tell me"}],
            stream=True,
            stream_options={"include_usage": True},
            max_tokens=max_tokens,
            extra_body={"ignore_eos": True},
        )
        async for chunk in stream:
            usage = chunk.usage or usage
            if chunk.choices and chunk.choices[0].delta.content:
                times.append(monotonic())

        assert usage is not None and usage.completion_tokens == max_tokens
        return len(times)

    await asyncio.gather(*(read_stream(WARM_UP_TOKENS) for _ in range(streams)))
    window.begin()
    counts = await asyncio.gather(*(read_stream(tokens) for _ in range(streams)))
    window.end()
    await client.close()

    return sum(counts)


# Reads `streams` streams of `tokens` tokens at a URL inside a window, and returns the events
ReadStreams = Callable[[str, int, int, rig.MeasurementWindow], Coroutine[Any, Any, int]]


def _as_contender(read_streams: ReadStreams) -> Callable[[str, int, int], dict[str, Any]]:
    """Return a contender for `rig.run_as_contender` that measures how streams are read.

    The contender runs `read_streams` in a uvloop event loop, and returns the number of events and
    reads, and what the window measured.
    """

    def measure(url: str, streams: int, tokens: int) -> dict[str, Any]:
        """Read the streams once and return what that cost."""
        import uvloop

        window = rig.MeasurementWindow()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            events = runner.run(read_streams(url, streams, tokens, window))

        return {
            "events": events,
            "expected": streams * tokens,
            "reads_per_event": window.result["read_calls"] / events,
            **window.result,
        }

    return measure


if __name__ == "__main__":
    rig.run_as_contender(
        {
            "closed": run_closed_loop,
            "baseline": _as_contender(run_baseline),
            "lines": _as_contender(run_aiohttp_lines),
            "openai": _as_contender(run_openai),
        }
    )
