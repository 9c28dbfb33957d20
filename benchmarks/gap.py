"""The gap filled, SIMULATED: Offline, Server and Interactive of a GB300 rack in virtual time, beside what is published.

    python benchmarks/gap.py                       # some 20 minutes of one core; writes results/gb300-rack-simulated/

Runs the three commands that would be run against a real rack, with `--url sim:gb300-rack` in place of its URL, and
keeps what is small: results, LoadGen's log files, the probes of both searches, a table and a plot. No raw records.
"""

# ruff: noqa: E501 (lines of Markdown)

from __future__ import annotations

import csv
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import rig

from loadgen.core.metrics.sustainable import CONFIRMATION_FACTOR
from loadgen.cost import published

PRESET = "gb300-rack"
RULES_S = 600  # least length of a run by the rules
SEEN = "seen.txt"  # the tree and the day of the runs
STEADY = "steady.json"  # the runs of benchmarks/steady.py
KEPT = ("mlperf.json", "mlperf_log_summary.txt", "mlperf_log_detail.txt", "summary.json")
SEARCHED = ("search.json", "curve.csv", "probes.jsonl")
COMMANDS = {
    "offline": ["--target-qps", "3700"],
    "server": ["--find-peak", "--target-qps", "2500"],
    "interactive": ["--find-peak", "--target-qps", "1500"],
}
SMOKE = {"offline": ["--target-qps", "40", "--min-duration", "10"]}


def arguments(scenario: str, preset: str, commands: dict[str, list[str]]) -> list[str]:
    """What one would type after `loadgen`."""
    return [
        "mlperf",
        scenario,
        "--benchmark",
        "llama2-70b",
        "--url",
        f"sim:{preset}",
        *commands[scenario],
    ]


def run(scenario: str, preset: str, scratch: Path, commands: dict[str, list[str]]) -> Path:
    """The command, and the folder of the run whose result it printed."""
    out = scratch / scenario
    command = [
        sys.executable,
        "-m",
        "loadgen",
        *arguments(scenario, preset, commands),
        "--out",
        str(out),
    ]
    done = subprocess.run(command, check=False)
    if done.returncode not in (0, 1) or not (out / "mlperf.json").is_file():
        raise SystemExit(f"{scenario}: exit {done.returncode}, no result in {out}")
    return out


def keep(scenario: str, out: Path, into: Path) -> None:
    """Copy what is small."""
    folder = into / scenario
    folder.mkdir(parents=True, exist_ok=True)
    confirmed = sorted([*out.glob("p*-confirm"), *out.glob("p*-sustain")])
    inside = next((one for one in reversed(confirmed) if (one / "mlperf.json").is_file()), out)
    for name in KEPT:
        source = inside / name if (inside / name).is_file() else out / name
        if source.is_file():
            shutil.copy(source, folder / name)
    for name in SEARCHED:
        if (out / name).is_file():
            shutil.copy(out / name, folder / name)
    if (out / "capacity.json").is_file():
        capacity = json.loads((out / "capacity.json").read_text()) | {
            "evidence": "."
        }  # that run's summary is here
        (folder / "capacity.json").write_text(json.dumps(capacity, indent=2) + "\n")
    summary = json.loads((folder / "summary.json").read_text())
    summary["run"]["command"] = [
        "loadgen",
        *arguments(scenario, PRESET, COMMANDS),
    ]  # as one would type it
    summary["run"]["host"]["name"] = ""
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")


def plot(curve: Path, title: str, limit_ms: float, into: Path) -> None:
    """Rate against TPOT p99 and goodput, as a small SVG made by hand: no library, no script, nothing to load."""
    rows = [
        row for row in csv.DictReader(curve.open()) if row["tpot_p99_ms"] and row["goodput_rps"]
    ]
    if not rows:
        return
    rows.sort(key=lambda row: float(row["load"]))
    width, height, left, bottom = 640, 320, 60, 40
    rates = [float(row["load"]) for row in rows]
    most = max(rates)
    tops = {
        "tpot_p99_ms": max(limit_ms * 1.2, *(float(row["tpot_p99_ms"]) for row in rows)),
        "goodput_rps": most,
    }

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
        points = [
            at(rate, float(row[name]), tops[name]) for rate, row in zip(rates, rows, strict=True)
        ]
        lines.append(f'<polyline points="{" ".join(points)}" fill="none" stroke="{colour}"/>')
        lines += [
            f'<circle cx="{point.partition(",")[0]}" cy="{point.partition(",")[2]}" r="3" fill="{colour}"/>'
            for point in points
        ]
    ends = at(0, limit_ms, tops["tpot_p99_ms"]), at(most, limit_ms, tops["tpot_p99_ms"])
    lines.append(f'<path d="M{ends[0]} L{ends[1]}" stroke="#b00" stroke-dasharray="4"/></svg>')
    into.write_text("\n".join(lines) + "\n")


