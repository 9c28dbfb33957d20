"""A size: how many machines a need takes, as it was answered."""

from __future__ import annotations

from pathlib import Path

from loadgen.core import format
from loadgen.cost import size_result
from loadgen.cost import size_text as said
from loadgen.cost.size_result import Sizing
from loadgen.result_kinds import ListRow, ResultFunctions


def load(folder: Path) -> Sizing:
    file = folder / size_result.FILE
    return size_result.load(file.read_bytes(), str(file))


def list_row(folder: Path) -> ListRow:
    found = load(folder)
    return ListRow(
        word=said.word(found),
        about=f"{found.workload} · {said.load_words(found.need)}",
        target=", ".join(size.source.name for size in found.sizes),
        started=found.made,
        simulated=any(size.simulated for size in found.sizes),
    )


FUNCTIONS = ResultFunctions(
    load=load,
    list_row=list_row,
    schema=Sizing,
    headline=said.headline,
    report=said.report,
    document=format.document,
)
