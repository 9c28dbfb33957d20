"""Convert what happened in a simulated run into request records.

All records are built together, one NumPy column per field, because a run can have millions. Tokens
are emitted when an iteration of a replica ends, so the timestamps of a request are looked up in the
end times of the iterations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from loadgen.core.results.record import (
    CUTS,
    FINISH,
    KIND,
    ROW,
    SOURCE,
    STATUS,
    RecordKey,
    RequestFacts,
    encode_unsent_record,
)
from loadgen.core.schedule.schedule import Schedule
from loadgen.core.schedule.sessions import Conversations, SingleRequests
from loadgen.core.stats.histogram import Histogram
from loadgen.sim.event_counts import count_events
from loadgen.sim.event_gaps import EmittedEvents, Ints, TokenSpans
from loadgen.sim.record_columns import Column, RecordColumns
from loadgen.sim.simulated_requests import (
    PauseColumns,
    SentColumns,
    SimulatedRequests,
    UnsentColumns,
)


class VirtualRecords(NamedTuple):
    """What a simulated run recorded.

    Attributes:
        records: The record of each request.
        gaps: The gaps between the output events of a request in ns, as one histogram per stage.
        timeline: The number of output events per BIN_NS (10 ms), for each stage.
        events: The single output events, or None if they were not requested.
    """

    records: RecordColumns
    gaps: list[Histogram]
    timeline: list[Ints]
    events: EmittedEvents | None = None


class RecordOptions(NamedTuple):
    """What records contain that does not follow from the simulation.

    Attributes:
        tokens_per_event: Tokens of each output event after the first.
        source: Where the prompt token counts come from, a name of `record.SOURCE`.
        reports_cached_tokens: Whether the server reports how much of a prompt was in its cache.
        keep_events: Whether the single events are kept.
    """

    tokens_per_event: int
    source: str
    reports_cached_tokens: bool
    keep_events: bool = False


def build_records(
    requests: SimulatedRequests,
    iteration_ends_ns: Sequence[Ints],
    schedule: Schedule,
    options: RecordOptions,
) -> VirtualRecords:
    """Return the records, gaps and timeline of a simulated run.

    The records of sent requests come first, in the order in which the requests ended. Those of
    requests that were never sent follow.

    Args:
        requests: What happened to the requests.
        iteration_ends_ns: The end times of the iterations of each replica.
        schedule: The schedule that was simulated.
        options: What does not follow from the simulation.
    """
    sent = requests.sent_columns()
    unsent = requests.unsent_columns()
    slot = np.concatenate([sent.slot, unsent.slot]) if len(unsent) else sent.slot
    slot_columns = _build_slot_columns(slot, schedule)

    spans = _build_token_spans(sent, requests.pause_columns())
    stage_of_sent = np.asarray(slot_columns["stage"])[: len(sent)]
    counts = count_events(
        spans,
        iteration_ends_ns,
        stage_of_sent,
        stage_count=len(schedule.stages),
        tokens_per_event=options.tokens_per_event,
    )
    events = None
    if options.keep_events:
        events = EmittedEvents(sent.slot, spans, iteration_ends_ns, options.tokens_per_event)
    del spans  # they need as much memory as the records

    columns = _build_sent_columns(
        sent,
        first_ns=_look_up_ends_ns(iteration_ends_ns, sent, sent.first_iteration),
        last_ns=_look_up_ends_ns(iteration_ends_ns, sent, sent.last_iteration),
        source=options.source,
        reports_cached_tokens=options.reports_cached_tokens,
    )
    columns["max_gap_ns"] = counts.largest_gap_ns
    columns["output_events"] = counts.events
    if len(unsent):
        columns = _append_unsent(columns, len(sent), unsent)
    records = RecordColumns(len(slot), {**columns, **slot_columns})
    return VirtualRecords(records, counts.gaps, counts.timeline, events)


def records_of_ended_requests(
    sent: SentColumns, *, first_ns: Ints, last_ns: Ints, schedule: Schedule
) -> NDArray[np.void]:
    """Return the records of requests that have ended, for an interim check during the run.

    Gaps and events are not known yet, so their fields are 0.

    Args:
        sent: The requests.
        first_ns: When each of them got its first token, -1 if it got none.
        last_ns: When each of them got its last token, -1 if it got none.
        schedule: The schedule that is simulated.
    """
    columns = _build_sent_columns(
        sent, first_ns=first_ns, last_ns=last_ns, source="estimate", reports_cached_tokens=False
    )
    columns |= _build_slot_columns(sent.slot, schedule)
    records = np.zeros(len(sent), ROW)
    for name, column in columns.items():
        records[name] = column
    return records


def _look_up_ends_ns(
    iteration_ends_ns: Sequence[Ints], sent: SentColumns, iterations: Ints
) -> Ints:
    """Return when one iteration ended for each sent request, such as that of its first token.

    Args:
        iteration_ends_ns: The end times of the iterations of each replica.
        sent: The requests, each with the index of its replica.
        iterations: For each request, the number of an iteration of its replica, or -1.

    Returns:
        The end times in ns, -1 where the iteration is -1.
    """
    # The end times of all replicas are in one array, so that one look-up serves all of them. The 0
    # at its end is never used. Without it the array could be empty, which cannot be indexed.
    all_ends_ns = np.concatenate([*iteration_ends_ns, np.zeros(1, np.int64)])
    offset_of_replica = np.cumsum([0, *map(len, iteration_ends_ns)])
    has_iteration = iterations >= 0
    indexes = np.where(has_iteration, offset_of_replica[sent.replica] + iterations, 0)
    return np.where(has_iteration, all_ends_ns[indexes], -1)


def _build_slot_columns(slot: Ints, schedule: Schedule) -> dict[str, Column]:
    """Return the fields that tell which slot of the schedule each record is for.

    All of them follow from the index of the slot: its session, its turn in the session, its stage,
    and in a closed loop its virtual user. A single request is no session, so its session is -1.
    """
    session, turn, is_session = _split_slots(slot, schedule)
    first_sessions = np.array([stage.first_session for stage in schedule.stages])
    stage = (np.searchsorted(first_sessions, session, side="right") - 1).astype(np.int16)
    return {
        "slot": slot,
        "request": slot,
        "session": np.where(is_session, session, -1) if is_session.any() else -1,
        "stage": stage,
        "turn": turn,
        "virtual_user": _virtual_users(session, stage, schedule),
    }


class _SlotColumns(NamedTuple):
    """Which session each slot belongs to.

    Attributes:
        session: The number of the session. A single request counts as a session here.
        turn: The turn of the session.
        is_session: Whether the session is a conversation or a task, and no single request.
    """

    session: Ints
    turn: NDArray[np.signedinteger[Any]]
    is_session: NDArray[np.bool_]


def _split_slots(slot: Ints, schedule: Schedule) -> _SlotColumns:
    """Return the session and the turn of each slot.

    Slots are numbered session after session, `max_turns` numbers for each. A session with fewer
    turns leaves some of its numbers unused, except that its last number stands for its last turn.
    """
    if schedule.max_turns > 1:
        session, turn = np.divmod(slot, schedule.max_turns)
    else:
        session = slot
        turn = np.zeros(len(slot), np.int8)
    if isinstance(schedule.sessions, Conversations | SingleRequests):
        return _SlotColumns(session, turn, np.full(len(slot), schedule.max_turns > 1))

    # Sessions differ. Each one is looked up once, and the result is repeated for all its slots.
    session_numbers, session_of_slot = np.unique(session, return_inverse=True)
    sessions = [schedule.sessions.get(number) for number in session_numbers.tolist()]
    last_turns = np.array([content.turn_count - 1 for content in sessions], np.int64)
    are_sessions = np.array([not content.is_single_request for content in sessions], np.bool_)
    return _SlotColumns(
        session,
        turn=np.minimum(turn, last_turns[session_of_slot]),
        is_session=are_sessions[session_of_slot],
    )


def _virtual_users(session: Ints, stage: NDArray[np.int16], schedule: Schedule) -> Column:
    """Return the virtual user of each slot, -1 in an open loop.

    In a closed loop, the sessions of a stage are assigned to its virtual users round-robin.
    """
    concurrency = np.array([stage.concurrency for stage in schedule.stages])
    if not concurrency.any():
        return -1
    first_sessions = np.array([stage.first_session for stage in schedule.stages])
    users_of_stage = np.maximum(concurrency[stage], 1)  # an open loop has 0, no divisor
    virtual_user = (session - first_sessions[stage]) % users_of_stage
    return np.where(concurrency[stage] > 0, virtual_user, -1)


def _append_unsent(
    sent_columns: dict[str, Column], sent_count: int, unsent: UnsentColumns
) -> dict[str, Column]:
    """Return the columns of the sent requests, extended by the requests that were never sent.

    A column with the same value in all records stays a single number, which saves memory.
    """
    unsent_columns = _build_unsent_columns(unsent)
    columns: dict[str, Column] = {}
    for name in ROW.names or ():
        sent_values = sent_columns.get(name, 0)
        unsent_values = unsent_columns[name]
        if isinstance(sent_values, int) and sent_values == unsent_values:
            columns[name] = sent_values
            continue
        columns[name] = np.concatenate(
            [_as_array(sent_values, sent_count), _as_array(unsent_values, len(unsent))]
        )
    return columns


def _build_unsent_columns(unsent: UnsentColumns) -> dict[str, Column]:
    """Return all columns of the requests that were never sent.

    They are those of a dropped request, except that a request counts as unfinished or cancelled if
    it was not sent because the run had ended (`record.CUTS`).
    """
    dropped = _dropped_record()
    status = np.full(len(unsent), int(dropped["status"]))
    for kind, status_name in CUTS.items():
        status[unsent.reason == KIND[kind]] = STATUS[status_name]
    columns: dict[str, Column] = {name: int(dropped[name]) for name in ROW.names or ()}
    columns["due_ns"] = unsent.due_ns
    columns["kind"] = unsent.reason
    columns["status"] = status
    return columns


def _dropped_record() -> Any:
    """Return the record of a dropped request, for the fields that all unsent requests share.

    It comes from the function that runs over HTTP use, too, so that the fields agree. The fields
    of its key are placeholders, because each request has its own.
    """
    key = RecordKey(0, 0, 0, 0, 0, session=0, turn=0, virtual_user=0)
    data = encode_unsent_record(key, -1, "", "dropped", RequestFacts(-1, "", -1))
    return np.frombuffer(data, ROW)[0]


def _as_array(values: Column, length: int) -> NDArray[Any]:
    """Return the values of a column, which may be one number for all records."""
    return np.full(length, values) if isinstance(values, int) else values


def _build_token_spans(sent: SentColumns, pauses: PauseColumns) -> TokenSpans:
    """Return the unbroken spans of iterations in which requests got tokens.

    A request has one span since its last admission, and one before each of its pauses. A request
    that got no token since its last admission (`resumed_iteration` is -1, or the last iteration is
    before it) has no span for that time.
    """
    is_resumed = sent.resumed_iteration >= 0
    has_tokens = is_resumed & (sent.last_iteration >= sent.resumed_iteration)
    (record_index,) = np.nonzero(has_tokens)
    final_spans = TokenSpans(
        record_index=record_index,
        replica=sent.replica[record_index],
        first=sent.resumed_iteration[record_index],
        last=sent.last_iteration[record_index],
    )
    if not len(pauses):
        return final_spans
    return TokenSpans(
        record_index=np.concatenate([record_index, _find_records(sent, pauses.slot)]),
        replica=np.concatenate([final_spans.replica, pauses.replica]),
        first=np.concatenate([final_spans.first, pauses.first_iteration]),
        last=np.concatenate([final_spans.last, pauses.last_iteration]),
    )


def _find_records(sent: SentColumns, slots: Ints) -> Ints:
    """Return the index of the record of each slot, by binary search in the sorted slots."""
    order = np.argsort(sent.slot, kind="stable")
    positions = np.searchsorted(sent.slot[order], slots)
    record_index: Ints = order[np.minimum(positions, len(order) - 1)]
    return record_index


class _FailureKind(NamedTuple):
    """How a failed request is recorded.

    Attributes:
        kind: A name of `record.KIND`.
        status: A name of `record.STATUS`.
        text: The text of the error.
    """

    kind: str
    status: str
    text: str


_FAILURE_KINDS = (
    _FailureKind("timeout_total", "failed", "the request timeout was exceeded"),
    _FailureKind("http_4xx", "failed", "the simulated server refused the prompt: too long"),
    _FailureKind("unfinished", "unfinished", "still in flight when the drain ended (--grace)"),
    _FailureKind("interrupted", "cancelled", "still in flight when the drain after the stop ended"),
    _FailureKind("abandoned", "cancelled", "the simulated user left during the response"),
    _FailureKind("reset", "failed", "the replica was removed"),
)

ERROR_TEXTS = tuple(failure.text for failure in _FAILURE_KINDS)
"""The texts that the field `text` of a record is an index of."""


class _SentTimes(NamedTuple):
    """When sent requests got their tokens, in ns; -1 if they got none.

    A non-generative request (embeddings, rerank) gets no token. Its only event is the response,
    which comes at the end of its prefill.
    """

    first_event_ns: Ints
    first_token_ns: Ints
    last_token_ns: Ints
    end_ns: Ints


def _build_sent_columns(
    sent: SentColumns,
    *,
    first_ns: Ints,
    last_ns: Ints,
    source: str,
    reports_cached_tokens: bool,
) -> dict[str, Column]:
    """Return the columns of the records of sent requests, without gaps and events.

    The network takes no time: a request is sent when it is due, and a token is received when it is
    emitted.

    Args:
        sent: The requests.
        first_ns: When each of them got its first token or, of a non-generative request, its
            response. -1 if it got none.
        last_ns: When each of them got its last token.
        source: Where the prompt token counts come from, a name of `record.SOURCE`.
        reports_cached_tokens: Whether the server reports how much of a prompt was in its cache.
    """
    has_event = first_ns >= 0
    is_non_generative = has_event & (sent.requested_tokens == 0)
    has_tokens = has_event & ~is_non_generative
    last_token_ns = np.where(has_tokens, last_ns, -1)
    times = _SentTimes(
        first_event_ns=first_ns,
        first_token_ns=np.where(has_tokens, first_ns, -1),
        last_token_ns=last_token_ns,
        end_ns=np.where(is_non_generative, first_ns, last_token_ns),
    )
    return {
        **_time_columns(sent, times),
        **_outcome_columns(sent, is_non_generative),
        **_token_columns(sent, source, reports_cached_tokens),
        **_server_timing_columns(sent, times),
        "first_event_tokens": has_tokens,
        "reused": 1,
        "tcp_ns": -1,
        "tls_ns": -1,
    }


def _time_columns(sent: SentColumns, times: _SentTimes) -> dict[str, Column]:
    """Return the timestamps of each request.

    `done_ns` is when the request was over for the client: at its end or its failure. In virtual
    time, a request is sent at once when it is due, and the head of the response comes at once, too.
    """
    is_failed = sent.failure > 0
    return {
        "due_ns": sent.due_ns,
        "ready_ns": sent.due_ns,
        "sent_ns": sent.due_ns,
        "first_byte_ns": sent.due_ns,
        "first_token_ns": times.first_token_ns,
        "first_answer_ns": times.first_token_ns,
        "first_event_ns": times.first_event_ns,
        "last_token_ns": times.last_token_ns,
        "end_ns": times.end_ns,
        "done_ns": np.where(is_failed, sent.failed_ns, times.end_ns),
    }


def _outcome_columns(sent: SentColumns, is_non_generative: NDArray[np.bool_]) -> dict[str, Column]:
    """Return the columns that tell how each request ended.

    The column `text` is an index of ERROR_TEXTS, or -1 for a request without an error. A completion
    always ends at its requested length, because the simulated model never ends a text by itself.
    """
    is_failed = sent.failure > 0
    is_refused = sent.failure == KIND["http_4xx"]
    finish_reason = np.where(is_non_generative, FINISH["stop"], FINISH["length"])
    status = np.full(len(sent), STATUS["ok"])
    text = np.full(len(sent), -1)
    for text_index, failure in enumerate(_FAILURE_KINDS):
        is_kind = sent.failure == KIND[failure.kind]
        status[is_kind] = STATUS[failure.status]
        text[is_kind] = text_index
    return {
        "status": status,
        "kind": sent.failure,
        "http_status": np.where(is_refused, 400, 200),
        "finish_reason": np.where(is_failed, FINISH[""], finish_reason),
        "text": text,
    }


def _token_columns(
    sent: SentColumns, source: str, reports_cached_tokens: bool
) -> dict[str, Column]:
    """Return the token counts and their sources, as a client would know them.

    The server reports the counts, except that it does not count a refused prompt: its count has the
    given source. A request that failed without a token has no output count (-1). The simulated
    model neither reasons nor drafts tokens (speculative decoding).
    """
    is_failed = sent.failure > 0
    is_refused = sent.failure == KIND["http_4xx"]
    has_no_output = is_failed & (sent.output_tokens == 0)
    return {
        "input_tokens": sent.input_tokens,
        "built_tokens": sent.input_tokens,
        "asked_output": sent.requested_tokens,
        "output_tokens": np.where(has_no_output, -1, sent.output_tokens),
        "cached_tokens": sent.cached_tokens if reports_cached_tokens else -1,
        "input_source": np.where(is_refused, SOURCE[source], SOURCE["server"]),
        "output_source": np.where(sent.output_tokens > 0, SOURCE["server"], 0),
        "reasoning_tokens": -1,
        "draft_tokens": -1,
        "accepted_tokens": -1,
        "cache_written_tokens": -1,
    }


def _server_timing_columns(sent: SentColumns, times: _SentTimes) -> dict[str, Column]:
    """Return the server timing breakdown: how long each request waited, and took for each phase.

    A phase that a request did not reach is -1. There is no transfer between machines for prefill
    and machines for decoding, so its time is -1 for all.
    """
    is_admitted = sent.admitted_ns >= 0
    has_event = times.first_event_ns >= 0
    queue_ns = sent.admitted_ns - sent.due_ns
    prefill_ns = times.first_event_ns - sent.admitted_ns
    decode_ns = times.last_token_ns - times.first_token_ns
    return {
        "replica": sent.replica,
        "server_queue_ns": np.where(is_admitted, queue_ns, -1),
        "server_prefill_ns": np.where(is_admitted & has_event, prefill_ns, -1),
        "server_decode_ns": np.where(times.first_token_ns >= 0, decode_ns, -1),
        "server_transfer_ns": -1,
    }
