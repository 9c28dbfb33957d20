"""Count the output events of a simulated run and the gaps between them.

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
    """Count the output events of all replicas, and the gaps between them.

    Args:
        spans: In which iterations requests got tokens.
        iteration_ends_ns: When the iterations of each replica ended.
        stage_of_record: The stage of each sent request.
        stage_count: The number of stages.
        tokens_per_event: Tokens of each event after the first. A span has an event at its first
            iteration, at every `tokens_per_event`-th after it, and at its last.
    """
    last_end_ns = max(
        (int(ends_ns[-1]) for ends_ns in iteration_ends_ns if len(ends_ns)), default=0
    )
    counter = _EventCounter(stage_of_record, stage_count, tokens_per_event, last_end_ns)
    # After sorting, the spans of each replica follow each other.
    order = np.argsort(spans.replica, kind="stable")
    replica_indexes = np.arange(len(iteration_ends_ns) + 1)
    first_of_replica = np.searchsorted(spans.replica[order], replica_indexes)
    for replica_index, ends_ns in enumerate(iteration_ends_ns):
        span_indexes = order[first_of_replica[replica_index] : first_of_replica[replica_index + 1]]
        if len(span_indexes):
            spans_of_replica = TokenSpans(*(column[span_indexes] for column in spans))
            counter.add_replica(spans_of_replica, ends_ns)
    counter.add_pauses(spans, iteration_ends_ns)
    return counter.build_counts()


class _EventCounter:
    """Adds up the output events of the replicas, one replica after the other."""

    def __init__(
        self,
        stage_of_record: NDArray[Any],
        stage_count: int,
        tokens_per_event: int,
        last_end_ns: int,
    ) -> None:
        """Create a counter without events. `last_end_ns` is the end of the last iteration.

        `count_events` describes the other arguments.
        """
        self._stage_of_record = stage_of_record
        self._tokens_per_event = tokens_per_event
        bin_count = last_end_ns // BIN_NS + 1
        # By stage.
        self._gaps = [Histogram() for _ in range(stage_count)]
        self._timeline = [np.zeros(bin_count, np.int64) for _ in range(stage_count)]
        # By sent request.
        self._largest_gap_ns = np.zeros(len(stage_of_record), np.int64)
        self._events = np.zeros(len(stage_of_record), np.int32)

    def add_replica(self, spans: TokenSpans, ends_ns: Ints) -> None:
        """Add the events of the spans of one replica, whose iterations ended at `ends_ns`.

        With n tokens per event, a span that begins at iteration i has events at i, i + n, i + 2n
        and so on. The spans with the same i modulo n (the phase) have their events at the same
        iterations, so they are counted together. If the number of iterations is no multiple of n, a
        span has one more event at its end, after a shorter gap.
        """
        step = self._tokens_per_event
        iterations_after_first = spans.last - spans.first
        full_gaps = iterations_after_first // step
        has_short_gap = iterations_after_first % step > 0

        for phase in range(min(step, len(ends_ns))):
            in_phase = np.flatnonzero(spans.first % step == phase)
            if not len(in_phase):
                continue
            self._add_phase(
                record_index=spans.record_index[in_phase],
                first_event=spans.first[in_phase] // step,
                full_gaps=full_gaps[in_phase],
                ends_ns=ends_ns[phase::step],
            )
        if has_short_gap.any():
            last_full_event = spans.first + full_gaps * step
            self._add_last_events(
                record_index=spans.record_index[has_short_gap],
                previous_ns=ends_ns[last_full_event[has_short_gap]],
                last_ns=ends_ns[spans.last[has_short_gap]],
            )
        np.add.at(self._events, spans.record_index, 1 + full_gaps + has_short_gap)

    def add_pauses(self, spans: TokenSpans, iteration_ends_ns: Sequence[Ints]) -> None:
        """Add the gaps between the spans of paused requests.

        A request with several spans was paused between them. The gap reaches from the end of the
        last iteration before the pause to the end of the first one after it. All spans of a request
        are on the same replica.
        """
        order = np.lexsort((spans.first, spans.record_index))
        record_index = spans.record_index[order]
        (is_followed,) = np.nonzero(np.diff(record_index) == 0)  # by a span of the same record
        if not len(is_followed):
            return
        before_pause = order[is_followed]
        after_pause = order[is_followed + 1]
        gaps_ns = np.array(
            [
                iteration_ends_ns[replica][resumed] - iteration_ends_ns[replica][paused]
                for replica, paused, resumed in zip(
                    spans.replica[before_pause].tolist(),
                    spans.last[before_pause].tolist(),
                    spans.first[after_pause].tolist(),
                    strict=True,
                )
            ],
            np.int64,
        )
        paused_records = record_index[is_followed]
        np.maximum.at(self._largest_gap_ns, paused_records, gaps_ns)
        stage = self._stage_of_record[paused_records]
        for stage_index in np.unique(stage).tolist():
            self._gaps[stage_index].add(gaps_ns[stage == stage_index])

    def build_counts(self) -> EventCounts:
        """Return the counts of all added events. The timeline of a stage ends with its last one."""
        timeline = [_without_zeros_at_end(counts) for counts in self._timeline]
        return EventCounts(self._gaps, timeline, self._largest_gap_ns, self._events)

    def _add_phase(
        self, record_index: Ints, first_event: Ints, full_gaps: Ints, ends_ns: Ints
    ) -> None:
        """Add the events of spans that have them at the same iterations, except shorter last ones.

        Only iterations of this phase are looked at, numbered from 0. How many spans have an event
        at one of them is the number of spans that have begun so far minus those that have ended.

        Args:
            record_index: The record of each span.
            first_event: The iteration of the first event of each span, as an index of `ends_ns`.
            full_gaps: The number of gaps of a whole interval in each span.
            ends_ns: When the iterations of this phase ended.
        """
        last_event = first_event + full_gaps
        iteration_count = len(ends_ns)
        gaps_ns = np.diff(ends_ns)
        bins = ends_ns // BIN_NS
        stage = self._stage_of_record[record_index]
        for stage_index in np.unique(stage).tolist():
            in_stage = stage == stage_index
            begun = np.bincount(first_event[in_stage], minlength=iteration_count + 1)
            ended = np.bincount(last_event[in_stage] + 1, minlength=iteration_count + 1)
            with_event = np.cumsum(begun - ended)[:iteration_count]
            # A span that begins at an iteration has no gap before it.
            with_gap = with_event - begun[:iteration_count]
            self._gaps[stage_index].add(gaps_ns, with_gap[1:])
            timeline = self._timeline[stage_index]
            events_per_bin = np.bincount(bins, weights=with_event, minlength=len(timeline))
            timeline += events_per_bin.astype(np.int64)

        has_gaps = full_gaps > 0
        if has_gaps.any():
            largest_ns = _range_maxima(gaps_ns, first_event[has_gaps], last_event[has_gaps])
            np.maximum.at(self._largest_gap_ns, record_index[has_gaps], largest_ns)

    def _add_last_events(self, record_index: Ints, previous_ns: Ints, last_ns: Ints) -> None:
        """Add the last events of spans whose last gap is shorter than a whole interval.

        Args:
            record_index: The record of each span.
            previous_ns: The time of its last but one event.
            last_ns: The time of its last event.
        """
        gaps_ns = last_ns - previous_ns
        np.maximum.at(self._largest_gap_ns, record_index, gaps_ns)
        stage = self._stage_of_record[record_index]
        for stage_index in np.unique(stage).tolist():
            in_stage = stage == stage_index
            self._gaps[stage_index].add(gaps_ns[in_stage])
            timeline = self._timeline[stage_index]
            timeline += np.bincount(last_ns[in_stage] // BIN_NS, minlength=len(timeline))


def _range_maxima(values: Ints, begin: Ints, end: Ints) -> Ints:
    """Return max(values[begin:end]) for each pair of bounds, with begin < end.

    This is the range maximum query, answered by a sparse table: the maximum of a range is that of
    two overlapping ranges whose length is a power of two, one at its begin and one at its end. The
    table for the length 2^n follows from the table for half of it.
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
