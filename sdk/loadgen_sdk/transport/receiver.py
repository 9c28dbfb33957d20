"""Reads the ready sockets, with the kernel's time stamps, and keeps what it read. Decodes nothing.

There are two epolls. A socket in the first one wakes this process when something arrives. In the second one, `held`,
are streams past their first output, of which nothing is urgent, since the kernel stamps what arrives: while there are
many events, it is polled about every HOLD_NS, and one wake-up serves tens of events. With few events, it is itself
watched by the first one.

What is kept waits in the `reads` of its `Inbox` until the inbox is queued for its owner. Most reads of a stream need no
owner at once: a `patient` inbox is queued only when a read may be the end of an answer, or when enough has come. Of
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
MOST_READY = 1024  # most sockets that one poll reports
MAPPING_NS = 5_000  # if reading the two clocks took longer (the process was preempted), their offset is not used
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
READ_FIRST = (
    32  # with more sockets ready than this, a request that is due is sent before they are read
)
HOLD_MS = 1  # longest wait for urgent sockets while others are held
HOLD_NS = 1_000_000  # time between two polls of the held sockets; half of it when something else has woken this process
LOOK_NS = 100_000_000  # how often it is decided whether to hold
HOLD_FROM, HOLD_DOWN_TO = 4_000, 2_000  # reads of held sockets per second
# Where more than one of so many reads holds several events, whose stamps are then less sure than those of events that
# are read at once, nothing is held for PAUSE_NS; for twice as long where the next trial ends the same way.
SHARED_ONE_OF = 100
PAUSE_NS = 1_000_000_000
# A patient inbox keeps this many reads, each of more than FEW_BYTES and less than MANY_BYTES. A read that ends with
# END, or with a part of it, may be the end of a chunked body.
KEPT_READS = 64
RUN_READS = 512  # most plain reads that are counted before the owner is called
FEW_BYTES = 4
MANY_BYTES = 2048
END = b"\r\n\r\n"

# macOS, where no Wire can be made, lacks the names
_IN, _OUT, _ERR, _HUP, _RDHUP, _EDGE = 0x1, 0x4, 0x8, 0x10, 0x2000, 1 << 31
_IN_OR_BROKEN = _IN | _ERR | _HUP
_timespec = struct.Struct("@qq").unpack
_ANCILLARY = socket.CMSG_SPACE(16) if hasattr(socket, "CMSG_SPACE") else 0


class Inbox:
    """What was read from one socket and not taken yet. The base of a connection.

    `open`: it may be read. `patient`: its owner need not see each read at once. `template`: what stands before and
    after the text of a plain event, set by the owner when the next byte is the first one of a chunk; a read of plain
    events only is counted in `run`, and any other is handed over at once. `ended_at`: when the end of the
    connection was read, 0 before; `error` is then the number of the system's error, 0 for a regular end. `queued`: it
    waits in the receiver's queue.

    `held`: it is in the held epoll, for `held_events` plain events at most. `moved_at`: when it came into its epoll,
    which knows nothing about it from before.

    What a connection keeps for its owner, here because C looks at it: its `peer`; `busy`: what it carries now, or None;
    how many answers it `served`, `idle_since` when; what is `unsent`; its `tls`; how long TCP and TLS took.
    """

    __slots__ = (
        "busy",
        "closed",
        "emptied_at",
        "ended_at",
        "error",
        "fd",
        "filled",
        "held",
        "held_events",
        "idle_since",
        "moved_at",
        "open",
        "patient",
        "peer",
        "queued",
        "reads",
        "run",
        "run_bytes",
        "run_read_at",
        "served",
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
        self.filled = False  # the last read filled its buffer, so the socket may hold more
        self.open = self.patient = self.queued = self.held = False
        self.held_events = self.moved_at = 0
        self.ended_at = self.error = 0
        self.busy: object | None = None
        self.peer: Any = None
        self.tls: ssl.SSLObject | None = None
        self.unsent: list[bytes | memoryview] = []
        self.closed = False
        self.idle_since = now
        self.served = self.tcp_ns = self.tls_ns = 0


class Receiver:
    """Reads the sockets of two epolls. `queue` gets the inboxes whose owner has to look at them.

    `timer` is in `poll` too. While answers are awaited it is armed for `poll_at` at the latest, so that no wait is
    longer than POLL_EVERY_NS; `armed_for` is the instant that it is armed for. While it is `holding`, waits end by
    themselves, and `poll_at` is the next poll of the held sockets. After `receive`: `now` is the time, `ready` the
    number of descriptors that the last polls reported. `last_poll` is when that poll was started: a socket that it did
    not report was empty then. `wake_at`: when its owner has to do something else. `waiting`: reads in queued inboxes.
    `polls` and `reads` count them.
    """

    def __init__(
        self, poll: select.epoll, held: select.epoll, timer: Timer, queue: deque[Any]
    ) -> None:
        self._poll, self._held = poll, held
        self._timer = timer
        self._queue = queue
        self._inboxes: dict[int, Inbox] = {}
        self.now = self.last_poll = self.poll_started = self._last_held_poll = monotonic_ns()
        self._to_monotonic = self.now - time_ns()
        self.poll_at = self.armed_for = self._reads_at_poll = 0
        self.wake_at = 1 << 62
        self.ready = self.waiting = self.polls = self.reads = 0
        self.holding = self._many_events = False
        self._held_count = self._held_reads = self._timely_reads = self._shared_reads = 0
        self._look_began, self._hold_from, self._pause_ns = self.now, 0, PAUSE_NS
        poll.register(held.fileno(), _IN)

    def add(self, inbox: Inbox) -> None:
        """Read this inbox's socket from now on, whenever it is ready and `open`."""
        self._inboxes[inbox.fd] = inbox

    def remove(self, inbox: Inbox) -> None:
        """Read it no more."""
        self.release(inbox)
        self._inboxes.pop(inbox.fd, None)

    def hold(self, inbox: Inbox, events: int) -> None:
        """Nothing of this socket is urgent before so many plain events have come."""
        inbox.held_events = events
        if events <= 0:
            self.release(inbox)
        elif not inbox.held:
            self._poll.unregister(inbox.fd)
            self._held.register(inbox.fd, _IN | _RDHUP | _EDGE)
            self._moved(inbox, held=True)

    def release(self, inbox: Inbox) -> None:
        """What arrives at this socket is urgent again."""
        if inbox.held:
            self._held.unregister(inbox.fd)
            self._poll.register(inbox.fd, _IN)
            self._moved(inbox, held=False)

    def _moved(self, inbox: Inbox, *, held: bool) -> None:
        inbox.held = held
        inbox.moved_at = monotonic_ns()
        self._held_count += 1 if held else -1
        self.holding = self._many_events and self._held_count > 0

    def take(self, inbox: Inbox) -> list[Read | Run]:
        """The reads of an inbox, which is empty afterwards. If it is queued, it stays in the queue."""
        self._end_run(inbox)
        reads = inbox.reads
        if reads:
            inbox.reads = []
            if inbox.queued:
                self.waiting -= len(reads)
        return reads

    def hand_over_queued(self, slice_ns: int, other: Callable[[Any], None]) -> int:
        """Hand over what waits, inbox by inbox, for at most `slice_ns`; returns the time (ns).

        The compiled receiver hands the reads of a usual response to its exchange itself, and calls
        `over` of the inbox's peer at its end. `other` is called with each other inbox.
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

    def carry(self, exchange: Any, idle: deque[Any], reuse_ns: int, awaited: set[object]) -> int:
        """Send a request on the connection that was idle last, where that is all there is to do; only in C.

        -1: it is left as it was; else how many bytes the socket did not take.
        """
        return -1

    def free(
        self, inbox: Any, idle: deque[Any], in_flight: dict[Any, None], awaited: set[object]
    ) -> Any:
        """Make a connection idle, and its exchange ready to be told, where that is all there is to do; only in C.

        The exchange; None: all is left as it was.
        """
        return None

    def send(self, inbox: Inbox, parts: Sequence[bytes | memoryview]) -> tuple[int, int]:
        """Write parts to a socket, at most MAX_WRITE_BYTES of them.

        Returns:
            The time before the first byte, and how many bytes the socket took, or -1 after an error.
        """
        at = monotonic_ns()
        try:
            return at, inbox.sock.sendmsg(first_bytes(parts, MAX_WRITE_BYTES))
        except BlockingIOError:
            return at, 0
        except OSError:
            return at, -1

    def receive(self, wait_ms: int, until: int, due_at: int) -> list[tuple[int, int]]:
        """Poll and read, again and again, until there is something for the caller or the instant `until` has come.

        `wait_ms` limits each poll (-1: no limit). Returns the descriptors, with their events, that are no socket to
        read: of other owners, not open, or writable. If the instant `wake_at` has come and many sockets are ready, they
        are left to the next call. `due_at`: the timer is armed for no later instant than this one when it is moved to
        the next `poll_at`, which happens early, so that it does not fire during traffic; -1: no answer is awaited.
        """
        inboxes, queue = self._inboxes, self._queue
        held_fd = self._held.fileno()
        others: list[tuple[int, int]] = []
        while True:
            holding = self.holding
            wait = (HOLD_MS if self.poll_at > self.now else 0) if holding and wait_ms else wait_ms
            ready = self._poll.poll(wait / 1000 if wait > 0 else wait, MOST_READY)
            now = self._read_clocks()
            self.polls += 1
            self.ready = len(ready)
            if now >= self.wake_at and len(ready) > READ_FIRST:
                self.now = now
                return others
            previous_poll = self.last_poll
            if len(ready) < MOST_READY:  # else there may be ready sockets that it did not report
                self.last_poll = self.poll_started
            look_at_held = False
            for fd, events in ready:
                inbox = inboxes.get(fd)
                if fd == held_fd:
                    look_at_held = True
                    continue
                if inbox is None or events & _OUT or not inbox.open:
                    others.append((fd, events))
                    if inbox is None or not inbox.open or not events & _IN_OR_BROKEN:
                        continue
                if not inbox.ended_at:
                    now = self._read(inbox, previous_poll)
            if holding:  # a request that is due is sent before, once
                since = now - self.poll_at
                look_at_held = since > (HOLD_NS if now >= self.wake_at else -HOLD_NS // 2)
            if look_at_held:
                now = self._receive_held(now)
            self.poll_started = now
            if now - self._look_began > LOOK_NS:
                self._decide_whether_to_hold(now)
            if not self.holding and now > self.poll_at - (POLL_EVERY_NS >> 1):
                busy = self.reads - self._reads_at_poll > BUSY_READS
                self.poll_at = now + (BUSY_POLL_EVERY_NS if busy else POLL_EVERY_NS)
                self._reads_at_poll = self.reads
                if due_at >= 0 and not others:
                    self.armed_for = min(self.poll_at, due_at)
                    self._timer.arm(self.armed_for)
            self.now = now
            if (
                others
                or queue
                or now >= until
                or (not self.ready and not (holding and wait_ms < 0))
            ):
                return others

    def go(
        self,
        wait_ms: int,
        until: int,
        tick_at: int,
        awaited: set[object],
        slice_ns: int,
        other: Callable[[Any], None],
    ) -> list[tuple[int, int]] | None:
        """Receive until `until`, `tick_at` or `wake_at`, while answers are `awaited`; returns what `receive` does.

        C also hands over for `slice_ns`, as `hand_over_queued` does, and arms the timer as `Reactor` does, again and again
        as long as that is all there is to do. None: all that was received has been handed over.
        """
        due_at = min(self.wake_at, tick_at)
        wait_ms = 0 if self._queue else wait_ms
        return self.receive(wait_ms, min(until, due_at), due_at if awaited else -1)

    def _read_clocks(self) -> int:
        """The time (ns). Notes how the clock of the stamps differs from it."""
        now = monotonic_ns()
        wall = time_ns()
        if monotonic_ns() - now < MAPPING_NS:
            self._to_monotonic = now - wall
        return now

    def _receive_held(self, now: int) -> int:
        """Poll the held sockets once and read what is ready; returns the time (ns)."""
        ready = self._held.poll(0, READ_FIRST)
        self.ready += len(ready)
        previous_poll = self._last_held_poll
        timely = self.holding and now < self.poll_at + HOLD_NS
        shared = self._shared_reads
        if len(ready) < READ_FIRST:
            self._last_held_poll = now
        for fd, events in ready:
            inbox = self._inboxes[fd]
            now = self._read(inbox, previous_poll)
            # An edge is reported once. The first epoll reports for as long as there is something to read.
            if inbox.filled or events != _IN or inbox.held_events <= 0:
                self.release(inbox)
        self._held_reads += len(ready)
        if timely:
            self._timely_reads += len(ready)
        else:
            self._shared_reads = shared
        if self.holding:
            self.poll_at = now + HOLD_NS if len(ready) < READ_FIRST else now
        return now

    def _decide_whether_to_hold(self, now: int) -> None:
        """Hold while there are many events, unless that makes too many stamps unsure."""
        per_second = self._held_reads * 1_000_000_000 // (now - self._look_began)
        too_many_shared = self._shared_reads * SHARED_ONE_OF > self._timely_reads
        self._held_reads = self._timely_reads = self._shared_reads = 0
        self._look_began = now
        if not self._many_events:
            if per_second >= HOLD_FROM and now >= self._hold_from:
                self._many_events = True
                self.holding = self._held_count > 0
                self.poll_at = now
                self._poll.unregister(self._held.fileno())
            return
        if too_many_shared:
            self._hold_from = now + self._pause_ns
            self._pause_ns *= 2
        else:
            self._pause_ns = PAUSE_NS
        if too_many_shared or per_second < HOLD_DOWN_TO:
            self.holding = self._many_events = False
            self._poll.register(self._held.fileno(), _IN)

    def _read(self, inbox: Inbox, previous_poll: int) -> int:
        """Read one socket once; returns the time (ns)."""
        try:
            data, ancillary, _, _ = inbox.sock.recvmsg(READ_BYTES, _ANCILLARY)
        except BlockingIOError:
            return monotonic_ns()
        except OSError as error:
            inbox.error = error.errno or -1
            data = b""
        read_at = monotonic_ns()
        self.reads += 1
        if not data:
            inbox.ended_at = read_at
            self._enqueue(inbox)
            return read_at
        empty_at = inbox.emptied_at
        if empty_at < previous_poll and not inbox.filled and previous_poll > inbox.moved_at:
            empty_at = previous_poll
        if len(data) == READ_BYTES:
            inbox.filled = True
        else:
            inbox.filled = False
            inbox.emptied_at = read_at
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
        reads = inbox.reads
        if inbox.template is not None and not reads:
            chunks, events = plain_read(data, *inbox.template)
            if events:
                inbox.run.append(
                    stamp
                    if events == 1
                    else (stamp, events, stamp - empty_at if chunks > 1 else -1)
                )
                inbox.run_bytes += len(data)
                inbox.run_read_at = read_at
                if inbox.held:
                    inbox.held_events -= events
                    self._shared_reads += chunks > 1
                if len(inbox.run) >= RUN_READS:
                    self._enqueue(inbox)
                return read_at
            self._end_run(inbox)
        reads.append((data, stamp, read_at, empty_at, from_kernel))
        if inbox.queued:
            self.waiting += 1
        elif (
            not inbox.patient
            or inbox.template is not None
            or len(reads) >= KEPT_READS
            or not FEW_BYTES < len(data) < MANY_BYTES
            or data.endswith(END)
        ):
            self._enqueue(inbox)
        return read_at

    def _enqueue(self, inbox: Inbox) -> None:
        if not inbox.queued:
            self._end_run(inbox)
            inbox.queued = True
            self.waiting += len(inbox.reads)
            self._queue.append(inbox)

    def _end_run(self, inbox: Inbox) -> None:
        """Put the run behind the reads."""
        if inbox.run:
            inbox.reads.append((inbox.run, inbox.run_bytes, inbox.run_read_at))
            inbox.run = []
            inbox.run_bytes = 0
            self.waiting += inbox.queued  # its reads are counted


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
    """What the system calls an error of an inbox; "" for a regular end."""
    return os.strerror(number) if number > 0 else "the connection failed" if number else ""
