"""SIGINT, SIGTERM and SIGHUP while workers start, and while a load goes on: they end the load, not the process. IO."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable, Iterator

from loadgen.core.errors import LoadgenError

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


async def heard() -> None:
    """Right before a load begins: a KeyboardInterrupt that a signal has left in the loop is raised here, not in it."""
    for _ in range(2):  # uvloop takes one turn more
        await asyncio.sleep(0)


@contextlib.contextmanager
def calling(stop: Callable[[int], object]) -> Iterator[None]:
    """While inside, each of these signals calls `stop(number)` in the running event loop.

    Python delivers signals to the main thread only: in another one nothing changes. Not by `add_signal_handler`: when
    that is taken back Python's own handler stands for an instant, and a signal then is a KeyboardInterrupt anywhere.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()

    def soon(number: int, _: object) -> None:
        loop.call_soon_threadsafe(stop, number)

    before = {
        one: signal.signal(one, soon)
        for one in NUMBERS
        if signal.getsignal(one) is not signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def ending_start(end: Callable[[], object]) -> Iterator[None]:
    """While inside, where workers start, each of these signals calls `end()`, of which the start may fail. At the end
    raises KeyboardInterrupt where one came.
    """
    came = False

    def interrupted(_: int) -> None:
        nonlocal came
        came = True
        end()

    with calling(interrupted):
        try:
            yield
        except LoadgenError:
            if not came:
                raise
    if came:
        raise KeyboardInterrupt
