"""Convert what happened in a simulated run into request records.

All records are built together, one NumPy column per field, because a run can have millions. Tokens
are emitted when an iteration of a replica ends, so the timestamps of a request are looked up in the
end times of the iterations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from loadgen.sim.event_counts import EventCounts, count_events
from loadgen.sim.event_gaps import EmittedEvents, Ints, IterationEnds, TokenSpans
from loadgen.sim.record_columns import Column, RecordColumns
from loadgen.sim.simulated_requests import (
    PauseColumns,
    SentColumns,
    SimulatedRequests,
    UnsentColumns,
)

_STATUS_AFTER_END_OF_RUN = {KIND[reason]: STATUS[status] for reason, status in CUTS.items()}
"""The status of a request that the run or its user has ended, by the code of the reason."""

_FIELD_NAMES = ROW.names or ()
_UNKNOWN_SOURCE = SOURCE[""]  # of a count that nobody has reported


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
        is_streamed: Whether the client gets responses token by token. Otherwise a response is one
            event.
        keep_events: Whether the single events are kept.
    """

    tokens_per_event: int
    source: str
    reports_cached_tokens: bool
    is_streamed: bool = True
    keep_events: bool = False


def build_records(
    requests: SimulatedRequests,
    iteration_ends_ns: Sequence[Ints],
    schedule: Schedule,
    options: RecordOptions,
) -> VirtualRecords:
    """Return the records, gaps and timeline of a simulated run.

    The records of sent requests come first, in the order in which the requests ended. The records
    of requests that were never sent follow. Each record has columns about its slot (the place of
    the request in the schedule, such as the session) and columns about the request itself.

    Args:
        requests: What happened to the requests.
        iteration_ends_ns: The end times of the iterations of each replica.
        schedule: The schedule that was simulated.
        options: How the server reports tokens, and whether single events are kept.
    """
    sent = requests.sent_columns()
    unsent = requests.unsent_columns()
    slots = np.concatenate([sent.slot, unsent.slot]) if len(unsent) else sent.slot
    slot_columns = _build_slot_columns(slots, schedule)

    stage_of_record = np.asarray(slot_columns["stage"])
    stage_of_sent = stage_of_record[: len(sent)]
    counts, events = _build_events(
        sent,
        requests.pause_columns(),
        iteration_ends_ns,
        stage_of_sent=stage_of_sent,
        stage_count=len(schedule.stages),
        options=options,
    )
    request_columns = _build_columns_after_run(sent, iteration_ends_ns, counts, options)
    if len(unsent):
        request_columns = _append_unsent(request_columns, len(sent), unsent)

    records = RecordColumns(len(slots), request_columns | slot_columns)
    return VirtualRecords(records, counts.gaps, counts.timeline, events)


def _build_events(
    sent: SentColumns,
    pauses: PauseColumns,
    iteration_ends_ns: Sequence[Ints],
    *,
    stage_of_sent: NDArray[Any],
    stage_count: int,
    options: RecordOptions,
) -> tuple[EventCounts, EmittedEvents | None]:
    """Return the counts of the output events of a run and, if they are kept, the events.

    The spans of tokens need as much memory as the records. They are local to this function, so that
    this memory is free afterwards, unless the events refer to them.

    Args:
        sent: The requests that were sent.
        pauses: The iterations in which requests got tokens before they were paused.
        iteration_ends_ns: The end times of the iterations of each replica.
        stage_of_sent: The stage (the part of the load) that each sent request belongs to.
        stage_count: The number of stages.
        options: The tokens per event, and whether single events are kept.
    """
    if options.is_streamed:
        spans = _build_token_spans(sent, pauses)
    else:
        spans = _build_response_spans(sent)

    counts = count_events(
        spans, iteration_ends_ns, stage_of_sent, stage_count, options.tokens_per_event
    )
    if not options.keep_events:
        return counts, None

    events = EmittedEvents(sent.slot, spans, iteration_ends_ns, options.tokens_per_event)
    return counts, events


