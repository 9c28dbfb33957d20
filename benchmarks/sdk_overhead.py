"""How much CPU time does `instrument` add to an application's call and to each streamed chunk?

    python benchmarks/sdk_overhead.py [--throttle-seconds 10] [--instructions 1]

The same client is measured without it. The transport is a stub inside the process, so that only the
client's own work counts, as CPU time of the calling thread. Both sides alternate, and the smallest
of many rounds counts, because other work of the machine only adds time. With --instructions,
valgrind counts machine instructions, which other work does not change; this takes minutes. The
script prints microseconds with their limits, import times, and the errors of throttles.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import math
import multiprocessing
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, NoReturn
from unittest import mock

import openai
import rig
from loadgen_sdk import Throttle, ThrottleTimeout, TokenPrice, instrument, record_shape

CALL_LIMIT_US, CHUNK_LIMIT_US, OTEL_LIMIT_US, RECORD_LIMIT_US = 10.0, 0.5, 100.0, 50.0
IMPORT_LIMIT = 1.5  # times the import of msgspec alone
MAX_THROTTLE_ERROR = 0.02
CHUNKS = 500
CALLS = 10
STUB_CALLS = 200

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


def http_library() -> Any:
    """Return the HTTP library that this version of the package is built on."""
    return __import__("httpx2" if "httpx2" in sys.modules else "httpx")


def respond(_request: Any) -> Any:
    """Answer a request with a fixed completion."""
    return http_library().Response(200, json=RESPONSE, headers={"x-request-id": "r"})


def create_clients() -> tuple[Any, Any]:
    """Return a blocking and an async client whose transport is a stub."""
    library = http_library()
    blocking = openai.OpenAI(
        api_key="k", http_client=library.Client(transport=library.MockTransport(respond))
    )
    asynchronous = openai.AsyncOpenAI(
        api_key="k", http_client=library.AsyncClient(transport=library.MockTransport(respond))
    )

    return blocking, asynchronous


MESSAGES = [{"role": "user", "content": "Hello there, how are you?"}]


def smallest_of_both(
    plain: Callable[[], float], measured: Callable[[], float], rounds: int
) -> tuple[float, float]:
    """Return the smallest seconds of a work without the SDK and with it, in this order.

    The two sides alternate, so that a slow moment of the machine affects both.
    """
    smallest_plain_s = math.inf
    smallest_measured_s = math.inf
    for _ in range(rounds):
        smallest_plain_s = min(smallest_plain_s, plain())
        smallest_measured_s = min(smallest_measured_s, measured())
    return smallest_plain_s, smallest_measured_s


def time_call(create: Any) -> Callable[[], float]:
    """Return a function that measures the mean CPU-seconds of a blocking call of `create`."""

    def measure() -> float:
        """Make CALLS calls and return the mean CPU-seconds of one."""
        start = time.thread_time()
        for _ in range(CALLS):
            create(model="m", messages=MESSAGES)
        return (time.thread_time() - start) / CALLS

    return measure


def time_async_call(create: Any, runner: asyncio.Runner) -> Callable[[], float]:
    """Return a function that measures the mean CPU-seconds of an async call of `create`.

    The calls run in the event loop of `runner`.
    """

    async def make_calls() -> float:
        """Make CALLS calls one after another and return the mean CPU-seconds of one."""
        start = time.thread_time()
        for _ in range(CALLS):
            await create(model="m", messages=MESSAGES)
        return (time.thread_time() - start) / CALLS

    def measure() -> float:
        """Run the calls in the event loop and return the mean CPU-seconds of one."""
        return runner.run(make_calls())

    return measure


class PackageTimestamps:
    """The times, in ns of thread CPU time, at which the package's own method began and ended."""

    def __init__(self) -> None:
        self.began_ns = 0
        self.ended_ns = 0

    def added_ns(self, call_began_ns: int, call_ended_ns: int) -> int:
        """Return the time of a whole call that was spent before and after the package's method."""
        return (self.began_ns - call_began_ns) + (call_ended_ns - self.ended_ns)


