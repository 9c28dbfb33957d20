"""The project's client for code without an event loop: the same `Client`, on a loop in a thread of its own.

No second client: every call is handed over, and its result handed back. Instants are still the kernel's.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import warnings
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future
from contextvars import copy_context
from typing import Any, TypeVar

from ..errors import ClientError
from ..request import Completion
from .client import LEFT, Askable, Client, Event
from .measurement import latest_measurement, tell_latest

T = TypeVar("T")
_OVER = object()


class BlockingClient:
    """`with BlockingClient(url) as c: c.complete("Hello")`. Arguments and errors are those of `Client`.

    Threads may share one. Observers are called in its own thread. Inside a running event loop it blocks that loop, of
    which it warns: use `Client` there.
    """

    def __init__(self, url: str, **options: Any) -> None:
        if asyncio._get_running_loop() is not None:
            what = "a BlockingClient inside a running event loop makes every other task stand still; use Client"
            warnings.warn(what, RuntimeWarning, stacklevel=2)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="loadgen_sdk", daemon=True)
        self._thread.start()

        async def make() -> Client:
            return Client(url, **options)

        try:
            self.client = self._wait(make())
        except BaseException:
            self._stop()
            raise

    def open(self) -> None:
        """Resolve and probe now, not at the first call. Raises TargetUnusable."""
        self._wait(self.client.open())

    def complete(self, request: Askable) -> Completion:
        """Send and wait; a request that fails comes back as a Completion with its `failure`."""

        async def ask() -> Any:
            return await self.client.complete(request), latest_measurement()

        completion, measurement = self._wait(ask())
        if measurement is not None:
            tell_latest(measurement)
        return completion  # type: ignore[no-any-return]

    def stream(self, request: Askable) -> Iterator[Event]:
        """Output events as they arrive. Raises RequestFailed after what did arrive. Leaving the loop ends it."""
        arrived: queue.SimpleQueue[Any] = queue.SimpleQueue()
        tasks: list[asyncio.Task[Any] | None] = []

        async def listen() -> Any:
            tasks.append(asyncio.current_task())
            try:
                async for event in self.client.stream(request):
                    arrived.put(event)
            finally:
                arrived.put(_OVER)
            return latest_measurement()

        listening = self._hand_over(listen())
        try:
            while (event := arrived.get()) is not _OVER:
                yield event
            measurement = listening.result()
            if measurement is not None:
                tell_latest(measurement)
        finally:
            if not listening.done() and tasks and tasks[0] is not None and not self._loop.is_closed():
                self._loop.call_soon_threadsafe(tasks[0].cancel, LEFT)
            else:
                listening.cancel()

    def close(self) -> None:
        """Drop every connection and end the thread. Harmless twice."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.client.close)
            self._stop()

    def __enter__(self) -> BlockingClient:
        try:
            self.open()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _hand_over(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run `work` over there, in the context of this caller."""
        if self._loop.is_closed():
            work.close()
            raise ClientError("this client is closed")
        context = copy_context()

        async def within() -> T:
            return await asyncio.get_running_loop().create_task(work, context=context)

        return asyncio.run_coroutine_threadsafe(within(), self._loop)

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        promised = self._hand_over(work)
        try:
            return promised.result()
        finally:
            promised.cancel()  # Ctrl-C while it waits; does nothing to what is done
