"""The load of a run: offered, achieved and completed rates, requests in flight, gaps between sends.

Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from loadgen.core.metrics.columns import as_selection, join_arrays
from loadgen.core.metrics.windows import per_second
from loadgen.core.stats.quantiles import block_slices, sort_times

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from loadgen.core.metrics.accumulator import MetricAccumulator
    from loadgen.core.metrics.columns import Columns
    from loadgen.core.metrics.windows import Span, Window
    from loadgen.core.results.manifest import StagePlan

STARTS_PER_CHUNK = 4096
"""The maximum of requests in flight is searched in chunks of so many starts."""


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """Offered, achieved and completed load. The rate of n times is (n - 1) / (last - first).

    Attributes:
        arrival: The arrival process as written in the workload, for example "poisson 10/s".
        offered_rps: The rate of due times. None in a closed loop, which has no offered load.
        achieved_rps: The rate of sent times.
        completed_rps: Ok requests per second of the measurement window. None for a single request.
        steady_completed_rps: Ok requests that ended in the steady-state window, per second of it.
        in_flight_mean: The mean over the measurement window; requests of all stages count.
        in_flight_max: The maximum in the measurement window; requests of all stages count.
        gap_variation: Standard deviation / mean of the gaps between sends, in open-loop stages.
        gap_variation_planned: The same of the due times of these requests.
    """

    arrival: str = ""
    offered_rps: float | None = None
    achieved_rps: float | None = None
    completed_rps: float | None = None
    steady_completed_rps: float | None = None
    in_flight_mean: float | None = None
    in_flight_max: int | None = None
    gap_variation: float | None = None
    gap_variation_planned: float | None = None


class InFlight(NamedTuple):
    """The requests in flight in an interval: sent and not done. None without an interval."""

    mean: float | None
    maximum: int | None


def summarize_load(
    accumulator: MetricAccumulator,
    all_stages: Sequence[MetricAccumulator],
    window: Window,
    stages: Sequence[StagePlan],
    run_total: MetricAccumulator | None = None,
) -> Load:
    """Return the load of some requests, such as those of a stage, a target or a class.

    Args:
        accumulator: The requests.
        all_stages: The requests of all stages, which may be in flight in the window too.
        window: The intervals that rates are over.
        stages: The plans of the stages.
        run_total: All measured requests of the run, if the requests are those of one target, class
            or other part. The rates of the parts then add up to that of the run.

    Returns:
        The load without the name of its arrival process.
    """
    columns_of_all_stages = [columns for stage in all_stages for columns in stage.columns]
    in_flight = count_in_flight(columns_of_all_stages, window)
    variations = _measure_gap_variations(accumulator.columns, stages)
    steady = window.steady
    ok_in_steady_state = accumulator.amount("ok").between(steady.start_s, steady.end_s)
    # The window of a single request is its own latency, whose inverse says nothing about the load.
    has_completed_rate = accumulator.sum("recorded") > 1
    return Load(
        offered_rps=times_per_s(accumulator, "open_due", run_total),
        achieved_rps=times_per_s(accumulator, "sent", run_total),
        completed_rps=per_second(accumulator.sum("ok"), window) if has_completed_rate else None,
        steady_completed_rps=per_second(ok_in_steady_state, steady),
        in_flight_mean=in_flight.mean,
        in_flight_max=in_flight.maximum,
        gap_variation=variations.sent,
        gap_variation_planned=variations.planned,
    )


def times_per_s(
    accumulator: MetricAccumulator, times: str, run_total: MetricAccumulator | None = None
) -> float | None:
    """Return the rate of n events, (n - 1) / (last - first), or None for fewer than two.

    Args:
        accumulator: The requests.
        times: The name of a time of each request, whose events are counted: "sent", "due" or
            "open_due".
        run_total: All measured requests of the run, if the requests are those of one part of it.
            The rate of the part is then its share of the rate of the run, so that the rates of all
            parts add up.
    """
    count = accumulator.sum(times)
    if run_total is not None:
        run_rate = times_per_s(run_total, times) if count else None
        return None if run_rate is None else run_rate * count / run_total.sum(times)
    if count < 2:
        return None
    duration_ns = accumulator.maxima[times] - accumulator.minima[times]
    return (count - 1) / (duration_ns / 1e9) if duration_ns > 0 else None


# -- requests in flight ----------------------------------------------------------------------------


def count_in_flight(stages: Sequence[Columns], interval: Span | Window) -> InFlight:
    """Return the mean and the maximum number of requests in flight in an interval, both exact.

    A request without an end, whose worker died, counts as in flight until the end of the interval.
    At the same time, ends are counted before starts.
    """
    if interval.start_s is None or interval.end_s is None:
        return InFlight(mean=None, maximum=None)
    start_ns = round(interval.start_s * 1e9)
    end_ns = round(interval.end_s * 1e9)
    sent_ns, done_ns = _times_in_flight(stages, start_ns, end_ns)
    total_ns = _time_in_flight_ns(sent_ns, done_ns, start_ns, end_ns)
    # A replaced array is freed before the next one is sorted.
    sent_ns = sort_times(sent_ns)
    done_ns = sort_times(done_ns)
    return InFlight(
        mean=float(total_ns / (end_ns - start_ns)),
        maximum=_max_in_flight(sent_ns, done_ns, start_ns, end_ns),
    )


def _times_in_flight(
    stages: Sequence[Columns], start_ns: int, end_ns: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return when the requests that are in flight in an interval were sent and done."""
    selections = [_select_in_flight(columns, start_ns, end_ns) for columns in stages]

    def join_field(field: str) -> NDArray[np.int64]:
        selected = zip(stages, selections, strict=True)
        return np.concatenate([columns[field][rows] for columns, rows in selected])

    sent_ns = join_field("sent_ns")
    done_ns = join_field("done_ns")
    has_no_end = done_ns < 0
    done_ns[has_no_end] = np.maximum(sent_ns[has_no_end], end_ns)
    return sent_ns, done_ns


