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
from loadgen.render.page import COLORS, Bar
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

VALID_RUN_COLOR = COLORS[0]
"""The color of the bars of valid runs."""

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
    - For a lower bound in percent it is the part of the allowed failures that occurred: if 99 %
      must be good, 1 % may fail. With 99.5 % good, 0.5 % failed, which is 50 %.
    - For another lower bound it is limit / metric: 10 req/s of at least 8 req/s is 80 %.

    Args:
        value: The metric.
        limit: The limit in the same unit.
        unit: The unit of both, such as "ms" or "%".
        is_upper_bound: Whether the metric must be at most the limit. Else it must be at least it.

    Returns:
        The percentage, or None if it is not defined because the divisor is 0.
    """
    if is_upper_bound:
        used = value
        allowed = limit
    elif unit == "%":
        used = 100 - value
        allowed = max(100 - limit, 0)
    else:
        used = limit
        allowed = value
    return 100 * used / allowed if allowed else None


def build_usage_section(validation: Validation, contract: Contract) -> Section:
    """Return a section with a bar per term: how much of its limit the metric of the term uses.

    Metrics with different units can be compared in this way, because a bar that ends before 100 %
    meets its limit whatever the unit.
    """
    bars = _build_usage_bars(validation, _map_terms_to_bounds(contract))
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


def _map_terms_to_bounds(contract: Contract) -> dict[str, bool]:
    """Return for each term of a contract, by its text, whether its limit is an upper bound.

    A verdict names its term by this text only.
    """
    term_lists = [level.terms_by_requirement() for level in contract.levels]
    if contract.answers is not None:
        term_lists.append(contract.answers.terms_by_requirement())
    return {term.text: term.is_upper_bound for term_list in term_lists for _, term in term_list}


def _build_usage_bars(
    validation: Validation, is_upper_bound_by_term: Mapping[str, bool]
) -> list[Bar]:
    """Return the bar of each term whose use of its limit is known, level by level.

    Args:
        validation: The verdicts on all terms.
        is_upper_bound_by_term: Text of a term -> whether its limit is an upper bound.
    """
    has_several_levels = len(validation.levels) > 1
    bars = []
    for level in validation.levels:
        prefix = f"{level.name}: " if has_several_levels else ""
        for term in level.terms:
            bar = _build_usage_bar(term, prefix, is_upper_bound=is_upper_bound_by_term[term.term])
            if bar is not None:
                bars.append(bar)

    return bars


def _build_usage_bar(term: TermVerdict, prefix: str, *, is_upper_bound: bool) -> Bar | None:
    """Return the bar of a term in the chart that shows how much of their limits the terms use.

    The bar is as long as the metric in percent of the limit. Its whisker (error bar) spans the
    confidence interval of the metric.

    Args:
        term: The verdict on the term.
        prefix: The name of the level, if there are several, before the text of the term.
        is_upper_bound: Whether the metric must be at most the limit.

    Returns:
        The bar, or None if the metric is not known or the use of the limit is not defined.
    """
    usages = _compute_usages_percent(term, is_upper_bound=is_upper_bound)
    if usages is None:
        return None

    usage_of_metric = usages[0]
    suffix = " (should)" if term.requirement == "should" else ""
    bar_start = 0.0

    return Bar(
        name=f"{prefix}{term.term}{suffix}",
        text=f"{_format_value_of_limit(term)}: {term.verdict}",
        segments=[(bar_start, usage_of_metric, VERDICT_COLORS[term.verdict], term.reason)],
        whisker=(min(usages), max(usages)),
    )


def _compute_usages_percent(term: TermVerdict, *, is_upper_bound: bool) -> list[float] | None:
    """Return a metric and the two ends of its interval in percent of the limit of its term.

    Each percentage is at most `MAX_SHOWN_USAGE`, so that it fits the chart. An end that is not
    known is replaced by the metric itself. Return None if a percentage is not defined.

    Args:
        term: The verdict on the term.
        is_upper_bound: Whether the metric must be at most the limit.
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

    return usages


def _format_value_of_limit(term: TermVerdict) -> str:
    """Return the metric and the limit of a term, such as "400 of 500 ms" or "12 of 10/s"."""
    is_per_time = term.unit.startswith("/")  # as in 10/s, without a space
    unit = term.unit if is_per_time else f" {term.unit}".rstrip()
    return f"{format.quantity(term.value)} of {format.quantity(term.limit)}{unit}"


# -- signatures and annex -------------------------------------------------------------------------


