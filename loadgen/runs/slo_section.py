"""The SLO of a run as a section of its report, and of the summary of a build. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from loadgen.core import format
from loadgen.render.section import Bullets, Kind, Paragraph, Section, Table, section
from loadgen.runs.answers_objective import (
    count_wrong_answers,
    find_answers_objective,
    format_measured_answers,
)
from loadgen.runs.fluidity import (
    count_requests_below,
    format_measured_index,
    list_fluidity_objectives,
)
from loadgen.runs.rates import select_headline_rates
from loadgen.runs.slo_text import (
    NOT_JUDGED,
    count_violations,
    describe_good_requests,
    describe_judged_outcome,
    describe_load_objectives,
    format_limit,
    format_term_value,
    is_judged,
)

if TYPE_CHECKING:
    from loadgen.core.metrics.goodput import Goodput
    from loadgen.core.metrics.slo_terms import TermResult
    from loadgen.core.metrics.summary import Summary

_KIND_BY_OUTCOME: dict[bool | None, Kind] = {True: "good", False: "bad", None: "warn"}
"""The color of the paragraph about the SLO: it was met, missed, or neither is certain."""


def slo_section(summary: Summary) -> Section:
    """Return the section of the report about the SLO.

    It has a table with a row for each objective, a sentence with the outcome of the SLO, and a list
    of the reasons why objectives are undecided.
    """
    goodput = summary.goodput
    rows = [_objective_row(summary, objective) for objective in _list_objectives(summary)]
    rows += _fluidity_rows(summary)
    rows += _answers_rows(summary)
    undecided_reasons = dict.fromkeys(  # each reason once
        f"undecided: {term.undecided}" for term in goodput.slo if term.undecided
    )
    for _, fluidity_objective in list_fluidity_objectives(summary):
        if fluidity_objective.undecided:
            undecided_reasons[f"undecided: {fluidity_objective.undecided}"] = None
    answers = find_answers_objective(summary)
    if answers is not None and answers.undecided:
        undecided_reasons[f"undecided: {answers.undecided}"] = None

    return section(
        "SLO",
        Table(("objective", "measured", "violations", ""), rows),
        Paragraph(_describe_slo_outcome(summary), _KIND_BY_OUTCOME[goodput.met]),
        Bullets(tuple(undecided_reasons)),
    )


class _NamedObjective(NamedTuple):
    """An objective on a percentile, and the request class that it belongs to, or ""."""

    class_name: str
    term: TermResult


def _objective_row(summary: Summary, objective: _NamedObjective) -> tuple[str, str, str, str]:
    """Return the cells of an objective: its text, measured value, violations and outcome."""
    class_name, term = objective
    return (
        f"{class_name} {term.objective}".lstrip(),
        format_term_value(term),
        count_violations(term),
        describe_judged_outcome(summary, term.met),
    )


def _fluidity_rows(summary: Summary) -> Iterator[tuple[str, str, str, str]]:
    """Yield the cells of each objective of token deadlines, of the run or of its classes."""
    for class_name, fluidity in list_fluidity_objectives(summary):
        yield (
            f"{class_name} {fluidity.text}".lstrip(),
            format_measured_index(fluidity),
            count_requests_below(fluidity),
            describe_judged_outcome(summary, fluidity.met),
        )


def _answers_rows(summary: Summary) -> Iterator[tuple[str, str, str, str]]:
    """Yield the cells of the objective on checked answers, if the SLO has one."""
    answers = find_answers_objective(summary)
    if answers is not None:
        yield (
            answers.text,
            format_measured_answers(answers),
            count_wrong_answers(answers),
            describe_judged_outcome(summary, answers.met),
        )


def _list_objectives(summary: Summary) -> Iterator[_NamedObjective]:
    """Yield the objectives of the run, or if it has none those of each of its request classes."""
    if summary.goodput.slo:
        for term in summary.goodput.slo:
            yield _NamedObjective("", term)
        return
    for request_class in summary.classes:
        for term in request_class.goodput.slo:
            yield _NamedObjective(request_class.name, term)


def _describe_slo_outcome(summary: Summary) -> str:
    """Return the outcome of the SLO with the requests that met it; "" without an SLO.

    How many requests met it is left out if the run is INVALID and does not judge the SLO.
    """
    goodput = summary.goodput
    if not goodput.has_slo:
        return describe_load_objectives(summary)
    if not is_judged(summary, goodput.met):
        return f"SLO {NOT_JUDGED}"

    details = []
    if _is_good_count_meaningful(goodput):
        details.append(f"{describe_good_requests(goodput)} met {_describe_met_limits(goodput)}")
    else:
        details.append("the number of requests that met every limit is not known")

    if goodput.share_limit is not None:
        details.append(f"{format_limit(goodput.share_limit)} required")

    if goodput.unfinished:
        details.append(f"{format.count(goodput.unfinished)} unfinished excluded")

    goodput_per_s = select_headline_rates(summary).goodput
    details.append(f"goodput {format.rate(goodput_per_s, ' req/s')}")
    return f"SLO {describe_judged_outcome(summary, goodput.met)}: {', '.join(details)}"


def _describe_met_limits(goodput: Goodput) -> str:
    """Return which limits the good requests met."""
    if not goodput.slo:
        return "every limit of their class"
    if any(term.met is None for term in goodput.slo):
        return "the limits that could be judged"
    return "every limit"


def _is_good_count_meaningful(goodput: Goodput) -> bool:
    """Return whether the report can state how many requests met every latency limit of the SLO.

    The count says nothing if all limits are undecided, for example because the timestamps were too
    uncertain. Return False then, and if the count is not known.
    """
    if goodput.good is None:
        return False
    # If each request class has an SLO of its own, that of the run has no limits. The count is then
    # the sum of the requests that met the limits of their class.
    has_only_class_limits = not goodput.slo
    has_decided_limit = any(not term.undecided for term in goodput.slo)
    return has_only_class_limits or has_decided_limit
