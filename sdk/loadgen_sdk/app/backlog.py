"""What has ended and is not counted yet: metrics of packages that take longer to count than a call may cost.

It is counted in the background, or when somebody reads the metrics, whichever is first: what is read is exact.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar

from .finishing import later

log = logging.getLogger("loadgen_sdk")

T = TypeVar("T")
MOST_UNCOUNTED = 16  # what waits to be counted: all of it at once keeps others from the interpreter for a millisecond


class Backlog(Generic[T]):
    """`add` costs next to nothing; `count_all` calls `count` with each, in order, in one thread at a time."""

    def __init__(self, count: Callable[[T], None], most: int = MOST_UNCOUNTED) -> None:
        self._count, self._most = count, most
        self._uncounted: deque[T] = deque()
        self._handed_over = False  # the background thread is going to count
        self._counting = threading.RLock()
        _instances.add(self)

    def add(self, item: T) -> None:
        """Keep one, to be counted."""
        self._uncounted.append(item)
        if len(self._uncounted) >= self._most and not self._handed_over:
            self._handed_over = True
            later(self.count_all)

    def count_all(self) -> None:
        """Count what has come until now. A fault of the package's is logged."""
        self._handed_over = False  # before the look: what comes after it is handed over again
        with self._counting:
            while self._uncounted:
                try:
                    self._count(self._uncounted.popleft())
                except Exception:
                    log.exception("an observer of measurements failed")

    def before_fork(self) -> None:
        """What has ended is counted in this process, and nothing is being counted while the process is copied."""
        self.count_all()
        self._counting.acquire()

    def after_fork(self, *, in_child: bool) -> None:
        if in_child:  # a call that ended meanwhile is the parent's
            self._uncounted.clear()
            self._handed_over = False
        self._counting.release()


_instances: weakref.WeakSet[Backlog[Any]] = weakref.WeakSet()


def _each(step: Callable[[Backlog[Any]], None]) -> Callable[[], None]:
    def all_of_them() -> None:
        for one in _instances:
            step(one)

    return all_of_them


atexit.register(_each(Backlog.count_all))
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_each(Backlog.before_fork),
        after_in_parent=_each(partial(Backlog.after_fork, in_child=False)),
        after_in_child=_each(partial(Backlog.after_fork, in_child=True)),
    )
