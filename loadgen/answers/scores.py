"""Scores of one answer: against a reference, on its own, and against another endpoint's. Pure.

ROUGE is that of the package `rouge_score` with stemming, which MLPerf's accuracy check of Llama 2 70B uses through
`evaluate` (mlcommons/inference, language/llama2-70b/evaluate-accuracy.py); edit similarity is rapidfuzz's.
"""

from __future__ import annotations

import json
import os
import re
from functools import cache
from typing import Any

from loadgen.core.errors import not_installed

ROUGE = {"rouge1": "ROUGE-1", "rouge2": "ROUGE-2", "rougeL": "ROUGE-L"}
NAMES = ROUGE | {
    "exact": "exact match",
    "choice": "right choice",
    "json": "valid JSON",
    "equal": "equal answers",
    "agreement": "tokens until they differ",
    "agreement_share": "share of the answer until they differ",
    "similarity": "edit similarity",
}
"""Key of a score -> its name. Every score but `agreement`, a number of tokens, is from 0 to 1."""

AGAINST_REFERENCE = (*ROUGE, "exact", "choice", "json")
AGAINST_EACH_OTHER = ("equal", "agreement", "agreement_share", "similarity")
COUNTS = ("agreement",)  # of tokens
SHARES = ("exact", "choice", "json", "equal")  # of each answer 0 or 1


@cache
def _rouge() -> Any:
    # nltk, with which it stems, does not let itself be imported by a user without a home, as in a container.
    is_homeless = os.path.expanduser("~") == "~"
    if is_homeless:
        os.environ["HOME"] = os.sep
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError:
        what = "references are scored with the package rouge_score"
        raise not_installed(what, "rouge_score", "loadgen answers", "answers") from None
    finally:
        if is_homeless:
            del os.environ["HOME"]
    return RougeScorer(list(ROUGE), use_stemmer=True)


def _edit_similarity(a: str, b: str) -> float:
    try:
        from rapidfuzz.distance import Levenshtein
    except ImportError:
        what = "answers are compared with the package rapidfuzz"
        raise not_installed(what, "rapidfuzz", "loadgen answers", "answers") from None
    return float(Levenshtein.normalized_similarity(a, b))


def against_reference(
    answer: str, reference: str | None, *, choice: bool = False, wants_json: bool = False
) -> dict[str, float]:
    """The scores that apply to an answer: ROUGE and exact match, or the choice; valid JSON where it was asked for."""
    scores: dict[str, float] = {}
    if reference is not None and choice:
        scores["choice"] = float(chosen(answer) == reference.strip().upper())
    elif reference is not None:
        scores |= {
            name: score.fmeasure for name, score in _rouge().score(reference, answer).items()
        }
        scores["exact"] = float(_plain(answer) == _plain(reference))
    if wants_json:
        scores["json"] = float(is_json(answer))
    return scores


def against_each_other(a: str, b: str) -> dict[str, float]:
    """How alike two answers to one prompt are. Tokens are words and marks here: two endpoints need not share ids."""
    words_a, words_b = _tokens(a), _tokens(b)
    same = next((i for i, (x, y) in enumerate(zip(words_a, words_b, strict=False)) if x != y), None)
    agreed = min(len(words_a), len(words_b)) if same is None else same
    longer = max(len(words_a), len(words_b))
    return {
        "equal": float(a == b),
        "agreement": float(agreed),
        "agreement_share": agreed / longer if longer else 1.0,
        "similarity": _edit_similarity(a, b),
    }


def chosen(answer: str) -> str:
    """The letter that an answer chooses: after "answer", else the first that stands alone; "" where there is none."""
    told = re.search(r"(?i:answer|choice|option)\W{0,3}(?:is)?\W{0,3}\b([A-J])\b", answer)
    found = told or re.search(r"(?<![A-Za-z'])([A-J])(?![A-Za-z'])", answer)
    return found[1] if found else ""


def is_json(answer: str) -> bool:
    """Whether the whole answer is JSON; a Markdown fence around it is taken off."""
    fenced = re.fullmatch(r"\s*```(?:json)?\s*\n(.*?)\n?```\s*", answer, re.DOTALL)
    try:
        json.loads(fenced[1] if fenced else answer)
    except (ValueError, RecursionError):
        return False
    return True


def _plain(text: str) -> str:
    return " ".join(text.split()).strip(" .").casefold()


def _tokens(text: str) -> list[str]:
    return re.findall(r"\w+|[^\w\s]", text)
