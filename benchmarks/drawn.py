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
    """A simulated server: its member of the family and the numbers that describe it."""

    member: str
    stay_s: float
    size: float
    parts: int
    share: float


def draw_server(member: str, seed: int) -> DrawnServer:
    """Draw a server of a member of the family by a seed."""
    rng = np.random.default_rng([seed, 9, FAMILY_MEMBERS.index(member)])
    shortest, longest = {
        "levels": (20, 600),
        "replicas": (30, 180),
        "warm-up": (10, 120),
        "diurnal": (600, 3600),
        "autoscaling": (60, 420),
    }.get(member, (1, 2))
    smallest, largest = {
        "levels": (0.05, 0.2),
        "replicas": (0.3, 1.0),
        "tails": (0.2, 0.9),
        "warm-up": (-0.3, 1.0),
        "diurnal": (0.02, 0.1),
        "autoscaling": (0.1, 0.6),
    }[member]
    part_count = int(rng.integers(2, 5) if member == "levels" else rng.integers(2, 9))
    stay_s = math.exp(rng.uniform(math.log(shortest), math.log(longest)))
    return DrawnServer(
        member,
        stay_s,
        float(rng.uniform(smallest, largest)),
        part_count,
        float(rng.uniform(0.05, 0.4)),
    )


def draw_slowness(
    server: DrawnServer, due_s: Factors, rng: np.random.Generator, *, steady: bool
) -> Factors:
    """Return the slowness factor of each request for one start of the server.

    `steady` draws requests at unrelated times, as of two days, which gives the truth.
    """
    request_count = len(due_s)
    match server.member:
        case "levels":
            levels = np.linspace(1 - server.size, 1 + server.size, server.parts)
            return levels[
                rng.integers(0, server.parts, request_count)
                if steady
                else draw_level_indices(due_s, server.stay_s, server.parts, rng)
            ]
        case "replicas":
            load = (
                rng.normal(size=request_count)
                if steady
                else draw_wandering_load(due_s, server.stay_s, rng)
            )
            return slow_replica_factors(
                load > float(np.quantile(rng.normal(size=4000), 1 - server.share)), server, rng
            )
        case "tails":
            return rng.lognormal(0, server.size, request_count)
        case "warm-up":
            return (
                np.ones(request_count)
                if steady
                else 1 + server.size * np.exp(-due_s / server.stay_s)
            )
        case "diurnal":
            phase = rng.uniform(0, 2 * math.pi, request_count if steady else 1)
            return 1 + server.size * np.sin(
                2 * math.pi * due_s * (not steady) / server.stay_s + phase
            )
        case "autoscaling":
            return _draw_autoscaling(server, due_s, rng, steady=steady)
    raise ValueError(server.member)


def _draw_autoscaling(
    server: DrawnServer, due_s: Factors, rng: np.random.Generator, *, steady: bool
) -> Factors:
    """Return factors that grow by up to `size` until a replica is added, repeatedly."""
    if steady:
        return 1 + server.size * rng.random(len(due_s))
    cycle_count = int(due_s[-1] / server.stay_s * 2) + 4
    ends = np.cumsum(rng.uniform(0.5, 1.5, cycle_count) * server.stay_s)
    shifted = due_s + rng.uniform(0, ends[0])
    cycle = np.searchsorted(ends, shifted, "right")
    begins: Factors = np.concatenate([[0.0], ends])[cycle]
    factors: Factors = 1 + server.size * (shifted - begins) / (ends[cycle] - begins)
    return factors


def draw_level_indices(
    due_s: Factors, mean_s: float, count: int, rng: np.random.Generator
) -> NDArray[np.int64]:
    """Return the level index at each instant of a server that changes its level at random.

    A stay is exponentially distributed, and the next level is any other one.
    """
    ends = np.cumsum(rng.exponential(mean_s, int(due_s[-1] / mean_s * 2) + 50))
    steps = rng.integers(1, count, len(ends) + 1)
    steps[0] = rng.integers(0, count)
    levels: NDArray[np.int64] = (np.cumsum(steps) % count)[np.searchsorted(ends, due_s, "right")]
    return levels


def draw_wandering_load(due_s: Factors, tau_s: float, rng: np.random.Generator) -> Factors:
    """Return an AR(1) process of variance 1, one value per second, at each request's time."""
    correlation = math.exp(-1 / tau_s)
    noise = rng.normal(size=int(due_s[-1]) + 2) * math.sqrt(1 - correlation * correlation)
    noise[0] = rng.normal()
    values = np.empty_like(noise)
    value = 0.0
    for index, noise_value in enumerate(noise):
        value = correlation * value * (index > 0) + noise_value
        values[index] = value
    values_at_requests: Factors = values[due_s.astype(int)]
    return values_at_requests


def slow_replica_factors(
    is_load_high: NDArray[np.bool_], server: DrawnServer, rng: np.random.Generator
) -> Factors:
    """Return the factors of requests of which one replica's are slower while load is high."""
    return np.where(
        is_load_high & (rng.integers(0, server.parts, len(is_load_high)) == 0), 1 + server.size, 1.0
    )
