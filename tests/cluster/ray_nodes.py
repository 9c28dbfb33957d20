"""A real Ray cluster on this machine, for tests."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

SMALL: dict[str, Any] = {
    "num_cpus": 1,
    "include_dashboard": False,
    "object_store_memory": 80_000_000,
}
HEAD = SMALL | {"no_monitor": True, "include_log_monitor": False}
"""Without two processes that work all the time: nothing is scaled, and no log is read."""

AGENT_START_MS = "120000"
"""Time that the agents of a node have to start (`RAY_agent_register_timeout_ms`), else 30 s."""

START_ATTEMPTS = 3
"""Attempts to start a cluster. Ray ends a node whose agents are not ready after 15 s, as on a busy
machine. The limit is fixed (`WaitForPersistedPort`, src/ray/util/port_persistence.h, Ray 2.55)."""


class NodeEndedError(Exception):
    """Ray has ended a node whose agents were not ready in time."""


@contextmanager
def started(*environments: Mapping[str, str], head_cpus: int = 1) -> Iterator[Any]:
    """Start a Ray head and one node with one CPU for each environment, and stop them at the end."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'loadgen[ray]'")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_agent_register_timeout_ms", AGENT_START_MS)
        scratch = tempfile.mkdtemp(prefix="lg", dir="/tmp")  # short: sockets lie in it
        patch.setenv("TMPDIR", scratch)  # of the nodes, and so of their workers
        (Path(scratch) / "ray").mkdir()
        patch.setenv("PYTHONPATH", hide_slow_import(Path(scratch)), prepend=os.pathsep)
        head = HEAD | {"temp_dir": f"{scratch}/ray", "num_cpus": head_cpus}
        try:
            cluster = start_cluster(head, environments)
            try:
                yield cluster
            finally:
                cluster.shutdown()
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def start_cluster(head: Mapping[str, Any], environments: Sequence[Mapping[str, str]]) -> Any:
    """Start a head and one node for each environment, again if Ray has ended one of them."""
    for _ in range(START_ATTEMPTS - 1):
        with suppress(NodeEndedError):
            return try_to_start_cluster(head, environments)
    return try_to_start_cluster(head, environments)


def try_to_start_cluster(head: Mapping[str, Any], environments: Sequence[Mapping[str, str]]) -> Any:
    """Start a head and one node for each environment.

    Raises NodeEndedError if Ray has ended a node because its agents were not ready.
    """
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    try:
        cluster.add_node(**head)
        for env in environments:
            cluster.add_node(**SMALL, env_vars=dict(env))
    except Exception as error:
        cluster.shutdown()
        if "timed out during startup" in str(error):  # Ray has no type for this error
            raise NodeEndedError from error
        raise
    return cluster


def hide_slow_import(scratch: Path) -> str:
    """Return a directory for PYTHONPATH in which a slow optional module cannot be imported.

    Ray imports jsonschema, which imports rfc3987_syntax if it is installed, and that builds a
    grammar for 3 CPU-seconds in each process of Ray.
    """
    directory = scratch / "hidden"
    directory.mkdir()
    (directory / "rfc3987_syntax.py").write_text("raise ImportError\n")
    return str(directory)


def kill(cluster: Any) -> str:
    """Kill the youngest node outright; returns its id."""
    victim = list(cluster.worker_nodes)[-1]
    cluster.remove_node(victim, allow_graceful=False)
    return str(victim.node_id)
