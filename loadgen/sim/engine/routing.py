"""Which replica takes the next request. Pure: a fixed order, decided before the first request.

`round_robin` gives every replica the same share. `weighted` gives each a share in proportion to its speed, spread as
evenly as can be. Neither looks at load or at prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle

import numpy as np

Route = Callable[[], int]

TURNS = 256  # of each replica, on average, before the order of `weighted` repeats


def order(speeds: Sequence[float], routing: str) -> list[int]:
    """The order that is repeated. In it, replica i has its j-th turn at (j + 1/2) / its share of the speed."""
    if routing == "round_robin":
        return list(range(len(speeds)))
    if routing != "weighted":
        raise ValueError(f"no routing {routing!r}")
    shares = np.array(speeds) / sum(speeds)
    turns = np.rint(shares * TURNS * len(speeds)).astype(np.int64)
    replica = np.repeat(np.arange(len(speeds)), turns)
    place = np.concatenate([(np.arange(n) + 0.5) / n for n in turns.tolist()])
    return [int(one) for one in replica[np.lexsort((replica, place))]]


def route(speeds: Sequence[float], routing: str) -> Route:
    """The replica of the next request, at each call."""
    return cycle(order(speeds, routing)).__next__