def measure_added_us(
    wrap_client: Callable[[Any], Any], runner: asyncio.Runner | None, rounds: int
) -> float:
    """Return the CPU time in microseconds that the SDK adds around the package's own method.

    Timestamps are taken inside real calls, at the begin and the end of the package's method. The
    smallest sum of all calls counts. So the result is not a difference of two long, noisy times.

    Args:
        wrap_client: Instruments a client of the package.
        runner: The event loop of async calls, or None for blocking calls.
        rounds: Each round makes CALLS calls.
    """
    if runner is None:
        return measure_added_us_blocking(wrap_client, rounds)
    return measure_added_us_async(wrap_client, runner, rounds)


def measure_added_us_blocking(wrap_client: Callable[[Any], Any], rounds: int) -> float:
    """Return the microseconds that the SDK adds to a blocking call; see `measure_added_us`."""
    from openai.resources.chat.completions import Completions

    timestamps = PackageTimestamps()
    original_create = Completions.create

    def create_with_timestamps(*args: Any, **kwargs: Any) -> object:
        timestamps.began_ns = time.thread_time_ns()
        response = original_create(*args, **kwargs)
        timestamps.ended_ns = time.thread_time_ns()
        return response

    def measure_call_ns() -> int:
        call_began_ns = time.thread_time_ns()
        create(model="m", messages=MESSAGES)
        return timestamps.added_ns(call_began_ns, time.thread_time_ns())

    with mock.patch.object(Completions, "create", create_with_timestamps):
        blocking_client, _ = create_clients()
        create = wrap_client(blocking_client).chat.completions.create
        return min(measure_call_ns() for _ in range(rounds * CALLS)) / 1e3


def measure_added_us_async(
    wrap_client: Callable[[Any], Any], runner: asyncio.Runner, rounds: int
) -> float:
    """Return the microseconds that the SDK adds to an async call; see `measure_added_us`."""
    from openai.resources.chat.completions import AsyncCompletions

    timestamps = PackageTimestamps()
    original_create = AsyncCompletions.create

    async def create_with_timestamps(*args: Any, **kwargs: Any) -> object:
        timestamps.began_ns = time.thread_time_ns()
        response = await original_create(*args, **kwargs)
        timestamps.ended_ns = time.thread_time_ns()
        return response

    async def measure_call_ns() -> int:
        call_began_ns = time.thread_time_ns()
        await create(model="m", messages=MESSAGES)
        return timestamps.added_ns(call_began_ns, time.thread_time_ns())

    with mock.patch.object(AsyncCompletions, "create", create_with_timestamps):
        _, async_client = create_clients()
        create = wrap_client(async_client).chat.completions.create
        return min(runner.run(measure_call_ns()) for _ in range(rounds * CALLS)) / 1e3


PROMETHEUS_BATCH = 99  # calls that wait for the background thread when it is timed


PROMETHEUS_ROUNDS = 50


def measure_prometheus_us() -> float:
    """Return the CPU time, in microseconds, that Prometheus costs for one call with a label.

    The observer only queues a call; a background thread of the SDK counts it later. This function
    does the work of that thread for a batch of calls, because the caller does not wait for it.
    """
    from loadgen_sdk import Measurement

    observer = create_prometheus()
    measurement = Measurement(
        api="chat",
        streamed=False,
        status="ok",
        started=0,
        started_unix_ns=1,
        sent=0,
        first_token=5,
        end=5,
        done=5,
        input_tokens=9,
        output_tokens=3,
        token_source="server",
        cost=1e-5,
        labels={"feature": "a"},
    )

    smallest_s = math.inf
    for _ in range(PROMETHEUS_ROUNDS):
        for _ in range(PROMETHEUS_BATCH):
            observer(measurement)
        start = time.thread_time_ns()
        observer._backlog.process_all()
        smallest_s = min(smallest_s, (time.thread_time_ns() - start) / PROMETHEUS_BATCH)

    return smallest_s / 1e3


