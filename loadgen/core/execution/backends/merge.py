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
from loadgen.core.execution.worker_resources import WorkerResult
from loadgen.core.results.record import ROW, RecordKey, unsent_record
from loadgen.core.results.spool import Spool, recorded_slots, segments
from loadgen.core.schedule.schedule import Schedule, shard

AT_ONCE = 100_000  # slots that are checked in one step


def total(
    plan: Plan, shares: Sequence[WorkerResult | None], reasons: Sequence[str]
) -> WorkerResult:
    """The sum of all workers' shares. Without one, the worker died, and its unfinished slots are recorded as `lost`.

    `reasons`: of each worker, why it would be lost.
    """
    for i, (share, why) in enumerate(zip(shares, reasons, strict=True)):
        if share is None:
            record_lost(plan, i, why)
    return reduce(
        _sum,
        filter(None, shares),
        WorkerResult(prompts_total=0, prompts_count=0, late=0, interrupted=False),
    )


def _sum(left: WorkerResult, right: WorkerResult) -> WorkerResult:
    return WorkerResult(
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
    job, schedule = plan.job, plan.schedule
    own_schedule = shard(schedule, i, job.settings.workers)
    last_file = segments(job.folder, i)[-1].path
    with last_file.open(
        "r+b"
    ) as file:  # an incomplete row at the end would shift all rows after it
        file.truncate(last_file.stat().st_size // ROW.itemsize * ROW.itemsize)
    recorded = recorded_slots(job.folder, i)
    spool = Spool(job.folder, i)
    text = spool.text(why)
    expected = (
        own_schedule.slot_ids()
        if own_schedule.slot_count is not None
        else iter(sorted(_in_flight(own_schedule, recorded)))
    )
    while numbers := list(islice(expected, AT_ONCE)):
        for number in np.setdiff1d(np.array(numbers), recorded["slot"]).tolist():
            slot = schedule.slot(number)
            place = RecordKey(
                number, number, slot.stage, i, 0, slot.session, slot.turn, slot.virtual_user
            )
            spool.row(unsent_record(place, slot.due_ns, "worker_died", "lost", UNKNOWN, text))
        spool.flush()
    spool.close()


def _in_flight(own_schedule: Schedule, recorded: NDArray[np.void]) -> Iterator[int]:
    """Yield the slot of each virtual user that was in flight, in the last stage with a record.

    This is for a closed loop without a number of requests. `recorded` has the type RECORDED_SLOT.
    """
    stage = int(recorded["stage"].max()) if len(recorded) else 0
    span, turns = own_schedule.stages[stage], own_schedule.max_turns
    own_slots = recorded[recorded["slot"] // turns >= span.first_session]
    in_order = own_slots[np.argsort(own_slots["slot"])]
    last_slot = dict(zip(in_order["virtual_user"].tolist(), in_order["slot"].tolist(), strict=True))
    for lane in own_schedule.virtual_users_of(span):
        last = last_slot.get(lane)
        if last is None:
            yield own_schedule.first_slot_id(span.first_session + lane)
            continue
        following = own_schedule.next_slot_ids(last)
        yield from following or [own_schedule.first_slot_id(last // turns + span.concurrency)]
