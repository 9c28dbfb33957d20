"""An MLPerf-style result: in the folder of its run, of a search for a peak, or alone (by the official LoadGen)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from loadgen import result_kinds
from loadgen.core import format, run_folder
from loadgen.core.errors import UserError
from loadgen.mlperf import run as mlperf
from loadgen.mlperf import text as words
from loadgen.mlperf.result import MlperfResult
from loadgen.render.section import Report
from loadgen.result_kinds import RECORDS, CapacityFacts, ListRow, RegeneratedFile, ResultFunctions
from loadgen.runs import kind as of_run
from loadgen.runs.comparison_side import Side

QUERIES = "the queries of the official LoadGen, by our stamps"


class StoredMlperf(NamedTuple):
    """The result, and the run that it is of; None: the official LoadGen has issued its queries."""

    result: MlperfResult
    run: of_run.StoredRun | None


def load(folder: Path) -> StoredMlperf:
    return StoredMlperf(
        mlperf.read(folder), of_run.load(folder) if run_folder.is_run(folder) else None
    )


def headline(found: StoredMlperf) -> str:
    return words.sentence(found.result)


def report(found: StoredMlperf) -> Report:
    return words.report(found.result) if found.run is None else of_run.report(found.run)


def document(found: StoredMlperf) -> bytes:
    return format.document(found.result) if found.run is None else of_run.document(found.run)


def code(found: StoredMlperf, strict: bool) -> int:
    return int(found.result.exit_code) if found.run is None else of_run.code(found.run, strict)


def runs(folder: Path) -> list[Path]:
    return [folder] if run_folder.is_run(folder) else []


def list_row(folder: Path) -> ListRow:
    if run_folder.is_run(folder):
        return of_run.list_row(folder)
    result = mlperf.read(folder)
    about = f"{result.benchmark} {result.scenario}"
    word = "VALID" if result.valid else "INVALID"
    return ListRow(outcome=word, description=about, simulated=result.simulated)


def compare_side(folder: Path) -> Side:
    if run_folder.is_run(folder):
        return of_run.compare_side(folder)
    # A log of the official LoadGen is the result of another tool.
    return result_kinds.compare_side(result_kinds.named("other tool"), folder)


class _Scenario(msgspec.Struct):
    scenario: str = ""


def capacity_facts(folder: Path) -> CapacityFacts:
    """Whether this is Offline: over HTTP its query goes by lanes, which the summary does not tell from a closed loop.

    Reads this one field. Raises UserError for a damaged file.
    """
    file = folder / mlperf.RESULT
    try:
        return CapacityFacts(
            is_offline=msgspec.json.decode(file.read_bytes(), type=_Scenario).scenario == "offline"
        )
    except (ValueError, RecursionError) as error:
        raise UserError(
            "damaged_file", f"a damaged result: {error}", str(file), "loadgen mlperf writes it"
        ) from None


def regenerate(folder: Path) -> Iterator[RegeneratedFile]:
    if run_folder.is_run(folder):
        for name, data in mlperf.outputs_again(folder, run_folder.kept_summary(folder)).items():
            yield RegeneratedFile(name, data, RECORDS)
        return
    if (folder / mlperf.QUERIES).is_file():
        for name, data in mlperf.outputs_of_queries(folder).items():
            yield RegeneratedFile(name, data, QUERIES)
        return
    stored = (folder / mlperf.RESULT).read_bytes()
    same = [
        file for file in sorted(folder.glob(f"*/{mlperf.RESULT}")) if file.read_bytes() == stored
    ]
    if (
        not same
    ):  # the queries of the official LoadGen, or a result that is not that of one of its runs
        yield RegeneratedFile(
            mlperf.RESULT,
            None,
            "there are no records of it: the official LoadGen has issued the queries",
        )
        return
    if (
        same[0].parent / mlperf.QUERIES
    ).is_file():  # the logs beside it are by LoadGen's own stamps
        again = mlperf.outputs_of_queries(same[0].parent)
        yield RegeneratedFile(mlperf.RESULT, again[mlperf.RESULT], QUERIES)
        for name in mlperf.FILES[1:]:
            yield RegeneratedFile(
                name, None, "the official LoadGen has written it, by stamps that it does not keep"
            )
        return
    for name in mlperf.FILES:
        yield RegeneratedFile(
            name, (same[0].parent / name).read_bytes(), f"the result of {same[0].parent.name}"
        )


FUNCTIONS = ResultFunctions(
    load=load,
    headline=headline,
    report=report,
    document=document,
    code=code,
    runs=runs,
    list_row=list_row,
    compare_side=compare_side,
    regenerate=regenerate,
    schema=MlperfResult,
    capacity=capacity_facts,
)
