"""Score the checked answers of a run: the share that is right, and how it depends on the load.

Pure. The responses are those of the measured load, so each has a number of requests in flight when
it was sent. A server that corrupts responses under load answers the same questions worse above some
number in flight than below it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from loadgen.core.metrics.answer_objective import AnswersObjective
from loadgen.core.results.answer_files import ScoredAnswer
from loadgen.core.results.record import STATUS
from loadgen.core.stats.excess_test import Stratum, excess_p_value, sign_test_p_value
from loadgen.core.stats.intervals import wilson_interval
from loadgen.core.stats.quantiles import count_open_spans

if TYPE_CHECKING:
    from numpy.typing import NDArray

ALARM_LEVEL = 0.01
"""The probability of reporting a difference where there is none."""

MIN_PART = 20
"""The score of fewer responses below or above a number in flight is not compared."""
MIN_PART_SHARE = 0.05
"""The same as a fraction of all checked responses."""


class ScorePart(msgspec.Struct, frozen=True, kw_only=True):
    """The score of some responses: the share that is right.

    Attributes:
        name: The kind of check, or "" if the responses are of all kinds.
        checked: The number of responses.
        correct: The number of right responses.
        score: `correct / checked`. None without responses.
        low: The lower end of its 95 % interval.
        high: The upper end of its 95 % interval.
    """

    name: str = ""
    checked: int
    correct: int
    score: float | None
    low: float | None
    high: float | None


class LoadDependence(msgspec.Struct, frozen=True, kw_only=True):
    """Whether responses are worse with more requests in flight.

    Attributes:
        is_worse: Whether they are, with a probability of a false alarm of at most 1 %.
        p_value: The probability of so clear a difference without any, for all compared numbers in
            flight together.
        in_flight: The number in flight above which the score differs most clearly.
        below: The score of requests that were sent with at most so many requests in flight.
        above: The score of requests that were sent with more.
        compared: The numbers of requests in flight that were compared.
    """

    is_worse: bool
    p_value: float
    in_flight: int
    below: ScorePart
    above: ScorePart
    compared: tuple[int, ...]


class ReferenceComparison(msgspec.Struct, frozen=True, kw_only=True):
    """How the responses compare with those of the reference endpoint.

    The reference endpoint has answered each question twice. A server with the same model agrees
    with the first of these responses about as far as the second one does.

    Attributes:
        is_different: Whether the responses differ more from the first reference response than the
            second reference response does, with a probability of a false alarm of at most 1 %.
        p_value: The probability of so clear a difference without any.
        questions: The number of questions that were compared.
        worse: The number of questions with less agreement than that of the reference with itself.
        better: The number of questions with more.
        agreement: The mean fraction of a response before its first difference.
        reference_agreement: The same for the reference with itself.
    """

    is_different: bool
    p_value: float
    questions: int
    worse: int
    better: int
    agreement: float
    reference_agreement: float


class AnswerScores(msgspec.Struct, frozen=True, kw_only=True):
    """The scores of the checked answers of a run.

    Attributes:
        overall: The score of all checked responses.
        questions: The number of different questions among them.
        checks: The score of each kind of check.
        load_dependence: Whether responses are worse with more requests in flight. None if the
            number in flight did not vary enough.
        reference: How the responses compare with a reference endpoint. None if no question has two
            recorded responses.
        checked_by_question: The number of checked responses to each question, by its index,
            separated by spaces.
        wrong_by_question: The number of wrong responses to each question in the same form.
        objective: The result of the objective `answers` of the SLO. None if it has none.
    """

    overall: ScorePart
    questions: int
    checks: tuple[ScorePart, ...] = ()
    load_dependence: LoadDependence | None = None
    reference: ReferenceComparison | None = None
    checked_by_question: str = ""
    wrong_by_question: str = ""
    objective: AnswersObjective | None = None


class MeasuredAnswer(NamedTuple):
    """A checked response, and how many requests were in flight when its request was sent."""

    scored: ScoredAnswer
    in_flight: int


def score_part(answers: Sequence[ScoredAnswer], name: str = "") -> ScorePart:
    """Return the share of right responses with its 95 % interval.

    Args:
        answers: The checked responses.
        name: The kind of check, or "" if the responses are of all kinds.
    """
    correct_count = sum(answer.is_correct for answer in answers)
    return score_counts(len(answers), correct_count, name)


def score_counts(checked: int, correct: int, name: str = "") -> ScorePart:
    """Return the share of right responses, `correct / checked`, with its 95 % Wilson interval."""
    if checked == 0:
        return ScorePart(name=name, checked=0, correct=0, score=None, low=None, high=None)

    score = correct / checked
    low, high = wilson_interval(score, checked)

    # Rounding errors would leave an end near 0 or 1 slightly inside of the range from 0 to 1.
    if correct == 0:
        low = 0.0
    if correct == checked:
        high = 1.0

    return ScorePart(name=name, checked=checked, correct=correct, score=score, low=low, high=high)


def summarize_answers(answers: Sequence[MeasuredAnswer]) -> AnswerScores:
    """Return all scores of the checked responses of a run.

    Args:
        answers: The checked responses, in the order of their requests.
    """
    scored_answers = [answer.scored for answer in answers]
    wrong_answers = [answer for answer in scored_answers if not answer.is_correct]
    question_indexes = {answer.question for answer in scored_answers}

    return AnswerScores(
        overall=score_part(scored_answers),
        questions=len(question_indexes),
        checks=tuple(_score_each_check(scored_answers)),
        load_dependence=find_load_dependence(answers),
        reference=compare_with_reference(scored_answers),
        checked_by_question=_count_by_question(scored_answers),
        wrong_by_question=_count_by_question(wrong_answers),
    )


def _score_each_check(answers: Sequence[ScoredAnswer]) -> Iterator[ScorePart]:
    """Yield the score of each kind of check, in the order of the first response of each kind."""
    check_names = list(dict.fromkeys(answer.check for answer in answers))
    for check_name in check_names:
        answers_of_check = [answer for answer in answers if answer.check == check_name]
        yield score_part(answers_of_check, check_name)


def _count_by_question(answers: Sequence[ScoredAnswer]) -> str:
    """Return the number of responses to each question, by its index, separated by spaces."""
    questions = np.array([answer.question for answer in answers], np.int64)
    return format_counts(np.bincount(questions).tolist())


def format_counts(counts: Sequence[int]) -> str:
    """Return counts as text, separated by spaces, which takes one line of a JSON file."""
    return " ".join(map(str, counts))


# -- the measured responses ----------------------------------------------------------------------


def measure_answers(
    scored_answers: Sequence[ScoredAnswer],
    rows: NDArray[np.void],
    measured_stages: Sequence[int],
) -> list[MeasuredAnswer]:
    """Return each checked response with the number of requests in flight when it was requested.

    Responses of failed requests, and of stages that are not measured, such as the warm-up, are left
    out.

    Args:
        scored_answers: The outcomes of all checks of a run. `slot` is the number of a request.
        rows: The records of all requests.
        measured_stages: The indexes of the measured stages.
    """
    # When the request of each measured response was sent.
    checked_slots = [answer.slot for answer in scored_answers]
    is_measured = np.isin(rows["stage"], measured_stages)
    is_checked = np.isin(rows["slot"], checked_slots)
    sent_ns_by_slot = _find_send_times(rows, is_selected=is_measured & is_checked)
    measured_answers = [answer for answer in scored_answers if answer.slot in sent_ns_by_slot]
    send_times_ns = [sent_ns_by_slot[answer.slot] for answer in measured_answers]

    # How many requests of the run were in flight at each of these times.
    in_flight_counts = count_in_flight(
        rows["sent_ns"], rows["done_ns"], np.array(send_times_ns, np.int64)
    )
    return [
        MeasuredAnswer(answer, in_flight)
        for answer, in_flight in zip(measured_answers, in_flight_counts.tolist(), strict=True)
    ]


def _find_send_times(rows: NDArray[np.void], is_selected: NDArray[np.bool_]) -> dict[int, int]:
    """Return when each selected ok request was sent, in ns, by the number of the request ("slot").

    Args:
        rows: The records of all requests.
        is_selected: Which records are selected.
    """
    is_ok = rows["status"] == STATUS["ok"]
    row_indexes = np.flatnonzero(is_selected & is_ok)
    slots = rows["slot"][row_indexes].tolist()
    times_ns = rows["sent_ns"][row_indexes].tolist()
    return dict(zip(slots, times_ns, strict=True))


def count_in_flight(
    sent_ns: NDArray[np.int64], done_ns: NDArray[np.int64], at_ns: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return how many requests were in flight at each time of an array.

    A request is in flight from the time at which the request is sent until its response ends. For
    example, with requests from 0 to 10 ns and from 5 to 15 ns, 2 are in flight at 5 ns.

    Args:
        sent_ns: The time at which each request was sent. Negative if a request was never sent.
        done_ns: The time at which each response ended. Negative if a response did not end.
        at_ns: The times to count at.
    """
    was_sent = sent_ns >= 0
    has_ended = was_sent & (done_ns >= 0)
    return count_open_spans(sent_ns[was_sent], done_ns[has_ended], at_ns)


