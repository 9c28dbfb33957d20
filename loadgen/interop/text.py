"""What a result file of another tool says, under that tool's own names and definitions; and, on the page of a run of
ours, what others would have reported of it. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from loadgen.core import format
from loadgen.formats import ForeignResult
from loadgen.interop.other_definitions import ToolFigures
from loadgen.render.section import (
    Bullets,
    Notice,
    Paragraph,
    Report,
    Section,
    Table,
    named_facts,
    section,
)

STATS = ("mean", "p50", "p90", "p95", "p99", "max")
RATES = {
    "load.completed_rps": "requests/s",
    "goodput.rps": "goodput, requests/s",
    "tokens.output_per_s": "output tokens/s",
    "tokens.total_per_s": "input + output tokens/s",
    "tokens.input": "input tokens",
    "tokens.output": "output tokens",
    "requests.ok": "requests ok",
    "requests.failed": "requests failed",
}


def _latencies(result: ForeignResult) -> Iterator[tuple[str, ...]]:
    for path, name in result.called.items():
        values = [result.metrics.get(f"{path}.{stat}") for stat in STATS]
        if any(value is not None for value in values):
            yield (name, *map(format.milliseconds, values))


def _rates(result: ForeignResult) -> Iterator[tuple[str, str]]:
    for path, name in RATES.items():
        if (value := result.metrics.get(path)) is not None:
            is_count = (
                path.startswith(("requests", "tokens.i", "tokens.output")) and value.is_integer()
            )
            yield name, format.count(int(value)) if is_count else format.quantity(value)


def _about(result: ForeignResult) -> dict[str, str]:
    about = {
        "Tool": f"{result.tool} {result.version}".rstrip(),
        "File": result.file,
        "Model": result.model,
    }
    return about | {"Target": result.target, "Load": result.load, "When": result.started}


def report(result: ForeignResult) -> Report:
    """Its figures under its names. The last lines say how the tool counts; nothing is checked."""
    latencies, rates = list(_latencies(result)), list(_rates(result))
    return Report(
        title=" · ".join(filter(None, (result.tool, result.model, result.load))),
        page_title=f"{result.tool}: {result.file}",
        generated_by=f"loadgen report of a file by {result.tool}",
        notices=[
            Notice(
                "FOREIGN",
                f"figures of {result.tool}, under its definitions: not ours, and not checked",
            )
        ],
        sections=[
            section("", named_facts(**_about(result))),
            section("Latencies", Table(("ms, as it calls them", *STATS), latencies)),
            section("Rates and counts", Table(("", ""), rates)),
            section("How it counts", f"{result.counts}.", Bullets(result.notes)),
            section("", "Figures only: no records, no fingerprint, no verdict of ours."),
        ],
    )


ANOTHER = (
    "The same records, put through the definitions of other tools. Where a figure differs from ours, the definition "
    "does, not the server. What a tool cannot know or does not report is a dash."
)


def of_our_run(others: Sequence[ToolFigures]) -> tuple[Section, ...]:
    """On the page of a run: the same records by the definitions of other tools."""
    head = (
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
    rows = [
        (other.tool, *(format.milliseconds(one) for pair in other.figures for one in pair))
        for other in others
    ]
    counts = [(other.tool, other.counts) for other in others]
    return (
        section(
            "How other tools would have reported this very run",
            Paragraph(ANOTHER if rows else ""),
            Table(head, rows),
            folded=True,
            page_only=True,
            id="others",
        ),
        section(
            "What each of them counts",
            Table(("tool", "counts"), counts, "prose"),
            folded=True,
            page_only=True,
        ),
    )
