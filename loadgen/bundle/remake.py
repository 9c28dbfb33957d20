"""Makes every derived file of a result folder again, from what was kept in it. Reads files, writes none.

Kept are the records, `run.json`, the contract and its prices, the requests of each
trial. Derived is what follows from them: `summary.json`, `verdict.json`, pages, log files, the answer of a search.
Which files these are, and how they are made, each kind of result says (`result_kinds`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from msgspec.structs import replace

from loadgen import result_kinds
from loadgen.core.errors import CombinedError, UserError
from loadgen.core.results import checksums
from loadgen.result_kinds import RegeneratedFile, ResultKind

RECORD_FOLDERS = {"requests", "gaps", "flows", "spool"}


def kind_of(folder: Path) -> ResultKind:
    """What a folder holds. Raises UserError where it is no result of which anything could be made again."""
    kind = result_kinds.kind_of(folder, "regenerate")
    if kind is None and (other := result_kinds.kind_of(folder)) is not None and other.markers:
        hint = "bundle the results that it rests on"
        raise UserError(
            "unsupported", f"nothing here could be made again: {other.name}", str(folder), hint
        )
    if kind is None:
        raise result_kinds.no_result(folder)
    return kind


def is_kept(file: PurePosixPath) -> bool:
    """Whether a file is one of those from which the others are made."""
    named = {checksums.FILE}.union(*(kind.kept for kind in result_kinds.KINDS.rows()))
    return file.name in named or file.parent.name in RECORD_FOLDERS


def is_text(file: Path) -> bool:
    """Whether a file holds texts of prompts or answers."""
    return any(file.name in kind.texts for kind in result_kinds.KINDS.rows())


def is_page(file: Path) -> bool:
    """Whether a file is a page that only `loadgen report` makes, and not the command that made the result."""
    if file.name != result_kinds.PAGE:
        return False
    kind = result_kinds.kind_of(file.parent)
    return kind is None or not kind.leaves_page


def remade(folder: Path) -> Iterator[RegeneratedFile]:
    """Every derived file of the folder, the runs in it first, what is made of other results after them."""
    kinds = [kind for kind in result_kinds.KINDS.rows() if kind.markers]
    kinds.reverse()
    kinds.sort(key=lambda kind: kind.name != "run")
    for kind in kinds:
        for file in sorted(folder.rglob(kind.markers[0])):
            if not result_kinds.fits(kind, file.parent):
                continue
            inside = file.parent.relative_to(folder)
            try:
                for made in result_kinds.regenerated_files(kind, file.parent):
                    yield replace(made, name=(inside / made.name).as_posix())
            except CombinedError as error:
                why = "; ".join(fault.what for fault in error.faults)
                yield RegeneratedFile((inside / file.name).as_posix(), None, why, damaged=True)
            except (
                Exception
            ) as error:  # files of somebody else: what a damaged one raises nobody can list
                why = (str(error) or type(error).__name__).splitlines()[0]
                yield RegeneratedFile((inside / file.name).as_posix(), None, why, damaged=True)
