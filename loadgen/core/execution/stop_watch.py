"""Stop a load in real time when a rule of `--stop-when` is broken.

Such a rule ends a load whose result would be worthless, for example `errors:20%`. The records are
read from the record log while the workers write them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path
from time import monotonic_ns

from loadgen.core.execution.events import LoadStarted
from loadgen.core.metrics.stop_rules import CHECK_INTERVAL_NS, StopRuleMonitor
from loadgen.core.results.record_log import Tail
from loadgen.core.slo import StopRule

_NS_PER_S = 1e9


async def stop_when_broken(
    rules: Sequence[StopRule], folder: Path, started: LoadStarted, horizon_ns: int | None
) -> None:
    """Stop a load when one of its rules is broken, and record which rule that was.

    The rules are checked every CHECK_INTERVAL_NS against the requests that ended last. This returns
    when the load was stopped, or at its planned end, after which no request starts.

    Args:
        rules: The rules.
        folder: The folder of the run, which contains the record log.
        started: The event with the start time of the load and the function that stops it.
        horizon_ns: The planned end of the load, in ns from its start. None if it has none, in which
            case the caller cancels this coroutine.
    """
    monitor = StopRuleMonitor(rules)
    last_done_ns = 0
    with contextlib.closing(Tail(folder)) as record_log:
        while True:
            await asyncio.sleep(CHECK_INTERVAL_NS / _NS_PER_S)
            load_time_ns = monotonic_ns() - started.start_ns
            if horizon_ns is not None and load_time_ns >= horizon_ns:
                return

            new_records = record_log.rows()

            # Records are written up to half a second after their requests have ended. The rules are
            # therefore checked as of the end of the last request that was written, not as of now.
            last_done_ns = int(new_records["done_ns"].max(initial=last_done_ns))
            if monitor.check(last_done_ns, new_records):
                started.load.stopped_by = monitor.breach
                started.load.stop()
                return
