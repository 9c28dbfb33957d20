"""Workload files and the flags that change them: what is sent, when, and which SLO applies.

`schema.py` describes the file with pydantic models, `diagnostics.py` reports the mistakes in it,
and `fingerprints.py` hashes it. `loading.py`, `traces.py`, `dataset.py` and `data_files.py` read
files; everything else is values. Nothing is drawn here, no prompt is made, and no clock is read.
docs/workloads.md describes the keys.
"""

from loadgen.core.slo import Slo, Term
from loadgen.core.workload.distributions import (
    Delay,
    Empirical,
    EmpiricalDuration,
    EmpiricalTokens,
    Fixed,
    FixedDuration,
    FixedTokens,
    Length,
    Listed,
    ListedTokens,
    LogNormal,
    LogNormalDuration,
    LogNormalTokens,
    Normal,
    NormalDuration,
    NormalTokens,
    Uniform,
    UniformDuration,
    UniformTokens,
)
from loadgen.core.workload.file_schema import json_schema, schema_of
from loadgen.core.workload.fingerprints import (
    recipe_fingerprint,
    request_fingerprint,
    work_fingerprint,
)
from loadgen.core.workload.flags import Overrides, levels, read_flags
from loadgen.core.workload.loading import load, of_trace, packaged
from loadgen.core.workload.overrides import placed
from loadgen.core.workload.request_classes import Mix, parts
from loadgen.core.workload.request_kinds import (
    FromFile,
    FromTrace,
    Synthetic,
    Turns,
)
from loadgen.core.workload.schema import Workload
from loadgen.core.workload.stages import (
    Arrival,
    AtLeast,
    Closed,
    Constant,
    Gamma,
    Poisson,
    Ramp,
    Replay,
    Stage,
)
from loadgen.core.workload.tasks import Task, TaskStep, Tool
