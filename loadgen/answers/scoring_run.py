"""Send questions to one endpoint or two, score the answers, and write the result."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from loadgen.answers import answer_files
from loadgen.answers.comparison import (
    AnswersResult,
    ScoredPrompt,
    score_prompts,
    summarize_scores,
)
from loadgen.answers.completions import (
    CompletionPair,
    Completions,
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
        allowed_loss: The fraction by which a score of A may be lower than that of B, or None.
        level: The confidence of the intervals.
        simulated: True if the backend of endpoint A simulates it.
    """

    send: SendOptions
    out: Path | None = None
    keep_texts: bool = False
    allowed_loss: float | None = None
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
    """Send all questions, score the responses, and write the result if a folder is specified.

    Args:
        dataset: The file that the questions were read from.
        questions: The questions.
        first: Endpoint A.
        second: Endpoint B, or None to score endpoint A alone.
        options: How many requests are in flight, which loss is allowed, and what is stored where.
        on_progress: Called with "A" or "B" and the number of responses so far.

    Raises:
        TargetError: An endpoint cannot be used.
        UserError: A package is not installed.
        OSError: The folder cannot be written.
    """
    completions = send_to_both(first, second, questions, options.send, on_progress)
    texts_a = completions.a.texts
    texts_b = completions.texts_b
    scored_prompts = score_prompts(questions, texts_a, texts_b)

    result = _summarize_endpoint_a(dataset, first, completions.a, scored_prompts, options)
    if second is not None:
        result = _add_endpoint_b(result, second, completions)

    if options.out is not None:
        stored_texts = None
        if options.keep_texts:
            stored_texts = answer_files.collect_texts(questions, texts_a, texts_b)
        answer_files.write_result(options.out, result, scored_prompts, stored_texts)

    return ScoringOutcome(result, completions.failures)


def _summarize_endpoint_a(
    dataset: Path,
    endpoint: Settings,
    completions: Completions,
    scored_prompts: Sequence[ScoredPrompt],
    options: ScoringOptions,
) -> AnswersResult:
    """Return the result of a scoring run: facts about endpoint A, and the scores of all prompts.

    A request without a response has the text None and counts as failed.
    """
    dataset_hash = hashlib.sha256(dataset.read_bytes())
    groups = summarize_scores(scored_prompts, options.allowed_loss, options.level)

    return AnswersResult(
        dataset=dataset.name,
        dataset_sha256=dataset_hash.hexdigest(),
        version=loadgen_version(),
        url=redacted_url(endpoint),
        model=completions.model,
        prompts=len(scored_prompts),
        failed=completions.texts.count(None),
        allowed_loss=options.allowed_loss,
        level=options.level,
        simulated=options.simulated or completions.simulated,
        groups=groups,
    )


def _add_endpoint_b(
    result: AnswersResult, endpoint: Settings, completions: CompletionPair
) -> AnswersResult:
    """Return a result of endpoint A with the facts about endpoint B added.

    A note is added if the endpoints count different numbers of tokens in the same prompts.
    """
    completions_b = completions.b
    assert completions_b is not None, "questions were sent to endpoint B"

    token_note = describe_token_difference(completions.a, completions_b)
    return replace(
        result,
        other_url=redacted_url(endpoint),
        other_model=completions_b.model,
        other_failed=completions_b.texts.count(None),
        simulated=result.simulated or completions_b.simulated,
        notes=(token_note,) if token_note else (),
    )
