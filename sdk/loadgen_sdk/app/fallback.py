"""A second endpoint for calls that the first one cannot answer, and the circuit breaker."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from time import monotonic_ns
from typing import Any

from ..errors import RequestFailed, TargetUnusable, ThrottleTimeout, WrongUse
from ..request import Completion, Failure
from .background import create_fork_safe_lock
from .retry import RETRIED, RETRIED_STATUS
from .steps import Steps, as_function, replace_iterators

_MAX_REST_S = 1e9


class CircuitBreaker:
    """A circuit breaker. Pure: times are in monotonic ns, and the caller passes them.

    It is closed while calls succeed. After a number of failed calls in a row it opens, and no call
    is allowed for a while. Then one trial call is allowed ("half open"): the circuit closes if it
    succeeds, and opens again if it fails.
    """

    def __init__(self, max_failures: int, open_ns: int) -> None:
        """Create a closed circuit that opens for `open_ns` after `max_failures` in a row."""
        self._max_failures = max_failures
        self._open_ns = open_ns
        self._failures_in_a_row = 0
        self._open_until = 0
        self._is_trial_running = False
        self._lock = create_fork_safe_lock(self)

    def allows_call(self, now: int) -> bool:
        """Return True if a call may be sent to the endpoint now.

        The caller has to report the end of each allowed call by `record_success`, `record_failure`
        or `record_cancellation`. Without that, a trial call would block all further ones.
        """
        with self._lock:
            is_closed = self._failures_in_a_row < self._max_failures
            if is_closed:
                return True
            if now < self._open_until or self._is_trial_running:
                return False
            self._is_trial_running = True
            return True

    def record_success(self) -> None:
        """Note that the endpoint has answered a call, and close the circuit."""
        with self._lock:
            self._failures_in_a_row = 0
            self._is_trial_running = False

    def record_failure(self, now: int) -> None:
        """Note that a call has failed, and open the circuit after too many in a row."""
        with self._lock:
            self._failures_in_a_row += 1
            self._is_trial_running = False
            if self._failures_in_a_row >= self._max_failures:
                self._open_until = now + self._open_ns

    def record_cancellation(self) -> None:
        """Note that a call was cancelled or never sent, which says nothing about the endpoint."""
        with self._lock:
            self._is_trial_running = False


class Fallback:
    """A second endpoint: `instrument(client, fallback=Fallback(other, model="llama-small"))`.

    A call goes to it if the first endpoint failed in a way in which another may not (no
    connection, a timeout, 408, 409, 425, 429, 5xx), after the retries, or if its throttle gave no
    permit in time, and only before any output was delivered. After `failures` such calls in a row,
    calls go straight to the second endpoint for `rest_s` seconds. Then one call tries the first
    endpoint again. The call at each endpoint is a Measurement of its own.

    Attributes:
        client: The client of the second endpoint.
        circuit: The circuit breaker of the first endpoint.
    """

    def __init__(
        self,
        client: Any,
        *,
        model: str | Mapping[str, str] | None = None,
        failures: int = 5,
        rest_s: float = 30.0,
    ) -> None:
        """Create a fallback to a second endpoint.

        Args:
            client: A client of the same kind as the first one. If it was instrumented, it keeps its
                own throttle, retry, budget and fallback. Otherwise it gets the prices, observers
                and budget of the first client, but no throttle.
            model: The model to request from the second endpoint, as a name, or as a mapping from
                the models of the first endpoint. None requests the same model. It has no effect if
                `client` is a `Client`, which has a model of its own.
            failures: The number of failed calls in a row that opens the circuit, so that the first
                endpoint gets no calls.
            rest_s: How many seconds the circuit stays open.

        Raises:
            WrongUse: An argument is not valid.
        """
        if isinstance(failures, bool) or not isinstance(failures, int) or failures < 1:
            raise WrongUse("out_of_range", f"failures={failures!r}", "must be an integer >= 1")
        if not isinstance(rest_s, int | float) or not 0 <= rest_s < _MAX_REST_S:
            raise WrongUse("out_of_range", f"rest_s={rest_s!r}", "must be a number of seconds >= 0")
        self.client = client
        self.circuit = CircuitBreaker(failures, int(rest_s * 1e9))
        self._model = model

    def model_for(self, model: str) -> str:
        """Return the model to request from the second endpoint for a model of the first one."""
        if isinstance(self._model, Mapping):
            return self._model.get(model, model)
        return self._model or model

    def wrap_method(
        self,
        send: Callable[..., Any],
        resource_path: str,
        method_name: str,
        *,
        is_blocking: bool,
        failure_from_error: Callable[[Exception], Failure],
    ) -> Callable[..., Any]:
        """Return a method of the first client that falls back to the same method of the second one.

        Args:
            send: The method of the first client.
            resource_path: The path of its resource, such as "chat.completions".
            method_name: The name of the method, such as "create".
            is_blocking: Both clients are blocking. Otherwise both are async.
            failure_from_error: Returns the failure that an exception of the clients means.
        """
        method_with_fallback = _MethodWithFallback(
            self, send, resource_path, method_name, failure_from_error
        )
        # `send_request` is a generator function for both kinds of clients.
        function = as_function(method_with_fallback.send_request, is_blocking=is_blocking)
        # The function gets the name and the documentation of the method that it replaces.
        return functools.update_wrapper(function, send)

    async def complete(
        self,
        send_to_first: Callable[[], Awaitable[Completion]],
        send_to_second: Callable[[], Awaitable[Completion]],
    ) -> Completion:
        """Return the completion of the first endpoint, or that of the second one if it fails.

        The first one is skipped while its circuit breaker is open. The second endpoint is not tried
        after a failure that it would have as well, such as HTTP 400. Such a failure is raised, or
        is part of the completion.

        Args:
            send_to_first: Sends the request to the first endpoint.
            send_to_second: Sends the same request to the second endpoint.
        """
        if not self.circuit.allows_call(monotonic_ns()):
            return await send_to_second()

        try:
            completion = await send_to_first()
        except BaseException as error:
            if not self.handle_error(error, failure_from_client_error):
                raise
        else:
            if not self._handle_completion(completion):
                return completion

        return await send_to_second()

    def _handle_completion(self, completion: Completion) -> bool:
        """Report a completion to the circuit. Return True if the second endpoint is to be tried."""
        if completion.failure is None:
            self.circuit.record_success()
            return False
        return self._record_failure(completion.failure)

    def handle_error(
        self,
        error: BaseException,
        failure_from_error: Callable[[Exception], Failure],
        *,
        has_output: bool = False,
    ) -> bool:
        """Report a failed call to the circuit breaker of the first endpoint.

        Return True if the call is to be sent to the second endpoint, which is also the case if only
        the throttle of the first one prevented it.

        Args:
            error: The exception of the call.
            failure_from_error: Returns the failure that an exception means.
            has_output: Output has reached the caller. The second endpoint would repeat it.
        """
        if isinstance(error, ThrottleTimeout):
            # The request was not sent, which says nothing about the first endpoint.
            self.circuit.record_cancellation()
            return True

        if not isinstance(error, Exception):
            # The caller was cancelled, for example by CancelledError.
            self.circuit.record_cancellation()
            return False

        failure = failure_from_error(error)
        is_endpoint_to_blame = self._record_failure(failure)
        return is_endpoint_to_blame and not has_output

    def _record_failure(self, failure: Failure) -> bool:
        """Report a failure to the circuit. Return True if the endpoint is to blame.

        If the request is to blame, such as for HTTP 400, another endpoint would fail as well. The
        circuit then counts a success, because the endpoint has responded.
        """
        if failure.kind in RETRIED or failure.http_status in RETRIED_STATUS:
            self.circuit.record_failure(monotonic_ns())
            return True
        self.circuit.record_success()
        return False


@dataclass(frozen=True)
class _MethodWithFallback:
    """A method of the first client, and how to find the same method of the second client.

    Attributes:
        fallback: The second client, and the circuit breaker of the first endpoint.
        first_method: The method of the first client.
        resource_path: The path of its resource, such as "chat.completions".
        method_name: The name of the method, such as "create".
        failure_from_error: Returns the failure that an exception of the clients means.
    """

    fallback: Fallback
    first_method: Callable[..., Any]
    resource_path: str
    method_name: str
    failure_from_error: Callable[[Exception], Failure]

    def send_request(self, *args: Any, **kwargs: Any) -> Steps[Any]:
        """Send a request to the first endpoint, or to the second one if the first one fails.

        The first endpoint is skipped while its circuit breaker is open, because it has failed too
        often. The arguments are those of the method, and the result is the response.

        This generator serves blocking and async clients. `result = yield function` means: call
        `function`, await what it returns in an async client, and go on with the result (see
        `Steps`).
        """
        replace_iterators(kwargs)  # Both endpoints may have to read the arguments.
        circuit = self.fallback.circuit
        if circuit.allows_call(monotonic_ns()):
            send_to_first = partial(self.first_method, *args, **kwargs)
            try:
                response = yield send_to_first
            except BaseException as error:
                should_try_second = self.fallback.handle_error(error, self.failure_from_error)
                if not should_try_second:
                    raise
            else:
                circuit.record_success()
                return response

        if "model" in kwargs:
            kwargs["model"] = self.fallback.model_for(kwargs["model"])

        send_to_second = partial(self._second_method(), *args, **kwargs)
        second_response = yield send_to_second
        return second_response

    def _second_method(self) -> Callable[..., Any]:
        """Return the method of the second client, such as `client.chat.completions.create`."""
        resource = self.fallback.client
        for name in self.resource_path.split("."):
            resource = getattr(resource, name)
        method: Callable[..., Any] = getattr(resource, self.method_name)
        return method


def failure_from_client_error(error: Exception) -> Failure:
    """Return the failure that an exception of the client of this project means."""
    if isinstance(error, RequestFailed):
        return Failure(error.kind, error.text, error.http_status)
    code = error.code if isinstance(error, TargetUnusable) else ""
    return Failure(code, str(error))


def validate_fallback(
    fallback: Fallback | None,
    *,
    get_client_kind: Callable[[object], object],
    first_client: object,
) -> Fallback | None:
    """Check the option `fallback=` of a client and return it.

    Args:
        fallback: The option, or None if it is not used.
        get_client_kind: Returns the kind of a client. Both clients must be of the same kind. For a
            client of openai, for example, the kind is the package and whether the client blocks.
        first_client: The client that has the option.

    Raises:
        WrongUse: The option is not a Fallback, or its client is of another kind than the first one.
    """
    if fallback is None:
        return None

    if not isinstance(fallback, Fallback):
        raise WrongUse(
            "wrong_type",
            f"fallback must be a Fallback, not a {type(fallback).__name__}",
            "give Fallback(client)",
        )

    if get_client_kind(fallback.client) != get_client_kind(first_client):
        second_class = type(fallback.client).__name__
        first_class = type(first_client).__name__
        raise WrongUse(
            "wrong_type",
            f"a {second_class} behind a {first_class}",
            "give clients of one package, both blocking or both async",
        )

    return fallback
