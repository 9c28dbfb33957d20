"""Repeats of one load, or of a sweep: each figure's mean and its interval by the spread between the runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from loadgen.core import run_folder
from loadgen.core.errors import UserError
from loadgen.core.metrics.summary import NamedSummary
from loadgen.core.results.json_files import decode_json
from loadgen.render.section import Report
from loadgen.repeated import repeats, repeats_text
from loadgen.repeated.repeats import RepeatSummary, summarize_repeats
from loadgen.result_kinds import (
    SUMMARIES,
    ListRow,
    RateInterval,
    RegeneratedFile,
    ResultFunctions,
)
from loadgen.runs import repeats_report, run_directory_kind
from loadgen.runs.comparison_side import Side
from loadgen.runs.kind import stored_summaries
from loadgen.runs.sweep_curve import average_repeats, curve


class _OfSweep(msgspec.Struct, frozen=True):
    """`repeats.json` of a sweep that was repeated, and of a validation."""

    levels: dict[str, RepeatSummary]


class StoredRepeats(NamedTuple):
    """Stored repeats, with summaries that are computed from their records.

    Attributes:
        made: The summary of the repeats by load point, under "" if there is one load.
    """

    folder: Path
    runs: tuple[NamedSummary, ...]
    made: dict[str, RepeatSummary]


def load(folder: Path) -> StoredRepeats:
    """Raises UserError for damaged files, and for runs that are no repeats of each other."""
    stored = _stored(folder)
    named = run_directory_kind.computed_summaries(folder, runs(folder))
    if list(stored) == [""]:
        run_directory_kind.one_recipe(folder, named)
        return StoredRepeats(
            folder, named, {"": summarize_repeats(named, within=stored[""].within)}
        )
    by_name = dict(named)
    made = {
        level: summarize_repeats(
            [NamedSummary(run, by_name[run]) for run in one.runs if run in by_name],
            within=one.within,
        )
        for level, one in stored.items()
    }
    return StoredRepeats(folder, named, made)


def _stored(folder: Path) -> dict[str, RepeatSummary]:
    file = folder / repeats.FILE
    data, what = file.read_bytes(), "the summary of repeats"
    try:
        is_sweep = "levels" in msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    except msgspec.MsgspecError:
        is_sweep = False
    if is_sweep:
        return decode_json(data, _OfSweep, str(file), what).levels
    return {"": decode_json(data, RepeatSummary, str(file), what)}


def runs(folder: Path) -> list[Path]:
    """Those in the folder; of a sweep those of its levels."""
    if found := run_folder.runs_in(folder):
        return found
    named = dict.fromkeys(run for one in _stored(folder).values() for run in one.runs)
    return [folder / name for name in named if run_folder.is_run(folder / name)]


def headline(found: StoredRepeats) -> str:
    if "" in found.made:
        return repeats_text.headline(found.made[""])
    return repeats_text.headline_of_levels(list(found.made.items()))


def report(found: StoredRepeats) -> Report:
    levels = curve(found.runs)
    if "" in found.made:
        return repeats_report.report(found.made[""], levels)
    return repeats_report.report_of_levels(list(found.made.items()), levels)


def document(found: StoredRepeats) -> bytes:
    """Return the summaries of the runs as a JSON list."""
    return run_directory_kind.dump_summaries(found.runs)


def code(found: StoredRepeats, strict: bool) -> int:
    """Return the most severe exit code of the runs."""
    return run_directory_kind.most_severe_exit_code(found.runs, strict)


def list_row(folder: Path) -> ListRow:
    found = stored_summaries(folder, runs(folder))
    stored = _stored(folder)
    interval = _interval(stored[""], found) if found and "" in stored else None
    return ListRow(runs=found, interval=interval)


def _interval(stored: RepeatSummary, named: tuple[NamedSummary, ...]) -> RateInterval | None:
    """Return the interval of the mean output rate of repeats, or None if it is not known."""
    rate = next(
        (figure for figure in stored.metrics if figure.metric == "tokens.steady_output_per_s"), None
    )
    if rate is None or rate.low is None or rate.high is None:
        return None
    per_user = average_repeats(curve(named).levels).per_user
    if per_user is None:
        return None
    return RateInterval(per_user=per_user, low=rate.low, high=rate.high)


def compare_side(folder: Path) -> Side:
    """One side. Raises UserError for a sweep that was repeated: its levels are other loads."""
    levels = [level for level in _stored(folder) if level]
    if levels:
        what = f"a sweep that was repeated holds several loads: {', '.join(levels)}"
        raise UserError("mismatch", what, str(folder), "name the folder of a run in it")
    return run_directory_kind.of_repeats(folder, runs(folder))


def regenerate(folder: Path) -> Iterator[RegeneratedFile]:
    def again(before: RepeatSummary) -> RepeatSummary:
        return summarize_repeats(
            [NamedSummary(name, run_folder.kept_summary(folder / name)) for name in before.runs],
            within=before.within,
        )

    made = {level: again(one) for level, one in _stored(folder).items()}
    yield RegeneratedFile(
        repeats.FILE, msgspec.json.encode(made.get("", {"levels": made})), SUMMARIES
    )


FUNCTIONS = ResultFunctions(
    load=load,
    headline=headline,
    report=report,
    runs=runs,
    list_row=list_row,
    compare_side=compare_side,
    regenerate=regenerate,
    schema=RepeatSummary,
    document=document,
    code=code,
)
