"""Reads the ready sockets, with the kernel's time stamps, and keeps what it read. Decodes nothing.

There are two epolls. A socket in the first one wakes this process when something arrives. In the second one, `held`,
are streams past their first output, of which nothing is urgent, since the kernel stamps what arrives: while there are
many events, it is polled about every DEFER_NS, and one wake-up serves tens of events. With few events, it is itself
watched by the first one.

What is kept waits in the `reads` of its `SocketBuffer` until the buffer is queued for its owner. Most reads of a stream need no
owner at once: a `may_batch` buffer is queued only when a read may be the end of an answer, or when enough has come. Of
reads of plain events only (plain.py), which are nearly all of a long stream, only the stamps are kept. This is
the reference implementation. `_compiled.c` has a faster one with the same names and rules, and
`implementation.py` chooses between them.
"""

from __future__ import annotations

import os
import select
import socket
import ssl
import struct
from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic_ns, time_ns
from typing import Any

from .plain_events import plain_read
from .response_state import Bundle, Read, Run
from .timer import Timer

READ_BYTES = 32 << 10
MAX_READY = 1024  # most sockets that one poll reports
MAX_CLOCK_READING_NS = 5_000  # if reading the two clocks took longer (the process was preempted), their offset is not used
# A larger request is written in several turns of the event loop. To take 2 MB costs the kernel more than a millisecond,
# in which no other response is read and no other request is sent.
MAX_WRITE_BYTES = 256 << 10
POLL_EVERY_NS = (
    1_000_000  # longest time between two polls while answers are awaited: see `empty_at`
)
# The same after more than BUSY_READS reads since that poll was last planned: each read is also a poll, and arming a
# kernel timer costs as much as a read.
BUSY_POLL_EVERY_NS = 2_000_000
BUSY_READS = 4
MANY_READY = (
    32  # with more sockets ready than this, a request that is due is sent before they are read
)
DEFER_WAIT_MS = 1  # longest wait for urgent sockets while others are held
DEFER_NS = 1_000_000  # time between two polls of the held sockets; half of it when something else has woken this process
DECISION_PERIOD_NS = 100_000_000  # how often it is decided whether to hold
DEFER_FROM_READS_PER_S, DEFER_DOWN_TO_READS_PER_S = 4_000, 2_000  # reads of held sockets per second
# Where more than one of so many reads holds several events, whose stamps are then less sure than those of events that
# are read at once, nothing is held for DEFER_PAUSE_NS; for twice as long where the next trial ends the same way.
READS_PER_SHARED_READ = 100
DEFER_PAUSE_NS = 1_000_000_000
# A may_batch buffer keeps this many reads, each of more than SMALL_READ_BYTES and less than LARGE_READ_BYTES. A read that ends with
# END, or with a part of it, may be the end of a chunked body.
MAX_BATCHED_READS = 64
MAX_RUN_READS = 512  # most plain reads that are counted before the owner is called
SMALL_READ_BYTES = 4
LARGE_READ_BYTES = 2048
END = b"\r\n\r\n"

# macOS, where no Wire can be made, lacks the names
_IN, _OUT, _ERR, _HUP, _RDHUP, _EDGE = 0x1, 0x4, 0x8, 0x10, 0x2000, 1 << 31
_IN_OR_BROKEN = _IN | _ERR | _HUP
_timespec = struct.Struct("@qq").unpack
_ANCILLARY = socket.CMSG_SPACE(16) if hasattr(socket, "CMSG_SPACE") else 0


