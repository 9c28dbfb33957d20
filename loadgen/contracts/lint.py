"""Checks a contract before the first request: contradictions, missing inputs, and samples too small for their terms.

Takes the drafts of the levels; returns the planned load of each level and the faults with their places in the file.
Reads only the workload files that the levels name, and the price file through the function it is given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from msgspec.structs import replace

from loadgen.contracts import auto_duration, level_plan
from loadgen.contracts.sample_sizes import (
    WINDOWS,
    requests_for_ratio,
    requests_without_miss,
    required_requests,
)
from loadgen.contracts.schema import (
    ANSWER_KINDS,
    OF_TASKS,
    SHARES_OF_ANSWERS,
    AnswerCheck,
    Contract,
    ContractLevel,
    Draft,
    Planned,
    Promise,
    is_time,
    kind_of,
    time_words,
    words,
)
from loadgen.contracts.steady_samples import NEARLY
from loadgen.core import format
from loadgen.core.analysis.fairness import tenants_of
from loadgen.core.errors import Code, CombinedError, LoadgenError, UserError, did_you_mean
from loadgen.core.limits import FEWEST_ANSWERS
from loadgen.core.stats import intervals
from loadgen.core.workload import Closed, Mix, Poisson, Slo, Workload
from loadgen.core.workload import load as load_workload
from loadgen.core.workload.diagnostics import locate
from loadgen.core.workload.flags import Overrides
from loadgen.core.workload.loading import packaged_files
from loadgen.core.workload.yaml_marks import Map, place_at
from loadgen.figures import pooled_figures

POOLED_REPEATS = 3  # pooled gaps are correlated within a run, so each repeat counts as one sample

_WAITS_OF_TASKS = ("task_wait", "task_longest_wait")
Where = tuple[str | int, ...]


class _FaultReport:
    """Collects faults: `here` in the contract file `top`, `elsewhere` in the files that it names."""

    def __init__(self, top: Map, file: str) -> None:
        self.top, self.file = top, file
        self.here: list[LoadgenError] = []
        self.elsewhere: list[LoadgenError] = []

    def fault(self, code: Code, loc: Where, what: str, hint: str) -> None:
        spot, path, _ = locate(self.top, loc)
        self.here.append(UserError(code, what, place_at(self.file, spot, path), hint))


def check(
    contract: Contract,
    drafts: Sequence[Draft],
    top: Map,
    file: str,
    folder: Path,
    *,
    gpus: int | None,
    longest_ns: int | None,
    env: Mapping[str, str],
    load_prices: Callable[[Path], object],
    read_questions: ReadQuestions,
    against: bool,
) -> tuple[list[Planned], list[LoadgenError], list[LoadgenError]]:
    """The plans of all levels that are correct enough; the faults in the contract; the faults in the files it names.

    `contract`: without levels. `longest_ns`: a level's load lasts so long at most. `load_prices` reads a price file, or
    raises Fault or Faults; `read_questions` the first so many prompts of a data set. `against`: whether another
    endpoint was given for the answers.
    """
    report = _FaultReport(top, file)
    names: dict[str, int] = {}
    if (
        "answers" in top
        and (index := next((one.index for one in drafts if one.name == "answers"), None))
        is not None
    ):
        what = 'the verdict on the answers has the name of this level: "answers"'
        report.fault("duplicate", ("levels", index, "name"), what, "give the level another name")
    for draft in drafts:
        if draft.name and draft.name in names:
            what = f'two levels are called "{draft.name}"'
            report.fault("duplicate", ("levels", draft.index, "name"), what, "give each its own")
        names.setdefault(draft.name, draft.index)
    _check_prices(contract.prices, report, folder, load_prices)
    planned = []
    for draft in drafts:
        planned_level = _planned_level(draft, contract.slo, folder, report, env)
        if planned_level is not None and auto_duration.is_auto(planned_level.level):
            terms = [term for _, _, term in draft.terms]
            planned_level = auto_duration.with_needed_length(planned_level, terms, contract)
        if planned_level is not None and longest_ns is not None:
            planned_level = level_plan.shortened(planned_level, longest_ns)
        has_slo = planned_level is None or planned_level.workload.slo is not None
        _check_classes(draft, planned_level, report)
        _check_contradictions(draft, planned_level, report)
        _check_missing(
            draft,
            report,
            has_slo=has_slo,
            has_gpus=gpus is not None or "gpus" in top,
            others=list(names),
        )
        if planned_level is not None:
            planned.append(_check_samples(draft, planned_level, contract, report))
    if contract.answers is not None:
        _check_answers(
            contract.answers, contract.confidence, report, folder, read_questions, against=against
        )
    return planned, report.here, report.elsewhere


def _check_prices(
    name: str | None, report: _FaultReport, folder: Path, load_prices: Callable[[Path], object]
) -> None:
    if name is None:
        return
    try:
        load_prices(folder / name)
    except CombinedError as faults:
        report.elsewhere.extend(faults.faults)
    except LoadgenError as fault:
        report.fault(fault.code, ("prices",), fault.what, fault.hint)


# -- the load ----------------------------------------------------------------------------------------------------


def _planned_level(
    draft: Draft, slo: Slo | None, folder: Path, report: _FaultReport, env: Mapping[str, str]
) -> Planned | None:
    """The level's workload under the level's own load. None, with the faults reported, where one of them is wrong."""
    level_loc: Where = ("levels", draft.index)
    path = None
    if draft.workload is not None:
        path = _workload_path(draft.workload, folder)
        if path is None:
            nearby = [str(other.relative_to(folder)) for other in sorted(folder.glob("*.yaml"))]
            hint = (
                did_you_mean(draft.workload, [*packaged_files(), *nearby])
                + "; or a path relative to the contract"
            )
            report.fault(
                "unknown_name",
                (*level_loc, "workload"),
                f'there is no workload "{draft.workload}"',
                hint,
            )
    level = draft.level
    if level is None or path is None:
        return None
    if level.rate is not None and level.concurrency is not None:
        what = "rate is an open loop, concurrency a closed one: not both"
        report.fault("conflict", (*level_loc, "concurrency"), what, "make two levels of it")
        return None
    try:
        workload = load_workload(path, _overrides(level), env)
    except CombinedError as faults:
        for problem in faults.faults:
            if problem.where.startswith("--"):
                report.fault(problem.code, level_loc, problem.what, problem.hint)
            elif problem.code in ("no_load", "endless"):
                hint = "give rate: 10/s (or concurrency: 8) and duration: 10m (or requests: 700)"
                report.fault(problem.code, level_loc, problem.what, hint)
            elif problem not in report.elsewhere and str(problem) not in map(str, report.elsewhere):
                report.elsewhere.append(problem)
        return None
    slo = level.slo or slo or workload.slo
    limits = workload.limits.model_copy(update=dict.fromkeys(level_plan.JUDGED_HERE, 1.0))
    workload = workload.model_copy(update={"slo": slo, "limits": limits})
    return level_plan.planned(level, workload)


def _workload_path(name: str, folder: Path) -> str | None:
    file = folder / name
    with suppress(OSError):  # no name of a file: too long, for one
        if file.is_file():
            return str(file)
    return name if name in packaged_files() else None


def _provisional_ns(level: ContractLevel) -> int | None:
    """Return the length of a level's load, as far as it is known before its terms are looked at."""
    has_own_load = level.rate is not None or level.concurrency is not None
    if auto_duration.is_auto(level) and has_own_load:
        return auto_duration.PROVISIONAL_NS
    return level.duration_ns


