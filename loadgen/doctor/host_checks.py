"""Judges facts about this host: clock, timer, cores, open files and proxies, and what they mean for a load.

Pure: a `Machine` in, findings out. `doctor.py` collects the facts; `target_checks.py` judges the target.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from loadgen.core import format
from loadgen.doctor.target_checks import NOTE, OK, WARNING, Finding

TIMER_LATE_MS = 1.0  # p99 lateness of a 1 ms timer above which even an idle host delays sends
FILES = 4096  # open files that are enough for a few thousand connections
HOST = ("clock", "timer", "cpu", "files", "proxy", "compiled")  # checks that are about this machine
GOOD_CLOCKS = ("tsc", "kvm-clock", "arch_sys_counter", "hyperv_clocksource_tsc_page", "xen")


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about this host. None and "": not known."""

    clock: str = ""
    clock_read_ns: float | None = None
    timer_late_ms: float | None = None  # p99
    cpus: int | None = None
    cpu_quota: float | None = None  # cores, of the control group
    load_average: float | None = None
    governor: str = ""
    files: int | None = None  # open files this process can have
    ports: int | None = None  # local ports for outgoing connections
    proxies: tuple[str, ...] = ()  # names of proxy variables that are set
    not_compiled: str = ""  # why the part of the client in C is not used; "": it is


def cpu_quota(read: Callable[[str], str]) -> float | None:
    """The CPU limit in cores of the control groups that this process is in, the least of them; None without one.

    Of cgroup v2 and v1, at the root that a container sees and in each group on the way. read: the text of a file, ""
    where there is none.
    """
    pages = {("/sys/fs/cgroup", ""), ("/sys/fs/cgroup/cpu", "")}
    for line in read("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        root = "/sys/fs/cgroup" if not controllers else "/sys/fs/cgroup/cpu"
        if not controllers or "cpu" in controllers.split(","):
            parts = [part for part in path.split("/") if part]
            pages |= {
                (root, "".join(f"/{part}" for part in parts[:depth]))
                for depth in range(len(parts) + 1)
            }
    limits = []
    for root, group in pages:
        fields = read(f"{root}{group}/cpu.max").split() or [
            read(f"{root}{group}/cpu.cfs_quota_us"),
            read(f"{root}{group}/cpu.cfs_period_us"),
        ]
        if len(fields) == 2 and all(
            field.isdigit() and int(field) for field in fields
        ):  # max, and -1: no limit
            limits.append(int(fields[0]) / int(fields[1]))
    return min(limits, default=None)


def host(machine: Machine) -> Iterator[Finding]:
    """Findings about clock, timer, CPU, open files and proxies of this host, and the compiled part of the client."""
    facts = machine
    if facts.clock or facts.clock_read_ns is not None:
        observed = facts.clock or "monotonic"
        observed += (
            f", {facts.clock_read_ns:.0f} ns a reading" if facts.clock_read_ns is not None else ""
        )
        if facts.clock and facts.clock not in GOOD_CLOCKS:
            meaning = "each stamp is a slow call into the kernel: one worker carries fewer events"
            yield Finding("clock", WARNING, observed, meaning, "see whether the kernel can use tsc")
        else:
            yield Finding("clock", OK, observed, "stamps cost next to nothing")
    if facts.timer_late_ms is not None:
        observed = (
            f"a 1 ms timer is at most {format.quantity(facts.timer_late_ms)} ms late (p99, idle)"
        )
        if facts.timer_late_ms > TIMER_LATE_MS:
            meaning = "sends will be late by as much: a TTFT of 20 ms could not be measured to 5 %"
            yield Finding(
                "timer", WARNING, observed, meaning, "use a quieter machine, or a core of its own"
            )
        else:
            yield Finding("timer", OK, observed, "sends can keep their instants")
    yield _cpu(facts)
    if facts.files is not None:
        observed = f"{facts.files:,} open files" + (
            f", {facts.ports:,} local ports" if facts.ports is not None else ""
        )
        max_in_flight = min(facts.files, facts.ports or facts.files)
        if max_in_flight < FILES:
            meaning = f"at most about {format.counted(max_in_flight, 'request')} can be in flight from one process"
            yield Finding("files", WARNING, observed, meaning, "raise it: ulimit -n 65536")
        else:
            yield Finding(
                "files",
                OK,
                observed,
                f"room for about {max_in_flight:,} requests in flight to one address",
            )
    if facts.proxies:
        words, meaning = (
            f"{', '.join(facts.proxies)} set",
            "they are not used: load goes straight to --url",
        )
        yield Finding("proxy", NOTE, words, meaning, "name the proxy's own address, if it must be")
    if facts.not_compiled:
        words, meaning = (
            f"the compiled part is not used: {facts.not_compiled}",
            "one worker carries fewer events",
        )
        yield Finding(
            "compiled",
            NOTE,
            words,
            meaning,
            "with a C compiler: pip install --force-reinstall -v shows why",
        )


def _cpu(facts: Machine) -> Finding:
    cores = (
        facts.cpus
        if facts.cpu_quota is None or facts.cpus is None
        else min(facts.cpus, facts.cpu_quota)
    )
    observed = format.counted(cores, "core") if cores is not None else "number of cores unknown"
    observed += f", load average {facts.load_average:.1f}" if facts.load_average is not None else ""
    observed += f", governor {facts.governor}" if facts.governor else ""
    if cores is not None and facts.load_average is not None and facts.load_average > 0.5 * cores:
        meaning = (
            "other work runs here: it will delay sends and stamps, and the run may come out INVALID"
        )
        return Finding(
            "cpu", WARNING, observed, meaning, "stop it, or measure from another machine"
        )
    if facts.governor == "powersave":
        meaning = "cores start slow and speed up under load: the first seconds of a run are not like the rest"
        return Finding("cpu", WARNING, observed, meaning, "set the performance governor")
    return Finding(
        "cpu", OK, observed, "`loadgen doctor` without a target says how much load they carry"
    )
