"""Observe the events of a stream that the application reads, and notice when it stops reading.

A stream refers to its iterator, and the iterator to the stream. Such a cycle would delay the end
of an abandoned stream until the garbage collector runs, and with it the return of its permit. The
objects here refer to the call and to the events, and not to the stream.
"""

from __future__ import annotations

import copy
import logging
import sys
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from functools import partial
from time import monotonic_ns
from types import AsyncGeneratorType, FrameType, GeneratorType
from typing import TYPE_CHECKING, Any

from .background import run_in_background
from .steps import Steps, as_function

if TYPE_CHECKING:
    from .observed_call import ObservedCall

log = logging.getLogger("loadgen_sdk")

_MAX_INSPECTED_CALLERS = 9
"""How many callers are inspected to find a helper: functions of this package that report a stream,
and loops of the client's package and of other instrumentations."""


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
        return _observe(self._events, self._observed, keep_alive=self)

    def __aiter__(self) -> AsyncIterator[Any]:
        """Return a generator for one async loop."""
        return _observe_async(self._events, self._observed, keep_alive=self)

    def __next__(self) -> Any:
        """Return the next event."""
        if self._generator is None:
            self._generator = _observe(self._events, self._observed)
        return next(self._generator)

    def __anext__(self) -> Any:
        """Return an awaitable for the next event."""
        if self._generator is None:
            self._generator = _observe_async(self._events, self._observed)
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
    keep_alive: object = None,  # noqa: ARG001 - only referenced
) -> Iterator[Any]:
    """Yield the events of a stream to the application, and pass each to the tracker of the call.

    The call is reported when the stream ends, raises an error, or is left by its reader
    (GeneratorExit). An event that has only token counts is not yielded if the application has not
    requested token counts (`hides_usage`).

    Args:
        events: The events of the stream.
        observed: The call.
        keep_alive: The object that created this generator. The destructor of that object ends the
            call, so that the generator refers to it: a `for` loop has a reference only to the
            generator, and the object would be destroyed at the start of the loop.
    """
    # This runs for each event: local names save lookups.
    observe = observed.tracker.event_observer
    clock = monotonic_ns
    hides_usage = observed.hides_usage
    try:
        for event in events:
            observe(event, clock())
            if hides_usage and _has_only_usage(event):
                continue
            yield event
        observed.report_stream_end()
    except BaseException as error:
        observed.report_stream_error(error)
        raise


async def _observe_async(
    events: AsyncIterator[Any],
    observed: ObservedCall,
    keep_alive: object = None,  # noqa: ARG001 - only referenced
) -> AsyncIterator[Any]:
    """Yield the events of an async stream to the application, and pass each to the tracker.

    The call is reported when the stream ends, raises an error, or is left by its reader
    (GeneratorExit). An event that has only token counts is not yielded if the application has not
    requested token counts (`hides_usage`).

    Args:
        events: The events of the stream.
        observed: The call.
        keep_alive: The object that created this generator. The destructor of that object ends the
            call, so that the generator refers to it: an `async for` loop has a reference only to
            the generator, and the object would be destroyed at the start of the loop.
    """
    # This runs for each event: local names save lookups.
    observe = observed.tracker.event_observer
    clock = monotonic_ns
    hides_usage = observed.hides_usage
    try:
        async for event in events:
            observe(event, clock())
            if hides_usage and _has_only_usage(event):
                continue
            yield event
        observed.report_stream_end()
    except BaseException as error:
        observed.report_stream_error(error)
        raise


def _has_only_usage(event: Any) -> bool:
    """Return True if an event of chat or completions has token counts and no choices."""
    return not event.choices and getattr(event, "usage", None) is not None


def observe_stream(returned_stream: Any, observed: ObservedCall) -> Any:
    """Observe the stream that a method of a client has returned. Return what the application gets.

    A `Stream` or `AsyncStream` of openai or anthropic is changed in place and returned. A stream of
    LiteLLM, which has no `_iterator`, is wrapped.
    """
    if hasattr(returned_stream, "_iterator"):
        _observe_in_place(unwrapped(returned_stream), observed)
        return returned_stream
    wrapped_stream = ObservedStream(returned_stream, observed)
    observed.get_stream = weakref.ref(wrapped_stream)
    return wrapped_stream


def _observe_in_place(stream: Any, observed: ObservedCall) -> None:
    """Change a stream of openai or anthropic, so that the call sees its events and its end.

    Three parts of the stream are replaced: its iterator, which now passes each event to the call,
    its method `close`, and the method that closes its HTTP response. Both methods also end the
    call.

    The new parts refer to a copy of the stream, and the call has a weak reference to it. A part
    that refers to the stream itself would be a reference cycle. Python would then free a stream
    that the application has dropped only when the garbage collector runs, and the throttle would
    count the call as in flight until then.
    """
    observed.get_stream = weakref.ref(stream)
    stream_copy = _copy_without_iterator(stream)
    events = _create_event_iterator(stream, stream_copy)
    stream._iterator = ObservedEvents(events, observed)
    stream.close = partial(_end_call_and_close, observed, stream_copy)
    _observe_closing(getattr(stream, "response", None), events, observed)


