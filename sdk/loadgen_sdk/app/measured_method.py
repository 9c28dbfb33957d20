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
from .observed_call import NOT_GIVEN, ObservedCall, sending
from .steps import Steps, isawaitable, replace_iterators, run_steps, run_steps_async

log = logging.getLogger("loadgen_sdk")

LABELS_ARGUMENT = "loadgen_labels"
"""The argument of a call that belongs to this package. All others belong to the method."""

ArgumentsOf = Callable[[dict[str, Any]], dict[str, Any]]


def measure_method(
    method: Callable[..., Any],
    api: Api,
    settings: CallSettings,
    blocking: bool,
    arguments_of: ArgumentsOf | None = None,
) -> Callable[..., Any]:
    """Return a method of a client that is measured, throttled and retried.

    The client calls `head_arrived` when the head of a response has arrived.

    Args:
        method: The method.
        api: The API that it calls.
        settings: What all calls of the client have in common.
        blocking: The client is a blocking one.
        arguments_of: Finds the arguments of the request in those of the method. None if they are
            the same.
    """
    measured = _MeasuredMethod(method, api, settings, blocking, arguments_of)
    return functools.wraps(method)(measured.call_blocking() if blocking else measured.call_async())


class _MeasuredMethod:
    """A method that is measured, with what its calls need."""

    def __init__(
        self,
        method: Callable[..., Any],
        api: Api,
        settings: CallSettings,
        blocking: bool,
        arguments_of: ArgumentsOf | None,
    ) -> None:
        policy = settings.policy
        self._method = method
        self._api = api
        self._settings = settings
        self._blocking = blocking
        self._arguments_of = arguments_of
        self._acquire: Callable[..., Any] | None = None
        if policy.throttle is not None:
            throttle = policy.throttle
            self._acquire = throttle.acquire_blocking if blocking else throttle.acquire
        self._book = (
            None
            if policy.budget is None
            else policy.budget.select_book_function(is_blocking=blocking)
        )
        self._has_one_attempt = (
            self._acquire is None and self._book is None and policy.retry is None
        )
        # Iterators in the arguments are then read more than once.
        self._reads_arguments_twice = (
            not self._has_one_attempt or policy.record is not None or policy.keep_content
        )

    def call_blocking(self) -> Callable[..., Any]:
        """Return the function that the application calls."""
        method = self._method

        # One attempt without a wait is made here, because a generator costs as much as all the
        # rest.
        def call(*args: Any, **kwargs: Any) -> Any:
            observed = self._begin(kwargs)
            if observed is None:
                return method(*args, **kwargs)
            if not self._has_one_attempt or observed.raw_requested:
                return run_steps(self._attempts(observed, partial(method, *args, **kwargs)))
            try:
                with observed:
                    answer = method(*args, **kwargs)
            except BaseException as error:
                observed.attempt_failed(error)
                raise
            return observed.answered(answer, answer, True)

        return call

    def call_async(self) -> Callable[..., Any]:
        """Return the coroutine function that the application calls."""
        method = self._method

        async def call_in_loop(*args: Any, **kwargs: Any) -> Any:
            observed = self._begin(kwargs)
            if observed is None:
                answer = method(*args, **kwargs)
                return await answer if isawaitable(answer) else answer
            if not self._has_one_attempt or observed.raw_requested:
                return await run_steps_async(
                    self._attempts(observed, partial(method, *args, **kwargs))
                )
            try:
                with observed:
                    answer = method(*args, **kwargs)
                    if isawaitable(answer):
                        answer = await answer
            except BaseException as error:
                observed.attempt_failed(error)
                raise
            return observed.answered(answer, answer, False)

        return call_in_loop

    def _begin(self, kwargs: dict[str, Any]) -> ObservedCall | None:
        """Return the call that begins, or None for one that is a part of another call."""
        labels = kwargs.pop(LABELS_ARGUMENT, None)
        outer = sending.get()
        if outer is not None and outer.call.settings.covers_inner:
            return None
        if self._blocking:
            self._warn_in_event_loop()
        try:
            if self._reads_arguments_twice:
                replace_iterators(kwargs)
            arguments = kwargs if self._arguments_of is None else self._arguments_of(kwargs)
            return ObservedCall(self._api, self._settings, arguments, labels)
        except Exception:
            # A defect of this package must not become an error of the application.
            log.exception("a call is not measured")
            return None

    def _warn_in_event_loop(self) -> None:
        """Warn once that a blocking client is called in an event loop."""
        if self._settings.warned or asyncio._get_running_loop() is None:
            return
        self._settings.warned = True
        warn(
            "a blocking OpenAI client was called inside a running event loop and blocks all other "
            "tasks; use AsyncOpenAI, or asyncio.to_thread",
            RuntimeWarning,
            stacklevel=5,
        )

    def _attempts(self, observed: ObservedCall, send: partial[Any]) -> Steps[Any]:
        """Run a call that may wait, be refused, or be tried again.

        `send` is the method with its arguments.
        """
        wait_s: float | None = None
        if not self._blocking and self._settings.policy.retry is not None:
            event_loop.require_running()
        while True:
            try:
                if wait_s:
                    yield partial(time.sleep if self._blocking else event_loop.sleep, wait_s)
                yield from self._wait_for_permission(observed, send)
                with observed:
                    answer = yield send
                break
            except BaseException as error:
                wait_s = observed.attempt_failed(error)
                if wait_s is not None:
                    continue
                if isinstance(error, ThrottleTimeout):
                    package = sys.modules[self._settings.package]
                    raise _timeout_error_of_package(package, error) from error
                raise
        result = answer
        if observed.raw_requested:
            try:
                result = yield answer.parse
            except Exception as error:
                return observed.unreadable(answer, error)
        return observed.answered(answer, result, self._blocking)

    def _wait_for_permission(self, observed: ObservedCall, send: partial[Any]) -> Steps[None]:
        """Wait for the throttle, and book the call of the budget."""
        call = observed.call
        if self._acquire is not None:
            arguments = observed.throttle_arguments(send.keywords.get("timeout", NOT_GIVEN))
            call.permit = yield partial(self._acquire, **arguments)
        if self._book is not None and call.is_budgeted:
            call.hold = yield partial(self._book, call.estimated_cost(), call.model)


def head_arrived(headers: Any, hidden_retries: int = 0, response: Any = None) -> None:
    """Note that the head of a response has arrived, for the call that is being sent here, if any.

    Args:
        headers: The headers.
        hidden_retries: The retries of the package so far.
        response: The response of the HTTP library.
    """
    observed = sending.get()
    if observed is not None:
        observed.hidden_retries = hidden_retries
        observed.response = response
        observed.call.head_received(headers)


_timeout_types: dict[Any, type[BaseException]] = {}


def _timeout_error_of_package(package: Any, error: ThrottleTimeout) -> BaseException:
    """Return a ThrottleTimeout that is also an APITimeoutError of a package."""
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
