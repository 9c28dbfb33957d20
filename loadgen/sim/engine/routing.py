"""Choose the replica of each request. The order is fixed before the first request.

`round_robin` gives every replica the same share. `weighted` gives each replica a share in
proportion to its speed, spread as evenly as possible. Neither considers load or prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle

Router = Callable[[], int]
"""Returns the index of the next request's replica at each call."""

MEAN_TURNS = 256  # turns per replica before the order of `weighted` repeats


def build_routing_order(speeds: Sequence[float], routing: str) -> list[int]:
    """Return the replica indexes of one period of the order in which requests are routed.

    With `round_robin`, each replica has one turn. With `weighted`, a replica gets a number of turns
    in proportion to its speed. Turn j of a replica with n turns takes place at (j + 1/2) / n of the
    period, so its turns are evenly spread.

    Args:
        speeds: The relative speed of each replica.
        routing: `round_robin` or `weighted`.
    """
    if routing == "round_robin":
        return list(range(len(speeds)))

    total_speed = sum(speeds)
    turns: list[tuple[float, int]] = []  # (position in the period, replica index)
    for replica_index, speed in enumerate(speeds):
        turn_count = round(speed / total_speed * MEAN_TURNS * len(speeds))
        for turn in range(turn_count):
            position = (turn + 0.5) / turn_count
            turns.append((position, replica_index))

    return [replica_index for _, replica_index in sorted(turns)]


def create_router(speeds: Sequence[float], routing: str) -> Router:
    """Return a function that returns the index of the next request's replica at each call."""
    return cycle(build_routing_order(speeds, routing)).__next__
