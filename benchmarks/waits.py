"""What people wait for: CPU-seconds and peak memory of whole commands, each beside its peer or its floor.

    python benchmarks/waits.py [--rounds 3] [--only rack --only help] [--beside ANOTHER/CHECKOUT]

The command as a user types it, in a process of its own from its start to its end. CPU is user and system time of it and
of all processes it waited for; memory is the largest resident size of one of them; both as the kernel counts them. Its
peer or floor takes turns with it, so that a slow minute meets both; the ratio is taken within each round. `--beside`:
another checkout of loadgen takes turns too. Every target `sim:` is SIMULATED. Endpoint and preparation are not counted.
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

MOST_S = 900.0  # a command that takes longer than this on the wall is stopped, and its row says so
SOUND = (0, 1, 3)  # exit codes of a command that did its work: what it found may be no, or not sure
OURS = "loadgen"
PYTHON = [sys.executable]
LOADGEN = [sys.executable, "-m", "loadgen"]
ENDPOINT = {"ttft": "5ms", "itl": "1ms", "idle_close": "60s"}
FLOORS = [sys.executable, __file__, "--floor"]  # `main` of this file as a peer: see `FLOOR`


class Row(NamedTuple):
    """A wait. In words, `{url}` is a running endpoint, `{root}` the checkout, `{here}` the folder that `before` ran in,
    `{long}` ten minutes, or two seconds in the form of seconds.

    `smallest`: the words of the form of seconds. `before`: commands of loadgen, once and not counted. `beside`: what
    does the same, or the least of it: a name and an argument list, left out where its program is not on this machine.
    """

    what: str
    words: Sequence[str]
    smallest: Sequence[str]
    cpu_s: float  # wanted, at most
    peak_mb: float | None = None
    before: Sequence[Sequence[str]] = ()
    beside: tuple[str, Sequence[str]] | None = None


RAG = """size rag sim:gb300-vm sim:h200x8 --users 5000 --slo ttft:2s:p95 --slo tpot:60ms:p95
--prices {root}/docs/prices.example.yaml"""
PRICES = [
    "--price",
    "sim:gb300-vm=Azure ND128isr_GB300_v6 1 year",
    "--price",
    "sim:h200x8=own dgx-h200",
]
RACK = "run qa --url sim:gb300-rack --request-rate 3500 --seed 1 --duration"
SEARCH = [
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
CONTRACT = ["validate", "{root}/contracts/rag.yaml", "--dry-run", "--seed", "1"]
CONTRACT += ["--url", "sim:gb300-vm"]
SENT = [
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
SHORT, LONG = [*SENT, "--input-tokens", "64", "-n"], [*SENT, "--input-tokens", "32000", "-n"]
BARE = ("bare Python", [*PYTHON, "-c", "pass"])

ROWS = {
    "rack": Row(
        "ten minutes of a rack, 2.1 million requests",
        [*RACK.split(), "10m"],
        [*RACK.split(), "2s"],
        15,
        800,
        beside=("the engine alone", [*FLOORS, "engine", "3500", "10m"]),
    ),
    "size-rag": Row(
        "size rag of the documentation",
        [*RAG.split(), *PRICES],
        ["search", "rag", *SEARCH],
        10,
    ),
    "size-agentic": Row(
        "size agentic, 5,000 users",
        ["size", "agentic", "sim:gb300-vm", "--users", "5000", "--slo", "ttft:2s:p95"],
        ["search", "agentic", *SEARCH],
        40,
    ),
    "contract": Row("validate rag.yaml --dry-run", CONTRACT, [*CONTRACT, "--duration", "30s"], 10),
    "start": Row(
        "start and end of a run of 64 short requests",
        [*SHORT, "64"],
        [*SHORT, "16"],
        0.5,
        beside=BARE,
    ),
    "short": Row(
        "8,000 requests of 64 and 4 tokens",
        [*SHORT, "8000"],
        [*SHORT, "16"],
        1.8,
        beside=("64 of them", [*LOADGEN, *SHORT, "64"]),
    ),
    "long": Row(
        "200 prompts of 32,000 tokens",
        [*LONG, "200"],
        [*LONG, "4"],
        0.8,
        beside=("4 of them", [*LOADGEN, *LONG, "4"]),
    ),
    "report": Row(
        "report of 2.1 million requests, with its page",
        ["report", "{here}/rack"],
        ["report", "{here}/rack"],
        6,
        300,
        before=[[*RACK.split(), "{long}", "--out", "{here}/rack"]],
        beside=("their rows read once", [*FLOORS, "rows", "{here}/rack"]),
    ),
    "help": Row("loadgen --help", ["--help"], ["--help"], 0.10, beside=BARE),
    "version": Row("loadgen --version", ["--version"], ["--version"], 0.10, beside=BARE),
}


class Cost(NamedTuple):
    cpu_s: float
    peak_mb: float
    wall_s: float


def engine(rate: str, length: str) -> None:
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
    sizes = request_lengths.create_synthetic_sizer(workload.requests, prompts, 0)
    preset = load_preset("gb300-rack")
    system = SimulatedSystem(
        costs=preset.costs, limits=preset.limits, speeds=preset.speeds, routing=preset.routing
    )
    schedule = build_schedule(workload, 1)
    Simulation(schedule, sizes, system.create_replicas(), system.make_router()).run()


def rows(folder: str) -> None:
    """The floor of a report: every column of the rows, one at a time."""
    from loadgen.core.results import store
    from loadgen.core.results.record import ROW

    stored = store.read_lightly(Path(folder))
    for name in ROW.names or ():
        stored.rows[name].sum()


FLOOR: dict[str, Callable[..., None]] = {"engine": engine, "rows": rows}


def spent(command: Sequence[str], folder: Path, checkout: Path | None = None) -> Cost | None:
    """What a command costs from start to end. None: it was stopped after MOST_S. Raises SystemExit where it failed."""
    path = (
        {}
        if checkout is None
        else {"PYTHONPATH": os.pathsep.join([str(checkout), str(checkout / "sdk")])}
    )
    with open(folder / "output.txt", "w+") as output:
        begun = time.monotonic()
        child = subprocess.Popen(
            command, cwd=folder, stdout=output, stderr=subprocess.STDOUT, env=os.environ | path
        )
        with _stopped_after(child, MOST_S):
            _, status, used = os.wait4(child.pid, 0)
        wall_s = time.monotonic() - begun
        child.returncode = os.waitstatus_to_exitcode(status)
        if wall_s >= MOST_S:
            return None
        if child.returncode not in SOUND:
            output.seek(0)
            raise SystemExit(
                f"{' '.join(command)}: exit code {child.returncode}:\n{output.read()[-2000:]}"
            )
    return Cost(used.ru_utime + used.ru_stime, used.ru_maxrss * 1024 / 1e6, wall_s)


@contextlib.contextmanager
def _stopped_after(child: subprocess.Popen[bytes], seconds: float) -> Iterator[None]:
    timer = threading.Timer(seconds, child.terminate)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def sides(
    row: Row, fill: Callable[[str], str], beside: Path | None, *, smoke: bool
) -> dict[str, tuple[Sequence[str], Path | None]]:
    """What takes turns: name -> argument list, and the checkout it runs from. The installed loadgen is the last."""
    words = [fill(word) for word in (row.smallest if smoke else row.words)]
    found: dict[str, tuple[Sequence[str], Path | None]] = {}
    if row.beside is not None and shutil.which(row.beside[1][0]) and not smoke:
        found[row.beside[0]] = [fill(word) for word in row.beside[1]], None
    if beside is not None:
        found[rig.describe_commit(beside)] = [*LOADGEN, *words], beside
    found[OURS] = [*LOADGEN, *words], None
    return found


def measured(row: Row, url: str, flags: argparse.Namespace) -> list[list[str]]:
    """The lines of the table for a row: one for each side."""
    costs: dict[str, list[Cost | None]] = {}
    with tempfile.TemporaryDirectory(prefix="loadgen-waits-") as scratch:
        here = Path(scratch)
        known = {"{url}": url, "{here}": scratch, "{root}": str(rig.BENCHMARKS_DIR.parent)}
        known["{long}"] = "2s" if flags.smoke else "10m"

        def fill(word: str) -> str:
            for name, value in known.items():
                word = word.replace(name, value)
            return word

        for words in row.before:
            spent([*LOADGEN, *map(fill, words)], here)
        for _ in range(flags.rounds):
            for name, (command, checkout) in sides(
                row, fill, flags.beside, smoke=flags.smoke
            ).items():
                with tempfile.TemporaryDirectory(
                    prefix="loadgen-waits-"
                ) as folder:  # nothing of an earlier round
                    costs.setdefault(name, []).append(spent(command, Path(folder), checkout))
    return [
        _line(row if name == OURS else row._replace(what=""), name, found, costs)
        for name, found in costs.items()
    ]


def _line(
    row: Row, name: str, found: list[Cost | None], all_sides: dict[str, list[Cost | None]]
) -> list[str]:
    whole = [cost for cost in found if cost is not None]
    if len(whole) < len(found):
        return [row.what, name, f"stopped after {MOST_S:g} s", "", "", "", ""]
    cpu = sorted(cost.cpu_s for cost in whole)
    peak = max(cost.peak_mb for cost in whole)
    first, *_ = all_sides.values()
    against = [cost.cpu_s for cost in first if cost is not None]
    times = (
        ""
        if first is found or len(against) < len(cpu)
        else f"{rig.median_ratio([c.cpu_s for c in whole], against):.2f}"
    )
    wanted = (
        f"{row.cpu_s:g}" + (f", {row.peak_mb:,.0f} MB" if row.peak_mb else "") if row.what else ""
    )
    wall = rig.median([cost.wall_s for cost in whole])
    middle = f"{rig.median(cpu):.3g} ({cpu[0]:.3g} to {cpu[-1]:.3g})"
    return [row.what, name, middle, times, f"{peak:,.0f}", f"{wall:.3g}", wanted]


def main() -> None:
    parser = rig.create_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--only", action="append", choices=ROWS, help="one of the waits; repeatable"
    )
    parser.add_argument("--beside", type=Path, help="a checkout of another tree")
    args = rig.parse_arguments(parser, rounds=1)
    args.beside = None if args.beside is None else args.beside.resolve()
    chosen = [row for name, row in ROWS.items() if not args.only or name in args.only]
    needed = any(
        "{url}" in word for row in chosen for words in (row.words, *row.before) for word in words
    )
    with rig.serve_endpoint(**ENDPOINT) if needed else contextlib.nullcontext() as server:
        lines = [
            line for row in chosen for line in measured(row, server.url if server else "", args)
        ]
    print(
        rig.format_table(
            ["wait", "by", "CPU-s", "times the first", "peak MB", "wall s", "wanted"], lines
        )
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--floor"]:
        FLOOR[sys.argv[2]](*sys.argv[3:])
    else:
        main()
