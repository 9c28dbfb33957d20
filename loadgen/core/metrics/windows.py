"""The intervals of a run that rates are divided by, and the events and tokens that came in one.

Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from loadgen.core.metrics.columns import OK
from loadgen.core.metrics.request_metrics import time_output_tokens
from loadgen.core.results.record import BIN_NS
from loadgen.core.stats.amounts import Amounts
from loadgen.core.units import LONGEST_NS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from loadgen.core.metrics.accumulator import MetricAccumulator
    from loadgen.core.metrics.columns import Columns
    from loadgen.core.results.manifest import StagePlan

ENDED_USERS_SHARE = 0.05
"""The load of a closed loop is not full any more when this share of its virtual users has ended."""


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """An interval of time in seconds from the start of the run. All fields are None without one."""

    start_s: float | None = None
    end_s: float | None = None
    duration_s: float | None = None


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """The intervals that rates are divided by.

    `start_s` to `end_s` is the measurement window: the first measured due time to the last measured
    token.

    Attributes:
        start_s: Start of the measurement window.
        end_s: End of the measurement window.
        duration_s: Length of the measurement window.
        steady: The first to the last measured due time (of conversations and tasks: of their first
            requests), less the time in which requests of an earlier stage are in flight and, in a
            closed loop, in which virtual users have still to begin or ENDED_USERS_SHARE of them
            have nothing more to send.
        last_issued: The first measured due time to the end of the request that was sent last, as
            MLPerf LoadGen defines it.
        whole: The start of the run to the last end of a body, warm-up included.
    """

    start_s: float | None = None
    end_s: float | None = None
    duration_s: float | None = None
    steady: Span = Span()
    last_issued: Span = Span()
    whole: Span = Span()


class FullLoadTime(NamedTuple):
    """The time in which the load of some stages is complete and there is no other load, in ns."""

    start_ns: int = -1
    end_ns: int = LONGEST_NS


ALWAYS = FullLoadTime()


def span(start_ns: float, end_ns: float) -> Span:
    """Return an interval in ns as a Span in seconds, without a duration if it is not positive."""
    if end_ns <= start_ns:
        return Span()
    return Span(start_s=start_ns / 1e9, end_s=end_ns / 1e9, duration_s=(end_ns - start_ns) / 1e9)


def measure_window(
    accumulator: MetricAccumulator,
    all_stages: Sequence[MetricAccumulator],
    full_load: FullLoadTime = ALWAYS,
) -> Window:
    """Return the intervals that the rates of some requests are divided by (see `Window`).

    Args:
        accumulator: The requests.
        all_stages: The requests of all stages, which together last as long as the run.
        full_load: The time in which the load of these requests runs alone and in full.
    """
    whole = span(0, max(stage.maximum("done_ns") for stage in all_stages))
    if not accumulator.sum("due"):
        return Window(whole=whole)
    first_due_ns = accumulator.minima["due"]
    # Later turns of conversations and tasks are due at the pace of the server, so only the first
    # requests bound the steady state.
    last_start_ns = accumulator.maxima["start"]
    steady = span(max(first_due_ns, full_load.start_ns), min(last_start_ns, full_load.end_ns))
    measured = span(first_due_ns, _last_token_ns(accumulator))
    return Window(
        start_s=measured.start_s,
        end_s=measured.end_s,
        duration_s=measured.duration_s,
        steady=steady,
        last_issued=span(first_due_ns, _last_issued_end_ns(accumulator)),
        whole=whole,
    )


def _last_token_ns(accumulator: MetricAccumulator) -> int:
    """Return the time of the last token, or of the last end if no request has a token."""
    last_token_ns = accumulator.maxima["last_token_ns"]
    return accumulator.maxima["done_ns"] if last_token_ns < 0 else last_token_ns


def _last_issued_end_ns(accumulator: MetricAccumulator) -> int:
    """Return when the request that was sent last ended: its last event, or else its body."""
    end_ns = accumulator.maximum("issued_end")
    return accumulator.maximum("issued_done") if end_ns < 0 else end_ns


def find_full_load_time(
    all_stages: Sequence[MetricAccumulator], stages: Sequence[int]
) -> FullLoadTime:
    """Return the time in which the load of some stages is complete and there is no other load.

    It begins when no request of an earlier stage is in flight any more and, in a closed loop, every
    virtual user has sent its first request. In a closed loop with a number of requests, it ends
    when ENDED_USERS_SHARE of the virtual users have sent their last request. The steady state lies
    within this time.

    Args:
        all_stages: The requests of each stage of the run.
        stages: The indices of the stages that the time is about. They follow each other.
    """
    first_stage = min(stages, default=0)
    last_stage = max(stages, default=0)
    earlier_ends_ns = [stage.maximum("done_ns") for stage in all_stages[:first_stage]]
    last_user_start_ns = all_stages[first_stage].maximum("user_start")
    start_ns = max([*earlier_ends_ns, last_user_start_ns])
    user_ends_ns = all_stages[last_stage].sample("user_end")
    if not user_ends_ns.count:  # an open loop, or a closed loop with a duration
        return FullLoadTime(start_ns)
    return FullLoadTime(start_ns, end_ns=round(user_ends_ns.quantile(ENDED_USERS_SHARE)))


def is_first_request_of_user(columns: Columns, plan: StagePlan, turns: int) -> NDArray[np.bool_]:
    """Return which records of a stage are the first requests of the virtual users of a closed loop.

    Slots number all planned requests of a run. A virtual user sends one session after another, and
    the sessions are numbered such that the first `concurrency` sessions of a stage are the first
    ones of its users. No record of an open loop is selected.

    Args:
        columns: The records of the stage.
        plan: The plan of the stage.
        turns: The number of slots of each session, which is 1 for single requests.
    """
    if not plan.concurrency:
        return np.zeros(len(columns), bool)
    end_of_first_sessions = plan.first_slot + plan.concurrency * turns
    is_first: NDArray[np.bool_] = columns["slot"] < end_of_first_sessions
    is_first &= columns["turn"] == 0
    return is_first


def is_last_request_of_user(columns: Columns, plan: StagePlan, turns: int) -> NDArray[np.bool_]:
    """Return which ok records of a stage are the last requests of its virtual users.

    The last `concurrency` sessions of a stage are the last ones of its virtual users. No record is
    selected in an open loop, nor if the stage has no number of requests and ends by its duration.

    Args:
        columns: The records of the stage.
        plan: The plan of the stage.
        turns: The number of slots of each session, which is 1 for single requests.
    """
    if not plan.concurrency or plan.slots is None:
        return np.zeros(len(columns), bool)
    session_count = plan.slots // turns if plan.sessions is None else plan.sessions
    start_of_last_sessions = plan.first_slot + (session_count - plan.concurrency) * turns
    is_single_request = columns["session"] < 0
    is_last: NDArray[np.bool_] = columns["slot"] >= start_of_last_sessions
    is_last &= is_last_slot_of_task(columns["slot"], turns) | is_single_request
    is_last &= columns.where(OK)
    return is_last


def is_last_slot_of_task(slots: NDArray[np.int64], turns: int) -> NDArray[np.bool_]:
    """Return which slots belong to the last request of a conversation or task.

    Each conversation or task has `turns` slots, one after the other.
    """
    is_last: NDArray[np.bool_] = slots % turns == turns - 1
    return is_last


def per_second(count: float | None, interval: Span | Window) -> float | None:
    """Return a count per second of an interval, or None if either is not known."""
    if count is None or interval.duration_s is None:
        return None
    return count / interval.duration_s


def is_within(times_ns: NDArray[np.int64], interval: Span | Window) -> NDArray[np.bool_]:
    """Return which times lie in an interval, both ends included."""
    if interval.start_s is None or interval.end_s is None:
        return np.zeros(len(times_ns), bool)
    start_ns = round(interval.start_s * 1e9)
    end_ns = round(interval.end_s * 1e9)
    return (times_ns >= start_ns) & (times_ns <= end_ns)


def count_events_within(timeline: Sequence[NDArray[np.int64]], interval: Span) -> float | None:
    """Return the number of output events in an interval, or None if there are no events.

    A bin that an end of the interval cuts counts in proportion.

    Args:
        timeline: For each stage, the number of output events in bins of BIN_NS.
        interval: The interval, such as the steady state.
    """
    events_before_bins = cumulate_event_counts(timeline)
    if interval.start_s is None or interval.end_s is None or events_before_bins is None:
        return None
    return count_events_between(events_before_bins, interval)


def cumulate_event_counts(timeline: Sequence[NDArray[np.int64]]) -> NDArray[np.int64] | None:
    """Return the number of output events of all stages before each bin, and before the end.

    It is computed once for many calls of `count_events_between`. Returns None if there are no
    events.

    Args:
        timeline: For each stage, the number of output events in bins of BIN_NS.
    """
    if not any(counts.any() for counts in timeline):
        return None
    bin_count = max(map(len, timeline))
    counts_of_bins = np.zeros(1 + bin_count, np.int64)  # the first entry is 0: none before bin 0
    for counts in timeline:
        counts_of_bins[1 : 1 + len(counts)] += counts
    return np.cumsum(counts_of_bins)


def count_events_between(events_before_bins: NDArray[np.int64], interval: Span | Window) -> float:
    """Return the number of events in an interval; the argument is of `cumulate_event_counts`."""
    if interval.start_s is None or interval.end_s is None:
        return 0.0
    events_before_end = _events_until(events_before_bins, interval.end_s)
    return events_before_end - _events_until(events_before_bins, interval.start_s)


def _events_until(events_before_bins: NDArray[np.int64], time_s: float) -> float:
    """Return the number of events up to a time; those of its bin count in proportion."""
    bins = time_s * 1e9 / BIN_NS
    first = min(max(int(bins), 0), len(events_before_bins) - 2)
    return float(np.interp(bins, [first, first + 1], events_before_bins[first : first + 2]))


def estimate_tokens_within(columns: Columns, interval: Span) -> float:
    """Return an estimate of the output tokens of ok requests that came in an interval.

    The tokens of a request are assumed to come evenly from its first to its last token. This is
    used where there is no timeline of output events: for one of several targets, and for responses
    that were not streamed.
    """
    amounts = Amounts()
    amounts.add(*time_output_tokens(columns))
    return amounts.between(interval.start_s, interval.end_s)
