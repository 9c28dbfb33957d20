"""Child processes: the command line of one, which never runs code from the current folder, and its CPU time."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def command(module: str, *arguments: str) -> list[str]:
    """What starts `module` in a process of its own. `-P`: the current folder is not on the path for imports, so that a
    `numpy.py` that happens to lie there is not executed."""
    return [sys.executable, "-P", "-m", module, *arguments]


def cpu_s(pid: int) -> float:
    """The CPU time that a process has used, in s; 0.0 where the system does not say (or the process is gone)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
