"""The published figures as tables, each with its source, date, quality and notes, in text, Markdown and JSON.

Pure: tables in, a string out. A figure is never shown here without the notes that belong to it.
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
    """One table as it is shown: cells as text, the first `left` columns to the left, `after` lines below it."""

    title: str
    origin: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    left: int
    after: tuple[str, ...]
    notes: tuple[str, ...]


def section(name: str) -> Section:
    """A table by its name in SECTIONS."""
    return {
        "nodes": _nodes,
        "mlperf": _mlperf,
        "latency": _latency,
        "limits": _limits,
        "capacity": capacity,
        "figures": _figures,
    }[name]()


def render_text(names: Sequence[str], width: int = WIDTH) -> str:
    """Ends in a newline."""
    return "\n\n".join("\n".join(told(section(name), width)) for name in names) + "\n"


def render_markdown(names: Sequence[str]) -> str:
    blocks = []
    for name in names:
        one = section(name)
        line = ["---" if i < one.left else "---:" for i in range(len(one.head))]
        rows = [" | ".join(row) for row in (one.head, line, *one.rows)]
        lines = [f"### {one.title}", "", one.origin, "", *(f"| {row} |" for row in rows), ""]
        lines += [f"- {words}" for words in (*one.after, *one.notes)]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) + "\n"


def render_json(names: Sequence[str]) -> str:
    """The tables as they are stored, with the text of their notes and, for nodes and capacity, what was worked out."""
    rack = published.rack(published.nodes().rows)
    tables: dict[str, Any] = {
        "nodes": published.nodes(),
        "mlperf": published.mlperf(),
        "latency": published.latency(),
        "limits": published.limits(),
        "capacity": published.profiles(),
        "figures": published.figures(),
    }
    whole = {}
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
        whole[name] = table
    return json.dumps(whole, indent=2, ensure_ascii=False) + "\n"


def told(one: Section, width: int) -> Iterator[str]:
    """The lines of a table: its title, where it is from, its rows, what follows from them, its notes."""
    yield one.title
    yield from textwrap.wrap(
        one.origin, width, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False, break_long_words=False
    )
    yield from show_table(one.head, one.rows, one.left)
    for words in one.after:
        yield from textwrap.wrap(words, width, initial_indent="  ", subsequent_indent="    ")
    for words in one.notes:
        yield from textwrap.wrap(words, width, initial_indent="  ! ", subsequent_indent="    ", break_on_hyphens=False)


def _origin(table: published.Table[published.R]) -> str:
    return f"source: {table.source}; date: {table.date}; quality: {table.quality}"


def _nodes() -> Section:
    table = published.nodes()
    found = published.rack(table.rows)
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
    ratio = found.single_clock / found.sum_of_rates - 1
    after = (
        f"minimum {found.least:,.1f}, maximum {found.most:,.1f}, mean {found.mean:,.1f}, median {found.median:,.1f} "
        "tokens/s per node (published median: 61,759)",
        f"sum of the 18 rates: {found.sum_of_rates:,.1f} tokens/s, each over its own run",
        f"single clock: {found.single_clock:,.0f} tokens/s, all tokens over the slowest run ({ratio:+.1%})",
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
    """The capacity table worked out again; of one profile where one is named."""
    table = published.profiles()
    shown = [row for row in table.rows if profile in ("", row.profile)]
    rack = published.rack(published.nodes().rows)
    rows = []
    for row in shown:
        again = published.arithmetic(row, rack)
        rows.append(
            (
                f"{row.profile}: {row.title}",
                f"{row.tokens:,}",
                f"{row.output:,}",
                f"~{row.published_per_s:,.0f}/s",
                f"{again.as_published:,.1f}/s",
                f"{again.by_output:,.0f}/s",
                f"{again.single_clock:,.0f}/s",
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
