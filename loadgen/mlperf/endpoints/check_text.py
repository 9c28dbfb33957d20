"""Renders the checks of the rules of MLPerf Endpoints. Pure."""

from __future__ import annotations

from loadgen.mlperf.endpoints.rule_checks import CurveCheck, Outcome
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
    """Return the report of all rule checks, in two tables.

    The first table has the rules whose outcome follows from the files of the curve. The second one
    has the rules that need other evidence, such as an accuracy run.
    """
    notices = [disclosure_notice(check.disclosure)]
    if check.is_simulated:
        notices = [simulated_notice(), *notices]

    return Report(
        title=f"MLPerf Endpoints rehearsal, unofficial: rules for {check.benchmark}",
        generated_by="loadgen mlperf endpoints check",
        notices=notices,
        headline=[Paragraph(describe_check(check), large=True)],
        headline_last=True,
        sections=[_checked_section(check), _unchecked_section(check)],
    )


def describe_check(check: CurveCheck) -> str:
    """Return the number of checks with each outcome in one sentence."""
    return (
        f"Rehearsal, unofficial: {check.count('met')} rules are met, {check.count('missed')} are "
        f"missed, {check.count('flagged')} would be flagged, {check.count('rehearsal')} is missed "
        "by every rehearsal, and "
        f"{check.count('not checkable')} cannot be checked from files."
    )


def _checked_section(check: CurveCheck) -> Section:
    """Return the section with the rules that files show, each with its outcome."""
    head = ("section", "", "rule", "found")
    rows = [
        [rule_check.section, OUTCOME_LABELS[rule_check.outcome], rule_check.rule, rule_check.value]
        for rule_check in check.checks
        if rule_check.outcome != "not checkable"
    ]
    return section("Rules that the files show", Table(head, rows, kind="prose"))


def _unchecked_section(check: CurveCheck) -> Section:
    """Return the section with the rules that files cannot show, each with the reason."""
    head = ("section", "rule", "reason")
    rows = [
        [rule_check.section, rule_check.rule, rule_check.value]
        for rule_check in check.checks
        if rule_check.outcome == "not checkable"
    ]
    return section("Rules that the files cannot show", Table(head, rows, kind="prose"))
