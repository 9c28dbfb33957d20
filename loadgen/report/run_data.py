"""What the pictures of a run show, as numbers: rows in, a few thousand figures out, however many rows there are.

Pure numpy. Nothing is drawn here and nothing is said; every series has a bounded length, so that a page of ten million
requests is as large as a page of a thousand.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from loadgen.metrics.columns import OK, UNDEFINED, Columns
from loadgen.report.percentile_curves import PercentileCurve, curve, curve_of_histogram, round_to, rounded
from loadgen.results.record import BIN_NS, KINDS
from loadgen.stats.quantiles import Histogram, index

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from loadgen.results.manifest import Header, Second

MOST_BINS = 120  # of time, in one picture
MOST_POINTS = 1_500  # beyond this many, points are counted in cells
CELLS = (64, 40)  # of a picture of counted points, across and up
BUSY_BIN = 20  # requests in a bin of time, on average, before it has a p90
FULL_BIN = 100  # and a p99
STEPS_S = (0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 28800, 86400)

Values = tuple[float | None, ...]


class Bins(msgspec.Struct, frozen=True, kw_only=True):
    """Series over equal bins of time; bin i is from i * width_s to (i + 1) * width_s. null: nothing to say of a bin."""

    width_s: float
    series: dict[str, Values]


class Cloud(msgspec.Struct, frozen=True, kw_only=True):
    """Many pairs: as points, or counted in cells (column, row, count) whose edges are evenly spaced in x and y.

    `log_y`: y runs in log10.
    """

    count: int
    points: tuple[tuple[float, float], ...] = ()
    cells: tuple[tuple[int, int, int], ...] = ()
    x: tuple[float, float] = (0, 1)
    y: tuple[float, float] = (0, 1)
    log_y: bool = False


class Heat(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of values over time: cell (bin of time, bucket, count); bucket i is edges_ms[i] to edges_ms[i + 1]."""

    width_s: float
    edges_ms: tuple[float, ...]
    cells: tuple[tuple[int, int, int], ...]


