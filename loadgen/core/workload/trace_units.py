"""Decides the unit of the times of a trace whose format does not define it.

Mooncake's traces have whole milliseconds, GuideLLM's and many exported tables have seconds, under
the same names of columns. The decision uses the times of all rows. Pure.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from loadgen.core.units import NS_PER_S, UNIT_NS, TimeUnit

UNIT_NAMES: dict[TimeUnit, str] = {
    "s": "seconds",
    "ms": "milliseconds",
    "us": "microseconds",
    "ns": "nanoseconds",
}

TRIAL_UNIT: TimeUnit = "ms"
"""The unit that numbers are first read as, before the unit is decided. A time is then a trial time:
the number 5 in the file becomes 5,000,000 ns."""

LEAST_PLAUSIBLE_RATE = 1e-3
"""Requests per second; a lower mean rate is one request in 17 minutes."""
MOST_PLAUSIBLE_RATE = 1e3
"""Requests per second. Published traces of whole clusters have fewer than 100 per second."""


class UnitDecision(NamedTuple):
    """The unit that was assumed for the times of a trace, and why."""

    unit: TimeUnit
    reason: str


def decide_unit(trial_times_ns: NDArray[np.int64], default: TimeUnit | None = None) -> UnitDecision:
    """Decide whether the times in a file are seconds or milliseconds.

    If any time has a fraction, they are probably seconds. Whole numbers are probably in the default
    unit. If that gives no plausible mean rate of requests, but the other unit does, the other unit
    is used.

    Args:
        trial_times_ns: The time of each row in ns, on the assumption that the file has TRIAL_UNIT.
        default: The unit of whole numbers in this format, or None for milliseconds.
    """
    probable = _judge_by_fractions(trial_times_ns, default)
    probable_rate = mean_rate(trial_times_ns, probable.unit)
    if _is_plausible(probable_rate):
        return probable

    other_unit: TimeUnit = "ms" if probable.unit == "s" else "s"
    if not _is_plausible(mean_rate(trial_times_ns, other_unit)):
        return probable

    implausible_rate = f"{probable_rate:,.3g} requests/s in {UNIT_NAMES[probable.unit]}"
    return UnitDecision(other_unit, reason=f"they would be {implausible_rate}")


def _judge_by_fractions(
    trial_times_ns: NDArray[np.int64], default: TimeUnit | None
) -> UnitDecision:
    """Return the unit that times probably have, judged by whether all are whole numbers."""
    # A whole number in the file was read as a multiple of TRIAL_UNIT.
    has_fraction = bool((trial_times_ns % UNIT_NS[TRIAL_UNIT]).any())
    if has_fraction:
        return UnitDecision("s", "some have a fraction")
    return UnitDecision(default or "ms", "all are whole numbers")


def mean_rate(trial_times_ns: NDArray[np.int64], unit: TimeUnit) -> float | None:
    """Return the mean requests per second of a file if its times have a unit.

    Return None if there is no request, or if all have the same time.

    Args:
        trial_times_ns: The time of each row in ns, on the assumption that the file has TRIAL_UNIT.
        unit: The unit that is assumed instead.
    """
    if not len(trial_times_ns):
        return None
    trial_span_ns = float(int(trial_times_ns.max()) - int(trial_times_ns.min()))
    # If TRIAL_UNIT is "ms" and the unit is "s", the times are 1,000 times as long.
    unit_ratio = UNIT_NS[unit] / UNIT_NS[TRIAL_UNIT]
    span_s = trial_span_ns / NS_PER_S * unit_ratio
    return len(trial_times_ns) / span_s if span_s else None


def _is_plausible(rate_per_s: float | None) -> bool:
    """Return True if real traffic can have a mean rate. None, for one time of all, is accepted."""
    return rate_per_s is None or LEAST_PLAUSIBLE_RATE <= rate_per_s <= MOST_PLAUSIBLE_RATE
