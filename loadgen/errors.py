"""The errors a user can cause or meet, hints, and the exit codes: values only. `cli/ending.py` prints and leaves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

OK = 0  # done, SLO met
SLO_MISSED = 1  # a sound run that missed its SLO, or a comparison that failed
USAGE = 2  # wrong flags or workload
UNSOUND = 3  # target unreachable, or the measurement is not valid
BUG = 70  # EX_SOFTWARE of sysexits.h
INTERRUPTED = 130  # 128 + SIGINT


class Place(NamedTuple):
    """A place in a file, counted from 1, and the path of keys that leads there ("" at the top)."""

    file: str
    line: int
    column: int
    path: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}" + (f" ({self.path})" if self.path else "")


class Fault(Exception):
    """One error: `what` is wrong, `where` (file:line:column, a flag, a URL), and a `hint` what to do.

    `code` says for programs what is wrong, and `key` of what, where a caller distinguishes it; `place` is where.
    """

    exit_code = USAGE

    def __init__(self, what: str, where: str | Place = "", hint: str = "", *, code: str = "", key: str = "") -> None:
        super().__init__(what)
        self.what, self.where, self.hint, self.code, self.key = what, str(where), hint, code, key
        self.place = where if isinstance(where, Place) else None

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


@contextmanager
def collecting(faults: list[Fault]) -> Iterator[None]:
    """Add what is raised inside to `faults`, so that the checks after it are made too."""
    try:
        yield
    except Faults as several:
        faults += several.faults
    except Fault as fault:
        faults.append(fault)


FAULTS_SHOWN = 20  # of one file


def enough(faults: list[Fault], file: str) -> bool:
    """Whether to check no more of a file: FAULTS_SHOWN faults are there, and now a last one that says so."""
    if len(faults) < FAULTS_SHOWN:
        return False
    faults.append(UserError(f"checking stopped after {FAULTS_SHOWN} faults", file))
    return True


def meant(word: str, known: Sequence[str], synonyms: Mapping[str, str] | None = None) -> str:
    """The hint for a word that is not in `known`: the closest known word, if one is similar, and the list of all."""
    similar = closest(word, known, synonyms)
    suggestion = f'did you mean "{similar}"? ' if similar else ""
    return f"{suggestion}known: {', '.join(known)}"


def closest(word: str, known: Sequence[str], synonyms: Mapping[str, str] | None = None, cutoff: float = 0.6) -> str:
    """The known word that is probably meant, at least `cutoff` of it the same; "" when none is similar."""
    import difflib

    return (synonyms or {}).get(word) or next(iter(difflib.get_close_matches(word, known, 1, cutoff)), "")
