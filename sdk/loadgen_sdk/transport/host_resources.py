"""What a client asks of its host: the addresses of a name, and more open files."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from ..errors import TargetUnusable

T = TypeVar("T")


class Address(NamedTuple):
    """An address as the module `socket` takes it."""

    family: int
    sockaddr: tuple[Any, ...]


async def resolve_host(host: str, port: int) -> list[Address]:
    """Return all addresses of a host, in the order of the resolver.

    Under uvloop, a name is looked up in a thread of its own, which ends with the lookup. The
    threads of uvloop's lookup never end, and a process with several threads cannot be forked.

    Raises:
        OSError: The name cannot be resolved (socket.gaierror).
    """
    loop = asyncio.get_running_loop()
    # For a name of type str, the tables of IDNA would be imported.
    name = host.encode() if host.isascii() else host
    look_up = functools.partial(socket.getaddrinfo, name, port, type=socket.SOCK_STREAM)
    try:
        infos = look_up(flags=socket.AI_NUMERICHOST)  # Nothing is looked up for an address.
    except OSError:
        if type(loop).__module__.startswith("uvloop"):
            infos = await _run_in_thread(look_up)
        else:
            infos = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = (Address(family, sockaddr) for family, _, _, _, sockaddr in infos)
    return list(dict.fromkeys(addresses))


async def _run_in_thread(function: Callable[[], T]) -> T:
    """Return what `function` returns in a thread of its own, or raise what it raises.

    If this is cancelled, nothing waits for the thread. The thread may end after the future was
    cancelled, or even after the loop was closed, and its result is then dropped.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def set_result(result: T) -> None:
        if not future.done():
            future.set_result(result)

    def set_exception(error: Exception) -> None:
        if not future.done():
            future.set_exception(error)

    def run() -> None:
        """Call the function in the thread and pass its result to the loop."""
        # call_soon_threadsafe raises RuntimeError if the loop was closed meanwhile.
        try:
            result = function()
        except Exception as error:
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(set_exception, error)
        else:
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(set_result, result)

    threading.Thread(target=run, daemon=True).start()
    return await future


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
