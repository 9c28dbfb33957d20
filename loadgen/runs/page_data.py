"""The data behind the charts of a run: takes rows, returns a few thousand numbers, however many rows there are.

Pure numpy. Nothing is drawn or put into words here. Every series has a bounded length, so the page of a run with ten
million requests is as large as the page of a run with a thousand.
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
from loadgen.core.metrics.request_metrics import token_spans
from loadgen.core.metrics.windows import event_sums
from loadgen.core.results.manifest import RunManifest, WorkerSample
from loadgen.core.results.record import BIN_NS, KINDS
from loadgen.core.results.spool import HEAT_EDGES_NS
from loadgen.core.stats.amounts import Amounts
from loadgen.core.stats.histogram import Histogram
from loadgen.core.stats.quantiles import block_slices, quantile_index
from loadgen.runs.percentile_curves import (
    PercentileCurve,
    curve,
    curve_of_histogram,
    round_to,
    rounded,
)

MOST_BINS = 120  # time bins in one chart
MOST_POINTS = 1_500  # with more points than this, they are counted in cells
CELLS = (64, 40)  # of a chart of counted points: columns, rows
BUSY_BIN = 20  # median number of requests per time bin from which p90 is shown
FULL_BIN = 100  # the same for p99
STEPS_S = (
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

Values = tuple[float | None, ...]


class Bins(msgspec.Struct, frozen=True, kw_only=True):
    """Series over equal time bins; bin i covers i * width_s to (i + 1) * width_s. None: the bin has no value."""

    width_s: float
    series: dict[str, Values]


Cells = tuple[tuple[float, float, float, float, int], ...]
"""Counts of pairs by cell: left, right, low, high, count."""


class Cloud(msgspec.Struct, frozen=True, kw_only=True):
    """Many (x, y) pairs: as points, or counted in cells.

    `count` is the number of pairs; `x` and `y` are the ranges. `log_y`: the axis is logarithmic.
    """

    count: int
    points: tuple[tuple[float, float], ...] = ()
    cells: Cells = ()
    x: tuple[float, float] = (0, 1)
    y: tuple[float, float] = (0, 1)
    log_y: bool = False


class StageSpan(msgspec.Struct, frozen=True, kw_only=True):
    """A stage and its place on the time axis, in seconds from the start of the run."""

    name: str
    start_s: float
    end_s: float
    measured: bool


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the page of one run draws.

    Percentile curves and clouds cover ok requests of measured stages; series over time cover all requests.
    """

    length_s: float
    stages: tuple[StageSpan, ...]
    curves: dict[str, PercentileCurve]
    ttft: Bins  # ms, by due instant: p50 and max; p90 and p99 where the bins hold enough requests
    tpot: Bins  # ms, by the instant of the last token; the same quantiles
    output: Bins  # tokens/s by event time
    in_flight: Bins
    load: Bins  # requests/s: due, sent, ok
    errors: Bins  # requests that are not ok, by kind of error
    good: (
        Bins | None
    )  # share of requests within the SLO of the run, by due instant; None: there is none
    cached: Bins | None  # share of prompt tokens; None: the server does not report it
    client: Bins  # CPU share of the busiest worker, and the largest send lag in ms
    ttft_by_input: Cloud
    ttft_by_in_flight: Cloud  # others at its target when it was sent
    ttft_by_queue: Cloud  # ms that the server says it waited; nothing where it does not say
    ttft_by_time: Cloud  # s, of the due instant
    e2e_by_output: Cloud
    asked_by_output: (
        Cloud | None
    )  # None: no length was asked for, or every answer is exactly as long as asked
    gaps: Cells  # gaps between events by time and length in ms; empty: none is known