def _overrides(level: ContractLevel) -> Overrides:
    return Overrides(
        request_rate=None if level.rate is None else round(level.rate, 9),
        concurrency=level.concurrency,
        duration=_provisional_ns(level),
        num_requests=level.requests,
        grace=level.grace_ns,
        warmup_ns=level.warmup_ns,
    )


# -- contradictions ----------------------------------------------------------------------------------------------


def _strictness(term: Promise) -> float:
    """How strict a term is. Comparable between terms of the same subject; larger is stricter."""
    return -float(term.limit) if term.is_at_most else float(term.limit)


def _check_contradictions(draft: Draft, plan: Planned | None, report: _FaultReport) -> None:
    must_terms: dict[Promise, Promise] = {}
    places: dict[tuple[str, Promise], int] = {}
    for kind, place, term in draft.terms:
        loc, key = (
            ("levels", draft.index, kind, place),
            term._replace(limit=None, currency=""),
        )  # what it is about
        if (kind, key) in places:
            what = f"{words(term)}: said twice"
            report.fault(
                "duplicate",
                loc,
                what,
                f"item {places[kind, key] + 1} of {kind} says it already; keep one",
            )
            continue
        places[kind, key] = place
        if kind == "must":
            must_terms[key] = term
        elif key in must_terms and _strictness(term) <= _strictness(must_terms[key]):
            what = f"{words(term)}: this should asks for no more than the must"
            report.fault(
                "no_effect",
                loc,
                what,
                "a should is stricter than its must; leave it out, or swap the two",
            )
        if plan is not None and term.kind in ("requests", "good_requests", "tasks", "good_tasks"):
            _check_offered_rate(term, loc, plan, report)
    latencies = [one for one in draft.terms if is_time(one[2].kind)]
    for kind, place, term in latencies:
        for other in (
            other
            for other_kind, _, other in latencies
            if other_kind == kind and other.limit < term.limit
        ):
            what = ""
            if other.class_name != term.class_name:
                continue
            if other.kind == term.kind and other.quantile > term.quantile:
                what = f"a looser limit than at {other.at} ({time_words(other.limit)})"
                hint = "a lower percentile cannot be the larger one: one of the two is a slip"
            elif (
                other.kind == "e2e"
                and term.kind in ("ttft", "first_answer")
                and other.quantile == term.quantile
            ):
                what = f"longer than the whole answer may take ({time_words(other.limit)})"
                hint = "E2E holds it: one of the two is a slip"
            elif (
                other.kind == "task_time"
                and term.kind in _WAITS_OF_TASKS
                and other.quantile == term.quantile
            ):
                what = f"longer than the whole task may take ({time_words(other.limit)})"
                hint = "the task time holds it: one of the two is a slip"
            if what:
                report.fault(
                    "conflict", ("levels", draft.index, kind, place), f"{words(term)}: {what}", hint
                )
                break


