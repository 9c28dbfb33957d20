"""The client for code without an event loop. It runs a `Client` in an event loop of its own thread.

Each call is passed to that thread, and its result is passed back. The times of a measurement do not
include this detour, because they are timestamps of the kernel.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import warnings
from collections.abc import AsyncIterator, Coroutine, Iterator
from concurrent.futures import Future
from contextvars import Context, copy_context
from typing import Any, TypeVar

from ..errors import ClientError
from ..request import Completion
from .client import LOOP_LEFT, Client, Event, RequestLike
from .labels import Labels
from .measurement import copy_latest_measurement

ResultT = TypeVar("ResultT")


class BlockingClient:
    """A client for one endpoint, one model and one API, for code without an event loop.

    Its arguments and errors are those of `Client`:

        with BlockingClient("http://localhost:8000") as client:
            print(client.complete("Hello").text)

    Several threads may share a client. Observers are called in the client's own thread.
    """

    def __init__(self, url: str, **options: Any) -> None:
        """Create a client and start its thread. It is not connected yet.

        A RuntimeWarning is issued if an event loop is running in this thread, because each call of
        the client would block that loop.

        Args:
            url: The URL of the endpoint.
            options: The options of `Client`.

        Raises:
            WrongUse: An option is not valid.
            TargetUnusable: The URL is not valid.
        """
        # The public `asyncio.get_running_loop` would raise an exception if no loop is running.
        is_event_loop_running = asyncio._get_running_loop() is not None
        if is_event_loop_running:
            warnings.warn(
                "a BlockingClient inside a running event loop blocks all other tasks; use Client",
                RuntimeWarning,
                stacklevel=2,
            )

        # A Client needs a running event loop. It gets one in a thread of its own.
        self._loop = asyncio.new_event_loop()
        self._stop_requested = asyncio.Event()
        self._thread = threading.Thread(target=self._run_loop, name="loadgen_sdk", daemon=True)
        self._thread.start()

        try:
            self.client = self._wait_for(_create_client(url, options))
        except BaseException:
            self._stop_thread()
            raise

    def open(self) -> None:
        """Probe the server if necessary, resolve the host and connect.

        Without this, the first call does it.

        Raises:
            TargetUnusable: No connection can be opened, or the probe shows that no request can
                work.
            ClientError: The client is closed.
        """
        self._wait_for(self.client.open())

    def complete(
        self, request: RequestLike, *, labels: Labels | None = None, raise_on_failure: bool = False
    ) -> Completion:
        """Send a request and wait for its completion.

        Args:
            request: A Request, a text or messages.
            labels: The labels of the call.
            raise_on_failure: Raise RequestFailed for a failed request. Otherwise a Completion with
                its `failure` is returned.

        Raises:
            TargetUnusable: The client cannot be opened.
            ThrottleTimeout: The throttle gave no permit in time.
            WrongUse: The request is not valid.
            ClientError: The client is closed.
        """
        return self._wait_for(
            self.client.complete(request, labels=labels, raise_on_failure=raise_on_failure)
        )

    def stream(self, request: RequestLike, *, labels: Labels | None = None) -> Iterator[Event]:
        """Yield the output events as they arrive. Leaving the loop ends the request.

        Args:
            request: A Request, a text or messages.
            labels: The labels of the call.

        Raises:
            RequestFailed: The request failed. It is raised after the events that did arrive.
        """
        # The call runs in the client's thread, in a copy of the caller's context variables.
        context = copy_context()
        relay = _EventRelay(self.client.stream(request, labels=labels))

        future = self._submit(relay.run(), context)
        try:
            yield from relay.events()
            future.result()  # Raises the error of a failed request.
            # The measurement was stored in the copy, where `latest_measurement()` of the caller
            # would not find it.
            copy_latest_measurement(context)
        finally:
            self._stop_relay(relay, future)

    def _stop_relay(self, relay: _EventRelay, future: Future[None]) -> None:
        """Stop reading a stream in the client's thread, because its caller does not read it.

        The relay is a task of that thread which reads the stream. This method is called in the
        thread of the caller. It has no effect if the stream has ended.

        Args:
            relay: The relay of the stream.
            future: The result of the relay, which is done when the relay has stopped reading.
        """
        has_ended = future.done() or self._loop.is_closed()
        if relay.task is None or has_ended:
            # This prevents the start of a task that has not started yet.
            future.cancel()
            return

        # `Task.cancel` takes a message. With LOOP_LEFT, the call counts as abandoned by its reader,
        # and not as cancelled.
        self._loop.call_soon_threadsafe(relay.task.cancel, LOOP_LEFT)

    def close(self) -> None:
        """Close every connection and end the thread. May be called more than once."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.client.close)
            self._stop_thread()

    def __enter__(self) -> BlockingClient:
        """Open the client."""
        try:
            self.open()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Close the client."""
        self.close()

    def _run_loop(self) -> None:
        """Run the event loop until the client is closed. This is all that the thread does."""
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._stop_requested.wait())
            self._loop.run_until_complete(_cancel_tasks(asyncio.all_tasks(self._loop)))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        finally:
            self._loop.close()

    def _stop_thread(self) -> None:
        """End the event loop, and wait for the thread unless this is called in it."""
        self._loop.call_soon_threadsafe(self._stop_requested.set)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _submit(self, coroutine: Coroutine[Any, Any, ResultT], context: Context) -> Future[ResultT]:
        """Start a coroutine in the client's thread. Return a Future to wait for its result.

        Args:
            coroutine: The coroutine.
            context: A copy of the caller's context, in which the coroutine runs. It has the labels
                and the priority of the caller, and gets the measurement of the call.

        Raises:
            ClientError: The client is closed.
        """
        if self._loop.is_closed():
            coroutine.close()
            raise ClientError("this client is closed")

        async def run_in_context() -> ResultT:
            return await self._loop.create_task(coroutine, context=context)

        return asyncio.run_coroutine_threadsafe(run_in_context(), self._loop)

    def _wait_for(self, coroutine: Coroutine[Any, Any, ResultT]) -> ResultT:
        """Run a coroutine in the client's thread and return its result.

        The coroutine runs in a copy of the caller's context. The measurement of its call is copied
        back from there, so that `latest_measurement()` returns it to the caller.
        """
        context = copy_context()
        future = self._submit(coroutine, context)
        try:
            return future.result()
        finally:
            copy_latest_measurement(context)
            # If Ctrl-C has ended the wait, this ends the call, too. Otherwise the future is done,
            # and this has no effect.
            future.cancel()


class _EventRelay:
    """Passes the events of a stream from the client's thread to the thread that reads them.

    Attributes:
        task: The task that reads the stream. None until it has started.
    """

    def __init__(self, stream: AsyncIterator[Event]) -> None:
        self.task: asyncio.Task[Any] | None = None
        self._stream = stream
        # None marks the end of the stream.
        self._queue: queue.SimpleQueue[Event | None] = queue.SimpleQueue()

    async def run(self) -> None:
        """Read the whole stream. This runs in the client's thread."""
        self.task = asyncio.current_task()
        try:
            async for event in self._stream:
                self._queue.put(event)
        finally:
            self._queue.put(None)

    def events(self) -> Iterator[Event]:
        """Yield the events in the thread of the caller, until the stream has ended."""
        while True:
            event = self._queue.get()
            if event is None:
                return
            yield event


async def _create_client(url: str, options: dict[str, Any]) -> Client:
    """Return a client of the running event loop."""
    return Client(url, **options)


async def _cancel_tasks(tasks: set[asyncio.Task[object]]) -> None:
    """Cancel tasks and wait for their end."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
