"""Measures an OpenAI client that an application already has: `measured = instrument(AsyncOpenAI(...))`.

Methods and streams are wrapped. Transports are not, because they differ between major versions of the package. The
package is not imported here. The application calls the same methods and gets the same results and exceptions.
"""

from __future__ import annotations

import copy
from types import ModuleType
from typing import Any, TypeVar, cast

import msgspec

from ..errors import WrongUse
from ..prices import Prices
from .budget import BudgetOption
from .fallback import Fallback, checked_fallback
from .labels import Labels
from .packages import OPTIONS, Options, install, measured_litellm, measured_router, package_of
from .policy import Observers, Policy, make_policy
from .retry import Retry
from .throttle import Throttle
from .trace_recorder import ShapeRecorder

C = TypeVar("C")


def instrument(
    client: C,
    on_measurement: Observers = None,
    *,
    prices: Prices = None,
    throttle: Throttle | None = None,
    retry: Retry | None = None,
    record: ShapeRecorder | None = None,
    ask_usage: bool | None = None,
    keep_content: bool = False,
    labels: Labels | None = None,
    budget: BudgetOption = None,
    fallback: Fallback | None = None,
) -> C:
    """A copy of `client` whose calls are measured. `client` itself is not changed; both share its connections.

    client: OpenAI, AsyncOpenAI, AzureOpenAI, AsyncAzureOpenAI or a subclass. Measured are `create`, `parse` and
    `stream` of chat.completions, completions, responses and embeddings, streaming or not, also through `with_options`,
    `with_raw_response` and `with_streaming_response`. A client that is instrumented already keeps its observers and
    settings: those given here come on top.

    Each call makes one Measurement. It is passed to `on_measurement` (one function or several, coroutines too), set as
    `.measurement` of the answer (of a stream when it has ended), and returned by `latest_measurement()`. Failed,
    cancelled and abandoned calls make one too. Their exceptions reach the caller unchanged.

    prices: used for `cost`. throttle: waits before each attempt, at most the call's timeout. retry: replaces the
    client's own `max_retries`, which is set to 0. record: from `record_shape`. ask_usage: requests a token count for
    streams (`stream_options`); the extra event with the count is not passed to the application. None: when there are
    prices. keep_content: store texts in the measurement. labels: of every call; see also `labelled`.
    budget: "50 USD/day", or a Budget; a call above it raises BudgetExceeded, before it is sent.
    fallback: a second endpoint.

    Raises WrongUse when `client` is not such a client or an argument is invalid.
    """
    policy = make_policy(
        on_measurement, prices, throttle, retry, record, keep_content, labels, budget
    )
    options = _merged(
        vars(client).get(OPTIONS) if hasattr(client, "__dict__") else None,
        Options(policy, ask_usage),
    )
    if isinstance(client, ModuleType) and client.__name__ == "litellm":
        if fallback is not None:
            hint = "LiteLLM's Router has fallbacks of its own"
            raise WrongUse("unsupported", "LiteLLM with a fallback of loadgen_sdk", hint)
        result: Any = ModuleType("litellm", client.__doc__)

        def other(name: str) -> Any:
            """What is not measured, as it is. LiteLLM imports its Router at its first use."""
            if name != "Router":
                return getattr(client, name)
            result.Router = measured_router(client.Router, options)
            return result.Router

        vars(result).update(measured_litellm(client, options), __getattr__=other)
        vars(result)[OPTIONS] = options
        return cast(C, result)
    package_of(client)
    if (second := checked_fallback(fallback, package_of, client)) is not None:
        if OPTIONS not in vars(second.client):  # as the first one, but for its throttle
            own = msgspec.structs.replace(options.policy, throttle=None)
            other, second.client = second.client, copy.copy(second.client)
            install(second.client, other, Options(own, options.ask_usage))
        options = options._replace(fallback=second)
    result = copy.copy(client)
    install(result, client, options)
    return cast(C, result)


def _merged(inner: Options | None, given: Options) -> Options:
    """What the client had, and what is given now. Two throttles, retries or recorders cannot both hold: WrongUse."""
    if inner is None:
        return given
    old, new = inner.policy, given.policy
    for name in ("throttle", "retry", "record", "budget"):
        first, second = getattr(old, name), getattr(new, name)
        if first is not None and second is not None and first is not second:
            raise WrongUse(
                "conflict",
                f"this client has a {name} already, and gets another one",
                f"give {name} once",
            )
    policy = Policy(
        observers=(*old.observers, *new.observers),
        prices=old.prices if new.prices is None else new.prices,
        throttle=new.throttle or old.throttle,
        retry=new.retry or old.retry,
        record=old.record if new.record is None else new.record,
        keep_content=old.keep_content or new.keep_content,
        labels={**old.labels, **new.labels},
        budget=new.budget or old.budget,
    )
    return Options(
        policy,
        inner.ask_usage if given.ask_usage is None else given.ask_usage,
        fallback=inner.fallback,
    )
