"""The block `load` of a summary: offered, achieved and completed load, requests in flight, gaps between sends. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from loadgen.core.metrics.accumulator import MetricAccumulator
from loadgen.core.metrics.blocks import amount_in
from loadgen.core.metrics.columns import Columns, in_parts, or_all, together
from loadgen.core.metrics.windows import Span, Window, per_second

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from loadgen.core.results.manifest import StagePlan

_STEP = 4096  # starts, of which the first says whether any of them may be the busiest


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """Offered, achieved and completed load. The rate of n instants is (n - 1) / (last - first)."""

    arrival: str = ""  # as written in the workload: "poisson 10/s"
    offered_rps: float | None = (
        None  # rate of due instants; null in a closed loop, which has no offered load
    )
    achieved_rps: float | None = None  # rate of sent instants
    # ok requests over the measured window; null for a single request
    completed_rps: float | None = None
    steady_completed_rps: float | None = (
        None  # ok requests that ended in the steady window, per second of it
    )
    in_flight_mean: float | None = (
        None  # mean over the measured window; requests of all stages count
    )
    in_flight_max: int | None = None
    gap_variation: float | None = (
        None  # standard deviation / mean of real send gaps; open-loop stages only
    )
    gap_variation_planned: float | None = None  # of the due instants of the same requests


def load(
    cell: MetricAccumulator,
    everything: Sequence[MetricAccumulator],
    inside: Window,
    arrival: str,
    stages: Sequence[StagePlan],
    whole: MetricAccumulator | None = None,
) -> Load:
    """Return the block `load` of a cell. `everything`: the cells of all stages. `whole`: what the cell is a part of."""
    mean, largest = in_flight([columns for part in everything for columns in part.columns], inside)
    variation, variation_planned = _gap_variations(cell.columns, stages)
    return Load(
        arrival=arrival,
        offered_rps=instants_per_s(cell, "open_due", whole),
        achieved_rps=instants_per_s(cell, "sent", whole),
        completed_rps=_completed_per_s(cell, inside),
        steady_completed_rps=per_second(amount_in([cell], "ok", inside.steady), inside.steady),
        in_flight_mean=mean,
        in_flight_max=largest,
        gap_variation=variation,
        gap_variation_planned=variation_planned,
    )


def _completed_per_s(cell: MetricAccumulator, inside: Window) -> float | None:
    """Return the ok requests per second of the measurement window, or None for a single request.

    The window of a single request is its own latency, whose inverse says nothing about the load.
    """
    return per_second(cell.sum("ok"), inside) if cell.sum("rows") > 1 else None


def instants_per_s(
    cell: MetricAccumulator, instants: str, whole: MetricAccumulator | None = None
) -> float | None:
    """Rate of instants per second, (n - 1) / (last - first): n instants enclose n - 1 gaps. None for fewer than two.

    Of a part the share of the rate of the `whole` that its instants are: the parts are over one time, and add up.
    """
    count = cell.sum(instants)
    if whole is not None:
        rate = instants_per_s(whole, instants) if count else None
        return None if rate is None else rate * count / whole.sum(instants)
    length_ns = cell.most[instants] - cell.least[instants] if count > 1 else 0
    return (count - 1) / (length_ns / 1e9) if length_ns > 0 else None


def in_flight(
    everything: Sequence[Columns], stretch: Span | Window
) -> tuple[float | None, int | None]:
    """Mean and maximum number of requests in flight (sent and not done) in an interval.

    Exact, by a sweep over starts and ends. A request without an end (its worker died) counts as in flight until the end
    of the interval. At the same instant, ends are counted before starts.
    """
    if stretch.start_s is None or stretch.end_s is None:
        return None, None
    low, high = round(stretch.start_s * 1e9), round(stretch.end_s * 1e9)
    pairs = []  # with those in flight at some time in the interval
    for part in everything:
        sent, done = part["sent_ns"], part["done_ns"]
        pairs.append((part, or_all((sent >= 0) & (sent <= high) & ((done < 0) | (done >= low)))))
    starts, ends = (
        np.concatenate([part[name][own] for part, own in pairs]) for name in ("sent_ns", "done_ns")
    )
    endless = ends < 0
    ends[endless] = np.maximum(starts[endless], high)
    total_ns = np.int64(0)
    for rows in in_parts(len(ends)):
        total_ns += np.maximum(
            np.minimum(ends[rows], high) - np.maximum(starts[rows], low), 0
        ).sum()
    starts.sort()
    ends.sort()
    at_start = np.searchsorted(starts, low, "right") - np.searchsorted(ends, low, "right")
    first, last = np.searchsorted(starts, low, "left"), np.searchsorted(starts, high, "right")
    begins = np.arange(first, last, _STEP)
    levels = (
        begins + 1 - np.searchsorted(ends, starts[begins], "right")
    )  # requests in flight right after each start
    maximum = max(int(at_start), int(levels.max(initial=0)))
    for begin in begins[levels + _STEP > maximum].tolist():
        chunk = starts[begin : min(begin + _STEP, last)]
        levels = np.arange(begin + 1, begin + 1 + len(chunk)) - np.searchsorted(
            ends, chunk, "right"
        )
        maximum = max(maximum, int(levels.max()))
    return float(total_ns / (high - low)), maximum


def gap_variation(instants_ns: NDArray[np.int64], stages: NDArray[np.int64]) -> float | None:
    """Coefficient of variation (standard deviation / mean) of the gaps between instants: constant 0, Poisson 1.

    Gaps are computed within a stage and divided by the mean gap of that stage, so a change of rate between stages does
    not count as variation. None when there are no gaps.
    """
    pooled = []
    for stage in np.flatnonzero(np.bincount(stages)):
        gaps = np.diff(np.sort(instants_ns[or_all(stages == stage)]))
        if len(gaps) and gaps.sum() > 0:
            pooled.append(gaps / gaps.mean())
        del gaps  # as long as all that are pooled
    if not pooled:
        return None
    return float(together(pooled).std())


def _gap_variations(
    parts: Sequence[Columns], stages: Sequence[StagePlan]
) -> tuple[float | None, float | None]:
    """The variation of real send gaps and of planned ones, of requests whose gaps are planned.

    Those are sent in an open loop, and they are first turns: later ones wait for the turn before.
    """
    closed = np.array([stage.closed for stage in stages] or [False])
    of_arrivals = [
        (part["sent_ns"] >= 0) & ~closed[part["stage"]] & (part["turn"] == 0) for part in parts
    ]
    pairs = [(part, or_all(own)) for part, own in zip(parts, of_arrivals, strict=True)]
    of_stage = np.concatenate([np.zeros(0, np.int16), *(part["stage"][own] for part, own in pairs)])

    def variation(name: str) -> float | None:
        return gap_variation(together([part[name][own] for part, own in pairs]), of_stage)

    of_sends = variation("sent_ns")
    as_planned = all(
        np.array_equal(part["sent_ns"][own], part["due_ns"][own]) for part, own in pairs
    )
    return of_sends, of_sends if as_planned else variation("due_ns")
