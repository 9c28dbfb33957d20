"""Sums, smallest values and largest values by name, which grow as records are added. Pure numpy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

NEVER_NS = 1 << 62
"""Later than any time of a run."""

NO_TIME = -1
"""The largest value of a time that no request has."""


class Totals:
    """Sums, minima and maxima over requests, by name.

    Attributes:
        sums: The sums. Most of them are numbers of requests: `sums["ok"]` is that of ok requests.
        minima: The smallest values: `minima["sent"]` is the time of the first send.
        maxima: The largest values: `maxima["sent"]` is the time of the last send.
    """

    def __init__(self) -> None:
        """Create totals without any value."""
        self.sums: dict[str, int] = {}
        self.minima: dict[str, int] = {}
        self.maxima: dict[str, int] = {}

    # -- reading -----------------------------------------------------------------------------------

    def sum(self, name: str) -> int:
        """Return the sum of this name, 0 if nothing was added to it."""
        return self.sums.get(name, 0)

    def sums_with_prefix(self, prefix: str) -> dict[str, int]:
        """Return the sums whose names begin with a prefix, by the rest of the name.

        The largest sum comes first, and equal ones are in order of their names.
        """
        sums = [
            (name.removeprefix(prefix), total)
            for name, total in self.sums.items()
            if name.startswith(prefix)
        ]
        return dict(sorted(sums, key=lambda item: (-item[1], item[0])))

    def sum_known(self, field: str) -> int | None:
        """Return the sum of the known values of a field, or None if no request has a known value.

        `add_known` adds these values.
        """
        known_values = self.sum(field + "_known")
        return self.sums[field] if known_values else None

    def minimum(self, name: str) -> int:
        """Return the smallest value of this name, or NEVER_NS without any."""
        return self.minima.get(name, NEVER_NS)

    def maximum(self, name: str) -> int:
        """Return the largest value of this name, or NO_TIME without any."""
        return self.maxima.get(name, NO_TIME)

    # -- adding ------------------------------------------------------------------------------------

    def add_to_sum(self, name: str, value: int | np.integer[Any]) -> None:
        """Add a value to the sum of this name."""
        self.sums[name] = self.sum(name) + int(value)

    def add_range(self, name: str, times_ns: NDArray[np.int64]) -> None:
        """Add the number of these times to a sum, and note the first and the last one."""
        self.add_to_sum(name, len(times_ns))
        if len(times_ns):
            self.minima[name] = min(self.minimum(name), int(times_ns.min()))
            self.add_maximum(name, times_ns)

    def add_maximum(self, name: str, times_ns: NDArray[np.int64]) -> None:
        """Note the last of these times."""
        self.maxima[name] = max(self.maximum(name), int(times_ns.max(initial=NO_TIME)))

    def add_known(self, name: str, values: NDArray[np.int64]) -> None:
        """Add the values that are known, and not UNKNOWN (-1), to a sum.

        The number of these values is added to the sum with "_known" after its name.
        """
        known_values = values[values >= 0]
        self.add_to_sum(name, known_values.sum(dtype=np.int64))
        self.add_to_sum(name + "_known", len(known_values))

    def merge_totals(self, other: Totals) -> None:
        """Add the sums of other totals, and note their smallest and largest values."""
        for name, value in other.sums.items():
            self.add_to_sum(name, value)

        for name, smallest in other.minima.items():
            self.minima[name] = min(self.minimum(name), smallest)

        for name, largest in other.maxima.items():
            self.maxima[name] = max(self.maximum(name), largest)
