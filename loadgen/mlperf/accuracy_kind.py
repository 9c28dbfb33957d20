"""The kind of a result of MLPerf's accuracy mode."""

from __future__ import annotations

from pathlib import Path

from loadgen.core import format
from loadgen.core.results.json_files import decode_json
from loadgen.mlperf import accuracy_text
from loadgen.mlperf.accuracy import AccuracyResult
from loadgen.mlperf.accuracy_run import RESULT_FILE
from loadgen.result_kinds import ListRow, ResultFunctions


def load(folder: Path) -> AccuracyResult:
    """Return the stored result. Raises UserError if it cannot be read."""
    path = folder / RESULT_FILE
    return decode_json(
        path.read_bytes(), AccuracyResult, str(path), "a result of `loadgen mlperf accuracy`"
    )


def code(result: AccuracyResult, strict: bool) -> int:
    """Return the exit code of `loadgen report`, which `--strict` does not change."""
    del strict
    return int(result.exit_code)


def list_row(folder: Path) -> ListRow:
    """Return the row of `loadgen ls`."""
    result = load(folder)
    return ListRow(
        outcome=accuracy_text.describe_outcome(result),
        description=f"{result.benchmark} accuracy · {result.model}",
        target=result.url,
        simulated=result.simulated,
    )


FUNCTIONS = ResultFunctions(
    load=load,
    code=code,
    list_row=list_row,
    schema=AccuracyResult,
    headline=accuracy_text.describe_result,
    report=accuracy_text.create_report,
    document=format.document,
)
