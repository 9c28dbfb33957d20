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
from loadgen.cluster.node_agent import AgentLostError, AgentUnreachableError, NodeAgent
from loadgen.core.errors import LoadgenError, UserError, not_installed

HOLDER_TIMEOUT_S = 10.0
"""Longest wait for the lease of another command to name its holder."""
LEASE_END_TIMEOUT_S = 15.0
"""Longest wait for Ray to end the lease of a command that has ended."""
LEASE_POLL_S = 0.2
"""Time between two attempts to get the lease."""
MAX_REASON_CHARACTERS = 300
"""Ray's errors contain tracebacks: only their beginning is shown."""


class RayDriver:
    """The calls that a command may make: connect, find nodes, place agents and call them."""

    def __init__(self) -> None:
        self._actors: list[Any] = []
        self._lease: Any = None

    def connect(self, address: str, holder: str, option: str) -> None:
        """Join the cluster, and reserve it, so that only one command at a time sends a load.

        Args:
            address: The address of the head node, or "auto" for the cluster of this machine.
            holder: This command, as `lease.describe_holder` describes it.
            option: The option of the command line, which errors name.

        Raises:
            UserError: Ray is not installed, there is no cluster, or another command has reserved
                it.
        """
        try:
            import ray
        except ImportError:
            raise not_installed("the package ray is not installed", "ray", option, "ray") from None

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
                "start a cluster with `ray start --head`. Every node needs the Ray "
                "and Python versions of this machine"
            )
            raise UserError(
                "no_cluster", f"cannot join a Ray cluster: {reason}", option, hint
            ) from None

        self._lease = acquire_lease(holder, option)

    def free_cpus(self) -> int:
        """Return the number of CPUs that are free now."""
        import ray

        return int(ray.available_resources().get("CPU", 0))

    def nodes(self) -> tuple[list[dict[str, Any]], dict[str, dict[str, float]]]:
        """Return the nodes as Ray lists them, and the free resources of each node by its id."""
        import ray

        return ray.nodes(), ray._private.state.available_resources_per_node()

    def place_agent(self, node_id: str, cpus: int) -> int:
        """Start an agent on a node, reserve that many CPUs for it, and return its number."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        only_on_node = NodeAffinitySchedulingStrategy(node_id, soft=False)
        options = {"num_cpus": cpus, "max_restarts": 0, "scheduling_strategy": only_on_node}
        self._actors.append(ray.remote(NodeAgent).options(**options).remote())
        return len(self._actors) - 1

    def call_agent(self, agent_number: int, method: str, arguments: tuple[Any, ...]) -> Any:
        """Call a method of an agent and return the future of its result."""
        actor_method = getattr(self._actors[agent_number], method)
        return actor_method.remote(*arguments).future()

    def end_agents(self) -> None:
        """End all agents."""
        import ray

        for actor in self._actors:
            ray.kill(actor, no_restart=True)
        self._actors = []

    def leave(self) -> None:
        """End all agents, give the lease back and leave the cluster."""
        import ray

        self.end_agents()
        if self._lease is not None:
            ray.kill(self._lease, no_restart=True)
        ray.shutdown()


def acquire_lease(holder: str, option: str) -> object:
    """Return the actor that reserves the cluster for this command.

    Only one actor of its name can exist. If another command holds the lease, the error names that
    command. If it has just ended, this waits until Ray has ended its actor.

    Args:
        holder: This command, as `lease.describe_holder` describes it.
        option: The option of the command line, which errors name.

    Raises:
        UserError: Another command has reserved the cluster.
    """
    deadline_s = monotonic() + LEASE_END_TIMEOUT_S
    while True:
        lease_actor = _try_to_create_lease(holder)
        if lease_actor is not None:
            return lease_actor

        other_holder = _find_holder()
        if other_holder is not None:
            break

        if monotonic() >= deadline_s:
            other_holder = "a command that does not respond"
            break

        sleep(LEASE_POLL_S)

    raise UserError(
        "cluster_in_use",
        f"the cluster is in use by {other_holder}",
        option,
        (
            "wait until that command ends, or stop it. Two loads from the same machines "
            "would disturb each other"
        ),
    )


def _try_to_create_lease(holder: str) -> Any | None:
    """Start and return the actor of the lease, or return None if an actor of its name exists.

    The actor runs on this node, so that it ends with this machine.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    this_node_id = ray.get_runtime_context().get_node_id()
    options = {
        "name": lease.NAME,
        "namespace": lease.NAMESPACE,
        "num_cpus": 0,
        "max_restarts": 0,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(this_node_id, soft=False),
    }
    try:
        return ray.remote(lease.Lease).options(**options).remote(holder)
    except ValueError:  # an actor of this name exists
        return None


