"""Tests of limits that processes share, in a file and in Redis."""

from __future__ import annotations

import asyncio
import fcntl
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from loadgen_sdk import Throttle
from loadgen_sdk.app.background import flush
from loadgen_sdk.app.rate_limiter import Limits, Rate
from loadgen_sdk.app.shared_limits import FileStore, RedisStore, SharedLimits, Store, locked_file
from loadgen_sdk.app.shared_rate_limiter import Grant, SharedRateLimiter

S = 1_000_000_000


def granted_at(limiter: SharedRateLimiter, now: int, entry_id: str, tokens: float = 0) -> int:
    """When this entry_id, which is asked for at each instant that it is told, has its grant."""
    while isinstance(turn := limiter.enter(now, entry_id, tokens, 0), int):
        assert turn > now
        now = turn
    return now


def test_processes_take_turns_regardless_of_their_waiting_calls() -> None:
    limiter, order = SharedRateLimiter(Limits(requests=Rate(1, S))), []
    granted_at(limiter, 0, "before")
    limiter.enter(1, "greedy", 0, 0)  # it will always have a call that waits
    limiter.enter(2, "modest", 0, 0)
    for now in (S, 2 * S, 3 * S, 4 * S):
        order += [
            entry_id
            for entry_id in ("greedy", "modest")
            if isinstance(limiter.enter(now, entry_id, 0, 0), Grant)
        ]

    assert order == ["greedy", "modest", "greedy", "modest"]


