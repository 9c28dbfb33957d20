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
from rehearse import LOADGEN, PROFILES

from loadgen.sim.presets.preset import Preset, load_preset

FITTED_LOAD, FULL_LOAD = "alone", "qa-closed"
HALVINGS = 12  # of the interval that the overhead is looked for in
LOADS = tuple(f"{profile}-{loop}" for loop in ("closed", "open") for profile in PROFILES)

BANDWIDTH_SHARE = 0.921
TOKENS_PER_ITERATION = (
    2048  # tokens of an iteration: llama.cpp's batch, and that of the packaged presets of Hopper
)
PRESET = """# Fitted by benchmarks/gpu/fit.py on two loads of a rehearsal.
# The weights are random: it is no real model.
name: {name}
title: "{title}"
generation: {generation}
gpu: "{gpu}"
vms: 1
gpus_per_vm: 1
gpus_per_replica: 1
model: {{name: {model}, layers: {shape.layers}, hidden: {shape.hidden}, heads: {shape.heads},
        kv_heads: {shape.kv_heads}, intermediate: {shape.inner}, vocab: {shape.vocabulary},
        weights: {weights}, kv_cache: fp16}}
hardware:
  memory_gib: {{value: {memory:.1f}, source: "as its driver reports it"}}
  bandwidth_tb_s: {{value: {bandwidth:g}, source: "data sheet"}}
  bandwidth_share: {{value: {share:g}, source: "assumed, as for the packaged presets"}}
  peak_tflops: {{value: {peak:g}, source: "data sheet"}}
  compute_share: {{value: {compute:.4f}, source: "fitted: TTFT of one prompt at a time"}}
  overhead_ms: {{value: {overhead:.3f}, source: "fitted: TPOT of {full}"}}
  power_w: {{value: {watts:g}, source: "the driver's limit"}}
server: {{max_batch_size: {concurrency}, max_num_tokens: {stream}, max_seq_len: {context},
         reserve_gib: 2}}
fitted_on: "this rehearsal: TTFT p50 {ttft:.1f} ms of {fitted}, TPOT p50 {tpot:.2f} ms of {full}"
assumed_input_tokens: {{value: {prompt:.0f}, source: "of that load, by the server's count"}}
valid_from_sequences: {{value: 1, source: "that load has one"}}
"""


class SingleRequest(NamedTuple):
    """The median request of the load on which the preset is fitted, in ms and tokens."""

    ttft_ms: float
    tpot_ms: float
    prompt: float
    response: float


def read_summary(folder: Path) -> dict[str, Any]:
    """Return the summary of a run."""
    run_summary: dict[str, Any] = json.loads((folder / "summary.json").read_bytes())
    return run_summary


def read_tpot_ms(folder: Path) -> float:
    """Return TPOT p50 of a run.

    The script ends if it was not reported, as on a busy host, because nothing can be fitted to it
    then.
    """
    p50_ms: float | None = (read_summary(folder)["tpot_ms"] or {}).get("p50")
    return p50_ms or rig.skip_script(
        f"TPOT of {folder.name} was withheld: measure again on a quiet host"
    )


def read_single_request(folder: Path) -> SingleRequest:
    """Return the median request of a run with one request at a time."""
    run_summary = read_summary(folder)
    tokens, ok = run_summary["tokens"], run_summary["requests"]["ok"]
    return SingleRequest(
        run_summary["ttft_ms"]["p50"],
        read_tpot_ms(folder),
        tokens["input"] / ok,
        tokens["output"] / ok,
    )


class Constants(NamedTuple):
    """The two constants of a preset that are fitted.

    `compute_share` is the fraction of the peak FLOPS that the engine reaches, and `overhead_ms` the
    time of an iteration that depends on nothing.
    """

    compute_share: float
    overhead_ms: float


MIN_OVERHEAD_MS = 1e-3  # a preset needs a positive one


def fit_constants(preset: Preset, request: SingleRequest) -> Constants:
    """Return the constants that give the observed TTFT and TPOT of one request at a time.

    An iteration takes overhead + max(bytes / bandwidth, FLOPs / compute). One request decodes by
    its bytes, and its prompt is computed by its FLOPs, in as many iterations as it has chunks.
    """
    costs = preset.costs
    model = preset.model

    # TPOT = overhead + time to read the weights and the KV cache, half of whose response is there
    context_tokens = request.prompt + request.response / 2
    read_ms = (costs.weights_ns + costs.kv_token_ns * context_tokens) / 1e6
    overhead_ms = request.tpot_ms - read_ms

    # TTFT = chunks * overhead + FLOPs of the prompt / FLOPS of the engine
    chunks = math.ceil(request.prompt / preset.server.max_num_tokens)
    compute_ms = request.ttft_ms - chunks * max(overhead_ms, 0.0)
    mean_attended_tokens = request.prompt / 2
    flops_per_token = model.token_flops + model.attended_flops * mean_attended_tokens
    prompt_flops = request.prompt * flops_per_token
    peak_flops_per_ms = preset.hardware.peak_tflops.value * 1e9

    return Constants(
        compute_share=prompt_flops / (peak_flops_per_ms * compute_ms),
        overhead_ms=max(overhead_ms, MIN_OVERHEAD_MS),
    )


