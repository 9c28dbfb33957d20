"""What a run tells whoever started it, while it goes on: one type of event for each thing that can be said."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from msgspec import Struct

if TYPE_CHECKING:
    import numpy as np
    from loadgen_sdk.probe.probe import ProbeResult
    from numpy.typing import NDArray

    from loadgen.core.execution.plan import Plan, Settings
    from loadgen.core.results.manifest import Cluster, ReasonCode, RunManifest

RECENT = 2_000  # number of latencies kept for the progress line


class Counters:
    """What a progress line shows; updated in place during the run. `recent_ttft_ns`: the latest TTFTs."""

    __slots__ = ("dropped", "events", "failed", "in_flight", "ok", "recent_ttft_ns", "sent")

    def __init__(self) -> None:
        self.sent = self.ok = self.failed = self.dropped = self.events = self.in_flight = 0
        self.recent_ttft_ns: deque[int] = deque(maxlen=RECENT)


class RunningLoad(Struct):
    """A load that goes on: what was counted so far, and how to end it.

    `stop`: start no more requests; called again: end at once. `decided` is set by one who stops the load because its
    outcome is certain, `stopped_by` by one who stops it because of a rule: the run is then not called interrupted.
    """

    counters: Callable[[], Counters]
    stop: Callable[[], None]
    decided: bool = False
    stopped_by: ReasonCode | None = None


class WaitingFor(Struct, frozen=True):
    """Something has not answered yet: `what`, and how long it is waited for, in words."""

    what: str


class TargetsProbed(Struct, frozen=True):
    """The targets were asked what they are; `settings` has their URLs. Not told in virtual time."""

    folder: Path
    settings: Settings
    found: tuple[ProbeResult, ...]


class ManifestCreated(Struct, frozen=True):
    """The header, before it is written. Who has something to say in it gives it back with that. Not in virtual time."""

    header: RunManifest


class RunPlanned(NamedTuple):
    """The run begins: nothing was sent yet. Told outside of an event loop; who hears it may refuse with a Fault."""

    plan: Plan
    header: RunManifest


class WorkersPlaced(Struct, frozen=True):
    """The workers are ready on the nodes of a cluster."""

    cluster: Cluster


class LoadStarted(Struct, frozen=True):
    """The load begins at `start_ns` on the monotonic clock. Told in a running event loop; not told in virtual time."""

    start_ns: int
    load: RunningLoad


class Look(Struct, frozen=True):
    """Every `every_ns` of a load in virtual time, `ends` is shown the rows that have ended since it was shown some: the
    instant, and the rows. True ends the load, as its outcome is certain; what is in flight may end within the drain.
    """

    every_ns: int
    ends: Callable[[int, NDArray[np.void]], bool]


class SimulationStarted(Struct, frozen=True):
    """A load in virtual time begins. Who wants to end it early adds to `looks`."""

    looks: list[Look]


class Simulated(Struct, frozen=True):
    """A load in virtual time is over, and nothing of it is written: its `rows`, by column. Who has seen enough of it
    adds the instant of that to `stops`: the load is then simulated to there, and told again.
    """

    rows: NDArray[np.void]
    stops: list[int]


class LoadEnded(Struct, frozen=True):
    """The load is over, or failed, or will not begin; told once after TargetsFound. Who has something to say in the
    header gives it back with that; None: the run has failed.
    """

    header: RunManifest | None


class RunEnded(Struct, frozen=True):
    """The run is over, finished or not. `stored`: where its folder was copied to."""

    stored: str | None = None


RunEvent = (
    WaitingFor
    | TargetsProbed
    | ManifestCreated
    | RunPlanned
    | WorkersPlaced
    | LoadStarted
    | SimulationStarted
    | Simulated
    | LoadEnded
    | RunEnded
)
EventHandler = Callable[[RunEvent], "RunManifest | None"]
Emit = Callable[[RunEvent], None]


def broadcast(listeners: Sequence[EventHandler]) -> Emit:
    """Return a function that sends an event to all listeners, in their order.

    The end of the run reaches the last listener first, because each may depend on those before it.
    """

    def emit(event: RunEvent) -> None:
        ordered = reversed(listeners) if isinstance(event, RunEnded) else listeners
        for listener in ordered:
            listener(event)

    return emit


def complete_manifest(listeners: Sequence[EventHandler], header: RunManifest) -> RunManifest:
    """Return a manifest with what the listeners add to it before the load."""
    for listener in listeners:
        header = listener(ManifestCreated(header)) or header
    return header


def conclude_manifest(listeners: Sequence[EventHandler], header: RunManifest) -> RunManifest:
    """Return a manifest with what the listeners add to it after the load."""
    for listener in listeners:
        header = listener(LoadEnded(header)) or header
    return header


def ignore_event(event: RunEvent) -> None:
    """Do nothing, as the function that receives the events of a run without listeners."""
