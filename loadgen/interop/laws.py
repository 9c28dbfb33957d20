"""Laws fitted to samples, and the Kolmogorov-Smirnov distance between the two. Pure.

A law is fitted to every other value and compared with the rest: parameters that come from the values they are compared
with would make the distance look too small.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from loadgen.core.stats.quantiles import ks_distance
from loadgen.core.stats.students_t import normal_cdf

MOST_COMPARED = 100_000  # values of a sample that are fitted, and as many that are compared
MOST_VALUES = 200  # of an empirical distribution
Floats = NDArray[np.float64]
Cdf = Callable[[Floats], Floats]


class Fit(Struct, frozen=True, kw_only=True):
    """One law with its parameters, and how far it is from values that it was not fitted to."""

    law: str
    parameters: dict[str, Any]
    distance: float  # largest difference of the two distribution functions
    critical: float  # what chance alone exceeds in at most one of 20 such comparisons

    @property
    def fits(self) -> bool:
        return self.distance <= self.critical


def critical(fitted: int, compared: int) -> float:
    """The Kolmogorov-Smirnov distance that two samples of one law exceed with a chance of 5 %.

    A law fitted to one of them is nearer to the other than that one is, so it is exceeded less often still.
    """
    return 1.358 * math.sqrt(1 / fitted + 1 / compared)


def lengths(values: NDArray[Any]) -> list[Fit]:
    """The laws that a workload may give a length, the nearest first; `empirical` is always the last."""
    sample = _thinned(values).astype(np.float64)
    fitted, compared = np.sort(sample[::2]), np.sort(sample[1::2] if len(sample) > 1 else sample)
    low, high = int(values.min()), int(values.max())
    limit = critical(len(fitted), len(compared))
    if low == high:
        return [Fit(law="fixed", parameters={"value": low}, distance=0.0, critical=limit)]
    laws: list[tuple[str, dict[str, Any], Cdf]] = [
        ("uniform", {"min": low, "max": high}, _uniform(low, high))
    ]
    mean, deviation = float(fitted.mean()), float(fitted.std())
    logs = np.log(fitted)
    median, sigma = float(np.exp(logs.mean())), float(logs.std())
    if deviation > 0:
        bounds = {"min": low, "max": high}
        normal = {"mean": _rounded(mean), "stddev": _rounded(deviation)}
        laws.append(
            ("normal", normal | bounds, _truncated(lambda x: (x - mean) / deviation, low, high))
        )
        lognormal = {"median": max(1, round(median)), "sigma": _rounded(sigma)}
        shape = _truncated(
            lambda x: (np.log(np.maximum(x, 1e-9)) - math.log(median)) / sigma, low, high
        )
        laws.append(("lognormal", lognormal | bounds, shape))
    found = [
        Fit(law=law, parameters=parameters, distance=_whole_distance(compared, cdf), critical=limit)
        for law, parameters, cdf in laws
    ]
    chosen, weights = _few(fitted)
    step = Fit(
        law="empirical",
        parameters={"values": chosen} | ({"weights": weights} if weights else {}),
        distance=_whole_distance(
            compared, _steps(np.array(chosen, float), np.array(weights or [1] * len(chosen), float))
        ),
        critical=limit,
    )
    return [*sorted(found, key=lambda fit: fit.distance), step]


def gaps(values: Floats, step: float = 0.0) -> list[Fit]:
    """Poisson and gamma gaps for gaps with a mean of 1: the simpler one first, if it fits.

    `step`: of the clock that stamped the requests. A gap of so many steps was on average half a step shorter or longer.
    """
    sample = _thinned(values)
    fitted, compared = sample[::2], np.sort(sample[1::2] if len(sample) > 1 else sample)
    spread = float(fitted.var()) / float(fitted.mean()) ** 2 if fitted.mean() > 0 else 0.0
    burstiness = _rounded(min(max(1 / spread, 1e-3), 1e6)) if spread > 0 else 1e6
    limit = critical(len(fitted), len(compared))
    poisson = Fit(
        law="poisson",
        parameters={},
        distance=_gap_distance(compared, lambda x: -np.expm1(-x), step),
        critical=limit,
    )
    gamma = Fit(
        law="gamma",
        parameters={"burstiness": burstiness},
        distance=_gap_distance(compared, lambda x: gamma_cdf(burstiness, burstiness * x), step),
        critical=limit,
    )
    return (
        [poisson, gamma] if poisson.fits or poisson.distance <= gamma.distance else [gamma, poisson]
    )


def varies(counts: Sequence[int], dispersion: float) -> bool:
    """Whether counts of equally long times differ by more than chance (1 %), with that variance per mean."""
    mean = sum(counts) / len(counts)
    if len(counts) < 2 or mean == 0:
        return False
    chi = sum((count - mean) ** 2 for count in counts) / (mean * max(dispersion, 1e-9))
    freedom = len(counts) - 1
    limit = (
        freedom * (1 - 2 / (9 * freedom) + 2.326 * math.sqrt(2 / (9 * freedom))) ** 3
    )  # Wilson and Hilferty
    return chi > limit


def rank_correlation(a: NDArray[Any], b: NDArray[Any]) -> float:
    """Spearman's correlation; 0 where one of them does not vary."""
    a, b = _thinned(a), _thinned(b)
    if len(a) < 2 or a.min() == a.max() or b.min() == b.max():
        return 0.0
    a, b = (ranks - ranks.mean() for ranks in (_ranks(a), _ranks(b)))
    return float((a * b).sum()) / math.sqrt(float((a * a).sum()) * float((b * b).sum()))