def _build_columns_after_run(
    sent: SentColumns,
    iteration_ends_ns: Sequence[Ints],
    counts: EventCounts,
    options: RecordOptions,
) -> dict[str, Column]:
    """Return the columns of the records of sent requests, without their place in the schedule.

    Args:
        sent: The sent requests of the whole run.
        iteration_ends_ns: The end times of the iterations of each replica.
        counts: The number of output events of each sent request, and the gaps between them.
        options: How the server reports tokens.
    """
    iteration_ends = IterationEnds(iteration_ends_ns)
    columns = _build_sent_columns(
        sent,
        first_ns=_look_up_ends_ns(iteration_ends, sent, sent.first_iteration),
        last_ns=_look_up_ends_ns(iteration_ends, sent, sent.last_iteration),
        source=options.source,
        reports_cached_tokens=options.reports_cached_tokens,
    )
    columns["max_gap_ns"] = counts.largest_gap_ns
    columns["output_events"] = counts.events
    if not options.is_streamed:
        columns |= build_whole_response_columns(columns)

    return columns


def build_whole_response_columns(
    columns: Mapping[str, Column] | NDArray[np.void],
) -> dict[str, Column]:
    """Return the columns that differ if responses are not streamed.

    Such a response comes as a whole when its last token is ready, as one event. So its time to
    first token is the time of the whole response. A request that failed got no part of it.

    Args:
        columns: Columns of records of streamed responses, by name, or records with these fields.
    """
    last_token_ns = np.asarray(columns["last_token_ns"])
    output_tokens = np.asarray(columns["output_tokens"])
    has_tokens = last_token_ns >= 0
    is_failed = np.asarray(columns["status"]) != STATUS["ok"]

    is_lost = has_tokens & is_failed
    response_ns = np.where(is_lost, -1, last_token_ns)
    changed: dict[str, Column] = {
        name: np.where(has_tokens, response_ns, columns[name]) for name in _RESPONSE_TIMES
    }
    changed["first_event_tokens"] = np.where(has_tokens & ~is_failed, output_tokens, 0)
    changed["output_tokens"] = np.where(is_lost, -1, output_tokens)
    changed["output_source"] = np.where(is_lost, _UNKNOWN_SOURCE, columns["output_source"])
    return changed


_RESPONSE_TIMES = (
    "first_byte_ns",
    "first_event_ns",
    "first_token_ns",
    "first_answer_ns",
    "last_token_ns",
    "end_ns",
)
"""The times of a response that are equal if the response comes as a whole."""


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


def _look_up_ends_ns(iteration_ends: IterationEnds, sent: SentColumns, iterations: Ints) -> Ints:
    """Return when one iteration ended for each sent request, such as that of its first token.

    Args:
        iteration_ends: The end times of the iterations of all replicas.
        sent: The requests, each with the index of its replica.
        iterations: For each request, the number of an iteration of its replica, or -1.

    Returns:
        The end times in ns, -1 where the iteration is -1.
    """
    has_iteration = iterations >= 0
    ends_ns = np.full(len(iterations), -1, np.int64)
    ends_ns[has_iteration] = iteration_ends.look_up(
        sent.replica[has_iteration], iterations[has_iteration]
    )
    return ends_ns


def _build_slot_columns(slots: Ints, schedule: Schedule) -> dict[str, Column]:
    """Return the fields that tell which slot of the schedule each record is for.

    A slot is one request to send. All fields follow from its number: its session (a conversation
    or a task), its turn in the session, its stage (a part of the load), and in a closed loop its
    virtual user. A single request belongs to no session, so its session is -1.
    """
    sessions = _find_sessions(slots, schedule)
    stage = _find_stages(sessions.number, schedule)

    session_column: Column = -1
    if sessions.is_multi_turn.any():
        session_column = np.where(sessions.is_multi_turn, sessions.number, -1)

    return {
        "slot": slots,
        # The number of the request differs from the slot only over HTTP with a repeated data set.
        "request": slots,
        "session": session_column,
        "stage": stage,
        "turn": sessions.turn,
        "virtual_user": _assign_virtual_users(sessions.number, stage, schedule),
    }


