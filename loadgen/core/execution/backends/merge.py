"""Merge the results of the workers of a run, and complete the records of a worker that died."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from loadgen.core.execution.bodies import UNKNOWN
from loadgen.core.execution.plan import Plan
from loadgen.core.execution.worker_resources import WorkerResult
from loadgen.core.results.record import ROW, RecordKey, encode_unsent_record
from loadgen.core.results.record_log import RecordLog, recorded_slots, segments
from loadgen.core.schedule.schedule import Schedule, ScheduledStage, Slot, shard

_SLOTS_PER_BATCH = 100_000
_DIGEST_MODULUS = 1 << 128


def merge_results(
    plan: Plan, results: Sequence[WorkerResult | None], death_reasons: Sequence[str]
) -> WorkerResult:
    """Return the sum of the results of all workers, and record what dead workers have lost.

    Args:
        plan: The plan of the run.
        results: The result of each worker by its number, or None for a worker that died. Its
            requests that have no record yet are recorded as `lost`.
        death_reasons: For each worker by its number, the text of these records if it died.
    """
    total = WorkerResult(prompts_total=0, prompts_count=0, late_bodies=0, interrupted=False)
    for worker, (result, death_reason) in enumerate(zip(results, death_reasons, strict=True)):
        if result is None:
            record_lost_slots(plan, worker, death_reason)
        else:
            total = _add_results(total, result)
    return total


def record_lost_slots(plan: Plan, worker: int, reason: str) -> None:
    """Write a record `lost` for each request of a dead worker that has no record.

    A slot is the place of a request in the schedule, and each worker sends a share of the slots.
    Metrics are computed from one record per slot, so requests without one would not be counted. No
    process may write the files of that worker any more.

    Args:
        plan: The plan of the run.
        worker: The number of the worker.
        reason: Why it died, which is stored as the text of the records.
    """
    folder = plan.job.folder
    worker_schedule = shard(plan.schedule, worker, plan.job.settings.workers)
    _remove_incomplete_record(plan, worker)
    recorded = recorded_slots(folder, worker)
    record_log = RecordLog(folder, worker)
    text_index = record_log.store_text(reason)

    # A load may have millions of slots, so only some of them are in memory at a time.
    for slot_ids in _in_batches(_slots_to_record(worker_schedule, recorded), _SLOTS_PER_BATCH):
        lost_slot_ids = np.setdiff1d(np.array(slot_ids), recorded["slot"]).tolist()
        for slot_id in lost_slot_ids:
            slot = plan.schedule.slot(slot_id)
            record_log.add_record(_encode_lost_record(slot, worker, text_index))
        record_log.flush()

    record_log.close()


def _in_batches(slot_ids: Iterator[int], batch_size: int) -> Iterator[list[int]]:
    """Yield slot ids in lists of at most `batch_size`."""
    while batch := list(islice(slot_ids, batch_size)):
        yield batch


def _encode_lost_record(slot: Slot, worker: int, text_index: int) -> bytes:
    """Return the record `lost` of a slot.

    Args:
        slot: The slot.
        worker: The number of the worker that died.
        text_index: The index of the text that says why it died.
    """
    return encode_unsent_record(
        _record_key(slot, worker),
        slot.due_ns,
        kind="worker_died",
        status="lost",
        request_facts=UNKNOWN,  # The bodies that the worker built are lost, too.
        text_index=text_index,
    )


def _add_results(left: WorkerResult, right: WorkerResult) -> WorkerResult:
    """Return the result of two workers together.

    Counts are added. The digest of a load is the sum of the hashes of all its prompts modulo
    2**128, so these sums are added, too. A target counts as down from the time at which the first
    worker saw it. Notes and the cluster stay empty, because a worker does not report them.
    """
    # By the index of the target.
    down_since_s = dict(left.down_since_s)
    for target, at_s in right.down_since_s.items():
        down_since_s[target] = min(at_s, down_since_s.get(target, at_s))

    return WorkerResult(
        prompts_total=(left.prompts_total + right.prompts_total) % _DIGEST_MODULUS,
        prompts_count=left.prompts_count + right.prompts_count,
        bodies_total=(left.bodies_total + right.bodies_total) % _DIGEST_MODULUS,
        late_bodies=left.late_bodies + right.late_bodies,
        interrupted=left.interrupted or right.interrupted,
        stopped=left.stopped or right.stopped,
        down_since_s=down_since_s,
        hot_path=_slower_hot_path(left.hot_path, right.hot_path),
    )


def _slower_hot_path(left: str, right: str) -> str:
    """Return the slower of two implementations that read sockets; "" stands for none."""
    fastest_first = ("", "compiled", "python")
    return max(left, right, key=fastest_first.index)


def _remove_incomplete_record(plan: Plan, worker: int) -> None:
    """Remove an incomplete record at the end of a file, which would shift all records after it."""
    last_file = segments(plan.job.folder, worker)[-1].path
    with last_file.open("r+b") as file:
        file.truncate(last_file.stat().st_size // ROW.itemsize * ROW.itemsize)


def _record_key(slot: Slot, worker: int) -> RecordKey:
    """Return the key of the record of a slot that was not sent."""
    return RecordKey(
        slot=slot.slot_id,
        request=slot.slot_id,
        stage=slot.stage,
        worker=worker,
        target=0,
        session=slot.session,
        turn=slot.turn,
        virtual_user=slot.virtual_user,
    )


def _slots_to_record(worker_schedule: Schedule, recorded: NDArray[np.void]) -> Iterator[int]:
    """Yield the slots of a dead worker that must have a record in the results of the run.

    A slot is the place of a request in the schedule. The caller adds a record to those that have
    none. If the load has a fixed number of requests, all slots of the worker are returned. If only
    a duration limits the load, the number of slots is not known. Then only those are returned that
    the worker was sending when it died, since it had recorded all earlier ones.

    Args:
        worker_schedule: The part of the schedule that the worker sends.
        recorded: The slots that have a record, as an array of RECORDED_SLOT.
    """
    has_fixed_length = worker_schedule.slot_count is not None
    if has_fixed_length:
        return worker_schedule.slot_ids()
    return iter(sorted(_slots_at_death(worker_schedule, recorded)))


def _slots_at_death(worker_schedule: Schedule, recorded: NDArray[np.void]) -> Iterator[int]:
    """Yield the slots that the virtual users of a worker were sending when it died.

    This is for a closed loop that only a duration limits. Each virtual user sends one session (a
    conversation) after the other. A user with records was sending what follows its last recorded
    slot. A user without a record in the last stage was sending the first slot of its first session
    in this stage.

    Sessions are numbered through all stages, and each has `max_turns` slots. Example: with
    max_turns=2, session 5 has the slots 10 and 11.

    Args:
        worker_schedule: The part of the schedule that the worker sends.
        recorded: The slots that have a record, as an array of RECORDED_SLOT.
    """
    # The worker died in the last stage of which it has a record.
    last_stage_index = int(recorded["stage"].max()) if len(recorded) else 0
    stage = worker_schedule.stages[last_stage_index]
    first_slot_of_stage = stage.first_session * worker_schedule.max_turns

    last_slot_by_user = _last_slot_by_user(recorded, first_slot_of_stage)
    for virtual_user in worker_schedule.virtual_users_of(stage):
        last_slot = last_slot_by_user.get(virtual_user)
        if last_slot is None:
            first_session_of_user = stage.first_session + virtual_user
            yield worker_schedule.first_slot_id(first_session_of_user)
        else:
            yield from _slots_after(worker_schedule, stage, last_slot)


def _slots_after(worker_schedule: Schedule, stage: ScheduledStage, last_slot: int) -> Sequence[int]:
    """Return the slots that a virtual user sends next after `last_slot`.

    They are the later turns of the same session (conversation). After its last turn, they are the
    first slot of the user's next session. Sessions are assigned to the users of a stage in turn:
    with 3 users, user 0 has the sessions 0, 3 and 6, so the next session after 3 is 3 + 3 = 6.
    """
    later_turns = worker_schedule.next_slot_ids(last_slot)
    if later_turns:
        return later_turns
    last_session = last_slot // worker_schedule.max_turns
    next_session = last_session + stage.concurrency
    return [worker_schedule.first_slot_id(next_session)]


def _last_slot_by_user(recorded: NDArray[np.void], first_slot_id: int) -> dict[int, int]:
    """Return the largest recorded slot of each virtual user, from a slot on."""
    recorded_of_stage = recorded[recorded["slot"] >= first_slot_id]
    ordered = recorded_of_stage[np.argsort(recorded_of_stage["slot"])]
    # Of several entries with one key, a dict keeps the last, which has the largest slot.
    return dict(zip(ordered["virtual_user"].tolist(), ordered["slot"].tolist(), strict=True))
