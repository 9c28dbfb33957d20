"""Count CPUs, start child processes, measure their CPU time, and end them.

A child process never runs code from the current folder.
"""

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

LEAVE_S = 5.0
"""How long a process may take to end before it is killed."""
FROZEN_S = 20.0
"""A process that is waited for and used no CPU time for this long counts as frozen."""


def command(module: str, *arguments: str) -> list[str]:
    """Return the command line that runs a module in a new interpreter.

    With `-P` the current folder is not searched for imports, so that a `numpy.py` there is not run.
    """
    return [sys.executable, "-P", "-m", module, *arguments]


def count_cpus() -> int:
    """Return the number of CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpu_s(pid: int) -> float:
    """Return the CPU time of a process and its children, or 0.0 if it is not known.

    A process whose CPU time does not grow is stuck or waits.
    """
    try:
        # The name of the command, in parentheses, may contain spaces.
        fields = Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text("utf-8").split()
    except OSError:
        return 0.0
    # utime and stime, which are fields 14 and 15 of proc(5), of which two come before the `)`.
    ticks = int(fields[11]) + int(fields[12])
    process_cpu_s = ticks / os.sysconf("SC_CLK_TCK")
    return process_cpu_s + sum(cpu_s(int(child)) for child in children)


def end_process(process: subprocess.Popen[bytes]) -> None:
    """Tell a process to end, close its pipes, and wait for it. It is killed after LEAVE_S."""
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


class ForkedProcess:
    """A fork of this process that runs a function, with the interface of `Popen` with two pipes.

    This process must have a single thread, because the locks of others would stay locked in the
    fork.
    """

    def __init__(self, name: str, work: Callable[[], None], *, keeps_open_files: bool) -> None:
        """Fork this process. In the fork, call `work` and exit.

        Args:
            name: The name of the process in lists of processes.
            work: What the fork does. It reads from and writes to its standard streams, which are
                connected to `stdin` and `stdout` of this object.
            keeps_open_files: Whether the fork keeps the files that this process has open.
        """
        input_read, input_write = os.pipe()
        output_read, output_write = os.pipe()
        self.returncode: int | None = None
        self.pid = os.fork()
        is_fork = self.pid == 0
        if is_fork:
            exit_code = 1
            try:
                os.close(input_write)
                os.close(output_read)
                _detach_from_parent(name, input_read, output_write)
                if not keeps_open_files:
                    _close_descriptors_above(2)
                work()
                exit_code = 0
            finally:
                # Handlers, buffers and threads of the parent must not run in the fork.
                os._exit(exit_code)
        os.close(input_read)
        os.close(output_write)
        self.stdin = os.fdopen(input_write, "wb")
        self.stdout = os.fdopen(output_read, "rb")

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the process and return its exit code, as `Popen.wait` does.

        The process has ended when its output is closed.
        """
        deadline_s = None if timeout is None else time.monotonic() + timeout
        while self.returncode is None:
            remaining_s = None if deadline_s is None else max(deadline_s - time.monotonic(), 0)
            if not select.select([self.stdout], [], [], remaining_s)[0]:
                raise subprocess.TimeoutExpired("a copy of this process", timeout or 0)
            has_closed_output = not os.read(self.stdout.fileno(), 1 << 16)
            if has_closed_output:
                _, wait_status = os.waitpid(self.pid, 0)
                self.returncode = os.waitstatus_to_exitcode(wait_status)
        return self.returncode

    def kill(self) -> None:
        """End the process at once."""
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)


def _detach_from_parent(name: str, source: int, output: int) -> None:
    """Give a fork a name, a session and standard streams of its own, and no signal handlers.

    Garbage of the parent is not collected here, because it would close descriptors that have
    new owners.
    """
    gc.freeze()
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    os.setsid()
    Path("/proc/self/comm").write_text(name, "utf-8")
    null = os.open(os.devnull, os.O_WRONLY)
    # `source`, `output` and `null` become the descriptors 0, 1 and 2. They are first copied to
    # descriptors above 2, since one of them may be among these and would be overwritten.
    copies = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, 3) for descriptor in (source, output, null)]
    for standard_stream, copy in enumerate(copies):
        os.dup2(copy, standard_stream)
    for descriptor in {source, output, *copies} - {0, 1, 2}:
        os.close(descriptor)


def _close_descriptors_above(highest: int) -> None:
    """Close all descriptors above `highest`. That of the listing itself is closed already."""
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor > highest:
            with contextlib.suppress(OSError):
                os.close(descriptor)


def can_fork() -> bool:
    """Return True if this process can be forked, because it has a single thread.

    It cannot be forked where the system does not list its threads. On macOS, libraries may have
    started some that Python does not know.
    """
    try:
        threads = os.listdir("/proc/self/task")
    except OSError:
        return False
    return len(threads) == 1


def start_sidecar(
    module: str, *arguments: str, work: Callable[[], None], keeps_open_files: bool = False
) -> subprocess.Popen[bytes] | ForkedProcess:
    """Start a process that accompanies a run, with pipes as its standard streams.

    It is a fork of this process if possible, and else a new interpreter, which costs ten times as
    much. Ctrl-C does not reach it, because it has a session of its own: the run handles Ctrl-C.

    Args:
        module: The module that a new interpreter runs.
        arguments: Its arguments.
        work: The function that a fork runs, which does the same as the module.
        keeps_open_files: Whether a fork keeps the files that this process has open.

    Raises:
        OSError: No process can be started.
    """
    if can_fork():
        name = module.rpartition(".")[2]
        return ForkedProcess(name, work, keeps_open_files=keeps_open_files)
    return subprocess.Popen(
        command(module, *arguments),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
