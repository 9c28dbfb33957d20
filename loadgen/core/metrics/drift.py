"""Latencies and throughput by blocks of time, and their change over the steady state.

Pure. A block lasts a power of two in seconds: the shortest that needs at most MAX_BLOCKS blocks for
the run.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from loadgen.core.metrics import windows
from loadgen.core.metrics.columns import as_selection, drop_undefined
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
    """A quantile of a latency that is computed for each block of time."""

    metric: str
    probability: float

    @property
    def statistic(self) -> str:
        """The name of the quantile, for example `p50`."""
        return f"p{self.probability * 100:g}"

    @property
    def field(self) -> str:
        """The field of `Drift` with its change over the steady state, for example `ttft_p50`."""
        return f"{self.metric}_{self.statistic}"

    @property
    def block_field(self) -> str:
        """The field of `Block` with its value, for example `ttft_p50_ms`."""
        return f"{self.field}_ms"


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
    """Return the drift without some quantiles of a metric, in its blocks and in its changes.

    Args:
        drift: The drift.
        metric: The metric, such as "ttft".
        withheld: The names of the quantiles to remove, such as "p99".
    """
    withheld_quantiles = [
        quantile
        for quantile in QUANTILES
        if quantile.metric == metric and quantile.statistic in withheld
    ]

    # In a block, a quantile is in a field such as `ttft_p99_ms`.
    removed_from_blocks = {quantile.block_field: None for quantile in withheld_quantiles}
    blocks = tuple(msgspec.structs.replace(block, **removed_from_blocks) for block in drift.blocks)

    # In the drift, the change of the quantile is in a field such as `ttft_p99`.
    removed_changes = {quantile.field: None for quantile in withheld_quantiles}
    return msgspec.structs.replace(drift, blocks=blocks, **removed_changes)


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


def sample_blocks(measured_stages: Sequence[Columns]) -> TimeBlocks:
    """Return the latencies of the measured ok requests, by the block of time in which each is due.

    The time of the run is divided into blocks of equal length. The first block begins with the run,
    and the last block contains the latest due time.
    """
    due_ns_of_stages = [_ok_due_ns(columns) for columns in measured_stages]
    latest_of_stages_ns = [int(due_ns.max()) for due_ns in due_ns_of_stages if len(due_ns)]
    if not latest_of_stages_ns:
        return TimeBlocks([], SHORTEST_BLOCK_NS)

    # Divide the time from the start of the run to the latest due time.
    latest_due_ns = max(latest_of_stages_ns)
    block_ns = _choose_block_ns(latest_due_ns)
    block_count = latest_due_ns // block_ns + 1

    # Add the requests of each stage to the samples of the blocks.
    samples = [BlockSamples() for _ in range(block_count)]
    for columns, due_ns in zip(measured_stages, due_ns_of_stages, strict=True):
        block_of_request = _number_blocks(due_ns, block_ns)
        _add_to_blocks(samples, columns, block_of_request)

    return TimeBlocks(samples, block_ns)


def _ok_due_ns(columns: Columns) -> NDArray[np.int64]:
    """Return the due times of the ok requests of a stage."""
    is_ok = columns.is_ok
    due_ns: NDArray[np.int64] = columns["due_ns"][as_selection(is_ok)]
    return due_ns


def _choose_block_ns(latest_ns: int) -> int:
    """Return the length of a block: SHORTEST_BLOCK_NS, doubled until MAX_BLOCKS are enough.

    Args:
        latest_ns: The latest due time, which has to lie in one of the blocks.
    """
    block_ns = SHORTEST_BLOCK_NS
    while latest_ns >= block_ns * MAX_BLOCKS:
        block_ns *= 2
    return block_ns


def _number_blocks(due_ns: NDArray[np.int64], block_ns: int) -> NDArray[np.int8]:
    """Return the number of the block in which each request is due, from 0."""
    # The quotients are below MAX_BLOCKS, so they fit in int8, an eighth of the memory of int64.
    block_of_request = np.empty(len(due_ns), np.int8)
    np.floor_divide(due_ns, block_ns, out=block_of_request, casting="unsafe")
    return block_of_request


def _add_to_blocks(
    samples: list[BlockSamples], columns: Columns, block_of_request: NDArray[np.int8]
) -> None:
    """Add the number and the latencies of ok requests to the block of time of each request.

    Args:
        samples: The samples of each block of time.
        columns: The records of a stage.
        block_of_request: For each ok request, the number of the block in which it was due.
    """
    if not len(block_of_request):
        return

    request_counts = np.bincount(block_of_request, minlength=len(samples))
    for block, request_count in zip(samples, request_counts.tolist(), strict=True):
        block.requests += request_count

    # Sort the requests by block, so that one array of latencies can be split into blocks.
    rows_by_block = _order_ok_rows(columns, block_of_request)
    block_ends = np.cumsum(request_counts)
    block_borders = block_ends[:-1]  # no split after the last block
    for metric in LATENCIES:
        latencies_ns = columns.measure(metric)[rows_by_block]
        latencies_of_blocks = np.split(latencies_ns, block_borders)
        _add_latencies(samples, metric, latencies_of_blocks)


def _add_latencies(
    samples: list[BlockSamples], metric: str, latencies_of_blocks: list[NDArray[np.int64]]
) -> None:
    """Add the values of a latency to each block, without those of requests that lack it."""
    for block, latencies_ns in zip(samples, latencies_of_blocks, strict=True):
        block.values[metric].add(drop_undefined(latencies_ns))


def _order_ok_rows(columns: Columns, block_of_request: NDArray[np.int8]) -> NDArray[np.int32]:
    """Return the row numbers of the ok requests of a stage, in order of their blocks.

    Args:
        columns: The records of the stage.
        block_of_request: The number of the block of each ok request.
    """
    order = np.argsort(block_of_request, kind="stable").astype(np.int32)
    are_all_ok = len(block_of_request) == len(columns)
    if are_all_ok:
        return order

    ok_rows = np.flatnonzero(columns.is_ok).astype(np.int32)
    return ok_rows[order]


class _TimedBlock(NamedTuple):
    """A block of time that the drift lists, and whether it lies wholly in the steady state."""

    samples: BlockSamples
    span: Span
    is_steady: bool


def measure_drift(
    time_blocks: TimeBlocks, steady: Span, tokens_in: Callable[[Span], float | None]
) -> Drift:
    """Return how latencies and throughput change over the steady state.

    Args:
        time_blocks: The latencies by block of time.
        steady: The time of the steady state.
        tokens_in: Returns the output tokens that came in an interval, or None if not counted.
    """
    if not time_blocks.samples:
        return Drift()

    all_blocks: list[Block] = []
    steady_blocks: list[Block] = []
    for timed_block in _list_blocks(time_blocks, steady):
        block = _summarize_block(timed_block.samples, timed_block.span)
        if timed_block.is_steady:
            block = _with_token_rate(block, timed_block.span, tokens_in)
            steady_blocks.append(block)
        all_blocks.append(block)

    # With too few blocks, the drift has no changes.
    has_enough_blocks = len(steady_blocks) >= MIN_BLOCKS
    change_by_field = _measure_changes(steady_blocks) if has_enough_blocks else {}
    return Drift(
        block_s=time_blocks.block_ns / 1e9,
        blocks=tuple(all_blocks),
        **change_by_field,
    )


def _with_token_rate(block: Block, span: Span, tokens_in: Callable[[Span], float | None]) -> Block:
    """Return a block with its output tokens per second, None if they were not counted."""
    output_per_s = windows.per_second(tokens_in(span), span)
    return msgspec.structs.replace(block, output_per_s=output_per_s)


def _list_blocks(time_blocks: TimeBlocks, steady: Span) -> list[_TimedBlock]:
    """Return the blocks of time to report, with whether each is in the steady state.

    A block without requests is left out, unless a block with requests in the steady state is before
    it.

    Args:
        time_blocks: The latencies by block of time.
        steady: The time of the steady state, which is without the start and the end of the load.
    """
    timed_blocks: list[_TimedBlock] = []
    has_steady_state_begun = False
    for number, samples in enumerate(time_blocks.samples):
        start_ns = number * time_blocks.block_ns
        end_ns = start_ns + time_blocks.block_ns
        span = windows.make_span(start_ns, end_ns)

        if samples.requests or has_steady_state_begun:
            is_steady = _is_inside(span, steady)
            timed_blocks.append(_TimedBlock(samples, span, is_steady))
            has_steady_state_begun = has_steady_state_begun or is_steady

    return timed_blocks


def _is_inside(inner: Span, outer: Span) -> bool:
    """Return True if an interval lies wholly in another one."""
    if inner.start_s is None or inner.end_s is None:
        return False
    if outer.start_s is None or outer.end_s is None:
        return False
    return outer.start_s <= inner.start_s and inner.end_s <= outer.end_s


def _summarize_block(samples: BlockSamples, span: Span) -> Block:
    """Return a block of time with the quantiles of its latencies, without a token rate.

    Args:
        samples: The latencies of the requests that are due in the block.
        span: The time of the block.
    """
    block = Block(
        start_s=span.start_s or 0.0,
        end_s=span.end_s or 0.0,
        requests=samples.requests,
    )

    # The quantiles by the name of their field in the block, such as "ttft_p99_ms".
    quantile_ms_by_field = {}
    for quantile in QUANTILES:
        latencies_ns = samples.values[quantile.metric]
        if latencies_ns.count > 0:
            quantile_ns = latencies_ns.quantile(quantile.probability)
            quantile_ms_by_field[quantile.block_field] = milliseconds(quantile_ns)

    return msgspec.structs.replace(block, **quantile_ms_by_field)


def _measure_changes(steady_blocks: Sequence[Block]) -> dict[str, float | None]:
    """Return the relative change of the output rate and of each latency over the steady state.

    The result has the names of fields of `Drift`, such as "output_per_s" and "ttft_p99".

    Args:
        steady_blocks: The blocks of time in the steady state.
    """
    output_rates = [block.output_per_s for block in steady_blocks]
    change_by_field = {"output_per_s": _relative_change(output_rates)}

    for quantile in QUANTILES:
        latencies_ms = [getattr(block, quantile.block_field) for block in steady_blocks]
        change_by_field[quantile.field] = _relative_change(latencies_ms)

    return change_by_field


def _relative_change(values: Sequence[float | None]) -> float | None:
    """Return the relative change of the median from the first third of the values to the last.

    It is 0.1 if the median rose by 10 %.

    Args:
        values: The values of successive blocks of time, None for a block without a value.
    """
    third = len(values) // 3
    first_values = [value for value in values[:third] if value is not None]
    last_values = [value for value in values[-third:] if value is not None]
    if not first_values or not last_values:
        return None

    first_median = statistics.median(first_values)
    last_median = statistics.median(last_values)
    return last_median / first_median - 1 if first_median > 0 else None