def rounded(value: float) -> str:
    """Three significant digits: the model is wrong by 5 to 25 %."""
    return f"{float(f'{value:.3g}'):,.0f}"


def steady(folder: Path) -> list[dict[str, Any]]:
    """The runs of `benchmarks/steady.py` that are kept in a folder, the highest sustained rate first."""
    runs = json.loads((folder / STEADY).read_text()) if (folder / STEADY).is_file() else []
    held = [one for one in runs if one["valid"] and one["sustainable"]["sustained"] is not False]
    held = [one for one in held if one["length_s"] >= CONFIRMATION_FACTOR * RULES_S]
    return sorted(held, key=lambda one: -one["rate_per_s"])


def keep_capacity(folder: Path, found: dict[str, Any]) -> None:
    """The capacity at the rate that `benchmarks/steady.py` showed to be sustained, where the search showed none."""
    file = folder / "capacity.json"
    capacity = json.loads(file.read_text())
    if found.get("sustained") is True or not (runs := steady(folder)):
        return
    rate = runs[0]["rate_per_s"]
    capacity |= {"rate_per_s": rate, "low_per_s": rate, "sustained": True}
    capacity["sustained_why"] = (
        f"held over {runs[0]['length_s']:,.0f} s; {runs[0]['sustainable']['why']}"
    )
    file.write_text(json.dumps(capacity, indent=2) + "\n")


def whole_run(name: str, results: dict[str, dict[str, Any]], into: Path) -> float:
    """Tokens/s of the sustained rate, over the whole run: the same window for every scenario."""
    found = results[name]
    if name != "offline" and found.get("sustained") is not True and (runs := steady(into / name)):
        return float(runs[0]["tokens_per_s_whole_run"])
    return float(found["whole_tokens_per_s"])


def table(results: dict[str, dict[str, Any]], into: Path) -> list[str]:
    """Markdown: the simulated rack, the published Offline, the nearest public peers."""
    lines = [
        "| system | source | GPUs | Offline tok/s | Server tok/s | Server / Offline | Interactive tok/s |",
        "|---|---|---|---|---|---|---|",
    ]
    made = {name: whole_run(name, results, into) for name in results}
    cells = [
        rounded(made[name]) if name in made else "-"
        for name in ("offline", "server", "interactive")
    ]
    for i, name in enumerate(("offline", "server", "interactive")):
        if (
            name in made
            and name != "offline"
            and results[name].get("sustained") is not True
            and not steady(into / name)
        ):
            cells[i] += " (rules only)"
    share = (
        f"{made['server'] / made['offline']:.3f}" if {"server", "offline"} <= made.keys() else "-"
    )
    lines.append(
        f"| **GB300 rack, SIMULATED** | this folder, by `sim:{PRESET}`, not a measurement; whole run | 72 "
        f"| {cells[0]} | {cells[1]} | {share} | {cells[2]} |"
    )
    for row in published.mlperf().rows:
        near = any(word in f"{row.submitter} {row.system}" for word in ("GB300", "GB200", "B200"))
        if near and row.offline:
            offline, server, interactive = (
                "-" if figure is None else f"{figure:,.0f}"
                for figure in (row.offline, row.server, row.interactive)
            )
            share = f"{row.server / row.offline:.3f}" if row.server else "-"
            lines.append(
                f"| {row.label} | {row.round}, {row.quality} | {row.gpus} | {offline} | {server} | {share} | {interactive} |"
            )
    return lines


def standing(found: dict[str, Any], scenario: str, into: Path) -> str:
    """VALID or not, and whether the rate is sustained: by the run itself, or by one of `benchmarks/steady.py` at it."""
    if not found["valid"]:
        return "INVALID"
    if scenario == "offline":
        return "VALID"
    sustained = found.get("sustained")
    file = into / scenario / STEADY
    for one in json.loads(file.read_text()) if file.is_file() and sustained is None else []:
        if one["rate_per_s"] == found["target_qps"] and one["sustainable"]["sustained"] is False:
            sustained = False
    return {
        True: "VALID, sustained",
        False: "rules only: NOT sustained",
        None: "rules only: not shown",
    }[sustained]


