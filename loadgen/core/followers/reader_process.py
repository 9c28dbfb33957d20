"""A process beside a run that reads its growing folder, such as the dashboard: it ends when its stdin is closed."""

from __future__ import annotations

import subprocess

from loadgen.core import child_process

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
