"""The distribution function of the gamma distribution, without scipy."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from loadgen.core.stats.students_t import normal_cdf

LARGE_SHAPE = 1000
"""Above this shape the normal approximation is accurate, and the series below would be long."""
MAX_STEPS = 500
PRECISION = 1e-12
"""The series and the continued fraction end when a step changes the result by less than this."""
TINY = 1e-300
"""Stands for 0 where a logarithm or a division by 0 would fail."""

Floats = NDArray[np.float64]


def gamma_cdf(shape: float, x: Floats) -> Floats:
    """Return the probability that a gamma variable of scale 1 is at most `x`, for each `x`.

    This is the regularised lower incomplete gamma function P(shape, x). As in Numerical Recipes
    (6.2), it is a power series for small x, and 1 minus a continued fraction for large x, because
    each of them converges quickly only there.
    """
    x = np.asarray(x, float)
    if shape > LARGE_SHAPE:
        return _normal_approximation(shape, x)

    # Both forms contain the factor x^shape * exp(-x) / Gamma(shape), which overflows without logs.
    log_factors = shape * np.log(np.maximum(x, TINY)) - x - math.lgamma(shape)
    factors = np.exp(log_factors)
    is_small = (x > 0) & (x < shape + 1)
    is_large = x >= shape + 1
    probabilities = np.zeros_like(x)  # of an x of 0 or below
    probabilities[is_small] = factors[is_small] * _lower_series(shape, x[is_small])
    probabilities[is_large] = 1 - factors[is_large] * _upper_fraction(shape, x[is_large])

    return np.clip(probabilities, 0.0, 1.0)


def _normal_approximation(shape: float, x: Floats) -> Floats:
    """Return the distribution function by the approximation of Wilson and Hilferty (1931).

    The cube root of a gamma variable is nearly normal.
    """
    cube_roots = np.cbrt(np.maximum(x, 0) / shape)
    return normal_cdf((cube_roots - (1 - 1 / (9 * shape))) * math.sqrt(9 * shape))


def _lower_series(shape: float, x: Floats) -> Floats:
    """Return the power series of the lower incomplete gamma function.

    It is the sum of x^n / (shape * (shape + 1) * ... * (shape + n)) over n from 0. For x below
    shape + 1 it converges long before MAX_STEPS.
    """
    term = np.full(len(x), 1 / shape)
    total = term
    for step in range(1, MAX_STEPS):
        term = term * x / (shape + step)
        total = total + term
        has_converged = (np.abs(term) <= PRECISION * np.abs(total)).all()
        if has_converged:
            break

    return total


def _upper_fraction(shape: float, x: Floats) -> Floats:
    """Return the continued fraction of the upper incomplete gamma function for each `x`.

    The fraction is 1 / (b[0] + a[1] / (b[1] + a[2] / (b[2] + ...))) with a[n] = -n * (n - shape)
    and b[n] = x + 1 - shape + 2 * n (Numerical Recipes, 6.2). Cut off after a[n] / b[n], it is a
    quotient P[n] / Q[n]. The modified Lentz method (Numerical Recipes, 5.2) computes these
    quotients one after the other, until they do not change any more, by the ratios

        P[n] / P[n - 1] = b[n] + a[n] / (P[n - 1] / P[n - 2])
        Q[n] / Q[n - 1] = b[n] + a[n] / (Q[n - 1] / Q[n - 2])
    """
    b = x + 1 - shape
    inverse_q_ratio = 1 / b

    # The ratio of P before the first step is infinite, because the numerator begins with 0.
    p_ratio = np.full(len(b), 1 / TINY)
    quotient = inverse_q_ratio
    for n in range(1, MAX_STEPS):
        a = -n * (n - shape)
        b = b + 2
        inverse_q_ratio = 1 / _without_zeros(b + a * inverse_q_ratio)
        p_ratio = _without_zeros(b + a / p_ratio)
        quotient = quotient * inverse_q_ratio * p_ratio
        relative_change = np.abs(inverse_q_ratio * p_ratio - 1)
        if (relative_change <= PRECISION).all():
            break

    return quotient


def _without_zeros(values: Floats) -> Floats:
    """Return values with TINY in place of those near 0, which a division could not take."""
    return np.where(np.abs(values) < TINY, TINY, values)
