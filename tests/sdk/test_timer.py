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
    made = TimerFd()
    yield made
    made.close()
    made.close()


def rings(made: TimerFd, wait_s: float) -> bool:
    return bool(select.select([made.fileno()], [], [], wait_s)[0])


@linux
def test_a_timer_fires_and_is_never_early(timerfd: TimerFd) -> None:
    for ahead in (50_000, MS, 3 * MS):
        due = time.monotonic_ns() + ahead
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
def test_arming_replaces_the_time_and_disarming_cancels_it(timerfd: TimerFd) -> None:
    timerfd.clear()  # nothing to take back
    timerfd.arm(1)
    assert rings(timerfd, 10)
    timerfd.arm(time.monotonic_ns() + HOUR)
    assert not rings(timerfd, 0)
    timerfd.arm(1)
    timerfd.disarm()
    assert not rings(timerfd, 0)


@linux
def test_an_edge_triggered_watch_needs_no_clear(timerfd: TimerFd) -> None:
    with select.epoll() as poll:
        poll.register(timerfd.fileno(), select.EPOLLIN | select.EPOLLET)
        for _ in range(3):
            timerfd.arm(time.monotonic_ns() + MS)
            assert poll.poll(10)
            assert not poll.poll(0)


def test_the_fallback_timer_has_the_same_interface() -> None:
    async def ring() -> bytes:
        loop = asyncio.get_running_loop()
        made = LoopTimer(loop)
        heard = loop.create_future()
        loop.add_reader(made.fileno(), lambda: heard.done() or heard.set_result(None))
        made.arm(time.monotonic_ns() + HOUR)
        made.arm(time.monotonic_ns() + MS)
        await asyncio.wait_for(heard, 60)
        made.clear()
        made.clear()
        silent = not select.select([made.fileno()], [], [], 0)[0]
        made.arm(1)
        made.disarm()
        loop.remove_reader(made.fileno())
        made.close()
        return b"silent" if silent else b""

    assert asyncio.run(ring()) == b"silent"


@linux
def test_the_most_precise_timer_of_the_system_is_created() -> None:
    async def best() -> bool:
        made = create_timer(asyncio.get_running_loop())
        made.close()
        return isinstance(made, TimerFd)

    assert asyncio.run(best())
