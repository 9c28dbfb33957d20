"""Texts about the SLO of a run: its objectives, the measured values, and which ones were missed.

Pure. An SLO consists of objectives on percentiles ("TTFT p95 at most 2 s"), optionally a minimum
percentage of requests that meet all of them, and optionally an objective for whole tasks. A
workload with request classes may have one SLO per class instead.
"""

from __future__ import annotations

import math
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from loadgen.core import format, slo
from loadgen.core.metrics.summary import Summary, fails_by_errors
from loadgen.runs.answers_objective import (
    describe_answers_result,
    describe_missed_answers,
    find_answers_objective,
)
from loadgen.runs.fluidity import (
    describe_fluidity_objective,
    describe_fluidity_result,
    describe_missed_index,
    find_fluidity_objective,
    list_fluidity_objectives,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from loadgen.core.metrics.goodput import Goodput
    from loadgen.core.metrics.part_summaries import ClassSummary
    from loadgen.core.metrics.slo_terms import TermResult
    from loadgen.core.metrics.task_summary import TaskGoodput

    SloScope = Summary | ClassSummary
    """The summary of everything that can have an SLO: a run, or one of its request classes."""

MAX_DIGITS = 12
"""With so many significant digits, a value is shown differently from a limit that it exceeds."""


class Objective(NamedTuple):
    """An objective of an SLO with its outcome.

    Attributes:
        text: The objective, with the name of its request class before it if it has one.
        is_met: Whether it was met, or None if the run cannot decide it.
    """

    text: str
    is_met: bool | None


class NamedScope(NamedTuple):
    """A run or a request class that may have an SLO.

    Attributes:
        prefix: What precedes the text of its objectives: "" or the name of the class with a colon.
        scope: Its summary.
    """

    prefix: str
    scope: SloScope


# -- objectives ------------------------------------------------------------------------------------


def list_slo_scopes(summary: Summary) -> Iterator[NamedScope]:
    """Yield the run, and each of its request classes if they have SLOs of their own."""
    yield NamedScope("", summary)
    has_slo_of_run = bool(summary.goodput.slo) or find_fluidity_objective(summary) is not None
    if not has_slo_of_run:
        for request_class in summary.classes:
            yield NamedScope(f"{request_class.name}: ", request_class)


def list_objectives(summary: Summary) -> tuple[str, ...]:
    """Return all objectives of a run as texts: percentiles, the good requests, and tasks."""
    return tuple(objective.text for objective in judge_objectives(summary))


def judge_objectives(summary: Summary) -> Iterator[Objective]:
    """Yield all objectives of a run and of its request classes, with their outcomes."""
    for prefix, scope in list_slo_scopes(summary):
        for objective in list_scope_objectives(scope):
            yield Objective(f"{prefix}{objective.text}", objective.is_met)


def list_scope_objectives(scope: SloScope, *, with_tasks: bool = True) -> Iterator[Objective]:
    """Yield the objectives of a run or of a request class, in the order in which they are shown.

    The limits of percentiles come first, then the required percentage of requests that meet all of
    these limits, then the required percentage of tasks, then the fluidity index, then the share of
    right answers. A task is a conversation or an agent's sequence of requests.

    Args:
        scope: The summary of the run or of the class.
        with_tasks: Whether to include the objective for tasks.
    """
    goodput = scope.goodput
    for term in goodput.slo:
        yield Objective(term.objective, term.met)

    if goodput.share_limit is not None:
        text = f"{format_limit(goodput.share_limit)} of requests meet the SLO"
        yield Objective(text, is_attainment_met(goodput))

    tasks = find_task_goodput(scope)
    if with_tasks and tasks is not None:
        text = f"{format_limit(tasks.share_limit)} of tasks {describe_task_limits(tasks)}"
        yield Objective(text, tasks.met)

    fluidity = find_fluidity_objective(scope)
    if fluidity is not None:
        yield Objective(describe_fluidity_objective(scope), fluidity.met)

    answers = find_answers_objective(scope)
    if answers is not None:
        yield Objective(answers.text, answers.met)


def is_attainment_met(goodput: Goodput) -> bool | None:
    """Return whether enough requests met all limits, or None if that is unknown or not required."""
    if goodput.share is None or goodput.share_limit is None:
        return None
    return goodput.share >= goodput.share_limit


def have_same_slo(first: Summary, second: Summary) -> bool:
    """Return whether two runs have the same objectives.

    A scope is the run itself or one of its request classes, which may have objectives of their own.
    The runs must have the same scopes, and each scope the same objectives. The objective for tasks
    is known only from the results of tasks, so it is not compared if no task ended in one of the
    runs.
    """
    first_scopes = dict(list_slo_scopes(first))
    second_scopes = dict(list_slo_scopes(second))
    if first_scopes.keys() != second_scopes.keys():
        return False
    return all(
        _have_same_objectives(first_scopes[name], second_scopes[name]) for name in first_scopes
    )


def _have_same_objectives(first: SloScope, second: SloScope) -> bool:
    """Return whether two runs, or the same class of both, have the same objectives in any order."""
    both_have_tasks = first.sessions is not None and second.sessions is not None
    first_objectives = list_scope_objectives(first, with_tasks=both_have_tasks)
    second_objectives = list_scope_objectives(second, with_tasks=both_have_tasks)
    first_texts = {objective.text for objective in first_objectives}
    second_texts = {objective.text for objective in second_objectives}
    return first_texts == second_texts


def find_task_goodput(scope: SloScope) -> TaskGoodput | None:
    """Return how many tasks met their objective, or None if the SLO has no objective for tasks."""
    return None if scope.sessions is None else scope.sessions.goodput


def describe_task_limits(tasks: TaskGoodput) -> str:
    """Return the limits of a task: `within 90 s and no wait of more than 2 s`."""
    return slo.describe_task_limits(tasks.within_ms, tasks.wait_ms)


def format_limit(share: float) -> str:
    """Return a required share as the user wrote it: 0.995 is `99.5 %`."""
    return f"{share * 100:g} %"


# -- measured values -------------------------------------------------------------------------------


def format_term_value(term: TermResult) -> str:
    """Return the measured value of an objective such as "TTFT p95 at most 2 s".

    - `174 ms`: the value.
    - `~174 ms`: there are too few samples for the percentile.
    - `170-181 ms`: the timestamps are too uncertain for a single value.
    - `no response`: the percentile falls on a request without a response, which counts as
      infinitely slow.
    - `not measured`: the objective is undecided, or there are no samples.
    """
    if term.low_ms is not None and term.high_ms is not None:
        low = format.milliseconds(term.low_ms)
        high = format.milliseconds(term.high_ms)
        return f"{format.value_range(low, high, joint='-')} ms"

    if term.undecided:
        return "not measured"

    if term.value_ms is None:
        has_samples = term.count > 0
        return "no response" if has_samples else "not measured"

    mark = "" if term.supported else "~"
    return f"{mark}{_format_against_limit(term.value_ms, term.limit_ms)} ms"


def _format_against_limit(value_ms: float, limit_ms: float) -> str:
    """Return a value with as many digits as distinguish it from a limit that it exceeds.

    A p95 of 40.004 ms misses a limit of 40 ms, and "40.0 ms" would look as if it met it.
    """
    if value_ms <= limit_ms:
        return format.quantity(value_ms)
    for digits in range(3, MAX_DIGITS):
        value = format.quantity(value_ms, digits)
        if value != format.quantity(limit_ms, digits):
            return value
    return format.quantity(value_ms, MAX_DIGITS)


def count_violations(term: TermResult) -> str:
    """Return how many requests violated an objective: `3 of 1,500`."""
    text = f"{format.count(term.over)} of {format.count(term.count)}"
    if term.unfinished:
        return f"{text}, {format.count(term.unfinished)} unfinished"
    return text


# -- outcomes --------------------------------------------------------------------------------------


NOT_JUDGED = "not judged, because the run is INVALID"
"""The goodput of a run that does not judge its SLO."""


def is_judged(summary: Summary, is_met: bool | None) -> bool:
    """Return whether an objective has an outcome that may be shown: met, missed or undecided.

    In a valid run, None means that the run cannot decide the objective. In a run that is not valid,
    None means that the objective was not judged at all, because the measurement is not reliable.
    """
    return summary.verdict.valid or is_met is not None


def is_slo_undecided(summary: Summary) -> bool:
    """Return whether a valid run has objectives, of any kind, and decides neither met nor missed.

    Objectives can be limits of latencies, tasks, token deadlines or right answers.
    """
    has_outcome = not summary.verdict.valid or summary.goodput.met is not None
    return not has_outcome and any(True for _ in judge_objectives(summary))


def describe_outcome(is_met: bool | None) -> str:
    """Return the outcome of an SLO or of an objective as a word."""
    if is_met is None:
        return "UNDECIDED"
    return "met" if is_met else "MISSED"


def describe_judged_outcome(summary: Summary, is_met: bool | None) -> str:
    """Return the outcome of an SLO or of an objective as a word: NOT JUDGED in an invalid run."""
    return describe_outcome(is_met) if is_judged(summary, is_met) else "NOT JUDGED"


def outcome_color(is_met: bool | None) -> str:
    """Return the color of an outcome in charts, as `render.page` names colors."""
    if is_met is None:
        return "soft"
    return "good" if is_met else "bad"


def missed_objectives(summary: Summary) -> tuple[str, ...]:
    """Return a text for each missed objective: `TTFT p95 is 2,140 ms, limit 2,000 ms`."""
    return tuple(
        f"{prefix}{text}"
        for prefix, scope in list_slo_scopes(summary)
        for text in _describe_missed_objectives(scope)
    )


def _describe_missed_objectives(scope: SloScope) -> Iterator[str]:
    """Yield a text for each missed objective of a run or a request class, with the numbers.

    Limits of percentiles come first, then the objective for tasks, then the required percentage of
    requests that meet every limit, then the fluidity index, then the share of right answers. An
    objective is missed if its outcome is False; None means that it is undecided.
    """
    goodput = scope.goodput
    for percentile_objective in goodput.slo:
        if percentile_objective.met is False:
            yield _describe_missed_term(percentile_objective)

    tasks = find_task_goodput(scope)
    if tasks is not None and tasks.met is False:
        yield f"only {_describe_good_tasks(tasks)}"

    if goodput.share_limit is not None and is_attainment_met(goodput) is False:
        required = format_limit(goodput.share_limit)
        yield f"only {describe_good_requests(goodput)} met the SLO, {required} required"

    fluidity = find_fluidity_objective(scope)
    if fluidity is not None and fluidity.met is False:
        yield describe_missed_index(fluidity)

    answers = find_answers_objective(scope)
    if answers is not None and answers.met is False:
        yield describe_missed_answers(answers)


def _describe_missed_term(term: TermResult) -> str:
    name = slo.name(term.metric, term.quantile)
    if term.value_ms is None and term.count:
        return f"{name} falls on a request without a response"
    if term.value_ms is None:
        return f"{name} was not measured"
    value = _format_against_limit(term.value_ms, term.limit_ms)
    return f"{name} is {value} ms, limit {term.limit_ms:,.10g} ms"


def _describe_good_tasks(tasks: TaskGoodput) -> str:
    good = f"{format.count(tasks.good)} tasks ({format.percent(tasks.share)})"
    required = format_limit(tasks.share_limit)
    return f"{good} ended {describe_task_limits(tasks)}, {required} required"


def describe_good_requests(goodput: Goodput) -> str:
    """Return how many requests met every objective: `1,480 of 1,500 requests (98.7 %)`."""
    counted = format.counted(goodput.counted, "request")
    return f"{format.count(goodput.good)} of {counted} ({format.percent(goodput.share)})"


# -- the result in one sentence --------------------------------------------------------------------


def describe_result(summary: Summary) -> str:
    """Return the result of a run in one sentence, with the numbers.

    An INVALID run has no other result. The result of a valid run is the outcome of its SLO: on
    requests, or else on tasks. Without an SLO it is that too many requests failed, or how many
    succeeded.
    """
    if not summary.verdict.valid:
        return "INVALID: do not use these results."
    if summary.goodput.has_slo:
        return _describe_slo_result(summary)

    tasks = find_task_goodput(summary)
    if tasks is not None and tasks.met is not None:
        outcome = "met" if tasks.met else "missed"
        sentences = [f"SLO {outcome}: {_describe_good_tasks(tasks)}."]
        sentences.append(describe_load_objectives(summary))
        return " ".join(sentences).rstrip()

    load_objectives = describe_load_objectives(summary)
    if load_objectives:
        return load_objectives

    if fails_by_errors(summary):
        return _describe_error_rate(summary)

    return _describe_success(summary)


def describe_fluidity_outcome(summary: Summary) -> str:
    """Return the result of an SLO without limits on requests, by its fluidity objectives.

    The run or its request classes may have such objectives. Return "" if there are none.
    """
    run_objective = find_fluidity_objective(summary)
    if run_objective is not None:
        return describe_fluidity_result(run_objective)
    if not list(list_fluidity_objectives(summary)):
        return ""

    is_met = summary.goodput.met
    if is_met is None:
        return _describe_undecided(summary)
    if is_met:
        return f"SLO met: {join_with_and(list_objectives(summary))}."
    return f"SLO missed: {'; '.join(missed_objectives(summary))}."


def describe_load_objectives(summary: Summary) -> str:
    """Return the result of an SLO without limits on requests, or "" if it has no objectives.

    Its objectives are those of token deadlines and of checked answers. Each has a sentence.
    """
    sentences = [describe_fluidity_outcome(summary)]
    answers = find_answers_objective(summary)
    if answers is not None:
        sentences.append(describe_answers_result(answers))

    return " ".join(sentences).strip()


def _describe_slo_result(summary: Summary) -> str:
    """Return whether a valid run met its SLO on requests, and what it missed."""
    goodput = summary.goodput
    if goodput.met:
        return _describe_met(summary)
    if goodput.met is None:
        return _describe_undecided(summary)

    reasons = list(missed_objectives(summary))
    if goodput.share_limit is None and goodput.good is not None:
        reasons.append(f"{describe_good_requests(goodput)} met every limit")

    return f"SLO missed: {'; '.join(reasons)}."


def _describe_error_rate(summary: Summary) -> str:
    failed = summary.requests.failed_by_server
    decided = summary.requests.decided
    limit = format.percent(summary.verdict.limits.failure_share)
    return (
        f"Too many errors: {format.count(failed)} of {format.counted(decided, 'request')} failed "
        f"({format.percent(failed / decided)}, limit {limit})."
    )


def _describe_success(summary: Summary) -> str:
    ok = summary.requests.ok
    decided = summary.requests.decided
    share = format.percent(ok / decided if decided else None)
    return (
        f"No SLO set. {format.count(ok)} of {format.counted(decided, 'request')} succeeded "
        f"({share})."
    )


def _describe_met(summary: Summary) -> str:
    """Return that the SLO was met, by how many requests, and on how many samples if too few."""
    objectives = join_with_and(list_objectives(summary))
    good = describe_good_requests(summary.goodput)
    sentences = [f"SLO met: {objectives}.", f"{good} met every limit."]
    sentences += _describe_too_few_samples(summary)
    return " ".join(sentences)


def _describe_undecided(summary: Summary) -> str:
    """Return why it is undecided whether a valid run met its SLO, and what to do.

    Either requests were unfinished when the run ended, or objectives are undecided by themselves,
    for example because of too few samples.
    """
    goodput = summary.goodput
    if goodput.unfinished:
        unfinished = _describe_unfinished(summary)
        return f"SLO undecided: {unfinished}. Use a longer --grace, or leave it out."

    return f"SLO undecided: {'; '.join(list_undecided_reasons(summary))}."


def list_undecided_reasons(summary: Summary) -> tuple[str, ...]:
    """Return why it is undecided whether a valid run met its SLO, each reason once.

    Either requests were unfinished, or there is a reason for each undecided objective. Return
    nothing if the SLO is met or missed, and for a run that is not valid, whose objectives are not
    judged.
    """
    if not summary.verdict.valid or summary.goodput.met is not None:
        return ()
    if summary.goodput.unfinished:
        return (_describe_unfinished(summary),)

    distinct_reasons = dict.fromkeys(
        f"{prefix}{reason}"
        for prefix, scope in list_slo_scopes(summary)
        for reason in _list_undecided_objectives(scope)
    )
    return tuple(distinct_reasons)


def _describe_unfinished(summary: Summary) -> str:
    """Return how many requests had no response yet when the run stopped to wait for them."""
    unfinished = format.count(summary.requests.unfinished)
    scheduled = format.counted(summary.requests.scheduled, "request")
    return f"{unfinished} of {scheduled} were unfinished when the drain ended"


def _list_undecided_objectives(scope: SloScope) -> Iterator[str]:
    """Yield each undecided objective of a run or request class, with the reason."""
    for term in scope.goodput.slo:
        if term.undecided:
            yield f"{term.objective}: {term.undecided}"

    fluidity = find_fluidity_objective(scope)
    if fluidity is not None and fluidity.undecided:
        yield f"{fluidity.text}: {fluidity.undecided}"

    answers = find_answers_objective(scope)
    if answers is not None and answers.undecided:
        yield f"{answers.text}: {answers.undecided}"


class _UnsupportedTerm(NamedTuple):
    """An objective that rests on too few samples, with the prefix that names its request class."""

    class_prefix: str
    term: TermResult

    @property
    def needed_runs(self) -> float:
        """How many runs like this one would have enough samples; infinite if it has none."""
        return self.term.needed / self.term.count if self.term.count else math.inf


def _describe_too_few_samples(summary: Summary) -> Iterator[str]:
    """Yield a sentence if a percentile of the SLO rests on too few samples.

    It is about the objective that would need the longest run, names its request class, and says for
    how long the same load would have to run to produce the samples.
    """
    unsupported = [
        _UnsupportedTerm(prefix, term)
        for prefix, scope in list_slo_scopes(summary)
        for term in scope.goodput.slo
        if not term.supported and not term.undecided
    ]
    if not unsupported:
        return

    most_demanding = max(unsupported, key=attrgetter("needed_runs"))
    term = most_demanding.term
    needed_samples = term.needed
    measured_samples = term.count
    percentile = f"{most_demanding.class_prefix}{slo.name(term.metric, term.quantile)}"
    duration_s = summary.window.duration_s

    needed_load = ""
    if duration_s is not None and measured_samples:
        needed_s = duration_s * needed_samples / measured_samples
        needed_load = f", about {format.duration(needed_s)} of this load"

    yield (
        f"Low confidence: {percentile} needs {needed_samples:,} samples"
        f"{needed_load}, and this run has {measured_samples:,}."
    )


def join_with_and(texts: tuple[str, ...]) -> str:
    """Return texts as a list in a sentence: `A, B and C`."""
    if len(texts) < 2:
        return "".join(texts)
    return f"{', '.join(texts[:-1])} and {texts[-1]}"
