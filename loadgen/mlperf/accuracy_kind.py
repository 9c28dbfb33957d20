"""A result of MLPerf's accuracy mode."""

from __future__ import annotations

from pathlib import Path

from loadgen.core import format
from loadgen.core.results.json_files import decode_json
from loadgen.mlperf import accuracy_text as words
from loadgen.mlperf.accuracy import AccuracyResult
from loadgen.mlperf.accuracy_run import FILE
from loadgen.result_kinds import ListRow, ResultFunctions


def load(folder: Path) -> AccuracyResult:
    file = folder / FILE
    return decode_json(
        file.read_bytes(), AccuracyResult, str(file), "a result of `loadgen mlperf accuracy`"
    )


def code(result: AccuracyResult, strict: bool) -> int:
    return int(result.exit_code)


def list_row(folder: Path) -> ListRow:
    result = load(folder)
    return ListRow(
        outcome=words.word(result),
        description=f"{result.benchmark} accuracy · {result.model}",
        target=result.url,
        simulated=result.simulated,
    )


FUNCTIONS = ResultFunctions(
    load=load,
    code=code,
    list_row=list_row,
    schema=AccuracyResult,
    headline=words.headline,
    report=words.report,
    document=format.document,
)