def time_stub_call(
    create: Callable[..., Any], content: str = "Hello there, how are you?"
) -> Callable[[], float]:
    """Return a function that measures the mean CPU-seconds of a call with this prompt.

    `create` is a stub that returns a prepared response at once, so that the time is that of the SDK
    alone.
    """
    messages = [{"role": "user", "content": content}]

    def measure() -> float:
        """Make STUB_CALLS calls and return the mean CPU-seconds of one."""
        start = time.thread_time()
        for _ in range(STUB_CALLS):
            create(model="m", messages=messages)
        return (time.thread_time() - start) / STUB_CALLS

    return measure


def time_stub_calls(
    sides: tuple[Any, Any], *content: str
) -> tuple[Callable[[], float], Callable[[], float]]:
    """Return the timers of a plain and a measured method."""
    return time_stub_call(sides[0], *content), time_stub_call(sides[1], *content)


def create_stubs(*observers: Any, **options: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return a method that responds at once, and the same method measured by the SDK."""
    from loadgen_sdk.app.call import CallSettings
    from loadgen_sdk.app.measured_method import measure_method, record_response_headers
    from loadgen_sdk.app.policy import Policy
    from openai.types.chat import ChatCompletion

    completion = ChatCompletion.model_validate(RESPONSE)
    headers = http_library().Headers(
        {"x-request-id": "r", "content-type": "application/json", "date": "now", "server": "s"}
    )

    def plain(**_: Any) -> Any:
        """Return the completion."""
        return completion

    def respond_with_headers(**_: Any) -> object:
        """Report the response headers and return the completion."""
        record_response_headers(headers)
        return completion

    policy = Policy(observers=observers, prices=TokenPrice(1, 2), **options)
    return plain, measure_method(
        respond_with_headers, "chat", CallSettings(policy, "h:1", "k", False), is_blocking=True
    )


class PreparedChunks:
    """Chunks that cost nothing to make, in place of the package's own decoder."""

    def __init__(self) -> None:
        from openai.types.chat import ChatCompletionChunk

        self.chunks = [ChatCompletionChunk.model_validate(CHUNK)] * CHUNKS

    def __iter__(self) -> object:
        yield from self.chunks

    async def __aiter__(self) -> object:
        for chunk in self.chunks:
            yield chunk


def observe_chunks(chunks: PreparedChunks) -> object:
    """Return the stream as an application gets it from an instrumented client."""
    from loadgen_sdk.app.call import CallSettings
    from loadgen_sdk.app.observed_call import ObservedCall
    from loadgen_sdk.app.observed_stream import ObservedEvents
    from loadgen_sdk.app.policy import Policy

    settings = CallSettings(policy=Policy(), server="", key="", requests_usage=False)
    return ObservedEvents(chunks, ObservedCall("chat", settings, {"stream": True}))


def time_chunk(*, is_observed: bool) -> Callable[[], float]:
    """Return a function that measures the mean CPU-seconds of a chunk of a blocking stream.

    With `is_observed`, the SDK observes the stream; otherwise it is the package's bare stream.
    """
    chunks = PreparedChunks()

    def measure() -> float:
        """Read a stream of CHUNKS chunks and return the mean CPU-seconds of one."""
        stream: Any = observe_chunks(chunks) if is_observed else chunks
        start = time.thread_time()
        for _ in stream:
            pass
        return (time.thread_time() - start) / CHUNKS

    return measure


def time_async_chunk(runner: asyncio.Runner, *, is_observed: bool) -> Callable[[], float]:
    """Return a function that measures the mean CPU-seconds of a chunk of an async stream.

    With `is_observed`, the SDK observes the stream; otherwise it is the package's bare stream.
    """
    chunks = PreparedChunks()

    async def read_stream() -> float:
        """Read a stream of CHUNKS chunks and return the mean CPU-seconds of one."""
        stream: Any = observe_chunks(chunks) if is_observed else chunks
        start = time.thread_time()
        async for _ in stream:
            pass
        return (time.thread_time() - start) / CHUNKS

    def measure() -> float:
        """Read the stream in the event loop and return the mean CPU-seconds of a chunk."""
        return runner.run(read_stream())

    return measure


def measure_import_ms(statement: str, rounds: int) -> float:
    """Return the CPU-ms that a statement adds to a fresh interpreter: the smallest of several."""

    def run_code(code: str) -> float:
        """Return the CPU-seconds of an interpreter that runs this code."""
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", code], check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    return (
        min(run_code(statement) for _ in range(rounds))
        - min(run_code("pass") for _ in range(rounds))
    ) * 1e3