def _find_stages(session_numbers: Ints, schedule: Schedule) -> NDArray[np.int16]:
    """Return the index of the stage (the part of the load) that each session belongs to.

    Sessions are numbered stage after stage. With stages that begin with the sessions 0, 10 and 30,
    session 12 belongs to stage 1, because 2 stages begin with it or before it.
    """
    first_sessions = np.array([stage.first_session for stage in schedule.stages])
    begun_stages = np.searchsorted(first_sessions, session_numbers, side="right")
    return (begun_stages - 1).astype(np.int16)


class _SessionColumns(NamedTuple):
    """Which session each slot belongs to, as columns with one entry per slot.

    Attributes:
        number: The number of the session. A single request counts as a session here.
        turn: The index of the slot's request in the session.
        is_multi_turn: Whether the session is a conversation or a task, and no single request.
    """

    number: Ints
    turn: NDArray[np.signedinteger[Any]]
    is_multi_turn: NDArray[np.bool_]


def _find_sessions(slots: Ints, schedule: Schedule) -> _SessionColumns:
    """Return the session of each slot, and its turn in the session.

    A slot is one request of the schedule. A session is a single request, or a conversation or task
    whose requests are its turns. Usually all sessions have the same number of turns. Only tasks
    may differ in it, so their turns need another calculation.
    """
    session_numbers, positions = _split_slots(slots, schedule.max_turns)
    has_equal_sessions = isinstance(schedule.sessions, Conversations | SingleRequests)
    if not has_equal_sessions:
        return _find_turns_of_tasks(session_numbers, positions, schedule)
    is_multi_turn = np.full(len(slots), schedule.max_turns > 1)
    return _SessionColumns(session_numbers, positions, is_multi_turn)


def _split_slots(slots: Ints, max_turns: int) -> tuple[Ints, NDArray[np.signedinteger[Any]]]:
    """Return the number of the session of each slot, and the position of the slot in the session.

    The slots of a session follow each other. Each session has as many of them as the longest one
    has turns, `max_turns`. With `max_turns` 4, session 2 has the slots 8 to 11, so slot 9 has the
    position 1.
    """
    if max_turns == 1:
        # The usual case: the slots need no copy, and positions of 8 bits are enough.
        return slots, np.zeros(len(slots), np.int8)
    return np.divmod(slots, max_turns)


def _find_turns_of_tasks(
    session_numbers: Ints, positions: NDArray[np.signedinteger[Any]], schedule: Schedule
) -> _SessionColumns:
    """Return the turn of each slot if sessions differ in their number of turns.

    A slot is the place of one request in the schedule. Each session has as many slots as the
    longest session has turns, and its last turn always has the last slot, so that the end of a
    session is easy to find. For example, if the longest session has 4 turns, a session with 3 turns
    has them in the positions 0, 1 and 3, and position 2 is not used.

    Args:
        session_numbers: The session of each slot.
        positions: The position of each slot in its session.
        schedule: The schedule, which knows each session.
    """
    # Each session is looked up once. `session_index` has the index of the session of each slot in
    # the list of sessions.
    distinct_numbers, session_index = np.unique(session_numbers, return_inverse=True)
    sessions = [schedule.sessions.get(number) for number in distinct_numbers.tolist()]
    last_turn_of_session = np.array([session.turn_count - 1 for session in sessions], np.int64)
    is_multi_turn = np.array([not session.is_single_request for session in sessions], np.bool_)

    # The position of a turn is its number, except for the last turn, whose position may be higher.
    turns = np.minimum(positions, last_turn_of_session[session_index])
    return _SessionColumns(
        number=session_numbers, turn=turns, is_multi_turn=is_multi_turn[session_index]
    )


