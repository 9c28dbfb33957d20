"""Let SIGINT, SIGTERM and SIGHUP end a load instead of the process."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from loadgen.core.errors import LoadgenError

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


async def raise_pending_interrupt() -> None:
    """Raise KeyboardInterrupt here, not during the load, if a signal has just arrived."""
    # uvloop needs two iterations to deliver a signal, asyncio one.
    for _ in range(2):
        await asyncio.sleep(0)


@contextlib.contextmanager
def on_stop_signal(handle: Callable[[int], object]) -> Iterator[None]:
    """Call `handle(signum)` in the running event loop for each stop signal within the context.

    Signals that are ignored stay ignored. Python delivers signals to the main thread only, so
    nothing changes in other threads.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    loop = asyncio.get_running_loop()

    def call_soon(signum: int, _frame: FrameType | None) -> None:
        loop.call_soon_threadsafe(handle, signum)

    # Not `loop.add_signal_handler`: when that is removed, Python's own handler is active for a
    # moment, and a signal in that moment raises KeyboardInterrupt anywhere.
    previous_handlers = {
        signum: signal.signal(signum, call_soon)
        for signum in STOP_SIGNALS
        if signal.getsignal(signum) is not signal.SIG_IGN
    }
    try:
        yield
    finally:
        for signum, handler in previous_handlers.items():
            signal.signal(signum, handler)


@contextlib.contextmanager
def abort_start_on_signal(abort: Callable[[], object]) -> Iterator[None]:
    """Abort the start of a load on a stop signal, such as Ctrl-C, within the context.

    Args:
        abort: Called for each signal. It makes the code in the context end soon.

    Raises:
        KeyboardInterrupt: There was a signal. It is raised when the context ends. A LoadgenError
            in the context is then dropped, since it is a consequence of the abort.
    """
    is_aborted = False

    def handle_signal(_signum: int) -> None:
        nonlocal is_aborted
        is_aborted = True
        abort()

    with on_stop_signal(handle_signal):
        try:
            yield
        except LoadgenError:
            if not is_aborted:
                raise

    if is_aborted:
        raise KeyboardInterrupt
