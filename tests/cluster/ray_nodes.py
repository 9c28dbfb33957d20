"""A real Ray cluster on this machine, for tests."""

from __future__ import annotations

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


@contextmanager
def started(*environments: Mapping[str, str], head_cpus: int = 1) -> Iterator[Any]:
    """Start a Ray head and one node with one CPU for each environment, and stop them at the end."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'loadgen[ray]'")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        from ray.cluster_utils import Cluster

        scratch = tempfile.mkdtemp(prefix="lg", dir="/tmp")  # short: sockets lie in it
        patch.setenv("TMPDIR", scratch)  # of the nodes, and so of their workers
        (Path(scratch) / "ray").mkdir()
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


def kill(cluster: Any) -> str:
    """Kill the youngest node outright; returns its id."""
    victim = list(cluster.worker_nodes)[-1]
    cluster.remove_node(victim, allow_graceful=False)
    return str(victim.node_id)
