"""Renders test outcomes as JUnit XML, the format that CI servers read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal
from xml.etree import ElementTree

import msgspec

Outcome = Literal["passed", "failed", "error", "skipped"]
OUTCOME_OF_MET: dict[bool | None, Outcome] = {True: "passed", False: "failed", None: "skipped"}
"""The outcome of a test case by whether its objective was met. None means undecided."""

_OUTCOME_TAGS = {"failed": "failure", "error": "error", "skipped": "skipped"}


class JUnitCase(msgspec.Struct, frozen=True, kw_only=True):
    """One test case.

    `text` is the reason of the outcome, or the output of a passed case. Its first line is the
    message that CI servers show in their overview.
    """

    name: str
    group: str
    outcome: Outcome
    text: str = ""


def simulated_case(group: str) -> JUnitCase:
    """Return the case that marks the result of a simulated server. It passes: it judges nothing."""
    name = "SIMULATED: results come from a performance model, not from real hardware"
    return JUnitCase(name=name, group=group, outcome="passed")


def render(suite: str, cases: Sequence[JUnitCase]) -> str:
    """Return an XML document with one test suite, ending in a newline."""
    attributes = _create_count_attributes(cases)
    root = ElementTree.Element("testsuites", attributes)
    suite_attributes = {"name": _remove_illegal_characters(suite), **attributes}

    suite_element = ElementTree.SubElement(root, "testsuite", suite_attributes)
    for case in cases:
        _append_case(suite_element, case)

    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(root, "unicode") + "\n"


def _create_count_attributes(cases: Sequence[JUnitCase]) -> dict[str, str]:
    """Return the XML attributes with the number of cases and of each outcome that is not passed."""
    outcomes = Counter(case.outcome for case in cases)
    return {
        "tests": str(len(cases)),
        "failures": str(outcomes["failed"]),
        "errors": str(outcomes["error"]),
        "skipped": str(outcomes["skipped"]),
    }


def _append_case(suite_element: ElementTree.Element, case: JUnitCase) -> None:
    """Append a test case to its suite.

    A case that did not pass contains an element for its outcome, whose message is the first line of
    the text. The text of a passed case counts as its output.
    """
    attributes = {
        "classname": _remove_illegal_characters(case.group),
        "name": _remove_illegal_characters(case.name),
    }
    case_element = ElementTree.SubElement(suite_element, "testcase", attributes)

    text = _remove_illegal_characters(case.text)
    if case.outcome != "passed":
        message = text.splitlines()[0] if text else case.outcome
        tag = _OUTCOME_TAGS[case.outcome]
        ElementTree.SubElement(case_element, tag, message=message).text = text
    elif text:
        ElementTree.SubElement(case_element, "system-out").text = text


def _remove_illegal_characters(text: str) -> str:
    """Return the text without the characters that XML 1.0 does not allow."""
    return "".join(filter(_is_legal_in_xml, text))


def _is_legal_in_xml(character: str) -> bool:
    if character in "\t\n\r":
        return True
    is_surrogate = 0xD800 <= ord(character) <= 0xDFFF
    return character >= " " and not is_surrogate and character not in "\ufffe\uffff"
