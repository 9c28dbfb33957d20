"""How does a rehearsed curve of MLPerf Endpoints look on a simulated server?

    python benchmarks/endpoints_rehearsal.py    # a core-minute

It writes results/mlperf-endpoints-simulated/.

SIMULATED and unofficial: it runs the three commands that one would run against a real server, with
`--url sim:gb300-vm` in place of its URL. It keeps the plan, the result and the checks as JSON, and
writes them as a page. It keeps no raw records.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import rig

TARGET_OPTIONS = ("-b", "llama3.1-8b", "--url", "sim:gb300-vm")
CONCURRENCY_OPTIONS = ("--c-min", "4", "--c-max", "1024")
SMOKE_CONCURRENCY_OPTIONS = ("--c-min", "32", "--c-max", "64", "--offline", "elected")
PRICE_OPTIONS = ("--price-per-hour", "60")
POWER_OPTIONS = ("--power-kw", "8")
# `check` ends with 1 if a rule is violated. The rehearsal always violates one, because the
# simulated server has another model than the benchmark.
CHECK_EXIT_CODES = (0, 1)

RESULT_FILES = ("endpoints_curve.json", "endpoints.json")
SOURCE_FILE = "seen.txt"  # the commit and the date of the runs

INTRODUCTION = """# Simulated: a curve of MLPerf Endpoints on a VM with four GB300 GPUs

This page shows a rehearsal of MLPerf Endpoints, for readers who want to see what the commands
`loadgen mlperf endpoints plan`, `run` and `check` produce. **No machine was measured, and the
result is unofficial**: all numbers come from a performance model in virtual time, which serves
Llama 2 70B with the lengths of the benchmark `llama3.1-8b`. The price of 60 per hour and the power
of 8 kW are examples. One command makes the folder:

    python benchmarks/endpoints_rehearsal.py

The runs were made at this commit and on this day: {source}.

[Rehearse MLPerf Endpoints](../../docs/guides/mlperf-endpoints.md) explains how to read the tables.
"""


class CommandOutputs(NamedTuple):
    """What the three commands of a rehearsal print: the plan, the curve and the checked rules."""

    plan: str
    curve: str
    rules: str


def run_loadgen(arguments: Sequence[str], accepted_codes: Sequence[int] = (0,)) -> str:
    """Run `loadgen mlperf endpoints` and return its stdout.

    Raises SystemExit if the exit code is not accepted.
    """
    command = [sys.executable, "-m", "loadgen", "mlperf", "endpoints", *arguments]
    completed = subprocess.run(command, capture_output=True, text=True, check=False)
    if completed.returncode not in accepted_codes:
        command_line = " ".join(command)
        raise SystemExit(f"{command_line}: exit code {completed.returncode}\n{completed.stderr}")
    return completed.stdout


def rehearse_curve(
    concurrency_options: Sequence[str], curve_dir: Path, result_dir: Path
) -> CommandOutputs:
    """Plan, run and check a curve on a simulated server, and return what the commands print.

    Planning and checking are repeated with `--json`, because one call prints either text or JSON.

    Args:
        concurrency_options: The options that choose the concurrencies of the curve.
        curve_dir: The folder in which loadgen writes the curve with its runs.
        result_dir: The folder that gets the plan, the curve and the checks as JSON files.
    """
    plan_arguments = ["plan", *TARGET_OPTIONS, *concurrency_options, *PRICE_OPTIONS]
    run_arguments = ["run", *TARGET_OPTIONS, *concurrency_options, *POWER_OPTIONS]
    check_arguments = ["check", str(curve_dir)]

    outputs = CommandOutputs(
        plan=run_loadgen(plan_arguments),
        curve=run_loadgen([*run_arguments, "--out", str(curve_dir)]),
        rules=run_loadgen(check_arguments, CHECK_EXIT_CODES),
    )
    plan_json = run_loadgen([*plan_arguments, "--json"])
    checks_json = run_loadgen([*check_arguments, "--json"], CHECK_EXIT_CODES)

    result_dir.mkdir(parents=True, exist_ok=True)
    (result_dir / "plan.json").write_text(plan_json, "utf-8")
    (result_dir / "checks.json").write_text(checks_json, "utf-8")
    for name in RESULT_FILES:
        shutil.copyfile(curve_dir / name, result_dir / name)
    return outputs


def format_page(outputs: CommandOutputs, source: str) -> str:
    """Return a Markdown page with what the commands printed.

    `source` names the commit and the date of the rehearsal.
    """
    texts_by_heading = {"Plan": outputs.plan, "Curve": outputs.curve, "Rules": outputs.rules}
    sections = [
        f"## {heading}\n\n```text\n{text.rstrip()}\n```\n"
        for heading, text in texts_by_heading.items()
    ]
    return "\n".join([INTRODUCTION.format(source=source), *sections])


def main() -> None:
    """Rehearse the curve, write the folder of results, and print the curve."""
    args = parse_command_line()
    source = rig.describe_commit_and_date()
    with tempfile.TemporaryDirectory() as scratch:
        curve_dir = Path(scratch) / "curve"
        if args.smoke:
            result_dir = Path(scratch) / "result"
            outputs = rehearse_curve(SMOKE_CONCURRENCY_OPTIONS, curve_dir, result_dir)
        else:
            result_dir = rig.BENCHMARKS_DIR.parent / args.out
            outputs = rehearse_curve(CONCURRENCY_OPTIONS, curve_dir, result_dir)

        (result_dir / SOURCE_FILE).write_text(source + "\n", "utf-8")
        (result_dir / "README.md").write_text(format_page(outputs, source), "utf-8")
    print(outputs.curve)


def parse_command_line() -> argparse.Namespace:
    """Parse the options of the script."""
    parser = rig.create_parser(__doc__)
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("results/mlperf-endpoints-simulated"),
        help="the folder for the results, relative to the root of the repository",
    )
    return rig.parse_arguments(parser)


if __name__ == "__main__":
    main()
