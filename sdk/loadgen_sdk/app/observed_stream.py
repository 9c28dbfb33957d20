"""Observe the events of a stream that the application reads, and notice when it stops reading.

A stream refers to its iterator, and the iterator to the stream. Such a cycle would delay the end
of an abandoned stream until the garbage collector runs, and with it the return of its permit. The
objects here refer to the call and to the events, and not to the stream.
"""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from time import monotonic_ns
from types import FrameType
from typing import TYPE_CHECKING, Any

from .background import run_in_background
from .steps import Steps, as_function

if TYPE_CHECKING:
    from .observed_call import ObservedCall

_MAX_READER_FRAMES = 6
"""The frames between a stream and its reader: loops of the package and of other instrumentations.
"""


class ObservedEvents:
    """Replaces the iterator inside a `Stream` or `AsyncStream` and passes each event to a call.

    Each loop over the stream gets a generator of its own, which is closed when the loop is left. A
    `break` is therefore noticed at once.
    """

    def __init__(self, events: Any, observed: ObservedCall) -> None:
        """Observe events for a call."""
        self._events = events
        self._observed = observed
        self._single: Any = None  # the generator behind `next` and `anext`

    def __iter__(self) -> Iterator[Any]:
        """Return a generator for one loop."""
        return _observe(self._events, self._observed, self)

    def __aiter__(self) -> AsyncIterator[Any]:
        """Return a generator for one async loop."""
        return _observe_async(self._events, self._observed, self)

    def __next__(self) -> Any:
        """Return the next event."""
        self._single = self._single or _observe(self._events, self._observed)
        return next(self._single)

    def __anext__(self) -> Any:
        """Return an awaitable for the next event."""
        self._single = self._single or _observe_async(self._events, self._observed)
        return anext(self._single)

    def __del__(self) -> None:
        """End the call of a stream that was never read, in another thread."""
        if not self._observed.reported:
            run_in_background(self._observed.abandoned)


class ObservedStream(ObservedEvents):
    """A stream of LiteLLM, observed. In all else it is that stream, also for `isinstance`."""

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The class of the stream."""
        return type(self._events)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the stream."""
        return getattr(self._events, name)

    def close(self) -> Any:
        """End the call and close the stream."""
        self._observed.abandoned()
        return self._events.close()

    def aclose(self) -> Any:
        """End the call and close the async stream."""
        self._observed.abandoned()
        return self._events.aclose()

    def __enter__(self) -> Any:
        """Enter the stream."""
        self._events.__enter__()
        return self

    def __exit__(self, *error: object) -> Any:
        """End the call and leave the stream."""
        self._observed.abandoned()
        return self._events.__exit__(*error)

    async def __aenter__(self) -> Any:
        """Enter the async stream."""
        await self._events.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> Any:
        """End the call and leave the async stream."""
        self._observed.abandoned()
        return await self._events.__aexit__(*error)


def _observe(
    events: Iterator[Any],
    observed: ObservedCall,
    owner: object = None,  # noqa: ARG001 - kept alive
) -> Iterator[Any]:
    """Yield the events of a stream and pass them to the call.

    `owner` is kept alive while the events are read, for loops that hold no reference to the stream.
    """
    observe = observed.tracker.observe
    clock = monotonic_ns
    hides_usage = observed.hides_usage
    try:
        for event in events:
            observe(event, clock())
            if not hides_usage or event.choices or getattr(event, "usage", None) is None:
                yield event
        observed.stream_ended()
    except BaseException as error:
        observed.stream_failed(error)
        raise


async def _observe_async(
    events: AsyncIterator[Any],
    observed: ObservedCall,
    owner: object = None,  # noqa: ARG001 - kept alive
) -> AsyncIterator[Any]:
    """Yield the events of an async stream, as `_observe`."""
    observe = observed.tracker.observe
    clock = monotonic_ns
    hides_usage = observed.hides_usage
    try:
        async for event in events:
            observe(event, clock())
            if not hides_usage or event.choices or getattr(event, "usage", None) is None:
                yield event
        observed.stream_ended()
    except BaseException as error:
        observed.stream_failed(error)
        raise


def observe_stream(result: Any, observed: ObservedCall) -> Any:
    """Observe the stream that a method of a package returned. Return what the application gets.

    A stream of the openai or the anthropic package is changed in place.
    """
    if not hasattr(result, "_iterator"):
        wrapped = ObservedStream(result, observed)
        observed.get_stream = weakref.ref(wrapped)
        return wrapped
    stream = unwrapped(result)
    observed.get_stream = weakref.ref(stream)
    # The copy stands in for the stream where a reference to it would make a cycle.
    stream_copy = copy.copy(stream)
    stream_copy._iterator = None
    events = _iterator_without_cycle(stream, stream_copy)
    stream._iterator = ObservedEvents(events, observed)
    stream.close = partial(_end_call_and_close, observed, stream_copy)
    _watch_response(getattr(stream, "response", None), events, observed)
    return result


