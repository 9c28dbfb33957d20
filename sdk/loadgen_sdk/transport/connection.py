"""One connection of a client, and the calls that its owner gets from the reactor."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import ssl
import sys
from time import monotonic_ns
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from ..compiled import module as _compiled
from .host_resources import Address
from .response_state import PlainRun, Read
from .tls import TlsStream

if TYPE_CHECKING or _compiled is None:
    from .receiver import Receiver, SocketBuffer
else:
    Receiver = _compiled.Receiver
    SocketBuffer = _compiled.SocketBuffer

__all__ = ["ClientConnection", "ConnectionOwner", "Receiver", "Route", "connect_socket"]

SO_TIMESTAMPNS = 35
"""The option of asm-generic/socket.h. The module `socket` does not name it."""

_IP_BIND_ADDRESS_NO_PORT = 24
"""The option of linux/in.h: `connect` chooses the port, so that several targets can share one."""

_IN_PROGRESS = (errno.EAGAIN, errno.EWOULDBLOCK, errno.EINPROGRESS)
_IS_LINUX = sys.platform == "linux"

ConnectionState = Literal["connecting", "tunnel", "handshake", "open", "ended", "closed"]
"""`tunnel`: the request for a tunnel was sent to a proxy. `ended`: the server ended the connection,
and it is about to be closed."""

STATES_BEFORE_OPEN = ("connecting", "tunnel", "handshake")


class Route(NamedTuple):
    """How to reach a server besides its address.

    Attributes:
        host: The name of the host, for TLS.
        tls: The TLS context, or None for plain HTTP.
        tunnel_request: What is sent first to a proxy that opens a tunnel for the TLS that follows,
            or b"" without a proxy.
    """

    host: str
    tls: ssl.SSLContext | None = None
    tunnel_request: bytes = b""


class ConnectionOwner(Protocol):
    """The owner of connections, which the reactor calls.

    Each call names the connection, so that one owner can have many.
    """

    def connection_made(self, connection: ClientConnection, at: int) -> None:
        """Handle a connection that became ready at the time `at`, after any TLS handshake."""

    def connection_failed(self, connection: ClientConnection, kind: str, text: str) -> None:
        """Handle a connection that could not be made. `kind` is "connect" or "tls"."""

    def receive_reads(self, connection: ClientConnection, reads: list[Read | PlainRun]) -> None:
        """Handle the reads that have arrived since the last call, one or more."""

    def response_completed(self, connection: ClientConnection) -> None:
        """Handle the end of a response whose exchange has received its reads already."""

    def connection_lost(self, connection: ClientConnection, timestamp: int, error: str) -> None:
        """Handle the end of a connection. `error` is "" for a regular end."""


class ClientConnection(SocketBuffer):
    """A connection from its beginning to its end.

    Attributes:
        sock: The socket.
        state: How far the connection is (see ConnectionState).
        address_index: The owner's number for the address of the server.
        connecting_since: When the connection began to be made.
        handshake_since: When the TLS handshake began.
        tunnel_request: What is sent first to a proxy to open a tunnel, or b"" without a tunnel.
        proxy_response: What the proxy has answered to it so far.
        uses_left: How many more requests the server accepts, or None if it is not known.
    """

    __slots__ = (
        "address_index",
        "connecting_since",
        "handshake_since",
        "proxy_response",
        "sock",
        "state",
        "tunnel_request",
        "uses_left",
    )
    owner: ConnectionOwner
    tls: TlsStream | None

    def __init__(
        self, sock: socket.socket, owner: ConnectionOwner, address_index: int, route: Route
    ) -> None:
        """Start with a socket that has begun to connect.

        Args:
            sock: The socket.
            owner: The object whose methods are called with the reads, the beginning and the end.
            address_index: The owner's number for the address.
            route: How to reach the server: by TLS or not, and through which tunnel.
        """
        now = monotonic_ns()
        super().__init__(sock.fileno(), now)
        self.sock = sock
        self.owner = owner
        self.address_index = address_index
        self.state: ConnectionState = "connecting"
        self.uses_left: int | None = None
        self.connecting_since = now
        self.handshake_since = now
        self.tunnel_request = route.tunnel_request

        self.proxy_response = b""
        if route.tls is not None:
            self.tls = TlsStream(route.tls, route.host)

    @property
    def is_opening(self) -> bool:
        """Whether the connection is still being opened: TCP, the tunnel or TLS is not ready."""
        return self.state in STATES_BEFORE_OPEN


def connect_socket(address: Address, source: str) -> socket.socket:
    """Return a socket that has begun to connect, and whose packets the kernel timestamps.

    The socket does not block. The caller waits until it can be written, and TCP has then connected
    or failed.

    Args:
        address: The address of the server.
        source: The local address to connect from, or "" for any.

    Raises:
        OSError: The connection cannot be begun.
    """
    sock = socket.socket(address.family, socket.SOCK_STREAM)
    try:
        _configure_socket(sock)
        if source:
            _bind_to_source(sock, source)
        error_number = sock.connect_ex(address.sockaddr)
        has_failed = error_number != 0 and error_number not in _IN_PROGRESS
        if has_failed:
            raise OSError(error_number, os.strerror(error_number))
    except BaseException:
        sock.close()
        raise

    return sock


def _configure_socket(sock: socket.socket) -> None:
    """Make a socket non-blocking, send small writes at once, and request kernel timestamps.

    Kernel timestamps exist on Linux only. If the kernel refuses them, the receiver uses the time of
    the read instead.
    """
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if _IS_LINUX:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)


def _bind_to_source(sock: socket.socket, source: str) -> None:
    """Let a socket connect from this local address, with a port that the kernel chooses.

    On Linux the port is chosen when the socket connects, so that connections to several targets can
    share a port.
    """
    if _IS_LINUX:
        sock.setsockopt(socket.IPPROTO_IP, _IP_BIND_ADDRESS_NO_PORT, 1)
    any_port = 0
    sock.bind((source, any_port))
