"""Errors that a user can cause or meet, their hints, and the exit codes of commands."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from os.path import isfile
from typing import Literal, NamedTuple

from loadgen_sdk.errors import Code as SdkCode

OK = 0  # done, SLO met
SLO_MISSED = 1  # a valid run that missed its SLO, or a comparison that failed
USAGE = 2  # wrong flags or workload
UNSOUND = 3  # target unreachable, or the measurement is not valid
INCONCLUSIVE = 4  # a valid measurement that cannot answer the question
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
    "wrong_platform",  # This operating system is not supported.
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
"""What is wrong, for programs.

docs/reference/errors.md is generated from this table and from that of the SDK.
"""


class Place(NamedTuple):
    """A position in a file, counted from 1, with the path of keys to it ("" at the top)."""

    file: str
    line: int
    column: int
    path: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}" + (f" ({self.path})" if self.path else "")


class LoadgenError(Exception):
    """An error of the user or of a target, which a command prints without a traceback.

    Attributes:
        code: What is wrong, for programs.
        message: What is wrong, for people.
        where: Where it is: file:line:column, an option or a URL.
        hint: What to do.
        key: Which setting or thing it is about, for programs: an option, a path of keys in a file,
            or a package.
        values: Further values for programs.
        place: The position in a file that was parsed, or None.
    """

    exit_code = USAGE

    def __init__(
        self,
        code: Code,
        message: str,
        where: str | Place = "",
        hint: str = "",
        *,
        key: str = "",
        values: Mapping[str, object] | None = None,
    ) -> None:
        """Create an error. The attributes of the class have the same names as the arguments.

        Args:
            code: What is wrong, for programs.
            message: What is wrong, for people.
            where: Where it is, as a position in a file or as a text.
            hint: What to do.
            key: Which setting or thing it is about. By default it is taken from `where`: the path
                of keys in the file, or the option.
            values: Further values for programs.
        """
        super().__init__(code, message)
        self.code = code
        self.message = message
        self.where = str(where)
        self.hint = hint
        self.values = values or {}
        self.place = where if isinstance(where, Place) else None
        key_in_where = _find_key(self.where) if self.place is None else self.place.path
        self.key = key or key_in_where

    def __str__(self) -> str:
        lines = [f"error: {self.message}"]
        if self.where:
            lines.append(f"  --> {self.where}")
        if self.hint:
            lines.append(f"hint: {self.hint}")
        return "\n".join(lines)


def _find_key(where: str) -> str:
    """Return the option or the key of a file that the place of an error names, or "".

    Examples of `where` and the result:

        --slo ttft                       --slo
        --targets, --url                 --targets
        --set limit=cpu_share:5%         --set limit
        capacity.json (rate_per_s)       rate_per_s
        http://127.0.0.1:8000            ""
    """
    if where.startswith("--set "):
        return where.partition("=")[0]
    if where.startswith("--"):
        first_word = where.split(maxsplit=1)[0]
        return first_word.rstrip(",")
    key_of_file = re.fullmatch(r".* \((?P<key>.*)\)", where)
    return "" if key_of_file is None else key_of_file["key"]


class UserError(LoadgenError):
    """An error in an option or a file of the user. The command exits with 2."""


class TargetError(LoadgenError):
    """A target that cannot be reached or refuses requests. The command exits with 3."""

    exit_code = UNSOUND


class CombinedError(Exception):
    """Several errors of one check, so that the user can correct all of them at once."""

    def __init__(self, errors: Sequence[LoadgenError]) -> None:
        super().__init__(f"{len(errors)} errors")
        self.errors = tuple(errors)

    @property
    def exit_code(self) -> int:
        """Return the largest exit code of the errors."""
        return max(error.exit_code for error in self.errors)

    def __str__(self) -> str:
        return "\n".join(str(error) for error in self.errors)


def missing_result(path: object, hint: str, message: str = "no such folder") -> UserError:
    """Return the error for a path that is not the folder of a result.

    Args:
        path: What the user specified: a URL, a file, or a path at which nothing exists. The file
            may be a bundle, which is a ZIP archive of results.
        hint: What the user can do to give the right folder. It is not used for a URL.
        message: The message if nothing exists at the path.
    """
    path_text = str(path)
    if _is_url(path_text):
        return UserError(
            "invalid_value",
            message="must be a folder with results, not a URL",
            where=path_text,
            hint=(
                "measure the server first with loadgen search (or run, sweep) --url URL, "
                "then give the folder with the results"
            ),
        )

    if isfile(path_text):
        return UserError(
            "wrong_format",
            message="must be a folder, not a file",
            where=path_text,
            hint=f"{hint}; a bundle has to be extracted first: unzip {path}",
        )

    return UserError("missing_file", message=message, where=path_text, hint=hint)


def _is_url(text: str) -> bool:
    """Return True for a URL, also after a conversion to Path, which makes `http:/host` of it."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*:/", text) is not None


def codes(error: LoadgenError | CombinedError) -> tuple[Code, ...]:
    """Return the distinct codes of one or several errors."""
    errors = error.errors if isinstance(error, CombinedError) else (error,)
    return tuple(dict.fromkeys(single.code for single in errors))


@contextmanager
def collecting(errors: list[LoadgenError]) -> Iterator[None]:
    """Add an error that is raised inside to `errors`, so that later checks are made too."""
    try:
        yield
    except CombinedError as combined:
        errors += combined.errors
    except LoadgenError as error:
        errors.append(error)


def of_reading(error: Exception, content: Code = "damaged_file") -> Code:
    """Return the error code for an exception that was raised while a file was read and parsed.

    Args:
        error: The exception.
        content: The code for a file that could be read, but has other content than expected.
    """
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return "missing_file"
    if isinstance(error, OSError):
        return "unreadable_file"
    return "wrong_encoding" if isinstance(error, UnicodeDecodeError) else content


def not_installed(message: str, package: str, where: str, extra: str) -> UserError:
    """Return the error for a missing package that an extra of loadgen installs."""
    return UserError(
        "not_installed", message, where, f"pip install 'loadgen[{extra}]'", key=package
    )


MAX_ERRORS = 20
"""The number of errors of one file that are listed."""


def has_too_many(errors: list[LoadgenError], file: str) -> bool:
    """Return True if a file has so many errors that it is not checked further.

    An error that states this is added to `errors`.
    """
    if len(errors) < MAX_ERRORS:
        return False
    errors.append(UserError("more_faults", f"only the first {MAX_ERRORS} errors are shown", file))
    return True


def did_you_mean(word: str, known: Sequence[str], synonyms: Mapping[str, str] | None = None) -> str:
    """Return the hint for an unknown word: the most similar known word, and all known words."""
    similar = closest(word, known, synonyms)
    suggestion = f'did you mean "{similar}"? ' if similar else ""
    return f"{suggestion}known: {', '.join(known)}"


def closest(
    word: str, known: Sequence[str], synonyms: Mapping[str, str] | None = None, cutoff: float = 0.6
) -> str:
    """Return the known word that is probably meant, or "" if none is similar enough.

    Args:
        word: The unknown word.
        known: The known words.
        synonyms: Known words by other spellings, which are always accepted.
        cutoff: The smallest similarity, from 0 to 1.
    """
    import difflib  # Only needed for errors.

    synonym = (synonyms or {}).get(word)
    if synonym:
        return synonym
    matches = difflib.get_close_matches(word, known, 1, cutoff)
    return matches[0] if matches else ""