class StageSpan(msgspec.Struct, frozen=True, kw_only=True):
    """A stage on the axis of time."""

    name: str
    arrival: str
    start_s: float
    end_s: float
    measured: bool


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a page about one run draws. Curves and clouds: ok measured requests; series over time: all."""

    length_s: float
    stages: tuple[StageSpan, ...]
    curves: dict[str, PercentileCurve]
    ttft: Bins  # ms by due instant: p50, and where a bin has enough p90, p99, max
    tpot: Bins  # ms by the instant of the last token
    output: Bins  # tokens/s by event time
    in_flight: Bins
    load: Bins  # requests/s: due, sent, ok
    errors: Bins  # requests by kind, in each bin
    cached: Bins | None  # share of prompt tokens; null: the server says nothing about it
    client: Bins  # CPU share of the busiest worker, and p99 send lag in ms
    ttft_by_input: Cloud
    e2e_by_output: Cloud
    asked_by_output: Cloud | None  # null: nothing was asked, or every answer is as long as asked
    gaps: Heat | None


def figures(
    header: Header,
    rows: NDArray[np.void],
    gaps: Sequence[Histogram] = (),
    timeline: Sequence[NDArray[np.int64]] = (),
    seconds: Sequence[Second] = (),
    texts: Sequence[str] = (),
    heat: NDArray[np.void] | None = None,
    heat_edges_ns: NDArray[np.int64] | None = None,
) -> Figures:
    """Arguments as of `summary.summarize`; `heat`: lines of `store.HEAT`, whose edges are `heat_edges_ns`."""
    every = Columns(rows)
    is_measured = np.array([stage.measured for stage in header.stages] or [True])[rows["stage"]]
    chosen = is_measured & every.where(OK)
    length_s = _length_s(rows, timeline)
    pooled = Histogram()
    for i, histogram in enumerate(gaps):
        if not header.stages or header.stages[i].measured:
            pooled.merge(histogram)
    ttft, tpot, e2e = (every.measure(name) for name in ("ttft", "tpot", "e2e"))
    sent, ok = every["sent_ns"] >= 0, every.where(OK)
    curves = {
        "ttft": curve("TTFT", ttft[chosen]),
        "ttft_from_sent": curve("TTFT from sent", every.measure("ttft_from_sent")[chosen]),
        "tpot": curve("TPOT", tpot[chosen]),
        "inter_chunk": curve_of_histogram("gap between events", pooled),
        "max_gap": curve("largest gap of a request", every.measure("max_gap")[chosen]),
        "e2e": curve("E2E", e2e[chosen]),
        "send_lag": curve("send lag", every.measure("send_lag")[sent & is_measured]),
    }
    return Figures(
        length_s=round_to(length_s, 6),
        stages=tuple(_parts(header, rows, length_s)),
        curves={name: found for name, found in curves.items() if found is not None},
        ttft=quantiles_over_time(every["due_ns"], ttft, ok, length_s),
        tpot=quantiles_over_time(every["last_token_ns"], tpot, ok, length_s),
        output=_output(every, timeline, length_s),
        in_flight=_in_flight(every, length_s),
        load=_load(every, length_s),
        errors=_errors(every, length_s),
        cached=_cached(every, length_s),
        client=_client(every, seconds, length_s),
        ttft_by_input=cloud(every["input_tokens"], ttft, chosen),
        e2e_by_output=cloud(every["output_tokens"], e2e, chosen),
        asked_by_output=_asked(every, chosen),
        gaps=None if heat is None or heat_edges_ns is None else gap_heat(heat, heat_edges_ns, length_s),
    )


# -- over time -----------------------------------------------------------------------------------------------------


def width_s(length_s: float, most: int = MOST_BINS) -> float:
    """The shortest of STEPS_S of which `most` cover the length."""
    return next((step for step in STEPS_S if step * most >= length_s), length_s / most)


def quantiles_over_time(
    when_ns: NDArray[np.int64], values_ns: NDArray[np.int64], chosen: NDArray[np.bool_], length_s: float
) -> Bins:
    """Quantiles of what happened in each bin: median and largest always, p90 and p99 where bins are full enough."""
    which = np.flatnonzero(chosen & (values_ns != UNDEFINED) & (when_ns >= 0))
    wanted = max(len(which) // BUSY_BIN, 8)
    step = width_s(length_s, min(MOST_BINS, wanted))
    count = _count(length_s, step)
    bins = np.minimum(when_ns[which] // round(step * 1e9), count - 1).astype(np.int16)
    order = np.argsort(bins, kind="stable")
    values = values_ns[which][order]
    edges = np.searchsorted(bins[order], np.arange(count + 1))
    typical = float(np.median(np.diff(edges)[np.diff(edges) > 0])) if len(which) else 0
    names: list[tuple[str, float]] = [("p50", 0.5)]
    names += [("p90", 0.9)] if typical >= BUSY_BIN else []
    names += [("p99", 0.99)] if typical >= FULL_BIN else []
    series: dict[str, list[float | None]] = {name: [] for name, _ in (*names, ("max", 1.0))}
    for low, high in pairwise(edges):
        inside = np.sort(values[low:high])
        for name, p in names:
            series[name].append(inside[index(len(inside), p)] / 1e6 if len(inside) else None)
        series["max"].append(inside[-1] / 1e6 if len(inside) else None)
    return _bins(step, series)


def _bins(step: float, series: dict[str, list[float | None]]) -> Bins:
    return Bins(
        width_s=step,
        series={
            name: tuple(None if value is None else round_to(value, 4) for value in values)
            for name, values in series.items()
        },
    )


def _count(length_s: float, step: float) -> int:
    return max(int(np.ceil(length_s / step - 1e-9)), 1)


def _length_s(rows: NDArray[np.void], timeline: Sequence[NDArray[np.int64]]) -> float:
    ends = [rows[name].max(initial=0) for name in ("done_ns", "due_ns", "sent_ns")]
    ends += [len(counts) * BIN_NS for counts in timeline]
    return max(float(max(ends)) / 1e9, 0.1)


def _parts(header: Header, rows: NDArray[np.void], length_s: float) -> Iterator[StageSpan]:
    for i, stage in enumerate(header.stages):
        due = rows["due_ns"][(rows["stage"] == i) & (rows["due_ns"] >= 0)]
        start = stage.start_ns / 1e9 if stage.start_ns or i == 0 else float(due.min(initial=0)) / 1e9
        end = stage.end_ns / 1e9 if stage.end_ns is not None else float(due.max(initial=0)) / 1e9
        yield StageSpan(
            name=stage.name or f"stage {i + 1}",
            arrival=stage.arrival,
            start_s=round_to(start, 5),
            end_s=round_to(min(max(end, start), length_s), 5),
            measured=stage.measured,
        )


def _rate(instants_ns: NDArray[np.int64], step: float, count: int) -> list[float | None]:
    places = np.minimum(instants_ns // round(step * 1e9), count - 1)
    return list(np.bincount(np.maximum(places, 0), minlength=count) / step)


def _load(every: Columns, length_s: float) -> Bins:
    step = width_s(length_s, min(MOST_BINS, max(len(every) // 5, 8)))
    count = _count(length_s, step)
    instants = {
        "due": every["due_ns"][every.attempted],
        "sent": every["sent_ns"][every["sent_ns"] >= 0],
        "ok": every["end_ns"][every.where(OK) & (every["end_ns"] >= 0)],
    }
    return _bins(step, {name: _rate(found, step, count) for name, found in instants.items()})


def _in_flight(every: Columns, length_s: float) -> Bins:
    """Mean number in flight in each bin, exactly: the integral at both edges, divided by the width."""
    step = width_s(length_s)
    count = _count(length_s, step)
    edges = np.arange(count + 1) * step * 1e9
    sent = every["sent_ns"] >= 0
    starts = np.sort(every["sent_ns"][sent])
    ends = every["done_ns"][sent]
    ends = np.sort(ends[ends >= 0])

    def integral(instants: NDArray[np.int64]) -> NDArray[np.float64]:
        """Sum over the instants before each edge of the time from them to it."""
        sums = np.concatenate(([0.0], np.cumsum(instants, dtype=np.float64)))
        before = np.searchsorted(instants, edges)
        found: NDArray[np.float64] = before * edges - sums[before]
        return found

    mean = np.diff(integral(starts) - integral(ends)) / (step * 1e9)
    return _bins(step, {"in flight": [max(float(value), 0.0) for value in mean]})


def _output(every: Columns, timeline: Sequence[NDArray[np.int64]], length_s: float) -> Bins:
    """Tokens by event time: events of the timeline times tokens per event; without one, each answer spread evenly."""
    step = width_s(length_s)
    count = _count(length_s, step)
    ok = every.where(OK) & (every["output_tokens"] >= 0)
    events = int(every["output_events"][ok].sum(dtype=np.int64))
    tokens = int(every["output_tokens"][ok].sum(dtype=np.int64))
    edges_s = np.arange(count + 1) * step
    total = np.zeros(count + 1)
    if events and any(counts.any() for counts in timeline):
        for counts in timeline:
            sums = np.concatenate(([0], np.cumsum(counts)))
            total += np.interp(edges_s * 1e9 / BIN_NS, np.arange(len(sums)), sums)
        total *= tokens / events
    else:
        first = np.where(every["first_token_ns"] < 0, every["end_ns"], every["first_token_ns"])[ok]
        last = np.where(every["last_token_ns"] < 0, every["end_ns"], every["last_token_ns"])[ok]
        for i, edge in enumerate(edges_s * 1e9):
            share = np.clip((edge - first) / np.maximum(last - first, 1), 0, 1)
            total[i] = float((share * every["output_tokens"][ok]).sum())
    return _bins(step, {"output": list(np.diff(total) / step)})


def _errors(every: Columns, length_s: float) -> Bins:
    """Requests that are not ok, by kind, at the instant that their end was known."""
    wrong = ~every.where(OK)
    step = width_s(length_s, 60)
    count = _count(length_s, step)
    when = np.where(every["done_ns"] >= 0, every["done_ns"], every["due_ns"])[wrong]
    kinds = every["kind"][wrong]
    places = np.clip(when // round(step * 1e9), 0, count - 1)
    series: dict[str, list[float | None]] = {}
    for kind in np.argsort(-np.bincount(kinds, minlength=1), kind="stable"):
        here = places[kinds == kind]
        if len(here):
            series[KINDS[kind] or "not finished"] = list(np.bincount(here, minlength=count).astype(float))
    return _bins(step, series)


def _cached(every: Columns, length_s: float) -> Bins | None:
    known = every.where(OK) & (every["cached_tokens"] >= 0) & (every["input_tokens"] > 0)
    if not known.any():
        return None
    step = width_s(length_s, min(MOST_BINS, max(int(known.sum()) // 5, 8)))
    count = _count(length_s, step)
    when = np.where(every["first_token_ns"] < 0, every["end_ns"], every["first_token_ns"])[known]
    places = np.minimum(when // round(step * 1e9), count - 1)
    cached = np.bincount(places, every["cached_tokens"][known], count)
    asked = np.bincount(places, every["input_tokens"][known], count)
    shares = [float(c / a) if a else None for c, a in zip(cached, asked, strict=True)]
    return _bins(step, {"cached": shares})


def _client(every: Columns, seconds: Sequence[Second], length_s: float) -> Bins:
    step = max(width_s(length_s), 1.0)
    count = _count(length_s, step)
    busiest: list[float | None] = [None] * count
    for second in seconds:
        place = min(int(max(second.t_s - second.span_s / 2, 0) // step), count - 1)
        if second.span_s >= 0.5:
            busiest[place] = max(busiest[place] or 0.0, second.cpu_share)
    sent = every["sent_ns"] >= 0
    lag = every.measure("send_lag")[sent]
    places = np.minimum(every["sent_ns"][sent] // round(step * 1e9), count - 1)
    largest = np.full(count, UNDEFINED)
    np.maximum.at(largest, places, lag)
    return _bins(
        step,
        {"cpu": busiest, "send lag, largest": [None if value == UNDEFINED else value / 1e6 for value in largest]},
    )


def gap_heat(lines: NDArray[np.void], edges_ns: NDArray[np.int64], length_s: float) -> Heat | None:
    """Lines of `store.HEAT` in cells; gaps shorter than the first edge are left out (events of one read). None: no
    lines."""
    if not len(lines):
        return None
    until = np.unique(lines["until_ns"])
    typical = float(np.median(np.diff(until, prepend=0))) / 1e9
    step = next(
        step for step in (*STEPS_S, length_s) if step >= min(0.8 * typical, length_s) and step * MOST_BINS >= length_s
    )
    count = _count(length_s, step)
    middle = lines["until_ns"] / 1e9 - min(typical, step) / 2
    places = np.clip(middle / step, 0, count - 1).astype(np.int64)
    total = np.zeros((count, len(edges_ns)), np.int64)
    np.add.at(total, places, lines["counts"][:, 1:])
    used = np.flatnonzero(total.any(axis=0))
    if not len(used):
        return None
    low, high = int(used[0]), int(used[-1]) + 1
    cells = tuple(
        (int(i), int(j), int(total[i, low + j])) for i, j in zip(*np.nonzero(total[:, low:high]), strict=True)
    )
    edges = np.append(edges_ns, edges_ns[-1] * 2)[low : high + 1] / 1e6
    return Heat(width_s=step, edges_ms=rounded(edges, 4), cells=cells)


# -- pairs ---------------------------------------------------------------------------------------------------------


def cloud(
    x: NDArray[np.int64],
    y_ns: NDArray[np.int64],
    chosen: NDArray[np.bool_],
    y_per: float = 1e6,
) -> Cloud:
    """Pairs of a known x and a defined y, y divided by `y_per`. Counted in cells beyond MOST_POINTS."""
    which = chosen & (x >= 0) & (y_ns != UNDEFINED)
    xs, ys = x[which].astype(np.float64), y_ns[which] / y_per
    if len(xs) == 0:
        return Cloud(count=0)
    spread = float(ys.max()) > 20 * max(float(ys.min()), 1e-6) and float(ys.min()) > 0
    ends_x = float(xs.min()), float(xs.max())
    ends_y = float(ys.min()), float(ys.max())
    if len(xs) <= MOST_POINTS:
        pairs = zip(rounded(xs, 4), rounded(ys, 4), strict=True)
        return Cloud(count=len(xs), points=tuple(pairs), x=ends_x, y=ends_y, log_y=spread)
    up = np.log10(ys) if spread else ys
    across = _cells(xs, CELLS[0])
    upward = _cells(up, CELLS[1])
    counts = np.bincount(across * CELLS[1] + upward, minlength=CELLS[0] * CELLS[1])
    cells = tuple((int(c // CELLS[1]), int(c % CELLS[1]), int(counts[c])) for c in np.flatnonzero(counts))
    return Cloud(count=len(xs), cells=cells, x=ends_x, y=ends_y, log_y=spread)


def _cells(values: NDArray[np.float64], count: int) -> NDArray[np.int64]:
    low, high = float(values.min()), float(values.max())
    if high <= low:
        return np.zeros(len(values), np.int64)
    places: NDArray[np.int64] = np.minimum((values - low) / (high - low) * count, count - 1).astype(np.int64)
    return places


def _asked(every: Columns, chosen: NDArray[np.bool_]) -> Cloud | None:
    known = chosen & (every["asked_output"] >= 0) & (every["output_tokens"] >= 0)
    if not (every["asked_output"][known] != every["output_tokens"][known]).any():
        return None
    return cloud(every["asked_output"].astype(np.int64), every["output_tokens"].astype(np.int64), known, 1)
