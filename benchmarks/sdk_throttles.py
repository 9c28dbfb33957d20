"""Measure how precisely the throttles of the SDK keep their rate, for `sdk_overhead.py`."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from loadgen_sdk import Throttle, ThrottleTimeout

TASKS = 8
THREADS = 4
PROCESSES = 4
UNIT_SECONDS = {"s": 1, "min": 60}


class ThrottleLimit(NamedTuple):
    """A limit of a throttle, and how many calls it allows.

    Attributes:
        name: The usual abbreviation: requests per second (rps) or minute (rpm), or tokens per
            minute (tpm).
        option: The keyword argument of `Throttle`, "requests" or "tokens".
        rate: Its value, for example "600/min".
        tokens_per_call: The tokens that each call reserves, or 0 for a limit of requests.
    """

    name: str
    option: str
    rate: str
    tokens_per_call: int

    @property
    def calls_per_s(self) -> float:
        """Return the calls per second that the limit allows."""
        amount, _, unit = self.rate.partition("/")
        amount_per_s = float(amount) / UNIT_SECONDS[unit]
        return amount_per_s / max(self.tokens_per_call, 1)


LIMITS = (
    ThrottleLimit("rps", "requests", "50/s", tokens_per_call=0),
    ThrottleLimit("rpm", "requests", "600/min", tokens_per_call=0),
    ThrottleLimit("tpm", "tokens", "60000/min", tokens_per_call=100),
)


class ThrottledCallers:
    """Callers that use one throttle as fast as it allows, until `seconds` after the creation.

    Each method `count_by_...` runs several callers at once and returns their calls together.
    """

    def __init__(self, throttle: Throttle, seconds: float, tokens_per_call: int) -> None:
        self._throttle = throttle
        self._tokens_per_call = tokens_per_call
        self._end_s = time.monotonic() + seconds

    def count_by_threads(self) -> int:
        """Return the number of calls of several threads."""
        with ThreadPoolExecutor(THREADS) as pool:
            futures = [pool.submit(self._count_blocking_calls) for _ in range(THREADS)]
        return sum(future.result() for future in futures)

    def count_by_tasks(self) -> int:
        """Return the number of calls of several asyncio tasks."""

        async def run_tasks() -> list[int]:
            return await asyncio.gather(*(self._count_async_calls() for _ in range(TASKS)))

        return sum(asyncio.run(run_tasks()))

    def count_by_processes(self) -> int:
        """Return the number of calls of several child processes.

        They are forked, so that they inherit the throttle and the end of the measurement. The
        throttle must have a file in which the processes share its limits.
        """
        context = multiprocessing.get_context("fork")
        counts = context.SimpleQueue()

        def put_count() -> None:
            counts.put(self._count_blocking_calls())

        children = [context.Process(target=put_count) for _ in range(PROCESSES)]
        for child in children:
            child.start()

        for child in children:
            child.join()
            assert child.exitcode == 0, "a child process failed"

        return sum(counts.get() for _ in children)

    def _count_blocking_calls(self) -> int:
        """Make calls in this thread until the end, and return their number."""
        calls = 0
        with contextlib.suppress(ThrottleTimeout):  # the end comes while a call waits
            for left_s in self._iterate_until_end():
                permit = self._throttle.acquire_blocking(
                    tokens=self._tokens_per_call, max_wait_s=left_s
                )
                permit.done(self._tokens_per_call)
                calls += 1
        return calls

    async def _count_async_calls(self) -> int:
        """Make calls in this task until the end, and return their number."""
        calls = 0
        with contextlib.suppress(ThrottleTimeout):  # the end comes while a call waits
            for left_s in self._iterate_until_end():
                permit = await self._throttle.acquire(
                    tokens=self._tokens_per_call, max_wait_s=left_s
                )
                permit.done(self._tokens_per_call)
                calls += 1
        return calls

    def _iterate_until_end(self) -> Iterator[float]:
        """Yield the seconds that are left, until there are none."""
        left_s = self._end_s - time.monotonic()
        while left_s > 0:
            yield left_s
            left_s = self._end_s - time.monotonic()


def measure_throttle_errors(seconds: float) -> dict[str, float]:
    """Return the error of the rate of each throttle, by a name such as "rps, threads".

    An error of 0.01 means 1 % too many calls. Threads, asyncio tasks and several processes use each
    throttle for `seconds`.
    """
    errors = {}
    for limit in LIMITS:
        threads = create_callers(limit, seconds)
        errors[f"{limit.name}, threads"] = rate_error(limit, seconds, threads.count_by_threads())

        tasks = create_callers(limit, seconds)
        errors[f"{limit.name}, asyncio"] = rate_error(limit, seconds, tasks.count_by_tasks())

        with tempfile.TemporaryDirectory() as scratch:
            processes = create_callers(limit, seconds, shared_path=f"{scratch}/limits")
            calls = processes.count_by_processes()
        errors[f"{limit.name}, processes"] = rate_error(limit, seconds, calls)

    return errors


def create_callers(
    limit: ThrottleLimit, seconds: float, shared_path: str | None = None
) -> ThrottledCallers:
    """Return callers of a new throttle with this limit; their time begins at once.

    With `shared_path`, processes share the limit by this file. The throttle allows no burst,
    because additional calls at the beginning would count as an error of the rate.
    """
    options: dict[str, Any] = {limit.option: limit.rate}
    if shared_path is not None:
        options["shared"] = shared_path
    throttle = Throttle(burst_s=0, **options)
    return ThrottledCallers(throttle, seconds, limit.tokens_per_call)


def rate_error(limit: ThrottleLimit, seconds: float, calls: int) -> float:
    """Return by which fraction a number of calls differs from what the limit allows."""
    return calls / (limit.calls_per_s * seconds) - 1
