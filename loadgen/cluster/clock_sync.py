"""The offset between two monotonic clocks, from request-response exchanges. Pure.

On our clock, a request leaves at `asked` and its answer arrives at `back`. In between, the other clock was read as
`there`. So the other clock is ahead of ours by at least `there - back` and at most `there - asked`, whatever the delays
were. Every exchange gives such an interval and the true offset is in all of them; the bound is half the width of their
intersection. With one exchange this is NTP's offset ± rtt/2; with more it is never wider.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

TOLERATED_NS = 10_000_000
"""A larger bound of the common start is a warning. Output events of all workers are counted in bins of this length
(`results.record.BIN_NS`); with a larger bound, one instant could be in different bins on different nodes."""


class ClockExchange(NamedTuple):
    """One exchange, ns: sent at `asked`, answered at `back` on our clock; `there`: reading of the other clock."""

    asked: int
    there: int
    back: int


class Offset(NamedTuple):
    """The other clock minus ours is `ns` ± `bound_ns`."""

    ns: int
    bound_ns: int

    def there(self, here_ns: int) -> int:
        """The reading of the other clock at the instant `here_ns` of our clock."""
        return here_ns + self.ns


def offset(exchanges: Sequence[ClockExchange]) -> Offset:
    """The offset from the intersection of all exchanges (at least one).

    If the intersection is empty (a clock was slewed, or the exchanges are far apart in time), the offset from the
    exchange with the shortest round trip.
    """
    low = max(exchange.there - exchange.back for exchange in exchanges)
    high = min(exchange.there - exchange.asked for exchange in exchanges)
    if low > high:
        fastest = min(exchanges, key=lambda exchange: exchange.back - exchange.asked)
        low, high = fastest.there - fastest.back, fastest.there - fastest.asked
    return Offset((low + high) // 2, -(-(high - low) // 2))
