"""The folder of repeated runs (`--repeat`), and the summary over them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from loadgen.core import format

if TYPE_CHECKING:
    from loadgen.core.metrics.summary import NamedSummary
    from loadgen.repeated.repeats import RepeatSummary, Repetition


def finish(parent: Path, how: Repetition, named: Sequence[NamedSummary]) -> RepeatSummary:
    """Store the summary over the repeats in their folder."""
    from loadgen.core.results import checksums, store
    from loadgen.repeated import repeats

    checksums.begin(parent)
    made = repeats.summarize_repeats(named, within=how.within if how.count is None else None)
    store.replace(parent / repeats.FILE, format.document(made))
    checksums.write(parent)
    return made
