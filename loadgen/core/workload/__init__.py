"""Read workload files and the options that change them, and report all mistakes in them.

`schema.py` defines the file with pydantic, `loading.py` reads it, and `diagnostics.py` reports
mistakes with their place. docs/reference/workload-file.md describes the keys.
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
from loadgen.core.workload.file_schema import file_json_schema, workload_json_schema
from loadgen.core.workload.fingerprints import (
    recipe_fingerprint,
    request_fingerprint,
    work_fingerprint,
)
from loadgen.core.workload.flags import Overrides, parse_concurrency_levels, read_flags
from loadgen.core.workload.loading import load, workload_from_trace
from loadgen.core.workload.overrides import with_unique_prompts
from loadgen.core.workload.request_classes import Mix, requests_by_class
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
from loadgen.core.workload.trajectories import Trajectories
from loadgen.core.workload.workload_files import packaged_files
