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
from loadgen.contracts.recorded_run import LoadedRun, RecordedRun
from loadgen.contracts.schema import ContractLevel
from loadgen.contracts.steady_samples import find_counted_requests, order_by_due_time
from loadgen.contracts.steady_state import TimedValues
from loadgen.core.metrics.fluidity import NO_RESPONSES, NO_TOKEN_TIMES, Fluidity
from loadgen.core.metrics.token_deadlines import DeadlineCounts
from loadgen.core.stats.intervals import Interval

FLUIDITY = "fluidity"
"""The keyword of the term."""

DEADLINES = "deadlines"
"""The requirement of the term: an SLO with limits on TTFT and TPOT."""

MISSED_BY_FAILED_REQUEST = math.inf
"""Stands for the missed fraction of a failed request, so that it is worse than every response."""


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
    return [_measure_missed_fractions(loaded_run) for loaded_run in loaded_runs]


def _measure_missed_fractions(loaded_run: LoadedRun) -> TimedValues:
    """Return the fraction of token deadlines that each request missed, by scheduled time.

    For example, a response that has 50 output tokens, of which 2 came too late, missed 0.04.
    Requests whose token times are not known are left out.

    Raises:
        UnmeasurableError: The run has no token times.
        EstimateError: The run cannot be evaluated, for example because no response has deadlines.
    """
    columns = loaded_run.columns
    deadline_counts = _get_deadline_counts(loaded_run.run)

    # The fluidity index of a request is the fraction of its deadlines that it met, NaN if unknown.
    fluidity_indices = deadline_counts.look_up_indices(columns["slot"])
    missed_fractions = np.where(columns.is_ok, 1 - fluidity_indices, MISSED_BY_FAILED_REQUEST)

    has_known_fraction = ~np.isnan(missed_fractions)
    is_counted = find_counted_requests(columns) & has_known_fraction
    return order_by_due_time(columns, is_counted, missed_fractions)


def _get_deadline_counts(run: RecordedRun) -> DeadlineCounts:
    """Return how many token deadlines each response of a run had and missed.

    Raises:
        UnmeasurableError: The run has no token times.
        EstimateError: The run does not report its fluidity index, or no response has deadlines.
    """
    deadline_counts = run.deadline_counts
    if deadline_counts is None:
        raise UnmeasurableError(NO_TOKEN_TIMES)

    withheld_reason = _find_withheld_reason(run.summary.fluidity)
    if withheld_reason:
        raise EstimateError(withheld_reason)

    has_responses = len(deadline_counts.slots) > 0
    if not has_responses:
        raise EstimateError(NO_RESPONSES)

    return deadline_counts


def _find_withheld_reason(fluidity: Fluidity | None) -> str:
    """Return why a run does not report its fluidity index, or "" if it does.

    A summary without token times is no reason, because the deadlines are counted separately.
    """
    if fluidity is None or fluidity.absent == NO_TOKEN_TIMES:
        return ""
    return fluidity.absent


def convert_to_index(missed: Interval) -> Interval:
    """Convert an interval of the fraction of missed deadlines to one of the fraction that was met.

    The bounds change places: 2 % to 5 % missed means that 95 % to 98 % were met.
    """
    return msgspec.structs.replace(
        missed,
        value=_fraction_met(missed.value),
        low=_fraction_met(missed.high),
        high=_fraction_met(missed.low),
    )


def _fraction_met(missed_fraction: float) -> float:
    """Return 1 - missed fraction, limited to the range from 0 to 1.

    A missed fraction may be outside of this range: it is infinite if requests failed, and the lower
    bound of an interval may be negative.
    """
    return min(max(1 - missed_fraction, 0.0), 1.0)