class SocketBuffer:
    """What was read from one socket and not taken yet. The base of a connection.

    `open`: it may be read. `may_batch`: its owner need not see each read at once. `template`: what stands before and
    after the text of a plain event, set by the owner when the next byte is the first one of a chunk; a read of plain
    events only is counted in `run`, and any other is handed over at once. `ended_at`: when the end of the
    connection was read, 0 before; `error` is then the number of the system's error, 0 for a regular end. `queued`: it
    waits in the receiver's queue.

    `held`: it is in the held epoll, for `events_until_urgent` plain events at most. `epoll_changed_at`: when it came into its epoll,
    which knows nothing about it from before.

    What a connection keeps for its owner, here because C looks at it: its `owner`; `exchange`: what it carries now, or None;
    how many answers it `responses_served`, `idle_since` when; what is `unsent`; its `tls`; how long TCP and TLS took.
    """

    __slots__ = (
        "exchange",
        "is_closed",
        "emptied_at",
        "ended_at",
        "error",
        "fd",
        "may_hold_more",
        "is_deferred",
        "events_until_urgent",
        "idle_since",
        "epoll_changed_at",
        "is_readable",
        "may_batch",
        "owner",
        "is_queued",
        "reads",
        "run",
        "run_bytes",
        "run_read_at",
        "responses_served",
        "tcp_ns",
        "template",
        "tls",
        "tls_ns",
        "unsent",
    )
    sock: socket.socket  # the subclass has it

    def __init__(self, fd: int, now: int) -> None:
        self.fd = fd
        self.reads: list[Read | Run] = []
        self.run: list[int | Bundle] = []
        self.run_bytes = self.run_read_at = 0
        self.template: tuple[bytes, bytes] | None = None
        self.emptied_at = now
        self.may_hold_more = False  # the last read filled its buffer, so the socket may hold more
        self.is_readable = self.may_batch = self.is_queued = self.is_deferred = False
        self.events_until_urgent = self.epoll_changed_at = 0
        self.ended_at = self.error = 0
        self.exchange: object | None = None
        self.owner: Any = None
        self.tls: ssl.SSLObject | None = None
        self.unsent: list[bytes | memoryview] = []
        self.is_closed = False
        self.idle_since = now
        self.responses_served = self.tcp_ns = self.tls_ns = 0


