"""How long do users wait for whole commands, in CPU-seconds and peak memory?

    python benchmarks/waits.py [--rounds 3] [--only rack --only help] [--beside ANOTHER/CHECKOUT]

Each command runs as a user types it, in its own process, from its start to its end. CPU is user and
system time of it and of all processes it waited for; memory is the largest resident size of one of
them; both as the kernel counts them. A peer, or a program that does the least part of the same
work, alternates with it, so that a slow minute affects both, and the ratio is taken within each
round. With `--beside`, another checkout of loadgen alternates too. Every target `sim:` is
SIMULATED. The endpoint and the preparation are not counted.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import rig

TIMEOUT_S = (
    900.0  # a command that takes longer than this on the wall is stopped, and its row says so
)
SUCCESS_EXIT_CODES = (
    0,
    1,
    3,
)  # exit codes of a command that did its work: what it found may be no, or not sure
OWN_NAME = "loadgen"
PYTHON = [sys.executable]
LOADGEN = [sys.executable, "-m", "loadgen"]
ENDPOINT_OPTIONS = {"ttft": "5ms", "itl": "1ms", "idle_close": "60s"}
FLOOR_COMMAND = [sys.executable, __file__, "--floor"]  # `main` of this file as a peer: see `FLOOR`


class Wait(NamedTuple):
    """A command that users wait for, with its limits.

    In arguments, `{url}` is a running endpoint, `{root}` the checkout, `{here}` the folder of the
    preparation, and `{long}` ten minutes (two seconds with `--smoke`). `preparation` holds commands
    of loadgen that run once and are not counted. `peer` is the name and the command of a program
    that does the same or the least part of it; it is left out if the program is not installed.
    """

    description: str
    arguments: Sequence[str]
    smoke_arguments: Sequence[str]
    cpu_s: float  # wanted, at most
    peak_mb: float | None = None
    preparation: Sequence[Sequence[str]] = ()
    peer: tuple[str, Sequence[str]] | None = None


SIZE_RAG = """size rag sim:gb300-vm sim:h200x8 --users 5000 --slo ttft:2s:p95 --slo tpot:60ms:p95
--prices {root}/docs/prices.example.yaml"""
PRICE_OPTIONS = [
    "--price",
    "sim:gb300-vm=Azure ND128isr_GB300_v6 1 year",
    "--price",
    "sim:h200x8=own dgx-h200",
]
RUN_RACK = "run qa --url sim:gb300-rack --request-rate 3500 --seed 1 --duration"
SEARCH_OPTIONS = [
    "--url",
    "sim:gb300-vm",
    "--slo",
    "ttft:2s:p95",
    "--duration",
    "5s",
    "--max-probes",
    "2",
    "--seed",
    "1",
]
VALIDATE_DRY_RUN = ["validate", "{root}/contracts/rag.yaml", "--dry-run", "--seed", "1"]
VALIDATE_DRY_RUN += ["--url", "sim:gb300-vm"]
RUN_SHORT_OUTPUT = [
    "run",
    "qa",
    "--url",
    "{url}",
    "--warmup",
    "0",
    "--concurrency",
    "16",
    "--seed",
    "1",
    "--output-tokens",
    "4",
]
RUN_SHORT_PROMPTS, RUN_LONG_PROMPTS = (
    [*RUN_SHORT_OUTPUT, "--input-tokens", "64", "-n"],
    [*RUN_SHORT_OUTPUT, "--input-tokens", "32000", "-n"],
)
BARE_PYTHON = ("bare Python", [*PYTHON, "-c", "pass"])

WAITS = {
    "rack": Wait(
        "ten minutes of a rack, 2.1 million requests",
        [*RUN_RACK.split(), "10m"],
        [*RUN_RACK.split(), "2s"],
        15,
        800,
        peer=("the engine alone", [*FLOOR_COMMAND, "engine", "3500", "10m"]),
    ),
    "size-rag": Wait(
        "size rag of the documentation",
        [*SIZE_RAG.split(), *PRICE_OPTIONS],
        ["search", "rag", *SEARCH_OPTIONS],
        10,
    ),
    "size-agentic": Wait(
        "size agentic, 5,000 users",
        ["size", "agentic", "sim:gb300-vm", "--users", "5000", "--slo", "ttft:2s:p95"],
        ["search", "agentic", *SEARCH_OPTIONS],
        40,
    ),
    "contract": Wait(
        "validate rag.yaml --dry-run",
        VALIDATE_DRY_RUN,
        [*VALIDATE_DRY_RUN, "--duration", "30s"],
        10,
    ),
    "start": Wait(
        "start and end of a run of 64 short requests",
        [*RUN_SHORT_PROMPTS, "64"],
        [*RUN_SHORT_PROMPTS, "16"],
        0.5,
        peer=BARE_PYTHON,
    ),
    "short": Wait(
        "8,000 requests of 64 and 4 tokens",
        [*RUN_SHORT_PROMPTS, "8000"],
        [*RUN_SHORT_PROMPTS, "16"],
        1.8,
        peer=("64 of them", [*LOADGEN, *RUN_SHORT_PROMPTS, "64"]),
    ),
    "long": Wait(
        "200 prompts of 32,000 tokens",
        [*RUN_LONG_PROMPTS, "200"],
        [*RUN_LONG_PROMPTS, "4"],
        0.8,
        peer=("4 of them", [*LOADGEN, *RUN_LONG_PROMPTS, "4"]),
    ),
    "report": Wait(
        "report of 2.1 million requests, with its page",
        ["report", "{here}/rack"],
        ["report", "{here}/rack"],
        6,
        300,
        preparation=[[*RUN_RACK.split(), "{long}", "--out", "{here}/rack"]],
        peer=("their rows read once", [*FLOOR_COMMAND, "rows", "{here}/rack"]),
    ),
    "help": Wait("loadgen --help", ["--help"], ["--help"], 0.10, peer=BARE_PYTHON),
    "version": Wait("loadgen --version", ["--version"], ["--version"], 0.10, peer=BARE_PYTHON),
}


class Cost(NamedTuple):
    """What a command cost from its start to its end."""

    cpu_s: float
    peak_mb: float
    wall_s: float


def run_engine_only(rate: str, length: str) -> None:
    """Simulate the rack without records, metrics and files: the least that its run costs."""
    from loadgen.core.requests.build import build_prompts
    from loadgen.core.requests.tokenizer import load_tokenizer
    from loadgen.core.schedule.build import build_schedule
    from loadgen.core.workload import loading
    from loadgen.core.workload.flags import read_flags
    from loadgen.sim import request_lengths
    from loadgen.sim.engine.system import SimulatedSystem
    from loadgen.sim.presets.preset import load_preset
    from loadgen.sim.simulation import Simulation

    workload = loading.load("qa", read_flags(request_rate=rate, duration=length, warmup=0))
    prompts: Any = build_prompts(workload, 1, 1, load_tokenizer())
    sizes = request_lengths.create_request_sizer(workload.requests, prompts, tokens_per_block=0)
    preset = load_preset("gb300-rack")
    system = SimulatedSystem(
        costs=preset.costs, limits=preset.limits, speeds=preset.speeds, routing=preset.routing
    )
    schedule = build_schedule(workload, 1)
    Simulation(schedule, sizes, system.create_replicas(), system.create_router()).run()


def read_rows_only(folder: str) -> None:
    """Read every column of stored rows once: the least that a report costs."""
    from loadgen.core.results import store
    from loadgen.core.results.record import ROW

    stored = store.read_run_lazily(Path(folder))
    for name in ROW.names or ():
        stored.rows[name].sum()


FLOORS: dict[str, Callable[..., None]] = {"engine": run_engine_only, "rows": read_rows_only}


def measure_command(
    command: Sequence[str], folder: Path, checkout: Path | None = None
) -> Cost | None:
    """Run a command in a folder; return what it costs, or None if it was stopped after TIMEOUT_S.

    `checkout` is the root of another tree whose code runs; with None it is the installed package.
    Raises SystemExit if the command fails.
    """
    environment = dict(os.environ)
    if checkout is not None:
        environment["PYTHONPATH"] = os.pathsep.join([str(checkout), str(checkout / "sdk")])

    with open(folder / "output.txt", "w+") as output:
        started_s = time.monotonic()
        process = subprocess.Popen(
            command, cwd=folder, stdout=output, stderr=subprocess.STDOUT, env=environment
        )
        with _terminate_after(process, TIMEOUT_S):
            # wait4, unlike Popen.wait, also returns the resources that the process used.
            _, status, usage = os.wait4(process.pid, 0)

        wall_s = time.monotonic() - started_s
        process.returncode = os.waitstatus_to_exitcode(status)
        if wall_s >= TIMEOUT_S:
            return None

        if process.returncode not in SUCCESS_EXIT_CODES:
            output.seek(0)
            raise SystemExit(
                f"{' '.join(command)}: exit code {process.returncode}:\n{output.read()[-2000:]}"
            )

    peak_bytes = usage.ru_maxrss * 1024  # the kernel counts in KiB
    return Cost(cpu_s=usage.ru_utime + usage.ru_stime, peak_mb=peak_bytes / 1e6, wall_s=wall_s)


@contextlib.contextmanager
def _terminate_after(child: subprocess.Popen[bytes], seconds: float) -> Iterator[None]:
    """Terminate a process if the `with` block lasts longer than `seconds`."""
    timer = threading.Timer(seconds, child.terminate)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def list_sides(
    row: Wait, fill: Callable[[str], str], other_checkout: Path | None, *, smoke: bool
) -> dict[str, tuple[Sequence[str], Path | None]]:
    """Return the commands that take turns by name, each with the checkout it runs from.

    The installed loadgen is the last one.
    """
    arguments = [fill(argument) for argument in (row.smoke_arguments if smoke else row.arguments)]
    commands: dict[str, tuple[Sequence[str], Path | None]] = {}
    if row.peer is not None and shutil.which(row.peer[1][0]) and not smoke:
        commands[row.peer[0]] = [fill(argument) for argument in row.peer[1]], None

    if other_checkout is not None:
        commands[rig.describe_commit(other_checkout)] = [*LOADGEN, *arguments], other_checkout

    commands[OWN_NAME] = [*LOADGEN, *arguments], None
    return commands


def measure_wait(row: Wait, url: str, args: argparse.Namespace) -> list[list[str]]:
    """Return one line of the table for each side of a wait."""
    costs: dict[str, list[Cost | None]] = {}
    with tempfile.TemporaryDirectory(prefix="loadgen-waits-") as scratch:
        scratch_dir = Path(scratch)
        placeholders = {"{url}": url, "{here}": scratch, "{root}": str(rig.BENCHMARKS_DIR.parent)}
        placeholders["{long}"] = "2s" if args.smoke else "10m"

        def fill(argument: str) -> str:
            """Replace the placeholders in an argument."""
            for name, value in placeholders.items():
                argument = argument.replace(name, value)
            return argument

        for arguments in row.preparation:
            measure_command([*LOADGEN, *map(fill, arguments)], scratch_dir)

        for _ in range(args.rounds):
            for name, (command, checkout) in list_sides(
                row, fill, args.beside, smoke=args.smoke
            ).items():
                with tempfile.TemporaryDirectory(
                    prefix="loadgen-waits-"
                ) as folder:  # nothing of an earlier round
                    costs.setdefault(name, []).append(
                        measure_command(command, Path(folder), checkout)
                    )

    return [
        _format_line(
            row if name == OWN_NAME else row._replace(description=""), name, side_costs, costs
        )
        for name, side_costs in costs.items()
    ]


def _format_line(
    row: Wait, name: str, side_costs: list[Cost | None], all_sides: dict[str, list[Cost | None]]
) -> list[str]:
    """Return the cells of one side: its costs, and the ratio of its CPU time to the first side."""
    finished = [cost for cost in side_costs if cost is not None]
    if len(finished) < len(side_costs):
        return [row.description, name, f"stopped after {TIMEOUT_S:g} s", "", "", "", ""]

    cpu_s = [cost.cpu_s for cost in finished]
    first_side = next(iter(all_sides.values()))
    first_cpu_s = [cost.cpu_s for cost in first_side if cost is not None]

    ratio_text = ""
    if first_side is not side_costs and len(first_cpu_s) == len(cpu_s):
        ratio_text = f"{rig.median_ratio(cpu_s, first_cpu_s):.2f}"

    return [
        row.description,
        name,
        f"{rig.median(cpu_s):.3g} ({min(cpu_s):.3g} to {max(cpu_s):.3g})",
        ratio_text,
        f"{max(cost.peak_mb for cost in finished):,.0f}",
        f"{rig.median([cost.wall_s for cost in finished]):.3g}",
        _format_limits(row) if row.description else "",
    ]


def _format_limits(row: Wait) -> str:
    """Return the CPU time and the memory that a command should not exceed."""
    memory = f", {row.peak_mb:,.0f} MB" if row.peak_mb else ""
    return f"{row.cpu_s:g}{memory}"


def main() -> None:
    """Print what each command costs."""
    parser = rig.create_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--only", action="append", choices=WAITS, help="one of the waits; repeatable"
    )
    parser.add_argument("--beside", type=Path, help="a checkout of another tree")
    args = rig.parse_arguments(parser, rounds=1)
    args.beside = None if args.beside is None else args.beside.resolve()
    waits = [row for name, row in WAITS.items() if not args.only or name in args.only]

    is_endpoint_needed = any(
        "{url}" in argument
        for row in waits
        for arguments in (row.arguments, *row.preparation)
        for argument in arguments
    )
    with (
        rig.serve_endpoint(**ENDPOINT_OPTIONS)
        if is_endpoint_needed
        else contextlib.nullcontext() as server
    ):
        lines = [
            line for row in waits for line in measure_wait(row, server.url if server else "", args)
        ]

    print(
        rig.format_table(
            ["wait", "by", "CPU-s", "times the first", "peak MB", "wall s", "wanted"], lines
        )
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--floor"]:
        FLOORS[sys.argv[2]](*sys.argv[3:])
    else:
        main()
