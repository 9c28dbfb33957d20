"""Ends a load that goes on when a rule of `--stop-when` is broken. IO: reads the records while they are written."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path
from time import monotonic_ns

import numpy as np

from loadgen.core.execution.events import LoadStarted
from loadgen.core.metrics.stop_rules import WINDOW_NS, breach
from loadgen.core.results.record import ROW, joined, picked
from loadgen.core.results.spool import Tail
from loadgen.core.slo import StopRule

LOOK_NS = 1_000_000_000  # a look every so often


async def watch(
    rules: Sequence[StopRule], folder: Path, started: LoadStarted, horizon_ns: int | None
) -> None:
    """Look at the requests that ended until a rule is broken, and then stop the load; or until the load is over."""
    rows = np.zeros(0, ROW)
    with contextlib.closing(Tail(folder)) as tail:
        while True:
            await asyncio.sleep(LOOK_NS / 1e9)
            now_ns = monotonic_ns() - started.start_ns
            if horizon_ns is not None and now_ns >= horizon_ns:
                return
            rows = joined((picked(rows, rows["done_ns"] > now_ns - 2 * WINDOW_NS), tail.rows()))
            last_ns = int(rows["done_ns"].max(initial=0))  # rows come to the file with a delay
            if reason := breach(rules, rows, last_ns):
                started.load.stopped_by = reason
                started.load.stop()
                return