def knees(into: Path) -> list[str]:
    """Markdown: what the searches found, by the rules and sustained."""
    rows = []
    for scenario in ("server", "interactive"):
        answer = json.loads((into / scenario / "search.json").read_text())["answer"]
        ends = f"{answer['interval']['low']:,.0f} to {answer['interval']['high']:,.0f}"
        above = answer["not_steady"]
        rows.append(
            f"| {scenario} | {answer['load']:,.0f} ({ends}) | {answer['confirmed']:,.0f} | {answer['steady']:,.0f} | "
            f"{f'{above:,.0f}' if above else '-'} |"
        )
    return rows


def steady_seen(into: Path) -> set[str]:
    """The trees and days of the runs of `benchmarks/steady.py`."""
    files = [into / scenario / STEADY for scenario in ("server", "interactive")]
    return {one["seen"] for file in files if file.is_file() for one in json.loads(file.read_text())}


def steady_rows(into: Path) -> list[str]:
    """Markdown: every run of `benchmarks/steady.py`."""
    rows = []
    for scenario in ("server", "interactive"):
        file = into / scenario / STEADY
        for one in sorted(
            json.loads(file.read_text()) if file.is_file() else [],
            key=lambda one: one["rate_per_s"],
        ):
            verdict = {True: "yes", False: "NO", None: "not known"}[one["sustainable"]["sustained"]]
            rows.append(
                f"| {scenario} | {one['rate_per_s']:,.6g} | {one['length_s']:,.0f} | {'VALID' if one['valid'] else 'INVALID'} "
                f"| {one['p99_ms']['ttft']:,.0f} | {one['p99_ms']['tpot']:,.0f} | {rounded(one['tokens_per_s_whole_run'])} "
                f"| {verdict}: {one['sustainable']['why']} |"
            )
    return rows


def shorter(offline: dict[str, Any], into: Path) -> str:
    """What a Server run by the rules alone gave beside Offline; "" where the folder keeps none."""
    file = into / "server" / STEADY
    runs = [
        one
        for one in (json.loads(file.read_text()) if file.is_file() else [])
        if one["length_s"] == RULES_S
    ]
    if not runs:
        return ""
    one = max(runs, key=lambda one: one["rate_per_s"])
    share = one["tokens_per_s_whole_run"] / offline["whole_tokens_per_s"]
    return (
        "The shorter a Server run is, the more the time of its last responses counts: a run of "
        f"{RULES_S} s by the rules, at {one['rate_per_s']:,.0f}/s, gave {rounded(one['tokens_per_s_whole_run'])}, "
        f"{share:.3f} of Offline. "
    )


def length(found: dict[str, Any]) -> str:
    return f"{found['scheduled_s']:,.0f}" if found["scheduled_s"] else "all at once"


