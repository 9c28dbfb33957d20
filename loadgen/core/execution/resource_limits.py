"""Check before the first request whether this machine has enough open files and local ports.

Except for the functions that read the limits of this machine, everything is arithmetic.
"""

from __future__ import annotations

import math
import resource
import socket
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from msgspec import Struct

from loadgen.core import format
from loadgen.core.errors import UserError
from loadgen.core.schedule.schedule import Schedule

# Files of a process besides its connections: its own files, and connections opened in advance.
_SPARE_FILES = 64
_IPV4_SETTINGS = Path("/proc/sys/net/ipv4")
_CONNECTION_FLAGS = "--concurrency or --max-in-flight"


class MachineLimits(Struct, frozen=True, kw_only=True):
    """The limits of a machine. A value is None if there is no limit or it is not known."""

    open_files: int | None
    """Files that one process may have open at the same time."""
    local_ports: int | None
    """Local ports for connections from one source address to one target address."""


class ConnectionDemand(Struct, frozen=True, kw_only=True):
    """The connections that the workers of a run need on one machine."""

    total: int | None
    """Connections of all workers at the same time, or None if there is no limit."""
    workers: int
    addresses: Sequence[str]
    """The address of each target as host:port. Several targets may have the same address."""
    source_addresses: int
    """Number of local addresses to send from, or 0 if the system chooses one."""
    is_simulated: bool
    """True if the target runs on this machine as the embedded endpoint."""


def read_machine_limits() -> MachineLimits:
    """Return the limits of this machine."""
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MachineLimits(
        open_files=None if hard_limit == resource.RLIM_INFINITY else hard_limit,
        local_ports=_count_local_ports(),
    )


def count_connections(schedule: Schedule, max_in_flight: int | None) -> int | None:
    """Return how many connections a schedule needs at the same time; 0 without stages.

    A stage needs one connection for each request that may be in flight at the same time. Stages run
    one after the other, so the largest number over all stages is returned.

    Args:
        schedule: The schedule, or a shard of it.
        max_in_flight: The largest number of requests in flight in an open loop, or None. Without
            it, an open loop may need any number of connections, and the result is None.
    """
    needed_connections = 0
    for stage in schedule.stages:
        if stage.is_closed_loop:
            users = len(schedule.virtual_users_of(stage))
            stage_connections = users * schedule.sessions.max_parallel_turns
        elif max_in_flight is None:
            return None
        else:
            sessions = schedule.session_count_in_shard(stage)
            stage_connections = min(max_in_flight, sessions * schedule.sessions.max_parallel_turns)
        needed_connections = max(needed_connections, stage_connections)

    return needed_connections


def limit_errors(demand: ConnectionDemand, limits: MachineLimits) -> Iterator[UserError]:
    """Yield an error with a hint for each limit of a machine that a run exceeds."""
    if demand.total is None:
        return
    if limits.open_files is not None:
        yield from _open_file_errors(demand, demand.total, limits.open_files)
    if limits.local_ports is not None:
        yield from _port_errors(demand, demand.total, limits.local_ports)


def unusable_source_errors(source_addresses: Sequence[str]) -> Iterator[UserError]:
    """Yield an error for each source address that this machine cannot send from."""
    for address in source_addresses:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            with socket.socket(family, socket.SOCK_STREAM) as test_socket:
                test_socket.bind((address, 0))
        except OSError as error:
            reason = error.strerror or str(error)
            yield UserError(
                "unusable_source",
                message=f"cannot send from this address: {reason}",
                where=f"--set sources={address}",
                hint=f"add it to this machine: ip addr add {address}/32 dev DEVICE",
            )


def _count_local_ports() -> int | None:
    """Return how many local ports a connection may use, or None if that is not known."""
    try:
        port_range = (_IPV4_SETTINGS / "ip_local_port_range").read_text("utf-8")
        reserved_ports = (_IPV4_SETTINGS / "ip_local_reserved_ports").read_text("utf-8")
        first_port, last_port = (int(port) for port in port_range.split())
        reserved = _count_reserved_ports(reserved_ports, first_port, last_port)
    except (OSError, ValueError):
        return None
    return last_port - first_port + 1 - reserved


