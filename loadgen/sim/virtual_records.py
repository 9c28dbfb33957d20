"""Converts what happened in a simulated run into records, gaps and events per 10 ms.

Pure, on columns only. A request's timestamps are ends of iterations, so they are looked up. The
gaps between its events are lengths of iterations, so they are counted by how many sequences took
part in each. No loop visits single events or tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    RecordKey,
    unsent_record,
)
from loadgen.core.schedule.schedule import Schedule
from loadgen.core.schedule.sessions import Conversations, SingleRequests
from loadgen.core.stats.quantiles import Histogram
from loadgen.sim.event_gaps import Emitted, Ints, Stretches
from loadgen.sim.record_columns import Column, RecordColumns
from loadgen.sim.simulated_requests import (
    PauseColumns,
    SentColumns,
    SimulatedRequests,
    UnsentColumns,
)

Counts = NDArray[np.signedinteger[Any]]


class VirtualRecords(NamedTuple):
    """What a simulated run recorded, as `summary.summarize` takes it.

    `gaps` and `timeline` (events per 10 ms) have one entry per stage. `emitted` holds the single
    events if they were requested.
    """

    rows: RecordColumns
    gaps: list[Histogram]
    timeline: list[Ints]
    emitted: Emitted | None = None


def build_records(
    requests: SimulatedRequests,
    ends: Sequence[Ints],
    schedule: Schedule,
    *,
    interval: int,
    source: str,
    kept_cache: bool,
    keep_events: bool = False,
) -> VirtualRecords:
    """Return the records, gaps and timeline of a simulated run.

    Args:
        requests: What happened to the requests.
        ends: The end times of the iterations of each replica, in ns.
        schedule: The schedule as it was carried out.
        interval: Tokens per event after the first one.
        source: Where the prompt token counts come from, a name of `record.SOURCE`.
        kept_cache: Whether the server reports how much of a prompt it had in its cache.
        keep_events: Whether the result holds the single events.
    """
    sent = requests.sent()
    unsent = requests.unsent()
    number = sent.number
    if len(unsent):
        number = np.concatenate([number, unsent.number])
    slots = _slots(number, schedule)
    stretches = _stretches(sent, requests.pauses())
    stage = np.asarray(slots["stage"])[: len(sent)]
    counts = _count_all_events(stretches, ends, stage, len(schedule.stages), interval)
    emitted = Emitted(sent.number, stretches, ends, interval) if keep_events else None
    del stretches
    values = _columns_of_sent(
        sent,
        first_ns=_iteration_ends(ends, sent, sent.first_iteration),
        last_ns=_iteration_ends(ends, sent, sent.last_iteration),
        source=source,
        kept_cache=kept_cache,
    )
    values["max_gap_ns"] = counts.largest_gap_ns
    values["output_events"] = counts.events
    if len(unsent):
        values = _with_unsent(values, len(sent), unsent)
    rows = RecordColumns(len(number), {**values, **slots})
    return VirtualRecords(rows, counts.gaps, counts.timeline, emitted)


def records_of_ended_requests(
    sent: SentColumns, *, first_ns: Ints, last_ns: Ints, schedule: Schedule
) -> NDArray[np.void]:
    """Return the records of requests that have ended, while the run goes on.

    `first_ns` and `last_ns` are the times of their first and last token, -1 where there was none.
    Gaps and events are not known yet.
    """
    values = _columns_of_sent(
        sent, first_ns=first_ns, last_ns=last_ns, source="estimate", kept_cache=False
    )
    rows = np.zeros(len(sent), ROW)
    for name, column in {**values, **_slots(sent.number, schedule)}.items():
        rows[name] = column
    return rows


def _iteration_ends(ends: Sequence[Ints], sent: SentColumns, iterations: Ints) -> Ints:
    """Return when these iterations of the requests' replicas ended, -1 for an iteration of -1."""
    offsets = np.concatenate([[0], np.cumsum([len(of_replica) for of_replica in ends])])
    all_ends = np.concatenate([*ends, np.zeros(1, np.int64)])
    is_known = iterations >= 0
    if is_known.all():
        found: Ints = all_ends[offsets[sent.replica] + iterations]
        return found
    places = np.where(is_known, offsets[sent.replica] + iterations, 0)
    return np.where(is_known, all_ends[places], -1)


