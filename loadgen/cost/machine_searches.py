"""The searches of simulated machines that `loadgen size` runs, several of them at once."""

from __future__ import annotations

import contextlib
import hashlib
import os
import selectors
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from loadgen.cli.output import print_status
from loadgen.core import child_process

if TYPE_CHECKING:
    from loadgen.core.execution.context import KnownTarget

SIMULATED = "sim:"
READ_BYTES = 1 << 16
HASH_DIGITS = 6
"""Hexadecimal digits of the hash in the name of a search folder, enough to tell a few apart."""

RunCommand = Callable[[list[str]], int]
"""Runs a command of loadgen by its arguments and returns its exit code."""


class SearchCommand(NamedTuple):
    """A search: the folder of its result, and its arguments on the command line."""

    folder: Path
    arguments: list[str]


def build_search_command(source: str, profile: str, slo: Sequence[str]) -> SearchCommand:
    """Return the `loadgen search` command that finds the capacity of a simulated machine.

    The same workload, SLO, machine and version of loadgen always give the same folder. So if the
    search is run again, a finished one is reused and a stopped one is resumed.

    Args:
        source: The machine, such as "sim:gb300-vm".
        profile: A packaged workload or the path of a workload file.
        slo: The terms of the SLO, such as "ttft:2s:p95".
    """
    from loadgen.core.execution.host_facts import loadgen_version

    folder = derive_search_folder(source, profile, slo, loadgen_version())
    arguments = ["search", profile, "--url", source, "--out", str(folder), "--seed", "1"]
    for term in slo:
        arguments += ["--slo", term]
    return SearchCommand(folder, arguments)


def derive_search_folder(
    source: str, profile: str, slo: Sequence[str], version: str, trial_ns: int | None = None
) -> Path:
    """Return the folder of the search of a simulated machine, such as results/size-rag-h100-3fa2b1.

    The name ends with a hash of everything that the result depends on, so that a result is reused
    only if a new search would repeat it. That includes the content of all files that the workload
    and the preset of the machine refer to.

    Args:
        source: The machine, such as "sim:gb300-vm".
        profile: A packaged workload or the path of a workload file.
        slo: The terms of the SLO.
        version: The version of loadgen.
        trial_ns: How long a trial lasts, or None for the default of a search.

    Raises:
        CombinedError: The workload or the SLO is not valid.
    """
    from loadgen.core.workload import load, read_flags, request_fingerprint
    from loadgen.core.workload.workload_files import read_workload_text
    from loadgen.repeated.capacity import default_trial_ns

    # A search chooses the rate and length of each trial itself. Any valid ones will do here.
    flags = read_flags(slo=tuple(slo), request_rate=1.0, warmup=0, duration="1s")
    workload = load(profile, flags)
    if trial_ns is None:
        trial_ns = default_trial_ns(workload)

    inputs = [
        version,
        *slo,
        str(trial_ns),
        read_workload_text(profile),
        request_fingerprint(workload, ""),
        find_simulated_target(source).identity,
    ]
    digest = hashlib.sha256("\n".join(inputs).encode()).hexdigest()[:HASH_DIGITS]
    machine = Path(source.removeprefix(SIMULATED)).stem

    return Path("results") / f"size-{Path(profile).stem}-{machine}-{digest}"


def find_simulated_target(source: str) -> KnownTarget:
    """Return the facts on a simulated machine that are known before any request.

    They include its preset, model and `identity`, a hash of everything that decides how it behaves.

    Args:
        source: The machine, such as "sim:gb300-vm".

    Raises:
        UserError: There is no such machine.
    """
    from loadgen.core.execution import backend
    from loadgen.core.execution.plan import Settings

    target = backend.known(Settings(url=source))
    assert target is not None, "only a real server is unknown before its first response"
    return target


def run_searches(searches: Mapping[str, SearchCommand], run_command: RunCommand) -> None:
    """Run several searches in parallel, one process per core, so that their results are stored.

    This is only an optimisation. `size_sources.run_search` later runs each search again, which is
    fast if its result is stored, and reports its errors. So this function does nothing if there is
    only one core or one search, or if the process cannot fork because it has threads.

    Args:
        searches: The searches by their sources. Each line of their output begins with the source.
        run_command: Runs a command of loadgen in this process.
    """
    # Two sources may be the same search, whose folder only one process may write to.
    search_by_folder = {search.folder: (source, search) for source, search in searches.items()}
    cores = child_process.count_cpus()
    is_parallel = cores > 1 and len(search_by_folder) > 1
    if is_parallel and child_process.can_fork():
        _SearchPool(cores, run_command).run_all(list(search_by_folder.values()))


class _SearchPool:
    """Runs searches in forked processes, a limited number at a time, and prints their output.

    Args:
        max_processes: How many searches may run at a time.
        run_command: Runs a command of loadgen in a forked process.
    """

    def __init__(self, max_processes: int, run_command: RunCommand) -> None:
        self._max_processes = max_processes
        self._run_command = run_command
        self._running: dict[str, child_process.ForkedProcess] = {}
        self._incomplete_lines: dict[str, bytes] = {}

    def run_all(self, searches: Sequence[tuple[str, SearchCommand]]) -> None:
        """Run searches, given with their sources, until all have ended.

        If this is interrupted, for example by Ctrl-C, the running searches are killed.
        """
        pending = deque(searches)
        with selectors.DefaultSelector() as outputs:
            try:
                while pending or self._running:
                    # Start searches until all processes are busy.
                    while pending and len(self._running) < self._max_processes:
                        source, search = pending.popleft()
                        self._start(source, search, outputs)
                    # Wait until at least one search has written something or has ended.
                    for key, _ in outputs.select():
                        self._read_output(key, outputs)
            finally:
                for process in self._running.values():
                    process.kill()
                    process.wait()

    def _start(self, source: str, search: SearchCommand, outputs: selectors.BaseSelector) -> None:
        """Start a search in a forked process, and wait for its output along with the others."""
        process = child_process.ForkedProcess(
            "search", partial(_run_in_child, search, self._run_command), keeps_open_files=True
        )
        process.stdin.close()
        outputs.register(process.stdout, selectors.EVENT_READ, source)
        self._running[source] = process

    def _read_output(self, key: selectors.SelectorKey, outputs: selectors.BaseSelector) -> None:
        """Print the complete lines that a search has written since the last call.

        A read may end within a line, so the last piece is kept until the rest of it arrives. At the
        end of its output, the search is removed from the running ones.
        """
        source = key.data
        data = os.read(key.fd, READ_BYTES)
        output = self._incomplete_lines.get(source, b"") + data
        *lines, incomplete_line = output.split(b"\n")

        self._incomplete_lines[source] = incomplete_line
        for line in lines:
            print_status(f"{source}: {line.decode(errors='replace')}")

        has_ended = not data  # An empty read means that the process has closed its output.
        if has_ended:
            outputs.unregister(key.fileobj)
            self._running.pop(source).wait()


def _run_in_child(search: SearchCommand, run_command: RunCommand) -> None:
    """Run a search in a forked process, whose standard output is a pipe to the parent.

    Progress, which a search writes to standard error, is redirected to that pipe. The report is
    discarded and errors are suppressed, because the parent runs the same search again afterwards.
    """
    stdout_fd = 1
    with (
        open(stdout_fd, "w", encoding="utf-8", buffering=1, closefd=False) as progress,
        open(os.devnull, "w", encoding="utf-8") as discarded,
        contextlib.redirect_stderr(progress),
        contextlib.redirect_stdout(discarded),
        contextlib.suppress(Exception),
    ):
        run_command(search.arguments)
