"""Provide other HTTP clients as contenders of `events.py` and `clients.py`.

Each contender of `events.py` reads `streams` concurrent responses of `tokens` events in the way its
users do, under uvloop. It opens its connections, imports and warms everything before the
measurement window opens. It returns the number of events, the number of reads per event, and the
CPU-seconds and seconds of the window.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterable, Iterator
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import rig

if TYPE_CHECKING:
    import aiohttp
    from openai import AsyncOpenAI

MODEL = "sim"
MESSAGES: Any = [{"role": "user", "content": "tell me"}]
STREAM_OPTIONS: Any = {"include_usage": True}

WARM_UP_TOKENS = 1  # of the request that opens a connection before the measurement
MIN_CHUNK_BYTES = 100  # a chunk of a chat completion is always longer
REQUEST_TIMEOUT_S = 120


def create_request_body(tokens: int) -> dict[str, object]:
    """Return the JSON body of a streamed chat request whose response has exactly `tokens` tokens.

    `ignore_eos` makes the server generate up to `max_tokens`.
    """
    return {
        "model": MODEL,
        "messages": MESSAGES,
        "stream": True,
        "stream_options": STREAM_OPTIONS,
        "max_tokens": tokens,
        "ignore_eos": True,
    }


def encode_http_request(host: str, tokens: int) -> bytes:
    """Return a chat request for `tokens` tokens as the bytes of HTTP/1.1.

    It asks the server to close the connection after the response, which marks the end of the
    response for a client that does not parse it.
    """
    body = json.dumps(create_request_body(tokens)).encode()
    header_lines = [
        "POST /v1/chat/completions HTTP/1.1",
        f"Host: {host}",
        "Content-Type: application/json",
        "Connection: close",
        f"Content-Length: {len(body)}",
    ]
    header = "\r\n".join(header_lines) + "\r\n\r\n"
    return header.encode() + body


class ByteCounter(asyncio.Protocol):
    """The cheapest client that asyncio allows: it only adds up the lengths of what it receives.

    `closed` is completed when the server closes the connection.
    """

    def __init__(self) -> None:
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.received_bytes = 0

    def data_received(self, data: bytes) -> None:
        """Add the length of received data."""
        self.received_bytes += len(data)

    def connection_lost(self, _exception: Exception | None) -> None:
        """Complete `closed`."""
        self.closed.set_result(None)


async def run_byte_counter(
    url: str, streams: int, tokens: int, window: rig.MeasurementWindow
) -> int:
    """Send a request on each connection, count the received bytes, and return the number of events.

    Nothing is parsed: the number of events is the requested one, and a response that was cut is
    noticed only by its length.
    """
    address = urlsplit(url)
    assert address.hostname is not None, "the URL has no host"
    assert address.port is not None, "the URL has no port"

    loop = asyncio.get_running_loop()
    connections = [
        await loop.create_connection(ByteCounter, address.hostname, address.port)
        for _ in range(streams)
    ]
    request = encode_http_request(address.netloc, tokens)

    window.begin()
    for transport, _ in connections:
        transport.write(request)
    await asyncio.gather(*(counter.closed for _, counter in connections))
    window.end()

    min_response_bytes = tokens * MIN_CHUNK_BYTES
    for _, counter in connections:
        assert counter.received_bytes > min_response_bytes, "a response was cut"
    return streams * tokens


async def read_response_lines(session: aiohttp.ClientSession, url: str, tokens: int) -> int:
    """Send a request with aiohttp, read its response by lines and count the events with text.

    Like home-made load generators, it decodes each line with `json.loads` and keeps the time of
    each event. That is part of the cost. Raises AssertionError if the response was cut.
    """
    event_times_s = []
    usage = None
    body = create_request_body(tokens)
    async with session.post(f"{url}/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            if not line.startswith(b"data: "):
                continue

            payload = line.removeprefix(b"data: ").strip()
            if payload == b"[DONE]":
                continue

            event = json.loads(payload)
            usage = event.get("usage") or usage
            choices = event["choices"]
            if choices and choices[0]["delta"].get("content"):
                event_times_s.append(monotonic())

    assert usage is not None, "a response was cut: it has no usage"
    assert usage["completion_tokens"] == tokens, "a response was cut"
    return len(event_times_s)


def open_aiohttp_session() -> aiohttp.ClientSession:
    """Open an aiohttp session without a limit on its connections."""
    import aiohttp

    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))


async def sum_concurrently(counts: Iterable[Coroutine[Any, Any, int]]) -> int:
    """Run coroutines that each return a count, all at the same time, and return the sum."""
    return sum(await asyncio.gather(*counts))


async def run_aiohttp(url: str, streams: int, tokens: int, window: rig.MeasurementWindow) -> int:
    """Read all responses with aiohttp line by line, and return the number of events with text.

    One short request per stream opens the connections before the measurement window.
    """
    async with open_aiohttp_session() as session:
        await sum_concurrently(
            read_response_lines(session, url, WARM_UP_TOKENS) for _ in range(streams)
        )
        window.begin()
        events = await sum_concurrently(
            read_response_lines(session, url, tokens) for _ in range(streams)
        )
        window.end()

    return events


def run_aiohttp_closed_loop(
    url: str, concurrency: int, tokens: int, requests: int
) -> dict[str, int]:
    """Send `requests` requests from `concurrency` virtual users with aiohttp.

    Each virtual user sends its next request when it has read the response line by line. It is a
    contender of `clients.py`. Return the number of events with text, as `events`.
    """
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        events = runner.run(run_virtual_users(url, concurrency, tokens, requests))
    return {"events": events}


async def run_virtual_users(url: str, concurrency: int, tokens: int, requests: int) -> int:
    """Send `requests` requests from `concurrency` virtual users; return the events with text."""
    remaining_requests = iter(range(requests))  # the virtual users share this iterator
    async with open_aiohttp_session() as session:
        return await sum_concurrently(
            run_virtual_user(session, url, tokens, remaining_requests) for _ in range(concurrency)
        )


async def run_virtual_user(
    session: aiohttp.ClientSession, url: str, tokens: int, remaining_requests: Iterator[int]
) -> int:
    """Send one request after the other while some remain, and count the events with text.

    All virtual users take from the same iterator, so that together they send its length.
    """
    events = 0
    for _ in remaining_requests:
        events += await read_response_lines(session, url, tokens)
    return events


async def read_openai_stream(client: AsyncOpenAI, tokens: int) -> int:
    """Send a request with the openai package, read its stream and count the events with text.

    Like an application that measures latencies, it keeps the time of each event. Raises
    AssertionError if the response was cut.
    """
    event_times_s = []
    usage = None
    stream = await client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        stream=True,
        stream_options=STREAM_OPTIONS,
        max_tokens=tokens,
        extra_body={"ignore_eos": True},
    )
    async for chunk in stream:
        usage = chunk.usage or usage
        if chunk.choices and chunk.choices[0].delta.content:
            event_times_s.append(monotonic())

    assert usage is not None, "a response was cut: it has no usage"
    assert usage.completion_tokens == tokens, "a response was cut"
    return len(event_times_s)


async def run_openai(url: str, streams: int, tokens: int, window: rig.MeasurementWindow) -> int:
    """Read all responses with AsyncOpenAI, and return the number of events with text.

    One short request per stream opens the connections before the measurement window.
    """
    from openai import AsyncOpenAI

    client = AsyncOpenAI(
        base_url=f"{url}/v1", api_key="none", timeout=REQUEST_TIMEOUT_S, max_retries=0
    )
    async with client:
        await sum_concurrently(read_openai_stream(client, WARM_UP_TOKENS) for _ in range(streams))
        window.begin()
        events = await sum_concurrently(read_openai_stream(client, tokens) for _ in range(streams))
        window.end()

    return events


# A function that takes a URL, the number of streams, the tokens of each and a measurement window.
# It opens and closes the window around the load, and returns the number of events.
ReadStreams = Callable[[str, int, int, rig.MeasurementWindow], Coroutine[Any, Any, int]]


def measure_streams(
    read_streams: ReadStreams, url: str, streams: int, tokens: int
) -> dict[str, float]:
    """Let a client read `streams` responses of `tokens` tokens once, and return what that cost.

    The result has the number of events, the expected number, the reads per event, and the values of
    the measurement window.
    """
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


if __name__ == "__main__":
    rig.run_as_contender(
        {
            "closed_loop": run_aiohttp_closed_loop,
            "baseline": partial(measure_streams, run_byte_counter),
            "lines": partial(measure_streams, run_aiohttp),
            "openai": partial(measure_streams, run_openai),
        }
    )