def figures(
    manifest: RunManifest,
    rows: NDArray[np.void],
    gaps: Sequence[Histogram] = (),
    timeline: Sequence[NDArray[np.int64]] = (),
    seconds: Sequence[WorkerSample] = (),
    heat: NDArray[np.void] | None = None,
) -> Figures:
    """The data for every chart of one run.

    Arguments as for `core.run_summary.summarize`. `heat`: rows of dtype `results.spool.HEAT`.
    """
    columns = Columns(rows)
    ok = columns.where(OK)
    is_counted = is_measured(manifest, rows) & ok
    length_s = _length_s(rows, timeline)
    of = columns.measure  # made again where it is needed: each is as large as a column
    ttft_curve, name = curve("TTFT", of("ttft")[is_counted]), "TTFT from sent"
    if ttft_curve is not None and np.array_equal(
        columns["sent_ns"], columns["due_ns"]
    ):  # in virtual time, of millions
        from_sent: PercentileCurve | None = msgspec.structs.replace(ttft_curve, name=name)
    else:
        from_sent = curve(name, of("ttft_from_sent")[is_counted])
    curves = {
        "ttft": ttft_curve,
        "ttft_from_sent": from_sent,
        "tpot": curve("TPOT", of("tpot")[is_counted]),
        "inter_chunk": curve_of_histogram("gap between events", pool_measured_gaps(manifest, gaps)),
        "max_gap": curve("largest gap of a request", of("max_gap")[is_counted]),
        "e2e": curve("E2E", of("e2e")[is_counted]),
    }
    over_time = {
        "ttft": quantiles_over_time(columns["due_ns"], of("ttft"), ok, length_s),
        "tpot": quantiles_over_time(columns["last_token_ns"], of("tpot"), ok, length_s),
    }
    e2e_by_output = cloud(columns["output_tokens"], of("e2e"), is_counted)
    sent, beside = in_flight_at_send(columns)
    ttft = of("ttft")
    ttft_by_in_flight = cloud(beside, ttft[sent], is_counted[sent], places=sent)
    del sent, beside
    ttft_by_input = cloud(columns["input_tokens"], ttft, is_counted)
    ttft_by_queue = cloud(columns["server_queue_ns"], ttft, is_counted, x_per=1e6)
    ttft_by_time = cloud(columns["due_ns"], ttft, is_counted, x_per=1e9)
    del ttft
    return Figures(
        length_s=round_to(length_s, 6),
        stages=tuple(_stage_spans(manifest, rows, length_s)),
        curves={
            name: percentile_curve
            for name, percentile_curve in curves.items()
            if percentile_curve is not None
        },
        **over_time,
        output=_output(columns, timeline, length_s),
        in_flight=_in_flight(columns, length_s),
        load=_load(columns, length_s),
        errors=_errors(columns, length_s),
        good=_good(columns, manifest, length_s),
        cached=_cached(columns, length_s),
        client=_client(columns, seconds, length_s),
        ttft_by_input=ttft_by_input,
        ttft_by_in_flight=ttft_by_in_flight,
        ttft_by_queue=ttft_by_queue,
        ttft_by_time=ttft_by_time,
        e2e_by_output=e2e_by_output,
        asked_by_output=_output_asked(columns, is_counted),
        gaps=() if heat is None else gap_heat(heat, length_s),
    )


# -- over time -----------------------------------------------------------------------------------------------------


