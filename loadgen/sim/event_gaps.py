"""The gaps between the output events of each request of a virtual run, for `--keep gaps`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from loadgen.core.results.gaps import RequestGaps

Ints = NDArray[np.int64]

EVENTS_PER_BATCH = 1 << 20  # limits the memory in use


class TokenSpans(NamedTuple):
    """Spans: unbroken sequences of iterations in which a request gets one token each, as columns.

    A request has one span, and one more for each time that it was paused. All columns have one
    entry per span.

    Attributes:
        record_index: The index of the request's record.
        replica: The index of the replica.
        first: The iteration of the first token, as a number of the replica's iterations.
        last: The iteration of the last token.
    """

    record_index: Ints
    replica: Ints
    first: Ints
    last: Ints

    def select(self, selection: slice | NDArray[Any]) -> TokenSpans:
        """Return some of the spans, selected by a slice, by their indexes or by a mask."""
        return TokenSpans(*(column[selection] for column in self))

    def in_record_order(self) -> TokenSpans:
        """Return the spans in the order of their records, those of one record in order of time."""
        return self.select(np.lexsort((self.first, self.record_index)))


class IterationEnds:
    """The times at which the iterations of all replicas ended, for looking up many at once.

    The times of all replicas are in one array, so that one index operation finds iterations of
    different replicas. If replica 0 has 3 iterations, iteration 0 of replica 1 is at index 3.
    """

    def __init__(self, ends_ns_of_replicas: Sequence[Ints]) -> None:
        """Copy the end times of the iterations of each replica, in ns."""
        iteration_counts = [len(ends_ns) for ends_ns in ends_ns_of_replicas]
        self._ends_ns = np.concatenate(ends_ns_of_replicas)
        self._start_of_replica = np.array([*accumulate(iteration_counts, initial=0)])

    def look_up(self, replica: NDArray[Any], iteration: NDArray[Any]) -> Ints:
        """Return when iterations ended, in ns. Both arguments have one entry per iteration.

        Args:
            replica: The index of the replica.
            iteration: The number of the iteration on this replica.
        """
        ends_ns: Ints = self._ends_ns[self._start_of_replica[replica] + iteration]
        return ends_ns


class EmittedEvents(NamedTuple):
    """The output events of a run, in compact form.

    A span has an event at its first iteration, at every `tokens_per_event`-th iteration after it,
    and at its last.

    Attributes:
        slots: The slot of each record.
        spans: The spans of all records.
        iteration_ends_ns: The end times of the iterations of each replica.
        tokens_per_event: Tokens of each event after the first.
    """

    slots: Ints
    spans: TokenSpans
    iteration_ends_ns: Sequence[Ints]
    tokens_per_event: int


def iterate_gaps(events: EmittedEvents) -> Iterator[RequestGaps]:
    """Yield the gaps between the output events of all requests, in batches of requests.

    A gap is the time from one event of a request to its next one, even if the request was paused in
    between. Requests come in the order of their records. Those with a single event have no gap and
    are left out. The batches limit the memory in use, because a run can have billions of events.
    """
    tokens_per_event = events.tokens_per_event
    spans = events.spans.in_record_order()
    event_counts = _count_events(spans, tokens_per_event)

    iteration_ends = IterationEnds(events.iteration_ends_ns)
    for batch in _split_into_batches(spans.record_index, event_counts):
        batch_events = _list_events(
            spans.select(batch), event_counts[batch], tokens_per_event, iteration_ends
        )
        yield _compute_gaps(batch_events, events.slots)


class _EventList(NamedTuple):
    """Single output events, record after record and in order of time. One entry per event."""

    record_index: Ints
    time_ns: Ints


def _compute_gaps(events: _EventList, slots: Ints) -> RequestGaps:
    """Return the gaps between consecutive events of the same record.

    Args:
        events: The events of some records, record after record and in order of time.
        slots: The slot of every record: the number of its request in the schedule.
    """
    record_of_event = events.record_index[1:]
    record_of_previous_event = events.record_index[:-1]
    # The first event of a record has no gap before it.
    has_gap = record_of_event == record_of_previous_event
    gaps_ns = np.diff(events.time_ns)[has_gap]
    records, gap_counts = np.unique(record_of_event[has_gap], return_counts=True)
    return RequestGaps(slots[records], gap_counts, gaps_ns)


def _list_events(
    spans: TokenSpans, event_counts: Ints, tokens_per_event: int, iteration_ends: IterationEnds
) -> _EventList:
    """Return every output event of some spans, span after span.

    The events of a span are `tokens_per_event` iterations apart. The last one comes at the end of
    the span, even if it has fewer tokens. With 3 tokens per event, a span from iteration 10 to
    iteration 14 has events at 10, 13 and 14.

    Args:
        spans: Unbroken sequences of iterations in which a request gets one token each.
        event_counts: The number of events of each span.
        tokens_per_event: Tokens of each event after the first.
        iteration_ends: When the iterations of the replicas ended.
    """
    # The comments show the values for the span in the example, which has 3 events.
    span_index = np.repeat(np.arange(len(event_counts)), event_counts)  # [0, 0, 0]
    span_of_event = spans.select(span_index)  # one entry per event
    event_number = _number_within_groups(event_counts)  # [0, 1, 2], from 0 in each span

    planned_iteration = span_of_event.first + event_number * tokens_per_event  # [10, 13, 16]
    iteration = np.minimum(planned_iteration, span_of_event.last)  # [10, 13, 14]
    time_ns = iteration_ends.look_up(span_of_event.replica, iteration)
    return _EventList(span_of_event.record_index, time_ns)


def _number_within_groups(group_sizes: Ints) -> Ints:
    """Return the numbers from 0 on for each group, one group after the other.

    For example, groups of 2 and 3 elements give [0, 1, 0, 1, 2].
    """
    group_ends = np.cumsum(group_sizes)
    group_starts = group_ends - group_sizes
    element_count = int(group_sizes.sum())
    return np.arange(element_count) - np.repeat(group_starts, group_sizes)


def _count_events(spans: TokenSpans, tokens_per_event: int) -> Ints:
    """Return the number of output events of each span.

    There is one event at the first iteration of a span, and one after each `tokens_per_event`
    further iterations. The last event comes at the end of the span, even if it has fewer tokens, so
    the number is rounded up.
    """
    tokens_after_first = spans.last - spans.first
    full_events, tokens_left = np.divmod(tokens_after_first, tokens_per_event)
    return 1 + full_events + (tokens_left > 0)


def _split_into_batches(record_index: Ints, event_counts: Ints) -> Iterator[slice]:
    """Yield slices of spans with about EVENTS_PER_BATCH events each, to limit the memory in use.

    A span is a part of a response without a pause. All spans of a record are in one batch, so a
    batch may be somewhat larger. For example, records 4, 5 and 6 have two spans of 60 events, one
    of 90 and one of 80. With 100 events per batch, record 4 is in batch 0, record 5, before which
    there are 120 events, is in batch 1, and record 6, before which there are 210, is in batch 2.

    Args:
        record_index: The record of each span, in ascending order.
        event_counts: The number of events of each span.
    """
    # The comments show the values in the example, where the spans have the indexes 0 to 3.
    events_before_span = np.cumsum(event_counts) - event_counts  # [0, 60, 120, 210]
    batch_of_span = events_before_span // EVENTS_PER_BATCH  # [0, 0, 1, 2]

    # A batch can only begin with the first span of a record.
    record_starts = _find_first_indexes(record_index)  # [0, 2, 3]
    batch_of_record = batch_of_span[record_starts]  # [0, 1, 2]
    batch_starts = record_starts[_find_first_indexes(batch_of_record)]  # [0, 2, 3]

    span_count = len(record_index)
    for start, stop in pairwise([*batch_starts.tolist(), span_count]):
        yield slice(start, stop)


def _find_first_indexes(sorted_values: NDArray[Any]) -> NDArray[np.intp]:
    """Return where each distinct value occurs first. For example, [4, 4, 6, 6, 6] gives [0, 2]."""
    _, first_indexes = np.unique(sorted_values, return_index=True)
    return first_indexes
