"""Runs one trial: the load that a search or a sweep names, stored in the folder of the experiment (`experiment.py`).

IO. A trial is an ordinary run that may end early. Over HTTP, the watch examines the records while they arrive. In
virtual time conversations and tasks are looked at while they are simulated. Single requests are simulated whole first,
which costs less than to look on the way; the watch examines their records step by step, and what was decided early is
simulated again up to that instant before anything is written. This module does not choose the next load.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from msgspec.structs import replace

from loadgen.core import format, run_folder, seeds
from loadgen.core.errors import UserError
from loadgen.core.execution import run
from loadgen.core.execution.events import (
    EventHandler,
    LoadStarted,
    Look,
    RunEvent,
    RunningLoad,
    RunPlanned,
    Simulated,
    SimulationStarted,
)
from loadgen.core.execution.run import Execute
from loadgen.core.metrics import columns, outcomes, reasons
from loadgen.core.results import checksums, store
from loadgen.core.results.record import picked
from loadgen.core.results.spool import Tail
from loadgen.core.schedule.arrivals import at_load
from loadgen.core.slo import Slo
from loadgen.core.workload import Closed, Poisson, with_unique_prompts
from loadgen.runs.headline import missed_by
from loadgen.runs.level_figures import figures
from loadgen.search import experiment, failures
from loadgen.search.experiment import StoredSearch
from loadgen.search.load_search import LoadSearch, NextTrial, SearchAnswer, TrialResult
from loadgen.search.watch import BROKEN, Decision, Goal, Watch, that_ended

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from loadgen.core.execution.plan import Settings
    from loadgen.core.metrics.summary import Summary
    from loadgen.core.schedule.schedule import Schedule
    from loadgen.core.workload import Workload

LOOK_S = 5.0
MANY = 400_000  # requests: above this the virtual watch looks less often, since each look reads all rows
ANSWER = experiment.ANSWER
S = 1_000_000_000


class Interrupted(Exception):
    """The user stopped a trial."""


def called(ask: NextTrial) -> str:
    """The name of the folder of a trial."""
    return f"p{ask.number:02d}-{ask.load:.6g}{f'-{ask.kind}' if ask.kind in ('confirm', 'sustain') else ''}"


@dataclass(slots=True)
class Trials:
    """The folder of an experiment, and how its trials are made.

    `make(ask)`: the workload of a trial. `seeded`: each trial gets its own seed. `watched`: a trial may end before its
    full length; it is looked at every `look_s`. `name(ask)`: the name of its folder. `hearers` hear the events of its
    runs.
    """

    folder: Path
    goal: Goal
    make: Callable[[NextTrial], Workload]
    settings: Settings
    seed: int
    seeded: bool = True
    watched: bool = True
    name: Callable[[NextTrial], str] = called
    hearers: tuple[EventHandler, ...] = ()
    look_s: float = LOOK_S
    execute: Execute = field(default_factory=lambda: partial(run.execute, known={}))
    go_on: str = ""  # the command that goes on with the search where it is stopped

    def run(self, ask: NextTrial) -> TrialResult:
        """Run one trial and store its result. Raises Interrupted if the user stopped it, UserError if it cannot run."""
        result = self._run_trial(ask)
        experiment.append(self.folder, result)
        return result

    def _run_trial(self, ask: NextTrial) -> TrialResult:
        workload = self._workload(ask)
        settings = replace(self.settings, out=experiment.unused(self.folder, self.name(ask)))
        planned: RunPlanned | None = None
        watch: Watch | None = None
        decision: Decision | None = None
        following: asyncio.Task[None] | None = None
        simulated: NDArray[np.void] | None = None

        async def follow(watch: Watch, folder: Path, load: RunningLoad) -> None:
            nonlocal decision
            now_ns = 0
            with contextlib.closing(Tail(folder)) as tail:
                while decision is None:
                    await asyncio.sleep(self.look_s)
                    news = tail.rows()
                    now_ns = int(news["done_ns"].max(initial=now_ns))
                    decision = watch.look(now_ns, news)
            load.decided = True
            if decision.at_ns < int(watch.due_ns[-1]):  # later there is nothing left to start
                load.stop()

        def decides(watch: Watch) -> Look:
            def ends(now_ns: int, news: NDArray[np.void]) -> bool:
                nonlocal decision
                decision = watch.look(now_ns, news)
                return decision is not None

            return Look(round(self.look_s * S), ends)

        def hear(event: RunEvent) -> None:
            nonlocal planned, watch, following, simulated, decision
            if isinstance(event, SimulationStarted) and watch is not None and _has_chains(planned):
                event.looks.append(decides(watch))
            elif isinstance(event, Simulated):
                simulated = event.rows[:]
                if watch is not None and decision is None and not _has_chains(planned):
                    decision = self._first_decision(watch, simulated)
                    if decision is not None and decision.at_ns < int(watch.due_ns[-1]):
                        event.stops.append(decision.at_ns)
            elif isinstance(event, RunPlanned):
                planned, watch = event, self._watch(event.plan.schedule, ask)
            elif isinstance(event, LoadStarted) and planned is not None and watch is not None:
                task = follow(watch, planned.plan.job.folder, event.load)
                following = asyncio.get_running_loop().create_task(task)

        try:
            summary, folder = self.execute(workload, settings, (*self.hearers, hear))
        finally:
            if following is not None:
                following.cancel()
        if summary.run.state == "interrupted" and decision is None:
            raise Interrupted
        rows = _measured(store.read_run(folder).rows if simulated is None else simulated, summary)
        return self._result(ask, workload, summary, folder, rows, decision)

    def _first_decision(self, watch: Watch, rows: NDArray[np.void]) -> Decision | None:
        ended = that_ended(rows[np.argsort(rows["done_ns"], kind="stable")])
        return watch.first(ended, round(self.look_s * S) * (1 + len(ended) // MANY))

    def _workload(self, ask: NextTrial) -> Workload:
        workload = self.make(ask)
        if not self.seeded:
            return with_unique_prompts(
                workload.model_copy(update={"seed": self.seed}), self.name(ask)
            )
        seed = seeds.own(self.seed, "probe", ask.number)
        return workload.model_copy(update={"seed": seed, "schedule_seed": None})

    def _watch(self, schedule: Schedule, ask: NextTrial) -> Watch | None:
        """None where the number of requests is not known beforehand: closed loops."""
        if not self.watched or any(span.concurrency for span in schedule.stages):
            return None
        measured = [span for span in schedule.stages if span.measured]
        due = np.concatenate([span.arrivals_ns + (span.start_ns or 0) for span in measured])
        planned = sum(span.slot_count or 0 for span in measured) if schedule.max_turns > 1 else None
        return (
            Watch(
                self.goal,
                due,
                planned=planned,
                early_under=ask.early_under,
                turns=schedule.max_turns,
            )
            if len(due)
            else None
        )

    def _result(
        self,
        ask: NextTrial,
        workload: Workload,
        summary: Summary,
        folder: Path,
        rows: NDArray[np.void],
        decision: Decision | None,
    ) -> TrialResult:
        """`rows`: the measured ones."""
        sent = _due(rows)
        spent = summary.window.whole.duration_s or 0.0
        length_s = _length_s(
            workload, sent
        )  # conversations may be decided after it, by their later turns
        observed_s = length_s if decision is None else min(decision.at_ns / S, length_s)
        first_turns = sent[
            sent["turn"] == 0
        ]  # the load of conversations is the rate at which they begin
        due = first_turns["due_ns"] - (first_turns["due_ns"].min() if len(first_turns) else 0)
        offered = (
            float((due < observed_s * S).sum()) / observed_s
            if observed_s > 0 and not _closed(workload)
            else ask.load
        )
        full = len(due) if decision is None else offered * length_s
        decided = _outcome(self.goal, summary, rows, sent, decision)
        outcome, code, why, _ = _apply_search_rules(decided, ask, self.goal, summary)
        standing = summary.sustainable
        sustained, sustained_why, needed_s = None, "", None
        if decision is None:
            sustained, sustained_why = standing.sustained, standing.why
            needed_s = standing.needed_s if standing.sustained is None else None
        return TrialResult(
            ask=ask,
            outcome=outcome,
            early=decision is not None and outcome != "invalid",
            spent_s=spent,
            # without own seeds all trials share one schedule: there is no difference by chance to correct for
            offered=offered if offered > 0 and self.seeded else ask.load,
            noise=1 / math.sqrt(full) if full > 0 else 0.0,
            why=why,
            code=code,
            folder=folder.name,
            figures=figures(summary),
            sustained=sustained,
            sustained_why=sustained_why,
            needed_s=needed_s,
        )

    def keep(self, search: LoadSearch) -> SearchAnswer:
        """The answer so far; also writes the curve and the capacity file, with what a killed search would leave."""
        answer = search.answer
        ask = NextTrial(number=0, load=answer.load or 1.0, kind="probe", early_under=False)
        experiment.finish(
            self.folder, search.told, answer, workload=self.make(ask), go_on=self.go_on
        )
        return answer

    def finish(self, search: LoadSearch) -> SearchAnswer:
        """The answer of a search; also writes it with its results, the curve and the capacity file."""
        answer = self.keep(search)
        stored = StoredSearch(
            answer=answer,
            simulated=any(result.figures.get("simulated") for result in search.told),
            goal=self.goal.promised,
            told=tuple(search.told),
            seed=self.seed,
            metadata=dict(self.settings.metadata),
            settings=search.settings,
        )
        store.replace(self.folder / ANSWER, format.document(stored))
        checksums.write(self.folder)
        return answer


# -- facts about a trial -----------------------------------------------------------------------------------------------


def retold(folder: Path, result: TrialResult, *, mlperf: bool) -> TrialResult:
    """The result of a stored trial, made again from its records; as told, what records do not show.

    That is what was asked for, what the schedule offered, and how a trial was decided before its end.
    """
    run_of_it = folder / result.folder
    summary = run_folder.kept_summary(run_of_it)
    again = msgspec.structs.replace(
        result, figures=figures(summary), spent_s=summary.window.whole.duration_s or 0.0
    )
    if result.early:
        return again
    stored = store.read_run(run_of_it)
    slo, rows = stored.header.slo or Slo(terms=()), _measured(stored.rows, summary)
    goal = Goal(slo=slo, mlperf=mlperf)
    decided = _outcome(goal, summary, rows, _due(rows), None)
    outcome, code, why, _ = _apply_search_rules(decided, result.ask, goal, summary)
    standing = summary.sustainable
    return msgspec.structs.replace(
        again,
        outcome=outcome,
        code=code,
        why=why,
        sustained=standing.sustained,
        sustained_why=standing.why,
        needed_s=standing.needed_s if standing.sustained is None else None,
    )


def _measured(rows: NDArray[np.void], summary: Summary) -> NDArray[np.void]:
    return picked(
        rows, np.array([stage.measured for stage in summary.stages] or [True])[rows["stage"]]
    )


def _due(rows: NDArray[np.void]) -> NDArray[np.void]:
    """The rows of what was sent, or had to be."""
    return picked(rows, rows["due_ns"] >= 0)


def _outcome(
    goal: Goal,
    summary: Summary,
    rows: NDArray[np.void],
    sent: NDArray[np.void],
    decision: Decision | None,
) -> Decision:
    """Return the outcome of a trial under its SLO.

    It is invalid if the measurement is not sound, else what was decided before its end, else what
    its misses say.
    """
    end_ns = int(rows["done_ns"].max(initial=0))
    if invalid := _invalid(summary, rows, ended_early=decision is not None):
        return Decision("invalid", *invalid, end_ns)
    if decision is not None:
        return decision
    finished = sent[sent["status"] != columns.CANCELLED]
    unfinished = finished["status"] == columns.UNFINISHED
    undecided = outcomes.is_undecided(int(unfinished.sum()), len(finished))
    misses = goal.misses(finished) if goal.names else np.zeros((0, len(finished)), bool)
    missed = misses.sum(axis=1)
    # where too many are unfinished, only what is missed however they would have ended
    left_out = np.zeros(len(missed), int) if undecided else (unfinished & ~misses).sum(axis=1)
    allowed = [goal.allowed(len(finished) - int(out))[i] for i, out in enumerate(left_out)]
    over = [
        f"{count:,} of {format.counted(len(finished), 'request')} miss {name}, {max(most, 0):,} allowed"
        for name, count, most in zip(goal.names, missed, allowed, strict=True)
        if count > most
    ]
    if over:
        return Decision("over", "misses", "; ".join(over), end_ns)
    if summary.goodput.met is False:  # what is promised of tasks, and of the requests of a class
        return Decision("over", "misses", "; ".join(missed_by(summary)), end_ns)
    if undecided and goal.names:
        return Decision(
            "invalid", "unfinished", _undecided(int(unfinished.sum()), len(finished)), end_ns
        )
    return Decision("under", "full_length", "at full length", end_ns)


def _apply_search_rules(
    decided: Decision, trial: NextTrial, goal: Goal, summary: Summary
) -> Decision:
    """Return the outcome of a trial by what a search asks beside the SLO.

    A trial in which the endpoint refused requests for a quota or a rate limit says nothing about
    the load. One in which more than 1 % of the requests failed, or whose load the server did not
    sustain, has failed. By MLPerf's rules that is not required of a run, and of a level of a sweep
    its table says it.
    """
    if trial.kind == "level" or goal.mlperf:
        return decided
    if refusals := failures.describe_refusals(summary.requests):
        return Decision("invalid", failures.REFUSED, refusals, decided.at_ns)
    if decided.outcome == "invalid":
        return decided
    if failed := failures.describe_failures(summary.requests):
        return Decision("over", "failures", failed, decided.at_ns)
    if decided.code == "full_length" and summary.sustainable.sustained is False:
        return Decision("over", "not_sustained", summary.sustainable.why, decided.at_ns)
    return decided


def _has_chains(planned: RunPlanned | None) -> bool:
    """Whether the load is made of conversations or tasks. In virtual time such a trial is ended while it is simulated;
    one of single requests is simulated whole, which costs less than to look at it on the way.
    """
    return planned is not None and planned.plan.schedule.max_turns > 1


def _closed(workload: Workload) -> bool:
    return any(isinstance(stage.arrival, Closed) for stage in workload.stages if stage.measured)


def _length_s(workload: Workload, sent: NDArray[np.void]) -> float:
    """The planned duration of the measured load, in seconds."""
    lengths = [stage.duration_ns for stage in workload.stages if stage.measured]
    if lengths and all(lengths):
        return sum(length for length in lengths if length) / S
    if not len(sent):
        return 0.0
    spread = int(sent["due_ns"].max() - sent["due_ns"].min()) / S
    least = [
        stage.at_least.duration_ns / S
        for stage in workload.stages
        if stage.measured and stage.at_least
    ]
    return max(spread, sum(least))


def _invalid(
    summary: Summary, rows: NDArray[np.void], *, ended_early: bool
) -> tuple[str, str] | None:
    """Why a trial says nothing about the load (late generator, or a server that was gone): the code, and in words.

    A trial that `ended_early` counted the misses of what was planned: few requests are enough for that.
    """
    for reason in summary.verdict.codes:
        if reason.code != "too_few" or not ended_early:
            return reason.code, reasons.sentence(reason)
    for term in summary.goodput.slo:
        if term.undecided and (term.metric in summary.unsound or term.low_ms is not None):
            return "withheld", term.undecided
    broken = int(np.isin(rows["kind"], BROKEN).sum())
    if broken > summary.verdict.limits.failure_share * max(len(rows), 1):
        met = f"{broken:,} of {len(rows):,} requests met a server that was gone or ill (connections, resets, 5xx)"
        return "server_gone", met
    return None


def _undecided(unfinished: int, counted: int) -> str:
    return (
        f"{unfinished:,} of {counted:,} requests were unfinished when the drain ended: too many to say whether the SLO "
        "holds; give a longer --grace, or none"
    )


def loaded(workload: Workload, load: float) -> Workload:
    """The workload at another load: the rate of its measured open stages, or the lanes of its closed stages.

    Raises UserError for a stage without a rate.
    """
    for stage in workload.stages:
        if not isinstance(stage.arrival, Closed) and not hasattr(stage.arrival, "rate"):
            what = f"stage {stage.name!r} has no rate to search over"
            raise UserError("unsupported", what, "stages", "give it poisson or constant")
    stages = tuple(
        at_load(stage, load) if stage.measured or isinstance(stage.arrival, Closed) else stage
        for stage in workload.stages
    )
    return workload.model_copy(update={"stages": stages})


def lasting(workload: Workload, lengths: float) -> Workload:
    """The workload of a trial with its stage so many times as long."""
    stages = tuple(
        stage
        if stage.duration_ns is None
        else stage.model_copy(update={"duration_ns": round(stage.duration_ns * lengths)})
        for stage in workload.stages
    )
    return workload.model_copy(update={"stages": stages})


def probing(workload: Workload, length_ns: int) -> Workload:
    """The workload as a trial: its measured stages become one stage of this length, Poisson or closed.

    It starts from an empty server, without warm-up.
    """
    stage = next(stage for stage in workload.stages if stage.measured)
    law = stage.arrival if isinstance(stage.arrival, Closed) else Poisson.model_construct(rate=1.0)
    trial_stage = stage.model_copy(
        update={"arrival": law, "duration_ns": length_ns, "count": None, "at_least": None}
    )
    return workload.model_copy(update={"stages": (trial_stage,)})
