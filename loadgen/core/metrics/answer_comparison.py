"""Compare the checked answers of several runs that ask the same questions. Pure.

Responses to the same question are compared only, so questions of different difficulty hide nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest

from loadgen.core.metrics.answer_scores import AnswerScores, format_counts, score_counts
from loadgen.core.stats.excess_test import Stratum, excess_p_value


def merge_scores(scores: Sequence[AnswerScores]) -> AnswerScores:
    """Return the score of the checked answers of several runs together.

    The result has no score of each kind of check and no tests.
    """
    checked_count = sum(score.overall.checked for score in scores)
    correct_count = sum(score.overall.correct for score in scores)

    checked_by_question = _add_counts([score.checked_by_question for score in scores])
    wrong_by_question = _add_counts([score.wrong_by_question for score in scores])
    question_count = sum(checked > 0 for checked in checked_by_question)

    return AnswerScores(
        overall=score_counts(checked=checked_count, correct=correct_count),
        questions=question_count,
        checked_by_question=format_counts(checked_by_question),
        wrong_by_question=format_counts(wrong_by_question),
    )


def more_wrong_p_value(first: AnswerScores, other: AnswerScores) -> float:
    """Return the p-value of a test whether `other` has more wrong answers than `first`.

    This is the probability of so many more wrong answers if the servers do not differ.
    """
    return excess_p_value(_pair_questions(first, other))


def different_p_value(first: AnswerScores, other: AnswerScores) -> float:
    """Return the p-value of a test whether two servers have different shares of wrong answers.

    Both directions are tested, so the smaller p-value is doubled.
    """
    p_value_of_more = more_wrong_p_value(first, other)
    p_value_of_fewer = more_wrong_p_value(other, first)
    return min(1.0, 2 * min(p_value_of_more, p_value_of_fewer))


def _pair_questions(first: AnswerScores, other: AnswerScores) -> Iterator[Stratum]:
    """Yield the numbers of checked and of wrong responses to each question in two runs.

    A statistical test of the result shows if more responses are wrong in the other run.

    Args:
        first: The scores of the first run. Their numbers by question are text such as "12 10 11".
        other: The scores of the other run, which is suspected of more wrong responses.
    """
    # A question that is missing in one of the runs has no responses there.
    counts_of_questions = zip_longest(
        parse_counts(first.checked_by_question),
        parse_counts(first.wrong_by_question),
        parse_counts(other.checked_by_question),
        parse_counts(other.wrong_by_question),
        fillvalue=0,
    )
    for first_checked, first_wrong, other_checked, other_wrong in counts_of_questions:
        yield Stratum(
            trials=first_checked + other_checked,
            failures=first_wrong + other_wrong,
            suspect_trials=other_checked,
            suspect_failures=other_wrong,
        )


def _add_counts(texts: Sequence[str]) -> list[int]:
    """Return the sum of the counts of each question. For example, ["1 2", "3"] gives [4, 2]."""
    counts_of_texts = [parse_counts(text) for text in texts]
    return [sum(counts) for counts in zip_longest(*counts_of_texts, fillvalue=0)]


def parse_counts(text: str) -> list[int]:
    """Return the counts of a text: [12, 10] for "12 10". A damaged text has no counts."""
    counts = text.split()
    is_valid = all(count.isascii() and count.isdigit() for count in counts)
    if not is_valid:
        return []
    return [int(count) for count in counts]
