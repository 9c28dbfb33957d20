"""Where TTFT and E2E latency come from, and the slowest requests, on a page with a waterfall.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from loadgen.core import format
from loadgen.core.analysis.causes import SLOW_FACTOR, examined_count, has_enough_slow
from loadgen.render.page import Bar
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
    from loadgen.core.metrics.sections import E2eSplit, SlowRequest, Splits, TtftSplit
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


class _Breakdown(NamedTuple):
    """A table of averages: the metric, the fields of its parts, and the heads of all columns."""

    metric: Literal["ttft", "e2e"]
    parts: tuple[str, ...]
    head: tuple[str, ...]


_BREAKDOWNS = (
    _Breakdown(
        "ttft",
        ("client", "connect", "queue", "prefill", "transfer", "rest"),
        (
            "TTFT breakdown (ms)",
            "total",
            "client",
            "connect",
            "queue",
            "prefill",
            "transfer",
            "unattributed",
            "requests",
        ),
    ),
    _Breakdown(
        "e2e",
        ("ttft", "decode", "stall"),
        ("E2E breakdown (ms)", "total", "TTFT", "decode", "stalls", "requests"),
    ),
)

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
    """Yield the causes of slow requests, the breakdowns of latency, and the slowest requests.

    A page has all of them. A text has the tables only if the server reports its own timing, without
    which they have no queue and prefill times. It has the causes only if there is something to
    explain.
    """
    splits = summary.splits
    if not splits.groups:
        yield section("Slow requests", summary.causes.text)
        return
    has_server_timing = splits.accounted > 0
    needs_explanation = summary.goodput.met is False or bool(summary.causes.text)
    yield section(
        "Slow requests",
        _explanation(summary),
        page_only=not (has_server_timing or needs_explanation),
        id="why",
    )
    limitation = f"{splits.reason[:1].upper()}{splits.reason[1:]}." if splits.reason else ""
    yield section(
        "",
        *_breakdown_tables(splits),
        Paragraph(LEGEND, "soft"),
        Paragraph(limitation, "soft"),
        page_only=not has_server_timing,
    )
    if has_server_timing:
        yield section("", _slow_table(summary.slowest, "ttft"), text_only=True)

    def slowest_requests() -> list[Section]:
        return [_slowest_section(summary, compute_chart_data)]

    yield slowest_requests


def _explanation(summary: Summary) -> str:
    """Return the causes that were found and what was not examined, or that no cause was found."""
    causes = summary.causes
    if causes.not_examined:
        return f"{causes.text} Not examined: {causes.not_examined}.".strip()
    return causes.text or _no_cause_found(summary)


def _no_cause_found(summary: Summary) -> str:
    """Return that slow requests have no explanation, or that too few were slow to need one.

    Few slow requests need none unless the SLO was missed, or could not be judged.
    """
    examined = examined_count(summary.ttft_ms.count)
    slow_count = summary.causes.slow
    slo_may_be_missed = summary.goodput.met is False or bool(summary.goodput.not_judged)
    if not slo_may_be_missed and not has_enough_slow(slow_count, examined):
        return (
            f"{slow_count:,} of {examined:,} requests exceeded {SLOW_FACTOR:g}x the usual TTFT. "
            "No bottleneck found."
        )
    return "No cause found: the slow requests have nothing in common that the fast ones lack."


# -- breakdowns ------------------------------------------------------------------------------------


def _breakdown_tables(splits: Splits) -> list[Table]:
    """Return the breakdowns of TTFT and E2E latency that have rows."""
    tables = []
    for breakdown in _BREAKDOWNS:
        rows = list(_breakdown_rows(splits, breakdown))
        if rows:
            tables.append(Table(breakdown.head, rows))
    return tables


def _breakdown_rows(splits: Splits, breakdown: _Breakdown) -> Iterator[tuple[str, ...]]:
    """Yield the rows of a breakdown of TTFT or E2E latency into its parts.

    A row averages the requests near one percentile. The first rows are those of all requests, near
    p50, near p99 and the slowest ones. Further groups, such as a target or a request class, have
    only the row near p99.
    """
    fields = [f"{name}_ms" for name in (breakdown.metric, *breakdown.parts)]
    for group in splits.groups:
        has_all_requests = group.by == "all"
        splits_of_metric: Sequence[TtftSplit | E2eSplit] = getattr(group, breakdown.metric)
        for split in splits_of_metric:
            if not has_all_requests and split.at != "p99":
                continue
            label = GROUP_LABELS[split.at]
            if not has_all_requests:
                label = f"{group.name}, {label}"
            times = [format.milliseconds(getattr(split, field)) for field in fields]
            yield (label, *times, format.count(split.requests))


# -- the slowest requests --------------------------------------------------------------------------


def _slow_table(requests: Iterable[SlowRequest], metric: Literal["ttft", "e2e"]) -> Table:
    """Return the slowest requests by a metric, each with the anchor that charts link to."""
    slowest = [request for request in requests if request.by == metric]
    head = (f"slowest by {metric.upper()}", *SLOW_HEAD)
    ids = [f"slow-{metric}-{request.slot}" for request in slowest]
    return Table(head, [_slow_row(request) for request in slowest], ids=ids)


def _slow_row(request: SlowRequest) -> tuple[str, ...]:
    """Return the cells of a slow request under SLOW_HEAD, after its name."""
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
    bars = [
        Bar(_request_name(request), format.milliseconds(request.e2e_ms), _waterfall(request))
        for request in summary.slowest
    ]
    scatter_plots = (
        ()
        if compute_chart_data is None
        else tuple(charts.build_slow_request_charts(compute_chart_data(), summary))
    )
    return section(
        "Slowest requests",
        Bars(rows=bars, unit=" ms", included_value=0.0),
        Paragraph(WATERFALL_LEGEND, "soft"),
        _slow_table(summary.slowest, "ttft"),
        _slow_table(summary.slowest, "e2e"),
        Charts(scatter_plots),
        folded=True,
        page_only=True,
        id="slowest",
    )


def _waterfall(request: SlowRequest) -> Sequence[tuple[float, float, str, str]]:
    """Return the segments of one request in ms: known parts of TTFT, its rest, and the output."""
    first_token_ms = request.e2e_ms if request.ttft_ms is None else request.ttft_ms
    length_by_part = {
        "client": request.client_ms,
        "connect": request.connect_ms,
        "queue": request.queue_ms or 0.0,
        "prefill": request.prefill_ms or 0.0,
    }
    known_ms = sum(length_by_part.values())
    length_by_part["unattributed"] = max(first_token_ms - known_ms, 0.0)
    length_by_part["decode"] = request.e2e_ms - first_token_ms
    segments = []
    start_ms = 0.0
    for part, length_ms in length_by_part.items():
        if length_ms > 0:
            label = f"{part} {format.milliseconds(length_ms)} ms"
            segments.append((start_ms, start_ms + length_ms, _COLORS[part], label))
        start_ms += length_ms
    return segments
