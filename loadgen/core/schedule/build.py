"""Build the schedule of a workload before the run starts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from msgspec.structs import replace

from loadgen.core import seeds
from loadgen.core.schedule import arrivals
from loadgen.core.schedule.arrivals import Arrivals
from loadgen.core.schedule.schedule import Schedule, ScheduledStage
from loadgen.core.schedule.sessions import SessionSequence, build_sessions
from loadgen.core.workload import (
    Closed,
    Constant,
    Gamma,
    Poisson,
    Ramp,
    Replay,
    Stage,
    Trajectories,
    Workload,
)
from loadgen.core.workload.cache_fill import CacheFillStage, count_cache_fills


def build_schedule(workload: Workload, seed: int) -> Schedule:
    """Return the schedule of a workload, a pure function of the workload and the seed.

    Raises ValueError if nothing limits a closed loop.
    """
    sessions = build_sessions(workload.requests, seed, count_cache_fills(workload))
    stages: list[ScheduledStage] = []
    for index, stage in enumerate(workload.stages):
        position = _position_after(stages)
        randomness = _arrival_randomness(workload, seed, index)
        stages.append(_build_stage(stage, sessions, position, randomness))
    if _ends_with_first_user(workload):
        stages[-1] = replace(stages[-1], ends_with_first_user=True)
    return Schedule(stages=tuple(stages), sessions=sessions)


def _ends_with_first_user(workload: Workload) -> bool:
    """Return True if the load ends as soon as one of its virtual users has no further session."""
    requests = workload.requests
    last_stage = workload.stages[-1]
    return (
        isinstance(requests, Trajectories)
        and requests.end == "first"
        and isinstance(last_stage.arrival, Closed)
        and last_stage.count is not None
    )


def stage_at_load(stage: Stage, load: float) -> Stage:
    """Return a stage at another load: the rate of an open loop, or the users of a closed loop."""
    changes: dict[str, float] = {"rate": load}
    if isinstance(stage.arrival, Closed):
        changes = {"concurrency": round(load)}
    arrival = stage.arrival.model_copy(update=changes)
    return stage.model_copy(update={"arrival": arrival})


@dataclass(frozen=True)
class _StagePosition:
    """Where a stage begins in a schedule."""

    index: int
    start_ns: int | None  # None if the end of an earlier stage is not known
    first_session: int
    previous_users: int  # virtual users at the end of the previous stage


@dataclass(frozen=True)
class _ArrivalRandomness:
    """What the arrival times of a stage are drawn from. No two stages of a run have the same.

    Attributes:
        poisson_seed: The seed of Poisson arrivals. They are drawn as MLPerf LoadGen draws them, so
            that a run of LoadGen can be reproduced.
        base_seed: The seed of all other arrival processes, together with the index of the stage.
        stage_index: The index of the stage.
    """

    poisson_seed: int
    base_seed: int
    stage_index: int

    def create_generator(self) -> np.random.Generator:
        """Return the generator of all arrival processes but Poisson arrivals.

        A closed loop needs none, and is spared the import of `numpy.random`.
        """
        return seeds.generator(self.base_seed, "arrivals", self.stage_index)


def _position_after(stages: list[ScheduledStage]) -> _StagePosition:
    """Return the position of the next stage, given the stages before it.

    If it is a closed loop, its virtual users replace those that the previous stage has at its end.
    """
    if not stages:
        return _StagePosition(index=0, start_ns=0, first_session=0, previous_users=0)

    previous = stages[-1]
    users_at_end = previous.concurrency
    if previous.session_count is not None:
        # Of more users than sessions, some have nothing to send.
        users_at_end = min(previous.concurrency, previous.session_count)
    if previous.is_drained_at_end:
        users_at_end = 0

    return _StagePosition(
        index=previous.index + 1,
        start_ns=_planned_end_ns(previous),
        first_session=previous.session_numbers.stop,
        previous_users=users_at_end,
    )


def _planned_end_ns(stage: ScheduledStage) -> int | None:
    """Return when a stage ends, in ns from the start of the run, or None if that is not known.

    A closed loop with a count ends when its last request has, which may be before its duration.
    """
    if stage.start_ns is None or stage.length_ns is None or stage.is_end_unknown:
        return None
    return stage.start_ns + stage.length_ns


def _arrival_randomness(workload: Workload, seed: int, stage_index: int) -> _ArrivalRandomness:
    """Return what the arrival times of a stage are drawn from.

    It follows from the `schedule_seed` of the workload, or from the seed of the run if the workload
    sets none. The index of the stage is mixed in, so that no two stages have the same arrival
    times. One stage is the exception: a run of MLPerf LoadGen is reproduced only with its own seed
    (`schedule_rng_seed`), unchanged.
    """
    base_seed = seed if workload.schedule_seed is None else workload.schedule_seed
    if _has_arrivals_of_mlperf(workload, stage_index):
        poisson_seed = base_seed
    else:
        poisson_seed = seeds.derive_seed(base_seed, "arrivals", stage_index)

    return _ArrivalRandomness(poisson_seed, base_seed, stage_index)


def _has_arrivals_of_mlperf(workload: Workload, stage_index: int) -> bool:
    """Return True if a stage has the arrival times of MLPerf LoadGen with the same seed.

    LoadGen has a single Poisson stage, whose seed is set explicitly. The stage that corresponds to
    it here is the first measured one with Poisson arrivals.
    """
    has_explicit_seed = workload.schedule_seed is not None
    return has_explicit_seed and stage_index == _first_measured_poisson(workload)


def _first_measured_poisson(workload: Workload) -> int | None:
    """Return the index of the first measured stage with Poisson arrivals, or None."""
    for index, stage in enumerate(workload.stages):
        if stage.measured and isinstance(stage.arrival, Poisson):
            return index
    return None


def _build_stage(
    stage: Stage,
    sessions: SessionSequence,
    position: _StagePosition,
    randomness: _ArrivalRandomness,
) -> ScheduledStage:
    """Return one stage of a schedule, an open or a closed loop.

    Raises ValueError if nothing limits a closed loop.
    """
    if isinstance(stage.arrival, Closed):
        return _build_closed_stage(stage, stage.arrival, sessions, position)
    return _build_open_stage(stage, sessions, position, randomness)


def _build_closed_stage(
    stage: Stage, arrival: Closed, sessions: SessionSequence, position: _StagePosition
) -> ScheduledStage:
    """Return a closed loop, whose virtual users send the next request after a response.

    It has no arrival times. Without a count, as many requests are sent as fit into the duration,
    and the number of slots is not known. Raises ValueError if there is no duration either.
    """
    slot_count = None
    if stage.count is not None:
        slot_count = sessions.total_turns(position.first_session, stage.count)
    elif stage.duration_ns is None:
        raise ValueError(f"stage {stage.name!r} has neither a duration nor a count")

    return ScheduledStage(
        index=position.index,
        name=stage.name,
        measured=stage.measured,
        start_ns=position.start_ns,
        length_ns=stage.duration_ns,
        first_session=position.first_session,
        session_count=stage.count,
        concurrency=arrival.concurrency,
        arrivals_ns=np.zeros(0, np.int64),
        slot_count=slot_count,
        max_turns=sessions.max_turns,
        ramp_ns=arrival.ramp_ns or 0,
        inherited_users=position.previous_users,
        is_drained_at_end=isinstance(stage, CacheFillStage),
    )


def _build_open_stage(
    stage: Stage,
    sessions: SessionSequence,
    position: _StagePosition,
    randomness: _ArrivalRandomness,
) -> ScheduledStage:
    """Return one stage of a schedule whose sessions arrive at times that are drawn in advance."""
    stage_arrivals = _draw_arrivals(stage, randomness)
    session_count = len(stage_arrivals.offsets_ns)
    return ScheduledStage(
        index=position.index,
        name=stage.name,
        measured=stage.measured,
        start_ns=position.start_ns,
        length_ns=stage_arrivals.end_ns,
        first_session=position.first_session,
        session_count=session_count,
        concurrency=0,
        arrivals_ns=stage_arrivals.offsets_ns,
        slot_count=sessions.total_turns(position.first_session, session_count),
        max_turns=sessions.max_turns,
    )


def _draw_arrivals(stage: Stage, randomness: _ArrivalRandomness) -> Arrivals:
    """Return the arrival times of an open loop, drawn as its arrival process says.

    The duration or the number of requests of the stage ends the arrivals; only a Poisson stage may
    have minimums instead (`at_least`). Raises ValueError for a closed loop, whose requests arrive
    when earlier ones have ended.
    """
    poisson_seed = randomness.poisson_seed
    rng = randomness.create_generator()
    bounds = {"duration_ns": stage.duration_ns, "count": stage.count}
    match stage.arrival:
        case Constant(rate=rate):
            return arrivals.constant_arrivals(rate, **bounds)
        case Poisson(rate=rate) if stage.at_least is not None:
            return arrivals.poisson_arrivals_at_least(
                rate,
                seed=poisson_seed,
                min_duration_ns=stage.at_least.duration_ns,
                min_count=stage.at_least.count,
                # Complete passes over a data set of this many samples.
                multiple_of=stage.at_least.passes_of,
            )
        case Poisson(rate=rate):
            return arrivals.poisson_arrivals(rate, seed=poisson_seed, **bounds)
        case Gamma(rate=rate, burstiness=burstiness):
            return arrivals.gamma_arrivals(rate, burstiness=burstiness, rng=rng, **bounds)
        case Ramp(from_rate=from_rate, to_rate=to_rate):
            return arrivals.ramp_arrivals(from_rate, to_rate, rng=rng, **bounds)
        case Replay() as replay:
            return _replay_arrivals(replay, stage)

    raise ValueError(f"{stage.arrival!r} has no arrival times")


def _replay_arrivals(replay: Replay, stage: Stage) -> Arrivals:
    """Return the arrival times that a trace recorded, at the speed that the stage requests."""
    # Runs without a trace do not need this module.
    from loadgen.core.workload import trace_sessions

    recorded = trace_sessions.read_replay_source(replay)
    return arrivals.replayed_arrivals(
        recorded.due_ns,
        recorded.end_ns,
        speed=replay.speed,
        loop=replay.loop,
        duration_ns=stage.duration_ns,
        count=stage.count,
    )