def create_prometheus() -> Any:
    """Return an observer for Prometheus with one label."""
    from loadgen_sdk import Prometheus
    from prometheus_client import CollectorRegistry

    return Prometheus(CollectorRegistry(), labels=("feature",))


def create_telemetry() -> object:
    """Return an OpenTelemetry observer with the SDK's own providers, as in an application.

    Spans are sampled and dropped.
    """
    from loadgen_sdk import OpenTelemetry
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader
    from opentelemetry.sdk.trace import TracerProvider

    return OpenTelemetry(
        meter_provider=MeterProvider([InMemoryMetricReader()]), tracer_provider=TracerProvider()
    )


def measure_end_of_stream_s(observer: Any) -> float:
    """Return the seconds that `observer` takes at the end of a stream of 2,000 chunks.

    The event loop stands still for so long.
    """
    from loadgen_sdk import Measurement

    measurement = Measurement(
        api="chat",
        streamed=True,
        status="ok",
        started=0,
        started_unix_ns=1,
        sent=0,
        first_token=1,
        last_token=2000,
        end=2000,
        done=2000,
        instants=tuple(range(1, 2001)),
        output_tokens=2000,
        token_source="server",
    )
    smallest_s = float("inf")
    for _ in range(50):
        start = time.thread_time()
        observer(measurement)
        smallest_s = min(smallest_s, time.thread_time() - start)

    return smallest_s


CHILD_PROCESSES = 4


class ThrottleLoad:
    """Calls through one throttle, as fast as it allows, for `seconds` after the creation."""

    def __init__(self, throttle: Throttle, seconds: float, tokens: int) -> None:
        self._throttle = throttle
        self._tokens = tokens
        self._end_s = time.monotonic() + seconds

    def count_calls(self) -> int:
        """Call in this thread until the time is over, and return the number of calls."""
        calls = 0
        with contextlib.suppress(ThrottleTimeout):
            while (left_s := self._end_s - time.monotonic()) > 0:
                permit = self._throttle.acquire_blocking(tokens=self._tokens, max_wait_s=left_s)
                permit.done(self._tokens)
                calls += 1
        return calls

    async def count_calls_of_task(self) -> int:
        """Call in this task until the time is over, and return the number of calls."""
        calls = 0
        with contextlib.suppress(ThrottleTimeout):
            while (left_s := self._end_s - time.monotonic()) > 0:
                permit = await self._throttle.acquire(tokens=self._tokens, max_wait_s=left_s)
                permit.done(self._tokens)
                calls += 1
        return calls

    def count_in_tasks(self) -> int:
        """Return the number of calls of eight tasks."""

        async def run_tasks() -> list[int]:
            return await asyncio.gather(*(self.count_calls_of_task() for _ in range(8)))

        return sum(asyncio.run(run_tasks()))

    def count_in_threads(self) -> int:
        """Return the number of calls of four threads."""
        with ThreadPoolExecutor(4) as pool:
            futures = [pool.submit(self.count_calls) for _ in range(4)]
        return sum(future.result() for future in futures)

    def count_in_processes(self) -> int:
        """Return the number of calls of four child processes, which share the limits by a file.

        The children are forked, so that they inherit this throttle and the end of the load.
        """
        context = multiprocessing.get_context("fork")
        counts = context.SimpleQueue()

        children = [
            context.Process(target=lambda: counts.put(self.count_calls()))
            for _ in range(CHILD_PROCESSES)
        ]
        for child in children:
            child.start()

        for child in children:
            child.join()
            assert child.exitcode == 0, "a child process failed"

        return sum(counts.get() for _ in children)


