"""The embedded endpoint as a child process: start it, wait for it, stop it. For runs without a real server.

The child runs as long as the parent keeps the child's standard input open, so it ends however the parent ends. On Linux
it also gets a signal when the parent dies, because a forked worker may keep the same pipe open.
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

READY_S = 60.0  # a start takes 0.2 s; longer on a machine that swaps, or that has ten times more work than it can do
STOP_S = 10.0  # time to write the log of a long run


class EmbeddedServer:
    """A running endpoint: `url` to send requests to, `pid` of its process. Also a context manager."""

    __slots__ = ("_child", "pid", "url")

    def __init__(self, child: subprocess.Popen[bytes], url: str) -> None:
        self._child, self.url, self.pid = child, url, child.pid

    def stop(self) -> None:
        """End the process, which writes its log, and wait; kill it after STOP_S. A second call does nothing."""
        child = self._child
        if child.stdin is not None and not child.stdin.closed:
            child.stdin.close()
        try:
            child.wait(STOP_S)
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
    """Start the endpoint in a new child process and return when it listens. Raises TargetError if it does not start."""
    command = child_process.command("loadgen.sim.server.process")
    if (
        threading.current_thread() is threading.main_thread()
    ):  # the kernel watches the starting thread, not the process
        command.append("--die-with-parent")
    child = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C stops the run, which still needs the endpoint to drain
    )
    return ready(child, options or Options())


def ready(child: subprocess.Popen[bytes], options: Options) -> EmbeddedServer:
    """Tell a child that has just been started its options, and wait until it listens; as `start` does."""
    assert child.stdin is not None and child.stdout is not None
    try:
        child.stdin.write(msgspec.json.encode(options) + b"\n")
        child.stdin.flush()
    except BrokenPipeError:
        pass  # the child has ended; the missing ready line reports it
    line, deadline = b"", time.monotonic() + READY_S
    while not line.endswith(b"\n"):
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0 or not select.select([child.stdout], [], [], remaining_s)[0]:
            break
        piece = os.read(child.stdout.fileno(), 4096)
        if not piece:
            break
        line += piece
    told: dict[str, Any] = {"code": "process_failed"}
    if line.endswith(b"\n"):
        told = msgspec.json.decode(line)
    if "url" not in told:
        child.kill()
        child.wait()
        child.stdin.close()
        child.stdout.close()
        reason = str(told.get("error", "it ended or said nothing")).removeprefix("error: ")
        what = f"the embedded endpoint did not start: {reason}"
        raise TargetError(told["code"], what, "loadgen.sim.server.process")
    return EmbeddedServer(child, str(told["url"]))
