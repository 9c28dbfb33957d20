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
from pathlib import Path

import rig

CURVE = ("-b", "llama3.1-8b", "--url", "sim:gb300-vm")
POINTS = ("--c-min", "4", "--c-max", "1024")
SMOKE_POINTS = ("--c-min", "32", "--c-max", "64", "--offline", "elected")
PRICE = ("--price-per-hour", "60")
POWER = ("--power-kw", "8")
RULE_FLAGGED = 1
"""The exit code of the check: the simulated server has another model than the benchmark."""

RESULT_FILES = ("endpoints_curve.json", "endpoints.json")
SOURCE_FILE = "seen.txt"  # the tree and the day of the runs

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


def run_loadgen(arguments: tuple[str, ...], *, allowed_codes: tuple[int, ...] = (0,)) -> str:
    """Run a command of loadgen and return what it prints. Raises SystemExit if it fails."""
    command = [sys.executable, "-m", "loadgen", "mlperf", "endpoints", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode not in allowed_codes:
        raise SystemExit(f"{' '.join(command)}: exit code {done.returncode}\n{done.stderr}")
    return done.stdout


def rehearse_curve(points: tuple[str, ...], result_dir: Path, scratch: Path) -> dict[str, str]:
    """Plan, run and check a curve, store its files, and return what the commands print."""
    run_dir = scratch / "curve"
    printed = {
        "Plan": run_loadgen(("plan", *CURVE, *points, *PRICE)),
        "Curve": run_loadgen(("run", *CURVE, *points, *POWER, "--out", str(run_dir))),
        "Rules": run_loadgen(("check", str(run_dir)), allowed_codes=(0, RULE_FLAGGED)),
    }
    result_dir.mkdir(parents=True, exist_ok=True)
    for name in RESULT_FILES:
        shutil.copyfile(run_dir / name, result_dir / name)
    plan = run_loadgen(("plan", *CURVE, *points, *PRICE, "--json"))
    (result_dir / "plan.json").write_text(plan, "utf-8")
    checks = run_loadgen(("check", str(run_dir), "--json"), allowed_codes=(0, RULE_FLAGGED))
    (result_dir / "checks.json").write_text(checks, "utf-8")
    return printed


def render_page(printed: dict[str, str], source: str) -> str:
    """Return the page with what each command printed."""
    parts = [INTRODUCTION.format(source=source)]
    for heading, text in printed.items():
        parts.append(f"## {heading}\n\n```text\n{text.rstrip()}\n```\n")
    return "\n".join(parts)


def main() -> None:
    """Rehearse the curve and write the folder."""
    args = parse_arguments()
    points = SMOKE_POINTS if args.smoke else POINTS
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        result_dir = scratch / "result" if args.smoke else rig.BENCHMARKS_DIR.parent / args.out
        source = rig.describe_commit_and_date()
        printed = rehearse_curve(points, result_dir, scratch)
        (result_dir / SOURCE_FILE).write_text(source + "\n", "utf-8")
        page = render_page(printed, source)
        (result_dir / "README.md").write_text(page, "utf-8")
        print(printed["Curve"])


def parse_arguments() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = rig.create_parser(__doc__)
    parser.add_argument("--out", type=Path, default=Path("results/mlperf-endpoints-simulated"))
    return rig.parse_arguments(parser)


if __name__ == "__main__":
    main()
