"""Score the checked answers of a run: the share that is right, and how it depends on the load.

Pure. The responses are those of the measured load, so each has a number of requests in flight when
it was sent. A server that corrupts responses under load answers the same questions worse above some
number in flight than below it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from loadgen.core.results.answer_files import ScoredAnswer
from loadgen.core.results.record import STATUS
from loadgen.core.stats.excess_test import Stratum, excess_p_value, sign_test_p_value
from loadgen.core.stats.intervals import wilson_interval

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
    """

    overall: ScorePart
    questions: int
    checks: tuple[ScorePart, ...] = ()
    load_dependence: LoadDependence | None = None
    reference: ReferenceComparison | None = None
    checked_by_question: str = ""
    wrong_by_question: str = ""


class MeasuredAnswer(NamedTuple):
    """A checked response, and how many requests were in flight when its request was sent."""

    scored: ScoredAnswer
    in_flight: int


def score_part(answers: Sequence[ScoredAnswer], name: str = "") -> ScorePart:
    """Return the share of right responses with its 95 % interval."""
    return score_counts(len(answers), sum(answer.is_correct for answer in answers), name)


def score_counts(checked: int, correct: int, name: str = "") -> ScorePart:
    """Return the share `correct / checked` with its 95 % interval."""
    if checked == 0:
        return ScorePart(name=name, checked=0, correct=0, score=None, low=None, high=None)

    score = correct / checked
    low, high = wilson_interval(score, checked)

    # Rounding errors would leave these ends slightly inside of the range.
    low = 0.0 if correct == 0 else low
    high = 1.0 if correct == checked else high
    return ScorePart(name=name, checked=checked, correct=correct, score=score, low=low, high=high)


def summarize_answers(answers: Sequence[MeasuredAnswer]) -> AnswerScores:
    """Return the scores of checked responses, in all, by check and by question."""
    scored = [answer.scored for answer in answers]
    wrong = [answer for answer in scored if not answer.is_correct]
    questions = {answer.question for answer in scored}

    answers_by_check: dict[str, list[ScoredAnswer]] = {}
    for answer in scored:
        answers_by_check.setdefault(answer.check, []).append(answer)

    return AnswerScores(
        overall=score_part(scored),
        questions=len(questions),
        checks=tuple(score_part(part, check) for check, part in answers_by_check.items()),
        load_dependence=find_load_dependence(answers),
        reference=compare_with_reference(scored),
        checked_by_question=_count_by_question(scored),
        wrong_by_question=_count_by_question(wrong),
    )


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
    """Return the checked ok responses of measured stages, with the requests in flight at the send.

    Args:
        scored_answers: The outcomes of all checks of a run.
        rows: The records of all requests. A slot is the number of a request in the schedule.
        measured_stages: The indexes of the measured stages.
    """
    slots = rows["slot"]
    sent_ns = rows["sent_ns"]
    is_measured = np.isin(rows["stage"], measured_stages)
    is_ok = rows["status"] == STATUS["ok"]
    is_checked = np.isin(slots, [answer.slot for answer in scored_answers])

    selected = np.flatnonzero(is_measured & is_ok & is_checked)
    selected_slots = slots[selected].tolist()
    selected_times_ns = sent_ns[selected].tolist()
    sent_ns_of_slot = dict(zip(selected_slots, selected_times_ns, strict=True))

    measured = [answer for answer in scored_answers if answer.slot in sent_ns_of_slot]
    times_ns = np.array([sent_ns_of_slot[answer.slot] for answer in measured], np.int64)
    in_flight = count_in_flight(sent_ns, rows["done_ns"], times_ns)
    return [
        MeasuredAnswer(answer, int(count))
        for answer, count in zip(measured, in_flight, strict=True)
    ]


