"""Calls that have ended and are not counted yet, for metrics that are slow to count.

They are counted in the background, or when somebody reads the metrics, whichever comes first, so
that what is read is exact.
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

MAX_UNCOUNTED = 16
"""How many items wait. To count more at once would keep other threads waiting for a millisecond."""


class Backlog(Generic[ItemT]):
    """Items that are counted in their order, in one thread at a time. To add one is cheap."""

    def __init__(self, count: Callable[[ItemT], None], max_uncounted: int = MAX_UNCOUNTED) -> None:
        """Start empty. `count` is called with each item."""
        self._count = count
        self._max_uncounted = max_uncounted
        self._uncounted: deque[ItemT] = deque()
        self._is_scheduled = False  # the background thread is going to count
        self._counting_lock = threading.RLock()
        _instances.add(self)

    def add(self, item: ItemT) -> None:
        """Add an item, to be counted."""
        self._uncounted.append(item)
        if len(self._uncounted) >= self._max_uncounted and not self._is_scheduled:
            self._is_scheduled = True
            run_in_background(self.count_all)

    def count_all(self) -> None:
        """Count all items so far. Exceptions of `count` are logged."""
        # It is cleared first, so that what is added from now on is scheduled again.
        self._is_scheduled = False
        with self._counting_lock:
            while self._uncounted:
                try:
                    self._count(self._uncounted.popleft())
                except Exception:
                    log.exception("an observer of measurements failed")

    def prepare_fork(self) -> None:
        """Count all items in this process, and count nothing while the process is copied."""
        self.count_all()
        self._counting_lock.acquire()

    def continue_in_parent(self) -> None:
        """Continue after a fork."""
        self._counting_lock.release()

    def continue_in_child(self) -> None:
        """Continue after a fork, without items of the parent that ended meanwhile."""
        self._uncounted.clear()
        self._is_scheduled = False
        self._counting_lock.release()


_instances: weakref.WeakSet[Backlog[Any]] = weakref.WeakSet()


def _count_all_instances() -> None:
    for backlog in _instances:
        backlog.count_all()


def _prepare_fork_of_all() -> None:
    for backlog in _instances:
        backlog.prepare_fork()


def _continue_all_in_parent() -> None:
    for backlog in _instances:
        backlog.continue_in_parent()


def _continue_all_in_child() -> None:
    for backlog in _instances:
        backlog.continue_in_child()


atexit.register(_count_all_instances)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_prepare_fork_of_all,
        after_in_parent=_continue_all_in_parent,
        after_in_child=_continue_all_in_child,
    )
