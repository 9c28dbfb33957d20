"""SIGINT, SIGTERM and SIGHUP while a load goes on: they end the load, not the process. IO."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable, Iterator

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def calling(stop: Callable[[int], object]) -> Iterator[None]:
    """While inside, each of these signals calls `stop(number)` in the running event loop.

    Python delivers signals to the main thread only: in another one nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    before = {number: handler for number in NUMBERS if (handler := signal.getsignal(number)) is not signal.SIG_IGN}
    for number in before:
        loop.add_signal_handler(number, stop, number)
    try:
        yield
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)
