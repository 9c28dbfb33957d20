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
from loadgen.core.results.record import ROW, RecordKey, encode_unsent_record
from loadgen.shards.parts import PartPosition, RunPart

if TYPE_CHECKING:
    import pyarrow as pa

BLOCK_ROWS = 1_000_000
"""Rows that are in memory at once, and in one row group of the merged file."""
TIME_COLUMNS = (
    "due_ns",
    "ready_ns",
    "sent_ns",
    "first_byte_ns",
    "first_event_ns",
    "first_token_ns",
    "first_answer_ns",
    "last_token_ns",
    "end_ns",
    "done_ns",
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

    Args:
        positions: All parts of the run, missing ones as well.
        lost: The planned requests without a record.
    """
    is_empty = True
    for table in _tables_of_parts(positions, lost):
        is_empty = False
        yield table
    if is_empty:  # The file of a run without any record needs a table too, for its columns.
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
            yield parquet.to_table(_lost_records(block, position.first_worker), [error_text])


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


def _lost_records(slots: NDArray[np.void], worker: int) -> NDArray[np.void]:
    """Return a record with the status `lost` for each slot of a killed or missing part.

    `worker` is the number of the worker that the records name.
    """
    records = []
    for slot in slots:
        slot_id = int(slot["slot"])
        key = RecordKey(
            slot=slot_id,
            request=slot_id,
            stage=int(slot["stage"]),
            worker=worker,
            target=0,
            session=int(slot["session"]),
            turn=int(slot["turn"]),
            virtual_user=int(slot["virtual_user"]),
        )
        due_ns = int(slot["due_ns"])
        records.append(
            encode_unsent_record(key, due_ns, "worker_died", "lost", UNKNOWN, text_index=0)
        )
    return np.frombuffer(b"".join(records), ROW)


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
    """Return the slots that a killed part planned to send but has no record of.

    - Of a stage with a planned number of requests, these are all slots without a record.
    - Of a stage that is limited by its duration alone, the schedule has only the first slot of each
      virtual user. Lost are the requests that were in flight when the part was killed: the next
      slot of each virtual user. A stage before the last recorded one had ended, and lost none.

    Args:
        slots: The slots of the part in the schedule.
        part: The part, with its records.
    """
    rows = _copy_to_memory(store.read_run_lazily(part.run_dir).rows)
    last_stage = int(rows["stage"].max()) if len(rows) else 0
    unrecorded = []
    for index, stage in enumerate(part.shard.stages):
        stage_slots = slots[slots["stage"] == index]
        stage_rows = rows[rows["stage"] == index]
        has_planned_count = stage.slots is not None
        if has_planned_count:
            is_recorded = np.isin(stage_slots["slot"], stage_rows["slot"])
            unrecorded.append(stage_slots[~is_recorded])
        elif index >= last_stage:
            turns = part.manifest.turns_per_session
            concurrency = stage.concurrency or 1
            unrecorded.append(_next_slots(stage_slots, stage_rows, turns, concurrency))
    return np.concatenate(unrecorded)


def _next_slots(
    first_slots: NDArray[np.void], rows: NDArray[np.void], turns: int, concurrency: int
) -> NDArray[np.void]:
    """Return for each virtual user the slot that follows its last one with a record.

    A virtual user sends every n-th session if there are n of them, and a session has a fixed number
    of slots. Example: with 4 virtual users and 3 slots per session, a virtual user that starts with
    session 1 (slots 3 to 5) goes on with session 5 (slots 15 to 17), which is 4 * 3 slots further.
    The returned slot is the first one of such a next session. Without any record it is the first
    slot of the virtual user.

    Args:
        first_slots: The first slot of each virtual user.
        rows: The records of the stage.
        turns: The number of slots of a session.
        concurrency: The number of virtual users.
    """
    # In a round, each virtual user sends one session.
    slots_per_round = concurrency * turns
    next_slots = first_slots.copy()
    for slot in next_slots:
        is_of_user = rows["virtual_user"] == slot["virtual_user"]
        if not is_of_user.any():
            continue
        first_session = int(slot["slot"]) // turns
        last_session = int(rows["slot"][is_of_user].max()) // turns
        begun_rounds = (last_session - first_session) // concurrency + 1
        slot["slot"] += begun_rounds * slots_per_round
        # The schedule of a closed loop has no due time for it.
        slot["due_ns"] = -1
    return next_slots
