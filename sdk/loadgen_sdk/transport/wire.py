"""Sockets, TLS and time stamps: the one file of the client that touches a socket.

All connections and the timer of a process sit in one epoll of our own, whose descriptor the event loop watches; one
callback reads whatever is ready, with the kernel's arrival stamps, and then decodes what it read in slices, so that
decoding never keeps a packet waiting for long. Nothing here knows HTTP.

A stamp's limits (metrics.md): packets that wait in the receive queue are merged and carry the *newest* stamp. So each
read is handed over with `base`, the last instant at which the socket was known to be empty; the truth lies between.
A load generator that awaits a first token looks every LOOK_NS, so that two events in one packet are not unsure by a
whole wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import select
import socket
import ssl
import struct
import sys
from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic_ns, time_ns
from typing import Protocol

import msgspec

from ..errors import TargetUnusable
from .clock import Timer, timer

SO_TIMESTAMPNS = 35  # asm-generic/socket.h; the socket module does not name it
IP_BIND_ADDRESS_NO_PORT = 24  # linux/in.h: the port is chosen by connect, so one may serve several targets
READ_BYTES = 32 << 10
SLICE_NS = 200_000  # longest that decoding may keep the sockets unread
TICK_NS = 100_000_000  # housekeeping: timeouts, idle connections
# The shortest wait that epoll knows. Without something to do in idle moments the wait has no end of its own: arming a
# kernel timer for every wait costs more than the read, and our timer ends it with the next tick.
HOLD_POLL_S = 0.001
LOOK_NS = 1_000_000  # a load generator looks at its sockets this often, come what may: see `base`
BUSY_LOOK_NS = 2_000_000  # this often after more than BUSY_READS since the last look: every read is a look by itself,
BUSY_READS = 4  # and arming a kernel timer costs as much as one
MAPPING_NS = 5_000  # two clocks read further apart than this (we were preempted) say nothing about each other
MOST_READY = 1024  # sockets told by one poll
BACKLOG_LIMIT = 20_000  # reads waiting to be decoded, above which decoding goes first
FOREVER = 1 << 62

_AGAIN = (errno.EAGAIN, errno.EWOULDBLOCK, errno.EINPROGRESS)
_timespec = struct.Struct("@qq").unpack
_ANCILLARY = socket.CMSG_SPACE(16) if hasattr(socket, "CMSG_SPACE") else 0
LINUX = sys.platform == "linux"


class Tls(msgspec.Struct, frozen=True, kw_only=True):
    """How to trust a server: `verify` or not, by which `ca`; `cert` is a PEM file with its key in it or in `key`."""

    verify: bool = True
    ca: str | None = None
    cert: str | None = None
    key: str | None = None

    def context(self) -> ssl.SSLContext:
        """Raises TargetUnusable for files that are missing or no certificates."""
        try:
            made = ssl.create_default_context(cafile=self.ca)
            if self.cert:
                made.load_cert_chain(self.cert, self.key)
        except (OSError, ssl.SSLError) as error:
            raise TargetUnusable(f"cannot use {self.cert or self.ca} for TLS: {error}", "give PEM files") from None
        if not self.verify:
            made.check_hostname = False
            made.verify_mode = ssl.CERT_NONE
        made.set_alpn_protocols(["http/1.1"])
        return made


class Peer(Protocol):
    """Whoever a connection serves. Each call names the line, so that one object can serve many."""

    def connected(self, line: Line, at: int) -> None: ...
    def failed(self, line: Line, kind: str, text: str) -> None: ...
    def arrived(self, line: Line, data: bytes, stamp: int, read: int, base: int, kernel: bool) -> None: ...
    def closed(self, line: Line, stamp: int, reset: str) -> None: ...


class Line:
    """One connection. `busy` belongs to the peer; `served` counts answers it has carried."""

    __slots__ = (
        "address",
        "busy",
        "closed",
        "empty_at",
        "fd",
        "idle_since",
        "more",
        "out",
        "peer",
        "recvmsg",
        "served",
        "since",
        "sock",
        "state",
        "tls",
        "tls_in",
        "tls_out",
        "uses_left",
    )

    def __init__(self, sock: socket.socket, peer: Peer, address: int, now: int) -> None:
        self.sock = sock
        self.fd = sock.fileno()
        self.recvmsg = sock.recvmsg
        self.peer = peer
        self.address = address
        self.busy: object | None = None
        self.state = "connecting"
        self.closed = False
        self.served = 0
        self.uses_left: int | None = None
        self.idle_since = self.since = self.empty_at = now
        self.more = False  # the last read filled its buffer: the socket was not emptied
        self.out: list[bytes] = []
        self.tls: ssl.SSLObject | None = None
        self.tls_in: ssl.MemoryBIO | None = None
        self.tls_out: ssl.MemoryBIO | None = None


class Wire:
    """The sockets of one process inside the running asyncio loop.

    `hold_ns` above 0 stays that long in our own poll while there is traffic (a load generator's privilege: going back
    to the event loop costs as much as a read); 0 shares the loop with other tasks after every turn.
    `wake` is called with the time when the instant given to `wake_at` has come (again and again until it is moved);
    `tick` about every TICK_NS. `idle` is called when HOLD_POLL_S have passed without traffic, and again while it says
    true. `awaited` holds who is without its first output: while there is one, and `hold_ns` is set, nobody sleeps for
    longer than LOOK_NS.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._poll = select.epoll()
        self._timer: Timer = timer(loop)
        self._lines: dict[int, Line] = {}
        self._backlog: deque[tuple[Line, bytes, int, int, int, bool, str]] = deque()
        self._polled = self._tick_at = monotonic_ns()
        self._to_monotonic = self._polled - time_ns()
        self._wake_at = FOREVER
        self._armed = FOREVER
        self._look_at = self._looked = 0
        self._again = False
        self._in_turn = False
        self.wake: Callable[[int], None] | None = None
        self.tick: Callable[[int], None] | None = None
        self.idle: Callable[[], bool] | None = None
        self.hold_ns = 0
        self.awaited: set[object] = set()
        self.turns = self.reads = 0
        self._poll.register(self._timer.fileno(), select.EPOLLIN)
        loop.add_reader(self._poll.fileno(), self._turn)
        self._arm()

    # -- connections ---------------------------------------------------------------------------------------------

    def open(
        self,
        address: tuple[int, tuple[object, ...]],
        index: int,
        peer: Peer,
        tls: ssl.SSLContext | None,
        name: str,
        source: str = "",
    ) -> Line:
        """Start connecting, from the local address `source` where given; the peer hears `connected` or `failed`. Raises
        OSError if it cannot even start."""
        family, where = address
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if LINUX:
                with contextlib.suppress(OSError):
                    sock.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
            if source:
                if LINUX:
                    sock.setsockopt(socket.IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, 1)
                sock.bind((source, 0))
            code = sock.connect_ex(where)
            if code not in (0, *_AGAIN):
                raise OSError(code, os.strerror(code))
        except BaseException:
            sock.close()
            raise
        line = Line(sock, peer, index, monotonic_ns())
        if tls is not None:
            line.tls_in, line.tls_out = ssl.MemoryBIO(), ssl.MemoryBIO()
            line.tls = tls.wrap_bio(line.tls_in, line.tls_out, server_hostname=name)
        self._lines[line.fd] = line
        self._poll.register(line.fd, select.EPOLLIN | select.EPOLLOUT)
        return line

    def close(self, line: Line) -> None:
        """Drop a connection; nothing of it is heard any more."""
        if line.closed:
            return
        line.closed = True
        line.state = "closed"
        line.busy = None
        del self._lines[line.fd]
        with contextlib.suppress(OSError):
            self._poll.unregister(line.fd)
        line.sock.close()

    def send(self, line: Line, parts: Sequence[bytes]) -> int:
        """Hand bytes to the kernel, the rest when it takes them. Returns the instant before the first byte went."""
        if line.tls is not None and line.tls_out is not None:
            for part in parts:
                line.tls.write(part)
            parts = [line.tls_out.read()]
        at = monotonic_ns()
        if line.out:
            line.out.extend(parts)
            return at
        try:
            taken = line.sock.sendmsg(parts)
        except BlockingIOError:
            taken = 0
        except OSError:
            return at  # the reading side will hear of it, with whatever the server still said
        total = sum(map(len, parts))
        if taken < total:
            rest = b"".join(parts)[taken:]
            line.out.append(rest)
            self._poll.modify(line.fd, select.EPOLLIN | select.EPOLLOUT)
        return at

    # -- time ----------------------------------------------------------------------------------------------------

    def wake_at(self, at: int) -> None:
        """Call `wake` at this monotonic instant; FOREVER: not at all."""
        self._wake_at = at
        if not self._in_turn:
            self._arm()

    def _arm(self) -> None:
        at = min(self._wake_at, self._tick_at)
        if self._look_at < at and self.awaited and self.hold_ns:
            at = self._look_at
        if at != self._armed:
            self._armed = at
            self._timer.arm(at)

    # -- the turn ------------------------------------------------------------------------------------------------

    def _turn(self) -> None:
        if self._poll.closed:  # a turn that was still to come when all was shut
            return
        self._in_turn = True
        poll, backlog = self._poll.poll, self._backlog
        try:
            asked = now = monotonic_ns()
            until = now + self.hold_ns
            ready = poll(0, MOST_READY)
            while True:
                before, self._polled = self._polled, asked
                asked = now = self._pass(ready, before)
                if now >= until or not self.hold_ns:
                    break
                self._arm()
                ready = poll(0 if backlog else HOLD_POLL_S if self.idle is not None else -1, MOST_READY)
                if not ready and not backlog and (self.idle is None or not self.idle()):
                    self._polled = asked
                    break
        finally:
            self._in_turn = False
            self._arm()
            if backlog and not self._again:
                self._again = True
                self._loop.call_soon(self._resume)

    def _resume(self) -> None:
        """The turn that a backlog asked for. Only here is the next one allowed: turns that the poll asks for come in
        between, and were each of them to queue one more, the loop's own callbacks would wait for all of them."""
        self._again = False
        self._turn()

    def _pass(self, ready: list[tuple[int, int]], before: int) -> int:
        """Start what is due, read what is ready, decode for a slice; `before`: the poll before the one that told it."""
        self.turns += 1
        now = monotonic_ns()
        wall = time_ns()
        if monotonic_ns() - now < MAPPING_NS:
            self._to_monotonic = now - wall
        if now > self._look_at - (LOOK_NS >> 1):  # moved ahead of time, so that it does not ring while there is traffic
            self._look_at = now + (BUSY_LOOK_NS if self.reads - self._looked > BUSY_READS else LOOK_NS)
            self._looked = self.reads
        if now >= self._wake_at and self.wake is not None:
            self._armed = 0
            self.wake(now)
        if len(self._backlog) < BACKLOG_LIMIT:
            self._read(ready, before, self._to_monotonic)
        now = self._decode()
        if now >= self._tick_at:
            self._armed = 0
            self._tick_at = now + TICK_NS
            if self.tick is not None:
                self.tick(now)
        return now

    def _read(self, ready: list[tuple[int, int]], before: int, to_monotonic: int) -> None:
        append = self._backlog.append
        lines = self._lines
        for fd, mask in ready:
            line = lines.get(fd)
            if line is None:
                if self._armed > self._polled:  # told together with a timer that rang then: who is not told was empty
                    self._polled = self._armed
                self._timer.clear()
                self._armed = 0
                continue
            if mask & 4:  # EPOLLOUT
                self._writable(line)
                if line.closed or mask == 4:
                    continue
            try:
                data, ancillary, _, _ = line.recvmsg(READ_BYTES, _ANCILLARY)
            except BlockingIOError:
                continue
            except OSError as error:
                read = monotonic_ns()
                self._silence(line)
                append((line, b"", read, read, before, False, error.strerror or type(error).__name__))
                continue
            read = monotonic_ns()
            base = line.empty_at
            if base < before and not line.more:
                base = before
            if len(data) == READ_BYTES:
                line.more = True
            else:
                line.more = False
                line.empty_at = read
            stamp, kernel = read, False
            if ancillary:
                seconds, nanos = _timespec(ancillary[0][2])
                if seconds:  # the kernel gives zeros for a packet that came before stamps were on
                    stamp = seconds * 1_000_000_000 + nanos + to_monotonic
                    kernel = True
                    if stamp > read:
                        stamp = read
                    elif stamp < base:
                        stamp = base
            if not data:
                self._silence(line)
            append((line, data, stamp, read, base, kernel, ""))
        self.reads += len(ready)

    def _silence(self, line: Line) -> None:
        """End of file or error: stop watching, or a level-triggered poll would report it for ever."""
        with contextlib.suppress(OSError):
            self._poll.modify(line.fd, 0)

    def _decode(self) -> int:
        """Decode what was read, for SLICE_NS at most; returns the time."""
        backlog = self._backlog
        now = monotonic_ns()
        until = now + SLICE_NS
        count = 0
        while backlog:
            line, data, stamp, read, base, kernel, error = backlog.popleft()
            if line.closed:
                continue
            if line.tls is not None:
                self._decrypt(line, data, stamp, read, base, kernel, error)
            elif data:
                line.peer.arrived(line, data, stamp, read, base, kernel)
            else:
                self._gone(line, stamp, error)
            count += 1
            if not count & 7:
                now = monotonic_ns()
                if now > until:
                    break
        return now

    def _gone(self, line: Line, stamp: int, error: str) -> None:
        if line.state == "connecting" or line.state == "handshake":
            kind = "connect" if line.state == "connecting" else "tls"
            self.give_up(line, kind, error or "the connection was closed while it was being made")
            return
        peer = line.peer
        line.state = "gone"
        peer.closed(line, stamp, error)
        self.close(line)

    def give_up(self, line: Line, kind: str, text: str) -> None:
        """Stop making this connection; the peer hears `failed`."""
        line.state = "gone"
        line.peer.failed(line, kind, text)
        self.close(line)

    def _writable(self, line: Line) -> None:
        if line.state == "connecting":
            code = line.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                self.give_up(line, "connect", os.strerror(code))
                return
            self._poll.modify(line.fd, select.EPOLLIN)
            line.empty_at = monotonic_ns()
            if line.tls is not None:
                line.state = "handshake"
                self._shake(line)
            else:
                self._up(line)
            return
        out, line.out = line.out, []
        try:
            taken = line.sock.send(b"".join(out))
        except BlockingIOError:
            taken = 0
        except OSError:
            return
        rest = b"".join(out)[taken:]
        if rest:
            line.out.append(rest)
        else:
            self._poll.modify(line.fd, select.EPOLLIN)

    def _up(self, line: Line) -> None:
        line.state = "open"
        line.peer.connected(line, monotonic_ns())

    # -- TLS -----------------------------------------------------------------------------------------------------

    def _flush(self, line: Line) -> None:
        assert line.tls_out is not None
        data = line.tls_out.read()
        if data:
            if line.out:
                line.out.append(data)
                return
            try:
                taken = line.sock.send(data)
            except BlockingIOError:
                taken = 0
            except OSError:
                return
            if taken < len(data):
                line.out.append(data[taken:])
                self._poll.modify(line.fd, select.EPOLLIN | select.EPOLLOUT)

    def _shake(self, line: Line) -> None:
        assert line.tls is not None
        try:
            line.tls.do_handshake()
        except ssl.SSLWantReadError:
            self._flush(line)
            return
        except ssl.SSLError as error:
            self._flush(line)
            self.give_up(line, "tls", _tls_words(error))
            return
        self._flush(line)
        self._up(line)

    def _decrypt(self, line: Line, data: bytes, stamp: int, read: int, base: int, kernel: bool, error: str) -> None:
        assert line.tls is not None and line.tls_in is not None
        if data:
            line.tls_in.write(data)
        if line.state == "handshake":
            if not data:
                self._gone(line, stamp, error)
                return
            self._shake(line)
            if line.closed or line.state != "open":
                return
        plain: list[bytes] = []
        ended = not data
        try:
            while True:
                piece = line.tls.read(1 << 16)
                if not piece:
                    ended = True
                    break
                plain.append(piece)
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLZeroReturnError:
            ended = True
        except ssl.SSLError as fault:
            if plain:
                line.peer.arrived(line, b"".join(plain), stamp, read, base, kernel)
            if line.closed:
                pass
            elif line.busy is None:
                self._gone(line, stamp, _tls_words(fault))
            else:  # such as an alert about our certificate, which TLS 1.3 sends after its handshake
                self.give_up(line, "tls", _tls_words(fault))
            return
        self._flush(line)
        if plain:
            line.peer.arrived(line, b"".join(plain), stamp, read, base, kernel)
        if ended and not line.closed:
            self._gone(line, stamp, error)

    def shut(self) -> None:
        """Close every connection and stop watching; harmless when done already."""
        if self._poll.closed:
            return
        self._loop.remove_reader(self._poll.fileno())
        for line in list(self._lines.values()):
            self.close(line)
        self._timer.close()
        self._poll.close()


def _tls_words(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"certificate verify failed: {error.verify_message}"
    return error.reason or str(error)


async def resolve(host: str, port: int) -> list[tuple[int, tuple[object, ...]]]:
    """Every address of a host, in the resolver's order, as (family, sockaddr). Raises OSError (socket.gaierror)."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys((family, address) for family, _, _, _, address in found))


def raise_file_limit(needed: int) -> int:
    """Lift the soft limit of open files to the hard one; returns it. Raises TargetUnusable when `needed` is more."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    if soft != resource.RLIM_INFINITY and soft < needed:
        raise TargetUnusable(
            f"this process may open {soft} files, but the load needs about {needed} connections",
            f"raise it (ulimit -n {needed}) or use more workers",
        )
    return soft
