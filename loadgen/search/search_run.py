"""Carries out a search: runs its trials, and prints the progress and the result."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from loadgen.cli.output import print_report, print_status
from loadgen.core import format
from loadgen.core.errors import TargetError
from loadgen.core.execution.folder_names import locked_folder
from loadgen.runs.progress import RemainingSteps
from loadgen.search import agent_capacity, experiment, search_text
from loadgen.search.experiment import ExperimentPlan
from loadgen.search.forecast import describe_forecast, forecast_search
from loadgen.search.load_search import LoadSearch
from loadgen.search.progress_estimate import TrialEffort, estimate_trials_left
from loadgen.search.search_kind import add_agents, report_ended_search
from loadgen.search.search_results import PlannedTrial, SearchResult, TrialResult, exit_code
from loadgen.search.trial_runner import TrialInterruptedError, TrialRunner

if TYPE_CHECKING:
    from loadgen.cli.invocation import Invocation
    from loadgen.runs.run_display import RunDisplay
    from loadgen.search.search_plan import PlannedSearch

Output = Literal["report", "json", "none"]
"""What is printed on stdout at the end: the report, the content of `search.json`, or nothing."""


def run_planned_search(
    planned: PlannedSearch, invocation: Invocation, output: Output, *, full: bool
) -> int:
    """Carry out a search in its locked directory, print the result and return the exit code.

    Args:
        planned: The search.
        invocation: The options that all commands have in common.
        output: What is printed on stdout at the end.
        full: Whether every section of the report is printed.
    """
    from loadgen.runs.run_display import create_display

    display = create_display(invocation, quiet=True, has_line_per_step=True)
    with locked_folder(planned.runner.output_dir):
        search_run = SearchRun(
            search=planned.search,
            runner=planned.runner,
            plan=planned.plan,
            display=display,
            unit=planned.unit,
            trial_s=planned.trial_s,
            full=full,
        )
        return search_run.run(output)


@dataclass
class SearchRun:
    """A search that is carried out in a directory, which the caller has locked.

    Attributes:
        search: The search.
        runner: Runs its trials.
        plan: What was requested.
        display: Shows the progress.
        unit: The unit of the loads, as it is written after a number.
        trial_s: The full length of the load of a trial.
        full: Whether every section of the report is printed.
    """

    search: LoadSearch
    runner: TrialRunner
    plan: ExperimentPlan
    display: RunDisplay
    unit: str
    trial_s: float
    full: bool = False
    _earlier_trial_count: int = field(default=0, init=False)
    _has_warned_of_late_responses: bool = field(default=False, init=False)

    def run(self, output: Output = "report") -> int:
        """Run trials until the search has ended, print the result and return the exit code.

        Trials that are in the directory already are not run again. If the target, the nodes or the
        user end the search, its result so far is written and printed all the same. Without any
        result the exception is raised instead.
        """
        self._resume()
        self._print_start()
        self.runner.event_handlers = self.display.event_handlers
        self.runner.resume_command = experiment.resume_command(self.runner.output_dir, self.plan)
        self.runner.save_progress(self.search)
        max_trials_left = self.search.settings.max_trials - self._earlier_trial_count
        self.display.begin_steps(max_trials_left, at_most=True)
        self._run_trials_until_stopped()
        result = self.runner.save_result(self.search)
        if agent_capacity.counts_sessions(self.plan):
            add_agents(self.runner.output_dir)
        self._print_result(result, output)

        return exit_code(result)

    def _run_trials_until_stopped(self) -> None:
        """Run trials until the search has ended, or until something from outside stops it.

        The reason is stored in the search. An exception that comes before any trial has a result
        is raised again, because there is nothing to report yet.
        """
        try:
            self._run_trials()
        except TargetError as error:
            if not self.search.results:
                raise
            print_status(str(error))
            self.search.stop("nodes" if error.code == "node_lost" else "gone")
        except TrialInterruptedError:
            self.search.stop("interrupted")
        except KeyboardInterrupt:
            if not self.search.results:
                raise
            self.search.stop("interrupted")

    def _resume(self) -> None:
        """Create the directory, or add the results that it has already to the search."""
        earlier_results = experiment.begin_experiment(self.runner.output_dir, self.plan)
        for result in earlier_results:
            self.search.add_result(result)
        self._earlier_trial_count = len(earlier_results)

    def _print_start(self) -> None:
        """Print what is searched for, and how long that is expected to take.

        These are up to five lines: the trials that are done, the targets, the objectives, the seed
        and the expected number of trials with their time and cost.
        """
        output_dir = self.runner.output_dir
        settings = self.runner.settings

        if self._earlier_trial_count:
            done = format.counted(self._earlier_trial_count, "trial is", "trials are")
            print_status(f"Resuming {output_dir}: {done} done")

        if not settings.backend.simulated and len(settings.endpoints) > 1:
            targets = format.counted(len(settings.endpoints), "target")
            print_status(f"Load over {targets}: rates are those of all targets together")

        objectives = search_text.describe_goal(self.runner.goal)
        simulated = " (simulated)" if settings.backend.simulated else ""
        print_status(f"Searching for the highest load that meets: {objectives}{simulated}")
        print_status(f"Reproduce with --seed {self.runner.seed}")

        forecast = forecast_search(
            self.search, self.trial_s, runs_to_end=bool(self.runner.goal.full_run_terms)
        )
        if forecast is not None:
            expected = describe_forecast(forecast, virtual=settings.virtual)
            cost = self.display.describe_cost_of_duration(forecast.seconds, settings)
            print_status(f"Estimated: {expected}{cost}")

    def _run_trials(self) -> None:
        """Run trials until the search has ended."""
        while True:
            trial = self.search.next_trial()
            if trial is None:
                return

            self.display.begin_step(
                search_text.describe_planned_trial(trial, self.unit), self._estimate_time_left()
            )
            result = self._run_trial(trial)
            self.display.end_step(search_text.describe_trial_result(result))
            self._warn_of_late_responses(result)

    def _warn_of_late_responses(self, result: TrialResult) -> None:
        """Print a warning if the last responses of a trial came late, once for all trials.

        There is no such warning in a search by MLPerf's rules, whose trials have the length that
        the rules require.
        """
        is_by_mlperf_rules = self.unit == search_text.QUERIES_UNIT
        if is_by_mlperf_rules or self._has_warned_of_late_responses:
            return

        note = search_text.describe_late_responses(
            result, self.trial_s, self.search.settings.warmup_s
        )
        if note:
            print_status(f"Warning: {note}")
            self._has_warned_of_late_responses = True

    def _run_trial(self, trial: PlannedTrial) -> TrialResult:
        """Run one trial and add its result to the search."""
        result = self.runner.run(trial)
        self.search.add_result(result)
        self.runner.save_progress(self.search)
        return result

    def _estimate_time_left(self) -> RemainingSteps:
        """Return the number of trials that are left, and how many seconds they take.

        The time is extrapolated from the trials that this process has run: it is proportional to
        the load, which is measured in seconds of sending. It is None before the first trial.
        """
        is_virtual = self.runner.settings.virtual

        # In virtual time, a trial that is decided early takes as long as one that is not.
        runs_to_end = is_virtual or bool(self.runner.goal.full_run_terms)
        trials_left = estimate_trials_left(
            self.search, runs_to_end=runs_to_end, trial_s=self.trial_s
        )
        load_done_s = self._load_done_s()
        if not load_done_s:
            return RemainingSteps(trials_left.trials, None)

        load_left_s = trials_left.load_duration_s(self.trial_s, self.search.settings.warmup_s)
        elapsed_s_per_load_s = self.display.elapsed_s / load_done_s
        return RemainingSteps(trials_left.trials, elapsed_s_per_load_s * load_left_s)

    def _load_done_s(self) -> float:
        """Return for how long the trials of this process sent load, in seconds.

        The trials of an earlier process, which this one resumed, are left out.
        """
        new_results = self.search.results[self._earlier_trial_count :]
        if not self.runner.settings.virtual:
            return sum(result.duration_s for result in new_results)

        # A simulation computes every trial to its full length.
        effort = TrialEffort(
            trials=len(new_results),
            full_length_trials=sum(result.length_factor for result in new_results),
        )
        return effort.load_duration_s(self.trial_s, self.search.settings.warmup_s)

    def _print_result(self, result: SearchResult, output: Output) -> None:
        """Print the result in the requested form.

        - "report": the report on stdout, which also says how to resume a search that was stopped,
          and where the files are on stderr.
        - "json": the content of `search.json`, on stdout.
        - "none": one line on stderr that states why the search ended.
        """
        output_dir = self.runner.output_dir
        match output:
            case "report":
                print_report(report_ended_search(output_dir), full=self.full)
                self._print_files()
            case "json":
                sys.stdout.write((output_dir / experiment.RESULT_FILE).read_text("utf-8"))
            case "none":
                print_status(f"Search {output_dir}: {search_text.describe_stop(result)}")

    def _print_files(self) -> None:
        """Print where the files of the search are."""
        output_dir = shlex.quote(str(self.runner.output_dir))
        print_status(f"Results: {output_dir}. All details: loadgen report {output_dir} --full")
