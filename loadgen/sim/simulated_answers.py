"""The responses of a simulated model to questions with known answers, right and wrong ones. Pure.

A simulated model has no knowledge, so it responds with what is known to be right. A preset can
make it respond wrongly: for a fraction of the requests above a number in flight, as a defect of a
kernel does, or with a rate of changed words, as weights with fewer bits do. So a test of the load
generator knows exactly what has to be found.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from loadgen.core.metrics.answer_scores import count_in_flight
from loadgen.core.requests.question_prompts import QuestionFinder
from loadgen.core.results.answer_files import RecordedCall, RecordedResponse
from loadgen.core.results.record import STATUS
from loadgen.core.workload.known_answers import KnownAnswer
from loadgen.sim.engine.latency_model import draw_uniform
from loadgen.sim.server.wire_format import TOKEN_WORDS

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# Numbers of the random streams that this module draws from. Others use 1 to 4.
_WRONG_STREAM = 5
_CHANGED_WORD_STREAM = 6
_WORD_STREAM = 7


class AnswerDefects(msgspec.Struct, frozen=True, kw_only=True):
    """How the responses of a simulated model are wrong.

    Attributes:
        wrong_share: The fraction of responses that are corrupted.
        above_in_flight: Only requests that arrive with more requests in flight are corrupted.
        changed_words_share: The fraction of words that the model chooses differently. From the
            first one on, the rest of the response is different, too, as with a real model.
        seed: Decides which responses and words these are.
    """

    wrong_share: float = 0.0
    above_in_flight: int = 0
    changed_words_share: float = 0.0
    seed: int = 0


def simulate_responses(
    known_answers: Sequence[KnownAnswer],
    find_question: QuestionFinder,
    records: NDArray[np.void],
    defects: AnswerDefects,
) -> list[RecordedResponse]:
    """Return the responses to all questions of a run that succeeded, in the order of the records.

    Args:
        known_answers: What is known about the right response to each question.
        find_question: Returns the index of the question of a request.
        records: The records of all requests.
        defects: How responses are wrong.
    """
    sent_ns = records["sent_ns"]
    in_flight = count_in_flight(sent_ns, records["done_ns"], sent_ns)
    is_ok = records["status"] == STATUS["ok"]

    responses = []
    columns = zip(records["slot"].tolist(), in_flight.tolist(), is_ok.tolist(), strict=True)
    for slot, count, succeeded in columns:
        question = find_question(slot) if succeeded else None
        if question is not None:
            known = known_answers[question]
            responses.append(simulate_response(known, question, slot, count, defects))
    return responses


def simulate_response(
    known: KnownAnswer, question: int, slot: int, in_flight: int, defects: AnswerDefects
) -> RecordedResponse:
    """Return the response of the simulated model to one question.

    Args:
        known: What is known about the right response.
        question: The index of the question.
        slot: The number of the request, which decides whether the response is corrupted.
        in_flight: The number of requests in flight when the request arrived.
        defects: How responses are wrong.
    """
    text = right_response_text(known)
    if defects.changed_words_share:
        # The words that a model chooses differently depend on the question, not on the request.
        text = change_words(text, defects.changed_words_share, defects.seed, question)

    is_suspect = in_flight > defects.above_in_flight
    is_wrong = draw_uniform(defects.seed, _WRONG_STREAM, slot) < defects.wrong_share
    if is_suspect and is_wrong:
        text = corrupt_text(text, defects.seed, slot)

    if known.check != "tool_call":
        return RecordedResponse(slot=slot, question=question, text=text)
    called_tool = known.expected or next(iter(known.tools))
    call = RecordedCall(name=called_tool, arguments=text)
    return RecordedResponse(slot=slot, question=question, text="", calls=(call,))


def right_response_text(known: KnownAnswer) -> str:
    """Return the text of a right response, or the arguments of the right tool call."""
    match known.check:
        case "similarity":
            return known.references[0]
        case "tool_call":
            called_tool = known.expected or next(iter(known.tools))
            return _encode_example(known.tools[called_tool])
        case "json":
            return known.expected or _encode_example(known.schema or {})
        case "exact" | "choice":
            return known.expected


def corrupt_text(text: str, seed: int, slot: int) -> str:
    """Return a text in which one word is replaced by another one.

    The other word is no letter of a choice, no number and no JSON, so that every check can see it.
    An empty text becomes the other word.
    """
    text_parts = text.split(" ")
    position = int(draw_uniform(seed, _WORD_STREAM, slot) * len(text_parts))
    text_parts[position] = _other_word(text_parts[position], seed, slot)
    return " ".join(text_parts)


def change_words(text: str, share: float, seed: int, question: int) -> str:
    """Return a text in which the model has chosen some words differently.

    Each word is the first different one with the probability `share`. All words after it are
    different, too.
    """
    text_parts = text.split(" ")
    for position in range(len(text_parts)):
        if draw_uniform(seed, _CHANGED_WORD_STREAM, question, position) < share:
            for later, word in enumerate(text_parts[position:], position):
                text_parts[later] = _other_word(word, seed, question * len(text_parts) + later)
            break
    return " ".join(text_parts)


def _other_word(word: str, seed: int, number: int) -> str:
    """Return a word that differs from another word, drawn from the words of the simulation."""
    index = int(draw_uniform(seed, _WORD_STREAM, number) * len(TOKEN_WORDS))
    other = TOKEN_WORDS[index].decode().strip()
    return other if other != word else f"{other}s"


def _encode_example(schema: Mapping[str, Any]) -> str:
    """Return a JSON text that fits a schema of the usual keywords."""
    return msgspec.json.encode(build_example(schema)).decode()


_EXAMPLES_OF_TYPES: dict[str, object] = {
    "string": "text",
    "integer": 1,
    "number": 1.5,
    "boolean": True,
    "null": None,
}


def build_example(schema: Mapping[str, Any]) -> object:
    """Return a value that fits a JSON Schema with types, properties, items, enum and const.

    Other keywords, such as `pattern`, are ignored. A question with such a schema needs a right
    answer of its own in the simulation.
    """
    if "const" in schema:
        return schema["const"]
    if schema.get("enum"):
        return schema["enum"][0]

    value_type = schema.get("type", "object")
    if isinstance(value_type, list):
        value_type = value_type[0]
    if value_type == "object":
        properties = schema.get("properties", {})
        return {name: build_example(properties[name]) for name in properties}
    if value_type == "array":
        return [build_example(schema.get("items", {"type": "string"}))]
    return _EXAMPLES_OF_TYPES.get(value_type)
