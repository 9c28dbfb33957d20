"""What another kind of result in the folder of a run, or of a search, adds to its report. Values only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from msgspec import Struct

from loadgen.render.page import Tile
from loadgen.render.section import Notice, Paragraph, Section


class ExtraSections(Struct, frozen=True, kw_only=True):
    """The part of one kind. All of it may be left out.

    notices: for the top. verdict_text: a verdict of its own, `is_good` or not. replace_tiles: gives the run's tiles, changed;
    metrics: the same in words, for a page without these tiles. sections: below the first ones; appendix: makes those
    near the end of the page of a run, when there is one. document: what `--json` prints in the place of the summary.
    exit_code: the exit code (strict) beside that of the run.
    """

    notices: tuple[Notice, ...] = ()
    verdict_text: str = ""
    is_good: bool = True
    replace_tiles: Callable[[Sequence[Tile]], Sequence[Tile]] | None = None
    metrics: str = ""
    sections: tuple[Section, ...] = ()
    appendix: Callable[[], Sequence[Section]] | None = None
    document: bytes | None = None
    exit_code: Callable[[bool], int] | None = None

    def headline(self) -> Iterator[Paragraph]:
        """The verdict with its figures, where there is one."""
        if self.verdict_text:
            yield Paragraph(
                f"{self.verdict_text} {self.metrics}".rstrip(),
                "good" if self.is_good else "bad",
                large=True,
            )
