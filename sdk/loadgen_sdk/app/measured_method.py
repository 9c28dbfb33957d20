"""Measure the methods of a client of a package, such as `chat.completions.create`."""

from __future__ import annotations

import functools
import logging
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from types import ModuleType
from typing import Any

from ..errors import ThrottleTimeout, warn
from . import event_loop
from .call import CallSettings
from .measurement import Api
from .observed_call import NOT_GIVEN, ObservedCall, UnparsedHttpResponse, current_call
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
        """Prepare what all calls of the method have in common.

        The arguments are those of `measure_method`. The throttle and the budget of the policy are
        optional. Their functions that may have to wait are selected here in the form that fits the
        method: blocking or async.
        """
        policy = settings.policy
        throttle = policy.throttle
        budget = policy.budget
        self._method = method
        self._api = api
        self._settings = settings
        self._is_blocking = is_blocking
        self._find_request_fields = find_request_fields

        # Waits until the throttle allows a call, and returns its permit. None without a throttle.
        self._acquire_permit: Callable[..., Any] | None = None
        if throttle is not None:
            self._acquire_permit = throttle.acquire_blocking if is_blocking else throttle.acquire

        # Books the estimated cost of a call of a model in the budget. None without a budget.
        self._book_cost: Callable[[float | None, str], Any] | None = None
        if budget is not None:
            self._book_cost = budget.select_book_function(is_blocking=is_blocking)

        # Without limits and retries, a call is a single attempt that waits for nothing.
        has_limits = throttle is not None or budget is not None
        self._is_single_attempt = not has_limits and policy.retry is None

        # An iterator among the arguments can be read only once. It must become a list if the
        # estimate of the tokens, a second attempt or the recorder also reads the arguments.
        reads_arguments_later = policy.record is not None or policy.keep_content
        self._needs_reusable_arguments = reads_arguments_later or not self._is_single_attempt

    def create_blocking_function(self) -> Callable[..., Any]:
        """Return the function that the application calls instead of a blocking method.

        It sends the request and measures the call. `_run_attempts` can do that for every call, with
        throttle, budget and retries. A call that uses none of them is sent directly, because the
        generator would double the time that the measurement takes.
        """
        method = self._method
        is_single_attempt = self._is_single_attempt

        def call(*args: Any, **kwargs: Any) -> Any:
            observed = self._begin_call(kwargs)
            if observed is None:
                return method(*args, **kwargs)

            is_sent_directly = is_single_attempt and not observed.is_raw_requested
            if not is_sent_directly:
                send = partial(method, *args, **kwargs)
                return run_steps(self._run_attempts(observed, send))

            try:
                with observed:
                    response = method(*args, **kwargs)
            except BaseException as error:
                observed.end_failed_attempt(error)
                raise

            return observed.observe_response(response, parsed_response=response, is_blocking=True)

        return call

    def create_async_function(self) -> Callable[..., Any]:
        """Return the coroutine function that the application calls instead of an async method.

        It sends the request and measures the call. `_run_attempts` can do that for every call, with
        throttle, budget and retries. A call that uses none of them is sent directly, because the
        generator would double the time that the measurement takes.
        """
        method = self._method
        is_single_attempt = self._is_single_attempt

        async def call(*args: Any, **kwargs: Any) -> Any:
            observed = self._begin_call(kwargs)
            if observed is None:
                return await _await_if_needed(method(*args, **kwargs))

            is_sent_directly = is_single_attempt and not observed.is_raw_requested
            if not is_sent_directly:
                send = partial(method, *args, **kwargs)
                return await run_steps_async(self._run_attempts(observed, send))

            try:
                with observed:
                    response = method(*args, **kwargs)
                    # Some methods of async clients return a plain object.
                    if isawaitable(response):
                        response = await response
            except BaseException as error:
                observed.end_failed_attempt(error)
                raise

            return observed.observe_response(response, parsed_response=response, is_blocking=False)

        return call

    def _begin_call(self, kwargs: dict[str, Any]) -> ObservedCall | None:
        """Return the object that observes a call, or None if the call is not measured.

        LiteLLM calls the openai package inside its own calls. Such an inner call is not measured,
        because the outer one is. A call is also not measured if this package has a defect.

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
            if self._find_request_fields is None:
                request_fields = kwargs
            else:
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

        This generator serves blocking and async clients. `result = yield function` means: call
        `function`, await what it returns in an async client, and go on with the result (see
        `Steps`).

        Args:
            observed: The call.
            send: Sends the request. It is the method of the client with its arguments.
        """
        may_sleep_in_event_loop = not self._is_blocking and self._settings.policy.retry is not None
        if may_sleep_in_event_loop:
            # Fail before the request is sent, and not when the first retry has to wait.
            event_loop.require_running()

        response = yield from self._send_with_retries(observed, send)
        parsed_response = response
        if observed.is_raw_requested:
            try:
                parsed_response = yield response.parse
            except Exception as error:
                return observed.report_unparsable(response, error)

        return observed.observe_response(response, parsed_response, is_blocking=self._is_blocking)

    def _send_with_retries(self, observed: ObservedCall, send: partial[Any]) -> Steps[Any]:
        """Send a request until it succeeds or may not be retried, and return the response.

        `yield from` passes the functions that `_send_once` yields to the code that runs this
        generator (see `Steps`).

        Raises:
            BaseException: The error of the last attempt. A ThrottleTimeout is replaced by an error
                that is both a ThrottleTimeout and an APITimeoutError of the client's package, so
                that the application may catch either.
        """
        backoff_s = 0.0
        while True:
            try:
                response = yield from self._send_once(observed, send, backoff_s)
            except BaseException as error:
                retry_wait_s = observed.end_failed_attempt(error)
                if retry_wait_s is not None:
                    backoff_s = retry_wait_s
                    continue

                if isinstance(error, ThrottleTimeout):
                    client_package = sys.modules[self._settings.package]
                    raise _timeout_error_of_package(client_package, error) from error

                raise
            return response

    def _send_once(
        self, observed: ObservedCall, send: partial[object], backoff_s: float
    ) -> Steps[Any]:
        """Wait until an attempt is allowed, send the request, and return the response.

        This generator serves blocking and async clients. `result = yield function` means: call
        `function`, await what it returns in an async client, and go on with the result (see
        `Steps`).

        Args:
            observed: The call. It is the current call while the request is sent.
            send: The method of the client with its arguments, as `functools.partial`.
            backoff_s: The seconds to wait after a failed attempt, or 0 for the first attempt.
        """
        if backoff_s:
            sleep = time.sleep if self._is_blocking else event_loop.sleep
            yield partial(sleep, backoff_s)

        keyword_arguments = send.keywords
        timeout = keyword_arguments.get("timeout", NOT_GIVEN)
        yield from self._acquire_permission(observed, timeout)

        with observed:
            response = yield send

        return response

    def _acquire_permission(self, observed: ObservedCall, timeout: object) -> Steps[None]:
        """Wait for a permit of the throttle, and book the estimated cost of the call in the budget.

        The permit and the booking are stored in the call, which returns them at its end.

        This generator serves blocking and async clients. `result = yield function` means: call
        `function`, await what it returns in an async client, and go on with the result (see
        `Steps`).

        Args:
            observed: The call.
            timeout: The argument `timeout` of the call, which also limits the wait for the permit.
                NOT_GIVEN if the application did not pass it.

        Raises:
            ThrottleTimeout: The throttle gave no permit in time.
            BudgetExceeded: The call may cost more than the budget has left.
        """
        call = observed.call
        if self._acquire_permit is not None:
            arguments = observed.throttle_arguments(timeout)
            call.permit = yield partial(self._acquire_permit, **arguments)
        if self._book_cost is not None and call.is_budgeted:
            estimated_cost = call.estimated_cost()
            call.budget_hold = yield partial(self._book_cost, estimated_cost, call.model)


async def _await_if_needed(result: Any) -> Any:
    """Await the result of an async client, some methods of which return a plain object."""
    return await result if isawaitable(result) else result


def record_response_headers(
    headers: Mapping[str, str],
    hidden_retries: int = 0,
    http_response: UnparsedHttpResponse | None = None,
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
    """Initialise an error: the `__init__` of the class that `_timeout_class_of_package` creates.

    The attributes of an APITimeoutError that describe the request and the response are None,
    because the throttle has not let the request be sent.

    Args:
        self: The new error.
        error: The ThrottleTimeout whose message and hint it gets.
    """
    message = str(error)
    Exception.__init__(self, message)
    self.message = message
    self.hint = error.hint
    self.request = None
    self.code = None
    self.param = None
    self.type = None
    self.body = None
