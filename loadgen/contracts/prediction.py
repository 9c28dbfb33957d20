"""Forecast how much load each term of a contract needs, with a simulated server.

Each level is simulated for several times its planned length, starting with an empty server. Then
the records are cut to a series of shorter lengths, and each part is judged as if the run had ended
there. A term needs the shortest length from which on it stays decided.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from loadgen.contracts.evaluate import CostFunction
from loadgen.contracts.fluidity_terms import needs_token_times
from loadgen.contracts.judge import judge_levels
from loadgen.contracts.level_plan import CheckedContract, LevelPlan, set_measured_duration
from loadgen.contracts.recorded_run import MeasuredLevel, RecordedRun
from loadgen.contracts.schema import ContractLevel, Requirement
from loadgen.contracts.stored_validation import read_run
from loadgen.contracts.terms import NS_PER_S, ContractTerm
from loadgen.contracts.verdict import LevelForecast, NeededLoad, TermVerdict
from loadgen.core import format
from loadgen.core.errors import CombinedError, TargetError, codes
from loadgen.core.execution.plan import Settings
from loadgen.core.execution.run import Execute
from loadgen.core.metrics.answer_warnings import add_answer_scores
from loadgen.core.results.manifest import StagePlan
from loadgen.core.results.record import ROW
from loadgen.core.run_summary import summarize
from loadgen.core.stats.histogram import Histogram
from loadgen.core.workload import Workload
from loadgen.sim.record_columns import RecordColumns
from loadgen.sim.server.options import PHYSICAL

MAX_LENGTH_FACTOR = 4.0
"""The length that is simulated, as a multiple of the planned length of a level."""

MAX_REQUESTS = 60_000
"""The largest number of simulated requests of a level. More would take minutes."""

LENGTH_RATIO = 2**0.25
"""The ratio of one judged length to the next one: the needed load is known to 19 %."""

MIN_LENGTH_FRACTION = 1 / 16
"""The shortest judged length, as a fraction of the planned length."""

JUDGING_TIME_FRACTION = 0.5
"""The time to judge the runs of a level at every length, relative to the time to simulate them.

