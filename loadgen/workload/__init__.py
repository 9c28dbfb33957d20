"""The workload: what is sent, when, and what was promised. Every check that a workload file can fail lives here.

`load` reads, everything else is values. Nothing is drawn here, no prompt is made and no clock is looked at. What the
words mean is in docs/workloads.md. Inside: `positions` (YAML that remembers where it stood) and `parts` (what pydantic
lacks) carry `model` (the types); `overrides` (flags) and `apply` change it; `reading` puts them together.
"""

from loadgen.workload.model import (
    CPU_SHARE,
    FAILURE_SHARE,
    GRACE_NS,
    SEND_LAG_SHARE,
    STALL_TIMEOUT_NS,
    STAMP_ERROR_SHARE,
    TIMEOUT_NS,
    Arrival,
    AtLeast,
    Closed,
    Constant,
    Delay,
    FromFile,
    Gamma,
    Length,
    Limits,
    Poisson,
    Ramp,
    Slo,
    Stage,
    Synthetic,
    Term,
    Turns,
    Workload,
    json_schema,
    recipe_fingerprint,
)
from loadgen.workload.overrides import Overrides, levels
from loadgen.workload.parts import Empirical, Fixed, Listed, LogNormal, Normal, Uniform
from loadgen.workload.reading import load, packaged

__all__ = [
    "CPU_SHARE",
    "FAILURE_SHARE",
    "GRACE_NS",
    "SEND_LAG_SHARE",
    "STALL_TIMEOUT_NS",
    "STAMP_ERROR_SHARE",
    "TIMEOUT_NS",
    "Arrival",
    "AtLeast",
    "Closed",
    "Constant",
    "Delay",
    "Empirical",
    "Fixed",
    "FromFile",
    "Gamma",
    "Length",
    "Limits",
    "Listed",
    "LogNormal",
    "Normal",
    "Overrides",
    "Poisson",
    "Ramp",
    "Slo",
    "Stage",
    "Synthetic",
    "Term",
    "Turns",
    "Uniform",
    "Workload",
    "json_schema",
    "levels",
    "load",
    "packaged",
    "recipe_fingerprint",
]
