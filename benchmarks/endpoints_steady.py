r"""Is the steady window of MLPerf Endpoints the one that the reference detector finds?

    git clone https://github.com/mlcommons/endpoints
    python -m venv endpoints/.venv && endpoints/.venv/bin/pip install ./endpoints
    python benchmarks/endpoints_steady.py --reference endpoints \
        --reference-python endpoints/.venv/bin/python
    python -m venv checker && checker/bin/pip install endpoints-submission-cli
    python benchmarks/endpoints_steady.py --checker-python checker/bin/python

SIMULATED: each run is a closed loop in virtual time, on replicas whose speed is steady, drifts,
steps or comes in bursts, or of which one is lost with its requests. Length, concurrency, data set
and size of the change are drawn from the seed of the run. Its request records are written as an
event log in the format of mlcommons/endpoints, and both detectors judge it. The script prints a row
for each run, and how often both agree on the verdict, the window, the ramp-up, all plateaus, the
trends, the level shift and the needed duration.

With `--checker-python`, the submission checker of MLPerf Endpoints reads the block `steady_state`
of each run, and the script prints what it says about them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import rig
from endpoints_detector import find_detector
from msgspec.structs import replace
from numpy.typing import NDArray

from loadgen.core import seeds
from loadgen.core.schedule.build import build_schedule
from loadgen.core.workload import FixedTokens, Stage, Synthetic, Workload
from loadgen.core.workload.stages import Closed
from loadgen.mlperf.endpoints.steady_state_block import build_steady_state_block
from loadgen.mlperf.endpoints.steady_window import SteadyState, find_steady_state
from loadgen.mlperf.endpoints.super_passes import (
    NEVER_NS,
    QUERY_COLUMNS,
    QueryLog,
    build_query_log,
)
from loadgen.sim.engine.replica import Costs, Replica, ServerLimits
from loadgen.sim.engine.routing import create_router
from loadgen.sim.engine.system import ReplicaChange
from loadgen.sim.load_bounds import LoadBounds
from loadgen.sim.presets.preset import load_preset
from loadgen.sim.request_lengths import RequestSize
from loadgen.sim.simulation import Simulation
from loadgen.sim.virtual_records import RecordOptions, build_records

NS_PER_S = 1_000_000_000
PRESET = "gb300-vm"
BASE_SPEED = 0.3  # of the preset: fewer iterations per second make the simulation faster
MAX_BATCH_SIZE = 64
REQUEST_TIMEOUT_S = 600

SHAPES = ("steady", "drifting up", "drifting down", "stepping", "bursty", "losing replicas")
DURATION_RANGE_S = (900.0, 2400.0)
SUPER_PASSES_RANGE = (6, 60)  # of a run, about
MIN_DATASET_SIZE = 8
MEDIAN_INPUT_TOKENS = 200
MEDIAN_OUTPUT_TOKENS = 120
LENGTH_SIGMA = 0.5  # of the lognormal distribution of lengths
MIN_LENGTH_TOKENS = 4
MAX_LENGTH_IN_MEDIANS = 5
SPEEDUP_FRACTION = 0.6  # a server becomes less fast than it would become slow
DECIMALS = 6  # of compared numbers, because both detectors add floats in another order

DurationFactor = Callable[[float], float]
"""How many times as long an iteration takes as usual, at a time of the run in seconds."""


class SlowedReplica(Replica):
    """A simulated replica whose speed changes during the run."""

    def __init__(self, costs: Costs, limits: ServerLimits, duration_factor: DurationFactor) -> None:
        super().__init__(costs, limits)
        self._duration_factor = duration_factor

    def begin_iteration(self, now_ns: int) -> bool:
        """Begin an iteration, and change its duration by the factor of this time.

        Return False if the replica has nothing to compute, so that no iteration begins.
        """
        has_begun = super().begin_iteration(now_ns)
        if has_begun:
            usual_duration_ns = self.end_ns - now_ns
            duration_ns = int(usual_duration_ns * self._duration_factor(now_ns / NS_PER_S))
            self.end_ns = now_ns + duration_ns
            self.iteration_ends_ns[-1] = self.end_ns
        return has_begun


@dataclass(frozen=True)
class RunSpec:
    """The load and the servers of one simulated run.

    Attributes:
        shape: How the servers change, a name of SHAPES.
        description: The size and the time of that change, for the table.
        seed: The seed of the run.
        duration_s: The duration of the load.
        concurrency: The requests in flight.
        input_lengths: The prompt length of each request of the data set, in tokens.
        output_lengths: The response length of each request of the data set, in tokens.
        replicas: The number of replicas at the start.
        duration_factor: The change of their speed.
        replica_changes: The change of their number.
    """

    shape: str
    description: str
    seed: int
    duration_s: float
    concurrency: int
    input_lengths: NDArray[np.int64]
    output_lengths: NDArray[np.int64]
    replicas: int
    duration_factor: DurationFactor
    replica_changes: Sequence[ReplicaChange]

    @property
    def super_pass_size(self) -> int:
        """The queries of a super-pass, which is one pass over the data set."""
        return len(self.input_lengths)

    def request_size(self, request_number: int) -> RequestSize:
        """Return the lengths of a request. The data set is repeated in its order."""
        index = request_number % self.super_pass_size
        return RequestSize(int(self.input_lengths[index]), int(self.output_lengths[index]))


class SimulatedRun(NamedTuple):
    """A run, the times of its queries, and the steady state that loadgen finds in it."""

    spec: RunSpec
    query_log: QueryLog
    steady_state: SteadyState


# -- drawing the servers ---------------------------------------------------------------------------


class ServerChange(NamedTuple):
    """How the servers change during a run.

    Attributes:
        description: The size and the time of the change, for the table.
        duration_factor: The change of their speed.
        lost_replica_at_s: When one replica is lost, None if it is not.
    """

    description: str
    duration_factor: DurationFactor
    lost_replica_at_s: float | None = None


def draw_run_spec(shape: str, seed: int) -> RunSpec:
    """Draw the load and the servers of a run at random.

    `shape` is a name of SHAPES. The same shape and seed give the same run.
    """
    rng = seeds.generator(seed, shape)
    duration_s = float(rng.uniform(*DURATION_RANGE_S))
    replicas = int(rng.integers(1, 4))
    concurrency = int(rng.integers(4, 33))
    dataset_size = draw_dataset_size(rng, duration_s, concurrency)
    if shape == "losing replicas":
        replicas += 1  # so that at least one is left
        change = draw_replica_loss(rng, duration_s, replicas)
    else:
        change = draw_speed_change(shape, rng, duration_s)

    replica_changes = []
    if change.lost_replica_at_s is not None:
        lost_at_ns = int(change.lost_replica_at_s * NS_PER_S)
        replica_changes = [ReplicaChange(lost_at_ns, replicas - 1)]

    return RunSpec(
        shape=shape,
        description=change.description,
        seed=seed,
        duration_s=duration_s,
        concurrency=concurrency,
        input_lengths=draw_lengths(rng, MEDIAN_INPUT_TOKENS, dataset_size),
        output_lengths=draw_lengths(rng, MEDIAN_OUTPUT_TOKENS, dataset_size),
        replicas=replicas,
        duration_factor=change.duration_factor,
        replica_changes=replica_changes,
    )


def draw_dataset_size(rng: np.random.Generator, duration_s: float, concurrency: int) -> int:
    """Draw the number of requests in the data set.

    A run of this duration repeats such a data set about as often as SUPER_PASSES_RANGE says. How
    many queries the run completes is estimated from the preset of the server.
    """
    preset = load_preset(PRESET)
    response_ns = preset.response_ns(concurrency, MEDIAN_INPUT_TOKENS, MEDIAN_OUTPUT_TOKENS)
    response_s = response_ns / NS_PER_S / BASE_SPEED
    expected_queries = duration_s * concurrency / response_s
    super_passes = rng.integers(*SUPER_PASSES_RANGE)
    return max(MIN_DATASET_SIZE, round(expected_queries / super_passes))


def draw_lengths(rng: np.random.Generator, median: int, count: int) -> NDArray[np.int64]:
    """Draw lengths in tokens with this median from a lognormal distribution without its ends."""
    lengths = rng.lognormal(np.log(median), LENGTH_SIGMA, count)
    return np.clip(lengths, MIN_LENGTH_TOKENS, MAX_LENGTH_IN_MEDIANS * median).astype(np.int64)


def draw_replica_loss(rng: np.random.Generator, duration_s: float, replicas: int) -> ServerChange:
    """Draw when one of the replicas is lost: in the second half of a run."""
    lost_at_s = float(rng.uniform(0.5, 0.9)) * duration_s
    description = f"1 of {replicas} at {lost_at_s / duration_s:.0%}"
    return ServerChange(description, constant_factor, lost_at_s)


def draw_speed_change(shape: str, rng: np.random.Generator, duration_s: float) -> ServerChange:
    """Draw how the speed of the servers changes during a run of this duration."""
    if shape == "steady":
        return ServerChange("", constant_factor)
    if shape == "drifting up":
        return draw_drift(rng, duration_s, direction=1)
    if shape == "drifting down":
        return draw_drift(rng, duration_s, direction=-SPEEDUP_FRACTION)
    if shape == "stepping":
        return draw_steps(rng, duration_s)
    return draw_bursts(rng)


def draw_drift(rng: np.random.Generator, duration_s: float, direction: float) -> ServerChange:
    """Draw a gradual change of the speed that lasts until the end of the run.

    With a positive direction the servers become slower, and with a negative one faster.
    """
    start_share = float(rng.uniform(0.0, 0.7))
    change = float(rng.uniform(0.03, 0.5)) * direction
    description = f"{change:+.0%} from {start_share:.0%} on"
    return ServerChange(
        description, partial(ramp_factor, start_share * duration_s, duration_s, change)
    )


def draw_steps(rng: np.random.Generator, duration_s: float) -> ServerChange:
    """Draw one or two sudden changes of the speed in the second half of the run."""
    step_count = int(rng.integers(1, 3))
    step_shares = sorted(float(share) for share in rng.uniform(0.5, 0.95, step_count))
    changes = [float(change) for change in rng.uniform(-0.2, 0.6, step_count)]
    descriptions = [
        f"{change:+.0%} at {share:.0%}" for change, share in zip(changes, step_shares, strict=True)
    ]
    steps = [
        SpeedStep(share * duration_s, change)
        for share, change in zip(step_shares, changes, strict=True)
    ]
    return ServerChange(", ".join(descriptions), partial(step_factor, steps))


def draw_bursts(rng: np.random.Generator) -> ServerChange:
    """Draw slow phases that return periodically during the whole run."""
    period_s = float(rng.uniform(10, 400))
    slow_share = float(rng.uniform(0.05, 0.5))
    change = float(rng.uniform(0.1, 2.0))
    description = f"{change:+.0%} for {slow_share:.0%} of {period_s:.0f} s"
    return ServerChange(description, partial(burst_factor, period_s, slow_share, change))


class SpeedStep(NamedTuple):
    """A sudden change of how long iterations take. A change of 0.2 means 20 % longer."""

    at_s: float
    change: float


def constant_factor(_at_s: float) -> float:
    """Return the duration factor of a server whose speed never changes."""
    return 1.0


def ramp_factor(start_s: float, end_s: float, change: float, at_s: float) -> float:
    """Return the duration factor of a server that changes linearly from `start_s` to `end_s`.

    A change of 0.2 means that iterations take 20 % longer at the end.
    """
    progress = (at_s - start_s) / (end_s - start_s)
    return 1.0 + change * min(max(progress, 0.0), 1.0)


def step_factor(steps: Sequence[SpeedStep], at_s: float) -> float:
    """Return the duration factor of a server that changes suddenly: the sum of all past steps."""
    return 1.0 + sum(step.change for step in steps if at_s >= step.at_s)


def burst_factor(period_s: float, slow_share: float, change: float, at_s: float) -> float:
    """Return the duration factor of a server that is slow in the first part of each period.

    A change of 0.2 means that iterations take 20 % longer in that part.
    """
    is_slow = at_s % period_s < slow_share * period_s
    return 1.0 + change if is_slow else 1.0


# -- simulating ------------------------------------------------------------------------------------


def simulate_run(spec: RunSpec) -> SimulatedRun:
    """Simulate a run, and find its steady state with loadgen."""
    query_log = simulate_queries(spec)
    steady_state = find_steady_state(query_log, spec.super_pass_size, spec.concurrency)
    return SimulatedRun(spec, query_log, steady_state)


def simulate_queries(spec: RunSpec) -> QueryLog:
    """Simulate a run in virtual time and return the times of its queries.

    The server has the performance of a preset, but fewer iterations per second, which makes the
    simulation faster. Its speed changes as `spec` says.
    """
    preset = load_preset(PRESET)
    costs = preset.costs.at_speed(BASE_SPEED)
    limits = replace(preset.limits, max_batch_size=MAX_BATCH_SIZE, block_reuse=False)
    schedule = build_schedule(create_workload(spec), spec.seed)
    simulation = Simulation(
        schedule,
        spec.request_size,
        [SlowedReplica(costs, limits, spec.duration_factor) for _ in range(spec.replicas)],
        create_router([1.0] * spec.replicas, "round_robin"),
        LoadBounds(timeout_ns=REQUEST_TIMEOUT_S * NS_PER_S),
        changes=spec.replica_changes,
    )
    simulation.run()

    recorded = build_records(
        simulation.requests,
        simulation.iteration_ends_ns,
        schedule,
        RecordOptions(tokens_per_event=1, source="estimate", reports_cached_tokens=False),
    )
    records = recorded.records[:]  # one row of a structured array for each request
    return build_query_log({name: records[name] for name in QUERY_COLUMNS})


def create_workload(spec: RunSpec) -> Workload:
    """Return the closed loop of a run as a workload.

    A workload must have lengths. The simulation does not use them, because `RunSpec.request_size`
    gives it the lengths of the data set.
    """
    unused_length: Any = FixedTokens(value=1)
    stage = Stage(
        name="load",
        arrival=Closed(concurrency=spec.concurrency, ramp_ns=0),
        duration_ns=int(spec.duration_s * NS_PER_S),
    )
    return Workload(
        name="endpoints",
        requests=Synthetic(input_tokens=unused_length, output_tokens=unused_length),
        stages=(stage,),
    )


# -- the event log of mlcommons/endpoints ----------------------------------------------------------


class EventKind(IntEnum):
    """The events of a query, in the order in which they happen."""

    ISSUED = 0
    FIRST_TOKEN = 1
    COMPLETED = 2


class QueryEvent(NamedTuple):
    """An event of a query. Events are sorted by their fields: first by time, then by kind."""

    time_ns: int
    kind: EventKind
    query: int


def write_event_log(log: QueryLog, path: Path) -> None:
    """Write a run as `events.jsonl`, the event log of mlcommons/endpoints.

    The files core/record.py and core/types.py of that repository define the format.
    """
    with path.open("w") as file:
        for record in encode_event_log(log):
            file.write(json.dumps(record) + "\n")


def encode_event_log(log: QueryLog) -> Iterator[Mapping[str, object]]:
    """Yield the records of an event log in the order of time.

    The detector reads the events between the marks of the start and the end of performance
    tracking, so these marks enclose the run.
    """
    events = list_query_events(log)
    yield {
        "event_type": "session.start_performance_tracking",
        "timestamp_ns": events[0].time_ns,
    }
    for event in events:
        yield encode_event(event, later_tokens=int(log.later_tokens[event.query]))
    yield {
        "event_type": "session.stop_performance_tracking",
        "timestamp_ns": events[-1].time_ns,
    }


def list_query_events(log: QueryLog) -> list[QueryEvent]:
    """Return the events of all queries in the order of time.

    A query that failed has no completion, and possibly no first token.
    """
    times_by_kind = {
        EventKind.ISSUED: log.issued_ns,
        EventKind.FIRST_TOKEN: log.first_token_ns,
        EventKind.COMPLETED: log.completed_ns,
    }
    events = [
        QueryEvent(time_ns, kind, query)
        for kind, times_ns in times_by_kind.items()
        for query, time_ns in enumerate(times_ns.tolist())
        if time_ns != NEVER_NS
    ]
    return sorted(events)


def encode_event(event: QueryEvent, later_tokens: int) -> dict[str, object]:
    """Return the record of an event in the format of mlcommons/endpoints.

    The detector counts the tokens of a response in its text after the first chunk. It is run with a
    function that counts words, so the text has one word for each of these `later_tokens`.
    """
    record: dict[str, object] = {
        "timestamp_ns": event.time_ns,
        "sample_uuid": f"q{event.query}",
    }
    if event.kind == EventKind.ISSUED:
        return record | {"event_type": "sample.issued"}
    if event.kind == EventKind.FIRST_TOKEN:
        return record | {"event_type": "sample.recv_first"}
    chunks = ["w", " w" * later_tokens]
    return record | {"event_type": "sample.complete", "data": ["TextModelOutput", chunks]}


# -- the findings of both detectors ----------------------------------------------------------------


class IndexRange(NamedTuple):
    """A range of queries or super-passes, from the first one to the one after the last."""

    first: int
    end: int


class LevelShift(NamedTuple):
    """A step of TPOT to another level: the super-pass of the step and its size in percent."""

    super_pass: int
    change_percent: float


class NeededDuration(NamedTuple):
    """How long a window must last, and the name of the criterion that decides it."""

    seconds: float
    criterion: str


class Findings(NamedTuple):
    """What a detector finds in a run. Both detectors are compared field by field.

    Attributes:
        verdict: The shape of the run, a term of section 4.4 of the rules.
        window: The queries of the steady window, None without a window.
        ramp_up: The number of super-passes that are dropped at the start.
        plateaus: The super-passes of each plateau.
        trends: "up", "down" or "none" until the end of the run, by the name of the metric.
        level_shift: The step after the window, None without a step.
        needed_duration: The shortest window that would be reported, None without a window.
    """

    verdict: str
    window: IndexRange | None
    ramp_up: int
    plateaus: tuple[IndexRange, ...]
    trends: Mapping[str, str]
    level_shift: LevelShift | None
    needed_duration: NeededDuration | None


def summarize_loadgen_result(state: SteadyState) -> Findings:
    """Return the findings of loadgen's detector."""
    window = None
    if state.window is not None:
        window = IndexRange(state.window.first_query, state.window.end_query)

    level_shift = None
    if state.level_shift is not None:
        change_percent = round(100 * state.level_shift.change, DECIMALS)
        level_shift = LevelShift(state.level_shift.super_pass, change_percent)

    needed_duration = None
    if state.duration_need is not None:
        seconds = round(state.duration_need.needed_s, DECIMALS)
        needed_duration = NeededDuration(seconds, state.duration_need.decisive_term)

    return Findings(
        verdict=state.verdict,
        window=window,
        ramp_up=state.ramp_up_super_passes,
        plateaus=tuple(
            IndexRange(plateau.first_super_pass, plateau.end_super_pass)
            for plateau in state.plateaus
        ),
        trends=state.trends,
        level_shift=level_shift,
        needed_duration=needed_duration,
    )


