"""Renders the checks of the rules of MLPerf Endpoints. Pure."""

from __future__ import annotations

from loadgen.mlperf.endpoints.rule_checks import CurveCheck, Outcome, RuleCheck
from loadgen.mlperf.text import disclosure_notice
from loadgen.render.section import Paragraph, Report, Section, Table, section, simulated_notice

OUTCOME_LABELS: dict[Outcome, str] = {
    "met": "ok",
    "missed": "MISSED",
    "flagged": "FLAGGED",
    "rehearsal": "rehearsal",
    "not checkable": "-",
}


def create_report(check: CurveCheck) -> Report:
    """Return the report of all rule checks. Rules that cannot be checked have their own section."""
    notices = [disclosure_notice(check.disclosure)]
    if check.is_simulated:
        notices.insert(0, simulated_notice())

    return Report(
        title=f"MLPerf Endpoints rehearsal, unofficial: rules for {check.benchmark}",
        generated_by="loadgen mlperf endpoints check",
        notices=notices,
        headline=[Paragraph(describe_check(check), large=True)],
        headline_last=True,
        sections=[
            _section("Rules that the files show", check, is_checkable=True),
            _section("Rules that the files cannot show", check, is_checkable=False),
        ],
    )


def describe_check(check: CurveCheck) -> str:
    """Return the number of checks with each outcome in one sentence."""
    return (
        f"Rehearsal, unofficial: {check.count('met')} rules are met, {check.count('missed')} are "
        f"missed, {check.count('flagged')} would be flagged, {check.count('rehearsal')} is missed "
        "by every rehearsal, and "
        f"{check.count('not checkable')} cannot be checked from files."
    )


def _section(heading: str, check: CurveCheck, *, is_checkable: bool) -> Section:
    """Return a section with a table of the checkable rules, or of the rules that are not.

    Args:
        heading: The heading of the section.
        check: The checks of all rules.
        is_checkable: Selects the rules.
    """
    head = ("section", "", "rule", "found") if is_checkable else ("section", "rule", "reason")
    rows = []
    for rule_check in check.checks:
        is_rule_checkable = rule_check.outcome != "not checkable"
        if is_rule_checkable == is_checkable:
            rows.append(_row(rule_check, is_checkable=is_checkable))
    return section(heading, Table(head, rows, kind="prose"))


def _row(check: RuleCheck, *, is_checkable: bool) -> list[str]:
    """Return the table row of a rule. A rule that cannot be checked has no outcome."""
    if is_checkable:
        return [check.section, OUTCOME_LABELS[check.outcome], check.rule, check.value]
    return [check.section, check.rule, check.value]