def _count_reserved_ports(port_list: str, first_port: int, last_port: int) -> int:
    """Return how many ports of a list such as `32768,40000-40010` are within a range of ports.

    The list of Linux names single ports and ranges. It is empty if no port is reserved.
    """
    count = 0
    for range_text in port_list.strip().split(","):
        first, _, last = range_text.partition("-")
        if not first:
            continue
        first_reserved = max(int(first), first_port)
        last_reserved = min(int(last or first), last_port)
        # The reserved range may be outside of the range of ports.
        count += max(0, last_reserved - first_reserved + 1)

    return count


def _open_file_errors(
    demand: ConnectionDemand, connections: int, open_files: int
) -> Iterator[UserError]:
    """Yield the errors of a run that needs more open files than a process may have.

    Each connection is an open file of a worker. It is also one of the embedded simulated server,
    whose only process accepts the connections of all workers.

    Args:
        demand: What the run needs.
        connections: The number of connections of all workers at the same time.
        open_files: How many files a process may have open on this machine.
    """
    files_per_worker = math.ceil(connections / demand.workers) + _SPARE_FILES
    if files_per_worker > open_files:
        yield _worker_files_error(demand, connections, files_per_worker, open_files)

    files_of_server = connections + _SPARE_FILES
    if demand.is_simulated and files_of_server > open_files:
        yield UserError(
            "resource_limit",
            message=(
                f"{connections:,} concurrent connections are more than the embedded "
                f"simulated server can accept ({open_files:,} open files)"
            ),
            where=_CONNECTION_FLAGS,
            hint="start several servers with `loadgen sim`, and give each with --url",
        )


def _worker_files_error(
    demand: ConnectionDemand, connections: int, files_per_worker: int, open_files: int
) -> UserError:
    """Return the error for workers that need more open files than the system allows.

    Its hint has two solutions: more workers, each of which then needs fewer files, or a higher
    limit of open files.
    """
    connections_allowed_per_worker = max(open_files - _SPARE_FILES, 1)
    needed_workers = math.ceil(connections / connections_allowed_per_worker)
    return UserError(
        "resource_limit",
        message=(
            f"{connections:,} concurrent connections need {files_per_worker:,} "
            f"open files in each of {format.counted(demand.workers, 'worker')}, "
            f"but a process may open only {open_files:,} here"
        ),
        where=_CONNECTION_FLAGS,
        hint=(
            f"use --workers {needed_workers}, or raise the hard limit: ulimit -Hn "
            f"{files_per_worker} (LimitNOFILE= of a service)"
        ),
    )


def _port_errors(
    demand: ConnectionDemand, connections: int, ports_per_source: int
) -> Iterator[UserError]:
    """Yield the errors of a run that needs more local ports than there are for one address.

    A connection is identified by its source address, local port and target address. Two connections
    to the same target address therefore need different ports or different source addresses.

    Args:
        demand: What the run needs.
        connections: The number of connections of all workers at the same time.
        ports_per_source: The number of local ports of one source address.
    """
    available_ports = ports_per_source * max(demand.source_addresses, 1)
    connections_per_target = math.ceil(connections / len(demand.addresses))
    for address, target_count in Counter(demand.addresses).items():
        needed_ports = connections_per_target * target_count
        if needed_ports > available_ports:
            yield _port_error(demand, address, needed_ports, ports_per_source)


def _port_error(
    demand: ConnectionDemand, address: str, needed_ports: int, ports_per_source: int
) -> UserError:
    """Return the error for a target address to which more connections are needed than possible.

    Each connection from one source address needs a local port, so more ports or more source
    addresses allow more connections.
    """
    if demand.source_addresses > 1:
        available = (
            f"{demand.source_addresses} source addresses have only "
            f"{ports_per_source * demand.source_addresses:,} local ports"
        )
    else:
        available = f"one source address has only {ports_per_source:,} local ports"

    needed_sources = math.ceil(needed_ports / ports_per_source)
    ways_to_solve = (
        'use a wider port range: sysctl -w net.ipv4.ip_local_port_range="1024 65535"',
        f"or send from {needed_sources} addresses of this machine: "
        "--set sources=A --set sources=B ...",
        "or give several addresses of the target with --url",
    )

    return UserError(
        "resource_limit",
        message=(
            f"{needed_ports:,} concurrent connections to {address} are needed, but {available}"
        ),
        where=_CONNECTION_FLAGS,
        hint="; ".join(ways_to_solve),
    )
