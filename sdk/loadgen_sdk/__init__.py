"""The client SDK of loadgen: measure, throttle, retry and record an application's calls to an LLM endpoint.

Everything public is named here and described in docs/sdk.md. Names are imported when first used: importing this package
costs next to nothing, and neither openai, numpy nor pydantic is imported for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .blocking import BlockingClient as BlockingClient
    from .client import Client as Client
    from .client import Event as Event
    from .errors import ClientError as ClientError
    from .errors import RequestFailed as RequestFailed
    from .errors import TargetUnusable as TargetUnusable
    from .errors import WrongUse as WrongUse
    from .instrumentation import instrument as instrument
    from .measurement import Attempt as Attempt
    from .measurement import Content as Content
    from .measurement import Measurement as Measurement
    from .measurement import TokenPrice as TokenPrice
    from .measurement import latest_measurement as latest_measurement
    from .request import Completion as Completion
    from .request import Failure as Failure
    from .request import Request as Request
    from .request import Usage as Usage
    from .retry import Retry as Retry
    from .shapes import ShapeRecorder as ShapeRecorder
    from .shapes import record_shape as record_shape
    from .target import Target as Target
    from .telemetry import OpenTelemetry as OpenTelemetry
    from .telemetry import Prometheus as Prometheus
    from .throttle import Permit as Permit
    from .throttle import Throttle as Throttle
    from .wire import Tls as Tls

_ROOMS = {
    "Attempt": "measurement",
    "BlockingClient": "blocking",
    "Client": "client",
    "ClientError": "errors",
    "Completion": "request",
    "Content": "measurement",
    "Event": "client",
    "Failure": "request",
    "Measurement": "measurement",
    "OpenTelemetry": "telemetry",
    "Permit": "throttle",
    "Prometheus": "telemetry",
    "Request": "request",
    "RequestFailed": "errors",
    "Retry": "retry",
    "ShapeRecorder": "shapes",
    "Target": "target",
    "TargetUnusable": "errors",
    "Throttle": "throttle",
    "Tls": "wire",
    "TokenPrice": "measurement",
    "Usage": "request",
    "WrongUse": "errors",
    "instrument": "instrumentation",
    "latest_measurement": "measurement",
    "record_shape": "shapes",
}

__all__ = [  # noqa: PLE0604 - they are the keys of the table, sorted there
    *_ROOMS
]


def __getattr__(name: str) -> Any:
    room = _ROOMS.get(name)
    if room is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"{__name__}.{room}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_ROOMS})
