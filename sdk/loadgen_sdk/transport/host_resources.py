"""What a client asks of the host: addresses of names and more open files."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from ..errors import TargetUnusable

T = TypeVar("T")


async def resolve_host(host: str, port: int) -> list[tuple[int, tuple[object, ...]]]:
    """All addresses of a host as (family, sockaddr), in the resolver's order. Raises OSError (socket.gaierror).

    Where uvloop runs, a name is looked up in a thread that ends with it: its own four stay, and a process of several
    threads cannot be forked.
    """
    loop = asyncio.get_running_loop()
    name = (
        host.encode() if host.isascii() else host
    )  # for a text the tables of IDNA would be imported
    find = functools.partial(socket.getaddrinfo, name, port, type=socket.SOCK_STREAM)
    try:
        infos = find(flags=socket.AI_NUMERICHOST)  # an address is its own
    except OSError:
        of_uvloop = type(loop).__module__.startswith("uvloop")
        infos = await (
            _in_a_thread(find)
            if of_uvloop
            else loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        )
    return list(dict.fromkeys((family, address) for family, _, _, _, address in infos))


async def _in_a_thread(work: Callable[[], T]) -> T:
    """What `work` returns or raises. Nobody waits for its thread if this is cancelled."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def tell(said: Callable[[Any], None], what: Any) -> None:
        if not done.done():
            said(what)

    def carry_out() -> None:
        try:
            said: tuple[Callable[[Any], None], Any] = (done.set_result, work())
        except Exception as error:
            said = done.set_exception, error
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(tell, *said)

    threading.Thread(target=carry_out, daemon=True).start()
    return await done


def raise_file_limit(needed: int) -> int:
    """Raise the soft limit of open files to the hard limit and return it. Raises TargetUnusable below `needed`."""
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
            f"raise it (ulimit -n {needed}) or use more workers",
        )
    return soft
