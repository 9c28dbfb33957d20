"""A second endpoint for calls that the first one cannot answer, and the circuit breaker."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from time import monotonic_ns
from typing import Any

from ..errors import RequestFailed, TargetUnusable, ThrottleTimeout, WrongUse
from ..request import Completion, Failure
from .background import create_fork_safe_lock
from .retry import RETRIED, RETRIED_STATUS
from .steps import Steps, as_function, replace_iterators

_LONGEST_REST_S = 1e9


class Circuit:
    """A circuit breaker. Pure: times are in monotonic ns, and the caller passes them.

    After a number of failed calls in a row it is open for a while. Then one call is let through:
    it closes the circuit if it is answered, and opens it again if it fails.
    """

    def __init__(self, failures: int, open_ns: int) -> None:
        """Start closed. It opens after a number of failures, for `open_ns`."""
        self._max_failures = failures
        self._open_ns = open_ns
        self._failures_in_a_row = 0
        self._open_until = 0
        self._is_testing = False
        self._lock = create_fork_safe_lock(self)

    def admits(self, now: int) -> bool:
        """Return True if a call may go to the first endpoint.

        Each admitted call ends by `answered`, `failed` or `undone`.
        """
        with self._lock:
            if self._failures_in_a_row < self._max_failures:
                return True
            if now < self._open_until or self._is_testing:
                return False
            self._is_testing = True
            return True

    def answered(self) -> None:
        """Note that a call was answered."""
        with self._lock:
            self._failures_in_a_row = 0
            self._is_testing = False

    def failed(self, now: int) -> None:
        """Note that a call has failed."""
        with self._lock:
            self._failures_in_a_row += 1
            self._is_testing = False
            if self._failures_in_a_row >= self._max_failures:
                self._open_until = now + self._open_ns

    def undone(self) -> None:
        """Note that a call was cancelled or never sent, which says nothing about the endpoint."""
        with self._lock:
            self._is_testing = False


class Fallback:
    """A second endpoint: `instrument(client, fallback=Fallback(other, model="llama-small"))`.

    A call goes to it if the first endpoint failed in a way in which another may not (no
    connection, a timeout, 408, 409, 425, 429, 5xx), after the retries, or if its throttle gave no
    permit in time, and only before any output was delivered. After `failures` such calls in a row,
    calls go straight to the second endpoint for `rest_s` seconds. Then one call tries the first
    endpoint again. The call at each endpoint is a Measurement of its own.

    Attributes:
        client: The client of the second endpoint.
        circuit: The circuit breaker.
    """

    def __init__(
        self,
        client: Any,
        *,
        model: str | Mapping[str, str] | None = None,
        failures: int = 5,
        rest_s: float = 30.0,
    ) -> None:
        """Keep the second endpoint.

        Args:
            client: A client of the same kind as the first one. It has its own throttle, retry and
                budget if it was instrumented with them, and may have a fallback too. One that is
                not instrumented is measured, priced and budgeted as the first one, without a
                throttle.
            model: The model to request, as a name or as a mapping of names. None requests the same
                model. A `Client` has its own.
            failures: The number of failed calls in a row that opens the circuit.
            rest_s: How long the circuit is open.

        Raises:
            WrongUse: An argument is not valid.
        """
        if isinstance(failures, bool) or not isinstance(failures, int) or failures < 1:
            raise WrongUse("out_of_range", f"failures={failures!r}", "must be an integer >= 1")
        if not isinstance(rest_s, int | float) or not 0 <= rest_s < _LONGEST_REST_S:
            raise WrongUse("out_of_range", f"rest_s={rest_s!r}", "must be a number of seconds >= 0")
        self.client = client
        self.circuit = Circuit(failures, int(rest_s * 1e9))
        self._model = model

    def model_for(self, model: Any) -> Any:
        """Return the model to request from the second endpoint for a model of the first one."""
        if isinstance(self._model, Mapping):
            return self._model.get(model, model)
        return self._model or model

    def cover(
        self,
        send: Callable[..., Any],
        path: str,
        name: str,
        blocking: bool,
        failure_of: Callable[[Any], Failure],
    ) -> Callable[..., Any]:
        """Return a method of the first client that falls back to the same method of the second one.

        Args:
            send: The method of the first client.
            path: The path of the method's resource, such as "chat.completions".
            name: The name of the method.
            blocking: The client is a blocking one.
            failure_of: Returns the failure that an exception means.
        """

        def steps(*args: Any, **kwargs: Any) -> Steps[Any]:
            replace_iterators(kwargs)
            if self.circuit.admits(monotonic_ns()):
                try:
                    answer = yield partial(send, *args, **kwargs)
                except BaseException as error:
                    if not self.takes_over(error, failure_of):
                        raise
                else:
                    self.circuit.answered()
                    return answer
            method = functools.reduce(getattr, (*path.split("."), name), self.client)
            if "model" in kwargs:
                kwargs = {**kwargs, "model": self.model_for(kwargs["model"])}
            return (yield partial(method, *args, **kwargs))

        return functools.wraps(send)(as_function(steps, is_blocking=blocking))

    async def complete(
        self,
        send: Callable[[], Awaitable[Completion]],
        send_to_second: Callable[[], Awaitable[Completion]],
    ) -> Completion:
        """Return the completion of the first endpoint, or that of the second one."""
        if self.circuit.admits(monotonic_ns()):
            try:
                completion = await send()
            except BaseException as error:
                if not self.takes_over(error, failure_of_client):
                    raise
            else:
                if completion.failure is None:
                    self.circuit.answered()
                    return completion
                if not self._note_failure(completion.failure):
                    return completion
        return await send_to_second()

    def takes_over(
        self, error: BaseException, failure_of: Callable[[Any], Failure], delivered: bool = False
    ) -> bool:
        """Return True if the second endpoint is to take a call that failed, and tell the circuit.

        Args:
            error: The exception of the call.
            failure_of: Returns the failure that an exception means.
            delivered: Output has reached the caller.
        """
        if isinstance(error, ThrottleTimeout):
            self.circuit.undone()
            return True
        if not isinstance(error, Exception):
            self.circuit.undone()
            return False
        return self._note_failure(failure_of(error)) and not delivered

    def _note_failure(self, failure: Failure) -> bool:
        """Tell the circuit about a failure. Return True if another endpoint may not fail."""
        if failure.kind in RETRIED or failure.http_status in RETRIED_STATUS:
            self.circuit.failed(monotonic_ns())
            return True
        self.circuit.answered()
        return False


def failure_of_client(error: Exception) -> Failure:
    """Return the failure that an exception of the client of this project means."""
    if isinstance(error, RequestFailed):
        return Failure(error.kind, error.text, error.http_status)
    code = error.code if isinstance(error, TargetUnusable) else ""
    return Failure(code, str(error))


def validate_fallback(
    fallback: Any, kind_of_client: Callable[[Any], object], client: Any
) -> Fallback | None:
    """Return the fallback of an option.

    Args:
        fallback: The option.
        kind_of_client: Returns the kind of a client.
        client: The first client.

    Raises:
        WrongUse: It is no fallback, or its client is of another kind than the first one.
    """
    if fallback is None:
        return None
    if not isinstance(fallback, Fallback):
        raise WrongUse(
            "wrong_type", f"fallback is a {type(fallback).__name__}", "give Fallback(client)"
        )
    if kind_of_client(fallback.client) != kind_of_client(client):
        names = f"{type(fallback.client).__name__} behind a {type(client).__name__}"
        raise WrongUse(
            "wrong_type", f"a {names}", "give clients of one package, both blocking or both async"
        )
    return fallback
