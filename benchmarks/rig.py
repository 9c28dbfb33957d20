"""What the benchmarks share: a command line, the endpoint on a core of its own, one process per contender, CPU, tables.

A contender is a function in a file of this folder, run as `python FILE NAME JSON` in its own process; it prints one
JSON object. Nothing here measures by wall clock what can be measured in CPU-seconds: the machine is shared and noisy.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from loadgen.sim.server import embedded
from loadgen.sim.server.options import Options

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent / "tests"))  # where servers and rows are made
SATURATED = 0.85  # of a core: a server busier than this shapes what its clients see
FIRST_COME = os.SCHED_RR | os.SCHED_RESET_ON_FORK  # real time for a process, not for its children
BUNDLED = 0.9  # reads per event: fewer means that the client read several events at once, which is cheaper
T = TypeVar("T")
LACKING = 77  # exit code of a script that needs what this machine has not


class Alone:
    """With `on`, client and endpoint have real-time priority: what others on this machine do stays out of the figures.
    For latencies only, as CPU-seconds hardly feel others. Needs the right to set it (root).
    """

    on = False


def parser(doc: str | None, *, alone: bool = False) -> argparse.ArgumentParser:
    """The command line of a script, with its docstring as help. `alone`: it can have real-time priority."""
    made = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    made.add_argument(
        "--smoke",
        action="store_true",
        help="the smallest form, some seconds: it runs, and says nothing",
    )
    if alone:
        made.add_argument(
            "--alone",
            action="store_true",
            help="real-time priority: without the noise of others (root)",
        )
    return made


def given(options: argparse.ArgumentParser, **smallest: Any) -> argparse.Namespace:
    """The arguments of this command; with --smoke the `smallest` in place of the defaults.

    Prints what the figures below it are quoted with: script, tree, day and machine.
    """
    if "--smoke" in sys.argv:
        options.set_defaults(**smallest)
    found = options.parse_args()
    Alone.on = getattr(found, "alone", False)
    script = Path(sys.argv[0]).absolute()
    name = script.relative_to(HERE) if script.is_relative_to(HERE) else script.name
    command = " ".join([f"benchmarks/{name}", *sys.argv[1:]])
    print(f"`{command}` ({seen()}); {host()}\n", flush=True)
    if found.smoke:
        print(
            "SMOKE: the smallest form, which shows that the script runs. Its figures say nothing.\n",
            flush=True,
        )
    return found


def seen() -> str:
    """The tree and the day, as a figure is quoted with them."""
    return f"{tree()}, {date.today()}"


def tree(checkout: Path = HERE) -> str:
    """The commit of a checkout, with a + where it was changed since; the version where there is none."""

    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(checkout), *words], capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    try:
        return git("rev-parse", "--short", "HEAD") + (
            "+" if git("status", "--porcelain", "-uno") else ""
        )
    except (OSError, subprocess.CalledProcessError):
        return version("loadgen")


def lacking(what: str) -> NoReturn:
    """End a script that needs what this machine has not."""
    print(f"skipped: {what}")
    sys.exit(LACKING)


def settle(pid: int, core: set[int]) -> None:
    """Put a process (0: this one) where it belongs."""
    os.sched_setaffinity(pid, core)
    prefer(pid)


def prefer(pid: int = 0) -> None:
    """Give a process (0: this one) real-time priority where that was asked for."""
    if Alone.on:
        os.sched_setscheduler(pid, FIRST_COME, os.sched_param(1))


def cores() -> tuple[set[int], set[int]]:
    """One core for the client and another for the server; the same one where there is only one."""
    own = sorted(os.sched_getaffinity(0))
    return {own[-1]}, {own[0]}


@contextlib.contextmanager
def endpoint(**options: Any) -> Iterator[embedded.EmbeddedServer]:
    """The embedded endpoint, on the server's core, while inside."""
    with embedded.start(Options(**options)) as server:
        settle(server.pid, cores()[1])
        yield server


def get(url: str) -> bytes:
    with urllib.request.urlopen(url) as answer:
        data: bytes = answer.read()
    return data


def stats(url: str) -> dict[str, float]:
    """The endpoint's own counters: events, requests, cpu_s."""
    found: dict[str, float] = json.loads(get(url + "/_stats"))
    return found


