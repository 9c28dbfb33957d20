"""Tables as text and as Markdown, and lines of prose, for every report; `page.table` makes the same in HTML. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

WIDTH = 100  # columns of a report on a terminal


def format_text(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Lines of a text table, each column as wide as its widest cell.

    The first `left` columns are left-aligned; the others are right-aligned.
    """
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = []
    for row in (head, *rows):
        cells = zip(row, widths, strict=True)
        aligned = (
            f"{cell:<{w}}" if i < left else f"{cell:>{w}}" for i, (cell, w) in enumerate(cells)
        )
        lines.append("  ".join(aligned).rstrip())
    return lines


def format_markdown(
    head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1, *, remarks: bool = False
) -> str:
    """The same as Markdown, ending in a newline. `remarks`: the last column is left-aligned too."""
    last = len(head) - 1
    rule = [":--" if i < left or (remarks and i == last) else "--:" for i in range(len(head))]
    lines = (
        "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in row) + " |"
        for row in (head, rule, *rows)
    )
    return "\n".join(lines) + "\n"


def wrap_text(words: str, first: str = "", rest: str = "", width: int = WIDTH) -> list[str]:
    """Lines of at most `width` columns: the first begins with `first`, the others with `rest`.

    No word is cut, at its hyphens or elsewhere: flags, names and URLs stay whole.
    """
    return textwrap.wrap(
        words,
        width,
        initial_indent=first,
        subsequent_indent=rest,
        break_on_hyphens=False,
        break_long_words=False,
    )
