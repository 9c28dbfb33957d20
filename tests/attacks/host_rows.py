"""Disks, limits and processors that fail under a command."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import select
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path
from signal import SIGCONT, SIGTSTP
from tempfile import mkdtemp

import pytest
from scene import FULL_RESULT, LENIENT, NOTHING, RECORDED, UNHARMED, Row, Scene, unhurried

RUN = (
    "run w.yaml --url {url} --request-rate 60/s -n 150 --warmup 0 --server-metrics off --energy "
    "off --out out"
)
WORKERS = f"{RUN} --workers 2"
CLOSED = RUN.replace("--request-rate 60/s", "-c 100")


class Host:
    """The host of one command, manipulated by the library host.c."""

    def __init__(self, scene: Scene) -> None:
        self._folder = Path(mkdtemp(dir=scene.folder))
        self.env = {
            "LD_PRELOAD": _built(),
            "ATTACK": str(self._folder),
            "ATTACK_BELOW": str(scene.out),
        }

    def tell(self, name: str, text: object) -> None:
        (self._folder / f".{name}").write_text(str(text))
        (self._folder / f".{name}").rename(self._folder / name)

    def untell(self, name: str) -> None:
        (self._folder / name).rename(self._folder / f"was-{name}")


def hostile(scene: Scene) -> Host:
    return Host(scene)


@cache
def _built() -> str:
    library = Path(mkdtemp(prefix="loadgen-attack-")) / "host.so"
    subprocess.run(
        [
            "cc",
            "-shared",
            "-fPIC",
            "-O1",
            Path(__file__).with_name("host.c"),
            "-o",
            library,
            "-ldl",
        ],
        check=True,
    )
    return str(library)


def disk(command: str, name: str, value: int) -> Callable[[Scene], None]:
    def do(scene: Scene) -> None:
        attack = Host(scene)
        scene.go(command, attack.env)
        scene.loading()
        attack.tell(name, value)

    return do


def limited(command: str, resource_number: int, limit: int) -> Callable[[Scene], None]:
    return lambda scene: scene.go(command, limits={resource_number: limit})


def starved(scene: Scene) -> None:
    """Move a worker into a control group with almost no memory, as in a small container."""
    group = _memory_group()
    scene.go(WORKERS)
    try:
        scene.loading()
        pids = scene.family()
        worker = next(
            pid
            for pid in pids
            if "loadgen.core.execution.backends.worker" in _read_command_line(pid)
        )
        (group / "cgroup.procs").write_text(str(worker))
        scene.ended()
    finally:
        group.rmdir()


def _read_command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def _memory_group() -> Path:
    """Create a control group of cgroup v1 with one page inside that of this process."""
    groups = (line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines())
    own_path = next(
        (path for _, controllers, path in groups if "memory" in controllers.split(",")), ""
    )
    group = Path(f"/sys/fs/cgroup/memory{own_path}") / f"attack-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no memory controller of cgroup v1 that this user may use: {error}")
    (group / "memory.limit_in_bytes").write_text("4096")
    return group


def pinned(scene: Scene) -> None:
    """Move all threads of the command and of its workers to one core, then to another."""
    cores = sorted(os.sched_getaffinity(0))
    scene.go(f"{WORKERS} {LENIENT}")
    scene.loading()
    for core in (cores[0], cores[-1]):
        for pid in scene.family():
            for thread in Path(f"/proc/{pid}/task").glob("*"):
                with contextlib.suppress(ProcessLookupError):
                    os.sched_setaffinity(int(thread.name), {core})
        select.select([], [], [], 0.3)


def suspended(scene: Scene) -> None:
    """Suspend the command with Ctrl-Z and continue it after a second."""
    scene.go(RUN)
    scene.loading()
    scene.strike(SIGTSTP)
    select.select([], [], [], 1.0)
    scene.strike(SIGCONT)


def rows() -> list[Row]:
    start, load = "from the start", "under load"
    mib = 1 << 20
    return [
        Row(
            "disk-readonly",
            "the disk becomes read-only",
            RUN,
            load,
            (2,),
            "kept",
            RECORDED,
            disk(RUN, "errno", errno.EROFS),
            True,
        ),
        Row(
            "disk-broken",
            "the disk fails (EIO)",
            WORKERS,
            load,
            (2,),
            "kept",
            RECORDED,
            disk(WORKERS, "errno", errno.EIO),
        ),
        Row(
            "disk-full",
            "the disk is full",
            WORKERS,
            load,
            (2,),
            "free some space",
            RECORDED,
            disk(WORKERS, "errno", errno.ENOSPC),
        ),
        Row(
            "disk-stale",
            "the disk of another host is gone (ESTALE)",
            RUN,
            load,
            (2,),
            "kept",
            RECORDED,
            disk(RUN, "errno", errno.ESTALE),
        ),
        Row(
            "disk-slow",
            "each write takes 200 ms",
            RUN,
            load,
            (3,),
            "Writing records took",
            UNHARMED,
            disk(RUN, "slow", 200),
        ),
        Row(
            "disk-slow-workers",
            "each write takes 200 ms",
            WORKERS,
            load,
            (3,),
            "Writing records took",
            UNHARMED,
            disk(WORKERS, "slow", 200),
        ),
        Row(
            "files-12",
            "12 open files (`ulimit -n`)",
            RUN,
            start,
            (2,),
            "ulimit -n",
            NOTHING,
            limited(RUN, resource.RLIMIT_NOFILE, 12),
            True,
        ),
        Row(
            "files-40",
            "40 open files",
            CLOSED,
            start,
            (2,),
            "ulimit",
            NOTHING,
            limited(CLOSED, resource.RLIMIT_NOFILE, 40),
        ),
        Row(
            "memory-400",
            "400 MiB of memory",
            WORKERS,
            start,
            (2,),
            "memory",
            RECORDED,
            limited(WORKERS, resource.RLIMIT_AS, 400 * mib),
        ),
        Row(
            "memory-cgroup",
            "a worker's control group has no memory left",
            WORKERS,
            load,
            (3,),
            "worker_died",
            FULL_RESULT,
            starved,
        ),
        Row(
            "core-away",
            "all threads are moved to one core, then to another",
            f"{WORKERS} {LENIENT}",
            load,
            (0,),
            "",
            UNHARMED,
            unhurried(pinned),
        ),
        Row("ctrl-z", "Ctrl-Z, then `fg`", RUN, load, (3,), "sent late", UNHARMED, suspended),
    ]
