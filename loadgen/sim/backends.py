"""The functions of the two simulated backends, for the table `loadgen.backends`."""

from loadgen.core.execution.backend import Backend
from loadgen.sim import embedded_backend, virtual_backend
from loadgen.sim.roofline import estimate_saturation_rate

EMBEDDED = Backend(known=embedded_backend.describe_target, serve=embedded_backend.serve)
"""A simulated server in a process of its own, which is loaded over HTTP."""

VIRTUAL = Backend(
    known=virtual_backend.describe_target,
    filling_rate=estimate_saturation_rate,
    run=virtual_backend.run,
)
"""A simulated server in virtual time."""
