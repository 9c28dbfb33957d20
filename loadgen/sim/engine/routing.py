"""Which replica takes the next request. Pure: the order is fixed before the first request.

`round_robin` gives every replica the same share. `weighted` gives each replica a share in proportion to its speed,
spread as evenly as possible. Neither considers load or prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle

import numpy as np

Route = Callable[[], int]

TURNS = 256  # turns per replica, on average, before the order of `weighted` repeats


def order(speeds: Sequence[float], routing: str) -> list[int]:
    """Replica indexes in one period of the order. Replica i has its j-th turn at (j + 1/2) / its share of the speed."""
    if routing == "round_robin":
        return list(range(len(speeds)))
    shares = np.array(speeds) / sum(speeds)
    turns = np.rint(shares * TURNS * len(speeds)).astype(np.int64)
    replica = np.repeat(np.arange(len(speeds)), turns)
    turn_times = np.concatenate([(np.arange(n) + 0.5) / n for n in turns.tolist()])
    return [int(index) for index in replica[np.lexsort((replica, turn_times))]]


def route(speeds: Sequence[float], routing: str) -> Route:
    """A function that returns the replica of the next request at each call."""
    return cycle(order(speeds, routing)).__next__
