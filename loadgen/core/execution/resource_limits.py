"""Checks before the first request whether this machine has enough open files and local ports for a plan.

Arithmetic over a schedule and the limits of the system; the only IO is reading those limits.
"""

from __future__ import annotations

import os
import resource
import socket
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from msgspec import Struct

from loadgen.core import format
from loadgen.core.errors import UserError
from loadgen.core.schedule.schedule import Schedule

SPARE = 64  # files of a process besides its connections: its own files, and connections opened in advance
_PROC = Path("/proc/sys/net/ipv4")


class Room(Struct, frozen=True, kw_only=True):
    """The limits of a machine; None: no limit, or not known.

    `files`: files that one process may have open. `ports`: local ports of one source address to one target address.
    """

    files: int | None
    ports: int | None


def room() -> Room:
    """The limits of this machine."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    ports = None
    try:
        low, high = map(int, (_PROC / "ip_local_port_range").read_text("utf-8").split())
        ports = (
            high
            - low
            + 1
            - _reserved((_PROC / "ip_local_reserved_ports").read_text("utf-8"), low, high)
        )
    except (OSError, ValueError):
        pass  # not known here
    return Room(files=None if hard == resource.RLIM_INFINITY else hard, ports=ports)


def cpus() -> int:
    """The CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _reserved(text: str, low: int, high: int) -> int:
    """How many ports from low to high are in a list like `32768,40000-40010`."""
    count = 0
    for range_text in text.strip().split(","):
        first, _, last = range_text.partition("-")
        if first:
            count += max(0, min(int(last or first), high) - max(int(first), low) + 1)
    return count


def connections(schedule: Schedule, max_in_flight: int | None) -> int | None:
    """Most connections that a plan, or a share of it, uses at once; None for an open loop without a limit."""
    most = 0
    for span in schedule.stages:
        if span.concurrency:
            most = max(
                most, len(schedule.virtual_users_of(span)) * schedule.sessions.max_parallel_turns
            )
        elif max_in_flight is not None:
            most = max(
                most,
                min(
                    max_in_flight,
                    schedule.session_count_of(span) * schedule.sessions.max_parallel_turns,
                ),
            )
        else:
            return None
    return most


def faults(
    *,
    total: int | None,
    workers: int,
    addresses: Sequence[str],
    sources: int,
    simulated: bool,
    room: Room,
) -> Iterator[UserError]:
    """A fault, with a hint, for each limit that the plan exceeds.

    total: connections at once, of all workers. addresses: host:port of each target. sources: number of local addresses
    to send from (0: the system chooses one).
    """
    if total is None:
        return
    per_worker = -(-total // workers) + SPARE
    if room.files is not None and per_worker > room.files:
        needed = -(-total // max(room.files - SPARE, 1))
        yield UserError(
            "resource_limit",
            f"{total:,} connections at once are {per_worker:,} open files in each of "
            f"{format.counted(workers, 'worker')}, but a process may open {room.files:,} here",
            "--concurrency or --max-in-flight",
            f"--workers {needed}, or raise the hard limit: ulimit -Hn {per_worker} (LimitNOFILE= of a service)",
        )
    if simulated and room.files is not None and total + SPARE > room.files:
        yield UserError(
            "resource_limit",
            f"{total:,} connections at once are more than the embedded endpoint may accept ({room.files:,} open files)",
            "--concurrency or --max-in-flight",
            "start several with `loadgen sim` and name each with --url",
        )
    if room.ports is None:
        return
    ports = room.ports * max(sources, 1)
    each = -(-total // len(addresses))
    for address, targets in Counter(addresses).items():
        if each * targets > ports:
            source_text = (
                f"{sources} source addresses have" if sources > 1 else "one source address has"
            )
            yield UserError(
                "resource_limit",
                f"{each * targets:,} connections at once to {address}, but {source_text} {ports:,} local ports",
                "--concurrency or --max-in-flight",
                f'widen them: sysctl -w net.ipv4.ip_local_port_range="1024 65535"; or send from '
                f"{-(-each * targets // room.ports)} addresses of this machine: --set sources=A --set sources=B …; "
                "or name several addresses of the target with --url",
            )


def unusable(sources: Sequence[str]) -> Iterator[UserError]:
    """A fault for each source address that this machine cannot send from."""
    for source in sources:
        family = socket.AF_INET6 if ":" in source else socket.AF_INET
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe_socket:
                probe_socket.bind((source, 0))
        except OSError as error:
            reason = error.strerror or str(error)
            hint = f"an address of this machine: ip addr add {source}/32 dev …"
            yield UserError(
                "unusable_source", f"cannot send from it: {reason}", f"--set sources={source}", hint
            )
