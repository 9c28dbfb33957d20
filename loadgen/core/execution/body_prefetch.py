"""Request bodies that another process builds while the load runs.

They are used for a load that is too large to build in advance, or without a number of requests.
When a request starts, the worker asks the builder process for the bodies that will follow: the next
turns of the session, a later request of the same virtual user, or the next request in the window of
an open loop. The number of bodies in memory is therefore bounded, however long the load is. The
sending loop builds a body itself only if the builder falls behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import pickle
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from loadgen.core import child_process
from loadgen.core.execution import body_builder
from loadgen.core.execution.bodies import (
    UNKNOWN,
    Bodies,
    EncodeBody,
    body_encoder,
    links_responses,
)
from loadgen.core.execution.plan import Job
from loadgen.core.requests.prompts import Prompts
from loadgen.core.results.record import SOURCES, RequestFacts
from loadgen.core.schedule.schedule import Schedule, ScheduledStage

# While more bytes of bodies are in memory, no further ones are requested for a window.
_MAX_PREFETCHED_BYTES = 256 << 20
# A body arrives up to 5 ms after its request, so several are ready for each virtual user. If there
# are many virtual users, there are fewer for each.
_MAX_BODIES_PER_USER = 4
_MAX_BODIES_OF_ALL_USERS = 512
_PIPE_BYTES = 1 << 20
_READ_BYTES = 256 << 10  # Reading and parsing this much takes about 50 µs.


class BuiltBody(NamedTuple):
    """A body that the builder has sent."""

    request_id: int
    body: bytes
    facts: RequestFacts


class BuilderConnection:
    """The pipes to and from the builder process, used by an event loop without blocking."""

    def __init__(
        self,
        job: Job,
        prompts: Prompts,
        encode_body: EncodeBody,
        on_body: Callable[[BuiltBody], None],
        on_end: Callable[[], None],
    ) -> None:
        """Start the process and send it the job. Call this in a running event loop.

        Args:
            job: The job of the run.
            prompts: The requests.
            encode_body: Builds the body of a request.
            on_body: Called for each body that arrives.
            on_end: Called if the process ends.
        """
        self._on_body = on_body
        self._on_end = on_end
        self._incoming = bytearray()
        self._outgoing = bytearray()
        self._process = child_process.start_sidecar(
            "loadgen.core.execution.body_builder",
            work=partial(body_builder.serve_bodies, prompts, encode_body),
            keeps_open_files=True,  # The file of a data set may be open.
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._read_fd = self._process.stdout.fileno()
        self._write_fd = self._process.stdin.fileno()
        for descriptor in (self._read_fd, self._write_fd):
            os.set_blocking(descriptor, False)
            _enlarge_pipe(descriptor)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._read_fd, self._read)
        # A fork has a copy of the job already, and a new interpreter has not.
        is_new_interpreter = isinstance(self._process, subprocess.Popen)
        if is_new_interpreter:
            pickled_job = pickle.dumps(job)
            self._outgoing += len(pickled_job).to_bytes(body_builder.JOB_SIZE_BYTES, "little")
            self._outgoing += pickled_job
        self._write()

    def request(self, request_ids: list[int]) -> None:
        """Ask for the bodies of requests."""
        for request_id in request_ids:
            self._outgoing += body_builder.REQUEST_ID.pack(request_id)
        self._write()

    def cpu_s(self) -> float:
        """Return the CPU time that the process has used."""
        return child_process.read_cpu_seconds(self._process.pid)

    def kill(self) -> None:
        """End the process. All further bodies are built late."""
        self._process.kill()

    def close(self) -> None:
        """End the process and close the pipes."""
        self._loop.remove_reader(self._read_fd)
        self._loop.remove_writer(self._write_fd)
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()

    def _write(self) -> None:
        """Write as much as the pipe takes, and wait for room if something is left."""
        try:
            written = os.write(self._write_fd, self._outgoing)
        except BlockingIOError:
            written = 0
        except OSError:
            # The builder is dead, so all further bodies are built late.
            self._outgoing.clear()
            return
        del self._outgoing[:written]
        if self._outgoing:
            self._loop.add_writer(self._write_fd, self._write)
        else:
            self._loop.remove_writer(self._write_fd)

    def _read(self) -> None:
        """Read what has arrived and report the complete bodies in it."""
        try:
            data = os.read(self._read_fd, _READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            self._loop.remove_reader(self._read_fd)
            self._on_end()
            return
        self._incoming += data
        self._parse_frames()

    def _parse_frames(self) -> None:
        """Report the bodies that have arrived completely, and keep the rest for the next read.

        See `body_builder.FRAME` for the header before each body.
        """
        header_size = body_builder.FRAME.size
        position = 0
        while position + header_size <= len(self._incoming):
            request_id, length, input_tokens, output_tokens, source_index = (
                body_builder.FRAME.unpack_from(self._incoming, position)
            )
            start = position + header_size
            end = start + length
            if end > len(self._incoming):
                break
            facts = RequestFacts(input_tokens, SOURCES[source_index], output_tokens)
            self._on_body(BuiltBody(request_id, bytes(self._incoming[start:end]), facts))
            position = end
        del self._incoming[:position]


def _enlarge_pipe(descriptor: int) -> None:
    """Let a pipe hold _PIPE_BYTES, where the system supports this. Only Linux does."""
    if not hasattr(fcntl, "F_SETPIPE_SZ"):
        return
    with contextlib.suppress(OSError):
        fcntl.fcntl(descriptor, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)


class BodyPrefetch(Bodies):
    """Bodies that another process builds.

    Create it in a running event loop, wait for `receive_first_bodies`, then send.
    """

    def __init__(self, job: Job, schedule: Schedule, prompts: Prompts) -> None:
        """Start the builder and request the first bodies of each stage.

        Args:
            job: The job of the run.
            schedule: The part of the schedule that this worker sends.
            prompts: The requests.
        """
        encode_body = body_encoder(job, prompts)
        # Bodies that arrive stay in memory, so no stage has bodies in the temporary file.
        super().__init__(prompts, encode_body, stages=0, links_responses=links_responses(job))
        self._schedule = schedule
        self._window_size = job.settings.tuning.window
        self._frozen_s = job.settings.tuning.helper_frozen_s
        # The ids of requests whose bodies were requested and have not arrived.
        self._requested: set[int] = set()
        # The bodies that have arrived, by the id of the request.
        self._received: dict[int, BuiltBody] = {}
        self._received_bytes = 0
        # For each stage with an open loop: the first turns that were not requested yet, and how
        # many sessions are in its window, since they were requested and have not started.
        self._next_first_turns = [
            _first_turns_of_arrivals(schedule, stage) for stage in schedule.stages
        ]
        self._window_sessions = [0] * len(schedule.stages)
        self._all_received: asyncio.Future[None] | None = None
        self._builder = BuilderConnection(
            job, prompts, encode_body, self._on_body, self._on_builder_end
        )
        for stage in schedule.stages:
            self._request(_first_turns_of_users(schedule, stage))
            self._refill_window(stage.index)

    async def receive_first_bodies(self) -> None:
        """Wait until all bodies that were requested have arrived.

        The load starts after that. A builder that uses no CPU time for `helper_frozen_s` is stuck.
        It is killed, and the sending loop builds all bodies itself.
        """
        if not self._requested:
            return
        self._all_received = asyncio.get_running_loop().create_future()
        used_cpu_s: float | None = None
        while True:
            done, _ = await asyncio.wait([self._all_received], timeout=self._frozen_s)
            if done:
                return
            previous_cpu_s = used_cpu_s
            used_cpu_s = self._builder.cpu_s()
            if used_cpu_s == previous_cpu_s:
                # Its output then ends, and `_on_builder_end` completes the future.
                self._builder.kill()

    def take_body(self, stage: int, request_id: int) -> tuple[bytes, RequestFacts]:
        """Return the bytes to send for a request, and what is known of it before its response."""
        if self._schedule.max_turns > 1:
            self._request_next_turns(request_id)
        self._request_later_sessions(stage, request_id)
        if self._uses_real_replies and self._prompts.needs_replies(request_id):
            return self._build_with_replies(request_id)
        built_body = self._take_received(request_id)
        if built_body is None:
            self.late_bodies += 1
            return self._build_now(request_id, self._prompts[request_id])
        return built_body.body, built_body.facts

    def facts_of_unsent(self, stage: int, request_id: int) -> RequestFacts:
        """Return what is known of a request that is never sent."""
        self._request_later_sessions(stage, request_id)
        built_body = self._take_received(request_id)
        return UNKNOWN if built_body is None else built_body.facts

    def close(self) -> None:
        """End the builder and delete the temporary file."""
        super().close()
        self._builder.close()

    # Requesting bodies

    def _request_next_turns(self, request_id: int) -> None:
        """Request the turns that follow a request, unless they contain replies of the server."""
        self._request(
            [
                next_id
                for next_id in self._schedule.next_slot_ids(request_id)
                if not self._prompts.needs_replies(next_id)
            ]
        )

    def _request_later_sessions(self, stage_index: int, request_id: int) -> None:
        """Request the bodies of sessions that follow, if a request is the first one of its session.

        This is called when the request is sent, or when it is known that it never will be. In a
        closed loop, a later session of the same virtual user follows. In an open loop, the session
        has left the window, which has room for the next one.
        """
        stage = self._schedule.stages[stage_index]
        session_index = request_id // self._schedule.max_turns
        starts_session = request_id == self._schedule.first_slot_id(session_index)
        if starts_session:
            if stage.is_closed_loop:
                self._request(_first_turn_to_prefetch(self._schedule, stage, session_index))
            else:
                self._window_sessions[stage_index] -= 1
        self._refill_window(stage_index)

    def _refill_window(self, stage_index: int) -> None:
        """Request the first turns of the next sessions of an open loop until its window is full.

        The window is also full if the bodies in memory take more than _MAX_PREFETCHED_BYTES.
        """
        request_ids: list[int] = []
        while (
            self._window_sessions[stage_index] < self._window_size
            and self._received_bytes < _MAX_PREFETCHED_BYTES
        ):
            request_id = next(self._next_first_turns[stage_index], None)
            if request_id is None:
                break
            request_ids.append(request_id)
            self._window_sessions[stage_index] += 1
        self._request(request_ids)

    def _request(self, request_ids: list[int]) -> None:
        """Request the bodies of these request ids from the builder, if there are any."""
        if request_ids:
            self._requested.update(request_ids)
            self._builder.request(request_ids)

    # Receiving bodies

    def _take_received(self, request_id: int) -> BuiltBody | None:
        """Remove and return the body of a request, or return None if it has not arrived."""
        self._requested.discard(request_id)
        built_body = self._received.pop(request_id, None)
        if built_body is not None:
            self._received_bytes -= len(built_body.body)
        return built_body

    def _on_body(self, built_body: BuiltBody) -> None:
        """Keep a body until its request is sent."""
        # A body whose request was already sent, with a late body, is no longer in the set.
        if built_body.request_id in self._requested:
            self._requested.discard(built_body.request_id)
            self._received[built_body.request_id] = built_body
            self._received_bytes += len(built_body.body)
        self._report_if_all_received()

    def _on_builder_end(self) -> None:
        """Expect no more bodies, so that the load starts even if the builder has died."""
        self._requested.clear()
        self._report_if_all_received()

    def _report_if_all_received(self) -> None:
        """Let `receive_first_bodies` return if no requested body is missing."""
        if self._requested or self._all_received is None or self._all_received.done():
            return
        self._all_received.set_result(None)


def _bodies_per_user(stage: ScheduledStage) -> int:
    """Return how many bodies are ready for each virtual user; 0 for an open loop."""
    if not stage.is_closed_loop:
        return 0
    return max(1, min(_MAX_BODIES_PER_USER, _MAX_BODIES_OF_ALL_USERS // stage.concurrency))


def _first_turns_of_users(schedule: Schedule, stage: ScheduledStage) -> list[int]:
    """Return the first turns of the first sessions of all virtual users of a closed loop."""
    request_ids = []
    for round_index in range(_bodies_per_user(stage)):
        for virtual_user in schedule.virtual_users_of(stage):
            index = round_index * stage.concurrency + virtual_user
            if stage.session_count is None or index < stage.session_count:
                request_ids.append(schedule.first_slot_id(stage.first_session + index))
    return request_ids


def _first_turn_to_prefetch(
    schedule: Schedule, stage: ScheduledStage, session_index: int
) -> list[int]:
    """Return the first turn to request when a virtual user starts a session; at most one.

    The bodies of the next few sessions of the user were requested before, so this is the first turn
    of the session after them. Successive sessions of a user are `concurrency` apart. There is none
    if it would be beyond the last session of the stage.
    """
    later_session = session_index + stage.concurrency * _bodies_per_user(stage)
    if stage.session_count is not None:
        end_session = stage.first_session + stage.session_count
        if later_session >= end_session:
            return []
    return [schedule.first_slot_id(later_session)]


def _first_turns_of_arrivals(schedule: Schedule, stage: ScheduledStage) -> Iterator[int]:
    """Yield the first turns of the sessions of an open loop, in order."""
    if stage.is_closed_loop:
        return
    for index in range(schedule.shard_index, len(stage.arrivals_ns), schedule.shard_count):
        yield schedule.first_slot_id(stage.first_session + index)
