"""How well does a simulator preset that was fitted on two loads predict the others of a rehearsal?

    python benchmarks/gpu/fit.py OUT [--bandwidth TB/s] [--peak TFLOPS]   # OUT: from rehearse.py
    python benchmarks/gpu/fit.py --smoke               # runs a simulated rehearsal of its own first

Two constants are fitted: the compute share on the median TTFT of the load `alone`, one request at a
time, and the overhead of an iteration on a median TPOT, once that of `alone` and once that of
`qa-closed`, where the engine is full. Bandwidth and peak are from the data sheet, the bandwidth
share is that of the packaged presets. Then every load of OUT runs in virtual time against each of
the two presets, with the same command and seed, and a table shows the errors of the prediction. It
writes OUT/preset.yaml (of the full engine) and OUT/fit.md, and takes some minutes.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.append(str(Path(__file__).parent.parent))
import engines
import rig
import weights
from rehearse import COMPLETED_EXIT_CODES, LOADGEN, PRINTED_ERROR_CHARACTERS, WORKLOADS

from loadgen.sim.presets.preset import Preset, load_preset

SINGLE_REQUEST_LOAD = "alone"  # one request at a time
FULL_ENGINE_LOAD = "qa-closed"  # every slot of the engine has a request
PREDICTED_LOADS = (
    SINGLE_REQUEST_LOAD,
    *(f"{workload}-{loop}" for loop in ("closed", "open") for workload in WORKLOADS),
)

BANDWIDTH_SHARE = 0.921  # of the data sheet's bandwidth, as in the packaged presets
# The batch of llama.cpp, and the value of the packaged presets of the Hopper generation
MAX_TOKENS_PER_ITERATION = 2048
MIN_OVERHEAD_MS = 1e-3  # a preset needs a positive overhead
BISECTION_STEPS = 12  # halve the interval of overheads to 1/4096 of the TPOT
BISECTION_START_MS = 0.01
# Hardware of a rehearsal without a GPU, which only shows that the steps run
NO_GPU: engines.Gpu = {"name": "none", "memory_mib": "16384", "driver": "", "watts": "100"}

PRESET = """# Fitted by benchmarks/gpu/fit.py on two loads of a rehearsal.
# The weights are random: it is no real model.
name: rehearsal
title: "{gpu[name]}, {engine}, random weights"
generation: own
gpu: "{gpu[name]}"
vms: 1
gpus_per_vm: 1
gpus_per_replica: 1
model: {{name: llama-2-{shape_name}-random, layers: {shape.layers}, hidden: {shape.hidden_size},
        heads: {shape.attention_heads}, kv_heads: {shape.kv_heads},
        intermediate: {shape.intermediate_size}, vocab: {shape.vocabulary_size},
        weights: {weight_type}, kv_cache: fp16}}
hardware:
  memory_gib: {{value: {memory_gib:.1f}, source: "as its driver reports it"}}
  bandwidth_tb_s: {{value: {bandwidth_tb_s:g}, source: "data sheet"}}
  bandwidth_share: {{value: {bandwidth_share:g}, source: "assumed, as for the packaged presets"}}
  peak_tflops: {{value: {peak_tflops:g}, source: "data sheet"}}
  compute_share: {{value: {compute_share:.4f}, source: "fitted: TTFT of one prompt at a time"}}
  overhead_ms: {{value: {overhead_ms:.3f}, source: "fitted: TPOT of {tpot_load}"}}
  power_w: {{value: {power_w:g}, source: "the driver's limit"}}
server: {{max_batch_size: {max_batch_size}, max_num_tokens: {max_num_tokens},
         max_seq_len: {max_seq_len}, reserve_gib: 2}}
fitted_on: "this rehearsal: TTFT p50 {ttft_ms:.1f} ms of {ttft_load}, TPOT p50 {tpot_ms:.2f} ms of
  {tpot_load}"
