"""The intervals of a run that rates are divided by, and the events and tokens that came in one.

Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from loadgen.core.metrics.columns import UNKNOWN
from loadgen.core.metrics.request_metrics import time_output_tokens
from loadgen.core.metrics.totals import NO_TIME
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
        full_run: The start of the run to the last end of a body, warm-up included.
    """

    start_s: float | None = None
    end_s: float | None = None
    duration_s: float | None = None
    steady: Span = Span()
    last_issued: Span = Span()
    full_run: Span = msgspec.field(default=Span(), name="whole")


class FullLoadTime(NamedTuple):
    """The time in which the load of some stages is complete and there is no other load, in ns.

    The defaults are before and after every time of a run.
    """

    start_ns: int = -1
    end_ns: int = LONGEST_NS


ALWAYS = FullLoadTime()


def make_span(start_ns: float, end_ns: float) -> Span:
    """Return an interval in ns as a Span in seconds, without a duration if it is not positive."""
    if end_ns <= start_ns:
        return Span()
    return Span(start_s=start_ns / 1e9, end_s=end_ns / 1e9, duration_s=(end_ns - start_ns) / 1e9)


def measure_window(
    accumulator: MetricAccumulator,
    all_stages: Sequence[MetricAccumulator],
    full_load: FullLoadTime = ALWAYS,
) -> Window:
    """Return the intervals of a run over which rates, such as tokens per second, are computed.

    If no measured request was due, only the interval of the full run is known.

    Args:
        accumulator: The requests that are measured.
        all_stages: The requests of all stages of the run, measured or not.
        full_load: The time in which the load has its full strength.
    """
    run_end_ns = max(stage.maximum("done_ns") for stage in all_stages)
    full_run = make_span(0, run_end_ns)

    due_requests = accumulator.sum("due")
    if due_requests == 0:
        return Window(full_run=full_run)

    first_due_ns = accumulator.minimum("due")
    until_last_token = make_span(first_due_ns, _last_token_ns(accumulator))
    until_last_sent_ended = make_span(first_due_ns, _last_issued_end_ns(accumulator))

    return Window(
        start_s=until_last_token.start_s,
        end_s=until_last_token.end_s,
        duration_s=until_last_token.duration_s,
        steady=_steady_state(accumulator, full_load),
        last_issued=until_last_sent_ended,
        full_run=full_run,
    )


def _steady_state(accumulator: MetricAccumulator, full_load: FullLoadTime) -> Span:
    """Return the time in which new requests were due and the load had its full strength.

    The due time of a later request of a conversation depends on how fast the server responds, so
    the last due time is that of a single request or of the first request of a conversation.
    """
    first_due_ns = accumulator.minimum("due")
    last_start_ns = accumulator.maximum("start")

    steady_start_ns = max(first_due_ns, full_load.start_ns)
    steady_end_ns = min(last_start_ns, full_load.end_ns)
    return make_span(steady_start_ns, steady_end_ns)


def _last_token_ns(accumulator: MetricAccumulator) -> int:
    """Return the time of the last token, or of the last end if no request has a token."""
    last_token_ns = accumulator.maximum("last_token_ns")
    has_token = last_token_ns != NO_TIME
    return last_token_ns if has_token else accumulator.maximum("done_ns")


def _last_issued_end_ns(accumulator: MetricAccumulator) -> int:
    """Return the time at which the request that was sent last ended.

    A response ends with its last output event. A request without any event ends when the client is
    done with it. If no request was sent, the result is NO_TIME.
    """
    last_request = accumulator.last_sent
    if last_request is None:
        return NO_TIME

    has_event = last_request.end_ns != UNKNOWN
    return last_request.end_ns if has_event else last_request.done_ns


def find_full_load_time(
    all_stages: Sequence[MetricAccumulator], stages: Sequence[int]
) -> FullLoadTime:
    """Return the time in which some stages have their full load and there is no other load.

    Args:
        all_stages: The requests of each stage of the run.
        stages: The indices of adjacent stages. If it is empty, the first stage of the run is used.
    """
    first_index = min(stages, default=0)
    last_index = max(stages, default=0)
    return FullLoadTime(
        start_ns=_full_load_start_ns(all_stages[first_index], all_stages[:first_index]),
        end_ns=_full_load_end_ns(all_stages[last_index]),
    )


def _full_load_start_ns(
    stage: MetricAccumulator, earlier_stages: Sequence[MetricAccumulator]
) -> int:
    """Return when all requests of earlier stages have ended and all virtual users have started.

    A virtual user of a closed loop sends one request after the other.

    Args:
        stage: The requests of the stage with the virtual users.
        earlier_stages: The requests of all stages before it.
    """
    last_user_start_ns = stage.maximum("user_start")  # NO_TIME in an open loop
    last_ends_ns = [earlier_stage.maximum("done_ns") for earlier_stage in earlier_stages]
    return max([last_user_start_ns, *last_ends_ns])


def _full_load_end_ns(stage: MetricAccumulator) -> int:
    """Return when so many virtual users of a stage have ended that the load is not full any more.

    The load of an open loop, which has no virtual users, stays full: its end is LONGEST_NS.
    """
    user_ends_ns = stage.user_ends_ns
    if user_ends_ns.count == 0:
        return LONGEST_NS
    return round(user_ends_ns.quantile(ENDED_USERS_SHARE))


