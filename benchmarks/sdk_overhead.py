"""How much CPU time does `instrument` add to an application's call and to each streamed chunk?

    python benchmarks/sdk_overhead.py [--throttle-seconds 10] [--instructions 1]

The same client is measured without it. The transport is a stub inside the process, so that only the
client's own work counts, as CPU time of the calling thread. Both sides alternate, and the smallest
of many rounds counts, because other work of the machine only adds time. With --instructions,
valgrind counts machine instructions, which other work does not change; this takes minutes. The
script prints microseconds with their limits, import times, and the errors of throttles.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import re
import resource
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

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


def smallest_of_both(
    plain: Callable[[], float], measured: Callable[[], float], rounds: int
) -> tuple[float, float]:
    """Return the smallest seconds per unit without and with us, from alternating rounds."""
    smallest = [float("inf"), float("inf")]
    for _ in range(rounds):
        for side, measure in enumerate((plain, measured)):
            smallest[side] = min(smallest[side], measure())
    return smallest[0], smallest[1]


def time_call(create: Any) -> Callable[[], float]:
    """Return a function that times a blocking call, in seconds."""
    messages = [{"role": "user", "content": "Hello there, how are you?"}]

    def measure() -> float:
        """Return the seconds of one call."""
        start = time.thread_time()
        for _ in range(CALLS):
            create(model="m", messages=messages)
        return (time.thread_time() - start) / CALLS

    return measure


def time_async_call(create: Any, runner: asyncio.Runner) -> Callable[[], float]:
    """Return a function that times an async call, in seconds."""
    messages = [{"role": "user", "content": "Hello there, how are you?"}]

    async def calls() -> float:
        """Return the seconds of one call."""
        start = time.thread_time()
        for _ in range(CALLS):
            await create(model="m", messages=messages)
        return (time.thread_time() - start) / CALLS

    return lambda: runner.run(calls())


def measure_added_us(
    wrap_client: Callable[[Any], Any], runner: asyncio.Runner | None, rounds: int
) -> float:
    """Return the microseconds that are added before and after the package's own method.

    They are taken inside real calls, as the smallest of all, so that the noise of two long times is
    not part of it.
    """
    package = __import__("openai.resources.chat.completions", fromlist=["_"])
    method_class = package.Completions if runner is None else package.AsyncCompletions
    original, timestamps_ns = method_class.create, [0, 0]

    def record_times(*args: Any, **kwargs: Any) -> Any:
        timestamps_ns[0] = time.thread_time_ns()
        response = original(*args, **kwargs)
        timestamps_ns[1] = time.thread_time_ns()
        return response

    async def record_times_async(*args: Any, **kwargs: Any) -> Any:
        timestamps_ns[0] = time.thread_time_ns()
        response = await original(*args, **kwargs)
        timestamps_ns[1] = time.thread_time_ns()
        return response

    method_class.create = record_times if runner is None else record_times_async
    create = wrap_client(create_clients()[runner is not None]).chat.completions.create
    messages = [{"role": "user", "content": "Hello there, how are you?"}]

    def call_blocking() -> int:
        start_ns = time.thread_time_ns()
        create(model="m", messages=messages)
        return timestamps_ns[0] - start_ns + time.thread_time_ns() - timestamps_ns[1]

    async def call_async() -> int:
        start_ns = time.thread_time_ns()
        await create(model="m", messages=messages)
        return timestamps_ns[0] - start_ns + time.thread_time_ns() - timestamps_ns[1]

    try:
        return (
            min(
                (runner.run(call_async()) if runner else call_blocking())
                for _ in range(rounds * CALLS)
            )
            / 1e3
        )
    finally:
        method_class.create = original


def measure_prometheus_us() -> float:
    """Return the CPU of the background thread per call that Prometheus counts with a label."""
    from loadgen_sdk import Measurement

    observer, measurement = (
        create_prometheus(),
        Measurement(
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
        ),
    )
    smallest_s = float("inf")
    for _ in range(50):
        for _ in range(99):
            observer(measurement)
        start = time.thread_time_ns()
        observer._backlog.process_all()
        smallest_s = min(smallest_s, (time.thread_time_ns() - start) / 99)
    return smallest_s / 1e3


def time_stub_call(
    create: Callable[..., Any], content: str = "Hello there, how are you?"
) -> Callable[[], float]:
    """Return a function that times a call whose package responds at once.

    Only the time of the SDK counts then.
    """
    messages = [{"role": "user", "content": content}]

    def measure() -> float:
        """Return the seconds of one call."""
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

    def respond_with_headers(**_: Any) -> Any:
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

    def __iter__(self) -> Any:
        yield from self.chunks

    async def __aiter__(self) -> Any:
        for chunk in self.chunks:
            yield chunk


def time_chunk(measured: bool) -> Callable[[], float]:
    """Return a function that times one chunk of a blocking stream, in seconds."""
    from loadgen_sdk.app.call import CallSettings
    from loadgen_sdk.app.observed_call import ObservedCall
    from loadgen_sdk.app.observed_stream import ObservedEvents
    from loadgen_sdk.app.policy import Policy

    chunks = PreparedChunks()

    def measure() -> float:
        """Return the seconds of one chunk."""
        source: Any = chunks
        if measured:
            source = ObservedEvents(
                source,
                ObservedCall("chat", CallSettings(Policy(), "", "", False), {"stream": True}),
            )
        start = time.thread_time()
        for _ in source:
            pass
        return (time.thread_time() - start) / CHUNKS

    return measure


def time_async_chunk(measured: bool, runner: asyncio.Runner) -> Callable[[], float]:
    """Return a function that times one chunk of an async stream, in seconds."""
    from loadgen_sdk.app.call import CallSettings
    from loadgen_sdk.app.observed_call import ObservedCall
    from loadgen_sdk.app.observed_stream import ObservedEvents
    from loadgen_sdk.app.policy import Policy

    chunks = PreparedChunks()

    async def run() -> float:
        """Return the seconds of one chunk."""
        source: Any = chunks
        if measured:
            source = ObservedEvents(
                source,
                ObservedCall("chat", CallSettings(Policy(), "", "", False), {"stream": True}),
            )
        start = time.thread_time()
        async for _ in source:
            pass
        return (time.thread_time() - start) / CHUNKS

    return lambda: runner.run(run())


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


def create_telemetry() -> Any:
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
        """Return the number of calls of four child processes, which share the limits by a file."""
        read_end, write_end = os.pipe()
        children = []
        for _ in range(4):
            child = os.fork()
            if child == 0:
                os.write(write_end, struct.pack("q", self.count_calls()))
                os._exit(0)
            children.append(child)
        for child in children:
            os.waitpid(child, 0)
        os.close(write_end)
        with os.fdopen(read_end, "rb") as pipe:
            return sum(calls for (calls,) in struct.iter_unpack("q", pipe.read()))


def measure_throttle(concurrency_kind: str, limit: str, seconds: float, tokens: int) -> float:
    """Return how far a throttle is off its rate, as a fraction, after the first period."""
    kind, rate = limit.split("=")
    options: dict[str, Any] = {kind: rate}
    if concurrency_kind == "processes":
        options["shared"] = f"{tempfile.mkdtemp()}/limits"
    amount, _, unit = rate.partition("/")
    calls_per_s = float(amount) / {"s": 1, "min": 60}[unit] / (tokens or 1)
    load = ThrottleLoad(Throttle(burst_s=0, **options), seconds, tokens)
    count_calls = {
        "asyncio": load.count_in_tasks,
        "threads": load.count_in_threads,
        "processes": load.count_in_processes,
    }
    return count_calls[concurrency_kind]() / (calls_per_s * seconds) - 1


def measure_throttles(seconds: float) -> dict[str, float]:
    """Return how far off its rate each kind of throttle is, by the way it is used."""
    cases = {
        "rps": ("requests=50/s", 0),
        "rpm": ("requests=600/min", 0),
        "tpm": ("tokens=60000/min", 100),
    }
    return {
        f"{name}, {concurrency_kind}": measure_throttle(concurrency_kind, limit, seconds, tokens)
        for concurrency_kind in ("threads", "asyncio", "processes")
        for name, (limit, tokens) in cases.items()
    }


class TimedPair(NamedTuple):
    """The same work without us and with us.

    `units` is how often one measurement of either does it.
    """

    name: str
    limit: float
    units: int
    plain: Callable[[], float]
    ours: Callable[[], float]


def create_pairs(runner: asyncio.Runner, measurements: list[Any]) -> list[TimedPair]:
    """Return what is timed and counted in instructions. `told` receives the measurements."""
    blocking, asynchronous = create_clients()
    instrument_options: dict[str, Any] = {"prices": TokenPrice(1, 2)}
    messages = "many words " * 4000
    recorded = time_stub_calls(create_stubs(record=record_shape(os.devnull)), messages)
    return [
        TimedPair(
            "a call, blocking",
            CALL_LIMIT_US,
            CALLS,
            time_call(blocking.chat.completions.create),
            time_call(
                instrument(
                    blocking, measurements.append, **instrument_options
                ).chat.completions.create
            ),
        ),
        TimedPair(
            "a call, async",
            CALL_LIMIT_US,
            CALLS,
            time_async_call(asynchronous.chat.completions.create, runner),
            time_async_call(
                instrument(
                    asynchronous, measurements.append, **instrument_options
                ).chat.completions.create,
                runner,
            ),
        ),
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
            *recorded,
        ),
        TimedPair("a chunk, blocking", CHUNK_LIMIT_US, CHUNKS, time_chunk(False), time_chunk(True)),
        TimedPair(
            "a chunk, async",
            CHUNK_LIMIT_US,
            CHUNKS,
            time_async_chunk(False, runner),
            time_async_chunk(True, runner),
        ),
    ]


def measure_pairs(rounds: int) -> list[tuple[str, float | None, float, float | None]]:
    """Return name, microseconds without us, microseconds added and limit of each item."""
    measurements: list[Any] = []
    results: list[tuple[str, float | None, float, float | None]] = []
    with asyncio.Runner() as runner:
        for name, limit, _, plain, ours in create_pairs(runner, measurements):
            base_s, measured_s = smallest_of_both(plain, ours, rounds)
            measurements.clear()
            results.append((name, base_s * 1e6, (measured_s - base_s) * 1e6, limit))
        measure = partial(instrument, on_measurement=measurements.append, prices=TokenPrice(1, 2))
        for kind, event_loop in (("blocking", None), ("async", runner)):
            results.append(
                (
                    f"inside a real call, {kind}",
                    None,
                    measure_added_us(measure, event_loop, rounds),
                    CALL_LIMIT_US,
                )
            )
    results.append(
        ("counted for Prometheus, off the caller's thread", None, measure_prometheus_us(), None)
    )
    results.append(
        (
            "OpenTelemetry at the end of 2,000 chunks",
            None,
            measure_end_of_stream_s(create_telemetry()) * 1e6,
            OTEL_LIMIT_US,
        )
    )
    return results


def count_in_children(rounds: int) -> None:
    """Run each measurement once and again with more rounds, in child processes.

    It runs under valgrind, which prints the instructions of each process.
    """
    from loadgen_sdk.app.background import _State

    with asyncio.Runner() as runner:
        functions = [side for pair in create_pairs(runner, []) for side in (pair.plain, pair.ours)]
        for measure in functions:
            measure()  # all are warm
        gc.disable()

        def do_nothing() -> float:
            return 0.0

        # What lies between two forks is taken off each. The first fork has more there: it is not
        # counted.
        for number, measure in enumerate([do_nothing, *functions, do_nothing], -1):
            for times in (rounds, 2 * rounds):
                if (child := os.fork()) == 0:
                    _State.is_started = (
                        True  # no thread in the background: the caller's instructions alone
                    )
                    for _ in range(times):
                        measure()
                    os._exit(0)
                os.waitpid(child, 0)
                print(child, number, times, flush=True)


def count_instructions(rounds: int) -> list[tuple[str, float, float]]:
    """Return name, machine instructions without us and added instructions of each item."""
    code = (
        f"import sys; sys.path.insert(0, {os.path.dirname(os.path.abspath(__file__))!r}); "
        f"import sdk_overhead as own"
    )
    command = ["valgrind", "--tool=cachegrind", "--cache-sim=no", "--cachegrind-out-file=/dev/null"]
    completed = subprocess.run(
        [*command, sys.executable, "-c", f"{code}; own.count_in_children({rounds})"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONHASHSEED": "0"},
    )
    lines = re.findall(r"==(\d+)==\s*I\s+refs:\s+([\d,]+)", completed.stderr)
    instructions_by_process = {int(process): int(refs.replace(",", "")) for process, refs in lines}
    refs = {}
    for child, number, times in (map(int, line.split()) for line in completed.stdout.splitlines()):
        refs[number, times] = instructions_by_process[child]
    *counts, overhead = (
        refs[number, 2 * rounds] - refs[number, rounds] for number in range(len(refs) // 2 - 1)
    )
    with asyncio.Runner() as runner:
        names = [(pair.name, rounds * pair.units) for pair in create_pairs(runner, [])]
    results = []
    for (name, units), plain, ours in zip(names, counts[::2], counts[1::2], strict=True):
        results.append((name, (plain - overhead) / units, (ours - plain) / units))
    return results


def main() -> int:
    """Print the tables; return 1 if something is above its limit."""
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
        help="also count those, in so many rounds, by valgrind",
    )
    args = rig.parse_arguments(parser, rounds=2, imports=1, throttle_seconds=0.1)
    gc.collect()
    gc.freeze()
    results = measure_pairs(args.rounds)
    rows = [
        [
            name,
            "" if plain is None else f"{plain:.2f}",
            f"{added:.2f}",
            "" if limit is None else f"{limit:g}",
        ]
        for name, plain, added, limit in results
    ]
    print(f"openai {openai.__version__}\n")
    print(rig.format_table(["CPU-µs", "without", "added", "at most"], rows) + "\n")
    statements = ["import msgspec", "import loadgen_sdk", "from loadgen_sdk import Client"]
    statements += ["from loadgen_sdk import instrument", "import loadgen", "import openai"]
    imports = {statement: measure_import_ms(statement, args.imports) for statement in statements}
    print(
        rig.format_table(
            ["statement", "CPU-ms"],
            [[f"`{name}`", f"{cpu_ms:.1f}"] for name, cpu_ms in imports.items()],
        )
    )
    if args.instructions:
        thousands = [
            [name, f"{plain / 1e3:,.1f}", f"{added / 1e3:,.1f}"]
            for name, plain, added in count_instructions(args.instructions)
        ]
        print("\n" + rig.format_table(["thousand instructions", "without", "added"], thousands))
    is_over = any(limit is not None and added > limit for _, _, added, limit in results)
    is_over |= imports["import loadgen_sdk"] > IMPORT_LIMIT * imports["import msgspec"]
    if args.throttle_seconds:
        throttle_errors = measure_throttles(args.throttle_seconds)
        print(
            "\n"
            + rig.format_table(
                ["throttle", "off its rate by"],
                [[name, f"{error:+.2%}"] for name, error in throttle_errors.items()],
            )
        )
        is_over |= any(abs(error) > MAX_THROTTLE_ERROR for error in throttle_errors.values())
    return 0 if args.smoke or not is_over else 1


if __name__ == "__main__":
    sys.exit(main())
