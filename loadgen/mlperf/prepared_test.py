"""Runs a prepared test for the command: one run, a search for the peak, or a trial of Offline."""

from __future__ import annotations

import sys
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from loadgen.cli.invocation import Invocation
from loadgen.cli.output import print_report, print_status
from loadgen.core.errors import INTERRUPTED, UNSOUND, UserError
from loadgen.core.execution.plan import Settings
from loadgen.mlperf import run as mlperf_run
from loadgen.mlperf.result import MlperfResult
from loadgen.mlperf.rules import Test

if TYPE_CHECKING:
    from loadgen.core.execution.run import Execute
    from loadgen.core.metrics.summary import Summary
    from loadgen.core.workload import Workload
    from loadgen.search.load_search import LoadSearch
    from loadgen.search.search_results import SearchResult, TrialResult
    from loadgen.search.search_run import SearchRun

DEFAULT_START_QPS = 10.0
"""Where a search for the peak starts without --target-qps."""

MAX_OFFLINE_TRIALS = 3

MIN_TRIAL_FRACTION = 0.1
"""An Offline trial this long, in parts of the minimum duration, measures the rate well enough.

Shorter trials are dominated by the start-up and by the wait for the last responses.
"""

OFFLINE_TRIAL_PARTS = 5
"""An Offline trial is sized to take the minimum duration divided by this."""

ONE_PASS_RATE = 1e-9
"""A rate in samples/s, so low that the first Offline trial is one pass of the data set."""

NS_PER_S = 1_000_000_000


class _JudgedRun(NamedTuple):
    """A run and its result by the rules of MLPerf.

    Attributes:
        result: The result by the rules.
        run_dir: The directory of the run.
        gpus: The number of GPUs behind the endpoint, or None if it is not known.
        summary: The summary of the run. None if the official LoadGen issued the queries.
    """

    result: MlperfResult
    run_dir: Path
    gpus: int | None
    summary: Summary | None = None

    @property
    def exit_code(self) -> int:
        """The exit code of the command.

        An interrupted run has INTERRUPTED, and a run that is not a reliable measurement has
        UNSOUND. Otherwise the rules decide: VALID or INVALID. If the official LoadGen issued the
        queries, there is no summary, and only the rules decide.
        """
        if self.summary is not None:
            if self.summary.run.state == "interrupted":
                return INTERRUPTED
            if not mlperf_run.is_reliable(self.summary):
                return UNSOUND
        return int(self.result.exit_code)


