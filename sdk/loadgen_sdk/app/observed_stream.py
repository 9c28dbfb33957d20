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
from typing import TYPE_CHECKING, Any, Protocol

from .background import run_in_background
from .steps import Steps, as_function

if TYPE_CHECKING:
    from .observed_call import ObservedCall

log = logging.getLogger("loadgen_sdk")

_MAX_INSPECTED_CALLERS = 9
"""How many callers are inspected to find a streaming helper: functions of this package that report
a stream, and loops of the client's package and of other instrumentations."""


class RawResponse(Protocol):
    """The part of a raw response of openai or anthropic that this module uses or replaces."""

    http_response: Any
    parse: Callable[..., Any]
    close: Callable[..., Any]


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
        return _observe(self._events, self._observed, owner=self)

    def __aiter__(self) -> AsyncIterator[Any]:
        """Return a generator for one async loop."""
        return _observe_async(self._events, self._observed, owner=self)

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
    events: Iterator[object],
    observed: ObservedCall,
    owner: ObservedEvents | None = None,  # noqa: ARG001 - only referenced
) -> Iterator[Any]:
    """Yield the events of a stream to the application, and pass each to the tracker of the call.

    The call is reported when the stream ends, raises an error, or is left by its reader
    (GeneratorExit). An event that has only token counts is not yielded if the application has not
    requested token counts (`hides_usage`).

    Args:
        events: The events of the stream.
        observed: The call.
        owner: The object whose `__iter__` created this generator, or None for `__next__`. It is not
            used. The generator refers to it only so that Python does not destroy it during the
            `for` loop, because its destructor reports the call as abandoned.
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
    events: AsyncIterator[object],
    observed: ObservedCall,
    owner: ObservedEvents | None = None,  # noqa: ARG001 - only referenced
) -> AsyncIterator[Any]:
    """Yield the events of an async stream to the application, and pass each to the tracker.

    The call is reported when the stream ends, raises an error, or is left by its reader
    (GeneratorExit). An event that has only token counts is not yielded if the application has not
    requested token counts (`hides_usage`).

    Args:
        events: The events of the stream.
        observed: The call.
        owner: The object whose `__aiter__` created this generator, or None for `__anext__`. It is
            not used. The generator refers to it only so that Python does not destroy it during the
            `async for` loop, because its destructor reports the call as abandoned.
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


def observe_stream(returned_stream: object, observed: ObservedCall) -> Any:
    """Observe the stream that a method of a client has returned. Return what the application gets.

    A `Stream` or `AsyncStream` of openai or anthropic is changed in place and returned. A stream of
    LiteLLM is wrapped, and the wrapper is returned.
    """
    # Only the streams of openai and anthropic have this attribute. It is private, but the only
    # place at which their events can be observed without a wrapper.
    is_openai_or_anthropic = hasattr(returned_stream, "_iterator")
    if is_openai_or_anthropic:
        _observe_in_place(remove_proxies(returned_stream), observed)
        return returned_stream

    wrapped_stream = ObservedStream(returned_stream, observed)

    # A weak reference: the call must not keep a stream alive that the application has dropped.
    observed.get_stream = weakref.ref(wrapped_stream)
    return wrapped_stream


def _observe_in_place(stream: Any, observed: ObservedCall) -> None:
    """Change a stream of openai or anthropic, so that the call sees its events and its end.

    Three parts of the stream are replaced:

    - its iterator, by one that passes each event to the call,
    - its method `close`, by one that also ends the call,
    - the method that closes its HTTP response, in the same way.

    None of the new parts refers to the stream itself, because that would be a reference cycle. A
    stream that the application has dropped would then stay in memory, and its call in flight, until
    the garbage collector runs. The new parts use a copy of the stream instead.
    """
    observed.get_stream = weakref.ref(stream)
    stream_copy = _copy_without_iterator(stream)
    events = _create_event_iterator(stream, stream_copy)
    stream._iterator = ObservedEvents(events, observed)
    stream.close = partial(_end_call_and_close, observed, stream_copy)
    http_response = getattr(stream, "response", None)
    _observe_closing(http_response, events, observed)


