"""Check a contract before the first request.

This finds contradictions, missing inputs, and terms that do not fit the workload.

`lint_samples.py` checks whether the load of a level is large enough for its terms, and
`lint_answers.py` checks the terms about responses. This module reads only the workload files that
the levels name. Other files are read through functions of the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from loadgen.contracts import auto_duration, level_plan
from loadgen.contracts.answer_terms import KNOWN_ANSWERS
from loadgen.contracts.drafts import (
    ContractErrors,
    LevelDraft,
    LimitedMetric,
    Location,
    PlacedTerm,
    Problem,
)
from loadgen.contracts.fluidity_terms import DEADLINES
from loadgen.contracts.level_plan import LIMITS_JUDGED_BY_CONTRACT, LevelPlan
from loadgen.contracts.lint_answers import AnswerTermChecker, ReadQuestions, read_prompts
from loadgen.contracts.lint_samples import check_samples
from loadgen.contracts.schema import ANSWERS_LEVEL, Contract, ContractLevel
from loadgen.contracts.terms import ContractTerm, format_time
from loadgen.core import format
from loadgen.core.analysis.fairness import group_by_tenant
from loadgen.core.errors import CombinedError, LoadgenError, did_you_mean
from loadgen.core.workload import Mix, Workload
from loadgen.core.workload import load as load_workload
from loadgen.core.workload.answers_objective import answers_objective_errors
from loadgen.core.workload.flags import Overrides
from loadgen.core.workload.request_classes import RequestClass
from loadgen.core.workload.workload_files import packaged_files
from loadgen.core.workload.yaml_marks import Map

ROUNDING_TOLERANCE = 1e-9
"""The relative difference up to which two rates count as equal."""

RATE_TERMS = ("requests", "good_requests", "tasks", "good_tasks")
"""Terms that limit a rate per second which an open loop cannot exceed."""

LATENCIES_INCLUDED_IN = {
    "e2e": ("ttft", "first_answer"),
    "task_time": ("task_wait", "task_longest_wait"),
}
"""Latency -> the latencies that are a part of it, so that they are never longer."""

WHOLE_LOAD_GOODPUT_TERMS = ("goodput", "task_goodput", "good_tasks", "task_cost")
"""Terms that are ambiguous if they name no class and the classes have SLOs of their own."""


@dataclass(frozen=True, kw_only=True)
class LintInputs:
    """The parsed parts of a contract, and what the command line adds.

    Attributes:
        contract: The contract without its levels.
        drafts: The levels, as far as they could be parsed.
        document: The YAML document, from which the positions of errors are known.
        file: The name of the file in messages.
        directory: The directory of the file.
        gpus: The number of GPUs given on the command line.
        max_duration_ns: The maximum length of a level's load, or None.
        has_other_endpoint: Whether the command line gives an endpoint to compare responses with.
        env: The environment variables that workload files may name.
        load_prices: Reads a price file. Raises LoadgenError or CombinedError.
        read_questions: Reads the first prompts of a data set. Raises LoadgenError or CombinedError.
    """

    contract: Contract
    drafts: Sequence[LevelDraft]
    document: Map
    file: str
    directory: Path
    gpus: int | None
    max_duration_ns: int | None
    has_other_endpoint: bool
    env: Mapping[str, str]
    load_prices: Callable[[Path], object]
    read_questions: ReadQuestions


@dataclass(frozen=True)
class LintFindings:
    """The plans of the levels that are correct enough, and all errors."""

    plans: list[LevelPlan]
    contract_errors: list[LoadgenError]
    other_errors: list[LoadgenError]


def check_contract(inputs: LintInputs) -> LintFindings:
    """Check all parts of a contract and plan the load of its levels.

    A level with errors has no plan, but its terms are still checked as far as possible, so that all
    errors of a contract are reported at once.
    """
    errors = ContractErrors(inputs.document, inputs.file)
    _check_level_names(inputs.drafts, errors)
    _check_prices(inputs, errors)

    plans = []
    for draft in inputs.drafts:
        plan = _plan_load(draft, inputs, errors)
        _check_terms(draft, plan, inputs, errors)
        if plan is not None:
            undecidable_terms = check_samples(draft, plan, inputs.contract, errors)
            plans.append(replace(plan, undecidable=undecidable_terms))

    _check_answers(inputs, errors)
    return LintFindings(plans, errors.in_contract, errors.in_other_files)


def _check_prices(inputs: LintInputs, errors: ContractErrors) -> None:
    """Report the errors of the price file of a contract, if it names one."""
    prices = inputs.contract.prices
    if prices is None:
        return
    try:
        inputs.load_prices(inputs.directory / prices)
    except (LoadgenError, CombinedError) as error:
        errors.add_from_file(("prices",), error)


def _check_answers(inputs: LintInputs, errors: ContractErrors) -> None:
    """Report the errors of the part `answers` of a contract, if it has one.

    This part names a data set of prompts whose responses are scored, and terms about the scores.
    """
    check = inputs.contract.answers
    if check is None:
        return

    prompts = read_prompts(check, inputs.directory, inputs.read_questions, errors)
    if prompts is None:
        return

    checker = AnswerTermChecker(
        check=check,
        prompts=prompts,
        confidence=inputs.contract.confidence,
        has_other_endpoint=inputs.has_other_endpoint or check.against is not None,
        errors=errors,
    )
    checker.check_terms()


def _check_level_names(drafts: Sequence[LevelDraft], errors: ContractErrors) -> None:
    """Report levels with the same name, and a level with the reserved name "answers".

    Names have to be unique because the results of a level are in a directory of its name.
    """
    has_answer_check = "answers" in errors.document
    earlier_names: set[str] = set()
    for draft in drafts:
        location = (*draft.location, "name")
        if has_answer_check and draft.name == ANSWERS_LEVEL:
            text = f'the name "{ANSWERS_LEVEL}" is reserved for the terms about responses'
            errors.add(location, "duplicate", text, "choose another name for the level")

        if draft.name and draft.name in earlier_names:
            text = f'two levels have the name "{draft.name}"'
            errors.add(location, "duplicate", text, "choose a unique name")

        earlier_names.add(draft.name)


# -- the load of a level --------------------------------------------------------------------------


def _plan_load(draft: LevelDraft, inputs: LintInputs, errors: ContractErrors) -> LevelPlan | None:
    """Return the plan of a level, with the length that its terms and the command line require.

    Return None if the level or its workload is wrong. The errors are then in `errors`.
    """
    workload = _load_workload(draft, inputs, errors)
    if draft.level is None or workload is None:
        return None

    plan = level_plan.plan_level(draft.level, workload)
    if auto_duration.has_auto_duration(draft.level):
        terms = [placed_term.term for placed_term in draft.terms]
        plan = auto_duration.lengthen_load_for_terms(plan, terms, inputs.contract)

    if inputs.max_duration_ns is not None:
        plan = level_plan.shorten_plan(plan, inputs.max_duration_ns)

    return plan


def _load_workload(
    draft: LevelDraft, inputs: LintInputs, errors: ContractErrors
) -> Workload | None:
    """Return the workload of a level, with the load and the SLO that apply to this level.

    Return None after an error, which is then in `errors`.
    """
    workload_path = _find_workload(draft, inputs.directory, errors)
    level = draft.level
    if level is None or workload_path is None:
        return None

    if level.rate is not None and level.concurrency is not None:
        text = "a level has either a rate (open loop) or a concurrency (closed loop), not both"
        location = (*draft.location, "concurrency")
        errors.add(location, "conflict", text, "remove one, or make two levels")
        return None

    try:
        workload = load_workload(workload_path, _build_overrides(level), inputs.env)
    except CombinedError as combined:
        for error in combined.errors:
            _add_workload_error(error, draft, errors)
        return None

    workload_of_level = _with_rules_of_contract(workload, level, inputs.contract)
    _check_answers_objective(workload_of_level, draft, inputs, errors)
    return workload_of_level


def _check_answers_objective(
    workload: Workload, draft: LevelDraft, inputs: LintInputs, errors: ContractErrors
) -> None:
    """Report an objective of the SLO on checked answers that a run of the level would refuse.

    Args:
        workload: The workload of the level, with the SLO that applies to the level.
        draft: The level.
        inputs: The contract.
        errors: Collects the errors.
    """
    location = _locate_slo(draft, inputs.contract)
    for error in answers_objective_errors(workload):
        errors.add(location, error.code, error.message, error.hint)


def _locate_slo(draft: LevelDraft, contract: Contract) -> Location:
    """Return where a contract has the SLO of a level.

    An SLO that only the workload file has is located at the name of this file.
    """
    if draft.level is not None and draft.level.slo is not None:
        return (*draft.location, "slo", "answers")
    if contract.slo is not None:
        return ("slo", "answers")
    return (*draft.location, "workload")


def _with_rules_of_contract(
    workload: Workload, level: ContractLevel, contract: Contract
) -> Workload:
    """Return the workload of a level with the SLO and the validity limits for a contract.

    The SLO of the level replaces that of the contract, which replaces that of the workload.

    A run that exceeds a validity limit, such as too many dropped requests, is INVALID by itself. A
    contract judges some of these quantities with its terms, so their limits are lifted.
    """
    slo = level.slo or contract.slo or workload.slo
    no_limit = 1.0  # the limits are on fractions, which are at most 1
    lifted_limits = dict.fromkeys(LIMITS_JUDGED_BY_CONTRACT, no_limit)
    limits = workload.limits.model_copy(update=lifted_limits)
    return workload.model_copy(update={"slo": slo, "limits": limits})


def _find_workload(draft: LevelDraft, directory: Path, errors: ContractErrors) -> str | None:
    """Return the path of the workload file of a level, or the name of a packaged workload.

    Return None if the level names no workload or an unknown one. An unknown one is reported.
    """
    name = draft.workload
    if name is None:
        return None

    file = directory / name
    with suppress(OSError):  # not a valid file name, for example because it is too long
        if file.is_file():
            return str(file)

    if name in packaged_files():
        return name

    errors.add(
        (*draft.location, "workload"),
        "unknown_name",
        f'unknown workload "{name}"',
        f"{_suggest_workload(name, directory)}; or give a path relative to the contract",
    )
    return None


def _suggest_workload(name: str, directory: Path) -> str:
    """Return a hint that names a similar packaged workload or YAML file of the directory."""
    yaml_files = [str(path.relative_to(directory)) for path in sorted(directory.glob("*.yaml"))]
    return did_you_mean(name, [*packaged_files(), *yaml_files])


def _add_workload_error(error: LoadgenError, draft: LevelDraft, errors: ContractErrors) -> None:
    """Report an error in the workload of a level at the place where the user can correct it.

    - The rate and the length of a level change its workload like options of the command line
      (`--request-rate`). An error at such an option was caused by a value of the level.
    - A load that is missing, or has no end, is also reported at the level: that is where to add it.
    - Any other error is in the workload file. It is reported once if several levels use the file.
    """
    is_at_option = error.where.startswith("--")
    if is_at_option:
        errors.add(draft.location, error.code, error.message, error.hint)
        return

    is_load_incomplete = error.code in ("no_load", "endless")
    if is_load_incomplete:
        hint = "give rate: 10/s (or concurrency: 8) and duration: 10m (or requests: 700)"
        errors.add(draft.location, error.code, error.message, hint)
        return

    errors.add_in_other_file(error)


def _build_overrides(level: ContractLevel) -> Overrides:
    """Return the load of a level as overrides of its workload.

    They change the workload in the same way as the options of `loadgen run` do. The terms of a
    level with `duration: auto` decide its duration later, from the rates of its load. Until then
    the load gets a provisional duration, because a load without an end would be refused.
    """
    has_own_load = level.rate is not None or level.concurrency is not None
    duration_ns = level.duration_ns
    if auto_duration.has_auto_duration(level) and has_own_load:
        duration_ns = auto_duration.PROVISIONAL_DURATION_NS

    request_rate = level.rate
    if request_rate is not None:
        # Messages print the rate: 0.166666667/s is shorter than 0.16666666666666666/s (10/min).
        request_rate = round(request_rate, 9)

    return Overrides(
        request_rate=request_rate,
        concurrency=level.concurrency,
        duration=duration_ns,
        num_requests=level.requests,
        grace=level.grace_ns,
        warmup_ns=level.warmup_ns,
    )


# -- the terms of a level -------------------------------------------------------------------------


def _check_terms(
    draft: LevelDraft, plan: LevelPlan | None, inputs: LintInputs, errors: ContractErrors
) -> None:
    """Report terms of a level that contradict each other, or that need an input that is missing.

    The checks against the workload need the plan of the level, which is None if its load has
    errors. If a term has several errors, they are printed in the order of the checks.
    """
    if plan is not None:
        _check_workload_terms(draft, plan, errors)

    _check_duplicates(draft, errors)
    _check_should_terms(draft, errors)

    if plan is not None:
        _check_offered_rates(draft, plan, errors)

    _check_latency_limits(draft, errors)
    _check_contract_inputs(draft, plan, inputs, errors)
    _check_compared_levels(draft, inputs.drafts, errors)


def _find_first_terms(draft: LevelDraft) -> dict[LimitedMetric, PlacedTerm]:
    """Return the first term of a level for each metric that is limited.

    A later term that limits the same metric in the same list is left out. Of `ttft: 2s` and
    `ttft: 3s`, for example, only the first is returned.
    """
    first_terms: dict[LimitedMetric, PlacedTerm] = {}
    for placed_term in draft.terms:
        if placed_term.limited_metric not in first_terms:
            first_terms[placed_term.limited_metric] = placed_term
    return first_terms


def _check_duplicates(draft: LevelDraft, errors: ContractErrors) -> None:
    """Report terms that limit the same metric as an earlier term of the same list.

    For example, `ttft: 2s` and `ttft: 3s` in the list `must` both limit TTFT at p99.
    """
    first_terms = _find_first_terms(draft)
    for placed_term in draft.terms:
        first_term = first_terms[placed_term.limited_metric]
        if first_term is placed_term:
            continue
        item = f"item {first_term.index + 1} of {first_term.requirement}"
        hint = f"{item} limits the same metric; keep one"
        problem = Problem("duplicate", "a second limit for the same metric", hint)
        errors.add_problem(draft.location_of(placed_term), placed_term.term, problem)


def _check_should_terms(draft: LevelDraft, errors: ContractErrors) -> None:
    """Report terms of the list `should` that are not stricter than the same term in `must`.

    The list `must` has the requirements of a contract, and `should` has goals beyond them. If
    `must` requires TTFT within 2 s, a goal of 3 s has no effect: it is met whenever the requirement
    is met.
    """
    first_terms = _find_first_terms(draft)
    for limited_metric, placed_term in first_terms.items():
        if limited_metric.requirement != "should":
            continue

        must_term = first_terms.get(limited_metric._replace(requirement="must"))
        if must_term is None or _is_stricter(placed_term.term, must_term.term):
            continue

        problem = Problem(
            "no_effect",
            "not stricter than the same term in must",
            "remove it, or make it stricter",
        )
        errors.add_problem(draft.location_of(placed_term), placed_term.term, problem)


def _is_stricter(term: ContractTerm, reference_term: ContractTerm) -> bool:
    """Return whether a term allows less than another term that limits the same metric."""
    if term.is_upper_bound:
        return float(term.limit) < float(reference_term.limit)
    return float(term.limit) > float(reference_term.limit)


def _check_offered_rates(draft: LevelDraft, plan: LevelPlan, errors: ContractErrors) -> None:
    """Report terms that require a higher rate than an open loop offers.

    An open loop starts requests or tasks at a fixed rate, so the server cannot complete more. A
    closed loop has no such rate: it sends as many as the server completes.
    """
    starts_per_s = plan.starts_per_s()
    if plan.is_closed_loop() or starts_per_s is None:
        return

    for placed_term in _find_first_terms(draft).values():
        term = placed_term.term
        if term.kind not in RATE_TERMS:
            continue

        offered_per_s = starts_per_s * plan.samples_per_start(term)
        if term.limit > offered_per_s * (1 + ROUNDING_TOLERANCE):
            problem = Problem(
                "out_of_range",
                f"more than the {format.quantity(offered_per_s)}/s that the level offers",
                "raise the rate of the level",
            )
            errors.add_problem(draft.location_of(placed_term), term, problem)


def _check_latency_limits(draft: LevelDraft, errors: ContractErrors) -> None:
    """Report latency terms that pass whenever another latency term of the same list passes.

    For example, TTFT within 3 s always passes if E2E latency is within 2 s. One of the two limits
    is probably a mistake. Each term is reported once.
    """
    latency_terms = [placed_term for placed_term in draft.terms if placed_term.term.is_latency]
    for placed_term in latency_terms:
        other_terms = [
            other.term
            for other in latency_terms
            if other is not placed_term and other.requirement == placed_term.requirement
        ]
        problem = _find_first_implication(placed_term.term, other_terms)
        if problem is not None:
            errors.add_problem(draft.location_of(placed_term), placed_term.term, problem)


def _find_first_implication(
    term: ContractTerm, other_terms: Sequence[ContractTerm]
) -> Problem | None:
    """Return the problem of a term that always passes if one of the other terms passes, or None."""
    for other_term in other_terms:
        problem = _find_implication_problem(term, other_term)
        if problem is not None:
            return problem
    return None


def _find_implication_problem(term: ContractTerm, stricter: ContractTerm) -> Problem | None:
    """Return the problem of a latency term that another term makes superfluous, or None.

    This is the case if both are about the same class of requests and the other term has a lower
    limit for a latency that is never smaller, so that the first term passes whenever the other one
    passes. Such a latency is either

    - a higher percentile of the same latency, or
    - the same percentile of a latency that includes the first one: E2E latency includes TTFT, and
      the time of a task includes its waits.

    Args:
        term: The term that may be superfluous.
        stricter: The other term.
    """
    has_lower_limit = stricter.limit < term.limit
    is_about_same_class = stricter.class_name == term.class_name
    if not has_lower_limit or not is_about_same_class:
        return None

    limit = format_time(stricter.limit)
    if stricter.kind == term.kind and stricter.quantile > term.quantile:
        return Problem(
            "conflict",
            f"a higher limit than at {stricter.percentile} ({limit})",
            f"{term.percentile} is never above {stricter.percentile}; correct one of the limits",
        )

    included_kinds = LATENCIES_INCLUDED_IN.get(stricter.kind, ())
    if stricter.quantile == term.quantile and term.kind in included_kinds:
        return Problem(
            "conflict",
            f"a higher limit than for {stricter.kind} ({limit})",
            f"{stricter.kind} includes {term.kind}; lower the limit for {term.kind}, "
            f"or raise the one for {stricter.kind}",
        )

    return None


def _check_workload_terms(draft: LevelDraft, plan: LevelPlan, errors: ContractErrors) -> None:
    """Report terms that do not fit the requests of the workload.

    A term about a class that the workload does not have is reported for that only, because it
    explains any other problem.
    """
    requests = plan.workload.requests
    classes = requests.classes if isinstance(requests, Mix) else {}
    for placed_term in draft.terms:
        term = placed_term.term
        location = draft.location_of(placed_term)

        has_unknown_class = term.class_name != "" and term.class_name not in classes
        if has_unknown_class:
            text = f'{plan.level.workload} has no request class "{term.class_name}"'
            errors.add(location, "unknown_name", text, _suggest_class(term.class_name, classes))
            continue

        problem = _find_workload_problem(term, plan, classes)
        if problem is not None:
            errors.add_problem(location, term, problem)


def _suggest_class(class_name: str, classes: Mapping[str, RequestClass]) -> str:
    """Return the hint for an unknown class: the most similar name, and the names of all classes."""
    if not classes:
        return "the workload has no request classes"
    return did_you_mean(class_name, list(classes))


def _find_workload_problem(
    term: ContractTerm, plan: LevelPlan, classes: Mapping[str, RequestClass]
) -> Problem | None:
    """Return why a term does not fit the requests of the workload, or None. Report one problem."""
    task_problem = _find_task_problem(term, plan)
    if task_problem is not None:
        return task_problem
    tenant_problem = _find_tenant_problem(term, plan, classes)
    if tenant_problem is not None:
        return tenant_problem
    answers_problem = _find_answers_problem(term, plan)
    if answers_problem is not None:
        return answers_problem
    return _find_slo_problem(term, plan, classes)


def _find_answers_problem(term: ContractTerm, plan: LevelPlan) -> Problem | None:
    """Return the problem of a term about answers if no request has a known answer, or None."""
    if not term.requires(KNOWN_ANSWERS) or plan.classes_of(term):
        return None
    return Problem(
        "mismatch",
        f"{plan.level.workload} has no questions with known answers",
        "add a request class: {weight: 5%, requests: {from: questions.jsonl, check_answers: true}}",
    )


def _find_task_problem(term: ContractTerm, plan: LevelPlan) -> Problem | None:
    """Return the problem of a term about tasks in a workload without tasks, or None.

    A task is a conversation or an agentic session of several requests. A term about the cost of
    tasks also needs a workload without single requests, because they use the same machines.
    """
    if not term.is_about_tasks:
        return None

    classes = plan.classes_of(term)
    if not any(class_plan.is_session for class_plan in classes):
        class_suffix = f", class {term.class_name}," if term.class_name else ""
        return Problem(
            "mismatch",
            f"{plan.level.workload}{class_suffix} has only single requests, no tasks",
            "use a workload with steps or turns, like coding-agent or agentic",
        )

    if term.kind == "task_cost" and not all(class_plan.is_session for class_plan in classes):
        return Problem(
            "unsupported",
            "the same machines also serve single requests, so there is no cost per task",
            "use cost, which is per thousand good requests",
        )

    return None


def _find_tenant_problem(
    term: ContractTerm, plan: LevelPlan, classes: Mapping[str, RequestClass]
) -> Problem | None:
    """Return the problem of a term that compares tenants, or None.

    Tenants are the users that share a server. Each class of requests belongs to one, and needs an
    SLO so that its good requests can be counted.
    """
    if not term.requires("tenants"):
        return None

    if not group_by_tenant({name: request_class.tenant for name, request_class in classes.items()}):
        return Problem(
            "mismatch",
            f"{plan.level.workload} has fewer than two tenants",
            "use a workload with request classes, like noisy-neighbour or mixed",
        )

    if not all(class_plan.slo for class_plan in plan.classes_of(term)):
        return Problem(
            "no_slo",
            "the term needs an SLO",
            "slo: {ttft: 2s, tpot: 100ms} in each request class, or for all",
        )

    return None


def _find_slo_problem(
    term: ContractTerm, plan: LevelPlan, classes: Mapping[str, RequestClass]
) -> Problem | None:
    """Return the problem of a term about good requests or tasks if no SLO says which are good.

    A request or task is good if it meets its SLO. Return None if there is no such problem.

    Args:
        term: The term.
        plan: The plan of the level.
        classes: The request classes of the workload, by name.
    """
    return (
        _find_missing_task_slo(term, plan)
        or _find_missing_deadlines(term, plan)
        or _find_ambiguous_slo(term, classes)
    )


def _find_missing_deadlines(term: ContractTerm, plan: LevelPlan) -> Problem | None:
    """Return the problem if a term about token deadlines has none to judge by, or None.

    The deadlines are the limits on TTFT and TPOT of the SLO. All requests that the term is about
    must share them: those of its request class, or of the whole load.
    """
    if not term.requires(DEADLINES):
        return None

    slos = [class_plan.slo for class_plan in plan.classes_of(term)]
    first_slo = slos[0]
    has_deadlines = first_slo is not None and first_slo.find_token_deadlines() is not None
    have_common_slo = all(slo == first_slo for slo in slos)
    if has_deadlines and have_common_slo:
        return None

    hint = "slo: {ttft: 2s, tpot: 50ms}"
    if not term.class_name:
        hint += ", or name a request class: fluidity: {at: p95, share: 90%, class: chat}"
    return Problem(
        "no_slo",
        "it needs a single SLO for its requests, with limits on TTFT and TPOT as token deadlines",
        hint,
    )


def _find_missing_task_slo(term: ContractTerm, plan: LevelPlan) -> Problem | None:
    """Return the problem if a term about good tasks has no SLO for tasks, or None."""
    has_task_slo = any(
        class_plan.slo and class_plan.slo.task for class_plan in plan.classes_of(term)
    )
    if not term.requires("task_slo") or has_task_slo:
        return None

    return Problem(
        "no_slo",
        "the term needs an SLO for tasks",
        "slo: {task: {within: 90s, wait: 2s}}",
    )


def _find_ambiguous_slo(term: ContractTerm, classes: Mapping[str, RequestClass]) -> Problem | None:
    """Return the problem if a term about the whole load has several SLOs to choose from, or None.

    Request classes, such as "chat" and "summarize", may have SLOs of their own. A term that counts
    good requests must then name the class that it is about.

    Args:
        term: The term.
        classes: The request classes of the workload, by name.
    """
    is_about_whole_load = not term.class_name
    needs_one_slo = term.kind in WHOLE_LOAD_GOODPUT_TERMS and is_about_whole_load
    has_class_slos = any(request_class.slo for request_class in classes.values())
    if not needs_one_slo or not has_class_slos:
        return None

    first_class = next(iter(classes))
    return Problem(
        "ambiguous",
        "the request classes have different SLOs",
        f"name the class: goodput: {{share: 99%, class: {first_class}}}",
    )


def _check_contract_inputs(
    draft: LevelDraft, plan: LevelPlan | None, inputs: LintInputs, errors: ContractErrors
) -> None:
    """Report terms that need an SLO, a number of GPUs or prices that nobody specified.

    Terms about a request class use the SLO of the class, which was checked with the workload.
    """
    missing_inputs = _find_missing_inputs(plan, inputs)
    for placed_term in draft.terms:
        term = placed_term.term
        if term.class_name:
            continue
        for required_input in term.definition.requirements:
            if required_input in missing_inputs:
                location = draft.location_of(placed_term)
                errors.add_problem(location, term, missing_inputs[required_input])


def _check_compared_levels(
    draft: LevelDraft, all_drafts: Sequence[LevelDraft], errors: ContractErrors
) -> None:
    """Report terms that compare their level with a level that the contract does not have.

    Args:
        draft: The level with the terms.
        all_drafts: All levels of the contract.
        errors: Collects the errors.
    """
    level_names = dict.fromkeys(level_draft.name for level_draft in all_drafts)
    other_levels = [name for name in level_names if name != draft.name]
    for placed_term in draft.terms:
        compared_level = placed_term.term.level
        if compared_level and compared_level not in other_levels:
            errors.add(
                draft.location_of(placed_term),
                "unknown_name",
                f'the contract has no other level "{compared_level}"',
                did_you_mean(compared_level, other_levels),
            )


def _find_missing_inputs(plan: LevelPlan | None, inputs: LintInputs) -> dict[str, Problem]:
    """Return which of the inputs that terms may need are missing.

    The SLO of a level that could not be planned is not known, so it is not reported as missing.

    Returns:
        Name of a missing input (`slo`, `gpus` or `prices`) -> the problem to report for a term that
        needs it.
    """
    problems = {}
    if plan is not None and plan.workload.slo is None:
        hint = "slo: {ttft: 2s, tpot: 100ms}"
        problems["slo"] = Problem("no_slo", "the term needs an SLO", hint)

    if inputs.gpus is None and "gpus" not in inputs.document:
        hint = "gpus: 8 in the contract, or --gpus 8"
        problems["gpus"] = Problem("missing_option", "the term needs the number of GPUs", hint)

    if "prices" not in inputs.document:
        hint = "prices: prices.yaml, relative to the contract (see docs/prices.example.yaml)"
        problems["prices"] = Problem("no_price", "the term needs prices", hint)

    return problems
