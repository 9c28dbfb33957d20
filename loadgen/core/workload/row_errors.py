"""Mistakes in a row of a data set."""

from __future__ import annotations

from loadgen.core.errors import Code
from loadgen.core.units import InvalidValueError


class BadRowError(InvalidValueError):
    """A row is not valid.

    Attributes:
        column: The byte in the row, counted from 1. 0 means the whole row.
    """

    def __init__(
        self, code: Code, problem: str, hint: str = "", key: str = "", *, column: int = 0
    ) -> None:
        super().__init__(code, problem, hint, key)
        self.column = column


class EmptyConversationError(BadRowError):
    """A conversation without a question. It is left out and no error."""
