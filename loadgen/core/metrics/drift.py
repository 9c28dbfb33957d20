"""Latencies and throughput by blocks of time, and their change over the steady state.

Pure. A block lasts a power of two in seconds: the shortest that needs at most MAX_BLOCKS blocks for
the run.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from loadgen.core.metrics import windows
from loadgen.core.metrics.columns import OK, as_selection, drop_undefined
from loadgen.core.stats.quantiles import Values, milliseconds

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from numpy.typing import NDArray

    from loadgen.core.metrics.columns import Columns
    from loadgen.core.metrics.windows import Span

MAX_BLOCKS = 32
SHORTEST_BLOCK_NS = 1_000_000_000

MIN_BLOCKS = 6
"""So many whole blocks are needed to compute a change."""

LATENCIES = ("ttft", "tpot", "e2e")


class BlockQuantile(NamedTuple):
    """A quantile of a latency that is computed for each block."""

    metric: str
    quantile: float

    @property
    def field(self) -> str:
        """The field of `Drift`, for example `ttft_p50`."""
        return f"{self.metric}_p{self.quantile * 100:g}"


QUANTILES = (
    BlockQuantile("ttft", 0.5),
    BlockQuantile("ttft", 0.99),
    BlockQuantile("tpot", 0.5),
    BlockQuantile("tpot", 0.99),
    BlockQuantile("e2e", 0.99),
)


class Block(msgspec.Struct, frozen=True, kw_only=True):
    """One block of time: quantiles of the measured ok requests due in it, and its output tokens.

    `output_per_s` is None for a block that is not wholly inside the steady window.
    """

    start_s: float
    end_s: float
    requests: int
    ttft_p50_ms: float | None = None
    ttft_p99_ms: float | None = None
    tpot_p50_ms: float | None = None
    tpot_p99_ms: float | None = None
    e2e_p99_ms: float | None = None
    output_per_s: float | None = None


class Drift(msgspec.Struct, frozen=True, kw_only=True):
    """The relative change from the first third of the whole blocks to the last third.

    It is the median over the last third, divided by that over the first third, less 1. Whole blocks
    lie wholly inside the steady window. A change is None with fewer than MIN_BLOCKS of them.
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
    fields = [
        quantile.field
        for quantile in QUANTILES
        if quantile.metric == metric and f"p{quantile.quantile * 100:g}" in statistics
    ]
    block_fields = dict.fromkeys(f"{field}_ms" for field in fields)
    blocks = tuple(msgspec.structs.replace(block, **block_fields) for block in drift.blocks)
    return msgspec.structs.replace(drift, blocks=blocks, **dict.fromkeys(fields))


def without_tokens(drift: Drift) -> Drift:
    """Return the drift without its rates of tokens, which are withheld."""
    blocks = tuple(msgspec.structs.replace(block, output_per_s=None) for block in drift.blocks)
    return msgspec.structs.replace(drift, output_per_s=None, blocks=blocks)


class BlockSamples:
    """The number and the latencies of the measured ok requests due in one block of time."""

    def __init__(self) -> None:
        self.requests = 0
        self.values = {metric: Values() for metric in LATENCIES}


class TimeBlocks(NamedTuple):
    """The samples of the blocks of a run in order of time. The first block begins with the run."""

    samples: list[BlockSamples]
    block_ns: int


def sample_blocks(measured: Sequence[Columns]) -> TimeBlocks:
    """Return the latencies of the measured ok requests by blocks of time.

    The blocks are SHORTEST_BLOCK_NS long, doubled until no more than MAX_BLOCKS are needed.
    """
    ok_due = [columns["due_ns"][as_selection(columns.where(OK))] for columns in measured]
    latest_ns = max((int(due_ns.max(initial=0)) for due_ns in ok_due), default=0)
    block_ns = SHORTEST_BLOCK_NS
    while latest_ns >= block_ns * MAX_BLOCKS:
        block_ns *= 2
    samples: list[BlockSamples] = []
    for columns, due_ns in zip(measured, ok_due, strict=True):
        # int8 holds all numbers of blocks, and takes an eighth of the memory of int64.
        block_of_request = np.floor_divide(
            due_ns, block_ns, out=np.empty(len(due_ns), np.int8), casting="unsafe"
        )
        _add_to_blocks(samples, columns, block_of_request)
    return TimeBlocks(samples, block_ns)


