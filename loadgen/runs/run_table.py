"""A table with one row per run, for runs at several loads: `--concurrency 1,2,4,8`. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from loadgen.core import format
from loadgen.core.metrics.summary import Summary, fails_by_errors
from loadgen.render.section import Paragraph, Section, Table, section, simulated_notice
from loadgen.runs.cells import describe_unsupported, quantile_ms
from loadgen.runs.rates import select_headline_rates
from loadgen.runs.run_title import short_arrival

if TYPE_CHECKING:
    from loadgen.render.section import Part

QUANTILES = ("p50", "p99")

HEAD = (
    "load",
    "ok",
    "req/s",
    "out tok/s",
    "TTFT p50",
    "TTFT p99",
    "TPOT p50",
    "TPOT p99",
    "E2E p50",
    "SLO attainment",
    "",
)


def run_table(summaries: Sequence[Summary]) -> Section:
    """Return a section with a row for each run and the legend of the table."""
    parts: list[Part] = []
    if any(summary.target.simulated for summary in summaries):
        notice = simulated_notice()
        parts.append(f"{notice.label}: {notice.text}")
    parts.append(Table(HEAD, [_run_row(summary) for summary in summaries], "remarks"))
    legend = f"Latencies in ms. Rates are those of the {_windows(summaries)}."
    parts.append(Paragraph(legend, "soft"))
    distributions = [
        distribution
        for summary in summaries
        for distribution in (summary.ttft_ms, summary.tpot_ms, summary.e2e_ms)
    ]
    parts.append(Paragraph(describe_unsupported(distributions, QUANTILES), "soft"))
    return section("", *parts)


def _run_row(summary: Summary) -> tuple[str, ...]:
    """Return the load of a run, its rates and latencies, and its outcome, as cells under HEAD."""
    rates = select_headline_rates(summary)
    return (
        short_arrival(summary.load.arrival) or format.NONE,
        format.count(summary.requests.ok),
        format.quantity(rates.requests),
        format.quantity(rates.output),
        quantile_ms(summary.ttft_ms, "p50"),
        quantile_ms(summary.ttft_ms, "p99"),
        quantile_ms(summary.tpot_ms, "p50"),
        quantile_ms(summary.tpot_ms, "p99"),
        quantile_ms(summary.e2e_ms, "p50"),
        format.percent(summary.goodput.share),
        _outcome(summary),
    )


def _outcome(summary: Summary) -> str:
    """Return what is wrong with a run, or "" if it is valid and met its SLO."""
    if not summary.verdict.valid:
        return "INVALID"
    if summary.goodput.met is False:
        return "SLO missed"
    if fails_by_errors(summary):
        return "errors"
    return "SLO undecided" if summary.goodput.undecided else ""


def _windows(summaries: Sequence[Summary]) -> str:
    """Return the window of the rates. Runs without a steady state have another window."""
    windows = sorted({select_headline_rates(summary).window for summary in summaries}, reverse=True)
    first, *further = windows
    return f"{first} (for runs without one: {further[0]})" if further else first
