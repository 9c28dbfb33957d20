"""Build the records of a merged run: those of its parts, and `lost` records for other slots."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loadgen.core.execution.bodies import UNKNOWN
from loadgen.core.results import parquet, store
from loadgen.core.results.manifest import ShardPart
from loadgen.core.results.record import ROW, RecordKey, encode_unsent_record
from loadgen.shards.parts import PartPosition, RunPart

BLOCK_ROWS = 1_000_000
"""Rows that are in memory at once, and in one row group of the merged file."""
TIMES = (
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
    """Slots of a part that have no record, as rows of `shard_schedule.SLOT`."""

    position: PartPosition
    slots: NDArray[np.void]


def record_tables(positions: Sequence[PartPosition], lost: Sequence[LostSlots]) -> Iterator[Any]:
    """Yield the records of the merged run as pyarrow tables."""
    is_empty = True
    for table in _tables_of_parts(positions, lost):
        is_empty = False
        yield table
    if is_empty:  # a run without any record has a file too
        yield parquet.to_table(np.zeros(0, ROW), [])


def _tables_of_parts(positions: Sequence[PartPosition], lost: Sequence[LostSlots]) -> Iterator[Any]:
    """Yield the stored records of all parts, and then records for the lost slots."""
    for position in positions:
        if position.part is not None:
            yield from _tables_of_part(position, position.part)
    for lost_slots in lost:
        for first in range(0, len(lost_slots.slots), BLOCK_ROWS):
            block = lost_slots.slots[first : first + BLOCK_ROWS]
            # The first worker of the part stands for all of them: which one lost it is not known.
            rows = _lost_records(block, lost_slots.position.first_worker)
            yield parquet.to_table(
                rows, [f"{lost_slots.position.name}: {lost_slots.position.state}"]
            )


def _tables_of_part(position: PartPosition, part: RunPart) -> Iterator[Any]:
    """Yield the records of one part, with the workers and times of the merged run."""
    stored = store.read_run_lazily(part.run_dir)
    for first in range(0, len(stored.rows), BLOCK_ROWS):
        rows = _in_memory(stored.rows[first : first + BLOCK_ROWS])
        rows["worker"] += position.first_worker
        for name in TIMES:
            has_happened = rows[name] >= 0
            rows[name][has_happened] += position.delay_ns
        yield parquet.to_table(rows, stored.texts)


def _in_memory(rows: Any) -> NDArray[np.void]:
    """Return rows as an array that may be changed; they may come from columns on disk."""
    copied = np.zeros(len(rows), ROW)
    for name in ROW.names or ():
        copied[name] = rows[name]
    return copied


def _lost_records(slots: NDArray[np.void], worker: int) -> NDArray[np.void]:
    """Return a record with the status `lost` for each slot of a killed or missing part."""
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
        records.append(encode_unsent_record(key, due_ns, "worker_died", "lost", UNKNOWN, text=0))
    return np.frombuffer(b"".join(records), ROW)


def find_lost_slots(
    positions: Sequence[PartPosition], schedule: NDArray[np.void]
) -> Iterator[LostSlots]:
    """Yield the slots without a record of the parts that are missing or were killed.

    Args:
        positions: all parts of the run.
        schedule: the slots of the whole run, as `shard_schedule.read` returns them.
    """
    shard = next(position.part.shard for position in positions if position.part is not None)
    owners = _owning_parts(schedule, shard)
    for position in positions:
        if position.is_incomplete:
            slots = schedule[owners == position.index]
            yield LostSlots(
                position, slots if position.part is None else _unrecorded(slots, position.part)
            )


def _owning_parts(schedule: NDArray[np.void], shard: ShardPart) -> NDArray[np.int64]:
    """Return the index of the part that each slot belongs to, as `schedule.shard` divides them.

    An open-loop stage deals out its sessions in turns. A closed-loop stage deals out its virtual
    users, and a virtual user sends every n-th session if there are n users.
    """
    users_of_stage = np.array([stage.concurrency or 0 for stage in shard.stages])
    users = users_of_stage[schedule["stage"]]
    sessions = schedule["chain"]
    # The maximum avoids a division by zero for open-loop stages, whose result is not used.
    virtual_users = sessions % np.maximum(users, 1)
    dealt_numbers = np.where(users > 0, virtual_users, sessions)
    return dealt_numbers % shard.count + 1


def _unrecorded(slots: NDArray[np.void], part: RunPart) -> NDArray[np.void]:
    """Return the slots of a killed part that it has no record of.

    Of a stage that its duration alone limits, these are the slots that were in flight: the next one
    of each virtual user.
    """
    rows = _in_memory(store.read_run_lazily(part.run_dir).rows)
    last_stage = int(rows["stage"].max()) if len(rows) else 0
    unrecorded = []
    for index, stage in enumerate(part.shard.stages):
        of_stage = slots[slots["stage"] == index]
        recorded = rows[rows["stage"] == index]
        if stage.slots is not None:
            unrecorded.append(of_stage[~np.isin(of_stage["slot"], recorded["slot"])])
        elif index >= last_stage:
            turns = part.manifest.turns_per_session
            unrecorded.append(_next_slots(of_stage, recorded, turns, stage.concurrency or 1))
    return np.concatenate(unrecorded)


def _next_slots(
    first_slots: NDArray[np.void], recorded: NDArray[np.void], turns: int, concurrency: int
) -> NDArray[np.void]:
    """Return the slot of each virtual user that follows the last one with a record.

    Each virtual user sends every n-th session if there are n users, and a session has a fixed
    number of slots, so the slot after k rounds is k * n * turns further. Of conversations and
    tasks, it is the first slot of the next conversation or task.

    Args:
        first_slots: The first slot of each virtual user.
        recorded: The records of the stage.
        turns: The number of slots of a session.
        concurrency: The number of virtual users.
    """
    next_slots = first_slots.copy()
    for slot in next_slots:
        is_of_user = recorded["virtual_user"] == slot["virtual_user"]
        if is_of_user.any():
            last_session = int(recorded["slot"][is_of_user].max()) // turns
            first_session = int(slot["slot"]) // turns
            rounds = (last_session - first_session) // concurrency + 1
            slot["slot"] += rounds * concurrency * turns
            # The schedule of a closed loop has no due time for it.
            slot["due_ns"] = -1
    return next_slots
