"""Read the ready sockets with the kernel's timestamps and keep what was read, without decoding it.

There are two epoll instances. A socket in the first one wakes the process when data arrives. The
second one, called deferred, has the streams that have sent their first output. Nothing of them is
urgent, because the kernel timestamps what arrives. While there are many events, the deferred
sockets are polled about every DEFER_NS, so that one wake-up serves tens of events. While there are
few, the first epoll watches the second one.

What was read waits in its `SocketBuffer` until the buffer is queued for its owner. Most reads of a
stream can wait: a buffer that `may_batch` is queued only when a read may be the end of a response
or when enough has arrived. Of a read that holds plain events only (see `plain_events.py`), only
the timestamp and the number of events are kept.

This is the reference implementation. `_compiled.c` has a faster one with the same names and rules,
and `implementation.py` chooses between them.
"""

from __future__ import annotations

import os
import select
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic_ns, time_ns
from typing import Any

from .plain_events import count_plain_events
from .response_state import Bundle, Read, Run
from .timer import Timer

READ_BYTES = 32 << 10
"""The largest number of bytes of one read."""

MAX_WRITE_BYTES = 256 << 10
"""The largest number of bytes of one write. To take 2 MB costs the kernel more than a millisecond,
in which no other response is read and no other request is sent. A larger request is written in
several turns of the event loop."""

MAX_READY = 1024
"""The largest number of sockets that one poll reports."""

MANY_READY = 32
"""If more sockets than this are ready, a request that is due is sent before they are read."""

MAX_CLOCK_READING_NS = 5_000
"""If reading both clocks took longer, the process was preempted and their offset is not used."""

POLL_EVERY_NS = 1_000_000
"""The longest time between two polls while responses are awaited. It bounds the uncertainty of a
timestamp (see `Read.empty_at`)."""

BUSY_POLL_EVERY_NS = 2_000_000
"""The same after more than BUSY_READS reads since the next poll was planned. Each read is also a
poll, and setting the kernel's timer costs as much as a read."""

BUSY_READS = 4

DEFER_WAIT_MS = 1
"""The longest wait for urgent sockets while unhandled are deferred."""

DEFER_NS = 1_000_000
"""The time between two polls of the deferred sockets, or half of it if something else has woken the
process."""

DECISION_PERIOD_NS = 100_000_000
"""How often the receiver decides whether to defer sockets."""

DEFER_FROM_READS_PER_S = 4_000
DEFER_DOWN_TO_READS_PER_S = 2_000
"""Rates of reads of deferred sockets at which deferring starts and ends."""

READS_PER_SHARED_READ = 100
"""Deferring pauses if more than one in this many reads holds several events, because the
timestamps of such events are less certain than those of events that are read at once."""

DEFER_PAUSE_NS = 1_000_000_000
"""The first pause. It doubles each time that deferring ends in the same way."""

MAX_BATCHED_READS = 64
"""The number of reads that a buffer keeps before its owner is called."""

MAX_RUN_READS = 512
"""The number of plain reads that are counted before the owner is called."""

SMALL_READ_BYTES = 4
LARGE_READ_BYTES = 2048
"""A read that is not between these sizes is passed to the owner at once."""

CHUNKED_BODY_END = b"\r\n\r\n"
"""A read that ends with these bytes may be the end of a chunked body."""

NEVER_NS = 1 << 62

WRITE_FAILED = -1
"""Stands for the number of bytes written after an error, which the next read reports."""

NOT_SENT = -1
"""Stands for the number of bytes not accepted if `Receiver.send_on_idle` did nothing."""

# The values of Linux. On macOS, where no `Reactor` can be created, the module `select` lacks them.
_EPOLLIN = 0x1
_EPOLLOUT = 0x4
_EPOLLERR = 0x8
_EPOLLHUP = 0x10
_EPOLLRDHUP = 0x2000
_EPOLLET = 1 << 31
_READABLE_OR_BROKEN = _EPOLLIN | _EPOLLERR | _EPOLLHUP
_DEFERRED_EVENTS = _EPOLLIN | _EPOLLRDHUP | _EPOLLET

_unpack_timespec = struct.Struct("@qq").unpack
_ANCILLARY_BYTES = socket.CMSG_SPACE(16) if hasattr(socket, "CMSG_SPACE") else 0


