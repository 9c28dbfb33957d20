"""What does the simulator predict for a GB300 rack, compared with published MLPerf results?

    python benchmarks/gap.py    # 20 minutes of one core; writes results/gb300-rack-simulated/

SIMULATED: it runs the three commands for Offline, Server and Interactive that one would run against
a real rack, with `--url sim:gb300-rack` in place of its URL. It keeps the small files: results,
LoadGen's log files, the trials of both searches, a table and a plot. It keeps no raw records.
"""

from __future__ import annotations

import argparse
import csv
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import rig

from loadgen.core.metrics.sustainable import CONFIRMATION_FACTOR
from loadgen.cost import published

PRESET = "gb300-rack"
MIN_RULES_S = 600  # least length of a run by the rules
SOURCE_FILE = "seen.txt"  # the tree and the day of the runs
STEADY_RUNS_FILE = "steady.json"  # the runs of benchmarks/steady.py
RESULT_FILES = ("mlperf.json", "mlperf_log_summary.txt", "mlperf_log_detail.txt", "summary.json")
SEARCH_FILES = ("search.json", "curve.csv", "probes.jsonl")
COMMANDS = {
    "offline": ["--target-qps", "3700"],
    "server": ["--find-peak", "--target-qps", "2500"],
    "interactive": ["--find-peak", "--target-qps", "1500"],
}
SMOKE = {"offline": ["--target-qps", "40", "--min-duration", "10"]}


def command_arguments(scenario: str, preset: str, commands: dict[str, list[str]]) -> list[str]:
    """Return the arguments of `loadgen` for a scenario."""
    return [
        "mlperf",
        scenario,
        "--benchmark",
        "llama2-70b",
        "--url",
        f"sim:{preset}",
        *commands[scenario],
    ]


def run_scenario(scenario: str, preset: str, scratch: Path, commands: dict[str, list[str]]) -> Path:
    """Run a scenario and return the folder of its result."""
    run_dir = scratch / scenario
    command = [
        sys.executable,
        "-m",
        "loadgen",
        *command_arguments(scenario, preset, commands),
        "--out",
        str(run_dir),
    ]
    completed = subprocess.run(command, check=False)
    if completed.returncode not in (0, 1) or not (run_dir / "mlperf.json").is_file():
        raise SystemExit(f"{scenario}: exit {completed.returncode}, no result in {run_dir}")

    return run_dir


def find_confirmed_run(run_dir: Path) -> Path:
    """Return the last run that confirmed the rate of a search, or the folder itself without one."""
    confirmations = sorted([*run_dir.glob("p*-confirm"), *run_dir.glob("p*-sustain")])
    for confirmation in reversed(confirmations):
        if (confirmation / "mlperf.json").is_file():
            return confirmation
    return run_dir


def copy_results(scenario: str, run_dir: Path, result_dir: Path) -> None:
    """Copy the small files of a run into the result folder, and rewrite what names this machine.

    The results are those of the run that confirmed the rate of a search, and its trials. The copied
    capacity names the result folder as its evidence. The copied summary has the command that a user
    would type and no host name.
    """
    folder = result_dir / scenario
    folder.mkdir(parents=True, exist_ok=True)

    confirmed_dir = find_confirmed_run(run_dir)
    for name in RESULT_FILES:
        copy_if_exists(run_dir / name, folder / name)
        copy_if_exists(confirmed_dir / name, folder / name)

    for name in SEARCH_FILES:
        copy_if_exists(run_dir / name, folder / name)

    if (run_dir / "capacity.json").is_file():
        capacity = read_json(run_dir / "capacity.json")
        capacity["evidence"] = "."
        write_json(folder / "capacity.json", capacity)

    summary = read_json(folder / "summary.json")
    summary["run"]["command"] = ["loadgen", *command_arguments(scenario, PRESET, COMMANDS)]
    summary["run"]["host"]["name"] = ""
    write_json(folder / "summary.json", summary)


def copy_if_exists(source: Path, target: Path) -> None:
    """Copy a file if there is one."""
    if source.is_file():
        shutil.copy(source, target)


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file."""
    value: dict[str, Any] = json.loads(path.read_text())
    return value


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write an object into a JSON file, with indentation."""
    path.write_text(json.dumps(value, indent=2) + "\n")


