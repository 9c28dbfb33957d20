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
NAMES = {
    **ROUGE,
    "exact": "exact match",
    "choice": "right choice",
    "json": "valid JSON",
    "equal": "equal responses",
    "agreement": "tokens before first difference",
    "agreement_share": "fraction before first difference",
    "similarity": "edit similarity",
}
"""The names of the scores. All are from 0 to 1, except `agreement`, which is a number of tokens."""

REFERENCE_SCORES = (*ROUGE, "exact", "choice", "json")
PAIR_SCORES = ("equal", "agreement", "agreement_share", "similarity")
TOKEN_COUNTS = ("agreement",)
BINARY_SCORES = ("exact", "choice", "json", "equal")
"""Scores that are 0 or 1 for each answer."""


def score_against_reference(
    answer: str, reference: str | None, *, is_choice: bool = False, wants_json: bool = False
) -> dict[str, float]:
    """Return the scores that apply to an answer, by their keys in NAMES.

    Args:
        answer: The answer.
        reference: A right answer, or None if none is known.
        is_choice: True if the reference is the letter of a choice.
        wants_json: True if JSON was requested.
    """
    scores: dict[str, float] = {}
    if reference is not None and is_choice:
        scores["choice"] = float(find_choice(answer) == reference.strip().upper())
    elif reference is not None:
        rouge = _rouge_scorer().score(reference, answer)
        scores.update({name: score.fmeasure for name, score in rouge.items()})
        scores["exact"] = float(normalize_text(answer) == normalize_text(reference))

    if wants_json:
        scores["json"] = float(is_json(answer))

    return scores


def score_pair(first: str, second: str) -> dict[str, float]:
    """Return how similar two answers to one prompt are, by the keys in NAMES.

    Tokens are words and punctuation marks here, because two endpoints need not share token ids.
    """
    first_tokens = split_words(first)
    second_tokens = split_words(second)
    longer = max(len(first_tokens), len(second_tokens))
    agreed = common_prefix_length(first_tokens, second_tokens)

    return {
        "equal": float(first == second),
        "agreement": float(agreed),
        "agreement_share": agreed / longer if longer else 1.0,
        "similarity": _edit_similarity(first, second),
    }


@cache
def _rouge_scorer() -> Any:
    """Return the scorer of the package `rouge_score`, which is loaded once.

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
    return RougeScorer(list(ROUGE), use_stemmer=True)


@contextmanager
def _home_directory() -> Iterator[None]:
    """Set HOME to the root directory in the block if the user has no home directory.

    Some containers run as such a user, for whom the import of nltk fails.
    """
    has_home = os.path.expanduser("~") != "~"
    if has_home:
        yield
        return

    os.environ["HOME"] = os.sep
    try:
        yield
    finally:
        del os.environ["HOME"]


def _edit_similarity(first: str, second: str) -> float:
    try:
        from rapidfuzz.distance import Levenshtein
    except ImportError:
        problem = "comparing responses needs the package rapidfuzz"
        raise not_installed(problem, "rapidfuzz", "loadgen answers", "answers") from None
    return float(Levenshtein.normalized_similarity(first, second))
