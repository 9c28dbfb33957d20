"""The ids of slots, which are the planned requests of a run.

The schedule and the prompts number requests in the same way: slot n of the schedule sends prompt n.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class SlotLayout:
    """Numbers the slots (planned requests) of all sessions of a run.

    A session is a single request, a conversation or a task. Its requests are its turns, numbered
    from 0. Each session has a block of `block_size` consecutive slot ids, as many as the largest
    session has turns.

    The last turn of a conversation or task has the last id of the block, so that the id alone shows
    where a session ends. All other turns have the first ids. With `block_size` 5, session 2 has the
    ids 10 to 14, and uses

    - 10, 11 and 14 if it is a conversation or task of 3 turns,
    - 10 if it is a single request.
    """

    block_size: int

    def session_of(self, slot_id: int) -> int:
        """Return the number of the session that a slot belongs to."""
        return slot_id // self.block_size

    def slot_of(
        self, session: int, turn: int, turn_count: int, *, is_single_request: bool = False
    ) -> int:
        """Return the slot id of a turn (0, 1, ...) in a session of `turn_count` turns.

        A session has a block of consecutive ids. Its last turn has the last id of the block, so
        that the id alone shows where a session ends. With blocks of 5 ids, the three turns of
        session 2 have the ids 10, 11 and 14. A single request has the first id of its block.
        """
        first_id = session * self.block_size
        last_id = first_id + self.block_size - 1

        is_last_turn = turn == turn_count - 1
        if is_last_turn and not is_single_request:
            return last_id
        return first_id + turn

    def slots_of(
        self, session: int, turn_count: int, *, is_single_request: bool = False
    ) -> Iterator[int]:
        """Yield the slot ids of all turns of a session, in the order of the turns.

        A slot is a planned request. With blocks of 5 ids, session 2 yields 10, 11 and 14 if it has
        three turns, and only 10 if it is a single request.
        """
        for turn in range(turn_count):
            yield self.slot_of(session, turn, turn_count, is_single_request=is_single_request)

    def turn_of(self, slot_id: int, turn_count: int, *, is_single_request: bool = False) -> int:
        """Return the turn (0, 1, ...) of a session to which a slot id belongs.

        A slot is a planned request. A session has a block of consecutive slot ids: its last turn
        has the last id of the block, and its other turns have the first ids. With blocks of 5 ids,
        the block of session 2 is 10 to 14, and its three turns have the ids 10, 11 and 14.

        Args:
            slot_id: The id of the slot.
            turn_count: The number of turns of the session.
            is_single_request: True for a session that is one request outside of any conversation.
                It has the first id of its block.

        Raises:
            IndexError: No turn of the session has this id, such as 12 in the example.
        """
        position_in_block = slot_id % self.block_size
        position_of_last_turn = 0 if is_single_request else self.block_size - 1

        last_turn = turn_count - 1
        if position_in_block == position_of_last_turn:
            return last_turn
        if position_in_block < last_turn:
            return position_in_block
        raise IndexError(slot_id)

    def slots_of_turns(
        self,
        sessions: NDArray[np.int64],
        turns: NDArray[np.int64],
        turn_counts: NDArray[np.int64],
        is_single_request: NDArray[np.bool_],
    ) -> NDArray[np.int64]:
        """Return the slot ids of many turns, one for each element of the arrays.

        Each session has a block of consecutive ids. The last turn has the last id of the block, so
        that the id alone shows where a session ends. With blocks of 5 ids, the three turns of
        session 2 have the ids 10, 11 and 14. A single request has the first id of its block.
        """
        first_ids = sessions * self.block_size
        last_ids = first_ids + self.block_size - 1

        is_last_turn = turns == turn_counts - 1
        ends_session_of_turns = is_last_turn & ~is_single_request
        slot_ids: NDArray[np.int64] = np.where(ends_session_of_turns, last_ids, first_ids + turns)
        return slot_ids

    def same_turn_in(self, other: SlotLayout, slot_id: int) -> int:
        """Return the id that the same turn of the same session has in a layout with other blocks.

        A slot is a planned request. A session has a block of consecutive slot ids: its last turn
        has the last id of the block, and its other turns have the first ids. With blocks of 5 ids
        here and of 3 in the other layout, a session of three turns has

            here    10  11  14
            other    6   7   8

        Raises:
            IndexError: The block in the other layout has no place for the turn, such as for id 12.
        """
        session = slot_id // self.block_size
        position_in_block = slot_id % self.block_size

        if other.block_size == 1:
            # The session is a single request, which has the first id of its block.
            if position_in_block > 0:
                raise IndexError(slot_id)
            return session

        first_id_in_other = session * other.block_size
        last_position_in_other = other.block_size - 1

        is_last_turn = position_in_block == self.block_size - 1
        if is_last_turn:
            return first_id_in_other + last_position_in_other
        if position_in_block < last_position_in_other:
            return first_id_in_other + position_in_block
        raise IndexError(slot_id)
