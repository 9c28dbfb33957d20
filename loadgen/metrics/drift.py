"""Latencies and throughput by blocks of time, and their change from the first third of a run to the last third.

Pure. A block lasts a power of two in seconds: the shortest that needs at most BLOCKS blocks for the run. So an
accumulator that only joins neighbouring blocks reaches the same blocks as one computation over all rows.
"""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from loadgen.metrics import columns
from loadgen.metrics.columns import OK, Columns, Span
from loadgen.stats.quantiles import index, milliseconds

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

BLOCKS = 32
FIRST_NS = 1_000_000_000
SHOWN = ("ttft", "tpot", "e2e")
PARTS = (("ttft", 0.5), ("ttft", 0.99), ("tpot", 0.5), ("tpot", 0.99), ("e2e", 0.99))
FEWEST = 6  # whole blocks needed to compute a change


class Block(msgspec.Struct, frozen=True, kw_only=True):
    """One block of the run: quantiles of the measured ok requests due in it, and the output tokens that came in it."""

    start_s: float
    end_s: float
    requests: int
    ttft_p50_ms: float | None = None
    ttft_p99_ms: float | None = None
    tpot_p50_ms: float | None = None
    tpot_p99_ms: float | None = None
    e2e_p99_ms: float | None = None
    output_per_s: float | None = None  # null for a block that is not wholly inside the steady window


class Drift(msgspec.Struct, frozen=True, kw_only=True):
    """Relative change over time: median over the last third of the whole blocks / median over the first third - 1.

    Null with fewer than six blocks that lie wholly inside the steady window.
    """

    block_s: float | None = None
    ttft_p50: float | None = None
    ttft_p99: float | None = None
    tpot_p50: float | None = None
    tpot_p99: float | None = None
    e2e_p99: float | None = None
    output_per_s: float | None = None
    blocks: tuple[Block, ...] = ()


def without_tpot(drift: Drift) -> Drift:
    """The drift without its TPOT figures, where those are withheld."""
    blocks = tuple(msgspec.structs.replace(block, tpot_p50_ms=None, tpot_p99_ms=None) for block in drift.blocks)
    return msgspec.structs.replace(drift, tpot_p50=None, tpot_p99=None, blocks=blocks)


def block_ns(last_ns: int) -> int:
    """The length of the blocks, in ns, of a run whose last due instant is `last_ns`."""
    return FIRST_NS << max(0, math.ceil(math.log2((last_ns + 1) / (FIRST_NS * BLOCKS))))


def of_rows(measured: Columns, steady: Span, tokens_in: Callable[[Span], float | None]) -> Drift:
    """The drift of rows. `tokens_in`: output tokens that came in an interval; None where they were not counted."""
    ok = measured.where(OK)
    due = measured["due_ns"][ok]
    if len(due) == 0:
        return Drift()
    length = block_ns(int(due.max()))
    places = (due // length).astype(np.int16)
    order = np.argsort(places, kind="stable")
    ends = np.cumsum(np.bincount(places))
    starts = [0, *ends[:-1].tolist()]
    figures_by_block: list[tuple[int, dict[tuple[str, float], float]]] = [
        (int(count), {}) for count in np.bincount(places)
    ]
    for metric in SHOWN:
        column = measured.measure(metric)[ok][order]
        for (_, quantiles), start, end in zip(figures_by_block, starts, ends.tolist(), strict=True):
            values = columns.defined(column[start:end])
            if len(values):
                quantiles |= {part: _at(values, part[1]) for part in PARTS if part[0] == metric}
    return made(length, figures_by_block, steady, tokens_in)


def _at(values: NDArray[np.int64], p: float) -> float:
    place = index(len(values), p)
    return float(np.partition(values, place)[place])


def made(
    length_ns: int,
    found: Sequence[tuple[int, Mapping[tuple[str, float], float]]],
    steady: Span,
    tokens_in: Callable[[Span], float | None],
) -> Drift:
    """The drift from the figures of each block.

    `length_ns`: length of a block; the first one begins at the start of the run. `found`: per block, the number of
    requests and the quantiles in ns, by metric and probability. `tokens_in`: as in `of_rows`.
    """
    blocks: list[Block] = []
    whole_blocks: list[Block] = []
    for i, (requests, quantiles) in enumerate(found):
        span = columns.span(i * length_ns, (i + 1) * length_ns)
        assert span.start_s is not None and span.end_s is not None
        inside = (
            steady.start_s is not None
            and steady.end_s is not None
            and steady.start_s <= span.start_s
            and span.end_s <= steady.end_s
        )
        if not requests and not whole_blocks:
            continue
        tokens = tokens_in(span) if inside else None
        block = Block(
            start_s=span.start_s,
            end_s=span.end_s,
            requests=requests,
            output_per_s=None if tokens is None else tokens / (length_ns / 1e9),
            **{_field(part): milliseconds(value) for part, value in quantiles.items()},
        )
        blocks.append(block)
        if inside:
            whole_blocks.append(block)
    changes = {}
    if len(whole_blocks) >= FEWEST:
        third = len(whole_blocks) // 3
        for name in ("ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "tpot_p99_ms", "e2e_p99_ms", "output_per_s"):
            changes[name.removesuffix("_ms")] = _change(
                [getattr(block, name) for block in whole_blocks[:third]],
                [getattr(block, name) for block in whole_blocks[-third:]],
            )
    return Drift(block_s=length_ns / 1e9, blocks=tuple(blocks), **changes)


def _field(part: tuple[str, float]) -> str:
    return f"{part[0]}_p{part[1] * 100:g}_ms"


def _change(first: Sequence[float | None], last: Sequence[float | None]) -> float | None:
    before, after = ([value for value in values if value is not None] for values in (first, last))
    if not before or not after or statistics.median(before) <= 0:
        return None
    return statistics.median(after) / statistics.median(before) - 1