def preset_values(output_dir: Path, args: argparse.Namespace) -> dict[str, object]:
    """Return what the preset says of machine, model and engine."""
    machine = json.loads((output_dir / "steps/look.json").read_bytes())
    engine = json.loads((output_dir / "steps/engine.json").read_bytes())
    name = engine["shape"] if engine["shape"] in weights.SHAPES else "tiny"
    gpu = (machine["gpus"] or [{"name": "none", "memory_mib": "16384", "watts": "100"}])[0]

    return {
        "name": "rehearsal",
        "title": f"{gpu['name']}, {engine['engine']}, random weights",
        "generation": "own",
        "gpu": gpu["name"],
        "model": f"llama-2-{name}-random",
        "shape": weights.SHAPES[name],
        "weights": "int4" if engine["engine"] == "llamacpp" and name != "tiny" else "bf16",
        "memory": int(gpu["memory_mib"]) / 1024,
        "bandwidth": args.bandwidth,
        "share": BANDWIDTH_SHARE,
        "peak": args.peak,
        "watts": float(gpu["watts"]),
        "concurrency": args.lanes,
        "stream": TOKENS_PER_ITERATION,
        "context": engines.CONTEXT,
        "fitted": FITTED_LOAD,
    }


def write_preset(
    output_dir: Path,
    values: dict[str, Any],
    request: SingleRequest,
    tpot_load: str,
    overhead_ms: float | None = None,
) -> None:
    """Write preset.yaml with fitted constants.

    The constants are fitted on one request at a time. To do so, a preset with preliminary constants
    is written first, because the costs of the model are computed when it is loaded.

    Args:
        output_dir: The folder of the rehearsal.
        values: What PRESET says of machine, model and engine; see `preset_values`.
        request: The median request of the load with one request at a time.
        tpot_load: The load that the preset names as the source of its overhead.
        overhead_ms: The overhead of an iteration, in place of the fitted one.
    """
    preset_path = output_dir / "preset.yaml"
    values = values | {
        "ttft": request.ttft_ms,
        "prompt": request.prompt,
        "full": tpot_load,
        "tpot": read_tpot_ms(output_dir / tpot_load),
    }
    preset_path.write_text(PRESET.format(**values, compute=1.0, overhead=1.0))
    fitted = fit_constants(load_preset(str(preset_path)), request)
    overhead = fitted.overhead_ms if overhead_ms is None else overhead_ms
    preset_path.write_text(PRESET.format(**values, compute=fitted.compute_share, overhead=overhead))


def fit_full_engine(
    output_dir: Path, values: dict[str, Any], request: SingleRequest, scratch: Path
) -> None:
    """Write the preset whose overhead gives the TPOT of the full engine.

    The overhead is found by bisection: each step simulates the load of the full engine.
    """
    measured_tpot_ms = read_tpot_ms(output_dir / FULL_LOAD)
    low_ms = 0.01

    high_ms = measured_tpot_ms
    for _ in range(HALVINGS):
        overhead_ms = (low_ms + high_ms) / 2
        write_preset(output_dir, values, request, FULL_LOAD, overhead_ms)
        predicted = predict_summary(output_dir, FULL_LOAD, scratch)
        if predicted["tpot_ms"]["p50"] < measured_tpot_ms:
            low_ms = overhead_ms
        else:
            high_ms = overhead_ms


# Options of a load on the real engine that its simulation does not get
DROPPED_OPTIONS_WITH_VALUE = {"--url", "--model", "--tokenizer", "-o", "--energy"}


DROPPED_FLAGS = {"--server-timing"}


RUN_EXIT_CODES = (0, 1, 3)  # of a run that was made, whatever it found