def _check_offered_rate(term: Promise, loc: Where, plan: Planned, report: _FaultReport) -> None:
    closed = any(
        isinstance(stage.arrival, Closed) for stage in plan.workload.stages if stage.measured
    )
    if closed or plan.starts is None or plan.duration_ns is None:
        return
    offered = plan.starts * level_plan.each(term, plan) / (plan.duration_ns / 1e9)
    if term.limit > offered * (1 + 1e-9):
        what = f"{words(term)}: more than the {format.quantity(offered)}/s that this level offers"
        report.fault(
            "out_of_range",
            loc,
            what,
            "no server can answer more than it is asked: raise the level's rate",
        )


def _check_classes(draft: Draft, plan: Planned | None, report: _FaultReport) -> None:
    """Report terms about a class or tasks that the workload does not have, or that have no SLO to be good under."""
    if plan is None:
        return
    requests = plan.workload.requests
    classes = requests.classes if isinstance(requests, Mix) else {}
    tenants = {name: one.tenant for name, one in classes.items()}
    for kind, place, term in draft.terms:
        loc: Where = ("levels", draft.index, kind, place)
        if term.class_name and term.class_name not in classes:
            hint = (
                did_you_mean(term.class_name, list(classes))
                if classes
                else "its requests are all of one kind"
            )
            report.fault(
                "unknown_name", loc, f'{plan.level.workload} has no class "{term.class_name}"', hint
            )
            continue
        parts = level_plan.of_term(term, plan)
        if term.kind in OF_TASKS and not any(part.is_session for part in parts):
            of_class = f" of class {term.class_name}" if term.class_name else ""
            what = f"{words(term)}: the requests{of_class} of {plan.level.workload} stand alone, there are no tasks"
            report.fault(
                "mismatch",
                loc,
                what,
                "a workload with steps or turns, like coding-agent or agentic",
            )
        elif term.kind == "task_cost" and not all(part.is_session for part in parts):
            what = (
                f"{words(term)}: single requests beside the tasks are paid from the same machines"
            )
            report.fault("unsupported", loc, what, "cost: what a thousand good requests cost")
        elif "tenants" in kind_of(term.kind).needs and not tenants_of(tenants):
            what = f"{words(term)}: {plan.level.workload} has no two tenants"
            report.fault(
                "mismatch", loc, what, "a workload with classes, like noisy-neighbour or mixed"
            )
        elif "tenants" in kind_of(term.kind).needs and not all(part.slo for part in parts):
            what = f"{words(term)}: nothing says when a request is good"
            report.fault(
                "no_slo", loc, what, "slo: {ttft: 2s, tpot: 100ms} in each class, or of all"
            )
        elif "task_slo" in kind_of(term.kind).needs and not any(
            part.slo and part.slo.task for part in parts
        ):
            what = f"{words(term)}: nothing says when a task is good"
            report.fault("no_slo", loc, what, "slo: {task: {within: 90s, wait: 2s}}")
        elif (
            term.kind in ("goodput", "task_goodput", "good_tasks", "task_cost")
            and not term.class_name
            and any(one.slo for one in classes.values())
        ):
            what = f"{words(term)}: its classes have SLOs of their own"
            report.fault(
                "ambiguous", loc, what, f"goodput: {{share: 99%, class: {next(iter(classes))}}}"
            )


