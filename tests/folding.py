"""Rows through several ledgers, as the compactor of a long run folds them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from loadgen.core.metrics.accumulator import Accumulator
from loadgen.core.results.manifest import Header


def folded(header: Header, rows: NDArray[np.void], texts: list[str], parts: int) -> Accumulator:
    """Through several ledgers, each of many small pieces, packed and merged."""
    whole = Accumulator(header)
    order = np.argsort(rows["done_ns"] + (rows["turn"].astype(np.int64) << 50), kind="stable")
    for part in range(parts):
        ledger = Accumulator(header)
        mine = rows[order][rows["session" if header.turns > 1 else "slot"][order] % parts == part]
        for i in range(0, len(mine), 37):
            ledger.add(mine[i : i + 37], texts)
        whole.merge(Accumulator.from_bytes(ledger.to_bytes(), header))
    return whole
