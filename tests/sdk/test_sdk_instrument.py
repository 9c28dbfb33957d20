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
RESPONSES = {
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
Measurements = list[Measurement]
Event = TypeVar("Event")


def client(mode: str, server: Canned, **options: Any) -> Any:
    make: Any = openai.OpenAI if mode == "blocking" else openai.AsyncOpenAI
    return make(base_url=server.url, api_key="sk-the-key-1234", **{"max_retries": 0, **options})


def method(of: Any, api: str, name: str = "create") -> Callable[..., Any]:
    path, _ = CALLS[api]
    for step in path.split("."):
        if not hasattr(of, step):
            pytest.skip(f"openai {openai.__version__} has no {path}")
        of = getattr(of, step)
    return getattr(of, name)


def run(
    mode: str,
    server: Canned,
    use: Callable[[Any], Any],
    *,
    plain: bool = False,
    measurements: Measurements | None = None,
    client_options: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """`use(client)` in its way: a coroutine of it is awaited. The client is closed."""
    if mode == "blocking":
        with client(mode, server, **(client_options or {})) as measured_client:
            return use(
                measured_client
                if plain
                else instrument(
                    measured_client,
                    (measurements if measurements is not None else []).append,
                    **options,
                )
            )

    async def go() -> Any:
        async with client(mode, server, **(client_options or {})) as measured_client:
            result = use(
                measured_client
                if plain
                else instrument(
                    measured_client,
                    (measurements if measurements is not None else []).append,
                    **options,
                )
            )
            return await result if asyncio.iscoroutine(result) else result

    return asyncio.run(go())


def ask(mode: str, api: str, stream: bool, **more: Any) -> Callable[[Any], Any]:
    """Return a function that makes one call and returns the response, or stream and events."""
    arguments = {"model": "m", **CALLS[api][1], **({"stream": True} if stream else {}), **more}

    def use(measured_client: Any) -> Any:
        response = method(measured_client, api)(**arguments)
        return (response, list(response)) if stream else (response, [])

    async def use_async(measured_client: Any) -> Any:
        response = await method(measured_client, api)(**arguments)
        return (response, [event async for event in response]) if stream else (response, [])

    return use if mode == "blocking" else use_async


@pytest.mark.parametrize(("api", "stream"), RESPONSES)
@pytest.mark.parametrize("mode", WAYS)
def test_instrument_measures_a_response_without_changing_it(
    mode: str, api: str, stream: bool
) -> None:
    measurements: Measurements = []
    with serving(RESPONSES[api, stream]) as server:
        plain, plain_events = run(mode, server, ask(mode, api, stream), plain=True)
        price = {"m-1": TokenPrice(input=2.0, output=10.0, cached=1.0)}
        ours, our_events = run(
            mode,
            server,
            ask(mode, api, stream),
            measurements=measurements,
            prices=price,
            ask_usage=False,
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
    measured = measurements[0]
    assert measurements == [ours.measurement] and ours.measurement is measured
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


@pytest.mark.parametrize("mode", WAYS)
def test_latest_measurement_belongs_to_its_context(mode: str) -> None:
    with serving(RESPONSES["chat", False]) as server:
        if mode == "blocking":
            response, _ = run(mode, server, ask(mode, "chat", False))
            assert latest_measurement() is response.measurement
        else:

            async def use(measured_client: Any) -> None:
                ones = await asyncio.gather(*(call_once(measured_client) for _ in range(3)))
                assert len({measured.started for measured in ones}) == 3

            async def call_once(measured_client: Any) -> Measurement:
                response, _ = await ask(mode, "chat", False)(measured_client)
                measured = latest_measurement()
                assert measured is response.measurement
                return measured

            run(mode, server, use)


def test_latest_measurement_is_set_after_a_wait_with_a_timeout() -> None:
    """`asyncio.wait_for` creates a task until Python 3.11, and the measurement is still found."""
    measurements: Measurements = []

    async def use(measured_client: Any) -> None:
        for _ in range(2):
            response, _ = await asyncio.wait_for(ask("async", "chat", False)(measured_client), 5)
            assert latest_measurement() is response.measurement
        inner = asyncio.wait_for(ask("async", "chat", False)(measured_client), 5)
        response, _ = await asyncio.wait_for(inner, 5)
        assert latest_measurement() is response.measurement

        async def other() -> None:
            assert latest_measurement() is response.measurement
            await ask("async", "chat", False)(measured_client)

        await asyncio.create_task(other())  # not of this task: nothing of it is told here
        assert latest_measurement() is response.measurement

    with serving(RESPONSES["chat", False]) as server:
        run("async", server, use, measurements=measurements)
    assert len(measurements) == 4


@pytest.mark.parametrize("mode", WAYS)
def test_a_call_with_wrong_arguments_raises_and_is_not_measured(mode: str) -> None:
    measurements: Measurements = []
    throttle = Throttle(concurrency=1)
    with serving(RESPONSES["chat", False]) as server:
        with pytest.raises(TypeError):
            run(
                mode,
                server,
                ask(mode, "chat", False, no_such=1),
                measurements=measurements,
                throttle=throttle,
                retry=Retry(3),
            )
        assert not measurements and not server.heard
        assert throttle.in_flight(key="sk-the-key-1234", model="m") == 0


def test_a_pydantic_1_response_dumps_the_fields_that_the_server_sent() -> None:
    """Openai 1.60 with pydantic 1: `.dict()` had the measurement, and `.json()` raised."""
    v1 = pytest.importorskip("pydantic.v1", reason="pydantic 1, or the one inside 2")

    class Answer(v1.BaseModel):  # type: ignore[name-defined,misc]
        id: str

    response, other = Answer(id="a"), Answer(id="b")
    measured = Measurement(api="chat", streamed=False, status="ok", started=0, started_unix_ns=0)
    attach_measurement(response, measured)
    assert response.measurement is measured and measurement_of(response) is measured
    assert (
        response.dict() == {"id": "a"}
        and json.loads(response.json()) == {"id": "a"}
        and response != other
    )
    assert not hasattr(other, "measurement") and measurement_of(other) is None
    assert response.__fields_set__ == {"id"} and response.dict(exclude_unset=True) == {"id": "a"}


@pytest.mark.parametrize("mode", WAYS)
@pytest.mark.parametrize("stream", [False, True])
def test_a_refused_call_raises_the_exception_of_the_package(mode: str, stream: bool) -> None:
    measurements: Measurements = []
    response = answer(
        {"error": {"message": "no key sk-the-key-1234 here"}},
        "503 Service Unavailable",
        retry_after_ms="1",
    )
    with serving(response) as server:
        with pytest.raises(openai.InternalServerError) as plain:
            run(mode, server, ask(mode, "chat", stream), plain=True)
        with pytest.raises(openai.InternalServerError) as exc_info:
            run(
                mode,
                server,
                ask(mode, "chat", stream),
                measurements=measurements,
                client_options={"max_retries": 2},
            )

    assert str(exc_info.value) == str(plain.value)
    measured = measurements[0]
    assert measured.status == "failed" and measured.failure is not None
    assert (measured.failure.kind, measured.failure.http_status) == ("http_5xx", 503)
    assert "sk-the-key" not in repr(measured)
    assert (measured.retries, measured.hidden_retries, len(measured.attempts)) == (2, 2, 1)
    assert (measured.ttft_ms, measured.e2e_ms, measured.output_tokens) == (
        None,
        None,
        None if not stream else 0,
    )


@pytest.mark.parametrize("mode", WAYS)
def test_a_stream_that_breaks_raises_and_measures_the_received_output(mode: str) -> None:
    measurements: Measurements = []
    output: list[Any] = []

    def use(measured_client: Any) -> None:
        output.extend(measured_client.chat.completions.create(model="m", messages=[], stream=True))

    async def use_async(measured_client: Any) -> None:
        async for event in await measured_client.chat.completions.create(
            model="m", messages=[], stream=True
        ):
            output.append(event)  # noqa: PERF401 - what came before the break counts

    with (
        serving(cut(events(chunk("Hel"), chunk("lo"), done=False))) as server,
        pytest.raises(Exception, match=r"(?i)peer closed|incomplete|connection"),
    ):
        run(mode, server, use if mode == "blocking" else use_async, measurements=measurements)
    assert len(output) == 2
    assert (
        measurements[0].status,
        measurements[0].token_source,
        measurements[0].output_tokens,
    ) == ("failed", "events", 2)
    assert measurements[0].failure is not None and measurements[0].failure.kind in (
        "truncated",
        "reset",
    )


@pytest.mark.parametrize("mode", WAYS)
@pytest.mark.parametrize(("after", "status"), [(2, "abandoned"), (5, "ok")])
def test_a_stream_whose_loop_ends_early_is_measured_at_once(
    mode: str, after: int, status: str
) -> None:
    measurements: Measurements = []

    def use(measured_client: Any) -> None:
        stream = measured_client.chat.completions.create(model="m", messages=[], stream=True)
        for number, _ in enumerate(stream, 1):
            if number == after:
                break
        assert [measured.status for measured in measurements] == [
            status
        ] and stream.measurement is measurements[0]

    async def use_async(measured_client: Any) -> None:
        stream = await measured_client.chat.completions.create(model="m", messages=[], stream=True)
        number = 0
        async for _ in stream:
            number += 1
            if number == after:
                break
        for _ in range(5):  # the loop ends abandoned generators in its next turns
            await asyncio.sleep(0)
        assert [measured.status for measured in measurements] == [
            status
        ] and stream.measurement is measurements[0]

    gc.disable()  # nothing may depend on the collector
    try:
        with serving(RESPONSES["chat", True]) as server:
            run(mode, server, use if mode == "blocking" else use_async, measurements=measurements)
    finally:
        gc.enable()
    assert len(measurements) == 1


@pytest.mark.parametrize("mode", WAYS)
def test_a_stream_read_by_next_and_close_is_measured(mode: str) -> None:
    measurements: Measurements = []

    def use(measured_client: Any) -> None:
        with measured_client.chat.completions.create(model="m", messages=[], stream=True) as stream:
            next(stream)
            next(stream)
        assert [
            (measurement.status, len(measurement.instants)) for measurement in measurements
        ] == [("abandoned", 1)]

    async def use_async(measured_client: Any) -> None:
        async with await measured_client.chat.completions.create(
            model="m", messages=[], stream=True
        ) as stream:
            await anext(stream)
            await anext(stream)
        assert [
            (measurement.status, len(measurement.instants)) for measurement in measurements
        ] == [("abandoned", 1)]

    with serving(RESPONSES["chat", True]) as server:
        run(mode, server, use if mode == "blocking" else use_async, measurements=measurements)


@pytest.mark.parametrize("mode", WAYS)
def test_an_unread_stream_is_measured_when_it_is_collected(mode: str) -> None:
    measurements: Measurements = []

    def use(measured_client: Any) -> None:
        measured_client.chat.completions.create(model="m", messages=[], stream=True)
        assert flush()

    async def use_async(measured_client: Any) -> None:
        await measured_client.chat.completions.create(model="m", messages=[], stream=True)
        assert flush()

    gc.disable()  # at once, not at the next run of the collector
    try:
        with serving(RESPONSES["chat", True]) as server:
            run(mode, server, use if mode == "blocking" else use_async, measurements=measurements)
    finally:
        gc.enable()
    assert [(measurement.status, measurement.instants) for measurement in measurements] == [
        ("abandoned", ())
    ]


def test_a_cancelled_call_is_measured_and_raises_its_cancellation() -> None:
    measurements: Measurements = []

    async def use(measured_client: Any) -> None:
        task = asyncio.ensure_future(
            measured_client.chat.completions.create(model="m", messages=[])
        )
        while not server.heard:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with serving(HANG) as server:
        run("async", server, use, measurements=measurements)
    assert [
        (measurement.status, measurement.failure and measurement.failure.kind)
        for measurement in measurements
    ] == [("cancelled", "interrupted")]


def test_a_call_cancelled_between_its_attempts_is_measured() -> None:
    measurements: Measurements = []

    async def use(measured_client: Any) -> None:
        task = asyncio.ensure_future(
            measured_client.chat.completions.create(model="m", messages=[])
        )
        while not server.heard and not task.done():
            await asyncio.sleep(0.001)
        done, _ = await asyncio.wait([task], timeout=0.2)
        assert not done, "it waits for its second attempt"
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    busy = answer({"error": {"message": "slow down"}}, "429 Too Many Requests", retry_after="30")
    with serving(busy) as server:
        run("async", server, use, measurements=measurements, retry=Retry(3, max_wait_s=60))
    assert [(measurement.status, len(measurement.attempts)) for measurement in measurements] == [
        ("cancelled", 1)
    ]


@pytest.mark.parametrize("mode", WAYS)
def test_instrument_does_not_change_the_request(mode: str) -> None:
    with serving(RESPONSES["chat", False]) as server:
        run(mode, server, ask(mode, "chat", False), plain=True)
        run(mode, server, ask(mode, "chat", False), prices=TokenPrice(1, 2))
    plain, ours = (
        {name.lower() for name in received_request.headers} for received_request in server.heard
    )
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


def test_a_package_without_response_headers_is_measured_and_logged_once() -> None:
    """Calls are measured as before, without the headers."""
    measurements: Measurements = []
    with (
        serving(RESPONSES["chat", False]) as server,
        TakesResponsesElsewhere(base_url=server.url, api_key="k") as measured_client,
    ):
        create = instrument(measured_client, measurements.append).chat.completions.create
        with pytest.warns(RuntimeWarning, match="cannot read the response headers"):
            create(model="m", messages=[])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            create(model="m", messages=[])

    assert [
        (measurement.status, measurement.request_id, measurement.output_tokens)
        for measurement in measurements
    ] == [("ok", "", 3)] * 2


@pytest.mark.parametrize("mode", WAYS)
def test_a_timeout_is_measured(mode: str) -> None:
    measurements: Measurements = []
    with serving(HANG) as server, pytest.raises(openai.APITimeoutError):
        run(
            mode,
            server,
            ask(mode, "chat", False),
            measurements=measurements,
            client_options={"timeout": openai.Timeout(60, read=0.05)},
        )

    assert measurements[0].failure is not None and measurements[0].failure.kind == "timeout_total"


@pytest.mark.parametrize("mode", WAYS)
def test_requested_usage_events_are_hidden_from_the_application(mode: str) -> None:
    measurements: Measurements = []
    with serving(RESPONSES["chat", True]) as server:
        _, plain = run(mode, server, ask(mode, "chat", True), plain=True)
        _, ours = run(
            mode, server, ask(mode, "chat", True), measurements=measurements, ask_usage=True
        )
        assert server.heard[1].body["stream_options"] == {"include_usage": True}
        assert "stream_options" not in server.heard[0].body

    assert len(ours) == len(plain) - 1 and all(event.choices for event in ours)
    assert (measurements[0].token_source, measurements[0].output_tokens) == ("server", 3)


@pytest.mark.parametrize("mode", WAYS)
def test_the_original_client_is_unchanged_and_its_variants_are_measured(mode: str) -> None:
    measurements: Measurements = []
    variants: list[Callable[[Any], Any]] = [
        lambda measured_client: measured_client.chat.completions,
        lambda measured_client: measured_client.chat.completions.with_raw_response,
        lambda measured_client: measured_client.with_options(timeout=9).chat.completions,
        lambda measured_client: measured_client.with_raw_response.chat.completions,
    ]

    async def go() -> None:
        measured_client = client(mode, server)
        measured = instrument(measured_client, measurements.append)
        assert type(measured) is type(measured_client) and type(
            measured.with_options(timeout=9)
        ) is type(measured_client)
        for number, variant in enumerate(variants, 1):
            for of in (measured_client, measured):
                response = variant(of).create(model="m", messages=[])
                response = await response if mode == "async" else response
                body = response.parse() if hasattr(response, "http_response") else response
                assert body.choices[0].message.content == "Hello there."
                assert hasattr(body, "measurement") == (of is measured)
            assert len(measurements) == number
        closed = measured_client.close()
        if mode == "async":
            await closed

    with serving(RESPONSES["chat", False]) as server, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a blocking client inside a loop
        asyncio.run(go())


@pytest.mark.parametrize("mode", WAYS)
def test_retries_are_attempts_of_one_measurement(mode: str) -> None:
    measurements: Measurements = []
    busy = answer({"error": {"message": "slow down"}}, "429 Too Many Requests", retry_after_ms="2")
    with serving(busy, busy, RESPONSES["chat", False]) as server:
        run(
            mode,
            server,
            ask(mode, "chat", False),
            measurements=measurements,
            retry=Retry(3, first_wait_s=0.001, seed=1),
            client_options={"max_retries": 5},
        )
        assert len(server.heard) == 3
    measured = measurements[0]

    assert [attempt.failure.kind if attempt.failure else "" for attempt in measured.attempts] == [
        "http_429",
        "http_429",
        "",
    ]
    assert [attempt.waited_ms for attempt in measured.attempts] == [2, 2, 0]
    assert (measured.status, measured.retries, len(measurements)) == ("ok", 2, 1)
    assert measured.wait_ms is not None and measured.wait_ms >= 4
    assert measured.ttft_ms is not None and measured.ttft_from_sent_ms is not None
    assert measured.ttft_ms - measured.ttft_from_sent_ms == pytest.approx(measured.wait_ms)


@pytest.mark.parametrize("mode", WAYS)
def test_content_is_recorded_only_on_request(mode: str) -> None:
    measurements: Measurements = []
    with serving(RESPONSES["chat", True]) as server:
        run(mode, server, ask(mode, "chat", True), measurements=measurements, keep_content=True)
    assert measurements[0].content is not None
    assert (measurements[0].content.input, measurements[0].content.output) == (
        CALLS["chat"][1]["messages"],
        "Hello there.",
    )


def test_a_failing_observer_is_logged_and_the_others_are_called(
    caplog: pytest.LogCaptureFixture,
) -> None:
    measurements: Measurements = []

    def broken(_: Measurement) -> None:
        raise ZeroDivisionError

    with serving(RESPONSES["chat", False]) as server, client("blocking", server) as measured_client:
        response = instrument(
            measured_client, (broken, measurements.append)
        ).chat.completions.create(model="m", messages=[])
    assert measurements == [response.measurement] and "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize("kind", ["AzureOpenAI", "AsyncAzureOpenAI"])
def test_azure_clients_are_measured(kind: str) -> None:
    measurements: Measurements = []
    with serving(RESPONSES["chat", False]) as server:
        make = getattr(openai, kind)
        azure_client = make(
            azure_endpoint=server.url.removesuffix("/v1"),
            api_key="k-1234567",
            api_version="2024-10-21",
        )
        measured = instrument(azure_client, measurements.append)
        response = measured.chat.completions.create(model="deployed", messages=[])
        if kind.startswith("Async"):

            async def go() -> None:
                await response
                await azure_client.close()

            asyncio.run(go())
        else:
            azure_client.close()
        assert server.heard[0].path.startswith(
            "/openai/deployments/deployed/chat/completions?api-version="
        )
    assert type(measured) is make and measurements[0].model == "deployed"


def test_a_blocking_client_in_an_event_loop_has_one_warning() -> None:
    async def go(measured: Any) -> None:
        with pytest.warns(
            RuntimeWarning, match="blocking OpenAI client was called inside a running event loop"
        ):
            measured.chat.completions.create(model="m", messages=[])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            measured.chat.completions.create(model="m", messages=[])
            await asyncio.to_thread(measured.chat.completions.create, model="m", messages=[])

    with serving(RESPONSES["chat", False]) as server, client("blocking", server) as measured_client:
        asyncio.run(go(instrument(measured_client)))


def test_a_model_without_a_price_has_no_cost() -> None:
    measurements: Measurements = []
    with (
        serving(RESPONSES["chat", False]) as server,
        pytest.warns(
            UserWarning,
            match="no price for the model 'm', so its cost is None \\(prices are known for other",
        ),
    ):
        run(
            "blocking",
            server,
            ask("blocking", "chat", False),
            measurements=measurements,
            prices={"other": TokenPrice(1, 1)},
        )

    assert measurements[0].cost is None and measurements[0].output_tokens == 3


def bad_uses() -> Iterator[tuple[str, Callable[[Any], Any]]]:
    yield "wrong_type", lambda _client: instrument("gpt-4o")
    yield "wrong_type", lambda _client: instrument(openai.OpenAI)
    yield "wrong_type", lambda measured_client: instrument(measured_client.completions)
    yield "wrong_type", lambda measured_client: instrument(measured_client, prices=2.5)
    yield "wrong_type", lambda measured_client: instrument(measured_client, prices={"m": 2.5})
    yield "out_of_range", lambda _client: TokenPrice(1, -1)
    yield "out_of_range", lambda _client: TokenPrice(float("nan"), 1)
    yield "wrong_type", lambda measured_client: instrument(measured_client, (3,))
    yield "wrong_type", lambda measured_client: instrument(measured_client, throttle=5)
    yield "wrong_type", lambda measured_client: instrument(measured_client, retry=3)
    yield "wrong_type", lambda measured_client: instrument(measured_client, record="traffic.jsonl")


@pytest.mark.parametrize(("code", "use"), [*bad_uses()])
def test_instrument_refuses_invalid_options(code: str, use: Callable[[Any], Any]) -> None:
    with openai.OpenAI(api_key="k") as plain_client, refused(WrongUse, code) as exc_info:
        use(plain_client)
    assert isinstance(exc_info.value, ClientError) and exc_info.value.hint


def test_measurements_are_converted_to_dicts_and_back() -> None:
    import msgspec

    measurements: Measurements = []
    with serving(RESPONSES["chat", True]) as server:
        run("blocking", server, ask("blocking", "chat", True), measurements=measurements)
    assert (
        msgspec.json.decode(msgspec.json.encode(measurements[0]), type=Measurement)
        == measurements[0]
    )
    assert json.loads(msgspec.json.encode(measurements[0]))["status"] == "ok"


# -- defects that applications met ----------------------------------------------------------


@pytest.mark.parametrize("mode", WAYS)
def test_a_call_waits_for_its_throttle_no_longer_than_its_timeout(mode: str) -> None:
    measurements: Measurements = []
    throttle = Throttle(concurrency=1)
    throttle.acquire_blocking(key="sk-the-key-1234", model="m")
    with serving(RESPONSES["chat", False]) as server:
        with pytest.raises(openai.APITimeoutError) as exc_info:
            run(
                mode,
                server,
                ask(mode, "chat", False, timeout=0.02),
                measurements=measurements,
                throttle=throttle,
            )
        assert not server.heard

    assert isinstance(exc_info.value, ThrottleTimeout) and "within 0.02 s" in str(exc_info.value)
    measured = measurements[0]
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


def test_garbage_collection_of_a_stream_under_the_throttle_lock_does_not_block() -> None:
    measurements: Measurements = []
    throttle = Throttle(concurrency=2)
    done = threading.Event()

    def collect_under_the_lock(measured_client: Any) -> None:
        for read in (0, 1):
            cycle: list[Any] = [
                measured_client.chat.completions.create(model="m", messages=[], stream=True)
            ]
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
        with serving(RESPONSES["chat", True]) as server:
            thread = threading.Thread(
                target=run,
                args=("blocking", server, collect_under_the_lock),
                kwargs={"measurements": measurements, "throttle": throttle},
                daemon=True,
            )
            thread.start()
            assert done.wait(60)
            thread.join(60)
    finally:
        gc.unfreeze()
        gc.enable()
    assert flush()
    assert [measurement.status for measurement in measurements] == ["abandoned", "abandoned"]
    assert throttle.in_flight(key="sk-the-key-1234", model="m") == 0


def test_a_second_instrument_adds_an_observer_to_the_first() -> None:
    first_measurements: Measurements = []
    second_measurements: Measurements = []
    with serving(RESPONSES["chat", False]) as server, client("blocking", server) as first_client:
        inner = instrument(
            first_client,
            first_measurements.append,
            prices=TokenPrice(1, 1),
            labels={"team": "a", "app": "x"},
        )
        both = instrument(inner, second_measurements.append, labels={"team": "b"})
        for measured_client in (both, both.with_options(timeout=9)):
            measured_client.chat.completions.create(model="m", messages=[])
        assert (
            len(first_measurements) == len(second_measurements) == 2
            and first_measurements == second_measurements
        )
        assert second_measurements[0].cost and second_measurements[0].labels == {
            "team": "b",
            "app": "x",
        }
        inner.chat.completions.create(model="m", messages=[])
        assert (len(first_measurements), len(second_measurements)) == (3, 2)
        throttled = instrument(first_client, throttle=Throttle(concurrency=1))
        with refused(WrongUse, "conflict"):
            instrument(throttled, throttle=Throttle(concurrency=2))


@pytest.mark.parametrize("mode", WAYS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("how", ["parse", "read", "leave"])
def test_streaming_responses_are_throttled_and_measured(mode: str, stream: bool, how: str) -> None:
    measurements: Measurements = []
    throttle = Throttle(concurrency=1)

    def use(measured_client: Any) -> Any:
        create = measured_client.chat.completions.with_streaming_response.create
        with create(model="m", messages=[], **({"stream": True} if stream else {})) as response:
            assert throttle.in_flight(key="sk-the-key-1234", model="m") == 1
            if how == "parse":
                parsed = response.parse()
                list(parsed) if stream else None
            elif how == "read":
                response.read()

    async def use_async(measured_client: Any) -> Any:
        create = measured_client.chat.completions.with_streaming_response.create
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

    with serving(RESPONSES["chat", stream]) as server:
        run(
            mode,
            server,
            use if mode == "blocking" else use_async,
            measurements=measurements,
            throttle=throttle,
        )
    assert [measurement.status for measurement in measurements] == [
        "abandoned" if how == "leave" else "ok"
    ]
    assert throttle.in_flight(key="sk-the-key-1234", model="m") == 0
    if how == "parse" or (how == "read" and not stream):
        assert measurements[0].output_tokens == 3 and measurements[0].ttft_ms is not None
    assert measurements[0].request_id == "r-7"


@pytest.mark.parametrize("mode", WAYS)
def test_embeddings_are_measured_and_cost_their_input(mode: str) -> None:
    measurements: Measurements = []
    response = answer(
        {
            "object": "list",
            "model": "e-1",
            "data": [{"object": "embedding", "index": 0, "embedding": [0.5]}],
            "usage": {"prompt_tokens": 9, "total_tokens": 9},
        }
    )

    def use(measured_client: Any) -> Any:
        return measured_client.embeddings.create(model="e", input=PROMPT, encoding_format="float")

    async def use_async(measured_client: Any) -> Any:
        return await measured_client.embeddings.create(
            model="e", input=PROMPT, encoding_format="float"
        )

    with serving(response) as server:
        embeddings = run(
            mode,
            server,
            use if mode == "blocking" else use_async,
            measurements=measurements,
            prices=TokenPrice(2, 10),
            throttle=Throttle(tokens="1000/min"),
        )
    assert embeddings.data[0].embedding == [0.5] and measurement_of(embeddings) is measurements[0]
    measured = measurements[0]
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


@pytest.mark.parametrize("mode", WAYS)
def test_prices_make_a_stream_request_its_token_counts(mode: str) -> None:
    measurements: Measurements = []
    with serving(RESPONSES["chat", True]) as server:
        run(
            mode,
            server,
            ask(mode, "chat", True),
            measurements=measurements,
            prices=TokenPrice(1, 1),
        )
        assert server.heard[0].body["stream_options"] == {"include_usage": True}
    assert measurements[0].cost == pytest.approx(12e-6)


def test_prices_without_token_counts_have_a_warning() -> None:
    measurements: Measurements = []
    response = events(*CHAT_EVENTS[:-1])
    with (
        serving(response) as server,
        pytest.warns(
            UserWarning, match="no token counts for the model 'uncounted'.*ask_usage=True"
        ),
    ):
        run(
            "blocking",
            server,
            ask("blocking", "chat", True, model="uncounted"),
            measurements=measurements,
            prices=TokenPrice(1, 1),
            ask_usage=False,
        )

    assert measurements[0].cost is None


@pytest.mark.parametrize("mode", WAYS)
@pytest.mark.parametrize("keep", [False, True])
def test_prompt_text_in_errors_stays_out_of_measurements(mode: str, keep: bool) -> None:
    measurements: Measurements = []
    body = {"error": {"message": f"too many: {PROMPT}", "code": "rate_limit_exceeded"}}
    quota = {"error": {"message": f"insufficient_quota {PROMPT}"}}
    with serving(
        answer(body, "429 Too Many Requests", retry_after_ms="1"),
        answer(quota, "429 Too Many Requests"),
    ) as server:
        with pytest.raises(openai.RateLimitError, match=PROMPT):
            run(
                mode,
                server,
                ask(mode, "chat", False),
                measurements=measurements,
                keep_content=keep,
                retry=Retry(5, first_wait_s=0.001, seed=1),
            )
        assert len(server.heard) == 2  # that the quota is used up was still seen
    texts = [
        attempt.failure.text for attempt in measurements[0].attempts if attempt.failure is not None
    ]

    if keep:
        assert all(PROMPT in text for text in texts) and len(texts) == 2
    else:
        assert (
            texts == ["rate_limit_exceeded", "HTTP 429"] and PROMPT not in measurements[0].to_json()
        )


def test_the_error_event_of_a_stream_is_not_quoted() -> None:
    measurements: Measurements = []
    response = events(chunk("Hel"), {"error": {"message": f"cannot say {PROMPT}"}}, done=False)
    with serving(response) as server, pytest.raises(openai.APIError):
        run("blocking", server, ask("blocking", "chat", True), measurements=measurements)
    assert measurements[0].failure is not None and measurements[0].failure.kind == "error_event"
    assert PROMPT not in repr(measurements[0])


@pytest.mark.parametrize("mode", WAYS)
def test_observers_that_are_coroutine_functions_are_awaited(mode: str) -> None:
    measurements: Measurements = []
    noted = threading.Event()

    async def observer(measured: Measurement) -> None:
        await asyncio.sleep(0)
        measurements.append(measured)
        noted.set()

    with serving(RESPONSES["chat", False]) as server:
        if mode == "blocking":
            with client(mode, server) as measured_client:
                instrument(measured_client, observer).chat.completions.create(
                    model="m", messages=[]
                )
        else:

            async def go() -> None:
                async with client(mode, server) as measured_client:
                    await instrument(measured_client, observer).chat.completions.create(
                        model="m", messages=[]
                    )
                    while not measurements:
                        await asyncio.sleep(0)

            asyncio.run(go())
    assert noted.wait(60) and measurements[0].status == "ok"


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


def test_streams_of_other_types_are_measured() -> None:
    """The application's stream is observed from outside."""
    measurements: Measurements = []
    with (
        serving(RESPONSES["chat", True]) as server,
        OtherStreams(base_url=server.url, api_key="k") as measured_client,
    ):
        create = instrument(measured_client, measurements.append).chat.completions.create
        with create(model="m", messages=[], stream=True) as stream:
            assert isinstance(stream, openai.Stream) and stream.response.status_code == 200
            assert len([*stream]) == len(CHAT_EVENTS)
        assert stream.measurement is measurements[0]
        create(model="m", messages=[], stream=True).close()

    assert [(measurement.status, measurement.output_tokens) for measurement in measurements] == [
        ("ok", 3),
        ("abandoned", 0),
    ]
    assert measurements[0].ttft_ms is not None


def test_labels_are_combined_from_blocks_and_arguments() -> None:
    measurements: Measurements = []

    def use(measured_client: Any) -> None:
        with labelled(feature="search", version=3), labelled(version=4):
            measured_client.chat.completions.create(
                model="m", messages=[], loadgen_labels={"user": "u"}
            )
        measured_client.chat.completions.create(model="m", messages=[])

    with serving(RESPONSES["chat", False]) as server:
        run("blocking", server, use, measurements=measurements)
        assert all("labels" not in received_request.body for received_request in server.heard)
    assert [measurement.labels for measurement in measurements] == [
        {"feature": "search", "version": "4", "user": "u"},
        {},
    ]
    for wrong in ({"a b": "c"}, {"a": 1.5}):
        with pytest.raises(WrongUse), labelled(**wrong):  # type: ignore[arg-type]
            pass


@pytest.mark.parametrize("mode", WAYS)
def test_a_timeout_is_retried_unless_the_server_forbids_retries(mode: str) -> None:
    measurements: Measurements = []
    no = answer({"error": {"message": "no"}}, "500 Internal Server Error", x_should_retry="false")
    retry = Retry(3, first_wait_s=0.001)
    with serving(HANG, RESPONSES["chat", False]) as server:
        run(
            mode,
            server,
            ask(mode, "chat", False),
            measurements=measurements,
            retry=retry,
            # Long enough for the second response on a busy machine.
            client_options={"timeout": openai.Timeout(60, read=1.0)},
        )
    with serving(no) as server, pytest.raises(openai.InternalServerError):
        run(mode, server, ask(mode, "chat", False), measurements=measurements, retry=retry)

    assert [(measurement.status, len(measurement.attempts)) for measurement in measurements] == [
        ("ok", 2),
        ("failed", 1),
    ]


def test_a_call_without_a_permit_is_not_retried() -> None:
    measurements: Measurements = []
    throttle = Throttle(concurrency=1, max_wait_s=0.01)
    with serving(RESPONSES["chat", False]) as server:
        permit = throttle.acquire_blocking(key="sk-the-key-1234", model="m")
        with pytest.raises(ThrottleTimeout):
            run(
                "blocking",
                server,
                ask("blocking", "chat", False),
                measurements=measurements,
                retry=Retry(3),
                throttle=throttle,
            )
        permit.done()

    assert [(measurement.status, len(measurement.attempts)) for measurement in measurements] == [
        ("failed", 0)
    ] and not server.heard


def test_invalid_labels_do_not_fail_the_call(caplog: pytest.LogCaptureFixture) -> None:
    measurements: Measurements = []
    use = ask(
        "blocking", "chat", False, loadgen_labels={"cost-center": "a", "user": "u", "at": 1.5}
    )
    with serving(RESPONSES["chat", False]) as server:
        run("blocking", server, use, measurements=measurements)
        run(
            "blocking",
            server,
            ask("blocking", "chat", False, loadgen_labels=3),
            measurements=measurements,
        )

    assert [measurement.labels for measurement in measurements] == [
        {"user": "u"},
        {},
    ] and "'cost-center' is not" in caplog.text


def test_an_internal_error_does_not_fail_the_call(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def begin(self, *_: Any) -> None:
            raise RuntimeError("broken")

    with serving(RESPONSES["chat", False]) as server:
        response, _ = run("blocking", server, ask("blocking", "chat", False), record=Broken())
    assert (
        response.choices[0].message.content == "Hello there."
        and "could not be measured" in caplog.text
    )


@pytest.mark.parametrize("mode", WAYS)
def test_measurement_of_accepts_stream_managers_and_raw_responses(mode: str) -> None:
    def use(measured_client: Any) -> None:
        raw = measured_client.chat.completions.with_raw_response.create(model="m", messages=[])
        assert measurement_of(raw) is raw.measurement is raw.parse().measurement
        manager = measured_client.chat.completions.stream(model="m", messages=[])
        with manager as stream:
            assert measurement_of(stream) is None
            list(stream)
        assert measurement_of(stream).output_tokens == measurement_of(manager).output_tokens == 3

    async def use_async(measured_client: Any) -> None:
        raw = await measured_client.chat.completions.with_raw_response.create(
            model="m", messages=[]
        )
        assert measurement_of(raw) is raw.measurement
        manager = measured_client.chat.completions.stream(model="m", messages=[])
        async with manager as stream:
            [event async for event in stream]
        assert measurement_of(stream).output_tokens == measurement_of(manager).output_tokens == 3

    if not hasattr(openai.resources.chat.completions.Completions, "stream"):
        pytest.skip(f"openai {openai.__version__} has no chat.completions.stream")
    with serving(RESPONSES["chat", False], RESPONSES["chat", True]) as server:
        run(mode, server, use if mode == "blocking" else use_async)
    assert measurement_of(3) is None


def test_the_dict_of_a_failed_measurement_has_the_same_keys_as_a_successful_one() -> None:
    measurements: Measurements = []
    with serving(RESPONSES["chat", True], answer({}, "500 No")) as server:
        run("blocking", server, ask("blocking", "chat", True), measurements=measurements)
        with pytest.raises(openai.InternalServerError):
            run("blocking", server, ask("blocking", "chat", True), measurements=measurements)
    ok, failed = (json.loads(measurement.to_json()) for measurement in measurements)

    assert (
        ok["ttft_ms"] == measurements[0].ttft_ms
        and ok["tpot_ms"] == measurements[0].tpot_ms
        and len(ok["inter_chunk_ms"]) == 2
    )
    assert (
        failed["status"] == "failed" and failed["ttft_ms"] is None and failed["wait_ms"] is not None
    )
    assert {*ok} == {*failed} == {*measurements[0].to_dict()}


class Fits(pydantic.BaseModel):
    """What an application asks for."""

    number: int


@pytest.mark.parametrize("reason", ["stop", "length", "content_filter"])
def test_the_tokens_of_a_response_that_does_not_parse_are_counted(reason: str) -> None:
    """`parse` raises if the response does not fit its class. The server bills it all the same."""
    choice = {**CHAT["choices"][0], "finish_reason": reason}
    measurements: list[Measurement] = []
    request: dict[str, Any] = {
        "model": "m",
        "messages": [{"role": "user", "content": "Hi"}],
        "response_format": Fits,
    }
    budget = Budget("10 USD")
    options: dict[str, Any] = {"prices": TokenPrice(1e4, 1e4), "budget": budget}
    with serving(answer({**CHAT, "choices": [choice]})) as server:
        client = instrument(
            openai.OpenAI(base_url=server.url, api_key="k"), measurements.append, **options
        )
        with pytest.raises(Exception, match=r"Fits|length|content") as exc_info:
            client.beta.chat.completions.parse(**request)
        with (
            client,
            client.beta.chat.completions.with_streaming_response.parse(**request) as unread,
        ):
            unread.read()

        async def waiting() -> None:
            async with openai.AsyncOpenAI(base_url=server.url, api_key="k") as plain_client:
                with pytest.raises(exc_info.type):
                    await instrument(
                        plain_client, measurements.append, **options
                    ).beta.chat.completions.parse(**request)

        asyncio.run(waiting())
    assert [measured.status for measured in measurements] == [
        "failed",
        "ok",
        "failed",
    ]  # the second was read as bytes
    for measurement in measurements:
        assert (measurement.input_tokens, measurement.output_tokens, measurement.token_source) == (
            9,
            3,
            "server",
        )
        assert (measurement.finish_reason, measurement.response_id, measurement.response_model) == (
            reason,
            "c1",
            "m-1",
        )
        assert measurement.cost == pytest.approx(0.12) and "there" not in measurement.to_json()
    assert budget.spent == pytest.approx(0.36)


def test_omitted_arguments_are_no_part_of_a_prompt(tmp_path: Path) -> None:
    """`stream` of the Responses API passes a mark for each argument that was not given."""
    created = {
        "type": "response.created",
        "sequence_number": 0,
        "response": {**RESPONSE, "status": "in_progress"},
    }
    completed = {"type": "response.completed", "sequence_number": 1, "response": RESPONSE}
    measurements: list[Measurement] = []
    with (
        serving(events(created, completed, done=False)) as server,
        record_shape(tmp_path / "t.jsonl") as shape,
    ):
        measured_client = openai.OpenAI(base_url=server.url, api_key="k")
        client = instrument(measured_client, measurements.append, keep_content=True, record=shape)
        if not hasattr(getattr(measured_client, "responses", None), "stream"):
            pytest.skip("this openai has no streams of the responses API")
        with client, client.responses.stream(model="m", input="Hello") as stream:
            stream.until_done()

    assert measurements[0].content is not None and measurements[0].content.input == "Hello"
    omitted = type("Omit", (), {})()
    assert read_prompt(
        {"instructions": omitted, "prompt": omitted, "input": "Hello"}
    ).joined_texts == {"input": ["Hello"]}
