"""What a run tells whoever started it, while it goes on: one type of event for each thing that can be said."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from loadgen.core.execution.plan import Plan
    from loadgen.core.results.manifest import Cluster, Header, ReasonCode
    from loadgen.core.schedule.timetable import Schedule
    from loadgen.core.workload import Stage

RECENT = 2_000  # number of latencies kept for the progress line


class Counters:
    """What a progress line shows; updated in place during the run. `recent_ttft_ns`: the latest TTFTs."""

    __slots__ = ("dropped", "events", "failed", "in_flight", "ok", "recent_ttft_ns", "sent")

    def __init__(self) -> None:
        self.sent = self.ok = self.failed = self.dropped = self.events = self.in_flight = 0
        self.recent_ttft_ns: deque[int] = deque(maxlen=RECENT)


@dataclass(slots=True)
class RunningLoad:
    """A load that goes on: what was counted so far, and how to end it.

    `stop`: start no more requests; called again: end at once. `decided` is set by one who stops the load because its
    outcome is certain, `stopped_by` by one who stops it because of a rule: the run is then not called interrupted.
    """

    counters: Callable[[], Counters]
    stop: Callable[[], None]
    decided: bool = False
    stopped_by: ReasonCode | None = None


class ProbeWaits(NamedTuple):
    """The targets have not answered the probe yet. An answer may take `timeout_s`."""

    targets: str
    timeout_s: float


class RunPlanned(NamedTuple):
    """The header is written, and nothing was sent yet."""

    plan: Plan
    header: Header


class WorkersPlaced(NamedTuple):
    """The workers are ready on the nodes of a cluster."""

    cluster: Cluster


class LoadStarted(NamedTuple):
    """The load begins at `start_ns` on the monotonic clock. Told in a running event loop; not told in virtual time."""

    start_ns: int
    load: RunningLoad


class StepBegun(NamedTuple):
    """A load that is decided while it goes has begun its next step. `stages`, `timetable`: so far."""

    stages: tuple[Stage, ...]
    timetable: Schedule


class RunEnded(NamedTuple):
    """The run is over, finished or not. `stored`: where its folder was copied to."""

    stored: str | None = None


RunEvent = ProbeWaits | RunPlanned | WorkersPlaced | LoadStarted | StepBegun | RunEnded
Tell = Callable[[RunEvent], None]


def silent(event: RunEvent) -> None:
    """Nobody is told."""
