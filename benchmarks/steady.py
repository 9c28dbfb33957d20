"""Is a rate of the MLPerf-style Server or Interactive test sustained?

    python benchmarks/steady.py gb300-rack server 3515 --length 1200

SIMULATED: one run of any length for each rate, with the engine, the rules and the test for growth,
but without files of a run. 20 minutes of a rack take about one CPU-minute. It prints one JSON
object for each rate. `loadgen mlperf server --find-peak` finds such rates itself, in more runs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import rig
from msgspec.structs import replace
from numpy.typing import NDArray

from loadgen.core.results.manifest import RunManifest, StagePlan
from loadgen.core.run_summary import summarize
from loadgen.core.schedule.build import build_schedule
from loadgen.mlperf import result as mlperf
from loadgen.mlperf import rules
from loadgen.mlperf import run as mlperf_run
from loadgen.sim import virtual_backend as virtual
from loadgen.sim.engine.system import SimulatedSystem
from loadgen.sim.presets.preset import Preset, load_preset
from loadgen.sim.request_lengths import RequestSize

BENCHMARK = "llama2-70b"


def create_system(preset: Preset) -> SimulatedSystem:
    """Return the simulated system of a preset."""
    return SimulatedSystem(
        costs=preset.costs, limits=preset.limits, speeds=preset.speeds, routing=preset.routing
    )


def simulate_records(preset_name: str, test: rules.Test, rate_per_s: float) -> NDArray[np.void]:
    """Simulate a run of a test that begins with an empty server, and return its request records.

    The requests have the lengths of the synthetic data set, which is repeated as often as needed.
    """
    dataset = mlperf_run.synthetic_data(test)
    requests: Any = dataset.requests
    input_tokens = requests.input_tokens.values
    output_tokens = requests.output_tokens.values

    def size_of_request(number: int) -> RequestSize:
        index = number % len(input_tokens)
        return RequestSize(input_tokens[index], output_tokens[index])

    workload = mlperf_run.build_workload(replace(test, samples=1), dataset, qps=rate_per_s)
    schedule = build_schedule(workload, test.seeds.schedule)
    system = create_system(load_preset(preset_name))
    result, _ = virtual.simulate(schedule, size_of_request, system)
    return result.records[:]


def judge_growth(records: NDArray[np.void], rate_per_s: float) -> dict[str, Any]:
    """Return whether the rate is sustained by the test for growth, as a JSON object.

    This is the block `sustainable` of the summary of a run with these request records.
    """
    stage = StagePlan(arrival=f"poisson {rate_per_s:g}/s", rate=rate_per_s)
    manifest = RunManifest(state="finished", stages=(stage,))
    sustainable: dict[str, Any] = msgspec.to_builtins(summarize(manifest, records).sustainable)
    return sustainable


def judge_by_rules(
    records: NDArray[np.void], test: rules.Test, rate_per_s: float
) -> mlperf.MlperfResult:
    """Return the result of the test by the rules of its MLPerf round."""
    columns = {name: records[name].copy() for name in mlperf_run.COLUMNS}
    facts = mlperf.MlperfRunFacts(target_qps=rate_per_s, simulated=True)
    return mlperf.judge_trace(mlperf.build_trace(columns), test, facts)


def run_from_empty(
    preset_name: str,
    scenario: rules.Scenario,
    rate_per_s: float,
    length_s: float,
    round_name: str | None = None,
) -> dict[str, Any]:
    """Simulate a run that begins with an empty server; return its result as a JSON object.

    `valid` is the result by the rules of the MLPerf round, and `sustainable` that of the test for
    growth. `p99_ms` has the latencies that the rules limit, and the token rates are those of the
    rules: over the full run, and over the window of MLPerf LoadGen.
    """
    test = rules.create_test(BENCHMARK, scenario, round_name, min_duration_s=length_s)
    records = simulate_records(preset_name, test, rate_per_s)
    result = judge_by_rules(records, test, rate_per_s)

    return {
        "seen": rig.describe_commit_and_date(),
        "preset": preset_name,
        "scenario": scenario,
        "round": test.round,
        "rate_per_s": rate_per_s,
        "length_s": length_s,
        "queries": result.queries,
        "valid": result.valid,
        "reasons": [reason.text for reason in result.reasons],
        "p99_ms": {check.metric: (check.percentile_ns or 0) / 1e6 for check in result.checks},
        "tokens_per_s_whole_run": result.full_run_tokens_per_s,
        "tokens_per_s_loadgen_window": result.completed_tokens_per_s,
        "sustainable": judge_growth(records, rate_per_s),
    }


def append_to_file(path: Path, result: dict[str, Any]) -> None:
    """Append a result to a JSON file with a list of results, which need not exist yet."""
    stored_results = json.loads(path.read_text()) if path.is_file() else []
    path.write_text(json.dumps([*stored_results, result], indent=1) + "\n")


def main() -> None:
    """Print one JSON object for each rate, and append it to the file of `--into`."""
    parser = rig.create_parser(__doc__)
    parser.add_argument("preset", nargs="?", default="gb300-rack")
    parser.add_argument("scenario", nargs="?", default="server", choices=("server", "interactive"))
    parser.add_argument("rate", type=float, nargs="*", default=[3515.0])
    parser.add_argument("--length", type=float, default=1200.0, help="s")
    parser.add_argument("--round", dest="round_name")
    parser.add_argument("--into", type=Path, help="a JSON file to which the results are appended")
    args = rig.parse_arguments(parser, preset="gb300-vm", rate=[100.0], length=20.0)

    for rate_per_s in args.rate:
        result = run_from_empty(
            args.preset, args.scenario, rate_per_s, args.length, args.round_name
        )
        print(json.dumps(result, indent=1), flush=True)
        if args.into:
            append_to_file(args.into, result)


if __name__ == "__main__":
    main()
