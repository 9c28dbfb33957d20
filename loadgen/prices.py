"""Where prices come from, one row each: `--prices` of every command goes by them.

A leaf, like every table: a row names its function as text.
"""

from __future__ import annotations

import os
import re
from typing import NamedTuple

from loadgen.plugins import OpenTable

_NAMED = re.compile(r"([a-z][a-z0-9-]+):(.*)", re.DOTALL)


class PriceRow(NamedTuple):
    """One source of prices. read: (what follows `NAME:`) the text of a price file, like docs/prices.example.yaml.

    What it says is checked as a file's: currency, dates, sources, absurd amounts. UserError: it has none.
    """

    name: str
    read: str


PRICES: OpenTable[PriceRow] = OpenTable(
    "loadgen.prices",
    PriceRow,
    (PriceRow("file", "loadgen.pricing.price_file:text_of"),),
)


def source_of(given: str) -> tuple[PriceRow, str]:
    """The source in what was given to `--prices`, and what it is asked: NAME:WHAT of a plug-in, else a file."""
    named = None if os.path.exists(given) else _NAMED.fullmatch(given)
    row = PRICES.find(named[1]) if named is not None else None
    return (PRICES.own[0], given) if row is None or named is None else (row, named[2])