# -- dependence on the load ----------------------------------------------------------------------


def find_load_dependence(answers: Sequence[MeasuredAnswer]) -> LoadDependence | None:
    """Return whether more responses are wrong while many other requests are in flight.

    Several thresholds are tried, for example 64 and 128 requests in flight. For each of them, an
    exact test compares the responses above the threshold with responses to the same question below.
    The smallest p-value is multiplied by the number of thresholds (Bonferroni), so that many
    thresholds do not cause more false alarms.

    Return None if the number of requests in flight varies too little for a comparison.
    """
    in_flight = np.array([answer.in_flight for answer in answers], np.int64)
    thresholds = _thresholds_to_compare(in_flight)
    if not thresholds:
        return None

    # Test each threshold.
    p_values = []
    for threshold in thresholds:
        strata = _strata_by_question(answers, is_suspect=in_flight > threshold)
        p_values.append(excess_p_value(strata))

    # The clearest threshold is the one with the smallest p-value.
    clearest_index = int(np.argmin(p_values))
    clearest_threshold = thresholds[clearest_index]
    corrected_p_value = min(1.0, p_values[clearest_index] * len(thresholds))

    below = [answer.scored for answer in answers if answer.in_flight <= clearest_threshold]
    above = [answer.scored for answer in answers if answer.in_flight > clearest_threshold]
    return LoadDependence(
        is_worse=corrected_p_value < ALARM_LEVEL,
        p_value=corrected_p_value,
        in_flight=clearest_threshold,
        below=score_part(below),
        above=score_part(above),
        compared=tuple(thresholds),
    )


