"""The SLO of a run, as a section of its report and of the summary of a build. Pure."""

from __future__ import annotations

from loadgen.core import format
from loadgen.core.metrics.goodput import Goodput
from loadgen.core.metrics.summary import Summary
from loadgen.render.section import Bullets, Kind, Paragraph, Section, Table, section
from loadgen.runs.headline import is_judged, judged_word, term_cells
from loadgen.runs.rates import headline

_KINDS: dict[bool | None, Kind] = {True: "good", False: "bad", None: "warn"}


def slo(summary: Summary) -> Section:
    """Each term of the SLO: what was promised, what came out, how many samples were over the limit, and the verdict."""
    goodput = summary.goodput
    terms = [("", term) for term in goodput.slo]
    if not terms:
        terms = [(part.name, term) for part in summary.classes for term in part.goodput.slo]
    rows = [
        (" ".join(filter(None, (name, promise))), *cells, judged_word(summary, term.met))
        for name, term in terms
        for promise, *cells in (term_cells(term),)
    ]
    undecided = dict.fromkeys(
        f"undecided: {term.undecided}" for term in goodput.slo if term.undecided
    )
    result = judged_word(summary, goodput.met)
    said = (
        f"SLO {_said(goodput, result)}, goodput {format.rate(headline(summary).goodput)}"
        if goodput.has_slo
        else ""
    )
    return section(
        "Service level objective",
        Table(("promise", "came out", "over the limit", ""), rows),
        Paragraph(said, _KINDS[goodput.met if is_judged(summary, goodput.met) else None]),
        Bullets(tuple(undecided)),
        small=True,
    )


def _said(goodput: Goodput, result: str) -> str:
    share_limit = (
        f", promised {format.percent(goodput.share_limit)}"
        if goodput.share_limit is not None
        else ""
    )
    limits = (
        "every limit"
        if all(term.met is not None for term in goodput.slo)
        else "the limits that can be judged"
    )
    limits = limits if goodput.slo else "every limit of their class"
    if goodput.good is None or not _judges_requests(goodput):
        text = f"{result}: no term is missed, but not every term can be decided{share_limit}"
        if goodput.met is False:
            text = f"{result}: how many requests were within every limit is not known{share_limit}"
    else:
        text = f"{result}: {format.count(goodput.good)} of {format.counted(goodput.counted, 'request')} within {limits}"
        text += f" ({format.percent(goodput.share)}{share_limit})"
    return text + (
        f", {format.count(goodput.unfinished)} unfinished left out" if goodput.unfinished else ""
    )


def _judges_requests(goodput: Goodput) -> bool:
    """Whether the count of good requests says something: some term that every request can have is decided.

    Where each class has its own SLO, the terms stand with the classes.
    """
    return goodput.good is not None and (
        not goodput.slo or any(not term.undecided for term in goodput.slo)
    )
