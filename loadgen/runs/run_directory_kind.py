"""The result kind of a directory of runs without a file that describes them.

The runs are load points of one workload, or repeats of one load.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Never

from loadgen.core import format, run_folder
from loadgen.core.errors import UserError, most_severe
from loadgen.core.metrics.interactivity import DEFAULT_DEFINITION
from loadgen.core.metrics.reasons import join_reasons
from loadgen.core.metrics.summary import NamedSummary, Summary, dump_summary, exit_code
from loadgen.render.section import Report
from loadgen.repeated import capacity, repeats_text
from loadgen.repeated.capacity import Capacity
from loadgen.repeated.repeats import is_valid, summarize_repeats
from loadgen.result_kinds import (
    ListRow,
    RateInterval,
    RegeneratedFile,
    ResultFunctions,
    no_pareto_chart,
)
from loadgen.runs import sweep_report
from loadgen.runs.comparison_side import ComparedRun, Side
from loadgen.runs.kind import capacity_facts, capacity_in, load_compared_run
from loadgen.runs.repeats_report import repeats_report
from loadgen.runs.slo_text import have_same_slo
from loadgen.runs.sweep_curve import SweepCurve, build_curve, with_interactivity


class StoredRuns(NamedTuple):
    """The runs of a directory, with summaries that are computed from their records.

    Attributes:
        output_dir: The directory.
        runs: The name and the summary of each run.
        are_load_points: Whether they are load points of one workload, and not repeats of one load.
        interactivity: The definition of the speed per user that the Pareto chart uses.
    """

    output_dir: Path
    runs: tuple[NamedSummary, ...]
    are_load_points: bool
    interactivity: str = DEFAULT_DEFINITION


# Reading


def fits(output_dir: Path) -> bool:
    """Return whether a directory has runs in it and is not itself a run."""
    is_run = run_folder.is_run(output_dir)
    return output_dir.is_dir() and not is_run and bool(run_dirs(output_dir))


def run_dirs(output_dir: Path) -> list[Path]:
    """Return the directories of the runs in a directory."""
    return run_folder.runs_in(output_dir)


def existing_run_dirs(output_dir: Path) -> list[Path]:
    """Return the directories of the runs in a directory. Raises UserError if there are none."""
    directories = run_dirs(output_dir)
    if directories:
        return directories

    raise UserError(
        "no_result",
        "the directory has no run yet",
        str(output_dir),
        "repeat the command that created it to resume, or give the directory of a run",
    )


def load(output_dir: Path) -> StoredRuns:
    """Read the runs of a directory. Raises UserError for runs of different workloads or targets."""
    runs = computed_summaries(output_dir, existing_run_dirs(output_dir))
    recipes = {run.summary.fingerprints.recipe for run in runs}
    are_load_points = len(recipes) > 1
    check_same_workload(output_dir, runs)
    return StoredRuns(output_dir, runs, are_load_points)


def computed_summaries(root: Path, directories: Sequence[Path]) -> tuple[NamedSummary, ...]:
    """Return the summaries of runs, computed from their records.

    Each is named by its path below `root`.
    """
    return tuple(
        NamedSummary(run_dir.relative_to(root).as_posix(), run_folder.open_run(run_dir).summary)
        for run_dir in directories
    )


# Reporting


def headline(stored: StoredRuns) -> str:
    """Return the result of the runs in one sentence."""
    if stored.are_load_points:
        return sweep_report.headline(build_curve(stored.runs))
    return repeats_text.headline(summarize_repeats(stored.runs))


def report(stored: StoredRuns) -> Report:
    """Return the report of the runs."""
    curve = build_curve(stored.runs)
    if stored.are_load_points:
        return sweep_report.sweep_report(with_interactivity(curve, stored.interactivity))
    return repeats_report(summarize_repeats(stored.runs), curve)


def choose_interactivity(stored: StoredRuns, interactivity: str) -> StoredRuns:
    """Return the runs with their Pareto chart by another definition of the speed per user.

    Raises UserError for repeats of one load, which have no such chart.
    """
    if not stored.are_load_points:
        raise no_pareto_chart("repeats")
    return stored._replace(interactivity=interactivity)


def document(stored: StoredRuns) -> bytes:
    """Return the summaries of the runs as a JSON list."""
    return dump_summaries(stored.runs)


def dump_summaries(runs: Sequence[NamedSummary]) -> bytes:
    """Return the summaries of runs as a JSON list."""
    documents = [dump_summary(run.summary).decode().rstrip() for run in runs]
    return ("[" + ",\n".join(documents) + "]\n").encode()


def code(stored: StoredRuns, strict: bool) -> int:
    """Return the most severe exit code of the runs."""
    return most_severe_exit_code(stored.runs, strict)


def most_severe_exit_code(runs: Sequence[NamedSummary], strict: bool) -> int:
    """Return the most severe exit code of runs, 0 if there are none."""
    return most_severe([exit_code(run.summary, strict=strict, reported=True) for run in runs])


# Comparing


def compare_side(output_dir: Path) -> Side:
    """Return repeats of one run as one side of a comparison. Raises UserError for other runs."""
    return repeats_as_side(output_dir, run_dirs(output_dir))


def repeats_as_side(output_dir: Path, directories: Sequence[Path]) -> Side:
    """Return repeats of one load as one side of `loadgen compare`.

    INVALID repeats are left out, and a note says so. If all are INVALID, they are all included, and
    `compare` then shows their metrics without saying which side is better. The name of the side is
    "", because the caller sets it.

    Raises UserError for runs that are not repeats of one another.
    """
    repeats = tuple(load_compared_run(run_dir) for run_dir in directories)
    check_same_recipe(output_dir, [NamedSummary(run.name, run.summary) for run in repeats])
    valid_repeats = tuple(run for run in repeats if is_valid(run.summary))
    are_all_valid = len(valid_repeats) == len(repeats)
    if are_all_valid or not valid_repeats:
        return Side(name="", runs=repeats)
    return Side(name="", runs=valid_repeats, notes=(_describe_invalid_repeats(repeats),))


def _describe_invalid_repeats(repeats: Sequence[ComparedRun]) -> str:
    """Return the note that names the INVALID repeats a comparison leaves out, with the reasons."""
    invalid_repeats = [run for run in repeats if not is_valid(run.summary)]
    names = "; ".join(
        f"{run.name} ({join_reasons(run.summary.verdict.reasons)})" for run in invalid_repeats
    )
    total = format.counted(len(repeats), "repeat")
    verb = "is" if len(invalid_repeats) == 1 else "are"
    return f"{len(invalid_repeats)} of {total} {verb} INVALID and left out: {names}"


def check_same_recipe(output_dir: Path, runs: Sequence[NamedSummary]) -> None:
    """Raise UserError unless all runs are repeats of one run, apart from the seed.

    Repeats have the same config fingerprint, also called the recipe. It is a hash of everything
    that a run requested. The error names the first run of each fingerprint.
    """
    first_run_by_fingerprint: dict[str, str] = {}
    for run in runs:
        config_fingerprint = run.summary.fingerprints.recipe
        if config_fingerprint not in first_run_by_fingerprint:
            first_run_by_fingerprint[config_fingerprint] = run.name

    if len(first_run_by_fingerprint) <= 1:
        return

    names = list(first_run_by_fingerprint.values())
    raise UserError(
        "mismatch",
        f"not repeats of one run: {', '.join(names)} have different config fingerprints",
        str(output_dir),
        f"give the directory of one of them: {output_dir / names[0]}",
    )


def check_same_workload(output_dir: Path, runs: Sequence[NamedSummary]) -> None:
    """Raise UserError unless the runs differ only in their load and their seeds."""
    first = runs[0]
    for run in runs[1:]:
        differences = _workload_differences(first.summary, run.summary)
        if not differences:
            continue

        raise UserError(
            "mismatch",
            (
                "these runs are neither load points nor repeats of one another: "
                f"{first.name} and {run.name} have different values of: "
                f"{', '.join(differences)}"
            ),
            str(output_dir),
            f"give the directory of one of them: {output_dir / first.name}; or use loadgen compare",
        )


def _workload_differences(first: Summary, second: Summary) -> list[str]:
    """Return the names of the settings in which two runs differ, apart from load and seed.

    The list is empty for load points of one sweep, and for repeats of one load.
    """
    differences = []
    if first.run.workload != second.run.workload:
        differences.append("workload")

    if first.target.model != second.target.model:
        differences.append("model")

    if _target_name(first) != _target_name(second):
        differences.append("target")

    if (first.run.api, first.run.stream) != (second.run.api, second.run.stream):
        differences.append("API")

    if not have_same_slo(first, second):
        differences.append("SLO")

    return differences


def _target_name(summary: Summary) -> str:
    """Return what identifies the target of a run, such as "simulated: gb300-vm", or its URL."""
    return summary.target.name or summary.target.url


# Listing


def list_row_of_runs(
    runs: tuple[NamedSummary, ...], output_dir: Path, outcome: str = ""
) -> ListRow:
    """Return the row of a directory of runs in the list of results.

    A search or a sweep stores the capacity that it measured. Its row states the capacity, and shows
    the metrics of the run at that load. The row of other runs states `outcome`.
    """
    stored_capacity = capacity_in(output_dir)
    if stored_capacity is None:
        return ListRow(outcome=outcome, runs=runs)

    interval = _capacity_interval(stored_capacity, build_curve(runs)) if runs else None
    run_at_capacity = stored_capacity.evidence
    return ListRow(
        outcome=stored_capacity.description,
        selected_run=run_at_capacity,
        runs=runs,
        interval=interval,
    )


def _capacity_interval(stored_capacity: Capacity, curve: SweepCurve) -> RateInterval | None:
    """Return the confidence interval of a capacity in output tokens/s, or None if it is not known.

    A capacity and its interval are in requests per second. They are multiplied by the mean output
    tokens per request of the run at the capacity. The result also has the tokens per second that
    one user of this run sees.
    """
    run_at_capacity = stored_capacity.evidence
    point_by_name = {point.name: point for point in curve.load_points}
    point = point_by_name.get(run_at_capacity)
    low_per_s = stored_capacity.low_per_s
    if point is None or point.per_user is None or not point.output_per_s:
        return None
    if low_per_s is None:
        return None

    high_per_s = stored_capacity.high_per_s or stored_capacity.rate_per_s
    tokens_per_request = point.output_per_s / stored_capacity.rate_per_s
    return RateInterval(
        per_user=point.per_user,
        low=low_per_s * tokens_per_request,
        high=high_per_s * tokens_per_request,
    )


def regenerate(_output_dir: Path) -> Iterator[RegeneratedFile]:
    """Yield nothing: all derived files are in the directories of the runs."""
    return iter(())


FUNCTIONS = ResultFunctions(
    fits=fits,
    load=load,
    headline=headline,
    report=report,
    with_interactivity=choose_interactivity,
    document=document,
    code=code,
    runs=run_dirs,
    compare_side=compare_side,
    regenerate=regenerate,
)
"""Runs side by side, without a file that describes them."""


CAPACITY: ResultFunctions[Never] = ResultFunctions(
    schema=capacity.Capacity,
    capacity=capacity_facts,
)
"""A capacity without the search that found it."""
