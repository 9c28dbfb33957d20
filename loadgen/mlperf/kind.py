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

    If the directory has a run, the complete report is that of the run, to which `extra_sections.py`
    adds the sections of the MLPerf-style result. Its default output, the brief one, is replaced by
    that of the MLPerf-style result. Without a run, the report has the sections of the result only.
    """
    if stored.run is None:
        return text.create_report(stored.result, run_dir=str(stored.folder))
    gpus = stored.run.summary.target.gpus
    brief_sections = text.brief_sections(stored.result, gpus, run_dir=str(stored.folder))
    run_report = run_kind.report(stored.run)
    return msgspec.structs.replace(run_report, brief=brief_sections)


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
    """Return the capacity facts of a result, of which only `is_offline` is known here.

    The rate of an Offline run is no capacity under an SLO, because Offline has no limits on
    latency. The summary of the run does not show that it is Offline: such a run looks like one with
    virtual users in a closed loop. Lists of results call this function often, so only the scenario
    is decoded.

    Raises UserError if the result is damaged.
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

    A directory with a result is one of these:

    1. A run of this program: the files are computed from its records.
    2. The queries of the official LoadGen: they are computed from their stored times.
    3. A search for the peak: its files equal those of the run that confirmed the peak.
    4. A run of the official LoadGen: only `mlperf.json` can be computed, from the queries in its
       subdirectory `own`.
    5. None of them: nothing can be computed again.
    """
    if run_folder.is_run(folder):
        files = mlperf_run.recompute_files(folder, run_folder.read_summary(folder))
        for name, content in files.items():
            yield RegeneratedFile(name, content, RECORDS)
        return
    if (folder / mlperf_run.QUERIES).is_file():
        for name, content in mlperf_run.recompute_files_from_queries(folder).items():
            yield RegeneratedFile(name, content, QUERIES_SOURCE)
        return
    source_dir = _find_equal_result(folder)
    if source_dir is None:
        reason = "there are no records, because the official LoadGen issued the queries"
        yield RegeneratedFile(mlperf_run.RESULT, None, reason)
    elif (source_dir / mlperf_run.QUERIES).is_file():
        yield from _regenerate_official_result(source_dir)
    else:
        for name in mlperf_run.FILES:
            content = (source_dir / name).read_bytes()
            yield RegeneratedFile(name, content, f"the result of {source_dir.name}")


def _find_equal_result(folder: Path) -> Path | None:
    """Return the subdirectory with the same result: the confirmation of a search, or `own/`."""
    stored = (folder / mlperf_run.RESULT).read_bytes()
    for path in sorted(folder.glob(f"*/{mlperf_run.RESULT}")):
        if path.read_bytes() == stored:
            return path.parent
    return None


def _regenerate_official_result(queries_dir: Path) -> Iterator[RegeneratedFile]:
    """Yield `mlperf.json` of a run of the official LoadGen, and why its logs cannot be recomputed.

    `queries_dir` is the subdirectory with the stored times of the queries.
    """
    files = mlperf_run.recompute_files_from_queries(queries_dir)
    yield RegeneratedFile(mlperf_run.RESULT, files[mlperf_run.RESULT], QUERIES_SOURCE)
    reason = "the official LoadGen wrote it, and does not store its timestamps"
    for name in mlperf_run.FILES:
        if name != mlperf_run.RESULT:
            yield RegeneratedFile(name, None, reason)


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
