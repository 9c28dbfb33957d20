"""The result kind of repeats: of one load, or of each load point of a sweep."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
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
from loadgen.runs import run_directory_kind
from loadgen.runs.comparison_side import Side
from loadgen.runs.kind import stored_summaries
from loadgen.runs.load_point_results import average_repeats
from loadgen.runs.repeats_report import repeated_sweep_report, repeats_report
from loadgen.runs.sweep_curve import build_curve

SINGLE_LOAD = ""
"""The name of the load if only one was repeated."""


class _RepeatedLoadPoints(msgspec.Struct, frozen=True, rename={"by_name": "levels"}):
    """`repeats.json` of several loads: of a repeated sweep, and of a validation."""

    by_name: dict[str, RepeatSummary]


class StoredRepeats(NamedTuple):
    """Stored repeats, with summaries that are computed from their records.

    Attributes:
        runs: The name and the summary of each run.
        by_load_point: The summary of the repeats by load point, under SINGLE_LOAD if there is one.
    """

    runs: tuple[NamedSummary, ...]
    by_load_point: dict[str, RepeatSummary]

    @property
    def single_load(self) -> RepeatSummary | None:
        """The summary of the repeats if only one load was repeated."""
        return self.by_load_point.get(SINGLE_LOAD)


# Reading


def load(output_dir: Path) -> StoredRepeats:
    """Read repeats and summarize them again, from the records of their runs.

    Only the names of the load points and the requested precision are taken from the stored summary.

    Raises UserError for damaged files, and for repeats of a single load with different recipes.
    """
    stored_summaries = _read_summaries(output_dir)
    runs = run_directory_kind.computed_summaries(output_dir, run_dirs(output_dir))

    has_single_load = list(stored_summaries) == [SINGLE_LOAD]
    if has_single_load:
        run_directory_kind.check_same_recipe(output_dir, runs)
        precision = stored_summaries[SINGLE_LOAD].requested_precision
        summary = summarize_repeats(runs, requested_precision=precision)
        return StoredRepeats(runs, {SINGLE_LOAD: summary})

    return StoredRepeats(runs, _summarize_load_points(runs, stored_summaries))


def _summarize_load_points(
    runs: Iterable[NamedSummary], stored_summaries: Mapping[str, RepeatSummary]
) -> dict[str, RepeatSummary]:
    """Return the summary of the repeats of each load point, by its name.

    The stored summary of a load point names its runs. Runs whose directory is missing are left out.
    """
    run_by_name = {run.name: run for run in runs}
    summary_by_point = {}
    for point_name, stored in stored_summaries.items():
        runs_of_point = [run_by_name[name] for name in stored.runs if name in run_by_name]
        summary_by_point[point_name] = summarize_repeats(
            runs_of_point, requested_precision=stored.requested_precision
        )

    return summary_by_point


def _read_summaries(output_dir: Path) -> dict[str, RepeatSummary]:
    """Return the stored summaries by load point. Raises UserError for a damaged file."""
    path = output_dir / repeats.FILE
    data = path.read_bytes()
    description = "the summary of repeats"
    if _has_several_loads(data):
        return decode_json(data, _RepeatedLoadPoints, str(path), description).by_name
    return {SINGLE_LOAD: decode_json(data, RepeatSummary, str(path), description)}


def _has_several_loads(data: bytes) -> bool:
    """Return whether the content of `repeats.json` has the summaries of several loads.

    Return False for damaged content, whose error is reported when it is decoded.
    """
    try:
        document = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    except msgspec.MsgspecError:
        return False
    return "levels" in document


def run_dirs(output_dir: Path) -> list[Path]:
    """Return the directories of the runs of repeats.

    Repeats of one load are directly in `output_dir`. Repeats of several load points are one level
    deeper, such as `c8/r1`. Their paths are read from `repeats.json`.
    """
    subdirectories = run_folder.runs_in(output_dir)
    if subdirectories:
        return subdirectories
    names = [name for summary in _read_summaries(output_dir).values() for name in summary.runs]
    paths = [output_dir / name for name in dict.fromkeys(names)]
    return [path for path in paths if run_folder.is_run(path)]


# Reporting


def headline(stored: StoredRepeats) -> str:
    """Return the result of the repeats in one sentence."""
    if stored.single_load is not None:
        return repeats_text.headline(stored.single_load)
    return repeats_text.load_points_headline(stored.by_load_point)


def report(stored: StoredRepeats) -> Report:
    """Return the report of the repeats."""
    curve = build_curve(stored.runs)
    if stored.single_load is not None:
        return repeats_report(stored.single_load, curve)
    return repeated_sweep_report(stored.by_load_point, curve)


def document(stored: StoredRepeats) -> bytes:
    """Return the summaries of the runs as a JSON list."""
    return run_directory_kind.dump_summaries(stored.runs)


def code(stored: StoredRepeats, strict: bool) -> int:
    """Return the most severe exit code of the runs."""
    return run_directory_kind.most_severe_exit_code(stored.runs, strict)


def list_row(output_dir: Path) -> ListRow:
    """Return the row of the repeats in the list of results."""
    runs = stored_summaries(output_dir, run_dirs(output_dir))
    summary = _read_summaries(output_dir).get(SINGLE_LOAD)
    interval = _throughput_interval(summary, runs) if runs and summary is not None else None
    return ListRow(runs=runs, interval=interval)


def _throughput_interval(
    summary: RepeatSummary, runs: tuple[NamedSummary, ...]
) -> RateInterval | None:
    """Return the confidence interval of the mean output tokens/s of repeats of one load.

    The result also has the mean output tokens/s that one user sees, because the list of results
    compares throughput at that speed. Return None if one of the two is not known.
    """
    metric_by_path = {metric.metric: metric for metric in summary.metrics}
    throughput = metric_by_path.get("tokens.steady_output_per_s")
    if throughput is None or throughput.low is None or throughput.high is None:
        return None

    curve_of_repeats = build_curve(runs)
    mean_of_repeats = average_repeats(curve_of_repeats.load_points)
    tokens_per_s_per_user = mean_of_repeats.per_user
    if tokens_per_s_per_user is None:
        return None

    return RateInterval(per_user=tokens_per_s_per_user, low=throughput.low, high=throughput.high)


def compare_side(output_dir: Path) -> Side:
    """Return the repeats of one load as one side of `loadgen compare`.

    Raises UserError for a repeated sweep: it has several loads, and a side has only one.
    """
    summary_by_point = _read_summaries(output_dir)

    # Repeats of one load have the only key SINGLE_LOAD. Other keys are names of load points.
    load_points = [name for name in summary_by_point if name != SINGLE_LOAD]
    if load_points:
        raise UserError(
            "mismatch",
            f"a repeated sweep has several loads: {', '.join(load_points)}",
            str(output_dir),
            "give the directory of one of its runs",
        )

    return run_directory_kind.repeats_as_side(output_dir, run_dirs(output_dir))


def regenerate(output_dir: Path) -> Iterator[RegeneratedFile]:
    """Yield `repeats.json`, computed again from the stored summaries of the runs.

    For repeats of one load, the file is the summary. For a repeated sweep it is an object with a
    summary for each load point: `{"levels": {"c1": ..., "c8": ...}}`.
    """
    summary_by_point = {
        name: _summarize_again(output_dir, stored)
        for name, stored in _read_summaries(output_dir).items()
    }
    has_single_load = SINGLE_LOAD in summary_by_point
    content = summary_by_point[SINGLE_LOAD] if has_single_load else {"levels": summary_by_point}
    yield RegeneratedFile(repeats.FILE, msgspec.json.encode(content), SUMMARIES)


def _summarize_again(output_dir: Path, stored: RepeatSummary) -> RepeatSummary:
    runs = [NamedSummary(name, run_folder.read_summary(output_dir / name)) for name in stored.runs]
    return summarize_repeats(runs, requested_precision=stored.requested_precision)


FUNCTIONS = ResultFunctions(
    load=load,
    headline=headline,
    report=report,
    runs=run_dirs,
    list_row=list_row,
    compare_side=compare_side,
    regenerate=regenerate,
    schema=RepeatSummary,
    document=document,
    code=code,
)
