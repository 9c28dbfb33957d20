"""Names of the units that a cost is given per, and of the parts that a cost consists of.

They are the keys of `CostBasis.rates`, `CostBasis.counts`, `PricedResult.costs` and
`UnitCost.parts`, and keys in JSON files.
"""

from __future__ import annotations

from decimal import Decimal
from typing import Final

REQUEST: Final = "request"
GOOD: Final = "good_request"
TASK: Final = "task"
OUTPUT: Final = "million_output_tokens"
TOTAL: Final = "million_tokens"
UNITS = (REQUEST, GOOD, TASK, OUTPUT, TOTAL)

MACHINES: Final = "machines"
ENERGY: Final = "energy"
INPUT: Final = "input"
CACHED: Final = "cached_input"
OUTPUT_TOKENS: Final = "output"
EGRESS: Final = "egress"
CACHE_WRITE: Final = "cache_write"
PARTS = (MACHINES, ENERGY, INPUT, CACHED, OUTPUT_TOKENS, EGRESS, CACHE_WRITE)
PARTS_BY_TIME = (MACHINES, ENERGY)
"""The parts that depend on the measured rate, and so have its interval.

The others depend on counts.
"""

KILO = Decimal(1000)
MILLION = Decimal(10**6)
GIGA = Decimal(10**9)
SECONDS_PER_HOUR = Decimal(3600)
HOURS_PER_YEAR = 8760
MONTHS_PER_YEAR = 12


def to_decimal(number: float) -> Decimal:
    """Return the decimal number that the float prints as: 0.1 becomes Decimal("0.1")."""
    return Decimal(repr(number))
