"""Latencies and throughput by blocks of time, and their change from the first third of a run to the last third.

Pure. A block lasts a power of two in seconds: the shortest that needs at most BLOCKS blocks for the
run.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from loadgen.core.metrics import windows
from loadgen.core.metrics.columns import OK, Columns, defined, or_all
from loadgen.core.metrics.windows import Span
from loadgen.core.stats.quantiles import Values, milliseconds

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

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
    output_per_s: float | None = (
        None  # null for a block that is not wholly inside the steady window
    )


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


def without_statistics(drift: Drift, metric: str, statistics: Collection[str]) -> Drift:
    """Return the drift without the quantiles of a metric that are withheld."""
    names = [
        f"{metric}_p{p * 100:g}"
        for part, p in PARTS
        if part == metric and f"p{p * 100:g}" in statistics
    ]
    blocks = tuple(
        msgspec.structs.replace(block, **dict.fromkeys(f"{name}_ms" for name in names))
        for block in drift.blocks
    )
    return msgspec.structs.replace(drift, blocks=blocks, **dict.fromkeys(names))


def without_tokens(drift: Drift) -> Drift:
    """The drift without its rates of tokens, where those are withheld."""
    blocks = tuple(msgspec.structs.replace(block, output_per_s=None) for block in drift.blocks)
    return msgspec.structs.replace(drift, output_per_s=None, blocks=blocks)


class BlockSamples:
    """Measured ok requests due in one block of time: their number, and a sample of each SHOWN metric."""

    __slots__ = ("requests", "values")

    def __init__(self) -> None:
        self.requests = 0
        self.values = {metric: Values() for metric in SHOWN}


class TimeBlocks(NamedTuple):
    """The samples of the blocks of a run in order of time. The first block begins at the start of the run."""

    samples: list[BlockSamples]
    block_ns: int


def sample_blocks(measured: Sequence[Columns]) -> TimeBlocks:
    """Return the latencies of the measured ok requests by blocks of time. `measured`: the records of each stage."""
    ok_due = [columns["due_ns"][or_all(columns.where(OK))] for columns in measured]
    latest_ns = max((int(due.max(initial=0)) for due in ok_due), default=0)
    block_ns = FIRST_NS
    while latest_ns >= block_ns * BLOCKS:
        block_ns *= 2
    samples: list[BlockSamples] = []
    for columns, due in zip(measured, ok_due, strict=True):
        block_of_request = np.floor_divide(
            due, block_ns, out=np.empty(len(due), np.int8), casting="unsafe"
        )
        _add_to_blocks(samples, columns, block_of_request)
    return TimeBlocks(samples, block_ns)


def _add_to_blocks(
    samples: list[BlockSamples], columns: Columns, block_of_request: NDArray[np.int8]
) -> None:
    """Add the ok requests of a stage to the samples. `block_of_request`: the block of each of these requests."""
    if not len(block_of_request):
        return
    while len(samples) <= int(block_of_request.max()):
        samples.append(BlockSamples())
    sizes = np.bincount(block_of_request, minlength=len(samples))
    order = np.argsort(block_of_request, kind="stable").astype(np.int32)
    if len(order) < len(columns):
        order = np.flatnonzero(columns.where(OK)).astype(np.int32)[order]
    for block, size in zip(samples, sizes.tolist(), strict=True):
        block.requests += size
    for metric in SHOWN:
        parts = np.split(columns.measure(metric)[order], np.cumsum(sizes)[:-1])
        for block, values in zip(samples, parts, strict=True):
            block.values[metric].add(defined(values))


def of_blocks(
    time_blocks: TimeBlocks, steady: Span, tokens_in: Callable[[Span], float | None]
) -> Drift:
    """Return the drift of a run.

    `tokens_in` returns the output tokens that came in an interval, or None if they were not
    counted.
    """
    if not time_blocks.samples:
        return Drift()
    length_ns = time_blocks.block_ns
    blocks: list[Block] = []
    whole_blocks: list[Block] = []
    for i, samples in enumerate(time_blocks.samples):
        span = windows.span(i * length_ns, (i + 1) * length_ns)
        assert span.start_s is not None and span.end_s is not None
        inside = (
            steady.start_s is not None
            and steady.end_s is not None
            and steady.start_s <= span.start_s
            and span.end_s <= steady.end_s
        )
        if not samples.requests and not whole_blocks:
            continue
        tokens = tokens_in(span) if inside else None
        block = Block(
            start_s=span.start_s,
            end_s=span.end_s,
            requests=samples.requests,
            output_per_s=None if tokens is None else tokens / (length_ns / 1e9),
            **{
                f"{metric}_p{p * 100:g}_ms": milliseconds(samples.values[metric].quantile(p))
                for metric, p in PARTS
                if samples.values[metric].count
            },
        )
        blocks.append(block)
        if inside:
            whole_blocks.append(block)
    changes = {}
    if len(whole_blocks) >= FEWEST:
        third = len(whole_blocks) // 3
        for name in (
            "ttft_p50_ms",
            "ttft_p99_ms",
            "tpot_p50_ms",
            "tpot_p99_ms",
            "e2e_p99_ms",
            "output_per_s",
        ):
            changes[name.removesuffix("_ms")] = _change(
                [getattr(block, name) for block in whole_blocks[:third]],
                [getattr(block, name) for block in whole_blocks[-third:]],
            )
    return Drift(block_s=length_ns / 1e9, blocks=tuple(blocks), **changes)


def _change(first: Sequence[float | None], last: Sequence[float | None]) -> float | None:
    before, after = ([value for value in values if value is not None] for values in (first, last))
    if not before or not after or statistics.median(before) <= 0:
        return None
    return statistics.median(after) / statistics.median(before) - 1
