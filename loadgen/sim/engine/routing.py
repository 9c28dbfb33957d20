"""Which replica takes the next request. Pure: the order is fixed before the first request.

`round_robin` gives every replica the same share. `weighted` gives each replica a share in proportion to its speed,
spread as evenly as possible. Neither considers load or prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle

Route = Callable[[], int]

TURNS = 256  # turns per replica, on average, before the order of `weighted` repeats


def order(speeds: Sequence[float], routing: str) -> list[int]:
    """Replica indexes in one period of the order. Replica i has its j-th turn at (j + 1/2) / its share of the speed."""
    if routing == "round_robin":
        return list(range(len(speeds)))
    whole = sum(speeds)
    turns = [round(speed / whole * TURNS * len(speeds)) for speed in speeds]
    timed = [((turn + 0.5) / n, replica) for replica, n in enumerate(turns) for turn in range(n)]
    return [replica for _, replica in sorted(timed)]


def route(speeds: Sequence[float], routing: str) -> Route:
    """A function that returns the replica of the next request at each call."""
    return cycle(order(speeds, routing)).__next__
