"""Counts the output events of a simulated run and the gaps between them.

An output event is what a client receives at once: one token, or as many as the stream interval
says. A gap is the time between two events of a request. A span is an unbroken sequence of
iterations in which a request gets one token each.

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
from loadgen.sim.event_gaps import Ints, TokenSpans

Counts = NDArray[np.signedinteger[Any]]


class EventCounts(NamedTuple):
    """The output events of a run in numbers."""

    gaps: list[Histogram]  # between the events of a request, in ns, by stage
    timeline: list[Ints]  # events per interval of BIN_NS since the start of the run, by stage
    largest_gap_ns: Ints  # by sent request
    events: Counts  # by sent request


def count_events(
    spans: TokenSpans,
    iteration_ends: Sequence[Ints],
    stage_of_record: NDArray[Any],
    stage_count: int,
    interval: int,
) -> EventCounts:
    """Count the events of all replicas.

    Args:
        spans: In which iterations requests got tokens.
        iteration_ends: When the iterations of each replica ended, in ns.
        stage_of_record: The stage of each sent request.
        stage_count: The number of stages.
        interval: A span has an event at its first iteration, at every `interval`-th after it, and
            at its last.
    """
    last_end_ns = max((int(ends[-1]) for ends in iteration_ends if len(ends)), default=0)
    counter = _EventCounter(stage_of_record, stage_count, interval, last_end_ns)
    # After sorting, the spans of each replica follow each other.
    order = np.argsort(spans.replica, kind="stable")
    bounds = np.searchsorted(spans.replica[order], np.arange(len(iteration_ends) + 1))
    for replica, ends_ns in enumerate(iteration_ends):
        span_indexes = order[bounds[replica] : bounds[replica + 1]]
        if len(span_indexes):
            counter.add_replica(TokenSpans(*(column[span_indexes] for column in spans)), ends_ns)
    counter.add_pauses(spans, iteration_ends)
    return counter.result()


class _EventCounter:
    """Adds up the events of the replicas. Columns of spans are for the spans of one replica."""

    def __init__(
        self, stage_of_record: NDArray[Any], stage_count: int, interval: int, last_end_ns: int
    ) -> None:
        self._stage_of_record = stage_of_record
        self._interval = interval
        bin_count = last_end_ns // BIN_NS + 1
        self._gaps = [Histogram() for _ in range(stage_count)]
        self._timeline = [np.zeros(bin_count, np.int64) for _ in range(stage_count)]
        self._largest_gap_ns = np.zeros(len(stage_of_record), np.int64)
        self._events = np.zeros(len(stage_of_record), np.int32)

    def add_replica(self, spans: TokenSpans, ends_ns: Ints) -> None:
        """Add the events of one replica, whose iterations ended at `ends_ns`.

        With an interval of n, a span that begins at iteration i has events at i, i + n, i + 2n and
        so on. The spans with the same i modulo n (the phase) have their events at the same
        iterations, so they are counted together. If the number of iterations is no multiple of n, a
        span has one more event at its end, after a shorter gap.
        """
        interval = self._interval
        full_gaps = (spans.last - spans.first) // interval  # gaps of a whole interval in each span
        has_partial_gap = (spans.last - spans.first) % interval > 0
        for phase in range(min(interval, len(ends_ns))):
            in_phase = np.flatnonzero(spans.first % interval == phase)
            if not len(in_phase):
                continue
            self._add_phase(
                record=spans.record_index[in_phase],
                begin=spans.first[in_phase] // interval,
                full_gaps=full_gaps[in_phase],
                ends_ns=ends_ns[phase::interval],
            )
        if has_partial_gap.any():
            last = spans.last[has_partial_gap]
            last_full_event = spans.first + full_gaps * interval
            self._add_last_events(
                record=spans.record_index[has_partial_gap],
                previous_ns=ends_ns[last_full_event[has_partial_gap]],
                last_ns=ends_ns[last],
            )
        np.add.at(self._events, spans.record_index, 1 + full_gaps + has_partial_gap)

    def add_pauses(self, spans: TokenSpans, iteration_ends: Sequence[Ints]) -> None:
        """Add the gaps between the spans of paused requests.

        A request with several spans was paused between them. The gap reaches from the end of the
        last iteration before the pause to the end of the first one after it.
        """
        order = np.lexsort((spans.first, spans.record_index))
        record = spans.record_index[order]
        (same_record,) = np.nonzero(np.diff(record) == 0)
        if not len(same_record):
            return
        before = order[same_record]
        after = order[same_record + 1]
        pauses = zip(
            spans.replica[before].tolist(),
            spans.last[before].tolist(),
            spans.first[after].tolist(),
            strict=True,
        )
        gaps_ns = np.array(
            [
                iteration_ends[replica][resumed] - iteration_ends[replica][paused]
                for replica, paused, resumed in pauses
            ],
            np.int64,
        )
        paused_record = record[same_record]
        np.maximum.at(self._largest_gap_ns, paused_record, gaps_ns)
        stage = self._stage_of_record[paused_record]
        for stage_index in np.unique(stage).tolist():
            self._gaps[stage_index].add(gaps_ns[stage == stage_index])

    def result(self) -> EventCounts:
        """Return the counts; the timeline of each stage ends with its last event."""
        timeline = [_without_zeros_at_end(counts) for counts in self._timeline]
        return EventCounts(self._gaps, timeline, self._largest_gap_ns, self._events)

    def _add_phase(self, record: Ints, begin: Ints, full_gaps: Ints, ends_ns: Ints) -> None:
        """Add the events at full intervals of the spans that began in the same phase.

        Such spans have these events at the same iterations. How many spans take part in each of
        them is the number that have begun so far minus the number that have ended.

        Args:
            record: The record of each span.
            begin: The first event of each span, as an index into `ends_ns`.
            full_gaps: The number of gaps of a whole interval in each span.
            ends_ns: When the iterations with events in this phase ended.
        """
        end = begin + full_gaps
        gaps_ns = np.diff(ends_ns)
        stage = self._stage_of_record[record]
        for stage_index in np.unique(stage).tolist():
            in_stage = stage == stage_index
            started = np.bincount(begin[in_stage], minlength=len(ends_ns) + 1)
            stopped = np.bincount(end[in_stage] + 1, minlength=len(ends_ns) + 1)
            emitting = np.cumsum(started - stopped)[: len(ends_ns)]
            # A span that begins at an iteration has no gap before it.
            continuing = emitting - started[: len(ends_ns)]
            self._gaps[stage_index].add(gaps_ns, continuing[1:])
            timeline = self._timeline[stage_index]
            per_bin = np.bincount(ends_ns // BIN_NS, weights=emitting, minlength=len(timeline))
            timeline += per_bin.astype(np.int64)
        has_gaps = full_gaps > 0
        if has_gaps.any():
            largest_ns = _range_maxima(gaps_ns, begin[has_gaps], end[has_gaps])
            np.maximum.at(self._largest_gap_ns, record[has_gaps], largest_ns)

    def _add_last_events(self, record: Ints, previous_ns: Ints, last_ns: Ints) -> None:
        """Add the last events of spans that do not end at a full interval.

        `previous_ns` and `last_ns` are the times of the last two events of each span.
        """
        gaps_ns = last_ns - previous_ns
        np.maximum.at(self._largest_gap_ns, record, gaps_ns)
        stage = self._stage_of_record[record]
        for stage_index in np.unique(stage).tolist():
            in_stage = stage == stage_index
            self._gaps[stage_index].add(gaps_ns[in_stage])
            timeline = self._timeline[stage_index]
            timeline += np.bincount(last_ns[in_stage] // BIN_NS, minlength=len(timeline))


def _range_maxima(values: Ints, begin: Ints, end: Ints) -> Ints:
    """Return max(values[begin:end]) for each pair of bounds, with begin < end.

    A sparse table answers all ranges: the maximum of a range is that of two overlapping ranges
    whose length is a power of two, one at its begin and one at its end. The table for the length
    2^n follows from the table for half of it.
    """
    _, exponent = np.frexp(end - begin)
    power_of_range = exponent - 1  # floor(log2(end - begin))
    maxima = np.zeros(len(begin), np.int64)
    table = values  # table[i] is the maximum of the 2^power values from i on
    for power in range(int(power_of_range.max()) + 1):
        if power:
            half = 1 << (power - 1)
            table = np.maximum(table[:-half], table[half:])
        (indexes,) = np.nonzero(power_of_range == power)
        if len(indexes):
            maxima_at_begin = table[begin[indexes]]
            maxima_at_end = table[end[indexes] - (1 << power)]
            maxima[indexes] = np.maximum(maxima_at_begin, maxima_at_end)
    return maxima


def _without_zeros_at_end(counts: Ints) -> Ints:
    """Return the counts up to the last one that is not 0."""
    (indexes,) = np.nonzero(counts)
    return counts[: indexes[-1] + 1] if len(indexes) else counts[:0]
