"""The files of checked answers in the folder of a run.

    known_answers.jsonl     what is known about the right response to each question, one line each
                            (known_answers.KnownAnswer), written before the load
    spool/w0.answers        responses to questions, appended by worker 0, one JSON line each
                            (RecordedResponse); deleted with the record log
    answers.jsonl           the outcome of the check of each response (ScoredAnswer), without any
                            text, written after the load
    wrong_answers.jsonl     the text of each wrong response (WrongAnswer)

If a run was killed, it has no `answers.jsonl`. The responses that were recorded until then are
checked whenever the run is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from loadgen.core.results import files
from loadgen.core.results.json_files import decode_json_lines, encode_json_lines

if TYPE_CHECKING:
    from loadgen_sdk.request import Completion

    from loadgen.core.workload.known_answers import KnownAnswer

KNOWN_ANSWERS = "known_answers.jsonl"
SCORED_ANSWERS = "answers.jsonl"
WRONG_ANSWERS = "wrong_answers.jsonl"
RESPONSES = "answers"
"""The name of the file of responses in the record log, after the name of the worker."""


class RecordedCall(msgspec.Struct, frozen=True):
    """A tool call of a recorded response. `arguments` is JSON as text."""

    name: str
    arguments: str


class RecordedResponse(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The response to a question, as a worker records it during the load.

    Attributes:
        slot: The number of the request.
        question: The index of the question in `known_answers.jsonl`.
        text: The text of the response.
        calls: Its tool calls.
    """

    slot: int
    question: int
    text: str
    calls: tuple[RecordedCall, ...] = ()


class ScoredAnswer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The outcome of the check of one response: a line of `answers.jsonl`.

    Attributes:
        slot: The number of the request.
        question: The index of the question in `known_answers.jsonl`.
        check: The kind of check.
        row: The number of the question's row in its file, from 1.
        is_correct: Whether the response is right.
        agreement: The fraction of the response before its first difference from the first recorded
            response of the reference endpoint. None for other kinds of checks.
        reference_agreement: The same fraction of the second recorded response.
    """

    slot: int
    question: int
    check: str
    row: int
    is_correct: bool = msgspec.field(name="correct")
    agreement: float | None = None
    reference_agreement: float | None = None


class WrongAnswer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The text of a wrong response: a line of `wrong_answers.jsonl`.

    Attributes:
        slot: The number of the request.
        row: The number of the question's row in its file, from 1.
        check: The kind of check.
        expected: The right answer, or the first response of the reference endpoint. Empty if only
            the form of the response is checked.
        response: The text of the response.
        calls: Its tool calls.
    """

    slot: int
    row: int
    check: str
    expected: str = ""
    response: str
    calls: tuple[RecordedCall, ...] = ()


class AnswerOutcomes(NamedTuple):
    """The outcomes of all checks of a run, and the texts of wrong responses."""

    scored: list[ScoredAnswer]
    wrong: list[WrongAnswer]


def create_recorded_response(
    slot: int, question: int, completion: Completion, hide_keys: Callable[[str], str]
) -> RecordedResponse:
    """Return the text and the tool calls of a response as a record for a file.

    Args:
        slot: The number of the request.
        question: The index of the question that was sent.
        completion: The response.
        hide_keys: Removes API keys from a text and changes nothing else, such as line breaks.
    """
    text = hide_keys(completion.text or "")

    calls = []
    for call in completion.tool_calls:
        tool_name = hide_keys(str(call["name"]))
        arguments = hide_keys(str(call["arguments"]))
        calls.append(RecordedCall(name=tool_name, arguments=arguments))

    return RecordedResponse(slot=slot, question=question, text=text, calls=tuple(calls))


def write_known_answers(folder: Path, known_answers: Sequence[KnownAnswer]) -> None:
    """Write the known answers of a run's questions to a file, if there are any."""
    if known_answers:
        files.replace(folder / KNOWN_ANSWERS, encode_json_lines(known_answers))