def summarize_reference_result(
    result: Mapping[str, Any], super_pass_size: int, query_count: int
) -> Findings:
    """Return the findings of the reference detector.

    The detector counts super-passes from the end of its ramp-up ("warmup"), and Findings count them
    from the start of the run.

    Args:
        result: The JSON object that the detector returns.
        super_pass_size: The queries of a super-pass.
        query_count: The queries of the run.
    """
    ramp_up = result["warmup"]
    steady_state = result["steady_state"]
    anomaly = steady_state["anomaly"]
    trends = rename_trends(steady_state["global_trend"])
    return Findings(
        verdict=derive_verdict(steady_state["found"], anomaly["detected"], trends),
        window=read_reference_window(steady_state["window"], ramp_up, super_pass_size, query_count),
        ramp_up=ramp_up,
        plateaus=tuple(
            IndexRange(first + ramp_up, end + ramp_up) for first, end in anomaly["plateaus"]
        ),
        trends=trends,
        level_shift=read_reference_level_shift(anomaly, ramp_up),
        needed_duration=read_reference_needed_duration(steady_state["short_window"]),
    )


def read_reference_window(
    window: Mapping[str, int] | None, ramp_up: int, super_pass_size: int, query_count: int
) -> IndexRange | None:
    """Return the queries of the reference detector's window, or None if it found none.

    The window is a range of super-passes ("sp") that are counted after the ramp-up. The last
    super-pass of a run may be incomplete, so the range ends at the last query.
    """
    if window is None:
        return None
    first_query = (window["sp_lo"] + ramp_up) * super_pass_size
    end_query = (window["sp_hi"] + ramp_up) * super_pass_size
    return IndexRange(first_query, min(end_query, query_count))


