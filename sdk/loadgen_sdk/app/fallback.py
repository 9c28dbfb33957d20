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
        if not isinstance(rest_s, int | float) or not 0 <= rest_s < _MAX_REST_S:
            raise WrongUse("out_of_range", f"rest_s={rest_s!r}", "must be a number of seconds >= 0")
        self.client = client
        self.circuit = CircuitBreaker(failures, int(rest_s * 1e9))
        self._model = model

    def model_for(self, model: Any) -> Any:
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
            is_blocking: The clients are blocking ones.
            failure_from_error: Returns the failure that an exception of the clients means.
        """

        def steps(*args: Any, **kwargs: Any) -> Steps[Any]:
            replace_iterators(kwargs)
            if self.circuit.allows_call(monotonic_ns()):
                try:
                    response = yield partial(send, *args, **kwargs)
                except BaseException as error:
                    if not self.handle_error(error, failure_from_error):
                        raise
                else:
                    self.circuit.record_success()
                    return response

            names = (*resource_path.split("."), method_name)
            second_method = functools.reduce(getattr, names, self.client)
            if "model" in kwargs:
                kwargs = {**kwargs, "model": self.model_for(kwargs["model"])}
            return (yield partial(second_method, *args, **kwargs))

        return functools.wraps(send)(as_function(steps, is_blocking=is_blocking))

    async def complete(
        self,
        send_to_first: Callable[[], Awaitable[Completion]],
        send_to_second: Callable[[], Awaitable[Completion]],
    ) -> Completion:
        """Return the completion of the first endpoint, or that of the second one if it fails.

        The first one is skipped while its circuit is open. A failure that the second endpoint would
        have as well, such as HTTP 400, is returned or raised as it is.
        """
        if self.circuit.allows_call(monotonic_ns()):
            try:
                completion = await send_to_first()
            except BaseException as error:
                if not self.handle_error(error, failure_from_client_error):
                    raise
            else:
                if completion.failure is None:
                    self.circuit.record_success()
                    return completion
                if not self._record_failure(completion.failure):
                    return completion
        return await send_to_second()

    def handle_error(
        self,
        error: BaseException,
        failure_from_error: Callable[[Exception], Failure],
        *,
        has_output: bool = False,
    ) -> bool:
        """Report a failed call to the circuit. Return True if the second endpoint is to be tried.

        - ThrottleTimeout: True. The first endpoint has got no request, so that its circuit does not
          count this.
        - The call was cancelled: False.
        - A failure that the second endpoint may not have: True, unless output has reached the
          caller (`has_output`), who would get it twice.
        - Any other failure, such as HTTP 400: False.

        Args:
            error: The exception of the call.
            failure_from_error: Returns the failure that an exception means.
            has_output: Output has reached the caller.
        """
        if isinstance(error, ThrottleTimeout):
            self.circuit.record_cancellation()
            return True
        if not isinstance(error, Exception):
            self.circuit.record_cancellation()
            return False
        may_differ = self._record_failure(failure_from_error(error))
        return may_differ and not has_output

    def _record_failure(self, failure: Failure) -> bool:
        """Report a failure to the circuit. Return True if another endpoint may not have it.

        Otherwise the request is to blame, and the endpoint has answered it as it should.
        """
        if failure.kind in RETRIED or failure.http_status in RETRIED_STATUS:
            self.circuit.record_failure(monotonic_ns())
            return True
        self.circuit.record_success()
        return False


def failure_from_client_error(error: Exception) -> Failure:
    """Return the failure that an exception of the client of this project means."""
    if isinstance(error, RequestFailed):
        return Failure(error.kind, error.text, error.http_status)
    code = error.code if isinstance(error, TargetUnusable) else ""
    return Failure(code, str(error))


def validate_fallback(
    fallback: Fallback | None, get_client_kind: Callable[[Any], object], client: Any
) -> Fallback | None:
    """Return the option `fallback=` of a client, if it is valid.

    Args:
        fallback: The option.
        get_client_kind: Returns the package and class of a client, which must be equal.
        client: The first client.

    Raises:
        WrongUse: It is no Fallback, or its client is of another kind than the first one.
    """
    if fallback is None:
        return None
    if not isinstance(fallback, Fallback):
        raise WrongUse(
            "wrong_type",
            f"fallback must be a Fallback, not a {type(fallback).__name__}",
            "give Fallback(client)",
        )
    if get_client_kind(fallback.client) != get_client_kind(client):
        names = f"{type(fallback.client).__name__} behind a {type(client).__name__}"
        raise WrongUse(
            "wrong_type", f"a {names}", "give clients of one package, both blocking or both async"
        )
    return fallback
