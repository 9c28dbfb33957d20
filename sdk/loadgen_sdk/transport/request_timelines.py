"""A client that records the timestamps of the output events of each request by itself.

It has the interface of `Pool` and takes its place in a load that keeps these timestamps, so that
any other load does not pay for them. No I/O of its own.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from functools import partial
from typing import Any

from ..request import Completion, Failure
from ..wire_formats.event_timeline import EventTimeline

MOVE_PERIOD_NS = 1_000_000_000
"""How often the events so far are moved to the timelines of the stages."""


class _OpenRequest:
    """The events of a request that is in flight.

    Attributes:
        timeline: The timeline into which the client writes the events of the request.
    """

    def __init__(self, stage_timeline: EventTimeline) -> None:
        """Start without events.

        Args:
            stage_timeline: The timeline of all requests of a stage, which is one part of the load.
        """
        self.timeline = EventTimeline()
        self._stage_timeline = stage_timeline
        self._timestamps = array("q")  # of the events that were moved already

    def move_events(self) -> None:
        """Move the events so far to the timeline of the stage, and note their timestamps."""
        if not self.timeline.timestamps:
            return
        self._timestamps.extend(self._new_timestamps())
        self.timeline.move_events_to(self._stage_timeline)

    def all_timestamps(self) -> array[int]:
        """Return the timestamps of all output events of the request, in ns, after the last move."""
        return self._timestamps

    def _new_timestamps(self) -> list[int]:
        """Return the timestamps of the events that were not moved yet, in ns.

        Events that came together are in the timeline as a count. Only then it has to be expanded.
        """
        if self.timeline.simultaneous_counts:
            return self.timeline.all_timestamps()
        return self.timeline.timestamps


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
        """Send a request as `Pool.send` does, and record the timestamps of its output events.

        The client writes the events to a timeline of this request alone. `tick` moves them to
        `timeline` about every second, and the rest is moved when the request ends. Only then the
        timestamps are recorded.

        Args:
            request: The request, for the completion.
            body: Its body.
            due: The planned start of the request, monotonic in ns.
            on_done: A function that is called once, with the completion.
            timeline: The timeline of all requests of a stage, which is one part of the load.
            name: The name under which the timestamps are recorded. Each name is used once.
            options: Further arguments of `Pool.send`.
        """
        open_request = _OpenRequest(timeline)
        self._open_requests[name] = open_request
        end_request = partial(self._end_request, name, on_done)
        return self._client.send(
            request, body, due, end_request, open_request.timeline, name=name, **options
        )

    def _end_request(
        self, name: str, on_done: Callable[[Completion], None], completion: Completion
    ) -> None:
        """Record the timestamps of a request that has ended, and pass its completion on."""
        open_request = self._open_requests.pop(name)
        open_request.move_events()
        self._record(name, open_request.all_timestamps())
        on_done(completion)

    def cancel(self, exchange: object, failure: Failure) -> None:
        """End a request now with this failure."""
        self._client.cancel(exchange, failure)

    def tick(self, now: int) -> None:
        """Do the housekeeping of the client, and move events to their stages about every second.

        `now` is the monotonic time, in ns. Events are moved while requests run, so that a page that
        shows the stages is up to date.
        """
        self._client.tick(now)
        is_move_due = now >= self._moved_at_ns + MOVE_PERIOD_NS
        if is_move_due:
            self._moved_at_ns = now
            for open_request in self._open_requests.values():
                open_request.move_events()

    @property
    def in_flight(self) -> int:
        """The number of requests that were sent and have not ended."""
        in_flight: int = self._client.in_flight
        return in_flight
