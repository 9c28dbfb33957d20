"""Where TTFT and E2E go, and the slowest requests, as text. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loadgen import format
from loadgen.report import table
from loadgen.report.table import wrapped

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from loadgen.metrics.splits import SlowRequest, Splits

NAMES = {"p50": "near p50", "p99": "near p99", "slowest": "slowest 1 %"}
TTFT_PARTS = ("client", "connect", "queue", "prefill", "transfer", "rest")
E2E_PARTS = ("ttft", "decode", "stall")


def _cells(split: object, parts: Sequence[str]) -> list[str]:
    return [format.milliseconds(getattr(split, f"{part}_ms")) for part in parts]


def split_lines(splits: Splits) -> Iterator[str]:
    """The parts of TTFT and E2E: of all requests near p50, near p99 and of the slowest; of each group near p99."""
    rows: dict[str, list[tuple[str, ...]]] = {"ttft": [], "e2e": []}
    for group in splits.groups:
        for metric, parts in (("ttft", TTFT_PARTS), ("e2e", E2E_PARTS)):
            for split in getattr(group, metric):
                if group.by == "all" or split.at == "p99":
                    name = NAMES[split.at] if group.by == "all" else f"{group.name}, {NAMES[split.at]}"
                    whole = format.milliseconds(getattr(split, f"{metric}_ms"))
                    rows[metric].append((f"  {name}", whole, *_cells(split, parts), format.count(split.requests)))
    if not splits.accounted:
        rows["ttft"] = []
    if rows["ttft"]:
        head = ("TTFT goes into, ms", "whole", *TTFT_PARTS, "requests")
        yield from table.text(head, rows["ttft"])
        yield "queue, prefill, transfer: by the server; rest: network, and what the server does not account for"
    if rows["e2e"] and splits.accounted:
        yield from table.text(("E2E goes into, ms", "whole", "TTFT", "decode", "stalls", "requests"), rows["e2e"])
    if splits.accounted and splits.why:
        yield from wrapped(splits.why)


def slow_lines(slowest: Sequence[SlowRequest]) -> Iterator[str]:
    """The slowest requests by TTFT, one line each."""
    slowest = [request for request in slowest if request.by == "ttft"]
    if not slowest or all(request.prefill_ms is None for request in slowest):
        return
    head = (
        "Slowest by TTFT",
        "at",
        "TTFT",
        "queue",
        "prefill",
        "E2E",
        "largest gap",
        "prompt",
        "cached",
        "in flight",
        "tokens waiting",
    )
    rows = []
    for request in slowest:
        cached = (
            None
            if not request.input_tokens or request.cached_tokens is None
            else request.cached_tokens / request.input_tokens
        )
        target = f" {request.target}" if request.target else ""
        rows.append(
            (
                f"{request.id or request.slot}{target}",
                format.duration(request.due_s),
                *(
                    format.milliseconds(value)
                    for value in (
                        request.ttft_ms,
                        request.queue_ms,
                        request.prefill_ms,
                        request.e2e_ms,
                        request.max_gap_ms,
                    )
                ),
                format.count(request.input_tokens),
                format.percent(cached),
                format.count(request.in_flight),
                format.count(request.waiting_input_tokens),
            )
        )
    yield from table.text(head, rows)
