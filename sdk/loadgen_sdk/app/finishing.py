"""Finishes work in a thread of its own: what a destructor found, and what would hold up the application.

The garbage collector may run a destructor, or close a generator, in the middle of any code, also of code that holds a
lock which the destructor would need. So a destructor does no work: it hands it over with `later`, which takes no lock
(`SimpleQueue.put` may be called in destructors) and returns at once.
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


class _State:
    """The queue of this process, and whether its thread runs. `collecting`: the thread in which the collector runs."""

    queue: SimpleQueue[Callable[[], object]] = SimpleQueue()
    started = False
    worker = collecting = 0


def later(work: Callable[[], object]) -> None:
    """Do `work` in the background thread, in the order of the calls. Exceptions are logged. Safe in destructors."""
    _State.queue.put(work)
    if not _State.started:
        _State.started = True
        try:
            _thread.start_new_thread(
                _run, (_State.queue,)
            )  # `threading.Thread.start` would take locks
        except RuntimeError:  # the interpreter is going down
            _State.started = False


def collecting() -> bool:
    """Whether the garbage collector is running in this thread: the code below it may hold any lock."""
    return _State.collecting == _thread.get_ident()


def flush(timeout_s: float = FLUSH_S) -> bool:
    """Wait until everything handed over so far is done. False: it took longer. At once in the background thread."""
    if not _State.started or _State.worker == _thread.get_ident():
        return True
    done = threading.Event()
    later(done.set)
    return done.wait(timeout_s)


def lock_of(owner: Any) -> threading.Lock:
    """The lock that `owner` keeps as `_lock`: a child of a fork has a new one, as no thread there would release it."""
    _owners.add(owner)
    return threading.Lock()


def _run(queue: SimpleQueue[Callable[[], object]]) -> None:
    _State.worker = _thread.get_ident()
    while True:
        work = queue.get()
        try:
            work()
        except Exception:
            log.exception("finishing a call failed")
        del work  # or it would live until the next one


def _collector_phase(phase: str, _: object) -> None:
    _State.collecting = _thread.get_ident() if phase == "start" else 0


def _after_fork() -> None:
    """In a child: the thread is not there, and what was handed over is the parent's."""
    _State.queue, _State.started, _State.worker, _State.collecting = SimpleQueue(), False, 0, 0
    for owner in _owners:
        owner._lock = threading.Lock()


_owners: weakref.WeakSet[Any] = weakref.WeakSet()

gc.callbacks.append(_collector_phase)
atexit.register(flush)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