def _assign_virtual_users(
    session_numbers: Ints, stage_of_slot: NDArray[np.int16], schedule: Schedule
) -> Column:
    """Return the virtual user that sends the request of each slot of the schedule.

    A virtual user of a closed loop sends one session after the other. The sessions of a stage are
    assigned to its users in turn: with 3 users, to users 0, 1, 2, 0, 1 and so on. A stage with an
    open loop has no users, and its slots get -1.

    Args:
        session_numbers: The session of each slot.
        stage_of_slot: The index of the stage (the part of the load) of each slot.
        schedule: The schedule with the stages.

    Returns:
        One number per slot or, if no stage has users, a single -1 for all slots.
    """
    user_count_of_stage = np.array([stage.concurrency for stage in schedule.stages])
    if not user_count_of_stage.any():
        return -1

    first_session_of_stage = np.array([stage.first_session for stage in schedule.stages])
    user_counts = user_count_of_stage[stage_of_slot]
    positions_in_stage = session_numbers - first_session_of_stage[stage_of_slot]

    has_users = user_counts > 0
    virtual_users = np.full(len(session_numbers), -1, np.int64)
    virtual_users[has_users] = positions_in_stage[has_users] % user_counts[has_users]

    return virtual_users


def _append_unsent(
    sent_columns: dict[str, Column], sent_count: int, unsent: UnsentColumns
) -> dict[str, Column]:
    """Return the columns of the sent requests, extended by the requests that were never sent.

    A column may be one number for all records, which saves memory. If a field has the same number
    in both kinds of records, it stays a single number.

    Args:
        sent_columns: The columns of the sent requests. A missing column is 0 in all of them.
        sent_count: The number of sent requests.
        unsent: The requests that were never sent.
    """
    columns: dict[str, Column] = {}
    for name, unsent_values in _build_unsent_columns(unsent).items():
        sent_values = sent_columns.get(name, 0)
        are_constant = isinstance(sent_values, int) and isinstance(unsent_values, int)
        if are_constant and sent_values == unsent_values:
            columns[name] = sent_values
        else:
            columns[name] = np.concatenate(
                [_as_array(sent_values, sent_count), _as_array(unsent_values, len(unsent))]
            )

    return columns


def _build_unsent_columns(unsent: UnsentColumns) -> dict[str, Column]:
    """Return all columns of the records of requests that were never sent.

    Most columns have the same value in all of these records, and are stored as a single number. The
    due time, the status and the reason differ, and are stored as arrays. If the reason is that the
    run has ended, the status is `unfinished` or `cancelled`. For any other reason, it is `dropped`.
    """
    # Columns with one value, which is that of any dropped request.
    dropped_record = _build_dropped_record()
    columns: dict[str, Column] = {name: int(dropped_record[name]) for name in _FIELD_NAMES}

    status = np.full(len(unsent), STATUS["dropped"])
    for reason_code, status_code in _STATUS_AFTER_END_OF_RUN.items():
        status[unsent.reason == reason_code] = status_code

    # Columns with one value per record. The field `kind` has the reason of an unsent request, and
    # the failure of a sent one.
    columns["due_ns"] = unsent.due_ns
    columns["kind"] = unsent.reason
    columns["status"] = status
    return columns


def _build_dropped_record() -> Any:
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
    """Return the spans of all sent requests, in no particular order.

    A span is an unbroken sequence of iterations in which a request gets one token each. The last
    span of a request begins after its last admission to a batch. Each of its pauses ends an earlier
    span, which `pauses` contains.
    """
    final_spans = _build_final_spans(sent)
    if not len(pauses):
        return final_spans

    return TokenSpans(
        record_index=np.concatenate([final_spans.record_index, _find_records(sent, pauses.slot)]),
        replica=np.concatenate([final_spans.replica, pauses.replica]),
        first=np.concatenate([final_spans.first, pauses.first_iteration]),
        last=np.concatenate([final_spans.last, pauses.last_iteration]),
    )


