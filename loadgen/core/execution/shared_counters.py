"""Counters of all workers in a memory-mapped file, which each worker updates once a second.

This is all that workers share during a load. The counters are only displayed, and they show that a
worker still makes progress: no reported number comes from here. A reader may see an incomplete
update.
"""

from __future__ import annotations

import mmap
from pathlib import Path
from time import monotonic_ns

import numpy as np

from loadgen.core.execution.events import Counters

_COUNTER_NAMES = ("sent", "ok", "failed", "dropped", "cancelled", "events", "in_flight")
_MAX_TTFTS = 256  # The latest TTFTs of each worker.
_BLOCK = np.dtype(
    [
        *((name, "<i8") for name in _COUNTER_NAMES),
        ("at_ns", "<i8"),
        ("ttfts", "<i8"),
        ("ttft_ns", "<i8", (_MAX_TTFTS,)),
    ]
)


class SharedCounters:
    """Counters of several workers: each worker writes its own block, and `sum` adds them up."""

    def __init__(self, path: Path, workers: int) -> None:
        """Map the file of the counters into memory, and create it if it does not exist.

        A file that is too short is filled with zeros. If several processes do that at the same
        time, the file becomes longer than needed, but the additional blocks of counters stay zero.

        The zeros are really written, so that the file has its space on disk. `truncate` would only
        set the size. On a full disk, writing zeros raises OSError here, while a later write to the
        map would end the process with SIGBUS.

        Args:
            path: The file, which all processes of the run share.
            workers: The number of workers, each of which has a block of counters.
        """
        size = _BLOCK.itemsize * workers
        with path.open("a+b") as file:
            missing_bytes = max(size - path.stat().st_size, 0)
            file.write(bytes(missing_bytes))
            file.flush()
            self._map = mmap.mmap(file.fileno(), 0)
        self._blocks = np.frombuffer(self._map, _BLOCK)

    def close(self) -> None:
        """Close the file. `sum` still returns the last counters."""
        self._blocks = self._blocks.copy()
        self._map.close()

    def write(self, worker: int, counters: Counters) -> None:
        """Publish the counters of one worker."""
        block = self._blocks[worker]
        ttfts_ns = list(counters.recent_ttft_ns)[-_MAX_TTFTS:]
        for name in _COUNTER_NAMES:
            block[name] = getattr(counters, name)
        block["ttft_ns"][: len(ttfts_ns)] = ttfts_ns
        block["ttfts"] = len(ttfts_ns)
        block["at_ns"] = monotonic_ns()

    def block(self, worker: int) -> bytes:
        """Return the block of one worker, to be sent to another machine."""
        data: bytes = self._blocks[worker].tobytes()
        return data

    def paste(self, worker: int, block: bytes) -> None:
        """Publish the block of one worker that `block` returned on another machine."""
        self._blocks[worker] = np.frombuffer(block, _BLOCK)[0]

    def updated_ns(self, worker: int) -> int:
        """Return when a worker of this machine last published its counters, or 0 if it never did.

        The time is that of the monotonic clock.
        """
        return int(self._blocks["at_ns"][worker])

    def sum(self) -> Counters:
        """Return the sums over all workers, as of their last updates."""
        total = Counters()
        for name in _COUNTER_NAMES:
            setattr(total, name, int(self._blocks[name].sum()))
        for block in self._blocks:
            total.recent_ttft_ns.extend(block["ttft_ns"][: int(block["ttfts"])].tolist())
        return total
