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
from contextlib import AbstractContextManager
from contextvars import Context
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from ..errors import WrongUse
from ..prices import Prices, TokenPrice, validate_prices
from .background import run_in_background
from .budget import Budget, BudgetOption, validate_budget
from .labels import Labels, current_labels, keep_valid_labels, validate_labels
from .measurement import Measurement, set_latest_measurement
from .retry import Retry
from .throttle import Throttle
from .trace_recorder import CallShape, ShapeRecorder

if TYPE_CHECKING:
    from .call import Call

log = logging.getLogger("loadgen_sdk")

Observer = Callable[[Measurement], object]
Observers = Observer | Iterable[Observer] | None


class ObserverSpan(Protocol):
    """The span of a call that an observer has started, such as a span of OpenTelemetry."""

    def current(self) -> AbstractContextManager[object]:
        """Return a context manager inside which the span is the current one."""


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
        has_call_observers: An observer has a method `begin_call`, which is called when a call
            starts, as that of OpenTelemetry does for spans. It is set here.
    """

    observers: tuple[Observer, ...] = ()
    prices: Prices = None
    throttle: Throttle | None = None
    retry: Retry | None = None
    record: ShapeRecorder | None = None
    keep_content: bool = False
    labels: dict[str, str] = {}
    budget: Budget | None = None
    has_call_observers: bool = False

    def __post_init__(self) -> None:
        """Find out whether an observer is to be called when a call starts."""
        has_call_observers = any(hasattr(observer, "begin_call") for observer in self.observers)
        msgspec.structs.force_setattr(self, "has_call_observers", has_call_observers)

    def merge_labels(self, call_labels: Labels | None) -> dict[str, str]:
        """Return the labels of one call: those of the client, of its context, and of the call.

        If two of them have a label of the same name, the label of the call counts, or else that of
        the context (`with labelled(...)`). Labels of the call that are not valid are logged and
        left out. The caller must not change the result, which may be a dictionary of the client.

        Args:
            call_labels: The labels that were passed to the call, or None.
        """
        context_labels = current_labels.get()
        if call_labels:
            return {**self.labels, **context_labels, **keep_valid_labels(call_labels)}

        # Most calls have labels from one place only, which need not be merged.
        if not context_labels:
            return self.labels
        if not self.labels:
            return context_labels

        return {**self.labels, **context_labels}

    def begin_observation(self, call: Call) -> tuple[ObserverSpan | None, ...]:
        """Tell the observers that a call starts.

        Return what the `begin_call` of each observer has returned, such as a span, or None.
        """
        return tuple(_begin_call(observer, call) for observer in self.observers)

    def report_measurement(
        self,
        measurement: Measurement,
        context: Context | None,
        call_shape: CallShape | None,
        spans: tuple[ObserverSpan | None, ...],
    ) -> None:
        """Pass the measurement of a call to `latest_measurement`, the recorder and the observers.

        Args:
            measurement: The measurement.
            context: The context in which the call was made. Observers run in it, so that they see
                the context variables of the application. None if there are no observers.
            call_shape: What the recorder returned at the start of the call. None without a
                recorder, and for an API that it does not record.
            spans: What `begin_observation` returned at the start of the call: a span or None for
                each observer. Empty if no observer is called at the start.
        """
        set_latest_measurement(measurement)
        if call_shape is not None and self.record is not None:
            self.record.end(call_shape, measurement)

        if context is None:
            return

        spans_by_observer = spans or (None,) * len(self.observers)
        for observer, span in zip(self.observers, spans_by_observer, strict=True):
            try:
                result = _run_observer(observer, measurement, span, context)
                if result is not None and inspect.iscoroutine(result):
                    _schedule_observer(result, context)
            except Exception:
                # An observer must not fail the call of the application.
                log.exception("an observer of measurements failed")


def _begin_call(observer: Observer, call: Call) -> ObserverSpan | None:
    """Tell an observer that a call starts, if it has a method `begin_call`.

    Return what the method returns. An exception is logged, because it must not fail the call.
    """
    begin_call = getattr(observer, "begin_call", None)
    if begin_call is None:
        return None

    try:
        span: ObserverSpan | None = begin_call(call)
    except Exception:
        log.exception("an observer of measurements failed")
        return None

    return span


def _run_observer(
    observer: Observer, measurement: Measurement, span: ObserverSpan | None, context: Context
) -> object:
    """Call an observer in a context, with the span of the call if the observer has started one."""
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
    task.add_done_callback(_finish_observer)


def _finish_observer(task: asyncio.Task[object]) -> None:
    """Log the exception of an observer."""
    _running_observers.discard(task)
    error = None if task.cancelled() else task.exception()
    if error is not None:
        log.error("an observer of measurements failed", exc_info=error)


def make_policy(
    on_measurement: Observers,
    *,
    prices: Prices,
    throttle: Throttle | None,
    retry: Retry | None,
    record: ShapeRecorder | None,
    keep_content: bool,
    labels: Labels | None = None,
    budget: BudgetOption = None,
) -> Policy:
    """Check the options of `instrument` or of a `Client` and return them as a Policy.

    Args:
        on_measurement: One function, or several, that get the measurement of each call.
        prices: The prices of tokens, or None.
        throttle: The limits of calls, or None.
        retry: The retry policy, or None.
        record: A ShapeRecorder or another object with its methods `begin` and `end`, or None.
        keep_content: Measurements contain the texts of calls.
        labels: The labels of every call, or None.
        budget: The budget, or its text such as "50 USD/day", or None.

    Raises:
        WrongUse: An option is not valid.
    """
    if throttle is not None and not isinstance(throttle, Throttle):
        raise _wrong_type("throttle", throttle, 'give Throttle(requests="600/min")')
    if retry is not None and not isinstance(retry, Retry):
        raise _wrong_type("retry", retry, "give Retry(attempts=3)")
    if record is not None and not hasattr(record, "begin"):
        raise _wrong_type("record", record, 'give record_shape("traffic.jsonl")')

    valid_prices = validate_prices(prices)
    valid_budget = validate_budget(
        budget, _currencies(valid_prices), has_prices=valid_prices is not None
    )
    return Policy(
        observers=_validate_observers(on_measurement),
        prices=valid_prices,
        throttle=throttle,
        retry=retry,
        record=record,
        keep_content=keep_content,
        labels=validate_labels(labels),
        budget=valid_budget,
    )


def _validate_observers(on_measurement: Observers) -> tuple[Observer, ...]:
    """Return the option `on_measurement=`, a function or several ones, as a tuple of functions.

    Raises:
        WrongUse: One of them is not a function.
    """
    if callable(on_measurement):
        return (on_measurement,)

    observers = tuple(on_measurement or ())
    for observer in observers:
        if not callable(observer):
            raise _wrong_type(
                "on_measurement", observer, "give a function that takes one Measurement"
            )

    return observers


def _currencies(prices: Prices) -> set[str]:
    """Return the currencies of prices."""
    if prices is None:
        return set()
    if isinstance(prices, TokenPrice):
        return {prices.currency}
    return {price.currency for price in prices.values()}


def _wrong_type(option: str, value: object, hint: str) -> WrongUse:
    return WrongUse("wrong_type", f"{option} is a {type(value).__name__}", hint)
