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
from loadgen.core.workload.known_answers import CheckKind, KnownAnswer
from loadgen.sim.engine.latency_model import draw_uniform
from loadgen.sim.server.wire_format import TOKEN_WORDS

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

TOOL_CALL_CHECK: CheckKind = "tool_call"
"""The kind of check that expects a tool call as response."""

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
    """Return the simulated responses to all successful requests that are questions.

    Args:
        known_answers: The right response to each question.
        find_question: Returns the index of the question of a request, or None for a request whose
            right response is not known.
        records: The records of all requests. `slot` is the number of a request.
        defects: How often, and from which load on, responses are wrong.
    """
    sent_ns = records["sent_ns"]
    done_ns = records["done_ns"]
    in_flight_counts = count_in_flight(sent_ns, done_ns, at_ns=sent_ns)

    is_ok = records["status"] == STATUS["ok"]
    ok_slots = records["slot"][is_ok].tolist()
    ok_in_flight_counts = in_flight_counts[is_ok].tolist()

    responses = []
    for slot, in_flight in zip(ok_slots, ok_in_flight_counts, strict=True):
        question = find_question(slot)
        if question is not None:
            known = known_answers[question]
            responses.append(simulate_response(known, question, slot, in_flight, defects))
    return responses


def simulate_response(
    known: KnownAnswer, question: int, slot: int, in_flight: int, defects: AnswerDefects
) -> RecordedResponse:
    """Return the response of the simulated model to one question: right, or with a defect.

    Args:
        known: The right response to the question.
        question: The index of the question.
        slot: The number of the request, which decides whether the response is corrupted.
        in_flight: The number of requests in flight when the request arrived.
        defects: How often, and from which load on, responses are wrong.
    """
    content = right_response_text(known)
    content = _add_defects(content, question, slot, in_flight, defects)

    if known.check == TOOL_CALL_CHECK:
        # The content of a tool call is its arguments, and the response has no other text.
        call = RecordedCall(name=tool_to_call(known), arguments=content)
        return RecordedResponse(slot=slot, question=question, text="", calls=(call,))

    return RecordedResponse(slot=slot, question=question, text=content)


def _add_defects(
    right_text: str, question: int, slot: int, in_flight: int, defects: AnswerDefects
) -> str:
    """Return a right response with the defects of the model, or unchanged if it has none.

    Args:
        right_text: The text of the right response.
        question: The index of the question, which decides the words that the model chooses
            differently. They are the same in every response to this question.
        slot: The number of the request, which decides whether its response is corrupted.
        in_flight: The number of requests in flight when the request arrived.
        defects: How often, and from which load on, responses are wrong.
    """
    text = right_text
    if defects.changed_words_share:
        text = change_words(text, defects.changed_words_share, defects.seed, question)

    is_load_high_enough = in_flight > defects.above_in_flight
    random_fraction = draw_uniform(defects.seed, _WRONG_STREAM, slot)
    is_corrupted = is_load_high_enough and random_fraction < defects.wrong_share
    if is_corrupted:
        text = corrupt_text(text, defects.seed, slot)

    return text


def tool_to_call(known: KnownAnswer) -> str:
    """Return the name of the expected tool, or of the first tool if any tool is right."""
    if known.expected:
        return known.expected
    return next(iter(known.tools))


def right_response_text(known: KnownAnswer) -> str:
    """Return the text of a right response, or the arguments of the right tool call."""
    match known.check:
        case "similarity":
            return known.references[0]
        case "tool_call":
            arguments_schema = known.tools[tool_to_call(known)]
            return _encode_example(arguments_schema)
        case "json":
            return known.expected or _encode_example(known.schema or {})
        case "exact" | "choice":
            return known.expected


def corrupt_text(text: str, seed: int, slot: int) -> str:
    """Return a text in which one word, at a random position, is replaced by a different word.

    The seed and the number of the request (`slot`) decide the position and the word.
    """
    text_words = text.split(" ")
    random_fraction = draw_uniform(seed, _WORD_STREAM, slot)
    position = int(random_fraction * len(text_words))
    text_words[position] = _other_word(text_words[position], seed, slot)
    return " ".join(text_words)


def change_words(text: str, share: float, seed: int, question: int) -> str:
    """Return a text in which all words from a random position on are replaced by other words.

    A model that chooses one word differently also continues with different words. For example, "a b
    c" may become "a x y". The same arguments always give the same text.

    Args:
        text: The right response to a question.
        share: The probability, at each word, that the replacement begins there.
        seed: The seed of the random choices.
        question: The index of the question. Each question has different random choices.
    """
    text_words = text.split(" ")
    word_count = len(text_words)
    first_changed = _find_first_changed(word_count, share, seed, question)

    for position in range(first_changed, word_count):
        # The random number of a word is selected by its question and its position.
        draw_number = question * word_count + position
        text_words[position] = _other_word(text_words[position], seed, draw_number)

    return " ".join(text_words)


def _find_first_changed(word_count: int, share: float, seed: int, question: int) -> int:
    """Return the position of the first changed word, or `word_count` if no word is changed."""
    for position in range(word_count):
        if draw_uniform(seed, _CHANGED_WORD_STREAM, question, position) < share:
            return position
    return word_count


def _other_word(word: str, seed: int, draw_number: int) -> str:
    """Return a random word of the simulation that differs from a word."""
    random_fraction = draw_uniform(seed, _WORD_STREAM, draw_number)
    index = int(random_fraction * len(TOKEN_WORDS))
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
    """Return an example value that fits a JSON Schema.

    For example, the schema {"type": "array", "items": {"type": "integer"}} gives [1]. Keywords that
    restrict a value further, such as `pattern`, are ignored.
    """
    if "const" in schema:
        return schema["const"]
    if schema.get("enum"):
        return schema["enum"][0]

    value_type = schema.get("type", "object")
    if isinstance(value_type, list):
        # A list of types allows a value of any of these types.
        value_type = value_type[0]

    if value_type == "object":
        properties = schema.get("properties", {})
        return {name: build_example(properties[name]) for name in properties}
    if value_type == "array":
        item_schema = schema.get("items", {"type": "string"})
        return [build_example(item_schema)]

    return _EXAMPLES_OF_TYPES.get(value_type)
