"""The policy for an application's calls: observers, prices, throttle, retry, trace recorder.

`instrument` and the project's own client share it. It depends on no client and no socket. An exception of an observer
is logged and does not fail the call.
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
from ..prices import Prices, TokenPrice, checked_prices
from .budget import Budget, BudgetOption, checked_budget
from .finishing import later
from .labels import Labels, checked_labels, current_labels, usable_labels
from .measurement import Measurement, tell_latest
from .retry import Retry
from .throttle import Throttle
from .trace_recorder import CallShape, ShapeRecorder

log = logging.getLogger("loadgen_sdk")

Observer = Callable[[Measurement], object]
Observers = Observer | Iterable[Observer] | None

_running: set[asyncio.Task[Any]] = (
    set()
)  # of observers that are coroutines: a loop keeps only weak references


class Policy(msgspec.Struct, frozen=True):
    """The settings that apply to every call of one client."""

    observers: tuple[Observer, ...] = ()
    prices: Prices = None
    throttle: Throttle | None = None
    retry: Retry | None = None
    record: ShapeRecorder | None = None
    keep_content: bool = False
    labels: dict[str, str] = {}
    budget: Budget | None = None
    follows_calls: bool = False  # an observer follows calls from their start (spans); set here

    def __post_init__(self) -> None:
        follows = any(hasattr(observer, "begin_call") for observer in self.observers)
        msgspec.structs.force_setattr(self, "follows_calls", follows)

    def labels_of(self, given: Labels | None) -> dict[str, str]:
        """The labels of one call: of the client, of the block that it is made in, of its argument. The last wins."""
        current = current_labels.get()
        if not given:
            return {**self.labels, **current} if current and self.labels else current or self.labels
        return {**self.labels, **current, **usable_labels(given)}

    def begin(self, call: Any) -> tuple[Any, ...]:
        """A `Call` begins: tell the observers that follow a call from its start (spans). For `tell` at its end."""
        spans = []
        for observer in self.observers:
            span = None
            try:
                if (begin_call := getattr(observer, "begin_call", None)) is not None:
                    span = begin_call(call)
            except Exception:
                log.exception("an observer of measurements failed")
            spans.append(span)
        return tuple(spans)

    def tell(
        self,
        measurement: Measurement,
        context: Context | None,
        call_shape: CallShape | None,
        spans: tuple[Any, ...],
    ) -> None:
        """Report an ended call. Observers run in the context in which the call was made."""
        tell_latest(measurement)
        if call_shape is not None and self.record is not None:
            self.record.end(call_shape, measurement)
        if context is None:  # there are no observers
            return
        run: Callable[..., object] = context.run
        for number, observer in enumerate(self.observers):
            try:
                if not spans or (span := spans[number]) is None:
                    result = run(observer, measurement)
                else:
                    result = run(observer, measurement, span)
                if result is not None and inspect.iscoroutine(result):
                    _await_observer(result, context)
            except Exception:
                log.exception("an observer of measurements failed")


def _await_observer(coroutine: Coroutine[Any, Any, object], context: Context) -> None:
    """An observer is a coroutine: a task of the running loop, or else a loop of its own in the background thread."""
    loop = asyncio._get_running_loop()
    if loop is None:
        later(functools.partial(asyncio.run, coroutine))
        return
    task = context.run(loop.create_task, coroutine)
    _running.add(task)
    task.add_done_callback(_observer_done)


def _observer_done(task: asyncio.Task[Any]) -> None:
    _running.discard(task)
    if not task.cancelled() and (error := task.exception()) is not None:
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
    """A Policy of these settings, checked. Raises WrongUse for an argument of the wrong type."""
    observers = (on_measurement,) if callable(on_measurement) else tuple(on_measurement or ())
    for observer in observers:
        if not callable(observer):
            raise WrongUse(
                "wrong_type",
                f"on_measurement is a {type(observer).__name__}",
                "give a function of one Measurement",
            )
    if throttle is not None and not isinstance(throttle, Throttle):
        raise WrongUse(
            "wrong_type",
            f"throttle is a {type(throttle).__name__}",
            'give Throttle(requests="600/min")',
        )
    if retry is not None and not isinstance(retry, Retry):
        raise WrongUse("wrong_type", f"retry is a {type(retry).__name__}", "give Retry(attempts=3)")
    if record is not None and not hasattr(record, "begin"):
        raise WrongUse(
            "wrong_type",
            f"record is a {type(record).__name__}",
            'give record_shape("traffic.jsonl")',
        )
    prices, own_labels = checked_prices(prices), checked_labels(labels)
    named = (
        () if prices is None else (prices,) if isinstance(prices, TokenPrice) else prices.values()
    )
    money = checked_budget(budget, {price.currency for price in named}, priced=prices is not None)
    return Policy(observers, prices, throttle, retry, record, keep_content, own_labels, money)