def _select_in_flight(columns: Columns, start_ns: int, end_ns: int) -> NDArray[np.bool_] | slice:
    """Return which requests are in flight at some time in an interval."""
    sent_ns = columns["sent_ns"]
    done_ns = columns["done_ns"]
    ends_later = (done_ns < 0) | (done_ns >= start_ns)
    return as_selection((sent_ns >= 0) & (sent_ns <= end_ns) & ends_later)


def _time_in_flight_ns(
    starts: NDArray[np.int64], ends: NDArray[np.int64], start_ns: int, end_ns: int
) -> np.int64:
    """Return the time that all requests together are in flight in an interval.

    Divided by the length of the interval, it is the mean number of requests in flight. It is summed
    over slices of requests, which takes little memory.
    """
    total_ns = np.int64(0)
    for rows in block_slices(len(ends)):
        in_interval_ns = np.minimum(ends[rows], end_ns) - np.maximum(starts[rows], start_ns)
        total_ns += np.maximum(in_interval_ns, 0).sum()
    return total_ns


def _max_in_flight(
    starts: NDArray[np.int64], ends: NDArray[np.int64], start_ns: int, end_ns: int
) -> int:
    """Return the most requests in flight at one time of an interval.

    The requests in flight at a time are those that started until then less those that ended. The
    number rises only at starts, by one, and can only fall between two starts. So a chunk of starts
    can hold the maximum only if the number at its first start, plus the length of the chunk,
    exceeds the largest number known so far. Only such chunks are examined start by start, which is
    much faster than to look up the ends before every start.

    Args:
        starts: The times at which requests were sent, in ascending order.
        ends: The times at which requests were done, in ascending order.
        start_ns: The start of the interval.
        end_ns: The end of the interval.
    """
    started_before = np.searchsorted(starts, start_ns, "right")
    ended_before = np.searchsorted(ends, start_ns, "right")
    first = np.searchsorted(starts, start_ns, "left")
    last = np.searchsorted(starts, end_ns, "right")
    chunk_starts = np.arange(first, last, STARTS_PER_CHUNK)
    ended_until_chunks = np.searchsorted(ends, starts[chunk_starts], "right")
    in_flight_at_chunks = chunk_starts + 1 - ended_until_chunks
    maximum = max(int(started_before - ended_before), int(in_flight_at_chunks.max(initial=0)))
    may_exceed_maximum = in_flight_at_chunks + STARTS_PER_CHUNK > maximum
    for chunk_start in chunk_starts[may_exceed_maximum].tolist():
        chunk_end = min(chunk_start + STARTS_PER_CHUNK, last)
        started_until = np.arange(chunk_start + 1, chunk_end + 1)
        ended_until = np.searchsorted(ends, starts[chunk_start:chunk_end], "right")
        maximum = max(maximum, int((started_until - ended_until).max()))
    return maximum


