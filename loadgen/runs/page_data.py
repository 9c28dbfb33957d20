"""Computes the data of the charts of a run: a few thousand numbers for any number of requests.

Pure numpy. Nothing is drawn or phrased here. Every series has a bounded length, so that the page of
a run with ten million requests is as large as the page of a run with a thousand. Large intermediate
arrays are freed as soon as possible, because each is as large as a column of the records.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from loadgen.core.metrics import outcomes
from loadgen.core.metrics.columns import (
    OK,
    UNDEFINED,
    UNFINISHED,
    Columns,
    as_selection,
    is_measured,
    pool_measured_gaps,
)
from loadgen.core.metrics.request_metrics import time_output_tokens
from loadgen.core.metrics.windows import cumulate_event_counts
from loadgen.core.results.manifest import RunManifest, WorkerSample
from loadgen.core.results.record import BIN_NS, KINDS
from loadgen.core.results.record_log import HEAT_EDGES_NS
from loadgen.core.stats.amounts import Amounts
from loadgen.core.stats.histogram import Histogram
from loadgen.core.stats.quantiles import block_slices, quantile_index
from loadgen.runs.percentile_curves import (
    PercentileCurve,
    curve_of_histogram,
    curve_of_values,
    round_all,
    round_to,
)

MAX_BINS = 120
"""Time bins in one chart."""

MAX_ERROR_BINS = 60
"""Time bins in the chart of errors, whose bars need more room than lines."""

MIN_BINS = 8
"""A chart over time has at least so many bins, also for few requests."""

MAX_POINTS = 1_500
"""With more points than this, a scatter plot counts them in cells."""

CELL_COLUMNS = 64
CELL_ROWS = 40
"""The cells of a scatter plot with counts."""

MIN_REQUESTS_FOR_P90 = 20
MIN_REQUESTS_FOR_P99 = 100
"""From so many requests per time bin (median), these percentiles are shown over time."""

REQUESTS_PER_BIN = 5
"""Rates over time have bins with at least so many requests on average."""

MIN_SAMPLE_SPAN_S = 0.5
"""A sample of a worker that covers less time says little about its CPU use."""

LOG_RATIO = 20
"""Values that differ by more than this factor are shown on a logarithmic axis."""

SMALLEST_LOG_VALUE = 1e-6
"""Smaller values count as this one where the ratio of values is compared to LOG_RATIO."""

MIN_BIN_PER_SNAPSHOT = 0.8
"""The shortest time bin of inter-chunk latencies, relative to the time between two snapshots.

