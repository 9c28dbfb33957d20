"""A second endpoint for the calls that the first one cannot answer, and the circuit breaker between the two."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from time import monotonic_ns
from typing import Any

from ..errors import RequestFailed, TargetUnusable, ThrottleTimeout, WrongUse
from ..request import Completion, Failure
from .finishing import lock_of
from .retry import RETRIED, RETRIED_STATUS
from .steps import Steps, repeatable, runner


class Circuit:
    """A circuit breaker, without IO. After so many failed calls in a row it is open for a while; then one call tries:
    it closes the circuit by an answer, and opens it again by a failure. Instants are monotonic ns.
    """

    def __init__(self, failures: int, rest_ns: int) -> None:
        self._most, self._rest_ns = failures, rest_ns
        self._failed = 0  # in a row
        self._open_until = 0
        self._trying = False
        self._lock = lock_of(self)

    def admits(self, now: int) -> bool:
        """Whether a call may go to the first endpoint. Each admitted call ends by `answered`, `failed` or `undone`."""
        with self._lock:
            if self._failed < self._most:
                return True
            if now < self._open_until or self._trying:
                return False
            self._trying = True
            return True

    def answered(self) -> None:
        with self._lock:
            self._failed, self._trying = 0, False

    def failed(self, now: int) -> None:
        with self._lock:
            self._failed, self._trying = self._failed + 1, False
            if self._failed >= self._most:
                self._open_until = now + self._rest_ns

    def undone(self) -> None:
        """The call says nothing of the endpoint: it was cancelled, or never sent."""
        with self._lock:
            self._trying = False


class Fallback:
    """A second endpoint: `instrument(client, fallback=Fallback(other, model="llama-small"))`.

    client: of the same kind as the first one. It has its own throttle, retry and budget, if it was made with them
    (`instrument(other, throttle=…)`), and may have a fallback too. One that is not instrumented is measured, priced and
    budgeted as the first, without a throttle. model: what it is asked for, a name or a mapping of names; None: the same
    (a `Client` has its own).

    A call goes to it when the first one failed in a way that another may not (no connection, a timeout, 408, 409, 425,
    429, 5xx), after the retries, or when its throttle gave no permit in time, and only before any output was delivered.
    After `failures` such calls in a row calls go straight to it for `rest_s` seconds; then one call tries the first
    again. Each endpoint's call is a Measurement of its own. Raises WrongUse.
    """

    def __init__(
        self,
        client: Any,
        *,
        model: str | Mapping[str, str] | None = None,
        failures: int = 5,
        rest_s: float = 30.0,
    ) -> None:
        if isinstance(failures, bool) or not isinstance(failures, int) or failures < 1:
            raise WrongUse(
                "out_of_range", f"failures={failures!r}", "give a whole number, at least 1"
            )
        if not isinstance(rest_s, int | float) or not 0 <= rest_s < 1e9:
            raise WrongUse("out_of_range", f"rest_s={rest_s!r}", "give seconds, 0 or more")
        self.client, self._model = client, model
        self.circuit = Circuit(failures, int(rest_s * 1e9))

    def model_for(self, model: Any) -> Any:
        """What the second endpoint is asked for."""
        return (
            self._model.get(model, model)
            if isinstance(self._model, Mapping)
            else self._model or model
        )

    def covering(
        self,
        send: Callable[..., Any],
        path: str,
        name: str,
        blocking: bool,
        failure_of: Callable[[Any], Failure],
    ) -> Callable[..., Any]:
        """`send`, the method of the first client at this path, with the same method of the second behind it."""

        def steps(*args: Any, **kwargs: Any) -> Steps[Any]:
            repeatable(kwargs)
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
            changed = {"model": self.model_for(kwargs["model"])} if "model" in kwargs else {}
            return (yield partial(method, *args, **{**kwargs, **changed}))

        return functools.wraps(send)(runner(steps, blocking))

    async def completed(
        self, send: Callable[[], Awaitable[Completion]], other: Callable[[], Awaitable[Completion]]
    ) -> Completion:
        """What the first endpoint answers, or else the second: of the project's own client."""
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
                if not self._may_cure(completion.failure):
                    return completion
        return await other()

    def takes_over(
        self, error: BaseException, failure_of: Callable[[Any], Failure], delivered: bool = False
    ) -> bool:
        """Whether the second endpoint takes the call that ended so at the first, which is told to the circuit."""
        if isinstance(error, ThrottleTimeout) or not isinstance(error, Exception):
            self.circuit.undone()
            return isinstance(error, ThrottleTimeout)
        return self._may_cure(failure_of(error)) and not delivered

    def _may_cure(self, failure: Failure) -> bool:
        if failure.kind in RETRIED or failure.http_status in RETRIED_STATUS:
            self.circuit.failed(monotonic_ns())
            return True
        self.circuit.answered()
        return False


def failure_of_client(error: Exception) -> Failure:
    """What an exception of the project's own client says."""
    if isinstance(error, RequestFailed):
        return Failure(error.kind, error.text, error.http_status)
    return Failure(error.code if isinstance(error, TargetUnusable) else "", str(error))


def checked_fallback(fallback: Any, kind: Callable[[Any], object], client: Any) -> Fallback | None:
    """Raises WrongUse unless its client is of the same kind as `client`. kind: of a client."""
    if fallback is None:
        return None
    if not isinstance(fallback, Fallback):
        raise WrongUse(
            "wrong_type", f"fallback is a {type(fallback).__name__}", "give Fallback(client)"
        )
    if kind(fallback.client) != kind(client):
        names = f"{type(fallback.client).__name__} behind a {type(client).__name__}"
        raise WrongUse(
            "wrong_type", f"a {names}", "give clients of one package, both blocking or both async"
        )
    return fallback
