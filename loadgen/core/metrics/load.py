"""The load of a run: offered, achieved and completed rates, requests in flight, gaps between sends.

Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

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
    from loadgen.core.metrics.request_group import RequestGroup
    from loadgen.core.metrics.windows import Span, Window
    from loadgen.core.results.manifest import StagePlan

SENDS_PER_SLICE = 65_536
"""The maximum of requests in flight is searched in slices of so many sends."""

RequestTime: TypeAlias = Literal["sent", "due", "due_in_open_loop"]
"""A time of each request, by the name under which accumulators keep its first and last value."""


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


def summarize_load(group: RequestGroup, stage_plans: Sequence[StagePlan]) -> Load:
    """Return the request rates and the requests in flight of a group of requests.

    Args:
        group: The requests, with the measurement window and the steady state to count them in.
        stage_plans: The plan of each stage of the run, which says whether it is an open loop.
    """
    columns_of_all_stages = [columns for stage in group.all_stages for columns in stage.columns]
    in_flight = count_in_flight(columns_of_all_stages, group.window)
    variations = _measure_gap_variations(group.requests.columns, stage_plans)

    return Load(
        arrival=group.arrival,
        # A closed loop has no offered rate: its requests are due when earlier responses end.
        offered_rps=_request_rate(group, "due_in_open_loop"),
        achieved_rps=_request_rate(group, "sent"),
        completed_rps=_completed_rate(group.requests, group.window),
        steady_completed_rps=_steady_completed_rate(group.requests, group.window.steady),
        in_flight_mean=in_flight.mean,
        in_flight_max=in_flight.maximum,
        gap_variation=variations.sent,
        gap_variation_planned=variations.planned,
    )


def _completed_rate(accumulator: MetricAccumulator, window: Window) -> float | None:
    """Return the ok requests per second of the measurement window, None for a single request."""
    if accumulator.sum("recorded") < 2:
        return None
    return per_second(accumulator.sum("ok"), window)


def _steady_completed_rate(accumulator: MetricAccumulator, steady: Span) -> float | None:
    """Return the ok requests that ended in the steady state, per second of it."""
    ended = accumulator.amounts("ok").between(steady.start_s, steady.end_s)
    return per_second(ended, steady)


def _request_rate(group: RequestGroup, time_name: RequestTime) -> float | None:
    """Return the rate per second at which requests were due or sent, None for too few requests.

    A part of a run has its share of the rate of the run, so that the rates of all parts add up. A
    server that got 40 of 100 requests, at 5 requests/s in all, has a rate of 2 requests/s.

    Args:
        group: The requests.
        time_name: Which times are counted: those at which requests were due or were sent.
    """
    requests_of_run = group.requests_of_run
    if requests_of_run is None:  # the group is the whole run
        return requests_per_s(group.requests, time_name)

    count = group.requests.sum(time_name)
    count_of_run = requests_of_run.sum(time_name)
    rate_of_run = requests_per_s(requests_of_run, time_name)
    if not count or rate_of_run is None:
        return None
    return rate_of_run * count / count_of_run


def requests_per_s(accumulator: MetricAccumulator, time_name: RequestTime) -> float | None:
    """Return how many requests per second were due or were sent, or None for fewer than two.

    Args:
        accumulator: The requests, with the first and the last time at which one was due or sent.
        time_name: Which of these times of a request are counted.
    """
    request_count = accumulator.sum(time_name)
    if request_count < 2:
        return None

    first_ns = accumulator.minima[time_name]
    last_ns = accumulator.maxima[time_name]
    if first_ns >= last_ns:
        return None  # all requests at one time have no rate

    # From the first to the last request, there is one interval less than there are requests.
    interval_count = request_count - 1
    duration_s = (last_ns - first_ns) / 1e9
    return interval_count / duration_s


# -- requests in flight ----------------------------------------------------------------------------


def count_in_flight(stages: Sequence[Columns], interval: Span | Window) -> InFlight:
    """Return the exact mean and maximum number of requests in flight in an interval.

    A request is in flight from the time at which it is sent until its response has ended.
    """
    if interval.start_s is None or interval.end_s is None:
        return InFlight(mean=None, maximum=None)

    start_ns = round(interval.start_s * 1e9)
    end_ns = round(interval.end_s * 1e9)
    sent_ns, done_ns = _times_in_flight(stages, start_ns, end_ns)
    total_ns = _time_in_flight_ns(sent_ns, done_ns, start_ns, end_ns)

    mean = float(total_ns / (end_ns - start_ns))

    # The unsorted arrays are replaced, so that their memory is freed.
    sent_ns = sort_times(sent_ns)
    done_ns = sort_times(done_ns)
    maximum = _max_in_flight(sent_ns, done_ns, start_ns, end_ns)
    return InFlight(mean, maximum)


class _TimesInFlight(NamedTuple):
    """When each of some requests was sent and done, in ns."""

    sent_ns: NDArray[np.int64]
    done_ns: NDArray[np.int64]


def _times_in_flight(stages: Sequence[Columns], start_ns: int, end_ns: int) -> _TimesInFlight:
    """Return the times of the requests that are in flight at some time in an interval."""
    selections = [_select_in_flight(columns, start_ns, end_ns) for columns in stages]
    sent_ns = _join_selected(stages, selections, "sent_ns")
    done_ns = _join_selected(stages, selections, "done_ns")

    # A request without an end (-1) is in flight until the interval ends.
    has_no_end = done_ns < 0
    done_ns[has_no_end] = end_ns
    return _TimesInFlight(sent_ns, done_ns)


def _join_selected(
    stages: Sequence[Columns], selections: Sequence[NDArray[np.bool_] | slice], field: str
) -> NDArray[np.int64]:
    """Return a copy of a field of the selected requests of all stages, as one array."""
    stages_and_selections = zip(stages, selections, strict=True)
    return np.concatenate([columns[field][selected] for columns, selected in stages_and_selections])


def _select_in_flight(columns: Columns, start_ns: int, end_ns: int) -> NDArray[np.bool_] | slice:
    """Return which requests are in flight at some time in an interval."""
    sent_ns = columns["sent_ns"]
    done_ns = columns["done_ns"]
    is_sent_before_end = columns.is_known("sent_ns") & (sent_ns <= end_ns)
    is_done_after_start = (done_ns < 0) | (done_ns >= start_ns)  # -1 for a request without an end
    return as_selection(is_sent_before_end & is_done_after_start)


def _time_in_flight_ns(
    sent_ns: NDArray[np.int64], done_ns: NDArray[np.int64], start_ns: int, end_ns: int
) -> np.int64:
    """Return the sum of the times that requests are in flight within an interval.

    Divided by the length of the interval, it is the mean number of requests in flight.

    Args:
        sent_ns: The time at which each request was sent.
        done_ns: The time at which each request was done.
        start_ns: The start of the interval.
        end_ns: The end of the interval.
    """
    total_ns = np.int64(0)
    for rows in block_slices(len(done_ns)):  # slices of all requests, to save memory
        in_interval_ns = np.minimum(done_ns[rows], end_ns) - np.maximum(sent_ns[rows], start_ns)
        # The difference is negative for a request that is not in flight in the interval.
        total_ns += np.maximum(in_interval_ns, 0).sum()
    return total_ns


def _max_in_flight(
    sent_ns: NDArray[np.int64], done_ns: NDArray[np.int64], start_ns: int, end_ns: int
) -> int:
    """Return the most requests in flight at any time of an interval.

    Requests in flight are those sent so far, less those done so far. This number rises only when a
    request is sent, so its maximum is at the start of the interval or at a send within it.

    Args:
        sent_ns: The times at which requests were sent, in ascending order.
        done_ns: The times at which requests were done, in ascending order.
        start_ns: The start of the interval.
        end_ns: The end of the interval.
    """
    sent_until_start = int(np.searchsorted(sent_ns, start_ns, side="right"))
    done_until_start = int(np.searchsorted(done_ns, start_ns, side="right"))
    maximum = sent_until_start - done_until_start

    sent_until_end = int(np.searchsorted(sent_ns, end_ns, side="right"))
    for first in range(sent_until_start, sent_until_end, SENDS_PER_SLICE):
        end = min(first + SENDS_PER_SLICE, sent_until_end)

        # At the send with index i, i + 1 requests have been sent.
        sent_until_send = np.arange(first + 1, end + 1)
        done_until_send = np.searchsorted(done_ns, sent_ns[first:end], side="right")
        in_flight = sent_until_send - done_until_send
        maximum = max(maximum, int(in_flight.max()))

    return maximum


# -- gaps between sends ----------------------------------------------------------------------------


def gap_variation(times_ns: NDArray[np.int64], stages: NDArray[np.int64]) -> float | None:
    """Return the coefficient of variation of the gaps between times, or None without gaps.

    This is the standard deviation divided by the mean: 0 for constant gaps, 1 for a Poisson
    process. Each gap is divided by the mean gap of its stage, so that stages of different rates can
    be joined.

    Args:
        times_ns: The times, in any order.
        stages: The index of the stage of each time.
    """
    relative_gaps_of_stages = []
    for stage in np.unique(stages).tolist():
        is_of_stage = as_selection(stages == stage)
        relative_gaps = _relative_gaps(times_ns[is_of_stage])
        if relative_gaps is not None:
            relative_gaps_of_stages.append(relative_gaps)

    if not relative_gaps_of_stages:
        return None

    return float(join_arrays(relative_gaps_of_stages).std())


def _relative_gaps(times_ns: NDArray[np.int64]) -> NDArray[np.float64] | None:
    """Return the gaps between times divided by their mean, None if all times are the same."""
    gaps_ns = np.diff(sort_times(times_ns))
    if not gaps_ns.any():
        return None
    relative_gaps: NDArray[np.float64] = gaps_ns / gaps_ns.mean()
    return relative_gaps


class _GapVariations(NamedTuple):
    """The variation of the gaps between sends, and of those between the due times."""

    sent: float | None
    planned: float | None


def _measure_gap_variations(
    columns_of_stages: Sequence[Columns], plans: Sequence[StagePlan]
) -> _GapVariations:
    """Return how much the gaps between requests vary: those between sends, and those planned.

    The measure is the coefficient of variation: standard deviation / mean. If the client kept to
    the schedule, both variations are equal.

    Args:
        columns_of_stages: The records of each stage.
        plans: The plan of each stage.
    """
    requests = _PlannedRequests(columns_of_stages, plans)
    stages = requests.join("stage")
    sent_variation = gap_variation(requests.join("sent_ns"), stages)

    # In virtual time, requests are sent exactly when they are due. So nothing else is computed.
    planned_variation = sent_variation
    if not requests.were_sent_when_due():
        planned_variation = gap_variation(requests.join("due_ns"), stages)

    return _GapVariations(sent=sent_variation, planned=planned_variation)


class _PlannedRequests:
    """The requests of all stages that were sent at planned times, and not after responses."""

    def __init__(self, columns_of_stages: Sequence[Columns], plans: Sequence[StagePlan]) -> None:
        """Select the planned requests of each stage."""
        self._stages = [
            (columns, _select_sent_as_planned(columns, plans)) for columns in columns_of_stages
        ]

    def join(self, field: str) -> NDArray[np.int64]:
        """Return a field of these requests of all stages as one array."""
        return join_arrays([columns[field][selected] for columns, selected in self._stages])

    def were_sent_when_due(self) -> bool:
        """Return True if each request was sent exactly when it was due, as in virtual time."""
        return all(
            np.array_equal(columns["sent_ns"][selected], columns["due_ns"][selected])
            for columns, selected in self._stages
        )


def _select_sent_as_planned(
    columns: Columns, plans: Sequence[StagePlan]
) -> NDArray[np.bool_] | slice:
    """Return which requests were sent at a planned time, and not after a response.

    Later requests of a conversation are sent after responses, and so are all requests of a closed
    loop.
    """
    was_sent = columns.is_known("sent_ns")
    is_first_turn = columns["turn"] == 0
    is_planned = was_sent & is_first_turn

    if plans:  # without plans, the run is an open loop
        is_stage_open = np.array([not plan.closed for plan in plans])
        is_planned &= is_stage_open[columns["stage"]]

    return as_selection(is_planned)
