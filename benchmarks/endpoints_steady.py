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

import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import rig
from endpoints_detector import find_detector
from msgspec.structs import replace
from numpy.typing import NDArray

from loadgen.core import seeds
from loadgen.core.results.record import ROW
from loadgen.core.schedule.build import build_schedule
from loadgen.core.workload import FixedTokens, Stage, Synthetic, Workload
from loadgen.core.workload.stages import Closed
from loadgen.mlperf.endpoints.steady_state_block import build_steady_state_block
from loadgen.mlperf.endpoints.steady_window import SteadyState, find_steady_state
from loadgen.mlperf.endpoints.super_passes import NEVER_NS, QueryLog, build_query_log
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
SHAPES = ("steady", "drifting up", "drifting down", "stepping", "bursty", "losing replicas")
LENGTH_RANGE_S = (900.0, 2400.0)
SUPER_PASSES_RANGE = (6, 60)  # of a run, about
MEDIAN_INPUT_TOKENS, MEDIAN_OUTPUT_TOKENS = 200, 120
WORD = " w"
COMPARED = (
    "verdict",
    "window",
    "ramp-up",
    "plateaus",
    "trends",
    "level shift",
    "needed duration",
)

SlownessAt = Callable[[float], float]
"""How many times as long an iteration takes at a time of the run, in seconds."""


class SlowedReplica(Replica):
    """A replica whose iterations take `slowness_at(seconds)` times as long."""

    def __init__(self, costs: Costs, limits: ServerLimits, slowness_at: SlownessAt) -> None:
        super().__init__(costs, limits)
        self._slowness_at = slowness_at

    def begin_iteration(self, now_ns: int) -> bool:
        """Begin an iteration, and lengthen it by the slowness of this time."""
        if not super().begin_iteration(now_ns):
            return False
        duration_ns = int((self.end_ns - now_ns) * self._slowness_at(now_ns / NS_PER_S))
        self.end_ns = now_ns + duration_ns
        self.iteration_ends_ns[-1] = self.end_ns
        return True


class DrawnRun(NamedTuple):
    """The load and the servers of one simulated run.

    Attributes:
        shape: How the speed of the servers changes, a name of SHAPES.
        description: The numbers of that change, for the table.
        length_s: The length of the load.
        concurrency: The requests in flight.
        dataset_size: The requests of the data set, which is the super-pass.
        inputs: The prompt lengths of the data set in tokens.
        outputs: The output lengths of the data set in tokens.
        replicas: The number of replicas.
        slowness_at: The change of their speed.
        replica_changes: The changes of their number.
    """

    shape: str
    description: str
    length_s: float
    concurrency: int
    dataset_size: int
    inputs: NDArray[np.int64]
    outputs: NDArray[np.int64]
    replicas: int
    slowness_at: SlownessAt
    replica_changes: Sequence[ReplicaChange] = ()


class Change(NamedTuple):
    """A change of speed, and its description."""

    slowness_at: SlownessAt
    description: str


# -- drawing servers -------------------------------------------------------------------------------


def draw_run(shape: str, seed: int) -> DrawnRun:
    """Draw a run from its seed."""
    rng = seeds.generator(seed, shape)
    length_s = float(rng.uniform(*LENGTH_RANGE_S))
    replicas = int(rng.integers(1, 4))
    concurrency = int(rng.integers(4, 33))
    dataset_size = draw_dataset_size(rng, length_s, concurrency)
    replica_changes: Sequence[ReplicaChange] = ()
    if shape == "losing replicas":
        replicas += 1
        lost_at_s = float(rng.uniform(0.5, 0.9)) * length_s
        replica_changes = (ReplicaChange(int(lost_at_s * NS_PER_S), replicas - 1),)
        change = Change(lambda _: 1.0, f"1 of {replicas} at {lost_at_s / length_s:.0%}")
    else:
        change = draw_change(shape, rng, length_s)

    return DrawnRun(
        shape=shape,
        description=change.description,
        length_s=length_s,
        concurrency=concurrency,
        dataset_size=dataset_size,
        inputs=_draw_lengths(rng, MEDIAN_INPUT_TOKENS, dataset_size),
        outputs=_draw_lengths(rng, MEDIAN_OUTPUT_TOKENS, dataset_size),
        replicas=replicas,
        slowness_at=change.slowness_at,
        replica_changes=replica_changes,
    )


