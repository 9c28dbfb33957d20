"""Tests of published numbers: as printed, as recomputed, and always with their notes."""

from __future__ import annotations

from typing import Any

import make_published
import pytest

from loadgen.cost import published as reference
from loadgen.cost.size_sources import describe_published_capacity


def test_published_rates_of_nodes_give_the_total_the_median_and_the_single_clock_rate():
    published_rack = reference.compute_rack_rates(reference.load_nodes().rows)

    assert len(reference.load_nodes().rows) == 18
    assert round(published_rack.sum_of_rates, 1) == 1_100_948.3
    assert round(published_rack.median, 1) == 62_111.7  # published: 61,759
    assert (
        published_rack.slowest_node,
        published_rack.fastest_node,
        round(published_rack.mean, 1),
    ) == (
        57_599.1,
        62_803.9,
        61_163.8,
    )
    assert published_rack.single_clock == pytest.approx(
        1_030_088, abs=5
    )  # of the logs; ours are rounded


@pytest.mark.parametrize(
    ("profile", "published", "by_output"),
    [("qa", 1690, 2200), ("rag", 440, 917), ("summarization", 440, 2200), ("agentic", 110, 1100)],
)
def test_published_capacities_follow_from_their_token_rates(
    profile: str, published: float, by_output: float
):
    (row,) = [row for row in reference.load_profiles().rows if row.profile == profile]
    recomputed_profile = reference.recompute_profile(
        row, reference.compute_rack_rates(reference.load_nodes().rows)
    )
    assert row.published_per_s == published
    assert recomputed_profile.per_token == pytest.approx(published, rel=0.003)
    assert recomputed_profile.per_output_token == pytest.approx(by_output, rel=0.002)


def test_every_published_table_names_its_source_and_every_note_is_used():
    tables: list[reference.Table[Any]] = [
        reference.load_nodes(),
        reference.load_systems(),
        reference.load_latencies(),
        reference.load_limits(),
        reference.load_profiles(),
        reference.load_numbers(),
    ]
    for table in tables:
        assert table.title and table.source and table.date and table.quality and table.rows
        reference.list_notes(table)  # raises KeyError for a note that is not there
    used = {
        key
        for table in tables
        for key in (*table.notes, *(key for row in table.rows for key in row.notes))
    }

    assert used == set(reference.load_notes())


def test_the_page_of_published_numbers_equals_its_tables_and_notes():
    page = make_published.page()

    assert make_published.PAGE.read_text("utf-8") == page, "python tests/make_published.py"
    for text in (
        "62,111.7",
        "1,030,085",
        "944,902",
        "1,693.8",
        "4.375",
        "deepseek-r1 Interactive",
        "verified",
    ):
        assert text in page
    for key in ("sum-of-rates", "median", "capacity-table"):
        assert page.count(reference.load_notes()[key].strip()) == 1
    assert "| llama2-70b Server | 2000 | 200 |" in page


def test_a_size_states_the_published_capacity_and_that_it_is_no_measurement():
    (note,) = describe_published_capacity("rag")
    assert (
        "~440 per second" in note
        and "917 by output tokens" in note
        and "without a latency limit" in note
    )
    assert describe_published_capacity("mine") == []
