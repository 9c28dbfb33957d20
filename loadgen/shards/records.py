"""Build the records of a merged run: those of its parts, and `lost` records for other slots."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from loadgen.core.execution.bodies import UNKNOWN
from loadgen.core.results import parquet, store
from loadgen.core.results.manifest import ShardPart
from loadgen.core.results.record import (
    RESPONSE_TIME_COLUMNS,
    ROW,
    RecordKey,
    encode_unsent_record,
)
from loadgen.shards.parts import PartPosition, RunPart

if TYPE_CHECKING:
    import pyarrow as pa

BLOCK_ROWS = 1_000_000
"""Rows that are in memory at once, and in one row group of the merged file."""
NEVER_DUE = -1
"""The due time of a slot that has none in the schedule."""
TIME_COLUMNS = (
    "due_ns",
    "ready_ns",
    "sent_ns",
    *RESPONSE_TIME_COLUMNS,
)
"""Columns of a record that count from the start of the run; -1 means never."""


@dataclass(frozen=True)
class LostSlots:
    """The planned requests (slots) of one part that have no record.

    Attributes:
        position: The part, and its place in the merged run.
        slots: The slots, as an array of `shard_schedule.SLOT`.
    """

    position: PartPosition
    slots: NDArray[np.void]


def record_tables(
    positions: Sequence[PartPosition], lost: Sequence[LostSlots]
) -> Iterator[pa.Table]:
    """Yield the records of the merged run as tables, at least one.

    A run without any record has one empty table, so that its file has the columns of records.

    Args:
        positions: All parts of the run, missing ones as well.
        lost: The planned requests without a record.
    """
    is_empty = True
    for table in _tables_of_parts(positions, lost):
        is_empty = False
        yield table
    if is_empty:
        yield parquet.to_table(np.zeros(0, ROW), [])


def _tables_of_parts(
    positions: Sequence[PartPosition], lost: Sequence[LostSlots]
) -> Iterator[pa.Table]:
    """Yield the stored records of all parts, and then a `lost` record for each lost slot.

    Which worker lost a slot is not known, so that all lost slots of a part are assigned to its
    first worker. The error text of these records is for example "part 2 of 3: killed".
    """
    for position in positions:
        if position.part is not None:
            yield from _tables_of_part(position, position.part)
    for lost_slots in lost:
        position = lost_slots.position
        error_text = f"{position.name}: {position.state}"
        for first in range(0, len(lost_slots.slots), BLOCK_ROWS):
            block = lost_slots.slots[first : first + BLOCK_ROWS]
            records = _create_lost_records(block, position.first_worker)
            yield parquet.to_table(records, [error_text])


def _tables_of_part(position: PartPosition, part: RunPart) -> Iterator[pa.Table]:
    """Yield the records of one part, in blocks that fit into memory.

    The numbers of its workers and its times are changed from those of the part to those of the
    merged run.
    """
    stored = store.read_run_lazily(part.run_dir)
    for first in range(0, len(stored.rows), BLOCK_ROWS):
        rows = _copy_to_memory(stored.rows[first : first + BLOCK_ROWS])
        rows["worker"] += position.first_worker
        for name in TIME_COLUMNS:
            has_happened = rows[name] >= 0
            rows[name][has_happened] += position.delay_ns
        yield parquet.to_table(rows, stored.texts)


def _copy_to_memory(rows: NDArray[np.void]) -> NDArray[np.void]:
    """Return a copy of records, which may be changed.

    The rows of a large run are no array but a `Frame`, which reads each column from disk.
    """
    copied = np.zeros(len(rows), ROW)
    for name in ROW.names or ():
        copied[name] = rows[name]
    return copied


def _create_lost_records(slots: NDArray[np.void], worker: int) -> NDArray[np.void]:
    """Return a request record with the status `lost` for each slot of a killed or missing part.

    Args:
        slots: The planned requests (slots) without a record.
        worker: The number of the worker that the new records state as their sender.
    """
    records = [
        encode_unsent_record(
            _create_record_key(slot, worker),
            due_ns=int(slot["due_ns"]),
            kind="worker_died",
            status="lost",
            request_facts=UNKNOWN,
            text_index=0,  # The only text of the table, see `_tables_of_parts`.
        )
        for slot in slots
    ]
    return np.frombuffer(b"".join(records), ROW)


def _create_record_key(slot: np.void, worker: int) -> RecordKey:
    """Return the part of a record that identifies its slot: stage, session, turn and so on."""
    slot_id = int(slot["slot"])
    return RecordKey(
        slot=slot_id,
        request=slot_id,
        stage=int(slot["stage"]),
        worker=worker,
        target=0,
        session=int(slot["session"]),
        turn=int(slot["turn"]),
        virtual_user=int(slot["virtual_user"]),
    )


def find_lost_slots(
    positions: Sequence[PartPosition], schedule: NDArray[np.void]
) -> Iterator[LostSlots]:
    """Yield the planned requests (slots) without a record of each missing or killed part.

    A missing part has lost all of its slots, a killed one those that it did not record.

    Args:
        positions: All parts of the run.
        schedule: The slots of the whole run, as `shard_schedule.read` returns them.
    """
    shard = next(position.part.shard for position in positions if position.part is not None)
    part_of_slot = _find_part_of_slots(schedule, shard)
    for position in positions:
        if not position.is_incomplete:
            continue
        slots = schedule[part_of_slot == position.index]
        if position.part is not None:
            slots = _find_unrecorded_slots(slots, position.part)
        yield LostSlots(position, slots)


def _find_part_of_slots(schedule: NDArray[np.void], shard: ShardPart) -> NDArray[np.int64]:
    """Return for each slot the index, from 1, of the part that sends it.

    `schedule.shard` distributes the slots round-robin: the sessions of an open-loop stage, and the
    virtual users of a closed-loop stage. If there are n virtual users, one sends every n-th session
    of its stage.

    Args:
        schedule: The slots of the whole run. Their column `chain` is the index of the session.
        shard: What any part knows of the whole run: its stages, and the number of parts.
    """
    users_by_stage = np.array([stage.concurrency or 0 for stage in shard.stages])
    user_count = users_by_stage[schedule["stage"]]
    is_closed_loop = user_count > 0
    session_index = schedule["chain"]

    # The maximum avoids a division by zero for open-loop stages, whose result is not used.
    virtual_user = session_index % np.maximum(user_count, 1)
    distributed_index = np.where(is_closed_loop, virtual_user, session_index)
    return distributed_index % shard.count + 1


def _find_unrecorded_slots(slots: NDArray[np.void], part: RunPart) -> NDArray[np.void]:
    """Return the slots that a killed part has lost: it planned to send them but has no record.

    A stage is a part of the load with one kind of arrivals. What is lost depends on the stage:

    - With a planned number of requests, the schedule has all slots. Each one without a record is
      lost.
    - Limited by its duration alone, the schedule has only the first slot of each virtual user. The
      requests that were in flight when the part was killed are lost. A stage before the last one
      with a record had ended, and lost none.

    Args:
        slots: The planned requests (slots) of the part in the schedule.
        part: The part, with its records.
    """
    rows = _copy_to_memory(store.read_run_lazily(part.run_dir).rows)
    last_stage_index = int(rows["stage"].max()) if len(rows) else 0

    lost_slots = []
    for stage_index, stage in enumerate(part.shard.stages):
        stage_slots = slots[slots["stage"] == stage_index]
        stage_rows = rows[rows["stage"] == stage_index]
        has_planned_count = stage.slots is not None

        has_ended = stage_index < last_stage_index
        if has_planned_count:
            is_recorded = np.isin(stage_slots["slot"], stage_rows["slot"])
            lost_slots.append(stage_slots[~is_recorded])
        elif not has_ended:
            slots_in_flight = _find_slots_in_flight(
                stage_slots,
                stage_rows,
                slots_per_session=part.manifest.turns_per_session,
                user_count=stage.concurrency or 1,
            )
            lost_slots.append(slots_in_flight)

    return np.concatenate(lost_slots)


def _find_slots_in_flight(
    first_slots: NDArray[np.void],
    rows: NDArray[np.void],
    *,
    slots_per_session: int,
    user_count: int,
) -> NDArray[np.void]:
    """Return for each virtual user the slot that it was sending when its part was killed.

    That is taken to be the first slot of the session after its last one with a record. A virtual
    user without any record was sending its first slot.

    Args:
        first_slots: The first slot of each virtual user.
        rows: The records of the stage.
        slots_per_session: The number of slots, or requests, of each session.
        user_count: The number of virtual users of the stage, in all parts together.
    """
    slots_in_flight = first_slots.copy()
    for index, first_slot in enumerate(first_slots):
        recorded_slots = rows["slot"][rows["virtual_user"] == first_slot["virtual_user"]]
        if not len(recorded_slots):
            continue

        slots_in_flight["slot"][index] = _first_slot_of_next_session(
            int(first_slot["slot"]), int(recorded_slots.max()), slots_per_session, user_count
        )

        # The schedule of a closed loop has no due time for it.
        slots_in_flight["due_ns"][index] = NEVER_DUE

    return slots_in_flight


def _first_slot_of_next_session(
    first_slot: int, last_slot: int, slots_per_session: int, user_count: int
) -> int:
    """Return the first slot of the session that a virtual user sends after that of `last_slot`.

    Of n virtual users, each sends every n-th session. Example: with 4 virtual users and 3 slots per
    session, a virtual user that begins with session 1 (slots 3 to 5) goes on with session 5 (slots
    15 to 17). After `last_slot` 4 the result is 15.

    Args:
        first_slot: The first slot that the virtual user sends at all.
        last_slot: A later slot of the same virtual user.
        slots_per_session: The number of slots of each session.
        user_count: The number of virtual users.
    """
    first_session = first_slot // slots_per_session
    last_session = last_slot // slots_per_session
    begun_sessions = (last_session - first_session) // user_count + 1
    return first_slot + begun_sessions * user_count * slots_per_session
