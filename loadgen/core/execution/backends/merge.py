"""Adds up the shares of a run, and completes the records of a worker that died before it could report its share.

IO: reads and appends to the files of a dead worker. `local.py` and `cluster/worker_group.py` detect that a worker died.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from loadgen.core.execution.bodies import UNKNOWN
from loadgen.core.execution.plan import Plan
from loadgen.core.execution.share import Share
from loadgen.core.results import manifest, slot_ranges
from loadgen.core.results.record import ROW, RecordKey, unsent_record
from loadgen.core.results.spool import Spool, recorded, segments
from loadgen.core.schedule import timetable as schedule

AT_ONCE = 100_000  # slots that are checked in one step


def total(plan: Plan, shares: Sequence[Share | None], reasons: Sequence[str]) -> Share:
    """The sum of all workers' shares. Without one, the worker died, and its unfinished slots are recorded as `lost`.

    `reasons`: of each worker, why it would be lost.
    """
    for i, (share, why) in enumerate(zip(shares, reasons, strict=True)):
        if share is None:
            record_lost(plan, i, why)
    return reduce(
        _sum,
        filter(None, shares),
        Share(prompts_total=0, prompts_count=0, late=0, interrupted=False),
    )


def _sum(left: Share, right: Share) -> Share:
    return Share(
        prompts_total=(left.prompts_total + right.prompts_total) % (1 << 128),
        prompts_count=left.prompts_count + right.prompts_count,
        bodies_total=(left.bodies_total + right.bodies_total) % (1 << 128),
        late=left.late + right.late,
        interrupted=left.interrupted or right.interrupted,
        stopped=left.stopped or right.stopped,
        down={
            target: min(share.down[target] for share in (left, right) if target in share.down)
            for target in {*left.down, *right.down}
        },
        hot_path=max(left.hot_path, right.hot_path),  # "" < "compiled" < "python": the slower one
    )


def record_lost(plan: Plan, i: int, why: str) -> None:
    """Write a record `lost`, with `why` as its text, for each slot of a dead worker that has no record.

    No process may write the files of that worker any more.
    """
    job, timetable = plan.job, plan.timetable
    own_schedule = schedule.shard(timetable, i, job.settings.workers)
    last_file = segments(job.folder, i)[-1].path
    with last_file.open(
        "r+b"
    ) as file:  # an incomplete row at the end would shift all rows after it
        file.truncate(last_file.stat().st_size // ROW.itemsize * ROW.itemsize)
    path = job.folder / "run.json"
    ranges = recorded(job.folder, i, manifest.decode(path.read_bytes(), str(path)))
    spool = Spool(job.folder, i)
    text = spool.text(why)
    expected = (
        own_schedule.numbers()
        if own_schedule.slots is not None
        else iter(sorted(_in_flight(own_schedule, ranges)))
    )
    while numbers := list(islice(expected, AT_ONCE)):
        for number in np.array(numbers)[~slot_ranges.among(ranges, np.array(numbers))].tolist():
            slot = timetable.slot(number)
            place = RecordKey(number, number, slot.stage, i, 0, slot.session, slot.turn, slot.lane)
            spool.row(unsent_record(place, slot.due_ns, "worker_died", "lost", UNKNOWN, text))
        spool.flush()
    spool.close()


def _in_flight(own_schedule: schedule.Schedule, ranges: NDArray[np.void]) -> Iterator[int]:
    """For a closed loop without a count: the slot of each lane that was in flight, in the last stage with a record."""
    stage = int(ranges["stage"].max()) if len(ranges) else 0
    span, turns = own_schedule.stages[stage], own_schedule.turns
    last_number: dict[int, int] = {}
    for lane, number in zip(ranges["lane"].tolist(), ranges["last"].tolist(), strict=True):
        if number // turns >= span.first_chain:
            last_number[lane] = max(number, last_number.get(lane, -1))
    for lane in own_schedule.own_lanes(span):
        last = last_number.get(lane)
        if last is None:
            yield own_schedule.first_number(span.first_chain + lane)
            continue
        following = own_schedule.following(last)
        yield from following or [own_schedule.first_number(last // turns + span.lanes)]
