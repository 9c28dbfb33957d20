"""The gap filled, SIMULATED: Offline, Server and Interactive of a GB300 rack in virtual time, beside what is published.

    python benchmarks/gap.py                       # some 20 minutes of one core; writes results/gb300-rack-simulated/

Runs the three commands that would be run against a real rack, with `--target sim:gb300-rack` in place of its URL, and
keeps what is small: results, LoadGen's log files, the probes of both searches, a table and a plot. No raw records.
"""

from __future__ import annotations

import argparse
import csv
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from loadgen.mlperf import published

PRESET = "gb300-rack"
KEPT = ("mlperf.json", "mlperf_log_summary.txt", "mlperf_log_detail.txt", "summary.json")
SEARCHED = ("search.json", "curve.csv", "probes.jsonl")
COMMANDS = {
    "offline": ["--target-qps", "3700"],
    "server": ["--find-peak", "--target-qps", "2500"],
    "interactive": ["--find-peak", "--target-qps", "1500"],
}


def arguments(scenario: str, preset: str) -> list[str]:
    """What one would type after `loadgen`."""
    return ["mlperf", scenario, "--benchmark", "llama2-70b", "--target", f"sim:{preset}", *COMMANDS[scenario]]


def run(scenario: str, preset: str, scratch: Path) -> Path:
    """The command, and the folder of the run whose result it printed."""
    out = scratch / scenario
    command = [sys.executable, "-m", "loadgen"]
    command += [*arguments(scenario, preset), "--out", str(out)]
    done = subprocess.run(command, check=False)
    if done.returncode not in (0, 1) or not (out / "mlperf.json").is_file():
        raise SystemExit(f"{scenario}: exit {done.returncode}, no result in {out}")
    return out


def keep(scenario: str, out: Path, into: Path) -> dict[str, Any]:
    """Copy what is small; returns the result."""
    folder = into / scenario
    folder.mkdir(parents=True, exist_ok=True)
    confirmed = sorted(out.glob("p*-confirm"))
    inside = out
    if confirmed:
        inside = next((one for one in reversed(confirmed) if (one / "mlperf.json").is_file()), out)
    for name in KEPT:
        source = inside / name if (inside / name).is_file() else out / name
        if source.is_file():
            shutil.copy(source, folder / name)
    for name in SEARCHED:
        if (out / name).is_file():
            shutil.copy(out / name, folder / name)
    if (out / "capacity.json").is_file():
        capacity = json.loads((out / "capacity.json").read_text()) | {"evidence": "."}  # that run's summary is here
        (folder / "capacity.json").write_text(json.dumps(capacity, indent=2) + "\n")
    summary = json.loads((folder / "summary.json").read_text())
    summary["run"]["command"] = ["loadgen", *arguments(scenario, PRESET)]  # as one would type it
    summary["run"]["host"]["name"] = ""
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    return json.loads((folder / "mlperf.json").read_text())


def plot(curve: Path, title: str, limit_ms: float, into: Path) -> None:
    """Rate against TPOT p99 and goodput, as a small SVG made by hand: no library, no script, nothing to load."""
    rows = [row for row in csv.DictReader(curve.open()) if row["tpot_p99_ms"] and row["goodput_rps"]]
    if not rows:
        return
    rows.sort(key=lambda row: float(row["load"]))
    width, height, left, bottom = 640, 320, 60, 40
    rates = [float(row["load"]) for row in rows]
    most = max(rates)
    tops = {"tpot_p99_ms": max(limit_ms * 1.2, *(float(row["tpot_p99_ms"]) for row in rows)), "goodput_rps": most}

    def at(rate: float, value: float, top: float) -> str:
        x = left + (width - 2 * left) * rate / most
        y = height - bottom - (height - 2 * bottom) * value / top
        return f"{x:.1f},{y:.1f}"

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/><text x="{left}" y="18">SIMULATED: {title}</text>',
        f'<path d="M{left},{bottom} V{height - bottom} H{width - left} V{bottom}" fill="none" stroke="#888"/>',
        f'<text x="{left}" y="{height - 12}">queries/s, 0 to {most:,.0f}</text>',
        f'<text x="{left + 6}" y="{bottom + 12}" fill="#b00">TPOT p99, to {tops["tpot_p99_ms"]:,.0f} ms '
        "(limit dashed)</text>",
        f'<text x="{width - left - 6}" y="{bottom + 12}" fill="#06c" text-anchor="end">goodput, to {most:,.0f}/s'
        "</text>",
    ]
    for name, colour in (("tpot_p99_ms", "#b00"), ("goodput_rps", "#06c")):
        points = [at(rate, float(row[name]), tops[name]) for rate, row in zip(rates, rows, strict=True)]
        lines.append(f'<polyline points="{" ".join(points)}" fill="none" stroke="{colour}"/>')
        lines += [
            f'<circle cx="{point.partition(",")[0]}" cy="{point.partition(",")[2]}" r="3" fill="{colour}"/>'
            for point in points
        ]
    ends = at(0, limit_ms, tops["tpot_p99_ms"]), at(most, limit_ms, tops["tpot_p99_ms"])
    lines.append(f'<path d="M{ends[0]} L{ends[1]}" stroke="#b00" stroke-dasharray="4"/></svg>')
    into.write_text("\n".join(lines) + "\n")


