"""How other tools would have reported the same records, by their definitions. Pure: rows in, a line per tool out."""

from __future__ import annotations

import msgspec

Pair = tuple[float | None, float | None]


class Reported(msgspec.Struct, frozen=True, kw_only=True):
    """What one tool would print, in ms: (p50, p99) of each metric, None where it has none; `counts` says how."""

    tool: str
    ttft: Pair
    tpot: Pair
    itl: Pair
    e2e: Pair
    counts: str
