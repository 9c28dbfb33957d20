"""What the shares of a run add up to, and what is left of a worker that did not live to report its own. It reads and
appends to the files of that worker; who noticed its end, and how, is `local.py`'s and `ray.py`'s part.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from loadgen.execution.backends.single import Share
from loadgen.execution.bodies import UNKNOWN
from loadgen.execution.plan import Job
from loadgen.results import manifest, slot_ranges, store
from loadgen.results.record import ROW, RowPlace, unsent_row
from loadgen.schedule import timetable as schedule

AT_ONCE = 100_000  # slots that are looked up together
NOTHING = Share(prompts_total=0, prompts_count=0, late=0, interrupted=False)


def add(left: Share, right: Share) -> Share:
    """What two shares report together."""
    return Share(
        prompts_total=(left.prompts_total + right.prompts_total) % (1 << 128),
        prompts_count=left.prompts_count + right.prompts_count,
        late=left.late + right.late,
        interrupted=left.interrupted or right.interrupted,
        stopped=left.stopped or right.stopped,
        down={
            target: min(one.down[target] for one in (left, right) if target in one.down)
            for target in {*left.down, *right.down}
        },
        notes=(*left.notes, *right.notes),
    )


def lost(job: Job, timetable: schedule.Schedule, i: int, workers: int, why: str) -> Share:
    """What a dead worker did not finish: a record `lost` for each of its slots that has none, with `why` as its text.
    Nothing may write its files any more."""
    part = schedule.shard(timetable, i, workers)
    last = store.segments(job.folder, i)[-1].path
    with last.open("r+b") as file:  # half a row at the end would shift all that follow
        file.truncate(last.stat().st_size // ROW.itemsize * ROW.itemsize)
    path = job.folder / "run.json"
    runs = store.recorded(job.folder, i, manifest.decode(path.read_bytes(), str(path)))
    spool = store.Spool(job.folder, i)
    text = spool.text(why)
    expected = part.numbers() if part.slots is not None else iter(sorted(_under_way(part, runs)))
    while numbers := list(islice(expected, AT_ONCE)):
        for number in np.array(numbers)[~slot_ranges.among(runs, np.array(numbers))].tolist():
            slot = timetable.slot(number)
            place = RowPlace(number, slot.request, slot.stage, i, 0, slot.session, slot.turn, slot.lane)
            spool.row(unsent_row(place, slot.due_ns, "worker_died", "lost", UNKNOWN, text))
        spool.flush()
    spool.close()
    return NOTHING


def _under_way(part: schedule.Schedule, runs: NDArray[np.void]) -> Iterator[int]:
    """Of a closed loop without a count: the one slot of each lane that was under way in the last stage reached."""
    stage = int(runs["stage"].max()) if len(runs) else 0
    span, turns = part.stages[stage], part.turns
    last: dict[int, int] = {}
    for lane, number in zip(runs["lane"].tolist(), runs["last"].tolist(), strict=True):
        if number // turns >= span.first_chain:
            last[lane] = max(number, last.get(lane, -1))
    for lane in part.own_lanes(span):
        number = last.get(lane)
        if number is None:
            yield (span.first_chain + lane) * turns
        elif (number + 1) % turns:
            yield number + 1
        else:
            yield (number // turns + span.lanes) * turns
