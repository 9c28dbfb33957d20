"""What `instrument` adds to an application's call and to each chunk of its stream, against the same client without it.

The transport is a stub inside the process, so that only the client's own work is counted, as CPU time of the calling
thread; both sides alternate, and the smallest of many rounds counts: the machine's other work only ever adds.

    python benchmarks/sdk_overhead.py [--throttle-seconds 10] [--instructions 1]

Instructions are counted by valgrind: other work on the machine does not change them. It takes minutes.
"""

from __future__ import annotations

import asyncio
import gc
import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import openai
import rig
from loadgen_sdk import TokenPrice, instrument, record_shape

CALL_LIMIT_US, CHUNK_LIMIT_US, OTEL_LIMIT_US, RECORD_LIMIT_US = 10.0, 0.5, 100.0, 50.0
IMPORT_LIMIT = 1.5  # times the import of msgspec alone
THROTTLE_LIMIT = 0.02
CHUNKS = 500
CALLS = 10
OWN_CALLS = 200

ANSWER = {
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


def http() -> Any:
    """The HTTP library that this version of the package is built on."""
    return __import__("httpx2" if "httpx2" in sys.modules else "httpx")


def answer(request: Any) -> Any:
    return http().Response(200, json=ANSWER, headers={"x-request-id": "r"})


def clients() -> tuple[Any, Any]:
    library = http()
    blocking = openai.OpenAI(
        api_key="k", http_client=library.Client(transport=library.MockTransport(answer))
    )
    waiting = openai.AsyncOpenAI(
        api_key="k", http_client=library.AsyncClient(transport=library.MockTransport(answer))
    )
    return blocking, waiting


def differences(
    plain: Callable[[], float], ours: Callable[[], float], rounds: int
) -> tuple[float, float]:
    """(smallest plain, smallest ours), in seconds per unit, from alternating rounds."""
    best = [float("inf"), float("inf")]
    for _ in range(rounds):
        for side, measure in enumerate((plain, ours)):
            best[side] = min(best[side], measure())
    return best[0], best[1]


def per_call(create: Any) -> Callable[[], float]:
    messages = [{"role": "user", "content": "Hello there, how are you?"}]

    def measure() -> float:
        start = time.thread_time()
        for _ in range(CALLS):
            create(model="m", messages=messages)
        return (time.thread_time() - start) / CALLS

    return measure


def per_call_async(create: Any, runner: asyncio.Runner) -> Callable[[], float]:
    messages = [{"role": "user", "content": "Hello there, how are you?"}]

    async def calls() -> float:
        start = time.thread_time()
        for _ in range(CALLS):
            await create(model="m", messages=messages)
        return (time.thread_time() - start) / CALLS

    return lambda: runner.run(calls())


def inside_a_real_call(
    make: Callable[[Any], Any], runner: asyncio.Runner | None, rounds: int
) -> float:
    """Microseconds between the application's call and the package's own method, before and after it, in real calls.

    Not a difference of two long times, so that the noise of the machine is not in it. The smallest of all calls.
    """
    package = __import__("openai.resources.chat.completions", fromlist=["_"])
    kind = package.Completions if runner is None else package.AsyncCompletions
    real, stamps = kind.create, [0, 0]

    def stamped(*args: Any, **kwargs: Any) -> Any:
        stamps[0] = time.thread_time_ns()
        answer = real(*args, **kwargs)
        stamps[1] = time.thread_time_ns()
        return answer

    async def stamped_waiting(*args: Any, **kwargs: Any) -> Any:
        stamps[0] = time.thread_time_ns()
        answer = await real(*args, **kwargs)
        stamps[1] = time.thread_time_ns()
        return answer

    kind.create = stamped if runner is None else stamped_waiting
    create = make(clients()[runner is not None]).chat.completions.create
    messages = [{"role": "user", "content": "Hello there, how are you?"}]

    def blocking() -> int:
        start = time.thread_time_ns()
        create(model="m", messages=messages)
        return stamps[0] - start + time.thread_time_ns() - stamps[1]

    async def waiting() -> int:
        start = time.thread_time_ns()
        await create(model="m", messages=messages)
        return stamps[0] - start + time.thread_time_ns() - stamps[1]

    try:
        return (
            min((runner.run(waiting()) if runner else blocking()) for _ in range(rounds * CALLS))
            / 1e3
        )
    finally:
        kind.create = real


def counted_later_us() -> float:
    """CPU of the background thread for each call that Prometheus counts, with a label."""
    from loadgen_sdk import Measurement

    observer, one = (
        prometheus(),
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
    best = float("inf")
    for _ in range(50):
        for _ in range(99):
            observer(one)
        start = time.thread_time_ns()
        observer._backlog.count_all()
        best = min(best, (time.thread_time_ns() - start) / 99)
    return best / 1e3


def own_call(
    create: Callable[..., Any], content: str = "Hello there, how are you?"
) -> Callable[[], float]:
    """The same where the package answers at once: what is ours alone."""
    messages = [{"role": "user", "content": content}]

    def measure() -> float:
        start = time.thread_time()
        for _ in range(OWN_CALLS):
            create(model="m", messages=messages)
        return (time.thread_time() - start) / OWN_CALLS

    return measure


def own_calls(
    sides: tuple[Any, Any], *content: str
) -> tuple[Callable[[], float], Callable[[], float]]:
    return own_call(sides[0], *content), own_call(sides[1], *content)


def stubs(*observers: Any, **options: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    from loadgen_sdk.app.call import CallSettings
    from loadgen_sdk.app.measured_method import head_arrived, measure_method
    from loadgen_sdk.app.policy import Policy
    from openai.types.chat import ChatCompletion

    made = ChatCompletion.model_validate(ANSWER)
    head = http().Headers(
        {"x-request-id": "r", "content-type": "application/json", "date": "now", "server": "s"}
    )

    def plain(**_: Any) -> Any:
        return made

    def told(**_: Any) -> Any:
        head_arrived(head)
        return made

    manner = Policy(observers=observers, prices=TokenPrice(1, 2), **options)
    return plain, measure_method(
        told, "chat", CallSettings(manner, "h:1", "k", False), blocking=True
    )


class Chunks:
    """Chunks that cost nothing to make, in the place of the package's own decoder."""

    def __init__(self) -> None:
        from openai.types.chat import ChatCompletionChunk

        self.chunks = [ChatCompletionChunk.model_validate(CHUNK)] * CHUNKS

    def __iter__(self) -> Any:
        yield from self.chunks

    async def __aiter__(self) -> Any:
        for chunk in self.chunks:
            yield chunk


def per_chunk(measured: bool) -> Callable[[], float]:
    from loadgen_sdk.app.call import CallSettings
    from loadgen_sdk.app.observed_call import ObservedCall
    from loadgen_sdk.app.observed_stream import ObservedEvents
    from loadgen_sdk.app.policy import Policy

    chunks = Chunks()

    def measure() -> float:
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


def per_chunk_async(measured: bool, runner: asyncio.Runner) -> Callable[[], float]:
    from loadgen_sdk.app.call import CallSettings
    from loadgen_sdk.app.observed_call import ObservedCall
    from loadgen_sdk.app.observed_stream import ObservedEvents
    from loadgen_sdk.app.policy import Policy

    chunks = Chunks()

    async def run() -> float:
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


def import_ms(statement: str, rounds: int) -> float:
    """Of a fresh interpreter, what this statement adds; the smallest of several."""

    def once(code: str) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", code], check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    return (
        min(once(statement) for _ in range(rounds)) - min(once("pass") for _ in range(rounds))
    ) * 1e3


def prometheus() -> Any:
    from loadgen_sdk import Prometheus
    from prometheus_client import CollectorRegistry

    return Prometheus(CollectorRegistry(), labels=("feature",))


def telemetry() -> Any:
    """OpenTelemetry with the SDK's own providers and a reader, as in an application; spans are sampled and dropped."""
    from loadgen_sdk import OpenTelemetry
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader
    from opentelemetry.sdk.trace import TracerProvider

    return OpenTelemetry(
        meter_provider=MeterProvider([InMemoryMetricReader()]), tracer_provider=TracerProvider()
    )


def end_of_stream(observer: Any) -> float:
    """Seconds that `observer` takes at the end of a stream of 2,000 chunks: the loop stands still for them."""
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
    best = float("inf")
    for _ in range(50):
        start = time.thread_time()
        observer(measurement)
        best = min(best, time.thread_time() - start)
    return best


def throttled(way: str, limit: str, seconds: float, tokens: int) -> float:
    """How far from its rate a throttle lets calls through, as a share: over `seconds`, after the first period."""
    import struct
    import tempfile
    import threading

    from loadgen_sdk import Throttle, ThrottleTimeout

    kind, rate = limit.split("=")
    folder = tempfile.mkdtemp()
    wanted: dict[str, Any] = {
        kind: rate,
        "shared": f"{folder}/limits" if way == "processes" else None,
    }
    throttle = Throttle(burst_s=0, **wanted)
    amount, _, unit = rate.partition("/")
    per_s = float(amount) / {"s": 1, "min": 60}[unit] / (tokens or 1)
    start = time.monotonic()

    def thread(counts: list[int]) -> None:
        n = 0
        try:
            while (left := start + seconds - time.monotonic()) > 0:
                throttle.acquire_blocking(tokens=tokens, max_wait_s=left).done(tokens)
                n += 1
        except ThrottleTimeout:
            pass
        counts.append(n)

    async def tasks() -> int:
        async def one() -> int:
            n = 0
            try:
                while (left := start + seconds - time.monotonic()) > 0:
                    (await throttle.acquire(tokens=tokens, max_wait_s=left)).done(tokens)
                    n += 1
            except ThrottleTimeout:
                pass
            return n

        return sum(await asyncio.gather(*(one() for _ in range(8))))

    if way == "asyncio":
        got = asyncio.run(tasks())
    elif way == "threads":
        counts: list[int] = []
        threads = [threading.Thread(target=thread, args=(counts,)) for _ in range(4)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
        got = sum(counts)
    else:
        read, write = os.pipe()
        children = []
        for _ in range(4):
            if (child := os.fork()) == 0:
                counts = []
                thread(counts)
                os.write(write, struct.pack("q", counts[0]))
                os._exit(0)
            children.append(child)
        for child in children:
            os.waitpid(child, 0)
        os.close(write)
        with os.fdopen(read, "rb") as pipe:
            got = sum(n for (n,) in struct.iter_unpack("q", pipe.read()))
    return got / (per_s * seconds) - 1


def throttle_figures(seconds: float) -> dict[str, float]:
    """How far off its rate each kind of throttle is, by the way it is used."""
    cases = {
        "rps": ("requests=50/s", 0),
        "rpm": ("requests=600/min", 0),
        "tpm": ("tokens=60000/min", 100),
    }
    return {
        f"{name}, {way}": throttled(way, limit, seconds, tokens)
        for way in ("threads", "asyncio", "processes")
        for name, (limit, tokens) in cases.items()
    }


class Pair(NamedTuple):
    """What is done without us, and with us. units: how often a measure of either does it."""

    name: str
    limit: float
    units: int
    plain: Callable[[], float]
    ours: Callable[[], float]


def pairs(runner: asyncio.Runner, told: list[Any]) -> list[Pair]:
    """What is timed, and counted in instructions. told: gets the measurements."""
    blocking, waiting = clients()
    options: dict[str, Any] = {"prices": TokenPrice(1, 2)}
    messages = "many words " * 4000
    recorded = own_calls(stubs(record=record_shape(os.devnull)), messages)
    return [
        Pair(
            "a call, blocking",
            CALL_LIMIT_US,
            CALLS,
            per_call(blocking.chat.completions.create),
            per_call(instrument(blocking, told.append, **options).chat.completions.create),
        ),
        Pair(
            "a call, async",
            CALL_LIMIT_US,
            CALLS,
            per_call_async(waiting.chat.completions.create, runner),
            per_call_async(
                instrument(waiting, told.append, **options).chat.completions.create, runner
            ),
        ),
        Pair("a call, ours alone", CALL_LIMIT_US, OWN_CALLS, *own_calls(stubs(told.append))),
        Pair(
            "the same with labels for Prometheus",
            CALL_LIMIT_US,
            OWN_CALLS,
            *own_calls(stubs(prometheus(), labels={"feature": "a"})),
        ),
        Pair(
            "the same with OpenTelemetry", OTEL_LIMIT_US, OWN_CALLS, *own_calls(stubs(telemetry()))
        ),
        Pair(
            "the same with the record of a prompt of 44,000 characters",
            RECORD_LIMIT_US,
            OWN_CALLS,
            *recorded,
        ),
        Pair("a chunk, blocking", CHUNK_LIMIT_US, CHUNKS, per_chunk(False), per_chunk(True)),
        Pair(
            "a chunk, async",
            CHUNK_LIMIT_US,
            CHUNKS,
            per_chunk_async(False, runner),
            per_chunk_async(True, runner),
        ),
    ]


def added_us(rounds: int) -> list[tuple[str, float | None, float, float | None]]:
    """Name, microseconds without us, microseconds added, and their limit, for each thing that is timed."""
    told: list[Any] = []
    found: list[tuple[str, float | None, float, float | None]] = []
    with asyncio.Runner() as runner:
        for name, limit, _, plain, ours in pairs(runner, told):
            base, with_us = differences(plain, ours, rounds)
            told.clear()
            found.append((name, base * 1e6, (with_us - base) * 1e6, limit))
        measure = partial(instrument, on_measurement=told.append, prices=TokenPrice(1, 2))
        for way, within in (("blocking", None), ("async", runner)):
            found.append(
                (
                    f"inside a real call, {way}",
                    None,
                    inside_a_real_call(measure, within, rounds),
                    CALL_LIMIT_US,
                )
            )
    found.append(
        ("counted for Prometheus, off the caller's thread", None, counted_later_us(), None)
    )
    found.append(
        (
            "OpenTelemetry at the end of 2,000 chunks",
            None,
            end_of_stream(telemetry()) * 1e6,
            OTEL_LIMIT_US,
        )
    )
    return found


def count_in_children(rounds: int) -> None:
    """Under valgrind, which tells what each process has counted: a child for each measure, once and again with more."""
    from loadgen_sdk.app.finishing import _State

    with asyncio.Runner() as runner:
        sides = [side for pair in pairs(runner, []) for side in (pair.plain, pair.ours)]
        for measure in sides:
            measure()  # all are warm
        gc.disable()

        def nothing() -> float:
            return 0.0

        # What lies between two forks is taken off each. The first fork has more there: it is not counted.
        for number, measure in enumerate([nothing, *sides, nothing], -1):
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


def instructions(rounds: int) -> list[tuple[str, float, float]]:
    """Machine instructions: name, without us, added."""
    code = f"import sys; sys.path.insert(0, {os.path.dirname(os.path.abspath(__file__))!r}); import sdk_overhead as own"
    command = ["valgrind", "--tool=cachegrind", "--cache-sim=no", "--cachegrind-out-file=/dev/null"]
    ran = subprocess.run(
        [*command, sys.executable, "-c", f"{code}; own.count_in_children({rounds})"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONHASHSEED": "0"},
    )
    lines = re.findall(r"==(\d+)==\s*I\s+refs:\s+([\d,]+)", ran.stderr)
    counted = {int(process): int(refs.replace(",", "")) for process, refs in lines}
    refs = {}
    for child, number, times in (map(int, line.split()) for line in ran.stdout.splitlines()):
        refs[number, times] = counted[child]
    *each, between = (
        refs[number, 2 * rounds] - refs[number, rounds] for number in range(len(refs) // 2 - 1)
    )
    with asyncio.Runner() as runner:
        names = [(pair.name, rounds * pair.units) for pair in pairs(runner, [])]
    found = []
    for (name, units), plain, ours in zip(names, each[::2], each[1::2], strict=True):
        found.append((name, (plain - between) / units, (ours - plain) / units))
    return found


def main() -> int:
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
    found = added_us(args.rounds)
    rows = [
        [
            name,
            "" if plain is None else f"{plain:.2f}",
            f"{added:.2f}",
            "" if limit is None else f"{limit:g}",
        ]
        for name, plain, added, limit in found
    ]
    print(f"openai {openai.__version__}\n")
    print(rig.format_table(["CPU-µs", "without", "added", "at most"], rows) + "\n")
    statements = ["import msgspec", "import loadgen_sdk", "from loadgen_sdk import Client"]
    statements += ["from loadgen_sdk import instrument", "import loadgen", "import openai"]
    imports = {statement: import_ms(statement, args.imports) for statement in statements}
    print(
        rig.format_table(
            ["statement", "CPU-ms"], [[f"`{name}`", f"{ms:.1f}"] for name, ms in imports.items()]
        )
    )
    if args.instructions:
        thousands = [
            [name, f"{plain / 1e3:,.1f}", f"{added / 1e3:,.1f}"]
            for name, plain, added in instructions(args.instructions)
        ]
        print("\n" + rig.format_table(["thousand instructions", "without", "added"], thousands))
    over = any(limit is not None and added > limit for _, _, added, limit in found)
    over |= imports["import loadgen_sdk"] > IMPORT_LIMIT * imports["import msgspec"]
    if args.throttle_seconds:
        off = throttle_figures(args.throttle_seconds)
        print(
            "\n"
            + rig.format_table(
                ["throttle", "off its rate by"], [[name, f"{by:+.2%}"] for name, by in off.items()]
            )
        )
        over |= any(abs(by) > THROTTLE_LIMIT for by in off.values())
    return 0 if args.smoke or not over else 1


if __name__ == "__main__":
    sys.exit(main())
