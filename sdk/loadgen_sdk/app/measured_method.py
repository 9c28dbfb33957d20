"""Measure the methods of a client of a package, such as `chat.completions.create`."""

from __future__ import annotations

import asyncio
import functools
import logging
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from ..errors import ThrottleTimeout, warn
from . import event_loop
from .call import CallSettings
from .measurement import Api
from .observed_call import NOT_GIVEN, ObservedCall, current_call
from .steps import Steps, isawaitable, replace_iterators, run_steps, run_steps_async

log = logging.getLogger("loadgen_sdk")

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
        method: The method.
        api: The API that it calls.
        settings: What all calls of the client have in common.
        is_blocking: The method is not a coroutine function.
        find_request_fields: Finds the fields of the request in the arguments of the method. None if
            the arguments are the fields.
    """
    measured_method = _MeasuredMethod(
        method, api, settings, is_blocking=is_blocking, find_request_fields=find_request_fields
    )
    if is_blocking:
        return functools.wraps(method)(measured_method.blocking_function())
    return functools.wraps(method)(measured_method.async_function())


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
        """Prepare what all calls of the method need. The arguments are those of `measure_method`.

        What does not change from call to call is decided here, because it would cost time in each.
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
        # Nothing has to be waited for before a call, and nothing follows its failure.
        self._has_one_attempt = (
            policy.throttle is None and policy.budget is None and policy.retry is None
        )
        # An iterator can be read only once.
        self._reads_arguments_twice = (
            not self._has_one_attempt or policy.record is not None or policy.keep_content
        )

    def blocking_function(self) -> Callable[..., Any]:
        """Return the function that the application calls instead of a blocking method.

        A call without throttle, budget and retry is made here and not by `_run_attempts`, whose
        generator costs as much as all the rest of the measurement.
        """
        method = self._method

        def call(*args: Any, **kwargs: Any) -> Any:
            observed = self._begin(kwargs)
            if observed is None:
                return method(*args, **kwargs)
            if not self._has_one_attempt or observed.is_raw_requested:
                send = partial(method, *args, **kwargs)
                return run_steps(self._run_attempts(observed, send))
            try:
                with observed:
                    response = method(*args, **kwargs)
            except BaseException as error:
                observed.end_failed_attempt(error)
                raise
            return observed.observe_response(response, response, is_blocking=True)

        return call

    def async_function(self) -> Callable[..., Any]:
        """Return the coroutine function that the application calls instead of an async method.

        It does the same as the function of `blocking_function`. Some methods of the packages return
        an object that need not be awaited.
        """
        method = self._method

        async def call(*args: Any, **kwargs: Any) -> Any:
            observed = self._begin(kwargs)
            if observed is None:
                response = method(*args, **kwargs)
                return await response if isawaitable(response) else response
            if not self._has_one_attempt or observed.is_raw_requested:
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
            return observed.observe_response(response, response, is_blocking=False)

        return call

    def _begin(self, kwargs: dict[str, Any]) -> ObservedCall | None:
        """Begin to observe a call. `kwargs` are its arguments, which may be changed in place.

        The labels of the call are removed, and iterators are replaced by lists if they are read
        twice. Return None for a call that is not measured: it is part of another call, or this
        package has a defect.
        """
        labels = kwargs.pop(LABELS_ARGUMENT, None)
        outer_call = current_call.get()
        if outer_call is not None and outer_call.call.settings.hides_inner_calls:
            return None
        if self._is_blocking:
            self._warn_in_event_loop()
        try:
            if self._reads_arguments_twice:
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
        """Warn once that a blocking client is called in an event loop."""
        if self._settings.has_warned_about_event_loop or asyncio._get_running_loop() is None:
            return
        self._settings.has_warned_about_event_loop = True
        warn(
            (
                "a blocking OpenAI client was called inside a running event loop and "
                "blocks all other tasks. Use AsyncOpenAI or asyncio.to_thread"
            ),
            RuntimeWarning,
            stacklevel=5,
        )

    def _run_attempts(self, observed: ObservedCall, send: partial[Any]) -> Steps[Any]:
        """Send a request until it succeeds or may not be retried. Return the response.

        Before each attempt, this waits for the backoff of a retry, the throttle and the budget. The
        error of the last attempt is raised. A ThrottleTimeout becomes one that the application can
        catch as an APITimeoutError of its package.

        Args:
            observed: The call.
            send: Sends the request. It is the method of the client with its arguments.
        """
        if not self._is_blocking and self._settings.policy.retry is not None:
            event_loop.require_running()
        backoff_s: float | None = None
        while True:
            try:
                if backoff_s:
                    sleep = time.sleep if self._is_blocking else event_loop.sleep
                    yield partial(sleep, backoff_s)
                yield from self._wait_for_permission(observed, send)
                with observed:
                    response = yield send
                break
            except BaseException as error:
                backoff_s = observed.end_failed_attempt(error)
                can_retry = backoff_s is not None
                if can_retry:
                    continue
                if isinstance(error, ThrottleTimeout):
                    package = sys.modules[self._settings.package]
                    raise _timeout_error_of_package(package, error) from error
                raise

        if not observed.is_raw_requested:
            return observed.observe_response(response, response, is_blocking=self._is_blocking)
        try:
            parsed_response = yield response.parse
        except Exception as error:
            return observed.report_unparsable(response, error)
        return observed.observe_response(response, parsed_response, is_blocking=self._is_blocking)

    def _wait_for_permission(self, observed: ObservedCall, send: partial[Any]) -> Steps[None]:
        """Wait for a permit of the throttle, and book the estimated cost of the call.

        Raises:
            ThrottleTimeout: The throttle gave no permit in time.
            BudgetExceeded: The call may cost more than the budget has left.
        """
        call = observed.call
        if self._acquire_permit is not None:
            timeout = send.keywords.get("timeout", NOT_GIVEN)
            call.permit = yield partial(
                self._acquire_permit, **observed.throttle_arguments(timeout)
            )
        if self._book_cost is not None and call.is_budgeted:
            call.budget_hold = yield partial(self._book_cost, call.estimated_cost(), call.model)


def record_response_headers(
    headers: Any, hidden_retries: int = 0, http_response: Any = None
) -> None:
    """Pass the headers of a response to the call that is in progress in this context, if any.

    Args:
        headers: The headers.
        hidden_retries: The retries that the package of the client has made so far.
        http_response: The response of the HTTP library. It is kept until it is parsed: if that
            fails, its token counts are read nevertheless.
    """
    observed = current_call.get()
    if observed is not None:
        observed.hidden_retries = hidden_retries
        observed.http_response = http_response
        observed.call.record_headers(headers)


_timeout_types: dict[Any, type[BaseException]] = {}


def _timeout_error_of_package(package: Any, error: ThrottleTimeout) -> BaseException:
    """Return a ThrottleTimeout that is also an APITimeoutError of a package.

    The application may catch either: its code for timeouts of openai also works for the throttle.
    The class is created once for each package.
    """
    timeout_type = _timeout_types.get(package)
    if timeout_type is None:
        timeout_type = type(
            "ThrottleTimeout",
            (ThrottleTimeout, package.APITimeoutError),
            {"__init__": _init_timeout_error},
        )
        _timeout_types[package] = timeout_type
    return timeout_type(error)


def _init_timeout_error(self: Any, error: ThrottleTimeout) -> None:
    """Set the attributes of an APITimeoutError without a request."""
    Exception.__init__(self, str(error))
    self.message = str(error)
    self.hint = error.hint
    for name in ("request", "code", "param", "type", "body"):
        setattr(self, name, None)
