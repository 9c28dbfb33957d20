"""Check the terms of a contract about responses against the prompts of its data set.

This module is pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from loadgen.contracts.drafts import (
    ContractErrors,
    LimitedMetric,
    Location,
    PlacedTerm,
    Problem,
)
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
        name: What it is, for messages.
        is_in: Returns whether a prompt has it.
        example: A row of a data set that has it.
    """

    name: str
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
        "a reference response",
        _has_reference,
        '{"prompt": "Name the capital of France.", "reference": "Paris"}',
    ),
    "choice": ScoreInput(
        "the letter of the right choice",
        _has_choice,
        '{"prompt": "2 + 2? A: 3, B: 4", "answer": "B"}',
    ),
    "json": ScoreInput(
        "a response_format of JSON",
        _requires_json,
        '{"messages": [...], "response_format": {"type": "json_object"}}',
    ),
}
"""Requirement of a term about responses -> what it needs from a prompt."""


def read_prompts(
    check: AnswerCheck, directory: Path, read_questions: ReadQuestions, errors: ContractErrors
) -> Sequence[ScorablePrompt] | None:
    """Return the prompts of the data set of a contract, or None after an error.

    Args:
        check: The part of the contract that names the data set.
        directory: The directory of the contract file.
        read_questions: Reads the prompts of a data set.
        errors: Collects the errors.
    """
    try:
        return read_questions(directory / check.dataset, check.rows)
    except (LoadgenError, CombinedError) as error:
        hint = "give a JSONL file, with a path relative to the contract"
        errors.add_from_file(("answers", "dataset"), error, hint=hint)
        return None


@dataclass(frozen=True, kw_only=True)
class AnswerTermChecker:
    """Checks the terms about responses, and reports those that cannot pass.

    Attributes:
        check: The part of the contract with the data set and the terms about responses.
        prompts: The prompts of the data set.
        confidence: The confidence of the contract.
        has_other_endpoint: Whether there is another endpoint to compare responses with.
        errors: Collects the errors.
    """

    check: AnswerCheck
    prompts: Sequence[ScorablePrompt]
    confidence: float
    has_other_endpoint: bool
    errors: ContractErrors

    def check_terms(self) -> None:
        """Report all problems of the terms, in the order of the terms."""
        earlier_metrics: set[LimitedMetric] = set()
        for placed_term in _place_terms(self.check):
            if placed_term.limited_metric in earlier_metrics:
                text = "a second limit for the same metric"
                self._report(placed_term, Problem("duplicate", text, "keep one of them"))

            earlier_metrics.add(placed_term.limited_metric)
            self._check_endpoint(placed_term)

            if self._is_class_known(placed_term.term.class_name):
                self._check_prompt_count(placed_term)
            else:
                self._report_unknown_class(placed_term)

    def _report(self, placed_term: PlacedTerm, problem: Problem) -> None:
        """Report a problem at the place of its term in the contract."""
        self.errors.add_problem(_locate(placed_term), placed_term.term, problem)

    def _check_endpoint(self, placed_term: PlacedTerm) -> None:
        """Report a term that compares responses if there is no other endpoint."""
        if placed_term.term.requires("against") and not self.has_other_endpoint:
            text = "it compares responses, so it needs another endpoint"
            hint = "add against: http://HOST:8000 next to dataset, or use --against URL"
            self._report(placed_term, Problem("missing_option", text, hint))

    def _is_class_known(self, class_name: str) -> bool:
        """Return whether the data set has a class of prompts. The name "" means all prompts."""
        return class_name == "" or class_name in self._list_classes()

    def _list_classes(self) -> list[str]:
        """Return the names of the classes of prompts in the data set, sorted."""
        return sorted({prompt.group for prompt in self.prompts if prompt.group})

    def _report_unknown_class(self, placed_term: PlacedTerm) -> None:
        """Report a term about a class of prompts that the data set does not have."""
        class_name = placed_term.term.class_name
        known_classes = self._list_classes()
        hint = 'no row of the data set has a "class"'
        if known_classes:
            hint = did_you_mean(class_name, known_classes)
        text = f'{self.check.dataset} has no class "{class_name}"'
        self.errors.add(_locate(placed_term), "unknown_name", text, hint)

    def _check_prompt_count(self, placed_term: PlacedTerm) -> None:
        """Report a term that could not pass, because the data set has too few prompts for it.

        Only the prompts of the class of the term count, and of these only the ones that have what
        its score needs, such as a reference response.
        """
        term = placed_term.term
        usable_prompts = [
            prompt for prompt in self.prompts if term.class_name in ("", prompt.group)
        ]

        score_input = _find_score_input(term)
        if score_input is not None:
            usable_prompts = [prompt for prompt in usable_prompts if score_input.is_in(prompt)]
            if not usable_prompts:
                self._report_missing_input(placed_term, score_input)
                return

        required_count = _compute_required_prompts(term, self.confidence)
        if len(usable_prompts) < required_count:
            self._report_too_few_prompts(placed_term, len(usable_prompts), required_count)

    def _report_missing_input(self, placed_term: PlacedTerm, score_input: ScoreInput) -> None:
        """Report that no prompt has what the score of a term needs."""
        text = f"no row of {self.check.dataset} has {score_input.name}"
        hint = f"use rows like {score_input.example}"
        self._report(placed_term, Problem("missing_key", text, hint))

    def _report_too_few_prompts(
        self, placed_term: PlacedTerm, usable_count: int, required_count: int
    ) -> None:
        """Report that a term needs more prompts than the data set has for it."""
        text = (
            f"{required_count:,} prompts needed to decide the term, the data set has "
            f"{usable_count:,}"
        )
        hint = "add rows to the data set"
        if self.check.rows is not None:  # the contract uses only the first rows
            hint += ", and raise rows:"

        self._report(placed_term, Problem("too_few", text, hint))


def _locate(placed_term: PlacedTerm) -> Location:
    """Return the location of a term about responses in the contract file."""
    return ("answers", placed_term.requirement, placed_term.index)


def _place_terms(check: AnswerCheck) -> Iterator[PlacedTerm]:
    """Yield the terms about responses with their list (`must` or `should`) and index in it."""
    term_counts: Counter[Requirement] = Counter()
    for requirement, term in check.terms_by_requirement():
        yield PlacedTerm(requirement, term_counts[requirement], term)
        term_counts[requirement] += 1


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
