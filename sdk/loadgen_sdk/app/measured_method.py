"""Measure the methods of a client of a package, such as `chat.completions.create`."""

from __future__ import annotations

import functools
import logging
import sys
import time
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

from ..errors import ThrottleTimeout, warn
from . import event_loop
from .call import CallSettings
from .measurement import Api
from .observed_call import NOT_GIVEN, ObservedCall, current_call
from .steps import Steps, isawaitable, replace_iterators, run_steps, run_steps_async

log = logging.getLogger("loadgen_sdk")

_WARNING_STACK_LEVEL = 5
"""The frames from a warning about a call up to the application that makes the call."""

LABELS_ARGUMENT = "loadgen_labels"
"""The argument of a call that belongs to this package. All others belong to the method."""

FindRequestFields = Callable[[dict[str, Any]], dict[str, Any]]
"""Returns the fields of the request (model, messages, …) from the keyword arguments of a method."""


def measure_method(
    method: Callable[..., Any],
    api: Api,
    settings: CallSettings,
    *,
    is_blocking: bool,
    find_request_fields: FindRequestFields | None = None,
) -> Callable[..., Any]:
    """Return a function that calls a method of a client, measured, throttled and retried.

    The client has to call `record_response_headers` when the headers of a response arrive.

    Args:
        method: The method of the client, such as `client.chat.completions.create`.
        api: The API that it calls.
        settings: What all calls of the client have in common.
        is_blocking: The method is not a coroutine function.
        find_request_fields: Finds the fields of the request (model, messages, ...) in the keyword
            arguments of the method. None if each keyword argument is such a field.
    """
    measured_method = _MeasuredMethod(
        method, api, settings, is_blocking=is_blocking, find_request_fields=find_request_fields
    )
    if is_blocking:
        function = measured_method.create_blocking_function()
    else:
        function = measured_method.create_async_function()
    # The function gets the name and the documentation of the method.
    return functools.wraps(method)(function)


