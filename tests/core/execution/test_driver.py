"""The driver with a client that needs no network: each slot gets one record."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from time import monotonic_ns, process_time_ns
from typing import Any

import numpy as np
import pytest
import uvloop
from loadgen_sdk.request import Completion, Failure, Usage
from loadgen_sdk.transport.reactor import Reactor

from loadgen.core.execution import stop_signals
from loadgen.core.execution.bodies import Bodies
from loadgen.core.execution.driver import MAX_DRAIN_AFTER_STOP_NS, Driver, DriveSettings
from loadgen.core.execution.self_sampling import RunQueueWait
from loadgen.core.execution.worker_resources import WorkerResources
from loadgen.core.requests import tokenizer
from loadgen.core.requests.build import build_prompts
from loadgen.core.results.manifest import RunManifest, StagePlan, encode_manifest
from loadgen.core.results.record import KINDS, STATUSES
from loadgen.core.results.record_log import RecordLog
from loadgen.core.results.store import Stored, read_run
from loadgen.core.schedule.build import build_schedule
from loadgen.core.schedule.schedule import Schedule
from loadgen.core.workload import Workload, load, read_flags

SECOND_NS = 1_000_000_000
OneShot = Callable[["Paper", "Sheet"], None]


class Sheet:
    """One request that the paper client was given."""

    def __init__(self, body: bytes, due: int, on_done: Callable[[Completion], None]) -> None:
        self.body, self.due, self.on_done = body, due, on_done
        self.sent = monotonic_ns()
        self.told = False

    def end(self, failure: Failure | None = None, text: str = "a", output: int = 8) -> None:
        """Tell the driver, once."""
        if self.told:
            return
        self.told = True
        now = monotonic_ns()
        came = now if output and failure is None else -1
        stamps = {
            "first_token": came,
            "first_answer": came,
            "last_token": came,
            "end": came,
            "done": now,
        }
        count = Usage(input=20, output=output)
        self.on_done(
            Completion(
                request=None,
                due=self.due,
                ready=self.sent,
                sent=self.sent,
                text=text,
                usage=count,
                failure=failure,
                finish_reason="" if failure else "length",
                **stamps,
            )
        )


class Paper:
    """A client without a network. `answer` decides how each request ends, at once or later."""

    def __init__(self, answer: OneShot) -> None:
        self.answer, self.sheets = answer, list[Sheet]()

    def send(
        self, *, body: bytes, due: int, on_done: Callable[..., None], **_options: Any
    ) -> Sheet:
        sheet = Sheet(body, due, on_done)
        self.sheets.append(sheet)
        self.answer(self, sheet)
        return sheet

    def cancel(self, exchange: Sheet, failure: Failure) -> None:
        exchange.end(failure)

    @property
    def in_flight(self) -> int:
        return sum(not sheet.told for sheet in self.sheets)

    def tick(self, now: int) -> None:
        pass


def at_once(_: Paper, sheet: Sheet) -> None:
    sheet.end()


def refused(_: Paper, sheet: Sheet) -> None:
    sheet.end(Failure("connect", "Too many open files"))


def soon(_: Paper, sheet: Sheet) -> None:
    asyncio.get_running_loop().call_soon(sheet.end)


def never(_: Paper, sheet: Sheet) -> None:
    pass


def workload(tmp_path: Path, more: str = "", **flags: str) -> Workload:
    file = tmp_path / "w.yaml"
    file.write_text(f"name: t\nrequests:\n  input_tokens: 20\n  output_tokens: 8\n{more}")
    return load(str(file), read_flags(**({"seed": "7", "warmup": "0"} | flags)))


def run(
    folder: Path,
    requested_workload: Workload,
    answer: OneShot,
    during: Callable[[Driver, Paper], None] | None = None,
) -> tuple[Stored, Paper, Schedule, Driver]:
    """Drive a workload to its end; what was recorded."""

    async def work() -> tuple[Paper, Schedule, Driver]:
        schedule = build_schedule(requested_workload, 7)
        client = Paper(answer)
        requests = build_prompts(requested_workload, 7, 1, tokenizer.load_tokenizer(None))
        bodies = Bodies(
            requests,
            lambda _, request: str(request.messages or request.prompt).encode(),
            len(schedule.stages),
        )
        numbers = [schedule.slot_ids_of(span) for span in schedule.stages]
        for stage, span in enumerate(schedule.stages):
            bodies.build(
                stage, numbers[stage], max_bodies=100 if span.session_count is None else None
            )
        reactor = Reactor(asyncio.get_running_loop())
        record_log = RecordLog(folder, 0)
        drive = Driver(
            schedule,
            WorkerResources(
                reactor=reactor,
                clients=[client],
                bodies=bodies,
                unbuilt_slot_ids=numbers,
                record_log=record_log,
            ),
            DriveSettings(
                drain_ns=requested_workload.drain_ns,
                max_in_flight=requested_workload.max_in_flight,
                run_id="r",
            ),
            start_ns=monotonic_ns(),
        )
        if during is not None:
            during(drive, client)
        try:
            with stop_signals.on_stop_signal(lambda _: drive.stop()):
                await asyncio.wait_for(drive.run(), 300)
        finally:
            record_log.close()
            bodies.close()
            reactor.shut_down()
        return client, schedule, drive

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        client, schedule, drive = runner.run(work())
    stages = tuple(StagePlan() for _ in schedule.stages)
    (folder / "run.json").write_bytes(encode_manifest(RunManifest(stages=stages)))
    return read_run(folder), client, schedule, drive


def outcomes(stored: Stored) -> Counter[tuple[str, str]]:
    rows = stored.rows
    assert len(np.unique(rows["slot"])) == len(rows), "a slot has two records"
    return Counter(
        (STATUSES[s], KINDS[k])
        for s, k in zip(rows["status"].tolist(), rows["kind"].tolist(), strict=True)
    )


@pytest.mark.parametrize("answer", [at_once, soon])
@pytest.mark.parametrize(
    "flags",
    [
        {"request_rate": "50000", "num_requests": "3000"},
        {"concurrency": "7", "num_requests": "3000"},
    ],
)
def test_every_slot_is_sent_once_with_a_different_body(
    tmp_path: Path, answer: OneShot, flags: dict[str, str]
) -> None:
    stored, client, _, drive = run(tmp_path, workload(tmp_path, **flags), answer)
    assert outcomes(stored) == {("ok", ""): 3000}
    assert len({sheet.body for sheet in client.sheets}) == 3000
    assert (drive.counters.sent, drive.counters.ok, drive.counters.in_flight) == (3000, 3000, 0)
    assert (stored.rows["sent_ns"] >= stored.rows["due_ns"]).all()
    assert (stored.rows["output_tokens"] == 8).all()


def test_requests_that_fail_at_once_are_recorded_as_failed(tmp_path: Path) -> None:
    stored, _, _, drive = run(
        tmp_path, workload(tmp_path, concurrency="3", num_requests="5000"), refused
    )
    assert outcomes(stored) == {("failed", "connect"): 5000}
    assert set(stored.texts) == {"Too many open files"}
    assert drive.counters.in_flight == 0


def test_a_response_without_a_token_has_no_latency(tmp_path: Path) -> None:
    requested_workload = workload(tmp_path, concurrency="3", num_requests="9")
    stored, _, _, drive = run(tmp_path, requested_workload, lambda _, sheet: sheet.end(output=0))
    assert outcomes(stored) == {("ok", ""): 9}
    assert (stored.rows["first_token_ns"] == -1).all()
    assert not drive.counters.recent_ttft_ns


def test_the_limit_in_flight_drops_starts_and_never_delays_them(tmp_path: Path) -> None:
    requested_workload = workload(
        tmp_path, request_rate="20000", num_requests="400", max_in_flight="5", grace="0"
    )
    stored, client, _, _ = run(tmp_path, requested_workload, never)

    assert outcomes(stored) == {("unfinished", "unfinished"): 5, ("dropped", "in_flight_cap"): 395}
    assert len(client.sheets) == 5
    dropped = stored.rows[stored.rows["status"] == STATUSES.index("dropped")]
    assert (dropped["sent_ns"] == -1).all()
    assert (dropped["built_tokens"] == 20).all()


TURNS = "  turns: {{count: 3, tool_result_tokens: 5, tool_time: {pause}{history}}}\n"


def test_the_end_of_the_drain_leaves_no_slot_without_a_record(tmp_path: Path) -> None:
    """First turns answered, second turns a day away: when the drain ends nothing is in flight."""
    requested_workload = workload(
        tmp_path,
        TURNS.format(pause="24h", history=""),
        request_rate="20000",
        num_requests="40",
        grace="0",
    )
    stored, client, schedule, _ = run(tmp_path, requested_workload, at_once)

    assert schedule.slot_count == 120
    assert outcomes(stored) == {("ok", ""): 40, ("unfinished", "unfinished"): 80}
    assert len(client.sheets) == 40


def test_requests_cut_by_the_drain_are_unfinished_and_drop_no_turn(
    tmp_path: Path,
) -> None:
    requested_workload = workload(
        tmp_path,
        TURNS.format(pause="0s", history=""),
        request_rate="20000",
        num_requests="40",
        grace="0",
    )
    stored, client, _, _ = run(tmp_path, requested_workload, never)

    assert outcomes(stored) == {("unfinished", "unfinished"): 120}
    assert "--grace" in stored.texts[0]
    assert client.in_flight == 0


def test_a_signal_in_the_drain_ends_it_at_once(tmp_path: Path) -> None:
    """The grace time is 600 s. The first Ctrl-C after the load cancels the requests in flight."""
    requested_workload = workload(tmp_path, request_rate="20000", num_requests="40", timeout="600s")
    assert requested_workload.drain_ns == 600 * SECOND_NS

    def interrupt(drive: Driver, client: Paper) -> None:
        def when_all_are_sent() -> None:
            if len(client.sheets) == 40 and monotonic_ns() > drive._load_end_ns:
                os.kill(os.getpid(), signal.SIGINT)
            else:
                asyncio.get_running_loop().call_later(0.005, when_all_are_sent)

        when_all_are_sent()

    begun = monotonic_ns()
    stored, _, _, drive = run(tmp_path, requested_workload, never, during=interrupt)
    assert drive.is_stopping
    assert outcomes(stored) == {("cancelled", "interrupted"): 40}
    assert monotonic_ns() - begun < MAX_DRAIN_AFTER_STOP_NS


def test_a_failed_turn_drops_the_rest_of_its_conversation_and_no_other(tmp_path: Path) -> None:
    requested_workload = workload(
        tmp_path, TURNS.format(pause="0s", history=""), concurrency="2", num_requests="10"
    )

    def some(client: Paper, sheet: Sheet) -> None:
        sheet.end(Failure("truncated", "cut") if len(client.sheets) == 2 else None)

    stored, client, _, _ = run(tmp_path, requested_workload, some)
    counts = outcomes(stored)
    assert counts[("failed", "truncated")] == 1
    assert counts[("dropped", "previous_turn_failed")] in (1, 2)
    assert sum(counts.values()) == 30
    assert len(client.sheets) == 30 - counts[("dropped", "previous_turn_failed")]


@pytest.mark.parametrize("history", ["scripted", "server"])
def test_each_turn_sends_the_history_of_its_conversation(tmp_path: Path, history: str) -> None:
    requested_workload = workload(
        tmp_path,
        TURNS.format(pause="0s", history=f", history: {history}"),
        concurrency="1",
        num_requests="4",
    )

    def reply(client: Paper, sheet: Sheet) -> None:
        sheet.end(text=f"reply-{len(client.sheets)}-")

    _, client, _, _ = run(tmp_path, requested_workload, reply)
    bodies = [sheet.body.decode() for sheet in client.sheets]
    assert len(bodies) == 12
    for i, body in enumerate(bodies):
        turn = i % 3
        earlier = [f"reply-{i - turn + k + 1}-" in body for k in range(turn)]
        assert earlier == [history == "server"] * turn
        assert body.count("'assistant'") == turn
        assert turn == 0 or bodies[i - 1].split("}")[0] == body.split("}")[0]


def test_a_closed_loop_ends_with_its_duration(tmp_path: Path) -> None:
    stored, client, schedule, _ = run(
        tmp_path, workload(tmp_path, concurrency="4", duration="0.2s"), soon
    )

    assert schedule.slot_count is None
    assert outcomes(stored) == {("ok", ""): len(client.sheets)}
    assert len(client.sheets) > 100
    assert stored.rows["due_ns"].max() < SECOND_NS // 5
    requests_by_user = Counter(stored.rows["virtual_user"].tolist())
    assert set(requests_by_user) == {0, 1, 2, 3}

    for virtual_user in requests_by_user:  # lane k's i-th request is number i * lanes + k
        mine = np.sort(stored.rows["slot"][stored.rows["virtual_user"] == virtual_user])
        assert mine.tolist() == list(range(virtual_user, virtual_user + 4 * len(mine), 4))


def test_one_signal_drains_and_a_second_one_exits(tmp_path: Path) -> None:
    requested_workload = workload(tmp_path, request_rate="1000", num_requests="8000", grace="24h")

    def at_ten(client: Paper, _sheet: Sheet) -> None:
        if len(client.sheets) == 10:
            os.kill(os.getpid(), signal.SIGINT)
            asyncio.get_running_loop().call_soon(after)

    def after() -> None:  # whatever was in flight answers, but for the last
        if not drivers[0].is_stopping:  # the signal takes a while on a busy machine
            asyncio.get_running_loop().call_later(0.001, after)
            return
        for sheet in seen[0].sheets[:-1]:
            sheet.end()
        os.kill(os.getpid(), signal.SIGINT)

    seen: list[Paper] = []
    drivers: list[Any] = []

    def during(driver: Any, client: Paper) -> None:
        drivers.append(driver)
        seen.append(client)

    stored, client, _, drive = run(tmp_path, requested_workload, at_ten, during=during)
    sent = len(client.sheets)
    assert drive.is_stopping
    assert 10 <= sent < 8000
    assert outcomes(stored) == {("ok", ""): sent - 1, ("cancelled", "interrupted"): 8000 - sent + 1}
    assert client.in_flight == 0


def test_an_interrupted_run_drains_for_the_grace_time_at_most(tmp_path: Path) -> None:
    requested_workload = workload(tmp_path, request_rate="1000", num_requests="1000", grace="0")

    def at_ten(client: Paper, _: Sheet) -> None:
        if len(client.sheets) == 10:
            os.kill(os.getpid(), signal.SIGTERM)

    stored, _, _, drive = run(tmp_path, requested_workload, at_ten)
    assert drive.is_stopping
    assert outcomes(stored) == {("cancelled", "interrupted"): 1000}


@pytest.mark.processes
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="Linux counts it")
def test_time_waiting_for_a_processor_is_counted() -> None:
    cores = os.sched_getaffinity(0)
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    waiting = RunQueueWait()
    try:
        for process in (0, other.pid):
            os.sched_setaffinity(process, {min(cores)})
        begun, before = process_time_ns(), waiting.total_ns()
        assert before is not None
        while (now := waiting.total_ns()) is not None and now < before + 10_000_000:
            assert process_time_ns() - begun < 20 * SECOND_NS, (
                "two that share a core, and neither ever waited"
            )
    finally:
        other.kill()
        other.wait()
        waiting.close()
        os.sched_setaffinity(0, cores)

    assert waiting.total_ns() is None


def test_a_bug_in_a_callback_ends_the_run_and_its_records_are_stored(tmp_path: Path) -> None:
    def broken(client: Paper, sheet: Sheet) -> None:
        if len(client.sheets) == 5:
            raise ZeroDivisionError("a bug")
        sheet.end()

    requested_workload = workload(tmp_path, request_rate="1000", num_requests="100")
    with pytest.raises(ZeroDivisionError, match="a bug"):
        run(tmp_path, requested_workload, broken)
    (tmp_path / "run.json").write_bytes(encode_manifest(RunManifest(stages=(StagePlan(),))))
    assert outcomes(read_run(tmp_path)) == {("ok", ""): 4}


LARGE = """
import ctypes, sys
from loadgen.core.execution.process_memory import *

class Blocks(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "heap a b c mapped d e used free top".split()]

memory = ctypes.CDLL(None)
memory.mallinfo2.restype = Blocks
# More than is free within the heap, so that this block needs new memory from the system.
size = memory.mallinfo2().free + 500_000
bytearray(2 * size)  # freed at once: from now on glibc keeps blocks of this size
set_largest_kept_block(LARGEST_KEPT_BLOCK)
bytearray(2 * size)
if sys.argv[1:]:
    set_largest_kept_block(LARGEST_KEPT_BLOCK_UNDER_LOAD)
before = memory.mallinfo2().mapped
kept = bytearray(size)
print(memory.mallinfo2().mapped - before >= size)
"""


@pytest.mark.processes
@pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="glibc 2.33 and later can tell"
)
@pytest.mark.parametrize("sending", [False, True])
def test_large_blocks_lie_outside_the_heap_while_requests_are_sent(sending: bool) -> None:
    """Within it they leave holes: the memory of a long run grew by 10 MB an hour."""
    process = subprocess.run(
        [sys.executable, "-c", LARGE, *["sending"] * sending],
        check=True,
        capture_output=True,
        text=True,
    )
    assert process.stdout.strip() == str(sending)
