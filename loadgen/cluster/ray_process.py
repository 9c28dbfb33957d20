"""The process that is connected to a Ray cluster for a command (`ray_client.py`). IO.

It is the only module that imports Ray. Ray places the actors and carries the calls to them; no
request passes through it. The job contains API keys, so it is sent in arguments that are small
enough to go with the call itself, and never through Ray's object store, which may be written to
disk.
"""

from __future__ import annotations

import logging
import os
import pickle
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from time import monotonic, sleep
from typing import Any

from loadgen.cluster import lease
from loadgen.cluster.node_agent import AwayError, GoneError, NodeAgent
from loadgen.core.errors import LoadgenError, UserError, not_installed

ANSWER_S = 10.0
"""Longest wait for the lease of another driver to name its holder."""
FREED_S = 15.0
"""Longest wait for Ray to end the lease of a driver that has ended."""
MAX_REASON_CHARACTERS = 300
"""Ray's errors contain tracebacks: only their beginning is shown."""


class RayDriver:
    """The calls that a command may make: connect, find nodes, place agents and call them."""

    def __init__(self) -> None:
        self._actors: list[Any] = []
        self._lease: Any = None

    def connect(self, address: str, holder: str, where: str) -> None:
        """Join the cluster and reserve it.

        Raises UserError if there is no cluster, or if another command has reserved it.
        """
        try:
            import ray
        except ImportError:
            raise not_installed("Ray is not installed here", "ray", where, "ray") from None
        try:
            ray.init(
                address=address,
                log_to_driver=False,
                logging_level=logging.ERROR,
                namespace=lease.NAMESPACE,
            )
        except (ConnectionError, RuntimeError, ValueError) as error:
            reason = " ".join(str(error).split())[:MAX_REASON_CHARACTERS]
            hint = (
                "start it with `ray start --head`; every node needs the same Ray and Python as here"
            )
            raise UserError(
                "no_cluster", f"cannot join a Ray cluster: {reason}", where, hint
            ) from None
        self._lease = take_lease(holder, where)

    def free_cpus(self) -> int:
        """Return the number of CPUs that are free now."""
        import ray

        return int(ray.available_resources().get("CPU", 0))

    def nodes(self) -> tuple[list[dict[str, Any]], dict[str, dict[str, float]]]:
        """Return the nodes as Ray lists them, and the free resources of each node by its id."""
        import ray

        return ray.nodes(), ray._private.state.available_resources_per_node()

    def place_agent(self, node: str, cpus: int) -> int:
        """Start an agent on a node and return its number."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        there = NodeAffinitySchedulingStrategy(node, soft=False)
        options = {"num_cpus": cpus, "max_restarts": 0, "scheduling_strategy": there}
        self._actors.append(ray.remote(NodeAgent).options(**options).remote())
        return len(self._actors) - 1

    def call_agent(self, agent: int, method: str, arguments: tuple[Any, ...]) -> Any:
        """Call a method of an agent and return the future of its result."""
        return getattr(self._actors[agent], method).remote(*arguments).future()

    def end_agents(self) -> None:
        """End all agents."""
        import ray

        ended, self._actors = self._actors, []
        for actor in ended:
            ray.kill(actor, no_restart=True)

    def leave(self) -> None:
        """End all, give the lease back and leave the cluster."""
        import ray

        self.end_agents()
        if self._lease is not None:
            ray.kill(self._lease, no_restart=True)
        ray.shutdown()


def take_lease(holder: str, where: str) -> Any:
    """Return the actor that reserves the cluster for a command.

    Raises UserError if another command has reserved it.
    """
    import ray
    from ray.exceptions import RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    options = {
        "name": lease.NAME,
        "namespace": lease.NAMESPACE,
        "num_cpus": 0,
        "max_restarts": 0,
        "scheduling_strategy": here,
    }
    deadline = monotonic() + FREED_S
    while True:
        try:
            return ray.remote(lease.Lease).options(**options).remote(holder)
        except ValueError:  # another one has the name
            pass
        who = "a command that does not answer"
        try:
            other = ray.get_actor(lease.NAME, namespace=lease.NAMESPACE)
            who = ray.get(other.holder.remote(), timeout=ANSWER_S)
        except (ValueError, RayError):  # it has ended, or ends
            if monotonic() < deadline:
                sleep(0.2)
                continue
        hint = (
            "wait until it has ended, or end it: "
            "two loads from the same machines measure each other"
        )
        raise UserError("cluster_in_use", f"the cluster is in use by {who}", where, hint)


class CallServer:
    """Carries out the calls of a command until it ends or says `leave`.

    Calls to agents are sent in their order. The other methods of `RayDriver` may take long, so each
    of their calls runs in a thread of its own.
    """

    def __init__(self, calls: Connection) -> None:
        self._calls = calls
        self._driver = RayDriver()
        self._send_lock = threading.Lock()

    def serve(self) -> None:
        """Receive calls and send their results."""
        try:
            while True:
                number, method, arguments = self._calls.recv()
                if method == "leave":
                    return
                if method == "call_agent":
                    self._call_agent(number, arguments)
                else:
                    call = threading.Thread(
                        target=self._call_driver, args=(number, method, arguments), daemon=True
                    )
                    call.start()
        except (EOFError, OSError):
            pass  # the command has ended
        finally:
            if "ray" in sys.modules:
                self._driver.leave()

    def _call_agent(self, number: int, arguments: tuple[Any, ...]) -> None:
        try:
            future = self._driver.call_agent(*arguments)
        except Exception as error:
            self._send_error(number, error)
        else:
            future.add_done_callback(lambda done: self._send_result(number, done.result))

    def _call_driver(self, number: int, method: str, arguments: tuple[Any, ...]) -> None:
        self._send_result(number, lambda: getattr(self._driver, method)(*arguments))

    def _send_result(self, number: int, get_result: Callable[[], Any]) -> None:
        try:
            data = pickle.dumps((number, True, get_result()))
        except Exception as error:
            self._send_error(number, error)
        else:
            self._send(data)

    def _send_error(self, number: int, error: Exception) -> None:
        self._send(pickle.dumps((number, False, _without_ray(error))))

    def _send(self, data: bytes) -> None:
        with self._send_lock:
            self._calls.send_bytes(data)


def _without_ray(error: Exception) -> Exception:
    """Return an error that the command can unpickle, because it does not import Ray."""
    if isinstance(error, LoadgenError):
        return error
    if "ray" in sys.modules:
        from ray.exceptions import ActorUnavailableError, RayError

        if isinstance(error, ActorUnavailableError):
            return AwayError(str(error))
        if isinstance(error, RayError):
            return GoneError(f"{type(error).__name__}: {error}")
    return RuntimeError(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    CallServer(Connection(int(sys.argv[1]))).serve()
    os._exit(0)  # without waiting for the threads of Ray
