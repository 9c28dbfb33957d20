"""Read the ready sockets with the kernel's timestamps and keep what was read, without decoding it.

Deferring: once a response has sent its first output, the events that follow are not urgent. The
kernel timestamps every packet when it arrives, so their measured times stay right if the process
reads them later. To read them later saves time, because each wake-up of the process costs more than
a read (`deferral.py` decides when that is worthwhile). There are therefore two epoll instances (the
kernel objects that report ready sockets):

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
from typing import TYPE_CHECKING, Any

from .deferral import DeferralPolicy
from .loop_poll import Poll
from .plain_events import count_plain_events
from .response_state import EventBatch, PlainRun, Read
from .timer import Timer

if TYPE_CHECKING:
    from .exchange import Exchange

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


MAX_BATCHED_READS = 64
"""The number of reads that a buffer keeps before its owner is called."""

MAX_RUN_READS = 512
"""The number of plain reads that are counted before the owner is called."""

SMALL_READ_BYTES = 4
LARGE_READ_BYTES = 2048
"""A read of at most the first or at least the second size is passed to the owner at once."""

CHUNKED_BODY_END = b"\r\n\r\n"
"""A read that ends with these bytes may be the end of a chunked body."""

DELIVERIES_PER_CLOCK_READING = 8
"""How many buffers are delivered between two looks at the clock."""

NS_PER_S = 1_000_000_000

NEVER_NS = 1 << 62
"""A time that never comes."""

WAIT_FOREVER_MS = -1
"""As a wait of `Receiver.receive`: there is no limit."""

_WAIT_FOREVER_S = -1.0
"""The same as a wait of `epoll.poll`."""

_MS_PER_S = 1000

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
        """Create the empty buffer of a socket that is opened at `now` (monotonic, in ns).

        The class docstring describes each attribute. The receiver fills the first three groups. The
        owner of the connection, such as a `Pool`, sets the other two.
        """
        # The reads that the owner has not taken yet
        self.reads: list[Read | PlainRun] = []
        self.is_queued = False

        # Reads after them whose events differ from earlier ones in their text alone ("plain"). Only
        # their timestamps and sizes are stored, until they are added to `reads` as one `PlainRun`.
        self.plain_arrivals: list[int | EventBatch] = []
        self.plain_bytes = 0
        self.plain_read_at = 0

        # The state of the socket
        self.fd = fd
        self.is_readable = False
        self.emptied_at = now
        self.is_last_read_full = False
        self.ended_at = 0  # 0: the connection has not ended.
        self.error = 0  # 0: there is no error.
        self.is_deferred = False
        self.epoll_changed_at = 0

        # How soon the owner needs the next reads
        self.can_batch_reads = False
        self.template: tuple[bytes, bytes] | None = None
        self.events_until_urgent = 0

        # What the owner stores with the connection
        self.owner: object | None = None
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
            epoll: The first epoll, in which the caller registers sockets. Data in them wakes the
                process at once.
            deferred_epoll: The second epoll, for sockets whose events are not urgent. It is polled
                about every millisecond under heavy traffic.
            timer: The timer, which the caller registers in the first epoll.
            queue: The queue to which buffers with reads are added.
        """
        self._epoll = epoll
        self._deferred_epoll = deferred_epoll
        self._timer = timer
        self._queue = queue
        self._buffers: dict[int, SocketBuffer] = {}  # by descriptor

        # The clocks: the monotonic time, and what to add to a kernel timestamp (wall clock)
        self.now = monotonic_ns()
        self._wall_to_monotonic_ns = self.now - time_ns()

        # When the latest polls began
        self.poll_started_at = self.now
        self.last_poll_at = self.now
        self._last_deferred_poll_at = self.now

        # Counts of descriptors, polls and reads
        self.ready_count = 0  # of the latest polls only
        self.queued_reads = 0
        self.poll_count = 0
        self.read_count = 0
        self._merged_read_count = 0  # reads of deferred sockets that held several events

        # When to poll next, and when the caller has to act. 0 means that no time is set yet.
        self.wake_at = NEVER_NS
        self.timer_armed_for = 0
        self.next_poll_at = 0
        self._read_count_when_planned = 0  # `read_count` when the next poll was planned

        # Deferring: whether and how many sockets are read late
        self.is_deferring = False
        self._deferred_socket_count = 0
        self._deferral_policy = DeferralPolicy(self.now)

        # Until there is heavy traffic, deferred sockets wake the process like any other.
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
        self._deferred_socket_count += 1 if is_deferred else -1
        self._update_is_deferring()

    def _update_is_deferring(self) -> None:
        """Note whether there are deferred sockets that wake nobody, because traffic is heavy."""
        is_worthwhile = self._deferral_policy.is_deferring_worthwhile
        self.is_deferring = is_worthwhile and self._deferred_socket_count > 0

    def take_reads(self, buffer: SocketBuffer) -> list[Read | PlainRun]:
        """Return the reads that wait in the buffer of a socket, oldest first, and empty the buffer.

        Plain events, of which only the number and the timestamps were kept, are returned as a
        `PlainRun`. If the buffer is in the queue, it stays there.
        """
        self._flush_plain_reads(buffer)
        reads = buffer.reads
        if not reads:
            return []

        buffer.reads = []
        if buffer.is_queued:
            self.queued_reads -= len(reads)

        return reads

    def deliver_queued(self, slice_ns: int, deliver: Callable[[Any], None]) -> int:
        """Pass the queued buffers to `deliver`, one after the other, for at most `slice_ns`.

        The time is limited, because packets wait in the kernel meanwhile. It is checked after every
        few buffers. Buffers for which no time is left stay in the queue.

        Args:
            slice_ns: The longest time to spend, in ns.
            deliver: Called with each buffer, whose reads it takes and processes.

        Returns:
            The monotonic time at the last check of the clock, in ns.
        """
        queue = self._queue
        now = monotonic_ns()
        slice_end = now + slice_ns

        delivered = 0
        while queue:
            deliver(queue.popleft())
            delivered += 1
            is_clock_check_due = delivered % DELIVERIES_PER_CLOCK_READING == 0
            if is_clock_check_due:
                now = monotonic_ns()
                if now > slice_end:
                    break

        return now

    def try_send_on_idle(self, *_arguments: object) -> int:
        """Return NOT_SENT, which tells the pool to send a request by its own Python code.

        The compiled receiver has a faster way to send a request on the connection that became idle
        last. Its method of this name takes (exchange, idle connections, longest idle time in ns,
        open exchanges) and returns how many bytes the socket did not accept. This class has no such
        shortcut.
        """
        return NOT_SENT

    def try_recycle(self, *_arguments: object) -> Exchange | None:
        """Return None, which tells the pool to make a connection idle by its own Python code.

        The compiled receiver has a faster way to make the connection of a completed response idle.
        Its method of this name takes (connection, idle connections, requests in flight, open
        exchanges) and returns the exchange of the response, or None if the server has limited the
        use of the connection. This class has no such shortcut.
        """
        return None

    def send(self, buffer: SocketBuffer, parts: Sequence[bytes | memoryview]) -> tuple[int, int]:
        """Write bytes to a socket with one system call, which does not wait.

        Args:
            buffer: The buffer of the socket.
            parts: The bytes in pieces, such as the head and the body of a request. The first
                MAX_WRITE_BYTES of them are written.

        Returns:
            Two numbers: the monotonic time just before the system call, in ns, and how many bytes
            the socket accepted. The second number is 0 if the socket cannot take more now, and
            WRITE_FAILED if the connection is broken.
        """
        started_at = monotonic_ns()
        try:
            accepted_bytes = buffer.sock.sendmsg(first_bytes(parts, MAX_WRITE_BYTES))
        except BlockingIOError:
            accepted_bytes = 0
        except OSError:
            accepted_bytes = WRITE_FAILED

        return started_at, accepted_bytes

    def receive(self, max_wait_ms: int, return_at: int, timer_limit: int) -> list[tuple[int, int]]:
        """Poll and read repeatedly, until there is work for the caller or the time `return_at`.

        Each pass of the loop polls the urgent sockets (those of the first epoll) and reads the
        ready ones. If it is time for that, it then polls and reads the deferred sockets, whose
        events are not urgent. The method returns

        1. before it reads, if a request is due and many sockets are ready, so that the caller sends
           the request on time,
        2. when there are reads to deliver or unhandled events,
        3. at `return_at`, and
        4. when nothing was ready within the longest wait.

        Args:
            max_wait_ms: The longest wait of each poll, or WAIT_FOREVER_MS.
            return_at: When to return at the latest. A time in the past means after one pass.
            timer_limit: The latest time for which the timer may be set when the next poll is
                planned, or NO_TIMER.

        Returns:
            The (descriptor, events) pairs that the caller has to handle: the timer, sockets that
            are still connecting, and sockets that can be written.
        """
        has_unlimited_wait = max_wait_ms == WAIT_FOREVER_MS
        while True:
            was_deferring = self.is_deferring
            ready = self._poll_first_epoll(max_wait_ms)
            is_request_due = self.now >= self.wake_at
            if is_request_due and len(ready) > MAX_READY_BEFORE_SENDING:
                return []

            unhandled = self._read_ready(ready)
            if self._is_deferred_poll_due(ready, was_deferring):
                self._poll_and_read_deferred()

            # With unhandled events the caller acts now, and sets the timer afterwards.
            self._end_pass(NO_TIMER if unhandled else timer_limit)

            has_reads_to_deliver = len(self._queue) > 0
            is_time_over = self.now >= return_at
            if unhandled or has_reads_to_deliver or is_time_over:
                return unhandled

            # While sockets are deferred, an unlimited wait is cut into waits of DEFER_WAIT_MS.
            was_wait_cut_short = was_deferring and has_unlimited_wait
            is_wait_over = self.ready_count == 0 and not was_wait_cut_short
            if is_wait_over:
                return []

    def receive_and_deliver(
        self,
        max_wait_ms: int,
        return_at: int,
        tick_at: int,
        open_exchanges: set[object],
        *_arguments_for_delivering: object,
    ) -> list[tuple[int, int]] | None:
        """Receive until the caller has something to do, at `return_at` at the latest.

        The name is that of the method of the compiled receiver, which also passes on ("delivers")
        what it has read. This implementation leaves that to the caller. It has the same parameters,
        so that the caller need not know which of the two it calls.

        Args:
            max_wait_ms: The longest wait of each poll, or WAIT_FOREVER_MS.
            return_at: When the caller wants to return to the event loop, in ns.
            tick_at: When the caller has periodic work to do, in ns.
            open_exchanges: The requests in flight. Only while there are any, the timer is set for
                the next poll.
            _arguments_for_delivering: For how many ns to deliver, and the function to call with
                each buffer. Only the compiled receiver uses them.

        Returns:
            The (descriptor, events) pairs that the caller has to handle (see `receive`). The
            compiled receiver returns None if it has handled and delivered everything.
        """
        # The caller sends its next request at `wake_at`.
        next_work_at = min(self.wake_at, tick_at)
        has_reads_to_deliver = len(self._queue) > 0
        return self.receive(
            max_wait_ms=0 if has_reads_to_deliver else max_wait_ms,
            return_at=min(return_at, next_work_at),
            timer_limit=next_work_at if open_exchanges else NO_TIMER,
        )

    # -- polling -------------------------------------------------------------------------------

    def _poll_first_epoll(self, max_wait_ms: int) -> list[tuple[int, int]]:
        """Wait until a socket of the first epoll is ready, and update the clocks.

        Args:
            max_wait_ms: The longest wait, or WAIT_FOREVER_MS.

        Returns:
            The ready descriptors with their events, such as `[(7, EPOLLIN)]`.
        """
        ready = self._epoll.poll(self._wait_s(max_wait_ms), MAX_READY)
        self.now = self._read_clocks()
        self.poll_count += 1
        self.ready_count = len(ready)
        return ready

    def _wait_s(self, max_wait_ms: int) -> float:
        """Return how long the next poll may wait, in seconds, or _WAIT_FOREVER_S for no limit.

        While sockets are deferred, a poll waits only until it is time to poll them, and for
        DEFER_WAIT_MS (1 ms) at most. Epoll supports no shorter wait.

        Args:
            max_wait_ms: The longest wait in ms, 0 for none, or WAIT_FOREVER_MS.
        """
        if max_wait_ms == 0:
            return 0.0
        if not self.is_deferring:
            is_unlimited = max_wait_ms == WAIT_FOREVER_MS
            return _WAIT_FOREVER_S if is_unlimited else max_wait_ms / _MS_PER_S
        is_deferred_poll_due = self.now >= self.next_poll_at
        return 0.0 if is_deferred_poll_due else DEFER_WAIT_MS / _MS_PER_S

    def _is_deferred_poll_due(self, ready: list[tuple[int, int]], was_deferring: bool) -> bool:
        """Return True if the deferred sockets, which are read late, are to be polled now.

        There are three cases:

        1. Light traffic: the epoll of the deferred sockets is itself registered in the first epoll,
           which reports it when one of them has data.
        2. Heavy traffic: the time decides. As the process is awake anyway, the poll may be made
           EARLY_DEFERRED_POLL_NS before its planned time.
        3. Heavy traffic, and a request is due: the request is sent first, unless the poll is
           already DEFER_NS late.

        Args:
            ready: The descriptors with their events that the first epoll has just reported.
            was_deferring: The traffic was heavy when the first epoll was polled.
        """
        if not was_deferring:
            deferred_fd = self._deferred_epoll.fileno()
            return any(fd == deferred_fd for fd, _events in ready)

        planned_poll_at = self.next_poll_at
        is_request_due = self.now >= self.wake_at
        if is_request_due:
            return self.now > planned_poll_at + DEFER_NS

        return self.now > planned_poll_at - EARLY_DEFERRED_POLL_NS

    def _read_clocks(self) -> int:
        """Return the time and update the offset between the monotonic clock and the wall clock."""
        now = monotonic_ns()
        wall = time_ns()
        if monotonic_ns() - now < MAX_CLOCK_READING_NS:
            self._wall_to_monotonic_ns = now - wall
        return now

    def _read_ready(self, ready: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Read the sockets that a poll of the first epoll has just reported.

        The previous poll did not report these sockets, so they were empty when it began, and their
        data have arrived since then. This time is stored with each read.

        Args:
            ready: The descriptors with their events, such as `[(7, EPOLLIN)]`.

        Returns:
            The descriptors with their events that the caller has to handle: the timer, sockets that
            are still connecting, and sockets that can be written.
        """
        previous_poll_at = self.last_poll_at
        is_report_complete = len(ready) < MAX_READY
        if is_report_complete:
            self.last_poll_at = self.poll_started_at

        deferred_fd = self._deferred_epoll.fileno()
        unhandled: list[tuple[int, int]] = []
        for fd, events in ready:
            if fd == deferred_fd:  # `_poll_and_read_deferred` handles it.
                continue

            buffer = self._buffers.get(fd)
            is_connected_socket = buffer is not None and buffer.is_readable

            can_be_written = events & _EPOLLOUT
            if can_be_written or not is_connected_socket:
                unhandled.append((fd, events))

            if buffer is None or not is_connected_socket:
                continue

            has_data_or_end = events & _READABLE_OR_BROKEN
            was_end_read_before = buffer.ended_at != 0
            if has_data_or_end and not was_end_read_before:
                self._read_socket(buffer, previous_poll_at)

        return unhandled

    def _poll_and_read_deferred(self) -> None:
        """Poll the deferred sockets, whose events are not urgent, and read those that are ready.

        The reads are counted for the decision whether deferring is worthwhile. The next poll
        follows after DEFER_NS, or at once if this one may have left out ready sockets.
        """
        poll_started_at = self.now
        is_timely = self.is_deferring and poll_started_at < self.next_poll_at + DEFER_NS
        ready = self._deferred_epoll.poll(0, MAX_DEFERRED_READY)
        self.ready_count += len(ready)
        merged_reads = self._read_deferred(ready)
        self._deferral_policy.count_reads(len(ready), merged_reads, is_timely=is_timely)

        is_report_complete = len(ready) < MAX_DEFERRED_READY
        if is_report_complete:
            self._last_deferred_poll_at = poll_started_at

        if self.is_deferring:
            self.next_poll_at = self.now + DEFER_NS if is_report_complete else self.now

    def _read_deferred(self, ready: list[tuple[int, int]]) -> int:
        """Read the deferred sockets that the second epoll has just reported.

        A socket moves back to the first epoll if its next events are urgent, if its connection has
        failed, or if the read may have left data in it: the second epoll is edge-triggered, so it
        would not report these data again.

        Args:
            ready: The descriptors with their events, such as `[(7, EPOLLIN)]`.

        Returns:
            How many of the reads were merged: they hold several events of a stream, of which only
            the newest has an exact timestamp.
        """
        merged_reads_before = self._merged_read_count
        for fd, events in ready:
            buffer = self._buffers[fd]
            self._read_socket(buffer, self._last_deferred_poll_at)
            may_have_more_data = buffer.is_last_read_full
            has_failed = events != _EPOLLIN
            is_urgent = buffer.events_until_urgent <= 0
            if may_have_more_data or has_failed or is_urgent:
                self.stop_deferring(buffer)

        return self._merged_read_count - merged_reads_before

    def _end_pass(self, timer_limit: int) -> None:
        """End a pass, which is one poll with the reads of the sockets that it has reported.

        First, if it is time for that, reconsider whether sockets are read late ("deferred"). While
        they are, they are polled about every millisecond, and no other poll is planned. Otherwise
        plan the next poll, if the planned time has passed or is less than PLAN_AHEAD_NS away. This
        pass has just polled, so that another poll so soon would tell nothing new.

        Args:
            timer_limit: The latest time for which the timer may be set, or NO_TIMER.
        """
        self.poll_started_at = self.now
        if self._deferral_policy.is_decision_due(self.now):
            self._reconsider_deferring()

        if self.is_deferring:
            return

        is_next_poll_near = self.next_poll_at - self.now < PLAN_AHEAD_NS
        if is_next_poll_near:
            self._plan_next_poll(timer_limit)

    def _reconsider_deferring(self) -> None:
        """Let the policy decide whether to defer sockets, and act if its decision has changed.

        The first epoll watches the second one only while deferring is not worthwhile. Deferred
        sockets then wake the process like any others.
        """
        has_changed = self._deferral_policy.decide(self.now)
        if not has_changed:
            return

        self._update_is_deferring()
        deferred_fd = self._deferred_epoll.fileno()
        if self._deferral_policy.is_deferring_worthwhile:
            self.next_poll_at = self.now
            self._epoll.unregister(deferred_fd)
        else:
            self._epoll.register(deferred_fd, _EPOLLIN)

    def _plan_next_poll(self, timer_limit: int) -> None:
        """Plan the next poll, and set the timer for it.

        Two events that arrive in one read have the timestamp of the newer one. The older one came
        after the socket was last known to be empty, and each poll shows which sockets are empty. So
        the more often sockets are polled, the smaller this uncertainty is. Under heavy traffic
        there is a poll before nearly every read anyway, so the timer is set for a later time.

        Args:
            timer_limit: The latest time for which the timer may be set, or NO_TIMER.
        """
        reads_since_plan = self.read_count - self._read_count_when_planned
        is_traffic_heavy = reads_since_plan > BUSY_READS
        interval_ns = BUSY_POLL_EVERY_NS if is_traffic_heavy else POLL_EVERY_NS
        self.next_poll_at = self.now + interval_ns

        self._read_count_when_planned = self.read_count
        if timer_limit != NO_TIMER:
            self.timer_armed_for = min(self.next_poll_at, timer_limit)
            self._timer.arm(self.timer_armed_for)

    # -- reading -------------------------------------------------------------------------------

    def _read_socket(self, buffer: SocketBuffer, previous_poll_at: int) -> None:
        """Read one socket once, with the kernel's timestamp, and store what was read in its buffer.

        There are three outcomes:

        1. The socket has nothing to read, and nothing is stored.
        2. The connection has ended or failed. This is noted in the buffer, for its owner.
        3. There are data. They are stored with the last time at which the socket was known to be
           empty, which is the earliest time at which they can have arrived.

        In each case, `now` becomes the time after the read.

        Args:
            buffer: The buffer of the socket.
            previous_poll_at: When the last poll began that did not report the socket.
        """
        try:
            data, ancillary, _, _ = buffer.sock.recvmsg(READ_BYTES, _ANCILLARY_BYTES)
        except BlockingIOError:
            self.now = monotonic_ns()
            return
        except OSError as error:
            buffer.error = error.errno or UNKNOWN_ERROR
            data = b""

        self.now = monotonic_ns()
        self.read_count += 1

        has_ended = not data
        if has_ended:
            buffer.ended_at = self.now
            self._enqueue(buffer)
            return

        # This must be computed before the new read is noted in the buffer.
        empty_at = _last_known_empty_at(buffer, previous_poll_at)
        buffer.is_last_read_full = len(data) == READ_BYTES
        if not buffer.is_last_read_full:
            buffer.emptied_at = self.now

        self._store_read(buffer, self._create_read(data, ancillary, empty_at))

    def _create_read(
        self, data: bytes, ancillary: list[tuple[int, int, bytes]], empty_at: int
    ) -> Read:
        """Return the read of some data, which were received before `now`.

        Args:
            data: The bytes.
            ancillary: The ancillary data of `recvmsg`, which may have the kernel's timestamp.
            empty_at: The last time at which the socket was known to be empty, in ns.
        """
        kernel_timestamp = self._kernel_timestamp(ancillary)
        if kernel_timestamp is None:
            return Read(data, self.now, self.now, empty_at, from_kernel=False)
        # The kernel uses the wall clock, which may be set meanwhile. The timestamp must stay within
        # the time in which the data can have arrived.
        timestamp = max(min(kernel_timestamp, self.now), empty_at)
        return Read(data, timestamp, self.now, empty_at, from_kernel=True)

    def _kernel_timestamp(self, ancillary: list[tuple[int, int, bytes]]) -> int | None:
        """Return the kernel's timestamp of a read on the monotonic clock, in ns, or None.

        Args:
            ancillary: The ancillary data of `recvmsg`, as (level, type, bytes). The timestamp is
                the only item, as a `timespec` of the wall clock. There is none on systems without
                kernel timestamps.
        """
        if not ancillary:
            return None

        _level, _type, timespec = ancillary[0]
        seconds, nanoseconds = _unpack_timespec(timespec)
        if not seconds:  # The packet arrived before timestamps were switched on.
            return None

        wall_ns: int = seconds * NS_PER_S + nanoseconds
        return wall_ns + self._wall_to_monotonic_ns

    def _store_read(self, buffer: SocketBuffer, read: Read) -> None:
        """Store a read in the buffer of its socket, and queue the buffer if its owner must act now.

        A *plain event* is an event of a stream that differs from an earlier one in its text alone.
        Of a read that holds only plain events, the number of events and the timestamp are stored
        instead of the bytes. The owner must get all reads in their order, so this is done only if
        no read with its bytes waits in the buffer.

        The owner must act if the read may end the response, or if so much waits that waiting longer
        would save nothing.
        """
        has_waiting_reads = len(buffer.reads) > 0
        if not has_waiting_reads:
            was_counted = self._try_count_plain_events(buffer, read)
            if was_counted:
                if len(buffer.plain_arrivals) >= MAX_RUN_READS:
                    self._enqueue(buffer)
                return

        self._flush_plain_reads(buffer)
        buffer.reads.append(read)

        if buffer.is_queued:
            self.queued_reads += 1
        elif _is_urgent(buffer, read):
            self._enqueue(buffer)

    def _try_count_plain_events(self, buffer: SocketBuffer, read: Read) -> bool:
        """Store the timestamp and the number of the events of a read if all of them are plain.

        A plain event differs from an earlier one of the response in its text alone, as the template
        of the buffer says. A single event is stored as its timestamp, and several as an
        `EventBatch`. Several events in one chunk are one write of the server and have arrived
        together. Events in several chunks may have arrived one by one since the socket was empty,
        so their timestamp is uncertain.

        Returns:
            True if the read was stored in this way. Otherwise nothing was changed.
        """
        if buffer.template is None:
            return False

        before_text, after_text = buffer.template
        chunk_count, event_count = count_plain_events(read.data, before_text, after_text)
        if event_count == 0:
            return False

        is_merged_read = chunk_count > 1
        if event_count == 1:
            buffer.plain_arrivals.append(read.timestamp)
        else:
            uncertainty_ns = read.timestamp - read.empty_at if is_merged_read else None
            buffer.plain_arrivals.append(EventBatch(read.timestamp, event_count, uncertainty_ns))

        buffer.plain_bytes += len(read.data)
        buffer.plain_read_at = read.read_at

        if buffer.is_deferred:
            buffer.events_until_urgent -= event_count
            if is_merged_read:
                self._merged_read_count += 1

        return True

    def _enqueue(self, buffer: SocketBuffer) -> None:
        """Queue a buffer for its owner. A buffer is at most once in the queue."""
        if not buffer.is_queued:
            self._flush_plain_reads(buffer)
            buffer.is_queued = True
            self.queued_reads += len(buffer.reads)
            self._queue.append(buffer)

    def _flush_plain_reads(self, buffer: SocketBuffer) -> None:
        """Append the plain events that were only counted to the reads of the buffer.

        They become one `PlainRun`, which has their timestamps and the number of their bytes.
        """
        if not buffer.plain_arrivals:
            return

        plain_run = PlainRun(buffer.plain_arrivals, buffer.plain_bytes, buffer.plain_read_at)
        buffer.reads.append(plain_run)
        buffer.plain_arrivals = []

        buffer.plain_bytes = 0
        if buffer.is_queued:
            self.queued_reads += 1


def _last_known_empty_at(buffer: SocketBuffer, previous_poll_at: int) -> int:
    """Return the last time at which the socket of a buffer is known to have been empty, in ns.

    There are two proofs that a socket was empty. A read took less than it could, or a poll of the
    epoll that watches the socket did not report it. A poll proves nothing if the epoll did not
    watch the socket at that time, or if the last read left data: the epoll of deferred sockets
    reports arriving data only once, and is silent about data that were left.

    Args:
        buffer: The buffer, before the next read is noted in it.
        previous_poll_at: When the last poll began that did not report the socket.
    """
    was_watched = previous_poll_at > buffer.epoll_changed_at
    has_poll_proof = was_watched and not buffer.is_last_read_full
    if not has_poll_proof:
        return buffer.emptied_at
    return max(buffer.emptied_at, previous_poll_at)


def _is_urgent(buffer: SocketBuffer, read: Read) -> bool:
    r"""Return whether the owner of a buffer must be called for the read that was just stored in it.

    A read is urgent in four cases:

    1. The owner wants every read.
    2. The buffer has a template, by which the usual events are recognised and only counted. This
       read was stored with its bytes, so it is unusual and may end the response.
    3. It may end the response, because it ends like the last chunk, `0\r\n\r\n`, or is so small
       that it may be the last bytes of that chunk.
    4. So much waits already that waiting for more saves nothing.
    """
    wants_every_read = not buffer.can_batch_reads
    has_template = buffer.template is not None
    if wants_every_read or has_template:
        return True

    is_large = len(read.data) >= LARGE_READ_BYTES
    if is_large or len(buffer.reads) >= MAX_BATCHED_READS:
        return True

    return len(read.data) <= SMALL_READ_BYTES or read.data.endswith(CHUNKED_BODY_END)


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
    """Return the bytes after the first `start` bytes of some parts, without copying them.

    The parts b"head" and b"body" together are b"headbody". From 6 on, that is a view of b"dy", and
    from 2 on, it is a view of b"ad" and the whole part b"body".
    """
    remaining: list[bytes | memoryview] = []
    part_start = 0  # the position of the part in all the bytes
    for part in parts:
        first_index = max(0, start - part_start)  # of the remaining bytes in this part
        if first_index < len(part):
            remaining.append(memoryview(part)[first_index:] if first_index else part)
        part_start += len(part)

    return remaining


def socket_error_text(error_number: int) -> str:
    """Return the system's text for the error of a socket buffer, or "" for a regular end."""
    if error_number > 0:
        return os.strerror(error_number)
    return "the connection failed" if error_number else ""
