"""The headline numbers of a run, which a page shows as cards. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loadgen.core import format
from loadgen.render.page import Tile
from loadgen.runs.cells import quantile_label, quantile_ms
from loadgen.runs.rates import describe_late_ends, select_headline_rates
from loadgen.runs.slo_text import NOT_JUDGED, is_judged

if TYPE_CHECKING:
    from loadgen.core.metrics.summary import Summary
    from loadgen.core.stats.quantiles import Distribution

_FIELD_BY_QUANTILE = {0.999: "p99_9", 0.99: "p99", 0.95: "p95", 0.9: "p90", 0.5: "p50"}
"""The field of a distribution that has a quantile."""

_PERCENTILES_BY_PREFERENCE = ("p99", "p95", "p90")
"""Without an objective, the highest of these that the samples support is shown."""


def headline_tiles(summary: Summary) -> tuple[Tile, ...]:
    """Return TTFT, TPOT, output tokens/s, requests/s, and SLO attainment or success."""
    return (
        _latency_tile(summary, "ttft", "TTFT", summary.ttft_ms),
        _latency_tile(summary, "tpot", "TPOT", summary.tpot_ms),
        _output_tile(summary),
        _request_rate_tile(summary),
        _success_tile(summary),
    )


def _select_percentile(summary: Summary, metric: str, distribution: Distribution) -> str:
    """Return the percentile to show for a metric, as a field of its distribution, such as `p99`.

    It is the highest one that the SLO limits. If there is no limit, or the distribution has no
    field for that percentile, such as p97.5, it is the highest of p99, p95 and p90 for which there
    are enough samples, else p50.
    """
    limited_quantiles = [term.quantile for term in summary.goodput.slo if term.metric == metric]
    highest_limited = max(limited_quantiles, default=None)
    if highest_limited in _FIELD_BY_QUANTILE:
        return _FIELD_BY_QUANTILE[highest_limited]

    for percentile in _PERCENTILES_BY_PREFERENCE:
        if percentile in distribution.supported:
            return percentile

    return "p50"


def _latency_tile(summary: Summary, metric: str, label: str, distribution: Distribution) -> Tile:
    """Return the tile of a latency at its most important percentile, with the median below it.

    The note below it also says if there are too few samples for this percentile.
    """
    percentile = _select_percentile(summary, metric, distribution)
    percentile_name = quantile_label(percentile)

    if percentile == "p50":
        note = format.counted(distribution.count, "sample")
    else:
        note = f"p50 {format.milliseconds(distribution.p50)} ms"

    has_value = getattr(distribution, percentile) is not None
    has_enough_samples = percentile in distribution.supported
    if has_value and not has_enough_samples:
        note += f"; too few samples for {percentile_name}"

    value_ms = quantile_ms(distribution, percentile)
    return Tile(f"{label} {percentile_name}", value_ms, "ms", note)


def _output_tile(summary: Summary) -> Tile:
    rates = select_headline_rates(summary)
    note = f"in the {rates.window}"
    if rates.output_per_gpu is not None:
        note = f"{format.rate(rates.output_per_gpu, ' tok/s')} per GPU, {note}"
    return Tile("Output throughput", format.quantity(rates.output), "tok/s", note)


def _request_rate_tile(summary: Summary) -> Tile:
    """Return the tile of completed requests per second, with the offered rate and concurrency.

    The offered rate is the rate at which requests were scheduled. It is omitted for sessions, whose
    later requests are scheduled only when the earlier ones have ended.
    """
    load = summary.load
    notes = []
    if load.offered_rps is not None and summary.sessions is None:
        notes.append(f"{format.rate(load.offered_rps, ' req/s')} offered")
    notes.append(f"{format.quantity(load.in_flight_mean)} concurrent")

    late_ends = describe_late_ends(summary)
    if late_ends:
        notes.append(late_ends)

    rate = format.quantity(select_headline_rates(summary).requests)
    return Tile("Request throughput", rate, "req/s", ", ".join(notes))


def _success_tile(summary: Summary) -> Tile:
    """Return the share of requests that met the SLO, with the goodput.

    An INVALID run that does not judge its SLO has neither.

    Without an SLO on requests, return the share of requests that succeeded instead. Requests that
    were cancelled or unfinished are in neither share.
    """
    goodput = summary.goodput
    if goodput.share is not None and not is_judged(summary, goodput.met):
        return Tile("SLO attainment", format.NONE, unit="", note=NOT_JUDGED)
    if goodput.share is not None:
        note = f"goodput {format.quantity(select_headline_rates(summary).goodput)} req/s"
        return Tile("SLO attainment", format.percent(goodput.share), unit="", note=note)

    requests = summary.requests
    success_share = requests.ok / requests.decided if requests.decided else None
    note = f"{format.count(requests.scheduled)} scheduled"

    return Tile("Succeeded", format.percent(success_share), unit="", note=note)
