"""Fit a preset of the simulator to two loads of a rehearsal, and hold what it predicts of all others against them.

    python benchmarks/gpu/fit.py OUT [--bandwidth TB/s] [--peak TFLOPS]   # OUT: what rehearse.py left
    python benchmarks/gpu/fit.py --smoke                                   # a rehearsal of its own, simulated, first

Two constants are fitted: the compute share on the median TTFT of the load `alone`, one request at a time, and the
overhead of an iteration on a median TPOT, once that of `alone` and once that of `qa-closed`, where the engine is full.
Bandwidth and peak are the data sheet's, the share of the bandwidth is the packaged presets'. Then every load of OUT is
run in virtual time against each of the two presets, the same command with the same seed, and a table says how far the
prediction is off. Leaves OUT/preset.yaml (of the full engine) and OUT/fit.md.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

sys.path.append(str(Path(__file__).parent.parent))
import engines
import rig
import weights
from rehearse import LOADGEN, PROFILES

from loadgen.sim.presets.preset import Preset, load_preset

FITTED, FULL = "alone", "qa-closed"
HALVINGS = 12  # of the interval that the overhead is looked for in
LOADS = tuple(f"{profile}-{loop}" for loop in ("closed", "open") for profile in PROFILES)
DROPPED = {
    "--url": 2,
    "--model": 2,
    "--tokenizer": 2,
    "-o": 2,
    "--energy": 2,
    "--server-timing": 1,
}  # words each
BANDWIDTH_SHARE = 0.921
STREAM = (
    2048  # tokens of an iteration: llama.cpp's batch, and that of the packaged presets of Hopper
)
PRESET = """# Fitted by benchmarks/gpu/fit.py on two loads of a rehearsal: random weights, no model that anybody uses.
name: {name}
title: "{title}"
generation: {generation}
gpu: "{gpu}"
vms: 1
gpus_per_vm: 1
gpus_per_replica: 1
model: {{name: {model}, layers: {shape.layers}, hidden: {shape.hidden}, heads: {shape.heads}, kv_heads:
        {shape.kv_heads}, intermediate: {shape.inner}, vocab: {shape.vocabulary}, weights: {weights}, kv_cache: fp16}}
hardware:
  memory_gib: {{value: {memory:.1f}, source: "as its driver reports it"}}
  bandwidth_tb_s: {{value: {bandwidth:g}, source: "data sheet"}}
  bandwidth_share: {{value: {share:g}, source: "assumed, as for the packaged presets"}}
  peak_tflops: {{value: {peak:g}, source: "data sheet"}}
  compute_share: {{value: {compute:.4f}, source: "fitted: TTFT of one prompt at a time"}}
  overhead_ms: {{value: {overhead:.3f}, source: "fitted: TPOT of {full}"}}
  power_w: {{value: {watts:g}, source: "the driver's limit"}}
