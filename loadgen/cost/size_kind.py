"""The result kind `size`: how many machines a demand needs."""

from __future__ import annotations

from pathlib import Path

from loadgen.core import format
from loadgen.cost import size_text
from loadgen.cost.size_result import FILE, Sizing, load_sizing
from loadgen.result_kinds import ListRow, ResultFunctions


def load(folder: Path) -> Sizing:
    """Return the result in a folder."""
    file = folder / FILE
    return load_sizing(file.read_bytes(), str(file))


def list_row(folder: Path) -> ListRow:
    """Return the row of a result in the list of results."""
    sizing = load(folder)
    return ListRow(
        outcome=size_text.outcome(sizing),
        description=f"{sizing.workload} · {size_text.describe_need(sizing.need)}",
        target=", ".join(size.source.name for size in sizing.sizes),
        started=sizing.created,
        simulated=any(size.simulated for size in sizing.sizes),
    )


FUNCTIONS = ResultFunctions(
    load=load,
    list_row=list_row,
    schema=Sizing,
    headline=size_text.headline,
    report=size_text.report,
    document=format.document,
)