def draw_dataset_size(rng: np.random.Generator, length_s: float, concurrency: int) -> int:
    """Draw the size of a data set that fits into a run a number of times in SUPER_PASSES_RANGE."""
    response_ns = load_preset(PRESET).response_ns(
        concurrency, MEDIAN_INPUT_TOKENS, MEDIAN_OUTPUT_TOKENS
    )
    expected_queries = length_s * concurrency / (response_ns / NS_PER_S / BASE_SPEED)
    return max(8, round(expected_queries / rng.integers(*SUPER_PASSES_RANGE)))


def _draw_lengths(rng: np.random.Generator, median: int, count: int) -> NDArray[np.int64]:
    """Draw lengths in tokens with this median, at most five times as long."""
    return np.clip(rng.lognormal(np.log(median), 0.5, count), 4, 5 * median).astype(np.int64)


def draw_change(shape: str, rng: np.random.Generator, length_s: float) -> Change:
    """Draw how the speed changes over a run of this length."""
    if shape == "steady":
        return Change(lambda _: 1.0, "")
    if shape in ("drifting up", "drifting down"):
        start = float(rng.uniform(0.0, 0.7))
        size = float(rng.uniform(0.03, 0.5)) * (1 if shape == "drifting up" else -0.6)
        slowness_at = partial(_ramp, start * length_s, length_s, size)
        return Change(slowness_at, f"{size:+.0%} from {start:.0%} on")
    if shape == "stepping":
        steps = sorted(float(step) for step in rng.uniform(0.5, 0.95, int(rng.integers(1, 3))))
        sizes = [float(size) for size in rng.uniform(-0.2, 0.6, len(steps))]
        slowness_at = partial(_stairs, [step * length_s for step in steps], sizes)
        pairs = zip(sizes, steps, strict=True)
        return Change(slowness_at, ", ".join(f"{size:+.0%} at {step:.0%}" for size, step in pairs))

    period_s = float(rng.uniform(10, 400))
    share = float(rng.uniform(0.05, 0.5))
    size = float(rng.uniform(0.1, 2.0))
    description = f"{size:+.0%} for {share:.0%} of {period_s:.0f} s"
    return Change(partial(_bursts, period_s, share, size), description)


def _ramp(start_s: float, end_s: float, size: float, at_s: float) -> float:
    """Return the slowness of a server that changes by `size` between two times."""
    progress = min(max((at_s - start_s) / (end_s - start_s), 0.0), 1.0)
    return 1.0 + size * progress


def _stairs(steps_s: Sequence[float], sizes: Sequence[float], at_s: float) -> float:
    """Return the slowness of a server that changes by a size at each of these times."""
    return 1.0 + sum(size for step_s, size in zip(steps_s, sizes, strict=True) if at_s >= step_s)


def _bursts(period_s: float, share: float, size: float, at_s: float) -> float:
    """Return the slowness of a server that is slower in a share of each period."""
    return 1.0 + (size if at_s % period_s < share * period_s else 0.0)


# -- running them ----------------------------------------------------------------------------------


def simulate_queries(run: DrawnRun, seed: int) -> QueryLog:
    """Simulate a run in virtual time and return its queries."""
    preset = load_preset(PRESET)
    costs = preset.costs.at_speed(BASE_SPEED)
    limits = replace(preset.limits, max_batch_size=64, block_reuse=False)
    schedule = build_schedule(_create_workload(run), seed)
    simulation = Simulation(
        schedule,
        partial(_request_size, run),
        [SlowedReplica(costs, limits, run.slowness_at) for _ in range(run.replicas)],
        create_router([1.0] * run.replicas, "round_robin"),
        LoadBounds(timeout_ns=600 * NS_PER_S),
        changes=run.replica_changes,
    )
    simulation.run()

    recorded = build_records(
        simulation.requests,
        simulation.iteration_ends_ns,
        schedule,
        RecordOptions(tokens_per_event=1, source="estimate", reports_cached_tokens=False),
    )
    rows = recorded.records[:]
    return build_query_log({name: rows[name] for name in ROW.names or ()})


