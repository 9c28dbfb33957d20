"""Starts and stops a simulated server in a child process, for runs without a real server.

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
SERVER_MODULE = "loadgen.sim.server.process"


class EmbeddedServer:
    """A running server: the URL to send requests to, and its process id. Also a context manager."""

    __slots__ = ("_child", "pid", "url")

    def __init__(self, child: subprocess.Popen[bytes], url: str) -> None:
        self.url = url
        self.pid = child.pid
        self._child = child

    def stop(self) -> None:
        """End the process, which writes its log, and wait; kill it if it takes too long.

        A second call does nothing.
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
    """Start a server in a new child process and return when it listens.

    Raises TargetError if it does not start.
    """
    command = child_process.command(SERVER_MODULE)
    # The kernel watches the thread that starts the child, not the process.
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
    message = _read_ready_message(child)
    if "url" in message:
        return EmbeddedServer(child, str(message["url"]))
    _kill(child)
    reason = str(message["error"]).removeprefix("error: ")
    problem = f"the embedded endpoint did not start: {reason}"
    raise TargetError(message["code"], problem, SERVER_MODULE)


def _read_ready_message(child: subprocess.Popen[bytes]) -> dict[str, Any]:
    """Read the line with which a child reports its URL or an error, or return an error."""
    assert child.stdout is not None
    deadline_s = time.monotonic() + READY_TIMEOUT_S
    line = b""
    while not line.endswith(b"\n"):
        remaining_s = deadline_s - time.monotonic()
        if remaining_s <= 0 or not select.select([child.stdout], [], [], remaining_s)[0]:
            break
        data = os.read(child.stdout.fileno(), 4096)
        if not data:
            break
        line += data
    message: dict[str, Any] = {"error": "it ended or said nothing", "code": "process_failed"}
    if line.endswith(b"\n"):
        message = {"error": message["error"], **msgspec.json.decode(line)}
    return message


def _kill(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.wait()
    for stream in (child.stdin, child.stdout):
        if stream is not None:
            stream.close()
