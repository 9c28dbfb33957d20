"""The errors a user can cause or meet, the exit codes, and the handler around every command.

Only `ending` prints; the command line runs every command through it.
"""

from __future__ import annotations

import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence

OK = 0  # done, SLO met
SLO_MISSED = 1  # a sound run that missed its SLO, or a comparison that failed
USAGE = 2  # wrong flags or workload
UNSOUND = 3  # target unreachable, or the measurement is not valid
BUG = 70  # EX_SOFTWARE of sysexits.h
INTERRUPTED = 130  # 128 + SIGINT


class Fault(Exception):
    """One error: `what` is wrong, `where` (file:line:column, a flag, a URL), and a `hint` what to do."""

    exit_code = USAGE

    def __init__(self, what: str, where: str = "", hint: str = "") -> None:
        super().__init__(what)
        self.what, self.where, self.hint = what, where, hint

    def __str__(self) -> str:
        lines = [f"error: {self.what}"]
        if self.where:
            lines.append(f"  --> {self.where}")
        if self.hint:
            lines.append(f"hint: {self.hint}")
        return "\n".join(lines)


class UserError(Fault):
    """Wrong usage, a wrong workload file, a wrong flag: exit 2."""


class TargetError(Fault):
    """The endpoint cannot be reached, refuses requests, or is not of the requested kind: exit 3."""

    exit_code = UNSOUND


class Faults(Exception):
    """Several faults of one check, shown together, so that the user can correct all before the next run."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        super().__init__(f"{len(faults)} faults")
        self.faults = tuple(faults)

    @property
    def exit_code(self) -> int:
        return max(fault.exit_code for fault in self.faults)

    def __str__(self) -> str:
        return "\n".join(str(fault) for fault in self.faults)


def ending(call: Callable[[], int]) -> int:
    """Run `call` and return the exit code: its own, that of an error, INTERRUPTED, or BUG (trace in a file)."""
    try:
        return call()
    except (Fault, Faults) as fault:
        print(fault, file=sys.stderr)
        return fault.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of stdout has closed it (`loadgen report | head`)
        sys.stderr.close()
        return OK
    except Exception as bug:
        with tempfile.NamedTemporaryFile("w", prefix="loadgen-bug-", suffix=".txt", delete=False) as file:
            traceback.print_exc(file=file)
        print(f"error: a bug in loadgen: {type(bug).__name__}: {bug}\n  --> {file.name}", file=sys.stderr)
        print("hint: please report it with that file", file=sys.stderr)
        return BUG
