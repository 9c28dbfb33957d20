"""The one thing that workers share while the clock runs: a block of counters each, about once a second, in a mapped
file. IO. For eyes only: nothing that is reported comes from here, and a reader may see half of an update.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np

from loadgen.execution.driver import Counters

NUMBERS = ("sent", "ok", "failed", "dropped", "events", "in_flight")
LATEST = 256  # of each worker's TTFTs
_BLOCK = np.dtype([*((name, "<i8") for name in NUMBERS), ("ttfts", "<i8"), ("ttft_ns", "<i8", (LATEST,))])


class SharedCounters:
    """Counters of several workers: each writes its own block, `counters` is their sum.

    `stop`, where the workers are on this machine, asks all of them to start nothing more, as `Drive.stop` does.
    """

    def __init__(self, path: Path, workers: int, stop: Callable[[], None] | None = None) -> None:
        self.stop = stop
        with path.open("a+b") as file:
            file.truncate(_BLOCK.itemsize * workers)
            self._map = mmap.mmap(file.fileno(), 0)
        self._blocks = np.frombuffer(self._map, _BLOCK)

    def write(self, worker: int, counters: Counters) -> None:
        """Publish the counters of one worker."""
        block = self._blocks[worker]
        latest = list(counters.recent_ttft_ns)[-LATEST:]
        for name in NUMBERS:
            block[name] = getattr(counters, name)
        block["ttft_ns"][: len(latest)] = latest
        block["ttfts"] = len(latest)

    def block(self, worker: int) -> bytes:
        """The block of one worker, for a board on another machine."""
        found: bytes = self._blocks[worker].tobytes()
        return found

    def paste(self, worker: int, block: bytes) -> None:
        """Publish what another machine's board has of one worker."""
        self._blocks[worker] = np.frombuffer(block, _BLOCK)[0]

    @property
    def counters(self) -> Counters:
        """All workers together, as of their last second."""
        total = Counters()
        for name in NUMBERS:
            setattr(total, name, int(self._blocks[name].sum()))
        for block in self._blocks:
            total.recent_ttft_ns.extend(block["ttft_ns"][: int(block["ttfts"])].tolist())
        return total


class Counted(Protocol):
    """A Drive, or the board of several workers."""

    @property
    def counters(self) -> Counters: ...
