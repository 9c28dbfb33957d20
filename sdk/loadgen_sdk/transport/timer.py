"""A timer with a file descriptor, so that one epoll can watch it together with the sockets.

uvloop's `call_at` has a resolution of milliseconds (up to 0.3 ms early, 1.6 ms late); a timerfd has one of ns. Times
are absolute, on the clock of `time.monotonic_ns`. On systems other than Linux, a socket pair that the event loop writes
to has the same interface.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import socket
import sys
import time
from typing import Protocol

_NONBLOCK_CLOEXEC = 0o4000 | 0o2000000  # TFD_NONBLOCK | TFD_CLOEXEC, timerfd_create(2)
_ABSTIME = 1  # TFD_TIMER_ABSTIME
_CLOCK_MONOTONIC = 1


class Timer(Protocol):
    """The interface of both timers. `fileno` is readable from the armed instant until `clear` or `arm`."""

    def arm(self, monotonic_ns: int) -> None:
        """Fire once at this instant of `time.monotonic_ns` (in the past: now). Replaces the armed instant."""

    def disarm(self) -> None:
        """Cancel the armed instant."""

    def clear(self) -> None:
        """Make `fileno` unreadable again. No effect when the timer has not fired."""

    def fileno(self) -> int:
        """The descriptor to watch for reading."""

    def close(self) -> None:
        """Close the descriptor. May be called twice."""


class _Timespec(ctypes.Structure):
    _fields_ = (("sec", ctypes.c_long), ("nsec", ctypes.c_long))


class _Itimerspec(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("value", _Timespec))


class TimerFd:
    """A timer by `timerfd_create(CLOCK_MONOTONIC)`. Raises OSError if the system has none."""

    __slots__ = ("_fd", "_pointer", "_settime", "_spec", "_value")

    def __init__(self) -> None:
        if not sys.platform.startswith("linux"):
            raise OSError("timerfd is Linux's own")
        libc = ctypes.CDLL(None, use_errno=True)
        if sys.version_info >= (3, 13):
            self._fd = os.timerfd_create(
                time.CLOCK_MONOTONIC, flags=os.TFD_NONBLOCK | os.TFD_CLOEXEC
            )
        else:
            self._fd = int(libc.timerfd_create(_CLOCK_MONOTONIC, _NONBLOCK_CLOEXEC))
            if self._fd < 0:
                raise OSError(ctypes.get_errno(), "timerfd_create")
        # ctypes sets the timer on every version: os.timerfd_settime_ns is as fast, but one path is easier to test.
        self._settime = libc.timerfd_settime
        self._spec = _Itimerspec()
        self._value = self._spec.value
        self._pointer = ctypes.byref(self._spec)

    def arm(self, monotonic_ns: int) -> None:
        self._value.sec, self._value.nsec = divmod(
            monotonic_ns if monotonic_ns > 0 else 1, 1_000_000_000
        )
        if self._settime(self._fd, _ABSTIME, self._pointer, None):
            raise OSError(ctypes.get_errno(), "timerfd_settime")

    def disarm(self) -> None:
        self._value.sec = self._value.nsec = 0
        self._settime(self._fd, _ABSTIME, self._pointer, None)

    def clear(self) -> None:
        try:
            os.read(self._fd, 8)
        except BlockingIOError:
            pass

    def fileno(self) -> int:
        return self._fd

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class LoopTimer:
    """A timer by `loop.call_at`, with the resolution of the loop's clock, for systems without timerfd."""

    __slots__ = ("_loop", "_receive", "_send", "_timer_handle")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._receive, self._send = socket.socketpair()
        self._receive.setblocking(False)
        self._send.setblocking(False)
        self._timer_handle: asyncio.TimerHandle | None = None

    def arm(self, monotonic_ns: int) -> None:
        self.disarm()
        self.clear()
        # The loop's clock may have another zero than monotonic_ns, so the delay is passed, not the instant.
        delay_s = (monotonic_ns - time.monotonic_ns()) / 1e9
        self._timer_handle = self._loop.call_at(self._loop.time() + max(0.0, delay_s), self._ring)

    def disarm(self) -> None:
        if self._timer_handle is not None:
            self._timer_handle.cancel()
            self._timer_handle = None

    def clear(self) -> None:
        try:
            self._receive.recv(64)
        except BlockingIOError:
            pass

    def fileno(self) -> int:
        return self._receive.fileno()

    def close(self) -> None:
        self.disarm()
        self._receive.close()
        self._send.close()

    def _ring(self) -> None:
        self._send.send(b"\0")


def create_timer(loop: asyncio.AbstractEventLoop) -> Timer:
    """The most precise timer that this system has, for `loop`."""
    try:
        return TimerFd()
    except (OSError, AttributeError):
        return LoopTimer(loop)
