"""How a call waits in the event loop that it is made in: asyncio's, or trio's (anyio runs on either)."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from ..errors import WrongUse

Wait = Callable[[float | None], Awaitable[None]]
"""Waits to be woken, at most so many seconds; None: without a limit."""


def is_running() -> bool:
    """Whether this thread runs a loop of either kind now."""
    trio = sys.modules.get("trio")
    return _in_asyncio() or (trio is not None and bool(trio.lowlevel.in_trio_run()))


def check() -> None:
    """Raises WrongUse outside of asyncio and trio: before a call that may have to wait."""
    if not _in_asyncio():
        _trio()


async def sleep(seconds: float) -> None:
    """Wait in the running loop. Raises WrongUse as `check`."""
    await (asyncio.sleep if _in_asyncio() else _trio().sleep)(seconds)


def wakeup() -> tuple[Callable[[], None], Wait]:
    """A function that wakes, from any thread, and one that waits for it. Raises WrongUse as `check`."""
    return _asyncio_wakeup() if _in_asyncio() else _trio_wakeup(_trio())


async def in_thread(work: Callable[[], Any]) -> Any:
    """`work` in a thread beside the running loop. Raises WrongUse as `check`."""
    return await (asyncio.to_thread(work) if _in_asyncio() else _trio().to_thread.run_sync(work))


def _in_asyncio() -> bool:
    return asyncio._get_running_loop() is not None


def _trio() -> Any:
    if not is_running():
        raise WrongUse(
            "event_loop",
            "a throttle or a retry waits in asyncio or trio, and this call runs in neither",
            "call it in one of them, or use the blocking client",
        )
    return sys.modules["trio"]


def _asyncio_wakeup() -> tuple[Callable[[], None], Wait]:
    loop, event = asyncio.get_running_loop(), asyncio.Event()

    def wake() -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(event.set)

    async def wait(seconds: float | None) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await event.wait()
        event.clear()

    return wake, wait


def _trio_wakeup(trio: Any) -> tuple[Callable[[], None], Wait]:
    token, events = (
        trio.lowlevel.current_trio_token(),
        [trio.Event()],
    )  # an event of trio is set once

    def set_event() -> None:
        events[0].set()

    def wake() -> None:
        with suppress(trio.RunFinishedError):
            token.run_sync_soon(set_event)

    async def wait(seconds: float | None) -> None:
        with trio.move_on_after(float("inf") if seconds is None else seconds):
            await events[0].wait()
        if events[0].is_set():
            events[0] = trio.Event()

    return wake, wait
