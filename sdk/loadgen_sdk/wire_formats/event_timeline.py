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
        """Return the timestamp of every output event, in order."""
        timestamps = [*self.timestamps]
        for timestamp, count in self.simultaneous_counts:
            timestamps.extend([timestamp] * count)
        return sorted(timestamps)


def count_events(events: Sequence[EventOrCount]) -> int:
    """Return how many events the items of a read stand for."""
    return sum([event if isinstance(event, int) else 1 for event in events])


def split_last_event(events: list[EventOrCount]) -> SplitEvents:
    """Split the events of a read before the last one. A count of several events is split, too."""
    last_item = events[-1]
    if isinstance(last_item, int) and last_item > 1:
        return SplitEvents(before_last=[*events[:-1], last_item - 1], last=[1])
    return SplitEvents(before_last=events[:-1], last=[last_item])
