"""The workload of a trial: a stage of a given load and length, after a warm-up if there is one."""

from __future__ import annotations

import msgspec

from loadgen.core.errors import UserError
from loadgen.core.schedule.build import stage_at_load
from loadgen.core.workload import Closed, Poisson, Ramp, Stage, Workload
from loadgen.search.search_results import PlannedTrial

NS_PER_S = 1_000_000_000
WARMUP_STAGE = "warmup"


class TrialWorkloadFactory(msgspec.Struct, frozen=True):
    """Makes the workload of each trial of a search.

    Attributes:
        base: The workload with a single stage of the full length of a trial.
        warmup_ns: The length of the warm-up before each trial; 0 for none.
    """

    base: Workload
    warmup_ns: int = 0

    def make_workload(self, trial: PlannedTrial) -> Workload:
        """Return the workload of a trial, at its load and with its length, after a warm-up."""
        workload = with_load(with_length_factor(self.base, trial.length_factor), trial.load)
        if not self.warmup_ns or trial.warmup_load is None:
            return workload
        warmup = warmup_stage(workload.stages[0], trial.warmup_load, self.warmup_ns)
        return workload.model_copy(update={"stages": (warmup, *workload.stages)})


def as_trial_workload(workload: Workload, length_ns: int) -> Workload:
    """Return the workload with one stage of this length in place of its stages.

    The stage has the virtual users of a closed loop, or else Poisson arrivals. It starts with an
    empty server.
    """
    stage = next(stage for stage in workload.stages if stage.measured)
    arrival = stage.arrival
    if not isinstance(arrival, Closed):
        arrival = Poisson.model_construct(rate=1.0)
    trial_stage = stage.model_copy(
        update={"arrival": arrival, "duration_ns": length_ns, "count": None, "at_least": None}
    )
    return workload.model_copy(update={"stages": (trial_stage,)})


def with_load(workload: Workload, load: float) -> Workload:
    """Return the workload at another load.

    That is the rate of its measured open-loop stages, or the virtual users of its closed-loop
    stages. Raises UserError for a stage without a rate.
    """
    stages = []
    for stage in workload.stages:
        is_closed_loop = isinstance(stage.arrival, Closed)
        if not is_closed_loop and not hasattr(stage.arrival, "rate"):
            problem = f"stage {stage.name!r} has no rate to search over"
            raise UserError("unsupported", problem, "stages", "use poisson or constant arrivals")
        has_load = stage.measured or is_closed_loop
        stages.append(stage_at_load(stage, load) if has_load else stage)
    return workload.model_copy(update={"stages": tuple(stages)})


def with_length_factor(workload: Workload, length_factor: float) -> Workload:
    """Return the workload with the duration of each stage multiplied by a factor."""
    stages = []
    for stage in workload.stages:
        if stage.duration_ns is None:
            stages.append(stage)
        else:
            duration_ns = round(stage.duration_ns * length_factor)
            stages.append(stage.model_copy(update={"duration_ns": duration_ns}))
    return workload.model_copy(update={"stages": tuple(stages)})


def warmup_stage(trial_stage: Stage, load: float, duration_ns: int) -> Stage:
    """Return an unmeasured stage in which the rate rises from 0 to `load`.

    A server that scales out gets the time to do so without a backlog of requests.
    """
    return trial_stage.model_copy(
        update={
            "name": WARMUP_STAGE,
            "arrival": Ramp.model_construct(from_rate=0.0, to_rate=load),
            "duration_ns": duration_ns,
            "count": None,
            "at_least": None,
            "measured": False,
        }
    )


def is_closed_loop(workload: Workload) -> bool:
    """Return whether virtual users send the measured load."""
    return any(isinstance(stage.arrival, Closed) for stage in workload.stages if stage.measured)
