"""A process beside a run that reads its growing folder, such as the dashboard: it ends when its stdin is closed.

`Beside` hears a run and starts one for it.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

from loadgen.core import child_process
from loadgen.core.execution.events import LoadStarted, RunEnded, RunEvent, RunPlanned

LEAVE_S = 5.0  # to restore the terminal, or to close a port; then it is killed


class ReaderProcess:
    """The process, as seen by the command that runs the load. `leave_s`: how long it may take to end."""

    leave_s = LEAVE_S

    def __init__(self, module: str, *arguments: str) -> None:
        self._process = subprocess.Popen(
            child_process.command(module, *arguments),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C goes to the run only
        )

    def begin(self, start_ns: int) -> None:
        """The load begins at this instant of the monotonic clock. Not every reader has to know."""

    def close(self) -> None:
        """Stop the process and wait until it has left; it is killed after `leave_s`."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(self.leave_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Beside:
    """Hears runs: `start(folder)` begins and ends with each, but for those in virtual time, too fast to be watched."""

    def __init__(self, start: Callable[[Path], ReaderProcess]) -> None:
        self._start = start
        self._process: ReaderProcess | None = None

    def __call__(self, event: RunEvent) -> None:
        match event:
            case RunPlanned(plan, header) if header.client != "virtual":
                self._process = self._start(plan.job.folder)
            case LoadStarted(start_ns) if self._process is not None:
                self._process.begin(start_ns)
            case RunEnded() if self._process is not None:
                self._process.close()
                self._process = None