def test_a_call_starts_at_its_predicted_time() -> None:
    """So a process asks twice for a call that waits, not again and again."""
    limiter = SharedRateLimiter(Limits(requests=Rate(2, S), entries_per_period=500))
    assert [granted_at(limiter, 0, entry_id) for entry_id in "ab"] == [0, 0]
    turns = [limiter.enter(number, entry_id, 0, 0) for number, entry_id in enumerate("cdef")]
    assert turns == pytest.approx([S, S, 2 * S, 2 * S], abs=S // 250)
    for entry_id, turn in zip("cdef", turns, strict=True):
        assert isinstance(turn, int) and isinstance(limiter.enter(turn, entry_id, 0, 0), Grant)


@given(
    st.lists(st.tuples(st.integers(0, S // 3), st.sampled_from("abc")), min_size=1, max_size=40),
    st.integers(1, 4),
)
def test_no_period_exceeds_the_limit_whichever_process_calls(
    steps: list[tuple[int, str]], limit: int
) -> None:
    limiter, now, granted = SharedRateLimiter(Limits(requests=Rate(limit, S))), 0, []
    for step, entry_id in steps:
        now += step
        restored = SharedRateLimiter(Limits(requests=Rate(limit, S)))
        restored.restore(limiter.state(), now)
        limiter = restored
        if isinstance(answer := limiter.enter(now, entry_id, 0, 0), Grant):
            granted.append(answer.at["requests"])

    for start in granted:
        assert sum(start <= at < start + S for at in granted) <= limit


def test_a_queue_entry_takes_the_amounts_of_the_next_call_of_its_process() -> None:
    limiter = SharedRateLimiter(Limits(tokens=Rate(100, S)))
    granted_at(limiter, 0, "a", 100)
    assert limiter.enter(1, "b", 100, 0) == S  # a large call waits,
    assert limiter.enter(2, "c", 40, 0) == 2 * S  # another process behind it,
    assert isinstance(
        limiter.enter(S, "b", 50, 0), Grant
    )  # and a small one of higher priority takes its place
    assert isinstance(limiter.enter(S + 1, "c", 40, 0), Grant)


def test_abandoned_queue_entries_and_unused_grants_are_released() -> None:
    limiter = SharedRateLimiter(Limits(tokens=Rate(100, S)))
    granted_at(limiter, 0, "a", 100)
    limiter.enter(1, "b", 100, 0)
    limiter.enter(2, "c", 100, 0)
    limiter.cancel("b")

    assert limiter.enter(3, "c", 100, 0) == S
    limiter.enter(S, "d", 60, 0)  # d found that it is the turn of c, which does not come
    assert limiter.enter(S + 1, "d", 60, 0) == 2 * S
    limiter.cancel("c")  # it was granted meanwhile, and gives it back
    assert isinstance(limiter.enter(S + 2, "d", 60, 0), Grant)


def stores(where: str, request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Limits], Store]:
    if where == "file":
        return lambda limits: FileStore(tmp_path / "limits", limits)
    address = request.getfixturevalue("redis_address")
    return lambda limits: RedisStore(f"{address}#{tmp_path.name}", limits)


WHERE = ["file", pytest.param("redis", marks=pytest.mark.processes)]


@pytest.mark.parametrize("where", WHERE)
def test_every_store_has_one_queue_for_all_processes(
    where: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    limits = Limits(requests=Rate(3, 3600 * S), tokens=Rate(1000, 3600 * S), entries_per_period=500)
    store = stores(where, request, tmp_path)(limits)
    first = store.enter("m", "a", 400, 100)

    assert isinstance(first, Grant) and isinstance(store.enter("m", "a", 400, 100), Grant)
    turns = [store.enter("m", entry_id, 400, 100) for entry_id in ("b", "c")]
    assert turns == pytest.approx([3600 * S] * 2, rel=0.01)  # when the two leave the window
    store.correct("m", first, 50, None)
    assert isinstance(store.enter("m", "b", 400, 100), Grant)  # it really used 50
    assert store.enter("m", "c", 1, 0) == pytest.approx(3600 * S, rel=0.01)  # three requests
    store.cancel("m", "c")
    assert isinstance(store.enter("other", "c", 400, 100), Grant)
    store.pause("other", 50 * S)
    assert store.enter("other", "d", 1, 0) == pytest.approx(50 * S, rel=0.01)


@pytest.mark.parametrize("where", WHERE)
def test_every_store_spaces_calls_evenly(
    where: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    store = stores(where, request, tmp_path)(
        Limits(requests=Rate(10, 1000 * S), burst_ns=0, entries_per_period=500)
    )
    assert isinstance(store.enter("m", "a", 1, 0), Grant)
    turns = [store.enter("m", entry_id, 1, 0) for entry_id in "bcd"]
    assert turns == pytest.approx([100 * S, 200 * S, 300 * S], rel=0.01)


class Watched(FileStore):
    """It notes who reads and writes."""

    threads: set[int]

    def _run_step(self, name: str, step: Callable[[SharedRateLimiter, int], Any]) -> Any:
        self.threads.add(threading.get_ident())
        return super()._run_step(name, step)


@pytest.mark.processes
def test_an_event_loop_neither_reads_nor_locks_the_file(tmp_path: Path) -> None:
    throttle = Throttle(requests="9/s", shared=tmp_path / "limits", each=())
    shared = throttle._shared_limits
    assert isinstance(shared, SharedLimits)
    shared._store = watched = Watched(tmp_path / "limits", throttle._limits)
    watched.threads = set()

    async def go() -> None:
        permit = await throttle.acquire()
        permit.heed({"retry-after": "0.001"}, refused=True)
        permit.done(3)
        (state,) = tmp_path.iterdir()
        with state.open("rb") as other:
            fcntl.flock(other, fcntl.LOCK_EX)  # as another process that is in the middle of a step
            waiting = asyncio.create_task(throttle.acquire())
            for _ in range(50):
                await asyncio.sleep(0)
            assert not waiting.done()
        (await waiting).done()

    asyncio.run(go())
    assert flush()
    assert len(watched.threads) >= 2 and threading.get_ident() not in watched.threads


def test_a_file_that_stays_locked_is_logged_and_the_process_limits_its_calls_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    throttle = Throttle(requests="2/h", shared=tmp_path / "limits", each=(), max_wait_s=0)
    throttle.acquire_blocking().done()
    (state,) = tmp_path.iterdir()
    with state.open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        throttle.acquire_blocking().done()
    assert caplog.text.count("kept it locked") == 1


@pytest.mark.processes
def test_a_forked_process_does_not_retain_the_file_lock(tmp_path: Path) -> None:
    """A child process has the locked file open as well, and must not keep the lock."""
    path, (ended, end) = tmp_path / "limits", os.pipe()
    with locked_file(str(path)):
        if (child := os.fork()) == 0:
            os.close(end)
            os.read(ended, 1)
            os._exit(0)
    try:
        with path.open("rb") as other:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(end)
        os.close(ended)
        assert os.waitpid(child, 0)[1] == 0