class Receiver:
    """Reads the sockets of two epolls. `queue` gets the buffers whose owner has to look at them.

    `timer` is in `poll` too. While answers are awaited it is armed for `next_poll_at` at the latest, so that no wait is
    longer than POLL_EVERY_NS; `timer_armed_for` is the instant that it is armed for. While it is `is_deferring`, waits end by
    themselves, and `next_poll_at` is the next poll of the held sockets. After `receive`: `now` is the time, `ready` the
    number of descriptors that the last polls reported. `last_poll` is when that poll was started: a socket that it did
    not report was empty then. `wake_at`: when its owner has to do something else. `waiting`: reads in queued buffers.
    `polls` and `reads` count them.
    """

    def __init__(
        self, poll: select.epoll, held: select.epoll, timer: Timer, queue: deque[Any]
    ) -> None:
        self._poll, self._held = poll, held
        self._timer = timer
        self._queue = queue
        self._buffers: dict[int, SocketBuffer] = {}
        self.now = self.last_poll = self.poll_started = self._last_deferred_poll = monotonic_ns()
        self._to_monotonic = self.now - time_ns()
        self.next_poll_at = self.timer_armed_for = self._reads_at_poll = 0
        self.wake_at = 1 << 62
        self.ready_count = self.queued_reads = self.poll_count = self.read_count = 0
        self.is_deferring = self._has_many_events = False
        self._deferred_count = self._deferred_reads = self._timely_reads = self._shared_reads = 0
        self._period_start, self._defer_again_at, self._pause_ns = self.now, 0, DEFER_PAUSE_NS
        poll.register(held.fileno(), _IN)

    def add(self, buffer: SocketBuffer) -> None:
        """Read this buffer's socket from now on, whenever it is ready and `open`."""
        self._buffers[buffer.fd] = buffer

    def remove(self, buffer: SocketBuffer) -> None:
        """Read it no more."""
        self.stop_deferring(buffer)
        self._buffers.pop(buffer.fd, None)

    def defer(self, buffer: SocketBuffer, events: int) -> None:
        """Nothing of this socket is urgent before so many plain events have come."""
        buffer.events_until_urgent = events
        if events <= 0:
            self.stop_deferring(buffer)
        elif not buffer.is_deferred:
            self._poll.unregister(buffer.fd)
            self._held.register(buffer.fd, _IN | _RDHUP | _EDGE)
            self._moved(buffer, held=True)

    def stop_deferring(self, buffer: SocketBuffer) -> None:
        """What arrives at this socket is urgent again."""
        if buffer.is_deferred:
            self._held.unregister(buffer.fd)
            self._poll.register(buffer.fd, _IN)
            self._moved(buffer, held=False)

    def _moved(self, buffer: SocketBuffer, *, held: bool) -> None:
        buffer.is_deferred = held
        buffer.epoll_changed_at = monotonic_ns()
        self._deferred_count += 1 if held else -1
        self.is_deferring = self._has_many_events and self._deferred_count > 0

    def take_reads(self, buffer: SocketBuffer) -> list[Read | Run]:
        """The reads of an buffer, which is empty afterwards. If it is queued, it stays in the queue."""
        self._end_run(buffer)
        reads = buffer.reads
        if reads:
            buffer.reads = []
            if buffer.is_queued:
                self.queued_reads -= len(reads)
        return reads

    def deliver_queued(self, slice_ns: int, other: Callable[[Any], None]) -> int:
        """Hand over what waits, buffer by buffer, for at most `slice_ns`; returns the time (ns).

        The compiled receiver hands the reads of a usual response to its exchange itself, and calls
        `over` of the buffer's owner at its end. `other` is called with each other buffer.
        """
        queue = self._queue
        now = monotonic_ns()
        slice_ends = now + slice_ns
        handed = 0
        while queue:
            other(queue.popleft())
            handed += 1
            if not handed & 7:
                now = monotonic_ns()
                if now > slice_ends:
                    break
        return now

    def send_on_idle(
        self, exchange: Any, idle: deque[Any], reuse_ns: int, awaited: set[object]
    ) -> int:
        """Send a request on the connection that was idle last, where that is all there is to do; only in C.

        -1: it is left as it was; else how many bytes the socket did not take.
        """
        return -1

    def recycle(
        self, buffer: Any, idle: deque[Any], in_flight: dict[Any, None], awaited: set[object]
    ) -> Any:
        """Make a connection idle, and its exchange ready to be told, where that is all there is to do; only in C.

        The exchange; None: all is left as it was.
        """
        return None

    def send(self, buffer: SocketBuffer, parts: Sequence[bytes | memoryview]) -> tuple[int, int]:
        """Write parts to a socket, at most MAX_WRITE_BYTES of them.

        Returns:
            The time before the first byte, and how many bytes the socket took, or -1 after an error.
        """
        at = monotonic_ns()
        try:
            return at, buffer.sock.sendmsg(first_bytes(parts, MAX_WRITE_BYTES))
        except BlockingIOError:
            return at, 0
        except OSError:
            return at, -1

    def receive(self, wait_ms: int, until: int, due_at: int) -> list[tuple[int, int]]:
        """Poll and read, again and again, until there is something for the caller or the instant `until` has come.

        `wait_ms` limits each poll (-1: no limit). Returns the descriptors, with their events, that are no socket to
        read: of other owners, not open, or writable. If the instant `wake_at` has come and many sockets are ready, they
        are left to the next call. `due_at`: the timer is armed for no later instant than this one when it is moved to
        the next `next_poll_at`, which happens early, so that it does not fire during traffic; -1: no answer is awaited.
        """
        buffers, queue = self._buffers, self._queue
        held_fd = self._held.fileno()
        others: list[tuple[int, int]] = []
        while True:
            is_deferring = self.is_deferring
            wait = (
                (DEFER_WAIT_MS if self.next_poll_at > self.now else 0)
                if is_deferring and wait_ms
                else wait_ms
            )
            ready = self._poll.poll(wait / 1000 if wait > 0 else wait, MAX_READY)
            now = self._read_clocks()
            self.poll_count += 1
            self.ready_count = len(ready)
            if now >= self.wake_at and len(ready) > MANY_READY:
                self.now = now
                return others
            previous_poll = self.last_poll
            if len(ready) < MAX_READY:  # else there may be ready sockets that it did not report
                self.last_poll = self.poll_started
            poll_deferred = False
            for fd, events in ready:
                buffer = buffers.get(fd)
                if fd == held_fd:
                    poll_deferred = True
                    continue
                if buffer is None or events & _OUT or not buffer.is_readable:
                    others.append((fd, events))
                    if buffer is None or not buffer.is_readable or not events & _IN_OR_BROKEN:
                        continue
                if not buffer.ended_at:
                    now = self._read(buffer, previous_poll)
            if is_deferring:  # a request that is due is sent before, once
                since = now - self.next_poll_at
                poll_deferred = since > (DEFER_NS if now >= self.wake_at else -DEFER_NS // 2)
            if poll_deferred:
                now = self._receive_deferred(now)
            self.poll_started = now
            if now - self._period_start > DECISION_PERIOD_NS:
                self._decide_whether_to_defer(now)
            if not self.is_deferring and now > self.next_poll_at - (POLL_EVERY_NS >> 1):
                busy = self.read_count - self._reads_at_poll > BUSY_READS
                self.next_poll_at = now + (BUSY_POLL_EVERY_NS if busy else POLL_EVERY_NS)
                self._reads_at_poll = self.read_count
                if due_at >= 0 and not others:
                    self.timer_armed_for = min(self.next_poll_at, due_at)
                    self._timer.arm(self.timer_armed_for)
            self.now = now
            if (
                others
                or queue
                or now >= until
                or (not self.ready_count and not (is_deferring and wait_ms < 0))
            ):
                return others

    def run(
        self,
        wait_ms: int,
        until: int,
        tick_at: int,
        awaited: set[object],
        slice_ns: int,
        other: Callable[[Any], None],
    ) -> list[tuple[int, int]] | None:
        """Receive until `until`, `tick_at` or `wake_at`, while answers are `awaited`; returns what `receive` does.

        C also hands over for `slice_ns`, as `deliver_queued` does, and arms the timer as `Reactor` does, again and again
        as long as that is all there is to do. None: all that was received has been handed over.
        """
        due_at = min(self.wake_at, tick_at)
        wait_ms = 0 if self._queue else wait_ms
        return self.receive(wait_ms, min(until, due_at), due_at if awaited else -1)

    def _read_clocks(self) -> int:
        """The time (ns). Notes how the clock of the stamps differs from it."""
        now = monotonic_ns()
        wall = time_ns()
        if monotonic_ns() - now < MAX_CLOCK_READING_NS:
            self._to_monotonic = now - wall
        return now

    def _receive_deferred(self, now: int) -> int:
        """Poll the held sockets once and read what is ready; returns the time (ns)."""
        ready = self._held.poll(0, MANY_READY)
        self.ready_count += len(ready)
        previous_poll = self._last_deferred_poll
        timely = self.is_deferring and now < self.next_poll_at + DEFER_NS
        shared = self._shared_reads
        if len(ready) < MANY_READY:
            self._last_deferred_poll = now
        for fd, events in ready:
            buffer = self._buffers[fd]
            now = self._read(buffer, previous_poll)
            # An edge is reported once. The first epoll reports for as long as there is something to read.
            if buffer.may_hold_more or events != _IN or buffer.events_until_urgent <= 0:
                self.stop_deferring(buffer)
        self._deferred_reads += len(ready)
        if timely:
            self._timely_reads += len(ready)
        else:
            self._shared_reads = shared
        if self.is_deferring:
            self.next_poll_at = now + DEFER_NS if len(ready) < MANY_READY else now
        return now

    def _decide_whether_to_defer(self, now: int) -> None:
        """Hold while there are many events, unless that makes too many stamps unsure."""
        per_second = self._deferred_reads * 1_000_000_000 // (now - self._period_start)
        too_many_shared = self._shared_reads * READS_PER_SHARED_READ > self._timely_reads
        self._deferred_reads = self._timely_reads = self._shared_reads = 0
        self._period_start = now
        if not self._has_many_events:
            if per_second >= DEFER_FROM_READS_PER_S and now >= self._defer_again_at:
                self._has_many_events = True
                self.is_deferring = self._deferred_count > 0
                self.next_poll_at = now
                self._poll.unregister(self._held.fileno())
            return
        if too_many_shared:
            self._defer_again_at = now + self._pause_ns
            self._pause_ns *= 2
        else:
            self._pause_ns = DEFER_PAUSE_NS
        if too_many_shared or per_second < DEFER_DOWN_TO_READS_PER_S:
            self.is_deferring = self._has_many_events = False
            self._poll.register(self._held.fileno(), _IN)

    def _read(self, buffer: SocketBuffer, previous_poll: int) -> int:
        """Read one socket once; returns the time (ns)."""
        try:
            data, ancillary, _, _ = buffer.sock.recvmsg(READ_BYTES, _ANCILLARY)
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
        if (
            empty_at < previous_poll
            and not buffer.may_hold_more
            and previous_poll > buffer.epoll_changed_at
        ):
            empty_at = previous_poll
        if len(data) == READ_BYTES:
            buffer.may_hold_more = True
        else:
            buffer.may_hold_more = False
            buffer.emptied_at = read_at
        stamp, from_kernel = read_at, False
        if ancillary:
            seconds, nanos = _timespec(ancillary[0][2])
            if seconds:  # zero: the packet arrived before stamps were switched on
                stamp = seconds * 1_000_000_000 + nanos + self._to_monotonic
                from_kernel = True
                if stamp > read_at:
                    stamp = read_at
                elif stamp < empty_at:
                    stamp = empty_at
        reads = buffer.reads
        if buffer.template is not None and not reads:
            chunks, events = plain_read(data, *buffer.template)
            if events:
                buffer.run.append(
                    stamp
                    if events == 1
                    else (stamp, events, stamp - empty_at if chunks > 1 else -1)
                )
                buffer.run_bytes += len(data)
                buffer.run_read_at = read_at
                if buffer.is_deferred:
                    buffer.events_until_urgent -= events
                    self._shared_reads += chunks > 1
                if len(buffer.run) >= MAX_RUN_READS:
                    self._enqueue(buffer)
                return read_at
            self._end_run(buffer)
        reads.append((data, stamp, read_at, empty_at, from_kernel))
        if buffer.is_queued:
            self.queued_reads += 1
        elif (
            not buffer.may_batch
            or buffer.template is not None
            or len(reads) >= MAX_BATCHED_READS
            or not SMALL_READ_BYTES < len(data) < LARGE_READ_BYTES
            or data.endswith(END)
        ):
            self._enqueue(buffer)
        return read_at

    def _enqueue(self, buffer: SocketBuffer) -> None:
        if not buffer.is_queued:
            self._end_run(buffer)
            buffer.is_queued = True
            self.queued_reads += len(buffer.reads)
            self._queue.append(buffer)

    def _end_run(self, buffer: SocketBuffer) -> None:
        """Put the run behind the reads."""
        if buffer.run:
            buffer.reads.append((buffer.run, buffer.run_bytes, buffer.run_read_at))
            buffer.run = []
            buffer.run_bytes = 0
            self.queued_reads += buffer.is_queued  # its reads are counted


def first_bytes(parts: Sequence[bytes | memoryview], limit: int) -> list[bytes | memoryview]:
    """Return the first parts, up to `limit` bytes, without copying. The last one may be a piece of a part."""
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
    """Return what follows the first `start` bytes of the parts, without copying."""
    rest: list[bytes | memoryview] = []
    bytes_to_skip = start
    for part in parts:
        if bytes_to_skip >= len(part):
            bytes_to_skip -= len(part)
        else:
            rest.append(memoryview(part)[bytes_to_skip:] if bytes_to_skip else part)
            bytes_to_skip = 0
    return rest


def error_text(number: int) -> str:
    """What the system calls an error of an buffer; "" for a regular end."""
    return os.strerror(number) if number > 0 else "the connection failed" if number else ""
