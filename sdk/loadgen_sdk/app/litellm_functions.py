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
            measured_functions[spec.name] = _measure_function(
                function, spec, settings, argument_names=spec.argument_names
            )

    return measured_functions


def measure_router(router_class: type, options: InstrumentOptions) -> type:
    """Return a class that replaces LiteLLM's Router and creates Routers whose calls are measured.

    A Router distributes calls to several deployments of a model. A call counts once, however many
    deployments the Router tries.

    LiteLLM forbids subclasses of its Router. The replacement is therefore a class of its own, with
    the name and the documentation of the original one. Its metaclass, `_MeasuredRouterType`, does
    the work: `Router(...)` calls the `__call__` of the metaclass, which creates a Router of the
    original class and replaces its methods by measured ones.
    """
    no_base_classes = ()
    attributes = {"__doc__": router_class.__doc__, "__qualname__": router_class.__qualname__}
    measured_class = _MeasuredRouterType(router_class.__name__, no_base_classes, attributes)
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

        This is a method of a metaclass: Python calls it for `Router(...)`. The `__call__` that it
        overrides, `type.__call__`, would create an object of the class that replaces the Router.
        """
        router = cls._loadgen_sdk_router_class(*args, **kwargs)
        for spec in _FUNCTIONS:
            method = getattr(router, spec.name, None)
            if method is None:
                continue  # The installed version of LiteLLM does not have it.

            measured_method = _measure_function(
                method,
                spec,
                cls._loadgen_sdk_settings,
                argument_names=spec.router_argument_names,
            )

            # An attribute of the object hides the method of its class, which does not change.
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


def _measure_function(
    function: Callable[..., Any],
    spec: _FunctionSpec,
    settings: CallSettings,
    *,
    argument_names: tuple[str, str],
) -> Callable[..., Any]:
    """Return a function that the application calls instead of a function of LiteLLM.

    It passes the arguments by name to the measured function, because the measurement finds the
    model and the prompt by the names. If this package retries failed calls, LiteLLM must not do so
    as well, because the attempts would multiply.

    Args:
        function: The function of LiteLLM or the method of a Router.
        spec: Its API, and whether it blocks.
        settings: What all calls have in common.
        argument_names: The names of its first arguments, which callers may pass by position.
    """
    function_with_headers = _with_recorded_headers(function, is_blocking=spec.is_blocking)
    measured_function = measure_method(
        function_with_headers, spec.api, settings, is_blocking=spec.is_blocking
    )

    @functools.wraps(function)
    def call_measured_function(*args: Any, **kwargs: Any) -> Any:
        if settings.policy.retry is not None:
            kwargs["max_retries"] = 0
            kwargs["num_retries"] = 0
        arguments_by_name = dict(zip(argument_names, args, strict=False))
        return measured_function(**arguments_by_name, **kwargs)

    return call_measured_function


def _with_recorded_headers(
    function: Callable[..., Any], *, is_blocking: bool
) -> Callable[..., Any]:
    """Wrap a function of LiteLLM so that the headers of its response reach the measurement.

    LiteLLM attaches the headers to the response as `_response_headers`.

    Args:
        function: The function of LiteLLM.
        is_blocking: It is a plain function, and so is the wrapper. Otherwise both are coroutine
            functions.
    """

    # This generator serves both cases. `result = yield function` means: call `function`, await what
    # it returns in the case of a coroutine function, and go on with the result (see `Steps`).
    def call_and_record_headers(**kwargs: Any) -> Steps[Any]:
        response = yield partial(function, **kwargs)
        headers = getattr(response, "_response_headers", None)
        if isinstance(headers, Mapping):
            record_response_headers(headers)
        return response

    wrapper = as_function(call_and_record_headers, is_blocking=is_blocking)

    # The wrapper gets the name and the documentation of the function.
    return functools.update_wrapper(wrapper, function)
