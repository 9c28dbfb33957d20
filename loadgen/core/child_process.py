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
from typing import NoReturn

LEAVE_S = 5.0
"""How long a process may take to end before it is killed."""
FROZEN_S = 20.0
"""A process that is waited for and used no CPU time for this long counts as frozen."""
_STDIN_FD = 0
_STDOUT_FD = 1
_STDERR_FD = 2
_READ_BYTES = 1 << 16


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


def read_cpu_seconds(pid: int) -> float:
    """Return the CPU time that a process and its children have used, in seconds.

    It is read from /proc (see proc(5)), and is 0.0 where the system has no /proc or the process has
    ended. A process whose CPU time does not grow is stuck or waits.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text("utf-8")
        child_pids = Path(f"/proc/{pid}/task/{pid}/children").read_text("utf-8").split()
    except OSError:
        return 0.0

    # Example: `4711 (my command) S 1 4711 ...`. The name may contain spaces and parentheses, so
    # fields are only split after the last parenthesis. What follows begins with field 3, the state.
    fields_from_3 = stat.rpartition(")")[2].split()
    user_ticks = int(fields_from_3[14 - 3])  # utime is field 14.
    system_ticks = int(fields_from_3[15 - 3])  # stime is field 15.
    own_cpu_s = (user_ticks + system_ticks) / os.sysconf("SC_CLK_TCK")

    return own_cpu_s + sum(read_cpu_seconds(int(child_pid)) for child_pid in child_pids)


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
            os.close(input_write)
            os.close(output_read)
            # This never returns. It ends the fork, so only the parent continues below.
            _run_fork(name, work, input_read, output_write, keeps_open_files=keeps_open_files)

        os.close(input_read)
        os.close(output_write)
        self.stdin = os.fdopen(input_write, "wb")
        self.stdout = os.fdopen(output_read, "rb")

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the process and return its exit code, as `Popen.wait` does.

        `os.waitpid` has no timeout, so this waits until the output of the process ends, which
        happens when it exits: no other process has this pipe open. What it still writes until then
        is discarded.

        Raises:
            subprocess.TimeoutExpired: The process has not ended within `timeout` seconds.
        """
        deadline_s = None if timeout is None else time.monotonic() + timeout
        while self.returncode is None:
            remaining_s = None if deadline_s is None else max(deadline_s - time.monotonic(), 0)
            readable, _, _ = select.select([self.stdout], [], [], remaining_s)
            if not readable:
                raise subprocess.TimeoutExpired("a copy of this process", timeout or 0)

            output = os.read(self.stdout.fileno(), _READ_BYTES)
            has_ended = output == b""
            if has_ended:
                _, wait_status = os.waitpid(self.pid, 0)
                self.returncode = os.waitstatus_to_exitcode(wait_status)

        return self.returncode

    def kill(self) -> None:
        """End the process at once."""
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)


def _run_fork(
    name: str, work: Callable[[], None], source: int, output: int, *, keeps_open_files: bool
) -> NoReturn:
    """Run a function in a fork, and end the fork with the exit code 0, or 1 after an exception.

    Args:
        name: The name of the process in lists of processes.
        work: The function.
        source: The descriptor of the pipe that becomes standard input.
        output: The descriptor of the pipe that becomes standard output.
        keeps_open_files: Whether the fork keeps the files that its parent has open.
    """
    exit_code = 1
    try:
        _detach_from_parent(name)
        _replace_standard_streams(source, output)
        if not keeps_open_files:
            _close_descriptors_above(2)
        work()
        exit_code = 0
    finally:
        # Exits at once: handlers, buffers and threads of the parent must not run in the fork.
        os._exit(exit_code)


def _detach_from_parent(name: str) -> None:
    """Give a fork a name and a session of its own, and none of its parent's signal handlers.

    Objects of the parent are never garbage-collected in the fork: their finalizers could close
    descriptors whose numbers the fork uses for other files.
    """
    gc.freeze()

    # A signal of the fork must not wake the event loop of the parent through a shared descriptor.
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        has_handler = callable(signal.getsignal(number))
        if has_handler:
            signal.signal(number, signal.SIG_DFL)

    os.setsid()

    # Linux shows this name in `ps` and `top`.
    Path("/proc/self/comm").write_text(name, "utf-8")


def _replace_standard_streams(source: int, output: int) -> None:
    """Use `source` as the standard input of this process, and `output` as its standard output.

    What the process writes to its standard error stream is discarded. The descriptors `source` and
    `output` are closed.
    """
    discarded = os.open(os.devnull, os.O_WRONLY)

    # `source` or `output` may itself be 0, 1 or 2. Replacing standard input (0) would then destroy
    # an `output` of 0 before it is used. So all three are first copied to descriptors above 2.
    source_copy = _copy_above_standard_streams(source)
    output_copy = _copy_above_standard_streams(output)
    discarded_copy = _copy_above_standard_streams(discarded)
    os.dup2(source_copy, _STDIN_FD)
    os.dup2(output_copy, _STDOUT_FD)
    os.dup2(discarded_copy, _STDERR_FD)

    # What `source` and `output` refer to is open as a standard stream now.
    for descriptor in {source, output, source_copy, output_copy, discarded_copy}:
        is_standard_stream = descriptor in (_STDIN_FD, _STDOUT_FD, _STDERR_FD)
        if not is_standard_stream:
            os.close(descriptor)


def _copy_above_standard_streams(descriptor: int) -> int:
    """Return a copy of a descriptor, which is the first free one after the standard streams."""
    return fcntl.fcntl(descriptor, fcntl.F_DUPFD, _STDERR_FD + 1)


def _close_descriptors_above(highest: int) -> None:
    """Close all descriptors above `highest`.

    The list of open descriptors has one that was open while the list was read. Closing it fails.
    """
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
