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
    # Options and values
    "no_effect",  # An option has no effect here; omit it, or add the option that it needs.
    "unordered",  # Numbers or times are not in ascending order.
    "too_large",  # There are more rows, bytes, load points or values than allowed.
    "too_few",  # There are too few requests, runs or results to answer the question.
    "unset_variable",  # An environment variable that is used in a file is not set.
    "secret",  # A value looks like a secret, which would be stored with the results.
    "more_faults",  # The file has more errors; only the first ones are listed.
    # Workloads
    "no_load",  # The command specifies no load, that is, no rate or concurrency.
    "endless",  # A load has no end, or a distribution has no upper bound.
    "no_slo",  # The workload has no SLO, so no request or task can be judged.
    "over_context",  # Most requests are longer than the context of the model.
    "cycle",  # Steps wait for each other, or one refers to itself.
    # Files and folders
    "missing_file",  # A file or folder does not exist.
    "file_exists",  # An existing file would be overwritten.
    "folder_in_use",  # Another command is writing to this folder.
    "empty_file",  # A file has no rows, targets or other content.
    "wrong_format",  # A file has another format than expected.
    "wrong_encoding",  # A file is not valid UTF-8 text.
    "invalid_syntax",  # A file is not valid YAML, JSON or CSV.
    "damaged_file",  # A file is truncated or damaged.
    "changed_file",  # A file was changed after it was written or checked.
    "unsafe_file",  # An archive or pickle could run code, so it is not opened.
    "newer_version",  # A file was written by a newer version of loadgen.
    "not_downloaded",  # A data set is not on this machine and could not be downloaded.
    # Results
    "no_result",  # The folder contains no result of the requested kind.
    "no_records",  # The result has a summary only; the records of its requests were not kept.
    "no_figure",  # The result lacks a metric that is needed.
    "unsound",  # The result is not a valid measurement.
    "ambiguous",  # Several results match where one is needed.
    "mismatch",  # Two things do not belong together, for example a result and a profile.
    "already_decided",  # More load would not change the verdict.
    "not_signed",  # There is no signature, or none could be made.
    # Prices
    "no_exchange_rate",  # A price is in another currency, and the file has no exchange rate.
    "sample_prices",  # The prices are sample prices, not an offer.
    "over_budget",  # The next run would cost more than --max-cost.
    # This host and its cluster
    "host_refused",  # The operating system refused access to a file or folder.
    "cannot_listen",  # The address to listen on is in use, or does not belong to this host.
    "unusable_source",  # The local address of `sources` cannot be used for sending.
    "no_cluster",  # No Ray cluster responds at the address.
    "cluster_in_use",  # Another command is using the cluster.
    "node_lost",  # No node of the cluster is left to send requests.
    "nodes_differ",  # The nodes have different versions of a file or package.
    "process_failed",  # A worker or the simulated server did not start, or ended before the load.
    # The target
    "targets_differ",  # The targets of a run do not serve the same model or API.
    "failed_check",  # A check before the load failed; `key` names it.
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
