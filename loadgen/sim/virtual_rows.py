"""From what the replicas did to what a run records: rows, gaps between events, events per 10 ms. Pure, columns only.

A request's stamps are ends of iterations, so they are looked up; gaps between its events are lengths of iterations, so
they are counted by how many sequences went through each. No event and no token is visited.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from loadgen.results.record import BIN_NS, FINISH, KIND, ROW, SOURCE, STATUS
from loadgen.schedule.timetable import Schedule
from loadgen.stats.quantiles import SIZE, Histogram, bucket

Ints = NDArray[np.int64]

FLIGHT = ("number", "due_ns", "replica", "first", "start", "last", "input", "asked", "got", "cached", "kind", "end_ns")
"""Of each request that was sent: iterations of its first token, of the first one since it was last admitted, of its
last (-1 without); tokens; a failure's kind and instant (0 and -1 when it is ok)."""


@dataclass(slots=True)
class Flights:
    """What the driver notes, flat and appended to: `sent` by FLIGHT, `unsent` as (number, due, kind), `stretches` of
    requests that were paused as (number, replica, first, last iteration)."""

    sent: array[int] = field(default_factory=lambda: array("q"))
    unsent: array[int] = field(default_factory=lambda: array("q"))
    stretches: array[int] = field(default_factory=lambda: array("q"))


class VirtualRows(NamedTuple):
    """As `summary.summarize` takes it."""

    rows: NDArray[np.void]
    gaps: list[Histogram]
    timeline: list[Ints]


class _Stretches(NamedTuple):
    """Unbroken runs of iterations in which a request got tokens: one per request, more for those that were paused."""

    row: Ints
    replica: Ints
    first: Ints
    last: Ints


def outcome(
    flights: Flights, ends: Sequence[Sequence[int]], schedule: Schedule, *, interval: int, source: str, kept_cache: bool
) -> VirtualRows:
    """`ends`: of each replica's iterations; `interval`: tokens per event after the first; `source`: tag of the prompt
    counts as built; `kept_cache`: whether the server says how much of a prompt it had in its cache."""
    columns = _columns(flights.sent, FLIGHT)
    stages = len(schedule.stages)
    sent = len(columns["number"])
    unsent = np.array(flights.unsent, np.int64).reshape(-1, 3)
    rows = np.zeros(sent + len(unsent), ROW)
    never = np.array(_NEVER, ROW)
    rows[sent:] = never
    _place(rows, np.concatenate([columns["number"], unsent[:, 0]]), schedule)
    instants = [np.array(of_one, np.int64) for of_one in ends]
    stretches = _stretches(columns, flights.stretches)
    gaps = [Histogram() for _ in range(stages)]
    timeline = [np.zeros(0, np.int64) for _ in range(stages)]
    largest = np.zeros(sent, np.int64)
    events = np.zeros(sent, np.int64)
    stage = rows["stage"][:sent]
    order = np.argsort(stretches.replica, kind="stable")
    bounds = np.searchsorted(stretches.replica[order], np.arange(len(ends) + 1))
    longest = max((int(one[-1]) for one in instants if len(one)), default=0) // BIN_NS + 1
    bins = [np.zeros(longest, np.int64) for _ in range(stages)]
    for replica, at in enumerate(instants):
        chosen = order[bounds[replica] : bounds[replica + 1]]
        if len(chosen):
            _events(stretches, chosen, at, stage, interval, gaps, bins, largest, events)
    _between(stretches, instants, stage, gaps, largest)
    timeline = [one[: int(np.flatnonzero(one)[-1]) + 1] if one.any() else one[:0] for one in bins]
    _fill(rows[:sent], columns, instants, largest, events, source, kept_cache)
    for name, column in (("due_ns", unsent[:, 1]), ("kind", unsent[:, 2])):
        rows[name][sent:] = column
    cancelled = unsent[:, 2] == KIND["interrupted"]
    rows["status"][sent:] = np.where(cancelled, STATUS["cancelled"], STATUS["dropped"])
    return VirtualRows(rows, gaps, timeline)


_NEVER = tuple(
    -1 if name.endswith("_ns") and name not in ("client_lag_ns", "stamp_error_ns", "max_gap_ns") else value
    for name, value in (
        (name, -1 if name.endswith("_tokens") or name in ("asked_output", "text") else 0) for name in ROW.names or ()
    )
)
"""The row of a slot that was never sent."""


