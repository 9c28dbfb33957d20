"""One shard of a run: the part of a schedule that one independent process sends.

The parts of a run do not communicate. Part i of n sends every n-th request or virtual user of a
schedule that all parts compute from the same seed, and every part starts at the same time of day.
`loadgen merge` joins their results.
"""

from __future__ import annotations

import asyncio
import datetime
import re
from time import monotonic_ns, time_ns

import msgspec

from loadgen.core.errors import UserError

MAX_LATE_S = 60.0
"""A start time further in the past is refused: the other parts are already at work."""
PREPARATION_S = 20.0
"""Time before the start at which workers start and build request bodies.

A worker may wait for less than the 30 s after which a process that uses no CPU time counts as
frozen.
"""
CONNECTION_S = 2.0
"""Time before the start at which connections open: servers close connections that stay idle."""
NS_PER_S = 1_000_000_000
NS_PER_MS = 1_000_000


class Shard(msgspec.Struct, frozen=True, kw_only=True):
    """Part `index` of `count` parts of a run; the first part has index 1."""

    index: int
    count: int
    start_at_ns: int  # since the epoch

    @property
    def start_at(self) -> str:
        """Return the common start as an RFC 3339 time in UTC."""
        start = datetime.datetime.fromtimestamp(self.start_at_ns / NS_PER_S, datetime.UTC)
        return start.isoformat(timespec="milliseconds").replace("+00:00", "Z")

    @property
    def start_at_s(self) -> float:
        """Return the common start in seconds since the epoch."""
        return self.start_at_ns / NS_PER_S


def parse_shard(shard: str, start_at: str) -> Shard:
    """Return the shard for the values of `--shard` and `--start-at`.

    Raises UserError for values that cannot be read and for a start that is too far in the past.
    """
    index, count = _parse_fraction(shard)
    start_at_ns = _parse_time(start_at)

    late_s = (time_ns() - start_at_ns) / NS_PER_S
    if late_s > MAX_LATE_S:
        raise UserError(
            "out_of_range",
            message=f"the start time is {late_s:.0f} s in the past",
            where=f"--start-at {start_at}",
            hint="choose a time by which all parts can start: $(date -u -d '+2 minutes' +%FT%TZ)",
        )

    return Shard(index=index, count=count, start_at_ns=start_at_ns)


def _parse_fraction(shard: str) -> tuple[int, int]:
    """Return index and count of a value such as "2/8". Raises UserError for any other value."""
    match = re.fullmatch(r"(\d+)/(\d+)", shard)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise UserError(
            "invalid_value",
            message="write INDEX/COUNT, with an index from 1 to the count",
            where=f"--shard {shard}",
            hint="for example --shard 1/8 to --shard 8/8 for eight parts",
        )

    return int(match[1]), int(match[2])


def _parse_time(start_at: str) -> int:
    """Return a time such as "2026-12-01T10:00:00Z" in ns since the epoch, rounded to 1 ms.

    Raises UserError for a value that is no time or has no time zone. Machines in different zones
    would otherwise start at different times.
    """
    try:
        start = datetime.datetime.fromisoformat(start_at)
    except ValueError:
        start = None

    if start is None or start.tzinfo is None:
        raise UserError(
            "invalid_value",
            message="is not an RFC 3339 time with a time zone",
            where=f"--start-at {start_at}",
            hint="--start-at 2026-12-01T10:00:00Z",
        )

    start_ms = round(start.timestamp() * 1000)
    return start_ms * NS_PER_MS


async def sleep_until_before_start(shard: Shard | None, lead_s: float) -> None:
    """Sleep until `lead_s` seconds before the common start; return at once without a shard."""
    if shard is None:
        return
    now_s = time_ns() / NS_PER_S
    wake_up_s = shard.start_at_s - lead_s
    await asyncio.sleep(max(0.0, wake_up_s - now_s))


def start_instant_ns(shard: Shard | None, lead_ns: int) -> int:
    """Return when the load starts, on the monotonic clock.

    That is the common start of a shard, or `lead_ns` from now if that is later or if there is no
    shard.
    """
    earliest_ns = monotonic_ns() + lead_ns
    if shard is None:
        return earliest_ns
    # The common start is a time of day, and the load runs on the monotonic clock.
    time_left_ns = shard.start_at_ns - time_ns()
    return max(earliest_ns, monotonic_ns() + time_left_ns)


def start_delay_ns(shard: Shard, start_ns: int) -> int:
    """Return how long after the common start the load starts, by the clock of this machine."""
    start_time_of_day_ns = time_ns() + start_ns - monotonic_ns()
    return max(0, start_time_of_day_ns - shard.start_at_ns)
