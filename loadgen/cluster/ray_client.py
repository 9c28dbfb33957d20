"""The connection of a command to the process that speaks with Ray (`ray_process.py`). IO.

Ray ends the process that is connected to a cluster, without a message, when the head of the cluster
or the node of this machine dies. So that process is a child of the command, which goes on and
reports what was lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import subprocess
import threading
from concurrent.futures import Future
from multiprocessing import Pipe
from typing import Any

from loadgen.core import child_process
from loadgen.core.errors import TargetError


class ClusterLostError(TargetError):
    """The cluster cannot be reached any more, and no worker on it."""


class RayClient:
    """Sends calls to the methods of `RayDriver` in the child process."""

    def __init__(self, address: str) -> None:
        self._flag = f"--ray {address}"
        self._pipe, child_end = Pipe()
        self._process = subprocess.Popen(
            child_process.command("loadgen.cluster.ray_process", str(child_end.fileno())),
            pass_fds=(child_end.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,  # Ray writes its messages to log files as well
            start_new_session=True,  # the run handles Ctrl-C
        )
        child_end.close()
        self._call_numbers = itertools.count()
        self._lock = threading.Lock()
        self._pending: dict[int, Future[Any]] = {}
        self._is_closed = False
        threading.Thread(target=self._receive_results, daemon=True).start()

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        """Call a method of `RayDriver` and return the future of its result.

        The result is ClusterLostError if the child process has ended.
        """
        result: Future[Any] = Future()
        with self._lock:
            number = next(self._call_numbers)
            self._pending[number] = result
            try:
                self._pipe.send((number, method, arguments))
            except OSError:
                self._is_closed = True
            if self._is_closed:
                del self._pending[number]
                result.set_exception(self._cluster_lost())
        return result

    def _receive_results(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                number, is_value, value = self._pipe.recv()
                with self._lock:
                    result = self._pending.pop(number)
                if result.set_running_or_notify_cancel():
                    if is_value:
                        result.set_result(value)
                    else:
                        result.set_exception(value)
        self._fail_pending()

    def _fail_pending(self) -> None:
        """Let all calls fail that wait for a result: the child process has ended."""
        with self._lock:
            self._is_closed = True
            pending = list(self._pending.values())
            self._pending.clear()
        for result in pending:
            if result.set_running_or_notify_cancel():
                result.set_exception(self._cluster_lost())

    def _cluster_lost(self) -> ClusterLostError:
        return ClusterLostError(
            "node_lost",
            "the Ray cluster is lost: its head, or its node on this machine, has ended",
            self._flag,
            "start it again: ray start --head; "
            "then on the other machines ray start --address=HEAD:6379",
        )

    def close(self) -> None:
        """Leave the cluster and end the child process."""
        with contextlib.suppress(OSError):  # it has ended by itself
            self._pipe.send((next(self._call_numbers), "leave", ()))
        try:
            self._process.wait(child_process.LEAVE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class RayAgent:
    """A `NodeAgent` that Ray has placed on a node."""

    def __init__(self, client: RayClient, number: int) -> None:
        self._client = client
        self._number = number

    def call(self, method: str, *arguments: Any) -> asyncio.Future[Any]:
        """Call a method of the agent now and return the future of its result."""
        result = asyncio.wrap_future(
            self._client.call("call_agent", self._number, method, arguments)
        )
        result.add_done_callback(_retrieve_exception)
        return result


def _retrieve_exception(result: asyncio.Future[Any]) -> None:
    """Mark the exception of a result as seen, because not every caller awaits the result."""
    if not result.cancelled():
        result.exception()