def _check_missing(
    draft: Draft, report: _FaultReport, *, has_slo: bool, has_gpus: bool, others: list[str]
) -> None:
    """Report terms that need something the contract does not give: an SLO, GPUs, prices, another level."""
    missing: dict[str, tuple[bool, Code, str, str]] = {
        "slo": (
            not has_slo,
            "no_slo",
            "nothing says when a request is good",
            "slo: {ttft: 2s, tpot: 100ms}",
        ),
        "gpus": (
            not has_gpus,
            "missing_option",
            "nobody says how many GPUs there are",
            "gpus: 8 in the contract, or --gpus 8",
        ),
        "prices": (
            "prices" not in report.top,
            "no_price",
            "there are no prices",
            "prices: prices.yaml, relative to the contract (docs/prices.example.yaml)",
        ),
    }
    for kind, place, term in draft.terms:
        loc: Where = ("levels", draft.index, kind, place)
        for need in kind_of(term.kind).needs if not term.class_name else ():
            lacks, code, what, hint = missing.get(need, (False, "no_figure", "", ""))
            if lacks:
                report.fault(code, loc, f"{words(term)}: {what}", hint)
        known = [name for name in others if name != draft.name]
        if term.level and term.level not in known:
            report.fault(
                "unknown_name",
                loc,
                f'there is no other level "{term.level}"',
                did_you_mean(term.level, known),
            )


# -- samples -----------------------------------------------------------------------------------------------------


def _all_poisson(workload: Workload) -> bool:
    return all(isinstance(stage.arrival, Poisson) for stage in workload.stages if stage.measured)


def _check_samples(
    draft: Draft, plan: Planned, contract: Contract, report: _FaultReport
) -> Planned:
    """Report terms whose load is too short, or has too few requests, for them to pass; and `apart` of one run.

    Of a level that was shortened they are no faults: the plan is returned with them in words.
    """
    level = plan.level
    if level.apart_ns is not None and level.repeats < 2:
        what = "runs are to be apart in time, and there is one"
        report.fault("too_few", ("levels", draft.index, "apart"), what, "repeats: 2 or more")
    undecidable = []
    for kind, place, term in draft.terms:
        loc: Where = ("levels", draft.index, kind, place)
        if term.kind in pooled_figures() and level.repeats < POOLED_REPEATS:
            what = f"{words(term)}: gaps within an answer hang together, so one run has no interval for them"
            report.fault(
                "too_few",
                loc,
                what,
                f"repeats: {POOLED_REPEATS} or more; or promise tpot, which is per request",
            )
        elif level_plan.each(term, plan) and (
            lacking := _too_short(term, plan, contract) or _too_few(term, plan, contract)
        ):
            what, hint = lacking
            if plan.shortened_from_ns is None:
                report.fault("too_few", loc, what, hint)
            else:
                undecidable.append(words(term))
    return replace(plan, undecidable=tuple(undecidable))