class PlotArea:
    """The size of a plot and its axes, which both begin at 0."""

    width, height = 640, 320
    left, bottom = 60, 40  # margins

    def __init__(self, max_rate: float) -> None:
        self.max_rate = max_rate

    def point(self, rate: float, value: float, axis_top: float) -> str:
        """Return the coordinates "X,Y" of a value, on an axis that ends at `axis_top`."""
        plot_width = self.width - 2 * self.left
        plot_height = self.height - 2 * self.bottom
        x = self.left + plot_width * rate / self.max_rate
        y = self.height - self.bottom - plot_height * value / axis_top
        return f"{x:.1f},{y:.1f}"


TPOT_COLOUR, GOODPUT_COLOUR = "#b00", "#06c"


def write_plot(curve_path: Path, title: str, limit_ms: float, svg_path: Path) -> None:
    """Write TPOT p99 and goodput over the rate as a small SVG, from the trials of a search.

    `curve_path` is the CSV file of the trials. `limit_ms` is the limit on TPOT p99, a dashed line.
    The SVG needs no library, no script and nothing to load.
    """
    trials = read_curve(curve_path)
    if not trials:
        return

    area = PlotArea(max_rate=trials[-1].rate)
    max_tpot_ms = max(limit_ms * 1.2, *(trial.tpot_p99_ms for trial in trials))
    tpot_points = [area.point(trial.rate, trial.tpot_p99_ms, max_tpot_ms) for trial in trials]
    goodput_points = [area.point(trial.rate, trial.goodput_rps, area.max_rate) for trial in trials]
    limit_begin = area.point(0, limit_ms, max_tpot_ms)
    limit_end = area.point(area.max_rate, limit_ms, max_tpot_ms)
    lines = [
        *draw_axes(area, title, max_tpot_ms),
        *draw_series(tpot_points, TPOT_COLOUR),
        *draw_series(goodput_points, GOODPUT_COLOUR),
        f'<path d="M{limit_begin} L{limit_end}" stroke="{TPOT_COLOUR}" stroke-dasharray="4"/>'
        "</svg>",
    ]
    svg_path.write_text("\n".join(lines) + "\n")


class CurvePoint(NamedTuple):
    """A trial of a search: its rate, its TPOT p99 and its goodput, both rates per second."""

    rate: float
    tpot_p99_ms: float
    goodput_rps: float


def read_curve(path: Path) -> list[CurvePoint]:
    """Return the trials that have both metrics, the lowest rate first."""
    points = [
        CurvePoint(float(row["load"]), float(row["tpot_p99_ms"]), float(row["goodput_rps"]))
        for row in csv.DictReader(path.open())
        if row["tpot_p99_ms"] and row["goodput_rps"]
    ]
    return sorted(points, key=lambda point: point.rate)


def draw_axes(area: PlotArea, title: str, max_tpot_ms: float) -> list[str]:
    """Return the SVG elements of the background, the axes and their labels."""
    width, height, left, bottom = area.width, area.height, area.left, area.bottom
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>'
        f'<text x="{left}" y="18">SIMULATED: {title}</text>',
        f'<path d="M{left},{bottom} V{height - bottom} H{width - left} V{bottom}" fill="none" '
        'stroke="#888"/>',
        f'<text x="{left}" y="{height - 12}">queries/s, 0 to {area.max_rate:,.0f}</text>',
        f'<text x="{left + 6}" y="{bottom + 12}" fill="{TPOT_COLOUR}">TPOT p99, to '
        f"{max_tpot_ms:,.0f} ms (limit dashed)</text>",
        f'<text x="{width - left - 6}" y="{bottom + 12}" fill="{GOODPUT_COLOUR}" '
        f'text-anchor="end">goodput, to {area.max_rate:,.0f}/s</text>',
    ]


