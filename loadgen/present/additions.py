"""What another kind of result in the folder of a run, or of a search, adds to its text and its page. Values only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from loadgen.present.page import Number, Page


@dataclass(frozen=True, kw_only=True)
class Addition:
    """The part of one kind. All of it may be left out.

    text: stands below that of the run and ends in a newline. marks: for the top of the page, a word and what it means.
    sentence: a verdict of its own, `good` or not. numbers: gives the run's tiles, changed; figures: the same in words,
    for a page without these tiles. section: writes its part of the page; appendix: one near its end. document: what
    `--json` prints in the place of the summary. code: the exit code (strict) beside that of the run.
    """

    text: str = ""
    marks: tuple[tuple[str, str], ...] = ()
    sentence: str = ""
    good: bool = True
    numbers: Callable[[Sequence[Number]], Sequence[Number]] | None = None
    figures: str = ""
    section: Callable[[Page], None] | None = None
    appendix: Callable[[Page], None] | None = None
    document: bytes | None = None
    code: Callable[[bool], int] | None = None
