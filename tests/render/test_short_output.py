"""The brief form of a report: what a terminal prints by default."""

from __future__ import annotations

from pathlib import Path

from golden import normalize

from loadgen.render import html, markdown, text
from loadgen.render.section import Notice, Paragraph, Report, Table, section

REPORT = Report(
    title="Title",
    generated_by="loadgen test",
    notices=(Notice("SIMULATED", "no hardware"),),
    headline=(Paragraph("The long answer."),),
    sections=(section("Details", "A section."),),
    brief=(
        section("", "rag on gb300-vm"),
        section("", Table(("SLO", "measured"), [("TTFT p95", "128 ms")]), indented=True),
    ),
)


def test_the_text_of_a_report_is_brief_by_default() -> None:
    assert text.render(REPORT) == (
        "SIMULATED: no hardware\n\nrag on gb300-vm\n\n  SLO       measured\n  TTFT p95    128 ms\n"
    )


def test_the_full_text_of_a_report_has_every_section() -> None:
    rendered = text.render(REPORT, full=True)

    assert "Details" in rendered
    assert "gb300-vm" not in rendered


def test_pages_and_markdown_of_a_report_have_every_section() -> None:
    for rendered in (markdown.render(REPORT), html.render(REPORT)):
        assert "A section." in rendered
        assert "gb300-vm" not in rendered


def test_a_report_without_a_brief_form_is_printed_in_full() -> None:
    report = Report(title="Title", generated_by="", sections=(section("Details", "A section."),))

    assert text.render(report) == text.render(report, full=True) == "Title\n\nDetails\nA section.\n"


def test_normalizing_an_output_replaces_paths_dates_durations_and_seeds() -> None:
    varying = "/tmp/x/qa-20261122-101500-1a2b: 2026-11-22T10:15:00Z, 1 min 29 s, 12.5 ms --seed 17"

    assert normalize(varying, Path("/tmp/x"), durations=True) == (
        "<PATH>/qa-<ID>: <DATE>, <DURATION>, <DURATION> --seed <SEED>"
    )
