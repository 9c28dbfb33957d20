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
import gc
import math
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import openai
import rig
from loadgen_sdk import Measurement
from sdk_instructions import InstructionCount, count_instructions
from sdk_throttles import measure_throttle_errors
from sdk_work import (
    CALL_LIMIT_US,
    CALLS_PER_ROUND,
    OTEL_LIMIT_US,
    SHORT_PROMPT,
    TimedPair,
    create_clients,
    create_opentelemetry_observer,
    create_pairs,
    create_prometheus_observer,
    instrument_client,
)

MAX_IMPORT_RATIO_TO_MSGSPEC = 1.5  # the SDK imports msgspec and little else
MAX_THROTTLE_ERROR = 0.02


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
        measurements: list[Measurement] = []
        overheads = []
        for pair in create_pairs(runner, measurements):
            overheads.append(measure_pair(pair, rounds))
            measurements.clear()  # so that memory does not grow with the rounds

        overheads += measure_real_calls(rounds, runner)

    return overheads + measure_observers()


def measure_pair(pair: TimedPair, rounds: int) -> Overhead:
    """Time work with and without the SDK, and return the difference of the smallest times.

    The two sides alternate, so that a slow moment of the machine affects both.
    """
    base_s = math.inf
    measured_s = math.inf
    for _ in range(rounds):
        base_s = min(base_s, pair.without_sdk.measure_cpu_s())
        measured_s = min(measured_s, pair.with_sdk.measure_cpu_s())

    return Overhead(
        pair.name,
        base_us=base_s * 1e6,
        added_us=(measured_s - base_s) * 1e6,
        limit_us=pair.limit_us,
    )


def measure_real_calls(rounds: int, runner: asyncio.Runner) -> list[Overhead]:
    """Return the CPU time that the SDK adds to a blocking and an async call of the openai package.

    It is measured by timestamps inside the calls: at the begin and at the end of the whole call and
    of the package's own method. So it is not the difference of two long, noisy times.
    """
    call_count = rounds * CALLS_PER_ROUND
    blocking_us = measure_added_to_blocking_call_us(call_count)
    async_us = measure_added_to_async_call_us(call_count, runner)
    return [
        Overhead("inside a real call, blocking", None, blocking_us, CALL_LIMIT_US),
        Overhead("inside a real call, async", None, async_us, CALL_LIMIT_US),
    ]


class CallTimestamps:
    """The thread CPU time in ns at which the openai package's own method began and ended.

    The package's method runs inside an instrumented call. What the call takes before and after it
    is the work of the SDK.
    """

    def __init__(self) -> None:
        self.method_start_ns = 0
        self.method_end_ns = 0

    def added_us(self, call_start_ns: int, call_end_ns: int) -> float:
        """Return the time of the call that was spent outside the package's method, in µs."""
        before_ns = self.method_start_ns - call_start_ns
        after_ns = call_end_ns - self.method_end_ns
        return (before_ns + after_ns) / 1e3


def measure_added_to_blocking_call_us(call_count: int) -> float:
    """Return the smallest CPU time in µs that the SDK added to one of many blocking calls.

    The openai package's own `create` is replaced by one that also notes when it begins and ends.
    The rest of a call of the instrumented client is the work of the SDK.
    """
    from openai.resources.chat.completions import Completions

    timestamps = CallTimestamps()
    original_create = Completions.create

    def create_with_timestamps(*args: Any, **kwargs: Any) -> object:
        timestamps.method_start_ns = time.thread_time_ns()
        response = original_create(*args, **kwargs)
        timestamps.method_end_ns = time.thread_time_ns()
        return response

    smallest_us = math.inf
    messages = [{"role": "user", "content": SHORT_PROMPT}]
    with mock.patch.object(Completions, "create", create_with_timestamps):
        client, _ = create_clients()
        measured_create = instrument_client(client, []).chat.completions.create
        for _ in range(call_count):
            call_start_ns = time.thread_time_ns()
            measured_create(model="m", messages=messages)
            added_us = timestamps.added_us(call_start_ns, time.thread_time_ns())
            smallest_us = min(smallest_us, added_us)

    return smallest_us


