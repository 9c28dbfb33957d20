"""A client whose requests have a `EventTimeline` each, for a load that keeps the instants of every output event. Pure.

It stands in place of a client of the same face (`pool.py`), so that a load that does not keep them
does not pay. What has come is moved on to the flow that the request was given once a second, and at the end.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

from ..request import Completion, Failure
from ..wire_formats.event_timeline import EventTimeline

MOVED_NS = 1_000_000_000


class RequestTimelines:
    """`keep(name, instants)` is told of each request that has ended, before whoever sent it: its output events, ns."""

    def __init__(self, client: Any, keep: Callable[[str, array[int]], None]) -> None:
        self._client, self._keep = client, keep
        self._moved_at_ns = 0
        self._open: dict[
            str, tuple[EventTimeline, EventTimeline, array[int]]
        ] = {}  # its own flow, the one it was given, its instants

    def send(
        self,
        request: Any,
        body: bytes,
        due: int,
        on_done: Callable[[Completion], None],
        flow: EventTimeline,
        *,
        name: str,
        **more: Any,
    ) -> object:
        """As of the client; each name once."""

        def done(completion: Completion) -> None:
            self._keep(name, _moved(*self._open.pop(name)))
            on_done(completion)

        own = EventTimeline()
        self._open[name] = own, flow, array("q")
        return self._client.send(request, body, due, done, own, name=name, **more)

    def cancel(self, exchange: object, failure: Failure) -> None:
        self._client.cancel(exchange, failure)

    def tick(self, now: int) -> None:
        self._client.tick(now)
        if now >= self._moved_at_ns + MOVED_NS:
            self._moved_at_ns = now
            for entry in self._open.values():
                _moved(*entry)

    @property
    def in_flight(self) -> int:
        in_flight: int = self._client.in_flight
        return in_flight


def _moved(own: EventTimeline, given: EventTimeline, instants: array[int]) -> array[int]:
    """Move what has come from one flow to the other; the instants so far."""
    if own.instants:
        instants.extend(own.each_instant() if own.together else own.instants)
        for field in EventTimeline.__slots__:
            collected: list[Any] = getattr(own, field)
            getattr(given, field).extend(collected)
            collected.clear()
    return instants
