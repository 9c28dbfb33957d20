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
from .measured_method import FindRequestFields, measure_method, record_response_headers
from .measurement import Api
from .observed_call import failure_from_error, parse_timeout_s
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


def find_client_kind(client: object) -> ClientKind:
    """Return the package of a client, and whether its calls block.

    Only packages that the application has already imported are looked up, because a client of any
    other package cannot exist.

    Raises:
        WrongUse: The object is not a client of a known package.
    """
    for package in PACKAGES:
        module = sys.modules.get(package.name)
        if module is None:
            continue
        if isinstance(client, getattr(module, package.blocking_class)):
            return ClientKind(package, is_blocking=True)
        if isinstance(client, getattr(module, package.async_class)):
            return ClientKind(package, is_blocking=False)
    raise _unknown_client_error(client)


def _unknown_client_error(client: object) -> WrongUse:
    """Return the error for an object that is not a client of a known package."""
    if isinstance(client, type):
        description = f"the class {client.__name__}"
    else:
        description = f"a {type(client).__name__}"

    class_names = [
        name for package in PACKAGES for name in (package.blocking_class, package.async_class)
    ]
    return WrongUse(
        "wrong_type",
        f"{description} is not a client that loadgen_sdk knows",
        f"give an object of one of {', '.join(class_names)}",
    )


def measure_resources(client: Any, original_client: Any, options: InstrumentOptions) -> None:
    """Measure the methods of a client's resources, such as `client.chat.completions.create`.

    Only attributes of the client object are replaced. Its class is not changed, and neither are the
    resources of the client that it was copied from.

    Args:
        client: The client to change. Its copies (`copy`, `with_options`) are measured, too.
        original_client: The client that `client` was copied from, and whose resources it still
            has. It is `client` itself if that has resources of its own.
        options: What `instrument` was called with.

    Raises:
        WrongUse: The object is not a client of a known package.
    """
    package, is_blocking = find_client_kind(client)
    vars(client)[OPTIONS_ATTRIBUTE] = options
    if options.policy.retry is not None:
        # The client must not retry as well, because the attempts would multiply.
        client.max_retries = 0

    _record_headers(client)
    _replace_resources(client, original_client, package)

    # The resources now belong to this client alone, so that their methods can be replaced.
    wrapper = _ResourceWrapper(
        _call_settings(original_client, package, options),
        is_blocking=is_blocking,
        fallback=options.fallback,
    )
    for path, api in package.resources.items():
        resource = _get_by_path(client, path)
        if resource is not None:
            wrapper.wrap(resource, path, api)

    # `with_raw_response` and `with_streaming_response` are created from the measured resources.
    _replace_response_variants(client, original_client)
    _instrument_copies(client, options)


def _record_headers(client: object) -> None:
    """Record the headers of each response, which the client passes to `_process_response`."""
    process_response = getattr(type(client), "_process_response", None)
    if process_response is not None:
        vars(client)["_process_response"] = _record_headers_of_responses(
            partial(process_response, client)
        )


def _replace_response_variants(client: object, original_client: object) -> None:
    """Give a client new `with_raw_response` and `with_streaming_response`.

    The original ones have references to the resources of the original client. Their classes are
    called with the client, and find its measured resources.
    """
    for name in _RESPONSE_VARIANTS:
        variant_class = type(getattr(original_client, name))
        vars(client)[name] = variant_class(client)


def _instrument_copies(client: Any, options: InstrumentOptions) -> None:
    """Replace `copy` and `with_options` of a client, so that the calls of its copies are measured.

    Both names stand for the same method in openai and anthropic. It creates a new client with other
    options, such as another timeout.
    """
    copy_method = type(client).copy

    def copy_and_measure(*args: Any, **changed_options: Any) -> Any:
        new_client = copy_method(client, *args, **changed_options)
        # `copy` creates new resources, too. None of them belongs to another client, so that there
        # is no original client to protect.
        measure_resources(new_client, original_client=new_client, options=options)
        return new_client

    # Attributes of the object hide the methods of its class, which is not changed.
    client_attributes = vars(client)
    client_attributes["copy"] = copy_and_measure
    client_attributes["with_options"] = copy_and_measure


def _call_settings(client: Any, package: Package, options: InstrumentOptions) -> CallSettings:
    """Return what all calls of a client have in common, from its URL, key and timeout."""
    url = getattr(client, "base_url", None)
    server = ""
    if url is not None:
        default_port = 443 if url.scheme == "https" else 80
        server = f"{url.host}:{url.port or default_port}"

    return CallSettings(
        options.policy,
        server=server,
        key=str(getattr(client, "api_key", "") or ""),
        requests_usage=options.requests_usage,
        package=package.name,
        timeout_s=parse_timeout_s(getattr(client, "timeout", None), None),
    )


