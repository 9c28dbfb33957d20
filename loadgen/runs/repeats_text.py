"""Repeated runs as text: each figure's mean, its interval by the spread between runs, and the runs themselves. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from loadgen.core import format
from loadgen.core.metrics.registry import SHARES
from loadgen.core.metrics.repeats import RepeatedFigure, RepeatSummary
from loadgen.present import table
from loadgen.present.table import wrapped

MOST_COLUMNS = 5  # runs beside each other; of more only the least and the most


def render_text(repeats: RepeatSummary) -> str:
    """The table of the runs, ending in a newline."""
    count = len(repeats.runs)
    several = count > MOST_COLUMNS
    columns = ("least", "most") if several else repeats.runs
    head = ("", "mean", f"{repeats.confidence:.0%} interval", "spread", *columns)
    rows = []
    for one in repeats.figures:
        values = (min(one.values), max(one.values)) if several else one.values
        rows.append(
            (
                f"{one.name}, {one.unit}" if one.unit else one.name,
                _value(one, one.mean),
                format.NONE if one.low is None else f"{_value(one, one.low)} to {_value(one, one.high)}",
                _spread(one),
                *(_value(one, value) for value in values),
            )
        )
    lines = [f"{format.counted(count, 'run')} of one load{' (SIMULATED)' if repeats.simulated else ''}"]
    lines += table.text(head, rows)
    if not repeats.valid:
        lines += wrapped("Not every run is valid: these means say nothing certain.")
    return "\n".join([*lines, *wrapped(_legend(repeats))]) + "\n"


def render_levels(levels: Sequence[tuple[str, RepeatSummary]]) -> str:
    """The levels of a sweep that was repeated: each figure as its mean with half its interval, ending in a newline."""
    paths = ("tokens.steady_output_per_s", "ttft_ms.p50", "ttft_ms.p99", "tpot_ms.p50", "tpot_ms.p99", "e2e_ms.p50")
    head = ("level", "runs", "tokens/s", "TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99", "E2E p50")
    rows: list[tuple[str, ...]] = []
    for name, repeats in levels:
        figures = {one.metric: one for one in repeats.figures}
        cells = (_with_half(figures.get(path)) for path in paths)
        rows.append((name, f"{len(repeats.runs)}{'' if repeats.valid else ' (not valid)'}", *cells))
    lines = table.text(head, rows, left=0)
    legend = "latencies in ms; the mean of the runs, and half its 95 % interval by the spread between them"
    simulated = any(repeats.simulated for _, repeats in levels)
    return "\n".join([*(["SIMULATED, not a real server"] if simulated else []), *lines, legend]) + "\n"


def _with_half(one: RepeatedFigure | None) -> str:
    if one is None:
        return format.NONE
    half = "" if one.half_width is None else f" ±{one.half_width * 100:.1f} %"
    return f"{_value(one, one.mean)}{half}"


def _legend(repeats: RepeatSummary) -> str:
    if len(repeats.runs) < 2:
        return "One run has no spread between runs, and no interval that holds for another start of the server."
    text = "Interval: of the mean, by Student's t from the spread between runs (standard deviation). "
    text += "It holds for starts and times like these."
    if repeats.tight is not None and repeats.within is not None:
        known = "TTFT, TPOT and E2E p50 and output tokens/s are"
        not_yet = "" if repeats.tight else "not "
        text += f" {known} {not_yet}known to {repeats.within * 100:g} %."
    return text


def _value(one: RepeatedFigure, value: float | None) -> str:
    return format.percent(value) if one.metric in SHARES else format.quantity(value)


def _spread(one: RepeatedFigure) -> str:
    if one.spread is None:
        return format.NONE
    return f"{one.spread * 100:.1f} {'points' if one.metric in SHARES else '%'}"
