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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import rig

from loadgen.core.metrics.sustainable import CONFIRMATION_FACTOR
from loadgen.cost import published

PRESET = "gb300-rack"
RACK_GPUS = 72
MIN_RULES_S = 600  # the shortest run that the rules of MLPerf allow
MAX_RESULT_BYTES = 2_000_000  # of the result folder, which is committed
SOURCE_FILE = "seen.txt"  # the commit and the day of the runs
STEADY_RUNS_FILE = "steady.json"  # the runs of benchmarks/steady.py
RESULT_FILES = ("mlperf.json", "mlperf_log_summary.txt", "mlperf_log_detail.txt", "summary.json")
SEARCH_FILES = ("search.json", "curve.csv", "probes.jsonl")

SCENARIO_OPTIONS = {
    "offline": ["--target-qps", "3700"],
    "server": ["--find-peak", "--target-qps", "2500"],
    "interactive": ["--find-peak", "--target-qps", "1500"],
}
SMOKE_SCENARIO_OPTIONS = {"offline": ["--target-qps", "40", "--min-duration", "10"]}

RATE_SCENARIOS = ("server", "interactive")  # those with a rate of queries, which a search finds
TPOT_LIMITS_MS = {"server": 200.0, "interactive": 40.0}  # at p99, by the rules


# -- run the scenarios --


def create_command(scenario: str, preset: str, options: Sequence[str]) -> list[str]:
    """Return the arguments of `loadgen` for a scenario on a simulated server."""
    target = ["--benchmark", "llama2-70b", "--url", f"sim:{preset}"]
    return ["mlperf", scenario, *target, *options]


def run_scenario(command: Sequence[str], run_dir: Path) -> None:
    """Run a scenario into a folder. Raises SystemExit if it has no result."""
    program = [sys.executable, "-m", "loadgen", *command, "--out", str(run_dir)]
    completed = subprocess.run(program, check=False)

    # The exit code is 1 for a result that is INVALID by the rules.
    if completed.returncode not in (0, 1) or not (run_dir / "mlperf.json").is_file():
        raise SystemExit(f"{run_dir}: exit {completed.returncode}, no result")


def copy_results(scenario: str, run_dir: Path, result_dir: Path) -> None:
    """Copy the small files of a run into the result folder.

    If the run was a search, the results are those of the run that confirmed its rate.
    """
    scenario_dir = result_dir / scenario
    scenario_dir.mkdir(parents=True, exist_ok=True)

    confirmed_dir = find_confirmed_run(run_dir)
    for name in RESULT_FILES:
        copy_if_exists(run_dir / name, scenario_dir / name)
        copy_if_exists(confirmed_dir / name, scenario_dir / name)

    for name in (*SEARCH_FILES, "capacity.json"):
        copy_if_exists(run_dir / name, scenario_dir / name)

    remove_local_names(scenario, scenario_dir)


def find_confirmed_run(run_dir: Path) -> Path:
    """Return the last run that confirmed the rate of a search, or `run_dir` if there is none."""
    confirmations = sorted([*run_dir.glob("p*-confirm"), *run_dir.glob("p*-sustain")])
    for confirmation in reversed(confirmations):
        if (confirmation / "mlperf.json").is_file():
            return confirmation
    return run_dir


def remove_local_names(scenario: str, scenario_dir: Path) -> None:
    """Replace the names of this machine and of its folders in the copied results.

    They are committed, and should not depend on where they were made. The capacity gets the result
    folder as its evidence. The summary gets the command that a user would type, and no host name.
    """
    capacity_path = scenario_dir / "capacity.json"
    if capacity_path.is_file():
        capacity = read_json(capacity_path)
        capacity["evidence"] = "."
        write_json(capacity_path, capacity)

    summary_path = scenario_dir / "summary.json"
    summary = read_json(summary_path)
    command = create_command(scenario, PRESET, SCENARIO_OPTIONS[scenario])
    summary["run"]["command"] = ["loadgen", *command]
    summary["run"]["host"]["name"] = ""
    write_json(summary_path, summary)


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


# -- read the stored results --