def observe_unread_response(response: Any, observed: ObservedCall, blocking: bool) -> None:
    """Observe a response of `with_streaming_response`, which the application reads by itself.

    What it parses is observed, and the call ends when the response is closed.
    """
    parse = response.parse
    close = response.close

    def parse_steps(*args: Any, **kwargs: Any) -> Steps[Any]:
        result = yield partial(parse, *args, **kwargs)
        return result if observed.reported else observed.observe_result(result)

    def close_steps() -> Steps[None]:
        consumed = bool(getattr(response.http_response, "is_stream_consumed", False))
        try:
            if consumed and not observed.streamed and not observed.reported:
                yield from parse_steps()
        except Exception:
            # What the application read is no whole response, or not what it asked for.
            observed.read_unparsed(response.http_response)
        observed.raw_stream_closed(consumed)
        yield close

    response.parse = as_function(parse_steps, is_blocking=blocking)
    response.close = as_function(close_steps, is_blocking=blocking)


def unwrapped(stream: Any) -> Any:
    """Return the stream of the package inside the proxies of other instrumentations (wrapt)."""
    inner = getattr(stream, "__wrapped__", None)
    while inner is not None:
        stream = inner
        inner = getattr(stream, "__wrapped__", None)
    return stream


def is_read_by_caller(stream: Any, skipped_frames: int) -> bool:
    """Return True if one of the callers reads a stream for the application.

    Such a reader, like `chat.completions.stream`, then fails or is given up itself.

    Args:
        stream: The stream.
        skipped_frames: How many callers of this function are not looked at.
    """
    frame: FrameType | None = sys._getframe(skipped_frames + 1)
    for _ in range(_MAX_READER_FRAMES):
        if frame is None:
            return False
        if _is_frame_of_reader(frame, stream):
            return True
        frame = frame.f_back
    return False


def _iterator_without_cycle(stream: Any, stream_copy: Any) -> Any:
    """Return the events of a stream from an iterator that refers to a copy of the stream."""
    make_iterator = getattr(type(stream), "__stream__", None)
    return stream._iterator if make_iterator is None else make_iterator(stream_copy)


def _end_call_and_close(observed: ObservedCall, stream_copy: Any) -> Any:
    """End the call and close the stream. This replaces the method `close` of a stream.

    It uses a copy, because the stream may be gone: often the method that closes it is all that is
    kept.
    """
    observed.abandoned()
    return type(stream_copy).close(stream_copy)


def _watch_response(response: Any, events: Any, observed: ObservedCall) -> None:
    """Notice when the response of a stream is closed.

    `chat.completions.stream` and similar methods close the response, and not the stream.
    """
    name = "aclose" if hasattr(events, "__anext__") else "close"
    close = getattr(response, name, None)
    if close is not None:
        setattr(response, name, partial(_response_closed, observed, weakref.ref(events), close))


def _response_closed(
    observed: ObservedCall, get_events: Callable[[], Any], close: Callable[[], Any]
) -> Any:
    """End the call of a stream whose response is closed, and close the response.

    Events that end close the response themselves. They are then running, or over.
    """
    events = get_events()
    if events is None or _is_suspended(events) is False:
        return close()
    error = _error_of_reader(observed)
    if error is None:
        observed.abandoned()
        return close()
    if hasattr(events, "__anext__"):
        return _read_rest_and_close_async(observed, events, error, close)
    # The rest would only complete what is measured. The application has an error of its own to see.
    try:
        if observed.tracker.is_near_its_end:
            for event in events:
                observed.tracker.observe(event, monotonic_ns())
    except Exception:
        pass
    observed.stream_failed(error)
    return close()


async def _read_rest_and_close_async(
    observed: ObservedCall, events: Any, error: BaseException, close: Any
) -> None:
    """Read the end of an async stream, which has the token counts, and close its response."""
    try:
        if observed.tracker.is_near_its_end:
            async for event in events:
                observed.tracker.observe(event, monotonic_ns())
    except Exception:
        pass
    finally:
        observed.stream_failed(error)
        await close()


def _error_of_reader(observed: ObservedCall) -> BaseException | None:
    """Return the error by which a reader refuses the response, or None if the stream was left.

    The response is then not what the application asked for.
    """
    error = sys.exc_info()[1]
    if error is None:
        if observed.left_by_reader:
            # The application has caught the error already.
            return ValueError("the answer is not what was asked for")
        return None
    return error if _is_raised_by_reader(error, observed.get_stream()) else None


def _is_raised_by_reader(error: BaseException, stream: Any) -> bool:
    """Return True if what reads the stream for the application has raised an error."""
    trace = error.__traceback__
    while trace is not None:
        if _is_frame_of_reader(trace.tb_frame, stream):
            return True
        trace = trace.tb_next
    return False


def _is_frame_of_reader(frame: FrameType, stream: Any) -> bool:
    """Return True if a frame runs a method of an object that reads this stream."""
    attributes = getattr(frame.f_locals.get("self"), "__dict__", {})
    return stream is not None and unwrapped(attributes.get("_raw_stream")) is stream


def _is_suspended(events: Any) -> bool | None:
    """Return whether a generator, sync or async, can continue. Return None if it is none."""
    for prefix in ("gi", "ag"):
        if hasattr(events, f"{prefix}_frame"):
            has_frame = getattr(events, f"{prefix}_frame") is not None
            return has_frame and not getattr(events, f"{prefix}_running")
    return None