def write_outcomes(folder: Path, outcomes: AnswerOutcomes) -> None:
    """Write the outcomes of checks and the wrong responses, in the order of the requests."""
    files.replace(folder / SCORED_ANSWERS, encode_json_lines(outcomes.scored))
    files.replace(folder / WRONG_ANSWERS, encode_json_lines(outcomes.wrong))


def has_checked_answers(folder: Path) -> bool:
    """Return True if the responses of a run are checked against known answers.

    A run that was bundled without texts has only the outcomes of the checks.
    """
    has_known_answers = (folder / KNOWN_ANSWERS).is_file()
    has_outcomes = (folder / SCORED_ANSWERS).is_file()
    return has_known_answers or has_outcomes


def read_scored_answers(folder: Path) -> list[ScoredAnswer]:
    """Return the outcomes of all checks of a run, in the order of the requests.

    A finished run has a file with the outcomes. For an unfinished run, the responses that have been
    recorded so far are checked now.
    """
    path = folder / SCORED_ANSWERS
    is_finished = path.is_file()
    if not is_finished:
        return check_recorded_responses(folder).scored

    with path.open("rb") as lines:
        return list(decode_json_lines(lines, ScoredAnswer))


def check_recorded_responses(folder: Path) -> AnswerOutcomes:
    """Check the recorded responses of a run against the known answers of their questions.

    Return the outcomes in the order of the requests.

    Raises:
        UserError: A check needs a package that is not installed.
    """
    # Runs without known answers do not need this module.
    from loadgen.core.workload.known_answers import KnownAnswer

    path = folder / KNOWN_ANSWERS
    if not path.is_file():
        return AnswerOutcomes(scored=[], wrong=[])

    with path.open("rb") as lines:
        known_answers = list(decode_json_lines(lines, KnownAnswer))

    responses = list(_read_responses(folder))
    responses.sort(key=lambda response: response.slot)
    return score_responses(known_answers, responses)


def _read_responses(folder: Path) -> Iterator[RecordedResponse]:
    """Yield the responses that all workers of a run have recorded so far."""
    for path in sorted(folder.glob(f"spool/w*.{RESPONSES}")):
        with path.open("rb") as lines:
            yield from decode_json_lines(lines, RecordedResponse)


def score_responses(
    known_answers: Sequence[KnownAnswer], responses: Iterable[RecordedResponse]
) -> AnswerOutcomes:
    """Check each response against the known answer of its question.

    Args:
        known_answers: The known answer of each question, by the index of the question.
        responses: The responses, each with the index of its question.
    """
    outcomes = AnswerOutcomes(scored=[], wrong=[])
    for response in responses:
        # A damaged file may have a response to a question that does not exist.
        has_known_answer = 0 <= response.question < len(known_answers)
        if not has_known_answer:
            continue

        known = known_answers[response.question]
        scored = _score_response(known, response)
        outcomes.scored.append(scored)
        if not scored.is_correct:
            wrong_answer = _describe_wrong_answer(known, response)
            outcomes.wrong.append(wrong_answer)

    return outcomes


def _score_response(known: KnownAnswer, response: RecordedResponse) -> ScoredAnswer:
    """Return the outcome of the check of one response."""
    from loadgen.core.workload.answer_checks import ResponseContent, ToolCall, check_answer

    calls = tuple(ToolCall(call.name, call.arguments) for call in response.calls)
    content = ResponseContent(text=response.text, calls=calls)
    checked = check_answer(known, content)

    return ScoredAnswer(
        slot=response.slot,
        question=response.question,
        check=known.check,
        row=known.row,
        is_correct=checked.is_correct,
        agreement=checked.agreement,
        reference_agreement=checked.reference_agreement,
    )


def _describe_wrong_answer(known: KnownAnswer, response: RecordedResponse) -> WrongAnswer:
    """Return a wrong response together with the right answer, if the right answer is known."""
    first_reference = known.references[0] if known.references else ""
    expected = known.expected or first_reference

    return WrongAnswer(
        slot=response.slot,
        row=known.row,
        check=known.check,
        expected=expected,
        response=response.text,
        calls=response.calls,
    )
