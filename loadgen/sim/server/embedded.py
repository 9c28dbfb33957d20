"""Start and stop a simulated server in a child process, for runs without a real server.

The child runs as long as the parent keeps the child's standard input open, so it ends however the
parent ends. On Linux it also gets a signal when the parent dies, because a forked worker may keep
the same pipe open.
"""

from __future__ import annotations

import os
import select
import subprocess
import threading
import time
from typing import Any

import msgspec

from loadgen.core import child_process
from loadgen.core.errors import TargetError
from loadgen.sim.server.options import Options

READY_TIMEOUT_S = 60.0  # a start takes 0.2 s, and much longer on an overloaded machine
STOP_TIMEOUT_S = 10.0  # time to write the log of a long run
READ_BYTES = 4096  # more than the line of a child ever has
SERVER_MODULE = "loadgen.sim.server.process"


class EmbeddedServer:
    """A running server: the URL to send requests to, and its process id. Also a context manager."""

    __slots__ = ("_child", "pid", "url")

    def __init__(self, child: subprocess.Popen[bytes], url: str) -> None:
        self.url = url
        self.pid = child.pid
        self._child = child

    def stop(self) -> None:
        """End the process and wait for it. A second call does nothing.

        The end of its stdin lets the process write its log and exit. It is killed if that takes too
        long.
        """
        child = self._child
        if child.stdin is not None and not child.stdin.closed:
            child.stdin.close()

        try:
            child.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()

        if child.stdout is not None:
            child.stdout.close()

    def __enter__(self) -> EmbeddedServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def start(options: Options | None = None) -> EmbeddedServer:
    """Start a simulated server in a new child process, and return when it listens.

    The child ends when its stdin is closed, so it normally ends together with this process. If the
    main thread starts it, the kernel also ends it if this process is killed. The kernel watches the
    thread and not the process, so a child of any other thread would end with that thread.

    Raises TargetError if the server does not start.
    """
    command = child_process.command(SERVER_MODULE)
    if threading.current_thread() is threading.main_thread():
        command.append("--die-with-parent")

    child = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C stops the run, which still needs the server to drain
    )
    return wait_until_ready(child, options or Options())


def wait_until_ready(child: subprocess.Popen[bytes], options: Options) -> EmbeddedServer:
    """Send the options to a child that has just been started, and wait until it listens.

    Raises TargetError if it does not start.
    """
    assert child.stdin is not None
    try:
        child.stdin.write(msgspec.json.encode(options) + b"\n")
        child.stdin.flush()
    except BrokenPipeError:
        pass  # the child has ended; the missing ready line reports it

    ready = _read_ready_message(child)
    if "url" in ready:
        return EmbeddedServer(child, str(ready["url"]))

    _kill(child)
    cause = str(ready["error"])
    problem = f"the simulated server did not start: {cause.removeprefix('error: ')}"
    raise TargetError(ready["code"], problem, SERVER_MODULE)


def _read_ready_message(child: subprocess.Popen[bytes]) -> dict[str, Any]:
    """Read the line of JSON with which a child reports that it listens, or why it cannot.

    Returns:
        A message with `url` if the child listens. Otherwise a message with the text `error` and the
        error code `code`, which have defaults in case that the child ends or stays silent.
    """
    message: dict[str, Any] = {"error": "no message from the process", "code": "process_failed"}
    line = _read_line(child, READY_TIMEOUT_S)
    if line is not None:
        message.update(msgspec.json.decode(line))

    return message


def _read_line(child: subprocess.Popen[bytes], timeout_s: float) -> bytes | None:
    """Read the first line of a child's output, or return None if it ends or takes too long.

    The file descriptor is read directly, because `readline` has no timeout and would wait for ever
    for a child that hangs.
    """
    assert child.stdout is not None
    deadline_s = time.monotonic() + timeout_s

    line = b""
    while not line.endswith(b"\n"):
        remaining_s = deadline_s - time.monotonic()
        if remaining_s <= 0:
            return None

        readable, _, _ = select.select([child.stdout], [], [], remaining_s)
        if not readable:
            return None

        data = os.read(child.stdout.fileno(), READ_BYTES)
        if not data:  # the child has closed its output
            return None

        line += data

    return line


def _kill(child: subprocess.Popen[bytes]) -> None:
    """End a child that did not start properly, and close its pipes."""
    child.kill()
    child.wait()
    for stream in (child.stdin, child.stdout):
        if stream is not None:
            stream.close()
