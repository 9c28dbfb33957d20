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
    """Return the change over time without some quantiles of a metric, also in its blocks.

    Args:
        drift: The change over time of several metrics.
        metric: The metric, such as "ttft".
        withheld: The names of the quantiles to remove, such as "p99".
    """
    withheld_quantiles = [
        quantile
        for quantile in QUANTILES
        if quantile.metric == metric and quantile.statistic in withheld
    ]

    # The p99 of TTFT is in the field `ttft_p99_ms` of each block.
    removed_values = {quantile.block_field: None for quantile in withheld_quantiles}
    blocks = tuple(msgspec.structs.replace(block, **removed_values) for block in drift.blocks)

    # Its change over time is in the field `ttft_p99`.
    removed_changes = {quantile.field: None for quantile in withheld_quantiles}
    return msgspec.structs.replace(drift, blocks=blocks, **removed_changes)


def without_tokens(drift: Drift) -> Drift:
    """Return the change over time without rates of output tokens, also in its blocks."""
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
        if len(due_ns):
            block_of_ok_request = _number_blocks(due_ns, block_ns)
            _add_to_blocks(samples, columns, block_of_ok_request)

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
    samples: list[BlockSamples], columns: Columns, block_of_ok_request: NDArray[np.int8]
) -> None:
    """Add the number and the latencies of ok requests to the block of time of each request.

    Args:
        samples: The samples of each block of time.
        columns: The records of a stage, with at least one ok request.
        block_of_ok_request: The number of the block in which each ok request was due.
    """
    request_counts = np.bincount(block_of_ok_request, minlength=len(samples))
    for block, request_count in zip(samples, request_counts.tolist(), strict=True):
        block.requests += request_count

    # The rows of the ok requests in the order of their blocks, in int32 to save memory.
    ok_rows = np.flatnonzero(columns.is_ok).astype(np.int32)
    rows_by_block = ok_rows[np.argsort(block_of_ok_request, kind="stable")]

    # With 3 requests in block 0 and 2 in block 1, the latencies are split at the index 3.
    ends_of_blocks = np.cumsum(request_counts)
    for metric in LATENCIES:
        latencies_ns = columns.measure(metric)[rows_by_block]
        latencies_of_blocks = np.split(latencies_ns, ends_of_blocks[:-1])
        _add_latencies(samples, metric, latencies_of_blocks)


def _add_latencies(
    samples: list[BlockSamples], metric: str, latencies_of_blocks: list[NDArray[np.int64]]
) -> None:
    """Add the values of a latency to each block, without those of requests that lack it."""
    for block, latencies_ns in zip(samples, latencies_of_blocks, strict=True):
        block.values[metric].add(drop_undefined(latencies_ns))


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
        tokens_in: A function that returns the number of output tokens in an interval, or None if
            tokens were not counted.
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

    drift = Drift(block_s=time_blocks.block_ns / 1e9, blocks=tuple(all_blocks))
    if len(steady_blocks) < MIN_BLOCKS:
        return drift  # too short to show a change
    return _with_changes(drift, steady_blocks)


def _with_token_rate(block: Block, span: Span, tokens_in: Callable[[Span], float | None]) -> Block:
    """Return a block with its output tokens per second, None if they were not counted."""
    output_per_s = windows.per_second(tokens_in(span), span)
    return msgspec.structs.replace(block, output_per_s=output_per_s)


def _list_blocks(time_blocks: TimeBlocks, steady: Span) -> list[_TimedBlock]:
    """Return the blocks of time to report, with whether each is in the steady state.

    From the first reported block in the steady state on, blocks without requests are reported too.

    Args:
        time_blocks: The latencies by block of time.
        steady: The time of the steady state, which is without the start and the end of the load.
    """
    timed_blocks: list[_TimedBlock] = []
    has_reported_steady_block = False
    for number, samples in enumerate(time_blocks.samples):
        is_reported = samples.requests > 0 or has_reported_steady_block
        if not is_reported:
            continue

        start_ns = number * time_blocks.block_ns
        end_ns = start_ns + time_blocks.block_ns
        span = windows.make_span(start_ns, end_ns)
        is_steady = _is_inside(span, steady)
        timed_blocks.append(_TimedBlock(samples, span, is_steady))
        if is_steady:
            has_reported_steady_block = True

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
        span: The time of the block, which has a start and an end.
    """
    return Block(
        start_s=span.start_s or 0.0,
        end_s=span.end_s or 0.0,
        requests=samples.requests,
        ttft_p50_ms=_quantile_ms(samples.values["ttft"], 0.5),
        ttft_p99_ms=_quantile_ms(samples.values["ttft"], 0.99),
        tpot_p50_ms=_quantile_ms(samples.values["tpot"], 0.5),
        tpot_p99_ms=_quantile_ms(samples.values["tpot"], 0.99),
        e2e_p99_ms=_quantile_ms(samples.values["e2e"], 0.99),
    )


def _quantile_ms(latencies_ns: Values, probability: float) -> float | None:
    """Return a quantile of latencies in ms, or None without a latency."""
    if latencies_ns.count == 0:
        return None
    return milliseconds(latencies_ns.quantile(probability))


def _with_changes(drift: Drift, steady_blocks: Sequence[Block]) -> Drift:
    """Return a drift with the relative change of each metric over the steady state.

    Args:
        drift: A drift without changes.
        steady_blocks: The blocks of time in the steady state.
    """
    return msgspec.structs.replace(
        drift,
        ttft_p50=_relative_change([block.ttft_p50_ms for block in steady_blocks]),
        ttft_p99=_relative_change([block.ttft_p99_ms for block in steady_blocks]),
        tpot_p50=_relative_change([block.tpot_p50_ms for block in steady_blocks]),
        tpot_p99=_relative_change([block.tpot_p99_ms for block in steady_blocks]),
        e2e_p99=_relative_change([block.e2e_p99_ms for block in steady_blocks]),
        output_per_s=_relative_change([block.output_per_s for block in steady_blocks]),
    )


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