def measure_throttle(callers: str, limit: str, seconds: float, tokens: int) -> float:
    """Return the error of a throttle's rate as a fraction: 0.01 is 1 % too many calls.

    Args:
        callers: What calls at the same time: "threads", "asyncio" or "processes".
        limit: An option of `Throttle`, such as "requests=50/s".
        seconds: How long the calls last.
        tokens: The tokens that each call reserves; 0 for a limit of requests.
    """
    kind, rate = limit.split("=")
    options: dict[str, Any] = {kind: rate}
    if callers == "processes":
        options["shared"] = f"{tempfile.mkdtemp()}/limits"

    amount, _, unit = rate.partition("/")
    amount_per_s = float(amount) / {"s": 1, "min": 60}[unit]
    calls_per_s = amount_per_s / (tokens or 1)
    load = ThrottleLoad(Throttle(burst_s=0, **options), seconds, tokens)
    count_calls_by = {
        "asyncio": load.count_in_tasks,
        "threads": load.count_in_threads,
        "processes": load.count_in_processes,
    }
    calls = count_calls_by[callers]()

    return calls / (calls_per_s * seconds) - 1


class ThrottleCase(NamedTuple):
    """A limit as an option of `Throttle` takes it, and the tokens that each call reserves."""

    limit: str
    tokens: int


THROTTLE_CASES = {
    "rps": ThrottleCase("requests=50/s", tokens=0),
    "rpm": ThrottleCase("requests=600/min", tokens=0),
    "tpm": ThrottleCase("tokens=60000/min", tokens=100),
}


def measure_throttles(seconds: float) -> dict[str, float]:
    """Return the error of the rate of each throttle, as a fraction of its limit.

    A throttle limits requests per second (rps), requests per minute (rpm) or tokens per minute
    (tpm). Threads, asyncio tasks and several processes use each of them for `seconds`. The keys are
    such as "rps, threads".
    """
    errors = {}
    for callers in ("threads", "asyncio", "processes"):
        for name, case in THROTTLE_CASES.items():
            errors[f"{name}, {callers}"] = measure_throttle(
                callers, case.limit, seconds, case.tokens
            )
    return errors


class TimedPair(NamedTuple):
    """The same work without the SDK and with it.

    Both functions do the work `units` times and return the mean CPU-seconds of one. `limit_us` is
    the largest time that the SDK may add to one.
    """

    name: str
    limit_us: float
    units: int
    without_sdk: Callable[[], float]
    with_sdk: Callable[[], float]


def create_pairs(runner: asyncio.Runner, measurements: list[Any]) -> list[TimedPair]:
    """Return the work that is timed and whose instructions are counted.

    The SDK appends what it measures to `measurements`.
    """
    return [
        *create_call_pairs(runner, measurements),
        *create_stub_pairs(measurements),
        TimedPair(
            "a chunk, blocking",
            CHUNK_LIMIT_US,
            CHUNKS,
            time_chunk(is_observed=False),
            time_chunk(is_observed=True),
        ),
        TimedPair(
            "a chunk, async",
            CHUNK_LIMIT_US,
            CHUNKS,
            time_async_chunk(runner, is_observed=False),
            time_async_chunk(runner, is_observed=True),
        ),
    ]


