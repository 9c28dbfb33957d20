"""The sections that only the HTML page of a validation shows.

These are how much of each limit is used, the signatures of the parties, and the annex.

This module is pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from types import MappingProxyType
from typing import NamedTuple
from urllib.parse import quote

from loadgen.contracts.schema import ANSWERS_LEVEL, Contract
from loadgen.contracts.verdict import FAIL, INCONCLUSIVE, PASS, TermVerdict, Validation
from loadgen.core import format
from loadgen.core.metrics.summary import Summary
from loadgen.figures import METRICS
from loadgen.render.page import Bar
from loadgen.render.section import (
    Bars,
    Bullets,
    Kind,
    Links,
    Paragraph,
    Quoted,
    Section,
    Signatures,
    Table,
    section,
)
from loadgen.repeated.repeats import RepeatSummary
from loadgen.repeated.repeats_text import LOAD_POINT_UNITS, load_points_table
from loadgen.runs import load_fidelity

VERDICT_COLORS: dict[str, Kind] = {PASS: "good", FAIL: "bad", INCONCLUSIVE: "warn"}

MAX_SHOWN_USAGE = 150.0
"""Percentage of a limit up to which bars are drawn."""

TERM_MEANINGS = {
    "goodput": "share of requests that meet every limit of the contract's slo",
    "good_requests": "requests per second that meet every limit of the contract's slo",
    "task time": (
        "time from the instant a task or conversation was due to the end of its last answer"
    ),
    "waits of a task": "time that a task waited for first tokens, all its requests together",
    "longest wait of a task": "longest time that a task waited for a first token",
    "tasks within the SLO": "tasks that keep every limit of the slo's task",
}
ANSWER_TERM_MEANINGS = {
    "rouge1": "words that answer and reference share: F-measure, with stemming",
    "rouge2": "pairs of words that answer and reference share: F-measure, with stemming",
    "rougeL": "longest sequence of words that answer and reference share: F-measure, with stemming",
    "exact": "share of answers equal to the reference but for case, spaces and a full stop",
    "choice": "share of answers that choose the right letter",
    "json": "share of answers that are JSON where JSON was asked for",
    "equal": "share of answers equal, letter by letter, to those of the other endpoint",
    "agreement": "words and marks from the start until the answers of the two endpoints differ",
    "agreement_share": "the same as a share of the longer answer",
    "similarity": "1 - edits / length between the answers of the two endpoints",
}
VERDICT_MEANINGS = {
    "PASS": "the whole interval of the measured figure keeps the promise",
    "FAIL": "the whole interval breaks it",
    "INCONCLUSIVE": (
        "the interval holds the promise, the sample is too small for the percentile, "
        "the load was too short to have left its start-up or to have seen what its queue can do, "
        "data is missing, the load generator was the limit, or the run was not valid"
    ),
    "must, should": (
        "the verdict is that of the must terms; should terms are told and decide nothing"
    ),
}
PERCENTILE_MEANING = (
    "so many of 100 requests are at or below it; one that failed is above every limit"
)


class FindingRow(NamedTuple):
    """A finding of the checks before the first request, as it is shown in a table."""

    state: str
    check: str
    found: str
    meaning: str


class PageInputs(NamedTuple):
    """What the page of a validation shows besides its verdict.

    Attributes:
        contract: The contract.
        contract_text: The contract as written.
        summaries: The summary of each run, by its directory.
        findings: The findings of the checks before the first request.
        repeats: How much the runs of a level differ, by the name of the level.
    """

    contract: Contract
    contract_text: str
    summaries: Mapping[str, Summary]
    findings: Sequence[FindingRow] = ()
    repeats: Mapping[str, RepeatSummary] = MappingProxyType({})


# -- the use of the limits ------------------------------------------------------------------------


def limit_usage_percent(
    value: float, limit: float, unit: str, *, is_upper_bound: bool
) -> float | None:
    """Return how much a metric uses of what its limit allows, in percent.

    Above 100 the limit is exceeded.

    For an upper bound it is the metric as a share of the limit. For a lower bound of a share it is
    what is missing to 100 %, relative to what may be missing. For another lower bound it is the
    limit as a share of the metric. Return None if the limit allows nothing.
    """
    if is_upper_bound:
        return 100 * value / limit if limit else None
    if unit == "%":
        return 100 * (100 - value) / (100 - limit) if limit < 100 else None
    return 100 * limit / value if value else None


def usage_section(validation: Validation, contract: Contract) -> Section:
    """Return a bar per term: how much of its limit is used, with the interval of the metric.

    A bar that ends before 100 % keeps its limit. Bars of metrics with different units can be
    compared in this way.
    """
    is_upper_bound = {
        term.text: term.is_upper_bound
        for judged_part in (*contract.levels, contract.answers)
        if judged_part is not None
        for _, term in judged_part.terms_by_requirement()
    }
    bars = []
    for level in validation.levels:
        prefix = "" if len(validation.levels) == 1 else f"{level.name}: "
        for term in level.terms:
            bar = _usage_bar(term, prefix, is_upper_bound=is_upper_bound[term.term])
            if bar is not None:
                bars.append(bar)
    legend = "No term has a figure."
    if bars:
        legend = (
            "A bar is the used share of what the promise allows; at the dashed line all of it is "
            "used, beyond it the promise is broken. The whisker is the interval of the figure. "
            f"More than {MAX_SHOWN_USAGE:g} % is drawn there."
        )
    return section(
        "What each promise uses of its limit",
        Bars(rows=bars, unit=" % of what is allowed", line=100.0, low=MAX_SHOWN_USAGE),
        Paragraph(legend, "soft"),
        page_only=True,
        id="used",
    )


def _usage_bar(term: TermVerdict, prefix: str, *, is_upper_bound: bool) -> Bar | None:
    """Return the bar of a term, or None if its metric is not known or its limit allows nothing.

    The bar shows the metric, and its whisker the confidence interval. An end without a bound is
    drawn at the metric itself. All are cut at `MAX_SHOWN_USAGE`.
    """
    if term.value is None or term.limit is None:
        return None
    low = term.value if term.low is None else term.low
    high = term.value if term.high is None else term.high
    usages = []
    for value in (term.value, low, high):
        usage = limit_usage_percent(value, term.limit, term.unit, is_upper_bound=is_upper_bound)
        if usage is None:
            return None
        usages.append(min(usage, MAX_SHOWN_USAGE))
    unit = term.unit if term.unit.startswith("/") else f" {term.unit}".rstrip()
    result = f"{format.quantity(term.value)} of {format.quantity(term.limit)}{unit}"
    suffix = " (should)" if term.requirement == "should" else ""
    usage_of_value = usages[0]
    segment = (0.0, usage_of_value, VERDICT_COLORS[term.verdict], term.reason)
    whisker = (min(usages), max(usages))
    label = f"{prefix}{term.term}{suffix}"
    return Bar(label, f"{result}: {term.verdict}", [segment], whisker)


# -- signatures and annex -------------------------------------------------------------------------


def signature_section(validation: Validation) -> Section:
    """Return the section in which the two parties sign."""
    names = {party: validation.metadata.get(party.lower(), "") for party in ("Buyer", "Vendor")}
    note = "Of the contract with the SHA-256 above; SHA256SUMS has that of every file."
    return section("Signed", Signatures(names), Paragraph(note, "soft"), page_only=True)


def annex_sections(validation: Validation, inputs: PageInputs) -> Iterator[Section]:
    """Yield the sections behind the signed page. In print they begin on a page of their own.

    They explain the words of the page and show what the verdict rests on: when the runs went, how
    much they differ, the checks of the target, the delivered load, and the contract.
    """
    yield section("Annex", "What the page above rests on.", id="annex", page_only=True)
    glossary = [f"{word}: {meaning}" for word, meaning in _glossary(validation)]
    yield section("What the words mean", Bullets(glossary), page_only=True)
    yield _timeline_section(inputs.summaries)
    repeats = load_points_table(inputs.repeats)
    repeats_note = Paragraph(LOAD_POINT_UNITS if repeats.rows else "", "soft")
    yield section("How the runs of a level differ", repeats, repeats_note, page_only=True)
    finding_table = Table(("", "check", "found", "means"), inputs.findings, "prose")
    yield section("What the doctor found before the first request", finding_table, page_only=True)
    load_checks = [
        (run, *row)
        for run, summary in inputs.summaries.items()
        for row in load_fidelity.rows(summary.stimulus)
    ]
    load_table = Table(("run", *load_fidelity.HEAD), load_checks, "prose")
    yield section("The load that was delivered", load_table, folded=True, page_only=True)
    contract = Quoted(inputs.contract_text)
    yield section("The contract as written", contract, folded=True, page_only=True)


def _glossary(validation: Validation) -> Iterator[tuple[str, str]]:
    """Yield the words of the page that need an explanation, with their meanings."""
    yield from VERDICT_MEANINGS.items()
    load_terms = _joined_terms(validation, about_answers=False)
    answer_terms = _joined_terms(validation, about_answers=True)
    metric_meanings = {
        definition.name: definition.meaning for definition in METRICS.shown_in("contract")
    }
    yield from _mentioned(metric_meanings | TERM_MEANINGS, load_terms)
    yield from _mentioned(ANSWER_TERM_MEANINGS, answer_terms)
    if re.search(r"\bp[0-9]", f"{load_terms} {answer_terms}"):
        yield "p50, p99", PERCENTILE_MEANING


def _joined_terms(validation: Validation, *, about_answers: bool) -> str:
    """Return the texts of all terms about answers, or of all others."""
    return " ".join(
        term.term
        for level in validation.levels
        if (level.name == ANSWERS_LEVEL) is about_answers
        for term in level.terms
    )


def _mentioned(meanings: Mapping[str, str], text: str) -> Iterator[tuple[str, str]]:
    """Yield the words that a text contains, with their meanings."""
    for word, meaning in meanings.items():
        if re.search(rf"\b{word}\b", text):
            yield word, meaning


# -- the timeline ---------------------------------------------------------------------------------


class RunTime(NamedTuple):
    """When a run began and ended, in seconds on the axis of the timeline, and its label."""

    start_s: float
    end_s: float
    label: str


def _timeline_section(summaries: Mapping[str, Summary]) -> Section:
    """Return a bar per run that shows when it went, with a link to its summary.

    Times are relative to the start of the first run. The bar of a run that is not valid has the
    color of warnings.
    """
    times = _run_times(summaries)
    first_start_s = min((time.start_s for time in times.values()), default=0.0)
    bars = []
    for name, time in times.items():
        summary = summaries[name]
        color = "c1" if summary.verdict.valid else "warn"
        start_s = time.start_s - first_start_s
        end_s = time.end_s - first_start_s
        bars.append(Bar(name, time.label, [(start_s, end_s, color, summary.run.id)]))
    links = [(name, f"{quote(name)}/summary.json") for name in summaries]
    return section(
        "Runs",
        Bars(rows=bars, low=0.0, number=format.duration),
        Links("Summary of each run, beside its records", links),
        page_only=True,
    )


def _run_times(summaries: Mapping[str, Summary]) -> dict[str, RunTime]:
    """Return when each run went. Runs in virtual time follow each other without a pause.

    A simulated run has no time of day, so its length in virtual time is used.
    """
    times = {}
    virtual_now_s = 0.0
    for name, summary in summaries.items():
        if summary.run.client == "virtual":
            end_s = virtual_now_s + (summary.window.whole.duration_s or 0.0)
            label = f"{format.duration(end_s - virtual_now_s)} of virtual time"
            times[name] = RunTime(virtual_now_s, end_s, label)
            virtual_now_s = end_s
        else:
            start_s = datetime.fromisoformat(summary.run.started).timestamp()
            end_s = datetime.fromisoformat(summary.run.ended).timestamp()
            clock_time = summary.run.started[11:19]  # hh:mm:ss of an ISO 8601 time
            label = f"{clock_time}, {format.duration(end_s - start_s)}"
            times[name] = RunTime(start_s, end_s, label)
    return times
