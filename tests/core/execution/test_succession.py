"""C goes on by itself from a usual answer to the next request of its lane: it leaves all as the Python does."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic_ns
from typing import Any

import numpy as np
import pytest
import uvloop
from answer_twins import as_reads, chunked
from loadgen_sdk import compiled
from loadgen_sdk.dialects.quirks import QUIRKS
from loadgen_sdk.transport.pool import Pool
from loadgen_sdk.transport.target import Target
from loadgen_sdk.transport.wire import ClientConnection, Wire

from loadgen.core.execution.bodies import Bodies
from loadgen.core.execution.driver import Driver, DriveSettings
from loadgen.core.execution.share import Equipment
from loadgen.core.requests import tokenizer
from loadgen.core.requests.build import build
from loadgen.core.results.record import ROW
from loadgen.core.results.spool import Spool
from loadgen.core.schedule import arrivals
from loadgen.core.workload import load, read_flags

pytestmark = pytest.mark.skipif(
    compiled.module is None, reason="only the compiled part goes on by itself"
)
END = b"0\r\n\r\n"
EVENT = b'{"id":"c","object":"chat.completion.chunk","model":"m","choices":[{"index":0,"delta":%s}],"usage":%s}'
WORD, COUNTS = (
    b'{"content":"a"},"finish_reason":%s',
    b'{"prompt_tokens":20,"completion_tokens":%d,"total_tokens":9}',
)
WORDS = [EVENT % (WORD % b"null", b"null")] * 3 + [EVENT % (WORD % b'"stop"', b"null")]
USUAL = [*chunked([*WORDS, EVENT % (WORD % b"null", COUNTS % 4), b"[DONE]"]), END]
ANSWERS = {
    "usual": as_reads(USUAL, 9),
    "two reads": as_reads(USUAL, 4),
    "no usage": as_reads([*chunked([*WORDS, b"[DONE]"]), END], 9),
    "an error in it": as_reads([*chunked([*WORDS, b'{"error":{"message":"no"}}']), END], 9),
    "refused": [b"HTTP/1.1 503 No\r\nContent-Length: 2\r\n\r\nno"],
    "cut": [*as_reads(USUAL, 4)[:1], b""],
    "closing": [
        b"".join(as_reads(USUAL, 9)).replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1)
    ],
}
STAGES = {
    "counted": {"concurrency": "3", "num_requests": "9"},
    "timed": {"concurrency": "4", "duration": "30s"},
    "warmed up": {"concurrency": "3", "num_requests": "12", "warmup": "4"},
    "one after the other": {"concurrency": "1", "num_requests": "5"},
}
BY_CLOCK = ["ready_ns", "sent_ns", "stamp_error_ns", "last_token_error_ns", "max_gap_error_ns"]


class Load:
    """A load without a server: connections are socket pairs, and what they read is given."""

    def __init__(self, folder: Path, flags: dict[str, str], *, alone: bool) -> None:
        folder.mkdir()
        file = folder / "w.yaml"
        file.write_text("name: t\nrequests: {input_tokens: 20, output_tokens: 4}\n")
        made = load(str(file), read_flags(**({"seed": "7", "warmup": "0"} | flags)))
        timetable = arrivals.build(made, 7)
        self.wire = Wire(asyncio.get_running_loop())
        self.pool = Pool(
            Target.parse("http://127.0.0.1:9"),
            model="m",
            quirk=QUIRKS["vllm"],
            wire=self.wire,
            raw=True,
        )
        requests = build(made, 7, 1, tokenizer.load_tokenizer(None))
        self.bodies = Bodies(
            requests, lambda _, request: self.pool.prepare(request), len(timetable.stages)
        )
        for stage, span in enumerate(timetable.stages):
            self.bodies.build(stage, timetable.stage_numbers(span), most=30)
        self.spool, self.rows, self.at = Spool(folder, 0), list[bytes](), 0
        self.spool.row = self.rows.append
        self.own = Equipment(
            wire=self.wire, clients=[self.pool], bodies=self.bodies, numbers=[], spool=self.spool
        )
        self.begun = monotonic_ns() - 10**9
        self.drive = Driver(
            timetable, self.own, DriveSettings(drain_ns=10**9, run_id="r"), start_ns=self.begun
        )
        if not alone:
            self.wire.follow(None)
        self.pairs = [socket.socketpair() for _ in range(24)]  # more than break
        for ours, theirs in self.pairs:
            ours.setblocking(False)
            theirs.setblocking(False)
            connection = ClientConnection(ours, self.pool, 0, self.begun)
            connection.state, connection.open = "open", True
            self.wire._connections[connection.fd] = connection
            self.wire._receiver.add(connection)
            self.pool._idle.append(connection)
            connection.idle_since = monotonic_ns()
        self.drive._on_wake(monotonic_ns())

    def answer(self, which: int, reads: list[bytes]) -> None:
        """One of the requests in flight is answered, a millisecond after the one before."""
        flights = [
            getattr(exchange, "connection", None) for _, exchange in self.drive._in_flight.values()
        ]
        busy = [connection for connection in flights if isinstance(connection, ClientConnection)]
        if not busy:
            return
        connection = busy[which % len(busy)]
        for data in reads:
            self.at += 1_000_000
            stamp = self.begun + self.at
            connection.reads = [(data, stamp, stamp + 5, stamp - 9, True)] if data else []
            connection.ended_at = 0 if data else stamp
            connection.queued = True
            self.wire._queue.append(connection)
            self.wire._receiver.hand_over_queued(10**9, self.wire._hand_over)
            if connection.closed or connection.busy is None:
                return

    def state(self) -> Any:
        """What of it does not depend on the clock."""
        dispatcher, counters = self.drive._dispatcher, self.drive.counters
        rows = np.frombuffer(b"".join(self.rows), ROW).copy()
        for name in BY_CLOCK:
            rows[name] = rows[name] < 0
        written = []
        for _, theirs in self.pairs:
            try:
                written.append(theirs.recv(1 << 20))
            except BlockingIOError:
                written.append(b"")
        failed = rows["status"] != 0  # those that end by the clock
        rows["done_ns"][failed] = 0
        flights = [
            (exchange.due, exchange.deadline, exchange.asked_output)
            for exchange in self.pool._in_flight
        ]
        return [
            dispatcher.started,
            dispatcher._heap,
            dispatcher._chains_left,
            dispatcher._at_work,
            dispatcher.next_ns(),
            [getattr(counters, name) for name in ("sent", "ok", "failed", "in_flight", "dropped")],
            list(counters.recent_ttft_ns),
            rows.tobytes(),
            written,
            flights,
            sorted(self.drive._in_flight),
            len(self.pool._idle),
            len(self.wire.awaited),
            self.pool._sent_this_tick,
            self.drive._sent_by_stage,
            [(each.flow.gaps[:], each.flow.instants[:]) for each in self.drive._timelines],
            self.bodies.late,
            [connection.served for connection in self.pool._idle],
            dispatcher.done,
        ]

    def close(self) -> None:
        self.wire.shut()
        self.spool.close()
        self.bodies.close()
        for ours, theirs in self.pairs:
            ours.close()
            theirs.close()


@contextmanager
def twins(folder: Path, flags: dict[str, str]) -> Iterator[list[Load]]:
    made = [Load(folder / name, flags, alone=name == "c") for name in ("c", "python")]
    for one in made[1:]:  # the same instant 0
        assert one.begun >= made[0].begun
    yield made
    for one in made:
        one.close()


def do(one: Load, what: str, which: int) -> None:
    if what == "stop":
        one.drive.stop()
    elif what == "refusals":
        one.drive._selection.refusals[0] = which % 2
    else:
        one.answer(which, ANSWERS[what])


@pytest.mark.parametrize("stages", STAGES)
def test_any_answers_in_any_order_leave_the_same_state(tmp_path: Path, stages: str) -> None:
    draw = random.Random(stages)

    async def hold() -> None:
        for case in range(6):
            folder = tmp_path / str(case)
            folder.mkdir()
            with twins(folder, STAGES[stages]) as made:
                usual = ["usual"] * (4 * case) + ["two reads"] * 2
                for step in range(16):
                    what = draw.choice(
                        [*usual, *ANSWERS, "refusals", *(["stop"] if step > 9 else [])]
                    )
                    which = draw.randrange(6)
                    for one in made:
                        do(one, what, which)
                    first, second = (one.state() for one in made)
                    moved = made[1].begun - made[0].begun
                    second[9] = [
                        (due - moved, deadline - moved, asked) for due, deadline, asked in second[9]
                    ]
                    second[15] = [
                        (gaps, [at - moved for at in instants]) for gaps, instants in second[15]
                    ]
                    assert first == second, (case, step, what)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(hold())
