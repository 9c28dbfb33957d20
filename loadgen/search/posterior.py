"""The probability distribution of a server's capacity after the trials so far (the posterior).

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

MEDIAN_RUN_SPREAD = 0.025
"""The median of the variation of servers from run to run, if that of this server is not known."""
RUN_SPREAD_FACTOR = 2.0
"""One standard deviation of that variation around its median, as a factor."""
RUN_SPREAD_STEPS = 9
"""The number of values that stand for its distribution."""
RUN_SPREAD_DEVIATIONS = 2.0
"""How far those values reach to either side of the median, in standard deviations."""
SIGMA_FACTOR = 1.4
"""One standard deviation of sigma around its expected value, as a factor."""
SIGMAS = tuple(float(sigma) for sigma in np.geomspace(1e-3, 0.1, 24))
"""The grid of sigma."""
GRID_POINTS = 2000
"""The number of grid points of theta."""
MIN_DENSITY = 1e-300
"""Keeps a density above zero, so that its logarithm can be taken."""
CERTAIN_DEVIATIONS = 10.0
"""Standard deviations from which an outcome counts as certain.

The probability of the other outcome, 1e-23, is negligible beside that of a lapse.
"""
NEGLIGIBLE_WEIGHT = 1e-14
"""Grid points of a lower probability are left out. Together they change no result by 1e-9."""
BISECTIONS = 16
"""Halvings of the range of loads. Of bounds that are a factor of 2 apart, 0.001 % is left."""


class TrialOutcome(NamedTuple):
    """Whether a trial passed.

    Attributes:
        load: The load of the trial.
        has_passed: Whether it passed.
        lapse: The probability that the outcome says nothing about the load.
    """

    load: float
    has_passed: bool
    lapse: float


class _WeightedSpread(NamedTuple):
    """A possible variation from run to run, as a share of the load, and its probability."""

    run_spread: float
    probability: float


class _GridPoints(NamedTuple):
    """Some pairs of theta and sigma with their probabilities, as three arrays of equal length."""

    thetas: NDArray[np.float64]
    sigmas: NDArray[np.float64]
    weights: NDArray[np.float64]

    def pass_probability(self, log_load: float) -> float:
        """Return the probability that a full-length run passes at a load.

        It is the psychometric curve, Phi((theta - log load) / sigma), averaged over the pairs of
        theta and sigma by their probabilities.
        """
        pass_probabilities = normal_cdf((self.thetas - log_load) / self.sigmas)
        return float((self.weights * pass_probabilities).sum())


class CapacityPosterior:
    """The posterior of theta and sigma.

    Theta is the logarithm of the load that half of all full-length runs pass. Sigma is the width of
    the range of loads around it in which a run may pass or fail, on the same scale: with 0.02, the
    outcome is uncertain within about 2 % of that load. The weight of a grid point is the
    probability of its pair of theta and sigma.

    The prior of theta is uniform in the logarithm of the load between two bounds. The prior of
    sigma is lognormal around the value that is expected from the sampling of one run and from the
    variation of the server from run to run.
    """

    def __init__(
        self, low: float, high: float, *, sampling_sigma: float, run_spread: float | None = 0.0
    ) -> None:
        """Start from the prior, before any trial.

        Args:
            low: The lowest possible capacity.
            high: The highest possible capacity.
            sampling_sigma: The part of sigma that comes from the random arrivals and lengths of the
                requests in one run, for example 0.01.
            run_spread: The part of sigma that comes from the server, whose capacity varies from run
                to run. It is a share of the load: 0.0, the default, for a server that does not
                vary, and None if the variation has to be learned from the outcomes.
        """
        self.log_loads = _log_load_grid(low, high)
        self.sigmas = np.array(SIGMAS)
        self._bounds = (low, high)
        self._weights: NDArray[np.float64] | None = None
        log_prior = _log_prior_of_sigma(self.sigmas, sampling_sigma, run_spread)
        # The prior of theta is uniform, so that every theta starts with the same weights.
        self._log_weights = np.broadcast_to(log_prior, (GRID_POINTS, len(self.sigmas))).copy()

    def update(self, outcome: TrialOutcome) -> None:
        """Take the outcome of a trial into account, by Bayes' rule on every grid point."""
        self._log_weights += _log_likelihood(*self._bounds, outcome)
        self._weights = None

    @property
    def weights(self) -> NDArray[np.float64]:
        """The probability of every grid point, with the shape (thetas, sigmas)."""
        if self._weights is None:
            # Without the largest logarithm, all exponentials could be too small to represent.
            unscaled = np.exp(self._log_weights - self._log_weights.max())
            self._weights = unscaled / unscaled.sum()
        return self._weights

    @property
    def run_spread(self) -> float:
        """The median of sigma: how much the load that a run just passes varies from run to run."""
        sigma_probabilities = self.weights.sum(axis=0)
        cumulative_probabilities = np.cumsum(sigma_probabilities)
        median_index = int(np.searchsorted(cumulative_probabilities, 0.5))
        return float(self.sigmas[median_index])

    def quantile(self, probability: float) -> float:
        """Return the load below which the capacity lies with this probability."""
        theta_probabilities = self.weights.sum(axis=1)
        cumulative_probabilities = np.cumsum(theta_probabilities)
        log_load = float(np.interp(probability, cumulative_probabilities, self.log_loads))
        return math.exp(log_load)

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
        """Return the highest load that a full-length run passes with this probability.

        The probability to pass falls with the load, so that the load is found by bisection. The
        bisection is on the logarithmic scale, because loads are compared by their ratio.
        """
        grid_points = self._relevant_grid_points()
        low = float(self.log_loads[0])

        high = float(self.log_loads[-1])
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            if grid_points.pass_probability(middle) >= probability:
                low = middle
            else:
                high = middle

        return math.exp(low)

    def _relevant_grid_points(self) -> _GridPoints:
        """Return the pairs of theta and sigma whose probability is not negligible."""
        is_relevant = self.weights > NEGLIGIBLE_WEIGHT
        theta_indices, sigma_indices = np.nonzero(is_relevant)
        return _GridPoints(
            thetas=self.log_loads[theta_indices],
            sigmas=self.sigmas[sigma_indices],
            weights=self.weights[is_relevant],
        )


