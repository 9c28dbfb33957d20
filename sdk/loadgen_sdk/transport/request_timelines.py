"""A client that records the timestamps of the output events of each request by itself.

It has the interface of `Pool` and takes its place in a load that keeps these timestamps, so that
any other load does not pay for them. No I/O of its own.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

from ..request import Completion, Failure
from ..wire_formats.event_timeline import EventTimeline

MOVE_PERIOD_NS = 1_000_000_000
"""How often the events so far are moved to the timelines of the stages."""


class _OpenRequest:
    """The events of a request that is in flight.

    Args:
        stage_timeline: The timeline of the stage of the load, which collects the events of all its
            requests.
    """

    def __init__(self, stage_timeline: EventTimeline) -> None:
        self.timeline = EventTimeline()
        self._stage_timeline = stage_timeline
        self._timestamps = array("q")

    def move_events(self) -> array[int]:
        """Move the events so far to the timeline of the stage.

        Before that, their timestamps are added to those of the request. Events that came together
        are stored as a count, and `all_timestamps` repeats their timestamp.

        Returns:
            The timestamps of all output events of the request so far, in ns.
        """
        timeline = self.timeline
        if timeline.timestamps:
            has_bundles = bool(timeline.simultaneous_counts)
            self._timestamps.extend(
                timeline.all_timestamps() if has_bundles else timeline.timestamps
            )
            for field in EventTimeline.__slots__:
                items: list[Any] = getattr(timeline, field)
                getattr(self._stage_timeline, field).extend(items)
                items.clear()
        return self._timestamps


class RequestTimelines:
    """Sends requests through a client and records the timestamps of their output events.

    Args:
        client: A `Pool`, or another client with its interface.
        record: A function called with the name of each request that has ended and the timestamps of
            its output events in ns, before `on_done` of the request.
    """

    def __init__(self, client: Any, record: Callable[[str, array[int]], None]) -> None:
        self._client = client
        self._record = record
        self._moved_at_ns = 0
        self._open_requests: dict[str, _OpenRequest] = {}

    def send(
        self,
        request: Any,
        body: bytes | memoryview,
        due: int,
        on_done: Callable[[Completion], None],
        timeline: EventTimeline,
        *,
        name: str,
        **options: Any,
    ) -> object:
        """Send a request as `Pool.send` does. Each name is used once.

        The request gets a timeline of its own, whose events are moved to `timeline` from time to
        time and at its end.
        """
        open_request = _OpenRequest(timeline)
        self._open_requests[name] = open_request

        def record_and_report(completion: Completion) -> None:
            del self._open_requests[name]
            self._record(name, open_request.move_events())
            on_done(completion)

        return self._client.send(
            request, body, due, record_and_report, open_request.timeline, name=name, **options
        )

    def cancel(self, exchange: object, failure: Failure) -> None:
        """End a request now with this failure."""
        self._client.cancel(exchange, failure)

    def tick(self, now: int) -> None:
        """Do the housekeeping of the client, and move events when it is time."""
        self._client.tick(now)
        if now >= self._moved_at_ns + MOVE_PERIOD_NS:
            self._moved_at_ns = now
            for open_request in self._open_requests.values():
                open_request.move_events()

    @property
    def in_flight(self) -> int:
        """The number of requests that were sent and have not ended."""
        in_flight: int = self._client.in_flight
        return in_flight
