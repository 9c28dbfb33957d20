"""Tables that benchmarks/trust.py prints row by row, and fractions with their intervals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from loadgen.core.stats import intervals


class Column(NamedTuple):
    """A column of a table: its heading and its width in characters."""

    heading: str
    width: int


class RowTable:
    """A text table that is printed row by row, because a row can take an hour to compute.

    The first column is aligned left, and all others are aligned right.
    """

    def __init__(self, *columns: Column) -> None:
        self._columns = columns

    def print_header(self) -> None:
        """Print the headings of all columns."""
        self.print_row([column.heading for column in self._columns])

    def print_row(self, cells: Sequence[str], *, is_within_limit: bool = True) -> None:
        """Print a row at once, and mark it if what it shows is over its limit."""
        first_column, *other_columns = self._columns
        first_cell, *other_cells = cells
        line = first_cell.ljust(first_column.width)
        for column, cell in zip(other_columns, other_cells, strict=True):
            line += cell.rjust(column.width)

        if not is_within_limit:
            line += "   OVER THE LIMIT"
        print(line, flush=True)


def format_fraction(count: int, total: int) -> str:
    """Return a fraction with its 95 % interval, for example "2.0% [1.0%, 3.9%]"."""
    fraction = count / total
    low, high = intervals.wilson_interval(fraction, total, 0.95)
    return f"{fraction:.1%} [{low:.1%}, {high:.1%}]"
