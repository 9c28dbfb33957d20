"""Estimates the fluidity index of one side of a comparison, with its standard error. Pure.

The fluidity index is the fraction of token deadlines that responses met. A token deadline is the
time by which an output token has to arrive.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from loadgen.compare.block_errors import EstimateOrReason
from loadgen.core.analysis.within_run_variance import (
    MIN_SAMPLES,
    PLUS_FOUR,
    ScaledEstimate,
    estimate_mean,
    sort_by_due_time,
)
from loadgen.core.metrics.columns import Columns
from loadgen.core.metrics.token_deadlines import DeadlineCounts
from loadgen.runs.comparison_side import Side


def estimate_fluidity_index(
    side: Side, records: Sequence[Columns], value: float
) -> EstimateOrReason:
    """Return the fluidity index of a side with its standard error, or why it has no error.

    Responses that follow each other are correlated, so the error is computed from the means of
    blocks of time. It is at least the error of as many independent responses.

    Args:
        side: The side, which has no repeats.
        records: The measured records of each of its runs.
        value: The index in the summary, which the estimate has as its value.
    """
    values = _list_response_values(side, records)
    if values is None:
        return EstimateOrReason(estimate=None, reason=f"{side.name} has no token times")

    mean = estimate_mean(values) if len(values) >= MIN_SAMPLES else None
    if mean is None:
        return EstimateOrReason(estimate=None, reason=f"only {len(values):,} samples")

    error = max(mean.error, _error_if_independent(values))
    return EstimateOrReason(ScaledEstimate(value, error, mean.degrees_of_freedom))


def _list_response_values(side: Side, records: Sequence[Columns]) -> NDArray[np.float64] | None:
    """Return one value per response of a side, whose mean is the fluidity index.

    The responses of each run are in the order of the scheduled times of their requests. Return None
    if a run has no token times.
    """
    values_of_runs = []
    for run, columns in zip(side.runs, records, strict=True):
        if run.deadline_counts is None:
            return None

        slots_by_time = sort_by_due_time(columns, columns["slot"], columns.is_ok)
        counts_by_time = run.deadline_counts.select_slots(slots_by_time)
        values_of_runs.append(_linearize_index(counts_by_time))

    return np.concatenate(values_of_runs)


def _linearize_index(counts: DeadlineCounts) -> NDArray[np.float64]:
    """Return one value per response, whose mean is the fluidity index of all responses.

    The index is a ratio of two sums, deadlines that were met / all deadlines, so a response with
    more deadlines has more weight. The error of the mean of these values is that of the ratio
    (Cochran 1977, Sampling Techniques, chapter 6). Example: responses that met 9 of 10 and 2 of 2
    deadlines have the index 11/12 and the values 0.889 and 0.944.
    """
    if len(counts.slots) == 0:
        return np.zeros(0)

    met = counts.deadlines - counts.missed
    index = met.sum() / counts.deadlines.sum()

    # How many more deadlines each response met than at the index of all responses.
    surplus = met - index * counts.deadlines
    values: NDArray[np.float64] = index + surplus / counts.deadlines.mean()
    return values


def _error_if_independent(values: NDArray[np.float64]) -> float:
    """Return the standard error of the mean of independent values, above 0 also for equal values.

    Two values of 0 and two of 1 are added, as Agresti and Coull (1998) propose for fractions. So a
    run without a missed deadline does not show that no deadline is ever missed.
    """
    added_values = np.repeat([0.0, 1.0], PLUS_FOUR)
    adjusted_values = np.concatenate([values, added_values])
    return float(adjusted_values.std()) / math.sqrt(len(adjusted_values))