def gamma_cdf(shape: float, x: Floats) -> Floats:
    """The distribution function of gamma values of scale 1: the regularised incomplete gamma function P(shape, x)."""
    x = np.asarray(x, float)
    if shape > 1000:  # Wilson and Hilferty
        scaled = np.cbrt(np.maximum(x, 0) / shape)
        return normal_cdf((scaled - (1 - 1 / (9 * shape))) * math.sqrt(9 * shape))
    out = np.zeros_like(x)
    front = np.exp(shape * np.log(np.maximum(x, 1e-300)) - x - math.lgamma(shape))
    small = (x > 0) & (x < shape + 1)
    term = total = np.full(int(small.sum()), 1 / shape)
    for step in range(1, 500):
        term = term * x[small] / (shape + step)
        total = total + term
        if not (np.abs(term) > 1e-12 * np.abs(total)).any():
            break
    out[small] = front[small] * total
    large = x >= shape + 1
    b = x[large] + 1 - shape
    c, d = np.full(len(b), 1e300), 1 / b
    fraction = d
    for step in range(1, 500):  # Lentz's method
        factor = -step * (step - shape)
        b = b + 2
        d = 1 / _not_zero(factor * d + b)
        c = _not_zero(b + factor / c)
        fraction = fraction * d * c
        if not (np.abs(d * c - 1) > 1e-12).any():
            break
    out[large] = 1 - front[large] * fraction
    return np.clip(out, 0.0, 1.0)


def _thinned(values: NDArray[Any]) -> NDArray[Any]:
    """At most 2 * MOST_COMPARED of the values, evenly spread."""
    if len(values) <= 2 * MOST_COMPARED:
        return values
    return values[np.linspace(0, len(values) - 1, 2 * MOST_COMPARED).astype(np.int64)]


def _whole_distance(ordered: Floats, cdf: Cdf) -> float:
    return ks_distance(ordered, cdf, lambda x: cdf(x - 1))


def _gap_distance(ordered: Floats, cdf: Cdf, step: float) -> float:
    return ks_distance(
        ordered, lambda x: cdf(x + step / 2), lambda x: cdf(np.maximum(x - step / 2, 0))
    )


def _uniform(low: int, high: int) -> Cdf:
    return lambda x: np.clip((x - low + 1) / (high - low + 1), 0, 1)


def _truncated(standard: Cdf, low: int, high: int) -> Cdf:
    """Of a rounded value, drawn again while it is outside the bounds. `standard`: to a standard normal value."""
    [begin, end] = normal_cdf(standard(np.array([low - 0.5, high + 0.5])))
    span = max(float(end - begin), 1e-12)
    return lambda x: np.where(
        x < low, 0.0, np.clip((normal_cdf(standard(x + 0.5)) - begin) / span, 0, 1)
    )


def _steps(values: Floats, weights: Floats) -> Cdf:
    order = np.argsort(values)
    ends = np.concatenate([[0.0], np.cumsum(weights[order]) / weights.sum()])
    return lambda x: ends[np.searchsorted(values[order], x, side="right")]


def _few(ordered: Floats) -> tuple[list[int], list[int]]:
    """At most MOST_VALUES values with weights that stand for all; without weights they are equally likely."""
    known, counts = np.unique(ordered.astype(np.int64), return_counts=True)
    if len(known) <= MOST_VALUES:
        return known.tolist(), counts.tolist()
    places = ((np.arange(MOST_VALUES) + 0.5) / MOST_VALUES * len(ordered)).astype(np.int64)
    known, counts = np.unique(ordered[places].astype(np.int64), return_counts=True)
    return known.tolist(), counts.tolist() if counts.max() > 1 else []


def _ranks(values: NDArray[Any]) -> Floats:
    """Ranks; equal values share the mean of theirs."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    ranks: Floats = (ends - (counts - 1) / 2)[inverse]
    return ranks


def _not_zero(values: Floats) -> Floats:
    return np.where(np.abs(values) < 1e-300, 1e-300, values)


def _rounded(value: float) -> float:
    """Four significant digits: what a reader of the file still reads."""
    return float(f"{value:.4g}")
