"""A report has the same content as text, Markdown and HTML, and escapes outside text."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_text import find_numbers, of_page

from loadgen.render import html, markdown, text
from loadgen.render.page import Axis, Bar, Chart, Series, Tile
from loadgen.render.section import (
    Bars,
    Bullets,
    Charts,
    Facts,
    Notice,
    Paragraph,
    Part,
    Quoted,
    Report,
    Table,
    Tiles,
    named_facts,
    section,
)

CHART = Chart(title="drawn", x=Axis(), y=Axis(), series=(Series(x=[1.0], y=[7777.0], color="c1"),))
FULL_REPORT = Report(
    title="A title 1",
    generated_by="loadgen x",
    notices=[Notice("SIMULATED", "a model 2")],
    headline=[Paragraph("It held 3/s.", "good", large=True)],
    sections=[
        section(
            "", Tiles([Tile("Rate", "3", "/s")]), named_facts(Made_by=("a", "", "b"), Left_out="")
        ),
        section(
            "Levels",
            Charts([CHART]),
            Table(
                ("load", "verdict", "why"),
                [("4", "met", "all of it"), ("5", "MISSED", "TTFT p99 6 ms")],
                "remarks",
            ),
            Paragraph("~: too few", "soft"),
        ),
        section("No rows, no head", Table(("a",), [])),
        section(
            "Offers",
            Table(("USD per", "a", "b"), [("request", "8", "9")], wrap_columns=True),
            Bullets(["10 of 11"]),
        ),
        section("Quoted", Quoted("$ command 12"), is_subsection=True),
        section("A bar", Bars(rows=[Bar("x", "8888")])),
        section("On a page", Bullets(["9999"]), page_only=True),
    ],
)


def test_text_markdown_and_page_of_a_report_have_the_same_numbers() -> None:
    rendered_text, pasted, page = (
        text.render(FULL_REPORT),
        markdown.render(FULL_REPORT),
        html.render(FULL_REPORT),
    )

    assert (
        find_numbers(rendered_text) | {"1"}
        == find_numbers(pasted)
        == find_numbers(of_page(page)) - {"9999"}
    )
    assert find_numbers(rendered_text) >= {"2", "3", "4", "5", "6", "8", "9", "10", "11", "12"}
    for cell_text in ("No rows", "9999", "8888", "7777"):
        assert cell_text not in rendered_text and cell_text not in pasted
    assert "7777" in page and "9999" in page and "8888" in page


def test_the_text_of_a_report_begins_with_notices_and_the_result() -> None:
    lines = text.render(FULL_REPORT).splitlines()

    assert lines[:2] == ["SIMULATED: a model 2", "It held 3/s."]

    last = Report(
        title="T",
        generated_by="",
        sections=[section("s", "x")],
        headline=[Paragraph("A")],
        headline_last=True,
    )

    assert text.render(last) == "T\n\ns\nx\n\nA\n"
    assert text.render_sections([section("s", "x"), section("t", "")]) == "s\nx\n"
    assert text.render_sections([section("t", "", Bullets([]))]) == ""


def test_colors_of_a_report_follow_the_verdicts() -> None:
    rendered_text = text.render(FULL_REPORT, color=True)
    assert (
        "\x1b[33mSIMULATED\x1b[0m" in rendered_text
        and "\x1b[31mMISSED\x1b[0m" in rendered_text
        and "\x1b[32mmet\x1b[0m" in rendered_text
    )
    assert re.sub(r"\x1b\[[0-9]*m", "", rendered_text) == text.render(FULL_REPORT)


def test_the_header_of_a_wide_table_takes_two_lines() -> None:
    names = [f"a metric {i}" for i in range(9)]
    rows = [
        (f"{i}/s", *("1,234" for _ in names), "a remark that is longer than the room beside it")
        for i in (1, 2)
    ]
    lines = text.render_sections(
        [section("", Table(("load", *names, ""), rows, "remarks"))]
    ).splitlines()

    assert lines[0].split() == ["a", "metric"] * 9 and lines[1].split() == ["load", *"012345678"]
    assert [line.split()[0] for line in lines[2:]] == [
        "1/s",
        "a",
        "2/s",
        "a",
    ]  # the remark stands below
    assert max(map(len, lines)) <= 100

    narrow = text.render_sections(
        [section("", Table(("load", *names[:3]), [("1/s", "1", "2", "3")]))]
    ).splitlines()

    assert narrow[0].split("  ")[-1] == "a metric 2"


def test_a_sentence_in_a_table_wraps_in_its_row_or_below_it() -> None:
    sentence = "word " * 30
    sections_text = text.render_sections(
        [section("", Table(("a", "b", ""), [("1", "2", sentence)], "remarks"))]
    )

    assert len(sections_text.splitlines()) == 3 and all(
        line.startswith(("a", "1", "      ")) for line in sections_text.splitlines()
    )

    below = text.render_sections(
        [section("", Table(("a", "why"), [("x" * 80, sentence)], "prose"))]
    )

    assert below.splitlines()[1] == "x" * 80 and all(
        line.startswith("    w") for line in below.splitlines()[2:]
    )


def test_columns_of_a_table_that_do_not_fit_continue_below() -> None:
    names = [f"results/number-{i}" for i in range(9)]
    lines = text.render_sections(
        [section("", Table(("per", *names), [("cost", *"123456789")], wrap_columns=True))]
    ).splitlines()
    assert max(map(len, lines)) <= text.WIDTH and sum(line.startswith("cost") for line in lines) > 1
    assert all(any(name in line for line in lines) for name in names)


short_texts = st.text(st.characters(exclude_categories=("Cs", "Cc")), max_size=12)
parts: st.SearchStrategy[Part] = st.one_of(
    short_texts,
    st.builds(Paragraph, short_texts, st.sampled_from(["", "good", "soft"])),
    st.builds(Bullets, st.lists(short_texts, max_size=2)),
    st.builds(
        Facts,
        st.lists(st.tuples(short_texts, short_texts), max_size=2, unique_by=lambda row: row[0]),
    ),
    st.builds(Quoted, short_texts),
    st.builds(lambda row: Table(row, [row]), st.lists(short_texts, min_size=2, max_size=3)),
    st.builds(
        lambda row: Table(row, [row], "remarks"), st.lists(short_texts, min_size=2, max_size=3)
    ),
)


class Balanced(HTMLParser):
    """Counts the tags that a parser sees."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:  # noqa: ARG002 - HTMLParser's signature
        self.tags.append(tag)


