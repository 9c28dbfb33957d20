"""Turns the options of `loadgen search` into a search, the runner of its trials and its plan."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from loadgen.cli.option_parsers import parse_option, parse_share_option
from loadgen.cli.options import default_output_folder
from loadgen.cli.settings import request_options
from loadgen.core import units
from loadgen.core.errors import CombinedError, LoadgenError, UserError, collecting
from loadgen.core.execution import run_manifest
from loadgen.core.execution.backend import filling_rate, known
from loadgen.core.metrics.sustainable import CONFIRMATION_FACTOR
from loadgen.core.slo import (
    ANSWERS,
    ATTAINMENT,
    Slo,
    describe_answers_share,
    describe_fluidity_term,
    describe_task_limits,
)
from loadgen.core.workload import Closed, Mix, Workload
from loadgen.core.workload.flags import select_load_options
from loadgen.repeated import capacity
from loadgen.search import experiment
from loadgen.search.agent_capacity import (
    PRESET_PROVISIONED_KW_KEY,
    SESSIONS,
    tier_objectives,
)
from loadgen.search.experiment import ExperimentPlan
from loadgen.search.goal import Goal
from loadgen.search.load_search import LoadSearch
from loadgen.search.search_settings import BRACKET_STEP, ESTIMATE_STEP, SearchSettings
from loadgen.search.trial_runner import TrialRunner
from loadgen.search.trial_workload import TrialWorkloadFactory, as_trial_workload

if TYPE_CHECKING:
    from loadgen.cli.invocation import Invocation
    from loadgen.core.execution.plan import Settings
    from loadgen.core.results.manifest import ClassPlan

NS_PER_S = 1_000_000_000
NS_PER_MS = 1e6
LOAD_KINDS = ("rate", "concurrency", SESSIONS)
LOWEST_RATE = 1e-3
"""The lowest rate that a search tries if the options name none: four requests per hour."""
HIGHEST_LOAD = 1e6
"""The highest load that a search tries if the options name none."""
DEFAULT_FIRST_LOAD = 1.0
MAX_RUN_SPREAD = 0.2
MIN_PRECISION = 0.002
MAX_PRECISION = 0.5
PLACEHOLDER_DURATION = "600s"
"""The duration with which the workload is loaded and checked if the options name none.

