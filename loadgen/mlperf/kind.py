"""The kind of an MLPerf-style result.

It is in the directory of its run or of a search for the peak. If the official LoadGen issued the
queries, it is alone in its directory.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from loadgen import result_kinds
from loadgen.core import format, run_folder
from loadgen.core.errors import UserError
from loadgen.mlperf import run as mlperf_run
from loadgen.mlperf import text
from loadgen.mlperf.result import MlperfResult
from loadgen.render.section import Report
from loadgen.result_kinds import RECORDS, CapacityFacts, ListRow, RegeneratedFile, ResultFunctions
from loadgen.runs import kind as run_kind
from loadgen.runs.comparison_side import Side

QUERIES_SOURCE = "the queries of the official LoadGen, by the timestamps of this load generator"


class StoredMlperf(NamedTuple):
    """A result with its run. The run is None if the official LoadGen issued the queries."""

    folder: Path
    result: MlperfResult
    run: run_kind.StoredRun | None


def load(folder: Path) -> StoredMlperf:
    """Return the stored result. Raises UserError if it cannot be read."""
    run = run_kind.load(folder) if run_folder.is_run(folder) else None
    return StoredMlperf(folder, mlperf_run.read_result(folder), run)


def headline(stored: StoredMlperf) -> str:
    """Return the verdict in one sentence."""
    return text.describe_verdict(stored.result)


def report(stored: StoredMlperf) -> Report:
    """Return the report that `loadgen report` prints for a directory with an MLPerf-style result.

    A report has brief sections, which are printed by default, and full sections for `--full`. If
    the official LoadGen issued the queries, there is no run of this program, and the report is only
    about the result. Otherwise it is the report of the run, whose brief sections are replaced by
    those of the result. Its full sections need no change: `extra_sections.py` already adds the
    MLPerf-style result to them for every run that has one.
    """
    result = stored.result
    result_dir = str(stored.folder)
    if stored.run is None:
        return text.create_report(result, run_dir=result_dir)

    run_report = run_kind.report(stored.run)
    gpus = stored.run.summary.target.gpus
    mlperf_brief_sections = text.brief_sections(result, gpus, run_dir=result_dir)

    return msgspec.structs.replace(run_report, brief=mlperf_brief_sections)


def document(stored: StoredMlperf) -> bytes:
    """Return the summary of the run, or the result without a run, as JSON."""
    if stored.run is None:
        return format.document(stored.result)
    return run_kind.document(stored.run)


def code(stored: StoredMlperf, strict: bool) -> int:
    """Return the exit code of `loadgen report`."""
    if stored.run is None:
        return int(stored.result.exit_code)
    return run_kind.code(stored.run, strict)


def runs(folder: Path) -> list[Path]:
    """Return the directory of the run, if there is one."""
    return [folder] if run_folder.is_run(folder) else []


def list_row(folder: Path) -> ListRow:
    """Return the row of a result in the list of `loadgen ls`: that of its run, if it has one."""
    if run_folder.is_run(folder):
        return run_kind.list_row(folder)

    result = mlperf_run.read_result(folder)
    return ListRow(
        outcome="VALID" if result.valid else "INVALID",
        description=f"{result.benchmark} {result.scenario}",
        simulated=result.simulated,
    )


def compare_side(folder: Path) -> Side:
    """Return the run for a comparison. The log of the official LoadGen is one of another tool."""
    if run_folder.is_run(folder):
        return run_kind.compare_side(folder)
    return result_kinds.compare_side(result_kinds.named("other tool"), folder)


class _ScenarioField(msgspec.Struct):
    """The only field of `mlperf.json` that `read_capacity_facts` needs.

    Other fields of the file are skipped when it is decoded, which is faster.
    """

    scenario: str = ""


def read_capacity_facts(folder: Path) -> CapacityFacts:
    """Return the facts that decide whether the rate of a result is a capacity.

    A capacity is the highest rate within limits on latency. The Offline scenario has no such
    limits, so its rate must not be listed as a capacity. `loadgen ls` calls this function for each
    result, so it decodes only the scenario.

    Raises UserError if the result is damaged. JSON that is nested too deeply counts as damaged,
    too: decoding it raises RecursionError.
    """
    result_path = folder / mlperf_run.RESULT
    try:
        stored = msgspec.json.decode(result_path.read_bytes(), type=_ScenarioField)
    except (ValueError, RecursionError) as error:
        raise UserError(
            "damaged_file",
            f"a damaged result: {error}",
            str(result_path),
            "run loadgen mlperf again",
        ) from None

    return CapacityFacts(is_offline=stored.scenario == "offline")


def regenerate(folder: Path) -> Iterator[RegeneratedFile]:
    """Yield the files of a result, computed again from stored data, for `loadgen verify`.

    The data depend on what the directory contains: the records of a run, the queries of the
    official LoadGen, or a subdirectory with the same result.
    """
    if run_folder.is_run(folder):
        yield from _regenerate_from_records(folder)
    elif _has_stored_queries(folder):
        yield from _regenerate_from_queries(folder)
    else:
        yield from _regenerate_from_subdirectory(folder)


def _regenerate_from_records(run_dir: Path) -> Iterator[RegeneratedFile]:
    """Yield the files of a run of this program, computed from its request records."""
    files = mlperf_run.recompute_files(run_dir, run_folder.read_summary(run_dir))
    for name, content in files.items():
        yield RegeneratedFile(name, content, basis=RECORDS)


def _has_stored_queries(folder: Path) -> bool:
    return (folder / mlperf_run.QUERIES).is_file()


def _regenerate_from_queries(queries_dir: Path) -> Iterator[RegeneratedFile]:
    """Yield the files that this program wrote about the queries of the official LoadGen."""
    for name, content in mlperf_run.recompute_files_from_queries(queries_dir).items():
        yield RegeneratedFile(name, content, basis=QUERIES_SOURCE)


def _regenerate_from_subdirectory(folder: Path) -> Iterator[RegeneratedFile]:
    """Yield the files of a directory whose `mlperf.json` was copied from one of its subdirectories.

    There are two such directories. In that of a run of the official LoadGen, the subdirectory `own`
    has the queries, from which the result is computed again. In that of a search for the peak, the
    subdirectory is the run that confirmed the peak, and its files are the expected content.

    Each file comes with its basis: what its content was computed from, or why there is none.
    """
    source_dir = _find_subdirectory_with_same_result(folder)
    if source_dir is None:
        reason = "there are no records, because the official LoadGen issued the queries"
        yield RegeneratedFile(mlperf_run.RESULT, data=None, basis=reason)
        return

    is_from_official_loadgen = _has_stored_queries(source_dir)
    if is_from_official_loadgen:
        yield from _regenerate_official_result(source_dir)
    else:
        yield from _read_result_files(source_dir)


def _read_result_files(run_dir: Path) -> Iterator[RegeneratedFile]:
    """Yield the files of the result in the directory of a run, as they are stored there."""
    for name in mlperf_run.FILES:
        content = (run_dir / name).read_bytes()
        yield RegeneratedFile(name, content, basis=f"the result of {run_dir.name}")


def _find_subdirectory_with_same_result(folder: Path) -> Path | None:
    """Return the first subdirectory whose `mlperf.json` is the same, or None if there is none."""
    stored_result = (folder / mlperf_run.RESULT).read_bytes()
    for path in sorted(folder.glob(f"*/{mlperf_run.RESULT}")):
        if path.read_bytes() == stored_result:
            return path.parent
    return None


def _regenerate_official_result(queries_dir: Path) -> Iterator[RegeneratedFile]:
    """Yield the files in the directory of a run of the official LoadGen.

    `mlperf.json` is computed from the queries that this program stored in a subdirectory. The two
    logs have no content, but a reason: the official LoadGen wrote them by timestamps of its own,
    which are not stored.
    """
    files = mlperf_run.recompute_files_from_queries(queries_dir)
    yield RegeneratedFile(mlperf_run.RESULT, files[mlperf_run.RESULT], basis=QUERIES_SOURCE)
    missing_reason = "the official LoadGen wrote it, and does not store its timestamps"
    for name in mlperf_run.LOG_FILES:
        yield RegeneratedFile(name, data=None, basis=missing_reason)


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
    capacity=read_capacity_facts,
)
