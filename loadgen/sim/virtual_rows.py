"""Converts what the replicas did into what a run records: rows, gaps between events, events per 10 ms.

Pure, on columns only. A request's timestamps are ends of iterations, so they are looked up. The gaps between its events
are lengths of iterations, so they are counted by how many sequences took part in each. No loop visits single events or
tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from loadgen.core.results.record import (
    BIN_NS,
    CUTS,
    FINISH,
    KIND,
    ROW,
    SOURCE,
    STATUS,
    Built,
    RowPlace,
    unsent_row,
)
from loadgen.core.schedule.chains import Conversations, Singles
from loadgen.core.schedule.timetable import Schedule
from loadgen.core.stats.quantiles import Histogram
from loadgen.sim.row_columns import Column, RowColumns
from loadgen.sim.virtual_gaps import Emitted, Ints, Stretches

Counts = NDArray[np.signedinteger[Any]]

FLIGHT = (
    "number",
    "due_ns",
    "replica",
    "first",
    "start",
    "last",
    "input",
    "asked",
    "got",
    "cached",
    "kind",
    "end_ns",
    "admitted_ns",
)
LONG = ("number", "due_ns", "end_ns", "admitted_ns")  # of FLIGHT; all others are below 2**31
"""The columns of each request that was sent. `first`, `start` and `last` are iterations: of its first token, of the
first token since it was last admitted, and of its last token (-1 if there is none). `input`, `asked`, `got` and
`cached` are tokens; 0 are asked of a request for values, which is answered when its prompt is prefilled. `kind` and
`end_ns` are a failure's kind and time (0 and -1 for an ok request). `admitted_ns` is its first admission (-1 if it
never was)."""


@dataclass(slots=True)
class Flights:
    """What the virtual-time driver records, as flat arrays that are appended to.

    `sent` has the columns of FLIGHT. `unsent` has (number, due, kind). `stretches` has (number, replica, first, last
    iteration) for each part of a paused request before the last one. `columns`: instead of `sent`, by name.
    """

    sent: array[int] = field(default_factory=lambda: array("q"))
    unsent: array[int] = field(default_factory=lambda: array("q"))
    stretches: array[int] = field(default_factory=lambda: array("q"))
    columns: dict[str, Ints] = field(default_factory=dict)

    def by_column(self) -> dict[str, Ints]:
        """What was sent, by the names of FLIGHT."""
        return self.columns or columns_of(self.sent, FLIGHT)


class VirtualRows(NamedTuple):
    """The arguments of `summary.summarize`: rows, and per stage the gaps and the events per 10 ms. `emitted`: the
    events themselves, where they were asked for.
    """

    rows: RowColumns
    gaps: list[Histogram]
    timeline: list[Ints]
    emitted: Emitted | None = None


def outcome(
    flights: Flights,
    ends: Sequence[Sequence[int] | Ints],
    schedule: Schedule,
    *,
    interval: int,
    source: str,
    kept_cache: bool,
    keep_events: bool = False,
) -> VirtualRows:
    """The rows, gaps and timeline of a virtual run.

    `ends`: end times of each replica's iterations. `interval`: tokens per event after the first. `source`: source of
    the prompt counts as built. `kept_cache`: whether the server reports how much of a prompt it had in its cache.
    """
    columns = flights.by_column()
    stages, sent = len(schedule.stages), len(columns["number"])
    unsent = np.asarray(flights.unsent, np.int64).reshape(-1, 3)
    slots = _slots(
        np.concatenate([columns["number"], unsent[:, 0]]) if len(unsent) else columns["number"],
        schedule,
    )
    instants = [np.asarray(of_replica, np.int64) for of_replica in ends]
    stretches = _stretches(columns, flights.stretches)
    gaps = [Histogram() for _ in range(stages)]
    largest = np.zeros(sent, np.int64)
    events = np.zeros(sent, np.int32)
    stage = np.asarray(slots["stage"])[:sent]
    order = np.argsort(stretches.replica, kind="stable")
    bounds = np.searchsorted(stretches.replica[order], np.arange(len(ends) + 1))
    n_bins = max((int(times[-1]) for times in instants if len(times)), default=0) // BIN_NS + 1
    bins = [np.zeros(n_bins, np.int64) for _ in range(stages)]
    for replica, replica_ends in enumerate(instants):
        chosen = order[bounds[replica] : bounds[replica + 1]]
        if len(chosen):
            _count_events(
                stretches, chosen, replica_ends, stage, interval, gaps, bins, largest, events
            )
    _add_pause_gaps(stretches, instants, stage, gaps, largest)
    emitted = Emitted(columns["number"], stretches, instants, interval) if keep_events else None
    del stretches, order
    timeline = [
        counts[: int(np.flatnonzero(counts)[-1]) + 1] if counts.any() else counts[:0]
        for counts in bins
    ]
    values = _of_sent(columns, instants, largest, events, source, kept_cache)
    if len(unsent):
        values = _with_unsent(values, sent, unsent)
    return VirtualRows(RowColumns(sent + len(unsent), {**values, **slots}), gaps, timeline, emitted)


def rows_so_far(
    columns: dict[str, Ints], first_ns: Ints, last_ns: Ints, schedule: Schedule
) -> NDArray[np.void]:
    """The rows of requests that have ended, while the run goes on, from the columns of FLIGHT and when each had its
    first and its last token (-1: never). They know nothing of gaps and events.
    """
    count, of_replica = len(first_ns), columns["replica"]
    place, none = np.arange(count), np.zeros(count, np.int64)
    only = {
        "first": np.where(columns["first"] >= 0, place, -1),
        "last": np.where(columns["last"] >= 0, count + place, -1),
    }
    instants = [np.concatenate([first_ns, last_ns])]
    values = _of_sent(
        {**columns, **only, "replica": none}, instants, none, none, "estimate", kept_cache=False
    )
    rows = np.zeros(count, ROW)
    for name, column in {
        **values,
        **_slots(columns["number"], schedule),
        "replica": of_replica,
    }.items():
        rows[name] = column
    return rows


def columns_of(flat: Any, names: tuple[str, ...]) -> dict[str, Ints]:
    """The columns of a flat array, in its own memory."""
    return dict(zip(names, np.asarray(flat, np.int64).reshape(-1, len(names)).T, strict=True))


def _slots(number: Ints, schedule: Schedule) -> dict[str, Column]:
    """Which slot each row belongs to, computed from its number as in `schedule`."""
    chain, turn = (
        np.divmod(number, schedule.turns)
        if schedule.turns > 1
        else (number, np.zeros(len(number), np.int8))
    )
    is_session = np.full(len(number), schedule.turns > 1)
    if not isinstance(
        schedule.chains, Conversations | Singles
    ):  # the last place is not always the last turn
        chains, which = np.unique(chain, return_inverse=True)
        made = [schedule.chains.of(one) for one in chains.tolist()]
        is_session = np.array([one.is_session for one in made], np.bool_)[which]
        turn = np.minimum(turn, np.array([len(one.waits) - 1 for one in made], np.int64)[which])
    firsts = np.array([span.first_chain for span in schedule.stages])
    lanes = np.array([span.lanes for span in schedule.stages])
    stage = (np.searchsorted(firsts, chain, side="right") - 1).astype(np.int16)
    lane: Column = -1
    if lanes.any():
        lane = np.where(lanes[stage] > 0, (chain - firsts[stage]) % np.maximum(lanes[stage], 1), -1)
    session: Column = np.where(is_session, chain, -1) if is_session.any() else -1
    return {
        "slot": number,
        "request": number,
        "session": session,
        "stage": stage,
        "turn": turn,
        "lane": lane,
    }


def _with_unsent(values: dict[str, Column], sent: int, unsent: Ints) -> dict[str, Column]:
    """The columns of what was sent, and after them those of what never was: number, due instant and kind of each."""
    blank = np.frombuffer(
        unsent_row(RowPlace(*(0,) * 8), -1, "", "dropped", Built(-1, "", -1)), ROW
    )[0]
    status = np.full(len(unsent), int(blank["status"]))
    for kind, name in CUTS.items():
        status[unsent[:, 2] == KIND[kind]] = STATUS[name]
    own: dict[str, Column] = {"due_ns": unsent[:, 1], "kind": unsent[:, 2], "status": status}
    joined: dict[str, Column] = {}
    for name in ROW.names or ():
        parts = values.get(name, 0), own.get(name, int(blank[name]))
        whole = [
            np.full(length, part) if isinstance(part, int) else part
            for part, length in zip(parts, (sent, len(unsent)), strict=True)
        ]
        joined[name] = (
            parts[0]
            if isinstance(parts[0], int) and parts[0] == parts[1]
            else np.concatenate(whole)
        )
    return joined


def _stretches(columns: dict[str, Ints], flat: array[int]) -> Stretches:
    (row,) = np.nonzero(columns["last"] >= columns["start"])
    row = row[columns["start"][row] >= 0]
    final = Stretches(row, columns["replica"][row], columns["start"][row], columns["last"][row])
    if not len(flat):
        return final
    earlier = columns_of(flat, ("number", "replica", "first", "last"))
    order = np.argsort(columns["number"], kind="stable")
    places = np.searchsorted(columns["number"][order], earlier["number"])
    of_row = order[np.minimum(places, len(order) - 1)]
    parts = zip(final, (of_row, earlier["replica"], earlier["first"], earlier["last"]), strict=True)
    return Stretches(*(np.concatenate(pair) for pair in parts))


def _count_events(
    stretches: Stretches,
    chosen: Ints,
    ends: Ints,
    stage: NDArray[Any],
    interval: int,
    gaps: list[Histogram],
    bins: list[Ints],
    largest: Ints,
    events: Counts,
) -> None:
    """Count the events of one replica: gaps and times per stage, largest gap and number of events per row.

    A stretch has an event at its first iteration, then at every `interval`-th, and at its last.
    """
    row, first, last = stretches.row[chosen], stretches.first[chosen], stretches.last[chosen]
    full_gaps = (last - first) // interval  # number of gaps of a full interval
    has_rest = (last - first) % interval > 0
    of_stage = stage[row]
    places = ends // BIN_NS
    for phase in range(min(interval, len(ends))):
        phase_ends = ends[
            phase::interval
        ]  # iterations in which stretches of this phase have their full events
        in_phase = np.flatnonzero(first % interval == phase)
        if not len(in_phase):
            continue
        begin, end = first[in_phase] // interval, first[in_phase] // interval + full_gaps[in_phase]
        lengths = np.diff(phase_ends)
        for stage_index in np.unique(of_stage[in_phase]).tolist():
            in_stage = of_stage[in_phase] == stage_index
            change = np.bincount(begin[in_stage], minlength=len(phase_ends) + 1)
            change = change - np.bincount(end[in_stage] + 1, minlength=len(phase_ends) + 1)
            emitted = np.cumsum(change)[: len(phase_ends)]
            started = np.bincount(begin[in_stage], minlength=len(phase_ends))
            gaps[stage_index].add(lengths, (emitted - started)[1:])
            in_bins = np.bincount(
                places[phase::interval], weights=emitted, minlength=len(bins[stage_index])
            )
            bins[stage_index] += in_bins.astype(np.int64)
        has_gaps = end > begin
        if has_gaps.any():
            largest_gaps = _range_max(lengths, begin[has_gaps], end[has_gaps])
            np.maximum.at(largest, row[in_phase][has_gaps], largest_gaps)
    if has_rest.any():
        last_gaps = ends[last[has_rest]] - ends[first[has_rest] + full_gaps[has_rest] * interval]
        np.maximum.at(largest, row[has_rest], last_gaps)
        for stage_index in np.unique(of_stage[has_rest]).tolist():
            in_stage = of_stage[has_rest] == stage_index
            gaps[stage_index].add(last_gaps[in_stage])
            bins[stage_index] += np.bincount(
                places[last[has_rest][in_stage]], minlength=len(bins[stage_index])
            )
    np.add.at(events, row, 1 + full_gaps + has_rest)


def _add_pause_gaps(
    stretches: Stretches,
    instants: list[Ints],
    stage: NDArray[Any],
    gaps: list[Histogram],
    largest: Ints,
) -> None:
    """Add the gaps between the stretches of paused requests."""
    order = np.lexsort((stretches.first, stretches.row))
    row = stretches.row[order]
    (same_row,) = np.nonzero(np.diff(row) == 0)
    if not len(same_row):
        return
    before, after = order[same_row], order[same_row + 1]
    gap = np.array(
        [
            instants[replica][begin] - instants[replica][end]
            for replica, end, begin in zip(
                stretches.replica[before].tolist(),
                stretches.last[before].tolist(),
                stretches.first[after].tolist(),
                strict=True,
            )
        ],
        np.int64,
    )
    paused = row[same_row]
    np.maximum.at(largest, paused, gap)
    for stage_index in np.unique(stage[paused]).tolist():
        gaps[stage_index].add(gap[stage[paused] == stage_index])


def _range_max(values: Ints, begin: Ints, end: Ints) -> Ints:
    """max(values[begin:end]) for each pair, begin < end: the maximum of two overlapping ranges of length 2^k."""
    level = np.frexp(end - begin)[1] - 1  # floor(log2(end - begin))
    maxima = np.zeros(len(begin), np.int64)
    table = values
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


def _of_sent(
    columns: dict[str, Ints],
    instants: list[Ints],
    largest: Ints,
    events: Counts,
    source: str,
    kept_cache: bool,
) -> dict[str, Column]:
    """The columns of sent requests. The network takes no time: sent when due, received when emitted. Takes what is
    needed no more out of `columns`.
    """
    offsets = np.concatenate([[0], np.cumsum([len(times) for times in instants])])
    all_instants = np.concatenate([*instants, np.zeros(1, np.int64)])
    replica = columns.pop("replica")

    def instant(name: str) -> Ints:
        iteration = columns.pop(name)
        is_known = iteration >= 0
        if is_known.all():
            return all_instants[offsets[replica] + iteration]
        return np.where(
            is_known, all_instants[np.where(is_known, offsets[replica] + iteration, 0)], -1
        )

    due, kind, asked, got = (columns.pop(name) for name in ("due_ns", "kind", "asked", "got"))
    failed, refused = kind > 0, kind == KIND["http_4xx"]
    prefilled = first = instant("first")
    answered = first >= 0
    last = instant("last")
    if not answered.all():
        last = np.where(answered, last, -1)
    end = last
    for_values = (asked == 0) & answered  # no token comes: the prefill is the answer
    if for_values.any():
        first, last = np.where(for_values, -1, first), np.where(for_values, -1, last)
        end = np.where(for_values, prefilled, last)
    status = np.where(failed, STATUS["failed"], STATUS["ok"])
    text = np.where(refused, 1, np.where(failed, 0, -1))
    for name, word, words in (
        ("unfinished", "unfinished", 2),
        ("interrupted", "cancelled", 3),
        ("abandoned", "cancelled", 4),
        ("reset", "failed", 5),
    ):
        status[kind == KIND[name]] = STATUS[word]
        text[kind == KIND[name]] = words
    admitted, input_tokens, ended = (
        columns.pop("admitted_ns"),
        columns.pop("input"),
        columns.pop("end_ns"),
    )
    was_admitted, has_first = admitted >= 0, first >= 0
    return {
        **dict.fromkeys(("due_ns", "ready_ns", "sent_ns", "first_byte_ns"), due),
        **dict.fromkeys(("first_token_ns", "first_answer_ns"), first),
        "first_event_ns": prefilled,
        "last_token_ns": last,
        "end_ns": end,
        "done_ns": np.where(failed, ended, end) if failed.any() else end,
        "status": status,
        "kind": kind,
        "http_status": np.where(refused, 400, 200),
        "finish_reason": np.where(
            failed, FINISH[""], np.where(for_values, FINISH["stop"], FINISH["length"])
        ),
        "max_gap_ns": largest,
        **dict.fromkeys(("input_tokens", "built_tokens"), input_tokens),
        "asked_output": asked,
        "output_tokens": np.where(failed & (got == 0), -1, got),
        "cached_tokens": columns.pop("cached") if kept_cache else -1,
        "first_event_tokens": has_first,
        "output_events": events,
        "input_source": np.where(refused, SOURCE[source], SOURCE["server"]),
        "output_source": np.where(got > 0, SOURCE["server"], 0),
        "reused": 1,
        "replica": replica,
        "server_queue_ns": np.where(was_admitted, admitted - due, -1),
        "server_prefill_ns": np.where(was_admitted & (prefilled >= 0), prefilled - admitted, -1),
        "server_decode_ns": np.where(has_first, last - first, -1),
        **dict.fromkeys(
            ("reasoning_tokens", "server_transfer_ns", "draft_tokens", "accepted_tokens"), -1
        ),
        "cache_written_tokens": -1,
        "tcp_ns": -1,
        "tls_ns": -1,
        "text": text,
    }