def _thresholds_to_compare(in_flight: NDArray[np.int64]) -> list[int]:
    """Return the powers of two that divide the responses into two large enough parts.

    Powers of two, because servers use different code for batches of more than such a size.

    Args:
        in_flight: The number of requests in flight for each response.
    """
    response_count = len(in_flight)
    if response_count == 0:
        return []

    min_part = max(MIN_PART, MIN_PART_SHARE * response_count)
    max_in_flight = int(in_flight.max())

    thresholds = []
    threshold = 1
    while threshold < max_in_flight:
        above_count = int((in_flight > threshold).sum())
        below_count = response_count - above_count
        if min(above_count, below_count) >= min_part:
            thresholds.append(threshold)
        threshold *= 2
    return thresholds


def _strata_by_question(
    answers: Sequence[MeasuredAnswer], is_suspect: NDArray[np.bool_]
) -> Iterator[Stratum]:
    """Yield the numbers of responses and of wrong responses to each question.

    A stratum has the responses to one question, which are as difficult as each other.

    Args:
        answers: The checked responses.
        is_suspect: Whether each response is in the part that may have more wrong responses.
    """
    questions = [answer.scored.question for answer in answers]
    is_wrong = [not answer.scored.is_correct for answer in answers]

    # The numbers of responses by question.
    all_responses: Counter[int] = Counter()
    wrong_responses: Counter[int] = Counter()
    suspect_responses: Counter[int] = Counter()
    wrong_suspect_responses: Counter[int] = Counter()
    for question, wrong, suspect in zip(questions, is_wrong, is_suspect.tolist(), strict=True):
        all_responses[question] += 1
        if wrong:
            wrong_responses[question] += 1
        if suspect:
            suspect_responses[question] += 1
        if wrong and suspect:
            wrong_suspect_responses[question] += 1

    for question in all_responses:
        yield Stratum(
            trials=all_responses[question],
            failures=wrong_responses[question],
            suspect_trials=suspect_responses[question],
            suspect_failures=wrong_suspect_responses[question],
        )


# -- comparison with a reference -----------------------------------------------------------------


def _select_compared_answers(answers: Sequence[ScoredAnswer]) -> list[ScoredAnswer]:
    """Return the first response to each question that can be compared with a reference.

    A sign test needs independent pairs, so further responses to a question do not count.
    """
    answer_by_question: dict[int, ScoredAnswer] = {}
    for answer in answers:
        can_be_compared = answer.agreement is not None and answer.reference_agreement is not None
        if can_be_compared:
            answer_by_question.setdefault(answer.question, answer)

    return list(answer_by_question.values())


def compare_with_reference(answers: Sequence[ScoredAnswer]) -> ReferenceComparison | None:
    """Return whether a server's responses differ from those of a reference server.

    The reference server has responded twice to each question. The agreement of a text is the
    fraction before its first difference from the first reference response. For each question, the
    agreement of the server's response is compared with the agreement of the second reference
    response. If the servers do not differ, either agreement is the larger one in about half of the
    questions, which a sign test checks.

    Args:
        answers: The responses of the server, each with both agreements if they are known.
    """
    compared_answers = _select_compared_answers(answers)
    if not compared_answers:
        return None

    agreements = np.array([answer.agreement for answer in compared_answers], np.float64)
    reference_agreements = np.array(
        [answer.reference_agreement for answer in compared_answers], np.float64
    )

    worse_count = int((agreements < reference_agreements).sum())
    better_count = int((agreements > reference_agreements).sum())
    p_value = sign_test_p_value(worse_count, better_count)
    return ReferenceComparison(
        is_different=p_value < ALARM_LEVEL,
        p_value=p_value,
        questions=len(compared_answers),
        worse=worse_count,
        better=better_count,
        agreement=float(agreements.mean()),
        reference_agreement=float(reference_agreements.mean()),
    )