# -- gaps between sends ----------------------------------------------------------------------------


def gap_variation(times_ns: NDArray[np.int64], stages: NDArray[np.int64]) -> float | None:
    """Return the coefficient of variation of the gaps between times, or None if there are no gaps.

    It is the standard deviation divided by the mean: 0 for constant gaps and 1 for a Poisson
    process. Gaps are computed within a stage and divided by the mean gap of that stage, so that a
    change of rate between stages does not count.

    Args:
        times_ns: The times, in any order.
        stages: The index of the stage of each time.
    """
    relative_gaps = []
    for stage in np.flatnonzero(np.bincount(stages)):
        gaps_ns = np.diff(sort_times(times_ns[as_selection(stages == stage)]))
        if len(gaps_ns) and gaps_ns.sum() > 0:
            relative_gaps.append(gaps_ns / gaps_ns.mean())
        del gaps_ns  # frees as much memory as all relative gaps take
    if not relative_gaps:
        return None
    return float(join_arrays(relative_gaps).std())


class _GapVariations(NamedTuple):
    """The variation of the gaps between sends, and of those between the due times."""

    sent: float | None
    planned: float | None


def _measure_gap_variations(
    columns_of_stages: Sequence[Columns], plans: Sequence[StagePlan]
) -> _GapVariations:
    """Return the variation of the gaps between sends, and that of the gaps between due times.

    If the client kept to the schedule, both are equal. Only requests of open loops that are first
    turns are compared, because the arrival process plans no others.
    """
    selections = [_select_planned(columns, plans) for columns in columns_of_stages]

    def select_planned(field: str) -> list[NDArray[np.int64]]:
        selected = zip(columns_of_stages, selections, strict=True)
        return [columns[field][rows] for columns, rows in selected]

    # The empty array gives `concatenate` a value also if there is no stage.
    stage_of_request = np.concatenate([np.zeros(0, np.int16), *select_planned("stage")])
    sent_variation = gap_variation(join_arrays(select_planned("sent_ns")), stage_of_request)
    # In virtual time, requests are sent exactly when they are due. The second sort is saved then.
    was_sent_when_due = all(
        np.array_equal(columns["sent_ns"][rows], columns["due_ns"][rows])
        for columns, rows in zip(columns_of_stages, selections, strict=True)
    )
    if was_sent_when_due:
        return _GapVariations(sent_variation, sent_variation)
    planned_variation = gap_variation(join_arrays(select_planned("due_ns")), stage_of_request)
    return _GapVariations(sent_variation, planned_variation)


def _select_planned(columns: Columns, plans: Sequence[StagePlan]) -> NDArray[np.bool_] | slice:
    """Return which requests were sent at a time that the arrival process determines."""
    was_sent = columns["sent_ns"] >= 0
    is_first_turn = columns["turn"] == 0
    if not plans:
        return as_selection(was_sent & is_first_turn)
    is_closed_stage = np.array([plan.closed for plan in plans])
    is_open_loop = ~is_closed_stage[columns["stage"]]
    return as_selection(was_sent & (is_open_loop & is_first_turn))
