"""Count the output events of a simulated run and the gaps between them.

An output event is what a client receives at once: one token, or as many as the stream interval
says. A gap is the time between two events of a request. A span is an unbroken sequence of
iterations of a replica in which a request gets one token each.

No loop visits single events or tokens. All sequences in a batch get a token at the end of the same
iteration, so the gaps between events are durations of iterations. They are counted by the number of
sequences that took part in each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from loadgen.core.results.record import BIN_NS
from loadgen.core.stats.histogram import Histogram
from loadgen.sim.event_gaps import Ints, IterationEnds, TokenSpans

Counts = NDArray[np.signedinteger[Any]]
Mask = NDArray[np.bool_]


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

    A request that is paused, because the memory of its replica is full, gets no tokens during the
    pause. It has one span before the pause and one after it.

    Args:
        spans: The unbroken sequences of iterations in which requests got one token each.
        iteration_ends_ns: When the iterations of each replica ended.
        stage_of_record: The stage (the part of the load) that each sent request belongs to.
        stage_count: The number of stages.
        tokens_per_event: Tokens of each event after the first.
    """
    run_end_ns = max((int(ends_ns[-1]) for ends_ns in iteration_ends_ns if len(ends_ns)), default=0)
    counter = _EventCounter(stage_of_record, stage_count, tokens_per_event, last_end_ns=run_end_ns)
    for replica_index, ends_ns in enumerate(iteration_ends_ns):
        is_on_replica = spans.replica == replica_index
        if is_on_replica.any():
            counter.add_replica(spans.select(is_on_replica), ends_ns)

    # The spans before and after a pause may be on different replicas, so pauses are added last.
    counter.add_pauses(spans, iteration_ends_ns)
    return counter.build_counts()


