"""Parts of what a run says that text, Markdown and page have in common. Pure."""

from __future__ import annotations

from loadgen.core.metrics.goodput import Goodput
from loadgen.present.section import Bullets, Section, Table, section
from loadgen.runs.headline import met_word, term_cells


def slo(goodput: Goodput) -> Section:
    """Each term of the SLO: what was promised, what came out, how many samples were over the limit, and the verdict."""
    rows = [(*term_cells(term), met_word(term.met)) for term in goodput.slo]
    undecided = dict.fromkeys(f"undecided: {term.undecided}" for term in goodput.slo if term.undecided)
    return section(
        "Service level objective",
        Table(("promise", "came out", "over the limit", ""), rows),
        Bullets(tuple(undecided)),
        small=True,
    )
