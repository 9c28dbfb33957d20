"""The kind of a file with the calls of an application, as the SDK writes it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from loadgen.core import format
from loadgen.interop import application_calls, application_calls_text
from loadgen.interop.application_calls import Calls
from loadgen.result_kinds import ResultFunctions


def fits(path: Path) -> bool:
    """Return True if a path is a file with calls of an application."""
    return path.is_file() and application_calls.is_calls(path)


def load(path: Path) -> list[Calls]:
    """Return the calls, grouped by label. Raises UserError for a line that is no call."""
    return application_calls.read_calls(path)


def headline(groups: Sequence[Calls]) -> str:
    """Return how many calls there are and how many succeeded."""
    all_calls = groups[0]
    calls_text = format.counted(all_calls.calls, "call")
    return f"{calls_text} of an application, {format.count(all_calls.ok)} succeeded."


FUNCTIONS = ResultFunctions(
    fits=fits,
    load=load,
    headline=headline,
    report=application_calls_text.report,
    document=format.document,
)
