"""A queue of ended calls for observers that need more time than a call should spend on them.

The items are processed in the background, or when somebody reads the result (the metrics, the
file), whichever comes first. What is read is therefore complete.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from .background import run_in_background

log = logging.getLogger("loadgen_sdk")

ItemT = TypeVar("ItemT")

MAX_PENDING = 16
"""How many items wait. To process more at once would keep other threads waiting for a millisecond.
"""


class Backlog(Generic[ItemT]):
    """A queue of items that are processed in their order, in one thread at a time.

    To add an item is cheap, so that a call of the application can do it.
    """

    def __init__(self, process: Callable[[ItemT], None], max_pending: int = MAX_PENDING) -> None:
        """Create an empty queue.

        Args:
            process: The function that is called with each item.
            max_pending: The number of waiting items at which the background thread starts to
                process them.
        """
        self._process = process
        self._max_pending = max_pending
        self._pending: deque[ItemT] = deque()
        self._is_scheduled = False  # The background thread is going to process the items.

        # A thread that processes items may fork the process, for example in an observer. The hook
        # `prepare_fork` then takes the lock a second time in the same thread.
        self._processing_lock = threading.RLock()

        # All items are processed at the exit of the process and before a fork.
        _instances.add(self)

    def add(self, item: ItemT) -> None:
        """Add an item, and start the processing in the background if enough items wait."""
        self._pending.append(item)
        if len(self._pending) >= self._max_pending and not self._is_scheduled:
            self._is_scheduled = True
            run_in_background(self.process_all)

    def process_all(self) -> None:
        """Process all items so far, in this thread.

        An exception of `process` is logged, because observers must not fail the application.
        """
        # This is cleared first, so that an item that is added from now on schedules a new pass.
        self._is_scheduled = False
        with self._processing_lock:
            while self._pending:
                try:
                    self._process(self._pending.popleft())
                except Exception:
                    log.exception("an observer of measurements failed")

    def prepare_fork(self) -> None:
        """Process all items, and process nothing more while the process is copied."""
        self.process_all()
        self._processing_lock.acquire()

    def continue_in_parent(self) -> None:
        """Continue after a fork."""
        self._processing_lock.release()

    def continue_in_child(self) -> None:
        """Continue after a fork, without items of the parent that ended meanwhile."""
        self._pending.clear()
        self._is_scheduled = False
        self._processing_lock.release()


_instances: weakref.WeakSet[Backlog[Any]] = weakref.WeakSet()


def _process_all_instances() -> None:
    for backlog in _instances:
        backlog.process_all()


def _prepare_fork_of_all() -> None:
    for backlog in _instances:
        backlog.prepare_fork()


def _continue_all_in_parent() -> None:
    for backlog in _instances:
        backlog.continue_in_parent()


def _continue_all_in_child() -> None:
    for backlog in _instances:
        backlog.continue_in_child()


atexit.register(_process_all_instances)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_prepare_fork_of_all,
        after_in_parent=_continue_all_in_parent,
        after_in_child=_continue_all_in_child,
    )
