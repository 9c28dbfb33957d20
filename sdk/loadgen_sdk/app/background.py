"""Finish work in a background thread: that of destructors, and what would hold up the application.

The garbage collector may run a destructor, or close a generator, in the middle of any code, also
of code that holds a lock which the destructor would need. A destructor therefore passes its work
to `run_in_background`, which takes no lock and returns at once. `SimpleQueue.put` may be called in
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

FLUSH_TIMEOUT_S = 5.0
"""How long `flush` waits. It also runs at exit, which a slow observer must not delay for longer."""

_NO_THREAD = 0


class _State:
    """The background thread of this process.

    Attributes:
        queue: The functions that the thread is to call.
        is_started: The thread was started.
        thread_id: The id of the thread.
        collecting_thread_id: The id of the thread in which the garbage collector runs.
    """

    queue: SimpleQueue[Callable[[], object]] = SimpleQueue()
    is_started = False
    thread_id = _NO_THREAD
    collecting_thread_id = _NO_THREAD


def run_in_background(function: Callable[[], object]) -> None:
    """Call a function in the background thread, after those that were passed before it.

    The process has one background thread, which is started when it is first needed. This may be
    called in a destructor, because it takes no lock and returns at once. An exception of the
    function is logged.
    """
    _State.queue.put(function)
    if _State.is_started:
        return

    # This is set before the start, so that no other thread starts a second background thread.
    _State.is_started = True
    try:
        # The private function is used, because `threading.Thread.start` takes locks, for which a
        # destructor could wait forever.
        _thread.start_new_thread(_run_functions, (_State.queue,))
    except RuntimeError:
        # The interpreter is shutting down and starts no more threads.
        _State.is_started = False


def is_collecting_garbage() -> bool:
    """Return True if the garbage collector runs in this thread.

    The code that the collector has interrupted may then hold any lock.
    """
    return _State.collecting_thread_id == _thread.get_ident()


def flush(timeout_s: float = FLUSH_TIMEOUT_S) -> bool:
    """Wait until the background thread has called all functions passed so far.

    Return False if that takes longer than the timeout. In the background thread itself, return True
    without waiting, because a wait would never end.
    """
    is_background_thread = _State.thread_id == _thread.get_ident()
    if not _State.is_started or is_background_thread:
        return True
    done = threading.Event()
    run_in_background(done.set)
    return done.wait(timeout_s)


def create_fork_safe_lock(owner: object) -> threading.Lock:
    """Return a new lock, which `owner` has to store as `owner._lock`.

    After a fork, the attribute is replaced by a new lock in the child: a thread of the parent may
    have held the old one, and no thread of the child would release it.
    """
    _lock_owners.add(owner)
    return threading.Lock()


def _run_functions(queue: SimpleQueue[Callable[[], object]]) -> None:
    """Call the functions of the queue one after the other, without an end.

    This is what the background thread does. It ends with the process.

    A function that raises is logged, so that one defect does not stop the thread.
    """
    _State.thread_id = _thread.get_ident()
    while True:
        function = queue.get()
        try:
            function()
        except Exception:
            log.exception("a call could not be finished")
        # The variable would keep the function and its objects alive until the next one comes.
        del function


def _note_collecting_thread(phase: str, _: object) -> None:
    """Note in which thread the garbage collector runs. `gc` calls this at its start and end."""
    _State.collecting_thread_id = _thread.get_ident() if phase == "start" else _NO_THREAD


def _reset_after_fork() -> None:
    """Forget the background thread and the locks of the parent in a forked child.

    The thread does not exist there, and the parent runs the functions in the queue. A lock that a
    thread of the parent held would never be released, so that each object that has got a lock from
    `create_fork_safe_lock` gets a new one.
    """
    _State.queue = SimpleQueue()
    _State.is_started = False
    _State.thread_id = _NO_THREAD
    _State.collecting_thread_id = _NO_THREAD
    for owner in _lock_owners:
        owner._lock = threading.Lock()


_lock_owners: weakref.WeakSet[Any] = weakref.WeakSet()

gc.callbacks.append(_note_collecting_thread)
atexit.register(flush)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_after_fork)
