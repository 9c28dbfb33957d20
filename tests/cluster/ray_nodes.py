"""A real Ray cluster on this machine, for tests."""

from __future__ import annotations

import os
import random
import secrets
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping
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

SESSION = "session_of_tests"
"""The folder of a cluster in its folder of temporary files."""

AGENT_PORT_FILES = ("dashboard_agent_listen_port", "metrics_agent_port", "metrics_export_port")
"""The files of a node with the ports of its agents for dashboards, which no test uses."""

PORTS = range(20_000, 32_000)
"""Ports that Linux gives to no other socket by itself (`ip_local_port_range`: 32768 on)."""


@contextmanager
def started(*environments: Mapping[str, str], head_cpus: int = 1) -> Iterator[Any]:
    """Start a Ray head and one node with one CPU for each environment, and stop them at the end."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'loadgen[ray]'")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_agent_register_timeout_ms", AGENT_START_MS)
        from ray.cluster_utils import Cluster

        scratch = tempfile.mkdtemp(prefix="lg", dir="/tmp")  # short: sockets lie in it
        patch.setenv("TMPDIR", scratch)  # of the nodes, and so of their workers
        (Path(scratch) / "ray").mkdir()
        patch.setenv("PYTHONPATH", hide_slow_import(Path(scratch)), prepend=os.pathsep)
        session_dir = Path(scratch) / "ray" / SESSION
        session_dir.mkdir()
        head = HEAD | {"temp_dir": f"{scratch}/ray", "session_name": SESSION, "num_cpus": head_cpus}
        cluster = Cluster()
        try:
            cluster.add_node(**head, **prepare_node(session_dir, {}))
            for env in environments:
                add_node(cluster, env)
            yield cluster
        finally:
            cluster.shutdown()
            shutil.rmtree(scratch, ignore_errors=True)


def add_node(cluster: Any, env: Mapping[str, str]) -> None:
    """Start a node with one CPU and this environment."""
    session_dir = Path(cluster.head_node.get_session_dir_path())
    cluster.add_node(**SMALL, **prepare_node(session_dir, env))


def prepare_node(session_dir: Path, env: Mapping[str, str]) -> dict[str, Any]:
    """Return parameters of a node that does not wait for its agents, and write its port files.

    A node ends if its agents have not written their ports after 15 s, which they cannot on a busy
    machine. No option changes that (`WaitForPersistedPort` in src/ray/util/port_persistence.h of
    Ray 2.55). So the files are written here, with the number for an agent that is not used.
    """
    node_id = secrets.token_hex(28)
    for name in AGENT_PORT_FILES:
        (session_dir / f"{name}_{node_id}").write_text("-1")
    return {
        "env_vars": {**env, "RAY_OVERRIDE_NODE_ID_FOR_TESTING": node_id},
        "runtime_env_agent_port": choose_free_port(),
    }


def choose_free_port() -> int:
    """Return a port that nothing listens at, and that Linux gives to nothing else meanwhile."""
    for port in random.sample(PORTS, len(PORTS)):
        with socket.socket() as candidate, suppress(OSError):
            candidate.bind(("", port))
            return port
    raise AssertionError("no free port")


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
