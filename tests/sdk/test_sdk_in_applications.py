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
from test_sdk_packages import ASKED, MESSAGE_EVENTS

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


def test_messages_from_a_generator_are_sent_whole_by_every_attempt() -> None:
    """A retry and a fallback send a generator of messages again, though it is used up."""
    with serving(BUSY, answer(CHAT), BUSY, answer(CHAT)) as server, blocking(server.url) as client:
        again = instrument(
            client, retry=Retry(2, first_wait_s=0.001), throttle=Throttle(tokens="90000/min")
        )
        elsewhere = instrument(client, fallback=Fallback(client))
        for own in (again, elsewhere):
            own.chat.completions.create(model="m", messages=(one for one in MESSAGES))  # type: ignore[arg-type, misc]
        assert [one.body["messages"] for one in server.heard] == [MESSAGES] * 4


@pytest.mark.parametrize("way", ["blocking", "async"])
def test_a_raw_response_that_cannot_be_parsed_is_the_applications(way: str) -> None:
    """`with_raw_response` returns a body that cannot be parsed. Only `parse` then fails."""
    told: list[Measurement] = []

    async def go(url: str) -> Any:
        async with waiting(url) as client:
            return await instrument(client, told.append).chat.completions.with_raw_response.create(
                **ASK
            )

    with serving(NOT_JSON) as server, blocking(server.url) as client:
        if way == "blocking":
            raw = instrument(client, told.append).chat.completions.with_raw_response.create(**ASK)
        else:
            raw = asyncio.run(go(server.url))
    assert raw.http_response.text.startswith("<")
    with pytest.raises(json.JSONDecodeError):
        raw.parse()
    assert [(one.status, one.failure.kind if one.failure else "") for one in told] == [
        ("failed", "malformed")
    ]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("stream", [False, True])