assumed_input_tokens: {{value: {input_tokens:.0f}, source: "of that load, by the server's count"}}
valid_from_sequences: {{value: 1, source: "that load has one"}}
"""


class SingleRequest(NamedTuple):
    """The typical request of a load with one request at a time."""

    ttft_ms: float
    tpot_ms: float
    input_tokens: float
    output_tokens: float


class FittedConstants(NamedTuple):
    """The two constants of a simulator preset that are fitted to measured latencies.

    Attributes:
        compute_share: The fraction of the GPU's peak FLOP/s that the engine reaches.
        overhead_ms: The part of an iteration's duration that depends on nothing.
    """

    compute_share: float
    overhead_ms: float


class Rehearsal(NamedTuple):
    """A rehearsal on a GPU whose loads are simulated.

    Attributes:
        output_dir: The folder that rehearse.py wrote. The preset is written there, too.
        scratch_dir: The folder for simulated runs.
        preset_values: The placeholders of the preset that are known without fitting.
        single_request: The typical request of the load with one request at a time.
    """

    output_dir: Path
    scratch_dir: Path
    preset_values: dict[str, object]
    single_request: SingleRequest

    @property
    def preset_path(self) -> Path:
        """The file of the fitted preset."""
        return self.output_dir / "preset.yaml"


# -- reading the rehearsal -------------------------------------------------------------------------


def read_summary(run_dir: Path) -> dict[str, Any]:
    """Return the content of a run's summary.json."""
    summary: dict[str, Any] = json.loads((run_dir / "summary.json").read_bytes())
    return summary


def read_tpot_ms(run_dir: Path) -> float:
    """Return the median TPOT of a run in ms.

    loadgen does not report it if the host was too busy to measure it. Then the script is skipped,
    because there is nothing to fit.
    """
    percentiles = read_summary(run_dir)["tpot_ms"] or {}
    tpot_ms: float | None = percentiles.get("p50")
    if tpot_ms is None:
        rig.skip_script(f"TPOT of {run_dir.name} was withheld: measure again on a quiet host")
    return tpot_ms


def read_single_request(run_dir: Path) -> SingleRequest:
    """Return the typical request of a run: its median latencies and its mean lengths."""
    summary = read_summary(run_dir)
    tokens = summary["tokens"]
    successful_requests = summary["requests"]["ok"]
    return SingleRequest(
        ttft_ms=summary["ttft_ms"]["p50"],
        tpot_ms=read_tpot_ms(run_dir),
        input_tokens=tokens["input"] / successful_requests,
        output_tokens=tokens["output"] / successful_requests,
    )


def read_preset_values(output_dir: Path, args: argparse.Namespace) -> dict[str, object]:
    """Return the placeholders of the preset that describe the GPU, the model and the engine.

    The GPU and the engine are those of the rehearsal. What its driver does not report comes from
    the command line. A rehearsal without a GPU or without a model gets arbitrary ones, because it
    only shows that the script runs.
    """
    machine = json.loads((output_dir / "steps/machine.json").read_bytes())
    engine = json.loads((output_dir / "steps/engine.json").read_bytes())
    gpu = machine["gpus"][0] if machine["gpus"] else NO_GPU
    shape_name = engine["shape"] if engine["shape"] in weights.SHAPES else "tiny"
    has_4_bit_weights = engine["engine"] == "llamacpp" and shape_name != "tiny"

    return {
        "gpu": gpu,
        "engine": engine["engine"],
        "shape_name": shape_name,
        "shape": weights.SHAPES[shape_name],
        "weight_type": "int4" if has_4_bit_weights else "bf16",
        "memory_gib": int(gpu["memory_mib"]) / 1024,
        "bandwidth_tb_s": args.bandwidth,
        "bandwidth_share": BANDWIDTH_SHARE,
        "peak_tflops": args.peak,
        "power_w": float(gpu["watts"]),
        "max_batch_size": args.lanes,
        "max_num_tokens": MAX_TOKENS_PER_ITERATION,
        "max_seq_len": engines.CONTEXT_TOKENS,
    }


