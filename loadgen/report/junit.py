"""JUnit XML, as CI systems read it: cases in suites, each passed, failed, or skipped with a reason.

Pure. A case that could not be decided is `skipped`: neither a pass nor a failure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal
from xml.sax.saxutils import quoteattr

import msgspec


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One test case."""

    suite: str
    name: str
    outcome: Literal["passed", "failed", "skipped"]
    message: str = ""


def render(cases: Sequence[Case], name: str = "loadgen") -> str:
    """The document, ending in a newline. Suites stand in the order of their first cases."""
    suites = dict.fromkeys(case.suite for case in cases)
    lines = ['<?xml version="1.0" encoding="UTF-8"?>', f"<testsuites name={_attribute(name)}{_counts(cases)}>"]
    for suite in suites:
        inside = [case for case in cases if case.suite == suite]
        lines.append(f"  <testsuite name={_attribute(suite)}{_counts(inside)}>")
        for case in inside:
            head = f"    <testcase classname={_attribute(suite)} name={_attribute(case.name)}"
            if case.outcome == "passed":
                lines.append(f"{head}/>")
                continue
            tag = "failure" if case.outcome == "failed" else "skipped"
            lines += [f"{head}>", f"      <{tag} message={_attribute(case.message)}/>", "    </testcase>"]
        lines.append("  </testsuite>")
    return "\n".join([*lines, "</testsuites>"]) + "\n"


def _counts(cases: Sequence[Case]) -> str:
    failed, skipped = (sum(case.outcome == outcome for case in cases) for outcome in ("failed", "skipped"))
    return f' tests="{len(cases)}" failures="{failed}" errors="0" skipped="{skipped}"'


def _attribute(text: str) -> str:
    """Quoted, without the control characters that XML cannot carry."""
    return quoteattr("".join(char if char.isprintable() or char == " " else " " for char in text))
