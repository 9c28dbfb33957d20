"""Latencies and throughput by blocks of time, and their change from the first third of a run to the last third.

Pure. A block lasts a power of two in seconds: the shortest that needs at most BLOCKS blocks for the run. So an
accumulator that only joins neighbouring blocks reaches the same blocks as one computation over all rows.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

import msgspec

from loadgen.core.metrics import windows
from loadgen.core.metrics.windows import Span
from loadgen.core.stats.quantiles import Histogram, Values, milliseconds

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

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


def without_tpot(drift: Drift) -> Drift:
    """The drift without its TPOT figures, where those are withheld."""
    blocks = tuple(
        msgspec.structs.replace(block, tpot_p50_ms=None, tpot_p99_ms=None) for block in drift.blocks
    )
    return msgspec.structs.replace(drift, tpot_p50=None, tpot_p99=None, blocks=blocks)


def without_tokens(drift: Drift) -> Drift:
    """The drift without its rates of tokens, where those are withheld."""
    blocks = tuple(msgspec.structs.replace(block, output_per_s=None) for block in drift.blocks)
    return msgspec.structs.replace(drift, output_per_s=None, blocks=blocks)


class BlockSamples:
    """Measured ok requests due in one block of time: their number, and a sample of each SHOWN metric."""

    __slots__ = ("of", "requests")

    def __init__(self, *, exact: bool) -> None:
        self.requests = 0
        self.of: dict[str, Values | Histogram] = {
            metric: Values() if exact else Histogram() for metric in SHOWN
        }

    def merge(self, other: BlockSamples) -> None:
        """Add another block to this one; the other does not change."""
        self.requests += other.requests
        for metric in SHOWN:
            own: Any = self.of[metric]
            own.merge(other.of[metric])


def of_blocks(
    found: Sequence[BlockSamples],
    length_ns: int,
    steady: Span,
    tokens_in: Callable[[Span], float | None],
) -> Drift:
    """The drift of a run.

    `length_ns`: length of a block; the first one begins at the start of the run. `tokens_in`: output tokens that came
    in an interval; None where they were not counted.
    """
    if not found:
        return Drift()
    blocks: list[Block] = []
    whole_blocks: list[Block] = []
    for i, samples in enumerate(found):
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
                f"{metric}_p{p * 100:g}_ms": milliseconds(samples.of[metric].quantile(p))
                for metric, p in PARTS
                if samples.of[metric].count
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
