"""How long the current thread has waited for a processor, as the kernel of Linux counts it.

An application whose threads do not get a processor in time receives its events late. A measurement
says how long that was, so that the wait is not taken for the server's.
"""

from __future__ import annotations

import threading
from time import monotonic_ns

REFRESH_NS = 5_000_000
"""How long a value is kept. Reading it takes as long as the rest of a short call."""

_PATH = "/proc/thread-self/schedstat"


class _LastValue(threading.local):
    """The last value that a thread has read, and when."""

    read_at = -REFRESH_NS
    wait_ns: int | None = None


_last = _LastValue()


def processor_wait_ns() -> int | None:
    """Return how long this thread has waited for a processor, although it was ready to run.

    This is the sum since the start of the thread. The value may be REFRESH_NS old. It is None where
    the system does not count it.
    """
    now = monotonic_ns()
    if now - _last.read_at >= REFRESH_NS:
        _last.read_at = now
        _last.wait_ns = _read_wait_ns()
    return _last.wait_ns


def _read_wait_ns() -> int | None:
    """Return the second field of schedstat, the time on a run queue, or None."""
    try:
        with open(_PATH, "rb", buffering=0) as file:
            return int(file.read(64).split()[1])
    except (OSError, ValueError, IndexError):
        return None
