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
from loadgen.runs.slo_text import is_slo_undecided

if TYPE_CHECKING:
    from loadgen.core.stats.quantiles import Distribution
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
    """Return a table with a row for each run, with a notice above it and a legend below.

    The notice says that the server is simulated. The legend has the units, the time window that
    rates cover, and the percentiles for which a run has too few samples.
    """
    notice_parts: list[Part] = []
    if any(summary.target.simulated for summary in summaries):
        notice = simulated_notice()
        notice_parts.append(f"{notice.label}: {notice.text}")

    # In a table of this kind, the last column has remarks, which may be long.
    table = Table(HEAD, [_run_row(summary) for summary in summaries], kind="remarks")
    units = f"Latencies in ms. Rates are those of the {_describe_windows(summaries)}."
    unsupported = describe_unsupported(_list_distributions(summaries), QUANTILES)
    legend = [Paragraph(units, "soft"), Paragraph(unsupported, "soft")]

    return section("", *notice_parts, table, *legend)


def _list_distributions(summaries: Sequence[Summary]) -> list[Distribution]:
    """Return the distributions of the latencies of all runs."""
    distributions = []
    for summary in summaries:
        distributions += [summary.ttft_ms, summary.tpot_ms, summary.e2e_ms]
    return distributions


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
    return "SLO undecided" if is_slo_undecided(summary) else ""


def _describe_windows(summaries: Sequence[Summary]) -> str:
    """Return the window of the rates. Runs without a steady state have another window."""
    windows = sorted({select_headline_rates(summary).window for summary in summaries}, reverse=True)
    first, *further = windows
    return f"{first} (for runs without one: {further[0]})" if further else first