class Grid(msgspec.Struct, frozen=True):
    """Equal time bins from the start of a run to its end."""

    width_s: float
    number: int

    @classmethod
    def over(cls, length_s: float, most: int = MOST_BINS, least_s: float = 0.0) -> Grid:
        """At most `most` bins, of the smallest width in STEPS_S that does, but not below `least_s`."""
        width_s = max(
            next((step for step in STEPS_S if step * most >= length_s), length_s / most), least_s
        )
        return cls(width_s, max(int(np.ceil(length_s / width_s - 1e-9)), 1))

    @property
    def edges_s(self) -> NDArray[np.floating[Any]]:
        return np.arange(self.number + 1) * self.width_s

    def place(self, instants_ns: NDArray[np.int64]) -> NDArray[np.int64]:
        """The bin of each instant; what lies outside is in the first or the last one."""
        return np.clip(instants_ns // round(self.width_s * 1e9), 0, self.number - 1)

    def sums(
        self, instants_ns: NDArray[np.int64], weights: NDArray[np.int64] | None = None
    ) -> NDArray[np.float64]:
        """The number of instants in each bin, or the sum of their weights, which are whole numbers."""
        total = np.zeros(self.number)
        for part in block_slices(len(instants_ns)):
            total += np.bincount(
                self.place(instants_ns[part]),
                None if weights is None else weights[part],
                self.number,
            )
        return total

    def bins(self, series: Mapping[str, Iterable[float | None]]) -> Bins:
        rounded_series = {
            name: tuple(None if value is None else round_to(value, 4) for value in values)
            for name, values in series.items()
        }
        return Bins(width_s=self.width_s, series=rounded_series)


def quantiles_over_time(
    when_ns: NDArray[np.int64],
    values_ns: NDArray[np.int64],
    chosen: NDArray[np.bool_],
    length_s: float,
) -> Bins:
    """Quantiles in ms per time bin: median and maximum always, p90 and p99 where bins hold enough requests."""
    known = chosen & (values_ns != UNDEFINED) & (when_ns >= 0)
    count = int(np.count_nonzero(known))
    grid = Grid.over(length_s, min(MOST_BINS, max(count // BUSY_BIN, 8)))
    own = as_selection(known)
    when_ns = when_ns[own]
    bins = np.empty(count, np.int16)
    for part in block_slices(count):
        bins[part] = grid.place(when_ns[part])
    order = np.argsort(bins, kind="stable").astype(np.int32)  # half as large
    values = values_ns[own][order]
    del order
    sizes = np.bincount(bins, minlength=grid.number)
    edges = np.cumsum([0, *sizes])
    typical_size = float(np.median(sizes[sizes > 0])) if count else 0
    least_size = {("p50", 0.5): 0, ("p90", 0.9): BUSY_BIN, ("p99", 0.99): FULL_BIN, ("max", 1.0): 0}
    insides = [values[first:end] for first, end in pairwise(edges)]
    for inside in insides:
        inside.sort()
    return grid.bins(
        {
            name: [
                inside[quantile_index(len(inside), p)] / 1e6 if len(inside) else None
                for inside in insides
            ]
            for (name, p), least in least_size.items()
            if typical_size >= least
        }
    )


def _length_s(rows: NDArray[np.void], timeline: Sequence[NDArray[np.int64]]) -> float:
    ends = [rows[name].max(initial=0) for name in ("done_ns", "due_ns", "sent_ns")]
    ends += [len(counts) * BIN_NS for counts in timeline]
    return max(float(max(ends)) / 1e9, 0.1)


def _stage_spans(
    manifest: RunManifest, rows: NDArray[np.void], length_s: float
) -> Iterator[StageSpan]:
    for i, stage in enumerate(manifest.stages):
        due = rows["due_ns"][(rows["stage"] == i) & (rows["due_ns"] >= 0)]
        start = (
            stage.start_ns / 1e9 if stage.start_ns or i == 0 else float(due.min(initial=0)) / 1e9
        )
        end = stage.end_ns / 1e9 if stage.end_ns is not None else float(due.max(initial=0)) / 1e9
        yield StageSpan(
            name=stage.name or f"stage {i + 1}",
            start_s=round_to(start, 5),
            end_s=round_to(min(max(end, start), length_s), 5),
            measured=stage.measured,
        )


def _load(columns: Columns, length_s: float) -> Bins:
    grid = Grid.over(length_s, min(MOST_BINS, max(len(columns) // 5, 8)))
    counted = {
        "due": ("due_ns", columns.reached_due_time),
        "sent": ("sent_ns", columns["sent_ns"] >= 0),
        "ok": ("end_ns", columns.where(OK) & (columns["end_ns"] >= 0)),
    }
    sums = {
        name: grid.sums(columns[one][as_selection(mask)]) for name, (one, mask) in counted.items()
    }
    return grid.bins({name: count / grid.width_s for name, count in sums.items()})


def _in_flight(columns: Columns, length_s: float) -> Bins:
    """Exact mean number in flight per bin: the integral between the edges of the bin, divided by its width."""
    grid = Grid.over(length_s)
    edges = grid.edges_s * 1e9

    def integral(name: str) -> NDArray[np.float64]:
        """For each bin edge: the time from every earlier instant of the sent requests to the edge, summed (ns)."""
        instants = np.sort(
            columns[name][as_selection((columns["sent_ns"] >= 0) & (columns[name] >= 0))]
        )
        before, sums, total = np.searchsorted(instants, edges), np.zeros(len(edges)), 0.0
        for part in block_slices(len(instants)):
            running = np.cumsum(np.append(total, instants[part]))
            here = (before >= part.start) & (before < part.start + len(running))
            sums[here], total = running[before[here] - part.start], float(running[-1])
        sum_to_edge: NDArray[np.float64] = before * edges - sums
        return sum_to_edge

    mean = np.diff(integral("sent_ns") - integral("done_ns")) / (grid.width_s * 1e9)
    return grid.bins({"in flight": np.maximum(mean, 0.0)})


def _output(columns: Columns, timeline: Sequence[NDArray[np.int64]], length_s: float) -> Bins:
    """Output tokens per second, by the time of their events.

    With a timeline: its events, times the mean number of tokens per event. Without one: the tokens of each answer are
    spread evenly from its first to its last token.
    """
    grid = Grid.over(length_s)
    first, last, tokens = token_spans(columns)
    events = int(
        columns["output_events"][columns.where(OK) & (columns["output_tokens"] >= 0)].sum(
            dtype=np.int64
        )
    )
    sums = event_sums(timeline)
    if events and sums is not None:
        until_edge = np.interp(grid.edges_s * 1e9 / BIN_NS, np.arange(len(sums)), sums)
        in_bins = np.diff(until_edge) * (int(tokens.sum(dtype=np.int64)) / events)
    else:
        amounts = Amounts()
        amounts.add(first, last, tokens)
        in_bins = np.array([amounts.between(low, high) for low, high in pairwise(grid.edges_s)])
    return grid.bins({"output": in_bins / grid.width_s})


def _errors(columns: Columns, length_s: float) -> Bins:
    """Requests that are not ok, by kind of error, at the instant they ended; at the due instant if they never did."""
    not_ok = ~(columns.where(OK) | columns.where(UNFINISHED))
    grid = Grid.over(length_s, 60)
    ended_ns = np.where(columns["done_ns"] >= 0, columns["done_ns"], columns["due_ns"])[not_ok]
    kinds = columns["kind"][not_ok]
    by_count = [
        kind for kind in np.argsort(-np.bincount(kinds), kind="stable") if (kinds == kind).any()
    ]
    return grid.bins(
        {KINDS[kind] or "not finished": grid.sums(ended_ns[kinds == kind]) for kind in by_count}
    )


def _good(columns: Columns, manifest: RunManifest, length_s: float) -> Bins | None:
    slo = manifest.slo
    if slo is None or not (slo.terms or slo.goodput_share is not None) or length_s <= 0:
        return None
    counted = outcomes.is_counted(columns, slo)
    grid = Grid.over(length_s, min(MOST_BINS, max(int(counted.sum()) // BUSY_BIN, 8)))
    due = columns["due_ns"]
    good, every = (
        grid.sums(due[counted & outcomes.meets(columns, slo)]),
        grid.sums(due[as_selection(counted)]),
    )
    return grid.bins(
        {"within the SLO": [a / b if b else None for a, b in zip(good, every, strict=True)]}
    )


def _cached(columns: Columns, length_s: float) -> Bins | None:
    has_counts = columns.where(OK) & (columns["cached_tokens"] >= 0) & (columns["input_tokens"] > 0)
    if not has_counts.any():
        return None
    grid = Grid.over(length_s, min(MOST_BINS, max(int(has_counts.sum()) // 5, 8)))
    started_ns = np.where(
        columns["first_token_ns"] < 0, columns["end_ns"], columns["first_token_ns"]
    )[has_counts]
    cached, prompt = (
        grid.sums(started_ns, columns[name][has_counts])
        for name in ("cached_tokens", "input_tokens")
    )
    return grid.bins(
        {
            "cached": [
                part / whole if whole else None for part, whole in zip(cached, prompt, strict=True)
            ]
        }
    )


def _client(columns: Columns, seconds: Sequence[WorkerSample], length_s: float) -> Bins:
    grid = Grid.over(length_s, least_s=1.0)
    busiest: list[float | None] = [None] * grid.number
    for second in seconds:
        i = min(int(max(second.t_s - second.span_s / 2, 0) // grid.width_s), grid.number - 1)
        if second.span_s >= 0.5:
            busiest[i] = max(busiest[i] or 0.0, second.cpu_share)
    sent = as_selection(columns["sent_ns"] >= 0)
    largest_lag_ns = np.full(grid.number, UNDEFINED)
    sent_ns, lag_ns = columns["sent_ns"][sent], columns.measure("send_lag")[sent]
    for part in block_slices(len(sent_ns)):
        np.maximum.at(largest_lag_ns, grid.place(sent_ns[part]), lag_ns[part])
    lags = [None if value == UNDEFINED else value / 1e6 for value in largest_lag_ns]
    return grid.bins({"cpu": busiest, "send lag, largest": lags})


def gap_heat(lines: NDArray[np.void], length_s: float) -> Cells:
    """Counts of gap lengths (ms) over time (s), from rows of dtype `results.spool.HEAT`.

    Gaps shorter than the first edge are left out: they lie between events that arrived in one read.
    """
    if not len(lines):
        return ()
    typical_s = float(np.median(np.diff(np.unique(lines["until_ns"]), prepend=0))) / 1e9
    grid = Grid.over(length_s, least_s=min(0.8 * typical_s, length_s))
    middle_s = lines["until_ns"] / 1e9 - min(typical_s, grid.width_s) / 2
    total = np.zeros((grid.number, len(HEAT_EDGES_NS)), np.int64)
    np.add.at(total, grid.place((middle_s * 1e9).astype(np.int64)), lines["counts"][:, 1:])
    edges_ms = rounded(np.append(HEAT_EDGES_NS, HEAT_EDGES_NS[-1] * 2) / 1e6, 4)
    return tuple(
        (
            float(i * grid.width_s),
            float((i + 1) * grid.width_s),
            edges_ms[j],
            edges_ms[j + 1],
            int(total[i, j]),
        )
        for i, j in zip(*np.nonzero(total), strict=True)
    )


# -- pairs ---------------------------------------------------------------------------------------------------------


def in_flight_at_send(columns: Columns) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """The places of the requests that were sent, in the order in which they were, target after target; and for each how
    many others were in flight at its target then.
    """
    sent, done, target = (columns[name] for name in ("sent_ns", "done_ns", "target"))
    places, others = (np.empty(np.count_nonzero(sent >= 0), np.int32) for _ in range(2))
    first = 0
    for number in np.unique(target).tolist():
        own = np.flatnonzero((target == number) & (sent >= 0)).astype(np.int32)
        here = slice(first, first := first + len(own))
        order = np.argsort(sent[own]).astype(np.int32)  # half as large, as the places are
        places[here] = own[order]
        del order
        starts, ends = sent[places[here]], done[own]
        ends.sort()
        ends = ends[np.searchsorted(ends, 0) :]  # of those that are done
        for part in block_slices(len(own)):
            until, begun = starts[part], np.arange(part.start, min(part.stop, len(own)))
            after = starts[part.start + 1 : part.stop + 1]
            at_once = np.flatnonzero(
                until[: len(after)] == after
            )  # those sent at this very instant are others too
            begun[at_once] = np.searchsorted(starts, until[at_once], side="right") - 1
            others[here][part] = begun - np.searchsorted(ends, until, side="right")
    return places, others


def cloud(
    x: NDArray[Any],
    y_ns: NDArray[np.int64],
    chosen: NDArray[np.bool_],
    y_per: float = 1e6,
    x_per: float = 1.0,
    places: NDArray[np.int32] | None = None,
) -> Cloud:
    """Pairs of a known x and a defined y, divided by `x_per` and `y_per`. More than MOST_POINTS pairs are counted in
    cells. `places`: those of their rows, where they are not in the order of these.
    """
    parts = block_slices(len(x))
    known = [chosen[part] & (x[part] >= 0) & (y_ns[part] != UNDEFINED) for part in parts]
    count = int(sum(map(np.count_nonzero, known)))
    if not count:
        return Cloud(count=0)
    parts, known = (
        [one for one, own in zip(each, known, strict=True) if own.any()] for each in (parts, known)
    )

    def of(values: NDArray[Any]) -> Iterator[NDArray[Any]]:
        """The known values, part after part; of one that is always the same only that one."""
        for part, own in zip(parts, known, strict=True):
            yield (
                values[part][:1]
                if values.strides == (0,)
                else values[part]
                if own.all()
                else values[part][own]
            )

    ends_x, ends_y = (
        (
            float(min(each.min() for each in of(values)) / per),
            float(max(each.max() for each in of(values)) / per),
        )
        for values, per in ((x, x_per), (y_ns, y_per))
    )
    log_y = ends_y[1] > 20 * max(ends_y[0], 1e-6) and ends_y[0] > 0
    if count <= MOST_POINTS:
        every = np.flatnonzero(chosen & (x >= 0) & (y_ns != UNDEFINED))
        every = every if places is None else every[np.argsort(places[every])]
        points = tuple(
            zip(
                *(rounded(values[every] / per, 4) for values, per in ((x, x_per), (y_ns, y_per))),
                strict=True,
            )
        )
        return Cloud(count=count, points=points, x=ends_x, y=ends_y, log_y=log_y)
    x_edges, y_edges = (
        _edges(ends_x, CELLS[0]),
        _edges(np.log10(ends_y) if log_y else ends_y, CELLS[1]),
    )
    counts = np.zeros(CELLS[0] * CELLS[1], np.int64)
    for xs, ys, own in zip(of(x), of(y_ns), known, strict=True):
        high = ys / y_per
        cell = _places(xs / x_per, x_edges) * CELLS[1] + _places(
            np.log10(high) if log_y else high, y_edges
        )
        counts += np.bincount(cell, minlength=len(counts)) * (
            np.count_nonzero(own) if len(cell) == 1 else 1
        )
    lefts, lows = rounded(x_edges, 5), rounded(10**y_edges if log_y else y_edges, 5)
    used = [
        (*divmod(cell, CELLS[1]), int(counts[cell])) for cell in np.flatnonzero(counts).tolist()
    ]
    cells = tuple((lefts[i], lefts[i + 1], lows[j], lows[j + 1], number) for i, j, number in used)
    return Cloud(count=count, cells=cells, x=ends_x, y=ends_y, log_y=log_y)


def _edges(ends: Any, number: int) -> NDArray[np.float64]:
    """The edges of so many equal cells, as `numpy.histogram2d` has them."""
    least, largest = ends
    half = 0.5 if least == largest else 0.0
    return np.linspace(least - half, largest + half, number + 1)


def _places(values: NDArray[np.float64], edges: NDArray[np.float64]) -> NDArray[np.int64]:
    """The cell of each value, exactly by the edges: reckoned, then held against them, faster than a search."""
    last = len(edges) - 2
    place: NDArray[np.int64] = ((values - edges[0]) * ((last + 1) / (edges[-1] - edges[0]))).astype(
        np.int64
    )
    np.clip(place, 0, last, out=place)
    place -= values < edges[place]
    place += (values >= edges[place + 1]) & (place < last)
    return place


def _output_asked(columns: Columns, chosen: NDArray[np.bool_]) -> Cloud | None:
    has_both = chosen & (columns["asked_output"] >= 0) & (columns["output_tokens"] >= 0)
    if not (columns["asked_output"][has_both] != columns["output_tokens"][has_both]).any():
        return None
    return cloud(
        columns["asked_output"].astype(np.int64),
        columns["output_tokens"].astype(np.int64),
        has_both,
        1,
    )