def _copy_without_iterator(stream: Any) -> Any:
    """Return a copy of a stream with the same HTTP response.

    The copy has no iterator, because the iterator refers to the stream.
    """
    stream_copy = copy.copy(stream)
    stream_copy._iterator = None
    return stream_copy


def observe_unread_response(response: Any, observed: ObservedCall, *, is_blocking: bool) -> None:
    """Observe a response of `with_streaming_response`, which the application reads by itself.

    The methods `parse` and `close` of the response are replaced: what the application parses is
    observed, and the call ends when it closes the response.
    """
    unread_response = _UnreadResponse(response, observed)
    response.parse = as_function(unread_response.parse, is_blocking=is_blocking)
    response.close = as_function(unread_response.close, is_blocking=is_blocking)


class _UnreadResponse:
    """A response that the application reads by itself, with its original `parse` and `close`.

    The methods are generators of `Steps`, so that they serve blocking and async clients: each
    function that they yield is called, and in an async client awaited.
    """

    def __init__(self, response: Any, observed: ObservedCall) -> None:
        self._response = response
        self._observed = observed
        self._parse_original = response.parse
        self._close_original = response.close

    def parse(self, *args: Any, **kwargs: Any) -> Steps[Any]:
        """Parse the response and observe the result. The arguments are those of the original."""
        parsed_response = yield partial(self._parse_original, *args, **kwargs)
        if self._observed.is_reported:
            return parsed_response
        return self._observed.observe_parsed_response(parsed_response)

    def close(self) -> Steps[None]:
        """End the call and close the response.

        The application may have read the whole body as bytes or text, without `parse`. The body is
        then parsed here, for its token counts.
        """
        observed = self._observed
        http_response = self._response.http_response
        is_consumed = bool(getattr(http_response, "is_stream_consumed", False))
        # A body that was parsed is a stream, which is observed, or was reported by `parse`.
        was_parsed = observed.is_streamed or observed.is_reported
        if is_consumed and not was_parsed:
            try:
                yield from self.parse()
            except Exception:
                # The body was cut off, or does not have the requested form.
                observed.read_usage_of_unparsed(http_response)
        observed.report_closed_response(is_consumed=is_consumed)
        yield self._close_original


def unwrapped(stream: Any) -> Any:
    """Return the stream of the package inside the proxies of other instrumentations (wrapt)."""
    inner = getattr(stream, "__wrapped__", None)
    while inner is not None:
        stream = inner
        inner = getattr(stream, "__wrapped__", None)
    return stream


def is_called_by_helper(stream: Any) -> bool:
    """Return True if a helper that reads this stream is among the callers of this function.

    A helper is an object of the openai or anthropic package that reads the stream for the
    application, such as the result of `chat.completions.stream`. The packages do not say who leaves
    the loop over a stream, so that the frames on the stack of calls are searched. Return False if
    they cannot be read.
    """
    try:
        frame: FrameType | None = sys._getframe(1)
        for _ in range(_MAX_INSPECTED_CALLERS):
            if frame is None:
                return False
            if _is_frame_of_helper(frame, stream):
                return True
            frame = frame.f_back
    except Exception:
        # The variables of some frames cannot be read.
        log.debug("the callers of a stream are not known", exc_info=True)
    return False


def _create_event_iterator(stream: Any, stream_copy: Any) -> Any:
    """Return an iterator over the events of a stream that refers only to a copy of the stream."""
    create_iterator = getattr(type(stream), "__stream__", None)
    return stream._iterator if create_iterator is None else create_iterator(stream_copy)


def _end_call_and_close(observed: ObservedCall, stream_copy: Any) -> Any:
    """End the call and close the stream. This replaces the method `close` of a stream.

    A bound method of the stream itself would make a reference cycle, so that the copy is closed.
    Both have the same HTTP response.
    """
    observed.report_abandoned()
    return type(stream_copy).close(stream_copy)


def _observe_closing(response: Any, events: Any, observed: ObservedCall) -> None:
    """Replace the method that closes the HTTP response of a stream by one that also ends the call.

    To observe the `close` of the stream is not enough: what `chat.completions.stream` and similar
    methods return closes the response, and not the stream.

    Args:
        response: The HTTP response, or None.
        events: The iterator over the events of the stream. The new method has only a weak reference
            to it, because the iterator refers to the response: a reference cycle would delay the
            end of an abandoned stream.
        observed: The call.
    """
    is_async = hasattr(events, "__anext__")
    close_method = "aclose" if is_async else "close"
    close = getattr(response, close_method, None)
    if close is not None:
        report_and_close = partial(_report_and_close_response, observed, weakref.ref(events), close)
        setattr(response, close_method, report_and_close)


