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

from loadgen.contracts.load_checks import EstimateError
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
    """Return the fraction of its token deadlines that each request missed, in order of time.

    A failed request has an infinite fraction, as it has an infinite latency in other terms. A
    response whose token times are not known is left out.

    Raises:
        EstimateError: A run has no token times, or too many requests are unfinished.
    """
    return [_collect_of_run(loaded_run) for loaded_run in loaded_runs]


def _collect_of_run(loaded_run: LoadedRun) -> TimedValues:
    """Return the fraction of missed token deadlines of each request of one run."""
    run, columns = loaded_run
    fluidity = run.summary.fluidity
    if run.deadline_counts is None:
        raise EstimateError(NO_TOKEN_TIMES)
    # The summary of a forecast knows no token times, but its counts of deadlines come from them.
    is_withheld = fluidity is not None and fluidity.absent not in ("", NO_TOKEN_TIMES)
    if fluidity is not None and is_withheld:
        raise EstimateError(fluidity.absent)
    if not len(run.deadline_counts.slots):
        raise EstimateError(NO_RESPONSES)

    missed_fractions = 1 - run.deadline_counts.look_up_indices(columns["slot"])
    is_ok = columns.is_ok
    is_known = ~is_ok | ~np.isnan(missed_fractions)
    values = np.where(is_ok, missed_fractions, math.inf)
    return order_by_due_time(columns, find_counted_requests(columns) & is_known, values)


def convert_to_index(missed: Interval) -> Interval:
    """Return the interval of a fluidity index from that of a fraction of missed deadlines."""
    return msgspec.structs.replace(
        missed,
        value=max(1 - missed.value, 0.0),
        low=max(1 - missed.high, 0.0),
        high=min(max(1 - missed.low, 0.0), 1.0),
    )
