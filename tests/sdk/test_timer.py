"""Timers that are file descriptors: never early, taken back by clear, replaced by arm."""

from __future__ import annotations

import asyncio
import select
import sys
import time
from collections.abc import Iterator

import pytest
from loadgen_sdk.transport.timer import LoopTimer, TimerFd, create_timer

MS = 1_000_000
HOUR = 3_600_000 * MS

linux = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="timerfd exists only on Linux"
)


@pytest.fixture
def timerfd() -> Iterator[TimerFd]:
    timer_fd = TimerFd()
    yield timer_fd
    timer_fd.close()
    timer_fd.close()


def rings(timer_fd: TimerFd, wait_s: float) -> bool:
    return bool(select.select([timer_fd.fileno()], [], [], wait_s)[0])


@linux
def test_a_timer_never_fires_before_its_time(timerfd: TimerFd) -> None:
    for delay_ns in (50_000, MS, 3 * MS):
        due = time.monotonic_ns() + delay_ns
        timerfd.arm(due)
        assert rings(timerfd, 10)
        assert time.monotonic_ns() >= due
        timerfd.clear()
        assert not rings(timerfd, 0)


@linux
@pytest.mark.parametrize("due", [0, 1, -5])
def test_a_timer_set_to_the_past_fires_at_once(timerfd: TimerFd, due: int) -> None:
    timerfd.arm(due)
    assert rings(timerfd, 10)


@linux
def test_arming_a_timer_replaces_its_time_and_disarming_cancels_it(timerfd: TimerFd) -> None:
    timerfd.clear()  # nothing to take back
    timerfd.arm(1)
    assert rings(timerfd, 10)
    timerfd.arm(time.monotonic_ns() + HOUR)
    assert not rings(timerfd, 0)
    timerfd.arm(1)
    timerfd.disarm()
    assert not rings(timerfd, 0)


@linux
def test_an_edge_triggered_watch_of_a_timer_needs_no_clear(timerfd: TimerFd) -> None:
    with select.epoll() as poll:
        poll.register(timerfd.fileno(), select.EPOLLIN | select.EPOLLET)
        for _ in range(3):
            timerfd.arm(time.monotonic_ns() + MS)
            assert poll.poll(10)
            assert not poll.poll(0)


def test_the_fallback_timer_has_the_same_interface() -> None:
    async def ring() -> bytes:
        loop = asyncio.get_running_loop()
        loop_timer = LoopTimer(loop)
        future = loop.create_future()
        loop.add_reader(loop_timer.fileno(), lambda: future.done() or future.set_result(None))
        loop_timer.arm(time.monotonic_ns() + HOUR)
        loop_timer.arm(time.monotonic_ns() + MS)
        await asyncio.wait_for(future, 60)
        loop_timer.clear()
        loop_timer.clear()
        silent = not select.select([loop_timer.fileno()], [], [], 0)[0]
        loop_timer.arm(1)
        loop_timer.disarm()
        loop.remove_reader(loop_timer.fileno())
        loop_timer.close()
        return b"silent" if silent else b""

    assert asyncio.run(ring()) == b"silent"


@linux
def test_the_most_precise_timer_of_the_system_is_created() -> None:
    async def best() -> bool:
        timer = create_timer(asyncio.get_running_loop())
        timer.close()
        return isinstance(timer, TimerFd)

    assert asyncio.run(best())
