"""The project's client for code without an event loop: a `Client` on an event loop in its own thread.

Each call is passed to that thread, and its result is passed back. Instants are still the kernel's stamps.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import warnings
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future
from contextvars import Context, copy_context
from typing import Any, TypeVar

from ..errors import ClientError
from ..request import Completion
from .client import LOOP_LEFT, Askable, Client, Event
from .labels import Labels
from .measurement import latest_measurement, take_latest, tell_latest

T = TypeVar("T")
_END_OF_STREAM = object()


class BlockingClient:
    """`with BlockingClient(url) as c: c.complete("Hello")`. Arguments and errors are those of `Client`.

    Several threads may share one client. Observers are called in the client's thread. Used inside a running event
    loop it blocks that loop and issues a RuntimeWarning: use `Client` there.
    """

    def __init__(self, url: str, **options: Any) -> None:
        if asyncio._get_running_loop() is not None:
            message = "a BlockingClient inside a running event loop makes every other task stand still; use Client"
            warnings.warn(message, RuntimeWarning, stacklevel=2)
        self._loop, self._stopped = asyncio.new_event_loop(), asyncio.Event()
        self._thread = threading.Thread(target=self._run_loop, name="loadgen_sdk", daemon=True)
        self._thread.start()

        async def make_client() -> Client:
            return Client(url, **options)

        try:
            self.client = self._wait(make_client())
        except BaseException:
            self._stop()
            raise

    def open(self) -> None:
        """Resolve the host and probe the server now instead of at the first call. Raises TargetUnusable."""
        self._wait(self.client.open())

    def complete(
        self, request: Askable, *, labels: Labels | None = None, raise_on_failure: bool = False
    ) -> Completion:
        """Send a request and wait for it. A failed request returns a Completion with its `failure`, or raises it."""
        return self._wait(
            self.client.complete(request, labels=labels, raise_on_failure=raise_on_failure)
        )

    def stream(self, request: Askable, *, labels: Labels | None = None) -> Iterator[Event]:
        """Yield output events as they arrive; raises RequestFailed after them. Leaving the loop ends the request."""
        events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        tasks: list[asyncio.Task[Any] | None] = []

        async def put_events() -> None:
            tasks.append(asyncio.current_task())
            try:
                async for event in self.client.stream(request, labels=labels):
                    events.put(event)
            finally:
                events.put(_END_OF_STREAM)

        context = copy_context()
        listener = self._submit(put_events(), context)
        try:
            while (event := events.get()) is not _END_OF_STREAM:
                yield event
            listener.result()
            take_latest(context)
        finally:
            if (
                not listener.done()
                and tasks
                and tasks[0] is not None
                and not self._loop.is_closed()
            ):
                self._loop.call_soon_threadsafe(tasks[0].cancel, LOOP_LEFT)
            else:
                listener.cancel()

    def close(self) -> None:
        """Close every connection and end the thread. May be called twice."""
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

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._stopped.wait())
            left = asyncio.all_tasks(self._loop)
            for task in left:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        finally:
            self._loop.close()

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stopped.set)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _submit(self, coroutine: Coroutine[Any, Any, T], context: Context) -> Future[T]:
        """Run `coroutine` in the client's thread, in this copy of the caller's context."""
        if self._loop.is_closed():
            coroutine.close()
            raise ClientError("this client is closed")

        async def tell_context() -> T:
            try:
                return await coroutine
            finally:
                if (measurement := latest_measurement()) is not None:
                    context.run(tell_latest, measurement)

        async def run_here() -> T:
            return await context.run(self._loop.create_task, tell_context())

        return asyncio.run_coroutine_threadsafe(run_here(), self._loop)

    def _wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        context = copy_context()
        future = self._submit(coroutine, context)
        try:
            return future.result()
        finally:
            take_latest(context)
            future.cancel()  # for Ctrl-C during the wait; no effect on a finished future