def read_reference_level_shift(anomaly: Mapping[str, Any], ramp_up: int) -> LevelShift | None:
    """Return the step to another level that the reference detector found, or None.

    It counts super-passes ("sp") from the end of the ramp-up.
    """
    if not anomaly["detected"]:
        return None
    super_pass = anomaly["change_point_sp"] + ramp_up
    return LevelShift(super_pass, round(anomaly["delta_pct"], DECIMALS))


def read_reference_needed_duration(need: Mapping[str, Any] | None) -> NeededDuration | None:
    """Return how long a window must last according to the reference detector, None if unknown."""
    if need is None:
        return None
    return NeededDuration(round(need["min_duration_s"], DECIMALS), need["dominant"])


def rename_trends(directions: Mapping[str, str]) -> dict[str, str]:
    """Return the trends of the reference detector with loadgen's names of the directions.

    Metrics with too few super-passes for a test ("insufficient") are left out, as in loadgen.
    """
    names = {"up": "up", "down": "down", "steady": "none"}
    return {
        metric: names[direction]
        for metric, direction in directions.items()
        if direction != "insufficient"
    }


def derive_verdict(is_found: bool, has_level_shift: bool, trends: Mapping[str, str]) -> str:
    """Return the verdict that follows from the findings of the reference detector.

    The detector does not print a verdict. Section 4.4 of the rules has a table that gives it for a
    found window, a shift to another level and the trends of TPOT.
    """
    if not is_found:
        return "not found"
    if has_level_shift:
        return "anomaly"
    tpot_trends = {trends.get("tpot_p50"), trends.get("tpot_p90")}
    if "up" in tpot_trends:
        return "drifting_up"
    if "down" in tpot_trends:
        return "drifting_down"
    return "STEADY STATE"


