"""How long do users wait for whole commands, in CPU-seconds and peak memory?

    python benchmarks/waits.py [--rounds 3] [--only rack --only help] [--beside ANOTHER/CHECKOUT]

Each command runs as a user types it, in its own process, from its start to its end. CPU is the user
and system time of this process and of all processes it waited for. Memory is the largest resident
size of one of them. Both are as the kernel counts them.

A program that does the least part of the same work alternates with the command, so that a slow
minute affects both, and the ratio is taken within each round. With `--beside`, another checkout of
loadgen alternates too. Every target `sim:` is SIMULATED. The endpoint and the preparation are not
counted.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import rig

TIMEOUT_S = 900.0  # a command that takes longer is stopped, and its row says so

# The exit codes of a command that did its work: success, objectives missed, and not certain
SUCCESS_EXIT_CODES = (0, 1, 3)

LOADGEN = [sys.executable, "-m", "loadgen"]
LOADGEN_NAME = "loadgen"  # in the table
ENDPOINT_OPTIONS = {"ttft": "5ms", "itl": "1ms", "idle_close": "60s"}
RACK_MINUTES = "10m"  # simulated time of a run of the rack
SMOKE_RACK_DURATION = "2s"


class ReferenceProgram(NamedTuple):
    """A program that a command is compared with, because it does the least part of the same work.

    The command line is written as in a shell and may have the placeholders of `TimedCommand`.
    """

    name: str
    command: str


class TimedCommand(NamedTuple):
    """A command of loadgen that users wait for, and the limits of what it may cost.

    Commands are written as in a shell, without the word `loadgen`. They may have these
    placeholders: {url} is a running endpoint, {checkout} the folder of this repository,
    {prepared} the folder in which the preparation ran, {rack_duration} ten minutes (two seconds
    with `--smoke`), {python} the Python interpreter and {script} this file.
    """

    description: str
    command: str
    smoke_command: str  # runs in its place with `--smoke`
    max_cpu_s: float
    max_peak_mb: float | None = None
    preparation: str = ""  # a command of loadgen that runs once before, and is not counted
    reference: ReferenceProgram | None = None


RUN_RACK = "run qa --url sim:gb300-rack --request-rate 3500 --seed 1 --duration"
SIZE_RAG = (
    "size rag sim:gb300-vm sim:h200x8 --users 5000 --slo ttft:2s:p95 --slo tpot:60ms:p95 "
    "--prices {checkout}/docs/prices.example.yaml "
    "--price 'sim:gb300-vm=Azure ND128isr_GB300_v6 1 year' "
    "--price 'sim:h200x8=own dgx-h200'"
)
SEARCH_OPTIONS = (
    "--url sim:gb300-vm --slo ttft:2s:p95 --duration 5s --max-probes 2 --seed 1"  # a short search
)
VALIDATE_DRY_RUN = "validate {checkout}/contracts/rag.yaml --dry-run --seed 1 --url sim:gb300-vm"
RUN_SHORT_OUTPUT = "run qa --url {url} --warmup 0 --concurrency 16 --seed 1 --output-tokens 4"
RUN_SHORT_PROMPTS = f"{RUN_SHORT_OUTPUT} --input-tokens 64 -n"
RUN_LONG_PROMPTS = f"{RUN_SHORT_OUTPUT} --input-tokens 32000 -n"
BARE_PYTHON = ReferenceProgram("bare Python", "{python} -c pass")

TIMED_COMMANDS = {
    "rack": TimedCommand(
        "ten minutes of a rack, 2.1 million requests",
        f"{RUN_RACK} {RACK_MINUTES}",
        f"{RUN_RACK} {SMOKE_RACK_DURATION}",
        max_cpu_s=15,
        max_peak_mb=800,
        reference=ReferenceProgram(
            "the engine alone", f"{{python}} {{script}} --reference engine 3500 {RACK_MINUTES}"
        ),
    ),
    "size-rag": TimedCommand(
        "size rag of the documentation", SIZE_RAG, f"search rag {SEARCH_OPTIONS}", max_cpu_s=10
    ),
    "size-agentic": TimedCommand(
        "size agentic, 5,000 users",
        "size agentic sim:gb300-vm --users 5000 --slo ttft:2s:p95",
        f"search agentic {SEARCH_OPTIONS}",
        max_cpu_s=40,
    ),
    "contract": TimedCommand(
        "validate rag.yaml --dry-run",
        VALIDATE_DRY_RUN,
        f"{VALIDATE_DRY_RUN} --duration 30s",
        max_cpu_s=10,
    ),
    "start": TimedCommand(
        "start and end of a run of 64 short requests",
        f"{RUN_SHORT_PROMPTS} 64",
        f"{RUN_SHORT_PROMPTS} 16",
        max_cpu_s=0.5,
        reference=BARE_PYTHON,
    ),
    "short": TimedCommand(
        "8,000 requests of 64 and 4 tokens",
        f"{RUN_SHORT_PROMPTS} 8000",
        f"{RUN_SHORT_PROMPTS} 16",
        max_cpu_s=1.8,
        reference=ReferenceProgram("64 of them", f"{{python}} -m loadgen {RUN_SHORT_PROMPTS} 64"),
    ),
    "long": TimedCommand(
        "200 prompts of 32,000 tokens",
        f"{RUN_LONG_PROMPTS} 200",
        f"{RUN_LONG_PROMPTS} 4",
        max_cpu_s=0.8,
        reference=ReferenceProgram("4 of them", f"{{python}} -m loadgen {RUN_LONG_PROMPTS} 4"),
    ),
    "report": TimedCommand(
        "report of 2.1 million requests, with its page",
        "report {prepared}/rack",
        "report {prepared}/rack",
        max_cpu_s=6,
        max_peak_mb=300,
        preparation=f"{RUN_RACK} {{rack_duration}} --out {{prepared}}/rack",
        reference=ReferenceProgram(
            "their records read once", "{python} {script} --reference records {prepared}/rack"
        ),
    ),
    "help": TimedCommand(
        "loadgen --help", "--help", "--help", max_cpu_s=0.10, reference=BARE_PYTHON
    ),
    "version": TimedCommand(
        "loadgen --version", "--version", "--version", max_cpu_s=0.10, reference=BARE_PYTHON
    ),
}


def split_command(command: str, placeholders: Mapping[str, str]) -> list[str]:
    """Split a command line as a shell does, and replace the placeholders in its arguments.

    The keys of `placeholders` have their braces, for example "{url}".
    """
    arguments = []
    for argument in shlex.split(command):
        for placeholder, value in placeholders.items():
            argument = argument.replace(placeholder, value)
        arguments.append(argument)
    return arguments


# -- the reference programs of this file --


def simulate_rack_only(rate: str, duration: str) -> None:
    """Simulate a load on the rack and write nothing.

    It has no records, metrics or files, so it is the least that `loadgen run` on the rack costs.
    """
    from loadgen.core.requests.build import build_prompts
    from loadgen.core.requests.tokenizer import load_tokenizer
    from loadgen.core.schedule.build import build_schedule
    from loadgen.core.workload import loading
    from loadgen.core.workload.flags import read_flags
    from loadgen.sim import request_lengths
    from loadgen.sim.engine.system import SimulatedSystem
    from loadgen.sim.presets.preset import load_preset
    from loadgen.sim.simulation import Simulation

    workload = loading.load("qa", read_flags(request_rate=rate, duration=duration, warmup=0))
    prompts: Any = build_prompts(workload, 1, 1, load_tokenizer())
    sizes = request_lengths.create_request_sizer(workload.requests, prompts, tokens_per_block=0)
    schedule = build_schedule(workload, 1)

    preset = load_preset("gb300-rack")
    system = SimulatedSystem(
        costs=preset.costs, limits=preset.limits, speeds=preset.speeds, routing=preset.routing
    )
    Simulation(schedule, sizes, system.create_replicas(), system.create_router()).run()


def read_records_only(run_dir: str) -> None:
    """Read every column of the request records of a run once: the least that a report costs."""
    from loadgen.core.results import store
    from loadgen.core.results.record import ROW

    stored_run = store.read_run_lazily(Path(run_dir))
    for column in ROW.names or ():
        stored_run.rows[column].sum()


REFERENCE_FUNCTIONS: dict[str, Callable[..., None]] = {
    "engine": simulate_rack_only,
    "records": read_records_only,
}
"""The functions that this file runs for `--reference NAME ARGUMENTS`."""


# -- measure --


class CommandCost(NamedTuple):
    """What a command cost from its start to its end."""

    cpu_s: float
    peak_mb: float
    wall_s: float


def measure_command(
    command: Sequence[str], work_dir: Path, checkout: Path | None = None
) -> CommandCost | None:
    """Run a command in a folder and return what it cost.

    Returns None if the command was stopped because it took longer than TIMEOUT_S. Raises SystemExit
    if it failed. `checkout` is the root of another tree whose code runs in place of the installed
    package.
    """
    environment = dict(os.environ)
    if checkout is not None:
        environment["PYTHONPATH"] = os.pathsep.join([str(checkout), str(checkout / "sdk")])

    output_path = work_dir / "output.txt"
    started_s = time.monotonic()
    with output_path.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=work_dir, stdout=output, stderr=subprocess.STDOUT, env=environment
        )
        with terminate_after(process, TIMEOUT_S):
            # wait4, unlike Popen.wait, also returns the resources that the process used.
            _, status, usage = os.wait4(process.pid, 0)

    wall_s = time.monotonic() - started_s
    process.returncode = os.waitstatus_to_exitcode(status)
    if wall_s >= TIMEOUT_S:
        return None

    if process.returncode not in SUCCESS_EXIT_CODES:
        last_output = output_path.read_text(errors="replace")[-2000:]
        raise SystemExit(f"{shlex.join(command)}: exit code {process.returncode}:\n{last_output}")

    peak_bytes = usage.ru_maxrss * 1024  # the kernel counts in KiB
    return CommandCost(usage.ru_utime + usage.ru_stime, peak_bytes / 1e6, wall_s)


@contextlib.contextmanager
def terminate_after(process: subprocess.Popen[bytes], timeout_s: float) -> Iterator[None]:
    """Terminate a process if the `with` block lasts longer than the timeout."""
    timer = threading.Timer(timeout_s, process.terminate)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class Contender(NamedTuple):
    """A program that is measured in turn with others.

    `checkout` is the root of the tree of loadgen that it runs, or None for the installed package.
    """

    name: str
    command: list[str]
    checkout: Path | None = None

    def measure(self) -> CommandCost | None:
        """Run the program once in an empty folder, and return its cost or None on a timeout."""
        with tempfile.TemporaryDirectory(prefix="loadgen-waits-") as work_dir:
            return measure_command(self.command, Path(work_dir), self.checkout)


def list_contenders(
    timed: TimedCommand, placeholders: Mapping[str, str], args: argparse.Namespace
) -> list[Contender]:
    """Return the programs that are measured in turn for one command.

    These are the reference program (not with `--smoke`), another checkout of loadgen if the user
    passed one, and the installed loadgen.
    """
    command_line = timed.smoke_command if args.smoke else timed.command
    loadgen_command = [*LOADGEN, *split_command(command_line, placeholders)]

    contenders = []
    if timed.reference is not None and not args.smoke:
        reference_command = split_command(timed.reference.command, placeholders)
        contenders.append(Contender(timed.reference.name, reference_command))

    if args.other_checkout is not None:
        commit = rig.describe_commit(args.other_checkout)
        contenders.append(Contender(commit, loadgen_command, args.other_checkout))

    contenders.append(Contender(LOADGEN_NAME, loadgen_command))
    return contenders


Costs = dict[str, list[CommandCost | None]]
"""The costs of each contender in all rounds, by its name. None stands for a timeout."""


def measure_contenders(timed: TimedCommand, url: str, args: argparse.Namespace) -> Costs:
    """Prepare a command once, and measure it and its contenders in turn in each round.

    `url` is the endpoint, or "" if no command needs one.
    """
    with tempfile.TemporaryDirectory(prefix="loadgen-waits-") as prepared:
        placeholders = {
            "{url}": url,
            "{checkout}": str(rig.BENCHMARKS_DIR.parent),
            "{prepared}": prepared,
            "{rack_duration}": SMOKE_RACK_DURATION if args.smoke else RACK_MINUTES,
            "{python}": sys.executable,
            "{script}": __file__,
        }
        if timed.preparation:
            preparation = split_command(timed.preparation, placeholders)
            measure_command([*LOADGEN, *preparation], Path(prepared))

        contenders = list_contenders(timed, placeholders, args)
        return rig.interleave_rounds(
            args.rounds, {contender.name: contender.measure for contender in contenders}
        )


# -- print --


COLUMNS = ("command", "program", "CPU-s", "ratio to the first", "peak MB", "wall s", "limit")


def create_rows(timed: TimedCommand, costs: Costs) -> Iterator[list[str]]:
    """Yield a row of the table for each contender of a command.

    Only the row of loadgen has the description and the limits of the command.
    """
    first_costs = next(iter(costs.values()))
    for name, contender_costs in costs.items():
        description = ""
        limits = ""
        if name == LOADGEN_NAME:
            description = timed.description
            limits = format_limits(timed)

        ratio = ""
        if contender_costs is not first_costs:
            ratio = format_cpu_ratio(contender_costs, first_costs)

        cpu_s, peak_mb, wall_s = format_costs(contender_costs)
        yield [description, name, cpu_s, ratio, peak_mb, wall_s, limits]


def format_costs(costs: Sequence[CommandCost | None]) -> tuple[str, str, str]:
    """Return three cells for the costs of all rounds: CPU-seconds, peak memory and wall time.

    Times are medians, with the range for CPU-seconds. The peak memory is the largest one. If a
    round ended with a timeout, the first cell says so and the others are empty.
    """
    finished = [cost for cost in costs if cost is not None]
    if len(finished) < len(costs):
        return f"stopped after {TIMEOUT_S:g} s", "", ""

    cpu_s = [cost.cpu_s for cost in finished]
    peak_mb = max(cost.peak_mb for cost in finished)
    wall_s = rig.median([cost.wall_s for cost in finished])
    return (
        f"{rig.median(cpu_s):.3g} ({min(cpu_s):.3g} to {max(cpu_s):.3g})",
        f"{peak_mb:,.0f}",
        f"{wall_s:.3g}",
    )


def format_cpu_ratio(
    costs: Sequence[CommandCost | None], first_costs: Sequence[CommandCost | None]
) -> str:
    """Return the median ratio of the CPU times within each round, or "" if one has a timeout."""
    cpu_s = [cost.cpu_s for cost in costs if cost is not None]
    first_cpu_s = [cost.cpu_s for cost in first_costs if cost is not None]
    has_timeout = len(cpu_s) < len(costs) or len(first_cpu_s) < len(first_costs)
    return "" if has_timeout else f"{rig.median_ratio(cpu_s, first_cpu_s):.2f}"


def format_limits(timed: TimedCommand) -> str:
    """Return the limits of a command: CPU-seconds and memory, for example "6, 300 MB"."""
    if timed.max_peak_mb is None:
        return f"{timed.max_cpu_s:g}"
    return f"{timed.max_cpu_s:g}, {timed.max_peak_mb:,.0f} MB"


@contextlib.contextmanager
def serve_endpoint_if_needed(timed_commands: Sequence[TimedCommand]) -> Iterator[str]:
    """Serve an endpoint inside the `with` block and yield its URL, or "" if no command needs it."""
    if not any("{url}" in timed.command for timed in timed_commands):
        yield ""
        return

    with rig.serve_endpoint(**ENDPOINT_OPTIONS) as server:
        yield server.url


def parse_command_line() -> argparse.Namespace:
    """Parse the options of the script."""
    parser = rig.create_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--only", action="append", choices=TIMED_COMMANDS, help="one of the commands; repeatable"
    )
    parser.add_argument(
        "--beside",
        dest="other_checkout",
        metavar="CHECKOUT",
        type=lambda path: Path(path).resolve(),
        help="another checkout of loadgen, which is measured too",
    )
    return rig.parse_arguments(parser, rounds=1)


def main() -> None:
    """Print what each command costs."""
    args = parse_command_line()
    names = args.only or TIMED_COMMANDS
    timed_commands = [timed for name, timed in TIMED_COMMANDS.items() if name in names]

    rows: list[list[str]] = []
    with serve_endpoint_if_needed(timed_commands) as url:
        for timed in timed_commands:
            costs = measure_contenders(timed, url, args)
            rows += create_rows(timed, costs)

    print(rig.format_table(COLUMNS, rows))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--reference"]:
        _, _, reference_name, *reference_arguments = sys.argv
        REFERENCE_FUNCTIONS[reference_name](*reference_arguments)
    else:
        main()