def page(results: dict[str, dict[str, Any]], into: Path) -> str:
    """README.md of the folder."""
    clock = published.rack(published.nodes().rows).single_clock
    rates = [
        f"| {name} | {found['target_qps']:,.6g} | {length(found)} | {found['queries']:,} | {rounded(found['whole_tokens_per_s'])} | "
        f"{rounded(found['whole_tokens_per_s'] / 72)} | {rounded(found['completed_tokens_per_s'])} | "
        f"{standing(found, name, into)} |"
        for name, found in results.items()
    ]
    return "\n".join(
        [
            "# Simulated: Llama 2 70B on a GB300 rack, Offline, Server and Interactive",
            "",
            "This page compares a simulated rack of 72 GB300 GPUs with published MLPerf results, for readers who want to know what",
            "the simulation predicts for a system that nobody has published in full. **No rack was measured.** All numbers of this",
            "folder come from a performance model in virtual time. [The simulation](../../docs/evidence/simulation.md) says what the",
            "model was fitted on and where it is wrong. One command makes the folder:",
            "",
            "    python benchmarks/gap.py",
            "",
            f"Seen: {(into / SEEN).read_text().strip()}.",
            "",
            "Two remarks before you use the numbers:",
            "",
            "- The Server result is an upper bound of the model. With a batch limit of 2,048, the latency limit of 200 ms hardly",
            "  restricts it.",
            "- Compare tokens per second, never queries per second. The lengths are those of a synthetic data set.",
            "",
            "## Offline and Server on one clock",
            "",
            "Both columns count tokens over the full run, from the first query to the last completion, at rates that are sustained",
            "unless they are marked. LoadGen itself counts Server until the query that was issued last has ended, which is a shorter",
            "time. Its number is further below and cannot be compared with Offline. Simulated numbers have three digits, because the",
            "model has an error of 5 to 25 %.",
            "",
            *table(results, into),
            "",
            "The only public pair of results of a GB300 rack is CoreWeave's. Its Server result is 0.832 of its Offline result",
            f"(944,902 / 1,136,100); that of its GB200 rack is 1.019 of it. {shorter(results['offline'], into)}The model is above the",
            "public pair because some things that cost a real rack throughput in Server, and little in Offline, are not part of it:",
            "the HTTP server, the tokenizer, the network, the router, and the jitter of a host.",
            "",
            f"The published Offline number is a sum of 18 rates. Timed as one system it is {clock:,.0f} tok/s. This is the number to",
            "compare the simulated one with, which has one clock and 72 replicas behind one round-robin router.",
            "",
            "## The runs",
            "",
            "| scenario | target rate | seconds | queries | tokens/s, full run | per GPU | tokens/s in LoadGen's window | result |",
            "|---|---|---|---|---|---|---|---|",
            *rates,
            "",
            "## Two capacities",
            "",
            "By the rules of MLPerf, a run lasts for 600 s. A load is sustained if it meets the limits for twice that time and nothing",
            "grows. Rates are per second:",
            "",
            "| scenario | 50 % of the runs of 600 s pass (95 % CI) | confirmed by the rules | sustained | not sustained |",
            "|---|---|---|---|---|",
            *knees(into),
            "",
            "## Is the load sustained?",
            "",
            "A rate that passes for 600 s may still have a queue that grows. The second half of each run is tested for growth of TTFT",
            "and of the number of requests in flight, for each replica, with an error rate of 1 % for all of them together. See",
            "[steady state](../../docs/concepts/steady-state.md).",
            "",
            "There is a resonance between the round-robin router and the data set. 72 replicas and 24,576 samples have the common factor",
            "24, so each replica receives the same 1,024 samples in every pass, and the heaviest part has 5.4 % more output tokens than",
            "the mean. Slow replicas with heavy parts are overloaded for the whole run, while the others have room.",
            "",
            "| scenario | rate | length, s | by the limits | TTFT p99, ms | TPOT p99, ms | tokens/s, full run | sustained |",
            "|---|---|---|---|---|---|---|---|",
            *steady_rows(into),
            "",
            "These rows were made with `python benchmarks/steady.py gb300-rack server 3515 --length 1200` and similar commands "
            f"({'; '.join(sorted(steady_seen(into)))}).",
            "",
            "## How certain is this?",
            "",
            "1. The model has an error of 5 to 25 %.",
            "2. Another order of the samples and the seeds of another round change the result by up to 1.9 %. With the seeds of v6.0,",
            "   3,638/s is VALID, while the search with those of v6.1 finds 3,592/s.",
            "3. The interval in `search.json` covers the uncertainty of the search only.",
            "",
            "## What to do next",
            "",
            "Measure a real rack. These three commands would replace the tables:",
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
    parser = rig.create_parser(__doc__)
    parser.add_argument("--preset", default=PRESET)
    parser.add_argument("--out", type=Path, default=Path("results/gb300-rack-simulated"))
    parser.add_argument(
        "--only",
        default=",".join(COMMANDS),
        help='the others stay as the folder has them; "": a new page',
    )
    parser.add_argument(
        "--scratch",
        type=Path,
        help="keep the runs here (some gigabytes) instead of a temporary folder",
    )
    args = rig.parse_arguments(parser, preset="gb300-vm", only="offline")
    with tempfile.TemporaryDirectory() as temporary:
        scratch, into = args.scratch or Path(temporary), args.out
        if args.smoke:
            into = shutil.copytree(rig.BENCHMARKS_DIR.parent / args.out, Path(temporary) / "kept")
        for scenario in filter(None, args.only.split(",")):
            out = scratch / scenario
            if not (out / "mlperf.json").is_file():
                out = run(scenario, args.preset, scratch, SMOKE if args.smoke else COMMANDS)
            keep(scenario, out, into)
            (into / SEEN).write_text(rig.describe_tree_and_date() + "\n")
            if args.scratch is None:
                shutil.rmtree(out)
        write(into)


def write(into: Path) -> None:
    """The plots and the page, of what is in the folder."""
    results = {name: json.loads((into / name / "mlperf.json").read_text()) for name in COMMANDS}
    for scenario, limit_ms in (("server", 200.0), ("interactive", 40.0)):
        plot(
            into / scenario / "curve.csv",
            f"GB300 rack, {scenario}",
            limit_ms,
            into / f"{scenario}.svg",
        )
        keep_capacity(into / scenario, results[scenario])
    (into / "README.md").write_text(page(results, into))
    print((into / "README.md").read_text())
    size = sum(file.stat().st_size for file in into.rglob("*") if file.is_file())
    print(f"{into}: {size:,} bytes")
    if size > 2_000_000:
        raise SystemExit("more than 2 MB")


if __name__ == "__main__":
    main()
