"""Tests of calls in an application that runs on trio."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from types import ModuleType
from typing import Any

import openai
import pytest
from expected_errors import refused
from loadgen_sdk import Measurement, Retry, Throttle, ThrottleTimeout, WrongUse, instrument
from scripted_server import CHAT, answer, serving

BUSY = answer({"error": {"message": "down"}}, "500 Internal Server Error")
REQUEST: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture
def trio() -> ModuleType:
    module: ModuleType = pytest.importorskip("trio")
    return module


def test_retries_and_throttles_work_on_trio(trio: ModuleType) -> None:
    measurements: list[Measurement] = []

    async def go(url: str) -> None:
        throttle = Throttle(concurrency=1)
        plain = openai.AsyncOpenAI(base_url=url, api_key="k", max_retries=0)
        async with instrument(
            plain, measurements.append, retry=Retry(2, first_wait_s=0.001), throttle=throttle
        ) as client:
            await client.chat.completions.create(**REQUEST)
            async with (
                trio.open_nursery() as nursery
            ):  # one at a time: each is woken by the one before
                for _ in range(3):
                    nursery.start_soon(lambda: client.chat.completions.create(**REQUEST))
        assert throttle.in_flight(key="k", model="m") == 0

    good = answer(CHAT)
    with serving(BUSY, good) as server:
        trio.run(go, server.url)
    assert [(measurement.status, len(measurement.attempts)) for measurement in measurements] == [
        ("ok", 2)
    ] + [("ok", 1)] * 3


def test_a_wait_on_trio_ends_by_timeout_cancellation_or_another_thread(trio: ModuleType) -> None:
    async def go() -> None:
        throttle = Throttle(concurrency=1)
        permit = throttle.acquire_blocking()
        with pytest.raises(ThrottleTimeout):
            await throttle.acquire(max_wait_s=0.01)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(throttle.acquire)
            while not throttle.waiting():
                await trio.sleep(0)
            await trio.to_thread.run_sync(permit.done)
        assert throttle.in_flight() == 1
        with trio.move_on_after(0.01):
            await throttle.acquire()
        assert throttle.waiting() == 0

    trio.run(go)


def test_an_asyncio_throttler_is_refused_on_trio_before_the_request(trio: ModuleType) -> None:
    async def go() -> None:
        with refused(WrongUse, "event_loop"):
            await Throttle(requests="9/s", pacer="asyncio-throttle").acquire()

    trio.run(go)


def test_an_unknown_event_loop_is_refused() -> None:
    """A loop that is neither asyncio's nor trio's: here none at all, a coroutine driven by hand."""

    def drive(coroutine: Coroutine[Any, Any, Any]) -> None:
        with refused(WrongUse, "event_loop") as exc_info:
            coroutine.send(None)
        assert "asyncio or trio" in str(exc_info.value)

    client = instrument(
        openai.AsyncOpenAI(base_url="http://127.0.0.1:9", api_key="k"), retry=Retry(2)
    )
    drive(client.chat.completions.create(**REQUEST))
    drive(Throttle(concurrency=1).acquire())
    assert asyncio._get_running_loop() is None
