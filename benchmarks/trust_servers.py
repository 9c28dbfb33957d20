"""Simulated servers of known behaviour for benchmarks/trust.py: their records and true latencies.

A run has 5 requests per second with 100 output tokens each, and no queue: the latencies of each
request are some base latencies with noise, times the slowdown factor of its server at that time.
There are no sockets and no clock. There are two groups of kinds of servers:

- fixed kinds (`FIXED_KINDS`): all servers of a kind have the same parameters;
- drawn kinds (`drawn.FAMILY_MEMBERS`): the parameters of each server are drawn from a seed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import drawn
import numpy as np
from drawn import DrawnServer, FloatArray
from make_examples import MS, S, blank, stream
from numpy.typing import NDArray

from loadgen.contracts.steady_samples import collect_values
from loadgen.core.metrics.columns import Columns
from loadgen.core.results.record import SOURCES
from loadgen.core.stats.quantiles import quantile_index

RATE_PER_S = 5.0
INPUT_TOKENS = 150
OUTPUT_TOKENS = 100
BASE_TTFT_S = 0.020
BASE_ITL_S = 0.010
TTFT_SIGMA = 0.15  # standard deviation of the logarithm of the TTFT of single requests
ITL_SIGMA = 0.08  # the same of the time between tokens, which is constant within a request
SEND_DELAY_NS = MS // 20  # how long after its scheduled time each request is sent

TRUTH_LENGTH_S = 200_000.0
# The parameters of each drawn server need a truth of their own, so it is computed from less load.
DRAWN_TRUTH_LENGTH_S = 20_000.0
TRUTH_SEED = 999_999  # no seed of a measured run


@dataclass(frozen=True)
class ConstantServer(DrawnServer):
    """A server that is equally fast at all times, so that only single requests differ."""

    def draw_run_factors(self, send_times_s: FloatArray, _rng: np.random.Generator) -> FloatArray:
        """Return a slowdown factor of 1 for each request."""
        return np.ones(len(send_times_s))

    def draw_long_run_factors(self, request_count: int, _rng: np.random.Generator) -> FloatArray:
        """Return a slowdown factor of 1 for each request."""
        return np.ones(request_count)


@dataclass(frozen=True)
class WanderingServer(DrawnServer):
    """A server whose speed changes slowly and at random.

    The logarithm of the slowdown factor is a first-order autoregressive process with the mean 0.

    Attributes:
        time_constant_s: After this time, the correlation with the old speed is down to 1 / e.
        sigma: The standard deviation of the logarithm of the slowdown factor.
    """

    time_constant_s: float
    sigma: float = 0.15

    def draw_run_factors(self, send_times_s: FloatArray, rng: np.random.Generator) -> FloatArray:
        """Return the slowdown factors of a run, which begins at a random speed."""
        normal_values = drawn.draw_wandering_load(send_times_s, self.time_constant_s, rng)
        factors: FloatArray = np.exp(self.sigma * normal_values)
        return factors

    def draw_long_run_factors(self, request_count: int, rng: np.random.Generator) -> FloatArray:
        """Return slowdown factors at times so far apart that they are independent."""
        return rng.lognormal(0, self.sigma, request_count)


@dataclass(frozen=True)
class PeriodicServer(DrawnServer):
    """A server that is slow for the first `slow_s` seconds of each period.

    While it is slow, its slowdown factor is `slow_factor`; otherwise it is 1.
    """

    period_s: float
    slow_s: float
    slow_factor: float

    def draw_run_factors(self, send_times_s: FloatArray, rng: np.random.Generator) -> FloatArray:
        """Return the slowdown factors of a run that begins at a random time of a period."""
        run_start_s = rng.uniform(0, self.period_s)
        return self._factors_at((run_start_s + send_times_s) % self.period_s)

    def draw_long_run_factors(self, request_count: int, rng: np.random.Generator) -> FloatArray:
        """Return the slowdown factors at independent random times of a period."""
        return self._factors_at(rng.uniform(0, self.period_s, request_count))

    def _factors_at(self, seconds_since_period_start: FloatArray) -> FloatArray:
        """Return the slowdown factors at these times of a period."""
        return np.where(seconds_since_period_start < self.slow_s, self.slow_factor, 1.0)


@dataclass(frozen=True)
class OncePerBlockServer(DrawnServer):
    """A server that is slow once in each block of time, at a random time of the block.

    It is then slow for `slow_s` seconds with the slowdown factor `slow_factor`; otherwise the
    factor is 1.
    """

    block_s: float = 600.0
    slow_s: float = 8.0
    slow_factor: float = 3.0

    def draw_run_factors(self, send_times_s: FloatArray, rng: np.random.Generator) -> FloatArray:
        """Return the slowdown factors of a run that begins at a random time of the first block."""
        run_start_s = rng.uniform(0, self.block_s)
        times_s = run_start_s + send_times_s
        block_indices = (times_s / self.block_s).astype(int)
        block_count = int(block_indices[-1]) + 1

        # The time of each block, since its begin, at which the server gets slow
        slow_starts_s = rng.uniform(0, self.block_s - self.slow_s, block_count)
        since_slow_start_s = times_s % self.block_s - slow_starts_s[block_indices]
        is_slow = (since_slow_start_s >= 0) & (since_slow_start_s < self.slow_s)
        return np.where(is_slow, self.slow_factor, 1.0)

    def draw_long_run_factors(self, request_count: int, rng: np.random.Generator) -> FloatArray:
        """Return the slowdown factors at independent random times."""
        slow_share = self.slow_s / self.block_s
        return np.where(rng.random(request_count) < slow_share, self.slow_factor, 1.0)


@dataclass(frozen=True)
class RandomSlowServer(DrawnServer):
    """A server that gets slow at random times, which are a Poisson process.

    It is then slow for `slow_s` seconds with the slowdown factor `slow_factor`; otherwise the
    factor is 1. The mean time from one slow period to the next is `mean_interval_s`.
    """

    mean_interval_s: float = 600.0
    slow_s: float = 8.0
    slow_factor: float = 3.0

    def draw_run_factors(self, send_times_s: FloatArray, rng: np.random.Generator) -> FloatArray:
        """Return the slowdown factors of a run, which may begin in a slow period."""
        end_s = float(send_times_s[-1])
        start_count = rng.poisson((end_s + self.slow_s) / self.mean_interval_s)
        slow_starts_s = np.sort(rng.uniform(-self.slow_s, end_s, start_count))

        # A request is slow if a slow period began in the `slow_s` seconds before it.
        starts_until_request = np.searchsorted(slow_starts_s, send_times_s, side="right")
        starts_until_earlier = np.searchsorted(
            slow_starts_s, send_times_s - self.slow_s, side="right"
        )
        is_slow = starts_until_request > starts_until_earlier
        return np.where(is_slow, self.slow_factor, 1.0)

    def draw_long_run_factors(self, request_count: int, rng: np.random.Generator) -> FloatArray:
        """Return the slowdown factors at independent random times."""
        # The probability that a slow period began in the `slow_s` seconds before a random time
        slow_share = 1 - math.exp(-self.slow_s / self.mean_interval_s)
        return np.where(rng.random(request_count) < slow_share, self.slow_factor, 1.0)


@dataclass(frozen=True)
class SlowRequestServer(DrawnServer):
    """A server on which a share of the requests is slower, independently of each other."""

    slow_share: float
    slow_factor: float

    def draw_run_factors(self, send_times_s: FloatArray, rng: np.random.Generator) -> FloatArray:
        """Return the slowdown factors of a run, which do not depend on the time."""
        return self.draw_long_run_factors(len(send_times_s), rng)

    def draw_long_run_factors(self, request_count: int, rng: np.random.Generator) -> FloatArray:
        """Return the factor `slow_factor` for random requests, and 1 for the others."""
        return np.where(rng.random(request_count) < self.slow_share, self.slow_factor, 1.0)


@dataclass(frozen=True)
class RestartServer(DrawnServer):
    """A server whose speed changes with each start, and is constant until the next start.

    The slowdown factor is log-normal with the median 1; `sigma` is the standard deviation of its
    logarithm.
    """

    sigma: float

    def draw_run_factors(self, send_times_s: FloatArray, rng: np.random.Generator) -> FloatArray:
        """Return the same random slowdown factor for all requests of a run."""
        factor = float(rng.lognormal(0, self.sigma))
        return np.full(len(send_times_s), factor)

    def draw_long_run_factors(self, request_count: int, _rng: np.random.Generator) -> FloatArray:
        """Return a factor of 1 for each request, which is the median of all starts."""
        return np.ones(request_count)


@dataclass(frozen=True)
class ThreeLevelServer(DrawnServer):
    """A server that changes between three levels of speed at random times.

    `level_factors` are the slowdown factors of the levels, and `mean_stay_s` is the mean time for
    which the server stays at a level.
    """

    level_factors: tuple[float, float, float]
    mean_stay_s: float

    def draw_run_factors(self, send_times_s: FloatArray, rng: np.random.Generator) -> FloatArray:
        """Return for each request the factor of the level at which the server is at that time."""
        level_indices = drawn.draw_level_indices(send_times_s, self.mean_stay_s, 3, rng)
        return np.array(self.level_factors)[level_indices]

    def draw_long_run_factors(self, request_count: int, rng: np.random.Generator) -> FloatArray:
        """Return the factor of a random level for each request: all levels are equally likely."""
        return rng.choice(np.array(self.level_factors), request_count)


FIXED_KINDS: dict[str, DrawnServer] = {
    "independent": ConstantServer(),
    "ar10": WanderingServer(time_constant_s=10),
    "ar60": WanderingServer(time_constant_s=60),
    "stalls": PeriodicServer(period_s=30, slow_s=1, slow_factor=3.0),
    "onoff25": PeriodicServer(period_s=25, slow_s=5, slow_factor=1.5),
    "onoff300": PeriodicServer(period_s=300, slow_s=60, slow_factor=1.5),
    "rare": OncePerBlockServer(),
    "spells": RandomSlowServer(),
    "heavy": drawn.TailServer(sigma=0.8),
    "level": RestartServer(sigma=0.05),
    "warm": drawn.WarmUpServer(initial_change=-0.3, time_constant_s=60),
    "cold": drawn.WarmUpServer(initial_change=1.0, time_constant_s=60),
    "bimodal": SlowRequestServer(slow_share=0.2, slow_factor=2.0),
    "levels400": ThreeLevelServer(level_factors=(0.85, 1.0, 1.25), mean_stay_s=400),
    "replica90": drawn.SlowReplicaServer(
        replica_count=4, slowdown=0.8, load_time_constant_s=90, high_load_share=0.31
    ),
}
ALL_KINDS = (*FIXED_KINDS, *drawn.FAMILY_MEMBERS)


# How long it takes on average until a state of a server comes back. Servers that are not listed
# show all of their states within the shortest load.
RECURRENCE_S = {
    "ar60": 300,
    "onoff300": 300,
    "rare": 600,
    "spells": 600,
    "levels400": 1200,
    "replica90": 300,
}


class KnownServer(NamedTuple):
    """A simulated server whose true latencies can be computed: how its speed varies, and its kind.

    `kind` is one of `ALL_KINDS`.
    """

    kind: str
    variation: DrawnServer


def create_server(kind: str, server_seed: int = 0) -> KnownServer:
    """Return a server of a kind.

    `server_seed` draws the parameters of a server of a drawn kind. It has no effect on the fixed
    kinds, whose servers are all equal.
    """
    if kind in FIXED_KINDS:
        return KnownServer(kind, FIXED_KINDS[kind])
    return KnownServer(kind, drawn.draw_server(kind, server_seed))


def simulate_run(
    server: KnownServer, seed: int, length_s: float, *, slowdown: float = 1.0
) -> NDArray[np.void]:
    """Simulate a run from a new start of a server, and return its request records.

    Args:
        server: The server.
        seed: Draws the times of the requests and what happens during the run.
        length_s: The length of the load in seconds.
        slowdown: An additional factor on all latencies. 1.15 makes the server 15 % slower.
    """
    rng = _create_generator(server.kind, seed)
    send_times_s = _draw_send_times(length_s, rng)
    factors = server.variation.draw_run_factors(send_times_s, rng)
    return _create_records(send_times_s, factors * slowdown, rng)


def simulate_long_run(server: KnownServer, length_s: float) -> NDArray[np.void]:
    """Simulate requests at independent times long after the start, and return their records.

    The distribution of their latencies is the truth that a long series of runs approaches. There
    are as many requests as in a load of `length_s` seconds.
    """
    rng = _create_generator(server.kind, TRUTH_SEED)
    send_times_s = _draw_send_times(length_s, rng)
    factors = server.variation.draw_long_run_factors(len(send_times_s), rng)
    return _create_records(send_times_s, factors, rng)


def _create_generator(kind: str, seed: int) -> np.random.Generator:
    """Return a random generator, so that a seed gives other numbers for each kind of server."""
    return np.random.default_rng([seed, ALL_KINDS.index(kind)])


def _draw_send_times(length_s: float, rng: np.random.Generator) -> FloatArray:
    """Return the times of Poisson arrivals, in seconds since the start, in ascending order."""
    # More than enough requests, so that they always fill the whole length
    request_count = int(length_s * RATE_PER_S * 1.2) + 50
    send_times_s = np.cumsum(rng.exponential(1 / RATE_PER_S, request_count))
    return send_times_s[send_times_s < length_s]


def _create_records(
    send_times_s: FloatArray, factors: FloatArray, rng: np.random.Generator
) -> NDArray[np.void]:
    """Return the records of successful requests with these send times and slowdown factors."""
    request_count = len(send_times_s)
    ttft_s = BASE_TTFT_S * rng.lognormal(0, TTFT_SIGMA, request_count) * factors
    itl_s = BASE_ITL_S * rng.lognormal(0, ITL_SIGMA, request_count) * factors

    records = blank(request_count)
    records["due_ns"] = (send_times_s * S).astype(np.int64)
    records["output_tokens"] = OUTPUT_TOKENS
    records["output_events"] = OUTPUT_TOKENS
    records["first_event_tokens"] = 1
    records["input_tokens"] = INPUT_TOKENS
    records["built_tokens"] = INPUT_TOKENS
    records["input_source"] = SOURCES.index("server")
    records["output_source"] = SOURCES.index("server")

    # Sets the timestamps of each record.
    stream(
        records,
        (ttft_s * S).astype(np.int64),
        (itl_s * S).astype(np.int64),
        np.full(request_count, SEND_DELAY_NS),
    )
    return records


class Quantile(NamedTuple):
    """A quantile that a term of a contract can limit, such as the p95 of "ttft"."""

    metric: str
    percentile: int

    @property
    def name(self) -> str:
        """The metric and the percentile, for example "ttft p95"."""
        return f"{self.metric} p{self.percentile}"


LIMITED_QUANTILES = tuple(
    Quantile(metric, percentile)
    for metric in ("tpot", "e2e", "ttft")
    for percentile in (50, 95, 99)
)
TrueQuantiles = dict[Quantile, float]  # in nanoseconds


@cache
def find_true_quantiles(server: KnownServer) -> TrueQuantiles:
    """Return the true value in ns of each quantile in `LIMITED_QUANTILES`.

    It is the quantile of very many requests long after the start of the server. If each start has
    another speed, it is that of the median start.
    """
    is_drawn = server.kind in drawn.FAMILY_MEMBERS
    length_s = DRAWN_TRUTH_LENGTH_S if is_drawn else TRUTH_LENGTH_S
    columns = Columns(simulate_long_run(server, length_s))
    metrics = {quantile.metric for quantile in LIMITED_QUANTILES}
    sorted_values = {metric: np.sort(collect_values(columns, metric)) for metric in metrics}

    true_quantiles = {}
    for quantile in LIMITED_QUANTILES:
        values = sorted_values[quantile.metric]
        index = quantile_index(len(values), quantile.percentile / 100)
        true_quantiles[quantile] = float(values[index])

    return true_quantiles