Shorter bins would often have no snapshot."""

BIN_WIDTHS_S = (
    0.1,
    0.2,
    0.5,
    1,
    2,
    5,
    10,
    15,
    30,
    60,
    120,
    300,
    600,
    1200,
    1800,
    3600,
    7200,
    14400,
    28800,
    86400,
)
"""Widths of time bins that are easy to read."""

ROUNDING_ERROR = 1e-9
"""A run that is longer than whole bins by less than this fraction of a bin needs no further bin."""

NS_PER_S = 1e9
NS_PER_MS = 1e6

Values = tuple[float | None, ...]


class Bins(msgspec.Struct, frozen=True, kw_only=True):
    """Series over equal time bins.

    Bin i covers i * width_s to (i + 1) * width_s. A value of None means that the bin has none.
    """

    width_s: float
    series: dict[str, Values]


Cell = tuple[float, float, float, float, int]
"""A rectangle of a chart and the number of points in it: left, right, low, high, count."""

Cells = tuple[Cell, ...]
"""The cells of a chart that are not empty."""


class ScatterPlot(msgspec.Struct, frozen=True, kw_only=True):
    """A scatter plot with a point per request. A plot of many requests counts them by cell.

    Attributes:
        count: The number of points.
        points: The points, if there are at most MAX_POINTS.
        cells: Their numbers by cell, if there are more.
        x: The range of x.
        y: The range of y.
        log_y: Whether the y axis is logarithmic.
    """

    count: int
    points: tuple[tuple[float, float], ...] = ()
    cells: Cells = ()
    x: tuple[float, float] = (0, 1)
    y: tuple[float, float] = (0, 1)
    log_y: bool = False


class StageSpan(msgspec.Struct, frozen=True, kw_only=True):
    """A stage and its position on the time axis, in seconds from the start of the run."""

    name: str
    start_s: float
    end_s: float
    measured: bool


class LatencyOverTime(msgspec.Struct, frozen=True, kw_only=True):
    """Latencies of all requests, warm-up included, by time.

    TTFT and TPOT have p50 and the maximum, and p90 and p99 if the bins hold enough requests.

    Attributes:
        ttft: TTFT in ms by scheduled time.
        tpot: TPOT in ms by the time of the last token.
        inter_chunk: Inter-chunk latencies counted by time in s and length in ms. Empty if none are
            known.
    """

    ttft: Bins
    tpot: Bins
    inter_chunk: Cells


class LoadOverTime(msgspec.Struct, frozen=True, kw_only=True):
    """The load and how the server and the client coped with it, by time.

    Attributes:
        request_rates: Scheduled, sent and ok requests per second.
        output_rate: Output tokens per second, by the time of events.
        in_flight: Mean number of requests in flight.
        errors: Numbers of requests that are not ok, by kind of error.
        slo_attainment: Fraction of requests that met the SLO, by scheduled time. None without an
            SLO.
        cache_hit_rate: Cached fraction of prompt tokens. None if the server does not report it.
        client_overhead: CPU use of the busiest worker, and the largest send delay in ms.
    """

    request_rates: Bins
    output_rate: Bins
    in_flight: Bins
    errors: Bins
    slo_attainment: Bins | None
    cache_hit_rate: Bins | None
    client_overhead: Bins


class ScatterPlots(msgspec.Struct, frozen=True, kw_only=True):
    """Scatter plots of ok requests of the measured stages.

    Attributes:
        ttft_by_input: TTFT in ms by prompt tokens.
        ttft_by_in_flight: TTFT in ms by the other requests in flight at the target.
        ttft_by_queue: TTFT in ms by the queue time that the server reports, in ms.
        ttft_by_time: TTFT in ms by scheduled time in s.
        e2e_by_output: E2E latency in ms by output tokens.
        received_by_requested: Received by requested output tokens. None if no length was requested,
            or if every response has exactly the requested length.
    """

    ttft_by_input: ScatterPlot
    ttft_by_in_flight: ScatterPlot
    ttft_by_queue: ScatterPlot
    ttft_by_time: ScatterPlot
    e2e_by_output: ScatterPlot
    received_by_requested: ScatterPlot | None


class ChartData(msgspec.Struct, frozen=True, kw_only=True):
    """The data of all charts of one run.

    Attributes:
        length_s: The length of the run.
        stages: The stages on the time axis.
        percentile_curves: Percentile curves of ok requests of the measured stages, by metric.
        latency: Latencies over time.
        load: The load over time.
        scatter: Scatter plots.
    """

    length_s: float
    stages: tuple[StageSpan, ...]
    percentile_curves: dict[str, PercentileCurve]
    latency: LatencyOverTime
    load: LoadOverTime
    scatter: ScatterPlots


def compute_chart_data(
    manifest: RunManifest,
    rows: NDArray[np.void],
    inter_chunk_histograms: Sequence[Histogram] = (),
    event_counts: Sequence[NDArray[np.int64]] = (),
    worker_samples: Sequence[WorkerSample] = (),
    inter_chunk_snapshots: NDArray[np.void] | None = None,
) -> ChartData:
    """Return the data of all charts of one run.

    Args:
        manifest: The manifest of the run.
        rows: Its records.
        inter_chunk_histograms: The inter-chunk latencies of each stage.
        event_counts: The number of output events of each stage in each bin of BIN_NS.
        worker_samples: Samples of the workers, about one per second.
        inter_chunk_snapshots: Inter-chunk latencies over time, with the dtype
            `results.record_log.HEAT`. None if they were not kept.
    """
    columns = Columns(rows)
    is_counted = is_measured(manifest, rows) & columns.where(OK)
    length_s = _run_length_s(rows, event_counts)
    curves = _percentile_curves(columns, is_counted)
    inter_chunk = pool_measured_gaps(manifest, inter_chunk_histograms)
    inter_chunk_curve = curve_of_histogram("inter-chunk latency", inter_chunk)
    if inter_chunk_curve is not None:
        curves["inter_chunk"] = inter_chunk_curve
    return ChartData(
        length_s=round_to(length_s, 6),
        stages=tuple(_stage_spans(manifest, rows, length_s)),
        percentile_curves=curves,
        latency=_latency_over_time(columns, inter_chunk_snapshots, length_s),
        load=LoadOverTime(
            request_rates=_request_rates(columns, length_s),
            output_rate=_output_rate(columns, event_counts, length_s),
            in_flight=_mean_in_flight(columns, length_s),
            errors=_errors_by_kind(columns, length_s),
            slo_attainment=_slo_attainment(columns, manifest, length_s),
            cache_hit_rate=_cache_hit_rate(columns, length_s),
            client_overhead=_client_overhead(columns, worker_samples, length_s),
        ),
        scatter=_scatter_plots(columns, is_counted),
    )


def _percentile_curves(
    columns: Columns, is_counted: NDArray[np.bool_]
) -> dict[str, PercentileCurve]:
    """Return the percentile curve of each latency that has values, by metric."""
    curves: dict[str, PercentileCurve | None] = {}
    curves["ttft"] = curve_of_values("TTFT", columns.measure("ttft")[is_counted])
    curves["ttft_from_sent"] = _curve_from_sent(columns, is_counted, curves["ttft"])
    curves["tpot"] = curve_of_values("TPOT", columns.measure("tpot")[is_counted])
    curves["max_gap"] = curve_of_values("max ITL", columns.measure("max_gap")[is_counted])
    curves["e2e"] = curve_of_values("E2E", columns.measure("e2e")[is_counted])
    return {metric: curve for metric, curve in curves.items() if curve is not None}


def _curve_from_sent(
    columns: Columns, is_counted: NDArray[np.bool_], ttft_curve: PercentileCurve | None
) -> PercentileCurve | None:
    """Return the curve of TTFT from the time of sending, and not from the scheduled time.

    In virtual time every request is sent when it is scheduled. Then the curve is that of TTFT,
    which saves sorting millions of values.
    """
    name = "TTFT from sent"
    if ttft_curve is not None and np.array_equal(columns["sent_ns"], columns["due_ns"]):
        return msgspec.structs.replace(ttft_curve, name=name)
    return curve_of_values(name, columns.measure("ttft_from_sent")[is_counted])


def _latency_over_time(
    columns: Columns, inter_chunk_snapshots: NDArray[np.void] | None, length_s: float
) -> LatencyOverTime:
    """Return the latencies of ok requests by time. Without snapshots, TTFT and TPOT only."""
    is_ok = columns.where(OK)
    ttft = quantiles_over_time(columns["due_ns"], columns.measure("ttft"), is_ok, length_s)
    tpot = quantiles_over_time(columns["last_token_ns"], columns.measure("tpot"), is_ok, length_s)
    inter_chunk: Cells = ()
    if inter_chunk_snapshots is not None:
        inter_chunk = count_inter_chunk_latencies(inter_chunk_snapshots, length_s)
    return LatencyOverTime(ttft=ttft, tpot=tpot, inter_chunk=inter_chunk)


def _scatter_plots(columns: Columns, is_counted: NDArray[np.bool_]) -> ScatterPlots:
    """Return the scatter plots of the counted requests.

    The plots are computed in an order that needs little memory: the arrays of requests in flight,
    which are as large as columns of the records, are freed before the other plots.
    """
    e2e_by_output = scatter_plot(columns["output_tokens"], columns.measure("e2e"), is_counted)
    ttft_ns = columns.measure("ttft")
    sent_rows, other_counts = in_flight_at_send(columns)
    ttft_by_in_flight = scatter_plot(
        other_counts, ttft_ns[sent_rows], is_counted[sent_rows], row_indices=sent_rows
    )
    del sent_rows, other_counts
    queue_ns = columns["server_queue_ns"]
    return ScatterPlots(
        ttft_by_input=scatter_plot(columns["input_tokens"], ttft_ns, is_counted),
        ttft_by_in_flight=ttft_by_in_flight,
        ttft_by_queue=scatter_plot(queue_ns, ttft_ns, is_counted, x_divisor=NS_PER_MS),
        ttft_by_time=scatter_plot(columns["due_ns"], ttft_ns, is_counted, x_divisor=NS_PER_S),
        e2e_by_output=e2e_by_output,
        received_by_requested=_received_by_requested(columns, is_counted),
    )


# -- over time -------------------------------------------------------------------------------------


class Grid(msgspec.Struct, frozen=True):
    """Equal time bins from the start of a run to its end."""

    width_s: float
    number: int

    @classmethod
    def over(cls, length_s: float, max_bins: int = MAX_BINS, min_width_s: float = 0.0) -> Grid:
        """Return a grid over a run of `length_s` that has at most `max_bins` bins.

        Bins have the smallest width of BIN_WIDTHS_S with which they are few enough, so that the
        axis is easy to read, and at least `min_width_s`.
        """
        fitting_widths_s = (width for width in BIN_WIDTHS_S if width * max_bins >= length_s)
        width_s = max(next(fitting_widths_s, length_s / max_bins), min_width_s)
        bin_count = int(np.ceil(length_s / width_s - ROUNDING_ERROR))
        return cls(width_s, max(bin_count, 1))

    @classmethod
    def for_requests(cls, length_s: float, requests: int, per_bin: int) -> Grid:
        """Return a grid whose bins hold at least `per_bin` requests on average."""
        return cls.over(length_s, min(MAX_BINS, max(requests // per_bin, MIN_BINS)))

    @property
    def edges_s(self) -> NDArray[np.floating[Any]]:
        """The edges of the bins, one more than there are bins."""
        return np.arange(self.number + 1) * self.width_s

    def bin_of(self, times_ns: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the bin of each time. Times outside the grid are in its first or last bin."""
        return np.clip(times_ns // round(self.width_s * NS_PER_S), 0, self.number - 1)

    def sums(
        self, times_ns: NDArray[np.int64], weights: NDArray[np.int64] | None = None
    ) -> NDArray[np.float64]:
        """Return the number of times in each bin, or the sum of their weights."""
        total = np.zeros(self.number)
        for block in block_slices(len(times_ns)):
            block_weights = None if weights is None else weights[block]
            total += np.bincount(self.bin_of(times_ns[block]), block_weights, self.number)
        return total

    def bins(self, series: Mapping[str, Iterable[float | None]]) -> Bins:
        """Return series over this grid, rounded for a chart."""
        rounded_series = {
            name: tuple(None if value is None else round_to(value, 4) for value in values)
            for name, values in series.items()
        }
        return Bins(width_s=self.width_s, series=rounded_series)


def quantiles_over_time(
    times_ns: NDArray[np.int64],
    values_ns: NDArray[np.int64],
    selected: NDArray[np.bool_],
    length_s: float,
) -> Bins:
    """Return percentiles of the selected values in ms, per time bin.

    The median and the maximum are always there, and p90 and p99 if most bins hold enough requests.
    """
    is_known = selected & (values_ns != UNDEFINED) & (times_ns >= 0)
    count = int(np.count_nonzero(is_known))
    grid = Grid.for_requests(length_s, count, MIN_REQUESTS_FOR_P90)
    values_by_bin = _sorted_values_by_bin(grid, times_ns, values_ns, is_known)
    sizes = np.array([len(values) for values in values_by_bin])
    typical_size = float(np.median(sizes[sizes > 0])) if count else 0.0
    quantiles = {"p50": 0.5}
    if typical_size >= MIN_REQUESTS_FOR_P90:
        quantiles["p90"] = 0.9
    if typical_size >= MIN_REQUESTS_FOR_P99:
        quantiles["p99"] = 0.99
    quantiles["max"] = 1.0
    return grid.bins(
        {
            name: [_quantile_ms(values, quantile) for values in values_by_bin]
            for name, quantile in quantiles.items()
        }
    )


def _sorted_values_by_bin(
    grid: Grid,
    times_ns: NDArray[np.int64],
    values_ns: NDArray[np.int64],
    is_known: NDArray[np.bool_],
) -> list[NDArray[np.int64]]:
    """Return the known values of each bin of `grid` in ascending order.

    The values are put in the order of their bins, so that those of one bin are a slice, which is
    then sorted in place.
    """
    known_rows = as_selection(is_known)
    known_times_ns = times_ns[known_rows]
    bin_numbers = np.empty(len(known_times_ns), np.int16)
    for block in block_slices(len(known_times_ns)):
        bin_numbers[block] = grid.bin_of(known_times_ns[block])
    order = np.argsort(bin_numbers, kind="stable").astype(np.int32)  # half the memory of int64
    values_in_bin_order = values_ns[known_rows][order]
    del order
    bin_sizes = np.bincount(bin_numbers, minlength=grid.number)
    bin_starts = np.cumsum([0, *bin_sizes])
    values_by_bin = [values_in_bin_order[start:end] for start, end in pairwise(bin_starts)]
    for values in values_by_bin:
        values.sort()
    return values_by_bin


def _quantile_ms(sorted_ns: NDArray[np.int64], quantile: float) -> float | None:
    """Return a quantile of sorted times in ns as ms, or None if there are none."""
    if not len(sorted_ns):
        return None
    return float(sorted_ns[quantile_index(len(sorted_ns), quantile)] / NS_PER_MS)


def _run_length_s(rows: NDArray[np.void], event_counts: Sequence[NDArray[np.int64]]) -> float:
    """Return the time of the last event of a run, at least 0.1 s."""
    ends = [rows[name].max(initial=0) for name in ("done_ns", "due_ns", "sent_ns")]
    ends += [len(counts) * BIN_NS for counts in event_counts]
    return max(float(max(ends)) / NS_PER_S, 0.1)


def _stage_spans(
    manifest: RunManifest, rows: NDArray[np.void], length_s: float
) -> Iterator[StageSpan]:
    """Yield the span of each stage on the time axis of the run.

    A stage that ends by a number of requests has no planned end, and the stages after it have no
    planned start (0). Such a stage spans the scheduled times of its requests.
    """
    for index, stage in enumerate(manifest.stages):
        is_in_stage = (rows["stage"] == index) & (rows["due_ns"] >= 0)
        due_ns = rows["due_ns"][is_in_stage]
        has_planned_start = index == 0 or stage.start_ns != 0
        start_ns = stage.start_ns if has_planned_start else due_ns.min(initial=0)
        end_ns = due_ns.max(initial=0) if stage.end_ns is None else stage.end_ns
        start_s = float(start_ns) / NS_PER_S
        end_s = max(float(end_ns) / NS_PER_S, start_s)
        yield StageSpan(
            name=stage.name or f"stage {index + 1}",
            start_s=round_to(start_s, 5),
            end_s=round_to(min(end_s, length_s), 5),
            measured=stage.measured,
        )


def _request_rates(columns: Columns, length_s: float) -> Bins:
    """Return scheduled, sent and ok requests per second."""
    grid = Grid.for_requests(length_s, len(columns), REQUESTS_PER_BIN)
    selections = {
        "scheduled": ("due_ns", columns.reached_due_time),
        "sent": ("sent_ns", columns["sent_ns"] >= 0),
        "ok": ("end_ns", columns.where(OK) & (columns["end_ns"] >= 0)),
    }
    rates = {
        name: grid.sums(columns[field][as_selection(selected)]) / grid.width_s
        for name, (field, selected) in selections.items()
    }
    return grid.bins(rates)


def _mean_in_flight(columns: Columns, length_s: float) -> Bins:
    """Return the exact mean number of requests in flight per bin.

    It is the time that requests spent in flight in the bin, divided by the width of the bin.
    """
    grid = Grid.over(length_s)
    edges_ns = grid.edges_s * NS_PER_S
    since_sent_ns = _time_since_events_ns(columns, "sent_ns", edges_ns)
    since_done_ns = _time_since_events_ns(columns, "done_ns", edges_ns)
    mean = np.diff(since_sent_ns - since_done_ns) / (grid.width_s * NS_PER_S)
    return grid.bins({"in flight": np.maximum(mean, 0.0)})


def _time_since_events_ns(
    columns: Columns, field: str, edges_ns: NDArray[np.floating[Any]]
) -> NDArray[np.float64]:
    """Return for each edge the sum of the times that have passed since each event before it.

    The events are the times in the column `field` of the requests that were sent. If n events with
    the times t_1 ... t_n precede an edge, the sum of (edge - t_i) is n * edge - (t_1 + ... + t_n).
    """
    is_event = (columns["sent_ns"] >= 0) & (columns[field] >= 0)
    times_ns = np.sort(columns[field][as_selection(is_event)])
    events_before_edge = np.searchsorted(times_ns, edges_ns)
    time_sums_ns = _sums_of_first(times_ns, events_before_edge)
    time_since_ns: NDArray[np.float64] = events_before_edge * edges_ns - time_sums_ns
    return time_since_ns


def _sums_of_first(values: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return for each n of `counts` the sum of the first n values.

    The running sums are computed block by block: those of all values at once would need as much
    memory as a column of the records.
    """
    sums = np.zeros(len(counts))
    sum_before_block = 0.0
    for block in block_slices(len(values)):
        running_sums = np.cumsum(np.append(sum_before_block, values[block]))
        is_in_block = (counts >= block.start) & (counts < block.start + len(running_sums))
        sums[is_in_block] = running_sums[counts[is_in_block] - block.start]
        sum_before_block = float(running_sums[-1])
    return sums


def _output_rate(
    columns: Columns, event_counts: Sequence[NDArray[np.int64]], length_s: float
) -> Bins:
    """Return output tokens per second by the time of their events, or evenly over each response.

    An event is a chunk of a streamed response. `event_counts` has their numbers per bin of BIN_NS
    for each stage. If no events were counted, the tokens of each response are spread evenly from
    its first to its last token.
    """
    grid = Grid.over(length_s)
    has_tokens = columns.where(OK) & (columns["output_tokens"] >= 0)
    event_count = int(columns["output_events"][has_tokens].sum(dtype=np.int64))
    cumulative_events = cumulate_event_counts(event_counts)
    if event_count and cumulative_events is not None:
        tokens = _tokens_by_events(columns, grid, cumulative_events, event_count)
    else:
        tokens = _tokens_spread_evenly(columns, grid)
    return grid.bins({"output": tokens / grid.width_s})


def _tokens_by_events(
    columns: Columns, grid: Grid, cumulative_events: NDArray[np.int64], event_count: int
) -> NDArray[np.float64]:
    """Return the output tokens in each bin: its events times the mean number of tokens per event.

    `event_count` is the number of events of the requests whose tokens are counted.
    `cumulative_events` is the number of all events before each bin of BIN_NS, which are shorter
    than those of the grid.
    """
    _, _, tokens = time_output_tokens(columns)
    tokens_per_event = int(tokens.sum(dtype=np.int64)) / event_count
    edges = grid.edges_s * NS_PER_S / BIN_NS
    events_until_edge = np.interp(edges, np.arange(len(cumulative_events)), cumulative_events)
    tokens_in_bins: NDArray[np.float64] = np.diff(events_until_edge) * tokens_per_event
    return tokens_in_bins


def _tokens_spread_evenly(columns: Columns, grid: Grid) -> NDArray[np.float64]:
    """Return the output tokens in each bin if those of a response come at a constant rate."""
    first_ns, last_ns, tokens = time_output_tokens(columns)
    amounts = Amounts()
    amounts.add(first_ns, last_ns, tokens)
    return np.array([amounts.between(start_s, end_s) for start_s, end_s in pairwise(grid.edges_s)])


def _errors_by_kind(columns: Columns, length_s: float) -> Bins:
    """Return the requests that are not ok, by kind of error, the most frequent kind first.

    A request counts when it ended, or at its scheduled time if it never did.
    """
    is_error = ~(columns.where(OK) | columns.where(UNFINISHED))
    grid = Grid.over(length_s, MAX_ERROR_BINS)
    error_times_ns = np.where(columns["done_ns"] >= 0, columns["done_ns"], columns["due_ns"])
    error_times_ns = error_times_ns[is_error]
    kinds = columns["kind"][is_error]
    counts = np.bincount(kinds)
    series = {}
    for kind in np.argsort(-counts, kind="stable"):
        if counts[kind]:
            label = KINDS[kind] or "not finished"
            series[label] = grid.sums(error_times_ns[kinds == kind])
    return grid.bins(series)


def _slo_attainment(columns: Columns, manifest: RunManifest, length_s: float) -> Bins | None:
    """Return the fraction of requests that met the SLO by scheduled time; None without an SLO."""
    slo = manifest.slo
    if slo is None or not (slo.terms or slo.goodput_share is not None):
        return None
    counted = outcomes.is_counted(columns, slo)
    grid = Grid.for_requests(length_s, int(counted.sum()), MIN_REQUESTS_FOR_P90)
    due_ns = columns["due_ns"]
    good_counts = grid.sums(due_ns[counted & outcomes.meets_slo(columns, slo)])
    total_counts = grid.sums(due_ns[as_selection(counted)])
    return grid.bins({"met the SLO": _ratios(good_counts, total_counts)})


def _cache_hit_rate(columns: Columns, length_s: float) -> Bins | None:
    """Return the cached fraction of prompt tokens by time of the first token; None if unknown."""
    has_counts = columns.where(OK) & (columns["cached_tokens"] >= 0) & (columns["input_tokens"] > 0)
    if not has_counts.any():
        return None
    grid = Grid.for_requests(length_s, int(has_counts.sum()), REQUESTS_PER_BIN)
    started_ns = np.where(
        columns["first_token_ns"] < 0, columns["end_ns"], columns["first_token_ns"]
    )[has_counts]
    cached_tokens = grid.sums(started_ns, columns["cached_tokens"][has_counts])
    prompt_tokens = grid.sums(started_ns, columns["input_tokens"][has_counts])
    return grid.bins({"cached": _ratios(cached_tokens, prompt_tokens)})


def _ratios(parts: NDArray[np.float64], totals: NDArray[np.float64]) -> list[float | None]:
    """Return part / total for each bin, None where the total is 0."""
    return [
        float(part / total) if total else None for part, total in zip(parts, totals, strict=True)
    ]


def _client_overhead(
    columns: Columns, worker_samples: Sequence[WorkerSample], length_s: float
) -> Bins:
    """Return the CPU use of the busiest worker and the largest send delay, per bin of 1 s or more.

    The CPU use is a fraction of a core, and the delay is in ms.
    """
    grid = Grid.over(length_s, min_width_s=1.0)
    send_delays_ms = _largest_send_delays_ms(columns, grid)
    return grid.bins(
        {"cpu": _largest_cpu_shares(worker_samples, grid), "largest send delay": send_delays_ms}
    )


def _largest_cpu_shares(worker_samples: Sequence[WorkerSample], grid: Grid) -> list[float | None]:
    """Return the CPU use of the busiest worker in each bin, None for a bin without samples.

    A sample counts in the bin that has the middle of the time it covers.
    """
    cpu_shares: list[float | None] = [None] * grid.number
    for sample in worker_samples:
        if sample.span_s < MIN_SAMPLE_SPAN_S:
            continue
        middle_s = max(sample.t_s - sample.span_s / 2, 0)
        index = min(int(middle_s // grid.width_s), grid.number - 1)
        cpu_shares[index] = max(cpu_shares[index] or 0.0, sample.cpu_share)
    return cpu_shares


def _largest_send_delays_ms(columns: Columns, grid: Grid) -> list[float | None]:
    """Return the largest delay of a request that was sent in each bin, None for an empty bin."""
    was_sent = as_selection(columns["sent_ns"] >= 0)
    sent_ns = columns["sent_ns"][was_sent]
    delays_ns = columns.measure("send_lag")[was_sent]
    largest_ns = np.full(grid.number, UNDEFINED)
    for block in block_slices(len(sent_ns)):
        np.maximum.at(largest_ns, grid.bin_of(sent_ns[block]), delays_ns[block])
    return [None if delay == UNDEFINED else float(delay / NS_PER_MS) for delay in largest_ns]


def count_inter_chunk_latencies(snapshots: NDArray[np.void], length_s: float) -> Cells:
    """Return the numbers of inter-chunk latencies by time (s) and length (ms), for a heat map.

    Args:
        snapshots: Histograms of the latencies with the edges HEAT_EDGES_NS and the dtype
            `results.record_log.HEAT`. A worker writes one about every 2 s, with the counts since
            the one before.
        length_s: The length of the run.
    """
    if not len(snapshots):
        return ()
    snapshot_times_ns = np.unique(snapshots["until_ns"])
    typical_span_s = float(np.median(np.diff(snapshot_times_ns, prepend=0))) / NS_PER_S
    min_width_s = MIN_BIN_PER_SNAPSHOT * typical_span_s
    grid = Grid.over(length_s, min_width_s=min(min_width_s, length_s))

    # A snapshot counts in the bin that has the middle of the time it covers.
    middle_s = snapshots["until_ns"] / NS_PER_S - min(typical_span_s, grid.width_s) / 2
    bin_numbers = grid.bin_of((middle_s * NS_PER_S).astype(np.int64))
    # The first count, of latencies below all edges, is left out: these are times between chunks
    # that arrived in one read of a socket.
    counts = np.zeros((grid.number, len(HEAT_EDGES_NS)), np.int64)
    np.add.at(counts, bin_numbers, snapshots["counts"][:, 1:])
    return tuple(_heat_map_cells(counts, grid.width_s))


def _heat_map_cells(counts: NDArray[np.int64], width_s: float) -> Iterator[Cell]:
    """Yield the cells of a heat map that are not empty.

    `counts` has a row for each time bin of `width_s`, and a column for the latencies from each
    edge in HEAT_EDGES_NS on. The last column has no upper edge, so it is drawn up to twice its
    lower edge.
    """
    edges_ms = round_all(np.append(HEAT_EDGES_NS, HEAT_EDGES_NS[-1] * 2) / NS_PER_MS, 4)
    for bin_number, edge_number in zip(*np.nonzero(counts), strict=True):
        yield (
            float(bin_number * width_s),
            float((bin_number + 1) * width_s),
            edges_ms[edge_number],
            edges_ms[edge_number + 1],
            int(counts[bin_number, edge_number]),
        )


# -- scatter plots ---------------------------------------------------------------------------------


def in_flight_at_send(columns: Columns) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return the sent requests, and how many others were in flight at their target when sent.

    The first array has the row indices of the sent requests, ordered by target and time of sending.
    The second array has for each of them the number of other requests. Requests that were sent at
    the same time count as others too.
    """
    was_sent = columns["sent_ns"] >= 0
    row_indices = np.empty(np.count_nonzero(was_sent), np.int32)
    other_counts = np.empty(len(row_indices), np.int32)
    start = 0
    for target in np.unique(columns["target"]).tolist():
        is_of_target = (columns["target"] == target) & was_sent
        target_rows = np.flatnonzero(is_of_target).astype(np.int32)
        of_target = slice(start, start + len(target_rows))
        order = np.argsort(columns["sent_ns"][target_rows]).astype(np.int32)
        row_indices[of_target] = target_rows[order]
        del order  # an array as large as a column of the records
        starts_ns = columns["sent_ns"][row_indices[of_target]]
        ends_ns = _sorted_end_times_ns(columns, target_rows)
        _count_others(starts_ns, ends_ns, other_counts[of_target])
        start = of_target.stop
    return row_indices, other_counts


def _sorted_end_times_ns(columns: Columns, rows: NDArray[np.int32]) -> NDArray[np.int64]:
    """Return when the requests in these rows ended, in ascending order, if they did."""
    ends_ns = columns["done_ns"][rows]
    ends_ns.sort()
    # A request that did not end has a negative time.
    first_known = np.searchsorted(ends_ns, 0)
    return ends_ns[first_known:]


def _count_others(
    starts_ns: NDArray[np.int64], ends_ns: NDArray[np.int64], other_counts: NDArray[np.int32]
) -> None:
    """Count the other requests in flight at each start, and write the counts to `other_counts`.

    They are the requests that started until then, without the request itself and without those
    that ended until then. The counts are written to a part of a larger array, because a copy would
    need as much memory as a column of the records.

    Args:
        starts_ns: The starts of requests in ascending order.
        ends_ns: Their ends in ascending order.
        other_counts: The array to write to, with one element for each start.
    """
    for block in block_slices(len(starts_ns)):
        block_starts_ns = starts_ns[block]
        # As many other requests started before as the index of the request says, unless the next
        # one has the same start. Only then a search is needed.
        others_started = np.arange(block.start, min(block.stop, len(starts_ns)))
        next_starts_ns = starts_ns[block.start + 1 : block.stop + 1]
        is_same_as_next = block_starts_ns[: len(next_starts_ns)] == next_starts_ns
        same_as_next = np.flatnonzero(is_same_as_next)
        started = np.searchsorted(starts_ns, block_starts_ns[same_as_next], side="right")
        others_started[same_as_next] = started - 1
        ended = np.searchsorted(ends_ns, block_starts_ns, side="right")
        other_counts[block] = others_started - ended


def scatter_plot(
    x: NDArray[Any],
    y_ns: NDArray[np.int64],
    selected: NDArray[np.bool_],
    *,
    x_divisor: float = 1.0,
    y_divisor: float = NS_PER_MS,
    row_indices: NDArray[np.int32] | None = None,
) -> ScatterPlot:
    """Return a scatter plot of the selected pairs with a known x and a defined y.

    Args:
        x: The values of x; negative ones are unknown.
        y_ns: The values of y.
        selected: Which pairs are shown.
        x_divisor: Converts the values of x to the unit of the chart.
        y_divisor: Converts the values of y to the unit of the chart.
        row_indices: The row of each pair, if the pairs are in another order than the rows. Points
            are listed in the order of rows.
    """
    pairs = _Pairs(x, y_ns, selected, x_divisor, y_divisor)
    if not pairs.count:
        return ScatterPlot(count=0)
    x_range, y_range = pairs.ranges()
    lowest_y, highest_y = y_range
    log_y = lowest_y > 0 and highest_y > LOG_RATIO * max(lowest_y, SMALLEST_LOG_VALUE)
    if pairs.count <= MAX_POINTS:
        points = pairs.points(row_indices)
        return ScatterPlot(count=pairs.count, points=points, x=x_range, y=y_range, log_y=log_y)
    cells = pairs.cells(x_range, y_range, log_y=log_y)
    return ScatterPlot(count=pairs.count, cells=cells, x=x_range, y=y_range, log_y=log_y)


class _Pairs:
    """The pairs of a scatter plot, which are processed in blocks to save memory."""

    def __init__(
        self,
        x: NDArray[Any],
        y_ns: NDArray[np.int64],
        selected: NDArray[np.bool_],
        x_divisor: float,
        y_divisor: float,
    ) -> None:
        """Find the pairs that are selected and whose x and y are known, block by block.

        The parameters are those of `scatter_plot`.
        """
        self._x = x
        self._y_ns = y_ns
        self._selected = selected
        self._x_divisor = x_divisor
        self._y_divisor = y_divisor
        self._blocks: list[slice] = []
        self._known: list[NDArray[np.bool_]] = []
        self.count = 0
        for block in block_slices(len(x)):
            known = selected[block] & (x[block] >= 0) & (y_ns[block] != UNDEFINED)
            if known.any():
                self._blocks.append(block)
                self._known.append(known)
                self.count += int(np.count_nonzero(known))

    def _known_values(self, values: NDArray[Any]) -> Iterator[NDArray[Any]]:
        """Yield the known values block by block.

        An array whose values are all one value, repeated without memory (stride 0), yields only
        that value.
        """
        for block, known in zip(self._blocks, self._known, strict=True):
            if values.strides == (0,):
                yield values[block][:1]
            elif known.all():
                yield values[block]
            else:
                yield values[block][known]

    def ranges(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """Return the lowest and the highest value of x, and of y."""
        return (
            self._range_of(self._x, self._x_divisor),
            self._range_of(self._y_ns, self._y_divisor),
        )

    def _range_of(self, values: NDArray[Any], divisor: float) -> tuple[float, float]:
        lowest = min(block.min() for block in self._known_values(values))
        highest = max(block.max() for block in self._known_values(values))
        return float(lowest / divisor), float(highest / divisor)

    def points(self, row_indices: NDArray[np.int32] | None) -> tuple[tuple[float, float], ...]:
        """Return all pairs as points, in the order of their rows."""
        is_known = self._selected & (self._x >= 0) & (self._y_ns != UNDEFINED)
        indices = np.flatnonzero(is_known)
        if row_indices is not None:
            indices = indices[np.argsort(row_indices[indices])]
        x = round_all(self._x[indices] / self._x_divisor, 4)
        y = round_all(self._y_ns[indices] / self._y_divisor, 4)
        return tuple(zip(x, y, strict=True))

    def cells(
        self, x_range: tuple[float, float], y_range: tuple[float, float], *, log_y: bool
    ) -> Cells:
        """Return the numbers of pairs by cell, without empty cells.

        The cells divide both ranges evenly. With `log_y`, they divide the logarithm of y evenly.
        """
        x_edges = _cell_edges(x_range, CELL_COLUMNS)
        y_edges = _cell_edges(np.log10(y_range) if log_y else y_range, CELL_ROWS)
        counts = self._count_by_cell(x_edges, y_edges, log_y=log_y)
        left_edges = round_all(x_edges, 5)
        low_edges = round_all(10**y_edges if log_y else y_edges, 5)
        return tuple(
            (
                left_edges[column],
                left_edges[column + 1],
                low_edges[row],
                low_edges[row + 1],
                int(counts[column, row]),
            )
            for column, row in zip(*np.nonzero(counts), strict=True)
        )

    def _count_by_cell(
        self, x_edges: NDArray[np.float64], y_edges: NDArray[np.float64], *, log_y: bool
    ) -> NDArray[np.int64]:
        """Return the number of pairs in each cell, by column and row.

        This is `numpy.histogram2d` block by block. With `log_y`, the edges are logarithms of y.
        """
        counts = np.zeros(CELL_COLUMNS * CELL_ROWS, np.int64)
        blocks = zip(
            self._known_values(self._x), self._known_values(self._y_ns), self._known, strict=True
        )
        for x, y_ns, known in blocks:
            y = y_ns / self._y_divisor
            columns = _cell_of(x / self._x_divisor, x_edges)
            rows = _cell_of(np.log10(y) if log_y else y, y_edges)
            cell_numbers = columns * CELL_ROWS + rows
            # One number stands for all pairs of the block if both arrays have one value.
            weight = np.count_nonzero(known) if len(cell_numbers) == 1 else 1
            counts += np.bincount(cell_numbers, minlength=len(counts)) * weight
        return counts.reshape(CELL_COLUMNS, CELL_ROWS)


def _cell_edges(
    value_range: Sequence[float] | NDArray[np.float64], number: int
) -> NDArray[np.float64]:
    """Return the edges of equal cells over a range, as `numpy.histogram2d` computes them."""
    lowest, highest = value_range
    margin = 0.5 if lowest == highest else 0.0
    return np.linspace(lowest - margin, highest + margin, number + 1)


def _cell_of(values: NDArray[np.float64], edges: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return for each value the number of the cell that it lies in.

    Cell i reaches from edges[i] to edges[i + 1], which belongs to the next cell except in the last
    one, as in `numpy.histogram`. The number is computed from the width of the cells, which is
    faster than a search. Rounding may put it one cell off, so it is then corrected by the edges.
    """
    last = len(edges) - 2
    cells_per_unit = (last + 1) / (edges[-1] - edges[0])
    cell: NDArray[np.int64] = ((values - edges[0]) * cells_per_unit).astype(np.int64)
    np.clip(cell, 0, last, out=cell)
    is_too_high = values < edges[cell]
    cell -= is_too_high
    is_too_low = (values >= edges[cell + 1]) & (cell < last)
    cell += is_too_low
    return cell


def _received_by_requested(columns: Columns, selected: NDArray[np.bool_]) -> ScatterPlot | None:
    """Return received by requested output tokens; None if all are equal or none was requested."""
    requested = columns["asked_output"]
    received = columns["output_tokens"]
    has_both = selected & (requested >= 0) & (received >= 0)
    if not (requested[has_both] != received[has_both]).any():
        return None
    return scatter_plot(
        requested.astype(np.int64), received.astype(np.int64), has_both, y_divisor=1
    )
