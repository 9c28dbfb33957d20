"""Validates documents with pydantic and reports mistakes with file, line and column.

All mistakes of a file are reported at once. An error says what was written, where it is, and what
is allowed there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from loadgen.core import units
from loadgen.core.errors import (
    Code,
    CombinedError,
    LoadgenError,
    Place,
    UserError,
    did_you_mean,
)
from loadgen.core.slo import METRIC_ALIASES
from loadgen.core.workload.file_models import NO_SUCH_TAG, FileContext
from loadgen.core.workload.yaml_marks import Map, Position, Seq, child_path, place_at

Model = TypeVar("Model", bound=BaseModel)
Loc = tuple[int | str, ...]
"""The keys and list indexes that lead to a value, as pydantic reports them."""

MAX_SHOWN_CHARACTERS = 60  # of a wrong value

OTHER_SPELLINGS = METRIC_ALIASES | {"warmup": "measured"}
"""Maps a key of a file to the field that it is read as."""

EXAMPLES = {
    "arrival": "arrival: {poisson: 10/s} or {closed: 8}",
    "arrival with parameters": "arrival: {gamma: {rate: 10/s, burstiness: 0.5}}",
    "burstiness": "{gamma: {rate: 10/s, burstiness: 0.5}}",
    "delay": "2s, or {uniform: {min: 1s, max: 3s}}",
    "delay with parameters": "{normal: {mean: 2s, stddev: 500ms}}",
    "from": "{ramp: {from: 1/s, to: 10/s}}",
    "input_tokens": "input_tokens: 150",
    "length": "150, or {uniform: {min: 100, max: 200}}",
    "length with parameters": "{normal: {mean: 300, stddev: 50}}",
    "name": "name: anything",
    "output_tokens": "output_tokens: 200",
    "requests": "requests: {input_tokens: 150, output_tokens: 200}, or {from: prompts.jsonl}",
    "result_tokens": "result_tokens: 500",
    "sigma": "{lognormal: {median: 300, sigma: 0.8}}",
    "stages": "stages: [{arrival: {poisson: 10/s}, duration: 30s}]",
    "stddev": "{normal: {mean: 300, stddev: 50}}",
    "term": "{ttft: 2s}, or {ttft: {limit: 2s, at: p95}}",
    "term with parameters": "{ttft: {limit: 2s, at: p95}}",
    "to": "{ramp: {from: 1/s, to: 10/s}}",
    "tool_result_tokens": "tool_result_tokens: 500",
    "url": "url: http://host:8000",
}
"""Examples for hints, by the key of a value or by the noun of a union."""


class _Problem(NamedTuple):
    """What is wrong with a value: a code, a predicate such as "must be a number", and a hint."""

    code: Code
    predicate: str
    hint: str = ""


_NOT_A_MAPPING = _Problem("wrong_type", "must be a mapping (key: value)")
_EMPTY = _Problem("missing_value", "must not be empty")
_PROBLEMS = {
    "bool_type": _Problem("wrong_type", "must be true or false"),
    "dict_type": _NOT_A_MAPPING,
    "finite_number": _Problem("out_of_range", "must be finite"),
    "float_type": _Problem(
        "wrong_type", "must be a number", "write it without quotes and without a unit"
    ),
    "int_type": _Problem(
        "wrong_type", "must be an integer", "write it without quotes and without a unit"
    ),
    "model_attributes_type": _NOT_A_MAPPING,
    "model_type": _NOT_A_MAPPING,
    "string_pattern_mismatch": _Problem(
        "invalid_value",
        "has characters that are not allowed here",
        "use letters, digits, and . _ - after the first character",
    ),
    "string_too_short": _EMPTY,
    "string_type": _Problem("wrong_type", "must be text", "put it in quotes"),
    "too_short": _EMPTY,
    "tuple_type": _Problem("wrong_type", "must be a list", "start each item with a dash"),
}
"""Maps the type of an error of pydantic to the problem that is reported."""


class Location(NamedTuple):
    """The position of a value in a document, the path of keys to it, and the value itself."""

    position: Position
    path: str
    value: Any

    def place(self, file: str) -> Place:
        """Return the place of this location in a file."""
        return place_at(file, self.position, self.path)


@dataclass(frozen=True)
class DocumentErrors:
    """Collects the mistakes in a document of a user, so that all are reported at once.

    Attributes:
        file: The name of the file in error messages.
        document: The file as it is written, from which each mistake gets its line and column.
        errors: The mistakes so far. The caller and the validators of the document may add others.
    """

    file: str
    document: Map
    errors: list[LoadgenError]

    def add_at(self, loc: Loc, code: Code, problem: str, hint: str) -> None:
        """Add a mistake in the value at this location of the document."""
        place = locate(self.document, loc).place(self.file)
        self.errors.append(UserError(code, problem, place, hint))

    def add_option(self, code: Code, problem: str, option: str, hint: str) -> None:
        """Add a mistake in an option of the command line, such as `--concurrency 8`."""
        self.errors.append(UserError(code, problem, option, hint))

    def add_file_error(self, code: Code, problem: str, hint: str) -> None:
        """Add a mistake of the file as a whole, which has no line."""
        self.errors.append(UserError(code, problem, self.file, hint))

    def raise_if_any(self) -> None:
        """Raise CombinedError with all mistakes, in the order of the file, if there are any."""
        if self.errors:
            raise CombinedError(sort_errors(self.errors))


def validate_document(model: type[Model], document: Any, context: FileContext) -> Model | None:
    """Validate a document of a file and return the model, or None if pydantic refuses it.

    Mistakes are appended to `context.errors`, with their positions in the file. The caller must
    check `context.errors` even if a model is returned, because validators also append errors for
    values that they accept.
    """
    try:
        return model.model_validate(document, context=context)
    except ValidationError as validation_error:
        for error in validation_error.errors(include_url=False):
            context.errors.append(to_user_error(error, document, context.file))
        return None


def sort_errors(errors: list[LoadgenError]) -> list[LoadgenError]:
    """Sort errors by line and column, and leave out those that follow from another one.

    A mistake can cause a second error that says nothing new:

    - A mistyped key is an unknown key, and the key that was meant is missing. The error for the
      missing key is left out.
    - An unset variable makes its value wrong, too. Only the first of several errors at one position
      is kept, unless they are about different missing keys of the mapping at that position.
    """
    meant_keys = {
        error.values["did_you_mean"] for error in errors if "did_you_mean" in error.values
    }
    first_errors: dict[tuple[str, str], LoadgenError] = {}
    for error in errors:
        missing_key = error.key if error.code == "missing_key" else ""
        if missing_key and missing_key in meant_keys:
            continue
        position_and_key = (error.where, missing_key)
        if position_and_key not in first_errors:
            first_errors[position_and_key] = error

    return sorted(first_errors.values(), key=_line_and_column)


def _line_and_column(error: LoadgenError) -> tuple[int, int]:
    """Return the line and column of an error. Errors without a place come first."""
    if error.place is None:
        return 0, 0
    return error.place.line, error.place.column


def locate(document: Map, loc: Loc) -> Location:
    """Return the location of the value that pydantic reports an error for.

    `loc` is pydantic's path to the value: keys of mappings and indexes of lists. It can have
    entries that do not exist in the document, such as the name of a member of a union, or the key
    of a value that was written in a short form. Such entries are skipped. So the result may be the
    location of a value that contains the reported one.
    """
    location = Location(document.at, "", document)
    for key_or_index in loc:
        location = _find_child(location, key_or_index) or location
    return location


def _find_child(parent: Location, key_or_index: int | str) -> Location | None:
    """Return the location of a value inside a mapping or list, or None if there is none.

    A field of a model may have another name in the file: pydantic reports `measured` for a value
    that the user wrote as `warmup`.
    """
    value = parent.value
    if isinstance(value, Map) and isinstance(key_or_index, str):
        key = _find_key(value, key_or_index)
        if key is None:
            return None
        return Location(value.values_at[key], child_path(parent.path, key), value[key])

    if isinstance(value, Seq) and isinstance(key_or_index, int) and key_or_index < len(value):
        path = child_path(parent.path, key_or_index)
        return Location(value.values_at[key_or_index], path, value[key_or_index])

    return None


def _find_key(mapping: Map, field: str) -> str | None:
    """Return the key of a mapping that stands for a field, by its name or by another spelling."""
    for key in mapping:
        is_other_spelling = OTHER_SPELLINGS.get(key) == field
        if key == field or is_other_spelling:
            return key
    return None


def to_user_error(error: ErrorDetails, document: Map, file: str) -> LoadgenError:
    """Convert an error of pydantic to an error for the user, with its place in the file.

    A missing key, a missing value and a value that fits no member of a union have messages of
    their own. All other errors say what is wrong with a value.
    """
    location = _locate_error(document, error["loc"])
    if error["type"] == "missing":
        return _missing_key_error(str(error["loc"][-1]), location, file)

    # Both `key:` and `key: null` are read as None, but only the first has no text in the file.
    has_no_value = error["input"] is None and location.position.text == ""
    if has_no_value:
        return _missing_value_error(location, file)

    fits_no_union_member = error["type"] == NO_SUCH_TAG
    if fits_no_union_member:
        return _union_error(error, location, file)

    problem = _problem_with_value(error, location)
    text = _build_sentence(_subject(error, location), problem.predicate)
    return UserError(problem.code, text, location.place(file), problem.hint)


def _locate_error(document: Map, loc: Loc) -> Location:
    """Return the location of the value that is wrong, or of the key if the key is wrong."""
    if loc and loc[-1] == "[key]":  # The last step is how pydantic marks a wrong key.
        key = str(loc[-2])
        parent = locate(document, loc[:-2])
        if isinstance(parent.value, Map) and key in parent.value:
            return Location(parent.value.keys_at[key], child_path(parent.path, key), key)
    return locate(document, loc)


def _missing_key_error(key: str, location: Location, file: str) -> LoadgenError:
    """Return the error for a key that is missing in the mapping at a location."""
    place = location.place(file)
    path = child_path(location.path, key)
    return UserError("missing_key", f'missing "{key}"', place, _example(key), key=path)


def _missing_value_error(location: Location, file: str) -> LoadgenError:
    """Return the error for a key without a value, which YAML reads as null."""
    key = location.path.rpartition(".")[2]
    text = f"{location.path} has no value"
    return UserError("missing_value", text, location.place(file), _example(key))


def _union_error(error: ErrorDetails, location: Location, file: str) -> LoadgenError:
    """Return the error for a value that selects no member of a `TaggedUnion`.

    Such a union is written as a mapping whose only key selects the member, such as
    `{poisson: 10/s}`. There are three mistakes: the value is no mapping, it has several keys, or
    its key is not known.
    """
    # `TaggedUnion` adds two texts to the error: what the union is called, such as "arrival", and
    # the keys that select a member, joined by commas.
    noun = str(error["ctx"]["noun"])
    known_keys = str(error["ctx"]["known"]).split(", ")

    value = location.value
    if not isinstance(value, Map) or not value:
        subject = _quoted_value_or_path(location)
        problem = _build_sentence(subject, predicate=f"is not {_with_article(noun)}")
        return UserError("wrong_type", problem, location.place(file), _example(noun, known_keys))

    if len(value) > 1:
        problem = f"{_with_article(noun)} has one key, not {len(value)}"
        example = _example(f"{noun} with parameters", known_keys)
        hint = f"its parameters go inside, for example {example}"
        return UserError("conflict", problem, location.place(file), hint)

    (unknown_key,) = value
    problem = f'unknown {noun} "{unknown_key}"'
    place_of_key = place_at(file, value.keys_at[unknown_key], location.path)
    return UserError("unknown_name", problem, place_of_key, did_you_mean(unknown_key, known_keys))


def _build_sentence(subject: str, predicate: str) -> str:
    """Return a sentence such as `"10x" must be a number`. Without a subject it is the predicate."""
    return f"{subject} {predicate}" if subject else predicate


def _with_article(noun: str) -> str:
    """Return a noun with its indefinite article: "an arrival", "a length"."""
    begins_with_vowel = noun[0] in "aeiou"
    return f"an {noun}" if begins_with_vowel else f"a {noun}"


def _problem_with_value(error: ErrorDetails, location: Location) -> _Problem:
    """Return the problem that an error of pydantic describes.

    An `InvalidValueError` that a validator of this package raised already has the text for the
    user. The most common errors of pydantic itself have a text in `_PROBLEMS`. For all others, the
    message of pydantic is used, such as "Input should be less than 5". It becomes a predicate,
    "should be less than 5", because the caller puts the value before it.
    """
    error_type = error["type"]
    context = error.get("ctx", {})

    # For an exception of a validator, pydantic has this type and stores the exception here.
    validator_error = context.get("error") if error_type == "value_error" else None
    if isinstance(validator_error, units.InvalidValueError):
        return _Problem(validator_error.code, str(validator_error), validator_error.hint)

    if error_type == "literal_error":
        accepted_values = _split_accepted_values(context["expected"])
        hint = did_you_mean(location.position.text, accepted_values)
        return _Problem("unknown_name", "is an unknown value", hint)

    if error_type in _PROBLEMS:
        return _PROBLEMS[error_type]

    predicate = error["msg"].replace("Input should", "should").replace("String should", "should")
    return _Problem("out_of_range", predicate)


def _split_accepted_values(expected: str) -> list[str]:
    """Return the values in a text of pydantic such as "'a', 'b' or 'c'"."""
    quoted_values = expected.replace(" or ", ", ").split(", ")
    return [value.strip("'") for value in quoted_values]


def _subject(error: ErrorDetails, location: Location) -> str:
    """Return the subject of a sentence about a wrong value.

    It is the value or its key, or for example `value 3 in "lengths.txt"` if the value is in a
    separate file with one value per line.
    """
    loc = error["loc"]
    if loc and isinstance(loc[-1], int) and isinstance(location.value, str):
        # A value in a column file has no position in the document, which only names the file.
        return f'value {loc[-1] + 1} in "{_shortened(location.position.text)}"'
    return _quoted_value_or_path(location)


def _quoted_value_or_path(location: Location) -> str:
    """Return the subject of a sentence about a value: the value in quotes, or the path of its key.

    Examples are `"10x"` and `stages[0].arrival`. The path is used for a list or a mapping, which
    has no text, and for a URL, which may contain a password. The document as a whole has neither a
    text nor a path, so the result is "".
    """
    text = location.position.text
    may_contain_password = location.path.endswith("url")  # The keys of URLs end so.
    if text and not may_contain_password:
        return f'"{_shortened(text)}"'
    return location.path


def _shortened(text: str) -> str:
    """Return a text, cut after MAX_SHOWN_CHARACTERS."""
    if len(text) <= MAX_SHOWN_CHARACTERS:
        return text
    return f"{text[:MAX_SHOWN_CHARACTERS]}..."


def _example(name: str, known: list[str] | None = None) -> str:
    """Return a hint with the example for a key or noun, and with the known words."""
    parts = []
    if name in EXAMPLES:
        parts.append(f"like {EXAMPLES[name]}")
    if known:
        parts.append(f"known: {', '.join(known)}")
    return "; ".join(parts)
