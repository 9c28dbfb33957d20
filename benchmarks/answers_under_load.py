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
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

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

QUESTIONS = 500
LEVEL = 256
CORRUPTED_SHARE = 0.01
SWEEP_CONCURRENCIES = (64, 128, 256, 512)
REQUESTS_PER_POINT = 10_000
RUN_REQUESTS = 40_000
MAX_IN_FLIGHT = 512
CHECK_SHARE = 0.1
HARD_SHARE = 0.2
"""The share of questions that the model always answers wrongly."""
ALWAYS_WRONG = AnswerDefects(wrong_share=1.0)
RESPONSE_WORDS = 64
VOCABULARY_SIZE = 50_000
NATURAL_VARIATION = 0.2
"""The share of responses that differ from those of the same server without any defect."""
FIRST_VARIATION_SEED = 1_000_000
"""Seeds of own variation differ from those of defects, which count from 0."""

KNOWN = [KnownAnswer(check="exact", row=row + 1, expected=f"{row}") for row in range(QUESTIONS)]


class Defects(NamedTuple):
    """The defects of a server: errors at every load, hard questions, and errors above LEVEL only.

    The first `hard_questions` questions are always answered wrongly.
    """

    always: AnswerDefects
    hard_questions: int
    above_level: AnswerDefects


def create_defects(
    always_share: float, hard_share: float, above_share: float, seed: int
) -> Defects:
    """Return the defects of a simulated server.

    Args:
        always_share: The share of responses that are wrong at any load.
        hard_share: The share of questions that are always answered wrongly.
        above_share: The share of responses that are wrong above LEVEL requests in flight.
        seed: Decides which responses are wrong.
    """
    # The two random choices of wrong responses are independent of each other.
    seed_at_any_load = 2 * seed
    seed_above_level = 2 * seed + 1

    return Defects(
        always=AnswerDefects(wrong_share=always_share, seed=seed_at_any_load),
        hard_questions=round(hard_share * QUESTIONS),
        above_level=AnswerDefects(
            wrong_share=above_share, above_in_flight=LEVEL, seed=seed_above_level
        ),
    )


def measure_responses(in_flight: list[int], defects: Defects) -> list[MeasuredAnswer]:
    """Return simulated responses after a check of whether each response is right.

    Args:
        in_flight: The number of requests in flight when each request was sent.
        defects: How often, and from which load on, responses are wrong.
    """
    responses = []
    for slot, in_flight_count in enumerate(in_flight):
        question = slot % QUESTIONS
        known = KNOWN[question]

        is_hard = question < defects.hard_questions
        defects_at_any_load = ALWAYS_WRONG if is_hard else defects.always
        response = simulate_response(known, question, slot, in_flight_count, defects_at_any_load)

        is_right = response.text == known.expected
        if is_right:
            response = simulate_response(
                known, question, slot, in_flight_count, defects.above_level
            )
        responses.append(response)

    outcomes = score_responses(KNOWN, responses)
    return [
        MeasuredAnswer(scored, in_flight_count)
        for scored, in_flight_count in zip(outcomes.scored, in_flight, strict=True)
    ]


def finds_in_run(defects: Defects) -> bool:
    """Return whether one run with a varying load finds more wrong responses at higher loads."""
    checked_count = int(RUN_REQUESTS * CHECK_SHARE)
    rng = np.random.default_rng(defects.always.seed)
    in_flight = rng.integers(1, MAX_IN_FLIGHT + 1, checked_count).tolist()

    answers = measure_responses(in_flight, defects)
    dependence = find_load_dependence(answers)
    return dependence is not None and dependence.is_worse


def finds_in_sweep(defects: Defects) -> bool:
    """Return whether a sweep over several loads finds more wrong responses at higher loads."""
    checked_per_point = int(REQUESTS_PER_POINT * CHECK_SHARE)
    in_flight: list[int] = []
    for concurrency in SWEEP_CONCURRENCIES:
        in_flight += [concurrency] * checked_per_point
    answers = measure_responses(in_flight, defects)

    points = []
    for concurrency in SWEEP_CONCURRENCIES:
        answers_of_point = [answer for answer in answers if answer.in_flight == concurrency]
        points.append(create_point(concurrency, summarize_answers(answers_of_point)))

    comparison = compare_load_points(points)
    return comparison is not None and comparison.is_worse


def create_point(concurrency: int, answers: AnswerScores) -> LoadPointResult:
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


