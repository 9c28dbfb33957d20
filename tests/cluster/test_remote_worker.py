"""A worker on another node whose host ends it: what the driver makes of the worker's last line."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from loadgen.cluster.node_agent import WorkerFileCopy, WorkerUpdate
from loadgen.cluster.placement import ClusterNode
from loadgen.cluster.ray_client import RayAgent
from loadgen.cluster.remote_worker import RemoteWorker
from loadgen.core.errors import TargetError
from loadgen.core.execution.backends.worker import READY, HostError
from loadgen.core.execution.shared_counters import SharedCounters

NODE = ClusterNode(id="n", name="n", address="10.0.0.7", port=1, free_cpus=1, total_cpus=1)
FULL_DISK = msgspec.json.encode(
    HostError(errno=errno.ENOSPC, strerror=os.strerror(errno.ENOSPC), filename="w0.rows")
)


class LineAgent:
    """An agent in memory, whose worker has written some lines and ended."""

    def __init__(self, lines: Sequence[bytes], board: bytes) -> None:
        self._lines = list(lines)
        self._board = board

    def call(self, name: str, *_arguments: Any) -> asyncio.Future[WorkerUpdate]:
        assert name == "read_update"
        future: asyncio.Future[WorkerUpdate] = asyncio.get_running_loop().create_future()
        future.set_result(
            WorkerUpdate([], self._lines, self._board, has_more=False, has_ended=True)
        )
        return future


async def follow(folder: Path, lines: Sequence[bytes]) -> RemoteWorker:
    """Follow a worker that writes these lines until it ends, and require that none is a share."""
    counters = SharedCounters(folder / "counters", 1)
    remote = RemoteWorker(
        0, NODE, cast("RayAgent", LineAgent(lines, counters.block(0))), WorkerFileCopy(folder, 0)
    )
    try:
        assert await remote.follow(counters, lambda: None) is None
    finally:
        counters.close()
    return remote


def test_a_full_disk_of_a_node_is_the_reason_of_its_lost_requests(tmp_path: Path) -> None:
    remote = asyncio.run(follow(tmp_path, [READY, FULL_DISK]))
    assert os.strerror(errno.ENOSPC) in remote.death_reason
    assert NODE.label in remote.death_reason


def test_a_full_disk_of_a_node_before_the_start_is_reported_without_waiting(tmp_path: Path) -> None:
    async def start() -> None:
        remote = await follow(tmp_path, [FULL_DISK])
        await asyncio.wait_for(remote.ready, 1)

    with pytest.raises(TargetError) as exc_info:
        asyncio.run(start())
    assert exc_info.value.code == "host_refused"
    assert os.strerror(errno.ENOSPC) in exc_info.value.message