def build_signature_section(validation: Validation) -> Section:
    """Return the section in which the two parties sign."""
    names = {party: validation.metadata.get(party.lower(), "") for party in ("Buyer", "Vendor")}
    note = "For the contract with the SHA-256 above. SHA256SUMS lists the checksums of all files."
    return section("Signatures", Signatures(names), Paragraph(note, "soft"), page_only=True)


def build_annex_sections(validation: Validation, inputs: PageInputs) -> Iterator[Section]:
    """Yield the sections of the annex, which follows the part of the page that is signed.

    They explain the words on the page and show the data behind the verdict. In print the annex
    begins on a new page.
    """
    yield section("Annex", "The data behind the verdict.", id="annex", page_only=True)
    yield _build_definitions_section(validation)
    yield _build_timeline_section(inputs.summaries)
    yield _build_repeats_section(inputs.repeats)
    yield _build_preflight_section(inputs.findings)
    yield _build_delivered_load_section(inputs.summaries)
    contract_file = Quoted(inputs.contract_text)
    yield section("Contract file", contract_file, folded=True, page_only=True)


def _build_definitions_section(validation: Validation) -> Section:
    """Return the section that explains the words on the page."""
    definitions = _find_mentioned_words(validation)
    bullets = Bullets([f"{word}: {meaning}" for word, meaning in definitions])
    return section("Definitions", bullets, page_only=True)


def _build_repeats_section(repeats: Mapping[str, RepeatSummary]) -> Section:
    """Return the section that shows how much the runs of a level differ, for each level."""
    table = load_points_table(repeats)
    note = Paragraph(LOAD_POINT_UNITS if table.rows else "", "soft")
    return section("Variation between the runs of a level", table, note, page_only=True)


def _build_preflight_section(findings: Sequence[FindingRow]) -> Section:
    """Return the section with the findings of the checks before the first request."""
    table = Table(("", "check", "finding", "meaning"), findings, "prose")
    return section("Preflight checks", table, page_only=True)


def _build_delivered_load_section(summaries: Mapping[str, Summary]) -> Section:
    """Return the section that shows for each run how exactly the planned load was sent."""
    rows = [
        (run, *row)
        for run, summary in summaries.items()
        for row in load_fidelity.rows(summary.stimulus)
    ]
    table = Table(("run", *load_fidelity.HEAD), rows, "prose")
    return section("Delivered load", table, folded=True, page_only=True)


def _find_mentioned_words(validation: Validation) -> Iterator[tuple[str, str]]:
    """Yield the words of the page that the annex explains, each with its meaning.

    These are the verdicts, and the metrics and percentiles that the terms of the contract contain.
    """
    yield from VERDICT_MEANINGS.items()
    load_terms = _join_term_texts(validation, about_answers=False)
    answer_terms = _join_term_texts(validation, about_answers=True)
    metrics_of_contracts = METRICS.shown_in("contract")  # those that a term may limit
    metric_meanings = {metric.name: metric.meaning for metric in metrics_of_contracts}
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


def _build_timeline_section(summaries: Mapping[str, Summary]) -> Section:
    """Return the section with a bar per run from its start to its end, and links to the summaries.

    Times are relative to the start of the first run. The bar of an INVALID run has the color of
    warnings.
    """
    times = _compute_run_times(summaries)
    first_start_s = min((time.start_s for time in times.values()), default=0.0)

    bars = []
    for name, time in times.items():
        summary = summaries[name]
        color = VALID_RUN_COLOR if summary.verdict.valid else "warn"
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

    A run in virtual time took place at no particular time, so such runs are placed one after
    another without a pause, from 0 s on. All runs of a validation are of the same kind.
    """
    times: dict[str, RunTime] = {}
    virtual_start_s = 0.0
    for name, summary in summaries.items():
        if summary.run.client == "virtual":
            times[name] = _compute_virtual_time(summary, virtual_start_s)
            virtual_start_s = times[name].end_s
        else:
            times[name] = _compute_real_time(summary)

    return times


def _compute_virtual_time(summary: Summary, start_s: float) -> RunTime:
    """Return the time of a run in virtual time that is placed at this start."""
    end_s = start_s + (summary.window.full_run.duration_s or 0.0)
    return RunTime(start_s, end_s, f"{format.duration(end_s - start_s)} of virtual time")


def _compute_real_time(summary: Summary) -> RunTime:
    """Return when a run began and ended, in seconds since 1970, with its start as a label."""
    started = datetime.fromisoformat(summary.run.started)
    ended = datetime.fromisoformat(summary.run.ended)
    start_s = started.timestamp()
    end_s = ended.timestamp()
    label = f"{started:%H:%M:%S}, {format.duration(end_s - start_s)}"
    return RunTime(start_s, end_s, label)
