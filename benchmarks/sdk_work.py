"""Calls and streams of the openai package that are timed with and without the SDK.

`sdk_overhead.py` compares their CPU time and `sdk_instructions.py` their machine instructions. The
server is a stub inside the process, so that only the work of the client counts.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import openai
from loadgen_sdk import Measurement, TokenPrice, instrument, record_shape

CALL_LIMIT_US = 10.0
CHUNK_LIMIT_US = 0.5
OTEL_LIMIT_US = 100.0  # OpenTelemetry creates a span and several metrics for each call
RECORD_LIMIT_US = 50.0  # to record a long prompt, whose text is hashed
CHUNKS_PER_STREAM = 500
CALLS_PER_ROUND = 10  # a call of the whole openai package takes some 100 µs
STUB_CALLS_PER_ROUND = 200  # a stub takes nearly no time, so more calls are needed
SHORT_PROMPT = "Hello there, how are you?"
LONG_PROMPT = "many words " * 4000  # 44,000 characters
PRICES = TokenPrice(1, 2)

RESPONSE = {
    "id": "c",
    "object": "chat.completion",
    "created": 1,
    "model": "m",
    "choices": [
        {"index": 0, "message": {"role": "assistant", "content": "Hello"}, "finish_reason": "stop"}
    ],
    "usage": {"prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12},
}
CHUNK = {
    "id": "c",
    "object": "chat.completion.chunk",
    "created": 1,
    "model": "m",
    "choices": [{"index": 0, "delta": {"content": "Hello"}, "finish_reason": None}],
}


class TimedWork(Protocol):
    """Work that is done `units` times, with its mean CPU time."""

    units: int

    def measure_cpu_s(self) -> float:
        """Do the work and return the mean CPU-seconds of one unit in the calling thread."""


@dataclass
class BlockingCalls:
    """Blocking calls of a `create` method, one after another. A unit is a call."""

    create: Callable[..., object]
    units: int = CALLS_PER_ROUND
    prompt: str = SHORT_PROMPT

    def measure_cpu_s(self) -> float:
        """Make the calls and return the mean CPU-seconds of one."""
        messages = [{"role": "user", "content": self.prompt}]
        start_s = time.thread_time()
        for _ in range(self.units):
            self.create(model="m", messages=messages)
        return (time.thread_time() - start_s) / self.units


@dataclass
class AsyncCalls:
    """Async calls of a `create` method, one after another. A unit is a call."""

    create: Callable[..., Any]
    runner: asyncio.Runner
    units: int = CALLS_PER_ROUND

    def measure_cpu_s(self) -> float:
        """Make the calls in the event loop and return the mean CPU-seconds of one."""
        return self.runner.run(self._make_calls())

    async def _make_calls(self) -> float:
        """Make the calls and return the mean CPU-seconds of one."""
        messages = [{"role": "user", "content": SHORT_PROMPT}]
        start_s = time.thread_time()
        for _ in range(self.units):
            await self.create(model="m", messages=messages)
        return (time.thread_time() - start_s) / self.units


@dataclass
class BlockingStream:
    """A blocking stream that is read to its end. A unit is a chunk."""

    open_stream: Callable[[], Any]
    units: int = CHUNKS_PER_STREAM

    def measure_cpu_s(self) -> float:
        """Read a new stream and return the mean CPU-seconds of a chunk."""
        stream = self.open_stream()
        start_s = time.thread_time()
        for _ in stream:
            pass
        return (time.thread_time() - start_s) / self.units


@dataclass
class AsyncStream:
    """An async stream that is read to its end. A unit is a chunk."""

    open_stream: Callable[[], Any]
    runner: asyncio.Runner
    units: int = CHUNKS_PER_STREAM

    def measure_cpu_s(self) -> float:
        """Read a new stream in the event loop and return the mean CPU-seconds of a chunk."""
        return self.runner.run(self._read_stream())

    async def _read_stream(self) -> float:
        """Read a new stream and return the mean CPU-seconds of a chunk."""
        stream = self.open_stream()
        start_s = time.thread_time()
        async for _ in stream:
            pass
        return (time.thread_time() - start_s) / self.units


class TimedPair(NamedTuple):
    """The same work without the SDK and with it.

    `limit_us` is the largest CPU time in µs that the SDK may add to one unit of the work.
    """

    name: str
    limit_us: float
    without_sdk: TimedWork
    with_sdk: TimedWork


def create_pairs(runner: asyncio.Runner, measurements: list[Measurement]) -> list[TimedPair]:
    """Return all pairs of work that are compared; async work runs in the loop of `runner`.

    The SDK appends what it measures in calls of the openai package to `measurements`.
    """
    return [
        *create_call_pairs(runner, measurements),
        *create_stub_pairs(measurements),
        *create_stream_pairs(runner),
    ]


def create_call_pairs(runner: asyncio.Runner, measurements: list[Measurement]) -> list[TimedPair]:
    """Return pairs whose calls go through the whole openai package, blocking and async."""
    blocking_client, async_client = create_clients()
    plain_create = blocking_client.chat.completions.create
    plain_async_create = async_client.chat.completions.create

    # `instrument` returns a new client and leaves the plain one as it is.
    measured_create = instrument_client(blocking_client, measurements).chat.completions.create
    measured_async_create = instrument_client(async_client, measurements).chat.completions.create

    return [
        TimedPair(
            "a call, blocking",
            CALL_LIMIT_US,
            BlockingCalls(plain_create),
            BlockingCalls(measured_create),
        ),
        TimedPair(
            "a call, async",
            CALL_LIMIT_US,
            AsyncCalls(plain_async_create, runner),
            AsyncCalls(measured_async_create, runner),
        ),
    ]


def create_stub_pairs(measurements: list[Measurement]) -> list[TimedPair]:
    """Return pairs whose calls return a prepared response, so that nearly all time is the SDK's.

    They differ in the observers and options of the SDK.
    """
    return [
        create_stub_pair(
            "a call that returns at once", CALL_LIMIT_US, observers=(measurements.append,)
        ),
        create_stub_pair(
            "the same with labels for Prometheus",
            CALL_LIMIT_US,
            observers=(create_prometheus_observer(),),
            labels={"feature": "a"},
        ),
        create_stub_pair(
            "the same with OpenTelemetry",
            OTEL_LIMIT_US,
            observers=(create_opentelemetry_observer(),),
        ),
        create_stub_pair(
            "the same with the record of a prompt of 44,000 characters",
            RECORD_LIMIT_US,
            prompt=LONG_PROMPT,
            record=record_shape(os.devnull),
        ),
    ]


def create_stub_pair(
    name: str,
    limit_us: float,
    *,
    observers: tuple[Any, ...] = (),
    prompt: str = SHORT_PROMPT,
    **policy_options: Any,
) -> TimedPair:
    """Return a pair of calls that return a prepared response at once.

    Args:
        name: What is measured, as the table shows it.
        limit_us: The largest CPU time that the SDK may add to a call.
        observers: Are called by the SDK with each measurement.
        prompt: The prompt of each call.
        policy_options: Further options of the SDK's policy, such as `labels`.
    """
    from loadgen_sdk.app.call import CallSettings
    from loadgen_sdk.app.measured_method import measure_method
    from loadgen_sdk.app.policy import Policy

    policy = Policy(observers=observers, prices=PRICES, **policy_options)
    settings = CallSettings(policy, server="h:1", key="k", requests_usage=False)
    plain_method, method_with_headers = create_stub_methods()
    measured_method = measure_method(method_with_headers, "chat", settings, is_blocking=True)

    return TimedPair(
        name,
        limit_us,
        BlockingCalls(plain_method, STUB_CALLS_PER_ROUND, prompt),
        BlockingCalls(measured_method, STUB_CALLS_PER_ROUND, prompt),
    )


def create_stub_methods() -> tuple[Callable[..., object], Callable[..., object]]:
    """Return two methods that return a prepared completion, in place of the openai package's.

    The second one also reports response headers to the SDK, as an instrumented client does.
    """
    from loadgen_sdk.app.measured_method import record_response_headers
    from openai.types.chat import ChatCompletion

    completion = ChatCompletion.model_validate(RESPONSE)
    headers = http_library().Headers(
        {"x-request-id": "r", "content-type": "application/json", "date": "now", "server": "s"}
    )

    def return_completion(**_: object) -> object:
        return completion

    def return_completion_with_headers(**_: object) -> object:
        record_response_headers(headers)
        return completion

    return return_completion, return_completion_with_headers


def create_stream_pairs(runner: asyncio.Runner) -> list[TimedPair]:
    """Return pairs that read a stream of prepared chunks, blocking and async."""
    chunks = PreparedChunks()

    def open_plain_stream() -> PreparedChunks:
        return chunks

    open_observed_stream = partial(observe_chunks, chunks)
    return [
        TimedPair(
            "a chunk, blocking",
            CHUNK_LIMIT_US,
            BlockingStream(open_plain_stream),
            BlockingStream(open_observed_stream),
        ),
        TimedPair(
            "a chunk, async",
            CHUNK_LIMIT_US,
            AsyncStream(open_plain_stream, runner),
            AsyncStream(open_observed_stream, runner),
        ),
    ]


class PreparedChunks:
    """A blocking and async stream of parsed chunks, in place of the openai package's stream.

    The chunks cost nothing to make, so that the time of the SDK is not lost in that of a decoder.
    """

    def __init__(self) -> None:
        from openai.types.chat import ChatCompletionChunk

        self._chunks = [ChatCompletionChunk.model_validate(CHUNK)] * CHUNKS_PER_STREAM

    def __iter__(self) -> Iterator[Any]:
        yield from self._chunks

    async def __aiter__(self) -> AsyncIterator[Any]:
        for chunk in self._chunks:
            yield chunk


def observe_chunks(chunks: PreparedChunks) -> object:
    """Return the stream as an application gets it from an instrumented client."""
    from loadgen_sdk.app.call import CallSettings
    from loadgen_sdk.app.observed_call import ObservedCall
    from loadgen_sdk.app.observed_stream import ObservedEvents
    from loadgen_sdk.app.policy import Policy

    settings = CallSettings(policy=Policy(), server="", key="", requests_usage=False)
    return ObservedEvents(chunks, ObservedCall("chat", settings, {"stream": True}))


def create_clients() -> tuple[openai.OpenAI, openai.AsyncOpenAI]:
    """Return a blocking and an async client that get a fixed response without a network."""
    library = http_library()
    transport = library.MockTransport(create_http_response)
    return (
        openai.OpenAI(api_key="k", http_client=library.Client(transport=transport)),
        openai.AsyncOpenAI(api_key="k", http_client=library.AsyncClient(transport=transport)),
    )


def create_http_response(_request: object) -> object:
    """Return the HTTP response to every request: a fixed completion."""
    return http_library().Response(200, json=RESPONSE, headers={"x-request-id": "r"})


def http_library() -> Any:
    """Return the HTTP library of the installed openai package, which is httpx or httpx2."""
    return sys.modules.get("httpx2") or sys.modules["httpx"]


def instrument_client(client: Any, measurements: list[Measurement]) -> Any:
    """Return the client with the SDK, which appends a measurement of each call to the list."""
    return instrument(client, measurements.append, prices=PRICES)


def create_prometheus_observer() -> Any:
    """Return an observer of the SDK that counts calls for Prometheus, by one label."""
    from loadgen_sdk import Prometheus
    from prometheus_client import CollectorRegistry

    return Prometheus(CollectorRegistry(), labels=("feature",))


def create_opentelemetry_observer() -> Callable[[Measurement], object]:
    """Return an observer of the SDK that records spans and metrics with OpenTelemetry.

    The providers are OpenTelemetry's own, as in an application. Spans are sampled and then dropped,
    because there is no exporter.
    """
    from loadgen_sdk import OpenTelemetry
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader
    from opentelemetry.sdk.trace import TracerProvider

    return OpenTelemetry(
        meter_provider=MeterProvider([InMemoryMetricReader()]), tracer_provider=TracerProvider()
    )