def table(results: dict[str, dict[str, Any]]) -> list[str]:
    """Markdown: the simulated rack, the published Offline, the nearest public peers."""
    lines = [
        "| system | source | GPUs | Offline tok/s | Server tok/s | Interactive tok/s |",
        "|---|---|---|---|---|---|",
    ]
    made = {name: found["completed_tokens_per_s"] for name, found in results.items()}
    cells = " | ".join(f"{made[name]:,.0f}" if name in made else "-" for name in ("offline", "server", "interactive"))
    lines.append(f"| **GB300 rack, SIMULATED** | this folder, by `sim:{PRESET}`, not a measurement | 72 | {cells} |")
    for row in published.mlperf().rows:
        near = any(word in f"{row.submitter} {row.system}" for word in ("GB300", "GB200", "B200"))
        if near and row.offline:
            figures = (row.offline, row.server, row.interactive)
            shown = " | ".join("-" if figure is None else f"{figure:,.0f}" for figure in figures)
            lines.append(f"| {row.label} | {row.round}, {row.quality} | {row.gpus} | {shown} |")
    return lines


def page(results: dict[str, dict[str, Any]]) -> str:
    """README.md of the folder."""
    clock = published.rack(published.nodes().rows).single_clock
    rates = [
        f"| {name} | {found['target_qps']:,.6g} | {found['queries']:,} | {found['completed_tokens_per_s']:,.0f} | "
        f"{found['completed_tokens_per_s'] / 72:,.0f} | {found['whole_tokens_per_s']:,.0f} | "
        f"{'VALID' if found['valid'] else 'INVALID'} |"
        for name, found in results.items()
    ]
    return "\n".join(
        [
            "# SIMULATED: Llama 2 70B on a GB300 rack, Offline, Server and Interactive",
            "",
            "**No rack was measured.** These are figures of a model (`docs/simulation.md` says what it was fitted on,",
            "and where it misses), made in virtual time by one command:",
            "",
            "    python benchmarks/gap.py",
            "",
            "The Server figure is an upper bound of the model: with a batch limit of 2,048 the 200 ms limit hardly",
            "binds in it. Compare tokens/s, never queries/s: lengths are those of a synthetic set.",
            "",
            *table(results),
            "",
            f"The published Offline figure is a sum of 18 rates; timed as one system it is {clock:,.0f} tok/s,",
            "which is what the simulated figure (one clock, 72 replicas behind one round robin) stands beside.",
            "",
            "| scenario | target rate | queries | tokens/s (LoadGen's window) | per GPU | whole run | result |",
            "|---|---|---|---|---|---|---|",
            *rates,
            "",
            "What would replace this table: the same three commands against a real rack,",
            "",
            "    loadgen mlperf offline     --benchmark llama2-70b --target-qps 3700      --url http://rack:8000",
            "    loadgen mlperf server      --benchmark llama2-70b --find-peak --target-qps 2500 --url http://rack:8000",
            "    loadgen mlperf interactive --benchmark llama2-70b --find-peak --target-qps 1500 --url http://rack:8000",
            "",
            results["offline"]["disclosure"],
            "",
        ]
    )


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--preset", default=PRESET)
    flags.add_argument("--out", type=Path, default=Path("results/gb300-rack-simulated"))
    flags.add_argument("--scratch", type=Path, help="keep the runs here (some gigabytes) instead of a temporary folder")
    given = flags.parse_args()
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        scratch = given.scratch or Path(temporary)
        for scenario in COMMANDS:
            out = scratch / scenario
            if not (out / "mlperf.json").is_file():
                out = run(scenario, given.preset, scratch)
            results[scenario] = keep(scenario, out, given.out)
            shutil.rmtree(out) if given.scratch is None else None
    for scenario, limit_ms in (("server", 200.0), ("interactive", 40.0)):
        curve = given.out / scenario / "curve.csv"
        if curve.is_file():
            plot(curve, f"GB300 rack, {scenario}", limit_ms, given.out / f"{scenario}.svg")
    (given.out / "README.md").write_text(page(results))
    size = sum(file.stat().st_size for file in given.out.rglob("*") if file.is_file())
    print((given.out / "README.md").read_text())
    print(f"{given.out}: {size:,} bytes")
    if size > 2_000_000:
        raise SystemExit("more than 2 MB")


if __name__ == "__main__":
    main()
