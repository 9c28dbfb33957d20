"""Check a contract before the first request.

This finds contradictions, missing inputs, and terms that do not fit the workload.

`lint_samples.py` checks whether the load of a level is large enough for its terms, and
`lint_answers.py` checks the terms about answers. The only files that are read here are the
workloads that the levels name; the other files are read through functions of the caller. This
module is pure apart from that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from loadgen.contracts import auto_duration, level_plan
from loadgen.contracts.drafts import ContractErrors, LevelDraft, PlacedTerm, Problem
from loadgen.contracts.level_plan import JUDGED_HERE, LevelPlan
from loadgen.contracts.lint_answers import ReadQuestions, check_answer_terms
from loadgen.contracts.lint_samples import check_samples
from loadgen.contracts.schema import ANSWERS_LEVEL, Contract, ContractLevel, Requirement
from loadgen.contracts.terms import ContractTerm, format_time
from loadgen.core import format
from loadgen.core.analysis.fairness import tenants_of
from loadgen.core.errors import CombinedError, LoadgenError, did_you_mean
from loadgen.core.workload import Mix, Workload
from loadgen.core.workload import load as load_workload
from loadgen.core.workload.flags import Overrides
from loadgen.core.workload.request_classes import RequestClass
from loadgen.core.workload.workload_files import packaged_files
from loadgen.core.workload.yaml_marks import Map

ROUNDING_TOLERANCE = 1e-9
"""Relative difference of two rates that rounding explains."""

RATE_TERMS = ("requests", "good_requests", "tasks", "good_tasks")
TASK_WAIT_TERMS = ("task_wait", "task_longest_wait")
WHOLE_LOAD_GOODPUT_TERMS = ("goodput", "task_goodput", "good_tasks", "task_cost")
"""Terms that are ambiguous if they name no class and the classes have SLOs of their own."""


@dataclass(frozen=True, kw_only=True)
class LintInputs:
    """The parsed parts of a contract, and what the command line adds.

    Attributes:
        contract: The contract without its levels.
        drafts: The levels, as far as they could be parsed.
        document: The YAML document, which has the positions of the errors.
        file: The name of the file in messages.
        directory: The directory of the file.
        gpus: The number of GPUs given on the command line.
        max_duration_ns: The maximum length of a level's load, or None.
        has_other_endpoint: Whether the command line gives another endpoint to compare answers with.
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

    The plan of a level is needed to check its terms, because it says how many requests there are.
    A level with errors has no plan, but its terms are still checked as far as possible.
    """
    errors = ContractErrors(inputs.document, inputs.file)
    contract = inputs.contract
    _check_level_names(inputs.drafts, errors)
    if contract.prices is not None:
        try:
            inputs.load_prices(inputs.directory / contract.prices)
        except (LoadgenError, CombinedError) as error:
            errors.add_from_file(("prices",), error)
    plans = []
    for draft in inputs.drafts:
        plan = _plan_load(draft, inputs, errors)
        _check_terms(draft, plan, inputs, errors)
        if plan is not None:
            plans.append(check_samples(draft, plan, contract, errors))
    if contract.answers is not None:
        check_answer_terms(
            contract.answers,
            contract.confidence,
            inputs.directory,
            inputs.read_questions,
            errors,
            has_other_endpoint=inputs.has_other_endpoint or contract.answers.against is not None,
        )
    return LintFindings(plans, errors.in_contract, errors.in_other_files)


def _check_level_names(drafts: Sequence[LevelDraft], errors: ContractErrors) -> None:
    """Report levels with the same name, and a level that has the name of the verdict on answers.

    Names have to be unique because the results of a level are in a directory of its name.
    """
    if "answers" in errors.document:
        reserved = next((draft for draft in drafts if draft.name == ANSWERS_LEVEL), None)
        if reserved is not None:
            location = (*reserved.location, "name")
            text = f'the verdict on the answers has the name of this level: "{ANSWERS_LEVEL}"'
            errors.add(location, "duplicate", text, "give the level another name")
    earlier_names: set[str] = set()
    for draft in drafts:
        if draft.name and draft.name in earlier_names:
            text = f'two levels are called "{draft.name}"'
            errors.add((*draft.location, "name"), "duplicate", text, "give each its own")
        earlier_names.add(draft.name)


# -- the load of a level --------------------------------------------------------------------------


def _plan_load(draft: LevelDraft, inputs: LintInputs, errors: ContractErrors) -> LevelPlan | None:
    """Return the plan of a level, with the length that its terms and the command line give it.

    Return None, with the errors reported, if the level or its workload is wrong.
    """
    workload = _load_workload(draft, inputs, errors)
    if draft.level is None or workload is None:
        return None
    plan = level_plan.plan_level(draft.level, workload)
    if auto_duration.is_auto(draft.level):
        terms = [placed_term.term for placed_term in draft.terms]
        plan = auto_duration.lengthen_load_for_terms(plan, terms, inputs.contract)
    if inputs.max_duration_ns is not None:
        plan = level_plan.shorten_plan(plan, inputs.max_duration_ns)
    return plan


def _load_workload(
    draft: LevelDraft, inputs: LintInputs, errors: ContractErrors
) -> Workload | None:
    """Return the workload of a level with the level's own load and SLO, or None after an error.

    The SLO of the level comes before that of the contract, and that before the one of the
    workload. Limits on a valid run that the contract judges itself are lifted: a run that exceeds
    them is judged, not refused.
    """
    name = _find_workload(draft, inputs.directory, errors)
    level = draft.level
    if level is None or name is None:
        return None
    if level.rate is not None and level.concurrency is not None:
        text = "rate is an open loop, concurrency a closed one: not both"
        location = (*draft.location, "concurrency")
        errors.add(location, "conflict", text, "make two levels of it")
        return None
    try:
        workload = load_workload(name, _overrides(level), inputs.env)
    except CombinedError as combined:
        for error in combined.faults:
            _add_workload_error(error, draft, errors)
        return None
    slo = level.slo or inputs.contract.slo or workload.slo
    no_limit = 1.0  # a share of 100 % is never exceeded
    limits = workload.limits.model_copy(update=dict.fromkeys(JUDGED_HERE, no_limit))
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
    nearby = [str(other.relative_to(directory)) for other in sorted(directory.glob("*.yaml"))]
    suggestion = did_you_mean(name, [*packaged_files(), *nearby])
    errors.add(
        (*draft.location, "workload"),
        "unknown_name",
        f'there is no workload "{name}"',
        f"{suggestion}; or a path relative to the contract",
    )
    return None


def _add_workload_error(error: LoadgenError, draft: LevelDraft, errors: ContractErrors) -> None:
    """Report an error in a workload at its level or in the workload's file."""
    if error.where.startswith("--"):
        errors.add(draft.location, error.code, error.what, error.hint)
    elif error.code in ("no_load", "endless"):
        hint = "give rate: 10/s (or concurrency: 8) and duration: 10m (or requests: 700)"
        errors.add(draft.location, error.code, error.what, hint)
    elif str(error) not in map(str, errors.in_other_files):  # another level may have found it
        errors.in_other_files.append(error)