def test_our_warnings_raise_nothing_where_warnings_are_errors(
    stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """They raised in the call, and its permit was lost."""
    told: list[Measurement] = []
    uncounted = {name: value for name, value in CHAT.items() if name != "usage"}
    throttle = Throttle(concurrency=1)
    with (
        serving(events(*CHAT_EVENTS[:-1]) if stream else answer(uncounted)) as server,
        blocking(server.url) as client,
    ):
        prices = {"other": TokenPrice(1, 2)}
        own = instrument(client, told.append, prices=prices, ask_usage=False, throttle=throttle)

        async def inside_a_loop() -> None:
            list(own.chat.completions.create(**ASK, stream=stream))

        asyncio.run(inside_a_loop())
        list(own.chat.completions.create(**ASK, stream=stream))
    assert [one.status for one in told] == ["ok"] * 2 and in_flight(throttle) == 0
    assert "inside a running event loop" in caplog.text and "sent no token counts" in caplog.text


def test_a_fault_of_ours_at_the_end_of_a_call_is_logged_and_gives_the_permit_back(
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
        own = instrument(client, throttle=throttle, record=Broken())  # type: ignore[arg-type]
        assert own.chat.completions.create(**ASK).choices
        with pytest.raises(openai.InternalServerError):
            own.chat.completions.create(**ASK)
        assert len([*own.chat.completions.create(**ASK, stream=True)]) == len(CHAT_EVENTS)
    assert caplog.text.count("could not be measured") == 3 and in_flight(throttle) == 0


def test_a_stream_of_no_known_make_reaches_the_application(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Stream:
        __slots__ = ("_iterator",)  # and so no weak references

    def completion(**_: Any) -> Stream:
        return made

    made, module, throttle = Stream(), ModuleType("litellm"), Throttle(concurrency=1)
    made._iterator = iter(())
    module.completion = completion  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "litellm", module)
    own: Any = instrument(module, throttle=throttle)
    assert own.completion(model="m", messages=[], stream=True) is made
    assert "could not be measured" in caplog.text and throttle.in_flight(model="m") == 0


def test_an_error_of_the_http_library_without_a_request() -> None:
    """A client that fetches a token before each call raises its own error if that fails."""
    told: list[Measurement] = []
    library: Any = next(sys.modules[name] for name in ("httpx2", "httpx") if name in sys.modules)

    class Own(openai.OpenAI):
        def _prepare_options(self, options: Any) -> Any:  # noqa: ARG002 - as in the package
            raise library.ConnectError("the server of tokens is away")

    with Own(base_url="http://localhost:1/v1", api_key=KEY, max_retries=0) as client:
        own = instrument(client, told.append)
        with pytest.raises(library.ConnectError):
            own.chat.completions.create(**ASK)
    assert [(one.status, one.failure.kind if one.failure else "") for one in told] == [
        ("failed", "connect")
    ]


def test_what_closes_a_stream_may_be_all_that_is_kept_of_it() -> None:
    """A web framework may keep `stream.close` and call it when the stream is gone."""
    told: list[Measurement] = []

    def kept(stream: Any) -> Callable[[], Any]:
        close: Callable[[], Any] = stream.close
        return close

    async def go(url: str) -> None:
        async with waiting(url) as client:
            own = instrument(client, told.append)
            await kept(await own.chat.completions.create(**ASK, stream=True))()

    with serving(events(*CHAT_EVENTS)) as server, blocking(server.url) as client:
        kept(instrument(client, told.append).chat.completions.create(**ASK, stream=True))()
        asyncio.run(go(server.url))
    assert flush() and [one.status for one in told] == ["abandoned"] * 2


def test_a_stream_that_is_closed_as_it_is_lost_is_told_once() -> None:
    """Its destructor hands over to another thread what `close` says in this one: both said it."""
    told: list[Measurement] = []
    with serving(events(*CHAT_EVENTS)) as server, blocking(server.url) as client:
        stream: Any = instrument(client, told.append).chat.completions.create(**ASK, stream=True)
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
    assert flush() and [one.status for one in told] == ["abandoned"]


def test_usage_that_the_application_asks_for_by_extra_body_reaches_it() -> None:
    asked: dict[str, Any] = {
        **ASK,
        "stream": True,
        "extra_body": {"stream_options": {"include_usage": True}},
    }
    with serving(events(*CHAT_EVENTS)) as server, blocking(server.url) as client:
        plain = [*client.chat.completions.create(**asked)]
        ours = [*instrument(client, prices=TokenPrice(1, 2)).chat.completions.create(**asked)]
        assert ours == plain and server.heard[0].body == server.heard[1].body


@pytest.mark.parametrize("api", ["chat", "responses"])
@pytest.mark.parametrize("way", ["blocking", "async"])
def test_the_block_of_a_stream_that_is_left_gives_its_permit_back(way: str, api: str) -> None:
    """An application closes the response and not the stream, which frees the permit, too."""
    told: list[Measurement] = []
    throttle = Throttle(concurrency=1, max_wait_s=5)

    def block(own: Any) -> Any:
        return (
            own.chat.completions.stream(**ASK)
            if api == "chat"
            else own.responses.stream(model="m", input="Hi")
        )

    async def go(url: str) -> None:
        async with waiting(url) as client:
            own = instrument(client, told.append, throttle=throttle)
            for _ in range(2):
                async with block(own) as stream:
                    await anext(stream)
            async with block(own) as stream:
                async for _ in stream:
                    pass

    said = events(*CHAT_EVENTS) if api == "chat" else events(*RESPONSE_EVENTS, done=False)
    with serving(said) as server, blocking(server.url) as client:
        if not hasattr(client.chat.completions, "stream"):
            pytest.skip(f"openai {openai.__version__} has no such method")
        if way == "blocking":
            own = instrument(client, told.append, throttle=throttle)
            for _ in range(2):
                with block(own) as stream:
                    next(iter(stream))
            with block(own) as stream:
                assert [*stream]
        else:
            asyncio.run(go(server.url))
    assert [one.status for one in told] == ["abandoned", "abandoned", "ok"] and in_flight(
        throttle
    ) == 0


def test_the_block_of_anthropics_stream_too() -> None:
    anthropic: ModuleType = pytest.importorskip("anthropic")
    told: list[Measurement] = []
    throttle = Throttle(concurrency=1, max_wait_s=5)
    with (
        serving(events(*MESSAGE_EVENTS, done=False)) as server,
        anthropic.Anthropic(
            base_url=server.url.removesuffix("/v1"), api_key=KEY, max_retries=0
        ) as client,
    ):
        own = instrument(client, told.append, throttle=throttle)
        for _ in range(2):
            with own.messages.stream(**ASKED) as stream:
                next(iter(stream.text_stream))
        with own.messages.stream(**ASKED) as stream:
            stream.until_done()
    assert [one.status for one in told] == ["abandoned", "abandoned", "ok"]


def test_a_loop_that_raises_gives_its_permit_back() -> None:
    told: list[Measurement] = []
    throttle = Throttle(concurrency=1, max_wait_s=5)
    with serving(events(*CHAT_EVENTS)) as server, blocking(server.url) as client:
        own = instrument(client, told.append, throttle=throttle)
        for _ in range(2):
            with pytest.raises(KeyError):
                raise_in_the_loop(own)
            gc.collect()
    assert flush() and [one.status for one in told] == ["abandoned"] * 2


def raise_in_the_loop(own: Any) -> None:
    for _ in own.chat.completions.create(**ASK, stream=True):
        raise KeyError("of the application")


def test_threads_and_two_event_loops_share_a_throttle() -> None:
    told: list[Measurement] = []
    throttle = Throttle(concurrency=2)

    async def tasks(url: str) -> None:
        async with waiting(url) as client, asyncio.TaskGroup() as group:
            own = instrument(client, told.append, throttle=throttle)
            for _ in range(10):
                group.create_task(own.chat.completions.create(**ASK))

    def calls(url: str) -> None:
        with blocking(url) as client:
            own = instrument(client, told.append, throttle=throttle)
            for _ in range(10):
                own.chat.completions.create(**ASK)

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
        assert len(told) == len(server.heard) == 40 and in_flight(throttle) == 0


def test_a_task_group_that_fails_cancels_calls_in_flight_and_in_line() -> None:
    told: list[Measurement] = []
    throttle = Throttle(concurrency=3)

    async def go(url: str) -> None:
        async with waiting(url) as client:
            own = instrument(client, told.append, throttle=throttle, retry=Retry(3))

            async def fail(calls: list[asyncio.Task[Any]]) -> None:
                while in_flight(throttle) < 3:
                    await asyncio.sleep(0)
                raise KeyError(len(calls))

            with pytest.raises(ExceptionGroup):
                async with asyncio.TaskGroup() as group:
                    calls = [
                        group.create_task(own.chat.completions.create(**ASK)) for _ in range(9)
                    ]
                    group.create_task(fail(calls))

    with serving(HANG) as server:
        asyncio.run(go(server.url))
    assert [one.status for one in told] == ["cancelled"] * 9 and in_flight(throttle) == 0


def test_answers_can_be_pickled_and_copied(tmp_path: Any) -> None:
    with (
        serving(answer(CHAT)) as server,
        blocking(server.url) as client,
        record_shape(tmp_path / "t.jsonl") as shape,
    ):
        made = instrument(client, record=shape, keep_content=True).chat.completions.create(**ASK)
        assert pickle.loads(pickle.dumps(made)) == made == copy.deepcopy(made)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("owner", "use"),
    [
        (Retry(), lambda retry: retry.call_started()),
        (CircuitBreaker(1, 1), lambda one: one.allows_call(0)),
        (MemoryBudgetStore(), lambda one: one.add("ever", 0.0, 1.0)),
    ],
)
def test_a_fork_while_another_thread_holds_a_lock(owner: Any, use: Callable[[Any], Any]) -> None:
    """Nobody releases it in the child, where every call waited for ever."""
    with owner._lock:
        if (child := os.fork()) == 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(20)
            use(owner)
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    use(owner)
