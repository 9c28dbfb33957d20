"""Repeats a whole sweep, in the directories r1, r2, ... of one directory.

The runs of a load point thus lie as far apart in time as they can.
"""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from loadgen.cli.output import print_result, print_status
from loadgen.core import format, run_folder
from loadgen.core.errors import INTERRUPTED, UserError, most_severe
from loadgen.core.metrics.summary import NamedSummary
from loadgen.core.results import store
from loadgen.repeated.repeat_loop import run_repeats, with_repeat_seed
from loadgen.repeated.repeats import FILE, RepeatSummary, Repetition, summarize_repeats
from loadgen.runs.repeats_report import repeated_sweep_report
from loadgen.runs.sweep_curve import build_curve
from loadgen.search import experiment
from loadgen.search.sweep_plan import Sweep, SweepRun
from loadgen.search.sweep_run import describe_files, outcome_code, run_sweep, with_run_settings


class RepeatedSweep:
    """A sweep that is repeated until its load points have enough runs."""

    def __init__(self, repetition: Repetition, sweep_run: SweepRun, *, strict: bool) -> None:
        """Prepare to repeat a sweep.

        Args:
            repetition: How often the sweep is repeated, or how precise its results have to be.
            sweep_run: The sweep, and the directory in which each repeat gets one of its own.
            strict: Whether the exit code of each sweep follows --strict.
        """
        self._repetition = repetition
        self._sweep_run = sweep_run
        self._strict = strict
        self._exit_codes: list[int] = []
        self._runs_by_point: dict[str, list[NamedSummary]] = {
            planned.point.name: [] for planned in sweep_run.sweep.points
        }

    def run(self, *, as_json: bool) -> int:
        """Run the repeats, print and store their summary, and return the exit code.

        The exit code is the most severe one of all sweeps.
        """
        output_dir = self._sweep_run.output_dir
        _check_not_a_single_sweep(output_dir)
        has_completed = run_repeats(
            self._repetition,
            self._is_complete,
            self._run_repeat,
            virtual=self._sweep_run.sweep.settings.virtual,
            print_line=print_status,
        )
        summaries = self._summarize()
        if not summaries:
            return INTERRUPTED

        self._print_summaries(summaries, as_json=as_json)
        if not has_completed:
            return most_severe([*self._exit_codes, INTERRUPTED])

        return most_severe(self._exit_codes)

    def _print_summaries(self, summaries: dict[str, RepeatSummary], *, as_json: bool) -> None:
        """Store the summaries of the load points, and print them as a report or as JSON."""
        output_dir = self._sweep_run.output_dir
        document = {"levels": summaries}
        store.replace(output_dir / FILE, format.document(document))
        all_runs = [run for runs in self._runs_by_point.values() for run in runs]
        report = repeated_sweep_report(summaries, build_curve(all_runs))
        print_result(document, report, as_json=as_json)
        repeat_dirs = ", ".join(f"r{number}" for number in range(1, len(self._exit_codes) + 1))
        print_status(f"Results: {output_dir}, with one sweep in each of {repeat_dirs}")

    def _is_complete(self) -> bool:
        """Return whether every load point has enough runs."""
        repeat_count = len(self._exit_codes)
        if repeat_count >= self._repetition.max_runs:
            return True
        return repeat_count > 0 and all(
            self._repetition.is_complete([run.summary for run in runs])
            for runs in self._runs_by_point.values()
        )

    def _run_repeat(self, number: int) -> bool:
        """Run the sweep once more, and keep its exit code and the summaries of its runs.

        Return False if the user stopped it.

        Args:
            number: The number of the repeat, from 1, which names its directory: r1, r2 and so on.
        """
        repeat_dir = self._sweep_run.output_dir / f"r{number}"
        sweep = with_run_settings(self._with_seed_of_repeat(number), repeat_dir)
        with store.remove_on_failure(repeat_dir):
            outcome = run_sweep(SweepRun(sweep, repeat_dir, self._sweep_run.display))

        print_status(describe_files(repeat_dir))
        self._exit_codes.append(outcome_code(outcome, strict=self._strict))
        self._add_summaries(repeat_dir)

        return not outcome.is_interrupted

    def _add_summaries(self, repeat_dir: Path) -> None:
        """Add the summaries of the runs of one repeat to those of their load points."""
        for point_name, runs in self._runs_by_point.items():
            run_dir = repeat_dir / point_name
            if run_folder.is_run(run_dir):
                summary = run_folder.open_run(run_dir).summary
                runs.append(NamedSummary(f"{repeat_dir.name}/{point_name}", summary))

    def _with_seed_of_repeat(self, number: int) -> Sweep:
        """Return the sweep with the seed of repeat `number`."""
        sweep = self._sweep_run.sweep
        points = [
            replace(planned, workload=with_repeat_seed(planned.workload, number))
            for planned in sweep.points
        ]
        return replace(sweep, points=tuple(points))

    def _summarize(self) -> dict[str, RepeatSummary]:
        """Return the summary of the runs of each load point that has any, by its name."""
        is_open_ended = self._repetition.count is None
        precision = self._repetition.precision if is_open_ended else None
        return {
            name: summarize_repeats(runs, requested_precision=precision)
            for name, runs in self._runs_by_point.items()
            if runs
        }


def _check_not_a_single_sweep(output_dir: Path) -> None:
    """Raise UserError if the directory holds a sweep that is not repeated."""
    if (output_dir / experiment.PLAN_FILE).is_file():
        raise UserError(
            "mismatch",
            "the directory has a sweep that is not repeated",
            f"--out {output_dir}",
            "use another --out",
        )