def _too_few(term: Promise, plan: Planned, contract: Contract) -> tuple[str, str] | None:
    """What is wrong, and the hint, where a term has too few requests, or no two windows."""
    level, confidence = plan.level, contract.confidence
    if term.kind in pooled_figures():
        return None
    windowed = bool(term.window_ns)
    if windowed and plan.duration_ns is not None and plan.duration_ns < WINDOWS * term.window_ns:
        length = format.duration(plan.duration_ns / 1e9)
        what = f"{words(term)}: a load of {length} has no two windows of {format.duration(term.window_ns / 1e9)}"
        return what, f"duration: {math.ceil(WINDOWS * term.window_ns / 1e9)}s or more"
    if plan.starts is None:
        return None  # a closed loop limited by time: the number is known only after the run
    each = level_plan.each(term, plan)
    available = round(plan.starts * each * level.repeats)
    if windowed and plan.rate is not None:
        available = int(plan.rate * term.window_ns / 1e9)
    least = required_requests(term, confidence)
    if term.kind == "sustained" and _all_poisson(plan.workload):
        least = max(least, requests_for_ratio(term.limit, confidence))
    if available >= least:
        return None
    scope = (
        "each window has"
        if windowed
        else f"{level.repeats} runs have"
        if level.repeats > 1
        else "there are"
    )
    noun = "tasks" if term.kind in OF_TASKS else "requests"
    what = f"{words(term)}: needs {least:,} {noun} to be shown at all, {scope} {available:,}"
    return what, _sample_hint(least / each, plan, windowed)


def _too_short(term: Promise, plan: Planned, contract: Contract) -> tuple[str, str] | None:
    """What is wrong, and the hint, where the load over all repeats is too short for what comes back rarely."""
    if plan.duration_ns is None or not (
        is_time(term.kind) or term.kind in ("goodput", "task_goodput", "fairness")
    ):
        return None  # of a closed loop by count, how long it takes is known only after the run
    length_s, repeats = plan.duration_ns / 1e9 * plan.level.repeats, plan.level.repeats
    confidence, horizon = contract.confidence, contract.horizon_ns / 1e9
    needed_s = intervals.length_for(horizon, confidence)
    if length_s >= NEARLY * needed_s:
        return None
    what = (
        f"{words(term)}: needs {format.duration(needed_s)} of load to be shown, to see what comes back within "
        f"{format.duration(horizon)}; there are {format.duration(length_s)}"
        + (f" in {repeats} runs" if repeats > 1 else "")
    )
    starts_s = (
        required_requests(term, confidence)
        / level_plan.each(term, plan)
        * length_s
        / repeats
        / (plan.starts or math.inf)
    )
    each_s = math.ceil(max(needed_s, starts_s) / repeats)
    seen_s = math.floor(intervals.recurrence(length_s, confidence) * 10) / 10
    hint = f"duration: {each_s}s or more; or, to promise less, horizon: {seen_s:g}s"
    return what, hint


def _sample_hint(least_starts: float, plan: Planned, windowed: bool) -> str:
    each = math.ceil(least_starts / (1 if windowed else plan.level.repeats))
    rate = (
        0.0
        if plan.starts is None or plan.duration_ns is None
        else plan.starts / (plan.duration_ns / 1e9)
    )
    duration = (
        ""
        if not rate
        else f"{math.ceil(each / rate)}s ({format.duration(each / rate)} at this rate)"
    )
    if windowed:
        return f"window: {duration} or more" if duration else "a longer window"
    return (
        f"requests: {each}"
        + (f", or duration: {duration}" if duration else "")
        + " or more; or a lower percentile"
    )


# -- answers -----------------------------------------------------------------------------------------------------


class Judged(Protocol):
    """What is known of a prompt whose answer is scored."""

    @property
    def reference(self) -> str | None: ...
    @property
    def choice(self) -> bool: ...
    @property
    def json(self) -> bool: ...
    @property
    def group(self) -> str: ...


