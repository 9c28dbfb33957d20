"""The client SDK of loadgen: measure, throttle, retry and record the LLM calls of an application.

All public names are listed here and described in docs/reference/sdk.md. A name is imported when it
is first used, so that importing this package is cheap. It imports neither openai nor numpy nor
pydantic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .version import __version__  # noqa: F401 - public

if TYPE_CHECKING:
    from .app.blocking import BlockingClient as BlockingClient
    from .app.budget import Budget as Budget
    from .app.client import Client as Client
    from .app.client import Event as Event
    from .app.fallback import Fallback as Fallback
    from .app.instrumentation import instrument as instrument
    from .app.labels import labelled as labelled
    from .app.measurement import Attempt as Attempt
    from .app.measurement import Choice as Choice
    from .app.measurement import Content as Content
    from .app.measurement import Measurement as Measurement
    from .app.measurement import latest_measurement as latest_measurement
    from .app.measurement import measurement_of as measurement_of
    from .app.open_telemetry import OpenTelemetry as OpenTelemetry
    from .app.prometheus import Prometheus as Prometheus
    from .app.retry import Retry as Retry
    from .app.throttle import Permit as Permit
    from .app.throttle import Throttle as Throttle
    from .app.throttle import priority as priority
    from .app.trace_recorder import ShapeRecorder as ShapeRecorder
    from .app.trace_recorder import record_shape as record_shape
    from .errors import BudgetExceeded as BudgetExceeded
    from .errors import ClientError as ClientError
    from .errors import RequestFailed as RequestFailed
    from .errors import TargetUnusable as TargetUnusable
    from .errors import ThrottleTimeout as ThrottleTimeout
    from .errors import WrongUse as WrongUse
    from .price_file import read_prices as read_prices
    from .prices import TokenPrice as TokenPrice
    from .request import Completion as Completion
    from .request import Failure as Failure
    from .request import Request as Request
    from .request import Usage as Usage
    from .transport.target import Target as Target
    from .transport.tls import Tls as Tls

_NAMES_BY_MODULE = {
    "app.blocking": "BlockingClient",
    "app.budget": "Budget",
    "app.client": "Client Event",
    "app.fallback": "Fallback",
    "app.instrumentation": "instrument",
    "app.labels": "labelled",
    "app.measurement": "Attempt Choice Content Measurement latest_measurement measurement_of",
    "app.retry": "Retry",
    "app.open_telemetry": "OpenTelemetry",
    "app.prometheus": "Prometheus",
    "app.throttle": "Permit Throttle priority",
    "app.trace_recorder": "ShapeRecorder record_shape",
    "errors": "BudgetExceeded ClientError RequestFailed TargetUnusable ThrottleTimeout WrongUse",
    "price_file": "read_prices",
    "prices": "TokenPrice",
    "request": "Completion Failure Request Usage",
    "transport.target": "Target",
    "transport.tls": "Tls",
}
_MODULE_BY_NAME = {
    name: module for module, names in _NAMES_BY_MODULE.items() for name in names.split()
}

__all__ = sorted(_MODULE_BY_NAME)  # noqa: PLE0605 - the names of the table


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that importing the package is cheap.

    Python calls this for a name that the module does not have yet (PEP 562).

    Raises:
        AttributeError: There is no such public name.
        ImportError: The name is in the package loadgen-wire, which is not installed.
    """
    module_name = _MODULE_BY_NAME.get(name)
    if module_name is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    from importlib import import_module

    try:
        module = import_module(f"{__name__}.{module_name}")
    except ModuleNotFoundError as error:
        # All modules of this package that may be missing belong to loadgen-wire. Any other missing
        # module is a dependency, whose error is passed on.
        missing_module = error.name or ""
        is_in_this_package = missing_module.startswith(f"{__name__}.")
        if not is_in_this_package:
            raise
        raise ImportError(
            f"{__name__}.{name} is in loadgen-wire: pip install 'loadgen-sdk[client]'"
        ) from None

    value = getattr(module, name)

    # Python finds the name in the module from now on, and does not call this function again.
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the names of the package, with those that are not imported yet."""
    return sorted({*globals(), *_MODULE_BY_NAME})
