"""Computes the data of the charts of a run: a few thousand numbers for any number of requests.

Pure numpy. Nothing is drawn or phrased here. Every series has a bounded length, so that the page of
a run with ten million requests is as large as the page of a run with a thousand. Large intermediate
arrays are freed as soon as possible, because each is as large as a column of the records.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

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
    join_arrays,
    pool_measured_gaps,
)
from loadgen.core.metrics.request_metrics import time_or_end, time_output_tokens
from loadgen.core.metrics.windows import cumulate_event_counts
from loadgen.core.results.manifest import RunManifest, StagePlan, WorkerSample
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

POINT_DIGITS = 4
CELL_EDGE_DIGITS = 5
SPAN_DIGITS = 5
LENGTH_DIGITS = 6
EDGE_DIGITS_OF_HEAT_MAP = 4
"""Significant digits of coordinates, which are finer than a pixel of the chart."""

NS_PER_S = 1e9
NS_PER_MS = 1e6

Values = tuple[float | None, ...]

Range = tuple[float, float]
"""The lowest and the highest value of an axis."""


class Bins(msgspec.Struct, frozen=True, kw_only=True):
    """Series over equal time bins.

    Bin i covers i * width_s to (i + 1) * width_s. A value of None means that the bin has none.
    """

    width_s: float
    series: dict[str, Values]


class Cell(NamedTuple):
    """A rectangle of a chart and the number of points in it."""

    left: float
    right: float
    low: float
    high: float
    point_count: int


Cells = tuple[Cell, ...]
"""The cells of a chart that are not empty."""


class ScatterPlot(msgspec.Struct, frozen=True, kw_only=True):
    """A scatter plot with a point per request. A plot of many requests counts them by cell.

    Attributes:
        count: The number of points.
        points: The points, if there are at most MAX_POINTS.
        cells: Their numbers by cell, if there are more.
        x_range: The lowest and the highest x.
        y_range: The lowest and the highest y.
        log_y: Whether the y axis is logarithmic.
    """

    count: int
    points: tuple[tuple[float, float], ...] = ()
    cells: Cells = ()
    x_range: Range = (0, 1)
    y_range: Range = (0, 1)
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

    # Requests of a warm-up and failed requests are not counted.
    is_counted = is_measured(manifest, rows) & columns.has_status(OK)
    length_s = _run_length_s(rows, event_counts)
    curves = _percentile_curves(columns, is_counted)
    inter_chunk = pool_measured_gaps(manifest, inter_chunk_histograms)

    inter_chunk_curve = curve_of_histogram("inter-chunk latency", inter_chunk)
    if inter_chunk_curve is not None:
        curves["inter_chunk"] = inter_chunk_curve

    return ChartData(
        length_s=round_to(length_s, LENGTH_DIGITS),
        stages=tuple(_stage_spans(manifest, rows, length_s)),
        percentile_curves=curves,
        latency=_latency_over_time(columns, inter_chunk_snapshots, length_s),
        load=_load_over_time(manifest, columns, event_counts, worker_samples, length_s),
        scatter=_scatter_plots(columns, is_counted),
    )


def _load_over_time(
    manifest: RunManifest,
    columns: Columns,
    event_counts: Sequence[NDArray[np.int64]],
    worker_samples: Sequence[WorkerSample],
    length_s: float,
) -> LoadOverTime:
    """Return the load over time, and how the server and the client coped with it.

    The parameters are those of `compute_chart_data`, with the records as columns.
    """
    return LoadOverTime(
        request_rates=_request_rates(columns, length_s),
        output_rate=_output_rate(columns, event_counts, length_s),
        in_flight=_mean_in_flight(columns, length_s),
        errors=_errors_by_kind(columns, length_s),
        slo_attainment=_slo_attainment(columns, manifest, length_s),
        cache_hit_rate=_cache_hit_rate(columns, length_s),
        client_overhead=_client_overhead(columns, worker_samples, length_s),
    )


def _percentile_curves(
    columns: Columns, is_counted: NDArray[np.bool_]
) -> dict[str, PercentileCurve]:
    """Return the percentile curve of each latency by the name of its metric, such as "ttft".

    The metric "max_gap" is the max ITL: the longest time between two tokens of a request. A latency
    that no counted request has, such as the TPOT of responses with one token, has no curve.
    """
    ttft_curve = curve_of_values("TTFT", columns.measure("ttft")[is_counted])
    curves = {
        "ttft": ttft_curve,
        "ttft_from_sent": _ttft_from_sent_curve(columns, is_counted, ttft_curve),
        "tpot": curve_of_values("TPOT", columns.measure("tpot")[is_counted]),
        "max_gap": curve_of_values("max ITL", columns.measure("max_gap")[is_counted]),
        "e2e": curve_of_values("E2E", columns.measure("e2e")[is_counted]),
    }
    return {metric: curve for metric, curve in curves.items() if curve is not None}


def _ttft_from_sent_curve(
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
    """Return the latencies of successful requests over the time of the run.

    The time bin of a TTFT is that of the scheduled time of its request, from which it is measured.
    The bin of a TPOT is that of the last token, because it is not known earlier. Snapshots are
    histograms of the inter-chunk latencies, which are left out if there are none (None).
    """
    is_ok = columns.has_status(OK)
    ttft = quantiles_over_time(columns["due_ns"], columns.measure("ttft"), is_ok, length_s)
    tpot = quantiles_over_time(columns["last_token_ns"], columns.measure("tpot"), is_ok, length_s)
    inter_chunk: Cells = ()
    if inter_chunk_snapshots is not None:
        inter_chunk = count_inter_chunk_latencies(inter_chunk_snapshots, length_s)
    return LatencyOverTime(ttft=ttft, tpot=tpot, inter_chunk=inter_chunk)


def _scatter_plots(columns: Columns, is_counted: NDArray[np.bool_]) -> ScatterPlots:
    """Return the scatter plots of the counted requests, in which each request is a point."""
    # This plot needs the most memory while it is computed, so it comes first: the columns of the
    # other plots, which stay in memory until the end, are not read yet.
    ttft_by_in_flight = _plot_ttft_by_in_flight(columns, is_counted)
    ttft_ns = columns.measure("ttft")
    queue_ns = columns["server_queue_ns"]
    due_ns = columns["due_ns"]

    return ScatterPlots(
        ttft_by_input=scatter_plot(columns["input_tokens"], ttft_ns, is_counted),
        ttft_by_queue=scatter_plot(queue_ns, ttft_ns, is_counted, x_divisor=NS_PER_MS),
        ttft_by_time=scatter_plot(due_ns, ttft_ns, is_counted, x_divisor=NS_PER_S),
        e2e_by_output=scatter_plot(columns["output_tokens"], columns.measure("e2e"), is_counted),
        ttft_by_in_flight=ttft_by_in_flight,
        received_by_requested=_plot_received_by_requested(columns, is_counted),
    )


def _plot_ttft_by_in_flight(columns: Columns, is_counted: NDArray[np.bool_]) -> ScatterPlot:
    """Return the scatter plot of TTFT by the other requests in flight at the target."""
    sent_rows, other_counts = in_flight_at_send(columns)
    return scatter_plot(
        other_counts,
        columns.measure("ttft")[sent_rows],
        is_counted[sent_rows],
        row_indices=sent_rows,
    )


def _plot_received_by_requested(
    columns: Columns, is_counted: NDArray[np.bool_]
) -> ScatterPlot | None:
    """Return the scatter plot of received output tokens (y) by requested output tokens (x).

    Return None if no length was requested, or if every response has the requested length.
    """
    requested_tokens = columns["asked_output"]
    received_tokens = columns["output_tokens"]
    has_both = is_counted & (requested_tokens >= 0) & (received_tokens >= 0)
    differs = requested_tokens[has_both] != received_tokens[has_both]
    if not differs.any():
        return None

    return scatter_plot(
        requested_tokens.astype(np.int64), received_tokens.astype(np.int64), has_both, y_divisor=1
    )


# -- over time -------------------------------------------------------------------------------------


class Grid(msgspec.Struct, frozen=True):
    """Equal time bins from the start of a run to its end.

    Attributes:
        width_s: The length of each bin.
        bin_count: The number of bins.
    """

    width_s: float
    bin_count: int

    @classmethod
    def for_length(
        cls, length_s: float, max_bins: int = MAX_BINS, min_width_s: float = 0.0
    ) -> Grid:
        """Return a grid for a run of `length_s` seconds, with bins that are easy to read.

        The bins have the smallest width in BIN_WIDTHS_S with which at most `max_bins` are needed.
        For example, a run of 100 s has 100 bins of 1 s. A run that is too long for all of these
        widths has `max_bins` bins. A bin is never narrower than `min_width_s`.
        """
        readable_widths_s = [width for width in BIN_WIDTHS_S if width * max_bins >= length_s]
        if readable_widths_s:
            narrowest_s = readable_widths_s[0]
        else:
            narrowest_s = length_s / max_bins

        width_s = max(narrowest_s, min_width_s)

        # A length of 3 bins may be computed as 3.0000000001, which must not need a fourth one.
        bin_count = int(np.ceil(length_s / width_s - ROUNDING_ERROR))
        return cls(width_s, max(bin_count, 1))

    @classmethod
    def for_requests(cls, length_s: float, requests: int, per_bin: int) -> Grid:
        """Return a grid whose bins hold at least `per_bin` requests on average.

        It has MIN_BINS bins or more, even if that leaves fewer requests for each bin.
        """
        filled_bins = max(requests // per_bin, MIN_BINS)
        return cls.for_length(length_s, max_bins=min(filled_bins, MAX_BINS))

    @property
    def edges_s(self) -> NDArray[np.float64]:
        """The edges of the bins, one more than there are bins."""
        return np.arange(self.bin_count + 1, dtype=np.float64) * self.width_s

    def bin_numbers(self, times_ns: NDArray[np.int64]) -> NDArray[np.int16]:
        """Return the number of the bin of each time, counted from 0.

        Times outside the grid belong to its first or last bin. The small integer type and the
        division block by block save memory, since there may be millions of times.
        """
        width_ns = round(self.width_s * NS_PER_S)
        bin_numbers = np.empty(len(times_ns), np.int16)
        for block in block_slices(len(times_ns)):
            bin_numbers[block] = np.clip(times_ns[block] // width_ns, 0, self.bin_count - 1)
        return bin_numbers

    def count(self, times_ns: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the number of times in each bin."""
        counts = np.zeros(self.bin_count)
        for block in block_slices(len(times_ns)):
            counts += np.bincount(self.bin_numbers(times_ns[block]), minlength=self.bin_count)
        return counts

    def sum(self, amounts: NDArray[np.int64], times_ns: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the sum of the amounts in each bin, where each amount belongs to one time."""
        sums = np.zeros(self.bin_count)
        for block in block_slices(len(times_ns)):
            bin_numbers = self.bin_numbers(times_ns[block])
            sums += np.bincount(bin_numbers, amounts[block], minlength=self.bin_count)
        return sums

    def round_series(self, series: Mapping[str, Iterable[float | None]]) -> Bins:
        """Return series with a value per bin of this grid, rounded for a chart."""
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
    """Return percentiles of a latency for each time bin of a run, in ms.

    They are the median, p90 and p99 if most bins hold enough requests for them, and the maximum.

    Args:
        times_ns: For each request, the time that decides its bin; negative if not known.
        values_ns: For each request, its latency or UNDEFINED.
        selected: Which requests to use.
        length_s: The length of the run.
    """
    is_known = selected & (values_ns != UNDEFINED) & (times_ns >= 0)
    grid = Grid.for_requests(length_s, int(np.count_nonzero(is_known)), MIN_REQUESTS_FOR_P90)
    values_by_bin = _sorted_values_by_bin(grid, times_ns, values_ns, is_known)
    quantiles = _supported_quantiles(values_by_bin)

    return grid.round_series(
        {
            name: [_quantile_ms(values, quantile) for values in values_by_bin]
            for name, quantile in quantiles.items()
        }
    )


def _supported_quantiles(values_by_bin: Sequence[NDArray[np.int64]]) -> dict[str, float]:
    """Return the quantiles to show over time, by name: p90 and p99 only if bins are large enough.

    The size of a bin is the number of its values. The median of the sizes decides, without empty
    bins.
    """
    bin_sizes = [len(values) for values in values_by_bin if len(values)]
    typical_size = float(np.median(bin_sizes)) if bin_sizes else 0.0

    quantiles = {"p50": 0.5}
    if typical_size >= MIN_REQUESTS_FOR_P90:
        quantiles["p90"] = 0.9

    if typical_size >= MIN_REQUESTS_FOR_P99:
        quantiles["p99"] = 0.99

    quantiles["max"] = 1.0
    return quantiles


def _sorted_values_by_bin(
    grid: Grid,
    times_ns: NDArray[np.int64],
    values_ns: NDArray[np.int64],
    is_known: NDArray[np.bool_],
) -> list[NDArray[np.int64]]:
    """Return for each time bin of a grid the known values whose time is in it, in ascending order.

    For example, the values 5, 3, 9 and 1 in the bins 0, 1, 0 and 1 are put in the order of their
    bins, which gives 5, 9, 3, 1. That is split into 5, 9 and 3, 1, and each part is sorted.
    """
    known_rows = as_selection(is_known)
    bin_numbers = grid.bin_numbers(times_ns[known_rows])

    # Indices of 32 bits need half of the memory of the default ones.
    rows_in_bin_order = np.argsort(bin_numbers, kind="stable").astype(np.int32)
    values_in_bin_order = values_ns[known_rows][rows_in_bin_order]
    values_per_bin = np.bincount(bin_numbers, minlength=grid.bin_count)
    bin_ends = np.cumsum(values_per_bin)

    values_by_bin = np.split(values_in_bin_order, bin_ends[:-1])
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
    ends_ns = [rows[name].max(initial=0) for name in ("done_ns", "due_ns", "sent_ns")]
    ends_ns += [len(counts) * BIN_NS for counts in event_counts]
    return max(float(max(ends_ns)) / NS_PER_S, 0.1)


def _stage_spans(
    manifest: RunManifest, rows: NDArray[np.void], length_s: float
) -> Iterator[StageSpan]:
    """Yield the span of each stage of a run on the time axis of its charts.

    A stage is a part of a run with its own load, such as a warm-up of 60 s. A stage ends at its
    planned end, or earlier if the run ended before that, for example because it was interrupted.
    """
    for index, stage in enumerate(manifest.stages):
        is_in_stage = (rows["stage"] == index) & (rows["due_ns"] >= 0)
        due_ns = rows["due_ns"][is_in_stage]
        start_s = _stage_start_ns(index, stage, due_ns) / NS_PER_S
        planned_end_s = _stage_end_ns(stage, due_ns) / NS_PER_S

        # Without a planned end and without requests, the end is 0, which is before the start.
        end_s = max(planned_end_s, start_s)
        yield StageSpan(
            name=stage.name or f"stage {index + 1}",
            start_s=round_to(start_s, SPAN_DIGITS),
            end_s=round_to(min(end_s, length_s), SPAN_DIGITS),
            measured=stage.measured,
        )


def _stage_end_ns(stage: StagePlan, due_ns: NDArray[np.int64]) -> int:
    """Return when a stage ends: as planned, or else with its last request.

    A stage that ends after a number of requests has no planned end. `due_ns` has the scheduled
    times of the requests of the stage; a stage without requests ends at 0.
    """
    if stage.end_ns is not None:
        return stage.end_ns
    return int(due_ns.max(initial=0))


def _stage_start_ns(index: int, stage: StagePlan, due_ns: NDArray[np.int64]) -> int:
    """Return when a stage starts: as planned, or else with its first request.

    A stage has no planned start if the stage before it has no planned end, since that ends after a
    number of requests. Its `start_ns` is then 0, which is a planned start only for the first stage.

    Args:
        index: The position of the stage among the stages of the run, from 0.
        stage: The stage.
        due_ns: The scheduled times of its requests.
    """
    is_first = index == 0
    has_planned_start = is_first or stage.start_ns != 0
    if has_planned_start or not len(due_ns):
        return stage.start_ns
    return int(due_ns.min())


def _request_rates(columns: Columns, length_s: float) -> Bins:
    """Return scheduled, sent and successful requests per second, for each time bin.

    A scheduled request counts in the bin of its scheduled time, a sent one in that of its sending,
    and a successful one in that of its end.
    """
    grid = Grid.for_requests(length_s, len(columns), REQUESTS_PER_BIN)
    was_sent = columns["sent_ns"] >= 0
    has_ended_ok = columns.has_status(OK) & (columns["end_ns"] >= 0)
    scheduled_ns = columns["due_ns"][as_selection(columns.reached_due_time)]
    sent_ns = columns["sent_ns"][as_selection(was_sent)]
    ok_ns = columns["end_ns"][as_selection(has_ended_ok)]

    return grid.round_series(
        {
            "scheduled": grid.count(scheduled_ns) / grid.width_s,
            "sent": grid.count(sent_ns) / grid.width_s,
            "ok": grid.count(ok_ns) / grid.width_s,
        }
    )


def _mean_in_flight(columns: Columns, length_s: float) -> Bins:
    """Return the mean number of requests in flight in each time bin.

    It is the time that all requests together spent in flight during the bin, divided by the width
    of the bin: two requests that are in flight for half of a bin are a mean of 1.

    At an edge between two bins, a request was in flight for the time since it was sent, minus the
    time since it was done. The sum of these times over all requests, at the second edge of a bin
    minus at its first one, is the time in flight during the bin.
    """
    grid = Grid.for_length(length_s)
    was_sent = columns["sent_ns"] >= 0
    is_done = was_sent & (columns["done_ns"] >= 0)
    since_sent_ns = _time_since_events_ns(grid, columns["sent_ns"][as_selection(was_sent)])
    since_done_ns = _time_since_events_ns(grid, columns["done_ns"][as_selection(is_done)])
    in_flight_before_edges_ns = since_sent_ns - since_done_ns
    in_flight_in_bins_ns = np.diff(in_flight_before_edges_ns)
    mean_in_flight = in_flight_in_bins_ns / (grid.width_s * NS_PER_S)

    # Rounding errors may lead to a number slightly below 0.
    return grid.round_series({"in flight": np.maximum(mean_in_flight, 0.0)})


def _time_since_events_ns(grid: Grid, times_ns: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return for each edge of the grid the sum of the times since each event before it, in ns.

    For events at 1 s and at 4 s, the result at an edge at 5 s is (5 - 1) + (5 - 4) = 5 s. That
    equals the number of events times the edge, minus the sum of their times: 2 * 5 - (1 + 4) = 5.
    This form needs only the number and the sum for each bin, and no loop over the events.
    """
    edges_ns = grid.edges_s * NS_PER_S
    event_counts = _totals_before_edges(grid.count(times_ns))
    # The amounts to add up are the times themselves.
    time_sums_of_bins_ns = grid.sum(amounts=times_ns, times_ns=times_ns)
    time_sums_ns = _totals_before_edges(time_sums_of_bins_ns)
    return event_counts * edges_ns - time_sums_ns


def _totals_before_edges(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the sum of the values of all bins before each edge: [1, 2, 3] gives [0, 1, 3, 6]."""
    return np.concatenate(([0.0], np.cumsum(values)))


def _output_rate(
    columns: Columns, event_counts: Sequence[NDArray[np.int64]], length_s: float
) -> Bins:
    """Return the output tokens per second in each time bin.

    Tokens arrive in output events, which are the chunks of streamed responses. If the run counted
    them, tokens count at the time of their events. Otherwise the tokens of each response are spread
    evenly from its first to its last token.

    Args:
        columns: The records of the run.
        event_counts: For each stage, the number of output events in bins of BIN_NS. Empty if
            the run did not count them.
        length_s: The length of the run.
    """
    grid = Grid.for_length(length_s)
    tokens_per_bin = _tokens_by_events(columns, event_counts, grid)
    if tokens_per_bin is None:
        tokens_per_bin = _tokens_spread_evenly(columns, grid)
    return grid.round_series({"output": tokens_per_bin / grid.width_s})


def _tokens_by_events(
    columns: Columns, event_counts: Sequence[NDArray[np.int64]], grid: Grid
) -> NDArray[np.float64] | None:
    """Return the output tokens in each bin, or None if the run has not counted output events.

    The run counts the events over time but not the tokens of each event. So every event counts as
    the mean number of tokens per event. For example, with 1,000 tokens in 500 events, a bin with 30
    events has 60 tokens.
    """
    events_before_bins = cumulate_event_counts(event_counts)
    has_tokens = columns.has_status(OK) & (columns["output_tokens"] >= 0)
    total_events = int(columns["output_events"][has_tokens].sum(dtype=np.int64))
    if events_before_bins is None or total_events == 0:
        return None

    total_tokens = int(time_output_tokens(columns).amounts.sum(dtype=np.int64))
    tokens_per_event = total_tokens / total_events
    return _events_in_bins(events_before_bins, grid) * tokens_per_event


def _events_in_bins(events_before_bins: NDArray[np.int64], grid: Grid) -> NDArray[np.float64]:
    """Return the number of output events in each bin of a grid.

    The run counted the events in bins of BIN_NS, which are shorter than those of the grid. An edge
    of the grid may lie inside a short bin, whose events are then taken to be spread evenly. If 10
    events came before a short bin and 14 before its end, 12 came before its middle.

    Args:
        events_before_bins: The number of events before each short bin, and before the end of the
            last one.
        grid: The grid.
    """
    edges_in_short_bins = grid.edges_s * NS_PER_S / BIN_NS
    short_bin_numbers = np.arange(len(events_before_bins))
    events_before_edges = np.interp(edges_in_short_bins, short_bin_numbers, events_before_bins)
    return np.diff(events_before_edges)


def _tokens_spread_evenly(columns: Columns, grid: Grid) -> NDArray[np.float64]:
    """Return the output tokens in each bin if those of a response come at a constant rate."""
    first_token_ns, last_token_ns, tokens = time_output_tokens(columns)
    amounts = Amounts()
    amounts.add(first_token_ns, last_token_ns, tokens)
    return np.array([amounts.between(start_s, end_s) for start_s, end_s in pairwise(grid.edges_s)])


def _errors_by_kind(columns: Columns, length_s: float) -> Bins:
    """Return the number of failed requests in each time bin, as a series for each kind of error.

    The most frequent kind comes first. A request counts when it ended, or at its scheduled time if
    it never did.
    """
    grid = Grid.for_length(length_s, MAX_ERROR_BINS)
    is_error = ~(columns.has_status(OK) | columns.has_status(UNFINISHED))
    has_ended = columns["done_ns"] >= 0
    times_ns = np.where(has_ended, columns["done_ns"], columns["due_ns"])
    error_times_ns = times_ns[is_error]
    error_kinds = columns["kind"][is_error]

    counts_by_label = {}
    for kind in _distinct_by_frequency(error_kinds):
        # A record without a kind, whose name is "", is that of a request that did not finish.
        label = KINDS[kind] or "not finished"
        counts_by_label[label] = grid.count(error_times_ns[error_kinds == kind])

    return grid.round_series(counts_by_label)


def _distinct_by_frequency(values: NDArray[Any]) -> list[int]:
    """Return the distinct values with the most frequent first: [7, 2, 7] gives [7, 2]."""
    distinct_values, frequencies = np.unique(values, return_counts=True)
    # A stable sort keeps equally frequent values in ascending order.
    descending = np.argsort(-frequencies, kind="stable")
    ordered: list[int] = distinct_values[descending].tolist()
    return ordered


def _slo_attainment(columns: Columns, manifest: RunManifest, length_s: float) -> Bins | None:
    """Return the fraction of requests that met the SLO, by scheduled time.

    Return None if the run has no SLO on requests. The bins are as wide as those of p90 latencies,
    because a fraction of fewer than MIN_REQUESTS_FOR_P90 requests says little.
    """
    slo = manifest.slo
    if slo is None:
        return None

    has_request_objective = bool(slo.terms) or slo.goodput_share is not None
    if not has_request_objective:
        return None

    is_counted = outcomes.is_counted(columns, slo)
    is_good = is_counted & outcomes.meets_slo(columns, slo)
    grid = Grid.for_requests(length_s, int(is_counted.sum()), MIN_REQUESTS_FOR_P90)
    scheduled_ns = columns["due_ns"]
    good_counts = grid.count(scheduled_ns[is_good])
    total_counts = grid.count(scheduled_ns[is_counted])

    return grid.round_series({"met the SLO": _ratios(good_counts, total_counts)})


def _cache_hit_rate(columns: Columns, length_s: float) -> Bins | None:
    """Return the cached fraction of prompt tokens, by the time of the first token.

    A response that was not streamed counts at its end. Return None if the server reported no
    numbers of cached tokens.
    """
    has_counts = (
        columns.has_status(OK) & (columns["cached_tokens"] >= 0) & (columns["input_tokens"] > 0)
    )
    if not has_counts.any():
        return None

    grid = Grid.for_requests(length_s, int(has_counts.sum()), REQUESTS_PER_BIN)
    response_start_ns = time_or_end(columns, "first_token_ns", has_counts)
    cached_tokens = grid.sum(columns["cached_tokens"][has_counts], response_start_ns)
    prompt_tokens = grid.sum(columns["input_tokens"][has_counts], response_start_ns)

    return grid.round_series({"cached": _ratios(cached_tokens, prompt_tokens)})


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
    grid = Grid.for_length(length_s, min_width_s=1.0)
    return grid.round_series(
        {
            "cpu": _largest_cpu_shares(worker_samples, grid),
            "largest send delay": _largest_send_delays_ms(columns, grid),
        }
    )


def _largest_cpu_shares(worker_samples: Sequence[WorkerSample], grid: Grid) -> list[float | None]:
    """Return the CPU use of the busiest worker in each bin, None for a bin without samples.

    A sample is the mean CPU use of a worker over a short span, as a fraction of a core. It counts
    in the bin that contains the middle of that span.
    """
    cpu_shares: list[float | None] = [None] * grid.bin_count
    for sample in worker_samples:
        if sample.span_s < MIN_SAMPLE_SPAN_S:
            continue
        middle_s = max(sample.t_s - sample.span_s / 2, 0)
        bin_number = min(int(middle_s // grid.width_s), grid.bin_count - 1)
        cpu_shares[bin_number] = max(cpu_shares[bin_number] or 0.0, sample.cpu_share)

    return cpu_shares


def _largest_send_delays_ms(columns: Columns, grid: Grid) -> list[float | None]:
    """Return the largest send delay in each time bin, None for a bin without sent requests.

    The send delay of a request is the time from when it should have been sent to when it was sent.
    """
    was_sent = as_selection(columns["sent_ns"] >= 0)
    sent_ns = columns["sent_ns"][was_sent]
    delays_ns = columns.measure("send_lag")[was_sent]

    # UNDEFINED is less than any delay, so it remains only in bins without requests.
    largest_ns = np.full(grid.bin_count, UNDEFINED)

    # The records are read in blocks, so that no temporary array is as long as the run.
    for block in block_slices(len(sent_ns)):
        np.maximum.at(largest_ns, grid.bin_numbers(sent_ns[block]), delays_ns[block])

    return [None if delay == UNDEFINED else float(delay / NS_PER_MS) for delay in largest_ns]


def count_inter_chunk_latencies(snapshots: NDArray[np.void], length_s: float) -> Cells:
    """Return the numbers of inter-chunk latencies by time (s) and length (ms), for a heat map.

    An inter-chunk latency is the time between two chunks of a streamed response.

    Args:
        snapshots: Histograms of the latencies with the edges HEAT_EDGES_NS and the dtype
            `results.record_log.HEAT`. Each worker writes one about every 2 s, which counts the
            latencies since its previous snapshot.
        length_s: The length of the run.
    """
    if not len(snapshots):
        return ()

    typical_span_s = _typical_snapshot_span_s(snapshots)
    min_width_s = min(MIN_BIN_PER_SNAPSHOT * typical_span_s, length_s)
    grid = Grid.for_length(length_s, min_width_s=min_width_s)
    bin_numbers = _snapshot_bin_numbers(snapshots, typical_span_s, grid)

    # The first count of a snapshot, of latencies below all edges, is left out: these are times
    # between chunks that arrived in one read of a socket.
    snapshot_counts = snapshots["counts"][:, 1:]
    counts_by_bin = np.zeros((grid.bin_count, len(HEAT_EDGES_NS)), np.int64)
    np.add.at(counts_by_bin, bin_numbers, snapshot_counts)

    return tuple(_heat_map_cells(counts_by_bin, grid.width_s))


def _snapshot_bin_numbers(
    snapshots: NDArray[np.void], typical_span_s: float, grid: Grid
) -> NDArray[np.int16]:
    """Return for each snapshot the number of the time bin in which its latencies count.

    It is the bin that contains the middle of the time that the snapshot covers. If the bins are a
    little shorter than that time, it is the bin that contains the time half a bin before its end.
    """
    half_span_s = min(typical_span_s, grid.width_s) / 2
    middle_s = snapshots["until_ns"] / NS_PER_S - half_span_s
    return grid.bin_numbers((middle_s * NS_PER_S).astype(np.int64))


def _typical_snapshot_span_s(snapshots: NDArray[np.void]) -> float:
    """Return the median time between two snapshots, which is the time that a snapshot covers."""
    snapshot_times_ns = np.unique(snapshots["until_ns"])
    spans_ns = np.diff(snapshot_times_ns, prepend=0)
    return float(np.median(spans_ns)) / NS_PER_S


def _heat_map_cells(counts: NDArray[np.int64], width_s: float) -> Iterator[Cell]:
    """Yield the cells of a heat map that are not empty.

    Args:
        counts: The number of latencies, with a row for each time bin and a column for each range of
            lengths. Column i has the latencies from HEAT_EDGES_NS[i] up to the next edge.
        width_s: The width of a time bin.
    """
    # The last range has no upper edge. It is drawn up to twice its lower edge.
    upper_edge_ns = HEAT_EDGES_NS[-1] * 2
    edges_ms = np.append(HEAT_EDGES_NS, upper_edge_ns) / NS_PER_MS
    rounded_edges_ms = round_all(edges_ms, EDGE_DIGITS_OF_HEAT_MAP)

    filled_cells = np.argwhere(counts).tolist()
    for bin_number, range_number in filled_cells:
        yield Cell(
            left=float(bin_number * width_s),
            right=float((bin_number + 1) * width_s),
            low=rounded_edges_ms[range_number],
            high=rounded_edges_ms[range_number + 1],
            point_count=int(counts[bin_number, range_number]),
        )


# -- scatter plots ---------------------------------------------------------------------------------


def in_flight_at_send(columns: Columns) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return the sent requests, and how many others were in flight at their target when sent.

    The first array has the row indices of the sent requests, ordered by target and time of sending.
    The second array has for each of them the number of other requests. Requests that were sent at
    the same time count as others too.
    """
    was_sent = columns["sent_ns"] >= 0
    row_indices = []

    other_counts = []
    for target in np.unique(columns["target"]).tolist():
        is_sent_to_target = was_sent & (columns["target"] == target)
        target_rows = _rows_by_time_of_sending(columns, is_sent_to_target)
        row_indices.append(target_rows)
        other_counts.append(_count_other_requests(columns, target_rows))

    return join_arrays(row_indices), join_arrays(other_counts)


def _rows_by_time_of_sending(columns: Columns, selected: NDArray[np.bool_]) -> NDArray[np.int32]:
    """Return the indices of the selected rows in the order in which their requests were sent.

    The indices are of 32 bits, because they are kept for each request of the run.
    """
    rows = np.flatnonzero(selected).astype(np.int32)
    order = np.argsort(columns["sent_ns"][rows])
    sorted_rows: NDArray[np.int32] = rows[order]
    return sorted_rows


def _count_other_requests(columns: Columns, rows: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return for each request how many others were in flight at its target when it was sent.

    A request is in flight from when it is sent until it ends. So the number is that of the requests
    that had been sent, minus that of the requests that had ended, minus the request itself.

    Args:
        columns: The records of the run.
        rows: The indices of all requests of the target, in the order of sending.
    """
    sent_ns = columns["sent_ns"][rows]
    ends_ns = columns["done_ns"][rows]
    sorted_ends_ns = np.sort(ends_ns[ends_ns >= 0])  # negative if the request did not end
    other_counts = np.empty(len(rows), np.int32)

    # Blocks keep the temporary arrays small in a long run.
    for block in block_slices(len(rows)):
        moments_ns = sent_ns[block]
        sent_counts = _count_until(sent_ns, moments_ns)
        ended_counts = _count_until(sorted_ends_ns, moments_ns)
        other_counts[block] = sent_counts - ended_counts - 1

    return other_counts


def _count_until(sorted_times: NDArray[np.int64], moments: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return for each moment the number of times that are not later.

    For example, of the times 1, 3 and 5, there are 2 until the moment 3, and 3 until the moment 8.
    """
    return np.searchsorted(sorted_times, moments, side="right")


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
        x: The values of x. A negative value means that x is unknown, as in the records.
        y_ns: The values of y, UNDEFINED if unknown.
        selected: Which pairs are plotted.
        x_divisor: Converts the values of x to the unit of the chart.
        y_divisor: Converts the values of y to the unit of the chart.
        row_indices: The row of each pair, if the pairs are in another order than the rows. Points
            are listed in the order of rows.
    """
    pairs = _Pairs(x, y_ns, selected, x_divisor, y_divisor)
    count = pairs.count()
    if not count:
        return ScatterPlot(count=0)

    x_range, y_range = pairs.ranges()
    log_y = _needs_log_axis(y_range)
    plot = ScatterPlot(count=count, x_range=x_range, y_range=y_range, log_y=log_y)
    if count <= MAX_POINTS:
        return msgspec.structs.replace(plot, points=pairs.points(row_indices))

    return msgspec.structs.replace(plot, cells=pairs.cells(x_range, y_range, log_y=log_y))


def _needs_log_axis(value_range: Range) -> bool:
    """Return True if positive values differ by more than the factor LOG_RATIO."""
    lowest, highest = value_range
    return lowest > 0 and highest > LOG_RATIO * max(lowest, SMALLEST_LOG_VALUE)


class _Pairs:
    """The pairs (x, y) of a scatter plot that are selected and whose x and y are known.

    They are read block by block, so that a plot of millions of pairs needs little memory.
    """

    def __init__(
        self,
        x: NDArray[Any],
        y_ns: NDArray[np.int64],
        selected: NDArray[np.bool_],
        x_divisor: float,
        y_divisor: float,
    ) -> None:
        """Store the values of all pairs. The parameters are those of `scatter_plot`."""
        self._x = x
        self._y_ns = y_ns
        self._selected = selected
        self._x_divisor = x_divisor
        self._y_divisor = y_divisor

    def _is_known(self, block: slice) -> NDArray[np.bool_]:
        """Return which pairs of a block of rows are selected and have a known x and y."""
        has_x = self._x[block] >= 0
        has_y = self._y_ns[block] != UNDEFINED
        is_known: NDArray[np.bool_] = self._selected[block] & has_x & has_y
        return is_known

    def count(self) -> int:
        """Return the number of pairs."""
        blocks = block_slices(len(self._x))
        return sum(int(np.count_nonzero(self._is_known(block))) for block in blocks)

    def _blocks(self) -> Iterator[tuple[NDArray[np.float64], NDArray[np.float64]]]:
        """Yield the x and the y values of the known pairs, block by block.

        They are in the units of the axes of the chart, such as ms. Blocks without pairs are left
        out.
        """
        for block in block_slices(len(self._x)):
            is_known = self._is_known(block)
            if not is_known.any():
                continue
            selection = as_selection(is_known)
            x_values = self._x[block][selection] / self._x_divisor
            y_values = self._y_ns[block][selection] / self._y_divisor
            yield x_values, y_values

    def ranges(self) -> tuple[Range, Range]:
        """Return the lowest and the highest value of x, and those of y."""
        extreme_x: list[float] = []
        extreme_y: list[float] = []
        for x, y in self._blocks():
            extreme_x += [float(x.min()), float(x.max())]
            extreme_y += [float(y.min()), float(y.max())]
        return (min(extreme_x), max(extreme_x)), (min(extreme_y), max(extreme_y))

    def points(self, row_indices: NDArray[np.int32] | None) -> tuple[tuple[float, float], ...]:
        """Return all pairs as points, in the order of the rows of the records.

        `row_indices` has the row of each pair. It is None if the pairs are in this order already.
        """
        is_known = self._is_known(slice(None))
        pair_indices = np.flatnonzero(is_known)
        if row_indices is not None:
            rows_of_pairs = row_indices[pair_indices]
            pair_indices = pair_indices[np.argsort(rows_of_pairs)]

        x = round_all(self._x[pair_indices] / self._x_divisor, POINT_DIGITS)
        y = round_all(self._y_ns[pair_indices] / self._y_divisor, POINT_DIGITS)
        return tuple(zip(x, y, strict=True))

    def cells(self, x_range: Range, y_range: Range, *, log_y: bool) -> Cells:
        """Return the numbers of pairs by cell, without empty cells.

        The cells divide both ranges evenly. With `log_y`, they divide the logarithm of y evenly.
        """
        x_edges = _cell_edges(*x_range, CELL_COLUMNS)
        if log_y:
            lowest_log, highest_log = np.log10(y_range)
            log_edges = _cell_edges(lowest_log, highest_log, CELL_ROWS)
            counts = self._count_by_cell(x_edges, log_edges, log_y=True)
            return _filled_cells(counts, x_edges, 10**log_edges)

        y_edges = _cell_edges(*y_range, CELL_ROWS)
        counts = self._count_by_cell(x_edges, y_edges, log_y=False)
        return _filled_cells(counts, x_edges, y_edges)

    def _count_by_cell(
        self, x_edges: NDArray[np.float64], y_edges: NDArray[np.float64], *, log_y: bool
    ) -> NDArray[np.int64]:
        """Return the number of pairs in each cell, by column and row, as `numpy.histogram2d` does.

        Cells are numbered column by column while they are counted: row 5 of column 2 has the number
        2 * CELL_ROWS + 5. With `log_y`, the edges are logarithms of y.
        """
        counts = np.zeros(CELL_COLUMNS * CELL_ROWS, np.int64)
        for x, y in self._blocks():
            columns = _cell_indices(x, x_edges)
            rows = _cell_indices(np.log10(y) if log_y else y, y_edges)
            counts += np.bincount(columns * CELL_ROWS + rows, minlength=len(counts))
        return counts.reshape(CELL_COLUMNS, CELL_ROWS)


def _filled_cells(
    counts: NDArray[np.int64], x_edges: NDArray[np.float64], y_edges: NDArray[np.float64]
) -> Cells:
    """Return the cells of a scatter plot that have pairs, with their edges rounded.

    Args:
        counts: The number of pairs in each cell, by column and row.
        x_edges: The edges of the columns, one more than there are columns.
        y_edges: The edges of the rows, one more than there are rows.
    """
    rounded_x = round_all(x_edges, CELL_EDGE_DIGITS)
    rounded_y = round_all(y_edges, CELL_EDGE_DIGITS)

    cells: list[Cell] = []
    for column, row in np.argwhere(counts).tolist():
        cell = Cell(
            left=rounded_x[column],
            right=rounded_x[column + 1],
            low=rounded_y[row],
            high=rounded_y[row + 1],
            point_count=int(counts[column, row]),
        )
        cells.append(cell)

    return tuple(cells)


def _cell_edges(lowest: float, highest: float, cell_count: int) -> NDArray[np.float64]:
    """Return the edges of equal cells over a range, as `numpy.histogram2d` computes them.

    A range of one value is widened by 0.5 on both sides.
    """
    margin = 0.5 if lowest == highest else 0.0
    return np.linspace(lowest - margin, highest + margin, cell_count + 1)


def _cell_indices(values: NDArray[np.float64], edges: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return for each value the index of the cell that contains it, from 0.

    Cell i contains the values from edges[i] up to, but without, edges[i + 1]. The last cell also
    contains its upper edge, as in `numpy.histogram`. The index is computed from the width of the
    cells, which takes a third of the time of a search with `numpy.searchsorted`.
    """
    last_cell = len(edges) - 2
    cells_per_unit = (last_cell + 1) / (edges[-1] - edges[0])
    indices: NDArray[np.int64] = ((values - edges[0]) * cells_per_unit).astype(np.int64)
    np.clip(indices, 0, last_cell, out=indices)

    # Rounding errors may put a value one cell too high or too low.
    is_below_cell = values < edges[indices]
    indices[is_below_cell] -= 1
    is_above_cell = (values >= edges[indices + 1]) & (indices < last_cell)
    indices[is_above_cell] += 1

    return indices