@dataclass(frozen=True, kw_only=True)
class SteadyRun:
    """A run of `benchmarks/steady.py`, which tests whether a rate is sustained."""

    commit_and_date: str
    rate_per_s: float
    length_s: float
    is_valid: bool  # by the rules of MLPerf
    is_sustained: bool | None  # None if it is not known
    reason: str  # why it is sustained or not
    ttft_p99_ms: float
    tpot_p99_ms: float
    tokens_per_s: float  # over the full run

    @property
    def is_shown_sustained(self) -> bool:
        """Return whether the run is valid, long enough to show growth, and does not show any.

        A run for which it is not known whether the load is sustained counts as one without growth.
        """
        is_long_enough = self.length_s >= CONFIRMATION_FACTOR * MIN_RULES_S
        return self.is_valid and is_long_enough and self.is_sustained is not False


def read_steady_runs(scenario_dir: Path) -> list[SteadyRun]:
    """Return the runs of `benchmarks/steady.py` for a scenario, an empty list without any."""
    path = scenario_dir / STEADY_RUNS_FILE
    if not path.is_file():
        return []

    return [
        SteadyRun(
            commit_and_date=run["seen"],
            rate_per_s=run["rate_per_s"],
            length_s=run["length_s"],
            is_valid=run["valid"],
            is_sustained=run["sustainable"]["sustained"],
            reason=run["sustainable"]["why"],
            ttft_p99_ms=run["p99_ms"]["ttft"],
            tpot_p99_ms=run["p99_ms"]["tpot"],
            tokens_per_s=run["tokens_per_s_whole_run"],
        )
        for run in json.loads(path.read_text())
    ]


@dataclass(frozen=True, kw_only=True)
class ScenarioResult:
    """The result of one scenario, and the runs of `benchmarks/steady.py` for it.

    Offline has no rate that could be sustained: it sends all queries at once.
    """

    scenario: str
    is_valid: bool  # by the rules of MLPerf
    is_sustained: bool | None  # None if the scenario has no rate, or if it is not known
    target_qps: float
    scheduled_s: float  # 0 if all queries are sent at once
    query_count: int
    full_run_tokens_per_s: float  # from the first query to the last completion
    loadgen_tokens_per_s: float  # in LoadGen's window, which ends earlier
    disclosure: str
    steady_runs: list[SteadyRun]

    @property
    def highest_sustained_run(self) -> SteadyRun | None:
        """Return the sustained run of `benchmarks/steady.py` with the highest rate, if any."""
        sustained_runs = [run for run in self.steady_runs if run.is_shown_sustained]
        return max(sustained_runs, key=lambda run: run.rate_per_s, default=None)

    @property
    def needs_steady_run(self) -> bool:
        """Return whether the run itself did not show that its rate is sustained."""
        return self.scenario in RATE_SCENARIOS and self.is_sustained is not True

    @property
    def sustained_tokens_per_s(self) -> float:
        """Return tokens/s over the full run, at a sustained rate if there is one."""
        steady_run = self.highest_sustained_run
        if self.needs_steady_run and steady_run is not None:
            return steady_run.tokens_per_s
        return self.full_run_tokens_per_s

    @property
    def is_valid_by_rules_only(self) -> bool:
        """Return whether no run showed that the rate is sustained."""
        return self.needs_steady_run and self.highest_sustained_run is None


def read_scenario_result(result_dir: Path, scenario: str) -> ScenarioResult:
    """Read the stored result of a scenario."""
    scenario_dir = result_dir / scenario
    result = read_json(scenario_dir / "mlperf.json")
    return ScenarioResult(
        scenario=scenario,
        is_valid=result["valid"],
        is_sustained=result.get("sustained"),
        target_qps=result["target_qps"],
        scheduled_s=result["scheduled_s"],
        query_count=result["queries"],
        full_run_tokens_per_s=result["whole_tokens_per_s"],
        loadgen_tokens_per_s=result["completed_tokens_per_s"],
        disclosure=result["disclosure"],
        steady_runs=read_steady_runs(scenario_dir),
    )


