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
        self._generator: Any = None  # the one behind `next` and `anext`

    def __iter__(self) -> Iterator[Any]:
        """Return a generator for one loop."""
        return _observe(self._events, self._observed, self)

    def __aiter__(self) -> AsyncIterator[Any]:
        """Return a generator for one async loop."""
        return _observe_async(self._events, self._observed, self)

    def __next__(self) -> Any:
        """Return the next event."""
        self._generator = self._generator or _observe(self._events, self._observed)
        return next(self._generator)

    def __anext__(self) -> Any:
        """Return an awaitable for the next event."""
        self._generator = self._generator or _observe_async(self._events, self._observed)
        return anext(self._generator)

    def __del__(self) -> None:
        """End the call of a stream that was never read, in another thread."""
        if not self._observed.is_reported:
            run_in_background(self._observed.report_abandoned)


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
        self._observed.report_abandoned()
        return self._events.close()

    def aclose(self) -> Any:
        """End the call and close the async stream."""
        self._observed.report_abandoned()
        return self._events.aclose()

    def __enter__(self) -> Any:
        """Enter the stream."""
        self._events.__enter__()
        return self

    def __exit__(self, *error: object) -> Any:
        """End the call and leave the stream."""
        self._observed.report_abandoned()
        return self._events.__exit__(*error)

    async def __aenter__(self) -> Any:
        """Enter the async stream."""
        await self._events.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> Any:
        """End the call and leave the async stream."""
        self._observed.report_abandoned()
        return await self._events.__aexit__(*error)


def _observe(
    events: Iterator[Any],
    observed: ObservedCall,
    owner: object = None,  # noqa: ARG001 - kept alive
) -> Iterator[Any]:
    """Yield the events of a stream to the application, and pass each to the tracker of the call.

    An event with nothing but token counts that the application has not requested is not yielded.
    The end of the stream, an error and a loop that is left (GeneratorExit) report the call.

    Args:
        events: The events of the stream.
        observed: The call.
        owner: The ObservedEvents. It ends the call in its destructor, and a loop may hold no other
            reference to it, so that this generator keeps it alive.
    """
    # This runs for each event: local names save lookups.
    observe = observed.tracker.event_observer
    clock = monotonic_ns
    hides_usage = observed.hides_usage
    try:
        for event in events:
            observe(event, clock())
            if not hides_usage or event.choices or getattr(event, "usage", None) is None:
                yield event
        observed.report_stream_end()
    except BaseException as error:
        observed.report_stream_error(error)
        raise


async def _observe_async(
    events: AsyncIterator[Any],
    observed: ObservedCall,
    owner: object = None,  # noqa: ARG001 - kept alive
) -> AsyncIterator[Any]:
    """Yield the events of an async stream to the application. All else is as in `_observe`."""
    observe = observed.tracker.event_observer
    clock = monotonic_ns
    hides_usage = observed.hides_usage
    try:
        async for event in events:
            observe(event, clock())
            if not hides_usage or event.choices or getattr(event, "usage", None) is None:
                yield event
        observed.report_stream_end()
    except BaseException as error:
        observed.report_stream_error(error)
        raise


def observe_stream(returned_stream: Any, observed: ObservedCall) -> Any:
    """Observe the stream that a method of a client has returned. Return what the application gets.

    A `Stream` of openai or anthropic is changed in place: its iterator passes each event to the
    call, and closing it or its response ends the call. A stream of LiteLLM, which has another form,
    is wrapped.

    The call refers to the stream only weakly, and the replaced methods refer to a copy of it. A
    strong reference would make a cycle, and the call of a stream that is dropped unread would end
    only when the garbage collector runs.
    """
    if not hasattr(returned_stream, "_iterator"):
        wrapped_stream = ObservedStream(returned_stream, observed)
        observed.get_stream = weakref.ref(wrapped_stream)
        return wrapped_stream

    stream = unwrapped(returned_stream)
    observed.get_stream = weakref.ref(stream)
    stream_copy = copy.copy(stream)
    stream_copy._iterator = None
    events = _iterator_without_cycle(stream, stream_copy)
    stream._iterator = ObservedEvents(events, observed)
    stream.close = partial(_end_call_and_close, observed, stream_copy)
    _watch_response(getattr(stream, "response", None), events, observed)
    return returned_stream


