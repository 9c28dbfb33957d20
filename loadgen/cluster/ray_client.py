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
from multiprocessing.connection import Connection
from typing import Any

from loadgen.core import child_process
from loadgen.core.errors import TargetError


class ClusterLostError(TargetError):
    """The cluster cannot be reached any more, and no worker on it."""


class RayClient:
    """Sends calls to the methods of `RayDriver` in the child process.

    Each call has a number, and the child process sends the result with that number. A thread
    receives the results and completes the futures of the calls.
    """

    def __init__(self, address: str) -> None:
        """Start the child process, which can use Ray, and a thread that receives its results.

        The child process joins no cluster yet. The first call should be `connect`, which joins one.

        Args:
            address: The value of the option `--ray`. Error messages name the option with it.
        """
        self._option = f"--ray {address}"
        self._pipe, child_end = Pipe()
        self._process = _start_ray_process(child_end)
        child_end.close()  # the child process has its own copy
        self._call_numbers = itertools.count()
        self._futures_of_calls: dict[int, Future[Any]] = {}
        self._has_child_ended = False

        # Protects `_call_numbers`, `_futures_of_calls`, `_has_child_ended` and the order of
        # messages in the pipe.
        self._lock = threading.Lock()
        threading.Thread(target=self._receive_results, daemon=True).start()

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        """Send a call of a method of `RayDriver`, and return the future of its result.

        The future fails with ClusterLostError if the child process has ended or ends meanwhile.
        """
        future: Future[Any] = Future()
        with self._lock:
            number = next(self._call_numbers)
            self._futures_of_calls[number] = future
            try:
                self._pipe.send((number, method, arguments))
            except OSError:  # the child process has closed its end of the pipe
                self._has_child_ended = True

            if self._has_child_ended:
                del self._futures_of_calls[number]
                future.set_exception(self._cluster_lost_error())

        return future

    def _receive_results(self) -> None:
        """Complete the future of each call whose result the child process sends, until it ends.

        This is the body of the receiving thread.
        """
        with contextlib.suppress(EOFError, OSError):
            while True:
                number, has_succeeded, value_or_error = self._pipe.recv()
                with self._lock:
                    future = self._futures_of_calls.pop(number)

                if not future.set_running_or_notify_cancel():
                    continue  # the caller waits no longer for this result

                if has_succeeded:
                    future.set_result(value_or_error)
                else:
                    future.set_exception(value_or_error)
        self._fail_pending_calls()

    def _fail_pending_calls(self) -> None:
        """Let all calls fail that wait for a result, because the child process has ended."""
        with self._lock:
            self._has_child_ended = True
            futures = list(self._futures_of_calls.values())
            self._futures_of_calls.clear()
        for future in futures:
            if future.set_running_or_notify_cancel():
                future.set_exception(self._cluster_lost_error())

    def _cluster_lost_error(self) -> ClusterLostError:
        """Return the error of a call whose result cannot come, with how to start the cluster."""
        return ClusterLostError(
            "node_lost",
            (
                "the connection to the Ray cluster was lost: its head node, or its "
                "process on this machine, has ended"
            ),
            self._option,
            (
                "start it again: ray start --head here, then ray start "
                "--address=HEAD:6379 on the other machines"
            ),
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


def _start_ray_process(pipe_end: Connection) -> subprocess.Popen[bytes]:
    """Start the child process, which receives calls from one end of a pipe.

    Its output is discarded, because Ray writes its messages to log files as well. It has a session
    of its own, so that Ctrl-C reaches the command only, which ends the run in order.
    """
    pipe_descriptor = pipe_end.fileno()
    return subprocess.Popen(
        child_process.command("loadgen.cluster.ray_process", str(pipe_descriptor)),
        pass_fds=(pipe_descriptor,),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


class RayAgent:
    """Calls the methods of a `NodeAgent` that Ray has placed on a node."""

    def __init__(self, client: RayClient, agent_number: int) -> None:
        """Create it from the number that `RayDriver.place_agent` returned."""
        self._client = client
        self._agent_number = agent_number

    def call(self, method: str, *arguments: Any) -> asyncio.Future[Any]:
        """Call a method of the agent now and return the future of its result."""
        result = asyncio.wrap_future(
            self._client.call("call_agent", self._agent_number, method, arguments)
        )
        result.add_done_callback(_retrieve_exception)
        return result


def _retrieve_exception(result: asyncio.Future[object]) -> None:
    """Mark the exception of a result as seen, because not every caller awaits the result."""
    if not result.cancelled():
        result.exception()
