"""A load that found its own limit: what its steps add to the text and the page of their run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from loadgen.core.results.manifest import decode
from loadgen.core.run_folder import OpenedRun
from loadgen.present.additions import Addition
from loadgen.repeated import capacity
from loadgen.result_kinds import RECORDS, SUMMARIES, Remade
from loadgen.runs.kind import capacity_in

if TYPE_CHECKING:
    from loadgen.search.adaptive import StoredAdaptive


def sections(folder: Path, run: OpenedRun) -> Addition | None:
    """None of another run. The file is not needed: a run that was killed is judged by its records."""
    file = folder / "run.json"
    if not file.is_file() or decode(file.read_bytes(), str(file)).adaptive is None:
        return None  # before anything is imported that only such a run needs
    from loadgen.search import adaptive_run

    found = adaptive_run.read(folder)
    return None if found is None else addition(folder, found)


def addition(folder: Path, found: StoredAdaptive) -> Addition:
    """What such a load, read from its folder, adds to the report of its run."""
    from loadgen.search import adaptive_text

    held = capacity_in(folder)
    return adaptive_text.addition(found, "" if held is None else held.go_on)


def derived(folder: Path) -> Iterator[Remade]:
    from loadgen.search import adaptive_run

    found = adaptive_run.read(folder)
    if found is None:
        return
    yield Remade(adaptive_run.FILE, adaptive_run.dump(found), RECORDS)
    if (folder / capacity.FILE).is_file():
        shown = adaptive_run.found_capacity(folder, found)
        yield Remade(capacity.FILE, capacity.dump(shown), SUMMARIES, leave=("recipe",))