def _slots(number: Ints, schedule: Schedule) -> dict[str, Column]:
    """Which slot each row belongs to, computed from its number as in `schedule`."""
    chain, turn = (
        np.divmod(number, schedule.max_turns)
        if schedule.max_turns > 1
        else (number, np.zeros(len(number), np.int8))
    )
    is_session = np.full(len(number), schedule.max_turns > 1)
    if not isinstance(
        schedule.sessions, Conversations | SingleRequests
    ):  # the last place is not always the last turn
        chains, which = np.unique(chain, return_inverse=True)
        made = [schedule.sessions.get(one) for one in chains.tolist()]
        is_session = np.array([not one.is_single_request for one in made], np.bool_)[which]
        turn = np.minimum(turn, np.array([one.turn_count - 1 for one in made], np.int64)[which])
    firsts = np.array([span.first_session for span in schedule.stages])
    lanes = np.array([span.concurrency for span in schedule.stages])
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
        "virtual_user": lane,
    }


def _with_unsent(
    values: dict[str, Column], sent_count: int, unsent: UnsentColumns
) -> dict[str, Column]:
    """Return the columns of the sent requests, extended by the requests that were never sent."""
    blank = np.frombuffer(
        unsent_record(RecordKey(*(0,) * 8), -1, "", "dropped", Built(-1, "", -1)), ROW
    )[0]
    status = np.full(len(unsent), int(blank["status"]))
    for kind, name in CUTS.items():
        status[unsent.reason == KIND[kind]] = STATUS[name]
    unsent_values: dict[str, Column] = {
        "due_ns": unsent.due_ns,
        "kind": unsent.reason,
        "status": status,
    }
    joined: dict[str, Column] = {}
    for name in ROW.names or ():
        of_sent = values.get(name, 0)
        of_unsent = unsent_values.get(name, int(blank[name]))
        if isinstance(of_sent, int) and of_sent == of_unsent:
            joined[name] = of_sent
            continue
        joined[name] = np.concatenate(
            [_as_column(of_sent, sent_count), _as_column(of_unsent, len(unsent))]
        )
    return joined


def _as_column(values: Column, length: int) -> NDArray[Any]:
    return np.full(length, values) if isinstance(values, int) else values


def _stretches(sent: SentColumns, pauses: PauseColumns) -> Stretches:
    """Return the unbroken series of iterations in which each request got tokens."""
    has_tokens = (sent.last_iteration >= sent.resumed_iteration) & (sent.resumed_iteration >= 0)
    (row,) = np.nonzero(has_tokens)
    final = Stretches(row, sent.replica[row], sent.resumed_iteration[row], sent.last_iteration[row])
    if not len(pauses):
        return final
    order = np.argsort(sent.number, kind="stable")
    places = np.searchsorted(sent.number[order], pauses.number)
    paused_row = order[np.minimum(places, len(order) - 1)]
    return Stretches(
        row=np.concatenate([final.row, paused_row]),
        replica=np.concatenate([final.replica, pauses.replica]),
        first=np.concatenate([final.first, pauses.first_iteration]),
        last=np.concatenate([final.last, pauses.last_iteration]),
    )


class _EventCounts(NamedTuple):
    """What the events of a run amount to, per stage (`gaps`, `timeline`) and per sent request."""

    gaps: list[Histogram]
    timeline: list[Ints]
    largest_gap_ns: Ints
    events: Counts


