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
INTRODUCTION = """
This page lists performance results of LLM servers that others have published, with remarks on what
they mean. It is for people who compare their own measurements with public ones, or who use
`loadgen size` without a measurement of their own. None of these numbers was measured by loadgen.

`loadgen size` accepts `published:NAME` in place of a measurement. NAME is a part of the name of a
system in the table of [MLPerf results](#mlperf-inference-llama-2-70b-output-tokenss).
"""
NEXT = """
## What to read next

- [Simulation](simulation.md) compares the performance model of loadgen with these results.
- [Size a deployment](../guides/size-and-cost.md) shows how to use them.
"""

IGNORED = (
    "the time to read prompts, which Offline hides in its mean of 272.7 output tokens per sample",
    "latency (the median sample waited 37 to 40 minutes)",
    "how long users wait and think",
    "peaks, routing and lost machines",
)


def page() -> str:
    """Return the text of the page."""
    sections = list(_without_repeated_notes(make_section() for make_section in SECTIONS))
    text = markdown.render(
        Report(title="Published results", generated_by="loadgen", sections=sections)
    )
    title, _, tables = re.sub("(?m)^##(#+ )", r"\1", text).partition("\n")
    return f"{title}\n{INTRODUCTION}{tables}{NEXT}"


def _without_repeated_notes(sections: Iterable[Section]) -> Iterator[Section]:
    """Yield the sections, with a note that belongs to several tables below the first one only."""
    shown: set[str] = set()
    for part_section in sections:
        parts: list[Part] = []
        for part in part_section.parts:
            if isinstance(part, Bullets):
                shown_before = frozenset(shown)
                notes = [note for note in part.sentences if not _is_shown(note, shown_before)]
                shown.update(part.sentences)
                part = Bullets(notes, part.kind)
            parts.append(part)
        yield section(part_section.heading, *parts)


def _is_shown(note: str, shown: frozenset[str]) -> bool:
    """Return True if a note was shown before; the note of a row starts with the name of the row."""
    return note in shown or note.partition(": ")[2] in shown


def _section(
    source: published.PublishedTable[published.R],
    head: tuple[str, ...],
    rows: Sequence[tuple[str, ...]],
    *after: str,
    left: int = 1,
    unit: str = "",
) -> Section:
    """Return a section with the rows of a published table, its source and its notes."""
    return section(
        source.title + unit,
        Paragraph(
            f"Source: {source.source}. Date: {source.date}. Quality: {source.quality}.", "soft"
        ),
        Table(head, rows, label_columns=left),
        Bullets(after),
        Bullets(published.list_notes(source), "warn"),
    )


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


def _nodes() -> Section:
    source = published.load_nodes()
    rack = published.compute_rack_rates(source.rows)
    ratio = rack.single_clock / rack.sum_of_rates - 1
    return _section(
        source,
        (),
        (),
        f"Each virtual machine reached {rack.slowest_node:,.0f} to {rack.fastest_node:,.0f} "
        f"tokens/s, with a mean of {rack.mean:,.0f} and a median of {rack.median:,.0f}.",
        f"The published rate of the rack, {rack.sum_of_rates:,.0f} tokens/s, is the sum of these "
        "rates. The machines did not finish at the same time, though. All tokens divided by the "
        f"time of the slowest machine are {rack.single_clock:,.0f} tokens/s ({ratio:+.1%}). This "
        'page calls that the rate "on a single clock".',
        "The results of all machines are in loadgen/data/reference/nodes.yaml.",
    )


def _mlperf() -> Section:
    source = published.load_systems()

    def rate(value: float | None) -> str:
        return format.NONE if value is None else f"{value:,.0f}"

    return _section(
        source,
        (
            "round",
            "system",
            "GPUs",
            "Offline",
            "Server",
            "Interactive",
            "Offline per GPU",
            "quality",
        ),
        [
            (
                f"{row.round} {row.variant}",
                f"{row.submitter}, {row.system}",
                str(row.gpus),
                *map(rate, (row.offline, row.server, row.interactive)),
                rate(None if row.offline is None else row.offline / row.gpus),
                row.quality.removesuffix(" by MLCommons").removesuffix(" of the round only"),
            )
            for row in source.rows
        ],
        'In the column "quality", "verified" means that MLCommons verified the result, and '
        '"summary" that only the summary of the round contains it.',
        left=2,
        unit=", output tokens/s",
    )


def _latency() -> Section:
    columns = (
        ("run", "{0.run}, {0.scenario}"),
        ("GPUs", "{0.gpus}"),
        ("qps", "{0.target_qps:g}"),
        ("tok/request", "{0.tokens_per_request:.2f}"),
        ("TTFT p50 ms", "{0.ttft_p50_ms:g}"),
        ("p99", "{0.ttft_p99_ms:g}"),
        ("TPOT p50 ms", "{0.tpot_p50_ms:g}"),
        ("p99", "{0.tpot_p99_ms:g}"),
        ("latency p50 s", "{0.latency_p50_s:g}"),
        ("p99", "{0.latency_p99_s:g}"),
    )
    return _section(published.load_latencies(), *_cells(columns, published.load_latencies().rows))


def _limits() -> Section:
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
        "TTFT p99 ms",
        "TPOT p99 ms",
        "samples",
        "max in",
        "max out",
        "mean out",
        "data set",
    )
    return _section(source, head, rows)


def _capacity() -> Section:
    source = published.load_profiles()
    rack = published.compute_rack_rates(published.load_nodes().rows)
    columns = (
        ("profile", "{0.profile.profile}: {0.profile.title}"),
        ("tokens", "{0.profile.tokens:,}"),
        ("output", "{0.profile.output:,}"),
        ("published", "~{0.profile.published_per_s:,.0f}/s"),
        ("again", "{0.per_token:,.1f}/s"),
        ("by output", "{0.per_output_token:,.0f}/s"),
        ("on one clock", "{0.per_output_token_on_single_clock:,.0f}/s"),
    )
    return _section(
        source,
        *_cells(columns, [published.recompute_profile(row, rack) for row in source.rows]),
        f"again: {rack.sum_of_rates:,.1f} tokens/s divided by input and output tokens, as "
        "published. "
        "by output: divided by the output tokens only. on one clock: the same with "
        f"{rack.single_clock:,.0f} tokens/s.",
        f"This arithmetic ignores {'; '.join(IGNORED)}.",
    )


def _single_results() -> Section:
    source = published.load_numbers()
    rows = [(row.name, f"{row.value} {row.unit}".strip()) for row in source.rows]
    return _section(source, ("figure", "published"), rows, left=2)


SECTIONS = (_single_results, _mlperf, _latency, _limits, _capacity, _nodes)


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
