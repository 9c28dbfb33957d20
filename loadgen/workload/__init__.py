"""The workload file and the flags over it: what is sent, when, and what was promised. Every check of it is here.

`loading.py` and `traces.py` read, everything else is values: nothing is drawn, no prompt is made, no clock is read.
What the words mean is in docs/workloads.md.
"""

from loadgen.limits import CPU_SHARE, FAILURE_SHARE, SEND_LAG_SHARE, STAMP_ERROR_SHARE
from loadgen.slo import Slo, Term
from loadgen.workload.fields import Empirical, Fixed, Listed, LogNormal, Normal, Uniform
from loadgen.workload.flags import Overrides, levels
from loadgen.workload.loading import load, of_trace, packaged
from loadgen.workload.overrides import placed
from loadgen.workload.schema import (
    STALL_TIMEOUT_NS,
    TIMEOUT_NS,
    Arrival,
    AtLeast,
    Closed,
    Constant,
    Delay,
    FromFile,
    FromTrace,
    Gamma,
    Length,
    Limits,
    Poisson,
    Ramp,
    Replay,
    Stage,
    Synthetic,
    Turns,
    Workload,
    json_schema,
    recipe_fingerprint,
    request_fingerprint,
)

__all__ = [
    "CPU_SHARE",
    "FAILURE_SHARE",
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
    "FromTrace",
    "Gamma",
    "Length",
    "Limits",
    "Listed",
    "LogNormal",
    "Normal",
    "Overrides",
    "Poisson",
    "Ramp",
    "Replay",
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
    "of_trace",
    "packaged",
    "placed",
    "recipe_fingerprint",
    "request_fingerprint",
]
