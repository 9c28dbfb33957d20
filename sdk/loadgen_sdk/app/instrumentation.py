"""Measure the client of a package that an application already has: `instrument(AsyncOpenAI(...))`.

Methods and streams are wrapped. Transports are not, because they differ between major versions of
the package. The package is not imported here. The application calls the same methods and gets the
same results and exceptions.
"""

from __future__ import annotations

import copy
from types import ModuleType
from typing import Any, TypeVar, cast

import msgspec

from ..errors import WrongUse
from ..prices import Prices
from .budget import BudgetOption
from .fallback import Fallback, validate_fallback
from .labels import Labels
from .litellm_functions import measure_functions, measure_router
from .packages import (
    OPTIONS_ATTRIBUTE,
    InstrumentOptions,
    find_client_kind,
    measure_resources,
)
from .policy import Observers, Policy, make_policy
from .retry import Retry
from .throttle import Throttle
from .trace_recorder import ShapeRecorder

ClientT = TypeVar("ClientT")

_SINGLE_OPTIONS = ("throttle", "retry", "record", "budget")
"""Options of which a client can have only one."""


def instrument(  # noqa: PLR0913 - a public signature with keywords
    client: ClientT,
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
) -> ClientT:
    """Return a copy of a client whose calls are measured. Both share their connections.

    Measured are `create`, `parse` and `stream` of chat.completions, completions, responses and
    embeddings, streamed or not, also through `with_options`, `with_raw_response` and
    `with_streaming_response`. A client that is instrumented already keeps its observers and
    settings, and gets these in addition.

    Each call makes one Measurement. It is passed to `on_measurement`, set as `.measurement` of the
    response (of a stream when it has ended), and returned by `latest_measurement()`. Failed,
    cancelled and abandoned calls make one too. Their exceptions reach the caller unchanged.

    Args:
        client: OpenAI, AsyncOpenAI, AzureOpenAI, AsyncAzureOpenAI, Anthropic, AsyncAnthropic, a
            subclass of them, or the module litellm.
        on_measurement: One function or several that get each measurement. They may be coroutines.
        prices: The prices of tokens, for `cost`.
        throttle: Limits of calls. Each attempt waits for it, at most for the timeout of the call.
        retry: Replaces the client's own `max_retries`, which is set to 0.
        record: A recorder of `record_shape`.
        ask_usage: Request a token count for streams (`stream_options`). The additional event with
            the count is not passed to the application. None requests it if there are prices.
        keep_content: Measurements have the texts of calls.
        labels: The labels of every call. See also `labelled`.
        budget: "50 USD/day", or a Budget. A call above it raises BudgetExceeded before it is sent.
        fallback: A second endpoint.

    Raises:
        WrongUse: It is no such client, or an option is not valid.
    """
    policy = make_policy(
        on_measurement, prices, throttle, retry, record, keep_content, labels, budget
    )
    options = _merge_options(_options_of(client), InstrumentOptions(policy, ask_usage))
    if isinstance(client, ModuleType) and client.__name__ == "litellm":
        if fallback is not None:
            hint = "use the fallbacks of LiteLLM's Router instead"
            raise WrongUse(
                "unsupported", "a fallback of loadgen_sdk cannot be combined with LiteLLM", hint
            )
        return cast(ClientT, _instrument_litellm(client, options))
    find_client_kind(client)
    checked = validate_fallback(fallback, find_client_kind, client)
    if checked is not None:
        _instrument_fallback(checked, options)
        options = options._replace(fallback=checked)
    result = copy.copy(client)
    measure_resources(result, client, options)
    return result


def _options_of(client: object) -> InstrumentOptions | None:
    """Return the options of a client that is instrumented already, or None."""
    if not hasattr(client, "__dict__"):
        return None
    options: InstrumentOptions | None = vars(client).get(OPTIONS_ATTRIBUTE)
    return options


def _instrument_litellm(litellm: ModuleType, options: InstrumentOptions) -> ModuleType:
    """Return a module that stands for LiteLLM, and whose functions and Router are measured.

    Every other attribute is looked up in the original module by the module's `__getattr__` (PEP
    562), so that `litellm` itself is not changed.
    """
    result: Any = ModuleType("litellm", litellm.__doc__)

    def get_attribute(name: str) -> Any:
        """Return an attribute of LiteLLM. The Router is slow to import and made when it is used."""
        if name != "Router":
            return getattr(litellm, name)
        result.Router = measure_router(litellm.Router, options)
        return result.Router

    vars(result).update(measure_functions(litellm, options), __getattr__=get_attribute)
    vars(result)[OPTIONS_ATTRIBUTE] = options
    return cast(ModuleType, result)


def _instrument_fallback(fallback: Fallback, options: InstrumentOptions) -> None:
    """Instrument the client of a fallback with the options of the first client.

    The throttle is left out, because its limits are those of the first endpoint. A client that is
    instrumented already keeps its own options. `fallback.client` is replaced by a copy.
    """
    if OPTIONS_ATTRIBUTE in vars(fallback.client):
        return
    policy = msgspec.structs.replace(options.policy, throttle=None)
    original = fallback.client
    fallback.client = copy.copy(original)
    measure_resources(fallback.client, original, InstrumentOptions(policy, options.ask_usage))


def _merge_options(existing: InstrumentOptions | None, new: InstrumentOptions) -> InstrumentOptions:
    """Combine the options of a client that is instrumented already with new ones.

    Observers and labels are added to those that exist. A new value of any other option replaces the
    old one if there can be no conflict.

    Raises:
        WrongUse: Both have another throttle, retry policy, recorder or budget.
    """
    if existing is None:
        return new
    old_policy = existing.policy
    new_policy = new.policy
    for name in _SINGLE_OPTIONS:
        old_value = getattr(old_policy, name)
        new_value = getattr(new_policy, name)
        has_both = old_value is not None and new_value is not None
        if has_both and old_value is not new_value:
            raise WrongUse(
                "conflict",
                f"this client already has another {name}",
                f"give {name} once",
            )
    policy = Policy(
        observers=(*old_policy.observers, *new_policy.observers),
        prices=old_policy.prices if new_policy.prices is None else new_policy.prices,
        throttle=new_policy.throttle or old_policy.throttle,
        retry=new_policy.retry or old_policy.retry,
        record=old_policy.record if new_policy.record is None else new_policy.record,
        keep_content=old_policy.keep_content or new_policy.keep_content,
        labels={**old_policy.labels, **new_policy.labels},
        budget=new_policy.budget or old_policy.budget,
    )
    ask_usage = existing.ask_usage if new.ask_usage is None else new.ask_usage
    return InstrumentOptions(policy, ask_usage, fallback=existing.fallback)
