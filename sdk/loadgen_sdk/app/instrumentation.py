"""Measures an OpenAI client that an application already has: `measured = instrument(AsyncOpenAI(...))`.

Methods and streams are wrapped. Transports are not, because they differ between major versions of the package. The
package is not imported here. The application calls the same methods and gets the same results and exceptions.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar, cast

from ..errors import WrongUse
from .call import Setting
from .measurement import Api, Prices
from .observed_call import measured, seconds_of
from .policy import Observers, Policy, make_policy
from .retry import Retry
from .throttle import Throttle
from .trace_recorder import ShapeRecorder

C = TypeVar("C")

_RESOURCES: tuple[tuple[str, Api], ...] = (
    ("chat.completions", "chat"),
    ("beta.chat.completions", "chat"),
    ("completions", "completions"),
    ("responses", "responses"),
    ("embeddings", "embeddings"),
)
_VARIANTS = ("with_raw_response", "with_streaming_response")
_METHODS = ("create", "parse")  # `stream` of both APIs goes through `create`
_OPTIONS = "_loadgen_sdk_options"  # the attribute by which an instrumented client is known


class Options(NamedTuple):
    """The arguments of `instrument`, as kept on an instrumented client."""

    policy: Policy
    ask_usage: bool | None


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
    labels: Mapping[str, str | int] | None = None,
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

    Raises WrongUse when `client` is not such a client or an argument is invalid.
    """
    policy = make_policy(on_measurement, prices, throttle, retry, record, keep_content, labels)
    _blocking_kind(client)
    result: Any = copy.copy(client)
    install(result, client, _merged(getattr(client, _OPTIONS, None), Options(policy, ask_usage)))
    return cast(C, result)


def _blocking_kind(client: Any) -> bool:
    """Whether this OpenAI client is a blocking one. Raises WrongUse when it is none."""
    openai = sys.modules.get("openai")
    blocking = openai is not None and isinstance(client, openai.OpenAI)
    if openai is None or not (blocking or isinstance(client, openai.AsyncOpenAI)):
        message = f"the class {client.__name__}" if isinstance(client, type) else f"a {type(client).__name__}"
        raise WrongUse(
            f"{message} is no OpenAI client", "give an object of OpenAI, AsyncOpenAI, AzureOpenAI or AsyncAzureOpenAI"
        )
    return blocking


def _merged(inner: Options | None, given: Options) -> Options:
    """What the client had, and what is given now. Two throttles, retries or recorders cannot both hold: WrongUse."""
    if inner is None:
        return given
    old, new = inner.policy, given.policy
    for name in ("throttle", "retry", "record"):
        first, second = getattr(old, name), getattr(new, name)
        if first is not None and second is not None and first is not second:
            raise WrongUse(f"this client has a {name} already, and gets another one", f"give {name} once")
    policy = Policy(
        observers=(*old.observers, *new.observers),
        prices=old.prices if new.prices is None else new.prices,
        throttle=new.throttle or old.throttle,
        retry=new.retry or old.retry,
        record=old.record if new.record is None else new.record,
        keep_content=old.keep_content or new.keep_content,
        labels={**old.labels, **new.labels},
    )
    return Options(policy, inner.ask_usage if given.ask_usage is None else given.ask_usage)


def install(result: Any, client: Any, options: Options) -> None:
    """Replace the resources of `result` by wrapped ones. `client`: where its copies come from."""
    blocking = _blocking_kind(result)
    policy, attributes = options.policy, vars(result)
    attributes[_OPTIONS] = options
    if policy.retry is not None:
        attributes["max_retries"] = 0
    url = getattr(client, "base_url", None)
    setting = Setting(
        policy,
        server=f"{url.host}:{url.port or (443 if url.scheme == 'https' else 80)}" if url is not None else "",
        key=str(getattr(client, "api_key", "") or ""),
        ask_usage=policy.prices is not None if options.ask_usage is None else options.ask_usage,
        timeout_s=seconds_of(getattr(client, "timeout", None), None),
    )
    for name in {path.partition(".")[0] for path, _ in _RESOURCES}:
        if (resource := getattr(client, name, None)) is not None:
            attributes[name] = type(resource)(result)  # a new object: that of `client` stays unwrapped
    for path, api in _RESOURCES:
        resource = result
        for name in path.split("."):
            resource = getattr(resource, name, None)
        if resource is not None:
            _wrap(resource, api, setting, blocking)
    for name in _VARIANTS:
        attributes[name] = type(getattr(client, name))(result)
    make_copy = type(result).copy

    def with_options(*args: Any, **changes: Any) -> Any:
        other = make_copy(result, *args, **changes)
        install(other, other, options)  # also if `auto` was there first: these options hold its own
        return other

    attributes["copy"] = attributes["with_options"] = with_options


def _wrap(resource: Any, api: Api, setting: Setting, blocking: bool) -> None:
    raw = resource.with_raw_response  # read before wrapping: its methods call the unwrapped ones
    for name in _METHODS:
        method, raw_method = getattr(resource, name, None), getattr(raw, name, None)
        if method is not None and raw_method is not None:
            setattr(resource, name, measured(method, raw_method, api, setting, blocking))
    for name in _VARIANTS:  # cached: made again with wrapped methods
        vars(resource).pop(name, None)
