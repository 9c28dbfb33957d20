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
from loadgen.sim.presets.preset import load_preset
from loadgen.sim.request_lengths import RequestSize

BENCHMARK = "llama2-70b"


def simulate_records(preset_name: str, test: rules.Test, rate: float) -> NDArray[np.void]:
    """Simulate a run of a test that begins with an empty server, and return its request records.

    The lengths are those of the synthetic data set, again and again.
    """
    dataset = mlperf_run.synthetic_data(test)
    requests: Any = dataset.requests
    inputs = requests.input_tokens.values
    outputs = requests.output_tokens.values
    workload = mlperf_run.build_workload(replace(test, samples=1), dataset, qps=rate)
    preset = load_preset(preset_name)
    result, _ = virtual.simulate(
        build_schedule(workload, test.seeds.schedule),
        lambda number: RequestSize(inputs[number % len(inputs)], outputs[number % len(outputs)]),
        SimulatedSystem(
            costs=preset.costs, limits=preset.limits, speeds=preset.speeds, routing=preset.routing
        ),
    )

    return result.records[:]


def run_from_empty(
    preset_name: str, scenario: Any, rate: float, length_s: float, round_name: str | None = None
) -> dict[str, Any]:
    """Simulate a run that begins with an empty server; return its result as a JSON object.

    `valid` is the result by the rules of the MLPerf round, `sustainable` that of the test for
    growth. `p99_ms` and the token rates are those of the test.
    """
    test = rules.create_test(BENCHMARK, scenario, round_name, min_duration_s=length_s)
    rows = simulate_records(preset_name, test, rate)
    manifest = RunManifest(
        state="finished", stages=(StagePlan(arrival=f"poisson {rate:g}/s", rate=rate),)
    )
    sustainable = summarize(manifest, rows).sustainable
    trace = mlperf.build_trace({name: rows[name].copy() for name in mlperf_run.COLUMNS})
    outcome = mlperf.judge_trace(
        trace, test, mlperf.MlperfRunFacts(target_qps=rate, simulated=True)
    )

    return {
        "seen": rig.describe_commit_and_date(),
        "preset": preset_name,
        "scenario": scenario,
        "round": test.round,
        "rate_per_s": rate,
        "length_s": length_s,
        "queries": outcome.queries,
        "valid": outcome.valid,
        "reasons": [reason.text for reason in outcome.reasons],
        "p99_ms": {check.metric: (check.percentile_ns or 0) / 1e6 for check in outcome.checks},
        "tokens_per_s_whole_run": outcome.full_run_tokens_per_s,
        "tokens_per_s_loadgen_window": outcome.completed_tokens_per_s,
        "sustainable": msgspec.to_builtins(sustainable),
    }


def main() -> None:
    """Print one JSON object for each rate, and append it to the file of `--into`."""
    parser = rig.create_parser(__doc__)
    parser.add_argument("preset", nargs="?", default="gb300-rack")
    parser.add_argument("scenario", nargs="?", default="server", choices=("server", "interactive"))
    parser.add_argument("rate", type=float, nargs="*", default=[3515.0])
    parser.add_argument("--length", type=float, default=1200.0, help="s")
    parser.add_argument("--round", dest="round_name")
    parser.add_argument(
        "--into", type=Path, help="a JSON file that keeps every run; those that are there stay"
    )

    args = rig.parse_arguments(parser, preset="gb300-vm", rate=[100.0], length=20.0)
    for rate in args.rate:
        result = run_from_empty(args.preset, args.scenario, rate, args.length, args.round_name)
        print(json.dumps(result, indent=1), flush=True)
        if args.into:
            stored_runs = json.loads(args.into.read_text()) if args.into.is_file() else []
            args.into.write_text(json.dumps([*stored_runs, result], indent=1) + "\n")


if __name__ == "__main__":
    main()
