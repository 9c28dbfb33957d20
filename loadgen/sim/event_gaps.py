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

    A gap is the time from one event of a request to its next one, also if the request was paused in
    between. Requests come in the order of their records. Those with a single event have no gap and
    are left out.
    """
    spans = _sort_spans(events.spans)
    event_counts = _count_events(spans, events.tokens_per_event)
    # The end times of all replicas are in one array, so that one look-up serves all of them.
    all_ends_ns = np.concatenate(events.iteration_ends_ns)
    offset_of_replica = np.cumsum([0, *map(len, events.iteration_ends_ns)])
    for batch in _split_into_batches(spans.record_index, event_counts):
        batch_spans = TokenSpans(*(column[batch] for column in spans))
        counts = event_counts[batch]
        # One entry per event of the batch.
        iterations = _event_iterations(batch_spans, counts, events.tokens_per_event)
        offsets = np.repeat(offset_of_replica[batch_spans.replica], counts)
        events_ns = all_ends_ns[offsets + iterations]
        record_index = np.repeat(batch_spans.record_index, counts)
        # One entry per pair of consecutive events. Pairs of two records are no gaps.
        is_gap = record_index[1:] == record_index[:-1]
        gaps_ns = np.diff(events_ns)[is_gap]
        records, gap_counts = np.unique(record_index[1:][is_gap], return_counts=True)
        yield RequestGaps(events.slots[records], gap_counts, gaps_ns)


def _event_iterations(spans: TokenSpans, event_counts: Ints, tokens_per_event: int) -> Ints:
    """Return the iteration of each event of these spans, span after span.

    The events of a span are `tokens_per_event` iterations apart. The last one comes at the end of
    the span, even if fewer tokens are left then. `event_counts` has the number of events per span.
    """
    # The number of each event within its span: 0, 1, 2, ..., and 0 again at the next span.
    first_event_of_span = np.cumsum(event_counts) - event_counts
    event_numbers = np.arange(int(event_counts.sum()))
    numbers_in_span = event_numbers - np.repeat(first_event_of_span, event_counts)

    first_iterations = np.repeat(spans.first, event_counts)
    last_iterations = np.repeat(spans.last, event_counts)
    iterations: Ints = first_iterations + numbers_in_span * tokens_per_event
    return np.minimum(iterations, last_iterations)


def _sort_spans(spans: TokenSpans) -> TokenSpans:
    """Return the spans in the order of the records, those of one record in order of time."""
    order = np.lexsort((spans.first, spans.record_index))
    return TokenSpans(*(column[order] for column in spans))


def _count_events(spans: TokenSpans, tokens_per_event: int) -> Ints:
    """Return the number of events of each span.

    There is one at its first iteration, and one for each `tokens_per_event` iterations after it.
    The last event comes at the end of the span, even if it has fewer tokens, so the number is
    rounded up.
    """
    events_after_first: Ints = -((spans.first - spans.last) // tokens_per_event)  # rounded up
    return 1 + events_after_first


def _split_into_batches(record_index: Ints, event_counts: Ints) -> Iterator[slice]:
    """Yield slices of spans with about EVENTS_PER_BATCH events, to limit the memory in use.

    All spans of a record are in the same batch, so a batch can be larger. All events are numbered,
    and the number of its first event, divided by EVENTS_PER_BATCH, decides the batch of a record.

    Args:
        record_index: The record of each span. The spans of a record follow each other.
        event_counts: The number of events of each span.
    """
    first_span_of_record = _indexes_of_changes(record_index)
    events_before_span = np.cumsum(event_counts) - event_counts
    batch_of_record = events_before_span[first_span_of_record] // EVENTS_PER_BATCH
    first_record_of_batch = _indexes_of_changes(batch_of_record)
    starts = first_span_of_record[first_record_of_batch].tolist()
    stops = [*starts[1:], len(record_index)]
    for start, stop in zip(starts, stops, strict=True):
        yield slice(start, stop)


def _indexes_of_changes(numbers: Ints) -> Ints:
    """Return 0 and the indexes at which a number differs from the one before it.

    The numbers are not negative, so the first one differs from the -1 that is put before it.
    """
    return np.flatnonzero(np.diff(numbers, prepend=-1))
