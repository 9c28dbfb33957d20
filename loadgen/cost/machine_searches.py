"""The searches of simulated machines that `loadgen size` runs, several of them at once."""

from __future__ import annotations

import contextlib
import hashlib
import os
import selectors
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

RunCommand = Callable[[list[str]], int]
"""Runs a command of loadgen by its arguments and returns its exit code."""


class SearchCommand(NamedTuple):
    """A search: the folder of its result, and its arguments on the command line."""

    folder: Path
    arguments: list[str]


def search_command(source: str, profile: str, slo: Sequence[str]) -> SearchCommand:
    """Return the search of a simulated machine.

    Its folder is that of every search of the same workload, SLO and machine by the same version of
    loadgen: a finished search is reused, and a stopped one is resumed.
    """
    from loadgen.core.execution.host_facts import loadgen_version

    folder = search_folder(source, profile, slo, loadgen_version())
    arguments = ["search", profile, "--url", source, "--out", str(folder), "--seed", "1"]
    for term in slo:
        arguments += ["--slo", term]
    return SearchCommand(folder, arguments)


def search_folder(
    source: str, profile: str, slo: Sequence[str], version: str, trial_ns: int | None = None
) -> Path:
    """Return where the search of a machine by a version of loadgen is stored.

    The name contains a hash of everything that the result depends on, including the files that the
    workload and the preset of the machine name.

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
        simulated_target(source).identity,
    ]
    key = hashlib.sha256("\n".join(inputs).encode()).hexdigest()[:6]
    machine = Path(source.removeprefix(SIMULATED)).stem
    return Path("results") / f"size-{Path(profile).stem}-{machine}-{key}"


def simulated_target(source: str) -> KnownTarget:
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
    """Run several searches by their sources, as many at once as there are cores.

    This only saves time: the caller runs each search again in any case, which then finds the
    result in its folder. So nothing is done here if searches could not run at once, or if this
    process cannot fork because it has threads. Each line of output begins with the source.
    """
    # Two sources may be the same search, whose folder only one process may write to.
    search_by_folder = {search.folder: (source, search) for source, search in searches.items()}
    cores = len(os.sched_getaffinity(0))
    searches_at_once = min(cores, len(search_by_folder))
    if searches_at_once < 2 or not child_process.can_fork():
        return
    _SearchPool(cores, run_command).run(list(search_by_folder.values()))


class _SearchPool:
    """Runs searches in forked processes and prints their lines."""

    def __init__(self, size: int, run_command: RunCommand) -> None:
        self._size = size
        self._run_command = run_command
        self._running: dict[str, child_process.ForkedProcess] = {}
        self._incomplete_lines: dict[str, bytes] = {}

    def run(self, waiting: list[tuple[str, SearchCommand]]) -> None:
        """Run all searches. If this is interrupted, running searches are killed."""
        with selectors.DefaultSelector() as outputs:
            try:
                while waiting or self._running:
                    while waiting and len(self._running) < self._size:
                        self._start(*waiting.pop(0), outputs)
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
        """Print the complete lines that a search has written, or end it at the end of its output.

        A read may end within a line, so the last piece is kept until the rest of it arrives.
        """
        source = key.data
        data = os.read(key.fd, READ_BYTES)
        *lines, incomplete = (self._incomplete_lines.get(source, b"") + data).split(b"\n")
        self._incomplete_lines[source] = incomplete
        for line in lines:
            print_status(f"{source}: {line.decode(errors='replace')}")
        if not data:  # end of file: the process has ended
            outputs.unregister(key.fileobj)
            self._running.pop(source).wait()


def _run_in_child(search: SearchCommand, run_command: RunCommand) -> None:
    """Run a search in a forked process. Its progress goes to the parent, its report nowhere.

    The parent runs the same search afterwards, prints the report, and meets any error again.
    """
    with (
        open(1, "w", encoding="utf-8", buffering=1, closefd=False) as progress,
        open(os.devnull, "w", encoding="utf-8") as discarded,
        contextlib.redirect_stderr(progress),
        contextlib.redirect_stdout(discarded),
        contextlib.suppress(Exception),
    ):
        run_command(search.arguments)
