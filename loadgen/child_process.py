"""The command line of a child process: a module of this package, never code from the current folder. Pure."""

from __future__ import annotations

import sys


def command(module: str, *arguments: str) -> list[str]:
    """What starts `module` in a process of its own. `-P`: the current folder is not on the path for imports, so that a
    `numpy.py` that happens to lie there is not executed."""
    return [sys.executable, "-P", "-m", module, *arguments]
