"""Where TTFT and E2E go, and the slowest requests: as text, and as a section of a page with a waterfall. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from loadgen.core import format
from loadgen.core.metrics.splits import SlowRequest, Splits
from loadgen.core.metrics.summary import Summary
from loadgen.present import table
from loadgen.present.page import Bar, Chart, Page
from loadgen.present.table import wrapped

NEAR = {"p50": "near p50", "p99": "near p99", "slowest": "slowest 1 %"}
TTFT_PARTS = ("client", "connect", "queue", "prefill", "transfer", "rest")
E2E_PARTS = ("ttft", "decode", "stall")
WORDS = "queue, prefill, transfer: by the server; rest: network, and what the server does not account for"
COLOURS = {"client": "bad", "connect": "warn", "queue": "c2", "prefill": "c1", "decode": "c3", "rest": "soft"}


class _Table(NamedTuple):
    head: tuple[str, ...]
    rows: list[tuple[str, ...]]


def _tables(splits: Splits) -> list[_Table]:
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
                    name = NEAR[split.at] if group.by == "all" else f"{group.name}, {NEAR[split.at]}"
                    cells = [format.milliseconds(getattr(split, f"{part}_ms")) for part in (metric, *parts)]
                    rows.append((f"  {name}", *cells, format.count(split.requests)))
        if rows:
            tables.append(_Table(head, rows))
    return tables


def _slow_table(slowest: Sequence[SlowRequest], title: str) -> _Table:
    rows = []
    for request in slowest:
        times = (request.ttft_ms, request.queue_ms, request.prefill_ms, request.e2e_ms, request.max_gap_ms)
        known = request.input_tokens and request.cached_tokens is not None
        cached = (request.cached_tokens or 0) / (request.input_tokens or 1) if known else None
        rows.append(
            (
                _name(request), format.duration(request.due_s), *map(format.milliseconds, times),
                format.count(request.input_tokens), format.percent(cached), format.count(request.in_flight),
                format.count(request.waiting_input_tokens),
            )
        )  # fmt: skip
    times_head = ("TTFT", "queue", "prefill", "E2E", "largest gap")
    return _Table((title, "at", *times_head, "prompt", "cached", "in flight", "tokens waiting"), rows)


def _name(request: SlowRequest) -> str:
    name = request.id or str(request.slot)
    if request.session is not None and request.turn is not None:
        name = f"session {request.session}, turn {request.turn + 1}"
    return f"{name} {request.target}".strip()


def split_lines(splits: Splits) -> Iterator[str]:
    """Where the time goes, as text; nothing where the server gives no account of it."""
    if not splits.accounted:
        return
    for head, rows in _tables(splits):
        yield from table.text(head, rows)
        if "queue" in head:
            yield WORDS
    yield from wrapped(splits.why)


def slow_lines(summary: Summary) -> Iterator[str]:
    """The slowest requests by TTFT, one line each; nothing where the server gives no account of them."""
    slowest = [request for request in summary.slowest if request.by == "ttft"]
    if slowest and summary.splits.accounted:
        yield from table.text(*_slow_table(slowest, "Slowest by TTFT"))


def section(sheet: Page, summary: Summary, charts: Iterable[Chart] = ()) -> None:
    """Why it was slow: the paragraph, the splits, the slowest requests with their waterfall, and `charts` of them."""
    splits, slowest = summary.splits, summary.slowest
    if not splits.groups:
        return
    sheet.section("Why was it slow", id="why")
    sheet.say(summary.causes.text or "Nothing in the slow requests tells clearly what made them slow.")
    for head, rows in _tables(splits):
        sheet.table(head, rows)
    sheet.say(f"Means over the requests near the quantile, which add up. {WORDS}.", "soft")
    if splits.why:
        sheet.say(f"{splits.why[0].upper()}{splits.why[1:]}.", "soft")
    sheet.add("<h3>The slowest requests</h3>")
    bars = [Bar(_name(request), format.milliseconds(request.e2e_ms), _waterfall(request)) for request in slowest]
    sheet.bars(bars, unit=" ms", low=0.0)
    sheet.say(
        "From the due instant: the client's lateness (red), waiting for a new connection (yellow), the server's queue, "
        "its prefill, the network and what else came before the first token (grey), then the output. The name is the "
        "X-Request-Id that was sent, or session and turn: summary.json has both.",
        "soft",
    )
    for by, title in (("ttft", "slowest by TTFT"), ("e2e", "slowest by E2E")):
        own = [request for request in slowest if request.by == by]
        sheet.table(*_slow_table(own, title), ids=[f"slow-{by}-{request.slot}" for request in own])
    sheet.charts(charts)


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
            segments.append((at, at + length, COLOURS[name], f"{name} {format.milliseconds(length)} ms"))
        at += length
    return segments
