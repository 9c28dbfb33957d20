"""Bodies of a load too large to build all of them ahead: a process beside the worker builds those that come next.

IO, over two pipes. The worker asks by number, as its requests start: for the next turn of a conversation, the next
request of a lane, the next one of an open loop's window. What is held is thus bounded by lanes and window, however long
the load is, and nothing is built in the sending loop unless the builder falls behind (counted in `late`).
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import pickle
import struct
import subprocess
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from loadgen_sdk.dialects.body import body as make_body
from loadgen_sdk.request import Request

from loadgen.execution.bodies import UNKNOWN, Bodies
from loadgen.results.record import SOURCES, Built
from loadgen.schedule.timetable import Schedule, StageSpan

if TYPE_CHECKING:
    from loadgen.execution.plan import Job
    from loadgen.requests.prompts import Prompts

WINDOW = 2_000  # requests of an open loop that are built ahead of their send
HELD_BYTES = 256 << 20  # of bodies, above which the window waits
PIPE_BYTES = 1 << 20
READ_BYTES = 256 << 10  # at a time: some 50 µs
_FRAME = struct.Struct("<qiiiB")  # number, bytes that follow, built tokens, asked output, its source


class BodyPrefetch(Bodies):
    """As `Bodies`, but building is another process's part. Make it in a running loop, `await filled()`, then send."""

    def __init__(self, job: Job, part: Schedule, prompts: Prompts) -> None:
        super().__init__(prompts, preparer(job), 0)
        self._part = part
        self._held: dict[int, tuple[bytes, Built]] = {}
        self._held_bytes = 0
        self._asked: set[int] = set()  # of the builder, and not here yet
        self._sent: dict[int, Built] = {}
        self._windows = [_window(part, span) for span in part.stages]
        self._open: list[int] = [0] * len(part.stages)  # of each window: asked for or held
        self._buffer = bytearray()
        self._outgoing = bytearray()
        self._full: asyncio.Future[None] | None = None
        self._process = subprocess.Popen(
            [sys.executable, "-m", "loadgen.execution.body_prefetch"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        data = pickle.dumps(job)
        self._process.stdin.write(len(data).to_bytes(8, "little") + data)
        self._process.stdin.flush()
        self._in, self._out = self._process.stdout.fileno(), self._process.stdin.fileno()
        for descriptor in (self._in, self._out):
            os.set_blocking(descriptor, False)
            with contextlib.suppress(OSError):
                fcntl.fcntl(descriptor, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._in, self._read)
        for stage, span in enumerate(part.stages):
            lanes = [lane for lane in part.own_lanes(span) if span.chains is None or lane < span.chains]
            self._ask([(span.first_chain + lane) * part.turns for lane in lanes])
            self._refill(stage)

    async def filled(self) -> None:
        """Until what was asked for at first is here."""
        if self._asked:
            self._full = self._loop.create_future()
            await self._full

    # -- what the driver asks ------------------------------------------------------------------------------------

    def body(self, stage: int, number: int) -> bytes:
        self._passed(stage, number, goes_on=True)
        if self._real_history and number % self._prompts.turns:
            return self._with_replies(number)
        found = self._drop(number)
        if found is None:
            self.late += 1
            return self._now(number, self._prompts[number])
        self._sent[number] = found[1]
        return found[0]

    def built(self, stage: int, number: int) -> Built:
        told = self._sent.pop(number, None) or self._late.pop(number, None)
        if told is not None:
            return told
        self._passed(stage, number, goes_on=False)  # it is never sent
        found = self._drop(number)
        return UNKNOWN if found is None else found[1]

    def close(self) -> None:
        super().close()
        self._loop.remove_reader(self._in)
        self._loop.remove_writer(self._out)
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()
        self._process.kill()
        self._process.wait()

    # -- what comes next -----------------------------------------------------------------------------------------

    def _passed(self, stage: int, number: int, *, goes_on: bool) -> None:
        """A request starts, or never will: ask for what may come because of it."""
        turns = self._part.turns
        chain, turn = divmod(number, turns)
        span = self._part.stages[stage]
        wanted = []
        if goes_on and turn + 1 < turns and not self._real_history:
            wanted.append(number + 1)
        if turn == 0:
            if span.lanes:
                after = chain - span.first_chain + span.lanes
                if span.chains is None or after < span.chains:
                    wanted.append(number + span.lanes * turns)
            else:
                self._open[stage] -= 1
        self._ask(wanted)
        self._refill(stage)

    def _refill(self, stage: int) -> None:
        window, wanted = self._windows[stage], []
        while self._open[stage] < WINDOW and self._held_bytes < HELD_BYTES:
            number = next(window, None)
            if number is None:
                break
            wanted.append(number)
            self._open[stage] += 1
        self._ask(wanted)

    def _ask(self, numbers: list[int]) -> None:
        if not numbers:
            return
        self._asked.update(numbers)
        self._outgoing += struct.pack(f"<{len(numbers)}q", *numbers)
        self._push()

    def _push(self) -> None:
        try:
            taken = os.write(self._out, self._outgoing)
        except BlockingIOError:
            taken = 0
        except OSError:  # it is dead: all that comes is late
            self._outgoing.clear()
            return
        del self._outgoing[:taken]
        if self._outgoing:
            self._loop.add_writer(self._out, self._push)
        else:
            self._loop.remove_writer(self._out)

    def _drop(self, number: int) -> tuple[bytes, Built] | None:
        self._asked.discard(number)
        found = self._held.pop(number, None)
        if found is not None:
            self._held_bytes -= len(found[0])
        return found

    def _read(self) -> None:
        try:
            data = os.read(self._in, READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            self._loop.remove_reader(self._in)
            self._asked.clear()
        buffer = self._buffer
        buffer += data
        at = 0
        while at + _FRAME.size <= len(buffer):
            number, length, tokens, asked, source = _FRAME.unpack_from(buffer, at)
            end = at + _FRAME.size + length
            if end > len(buffer):
                break
            if number in self._asked:
                self._asked.discard(number)
                self._held[number] = bytes(buffer[at + _FRAME.size : end]), Built(tokens, SOURCES[source], asked)
                self._held_bytes += length
            at = end
        del buffer[:at]
        if not self._asked and self._full is not None and not self._full.done():
            self._full.set_result(None)


def _window(part: Schedule, span: StageSpan) -> Iterator[int]:
    """First turns of an open loop's own chains, in order; none of a closed one, whose lanes ask for themselves."""
    if not span.lanes:
        for chain in range(part.part, len(span.offsets), part.parts):
            yield (span.first_chain + chain) * part.turns


def preparer(job: Job) -> Any:
    """What makes a body of a request of this job: the same bytes as `Client.prepare`."""
    found, settings = job.found[0], job.settings

    def prepare(request: Request) -> bytes:
        return make_body(
            request,
            found.quirk,
            found.target.api,
            found.model,
            settings.stream,
            extra_body=settings.extra_body,
            continuous_usage=False,
        )

    return prepare


def _builder() -> None:
    """Numbers from standard input, bodies to standard output, until the input ends."""
    from loadgen.execution.plan import plan

    os.nice(5)
    job = pickle.loads(_exactly(int.from_bytes(_exactly(8), "little")))
    _, prompts, _ = plan(job)
    prepare = preparer(job)
    pending = bytearray()
    while True:
        data = os.read(0, PIPE_BYTES)
        if not data:
            return
        pending += data
        whole = len(pending) // 8 * 8
        for (number,) in struct.iter_unpack("<q", bytes(pending[:whole])):
            request = prompts[number]
            body = prepare(request)
            tokens = -1 if request.input_tokens is None else request.input_tokens
            asked = -1 if request.max_tokens is None else request.max_tokens
            head = _FRAME.pack(number, len(body), tokens, asked, SOURCES.index(request.input_source or ""))
            _send(head + body)
        del pending[:whole]


def _exactly(size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = os.read(0, size - len(data))
        if not more:
            raise SystemExit(0)
        data += more
    return data


def _send(data: bytes) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(1, view) :]
        except BrokenPipeError:
            os._exit(0)


if __name__ == "__main__":
    _builder()