def _overrides(level: ContractLevel) -> Overrides:
    """Return the level's own load in the form in which the command line changes a workload.

    A level that leaves its length to its terms gets a provisional one, from which the rates of its
    load are computed.
    """
    has_own_load = level.rate is not None or level.concurrency is not None
    duration_ns = level.duration_ns
    if auto_duration.is_auto(level) and has_own_load:
        duration_ns = auto_duration.PROVISIONAL_NS
    return Overrides(
        # Rates per minute or hour have many digits, which would be in messages.
        request_rate=None if level.rate is None else round(level.rate, 9),
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
    """Report terms that contradict each other, or that need something that is not there.

    The order of the checks is the order of the errors of one term. Checks of a term against the
    workload need the plan.
    """
    if plan is not None:
        _check_workload_terms(draft, plan, errors)
    _check_duplicates(draft, errors)
    _check_should_terms(draft, errors)
    if plan is not None:
        _check_offered_rates(draft, plan, errors)
    _check_latency_limits(draft, errors)
    _check_contract_inputs(draft, plan, inputs, errors)


def _unique_terms(draft: LevelDraft) -> dict[tuple[Requirement, ContractTerm], PlacedTerm]:
    """Return the first of all terms about the same thing in the same list of a level.

    The keys are the list (`must` or `should`) and the subject, which is the term without its limit.
    """
    unique: dict[tuple[Requirement, ContractTerm], PlacedTerm] = {}
    for placed_term in draft.terms:
        subject = placed_term.term.without_limit()
        unique.setdefault((placed_term.requirement, subject), placed_term)
    return unique


def _check_duplicates(draft: LevelDraft, errors: ContractErrors) -> None:
    """Report terms about something that an earlier term of the same list is already about.

    For example, `ttft: 2s` and `ttft: 3s` in the list `must` are both about TTFT at p99.
    """
    unique = _unique_terms(draft)
    for placed_term in draft.terms:
        requirement = placed_term.requirement
        earlier = unique[requirement, placed_term.term.without_limit()]
        if earlier is placed_term:
            continue
        hint = f"item {earlier.index + 1} of {requirement} says it already; keep one"
        problem = Problem("duplicate", "said twice", hint)
        errors.add_problem(draft.location_of(placed_term), placed_term.term, problem)


def _check_should_terms(draft: LevelDraft, errors: ContractErrors) -> None:
    """Report terms of the list `should` that are not stricter than their counterpart in `must`.

    The list `should` has goals beyond what is required, so such a term could never fail on its own.
    """
    unique = _unique_terms(draft)
    for (requirement, subject), placed_term in unique.items():
        must_term = unique.get(("must", subject))
        if requirement != "should" or must_term is None:
            continue
        if not _is_stricter(placed_term.term, must_term.term):
            problem = Problem(
                "no_effect",
                "this should asks for no more than the must",
                "a should is stricter than its must; leave it out, or swap the two",
            )
            errors.add_problem(draft.location_of(placed_term), placed_term.term, problem)


def _is_stricter(term: ContractTerm, other: ContractTerm) -> bool:
    """Return whether a term allows less than another one about the same thing."""
    if term.is_upper_bound:
        return float(term.limit) < float(other.limit)
    return float(term.limit) > float(other.limit)


def _check_offered_rates(draft: LevelDraft, plan: LevelPlan, errors: ContractErrors) -> None:
    """Report terms that ask for a higher rate than an open loop offers.

    An open loop sends requests at a given rate, whatever the server does. A closed loop offers as
    many as the server completes.
    """
    starts_per_s = plan.starts_per_s()
    if plan.is_closed_loop() or starts_per_s is None:
        return
    for placed_term in _unique_terms(draft).values():
        term = placed_term.term
        if term.kind not in RATE_TERMS:
            continue
        offered = starts_per_s * plan.units_per_start(term)
        if term.limit > offered * (1 + ROUNDING_TOLERANCE):
            errors.add_problem(
                draft.location_of(placed_term),
                term,
                Problem(
                    "out_of_range",
                    f"more than the {format.quantity(offered)}/s that this level offers",
                    "no server can answer more than it is asked: raise the level's rate",
                ),
            )


def _check_latency_limits(draft: LevelDraft, errors: ContractErrors) -> None:
    """Report latency terms that another, stricter latency term of the same list already implies.

    Such a term would always pass with the other one, so one of the two limits is probably a
    mistake. Each term is reported once.
    """
    latencies = [placed_term for placed_term in draft.terms if placed_term.term.is_latency]
    for placed_term in latencies:
        for other in latencies:
            if other.requirement != placed_term.requirement:
                continue
            problem = _implied_by(placed_term.term, other.term)
            if problem is not None:
                errors.add_problem(draft.location_of(placed_term), placed_term.term, problem)
                break


def _implied_by(term: ContractTerm, other: ContractTerm) -> Problem | None:
    """Return the problem of a latency term that holds whenever another one holds, or None.

    This is so if the other term has a tighter limit at a higher percentile of the same latency, or
    at the same percentile of a longer latency: E2E includes TTFT, and the time of a task includes
    its waits.
    """
    if other.limit >= term.limit or other.class_name != term.class_name:
        return None
    limit = format_time(other.limit)
    if other.kind == term.kind and other.quantile > term.quantile:
        return Problem(
            "conflict",
            f"a looser limit than at {other.percentile} ({limit})",
            "a lower percentile cannot be the larger one: one of the two is a slip",
        )
    if other.quantile != term.quantile:
        return None
    if other.kind == "e2e" and term.kind in ("ttft", "first_answer"):
        return Problem(
            "conflict",
            f"longer than the whole answer may take ({limit})",
            "E2E holds it: one of the two is a slip",
        )
    if other.kind == "task_time" and term.kind in TASK_WAIT_TERMS:
        return Problem(
            "conflict",
            f"longer than the whole task may take ({limit})",
            "the task time holds it: one of the two is a slip",
        )
    return None


def _check_workload_terms(draft: LevelDraft, plan: LevelPlan, errors: ContractErrors) -> None:
    """Report terms that do not fit the requests of the workload.

    A term has at most one problem of this kind, because a class that does not exist explains the
    others.
    """
    requests = plan.workload.requests
    classes = requests.classes if isinstance(requests, Mix) else {}
    for placed_term in draft.terms:
        term = placed_term.term
        location = draft.location_of(placed_term)
        if term.class_name and term.class_name not in classes:
            hint = "its requests are all of one kind"
            if classes:
                hint = did_you_mean(term.class_name, list(classes))
            text = f'{plan.level.workload} has no class "{term.class_name}"'
            errors.add(location, "unknown_name", text, hint)
            continue
        problem = (
            _find_task_problem(term, plan)
            or _find_tenant_problem(term, plan, classes)
            or _find_slo_problem(term, plan, classes)
        )
        if problem is not None:
            errors.add_problem(location, term, problem)


def _find_task_problem(term: ContractTerm, plan: LevelPlan) -> Problem | None:
    """Return the problem of a term about tasks whose requests are not all parts of tasks.

    A task is a conversation or an agentic session of several requests. Return None if there is no
    problem.
    """
    if not term.is_about_tasks:
        return None
    classes = plan.classes_of(term)
    if not any(class_plan.is_session for class_plan in classes):
        of_class = f" of class {term.class_name}" if term.class_name else ""
        return Problem(
            "mismatch",
            f"the requests{of_class} of {plan.level.workload} stand alone, there are no tasks",
            "a workload with steps or turns, like coding-agent or agentic",
        )
    if term.kind == "task_cost" and not all(class_plan.is_session for class_plan in classes):
        return Problem(
            "unsupported",
            "single requests beside the tasks are paid from the same machines",
            "cost: what a thousand good requests cost",
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
    if not tenants_of({name: request_class.tenant for name, request_class in classes.items()}):
        return Problem(
            "mismatch",
            f"{plan.level.workload} has no two tenants",
            "a workload with classes, like noisy-neighbour or mixed",
        )
    if not all(class_plan.slo for class_plan in plan.classes_of(term)):
        return Problem(
            "no_slo",
            "nothing says when a request is good",
            "slo: {ttft: 2s, tpot: 100ms} in each class, or of all",
        )
    return None


def _find_slo_problem(
    term: ContractTerm, plan: LevelPlan, classes: Mapping[str, RequestClass]
) -> Problem | None:
    """Return the problem of a term if it is not defined what good means, or None.

    A term about good tasks needs an SLO for tasks. A term about the whole load is ambiguous if the
    classes of its requests have different SLOs.
    """
    has_task_slo = any(
        class_plan.slo and class_plan.slo.task for class_plan in plan.classes_of(term)
    )
    if term.requires("task_slo") and not has_task_slo:
        return Problem(
            "no_slo",
            "nothing says when a task is good",
            "slo: {task: {within: 90s, wait: 2s}}",
        )
    is_about_all = term.kind in WHOLE_LOAD_GOODPUT_TERMS and not term.class_name
    if is_about_all and any(request_class.slo for request_class in classes.values()):
        first_class = next(iter(classes))
        return Problem(
            "ambiguous",
            "its classes have SLOs of their own",
            f"goodput: {{share: 99%, class: {first_class}}}",
        )
    return None


def _check_contract_inputs(
    draft: LevelDraft, plan: LevelPlan | None, inputs: LintInputs, errors: ContractErrors
) -> None:
    """Report terms that need something the contract does not give.

    This is an SLO, the number of GPUs, prices, or another level to compare with. The SLO of a term
    about a class was checked with the classes of the workload.
    """
    missing = _missing_inputs(plan, inputs)
    level_names = dict.fromkeys(other.name for other in inputs.drafts)
    other_levels = [name for name in level_names if name != draft.name]
    for placed_term in draft.terms:
        term = placed_term.term
        location = draft.location_of(placed_term)
        if not term.class_name:
            for requirement in term.definition.requirements:
                if requirement in missing:
                    errors.add_problem(location, term, missing[requirement])
        if term.level and term.level not in other_levels:
            text = f'there is no other level "{term.level}"'
            errors.add(location, "unknown_name", text, did_you_mean(term.level, other_levels))


def _missing_inputs(plan: LevelPlan | None, inputs: LintInputs) -> dict[str, Problem]:
    """Return the requirements of terms that the contract does not meet, with the problem of each.

    The SLO of a level that could not be planned is not known, so it is not reported as missing.
    """
    missing = {}
    if plan is not None and plan.workload.slo is None:
        missing["slo"] = Problem(
            "no_slo", "nothing says when a request is good", "slo: {ttft: 2s, tpot: 100ms}"
        )
    if inputs.gpus is None and "gpus" not in inputs.document:
        missing["gpus"] = Problem(
            "missing_option",
            "nobody says how many GPUs there are",
            "gpus: 8 in the contract, or --gpus 8",
        )
    if "prices" not in inputs.document:
        missing["prices"] = Problem(
            "no_price",
            "there are no prices",
            "prices: prices.yaml, relative to the contract (docs/prices.example.yaml)",
        )
    return missing
