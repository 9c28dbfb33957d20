"""Which replica takes the next request. Pure: the order is fixed before the first request.

`round_robin` gives every replica the same share. `weighted` gives each replica a share in proportion to its speed,
spread as evenly as possible. Neither considers load or prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle

Router = Callable[[], int]

TURNS = 256  # turns per replica, on average, before the order of `weighted` repeats


def routing_order(speeds: Sequence[float], routing: str) -> list[int]:
    """Replica indexes in one period of the order. Replica i has its j-th turn at (j + 1/2) / its share of the speed."""
    if routing == "round_robin":
        return list(range(len(speeds)))
    whole = sum(speeds)
    turns = [round(speed / whole * TURNS * len(speeds)) for speed in speeds]
    timed = [((turn + 0.5) / n, replica) for replica, n in enumerate(turns) for turn in range(n)]
    return [replica for _, replica in sorted(timed)]


def make_router(speeds: Sequence[float], routing: str) -> Router:
    """A function that returns the replica of the next request at each call."""
    return cycle(routing_order(speeds, routing)).__next__
