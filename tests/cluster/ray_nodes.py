"""A real Ray cluster on this machine, for tests."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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
        cluster = Cluster(
            initialize_head=True,
            head_node_args=HEAD | {"temp_dir": f"{scratch}/ray", "num_cpus": head_cpus},
        )
        try:
            for env in environments:
                cluster.add_node(**SMALL, env_vars=dict(env))
            yield cluster
        finally:
            cluster.shutdown()
            shutil.rmtree(scratch, ignore_errors=True)


def hide_slow_import(scratch: Path) -> str:
    """Return a directory for PYTHONPATH in which a slow optional module cannot be imported.

    Ray imports jsonschema, which imports rfc3987_syntax if it is installed, and that builds a
    grammar for 3 CPU-seconds in each process of Ray. A node ends if its agents are not ready after
    15 s (`WaitForPersistedPort` in src/ray/util/port_persistence.h of Ray 2.55): no option changes
    it.
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