def create_call_pairs(runner: asyncio.Runner, measurements: list[Any]) -> list[TimedPair]:
    """Return the pairs whose calls go through the whole openai package."""
    blocking, asynchronous = create_clients()
    prices = TokenPrice(1, 2)
    measured_blocking = instrument(blocking, measurements.append, prices=prices)
    measured_async = instrument(asynchronous, measurements.append, prices=prices)

    return [
        TimedPair(
            "a call, blocking",
            CALL_LIMIT_US,
            CALLS,
            time_call(blocking.chat.completions.create),
            time_call(measured_blocking.chat.completions.create),
        ),
        TimedPair(
            "a call, async",
            CALL_LIMIT_US,
            CALLS,
            time_async_call(asynchronous.chat.completions.create, runner),
            time_async_call(measured_async.chat.completions.create, runner),
        ),
    ]


def create_stub_pairs(measurements: list[Any]) -> list[TimedPair]:
    """Return the pairs whose calls are answered by a stub, which leaves the time of the SDK."""
    long_prompt = "many words " * 4000
    return [
        TimedPair(
            "a call, ours alone",
            CALL_LIMIT_US,
            STUB_CALLS,
            *time_stub_calls(create_stubs(measurements.append)),
        ),
        TimedPair(
            "the same with labels for Prometheus",
            CALL_LIMIT_US,
            STUB_CALLS,
            *time_stub_calls(create_stubs(create_prometheus(), labels={"feature": "a"})),
        ),
        TimedPair(
            "the same with OpenTelemetry",
            OTEL_LIMIT_US,
            STUB_CALLS,
            *time_stub_calls(create_stubs(create_telemetry())),
        ),
        TimedPair(
            "the same with the record of a prompt of 44,000 characters",
            RECORD_LIMIT_US,
            STUB_CALLS,
            *time_stub_calls(create_stubs(record=record_shape(os.devnull)), long_prompt),
        ),
    ]


class Overhead(NamedTuple):
    """The CPU time that the SDK adds to one unit of work (a call or a chunk), in microseconds.

    `base_us` is the time without the SDK, and None where it is not measured. `limit_us` is None if
    the added time has no limit.
    """

    name: str
    base_us: float | None
    added_us: float
    limit_us: float | None

    @property
    def is_over_limit(self) -> bool:
        """Return whether the SDK adds more than the limit allows."""
        return self.limit_us is not None and self.added_us > self.limit_us


def measure_overheads(rounds: int) -> list[Overhead]:
    """Return the CPU time that the SDK adds to each kind of work."""
    with asyncio.Runner() as runner:
        pairs = measure_pairs(rounds, runner)
        real_calls = measure_real_calls(rounds, runner)
    return [*pairs, *real_calls, *measure_observers()]


def measure_pairs(rounds: int, runner: asyncio.Runner) -> list[Overhead]:
    """Time each pair with and without the SDK, and return the differences."""
    measurements: list[Any] = []
    overheads = []
    for pair in create_pairs(runner, measurements):
        base_s, measured_s = smallest_of_both(pair.without_sdk, pair.with_sdk, rounds)
        measurements.clear()  # so that memory does not grow with the rounds
        added_us = (measured_s - base_s) * 1e6
        overheads.append(Overhead(pair.name, base_s * 1e6, added_us, pair.limit_us))

    return overheads


def measure_real_calls(rounds: int, runner: asyncio.Runner) -> list[Overhead]:
    """Return what the SDK adds to a blocking and an async call, measured inside the calls."""
    measurements: list[Any] = []
    wrap_client = partial(instrument, on_measurement=measurements.append, prices=TokenPrice(1, 2))
    blocking_us = measure_added_us(wrap_client, None, rounds)
    async_us = measure_added_us(wrap_client, runner, rounds)

    return [
        Overhead("inside a real call, blocking", None, blocking_us, CALL_LIMIT_US),
        Overhead("inside a real call, async", None, async_us, CALL_LIMIT_US),
    ]