def draw_series(points: list[str], colour: str) -> list[str]:
    """Return the SVG elements of a line through points "X,Y", with a circle at each."""
    line = f'<polyline points="{" ".join(points)}" fill="none" stroke="{colour}"/>'
    circles = []
    for point in points:
        x, y = point.split(",")
        circles.append(f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>')
    return [line, *circles]


def format_rounded(value: float) -> str:
    """Return a number with three significant digits, as the model has an error of 5 to 25 %."""
    rounded = float(f"{value:.3g}")
    return f"{rounded:,.0f}"


def read_steady_runs(scenario_dir: Path) -> list[dict[str, Any]]:
    """Return the runs of `benchmarks/steady.py` for a scenario, an empty list without any."""
    path = scenario_dir / STEADY_RUNS_FILE
    if not path.is_file():
        return []
    runs: list[dict[str, Any]] = json.loads(path.read_text())
    return runs


def is_shown_sustained(steady_run: dict[str, Any]) -> bool:
    """Return whether a valid run was long enough to show growth, and did not show any.

    Whether a load is sustained may also be unknown (None), which counts as no growth.
    """
    is_long_enough = steady_run["length_s"] >= CONFIRMATION_FACTOR * MIN_RULES_S
    shows_growth = steady_run["sustainable"]["sustained"] is False
    return bool(steady_run["valid"]) and is_long_enough and not shows_growth


def sustained_runs(scenario_dir: Path) -> list[dict[str, Any]]:
    """Return the sustained runs of `benchmarks/steady.py`, the highest rate first."""
    sustained = [run for run in read_steady_runs(scenario_dir) if is_shown_sustained(run)]
    return sorted(sustained, key=lambda run: -run["rate_per_s"])


def update_capacity(scenario_dir: Path, result: dict[str, Any]) -> None:
    """Set the capacity to the highest sustained rate of `benchmarks/steady.py`.

    It does nothing if the search itself showed that its rate is sustained, or if there is no such
    run.
    """
    runs = sustained_runs(scenario_dir)
    if result.get("sustained") is True or not runs:
        return

    highest = runs[0]
    capacity_path = scenario_dir / "capacity.json"
    capacity = read_json(capacity_path)
    capacity["rate_per_s"] = highest["rate_per_s"]
    capacity["low_per_s"] = highest["rate_per_s"]
    capacity["sustained"] = True
    capacity["sustained_why"] = (
        f"held over {highest['length_s']:,.0f} s; {highest['sustainable']['why']}"
    )
    write_json(capacity_path, capacity)


def full_run_tokens_per_s(name: str, results: dict[str, dict[str, Any]], result_dir: Path) -> float:
    """Return tokens/s of a scenario over the full run, at a sustained rate if there is one.

    Offline has no rate. Where the search did not show that its rate is sustained, the highest
    sustained rate of `benchmarks/steady.py` counts.
    """
    result = results[name]
    needs_steady_run = name != "offline" and result.get("sustained") is not True
    runs = sustained_runs(result_dir / name)
    if needs_steady_run and runs:
        return float(runs[0]["tokens_per_s_whole_run"])
    return float(result["whole_tokens_per_s"])


def is_valid_by_rules_only(name: str, result: dict[str, Any], result_dir: Path) -> bool:
    """Return whether no run showed that the rate of a scenario is sustained."""
    if name == "offline" or result.get("sustained") is True:
        return False
    return not sustained_runs(result_dir / name)


SYSTEMS_HEADER = [
    "| system | source | GPUs | Offline tok/s | Server tok/s | Server / Offline | Interactive "
    "tok/s |",
    "|---|---|---|---|---|---|---|",
]


def format_systems(results: dict[str, dict[str, Any]], result_dir: Path) -> list[str]:
    """Return Markdown rows of the simulated rack and of the published systems next to it."""
    peers = [row for row in published.load_systems().rows if is_peer(row)]
    return [
        *SYSTEMS_HEADER,
        format_simulated_rack(results, result_dir),
        *(format_published_system(row) for row in peers),
    ]


def format_simulated_rack(results: dict[str, dict[str, Any]], result_dir: Path) -> str:
    """Return the row of the simulated rack."""
    tokens_per_s = {name: full_run_tokens_per_s(name, results, result_dir) for name in results}
    rate_cells = {}
    for name in ("offline", "server", "interactive"):
        cell = "-"
        if name in tokens_per_s:
            cell = format_rounded(tokens_per_s[name])
            if is_valid_by_rules_only(name, results[name], result_dir):
                cell += " (rules only)"
        rate_cells[name] = cell

    ratio = "-"
    if "server" in tokens_per_s and "offline" in tokens_per_s:
        ratio = f"{tokens_per_s['server'] / tokens_per_s['offline']:.3f}"

    return format_markdown_row(
        "**GB300 rack, SIMULATED**",
        f"this folder, by `sim:{PRESET}`, not a measurement; whole run",
        72,
        rate_cells["offline"],
        rate_cells["server"],
        ratio,
        rate_cells["interactive"],
    )


def is_peer(row: published.System) -> bool:
    """Return whether a published system has Blackwell GPUs and an Offline result."""
    name = f"{row.submitter} {row.system}"
    return bool(row.offline) and any(gpu in name for gpu in ("GB300", "GB200", "B200"))


def format_published_system(row: published.System) -> str:
    """Return the row of a published system."""
    ratio = "-"
    if row.server and row.offline:
        ratio = f"{row.server / row.offline:.3f}"

    return format_markdown_row(
        row.label,
        f"{row.round}, {row.quality}",
        row.gpus,
        format_optional(row.offline),
        format_optional(row.server),
        ratio,
        format_optional(row.interactive),
    )


def format_optional(value: float | None) -> str:
    """Return a whole number with thousands separators, or "-" for None."""
    return "-" if value is None else f"{value:,.0f}"


def format_markdown_row(*cells: object) -> str:
    """Return a row of a Markdown table."""
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def describe_standing(result: dict[str, Any], scenario: str, result_dir: Path) -> str:
    """Return whether a run is VALID by the rules, and whether its rate is sustained.

    The run itself says so, or a run of `benchmarks/steady.py` at the same rate that shows growth.
    """
    if not result["valid"]:
        return "INVALID"
    if scenario == "offline":
        return "VALID"

    is_sustained = result.get("sustained")
    if is_sustained is None:
        runs_at_rate = [
            run
            for run in read_steady_runs(result_dir / scenario)
            if run["rate_per_s"] == result["target_qps"]
        ]
        if any(run["sustainable"]["sustained"] is False for run in runs_at_rate):
            is_sustained = False

    if is_sustained is None:
        return "rules only: not shown"

    return "VALID, sustained" if is_sustained else "rules only: NOT sustained"


def format_capacities(result_dir: Path) -> list[str]:
    """Return Markdown rows of the capacities that the searches found."""
    rows = []
    for scenario in ("server", "interactive"):
        result = read_json(result_dir / scenario / "search.json")["answer"]
        interval = f"{result['interval']['low']:,.0f} to {result['interval']['high']:,.0f}"
        not_sustained = result["not_steady"]
        rows.append(
            format_markdown_row(
                scenario,
                f"{result['load']:,.0f} ({interval})",
                f"{result['confirmed']:,.0f}",
                f"{result['steady']:,.0f}",
                f"{not_sustained:,.0f}" if not_sustained else "-",
            )
        )

    return rows


def steady_run_sources(result_dir: Path) -> set[str]:
    """Return the trees and days of the runs of `benchmarks/steady.py`."""
    return {
        run["seen"]
        for scenario in ("server", "interactive")
        for run in read_steady_runs(result_dir / scenario)
    }


def format_steady_runs(result_dir: Path) -> list[str]:
    """Return a Markdown row for every run of `benchmarks/steady.py`, the lowest rate first."""
    rows = []
    for scenario in ("server", "interactive"):
        runs = read_steady_runs(result_dir / scenario)
        runs.sort(key=lambda run: run["rate_per_s"])
        rows += [format_steady_run(scenario, run) for run in runs]
    return rows


def format_steady_run(scenario: str, run: dict[str, Any]) -> str:
    """Return the Markdown row of a run of `benchmarks/steady.py`."""
    is_sustained = run["sustainable"]["sustained"]
    if is_sustained is None:
        sustained = "not known"
    else:
        sustained = "yes" if is_sustained else "NO"

    return format_markdown_row(
        scenario,
        f"{run['rate_per_s']:,.6g}",
        f"{run['length_s']:,.0f}",
        "VALID" if run["valid"] else "INVALID",
        f"{run['p99_ms']['ttft']:,.0f}",
        f"{run['p99_ms']['tpot']:,.0f}",
        format_rounded(run["tokens_per_s_whole_run"]),
        f"{sustained}: {run['sustainable']['why']}",
    )


def describe_short_runs(offline: dict[str, Any], result_dir: Path) -> str:
    """Return what a Server run of the shortest length gave, or "" if there is none."""
    runs = [
        run for run in read_steady_runs(result_dir / "server") if run["length_s"] == MIN_RULES_S
    ]
    if not runs:
        return ""

    fastest = max(runs, key=lambda run: run["rate_per_s"])
    ratio = fastest["tokens_per_s_whole_run"] / offline["whole_tokens_per_s"]
    return (
        "The shorter a Server run is, the more the time of its last responses counts: a run of "
        f"{MIN_RULES_S} s by the rules, at {fastest['rate_per_s']:,.0f}/s, gave "
        f"{format_rounded(fastest['tokens_per_s_whole_run'])}, "
        f"{ratio:.3f} of Offline. "
    )


def format_length(result: Mapping[str, object]) -> str:
    """Return the scheduled seconds of a run."""
    return f"{result['scheduled_s']:,.0f}" if result["scheduled_s"] else "all at once"


def format_page(results: dict[str, dict[str, Any]], result_dir: Path) -> str:
    """Return the text of README.md of the result folder."""
    single_clock_rate = published.compute_rack_rates(published.load_nodes().rows).single_clock
    run_rows = [
        f"| {name} | {result['target_qps']:,.6g} | {format_length(result)} | "
        f"{result['queries']:,} | {format_rounded(result['whole_tokens_per_s'])} | "
        f"{format_rounded(result['whole_tokens_per_s'] / 72)} | "
        f"{format_rounded(result['completed_tokens_per_s'])} | "
        f"{describe_standing(result, name, result_dir)} |"
        for name, result in results.items()
    ]

    return "\n".join(
        [
            "# Simulated: Llama 2 70B on a GB300 rack, Offline, Server and Interactive",
            "",
            "This page compares a simulated rack of 72 GB300 GPUs with published MLPerf results, "
            "for readers who want to know what",
            "the simulation predicts for a system that nobody has published in full. **No rack "
            "was measured.** All numbers of this",
            "folder come from a performance model in virtual time. [The "
            "simulation](../../docs/evidence/simulation.md) describes",
            "what the model was fitted on and where it is wrong. One command makes the folder:",
            "",
            "    python benchmarks/gap.py",
            "",
            "The runs were made at this commit and on this day: "
            f"{(result_dir / SOURCE_FILE).read_text().strip()}.",
            "",
            "Two remarks before you use the numbers:",
            "",
            "- The Server result is an upper bound of the model. With a batch limit of 2,048, the "
            "latency limit of 200 ms hardly",
            "  restricts it.",
            "- Compare tokens per second, never queries per second. The lengths are those of a "
            "synthetic data set.",
            "",
            "## Offline and Server on one clock",
            "",
            "Both columns count tokens over the full run, from the first query to the last "
            "completion, at rates that are sustained",
            "unless they are marked. LoadGen itself counts Server until the query that was issued "
            "last has ended, which is a shorter",
            "time. Its number is further below and cannot be compared with Offline. Simulated "
            "numbers have three digits, because the",
            "model has an error of 5 to 25 %.",
            "",
            *format_systems(results, result_dir),
            "",
            "The only public pair of results of a GB300 rack is CoreWeave's. Its Server result is "
            "0.832 of its Offline result",
            f"(944,902 / 1,136,100). For its GB200 rack, this ratio is 1.019. "
            f"{describe_short_runs(results['offline'], result_dir)}The model is above the",
            "public pair because some things that cost a real rack throughput in Server, and "
            "little in Offline, are not part of it:",
            "the HTTP server, the tokenizer, the network, the router, and the jitter of a host.",
            "",
            f"The published Offline number is a sum of 18 rates. Timed as one system it is "
            f"{single_clock_rate:,.0f} tok/s. This is the number to",
            "compare the simulated one with, which has one clock and 72 replicas behind one "
            "round-robin router.",
            "",
            "## The runs",
            "",
            "The table has one row for each run of this folder. The last column has the result by "
            "the rules of MLPerf, and whether",
            "the load is sustained:",
            "",
            "| scenario | target rate | seconds | queries | tokens/s, full run | per GPU | "
            "tokens/s in LoadGen's window | result |",
            "|---|---|---|---|---|---|---|---|",
            *run_rows,
            "",
            "## Two capacities",
            "",
            "By the rules of MLPerf, a run lasts for 600 s. A load is sustained if it meets the "
            "limits for twice that time and nothing",
            "grows. Rates are per second:",
            "",
            "| scenario | 50 % of the runs of 600 s pass (95 % CI) | confirmed by the rules | "
            "sustained | not sustained |",
            "|---|---|---|---|---|",
            *format_capacities(result_dir),
            "",
            "## Is the load sustained?",
            "",
            "A rate that passes for 600 s may still have a queue that grows. The second half of "
            "each run is tested for growth of TTFT",
            "and of the number of requests in flight, for each replica, with an error rate of 1 % "
            "for all of them together. See",
            "[steady state](../../docs/concepts/steady-state.md).",
            "",
            "There is a resonance between the round-robin router and the data set. 72 replicas "
            "and 24,576 samples have the common factor",
            "24, so each replica receives the same 1,024 samples in every pass, and the heaviest "
            "part has 5.4 % more output tokens than",
            "the mean. Slow replicas with heavy parts are overloaded for the whole run, while the "
            "others have room.",
            "",
            "| scenario | rate | length, s | by the limits | TTFT p99, ms | TPOT p99, ms | "
            "tokens/s, full run | sustained |",
            "|---|---|---|---|---|---|---|---|",
            *format_steady_runs(result_dir),
            "",
            "These rows were made with `python benchmarks/steady.py gb300-rack server 3515 "
            "--length 1200` and similar commands "
            f"({'; '.join(sorted(steady_run_sources(result_dir)))}).",
            "",
            "## How certain is this?",
            "",
            "Three things limit how exact these numbers are:",
            "",
            "1. The model has an error of 5 to 25 %.",
            "2. Another order of the samples and the seeds of another round change the result by "
            "up to 1.9 %. With the seeds of v6.0,",
            "   3,638/s is VALID, while the search with those of v6.1 finds 3,592/s.",
            "3. The interval in `search.json` covers the uncertainty of the search only.",
            "",
            "## What to do next",
            "",
            "Use these numbers to plan, and measure a real rack before you rely on them. The "
            "results of these three commands would",
            "replace the tables:",
            "",
            "    loadgen mlperf offline     --benchmark llama2-70b --target-qps 3700      --url "
            "http://rack:8000",
            "    loadgen mlperf server      --benchmark llama2-70b --find-peak --target-qps 2500 "
            "--url http://rack:8000",
            "    loadgen mlperf interactive --benchmark llama2-70b --find-peak --target-qps 1500 "
            "--url http://rack:8000",
            "",
            results["offline"]["disclosure"],
            "",
        ]
    )


def main() -> None:
    """Run the scenarios, copy their results and write the page."""
    args = parse_command_line()
    with tempfile.TemporaryDirectory() as temporary:
        scratch = args.scratch or Path(temporary)
        result_dir = args.out
        if args.smoke:
            stored_results = rig.BENCHMARKS_DIR.parent / args.out
            result_dir = shutil.copytree(stored_results, Path(temporary) / "copy")

        commands = SMOKE if args.smoke else COMMANDS
        for scenario in filter(None, args.only.split(",")):
            run_dir = scratch / scenario
            is_done = (run_dir / "mlperf.json").is_file()  # by an earlier start with --scratch
            if not is_done:
                run_scenario(scenario, args.preset, scratch, commands)

            copy_results(scenario, run_dir, result_dir)
            (result_dir / SOURCE_FILE).write_text(rig.describe_commit_and_date() + "\n")

            if args.scratch is None:
                shutil.rmtree(run_dir)

        write_page(result_dir)


def parse_command_line() -> argparse.Namespace:
    """Parse the options of the script."""
    parser = rig.create_parser(__doc__)
    parser.add_argument("--preset", default=PRESET)
    parser.add_argument("--out", type=Path, default=Path("results/gb300-rack-simulated"))
    parser.add_argument(
        "--only",
        default=",".join(COMMANDS),
        help="the scenarios to run; the results of the others are kept. With an empty text, only "
        "the page is written again",
    )

    parser.add_argument(
        "--scratch",
        type=Path,
        help="keep the runs here (some gigabytes) instead of a temporary folder",
    )
    return rig.parse_arguments(parser, preset="gb300-vm", only="offline")


def write_page(result_dir: Path) -> None:
    """Write the plots and the page from what is in the folder."""
    results = {
        name: json.loads((result_dir / name / "mlperf.json").read_text()) for name in COMMANDS
    }
    for scenario, limit_ms in (("server", 200.0), ("interactive", 40.0)):
        write_plot(
            result_dir / scenario / "curve.csv",
            f"GB300 rack, {scenario}",
            limit_ms,
            result_dir / f"{scenario}.svg",
        )
        update_capacity(result_dir / scenario, results[scenario])

    (result_dir / "README.md").write_text(format_page(results, result_dir))
    print((result_dir / "README.md").read_text())
    size = sum(file.stat().st_size for file in result_dir.rglob("*") if file.is_file())
    print(f"{result_dir}: {size:,} bytes")
    if size > 2_000_000:
        raise SystemExit("more than 2 MB")


if __name__ == "__main__":
    main()