class _SpanGroup(NamedTuple):
    """Spans on one replica whose regular events all come at the times of one list.

    A span is an unbroken sequence of iterations in which a request gets one token each. A regular
    event has the full number of tokens. With 3 tokens per event, spans that begin in iteration 1,
    4 or 7 have regular events only at the ends of iterations 1, 4, 7, 10 and so on, so they form a
    group. If such a span begins in iteration 4, and its last regular event comes in iteration 10,
    it has the events 1 to 3 of this list.

    Attributes:
        record_index: The record of each span.
        first_event: The index in `event_times_ns` of the first event of each span.
        last_event: The index in `event_times_ns` of its last regular event.
        event_times_ns: When regular events of the group can come, in ascending order.
    """

    record_index: Ints
    first_event: Ints
    last_event: Ints
    event_times_ns: Ints

    def select(self, selection: Mask) -> _SpanGroup:
        """Return the group with only the selected spans."""
        return _SpanGroup(
            self.record_index[selection],
            self.first_event[selection],
            self.last_event[selection],
            self.event_times_ns,
        )


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

        A record is the result of one sent request. Events and gaps between events are counted per
        stage, for the charts of a run, and per record, for its fields.

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

        # Arrays with one entry per record.
        record_count = len(stage_of_record)
        self._largest_gap_ns = np.zeros(record_count, np.int64)
        self._event_count = np.zeros(record_count, np.int32)

    def add_replica(self, spans: TokenSpans, ends_ns: Ints) -> None:
        """Add the output events of all spans of one replica.

        With n tokens per event, a span has regular events at its first iteration and every n
        iterations after it. The tokens that are left at its end are a tail event. For example, with
        n = 3, the span from iteration 10 to 17 has regular events at 10, 13 and 16, and a tail
        event of one token at 17.

        Args:
            spans: The unbroken sequences of iterations in which requests got one token each.
            ends_ns: When the iterations of the replica ended.
        """
        # The comments show the values for the span in the example.
        tokens_after_first = spans.last - spans.first  # 7, one per iteration
        events_after_first, tail_tokens = np.divmod(tokens_after_first, self._tokens_per_event)
        has_tail = tail_tokens > 0  # True: 1 token is left
        last_regular_iteration = spans.last - tail_tokens  # 16

        # The number of events of each record, which may have several spans.
        events_of_span = 1 + events_after_first + has_tail  # 4
        np.add.at(self._event_count, spans.record_index, events_of_span)

        # The times of the events, and the gaps between them.
        groups = _group_spans(spans, last_regular_iteration, ends_ns, self._tokens_per_event)
        for group in groups:
            self._add_regular_events(group)
            self._add_regular_gaps(group)

        if has_tail.any():
            self._add_tail_events(
                record_index=spans.record_index[has_tail],
                previous_event_ns=ends_ns[last_regular_iteration[has_tail]],
                tail_event_ns=ends_ns[spans.last[has_tail]],
            )

    def add_pauses(self, spans: TokenSpans, iteration_ends_ns: Sequence[Ints]) -> None:
        """Add the gaps that the pauses of requests caused.

        A request that was paused has several spans. The gap reaches from the end of the last
        iteration before the pause to the end of the first iteration after it.

        Args:
            spans: The spans of all requests of all replicas, in any order.
            iteration_ends_ns: When the iterations of each replica ended.
        """
        # Pair each span with the next one. There is a pause between them if they belong to the same
        # request.
        spans = spans.in_record_order()
        earlier_spans = spans.select(slice(None, -1))
        later_spans = spans.select(slice(1, None))
        is_pause_between = earlier_spans.record_index == later_spans.record_index
        if not is_pause_between.any():
            return

        spans_before_pause = earlier_spans.select(is_pause_between)
        spans_after_pause = later_spans.select(is_pause_between)
        iteration_ends = IterationEnds(iteration_ends_ns)
        paused_ns = iteration_ends.look_up(spans_before_pause.replica, spans_before_pause.last)
        resumed_ns = iteration_ends.look_up(spans_after_pause.replica, spans_after_pause.first)
        self._add_single_gaps(spans_before_pause.record_index, resumed_ns - paused_ns)

    def build_counts(self) -> EventCounts:
        """Return the counts of all added events. The timeline of a stage ends with its last one."""
        timeline = [_without_trailing_zeros(counts) for counts in self._timeline_of_stage]
        return EventCounts(self._gaps_of_stage, timeline, self._largest_gap_ns, self._event_count)

    def _add_regular_events(self, group: _SpanGroup) -> None:
        """Add the regular events of a group of spans to the timelines of their stages.

        Each span has one event at each time from its first to its last event. So the number of
        events at a time is the number of spans that contain it.
        """
        times_ns = group.event_times_ns
        for stage, in_stage in self._split_by_stage(group.record_index):
            event_counts = _count_ranges(
                starts=group.first_event[in_stage],
                stops=group.last_event[in_stage] + 1,
                length=len(times_ns),
            )
            self._add_to_timeline(stage, times_ns, event_counts)

    def _add_regular_gaps(self, group: _SpanGroup) -> None:
        """Add the gaps between consecutive regular events of the spans of a group.

        The spans of a group have their events at the times of one list. Gap n is the time from
        event n of this list to event n + 1. So a span from event 3 to event 5 has the gaps 3 and 4,
        which are range(3, 5). A span with a single event has no gap.
        """
        has_gap = group.last_event > group.first_event
        if not has_gap.any():
            return

        spans = group.select(has_gap)
        gaps_ns = np.diff(spans.event_times_ns)
        for stage, in_stage in self._split_by_stage(spans.record_index):
            gap_counts = _count_ranges(
                starts=spans.first_event[in_stage],
                stops=spans.last_event[in_stage],
                length=len(gaps_ns),
            )
            self._gaps_of_stage[stage].add_repeated(gaps_ns, gap_counts)

        # A record may have several spans. `maximum.at` takes the largest gap of all of them.
        largest_ns = _range_maxima(gaps_ns, starts=spans.first_event, stops=spans.last_event)
        np.maximum.at(self._largest_gap_ns, spans.record_index, largest_ns)

    def _add_tail_events(
        self, record_index: Ints, previous_event_ns: Ints, tail_event_ns: Ints
    ) -> None:
        """Add the tail events of spans, and the gap before each of them.

        A span is a part of a response without a pause. Its tail event has the tokens that are left
        after its last full event. All arguments have one entry per span.

        Args:
            record_index: The record of each span.
            previous_event_ns: The time of its last full event.
            tail_event_ns: The time of its tail event.
        """
        self._add_single_gaps(record_index, tail_event_ns - previous_event_ns)
        for stage, in_stage in self._split_by_stage(record_index):
            self._add_to_timeline(stage, tail_event_ns[in_stage])

    def _add_single_gaps(self, record_index: Ints, gaps_ns: Ints) -> None:
        """Add one gap to each of these records. A record may occur several times."""
        np.maximum.at(self._largest_gap_ns, record_index, gaps_ns)
        for stage, in_stage in self._split_by_stage(record_index):
            self._gaps_of_stage[stage].add(gaps_ns[in_stage])

    def _split_by_stage(self, record_index: Ints) -> Iterator[tuple[int, Mask]]:
        """Yield each stage that these records belong to, and which of the records belong to it."""
        stages = self._stage_of_record[record_index]
        for stage in np.unique(stages).tolist():
            yield stage, stages == stage

    def _add_to_timeline(
        self, stage: int, times_ns: Ints, event_counts: Ints | None = None
    ) -> None:
        """Add events to the timeline of a stage: one per time, or as many as `event_counts`."""
        timeline = self._timeline_of_stage[stage]
        bin_numbers = times_ns // BIN_NS
        events_per_bin = np.bincount(bin_numbers, weights=event_counts, minlength=len(timeline))
        timeline += events_per_bin.astype(np.int64)


