"""The contract term `fluidity`: what it needs of a run, and the values that it is computed from.

A fluidity index of at least 90 % at p95 means that 95 % of the requests met at least 90 % of their
token deadlines. It is estimated like a latency at a percentile, from the fraction of deadlines that
each request missed. This module is pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np

from loadgen.contracts.load_checks import EstimateError, UnmeasurableError
from loadgen.contracts.recorded_run import LoadedRun
from loadgen.contracts.schema import ContractLevel
from loadgen.contracts.steady_samples import find_counted_requests, order_by_due_time
from loadgen.contracts.steady_state import TimedValues
from loadgen.core.metrics.fluidity import NO_RESPONSES, NO_TOKEN_TIMES
from loadgen.core.stats.intervals import Interval

FLUIDITY = "fluidity"
"""The keyword of the term."""

DEADLINES = "deadlines"
"""The requirement of the term: an SLO with limits on TTFT and TPOT."""


def needs_token_times(level: ContractLevel) -> bool:
    """Return whether the runs of a level have to store token times (`--keep gaps`) for a term."""
    return any(term.kind == FLUIDITY for term in (*level.must, *level.should))


def collect_missed_fractions(loaded_runs: Sequence[LoadedRun]) -> list[TimedValues]:
    """Return, for each run, the fraction of its token deadlines that each request missed.

    The requests are in the order of their scheduled times. A failed request counts with an infinite
    fraction, so that it is worse than every response. Responses without known token times are left
    out.

    Raises:
        EstimateError: A run has no token times, or too many requests are unfinished.
    """
    return [_collect_of_run(loaded_run) for loaded_run in loaded_runs]


def _collect_of_run(loaded_run: LoadedRun) -> TimedValues:
    """Return the fraction of its token deadlines that each request of one run missed.

    Raises:
        EstimateError: The run has no token times, or too many requests are unfinished.
    """
    run, columns = loaded_run
    fluidity = run.summary.fluidity
    if run.deadline_counts is None:
        raise UnmeasurableError(NO_TOKEN_TIMES)

    # The summary of a forecast knows no token times, but its counts of deadlines come from them.
    is_withheld = fluidity is not None and fluidity.absent not in ("", NO_TOKEN_TIMES)
    if fluidity is not None and is_withheld:
        raise EstimateError(fluidity.absent)
    if not len(run.deadline_counts.slots):
        raise EstimateError(NO_RESPONSES)

    # The fluidity index is the fraction of token deadlines that a response met.
    fluidity_indices = run.deadline_counts.look_up_indices(columns["slot"])
    missed_fractions = 1 - fluidity_indices
    is_ok = columns.is_ok
    values = np.where(is_ok, missed_fractions, math.inf)

    is_known = ~is_ok | ~np.isnan(missed_fractions)
    is_counted = find_counted_requests(columns) & is_known
    return order_by_due_time(columns, is_counted, values)


def convert_to_index(missed: Interval) -> Interval:
    """Convert an estimate of the fraction of missed deadlines to one of the fraction that was met.

    The bounds change places: 2 % to 5 % missed means that 95 % to 98 % were met.
    """
    return msgspec.structs.replace(
        missed,
        value=max(1 - missed.value, 0.0),
        low=max(1 - missed.high, 0.0),
        high=min(max(1 - missed.low, 0.0), 1.0),
    )
