"""The normal distribution and Student's t: distribution functions and quantiles. Pure."""

from __future__ import annotations

import math
from functools import lru_cache
from statistics import NormalDist
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

QUANTILE_TOLERANCE = 1e-12
"""The bisection for a quantile of t ends at this width, relative to the quantile if that is > 1."""

MAX_BISECTIONS = 200

FRACTION_TOLERANCE = 1e-15
"""The continued fraction ends when a step changes it by a smaller share than this."""

MAX_FRACTION_TERMS = 500

TINY = 1e-300
"""Stands for a zero denominator in Lentz's method."""

_ERFC_COEFFICIENTS = (
    -1.26551223,
    1.00002368,
    0.37409196,
    0.09678418,
    -0.18628806,
    0.27886807,
    -1.13520398,
    1.48851587,
    -0.82215223,
    0.17087277,
)


def z_quantile(level: float) -> float:
    """Return how many standard deviations around a normal mean enclose the share `level`."""
    return NormalDist().inv_cdf((1 + level) / 2)


def normal_cdf(z: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the probability that a standard normal variable is at most z, for each z.

    For example, the probability is 0.5 for z = 0 and 0.975 for z = 1.96.
    """
    tail_probability = _normal_tail(np.abs(z))
    return np.where(z >= 0, 1 - tail_probability, tail_probability)


def _normal_tail(z: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the probability that a standard normal variable is above z, for each z >= 0.

    This is `erfcc` of Numerical Recipes, 2nd edition, section 6.2: t / 2 * exp(polynomial(t) - x^2)
    with x = z / sqrt(2) and t = 1 / (1 + x / 2). Its relative error is at most 1.2e-7.
    """
    # The letters are those of the formula.
    x = z / math.sqrt(2)
    t = 1 / (1 + 0.5 * x)

    exponent = _erfc_polynomial(t)
    exponent -= x * x  # in place, which saves the memory of another large array
    return 0.5 * t * np.exp(exponent)


def _erfc_polynomial(t: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the value of the polynomial with _ERFC_COEFFICIENTS at each t.

    Horner's method computes c0 + c1 t + c2 t^2 as (c2 * t + c1) * t + c0.
    """
    *lower_coefficients, highest_coefficient = _ERFC_COEFFICIENTS
    result = np.full_like(t, highest_coefficient)

    # `*=` and `+=` create no new arrays, which takes half the time for large arrays.
    for coefficient in reversed(lower_coefficients):
        result *= t
        result += coefficient

    return result


@lru_cache(4096)
def t_quantile(probability: float, degrees_of_freedom: float) -> float:
    """Return a quantile of Student's t, such as 1.812 for 0.95 and 10 degrees of freedom."""
    if probability < 0.5:
        return -t_quantile(1 - probability, degrees_of_freedom)  # the distribution is symmetric

    # Bisect the distribution function, from an interval that includes the quantile.
    low = 0.0
    high = 1.0
    while t_cdf(high, degrees_of_freedom) < probability:
        high *= 2

    for _ in range(MAX_BISECTIONS):
        middle = (low + high) / 2
        if high - low <= QUANTILE_TOLERANCE * max(1.0, middle):
            break

        if t_cdf(middle, degrees_of_freedom) < probability:
            low = middle
        else:
            high = middle

    return (low + high) / 2


def t_cdf(t: float, degrees_of_freedom: float) -> float:
    """Return P(T <= t) of Student's t.

    With n degrees of freedom, the probability of a tail is half the regularized incomplete beta
    function of n / (n + t^2), with the parameters n / 2 and 1 / 2 (Abramowitz and Stegun 26.7.1).
    """
    x = degrees_of_freedom / (degrees_of_freedom + t * t)
    tail = _regularized_beta(x, degrees_of_freedom / 2, 0.5) / 2
    return 1 - tail if t > 0 else tail


def welch_degrees_of_freedom(
    variance_a: float,
    degrees_of_freedom_a: float,
    variance_b: float,
    degrees_of_freedom_b: float,
) -> float:
    """Return the degrees of freedom of a difference of two means with unequal variances.

    This is the Welch-Satterthwaite equation (Satterthwaite 1946, Welch 1947).

    Args:
        variance_a: The estimated variance of the first mean.
        degrees_of_freedom_a: The degrees of freedom of that estimate.
        variance_b: The estimated variance of the second mean.
        degrees_of_freedom_b: The degrees of freedom of that estimate.
    """
    variance = variance_a + variance_b
    if variance <= 0:  # as for a pooled variance
        return degrees_of_freedom_a + degrees_of_freedom_b

    term_a = variance_a**2 / degrees_of_freedom_a
    term_b = variance_b**2 / degrees_of_freedom_b
    return variance**2 / (term_a + term_b)


def _regularized_beta(x: float, a: float, b: float) -> float:
    """Return the regularized incomplete beta function I_x(a, b), the CDF of a beta distribution.

    I_x(a, b) is x^a * (1 - x)^b / (a * B(a, b)) times a continued fraction (DLMF 8.17.22), where B
    is the beta function.
    """
    if x <= 0:
        return 0.0
    if x >= 1:
        return 1.0

    converges_fast = x <= (a + 1) / (a + b + 2)
    if not converges_fast:
        return 1 - _regularized_beta(1 - x, b, a)  # the symmetry of the function

    log_inverse_of_beta = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    log_factor = log_inverse_of_beta + a * math.log(x) + b * math.log1p(-x)
    return math.exp(log_factor) / a * _beta_continued_fraction(x, a, b)


def _beta_continued_fraction(x: float, a: float, b: float) -> float:
    """Return the continued fraction 1 / (1 + d1 / (1 + d2 / (1 + ...))) of DLMF 8.17.22.

    Terms are added, as in `betacf` of Numerical Recipes, section 6.4, until a pair of them no
    longer changes the value.
    """
    first_term = -(a + b) * x / (a + 1)
    fraction = _LentzFraction(first_term)

    for even_term, odd_term in _pairs_of_fraction_terms(x, a, b):
        fraction.add_term(even_term)
        change_of_value = fraction.add_term(odd_term)

        has_converged = abs(change_of_value - 1) < FRACTION_TOLERANCE
        if has_converged:
            break

    return fraction.value


class _LentzFraction:
    """A continued fraction 1 / (1 + d1 / (1 + d2 / ...)), by the modified Lentz method.

    With the terms d1 to dk, the fraction is a numerator A_k divided by a denominator B_k. Both may
    overflow, so only their growth is computed:

        A_k / A_(k-1) = 1 + d_k / (A_(k-1) / A_(k-2)), and the same for B.

    Attributes:
        value: The value of the fraction with the terms up to now.
    """

    def __init__(self, first_term: float) -> None:
        """Create the fraction 1 / (1 + d1)."""
        denominator_growth = max(TINY, 1 + first_term)
        self._numerator_growth = 1.0
        self._inverse_denominator_growth = 1 / denominator_growth
        self.value = self._inverse_denominator_growth

    def add_term(self, term: float) -> float:
        """Add the next term, and return the factor by which the value changes."""
        self._numerator_growth = _avoid_zero(1 + term / self._numerator_growth)
        denominator_growth = _avoid_zero(1 + term * self._inverse_denominator_growth)
        self._inverse_denominator_growth = 1 / denominator_growth

        factor = self._numerator_growth * self._inverse_denominator_growth
        self.value *= factor
        return factor


def _avoid_zero(divisor: float) -> float:
    """Return a divisor, or TINY in place of 0."""
    return TINY if divisor == 0 else divisor


def _pairs_of_fraction_terms(x: float, a: float, b: float) -> Iterator[tuple[float, float]]:
    """Yield the terms of the continued fraction of DLMF 8.17.22: (d2, d3), (d4, d5) and so on."""
    for m in range(1, MAX_FRACTION_TERMS):
        even_term = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd_term = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        yield even_term, odd_term