def _build_final_spans(sent: SentColumns) -> TokenSpans:
    """Return the last span of each request that got tokens.

    A span is an unbroken sequence of iterations in which a request gets one token each. The server
    may pause a request, so that it has several spans. The last span begins with the iteration
    `resumed_iteration`, which gives the first token after the last pause, and ends with
    `last_iteration`. For example, a request with 3 tokens and no pause has a span from iteration 10
    to iteration 12.

    A request that was cancelled before such a token has the `resumed_iteration` -1. A request for
    embeddings or a ranking has no tokens. Its span would be empty, from iteration 10 to 9.
    """
    has_token = sent.resumed_iteration >= 0
    is_span_empty = sent.last_iteration < sent.resumed_iteration
    record_index = np.flatnonzero(has_token & ~is_span_empty)

    return TokenSpans(
        record_index=record_index,
        replica=sent.replica[record_index],
        first=sent.resumed_iteration[record_index],
        last=sent.last_iteration[record_index],
    )


def _build_response_spans(sent: SentColumns) -> TokenSpans:
    """Return a span of one iteration for each completion that comes as a whole: its last one."""
    spans = _build_final_spans(sent)
    is_received = ~_find_failed(sent)[spans.record_index]
    return spans.select(is_received)._replace(first=spans.last[is_received])