def measure_observers() -> list[Overhead]:
    """Return what Prometheus and OpenTelemetry cost outside the calls that they observe."""
    end_of_stream_us = measure_end_of_stream_s(create_telemetry()) * 1e6
    return [
        Overhead(
            "counted for Prometheus, off the caller's thread", None, measure_prometheus_us(), None
        ),
        Overhead("OpenTelemetry at the end of 2,000 chunks", None, end_of_stream_us, OTEL_LIMIT_US),
    ]


FIRST_FORK = -1  # index of the first function that is forked; it is not counted


def count_in_children(rounds: int) -> None:
    """Run each function with `rounds` and with twice as many rounds, each in a child process.

    This runs under valgrind, which prints the number of instructions of each process on its stderr.
    One line "PID INDEX ROUNDS" per child on stdout says which function ran in it. The functions are
    the two sides of each pair in turn, from index 0. One that does nothing runs first (with index
    FIRST_FORK) and last.
    """
    with asyncio.Runner() as runner:
        functions: list[Callable[[], float]] = []
        for pair in create_pairs(runner, []):
            functions += [pair.without_sdk, pair.with_sdk]

        for measure in functions:
            measure()  # so that all caches are warm

        gc.disable()

        def do_nothing() -> float:
            return 0.0

        # Children also count what happens in the parent between two forks. The last function, which
        # does nothing, measures that. More happens before the first fork, so it is not counted.
        for index, measure in enumerate([do_nothing, *functions, do_nothing], FIRST_FORK):
            for repetitions in (rounds, 2 * rounds):
                child = os.fork()
                if child == 0:
                    run_in_child(measure, repetitions)
                os.waitpid(child, 0)
                print(child, index, repetitions, flush=True)


def run_in_child(measure: Callable[[], float], repetitions: int) -> NoReturn:
    """Call a function many times and end this process, which was forked for it.

    The SDK's background thread is not started, so that only the caller's instructions are counted.
    """
    from loadgen_sdk.app.background import _State

    _State.is_started = True
    for _ in range(repetitions):
        measure()
    os._exit(0)


class InstructionCount(NamedTuple):
    """Machine instructions of one unit of work: without the SDK, and those that it adds."""

    name: str
    base: float
    added: float


def count_instructions(rounds: int) -> list[InstructionCount]:
    """Return the machine instructions of each pair, as valgrind counts them.

    valgrind counts the instructions of a whole process. So each function runs in one child process
    for `rounds` rounds and in another for twice as many; see `count_in_children`. The difference of
    the two is what `rounds` rounds cost, without the start of the process.
    """
    counts = count_by_function(run_under_valgrind(rounds), rounds)
    *function_counts, fork_overhead = counts

    with asyncio.Runner() as runner:
        pairs = create_pairs(runner, [])

    results = []
    for pair_index, pair in enumerate(pairs):
        base = function_counts[2 * pair_index]
        with_sdk = function_counts[2 * pair_index + 1]
        units = rounds * pair.units
        results.append(
            InstructionCount(pair.name, (base - fork_overhead) / units, (with_sdk - base) / units)
        )

    return results