class PreparedTest(Struct, frozen=True, kw_only=True):
    """A test with its data set, how its requests are sent and where its results go.

    Attributes:
        test: The requirements of the rules.
        data: The requests.
        settings: The endpoint, and how requests are sent.
        drain_ns: How long queries may take after the last one was issued.
        invocation: The command.
        output_dir: The directory of the results.
        uses_official_loadgen: Whether the official LoadGen issues the queries.
        as_json: Whether mlperf.json is printed in place of the report.
        full: Whether every section of the report is printed.
    """

    test: Test
    data: mlperf_run.DatasetRequests
    settings: Settings
    drain_ns: int
    invocation: Invocation
    output_dir: Path
    uses_official_loadgen: bool
    as_json: bool
    full: bool

    def build_workload(self, qps: float, concurrency: int | None) -> Workload:
        """Return the test as a workload at a rate in queries/s, in Offline in samples/s."""
        return mlperf_run.build_workload(
            self.test, self.data, qps=qps, concurrency=concurrency, drain_ns=self.drain_ns
        )

    # -- one run -----------------------------------------------------------------------------------

    def run_once(self, qps: float, concurrency: int | None = None) -> int:
        """Run the test once, print its result and return the exit code."""
        self._print_data_set()
        if self.uses_official_loadgen:
            judged_run = self._run_official_loadgen(qps, concurrency)
        else:
            judged_run = self._run_own_harness(qps, concurrency)
        self._print_judged_run(judged_run)
        return judged_run.exit_code

    def _run_official_loadgen(self, qps: float, concurrency: int | None) -> _JudgedRun:
        """Let the official LoadGen issue the queries, and return the run with its result.

        Args:
            qps: The rate in queries/s, in Offline the expected rate in samples/s.
            concurrency: The limit on requests in flight in Offline, or None to send all at once.
        """
        from loadgen.mlperf import official_loadgen

        official_run = official_loadgen.run_official_test(
            self.test,
            self.data,
            replace(self.settings, out=self.output_dir),
            output_dir=self.output_dir,
            qps=qps,
            concurrency=concurrency,
        )
        return _JudgedRun(official_run.result, self.output_dir, official_run.gpus)

    def _run_own_harness(self, qps: float, concurrency: int | None) -> _JudgedRun:
        """Send the load with this program, and return the run with its result by MLPerf's rules.

        Args:
            qps: The rate in queries/s, in Offline the expected rate in samples/s.
            concurrency: The most requests in flight in Offline, or None to send all at once.
        """
        execute_run = self._create_executor()
        settings = replace(self.settings, out=self.output_dir)
        workload = self.build_workload(qps, concurrency)
        summary, run_dir = execute_run(workload, settings, folder=self.output_dir)
        result = mlperf_run.judge_run(
            run_dir, self.test, summary, data_name=self.data.name, qps=qps
        )

        return _JudgedRun(result, run_dir, summary.target.gpus, summary)

    def _create_executor(self) -> Execute:
        """Return the function that carries out a run and shows its progress on the terminal."""
        from loadgen.runs.run_display import create_display

        display = create_display(self.invocation)
        return self.invocation.executor(display.event_handlers)

    def _print_data_set(self) -> None:
        print_status(f"MLPerf-style, unofficial; data set: {self.data.name}")

    def _print_judged_run(self, judged_run: _JudgedRun) -> None:
        """Print the result of a run, as JSON or as a report, as the options of the command say."""
        from loadgen.mlperf import text
        from loadgen.runs.part_sections import part_sections

        if self.as_json:
            sys.stdout.write((judged_run.run_dir / mlperf_run.RESULT).read_text("utf-8"))
            return

        parts = () if judged_run.summary is None else part_sections(judged_run.summary)
        report = text.create_report(
            judged_run.result,
            gpus=judged_run.gpus,
            part_sections=parts,
            run_dir=str(judged_run.run_dir),
        )
        print_report(report, full=self.full)
        print_status(f"Results: {judged_run.run_dir}, with log files in the format of LoadGen")

    # -- the rate that sizes an Offline query ------------------------------------------------------

    def measure_offline_rate(self, concurrency: int | None) -> float | None:
        """Measure how many samples/s the server completes, or return None if interrupted.

        In Offline all samples are one query, which must take the minimum duration. Its number of
        samples follows from this rate, so trials measure it if the user does not specify it. A
        trial is sized by the rate that the one before it measured. No rate is known for the first
        trial: it is sized by a rate close to 0, and so it is a single pass of the data set. There
        are at most MAX_OFFLINE_TRIALS trials, until one is long enough for a good measurement.

        Args:
            concurrency: The limit on requests in flight, or None to send all at once.

        Raises:
            UserError: No request of a trial completed.
        """
        print_status("No --target-qps: running one pass of the data set first, to size the query")
        execute_run = self._create_executor()
        min_trial_s = MIN_TRIAL_FRACTION * self.test.min_duration_ns / NS_PER_S

        samples_per_s = ONE_PASS_RATE
        for number in range(1, MAX_OFFLINE_TRIALS + 1):
            trial_dir = self._run_offline_trial(execute_run, number, samples_per_s, concurrency)
            if trial_dir is None:
                return None
            trial = _measure_trial(trial_dir)
            samples_per_s = trial.samples_per_s
            if trial.duration_s >= min_trial_s:
                break

        return samples_per_s

    def _run_offline_trial(
        self, execute_run: Execute, number: int, samples_per_s: float, concurrency: int | None
    ) -> Path | None:
        """Run a short Offline test, and return its directory, or None if the user interrupted it.

        Its directory is next to the output directory, for example `out-trial-1` next to `out`.

        Args:
            execute_run: Carries out a run.
            number: The number of the trial, from 1.
            samples_per_s: The expected rate, which decides how many samples are sent.
            concurrency: The limit on requests in flight, or None to send all at once.
        """
        trial_name = f"trial-{number}"
        workload = self._build_offline_trial(trial_name, samples_per_s, concurrency)
        settings = replace(self.settings, out=_unused_sibling(self.output_dir, trial_name))
        summary, trial_dir = execute_run(workload, settings)
        return None if summary.run.state == "interrupted" else trial_dir

    def _build_offline_trial(
        self, trial_name: str, samples_per_s: float, concurrency: int | None
    ) -> Workload:
        """Return the workload of a short Offline test, with prompts that no other run sends.

        At the expected rate, it takes 1/OFFLINE_TRIAL_PARTS of the minimum duration, but it has at
        least one pass of the data set.
        """
        from loadgen.core.workload import with_unique_prompts

        workload = mlperf_run.build_workload(
            replace(self.test, min_duration_ns=self.test.min_duration_ns // OFFLINE_TRIAL_PARTS),
            self.data,
            qps=samples_per_s,
            concurrency=concurrency,
            drain_ns=mlperf_run.MAX_WAIT_NS,  # a response that is cut off would lower the rate
        )

        # With the prompts of another run, the prefix cache of the server would help.
        return with_unique_prompts(workload, trial_name)

    # -- the search for the peak -------------------------------------------------------------------

    def find_peak(
        self, start_qps: float | None, sustain_factor: float, run_spread: float | None
    ) -> int:
        """Search for the highest VALID rate, print its result and return the exit code.

        The search itself ends with runs of official length that confirm the rate. The best of these
        runs is then judged by the rules of MLPerf, which gives the result that is printed. The exit
        code is the more severe one of the search and of this result.

        Args:
            start_qps: The first rate that is tried, or None for the default.
            sustain_factor: The length of the runs that show whether the rate is sustained, as a
                multiple of the length of an official run. With 1, there are no such runs.
            run_spread: How much the server varies from run to run, as a fraction (0.02 is 2 %), or
                None if the search has to learn it from its trials.
        """
        self._print_data_set()
        first_qps = start_qps or DEFAULT_START_QPS
        self._warn_if_one_pass_is_long(first_qps)
        search_run = self._create_search_run(first_qps, sustain_factor, run_spread)
        search_exit_code = search_run.run("none" if self.as_json else "report")
        load_search = search_run.search

        confirmation = _best_confirmation(load_search)
        if confirmation is None:
            self._print_unconfirmed()
            return search_exit_code

        judged_run = self._judge_confirmation(confirmation, load_search.result)
        if not self.as_json:
            print()  # separates the result from the report of the search

        self._print_judged_run(judged_run)
        return max(search_exit_code, judged_run.exit_code)

    def _warn_if_one_pass_is_long(self, qps: float) -> None:
        """Warn if one pass of the data set takes longer than the minimum duration at this rate.

        A run sends every sample of the data set equally often, so it lasts at least for one pass.
        """
        pass_s = self.test.samples / qps
        if pass_s > self.test.min_duration_ns / NS_PER_S:
            print_status(
                f"Warning: a run ends with a whole pass of {self.test.samples:,} samples, "
                f"which takes {pass_s:,.0f} s at {qps:g}/s. "
                "Use a --dataset with fewer rows for shorter trials"
            )

    def _create_search_run(
        self, start_qps: float, sustain_factor: float, run_spread: float | None
    ) -> SearchRun:
        """Create the search for the highest VALID rate, with a display of one line per trial.

        A trial is a run at one rate. At the first rate, it is expected to take the minimum
        duration, or as long as one pass of the data set if that is longer.

        Args:
            start_qps: The first rate that is tried, in queries/s.
            sustain_factor: The length of the runs that show whether the rate is sustained, as a
                multiple of the length of an official run. With 1, there are no such runs.
            run_spread: How much the server varies from run to run, as a fraction (0.02 is 2 %), or
                None if the search has to learn it from its trials.
        """
        from loadgen.runs.run_display import create_display
        from loadgen.search.search_run import SearchRun
        from loadgen.search.search_text import QUERIES_UNIT

        peak_search = mlperf_run.create_peak_search(
            self.test,
            self.data,
            self.settings,
            self.output_dir,
            start_qps=start_qps,
            drain_ns=self.drain_ns,
            sustain_factor=sustain_factor,
            run_spread=run_spread,
        )
        pass_s = self.test.samples / start_qps
        expected_trial_s = max(self.test.min_duration_ns / NS_PER_S, pass_s)

        return SearchRun(
            search=peak_search.search,
            runner=peak_search.runner,
            plan=peak_search.plan,
            display=create_display(self.invocation, quiet=True, has_line_per_step=True),
            unit=QUERIES_UNIT,
            trial_s=expected_trial_s,
            full=self.full,
        )

    def _print_unconfirmed(self) -> None:
        """Print what there is if no run confirmed a rate: the search, or the disclosure."""
        from loadgen.mlperf.result import DISCLOSURE
        from loadgen.search import experiment

        if self.as_json:
            print((self.output_dir / experiment.RESULT_FILE).read_text("utf-8"))
        else:
            print(DISCLOSURE)

    def _judge_confirmation(
        self, confirmation: TrialResult, search_result: SearchResult
    ) -> _JudgedRun:
        """Judge the run that confirmed the peak of a search, by the rules of MLPerf.

        The result is written into the directory of that run, and into that of the search as well.

        Args:
            confirmation: The trial that confirmed the peak.
            search_result: The result of the search, which shows whether the rate is sustained.
        """
        from loadgen.core.results import checksums, store
        from loadgen.core.run_summary import summarize

        run_dir = self.output_dir / confirmation.run_name
        summary = summarize(*store.read_run_lazily(run_dir))
        result = mlperf_run.judge_run(
            run_dir,
            self.test,
            summary,
            data_name=self.data.name,
            qps=confirmation.load,
            search_result=search_result,
        )
        mlperf_run.write_result(self.output_dir, result, self.test, mlperf_run.log_context(summary))
        checksums.write(self.output_dir)

        return _JudgedRun(result, run_dir, summary.target.gpus, summary)


def _best_confirmation(search: LoadSearch) -> TrialResult | None:
    """Return the passed run with the highest rate that confirms the peak, or None without one.

    Two kinds of trials confirm a rate. A "confirm" trial has the length of an official run. A
    "sustain" trial is longer, to show that the rate can go on: no queue may grow during it. If the
    search found a rate that is sustained over longer trials, its peak is that rate. Otherwise it is
    the highest rate that passes at the official length.
    """
    found_sustained_rate = search.result.sustained_load is not None
    has_longer_trials = search.result.length_factor > 1
    if found_sustained_rate and has_longer_trials:
        confirmations = [
            trial
            for trial in search.results
            if trial.kind == "sustain" and trial.has_passed and not _has_growing_queue(trial)
        ]
    else:
        confirmations = [
            trial for trial in search.results if trial.kind == "confirm" and trial.has_passed
        ]

    return max(confirmations, key=_trial_load, default=None)


def _has_growing_queue(trial: TrialResult) -> bool:
    """Return whether a queue is known to have grown. `sustained` is None if that is not known."""
    return trial.sustained is False


def _trial_load(trial: TrialResult) -> float:
    return trial.load


def _measure_trial(trial_dir: Path) -> mlperf_run.OfflineTrial:
    """Return the rate that a trial of Offline measured, and print it.

    Raises UserError if no request of the trial completed.
    """
    trial = mlperf_run.measure_offline_trial(trial_dir)
    if trial is None:
        raise UserError(
            "no_figure",
            "no request of the trial completed",
            str(trial_dir),
            "give --target-qps, or see the errors of the trial",
        )

    print_status(
        f"Expected: {trial.samples_per_s:,.4g} samples/s, "
        f"from {trial.duration_s:,.3g} s in {trial_dir}"
    )
    return trial


def _unused_sibling(directory: Path, suffix: str) -> Path:
    """Return an unused path next to a directory: its name with a suffix, and a number if taken."""
    path = directory.with_name(f"{directory.name}-{suffix}")
    for number in count(2):
        if not path.exists():
            break
        path = directory.with_name(f"{directory.name}-{suffix}-{number}")
    return path
