"""The packages whose clients can be measured: one table, and how their methods are wrapped.

openai and anthropic have clients with resources (`client.chat.completions`); LiteLLM has
functions. None is imported here: a client that exists has imported its package.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Mapping
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

from ..errors import WrongUse
from .call import CallSettings
from .fallback import Fallback
from .measured_method import head_arrived, measure_method
from .measurement import Api
from .observed_call import failure_of, seconds_of
from .policy import Policy
from .steps import Steps, runner


class Options(NamedTuple):
    """The arguments of `instrument`, which an instrumented client keeps for its copies."""

    policy: Policy
    ask_usage: bool | None
    fallback: Fallback | None = None


class Package(NamedTuple):
    """A package with clients.

    Attributes:
        name: the name of the package and of its module.
        blocking: the base class of its synchronous clients.
        waiting: the base class of its asynchronous clients.
        resources: dotted paths of the resources whose methods are measured, with the API of each.
    """

    name: str
    blocking: str
    waiting: str
    resources: tuple[tuple[str, Api], ...]


PACKAGES = (
    Package(
        "openai",
        "OpenAI",
        "AsyncOpenAI",
        (
            ("chat.completions", "chat"),
            ("beta.chat.completions", "chat"),
            ("completions", "completions"),
            ("responses", "responses"),
            ("embeddings", "embeddings"),
            ("batches", "batches"),
            ("images", "images"),
            ("audio.speech", "speech"),
            ("audio.transcriptions", "transcriptions"),
            ("audio.translations", "transcriptions"),
        ),
    ),
    Package(
        "anthropic",
        "Anthropic",
        "AsyncAnthropic",
        (
            ("messages", "messages"),
            ("beta.messages", "messages"),
            ("messages.batches", "batches"),
            ("beta.messages.batches", "batches"),
        ),
    ),
)
LITELLM: tuple[tuple[str, Api, bool, tuple[str, str]], ...] = (
    ("completion", "chat", True, ("model", "messages")),
    ("acompletion", "chat", False, ("model", "messages")),
    ("text_completion", "completions", True, ("prompt", "model")),
    ("atext_completion", "completions", False, ("prompt", "model")),
    ("responses", "responses", True, ("input", "model")),
    ("aresponses", "responses", False, ("input", "model")),
    ("embedding", "embeddings", True, ("model", "input")),
    ("aembedding", "embeddings", False, ("model", "input")),
)
"""The functions of LiteLLM: name, API, whether it blocks, and the arguments that are given by
place.
"""

OPTIONS = "_loadgen_sdk_options"  # the attribute by which an instrumented client is known
_CREATE = ("create", "parse")  # `stream` of openai goes through `create`
_METHODS = {"batches": ("create", "retrieve"), "images": ("generate", "edit", "create_variation")}
_VARIANTS = ("with_raw_response", "with_streaming_response")


def package_of(client: Any) -> tuple[Package, bool]:
    """The package of this client, and whether it is a blocking one.

    Raises WrongUse for what is no such client.
    """
    for package in PACKAGES:
        module = sys.modules.get(package.name)
        for name in (package.blocking, package.waiting):
            if module is not None and isinstance(client, getattr(module, name)):
                return package, name == package.blocking
    what = (
        f"the class {client.__name__}" if isinstance(client, type) else f"a {type(client).__name__}"
    )
    classes = ", ".join(
        name for package in PACKAGES for name in (package.blocking, package.waiting)
    )
    raise WrongUse(
        "wrong_type",
        f"{what} is no OpenAI client, nor one of another known package",
        f"give an object of {classes}",
    )


def install(result: Any, client: Any, options: Options) -> None:
    """Replace the resources of `result` by wrapped ones. `client`: where its copies come from."""
    package, blocking = package_of(result)
    policy, attributes = options.policy, vars(result)
    attributes[OPTIONS] = options
    if (process := getattr(type(result), "_process_response", None)) is not None:
        attributes["_process_response"] = _tells_heads(partial(process, result))
    if policy.retry is not None:
        result.max_retries = 0
    url = getattr(client, "base_url", None)
    setting = CallSettings(
        policy,
        server=f"{url.host}:{url.port or (443 if url.scheme == 'https' else 80)}"
        if url is not None
        else "",
        key=str(getattr(client, "api_key", "") or ""),
        ask_usage=asks_usage(options),
        package=package.name,
        timeout_s=seconds_of(getattr(client, "timeout", None), None),
    )
    for name in {path.partition(".")[0] for path, _ in package.resources}:
        if (resource := getattr(client, name, None)) is not None:
            attributes[name] = type(resource)(
                result
            )  # a new object: that of `client` stays unwrapped
    for path, api in package.resources:
        resource = functools.reduce(
            lambda owner, name: getattr(owner, name, None), path.split("."), result
        )
        if resource is not None:
            _wrap(resource, api, setting, blocking, path, options.fallback)
    for name in _VARIANTS:
        attributes[name] = type(getattr(client, name))(result)
    make_copy = type(result).copy

    def with_options(*args: Any, **changes: Any) -> Any:
        other = make_copy(result, *args, **changes)
        install(other, other, options)
        return other

    attributes["copy"] = attributes["with_options"] = with_options


def asks_usage(options: Options) -> bool:
    return options.policy.prices is not None if options.ask_usage is None else options.ask_usage


def _wrap(
    resource: Any,
    api: Api,
    setting: CallSettings,
    blocking: bool,
    path: str,
    fallback: Fallback | None,
) -> None:
    for name in _METHODS.get(api, _CREATE):
        if (method := getattr(resource, name, None)) is not None:
            send = measure_method(_bound_late(resource, name, method), api, setting, blocking)
            if fallback is not None and api != "batches":
                send = fallback.cover(send, path, name, blocking, failure_of)
            setattr(resource, name, send)
    if api == "messages" and hasattr(resource, "stream"):
        twin = copy.copy(resource)  # `stream` of anthropic does not go through `create`
        twin._post = measure_method(twin._post, api, setting, blocking, _sent_by_post)
        resource.stream = twin.stream
    for name in _VARIANTS:  # cached: made again with wrapped methods
        vars(resource).pop(name, None)


def _bound_late(resource: Any, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """`method` as its class has it at each call: another instrumentation may wrap that later."""
    kind = type(resource)

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(kind, name)(resource, *args, **kwargs)

    return call if callable(getattr(kind, name, None)) and name not in vars(resource) else method


def _tells_heads(process: Callable[..., Any]) -> Callable[..., Any]:
    """`process`: the client's method through which every response goes.

    It tells the head of the response, too.

    This spares the detour by `with_raw_response`, and the request stays as the application made
    it. Where a version of the package has no such method, `Setting.warn_blind` says what is
    missing.
    """

    def process_response(*args: Any, **kwargs: Any) -> Any:
        if (response := kwargs.get("response")) is not None:
            head_arrived(response.headers, kwargs.get("retries_taken", 0), response)
        return process(*args, **kwargs)  # a coroutine of an async client

    return process_response


def _sent_by_post(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call that a resource posts."""
    options = kwargs["options"]
    return {**kwargs["body"], **({"timeout": options["timeout"]} if "timeout" in options else {})}


