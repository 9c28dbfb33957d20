"""Writes what `docs/summary.md` says of the figures of requests from their rows, and from nothing else.

Their lines in the table of the summary, and the table of where each is shown. `python tests/make_figures.py` writes
them again; `core/metrics/test_figures.py` checks that they are what it would write.
"""

from __future__ import annotations

import re
from pathlib import Path

from loadgen.figures import FIGURES, FigureRow

PAGE = Path(__file__).parent.parent / "docs" / "summary.md"
BEGIN = "<!-- figures: made by tests/make_figures.py from the rows of loadgen/figures.py -->"
END = "<!-- end of the figures -->"
HEAD = ("figure", "key", "sample", "better", "guards", "`compare` shows", "also in")
BETTER = {-1: "lower", 0: "", 1: "higher"}


def line(row: FigureRow) -> str:
    """The line of a figure in the table of the summary."""
    return f"| `{row.field}` | {row.unit} | {row.meaning} |"


def cells(row: FigureRow) -> tuple[str, ...]:
    guards, compared = (", ".join(f"`{name}`" for name in names) for names in (row.guards, row.compared))
    return row.words, f"`{row.name}`", row.sample, BETTER[row.better], guards, compared, ", ".join(row.shown)


def table() -> str:
    lines = [HEAD, ["---"] * len(HEAD), *map(cells, FIGURES.own)]
    return "\n".join([BEGIN, "", *(f"| {' | '.join(cells)} |" for cells in lines), "", END])


def page() -> str:
    """The page with both as they should be."""
    before, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
    text, _, behind = before.partition("\n### Summary\n")
    for row in FIGURES.own:
        if not row.block:
            behind = re.sub(rf"^\| `{row.field}` \|.*$", lambda _, row=row: line(row), behind, count=1, flags=re.M)
    return f"{text}\n### Summary\n{behind}{table()}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