def update_capacity(result: ScenarioResult, scenario_dir: Path) -> None:
    """Set the stored capacity to the highest sustained rate of `benchmarks/steady.py`.

    It does nothing if the search itself showed that its rate is sustained, or if there is no such
    run.
    """
    steady_run = result.highest_sustained_run
    if not result.needs_steady_run or steady_run is None:
        return

    capacity_path = scenario_dir / "capacity.json"
    capacity = read_json(capacity_path)
    capacity["rate_per_s"] = steady_run.rate_per_s
    capacity["low_per_s"] = steady_run.rate_per_s
    capacity["sustained"] = True
    capacity["sustained_why"] = f"held over {steady_run.length_s:,.0f} s; {steady_run.reason}"
    write_json(capacity_path, capacity)


# -- draw the plots --


class PlottedTrial(NamedTuple):
    """A trial of a search: its rate of queries, its TPOT p99 and its goodput."""

    rate_per_s: float
    tpot_p99_ms: float
    goodput_per_s: float


def read_trials(curve_path: Path) -> list[PlottedTrial]:
    """Return the trials of a search that have both metrics, the lowest rate first."""
    with curve_path.open() as curve_file:
        rows = [row for row in csv.DictReader(curve_file) if row["tpot_p99_ms"]]

    trials = [
        PlottedTrial(float(row["load"]), float(row["tpot_p99_ms"]), float(row["goodput_rps"]))
        for row in rows
        if row["goodput_rps"]
    ]
    return sorted(trials, key=lambda trial: trial.rate_per_s)


class Point(NamedTuple):
    """A position in an SVG, in its units from the upper left corner."""

    x: float
    y: float

    def __str__(self) -> str:
        """Return the position as paths and lines of SVG have it."""
        return f"{self.x:.1f},{self.y:.1f}"


class PlotArea(NamedTuple):
    """The size of a plot with two vertical axes. All axes begin at 0."""

    max_rate_per_s: float  # at the right end of the horizontal axis
    width: int = 640
    height: int = 320
    margin_x: int = 60
    margin_y: int = 40

    def locate(self, rate_per_s: float, value: float, max_value: float) -> Point:
        """Return the position of a value on a vertical axis whose upper end is `max_value`."""
        plot_width = self.width - 2 * self.margin_x
        plot_height = self.height - 2 * self.margin_y
        return Point(
            x=self.margin_x + plot_width * rate_per_s / self.max_rate_per_s,
            y=self.height - self.margin_y - plot_height * value / max_value,
        )


TPOT_COLOUR = "#b00"
GOODPUT_COLOUR = "#06c"


def draw_plot(trials: Sequence[PlottedTrial], title: str, tpot_limit_ms: float) -> str:
    """Return an SVG of TPOT p99 and goodput over the rate of the trials.

    The limit on TPOT p99 is a dashed line. The SVG needs no library, no script and nothing to load.
    """
    area = PlotArea(max_rate_per_s=trials[-1].rate_per_s)
    max_rate_per_s = area.max_rate_per_s
    max_tpot_ms = max(1.2 * tpot_limit_ms, *(trial.tpot_p99_ms for trial in trials))

    tpot_points = [
        area.locate(trial.rate_per_s, trial.tpot_p99_ms, max_tpot_ms) for trial in trials
    ]
    goodput_points = [
        area.locate(trial.rate_per_s, trial.goodput_per_s, max_rate_per_s) for trial in trials
    ]
    limit_begin = area.locate(0, tpot_limit_ms, max_tpot_ms)
    limit_end = area.locate(max_rate_per_s, tpot_limit_ms, max_tpot_ms)
    limit_path = f'd="M{limit_begin} L{limit_end}"'
    lines = [
        *draw_axes(area, title, max_tpot_ms),
        *draw_series(tpot_points, TPOT_COLOUR),
        *draw_series(goodput_points, GOODPUT_COLOUR),
        f'<path {limit_path} stroke="{TPOT_COLOUR}" stroke-dasharray="4"/></svg>',
    ]
    return "\n".join(lines) + "\n"


