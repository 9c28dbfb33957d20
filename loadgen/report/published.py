"""The published reference figures as text, Markdown and JSON tables, each with its source, date, quality and notes.

Pure: takes table names, returns a string. No figure is shown without the notes that belong to it.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from loadgen import format
from loadgen.mlperf import published
from loadgen.report.cost import show_table

WIDTH = 100
SECTIONS = ("nodes", "mlperf", "latency", "limits", "capacity", "figures")


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One table, ready to print: cells as text, `left` columns left-aligned, the lines `after` below the rows."""

    title: str
    origin: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    left: int
    after: tuple[str, ...]
    notes: tuple[str, ...]


def section(name: str) -> Section:
    """The table with this name, one of SECTIONS. KeyError for any other."""
    return {
        "nodes": _nodes,
        "mlperf": _mlperf,
        "latency": _latency,
        "limits": _limits,
        "capacity": capacity,
        "figures": _figures,
    }[name]()


def render_text(names: Sequence[str], width: int = WIDTH) -> str:
    """The tables as text, ending in a newline."""
    return "\n\n".join("\n".join(told(section(name), width)) for name in names) + "\n"


def render_markdown(names: Sequence[str]) -> str:
    """The tables as Markdown, ending in a newline."""
    blocks = []
    for name in names:
        table = section(name)
        alignment = ["---" if i < table.left else "---:" for i in range(len(table.head))]
        rows = [" | ".join(row) for row in (table.head, alignment, *table.rows)]
        lines = [f"### {table.title}", "", table.origin, "", *(f"| {row} |" for row in rows), ""]
        lines += [f"- {note}" for note in (*table.after, *table.notes)]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) + "\n"


def render_json(names: Sequence[str]) -> str:
    """The tables as stored, with the text of their notes; for nodes and capacity, also the computed figures."""
    rack = published.rack(published.nodes().rows)
    tables: dict[str, Any] = {
        "nodes": published.nodes(),
        "mlperf": published.mlperf(),
        "latency": published.latency(),
        "limits": published.limits(),
        "capacity": published.profiles(),
        "figures": published.figures(),
    }
    document = {}
    for name in names:
        table = msgspec.to_builtins(tables[name])
        table["note_texts"] = published.notes_of(tables[name])
        if name == "nodes":
            table["worked_out"] = msgspec.to_builtins(rack)
        if name == "capacity":
            table["worked_out"] = [
                msgspec.to_builtins(published.arithmetic(row, rack)) for row in published.profiles().rows
            ]
            table["ignored"] = list(published.IGNORED)
        document[name] = table
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def told(table: Section, width: int) -> Iterator[str]:
    """The lines of a table: title, origin, rows, what follows from them, notes."""
    yield table.title
    yield from textwrap.wrap(
        table.origin,
        width,
        initial_indent="  ",
        subsequent_indent="    ",
        break_on_hyphens=False,
        break_long_words=False,
    )
    yield from show_table(table.head, table.rows, table.left)
    for words in table.after:
        yield from textwrap.wrap(words, width, initial_indent="  ", subsequent_indent="    ")
    for words in table.notes:
        yield from textwrap.wrap(words, width, initial_indent="  ! ", subsequent_indent="    ", break_on_hyphens=False)


def _origin(table: published.Table[published.R]) -> str:
    return f"source: {table.source}; date: {table.date}; quality: {table.quality}"


def _nodes() -> Section:
    table = published.nodes()
    rack = published.rack(table.rows)
    rows = [
        (
            str(row.node),
            f"{row.tokens_per_s:,.1f}",
            f"{row.samples_per_s:.3f}",
            f"{row.samples:,}",
            f"{row.run_s:,.0f}",
            f"{row.latency_p50_s:,.0f}",
        )
        for row in table.rows
    ]
    ratio = rack.single_clock / rack.sum_of_rates - 1
    after = (
        f"minimum {rack.least:,.1f}, maximum {rack.most:,.1f}, mean {rack.mean:,.1f}, median {rack.median:,.1f} "
        "tokens/s per node (published median: 61,759)",
        f"sum of the 18 rates: {rack.sum_of_rates:,.1f} tokens/s, each over its own run",
        f"single clock: {rack.single_clock:,.0f} tokens/s, all tokens over the slowest run ({ratio:+.1%})",
    )
    return Section(
        title=table.title,
        origin=_origin(table),
        head=("node", "tokens/s", "samples/s", "samples", "run s", "latency p50 s"),
        rows=tuple(rows),
        left=1,
        after=after,
        notes=tuple(published.notes_of(table)),
    )