def _columns(flat: array[int], names: tuple[str, ...]) -> dict[str, Ints]:
    table = np.frombuffer(flat, np.int64).reshape(-1, len(names)) if len(flat) else np.zeros((0, len(names)), np.int64)
    return {name: np.ascontiguousarray(table[:, i]) for i, name in enumerate(names)}


def _place(rows: NDArray[np.void], number: Ints, schedule: Schedule) -> None:
    """Which slot each row is of: arithmetic on its number, as in `schedule`."""
    chain, turn = np.divmod(number, schedule.turns)
    firsts = np.array([span.first_chain for span in schedule.stages])
    lanes = np.array([span.lanes for span in schedule.stages])
    stage = np.searchsorted(firsts, chain, side="right") - 1
    lane = np.where(lanes[stage] > 0, (chain - firsts[stage]) % np.maximum(lanes[stage], 1), -1)
    session = chain if schedule.turns > 1 else -1
    for name, column in (("slot", number), ("request", number), ("stage", stage), ("session", session)):
        rows[name] = column
    rows["turn"], rows["lane"] = turn, lane


def _stretches(columns: dict[str, Ints], flat: array[int]) -> _Stretches:
    (row,) = np.nonzero(columns["last"] >= columns["start"])
    row = row[columns["start"][row] >= 0]
    final = _Stretches(row, columns["replica"][row], columns["start"][row], columns["last"][row])
    if not len(flat):
        return final
    earlier = _columns(flat, ("number", "replica", "first", "last"))
    order = np.argsort(columns["number"], kind="stable")
    places = np.searchsorted(columns["number"][order], earlier["number"])
    of_row = order[np.minimum(places, len(order) - 1)]
    parts = zip(final, (of_row, earlier["replica"], earlier["first"], earlier["last"]), strict=True)
    return _Stretches(*(np.concatenate(pair) for pair in parts))


def _events(
    stretches: _Stretches,
    chosen: Ints,
    at: Ints,
    stage: NDArray[Any],
    interval: int,
    gaps: list[Histogram],
    bins: list[Ints],
    largest: Ints,
    events: Ints,
) -> None:
    """The events of one replica: gaps and instants counted, largest gap and number of events by row.

    A stretch has an event at its first iteration, then in every `interval`-th, and at its last.
    """
    row, first, last = stretches.row[chosen], stretches.first[chosen], stretches.last[chosen]
    whole = (last - first) // interval  # gaps of a full interval
    rest = (last - first) % interval > 0
    of_stage = stage[row]
    places = at // BIN_NS
    for phase in range(min(interval, len(at))):
        series = at[phase::interval]  # stretches that begin in this phase have their full events here
        here = np.flatnonzero(first % interval == phase)
        if not len(here):
            continue
        begin, end = first[here] // interval, first[here] // interval + whole[here]
        lengths = np.diff(series)
        for s in np.unique(of_stage[here]).tolist():
            mine = of_stage[here] == s
            change = np.bincount(begin[mine], minlength=len(series) + 1)
            change = change - np.bincount(end[mine] + 1, minlength=len(series) + 1)
            emitted = np.cumsum(change)[: len(series)]
            started = np.bincount(begin[mine], minlength=len(series))
            weigh(gaps[s], lengths, (emitted - started)[1:])
            bins[s] += np.bincount(places[phase::interval], weights=emitted, minlength=len(bins[s])).astype(np.int64)
        many = end > begin
        if many.any():
            found = _range_max(lengths, begin[many], end[many])
            np.maximum.at(largest, row[here][many], found)
    if rest.any():
        cut = at[last[rest]] - at[first[rest] + whole[rest] * interval]
        np.maximum.at(largest, row[rest], cut)
        for s in np.unique(of_stage[rest]).tolist():
            mine = of_stage[rest] == s
            gaps[s].add(cut[mine])
            bins[s] += np.bincount(places[last[rest][mine]], minlength=len(bins[s]))
    np.add.at(events, row, 1 + whole + rest)


