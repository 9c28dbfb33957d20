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
    """Return the row that represents a result of `loadgen size` in the list of results."""
    sizing = load(folder)
    return ListRow(
        outcome=size_text.describe_outcome(sizing),
        description=f"{sizing.workload} · {size_text.describe_demand(sizing.demand)}",
        target=", ".join(size.source.name for size in sizing.sizes),
        started=sizing.created,
        simulated=any(size.is_simulated for size in sizing.sizes),
    )


FUNCTIONS = ResultFunctions(
    load=load,
    list_row=list_row,
    schema=Sizing,
    headline=size_text.create_headline,
    report=size_text.create_report,
    document=format.document,
)
