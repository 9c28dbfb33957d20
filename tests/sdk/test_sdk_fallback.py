"""Tests of the fallback to a second endpoint, and of the circuit breaker."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable
from typing import Any

import openai
import pytest
from expected_errors import refused
from loadgen_sdk import (
    Client,
    Fallback,
    Measurement,
    RequestFailed,
    Retry,
    Throttle,
    ThrottleTimeout,
    TokenPrice,
    WrongUse,
    instrument,
)
from loadgen_sdk.app.fallback import CircuitBreaker
from scripted_server import CHAT, CHAT_EVENTS, answer, cut, events, serving

ASK: dict[str, Any] = {"model": "large", "messages": [{"role": "user", "content": "Hello"}]}
BUSY = answer({"error": {}}, "503 Service Unavailable")
WRONG = answer({"error": {}}, "400 Bad Request")


def blocking(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=url, api_key="k", max_retries=0)


def test_an_open_circuit_allows_one_call_after_its_pause() -> None:
    circuit = CircuitBreaker(max_failures=2, open_ns=100)
    for now in (0, 1):
        assert circuit.allows_call(now)
        circuit.record_failure(now)

    assert not circuit.allows_call(100) and circuit.allows_call(101)
    assert not circuit.allows_call(102)  # the one that tries is under way
    circuit.record_failure(103)
    assert not circuit.allows_call(202) and circuit.allows_call(203)
    circuit.record_cancellation()  # cancelled: the next one tries
    assert circuit.allows_call(204)
    circuit.record_success()
    assert circuit.allows_call(205) and circuit.allows_call(206)


def test_after_repeated_failures_calls_go_directly_to_the_second_endpoint() -> None:
    measurements = list[Measurement]()
    with serving(BUSY) as first_server, serving(answer(CHAT)) as second_server:
        with blocking(first_server.url) as first_client, blocking(second_server.url) as two:
            behind = Fallback(two, model={"large": "small"}, failures=2, rest_s=1000)
            price = TokenPrice(1, 2)
            client = instrument(
                first_client,
                measurements.append,
                prices=price,
                retry=Retry(2, first_wait_s=0.001),
                fallback=behind,
            )
            for _ in range(3):
                assert client.chat.completions.create(**ASK).choices[0].message.content
        assert len(first_server.heard) == 4  # two calls of two attempts, then none
        assert [received_request.body["model"] for received_request in second_server.heard] == [
            "small"
        ] * 3

    assert [(measurement.model, measurement.status) for measurement in measurements] == [
        ("large", "failed"),
        ("small", "ok"),
        ("large", "failed"),
        ("small", "ok"),
        ("small", "ok"),
    ]
    assert all(
        measurement.cost is not None for measurement in measurements if measurement.status == "ok"
    )


def test_a_request_that_every_endpoint_would_refuse_does_not_fall_back() -> None:
    with serving(WRONG) as first_server, serving(answer(CHAT)) as second_server:
        with blocking(first_server.url) as first_client, blocking(second_server.url) as two:
            client = instrument(first_client, fallback=Fallback(two, failures=1))
            for _ in range(2):
                with pytest.raises(openai.BadRequestError):
                    client.chat.completions.create(**ASK)
        assert len(first_server.heard) == 2 and not second_server.heard


def test_each_endpoint_has_a_separate_throttle() -> None:
    async def go() -> None:
        with serving(answer(CHAT)) as first_server, serving(answer(CHAT)) as second_server:
            async with (
                openai.AsyncOpenAI(
                    base_url=first_server.url, api_key="k", max_retries=0
                ) as plain_client,
                openai.AsyncOpenAI(
                    base_url=second_server.url, api_key="k", max_retries=0
                ) as second_client,
            ):
                limits = {"requests": "1/h", "max_wait_s": 0.01}
                small = instrument(second_client, throttle=Throttle(**limits))
                client = instrument(
                    plain_client, throttle=Throttle(**limits), fallback=Fallback(small)
                )
                for _ in range(2):
                    await client.chat.completions.create(**ASK)
                with pytest.raises(ThrottleTimeout):
                    await client.chat.completions.create(**ASK)
            assert (len(first_server.heard), len(second_server.heard)) == (1, 1)

    asyncio.run(go())


def test_streams_and_raw_responses_fall_back_until_output_was_delivered() -> None:
    with serving(BUSY) as first_server, serving(events(*CHAT_EVENTS)) as second_server:
        with blocking(first_server.url) as first_client, blocking(second_server.url) as two:
            client = instrument(first_client, fallback=Fallback(two))
            assert len(list(client.chat.completions.create(**ASK, stream=True))) == len(CHAT_EVENTS)
            raw = client.chat.completions.with_raw_response.create(**ASK, stream=True)
            assert len(list(raw.parse())) == len(CHAT_EVENTS)
        assert len(second_server.heard) == 2
    with (
        serving(cut(events(*CHAT_EVENTS, done=False))) as first_server,
        serving(events(*CHAT_EVENTS)) as second_server,
    ):
        with blocking(first_server.url) as first_client, blocking(second_server.url) as two:
            client = instrument(first_client, fallback=Fallback(two))
            with pytest.raises(Exception, match=r"incomplete|closed|peer|disconnect|Connection"):
                list(client.chat.completions.create(**ASK, stream=True))

        assert not second_server.heard


@pytest.mark.parametrize("stream", [False, True])
def test_the_sdk_client_falls_back(stream: bool) -> None:
    options: dict[str, Any] = {"model": "m", "server": "generic"}

    async def text(client: Client) -> str:
        if stream:
            return "".join([event.text async for event in client.stream("Hello")])
        return (await client.complete("Hello")).text or ""

    async def go() -> None:
        with (
            serving(BUSY) as first_server,
            serving(events(*CHAT_EVENTS)) as second_server,
            serving(WRONG) as wrong_server,
        ):
            async with Client(second_server.url, **options) as other:
                async with Client(
                    first_server.url, fallback=Fallback(other, failures=2, rest_s=1000), **options
                ) as client:
                    assert [await text(client) for _ in range(3)] == [await text(other)] * 3
                assert len(first_server.heard) == 2
                async with Client(wrong_server.url, fallback=Fallback(other), **options) as client:
                    with pytest.raises(RequestFailed, match="http_4xx"):
                        await client.complete("Hello", raise_on_failure=True)

    asyncio.run(go())


def anthropic_client() -> Any:
    """Return a client of anthropic, whose import is slow, so that only this test pays for it."""
    return importlib.import_module("anthropic").Anthropic(api_key="k")


@pytest.mark.parametrize(
    ("make", "code"),
    [
        (lambda: Fallback(None, failures=0), "out_of_range"),
        (lambda: Fallback(None, rest_s=-1), "out_of_range"),
        (lambda: instrument(openai.OpenAI(api_key="k"), fallback=3), "wrong_type"),  # type: ignore[arg-type]
        (
            lambda: instrument(
                openai.OpenAI(api_key="k"), fallback=Fallback(openai.AsyncOpenAI(api_key="k"))
            ),
            "wrong_type",
        ),
        (
            lambda: instrument(openai.OpenAI(api_key="k"), fallback=Fallback(anthropic_client())),
            "wrong_type",
        ),
    ],
)
def test_invalid_fallbacks_are_refused(make: Callable[[], object], code: str) -> None:
    with refused(WrongUse, code):
        make()