ReadQuestions = Callable[[Path, int | None], Sequence[Judged]]
_SCORED: dict[str, Callable[[Judged], bool]] = {
    "reference": lambda prompt: prompt.reference is not None and not prompt.choice,
    "choice": lambda prompt: prompt.choice,
    "json": lambda prompt: prompt.json,
}
"""What a score needs of a prompt -> whether a prompt has it."""
_ROWS = {
    "reference": '{"prompt": "Name the capital of France.", "reference": "Paris"}',
    "choice": '{"prompt": "2 + 2? A: 3, B: 4", "answer": "B"}',
    "json": '{"messages": [...], "response_format": {"type": "json_object"}}',
}


def _check_answers(
    asked: AnswerCheck,
    confidence: float,
    report: _FaultReport,
    folder: Path,
    read_questions: ReadQuestions,
    *,
    against: bool,
) -> None:
    """Report a data set that cannot be read, and terms that its prompts cannot show, or that need another endpoint."""
    try:
        prompts = read_questions(folder / asked.dataset, asked.rows)
    except CombinedError as faults:
        report.elsewhere.extend(faults.faults)
        return
    except LoadgenError as fault:
        report.fault(
            fault.code,
            ("answers", "dataset"),
            fault.what,
            fault.hint or "a JSONL file, relative to the contract",
        )
        return
    classes = sorted({prompt.group for prompt in prompts} - {""})
    seen: set[tuple[str, Promise]] = set()
    terms = [(kind, *one) for kind in ("must", "should") for one in enumerate(getattr(asked, kind))]
    for kind, place, term in terms:
        loc: Where = ("answers", kind, place)
        if (kind, term._replace(limit=None)) in seen:
            report.fault("duplicate", loc, f"{words(term)}: said twice", "keep one of them")
        seen.add((kind, term._replace(limit=None)))
        needs = ANSWER_KINDS[term.kind].needs
        if "against" in needs and not (against or asked.against):
            hint = "against: http://HOST:8000 beside dataset, or --against URL"
            report.fault("missing_option", loc, f"{words(term)}: there is no other endpoint", hint)
        if term.class_name and term.class_name not in classes:
            hint = (
                did_you_mean(term.class_name, classes) if classes else 'no row of it has a "class"'
            )
            report.fault(
                "unknown_name", loc, f'{asked.dataset} has no class "{term.class_name}"', hint
            )
            continue
        need = next(
            (one for one in ANSWER_KINDS[term.of or term.kind].needs if one in _SCORED), None
        )
        usable = [
            prompt
            for prompt in prompts
            if (not term.class_name or prompt.group == term.class_name)
            and (need is None or _SCORED[need](prompt))
        ]
        if need is not None and not usable:
            report.fault(
                "missing_key",
                loc,
                f"{words(term)}: no row of {asked.dataset} says what is right",
                f"rows like {_ROWS[need]}",
            )
        elif len(usable) < (least := _prompts_needed(term, confidence)):
            what = f"{words(term)}: needs {least:,} prompts to be shown at all, there are {len(usable):,}"
            report.fault(
                "too_few",
                loc,
                what,
                "more rows in the data set" + ("" if asked.rows is None else ", and in rows:"),
            )


def _prompts_needed(term: Promise, confidence: float) -> int:
    """The least number of prompts with which a term can pass."""
    if term.kind == "within":  # so many that too many lost answers would have been met
        return intervals.unseen(1 - term.limit, confidence)
    if term.kind in SHARES_OF_ANSWERS:
        return requests_without_miss(1 - term.limit, confidence)
    return FEWEST_ANSWERS


# -- words ------------------------------------------------------------------------------------------------------


def answers_words(asked: AnswerCheck) -> list[str]:
    """What is asked about answers, and its terms, as lines of text."""
    rows = "" if asked.rows is None else f", the first {format.counted(asked.rows, 'row')}"
    other = "" if asked.against is None else f", against {asked.against}"
    terms = (("must", asked.must), ("should", asked.should))
    listed = [f"  {kind:<6} {words(term)}" for kind, of_kind in terms for term in of_kind]
    return [f"answers: {asked.dataset}{rows}{other}", *listed]