def observe_unread_response(response: Any, observed: ObservedCall, *, is_blocking: bool) -> None:
    """Observe a response of `with_streaming_response`, which the application reads by itself.

    Its methods `parse` and `close` are replaced. What the application parses is observed, and the
    call ends when it closes the response. If it has read the body without parsing it, the body is
    parsed then, for the token counts.
    """
    parse = response.parse
    close = response.close

    def parse_steps(*args: Any, **kwargs: Any) -> Steps[Any]:
        parsed_response = yield partial(parse, *args, **kwargs)
        if observed.is_reported:
            return parsed_response
        return observed.observe_parsed_response(parsed_response)

    def close_steps() -> Steps[None]:
        is_consumed = bool(getattr(response.http_response, "is_stream_consumed", False))
        is_unparsed = not observed.is_streamed and not observed.is_reported
        try:
            if is_consumed and is_unparsed:
                yield from parse_steps()
        except Exception:
            # The body was cut off, or is not what the application has requested.
            observed.read_unparsed(response.http_response)
        observed.report_closed_response(is_consumed=is_consumed)
        yield close

    response.parse = as_function(parse_steps, is_blocking=is_blocking)
    response.close = as_function(close_steps, is_blocking=is_blocking)


def unwrapped(stream: Any) -> Any:
    """Return the stream of the package inside the proxies of other instrumentations (wrapt)."""
    inner = getattr(stream, "__wrapped__", None)
    while inner is not None:
        stream = inner
        inner = getattr(stream, "__wrapped__", None)
    return stream


def is_read_by_calling_code(stream: Any, skipped_frames: int) -> bool:
    """Return True if a helper of the package that reads the stream is in the stack of callers.

    `chat.completions.stream` returns such a helper, which reads the stream for the application. If
    it is in the stack when the loop over the stream is left, it has stopped by itself, and not the
    application.

    Args:
        stream: The stream.
        skipped_frames: How many of the nearest callers are no such helper.
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
    observed.report_abandoned()
    return type(stream_copy).close(stream_copy)


def _watch_response(response: Any, events: Any, observed: ObservedCall) -> None:
    """Replace the method that closes the response of a stream, so that it also ends the call.

    `chat.completions.stream` and similar methods close the response, and not the stream.
    """
    name = "aclose" if hasattr(events, "__anext__") else "close"
    close = getattr(response, name, None)
    if close is not None:
        setattr(
            response,
            name,
            partial(_report_and_close_response, observed, weakref.ref(events), close),
        )


def _report_and_close_response(
    observed: ObservedCall, get_events: Callable[[], Any], close: Callable[[], Any]
) -> Any:
    """Report the call of a stream whose response is closed before its end, and close the response.

    This replaces the method `close` or `aclose` of the response. There are three cases:

    - The stream has ended by itself, and its generator closes the response: only close it.
    - A helper that reads the stream for the application has failed, for example because the output
      is not of the requested form: report its error, after reading the token counts that follow.
    - The application has stopped reading: report the call as abandoned.

    Args:
        observed: The call.
        get_events: Returns the iterator of the stream, or None if it does not exist any more.
        close: Closes the response.
    """
    events = get_events()
    has_ended = events is None or _is_suspended(events) is False
    if has_ended:
        return close()
    error = _error_of_reader(observed)
    if error is None:
        observed.report_abandoned()
        return close()
    if hasattr(events, "__anext__"):
        return _report_and_close_response_async(observed, events, error, close)
    try:
        if observed.tracker.is_near_its_end:
            for event in events:
                observed.tracker.event_observer(event, monotonic_ns())
    except Exception:
        # The rest would only complete the measurement. The application gets the reader's error.
        pass
    observed.report_stream_error(error)
    return close()


async def _report_and_close_response_async(
    observed: ObservedCall, events: Any, error: BaseException, close: Callable[[], Any]
) -> None:
    """Report an async stream whose reader has failed with an error, and close its response.

    If its output is complete, the rest is read before, because it has the token counts.
    """
    try:
        if observed.tracker.is_near_its_end:
            async for event in events:
                observed.tracker.event_observer(event, monotonic_ns())
    except Exception:
        # The rest would only complete the measurement. The application gets the reader's error.
        pass
    finally:
        observed.report_stream_error(error)
        await close()


def _error_of_reader(observed: ObservedCall) -> BaseException | None:
    """Return the error of a helper that has stopped reading the stream for the application.

    It is the exception that is being handled now, if the helper has raised it. If the application
    has handled it already, a ValueError stands for it. Return None if no helper has stopped.
    """
    error = sys.exc_info()[1]
    if error is not None:
        return error if _is_raised_by_reader(error, observed.get_stream()) else None
    if observed.is_left_by_reader:
        return ValueError("the response does not have the expected type")
    return None


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
    """Return whether a generator, sync or async, waits at a `yield`.

    Return False if it is running or has ended, and None for an iterator that is no generator.
    """
    for prefix in ("gi", "ag"):
        if hasattr(events, f"{prefix}_frame"):
            has_frame = getattr(events, f"{prefix}_frame") is not None
            return has_frame and not getattr(events, f"{prefix}_running")
    return None