def _find_holder() -> str | None:
    """Return the command that holds the lease, or None if its actor has ended or ends now."""
    import ray
    from ray.exceptions import RayError

    try:
        actor = ray.get_actor(lease.NAME, namespace=lease.NAMESPACE)
        holder: str = ray.get(actor.holder.remote(), timeout=HOLDER_TIMEOUT_S)
    except (ValueError, RayError):
        return None

    return holder


class CallServer:
    """Carries out the calls of a command until the command ends or sends `leave`.

    It is the other end of `RayClient`. Calls to agents are sent in their order. The other methods
    of `RayDriver` may take long, so each of their calls runs in a thread of its own.
    """

    def __init__(self, pipe: Connection) -> None:
        """Create a server that receives calls from a pipe, and sends the results into it."""
        self._pipe = pipe
        self._driver = RayDriver()
        self._send_lock = threading.Lock()

    def serve(self) -> None:
        """Carry out calls until the command ends, then leave the cluster."""
        try:
            self._receive_calls()
        except (EOFError, OSError):  # the command has ended, which closes the pipe
            pass
        finally:
            # The driver imports Ray when it joins a cluster. Without it, there is none to leave.
            has_imported_ray = "ray" in sys.modules
            if has_imported_ray:
                self._driver.leave()

    def _receive_calls(self) -> None:
        """Receive calls from the command until it sends `leave`.

        A call consists of a number, a method of `RayDriver` and its arguments. The result is sent
        with the same number. A call to an agent is sent at once and returns a future, so it needs
        no thread, and calls to agents keep their order. Other methods may wait for the cluster.

        Raises:
            EOFError: The command has ended without `leave`.
        """
        while True:
            number, method, arguments = self._pipe.recv()
            if method == "leave":
                return

            if method == "call_agent":
                self._call_agent(number, arguments)
                continue

            call_thread = threading.Thread(
                target=self._call_driver, args=(number, method, arguments), daemon=True
            )
            call_thread.start()

    def _call_agent(self, number: int, arguments: tuple[Any, ...]) -> None:
        """Send a call to an agent, and its result to the command as soon as it comes."""
        try:
            future = self._driver.call_agent(*arguments)
        except Exception as error:
            self._send_error(number, error)
        else:
            future.add_done_callback(lambda done: self._send_result(number, done.result))

    def _call_driver(self, number: int, method: str, arguments: tuple[Any, ...]) -> None:
        """Carry out a call of this process and send its result to the command."""
        self._send_result(number, lambda: getattr(self._driver, method)(*arguments))

    def _send_result(self, number: int, get_result: Callable[[], Any]) -> None:
        """Send what `get_result` returns as the result of a call, or the error that it raises."""
        try:
            data = pickle.dumps((number, True, get_result()))
        except Exception as error:
            self._send_error(number, error)
        else:
            self._send(data)

    def _send_error(self, number: int, error: Exception) -> None:
        """Send an error as the result of a call, in the form that the command can unpickle."""
        self._send(pickle.dumps((number, False, _replace_ray_error(error))))

    def _send(self, data: bytes) -> None:
        with self._send_lock:
            self._pipe.send_bytes(data)


def _replace_ray_error(error: Exception) -> Exception:
    """Return an error that can be sent to the command that made the call.

    The command's process does not import Ray, so it could not unpickle an error class of Ray. An
    error of this project is returned unchanged. An error of Ray becomes AgentUnreachableError if
    a later call may succeed, else AgentLostError. Any other error becomes RuntimeError.
    """
    if isinstance(error, LoadgenError):
        return error

    if "ray" in sys.modules:
        from ray.exceptions import ActorUnavailableError, RayError

        if isinstance(error, ActorUnavailableError):
            return AgentUnreachableError(str(error))
        if isinstance(error, RayError):
            return AgentLostError(f"{type(error).__name__}: {error}")

    return RuntimeError(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    CallServer(Connection(int(sys.argv[1]))).serve()
    os._exit(0)  # without waiting for the threads of Ray
