"""Record the responses of a reference endpoint as known answers (`loadgen answers --record`).

The file that is written has the rows of the data set with `reference_responses`. It can be used as
it is: `loadgen run ... --check-answers FILE` sends its prompts and compares the responses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from loadgen.answers.completions import DEFAULT_OUTPUT_TOKENS, SendOptions, send_questions
from loadgen.answers.questions import Question
from loadgen.core.errors import TargetError, UserError
from loadgen.core.execution.plan import Settings
from loadgen.core.results import files
from loadgen.core.workload.dataset_rows import LENGTH_FIELDS
from loadgen.core.workload.known_answers import RECORDED_KEY

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
    """Send every prompt twice, and write the prompts with their responses to a file.

    A prompt is left out if one of its requests failed.

    Args:
        endpoint: The reference endpoint.
        questions: The prompts.
        options: How they are sent.
        file: The file to write.
        on_progress: Called with the name of the recording and the number of its responses so far.

    Raises:
        TargetError: The endpoint cannot be used, or no prompt has a response.
        UserError: The file cannot be written.
    """
    recordings = [
        send_questions(endpoint, questions, options, _name_progress(on_progress, number))
        for number in range(1, RECORDINGS + 1)
    ]
    failures = [failure for recording in recordings for failure in recording.failures]
    responses_by_question = list(zip(*(recording.texts for recording in recordings), strict=True))

    rows = list(_recorded_rows(questions, responses_by_question, options))
    if not rows:
        reason = failures[0] if failures else "there are no prompts"
        raise TargetError("no_result", f"no response could be recorded: {reason}", str(file))

    _write_rows(file, rows)
    return RecordedReference(
        prompts=len(rows),
        failed=len(questions) - len(rows),
        varying=sum(len(set(row[RECORDED_KEY])) > 1 for row in rows),
        failures=tuple(failures),
    )


def _name_progress(on_progress: Callable[[str, int], None], number: int) -> Callable[[int], None]:
    """Return a function that reports the progress of one of the recordings."""

    def report(done: int) -> None:
        on_progress(f"recording {number}", done)

    return report


def _recorded_rows(
    questions: Sequence[Question],
    responses_by_question: Sequence[tuple[str | None, ...]],
    options: SendOptions,
) -> Iterator[dict[str, Any]]:
    """Yield the rows of the file: each prompt with its responses, if all requests succeeded.

    A row without a limit of output tokens gets the one that was used, because another limit would
    cut the responses of the load at different places.
    """
    default_limit = options.max_tokens or DEFAULT_OUTPUT_TOKENS
    for question, responses in zip(questions, responses_by_question, strict=True):
        if None in responses:
            continue
        row = question.row
        recorded: dict[str, Any] = {"check": "similarity"}
        if row.messages is not None:
            recorded["messages"] = row.messages
        else:
            recorded["prompt"] = row.prompt
        recorded["max_tokens"] = row.output_tokens or default_limit
        recorded |= _sent_fields(row.extra)
        recorded[RECORDED_KEY] = list(responses)
        yield recorded


def _sent_fields(extra: dict[str, Any]) -> dict[str, Any]:
    """Return further fields of a request as a row of a data set has them."""
    fields = {name: value for name, value in extra.items() if name not in LENGTH_FIELDS}
    return {"extra_body": fields} if fields else {}


def _write_rows(file: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write rows as JSON lines. Raises UserError if the file cannot be written."""
    lines = b"".join(msgspec.json.encode(row) + b"\n" for row in rows)
    try:
        files.replace(file, lines, shared=True)
    except OSError as error:
        problem = f"cannot be written: {error.strerror}"
        raise UserError("unwritable_file", problem, f"--record {file}") from None
