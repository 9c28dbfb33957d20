"""Wait in the event loop of a call: that of asyncio or of trio. Anyio runs on either."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, NamedTuple

from ..errors import WrongUse

Wait = Callable[[float | None], Awaitable[None]]
"""Waits to be woken, for a number of seconds at most, or without a limit for None."""


class Wakeup(NamedTuple):
    """A function that wakes a waiting call, from any thread, and one that waits."""

    wake: Callable[[], None]
    wait: Wait


def is_running() -> bool:
    """Return True if this thread runs an event loop of either kind."""
    trio = sys.modules.get("trio")
    return _in_asyncio() or (trio is not None and bool(trio.lowlevel.in_trio_run()))


def check() -> None:
    """Raise WrongUse outside of asyncio and trio, before a call that may have to wait."""
    if not _in_asyncio():
        _trio()


async def sleep(seconds: float) -> None:
    """Wait in the running loop. Raises WrongUse outside of asyncio and trio."""
    if _in_asyncio():
        await asyncio.sleep(seconds)
    else:
        await _trio().sleep(seconds)


def wakeup() -> Wakeup:
    """Return how to wake and to wait. Raises WrongUse outside of asyncio and trio."""
    return _asyncio_wakeup() if _in_asyncio() else _trio_wakeup(_trio())


async def in_thread(work: Callable[[], Any]) -> Any:
    """Run work in a thread beside the loop. Raises WrongUse outside of asyncio and trio."""
    if _in_asyncio():
        return await asyncio.to_thread(work)
    return await _trio().to_thread.run_sync(work)


def _in_asyncio() -> bool:
    return asyncio._get_running_loop() is not None


def _trio() -> Any:
    """Return the module trio. Raises WrongUse if it does not run here."""
    if not is_running():
        raise WrongUse(
            "event_loop",
            "a throttle or a retry waits in asyncio or trio, and this call runs in neither",
            "call it in one of them, or use the blocking client",
        )
    return sys.modules["trio"]


def _asyncio_wakeup() -> Wakeup:
    loop = asyncio.get_running_loop()
    event = asyncio.Event()

    def wake() -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(event.set)

    async def wait(seconds: float | None) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await event.wait()
        event.clear()

    return Wakeup(wake, wait)


def _trio_wakeup(trio: Any) -> Wakeup:
    token = trio.lowlevel.current_trio_token()
    # An event of trio can be set only once, so that each wait gets a new one.
    event = trio.Event()

    def set_event() -> None:
        event.set()

    def wake() -> None:
        with suppress(trio.RunFinishedError):
            token.run_sync_soon(set_event)

    async def wait(seconds: float | None) -> None:
        nonlocal event
        with trio.move_on_after(float("inf") if seconds is None else seconds):
            await event.wait()
        if event.is_set():
            event = trio.Event()

    return Wakeup(wake, wait)
