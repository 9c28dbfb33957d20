"""Waking at an instant: a timer that is a file descriptor, so that it sits in an epoll beside the sockets.

uvloop's `call_at` counts in milliseconds (up to 0.3 ms early, 1.6 ms late); a timerfd counts in ns. Times are absolute,
on the clock of `time.monotonic_ns`. Elsewhere than on Linux a socket pair rung by the loop has the same face.
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
    """What both timers do. `fileno` becomes readable at the armed instant and stays so until `clear` or `arm`."""

    def arm(self, monotonic_ns: int) -> None:
        """Ring at this instant of `time.monotonic_ns`, once; replaces what was armed. The past rings at once."""

    def disarm(self) -> None:
        """Do not ring."""

    def clear(self) -> None:
        """Take back a ring that has happened; does nothing when none has."""

    def fileno(self) -> int:
        """The descriptor to watch for reading."""

    def close(self) -> None:
        """Give the descriptor back; closing twice is harmless."""


class _Timespec(ctypes.Structure):
    _fields_ = (("sec", ctypes.c_long), ("nsec", ctypes.c_long))


class _Itimerspec(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("value", _Timespec))


class TimerFd:
    """`timerfd_create(CLOCK_MONOTONIC)`. Raises OSError where the kernel has none."""

    __slots__ = ("_fd", "_pointer", "_set", "_spec", "_value")

    def __init__(self) -> None:
        if not sys.platform.startswith("linux"):
            raise OSError("timerfd is Linux's own")
        libc = ctypes.CDLL(None, use_errno=True)
        if sys.version_info >= (3, 13):
            self._fd = os.timerfd_create(time.CLOCK_MONOTONIC, flags=os.TFD_NONBLOCK | os.TFD_CLOEXEC)
        else:
            self._fd = int(libc.timerfd_create(_CLOCK_MONOTONIC, _NONBLOCK_CLOEXEC))
            if self._fd < 0:
                raise OSError(ctypes.get_errno(), "timerfd_create")
        # The setter stays ctypes' on every version: os.timerfd_settime_ns is as quick, but one path is one to test.
        self._set = libc.timerfd_settime
        self._spec = _Itimerspec()
        self._value = self._spec.value
        self._pointer = ctypes.byref(self._spec)

    def arm(self, monotonic_ns: int) -> None:
        self._value.sec, self._value.nsec = divmod(monotonic_ns if monotonic_ns > 0 else 1, 1_000_000_000)
        if self._set(self._fd, _ABSTIME, self._pointer, None):
            raise OSError(ctypes.get_errno(), "timerfd_settime")

    def disarm(self) -> None:
        self._value.sec = self._value.nsec = 0
        self._set(self._fd, _ABSTIME, self._pointer, None)

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
    """The same face on `loop.call_at`, as coarse as the loop's own clock: for systems without a timerfd."""

    __slots__ = ("_call", "_loop", "_receive", "_send")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._receive, self._send = socket.socketpair()
        self._receive.setblocking(False)
        self._send.setblocking(False)
        self._call: asyncio.TimerHandle | None = None

    def arm(self, monotonic_ns: int) -> None:
        self.disarm()
        self.clear()
        # The loop's clock need not count from where monotonic_ns does, so the distance is what is handed over.
        ahead = (monotonic_ns - time.monotonic_ns()) / 1e9
        self._call = self._loop.call_at(self._loop.time() + max(0.0, ahead), self._ring)

    def disarm(self) -> None:
        if self._call is not None:
            self._call.cancel()
            self._call = None

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


def timer(loop: asyncio.AbstractEventLoop) -> Timer:
    """The best timer this system has for `loop`."""
    try:
        return TimerFd()
    except (OSError, AttributeError):
        return LoopTimer(loop)
