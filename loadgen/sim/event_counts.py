"""Counts the output events of a simulated run and the gaps between them.

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
    order = np.argsort(spans.replica, kind="stable")
    bounds = np.searchsorted(spans.replica[order], np.arange(len(iteration_ends) + 1))
    for replica, ends_ns in enumerate(iteration_ends):
        of_replica = order[bounds[replica] : bounds[replica + 1]]
        if len(of_replica):
            counter.add_replica(TokenSpans(*(column[of_replica] for column in spans)), ends_ns)
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
        """Add the events of one replica, whose iterations ended at `ends_ns`."""
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
        """Add the gaps between the spans of paused requests."""
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
        timeline = [
            counts[: int(np.flatnonzero(counts)[-1]) + 1] if counts.any() else counts[:0]
            for counts in self._timeline
        ]
        return EventCounts(self._gaps, timeline, self._largest_gap_ns, self._events)

    def _add_phase(self, record: Ints, begin: Ints, full_gaps: Ints, ends_ns: Ints) -> None:
        """Add the events at full intervals of the spans that began in the same phase.

        Such spans have these events at the same iterations, which are those that ended at
        `ends_ns`. `begin` is the index there of the first event of each span.
        """
        end = begin + full_gaps
        gaps_ns = np.diff(ends_ns)
        stage = self._stage_of_record[record]
        for stage_index in np.unique(stage).tolist():
            in_stage = stage == stage_index
            started = np.bincount(begin[in_stage], minlength=len(ends_ns) + 1)
            stopped = np.bincount(end[in_stage] + 1, minlength=len(ends_ns) + 1)
            emitting = np.cumsum(started - stopped)[: len(ends_ns)]
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
        """Add the last events of spans that do not end at a full interval."""
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

    It is the maximum of two overlapping ranges of length 2^k (a sparse table).
    """
    level = np.frexp(end - begin)[1] - 1  # floor(log2(end - begin))
    maxima = np.zeros(len(begin), np.int64)
    table = values  # maxima of all ranges of length 2^power
    for power in range(int(level.max()) + 1):
        if power:
            half = 1 << (power - 1)
            table = np.maximum(table[:-half], table[half:])
        (at_level,) = np.nonzero(level == power)
        if len(at_level):
            maxima[at_level] = np.maximum(
                table[begin[at_level]], table[end[at_level] - (1 << power)]
            )
    return maxima
