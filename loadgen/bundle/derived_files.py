"""Regenerate every derived file of a result directory from its raw data, without writing any.

Raw data are the records, `run.json`, the contract and its prices, and the requests of each trial.
Derived is what follows from them: `summary.json`, `verdict.json`, pages, log files, the result of
a search. Each kind of result says which files these are, and how they are made (`result_kinds`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from msgspec.structs import replace

from loadgen import result_kinds
from loadgen.core.errors import CombinedError, UserError
from loadgen.core.results import checksums
from loadgen.result_kinds import RegeneratedFile, ResultKind

RECORD_FOLDERS = {"requests", "gaps", "flows", "spool"}


def find_bundled_kind(folder: Path) -> ResultKind:
    """Return the kind of the result in a directory that a user wants to bundle.

    A bundle lets its receiver compute every derived file again and compare. The kind must therefore
    have a function that regenerates its files.

    Raises:
        UserError: The directory has no result, or its kind cannot regenerate files.
    """
    kind = result_kinds.kind_of(folder, "regenerate")
    if kind is not None:
        return kind

    unsupported_kind = result_kinds.kind_of(folder)

    # Markers are files by which loadgen recognises a result that it wrote.
    if unsupported_kind is None or not unsupported_kind.markers:
        raise result_kinds.no_result(folder)

    raise UserError(
        "unsupported",
        f"a result that cannot be recomputed from raw data: {unsupported_kind.name}",
        str(folder),
        "bundle the results that it is based on",
    )


def is_raw(file: PurePosixPath) -> bool:
    """Return True if a file is raw data, from which others are derived."""
    if file.name == checksums.FILE or file.parent.name in RECORD_FOLDERS:
        return True
    return any(_matches(file.name, kind.source_files) for kind in result_kinds.KINDS.rows())


def has_texts(file: Path) -> bool:
    """Return True if a file holds texts of prompts or responses."""
    return any(_matches(file.name, kind.texts) for kind in result_kinds.KINDS.rows())


def _matches(name: str, patterns: Sequence[str]) -> bool:
    """Return True if a file name fits one of the patterns, which are names or have wildcards."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def is_page(file: Path) -> bool:
    """Return True if a file is a page that only `loadgen report` makes.

    Pages that the command itself left are part of the result.
    """
    if file.name != result_kinds.PAGE:
        return False
    kind = result_kinds.kind_of(file.parent)
    return kind is None or not kind.leaves_page


def regenerate(folder: Path) -> Iterator[RegeneratedFile]:
    """Yield every derived file of all results in a folder, computed again from raw data.

    Results are nested: the folder of a sweep contains those of its runs. Runs come first, and the
    results that were computed from other ones come last. A file that cannot be regenerated is
    yielded as damaged, with the reason.
    """
    for kind in _kinds_in_order():
        for marker_file in _find_results(kind, folder):
            yield from _regenerate_result(kind, marker_file, folder)


def _find_results(kind: ResultKind, folder: Path) -> list[Path]:
    """Return the marker files of all results of a kind in a folder and below, sorted by path.

    A marker is a file by which a result of the kind is recognised, such as `run.json` of a run.
    Only the first marker of a kind is looked for, so that no result is listed twice.
    """
    marker_name = kind.markers[0]
    candidates = sorted(folder.rglob(marker_name))
    return [file for file in candidates if result_kinds.fits(kind, file.parent)]


def _regenerate_result(
    kind: ResultKind, marker_file: Path, folder: Path
) -> Iterator[RegeneratedFile]:
    """Yield the derived files of one result, with names relative to the outer folder."""
    result_folder = marker_file.parent
    prefix = result_folder.relative_to(folder)
    try:
        for file in result_kinds.regenerated_files(kind, result_folder):
            yield replace(file, name=(prefix / file.name).as_posix())
    except CombinedError as error:
        reasons = [single_error.message for single_error in error.errors]
        yield _damaged(prefix / marker_file.name, "; ".join(reasons))
    except Exception as error:
        # The files may be somebody else's, and damaged ones can raise anything.
        yield _damaged(prefix / marker_file.name, _first_line(error))


def _first_line(error: Exception) -> str:
    """Return the first line of the message of an error, or its type if it has no message."""
    message = str(error) or type(error).__name__
    return message.splitlines()[0]


def _kinds_in_order() -> list[ResultKind]:
    """Return the kinds with a marker: runs first, and then the others from last to first.

    Other results are computed from runs, and the table lists a kind before those that it contains.
    """
    kinds = [kind for kind in reversed(list(result_kinds.KINDS.rows())) if kind.markers]
    return sorted(kinds, key=lambda kind: kind.name != "run")


def _damaged(name: Path, reason: str) -> RegeneratedFile:
    """Return a file without content, which cannot be regenerated for the given reason."""
    return RegeneratedFile(name.as_posix(), data=None, basis=reason, damaged=True)
