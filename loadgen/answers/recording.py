"""Record the responses of a reference endpoint as known answers (`loadgen answers --record`).

The file that is written has the rows of the data set with `reference_responses`. It can be used as
it is: `loadgen run ... --check-answers FILE` sends its prompts and compares the responses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from loadgen.answers.completions import DEFAULT_OUTPUT_TOKENS, SendOptions, send_questions
from loadgen.answers.questions import Question
from loadgen.core.errors import TargetError, UserError
from loadgen.core.execution.plan import Settings
from loadgen.core.results import files
from loadgen.core.results.json_files import encode_json_lines
from loadgen.core.workload.dataset_rows import LENGTH_FIELDS, DatasetRow
from loadgen.core.workload.known_answers import RECORDED_KEY, CheckKind

SIMILARITY_CHECK: CheckKind = "similarity"
"""The kind of check that compares a response with recorded responses."""

RECORDINGS = 2
"""How often each prompt is sent. The second response shows how much the reference varies itself."""


@dataclass(frozen=True)
class RecordedReference:
    """What was recorded.

    Attributes:
        prompts: The number of prompts with a recorded response.
        failed: The number of prompts that were left out because a request failed.
        varying: The number of prompts whose responses differ.
        failures: The first few reasons why requests failed.
    """

    prompts: int
    failed: int
    varying: int
    failures: tuple[str, ...] = ()


def record_reference(
    endpoint: Settings,
    questions: Sequence[Question],
    options: SendOptions,
    file: Path,
    on_progress: Callable[[str, int], None],
) -> RecordedReference:
    """Send every prompt twice, and write each prompt with its two responses to a file.

    A prompt is left out of the file if one of its requests failed.

    Args:
        endpoint: The reference endpoint, whose responses are recorded.
        questions: The prompts.
        options: How prompts are sent.
        file: The file to write.
        on_progress: Called with "recording 1" or "recording 2" and its number of responses so far.

    Raises:
        TargetError: The endpoint cannot be used, or no prompt has a response.
        UserError: The file cannot be written.
    """
    first = send_questions(endpoint, questions, options, partial(on_progress, "recording 1"))
    second = send_questions(endpoint, questions, options, partial(on_progress, "recording 2"))
    failures = (*first.failures, *second.failures)

    responses_by_question = list(zip(first.texts, second.texts, strict=True))
    rows = list(_recorded_rows(questions, responses_by_question, options))
    if not rows:
        reason = failures[0] if failures else "there are no prompts"
        raise TargetError("no_result", f"no response could be recorded: {reason}", str(file))

    _write_rows(file, rows)

    return RecordedReference(
        prompts=len(rows),
        failed=len(questions) - len(rows),
        varying=sum(_has_different_responses(row) for row in rows),
        failures=failures,
    )


def _has_different_responses(recorded_row: Mapping[str, Any]) -> bool:
    """Return True if the endpoint responded differently to the two requests with a prompt."""
    return len(set(recorded_row[RECORDED_KEY])) > 1


def _recorded_rows(
    questions: Sequence[Question],
    responses_by_question: Sequence[tuple[str | None, ...]],
    options: SendOptions,
) -> Iterator[dict[str, Any]]:
    """Yield one JSON row for each prompt whose requests all succeeded.

    A row has the prompt and its recorded responses. A failed request has the response None.
    """
    default_max_tokens = options.max_tokens or DEFAULT_OUTPUT_TOKENS

    for question, responses in zip(questions, responses_by_question, strict=True):
        has_failed_request = None in responses
        if has_failed_request:
            continue

        yield _recorded_row(question.row, responses, default_max_tokens)


def _recorded_row(
    prompt_row: DatasetRow, responses: Sequence[str | None], default_max_tokens: int
) -> dict[str, Any]:
    """Return a prompt and its recorded responses as one JSON row.

    The row also has the limit of output tokens that was used, so that a later response to the
    prompt has the same limit and can be compared with the recorded responses.
    """
    recorded_row: dict[str, Any] = {"check": SIMILARITY_CHECK}
    if prompt_row.messages is not None:
        recorded_row["messages"] = prompt_row.messages
    else:
        recorded_row["prompt"] = prompt_row.prompt

    recorded_row["max_tokens"] = prompt_row.output_tokens or default_max_tokens

    request_parameters = {
        name: value for name, value in prompt_row.extra.items() if name not in LENGTH_FIELDS
    }
    if request_parameters:
        recorded_row["extra_body"] = request_parameters

    recorded_row[RECORDED_KEY] = list(responses)
    return recorded_row


def _write_rows(file: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write rows as JSON lines.

    Raises:
        UserError: The file cannot be written.
    """
    try:
        files.replace(file, encode_json_lines(rows), shared=True)
    except OSError as error:
        problem = f"cannot be written: {error.strerror}"
        raise UserError("unwritable_file", problem, f"--record {file}") from None
