"""Child processes: the command line of one, which never runs code from the current folder, its CPU time, its end."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

LEAVE_S = 5.0  # what a process that was told to end may take for it
FROZEN_S = 20.0  # without CPU time while it is waited for: a process that does not move any more


def command(module: str, *arguments: str) -> list[str]:
    """What starts `module` in a process of its own. `-P`: the current folder is not on the path for imports, so that a
    `numpy.py` that happens to lie there is not executed.
    """
    return [sys.executable, "-P", "-m", module, *arguments]


def cpu_s(pid: int) -> float:
    """The CPU time that a process and its own children have used, in s; 0.0 where the system does not say."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text("utf-8").split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") + sum(
        map(cpu_s, map(int, children))
    )


def end(process: subprocess.Popen[bytes]) -> None:
    """Tell a process to end, and wait; kill it after LEAVE_S."""
    if process.poll() is None:
        process.terminate()
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(BrokenPipeError):
            if pipe is not None:
                pipe.close()
    try:
        process.wait(LEAVE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class Forked:
    """A copy of this process that carries out `work`, with the face of `Popen` with two pipes.

    Only where this process has one thread: what another one had locked would stay locked in the copy.
    """

    def __init__(self, name: str, work: Callable[[], None], *, files: bool) -> None:
        down, up = os.pipe(), os.pipe()
        self.returncode: int | None = None
        self.pid = os.fork()
        if not self.pid:
            code = 1
            try:
                for one in (down[1], up[0]):
                    os.close(one)
                _leave_the_parent(name, down[0], up[1])
                if not files:
                    _close_above(2)
                work()
                code = 0
            finally:
                os._exit(code)  # nothing of the parent is unwound, flushed or joined here
        os.close(down[0])
        os.close(up[1])
        self.stdin, self.stdout = os.fdopen(down[1], "wb"), os.fdopen(up[0], "rb")

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, as `Popen` has it. It has ended when nobody holds the other end of its output any more."""
        until_s = None if timeout is None else time.monotonic() + timeout
        while self.returncode is None:
            left_s = None if until_s is None else max(until_s - time.monotonic(), 0)
            if not select.select([self.stdout], [], [], left_s)[0]:
                raise subprocess.TimeoutExpired("a copy of this process", timeout or 0)
            if not os.read(self.stdout.fileno(), 1 << 16):
                self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode

    def kill(self) -> None:
        """End it at once."""
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)


def _leave_the_parent(name: str, source: int, output: int) -> None:
    """In a copy: a name, a session and standard streams of its own, and no signal handler of the parent."""
    gc.freeze()  # what the parent left for its collector would close descriptors that have new owners here
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    os.setsid()
    Path("/proc/self/comm").write_text(name, "utf-8")
    above = [
        fcntl.fcntl(one, fcntl.F_DUPFD, 3)
        for one in (source, output, os.open(os.devnull, os.O_WRONLY))
    ]
    for place, one in enumerate(above):
        os.dup2(one, place)
    for one in {source, output, *above} - {0, 1, 2}:
        os.close(one)


def _close_above(highest: int) -> None:
    for one in map(int, os.listdir("/proc/self/fd")):
        if one > highest:
            with contextlib.suppress(OSError):  # that of the list itself
                os.close(one)


def forks() -> bool:
    """Whether `beside` makes a fork of this process: not where there are several threads."""
    return len(os.listdir("/proc/self/task")) == 1


def beside(
    module: str, *arguments: str, copy: Callable[[], None], files: bool = False
) -> subprocess.Popen[bytes] | Forked:
    """Start what goes beside a run, in a session of its own, with two pipes as its standard streams: `copy` in a fork
    of this process, or else a new interpreter, which costs ten times as much, with `module`.

    `files`: a fork keeps those that this process has open. Raises OSError if none can be started.
    """
    if forks():
        return Forked(module.rpartition(".")[2], copy, files=files)
    return subprocess.Popen(
        command(module, *arguments),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is handled by the run
    )
