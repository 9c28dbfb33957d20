"""Read the ready sockets with the kernel's timestamps and keep what was read, without decoding it.

Deferring: once a response has sent its first output, the events that follow are not urgent. The
kernel timestamps every packet when it arrives, so their measured times stay right if the process
reads them later. To read them later saves time, because each wake-up of the process costs more than
a read. There are therefore two epoll instances (the kernel objects that report ready sockets):

- A socket in the first one wakes the process when data arrives.
- A socket in the second one is called deferred and wakes nobody while there are many events. The
  receiver polls the second instance about every DEFER_NS (1 ms), so that one wake-up serves tens of
  events. If a request is due at that moment, it is sent first, and the poll may be another DEFER_NS
  late. While there are few events, the first instance watches the second one, and a deferred socket
  wakes the process like any other.

The price of deferring is a merged read: two events of a stream that arrive within 1 ms are read
together, and only the newer one has an exact timestamp. If merged reads become frequent, deferring
pauses. The last events of a response are never deferred, because the next request may wait for its
end.

Batching: what was read waits in its `SocketBuffer` until the buffer is queued for its owner. Most
reads of a stream can wait: a buffer with `can_batch_reads` is queued only when a read may be the
end of a response or when enough has arrived. Of a read that holds plain events only (see
`plain_events.py`), only the timestamp and the number of events are kept.

This is the reference implementation. `_compiled.c` has a faster one with the same names and rules,
and `implementation.py` chooses between them.
"""

from __future__ import annotations

import os
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic_ns, time_ns
from typing import Any

from .loop_poll import Poll
from .plain_events import count_plain_events
from .response_state import EventBatch, PlainRun, Read
from .timer import Timer

READ_BYTES = 32 << 10
"""The largest number of bytes of one read."""

MAX_WRITE_BYTES = 256 << 10
"""The largest number of bytes of one write. To take 2 MB costs the kernel more than a millisecond,
in which no other response is read and no other request is sent. A larger request is written in
several turns of the event loop."""

MAX_READY = 1024
"""The largest number of sockets that one poll of the first epoll reports."""

MAX_DEFERRED_READY = 32
"""The largest number of sockets that one poll of the deferred epoll reports. The first epoll is
polled again after each such poll, so that urgent sockets do not wait for many deferred ones."""

MAX_READY_BEFORE_SENDING = 32
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
"""More reads than this since the next poll was planned are heavy traffic."""

PLAN_AHEAD_NS = POLL_EVERY_NS // 2
"""A pass that ends less than this before the planned poll plans a later one, because it has just
polled. Under traffic the timer is thus moved on before it fires."""

DEFER_WAIT_MS = 1
"""The longest wait for urgent sockets while other sockets are deferred."""

DEFER_NS = 1_000_000
"""The time between two polls of the deferred sockets."""

EARLY_DEFERRED_POLL_NS = DEFER_NS // 2
"""If something else has woken the process, the deferred sockets are polled so much earlier."""

DECISION_PERIOD_NS = 100_000_000
"""How often the receiver decides whether to defer sockets."""

DEFER_FROM_READS_PER_S = 4_000
DEFER_DOWN_TO_READS_PER_S = 2_000
"""Rates of reads of deferred sockets at which deferring starts and ends."""

READS_PER_MERGED_READ = 100
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

DELIVERIES_PER_CLOCK_READING = 8
"""How many buffers are delivered between two looks at the clock."""

NEVER_NS = 1 << 62
"""A time that never comes."""

WAIT_FOREVER_MS = -1
"""As a wait of `Receiver.receive`: there is no limit."""

NO_TIMER = -1
"""As the `timer_limit` of `Receiver.receive`: no response is awaited, so no timer is set."""

UNKNOWN_ERROR = -1
"""Stands in `SocketBuffer.error` for an error to which the system gave no number."""

WRITE_FAILED = -1
"""Stands for the number of bytes written after an error, which the next read reports."""

NOT_SENT = -1
"""Stands for the number of bytes not accepted if `Receiver.try_send_on_idle` did nothing."""

