"""Targets of the accepted length under speculative decoding, and the table of published ones.

The accepted length is the mean number of output tokens per step of the model: the accepted draft
tokens and one token of the model's own. Two results can only be compared if it is the same in both,
because a server with a better draft model generates more tokens with the same work.

Pure after reading the packaged table `data/acceptance_lengths.yaml`.
"""

from __future__ import annotations

import datetime
import math
import re
from functools import cache
from pathlib import Path

import msgspec
import yaml

from loadgen.core import units
from loadgen.core.errors import did_you_mean

_TABLE_PATH = Path(__file__).parent.parent / "data" / "acceptance_lengths.yaml"
_NUMBER = re.compile(r"[-+]?[0-9]+(?:\.[0-9]+)?(?:e[-+]?[0-9]+)?|[-+]?(?:nan|inf)", re.IGNORECASE)
_EXAMPLES = (
    "write a number from 1 to 999, like 2.49, or a published length like deepseek-v4-pro-mtp:3 "
    "(3 draft tokens)"
)

MIN_LENGTH = 1.0
"""Each step generates at least the token of the model itself."""

MAX_LENGTH = 999.0
"""No server drafts so many tokens, so a larger number is a mistake."""

TOLERANCE = 0.01
"""Lengths that differ by at most this fraction are comparable."""


class AcceptedLengthTarget(msgspec.Struct, frozen=True, kw_only=True):
    """The accepted length that a result is to have.

    Attributes:
        length: The mean number of tokens per step.
        name: The published length that it is, such as `deepseek-v4-pro-mtp:3`. "" for a number.
    """

    length: float
    name: str = ""

    @property
    def text(self) -> str:
        """The target as text: `2.49`, or `2.49 (deepseek-v4-pro-mtp:3)`."""
        return f"{self.length:g} ({self.name})" if self.name else f"{self.length:g}"


class PublishedLengths(msgspec.Struct, frozen=True, kw_only=True):
    """The published accepted lengths of a model with one method of drafting.

    Attributes:
        name: The name in targets.
        model: The model.
        method: The method of drafting.
        thinking: Whether the model reasons before it answers.
        file: The file of the source.
        date: The day on which the source last changed it.
        lengths: The length with 1, 2, ... draft tokens.
    """

    name: str
    model: str
    method: str
    thinking: bool
    file: str
    date: datetime.date
    lengths: tuple[float, ...]


class _Table(msgspec.Struct, frozen=True, kw_only=True):
    """The packaged table: where its lengths are from, and one row per model and method."""

    source: str
    rows: tuple[PublishedLengths, ...]


@cache
def published_lengths() -> tuple[PublishedLengths, ...]:
    """Return the rows of the packaged table of published lengths."""
    text = _TABLE_PATH.read_text("utf-8")
    return msgspec.convert(yaml.safe_load(text), _Table).rows


def parse_target(value: object) -> AcceptedLengthTarget:
    """Return the accepted length that a user wrote in a file or as an option.

    It is written as a number such as `2.49`, or as the name of a published length, such as
    `deepseek-v4-pro-mtp:3` for that of this model with 3 draft tokens.

    Raises:
        units.InvalidValueError: The value is no number from 1 to 999, and not the name of a
            published length.
    """
    if isinstance(value, AcceptedLengthTarget):
        return value

    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    text = f"{value:g}" if is_number else str(value).strip()
    if _NUMBER.fullmatch(text):
        return _parse_number(text)

    name, separator, draft_tokens = text.partition(":")
    has_draft_tokens = bool(separator) and draft_tokens.isdecimal()
    if not has_draft_tokens:
        raise _create_draft_tokens_error(name)
    return _find_published_length(name, int(draft_tokens))


def _parse_number(text: str) -> AcceptedLengthTarget:
    """Return the accepted length, in tokens per step of the model, that a text states as a number.

    Raises:
        units.InvalidValueError: The number is not from MIN_LENGTH to MAX_LENGTH.
    """
    length = float(text)
    if length < MIN_LENGTH:
        problem = "is below 1, and each step generates at least one token"
        raise units.InvalidValueError("out_of_range", problem, _EXAMPLES)

    if length > MAX_LENGTH or math.isnan(length):
        problem = f"must be from {MIN_LENGTH:g} to {MAX_LENGTH:g}"
        raise units.InvalidValueError("out_of_range", problem, _EXAMPLES)

    return AcceptedLengthTarget(length=length)


def _create_draft_tokens_error(name: str) -> units.InvalidValueError:
    """Return the error of a value such as `abc`, which lacks a number of draft tokens."""
    rows = {row.name: row for row in published_lengths()}
    if name not in rows:
        return units.InvalidValueError("invalid_value", "is no accepted length", _EXAMPLES)

    hint = f"write {name}:N with 1 to {len(rows[name].lengths)} draft tokens, like {name}:3"
    return units.InvalidValueError("invalid_value", "lacks the number of draft tokens", hint)


def _find_published_length(name: str, draft_tokens: int) -> AcceptedLengthTarget:
    """Return the accepted length that was published for a model and a number of draft tokens.

    Raises:
        units.InvalidValueError: The table has no row with this name, or the row has no length for
            this number of draft tokens.
    """
    rows = {row.name: row for row in published_lengths()}
    row = rows.get(name)
    if row is None:
        problem = "is no published accepted length"
        hint = did_you_mean(name, tuple(rows))
        raise units.InvalidValueError("unknown_name", problem, hint)

    if not 1 <= draft_tokens <= len(row.lengths):
        problem = f"is not published for {draft_tokens} draft tokens"
        hint = f"1 to {len(row.lengths)} draft tokens, like {name}:3"
        raise units.InvalidValueError("out_of_range", problem, hint)

    length = row.lengths[draft_tokens - 1]
    return AcceptedLengthTarget(length=length, name=f"{name}:{draft_tokens}")
