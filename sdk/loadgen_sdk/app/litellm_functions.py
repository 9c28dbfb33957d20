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
from .measured_method import head_arrived, measure_method
from .measurement import Api
from .packages import InstrumentOptions
from .steps import Steps, as_function


class _Function(NamedTuple):
    """A function of LiteLLM.

    Attributes:
        name: Its name, which is also that of a method of a Router.
        api: The API that it calls.
        is_blocking: It is not a coroutine function.
        positional: The names of its first arguments, which callers may pass by position.
    """

    name: str
    api: Api
    is_blocking: bool
    positional: tuple[str, str]

    @property
    def router_positional(self) -> tuple[str, str]:
        """The first arguments of the method of a Router, which has the model first."""
        first, second = self.positional
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
    """Return the functions of LiteLLM by name, so that their calls are measured."""
    settings = _call_settings(options)
    return {
        function.name: _measure(
            getattr(litellm, function.name), function, function.positional, settings
        )
        for function in _FUNCTIONS
        if hasattr(litellm, function.name)
    }


def measure_router(router_class: type, options: InstrumentOptions) -> type:
    """Return a class that makes LiteLLM's Routers whose calls are measured.

    A call counts once, however many deployments the Router tries.
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
        """Return a Router whose calls are measured."""
        router = cls._loadgen_sdk_router(*args, **kwargs)
        for function in _FUNCTIONS:
            method = getattr(router, function.name, None)
            if method is not None:
                vars(router)[function.name] = _measure(
                    method, function, function.router_positional, cls._loadgen_sdk_settings
                )
        return router

    def __instancecheck__(cls, instance: object) -> bool:
        """Return True for every Router, measured or not."""
        return isinstance(instance, cls._loadgen_sdk_router)

    def __getattr__(cls, name: str) -> Any:
        """Return an attribute of the original class."""
        return getattr(cls._loadgen_sdk_router, name)


def _call_settings(options: InstrumentOptions) -> CallSettings:
    """Return what all calls have in common. LiteLLM chooses the server and the key of each."""
    return CallSettings(
        options.policy,
        server="",
        key="",
        ask_usage=options.requests_usage,
        package="litellm",
        covers_inner=True,
    )


def _measure(
    callee: Callable[..., Any],
    function: _Function,
    positional: tuple[str, str],
    settings: CallSettings,
) -> Callable[..., Any]:
    """Return a function of LiteLLM, or a method of a Router, so that its calls are measured.

    Args:
        callee: The function or the method.
        function: Its row of the table.
        positional: The names of its first arguments.
        settings: What all calls have in common.
    """

    def steps(**kwargs: Any) -> Steps[Any]:
        response = yield partial(callee, **kwargs)
        headers = getattr(response, "_response_headers", None)
        if isinstance(headers, Mapping):
            head_arrived(headers)
        return response

    send = measure_method(
        functools.wraps(callee)(as_function(steps, is_blocking=function.is_blocking)),
        function.api,
        settings,
        function.is_blocking,
    )

    @functools.wraps(callee)
    def call(*args: Any, **kwargs: Any) -> Any:
        if settings.policy.retry is not None:
            kwargs["max_retries"] = 0
            kwargs["num_retries"] = 0
        return send(**dict(zip(positional, args, strict=False)), **kwargs)

    return call