# -- LiteLLM
# -----------------------------------------------------------------------------------------------------------


def measured_litellm(litellm: ModuleType, options: Options) -> dict[str, Callable[..., Any]]:
    """LiteLLM's functions by name, measured."""
    setting = _litellm_setting(options)
    return {
        name: _measured_function(getattr(litellm, name), api, setting, blocking, places)
        for name, api, blocking, places in LITELLM
        if hasattr(litellm, name)
    }


def measured_router(router: type, options: Options) -> type:
    """What makes LiteLLM's Routers, with calls that are measured: each one call, however many
    deployments it tries.

    No subclass: since LiteLLM 1.110 a Router may have none. What it makes are Routers as that
    class makes them.
    """
    setting = _litellm_setting(options)

    class Kind(type):
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            made = router(*args, **kwargs)
            for name, api, blocking, places in LITELLM:
                if (method := getattr(made, name, None)) is not None:
                    model_first = ("model", next(place for place in places if place != "model"))
                    vars(made)[name] = _measured_function(
                        method, api, setting, blocking, model_first
                    )
            return made

        def __instancecheck__(cls, made: object) -> bool:
            return isinstance(made, router)

        def __getattr__(cls, name: str) -> Any:
            return getattr(router, name)

    return Kind(
        router.__name__, (), {"__doc__": router.__doc__, "__qualname__": router.__qualname__}
    )


def _litellm_setting(options: Options) -> CallSettings:
    ask_usage = asks_usage(options)
    return CallSettings(
        options.policy,
        "",
        "",
        ask_usage,
        package="litellm",
        covers_inner=True,
    )


def _measured_function(
    function: Callable[..., Any],
    api: Api,
    setting: CallSettings,
    blocking: bool,
    places: tuple[str, str],
) -> Callable[..., Any]:
    def steps(**kwargs: Any) -> Steps[Any]:
        answer = yield partial(function, **kwargs)
        headers = getattr(answer, "_response_headers", None)
        if isinstance(headers, Mapping):
            head_arrived(headers)
        return answer

    send = measure_method(
        functools.wraps(function)(runner(steps, blocking)), api, setting, blocking
    )

    @functools.wraps(function)
    def by_name(*args: Any, **kwargs: Any) -> Any:
        if setting.policy.retry is not None:
            kwargs["max_retries"] = kwargs["num_retries"] = 0
        return send(**dict(zip(places, args, strict=False)), **kwargs)

    return by_name
