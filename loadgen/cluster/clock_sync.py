"""The offset between two monotonic clocks, from request/response exchanges. Pure.

On the local clock, a request leaves at `sent_ns` and its response arrives at `received_ns`. In
between, the remote clock was read as `remote_ns`. So the remote clock is ahead of the local one by
at least `remote_ns - received_ns` and at most `remote_ns - sent_ns`, whatever the delays were.
Every exchange gives such an interval, and the true offset is in all of them; the bound is half the
width of their intersection. With one exchange this is NTP's offset ± rtt/2; with more it is never
wider.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

MAX_CLOCK_ERROR_NS = 10_000_000
"""A larger bound of the common start is a warning.

Output events of all workers are counted in bins of this length (`results.record.BIN_NS`). With a
larger bound, one instant could be in different bins on different nodes.
"""


class ClockExchange(NamedTuple):
    """One exchange: when it was sent and received on the local clock, and the remote clock."""

    sent_ns: int
    remote_ns: int
    received_ns: int

    @property
    def round_trip_ns(self) -> int:
        """The time from sending the request to receiving the response."""
        return self.received_ns - self.sent_ns

    @property
    def min_offset_ns(self) -> int:
        """The offset if the response took no time and the request the whole round trip."""
        return self.remote_ns - self.received_ns

    @property
    def max_offset_ns(self) -> int:
        """The offset if the request took no time and the response the whole round trip."""
        return self.remote_ns - self.sent_ns


class ClockOffset(NamedTuple):
    """The remote clock minus the local one, which is `offset_ns` ± `bound_ns`."""

    offset_ns: int
    bound_ns: int

    def to_remote_ns(self, local_ns: int) -> int:
        """Return the reading of the remote clock when the local clock reads `local_ns`."""
        return local_ns + self.offset_ns


def estimate_offset(exchanges: Sequence[ClockExchange]) -> ClockOffset:
    """Return the offset of a remote clock according to one or more exchanges.

    Each exchange limits the offset to an interval. The estimate is the middle of the intersection
    of all intervals, and its bound is half of the width. If the intersection is empty, because a
    clock was slewed in between, the exchange with the shortest round trip decides alone.
    """
    low_ns = max(exchange.min_offset_ns for exchange in exchanges)
    high_ns = min(exchange.max_offset_ns for exchange in exchanges)
    if low_ns > high_ns:
        fastest = min(exchanges, key=lambda exchange: exchange.round_trip_ns)
        low_ns = fastest.min_offset_ns
        high_ns = fastest.max_offset_ns

    middle_ns = (low_ns + high_ns) // 2
    half_width_ns = (high_ns - low_ns + 1) // 2  # rounded up, so that it covers both ends
    return ClockOffset(middle_ns, half_width_ns)