def measure_added_to_async_call_us(call_count: int, runner: asyncio.Runner) -> float:
    """Return the smallest CPU time in µs that the SDK added to one of many async calls.

    The openai package's own `create` is replaced by one that also notes when it begins and ends.
    The rest of a call of the instrumented client is the work of the SDK.
    """
    from openai.resources.chat.completions import AsyncCompletions

    timestamps = CallTimestamps()
    original_create = AsyncCompletions.create

    async def create_with_timestamps(*args: Any, **kwargs: Any) -> object:
        timestamps.method_start_ns = time.thread_time_ns()
        response = await original_create(*args, **kwargs)
        timestamps.method_end_ns = time.thread_time_ns()
        return response

    async def measure_call_us(measured_create: Any) -> float:
        messages = [{"role": "user", "content": SHORT_PROMPT}]
        call_start_ns = time.thread_time_ns()
        await measured_create(model="m", messages=messages)
        return timestamps.added_us(call_start_ns, time.thread_time_ns())

    with mock.patch.object(AsyncCompletions, "create", create_with_timestamps):
        _, client = create_clients()
        measured_create = instrument_client(client, []).chat.completions.create
        return min(runner.run(measure_call_us(measured_create)) for _ in range(call_count))


def measure_observers() -> list[Overhead]:
    """Return what Prometheus and OpenTelemetry cost outside the calls that they observe."""
    return [
        Overhead(
            "counted for Prometheus, off the caller's thread",
            base_us=None,
            added_us=measure_prometheus_us(),
            limit_us=None,
        ),
        Overhead(
            "OpenTelemetry at the end of 2,000 chunks",
            base_us=None,
            added_us=measure_end_of_stream_us(create_opentelemetry_observer()),
            limit_us=OTEL_LIMIT_US,
        ),
    ]


PROMETHEUS_BATCH_CALLS = 99  # calls that wait for the background thread when it is timed
OBSERVER_ROUNDS = 50


def measure_prometheus_us() -> float:
    """Return the CPU time in µs that Prometheus costs for one call with a label.

    The observer only queues a call, and a background thread of the SDK counts it later. This
    function does the work of that thread for a batch of calls. The smallest of several rounds
    counts.
    """
    observer = create_prometheus_observer()
    measurement = create_labelled_measurement()

    smallest_ns = math.inf
    for _ in range(OBSERVER_ROUNDS):
        for _ in range(PROMETHEUS_BATCH_CALLS):
            observer(measurement)

        start_ns = time.thread_time_ns()
        observer._backlog.process_all()
        batch_ns = time.thread_time_ns() - start_ns
        smallest_ns = min(smallest_ns, batch_ns / PROMETHEUS_BATCH_CALLS)

    return smallest_ns / 1e3