def _add_to_blocks(
    samples: list[BlockSamples], columns: Columns, block_of_request: NDArray[np.int8]
) -> None:
    """Add the ok requests of a stage to the samples of the blocks that they are due in.

    The requests are ordered by block once, so that each metric is only split at the ends of blocks.
    `block_of_request` has the ok requests alone, and `order` indexes all requests of the stage.
    """
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
    ends = np.cumsum(sizes)
    for metric in LATENCIES:
        values_of_blocks = np.split(columns.measure(metric)[order], ends[:-1])
        for block, values in zip(samples, values_of_blocks, strict=True):
            block.values[metric].add(drop_undefined(values))


def measure_drift(
    time_blocks: TimeBlocks, steady: Span, tokens_in: Callable[[Span], float | None]
) -> Drift:
    """Return the drift of a run.

    `tokens_in` returns the output tokens that came in an interval, or None if they were not
    counted.
    """
    if not time_blocks.samples:
        return Drift()
    blocks: list[Block] = []
    whole_blocks: list[Block] = []
    for i, samples in enumerate(time_blocks.samples):
        block_span = windows.span(i * time_blocks.block_ns, (i + 1) * time_blocks.block_ns)
        is_whole = _is_inside(block_span, steady)
        if not samples.requests and not whole_blocks:
            continue  # blocks before the load began have nothing to show
        tokens = tokens_in(block_span) if is_whole else None
        block = _summarize_block(samples, block_span, tokens)
        blocks.append(block)
        if is_whole:
            whole_blocks.append(block)
    changes = _changes(whole_blocks) if len(whole_blocks) >= MIN_BLOCKS else {}
    return Drift(block_s=time_blocks.block_ns / 1e9, blocks=tuple(blocks), **changes)


def _is_inside(inner: Span, outer: Span) -> bool:
    """Return True if an interval lies wholly in another one."""
    if inner.start_s is None or inner.end_s is None:
        return False
    if outer.start_s is None or outer.end_s is None:
        return False
    return outer.start_s <= inner.start_s and inner.end_s <= outer.end_s


def _summarize_block(samples: BlockSamples, span: Span, tokens: float | None) -> Block:
    """Return the quantiles of a block and its token rate, if its tokens are known."""
    quantiles: dict[str, Any] = {
        f"{statistic.field}_ms": milliseconds(
            samples.values[statistic.metric].quantile(statistic.quantile)
        )
        for statistic in QUANTILES
        if samples.values[statistic.metric].count
    }
    return Block(
        start_s=span.start_s or 0.0,
        end_s=span.end_s or 0.0,
        requests=samples.requests,
        output_per_s=windows.per_second(tokens, span),
        **quantiles,
    )


def _changes(whole_blocks: Sequence[Block]) -> dict[str, float | None]:
    """Return the relative change of each series from the first to the last third of the blocks."""
    third = len(whole_blocks) // 3

    def change(field: str) -> float | None:
        first = [getattr(block, field) for block in whole_blocks[:third]]
        last = [getattr(block, field) for block in whole_blocks[-third:]]
        return _relative_change(first, last)

    changes = {statistic.field: change(f"{statistic.field}_ms") for statistic in QUANTILES}
    return {**changes, "output_per_s": change("output_per_s")}


def _relative_change(first: Sequence[float | None], last: Sequence[float | None]) -> float | None:
    """Return by how much the median rose, as a share, or None if that is not known."""
    known_first = [value for value in first if value is not None]
    known_last = [value for value in last if value is not None]
    if not known_first or not known_last or statistics.median(known_first) <= 0:
        return None
    return statistics.median(known_last) / statistics.median(known_first) - 1
