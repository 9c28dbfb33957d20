"""JUnit XML, the format of test outcomes that every build server reads. Pure: takes cases, returns text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

import msgspec

Outcome = Literal["passed", "failed", "error", "skipped"]
OUTCOME_OF_MET: dict[bool | None, Outcome] = {True: "passed", False: "failed", None: "skipped"}
"""Whether a promise was met -> the outcome of its case."""


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One test case. `text` is the reason, on one or more lines; for a passed case it is the output."""

    name: str
    group: str
    outcome: Outcome
    text: str = ""


def simulated_case(group: str) -> Case:
    """Return the case that marks a result of a simulated server. It passes: it judges nothing."""
    name = "SIMULATED: a performance model answered, and no real server was measured"
    return Case(name=name, group=group, outcome="passed")


_TAGS = {"failed": "failure", "error": "error", "skipped": "skipped"}


def render(suite: str, cases: Sequence[Case]) -> str:
    """An XML document with one test suite, ending in a newline."""
    from xml.etree import ElementTree

    count = Counter(case.outcome for case in cases)
    totals = {"failures": count["failed"], "errors": count["error"], "skipped": count["skipped"]}
    attributes = {name: str(value) for name, value in {"tests": len(cases), **totals}.items()}
    root = ElementTree.Element("testsuites", attributes)
    own = ElementTree.SubElement(root, "testsuite", {"name": _printable(suite), **attributes})
    for case in cases:
        names = {"classname": _printable(case.group), "name": _printable(case.name)}
        test = ElementTree.SubElement(own, "testcase", names)
        text = _printable(case.text)
        if case.outcome != "passed":
            first = text.splitlines()[0] if text else case.outcome
            ElementTree.SubElement(test, _TAGS[case.outcome], message=first).text = text
        elif text:
            ElementTree.SubElement(test, "system-out").text = text
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(root, "unicode") + "\n"


def _printable(text: str) -> str:
    """The text without the characters that XML 1.0 does not allow."""
    return "".join(
        c
        for c in text
        if c in "\t\n\r"
        or (c >= " " and not 0xD800 <= ord(c) <= 0xDFFF and c not in "\ufffe\uffff")
    )