def _replace_resources(client: object, original_client: object, package: Package) -> None:
    """Give a client new resource objects, so that those of the original are not changed."""
    for name in {path.partition(".")[0] for path in package.resources}:
        resource = getattr(original_client, name, None)
        if resource is not None:
            vars(client)[name] = type(resource)(client)


def _get_by_path(client: object, path: str) -> Any:
    """Return the resource at a dotted path, or None if this version of the package has none."""
    resource = client
    for name in path.split("."):
        resource = getattr(resource, name, None)
    return resource


class _ResourceWrapper:
    """Replaces the methods of the resources of one client by measured ones."""

    def __init__(
        self, settings: CallSettings, *, is_blocking: bool, fallback: Fallback | None
    ) -> None:
        """Keep what the methods have in common: settings, kind of client, and second endpoint."""
        self._settings = settings
        self._is_blocking = is_blocking
        self._fallback = fallback

    def wrap(self, resource: Any, path: str, api: Api) -> None:
        """Replace the methods of a resource, such as `create`, by measured ones.

        Args:
            resource: The resource of the client that is instrumented.
            path: Its path, such as "chat.completions", for the fallback.
            api: The API that it calls.
        """
        for name in _METHODS.get(api, _DEFAULT_METHODS):
            method = getattr(resource, name, None)
            if method is not None:
                setattr(resource, name, self._wrap_method(resource, name, method, path, api))

        if api == "messages" and hasattr(resource, "stream"):
            self._wrap_message_stream(resource)

        for name in _RESPONSE_VARIANTS:
            # They are cached properties, which are computed again from the measured methods.
            vars(resource).pop(name, None)

    def _wrap_method(
        self, resource: object, name: str, method: Callable[..., Any], path: str, api: Api
    ) -> Callable[..., Any]:
        """Return the function that replaces a method of a resource.

        Its calls are measured. If there is a fallback and the endpoint of the client fails, they
        are sent to the endpoint of the fallback. Batches have no fallback, because a batch exists
        only at the endpoint that created it.

        Args:
            resource: The resource, such as `client.chat.completions`.
            name: The name of the method, such as "create".
            method: The method.
            path: The path of the resource, such as "chat.completions".
            api: The API that the method calls.
        """
        original_method = _look_up_at_call_time(resource, name, method)
        measured_method = self._measure(original_method, api)
        if self._fallback is None or api == "batches":
            return measured_method

        return self._fallback.wrap_method(
            measured_method,
            path,
            name,
            is_blocking=self._is_blocking,
            failure_from_error=failure_from_error,
        )

    def _measure(
        self,
        method: Callable[..., Any],
        api: Api,
        find_request_fields: FindRequestFields | None = None,
    ) -> Callable[..., Any]:
        """Return a measured method."""
        return measure_method(
            method,
            api,
            self._settings,
            is_blocking=self._is_blocking,
            find_request_fields=find_request_fields,
        )

    def _wrap_message_stream(self, messages: Any) -> None:
        """Replace `messages.stream` of anthropic by a method whose calls are measured.

        `stream` sends its request by the private method `_post`, as `create` does. If `_post` of
        the resource itself were measured, a call of `create`, which is already measured, would
        count twice. `_post` is therefore replaced in a copy of the resource, and the resource gets
        the method `stream` of that copy.
        """
        copied_messages = copy.copy(messages)
        copied_messages._post = self._measure(
            copied_messages._post, "messages", find_request_fields=_request_fields_of_post
        )
        messages.stream = copied_messages.stream


def _look_up_at_call_time(
    resource: object, name: str, method: Callable[..., Any]
) -> Callable[..., Any]:
    """Return a function that looks up a method in the class of the resource at each call.

    Another instrumentation, such as that of OpenTelemetry, may replace the method in the class
    after this client was instrumented. The function then calls that replacement.

    A method that was set on the object itself, or that the class does not have, is returned as it
    is.
    """
    resource_class = type(resource)
    is_set_on_object = name in vars(resource)
    is_method_of_class = callable(getattr(resource_class, name, None))
    if is_set_on_object or not is_method_of_class:
        return method

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(resource_class, name)(resource, *args, **kwargs)

    return call


def _record_headers_of_responses(process_response: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that records the headers of a response and then processes it.

    The application gets a parsed object, which has no headers.

    Args:
        process_response: The method of a client that parses each response of the HTTP library. It
            is a coroutine function if the client is asynchronous.
    """

    def record_and_process(*args: Any, **kwargs: Any) -> Any:
        response = kwargs.get("response")
        if response is not None:
            record_response_headers(response.headers, kwargs.get("retries_taken", 0), response)
        return process_response(*args, **kwargs)

    return record_and_process


def _request_fields_of_post(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a request from the arguments of `_post` of a resource.

    They are the fields of the body, and the timeout of the call if it has one.
    """
    options = kwargs["options"]
    request_fields = dict(kwargs["body"])
    if "timeout" in options:
        request_fields["timeout"] = options["timeout"]
    return request_fields