def create_labelled_measurement() -> Measurement:
    """Return the SDK's measurement of a short call with a cost and one label; times are in ns."""
    return Measurement(
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


def measure_end_of_stream_us(observer: Callable[[Measurement], object]) -> float:
    """Return the CPU time in µs that `observer` takes when a stream of 2,000 chunks ends.

    The event loop of the application stands still for so long. The smallest of several rounds
    counts.
    """
    measurement = create_stream_measurement(chunks=2000)
    smallest_s = math.inf
    for _ in range(OBSERVER_ROUNDS):
        start_s = time.thread_time()
        observer(measurement)
        smallest_s = min(smallest_s, time.thread_time() - start_s)

    return smallest_s * 1e6


def create_stream_measurement(chunks: int) -> Measurement:
    """Return the SDK's measurement of a stream with a chunk in each ns."""
    return Measurement(
        api="chat",
        streamed=True,
        status="ok",
        started=0,
        started_unix_ns=1,
        sent=0,
        first_token=1,
        last_token=chunks,
        end=chunks,
        done=chunks,
        instants=tuple(range(1, chunks + 1)),
        output_tokens=chunks,
        token_source="server",
    )


IMPORT_STATEMENTS = (
    "import msgspec",
    "import loadgen_sdk",
    "from loadgen_sdk import Client",
    "from loadgen_sdk import instrument",
    "import loadgen",
    "import openai",
)


def measure_import_ms(statement: str, rounds: int) -> float:
    """Return the CPU-ms that an import adds to a new interpreter: the smallest of several."""
    import_s = min(measure_interpreter_cpu_s(statement) for _ in range(rounds))
    empty_s = min(measure_interpreter_cpu_s("pass") for _ in range(rounds))
    return (import_s - empty_s) * 1e3


def measure_interpreter_cpu_s(code: str) -> float:
    """Return the CPU-seconds of a new Python interpreter that runs this code."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)

    user_s = after.ru_utime - before.ru_utime
    system_s = after.ru_stime - before.ru_stime
    return user_s + system_s


def print_overheads(overheads: list[Overhead]) -> None:
    """Print the CPU time without the SDK, the time that it adds, and the limit of each row."""
    rows = []
    for overhead in overheads:
        base = "" if overhead.base_us is None else f"{overhead.base_us:.2f}"
        limit = "" if overhead.limit_us is None else f"{overhead.limit_us:g}"
        rows.append([overhead.name, base, f"{overhead.added_us:.2f}", limit])

    print(rig.format_table(["CPU-µs", "without the SDK", "added", "at most"], rows) + "\n")


def print_import_times(cpu_ms_by_statement: dict[str, float]) -> None:
    """Print the CPU time of each import statement."""
    rows = [[f"`{statement}`", f"{ms:.1f}"] for statement, ms in cpu_ms_by_statement.items()]
    print(rig.format_table(["statement", "CPU-ms"], rows))


def print_instructions(counts: list[InstructionCount]) -> None:
    """Print the machine instructions of each kind of work, in thousands."""
    rows = [
        [count.name, f"{count.without_sdk / 1e3:,.1f}", f"{count.added / 1e3:,.1f}"]
        for count in counts
    ]
    print("\n" + rig.format_table(["thousand instructions", "without the SDK", "added"], rows))


def print_throttle_errors(errors: dict[str, float]) -> None:
    """Print by which fraction each throttle differs from its rate."""
    rows = [[name, f"{error:+.2%}"] for name, error in errors.items()]
    print("\n" + rig.format_table(["throttle", "error of its rate"], rows))


def main() -> int:
    """Measure and print everything; return 1 if something is above its limit."""
    args = parse_command_line()
    freeze_imported_objects()
    overheads = measure_overheads(args.rounds)
    print(f"openai {openai.__version__}\n")
    print_overheads(overheads)
    is_over_limit = any(overhead.is_over_limit for overhead in overheads)

    import_ms = {
        statement: measure_import_ms(statement, args.imports) for statement in IMPORT_STATEMENTS
    }
    print_import_times(import_ms)
    import_ratio = import_ms["import loadgen_sdk"] / import_ms["import msgspec"]
    is_over_limit |= import_ratio > MAX_IMPORT_RATIO_TO_MSGSPEC

    if args.instructions:
        print_instructions(count_instructions(args.instructions))

    if args.throttle_seconds:
        throttle_errors = measure_throttle_errors(args.throttle_seconds)
        print_throttle_errors(throttle_errors)
        largest_error = max(abs(error) for error in throttle_errors.values())
        is_over_limit |= largest_error > MAX_THROTTLE_ERROR

    return 1 if is_over_limit and not args.smoke else 0


def freeze_imported_objects() -> None:
    """Exclude all objects of imports from later garbage collections, which would add to times."""
    gc.collect()
    gc.freeze()


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