server: {{max_batch_size: {lanes}, max_num_tokens: {stream}, max_seq_len: {context}, reserve_gib: 2}}
fitted_on: "this rehearsal: TTFT p50 {ttft:.1f} ms of {fitted}, TPOT p50 {tpot:.2f} ms of {full}"
assumed_input_tokens: {{value: {prompt:.0f}, source: "of that load, by the server's count"}}
valid_from_sequences: {{value: 1, source: "that load has one"}}
"""


class Alone(NamedTuple):
    """The middle request of the load that is fitted on: ms and tokens."""

    ttft_ms: float
    tpot_ms: float
    prompt: float
    answer: float


def summary(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "summary.json").read_bytes())
    return found


def tpot_ms(folder: Path) -> float:
    """TPOT p50 of a run. Ends the script where it was withheld, as on a busy host: nothing can be fitted to that."""
    found: float | None = (summary(folder)["tpot_ms"] or {}).get("p50")
    return found or rig.skip_script(
        f"TPOT of {folder.name} was withheld: measure again on a quiet host"
    )


def alone(folder: Path) -> Alone:
    found = summary(folder)
    tokens, ok = found["tokens"], found["requests"]["ok"]
    return Alone(
        found["ttft_ms"]["p50"], tpot_ms(folder), tokens["input"] / ok, tokens["output"] / ok
    )


def fitted(known: Preset, seen: Alone) -> tuple[float, float]:
    """(compute share, overhead in ms) with which the preset's model has the TTFT and TPOT seen.

    An iteration takes overhead + max(bytes / bandwidth, FLOPs / compute); one request decodes by its bytes, and its
    prompt is computed by its FLOPs, in as many iterations as it has chunks.
    """
    costs = known.costs
    overhead_ms = (
        seen.tpot_ms
        - (costs.weights_ns + costs.kv_token_ns * (seen.prompt + seen.answer / 2)) / 1e6
    )
    chunks = -(-seen.prompt // known.server.max_num_tokens)
    flops = seen.prompt * (known.model.token_flops + known.model.attended_flops * seen.prompt / 2)
    compute_ms = seen.ttft_ms - chunks * max(overhead_ms, 0.0)
    return flops / (known.hardware.peak_tflops.value * 1e9 * compute_ms), max(overhead_ms, 1e-3)


def facts(out: Path, given: argparse.Namespace) -> dict[str, Any]:
    """What the preset says of machine, model and engine."""
    look = json.loads((out / "steps/look.json").read_bytes())
    engine = json.loads((out / "steps/engine.json").read_bytes())
    name = engine["shape"] if engine["shape"] in weights.SHAPES else "tiny"
    gpu = (look["gpus"] or [{"name": "none", "memory_mib": "16384", "watts": "100"}])[0]
    return {
        "name": "rehearsal",
        "title": f"{gpu['name']}, {engine['engine']}, random weights",
        "generation": "own",
        "gpu": gpu["name"],
        "model": f"llama-2-{name}-random",
        "shape": weights.SHAPES[name],
        "weights": "int4" if engine["engine"] == "llamacpp" and name != "tiny" else "bf16",
        "memory": int(gpu["memory_mib"]) / 1024,
        "bandwidth": given.bandwidth,
        "share": BANDWIDTH_SHARE,
        "peak": given.peak,
        "watts": float(gpu["watts"]),
        "lanes": given.lanes,
        "stream": STREAM,
        "context": engines.CONTEXT,
        "fitted": FITTED,
    }


def write(
    out: Path, values: dict[str, Any], seen: Alone, full: str, overhead_ms: float | None
) -> float:
    """Write preset.yaml; returns its overhead, fitted on one request at a time where none is given."""
    file = out / "preset.yaml"
    values = values | {"ttft": seen.ttft_ms, "prompt": seen.prompt, "full": full}
    values["tpot"] = tpot_ms(out / full)
    file.write_text(PRESET.format(**values, compute=1.0, overhead=1.0))
    known = load_preset(str(file))
    compute, overhead = fitted(known, seen)
    file.write_text(PRESET.format(**values, compute=compute, overhead=overhead_ms or overhead))
    return overhead


def filled(out: Path, values: dict[str, Any], seen: Alone, scratch: Path) -> None:
    """Write the preset whose overhead gives the TPOT seen on the full engine: its interval is halved, by simulation."""
    wanted = tpot_ms(out / FULL)
    low, high = 0.01, wanted
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        write(out, values, seen, FULL, middle)
        low, high = (
            (middle, high)
            if predicted(out, FULL, scratch)["tpot_ms"]["p50"] < wanted
            else (low, middle)
        )


def predicted(out: Path, load: str, scratch: Path) -> dict[str, Any]:
    """The summary of the same command in virtual time against the preset."""
    run = json.loads((out / load / "run.json").read_bytes())
    words, kept = iter(run["command"][1:]), list[str]()
    for word in words:
        for _ in range(DROPPED.get(word, 0) - 1):
            next(words)
        if word not in DROPPED:
            kept.append(word)
    shutil.rmtree(scratch / load, ignore_errors=True)
    again = [
        *LOADGEN,
        *kept,
        "--url",
        f"sim:{out / 'preset.yaml'}",
        "--seed",
        str(run["seed"]),
        "-o",
        str(scratch / load),
    ]
    done = subprocess.run(
        again, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if done.returncode not in (0, 1, 3):
        raise SystemExit(f"{load}: loadgen ended with {done.returncode}:\n{done.stderr[-1500:]}")
    return summary(scratch / load)


FIGURES = (  # title, where it stands in a summary, digits
    ("answered/s", ("load", "steady_completed_rps"), 2),
    ("output tokens/s", ("tokens", "steady_output_per_s"), 0),
    ("TTFT p50, ms", ("ttft_ms", "p50"), 0),
    ("TTFT p95, ms", ("ttft_ms", "p95"), 0),
    ("TPOT p50, ms", ("tpot_ms", "p50"), 2),
    ("E2E p50, ms", ("e2e_ms", "p50"), 0),
)


def row(load: str, seen: dict[str, Any], told: dict[str, Any]) -> list[str]:
    """Measured, predicted and the difference of each figure."""
    cells = [load]
    for _, (block, key), digits in FIGURES:
        measured, model = (seen[block] or {}).get(key), (told[block] or {}).get(key)
        if measured is None or model is None:
            cells.append("withheld")
        else:
            cells.append(
                f"{measured:,.{digits}f} / {model:,.{digits}f} ({model / measured - 1:+.0%})"
            )
    return cells


def rehearsed(out: Path) -> None:
    """The loads that the smallest form needs, simulated."""
    script = Path(__file__).with_name("rehearse.py")
    subprocess.run([sys.executable, script, "--smoke", out], check=True, stdout=subprocess.DEVNULL)


def main() -> None:
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
    with tempfile.TemporaryDirectory() as scratch:
        out: Path = (args.out or Path(scratch) / "out").absolute()
        if args.smoke and not out.exists():
            rehearsed(out)
        values, seen = facts(out, args), alone(out / FITTED)
        there = [load for load in (FITTED, *LOADS) if (out / load / "summary.json").exists()]
        write(out, values, seen, FITTED, None)
        tables = [
            [row(load, summary(out / load), predicted(out, load, Path(scratch))) for load in there]
        ]
        filled(out, values, seen, Path(scratch))
        tables.append(
            [row(load, summary(out / load), predicted(out, load, Path(scratch))) for load in there]
        )
        page = [
            "# The model held against loads that it was not fitted on",
            "",
            f"`benchmarks/gpu/fit.py` ({rig.describe_tree_and_date()}).",
        ]
        page += [
            f"The compute share is fitted on TTFT p50 of `{FITTED}`: {seen.ttft_ms:.1f} ms of prompts of"
        ]
        page += [f"{seen.prompt:,.0f} tokens. Each cell: measured / predicted (off by).", ""]
        for load, rows in zip((FITTED, FULL), tables, strict=True):
            tpot = tpot_ms(out / load)
            page += [f"Overhead of an iteration fitted on TPOT p50 of `{load}`: {tpot:.2f} ms.", ""]
            page += [rig.format_table(["load", *(title for title, _, _ in FIGURES)], rows), ""]
        if not args.smoke or args.out:
            (out / "fit.md").write_text("\n".join(page))
    print("\n".join(page))


if __name__ == "__main__":
    main()
