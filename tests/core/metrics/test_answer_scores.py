"""The scores of checked answers: in-flight counts, dependence on the load, another model."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.core.metrics.answer_comparison import (
    different_p_value,
    merge_scores,
    more_wrong_p_value,
    parse_counts,
)
from loadgen.core.metrics.answer_scores import (
    AnswerScores,
    MeasuredAnswer,
    compare_with_reference,
    count_in_flight,
    find_load_dependence,
    measure_answers,
    score_counts,
    summarize_answers,
)
from loadgen.core.results.answer_files import ScoredAnswer
from loadgen.core.results.record import ROW, STATUS

QUESTIONS = 100
LEVEL = 256


def scored(slot: int, question: int, *, is_correct: bool) -> ScoredAnswer:
    return ScoredAnswer(
        slot=slot, question=question, check="exact", row=question + 1, is_correct=is_correct
    )


def answers_at(
    in_flight: list[int], is_wrong: list[bool], questions: int = QUESTIONS
) -> list[MeasuredAnswer]:
    """One response per number in flight; the questions follow each other."""
    return [
        MeasuredAnswer(scored(slot, slot % questions, is_correct=not wrong), count)
        for slot, (count, wrong) in enumerate(zip(in_flight, is_wrong, strict=True))
    ]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(-1, 30), st.integers(-1, 30)), max_size=12))
def test_requests_in_flight_are_those_sent_and_not_ended(times: list[tuple[int, int]]) -> None:
    requests = [(sent, done if sent >= 0 and done >= sent else -1) for sent, done in times]
    sent_ns = np.array([sent for sent, _ in requests], np.int64)
    done_ns = np.array([done for _, done in requests], np.int64)
    at_ns = np.arange(0, 31, dtype=np.int64)
    expected = [
        sum(0 <= sent <= at and (done < 0 or done > at) for sent, done in requests) for at in at_ns
    ]
    assert count_in_flight(sent_ns, done_ns, at_ns).tolist() == expected


def test_only_successful_requests_of_measured_stages_are_scored() -> None:
    rows = np.zeros(4, ROW)
    rows["slot"] = range(4)
    rows["stage"] = [0, 1, 1, 1]
    rows["status"] = [STATUS["ok"], STATUS["ok"], STATUS["failed"], STATUS["ok"]]
    rows["sent_ns"] = [0, 10, 20, 30]
    rows["done_ns"] = [15, 40, 50, 60]
    outcomes = [scored(slot, 0, is_correct=True) for slot in (0, 1, 2)]
    measured = measure_answers(outcomes, rows, measured_stages=[1])
    assert [(answer.scored.slot, answer.in_flight) for answer in measured] == [(1, 2)]


def test_a_score_has_a_wilson_interval() -> None:
    part = score_counts(checked=100, correct=90)
    assert (part.score, part.low, part.high) == (
        0.9,
        pytest.approx(0.8256, abs=1e-4),
        pytest.approx(0.9448, abs=1e-4),
    )
    empty = score_counts(checked=0, correct=0)
    assert (empty.score, empty.low, empty.high) == (None, None, None)


def test_scores_without_responses_have_no_findings() -> None:
    scores = summarize_answers([])
    assert scores.overall.checked == 0
    assert scores.load_dependence is None
    assert scores.reference is None


def test_corruption_above_a_load_is_reported_at_this_load() -> None:
    rng = np.random.default_rng(1)
    in_flight = rng.integers(1, 2 * LEVEL, 4000)
    is_wrong = (in_flight > LEVEL) & (rng.random(4000) < 0.02)
    dependence = find_load_dependence(answers_at(in_flight.tolist(), is_wrong.tolist()))
    assert dependence is not None
    assert dependence.is_worse
    assert dependence.in_flight == LEVEL
    assert dependence.below.correct == dependence.below.checked


def test_errors_at_every_load_are_no_load_dependence() -> None:
    """Of 40 runs with 5 % wrong responses, at most two give an alarm, which has 1 % probability."""
    alarms = 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        in_flight = rng.integers(1, 2 * LEVEL, 1000)
        is_wrong = rng.random(1000) < 0.05
        dependence = find_load_dependence(answers_at(in_flight.tolist(), is_wrong.tolist()))
        assert dependence is not None
        alarms += dependence.is_worse
    assert alarms <= 2


def test_harder_questions_at_a_higher_load_are_no_load_dependence() -> None:
    """Question 1 is always answered wrongly and happens to be sent under a high load only."""
    answers = [
        MeasuredAnswer(scored(slot, slot % 2, is_correct=slot % 2 == 0), 400 if slot % 2 else 10)
        for slot in range(400)
    ]
    dependence = find_load_dependence(answers)
    assert dependence is not None
    assert dependence.p_value == 1.0


def test_a_constant_number_in_flight_shows_no_load_dependence() -> None:
    assert find_load_dependence(answers_at([100] * 500, [False] * 500)) is None


def reference_answers(agreements: list[tuple[float, float]]) -> list[ScoredAnswer]:
    return [
        ScoredAnswer(
            slot=number,
            question=number,
            check="similarity",
            row=number + 1,
            is_correct=agreement == 1.0,
            agreement=agreement,
            reference_agreement=reference_agreement,
        )
        for number, (agreement, reference_agreement) in enumerate(agreements)
    ]


def test_the_same_model_does_not_differ_from_its_reference() -> None:
    comparison = compare_with_reference(reference_answers([(1.0, 1.0)] * 490 + [(0.5, 1.0)] * 6))
    assert comparison is not None
    assert not comparison.is_different
    assert comparison.p_value == pytest.approx(1 / 64)


def test_seven_changed_responses_in_500_differ_from_the_reference() -> None:
    comparison = compare_with_reference(reference_answers([(1.0, 1.0)] * 493 + [(0.5, 1.0)] * 7))
    assert comparison is not None
    assert comparison.is_different
    assert (comparison.worse, comparison.better) == (7, 0)


def test_responses_within_the_variation_of_the_reference_do_not_differ() -> None:
    pairs = [(0.9, 0.4), (0.3, 0.8)] * 250
    comparison = compare_with_reference(reference_answers(pairs))
    assert comparison is not None
    assert not comparison.is_different


def test_only_the_first_response_to_a_question_is_compared() -> None:
    answers = reference_answers([(0.5, 1.0)]) * 50
    comparison = compare_with_reference(answers)
    assert comparison is not None
    assert (comparison.questions, comparison.worse) == (1, 1)


def scores_with(wrong_by_question: list[int], checked: int = 10) -> AnswerScores:
    """Return the scores of a run that asks each question `checked` times."""
    answers = [
        MeasuredAnswer(scored(number, question, is_correct=repeat >= wrong), 1)
        for question, wrong in enumerate(wrong_by_question)
        for number, repeat in enumerate(range(checked))
    ]
    return summarize_answers(answers)


def test_runs_are_compared_question_by_question() -> None:
    """Always wrong questions hide no difference, and five more wrong answers to others are one."""
    hard = [10] * 20
    first = scores_with([*hard, *[0] * 20])
    other = scores_with([*hard, *[1] * 10, *[0] * 10])
    assert more_wrong_p_value(first, other) == pytest.approx(0.5**10)
    assert more_wrong_p_value(other, first) == pytest.approx(1.0)
    assert different_p_value(first, other) == pytest.approx(0.5**9)
    assert different_p_value(first, first) == 1.0


def test_merged_scores_add_the_counts_of_each_question() -> None:
    merged = merge_scores([scores_with([1, 0]), scores_with([2, 0, 3])])
    assert (merged.overall.checked, merged.overall.correct, merged.questions) == (50, 44, 3)
    assert parse_counts(merged.checked_by_question) == [20, 20, 10]
    assert parse_counts(merged.wrong_by_question) == [3, 0, 3]
    assert merge_scores([]).overall.checked == 0


@pytest.mark.parametrize("text", ["1 x", "-1", "1.5", "²"])
def test_damaged_counts_of_scores_are_ignored(text: str) -> None:
    assert parse_counts(text) == []