def draw_axes(area: PlotArea, title: str, max_tpot_ms: float) -> list[str]:
    """Return the begin of an SVG with its background, and the elements of the axes and labels."""
    left = area.margin_x
    right = area.width - area.margin_x
    top = area.margin_y
    bottom = area.height - area.margin_y
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {area.width} {area.height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{area.width}" height="{area.height}" fill="white"/>'
        f'<text x="{left}" y="18">SIMULATED: {title}</text>',
        f'<path d="M{left},{top} V{bottom} H{right} V{top}" fill="none" stroke="#888"/>',
        f'<text x="{left}" y="{area.height - 12}">'
        f"queries/s, 0 to {area.max_rate_per_s:,.0f}</text>",
        f'<text x="{left + 6}" y="{top + 12}" fill="{TPOT_COLOUR}">'
        f"TPOT p99, to {max_tpot_ms:,.0f} ms (limit dashed)</text>",
        f'<text x="{right - 6}" y="{top + 12}" fill="{GOODPUT_COLOUR}" text-anchor="end">'
        f"goodput, to {area.max_rate_per_s:,.0f}/s</text>",
    ]


def draw_series(points: Sequence[Point], colour: str) -> list[str]:
    """Return the SVG elements of a line through points, with a circle at each."""
    line_points = " ".join(str(point) for point in points)
    circles = [
        f'<circle cx="{point.x:.1f}" cy="{point.y:.1f}" r="3" fill="{colour}"/>' for point in points
    ]
    return [f'<polyline points="{line_points}" fill="none" stroke="{colour}"/>', *circles]


# -- format the tables --


def format_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    ruler = ["---"] * len(columns)
    lines = [
        f"| {' | '.join(columns)} |",
        f"|{'|'.join(ruler)}|",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]
    return "\n".join(lines)


def format_three_digits(value: float) -> str:
    """Return a number with three significant digits, as the model has an error of 5 to 25 %."""
    rounded = float(f"{value:.3g}")
    return f"{rounded:,.0f}"


def format_whole(value: float | None) -> str:
    """Return a whole number with thousands separators, or "-" for None."""
    return "-" if value is None else f"{value:,.0f}"


SYSTEM_COLUMNS = (
    "system",
    "source",
    "GPUs",
    "Offline tok/s",
    "Server tok/s",
    "Server / Offline",
    "Interactive tok/s",
)


def format_systems(results: Mapping[str, ScenarioResult]) -> str:
    """Return the table of the simulated rack and of the published systems with similar GPUs."""
    published_systems = [row for row in published.load_systems().rows if is_comparable(row)]
    rows = [
        create_rack_row(results),
        *(create_published_row(system) for system in published_systems),
    ]
    return format_table(SYSTEM_COLUMNS, rows)


def create_rack_row(results: Mapping[str, ScenarioResult]) -> list[str]:
    """Return the cells of the simulated rack, in the order of SYSTEM_COLUMNS."""
    server_to_offline = (
        results["server"].sustained_tokens_per_s / results["offline"].sustained_tokens_per_s
    )
    return [
        "**GB300 rack, SIMULATED**",
        f"this folder, by `sim:{PRESET}`, not a measurement; full run",
        str(RACK_GPUS),
        format_sustained_rate(results["offline"]),
        format_sustained_rate(results["server"]),
        f"{server_to_offline:.3f}",
        format_sustained_rate(results["interactive"]),
    ]


def format_sustained_rate(result: ScenarioResult) -> str:
    """Return tokens/s of a scenario, marked if no run showed that its rate is sustained."""
    text = format_three_digits(result.sustained_tokens_per_s)
    if result.is_valid_by_rules_only:
        text += " (rules only)"
    return text


def is_comparable(system: published.System) -> bool:
    """Return whether a published system has Blackwell GPUs and an Offline result."""
    name = f"{system.submitter} {system.system}"
    has_blackwell_gpus = any(gpu in name for gpu in ("GB300", "GB200", "B200"))
    return has_blackwell_gpus and bool(system.offline)


def create_published_row(system: published.System) -> list[str]:
    """Return the cells of a published system, in the order of SYSTEM_COLUMNS."""
    server_to_offline = "-"
    if system.server and system.offline:
        server_to_offline = f"{system.server / system.offline:.3f}"

    return [
        system.label,
        f"{system.round}, {system.quality}",
        str(system.gpus),
        format_whole(system.offline),
        format_whole(system.server),
        server_to_offline,
        format_whole(system.interactive),
    ]