class SocketBuffer:
    """The reads of one socket that its owner has not taken yet. The base class of a connection.

    Attributes:
        is_readable: The socket may be read.
        may_batch: The owner need not see each read at once.
        template: The bytes before and after the text of a plain event. The owner sets it when the
            next byte is the first one of a chunk. A read of plain events only is then counted in
            `run`, and any other read is passed on at once.
        emptied_at: When a read last took all that the socket had.
        may_hold_more: The last read filled its buffer, so the socket may hold more.
        ended_at: When the end of the connection was read, or 0 before.
        error: The system's number of the error that ended the connection, or 0 for a regular end.
        is_queued: The buffer waits in the queue of the receiver.
        is_deferred: The socket is in the deferred epoll.
        events_until_urgent: The number of plain events for which the socket may stay there.
        epoll_changed_at: When the socket came into its epoll, which knows nothing from before.
        exchange: What the connection carries now, or None. This field and the following ones
            belong to the owner. They are here because the C code uses them.
        responses_served: How many responses the connection has carried.
        idle_since: When the last response ended.
        unsent: What the socket has not accepted yet.
        tls: The TLS layer, or None.
        tcp_ns: How long TCP took to connect.
        tls_ns: How long the TLS handshake took.
    """

    __slots__ = (
        "emptied_at",
        "ended_at",
        "epoll_changed_at",
        "error",
        "events_until_urgent",
        "exchange",
        "fd",
        "idle_since",
        "is_closed",
        "is_deferred",
        "is_queued",
        "is_readable",
        "may_batch",
        "may_hold_more",
        "owner",
        "reads",
        "responses_served",
        "run",
        "run_bytes",
        "run_read_at",
        "tcp_ns",
        "template",
        "tls",
        "tls_ns",
        "unsent",
    )
    sock: socket.socket  # a field of the subclass

    def __init__(self, fd: int, now: int) -> None:
        self.fd = fd
        self.reads: list[Read | Run] = []
        self.run: list[int | Bundle] = []
        self.run_bytes = 0
        self.run_read_at = 0
        self.template: tuple[bytes, bytes] | None = None
        self.emptied_at = now
        self.may_hold_more = False
        self.is_readable = False
        self.may_batch = False
        self.is_queued = False
        self.is_deferred = False
        self.events_until_urgent = 0
        self.epoll_changed_at = 0
        self.ended_at = 0
        self.error = 0
        self.exchange: object | None = None
        self.owner: Any = None
        self.tls: object | None = None
        self.unsent: list[bytes | memoryview] = []
        self.is_closed = False
        self.idle_since = now
        self.responses_served = 0
        self.tcp_ns = 0
        self.tls_ns = 0