def _report_and_close_response(
    observed: ObservedCall, get_events: Callable[[], Any], close: Callable[[], Any]
) -> Any:
    """Report the call of a stream whose HTTP response is closed, and close the response.

    This replaces the method `close` or `aclose` of the response. Like the original, it returns None
    for a blocking response, and an awaitable for an async one. There are three cases:

    - The stream has ended, and its generator closes the response. The call is reported elsewhere.
    - A helper that reads the stream for the application has failed, for example because the output
      does not have the requested form. Its error is reported.
    - The application has stopped reading. The call is reported as abandoned.

    Args:
        observed: The call.
        get_events: Returns the iterator of the stream, or None if it does not exist any more.
        close: Closes the response.
    """
    events = get_events()
    if events is None or _is_running_or_ended(events):
        return close()
    handled_error = sys.exc_info()[1]  # the error, if any, during which the response is closed
    helper_error = _find_helper_error(observed, handled_error)
    if helper_error is None:
        observed.report_abandoned()
        return close()
    if hasattr(events, "__anext__"):
        return _report_helper_error_async(observed, events, helper_error, close)
    _read_last_events(observed, events)
    observed.report_stream_error(helper_error)
    return close()


async def _report_helper_error_async(
    observed: ObservedCall, events: Any, helper_error: BaseException, close: Callable[[], Any]
) -> None:
    """Report an async stream with the error of the helper that read it, and close its response."""
    try:
        await _read_last_events_async(observed, events)
    finally:
        observed.report_stream_error(helper_error)
        await close()


def _read_last_events(observed: ObservedCall, events: Iterator[Any]) -> None:
    """Read the rest of a stream whose output is complete, because it contains the token counts.

    A helper of the client's package has stopped reading there, for example because it could not
    parse the output. A further error is ignored, because the application gets that of the helper.
    Nothing is read if the output is not complete, because the rest may be long.
    """
    if not observed.tracker.is_near_its_end:
        return
    observe = observed.tracker.event_observer
    with suppress(Exception):
        for event in events:
            observe(event, monotonic_ns())


async def _read_last_events_async(observed: ObservedCall, events: AsyncIterator[Any]) -> None:
    """Read the rest of an async stream whose output is complete. See `_read_last_events`.

    The rest contains the token counts. A helper of the client's package has stopped reading before
    them. A further error is ignored, because the application gets that of the helper.
    """
    if not observed.tracker.is_near_its_end:
        return
    observe = observed.tracker.event_observer
    with suppress(Exception):
        async for event in events:
            observe(event, monotonic_ns())


def _find_helper_error(
    observed: ObservedCall, handled_error: BaseException | None
) -> BaseException | None:
    """Return the error with which a helper has stopped reading the stream, or None without one.

    A helper is an object of the client's package that reads the stream for the application, such as
    the result of `chat.completions.stream`.

    Args:
        observed: The call. It knows whether a helper has left the loop over the stream.
        handled_error: The exception that is being handled while the response is closed. None if it
            was handled before. The error of a helper is then lost, and a ValueError stands for it,
            because helpers fail when the output does not have the requested type.
    """
    if handled_error is not None:
        is_of_helper = _was_raised_by_helper(handled_error, observed.get_stream())
        return handled_error if is_of_helper else None
    if observed.is_left_by_helper:
        return ValueError("the response does not have the expected type")
    return None


def _was_raised_by_helper(error: BaseException, stream: Any) -> bool:
    """Return True if an error has passed through a helper that reads a stream."""
    trace = error.__traceback__
    while trace is not None:
        if _is_frame_of_helper(trace.tb_frame, stream):
            return True
        trace = trace.tb_next
    return False


def _is_frame_of_helper(frame: FrameType, stream: Any) -> bool:
    """Return True if a frame runs a method of a helper that reads this stream.

    Helpers of openai and anthropic have the stream in the attribute `_raw_stream`.
    """
    if stream is None:
        return False
    attributes = getattr(frame.f_locals.get("self"), "__dict__", {})
    return unwrapped(attributes.get("_raw_stream")) is stream


def _is_running_or_ended(events: Any) -> bool:
    """Return True for a generator, sync or async, that is running now or has ended.

    Return False for one that waits at a `yield`, and for an iterator that is not a generator.
    """
    if isinstance(events, GeneratorType):
        has_ended = events.gi_frame is None
        return has_ended or events.gi_running
    if isinstance(events, AsyncGeneratorType):
        has_ended = events.ag_frame is None
        return has_ended or events.ag_running
    return False
