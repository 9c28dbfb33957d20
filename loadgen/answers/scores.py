"""Score an answer: against a reference, by its form, and against the answer of another endpoint.

ROUGE is that of the package `rouge_score` with stemming, which MLPerf's accuracy check of Llama 2
70B uses through `evaluate` (mlcommons/inference, language/llama2-70b/evaluate-accuracy.py). Edit
similarity is rapidfuzz's.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from loadgen.core.errors import not_installed
from loadgen.core.workload.answer_checks import (
    common_prefix_length,
    find_choice,
    is_json,
    normalize_text,
    split_words,
)

ROUGE = {"rouge1": "ROUGE-1", "rouge2": "ROUGE-2", "rougeL": "ROUGE-L"}
EXACT = "exact"
CHOICE = "choice"
JSON = "json"
EQUAL = "equal"
AGREEMENT = "agreement"
AGREEMENT_SHARE = "agreement_share"
SIMILARITY = "similarity"
NAMES = {
    **ROUGE,
    EXACT: "exact match",
    CHOICE: "right choice",
    JSON: "valid JSON",
    EQUAL: "equal responses",
    AGREEMENT: "tokens before first difference",
    AGREEMENT_SHARE: "fraction before first difference",
    SIMILARITY: "edit similarity",
}
"""The names of the scores. All are from 0 to 1, except `agreement`, which is a number of tokens."""

REFERENCE_SCORES = (*ROUGE, EXACT, CHOICE, JSON)
PAIR_SCORES = (EQUAL, AGREEMENT, AGREEMENT_SHARE, SIMILARITY)
TOKEN_COUNTS = (AGREEMENT,)
BINARY_SCORES = (EXACT, CHOICE, JSON, EQUAL)
"""Scores that are 0 or 1 for each answer."""

HOME_VARIABLE = "HOME"
"""The environment variable with the path of the user's home directory."""


def score_against_reference(
    answer: str, reference: str | None, *, is_choice: bool = False, wants_json: bool = False
) -> dict[str, float]:
    """Return the scores of an answer from 0 to 1, such as {"choice": 1.0, "json": 0.0}.

    Args:
        answer: The answer of a model.
        reference: A right answer, or None if no right answer is known.
        is_choice: True if the reference is the letter of a choice, such as "B".
        wants_json: True if the answer has to be JSON.
    """
    scores: dict[str, float] = {}

    if reference is not None and is_choice:
        is_right_choice = find_choice(answer) == reference.strip().upper()
        scores[CHOICE] = float(is_right_choice)
    elif reference is not None:
        rouge_scores = _rouge_scorer().score(reference, answer)
        for rouge_name, rouge_score in rouge_scores.items():
            scores[rouge_name] = rouge_score.fmeasure
        is_exact_match = normalize_text(answer) == normalize_text(reference)
        scores[EXACT] = float(is_exact_match)

    if wants_json:
        scores[JSON] = float(is_json(answer))

    return scores


def score_pair(first: str, second: str) -> dict[str, float]:
    """Return how similar two answers to one prompt are.

    The agreement is the number of words and punctuation marks before the first difference. For
    example, "a b c d" and "a b x" have an agreement of 2 and an agreement share of 2 / 4.
    """
    first_words = split_words(first)
    second_words = split_words(second)

    agreement = common_prefix_length(first_words, second_words)
    longer_length = max(len(first_words), len(second_words))
    agreement_share = agreement / longer_length if longer_length else 1.0

    return {
        EQUAL: float(first == second),
        AGREEMENT: float(agreement),
        AGREEMENT_SHARE: agreement_share,
        SIMILARITY: _edit_similarity(first, second),
    }


@cache
def _rouge_scorer() -> Any:
    """Return the ROUGE scorer of the package `rouge_score`.

    ROUGE measures how many words of a reference a text repeats.

    Raises:
        UserError: The package is not installed.
    """
    try:
        # The package imports nltk, which looks for its data in the home directory.
        with _home_directory():
            from rouge_score.rouge_scorer import RougeScorer
    except ImportError:
        problem = "scoring references needs the package rouge_score"
        raise not_installed(problem, "rouge_score", "loadgen answers", "answers") from None

    rouge_names = list(ROUGE)
    return RougeScorer(rouge_names, use_stemmer=True)


@contextmanager
def _home_directory() -> Iterator[None]:
    """Set the environment variable HOME inside a `with` block, if the user has no home directory.

    A user in a container may have no home directory. The import of nltk would fail then.
    """
    # Without a home directory, "~" stays as it is.
    has_home = os.path.expanduser("~") != "~"
    if has_home:
        yield
        return

    os.environ[HOME_VARIABLE] = os.sep
    try:
        yield
    finally:
        del os.environ[HOME_VARIABLE]


def _edit_similarity(first: str, second: str) -> float:
    """Return how similar two texts are, from 0 to 1, by their edit distance (Levenshtein).

    Raises:
        UserError: The package `rapidfuzz` is not installed.
    """
    try:
        from rapidfuzz.distance import Levenshtein
    except ImportError:
        problem = "comparing responses needs the package rapidfuzz"
        raise not_installed(problem, "rapidfuzz", "loadgen answers", "answers") from None

    return float(Levenshtein.normalized_similarity(first, second))
