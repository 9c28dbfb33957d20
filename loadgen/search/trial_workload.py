"""The workload of a trial: a stage of a given load and length, after a warm-up if there is one."""

from __future__ import annotations

import msgspec

from loadgen.core.errors import UserError
from loadgen.core.schedule.build import stage_at_load
from loadgen.core.workload import Closed, Constant, Gamma, Poisson, Ramp, Stage, Workload
from loadgen.search.search_results import PlannedTrial

NS_PER_S = 1_000_000_000
WARMUP_STAGE = "warmup"
PLACEHOLDER_RATE = 1.0
"""The rate of the workload from which trials are made, until each gets a load of its own."""
ARRIVALS_WITH_RATE = (Constant, Gamma, Poisson)
"""The arrivals of open-loop stages that have a single rate, which a search can vary."""


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
    """Return the workload with a single stage of this length, from which all trials are made.

    A stage is a part of a load with one kind of arrivals. The new stage takes the place of all
    stages of the workload. It has the virtual users of a closed loop, or else Poisson arrivals,
    whose rate `with_load` sets for each trial.
    """
    stage = next(stage for stage in workload.stages if stage.measured)
    arrival = stage.arrival
    if not isinstance(arrival, Closed):
        arrival = Poisson.model_construct(rate=PLACEHOLDER_RATE)

    trial_stage = stage.model_copy(
        update={"arrival": arrival, "duration_ns": length_ns, "count": None, "at_least": None}
    )
    return workload.model_copy(update={"stages": (trial_stage,)})


def with_load(workload: Workload, load: float) -> Workload:
    """Return the workload at another load.

    The load is the rate of every open-loop stage, and the number of virtual users of every
    closed-loop stage. An open-loop stage that is not measured, such as a warm-up, keeps its rate.
    Raises UserError for a stage without a rate.
    """
    stages = []
    for stage in workload.stages:
        is_closed_loop_stage = isinstance(stage.arrival, Closed)
        if not is_closed_loop_stage:
            _check_rate(stage)
        varies_with_load = stage.measured or is_closed_loop_stage
        stages.append(stage_at_load(stage, load) if varies_with_load else stage)

    return workload.model_copy(update={"stages": tuple(stages)})


def _check_rate(stage: Stage) -> None:
    """Raise UserError for an open-loop stage without a rate, such as a replayed trace."""
    if isinstance(stage.arrival, ARRIVALS_WITH_RATE):
        return
    raise UserError(
        "unsupported",
        f"stage {stage.name!r} has no request rate that a search could change",
        "stages",
        "use poisson or constant arrivals",
    )


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