Only the progress bar uses this estimate.
"""

ReportStep = Callable[[str], None]
"""A function that is called with the name of each step of the forecast when the step begins."""


def _ignore_step(name: str) -> None:
    """Do not report a step."""


@dataclass(frozen=True, kw_only=True)
class ForecastOptions:
    """How a forecast is made.

    Attributes:
        execute: Runs a workload.
        cost_function: Computes costs. None if there are no prices.
        seed: The seed of the first run of each level, instead of that of its workload.
        max_length_factor: The length that is simulated, as a multiple of the planned length. It is
            less if a level would have more than `MAX_REQUESTS`, but at least 1.
        report_step: A function that is called when a step begins. `estimate_step_weights` returns
            the expected time of each step.
    """

    execute: Execute
    cost_function: CostFunction | None = None
    seed: int | None = None
    max_length_factor: float = MAX_LENGTH_FACTOR
    report_step: ReportStep = _ignore_step


def create_simulated_settings(settings: Settings) -> Settings:
    """Return settings with a simulated target, for a forecast that must send no requests.

    A simulated target of the user is used as it is. Otherwise the default preset of the simulated
    server takes the place of the real one. What is specific to the real server, such as its API key
    and model, is left out.
    """
    if settings.virtual:
        return settings

    default_preset = PHYSICAL["preset"]
    return Settings(
        url=f"sim:{default_preset}",
        gpus=settings.gpus,
        shape=settings.shape,
        command=settings.command,
    )


def estimate_step_weights(checked_contract: CheckedContract) -> list[float]:
    """Return the expected time of each step of a forecast, in arbitrary units.

    A progress bar needs this. There is one step per simulated run, followed by one step per level
    to judge its runs. Their time grows with the number of requests, and is 0 if this number is not
    known before the run.
    """
    simulation_weights = []
    judging_weights = []
    for plan in checked_contract.levels:
        planned_requests = 0 if plan.requests is None else plan.requests
        requests_per_run = planned_requests * _compute_length_factor(plan, MAX_LENGTH_FACTOR)
        repeats = plan.level.repeats
        simulation_weights += [requests_per_run] * repeats
        judging_weights.append(JUDGING_TIME_FRACTION * requests_per_run * repeats)

    return simulation_weights + judging_weights


def forecast_levels(
    checked_contract: CheckedContract, settings: Settings, options: ForecastOptions
) -> tuple[LevelForecast, ...]:
    """Return the load that each term of a contract needs on a simulated server, for each level.

    All levels are simulated before the first is judged, because a term may compare two of them. The
    forecast of a level that cannot be simulated has the reason and no terms.

    Args:
        checked_contract: The contract.
        settings: The simulated target.
        options: How the forecast is made.
    """
    simulated_levels = SimulatedLevels()
    failed_forecasts: dict[str, LevelForecast] = {}
    for plan in checked_contract.levels:
        name = plan.level.name
        try:
            simulated_levels.add(plan, _simulate_level(plan, settings, options))
        except (CombinedError, TargetError) as error:
            failed_forecasts[name] = _create_failed_forecast(name, error)

    forecasts = []
    for plan in checked_contract.levels:
        name = plan.level.name
        if name in failed_forecasts:
            forecasts.append(failed_forecasts[name])
            continue

        options.report_step(f"Judging {name}")
        forecaster = LevelForecaster(
            checked_contract, plan.level, simulated_levels, options.cost_function
        )
        forecasts.append(forecaster.forecast())

    return tuple(forecasts)


def _create_failed_forecast(level: str, error: CombinedError | TargetError) -> LevelForecast:
    """Return the forecast of a level that could not be simulated, with the reason."""
    return LevelForecast(
        name=level,
        length_s=0,
        simulated_s=0,
        terms=(),
        failure_reason=str(error),
        fault_codes=codes(error),
    )


# -- simulated runs -------------------------------------------------------------------------------


class OrderedRun(NamedTuple):
    """A run whose records are ordered by the time at which their session started.

    A session is a conversation, a task, or a single request. In this order, the records of a
    shorter run are the first part of the records, so that it needs no copy of them.

    Attributes:
        run: The run.
        session_start_ns: The scheduled start of the session of each record.
        rows: The records.
    """

    run: RecordedRun
    session_start_ns: NDArray[np.int64]
    rows: RecordColumns

    @classmethod
    def from_run(cls, run: RecordedRun) -> OrderedRun:
        """Order the records of a run by the start of their session."""
        session_start_ns = _compute_session_starts_ns(run)
        order = np.argsort(session_start_ns, kind="stable")
        columns = {name: run.rows[name][order] for name in ROW.names or ()}
        rows = RecordColumns(len(order), columns)
        ordered_run = replace(run, rows=_as_record_array(rows))
        return cls(ordered_run, session_start_ns[order], rows)

    def cut_to(self, length_s: float) -> RecordedRun:
        """Return the run as if its measured load had ended after this time, in seconds.

        A session that started before the end keeps all its records, also those after the end. The
        manifest and the summary become those of the shorter run.
        """
        end_ns = self._compute_end_ns(length_s)
        # The records are in order of session starts, so those before the end come first.
        record_count = int((self.session_start_ns < end_ns).sum())
        rows = _as_record_array(self.rows.slice_records(slice(record_count)))
        manifest = replace(self.run.manifest, stages=self._shorten_stages(rows, end_ns))
        summary = summarize(manifest, rows, self._list_event_gaps(), explained=False)
        if self.run.scored_answers is not None:
            # Only the answers to requests of the shorter run count.
            summary = add_answer_scores(summary, manifest, rows, self.run.scored_answers)
        return replace(self.run, manifest=manifest, rows=rows, summary=summary)

    def _compute_end_ns(self, length_s: float) -> int:
        """Return the time at which the measured load has lasted this long.

        A run consists of stages, such as a warm-up and a steady load, of which some are measured.
        """
        measured_starts_ns = [
            stage.start_ns for stage in self.run.manifest.stages if stage.measured
        ]
        return min(measured_starts_ns, default=0) + round(length_s * NS_PER_S)

    def _shorten_stages(self, rows: NDArray[np.void], end_ns: int) -> tuple[StagePlan, ...]:
        """Return the stages of the run with an earlier end, for the records that remain."""
        stages = []
        for stage_number, stage in enumerate(self.run.manifest.stages):
            request_count = int((rows["stage"] == stage_number).sum())
            stage_end_ns = None if stage.end_ns is None else min(stage.end_ns, end_ns)
            stages.append(replace(stage, slots=request_count, end_ns=stage_end_ns))
        return tuple(stages)

    def _list_event_gaps(self) -> list[Histogram]:
        """Return the times between events of streamed responses, as one histogram per stage.

        A stage is a part of the run, such as the warm-up. `summarize` adds up the histograms of all
        measured stages. Only this total is known, so it takes the place of the first measured
        stage, and all other histograms are empty. The times are not recorded per request, so a
        shorter run keeps the histogram of the full run.
        """
        histograms = []
        has_total = False
        for stage in self.run.manifest.stages:
            if stage.measured and not has_total:
                histograms.append(self.run.gaps)
                has_total = True
            else:
                histograms.append(Histogram())

        return histograms


def _as_record_array(rows: RecordColumns) -> NDArray[np.void]:
    """Return columns of records in the place of an array of records.

    Both are only read by column, as in `rows["due_ns"]`.
    """
    return cast("NDArray[np.void]", rows)


def _compute_session_starts_ns(run: RecordedRun) -> NDArray[np.int64]:
    """Return, for each record of a run, when the session of its request was scheduled to start.

    A session is a conversation or task of several requests (turns) and starts with its first
    scheduled request. The number of a session follows from the schedule, which numbers places for
    requests (slots) such that each session has the same number of adjacent slots. With 4 turns per
    session, slots 0 to 3 belong to session 0 and slots 4 to 7 to session 1.
    """
    due_ns: NDArray[np.int64] = run.rows["due_ns"]
    turns_per_session = run.manifest.turns_per_session
    if turns_per_session == 1 or len(due_ns) == 0:
        return due_ns

    session_numbers = run.rows["slot"] // turns_per_session
    earliest_due_ns = np.full(session_numbers.max() + 1, np.iinfo(np.int64).max)

    # For each record: earliest_due_ns[its session] = min(earliest_due_ns[its session], its due_ns).
    np.minimum.at(earliest_due_ns, session_numbers, due_ns)
    starts_ns: NDArray[np.int64] = earliest_due_ns[session_numbers]
    return starts_ns


def _compute_length_factor(plan: LevelPlan, max_factor: float) -> float:
    """Return the length that is simulated as a multiple of the planned length of a level.

    It is at most `max_factor`, less for a level with many requests, and at least 1.
    """
    if not plan.requests:
        return max_factor
    planned_requests = plan.requests * plan.level.repeats
    factor_for_max_requests = MAX_REQUESTS / planned_requests
    return max(1.0, min(max_factor, factor_for_max_requests))


def _simulate_level(
    plan: LevelPlan, settings: Settings, options: ForecastOptions
) -> tuple[OrderedRun, ...]:
    """Return simulated runs of a level, each several times as long as planned.

    Each run is later judged as if it had ended earlier, so that one long run shows what loads of
    many lengths would decide.

    Args:
        plan: The planned load of the level.
        settings: The simulated target.
        options: How the forecast is made.
    """
    length_factor = _compute_length_factor(plan, options.max_length_factor)
    workload = plan.workload
    if plan.duration_ns is not None:
        workload = set_measured_duration(workload, round(plan.duration_ns * length_factor))

    level = plan.level
    if needs_token_times(level):
        settings = replace(settings, keep="gaps")
    runs = []
    for run_number in range(1, level.repeats + 1):
        options.report_step(_format_simulation_step(plan, run_number, length_factor))
        run_workload = _set_seed_of_run(workload, options.seed, run_number)
        run = _simulate_run(run_workload, settings, options)
        named_run = replace(run, folder=f"{level.name}/r{run_number}")
        runs.append(OrderedRun.from_run(named_run))

    return tuple(runs)


def _set_seed_of_run(workload: Workload, first_seed: int | None, run_number: int) -> Workload:
    """Return the workload of one run of a level, so that each run has another seed.

    Args:
        workload: The workload of the level.
        first_seed: The seed of the first run. None to keep the seed of the workload file.
        run_number: The number of the run in the level, from 1.
    """
    if first_seed is None:
        return workload
    run_seed = first_seed + run_number - 1
    return workload.model_copy(update={"seed": run_seed})


def _format_simulation_step(plan: LevelPlan, run_number: int, length_factor: float) -> str:
    """Return the progress label of a simulated run, such as "Simulating chat run 2 (900 requests)".

    Args:
        plan: The planned load of the level.
        run_number: The number of the run in the level, from 1.
        length_factor: The length of the run as a multiple of the planned length.
    """
    run_label = f" run {run_number}" if plan.level.repeats > 1 else ""
    size_label = ""
    if plan.requests is not None:
        simulated_requests = round(plan.requests * length_factor)
        size_label = f" ({format.counted(simulated_requests, 'request')})"
    return f"Simulating {plan.level.name}{run_label}{size_label}"


def _simulate_run(workload: Workload, settings: Settings, options: ForecastOptions) -> RecordedRun:
    """Return the records of a simulated run, whose files are deleted."""
    with tempfile.TemporaryDirectory() as directory:
        run_settings = replace(settings, out=Path(directory) / "run")
        _, run_dir = options.execute(workload, run_settings)
        return read_run(run_dir, Path(directory))


def compute_measured_length_s(run: RecordedRun) -> float:
    """Return how long the measured load of a run was, in seconds.

    Stages that end by a number of requests have no planned end. Then the load lasts from the first
    to the last scheduled request.
    """
    planned_ns = [
        stage.end_ns - stage.start_ns
        for stage in run.manifest.stages
        if stage.measured and stage.end_ns is not None
    ]
    if planned_ns:
        return sum(length_ns / NS_PER_S for length_ns in planned_ns)

    due_ns = run.columns()["due_ns"]
    return float(due_ns.max() - due_ns.min()) / NS_PER_S


@dataclass
class SimulatedLevels:
    """The simulated runs of the levels of a contract, and the same runs cut to shorter lengths.

    Attributes:
        runs: Level -> its runs.
        planned_s: Level -> the planned length of a run, at most the length that was simulated.
        cut_runs: Level and fraction of the planned length -> the runs that were cut to it.
    """

    runs: dict[str, tuple[OrderedRun, ...]] = field(default_factory=dict)
    planned_s: dict[str, float] = field(default_factory=dict)
    cut_runs: dict[tuple[str, float], tuple[RecordedRun, ...]] = field(default_factory=dict)

    def add(self, plan: LevelPlan, runs: tuple[OrderedRun, ...]) -> None:
        """Add the runs of a level."""
        name = plan.level.name
        self.runs[name] = runs
        self.planned_s[name] = self.simulated_s(name)
        if plan.duration_ns is not None:
            self.planned_s[name] = min(plan.duration_ns / NS_PER_S, self.simulated_s(name))

    def simulated_s(self, level: str) -> float:
        """Return the length of one simulated run of a level."""
        return compute_measured_length_s(self.runs[level][0].run)

    def cut_runs_to(self, level: str, length_fraction: float) -> tuple[RecordedRun, ...]:
        """Return the runs of a level as if they had ended after a fraction of their planned length.

        The result is cached, because several levels may be compared with the same one.
        """
        key = (level, length_fraction)
        if key not in self.cut_runs:
            length_s = length_fraction * self.planned_s[level]
            self.cut_runs[key] = tuple(run.cut_to(length_s) for run in self.runs[level])
        return self.cut_runs[key]


# -- the forecast of a level ----------------------------------------------------------------------


class LevelForecaster:
    """Finds the load that each term of one level needs for a decision.

    Attributes:
        contract: The contract.
        level: The level.
        simulated_levels: The simulated runs of all levels, because a term may compare two levels.
        cost_function: Computes costs. None if there are no prices.
        planned_s: The planned length of a run of the level.
        simulated_s: The length of a simulated run of the level, which is several times as long.
    """

    def __init__(
        self,
        checked_contract: CheckedContract,
        level: ContractLevel,
        simulated_levels: SimulatedLevels,
        cost_function: CostFunction | None,
    ) -> None:
        """Create a forecaster for a level of a contract whose levels were simulated.

        Args:
            checked_contract: The contract.
            level: The level.
            simulated_levels: The simulated runs of all levels.
            cost_function: Computes costs. None if there are no prices.
        """
        self.contract = checked_contract.contract
        self.level = level
        self.simulated_levels = simulated_levels
        self.cost_function = cost_function
        self.planned_s = simulated_levels.planned_s[level.name]
        self.simulated_s = simulated_levels.simulated_s(level.name)

    def forecast(self) -> LevelForecast:
        """Return the load that each term of the level needs to be decided.

        Adding load can also make a decided term undecided again, so a term needs the shortest
        length after which it is decided at every longer length too.
        """
        candidate_lengths_s = compute_candidate_lengths_s(self.planned_s, self.simulated_s)
        lengths_s = sorted({self.planned_s, *candidate_lengths_s})
        longest_s = lengths_s[-1]
        planned_verdicts = self.judge_after(self.planned_s)
        longest_verdicts = self.judge_after(longest_s)
        known_verdicts = {self.planned_s: planned_verdicts, longest_s: longest_verdicts}
        needed_lengths_s = self._find_needed_lengths(lengths_s, known_verdicts)
        terms = [
            self._create_needed_load(planned_verdict, longest_verdict, needed_length_s)
            for planned_verdict, longest_verdict, needed_length_s in zip(
                planned_verdicts, longest_verdicts, needed_lengths_s, strict=True
            )
        ]

        return LevelForecast(
            name=self.level.name,
            length_s=self.planned_s * self.level.repeats,
            simulated_s=self.simulated_s * self.level.repeats,
            terms=tuple(terms),
        )

    def _create_needed_load(
        self,
        planned_verdict: TermVerdict,
        longest_verdict: TermVerdict,
        needed_length_s: float | None,
    ) -> NeededLoad:
        """Return the load that a term needs, with the verdict that is expected of it.

        The needed load is that of all runs of the level together. A term that even the longest
        simulated load does not decide has the reason for it.

        Args:
            planned_verdict: The verdict on the term after the planned load.
            longest_verdict: The verdict on the term after the longest simulated load.
            needed_length_s: How long each run has to be. None if no simulated length is enough.
        """
        return NeededLoad(
            requirement=planned_verdict.requirement,
            term=planned_verdict.term,
            needed_s=None if needed_length_s is None else needed_length_s * self.level.repeats,
            outcome=planned_verdict.verdict,
            reason="" if longest_verdict.is_decided else longest_verdict.reason,
        )

    def _find_needed_lengths(
        self,
        lengths_s: Sequence[float],
        known_verdicts: Mapping[float, tuple[TermVerdict, ...]],
    ) -> list[float | None]:
        """Return how long each run has to be for each term of the level to be decided, in seconds.

        The lengths are tried from the longest to the shortest. A term that is undecided at some
        length is not judged at shorter ones. It needs the last length at which it was decided.

        Args:
            lengths_s: The lengths of a run to try, in ascending order.
            known_verdicts: Length -> the verdicts on all terms, for lengths that were judged
                before: at least the planned length.

        Returns:
            One length per term, or None for a term that is undecided after the longest length.
        """
        term_count = len(known_verdicts[self.planned_s])
        needed_lengths_s: list[float | None] = [None] * term_count

        decided_terms = list(range(term_count))  # the indexes of terms decided at all lengths yet
        for length_s in reversed(lengths_s):
            decided_terms = self._find_decided_terms(length_s, decided_terms, known_verdicts)
            for index in decided_terms:
                needed_lengths_s[index] = length_s

        return needed_lengths_s

    def _find_decided_terms(
        self,
        length_s: float,
        term_indexes: Sequence[int],
        known_verdicts: Mapping[float, tuple[TermVerdict, ...]],
    ) -> list[int]:
        """Return which of some terms are decided after runs of this length.

        Args:
            length_s: The length of each run.
            term_indexes: The indexes of the terms, in ascending order.
            known_verdicts: Length -> the verdicts on all terms, for lengths that were judged
                before. Judging takes long, so they are not judged again.
        """
        if not term_indexes:
            return []

        if length_s in known_verdicts:
            all_verdicts = known_verdicts[length_s]
            return [index for index in term_indexes if all_verdicts[index].is_decided]

        verdicts = self.judge_after(length_s, term_indexes)
        return [
            index
            for index, verdict in zip(term_indexes, verdicts, strict=True)
            if verdict.is_decided
        ]

    def judge_after(
        self, length_s: float, term_indexes: Collection[int] | None = None
    ) -> tuple[TermVerdict, ...]:
        """Return the verdicts on the terms of the level as if each run had ended after this time.

        Args:
            length_s: The length of each run.
            term_indexes: The indexes of the terms to judge. None for all.
        """
        level = self.level
        if term_indexes is not None:
            level = _with_terms(level, term_indexes)
        contract_of_level = self.contract.model_copy(update={"levels": (level,)})
        measured_levels = self._shorten_runs(level, length_s / self.planned_s)
        (level_verdict,) = judge_levels(contract_of_level, measured_levels, self.cost_function)
        return level_verdict.terms

    def _shorten_runs(
        self, level: ContractLevel, length_fraction: float
    ) -> dict[str, MeasuredLevel]:
        """Return the shortened runs of a level and of the levels that its terms compare it with.

        Args:
            level: The level.
            length_fraction: The length of the runs as a fraction of the planned length of their
                level.

        Returns:
            Name of a level -> its runs.
        """
        level_names = {level.name}
        for _, term in level.terms_by_requirement():
            level_names.add(term.level)  # "" for a term that compares no levels

        return {
            name: MeasuredLevel(runs=self.simulated_levels.cut_runs_to(name, length_fraction))
            for name in self.simulated_levels.runs
            if name in level_names
        }


def _with_terms(level: ContractLevel, term_indexes: Collection[int]) -> ContractLevel:
    """Return the level with some of its terms.

    Args:
        level: The level.
        term_indexes: The indexes of the terms to keep, in the list of all terms of the level
            (`must` before `should`).
    """
    all_terms = level.terms_by_requirement()
    terms: dict[Requirement, list[ContractTerm]] = {"must": [], "should": []}
    for index in sorted(term_indexes):
        requirement, term = all_terms[index]
        terms[requirement].append(term)
    return level.model_copy(update={"must": tuple(terms["must"]), "should": tuple(terms["should"])})


def compute_candidate_lengths_s(planned_s: float, simulated_s: float) -> list[float]:
    """Return the lengths of a run that are tried in a forecast, other than its planned length.

    They form a geometric series around the planned length: with a `LENGTH_RATIO` of 2 and a planned
    length of 60 s, they would be ..., 15, 30, 120, 240, ... seconds. The series begins at
    `MIN_LENGTH_FRACTION` of the planned length and ends at the simulated length.

    Args:
        planned_s: The planned length of a run.
        simulated_s: The length of the simulated run.
    """
    # A planned length times the ratio to the power of n is in the range for these n.
    min_power = math.ceil(math.log(MIN_LENGTH_FRACTION, LENGTH_RATIO))
    # The simulated length may be such a length, and must then not be lost by rounding.
    rounding_tolerance = 1e-9
    max_power = math.floor(math.log(simulated_s / planned_s, LENGTH_RATIO) + rounding_tolerance)
    powers = [power for power in range(min_power, max_power + 1) if power != 0]
    return [planned_s * LENGTH_RATIO**power for power in powers]
