"""Where TTFT and E2E go, and the slowest requests: as text, and as bars of a page. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loadgen import format
from loadgen.report import page, table
from loadgen.report.table import wrapped

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from loadgen.metrics.splits import SlowRequest, Splits

NAMES = {"p50": "near p50", "p99": "near p99", "slowest": "slowest 1 %"}
TTFT_PARTS = ("client", "connect", "queue", "prefill", "transfer", "rest")
E2E_PARTS = ("ttft", "decode", "stall")
COLORS = {"client": "bad", "connect": "c5", "queue": "c2", "prefill": "c1", "transfer": "c4", "rest": "c6"}
COLORS |= {"ttft": "c1", "decode": "c3", "stall": "c2"}
BEFORE = ["connect", "queue", "prefill", "rest"]  # the parts of one request until its first token
BY_SERVER = "queue, prefill, transfer: by the server; rest: network, and what the server does not account for"


def _shown(splits: Splits, metric: str) -> Iterator[tuple[str, float, list[float | None], int]]:
    """Name, whole, parts and count of requests: of all near p50, near p99 and of the slowest; of a group near p99."""
    parts = TTFT_PARTS if metric == "ttft" else E2E_PARTS
    for group in splits.groups:
        for split in getattr(group, metric):
            if group.by == "all" or split.at == "p99":
                name = NAMES[split.at] if group.by == "all" else f"{group.name}, {NAMES[split.at]}"
                values = [getattr(split, f"{part}_ms") for part in parts]
                yield name, getattr(split, f"{metric}_ms"), values, split.requests


def split_lines(splits: Splits) -> Iterator[str]:
    """Tables of the parts of TTFT and of E2E, where a server gives an account."""
    if not splits.accounted:
        return
    heads: dict[str, tuple[str, ...]] = {"ttft": ("TTFT goes into, ms", "whole", *TTFT_PARTS, "requests")}
    heads["e2e"] = ("E2E goes into, ms", "whole", "TTFT", "decode", "stalls", "requests")
    for metric, head in heads.items():
        rows = [
            (f"  {name}", *map(format.milliseconds, (whole, *values)), format.count(count))
            for name, whole, values, count in _shown(splits, metric)
        ]
        if rows:
            yield from table.text(head, rows)
            yield from [BY_SERVER] * (metric == "ttft")
    if splits.why:
        yield from wrapped(splits.why)


def slow_lines(slowest: Sequence[SlowRequest]) -> Iterator[str]:
    """The slowest requests by TTFT, one line each."""
    slowest = _accounted(slowest)
    if not slowest:
        return
    head = ("Slowest by TTFT", "at", "TTFT", "queue", "prefill", "E2E", "largest gap", "prompt", "cached", "in flight")
    rows = []
    for request in slowest:
        times = (request.ttft_ms, request.queue_ms, request.prefill_ms, request.e2e_ms, request.max_gap_ms)
        rows.append(
            (
                _name(request),
                format.duration(request.due_s),
                *map(format.milliseconds, times),
                format.count(request.input_tokens),
                format.percent(_cached(request)),
                format.count(request.in_flight),
                format.count(request.waiting_input_tokens),
            )
        )
    yield from table.text((*head, "tokens waiting"), rows)


def _accounted(slowest: Sequence[SlowRequest]) -> list[SlowRequest]:
    """The slowest by TTFT, where the server gives an account of one of them."""
    by_ttft = [request for request in slowest if request.by == "ttft"]
    return by_ttft if any(request.prefill_ms is not None for request in by_ttft) else []


def _name(request: SlowRequest) -> str:
    return f"{request.id or request.slot} {request.target}".rstrip()


def _cached(request: SlowRequest) -> float | None:
    if not request.input_tokens or request.cached_tokens is None:
        return None
    return request.cached_tokens / request.input_tokens


def add_to_page(sheet: page.Page, splits: Splits, slowest: Sequence[SlowRequest]) -> None:
    """The section of a page: the parts of TTFT and E2E as bars, and each of the slowest requests along its own time."""
    shown = {metric: list(_shown(splits, metric)) for metric in ("ttft", "e2e")}
    if not splits.accounted:
        shown["ttft"] = []  # all of it would be "rest"
    if not any(shown.values()) and not slowest:
        return
    sheet.section("Where the time goes", id="splits")
    for metric, parts in (("ttft", TTFT_PARTS), ("e2e", E2E_PARTS)):
        bars = [
            page.Bar(name, f"{format.milliseconds(whole)} ms, {format.count(count)} requests", _segments(parts, values))
            for name, whole, values, count in shown[metric]
        ]
        if bars:
            sheet.add(f"<h3>{metric.upper()}, in means of the requests near each quantile</h3>")
            sheet.bars(bars, unit=" ms", low=0.0)
            sheet.legend({part: COLORS[part] for part in parts})
    sheet.listed(filter(None, (BY_SERVER if shown["ttft"] else "", splits.why)))
    by_e2e = [request for request in slowest if request.by == "e2e"]
    for name, own, drawn in (("TTFT", _accounted(slowest), BEFORE), ("E2E", by_e2e, [*BEFORE, "decode"])):
        if own:
            sheet.add(f"<h3>The slowest by {name}, along their own time from due</h3>")
            sheet.bars([_waterfall(request, drawn) for request in own], unit=" ms", low=0.0)
            sheet.legend({part: COLORS[part] for part in drawn})


def _segments(parts: Sequence[str], values: Sequence[float | None]) -> list[tuple[float, float, str, str]]:
    """The known parts, one after the other."""
    segments, end = [], 0.0
    for part, value in zip(parts, values, strict=True):
        if value:
            segments.append((end, end + value, COLORS[part], f"{part} {format.milliseconds(value)} ms"))
            end += value
    return segments


def _waterfall(request: SlowRequest, parts: Sequence[str]) -> page.Bar:
    """One request along its time. What neither client nor server accounts for is the rest before the first token."""
    known = [request.connect_ms, request.queue_ms, request.prefill_ms]
    rest = None if request.ttft_ms is None else max(request.ttft_ms - sum(value or 0.0 for value in known), 0.0)
    segments = _segments(parts, [*known, rest, request.decode_ms][: len(parts)])
    facts = [f"TTFT {format.milliseconds(request.ttft_ms)} ms", f"E2E {format.milliseconds(request.e2e_ms)} ms"]
    facts += [f"{format.count(request.input_tokens)} prompt tokens"] if request.input_tokens is not None else []
    cached = _cached(request)
    facts += [f"{format.percent(cached)} cached"] if cached is not None else []
    facts += [f"{format.count(request.in_flight)} others in flight"]
    return page.Bar(f"request {_name(request)}, at {format.duration(request.due_s)}", ", ".join(facts), segments)
