"""The timestamps of output events, and events that are represented by a count. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .sse import NamedEvent

EventOrCount = bytes | NamedEvent | int
"""An item of a read: the payload of an event, or a number, which stands for so many plain events.

A plain event differs from an earlier event of its response in its text alone.
"""


class SplitEvents(NamedTuple):
    """The events of a read before the last one, and the last one."""

    before_last: list[EventOrCount]
    last: list[EventOrCount]


class EventTimeline:
    """The timestamps of the output events of one stage and the gaps between them, in ns.

    Attributes:
        gaps: The time between each event and the previous one of its response.
        timestamps: The timestamps of the events.
        simultaneous_counts: How many plain events came together with an earlier event, as pairs of
            its timestamp and their number. Each of them has a gap of 0. They are not in `gaps` and
            `timestamps`.
        uncertainties: By how much events may have arrived before their timestamp, as pairs of this
            time and the number of events that have it. Every other timestamp is exact.
    """

    __slots__ = ("gaps", "simultaneous_counts", "timestamps", "uncertainties")

    def __init__(self) -> None:
        """Start without events."""
        self.gaps: list[int] = []
        self.timestamps: list[int] = []
        self.simultaneous_counts: list[tuple[int, int]] = []
        self.uncertainties: list[tuple[int, int]] = []

    def all_timestamps(self) -> list[int]:
        """Return the timestamp of every output event, in order.

        For example, the timestamps [10, 30] with the simultaneous count (10, 2) give
        [10, 10, 10, 30]: three events came at 10.
        """
        timestamps = [*self.timestamps]
        for timestamp, count in self.simultaneous_counts:
            timestamps.extend([timestamp] * count)
        return sorted(timestamps)

    def move_events_to(self, destination: EventTimeline) -> None:
        """Append all events to another timeline, and remove them from this one."""
        destination.gaps.extend(self.gaps)
        destination.timestamps.extend(self.timestamps)
        destination.simultaneous_counts.extend(self.simultaneous_counts)
        destination.uncertainties.extend(self.uncertainties)
        self.gaps.clear()
        self.timestamps.clear()
        self.simultaneous_counts.clear()
        self.uncertainties.clear()


def count_events(events: Sequence[EventOrCount]) -> int:
    """Return how many events the items of a read stand for."""
    return sum([event if isinstance(event, int) else 1 for event in events])


def split_last_event(events: list[EventOrCount]) -> SplitEvents:
    """Split the last event of a read off the events before it.

    A number stands for that many plain events, so it is split, too: the last event of [b"{}", 3] is
    a plain event, and those before it are [b"{}", 2].
    """
    last_item = events[-1]
    if isinstance(last_item, int) and last_item > 1:
        return SplitEvents(before_last=[*events[:-1], last_item - 1], last=[1])
    return SplitEvents(before_last=events[:-1], last=[last_item])
