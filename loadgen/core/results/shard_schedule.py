"""The schedule of a whole run, as each of its shards stores it in `schedule.parquet`. Does IO.

`loadgen merge` needs it to name the requests of a part that is missing. It has every slot of a
stage with a count. Of a stage that its duration alone limits, it has the first slot of each
virtual user.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from loadgen.core.results import parquet
from loadgen.core.schedule.schedule import Schedule, ScheduledStage

FILE = "schedule.parquet"
SLOT = np.dtype(
    [
        ("slot", "<i8"),
        ("stage", "<i2"),
        ("session", "<i4"),
        ("turn", "<i2"),
        ("virtual_user", "<i4"),
        ("chain", "<i8"),
        ("due_ns", "<i8"),
    ]
)
"""`chain`: the index in its stage of the request, conversation or task that a slot belongs to."""


def write(folder: Path, schedule: Schedule) -> None:
    """Write the slots of a whole schedule into the folder of a shard."""
    import pyarrow as pa

    slots = _stored_slots(schedule)
    columns = {
        name: parquet.nullable(np.ascontiguousarray(slots[name])) for name in SLOT.names or ()
    }
    parquet.write_tables(folder / FILE, [pa.table(columns)])


def read(folder: Path) -> NDArray[np.void]:
    """Return the slots of the whole run that the folder of a shard has stored."""
    import pyarrow.parquet as pq

    table = pq.read_table(folder / FILE)
    slots = np.zeros(len(table), SLOT)
    for name in SLOT.names or ():
        slots[name] = np.asarray(table.column(name))
    return slots


def _stored_slots(schedule: Schedule) -> NDArray[np.void]:
    """Return the slots of a whole schedule that a shard stores, as an array of SLOT.

    A slot is the place of one request in the schedule. A stage (phase) with a number of requests is
    stored completely. A stage that only a duration limits has an unknown number of requests, so
    only the slot with which each virtual user begins is stored.
    """
    slots_of_stages = []
    for stage in schedule.stages:
        slots = _slots_of_stage(schedule, stage)
        has_only_duration = stage.session_count is None
        if has_only_duration:
            # Until here, `slots` has all turns of the first session of each virtual user.
            slots = slots[slots["turn"] == 0]
        slots_of_stages.append(slots)

    return np.concatenate(slots_of_stages)


def _slots_of_stage(schedule: Schedule, stage: ScheduledStage) -> NDArray[np.void]:
    """Return the slots of a stage as an array of SLOT.

    Requests belong to sessions, such as conversations, and the requests of one session are its
    turns. Sessions are numbered through all stages, and session s has the slots from
    s * max_turns on. The column `chain` has the number of the session within its stage. Example:
    with max_turns=2, slot 11 belongs to session 5. If the stage begins with session 3, its chain
    is 5 - 3 = 2.
    """
    columns = schedule.columns_of(stage)
    session_in_schedule = columns.slot_id // schedule.max_turns
    slots = np.zeros(len(columns.slot_id), SLOT)
    slots["slot"] = columns.slot_id
    slots["stage"] = columns.stage
    slots["session"] = columns.session
    slots["turn"] = columns.turn
    slots["virtual_user"] = columns.virtual_user
    slots["chain"] = session_in_schedule - stage.first_session
    slots["due_ns"] = columns.due_ns

    return slots
