"""What a simulated system consists of: its replicas, and how requests are routed to them."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from loadgen.sim.engine.implementation import Replica
from loadgen.sim.engine.replica import Costs, ServerLimits
from loadgen.sim.engine.routing import Router, make_router


class ReplicaChange(Struct, frozen=True):
    """A change of the number of replicas: from `at_ns` on, only the first `serving` ones serve."""

    at_ns: int
    serving: int


class SimulatedSystem(Struct, frozen=True, kw_only=True):
    """The simulated servers: replicas with these costs and limits.

    `speeds` has one entry per replica, relative to `costs`. `interval` is the number of tokens per
    output event after the first. `changes` are in order of time.
    """

    costs: Costs
    limits: ServerLimits
    speeds: Sequence[float] = (1.0,)
    routing: str = "round_robin"
    interval: int = 1
    changes: Sequence[ReplicaChange] = ()

    def create_replicas(self) -> list[Replica]:
        """Return new, idle replicas."""
        return [Replica(self.costs.at_speed(speed), self.limits) for speed in self.speeds]

    def make_router(self) -> Router:
        """Return a function that chooses the replica of the next request."""
        return make_router(self.speeds, self.routing)