def differs_from_reference(changed_share: float, natural_variation: float, seed: int) -> bool:
    """Return whether a test finds that a server's responses differ from a reference server's.

    Args:
        changed_share: The fraction of words that the model of the server chooses differently.
        natural_variation: The fraction of responses that differ without a defect, on both servers.
        seed: Decides all texts and differences.
    """
    rng = np.random.default_rng(seed)
    known_answers = []
    responses = []
    for question in range(QUESTIONS):
        word_numbers = rng.integers(0, VOCABULARY_SIZE, RESPONSE_WORDS)
        text = " ".join(f"w{number}" for number in word_numbers)

        first_reference = vary(text, rng, natural_variation, question)
        second_reference = vary(text, rng, natural_variation, question)
        references = (first_reference, second_reference)
        known = KnownAnswer(check="similarity", row=question + 1, references=references)
        known_answers.append(known)

        response_text = vary(text, rng, natural_variation, question)
        if changed_share:
            response_text = change_words(response_text, changed_share, seed, question)
        response = RecordedResponse(slot=question, question=question, text=response_text)
        responses.append(response)

    outcomes = score_responses(known_answers, responses)
    comparison = compare_with_reference(outcomes.scored)
    return comparison is not None and comparison.is_different


def vary(text: str, rng: np.random.Generator, share: float, question: int) -> str:
    """Return the response of the same server to the same question at another time.

    With the probability `share`, the words after a random position differ from `text`.
    """
    is_unchanged = rng.random() >= share
    if is_unchanged:
        return text

    seed = FIRST_VARIATION_SEED + int(rng.integers(0, 2**31))
    changed_words_share = 2 / RESPONSE_WORDS
    return change_words(text, changed_words_share, seed, question)


class Case(NamedTuple):
    """One row of the result: what was planted, and a function of the seed that looks for it."""

    planted: str
    load: str
    is_defect: bool
    finds: Callable[[int], bool]


def list_load_cases() -> Iterator[Case]:
    """Yield a case for each kind of load and each set of defects of a simulated server.

    Only wrong responses above a load are a defect to find. Others must not cause an alarm.
    """
    finds_in_load = {"one run": finds_in_run, "sweep": finds_in_sweep}
    for load, finds_defects in finds_in_load.items():
        for planted, defects_of_seed in PLANTED_DEFECTS.items():
            example = defects_of_seed(0)
            is_defect = example.above_level.wrong_share > 0
            finds = partial(find_planted, finds_defects, defects_of_seed)
            yield Case(planted, load, is_defect, finds)


def find_planted(
    finds: Callable[[Defects], bool], defects_of_seed: Callable[[int], Defects], seed: int
) -> bool:
    """Return whether a load shows the defects of a seed."""
    return finds(defects_of_seed(seed))


PLANTED_DEFECTS: dict[str, Callable[[int], Defects]] = {
    "1 % corrupted above 256": partial(create_defects, 0.0, 0.0, CORRUPTED_SHARE),
    "1 % above 256, 20 % of questions too hard": partial(
        create_defects, 0.0, HARD_SHARE, CORRUPTED_SHARE
    ),
    "1 % above 256, 1 % at every load": partial(create_defects, 0.01, 0.0, CORRUPTED_SHARE),
    "3 % above 256, 1 % at every load": partial(create_defects, 0.01, 0.0, 3 * CORRUPTED_SHARE),
    "nothing": partial(create_defects, 0.0, 0.0, 0.0),
    "20 % of questions too hard": partial(create_defects, 0.0, HARD_SHARE, 0.0),
    "1 % at every load": partial(create_defects, 0.01, 0.0, 0.0),
}
"""What is planted in a load, as a function of the seed."""

CHANGED_SHARES = {
    "another model": 1.0,
    "1 % of words flipped": 0.01,
    "0.3 % of words flipped": 0.003,
    "nothing": 0.0,
}
"""The fraction of words that another server chooses differently."""


def list_reference_cases() -> Iterator[Case]:
    """Yield a case for each share of words that differ from those of a reference server.

    The cases are repeated for servers whose responses also differ without any defect.
    """
    for natural_variation in (0.0, NATURAL_VARIATION):
        suffix = ", own variation" if natural_variation else ""
        for planted, changed_share in CHANGED_SHARES.items():
            is_defect = changed_share > 0
            finds = partial(differs_from_reference, changed_share, natural_variation)
            yield Case(planted + suffix, "500 prompts", is_defect, finds)


def main() -> None:
    """Print how often each planted defect is found, and how often one is found without any."""
    parser = rig.create_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    args = rig.parse_arguments(parser, seeds=2)

    cases = [*list_load_cases(), *list_reference_cases()]
    seeds = range(args.seeds)
    rows = []
    with multiprocessing.Pool(args.jobs) as pool:
        for case in cases:
            outcomes = pool.map(case.finds, seeds, chunksize=1)
            found_count = sum(outcomes)
            kind = "found" if case.is_defect else "false alarms"
            rows.append([case.planted, case.load, kind, f"{found_count} of {args.seeds}"])
    print(rig.format_table(["planted", "load", "", "seeds"], rows))


if __name__ == "__main__":
    main()
