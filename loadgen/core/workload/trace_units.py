"""Decides the unit of the times of a trace whose format does not define it.

Mooncake's traces have whole milliseconds, GuideLLM's and many exported tables have seconds, under
the same names of columns. The decision uses the times of all rows. Pure.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from loadgen.core.units import UNIT_NS, TimeUnit

UNIT_NAMES: dict[TimeUnit, str] = {
    "s": "seconds",
    "ms": "milliseconds",
    "us": "microseconds",
    "ns": "nanoseconds",
}

TRIAL_UNIT: TimeUnit = "ms"
"""The unit that times are first read in, before the unit is decided."""

LEAST_PLAUSIBLE_RATE = 1e-3
"""Requests per second; a lower mean rate is one request in 17 minutes."""
MOST_PLAUSIBLE_RATE = 1e3
"""Requests per second. Published traces of whole clusters have fewer than 100 per second."""


class UnitDecision(NamedTuple):
    """The unit that was assumed for the times of a trace, and why."""

    unit: TimeUnit
    reason: str


def decide_unit(at_ns: NDArray[np.int64], default: TimeUnit | None = None) -> UnitDecision:
    """Decide whether the times in a file are seconds or milliseconds.

    If any time has a fraction, they are seconds. Whole numbers have the default unit of the format,
    or milliseconds. The other unit is used instead if only that gives a plausible mean rate.

    Args:
        at_ns: The time of each row in ns, read as if it were in `TRIAL_UNIT`.
        default: The unit of whole numbers in this format, or None for milliseconds.
    """
    # A whole number that was read as ms is a multiple of the ns of 1 ms.
    has_fraction = bool((at_ns % UNIT_NS[TRIAL_UNIT]).any())
    if has_fraction:
        unit: TimeUnit = "s"
        reason = "some have a fraction"
    else:
        unit = default or "ms"
        reason = "all are whole numbers"

    other_unit: TimeUnit = "ms" if unit == "s" else "s"
    rate_per_s = mean_rate(at_ns, unit)
    is_only_other_plausible = not _is_plausible(rate_per_s) and _is_plausible(
        mean_rate(at_ns, other_unit)
    )
    if is_only_other_plausible:
        rejected_rate = f"{rate_per_s:,.3g} requests/s in {UNIT_NAMES[unit]}"
        return UnitDecision(other_unit, f"they would be {rejected_rate}")
    return UnitDecision(unit, reason)


def mean_rate(at_ns: NDArray[np.int64], unit: TimeUnit) -> float | None:
    """Return the requests per second of times that were read in `TRIAL_UNIT` and are in `unit`.

    Returns None if all requests have the same time.
    """
    if not len(at_ns):
        return None
    span_s = float(int(at_ns.max()) - int(at_ns.min())) / 1e9
    span_s *= UNIT_NS[unit] / UNIT_NS[TRIAL_UNIT]
    return len(at_ns) / span_s if span_s else None


def _is_plausible(rate_per_s: float | None) -> bool:
    """Return True if real traffic can have a mean rate. None, for one time of all, is accepted."""
    return rate_per_s is None or LEAST_PLAUSIBLE_RATE <= rate_per_s <= MOST_PLAUSIBLE_RATE
