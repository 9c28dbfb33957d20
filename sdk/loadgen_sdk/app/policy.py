"""The policy for an application's calls: observers, prices, throttle, retry, trace recorder.

`instrument` and the project's own client share it. It depends on no client and no socket. An exception of an observer
is logged and does not fail the call.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextvars import Context
from typing import TYPE_CHECKING, NamedTuple

from ..errors import WrongUse
from .measurement import Measurement, Prices, checked_prices, tell_latest

if TYPE_CHECKING:
    from .retry import Retry
    from .throttle import Throttle
    from .trace_recorder import CallShape, ShapeRecorder

log = logging.getLogger("loadgen_sdk")

Observer = Callable[[Measurement], object]
Observers = Observer | Iterable[Observer] | None


class Policy(NamedTuple):
    """The settings that apply to every call of one client."""

    observers: tuple[Observer, ...] = ()
    prices: Prices = None
    throttle: Throttle | None = None
    retry: Retry | None = None
    record: ShapeRecorder | None = None
    keep_content: bool = False

    def tell(self, measurement: Measurement, context: Context | None, call_shape: CallShape | None) -> None:
        """Report an ended call. Observers run in the context in which the call was made: spans find their parent."""
        tell_latest(measurement)
        if self.record is not None and call_shape is not None:
            self.record.end(call_shape, measurement)
        for observer in self.observers:
            try:
                if context is None:
                    observer(measurement)
                else:
                    context.run(observer, measurement)
            except Exception:
                log.exception("an observer of measurements failed")


def make_policy(
    on_measurement: Observers,
    prices: Prices,
    throttle: Throttle | None,
    retry: Retry | None,
    record: ShapeRecorder | None,
    keep_content: bool,
) -> Policy:
    """A Policy of these settings, checked. Raises WrongUse for an argument of the wrong type."""
    from .retry import Retry
    from .throttle import Throttle

    observers = (
        () if on_measurement is None else (on_measurement,) if callable(on_measurement) else tuple(on_measurement)
    )
    for observer in observers:
        if not callable(observer):
            raise WrongUse(f"on_measurement is a {type(observer).__name__}", "give a function of one Measurement")
    if throttle is not None and not isinstance(throttle, Throttle):
        raise WrongUse(f"throttle is a {type(throttle).__name__}", 'give Throttle(requests="600/min")')
    if retry is not None and not isinstance(retry, Retry):
        raise WrongUse(f"retry is a {type(retry).__name__}", "give Retry(attempts=3)")
    if record is not None and not hasattr(record, "begin"):
        raise WrongUse(f"record is a {type(record).__name__}", 'give record_shape("traffic.jsonl")')
    return Policy(observers, checked_prices(prices), throttle, retry, record, keep_content)
