"""What another kind of result adds to the report of a run or search in the same folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from msgspec import Struct

from loadgen.render.page import Tile
from loadgen.render.section import Notice, Paragraph, Section


class ExtraSections(Struct, frozen=True, kw_only=True):
    """Additions of one kind of result, for example MLPerf, to the report of a run or search.

    Attributes:
        notices: Notices for the top of the report.
        verdict_text: The verdict of this kind, or "" if it has none.
        is_good: Whether the verdict is a good one, which decides its color.
        metrics: The metrics behind the verdict, as text that follows it.
        replace_tiles: Takes the tiles of the run and returns the tiles to show.
        sections: Sections for the middle of the report.
        appendix: Creates sections for the end of the page of a run.
        document: What `loadgen report --json` prints in place of the summary.
        exit_code: Returns the exit code of this kind, given whether `--strict` is set. The command
            exits with the worst code.
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
        """Yield the verdict with its metrics, or nothing if there is no verdict."""
        if self.verdict_text:
            text = f"{self.verdict_text} {self.metrics}".rstrip()
            yield Paragraph(text, "good" if self.is_good else "bad", large=True)