def run_under_valgrind(rounds: int) -> subprocess.CompletedProcess[str]:
    """Run `count_in_children` in a Python under valgrind and return what both print."""
    folder = os.path.dirname(os.path.abspath(__file__))
    code = (
        f"import sys; sys.path.insert(0, {folder!r}); "
        f"import sdk_overhead; sdk_overhead.count_in_children({rounds})"
    )
    valgrind = [
        "valgrind",
        "--tool=cachegrind",
        "--cache-sim=no",
        "--cachegrind-out-file=/dev/null",
    ]

    return subprocess.run(
        [*valgrind, sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONHASHSEED": "0"},
    )


def count_by_function(completed: subprocess.CompletedProcess[str], rounds: int) -> list[int]:
    """Return the instructions of `rounds` rounds of each function, in the order of their index.

    The output of `count_in_children` maps processes to functions ("4711 0 20": the process 4711 ran
    function 0 for 20 rounds). valgrind prints "==4711== I refs: 1,234,567" for each process.
    """
    instructions_by_pid = {
        int(pid): int(count.replace(",", ""))
        for pid, count in re.findall(r"==(\d+)==\s*I\s+refs:\s+([\d,]+)", completed.stderr)
    }
    instructions: dict[tuple[int, int], int] = {}
    for line in completed.stdout.splitlines():
        pid, index, repetitions = map(int, line.split())
        instructions[index, repetitions] = instructions_by_pid[pid]

    indices = sorted({index for index, _ in instructions if index != FIRST_FORK})
    return [instructions[index, 2 * rounds] - instructions[index, rounds] for index in indices]


def print_overheads(overheads: list[Overhead]) -> None:
    """Print the CPU time without the SDK, the time that it adds, and the limit of each row."""
    rows = [
        [
            overhead.name,
            "" if overhead.base_us is None else f"{overhead.base_us:.2f}",
            f"{overhead.added_us:.2f}",
            "" if overhead.limit_us is None else f"{overhead.limit_us:g}",
        ]
        for overhead in overheads
    ]
    print(rig.format_table(["CPU-µs", "without", "added", "at most"], rows) + "\n")


IMPORTS = (
    "import msgspec",
    "import loadgen_sdk",
    "from loadgen_sdk import Client",
    "from loadgen_sdk import instrument",
    "import loadgen",
    "import openai",
)


def measure_imports(rounds: int) -> dict[str, float]:
    """Print and return the CPU-ms of each import statement in a fresh interpreter."""
    cpu_ms_by_statement = {statement: measure_import_ms(statement, rounds) for statement in IMPORTS}
    rows = [[f"`{statement}`", f"{ms:.1f}"] for statement, ms in cpu_ms_by_statement.items()]
    print(rig.format_table(["statement", "CPU-ms"], rows))
    return cpu_ms_by_statement


def print_instructions(rounds: int) -> None:
    """Count the machine instructions of each pair with valgrind and print them in thousands."""
    rows = [
        [count.name, f"{count.base / 1e3:,.1f}", f"{count.added / 1e3:,.1f}"]
        for count in count_instructions(rounds)
    ]
    print("\n" + rig.format_table(["thousand instructions", "without", "added"], rows))


def print_throttle_errors(errors: dict[str, float]) -> None:
    """Print how far each throttle is off its rate."""
    rows = [[name, f"{error:+.2%}"] for name, error in errors.items()]
    print("\n" + rig.format_table(["throttle", "off its rate by"], rows))


def main() -> int:
    """Print the tables; return 1 if something is above its limit."""
    args = parse_command_line()

    # The objects of the imports are not examined by collections during the measurement.
    gc.collect()
    gc.freeze()
    overheads = measure_overheads(args.rounds)
    print(f"openai {openai.__version__}\n")
    print_overheads(overheads)
    import_ms = measure_imports(args.imports)
    is_over = any(overhead.is_over_limit for overhead in overheads)
    is_over |= import_ms["import loadgen_sdk"] > IMPORT_LIMIT * import_ms["import msgspec"]

    if args.instructions:
        print_instructions(args.instructions)

    if args.throttle_seconds:
        throttle_errors = measure_throttles(args.throttle_seconds)
        print_throttle_errors(throttle_errors)
        is_over |= any(abs(error) > MAX_THROTTLE_ERROR for error in throttle_errors.values())

    return 0 if args.smoke or not is_over else 1


def parse_command_line() -> argparse.Namespace:
    """Parse the options of the script."""
    parser = rig.create_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument(
        "--imports", type=int, default=7, help="starts of an interpreter, for each import"
    )
    parser.add_argument(
        "--throttle-seconds", type=float, default=0, help="also measure the rates of throttles"
    )
    parser.add_argument(
        "--instructions",
        type=int,
        default=0,
        help="also count machine instructions with valgrind, in so many rounds",
    )

    return rig.parse_arguments(parser, rounds=2, imports=1, throttle_seconds=0.1)


if __name__ == "__main__":
    sys.exit(main())
