"""Renders the result file of another tool, and how other tools would have reported a run.

The result of another tool keeps that tool's names and definitions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from loadgen.core import format
from loadgen.formats import ForeignResult
from loadgen.interop.tool_metrics import ToolMetrics
from loadgen.render.section import (
    Bullets,
    Facts,
    Notice,
    Paragraph,
    Report,
    Section,
    Table,
    section,
)

STATISTICS = ("mean", "p50", "p90", "p95", "p99", "max")

RATE_LABELS = {
    "load.completed_rps": "requests/s",
    "goodput.rps": "goodput, requests/s",
    "tokens.output_per_s": "output tokens/s",
    "tokens.total_per_s": "input + output tokens/s",
    "tokens.input": "input tokens",
    "tokens.output": "output tokens",
    "requests.ok": "successful requests",
    "requests.failed": "failed requests",
}

COUNTS = ("tokens.input", "tokens.output", "requests.ok", "requests.failed")
"""The metrics that are counts. The others are rates."""

COMPARISON_HEAD = (
    "",
    "TTFT p50",
    "TTFT p99",
    "TPOT p50",
    "TPOT p99",
    "ITL p50",
    "ITL p99",
    "E2E p50",
    "E2E p99",
)
COMPARISON_INTRODUCTION = (
    "These are the same records, evaluated with the definitions of other tools. The "
    "differences come from the definitions, not from the server. A dash means that "
    "the tool does not report the metric."
)


# -- the result of another tool --------------------------------------------------------------------


def report(result: ForeignResult) -> Report:
    """Return the metrics of the result under the tool's names, and how the tool defines them."""
    notice = Notice(
        "FOREIGN",
        f"metrics of {result.tool} by its definitions; loadgen neither measured nor checked them",
    )
    latencies = Table(("ms", *STATISTICS), list(_latency_rows(result)))
    return Report(
        title=" · ".join(filter(None, (result.tool, result.model, result.load))),
        page_title=f"{result.tool}: {result.file}",
        generated_by=f"loadgen report of a file by {result.tool}",
        notices=[notice],
        sections=[
            section("", _source_facts(result)),
            section("Latencies", latencies),
            section("Rates and counts", Table(("", ""), list(_rate_rows(result)))),
            section("Definitions", f"{result.counts}.", Bullets(result.notes)),
            section(
                "", "The file has only metrics: no records, no config fingerprint and no verdict."
            ),
        ],
    )


def _source_facts(result: ForeignResult) -> Facts:
    """Return the tool, the file and the run that a result describes. Unknown facts are empty."""
    return Facts(
        [
            ("Tool", f"{result.tool} {result.version}".rstrip()),
            ("File", result.file),
            ("Model", result.model),
            ("Target", result.target),
            ("Load", result.load),
            ("Started", result.started),
        ]
    )


def _latency_rows(result: ForeignResult) -> Iterator[tuple[str, ...]]:
    """Yield a row for each latency that the result has."""
    for path, label in result.called.items():
        values = [result.metrics.get(f"{path}.{statistic}") for statistic in STATISTICS]
        if any(value is not None for value in values):
            yield (label, *map(format.milliseconds, values))


def _rate_rows(result: ForeignResult) -> Iterator[tuple[str, str]]:
    """Yield a row for each rate and count that the result has."""
    for path, label in RATE_LABELS.items():
        value = result.metrics.get(path)
        if value is None:
            continue
        if path in COUNTS and value.is_integer():
            yield label, format.count(int(value))
        else:
            yield label, format.quantity(value)


# -- a run by the definitions of other tools -------------------------------------------------------


def comparison_sections(tools: Sequence[ToolMetrics]) -> tuple[Section, ...]:
    """Return the sections of a run's page with its metrics by the definitions of each tool.

    They show how much of a difference between two tools comes from their definitions.
    """
    rows = [_comparison_row(tool) for tool in tools]
    definitions = [(tool.tool, tool.definitions) for tool in tools]
    return (
        section(
            "How other tools would have reported this run",
            Paragraph(COMPARISON_INTRODUCTION if rows else ""),
            Table(COMPARISON_HEAD, rows),
            folded=True,
            page_only=True,
            id="others",
        ),
        section(
            "Definitions of each tool",
            Table(("tool", "definitions"), definitions, "prose"),
            folded=True,
            page_only=True,
        ),
    )


def _comparison_row(tool: ToolMetrics) -> tuple[str, ...]:
    """Return the name of a tool, and the p50 and p99 of each latency in the order of the head."""
    values_ms = [value_ms for latency in tool.latencies for value_ms in latency]
    return (tool.tool, *map(format.milliseconds, values_ms))
