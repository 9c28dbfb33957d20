"""Sends questions to one endpoint or two, scores the answers, and writes the result."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from loadgen.answers import answer_files
from loadgen.answers.comparison import AnswersResult, score_prompts, summarize_scores
from loadgen.answers.completions import (
    SendOptions,
    describe_token_difference,
    redacted_url,
    send_to_both,
)
from loadgen.answers.questions import Question
from loadgen.core.execution.host_facts import loadgen_version
from loadgen.core.execution.plan import Settings
from loadgen.core.stats.intervals import LEVEL


class ScoringOptions(NamedTuple):
    """How answers are scored and stored.

    Attributes:
        send: How questions are sent.
        out: The folder to write, or None.
        keep_texts: True to store the texts of the answers, too.
        loss: By which fraction endpoint A may score less than endpoint B, or None.
        level: The confidence of the intervals.
        simulated: True if the backend of endpoint A simulates it.
    """

    send: SendOptions
    out: Path | None = None
    keep_texts: bool = False
    loss: float | None = None
    level: float = LEVEL
    simulated: bool = False


class ScoringOutcome(NamedTuple):
    """The result, and the first reasons why requests failed."""

    result: AnswersResult
    failures: list[str]


def run_scoring(
    dataset: Path,
    questions: Sequence[Question],
    first: Settings,
    second: Settings | None,
    options: ScoringOptions,
    on_progress: Callable[[str, int], None],
) -> ScoringOutcome:
    """Send and score all questions, and write the result.

    Args:
        dataset: The file of the questions.
        questions: The questions.
        first: Endpoint A.
        second: Endpoint B, or None.
        options: How answers are scored and stored.
        on_progress: Called with "A" or "B" and the number of responses so far.

    Raises:
        TargetError: An endpoint cannot be used.
        UserError: A package is not installed.
        OSError: The folder cannot be written.
    """
    completions, other = send_to_both(first, second, questions, options.send, on_progress)
    other_texts = None if other is None else other.texts
    prompts = score_prompts(questions, completions.texts, other_texts)
    note = "" if other is None else describe_token_difference(completions, other)
    is_other_simulated = other is not None and other.simulated
    result = AnswersResult(
        dataset=dataset.name,
        dataset_sha256=hashlib.sha256(dataset.read_bytes()).hexdigest(),
        version=loadgen_version(),
        url=redacted_url(first),
        model=completions.model,
        against="" if second is None else redacted_url(second),
        against_model="" if other is None else other.model,
        prompts=len(prompts),
        failed=completions.texts.count(None),
        failed_against=0 if other_texts is None else other_texts.count(None),
        loss=options.loss,
        level=options.level,
        simulated=options.simulated or completions.simulated or is_other_simulated,
        notes=(note,) if note else (),
        parts=summarize_scores(prompts, options.loss, options.level),
    )
    if options.out is not None:
        texts = None
        if options.keep_texts:
            texts = answer_files.collect_texts(questions, completions.texts, other_texts)
        answer_files.write_result(options.out, result, prompts, texts)
    failures = list(completions.failures)
    if other is not None:
        failures += other.failures
    return ScoringOutcome(result, failures)