def _group_spans(
    spans: TokenSpans, last_regular_iteration: Ints, ends_ns: Ints, tokens_per_event: int
) -> Iterator[_SpanGroup]:
    """Yield the spans of a replica in groups that have regular events at the same times.

    A span has a regular event every `tokens_per_event` iterations. With 3 tokens per event, spans
    that begin in iteration 1, 4 or 7 have regular events only at the ends of iterations 1, 4, 7, 10
    and so on. They are one group, because 1 % 3, 4 % 3 and 7 % 3 are all 1.

    The times of the events of a group are the ends of every third iteration, beginning with
    iteration 1. In this list, the end of iteration 7 has the index 7 // 3 = 2.

    Args:
        spans: The unbroken sequences of iterations in which requests got one token each.
        last_regular_iteration: The iteration of the last regular event of each span.
        ends_ns: When the iterations of the replica ended.
        tokens_per_event: Tokens of each event after the first.
    """
    remainder_of_span = spans.first % tokens_per_event
    first_event = spans.first // tokens_per_event
    last_event = last_regular_iteration // tokens_per_event

    for remainder in np.unique(remainder_of_span).tolist():
        in_group = remainder_of_span == remainder
        yield _SpanGroup(
            record_index=spans.record_index[in_group],
            first_event=first_event[in_group],
            last_event=last_event[in_group],
            event_times_ns=ends_ns[remainder::tokens_per_event],
        )


def _count_ranges(starts: Ints, stops: Ints, length: int) -> Ints:
    """Return how many ranges contain each of the indexes from 0 to `length` - 1.

    A range reaches from an entry of `starts` to the same entry of `stops` (exclusive). For example,
    range(0, 2) and range(1, 4) give [1, 2, 1, 1] for a length of 4.
    """
    # The comments show the values in the example. A range may stop at the index `length`.
    start_counts = np.bincount(starts, minlength=length + 1)  # [1, 1, 0, 0, 0] ranges start here
    stop_counts = np.bincount(stops, minlength=length + 1)  # [0, 0, 1, 0, 1] ranges stop here
    range_counts = np.cumsum(start_counts - stop_counts)  # [1, 2, 1, 1, 0]
    return range_counts[:length]


def _range_maxima(values: Ints, starts: Ints, stops: Ints) -> Ints:
    """Return max(values[start:stop]) for each pair of bounds, with start < stop.

    For example, the values [5, 1, 7, 2] with the starts [0, 1] and the stops [2, 4] give [5, 7].

    This is the sparse table for range maximum queries (Bender and Farach-Colton, "The LCA problem
    revisited", 2000). A window is a range whose width is a power of two. Any range is covered by
    two windows of the same width that may overlap: values[1:8], of length 7, by values[1:5] and
    values[4:8], of width 4. The width is the largest power of two that fits into the range.
    """
    lengths = stops - starts
    longest = int(lengths.max())
    maxima = np.zeros(len(starts), np.int64)
    width = 1

    window_maxima = values  # window_maxima[i] is the maximum of values[i : i + width]
    while width <= longest:
        # Each turn of the loop handles the ranges whose largest fitting window has this width.
        uses_width = (width <= lengths) & (lengths < 2 * width)
        maxima_of_left_windows = window_maxima[starts[uses_width]]
        maxima_of_right_windows = window_maxima[stops[uses_width] - width]
        maxima[uses_width] = np.maximum(maxima_of_left_windows, maxima_of_right_windows)
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