def _log_load_grid(low: float, high: float) -> NDArray[np.float64]:
    """Return the grid of theta: evenly spaced logarithms of the loads between two bounds."""
    return np.linspace(math.log(low), math.log(high), GRID_POINTS)


# A search computes its posterior anew after each of its at most 40 trials, from the same outcomes.
# Each cached array takes 384 kB.
@lru_cache(maxsize=48)
def _log_likelihood(low: float, high: float, outcome: TrialOutcome) -> NDArray[np.float64]:
    """Return the logarithm of the likelihood of an outcome, at each point of the grid.

    The array has the shape (thetas, sigmas), for loads between the bounds `low` and `high`. Usually
    a trial passes with the probability of the psychometric curve, Phi((theta - log load) / sigma).
    With the probability of a lapse its outcome is a matter of chance instead, like the toss of a
    coin, so that no single trial rules a load out:

        P(passed) = lapse / 2 + (1 - lapse) * Phi((theta - log load) / sigma)
    """
    distances = _log_load_grid(low, high)[:, None] - math.log(outcome.load)
    deviations = distances / np.array(SIGMAS)[None, :]
    if outcome.has_passed:
        probabilities = _normal_cdf_of_many(deviations)
    else:
        # P(failed) = 1 - Phi(deviation), which is Phi(-deviation).
        probabilities = _normal_cdf_of_many(-deviations)

    likelihoods = outcome.lapse / 2 + (1 - outcome.lapse) * probabilities
    log_likelihoods: NDArray[np.float64] = np.log(likelihoods)
    log_likelihoods.flags.writeable = False  # The array is cached and shared.

    return log_likelihoods


def _normal_cdf_of_many(deviations: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the standard normal distribution function at each of many values.

    The function is slow to compute. It is 0 or 1, but for a negligible rest, at the values that are
    further than CERTAIN_DEVIATIONS from 0, so that it is only computed for the others: a third of
    the points of a narrow grid, and a fiftieth of those of a wide one.
    """
    probabilities = (deviations > 0).astype(np.float64)
    is_uncertain = np.abs(deviations) < CERTAIN_DEVIATIONS
    probabilities[is_uncertain] = normal_cdf(deviations[is_uncertain])
    return probabilities


def _log_prior_of_sigma(
    sigmas: NDArray[np.float64], sampling_sigma: float, run_spread: float | None
) -> NDArray[np.float64]:
    """Return the logarithm of the prior density of each sigma, up to a constant.

    Sigma is how much the load that a run just passes varies, on the logarithmic scale. It has two
    independent causes, whose variances add up: a run is a sample of requests (`sampling_sigma`),
    and the server varies from run to run (`run_spread`). Their sum is only a rough expectation, so
    the prior is lognormal around it. If `run_spread` is None, the prior is a mixture of the priors
    for its possible values.
    """
    density = np.zeros(len(sigmas))
    for component in _run_spread_prior(run_spread):
        expected_sigma = math.hypot(sampling_sigma, component.run_spread)
        density += component.probability * _lognormal_shape(
            sigmas, median=expected_sigma, deviation_factor=SIGMA_FACTOR
        )
    return np.log(np.maximum(density, MIN_DENSITY))


def _lognormal_shape(
    values: NDArray[np.float64], *, median: float, deviation_factor: float
) -> NDArray[np.float64]:
    """Return the density of a lognormal distribution at each value, relative to that at its median.

    The density is per logarithm of the value. One standard deviation is a factor: with the factor
    1.4, a value of 1.4 times the median has the relative density exp(-1/2).
    """
    log_distances = np.log(values) - math.log(median)
    deviations = log_distances / math.log(deviation_factor)
    shape: NDArray[np.float64] = np.exp(-0.5 * deviations**2)
    return shape


def _run_spread_prior(run_spread: float | None) -> list[_WeightedSpread]:
    """Return the possible values of the variation from run to run, with their probabilities.

    A known variation has the probability 1. An unknown one has a lognormal distribution: it is
    MEDIAN_RUN_SPREAD * RUN_SPREAD_FACTOR**z, where z has a standard normal distribution. A few
    evenly spaced values of z, from -2 to 2, stand for all of them.
    """
    if run_spread is not None:
        return [_WeightedSpread(run_spread, 1.0)]

    z_values = np.linspace(-RUN_SPREAD_DEVIATIONS, RUN_SPREAD_DEVIATIONS, RUN_SPREAD_STEPS)
    densities = np.exp(-0.5 * z_values**2)  # The standard normal density, up to a constant.
    probabilities = densities / densities.sum()
    run_spreads = MEDIAN_RUN_SPREAD * RUN_SPREAD_FACTOR**z_values

    return [
        _WeightedSpread(spread, probability)
        for spread, probability in zip(run_spreads.tolist(), probabilities.tolist(), strict=True)
    ]
