"""Intervals of a run, and the output events and tokens that came in one. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from loadgen.core.metrics.columns import OK, Columns, token_spans
from loadgen.core.results.record import BIN_NS
from loadgen.core.stats.amounts import Amounts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from loadgen.core.results.manifest import StagePlan

LANES_ENDED = 0.05  # of the lanes of a closed loop: when these have no more to send, the load is not full any more


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """An interval of time in seconds from the start of the run; all fields are null when there is none."""

    start_s: float | None = None
    end_s: float | None = None
    duration_s: float | None = None


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """The intervals that rates are divided by.

    `start_s` to `end_s` is the measured window: first measured due instant to last measured `last_token`. `steady`:
    first to last measured due instant (of conversations and tasks: of their first requests), less the time in which
    requests of an earlier stage are in flight and, in a closed loop, in which lanes have still to begin or (LANES_ENDED
    of them) nothing more to send. `last_issued`: first
    measured due instant to the end of the request that was issued last (MLPerf LoadGen's definition). `whole`: start of
    the run to the last end of a body, warm-up included.
    """

    start_s: float | None = None
    end_s: float | None = None
    duration_s: float | None = None
    steady: Span = Span()
    last_issued: Span = Span()
    whole: Span = Span()


def span(start_ns: float, end_ns: float) -> Span:
    """An interval in ns as a Span in seconds; an empty Span when it is empty or reversed, since no rate can be
    computed.
    """
    if end_ns <= start_ns:
        return Span()
    return Span(start_s=start_ns / 1e9, end_s=end_ns / 1e9, duration_s=(end_ns - start_ns) / 1e9)


def first_round(columns: Columns, plan: StagePlan, turns: int) -> NDArray[np.bool_]:
    """Return which records of a stage are the first requests of its virtual users; none in an open loop.

    The chains of a stage are numbered lane after lane, so the first round has the lowest numbers.
    """
    if not plan.concurrency:
        return np.zeros(len(columns), bool)
    first: NDArray[np.bool_] = columns["slot"] < plan.first_slot + plan.concurrency * turns
    first &= columns["turn"] == 0
    return first


def last_round(columns: Columns, plan: StagePlan, turns: int) -> NDArray[np.bool_]:
    """Which rows of a stage end the last request of a lane, where its plan says how many requests there are."""
    if not plan.concurrency or plan.slots is None:
        return np.zeros(len(columns), bool)
    chains = plan.slots // turns if plan.chains is None else plan.chains
    last: NDArray[np.bool_] = (
        columns["slot"] >= plan.first_slot + (chains - plan.concurrency) * turns
    )
    last &= ends_chain(columns["slot"], turns) | (columns["session"] < 0)
    last &= columns.where(OK)
    return last


def ends_chain(slot: NDArray[np.int64], turns: int) -> NDArray[np.bool_]:
    """Which slots of conversations and tasks are the last of theirs: those have the last place in its numbers."""
    is_end: NDArray[np.bool_] = slot % turns == turns - 1
    return is_end


def per_second(count: float | None, stretch: Span | Window) -> float | None:
    """`count` divided by the duration of the interval; None when either is not known."""
    return None if count is None or stretch.duration_s is None else count / stretch.duration_s


def within(instants_ns: NDArray[np.int64], stretch: Span | Window) -> NDArray[np.bool_]:
    """Which instants lie in an interval, both ends included: a mask of the same length."""
    if stretch.start_s is None or stretch.end_s is None:
        return np.zeros(len(instants_ns), bool)
    return (instants_ns >= round(stretch.start_s * 1e9)) & (
        instants_ns <= round(stretch.end_s * 1e9)
    )


def steady_events(timeline: Sequence[NDArray[np.int64]], stretch: Span) -> float | None:
    """Output events of some stages in an interval, from counts in bins of BIN_NS; None when there are no events.

    A bin that an end of the interval cuts counts in proportion.
    """
    sums = event_sums(timeline)
    if stretch.start_s is None or stretch.end_s is None or sums is None:
        return None
    return events_between(sums, stretch)


def event_sums(timeline: Sequence[NDArray[np.int64]]) -> NDArray[np.int64] | None:
    """Cumulative number of events of all stages at the start of each bin; None when there are no events."""
    if not any(counts.any() for counts in timeline):
        return None
    total = np.zeros(max(map(len, timeline)) + 1, np.int64)
    for counts in timeline:
        total[1 : len(counts) + 1] += counts
    return np.cumsum(total)


def events_between(sums: NDArray[np.int64], stretch: Span | Window) -> float:
    """Number of events in an interval, from the result of `event_sums`; 0 for an empty interval."""
    if stretch.start_s is None or stretch.end_s is None:
        return 0.0
    low, high = (
        _at(sums, instant_s * 1e9 / BIN_NS) for instant_s in (stretch.start_s, stretch.end_s)
    )
    return high - low


def _at(sums: NDArray[np.int64], place: float) -> float:
    """The number of events up to a place between two bins, those of the bin in proportion."""
    first = min(max(int(place), 0), len(sums) - 2)
    return float(np.interp(place, [first, first + 1], sums[first : first + 2]))


def spread_tokens(columns: Columns, stretch: Span) -> float:
    """Output tokens of ok requests in an interval, those of a request spread evenly from its first to its last token.

    This estimates token times where there is no timeline: for one of several targets, and for answers that were not
    streamed.
    """
    amounts = Amounts()
    amounts.add(*token_spans(columns))
    return amounts.between(stretch.start_s, stretch.end_s)
