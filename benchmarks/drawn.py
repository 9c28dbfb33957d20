"""Draw simulated servers from a seed, and how much slower than usual each of their requests is.

Each measurement has a server of its own, so that no rule can be tuned to it. Kinds of servers:

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
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]


class DrawnServer(ABC):
    """A simulated server whose speed varies.

    Its methods return slowdown factors, one for each request: 1.2 means that the latencies of the
    request are 20 % longer than usual.
    """

    @abstractmethod
    def draw_run_factors(self, send_times_s: FloatArray, rng: np.random.Generator) -> FloatArray:
        """Return the slowdown factor of each request of one run.

        Args:
            send_times_s: When each request is sent, in seconds since the start of the server, in
                ascending order.
            rng: Draws what happens during this run.
        """

    @abstractmethod
    def draw_long_run_factors(self, request_count: int, rng: np.random.Generator) -> FloatArray:
        """Return slowdown factors at random, independent times long after the start of the server.

        Their distribution is the truth that a long series of runs approaches.
        """


@dataclass(frozen=True)
class LevelServer(DrawnServer):
    """A server that changes between a few levels of speed at random times.

    The slowdown factors of the levels are evenly spaced from 1 - max_change to 1 + max_change.
    """

    level_count: int
    max_change: float
    mean_stay_s: float

    @property
    def level_factors(self) -> FloatArray:
        """The slowdown factor of each level, the fastest level first."""
        return np.linspace(1 - self.max_change, 1 + self.max_change, self.level_count)

    def draw_run_factors(self, send_times_s: FloatArray, rng: np.random.Generator) -> FloatArray:
        """Return for each request the factor of the level at which the server is at that time."""
        level_indices = draw_level_indices(send_times_s, self.mean_stay_s, self.level_count, rng)
        return self.level_factors[level_indices]

    def draw_long_run_factors(self, request_count: int, rng: np.random.Generator) -> FloatArray:
        """Return the factor of a random level for each request: all levels are equally likely."""
        level_indices = rng.integers(0, self.level_count, request_count)
        return self.level_factors[level_indices]


@dataclass(frozen=True)
class SlowReplicaServer(DrawnServer):
    """A server with several replicas, one of which is slower while the load is high.

    The load is a standard normal random variable. It is high for `high_load_share` of the time.
    While it is high, requests at the slow replica have the slowdown factor 1 + slowdown.
    """

    replica_count: int
    slowdown: float
    load_time_constant_s: float
    high_load_share: float

    def draw_run_factors(self, send_times_s: FloatArray, rng: np.random.Generator) -> FloatArray:
        """Return the slowdown factors under a load that changes slowly from request to request."""
        load = draw_wandering_load(send_times_s, self.load_time_constant_s, rng)
        return self._factors_under_load(load, rng)

    def draw_long_run_factors(self, request_count: int, rng: np.random.Generator) -> FloatArray:
        """Return the slowdown factors under a load that is independent for each request."""
        load = rng.normal(size=request_count)
        return self._factors_under_load(load, rng)

    def _factors_under_load(self, load: FloatArray, rng: np.random.Generator) -> FloatArray:
        """Return the slowdown factors of requests that are sent at these values of the load."""
        load_sample = rng.normal(size=4000)
        high_load_threshold = np.quantile(load_sample, 1 - self.high_load_share)
        return slow_replica_factors(
            load > high_load_threshold, self.replica_count, self.slowdown, rng
        )


@dataclass(frozen=True)
class TailServer(DrawnServer):
    """A server whose requests have independent, log-normal slowdown factors with the median 1.

    `sigma` is the standard deviation of the logarithm of the factor.
    """

    sigma: float

    def draw_run_factors(self, send_times_s: FloatArray, rng: np.random.Generator) -> FloatArray:
        """Return the slowdown factors of a run, which do not depend on the time."""
        return self.draw_long_run_factors(len(send_times_s), rng)

    def draw_long_run_factors(self, request_count: int, rng: np.random.Generator) -> FloatArray:
        """Return independent log-normal slowdown factors."""
        return rng.lognormal(0, self.sigma, request_count)


@dataclass(frozen=True)
class WarmUpServer(DrawnServer):
    """A server that is slower or faster after its start.

    The slowdown factor is 1 + initial_change at the start, and approaches 1 exponentially.
    """

    initial_change: float
    time_constant_s: float

    def draw_run_factors(self, send_times_s: FloatArray, _rng: np.random.Generator) -> FloatArray:
        """Return the slowdown factors since the start of the server; nothing here is random."""
        return 1 + self.initial_change * np.exp(-send_times_s / self.time_constant_s)

    def draw_long_run_factors(self, request_count: int, _rng: np.random.Generator) -> FloatArray:
        """Return a factor of 1 for each request, because a long run leaves the warm-up behind."""
        return np.ones(request_count)


@dataclass(frozen=True)
class DiurnalServer(DrawnServer):
    """A server whose slowdown factor is a sine wave around 1."""

    amplitude: float
    period_s: float

    def draw_run_factors(self, send_times_s: FloatArray, rng: np.random.Generator) -> FloatArray:
        """Return the sine wave at the times of the requests, from a random phase on."""
        first_phase = rng.uniform(0, 2 * math.pi, 1)
        phases = 2 * math.pi * send_times_s / self.period_s + first_phase
        return 1 + self.amplitude * np.sin(phases)

    def draw_long_run_factors(self, request_count: int, rng: np.random.Generator) -> FloatArray:
        """Return the sine wave at an independent random phase for each request."""
        phases = rng.uniform(0, 2 * math.pi, request_count)
        return 1 + self.amplitude * np.sin(phases)


@dataclass(frozen=True)
class AutoscalingServer(DrawnServer):
    """A server that gets slower until a replica is added, again and again.

    The time until a replica is added is a cycle. During a cycle the slowdown factor grows linearly
    from 1 to 1 + max_slowdown. The length of a cycle is random, 0.5 to 1.5 times mean_cycle_s.
    """

    max_slowdown: float
    mean_cycle_s: float

    def draw_run_factors(self, send_times_s: FloatArray, rng: np.random.Generator) -> FloatArray:
        """Return the slowdown factors of a run that begins at a random time of the first cycle."""
        # About twice as many cycles as needed on average, so that they always cover the run.
        cycle_count = int(send_times_s[-1] / self.mean_cycle_s * 2) + 4
        cycle_lengths_s = rng.uniform(0.5, 1.5, cycle_count) * self.mean_cycle_s
        cycle_ends_s = np.cumsum(cycle_lengths_s)
        cycle_starts_s = np.concatenate([[0.0], cycle_ends_s[:-1]])

        run_start_s = rng.uniform(0, cycle_ends_s[0])
        times_s = run_start_s + send_times_s
        cycle_indices = _find_intervals(cycle_ends_s, times_s)
        elapsed_s = times_s - cycle_starts_s[cycle_indices]
        elapsed_fractions = elapsed_s / cycle_lengths_s[cycle_indices]
        factors: FloatArray = 1 + self.max_slowdown * elapsed_fractions
        return factors

    def draw_long_run_factors(self, request_count: int, rng: np.random.Generator) -> FloatArray:
        """Return slowdown factors at random times of a cycle: all are equally likely."""
        return 1 + self.max_slowdown * rng.random(request_count)


class ParameterRanges(NamedTuple):
    """The ranges from which the parameters of one kind of server are drawn.

    `time_scale_s` is the time in which the server changes. `size` is how large the changes are, as
    a fraction of a latency. `part_count` is the number of its levels or replicas.
    """

    time_scale_s: tuple[float, float]
    size: tuple[float, float]
    part_count: tuple[int, int] = (2, 8)


PARAMETER_RANGES = {
    "levels": ParameterRanges(time_scale_s=(20, 600), size=(0.05, 0.2), part_count=(2, 4)),
    "replicas": ParameterRanges(time_scale_s=(30, 180), size=(0.3, 1.0)),
    "tails": ParameterRanges(time_scale_s=(1, 2), size=(0.2, 0.9)),  # the time scale is not used
    "warm-up": ParameterRanges(time_scale_s=(10, 120), size=(-0.3, 1.0)),
    "diurnal": ParameterRanges(time_scale_s=(600, 3600), size=(0.02, 0.1)),
    "autoscaling": ParameterRanges(time_scale_s=(60, 420), size=(0.1, 0.6)),
}
FAMILY_MEMBERS = tuple(PARAMETER_RANGES)  # the kinds of servers

RNG_STREAM = 9  # keeps these random numbers apart from those of other scripts with the same seed


def draw_server(kind: str, seed: int) -> DrawnServer:
    """Draw a server of one of the kinds in FAMILY_MEMBERS; a seed always gives the same server.

    Four numbers are drawn for every kind, although each kind uses only some of them.
    """
    rng = np.random.default_rng([seed, RNG_STREAM, FAMILY_MEMBERS.index(kind)])
    ranges = PARAMETER_RANGES[kind]
    part_count = int(rng.integers(*ranges.part_count, endpoint=True))
    time_scale_s = draw_log_uniform(*ranges.time_scale_s, rng)
    size = float(rng.uniform(*ranges.size))
    high_load_share = float(rng.uniform(0.05, 0.4))

    match kind:
        case "levels":
            return LevelServer(part_count, size, time_scale_s)
        case "replicas":
            return SlowReplicaServer(part_count, size, time_scale_s, high_load_share)
        case "tails":
            return TailServer(size)
        case "warm-up":
            return WarmUpServer(size, time_scale_s)
        case "diurnal":
            return DiurnalServer(size, time_scale_s)
        case _:
            return AutoscalingServer(size, time_scale_s)


def draw_log_uniform(low: float, high: float, rng: np.random.Generator) -> float:
    """Draw a number between two limits whose logarithm is uniformly distributed."""
    return math.exp(rng.uniform(math.log(low), math.log(high)))


def draw_slowness(
    server: DrawnServer, send_times_s: FloatArray, rng: np.random.Generator, *, long_run: bool
) -> FloatArray:
    """Return the slowdown factor of each request: 1.2 means that it is 20 % slower than usual.

    Args:
        server: The server to which the requests are sent.
        send_times_s: When each request is sent, in seconds since the start of the server, in
            ascending order.
        rng: Draws what happens during this run.
        long_run: Let each request meet the server at a random time of its own, long after the
            start, instead of the time in `send_times_s`. The distribution of these factors is the
            truth that a long series of runs approaches.
    """
    if long_run:
        return server.draw_long_run_factors(len(send_times_s), rng)
    return server.draw_run_factors(send_times_s, rng)


def _find_intervals(interval_ends_s: FloatArray, times_s: FloatArray) -> NDArray[np.int64]:
    """Return the index of the interval in which each time lies.

    The intervals follow each other from 0 s on. With the ends 10 and 25 s, the times 9, 10 and 24 s
    lie in the intervals 0, 1 and 1.
    """
    return np.searchsorted(interval_ends_s, times_s, side="right")


def draw_level_indices(
    times_s: FloatArray, mean_stay_s: float, level_count: int, rng: np.random.Generator
) -> NDArray[np.int64]:
    """Return the level of a server at each time, as an index from 0 to level_count - 1.

    The server begins at a random level. It stays at a level for an exponentially distributed time
    with the mean `mean_stay_s`, and then changes to any other level with equal probability.
    """
    # More than twice as many stays as needed on average, so that they always cover all times.
    stay_count = int(times_s[-1] / mean_stay_s * 2) + 50
    stay_ends_s = np.cumsum(rng.exponential(mean_stay_s, stay_count))

    # A step of 1 to level_count - 1, modulo level_count, leads to each of the other levels.
    steps = rng.integers(1, level_count, stay_count + 1)
    steps[0] = rng.integers(0, level_count)  # the first level
    level_of_stay = np.cumsum(steps) % level_count

    level_indices: NDArray[np.int64] = level_of_stay[_find_intervals(stay_ends_s, times_s)]
    return level_indices


def draw_wandering_load(
    times_s: FloatArray, time_constant_s: float, rng: np.random.Generator
) -> FloatArray:
    """Return the load at each time: a standard normal random variable that changes slowly.

    It is a first-order autoregressive process with the variance 1 and one value for each second:
    load[t] = c * load[t - 1] + sqrt(1 - c^2) * noise, where c = exp(-1 s / time constant).
    """
    second_count = int(times_s[-1]) + 2
    correlation = math.exp(-1 / time_constant_s)
    innovations = rng.normal(size=second_count) * math.sqrt(1 - correlation * correlation)

    load = np.empty(second_count)
    load[0] = rng.normal()
    for second in range(1, second_count):
        load[second] = correlation * load[second - 1] + innovations[second]

    load_at_times: FloatArray = load[times_s.astype(int)]
    return load_at_times


def slow_replica_factors(
    is_load_high: NDArray[np.bool_], replica_count: int, slowdown: float, rng: np.random.Generator
) -> FloatArray:
    """Return the slowdown factors of requests to replicas, one of which is slow under high load.

    Each request goes to a random replica. Requests to replica 0 while the load is high have the
    factor 1 + slowdown, and all others have the factor 1.
    """
    replica_indices = rng.integers(0, replica_count, len(is_load_high))
    is_slow = is_load_high & (replica_indices == 0)
    return np.where(is_slow, 1 + slowdown, 1.0)
