"""Facts about this machine and this installation that the manifest of a run records."""

from __future__ import annotations

import datetime
import os
import platform
import socket
from pathlib import Path

from loadgen_sdk.installed import NOT_INSTALLED, version_of

from loadgen.core import child_process
from loadgen.core.results.manifest import Host

_CPU_INFO = Path("/proc/cpuinfo")
_CLOCK_SOURCE = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
# Packages whose versions may change how a run is measured.
_RECORDED_PACKAGES = ("uvloop", "msgspec", "numpy", "tiktoken")


def loadgen_version() -> str:
    """Return the installed version of loadgen, or "unknown" if it runs from a source tree."""
    version = version_of("loadgen")
    return "unknown" if version == NOT_INSTALLED else version


def current_time() -> str:
    """Return the current local time as manifests record it: ISO 8601 with milliseconds."""
    local_time = datetime.datetime.now(datetime.UTC).astimezone()
    return local_time.isoformat(timespec="milliseconds")


def read_host_facts(hot_path: str) -> Host:
    """Return facts about this machine. A fact that cannot be read keeps its empty value.

    `hot_path` is the implementation that reads sockets: `compiled`, `python` or empty.
    """
    return Host(
        name=socket.gethostname(),
        kernel=platform.release(),
        python=platform.python_version(),
        cpu=_cpu_model(),
        cpus=child_process.count_cpus(),
        memory_bytes=_memory_bytes(),
        clock=_clock_source(),
        versions={name: version_of(name) for name in _RECORDED_PACKAGES},
        hot_path=hot_path,
    )


def _cpu_model() -> str:
    """Return the model of the first CPU, such as "Intel Xeon Platinum 8480C", or an empty text."""
    try:
        lines = _CPU_INFO.read_text("utf-8").splitlines()
    except (OSError, ValueError):
        return ""

    for line in lines:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()

    return ""


def _memory_bytes() -> int | None:
    """Return the size of the memory of this machine, or None if the system does not tell it."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):
        return None


def _clock_source() -> str:
    """Return from which hardware Linux reads the time, such as "tsc", or an empty text.

    Reading the time is slow with some sources, which makes timestamps less exact.
    """
    try:
        return _CLOCK_SOURCE.read_text("utf-8").strip()
    except (OSError, ValueError):
        return ""
