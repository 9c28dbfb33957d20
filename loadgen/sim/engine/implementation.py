"""Chooses the class of simulated replicas: the compiled one if it was built, else the reference."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loadgen_sdk import compiled

from loadgen.sim.engine import replica as reference

VERSION = 4
"""Version of the interface of `_replica.c`. A module of another version is not used."""

compiled_module, _ = compiled.load_compiled("loadgen.sim.engine._replica", VERSION)
"""The compiled module, or None."""

if TYPE_CHECKING or compiled_module is None:
    Replica = reference.Replica
    SimRequest = reference.SimRequest
else:
    Replica = compiled_module.Replica
    SimRequest = compiled_module.SimRequest
