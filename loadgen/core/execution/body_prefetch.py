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
from dataclasses import dataclass
from functools import partial
from itertools import islice
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
        """Start the builder process. Call this in a running event loop.

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
        self._loop = asyncio.get_running_loop()
        self._open_pipes()

        # `start_sidecar` forks this process if it can. A fork already has a copy of the job.
        # Otherwise it starts a new interpreter by `subprocess.Popen`, which needs the job.
        is_fork = not isinstance(self._process, subprocess.Popen)
        if not is_fork:
            self._send_job(job)

    def _open_pipes(self) -> None:
        """Let the event loop read from the process without blocking."""
        for descriptor in (self._read_fd, self._write_fd):
            os.set_blocking(descriptor, False)
            _enlarge_pipe(descriptor)
        self._loop.add_reader(self._read_fd, self._read)

    def _send_job(self, job: Job) -> None:
        """Send the pickled job, after its size."""
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


@dataclass
class _SessionWindow:
    """The sessions of a stage with an open loop that are requested from the builder in advance.

    A session is one conversation of several requests.

    Attributes:
        later_first_turns: Yields the ids of the first requests of the sessions after the window.
        waiting_sessions: The number of sessions in the window: their first bodies were requested
            from the builder, and have not been sent yet.
    """

    later_first_turns: Iterator[int]
    waiting_sessions: int = 0


class BodyPrefetch(Bodies):
    """Bodies that another process builds.

    Bodies are asked for before their requests are sent, as in a look-ahead window:

    - of a virtual user of a closed loop, the first turns of its next few sessions,
    - of an open loop, the first turns of the next sessions, up to `Tuning.window` of them,
    - of every session that has begun, its later turns.

    Create an object in a running event loop, wait for `receive_first_bodies`, then send.
    """

    def __init__(self, job: Job, schedule: Schedule, prompts: Prompts) -> None:
        """Start the builder process and ask it for the first bodies of each stage.

        Args:
            job: The job of the run.
            schedule: The part of the schedule that this worker sends.
            prompts: The requests.
        """
        encode_body = body_encoder(job, prompts)

        # The base class stores the bodies of each stage in a file. Here the builder process sends
        # them, and they stay in memory, so the base class has no stages.
        super().__init__(prompts, encode_body, stages=0, links_responses=links_responses(job))
        self._schedule = schedule
        self._window_size = job.settings.tuning.window
        self._stuck_after_s = job.settings.tuning.helper_frozen_s

        # Ids of requests whose bodies were requested from the builder and have not arrived.
        self._awaited_ids: set[int] = set()

        # Bodies that have arrived and have not been sent, by the id of the request.
        self._arrived: dict[int, BuiltBody] = {}
        self._arrived_bytes = 0
        self._all_arrived: asyncio.Future[None] | None = None  # see `receive_first_bodies`
        self._windows = [
            _SessionWindow(_first_turns_of_arrivals(schedule, stage)) for stage in schedule.stages
        ]

        self._builder = BuilderConnection(
            job, prompts, encode_body, self._on_body, self._on_builder_end
        )
        self._request_first_bodies()

    def _request_first_bodies(self) -> None:
        """Request the bodies with which each stage begins from the builder."""
        for stage in self._schedule.stages:
            self._prefetch(_first_turns_of_users(self._schedule, stage))
            self._refill_window(stage.index)

    async def receive_first_bodies(self) -> None:
        """Wait until the first bodies, which were requested at creation, have arrived.

        The load starts after that. A builder that uses no CPU time for `Tuning.helper_frozen_s` is
        stuck. It is killed, and the sending loop builds all bodies itself.
        """
        if not self._awaited_ids:
            return

        # Completed by `_report_if_all_arrived`: after the last body, or if the builder ends.
        self._all_arrived = asyncio.get_running_loop().create_future()
        previous_cpu_s: float | None = None
        while True:
            await asyncio.wait([self._all_arrived], timeout=self._stuck_after_s)
            if self._all_arrived.done():
                return

            used_cpu_s = self._builder.cpu_s()
            is_stuck = used_cpu_s == previous_cpu_s
            if is_stuck:
                self._builder.kill()

            previous_cpu_s = used_cpu_s

    def take_body(self, stage: int, request_id: int) -> tuple[bytes, RequestFacts]:
        """Return the bytes to send for a request, and its numbers of tokens for the record.

        First, the bodies that will be needed next are requested from the builder process: those of
        the next turns of the same conversation, and of conversations that begin later. Then the
        body of this request is returned. It is built here if it has not arrived, or if it contains
        replies of the server, which the builder does not know.
        """
        has_conversations = self._schedule.max_turns > 1
        if has_conversations:
            self._prefetch_next_turns(request_id)

        self._prefetch_later_sessions(stage, request_id)

        contains_replies = self._uses_real_replies and self._prompts.needs_replies(request_id)
        if contains_replies:
            return self._build_with_replies(request_id)

        built_body = self._take_arrived(request_id)
        if built_body is None:
            self.late_bodies += 1
            return self._build_in_sending_loop(request_id, self._prompts[request_id])

        return built_body.body, built_body.facts

    def facts_of_unsent(self, stage: int, request_id: int) -> RequestFacts:
        """Return what is known of a request that is never sent."""
        self._prefetch_later_sessions(stage, request_id)
        built_body = self._take_arrived(request_id)
        return UNKNOWN if built_body is None else built_body.facts

    def close(self) -> None:
        """End the builder and delete the temporary file."""
        super().close()
        self._builder.close()

    # Asking for bodies

    def _prefetch_next_turns(self, request_id: int) -> None:
        """Ask for the turns that follow a request, unless they contain replies of the server."""
        self._prefetch(
            [
                next_id
                for next_id in self._schedule.next_slot_ids(request_id)
                if not self._prompts.needs_replies(next_id)
            ]
        )

    def _prefetch_later_sessions(self, stage_index: int, request_id: int) -> None:
        """Request bodies of sessions that start later than the session of this request.

        A session is one conversation of several requests, its turns. In a closed loop, a later
        session of the same virtual user is requested when the user begins a session. In an open
        loop, the window of sessions that are requested in advance is filled up again.

        This is called once for each request: when the request is sent, or when it is recorded that
        the request will never be sent.

        Args:
            stage_index: The stage of the request.
            request_id: The id of the request. Session s has the ids from `s * max_turns` on.
        """
        stage = self._schedule.stages[stage_index]
        session_index = request_id // self._schedule.max_turns

        begins_session = request_id == self._schedule.first_slot_id(session_index)
        if stage.is_closed_loop:
            if begins_session:
                self._prefetch_later_session_of_user(stage, session_index)
            return

        if begins_session:
            self._windows[stage_index].waiting_sessions -= 1

        # This is also done after later turns, because sent bodies make room in memory.
        self._refill_window(stage_index)

    def _prefetch_later_session_of_user(self, stage: ScheduledStage, session_index: int) -> None:
        """Request the body that begins a later session of the virtual user of a session."""
        later_session = _later_session_of_user(stage, session_index)
        if later_session is not None:
            self._prefetch([self._schedule.first_slot_id(later_session)])

    def _refill_window(self, stage_index: int) -> None:
        """Request bodies from the builder process, so that the next sessions can begin in time.

        A session is one conversation. In an open loop, the first bodies of the next sessions are
        requested in advance, so that up to `Tuning.window` of them are waiting to be sent. Nothing
        is requested while the bodies in memory take _MAX_PREFETCHED_BYTES or more. A closed loop
        has no such sessions, so nothing is requested for it here.
        """
        if self._arrived_bytes >= _MAX_PREFETCHED_BYTES:
            return

        window = self._windows[stage_index]
        missing_sessions = self._window_size - window.waiting_sessions
        if missing_sessions <= 0:
            return

        first_request_ids = list(islice(window.later_first_turns, missing_sessions))
        window.waiting_sessions += len(first_request_ids)
        self._prefetch(first_request_ids)

    def _prefetch(self, request_ids: list[int]) -> None:
        """Ask the builder for the bodies of requests, if there are any."""
        if request_ids:
            self._awaited_ids.update(request_ids)
            self._builder.request(request_ids)

    # Receiving bodies

    def _take_arrived(self, request_id: int) -> BuiltBody | None:
        """Remove and return the body of a request, or return None if it has not arrived."""
        self._awaited_ids.discard(request_id)
        built_body = self._arrived.pop(request_id, None)
        if built_body is not None:
            self._arrived_bytes -= len(built_body.body)
        return built_body

    def _on_body(self, built_body: BuiltBody) -> None:
        """Keep a body until its request is sent."""
        # A body whose request was already sent, with a late body, is no longer awaited.
        if built_body.request_id in self._awaited_ids:
            self._awaited_ids.discard(built_body.request_id)
            self._arrived[built_body.request_id] = built_body
            self._arrived_bytes += len(built_body.body)
        self._report_if_all_arrived()

    def _on_builder_end(self) -> None:
        """Expect no more bodies, so that the load starts even if the builder has died."""
        self._awaited_ids.clear()
        self._report_if_all_arrived()

    def _report_if_all_arrived(self) -> None:
        """Let `receive_first_bodies` return if no body is missing."""
        if self._awaited_ids or self._all_arrived is None or self._all_arrived.done():
            return
        self._all_arrived.set_result(None)


def _sessions_ahead_of_user(stage: ScheduledStage) -> int:
    """Return how many sessions of each virtual user of a closed loop have a body in advance."""
    return max(1, min(_MAX_BODIES_PER_USER, _MAX_BODIES_OF_ALL_USERS // stage.concurrency))


def _first_turns_of_users(schedule: Schedule, stage: ScheduledStage) -> list[int]:
    """Return the ids of the requests that begin the first sessions of the users of a stage.

    A session is one conversation of several requests. The sessions of a closed loop are assigned to
    its users in turn: with 3 users, user 1 has the sessions 1, 4, 7, and so on. If 2 sessions per
    user are requested in advance, these are 0, 1, 2 (round 0) and 3, 4, 5 (round 1). An open loop
    has no users, so the list is empty.
    """
    if not stage.is_closed_loop:
        return []

    request_ids = []
    for round_index in range(_sessions_ahead_of_user(stage)):
        for virtual_user in schedule.virtual_users_of(stage):
            session_in_stage = round_index * stage.concurrency + virtual_user
            is_in_stage = stage.session_count is None or session_in_stage < stage.session_count
            if is_in_stage:
                session_of_run = stage.first_session + session_in_stage
                request_ids.append(schedule.first_slot_id(session_of_run))

    return request_ids


def _later_session_of_user(stage: ScheduledStage, session: int) -> int | None:
    """Return the session whose body to request when a virtual user begins `session`.

    A session is one conversation. Sessions are assigned to the users of a stage in turn, and the
    first bodies of the next few sessions of each user are requested in advance. Example: with 3
    users, user 0 has the sessions 0, 3, 6, 9, 12. With 4 sessions in advance, those from 0 to 9
    were requested at the start of the stage. When session 0 begins, session 0 + 3 * 4 = 12 is
    requested.

    Returns:
        The number of the session, or None if the stage ends before it.
    """
    users = stage.concurrency
    later_session = session + users * _sessions_ahead_of_user(stage)
    if stage.session_count is not None:
        end_session = stage.first_session + stage.session_count
        if later_session >= end_session:
            return None
    return later_session


def _first_turns_of_arrivals(schedule: Schedule, stage: ScheduledStage) -> Iterator[int]:
    """Yield the first turns of the sessions of an open loop, in order."""
    if stage.is_closed_loop:
        return
    for index in range(schedule.shard_index, len(stage.arrivals_ns), schedule.shard_count):
        yield schedule.first_slot_id(stage.first_session + index)
