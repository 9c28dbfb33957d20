"""Sidecar processes that read the growing folder of a run, such as the dashboard and exporters.

Nothing is added to the process of the load. A sidecar ends when its standard input is closed.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

from loadgen.core import child_process
from loadgen.core.execution.events import LoadStarted, RunEnded, RunEvent, RunPlanned

SHUTDOWN_S = 5.0
"""Time to restore the terminal, or to close a port, before the process is killed."""


class ReaderProcess:
    """A sidecar process, as the command that runs the load sees it.

    Attributes:
        shutdown_s: How long the process may take to end before it is killed.
    """

    shutdown_s = SHUTDOWN_S

    def __init__(self, module: str, *arguments: str) -> None:
        self._process = subprocess.Popen(
            child_process.command(module, *arguments),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C goes to the run only.
        )

    def begin(self, start_ns: int) -> None:
        """Note that the load begins at this time of the monotonic clock. By default, do nothing."""

    def close(self) -> None:
        """Stop the process and wait until it has ended."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(self.shutdown_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class SidecarStarter:
    """An event handler that starts a sidecar for each run and stops it when the run ends.

    Runs in virtual time have none, because they are too fast to be watched.
    """

    def __init__(self, start: Callable[[Path], ReaderProcess]) -> None:
        self._start = start
        self._process: ReaderProcess | None = None

    def __call__(self, event: RunEvent) -> None:
        """Start the sidecar when a run is planned, and stop it when the run has ended.

        In between, the sidecar is told when the load starts. Other events are ignored.
        """
        match event:
            case RunPlanned(plan, manifest) if manifest.client != "virtual":
                self._process = self._start(plan.job.folder)
            case LoadStarted(start_ns) if self._process is not None:
                self._process.begin(start_ns)
            case RunEnded() if self._process is not None:
                self._process.close()
                self._process = None
