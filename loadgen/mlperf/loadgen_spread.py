"""A distribution as MLPerf LoadGen prints it, and the percentiles that it prints. Pure."""

from __future__ import annotations

import msgspec

PERCENTILES = (0.50, 0.90, 0.95, 0.97, 0.99, 0.999)


class LoadGenSpread(msgspec.Struct, frozen=True, kw_only=True):
    """A distribution as LoadGen prints it: integer ns, mean truncated, `percentiles` in the order of PERCENTILES.

    A percentile is None where it falls on a query that never completed.
    """

    count: int
    min: int | None
    max: int | None
    mean: int | None
    percentiles: tuple[int | None, ...]
