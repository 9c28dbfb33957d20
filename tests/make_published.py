"""Writes `docs/evidence/published.md` from the published figures in `loadgen/data/reference`.

`python tests/make_published.py` writes the page again. `cost/test_published.py` checks that it is
current. No figure is shown without the notes that belong to it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from loadgen.core import format
from loadgen.cost import published
from loadgen.render import markdown
from loadgen.render.section import Bullets, Paragraph, Part, Report, Section, Table, section

PAGE = Path(__file__).parent.parent / "docs/evidence/published.md"
SOURCE_WITH_ADDRESS = re.compile(r"Source: ([^\n]*); (https://\S+)\.(?= Date)")
"""Matches a source that ends with its address, which becomes a link."""

INTRODUCTION = """
This page lists performance results of LLM servers that others have published, and says how far they
can be trusted. It is for people who compare their own measurements with public ones, or who use
`loadgen size` without a measurement of their own. None of these numbers was measured by loadgen.

The command `loadgen size` computes how many machines a load needs. It accepts `published:NAME` in
place of a measurement. NAME is any text that only one system in the table of [MLPerf
results](#mlperf-inference-llama-2-70b-output-tokenss) has in its name. For example,
`published:5.1-0008` is the GB200 machine of Azure.
"""
NEXT = """
## What to read next

- [Simulation](simulation.md) compares the performance model of loadgen with these results.
- [Size a deployment](../guides/size-and-cost.md) shows how to use them.
"""

NUMBERS_INTRODUCTION = """
In November 2025, Microsoft and Signal65 reported that a rack with 72 GB300 GPUs had generated more
than one million tokens per second. They ran Llama 2 70B in the Offline scenario of MLPerf, in which
all requests are sent at once. This table repeats the numbers of their reports as they were printed.
"""
NUMBERS_REMARKS = """
We compared each published number of the GB300 rack, on which Microsoft and Signal65 reported in
November 2025, with the public logs of the runs and with other publications. Several numbers are
not what they seem to be:
"""
MLPERF_INTRODUCTION = """
How fast are the systems that were submitted to the benchmark MLPerf Inference? The table shows the
output tokens per second of each system in the three scenarios of MLPerf. In Offline, all requests
are sent at once. In Server, requests arrive at random and have generous latency limits. In
Interactive, the limits are strict.
"""
MLPERF_REMARKS = """
Can you compare two results of Llama 2 70B in the benchmark MLPerf Inference with each other? Only
with care, because they come from different years and companies.

A system can have three rates in output tokens per second. In Offline, all requests are sent at
once. In Server, requests arrive at random with generous latency limits. In Interactive, the limits
are strict. Compare only rates of one scenario, and consider:
"""
LATENCY_INTRODUCTION = """
How long do users wait at the request rates of public MLPerf runs? The table shows TTFT (time to
first token), TPOT (time per output token) and the latency of the complete response. Other rates
lead to other latencies, so compare two systems only if their rates per GPU are similar.
"""
LIMITS_INTRODUCTION = """
A run of MLPerf Inference is valid only if its latencies are within the limits of this table: the
99th percentiles of TTFT (time to first token) and of TPOT (time per output token). The other
columns describe the data set of each benchmark: how many samples it has, how long their inputs and
outputs may be in tokens, and the mean length of the reference outputs.
"""
CAPACITY_INTRODUCTION = """
How many requests per second can a rack of 72 GB300 GPUs serve? The numbers that were published with
its rate of 1,100,948 tokens/s cannot be used for planning. For planning, use the last column of
this table, and only as an upper limit:
"""
CAPACITY_REMARKS = """
The report about a rack of 72 GB300 GPUs says how many requests per second it can serve for four
kinds of applications. Users would not see these rates, for several reasons:
"""
CAPACITY_EXPLANATION = """
The published numbers were computed, not measured. The computation divides output tokens per second
by all tokens of a request, input and output. This mixes two different counts of tokens.

The last column divides by the output tokens only. It also uses a lower rate of the rack, {rate}
tokens/s. This is the rate if all tokens are divided by the time of the slowest machine.

The rate of the rack was measured with all requests sent at once, and without a latency limit. A
rack that has to respond quickly serves fewer requests.
"""
NODES_INTRODUCTION = """
How was the published rate of the rack with 72 GB300 GPUs, {sum} tokens/s, computed? It is a sum of
18 rates, and too high for the rack as one system. If you compare it with another rack, use {rate}
tokens/s, which is {less:.1f} % less.

The rack consists of 18 virtual machines (ND GB300 v6) with four GPUs each. Each machine ran Llama 2
70B in NVFP4, and got all its requests at once. Its rate is its output tokens divided by its own
time.
"""


def page() -> str:
    """Return the text of the page."""
    all_sections = (part_section for make_sections in SECTIONS for part_section in make_sections())
    sections = list(_without_repeated_notes(all_sections))
    text = markdown.render(
        Report(title="Published results", generated_by="loadgen", sections=sections)
    )
    text = SOURCE_WITH_ADDRESS.sub(r"Source: [\1](\2).", text)
    title, _, tables = re.sub("(?m)^##(#+ )", r"\1", text).partition("\n")
    return f"{title}\n{INTRODUCTION}{tables}{NEXT}"


def _without_repeated_notes(sections: Iterable[Section]) -> Iterator[Section]:
    """Yield the sections, with a note that belongs to several tables below the first one only."""
    shown_notes: set[str] = set()
    for part_section in sections:
        parts: list[Part] = []
        for part in part_section.parts:
            if isinstance(part, Bullets):
                shown_before = frozenset(shown_notes)
                notes = [note for note in part.sentences if not _is_shown(note, shown_before)]
                shown_notes.update(part.sentences)
                part = Bullets(notes, part.kind)
            parts.append(part)
        yield section(part_section.heading, *parts, is_subsection=part_section.is_subsection)


def _is_shown(note: str, shown_notes: frozenset[str]) -> bool:
    """Return True if a note was shown before; the note of a row starts with the name of the row."""
    return note in shown_notes or note.partition(": ")[2] in shown_notes


def _table_section(
    source: published.PublishedTable[published.R],
    introduction: str,
    head: tuple[str, ...],
    rows: Sequence[tuple[str, ...]],
    notes: Sequence[str] = (),
    left: int = 1,
    unit: str = "",
    explanation: str = "",
) -> Section:
    """Return a section: introduction, rows of a published table, explanation, notes and source."""
    return section(
        source.title + unit,
        *_paragraphs(introduction),
        Table(head, rows, label_columns=left),
        *_paragraphs(explanation),
        Bullets(notes),
        _source_paragraph(source),
    )


def _remarks_section(heading: str, introduction: str, remarks: Sequence[str]) -> Section:
    """Return the remarks on a table, which stand below it as a section of their own."""
    return section(heading, *_paragraphs(introduction), Bullets(remarks), is_subsection=True)


def _paragraphs(text: str) -> list[Paragraph]:
    """Return the paragraphs of a text, which empty lines divide, without line breaks."""
    return [Paragraph(" ".join(part.split())) for part in text.split("\n\n") if part.strip()]


def _list_unlabelled_notes(source: published.PublishedTable[published.R]) -> list[str]:
    """Return the notes of a table and of its rows, without the names of the rows."""
    texts = published.load_notes()
    keys = [*source.notes, *(key for row in source.rows for key in row.notes)]
    return [texts[key] for key in dict.fromkeys(keys)]


def _source_paragraph(source: published.PublishedTable[published.R]) -> Paragraph:
    """Return the paragraph that names the source, the date and the quality of a table."""
    return Paragraph(f"Source: {source.source}. Date: {source.date}. {source.quality}", "soft")


def _cells(
    columns: Sequence[tuple[str, str]], rows: Sequence[object]
) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the head and the rows of a table.

    Args:
        columns: The head of each column, and the format of its cells.
        rows: The rows.
    """
    return tuple(head for head, _ in columns), [
        tuple(cell.format(row) for _, cell in columns) for row in rows
    ]


def _nodes() -> list[Section]:
    source = published.load_nodes()
    rack = published.compute_rack_rates(source.rows)
    introduction = NODES_INTRODUCTION.format(
        sum=f"{rack.sum_of_rates:,.0f}",
        rate=f"{rack.single_clock:,.0f}",
        less=100 * (1 - rack.single_clock / rack.sum_of_rates),
    )
    remarks = (
        f"Each machine reached {rack.slowest_node:,.0f} to {rack.fastest_node:,.0f} tokens/s, with "
        f"a mean of {rack.mean:,.0f} and a median of {rack.median:,.0f}. The results of all "
        "machines are in the file loadgen/data/reference/nodes.yaml.",
        "The machines did not finish at the same time. The sum of their rates ignores that the "
        "fast machines had nothing to do while the slow ones were still working.",
        f"If all tokens are divided by the time of the slowest machine, the rate is "
        f"{rack.single_clock:,.0f} tokens/s. This is the rate of the rack as one system.",
    )
    return [
        section(
            source.title,
            *_paragraphs(introduction),
            Bullets([*remarks, *published.list_notes(source)]),
            _source_paragraph(source),
        )
    ]


def _mlperf() -> list[Section]:
    source = published.load_systems()

    def rate(value: float | None) -> str:
        return format.NONE if value is None else f"{value:,.0f}"

    head = (
        "round",
        "system",
        "GPUs",
        "Offline",
        "Server",
        "Interactive",
        "Offline per GPU",
        "quality",
    )
    rows = [
        (
            f"{row.round} {row.variant}",
            f"{row.submitter}, {row.system}",
            str(row.gpus),
            *map(rate, (row.offline, row.server, row.interactive)),
            rate(None if row.offline is None else row.offline / row.gpus),
            row.quality.removesuffix(" by MLCommons").removesuffix(" of the round only"),
        )
        for row in source.rows
    ]
    columns = (
        "Quality: MLCommons verified the results that are marked as verified. For the rows marked "
        "as summary, only the summary of the round was available to us.",
        "Round: 99 and 99.9 are the accuracy that the round demands, in percent of the reference.",
        "In the names of systems, 1400W is the nominal power of a GPU. A GB300 rack of Azure "
        "consists of 18 virtual machines (18 x ND GB300 v6), whose runs Signal65 observed.",
    )
    return [
        _table_section(
            source, MLPERF_INTRODUCTION, head, rows, columns, left=2, unit=", output tokens/s"
        ),
        _remarks_section(
            "How to compare these results", MLPERF_REMARKS, _list_unlabelled_notes(source)
        ),
    ]


def _latency() -> list[Section]:
    columns = (
        ("system and scenario", "{0.run}, {0.scenario}"),
        ("GPUs", "{0.gpus}"),
        ("requests/s", "{0.target_qps:g}"),
        ("output tokens per request", "{0.tokens_per_request:.0f}"),
        ("TTFT p50 and p99, ms", "{0.ttft_p50_ms:g} and {0.ttft_p99_ms:g}"),
        ("TPOT p50 and p99, ms", "{0.tpot_p50_ms:g} and {0.tpot_p99_ms:g}"),
        ("E2E latency p50 and p99, s", "{0.latency_p50_s:g} and {0.latency_p99_s:g}"),
    )
    source = published.load_latencies()
    head, rows = _cells(columns, source.rows)
    notes = published.list_notes(source)
    return [_table_section(source, LATENCY_INTRODUCTION, head, rows, notes)]


def _limits() -> list[Section]:
    source = published.load_limits()
    rows = [
        (
            row.label,
            f"{row.ttft_p99_ms:g}",
            f"{row.tpot_p99_ms:g}",
            *(f"{count:,}" for count in (row.samples, row.max_input_tokens, row.max_output_tokens)),
            format.NONE if row.mean_output_tokens is None else f"{row.mean_output_tokens:,.2f}",
            row.dataset,
        )
        for row in source.rows
    ]
    head = (
        "benchmark",
        "TTFT p99, ms",
        "TPOT p99, ms",
        "samples",
        "longest input",
        "longest output",
        "mean output",
        "data set",
    )
    notes = published.list_notes(source)
    return [_table_section(source, LIMITS_INTRODUCTION, head, rows, notes)]


def _capacity() -> list[Section]:
    source = published.load_profiles()
    rack = published.compute_rack_rates(published.load_nodes().rows)
    columns = (
        ("application", "{0.profile.title} ({0.profile.profile})"),
        ("input and output tokens per request", "{0.profile.tokens:,}"),
        ("output tokens per request", "{0.profile.output:,}"),
        ("published requests/s", "~{0.profile.published_per_s:,.0f}"),
        ("requests/s, 1,100,948 tokens/s divided by all tokens", "{0.per_token:,.1f}"),
        (
            "upper limit in requests/s, divided by output tokens only",
            "{0.per_output_token_on_single_clock:,.0f}",
        ),
    )
    head, rows = _cells(columns, [published.recompute_profile(row, rack) for row in source.rows])
    remarks = (
        "The published numbers are the output rate of the rack divided by all tokens of a request, "
        f"input and output: {rack.sum_of_rates:,.1f} tokens/s / 2,500 tokens = 440.4 requests/s "
        "for RAG. But the rack's rate counts output tokens only.",
        "The rate of the rack was measured in the Offline scenario, which has no latency limit: "
        "the median request waited 37 to 40 minutes.",
        "The requests of this scenario are short, with 272.7 output tokens on average, so the time "
        "for longer prompts is missing.",
        "Peaks of the load, the pauses of users, routing, and machines that fail are not "
        "considered.",
    )
    explanation = CAPACITY_EXPLANATION.format(rate=f"{rack.single_clock:,.0f}")
    return [
        _table_section(source, CAPACITY_INTRODUCTION, head, rows, explanation=explanation),
        _remarks_section(
            "Why these rates are not a capacity for users",
            CAPACITY_REMARKS,
            [*remarks, *_list_unlabelled_notes(source)],
        ),
    ]


def _single_results() -> list[Section]:
    source = published.load_numbers()
    head = ("number", "as published")
    rows = [(row.name, f"{row.value} {row.unit}".strip()) for row in source.rows]
    return [
        _table_section(source, NUMBERS_INTRODUCTION, head, rows, left=2),
        _remarks_section(
            "What we found when we checked these numbers",
            NUMBERS_REMARKS,
            published.list_notes(source),
        ),
    ]


SECTIONS = (_single_results, _mlperf, _latency, _limits, _capacity, _nodes)


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