RUN_COLUMNS = (
    "scenario",
    "target rate",
    "seconds",
    "queries",
    "tokens/s, full run",
    "per GPU",
    "tokens/s in LoadGen's window",
    "result",
)


def create_run_row(result: ScenarioResult) -> list[str]:
    """Return the cells of the run of a scenario, in the order of RUN_COLUMNS."""
    scheduled_s = f"{result.scheduled_s:,.0f}" if result.scheduled_s else "all at once"
    return [
        result.scenario,
        f"{result.target_qps:,.6g}",
        scheduled_s,
        f"{result.query_count:,}",
        format_three_digits(result.full_run_tokens_per_s),
        format_three_digits(result.full_run_tokens_per_s / RACK_GPUS),
        format_three_digits(result.loadgen_tokens_per_s),
        describe_verdict(result),
    ]


def describe_verdict(result: ScenarioResult) -> str:
    """Return whether a run is VALID by the rules, and whether its rate is sustained.

    If the run itself does not show the latter, a run of `benchmarks/steady.py` at the same rate may
    show that it is not.
    """
    if not result.is_valid:
        return "INVALID"
    if result.scenario not in RATE_SCENARIOS:
        return "VALID"
    if result.is_sustained:
        return "VALID, sustained"

    has_growing_run = any(
        run.rate_per_s == result.target_qps and run.is_sustained is False
        for run in result.steady_runs
    )
    if result.is_sustained is False or has_growing_run:
        return "rules only: NOT sustained"

    return "rules only: not shown"


CAPACITY_COLUMNS = (
    "scenario",
    "50 % of the runs of 600 s pass (95 % CI)",
    "confirmed by the rules",
    "sustained",
    "not sustained",
)


def create_capacity_row(scenario: str, search_path: Path) -> list[str]:
    """Return the cells of the capacities that a search found, in the order of CAPACITY_COLUMNS."""
    found_rates = read_json(search_path)["answer"]
    interval = found_rates["interval"]
    return [
        scenario,
        f"{found_rates['load']:,.0f} ({interval['low']:,.0f} to {interval['high']:,.0f})",
        f"{found_rates['confirmed']:,.0f}",
        f"{found_rates['steady']:,.0f}",
        format_whole(found_rates["not_steady"] or None),
    ]


STEADY_COLUMNS = (
    "scenario",
    "rate",
    "length, s",
    "by the limits",
    "TTFT p99, ms",
    "TPOT p99, ms",
    "tokens/s, full run",
    "sustained",
)
SUSTAINED_TEXTS = {True: "yes", False: "NO", None: "not known"}


def create_steady_rows(result: ScenarioResult) -> Iterator[list[str]]:
    """Yield the cells of each run of `benchmarks/steady.py`, in the order of STEADY_COLUMNS.

    The lowest rate comes first.
    """
    for run in sorted(result.steady_runs, key=lambda run: run.rate_per_s):
        yield [
            result.scenario,
            f"{run.rate_per_s:,.6g}",
            f"{run.length_s:,.0f}",
            "VALID" if run.is_valid else "INVALID",
            f"{run.ttft_p99_ms:,.0f}",
            f"{run.tpot_p99_ms:,.0f}",
            format_three_digits(run.tokens_per_s),
            f"{SUSTAINED_TEXTS[run.is_sustained]}: {run.reason}",
        ]


def describe_short_run(server: ScenarioResult, offline: ScenarioResult) -> str:
    """Return what the fastest Server run of the shortest length reached, or "" without any."""
    short_runs = [run for run in server.steady_runs if run.length_s == MIN_RULES_S]
    if not short_runs:
        return ""

    fastest = max(short_runs, key=lambda run: run.rate_per_s)
    ratio = fastest.tokens_per_s / offline.full_run_tokens_per_s
    return (
        "The shorter a Server run is, the more the time of its last responses counts: a run of "
        f"{MIN_RULES_S} s by the rules, at {fastest.rate_per_s:,.0f}/s, gave "
        f"{format_three_digits(fastest.tokens_per_s)}, {ratio:.3f} of Offline."
    )