def tags(page: str) -> list[str]:
    parser = Balanced()
    parser.feed(page)
    return parser.tags


@pytest.mark.parametrize("width", range(12, 40))
def test_a_table_with_empty_remarks_fits_any_width(width: int) -> None:
    table = Table(
        ("load", "state", "remark"), [("12 req/s", "passed", ""), ("14", "failed", "")], "remarks"
    )
    assert "12 req/s" in text.render_sections([section("", table)], width=width)


@given(st.lists(parts, max_size=4), short_texts)
def test_untrusted_text_is_escaped_in_pages_and_tables(report_parts: list[Part], head: str) -> None:
    def report(of: list[Part], name: str) -> Report:
        return Report(title=name, generated_by=name, sections=[section(name, *of)])

    plain = [_plain(part) for part in report_parts]
    assert tags(html.render(report(report_parts, head or "x"))) == tags(
        html.render(report(plain, "x"))
    )
    pasted = markdown.render(report(report_parts, head))
    assert "<" not in re.sub(r"```+text\n.*?\n```+", "", pasted, flags=re.S).replace("\\<", "")
    text.render(report(report_parts, head))


def _plain(part: Part) -> Part:  # noqa: PLR0911 - one case for each kind of part
    """Return the same part with a letter instead of every word."""

    def plain(cell_text: str) -> str:
        return "x" * bool(cell_text)

    match part:
        case str():
            return plain(part)
        case Paragraph():
            return Paragraph(plain(part.text), part.kind)
        case Bullets():
            return Bullets(["x" for _ in part.sentences])
        case Facts():
            return Facts([(str(i), plain(cell)) for i, (_, cell) in enumerate(part.rows)])
        case Quoted():
            return Quoted(plain(part.text))
        case Table():
            return Table(
                [plain(cell) for cell in part.head],
                [[plain(c) for c in row] for row in part.rows],
                part.kind,
            )
        case _:
            return part
