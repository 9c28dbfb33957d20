"""Count the output events of a simulated run and the gaps between them.

An output event is what a client receives at once: one token, or as many as the stream interval
says. A gap is the time between two events of a request. A span is an unbroken sequence of
iterations of a replica in which a request gets one token each.

No loop visits single events or tokens. All sequences in a batch get a token at the end of the same
iteration, so the gaps between events are durations of iterations. They are counted by the number of
sequences that took part in each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from loadgen.core.results.record import BIN_NS
from loadgen.core.stats.histogram import Histogram
from loadgen.sim.event_gaps import Ints, IterationEnds, TokenSpans

Counts = NDArray[np.signedinteger[Any]]


class EventCounts(NamedTuple):
    """How many output events a run has, and how far apart they are.

    Attributes:
        gaps: The gaps in ns between the events of a request, as one histogram per stage.
        timeline: The number of events per BIN_NS since the start of the run, for each stage.
        largest_gap_ns: The largest gap of each sent request, 0 without a gap.
        events: The number of events of each sent request.
    """

    gaps: list[Histogram]
    timeline: list[Ints]
    largest_gap_ns: Ints
    events: Counts


def count_events(
    spans: TokenSpans,
    iteration_ends_ns: Sequence[Ints],
    stage_of_record: NDArray[Any],
    stage_count: int,
    tokens_per_event: int,
) -> EventCounts:
    """Count the output events of a run, and the gaps between consecutive events of a request.

    Args:
        spans: The unbroken sequences of iterations in which requests got one token each.
        iteration_ends_ns: When the iterations of each replica ended.
        stage_of_record: The stage (the part of the load) that each sent request belongs to.
        stage_count: The number of stages.
        tokens_per_event: Tokens of each event after the first.
    """
    last_ends_ns = [int(ends_ns[-1]) for ends_ns in iteration_ends_ns if len(ends_ns)]
    counter = _EventCounter(
        stage_of_record, stage_count, tokens_per_event, last_end_ns=max(last_ends_ns, default=0)
    )
    for replica_index, ends_ns in enumerate(iteration_ends_ns):
        is_on_replica = spans.replica == replica_index
        if is_on_replica.any():
            counter.add_replica(spans.select(is_on_replica), ends_ns)
    counter.add_pauses(spans, iteration_ends_ns)
    return counter.build_counts()


class _EventCounter:
    """Adds up the output events and the gaps between them, one replica after the other.

    With n tokens per event, a span from iteration `first` to iteration `last` has two kinds of
    events. The regular ones come at `first`, `first + n`, `first + 2n` and so on. If tokens are
    left after the last of them, a tail event comes at `last`. For example, with n = 3 a span from
    iteration 10 to 17 has regular events at 10, 13 and 16, and a tail event at 17.
    """

    def __init__(
        self,
        stage_of_record: NDArray[Any],
        stage_count: int,
        tokens_per_event: int,
        last_end_ns: int,
    ) -> None:
        """Create a counter without events.

        Args:
            stage_of_record: The stage (the part of the load) that each sent request belongs to.
            stage_count: The number of stages.
            tokens_per_event: Tokens of each event after the first.
            last_end_ns: The end of the last iteration of all replicas.
        """
        self._stage_of_record = stage_of_record
        self._tokens_per_event = tokens_per_event
        # Lists with one entry per stage. A bin of the timeline counts the events within BIN_NS.
        bin_count = last_end_ns // BIN_NS + 1
        self._gaps_of_stage = [Histogram() for _ in range(stage_count)]
        self._timeline_of_stage = [np.zeros(bin_count, np.int64) for _ in range(stage_count)]
        # Arrays with one entry per sent request.
        record_count = len(stage_of_record)
        self._largest_gap_ns = np.zeros(record_count, np.int64)
        self._event_count = np.zeros(record_count, np.int32)

    def add_replica(self, spans: TokenSpans, ends_ns: Ints) -> None:
        """Add the output events of all spans of one replica.

        Args:
            spans: The unbroken sequences of iterations in which requests got one token each.
            ends_ns: When the iterations of the replica ended.
        """
        tail_tokens = (spans.last - spans.first) % self._tokens_per_event
        last_regular = spans.last - tail_tokens  # iterations, one per span
        self._add_regular_events(spans.record_index, spans.first, last_regular, ends_ns)

        has_tail = tail_tokens > 0
        if has_tail.any():
            self._add_tail_events(
                record_index=spans.record_index[has_tail],
                previous_event_ns=ends_ns[last_regular[has_tail]],
                tail_event_ns=ends_ns[spans.last[has_tail]],
            )
        regular_event_count = 1 + (last_regular - spans.first) // self._tokens_per_event
        np.add.at(self._event_count, spans.record_index, regular_event_count + has_tail)

    def add_pauses(self, spans: TokenSpans, iteration_ends_ns: Sequence[Ints]) -> None:
        """Add the gaps that the pauses of requests caused.

        A request that was paused has several spans. The gap reaches from the end of the last
        iteration before the pause to the end of the first iteration after it.

        Args:
            spans: The spans of all requests of all replicas, in any order.
            iteration_ends_ns: When the iterations of each replica ended.
        """
        spans = spans.in_record_order()
        (before_pause,) = np.nonzero(spans.record_index[:-1] == spans.record_index[1:])
        if not len(before_pause):
            return
        paused_spans = spans.select(before_pause)
        resumed_spans = spans.select(before_pause + 1)
        iteration_ends = IterationEnds(iteration_ends_ns)
        paused_ns = iteration_ends.look_up(paused_spans.replica, paused_spans.last)
        resumed_ns = iteration_ends.look_up(resumed_spans.replica, resumed_spans.first)
        self._add_single_gaps(paused_spans.record_index, resumed_ns - paused_ns)

    def build_counts(self) -> EventCounts:
        """Return the counts of all added events. The timeline of a stage ends with its last one."""
        timeline = [_without_trailing_zeros(counts) for counts in self._timeline_of_stage]
        return EventCounts(self._gaps_of_stage, timeline, self._largest_gap_ns, self._event_count)

    def _add_regular_events(
        self, record_index: Ints, first: Ints, last_regular: Ints, ends_ns: Ints
    ) -> None:
        """Add the events that come every n iterations of a span, for n tokens per event.

        Spans that begin at the same iteration modulo n have their events at the same iterations.
        With n = 3, the spans that begin at iterations 1, 4, 7, ... have all their events there. So
        the spans with the same remainder are counted together, and only these iterations matter.

        Args:
            record_index: The record of each span.
            first: The iteration of the first event of each span.
            last_regular: The iteration of its last regular event.
            ends_ns: When the iterations of the replica ended.
        """
        interval = self._tokens_per_event
        remainder_of_span = first % interval
        for remainder in np.unique(remainder_of_span).tolist():
            has_remainder = remainder_of_span == remainder
            self._add_aligned_spans(
                record_index[has_remainder],
                first_event=first[has_remainder] // interval,
                last_event=last_regular[has_remainder] // interval,
                times_ns=ends_ns[remainder::interval],
            )

    def _add_aligned_spans(
        self, record_index: Ints, first_event: Ints, last_event: Ints, times_ns: Ints
    ) -> None:
        """Add spans whose events come at the same times, as far as they are within the span.

        A span is a part of a response without a pause. It has one event at each of the given times
        from its first to its last event.

        Args:
            record_index: The record of each span.
            first_event: The index in `times_ns` of the first event of each span.
            last_event: The index in `times_ns` of its last event.
            times_ns: The times at which spans can have events, in ascending order.
        """
        gaps_ns = np.diff(times_ns)  # gap n is the time from event n to event n + 1
        stage_of_span = self._stage_of_record[record_index]
        for stage in np.unique(stage_of_span).tolist():
            in_stage = stage_of_span == stage
            event_counts = _count_ranges(first_event[in_stage], last_event[in_stage], len(times_ns))
            self._add_to_timeline(stage, times_ns, event_counts)

        # A span from event 3 to event 5 has the gaps 3 and 4.
        has_gap = last_event > first_event
        self._add_aligned_gaps(
            record_index[has_gap], first_event[has_gap], last_event[has_gap] - 1, gaps_ns
        )

    def _add_aligned_gaps(
        self, record_index: Ints, first_gap: Ints, last_gap: Ints, gaps_ns: Ints
    ) -> None:
        """Add the gaps of spans, each of which has consecutive ones of the same gaps.

        Args:
            record_index: The record of each span.
            first_gap: The index in `gaps_ns` of the first gap of each span.
            last_gap: The index in `gaps_ns` of its last gap.
            gaps_ns: The times between consecutive events.
        """
        if not len(record_index):
            return
        stage_of_span = self._stage_of_record[record_index]
        for stage in np.unique(stage_of_span).tolist():
            in_stage = stage_of_span == stage
            gap_counts = _count_ranges(first_gap[in_stage], last_gap[in_stage], len(gaps_ns))
            self._gaps_of_stage[stage].add(gaps_ns, gap_counts)
        largest_ns = _range_maxima(gaps_ns, starts=first_gap, stops=last_gap + 1)
        np.maximum.at(self._largest_gap_ns, record_index, largest_ns)

    def _add_tail_events(
        self, record_index: Ints, previous_event_ns: Ints, tail_event_ns: Ints
    ) -> None:
        """Add the events at the end of spans that come earlier than a regular event would.

        Args:
            record_index: The record of each span.
            previous_event_ns: The time of its last regular event.
            tail_event_ns: The time of its tail event.
        """
        self._add_single_gaps(record_index, tail_event_ns - previous_event_ns)
        stage_of_event = self._stage_of_record[record_index]
        for stage in np.unique(stage_of_event).tolist():
            self._add_to_timeline(stage, tail_event_ns[stage_of_event == stage])

    def _add_single_gaps(self, record_index: Ints, gaps_ns: Ints) -> None:
        """Add one gap to each of these records. A record may occur several times."""
        np.maximum.at(self._largest_gap_ns, record_index, gaps_ns)
        stage_of_gap = self._stage_of_record[record_index]
        for stage in np.unique(stage_of_gap).tolist():
            self._gaps_of_stage[stage].add(gaps_ns[stage_of_gap == stage])

    def _add_to_timeline(
        self, stage: int, times_ns: Ints, event_counts: Ints | None = None
    ) -> None:
        """Add events to the timeline of a stage: one per time, or as many as `event_counts`."""
        timeline = self._timeline_of_stage[stage]
        bin_numbers = times_ns // BIN_NS
        events_per_bin = np.bincount(bin_numbers, weights=event_counts, minlength=len(timeline))
        timeline += events_per_bin.astype(np.int64)


def _count_ranges(first: Ints, last: Ints, length: int) -> Ints:
    """Return how many of some ranges contain each of the numbers from 0 to `length` - 1.

    A range reaches from an entry of `first` to the same entry of `last`, both included. For
    example, the ranges 0 to 1 and 1 to 3 give [1, 2, 1, 1] for a length of 4. A range contains a
    number if it has begun by then and has not ended before.
    """
    begun = np.cumsum(np.bincount(first, minlength=length))
    ended = np.cumsum(np.bincount(last, minlength=length))
    ended_before = ended - np.bincount(last, minlength=length)
    return begun - ended_before


def _range_maxima(values: Ints, starts: Ints, stops: Ints) -> Ints:
    """Return max(values[start:stop]) for each pair of bounds, with start < stop.

    For example, the values [5, 1, 7, 2] with the starts [0, 1] and the stops [2, 4] give [5, 7].

    This is the sparse table for range maximum queries (Bender and Farach-Colton, "The LCA problem
    revisited", 2000). Any range is covered by two windows of equal width, one at its start and one
    at its end, which may overlap. The width is the largest power of two that fits into the range.
    """
    lengths = stops - starts
    longest = int(lengths.max())
    maxima = np.zeros(len(starts), np.int64)
    width = 1
    window_maxima = values  # window_maxima[i] is the maximum of values[i : i + width]
    while width <= longest:
        (ranges,) = np.nonzero((width <= lengths) & (lengths < 2 * width))
        maxima_at_start = window_maxima[starts[ranges]]
        maxima_at_end = window_maxima[stops[ranges] - width]
        maxima[ranges] = np.maximum(maxima_at_start, maxima_at_end)
        # A window of twice the width consists of two windows next to each other.
        window_maxima = np.maximum(window_maxima[:-width], window_maxima[width:])
        width *= 2
    return maxima


def _without_trailing_zeros(counts: Ints) -> Ints:
    """Return the counts up to the last one that is not 0."""
    (nonzero_indexes,) = np.nonzero(counts)
    if not len(nonzero_indexes):
        return counts[:0]
    last_index = nonzero_indexes[-1]
    return counts[: last_index + 1]
