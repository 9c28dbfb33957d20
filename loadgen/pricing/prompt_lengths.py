"""Counts the tokens of requests with long prompts in the records of runs.

A price per token may change above a number of prompt tokens. Summaries have sums over all requests,
so such a price needs the records. Pure: the caller provides a function that reads them.
"""

from __future__ import annotations

from decimal import Decimal
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from loadgen.core.errors import UserError
from loadgen.core.metrics.columns import FAILED, OK, Columns

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from loadgen.core.results.manifest import RunManifest
    from loadgen.pricing.evidence import Evidence


class RunRecords(NamedTuple):
    """The records of a run and the manifest that describes them."""

    rows: NDArray[np.void]
    manifest: RunManifest


class TokenAmounts(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of tokens that are paid for.

    Attributes:
        uncached: Prompt tokens that did not come from a cache, so the server had to process them.
        cache_written: Those of the uncached tokens that the server wrote to a cache for later
            requests, or None if the server does not report them.
        cached: Prompt tokens that came from a cache.
        output: Output tokens.
    """

    uncached: Decimal
    cache_written: Decimal | None
    cached: Decimal
    output: Decimal

    def plus(self, other: TokenAmounts) -> TokenAmounts:
        """Return the sum of two amounts. Its cache writes are known only if both are known."""
        cache_written = None
        if self.cache_written is not None and other.cache_written is not None:
            cache_written = self.cache_written + other.cache_written

        return TokenAmounts(
            uncached=self.uncached + other.uncached,
            cache_written=cache_written,
            cached=self.cached + other.cached,
            output=self.output + other.output,
        )

    def without(self, subset: TokenAmounts) -> TokenAmounts:
        """Return the difference to a subset, such as all tokens without those of long prompts."""
        cache_written = None
        if self.cache_written is not None and subset.cache_written is not None:
            cache_written = self.cache_written - subset.cache_written

        return TokenAmounts(
            uncached=self.uncached - subset.uncached,
            cache_written=cache_written,
            cached=self.cached - subset.cached,
            output=self.output - subset.output,
        )


def count_long_prompts(evidence: Evidence, above_prompt_tokens: int) -> TokenAmounts:
    """Return the tokens of all requests whose prompts are longer than a number of tokens.

    Some providers charge another price for a whole request if its prompt is long, for example
    above 200,000 tokens. Prompt tokens that came from a cache count for this length too.

    Raises:
        UserError: The records of the runs, which have the length of each prompt, are not available.
    """
    if evidence.read_runs is None:
        raise UserError(
            "no_figure",
            f"the price depends on prompts above {above_prompt_tokens:,} tokens, and there are no "
            "records of prompt lengths",
            evidence.folder or evidence.name,
            "use a run that has records",
        )

    totals = TokenAmounts(
        uncached=Decimal(0), cache_written=Decimal(0), cached=Decimal(0), output=Decimal(0)
    )
    for run in evidence.read_runs():
        totals = totals.plus(_count_long_prompts_in_run(run, above_prompt_tokens))

    return totals


def _count_long_prompts_in_run(run: RunRecords, above_prompt_tokens: int) -> TokenAmounts:
    """Return the tokens of the requests of one run that have long prompts and are paid for.

    A request is paid for if it was sent to a main target in a measured stage, whether it succeeded
    or failed.

    A column has -1 where the server reported no number of tokens. A missing number counts as 0,
    except for tokens written to a cache: one missing number makes their sum unknown. The caller
    then assumes that all uncached tokens were written, which is the most that they can cost.
    """
    columns = Columns(run.rows)
    was_sent = columns.has_status(OK) | columns.has_status(FAILED)
    has_long_prompt = columns["input_tokens"] > above_prompt_tokens
    is_priced = _mask_measured_requests(columns, run.manifest) & _mask_main_target_requests(
        columns, run.manifest
    )
    is_counted = was_sent & has_long_prompt & is_priced

    def select(column: str) -> NDArray[np.int64]:
        return columns[column][is_counted].astype(np.int64)

    prompt_tokens = select("input_tokens")
    cached_tokens = np.maximum(select("cached_tokens"), 0)
    cache_written_tokens = select("cache_written_tokens")
    output_tokens = np.maximum(select("output_tokens"), 0)
    is_cache_written_known = bool((cache_written_tokens >= 0).all())

    return TokenAmounts(
        uncached=_sum_to_decimal(prompt_tokens - cached_tokens),
        cache_written=_sum_to_decimal(cache_written_tokens) if is_cache_written_known else None,
        cached=_sum_to_decimal(cached_tokens),
        output=_sum_to_decimal(output_tokens),
    )


def _mask_measured_requests(columns: Columns, manifest: RunManifest) -> NDArray[np.bool_]:
    """Return a mask of the requests in measured stages, which leaves out warm-up stages.

    All requests of a run without stages are measured.
    """
    stage_indexes = columns["stage"]
    if not manifest.stages:
        return np.ones(len(stage_indexes), dtype=np.bool_)
    is_stage_measured = np.array([stage.measured for stage in manifest.stages])
    return is_stage_measured[stage_indexes]


def _mask_main_target_requests(columns: Columns, manifest: RunManifest) -> NDArray[np.bool_]:
    """Return a mask of the requests to the main targets of a run.

    The other targets serve single steps of a task, such as an embedding model. They have prices of
    their own, which `step_cost` uses.
    """
    target_indexes = columns["target"]
    if not manifest.targets:
        return np.ones(len(target_indexes), dtype=np.bool_)
    is_main_target = np.array([not target.serves for target in manifest.targets])
    # A request that was never sent has the target -1. Any valid index will do for it, because the
    # caller leaves such requests out by their status.
    return is_main_target[np.maximum(target_indexes, 0)]


def _sum_to_decimal(values: NDArray[np.int64]) -> Decimal:
    return Decimal(int(values.sum()))
