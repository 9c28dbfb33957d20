"""Score an answer: against a reference, by its form, and against the answer of another endpoint.

ROUGE is that of the package `rouge_score` with stemming, which MLPerf's accuracy check of Llama 2
70B uses through `evaluate` (mlcommons/inference, language/llama2-70b/evaluate-accuracy.py). Edit
similarity is rapidfuzz's.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from loadgen.core.errors import not_installed

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
        scores["exact"] = float(_normalize(answer) == _normalize(reference))

    if wants_json:
        scores["json"] = float(is_json(answer))

    return scores


def score_pair(first: str, second: str) -> dict[str, float]:
    """Return how similar two answers to one prompt are, by the keys in NAMES.

    Tokens are words and punctuation marks here, because two endpoints need not share token ids.
    """
    first_tokens = _split_tokens(first)
    second_tokens = _split_tokens(second)
    longer = max(len(first_tokens), len(second_tokens))
    agreed = _common_prefix_length(first_tokens, second_tokens)

    return {
        "equal": float(first == second),
        "agreement": float(agreed),
        "agreement_share": agreed / longer if longer else 1.0,
        "similarity": _edit_similarity(first, second),
    }


STATED_CHOICE = re.compile(r"(?i:answer|choice|option)\W{0,3}(?:is)?\W{0,3}\b([A-J])\b")
"""A letter after one of three words, with "is" and up to three other characters between them."""
LONE_CHOICE = re.compile(r"(?<![A-Za-z'])([A-J])(?![A-Za-z'])")
"""A letter that is no part of a word, nor of a contraction such as "I'd"."""


def find_choice(answer: str) -> str:
    """Return the letter that an answer chooses, or "" if there is none.

    Choices are the letters from A to J, as in MMLU-Pro. The answer is the letter after "answer",
    "choice" or "option", as in "The answer is (B)", or else the first letter that stands alone.
    """
    match = STATED_CHOICE.search(answer) or LONE_CHOICE.search(answer)
    return "" if match is None else match[1]


def is_json(answer: str) -> bool:
    """Return True if the whole answer is JSON. A Markdown fence around it is ignored."""
    fenced = re.fullmatch(r"\s*```(?:json)?\s*\n(.*?)\n?```\s*", answer, re.DOTALL)
    try:
        json.loads(answer if fenced is None else fenced[1])
    except (ValueError, RecursionError):
        return False
    return True


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


def _common_prefix_length(first: list[str], second: list[str]) -> int:
    for index, (first_token, second_token) in enumerate(zip(first, second, strict=False)):
        if first_token != second_token:
            return index
    return min(len(first), len(second))


def _normalize(text: str) -> str:
    return " ".join(text.split()).strip(" .").casefold()


def _split_tokens(text: str) -> list[str]:
    return re.findall(r"\w+|[^\w\s]", text)
