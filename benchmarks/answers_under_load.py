"""How often do checked answers find corruption under load, or another model, and how often falsely?

    python benchmarks/answers_under_load.py [--seeds 200]

SIMULATED responses, checked and tested by the code of `loadgen run --check-answers`. A load of the
usual length is a sweep of four concurrencies with 10,000 requests each, or one run of 40,000
requests with 1 to 512 of them in flight. A tenth of the requests ask one of 500 questions. Above
256 requests in flight, 1 % of the responses are corrupted. For the comparison with a reference, 500
prompts with responses of 64 words are sent once. With "own variation", a fifth of all responses
differ from each other without any defect, as those of real servers do. 200 seeds take some minutes.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import rig

from loadgen.core.metrics.answer_scores import (
    AnswerScores,
    MeasuredAnswer,
    compare_with_reference,
    find_load_dependence,
    summarize_answers,
)
from loadgen.core.results.answer_files import RecordedResponse, score_responses
from loadgen.core.workload.known_answers import KnownAnswer
from loadgen.runs.load_point_results import LoadPointResult
from loadgen.runs.sweep_answers import compare_load_points
from loadgen.sim.simulated_answers import AnswerDefects, change_words, simulate_response

# The load
SWEEP_CONCURRENCIES = (64, 128, 256, 512)
REQUESTS_PER_POINT = 10_000
RUN_REQUESTS = 40_000
MAX_IN_FLIGHT = 512
CHECKED_SHARE = 0.1  # of the requests: those that ask a question whose answer is known
QUESTION_COUNT = 500

# The defects of the simulated server
OVERLOAD_IN_FLIGHT = 256  # above so many requests in flight, responses are corrupted
CORRUPTED_SHARE = 0.01
HARD_SHARE = 0.2  # of the questions: those that the model always answers wrongly
ALWAYS_WRONG = AnswerDefects(wrong_share=1.0)

# The comparison with a reference server
RESPONSE_WORDS = 64
VOCABULARY_SIZE = 50_000
NATURAL_VARIATION = 0.2  # of the responses: those that differ without any defect
# The seeds of natural variation differ from those of defects, which count from 0.
FIRST_VARIATION_SEED = 1_000_000

KNOWN_ANSWERS = [
    KnownAnswer(check="exact", row=question + 1, expected=f"{question}")
    for question in range(QUESTION_COUNT)
]


@dataclass(frozen=True)
class ServerDefects:
    """How often a simulated server gives wrong responses.

    Attributes:
        at_any_load: The share of responses that are wrong at any load.
        on_hard_questions: The share of questions that are always answered wrongly.
        under_overload: The share of responses that are wrong if more than OVERLOAD_IN_FLIGHT
            requests are in flight. These are the defects that must be found.
    """

    at_any_load: float = 0.0
    on_hard_questions: float = 0.0
    under_overload: float = 0.0


def simulate_answers(
    in_flight: Sequence[int], defects: ServerDefects, seed: int
) -> list[MeasuredAnswer]:
    """Return simulated answers to known questions, each with the check of whether it is right.

    Args:
        in_flight: The number of requests in flight when each question was sent.
        defects: How often the server is wrong.
        seed: Decides which responses are wrong.
    """
    # The two random choices of wrong responses are independent, so they have different seeds.
    at_any_load = AnswerDefects(wrong_share=defects.at_any_load, seed=2 * seed)
    under_overload = AnswerDefects(
        wrong_share=defects.under_overload, above_in_flight=OVERLOAD_IN_FLIGHT, seed=2 * seed + 1
    )
    hard_question_count = round(defects.on_hard_questions * QUESTION_COUNT)

    responses = []
    for slot, in_flight_count in enumerate(in_flight):
        question = slot % QUESTION_COUNT
        known = KNOWN_ANSWERS[question]
        is_hard = question < hard_question_count
        answer_defects = ALWAYS_WRONG if is_hard else at_any_load
        response = simulate_response(known, question, slot, in_flight_count, answer_defects)

        # A response that is wrong already stays as it is.
        if response.text == known.expected:
            response = simulate_response(known, question, slot, in_flight_count, under_overload)
        responses.append(response)

    scores = score_responses(KNOWN_ANSWERS, responses)
    return [
        MeasuredAnswer(scored_response, in_flight_count)
        for scored_response, in_flight_count in zip(scores.scored, in_flight, strict=True)
    ]


def is_load_dependence_found_in_run(defects: ServerDefects, seed: int) -> bool:
    """Return whether one run at a varying load finds more wrong answers at higher loads."""
    checked_count = int(RUN_REQUESTS * CHECKED_SHARE)
    rng = np.random.default_rng(2 * seed)
    in_flight = rng.integers(1, MAX_IN_FLIGHT + 1, checked_count).tolist()

    answers = simulate_answers(in_flight, defects, seed)
    dependence = find_load_dependence(answers)
    return dependence is not None and dependence.is_worse


def is_load_dependence_found_in_sweep(defects: ServerDefects, seed: int) -> bool:
    """Return whether a sweep over several loads finds more wrong answers at higher loads."""
    checked_per_point = int(REQUESTS_PER_POINT * CHECKED_SHARE)
    in_flight = np.repeat(SWEEP_CONCURRENCIES, checked_per_point).tolist()
    answers = simulate_answers(in_flight, defects, seed)

    load_points = []
    for concurrency in SWEEP_CONCURRENCIES:
        answers_of_point = [answer for answer in answers if answer.in_flight == concurrency]
        load_points.append(create_load_point(concurrency, summarize_answers(answers_of_point)))

    comparison = compare_load_points(load_points)
    return comparison is not None and comparison.is_worse


def create_load_point(concurrency: int, answers: AnswerScores) -> LoadPointResult:
    """Return a load point of a sweep of which only the checked answers are known."""
    return LoadPointResult(
        name=f"c{concurrency}",
        load_label=f"{concurrency} in flight",
        load_value=float(concurrency),
        ok=REQUESTS_PER_POINT,
        failed=0,
        requests_per_s=None,
        output_per_s=None,
        per_gpu=None,
        slo_attainment=None,
        slo_met=None,
        valid=True,
        state="finished",
        simulated=True,
        answers=answers,
    )


def is_difference_found(changed_share: float, natural_variation: float, seed: int) -> bool:
    """Return whether a server's responses are found to differ from those of a reference server.

    Args:
        changed_share: The share of words that the model of the server chooses differently.
        natural_variation: The share of responses that differ without a defect, on both servers.
        seed: Decides all texts and differences.
    """
    rng = np.random.default_rng(seed)
    known_answers = []
    responses = []
    for question in range(QUESTION_COUNT):
        word_numbers = rng.integers(0, VOCABULARY_SIZE, RESPONSE_WORDS)
        text = " ".join(f"w{number}" for number in word_numbers)

        # The reference server has answered each question twice, which shows its own variation.
        first_reference = vary_response(text, rng, natural_variation, question)
        second_reference = vary_response(text, rng, natural_variation, question)
        references = (first_reference, second_reference)
        known = KnownAnswer(check="similarity", row=question + 1, references=references)
        known_answers.append(known)

        response_text = vary_response(text, rng, natural_variation, question)
        if changed_share:
            response_text = change_words(response_text, changed_share, seed, question)
        responses.append(RecordedResponse(slot=question, question=question, text=response_text))

    scores = score_responses(known_answers, responses)
    comparison = compare_with_reference(scores.scored)
    return comparison is not None and comparison.is_different


def vary_response(text: str, rng: np.random.Generator, share: float, question: int) -> str:
    """Return the response of the same server to the same question at another time.

    With the probability `share`, the words after a random position differ from `text`.
    """
    is_unchanged = rng.random() >= share
    if is_unchanged:
        return text

    seed = FIRST_VARIATION_SEED + int(rng.integers(0, 2**31))
    changed_words_share = 2 / RESPONSE_WORDS
    return change_words(text, changed_words_share, seed, question)


class DetectionCase(Protocol):
    """One row of the table: a simulated server, and a test that looks for its defect."""

    @property
    def defect(self) -> str:
        """The defect of the server in words, "nothing" if it has none."""

    @property
    def load(self) -> str:
        """The requests with which the test looks for the defect, in words."""

    @property
    def must_be_found(self) -> bool:
        """Whether the test has to find something. Otherwise, what it finds is a false alarm."""

    def is_found(self, seed: int) -> bool:
        """Return whether the test finds something. The seed decides which responses are wrong."""


@dataclass(frozen=True)
class LoadCase:
    """A test for wrong answers that are more frequent at higher loads.

    It runs in one run at a varying load or, with `is_sweep`, in a sweep over several loads.
    """

    defect: str
    defects: ServerDefects
    is_sweep: bool

    @property
    def load(self) -> str:
        """The kind of load."""
        return "sweep" if self.is_sweep else "one run"

    @property
    def must_be_found(self) -> bool:
        """Whether wrong answers are more frequent at higher loads."""
        return self.defects.under_overload > 0

    def is_found(self, seed: int) -> bool:
        """Return whether more wrong answers at higher loads are found."""
        if self.is_sweep:
            return is_load_dependence_found_in_sweep(self.defects, seed)
        return is_load_dependence_found_in_run(self.defects, seed)


@dataclass(frozen=True)
class ReferenceCase:
    """A test for responses that differ from those of a reference server.

    Attributes:
        defect: The defect of the server in words.
        changed_share: The share of words that the model of the server chooses differently.
        natural_variation: The share of responses that differ without a defect, on both servers.
        load: The requests of the test in words.
    """

    defect: str
    changed_share: float
    natural_variation: float
    load: str = f"{QUESTION_COUNT} prompts"

    @property
    def must_be_found(self) -> bool:
        """Whether the server chooses other words than the reference server."""
        return self.changed_share > 0

    def is_found(self, seed: int) -> bool:
        """Return whether the responses are found to differ."""
        return is_difference_found(self.changed_share, self.natural_variation, seed)


SERVER_DEFECTS = {
    "1 % corrupted above 256": ServerDefects(under_overload=CORRUPTED_SHARE),
    "1 % above 256, 20 % of questions too hard": ServerDefects(
        on_hard_questions=HARD_SHARE, under_overload=CORRUPTED_SHARE
    ),
    "1 % above 256, 1 % at every load": ServerDefects(
        at_any_load=0.01, under_overload=CORRUPTED_SHARE
    ),
    "3 % above 256, 1 % at every load": ServerDefects(
        at_any_load=0.01, under_overload=3 * CORRUPTED_SHARE
    ),
    "nothing": ServerDefects(),
    "20 % of questions too hard": ServerDefects(on_hard_questions=HARD_SHARE),
    "1 % at every load": ServerDefects(at_any_load=0.01),
}

# The share of words that a server chooses differently than the reference server
CHANGED_SHARES = {
    "another model": 1.0,
    "1 % of words flipped": 0.01,
    "0.3 % of words flipped": 0.003,
    "nothing": 0.0,
}


def list_load_cases() -> Iterator[LoadCase]:
    """Yield a case for each kind of load and each server in SERVER_DEFECTS."""
    for is_sweep in (False, True):
        for description, defects in SERVER_DEFECTS.items():
            yield LoadCase(description, defects, is_sweep)


def list_reference_cases() -> Iterator[ReferenceCase]:
    """Yield a case for each share of changed words, without and with natural variation."""
    for natural_variation in (0.0, NATURAL_VARIATION):
        suffix = ", own variation" if natural_variation else ""
        for description, changed_share in CHANGED_SHARES.items():
            yield ReferenceCase(description + suffix, changed_share, natural_variation)


def format_row(case: DetectionCase, is_found: Sequence[bool]) -> list[str]:
    """Return the row of a case; `is_found` has the result of each seed."""
    kind = "found" if case.must_be_found else "false alarms"
    return [case.defect, case.load, kind, f"{sum(is_found)} of {len(is_found)}"]


def main() -> None:
    """Print how often each defect is found, and how often one is found that is not there."""
    parser = rig.create_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    args = rig.parse_arguments(parser, seeds=2)

    cases: list[DetectionCase] = [*list_load_cases(), *list_reference_cases()]
    rows = []
    with multiprocessing.Pool(args.jobs) as pool:
        for case in cases:
            is_found = pool.map(case.is_found, range(args.seeds), chunksize=1)
            rows.append(format_row(case, is_found))
    print(rig.format_table(["defect", "load", "", "seeds"], rows))


if __name__ == "__main__":
    main()
