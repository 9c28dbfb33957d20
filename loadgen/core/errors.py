"""The errors a user can cause or meet, hints, and the exit codes: values only. `cli/ending.py` prints and leaves."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from os.path import isfile
from typing import Literal, NamedTuple

from loadgen_sdk.errors import Code as SdkCode

OK = 0  # done, SLO met
SLO_MISSED = 1  # a sound run that missed its SLO, or a comparison that failed
USAGE = 2  # wrong flags or workload
UNSOUND = 3  # target unreachable, or the measurement is not valid
INCONCLUSIVE = 4  # a sound measurement that cannot decide what was asked
BUG = 70  # EX_SOFTWARE of sysexits.h
INTERRUPTED = 130  # 128 + SIGINT

_BY_SEVERITY = (INTERRUPTED, BUG, UNSOUND, USAGE, SLO_MISSED, INCONCLUSIVE, OK)


def most_severe(exit_codes: Iterable[int]) -> int:
    """Return the exit code of a command with several parts, or OK if there are none.

    A measurement that is not valid comes before a missed SLO, and that before an undecided one.
    """
    return min(exit_codes, key=_BY_SEVERITY.index, default=OK)


Code = Literal[
    SdkCode,
    # options and values
    "no_effect",  # would change nothing here: leave it out, or add what it goes with
    "unordered",  # numbers or instants that must ascend do not
    "too_large",  # more rows, bytes, levels or values than are read or planned
    "too_few",  # fewer requests, runs or results than the question needs
    "unset_variable",  # an environment variable that is named is not set
    "secret",  # what looks like a secret would be stored
    "more_faults",  # no more were looked for in this file
    # workloads
    "no_load",  # nothing says what load to send
    "endless",  # a load or drawn number without upper end
    "no_slo",  # nothing says when a request or task is good
    "over_context",  # most requests exceed the model's context
    "cycle",  # things wait for each other, or one refers to itself
    # files and folders
    "missing_file",  # no such file or folder
    "file_exists",  # something there would be written over
    "folder_in_use",  # another command works in the folder
    "empty_file",  # a file without rows, targets, or what else is looked for
    "wrong_format",  # a file of another kind
    "wrong_encoding",  # no text in UTF-8
    "invalid_syntax",  # no valid YAML, JSON or CSV
    "damaged_file",  # the right kind, but cut off or damaged
    "changed_file",  # not as it was when written or checked
    "unsafe_file",  # an archive or pickle that may do more than give data: not unpacked
    "newer_version",  # written by a newer loadgen
    "not_downloaded",  # a data set that is not here and could not be fetched
    # results
    "no_result",  # no result of the kind asked for in the folder
    "no_records",  # the result kept its summary only
    "no_figure",  # the result lacks a figure that is needed
    "unsound",  # the result is not a valid measurement
    "ambiguous",  # several fit where one is needed
    "mismatch",  # two that do not belong together: result and profile, folder and command
    "already_decided",  # more load would not change the verdict
    "not_signed",  # there is no signature, or none could be made
    # prices
    "no_exchange_rate",  # a price in another currency without an exchange rate
    "sample_prices",  # a sample, not an offer
    "over_budget",  # what comes next would cost more than --max-cost
    # this host and its cluster
    "host_refused",  # the operating system refused a file or folder
    "cannot_listen",  # the address to listen on is taken, or not of this host
    "unusable_source",  # nothing can be sent from the local address given
    "no_cluster",  # no Ray cluster answers at the address
    "cluster_in_use",  # another command loads from the cluster
    "node_lost",  # no node of the cluster is left to send
    "nodes_differ",  # nodes differ in a file or version
    "process_failed",  # a worker or the simulated server did not start, or was lost before the load
    # the target, beside the codes of the SDK
    "targets_differ",  # targets of one run do not serve the same
    "failed_check",  # a check before the load found a fault; `key` says which
]
"""What is wrong, for programs; docs/reference/errors.md is made from this table and from that of the SDK."""


class Place(NamedTuple):
    """A place in a file, counted from 1, and the path of keys that leads there ("" at the top)."""

    file: str
    line: int
    column: int
    path: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}" + (f" ({self.path})" if self.path else "")


class LoadgenError(Exception):
    """One error: `what` is wrong, `where` (file:line:column, a flag, a URL), and a `hint` what to do.

    For programs: `code` says what is wrong, `key` of what (a flag, a path of keys, a package; by default the flag or
    the path in `where`), and `values` what else a program can use. `place` is where, of a file that was parsed.
    """

    exit_code = USAGE

    def __init__(
        self,
        code: Code,
        what: str,
        where: str | Place = "",
        hint: str = "",
        *,
        key: str = "",
        values: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__(code, what)
        self.code, self.what, self.where, self.hint, self.values = (
            code,
            what,
            str(where),
            hint,
            values or {},
        )
        self.place = where if isinstance(where, Place) else None
        self.key = key or (self.place.path if self.place else _key_in(self.where))

    def __str__(self) -> str:
        lines = [f"error: {self.what}"]
        if self.where:
            lines.append(f"  --> {self.where}")
        if self.hint:
            lines.append(f"hint: {self.hint}")
        return "\n".join(lines)


def _key_in(where: str) -> str:
    """What a place names: the flag of `--slo ttft`, `--set limit` of `--set limit=cpu_share:5%`, the keys of
    `capacity.json (rate_per_s)`; "" without any.
    """
    if where.startswith("--set "):
        return where.partition("=")[0]
    if where.startswith("--"):
        return where.split(maxsplit=1)[0].rstrip(",")
    return (
        where.rpartition(" (")[2].removesuffix(")") if where.endswith(")") and " (" in where else ""
    )


class UserError(LoadgenError):
    """Wrong usage, a wrong workload file, a wrong flag: exit 2."""


class TargetError(LoadgenError):
    """The endpoint cannot be reached, refuses requests, or is not of the requested kind: exit 3."""

    exit_code = UNSOUND


class CombinedError(Exception):
    """Several faults of one check, shown together, so that the user can correct all before the next run."""

    def __init__(self, faults: Sequence[LoadgenError]) -> None:
        super().__init__(f"{len(faults)} faults")
        self.faults = tuple(faults)

    @property
    def exit_code(self) -> int:
        return max(fault.exit_code for fault in self.faults)

    def __str__(self) -> str:
        return "\n".join(str(fault) for fault in self.faults)


def nothing_there(path: object, hint: str, what: str = "no such folder") -> UserError:
    """The fault where a result is asked for and none is at its path: a URL (its Path lacks one /) is told as one, and
    so is a file.
    """
    code: Code = "missing_file"
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*:/", str(path)):
        code, what = "invalid_value", "this is a URL; a result is a folder or file of this machine"
        hint = "a server is measured first: loadgen search (or run, sweep) --url URL; then give the folder of that"
    elif isfile(str(path)):
        code, what = "wrong_format", "a file, not a folder"
        hint += f"; of a bundle: unzip {path}, then give result"
    return UserError(code, what, str(path), hint)


def codes(raised: LoadgenError | CombinedError) -> tuple[Code, ...]:
    """The codes of all that was raised, each once."""
    faults = raised.faults if isinstance(raised, CombinedError) else (raised,)
    return tuple(dict.fromkeys(fault.code for fault in faults))


@contextmanager
def collecting(faults: list[LoadgenError]) -> Iterator[None]:
    """Add what is raised inside to `faults`, so that the checks after it are made too."""
    try:
        yield
    except CombinedError as several:
        faults += several.faults
    except LoadgenError as fault:
        faults.append(fault)


def of_reading(error: Exception, content: Code = "damaged_file") -> Code:
    """The code for a file that could not be read; `content`: where it could, and holds something else."""
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return "missing_file"
    if isinstance(error, OSError):
        return "unreadable_file"
    return "wrong_encoding" if isinstance(error, UnicodeDecodeError) else content


def not_installed(what: str, package: str, where: str, extra: str) -> UserError:
    """The fault where a package is missing that an extra of loadgen brings."""
    return UserError("not_installed", what, where, f"pip install 'loadgen[{extra}]'", key=package)


FAULTS_SHOWN = 20  # of one file


def enough(faults: list[LoadgenError], file: str) -> bool:
    """Whether to check no more of a file: FAULTS_SHOWN faults are there, and now a last one that says so."""
    if len(faults) < FAULTS_SHOWN:
        return False
    faults.append(UserError("more_faults", f"checking stopped after {FAULTS_SHOWN} faults", file))
    return True


def did_you_mean(word: str, known: Sequence[str], synonyms: Mapping[str, str] | None = None) -> str:
    """The hint for a word that is not in `known`: the closest known word, if one is similar, and the list of all."""
    similar = closest(word, known, synonyms)
    suggestion = f'did you mean "{similar}"? ' if similar else ""
    return f"{suggestion}known: {', '.join(known)}"


def closest(
    word: str, known: Sequence[str], synonyms: Mapping[str, str] | None = None, cutoff: float = 0.6
) -> str:
    """The known word that is probably meant, at least `cutoff` of it the same; "" when none is similar."""
    import difflib

    return (synonyms or {}).get(word) or next(
        iter(difflib.get_close_matches(word, known, 1, cutoff)), ""
    )
