"""The process beside a long run that compacts its rows.

`python -m loadgen.core.sidecars.compactor_process FOLDER SECONDS`. It waits until the run has
lasted a while, and imports what it needs only then. Of a shorter run the rows are compacted at the
end, by the command itself: a process that starts, imports numpy and pyarrow and writes one small
file would cost as much as ten thousand requests. Where the plan says that there will be few rows,
no process is started at all. Its standard input ends with the run.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path

from loadgen.core import child_process
from loadgen.core.child_process import FROZEN_S

LONG_S = 20.0  # a run that lasts longer than this is compacted while it goes
NOT_BEGUN = 3  # exit code: the run ended before that


class Compactor:
    """Compacts the rows of a run: while it goes, if it is long, and at its end. `beside`: False for a load of few rows,
    however long it is; then there is no process.

    `died`: why the process ended before its work was done; "" so far. Nothing is lost then: what it
    had not written down is still in the spool, and readers count it.
    """

    died = ""

    def __init__(
        self,
        folder: Path,
        long_s: float = LONG_S,
        *,
        frozen_s: float = FROZEN_S,
        beside: bool = True,
    ) -> None:
        self._folder, self._frozen_s = folder, frozen_s
        self._process: subprocess.Popen[bytes] | None = None
        if not beside:
            return
        self._process = subprocess.Popen(
            child_process.command(
                "loadgen.core.sidecars.compactor_process", str(folder), str(long_s)
            ),
            stdin=subprocess.PIPE,
            start_new_session=True,
        )

    def finish(self) -> bool:
        """True when every row is in Parquet; the caller may then delete the spool."""
        if self.close() == NOT_BEGUN:
            from loadgen.core.sidecars.compactor import compact_records

            compact_records(self._folder)
        return not self.died

    def close(self) -> int:
        """End the process; returns its exit code. If it had not begun, the rows stay in the spool.

        A process that uses no CPU time for `frozen_s` does not move any more: it is killed.
        """
        if self._process is None:
            return NOT_BEGUN
        assert self._process.stdin is not None
        self._process.stdin.close()
        used_s = -1.0
        while self._process.returncode is None:
            try:
                self._process.wait(self._frozen_s)
            except subprocess.TimeoutExpired:
                before_s, used_s = used_s, child_process.cpu_s(self._process.pid)
                if used_s == before_s:
                    self._process.kill()
                    self.died = f"did not move for {self._frozen_s:g} s and was killed"
        if (code := self._process.returncode) not in (0, NOT_BEGUN):
            self.died = self.died or (
                f"was killed by signal {-code}" if code < 0 else f"failed with code {code}"
            )
        return code


if __name__ == "__main__":
    os.nice(
        5
    )  # lower priority than the load, but not the lowest: at its end the run waits for the merged file
    if select.select([sys.stdin], [], [], float(sys.argv[2]))[0]:
        sys.exit(NOT_BEGUN)
    from loadgen.core.sidecars.compactor import compact_records

    compact_records(Path(sys.argv[1]), sys.stdin)
