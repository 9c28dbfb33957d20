"""What this host tells of itself, judged: clock, timer, cores, open files and proxies, and what they mean for a load.

Pure: a `Machine` in, findings out. Looking is `doctor.py`; the findings about a target are `findings.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from loadgen import format
from loadgen.preflight.target_checks import NOTE, OK, WARNING, Finding

TIMER_LATE_MS = 1.0  # p99 of a 1 ms timer, from which an idle host delays sends
FILES = 4096  # open files that leave room for a few thousand connections
HOST = ("clock", "timer", "cpu", "files", "proxy")  # checks that are about this machine
GOOD_CLOCKS = ("tsc", "kvm-clock", "arch_sys_counter", "hyperv_clocksource_tsc_page", "xen")


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """This host, as far as it tells; None and "": not known."""

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


def host(machine: Machine) -> Iterator[Finding]:
    """Clock, timer, CPU, files and proxies of this machine."""
    m = machine
    if m.clock or m.clock_read_ns is not None:
        words = m.clock or "monotonic"
        words += f", {m.clock_read_ns:.0f} ns a reading" if m.clock_read_ns is not None else ""
        if m.clock and m.clock not in GOOD_CLOCKS:
            meaning = "each stamp is a slow call into the kernel: one worker carries fewer events"
            yield Finding("clock", WARNING, words, meaning, "see whether the kernel can use tsc")
        else:
            yield Finding("clock", OK, words, "stamps cost next to nothing")
    if m.timer_late_ms is not None:
        words = f"a 1 ms timer is at most {format.quantity(m.timer_late_ms)} ms late (p99, idle)"
        if m.timer_late_ms > TIMER_LATE_MS:
            meaning = "sends will be late by as much: a TTFT of 20 ms could not be measured to 5 %"
            yield Finding("timer", WARNING, words, meaning, "use a quieter machine, or a core of its own")
        else:
            yield Finding("timer", OK, words, "sends can keep their instants")
    yield _cpu(m)
    if m.files is not None:
        words = f"{m.files:,} open files" + (f", {m.ports:,} local ports" if m.ports is not None else "")
        most = min(m.files, m.ports or m.files)
        if most < FILES:
            meaning = f"at most about {most:,} requests can be in flight from one process"
            yield Finding("files", WARNING, words, meaning, "raise it: ulimit -n 65536")
        else:
            yield Finding("files", OK, words, f"room for about {most:,} requests in flight to one address")
    if m.proxies:
        meaning = "they are not used: load goes straight to --url"
        yield Finding(
            "proxy", NOTE, f"{', '.join(m.proxies)} set", meaning, "name the proxy's own address, if it must be"
        )


def _cpu(m: Machine) -> Finding:
    cores = m.cpus if m.cpu_quota is None or m.cpus is None else min(m.cpus, m.cpu_quota)
    words = f"{cores:g} cores" if cores is not None else "number of cores unknown"
    words += f", load average {m.load_average:.1f}" if m.load_average is not None else ""
    words += f", governor {m.governor}" if m.governor else ""
    if cores is not None and m.load_average is not None and m.load_average > 0.5 * cores:
        meaning = "other work runs here: it will delay sends and stamps, and the run may come out INVALID"
        return Finding("cpu", WARNING, words, meaning, "stop it, or measure from another machine")
    if m.governor == "powersave":
        meaning = "cores start slow and speed up under load: the first seconds of a run are not like the rest"
        return Finding("cpu", WARNING, words, meaning, "set the performance governor")
    return Finding("cpu", OK, words, "`loadgen selfcheck` says how much load they carry")
