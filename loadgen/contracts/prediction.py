"""Forecast how much load each term of a contract needs, with a simulated server.

Each level is simulated for several times its planned length, starting with an empty server. Then
the records are cut to a series of shorter lengths, and each part is judged as if the run had ended
there. A term needs the shortest length from which on it stays decided.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from loadgen.contracts.evaluate import CostFunction
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
    """Return settings with a simulated target: the preset of the user, or else the default one."""
    if settings.virtual:
        return settings
    return Settings(
        url=f"sim:{PHYSICAL['preset']}",
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
        try:
            simulated_levels.add(plan, _simulate_level(plan, settings, options))
        except (CombinedError, TargetError) as error:
            failed_forecasts[plan.level.name] = LevelForecast(
                name=plan.level.name,
                length_s=0,
                simulated_s=0,
                terms=(),
                failure_reason=str(error),
                fault_codes=codes(error),
            )
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
        ordered_run = replace(run, rows=cast("NDArray[np.void]", rows))
        return cls(ordered_run, session_start_ns[order], rows)

    def cut_to(self, length_s: float) -> RecordedRun:
        """Return the run as if its measured load had ended after this time.

        The records of sessions that started before the end are kept, those of a session all
        together. The manifest and the summary are those that such a shorter run would have.
        """
        manifest = self.run.manifest
        measured_starts_ns = [stage.start_ns for stage in manifest.stages if stage.measured]
        end_ns = min(measured_starts_ns, default=0) + round(length_s * NS_PER_S)
        # The records are in order of the starts of their sessions.
        record_count = int(np.searchsorted(self.session_start_ns, end_ns))
        rows = cast("NDArray[np.void]", self.rows.slice_records(slice(record_count)))
        stages = []
        for stage_number, stage in enumerate(manifest.stages):
            request_count = int((rows["stage"] == stage_number).sum())
            stages.append(_shorten_stage(stage, slots=request_count, end_ns=end_ns))
        manifest = replace(manifest, stages=tuple(stages))
        summary = summarize(manifest, rows, self._assign_gaps_to_stage(), explained=False)
        return replace(self.run, manifest=manifest, rows=rows, summary=summary)

    def _assign_gaps_to_stage(self) -> list[Histogram]:
        """Return a histogram of the times between events of responses for each stage of the run.

        `summarize` requires them by stage, and pools those of the measured stages. They were pooled
        for the full run already, so all of them are assigned to the first measured stage. They are
        not recorded per request, so those of the full run stand for a shorter run.
        """
        stages = self.run.manifest.stages
        gaps = [Histogram() for _ in stages]
        for stage_number, stage in enumerate(stages):
            if stage.measured:
                gaps[stage_number] = self.run.gaps
                break
        return gaps


def _compute_session_starts_ns(run: RecordedRun) -> NDArray[np.int64]:
    """Return, for each record of a run, when the session of its request was scheduled to start.

    The schedule reserves one slot per possible turn for each session: the number of turns of the
    longest session. The slots of a session are adjacent, so the slot number divided by the number
    of turns gives the number of the session. A session starts with its first scheduled request.
    """
    due_ns: NDArray[np.int64] = run.rows["due_ns"]
    turns_per_session = run.manifest.turns_per_session
    if turns_per_session == 1:
        return due_ns
    session_numbers = run.rows["slot"] // turns_per_session
    unique_numbers, session_indexes = np.unique(session_numbers, return_inverse=True)
    latest_ns = np.iinfo(np.int64).max
    start_of_session_ns = np.full(len(unique_numbers), latest_ns)
    # For each record: start_of_session_ns[session_index] = min(itself, due_ns).
    np.minimum.at(start_of_session_ns, session_indexes, due_ns)
    starts_ns: NDArray[np.int64] = start_of_session_ns[session_indexes]
    return starts_ns


def _shorten_stage(stage: StagePlan, *, slots: int, end_ns: int) -> StagePlan:
    """Return a stage with this number of requests that ends at this time at the latest."""
    stage_end_ns = None if stage.end_ns is None else min(stage.end_ns, end_ns)
    return replace(stage, slots=slots, end_ns=stage_end_ns)


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
    factor = _compute_length_factor(plan, options.max_length_factor)
    level = plan.level
    workload = plan.workload
    if plan.duration_ns is not None:
        workload = set_measured_duration(workload, round(plan.duration_ns * factor))
    size_label = ""
    if plan.requests is not None:
        size_label = f" ({format.counted(round(plan.requests * factor), 'request')})"
    runs = []
    for run_number in range(1, level.repeats + 1):
        run_label = f" run {run_number}" if level.repeats > 1 else ""
        options.report_step(f"Simulating {level.name}{run_label}{size_label}")
        run_workload = workload
        if options.seed is not None:
            run_workload = workload.model_copy(update={"seed": options.seed + run_number - 1})
        run = _simulate_run(run_workload, settings, options)
        runs.append(OrderedRun.from_run(replace(run, folder=f"{level.name}/r{run_number}")))
    return tuple(runs)


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
        """Return the load that each term of the level needs.

        The level is judged after its planned load and after the longest simulated one, and then
        after lengths in between, to find the length from which on a term stays decided.
        """
        other_lengths_s = compute_candidate_lengths_s(self.planned_s, self.simulated_s)
        lengths_s = sorted({self.planned_s, *other_lengths_s})
        longest_s = lengths_s[-1]
        planned_verdicts = self.judge_after(self.planned_s)
        longest_verdicts = self.judge_after(longest_s)
        known_verdicts = {self.planned_s: planned_verdicts, longest_s: longest_verdicts}
        needed_lengths_s = self._find_needed_lengths(lengths_s, known_verdicts)
        repeats = self.level.repeats
        terms = []
        verdict_pairs = zip(planned_verdicts, longest_verdicts, strict=True)
        for index, (planned_verdict, longest_verdict) in enumerate(verdict_pairs):
            needed_s = None
            if index in needed_lengths_s:
                needed_s = needed_lengths_s[index] * repeats
            needed_load = NeededLoad(
                requirement=planned_verdict.requirement,
                term=planned_verdict.term,
                needed_s=needed_s,
                outcome=planned_verdict.verdict,
                reason="" if longest_verdict.is_decided else longest_verdict.reason,
            )
            terms.append(needed_load)
        return LevelForecast(
            name=self.level.name,
            length_s=self.planned_s * repeats,
            simulated_s=self.simulated_s * repeats,
            terms=tuple(terms),
        )

    def _find_needed_lengths(
        self,
        lengths_s: Sequence[float],
        known_verdicts: Mapping[float, tuple[TermVerdict, ...]],
    ) -> dict[int, float]:
        """Return the shortest length of a run from which on each term stays decided.

        The level is judged after each length, from the longest to the shortest. A term that is
        undecided at one length is not judged at shorter ones, because it does not stay decided from
        them on.

        Args:
            lengths_s: The lengths of a run, in ascending order.
            known_verdicts: Length -> the verdicts on all terms, for lengths that were judged
                before.

        Returns:
            Index of a term -> its length in seconds, without the terms that stay undecided.
        """
        needed_lengths_s: dict[int, float] = {}
        decided_indexes = list(range(len(known_verdicts[self.planned_s])))
        for length_s in reversed(lengths_s):
            if length_s in known_verdicts:
                verdicts = [known_verdicts[length_s][index] for index in decided_indexes]
            else:
                verdicts = list(self.judge_after(length_s, decided_indexes))
            decided_indexes = [
                index
                for index, verdict in zip(decided_indexes, verdicts, strict=True)
                if verdict.is_decided
            ]
            if not decided_indexes:
                break
            for index in decided_indexes:
                needed_lengths_s[index] = length_s
        return needed_lengths_s

    def judge_after(
        self, length_s: float, term_indexes: Collection[int] | None = None
    ) -> tuple[TermVerdict, ...]:
        """Return the verdicts on the terms of the level as if each run had ended after this time.

        Levels that a term compares this one with are cut to the same fraction of their planned
        length.

        Args:
            length_s: The length of each run.
            term_indexes: The indexes of the terms to judge. None for all.
        """
        level = self.level
        if term_indexes is not None:
            level = _with_terms(level, term_indexes)
        level_names = {level.name}
        level_names.update(term.level for _, term in level.terms_by_requirement())
        length_fraction = length_s / self.planned_s
        measured_levels = {
            name: MeasuredLevel(runs=self.simulated_levels.cut_runs_to(name, length_fraction))
            for name in self.simulated_levels.runs
            if name in level_names
        }
        contract = self.contract.model_copy(update={"levels": (level,)})
        (verdict,) = judge_levels(contract, measured_levels, self.cost_function)
        return verdict.terms


def _with_terms(level: ContractLevel, indices: Collection[int]) -> ContractLevel:
    """Return the level with some of its terms, given by their index among all of them."""
    all_terms = level.terms_by_requirement()
    terms: dict[Requirement, list[ContractTerm]] = {"must": [], "should": []}
    for index in sorted(indices):
        requirement, term = all_terms[index]
        terms[requirement].append(term)
    return level.model_copy(update={"must": tuple(terms["must"]), "should": tuple(terms["should"])})


def compute_candidate_lengths_s(planned_s: float, simulated_s: float) -> list[float]:
    """Return the lengths of a run that are judged besides its planned length, in seconds.

    They are the planned length times integer powers of `LENGTH_RATIO`, from a small fraction of it
    up to the length that was simulated.
    """
    min_power = np.ceil(np.log(MIN_LENGTH_FRACTION) / np.log(LENGTH_RATIO))
    max_power = np.log(simulated_s / planned_s) / np.log(LENGTH_RATIO)
    rounding_tolerance = 1e-9  # `np.arange` excludes its end
    powers = np.arange(min_power, max_power + rounding_tolerance)
    # Power 0 is the planned length itself.
    return [float(planned_s * LENGTH_RATIO**power) for power in powers if power != 0]
