"""Tables and prose as lines of text, and tables as Markdown."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

WIDTH = 100
"""Columns of text that does not go to a terminal."""

COLUMN_GAP = "  "
"""What separates the columns of a table."""


def format_text(
    head: Sequence[str], rows: Sequence[Sequence[str]], label_columns: int = 1
) -> list[str]:
    """Return a table as lines of text, the head first. Each column is as wide as its widest cell.

    The first `label_columns` columns are left-aligned, the others right-aligned.
    """
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = []
    for row in (head, *rows):
        cells = [
            f"{cell:<{width}}" if index < label_columns else f"{cell:>{width}}"
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(COLUMN_GAP.join(cells).rstrip())

    return lines


def format_markdown(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    label_columns: int = 1,
    *,
    remarks: bool = False,
) -> str:
    """Return a table as Markdown that ends in a newline.

    The first `label_columns` columns are left-aligned, and so is the last one with `remarks`.
    """
    left_aligned_columns = set(range(label_columns))
    if remarks:
        left_aligned_columns.add(len(head) - 1)

    # The second row of a Markdown table states the alignment of each column.
    alignment_row = [
        ":--" if column in left_aligned_columns else "--:" for column in range(len(head))
    ]
    lines = []
    for row in (head, alignment_row, *rows):
        cells = [cell.replace("|", "\\|").replace("\n", " ") for cell in row]
        lines.append(f"| {' | '.join(cells)} |\n")

    return "".join(lines)


def wrap_text(
    text: str, first_indent: str = "", other_indent: str = "", width: int = WIDTH
) -> list[str]:
    """Return lines of at most `width` columns, the first one indented differently.

    Words are never broken, not even at hyphens, so that flags, names and URLs can be copied.
    """
    return textwrap.wrap(
        text,
        width,
        initial_indent=first_indent,
        subsequent_indent=other_indent,
        break_on_hyphens=False,
        break_long_words=False,
    )