class _MeasuredMethod:
    """A method of a client whose calls are measured, throttled and retried."""

    def __init__(
        self,
        method: Callable[..., Any],
        api: Api,
        settings: CallSettings,
        *,
        is_blocking: bool,
        find_request_fields: FindRequestFields | None,
    ) -> None:
        """Prepare what all calls have in common. The arguments are those of `measure_method`.

        `_acquire_permit` waits for a permit of the throttle, and `_book_cost` books the estimated
        cost of a call in the budget. Each of them is a blocking or an async function, as the method
        is, and None without a throttle or a budget.
        """
        policy = settings.policy
        self._method = method
        self._api = api
        self._settings = settings
        self._is_blocking = is_blocking
        self._find_request_fields = find_request_fields
        self._acquire_permit: Callable[..., Any] | None = None
        if policy.throttle is not None:
            throttle = policy.throttle
            self._acquire_permit = throttle.acquire_blocking if is_blocking else throttle.acquire
        self._book_cost: Callable[[float | None, str], Any] | None = None
        if policy.budget is not None:
            self._book_cost = policy.budget.select_book_function(is_blocking=is_blocking)
        has_limits = policy.throttle is not None or policy.budget is not None
        # Without limits and retries, a call is a single attempt that waits for nothing.
        self._is_single_attempt = not has_limits and policy.retry is None
        # An iterator among the arguments can be read only once. It must become a list if the
        # estimate of the tokens, a second attempt or the recorder also reads the arguments.
        self._needs_reusable_arguments = (
            not self._is_single_attempt or policy.record is not None or policy.keep_content
        )

    def create_blocking_function(self) -> Callable[..., Any]:
        """Return the function that the application calls instead of a blocking method.

        It begins a measurement, sends the request, and observes the response. `_run_attempts` can
        do that for every call. A call without throttle, budget and retry does not use it, because
        it would double the time that a measurement takes.
        """
        method = self._method

        def call(*args: Any, **kwargs: Any) -> Any:
            observed = self._begin_call(kwargs)
            if observed is None:
                return method(*args, **kwargs)
            if not self._is_single_attempt or observed.is_raw_requested:
                send = partial(method, *args, **kwargs)
                return run_steps(self._run_attempts(observed, send))
            try:
                with observed:
                    response = method(*args, **kwargs)
            except BaseException as error:
                observed.end_failed_attempt(error)
                raise
            # No raw response was requested, so that the response is the parsed one.
            return observed.observe_response(response, response, is_blocking=True)

        return call

    def create_async_function(self) -> Callable[..., Any]:
        """Return the coroutine function that the application calls instead of an async method.

        It begins a measurement, sends the request, and observes the response. `_run_attempts` can
        do that for every call. A call without throttle, budget and retry does not use it, because
        it would double the time that a measurement takes.
        """
        method = self._method

        async def call(*args: Any, **kwargs: Any) -> Any:
            observed = self._begin_call(kwargs)
            if observed is None:
                return await _await_if_needed(method(*args, **kwargs))
            if not self._is_single_attempt or observed.is_raw_requested:
                send = partial(method, *args, **kwargs)
                return await run_steps_async(self._run_attempts(observed, send))
            try:
                with observed:
                    response = method(*args, **kwargs)
                    if isawaitable(response):
                        response = await response
            except BaseException as error:
                observed.end_failed_attempt(error)
                raise
            # No raw response was requested, so that the response is the parsed one.
            return observed.observe_response(response, response, is_blocking=False)

        return call

    def _begin_call(self, kwargs: dict[str, Any]) -> ObservedCall | None:
        """Begin to observe a call, or return None for a call that is not measured.

        A call inside another one of LiteLLM is not measured, because the outer call is. If this
        package has a defect, it is logged, and the call is made without a measurement.

        Args:
            kwargs: The keyword arguments of the call, which are changed in place: the argument
                `loadgen_labels` is removed, and iterators are replaced by lists if they are read
                more than once.
        """
        labels = kwargs.pop(LABELS_ARGUMENT, None)
        outer_call = current_call.get()
        if outer_call is not None and outer_call.call.settings.hides_inner_calls:
            return None
        if self._is_blocking:
            self._warn_in_event_loop()
        try:
            if self._needs_reusable_arguments:
                replace_iterators(kwargs)
            request_fields = kwargs
            if self._find_request_fields is not None:
                request_fields = self._find_request_fields(kwargs)
            return ObservedCall(self._api, self._settings, request_fields, labels)
        except Exception:
            # A defect of this package must not become an error of the application.
            log.exception("a call could not be measured")
            return None

    def _warn_in_event_loop(self) -> None:
        """Warn once that a blocking client is called in an event loop of asyncio."""
        if self._settings.has_warned_about_event_loop or not event_loop.is_asyncio_running():
            return
        self._settings.has_warned_about_event_loop = True
        warn(
            (
                "a blocking OpenAI client was called inside a running event loop and "
                "blocks all other tasks. Use AsyncOpenAI or asyncio.to_thread"
            ),
            RuntimeWarning,
            stacklevel=_WARNING_STACK_LEVEL,
        )

    def _run_attempts(self, observed: ObservedCall, send: partial[Any]) -> Steps[Any]:
        """Send a request with its retries, and observe the response. Return what the caller gets.

        The same code serves blocking and async clients. It is a generator (see `Steps`): the code
        that runs it calls each function that is yielded, awaits the result in an async client, and
        sends the result back as the value of the `yield`.

        Args:
            observed: The call.
            send: Sends the request. It is the method of the client with its arguments.
        """
        if not self._is_blocking and self._settings.policy.retry is not None:
            event_loop.require_running()  # A retry would have to sleep in it.
        response = yield from self._send_with_retries(observed, send)
        parsed_response = response
        if observed.is_raw_requested:
            try:
                parsed_response = yield response.parse
            except Exception as error:
                return observed.report_unparsable(response, error)
        return observed.observe_response(response, parsed_response, is_blocking=self._is_blocking)

    def _send_with_retries(self, observed: ObservedCall, send: partial[Any]) -> Steps[Any]:
        """Send a request until it succeeds, and return the response of the client.

        The error of the last attempt is raised. If that is a ThrottleTimeout, the raised error is
        also an APITimeoutError of the client's package, so that the application may catch either.
        """
        backoff_s = 0.0
        while True:
            try:
                return (yield from self._send_once(observed, send, backoff_s))
            except BaseException as error:
                retry_wait_s = observed.end_failed_attempt(error)
                if retry_wait_s is None and isinstance(error, ThrottleTimeout):
                    client_package = sys.modules[self._settings.package]
                    raise _timeout_error_of_package(client_package, error) from error
                if retry_wait_s is None:
                    raise
                backoff_s = retry_wait_s

    def _send_once(
        self, observed: ObservedCall, send: partial[Any], backoff_s: float
    ) -> Steps[Any]:
        """Wait until an attempt is allowed, send the request, and return the response.

        Each function that is yielded is called, and awaited in an async client. The value of the
        `yield` is its result.

        Args:
            observed: The call. It is the current call while the request is sent.
            send: The method of the client with its arguments.
            backoff_s: The wait after a failed attempt, or 0.
        """
        if backoff_s:
            sleep = time.sleep if self._is_blocking else event_loop.sleep
            yield partial(sleep, backoff_s)
        timeout = send.keywords.get("timeout", NOT_GIVEN)
        yield from self._acquire_permission(observed, timeout)
        with observed:
            response = yield send
        return response

    def _acquire_permission(self, observed: ObservedCall, timeout: Any) -> Steps[None]:
        """Wait for a permit of the throttle, and book the estimated cost of the call in the budget.

        Both functions may wait, so that they are yielded to the code that runs these `Steps`. It
        calls them, in an async client awaits the result, and sends the result back. The permit and
        the booking are stored in the call, which returns them at its end.

        Args:
            observed: The call.
            timeout: The argument `timeout` of the call, which also limits the wait for the permit.

        Raises:
            ThrottleTimeout: The throttle gave no permit in time.
            BudgetExceeded: The call may cost more than the budget has left.
        """
        call = observed.call
        if self._acquire_permit is not None:
            arguments = observed.throttle_arguments(timeout)
            call.permit = yield partial(self._acquire_permit, **arguments)
        if self._book_cost is not None and call.is_budgeted:
            call.budget_hold = yield partial(self._book_cost, call.estimated_cost(), call.model)