def _create_workload(run: DrawnRun) -> Workload:
    """Return the closed loop of a run. Its lengths are not used."""
    one_token: Any = FixedTokens(value=1)
    stage = Stage(
        name="load",
        arrival=Closed(concurrency=run.concurrency, ramp_ns=0),
        duration_ns=int(run.length_s * NS_PER_S),
    )
    return Workload(
        name="endpoints",
        requests=Synthetic(input_tokens=one_token, output_tokens=one_token),
        stages=(stage,),
    )


def _request_size(run: DrawnRun, number: int) -> RequestSize:
    """Return the lengths of a request. The data set is repeated in its order."""
    index = number % run.dataset_size
    return RequestSize(int(run.inputs[index]), int(run.outputs[index]))


# -- the event log of mlcommons/endpoints ----------------------------------------------------------


def write_event_log(log: QueryLog, path: Path) -> None:
    """Write a run as `events.jsonl`. Its format: `core/record.py` and `core/types.py` there.

    The detector counts the tokens of the text after the first chunk. The text has one word for each
    of them.
    """
    with open(path, "w") as file:
        for event in _events_in_order(log):
            file.write(json.dumps(event) + "\n")


def _events_in_order(log: QueryLog) -> Iterator[Mapping[str, Any]]:
    """Yield the events of a run in the order of time, between the marks of the tracked part."""
    start_ns = int(log.issued_ns[0])
    yield {"event_type": "session.start_performance_tracking", "timestamp_ns": start_ns}

    numbers = np.arange(len(log.issued_ns))
    times_ns = np.concatenate([log.issued_ns, log.first_token_ns, log.completed_ns])
    kinds = np.repeat([0, 1, 2], len(numbers))
    queries = np.tile(numbers, 3)
    for index in np.lexsort((queries, kinds, times_ns)):
        if times_ns[index] == NEVER_NS:
            continue
        query = int(queries[index])
        event = {"timestamp_ns": int(times_ns[index]), "sample_uuid": f"q{query}"}
        if kinds[index] == 0:
            yield {"event_type": "sample.issued", **event}
        elif kinds[index] == 1:
            yield {"event_type": "sample.recv_first", **event}
        else:
            chunks = ["w", WORD * int(log.later_tokens[query])]
            yield {"event_type": "sample.complete", **event, "data": ["TextModelOutput", chunks]}

    end_ns = int(times_ns.max())
    yield {"event_type": "session.stop_performance_tracking", "timestamp_ns": end_ns}


# -- comparing -------------------------------------------------------------------------------------


