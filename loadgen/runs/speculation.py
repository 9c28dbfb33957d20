"""Speculative decoding in words: what was drafted and accepted, by requests, by the servers, and by position. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from loadgen.core import format
from loadgen.core.metrics.sections import Speculation
from loadgen.core.metrics.summary import Summary
from loadgen.render.page import Axis, Chart, Series
from loadgen.render.section import Charts, Paragraph, Section, Table, section


def sections(summary: Summary) -> Iterator[Section]:
    """A row for each who says something of drafts, and on a page the acceptance by position."""
    found = summary.speculation
    if found is None:
        return
    rows = []
    if found.requests:
        name = f"accounts of {format.counted(found.requests, 'request')}"
        counts = (format.count(found.drafted), format.count(found.accepted))
        rows.append((name, *counts, format.percent(found.acceptance), _tokens(found.length)))
    if found.server_acceptance is not None or found.server_length is not None:
        shown = (format.percent(found.server_acceptance), _tokens(found.server_length))
        rows.append(("metrics pages of the servers", format.NONE, format.NONE, *shown))
    head = ("speculation, by", "drafted", "accepted", "share", "tokens of a step")
    quantiles = [
        (
            words,
            *(_tokens(getattr(of, name)) for name in ("mean", "p50", "p90", "p99")),
            format.count(of.count),
        )
        for key, words in (("acceptance", "accepted, %"), ("accepted_length", "tokens of a step"))
        if (of := summary.figures.get(key)) is not None and of.count
    ]
    places = [
        (str(place), format.percent(share)) for place, share in enumerate(found.by_position, 1)
    ]
    yield section(
        "Speculative decoding",
        Table(head, rows),
        Table(("of a request", "mean", "p50", "p90", "p99", "samples"), quantiles),
        Table(("position in the draft", "accepted, of all drafts"), places),
        Charts(tuple(_by_position(found))),
        Paragraph(
            "A step verifies one draft, and makes one token of its own beside those accepted.",
            "soft",
        ),
        id="speculation",
    )


def _tokens(value: float | None) -> str:
    return format.NONE if value is None else f"{value:.3g}"


def _by_position(found: Speculation) -> Iterator[Chart]:
    if found.by_position:
        places = tuple(float(place) for place in range(1, len(found.by_position) + 1))
        yield Chart(
            title="Accepted by position in the draft",
            x=Axis(label="position", min=0),
            y=Axis(label="of all drafts", format="percent", min=0, max=1),
            series=(Series(x=places, y=found.by_position, color="c1"),),
        )