# -- fitting ---------------------------------------------------------------------------------------


def fit_single_request_preset(rehearsal: Rehearsal) -> FittedConstants:
    """Write the preset that is fitted to the load with one request at a time.

    Fitting needs the costs of the model, which are computed when a preset is loaded. So a preset
    with arbitrary constants is written first.

    Returns:
        The fitted constants.
    """
    arbitrary_constants = FittedConstants(compute_share=1.0, overhead_ms=1.0)
    write_preset(rehearsal, arbitrary_constants, SINGLE_REQUEST_LOAD)
    preset = load_preset(str(rehearsal.preset_path))
    constants = fit_constants(preset, rehearsal.single_request)
    write_preset(rehearsal, constants, SINGLE_REQUEST_LOAD)
    return constants


def fit_constants(preset: Preset, request: SingleRequest) -> FittedConstants:
    """Return the constants with which the simulator has the TTFT and the TPOT of a single request.

    The simulator computes an iteration as overhead + max(bytes / bandwidth, FLOPs / compute). A
    decode iteration of a single request is limited by the bytes that it reads. Its prompt is
    limited by FLOPs, and is computed in chunks of one iteration each.
    """
    costs = preset.costs
    model = preset.model

    # A decode iteration reads the weights and the KV cache of the tokens so far: on average, half
    # of the response.
    mean_context_tokens = request.input_tokens + request.output_tokens / 2
    read_ms = (costs.weights_ns + costs.kv_token_ns * mean_context_tokens) / 1e6
    overhead_ms = max(request.tpot_ms - read_ms, 0.0)

    # TTFT = chunks * overhead + FLOPs of the prompt / FLOP/s of the engine
    chunks = math.ceil(request.input_tokens / preset.server.max_num_tokens)
    compute_ms = request.ttft_ms - chunks * overhead_ms
    mean_attended_tokens = request.input_tokens / 2
    flops_per_token = model.token_flops + model.attended_flops * mean_attended_tokens
    prompt_flops = request.input_tokens * flops_per_token
    peak_flops_per_ms = preset.hardware.peak_tflops.value * 1e12 / 1e3

    return FittedConstants(
        compute_share=prompt_flops / (peak_flops_per_ms * compute_ms),
        overhead_ms=max(overhead_ms, MIN_OVERHEAD_MS),
    )


def fit_full_engine_preset(rehearsal: Rehearsal, compute_share: float) -> None:
    """Write the preset whose overhead predicts the TPOT of the load that fills the engine.

    The overhead is between almost zero and the whole TPOT. It is found by bisection, in which each
    step simulates that load.
    """
    measured_tpot_ms = read_tpot_ms(rehearsal.output_dir / FULL_ENGINE_LOAD)
    low_ms = BISECTION_START_MS
    high_ms = measured_tpot_ms
    for _ in range(BISECTION_STEPS):
        overhead_ms = (low_ms + high_ms) / 2
        constants = FittedConstants(compute_share, overhead_ms)
        write_preset(rehearsal, constants, FULL_ENGINE_LOAD)
        predicted = simulate_load(rehearsal, FULL_ENGINE_LOAD)
        if predicted["tpot_ms"]["p50"] < measured_tpot_ms:
            low_ms = overhead_ms
        else:
            high_ms = overhead_ms


def write_preset(rehearsal: Rehearsal, constants: FittedConstants, tpot_load: str) -> None:
    """Write the preset of a rehearsal with these constants.

    `tpot_load` is the load whose TPOT the overhead is fitted to. The preset names it as the source.
    """
    request = rehearsal.single_request
    text = PRESET.format(
        **rehearsal.preset_values,
        compute_share=constants.compute_share,
        overhead_ms=constants.overhead_ms,
        ttft_load=SINGLE_REQUEST_LOAD,
        ttft_ms=request.ttft_ms,
        input_tokens=request.input_tokens,
        tpot_load=tpot_load,
        tpot_ms=read_tpot_ms(rehearsal.output_dir / tpot_load),
    )
    rehearsal.preset_path.write_text(text)