# -- write the page --


PAGE_TEMPLATE = """\
# Simulated: Llama 2 70B on a GB300 rack, Offline, Server and Interactive

This page compares a simulated rack of 72 GB300 GPUs with published MLPerf results, for readers who
want to know what the simulation predicts for a system that nobody has published in full. **No rack
was measured.** All numbers of this folder come from a performance model in virtual time. [The
simulation](../../docs/evidence/simulation.md) describes what the model was fitted on and where it
is wrong. One command makes the folder:

    python benchmarks/gap.py

The runs were made at this commit and on this day: {commit_and_date}.

Two remarks before you use the numbers:

- The Server result is an upper bound of the model. With a batch limit of 2,048, the latency limit
  of 200 ms hardly restricts it.
- Compare tokens per second, never queries per second. The lengths are those of a synthetic data
  set.

## Offline and Server on one clock

Both columns count tokens over the full run, from the first query to the last completion, at rates
that are sustained unless they are marked. LoadGen itself counts Server until the query that was
issued last has ended, which is a shorter time. Its number is further below and cannot be compared
with Offline. Simulated numbers have three digits, because the model has an error of 5 to 25 %.

{systems}

The only public pair of results of a GB300 rack is CoreWeave's. Its Server result is 0.832 of its
Offline result (944,902 / 1,136,100). For its GB200 rack, this ratio is 1.019.
{short_run}
The model is above the public pair because some things that cost a real rack throughput in Server,
and little in Offline, are not part of it: the HTTP server, the tokenizer, the network, the router,
and the jitter of a host.

The published Offline number is a sum of 18 rates. Timed as one system it is {single_clock_rate}
tok/s. This is the number to compare the simulated one with, which has one clock and 72 replicas
behind one round-robin router.

## The runs

The table has one row for each run of this folder. The last column has the result by the rules of
MLPerf, and whether the load is sustained:

{runs}

## Two capacities

By the rules of MLPerf, a run lasts for 600 s. A load is sustained if it meets the limits for twice
that time and nothing grows. Rates are per second:

{capacities}

## Is the load sustained?

A rate that passes for 600 s may still have a queue that grows. The second half of each run is
tested for growth of TTFT and of the number of requests in flight, for each replica, with an error
rate of 1 % for all of them together. See [steady state](../../docs/concepts/steady-state.md).

There is a resonance between the round-robin router and the data set. 72 replicas and 24,576 samples
have the common factor 24, so each replica receives the same 1,024 samples in every pass, and the
heaviest part has 5.4 % more output tokens than the mean. Slow replicas with heavy parts are
overloaded for the whole run, while the others have room.

{steady_runs}

These rows were made with `python benchmarks/steady.py gb300-rack server 3515 --length 1200` and
similar commands ({steady_commits_and_dates}).

## How certain is this?

Three things limit how exact these numbers are:

1. The model has an error of 5 to 25 %.
2. Another order of the samples and the seeds of another round change the result by up to 1.9 %.
   With the seeds of v6.0, 3,638/s is VALID, while the search with those of v6.1 finds 3,592/s.
3. The interval in `search.json` covers the uncertainty of the search only.

## What to do next

Use these numbers to plan, and measure a real rack before you rely on them. The results of these
three commands would replace the tables:

    loadgen mlperf offline     --benchmark llama2-70b --target-qps 3700 \\
      --url http://rack:8000
    loadgen mlperf server      --benchmark llama2-70b --find-peak --target-qps 2500 \\
      --url http://rack:8000
    loadgen mlperf interactive --benchmark llama2-70b --find-peak --target-qps 1500 \\
      --url http://rack:8000

{disclosure}
"""