def select_simulated_arguments(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of a load without those that name or observe the real engine."""
    kept_arguments = []
    remaining = iter(arguments)
    for argument in remaining:
        if argument in DROPPED_OPTIONS_WITH_VALUE:
            next(remaining)  # its value
        elif argument not in DROPPED_FLAGS:
            kept_arguments.append(argument)

    return kept_arguments


def predict_summary(output_dir: Path, load: str, scratch: Path) -> dict[str, Any]:
    """Run the command of a load in virtual time against the preset, and return its summary."""
    manifest = json.loads((output_dir / load / "run.json").read_bytes())
    shutil.rmtree(scratch / load, ignore_errors=True)
    command = [
        *LOADGEN,
        *select_simulated_arguments(manifest["command"][1:]),
        "--url",
        f"sim:{output_dir / 'preset.yaml'}",
        "--seed",
        str(manifest["seed"]),
        "-o",
        str(scratch / load),
    ]
    completed = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if completed.returncode not in RUN_EXIT_CODES:
        raise SystemExit(
            f"{load}: loadgen ended with {completed.returncode}:\n{completed.stderr[-1500:]}"
        )

    return read_summary(scratch / load)


class Metric(NamedTuple):
    """A metric of the tables: its title, where it stands in a summary, and its decimal places."""

    title: str
    block: str
    key: str
    digits: int

    def read(self, summary: dict[str, Any]) -> float | None:
        """Return the value in a summary, or None if it was not reported."""
        value: float | None = (summary[self.block] or {}).get(self.key)
        return value


METRICS = (
    Metric("answered/s", "load", "steady_completed_rps", 2),
    Metric("output tokens/s", "tokens", "steady_output_per_s", 0),
    Metric("TTFT p50, ms", "ttft_ms", "p50", 0),
    Metric("TTFT p95, ms", "ttft_ms", "p95", 0),
    Metric("TPOT p50, ms", "tpot_ms", "p50", 2),
    Metric("E2E p50, ms", "e2e_ms", "p50", 0),
)


def format_row(
    load: str, measured_summary: dict[str, Any], predicted_summary: dict[str, Any]
) -> list[str]:
    """Return measured value, prediction and difference of each metric."""
    cells = [load]
    for metric in METRICS:
        measured = metric.read(measured_summary)
        predicted = metric.read(predicted_summary)
        if measured is None or predicted is None:
            cells.append("withheld")
        else:
            cells.append(
                f"{measured:,.{metric.digits}f} / {predicted:,.{metric.digits}f} "
                f"({predicted / measured - 1:+.0%})"
            )

    return cells


def run_smoke_rehearsal(output_dir: Path) -> None:
    """Run the loads that `--smoke` needs, simulated."""
    script = Path(__file__).with_name("rehearse.py")
    subprocess.run(
        [sys.executable, script, "--smoke", output_dir], check=True, stdout=subprocess.DEVNULL
    )


def compare_loads(output_dir: Path, scratch: Path) -> list[list[str]]:
    """Predict every load of a rehearsal with its preset, and return a row for each."""
    rows = []
    for load in (FITTED_LOAD, *LOADS):
        if (output_dir / load / "summary.json").exists():
            measured = read_summary(output_dir / load)
            rows.append(format_row(load, measured, predict_summary(output_dir, load, scratch)))
    return rows


def format_page(
    request: SingleRequest, tables: dict[str, list[list[str]]], output_dir: Path
) -> str:
    """Return the page with a table of predictions for each load on which the overhead is fitted."""
    lines = [
        "# The model held against loads that it was not fitted on",
        "",
        f"`benchmarks/gpu/fit.py` ({rig.describe_commit_and_date()}).",
        f"The compute share is fitted on TTFT p50 of `{FITTED_LOAD}`: {request.ttft_ms:.1f} "
        f"ms of prompts of",
        f"{request.prompt:,.0f} tokens. Each cell: measured / predicted (off by).",
        "",
    ]
    columns = ["load", *(metric.title for metric in METRICS)]
    for load, rows in tables.items():
        tpot_ms = read_tpot_ms(output_dir / load)
        lines += [
            f"Overhead of an iteration fitted on TPOT p50 of `{load}`: {tpot_ms:.2f} ms.",
            "",
            rig.format_table(columns, rows),
            "",
        ]

    return "\n".join(lines)


def main() -> None:
    """Fit the preset, predict all loads and print the tables."""
    args = parse_command_line()
    with tempfile.TemporaryDirectory() as scratch_name:
        scratch = Path(scratch_name)
        output_dir: Path = (args.out or scratch / "out").absolute()
        if args.smoke and not output_dir.exists():
            run_smoke_rehearsal(output_dir)

        values = preset_values(output_dir, args)
        request = read_single_request(output_dir / FITTED_LOAD)
        write_preset(output_dir, values, request, FITTED_LOAD)
        tables = {FITTED_LOAD: compare_loads(output_dir, scratch)}
        fit_full_engine(output_dir, values, request, scratch)
        tables[FULL_LOAD] = compare_loads(output_dir, scratch)

        page = format_page(request, tables, output_dir)
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
