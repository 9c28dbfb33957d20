"""Speculative decoding: drafted and accepted tokens by source and by position. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from loadgen.core import format
from loadgen.render.page import Axis, Chart, Series
from loadgen.render.section import Charts, Paragraph, Section, Table, section
from loadgen.runs.accepted_length import explain_verdict

if TYPE_CHECKING:
    from loadgen.core.metrics.sections import Speculation
    from loadgen.core.metrics.summary import Summary

LEGEND = (
    "A step of the server verifies one draft. It generates the accepted tokens and one token of "
    "the model itself."
)

_METRICS_PER_REQUEST = (
    ("acceptance", "accepted, %"),
    ("accepted_length", "tokens per step"),
)
"""Metrics with a value per request, and their labels."""


def build_speculation_sections(summary: Summary) -> Iterator[Section]:
    """Yield how many drafted tokens were accepted, if a server reports drafts.

    If the run states an accepted length, the section begins with whether it was reached.
    """
    speculation = summary.speculation
    check = summary.accepted_length
    verdict = [] if check is None else [explain_verdict(check)]
    if speculation is None:
        if check is not None:
            yield section("Speculative decoding", *verdict, id="speculation")
        return

    yield section(
        "Speculative decoding",
        *verdict,
        _sources_table(speculation),
        _requests_table(summary),
        _positions_table(speculation),
        Charts(tuple(_position_chart(speculation))),
        Paragraph(LEGEND, "soft"),
        id="speculation",
    )


def _sources_table(speculation: Speculation) -> Table:
    """Return how many drafted tokens were accepted, according to each source that reports it.

    There are two sources: the responses, and the metrics pages of the servers. The pages count the
    tokens of all requests in the measured time, or only report the fraction, so they have a
    fraction and no numbers. Without responses that report drafts, the columns of the numbers are
    left out. The last column is the mean number of output tokens per step of the model, which is 1
    without speculative decoding.
    """
    has_numbers = speculation.requests > 0
    number_columns = ("drafted", "accepted") if has_numbers else ()
    unknown_numbers = (format.NONE,) * len(number_columns)

    rows: list[tuple[str, ...]] = []
    if has_numbers:
        row_of_responses = (
            format.counted(speculation.requests, "response"),
            format.count(speculation.drafted),
            format.count(speculation.accepted),
            format.percent(speculation.acceptance),
            _format_tokens(speculation.length),
        )
        rows.append(row_of_responses)

    if speculation.server_acceptance is not None or speculation.server_length is not None:
        row_of_servers = (
            "metrics pages of the servers",
            *unknown_numbers,
            format.percent(speculation.server_acceptance),
            _format_tokens(speculation.server_length),
        )
        rows.append(row_of_servers)

    head = ("reported by", *number_columns, "fraction accepted", "tokens per step")
    return Table(head, rows)


def _requests_table(summary: Summary) -> Table:
    """Return how well speculative decoding worked for single requests.

    A row has the distribution over the requests of one metric: the fraction of proposed tokens that
    the model accepted, or the number of tokens per step of the model.
    """
    statistics = ("mean", "p50", "p90", "p99")
    rows = []
    for name, label in _METRICS_PER_REQUEST:
        distribution = summary.other_metrics.get(name)
        if distribution is None or not distribution.count:
            continue
        values = [_format_tokens(getattr(distribution, statistic)) for statistic in statistics]
        rows.append((label, *values, format.count(distribution.count)))

    return Table(("per request", *statistics, "samples"), rows)


def _positions_table(speculation: Speculation) -> Table:
    rows = [
        (str(position), format.percent(share))
        for position, share in enumerate(speculation.by_position, 1)
    ]
    return Table(("position in the draft", "accepted, of all drafts"), rows)


def _position_chart(speculation: Speculation) -> Iterator[Chart]:
    """Yield how often the first, second, ... token of a draft was accepted, if that is known."""
    if not speculation.by_position:
        return

    positions = tuple(float(number) for number in range(1, len(speculation.by_position) + 1))
    yield Chart(
        title="Accepted tokens by position in the draft",
        x=Axis(label="position", min=0),
        y=Axis(label="fraction of all drafts", format="percent", min=0, max=1),
        series=(Series(x=positions, y=speculation.by_position, color="c1"),),
    )


def _format_tokens(value: float | None) -> str:
    return format.NONE if value is None else f"{value:.3g}"
