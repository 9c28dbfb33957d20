"""The calls of an application, as the SDK wrote them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from loadgen.core import format
from loadgen.interop import application_calls, application_calls_text
from loadgen.interop.application_calls import Calls
from loadgen.result_kinds import ResultFunctions


def fits(path: Path) -> bool:
    return path.is_file() and application_calls.is_calls(path)


def load(path: Path) -> list[Calls]:
    return application_calls.read(path)


def headline(groups: Sequence[Calls]) -> str:
    whole = groups[0]
    return f"{format.counted(whole.calls, 'call')} of an application, {format.count(whole.ok)} of them ok."


FUNCTIONS = ResultFunctions(
    fits=fits,
    load=load,
    headline=headline,
    report=application_calls_text.report,
    document=format.document,
)
