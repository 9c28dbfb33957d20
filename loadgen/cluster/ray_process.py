"""The process that speaks with Ray for a command. IO.

Where the head of a cluster dies, or the node of this machine, Ray ends the process that is connected to it, without a
word. So that is one beside the command (`ray.py`), which goes on. This is the only module that imports Ray.

Ray places the actors and carries the calls; no request passes through it. The job contains API keys. So it is sent in
arguments small enough to go with the call itself, never through Ray's object store, which may be written to disk.
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
from loadgen.core.errors import Fault, UserError, not_installed

ANSWER_S = 10.0  # longest wait for the lease of another driver to say whose it is
FREED_S = 15.0  # longest wait for Ray to end the lease of a driver that has ended


class RayDriver:
    """What the command asks for: each method is a question, and its name goes before the arguments."""

    def __init__(self) -> None:
        self._actors: list[Any] = []
        self._lease: Any = None

    def connect(self, address: str, holder: str, where: str) -> None:
        """Join the cluster and take its lease. Raises UserError if there is none, or another command has it."""
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
            what = " ".join(str(error).split())[:300]
            hint = "start one: ray start --head; the same Ray and Python on every node and here"
            raise UserError("no_cluster", f"no Ray cluster to join: {what}", where, hint) from None
        self._lease = take_lease(holder, where)

    def cores(self) -> int:
        """Number of CPUs that are free now."""
        import ray

        return int(ray.available_resources().get("CPU", 0))

    def nodes(self) -> tuple[list[dict[str, Any]], dict[str, dict[str, float]]]:
        """The nodes as Ray lists them, and of each what is free."""
        import ray

        return ray.nodes(), ray._private.state.available_resources_per_node()

    def place(self, node: str, cpus: int) -> int:
        """Start an agent on a node; its number."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        there = NodeAffinitySchedulingStrategy(node, soft=False)
        options = {"num_cpus": cpus, "max_restarts": 0, "scheduling_strategy": there}
        self._actors.append(ray.remote(NodeAgent).options(**options).remote())
        return len(self._actors) - 1

    def call(self, agent: int, method: str, arguments: tuple[Any, ...]) -> Any:
        """What an agent is asked: the answer comes as a future of Ray's."""
        return getattr(self._actors[agent], method).remote(*arguments).future()

    def end(self) -> None:
        """End all agents."""
        import ray

        ended, self._actors = self._actors, []
        for actor in ended:
            ray.kill(actor, no_restart=True)

    def leave(self) -> None:
        """End all, give the lease back and leave the cluster."""
        import ray

        self.end()
        if self._lease is not None:
            ray.kill(self._lease, no_restart=True)
        ray.shutdown()


def take_lease(holder: str, where: str) -> Any:
    """The actor that holds the cluster for a command. Raises UserError if another one has it."""
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
    given_up_at = monotonic() + FREED_S
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
            if monotonic() < given_up_at:
                sleep(0.2)
                continue
        hint = "wait until it has ended, or end it: two loads from the same machines measure each other"
        raise UserError("cluster_in_use", f"the cluster is in use by {who}", where, hint)


def answer(calls: Connection) -> None:
    """Answer the command until it has ended or says `leave`. Only calls to agents go one after the other."""
    driver, sending = RayDriver(), threading.Lock()

    def reply(number: int, work: Callable[[], Any]) -> None:
        try:
            data = pickle.dumps((number, True, work()))
        except Exception as error:
            data = pickle.dumps((number, False, _told(error)))
        with sending:
            calls.send_bytes(data)

    def carry_out(number: int, what: str, arguments: tuple[Any, ...]) -> None:
        reply(number, lambda: getattr(driver, what)(*arguments))

    try:
        while True:
            number, what, arguments = calls.recv()
            if what == "call":
                try:
                    future = driver.call(*arguments)
                except Exception as error:
                    reply(number, _raising(error))
                else:
                    future.add_done_callback(lambda done, number=number: reply(number, done.result))
            elif what == "leave":
                return
            else:
                threading.Thread(
                    target=carry_out, args=(number, what, arguments), daemon=True
                ).start()
    except (EOFError, OSError):
        pass  # the command has ended
    finally:
        if "ray" in sys.modules:
            driver.leave()


def _raising(error: Exception) -> Callable[[], Any]:
    def again() -> Any:
        raise error

    return again


def _told(error: Exception) -> Exception:
    """An error as the command knows it, which has no Ray."""
    if isinstance(error, Fault):
        return error
    if "ray" in sys.modules:
        from ray.exceptions import ActorUnavailableError, RayError

        if isinstance(error, ActorUnavailableError):
            return AwayError(str(error))
        if isinstance(error, RayError):
            return GoneError(f"{type(error).__name__}: {error}")
    return RuntimeError(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    answer(Connection(int(sys.argv[1])))
    os._exit(0)  # Ray's threads are of no use any more
