"""Wait in the event loop of a call: that of asyncio or of trio. Anyio runs on either."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

from ..errors import WrongUse

ResultT = TypeVar("ResultT")
Wait = Callable[[float | None], Awaitable[None]]
"""Waits to be woken, for a number of seconds at most, or without a limit for None."""


class Wakeup(NamedTuple):
    """The two ends of an event: one waits for it, the other one ends the wait.

    Attributes:
        wake: Ends the present wait, or the next one if none is in progress. May be called from any
            thread.
        wait: Waits until `wake` is called, for a number of seconds at most.
    """

    wake: Callable[[], None]
    wait: Wait


def is_running() -> bool:
    """Return True if this thread runs an event loop of either kind."""
    trio = sys.modules.get("trio")
    return is_asyncio_running() or (trio is not None and bool(trio.lowlevel.in_trio_run()))


def require_running() -> None:
    """Raise WrongUse outside of asyncio and trio, before a call that may have to wait."""
    if not is_asyncio_running():
        _trio()


async def sleep(seconds: float) -> None:
    """Wait in the running loop. Raises WrongUse outside of asyncio and trio."""
    if is_asyncio_running():
        await asyncio.sleep(seconds)
    else:
        await _trio().sleep(seconds)


def create_wakeup() -> Wakeup:
    """Return a Wakeup for the running loop. Raises WrongUse outside of asyncio and trio."""
    if is_asyncio_running():
        return _create_asyncio_wakeup()
    return _create_trio_wakeup(_trio())


async def run_in_thread(function: Callable[[], ResultT]) -> ResultT:
    """Call a function that may block in another thread and return its result.

    Raises WrongUse outside of asyncio and trio.
    """
    if is_asyncio_running():
        return await asyncio.to_thread(function)
    result: ResultT = await _trio().to_thread.run_sync(function)
    return result


def is_asyncio_running() -> bool:
    """Return True if this thread runs an event loop of asyncio."""
    # `asyncio.get_running_loop` would raise an exception in the usual case of a blocking client.
    return asyncio._get_running_loop() is not None


def _trio() -> Any:
    """Return the module trio. Raises WrongUse if it does not run here."""
    if not is_running():
        raise WrongUse(
            "event_loop",
            "a throttle or a retry has to wait in asyncio or trio, but this call runs in neither",
            "make the call in asyncio or trio, or use the blocking client",
        )
    return sys.modules["trio"]


def _create_asyncio_wakeup() -> Wakeup:
    """Return a Wakeup for the running asyncio loop.

    `wake` schedules the event in the loop, because `asyncio.Event` is not thread-safe.
    """
    loop = asyncio.get_running_loop()
    event = asyncio.Event()

    def wake() -> None:
        # In a closed loop nothing waits any more, and nothing can be scheduled.
        if not loop.is_closed():
            loop.call_soon_threadsafe(event.set)

    async def wait(seconds: float | None) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await event.wait()
        event.clear()

    return Wakeup(wake, wait)


def _create_trio_wakeup(trio: object) -> Wakeup:
    """Return a Wakeup for the running trio loop.

    Args:
        trio: The module trio. It is not imported here, because the application may not have it.
    """
    trio_wakeup = _TrioWakeup(trio)
    return Wakeup(trio_wakeup.wake, trio_wakeup.wait)


class _TrioWakeup:
    """Lets a task of trio wait until another thread or task wakes it.

    An event of trio cannot be cleared, so that a new one replaces it after each wake-up.
    """

    def __init__(self, trio: Any) -> None:
        """Create a wakeup for the running loop. `trio` is the module."""
        self._trio = trio
        self._token = trio.lowlevel.current_trio_token()
        self._event = trio.Event()

    def wake(self) -> None:
        """End the wait. This may be called in any thread, also after the loop has ended."""
        with suppress(self._trio.RunFinishedError):
            # `trio.Event` is not thread-safe, so that it is set inside the loop.
            self._token.run_sync_soon(self._set_event)

    async def wait(self, seconds: float | None) -> None:
        """Wait until `wake` is called, or for a number of seconds at most."""
        timeout_s = float("inf") if seconds is None else seconds
        with self._trio.move_on_after(timeout_s):
            await self._event.wait()
        if self._event.is_set():
            self._event = self._trio.Event()

    def _set_event(self) -> None:
        """Set the event that is the current one when the loop runs this."""
        self._event.set()
