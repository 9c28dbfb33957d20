"""A replacement of `select.epoll` for systems without it, such as macOS.

On Linux, the event loop watches the descriptor of one epoll, which watches all sockets. Here the
event loop watches each socket itself and calls the reactor when one of them is ready. The reactor
then asks `LoopPoll.poll` which sockets are ready, as it asks an epoll.

Nothing is deferred without epoll (see `receiver.py`). Deferring delays reads and relies on the
kernel's timestamps for the time of arrival, and the kernels of other systems provide none.
"""

from __future__ import annotations

import asyncio
import select
from collections.abc import Callable
from typing import Protocol

READABLE = 0x1
"""EPOLLIN, which has the value of POLLIN."""

WRITABLE = 0x4
"""EPOLLOUT, which has the value of POLLOUT."""

NO_DESCRIPTOR = -1
"""Stands for the descriptor of a `LoopPoll`, which has none. As in poll(2), it is never ready."""

_NO_WAIT_MS = 0


class Poll(Protocol):
    """The methods of `select.epoll` that the reactor and the receiver use."""

    @property
    def closed(self) -> bool:
        """Whether the poll is closed."""

    def fileno(self) -> int:
        """Return the descriptor, which is readable while a registered one is ready."""

    def register(self, fd: int, eventmask: int) -> None:
        """Watch a descriptor for these events."""

    def modify(self, fd: int, eventmask: int) -> None:
        """Watch a descriptor for other events than before."""

    def unregister(self, fd: int) -> None:
        """Stop watching a descriptor."""

    def poll(self, timeout: float | None = None, maxevents: int = -1) -> list[tuple[int, int]]:
        """Return the ready descriptors with their events."""

    def close(self) -> None:
        """Stop watching everything. A second call has no effect."""


class LoopPoll:
    """The interface of `select.epoll` for descriptors that an event loop watches.

    `poll` never waits, because the event loop does. The callback runs in the next iteration of the
    loop, once for all descriptors that are ready.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, on_ready: Callable[[], None]) -> None:
        """Create a poll without descriptors.

        Args:
            loop: The event loop that watches the descriptors.
            on_ready: Called when at least one descriptor is ready.
        """
        self._loop = loop
        self._on_ready = on_ready
        self._poll = select.poll()
        self._watched: set[int] = set()
        self._is_call_queued = False
        self.closed = False

    def fileno(self) -> int:
        """Return NO_DESCRIPTOR, because no other poll can watch this one."""
        return NO_DESCRIPTOR

    def register(self, fd: int, eventmask: int) -> None:
        """Watch a descriptor for READABLE or WRITABLE or both. NO_DESCRIPTOR is ignored."""
        if fd == NO_DESCRIPTOR:
            return
        self._poll.register(fd, eventmask)
        self._watched.add(fd)
        self._watch_in_loop(fd, eventmask)

    def modify(self, fd: int, eventmask: int) -> None:
        """Watch a descriptor for other events than before."""
        self._poll.modify(fd, eventmask)
        self._watch_in_loop(fd, eventmask)

    def unregister(self, fd: int) -> None:
        """Stop watching a descriptor. NO_DESCRIPTOR is ignored."""
        if fd == NO_DESCRIPTOR:
            return
        self._poll.unregister(fd)
        self._watched.discard(fd)
        self._watch_in_loop(fd, 0)

    def poll(
        self,
        timeout: float | None = None,  # noqa: ARG002 - as epoll, but the event loop waits
        maxevents: int = -1,
    ) -> list[tuple[int, int]]:
        """Return descriptors that are ready now, with their events.

        Args:
            timeout: Ignored.
            maxevents: The largest number of descriptors, or -1 for all. Others are reported later,
                because they stay ready.
        """
        ready = self._poll.poll(_NO_WAIT_MS)
        return ready if maxevents < 0 else ready[:maxevents]

    def close(self) -> None:
        """Stop watching all descriptors. A second call has no effect."""
        self.closed = True
        for fd in list(self._watched):
            self.unregister(fd)

    def _watch_in_loop(self, fd: int, eventmask: int) -> None:
        """Let the event loop watch a descriptor for these events only."""
        if eventmask & READABLE:
            self._loop.add_reader(fd, self._queue_call)
        else:
            self._loop.remove_reader(fd)
        if eventmask & WRITABLE:
            self._loop.add_writer(fd, self._queue_call)
        else:
            self._loop.remove_writer(fd)

    def _queue_call(self) -> None:
        """Call `on_ready` in the next iteration of the loop, once for all ready descriptors."""
        if not self._is_call_queued:
            self._is_call_queued = True
            self._loop.call_soon(self._call)

    def _call(self) -> None:
        self._is_call_queued = False
        if not self.closed:
            self._on_ready()