# -- running the reference programs ----------------------------------------------------------------


def run_reference_detector(
    checkout: Path, python: str, runs: Sequence[SimulatedRun]
) -> list[Findings]:
    """Return the findings of the reference detector about each run.

    Args:
        checkout: A checkout of mlcommons/endpoints.
        python: The Python that has the dependencies of the detector.
        runs: The runs, whose event logs are written to a temporary folder.
    """
    with tempfile.TemporaryDirectory(prefix="loadgen-endpoints-") as scratch:
        jobs = []
        for number, run in enumerate(runs):
            log_path = Path(scratch) / f"{number}.jsonl"
            write_event_log(run.query_log, log_path)
            jobs.append({"events": str(log_path), "size": run.spec.super_pass_size})
        program = rig.BENCHMARKS_DIR / "endpoints_detector.py"
        results = run_json_lines_program([python, str(program), str(checkout)], jobs)

    return [
        summarize_reference_result(result, run.spec.super_pass_size, len(run.query_log.issued_ns))
        for result, run in zip(results, runs, strict=True)
    ]


class CheckerFinding(NamedTuple):
    """A result of the submission checker: "info" (passed), "warning" or "error" is its severity."""

    rule: str
    severity: str
    message: str


def run_submission_checker(python: str, runs: Sequence[SimulatedRun]) -> list[list[CheckerFinding]]:
    """Return the results of the submission checker for the block `steady_state` of each run.

    `python` is a Python with the package endpoints-submission-cli.
    """
    points = [
        {
            "concurrency": run.spec.concurrency,
            "runtime_settings": {"load_pattern": "concurrency", "runtime": {}},
            "steady_state": build_steady_state_block(run.steady_state, run.query_log),
        }
        for run in runs
    ]
    program = rig.BENCHMARKS_DIR / "endpoints_block_checker.py"
    findings_by_run = run_json_lines_program([python, str(program)], points)
    return [[CheckerFinding(*finding) for finding in findings] for findings in findings_by_run]


