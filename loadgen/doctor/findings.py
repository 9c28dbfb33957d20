"""The findings of `loadgen doctor`, and their report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

import msgspec

from loadgen.core import format
from loadgen.render.section import Kind, Paragraph, Report, Section, Table, section

State = Literal["ok", "note", "warning", "fault", "unknown"]
OK: State = "ok"
NOTE: State = "note"
WARNING: State = "warning"
FAULT: State = "fault"
"""No load can work on the target. Text calls this an error."""
UNKNOWN: State = "unknown"
"""The check could not be made, for example because the server sends no token counts."""

STATE_LABELS: dict[State, str] = {
    FAULT: "error",
    WARNING: "warning",
    UNKNOWN: "unknown",
    NOTE: "note",
    OK: "ok",
}
"""The states as text, the most serious one first."""


class Finding(msgspec.Struct, frozen=True):
    """The result of one check.

    Attributes:
        check: The name of the check, such as "tls".
        state: How serious it is.
        observed: What was observed. The key in JSON is "found".
        meaning: The consequence for a measurement.
        advice: What to do, or "" if there is nothing to do.
        code: The error code if the target cannot be used at all, else "".
    """

    check: str
    state: State
    observed: str = msgspec.field(name="found")
    meaning: str
    advice: str = ""
    code: str = ""


def build_report(title: str, findings: Sequence[Finding]) -> Report:
    """Return a report of the findings.

    A terminal prints the result and what needs attention. The full report lists every check.
    """
    result = _summarize_findings(findings)
    return Report(
        title=title,
        generated_by="loadgen doctor",
        headline=[result],
        sections=[section("", _build_table(findings))],
        brief=_build_terminal_sections(title, result, findings),
    )


def _build_terminal_sections(
    title: str, result: Paragraph, findings: Sequence[Finding]
) -> Sequence[Section]:
    """Return the sections for a terminal.

    They are the result, a table of the findings that need attention, and how many checks passed.
    """
    problems = [finding for finding in findings if finding.state in (FAULT, WARNING, UNKNOWN)]
    problems.sort(key=_rank_by_seriousness)

    sections = [section(title, result), section("", _build_table(problems))]
    if len(problems) < len(findings):
        passed_count = len(findings) - len(problems)
        checks = format.counted(passed_count, "other check")
        sections.append(section("", f"{checks} passed. --full prints all."))

    return sections


def _rank_by_seriousness(finding: Finding) -> int:
    """Return a number by which findings are sorted: 0 for the most serious state."""
    return list(STATE_LABELS).index(finding.state)


def _build_table(findings: Sequence[Finding]) -> Table:
    """Return a table with a row for each finding."""
    rows = [
        (STATE_LABELS[finding.state], finding.check, _describe_finding(finding))
        for finding in findings
    ]
    return Table(("", "check", "result"), rows, "prose")


def _describe_finding(finding: Finding) -> str:
    """Return the text of a finding, such as "9 open files: too few. Raise the limit."."""
    text = f"{finding.observed}: {finding.meaning}."
    if finding.advice:
        text += f" {finding.advice[0].upper()}{finding.advice[1:]}."
    return text


def _summarize_findings(findings: Sequence[Finding]) -> Paragraph:
    """Return a sentence that says whether a load can run, coloured by the most serious state."""
    counts = Counter(finding.state for finding in findings)
    problem_counts: list[str] = []  # such as ["1 error", "2 warnings", "3 unknown"]
    for state in (FAULT, WARNING, UNKNOWN):
        if not counts[state]:
            continue

        label = STATE_LABELS[state]
        if state == UNKNOWN:
            # The label is an adjective, which has no plural.
            problem_counts.append(f"{counts[state]} {label}")
        else:
            problem_counts.append(format.counted(counts[state], label))

    if not problem_counts:
        return Paragraph("Ready for a run.", "good")

    problems = ", ".join(problem_counts)
    if counts[FAULT]:
        return Paragraph(f"Not ready for a run: {problems}.", "bad")

    kind: Kind = "warn" if counts[WARNING] else ""
    return Paragraph(f"Ready for a run: {problems}.", kind)