def format_page(results: Mapping[str, ScenarioResult], result_dir: Path) -> str:
    """Return the text of README.md of the result folder. `results` has all three scenarios."""
    rack_rates = published.compute_rack_rates(published.load_nodes().rows)
    run_rows = [create_run_row(result) for result in results.values()]

    capacity_rows = []
    steady_rows: list[list[str]] = []
    steady_commits_and_dates: set[str] = set()
    for scenario in RATE_SCENARIOS:
        result = results[scenario]
        capacity_rows.append(create_capacity_row(scenario, result_dir / scenario / "search.json"))
        steady_rows += create_steady_rows(result)
        steady_commits_and_dates.update(run.commit_and_date for run in result.steady_runs)

    return PAGE_TEMPLATE.format(
        commit_and_date=(result_dir / SOURCE_FILE).read_text().strip(),
        systems=format_systems(results),
        short_run=describe_short_run(results["server"], results["offline"]),
        single_clock_rate=f"{rack_rates.single_clock:,.0f}",
        runs=format_table(RUN_COLUMNS, run_rows),
        capacities=format_table(CAPACITY_COLUMNS, capacity_rows),
        steady_runs=format_table(STEADY_COLUMNS, steady_rows),
        steady_commits_and_dates="; ".join(sorted(steady_commits_and_dates)),
        disclosure=results["offline"].disclosure,
    )


def write_page(result_dir: Path) -> None:
    """Write the plots and the page from the stored results, and print the page.

    Raises SystemExit if the folder has become too large to be committed.
    """
    results = {
        scenario: read_scenario_result(result_dir, scenario) for scenario in SCENARIO_OPTIONS
    }
    for scenario in RATE_SCENARIOS:
        scenario_dir = result_dir / scenario
        update_capacity(results[scenario], scenario_dir)
        trials = read_trials(scenario_dir / "curve.csv")
        if trials:
            plot = draw_plot(trials, f"GB300 rack, {scenario}", TPOT_LIMITS_MS[scenario])
            (result_dir / f"{scenario}.svg").write_text(plot)

    page = format_page(results, result_dir)
    (result_dir / "README.md").write_text(page)
    print(page)

    size_bytes = sum(path.stat().st_size for path in result_dir.rglob("*") if path.is_file())
    print(f"{result_dir}: {size_bytes:,} bytes")
    if size_bytes > MAX_RESULT_BYTES:
        raise SystemExit(f"more than {MAX_RESULT_BYTES:,} bytes")


def run_scenarios(args: argparse.Namespace, scratch: Path, result_dir: Path) -> None:
    """Run the scenarios of `--only`, and copy their results into the result folder.

    A run that an earlier start of the script left in the folder of `--scratch` is not repeated.
    """
    options_by_scenario = SMOKE_SCENARIO_OPTIONS if args.smoke else SCENARIO_OPTIONS
    for scenario in filter(None, args.only.split(",")):
        run_dir = scratch / scenario
        is_finished = (run_dir / "mlperf.json").is_file()
        if not is_finished:
            command = create_command(scenario, args.preset, options_by_scenario[scenario])
            run_scenario(command, run_dir)

        copy_results(scenario, run_dir, result_dir)
        (result_dir / SOURCE_FILE).write_text(rig.describe_commit_and_date() + "\n")

        if args.scratch is None:  # the records of a scenario take gigabytes
            shutil.rmtree(run_dir)


def parse_command_line() -> argparse.Namespace:
    """Parse the options of the script."""
    parser = rig.create_parser(__doc__)
    parser.add_argument("--preset", default=PRESET)
    parser.add_argument("--out", type=Path, default=Path("results/gb300-rack-simulated"))
    parser.add_argument(
        "--only",
        default=",".join(SCENARIO_OPTIONS),
        help="the scenarios to run; the results of the others are kept. With an empty text, only "
        "the page is written again",
    )

    parser.add_argument(
        "--scratch",
        type=Path,
        help="keep the runs here (some gigabytes) instead of a temporary folder",
    )
    return rig.parse_arguments(parser, preset="gb300-vm", only="offline")


def main() -> None:
    """Run the scenarios, copy their results and write the page."""
    args = parse_command_line()
    with tempfile.TemporaryDirectory() as temporary:
        scratch = args.scratch or Path(temporary)
        result_dir = args.out
        if args.smoke:  # so that the stored results stay as they are
            stored_results = rig.BENCHMARKS_DIR.parent / args.out
            result_dir = shutil.copytree(stored_results, Path(temporary) / "copy")

        run_scenarios(args, scratch, result_dir)
        write_page(result_dir)


if __name__ == "__main__":
    main()