def _between(
    stretches: _Stretches, instants: list[Ints], stage: NDArray[Any], gaps: list[Histogram], largest: Ints
) -> None:
    """Gaps across pauses."""
    order = np.lexsort((stretches.first, stretches.row))
    row = stretches.row[order]
    (again,) = np.nonzero(np.diff(row) == 0)
    if not len(again):
        return
    one, next_one = order[again], order[again + 1]
    gap = np.array(
        [
            instants[replica][begin] - instants[replica][end]
            for replica, end, begin in zip(
                stretches.replica[one].tolist(), stretches.last[one].tolist(), stretches.first[next_one].tolist(),
                strict=True,
            )
        ],
        np.int64,
    )  # fmt: skip
    paused = row[again]
    np.maximum.at(largest, paused, gap)
    for s in np.unique(stage[paused]).tolist():
        gaps[s].add(gap[stage[paused] == s])


def weigh(histogram: Histogram, values: Ints, counts: Ints) -> None:
    """Add each value as often as its count says."""
    used = counts > 0
    if not used.any():
        return
    values, counts = values[used], counts[used]
    histogram.least_ns = min(histogram.least_ns, int(values.min()))
    histogram.largest_ns = max(histogram.largest_ns, int(values.max()))
    histogram.total_ns += int((values * counts).sum())
    histogram.counts += np.bincount(bucket(values), weights=counts, minlength=SIZE).astype(np.int64)


def _range_max(values: Ints, begin: Ints, end: Ints) -> Ints:
    """max(values[begin:end]) of every pair, begin < end: two overlapping powers of two each."""
    level = np.frexp(end - begin)[1] - 1  # floor(log2(end - begin))
    found = np.zeros(len(begin), np.int64)
    table = values
    for power in range(int(level.max()) + 1):
        if power:
            half = 1 << (power - 1)
            table = np.maximum(table[:-half], table[half:])
        (mine,) = np.nonzero(level == power)
        if len(mine):
            found[mine] = np.maximum(table[begin[mine]], table[end[mine] - (1 << power)])
    return found


def _fill(
    rows: NDArray[np.void],
    columns: dict[str, Ints],
    instants: list[Ints],
    largest: Ints,
    events: Ints,
    source: str,
    kept_cache: bool,
) -> None:
    """The rows of requests that were sent. The network takes no time here: sent when due, arrived when emitted."""
    offsets = np.concatenate([[0], np.cumsum([len(one) for one in instants])])
    every = np.concatenate([*instants, np.zeros(1, np.int64)])
    base = offsets[columns["replica"]]

    def instant(name: str) -> Ints:
        known = columns[name] >= 0
        return np.where(known, every[np.where(known, base + columns[name], 0)], -1)

    due, failed = columns["due_ns"], columns["kind"] > 0
    refused = columns["kind"] == KIND["http_4xx"]
    first = instant("first")
    last = np.where(first >= 0, instant("last"), -1)
    for name in ("due_ns", "ready_ns", "sent_ns", "first_byte_ns"):
        rows[name] = due
    for name in ("first_event_ns", "first_token_ns", "first_answer_ns"):
        rows[name] = first
    rows["last_token_ns"] = last
    rows["end_ns"] = last
    rows["done_ns"] = np.where(failed, columns["end_ns"], last)
    rows["status"] = np.where(failed, STATUS["failed"], STATUS["ok"])
    rows["kind"] = columns["kind"]
    rows["http_status"] = np.where(refused, 400, 200)
    rows["finish_reason"] = np.where(failed, FINISH[""], FINISH["length"])
    rows["max_gap_ns"] = largest
    rows["input_tokens"] = rows["built_tokens"] = columns["input"]
    rows["asked_output"] = columns["asked"]
    rows["output_tokens"] = np.where(failed & (columns["got"] == 0), -1, columns["got"])
    rows["cached_tokens"] = columns["cached"] if kept_cache else -1
    rows["reasoning_tokens"] = -1
    rows["first_event_tokens"] = first >= 0
    rows["output_events"] = events
    rows["input_source"] = np.where(refused, SOURCE[source], SOURCE["server"])
    rows["output_source"] = np.where(columns["got"] > 0, SOURCE["server"], 0)
    rows["reused"] = 1
    rows["text"] = np.where(failed, np.where(refused, 1, 0), -1)
