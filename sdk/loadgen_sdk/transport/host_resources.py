"""What a client asks of its host: the addresses of a name, and more open files."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from ..errors import TargetUnusable

T = TypeVar("T")
ArgumentT = TypeVar("ArgumentT")

_AddressInfo = tuple[int, int, int, str, tuple[Any, ...]]
"""An item of the result of `getaddrinfo`: family, type, protocol, canonical name and address."""


class Address(NamedTuple):
    """An address as the module `socket` takes it."""

    family: int
    sockaddr: tuple[Any, ...]


async def resolve_host(host: str, port: int) -> list[Address]:
    """Return all addresses of a host, in the order of the resolver.

    An address such as "127.0.0.1" or "::1" needs no lookup. A name is looked up in a thread.

    Raises:
        OSError: The name cannot be resolved (socket.gaierror).
    """
    infos: Sequence[_AddressInfo]
    try:
        infos = socket.getaddrinfo(
            _resolver_name(host), port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
        )
    except OSError:  # It is a name.
        infos = await _look_up_name(host, port)

    addresses = (Address(family, sockaddr) for family, _, _, _, sockaddr in infos)
    return list(dict.fromkeys(addresses))


async def _look_up_name(host: str, port: int) -> Sequence[_AddressInfo]:
    """Return what the resolver says about a name, without blocking the event loop.

    Under uvloop, the lookup gets a thread of its own, which ends with it. The threads of uvloop's
    own lookup never end, and a process with several threads cannot be forked safely.
    """

    def look_up() -> Sequence[_AddressInfo]:
        return socket.getaddrinfo(_resolver_name(host), port, type=socket.SOCK_STREAM)

    loop = asyncio.get_running_loop()
    is_uvloop = type(loop).__module__.startswith("uvloop")
    if is_uvloop:
        return await _run_in_thread(look_up)

    return await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)


def _resolver_name(host: str) -> str | bytes:
    """Return a host as `socket.getaddrinfo` takes it.

    It is bytes if possible, because for a str Python imports the module `encodings.idna` with its
    large tables.
    """
    return host.encode() if host.isascii() else host


class _ThreadCall(Generic[T]):
    """A call of a function in a thread of its own, whose result an event loop awaits.

    Attributes:
        future: The result of the function, or the exception that it raised.
    """

    def __init__(self, function: Callable[[], T]) -> None:
        """Prepare the call. The running event loop gets its result."""
        self._function = function
        self._loop = asyncio.get_running_loop()
        self.future: asyncio.Future[T] = self._loop.create_future()

    def start(self) -> None:
        """Start the thread. The process does not wait for it when it exits."""
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        """Call the function, in the thread, and pass its result or exception to the loop."""
        try:
            result = self._function()
        except Exception as error:
            self._call_in_loop(self._set_exception, error)
        else:
            self._call_in_loop(self._set_result, result)

    def _call_in_loop(self, callback: Callable[[ArgumentT], None], argument: ArgumentT) -> None:
        """Let the loop call `callback`. Nothing happens if the loop was closed meanwhile."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback, argument)

    def _set_result(self, result: T) -> None:
        """Complete the future, unless it was cancelled meanwhile."""
        if not self.future.done():
            self.future.set_result(result)

    def _set_exception(self, error: Exception) -> None:
        """Fail the future, unless it was cancelled meanwhile."""
        if not self.future.done():
            self.future.set_exception(error)


async def _run_in_thread(function: Callable[[], T]) -> T:
    """Return the result of a function that blocks, which is called in a thread of its own.

    An exception of the function is raised here. If this coroutine is cancelled, nothing waits for
    the thread, and its result is dropped.
    """
    call = _ThreadCall(function)
    call.start()
    return await call.future


def raise_file_limit(needed: int) -> int:
    """Raise the soft limit of open files to the hard limit and return it.

    A process may do this by itself, and each connection needs an open file. Where the system
    forbids it, the soft limit stays.

    Args:
        needed: The number of files that the process will open.

    Raises:
        TargetUnusable: The limit is below `needed`.
    """
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard

    if soft != resource.RLIM_INFINITY and soft < needed:
        raise TargetUnusable(
            "resource_limit",
            f"this process may open {soft} files, but the load needs about {needed} connections",
            f"raise the limit (ulimit -n {needed}), or use more workers",
        )

    return soft
