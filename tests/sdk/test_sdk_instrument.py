"""Tests of `instrument`: results do not change, and each call is measured once."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import openai
import pydantic
import pytest
from expected_errors import refused
from loadgen_sdk import (
    Budget,
    ClientError,
    Measurement,
    Retry,
    Throttle,
    ThrottleTimeout,
    TokenPrice,
    WrongUse,
    instrument,
    labelled,
    latest_measurement,
    measurement_of,
    record_shape,
)
from loadgen_sdk.app.background import flush
from loadgen_sdk.app.measurement import attach_measurement
from loadgen_sdk.app.prompt_text import read_prompt
from scripted_server import (
    CHAT,
    CHAT_EVENTS,
    COMPLETION,
    COMPLETION_EVENTS,
    HANG,
    RESPONSE,
    RESPONSE_EVENTS,
    Canned,
    answer,
    chunk,
    cut,
    events,
    serving,
)

PROMPT = "the secret prompt"
CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("chat.completions", {"messages": [{"role": "user", "content": PROMPT}]}),
    "completions": ("completions", {"prompt": PROMPT}),
    "responses": ("responses", {"input": PROMPT}),
}
SAID = {
    ("chat", False): answer(CHAT, x_request_id="r-7", server_timing="ttft;dur=5"),
    ("chat", True): events(*CHAT_EVENTS, x_request_id="r-7", server_timing="ttft;dur=5"),
    ("completions", False): answer(COMPLETION, x_request_id="r-7", server_timing="ttft;dur=5"),
    ("completions", True): events(
        *COMPLETION_EVENTS, x_request_id="r-7", server_timing="ttft;dur=5"
    ),
    ("responses", False): answer(RESPONSE, x_request_id="r-7", server_timing="ttft;dur=5"),
    ("responses", True): events(
        *RESPONSE_EVENTS, done=False, x_request_id="r-7", server_timing="ttft;dur=5"
    ),
}
WAYS = ("blocking", "async")
Told = list[Measurement]
Event = TypeVar("Event")


def client(way: str, server: Canned, **options: Any) -> Any:
    make: Any = openai.OpenAI if way == "blocking" else openai.AsyncOpenAI
    return make(base_url=server.url, api_key="sk-the-key-1234", **{"max_retries": 0, **options})


def method(of: Any, api: str, name: str = "create") -> Callable[..., Any]:
    path, _ = CALLS[api]
    for step in path.split("."):
        if not hasattr(of, step):
            pytest.skip(f"openai {openai.__version__} has no {path}")
        of = getattr(of, step)
    return getattr(of, name)


def run(
    way: str,
    server: Canned,
    use: Callable[[Any], Any],
    *,
    plain: bool = False,
    told: Told | None = None,
    client_options: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """`use(client)` in its way: a coroutine of it is awaited. The client is closed."""
    if way == "blocking":
        with client(way, server, **(client_options or {})) as own:
            return use(
                own
                if plain
                else instrument(own, (told if told is not None else []).append, **options)
            )

    async def go() -> Any:
        async with client(way, server, **(client_options or {})) as own:
            result = use(
                own
                if plain
                else instrument(own, (told if told is not None else []).append, **options)
            )
            return await result if asyncio.iscoroutine(result) else result

    return asyncio.run(go())


def ask(way: str, api: str, stream: bool, **more: Any) -> Callable[[Any], Any]:
    """Return a function that makes one call and returns the response, or stream and events."""
    arguments = {"model": "m", **CALLS[api][1], **({"stream": True} if stream else {}), **more}

    def use(own: Any) -> Any:
        made = method(own, api)(**arguments)
        return (made, list(made)) if stream else (made, [])

    async def use_async(own: Any) -> Any:
        made = await method(own, api)(**arguments)
        return (made, [event async for event in made]) if stream else (made, [])

    return use if way == "blocking" else use_async


@pytest.mark.parametrize(("api", "stream"), SAID)
@pytest.mark.parametrize("way", WAYS)
def test_the_answer_is_the_same_and_is_measured(way: str, api: str, stream: bool) -> None:
    told: Told = []
    with serving(SAID[api, stream]) as server:
        plain, plain_events = run(way, server, ask(way, api, stream), plain=True)
        price = {"m-1": TokenPrice(input=2.0, output=10.0, cached=1.0)}
        ours, our_events = run(
            way, server, ask(way, api, stream), told=told, prices=price, ask_usage=False
        )
    assert type(ours) is type(plain)
    assert [event.model_dump() for event in our_events] == [
        event.model_dump() for event in plain_events
    ]
    if not stream:
        assert (
            ours == plain
            and ours.model_dump() == plain.model_dump()
            and ours.to_json() == plain.to_json()
        )
    measured = told[0]
    assert told == [ours.measurement] and ours.measurement is measured
    assert (measured.api, measured.streamed, measured.status, measured.failure) == (
        api,
        stream,
        "ok",
        None,
    )
    assert (measured.input_tokens, measured.output_tokens, measured.cached_tokens) == (9, 3, 4)
    assert measured.token_source == "server"
    assert measured.cost == pytest.approx((5 * 2.0 + 4 * 1.0 + 3 * 10.0) / 1e6)
    assert (measured.model, measured.response_model, measured.response_id) == ("m", "m-1", "c1")
    assert (measured.request_id, measured.server_timing) == ("r-7", {"server-timing": "ttft;dur=5"})
    assert measured.finish_reason == ("completed" if api == "responses" else "stop")
    assert len(measured.instants) == (3 if stream else 1)
    assert (
        measured.started
        <= measured.sent
        <= measured.first_token
        <= measured.last_token
        <= measured.end
    )
    assert measured.ttft_ms == (measured.first_token - measured.started) / 1e6
    assert (measured.tpot_ms is not None) == stream and (measured.itl_ms is not None) == stream
    assert (
        PROMPT not in repr(measured)
        and "there" not in repr(measured)
        and "sk-the" not in repr(measured)
    )


@pytest.mark.parametrize("way", WAYS)
def test_latest_measurement_is_that_of_this_context(way: str) -> None:
    with serving(SAID["chat", False]) as server:
        if way == "blocking":
            made, _ = run(way, server, ask(way, "chat", False))
            assert latest_measurement() is made.measurement
        else:

            async def use(own: Any) -> None:
                ones = await asyncio.gather(*(one(own) for _ in range(3)))
                assert len({measured.started for measured in ones}) == 3

            async def one(own: Any) -> Measurement:
                made, _ = await ask(way, "chat", False)(own)
                measured = latest_measurement()
                assert measured is made.measurement
                return measured

            run(way, server, use)


def test_latest_measurement_after_a_wait_with_a_limit() -> None:
    """`asyncio.wait_for` creates a task until Python 3.11, and the measurement is still found."""
    told: Told = []

    async def use(own: Any) -> None:
        for _ in range(2):
            made, _ = await asyncio.wait_for(ask("async", "chat", False)(own), 5)
            assert latest_measurement() is made.measurement
        inner = asyncio.wait_for(ask("async", "chat", False)(own), 5)
        made, _ = await asyncio.wait_for(inner, 5)
        assert latest_measurement() is made.measurement

        async def other() -> None:
            assert latest_measurement() is made.measurement
            await ask("async", "chat", False)(own)

        await asyncio.create_task(other())  # not of this task: nothing of it is told here
        assert latest_measurement() is made.measurement

    with serving(SAID["chat", False]) as server:
        run("async", server, use, told=told)
    assert len(told) == 4


@pytest.mark.parametrize("way", WAYS)
def test_wrong_arguments_are_no_call(way: str) -> None:
    told: Told = []
    throttle = Throttle(concurrency=1)
    with serving(SAID["chat", False]) as server:
        with pytest.raises(TypeError):
            run(
                way,
                server,
                ask(way, "chat", False, no_such=1),
                told=told,
                throttle=throttle,
                retry=Retry(3),
            )
        assert not told and not server.heard
        assert throttle.in_flight(key="sk-the-key-1234", model="m") == 0


def test_an_answer_of_pydantic_1_dumps_what_the_server_sent() -> None:
    """Openai 1.60 with pydantic 1: `.dict()` had the measurement, and `.json()` raised."""
    v1 = pytest.importorskip("pydantic.v1", reason="pydantic 1, or the one inside 2")

    class Answer(v1.BaseModel):  # type: ignore[name-defined,misc]
        id: str

    one, other = Answer(id="a"), Answer(id="b")
    measured = Measurement(api="chat", streamed=False, status="ok", started=0, started_unix_ns=0)
    attach_measurement(one, measured)
    assert one.measurement is measured and measurement_of(one) is measured
    assert one.dict() == {"id": "a"} and json.loads(one.json()) == {"id": "a"} and one != other
    assert not hasattr(other, "measurement") and measurement_of(other) is None
    assert one.__fields_set__ == {"id"} and one.dict(exclude_unset=True) == {"id": "a"}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_raises_what_it_always_raised(way: str, stream: bool) -> None:
    told: Told = []
    said = answer(
        {"error": {"message": "no key sk-the-key-1234 here"}},
        "503 Service Unavailable",
        retry_after_ms="1",
    )
    with serving(said) as server:
        with pytest.raises(openai.InternalServerError) as plain:
            run(way, server, ask(way, "chat", stream), plain=True)
        with pytest.raises(openai.InternalServerError) as ours:
            run(way, server, ask(way, "chat", stream), told=told, client_options={"max_retries": 2})
    assert str(ours.value) == str(plain.value)
    measured = told[0]
    assert measured.status == "failed" and measured.failure is not None
    assert (measured.failure.kind, measured.failure.http_status) == ("http_5xx", 503)
    assert "sk-the-key" not in repr(measured)
    assert (measured.retries, measured.hidden_retries, len(measured.attempts)) == (2, 2, 1)
    assert (measured.ttft_ms, measured.e2e_ms, measured.output_tokens) == (
        None,
        None,
        None if not stream else 0,
    )


@pytest.mark.parametrize("way", WAYS)
def test_a_stream_that_breaks_raises_and_keeps_what_was_seen(way: str) -> None:
    told: Told = []
    got: list[Any] = []

    def use(own: Any) -> None:
        got.extend(own.chat.completions.create(model="m", messages=[], stream=True))

    async def use_async(own: Any) -> None:
        async for event in await own.chat.completions.create(model="m", messages=[], stream=True):
            got.append(event)  # noqa: PERF401 - what came before the break counts

    with (
        serving(cut(events(chunk("Hel"), chunk("lo"), done=False))) as server,
        pytest.raises(Exception, match=r"(?i)peer closed|incomplete|connection"),
    ):
        run(way, server, use if way == "blocking" else use_async, told=told)
    assert len(got) == 2
    assert (told[0].status, told[0].token_source, told[0].output_tokens) == ("failed", "events", 2)
    assert told[0].failure is not None and told[0].failure.kind in ("truncated", "reset")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("after", "status"), [(2, "abandoned"), (5, "ok")])
def test_leaving_the_loop_is_measured_at_once(way: str, after: int, status: str) -> None:
    told: Told = []

    def use(own: Any) -> None:
        stream = own.chat.completions.create(model="m", messages=[], stream=True)
        for number, _ in enumerate(stream, 1):
            if number == after:
                break
        assert [measured.status for measured in told] == [status] and stream.measurement is told[0]

    async def use_async(own: Any) -> None:
        stream = await own.chat.completions.create(model="m", messages=[], stream=True)
        number = 0
        async for _ in stream:
            number += 1
            if number == after:
                break
        for _ in range(5):  # the loop ends abandoned generators in its next turns
            await asyncio.sleep(0)
        assert [measured.status for measured in told] == [status] and stream.measurement is told[0]

    gc.disable()  # nothing may depend on the collector
    try:
        with serving(SAID["chat", True]) as server:
            run(way, server, use if way == "blocking" else use_async, told=told)
    finally:
        gc.enable()
    assert len(told) == 1


@pytest.mark.parametrize("way", WAYS)
def test_close_and_next_are_measured_too(way: str) -> None:
    told: Told = []

    def use(own: Any) -> None:
        with own.chat.completions.create(model="m", messages=[], stream=True) as stream:
            next(stream)
            next(stream)
        assert [(one.status, len(one.instants)) for one in told] == [("abandoned", 1)]

    async def use_async(own: Any) -> None:
        async with await own.chat.completions.create(model="m", messages=[], stream=True) as stream:
            await anext(stream)
            await anext(stream)
        assert [(one.status, len(one.instants)) for one in told] == [("abandoned", 1)]

    with serving(SAID["chat", True]) as server:
        run(way, server, use if way == "blocking" else use_async, told=told)


@pytest.mark.parametrize("way", WAYS)
def test_a_stream_that_nobody_reads_is_measured_when_it_is_gone(way: str) -> None:
    told: Told = []

    def use(own: Any) -> None:
        own.chat.completions.create(model="m", messages=[], stream=True)
        assert flush()

    async def use_async(own: Any) -> None:
        await own.chat.completions.create(model="m", messages=[], stream=True)
        assert flush()

    gc.disable()  # at once, not at the next run of the collector
    try:
        with serving(SAID["chat", True]) as server:
            run(way, server, use if way == "blocking" else use_async, told=told)
    finally:
        gc.enable()
    assert [(one.status, one.instants) for one in told] == [("abandoned", ())]


def test_a_cancelled_call_is_measured_and_stays_cancelled() -> None:
    told: Told = []

    async def use(own: Any) -> None:
        task = asyncio.ensure_future(own.chat.completions.create(model="m", messages=[]))
        while not server.heard:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with serving(HANG) as server:
        run("async", server, use, told=told)
    assert [(one.status, one.failure and one.failure.kind) for one in told] == [
        ("cancelled", "interrupted")
    ]


def test_a_call_cancelled_between_its_attempts_is_measured() -> None:
    told: Told = []

    async def use(own: Any) -> None:
        task = asyncio.ensure_future(own.chat.completions.create(model="m", messages=[]))
        while not server.heard and not task.done():
            await asyncio.sleep(0.001)
        done, _ = await asyncio.wait([task], timeout=0.2)
        assert not done, "it waits for its second attempt"
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    busy = answer({"error": {"message": "slow down"}}, "429 Too Many Requests", retry_after="30")
    with serving(busy) as server:
        run("async", server, use, told=told, retry=Retry(3, max_wait_s=60))
    assert [(one.status, len(one.attempts)) for one in told] == [("cancelled", 1)]


@pytest.mark.parametrize("way", WAYS)
def test_the_request_stays_as_the_application_made_it(way: str) -> None:
    with serving(SAID["chat", False]) as server:
        run(way, server, ask(way, "chat", False), plain=True)
        run(way, server, ask(way, "chat", False), prices=TokenPrice(1, 2))
    plain, ours = ({name.lower() for name in heard.headers} for heard in server.heard)
    assert plain == ours and server.heard[0].body == server.heard[1].body


class TakesResponsesElsewhere(openai.OpenAI):
    """A later version of the package may rename the argument with the response."""

    def _process_response(self, *args: Any, taken: Any, **kwargs: Any) -> Any:
        return super()._process_response(*args, response=taken, **kwargs)

    def request(self, *args: Any, **kwargs: Any) -> Any:
        ours = vars(self).get("_process_response")
        vars(self)["_process_response"] = lambda *more, response, **rest: ours(
            *more, taken=response, **rest
        )
        try:
            return super().request(*args, **kwargs)
        finally:
            vars(self)["_process_response"] = ours


def test_a_package_that_hides_its_headers_is_said_aloud_once() -> None:
    """Calls are measured as before, without the headers."""
    told: Told = []
    with (
        serving(SAID["chat", False]) as server,
        TakesResponsesElsewhere(base_url=server.url, api_key="k") as own,
    ):
        create = instrument(own, told.append).chat.completions.create
        with pytest.warns(RuntimeWarning, match="cannot read the response headers"):
            create(model="m", messages=[])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            create(model="m", messages=[])
    assert [(one.status, one.request_id, one.output_tokens) for one in told] == [("ok", "", 3)] * 2


@pytest.mark.parametrize("way", WAYS)
def test_a_timeout_is_measured(way: str) -> None:
    told: Told = []
    with serving(HANG) as server, pytest.raises(openai.APITimeoutError):
        run(
            way,
            server,
            ask(way, "chat", False),
            told=told,
            client_options={"timeout": openai.Timeout(60, read=0.05)},
        )
    assert told[0].failure is not None and told[0].failure.kind == "timeout_total"


@pytest.mark.parametrize("way", WAYS)
def test_asking_for_usage_hides_the_event_that_brings_it(way: str) -> None:
    told: Told = []
    with serving(SAID["chat", True]) as server:
        _, plain = run(way, server, ask(way, "chat", True), plain=True)
        _, ours = run(way, server, ask(way, "chat", True), told=told, ask_usage=True)
        assert server.heard[1].body["stream_options"] == {"include_usage": True}
        assert "stream_options" not in server.heard[0].body
    assert len(ours) == len(plain) - 1 and all(event.choices for event in ours)
    assert (told[0].token_source, told[0].output_tokens) == ("server", 3)


@pytest.mark.parametrize("way", WAYS)
def test_the_client_given_stays_as_it_was_and_variants_stay_measured(way: str) -> None:
    told: Told = []
    variants: list[Callable[[Any], Any]] = [
        lambda own: own.chat.completions,
        lambda own: own.chat.completions.with_raw_response,
        lambda own: own.with_options(timeout=9).chat.completions,
        lambda own: own.with_raw_response.chat.completions,
    ]

    async def go() -> None:
        own = client(way, server)
        measured = instrument(own, told.append)
        assert type(measured) is type(own) and type(measured.with_options(timeout=9)) is type(own)
        for number, variant in enumerate(variants, 1):
            for of in (own, measured):
                made = variant(of).create(model="m", messages=[])
                made = await made if way == "async" else made
                body = made.parse() if hasattr(made, "http_response") else made
                assert body.choices[0].message.content == "Hello there."
                assert hasattr(body, "measurement") == (of is measured)
            assert len(told) == number
        closed = own.close()
        if way == "async":
            await closed

    with serving(SAID["chat", False]) as server, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a blocking client inside a loop
        asyncio.run(go())


@pytest.mark.parametrize("way", WAYS)
def test_retries_are_attempts_of_one_measurement(way: str) -> None:
    told: Told = []
    busy = answer({"error": {"message": "slow down"}}, "429 Too Many Requests", retry_after_ms="2")
    with serving(busy, busy, SAID["chat", False]) as server:
        run(
            way,
            server,
            ask(way, "chat", False),
            told=told,
            retry=Retry(3, first_wait_s=0.001, seed=1),
            client_options={"max_retries": 5},
        )
        assert len(server.heard) == 3
    measured = told[0]
    assert [one.failure.kind if one.failure else "" for one in measured.attempts] == [
        "http_429",
        "http_429",
        "",
    ]
    assert [one.waited_ms for one in measured.attempts] == [2, 2, 0]
    assert (measured.status, measured.retries, len(told)) == ("ok", 2, 1)
    assert measured.wait_ms is not None and measured.wait_ms >= 4
    assert measured.ttft_ms is not None and measured.ttft_from_sent_ms is not None
    assert measured.ttft_ms - measured.ttft_from_sent_ms == pytest.approx(measured.wait_ms)


@pytest.mark.parametrize("way", WAYS)
def test_content_only_when_asked_for(way: str) -> None:
    told: Told = []
    with serving(SAID["chat", True]) as server:
        run(way, server, ask(way, "chat", True), told=told, keep_content=True)
    assert told[0].content is not None
    assert (told[0].content.input, told[0].content.output) == (
        CALLS["chat"][1]["messages"],
        "Hello there.",
    )


def test_an_observer_that_fails_is_logged_and_others_are_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    told: Told = []

    def broken(_: Measurement) -> None:
        raise ZeroDivisionError

    with serving(SAID["chat", False]) as server, client("blocking", server) as own:
        made = instrument(own, (broken, told.append)).chat.completions.create(
            model="m", messages=[]
        )
    assert told == [made.measurement] and "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize("kind", ["AzureOpenAI", "AsyncAzureOpenAI"])
def test_azure_clients(kind: str) -> None:
    told: Told = []
    with serving(SAID["chat", False]) as server:
        make = getattr(openai, kind)
        own = make(
            azure_endpoint=server.url.removesuffix("/v1"),
            api_key="k-1234567",
            api_version="2024-10-21",
        )
        measured = instrument(own, told.append)
        made = measured.chat.completions.create(model="deployed", messages=[])
        if kind.startswith("Async"):

            async def go() -> None:
                await made
                await own.close()

            asyncio.run(go())
        else:
            own.close()
        assert server.heard[0].path.startswith(
            "/openai/deployments/deployed/chat/completions?api-version="
        )
    assert type(measured) is make and told[0].model == "deployed"


def test_a_blocking_client_inside_a_loop_is_warned_of_once() -> None:
    async def go(measured: Any) -> None:
        with pytest.warns(
            RuntimeWarning, match="blocking OpenAI client was called inside a running event loop"
        ):
            measured.chat.completions.create(model="m", messages=[])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            measured.chat.completions.create(model="m", messages=[])
            await asyncio.to_thread(measured.chat.completions.create, model="m", messages=[])

    with serving(SAID["chat", False]) as server, client("blocking", server) as own:
        asyncio.run(go(instrument(own)))


def test_a_model_without_a_price_costs_nobody_knows_what() -> None:
    told: Told = []
    with (
        serving(SAID["chat", False]) as server,
        pytest.warns(
            UserWarning,
            match="no price for the model 'm', so its cost is None \\(prices are known for other",
        ),
    ):
        run(
            "blocking",
            server,
            ask("blocking", "chat", False),
            told=told,
            prices={"other": TokenPrice(1, 1)},
        )
    assert told[0].cost is None and told[0].output_tokens == 3


def bad_uses() -> Iterator[tuple[str, Callable[[Any], Any]]]:
    yield "wrong_type", lambda _client: instrument("gpt-4o")
    yield "wrong_type", lambda _client: instrument(openai.OpenAI)
    yield "wrong_type", lambda own: instrument(own.completions)
    yield "wrong_type", lambda own: instrument(own, prices=2.5)
    yield "wrong_type", lambda own: instrument(own, prices={"m": 2.5})
    yield "out_of_range", lambda _client: TokenPrice(1, -1)
    yield "out_of_range", lambda _client: TokenPrice(float("nan"), 1)
    yield "wrong_type", lambda own: instrument(own, (3,))
    yield "wrong_type", lambda own: instrument(own, throttle=5)
    yield "wrong_type", lambda own: instrument(own, retry=3)
    yield "wrong_type", lambda own: instrument(own, record="traffic.jsonl")


@pytest.mark.parametrize(("code", "use"), [*bad_uses()])
def test_what_cannot_be_is_said_when_it_is_asked_for(code: str, use: Callable[[Any], Any]) -> None:
    with openai.OpenAI(api_key="k") as own, refused(WrongUse, code) as found:
        use(own)
    assert isinstance(found.value, ClientError) and found.value.hint


def test_measurements_are_data() -> None:
    import msgspec

    told: Told = []
    with serving(SAID["chat", True]) as server:
        run("blocking", server, ask("blocking", "chat", True), told=told)
    assert msgspec.json.decode(msgspec.json.encode(told[0]), type=Measurement) == told[0]
    assert json.loads(msgspec.json.encode(told[0]))["status"] == "ok"


# -- defects that applications met ----------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_a_call_waits_for_its_throttle_no_longer_than_its_timeout(way: str) -> None:
    told: Told = []
    throttle = Throttle(concurrency=1)
    throttle.acquire_blocking(key="sk-the-key-1234", model="m")
    with serving(SAID["chat", False]) as server:
        with pytest.raises(openai.APITimeoutError) as found:
            run(way, server, ask(way, "chat", False, timeout=0.02), told=told, throttle=throttle)
        assert not server.heard
    assert isinstance(found.value, ThrottleTimeout) and "within 0.02 s" in str(found.value)
    measured = told[0]
    assert (
        measured.status == "failed"
        and measured.failure is not None
        and measured.failure.kind == "timeout_total"
    )
    assert (
        (measured.sent, measured.attempts) == (-1, ())
        and measured.wait_ms is not None
        and measured.wait_ms >= 20
    )


def test_the_collector_may_end_a_stream_while_the_throttles_lock_is_held() -> None:
    told: Told = []
    throttle = Throttle(concurrency=2)
    done = threading.Event()

    def collect_under_the_lock(own: Any) -> None:
        for read in (0, 1):
            cycle: list[Any] = [own.chat.completions.create(model="m", messages=[], stream=True)]
            cycle.append(cycle)
            if read:
                cycle.append(iter(cycle[0]))
                next(cycle[2])
            queue = throttle._get_call_queue("sk-the-key-1234", "m")
            del cycle
            with queue._limiter_lock, queue._waiters_lock:
                gc.collect()  # hung here: the stream's end took the same lock in the same thread
        done.set()

    gc.disable()
    gc.freeze()  # what was there before is not looked through again
    try:
        with serving(SAID["chat", True]) as server:
            thread = threading.Thread(
                target=run,
                args=("blocking", server, collect_under_the_lock),
                kwargs={"told": told, "throttle": throttle},
                daemon=True,
            )
            thread.start()
            assert done.wait(60)
            thread.join(60)
    finally:
        gc.unfreeze()
        gc.enable()
    assert flush()
    assert [one.status for one in told] == ["abandoned", "abandoned"]
    assert throttle.in_flight(key="sk-the-key-1234", model="m") == 0


def test_a_second_instrument_comes_on_top_of_the_first() -> None:
    first: Told = []
    second: Told = []
    with serving(SAID["chat", False]) as server, client("blocking", server) as own:
        inner = instrument(
            own, first.append, prices=TokenPrice(1, 1), labels={"team": "a", "app": "x"}
        )
        both = instrument(inner, second.append, labels={"team": "b"})
        for measured_client in (both, both.with_options(timeout=9)):
            measured_client.chat.completions.create(model="m", messages=[])
        assert len(first) == len(second) == 2 and first == second
        assert second[0].cost and second[0].labels == {"team": "b", "app": "x"}
        inner.chat.completions.create(model="m", messages=[])
        assert (len(first), len(second)) == (3, 2)
        throttled = instrument(own, throttle=Throttle(concurrency=1))
        with refused(WrongUse, "conflict"):
            instrument(throttled, throttle=Throttle(concurrency=2))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("how", ["parse", "read", "leave"])
def test_streaming_responses_are_throttled_and_measured(way: str, stream: bool, how: str) -> None:
    told: Told = []
    throttle = Throttle(concurrency=1)

    def use(own: Any) -> Any:
        create = own.chat.completions.with_streaming_response.create
        with create(model="m", messages=[], **({"stream": True} if stream else {})) as response:
            assert throttle.in_flight(key="sk-the-key-1234", model="m") == 1
            if how == "parse":
                parsed = response.parse()
                list(parsed) if stream else None
            elif how == "read":
                response.read()

    async def use_async(own: Any) -> Any:
        create = own.chat.completions.with_streaming_response.create
        async with create(
            model="m", messages=[], **({"stream": True} if stream else {})
        ) as response:
            assert throttle.in_flight(key="sk-the-key-1234", model="m") == 1
            if how == "parse":
                parsed = await response.parse()
                if stream:
                    [event async for event in parsed]
            elif how == "read":
                await response.read()

    with serving(SAID["chat", stream]) as server:
        run(way, server, use if way == "blocking" else use_async, told=told, throttle=throttle)
    assert [one.status for one in told] == ["abandoned" if how == "leave" else "ok"]
    assert throttle.in_flight(key="sk-the-key-1234", model="m") == 0
    if how == "parse" or (how == "read" and not stream):
        assert told[0].output_tokens == 3 and told[0].ttft_ms is not None
    assert told[0].request_id == "r-7"


@pytest.mark.parametrize("way", WAYS)
def test_embeddings_are_measured_and_cost_their_input(way: str) -> None:
    told: Told = []
    said = answer(
        {
            "object": "list",
            "model": "e-1",
            "data": [{"object": "embedding", "index": 0, "embedding": [0.5]}],
            "usage": {"prompt_tokens": 9, "total_tokens": 9},
        }
    )

    def use(own: Any) -> Any:
        return own.embeddings.create(model="e", input=PROMPT, encoding_format="float")

    async def use_async(own: Any) -> Any:
        return await own.embeddings.create(model="e", input=PROMPT, encoding_format="float")

    with serving(said) as server:
        made = run(
            way,
            server,
            use if way == "blocking" else use_async,
            told=told,
            prices=TokenPrice(2, 10),
            throttle=Throttle(tokens="1000/min"),
        )
    assert made.data[0].embedding == [0.5] and measurement_of(made) is told[0]
    measured = told[0]
    assert (measured.api, measured.status, measured.input_tokens, measured.output_tokens) == (
        "embeddings",
        "ok",
        9,
        0,
    )
    assert (
        measured.cost == pytest.approx(18e-6)
        and measured.ttft_ms is None
        and measured.e2e_ms is not None
    )


@pytest.mark.parametrize("way", WAYS)
def test_prices_ask_for_the_counts_they_need(way: str) -> None:
    told: Told = []
    with serving(SAID["chat", True]) as server:
        run(way, server, ask(way, "chat", True), told=told, prices=TokenPrice(1, 1))
        assert server.heard[0].body["stream_options"] == {"include_usage": True}
    assert told[0].cost == pytest.approx(12e-6)


def test_prices_without_counts_are_warned_of() -> None:
    told: Told = []
    said = events(*CHAT_EVENTS[:-1])
    with (
        serving(said) as server,
        pytest.warns(
            UserWarning, match="no token counts for the model 'uncounted'.*ask_usage=True"
        ),
    ):
        run(
            "blocking",
            server,
            ask("blocking", "chat", True, model="uncounted"),
            told=told,
            prices=TokenPrice(1, 1),
            ask_usage=False,
        )
    assert told[0].cost is None


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("keep", [False, True])
def test_what_the_server_wrote_of_a_prompt_stays_out_of_measurements(way: str, keep: bool) -> None:
    told: Told = []
    body = {"error": {"message": f"too many: {PROMPT}", "code": "rate_limit_exceeded"}}
    quota = {"error": {"message": f"insufficient_quota {PROMPT}"}}
    with serving(
        answer(body, "429 Too Many Requests", retry_after_ms="1"),
        answer(quota, "429 Too Many Requests"),
    ) as server:
        with pytest.raises(openai.RateLimitError, match=PROMPT):
            run(
                way,
                server,
                ask(way, "chat", False),
                told=told,
                keep_content=keep,
                retry=Retry(5, first_wait_s=0.001, seed=1),
            )
        assert len(server.heard) == 2  # that the quota is used up was still seen
    texts = [attempt.failure.text for attempt in told[0].attempts if attempt.failure is not None]
    if keep:
        assert all(PROMPT in text for text in texts) and len(texts) == 2
    else:
        assert texts == ["rate_limit_exceeded", "HTTP 429"] and PROMPT not in told[0].to_json()


def test_the_error_event_of_a_stream_is_not_quoted_either() -> None:
    told: Told = []
    said = events(chunk("Hel"), {"error": {"message": f"cannot say {PROMPT}"}}, done=False)
    with serving(said) as server, pytest.raises(openai.APIError):
        run("blocking", server, ask("blocking", "chat", True), told=told)
    assert told[0].failure is not None and told[0].failure.kind == "error_event"
    assert PROMPT not in repr(told[0])


@pytest.mark.parametrize("way", WAYS)
def test_observers_that_are_coroutines_are_awaited(way: str) -> None:
    told: Told = []
    noted = threading.Event()

    async def observer(measured: Measurement) -> None:
        await asyncio.sleep(0)
        told.append(measured)
        noted.set()

    with serving(SAID["chat", False]) as server:
        if way == "blocking":
            with client(way, server) as own:
                instrument(own, observer).chat.completions.create(model="m", messages=[])
        else:

            async def go() -> None:
                async with client(way, server) as own:
                    await instrument(own, observer).chat.completions.create(model="m", messages=[])
                    while not told:
                        await asyncio.sleep(0)

            asyncio.run(go())
    assert noted.wait(60) and told[0].status == "ok"


class KeepsEventsElsewhere(openai.Stream[Event]):
    """A stream as a later version of the package may have it."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._events = self.__dict__.pop("_iterator")

    def __iter__(self) -> Iterator[Event]:
        return self._events


