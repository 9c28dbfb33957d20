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

UNKNOWN_QPS = 1e-9
"""An expected rate that sizes the first Offline trial to the minimum: one pass of the data set."""


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

        The outcomes are, in this order: interrupted; not a reliable measurement; otherwise VALID or
        INVALID by the rules. For the official LoadGen, only the rules decide.
        """
        if self.summary is None:
            return int(self.result.exit_code)
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
        """Let the official LoadGen issue the queries."""
        from loadgen.mlperf import official_loadgen

        settings = replace(self.settings, out=self.output_dir)
        result, gpus = official_loadgen.run_official_test(
            self.test, self.data, settings, qps=qps, concurrency=concurrency
        )
        return _JudgedRun(result, self.output_dir, gpus)

    def _run_own_harness(self, qps: float, concurrency: int | None) -> _JudgedRun:
        """Send the load with this load generator, and judge the run by the rules."""
        from loadgen.runs.run_display import create_display

        execute = self.invocation.executor(create_display(self.invocation).event_handlers)
        settings = replace(self.settings, out=self.output_dir)
        workload = self.build_workload(qps, concurrency)
        summary, run_dir = execute(workload, settings, folder=self.output_dir)
        result = mlperf_run.judge_run(
            run_dir, self.test, summary, data_name=self.data.name, qps=qps
        )
        return _JudgedRun(result, run_dir, summary.target.gpus, summary)

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
        samples follows from this rate, so trials measure it if the user does not specify it. The
        first trial is one pass of the data set. Up to two longer ones follow, until a trial is long
        enough for a good measurement.

        Args:
            concurrency: The most requests in flight, or None to send all at once.

        Raises:
            UserError: No request of a trial completed.
        """
        from loadgen.runs.run_display import create_display

        print_status("No --target-qps: running one pass of the data set first, to size the query")
        execute = self.invocation.executor(create_display(self.invocation).event_handlers)
        qps = UNKNOWN_QPS
        for number in range(1, MAX_OFFLINE_TRIALS + 1):
            trial_dir = self._run_offline_trial(execute, number, qps, concurrency)
            if trial_dir is None:
                return None
            trial = mlperf_run.measure_offline_trial(trial_dir)
            if trial is None:
                raise UserError(
                    "no_figure",
                    "no request of the trial completed",
                    str(trial_dir),
                    "give --target-qps, or see the errors of the trial",
                )
            qps = trial.samples_per_s
            print_status(
                f"Expected: {qps:,.4g} samples/s, from {trial.duration_s:,.3g} s in {trial_dir}"
            )
            if trial.duration_s >= MIN_TRIAL_FRACTION * self.test.min_duration_ns / 1e9:
                break
        return qps

    def _run_offline_trial(
        self, execute: Execute, number: int, qps: float, concurrency: int | None
    ) -> Path | None:
        """Run a trial of Offline next to the output directory, and return the directory of its run.

        Returns None if the user interrupted it. A trial has prompts of its own, because a server
        could have those of another run in its prefix cache.

        Args:
            execute: Carries out a run.
            number: The number of the trial, from 1.
            qps: The samples/s that are expected, which size the query of the trial.
            concurrency: The most requests in flight, or None to send all at once.
        """
        from loadgen.core.workload import with_unique_prompts

        trial_test = replace(
            self.test, min_duration_ns=self.test.min_duration_ns // OFFLINE_TRIAL_PARTS
        )
        trial = replace(self, test=trial_test, drain_ns=mlperf_run.MAX_WAIT_NS)
        name = f"trial-{number}"
        workload = with_unique_prompts(trial.build_workload(qps, concurrency), name)
        settings = replace(self.settings, out=_unused_sibling(self.output_dir, name))
        summary, trial_dir = execute(workload, settings)
        return None if summary.run.state == "interrupted" else trial_dir

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
            run_spread: How much the result may vary between runs, as `--run-spread` says.
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
        if pass_s > self.test.min_duration_ns / 1e9:
            print_status(
                f"Warning: a run ends with a whole pass of {self.test.samples:,} samples, "
                f"which takes {pass_s:,.0f} s at {qps:g}/s. "
                "Use a --dataset with fewer rows for shorter trials"
            )

    def _create_search_run(
        self, start_qps: float, sustain_factor: float, run_spread: float | None
    ) -> SearchRun:
        """Return what runs the search for the peak, with a display of one line per trial.

        A trial at the first rate is expected to take the minimum duration, or as long as one pass
        of the data set if that is longer. The parameters are those of `find_peak`.
        """
        from loadgen.runs.run_display import create_display
        from loadgen.search.search_run import SearchRun
        from loadgen.search.search_text import QUERIES_UNIT

        load_search, trial_runner, plan = mlperf_run.create_peak_search(
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
        expected_trial_s = max(self.test.min_duration_ns / 1e9, pass_s)
        return SearchRun(
            search=load_search,
            runner=trial_runner,
            plan=plan,
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
    """Return the passed confirmation with the highest load, or None if no rate was confirmed.

    Confirmations are runs of the official length or longer. Trials of kind "confirm" have the
    official length. Trials of kind "sustain" are longer, to show that a rate is sustained. If the
    search found a sustained rate by them, only those of them count in which no queue grew.
    """
    result = search.result
    has_sustained_rate = result.sustained_load is not None and result.length_factor > 1
    kind = "sustain" if has_sustained_rate else "confirm"
    confirmations = [trial for trial in search.results if trial.kind == kind and trial.has_passed]
    if has_sustained_rate:
        confirmations = [trial for trial in confirmations if trial.sustained is not False]
    return max(confirmations, key=_trial_load, default=None)


def _trial_load(trial: TrialResult) -> float:
    return trial.load


def _unused_sibling(directory: Path, suffix: str) -> Path:
    """Return an unused path next to a directory: its name with a suffix, and a number if taken."""
    path = directory.with_name(f"{directory.name}-{suffix}")
    for number in count(2):
        if not path.exists():
            break
        path = directory.with_name(f"{directory.name}-{suffix}-{number}")
    return path
