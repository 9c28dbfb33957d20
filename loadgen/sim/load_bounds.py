"""What bounds a simulated load."""

from __future__ import annotations

import msgspec

from loadgen.core.execution.driver import MAX_DRAIN_AFTER_STOP_NS
from loadgen.sim.engine.replica import NEVER


class LoadBounds(msgspec.Struct, frozen=True, kw_only=True):
    """The caps of a load (None: none), and its times, as over HTTP (NEVER: none).

    timeout_ns: of a request. drain_ns: what may go on after the horizon. stop_ns: when the load is stopped; what is in
    flight then may end within the drain.
    """

    max_in_flight: int | None = None
    max_in_prefill: int | None = None
    timeout_ns: int = NEVER
    drain_ns: int = NEVER
    stop_ns: int = NEVER

    @property
    def capped(self) -> bool:
        return not (self.max_in_flight is self.max_in_prefill is None)

    @property
    def after_stop_ns(self) -> int:
        """How long requests may go on after a stop."""
        return min(self.drain_ns, MAX_DRAIN_AFTER_STOP_NS)

    def end_ns(self, horizon_ns: int | None) -> int:
        """When all is over, of a load with this horizon."""
        return NEVER if horizon_ns is None or self.drain_ns >= NEVER else horizon_ns + self.drain_ns


UNBOUNDED = LoadBounds()