def run_json_lines_program(
    command: Sequence[str], inputs: Sequence[Mapping[str, Any]]
) -> list[Any]:
    """Run a program that reads JSON lines, and return the JSON values of the lines that it prints.

    It prints one line for each line of its input. Raises SystemExit if it fails; its stderr has
    then already appeared on the terminal.
    """
    completed = subprocess.run(
        command,
        input="".join(json.dumps(value) + "\n" for value in inputs),
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if completed.returncode:
        raise SystemExit(f"{command[1]} ended with an error, see above")
    return [json.loads(line) for line in completed.stdout.splitlines()]


# -- comparing the detectors -----------------------------------------------------------------------

FIELD_TITLES = {
    "verdict": "verdict",
    "window": "window",
    "ramp_up": "ramp-up",
    "plateaus": "plateaus",
    "trends": "trends",
    "level_shift": "level shift",
    "needed_duration": "needed duration",
}
DETECTOR_COLUMNS = (
    "servers",
    "change",
    "queries in flight",
    "super-pass",
    "loadgen",
    "reference",
    "differs in",
)


class DetectorComparison(NamedTuple):
    """What both detectors find in the same run."""

    spec: RunSpec
    loadgen: Findings
    reference: Findings

    def list_differing_fields(self) -> list[str]:
        """Return the fields of Findings in which the detectors differ."""
        return [field for field in Findings._fields if not self._agrees_on(field)]

    def _agrees_on(self, field: str) -> bool:
        """Return whether both detectors find the same. Windows may differ by one query."""
        if field == "window":
            return are_windows_close(self.loadgen.window, self.reference.window)
        is_equal: bool = getattr(self.loadgen, field) == getattr(self.reference, field)
        return is_equal


def are_windows_close(first: IndexRange | None, second: IndexRange | None) -> bool:
    """Return whether both ends of two windows differ by at most one query.

    Two missing windows are close, and a missing one is not close to any window.
    """
    if first is None or second is None:
        return first is second
    return abs(first.first - second.first) <= 1 and abs(first.end - second.end) <= 1


def format_detector_report(comparisons: Sequence[DetectorComparison]) -> str:
    """Return a table row for each run, and how often both detectors agree on each finding."""
    table = rig.format_table(
        DETECTOR_COLUMNS, [format_detector_row(comparison) for comparison in comparisons]
    )
    difference_counts = Counter(
        field for comparison in comparisons for field in comparison.list_differing_fields()
    )
    lines = [
        f"{title}: equal in {len(comparisons) - difference_counts[field]} of {len(comparisons)}"
        for field, title in FIELD_TITLES.items()
    ]
    return "\n".join([table, "", *lines])


def format_detector_row(comparison: DetectorComparison) -> list[str]:
    """Return the cells about a run: its servers, its load, both findings and their differences."""
    spec = comparison.spec
    differences = [FIELD_TITLES[field] for field in comparison.list_differing_fields()]
    return [
        spec.shape,
        spec.description,
        str(spec.concurrency),
        str(spec.super_pass_size),
        format_findings(comparison.loadgen),
        format_findings(comparison.reference),
        ", ".join(differences) or "-",
    ]


def format_findings(findings: Findings) -> str:
    """Return the verdict and the first and last query of the window."""
    if findings.window is None:
        return findings.verdict
    last_query = findings.window.end - 1
    return f"{findings.verdict}, {findings.window.first:,}-{last_query:,}"


def format_checker_report(
    runs: Sequence[SimulatedRun], findings_by_run: Sequence[Sequence[CheckerFinding]]
) -> str:
    """Return how many blocks the checker accepts, its findings by rule, and all its errors."""
    rule_counts: Counter[tuple[str, str]] = Counter()
    error_lines = []
    rejected_count = 0
    for run, findings in zip(runs, findings_by_run, strict=True):
        rule_counts.update((finding.rule, finding.severity) for finding in findings)
        errors = [finding for finding in findings if finding.severity == "error"]
        error_lines += [
            f"{run.spec.shape} {run.spec.description}: {error.rule}: {error.message}"
            for error in errors
        ]
        if errors:
            rejected_count += 1

    accepted_count = len(runs) - rejected_count
    return "\n".join(
        [
            f"submission checker: {accepted_count} of {len(runs)} blocks accepted",
            *(
                f"{rule}: {severity} for {count}"
                for (rule, severity), count in sorted(rule_counts.items())
            ),
            *error_lines,
        ]
    )


# -- the script ------------------------------------------------------------------------------------


def main() -> None:
    """Simulate the runs, and compare loadgen's findings with those of the reference programs."""
    args = parse_command_line()
    specs = [
        draw_run_spec(shape, seed)
        for shape in SHAPES
        for seed in range(args.seed, args.seed + args.runs)
    ]
    runs = [simulate_run(spec) for spec in specs]

    if args.reference is not None:
        reference_findings = run_reference_detector(args.reference, args.reference_python, runs)
        comparisons = [
            DetectorComparison(run.spec, summarize_loadgen_result(run.steady_state), reference)
            for run, reference in zip(runs, reference_findings, strict=True)
        ]
        print(format_detector_report(comparisons))

    if args.checker_python is not None:
        findings_by_run = run_submission_checker(args.checker_python, runs)
        print("\n" + format_checker_report(runs, findings_by_run))


def parse_command_line() -> argparse.Namespace:
    """Parse the options; skip the script if no reference program is named."""
    parser = rig.create_parser(__doc__)
    parser.add_argument("--reference", type=Path, help="a checkout of mlcommons/endpoints")
    parser.add_argument(
        "--reference-python", default=sys.executable, help="the Python that has its dependencies"
    )
    parser.add_argument(
        "--checker-python", help="a Python with the package endpoints-submission-cli"
    )
    parser.add_argument("--runs", type=int, default=10, help="runs of each shape")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first run of each shape")
    args = rig.parse_arguments(parser, runs=1)

    if args.reference is None and args.checker_python is None:
        rig.skip_script("it needs --reference, a checkout of mlcommons/endpoints")
    if args.reference is not None and find_detector(args.reference) is None:
        rig.skip_script(f"{args.reference} has no steady-state detector")
    return args


if __name__ == "__main__":
    main()