class Window:
    """CPU, wall time and read(2) calls of this process between `begin` and `end`, both callable once. `waited_s`: how
    long it was ready to run and others had the core, which is what a shared machine does to latencies.
    """

    def __init__(self) -> None:
        self._begun: tuple[float, int, int, int] | None = None
        self.result: dict[str, float] = {}

    def begin(self) -> None:
        self._begun = _usage()

    def end(self) -> None:
        assert self._begun is not None, "the window was never opened"
        cpu, wall, reads, waited = _usage()
        self.result = {
            "cpu_s": cpu - self._begun[0],
            "wall_s": (wall - self._begun[1]) / 1e9,
            "syscalls_read": reads - self._begun[2],
            "waited_s": (waited - self._begun[3]) / 1e9,
        }


def _usage() -> tuple[float, int, int, int]:
    used = resource.getrusage(resource.RUSAGE_SELF)
    with open("/proc/self/io") as file:
        reads = next(int(line.split()[1]) for line in file if line.startswith("syscr"))
    waited = int(Path("/proc/self/schedstat").read_text().split()[1])
    return used.ru_utime + used.ru_stime, time.monotonic_ns(), reads, waited


def contend(
    file: str, name: str, arguments: Mapping[str, Any], timeout_s: float = 300
) -> dict[str, Any]:
    """Run one contender in a process of its own on the client's core; what it printed last, as a dict."""
    command = [sys.executable, str(HERE / file), name, json.dumps(arguments)]
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        text=True,
        timeout=timeout_s,
        check=False,
        preexec_fn=lambda: settle(0, cores()[0]),
    )
    if done.returncode or not done.stdout.strip():
        raise SystemExit(f"{name} ended with {done.returncode}: {done.stdout[-500:]}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def serve(contenders: Mapping[str, Callable[..., dict[str, Any]]]) -> None:
    """The other side of `contend`: the main program of a file of contenders."""
    raise_files()
    print(json.dumps(contenders[sys.argv[1]](**json.loads(sys.argv[2]))), flush=True)


def raise_files() -> None:
    """As many open files as the system allows."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def watched(url: str, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Run `work`, adding what the server did meanwhile: `server_events`, `server_requests`, `server_cpu_s`, and
    `server_share`, of its core.
    """
    before = stats(url)
    found = work()
    after = stats(url)
    found |= {
        f"server_{name}": after[name] - before[name] for name in ("events", "requests", "cpu_s")
    }
    found["server_share"] = found["server_cpu_s"] / found["wall_s"]
    return found


def in_turn(rounds: int, sides: Mapping[str, Callable[[], T]]) -> dict[str, list[T]]:
    """What each side gave, round by round: what a slow minute does to one of them it does to all of its round."""
    found: dict[str, list[T]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, once in sides.items():
            found[name].append(once())
    return found


def ratio(over: Sequence[float], under: Sequence[float]) -> float:
    """The median of the ratios within each round."""
    return median([a / b for a, b in zip(over, under, strict=True)])


def cpu_s(work: Callable[[], object], times: int = 1, rounds: int = 5) -> float:
    """CPU-seconds of one call in this process, the least of the rounds."""
    spent = []
    for _ in range(rounds):
        begun = time.process_time()
        for _ in range(times):
            work()
        spent.append((time.process_time() - begun) / times)
    return min(spent)


def remarks(found: Mapping[str, Any], *, one_event_per_read: bool = True) -> str:
    """What stands in the way of taking a figure as it is."""
    said = []
    if found["server_share"] > SATURATED:
        said.append("server saturated")
    if found["cpu_s"] / found["wall_s"] > SATURATED:
        said.append("client saturated")
    if one_event_per_read and found.get("reads_per_event", 1.0) < BUNDLED:
        said.append("events bundled")
    return ", ".join(said)


def median(values: Sequence[float]) -> float:
    return float(statistics.median(values))


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A markdown table; the first column is text, the others are numbers."""
    lines = ["| " + " | ".join(columns) + " |", "|---|" + "---:|" * (len(columns) - 1)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def host() -> str:
    """The machine, in one line."""
    cpu = "unknown CPU"
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        cpu = next(
            (line.partition(":")[2].strip() for line in file if line.startswith("model name")), cpu
        )
    load = os.getloadavg()[0]
    return (
        f"{cpu}, {len(os.sched_getaffinity(0))} cores shared with others (load {load:.1f}), "
        f"Linux {platform.release()}, Python {platform.python_version()}"
        + (", client and endpoint with real-time priority" if Alone.on else "")
    )


def verdict(value: float, limit: float, *, most: bool) -> str:
    """`1.52x (limit 1.60)` with a mark."""
    kept = value <= limit if most else value >= limit
    return f"{'met' if kept else '**missed**'} ({'at most' if most else 'at least'} {limit:g})"
