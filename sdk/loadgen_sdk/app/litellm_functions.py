"""The functions and the Router of LiteLLM, measured.

LiteLLM has functions where other packages have clients. It calls openai itself, and these calls
inside a call are not measured again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

from .call import CallSettings
from .measured_method import measure_method, record_response_headers
from .measurement import Api
from .packages import InstrumentOptions
from .steps import Steps, as_function


class _Function(NamedTuple):
    """A function of LiteLLM.

    Attributes:
        name: Its name, which is also that of a method of a Router.
        api: The API that it calls.
        is_blocking: It is not a coroutine function.
        argument_names: The names of its first two arguments, which callers may pass by position.
    """

    name: str
    api: Api
    is_blocking: bool
    argument_names: tuple[str, str]

    @property
    def router_argument_names(self) -> tuple[str, str]:
        """The same of the method of a Router, which always has the model first."""
        first, second = self.argument_names
        return ("model", second if first == "model" else first)


_FUNCTIONS = (
    _Function("completion", "chat", True, ("model", "messages")),
    _Function("acompletion", "chat", False, ("model", "messages")),
    _Function("text_completion", "completions", True, ("prompt", "model")),
    _Function("atext_completion", "completions", False, ("prompt", "model")),
    _Function("responses", "responses", True, ("input", "model")),
    _Function("aresponses", "responses", False, ("input", "model")),
    _Function("embedding", "embeddings", True, ("model", "input")),
    _Function("aembedding", "embeddings", False, ("model", "input")),
)


def measure_functions(
    litellm: ModuleType, options: InstrumentOptions
) -> dict[str, Callable[..., Any]]:
    """Return measured versions of the functions of LiteLLM, by their names.

    Functions that the installed version of LiteLLM does not have are left out.
    """
    settings = _call_settings(options)
    measured_functions = {}
    for function in _FUNCTIONS:
        original = getattr(litellm, function.name, None)
        if original is not None:
            measured_functions[function.name] = _measure(
                original, function, function.argument_names, settings
            )
    return measured_functions


def measure_router(router_class: type, options: InstrumentOptions) -> type:
    """Return a class that creates Routers of LiteLLM whose calls are measured.

    A Router distributes calls to several deployments of a model. A call counts once, however many
    deployments the Router tries.
    """
    attributes = {
        "__doc__": router_class.__doc__,
        "__qualname__": router_class.__qualname__,
        "_loadgen_sdk_router": router_class,
        "_loadgen_sdk_settings": _call_settings(options),
    }
    return _MeasuredRouterType(router_class.__name__, (), attributes)


class _MeasuredRouterType(type):
    """The type of a class that stands for LiteLLM's Router and makes measured Routers.

    The class is no subclass, because since LiteLLM 1.110 a Router may have none. Its objects are
    Routers of the original class.
    """

    _loadgen_sdk_router: type
    _loadgen_sdk_settings: CallSettings

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Create a Router of the original class, and replace its methods by measured ones.

        This runs when the application calls the class: `Router(...)`.
        """
        router = cls._loadgen_sdk_router(*args, **kwargs)
        for function in _FUNCTIONS:
            method = getattr(router, function.name, None)
            if method is not None:
                vars(router)[function.name] = _measure(
                    method, function, function.router_argument_names, cls._loadgen_sdk_settings
                )
        return router

    def __instancecheck__(cls, instance: object) -> bool:
        """Return True for every Router, measured or not."""
        return isinstance(instance, cls._loadgen_sdk_router)

    def __getattr__(cls, name: str) -> Any:
        """Return an attribute of the original class."""
        return getattr(cls._loadgen_sdk_router, name)


def _call_settings(options: InstrumentOptions) -> CallSettings:
    """Return what all calls through LiteLLM have in common.

    Server and key are empty, because LiteLLM chooses them for each call. It calls openai itself;
    that inner call is not measured again (`hides_inner_calls`).
    """
    return CallSettings(
        options.policy,
        server="",
        key="",
        requests_usage=options.requests_usage,
        package="litellm",
        hides_inner_calls=True,
    )


def _measure(
    original: Callable[..., Any],
    function: _Function,
    argument_names: tuple[str, str],
    settings: CallSettings,
) -> Callable[..., Any]:
    """Return a function of LiteLLM, or a method of a Router, whose calls are measured.

    Args:
        original: The function or the method.
        function: Its row of the table.
        argument_names: The names of its first arguments, which callers may pass by position.
        settings: What all calls have in common.
    """

    def send_steps(**kwargs: Any) -> Steps[Any]:
        """Call the original, and pass on the headers that LiteLLM attaches to its response."""
        response = yield partial(original, **kwargs)
        headers = getattr(response, "_response_headers", None)
        if isinstance(headers, Mapping):
            record_response_headers(headers)
        return response

    send = functools.wraps(original)(as_function(send_steps, is_blocking=function.is_blocking))
    measured = measure_method(send, function.api, settings, is_blocking=function.is_blocking)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        """Pass all arguments by name, so that the measurement finds the model and the prompt."""
        if settings.policy.retry is not None:
            # Only the Retry of this package retries, or attempts would multiply.
            kwargs["max_retries"] = 0
            kwargs["num_retries"] = 0
        named_args = dict(zip(argument_names, args, strict=False))
        return measured(**named_args, **kwargs)

    return call
