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
    """The records of a run and the header that describes them."""

    rows: NDArray[np.void]
    header: RunManifest


class TokenAmounts(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of tokens that are paid for.

    Attributes:
        fresh: Prompt tokens that did not come from a cache.
        written: Those of them that were written to a cache; None if the server does not say.
        cached: Prompt tokens that came from a cache.
        output: Output tokens.
    """

    fresh: Decimal
    written: Decimal | None
    cached: Decimal
    output: Decimal

    def without(self, part: TokenAmounts) -> TokenAmounts:
        """Return the tokens that are not in a part of these."""
        written = None
        if self.written is not None and part.written is not None:
            written = self.written - part.written
        return TokenAmounts(
            fresh=self.fresh - part.fresh,
            written=written,
            cached=self.cached - part.cached,
            output=self.output - part.output,
        )


def count_long_prompts(evidence: Evidence, above_prompt_tokens: int) -> TokenAmounts:
    """Return the tokens of the requests whose prompts, cached tokens included, are longer.

    Raises UserError if the records of a run are missing.
    """
    if evidence.read_runs is None:
        what = f"the price changes above {above_prompt_tokens:,} prompt tokens of a request"
        hint = "a run with its records, which tell the length of each prompt"
        raise UserError("no_figure", what, evidence.folder or evidence.name, hint)
    parts = [_long_prompt_records(run, above_prompt_tokens) for run in evidence.read_runs()]
    records = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    cached = np.maximum(records["cached_tokens"], 0)
    written = records["cache_written_tokens"]
    return TokenAmounts(
        fresh=_sum(records["input_tokens"] - cached),
        written=_sum(written) if (written >= 0).all() else None,
        cached=_sum(cached),
        output=_sum(np.maximum(records["output_tokens"], 0)),
    )


def _long_prompt_records(run: RunRecords, above_prompt_tokens: int) -> dict[str, NDArray[np.int64]]:
    """Return the token counts of the measured requests whose prompts exceed a length, by column.

    Requests of warm-up stages are not counted. Neither are requests to endpoints that serve single
    steps of a task, because those endpoints have prices of their own.
    """
    columns = Columns(run.rows)
    was_sent = columns.where(OK) | columns.where(FAILED)
    is_long = columns["input_tokens"] > above_prompt_tokens
    is_counted = _is_measured(columns, run.header) & _is_on_main_target(columns, run.header)
    is_counted &= was_sent & is_long
    names = ("input_tokens", "cached_tokens", "cache_written_tokens", "output_tokens")
    return {name: columns[name][is_counted].astype(np.int64) for name in names}


def _is_measured(columns: Columns, header: RunManifest) -> NDArray[np.bool_]:
    """Return which requests belong to measured stages, or all of a run without stages."""
    measured_stages = np.array([stage.measured for stage in header.stages] or [True])
    return measured_stages[columns["stage"]]


def _is_on_main_target(columns: Columns, header: RunManifest) -> NDArray[np.bool_]:
    """Return which requests went to targets that do not serve single steps of a task."""
    main_targets = np.array([not target.serves for target in header.targets] or [True])
    # A request that was never sent has the target -1, and is left out by its status.
    return main_targets[np.maximum(columns["target"], 0)]


def _sum(values: NDArray[np.int64]) -> Decimal:
    return Decimal(int(values.sum()))
