"""What a simulated system consists of: its replicas, and how requests are routed to them."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from loadgen.sim.engine.implementation import Replica
from loadgen.sim.engine.replica import Costs, ServerLimits
from loadgen.sim.engine.routing import Router, create_router


class ReplicaChange(Struct, frozen=True):
    """A change of the number of replicas: from `at_ns` on, only the first `serving_count` serve."""

    at_ns: int
    serving_count: int


class SimulatedSystem(Struct, frozen=True, kw_only=True):
    """The simulated servers: replicas with these costs and limits.

    Attributes:
        costs: The costs of an iteration of a replica with speed 1.
        limits: The limits of each replica.
        speeds: One entry per replica: how fast it is relative to `costs`.
        routing: How requests are routed to replicas: `round_robin` or `weighted` (`routing.py`).
        tokens_per_event: The tokens of one output event after the first, which has one token.
        changes: Changes of the number of replicas, in order of time.
    """

    costs: Costs
    limits: ServerLimits
    speeds: Sequence[float] = (1.0,)
    routing: str = "round_robin"
    tokens_per_event: int = 1
    changes: Sequence[ReplicaChange] = ()

    def create_replicas(self) -> list[Replica]:
        """Return new, idle replicas."""
        return [Replica(self.costs.at_speed(speed), self.limits) for speed in self.speeds]

    def create_router(self) -> Router:
        """Return a function that returns the index of the next request's replica at each call."""
        return create_router(self.speeds, self.routing)