# The values of Linux. On macOS, the module `select` lacks them.
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
        fd: The descriptor of the socket.
        reads: What was read. A `PlainRun` stands for consecutive reads of plain events.
        plain_arrivals: The timestamps of the latest reads of plain events, which are not in `reads`
            yet.
        plain_bytes: The number of bytes of these reads.
        plain_read_at: When the last of them was made.
        is_readable: The socket may be read.
        can_batch_reads: The owner need not see each read at once.
        template: The bytes before and after the text of a plain event. The owner sets it when the
            next byte is the first one of a chunk. A read of plain events only is then counted in
            `run`, and any other read is passed on at once.
        emptied_at: When a read last took all that the socket had.
        is_last_read_full: The last read filled its buffer, so the socket may hold more.
        ended_at: When the end of the connection was read, or 0 before.
        error: The system's number of the error that ended the connection, 0 for a regular end, or
            UNKNOWN_ERROR.
        is_queued: The buffer waits in the queue of the receiver.
        is_deferred: The socket is in the deferred epoll.
        events_until_urgent: The number of plain events for which the socket may stay there.
        epoll_changed_at: When the socket came into its epoll, which knows nothing from before.
        owner: Who takes the reads, such as a `Pool`.
        exchange: What the connection carries now, or None. This field and the following ones
            belong to the owner. They are here because the C code uses them.
        responses_served: How many responses the connection has carried.
        idle_since: When the last response ended.
        unsent: What the socket has not accepted yet.
        is_closed: The owner has closed the connection, so that nothing more is delivered.
        tls: The TLS layer, or None.
        tcp_connect_ns: How long TCP took to connect.
        tls_handshake_ns: How long the TLS handshake took.
    """

    __slots__ = (
        "can_batch_reads",
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
        "is_last_read_full",
        "is_queued",
        "is_readable",
        "owner",
        "plain_arrivals",
        "plain_bytes",
        "plain_read_at",
        "reads",
        "responses_served",
        "tcp_connect_ns",
        "template",
        "tls",
        "tls_handshake_ns",
        "unsent",
    )
    sock: socket.socket  # a field of the subclass

    def __init__(self, fd: int, now: int) -> None:
        """Create the empty buffer of a socket that is opened now (see the attributes above)."""
        # What was read and not taken yet
        self.reads: list[Read | PlainRun] = []
        # Events that differ from an earlier one in their text alone, which are only counted
        self.plain_arrivals: list[int | EventBatch] = []
        self.plain_bytes = 0
        self.plain_read_at = 0
        self.is_queued = False

        # What the receiver knows of the socket
        self.fd = fd
        self.is_readable = False
        self.emptied_at = now
        self.is_last_read_full = False
        self.ended_at = 0
        self.error = 0
        self.is_deferred = False
        self.epoll_changed_at = 0

        # How urgent the next reads are, as the owner says
        self.can_batch_reads = False
        self.template: tuple[bytes, bytes] | None = None
        self.events_until_urgent = 0

        # What belongs to the owner of the connection
        self.owner: Any = None
        self.exchange: object | None = None
        self.tls: object | None = None
        self.unsent: list[bytes | memoryview] = []
        self.is_closed = False
        self.idle_since = now
        self.responses_served = 0
        self.tcp_connect_ns = 0
        self.tls_handshake_ns = 0


class Receiver:
    """Reads the sockets of two epoll instances and queues the buffers for their owners.

    The module docstring says what a deferred socket and a merged read are. All times are monotonic,
    in ns.

    Attributes:
        now: The time after the last call of `receive`.
        ready_count: The number of descriptors that the last polls reported.
        last_poll_at: When the last poll began that reported all ready sockets. A socket that it did
            not report was empty then.
        poll_started_at: When the current poll began, or the next one begins.
        next_poll_at: While responses are awaited, the timer is set for this time at the latest.
            While sockets are deferred, it is the time of their next poll instead.
        timer_armed_for: The time for which the timer is set.
        wake_at: When the caller has to do something else, such as send the next request.
        is_deferring: There are deferred sockets and many events.
        queued_reads: The number of reads in queued buffers.
        poll_count: The number of polls so far.
        read_count: The number of reads so far.
    """

    def __init__(
        self,
        epoll: Poll,
        deferred_epoll: Poll,
        timer: Timer,
        queue: deque[Any],
    ) -> None:
        """Create a receiver without sockets.

        Args:
            epoll: The first epoll, in which the caller registers sockets.
            deferred_epoll: The second epoll, for sockets whose events are not urgent.
            timer: The timer, which the caller registers in the first epoll.
            queue: The queue to which buffers with reads are added.
        """
        self._epoll = epoll
        self._deferred_epoll = deferred_epoll
        self._timer = timer
        self._queue = queue
        self._buffers: dict[int, SocketBuffer] = {}  # by descriptor
        self.now = monotonic_ns()
        self._wall_to_monotonic_ns = self.now - time_ns()

        # Polls and what they found
        self.last_poll_at = self.now
        self.poll_started_at = self.now
        self.ready_count = 0
        self.queued_reads = 0
        self.poll_count = 0
        self.read_count = 0

        # What comes next
        self.wake_at = NEVER_NS
        self.timer_armed_for = 0
        self.next_poll_at = 0
        self._reads_when_planned = 0  # `read_count` when `next_poll_at` was set

        # Deferring (see the docstring of the module)
        self.is_deferring = False
        self._is_traffic_heavy = False
        self._deferred_count = 0  # sockets in the second epoll
        self._last_deferred_poll_at = self.now
        self._merged_reads = 0  # reads of deferred sockets that held several events
        self._defer_again_at = 0
        self._pause_ns = DEFER_PAUSE_NS

        # The decision period, after which it is decided whether to defer, and its counts
        self._period_start = self.now
        self._deferred_reads = 0
        self._timely_reads = 0  # in polls that were not late
        self._timely_merged_reads = 0

        epoll.register(deferred_epoll.fileno(), _EPOLLIN)

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
            self._epoll.unregister(buffer.fd)
            self._deferred_epoll.register(buffer.fd, _DEFERRED_EVENTS)
            self._note_epoll_change(buffer, is_deferred=True)

    def stop_deferring(self, buffer: SocketBuffer) -> None:
        """Wake the process again when data arrives at this socket."""
        if buffer.is_deferred:
            self._deferred_epoll.unregister(buffer.fd)
            self._epoll.register(buffer.fd, _EPOLLIN)
            self._note_epoll_change(buffer, is_deferred=False)

    def _note_epoll_change(self, buffer: SocketBuffer, *, is_deferred: bool) -> None:
        """Note that a socket has moved to the other epoll, and whether any socket is deferred."""
        buffer.is_deferred = is_deferred
        buffer.epoll_changed_at = monotonic_ns()
        self._deferred_count += 1 if is_deferred else -1
        self.is_deferring = self._is_traffic_heavy and self._deferred_count > 0

    def take_reads(self, buffer: SocketBuffer) -> list[Read | PlainRun]:
        """Return what was read from a socket and not taken before, and empty its buffer.

        Plain events that were only counted are returned as a `PlainRun`. If the buffer is in the
        queue, it stays there.
        """
        self._flush_plain_reads(buffer)
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
            if delivered % DELIVERIES_PER_CLOCK_READING == 0:
                now = monotonic_ns()
                if now > slice_end:
                    break
        return now

    def try_send_on_idle(
        self,
        exchange: Any,  # noqa: ARG002 - for the compiled receiver, as the following ones
        idle: deque[Any],  # noqa: ARG002
        max_idle_ns: int,  # noqa: ARG002
        open_exchanges: set[object],  # noqa: ARG002
    ) -> int:
        """Do nothing and return NOT_SENT, so that the pool sends the request itself.

        This is a shortcut of the compiled receiver. In the usual case, it sends a request on the
        connection that became idle last, which saves the calls of `Pool` and `Reactor`.

        Args:
            exchange: The exchange whose request is to be sent.
            idle: The idle connections.
            max_idle_ns: For how long a connection may have been idle.
            open_exchanges: The exchanges in flight, to which this one is added.

        Returns:
            How many bytes the socket did not accept, or NOT_SENT if nothing was done.
        """
        return NOT_SENT

    def try_recycle(
        self,
        buffer: Any,  # noqa: ARG002 - for the compiled receiver, as the following ones
        idle: deque[Any],  # noqa: ARG002
        in_flight: dict[Any, None],  # noqa: ARG002
        open_exchanges: set[object],  # noqa: ARG002
    ) -> Any:
        """Do nothing and return None, so that the pool frees the connection itself.

        This is a shortcut of the compiled receiver. If the server has not limited the use of the
        connection of a completed response, it makes the connection idle, which saves calls of
        `Pool`.

        Args:
            buffer: The connection.
            idle: The idle connections, to which this one is added.
            in_flight: The requests of the pool, from which that of the connection is removed.
            open_exchanges: The exchanges in flight, from which it is removed as well.

        Returns:
            The exchange, whose completion can be reported, or None if nothing was done.
        """
        return None

    def send(self, buffer: SocketBuffer, parts: Sequence[bytes | memoryview]) -> tuple[int, int]:
        """Write parts to a socket with one system call, at most MAX_WRITE_BYTES of them.

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

    def receive(self, max_wait_ms: int, return_at: int, timer_limit: int) -> list[tuple[int, int]]:
        """Poll and read repeatedly, until there is work for the caller or the time `return_at`.

        Each pass does this:

        1. Poll the first epoll. If a request is due (`wake_at`) and many sockets are ready, return,
           so that the caller sends the request before they are read.
        2. Read the sockets that are ready.
        3. Poll the deferred sockets, which are not urgent, if it is time for that, and read them.
        4. Decide whether to defer sockets, and plan the next poll.

        Args:
            max_wait_ms: The longest wait of each poll, or WAIT_FOREVER_MS.
            return_at: When to return at the latest. A time in the past means after one pass.
            timer_limit: The latest time for which the timer may be set when the next poll is
                planned, or NO_TIMER.

        Returns:
            The descriptors and their events that the caller has to handle: those of the timer, of
            sockets that are not readable, and of sockets that can be written.
        """
        unhandled: list[tuple[int, int]] = []
        while True:
            was_deferring = self.is_deferring
            ready = self._epoll.poll(self._wait_s(max_wait_ms), MAX_READY)
            now = self._read_clocks()
            self.poll_count += 1
            self.ready_count = len(ready)
            if now >= self.wake_at and len(ready) > MAX_READY_BEFORE_SENDING:
                self.now = now
                return unhandled
            previous_poll_at = self.last_poll_at
            if len(ready) < MAX_READY:  # A full list may leave out sockets that are ready too.
                self.last_poll_at = self.poll_started_at
            now, has_deferred_data = self._read_ready(ready, previous_poll_at, now, unhandled)
            # While deferring, the first epoll does not watch the second one, so the time decides.
            is_deferred_poll_due = (
                self._is_deferred_poll_due(now) if was_deferring else has_deferred_data
            )
            if is_deferred_poll_due:
                now = self._receive_deferred(now)
            # With unhandled events the caller acts now, and sets the timer afterwards.
            self._plan_after_pass(now, NO_TIMER if unhandled else timer_limit)
            if unhandled or self._queue or now >= return_at:
                return unhandled
            # A wait without a limit is cut into waits of DEFER_WAIT_MS while deferring.
            may_wait_again = was_deferring and max_wait_ms < 0
            if not self.ready_count and not may_wait_again:
                return unhandled

    def receive_and_deliver(
        self,
        max_wait_ms: int,
        return_at: int,
        tick_at: int,
        open_exchanges: set[object],
        slice_ns: int,  # noqa: ARG002 - for the compiled receiver, as the following one
        deliver: Callable[[Any], None],  # noqa: ARG002
    ) -> list[tuple[int, int]] | None:
        """Receive until `return_at`, `tick_at` or `wake_at`, whichever comes first.

        The compiled receiver also delivers queued buffers and sets the timer, as `Reactor` does,
        and goes on for as long as that is all there is to do. This one leaves both to the caller.

        Args:
            max_wait_ms: The longest wait of each poll, or WAIT_FOREVER_MS.
            return_at: When the turn of the caller is over.
            tick_at: When the next tick of the caller is due.
            open_exchanges: The requests in flight. The timer is set for the next poll only if there
                are any.
            slice_ns: For how long to deliver before the next poll.
            deliver: Called with each queued buffer that the compiled receiver does not deliver
                itself.

        Returns:
            The result of `receive`, or None if all reads have been delivered.
        """
        caller_due_at = min(self.wake_at, tick_at)
        if self._queue:
            max_wait_ms = 0
        timer_limit = caller_due_at if open_exchanges else NO_TIMER
        return self.receive(max_wait_ms, min(return_at, caller_due_at), timer_limit)

    def _wait_s(self, max_wait_ms: int) -> float:
        """Return how long the next poll may wait, in seconds, or a negative number for no limit.

        While deferring, a poll that may wait does so only until the next poll of the deferred
        sockets. The shortest wait of epoll, DEFER_WAIT_MS, is exact enough for that.
        """
        if self.is_deferring and max_wait_ms:
            max_wait_ms = DEFER_WAIT_MS if self.next_poll_at > self.now else 0
        return max_wait_ms / 1000 if max_wait_ms > 0 else max_wait_ms

    def _plan_after_pass(self, now: int, timer_limit: int) -> None:
        """End a pass: decide whether to defer, and plan the next poll, if it is time for that.

        Args:
            now: The time.
            timer_limit: The latest time for which the timer may be set, or NO_TIMER.
        """
        self.now = now
        self.poll_started_at = now
        if now - self._period_start > DECISION_PERIOD_NS:
            self._decide_whether_to_defer(now)
        if not self.is_deferring and now > self.next_poll_at - PLAN_AHEAD_NS:
            self._plan_next_poll(now, timer_limit)

    def _is_deferred_poll_due(self, now: int) -> bool:
        """Return True if the deferred sockets are to be polled now, while deferring.

        The process is awake, so it does this up to EARLY_DEFERRED_POLL_NS before the planned time.
        If a request is due, it is sent first, and the poll may be up to DEFER_NS late.
        """
        if now >= self.wake_at:
            return now > self.next_poll_at + DEFER_NS
        return now > self.next_poll_at - EARLY_DEFERRED_POLL_NS

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
        previous_poll_at: int,
        now: int,
        unhandled: list[tuple[int, int]],
    ) -> tuple[int, bool]:
        """Read the sockets that a poll reported. Add what is not for this receiver to `unhandled`.

        Args:
            ready: The descriptors with their events, as epoll reports them.
            previous_poll_at: When the poll before this one began. A socket in `ready` was empty
                then, because that poll did not report it.
            now: The time, which is returned if nothing is read.
            unhandled: The list for descriptors and events that the caller has to handle.

        Returns:
            The time, and whether the descriptor of the second epoll is ready, which means that a
            deferred socket has data.
        """
        deferred_fd = self._deferred_epoll.fileno()
        has_deferred_data = False
        for fd, events in ready:
            if fd == deferred_fd:
                has_deferred_data = True
                continue
            buffer = self._buffers.get(fd)
            is_readable = buffer is not None and buffer.is_readable
            if not is_readable or events & _EPOLLOUT:
                unhandled.append((fd, events))
            if buffer is None or not is_readable or not events & _READABLE_OR_BROKEN:
                continue
            if not buffer.ended_at:
                now = self._read_socket(buffer, previous_poll_at)
        return now, has_deferred_data

    def _plan_next_poll(self, now: int, timer_limit: int) -> None:
        """Plan the next poll of a load generator, and set the timer for it.

        Polls at short intervals tell which sockets were empty when. This bounds the uncertainty of
        the timestamp if two events arrive in one read. Under heavy traffic the interval is longer,
        because each read is a poll as well.

        Args:
            now: The time.
            timer_limit: The latest time for which the timer may be set, or NO_TIMER.
        """
        reads_since_plan = self.read_count - self._reads_when_planned
        period_ns = BUSY_POLL_EVERY_NS if reads_since_plan > BUSY_READS else POLL_EVERY_NS
        self.next_poll_at = now + period_ns
        self._reads_when_planned = self.read_count
        if timer_limit != NO_TIMER:
            self.timer_armed_for = min(self.next_poll_at, timer_limit)
            self._timer.arm(self.timer_armed_for)

    def _receive_deferred(self, now: int) -> int:
        """Poll the deferred sockets, whose events are not urgent, and read those that are ready.

        Counts of these reads decide later whether deferring costs too many exact timestamps. A poll
        counts only if it is timely, at most DEFER_NS after its planned time: a late poll finds
        several events in a socket because the process was busy, not because of deferring.

        Returns:
            The time.
        """
        ready = self._deferred_epoll.poll(0, MAX_DEFERRED_READY)
        self.ready_count += len(ready)
        previous_poll_at = self._last_deferred_poll_at
        is_timely = self.is_deferring and now < self.next_poll_at + DEFER_NS
        merged_reads_before = self._merged_reads
        has_all_ready = len(ready) < MAX_DEFERRED_READY
        if has_all_ready:
            self._last_deferred_poll_at = now
        for fd, events in ready:
            buffer = self._buffers[fd]
            now = self._read_socket(buffer, previous_poll_at)
            # The deferred epoll is edge-triggered: it reports arriving data once, even if some is
            # left after this read. The first epoll reports a socket until it is empty.
            if buffer.is_last_read_full or events != _EPOLLIN or buffer.events_until_urgent <= 0:
                self.stop_deferring(buffer)
        self._deferred_reads += len(ready)
        if is_timely:
            self._timely_reads += len(ready)
            self._timely_merged_reads += self._merged_reads - merged_reads_before
        if self.is_deferring:
            self.next_poll_at = now + DEFER_NS if has_all_ready else now
        return now

    def _decide_whether_to_defer(self, now: int) -> None:
        """End a decision period: begin or end deferring by what was read in it.

        Deferring begins when reads are frequent and ends when they are rare, with a gap between
        both rates so that it does not toggle. It also ends if too many reads were merged: they held
        several events, of which only the last has an exact timestamp.
        """
        reads_per_s = self._deferred_reads * 1_000_000_000 // (now - self._period_start)
        has_too_many_merged = self._timely_merged_reads * READS_PER_MERGED_READ > self._timely_reads
        self._period_start = now
        self._deferred_reads = 0
        self._timely_reads = 0
        self._timely_merged_reads = 0
        if self._is_traffic_heavy:
            self._end_deferring_if_needed(now, reads_per_s, has_too_many_merged)
        elif reads_per_s >= DEFER_FROM_READS_PER_S and now >= self._defer_again_at:
            self._is_traffic_heavy = True
            self.is_deferring = self._deferred_count > 0
            self.next_poll_at = now
            # From now on a deferred socket wakes the process no more.
            self._epoll.unregister(self._deferred_epoll.fileno())

    def _end_deferring_if_needed(
        self, now: int, reads_per_s: int, has_too_many_merged: bool
    ) -> None:
        """End deferring if reads became rare, or if too many of them held several events.

        After too many such merged reads, deferring may not begin again before a pause, and the next
        pause is twice as long, because the traffic probably stays as it is.
        """
        if has_too_many_merged:
            self._defer_again_at = now + self._pause_ns
            self._pause_ns *= 2
        else:
            self._pause_ns = DEFER_PAUSE_NS
        if has_too_many_merged or reads_per_s < DEFER_DOWN_TO_READS_PER_S:
            self.is_deferring = False
            self._is_traffic_heavy = False
            # A deferred socket wakes the process again.
            self._epoll.register(self._deferred_epoll.fileno(), _EPOLLIN)

    def _read_socket(self, buffer: SocketBuffer, previous_poll_at: int) -> int:
        """Read one socket once, with the kernel's timestamp, and store what was read in its buffer.

        The data has arrived after `empty_at`, the last time at which the socket is known to have
        been empty: either a read emptied it, or a poll did not report it. Such a poll proves
        nothing if the last read left bytes in the socket, or if the socket came into its epoll
        after the poll.

        Args:
            buffer: The buffer of the socket.
            previous_poll_at: When the last poll began that did not report the socket.

        Returns:
            The time after the read.
        """
        try:
            data, ancillary, _, _ = buffer.sock.recvmsg(READ_BYTES, _ANCILLARY_BYTES)
        except BlockingIOError:
            return monotonic_ns()
        except OSError as error:
            buffer.error = error.errno or UNKNOWN_ERROR
            data = b""
        read_at = monotonic_ns()
        self.read_count += 1
        if not data:
            buffer.ended_at = read_at
            self._enqueue(buffer)
            return read_at
        empty_at = buffer.emptied_at
        poll_saw_empty_socket = (
            not buffer.is_last_read_full and previous_poll_at > buffer.epoll_changed_at
        )
        if poll_saw_empty_socket:
            empty_at = max(empty_at, previous_poll_at)
        buffer.is_last_read_full = len(data) == READ_BYTES
        if not buffer.is_last_read_full:
            buffer.emptied_at = read_at
        kernel_timestamp = self._kernel_timestamp(ancillary)
        if kernel_timestamp is None:
            read = Read(data, read_at, read_at, empty_at, from_kernel=False)
        else:
            # The kernel uses the wall clock, which may be set meanwhile. The timestamp must stay
            # within the time in which the data can have arrived.
            timestamp = max(min(kernel_timestamp, read_at), empty_at)
            read = Read(data, timestamp, read_at, empty_at, from_kernel=True)
        self._store_read(buffer, read)
        return read_at

    def _kernel_timestamp(self, ancillary: list[tuple[int, int, bytes]]) -> int | None:
        """Return the kernel's timestamp in the ancillary data of a read, or None without one.

        The kernel uses the wall clock, so the timestamp is converted to the monotonic one. The
        data is a list of (level, type, bytes), in which the timestamp is the only item.
        """
        if not ancillary:
            return None
        seconds, nanoseconds = _unpack_timespec(ancillary[0][2])
        if not seconds:  # The packet arrived before timestamps were switched on.
            return None
        timestamp: int = seconds * 1_000_000_000 + nanoseconds + self._wall_to_monotonic_ns
        return timestamp

    def _store_read(self, buffer: SocketBuffer, read: Read) -> None:
        """Store a read in the buffer of its socket, and queue the buffer if its owner must act.

        Of a read that holds plain events only, the number of events and the timestamp are stored
        instead of its bytes. This is done only while no other read waits in the buffer, because the
        owner has to see all reads in their order.
        """
        if buffer.template is not None and not buffer.reads:
            is_plain = self._count_plain_read(buffer, buffer.template, read)
            if is_plain:
                if len(buffer.plain_arrivals) >= MAX_RUN_READS:
                    self._enqueue(buffer)
                return
            self._flush_plain_reads(buffer)
        buffer.reads.append(read)
        if buffer.is_queued:
            self.queued_reads += 1
        elif _is_urgent(buffer, read):
            self._enqueue(buffer)

    def _count_plain_read(
        self, buffer: SocketBuffer, template: tuple[bytes, bytes], read: Read
    ) -> bool:
        """Add the number of events of a read to its buffer if all of them are plain.

        Plain events differ from an earlier one in their text alone, as the template says. Several
        events in one chunk are one write of the server, so they have arrived together. Those in
        several chunks may have arrived one by one since the socket was empty.

        Returns:
            Whether the read holds plain events only. If not, nothing was changed.
        """
        chunks, events = count_plain_events(read.data, *template)
        if not events:
            return False
        is_merged = chunks > 1
        if events == 1:
            buffer.plain_arrivals.append(read.timestamp)
        else:
            uncertainty_ns = read.timestamp - read.empty_at if is_merged else None
            buffer.plain_arrivals.append(EventBatch(read.timestamp, events, uncertainty_ns))
        buffer.plain_bytes += len(read.data)
        buffer.plain_read_at = read.read_at
        if buffer.is_deferred:
            buffer.events_until_urgent -= events
            if is_merged:
                self._merged_reads += 1
        return True

    def _enqueue(self, buffer: SocketBuffer) -> None:
        """Queue a buffer for its owner. A buffer is at most once in the queue."""
        if not buffer.is_queued:
            self._flush_plain_reads(buffer)
            buffer.is_queued = True
            self.queued_reads += len(buffer.reads)
            self._queue.append(buffer)

    def _flush_plain_reads(self, buffer: SocketBuffer) -> None:
        """Append the plain events that were counted to the reads of the buffer, as a `PlainRun`."""
        if buffer.plain_arrivals:
            buffer.reads.append(
                PlainRun(buffer.plain_arrivals, buffer.plain_bytes, buffer.plain_read_at)
            )
            buffer.plain_arrivals = []
            buffer.plain_bytes = 0
            if buffer.is_queued:
                self.queued_reads += 1


