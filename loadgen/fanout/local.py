"""Several workers on this machine: a process each, a share each by arithmetic, nothing shared while the clock runs.

A worker builds its share, says `ready`, gets the common start instant, works, and reports a `Share`. Each has its own
sockets and its own files. IO; what a worker does is `run.work`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from time import monotonic_ns
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loadgen import schedule, store
from loadgen.board import Board
from loadgen.bodies import UNKNOWN
from loadgen.drive import Drive
from loadgen.errors import Fault, TargetError
from loadgen.progress import Counted
from loadgen.record import ROW, Place, unsent_row
from loadgen.run import Job, Share, work

BOARD = "board"
SHOW_S = 1.0
STOPPING = b"stopping\n"
HEAD_START_NS = 200_000_000  # from the last `ready` to instant 0: enough for every worker to read it


async def run(
    job: Job,
    timetable: schedule.Schedule,
    workers: int,
    on_drive: Callable[[Counted], Any] | None = None,
    begin: Callable[[int], None] = lambda start_ns: None,
) -> Share:
    """Run a job on this many worker processes. A worker that dies leaves its unfinished slots as `lost`. `begin` is
    told the start instant as soon as it is set.

    Raises TargetError when a worker could not begin. The first SIGINT or SIGTERM is passed on to all (they stop and
    drain), so is the second (they leave).
    """
    (job.folder / "spool").mkdir(exist_ok=True)
    board = Board(job.folder / "spool" / BOARD, workers)
    started = [_start(job, i, workers) for i in range(workers)]
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, _pass_on, started, number)
    try:
        await asyncio.gather(*(asyncio.to_thread(_expect_ready, worker) for worker in started))
        if on_drive is not None:
            on_drive(board)
        start_ns = monotonic_ns() + HEAD_START_NS
        begin(start_ns)
        for worker in started:
            assert worker.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it is dead already, as its report will show
                worker.stdin.write(f"{start_ns}\n".encode())
                worker.stdin.flush()
        told = await asyncio.gather(*(asyncio.to_thread(_report, worker, started) for worker in started))
        total = Share(prompts_total=0, prompts_count=0, late=0, interrupted=False)
        for i, share in enumerate(told):
            total = _add(total, share or _lost(job, timetable, i, workers))
        return total
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
        for worker in started:
            if worker.poll() is None:
                worker.terminate()
            for pipe in (worker.stdin, worker.stdout):
                with contextlib.suppress(BrokenPipeError):
                    if pipe is not None:
                        pipe.close()
            worker.wait()


def _start(job: Job, i: int, workers: int) -> subprocess.Popen[bytes]:
    worker = subprocess.Popen(
        [sys.executable, "-m", "loadgen.fanout.local"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # the terminal's Ctrl-C comes through us, once
    )
    assert worker.stdin is not None
    data = pickle.dumps((job, i, workers))
    worker.stdin.write(len(data).to_bytes(8, "little") + data)
    worker.stdin.flush()
    return worker


def _pass_on(workers: list[subprocess.Popen[bytes]], number: int) -> None:
    for worker in workers:
        if worker.poll() is None:
            worker.send_signal(number)


def _expect_ready(worker: subprocess.Popen[bytes]) -> None:
    assert worker.stdout is not None
    said = worker.stdout.readline()
    if said != b"ready\n":
        fault = json.loads(said) if said.startswith(b"{") else {"what": "a worker process did not start"}
        raise TargetError(fault["what"], fault.get("where", ""), fault.get("hint", ""))


def _report(worker: subprocess.Popen[bytes], all_workers: list[subprocess.Popen[bytes]]) -> Share | None:
    """What a worker says at its end. That it stops because a target is gone it says at once: then the others stop."""
    assert worker.stdout is not None
    share = None
    for said in worker.stdout:
        if said != STOPPING:
            told = json.loads(said)
            share = Share(**{**told, "down": {int(target): at_s for target, at_s in told["down"].items()}})
        if share is None or share.stopped:
            for other in all_workers:
                with contextlib.suppress(BrokenPipeError):
                    assert other.stdin is not None
                    os.write(other.stdin.fileno(), STOPPING)
    worker.wait()
    return share


def _add(left: Share, right: Share) -> Share:
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
    )


def _lost(job: Job, timetable: schedule.Schedule, i: int, workers: int) -> Share:
    """What a dead worker did not finish: a record `lost` for each of its slots that has none."""
    part = schedule.shard(timetable, i, workers)
    last = store.segments(job.folder, i)[-1].path
    with last.open("r+b") as file:  # half a row at the end would shift all that follow
        file.truncate(last.stat().st_size // ROW.itemsize * ROW.itemsize)
    rows = store.recorded(job.folder, i)
    seen = set(rows["slot"].tolist())
    spool = store.Spool(job.folder, i)
    text = spool.text(f"worker {i} died")
    for number in part.numbers() if part.slots is not None else _under_way(part, rows):
        if number not in seen:
            slot = timetable.slot(number)
            place = Place(number, slot.request, slot.stage, i, 0, slot.session, slot.turn, slot.lane)
            spool.row(unsent_row(place, slot.due_ns, "worker_died", "lost", UNKNOWN, text))
    spool.close()
    return Share(prompts_total=0, prompts_count=0, late=0, interrupted=False)


def _under_way(part: schedule.Schedule, rows: NDArray[np.void]) -> Iterator[int]:
    """Of a closed loop without a count: the one slot of each lane that was under way in the last stage reached."""
    stage = int(rows["stage"].max()) if len(rows) else 0
    span, turns = part.stages[stage], part.turns
    last: dict[int, int] = {}
    for lane, number in zip(rows["lane"].tolist(), rows["slot"].tolist(), strict=True):
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


def _worker() -> None:
    import uvloop

    source = sys.stdin.buffer
    job, i, workers = pickle.loads(source.read(int.from_bytes(source.read(8), "little")))

    async def gate() -> int:
        _say(b"ready\n")
        line = source.readline()
        if not line:  # another worker could not begin
            raise ConnectionAbortedError
        start_ns = int(line)
        await asyncio.sleep(max(0, start_ns - monotonic_ns() - HEAD_START_NS // 2) / 1e9)
        return start_ns

    def begun(drive: Drive) -> None:
        """Counters go to the board; and the load ends with the process that asked for it, as the end of stdin tells."""
        loop = asyncio.get_running_loop()
        board = Board(job.folder / "spool" / BOARD, workers)
        said = False

        def show() -> None:
            nonlocal said
            board.write(i, drive.counters)
            if drive.stopped and not said:
                said = True
                _say(STOPPING)
            loop.call_later(SHOW_S, show)

        def told() -> None:
            if os.read(0, 64):
                drive.give_up()
                return
            loop.remove_reader(0)
            drive.stop()
            drive.stop()

        loop.add_reader(0, told)
        show()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            share = runner.run(work(job, i, workers, gate, begun))
        except Fault as fault:
            _say(json.dumps({"what": fault.what, "where": fault.where, "hint": fault.hint}).encode() + b"\n")
            sys.exit(fault.exit_code)
        except ConnectionAbortedError:
            return
    _say(json.dumps(asdict(share)).encode() + b"\n")


def _say(line: bytes) -> None:
    """To the process that started this one, if it is still there."""
    with contextlib.suppress(BrokenPipeError):
        os.write(1, line)


if __name__ == "__main__":
    _worker()