def _mlperf() -> Section:
    table = published.mlperf()

    def part(value: float | None, of: float | None) -> str:
        return format.NONE if value is None or not of else f"{value / of:.2f}"

    def rate(value: float | None) -> str:
        return format.NONE if value is None else f"{value:,.0f}"

    rows = [
        (
            f"{row.round} {row.variant}",
            f"{row.submitter}, {row.system}",
            str(row.gpus),
            rate(row.offline),
            rate(row.server),
            rate(row.interactive),
            rate(None if row.offline is None else row.offline / row.gpus),
            part(row.server, row.offline),
            part(row.interactive, row.offline),
            row.quality.removesuffix(" by MLCommons").removesuffix(" of the round only"),
        )
        for row in table.rows
    ]
    head = ("round", "system", "GPUs", "Offline", "Server", "Interact.", "Offl./GPU", "S/O", "I/O", "quality")
    return Section(
        title=table.title + ", output tokens/s",
        origin=_origin(table),
        head=head,
        rows=tuple(rows),
        left=2,
        after=("S/O, I/O: Server and Interactive over Offline; verified: by MLCommons; summary: of the round only",),
        notes=tuple(published.notes_of(table)),
    )


def _latency() -> Section:
    table = published.latency()
    rows = [
        (
            f"{row.run}, {row.scenario}",
            str(row.gpus),
            f"{row.target_qps:g}",
            f"{row.tokens_per_request:.2f}",
            *(f"{ms:g}" for ms in (row.ttft_p50_ms, row.ttft_p99_ms, row.tpot_p50_ms, row.tpot_p99_ms)),
            *(f"{s:g}" for s in (row.latency_p50_s, row.latency_p99_s)),
        )
        for row in table.rows
    ]
    head = ("run", "GPUs", "qps", "tok/request", "TTFT p50 ms", "p99", "TPOT p50 ms", "p99", "latency p50 s", "p99")
    return Section(
        title=table.title,
        origin=_origin(table),
        head=head,
        rows=tuple(rows),
        left=1,
        after=(),
        notes=tuple(published.notes_of(table)),
    )


def _limits() -> Section:
    table = published.limits()
    rows = [
        (
            f"{row.benchmark} {row.scenario}",
            f"{row.ttft_p99_ms:g}",
            f"{row.tpot_p99_ms:g}",
            f"{row.samples:,}",
            f"{row.max_input_tokens:,}",
            f"{row.max_output_tokens:,}",
            format.NONE if row.mean_output_tokens is None else f"{row.mean_output_tokens:,.2f}",
            row.dataset,
        )
        for row in table.rows
    ]
    head = ("benchmark", "TTFT p99 ms", "TPOT p99 ms", "samples", "max in", "max out", "mean out", "data set")
    return Section(
        title=table.title,
        origin=_origin(table),
        head=head,
        rows=tuple(rows),
        left=1,
        after=(),
        notes=tuple(published.notes_of(table)),
    )


def capacity(profile: str = "") -> Section:
    """The published capacity table with its figures recomputed; only one profile if `profile` is given."""
    table = published.profiles()
    shown = [row for row in table.rows if profile in ("", row.profile)]
    rack = published.rack(published.nodes().rows)
    rows = []
    for row in shown:
        reproduced = published.arithmetic(row, rack)
        rows.append(
            (
                f"{row.profile}: {row.title}",
                f"{row.tokens:,}",
                f"{row.output:,}",
                f"~{row.published_per_s:,.0f}/s",
                f"{reproduced.as_published:,.1f}/s",
                f"{reproduced.by_output:,.0f}/s",
                f"{reproduced.single_clock:,.0f}/s",
            )
        )
    return Section(
        title=table.title,
        origin=_origin(table),
        head=("profile", "tokens", "output", "published", "again", "by output", "on one clock"),
        rows=tuple(rows),
        left=1,
        after=(
            f"again: {rack.sum_of_rates:,.1f} tokens/s over input + output tokens, as published; by output: over "
            f"output tokens alone; on one clock: the same with {rack.single_clock:,.0f} tokens/s",
            "what this arithmetic ignores:",
            *(f"- {words}" for words in published.IGNORED),
        ),
        notes=tuple(published.notes_of(table, shown)),
    )


def _figures() -> Section:
    table = published.figures()
    return Section(
        title=table.title,
        origin=_origin(table),
        head=("figure", "published", "found"),
        rows=tuple((row.name, f"{row.value} {row.unit}".strip(), row.found) for row in table.rows),
        left=3,
        after=(),
        notes=tuple(published.notes_of(table)),
    )
