"""Published figures: as they were published, what they say when worked out again, and never without their notes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from loadgen.core.errors import UserError
from loadgen.cost import published as reference
from loadgen.cost import published_text as report
from loadgen.cost.published_command import reference as command
from loadgen.present import text as as_text


def test_the_nodes_give_the_published_total_their_own_median_and_a_single_clock():
    found = reference.rack(reference.nodes().rows)
    assert len(reference.nodes().rows) == 18
    assert round(found.sum_of_rates, 1) == 1_100_948.3
    assert round(found.median, 1) == 62_111.7  # published: 61,759
    assert (found.least, found.most, round(found.mean, 1)) == (57_599.1, 62_803.9, 61_163.8)
    assert found.single_clock == pytest.approx(1_030_088, abs=5)  # of the logs; ours are rounded


@pytest.mark.parametrize(
    ("profile", "published", "by_output"),
    [("qa", 1690, 2200), ("rag", 440, 917), ("summarization", 440, 2200), ("agentic", 110, 1100)],
)
def test_the_capacity_table_is_its_own_arithmetic(profile: str, published: float, by_output: float):
    (row,) = [row for row in reference.profiles().rows if row.profile == profile]
    again = reference.arithmetic(row, reference.rack(reference.nodes().rows))
    assert row.published_per_s == published
    assert again.as_published == pytest.approx(published, rel=0.003)
    assert again.by_output == pytest.approx(by_output, rel=0.002)


def test_every_table_says_where_it_is_from_and_every_note_exists_and_is_used():
    tables: list[reference.Table[Any]] = [
        reference.nodes(),
        reference.mlperf(),
        reference.latency(),
        reference.limits(),
        reference.profiles(),
        reference.figures(),
    ]
    for table in tables:
        assert table.title and table.source and table.date and table.quality and table.rows
        reference.notes_of(table)  # raises KeyError for a note that is not there
    used = {key for table in tables for key in (*table.notes, *(key for row in table.rows for key in row.notes))}
    assert used == set(reference.notes())


def test_a_figure_is_shown_with_its_notes_wherever_it_is_shown():
    for name in report.SECTIONS:
        text = " ".join(as_text.render(report.report([name])).replace("\n", " ").split())
        if "1,100,948" in text:
            assert "sum of 18 rates" in text and "1,030,088 tok/s" in text, name
        if "61,759" in text:
            assert "not the median of the logs" in text, name
    rag = " ".join(as_text.render(report.report(["capacity"])).split())
    assert "rag: 2,500 as published is 150 question" in rag


def test_the_command_prints_all_tables_or_one(capsys: pytest.CaptureFixture[str]):
    assert command(None) == 0
    out = capsys.readouterr().out
    for words in ("62,111.7", "1,030,085", "944,902", "1,693.8/s", "4.375", "deepseek-r1 Interactive", "verified"):
        assert words in out
    assert command(["nodes"], as_json=True) == 0
    whole = json.loads(capsys.readouterr().out)
    assert list(whole) == ["nodes"]
    assert whole["nodes"]["worked_out"]["median"] == pytest.approx(62_111.7)
    assert whole["nodes"]["source"] and whole["nodes"]["note_texts"]
    assert command(["limits"], as_markdown=True) == 0
    assert "| llama2-70b Server | 2000 | 200 |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("how", "says"),
    [({"tables": ["node"]}, 'did you mean "nodes"'), ({"as_json": True, "as_markdown": True}, "choose one")],
)
def test_wrong_words_are_named(how: dict[str, Any], says: str):
    with pytest.raises(UserError) as caught:
        command(**{"tables": None, **how})
    assert says in caught.value.hint
