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

TOLERATED_NS = 10_000_000
"""A larger bound of the common start is a warning.

Output events of all workers are counted in bins of this length (`results.record.BIN_NS`). With a
larger bound, one instant could be in different bins on different nodes.
"""


class ClockExchange(NamedTuple):
    """One exchange: when it was sent and received on the local clock, and the remote clock."""

    sent_ns: int
    remote_ns: int
    received_ns: int


class Offset(NamedTuple):
    """The remote clock minus the local one, which is `ns` ± `bound_ns`."""

    ns: int
    bound_ns: int

    def there(self, here_ns: int) -> int:
        """Return the reading of the remote clock when the local clock reads `here_ns`."""
        return here_ns + self.ns


def offset(exchanges: Sequence[ClockExchange]) -> Offset:
    """Return the offset that the intersection of all exchanges (at least one) gives.

    If the intersection is empty (a clock was slewed, or the exchanges are far apart in time), the
    exchange with the shortest round trip decides.
    """
    low = max(exchange.remote_ns - exchange.received_ns for exchange in exchanges)
    high = min(exchange.remote_ns - exchange.sent_ns for exchange in exchanges)
    if low > high:
        fastest = min(exchanges, key=lambda exchange: exchange.received_ns - exchange.sent_ns)
        low = fastest.remote_ns - fastest.received_ns
        high = fastest.remote_ns - fastest.sent_ns
    return Offset((low + high) // 2, -(-(high - low) // 2))
