"""Where TTFT and E2E latency come from, and the slowest requests, on a page with a waterfall.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple

from loadgen.core import format
from loadgen.core.analysis.causes import SLOW_FACTOR, examined_count, has_enough_slow
from loadgen.render.page import Bar, Chart
from loadgen.render.section import (
    Bars,
    Charts,
    PageSectionFactory,
    Paragraph,
    Section,
    Table,
    section,
)
from loadgen.runs import charts

if TYPE_CHECKING:
    from loadgen.core.metrics.sections import (
        E2eSplit,
        PercentileName,
        SlowRequest,
        SplitGroup,
        Splits,
        TtftSplit,
    )
    from loadgen.core.metrics.summary import Summary
    from loadgen.runs.page import ComputeChartData

GROUP_LABELS = {"p50": "near p50", "p99": "near p99", "slowest": "slowest 1 %"}
"""The label of the requests that a breakdown averages."""

LEGEND = (
    "Averages over the requests near that percentile; the columns add up to the total. Queue, "
    "prefill and transfer are reported by the server; unattributed is network and unreported time."
)

WATERFALL_LEGEND = (
    "From the scheduled time: delay of the client (red), waiting for a new connection (yellow), "
    "queue and prefill of the server, network and unattributed time before the first token (grey), "
    "then the output. A request is named by its X-Request-Id, or by session and turn."
)

_COLORS = {
    "client": "bad",
    "connect": "warn",
    "queue": "c2",
    "prefill": "c1",
    "decode": "c3",
    "unattributed": "soft",
}
"""The color of each segment of the waterfall, as `render.page` names colors."""


TTFT_BREAKDOWN_HEAD = (
    "TTFT breakdown (ms)",
    "total",
    "client",
    "connect",
    "queue",
    "prefill",
    "transfer",
    "unattributed",
    "requests",
)
"""The heads of the table with the parts of TTFT."""

E2E_BREAKDOWN_HEAD = ("E2E breakdown (ms)", "total", "TTFT", "decode", "stalls", "requests")
"""The heads of the table with the parts of E2E latency."""

SLOW_HEAD = (
    "at",
    "TTFT",
    "queue",
    "prefill",
    "E2E",
    "max ITL",
    "prompt",
    "cached",
    "in flight",
    "tokens queued",
)
"""The heads of a table of slow requests, after the name of a request. Times are in ms."""


def build_slow_request_sections(
    summary: Summary, compute_chart_data: ComputeChartData | None
) -> Iterator[Section | PageSectionFactory]:
    """Yield why requests were slow, where their time was spent, and which were the slowest.

    The slowest requests are a table in a report as text. On a page they are a section with charts,
    whose data take seconds to compute. So the page gets a function that builds this section when
    the page is written. It is called without arguments.
    """
    if not summary.splits.groups:
        yield section("Slow requests", summary.causes.text)
        return

    yield _causes_section(summary)
    yield _breakdown_section(summary.splits)

    if _has_server_timing(summary.splits):
        yield section("", _slow_table(summary.slowest, "ttft"), text_only=True)

    yield partial(_build_slowest_sections, summary, compute_chart_data)


def _build_slowest_sections(
    summary: Summary, compute_chart_data: ComputeChartData | None
) -> list[Section]:
    return [_slowest_section(summary, compute_chart_data)]


def _causes_section(summary: Summary) -> Section:
    """Return the causes of slow requests.

    A report as text omits them if there is nothing to explain: the server reports no timing, the
    SLO was not missed, and no cause was found.
    """
    missed_slo = summary.goodput.met is False
    has_cause = bool(summary.causes.text)
    is_in_text = _has_server_timing(summary.splits) or missed_slo or has_cause
    return section(
        "Slow requests", _explanation(summary), page_only=not is_in_text, id="slow-requests"
    )


def _breakdown_section(splits: Splits) -> Section:
    """Return the tables with the parts of TTFT and E2E latency.

    A report as text omits them if the server does not report its own timing, because they have no
    queue and prefill times then.
    """
    return section(
        "",
        *_breakdown_tables(splits),
        Paragraph(LEGEND, "soft"),
        Paragraph(_as_sentence(splits.reason), "soft"),
        page_only=not _has_server_timing(splits),
    )


def _has_server_timing(splits: Splits) -> bool:
    """Return whether the server reported its own queue and prefill times for any request."""
    return splits.accounted > 0


def _as_sentence(text: str) -> str:
    """Return a text with a capital letter and a full stop, or "" if it is empty."""
    return f"{text[0].upper()}{text[1:]}." if text else ""


def _explanation(summary: Summary) -> str:
    """Return the causes that were found and what was not examined, or that no cause was found."""
    causes = summary.causes
    if causes.not_examined:
        return f"{causes.text} Not examined: {causes.not_examined}.".strip()
    return causes.text or _describe_missing_cause(summary)


def _describe_missing_cause(summary: Summary) -> str:
    """Return the sentence for a run in which no cause of slow requests was found.

    If few requests were slow, the sentence gives their number, because there is nothing to explain.
    If many were slow, or if the SLO was missed or not judged, it says that the search for a cause
    found none.
    """
    examined = examined_count(summary.ttft_ms.count)
    slow_count = summary.causes.slow
    has_many_slow = has_enough_slow(slow_count, examined)
    may_have_missed_slo = summary.goodput.met is False or bool(summary.goodput.not_judged)
    if has_many_slow or may_have_missed_slo:
        return "No cause found: the slow requests have nothing in common that the fast ones lack."

    return (
        f"{slow_count:,} of {examined:,} requests exceeded {SLOW_FACTOR:g}x the usual TTFT. "
        "No bottleneck found."
    )


# -- breakdowns ------------------------------------------------------------------------------------


def _breakdown_tables(splits: Splits) -> list[Table]:
    """Return the tables with the parts of TTFT and of E2E latency, without those that are empty.

    A row has the mean times of the requests of a group near one percentile, and their number. A
    group is all requests together or, for example, the requests of one target.
    """
    ttft_rows = [
        _ttft_row(_row_label(group, split.at), split)
        for group in splits.groups
        for split in group.ttft
        if _has_row(group, split.at)
    ]

    e2e_rows = [
        _e2e_row(_row_label(group, split.at), split)
        for group in splits.groups
        for split in group.e2e
        if _has_row(group, split.at)
    ]
    tables = [Table(TTFT_BREAKDOWN_HEAD, ttft_rows), Table(E2E_BREAKDOWN_HEAD, e2e_rows)]
    return [table for table in tables if table.rows]


def _has_row(group: SplitGroup, position: PercentileName) -> bool:
    """Return whether the breakdowns show the requests of a group near a position, such as "p99".

    All requests together have a row for each position. Other groups, such as the requests of one
    target, have only the row near p99, which keeps the table short.
    """
    return group.by == "all" or position == "p99"


def _row_label(group: SplitGroup, position: PercentileName) -> str:
    """Return the label of a row, such as "near p50" or, for a target, "gpu-1, near p99"."""
    position_label = GROUP_LABELS[position]
    return position_label if group.by == "all" else f"{group.name}, {position_label}"


def _ttft_row(label: str, split: TtftSplit) -> tuple[str, ...]:
    """Return the cells under TTFT_BREAKDOWN_HEAD: the mean TTFT, its parts, and the requests."""
    return (
        label,
        format.milliseconds(split.ttft_ms),
        format.milliseconds(split.client_ms),
        format.milliseconds(split.connect_ms),
        format.milliseconds(split.queue_ms),
        format.milliseconds(split.prefill_ms),
        format.milliseconds(split.transfer_ms),
        format.milliseconds(split.rest_ms),
        format.count(split.requests),
    )


def _e2e_row(label: str, split: E2eSplit) -> tuple[str, ...]:
    """Return the cells under E2E_BREAKDOWN_HEAD: the mean latency, its parts, and the requests."""
    return (
        label,
        format.milliseconds(split.e2e_ms),
        format.milliseconds(split.ttft_ms),
        format.milliseconds(split.decode_ms),
        format.milliseconds(split.stall_ms),
        format.count(split.requests),
    )


# -- the slowest requests --------------------------------------------------------------------------


def _slow_table(requests: Iterable[SlowRequest], metric: Literal["ttft", "e2e"]) -> Table:
    """Return the slowest requests by a metric, each with the anchor that charts link to."""
    slowest = [request for request in requests if request.by == metric]
    head = (f"slowest by {metric.upper()}", *SLOW_HEAD)
    ids = [f"slow-{metric}-{request.slot}" for request in slowest]
    return Table(head, [_slow_row(request) for request in slowest], ids=ids)


def _slow_row(request: SlowRequest) -> tuple[str, ...]:
    """Return the cells of a slow request: its name, then one cell for each head in SLOW_HEAD."""
    return (
        _request_name(request),
        format.duration(request.due_s),
        format.milliseconds(request.ttft_ms),
        format.milliseconds(request.queue_ms),
        format.milliseconds(request.prefill_ms),
        format.milliseconds(request.e2e_ms),
        format.milliseconds(request.max_gap_ms),
        format.count(request.input_tokens),
        format.percent(_cached_share(request)),
        format.count(request.in_flight),
        format.count(request.waiting_input_tokens),
    )


def _cached_share(request: SlowRequest) -> float | None:
    """Return the share of the prompt that came from the cache, or None if it is not known."""
    if request.cached_tokens is None or not request.input_tokens:
        return None
    return request.cached_tokens / request.input_tokens


def _request_name(request: SlowRequest) -> str:
    name = request.id or str(request.slot)
    if request.session is not None and request.turn is not None:
        name = f"session {request.session}, turn {request.turn + 1}"
    return f"{name} {request.target}".strip()


def _slowest_section(summary: Summary, compute_chart_data: ComputeChartData | None) -> Section:
    """Return the slowest requests for a page: waterfall, tables, and charts with all requests."""
    scatter_plots: list[Chart] = []
    if compute_chart_data is not None:
        scatter_plots += charts.build_slow_request_charts(compute_chart_data(), summary)

    return section(
        "Slowest requests",
        Bars(rows=_waterfall_bars(summary.slowest), unit=" ms", included_value=0.0),
        Paragraph(WATERFALL_LEGEND, "soft"),
        _slow_table(summary.slowest, "ttft"),
        _slow_table(summary.slowest, "e2e"),
        Charts(scatter_plots),
        folded=True,
        page_only=True,
        id="slowest",
    )


def _waterfall_bars(requests: Iterable[SlowRequest]) -> list[Bar]:
    """Return a bar for each request, divided into the times that make up its E2E latency."""
    return [
        Bar(_request_name(request), format.milliseconds(request.e2e_ms), _waterfall(request))
        for request in requests
    ]


class _Segment(NamedTuple):
    """A part of the bar of a request: where it lies on the time axis, its color and its label."""

    start_ms: float
    end_ms: float
    color: str
    label: str


def _waterfall(request: SlowRequest) -> list[_Segment]:
    """Return the segments of the bar of a request, one after the other on a time axis in ms.

    The bar begins at the scheduled time. For example, a request that waited 10 ms for a connection
    and 5 ms in the queue has the segments 0 to 10 ms and 10 to 15 ms. Parts without time are left
    out.
    """
    segments = []
    start_ms = 0.0
    for part, length_ms in _part_lengths_ms(request).items():
        end_ms = start_ms + length_ms
        if length_ms > 0:
            label = f"{part} {format.milliseconds(length_ms)} ms"
            segments.append(_Segment(start_ms, end_ms, _COLORS[part], label))
        start_ms = end_ms

    return segments


def _part_lengths_ms(request: SlowRequest) -> dict[str, float]:
    """Return how long each part of a request took, in order of time.

    Before the first token these are the parts that are known, and the rest as "unattributed". The
    time after it is "decode", which is 0 for a response that was not streamed: it has no time of a
    first token, so its whole latency counts as the time before it.
    """
    first_token_ms = request.e2e_ms if request.ttft_ms is None else request.ttft_ms
    known_parts_ms = {
        "client": request.client_ms,
        "connect": request.connect_ms,
        "queue": request.queue_ms or 0.0,
        "prefill": request.prefill_ms or 0.0,
    }
    unattributed_ms = max(first_token_ms - sum(known_parts_ms.values()), 0.0)
    decode_ms = request.e2e_ms - first_token_ms

    return {**known_parts_ms, "unattributed": unattributed_ms, "decode": decode_ms}