def _count_all_events(
    stretches: Stretches, ends: Sequence[Ints], stage: NDArray[Any], stages: int, interval: int
) -> _EventCounts:
    """Count the events of all replicas; `stage` is the stage of each sent request."""
    gaps = [Histogram() for _ in range(stages)]
    largest = np.zeros(len(stage), np.int64)
    events = np.zeros(len(stage), np.int32)
    last_end_ns = max((int(times[-1]) for times in ends if len(times)), default=0)
    bins = [np.zeros(last_end_ns // BIN_NS + 1, np.int64) for _ in range(stages)]
    order = np.argsort(stretches.replica, kind="stable")
    bounds = np.searchsorted(stretches.replica[order], np.arange(len(ends) + 1))
    for replica, replica_ends in enumerate(ends):
        chosen = order[bounds[replica] : bounds[replica + 1]]
        if len(chosen):
            _count_events(
                stretches, chosen, replica_ends, stage, interval, gaps, bins, largest, events
            )
    _add_pause_gaps(stretches, ends, stage, gaps, largest)
    timeline = [
        counts[: int(np.flatnonzero(counts)[-1]) + 1] if counts.any() else counts[:0]
        for counts in bins
    ]
    return _EventCounts(gaps, timeline, largest, events)


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
    """Count the events of one replica.

    Gaps and times are counted per stage, the largest gap and the number of events per row.

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
    ends: Sequence[Ints],
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
            ends[replica][begin] - ends[replica][end]
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
    """Return max(values[begin:end]) for each pair, begin < end.

    It is the maximum of two overlapping ranges of length 2^k.
    """
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


# Kinds of failure that are no error of the server: the status of their records, and the index of
# their text in `virtual_backend.TEXTS`.
_CUT_REQUESTS = (
    ("unfinished", "unfinished", 2),
    ("interrupted", "cancelled", 3),
    ("abandoned", "cancelled", 4),
    ("reset", "failed", 5),
)


def _columns_of_sent(
    sent: SentColumns, *, first_ns: Ints, last_ns: Ints, source: str, kept_cache: bool
) -> dict[str, Column]:
    """Return the columns of the records of sent requests, without gaps and events.

    The network takes no time: a request is sent when it is due, and a token is received when it is
    emitted.
    """
    failed = sent.failure > 0
    refused = sent.failure == KIND["http_4xx"]
    has_output = first_ns >= 0
    # A request for values gets no token: the end of its prefill is the response.
    is_for_values = (sent.requested_tokens == 0) & has_output
    first_token_ns = np.where(is_for_values, -1, first_ns)
    last_token_ns = np.where(has_output & ~is_for_values, last_ns, -1)
    end_ns = np.where(is_for_values, first_ns, last_token_ns)
    status = np.where(failed, STATUS["failed"], STATUS["ok"])
    text = np.where(refused, 1, np.where(failed, 0, -1))
    for kind, status_name, text_index in _CUT_REQUESTS:
        is_kind = sent.failure == KIND[kind]
        status[is_kind] = STATUS[status_name]
        text[is_kind] = text_index
    was_admitted = sent.admitted_ns >= 0
    has_tokens = first_token_ns >= 0
    finish_reason = np.where(is_for_values, FINISH["stop"], FINISH["length"])
    return {
        "due_ns": sent.due_ns,
        "ready_ns": sent.due_ns,
        "sent_ns": sent.due_ns,
        "first_byte_ns": sent.due_ns,
        "first_token_ns": first_token_ns,
        "first_answer_ns": first_token_ns,
        "first_event_ns": first_ns,
        "last_token_ns": last_token_ns,
        "end_ns": end_ns,
        "done_ns": np.where(failed, sent.failed_ns, end_ns),
        "status": status,
        "kind": sent.failure,
        "http_status": np.where(refused, 400, 200),
        "finish_reason": np.where(failed, FINISH[""], finish_reason),
        "input_tokens": sent.input_tokens,
        "built_tokens": sent.input_tokens,
        "asked_output": sent.requested_tokens,
        "output_tokens": np.where(failed & (sent.output_tokens == 0), -1, sent.output_tokens),
        "cached_tokens": sent.cached_tokens if kept_cache else -1,
        "first_event_tokens": has_tokens,
        "input_source": np.where(refused, SOURCE[source], SOURCE["server"]),
        "output_source": np.where(sent.output_tokens > 0, SOURCE["server"], 0),
        "reused": 1,
        "replica": sent.replica,
        "server_queue_ns": np.where(was_admitted, sent.admitted_ns - sent.due_ns, -1),
        "server_prefill_ns": np.where(was_admitted & has_output, first_ns - sent.admitted_ns, -1),
        "server_decode_ns": np.where(has_tokens, last_token_ns - first_token_ns, -1),
        "server_transfer_ns": -1,
        "reasoning_tokens": -1,
        "draft_tokens": -1,
        "accepted_tokens": -1,
        "cache_written_tokens": -1,
        "tcp_ns": -1,
        "tls_ns": -1,
        "text": text,
    }