class Receiver:
    """Reads the sockets of two epoll instances and queues the buffers for their owners.

    All times are monotonic, in ns.

    Attributes:
        now: The time after the last call of `receive`.
        ready_count: The number of descriptors that the last polls reported.
        last_poll: When the last poll began. A socket that it did not report was empty then.
        poll_started: When the next poll begins, or the current one has begun.
        next_poll_at: While responses are awaited, the timer is set for this time at the latest.
            While sockets are deferred, it is the time of their next poll instead.
        timer_armed_for: The time for which the timer is set.
        wake_at: When the caller has to do something else.
        is_deferring: There are deferred sockets and many events.
        queued_reads: The number of reads in queued buffers.
        poll_count: The number of polls so far.
        read_count: The number of reads so far.
    """

    def __init__(
        self, poll: select.epoll, deferred: select.epoll, timer: Timer, queue: deque[Any]
    ) -> None:
        self._poll = poll
        self._deferred = deferred
        self._timer = timer
        self._queue = queue
        self._buffers: dict[int, SocketBuffer] = {}
        self.now = monotonic_ns()
        self.last_poll = self.now
        self.poll_started = self.now
        self._wall_to_monotonic_ns = self.now - time_ns()
        self.next_poll_at = 0
        self.timer_armed_for = 0
        self.wake_at = NEVER_NS
        self.ready_count = 0
        self.queued_reads = 0
        self.poll_count = 0
        self.read_count = 0
        self._reads_when_planned = 0  # `read_count` when `next_poll_at` was set
        self.is_deferring = False
        self._has_many_events = False
        self._last_deferred_poll = self.now
        self._deferred_count = 0
        self._deferred_reads = 0  # in this decision period, as the next three
        self._timely_reads = 0  # of deferred sockets that were polled when planned
        self._shared_reads = 0  # timely reads of several events
        self._period_start = self.now
        self._defer_again_at = 0
        self._pause_ns = DEFER_PAUSE_NS
        poll.register(deferred.fileno(), _EPOLLIN)

    def add(self, buffer: SocketBuffer) -> None:
        """Read this socket from now on, whenever it has data and `is_readable`."""
        self._buffers[buffer.fd] = buffer

    def remove(self, buffer: SocketBuffer) -> None:
        """Stop reading this socket."""
        self.stop_deferring(buffer)
        self._buffers.pop(buffer.fd, None)

    def defer(self, buffer: SocketBuffer, events: int) -> None:
        """Let this socket be read late until it has received `events` plain events."""
        buffer.events_until_urgent = events
        if events <= 0:
            self.stop_deferring(buffer)
        elif not buffer.is_deferred:
            self._poll.unregister(buffer.fd)
            self._deferred.register(buffer.fd, _DEFERRED_EVENTS)
            self._note_epoll_change(buffer, is_deferred=True)

    def stop_deferring(self, buffer: SocketBuffer) -> None:
        """Wake the process again when data arrives at this socket."""
        if buffer.is_deferred:
            self._deferred.unregister(buffer.fd)
            self._poll.register(buffer.fd, _EPOLLIN)
            self._note_epoll_change(buffer, is_deferred=False)

    def _note_epoll_change(self, buffer: SocketBuffer, *, is_deferred: bool) -> None:
        buffer.is_deferred = is_deferred
        buffer.epoll_changed_at = monotonic_ns()
        self._deferred_count += 1 if is_deferred else -1
        self.is_deferring = self._has_many_events and self._deferred_count > 0

    def take_reads(self, buffer: SocketBuffer) -> list[Read | Run]:
        """Return the reads of a buffer and empty it.

        If the buffer is queued, it stays in the queue.
        """
        self._end_run(buffer)
        reads = buffer.reads
        if reads:
            buffer.reads = []
            if buffer.is_queued:
                self.queued_reads -= len(reads)
        return reads

    def deliver_queued(self, slice_ns: int, deliver: Callable[[Any], None]) -> int:
        """Deliver the queued buffers, one after the other, for at most `slice_ns`.

        The compiled receiver passes the reads of a usual response to its exchange itself, and calls
        `response_completed` of the owner at its end. `deliver` is called with each other buffer.

        Returns:
            The time.
        """
        queue = self._queue
        now = monotonic_ns()
        slice_end = now + slice_ns
        delivered = 0
        while queue:
            deliver(queue.popleft())
            delivered += 1
            if delivered % 8 == 0:
                now = monotonic_ns()
                if now > slice_end:
                    break
        return now

    def send_on_idle(
        self,
        exchange: Any,  # noqa: ARG002 - for the compiled receiver, as the following ones
        idle: deque[Any],  # noqa: ARG002
        reuse_ns: int,  # noqa: ARG002
        open_exchanges: set[object],  # noqa: ARG002
    ) -> int:
        """Send a request on the connection that became idle last, if nothing else is to be done.

        Only the compiled receiver does this. This one returns NOT_SENT.

        Returns:
            How many bytes the socket did not accept, or NOT_SENT if nothing was done.
        """
        return NOT_SENT

    def recycle(
        self,
        buffer: Any,  # noqa: ARG002 - for the compiled receiver, as the following ones
        idle: deque[Any],  # noqa: ARG002
        in_flight: dict[Any, None],  # noqa: ARG002
        open_exchanges: set[object],  # noqa: ARG002
    ) -> Any:
        """Make the connection of a completed response idle, if nothing else is to be done.

        Only the compiled receiver does this. This one returns None.

        Returns:
            The exchange, whose completion can be reported, or None if nothing was done.
        """
        return None

    def send(self, buffer: SocketBuffer, parts: Sequence[bytes | memoryview]) -> tuple[int, int]:
        """Write parts to a socket, at most MAX_WRITE_BYTES of them.

        Returns:
            The time before the first byte, and how many bytes the socket accepted, or WRITE_FAILED.
        """
        started_at = monotonic_ns()
        try:
            return started_at, buffer.sock.sendmsg(first_bytes(parts, MAX_WRITE_BYTES))
        except BlockingIOError:
            return started_at, 0
        except OSError:
            return started_at, WRITE_FAILED

    def receive(self, wait_ms: int, until: int, due_at: int) -> list[tuple[int, int]]:
        """Poll and read repeatedly, until there is work for the caller or the time `until`.

        If it is time for `wake_at` and many sockets are ready, they are left to the next call.

        Args:
            wait_ms: The longest wait of each poll, or -1 for no limit.
            until: When to return at the latest.
            due_at: The latest time for which the timer is set when the next poll is planned, or -1
                if no response is awaited. The plan is made early, so that the timer does not fire
                during traffic.

        Returns:
            The descriptors and their events that are not for this receiver: those of other owners,
            those that are not readable, and those that can be written.
        """
        unhandled: list[tuple[int, int]] = []
        while True:
            is_deferring = self.is_deferring
            ready = self._poll.poll(self._wait_s(wait_ms), MAX_READY)
            now = self._read_clocks()
            self.poll_count += 1
            self.ready_count = len(ready)
            if now >= self.wake_at and len(ready) > MANY_READY:
                self.now = now
                return unhandled
            previous_poll = self.last_poll
            if len(ready) < MAX_READY:  # else it may not have reported all ready sockets
                self.last_poll = self.poll_started
            now, is_deferred_ready = self._read_ready(ready, previous_poll, now, unhandled)
            if is_deferring:
                # A request that is due is sent first, once.
                tolerance_ns = DEFER_NS if now >= self.wake_at else -DEFER_NS // 2
                is_deferred_ready = now - self.next_poll_at > tolerance_ns
            if is_deferred_ready:
                now = self._receive_deferred(now)
            self.poll_started = now
            if now - self._period_start > DECISION_PERIOD_NS:
                self._decide_whether_to_defer(now)
            if not self.is_deferring and now > self.next_poll_at - POLL_EVERY_NS // 2:
                self._plan_next_poll(now, -1 if unhandled else due_at)
            self.now = now
            nothing_came = not self.ready_count and not (is_deferring and wait_ms < 0)
            if unhandled or self._queue or now >= until or nothing_came:
                return unhandled

    def run(
        self,
        wait_ms: int,
        until: int,
        tick_at: int,
        open_exchanges: set[object],
        slice_ns: int,  # noqa: ARG002 - for the compiled receiver, as the following one
        deliver: Callable[[Any], None],  # noqa: ARG002
    ) -> list[tuple[int, int]] | None:
        """Receive until `until`, `tick_at` or `wake_at`.

        The compiled receiver also delivers queued buffers for `slice_ns` each time, as
        `deliver_queued` does, and sets the timer as `Reactor` does, for as long as nothing else is
        to be done.

        Returns:
            The result of `receive`, or None if all reads have been delivered.
        """
        due_at = min(self.wake_at, tick_at)
        if self._queue:
            wait_ms = 0
        return self.receive(wait_ms, min(until, due_at), due_at if open_exchanges else -1)

    def _wait_s(self, wait_ms: int) -> float:
        """Return how long the next poll may wait, in seconds, or a negative number for no limit."""
        if self.is_deferring and wait_ms:
            wait_ms = DEFER_WAIT_MS if self.next_poll_at > self.now else 0
        return wait_ms / 1000 if wait_ms > 0 else wait_ms

    def _read_clocks(self) -> int:
        """Return the time and update the offset between the monotonic clock and the wall clock."""
        now = monotonic_ns()
        wall = time_ns()
        if monotonic_ns() - now < MAX_CLOCK_READING_NS:
            self._wall_to_monotonic_ns = now - wall
        return now

    def _read_ready(
        self,
        ready: list[tuple[int, int]],
        previous_poll: int,
        now: int,
        unhandled: list[tuple[int, int]],
    ) -> tuple[int, bool]:
        """Read the sockets that a poll reported. Add what is not for this receiver to `unhandled`.

        Returns:
            The time, and whether a deferred socket is ready.
        """
        deferred_fd = self._deferred.fileno()
        is_deferred_ready = False
        for fd, events in ready:
            if fd == deferred_fd:
                is_deferred_ready = True
                continue
            buffer = self._buffers.get(fd)
            is_readable = buffer is not None and buffer.is_readable
            if not is_readable or events & _EPOLLOUT:
                unhandled.append((fd, events))
            if buffer is None or not is_readable or not events & _READABLE_OR_BROKEN:
                continue
            if not buffer.ended_at:
                now = self._read(buffer, previous_poll)
        return now, is_deferred_ready

    def _plan_next_poll(self, now: int, due_at: int) -> None:
        """Plan the next poll. Set the timer for it or for `due_at`, if that is not negative."""
        is_busy = self.read_count - self._reads_when_planned > BUSY_READS
        self.next_poll_at = now + (BUSY_POLL_EVERY_NS if is_busy else POLL_EVERY_NS)
        self._reads_when_planned = self.read_count
        if due_at >= 0:
            self.timer_armed_for = min(self.next_poll_at, due_at)
            self._timer.arm(self.timer_armed_for)

    def _receive_deferred(self, now: int) -> int:
        """Poll the deferred sockets once, read those that are ready and return the time."""
        ready = self._deferred.poll(0, MANY_READY)
        self.ready_count += len(ready)
        previous_poll = self._last_deferred_poll
        is_timely = self.is_deferring and now < self.next_poll_at + DEFER_NS
        shared_reads = self._shared_reads
        if len(ready) < MANY_READY:
            self._last_deferred_poll = now
        for fd, events in ready:
            buffer = self._buffers[fd]
            now = self._read(buffer, previous_poll)
            # An edge is reported once, but the first epoll reports for as long as there is data.
            if buffer.may_hold_more or events != _EPOLLIN or buffer.events_until_urgent <= 0:
                self.stop_deferring(buffer)
        self._deferred_reads += len(ready)
        if is_timely:
            self._timely_reads += len(ready)
        else:
            self._shared_reads = shared_reads
        if self.is_deferring:
            self.next_poll_at = now + DEFER_NS if len(ready) < MANY_READY else now
        return now

    def _decide_whether_to_defer(self, now: int) -> None:
        """Defer while there are many events, unless that makes too many timestamps uncertain."""
        reads_per_s = self._deferred_reads * 1_000_000_000 // (now - self._period_start)
        has_too_many_shared = self._shared_reads * READS_PER_SHARED_READ > self._timely_reads
        self._deferred_reads = 0
        self._timely_reads = 0
        self._shared_reads = 0
        self._period_start = now
        if not self._has_many_events:
            if reads_per_s >= DEFER_FROM_READS_PER_S and now >= self._defer_again_at:
                self._has_many_events = True
                self.is_deferring = self._deferred_count > 0
                self.next_poll_at = now
                self._poll.unregister(self._deferred.fileno())
            return
        if has_too_many_shared:
            self._defer_again_at = now + self._pause_ns
            self._pause_ns *= 2
        else:
            self._pause_ns = DEFER_PAUSE_NS
        if has_too_many_shared or reads_per_s < DEFER_DOWN_TO_READS_PER_S:
            self.is_deferring = False
            self._has_many_events = False
            self._poll.register(self._deferred.fileno(), _EPOLLIN)

    def _read(self, buffer: SocketBuffer, previous_poll: int) -> int:
        """Read one socket once and return the time."""
        try:
            data, ancillary, _, _ = buffer.sock.recvmsg(READ_BYTES, _ANCILLARY_BYTES)
        except BlockingIOError:
            return monotonic_ns()
        except OSError as error:
            buffer.error = error.errno or -1
            data = b""
        read_at = monotonic_ns()
        self.read_count += 1
        if not data:
            buffer.ended_at = read_at
            self._enqueue(buffer)
            return read_at
        empty_at = buffer.emptied_at
        if not buffer.may_hold_more and previous_poll > buffer.epoll_changed_at:
            empty_at = max(empty_at, previous_poll)
        buffer.may_hold_more = len(data) == READ_BYTES
        if not buffer.may_hold_more:
            buffer.emptied_at = read_at
        kernel_timestamp = self._kernel_timestamp(ancillary)
        if kernel_timestamp is None:
            read = Read(data, read_at, read_at, empty_at, False)
        else:
            timestamp = max(min(kernel_timestamp, read_at), empty_at)
            read = Read(data, timestamp, read_at, empty_at, True)
        self._keep(buffer, read)
        return read_at

    def _kernel_timestamp(self, ancillary: list[tuple[int, int, bytes]]) -> int | None:
        """Return the kernel's timestamp in the ancillary data of a read, or None without one."""
        if not ancillary:
            return None
        seconds, nanoseconds = _unpack_timespec(ancillary[0][2])
        if not seconds:  # The packet arrived before timestamps were switched on.
            return None
        timestamp: int = seconds * 1_000_000_000 + nanoseconds + self._wall_to_monotonic_ns
        return timestamp

    def _keep(self, buffer: SocketBuffer, read: Read) -> None:
        """Count a read of plain events or keep any other. Queue the buffer if it is necessary."""
        if buffer.template is not None and not buffer.reads:
            if self._count_if_plain(buffer, buffer.template, read):
                if len(buffer.run) >= MAX_RUN_READS:
                    self._enqueue(buffer)
                return
            self._end_run(buffer)
        buffer.reads.append(read)
        if buffer.is_queued:
            self.queued_reads += 1
        elif _is_urgent(buffer, read):
            self._enqueue(buffer)

    def _count_if_plain(
        self, buffer: SocketBuffer, template: tuple[bytes, bytes], read: Read
    ) -> bool:
        """Add a read to the run of the buffer if it holds plain events only.

        Return whether it does.
        """
        chunks, events = count_plain_events(read.data, *template)
        if not events:
            return False
        if events == 1:
            buffer.run.append(read.timestamp)
        else:
            uncertainty = read.timestamp - read.empty_at if chunks > 1 else None
            buffer.run.append(Bundle(read.timestamp, events, uncertainty))
        buffer.run_bytes += len(read.data)
        buffer.run_read_at = read.read_at
        if buffer.is_deferred:
            buffer.events_until_urgent -= events
            self._shared_reads += chunks > 1
        return True

    def _enqueue(self, buffer: SocketBuffer) -> None:
        if not buffer.is_queued:
            self._end_run(buffer)
            buffer.is_queued = True
            self.queued_reads += len(buffer.reads)
            self._queue.append(buffer)

    def _end_run(self, buffer: SocketBuffer) -> None:
        """Append the run of plain reads to the reads of the buffer."""
        if buffer.run:
            buffer.reads.append(Run(buffer.run, buffer.run_bytes, buffer.run_read_at))
            buffer.run = []
            buffer.run_bytes = 0
            if buffer.is_queued:
                self.queued_reads += 1