def is_first_request_of_user(columns: Columns, plan: StagePlan, turns: int) -> NDArray[np.bool_]:
    """Return which records of a stage are the first requests of virtual users.

    A virtual user has one conversation after the other. If there are 8 virtual users, they begin
    with the first 8 conversations of the stage. An open loop has no virtual users.

    Args:
        columns: The records of the stage. The column "slot" is the number of a request in the
            schedule of the run, where each conversation has `turns` adjacent slots.
        plan: The plan of the stage.
        turns: The number of slots of each conversation.
    """
    virtual_users = plan.concurrency
    if not virtual_users:
        return np.zeros(len(columns), bool)

    end_of_first_conversations = plan.first_slot + virtual_users * turns
    is_in_first_conversation = columns["slot"] < end_of_first_conversations
    is_first_turn: NDArray[np.bool_] = columns["turn"] == 0
    return is_in_first_conversation & is_first_turn


def is_last_request_of_user(columns: Columns, plan: StagePlan, turns: int) -> NDArray[np.bool_]:
    """Return which ok records of a stage are the last requests of virtual users.

    A virtual user has one conversation after the other. If there are 8 virtual users and 100
    conversations, they end with the conversations 92 to 99. An open loop has no virtual users.

    Args:
        columns: The records of the stage. The column "slot" is the number of a request in the
            schedule of the run, where each conversation has `turns` adjacent slots.
        plan: The plan of the stage.
        turns: The number of slots of each conversation.
    """
    virtual_users = plan.concurrency
    conversations = _count_planned_conversations(plan, turns)
    if not virtual_users or conversations is None:
        return np.zeros(len(columns), bool)

    earlier_conversations = conversations - virtual_users
    start_of_last_conversations = plan.first_slot + earlier_conversations * turns
    is_in_last_conversation = columns["slot"] >= start_of_last_conversations

    # A single request is a conversation of one turn, whatever its slot is.
    is_single_request = ~columns.is_known("session")
    is_last_turn = is_single_request | is_last_slot_of_task(columns["slot"], turns)
    is_last: NDArray[np.bool_] = is_in_last_conversation & is_last_turn & columns.is_ok
    return is_last


def _count_planned_conversations(plan: StagePlan, turns: int) -> int | None:
    """Return how many conversations a stage has, or None if only its duration limits them.

    Args:
        plan: The plan of the stage.
        turns: The number of slots of each conversation.
    """
    if plan.slots is None:
        return None
    if plan.sessions is not None:
        return plan.sessions
    return plan.slots // turns


def is_last_slot_of_task(slots: NDArray[np.int64], turns: int) -> NDArray[np.bool_]:
    """Return which slots belong to the last request of a conversation or task.

    Each conversation or task has `turns` slots, one after the other.
    """
    is_last: NDArray[np.bool_] = slots % turns == turns - 1
    return is_last


def per_second(count: float | None, interval: Span | Window) -> float | None:
    """Return a count per second of an interval, or None if one of both is not known."""
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

    Args:
        timeline: For each stage, the number of output events in bins of BIN_NS.
        interval: The interval, such as the steady state.
    """
    events_before_bins = cumulate_event_counts(timeline)
    if interval.start_s is None or interval.end_s is None or events_before_bins is None:
        return None
    return count_events_between(events_before_bins, interval)


def cumulate_event_counts(timeline: Sequence[NDArray[np.int64]]) -> NDArray[np.int64] | None:
    """Return how many output events came before each bin of time, with the total as last entry.

    For a stage with 3, 0 and 2 events in its bins, the result is [0, 3, 3, 5]. Return None if there
    are no events.

    Args:
        timeline: For each stage, the number of output events in bins of BIN_NS.
    """
    if not any(counts.any() for counts in timeline):
        return None

    bin_count = max(map(len, timeline))
    events_of_bins = np.zeros(bin_count, np.int64)
    for counts in timeline:
        events_of_bins[: len(counts)] += counts

    return np.concatenate([[0], np.cumsum(events_of_bins)])


def count_events_between(events_before_bins: NDArray[np.int64], interval: Span | Window) -> float:
    """Return the number of output events in an interval, 0 if the interval is not known.

    Args:
        events_before_bins: The result of `cumulate_event_counts`.
        interval: The interval.
    """
    if interval.start_s is None or interval.end_s is None:
        return 0.0

    events_before_start = _events_until(events_before_bins, interval.start_s)
    events_before_end = _events_until(events_before_bins, interval.end_s)
    return events_before_end - events_before_start


def _events_until(events_before_bins: NDArray[np.int64], time_s: float) -> float:
    """Return the number of output events up to a time, as if those of a bin were spread evenly.

    If the bins have 3, 0 and 2 events, `events_before_bins` is [0, 3, 3, 5]. Half a bin after the
    start, 1.5 events have come. Before the start it is 0, and after the last bin it is 5.
    """
    time_in_bins = time_s * 1e9 / BIN_NS  # 2.5 is the middle of bin 2
    last_bin = len(events_before_bins) - 2  # the last entry is not a bin, but the total
    bin_index = min(max(int(time_in_bins), 0), last_bin)

    events_at_ends = [events_before_bins[bin_index], events_before_bins[bin_index + 1]]
    return float(np.interp(time_in_bins, [bin_index, bin_index + 1], events_at_ends))


def estimate_tokens_within(columns: Columns, interval: Span) -> float:
    """Return an estimate of the output tokens of ok requests that came in an interval.

    The tokens of a request are assumed to come evenly from its first to its last token.
    """
    tokens = time_output_tokens(columns)
    amounts = Amounts()
    amounts.add(*tokens)
    return amounts.between(interval.start_s, interval.end_s)
