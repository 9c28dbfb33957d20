"""The headline numbers of a run, which a page shows as cards. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loadgen.core import format
from loadgen.render.page import Tile
from loadgen.runs.cells import quantile_label, quantile_ms
from loadgen.runs.rates import select_headline_rates

if TYPE_CHECKING:
    from loadgen.core.metrics.summary import Summary
    from loadgen.core.stats.quantiles import Distribution

_QUANTILES = {"p99_9": 0.999, "p99": 0.99, "p95": 0.95, "p90": 0.9, "p50": 0.5}
"""The percentiles of a distribution, from the highest to the lowest."""

_PREFERRED = ("p99", "p95", "p90")
"""Without an objective, the highest of these that the samples support is shown."""


def headline_tiles(summary: Summary) -> tuple[Tile, ...]:
    """Return TTFT, TPOT, output tokens, completed requests, and SLO attainment or success."""
    return (
        _latency_tile(summary, "ttft", "TTFT", summary.ttft_ms),
        _latency_tile(summary, "tpot", "TPOT", summary.tpot_ms),
        _output_tile(summary),
        _completed_tile(summary),
        _success_tile(summary),
    )


def shown_quantile(summary: Summary, metric: str, distribution: Distribution) -> str:
    """Return the percentile to show for a metric, such as `p99`.

    It is the highest one that the SLO limits. Without an objective it is the highest of p99, p95
    and p90 that the samples support, else p50.
    """
    limited = [term.quantile for term in summary.goodput.slo if term.metric == metric]
    if limited:
        for name, quantile in _QUANTILES.items():
            if quantile == max(limited):
                return name
    supported = (name for name in _PREFERRED if name in distribution.supported)
    return next(supported, "p50")


def _latency_tile(summary: Summary, metric: str, label: str, distribution: Distribution) -> Tile:
    """Return a latency at its most important percentile, with the median below it."""
    quantile = shown_quantile(summary, metric, distribution)
    has_value = getattr(distribution, quantile) is not None
    is_supported = quantile in distribution.supported
    if quantile == "p50":
        note = format.counted(distribution.count, "sample")
    else:
        note = f"p50 {format.milliseconds(distribution.p50)} ms"
    if has_value and not is_supported:
        note += f"; too few samples for {quantile_label(quantile)}"
    value = quantile_ms(distribution, quantile)
    return Tile(f"{label} {quantile_label(quantile)}", value, "ms", note)


def _output_tile(summary: Summary) -> Tile:
    rates = select_headline_rates(summary)
    note = f"in the {rates.window}"
    if rates.output_per_gpu is not None:
        note = f"{format.rate(rates.output_per_gpu, ' tok/s')} per GPU, {note}"
    return Tile("Output throughput", format.quantity(rates.output), "tok/s", note)


def _completed_tile(summary: Summary) -> Tile:
    """Return the completed requests, with the offered rate and the concurrency.

    Later requests of sessions are scheduled when the earlier ones have ended, so sessions have no
    offered rate of requests.
    """
    load = summary.load
    notes = []
    if load.offered_rps is not None and summary.sessions is None:
        notes.append(f"{format.rate(load.offered_rps, ' req/s')} offered")
    notes.append(f"{format.quantity(load.in_flight_mean)} concurrent")
    rate = format.quantity(select_headline_rates(summary).requests)
    return Tile("Request throughput", rate, "req/s", ", ".join(notes))


def _success_tile(summary: Summary) -> Tile:
    """Return the share of requests that met the SLO, with the goodput.

    Without an SLO on requests, return the share of requests that succeeded instead. Requests that
    were cancelled or unfinished are in neither share.
    """
    goodput = summary.goodput
    if goodput.share is not None:
        rate = format.rate(select_headline_rates(summary).goodput, " req/s")
        note = f"goodput {rate}"
        return Tile("SLO attainment", format.percent(goodput.share), unit="", note=note)
    requests = summary.requests
    success_share = requests.ok / requests.decided if requests.decided else None
    note = f"{format.count(requests.scheduled)} scheduled"
    return Tile("Succeeded", format.percent(success_share), unit="", note=note)