class OtherStreams(openai.OpenAI):
    def request(self, *args: Any, stream_cls: Any = None, **kwargs: Any) -> Any:
        (kind,) = stream_cls.__args__
        return super().request(*args, stream_cls=KeepsEventsElsewhere[kind], **kwargs)


def test_streams_of_another_make_are_measured_too() -> None:
    """The application's stream is observed from outside."""
    told: Told = []
    with (
        serving(SAID["chat", True]) as server,
        OtherStreams(base_url=server.url, api_key="k") as own,
    ):
        create = instrument(own, told.append).chat.completions.create
        with create(model="m", messages=[], stream=True) as stream:
            assert isinstance(stream, openai.Stream) and stream.response.status_code == 200
            assert len([*stream]) == len(CHAT_EVENTS)
        assert stream.measurement is told[0]
        create(model="m", messages=[], stream=True).close()
    assert [(one.status, one.output_tokens) for one in told] == [("ok", 3), ("abandoned", 0)]
    assert told[0].ttft_ms is not None


def test_labels_by_block_and_by_argument() -> None:
    told: Told = []

    def use(own: Any) -> None:
        with labelled(feature="search", version=3), labelled(version=4):
            own.chat.completions.create(model="m", messages=[], loadgen_labels={"user": "u"})
        own.chat.completions.create(model="m", messages=[])

    with serving(SAID["chat", False]) as server:
        run("blocking", server, use, told=told)
        assert all("labels" not in heard.body for heard in server.heard)
    assert [one.labels for one in told] == [{"feature": "search", "version": "4", "user": "u"}, {}]
    for wrong in ({"a b": "c"}, {"a": 1.5}):
        with pytest.raises(WrongUse), labelled(**wrong):  # type: ignore[arg-type]
            pass