def _copy_without_iterator(stream: Any) -> Any:
    """Return a copy of a stream with the same HTTP response.

    The copy has no iterator, because the iterator refers to the stream.
    """
    stream_copy = copy.copy(stream)
    stream_copy._iterator = None
    return stream_copy


def observe_unread_response(
    response: RawResponse, observed: ObservedCall, *, is_blocking: bool
) -> None:
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

    def __init__(self, response: RawResponse, observed: ObservedCall) -> None:
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
        """Report the call and close the response. This replaces the method `close` of the response.

        The application may have read the whole body as bytes or text, without calling `parse`. The
        body is then parsed here, because it contains the token counts.
        """
        observed = self._observed
        http_response = self._response.http_response
        is_consumed = bool(getattr(http_response, "is_stream_consumed", False))

        # If the application has called `parse` for a complete response, the call was reported. The
        # body of a stream is not a JSON document that could be parsed at once.
        needs_parsing = is_consumed and not observed.is_reported and not observed.is_streamed
        if needs_parsing:
            try:
                yield from self.parse()
            except Exception:
                # The body was cut off, or does not match the requested schema.
                observed.read_token_counts_from_body(http_response)

        observed.report_closed_response(is_consumed=is_consumed)

        # Whoever runs this generator calls the yielded function, and awaits it in an async client.
        yield self._close_original


def remove_proxies(stream: object) -> Any:
    """Return the stream of the package inside the proxies of other instrumentations (wrapt)."""
    inner = getattr(stream, "__wrapped__", None)
    while inner is not None:
        stream = inner
        inner = getattr(stream, "__wrapped__", None)
    return stream


def is_called_by_streaming_helper(stream: object) -> bool:
    """Return True if a streaming helper that reads this stream is on the call stack.

    A streaming helper is an object of the openai or anthropic package that reads the stream for the
    application, such as the result of `chat.completions.stream`. A generator is not notified of who
    leaves the loop over it. The stack frames of the nearest callers are therefore searched for a
    method of a streaming helper. Return False if they cannot be read.
    """
    try:
        caller_frame: FrameType | None = sys._getframe(1)
        for _ in range(_MAX_INSPECTED_CALLERS):
            if caller_frame is None:
                return False
            if _is_frame_of_streaming_helper(caller_frame, stream):
                return True
            caller_frame = caller_frame.f_back
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


def _observe_closing(response: object, events: object, observed: ObservedCall) -> None:
    """Replace the method that closes the HTTP response of a stream by one that also ends the call.

    This is needed in addition to the new `close` of the stream. The objects that
    `chat.completions.stream` and similar methods return never call `close` of the stream: they
    close its HTTP response.

    Args:
        response: The HTTP response, or None if the stream has none.
        events: The iterator over the events of the stream.
        observed: The call.
    """
    is_async = hasattr(events, "__anext__")
    close_method_name = "aclose" if is_async else "close"
    close = getattr(response, close_method_name, None)
    if close is None:
        return

    # The iterator refers to the response. With a normal reference back to the iterator, they would
    # be a cycle, which stays in memory until the garbage collector runs.
    get_events = weakref.ref(events)
    report_and_close = partial(_report_and_close_response, observed, get_events, close)
    setattr(response, close_method_name, report_and_close)


