"""Request bodies of a load that is too large to build in advance, or of which nobody knows how many it will send: a
builder process builds the next ones.

IO, over two pipes. When a request starts, the worker asks the builder for request numbers that will follow: the next
turn of the conversation, one of the next requests of the lane, or the next one in the window of an open loop. So the
number of bodies in memory is bounded by lanes and window, however long the load is. The sending loop builds a body
itself only if the builder falls behind (counted in `late`).
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import pickle
import struct
import subprocess
from collections.abc import Callable, Iterator
from functools import partial

from loadgen_sdk.request import Request
from loadgen_sdk.wire_formats.request_body import BodyEncoder, BodyFormat

from loadgen.core import child_process
from loadgen.core.execution import step_targets
from loadgen.core.execution.bodies import UNKNOWN, Bodies, built_of
from loadgen.core.execution.plan import Job, build_plan
from loadgen.core.execution.probing import client_options
from loadgen.core.requests.prompts import Prompts
from loadgen.core.requests.synthetic_prompts import iter_requests
from loadgen.core.results.record import SOURCES, Built
from loadgen.core.schedule.schedule import Schedule, ScheduledStage

HELD_BYTES = 256 << 20  # bytes of bodies in memory; above this, the window requests no more
DEPTH = 4  # bodies ready for a lane: the next ones come while answers do, up to 5 ms after they are asked for
LANES_HELD = 512  # bodies ready for all lanes together, where there are no more lanes than that
PIPE_BYTES = 1 << 20
READ_BYTES = 256 << 10  # read in one call: about 50 µs
_FRAME = struct.Struct(
    "<qiiiB"
)  # number, bytes that follow, built tokens, asked output, index into SOURCES


class BodyPrefetch(Bodies):
    """As `Bodies`, but another process builds. Create it in a running loop, `await filled()`, then send."""

    def __init__(self, job: Job, part: Schedule, prompts: Prompts) -> None:
        prepare = preparer(job, prompts)
        super().__init__(prompts, prepare, 0, linked=linked(job))
        self._part, self._tuning = part, job.settings.tuning
        self._received: dict[int, tuple[bytes, Built]] = {}
        self._received_bytes = 0
        self._requested: set[int] = set()  # numbers requested from the builder and not received yet
        self._windows = [_window(part, span) for span in part.stages]
        self._window_sizes: list[int] = [0] * len(
            part.stages
        )  # for each window: how many are requested or received
        self._buffer = bytearray()
        self._outgoing = bytearray()
        self._all_received: asyncio.Future[None] | None = None
        self._process = child_process.beside(
            "loadgen.core.execution.body_prefetch",
            copy=partial(_build, prompts, prepare),
            files=True,
        )  # that of a data set may be open
        assert self._process.stdin is not None and self._process.stdout is not None
        if isinstance(self._process, subprocess.Popen):
            data = pickle.dumps(job)
            self._outgoing += len(data).to_bytes(8, "little") + data
        self._read_fd, self._write_fd = self._process.stdout.fileno(), self._process.stdin.fileno()
        for descriptor in (self._read_fd, self._write_fd):
            os.set_blocking(descriptor, False)
            with contextlib.suppress(OSError):
                fcntl.fcntl(descriptor, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self._loop = asyncio.get_running_loop()
        self._write_requests()
        self._loop.add_reader(self._read_fd, self._read)
        for stage, span in enumerate(part.stages):
            firsts = [
                range(lane, span.concurrency * _depth(span), span.concurrency)
                for lane in part.virtual_users_of(span)
            ]
            chains = sorted(
                chain
                for each in firsts
                for chain in each
                if span.session_count is None or chain < span.session_count
            )
            self._request([part.first_slot_id(span.first_session + chain) for chain in chains])
            self._refill(stage)

    async def filled(self) -> None:
        """Wait until the bodies requested at the start have arrived. A builder that uses no CPU time for
        `helper_frozen_s` does not move any more: it is killed, and all bodies are built late.
        """
        if self._requested:
            self._all_received = self._loop.create_future()
            used_s = -1.0
            while not (
                await asyncio.wait([self._all_received], timeout=self._tuning.helper_frozen_s)
            )[0]:
                before_s, used_s = used_s, child_process.cpu_s(self._process.pid)
                if used_s == before_s:
                    self._process.kill()

    # -- called by the driver ------------------------------------------------------------------------------------

    def take(self, stage: int, number: int) -> tuple[bytes, Built]:
        self._request_following(stage, number, starts=True)
        if self._real_history and self._prompts.needs_replies(number):
            return self._with_replies(number)
        entry = self._take(number)
        if entry is None:
            self.late += 1
            return self._build_now(number, self._prompts[number])
        return entry

    def built(self, stage: int, number: int) -> Built:
        self._request_following(stage, number, starts=False)
        entry = self._take(number)
        return UNKNOWN if entry is None else entry[1]

    def close(self) -> None:
        super().close()
        self._loop.remove_reader(self._read_fd)
        self._loop.remove_writer(self._write_fd)
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()

    # -- requesting bodies -----------------------------------------------------------------------------------------

    def _request_following(self, stage: int, number: int, *, starts: bool) -> None:
        """A request starts, or never will: request the bodies that may follow it. `starts`: it starts."""
        turns = self._part.max_turns
        chain = number // turns
        span = self._part.stages[stage]
        wanted = []
        if starts and turns > 1:
            wanted += [
                one
                for one in self._part.next_slot_ids(number)
                if not self._prompts.needs_replies(one)
            ]
        if number == self._part.first_slot_id(chain):
            if span.concurrency:
                next_chain = chain + span.concurrency * _depth(span)
                if (
                    span.session_count is None
                    or next_chain < span.first_session + span.session_count
                ):
                    wanted.append(self._part.first_slot_id(next_chain))
            else:
                self._window_sizes[stage] -= 1
        self._request(wanted)
        self._refill(stage)

    def _refill(self, stage: int) -> None:
        window, wanted = self._windows[stage], []
        while self._window_sizes[stage] < self._tuning.window and self._received_bytes < HELD_BYTES:
            number = next(window, None)
            if number is None:
                break
            wanted.append(number)
            self._window_sizes[stage] += 1
        self._request(wanted)

    def _request(self, numbers: list[int]) -> None:
        if not numbers:
            return
        self._requested.update(numbers)
        self._outgoing += struct.pack(f"<{len(numbers)}q", *numbers)
        self._write_requests()

    def _write_requests(self) -> None:
        try:
            written = os.write(self._write_fd, self._outgoing)
        except BlockingIOError:
            written = 0
        except OSError:  # the builder is dead: all further bodies are built late
            self._outgoing.clear()
            return
        del self._outgoing[:written]
        if self._outgoing:
            self._loop.add_writer(self._write_fd, self._write_requests)
        else:
            self._loop.remove_writer(self._write_fd)

    def _take(self, number: int) -> tuple[bytes, Built] | None:
        self._requested.discard(number)
        entry = self._received.pop(number, None)
        if entry is not None:
            self._received_bytes -= len(entry[0])
        return entry

    def _read(self) -> None:
        try:
            data = os.read(self._read_fd, READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            self._loop.remove_reader(self._read_fd)
            self._requested.clear()
        buffer = self._buffer
        buffer += data
        position = 0
        while position + _FRAME.size <= len(buffer):
            number, length, tokens, asked_output, source = _FRAME.unpack_from(buffer, position)
            end = position + _FRAME.size + length
            if end > len(buffer):
                break
            if number in self._requested:
                self._requested.discard(number)
                self._received[number] = (
                    bytes(buffer[position + _FRAME.size : end]),
                    Built(tokens, SOURCES[source], asked_output),
                )
                self._received_bytes += length
            position = end
        del buffer[:position]
        if not self._requested and self._all_received is not None and not self._all_received.done():
            self._all_received.set_result(None)


def _depth(span: ScheduledStage) -> int:
    """How many bodies a lane of a closed loop has ready: fewer where many lanes hold them."""
    return max(1, min(DEPTH, LANES_HELD // max(span.concurrency, 1)))


def _window(part: Schedule, span: ScheduledStage) -> Iterator[int]:
    """Numbers of the first turns of this share's chains, in order. None for a closed loop, where each lane asks."""
    if not span.concurrency:
        for chain in range(part.shard_index, len(span.arrivals_ns), part.shard_count):
            yield part.first_slot_id(span.first_session + chain)


