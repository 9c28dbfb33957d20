"""The settings for the calls of an application: observers, prices, throttle, retries and recorder.

`instrument` and the client of this project share them. An exception of an observer is logged and
does not fail the call.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
from collections.abc import Callable, Coroutine, Iterable
from contextvars import Context
from typing import Any

import msgspec

from ..errors import WrongUse
from ..prices import Prices, TokenPrice, validate_prices
from .background import run_in_background
from .budget import Budget, BudgetOption, validate_budget
from .labels import Labels, current_labels, usable_labels, validate_labels
from .measurement import Measurement, tell_latest
from .retry import Retry
from .throttle import Throttle
from .trace_recorder import CallShape, ShapeRecorder

log = logging.getLogger("loadgen_sdk")

Observer = Callable[[Measurement], object]
Observers = Observer | Iterable[Observer] | None

_running_observers: set[asyncio.Task[Any]] = set()
"""The tasks of observers that are coroutines. A loop keeps only weak references to its tasks."""


class Policy(msgspec.Struct, frozen=True):
    """The settings that apply to every call of one client.

    Attributes:
        observers: The functions that get each measurement.
        prices: The prices of tokens.
        throttle: The limits of calls.
        retry: The retry policy.
        record: The recorder of traffic shapes.
        keep_content: Measurements have the texts of calls.
        labels: The labels of every call.
        budget: The budget.
        follows_calls: An observer follows calls from their start, as spans do. It is set here.
    """

    observers: tuple[Observer, ...] = ()
    prices: Prices = None
    throttle: Throttle | None = None
    retry: Retry | None = None
    record: ShapeRecorder | None = None
    keep_content: bool = False
    labels: dict[str, str] = {}
    budget: Budget | None = None
    follows_calls: bool = False

    def __post_init__(self) -> None:
        """Find out whether an observer follows calls."""
        follows = any(hasattr(observer, "begin_call") for observer in self.observers)
        msgspec.structs.force_setattr(self, "follows_calls", follows)

    def labels_of(self, call_labels: Labels | None) -> dict[str, str]:
        """Return the labels of one call.

        They are those of the client, of the context (`labelled`) and of the call. Later ones
        replace earlier ones.
        """
        context_labels = current_labels.get()
        if call_labels:
            return {**self.labels, **context_labels, **usable_labels(call_labels)}
        if context_labels and self.labels:
            return {**self.labels, **context_labels}
        return context_labels or self.labels

    def begin(self, call: Any) -> tuple[Any, ...]:
        """Tell the observers that a call begins.

        Return for each of them what it follows the call with, or None.
        """
        return tuple(_begin_call(observer, call) for observer in self.observers)

    def tell(
        self,
        measurement: Measurement,
        context: Context | None,
        call_shape: CallShape | None,
        spans: tuple[Any, ...],
    ) -> None:
        """Report a call that has ended to the recorder and the observers.

        Args:
            measurement: The measurement.
            context: The context in which the call was made, and in which observers run. None if
                there are no observers.
            call_shape: The shape of the call, for the recorder.
            spans: What the observers follow the call with, from `begin`.
        """
        tell_latest(measurement)
        if call_shape is not None and self.record is not None:
            self.record.end(call_shape, measurement)
        if context is None:
            return
        for index, observer in enumerate(self.observers):
            span = spans[index] if spans else None
            try:
                result = _run_observer(observer, measurement, span, context)
                if result is not None and inspect.iscoroutine(result):
                    _schedule_observer(result, context)
            except Exception:
                log.exception("an observer of measurements failed")


def _begin_call(observer: Observer, call: Any) -> Any:
    """Return what an observer follows a call with, or None."""
    begin_call = getattr(observer, "begin_call", None)
    if begin_call is None:
        return None
    try:
        return begin_call(call)
    except Exception:
        log.exception("an observer of measurements failed")
        return None


def _run_observer(
    observer: Observer, measurement: Measurement, span: Any, context: Context
) -> object:
    run: Callable[..., object] = context.run
    if span is None:
        return run(observer, measurement)
    return run(observer, measurement, span)


def _schedule_observer(coroutine: Coroutine[Any, Any, object], context: Context) -> None:
    """Run an observer that is a coroutine, in the running loop or else in the background thread."""
    loop = asyncio._get_running_loop()
    if loop is None:
        run_in_background(functools.partial(asyncio.run, coroutine))
        return
    task = context.run(loop.create_task, coroutine)
    _running_observers.add(task)
    task.add_done_callback(_observer_done)


def _observer_done(task: asyncio.Task[Any]) -> None:
    """Log the exception of an observer."""
    _running_observers.discard(task)
    error = None if task.cancelled() else task.exception()
    if error is not None:
        log.error("an observer of measurements failed", exc_info=error)


def make_policy(
    on_measurement: Observers,
    prices: Prices,
    throttle: Throttle | None,
    retry: Retry | None,
    record: ShapeRecorder | None,
    keep_content: bool,
    labels: Labels | None = None,
    budget: BudgetOption = None,
) -> Policy:
    """Return the policy of these options, which are those of `instrument`.

    Raises:
        WrongUse: An option is not valid.
    """
    observers = (on_measurement,) if callable(on_measurement) else tuple(on_measurement or ())
    for observer in observers:
        if not callable(observer):
            raise _wrong_type("on_measurement", observer, "give a function of one Measurement")
    if throttle is not None and not isinstance(throttle, Throttle):
        raise _wrong_type("throttle", throttle, 'give Throttle(requests="600/min")')
    if retry is not None and not isinstance(retry, Retry):
        raise _wrong_type("retry", retry, "give Retry(attempts=3)")
    if record is not None and not hasattr(record, "begin"):
        raise _wrong_type("record", record, 'give record_shape("traffic.jsonl")')
    prices = validate_prices(prices)
    return Policy(
        observers,
        prices,
        throttle,
        retry,
        record,
        keep_content,
        validate_labels(labels),
        validate_budget(budget, _currencies(prices), has_prices=prices is not None),
    )


def _currencies(prices: Prices) -> set[str]:
    """Return the currencies of prices."""
    if prices is None:
        return set()
    if isinstance(prices, TokenPrice):
        return {prices.currency}
    return {price.currency for price in prices.values()}


def _wrong_type(option: str, value: object, hint: str) -> WrongUse:
    return WrongUse("wrong_type", f"{option} is a {type(value).__name__}", hint)
