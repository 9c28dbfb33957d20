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
ValueT = TypeVar("ValueT")

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
        WrongUse: The object is not such a client, or an option is not valid.
    """
    policy = make_policy(
        on_measurement,
        prices=prices,
        throttle=throttle,
        retry=retry,
        record=record,
        keep_content=keep_content,
        labels=labels,
        budget=budget,
    )
    options = _merge_options(_options_of(client), InstrumentOptions(policy, ask_usage))
    if isinstance(client, ModuleType) and client.__name__ == "litellm":
        if fallback is not None:
            hint = "use the fallbacks of LiteLLM's Router instead"
            raise WrongUse(
                "unsupported", "a fallback of loadgen_sdk cannot be combined with LiteLLM", hint
            )
        return cast(ClientT, _instrument_litellm(client, options))

    find_client_kind(client)  # raises WrongUse for any other object
    valid_fallback = validate_fallback(
        fallback, get_client_kind=find_client_kind, first_client=client
    )
    if valid_fallback is not None:
        _instrument_fallback(valid_fallback, options)
        options = options._replace(fallback=valid_fallback)

    instrumented_client = copy.copy(client)
    measure_resources(instrumented_client, client, options)
    return instrumented_client


def _options_of(client: object) -> InstrumentOptions | None:
    """Return the options of a client that is instrumented already, or None."""
    if not hasattr(client, "__dict__"):
        return None
    options: InstrumentOptions | None = vars(client).get(OPTIONS_ATTRIBUTE)
    return options


def _instrument_litellm(litellm: ModuleType, options: InstrumentOptions) -> ModuleType:
    """Return a module that replaces LiteLLM, and whose functions and Router are measured.

    `litellm` itself is not changed.
    """
    measured_module = _MeasuredLiteLlm(litellm, options)
    vars(measured_module)[OPTIONS_ATTRIBUTE] = options
    vars(measured_module).update(measure_functions(litellm, options))
    return measured_module


class _MeasuredLiteLlm(ModuleType):
    """A module that has the attributes of LiteLLM, except those that are set on it."""

    def __init__(self, litellm: ModuleType, options: InstrumentOptions) -> None:
        """Create a module without attributes of its own."""
        super().__init__("litellm", litellm.__doc__)
        self._loadgen_sdk_litellm = litellm
        self._loadgen_sdk_router_options = options

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of LiteLLM. Python calls this for a name that this module lacks.

        The measured functions are attributes of this module itself, so that Python does not call
        this for them. The measured Router becomes one when it is first used. It is not created
        earlier, because LiteLLM imports its Router only then.
        """
        litellm = self._loadgen_sdk_litellm
        if name != "Router":
            return getattr(litellm, name)
        measured_router_class = measure_router(litellm.Router, self._loadgen_sdk_router_options)
        # From now on, Python finds this attribute, so that every access returns the same class.
        self.Router = measured_router_class
        return measured_router_class


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
    """Combine the options of a client that is instrumented already with those of a second call.

    - Observers and labels are added to the existing ones.
    - Prices and `ask_usage` (request the token counts of streams) replace the existing ones.
    - `keep_content` is on if it is on in either.
    - The throttle, retry policy, recorder and budget may be set in only one of them.
    - The fallback is the existing one. The caller replaces it afterwards.

    Args:
        existing: The options of the client, or None if it is not instrumented.
        new: The options of this call of `instrument`, without its fallback.

    Raises:
        WrongUse: The throttle, retry policy, recorder or budget is set in both and differs.
    """
    if existing is None:
        return new

    old_policy = existing.policy
    new_policy = new.policy
    _refuse_conflicts(old_policy, new_policy)
    policy = Policy(
        observers=(*old_policy.observers, *new_policy.observers),
        labels={**old_policy.labels, **new_policy.labels},
        keep_content=old_policy.keep_content or new_policy.keep_content,
        prices=old_policy.prices if new_policy.prices is None else new_policy.prices,
        throttle=_first_set(new_policy.throttle, old_policy.throttle),
        retry=_first_set(new_policy.retry, old_policy.retry),
        record=_first_set(new_policy.record, old_policy.record),
        budget=_first_set(new_policy.budget, old_policy.budget),
    )
    ask_usage = _first_set(new.ask_usage, existing.ask_usage)

    return InstrumentOptions(policy, ask_usage, fallback=existing.fallback)


def _refuse_conflicts(old_policy: Policy, new_policy: Policy) -> None:
    """Raise WrongUse if both policies have different values of an option in _SINGLE_OPTIONS."""
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


def _first_set(new_value: ValueT | None, old_value: ValueT | None) -> ValueT | None:
    """Return the new value of an option, or the old one if the new one is not set (None)."""
    return old_value if new_value is None else new_value
