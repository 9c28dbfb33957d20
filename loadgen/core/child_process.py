"""Child processes: the command line of one, which never runs code from the current folder, its CPU time, its end."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

LEAVE_S = 5.0  # what a process that was told to end may take for it
FROZEN_S = 20.0  # without CPU time while it is waited for: a process that does not move any more


def command(module: str, *arguments: str) -> list[str]:
    """What starts `module` in a process of its own. `-P`: the current folder is not on the path for imports, so that a
    `numpy.py` that happens to lie there is not executed."""
    return [sys.executable, "-P", "-m", module, *arguments]


def cpu_s(pid: int) -> float:
    """The CPU time that a process and its own children have used, in s; 0.0 where the system does not say."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text("utf-8").split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") + sum(map(cpu_s, map(int, children)))


def end(process: subprocess.Popen[bytes]) -> None:
    """Tell a process to end, and wait; kill it after LEAVE_S."""
    if process.poll() is None:
        process.terminate()
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(BrokenPipeError):
            if pipe is not None:
                pipe.close()
    try:
        process.wait(LEAVE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
