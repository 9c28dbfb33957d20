"""The gaps between the output events of each request of a virtual run, for `--keep gaps`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from loadgen.core.results.gaps import RequestGaps

Ints = NDArray[np.int64]

EVENTS_PER_BATCH = 1 << 20  # limits the memory in use


class TokenSpans(NamedTuple):
    """Unbroken spans of iterations in which a request gets one token each, as columns.

    A request has one span, and one more for each time that it was paused.
    """

    record_index: Ints
    replica: Ints
    first: Ints  # iteration of the first token
    last: Ints  # iteration of the last token


class EmittedEvents(NamedTuple):
    """The output events of a run, in compact form.

    A span has an event at its first iteration, at every `interval`-th after it, and at its last.
    """

    slots: Ints  # of each record
    spans: TokenSpans
    iteration_ends: Sequence[Ints]  # of each replica, in ns
    interval: int


def iterate_gaps(events: EmittedEvents) -> Iterator[RequestGaps]:
    """Yield the gaps of all requests that have one, in the order of the records, in batches.

    A gap is the time from one event of a record to the next, also if a pause is between them. A
    batch has all events of some records, one after the other, so their gaps are differences of
    neighbours. The differences between the last event of a record and the first of the next record
    are left out.
    """
    spans = _sorted_spans(events.spans)
    event_counts = _count_events(spans, events.interval)
    all_ends_ns = np.concatenate(events.iteration_ends)
    first_of_replica = np.cumsum([0, *map(len, events.iteration_ends)])  # index in all_ends_ns
    for batch in _batches(spans.record_index, event_counts):
        batch_spans = TokenSpans(*(column[batch] for column in spans))
        counts = event_counts[batch]
        iterations = _event_iterations(batch_spans, counts, events.interval)
        replica_offset = np.repeat(first_of_replica[batch_spans.replica], counts)
        gaps_ns = np.diff(all_ends_ns[replica_offset + iterations])
        record = np.repeat(batch_spans.record_index, counts)
        is_same_record = record[1:] == record[:-1]
        records, gap_counts = np.unique(record[1:][is_same_record], return_counts=True)
        yield RequestGaps(events.slots[records], gap_counts, gaps_ns[is_same_record])


def _event_iterations(spans: TokenSpans, event_counts: Ints, interval: int) -> Ints:
    """Return the iteration of each event of these spans, span after span.

    The events of a span are `interval` iterations apart. The last one comes at the end of the span,
    even if that is no full interval.
    """
    first_event_of_span = np.cumsum(event_counts) - event_counts
    event_numbers = np.arange(int(event_counts.sum()))
    number_in_span = event_numbers - np.repeat(first_event_of_span, event_counts)
    iterations: Ints = np.repeat(spans.first, event_counts) + number_in_span * interval
    return np.minimum(iterations, np.repeat(spans.last, event_counts))


def _sorted_spans(spans: TokenSpans) -> TokenSpans:
    """Return the spans in the order of the records, those of one record in order of time."""
    order = np.lexsort((spans.first, spans.record_index))
    return TokenSpans(*(column[order] for column in spans))


def _count_events(spans: TokenSpans, interval: int) -> Ints:
    """Return the number of events of each span.

    There is one at its first iteration, and one per interval after it. The last event comes at the
    end of the span, even if the interval is not over, so the number is rounded up.
    """
    rounded_up: Ints = -((spans.first - spans.last) // interval)
    return 1 + rounded_up


def _batches(record_index: Ints, event_counts: Ints) -> Iterator[slice]:
    """Yield slices of spans with about EVENTS_PER_BATCH events; no record is in two of them.

    A record belongs to the batch in which its first event falls, if batches had exactly
    EVENTS_PER_BATCH events.
    """
    first_span_of_record = _indexes_of_changes(record_index)
    events_before_span = np.cumsum(event_counts) - event_counts
    batch_of_record = events_before_span[first_span_of_record] // EVENTS_PER_BATCH
    first_record_of_batch = _indexes_of_changes(batch_of_record)
    starts = first_span_of_record[first_record_of_batch].tolist()
    ends = [*starts[1:], len(record_index)]
    for start, end in zip(starts, ends, strict=True):
        yield slice(start, end)


def _indexes_of_changes(numbers: Ints) -> Ints:
    """Return the indexes at which a number differs from the one before it, and 0.

    The numbers are not negative, so the first one differs from the -1 that is put before it.
    """
    return np.flatnonzero(np.diff(numbers, prepend=-1))
