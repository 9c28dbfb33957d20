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


class _FunctionSpec(NamedTuple):
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
        """The argument names of the Router's method of this name, which has the model first."""
        first, second = self.argument_names
        return ("model", second if first == "model" else first)


_FUNCTIONS = (
    _FunctionSpec("completion", "chat", True, ("model", "messages")),
    _FunctionSpec("acompletion", "chat", False, ("model", "messages")),
    _FunctionSpec("text_completion", "completions", True, ("prompt", "model")),
    _FunctionSpec("atext_completion", "completions", False, ("prompt", "model")),
    _FunctionSpec("responses", "responses", True, ("input", "model")),
    _FunctionSpec("aresponses", "responses", False, ("input", "model")),
    _FunctionSpec("embedding", "embeddings", True, ("model", "input")),
    _FunctionSpec("aembedding", "embeddings", False, ("model", "input")),
)


def measure_functions(
    litellm: ModuleType, options: InstrumentOptions
) -> dict[str, Callable[..., Any]]:
    """Return measured versions of the functions of LiteLLM, by their names.

    Functions that the installed version of LiteLLM does not have are left out.
    """
    settings = _call_settings(options)
    measured_functions = {}
    for spec in _FUNCTIONS:
        function = getattr(litellm, spec.name, None)
        if function is not None:
            measured_functions[spec.name] = _measure(function, spec, spec.argument_names, settings)
    return measured_functions


def measure_router(router_class: type, options: InstrumentOptions) -> type:
    """Return a class that replaces LiteLLM's Router and creates Routers whose calls are measured.

    A Router distributes calls to several deployments of a model. A call counts once, however many
    deployments the Router tries.

    LiteLLM forbids subclasses of its Router. The replacement is therefore a class without a base
    class and with a metaclass. When the application calls it, as in `Router(...)`, the metaclass
    creates a Router of the original class and replaces its methods by measured ones.
    """
    attributes = {"__doc__": router_class.__doc__, "__qualname__": router_class.__qualname__}
    measured_class = _MeasuredRouterType(router_class.__name__, (), attributes)
    measured_class._loadgen_sdk_router_class = router_class
    measured_class._loadgen_sdk_settings = _call_settings(options)
    return measured_class


class _MeasuredRouterType(type):
    """The type (metaclass) of a class that replaces LiteLLM's Router.

    To call such a class creates a Router of the original class and measures its methods. It cannot
    be a subclass of the Router, because LiteLLM forbids subclasses since version 1.110.

    Attributes:
        _loadgen_sdk_router_class: The original class.
        _loadgen_sdk_settings: What all calls have in common.
    """

    _loadgen_sdk_router_class: type
    _loadgen_sdk_settings: CallSettings

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Create a Router of the original class, and replace its methods by measured ones.

        Python calls this method of the metaclass when the application calls the class, as in
        `Router(...)`. Usually it would create an object of that class.
        """
        router = cls._loadgen_sdk_router_class(*args, **kwargs)
        for spec in _FUNCTIONS:
            method = getattr(router, spec.name, None)
            if method is not None:
                measured_method = _measure(
                    method, spec, spec.router_argument_names, cls._loadgen_sdk_settings
                )
                # Only this object changes, and not its class.
                vars(router)[spec.name] = measured_method
        return router

    def __instancecheck__(cls, instance: object) -> bool:
        """Return True for every Router, measured or not."""
        return isinstance(instance, cls._loadgen_sdk_router_class)

    def __getattr__(cls, name: str) -> Any:
        """Return an attribute of the original class."""
        return getattr(cls._loadgen_sdk_router_class, name)


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
    function: Callable[..., Any],
    spec: _FunctionSpec,
    argument_names: tuple[str, str],
    settings: CallSettings,
) -> Callable[..., Any]:
    """Wrap a function of LiteLLM, or a method of a Router, so that its calls are measured.

    Args:
        function: The function of LiteLLM or the method of a Router.
        spec: Its API, and whether it blocks.
        argument_names: The names of its first arguments, which callers may pass by position.
        settings: What all calls have in common.
    """
    send = _with_recorded_headers(function, is_blocking=spec.is_blocking)
    measured = measure_method(send, spec.api, settings, is_blocking=spec.is_blocking)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if settings.policy.retry is not None:
            # LiteLLM must not retry as well, because the attempts would multiply.
            kwargs["max_retries"] = 0
            kwargs["num_retries"] = 0
        # The measurement finds the model and the prompt by the names of the arguments.
        named_args = dict(zip(argument_names, args, strict=False))
        return measured(**named_args, **kwargs)

    return call


def _with_recorded_headers(
    function: Callable[..., Any], *, is_blocking: bool
) -> Callable[..., Any]:
    """Wrap a function of LiteLLM so that the headers of its response reach the measurement.

    LiteLLM attaches the headers to the response as `_response_headers`. The wrapper is a coroutine
    function unless `is_blocking`.
    """

    def call_and_record_headers(**kwargs: Any) -> Steps[Any]:
        # `as_function` calls, and in async code awaits, what is yielded. It sends the result back.
        response = yield partial(function, **kwargs)
        headers = getattr(response, "_response_headers", None)
        if isinstance(headers, Mapping):
            record_response_headers(headers)
        return response

    return functools.wraps(function)(as_function(call_and_record_headers, is_blocking=is_blocking))
