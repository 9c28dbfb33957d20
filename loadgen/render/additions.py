"""What another kind of result in the folder of a run, or of a search, adds to its report. Values only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from msgspec import Struct

from loadgen.render.page import Number
from loadgen.render.section import Paragraph, Section, Warned


class ExtraSections(Struct, frozen=True, kw_only=True):
    """The part of one kind. All of it may be left out.

    warned: for the top. sentence: a verdict of its own, `good` or not. numbers: gives the run's tiles, changed;
    figures: the same in words, for a page without these tiles. sections: below the first ones; appendix: makes those
    near the end of the page of a run, when there is one. document: what `--json` prints in the place of the summary.
    code: the exit code (strict) beside that of the run.
    """

    warned: tuple[Warned, ...] = ()
    sentence: str = ""
    good: bool = True
    numbers: Callable[[Sequence[Number]], Sequence[Number]] | None = None
    figures: str = ""
    sections: tuple[Section, ...] = ()
    appendix: Callable[[], Sequence[Section]] | None = None
    document: bytes | None = None
    code: Callable[[bool], int] | None = None

    def answer(self) -> Iterator[Paragraph]:
        """The verdict with its figures, where there is one."""
        if self.sentence:
            yield Paragraph(
                f"{self.sentence} {self.figures}".rstrip(),
                "good" if self.good else "bad",
                large=True,
            )
