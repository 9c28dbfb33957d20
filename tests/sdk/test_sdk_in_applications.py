"""Tests of what applications do with their clients and must not notice of measuring."""

from __future__ import annotations

import asyncio
import copy
import gc
import json
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import openai
import pytest
from loadgen_sdk import (
    Fallback,
    Measurement,
    Retry,
    Throttle,
    TokenPrice,
    instrument,
    record_shape,
)
from loadgen_sdk.app.background import flush
from loadgen_sdk.app.budget import MemoryBudgetStore
from loadgen_sdk.app.fallback import CircuitBreaker
from scripted_server import CHAT, CHAT_EVENTS, HANG, RESPONSE_EVENTS, answer, events, serving
from test_sdk_packages import MESSAGE_EVENTS, REQUEST

MESSAGES = [{"role": "user", "content": "Hi"}]
ASK: dict[str, Any] = {"model": "m", "messages": MESSAGES}
KEY = "k-12345678"
BUSY = answer({"error": {"message": "busy"}}, "500 Internal Server Error")
NOT_JSON = answer(CHAT).replace(b'{"id"', b'<"id"')


def blocking(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=url, api_key=KEY, max_retries=0)


def waiting(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0)


def in_flight(throttle: Throttle) -> int:
    return throttle.in_flight(key=KEY, model="m")


def test_every_attempt_sends_all_messages_of_a_generator() -> None:
    """A retry and a fallback send a generator of messages again, though it is used up."""
    with serving(BUSY, answer(CHAT), BUSY, answer(CHAT)) as server, blocking(server.url) as client:
        second_client = instrument(
            client, retry=Retry(2, first_wait_s=0.001), throttle=Throttle(tokens="90000/min")
        )
        elsewhere = instrument(client, fallback=Fallback(client))
        for measured_client in (second_client, elsewhere):
            measured_client.chat.completions.create(
                model="m", messages=(message for message in MESSAGES)
            )  # type: ignore[arg-type, misc]

        assert [received_request.body["messages"] for received_request in server.heard] == [
            MESSAGES
        ] * 4


@pytest.mark.parametrize("mode", ["blocking", "async"])
def test_an_unparsable_raw_response_is_returned_to_the_application(mode: str) -> None:
    """`with_raw_response` returns a body that cannot be parsed. Only `parse` then fails."""
    measurements: list[Measurement] = []

    async def go(url: str) -> Any:
        async with waiting(url) as client:
            return await instrument(
                client, measurements.append
            ).chat.completions.with_raw_response.create(**ASK)

    with serving(NOT_JSON) as server, blocking(server.url) as client:
        if mode == "blocking":
            raw = instrument(client, measurements.append).chat.completions.with_raw_response.create(
                **ASK
            )
        else:
            raw = asyncio.run(go(server.url))
    assert raw.http_response.text.startswith("<")
    with pytest.raises(json.JSONDecodeError):
        raw.parse()
    assert [
        (measurement.status, measurement.failure.kind if measurement.failure else "")
        for measurement in measurements
    ] == [("failed", "malformed")]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("stream", [False, True])