def run_program(command: Sequence[str], jobs: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Run a program that reads a line of JSON for each job, and return the lines that it prints.

    Raises SystemExit if it fails. It has then printed its error.
    """
    completed = subprocess.run(
        command,
        input="".join(json.dumps(job) + "\n" for job in jobs),
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if completed.returncode:
        raise SystemExit(f"{command[1]} ended with an error, see above")
    return [json.loads(line) for line in completed.stdout.splitlines()]


def run_reference(
    checkout: Path, python: str, runs: Sequence[DrawnRun], logs: Sequence[QueryLog]
) -> list[Judgement]:
    """Return the judgements of the reference detector, which runs in its own process."""
    with tempfile.TemporaryDirectory(prefix="loadgen-endpoints-") as scratch:
        jobs = []
        for number, (run, log) in enumerate(zip(runs, logs, strict=True)):
            path = Path(scratch) / f"{number}.jsonl"
            write_event_log(log, path)
            jobs.append({"events": str(path), "size": run.dataset_size})
        program = rig.BENCHMARKS_DIR / "endpoints_detector.py"
        results = run_program([python, str(program), str(checkout)], jobs)

    return [
        read_reference_judgement(result, run.dataset_size, len(log.issued_ns))
        for result, run, log in zip(results, runs, logs, strict=True)
    ]


class Judgement(NamedTuple):
    """What a detector says about a run, in the terms in which both are compared.

    Attributes:
        verdict: The shape, by rules §4.4.
        window: The first query of the window and the one after its last, None without a window.
        ramp_up: The super-passes that are dropped at the start.
        plateaus: The first super-pass of each plateau and the one after its last.
        trends: The direction of each watched metric to the end of the run.
        level_shift: The super-pass of the step and its size in percent, None without a step.
        needed_s: The needed duration of the window and the criterion that decides it.
    """

    verdict: str
    window: tuple[int, int] | None
    ramp_up: int
    plateaus: tuple[tuple[int, int], ...]
    trends: Mapping[str, str]
    level_shift: tuple[int, float] | None
    needed_s: tuple[float, str] | None


def read_loadgen_judgement(state: SteadyState) -> Judgement:
    """Return the judgement of loadgen."""
    window = state.window
    shift = state.level_shift
    need = state.duration_need
    return Judgement(
        verdict=state.verdict,
        window=(window.first_query, window.end_query) if window else None,
        ramp_up=state.ramp_up_super_passes,
        plateaus=tuple(
            (plateau.first_super_pass, plateau.end_super_pass) for plateau in state.plateaus
        ),
        trends=state.trends,
        level_shift=(shift.super_pass, round(100 * shift.change, 6)) if shift else None,
        needed_s=(round(need.needed_s, 6), need.decisive_term) if need else None,
    )


def read_reference_judgement(result: Mapping[str, Any], size: int, queries: int) -> Judgement:
    """Return the judgement of the reference detector, whose indices start after its ramp-up.

    The detector prints `found`, `anomaly` and the trends, not the verdict. The verdict follows from
    them by the table of shapes in rules §4.4. It judges the gating metrics only.
    """
    steady_state = result["steady_state"]
    ramp_up = result["warmup"]
    window = steady_state["window"]
    anomaly = steady_state["anomaly"]
    short = steady_state["short_window"]
    directions = {"up": "up", "down": "down", "steady": "none"}
    trends = {
        name: directions[direction]
        for name, direction in steady_state["global_trend"].items()
        if direction != "insufficient"
    }
    return Judgement(
        verdict=_verdict_by_rules(steady_state["found"], anomaly["detected"], trends),
        window=_query_range(window, ramp_up, size, queries) if window else None,
        ramp_up=ramp_up,
        plateaus=tuple((first + ramp_up, end + ramp_up) for first, end in anomaly["plateaus"]),
        trends=trends,
        level_shift=(ramp_up + anomaly["change_point_sp"], round(anomaly["delta_pct"], 6))
        if anomaly["detected"]
        else None,
        needed_s=(round(short["min_duration_s"], 6), short["dominant"]) if short else None,
    )


def _verdict_by_rules(is_found: bool, has_level_shift: bool, trends: Mapping[str, str]) -> str:
    """Return the verdict of rules §4.4 for the findings of the reference detector."""
    if not is_found:
        return "not found"
    if has_level_shift:
        return "anomaly"
    directions = {trends.get("tpot_p50"), trends.get("tpot_p90")}
    if "up" in directions:
        return "drifting_up"
    return "drifting_down" if "down" in directions else "STEADY STATE"


def _query_range(
    window: Mapping[str, Any], ramp_up: int, size: int, queries: int
) -> tuple[int, int]:
    """Return the first query of a window of the reference, and the one after its last."""
    first = (window["sp_lo"] + ramp_up) * size
    return first, min((window["sp_hi"] + ramp_up) * size, queries)


def find_differences(ours: Judgement, theirs: Judgement) -> list[str]:
    """Return the names of COMPARED in which two judgements differ. A window may by one query."""
    return [
        name
        for name, our_value, their_value in zip(COMPARED, ours, theirs, strict=True)
        if our_value != their_value
        and not (name == "window" and _is_within_one_query(ours.window, theirs.window))
    ]


def _is_within_one_query(ours: tuple[int, int] | None, theirs: tuple[int, int] | None) -> bool:
    """Return whether both ends of two windows differ by at most one query."""
    if ours is None or theirs is None:
        return ours is theirs
    return all(
        abs(our_end - their_end) <= 1 for our_end, their_end in zip(ours, theirs, strict=True)
    )


# -- the submission checker ------------------------------------------------------------------------


def check_blocks(
    python: str,
    runs: Sequence[DrawnRun],
    states: Sequence[SteadyState],
    logs: Sequence[QueryLog],
) -> None:
    """Let the submission checker read the block of each run, and print what it says how often."""
    points = [
        {
            "concurrency": run.concurrency,
            "runtime_settings": {"load_pattern": "concurrency", "runtime": {}},
            "steady_state": build_steady_state_block(state, log),
        }
        for run, state, log in zip(runs, states, logs, strict=True)
    ]
    program = rig.BENCHMARKS_DIR / "endpoints_block_checker.py"
    findings = run_program([python, str(program)], points)

    rejected = sum(any(finding[1] == "error" for finding in of_point) for of_point in findings)
    print(f"\nsubmission checker: {len(points) - rejected} of {len(points)} blocks accepted")
    counts = Counter((rule, severity) for of_point in findings for rule, severity, _ in of_point)
    for (rule, severity), count in sorted(counts.items()):
        print(f"{rule}: {severity} for {count}")
    for run, of_point in zip(runs, findings, strict=True):
        for rule, severity, message in of_point:
            if severity == "error":
                print(f"{run.shape} {run.description}: {rule}: {message}")


# -- the script ------------------------------------------------------------------------------------


def print_table(
    runs: Sequence[DrawnRun], ours: Sequence[Judgement], theirs: Sequence[Judgement]
) -> None:
    """Print a row for each run, and how often both detectors agree."""
    print(
        "| servers | change | queries in flight | super-pass | loadgen | reference | differs in |"
    )
    print("|---|---|---:|---:|---|---|---|")
    differences = [find_differences(*pair) for pair in zip(ours, theirs, strict=True)]
    for run, our_result, their_result, names in zip(runs, ours, theirs, differences, strict=True):
        print(
            f"| {run.shape} | {run.description} | {run.concurrency} | {run.dataset_size} "
            f"| {_describe(our_result)} | {_describe(their_result)} | {', '.join(names) or '-'} |"
        )

    print()
    for name in COMPARED:
        equal = sum(name not in names for names in differences)
        print(f"{name}: equal in {equal} of {len(runs)}")


def _describe(judgement: Judgement) -> str:
    """Return the verdict and the window of a judgement for the table."""
    if judgement.window is None:
        return judgement.verdict
    first, end = judgement.window
    return f"{judgement.verdict}, {first:,}-{end - 1:,}"


def main() -> None:
    """Simulate the runs, let both detectors judge them, and print the table."""
    parser = rig.create_parser(__doc__)
    parser.add_argument("--reference", type=Path, help="a checkout of mlcommons/endpoints")
    parser.add_argument(
        "--reference-python", default=sys.executable, help="the Python that has its dependencies"
    )
    parser.add_argument(
        "--checker-python", help="a Python with the package endpoints-submission-cli"
    )
    parser.add_argument("--runs", type=int, default=10, help="of each shape")
    parser.add_argument("--seed", type=int, default=0, help="of the first run of each shape")
    args = rig.parse_arguments(parser, runs=1)

    if args.reference is None and args.checker_python is None:
        rig.skip_script("it needs --reference, a checkout of mlcommons/endpoints")
    if args.reference is not None and find_detector(args.reference) is None:
        rig.skip_script(f"{args.reference} has no steady-state detector")

    seed_range = range(args.seed, args.seed + args.runs)
    shapes_and_seeds = [(shape, seed) for shape in SHAPES for seed in seed_range]
    runs = [draw_run(shape, seed) for shape, seed in shapes_and_seeds]
    logs = [
        simulate_queries(run, seed) for run, (_, seed) in zip(runs, shapes_and_seeds, strict=True)
    ]
    states = [
        find_steady_state(log, run.dataset_size, run.concurrency)
        for run, log in zip(runs, logs, strict=True)
    ]

    if args.reference is not None:
        ours = [read_loadgen_judgement(state) for state in states]
        print_table(runs, ours, run_reference(args.reference, args.reference_python, runs, logs))
    if args.checker_python is not None:
        check_blocks(args.checker_python, runs, states, logs)


if __name__ == "__main__":
    main()
