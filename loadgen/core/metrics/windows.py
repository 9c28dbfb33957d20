"""The intervals of a run that rates are divided by, and the events and tokens that came in one.

Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from loadgen.core.metrics.columns import OK
from loadgen.core.metrics.request_metrics import token_spans
from loadgen.core.results.record import BIN_NS
from loadgen.core.stats.amounts import Amounts
from loadgen.core.stats.quantiles import quantile_index
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
    """The time in which the load of some stages runs alone and in full, in ns from the start."""

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
    everything: Sequence[MetricAccumulator],
    full_load: FullLoadTime = ALWAYS,
) -> Window:
    """Return the intervals that the rates of some requests are divided by.

    Args:
        accumulator: The requests.
        everything: The requests of all stages.
        full_load: The time in which the load of these requests runs alone and in full.
    """
    whole = span(0, max(part.latest("done_ns") for part in everything))
    if not accumulator.sum("due"):
        return Window(whole=whole)
    first_due_ns = accumulator.least["due"]
    # Later turns of conversations and tasks are due at the pace of the server, so only the first
    # requests bound the steady state.
    last_start_ns = accumulator.most["start"]
    last_token_ns = accumulator.most["last_token_ns"]
    last_issued_end_ns = accumulator.latest("issued_end")
    if last_token_ns < 0:
        last_token_ns = accumulator.most["done_ns"]
    if last_issued_end_ns < 0:
        last_issued_end_ns = accumulator.latest("issued_done")
    measured = span(first_due_ns, last_token_ns)
    return Window(
        start_s=measured.start_s,
        end_s=measured.end_s,
        duration_s=measured.duration_s,
        steady=span(max(first_due_ns, full_load.start_ns), min(last_start_ns, full_load.end_ns)),
        last_issued=span(first_due_ns, last_issued_end_ns),
        whole=whole,
    )


def full_load_time(stages: Sequence[MetricAccumulator], first: int, last: int) -> FullLoadTime:
    """Return the time in which the load of some stages runs alone and in full.

    The stages are those from `first` to `last`. The time begins when no request of an earlier stage
    is in flight and, in a closed loop, every virtual user has sent its first request. It ends, in a
    closed loop with a number of requests, when some virtual users have nothing more to send.
    """
    earlier_end_ns = max((stage.latest("done_ns") for stage in stages[:first]), default=-1)
    start_ns = max(earlier_end_ns, stages[first].latest("user_start"))
    user_ends = stages[last].sample("user_end")
    if not user_ends.count:
        return FullLoadTime(start_ns)
    return FullLoadTime(
        start_ns, round(user_ends.nth(quantile_index(user_ends.count, ENDED_USERS_SHARE)))
    )


def first_round(columns: Columns, plan: StagePlan, turns: int) -> NDArray[np.bool_]:
    """Return which records of a stage are the first requests of its virtual users.

    No record of an open loop is. The sessions of a stage are numbered virtual user after virtual
    user, so the first round has the lowest numbers.
    """
    if not plan.concurrency:
        return np.zeros(len(columns), bool)
    first: NDArray[np.bool_] = columns["slot"] < plan.first_slot + plan.concurrency * turns
    first &= columns["turn"] == 0
    return first


def last_round(columns: Columns, plan: StagePlan, turns: int) -> NDArray[np.bool_]:
    """Return which records are the ok last requests of virtual users.

    No record is if the plan of the stage does not have a number of requests.
    """
    if not plan.concurrency or plan.slots is None:
        return np.zeros(len(columns), bool)
    sessions = plan.slots // turns if plan.sessions is None else plan.sessions
    first_slot_of_round = plan.first_slot + (sessions - plan.concurrency) * turns
    last: NDArray[np.bool_] = columns["slot"] >= first_slot_of_round
    last &= ends_chain(columns["slot"], turns) | (columns["session"] < 0)
    last &= columns.where(OK)
    return last


def ends_chain(slot: NDArray[np.int64], turns: int) -> NDArray[np.bool_]:
    """Return which slots belong to the last request of a conversation or task.

    Each conversation or task has `turns` slots, one after the other.
    """
    is_end: NDArray[np.bool_] = slot % turns == turns - 1
    return is_end


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


def steady_events(timeline: Sequence[NDArray[np.int64]], interval: Span) -> float | None:
    """Return the output events of some stages in an interval, or None if there are no events.

    `timeline` has the counts of each stage in bins of BIN_NS. A bin that an end of the interval
    cuts counts in proportion.
    """
    sums = event_sums(timeline)
    if interval.start_s is None or interval.end_s is None or sums is None:
        return None
    return events_between(sums, interval)


def event_sums(timeline: Sequence[NDArray[np.int64]]) -> NDArray[np.int64] | None:
    """Return the cumulative number of events of all stages at the start of each bin.

    Returns None if there are no events.
    """
    if not any(counts.any() for counts in timeline):
        return None
    total = np.zeros(max(map(len, timeline)) + 1, np.int64)
    for counts in timeline:
        total[1 : len(counts) + 1] += counts
    return np.cumsum(total)


def events_between(sums: NDArray[np.int64], interval: Span | Window) -> float:
    """Return the number of events in an interval from the result of `event_sums`."""
    if interval.start_s is None or interval.end_s is None:
        return 0.0
    return _events_until(sums, interval.end_s) - _events_until(sums, interval.start_s)


def _events_until(sums: NDArray[np.int64], time_s: float) -> float:
    """Return the number of events up to a time; those of its bin count in proportion."""
    bins = time_s * 1e9 / BIN_NS
    first = min(max(int(bins), 0), len(sums) - 2)
    return float(np.interp(bins, [first, first + 1], sums[first : first + 2]))


def spread_tokens(columns: Columns, interval: Span) -> float:
    """Return the output tokens of ok requests that came in an interval.

    The tokens of a request are spread evenly from its first to its last token. This estimates token
    times if there is no timeline: for one of several targets, and for responses that were not
    streamed.
    """
    amounts = Amounts()
    amounts.add(*token_spans(columns))
    return amounts.between(interval.start_s, interval.end_s)
