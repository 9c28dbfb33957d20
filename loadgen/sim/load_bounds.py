"""The limits of a simulated load."""

from __future__ import annotations

import msgspec

from loadgen.core.execution.driver import MAX_DRAIN_AFTER_STOP_NS
from loadgen.sim.engine.replica import NEVER


class LoadBounds(msgspec.Struct, frozen=True, kw_only=True):
    """How many requests may be in flight, and when requests and the load end.

    Attributes:
        max_in_flight: The most requests in flight, or None for no limit.
        max_in_prefill: The most requests in flight without a first token, or None for no limit.
        timeout_ns: How long a request may take before it is cancelled.
        drain_ns: How long requests may go on after the horizon of the schedule.
        stop_ns: When the load is stopped. Requests in flight may then end within the drain.
    """

    max_in_flight: int | None = None
    max_in_prefill: int | None = None
    timeout_ns: int = NEVER
    drain_ns: int = NEVER
    stop_ns: int = NEVER

    @property
    def drain_after_stop_ns(self) -> int:
        """How long requests in flight may go on after the load is stopped."""
        return min(self.drain_ns, MAX_DRAIN_AFTER_STOP_NS)

    def end_ns(self, horizon_ns: int | None) -> int:
        """Return when the run ends at the latest, or NEVER if it ends with its last request.

        Args:
            horizon_ns: When the schedule starts its last request, or None if it has no end.
        """
        if horizon_ns is None or self.drain_ns >= NEVER:
            return NEVER
        return horizon_ns + self.drain_ns


UNBOUNDED = LoadBounds()
