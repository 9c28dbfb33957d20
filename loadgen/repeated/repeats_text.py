"""Repeated runs in words and tables: each figure's mean, its interval by the spread between runs. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from loadgen.core import format
from loadgen.render.section import Table
from loadgen.repeated.comparable_metrics import SHARE_PATHS
from loadgen.repeated.repeats import TIGHT_METRICS, RepeatedMetric, RepeatSummary

MOST_COLUMNS = 5  # runs beside each other; of more only the least and the most


NO_VALID_RUN = "No run is a valid measurement: do not rely on these means."


def left_out_text(repeats: RepeatSummary) -> str:
    """Return the sentence that names the INVALID runs that count in no mean, or ""."""
    if not repeats.excluded_runs:
        return ""
    counted = format.counted(len(repeats.runs), "run")
    verb = "is" if len(repeats.excluded_runs) == 1 else "are"
    names = ", ".join(repeats.excluded_runs)
    return f"{len(repeats.excluded_runs)} of {counted} {verb} INVALID and left out of the means: {names}."


def figures_table(repeats: RepeatSummary) -> Table:
    """A row for each figure: its mean, interval and spread, and its value in the runs."""
    several = len(repeats.counted_runs) > MOST_COLUMNS
    columns = ("least", "most") if several else repeats.counted_runs
    head = ("", "mean", f"{repeats.confidence:.0%} interval", "spread", *columns)
    rows = []
    for one in repeats.metrics:
        values = (min(one.values), max(one.values)) if several else one.values
        rows.append(
            (
                f"{one.name}, {one.unit}" if one.unit else one.name,
                value_words(one, one.mean),
                interval_words(one) or format.NONE,
                _spread(one),
                *(value_words(one, value) for value in values),
            )
        )
    return Table(head, rows)


def interval_words(one: RepeatedMetric) -> str:
    return "" if one.low is None else f"{value_words(one, one.low)} to {value_words(one, one.high)}"


def headline(repeats: RepeatSummary) -> str:
    """The figures that repeats are taken for, in one sentence."""
    mark = "SIMULATED: " if repeats.simulated else "" if repeats.valid else "NOT VALID: "
    return mark + sentence(repeats)


def sentence(repeats: RepeatSummary) -> str:
    """The same without what has to be known first."""
    known = (
        f"{one.name} {value_words(one, one.mean)} {one.unit}".rstrip() + _bounds(one)
        for one in main_figures(repeats)
    )
    counted = format.counted(len(repeats.counted_runs), "run")
    left_out = f" {left_out_text(repeats)}" if repeats.excluded_runs else ""
    return f"{counted} of one load: {', '.join(known) or 'no figure of all'}.{left_out}"


def _bounds(one: RepeatedMetric) -> str:
    return f" ({interval_words(one)})" if one.low is not None else ""


def main_figures(repeats: RepeatSummary) -> Iterator[RepeatedMetric]:
    return (one for one in repeats.metrics if one.metric in TIGHT_METRICS)


def headline_of_levels(levels: Sequence[tuple[str, RepeatSummary]]) -> str:
    """What was repeated, in one sentence."""
    return ("SIMULATED: " if any(one.simulated for _, one in levels) else "") + sentence_of_levels(
        levels
    )


def sentence_of_levels(levels: Sequence[tuple[str, RepeatSummary]]) -> str:
    most = max((len(one.runs) for _, one in levels), default=0)
    return f"A sweep of {format.counted(len(levels), 'level')}, up to {most} times: {', '.join(dict(levels))}."


OF_LEVELS = (
    "latencies in ms; the mean of the runs, and half its 95 % interval by the spread between them"
)


def levels_table(levels: Sequence[tuple[str, RepeatSummary]]) -> Table:
    """Levels that were repeated: each figure as its mean with half its interval."""
    paths = (
        "tokens.steady_output_per_s",
        "ttft_ms.p50",
        "ttft_ms.p99",
        "tpot_ms.p50",
        "tpot_ms.p99",
        "e2e_ms.p50",
    )
    head = ("level", "runs", "tokens/s", "TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99", "E2E p50")
    rows: list[tuple[str, ...]] = []
    for name, repeats in levels:
        figures = {one.metric: one for one in repeats.metrics}
        cells = (_with_half(figures.get(path)) for path in paths)
        rows.append((name, _counted_runs_text(repeats), *cells))
    return Table(head, rows)


def _counted_runs_text(repeats: RepeatSummary) -> str:
    """Return how many runs the means of a level are of, and how many are not valid."""
    if not repeats.valid:
        return f"{len(repeats.runs)} (not valid)"
    if repeats.excluded_runs:
        return f"{len(repeats.counted_runs)} ({len(repeats.excluded_runs)} INVALID)"
    return str(len(repeats.runs))


def _with_half(one: RepeatedMetric | None) -> str:
    if one is None:
        return format.NONE
    half = "" if one.half_width is None else f" ±{one.half_width * 100:.1f} %"
    return f"{value_words(one, one.mean)}{half}"


def legend(repeats: RepeatSummary) -> str:
    if len(repeats.counted_runs) < 2:
        return "One run has no spread between runs, and no interval that holds for another start of the server."
    text = (
        "Interval: of the mean, by Student's t from the spread between runs (standard deviation). "
    )
    text += "It holds for starts and times like these."
    if repeats.tight is not None and repeats.within is not None:
        known = "TTFT, TPOT and E2E p50 and output tokens/s are"
        not_yet = "" if repeats.tight else "not "
        text += f" {known} {not_yet}known to {repeats.within * 100:g} %."
    return text


def value_words(one: RepeatedMetric, value: float | None) -> str:
    return format.percent(value) if one.metric in SHARE_PATHS else format.quantity(value)


def _spread(one: RepeatedMetric) -> str:
    if one.spread is None:
        return format.NONE
    return f"{one.spread * 100:.1f} {'points' if one.metric in SHARE_PATHS else '%'}"
