"""The posterior distribution of a server's capacity, given which trials passed.

Near its capacity it is not certain whether a run passes, because the arrivals and lengths of one
run differ from their distribution. Each outcome is therefore evidence about a psychometric curve,
P(pass) = Phi((theta - log load) / sigma), where exp(theta) is the load that half of all
full-length runs pass. The posterior is held on a grid of theta and sigma.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from loadgen.core.stats.intervals import Interval
from loadgen.core.stats.students_t import normal_cdf

if TYPE_CHECKING:
    from numpy.typing import NDArray

RUN_SPREAD = 0.025  # median of the run-to-run variation of servers, where it is not known
RUN_SPREAD_FACTOR = 2.0  # one standard deviation of that variation around its median, as a factor
RUN_SPREAD_STEPS = 9  # values that stand for its distribution, over two standard deviations
SIGMA_FACTOR = 1.4  # one standard deviation of sigma around its expected value, as a factor
SIGMAS = tuple(float(sigma) for sigma in np.geomspace(1e-3, 0.1, 24))
GRID_POINTS = 2000  # of theta
MIN_DENSITY = 1e-300  # so that a logarithm can be taken
CERTAIN = (
    10.0  # standard deviations; a probability further out, 1e-23, is negligible beside a lapse
)
NEGLIGIBLE_WEIGHT = 1e-14  # of a grid point: all of these together change no probability by 1e-9
BISECTIONS = 16


class TrialOutcome(NamedTuple):
    """Whether a trial passed.

    Attributes:
        load: The load of the trial.
        passed: Whether it passed.
        lapse: The probability that the outcome says nothing about the load.
    """

    load: float
    passed: bool
    lapse: float


class CapacityPosterior:
    """The posterior of theta and sigma.

    The prior of theta is uniform in the logarithm of the load between two bounds. The prior of
    sigma is lognormal around the value that is expected from the sampling of one run and from the
    variation of the server from run to run.
    """

    def __init__(
        self, low: float, high: float, *, sampling_sigma: float, run_spread: float | None = 0.0
    ) -> None:
        """Start from the prior.

        Args:
            low: The lowest possible capacity.
            high: The highest possible capacity.
            sampling_sigma: The expected sigma of a server that does not vary from run to run.
            run_spread: The variation of the server from run to run, as a share of the load. None if
                it is not known and has to be learned from the outcomes.
        """
        self.log_loads = _log_load_grid(low, high)
        self.sigmas = np.array(SIGMAS)
        self._bounds = (low, high)
        self._weights: NDArray[np.float64] | None = None
        density = np.zeros(len(self.sigmas))
        for spread, weight in _run_spread_prior(run_spread):
            log_center = math.log(math.hypot(sampling_sigma, spread))
            deviations = (np.log(self.sigmas) - log_center) / math.log(SIGMA_FACTOR)
            density += weight * np.exp(-0.5 * deviations**2)
        log_prior = np.log(np.maximum(density, MIN_DENSITY))
        self._log_weights = np.broadcast_to(log_prior, (GRID_POINTS, len(self.sigmas))).copy()

    def update(self, outcome: TrialOutcome) -> None:
        """Take the outcome of a trial into account."""
        self._log_weights += _log_likelihood(*self._bounds, outcome)
        self._weights = None

    @property
    def weights(self) -> NDArray[np.float64]:
        """The probability of every grid point, with the shape (thetas, sigmas)."""
        if self._weights is None:
            unscaled = np.exp(self._log_weights - self._log_weights.max())
            self._weights = unscaled / unscaled.sum()
        return self._weights

    @property
    def run_spread(self) -> float:
        """The median of sigma: how much the load that a run just passes varies from run to run."""
        cumulative = np.cumsum(self.weights.sum(axis=0))
        return float(self.sigmas[int(np.searchsorted(cumulative, 0.5))])

    def quantile(self, probability: float) -> float:
        """Return the load below which the capacity lies with this probability."""
        cumulative = np.cumsum(self.weights.sum(axis=1))
        return math.exp(float(np.interp(probability, cumulative, self.log_loads)))

    def interval(self, level: float) -> Interval:
        """Return the median of the capacity with its credible interval, as loads."""
        return Interval(
            value=self.quantile(0.5),
            low=self.quantile((1 - level) / 2),
            high=self.quantile((1 + level) / 2),
            level=level,
            method="posterior of the load that half of all full-length runs pass",
        )

    def highest_load_passing(self, probability: float) -> float:
        """Return the highest load that a full-length run passes with this probability."""
        matters = self.weights > NEGLIGIBLE_WEIGHT
        log_loads = np.broadcast_to(self.log_loads[:, None], matters.shape)[matters]
        sigmas = np.broadcast_to(self.sigmas, matters.shape)[matters]
        weights = self.weights[matters]
        # The probability to pass falls with the load, so that the load is found by bisection.
        low = float(self.log_loads[0])
        high = float(self.log_loads[-1])
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            pass_probability = float((weights * normal_cdf((log_loads - middle) / sigmas)).sum())
            if pass_probability >= probability:
                low = middle
            else:
                high = middle
        return math.exp(low)


def _log_load_grid(low: float, high: float) -> NDArray[np.float64]:
    return np.linspace(math.log(low), math.log(high), GRID_POINTS)


# A search computes its posterior anew after each of its at most 40 trials, from the same outcomes.
# Each cached array takes 384 kB.
@lru_cache(maxsize=48)
def _log_likelihood(low: float, high: float, outcome: TrialOutcome) -> NDArray[np.float64]:
    """Return the log likelihood of an outcome at each grid point between two bounds."""
    distances = _log_load_grid(low, high)[:, None] - math.log(outcome.load)
    deviations = distances / np.array(SIGMAS)[None, :]
    if not outcome.passed:
        deviations = -deviations
    probabilities = (deviations > 0).astype(np.float64)
    # Only a third of a narrow grid, and a fiftieth of a wide one, is not certain.
    is_uncertain = np.abs(deviations) < CERTAIN
    probabilities[is_uncertain] = normal_cdf(deviations[is_uncertain])
    likelihoods = outcome.lapse / 2 + (1 - outcome.lapse) * probabilities
    log_likelihoods: NDArray[np.float64] = np.log(likelihoods)
    log_likelihoods.flags.writeable = False
    return log_likelihoods


def _run_spread_prior(run_spread: float | None) -> list[tuple[float, float]]:
    """Return the possible variations from run to run, each with its probability."""
    if run_spread is not None:
        return [(run_spread, 1.0)]
    deviations = np.linspace(-2, 2, RUN_SPREAD_STEPS)
    weights = np.exp(-0.5 * deviations**2)
    spreads = RUN_SPREAD * RUN_SPREAD_FACTOR**deviations
    return list(zip(spreads.tolist(), (weights / weights.sum()).tolist(), strict=True))
