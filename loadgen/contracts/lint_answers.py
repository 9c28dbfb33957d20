"""Check the terms of a contract about responses against the prompts of its data set.

This module is pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from loadgen.contracts.drafts import ContractErrors, Location, PlacedTerm, Problem
from loadgen.contracts.sample_sizes import compute_requests_without_miss
from loadgen.contracts.schema import AnswerCheck, Requirement
from loadgen.contracts.terms import ZERO_OR_ONE_SCORES, ContractTerm, get_term_kind
from loadgen.core.errors import CombinedError, LoadgenError, did_you_mean
from loadgen.core.limits import FEWEST_ANSWERS
from loadgen.core.stats import intervals


class ScorablePrompt(Protocol):
    """A prompt whose response is scored, and what is known about the right response."""

    @property
    def reference(self) -> str | None:
        """The right response, if it is known."""

    @property
    def is_choice(self) -> bool:
        """Whether the right response is a letter."""

    @property
    def wants_json(self) -> bool:
        """Whether the response has to be JSON."""

    @property
    def group(self) -> str:
        """The class of the prompt, or ""."""


ReadQuestions = Callable[[Path, int | None], Sequence[ScorablePrompt]]
"""Reads the prompts of a data set, or only the first ones. Raises LoadgenError or CombinedError."""


class ScoreInput(NamedTuple):
    """What a score needs from a prompt.

    Attributes:
        is_in: Returns whether a prompt has it.
        example: A row of a data set that has it.
    """

    is_in: Callable[[ScorablePrompt], bool]
    example: str


def _has_reference(prompt: ScorablePrompt) -> bool:
    """Return whether the text of the right response is known."""
    return prompt.reference is not None and not prompt.is_choice


def _has_choice(prompt: ScorablePrompt) -> bool:
    """Return whether the right response is a letter."""
    return prompt.is_choice


def _requires_json(prompt: ScorablePrompt) -> bool:
    """Return whether the response has to be JSON."""
    return prompt.wants_json


SCORE_INPUTS = {
    "reference": ScoreInput(
        _has_reference, '{"prompt": "Name the capital of France.", "reference": "Paris"}'
    ),
    "choice": ScoreInput(_has_choice, '{"prompt": "2 + 2? A: 3, B: 4", "answer": "B"}'),
    "json": ScoreInput(
        _requires_json,
        'for example {"messages": [...], "response_format": {"type": "json_object"}}',
    ),
}
"""Requirement of a term about responses -> what it needs from a prompt."""


def check_answer_terms(
    check: AnswerCheck,
    confidence: float,
    directory: Path,
    read_questions: ReadQuestions,
    errors: ContractErrors,
    *,
    has_other_endpoint: bool,
) -> None:
    """Report a data set that cannot be read, and terms about responses that cannot pass.

    Args:
        check: The data set of the contract and the terms about responses.
        confidence: The confidence of the contract.
        directory: The directory of the contract file.
        read_questions: Reads the prompts of the data set.
        errors: Collects the errors.
        has_other_endpoint: Whether there is another endpoint to compare responses with.
    """
    try:
        prompts = read_questions(directory / check.dataset, check.rows)
    except (LoadgenError, CombinedError) as error:
        hint = "give a JSONL file, with a path relative to the contract"
        errors.add_from_file(("answers", "dataset"), error, hint=hint)
        return
    earlier_terms: set[tuple[Requirement, ContractTerm]] = set()
    for placed_term in _place_terms(check):
        term = placed_term.term
        location: Location = ("answers", placed_term.requirement, placed_term.index)
        term_without_limit = (placed_term.requirement, term.without_limit())
        if term_without_limit in earlier_terms:
            text = "a second limit for the same metric"
            errors.add_problem(location, term, Problem("duplicate", text, "keep one of them"))
        earlier_terms.add(term_without_limit)
        if term.requires("against") and not has_other_endpoint:
            hint = "add against: http://HOST:8000 next to dataset, or use --against URL"
            problem = Problem(
                "missing_option", "it compares responses, so it needs another endpoint", hint
            )
            errors.add_problem(location, term, problem)
        if _check_class(term, location, check, prompts, errors):
            _check_prompt_count(term, location, check, prompts, confidence, errors)


def _place_terms(check: AnswerCheck) -> Iterator[PlacedTerm]:
    """Yield the terms about responses with their list (`must` or `should`) and index in it."""
    term_counts: Counter[Requirement] = Counter()
    for requirement, term in check.terms_by_requirement():
        yield PlacedTerm(requirement, term_counts[requirement], term)
        term_counts[requirement] += 1


def _check_class(
    term: ContractTerm,
    location: Location,
    check: AnswerCheck,
    prompts: Sequence[ScorablePrompt],
    errors: ContractErrors,
) -> bool:
    """Return whether the data set has the class of prompts that a term is about.

    An unknown class is reported. A term without a class is about all prompts.

    Args:
        term: The term.
        location: The location of the term in the contract.
        check: The data set and the terms about responses.
        prompts: The prompts of the data set.
        errors: Collects the errors.
    """
    known_classes = sorted({prompt.group for prompt in prompts} - {""})
    if not term.class_name or term.class_name in known_classes:
        return True
    hint = 'no row of the data set has a "class"'
    if known_classes:
        hint = did_you_mean(term.class_name, known_classes)
    text = f'{check.dataset} has no class "{term.class_name}"'
    errors.add(location, "unknown_name", text, hint)
    return False


def _check_prompt_count(
    term: ContractTerm,
    location: Location,
    check: AnswerCheck,
    prompts: Sequence[ScorablePrompt],
    confidence: float,
    errors: ContractErrors,
) -> None:
    """Report a term that could not pass with the prompts of the data set, because they are too few.

    Only the prompts of the class of the term count, and of these only the ones that have what its
    score needs, such as a reference response.

    Args:
        term: The term.
        location: The location of the term in the contract.
        check: The data set and the terms about responses.
        prompts: The prompts of the data set.
        confidence: The confidence of the contract.
        errors: Collects the errors.
    """
    usable_prompts = [prompt for prompt in prompts if term.class_name in ("", prompt.group)]
    score_input = _find_score_input(term)
    if score_input is not None:
        usable_prompts = [prompt for prompt in usable_prompts if score_input.is_in(prompt)]
    usable_count = len(usable_prompts)
    required_count = _compute_required_prompts(term, confidence)
    if score_input is not None and usable_count == 0:
        text = f"no row of {check.dataset} has a reference response"
        problem = Problem("missing_key", text, f"use rows like {score_input.example}")
        errors.add_problem(location, term, problem)
    elif usable_count < required_count:
        text = (
            f"{required_count:,} prompts needed to decide the term, the data set has "
            f"{usable_count:,}"
        )
        hint = "add rows to the data set"
        if check.rows is not None:
            hint += ", and raise rows:"
        errors.add_problem(location, term, Problem("too_few", text, hint))


def _find_score_input(term: ContractTerm) -> ScoreInput | None:
    """Return what the score of a term needs from a prompt, or None if it needs nothing."""
    requirements = get_term_kind(term.of or term.kind).requirements
    for requirement in requirements:
        if requirement in SCORE_INPUTS:
            return SCORE_INPUTS[requirement]
    return None


def _compute_required_prompts(term: ContractTerm, confidence: float) -> int:
    """Return the least number of prompts with which a term can pass."""
    if term.kind == "within":
        # With this many prompts, a larger fraction of worse responses would show in at least one.
        return intervals.observations_to_see(1 - term.limit, confidence)
    if term.kind in ZERO_OR_ONE_SCORES:
        return compute_requests_without_miss(1 - term.limit, confidence)
    return FEWEST_ANSWERS
