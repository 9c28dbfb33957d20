"""Tests of the project's own client as applications use it, blocking and async."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
from expected_errors import refused
from loadgen_sdk import (
    BlockingClient,
    Client,
    ClientError,
    Measurement,
    Request,
    RequestFailed,
    Retry,
    TargetUnusable,
    Throttle,
    ThrottleTimeout,
    TokenPrice,
    WrongUse,
    latest_measurement,
)
from scripted_server import CHAT, CHAT_EVENTS, HANG, answer, chunk, cut, events, serving
from servers import start

from loadgen.sim.server.options import Options

BUSY = answer({"error": {"message": "slow down"}}, "429 Too Many Requests", retry_after_ms="1")
STREAM = events(*CHAT_EVENTS, x_request_id="r-7", server_timing="ttft;dur=5")
KNOWN: dict[str, Any] = {"model": "m", "server": "vllm"}
Measurements = list[Measurement]


def quick(**more: Any) -> Retry:
    return Retry(**{"attempts": 3, "first_wait_s": 0.001, "seed": 1, **more})


def run(
    responses: tuple[bytes, ...], use: Callable[[Client], Any], **options: Any
) -> tuple[Any, Measurements, list[Any]]:
    """Run `use(client)` against a server. Return its result, the measurements and requests."""
    measurements: Measurements = []

    async def go(url: str) -> Any:
        async with Client(
            url, **{**KNOWN, "on_measurement": measurements.append, **options}
        ) as client:
            return await use(client)

    with serving(*responses) as server:
        result = asyncio.run(go(server.url))
    return result, measurements, server.heard


def test_the_probe_has_the_timeout_of_a_call() -> None:
    """A server that accepts connections, and one that lists its models, and neither generates."""

    async def go(url: str) -> None:
        with refused(TargetUnusable, "timeout"):
            await Client(url, timeout_s=0.2).complete("Hi")

    models = answer({"data": [{"id": "m"}]})
    for responses in ((HANG,), (models, models, HANG)):
        with serving(*responses) as server:
            asyncio.run(go(server.url))


@pytest.mark.processes
def test_a_client_with_only_a_url_learns_the_rest_from_the_server() -> None:
    async def go(url: str) -> None:
        client = Client(url)  # opened by its first call
        completion = await client.complete("Hello")
        assert (client.model, client.server_profile.name) == ("sim", "trtllm")
        assert completion.failure is None and completion.text and completion.usage.output
        client.close()

    with start(Options(ttft="2ms", itl="1ms")) as endpoint:
        asyncio.run(go(endpoint.url))


def test_calls_that_start_together_wait_for_one_probe() -> None:
    async def go(url: str) -> None:
        client = Client(url, model="m", stream=False)
        for completion in await asyncio.gather(*(client.complete("Hi") for _ in range(3))):
            assert completion.failure is None and completion.text == "Hello there."
        client.close()

    with serving(answer(CHAT)) as server:
        asyncio.run(go(server.url))
        assert [received_request.path for received_request in server.heard].count("/v1/models") == 1


def test_a_stream_is_measured_by_the_kernels_clock() -> None:
    async def use(client: Client) -> list[str]:
        return [event.text async for event in client.stream([{"role": "user", "content": "Hi"}])]

    texts, measurements, received_requests = run(
        (STREAM,), use, prices=TokenPrice(1, 2), keep_content=True
    )
    assert texts == ["Hel", "lo ", "there."]
    measured = measurements[0]
    assert (
        measured.status,
        measured.token_source,
        measured.output_tokens,
        measured.cached_tokens,
    ) == (
        "ok",
        "server",
        3,
        4,
    )
    assert (
        measured.cost == pytest.approx((9 * 1 + 3 * 2) / 1e6) and measured.finish_reason == "stop"
    )
    assert measured.kernel_stamps and len(measured.instants) == 3 and measured.request_id == "r-7"
    assert measured.server_timing == {"server-timing": "ttft;dur=5"}
    assert (
        measured.started <= measured.sent <= measured.first_token <= measured.end <= measured.done
    )
    assert measured.content is not None and measured.content.output == "Hello there."
    assert "max_tokens" not in received_requests[0].body and received_requests[0].body[
        "messages"
    ] == [{"role": "user", "content": "Hi"}]


def test_a_stream_is_not_retried_once_output_was_delivered() -> None:
    async def use(client: Client) -> Any:
        got = []
        with pytest.raises(RequestFailed) as failed:
            async for event in client.stream("Hi"):
                got.append(event.text)  # noqa: PERF401 - what came before the failure counts
        return got, failed.value.kind

    responses = (BUSY, cut(events(chunk("Hel"), done=False)), STREAM)
    (got, kind), measurements, received_requests = run(responses, use, retry=quick())
    assert (got, kind, len(received_requests)) == (["Hel"], "truncated", 2)
    assert [attempt.failure and attempt.failure.kind for attempt in measurements[0].attempts] == [
        "http_429",
        "truncated",
    ]
    assert (measurements[0].status, measurements[0].retries) == ("failed", 1)


def test_complete_retries_and_reports_every_attempt() -> None:
    async def use(client: Client) -> Any:
        return await client.complete("Hi")

    completion, measurements, received_requests = run(
        (BUSY, cut(STREAM), STREAM), use, retry=quick()
    )
    assert (
        completion.failure is None
        and completion.text == "Hello there."
        and len(received_requests) == 3
    )
    assert [attempt.failure and attempt.failure.kind for attempt in measurements[0].attempts] == [
        "http_429",
        "truncated",
        None,
    ]
    assert (len(measurements), measurements[0].status, measurements[0].attempts[0].waited_ms) == (
        1,
        "ok",
        1.0,
    )


def test_a_failed_call_returns_its_completion_without_a_retry() -> None:
    async def use(client: Client) -> Any:
        return await client.complete("Hi"), latest_measurement()

    (completion, latest), measurements, _ = run(
        (answer({"error": {"message": "no"}}, "400 Bad Request"),), use, retry=quick()
    )
    assert completion.failure.kind == "http_4xx" and completion.failure.http_status == 400
    assert (
        latest is measurements[0]
        and measurements[0].status == "failed"
        and measurements[0].retries == 0
    )


@pytest.mark.parametrize("how", ["stream", "complete", "throttled"])
def test_cancelled_calls_are_measured(how: str) -> None:
    async def use(client: Client) -> None:
        permit = await client.policy.throttle.acquire(model="m") if client.policy.throttle else None

        async def call() -> None:
            if how == "stream":
                async for _ in client.stream("Hi"):
                    pass
            else:
                await client.complete("Hi")

        task = asyncio.create_task(call())
        while not (client.in_flight or permit):
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert client.in_flight == 0

    _, measurements, _ = run(
        (HANG,), use, throttle=Throttle(concurrency=1) if how == "throttled" else None
    )
    assert [
        (measurement.status, measurement.failure and measurement.failure.kind)
        for measurement in measurements
    ] == [("cancelled", "interrupted")]


def test_leaving_a_stream_passes_its_permit_to_the_next_call() -> None:
    async def use(client: Client) -> None:
        for _ in range(3):
            async for _ in client.stream("Hi"):
                break
        completion = await client.complete("Hi")
        assert completion.failure is None

    gc.disable()
    try:
        _, measurements, _ = run(
            (STREAM,), use, throttle=Throttle(concurrency=1, requests="1000/s")
        )
    finally:
        gc.enable()
    assert len(measurements) == 4 and {measurement.status for measurement in measurements} <= {
        "abandoned",
        "ok",
    }


def test_the_blocking_client_completes_and_streams() -> None:
    measurements: Measurements = []
    with (
        serving(STREAM) as server,
        BlockingClient(server.url, on_measurement=measurements.append, **KNOWN) as client,
    ):
        assert client.complete("Hi").text == "Hello there."
        assert latest_measurement() is measurements[0]
        assert [event.text for event in client.stream("Hi")] == ["Hel", "lo ", "there."]
        assert latest_measurement() is measurements[1]
        for _ in client.stream("Hi"):
            break
        assert client.complete("Hi").failure is None
        threads = [threading.Thread(target=client.complete, args=("Hi",)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert (
        len(measurements) == 8
        and sum(measurement.status == "ok" for measurement in measurements) >= 7
    )
    assert {measurement.status for measurement in measurements} <= {"ok", "abandoned"}
    assert not [thread for thread in threading.enumerate() if thread.name == "loadgen_sdk"]
    client.close()
    with pytest.raises(ClientError, match="closed"):
        client.complete("Hi")


def test_the_blocking_client_raises_the_same_errors_as_the_async_client() -> None:
    with serving(BUSY) as server, BlockingClient(server.url, **KNOWN) as client:
        with pytest.raises(RequestFailed, match=r"^http_429: slow"):
            list(client.stream("Hi"))
        with refused(WrongUse, "wrong_type"):
            client.complete(3)  # type: ignore[arg-type]

    with refused(TargetUnusable, "connect"), BlockingClient("http://127.0.0.1:9"):
        pass
    with refused(TargetUnusable, "invalid_url"):
        BlockingClient("127.0.0.1:9")


def test_a_blocking_client_in_an_event_loop_has_a_warning() -> None:
    async def go(url: str) -> None:
        with pytest.warns(RuntimeWarning, match="blocks all other tasks; use Client"):
            client = BlockingClient(url, **KNOWN)
        client.close()

    with serving(STREAM) as server, warnings.catch_warnings():
        asyncio.run(go(server.url))


def test_invalid_arguments_of_a_client_are_refused() -> None:
    with refused(WrongUse, "event_loop"):
        Client("http://127.0.0.1:9", **KNOWN)

    async def go() -> None:
        with refused(WrongUse, "unknown_name"):
            Client("http://127.0.0.1:9", server="x")
        with refused(WrongUse, "wrong_type"):
            Client("http://127.0.0.1:9", throttle=3)  # type: ignore[arg-type]
        with refused(TargetUnusable, "connect"):
            await Client("http://127.0.0.1:9").open()
        measurements: Measurements = []
        with pytest.raises(TargetUnusable):
            await Client("http://127.0.0.1:9", on_measurement=measurements.append).complete("Hi")
        assert [measurement.status for measurement in measurements] == ["failed"]

    asyncio.run(go())


def test_responses_without_streaming_are_measured() -> None:
    async def use(client: Client) -> Any:
        return await client.complete(Request(id="r", prompt="Hi", max_tokens=3))

    completion, measurements, received_requests = run((answer(CHAT),), use, stream=False)
    assert completion.text == "Hello there." and received_requests[0].body["stream"] is False
    assert (measurements[0].streamed, measurements[0].output_tokens, measurements[0].tpot_ms) == (
        False,
        3,
        None,
    )


TOOL_EVENTS = (
    chunk(
        None,
        tool_calls=[
            {"index": 0, "id": "t1", "type": "function", "function": {"name": "f", "arguments": ""}}
        ],
    ),
    chunk(None, tool_calls=[{"index": 0, "function": {"arguments": '{"a":'}}]),
    chunk(None, tool_calls=[{"index": 0, "function": {"arguments": "1}"}}]),
    chunk(None, "tool_calls"),
)


def test_a_completion_has_tool_calls_and_the_response_id() -> None:
    async def use(client: Client) -> Any:
        return await client.complete("Hi")

    completion, measurements, _ = run((events(*TOOL_EVENTS),), use, keep_content=True)
    assert (
        completion.failure is None and completion.response_id == "c1" == measurements[0].response_id
    )
    assert completion.tool_calls == ({"id": "t1", "name": "f", "arguments": '{"a":1}'},)
    assert (
        measurements[0].content is not None
        and measurements[0].content.choices[0].tool_calls == completion.tool_calls
    )


@pytest.mark.parametrize("how", ["complete", "stream"])
def test_closing_ends_the_calls_in_flight_and_later_ones_are_refused(how: str) -> None:
    async def use(client: Client) -> Any:
        async def read() -> Any:
            if how == "complete":
                return (await client.complete("Hi")).failure
            try:
                async for _ in client.stream("Hi"):
                    pass
            except RequestFailed as failed:
                return failed

        task = asyncio.create_task(read())
        while not client.in_flight:
            await asyncio.sleep(0)
        client.close()
        failure = await asyncio.wait_for(task, 60)
        assert failure.kind == "interrupted"
        with pytest.raises(ClientError, match="this client is closed"):
            await client.complete("Hi")
        with pytest.raises(ClientError, match="this client is closed"):
            await client.open()

    _, measurements, _ = run((HANG,), use)
    assert [measurement.status for measurement in measurements] == ["failed"]


def test_a_client_that_cannot_be_opened_leaves_no_file_descriptor_open() -> None:
    async def go() -> None:
        before = set(os.listdir("/proc/self/fd"))
        with pytest.raises(TargetUnusable):
            async with Client("http://127.0.0.1:9"):
                pass
        assert (
            set(os.listdir("/proc/self/fd")) <= before
        )  # what an earlier test left as garbage may go at any time

    asyncio.run(go())


def test_raised_failures_are_measured_without_the_text_of_the_prompt() -> None:
    refused = answer(
        {"error": {"message": "no: the secret prompt, by key-4711\x1b"}}, "400 Bad Request"
    )

    async def use(client: Client) -> Any:
        with pytest.raises(RequestFailed, match=r"secret prompt, by \*\*\*\\x1b$"):
            await client.complete("Hi", labels={"feature": "b"}, raise_on_failure=True)
        assert client.timeout_s == 1.5

    _, measurements, _ = run(
        (refused,), use, labels={"feature": "a", "user": 7}, timeout_s=1.5, api_key="key-4711"
    )
    assert measurements[0].labels == {"feature": "b", "user": "7"}
    assert measurements[0].failure is not None and measurements[0].failure.text == "HTTP 400"
    assert "secret" not in repr(measurements[0]) and "secret" not in measurements[0].to_json()


def test_no_call_waits_for_its_throttle_past_its_timeout() -> None:
    async def use(client: Client) -> Any:
        permit = await client.policy.throttle.acquire(model="m")  # type: ignore[union-attr]
        with pytest.raises(ThrottleTimeout, match=r" 0\.02 s"):
            await client.complete("Hi")
        permit.done()

    _, measurements, received_requests = run(
        (STREAM,), use, throttle=Throttle(concurrency=1), timeout_s=0.02
    )
    assert (
        measurements[0].failure is not None
        and measurements[0].failure.kind == "timeout_total"
        and not received_requests
    )
