"""The process that converts the records of a long run to Parquet while the run goes on.

IO. It is `python -m loadgen.core.sidecars.compactor_process FOLDER SECONDS`, and its standard input
ends with the run. It waits until the run has lasted a while, and imports what it needs only then.
The records of a shorter run are converted at its end, by the command itself: a process that starts,
imports numpy and pyarrow and writes one small file would cost as much as ten thousand requests. If
the plan has few requests, no process is started at all.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path

from loadgen.core import child_process
from loadgen.core.child_process import FROZEN_S

FIRST_CONVERSION_S = 20.0
"""The records of a run that lasts longer than this are converted during the run, s."""

NOT_BEGUN = 3
"""The exit code of the process if the run ended before it began to convert records."""

NICENESS = 5
"""A lower priority than the load, but not the lowest, since the run waits for the merged file."""


class Compactor:
    """Converts the records of a run to Parquet: during a long run, and at the end of any run.

    Attributes:
        failure: Why the process ended before its work was done, or "". Nothing is lost then,
            because what it had not written is still in the record log, which readers read too.
    """

    failure = ""

    def __init__(
        self,
        folder: Path,
        first_conversion_s: float = FIRST_CONVERSION_S,
        *,
        stuck_after_s: float = FROZEN_S,
        starts_process: bool = True,
    ) -> None:
        """Start the process that converts records during the run, if that is requested.

        Args:
            folder: The folder of the run.
            first_conversion_s: After this time the process begins to convert records.
            stuck_after_s: At the end of the run, a process that has used no CPU time for this long
                is killed.
            starts_process: Whether to start a process. Without one, `finish` converts all records,
                which takes little time if the load is small, however long it lasts.
        """
        self._folder = folder
        self._stuck_after_s = stuck_after_s

        self._process: subprocess.Popen[bytes] | None = None
        if starts_process:
            module = "loadgen.core.sidecars.compactor_process"
            self._process = subprocess.Popen(
                child_process.command(module, str(folder), str(first_conversion_s)),
                stdin=subprocess.PIPE,
                start_new_session=True,
            )

    def finish(self) -> bool:
        """Convert the remaining records at the end of a run, and wait until that is done.

        The process does it if it has begun to convert records. Otherwise it is done here.

        Returns:
            True if all records are in Parquet, so that the record log can be deleted. If False,
            `failure` says what went wrong.
        """
        exit_code = self.close()
        if exit_code == NOT_BEGUN:
            # Short runs that fail before their end do not need this module.
            from loadgen.core.sidecars.compactor import compact_records

            compact_records(self._folder)
        return self.failure == ""

    def close(self) -> int:
        """Tell the process that the run is over, wait for its end, and return its exit code.

        If the process has begun to convert records, it converts the remaining ones first. If it has
        not begun, or if there is no process, the result is NOT_BEGUN. If the process fails,
        `failure` says why.
        """
        if self._process is None:
            return NOT_BEGUN

        assert self._process.stdin is not None
        self._process.stdin.close()  # The process waits for this as the end of the run.

        exit_code = self._wait(self._process)
        if not self.failure:
            self.failure = _describe_exit(exit_code)

        return exit_code

    def _wait(self, process: subprocess.Popen[bytes]) -> int:
        """Wait for the end of the process, and return its exit code.

        A process that uses no CPU time for `stuck_after_s` is stuck, for example on a dead disk,
        and is killed.
        """
        previous_cpu_s: float | None = None
        while True:
            try:
                return process.wait(self._stuck_after_s)
            except subprocess.TimeoutExpired:
                used_cpu_s = child_process.read_cpu_seconds(process.pid)
                is_stuck = used_cpu_s == previous_cpu_s
                previous_cpu_s = used_cpu_s
                if is_stuck:
                    process.kill()  # The next `wait` then returns its exit code.
                    self.failure = f"did not respond for {self._stuck_after_s:g} s and was killed"


def _describe_exit(exit_code: int) -> str:
    """Return how the process failed according to its exit code, or "" if it did not fail."""
    if exit_code in (0, NOT_BEGUN):
        return ""
    if exit_code < 0:
        return f"was killed by signal {-exit_code}"
    return f"failed with code {exit_code}"


if __name__ == "__main__":
    os.nice(NICENESS)
    run_has_ended = select.select([sys.stdin], [], [], float(sys.argv[2]))[0]
    if run_has_ended:
        sys.exit(NOT_BEGUN)
    from loadgen.core.sidecars.compactor import compact_records

    compact_records(Path(sys.argv[1]), sys.stdin)