def test_warnings_of_the_sdk_are_logged_if_warnings_are_errors(
    stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """They raised in the call, and its permit was lost."""
    measurements: list[Measurement] = []
    uncounted = {name: value for name, value in CHAT.items() if name != "usage"}
    throttle = Throttle(concurrency=1)
    with (
        serving(events(*CHAT_EVENTS[:-1]) if stream else answer(uncounted)) as server,
        blocking(server.url) as client,
    ):
        prices = {"other": TokenPrice(1, 2)}
        measured_client = instrument(
            client, measurements.append, prices=prices, ask_usage=False, throttle=throttle
        )

        async def inside_a_loop() -> None:
            list(measured_client.chat.completions.create(**ASK, stream=stream))

        asyncio.run(inside_a_loop())
        list(measured_client.chat.completions.create(**ASK, stream=stream))
    assert [measurement.status for measurement in measurements] == ["ok"] * 2 and in_flight(
        throttle
    ) == 0
    assert "inside a running event loop" in caplog.text and "sent no token counts" in caplog.text


def test_an_internal_error_at_the_end_of_a_call_is_logged_and_returns_the_permit(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Broken:
        def begin(self, *_: Any) -> str:
            return "a call"

        def end(self, *_: Any) -> None:
            raise RuntimeError("broken")

    throttle = Throttle(concurrency=1, max_wait_s=5)
    with (
        serving(answer(CHAT), BUSY, events(*CHAT_EVENTS)) as server,
        blocking(server.url) as client,
    ):
        measured_client = instrument(client, throttle=throttle, record=Broken())  # type: ignore[arg-type]
        assert measured_client.chat.completions.create(**ASK).choices
        with pytest.raises(openai.InternalServerError):
            measured_client.chat.completions.create(**ASK)
        assert len([*measured_client.chat.completions.create(**ASK, stream=True)]) == len(
            CHAT_EVENTS
        )
    assert caplog.text.count("could not be measured") == 3 and in_flight(throttle) == 0


def test_a_stream_of_an_unknown_type_reaches_the_application(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Stream:
        __slots__ = ("_iterator",)  # and so no weak references

    def completion(**_: Any) -> Stream:
        return stream

    stream, module, throttle = Stream(), ModuleType("litellm"), Throttle(concurrency=1)
    stream._iterator = iter(())
    module.completion = completion  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "litellm", module)
    client: Any = instrument(module, throttle=throttle)
    assert client.completion(model="m", messages=[], stream=True) is stream
    assert "could not be measured" in caplog.text and throttle.in_flight(model="m") == 0


def test_an_http_error_without_a_request_is_measured() -> None:
    """A client that fetches a token before each call raises its own error if that fails."""
    measurements: list[Measurement] = []
    library: Any = next(sys.modules[name] for name in ("httpx2", "httpx") if name in sys.modules)

    class FailingClient(openai.OpenAI):
        def _prepare_options(self, options: Any) -> Any:  # noqa: ARG002 - as in the package
            raise library.ConnectError("the server of tokens is away")

    with FailingClient(base_url="http://localhost:1/v1", api_key=KEY, max_retries=0) as client:
        measured_client = instrument(client, measurements.append)
        with pytest.raises(library.ConnectError):
            measured_client.chat.completions.create(**ASK)
    assert [
        (measurement.status, measurement.failure.kind if measurement.failure else "")
        for measurement in measurements
    ] == [("failed", "connect")]


def test_a_stream_referenced_only_by_its_close_method_is_measured() -> None:
    """A web framework may keep `stream.close` and call it when the stream is gone."""
    measurements: list[Measurement] = []

    def close_method(stream: Any) -> Callable[[], Any]:
        close: Callable[[], Any] = stream.close
        return close

    async def go(url: str) -> None:
        async with waiting(url) as client:
            measured_client = instrument(client, measurements.append)
            await close_method(await measured_client.chat.completions.create(**ASK, stream=True))()

    with serving(events(*CHAT_EVENTS)) as server, blocking(server.url) as client:
        close_method(
            instrument(client, measurements.append).chat.completions.create(**ASK, stream=True)
        )()
        asyncio.run(go(server.url))
    assert flush() and [measurement.status for measurement in measurements] == ["abandoned"] * 2


def test_a_stream_closed_by_garbage_collection_is_reported_once() -> None:
    """Its destructor hands over to another thread what `close` says in this one: both said it."""
    measurements: list[Measurement] = []
    with serving(events(*CHAT_EVENTS)) as server, blocking(server.url) as client:
        stream: Any = instrument(client, measurements.append).chat.completions.create(
            **ASK, stream=True
        )
        observed = stream._iterator._observed
        usage = observed.tracker.usage

        def meanwhile() -> Any:
            other = threading.Thread(target=observed.report_abandoned)
            observed.tracker.usage = usage
            other.start()
            other.join()
            return usage()

        observed.tracker.usage = meanwhile
        stream.close()
    assert flush() and [measurement.status for measurement in measurements] == ["abandoned"]


def test_usage_that_the_application_requests_by_extra_body_is_delivered() -> None:
    request: dict[str, Any] = {
        **ASK,
        "stream": True,
        "extra_body": {"stream_options": {"include_usage": True}},
    }
    with serving(events(*CHAT_EVENTS)) as server, blocking(server.url) as client:
        plain = [*client.chat.completions.create(**request)]
        ours = [*instrument(client, prices=TokenPrice(1, 2)).chat.completions.create(**request)]

        assert ours == plain and server.heard[0].body == server.heard[1].body


@pytest.mark.parametrize("api", ["chat", "responses"])
@pytest.mark.parametrize("mode", ["blocking", "async"])
def test_leaving_the_block_of_a_stream_returns_its_permit(mode: str, api: str) -> None:
    """An application closes the response and not the stream, which frees the permit, too."""
    measurements: list[Measurement] = []
    throttle = Throttle(concurrency=1, max_wait_s=5)

    def block(client: Any) -> Any:
        return (
            client.chat.completions.stream(**ASK)
            if api == "chat"
            else client.responses.stream(model="m", input="Hi")
        )

    async def go(url: str) -> None:
        async with waiting(url) as client:
            measured_client = instrument(client, measurements.append, throttle=throttle)
            for _ in range(2):
                async with block(measured_client) as stream:
                    await anext(stream)
            async with block(measured_client) as stream:
                async for _ in stream:
                    pass

    response = events(*CHAT_EVENTS) if api == "chat" else events(*RESPONSE_EVENTS, done=False)
    with serving(response) as server, blocking(server.url) as client:
        if not hasattr(client.chat.completions, "stream"):
            pytest.skip(f"openai {openai.__version__} has no such method")
        if mode == "blocking":
            measured_client = instrument(client, measurements.append, throttle=throttle)
            for _ in range(2):
                with block(measured_client) as stream:
                    next(iter(stream))
            with block(measured_client) as stream:
                assert [*stream]
        else:
            asyncio.run(go(server.url))
    assert [measurement.status for measurement in measurements] == [
        "abandoned",
        "abandoned",
        "ok",
    ] and in_flight(throttle) == 0


def test_leaving_the_block_of_an_anthropic_stream_returns_its_permit() -> None:
    anthropic: ModuleType = pytest.importorskip("anthropic")
    measurements: list[Measurement] = []
    throttle = Throttle(concurrency=1, max_wait_s=5)
    with (
        serving(events(*MESSAGE_EVENTS, done=False)) as server,
        anthropic.Anthropic(
            base_url=server.url.removesuffix("/v1"), api_key=KEY, max_retries=0
        ) as client,
    ):
        measured_client = instrument(client, measurements.append, throttle=throttle)
        for _ in range(2):
            with measured_client.messages.stream(**REQUEST) as stream:
                next(iter(stream.text_stream))
        with measured_client.messages.stream(**REQUEST) as stream:
            stream.until_done()

    assert [measurement.status for measurement in measurements] == ["abandoned", "abandoned", "ok"]


def test_a_loop_over_a_stream_that_raises_returns_its_permit() -> None:
    measurements: list[Measurement] = []
    throttle = Throttle(concurrency=1, max_wait_s=5)
    with serving(events(*CHAT_EVENTS)) as server, blocking(server.url) as client:
        measured_client = instrument(client, measurements.append, throttle=throttle)
        for _ in range(2):
            with pytest.raises(KeyError):
                raise_in_the_loop(measured_client)
            gc.collect()

    assert flush() and [measurement.status for measurement in measurements] == ["abandoned"] * 2


def raise_in_the_loop(client: Any) -> None:
    for _ in client.chat.completions.create(**ASK, stream=True):
        raise KeyError("of the application")


def test_threads_and_two_event_loops_share_a_throttle() -> None:
    measurements: list[Measurement] = []
    throttle = Throttle(concurrency=2)

    async def tasks(url: str) -> None:
        async with waiting(url) as client, asyncio.TaskGroup() as group:
            measured_client = instrument(client, measurements.append, throttle=throttle)
            for _ in range(10):
                group.create_task(measured_client.chat.completions.create(**ASK))

    def calls(url: str) -> None:
        with blocking(url) as client:
            measured_client = instrument(client, measurements.append, throttle=throttle)
            for _ in range(10):
                measured_client.chat.completions.create(**ASK)

    with serving(answer(CHAT)) as server:
        ways: tuple[Callable[[], Any], ...] = (
            lambda: asyncio.run(tasks(server.url)),
            lambda: asyncio.run(tasks(server.url)),
            lambda: calls(server.url),
            lambda: calls(server.url),
        )
        threads = [threading.Thread(target=way) for way in ways]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(measurements) == len(server.heard) == 40 and in_flight(throttle) == 0


def test_a_failing_task_group_cancels_running_and_waiting_calls() -> None:
    measurements: list[Measurement] = []
    throttle = Throttle(concurrency=3)

    async def go(url: str) -> None:
        async with waiting(url) as client:
            measured_client = instrument(
                client, measurements.append, throttle=throttle, retry=Retry(3)
            )

            async def fail(calls: list[asyncio.Task[Any]]) -> None:
                while in_flight(throttle) < 3:
                    await asyncio.sleep(0)
                raise KeyError(len(calls))

            with pytest.raises(ExceptionGroup):
                async with asyncio.TaskGroup() as group:
                    calls = [
                        group.create_task(measured_client.chat.completions.create(**ASK))
                        for _ in range(9)
                    ]
                    group.create_task(fail(calls))

    with serving(HANG) as server:
        asyncio.run(go(server.url))
    assert [measurement.status for measurement in measurements] == ["cancelled"] * 9 and in_flight(
        throttle
    ) == 0


def test_instrumented_responses_can_be_pickled_and_copied(tmp_path: Any) -> None:
    with (
        serving(answer(CHAT)) as server,
        blocking(server.url) as client,
        record_shape(tmp_path / "t.jsonl") as shape,
    ):
        response = instrument(client, record=shape, keep_content=True).chat.completions.create(
            **ASK
        )

        assert pickle.loads(pickle.dumps(response)) == response == copy.deepcopy(response)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("owner", "use"),
    [
        (Retry(), lambda retry: retry.call_started()),
        (CircuitBreaker(1, 1), lambda store: store.allows_call(0)),
        (MemoryBudgetStore(), lambda store: store.add("ever", 0.0, 1.0)),
    ],
)
def test_a_fork_while_another_thread_holds_a_lock_does_not_deadlock(
    owner: Any, use: Callable[[Any], Any]
) -> None:
    """Nobody releases it in the child, where every call waited for ever."""
    with owner._lock:
        if (child := os.fork()) == 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(20)
            use(owner)
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    use(owner)