def _report_and_close_response(
    observed: ObservedCall, get_events: Callable[[], Any], close: Callable[[], Any]
) -> Any:
    """Report the call of a stream whose HTTP response is closed, and close the response.

    This replaces the method `close` or `aclose` of the response. Like the original, it returns None
    for a blocking response, and an awaitable for an async one. There are three cases:

    - The stream closes the response by itself, at its end. The call is then reported elsewhere.
    - A streaming helper, which reads the stream for the application, has failed, for example
      because the output does not match the requested schema. Its error is reported.
    - The application has stopped reading. The call is reported as abandoned.

    Args:
        observed: The call.
        get_events: Returns the iterator of the stream, or None if it does not exist any more.
        close: Closes the response.
    """
    events = get_events()
    is_closed_by_stream = events is None or _is_running_or_ended(events)
    if is_closed_by_stream:
        return close()

    helper_error = _find_streaming_helper_error(observed, error_being_handled=sys.exception())
    if helper_error is None:
        observed.report_abandoned()
        return close()

    is_async = hasattr(events, "__anext__")
    if is_async:
        return _report_helper_error_async(observed, events, helper_error, close)

    _read_last_events(observed, events)
    observed.report_stream_error(helper_error)
    return close()


async def _report_helper_error_async(
    observed: ObservedCall, events: Any, helper_error: BaseException, close: Callable[[], Any]
) -> None:
    """Report an async stream with the error of a streaming helper, and close its response."""
    try:
        await _read_last_events_async(observed, events)
    finally:
        observed.report_stream_error(helper_error)
        await close()


def _read_last_events(observed: ObservedCall, events: Iterator[object]) -> None:
    """Read the events after the end of the output, because the last event has the token counts.

    A streaming helper of the client's package has stopped reading before them, for example because
    it could not parse the output. Nothing is read if the server is still writing output, because
    that may take long. An error is ignored here: the application gets the error of the helper.
    """
    tracker = observed.tracker
    if not tracker.is_near_its_end:
        return
    with suppress(Exception):
        for event in events:
            tracker.event_observer(event, monotonic_ns())


async def _read_last_events_async(observed: ObservedCall, events: AsyncIterator[object]) -> None:
    """Read the events after the end of the output, because the last event has the token counts.

    This is `_read_last_events` for an async stream.
    """
    tracker = observed.tracker
    if not tracker.is_near_its_end:
        return
    with suppress(Exception):
        async for event in events:
            tracker.event_observer(event, monotonic_ns())


def _find_streaming_helper_error(
    observed: ObservedCall, error_being_handled: BaseException | None
) -> BaseException | None:
    """Return the error because of which a streaming helper stopped reading, or None without one.

    A streaming helper is an object of the client's package that reads the stream for the
    application, such as the result of `chat.completions.stream`. It raises an error if the output
    does not match the requested schema.

    Args:
        observed: The call. It knows whether a streaming helper has left the loop over the stream.
        error_being_handled: The exception that is being handled while the response is closed, or
            None. It is None although a helper has failed if an `except` block has ended meanwhile.
            A ValueError is returned then, because the error itself cannot be found any more.
    """
    if error_being_handled is None:
        if observed.was_left_by_streaming_helper:
            return ValueError("the response does not have the expected type")
        return None

    stream = observed.get_stream()
    if _has_passed_through_streaming_helper(error_being_handled, stream):
        return error_being_handled

    return None


def _has_passed_through_streaming_helper(error: BaseException, stream: object) -> bool:
    """Return True if the traceback of an error has a frame of a helper that reads the stream."""
    trace = error.__traceback__
    while trace is not None:
        if _is_frame_of_streaming_helper(trace.tb_frame, stream):
            return True
        trace = trace.tb_next
    return False


def _is_frame_of_streaming_helper(frame: FrameType, stream: object) -> bool:
    """Return True if a stack frame runs a method of a streaming helper that reads this stream.

    The streaming helpers of openai and anthropic have the stream in the attribute `_raw_stream`.
    """
    if stream is None:
        return False
    attributes = getattr(frame.f_locals.get("self"), "__dict__", {})
    return remove_proxies(attributes.get("_raw_stream")) is stream


def _is_running_or_ended(events: object) -> bool:
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
