"""Ends a load in real time when a rule of `--stop-when` is broken.

I/O: reads the records while they are written.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path
from time import monotonic_ns

from loadgen.core.execution.events import LoadStarted
from loadgen.core.metrics.stop_rules import CHECK_INTERVAL_NS, StopRuleMonitor
from loadgen.core.results.spool import Tail
from loadgen.core.slo import StopRule


async def stop_when_broken(
    rules: Sequence[StopRule], folder: Path, started: LoadStarted, horizon_ns: int | None
) -> None:
    """Check the requests that ended, and stop the load when a rule is broken.

    Return then, or when nothing is left to start.
    """
    monitor = StopRuleMonitor(rules)
    last_done_ns = 0
    with contextlib.closing(Tail(folder)) as tail:
        while True:
            await asyncio.sleep(CHECK_INTERVAL_NS / 1e9)
            now_ns = monotonic_ns() - started.start_ns
            if horizon_ns is not None and now_ns >= horizon_ns:
                return
            rows = tail.rows()
            # Records are written with a delay, so that the last of them says how far the rules can
            # be judged.
            last_done_ns = int(rows["done_ns"].max(initial=last_done_ns))
            if monitor.check(last_done_ns, rows):
                started.load.stopped_by = monitor.breach
                started.load.stop()
                return