def _is_urgent(buffer: SocketBuffer, read: Read) -> bool:
    """Return whether the owner of a buffer must be called for the read that was just kept."""
    if not buffer.may_batch or buffer.template is not None:
        return True
    return (
        len(buffer.reads) >= MAX_BATCHED_READS
        or not SMALL_READ_BYTES < len(read.data) < LARGE_READ_BYTES
        or read.data.endswith(CHUNKED_BODY_END)
    )


def first_bytes(parts: Sequence[bytes | memoryview], limit: int) -> list[bytes | memoryview]:
    """Return the first `limit` bytes of the parts, as parts, without copying them."""
    pieces: list[bytes | memoryview] = []
    bytes_left = limit
    for part in parts:
        if len(part) >= bytes_left:
            pieces.append(memoryview(part)[:bytes_left])
            break
        pieces.append(part)
        bytes_left -= len(part)
    return pieces


def parts_from(parts: Sequence[bytes | memoryview], start: int) -> list[bytes | memoryview]:
    """Return what follows the first `start` bytes of the parts, as parts, without copying them."""
    rest: list[bytes | memoryview] = []
    bytes_to_skip = start
    for part in parts:
        if bytes_to_skip >= len(part):
            bytes_to_skip -= len(part)
        else:
            rest.append(memoryview(part)[bytes_to_skip:] if bytes_to_skip else part)
            bytes_to_skip = 0
    return rest


def socket_error_text(error_number: int) -> str:
    """Return the system's text for the error of a socket buffer, or "" for a regular end."""
    if error_number > 0:
        return os.strerror(error_number)
    return "the connection failed" if error_number else ""
