"""Runs the trials of a search or a sweep, and stores their results.

A trial is an ordinary run that may end early, once a monitor has decided its outcome. When the
monitor gets the records of the run depends on the kind of run:

- Over HTTP, it reads them while the workers write them.
- A simulation of sessions calls the monitor at regular intervals.
- A simulation of single requests runs to its end first, which costs less than to interrupt it. The
  monitor then goes through the records step by step. If it decides the trial early, the simulation
  is repeated up to that time.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace

from loadgen.core import format, seeds
from loadgen.core.execution import run
from loadgen.core.execution.events import (
    EventHandler,
    InterimCheck,
    LoadStarted,
    RunEvent,
    RunningLoad,
    RunPlanned,
    Simulated,
    SimulationStarted,
)
from loadgen.core.execution.run import Execute
from loadgen.core.results import checksums, store
from loadgen.core.results.record import select_rows
from loadgen.core.results.record_log import Tail
from loadgen.core.workload import with_unique_prompts
from loadgen.search import capacity_files, experiment
from loadgen.search.capacity_files import ExperimentOutcome
from loadgen.search.experiment import StoredSearch
from loadgen.search.goal import Decision, Goal
from loadgen.search.load_search import LoadSearch
from loadgen.search.search_results import (
    CONFIRMING_KINDS,
    PlannedTrial,
    SearchResult,
    TrialResult,
)
from loadgen.search.trial_monitor import PlannedLoad, TrialMonitor, select_ended
from loadgen.search.trial_outcome import (
    FinishedTrial,
    TrialRecords,
    make_trial_result,
    select_measured,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from loadgen.core.execution.plan import Settings
    from loadgen.core.schedule.schedule import Schedule, ScheduledStage
    from loadgen.core.workload import Workload

NS_PER_S = 1_000_000_000
CHECK_INTERVAL_S = 5.0
"""How often the monitor looks at a running trial."""
ROWS_PER_CHECK_INTERVAL = 400_000
"""For each so many records, the interval between the checks of a simulation grows by its length."""
TRIAL_SEED_STREAM = "probe"
"""The name of the random stream from which the seeds of trials are drawn. A change changes them."""


class TrialInterruptedError(Exception):
    """The user stopped a trial."""


def trial_run_name(trial: PlannedTrial) -> str:
    """Return the name of the directory of a trial, for example "p03-12.5-confirm"."""
    suffix = f"-{trial.kind}" if trial.kind in CONFIRMING_KINDS else ""
    return f"p{trial.number:02d}-{trial.load:.6g}{suffix}"


@dataclass(slots=True)
class TrialRunner:
    """Runs trials in the directory of an experiment.

    Attributes:
        output_dir: The directory of the experiment, which is a search or a sweep.
        goal: What has to hold for a trial to pass.
        make_workload: Returns the workload of a trial.
        settings: The settings of the target.
        seed: The seed of the experiment.
        has_seed_per_trial: Whether each trial has a seed of its own, and so other arrivals.
        may_end_early: Whether a trial may end before its full length.
        name_run: Returns the name of the directory of a trial.
        event_handlers: Handlers of the events of the runs.
        check_interval_s: How often the monitor looks at a running trial.
        execute: Carries out the run of a trial. What its first request to a target shows is kept
            for all trials.
        resume_command: The command that resumes the search if it is stopped.
    """

    output_dir: Path
    goal: Goal
    make_workload: Callable[[PlannedTrial], Workload]
    settings: Settings
    seed: int
    has_seed_per_trial: bool = True
    may_end_early: bool = True
    name_run: Callable[[PlannedTrial], str] = trial_run_name
    event_handlers: tuple[EventHandler, ...] = ()
    check_interval_s: float = CHECK_INTERVAL_S
    execute: Execute = field(default_factory=lambda: partial(run.execute, probe_cache={}))
    resume_command: str = ""

    def run(self, trial: PlannedTrial) -> TrialResult:
        """Run one trial and store its result.

        Raises TrialInterruptedError if the user stopped it, and UserError if it cannot run.
        """
        finished = self._run_to_end(trial)
        result = make_trial_result(finished, self.goal, has_own_seed=self.has_seed_per_trial)
        experiment.append_result(self.output_dir, result)
        return result

    def save_progress(self, search: LoadSearch) -> SearchResult:
        """Return the result so far, and write it to files in case the search is killed."""
        result = search.result

        # The files identify the requests without their load, so that any load serves here.
        any_load = result.load or 1.0
        capacity_files.write_outputs(
            ExperimentOutcome(self.output_dir, search.results, result),
            self._workload_at(any_load),
            resume_command=self.resume_command,
        )
        return result

    def _workload_at(self, load: float) -> Workload:
        """Return the workload that a trial at this load would send."""
        trial = PlannedTrial(number=0, load=load, kind="probe", may_pass_early=False)
        return self.make_workload(trial)

    def save_result(self, search: LoadSearch) -> SearchResult:
        """Return the result of a search, and write all of its files."""
        result = self.save_progress(search)
        stored = StoredSearch(
            result=result,
            simulated=any(trial.metrics.get("simulated") for trial in search.results),
            term_names=self.goal.term_names,
            trials=tuple(search.results),
            seed=self.seed,
            metadata=dict(self.settings.metadata),
            settings=search.final_settings,
        )
        store.replace(self.output_dir / experiment.RESULT_FILE, format.document(stored))
        checksums.write(self.output_dir)

        return result

    def _run_to_end(self, trial: PlannedTrial) -> FinishedTrial:
        """Run a trial until its end, or until a monitor has decided its outcome.

        The monitor gets the events of the run, and keeps its decision and the simulated records.

        Raises TrialInterruptedError if the user stopped the trial before.
        """
        workload = self._seeded_workload(trial)
        planned_dir = experiment.new_run_dir(self.output_dir, self.name_run(trial))

        monitored_run = _MonitoredRun(
            self.goal, trial, self.check_interval_s, is_monitored=self.may_end_early
        )
        try:
            # If the planned directory cannot be used, the run is written to another one.
            summary, run_dir = self.execute(
                workload,
                replace(self.settings, out=planned_dir),
                (*self.event_handlers, monitored_run.handle),
            )
        finally:
            monitored_run.stop_watching()

        decision = monitored_run.decision
        if summary.run.state == "interrupted" and decision is None:
            raise TrialInterruptedError

        rows = monitored_run.simulated_rows
        if rows is None:
            rows = store.read_run(run_dir).rows

        records = TrialRecords(summary, select_measured(rows, summary))
        return FinishedTrial(trial, workload, records, run_dir, decision)

    def _seeded_workload(self, trial: PlannedTrial) -> Workload:
        """Return the workload of a trial, with its random seed.

        - The trials of a search are independent samples, so each has its own seed, and with it its
          own arrivals, lengths and prompts.
        - The load points of a sweep are compared with each other, so they share one seed and have
          the same arrivals and lengths. Only their prompts differ, so that a server cannot respond
          from the cache that an earlier load point has filled.
        """
        workload = self.make_workload(trial)
        if not self.has_seed_per_trial:
            same_seed = workload.model_copy(update={"seed": self.seed})
            return with_unique_prompts(same_seed, self.name_run(trial))
        seed = seeds.run_seed(self.seed, TRIAL_SEED_STREAM, trial.number)
        # Without a seed of its own, the schedule follows `seed` too.
        return workload.model_copy(update={"seed": seed, "schedule_seed": None})


class _MonitoredRun:
    """One run of a trial, which ends once a monitor has decided its outcome.

    The events of the run call `handle`. A run over HTTP is watched while it goes on. A simulation
    of sessions asks for a decision while it goes on, and one of single requests at its end.

    Attributes:
        decision: The decision that ended the run early, or None.
        simulated_rows: The records of a simulated run. None for a run over HTTP.
    """

    def __init__(
        self, goal: Goal, trial: PlannedTrial, check_interval_s: float, *, is_monitored: bool
    ) -> None:
        """Prepare for a run that has not begun.

        Args:
            goal: What has to hold for the trial to pass.
            trial: The load that is tried.
            check_interval_s: How often a decision is looked for.
            is_monitored: Whether the run may end early. If not, only its records are kept.
        """
        self._goal = goal
        self._trial = trial
        self._check_interval_s = check_interval_s
        self._is_monitored = is_monitored
        self._planned: RunPlanned | None = None
        self._monitor: TrialMonitor | None = None
        self._watch_task: asyncio.Task[None] | None = None
        self.decision: Decision | None = None
        self.simulated_rows: NDArray[np.void] | None = None

    def handle(self, event: RunEvent) -> None:
        """Handle an event of the run. Other events than these are ignored.

        - RunPlanned: create the monitor from the schedule.
        - LoadStarted (a run over HTTP): start a task that reads the records and may stop the load.
        - SimulationStarted: register a check that may end a simulation of sessions.
        - Simulated: keep the records. If the outcome was decided before the end, request that the
          simulation is repeated up to that time, by adding the time to `stops`.
        """
        match event:
            case RunPlanned():
                self._planned = event
                self._monitor = self._make_monitor(event.plan.schedule)
            case LoadStarted():
                self._start_watching(event.load)
            case SimulationStarted() if self._monitor is not None and self._has_sessions:
                event.checks.append(self._make_interim_check(self._monitor))
            case Simulated():
                # A slice of records that are stored by column is one structured array.
                self.simulated_rows = event.rows[:]
                stop_ns = self._find_stop_time(self.simulated_rows)
                if stop_ns is not None:
                    event.stops.append(stop_ns)

    def _start_watching(self, load: RunningLoad) -> None:
        """Start to read the records of a run over HTTP, if the run has a monitor."""
        if self._monitor is None:
            return
        watch = self._watch(self._monitor, load)
        self._watch_task = asyncio.get_running_loop().create_task(watch)

    def stop_watching(self) -> None:
        """Stop reading the records of a run over HTTP."""
        if self._watch_task is not None:
            self._watch_task.cancel()

    @property
    def _has_sessions(self) -> bool:
        """Whether the load consists of conversations or tasks."""
        return self._planned is not None and self._planned.plan.schedule.max_turns > 1

    def _make_monitor(self, schedule: Schedule) -> TrialMonitor | None:
        """Return a monitor of the measured load.

        Return None if the trial is not monitored or sends nothing, and for a closed loop, whose
        number of requests is not known beforehand.
        """
        is_closed_loop = any(stage.concurrency for stage in schedule.stages)
        if is_closed_loop or not self._is_monitored:
            return None
        load = _planned_load(schedule)
        if not len(load.due_ns):
            return None
        return TrialMonitor(self._goal, load, may_pass_early=self._trial.may_pass_early)

    def _select_measured(self, rows: NDArray[np.void]) -> NDArray[np.void]:
        """Return the rows without those of a warm-up."""
        assert self._planned is not None, "rows come after the plan"
        stages = self._planned.plan.schedule.stages
        is_measured = np.array([stage.measured for stage in stages])
        return rows if is_measured.all() else select_rows(rows, is_measured[rows["stage"]])

    async def _watch(self, monitor: TrialMonitor, load: RunningLoad) -> None:
        """Read the records of a run over HTTP until its outcome is decided, then stop its load.

        This runs as a task during the run. The records are read from the log that the workers
        write. They are written with a delay, so that a check counts at the time of the last record
        that was read, and not at the present time.
        """
        assert self._planned is not None, "a load starts after the plan"
        now_ns = 0
        with contextlib.closing(Tail(self._planned.plan.job.folder)) as record_log:
            while self.decision is None:
                await asyncio.sleep(self._check_interval_s)
                new_rows = record_log.rows()
                now_ns = int(new_rows["done_ns"].max(initial=now_ns))
                self._judge_new_rows(monitor, now_ns, new_rows)

        load.decided = True

        # After the last request is due there is nothing left to stop.
        if self.decision.decided_at_ns < monitor.last_due_ns:
            load.stop()

    def _judge_new_rows(
        self, monitor: TrialMonitor, now_ns: int, new_rows: NDArray[np.void]
    ) -> bool:
        """Store the decision at `now_ns`, if there is one, and return whether there is.

        `new_rows` are the records of the requests that have ended since the last call.
        """
        self.decision = monitor.add_rows(now_ns, self._select_measured(new_rows))
        return self.decision is not None

    def _make_interim_check(self, monitor: TrialMonitor) -> InterimCheck:
        """Return the check that ends a simulation of sessions once its outcome is decided.

        The simulation calls it at regular intervals, with the time and the records since the last
        call, and ends when it returns True.
        """
        interval_ns = round(self._check_interval_s * NS_PER_S)
        return InterimCheck(interval_ns, partial(self._judge_new_rows, monitor))

    def _find_stop_time(self, rows: NDArray[np.void]) -> int | None:
        """Return when a simulation of single requests would have been stopped, in ns.

        Such a simulation is computed to its end first. If its outcome was decided before the last
        request was due, it has to be repeated up to that time. Return None if it need not be, which
        is also true of the repetition itself: its outcome is decided already.

        Args:
            rows: The records of all simulated requests.
        """
        monitor = self._monitor
        if monitor is None or self._has_sessions or self.decision is not None:
            return None

        measured_rows = self._select_measured(rows)
        order_of_end = np.argsort(measured_rows["done_ns"], kind="stable")
        ended_rows = select_ended(measured_rows[order_of_end])
        self.decision = monitor.find_first_decision(
            ended_rows, self._interval_ns_for(len(ended_rows))
        )
        if self.decision is None or self.decision.decided_at_ns >= monitor.last_due_ns:
            return None

        return self.decision.decided_at_ns

    def _interval_ns_for(self, row_count: int) -> int:
        """Return the time between two checks of a simulation with so many records, in ns.

        Each check reads all records so far, so that a long simulation is checked less often.
        """
        interval_factor = 1 + row_count // ROWS_PER_CHECK_INTERVAL
        return interval_factor * round(self._check_interval_s * NS_PER_S)


def _planned_load(schedule: Schedule) -> PlannedLoad:
    """Return the measured load of an open-loop schedule: when its requests are due."""
    measured_stages = [stage for stage in schedule.stages if stage.measured]

    # The arrivals of a stage are relative to its start.
    due_ns = np.concatenate(
        [stage.arrivals_ns + (stage.start_ns or 0) for stage in measured_stages]
    )
    has_sessions = schedule.max_turns > 1
    return PlannedLoad(
        due_ns,
        start_ns=measured_stages[0].start_ns or 0,
        # Without sessions each arrival is one request, so that the arrivals are counted instead.
        session_requests=_count_slots(measured_stages) if has_sessions else None,
        max_turns=schedule.max_turns,
    )


def _count_slots(stages: Sequence[ScheduledStage]) -> int:
    """Return the number of planned requests (slots) of stages that know their number."""
    return sum(stage.slot_count or 0 for stage in stages)
