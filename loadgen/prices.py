"""The table of price sources, which `--prices` of every command uses."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import NamedTuple

from msgspec import Struct

from loadgen.plugins import OpenTable, check_type

_NAMED_SOURCE = re.compile(r"([a-z][a-z0-9-]+):(.*)", re.DOTALL)


class PriceRow(Struct, frozen=True):
    """One source of prices.

    Attributes:
        name: Its name: `--prices NAME:WHAT`.
        read: Returns the text of a price file (like docs/prices.example.yaml) for WHAT. The text is
            checked like a file of a user. Raises UserError if the source has no prices.
    """

    name: str
    read: Callable[[str], str]


class PriceRequest(NamedTuple):
    """A source of prices, and the argument after its name in `--prices NAME:WHAT`."""

    source: PriceRow
    argument: str

    def read(self) -> str:
        """Return the text of the price file. Errors of a plug-in are reported as such."""
        return PRICES.guard(self.source, self.source.read, check_type(str))(self.argument)


def _read_price_file(path: str) -> str:
    from loadgen.pricing.price_file import read_price_file

    return read_price_file(path)


PRICE_FILE = PriceRow("file", _read_price_file)
"""The source of prices that is built in: a file whose path is the argument."""


def _load_rows() -> tuple[PriceRow, ...]:
    return (PRICE_FILE,)


PRICES: OpenTable[PriceRow] = OpenTable("loadgen.prices", PriceRow, _load_rows)


def parse_price_option(value: str) -> PriceRequest:
    """Return the source that a value of `--prices` names, and the argument for it.

    The value is the path of a file, or the name of a source and its argument: "azure:eastus" is the
    argument "eastus" for the source "azure" of a plug-in. A path may contain a colon too, so the
    value is a path if such a file exists or if no source has the name before the colon.
    """
    if os.path.exists(value):
        return PriceRequest(PRICE_FILE, value)

    match = _NAMED_SOURCE.fullmatch(value)
    if match is None:
        return PriceRequest(PRICE_FILE, value)

    source_name, argument = match[1], match[2]
    source = PRICES.find(source_name)
    if source is None:
        return PriceRequest(PRICE_FILE, value)

    return PriceRequest(source, argument)
