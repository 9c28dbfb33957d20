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
from loadgen.core.metrics.fluidity import NO_RESPONSES, NO_TOKEN_TIMES, Fluidity
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

    A token deadline is the time by which an output token has to arrive. The requests are in the
    order of their scheduled times. A failed request has an infinite fraction, so that it is worse
    than every response. Responses without known token times are left out.

    Raises:
        UnmeasurableError: A run has no token times.
        EstimateError: A run does not report its fluidity index, no response of it has token
            deadlines, or too many of its requests are unfinished.
    """
    return [_collect_of_run(loaded_run) for loaded_run in loaded_runs]


def _collect_of_run(loaded_run: LoadedRun) -> TimedValues:
    """Return the fraction of its token deadlines that each request of one run missed.

    A token deadline is the time by which an output token has to arrive. A failed request has an
    infinite fraction. Requests whose fraction is not known are left out.

    Raises:
        UnmeasurableError: The run has no token times.
        EstimateError: The run does not report its fluidity index, no response has token deadlines,
            or too many requests are unfinished.
    """
    run, columns = loaded_run
    deadline_counts = run.deadline_counts
    if deadline_counts is None:
        raise UnmeasurableError(NO_TOKEN_TIMES)

    withheld_reason = _find_withheld_reason(run.summary.fluidity)
    if withheld_reason:
        raise EstimateError(withheld_reason)

    response_count = len(deadline_counts.slots)
    if response_count == 0:
        raise EstimateError(NO_RESPONSES)

    # The fluidity index is the fraction of token deadlines that a response met, NaN if unknown.
    fluidity_indices = deadline_counts.look_up_indices(columns["slot"])
    missed_fractions = 1 - fluidity_indices
    missed_or_infinite = np.where(columns.is_ok, missed_fractions, math.inf)

    is_known = ~np.isnan(missed_or_infinite)
    is_counted = find_counted_requests(columns) & is_known
    return order_by_due_time(columns, is_counted, missed_or_infinite)


def _find_withheld_reason(fluidity: Fluidity | None) -> str:
    """Return why a run does not report its fluidity index, or "" if it does.

    A summary without token times is no reason, because the deadlines are counted separately.
    """
    if fluidity is None or fluidity.absent == NO_TOKEN_TIMES:
        return ""
    return fluidity.absent


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
