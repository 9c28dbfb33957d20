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
    def statistic(self) -> str:
        """The name of the quantile, for example `p50`."""
        return f"p{self.quantile * 100:g}"

    @property
    def field(self) -> str:
        """The field of `Drift`, for example `ttft_p50`."""
        return f"{self.metric}_{self.statistic}"


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


def without_statistics(drift: Drift, metric: str, withheld: Collection[str]) -> Drift:
    """Return the drift without the quantiles of a metric that the run withholds.

    Args:
        drift: The drift.
        metric: The metric, such as "ttft".
        withheld: The names of the withheld statistics of the metric, such as "p99".
    """
    fields = [
        quantile.field
        for quantile in QUANTILES
        if quantile.metric == metric and quantile.statistic in withheld
    ]
    no_values = dict.fromkeys(fields)
    no_block_values = dict.fromkeys(f"{field}_ms" for field in fields)
    blocks = tuple(msgspec.structs.replace(block, **no_block_values) for block in drift.blocks)
    return msgspec.structs.replace(drift, blocks=blocks, **no_values)


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
    """Return the latencies of the measured ok requests, divided into blocks of time by due time.

    The blocks are SHORTEST_BLOCK_NS long, doubled until no more than MAX_BLOCKS are needed.
    """
    due_ns_of_stages = [columns["due_ns"][as_selection(columns.where(OK))] for columns in measured]
    latest_ns = max((int(due_ns.max(initial=0)) for due_ns in due_ns_of_stages), default=0)
    block_ns = SHORTEST_BLOCK_NS
    while latest_ns >= block_ns * MAX_BLOCKS:
        block_ns *= 2
    samples: list[BlockSamples] = []
    for columns, due_ns in zip(measured, due_ns_of_stages, strict=True):
        # int8 holds all numbers of blocks, and takes an eighth of the memory of int64.
        block_of_request = np.floor_divide(
            due_ns, block_ns, out=np.empty(len(due_ns), np.int8), casting="unsafe"
        )
        _add_to_blocks(samples, columns, block_of_request)
    return TimeBlocks(samples, block_ns)


def _add_to_blocks(
    samples: list[BlockSamples], columns: Columns, block_of_request: NDArray[np.int8]
) -> None:
    """Add the ok requests of a stage to the blocks that they are due in, with their latencies.

    The requests are ordered by block once, so that the values of each metric only have to be split
    at the ends of blocks.

    Args:
        samples: The samples of each block, to which missing blocks are appended.
        columns: The records of the stage.
        block_of_request: The number of the block of each ok request.
    """
    if not len(block_of_request):
        return
    while len(samples) <= int(block_of_request.max()):
        samples.append(BlockSamples())
    counts = np.bincount(block_of_request, minlength=len(samples))
    for block, count in zip(samples, counts.tolist(), strict=True):
        block.requests += count
    order = np.argsort(block_of_request, kind="stable").astype(np.int32)
    if len(order) < len(columns):
        # `order` indexes the ok requests so far; make it index all requests of the stage.
        ok_rows = np.flatnonzero(columns.where(OK)).astype(np.int32)
        order = ok_rows[order]
    block_ends = np.cumsum(counts)[:-1]
    for metric in LATENCIES:
        values_of_blocks = np.split(columns.measure(metric)[order], block_ends)
        for block, values in zip(samples, values_of_blocks, strict=True):
            block.values[metric].add(drop_undefined(values))


def measure_drift(
    time_blocks: TimeBlocks, steady: Span, tokens_in: Callable[[Span], float | None]
) -> Drift:
    """Return how latencies and throughput change over the steady state.

    The changes are between blocks that lie in the steady state as a whole. All other blocks are
    listed too, without a token rate, except for those before the load began.

    Args:
        time_blocks: The latencies by block of time.
        steady: The steady state.
        tokens_in: Returns the output tokens that came in an interval, or None if they were not
            counted.
    """
    if not time_blocks.samples:
        return Drift()
    blocks: list[Block] = []
    steady_blocks: list[Block] = []
    block_ns = time_blocks.block_ns
    for number, samples in enumerate(time_blocks.samples):
        if not samples.requests and not steady_blocks:
            continue  # before the load began
        span = windows.span(number * block_ns, (number + 1) * block_ns)
        is_steady = _is_inside(span, steady)
        block = _summarize_block(samples, span, tokens_in(span) if is_steady else None)
        blocks.append(block)
        if is_steady:
            steady_blocks.append(block)
    changes = _measure_changes(steady_blocks) if len(steady_blocks) >= MIN_BLOCKS else {}
    return Drift(block_s=block_ns / 1e9, blocks=tuple(blocks), **changes)


def _is_inside(inner: Span, outer: Span) -> bool:
    """Return True if an interval lies wholly in another one."""
    if inner.start_s is None or inner.end_s is None:
        return False
    if outer.start_s is None or outer.end_s is None:
        return False
    return outer.start_s <= inner.start_s and inner.end_s <= outer.end_s


def _summarize_block(samples: BlockSamples, span: Span, tokens: float | None) -> Block:
    """Return the quantiles of a block and its token rate, None if its tokens are not known."""
    quantiles_ms: dict[str, Any] = {}
    for quantile in QUANTILES:
        values = samples.values[quantile.metric]
        if values.count:
            value_ns = values.quantile(quantile.quantile)
            quantiles_ms[f"{quantile.field}_ms"] = milliseconds(value_ns)
    return Block(
        start_s=span.start_s or 0.0,
        end_s=span.end_s or 0.0,
        requests=samples.requests,
        output_per_s=windows.per_second(tokens, span),
        **quantiles_ms,
    )


def _measure_changes(steady_blocks: Sequence[Block]) -> dict[str, float | None]:
    """Return the relative change of each series from the first to the last third of the blocks.

    The result has the fields of `Drift`.
    """
    third = len(steady_blocks) // 3

    def measure_change(block_field: str) -> float | None:
        first = [getattr(block, block_field) for block in steady_blocks[:third]]
        last = [getattr(block, block_field) for block in steady_blocks[-third:]]
        return _relative_change(first, last)

    changes = {quantile.field: measure_change(f"{quantile.field}_ms") for quantile in QUANTILES}
    return {**changes, "output_per_s": measure_change("output_per_s")}


def _relative_change(first: Sequence[float | None], last: Sequence[float | None]) -> float | None:
    """Return by how much the median rose, as a share, or None if that is not known."""
    known_first = [value for value in first if value is not None]
    known_last = [value for value in last if value is not None]
    if not known_first or not known_last or statistics.median(known_first) <= 0:
        return None
    return statistics.median(known_last) / statistics.median(known_first) - 1
