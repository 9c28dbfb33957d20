"""The contract term `answers`: the share of checked answers that are right.

The questions with known answers are requests of the level's load (`check_answers` in its workload),
so the term says whether a service still answers correctly under this load. This module is pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from loadgen.contracts.load_checks import EstimateError, UnmeasurableError
from loadgen.contracts.recorded_run import RecordedRun
from loadgen.contracts.term_estimate import TermEstimate
from loadgen.core.metrics.answer_scores import ScorePart
from loadgen.core.stats import intervals
from loadgen.core.stats.intervals import Interval

KNOWN_ANSWERS = "known_answers"
"""The requirement of the term: questions with known answers in the workload."""


def estimate_right_answers(runs: Sequence[RecordedRun], confidence: float) -> TermEstimate:
    """Return the share of right answers among all checked answers of the runs of a level.

    The interval is Wilson's, and is widened if the shares of the runs differ by more than chance
    explains. Failed requests have no answer and do not count.

    Args:
        runs: The runs of the level.
        confidence: The confidence of the interval.

    Raises:
        UnmeasurableError: A run has no questions with known answers.
        EstimateError: No answer was checked.
    """
    scores = [_get_score(run) for run in runs]
    checked_count = sum(score.checked for score in scores)
    correct_count = sum(score.correct for score in scores)
    if checked_count == 0:
        raise EstimateError("no answer was checked")

    share = correct_count / checked_count
    low, high = intervals.wilson_interval(share, checked_count, confidence)
    interval_of_answers = Interval(share, low, high, confidence)

    shares_of_runs = [score.score for score in scores if score.score is not None]
    interval = intervals.widen_by_runs(interval_of_answers, shares_of_runs)
    return TermEstimate(_limit_to_shares(interval), checked_count)


def _limit_to_shares(interval: Interval) -> Interval:
    """Return an interval without the values below 0 and above 1, which are no shares.

    An interval that was widened by the differences between runs is symmetric, so it may reach
    beyond them.
    """
    return replace(interval, low=max(interval.low, 0.0), high=min(interval.high, 1.0))


def _get_score(run: RecordedRun) -> ScorePart:
    """Return the score of all checked answers of a run.

    Raises:
        UnmeasurableError: The run has no questions with known answers.
    """
    answers = run.summary.answers
    if answers is None:
        raise UnmeasurableError(f"{run.folder} has no questions with known answers")
    return answers.overall
