"""Check the terms of a contract about answers against the prompts of its data set.

This module is pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from loadgen.contracts.drafts import ContractErrors, Location, Problem
from loadgen.contracts.sample_sizes import requests_without_miss
from loadgen.contracts.schema import AnswerCheck
from loadgen.contracts.terms import ZERO_OR_ONE_SCORES, ContractTerm, get_term_kind
from loadgen.core.errors import CombinedError, LoadgenError, did_you_mean
from loadgen.core.limits import FEWEST_ANSWERS
from loadgen.core.stats import intervals


class ScorablePrompt(Protocol):
    """A prompt whose answer is scored, and what is known of the right answer."""

    @property
    def reference(self) -> str | None:
        """The right answer, if it is known."""

    @property
    def choice(self) -> bool:
        """Whether the right answer is a letter."""

    @property
    def json(self) -> bool:
        """Whether the answer has to be JSON."""

    @property
    def group(self) -> str:
        """The class of the prompt, or ""."""


ReadQuestions = Callable[[Path, int | None], Sequence[ScorablePrompt]]
"""Reads the prompts of a data set, or only the first ones. Raises LoadgenError or CombinedError."""


class ScoreInput(NamedTuple):
    """What a score needs from a prompt: whether a prompt has it, and an example row that has it."""

    is_in: Callable[[ScorablePrompt], bool]
    example: str


SCORE_INPUTS = {
    "reference": ScoreInput(
        lambda prompt: prompt.reference is not None and not prompt.choice,
        '{"prompt": "Name the capital of France.", "reference": "Paris"}',
    ),
    "choice": ScoreInput(
        lambda prompt: prompt.choice, '{"prompt": "2 + 2? A: 3, B: 4", "answer": "B"}'
    ),
    "json": ScoreInput(
        lambda prompt: prompt.json,
        '{"messages": [...], "response_format": {"type": "json_object"}}',
    ),
}
"""Requirement of a term about answers -> what it needs from a prompt."""


def check_answer_terms(
    check: AnswerCheck,
    confidence: float,
    directory: Path,
    read_questions: ReadQuestions,
    errors: ContractErrors,
    *,
    has_other_endpoint: bool,
) -> None:
    """Report a data set that cannot be read, and terms that its prompts cannot show.

    Args:
        check: What the contract says about answers.
        confidence: The confidence of the contract.
        directory: The directory of the contract file.
        read_questions: Reads the prompts of the data set.
        errors: Collects the errors.
        has_other_endpoint: Whether there is another endpoint to compare answers with.
    """
    try:
        prompts = read_questions(directory / check.dataset, check.rows)
    except (LoadgenError, CombinedError) as error:
        hint = "a JSONL file, relative to the contract"
        errors.add_from_file(("answers", "dataset"), error, hint=hint)
        return
    indices: Counter[str] = Counter()
    subjects: set[tuple[str, ContractTerm]] = set()
    for requirement, term in check.terms_by_requirement():
        location: Location = ("answers", requirement, indices[requirement])
        indices[requirement] += 1
        subject = (requirement, term._replace(limit=None))
        if subject in subjects:
            problem = Problem("duplicate", "said twice", "keep one of them")
            errors.add_problem(location, term, problem)
        subjects.add(subject)
        if term.requires("against") and not has_other_endpoint:
            hint = "against: http://HOST:8000 beside dataset, or --against URL"
            problem = Problem("missing_option", "there is no other endpoint", hint)
            errors.add_problem(location, term, problem)
        _check_prompts(term, location, check, prompts, confidence, errors)


def _check_prompts(
    term: ContractTerm,
    location: Location,
    check: AnswerCheck,
    prompts: Sequence[ScorablePrompt],
    confidence: float,
    errors: ContractErrors,
) -> None:
    """Report a term about a class that no prompt has, or that the prompts are too few to show.

    Only the prompts of the class of the term count, and of these only the ones that have what its
    score needs, such as a reference answer.
    """
    classes = sorted({prompt.group for prompt in prompts} - {""})
    if term.class_name and term.class_name not in classes:
        hint = did_you_mean(term.class_name, classes) if classes else 'no row of it has a "class"'
        text = f'{check.dataset} has no class "{term.class_name}"'
        errors.add(location, "unknown_name", text, hint)
        return
    usable = [prompt for prompt in prompts if term.class_name in ("", prompt.group)]
    score_input = _score_input(term)
    if score_input is not None:
        usable = [prompt for prompt in usable if score_input.is_in(prompt)]
    required = _required_prompts(term, confidence)
    if score_input is not None and not usable:
        problem = Problem(
            "missing_key",
            f"no row of {check.dataset} says what is right",
            f"rows like {score_input.example}",
        )
        errors.add_problem(location, term, problem)
    elif len(usable) < required:
        text = f"needs {required:,} prompts to be shown at all, there are {len(usable):,}"
        rows_hint = "" if check.rows is None else ", and in rows:"
        problem = Problem("too_few", text, f"more rows in the data set{rows_hint}")
        errors.add_problem(location, term, problem)


def _score_input(term: ContractTerm) -> ScoreInput | None:
    """Return what the score of a term needs from a prompt, or None if it needs nothing."""
    requirements = get_term_kind(term.of or term.kind).requirements
    for requirement in requirements:
        if requirement in SCORE_INPUTS:
            return SCORE_INPUTS[requirement]
    return None


def _required_prompts(term: ContractTerm, confidence: float) -> int:
    """Return the least number of prompts with which a term can pass."""
    if term.kind == "within":
        # With this many prompts, a larger share of worse answers would show in at least one of
        # them.
        return intervals.observations_to_see(1 - term.limit, confidence)
    if term.kind in ZERO_OR_ONE_SCORES:
        return requests_without_miss(1 - term.limit, confidence)
    return FEWEST_ANSWERS
