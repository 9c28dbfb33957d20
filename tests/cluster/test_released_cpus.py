"""Agents that are placed again, on a cluster that counts the CPUs of ended ones as free later."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any, cast

import pytest
from expected_errors import refused

from loadgen.cluster.ray_client import RayClient
from loadgen.cluster.ray_nodes import NodeHistory, RayNodes
from loadgen.cluster.worker_group import WorkerGroup
from loadgen.core.errors import UserError
from loadgen.core.execution.events import RunEvent

NODE_ID = "a" * 9


class SlowCluster:
    """A client of a cluster with one CPU.

    The cluster counts the CPU of an ended agent as free after two queries.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._used_cpus = 0
        self._queries_until_free: int | None = None

    def call(self, method: str, *_arguments: object) -> Future[Any]:
        results = {
            "nodes": self._list_nodes,
            "place_agent": self._place_agent,
            "end_agents": self._end_agents,
            "free_cpus": self._query_free_cpus,
        }
        future: Future[Any] = Future()
        future.set_result(results[method]())
        return future

    def _list_nodes(self) -> tuple[list[dict[str, Any]], dict[str, dict[str, float]]]:
        node = {
            "NodeID": NODE_ID,
            "NodeManagerHostname": "vm",
            "NodeManagerAddress": "127.0.0.1",
            "NodeManagerPort": self._port,
            "Alive": True,
            "Resources": {"CPU": 1.0},
        }
        return [node], {NODE_ID: {"CPU": 1.0 - self._used_cpus}}

    def _place_agent(self) -> int:
        self._used_cpus = 1
        return 0

    def _end_agents(self) -> None:
        self._queries_until_free = 2

    def _query_free_cpus(self) -> int:
        if self._queries_until_free is not None:
            self._queries_until_free -= 1
            if self._queries_until_free == 0:
                self._used_cpus = 0
        return 1 - self._used_cpus


@pytest.fixture
def nodes() -> Iterator[RayNodes]:
    with socket.create_server(("127.0.0.1", 0)) as node_manager:
        client = SlowCluster(node_manager.getsockname()[1])
        yield RayNodes(cast("RayClient", client), "auto", NodeHistory())


def ignore(event: RunEvent) -> None:
    """Receive an event."""


def test_agents_are_restarted_once_their_cpus_are_free(nodes: RayNodes) -> None:
    async def place_twice() -> int:
        await nodes.place_agents(1, ignore)
        await WorkerGroup(nodes)._end_all()
        return len(await nodes.place_agents(1, ignore))

    assert asyncio.run(place_twice()) == 1


def test_cpus_of_running_agents_are_not_free(nodes: RayNodes) -> None:
    async def place_twice() -> None:
        await nodes.place_agents(1, ignore)
        await nodes.place_agents(1, ignore)

    with refused(UserError, "resource_limit"):
        asyncio.run(place_twice())
