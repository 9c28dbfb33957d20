"""Servers drawn from a seed, for trust.py: how much slower each request is than the base, and the truth of it.

Each measurement has a server of its own, so that no rule can be made for it. Members of the family:

    levels       2 to 4 levels within a fifth of each other, stays of 20 to 600 s on average
    replicas     one of 2 to 8 is 1.3 to 2 times as slow while the load, which wanders over 30 to 180 s, is high
    tails        a tail of each request, log-normal of 0.2 to 0.9
    warm-up      begins up to 30 % faster or twice as slow, for 10 to 120 s
    diurnal      a swing of 2 to 10 % in 10 minutes to an hour
    autoscaling  grows up to 60 % slower in 1 to 7 minutes, until a replica is added, again and again
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

MEMBERS = ("levels", "replicas", "tails", "warm-up", "diurnal", "autoscaling")
Factors = NDArray[np.float64]


class Drawn(NamedTuple):
    """A server: a member of the family, and its numbers."""

    member: str
    stay_s: float
    size: float
    parts: int
    share: float


def server(member: str, seed: int) -> Drawn:
    draw = np.random.default_rng([seed, 9, MEMBERS.index(member)])
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
    count = int(draw.integers(2, 5) if member == "levels" else draw.integers(2, 9))
    stay = math.exp(draw.uniform(math.log(shortest), math.log(longest)))
    return Drawn(
        member, stay, float(draw.uniform(smallest, largest)), count, float(draw.uniform(0.05, 0.4))
    )


def slowness(one: Drawn, due: Factors, draw: np.random.Generator, *, steady: bool) -> Factors:
    """The factor of each request of a start of the server. `steady`: of requests at unlike times, as in two days."""
    n = len(due)
    match one.member:
        case "levels":
            levels = np.linspace(1 - one.size, 1 + one.size, one.parts)
            return levels[
                draw.integers(0, one.parts, n)
                if steady
                else stays(due, one.stay_s, one.parts, draw)
            ]
        case "replicas":
            load = draw.normal(size=n) if steady else wandering(due, one.stay_s, draw)
            return slow_replica(
                load > float(np.quantile(draw.normal(size=4000), 1 - one.share)), one, draw
            )
        case "tails":
            return draw.lognormal(0, one.size, n)
        case "warm-up":
            return np.ones(n) if steady else 1 + one.size * np.exp(-due / one.stay_s)
        case "diurnal":
            phase = draw.uniform(0, 2 * math.pi, n if steady else 1)
            return 1 + one.size * np.sin(2 * math.pi * due * (not steady) / one.stay_s + phase)
        case "autoscaling":
            if steady:
                return 1 + one.size * draw.random(n)
            ends = np.cumsum(draw.uniform(0.5, 1.5, int(due[-1] / one.stay_s * 2) + 4) * one.stay_s)
            shifted = due + draw.uniform(0, ends[0])
            place = np.searchsorted(ends, shifted, "right")
            begins: Factors = np.concatenate([[0.0], ends])[place]
            grown: Factors = 1 + one.size * (shifted - begins) / (ends[place] - begins)
            return grown
    raise ValueError(one.member)


def stays(due: Factors, mean_s: float, count: int, draw: np.random.Generator) -> NDArray[np.int64]:
    """The level of each instant of a server that stays exponentially long and goes on to any other level."""
    ends = np.cumsum(draw.exponential(mean_s, int(due[-1] / mean_s * 2) + 50))
    steps = draw.integers(1, count, len(ends) + 1)
    steps[0] = draw.integers(0, count)
    found: NDArray[np.int64] = (np.cumsum(steps) % count)[np.searchsorted(ends, due, "right")]
    return found


def wandering(due: Factors, tau_s: float, draw: np.random.Generator) -> Factors:
    """AR(1) of variance 1, one value per second."""
    keep = math.exp(-1 / tau_s)
    noise = draw.normal(size=int(due[-1]) + 2) * math.sqrt(1 - keep * keep)
    noise[0] = draw.normal()
    values = np.empty_like(noise)
    value = 0.0
    for i, each in enumerate(noise):
        value = keep * value * (i > 0) + each
        values[i] = value
    found: Factors = values[due.astype(int)]
    return found


def slow_replica(high: NDArray[np.bool_], one: Drawn, draw: np.random.Generator) -> Factors:
    return np.where(high & (draw.integers(0, one.parts, len(high)) == 0), 1 + one.size, 1.0)