def linked(job: Job) -> bool:
    """Whether a later turn names the answer before it by its id, and sends only what is new."""
    return (
        job.settings.api == "responses"
        and getattr(job.workload.requests, "turns", None) is not None
    )


def preparer(job: Job, prompts: Prompts) -> Callable[[int, Request], bytes]:
    """A function that builds the body of a request of this job: the same bytes as the client's `prepare`."""
    each = [job.settings.of(endpoint) for endpoint in job.settings.endpoints]
    makers = [
        BodyEncoder(
            BodyFormat(
                at.server_profile,
                at.target.api,
                at.model,
                one.stream,
                extra_body=client_options(one, at)["extra_body"],
            )
        ).encode
        for one, at in zip(each, job.found, strict=True)
    ]
    serving = step_targets.serving(job.settings, prompts)
    if serving is None:
        make = makers[0]
        return lambda _, request: make(request)
    return lambda number, request: makers[serving(number)[0]](request)


def _run_builder() -> None:
    """The builder process that begins anew: a job from standard input, and then as its copy."""
    job = pickle.loads(_exactly(int.from_bytes(_exactly(8), "little")))
    prompts = build_plan(job).requests
    _build(prompts, preparer(job, prompts))


def _build(prompts: Prompts, prepare: Callable[[int, Request], bytes]) -> None:
    """The builder process: request numbers from standard input, bodies to standard output, until the input ends."""
    os.nice(5)
    pending = bytearray()
    while True:
        data = os.read(0, PIPE_BYTES)
        if not data:
            return
        pending += data
        complete = len(pending) // 8 * 8
        numbers = struct.unpack(f"<{complete // 8}q", pending[:complete])
        for number, request in zip(numbers, iter_requests(prompts, numbers), strict=True):
            body = prepare(number, request)
            built = built_of(request)
            header = _FRAME.pack(
                number, len(body), built.tokens, built.asked_output, SOURCES.index(built.source)
            )
            _send(header + body)
        del pending[:complete]


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
    _run_builder()
