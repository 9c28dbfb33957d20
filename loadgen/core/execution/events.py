"""The events of a run, which listeners receive while it goes on."""

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

_RECENT_TTFTS = 2_000


class Counters:
    """The counters that a progress line shows. They are updated in place during the load."""

    __slots__ = (
        "cancelled",
        "dropped",
        "events",
        "failed",
        "in_flight",
        "ok",
        "recent_ttft_ns",
        "sent",
    )

    def __init__(self) -> None:
        self.sent = 0
        self.ok = 0
        self.failed = 0
        self.dropped = 0
        self.cancelled = 0
        self.events = 0
        self.in_flight = 0
        self.recent_ttft_ns: deque[int] = deque(maxlen=_RECENT_TTFTS)


class RunningLoad(Struct):
    """A load that is being sent."""

    counters: Callable[[], Counters]
    """Returns the current counters."""
    stop: Callable[[], None]
    """Starts no more requests. A second call ends the load at once."""
    decided: bool = False
    """Set by a listener that stops the load because its outcome is certain."""
    stopped_by: ReasonCode | None = None
    """Set by a listener that stops the load because of a rule."""


class WaitingFor(Struct, frozen=True):
    """The run waits for something that takes long.

    Attributes:
        description: What it waits for and how long at most, as text for the user.
    """

    description: str


class TargetsProbed(Struct, frozen=True):
    """The targets were probed; `settings` has their URLs.

    There is no such event in virtual time.
    """

    folder: Path
    settings: Settings
    probe_results: tuple[ProbeResult, ...]


class ManifestCreated(Struct, frozen=True):
    """The manifest before it is written. A listener may return a changed manifest.

    There is no such event in virtual time.
    """

    manifest: RunManifest


class RunPlanned(NamedTuple):
    """The run begins, and nothing was sent yet.

    The event is sent outside of an event loop. A listener may raise LoadgenError to refuse the run.
    """

    plan: Plan
    manifest: RunManifest


class WorkersPlaced(Struct, frozen=True):
    """The workers are ready on the nodes of a cluster."""

    cluster: Cluster


class LoadStarted(Struct, frozen=True):
    """The load begins at `start_ns` on the monotonic clock.

    The event is sent in a running event loop. There is no such event in virtual time.
    """

    start_ns: int
    load: RunningLoad


class InterimCheck(Struct, frozen=True):
    """An interim analysis of a load in virtual time.

    After every `every_ns`, `ends` is called with the time and the records of the requests that have
    ended since the last call. If it returns True, the load ends, because its outcome is certain;
    requests in flight may end within the drain.
    """

    every_ns: int
    ends: Callable[[int, NDArray[np.void]], bool]


class SimulationStarted(Struct, frozen=True):
    """A load in virtual time begins. A listener that may end it early adds to `checks`."""

    checks: list[InterimCheck]


class Simulated(Struct, frozen=True):
    """A load in virtual time has ended, and nothing of it is written.

    `rows` holds its records by column. A listener that needs only a part of the load adds the time
    at which the part ends to `stops`. The load is then simulated to that time, and the event is
    sent again.
    """

    rows: NDArray[np.void]
    stops: list[int]


class LoadEnded(Struct, frozen=True):
    """The load has ended or failed, or will not begin. It is sent once after TargetsProbed.

    A listener may return a changed manifest. The manifest is None if the run has failed.
    """

    manifest: RunManifest | None


class RunEnded(Struct, frozen=True):
    """The run has ended, finished or not. `stored` is where its folder was copied to."""

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


def complete_manifest(listeners: Sequence[EventHandler], manifest: RunManifest) -> RunManifest:
    """Return a manifest with what the listeners add to it before the load.

    A listener that returns None leaves the manifest as it is.
    """
    for listener in listeners:
        manifest = listener(ManifestCreated(manifest)) or manifest
    return manifest


def conclude_manifest(listeners: Sequence[EventHandler], manifest: RunManifest) -> RunManifest:
    """Return a manifest with what the listeners add to it after the load.

    A listener that returns None leaves the manifest as it is.
    """
    for listener in listeners:
        manifest = listener(LoadEnded(manifest)) or manifest
    return manifest
