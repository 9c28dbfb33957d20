"""Whether this machine has what a plan needs before its first request: open files and local ports.

Arithmetic over a timetable and over what the system says of itself; the only IO is reading that.
"""

from __future__ import annotations

import resource
import socket
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from loadgen.errors import UserError
from loadgen.schedule.timetable import Schedule

SPARE = 64  # files of a process beside its connections: its own, and connections opened ahead of need
_PROC = Path("/proc/sys/net/ipv4")


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What a machine has. `files`: open files that one process may have; `ports`: local ports of one source address
    towards one target address; None: not bounded, or not known.
    """

    files: int | None
    ports: int | None


def room() -> Room:
    """Of this machine."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    ports = None
    try:
        low, high = map(int, (_PROC / "ip_local_port_range").read_text().split())
        ports = high - low + 1 - _reserved((_PROC / "ip_local_reserved_ports").read_text(), low, high)
    except (OSError, ValueError):
        pass
    return Room(files=None if hard == resource.RLIM_INFINITY else hard, ports=ports)


def _reserved(text: str, low: int, high: int) -> int:
    """How many of low … high are in a list like `32768,40000-40010`."""
    count = 0
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            count += max(0, min(int(last or first), high) - max(int(first), low) + 1)
    return count


def connections(timetable: Schedule, max_in_flight: int | None) -> int | None:
    """Most connections that a plan, or a share of it, uses at once; None where nothing bounds an open loop."""
    most = 0
    for span in timetable.stages:
        if span.lanes:
            most = max(most, len(timetable.own_lanes(span)))
        elif max_in_flight is not None:
            most = max(most, min(max_in_flight, timetable.own_chains(span)))
        else:
            return None
    return most


def faults(
    *, total: int | None, workers: int, addresses: Sequence[str], sources: int, simulated: bool, room: Room
) -> Iterator[UserError]:
    """What there is not enough of, with what to do about it.

    total: connections at once, of all workers. addresses: host:port of each target. sources: local addresses to send
    from (0: the one that the system chooses).
    """
    if total is None:
        return
    each = -(-total // workers) + SPARE
    if room.files is not None and each > room.files:
        need = -(-total // max(room.files - SPARE, 1))
        yield UserError(
            f"{total:,} connections at once are {each:,} open files in each of {workers} worker(s), "
            f"but a process may open {room.files:,} here",
            "--concurrency or --max-in-flight",
            f"--workers {need}, or raise the hard limit: ulimit -Hn {each} (LimitNOFILE= of a service)",
        )
    if simulated and room.files is not None and total + SPARE > room.files:
        yield UserError(
            f"{total:,} connections at once are more than the embedded endpoint may accept ({room.files:,} open files)",
            "--concurrency or --max-in-flight",
            "start several with `loadgen sim` and name each with --url",
        )
    if room.ports is None:
        return
    ports = room.ports * max(sources, 1)
    of_target = -(-total // len(addresses))
    for address, targets in Counter(addresses).items():
        if of_target * targets > ports:
            from_where = f"{sources} source addresses have" if sources > 1 else "one source address has"
            yield UserError(
                f"{of_target * targets:,} connections at once to {address}, but {from_where} {ports:,} local ports",
                "--concurrency or --max-in-flight",
                f'widen them: sysctl -w net.ipv4.ip_local_port_range="1024 65535"; or send from '
                f"{-(-of_target * targets // room.ports)} addresses of this machine: --source A --source B …; "
                "or name several addresses of the target with --url",
            )


def unusable(sources: Sequence[str]) -> Iterator[UserError]:
    """Of the source addresses, those that this machine cannot send from."""
    for source in sources:
        family = socket.AF_INET6 if ":" in source else socket.AF_INET
        try:
            with socket.socket(family, socket.SOCK_STREAM) as one:
                one.bind((source, 0))
        except OSError as error:
            why = error.strerror or str(error)
            hint = f"an address of this machine: ip addr add {source}/32 dev …"
            yield UserError(f"cannot send from it: {why}", f"--source {source}", hint)