def _is_urgent(buffer: SocketBuffer, read: Read) -> bool:
    r"""Return whether the owner of a buffer must be called for the read that was just stored.

    The owner is called at once in these cases:

    - It wants every read, or the read should hold plain events only and does not.
    - Many reads are waiting.
    - The read is large. It has many events, so waiting for more would save nothing.
    - The read may end the response. The last chunk, `0\r\n\r\n`, is then at its end, or the read
      is so small that it may be the last 1 to 4 bytes of that chunk.
    """
    if not buffer.can_batch_reads or buffer.template is not None:
        return True
    has_many_reads = len(buffer.reads) >= MAX_BATCHED_READS
    is_small_or_large = not SMALL_READ_BYTES < len(read.data) < LARGE_READ_BYTES
    return has_many_reads or is_small_or_large or read.data.endswith(CHUNKED_BODY_END)


def first_bytes(parts: Sequence[bytes | memoryview], limit: int) -> list[bytes | memoryview]:
    """Return the first `limit` bytes of the parts, as parts, without copying them.

    The parts of b"head" and b"body" with a limit of 6 are b"head" and a view of b"bo".
    """
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
    """Return what follows the first `start` bytes of the parts, as parts, without copying them.

    Of b"head" and b"body" with a start of 6, this is a view of b"dy".
    """
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
