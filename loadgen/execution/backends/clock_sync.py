"""How two monotonic clocks stand to each other, from questions and answers. Pure.

A question leaves at `asked` and its answer is back at `back`, on our clock; in between the other clock was read as
`there`. So the other clock is ahead of ours by at least `there - back` and at most `there - asked`, whatever the way
took: every exchange gives an interval, the truth is in all of them, and half of what they share is the bound. That is
NTP's offset +- rtt/2 where there is one exchange, and never wider with more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

TOLERATED_NS = 10_000_000
"""A common start less sure than this is a warning: output events are counted in bins of this length over all workers
(`metrics.BIN_NS`), so what is called an instant of the run would differ by more than a bin from node to node."""


class ClockExchange(NamedTuple):
    """One exchange, ns: `asked` and `back` on our clock, `there` on the other."""

    asked: int
    there: int
    back: int


class Offset(NamedTuple):
    """The other clock minus ours is `ns`, give or take `bound_ns`."""

    ns: int
    bound_ns: int

    def there(self, here_ns: int) -> int:
        """An instant of our clock, on the other one."""
        return here_ns + self.ns


def offset(exchanges: Sequence[ClockExchange]) -> Offset:
    """What the exchanges, at least one, say together. Where they contradict each other (a clock was slewed meanwhile,
    or they lie too far apart in time), what the quickest one says alone."""
    low = max(one.there - one.back for one in exchanges)
    high = min(one.there - one.asked for one in exchanges)
    if low > high:
        best = min(exchanges, key=lambda one: one.back - one.asked)
        low, high = best.there - best.back, best.there - best.asked
    return Offset((low + high) // 2, -(-(high - low) // 2))