@pytest.mark.parametrize("way", WAYS)
def test_a_timeout_is_tried_again_and_what_the_server_forbids_is_not(way: str) -> None:
    told: Told = []
    no = answer({"error": {"message": "no"}}, "500 Internal Server Error", x_should_retry="false")
    retry = Retry(3, first_wait_s=0.001)
    with serving(HANG, SAID["chat", False]) as server:
        run(
            way,
            server,
            ask(way, "chat", False),
            told=told,
            retry=retry,
            client_options={"timeout": 0.2},
        )
    with serving(no) as server, pytest.raises(openai.InternalServerError):
        run(way, server, ask(way, "chat", False), told=told, retry=retry)
    assert [(one.status, len(one.attempts)) for one in told] == [("ok", 2), ("failed", 1)]


def test_a_call_that_got_no_permit_is_not_tried_again() -> None:
    told: Told = []
    throttle = Throttle(concurrency=1, max_wait_s=0.01)
    with serving(SAID["chat", False]) as server:
        held = throttle.acquire_blocking(key="sk-the-key-1234", model="m")
        with pytest.raises(ThrottleTimeout):
            run(
                "blocking",
                server,
                ask("blocking", "chat", False),
                told=told,
                retry=Retry(3),
                throttle=throttle,
            )
        held.done()
    assert [(one.status, len(one.attempts)) for one in told] == [("failed", 0)] and not server.heard


