"""The sections that only the HTML page of a validation shows.

These are the use of each limit, the signatures of the parties, and the annex.

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
    "goodput": "percentage of requests that meet every limit of the contract's slo",
    "good_requests": "requests per second that meet every limit of the contract's slo",
    "task time": "time from the scheduled start of a task or conversation to its last response",
    "waits of a task": "sum of the waits for first tokens in a task",
    "longest wait of a task": "longest wait for a first token in a task",
    "tasks that meet the SLO": "tasks that meet every limit under `task` in the slo",
}
ANSWER_TERM_MEANINGS = {
    "rouge1": "words in both response and reference (F-measure, with stemming)",
    "rouge2": "pairs of words in both response and reference (F-measure, with stemming)",
    "rougeL": "longest common sequence of words of response and reference (F-measure, stemming)",
    "exact": "responses equal to the reference, ignoring case, spaces and a final full stop",
    "choice": "responses that choose the right letter",
    "json": "responses that are JSON, among the prompts that require JSON",
    "equal": "responses that are identical to those of the other endpoint",
    "agreement": "words and punctuation marks before the responses of two endpoints first differ",
    "agreement_share": "agreement as a fraction of the longer response",
    "similarity": "1 - edit distance / length of the responses of two endpoints",
}
VERDICT_MEANINGS = {
    "PASS": "the whole confidence interval of the metric meets the limit",
    "FAIL": "the whole confidence interval violates the limit",
    "INCONCLUSIVE": (
        "the confidence interval contains the limit, the load was too short or had too few "
        "requests, the metric is missing, or a run was INVALID"
    ),
    "must, should": (
        "only the terms in `must` decide the verdict; those in `should` are reported with it"
    ),
}
PERCENTILE_MEANING = (
    "50 or 99 of 100 requests had at most this value; a failed request exceeds every limit"
)


class FindingRow(NamedTuple):
    """A finding of the preflight checks, as it is shown in a table."""

    state: str
    check: str
    observed: str
    meaning: str


class PageInputs(NamedTuple):
    """What the page of a validation shows besides its verdict.

    Attributes:
        contract: The contract.
        contract_text: The text of the contract file.
        summaries: The summary of each run, by its directory.
        findings: The findings of the preflight checks, which run before the first request.
        repeats: How much the runs of a level differ, by the name of the level.
    """

    contract: Contract
    contract_text: str
    summaries: Mapping[str, Summary]
    findings: Sequence[FindingRow] = ()
    repeats: Mapping[str, RepeatSummary] = MappingProxyType({})


# -- the use of the limits ------------------------------------------------------------------------


def compute_limit_usage_percent(
    value: float, limit: float, unit: str, *, is_upper_bound: bool
) -> float | None:
    """Return how much of its limit a metric uses, in percent. Above 100 the limit is violated.

    - For an upper bound it is metric / limit: 400 ms of 500 ms is 80 %.
    - For a lower bound in percent it compares what is missing to 100 %: an attainment of 99.5 %
      lacks 0.5 %, and a limit of 99 % allows a lack of 1 %, of which 50 % are used.
    - For another lower bound it is limit / metric: 10 req/s of at least 8 req/s is 80 %.

    Args:
        value: The metric.
        limit: The limit in the same unit.
        unit: The unit of both, such as "ms" or "%".
        is_upper_bound: Whether the metric must be at most the limit. Else it must be at least it.

    Returns:
        The percentage, or None if the divisor is 0.
    """
    if is_upper_bound:
        return 100 * value / limit if limit else None
    if unit == "%":
        return 100 * (100 - value) / (100 - limit) if limit < 100 else None
    return 100 * limit / value if value else None


def usage_section(validation: Validation, contract: Contract) -> Section:
    """Return a section with a bar per term: how much of its limit the metric of the term uses.

    Metrics with different units can be compared in this way, because a bar that ends before 100 %
    meets its limit whatever the unit.
    """
    term_lists = [level.terms_by_requirement() for level in contract.levels]
    if contract.answers is not None:
        term_lists.append(contract.answers.terms_by_requirement())
    is_upper_bound = {
        term.text: term.is_upper_bound for term_list in term_lists for _, term in term_list
    }
    bars = []
    for level in validation.levels:
        prefix = "" if len(validation.levels) == 1 else f"{level.name}: "
        for term in level.terms:
            bar = _build_usage_bar(term, prefix, is_upper_bound=is_upper_bound[term.term])
            if bar is not None:
                bars.append(bar)
    legend = "No term has a metric."
    if bars:
        legend = (
            "Each bar shows how much of its limit a metric uses. Beyond the dashed line the limit "
            "is violated. The whisker is the confidence interval. Bars end at "
            f"{MAX_SHOWN_USAGE:g} %."
        )
    return section(
        "Use of each limit",
        Bars(rows=bars, unit=" % of the limit", marked_value=100.0, included_value=MAX_SHOWN_USAGE),
        Paragraph(legend, "soft"),
        page_only=True,
        id="used",
    )


def _build_usage_bar(term: TermVerdict, prefix: str, *, is_upper_bound: bool) -> Bar | None:
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
        usage = compute_limit_usage_percent(
            value, term.limit, term.unit, is_upper_bound=is_upper_bound
        )
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
    note = "For the contract with the SHA-256 above. SHA256SUMS lists the checksums of all files."
    return section("Signatures", Signatures(names), Paragraph(note, "soft"), page_only=True)


def annex_sections(validation: Validation, inputs: PageInputs) -> Iterator[Section]:
    """Yield the sections of the annex, which follows the part of the page that is signed.

    They explain the terms on the page and show the data behind the verdict: the times of the runs,
    how much they differ, the preflight checks, the delivered load, and the contract. In print the
    annex begins on a new page.
    """
    yield section("Annex", "The data behind the verdict.", id="annex", page_only=True)
    glossary = [f"{word}: {meaning}" for word, meaning in _find_mentioned_terms(validation)]
    yield section("Definitions", Bullets(glossary), page_only=True)
    yield _timeline_section(inputs.summaries)
    repeats = load_points_table(inputs.repeats)
    repeats_note = Paragraph(LOAD_POINT_UNITS if repeats.rows else "", "soft")
    yield section("Variation between the runs of a level", repeats, repeats_note, page_only=True)
    finding_table = Table(("", "check", "finding", "meaning"), inputs.findings, "prose")
    yield section("Preflight checks", finding_table, page_only=True)
    load_checks = [
        (run, *row)
        for run, summary in inputs.summaries.items()
        for row in load_fidelity.rows(summary.stimulus)
    ]
    load_table = Table(("run", *load_fidelity.HEAD), load_checks, "prose")
    yield section("Delivered load", load_table, folded=True, page_only=True)
    contract = Quoted(inputs.contract_text)
    yield section("Contract file", contract, folded=True, page_only=True)


def _find_mentioned_terms(validation: Validation) -> Iterator[tuple[str, str]]:
    """Yield the words of the page that the annex explains, each with its meaning.

    These are the verdicts, and the metrics and percentiles that the terms of the contract contain.
    """
    yield from VERDICT_MEANINGS.items()
    load_terms = _join_term_texts(validation, about_answers=False)
    answer_terms = _join_term_texts(validation, about_answers=True)
    metric_meanings = {
        definition.name: definition.meaning for definition in METRICS.shown_in("contract")
    }
    yield from _find_words_in_text(metric_meanings | TERM_MEANINGS, load_terms)
    yield from _find_words_in_text(ANSWER_TERM_MEANINGS, answer_terms)
    has_percentile = re.search(r"\bp[0-9]", f"{load_terms} {answer_terms}") is not None
    if has_percentile:
        yield "p50, p99", PERCENTILE_MEANING


def _join_term_texts(validation: Validation, *, about_answers: bool) -> str:
    """Return the texts of all terms about responses, or of all other terms."""
    return " ".join(
        term.term
        for level in validation.levels
        if (level.name == ANSWERS_LEVEL) is about_answers
        for term in level.terms
    )


def _find_words_in_text(meanings: Mapping[str, str], text: str) -> Iterator[tuple[str, str]]:
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
    """Return a bar per run from its start to its end, with a link to its summary.

    Times are relative to the start of the first run. The bar of an INVALID run has the color of
    warnings.
    """
    times = _compute_run_times(summaries)
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
        Bars(rows=bars, included_value=0.0, format_value=format.duration),
        Links("Summary of each run", links),
        page_only=True,
    )


def _compute_run_times(summaries: Mapping[str, Summary]) -> dict[str, RunTime]:
    """Return when each run began and ended, by its directory.

    A simulated run has no time of day, so simulated runs are drawn one after another without a
    pause, each as long as it lasted in virtual time.
    """
    times = {}
    virtual_now_s = 0.0
    for name, summary in summaries.items():
        if summary.run.client == "virtual":
            end_s = virtual_now_s + (summary.window.full_run.duration_s or 0.0)
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
