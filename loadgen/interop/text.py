"""A result file of another tool as text and as a page, under that tool's own names and definitions; and on the page of
a run of ours, what others would have reported of it. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from loadgen.core import format
from loadgen.formats import ForeignResult
from loadgen.interop.other_definitions import ToolFigures
from loadgen.present import page, table
from loadgen.present.table import wrapped

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
        values = [result.figures.get(f"{path}.{stat}") for stat in STATS]
        if any(value is not None for value in values):
            yield (name, *map(format.milliseconds, values))


def _rates(result: ForeignResult) -> Iterator[tuple[str, str]]:
    for path, name in RATES.items():
        if (value := result.figures.get(path)) is not None:
            is_count = path.startswith(("requests", "tokens.i", "tokens.output")) and value.is_integer()
            yield name, format.count(int(value)) if is_count else format.quantity(value)


def _about(result: ForeignResult) -> dict[str, str]:
    about = {"Tool": f"{result.tool} {result.version}".rstrip(), "File": result.file, "Model": result.model}
    return about | {"Target": result.target, "Load": result.load, "When": result.started}


def render_text(result: ForeignResult) -> str:
    """Tables for a terminal, ending in a newline. The last lines say how the tool counts; nothing is checked."""
    lines = [f"{name:<11}{value}" for name, value in _about(result).items() if value]
    lines += ["", *table.text(("ms, as it calls them", *STATS), list(_latencies(result)))]
    lines += ["", *(f"{name:<26}{value:>14}" for name, value in _rates(result)), ""]
    lines += wrapped(f"How it counts: {result.counts}.")
    lines += [line for note in result.notes for line in wrapped(f"Note: {note}.")]
    return "\n".join([*lines, "Figures only: no records, no fingerprint, no verdict of ours."]) + "\n"


def render_html(result: ForeignResult) -> str:
    """The same content as an HTML page."""
    sheet = page.Page(f"{result.tool}: {result.file}", f"loadgen report of a file by {result.tool}")
    sheet.mark("FOREIGN", f"figures of {result.tool}, under its definitions: not ours, and not checked")
    sheet.heading(" · ".join(filter(None, (result.tool, result.model, result.load))))
    sheet.facts(**_about(result))
    sheet.table(("ms", *STATS), list(_latencies(result)))
    sheet.table(("", ""), list(_rates(result)))
    sheet.say(f"How it counts: {result.counts}.")
    sheet.listed(result.notes)
    return sheet.render()


def of_our_run(sheet: page.Page, others: Sequence[ToolFigures]) -> None:
    """The part of the page of a run: the same records by the definitions of other tools."""
    sheet.section("How other tools would have reported this very run", id="others")
    sheet.say(
        "The same records, put through the definitions of other tools. Where a figure differs from ours, the "
        "definition does, not the server. What a tool cannot know or does not report is a dash."
    )
    head = ("", "TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99", "ITL p50", "ITL p99", "E2E p50", "E2E p99")
    rows = [(other.tool, *(format.milliseconds(one) for pair in other.figures for one in pair)) for other in others]
    sheet.table(head, rows)
    with sheet.details("What each of them counts"):
        sheet.table(("tool", "counts"), [(other.tool, other.counts) for other in others], "words")
