"""The packages whose clients can be measured, and how the methods of a client are wrapped.

The clients of openai and anthropic have resources, such as `client.chat.completions`. Neither
package is imported here: if a client exists, its package has been imported. The functions of
LiteLLM are wrapped in `litellm_functions`.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from ..errors import WrongUse
from .call import CallSettings
from .fallback import Fallback
from .measured_method import head_arrived, measure_method
from .measurement import Api
from .observed_call import failure_of, seconds_of
from .policy import Policy


class InstrumentOptions(NamedTuple):
    """The arguments of `instrument`, which an instrumented client keeps for its copies.

    Attributes:
        policy: Prices, limits, retries and observers.
        ask_usage: Streams request their token counts. None requests them if there are prices.
        fallback: The second endpoint.
    """

    policy: Policy
    ask_usage: bool | None
    fallback: Fallback | None = None

    @property
    def requests_usage(self) -> bool:
        """True if streams request their token counts."""
        if self.ask_usage is None:
            return self.policy.prices is not None
        return self.ask_usage


class Package(NamedTuple):
    """A package with clients.

    Attributes:
        name: The name of the package and of its module.
        blocking_class: The base class of its blocking clients.
        async_class: The base class of its asynchronous clients.
        resources: The API of each resource whose methods are measured, by dotted path.
    """

    name: str
    blocking_class: str
    async_class: str
    resources: dict[str, Api]


PACKAGES = (
    Package(
        "openai",
        "OpenAI",
        "AsyncOpenAI",
        {
            "chat.completions": "chat",
            "beta.chat.completions": "chat",
            "completions": "completions",
            "responses": "responses",
            "embeddings": "embeddings",
            "batches": "batches",
            "images": "images",
            "audio.speech": "speech",
            "audio.transcriptions": "transcriptions",
            "audio.translations": "transcriptions",
        },
    ),
    Package(
        "anthropic",
        "Anthropic",
        "AsyncAnthropic",
        {
            "messages": "messages",
            "beta.messages": "messages",
            "messages.batches": "batches",
            "beta.messages.batches": "batches",
        },
    ),
)

OPTIONS_ATTRIBUTE = "_loadgen_sdk_options"
"""The attribute of an instrumented client that has its InstrumentOptions."""

_METHODS: dict[Api, tuple[str, ...]] = {
    "batches": ("create", "retrieve"),
    "images": ("generate", "edit", "create_variation"),
}
_DEFAULT_METHODS = ("create", "parse")
"""The methods of other APIs. The openai package implements `stream` by `create`."""

_RESPONSE_VARIANTS = ("with_raw_response", "with_streaming_response")
"""Attributes of a client and of a resource that return the same methods with other results."""


class ClientKind(NamedTuple):
    """The package of a client, and whether its calls block."""

    package: Package
    is_blocking: bool


def find_client_kind(client: Any) -> ClientKind:
    """Return the package of a client, and whether its calls block.

    Raises:
        WrongUse: It is no client of a known package.
    """
    for package in PACKAGES:
        module = sys.modules.get(package.name)
        if module is None:
            continue
        if isinstance(client, getattr(module, package.blocking_class)):
            return ClientKind(package, is_blocking=True)
        if isinstance(client, getattr(module, package.async_class)):
            return ClientKind(package, is_blocking=False)
    if isinstance(client, type):
        description = f"the class {client.__name__}"
    else:
        description = f"a {type(client).__name__}"
    class_names = [
        name for package in PACKAGES for name in (package.blocking_class, package.async_class)
    ]
    raise WrongUse(
        "wrong_type",
        f"{description} is not a client of a known package",
        f"give an object of {', '.join(class_names)}",
    )


def measure_resources(result: Any, client: Any, options: InstrumentOptions) -> None:
    """Replace the resources of a client by copies whose methods are measured.

    Args:
        result: The client to change. Its copies (`copy`, `with_options`) are measured, too.
        client: The client whose resources are copied, and stay as they are. It may be `result`.
        options: What `instrument` was called with.

    Raises:
        WrongUse: It is no client of a known package.
    """
    package, is_blocking = find_client_kind(result)
    attributes = vars(result)
    attributes[OPTIONS_ATTRIBUTE] = options
    process_response = getattr(type(result), "_process_response", None)
    if process_response is not None:
        attributes["_process_response"] = _notice_heads(partial(process_response, result))
    if options.policy.retry is not None:
        result.max_retries = 0
    wrapper = _ResourceWrapper(
        _call_settings(client, package, options), is_blocking, options.fallback
    )
    _replace_resources(result, client, package)
    for path, api in package.resources.items():
        resource = _get_by_path(result, path)
        if resource is not None:
            wrapper.wrap(resource, path, api)
    for name in _RESPONSE_VARIANTS:
        attributes[name] = type(getattr(client, name))(result)
    make_copy = type(result).copy

    def with_options(*args: Any, **changes: Any) -> Any:
        """Return a copy of the client with other options, whose calls are measured, too."""
        copied_client = make_copy(result, *args, **changes)
        measure_resources(copied_client, copied_client, options)
        return copied_client

    attributes["copy"] = with_options
    attributes["with_options"] = with_options


def _call_settings(client: Any, package: Package, options: InstrumentOptions) -> CallSettings:
    """Return what all calls of a client have in common."""
    url = getattr(client, "base_url", None)
    server = ""
    if url is not None:
        default_port = 443 if url.scheme == "https" else 80
        server = f"{url.host}:{url.port or default_port}"
    return CallSettings(
        options.policy,
        server=server,
        key=str(getattr(client, "api_key", "") or ""),
        ask_usage=options.requests_usage,
        package=package.name,
        timeout_s=seconds_of(getattr(client, "timeout", None), None),
    )


def _replace_resources(result: Any, client: Any, package: Package) -> None:
    """Give a client new resource objects, so that those of the original are not changed."""
    for name in {path.partition(".")[0] for path in package.resources}:
        resource = getattr(client, name, None)
        if resource is not None:
            vars(result)[name] = type(resource)(result)


def _get_by_path(client: Any, path: str) -> Any:
    """Return the resource at a dotted path, or None if this version of the package has none."""
    resource = client
    for name in path.split("."):
        resource = getattr(resource, name, None)
    return resource


class _ResourceWrapper:
    """Replaces the methods of resources by measured ones."""

    def __init__(
        self, settings: CallSettings, is_blocking: bool, fallback: Fallback | None
    ) -> None:
        self._settings = settings
        self._is_blocking = is_blocking
        self._fallback = fallback

    def wrap(self, resource: Any, path: str, api: Api) -> None:
        """Replace the methods of the resource at a path."""
        for name in _METHODS.get(api, _DEFAULT_METHODS):
            method = getattr(resource, name, None)
            if method is not None:
                measured = self._measure(_look_up_late(resource, name, method), api)
                # A batch exists at the endpoint that made it, so that another one cannot help.
                if self._fallback is not None and api != "batches":
                    measured = self._fallback.cover(
                        measured, path, name, self._is_blocking, failure_of
                    )
                setattr(resource, name, measured)
        if api == "messages" and hasattr(resource, "stream"):
            self._wrap_message_stream(resource)
        for name in _RESPONSE_VARIANTS:
            # They are cached properties, which are computed again from the measured methods.
            vars(resource).pop(name, None)

    def _measure(
        self,
        method: Callable[..., Any],
        api: Api,
        arguments_of: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    ) -> Callable[..., Any]:
        return measure_method(method, api, self._settings, self._is_blocking, arguments_of)

    def _wrap_message_stream(self, messages: Any) -> None:
        """Measure `stream` of anthropic, which does not call `create` but posts by itself."""
        posting_messages = copy.copy(messages)
        posting_messages._post = self._measure(
            posting_messages._post, "messages", _arguments_of_post
        )
        messages.stream = posting_messages.stream


def _look_up_late(resource: Any, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that is looked up in its class at each call.

    Another instrumentation may replace it there later. A method that the class does not have is
    returned as it is.
    """
    resource_type = type(resource)
    if name in vars(resource) or not callable(getattr(resource_type, name, None)):
        return method

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(resource_type, name)(resource, *args, **kwargs)

    return call


def _notice_heads(process_response: Callable[..., Any]) -> Callable[..., Any]:
    """Return a client's method for responses that also passes the head of each to its call.

    This spares a detour by `with_raw_response`, and the request stays as the application made it.
    Where a version of the package has no such method, `CallSettings.warn_blind` tells the user what
    is missing.
    """

    def process(*args: Any, **kwargs: Any) -> Any:
        response = kwargs.get("response")
        if response is not None:
            head_arrived(response.headers, kwargs.get("retries_taken", 0), response)
        return process_response(*args, **kwargs)  # a coroutine, if the client is asynchronous

    return process


def _arguments_of_post(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of the call whose body a resource posts."""
    options = kwargs["options"]
    arguments = dict(kwargs["body"])
    if "timeout" in options:
        arguments["timeout"] = options["timeout"]
    return arguments
