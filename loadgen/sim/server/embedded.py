"""The embedded endpoint as a child process: started, waited for, stopped. It serves whoever has no server to measure.

The child lives as long as its standard input is open at this end, so no end of the parent leaves it behind; on Linux it
is also told of the parent's death, since a forked worker may hold the same end open.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
import time
from types import TracebackType

import msgspec

from loadgen.errors import TargetError
from loadgen.sim.server.options import Options

READY_S = 15.0  # a start takes a fifth of a second; a machine that swaps takes longer
STOP_S = 10.0  # writing the log of a long run


class Embedded:
    """A running endpoint: `url` to send to, `pid` of its process. Also a context manager."""

    __slots__ = ("_child", "pid", "url")

    def __init__(self, child: subprocess.Popen[bytes], url: str) -> None:
        self._child, self.url, self.pid = child, url, child.pid

    def stop(self) -> None:
        """Ask it to end, which writes its log, and wait; killed when it does not. Stopping twice is harmless."""
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

    def __enter__(self) -> Embedded:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def start(options: Options | None = None) -> Embedded:
    """Start the endpoint in a clean child process and return when it listens. Raises TargetError when it does not."""
    command = [sys.executable, "-P", "-m", "loadgen.sim.server.process"]  # -P: no module of the folder one stands in
    if threading.current_thread() is threading.main_thread():  # the kernel means the thread, not the process
        command.append("--die-with-parent")
    child = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is for the run, which still needs the endpoint to drain
    )
    assert child.stdin is not None and child.stdout is not None
    try:
        child.stdin.write((options or Options()).to_json().encode() + b"\n")
        child.stdin.flush()
    except BrokenPipeError:
        pass  # it is dead, as the missing ready line will show
    line, until = b"", time.monotonic() + READY_S
    while not line.endswith(b"\n"):
        left = until - time.monotonic()
        if left <= 0 or not select.select([child.stdout], [], [], left)[0]:
            break
        piece = os.read(child.stdout.fileno(), 4096)
        if not piece:
            break
        line += piece
    ready: dict[str, object] = {}
    if line.endswith(b"\n"):
        ready = msgspec.json.decode(line)
    if "url" not in ready:
        child.kill()
        child.wait()
        child.stdin.close()
        child.stdout.close()
        what = str(ready.get("error", "it ended or said nothing")).removeprefix("error: ")
        raise TargetError(f"the embedded endpoint did not start: {what}", "loadgen.sim.server.process")
    return Embedded(child, str(ready["url"]))