# -- predicting ------------------------------------------------------------------------------------

# Options that name or observe the real engine. The simulation of a load must not have them.
REAL_ENGINE_OPTIONS = {"--url", "--model", "--tokenizer", "-o", "--energy"}
REAL_ENGINE_FLAGS = {"--server-timing"}


def simulate_load(rehearsal: Rehearsal, load_name: str) -> dict[str, Any]:
    """Repeat a load of the rehearsal in virtual time, and return the summary of the simulated run.

    It is the same command with the same seed, against a simulated server with the fitted preset.
    """
    manifest = json.loads((rehearsal.output_dir / load_name / "run.json").read_bytes())
    run_dir = rehearsal.scratch_dir / load_name
    shutil.rmtree(run_dir, ignore_errors=True)
    arguments = [
        *remove_real_engine_options(manifest["command"][1:]),
        "--url",
        f"sim:{rehearsal.preset_path}",
        "--seed",
        str(manifest["seed"]),
        "-o",
        str(run_dir),
    ]
    completed = subprocess.run(
        [*LOADGEN, *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if completed.returncode not in COMPLETED_EXIT_CODES:
        end_of_stderr = completed.stderr[-PRINTED_ERROR_CHARACTERS:]
        raise SystemExit(
            f"{load_name}: loadgen ended with {completed.returncode}:\n{end_of_stderr}"
        )

    return read_summary(run_dir)


def remove_real_engine_options(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of a load without the options that name or observe the real engine."""
    kept_arguments = []
    remaining = iter(arguments)
    for argument in remaining:
        if argument in REAL_ENGINE_OPTIONS:
            next(remaining)  # skip the value of the option
        elif argument not in REAL_ENGINE_FLAGS:
            kept_arguments.append(argument)
    return kept_arguments


class Metric(NamedTuple):
    """A metric of the table of predictions.

    Attributes:
        title: The heading of its column.
        block: The block of summary.json that has it.
        key: Its name in that block.
        decimals: The decimals with which it is printed.
    """

    title: str
    block: str
    key: str
    decimals: int

    def read(self, summary: dict[str, Any]) -> float | None:
        """Return the value of the metric in a summary, or None if it was not reported."""
        block = summary[self.block] or {}
        value: float | None = block.get(self.key)
        return value

    def format_prediction(
        self, measured_summary: dict[str, Any], predicted_summary: dict[str, Any]
    ) -> str:
        """Return a cell such as "12.0 / 12.3 (+2%)": measured, predicted and relative error."""
        measured = self.read(measured_summary)
        predicted = self.read(predicted_summary)
        if measured is None or predicted is None:
            return "withheld"

        error = predicted / measured - 1
        measured_text = f"{measured:,.{self.decimals}f}"
        predicted_text = f"{predicted:,.{self.decimals}f}"
        return f"{measured_text} / {predicted_text} ({error:+.0%})"


METRICS = (
    Metric("completed/s", "load", "steady_completed_rps", 2),
    Metric("output tokens/s", "tokens", "steady_output_per_s", 0),
    Metric("TTFT p50, ms", "ttft_ms", "p50", 0),
    Metric("TTFT p95, ms", "ttft_ms", "p95", 0),
    Metric("TPOT p50, ms", "tpot_ms", "p50", 2),
    Metric("E2E p50, ms", "e2e_ms", "p50", 0),
)


def predict_loads(rehearsal: Rehearsal) -> list[list[str]]:
    """Simulate every load of the rehearsal, and return a table row for each.

    A row is the name of the load, then measurement and prediction of each metric. A load that the
    rehearsal did not run has no row.
    """
    rows = []
    for load_name in PREDICTED_LOADS:
        run_dir = rehearsal.output_dir / load_name
        if not (run_dir / "summary.json").exists():
            continue
        measured = read_summary(run_dir)
        predicted = simulate_load(rehearsal, load_name)
        cells = [metric.format_prediction(measured, predicted) for metric in METRICS]
        rows.append([load_name, *cells])
    return rows


# -- the script ------------------------------------------------------------------------------------


def format_page(rehearsal: Rehearsal, rows_by_tpot_load: dict[str, list[list[str]]]) -> str:
    """Return the page with the predictions as Markdown.

    `rows_by_tpot_load` has the rows of a table for each load to whose TPOT the overhead was fitted.
    """
    request = rehearsal.single_request
    lines = [
        "# Measured loads and what a fitted simulator predicts",
        "",
        f"`benchmarks/gpu/fit.py` ({rig.describe_commit_and_date()}).",
        f"The compute share is fitted to the TTFT p50 of `{SINGLE_REQUEST_LOAD}`: "
        f"{request.ttft_ms:.1f} ms with prompts",
        f"of {request.input_tokens:,.0f} tokens. Each cell: measured / predicted (error).",
        "",
    ]
    columns = ["load", *(metric.title for metric in METRICS)]
    for tpot_load, rows in rows_by_tpot_load.items():
        tpot_ms = read_tpot_ms(rehearsal.output_dir / tpot_load)
        lines += [
            f"Overhead of an iteration fitted to the TPOT p50 of `{tpot_load}`: {tpot_ms:.2f} ms.",
            "",
            rig.format_table(columns, rows),
            "",
        ]
    return "\n".join(lines)


def run_smoke_rehearsal(output_dir: Path) -> None:
    """Run the smoke form of rehearse.py, which leaves a few loads of a simulated engine."""
    script = Path(__file__).with_name("rehearse.py")
    subprocess.run(
        [sys.executable, script, "--smoke", output_dir], check=True, stdout=subprocess.DEVNULL
    )


def main() -> None:
    """Fit the simulator in two ways, predict all loads with each, and print the tables."""
    args = parse_command_line()
    with tempfile.TemporaryDirectory() as scratch:
        scratch_dir = Path(scratch)
        output_dir: Path = (args.out or scratch_dir / "out").absolute()
        if args.smoke and not output_dir.exists():
            run_smoke_rehearsal(output_dir)

        rehearsal = Rehearsal(
            output_dir=output_dir,
            scratch_dir=scratch_dir,
            preset_values=read_preset_values(output_dir, args),
            single_request=read_single_request(output_dir / SINGLE_REQUEST_LOAD),
        )
        rows_by_tpot_load = {}
        constants = fit_single_request_preset(rehearsal)
        rows_by_tpot_load[SINGLE_REQUEST_LOAD] = predict_loads(rehearsal)
        fit_full_engine_preset(rehearsal, constants.compute_share)
        rows_by_tpot_load[FULL_ENGINE_LOAD] = predict_loads(rehearsal)

        page = format_page(rehearsal, rows_by_tpot_load)
        if not args.smoke or args.out:
            (output_dir / "fit.md").write_text(page)

    print(page)


def parse_command_line() -> argparse.Namespace:
    """Parse the options of the script."""
    parser = rig.create_parser(__doc__)
    parser.add_argument("out", nargs="?", type=Path, help="the folder that rehearse.py left")
    parser.add_argument(
        "--lanes", type=int, default=16, help="sequences that the engine decodes at once"
    )
    parser.add_argument(
        "--bandwidth", type=float, default=3.35, help="of the memory, TB/s, by the data sheet"
    )
    parser.add_argument("--peak", type=float, default=1979.0, help="TFLOP/s, by the data sheet")

    args = rig.parse_arguments(parser, lanes=2)
    if args.out is None and not args.smoke:
        parser.error("OUT: the folder that rehearse.py left")

    return args


if __name__ == "__main__":
    main()
