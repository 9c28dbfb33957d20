"""Draw simulated servers from a seed: how much slower each request is than the base, and the truth.

Each measurement has a server of its own, so that no rule can be tuned to it. Members of the family:

    levels       2 to 4 levels within a fifth of each other, that last 20 to 600 s on average
    replicas     one of 2 to 8 is 1.3 to 2 times as slow while the load, which wanders over
                 30 to 180 s, is high
    tails        each request has a log-normal tail of 0.2 to 0.9
    warm-up      starts up to 30 % faster or twice as slow, for 10 to 120 s
    diurnal      a swing of 2 to 10 % in 10 minutes to an hour
    autoscaling  grows up to 60 % slower in 1 to 7 minutes, until a replica is added, repeatedly
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

FAMILY_MEMBERS = ("levels", "replicas", "tails", "warm-up", "diurnal", "autoscaling")
Factors = NDArray[np.float64]


class DrawnServer(NamedTuple):
    """A simulated server: its member of the family and the numbers that describe it.

    `stay_s` is the time scale of its changes, `size` how large they are (0.2 is 20 % slower),
    `parts` the number of its levels or replicas, and `share` the fraction of the time in which the
    load of a server with replicas is high. A member uses only some of them.
    """

    member: str
    stay_s: float
    size: float
    parts: int
    share: float


STAY_RANGES_S = {
    "levels": (20, 600),
    "replicas": (30, 180),
    "tails": (1, 2),  # not used
    "warm-up": (10, 120),
    "diurnal": (600, 3600),
    "autoscaling": (60, 420),
}


SIZE_RANGES = {
    "levels": (0.05, 0.2),
    "replicas": (0.3, 1.0),
    "tails": (0.2, 0.9),
    "warm-up": (-0.3, 1.0),
    "diurnal": (0.02, 0.1),
    "autoscaling": (0.1, 0.6),
}


def draw_server(member: str, seed: int) -> DrawnServer:
    """Draw a server of a member of the family; the same seed gives the same server."""
    rng = np.random.default_rng([seed, 9, FAMILY_MEMBERS.index(member)])
    max_parts = 4 if member == "levels" else 8
    parts = int(rng.integers(2, max_parts + 1))
    shortest_s, longest_s = STAY_RANGES_S[member]
    stay_s = math.exp(rng.uniform(math.log(shortest_s), math.log(longest_s)))
    size = float(rng.uniform(*SIZE_RANGES[member]))
    share = float(rng.uniform(0.05, 0.4))

    return DrawnServer(member, stay_s, size, parts, share)


def draw_slowness(
    server: DrawnServer, due_s: Factors, rng: np.random.Generator, *, long_run: bool
) -> Factors:
    """Return by which factor each request is slower than the base, for one start of the server.

    With `long_run`, each request meets the server at a random time of its life, independent of all
    others and after any start-up. The distribution of these factors is the truth that a long series
    of runs approaches.

    Args:
        server: The server.
        due_s: When each request is sent, in seconds since the start, in ascending order.
        rng: Draws what happens in this start.
        long_run: Draw independent times instead of those in `due_s`.
    """
    draw = {
        "levels": _draw_levels,
        "replicas": _draw_replicas,
        "tails": _draw_tails,
        "warm-up": _draw_warm_up,
        "diurnal": _draw_diurnal,
        "autoscaling": _draw_autoscaling,
    }[server.member]
    return draw(server, due_s, rng, long_run)


def _draw_levels(
    server: DrawnServer, due_s: Factors, rng: np.random.Generator, long_run: bool
) -> Factors:
    """Return the factors of a server that changes between a few levels at random times."""
    levels = np.linspace(1 - server.size, 1 + server.size, server.parts)
    if long_run:
        return levels[rng.integers(0, server.parts, len(due_s))]
    return levels[draw_level_indices(due_s, server.stay_s, server.parts, rng)]


def _draw_replicas(
    server: DrawnServer, due_s: Factors, rng: np.random.Generator, long_run: bool
) -> Factors:
    """Return the factors of a server with one replica that is slower while the load is high.

    The load is a standard normal value. It is high above the quantile that leaves `share` of the
    time; the quantile is that of a sample of 4,000.
    """
    if long_run:
        load = rng.normal(size=len(due_s))
    else:
        load = draw_wandering_load(due_s, server.stay_s, rng)
    high_load = float(np.quantile(rng.normal(size=4000), 1 - server.share))
    return slow_replica_factors(load > high_load, server, rng)


def _draw_tails(
    server: DrawnServer, due_s: Factors, rng: np.random.Generator, _long_run: bool
) -> Factors:
    """Return independent log-normal factors: each request has its own."""
    return rng.lognormal(0, server.size, len(due_s))


def _draw_warm_up(
    server: DrawnServer, due_s: Factors, _rng: np.random.Generator, long_run: bool
) -> Factors:
    """Return factors that begin at 1 + size and approach 1 within some `stay_s`."""
    if long_run:
        return np.ones(len(due_s))
    return 1 + server.size * np.exp(-due_s / server.stay_s)


def _draw_diurnal(
    server: DrawnServer, due_s: Factors, rng: np.random.Generator, long_run: bool
) -> Factors:
    """Return the factors of a sine swing with the period `stay_s`, from a random phase on."""
    if long_run:
        phases = rng.uniform(0, 2 * math.pi, len(due_s))
    else:
        phases = 2 * math.pi * due_s / server.stay_s + rng.uniform(0, 2 * math.pi, 1)
    return 1 + server.size * np.sin(phases)


def _draw_autoscaling(
    server: DrawnServer, due_s: Factors, rng: np.random.Generator, long_run: bool
) -> Factors:
    """Return factors that grow from 1 to 1 + size until a replica is added, repeatedly.

    The time until a replica is added is a cycle. Its length is 0.5 to 1.5 times `stay_s`. A start
    begins anywhere in the first cycle. In the long run, every point of a cycle is equally likely.
    """
    if long_run:
        return 1 + server.size * rng.random(len(due_s))

    cycle_count = int(due_s[-1] / server.stay_s * 2) + 4
    cycle_ends_s = np.cumsum(rng.uniform(0.5, 1.5, cycle_count) * server.stay_s)
    cycle_begins_s = np.concatenate([[0.0], cycle_ends_s[:-1]])
    times_s = due_s + rng.uniform(0, cycle_ends_s[0])
    cycle = _find_intervals(cycle_ends_s, times_s)
    elapsed_s = times_s - cycle_begins_s[cycle]
    cycle_lengths_s = cycle_ends_s[cycle] - cycle_begins_s[cycle]
    factors: Factors = 1 + server.size * elapsed_s / cycle_lengths_s

    return factors


def _find_intervals(ends_s: Factors, times_s: Factors) -> NDArray[np.int64]:
    """Return the index of the interval in which each time lies.

    The intervals follow each other from 0. With the ends 10 and 25, the times 9, 10 and 24 lie in
    the intervals 0, 1 and 1.
    """
    return np.searchsorted(ends_s, times_s, side="right")


def draw_level_indices(
    due_s: Factors, mean_s: float, count: int, rng: np.random.Generator
) -> NDArray[np.int64]:
    """Return the index of the level, 0 to count - 1, of a random server at each time in `due_s`.

    The server stays at a level for an exponentially distributed time with the mean `mean_s`. The
    next level is any other one with equal probability.
    """
    stay_ends_s = np.cumsum(rng.exponential(mean_s, int(due_s[-1] / mean_s * 2) + 50))
    # A step of 1 to count - 1 modulo count leads to each of the other levels.
    steps = rng.integers(1, count, len(stay_ends_s) + 1)
    steps[0] = rng.integers(0, count)  # the first level
    level_of_stay = np.cumsum(steps) % count
    levels: NDArray[np.int64] = level_of_stay[_find_intervals(stay_ends_s, due_s)]
    return levels


def draw_wandering_load(due_s: Factors, tau_s: float, rng: np.random.Generator) -> Factors:
    """Return the load at each time in `due_s`: a standard normal value that wanders.

    It is a first-order autoregressive process AR(1) with the variance 1 and the time constant
    `tau_s`, with one value per second: x[t] = c x[t - 1] + sqrt(1 - c^2) noise,
    where c = exp(-1 / tau_s).
    """
    seconds = int(due_s[-1]) + 2
    correlation = math.exp(-1 / tau_s)
    innovations = rng.normal(size=seconds) * math.sqrt(1 - correlation * correlation)
    values = np.empty(seconds)

    values[0] = rng.normal()
    for second in range(1, seconds):
        values[second] = correlation * values[second - 1] + innovations[second]

    values_at_requests: Factors = values[due_s.astype(int)]
    return values_at_requests


def slow_replica_factors(
    is_load_high: NDArray[np.bool_], server: DrawnServer, rng: np.random.Generator
) -> Factors:
    """Return 1 + size for requests that meet the slow replica while the load is high, else 1.

    Each request goes to one of the `parts` replicas at random. Replica 0 is the slow one.
    """
    replica = rng.integers(0, server.parts, len(is_load_high))
    return np.where(is_load_high & (replica == 0), 1 + server.size, 1.0)
