"""Judge facts about this host: clock, timer, cores, open files and proxies.

Pure. `doctor.py` collects the facts, and `target_checks.py` judges the target.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from loadgen.core import format
from loadgen.doctor.findings import NOTE, OK, WARNING, Finding

TIMER_LATE_MS = 1.0
"""Lateness (p99) of a 1 ms timer above which even an idle host delays sends."""
ENOUGH_FILES = 4096
"""Open files that are enough for a few thousand connections."""
BUSY_LOAD_PER_CORE = 0.5
"""Load average per core above which other work competes with the load generator."""
HOST = ("clock", "timer", "cpu", "files", "proxy", "compiled")
"""The checks that are about this host."""
# Clock sources that the kernel lets a process read without a system call.
GOOD_CLOCKS = ("tsc", "kvm-clock", "arch_sys_counter", "hyperv_clocksource_tsc_page", "xen")

CGROUP_V2_ROOT = "/sys/fs/cgroup"
CGROUP_V1_ROOT = "/sys/fs/cgroup/cpu"


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about this host. None and "" mean that a fact is not known.

    Attributes:
        clock: The clock source of the kernel.
        clock_read_ns: How long a reading of the clock takes.
        timer_late_ms: Lateness (p99) of a timer of 1 ms.
        cpus: The cores that this process may use.
        cpu_quota: The limit of the control group, in cores.
        load_average: The load average of the last minute.
        governor: The frequency governor of the cores.
        files: Open files that this process can have.
        ports: Local ports for outgoing connections.
        proxies: The proxy variables that are set.
        not_compiled: Why the part of the client in C is not used, or "" if it is used.
    """

    clock: str = ""
    clock_read_ns: float | None = None
    timer_late_ms: float | None = None
    cpus: int | None = None
    cpu_quota: float | None = None
    load_average: float | None = None
    governor: str = ""
    files: int | None = None
    ports: int | None = None
    proxies: tuple[str, ...] = ()
    not_compiled: str = ""


def read_cpu_limit(read_text: Callable[[str], str]) -> float | None:
    """Return the CPU limit of this process in cores, such as that of its container, or None.

    Linux limits processes by control groups (cgroups), which are directories. The limit is the
    smallest one among the groups that the process is in, of version 2 and version 1, from the root
    that the container sees down to the group of the process.

    Args:
        read_text: Returns the text of a file, or "" if there is none.
    """
    group_directories = {CGROUP_V2_ROOT, CGROUP_V1_ROOT}

    # Each line names a group of this process, as HIERARCHY:CONTROLLERS:PATH. The line of version 2
    # has no controllers.
    for line in read_text("/proc/self/cgroup").splitlines():
        _hierarchy, controllers, path = line.split(":", 2)
        if not controllers:
            group_directories.update(_list_groups_on_path(CGROUP_V2_ROOT, path))
        elif "cpu" in controllers.split(","):
            group_directories.update(_list_groups_on_path(CGROUP_V1_ROOT, path))

    limits = [_read_group_limit(directory, read_text) for directory in group_directories]
    known_limits = [limit for limit in limits if limit is not None]
    return min(known_limits, default=None)


def _list_groups_on_path(root: str, path: str) -> Iterator[str]:
    """Yield the directories of a control group and of the groups above it, from the root down.

    Args:
        root: The directory of the root group.
        path: The path of the group below the root, such as "/system.slice/docker.service".
    """
    directory = root
    yield directory
    group_names = [name for name in path.split("/") if name]
    for group_name in group_names:
        directory = f"{directory}/{group_name}"
        yield directory


def _read_group_limit(directory: str, read_text: Callable[[str], str]) -> float | None:
    """Return the limit of the control group in a directory, in cores, or None without a limit.

    The kernel states the limit as CPU time (quota) per period, both in microseconds: a quota of
    150,000 in a period of 100,000 is 1.5 cores.
    """
    quota_and_period = read_text(f"{directory}/cpu.max").split()  # version 2
    if not quota_and_period:
        quota_and_period = [  # version 1
            read_text(f"{directory}/cpu.cfs_quota_us"),
            read_text(f"{directory}/cpu.cfs_period_us"),
        ]

    if len(quota_and_period) != 2:
        return None

    quota, period = quota_and_period
    if not _is_positive_integer(quota) or not _is_positive_integer(period):
        # Without a limit, the quota is "max" (v2) or -1 (v1).
        return None

    return int(quota) / int(period)


def _is_positive_integer(text: str) -> bool:
    return text.isdigit() and int(text) > 0