The trials get their own duration afterwards.
"""

PLAN_OPTIONS = ("slo", "goodput", "duration", "warmup", "limit", "grace", "seed")
"""Options of the load that a plan has in another form, or not at all: every trial has its own seed.
"""


@dataclass(frozen=True)
class SearchOptions:
    """The options of `loadgen search` itself, as they were typed.

    Attributes:
        percentile: The percentile of the SLO terms that name none.
        over: Whether the loads are rates, numbers of virtual users, or numbers of sessions.
        tier: A tier of output speed and TTFT that takes the place of the SLO, or None.
        low: The lowest load.
        high: The highest load.
        start: The first load.
        precision: The relative precision of the result.
        max_trials: The largest number of trials.
        max_time: The longest time of all trials together.
        sustain: Whether longer trials have to show that the load is sustained: True with --sustain,
            False with --no-sustain, and None without either option.
        run_spread: The variation of the server from run to run.
    """

    percentile: str | None
    over: str
    tier: str | None
    low: float | None
    high: float | None
    start: float | None
    precision: str
    max_trials: int
    max_time: str | None
    sustain: bool | None
    run_spread: str | None

    @property
    def is_closed_loop(self) -> bool:
        """Whether the loads are numbers of virtual users."""
        return self.over in ("concurrency", SESSIONS)

    @property
    def has_first_load(self) -> bool:
        """Whether the options name a load to begin with."""
        return bool(self.start or self.low)

    @property
    def first_load(self) -> float:
        """The load to begin with if nothing better is known."""
        return self.start or self.low or DEFAULT_FIRST_LOAD


class PlannedSearch(NamedTuple):
    """A search that is ready to be carried out.

    Attributes:
        search: The search, without any result.
        runner: Runs its trials.
        plan: What was requested.
        trial_s: The full length of the load of a trial.
        unit: The unit of the loads, as it is written after a number.
        is_load_known: Whether the first load is near the capacity.
    """

    search: LoadSearch
    runner: TrialRunner
    plan: ExperimentPlan
    trial_s: float
    unit: str
    is_load_known: bool


class LoadRange(NamedTuple):
    """The lowest and the highest load that a search may try."""

    low: float
    high: float


class CheckedOptions(NamedTuple):
    """The options of a search after they were parsed and checked.

    Attributes:
        options: The options as they were typed.
        workload_name: The workload as it was typed, or None.
        resume_dir: The directory of a search to resume, or None.
        settings: The settings of the target.
        workload: The workload at the first load.
        goal: What has to hold.
        trial_ns: The full length of the load of a trial.
        warmup_ns: The length of the warm-up before each trial; 0 for none.
        precision: The relative precision of the result.
        run_spread: The variation of the server from run to run, or None if it is not known.
        max_time_s: The longest time of all trials together, or None.
    """

    options: SearchOptions
    workload_name: str | None
    resume_dir: Path | None
    settings: Settings
    workload: Workload
    goal: Goal
    trial_ns: int
    warmup_ns: int
    precision: float
    run_spread: float | None
    max_time_s: float | None


def plan_search(invocation: Invocation, checked: CheckedOptions) -> PlannedSearch:
    """Return the search that the options of `loadgen search` describe, before any trial has run.

    Args:
        invocation: The options that all commands have in common.
        checked: All options after they were parsed and checked.
    """
    options = checked.options
    trial_workload = as_trial_workload(checked.workload, checked.trial_ns)
    runner = _create_runner(checked, trial_workload)
    plan = _experiment_plan(invocation, checked, runner.seed)
    estimated_capacity = _estimate_capacity(checked)
    counted_unit = experiment.find_counted_unit(trial_workload)

    return PlannedSearch(
        search=LoadSearch(_search_settings(checked, trial_workload, estimated_capacity)),
        runner=runner,
        plan=plan,
        trial_s=checked.trial_ns / NS_PER_S,
        unit=experiment.load_unit(plan, counted_unit),
        is_load_known=options.has_first_load or estimated_capacity is not None,
    )


def _create_runner(checked: CheckedOptions, trial_workload: Workload) -> TrialRunner:
    """Return the runner of the trials, each of which sends `trial_workload` at its own load."""
    output_dir = _choose_output_dir(checked)
    return TrialRunner(
        output_dir=output_dir,
        goal=checked.goal,
        make_workload=TrialWorkloadFactory(trial_workload, checked.warmup_ns).make_workload,
        settings=checked.settings,
        seed=experiment.choose_seed(output_dir, checked.workload.seed),
    )


def _estimate_capacity(checked: CheckedOptions) -> float | None:
    """Return a rough estimate of the capacity, near which the search begins, or None.

    Only a simulated target can estimate the rate at which it is fully used. There is no estimate
    if the options name a first load, or for a search over numbers of virtual users.
    """
    options = checked.options
    if options.is_closed_loop or options.has_first_load:
        return None
    return filling_rate(checked.workload, checked.settings)


def _choose_output_dir(checked: CheckedOptions) -> Path:
    """Return the directory to resume, else that of --out, else a new one with a default name."""
    if checked.resume_dir is not None:
        return checked.resume_dir
    return checked.settings.out or default_output_folder(f"search-{checked.workload.name}")


def _experiment_plan(invocation: Invocation, checked: CheckedOptions, seed: int) -> ExperimentPlan:
    """Return what the options ask for, in the form in which `plan.json` stores it."""
    settings = checked.settings
    workload_source = invocation["trace"] or invocation["dataset"] or checked.workload.name
    return ExperimentPlan(
        command_name="search",
        load_kind="concurrency" if checked.options.is_closed_loop else "request_rate",
        workload=checked.workload_name or str(workload_source),
        source_text=checked.workload.source_text,
        target=settings.display_name,
        metadata=dict(settings.metadata),
        options=_plan_options(invocation, checked),
        seed=seed,
        command=settings.command,
    )


def check_options(
    invocation: Invocation,
    workload_name: str | None,
    options: SearchOptions,
    resume_dir: Path | None,
) -> CheckedOptions:
    """Parse and check the options of `loadgen search`, and load its workload.

    All mistakes are reported at once: `collecting` adds the first error of each block to a list.

    Args:
        invocation: The options that all commands have in common.
        workload_name: The workload as it was typed, or None.
        options: The options of the search itself.
        resume_dir: The directory of a search to resume, or None.

    Raises:
        UserError: The kind of load is not known, so that nothing else can be checked.
        CombinedError: Everything else that is wrong.
    """
    _check_load_kind(options.over)
    errors: list[LoadgenError] = []
    with collecting(errors):
        settings = _with_provisioned_power(invocation.settings(), options)
        run_spread = parse_run_spread(options.run_spread, settings)
        precision = parse_precision(options.precision)

    with collecting(errors):
        workload = _load_workload(invocation, workload_name, options)
        _check_has_sessions(workload, options)
        if not errors:  # The goal depends on the settings.
            goal = _build_goal(workload, settings, workload_name or "loadgen search")
        trial_ns = _parse_trial_length(invocation["duration"], workload)

    with collecting(errors):
        warmup_ns = _parse_warmup(invocation["warmup"], options)

    with collecting(errors):
        max_time_s = parse_option("--max-time", options.max_time, units.seconds)

    with collecting(errors):
        _check_bounds(options.low, options.high)

    if resume_dir is not None:
        with collecting(errors):
            experiment.read_search_plan(resume_dir)

    if errors:
        raise CombinedError(errors)

    # Without an error, every block above has run to its end and set its values.
    return CheckedOptions(
        options=options,
        workload_name=workload_name,
        resume_dir=resume_dir,
        settings=settings,
        workload=workload,
        goal=goal,
        trial_ns=trial_ns,
        warmup_ns=warmup_ns,
        precision=precision,
        run_spread=run_spread,
        max_time_s=max_time_s,
    )


def _with_provisioned_power(settings: Settings, options: SearchOptions) -> Settings:
    """Return the settings of a search over sessions with the power of a simulated system.

    Its runs store the power as metadata. The settings of other searches, and of systems whose power
    is not known, are returned as they are.
    """
    known_target = known(settings) if options.over == SESSIONS else None
    if known_target is None or known_target.provisioned_kw is None:
        return settings

    power = (PRESET_PROVISIONED_KW_KEY, f"{known_target.provisioned_kw:g}")
    return msgspec.structs.replace(settings, metadata=(*settings.metadata, power))


def _check_load_kind(load_kind: str) -> None:
    """Raise UserError unless --over names a kind of load that a search can vary."""
    if load_kind in LOAD_KINDS:
        return
    raise UserError(
        "unknown_name",
        f"unknown load {load_kind!r}",
        "--over",
        f"must be one of {', '.join(LOAD_KINDS)}",
    )


def _check_has_sessions(workload: Workload, options: SearchOptions) -> None:
    """Raise UserError if the search is over sessions, but the workload sends single requests."""
    if options.over != SESSIONS or experiment.find_counted_unit(workload) == "conversations":
        return
    problem = "the workload has no sessions: its requests are no conversations or tasks"
    hint = "use --over concurrency, or a workload of agents such as coding-agent"
    raise UserError("unsupported", problem, "--over sessions", hint)


def _parse_trial_length(text: str | None, workload: Workload) -> int:
    """Return the full length of the load of a trial in ns: --duration, or the default.

    Raises UserError for a text that is not a duration.
    """
    parse_duration = partial(units.duration_ns, default_unit="s")
    trial_ns = parse_option("--duration", text, parse_duration)
    return trial_ns or capacity.default_trial_ns(workload)


def _load_workload(
    invocation: Invocation, workload_name: str | None, options: SearchOptions
) -> Workload:
    """Return the workload at the first load, with the SLO of the options. Raises LoadgenError.

    A workload cannot be loaded without a duration. If --duration is missing, it gets
    PLACEHOLDER_DURATION, which `as_trial_workload` later replaces by the length of a trial. It has
    no warm-up, because the search adds one to each trial by itself.
    """
    load: dict[str, float]
    if options.is_closed_loop:
        load = {"concurrency": max(1, round(options.first_load))}
    else:
        load = {"request_rate": options.first_load}

    return invocation.load_workload(
        workload_name,
        slo=_slo_terms(invocation["slo"] or (), options),
        warmup=0,
        duration=invocation["duration"] or PLACEHOLDER_DURATION,
        **load,
    )


def _slo_terms(typed_terms: Sequence[str], options: SearchOptions) -> tuple[str, ...]:
    """Return the terms of --slo, or those of --tier. Raises UserError if both are used."""
    if options.tier is None:
        return _complete_slo_terms(typed_terms, options.percentile)
    if typed_terms:
        hint = "keep one of them: a tier limits TTFT and TPOT"
        raise UserError("conflict", "--tier and --slo together", f"--tier {options.tier}", hint)
    return tier_objectives(options.tier)


def _complete_slo_terms(typed_terms: Sequence[str], percentile: str | None) -> tuple[str, ...]:
    """Return the terms of --slo, with the value of --percentile added to those that name none.

    With the percentile "95", the term "ttft:2s" becomes "ttft:2s:p95".
    """
    if percentile is None:
        return tuple(typed_terms)
    return tuple(
        f"{term}:p{percentile}" if _needs_percentile(term) else term for term in typed_terms
    )


def _needs_percentile(term: str) -> bool:
    """Return whether a term of --slo has the form METRIC:LIMIT, without a percentile.

    A term with a percentile has the form METRIC:LIMIT:PERCENTILE. The term "attainment:95%", the
    share of requests that have to meet all other terms, takes no percentile. A term that starts
    with "+" is added to the SLO of the workload instead of replacing it.
    """
    is_attainment = term.removeprefix("+").startswith(ATTAINMENT)
    has_two_parts = term.count(":") == 1
    return has_two_parts and not is_attainment


def _build_goal(workload: Workload, settings: Settings, error_location: str) -> Goal:
    """Return what has to hold at a load for a trial to pass: the terms of the SLO.

    Only terms that can be judged with these settings count. Without streaming, for example, no time
    to the first token is known.

    Raises UserError if there is no SLO, or if none of its terms can be judged.

    Args:
        workload: The workload, with the SLO.
        settings: The settings of the target, such as whether responses are streamed.
        error_location: What an error message names as the place where the SLO is missing.
    """
    slo, notes = run_manifest.select_judgeable_terms(workload.slo, settings)
    class_plans, class_notes = run_manifest.plan_classes(workload, settings)

    has_slo_per_class = any(plan.slo != slo for plan in class_plans)
    if has_slo_per_class:
        goal = _goal_of_classes(class_plans)
        notes |= class_notes
    else:
        goal = _goal_of_all_requests(slo or Slo())

    if goal.term_names:
        return goal

    raise _missing_goal_error(notes, settings, error_location)


def _goal_of_classes(class_plans: Sequence[ClassPlan]) -> Goal:
    """Return the goal of a mix whose classes of requests have SLOs of their own.

    No term holds for the requests of all classes. Whether each class has met its SLO is judged
    after a trial has run to its end.
    """
    names = [f"class {plan.name}" for plan in class_plans if plan.slo is not None]
    return Goal(slo=Slo(), full_run_terms=tuple(names))


def _goal_of_all_requests(slo: Slo) -> Goal:
    """Return the goal of a workload whose requests all have the same SLO.

    Objectives of tasks, which are sessions of several requests, of token deadlines and of checked
    answers are judged after a trial has run to its end. The other terms are judged request by
    request.
    """
    full_run_terms = []
    if slo.task is not None:
        full_run_terms.append("tasks")
    if slo.fluidity is not None:
        full_run_terms.append("fluidity")
    if slo.answers_share is not None:
        full_run_terms.append(ANSWERS)
    return Goal(slo=slo, full_run_terms=tuple(full_run_terms))


def _missing_goal_error(
    reasons_not_judged: Collection[str], settings: Settings, error_location: str
) -> UserError:
    """Return the error of a search whose SLO is missing, or has no term that can be judged.

    `reasons_not_judged` are sentences that explain why terms of the SLO cannot be judged.
    """
    if reasons_not_judged:
        problem = f"no objective of the SLO can be evaluated. {next(iter(reasons_not_judged))}"
        return UserError("no_slo", problem, f"--api {settings.api}", "use --slo e2e:500ms")
    hint = "add for example --slo ttft:2s --slo tpot:200ms"
    return UserError("no_slo", "a search needs an SLO", error_location, hint)


def _parse_warmup(text: str | None, options: SearchOptions) -> int:
    """Return the length of the warm-up before each trial; 0 for none. Raises UserError."""
    warmup_ns = parse_option("--warmup", text, partial(units.duration_ns, default_unit="s")) or 0
    if warmup_ns and options.is_closed_loop:
        raise UserError(
            "unsupported",
            "a search over concurrency has no warm-up",
            f"--warmup {text}",
            "remove --warmup, or search over rates",
        )

    return warmup_ns


def _check_bounds(low: float | None, high: float | None) -> None:
    """Raise UserError if the lowest load of a search is not below the highest."""
    if low and high and low >= high:
        where = f"--low {low:g} --high {high:g}"
        hint = "--low must be smaller than --high"
        raise UserError(
            "out_of_range",
            "the lower bound of the search is not below the upper bound",
            where,
            hint,
        )


def parse_run_spread(text: str | None, settings: Settings) -> float | None:
    """Return the variation of the server from run to run, as a share. Raises UserError.

    Return None if it is not known and has to be learned. In virtual time a run repeats itself, so
    it is 0.
    """
    share = parse_option("--run-spread", text, units.share)
    if share is None:
        return 0.0 if settings.virtual else None

    if not 0 <= share <= MAX_RUN_SPREAD:
        raise UserError(
            "out_of_range",
            "must be from 0 % to 20 %",
            f"--run-spread {text}",
            "for example 3%",
        )

    return share


def parse_precision(text: str) -> float:
    """Return the relative precision of a search. Raises UserError."""
    share = parse_share_option("--precision", text)
    if not MIN_PRECISION <= share <= MAX_PRECISION:
        raise UserError(
            "out_of_range", "must be from 0.2 % to 50 %", f"--precision {text}", "for example 2%"
        )
    return share


def choose_sustain_factor(sustain: bool | None, settings: Settings) -> float:
    """Return the length of sustained-load checks, in lengths of an ordinary trial.

    It is 1 if no trial is longer than an ordinary one. Without --sustain and --no-sustain
    (`sustain` is None), only a simulation has longer trials, because they cost it little time.
    """
    runs_longer_trials = settings.virtual if sustain is None else sustain
    return CONFIRMATION_FACTOR if runs_longer_trials else 1.0


def _search_settings(
    checked: CheckedOptions, trial_workload: Workload, estimated_capacity: float | None
) -> SearchSettings:
    """Return the settings that determine which loads a search tries, and for how long.

    Args:
        checked: The options after they were parsed and checked.
        trial_workload: The workload of a trial, at any load.
        estimated_capacity: The rate near which the search begins, or None without an estimate.
    """
    options = checked.options
    trial_s = checked.trial_ns / NS_PER_S
    load_range = _allowed_loads(options)
    settings = SearchSettings(
        low=load_range.low,
        high=load_range.high,
        start=_first_load(options, estimated_capacity),
        # An estimate is most often close to the capacity, so the first loads are close together.
        first_step=BRACKET_STEP if estimated_capacity is None else ESTIMATE_STEP,
        precision=checked.precision,
        max_trials=options.max_trials,
        max_time_s=checked.max_time_s,
        is_integer=options.is_closed_loop or _has_closed_loop(trial_workload),
        run_spread=checked.run_spread,
        trial_load_s=trial_s,
        # A simulation does not change over time, so it has no trials in real time.
        real_trial_s=None if checked.settings.virtual else trial_s,
        warmup_s=checked.warmup_ns / NS_PER_S,
    )

    return _with_sustain_settings(settings, options, checked.settings)


def _has_closed_loop(workload: Workload) -> bool:
    """Return whether virtual users send a part of the load, so that loads are integers."""
    return any(isinstance(stage.arrival, Closed) for stage in workload.stages)


def _with_sustain_settings(
    settings: SearchSettings, options: SearchOptions, target_settings: Settings
) -> SearchSettings:
    """Return the settings of a search with how it shows that a load is sustained.

    A load is sustained if the server keeps up with it, so that no queue grows. In a closed loop no
    queue can grow without limit, so that the SLO alone decides. With --no-sustain a trial that is
    too short to show a growing queue is not repeated for longer.
    """
    has_no_sustain_option = options.sustain is False  # None without either option.
    return msgspec.structs.replace(
        settings,
        requires_sustained=not options.is_closed_loop,
        sustain_length_factor=choose_sustain_factor(options.sustain, target_settings),
        may_extend_trials=not has_no_sustain_option,
    )


def _allowed_loads(options: SearchOptions) -> LoadRange:
    """Return the lowest and the highest load that the search may try.

    They are --low and --high. Without these options the range is so wide that the capacity of any
    server lies in it. In a closed loop a load is a number of virtual users, so both are integers of
    at least 1.
    """
    high = options.high or HIGHEST_LOAD
    if options.is_closed_loop:
        lowest_users = math.ceil(max(1.0, options.low or 1.0))
        highest_users = max(1, math.floor(high))
        return LoadRange(float(lowest_users), float(highest_users))
    low = options.low or min(options.first_load, LOWEST_RATE)
    return LoadRange(low, high)


def _first_load(options: SearchOptions, estimated_capacity: float | None) -> float | None:
    """Return the load of the first trial.

    Return None if both --low and --high are used: the search then begins between the two.

    With an estimate of the capacity, the first load is half a step below it, measured as a factor.
    If the estimate is right, the first trial passes, and the next one, a step higher, fails.
    """
    if options.low is not None and options.high is not None:
        return None
    if estimated_capacity is None:
        return options.first_load
    half_step = math.sqrt(ESTIMATE_STEP)
    return min(estimated_capacity / half_step, options.high or math.inf)


def _plan_options(invocation: Invocation, checked: CheckedOptions) -> dict[str, str]:
    """Return the options that change the trials or their objectives, as text for the plan."""
    workload = checked.workload
    options = {
        "slo": ", ".join(_describe_slos(workload)),
        "duration": f"{checked.trial_ns / NS_PER_S:g} s",
    }
    if checked.options.over == SESSIONS:
        options["over"] = SESSIONS
    if checked.warmup_ns:
        options["warmup"] = f"{checked.warmup_ns / NS_PER_S:g} s"

    if invocation["limit"]:
        options["limit"] = ", ".join(invocation["limit"])

    if invocation["grace"] and workload.grace_ns is not None:
        options["grace"] = f"{workload.grace_ns / NS_PER_S:g} s"

    for name, value in select_load_options(invocation.options).items():
        if name not in PLAN_OPTIONS:
            options[name] = str(value)

    return options | request_options(checked.settings)


def _describe_slos(workload: Workload) -> Iterator[str]:
    """Yield the terms of the SLO of a workload, and of those of its classes, as text."""
    yield from _describe_slo(workload.slo, "")
    if isinstance(workload.requests, Mix):
        for name, request_class in workload.requests.classes.items():
            yield from _describe_slo(request_class.slo, f"{name}: ")


def _describe_slo(slo: Slo | None, prefix: str) -> Iterator[str]:
    """Yield the terms of an SLO as text, for example "ttft p99 2000 ms"."""
    if slo is None:
        return

    for term in slo.terms:
        limit_ms = term.limit_ns / NS_PER_MS
        yield f"{prefix}{term.metric} p{term.quantile * 100:g} {limit_ms:g} ms"

    if slo.goodput_share is not None:
        yield f"{prefix}goodput {slo.goodput_share:.6g}"

    if slo.task is not None:
        objective = describe_task_limits(_to_ms(slo.task.within_ns), _to_ms(slo.task.wait_ns))
        yield f"{prefix}{slo.task.share:.6g} of tasks {objective}"

    if slo.fluidity is not None:
        yield f"{prefix}{describe_fluidity_term(slo, slo.fluidity)}"

    if slo.answers_share is not None:
        yield f"{prefix}{describe_answers_share(slo.answers_share)}"


def _to_ms(duration_ns: int | None) -> float | None:
    """Return a duration in milliseconds, or None if there is none."""
    return None if duration_ns is None else duration_ns / NS_PER_MS
