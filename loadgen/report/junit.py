"""JUnit XML, the format of test outcomes that every build server reads. Pure: takes cases, returns text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal
from xml.sax.saxutils import escape, quoteattr

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One test case. `text` is the reason, on one or more lines; for a passed case it is the output."""

    name: str
    group: str
    outcome: Literal["passed", "failed", "error", "skipped"]
    text: str = ""


_TAGS = {"failed": "failure", "error": "error", "skipped": "skipped"}


def render(suite: str, cases: Sequence[Case]) -> str:
    """An XML document with one test suite, ending in a newline."""
    counts = {outcome: sum(case.outcome == outcome for case in cases) for outcome in _TAGS}
    totals = (
        f'tests="{len(cases)}" failures="{counts["failed"]}" errors="{counts["error"]}" skipped="{counts["skipped"]}"'
    )
    lines = ['<?xml version="1.0" encoding="UTF-8"?>', f"<testsuites {totals}>"]
    lines.append(f"  <testsuite name={_quoted(suite)} {totals}>")
    for case in cases:
        head = f"    <testcase classname={_quoted(case.group)} name={_quoted(case.name)}"
        if case.outcome == "passed":
            body = f"><system-out>{_escaped(case.text)}</system-out></testcase>" if case.text else "/>"
            lines.append(head + body)
        else:
            tag = _TAGS[case.outcome]
            first = case.text.splitlines()[0] if case.text else case.outcome
            lines.append(f"{head}><{tag} message={_quoted(first)}>{_escaped(case.text)}</{tag}></testcase>")
    return "\n".join([*lines, "  </testsuite>", "</testsuites>"]) + "\n"


def _printable(text: str) -> str:
    """The text without the characters that XML 1.0 does not allow."""
    return "".join(
        c for c in text if c in "\t\n\r" or (c >= " " and not 0xD800 <= ord(c) <= 0xDFFF and c not in "\ufffe\uffff")
    )


def _escaped(text: str) -> str:
    return escape(_printable(text))


def _quoted(text: str) -> str:
    return quoteattr(_printable(text))