def check_host(machine: Machine) -> Iterator[Finding]:
    """Yield the findings about this host. A fact that is not known has no finding."""
    if machine.clock or machine.clock_read_ns is not None:
        yield _check_clock(machine)

    if machine.timer_late_ms is not None:
        yield _check_timer(machine.timer_late_ms)

    yield _check_cpu(machine)
    if machine.files is not None:
        yield _check_connection_limits(machine.files, machine.ports)

    if machine.proxies:
        yield Finding(
            check="proxy",
            state=NOTE,
            observed=f"{', '.join(machine.proxies)} set",
            meaning="loadgen ignores proxy variables and connects to --url directly",
            advice="use the address of the proxy in --url to load it",
        )

    yield _check_compiled_extension(machine.not_compiled)


def _check_compiled_extension(reason_not_compiled: str) -> Finding:
    """Report whether the extension in C reads responses, or its slower Python reference."""
    if not reason_not_compiled:
        return Finding(
            check="compiled",
            state=OK,
            observed="the compiled extension is used",
            meaning="a worker process handles as many tokens per second as it can",
        )
    return Finding(
        check="compiled",
        state=NOTE,
        observed=f"the compiled extension is not used: {reason_not_compiled}",
        meaning="a worker process handles fewer tokens per second",
        advice="install a C compiler; pip install --force-reinstall -v shows what fails",
    )


def _check_clock(machine: Machine) -> Finding:
    """Judge the clock source of the kernel.

    The client reads the clock for every token. The sources in GOOD_CLOCKS are read in user space;
    reading another one takes a system call.
    """
    observed = machine.clock or "monotonic"
    if machine.clock_read_ns is not None:
        observed += f", {machine.clock_read_ns:.0f} ns per reading"

    if machine.clock and machine.clock not in GOOD_CLOCKS:
        meaning = (
            "each timestamp is a slow system call, so a worker handles fewer tokens per second"
        )
        return Finding(
            check="clock",
            state=WARNING,
            observed=observed,
            meaning=meaning,
            advice="check whether the kernel can use tsc",
        )

    return Finding("clock", OK, observed, "timestamps cost almost nothing")


def _check_timer(late_ms: float) -> Finding:
    """Judge how late a timer of 1 ms is. Requests are sent by timers, so sends are as late."""
    observed = f"timers are up to {format.quantity(late_ms)} ms late (p99, idle host)"
    if late_ms > TIMER_LATE_MS:
        meaning = "requests will be sent as late, so a TTFT of 20 ms has an error of 5 % or more"
        advice = "use an idle host, or reserve a core for loadgen"
        return Finding(
            check="timer",
            state=WARNING,
            observed=observed,
            meaning=meaning,
            advice=advice,
        )

    return Finding("timer", OK, observed, "requests can be sent at their scheduled times")


def _check_connection_limits(files: int, ports: int | None) -> Finding:
    """Judge how many requests can be in flight at once.

    Each request in flight needs a connection, which takes one open file and one local port.
    """
    observed = f"{files:,} open files"
    if ports is not None:
        observed += f", {ports:,} local ports"

    max_in_flight = min(files, ports or files)
    if max_in_flight < ENOUGH_FILES:
        requests = format.counted(max_in_flight, "request")
        meaning = f"one process can have at most about {requests} in flight"
        return Finding(
            check="files",
            state=WARNING,
            observed=observed,
            meaning=meaning,
            advice="raise the limit: ulimit -n 65536",
        )

    meaning = f"enough for about {max_in_flight:,} requests in flight to one address"
    return Finding("files", OK, observed, meaning)


def _check_cpu(machine: Machine) -> Finding:
    """Judge the cores that this process can use, and whether other work runs on them."""
    cores: float | None = machine.cpus
    if cores is not None and machine.cpu_quota is not None:
        cores = min(cores, machine.cpu_quota)

    observed = "number of cores unknown" if cores is None else format.counted(cores, "core")
    if machine.load_average is not None:
        observed += f", load average {machine.load_average:.1f}"

    if machine.governor:
        observed += f", governor {machine.governor}"

    if _is_busy(machine.load_average, cores):
        meaning = "other processes will delay sends and timestamps, which can make a run INVALID"
        advice = "stop them, or use another host"
        return Finding(
            check="cpu",
            state=WARNING,
            observed=observed,
            meaning=meaning,
            advice=advice,
        )

    if machine.governor == "powersave":
        meaning = "cores are slow until they are loaded, so the first seconds of a run differ"
        return Finding(
            check="cpu",
            state=WARNING,
            observed=observed,
            meaning=meaning,
            advice="set the performance governor",
        )

    return Finding("cpu", OK, observed, "no other load on this host")


def _is_busy(load_average: float | None, cores: float | None) -> bool:
    """Return True if other work uses a large share of the cores; False if that is not known."""
    if load_average is None or cores is None:
        return False
    return load_average > BUSY_LOAD_PER_CORE * cores
