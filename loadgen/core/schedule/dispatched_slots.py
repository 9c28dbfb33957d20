"""The slots that the dispatcher hands out: those to send, and those that only leave a record."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from loadgen.core.schedule.schedule import Schedule, ScheduledStage
from loadgen.core.schedule.sessions import NOT_APPLICABLE

# Reasons why a slot is not sent: a limit of requests in flight or in prefill, an earlier turn of
# its session that failed, and a run that was stopped.
IN_FLIGHT_CAP = "in_flight_cap"
PREFILL_CAP = "prefill_cap"
PREVIOUS_TURN_FAILED = "previous_turn_failed"
INTERRUPTED = "interrupted"


class DispatchedSlot(msgspec.Struct, frozen=True, gc=False):
    """A slot to send now or, if `drop_reason` is set, one that is not sent but leaves a record."""

    slot_id: int
    stage: int
    session: int | None
    """Number of the conversation or task, or None for a single request."""
    turn: int
    virtual_user: int | None
    """None in an open loop."""
    due_ns: int
    """From the start of the run; NOT_APPLICABLE if the slot still waited for another one."""
    drop_reason: str = ""
    """One of the constants above, a reason that the caller gave, or an empty string."""

    @property
    def is_single_request(self) -> bool:
        """Return True if the slot is a session of its own, not a turn of a conversation or task."""
        return self.session is None


class InterruptedSlots:
    """Creates the slots of a schedule that were not sent because the run was stopped."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule

    def create_slot(
        self,
        stage: ScheduledStage,
        session_index: int,
        turn: int,
        virtual_user: int | None,
        due_ns: int,
    ) -> DispatchedSlot:
        """Return the record of one request that was not sent because the run was stopped.

        Args:
            stage: The stage that would have sent it.
            session_index: The number of its session: a single request, a conversation or a task.
            turn: The position of the request in its session, from 0.
            virtual_user: The virtual user that would have sent it, or None in an open loop.
            due_ns: When it was due, or NOT_APPLICABLE if it still waited for another request.
        """
        session = self._schedule.sessions.get(session_index)
        return DispatchedSlot(
            slot_id=self._schedule.slot_id(session_index, turn, session),
            stage=stage.index,
            session=None if session.is_single_request else session_index,
            turn=turn,
            virtual_user=virtual_user,
            due_ns=due_ns,
            drop_reason=INTERRUPTED,
        )

    def slots_of_session(
        self,
        stage: ScheduledStage,
        session_index: int,
        virtual_user: int | None,
        due_ns: int,
    ) -> Iterator[DispatchedSlot]:
        """Yield all slots of a session, none of which was sent.

        Only the first one has the due time `due_ns`: the others waited for a response.
        """
        turn_count = self._schedule.sessions.get(session_index).turn_count
        for turn in range(turn_count):
            slot_due_ns = due_ns if turn == 0 else NOT_APPLICABLE
            yield self.create_slot(stage, session_index, turn, virtual_user, slot_due_ns)

    def slots_of_user(
        self,
        stage: ScheduledStage,
        virtual_user: int,
        next_session: int,
        due_ns: int = NOT_APPLICABLE,
    ) -> Iterator[DispatchedSlot]:
        """Yield the slots of a virtual user from session `next_session` to the end of its stage.

        The users take turns in sending the sessions of the stage. If user 3 of 8 has begun session
        3, the slots of session 11 come first (`next_session`), and then those of session 19.

        Nothing is yielded if a duration ends the stage. How many sessions the user would have sent
        depends on the speed of the server then.

        Args:
            stage: The closed loop that the user belongs to.
            virtual_user: The number of the user.
            next_session: The first session that the user has not begun.
            due_ns: When that session was due, or NOT_APPLICABLE if it waited for a response.
        """
        if not has_planned_slots(stage):
            return

        remaining_sessions = range(next_session, stage.session_numbers.stop, stage.concurrency)
        for session_index in remaining_sessions:
            session_due_ns = due_ns if session_index == next_session else NOT_APPLICABLE
            yield from self.slots_of_session(stage, session_index, virtual_user, session_due_ns)

    def slots_of_arrivals(
        self, stage: ScheduledStage, start_ns: int | None, arrived_count: int = 0
    ) -> Iterator[DispatchedSlot]:
        """Yield the requests (slots) of an open loop whose sessions had not arrived at the stop.

        Only the sessions of this shard are yielded, the part of the schedule that one worker sends.
        If 2 of the sessions 1, 3, 5 and 7 of a shard have arrived, the requests of session 5 come
        first.

        Args:
            stage: The open loop.
            start_ns: When the stage began in ns, or None if it has not begun. Its requests then
                have the due time NOT_APPLICABLE.
            arrived_count: How many sessions of this shard have arrived.
        """
        arrivals_ns = self._schedule.arrivals_ns_of(stage).tolist()
        for position_in_shard in range(arrived_count, len(arrivals_ns)):
            session_index = stage.first_session + self._schedule.shard.number_at(position_in_shard)
            due_ns = NOT_APPLICABLE
            if start_ns is not None:
                due_ns = start_ns + arrivals_ns[position_in_shard]
            yield from self.slots_of_session(stage, session_index, virtual_user=None, due_ns=due_ns)


def has_planned_slots(stage: ScheduledStage) -> bool:
    """Return True if a stage sends the same slots however fast the server responds.

    An open loop sends all its arrivals, and a closed loop without a duration all its sessions. A
    closed loop with a duration only schedules the slots that it reaches before its end, and so does
    one that ends with its first user.
    """
    if not stage.is_closed_loop:
        return True
    if stage.ends_with_first_user:
        return False
    return stage.length_ns is None and stage.session_count is not None