def test_labels_that_are_none_do_not_fail_the_call(caplog: pytest.LogCaptureFixture) -> None:
    told: Told = []
    use = ask(
        "blocking", "chat", False, loadgen_labels={"cost-center": "a", "user": "u", "at": 1.5}
    )
    with serving(SAID["chat", False]) as server:
        run("blocking", server, use, told=told)
        run("blocking", server, ask("blocking", "chat", False, loadgen_labels=3), told=told)
    assert [one.labels for one in told] == [
        {"user": "u"},
        {},
    ] and "'cost-center' is not" in caplog.text


def test_a_fault_in_here_does_not_fail_the_call(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def begin(self, *_: Any) -> None:
            raise RuntimeError("broken")

    with serving(SAID["chat", False]) as server:
        made, _ = run("blocking", server, ask("blocking", "chat", False), record=Broken())
    assert (
        made.choices[0].message.content == "Hello there." and "could not be measured" in caplog.text
    )


@pytest.mark.parametrize("way", WAYS)
def test_the_measurement_of_managers_and_raw_responses(way: str) -> None:
    def use(own: Any) -> None:
        raw = own.chat.completions.with_raw_response.create(model="m", messages=[])
        assert measurement_of(raw) is raw.measurement is raw.parse().measurement
        manager = own.chat.completions.stream(model="m", messages=[])
        with manager as stream:
            assert measurement_of(stream) is None
            list(stream)
        assert measurement_of(stream).output_tokens == measurement_of(manager).output_tokens == 3

    async def use_async(own: Any) -> None:
        raw = await own.chat.completions.with_raw_response.create(model="m", messages=[])
        assert measurement_of(raw) is raw.measurement
        manager = own.chat.completions.stream(model="m", messages=[])
        async with manager as stream:
            [event async for event in stream]
        assert measurement_of(stream).output_tokens == measurement_of(manager).output_tokens == 3

    if not hasattr(openai.resources.chat.completions.Completions, "stream"):
        pytest.skip(f"openai {openai.__version__} has no chat.completions.stream")
    with serving(SAID["chat", False], SAID["chat", True]) as server:
        run(way, server, use if way == "blocking" else use_async)
    assert measurement_of(3) is None


def test_a_measurement_as_a_dict_has_its_figures_failed_or_not() -> None:
    told: Told = []
    with serving(SAID["chat", True], answer({}, "500 No")) as server:
        run("blocking", server, ask("blocking", "chat", True), told=told)
        with pytest.raises(openai.InternalServerError):
            run("blocking", server, ask("blocking", "chat", True), told=told)
    ok, failed = (json.loads(one.to_json()) for one in told)
    assert (
        ok["ttft_ms"] == told[0].ttft_ms
        and ok["tpot_ms"] == told[0].tpot_ms
        and len(ok["inter_chunk_ms"]) == 2
    )
    assert (
        failed["status"] == "failed" and failed["ttft_ms"] is None and failed["wait_ms"] is not None
    )
    assert {*ok} == {*failed} == {*told[0].to_dict()}


class Fits(pydantic.BaseModel):
    """What an application asks for."""

    number: int


@pytest.mark.parametrize("reason", ["stop", "length", "content_filter"])
def test_the_tokens_of_an_answer_that_does_not_fit_are_counted(reason: str) -> None:
    """`parse` raises if the response does not fit its class. The server bills it all the same."""
    choice = {**CHAT["choices"][0], "finish_reason": reason}
    told: list[Measurement] = []
    asked: dict[str, Any] = {
        "model": "m",
        "messages": [{"role": "user", "content": "Hi"}],
        "response_format": Fits,
    }
    budget = Budget("10 USD")
    options: dict[str, Any] = {"prices": TokenPrice(1e4, 1e4), "budget": budget}
    with serving(answer({**CHAT, "choices": [choice]})) as server:
        client = instrument(openai.OpenAI(base_url=server.url, api_key="k"), told.append, **options)
        with pytest.raises(Exception, match=r"Fits|length|content") as raised:
            client.beta.chat.completions.parse(**asked)
        with client, client.beta.chat.completions.with_streaming_response.parse(**asked) as unread:
            unread.read()

        async def waiting() -> None:
            async with openai.AsyncOpenAI(base_url=server.url, api_key="k") as own:
                with pytest.raises(raised.type):
                    await instrument(own, told.append, **options).beta.chat.completions.parse(
                        **asked
                    )

        asyncio.run(waiting())
    assert [one.status for one in told] == [
        "failed",
        "ok",
        "failed",
    ]  # the second was read as bytes
    for one in told:
        assert (one.input_tokens, one.output_tokens, one.token_source) == (9, 3, "server")
        assert (one.finish_reason, one.response_id, one.response_model) == (reason, "c1", "m-1")
        assert one.cost == pytest.approx(0.12) and "there" not in one.to_json()
    assert budget.spent == pytest.approx(0.36)


def test_arguments_that_were_left_out_are_no_part_of_a_prompt(tmp_path: Path) -> None:
    """`stream` of the Responses API passes a mark for each argument that was not given."""
    created = {
        "type": "response.created",
        "sequence_number": 0,
        "response": {**RESPONSE, "status": "in_progress"},
    }
    completed = {"type": "response.completed", "sequence_number": 1, "response": RESPONSE}
    told: list[Measurement] = []
    with (
        serving(events(created, completed, done=False)) as server,
        record_shape(tmp_path / "t.jsonl") as shape,
    ):
        own = openai.OpenAI(base_url=server.url, api_key="k")
        client = instrument(own, told.append, keep_content=True, record=shape)
        if not hasattr(getattr(own, "responses", None), "stream"):
            pytest.skip("this openai has no streams of the responses API")
        with client, client.responses.stream(model="m", input="Hello") as stream:
            stream.until_done()
    assert told[0].content is not None and told[0].content.input == "Hello"
    omitted = type("Omit", (), {})()
    assert read_prompt(
        {"instructions": omitted, "prompt": omitted, "input": "Hello"}
    ).joined_texts == {"input": ["Hello"]}
