"""The SLO of a run as a section of its report, and of the summary of a build. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from loadgen.core import format
from loadgen.render.section import Bullets, Kind, Paragraph, Section, Table, section
from loadgen.runs.rates import headline
from loadgen.runs.slo_text import (
    count_violations,
    describe_good_requests,
    format_limit,
    format_term_value,
    is_judged,
    judged_word,
)

if TYPE_CHECKING:
    from loadgen.core.metrics.goodput import Goodput
    from loadgen.core.metrics.slo_terms import TermResult
    from loadgen.core.metrics.summary import Summary

_KINDS: dict[bool | None, Kind] = {True: "good", False: "bad", None: "warn"}


def slo_section(summary: Summary) -> Section:
    """Return each objective with the measured value, the violations and the outcome."""
    goodput = summary.goodput
    rows = [
        (
            f"{class_name} {term.promise}".lstrip(),
            format_term_value(term),
            count_violations(term),
            judged_word(summary, term.met),
        )
        for class_name, term in _named_terms(summary)
    ]
    reasons = dict.fromkeys(
        f"undecided: {term.undecided}" for term in goodput.slo if term.undecided
    )
    is_met = goodput.met if is_judged(summary, goodput.met) else None
    return section(
        "SLO",
        Table(("objective", "measured", "violations", ""), rows),
        Paragraph(_describe_outcome(summary), _KINDS[is_met]),
        Bullets(tuple(reasons)),
    )


def _named_terms(summary: Summary) -> Iterator[tuple[str, TermResult]]:
    """Yield the terms of the SLO, or those of each request class with the name of the class."""
    if summary.goodput.slo:
        for term in summary.goodput.slo:
            yield "", term
        return
    for part in summary.classes:
        for term in part.goodput.slo:
            yield part.name, term


def _describe_outcome(summary: Summary) -> str:
    """Return the outcome of the SLO with the requests that met it; "" without an SLO."""
    goodput = summary.goodput
    if not goodput.has_slo:
        return ""
    parts = [f"SLO {judged_word(summary, goodput.met)}"]
    if _counts_good_requests(goodput):
        parts.append(f"{describe_good_requests(goodput)} met {_limits(goodput)}")
    else:
        parts.append("the number of requests that met every limit is not known")
    if goodput.share_limit is not None:
        parts.append(f"{format_limit(goodput.share_limit)} required")
    if goodput.unfinished:
        parts.append(f"{format.count(goodput.unfinished)} unfinished excluded")
    parts.append(f"goodput {format.rate(headline(summary).goodput, ' req/s')}")
    return f"{parts[0]}: {', '.join(parts[1:])}"


def _limits(goodput: Goodput) -> str:
    """Return which limits the good requests met."""
    if not goodput.slo:
        return "every limit of their class"
    if any(term.met is None for term in goodput.slo):
        return "the limits that could be judged"
    return "every limit"


def _counts_good_requests(goodput: Goodput) -> bool:
    """Return True if the number of good requests is meaningful.

    It is if at least one objective is decided. If each request class has its own SLO, the
    objectives belong to the classes.
    """
    if goodput.good is None:
        return False
    return not goodput.slo or any(not term.undecided for term in goodput.slo)
