"""A timer with a file descriptor, so that one epoll can watch it together with the sockets.

`call_at` of uvloop has a resolution of milliseconds (up to 0.3 ms early, 1.6 ms late), a timerfd
has one of nanoseconds. Times are absolute, on the clock of `time.monotonic_ns`. On systems other
than Linux, a socket pair to which the event loop writes has the same interface.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import socket
import sys
import time
from typing import Protocol

_NONBLOCK_CLOEXEC = 0o4000 | 0o2000000  # TFD_NONBLOCK | TFD_CLOEXEC of timerfd_create(2)
_ABSTIME = 1  # TFD_TIMER_ABSTIME
_CLOCK_MONOTONIC = 1
_NS_PER_S = 1_000_000_000
_EXPIRATIONS_BYTES = 8  # A timerfd is read as the number of times that it fired, of 64 bits.
_MAX_SIGNAL_BYTES = 64  # More than a LoopTimer ever has to clear: each firing sends one byte.
_MIN_TIME_NS = 1  # 0 would disarm the timer.


class Timer(Protocol):
    """The interface of both timers: `fileno` is readable from the time set until `clear`."""

    def arm(self, monotonic_ns: int) -> None:
        """Fire once at this time, or at once if it is past. This replaces the time that was set."""

    def disarm(self) -> None:
        """Cancel the time that was set."""

    def clear(self) -> None:
        """Make `fileno` unreadable again. There is no effect if the timer has not fired."""

    def fileno(self) -> int:
        """Return the descriptor to watch for reading."""

    def close(self) -> None:
        """Close the descriptor. A second call has no effect."""


class _Timespec(ctypes.Structure):
    _fields_ = (("sec", ctypes.c_long), ("nsec", ctypes.c_long))


class _Itimerspec(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("value", _Timespec))


class TimerFd:
    """A timer by `timerfd_create(CLOCK_MONOTONIC)`, whose descriptor is readable after it fired.

    Raises:
        OSError: The system has none.
    """

    __slots__ = ("_fd", "_settime", "_spec", "_spec_pointer", "_value")

    def __init__(self) -> None:
        """Create the descriptor of a timer on the monotonic clock, which does not block.

        The structure that `timerfd_settime` takes is created once and reused, because the timer is
        set very often.
        """
        if not sys.platform.startswith("linux"):
            raise OSError("timerfd exists only on Linux")

        libc = ctypes.CDLL(None, use_errno=True)
        self._fd = _create_timerfd(libc)

        # ctypes sets the timer on every version of Python. os.timerfd_settime_ns of Python 3.13 is
        # as fast, but a single path is easier to test.
        self._settime = libc.timerfd_settime
        self._spec = _Itimerspec()
        self._value = self._spec.value
        self._spec_pointer = ctypes.byref(self._spec)

    def arm(self, monotonic_ns: int) -> None:
        """Fire once at this time, or at once if it is past."""
        seconds, nanoseconds = divmod(max(monotonic_ns, _MIN_TIME_NS), _NS_PER_S)
        self._value.sec = seconds
        self._value.nsec = nanoseconds
        if self._settime(self._fd, _ABSTIME, self._spec_pointer, None):
            raise OSError(ctypes.get_errno(), "timerfd_settime")

    def disarm(self) -> None:
        """Cancel the time that was set."""
        self._value.sec = 0
        self._value.nsec = 0
        self._settime(self._fd, _ABSTIME, self._spec_pointer, None)

    def clear(self) -> None:
        """Make the descriptor unreadable again."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._fd, _EXPIRATIONS_BYTES)

    def fileno(self) -> int:
        """Return the descriptor to watch for reading."""
        return self._fd

    def close(self) -> None:
        """Close the descriptor."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _create_timerfd(libc: ctypes.CDLL) -> int:
    """Return the descriptor of a new timerfd. Before Python 3.13, only the C library creates one.

    Raises:
        OSError: The system refuses it.
    """
    if sys.version_info >= (3, 13):
        return os.timerfd_create(time.CLOCK_MONOTONIC, flags=os.TFD_NONBLOCK | os.TFD_CLOEXEC)
    fd = int(libc.timerfd_create(_CLOCK_MONOTONIC, _NONBLOCK_CLOEXEC))
    if fd < 0:
        raise OSError(ctypes.get_errno(), "timerfd_create")
    return fd


class LoopTimer:
    """A timer by `loop.call_at`, with the resolution of the loop's clock, for other systems."""

    __slots__ = ("_loop", "_receiving_end", "_sending_end", "_timer_handle")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Create a socket pair, whose receiving end is readable after the timer has fired."""
        self._loop = loop
        self._receiving_end, self._sending_end = socket.socketpair()
        self._receiving_end.setblocking(False)
        self._sending_end.setblocking(False)
        self._timer_handle: asyncio.TimerHandle | None = None

    def arm(self, monotonic_ns: int) -> None:
        """Fire once at this time, or at once if it is past."""
        self.disarm()
        self.clear()
        # The loop's clock may have another zero than monotonic_ns, so the delay is passed.
        delay_s = max(0.0, (monotonic_ns - time.monotonic_ns()) / 1e9)
        self._timer_handle = self._loop.call_at(self._loop.time() + delay_s, self._fire)

    def disarm(self) -> None:
        """Cancel the time that was set."""
        if self._timer_handle is not None:
            self._timer_handle.cancel()
            self._timer_handle = None

    def clear(self) -> None:
        """Make the descriptor unreadable again."""
        with contextlib.suppress(BlockingIOError):
            self._receiving_end.recv(_MAX_SIGNAL_BYTES)

    def fileno(self) -> int:
        """Return the descriptor to watch for reading."""
        return self._receiving_end.fileno()

    def close(self) -> None:
        """Close both ends of the socket pair."""
        self.disarm()
        self._receiving_end.close()
        self._sending_end.close()

    def _fire(self) -> None:
        """Make the receiving end of the socket pair readable."""
        self._sending_end.send(b"\0")


def create_timer(loop: asyncio.AbstractEventLoop) -> Timer:
    """Return the most precise timer that this system has, for `loop`.

    AttributeError means that the C library has no `timerfd_create`.
    """
    try:
        return TimerFd()
    except (OSError, AttributeError):
        return LoopTimer(loop)