def count_in_flight(
    sent_ns: NDArray[np.int64], done_ns: NDArray[np.int64], at_ns: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return how many requests were in flight at each of some times.

    A request is in flight from the time at which it was sent until its response has ended.
    """
    was_sent = sent_ns >= 0  # -1 for a request that was never sent
    has_ended = was_sent & (done_ns >= 0)  # -1 for a request without an end
    starts = np.sort(sent_ns[was_sent])
    ends = np.sort(done_ns[has_ended])

    started = np.searchsorted(starts, at_ns, side="right")
    ended = np.searchsorted(ends, at_ns, side="right")
    return (started - ended).astype(np.int64)


# -- dependence on the load ----------------------------------------------------------------------


def find_load_dependence(answers: Sequence[MeasuredAnswer]) -> LoadDependence | None:
    """Return whether responses are worse above some number of requests in flight than below it.

    Return None if the number in flight did not vary enough. Only responses to the same question are
    compared, so that questions of different difficulty cannot cause an alarm.
    """
    in_flight = np.array([answer.in_flight for answer in answers], np.int64)
    levels = _levels_to_compare(in_flight)
    if not levels:
        return None

    p_values = []
    for level in levels:
        strata = _strata_by_question(answers, in_flight > level)
        p_values.append(excess_p_value(strata))

    # With several tests, the smallest p-value is multiplied by their number (Bonferroni).
    clearest = int(np.argmin(p_values))
    level = levels[clearest]
    p_value = min(1.0, p_values[clearest] * len(levels))

    return LoadDependence(
        is_worse=p_value < ALARM_LEVEL,
        p_value=p_value,
        in_flight=level,
        below=score_part([answer.scored for answer in answers if answer.in_flight <= level]),
        above=score_part([answer.scored for answer in answers if answer.in_flight > level]),
        compared=tuple(levels),
    )


def _levels_to_compare(in_flight: NDArray[np.int64]) -> list[int]:
    """Return the numbers in flight that divide the responses into two large enough parts.

    They are powers of two, at which inference engines change their way of computing.
    """
    if not len(in_flight):
        return []

    min_part = max(MIN_PART, MIN_PART_SHARE * len(in_flight))
    levels = []
    level = 1
    while level < int(in_flight.max()):
        above = int((in_flight > level).sum())
        below = len(in_flight) - above
        if min(above, below) >= min_part:
            levels.append(level)
        level *= 2

    return levels


def _strata_by_question(
    answers: Sequence[MeasuredAnswer], is_suspect: NDArray[np.bool_]
) -> Iterator[Stratum]:
    """Yield the responses to each question, divided into a suspected part and the rest."""
    counts: dict[int, list[int]] = {}
    for answer, suspect in zip(answers, is_suspect.tolist(), strict=True):
        question_counts = counts.setdefault(answer.scored.question, [0, 0, 0, 0])
        is_failure = not answer.scored.is_correct
        question_counts[0] += 1
        question_counts[1] += is_failure
        question_counts[2] += suspect
        question_counts[3] += suspect and is_failure

    for trials, failures, suspect_trials, suspect_failures in counts.values():
        yield Stratum(trials, failures, suspect_trials, suspect_failures)


# -- comparison with a reference -----------------------------------------------------------------


def compare_with_reference(answers: Sequence[ScoredAnswer]) -> ReferenceComparison | None:
    """Return how responses compare with two responses of a reference endpoint to each question.

    If the servers do not differ, the response agrees with the first reference response more than
    the second reference response does in half of the cases, which a sign test checks.
    """
    # The test needs independent cases, so only the first response to each question counts.
    first_answers: dict[int, ScoredAnswer] = {}
    for answer in answers:
        if answer.agreement is not None and answer.reference_agreement is not None:
            first_answers.setdefault(answer.question, answer)

    if not first_answers:
        return None

    agreements = np.array([answer.agreement for answer in first_answers.values()], np.float64)
    reference_agreements = np.array(
        [answer.reference_agreement for answer in first_answers.values()], np.float64
    )

    worse = int((agreements < reference_agreements).sum())
    better = int((agreements > reference_agreements).sum())
    p_value = sign_test_p_value(worse, better)
    return ReferenceComparison(
        is_different=p_value < ALARM_LEVEL,
        p_value=p_value,
        questions=len(first_answers),
        worse=worse,
        better=better,
        agreement=float(agreements.mean()),
        reference_agreement=float(reference_agreements.mean()),
    )
