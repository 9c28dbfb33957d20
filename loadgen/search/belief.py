"""What the outcomes of trials say of the load that half of all full-length runs pass: a posterior on a grid.

Pure. Near that load it is not certain whether a run passes, because the arrivals and lengths of one run differ from
their distribution. So each outcome is evidence about a psychometric curve P(pass) = Phi((theta - log load) / sigma),
held as a grid of (theta, sigma).
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from loadgen.core.stats.intervals import Interval, normal_cdf

if TYPE_CHECKING:
    from numpy.typing import NDArray

RUN_SPREAD = 0.025  # of a measured server whose variation from run to run nobody told: the median of what it may be
RUN_SPREAD_FACTOR = 2.0  # one standard deviation, as a factor, of that variation around its median
SIGMA_FACTOR = 1.4  # one standard deviation, as a factor, of sigma around its expected value
NEAR = 10.0  # standard deviations: what lies further out, 1e-23, is lost beside a lapse
SIGMAS = tuple(float(sigma) for sigma in np.geomspace(1e-3, 0.1, 24))


class Belief:
    """The posterior of (theta, sigma) on a grid.

    The prior of theta is flat in the logarithm of the load between two bounds. The prior of sigma is lognormal around
    the value expected from the sampling of one run and from `run_spread`, how much servers differ from run to run
    (None: not told, so that the outcomes have to show it), with SIGMA_FACTOR as its standard deviation.
    """

    POINTS = 2000

    def __init__(
        self, low: float, high: float, *, sigma: float, run_spread: float | None = 0.0
    ) -> None:
        self.theta = _thetas(low, high, self.POINTS)
        self.sigma = np.array(SIGMAS)
        self._bounds = (low, high)
        self._weights: NDArray[np.float64] | None = None
        density = np.zeros(len(self.sigma))
        for weight, spread in _spreads(run_spread):
            middle = math.log(math.hypot(sigma, spread))
            density += weight * np.exp(
                -0.5 * ((np.log(self.sigma) - middle) / math.log(SIGMA_FACTOR)) ** 2
            )
        prior = np.log(np.maximum(density, 1e-300))
        self._log = np.broadcast_to(prior, (self.POINTS, len(self.sigma))).copy()

    @property
    def spread(self) -> float:
        """The median of sigma: how much the load that a run just passes differs from run to run, as a share."""
        mass = np.cumsum(self.weights.sum(axis=0))
        return float(self.sigma[int(np.searchsorted(mass, 0.5))])

    def tell(self, load: float, passed: bool, lapse: float) -> None:
        """Update with one outcome at one load. `lapse`: probability that the outcome says nothing about the load."""
        self._log += _evidence(*self._bounds, self.POINTS, load, passed, lapse)
        self._weights = None

    @property
    def weights(self) -> NDArray[np.float64]:
        """Posterior mass of every (theta, sigma)."""
        if self._weights is None:
            raw = np.exp(self._log - self._log.max())
            self._weights = raw / raw.sum()
        return self._weights

    def quantile(self, p: float) -> float:
        """The load below which theta lies with probability p."""
        mass = np.cumsum(self.weights.sum(axis=1))
        return math.exp(float(np.interp(p, mass, self.theta)))

    def interval(self, level: float) -> Interval:
        """The median of theta and its credible interval, as loads."""
        return Interval(
            value=self.quantile(0.5),
            low=self.quantile((1 - level) / 2),
            high=self.quantile((1 + level) / 2),
            level=level,
            method="posterior of the load that half of all full-length runs pass",
        )

    def passing(self, p: float) -> float:
        """The highest load at which the next full-length run passes with probability p."""
        counts = self.weights > 1e-14  # all others together change no chance by 1e-9
        theta, sigma = (
            np.broadcast_to(of, counts.shape)[counts] for of in (self.theta[:, None], self.sigma)
        )
        weights = self.weights[counts]
        low, high = float(self.theta[0]), float(self.theta[-1])
        for _ in range(16):
            x = (low + high) / 2
            chance = float((weights * normal_cdf((theta - x) / sigma)).sum())
            low, high = (x, high) if chance >= p else (low, x)
        return math.exp(low)


def _thetas(low: float, high: float, points: int) -> NDArray[np.float64]:
    return np.linspace(math.log(low), math.log(high), points)


@lru_cache(
    maxsize=48
)  # 384 kB each: a search tells the same outcomes again after each trial, of at most 40
def _evidence(
    low: float, high: float, points: int, load: float, passed: bool, lapse: float
) -> NDArray[np.float64]:
    """The logarithm of the likelihood of one outcome, on the grid between these bounds."""
    z = (_thetas(low, high, points)[:, None] - math.log(load)) / np.array(SIGMAS)[None, :]
    z = z if passed else -z
    chance = (z > 0).astype(np.float64)
    near = np.abs(z) < NEAR  # a third of a narrow grid, a fiftieth of a wide one
    chance[near] = normal_cdf(z[near])
    found: NDArray[np.float64] = np.log(lapse / 2 + (1 - lapse) * chance)
    found.flags.writeable = False
    return found


def _spreads(run_spread: float | None) -> list[tuple[float, float]]:
    """The run-to-run variation, as weights and values: the one that was told, or what it may be (None: not told)."""
    if run_spread is not None:
        return [(1.0, run_spread)]
    steps = np.linspace(-2, 2, 9)
    weights = np.exp(-0.5 * steps**2)
    values = RUN_SPREAD * RUN_SPREAD_FACTOR**steps
    return list(zip((weights / weights.sum()).tolist(), values.tolist(), strict=True))