async def _await_if_needed(result: Any) -> Any:
    """Await the result of an async client, some methods of which return a plain object."""
    return await result if isawaitable(result) else result


def record_response_headers(
    headers: Any, hidden_retries: int = 0, http_response: Any = None
) -> None:
    """Pass the headers of a response to the call that is in progress in this context, if any.

    Args:
        headers: The headers.
        hidden_retries: The retries that the package of the client has made so far.
        http_response: The response of the HTTP library. The call keeps it until the package has
            parsed it. If the package cannot parse it, the call reads the token counts from it.
    """
    observed = current_call.get()
    if observed is not None:
        observed.hidden_retries = hidden_retries
        observed.http_response = http_response
        observed.call.record_headers(headers)


def _timeout_error_of_package(package: ModuleType, error: ThrottleTimeout) -> BaseException:
    """Return a ThrottleTimeout that is also an APITimeoutError of a package such as openai.

    The application may catch either, so that its code for timeouts of the package also handles a
    throttle that admits no call in time.
    """
    return _timeout_class_of_package(package)(error)


@functools.cache
def _timeout_class_of_package(package: ModuleType) -> type[BaseException]:
    """Create the subclass of ThrottleTimeout and of the APITimeoutError of a package.

    `type` is called, because a class statement cannot have a base class that type checkers do not
    know.
    """
    base_classes = (ThrottleTimeout, package.APITimeoutError)
    return type("ThrottleTimeout", base_classes, {"__init__": _init_timeout_error})


def _init_timeout_error(self: Any, error: ThrottleTimeout) -> None:
    """Initialise an error of the class that `_timeout_class_of_package` creates.

    An APITimeoutError has attributes with the request and parts of the response. They are None
    here, because the throttle has not let the request be sent.
    """
    Exception.__init__(self, str(error))
    self.message = str(error)
    self.hint = error.hint
    for name in ("request", "code", "param", "type", "body"):
        setattr(self, name, None)
