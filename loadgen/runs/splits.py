"""Where TTFT and E2E go, and the slowest requests, on a page with a waterfall. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from loadgen.core import format
from loadgen.core.analysis.causes import SLOW_FACTOR, examined_count, has_enough_slow
from loadgen.core.metrics.sections import SlowRequest, Splits
from loadgen.core.metrics.summary import Summary
from loadgen.render.page import Bar
from loadgen.render.section import Bars, Charts, PageOnly, Paragraph, Section, Table, section
from loadgen.runs import charts
from loadgen.runs.page_data import Figures

NEAR = {"p50": "near p50", "p99": "near p99", "slowest": "slowest 1 %"}
TTFT_PARTS = ("client", "connect", "queue", "prefill", "transfer", "rest")
E2E_PARTS = ("ttft", "decode", "stall")
WORDS = "queue, prefill, transfer: by the server; rest: network, and what the server does not account for"
COLOURS = {
    "client": "bad",
    "connect": "warn",
    "queue": "c2",
    "prefill": "c1",
    "decode": "c3",
    "rest": "soft",
}


def _tables(splits: Splits) -> list[Table]:
    """TTFT and E2E: of all requests near p50, near p99 and of the slowest; of each group of them near p99."""
    tables = []
    for metric, head, parts in (
        ("ttft", ("TTFT goes into, ms", "whole", *TTFT_PARTS, "requests"), TTFT_PARTS),
        ("e2e", ("E2E goes into, ms", "whole", "TTFT", "decode", "stalls", "requests"), E2E_PARTS),
    ):
        rows = []
        for group in splits.groups:
            for split in getattr(group, metric):
                if group.by == "all" or split.at == "p99":
                    name = (
                        NEAR[split.at] if group.by == "all" else f"{group.name}, {NEAR[split.at]}"
                    )
                    cells = [
                        format.milliseconds(getattr(split, f"{part}_ms"))
                        for part in (metric, *parts)
                    ]
                    rows.append((name, *cells, format.count(split.requests)))
        if rows:
            tables.append(Table(head, rows))
    return tables


def _slow_table(slowest: Sequence[SlowRequest], title: str, by: str) -> Table:
    rows = []
    for request in slowest:
        times = (
            request.ttft_ms,
            request.queue_ms,
            request.prefill_ms,
            request.e2e_ms,
            request.max_gap_ms,
        )
        known = request.input_tokens and request.cached_tokens is not None
        cached = (request.cached_tokens or 0) / (request.input_tokens or 1) if known else None
        rows.append(
            (
                _name(request),
                format.duration(request.due_s),
                *map(format.milliseconds, times),
                format.count(request.input_tokens),
                format.percent(cached),
                format.count(request.in_flight),
                format.count(request.waiting_input_tokens),
            )
        )
    times_head = ("TTFT", "queue", "prefill", "E2E", "largest gap")
    head = (title, "at", *times_head, "prompt", "cached", "in flight", "tokens waiting")
    return Table(head, rows, ids=[f"slow-{by}-{request.slot}" for request in slowest])


def _name(request: SlowRequest) -> str:
    name = request.id or str(request.slot)
    if request.session is not None and request.turn is not None:
        name = f"session {request.session}, turn {request.turn + 1}"
    return f"{name} {request.target}".strip()


def sections(
    summary: Summary, figures: Callable[[], Figures] | None
) -> Iterator[Section | PageOnly]:
    """Why it was slow: the paragraph, the splits, the slowest requests with their waterfall, and charts of them.

    Tables stand in a text only where the server gives an account of its time.
    """
    splits, why = summary.splits, summary.causes.text
    if not splits.groups:
        yield section("Why was it slow", why)
        return
    why = _explanation(summary)
    told = bool(splits.accounted)
    missed = summary.goodput.met is False
    yield section(
        "Why was it slow", why, page_only=not (told or missed or summary.causes.text), id="why"
    )
    legend = f"Means over the requests near the quantile, which add up. {WORDS}."
    account = f"{splits.why[:1].upper()}{splits.why[1:]}." if splits.why else ""
    yield section(
        "",
        *_tables(splits),
        Paragraph(legend, "soft"),
        Paragraph(account, "soft"),
        page_only=not told,
    )
    yield from _slowest(summary, told, figures)


def _explanation(summary: Summary) -> str:
    """Return the causes that were found and what was not examined, or that no cause was found."""
    found = summary.causes
    if found.not_examined:
        return f"{found.text} Not examined: {found.not_examined}.".strip()
    return found.text or _no_cause_found(summary)


def _no_cause_found(summary: Summary) -> str:
    """Return that nothing was slow, or that nothing tells why it was."""
    requests, slow = examined_count(summary.ttft_ms.count), summary.causes.slow
    if (
        summary.goodput.met is not False
        and not summary.goodput.not_judged
        and not has_enough_slow(slow, requests)
    ):
        return f"It was not: {slow:,} of {requests:,} requests took more than {SLOW_FACTOR:g} times the usual TTFT."
    return "No cause stands out: the slow requests have nothing in common that the fast ones lack."


def _slowest(
    summary: Summary, told: bool, figures: Callable[[], Figures] | None
) -> Iterator[Section | PageOnly]:
    """The slowest requests: all of them where a page is asked, in a text those by TTFT."""
    slowest = summary.slowest
    bars = [
        Bar(_name(request), format.milliseconds(request.e2e_ms), _waterfall(request))
        for request in slowest
    ]
    legend = (
        "From the due instant: the client's lateness (red), waiting for a new connection (yellow), the server's queue, "
        "its prefill, the network and what else came before the first token (grey), then the output. The name is the "
        "X-Request-Id that was sent, or session and turn: summary.json has both."
    )
    drawn = (Bars(rows=bars, unit=" ms", low=0.0), Paragraph(legend, "soft"))
    by_ttft, by_e2e = (
        _slow_table([request for request in slowest if request.by == by], title, by)
        for by, title in (("ttft", "slowest by TTFT"), ("e2e", "slowest by E2E"))
    )
    if told:
        yield section("", by_ttft, text_only=True)
    head = "The slowest requests"

    def whole() -> list[Section]:
        clouds = () if figures is None else tuple(charts.slow(figures(), summary))
        return [
            section(
                head,
                *drawn,
                by_ttft,
                by_e2e,
                Charts(clouds),
                folded=True,
                page_only=True,
                id="slowest",
            )
        ]

    yield whole


def _waterfall(request: SlowRequest) -> list[tuple[float, float, str, str]]:
    """The segments of one request: what is known of its TTFT, the rest of it, and its output."""
    first = request.e2e_ms if request.ttft_ms is None else request.ttft_ms
    lengths = {"client": request.client_ms, "connect": request.connect_ms}
    lengths |= {"queue": request.queue_ms or 0.0, "prefill": request.prefill_ms or 0.0}
    lengths["rest"] = max(first - sum(lengths.values()), 0.0)
    lengths["decode"] = request.e2e_ms - first
    segments, at = [], 0.0
    for name, length in lengths.items():
        if length > 0:
            segments.append(
                (at, at + length, COLOURS[name], f"{name} {format.milliseconds(length)} ms")
            )
        at += length
    return segments
