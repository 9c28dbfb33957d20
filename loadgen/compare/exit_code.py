"""The exit code of a comparison, of stored results and of live ones."""

from __future__ import annotations

from collections.abc import Sequence

from loadgen.compare.comparison import Comparison
from loadgen.compare.thresholds import ThresholdOutcome
from loadgen.core.errors import INCONCLUSIVE, OK, SLO_MISSED, UNSOUND


def comparison_exit_code(comparison: Comparison, outcomes: Sequence[ThresholdOutcome]) -> int:
    """Return the exit code of a comparison.

    An INVALID run decides before the conditions of `--fail-on`, and a condition that holds before
    one that is undecided.
    """
    if not comparison.valid:
        return UNSOUND
    if any(outcome.failed for outcome in outcomes):
        return SLO_MISSED
    if any(outcome.failed is None for outcome in outcomes):
        return INCONCLUSIVE
    return OK
