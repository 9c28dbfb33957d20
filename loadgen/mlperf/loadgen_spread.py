"""A distribution as MLPerf LoadGen prints it, and the percentiles that it prints."""

from __future__ import annotations

import msgspec

PERCENTILES = (0.50, 0.90, 0.95, 0.97, 0.99, 0.999)


class LoadGenSpread(msgspec.Struct, frozen=True, kw_only=True):
    """A distribution as LoadGen prints it, in integer nanoseconds.

    Attributes:
        count: The number of queries.
        min: The minimum.
        max: The maximum.
        mean: The mean, truncated.
        percentiles: One value per entry of PERCENTILES; None if it falls on a query that never
            completed.
    """

    count: int
    min: int | None
    max: int | None
    mean: int | None
    percentiles: tuple[int | None, ...]
