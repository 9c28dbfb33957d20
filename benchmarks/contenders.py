"""The contenders of `events.py`: each reads `streams` streams of `tokens` events from one server, the way its users do.

Connections are opened (and everything imported and warmed) before the window opens; all run under uvloop. Each returns
events, CPU-seconds and seconds of the window, and how many reads it took.
"""

from __future__ import annotations

import asyncio
import json
from time import monotonic
from typing import Any
from urllib.parse import urlsplit

import rig

WARM = 1  # tokens of the request that opens a connection


def body(tokens: int) -> dict[str, Any]:
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


class Adding(asyncio.Protocol):
    """The baseline: nothing but the sum of the lengths."""

    def __init__(self, over: asyncio.Future[None]) -> None:
        self.over = over
        self.length = 0
        self.reads = 0

    def data_received(self, data: bytes) -> None:
        self.length += len(data)

    def connection_lost(self, _: Exception | None) -> None:
        self.over.set_result(None)


async def baseline(url: str, streams: int, tokens: int, window: rig.Window) -> int:
    loop = asyncio.get_running_loop()
    place = urlsplit(url)
    assert place.hostname is not None and place.port is not None
    host, port = place.hostname, place.port
    payload = json.dumps(body(tokens)).encode()
    request = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {place.netloc}\r\nContent-Type: application/json\r\n"
        f"Connection: close\r\nContent-Length: {len(payload)}\r\n\r\n"
    ).encode() + payload
    made = [
        await loop.create_connection(lambda: Adding(loop.create_future()), host, port)
        for _ in range(streams)
    ]
    window.begin()
    for transport, _ in made:
        transport.write(request)
    await asyncio.gather(*(protocol.over for _, protocol in made))
    window.end()
    assert all(protocol.length > tokens * 100 for _, protocol in made), "an answer was cut"
    return streams * tokens


async def _line_by_line(session: Any, url: str, asked: int) -> int:
    """One answer read line by line; how many events with text it had."""
    times = []
    usage = None
    async with session.post(f"{url}/v1/chat/completions", json=body(asked)) as answer:
        answer.raise_for_status()
        async for line in answer.content:
            if not line.startswith(b"data: "):
                continue
            payload = line[6:].strip()
            if payload == b"[DONE]":
                continue
            event = json.loads(payload)
            usage = event.get("usage") or usage
            if event["choices"] and event["choices"][0]["delta"].get("content"):
                times.append(monotonic())
    assert usage is not None and usage["completion_tokens"] == asked
    return len(times)


async def lines(url: str, streams: int, tokens: int, window: rig.Window) -> int:
    """aiohttp, line by line, json.loads of each, a list of arrival times: the usual home-made generator."""
    import aiohttp

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        await asyncio.gather(*(_line_by_line(session, url, WARM) for _ in range(streams)))
        window.begin()
        counts = await asyncio.gather(
            *(_line_by_line(session, url, tokens) for _ in range(streams))
        )
        window.end()
    return sum(counts)


def closed(url: str, lanes: int, tokens: int, requests: int) -> dict[str, Any]:
    """The same in a closed loop, for clients.py: so many lanes, one request after the other."""
    import aiohttp
    import uvloop

    async def work() -> int:
        left = iter(range(requests))

        async def lane() -> int:
            return sum([await _line_by_line(session, url, tokens) for _ in left])

        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            return sum(await asyncio.gather(*(lane() for _ in range(lanes))))

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return {"events": runner.run(work())}


async def openai(url: str, streams: int, tokens: int, window: rig.Window) -> int:
    """AsyncOpenAI, `async for chunk in stream`: what an application does."""
    from openai import AsyncOpenAI

    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=120, max_retries=0)

    async def one(asked: int) -> int:
        times = []
        usage = None
        stream = await client.chat.completions.create(
            model="sim",
            messages=[{"role": "user", "content": "tell me"}],
            stream=True,
            stream_options={"include_usage": True},
            max_tokens=asked,
            extra_body={"ignore_eos": True},
        )
        async for chunk in stream:
            usage = chunk.usage or usage
            if chunk.choices and chunk.choices[0].delta.content:
                times.append(monotonic())
        assert usage is not None and usage.completion_tokens == asked
        return len(times)

    await asyncio.gather(*(one(WARM) for _ in range(streams)))
    window.begin()
    counts = await asyncio.gather(*(one(tokens) for _ in range(streams)))
    window.end()
    await client.close()
    return sum(counts)


def _run(contender: Any) -> Any:
    def work(url: str, streams: int, tokens: int) -> dict[str, Any]:
        import uvloop

        window = rig.Window()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            events = runner.run(contender(url, streams, tokens, window))
        reads = window.result["syscalls_read"]
        return {
            "events": events,
            "expected": streams * tokens,
            "reads_per_event": reads / events,
            **window.result,
        }

    return work


if __name__ == "__main__":
    rig.serve(
        {"closed": closed}
        | {contender.__name__: _run(contender) for contender in (baseline, lines, openai)}
    )