def _find_records(sent: SentColumns, slots: Ints) -> Ints:
    """Return the index of the record of each of these slots, which all have a record.

    Records are in the order in which requests ended, so their slots are not sorted. The slots are
    found by binary search in a sorted copy. For example, if the records are for the slots
    [20, 10, 30], the slots [30, 10] have the records [2, 1].
    """
    # The comments show the values in the example.
    record_indexes = np.argsort(sent.slot, kind="stable")  # [1, 0, 2] records by slot
    sorted_slots = sent.slot[record_indexes]  # [10, 20, 30]
    positions = np.searchsorted(sorted_slots, slots)  # [2, 0]
    return record_indexes[positions]


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

    Args:
        sent: The requests.
        first_ns: When each of them got its first token, or -1 if it got none. For a non-generative
            request (embeddings, rerank), when its response came.
        last_ns: When each of them got its last token.
        source: Where the prompt token counts come from, a name of `record.SOURCE`.
        reports_cached_tokens: Whether the server reports how much of a prompt was in its cache.
    """
    has_event = first_ns >= 0
    is_non_generative = has_event & (sent.requested_tokens == 0)
    has_tokens = has_event & ~is_non_generative
    times = _find_times(first_ns, last_ns, is_non_generative)

    return {
        **_time_columns(sent, times),
        **_outcome_columns(sent, is_non_generative),
        **_token_columns(sent, source, reports_cached_tokens),
        **_server_timing_columns(sent, times),
        # The first event of a response has one token, if the response has tokens at all.
        "first_event_tokens": has_tokens,
        # Nothing is sent, so no request needs a new connection.
        "reused": 1,
        "tcp_ns": -1,
        "tls_ns": -1,
    }


def _find_times(first_ns: Ints, last_ns: Ints, is_non_generative: NDArray[np.bool_]) -> _SentTimes:
    """Return when sent requests got their first event, their tokens and their end.

    All arguments have one entry per request. All times are in ns, and -1 if something did not
    happen.

    Args:
        first_ns: When the first event came: the first token or, for a non-generative request
            (embeddings, rerank), the whole response.
        last_ns: When the last token came. Not used for a non-generative request.
        is_non_generative: Whether the request got values instead of tokens.
    """
    has_tokens = (first_ns >= 0) & ~is_non_generative
    last_token_ns = np.where(has_tokens, last_ns, -1)
    return _SentTimes(
        first_event_ns=first_ns,
        first_token_ns=np.where(has_tokens, first_ns, -1),
        last_token_ns=last_token_ns,
        # A response with values has no token and ends with its only event.
        end_ns=np.where(is_non_generative, first_ns, last_token_ns),
    )


def _time_columns(sent: SentColumns, times: _SentTimes) -> dict[str, Column]:
    """Return the timestamps of each request in ns.

    In virtual time, the network takes no time. So a request gets its connection (`ready_ns`) and is
    sent at once when it is due, and the head of the response (`first_byte_ns`) comes at once, too.
    The model does not reason, so its first token is also the first one of its answer. `done_ns` is
    when the request was over for the client: at its end or its failure.
    """
    is_failed = _find_failed(sent)
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


def _find_failed(sent: SentColumns) -> NDArray[np.bool_]:
    """Return whether each request has failed."""
    is_failed: NDArray[np.bool_] = sent.failure != KIND[""]
    return is_failed


def _find_refused(sent: SentColumns) -> NDArray[np.bool_]:
    """Return whether the server has refused the prompt of each request, because it is too long."""
    is_refused: NDArray[np.bool_] = sent.failure == KIND["http_4xx"]
    return is_refused


def _outcome_columns(sent: SentColumns, is_non_generative: NDArray[np.bool_]) -> dict[str, Column]:
    """Return the columns with the outcome of each request: its status, failure and finish reason.

    A failure is a code of `record.KIND`, 0 for a success. Its text is stored as an index into
    ERROR_TEXTS, -1 for a success. The simulated model never ends a text by itself, so the finish
    reason of a completion is always its length. A failed request has no finish reason.

    Args:
        sent: The requests.
        is_non_generative: Whether each of them returned values (embeddings, rerank) and no tokens.
    """
    status = np.full(len(sent), STATUS["ok"])
    error_text_index = np.full(len(sent), -1)
    for failure_kind in _FAILURE_KINDS:
        has_this_failure = sent.failure == KIND[failure_kind.kind]
        status[has_this_failure] = STATUS[failure_kind.status]
        error_text_index[has_this_failure] = ERROR_TEXTS.index(failure_kind.text)

    http_status = np.where(_find_refused(sent), 400, 200)
    success_finish_reason = np.where(is_non_generative, FINISH["stop"], FINISH["length"])
    finish_reason = np.where(_find_failed(sent), FINISH[""], success_finish_reason)

    return {
        "status": status,
        "kind": sent.failure,
        "http_status": http_status,
        "finish_reason": finish_reason,
        "text": error_text_index,
    }


def _token_columns(
    sent: SentColumns, source: str, reports_cached_tokens: bool
) -> dict[str, Column]:
    """Return the token counts of requests, and where a client would have each count from.

    The server reports the counts of a request, unless it has refused the prompt. The client then
    has only its own count of the prompt. A count that the client cannot know is -1.

    Args:
        sent: The requests.
        source: Where the count of a refused prompt comes from, a name of `record.SOURCE`.
        reports_cached_tokens: Whether the server reports how much of a prompt was in its cache.
    """
    has_output = sent.output_tokens > 0
    is_output_unknown = _find_failed(sent) & ~has_output
    input_source = np.where(_find_refused(sent), SOURCE[source], SOURCE["server"])
    output_source = np.where(has_output, SOURCE["server"], _UNKNOWN_SOURCE)

    return {
        # The prompt: its length by the server, its length by the client, which are always equal,
        # and how much of it the server had in its cache.
        "input_tokens": sent.input_tokens,
        "built_tokens": sent.input_tokens,
        "input_source": input_source,
        "cached_tokens": sent.cached_tokens if reports_cached_tokens else -1,
        # The output: its length as requested by the client, and as reported by the server.
        "asked_output": sent.requested_tokens,
        "output_tokens": np.where(is_output_unknown, -1, sent.output_tokens),
        "output_source": output_source,
        # The simulated model neither reasons nor drafts tokens (speculative decoding), and the
        # simulated server does not report writes to its cache.
        "reasoning_tokens": -1,
        "draft_tokens": -1,
        "accepted_tokens": -1,
        "cache_written_tokens": -1,
    }


def _server_timing_columns(sent: SentColumns, times: _SentTimes) -> dict[str, Column]:
    """Return how long each request spent in each phase at the server, in ns; -1 if in none.

    The phases are the queue (until admission to a batch), the prefill (until the first event, which
    is the first token or, for embeddings and ranks, the response) and the decoding (from the first
    to the last token). A transfer exists only in servers that prefill and decode on different
    machines, which are not simulated.
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
