"""Finish work in a background thread: that of destructors, and what would hold up the application.

The garbage collector may run a destructor, or close a generator, in the middle of any code, also
of code that holds a lock which the destructor would need. A destructor therefore passes its work
to `later`, which takes no lock and returns at once. `SimpleQueue.put` may be called in
destructors.
"""

from __future__ import annotations

import _thread
import atexit
import gc
import logging
import os
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

log = logging.getLogger("loadgen_sdk")

FLUSH_S = 5.0


_NO_THREAD = 0


class _State:
    """The background thread of this process.

    Attributes:
        queue: The work for the thread.
        is_started: The thread was started.
        worker: The id of the thread.
        collecting: The id of the thread in which the garbage collector runs.
    """

    queue: SimpleQueue[Callable[[], object]] = SimpleQueue()
    is_started = False
    worker = _NO_THREAD
    collecting = _NO_THREAD


def later(work: Callable[[], object]) -> None:
    """Run work in the background thread, in the order of the calls. Safe in destructors.

    Exceptions are logged.
    """
    _State.queue.put(work)
    if not _State.is_started:
        _State.is_started = True
        # `threading.Thread.start` would take locks.
        try:
            _thread.start_new_thread(_run, (_State.queue,))
        except RuntimeError:
            # The interpreter is shutting down.
            _State.is_started = False


def collecting() -> bool:
    """Return True if the garbage collector runs in this thread.

    The code below it may then hold any lock.
    """
    return _State.collecting == _thread.get_ident()


def flush(timeout_s: float = FLUSH_S) -> bool:
    """Wait until all work so far is done. Return False if that takes longer.

    In the background thread it returns at once.
    """
    if not _State.is_started or _State.worker == _thread.get_ident():
        return True
    done = threading.Event()
    later(done.set)
    return done.wait(timeout_s)


def lock_of(owner: Any) -> threading.Lock:
    """Return a lock that an object keeps as `_lock`.

    A forked child gets a new one, because no thread there would release it.
    """
    _owners.add(owner)
    return threading.Lock()


def _run(queue: SimpleQueue[Callable[[], object]]) -> None:
    """Run the work of the queue, for ever."""
    _State.worker = _thread.get_ident()
    while True:
        work = queue.get()
        try:
            work()
        except Exception:
            log.exception("finishing a call failed")
        # Otherwise it would live until the next work comes.
        del work


def _collector_phase(phase: str, _: object) -> None:
    """Note in which thread the garbage collector runs."""
    _State.collecting = _thread.get_ident() if phase == "start" else _NO_THREAD


def _after_fork() -> None:
    """Start anew in a forked child, where the thread does not exist. The work is the parent's."""
    _State.queue = SimpleQueue()
    _State.is_started = False
    _State.worker = _NO_THREAD
    _State.collecting = _NO_THREAD
    for owner in _owners:
        owner._lock = threading.Lock()


_owners: weakref.WeakSet[Any] = weakref.WeakSet()

gc.callbacks.append(_collector_phase)
atexit.register(flush)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
