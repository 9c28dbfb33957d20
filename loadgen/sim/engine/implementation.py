"""Chooses the replica of simulations: the compiled one if it was built, else the reference."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loadgen_sdk import compiled

from loadgen.sim.engine.replica import PurePythonReplica, PurePythonSimRequest

VERSION = 3
"""Version of the interface of `_replica.c`. A module of another version is not used."""

module, _ = compiled.load("loadgen.sim.engine._replica", VERSION)
"""The compiled module, or None."""

if TYPE_CHECKING or module is None:
    Replica = PurePythonReplica
    SimRequest = PurePythonSimRequest
else:
    Replica = module.Replica
    SimRequest = module.SimRequest
