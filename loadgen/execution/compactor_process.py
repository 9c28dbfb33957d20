"""The process beside a long run that compacts its rows: `python -m loadgen.execution.compactor_process FOLDER SECONDS`.

It waits until the run has lasted a while, and imports what it needs only then. Of a shorter run the rows are compacted
at the end, by the command itself: a process that starts, imports numpy and pyarrow and writes one small file would cost
as much as ten thousand requests. Its standard input ends with the run.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path

from loadgen import child_process

LONG_S = 20.0  # a run that lasts longer than this is compacted while it goes
NOT_BEGUN = 3  # exit code: the run ended before that


class Compactor:
    """Compacts the rows of a run: while it goes, if it is long, and at its end."""

    def __init__(self, folder: Path, long_s: float = LONG_S) -> None:
        self._folder = folder
        self._process = subprocess.Popen(
            child_process.command("loadgen.execution.compactor_process", str(folder), str(long_s)),
            stdin=subprocess.PIPE,
            start_new_session=True,
        )

    def finish(self) -> bool:
        """True when every row is in Parquet or in the accumulator; the caller may then delete the spool."""
        code = self.close()
        if code == NOT_BEGUN:
            from loadgen.execution.compactor import record

            record(self._folder)
        return code in (0, NOT_BEGUN)

    def close(self) -> int:
        """End the process; returns its exit code. If it had not begun, the rows stay in the spool."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        return self._process.wait()


if __name__ == "__main__":
    os.nice(5)  # lower priority than the load, but not the lowest: at its end the run waits for the merged file
    if select.select([sys.stdin], [], [], float(sys.argv[2]))[0]:
        sys.exit(NOT_BEGUN)
    from loadgen.execution.compactor import record

    record(Path(sys.argv[1]), sys.stdin)
