"""Reads the inter-chunk latencies of each request of a stored run, if `--keep gaps` kept them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from loadgen.core.results.store import Stored, read_run_lazily
from loadgen.core.results.stored_gaps import iterate_stored_gaps

Gaps = Mapping[int, NDArray[np.int64]]
"""The inter-chunk latencies of each request in order (ns), by slot."""


class StoredWithGaps(Stored):
    """A stored run with the inter-chunk latencies of each request; None if they were not kept."""

    gaps_ns_by_slot: Gaps | None


def read_run_with_gaps(run_dir: Path) -> StoredWithGaps:
    """Return a stored run with its records in the order of the file.

    Raises UserError if a file of the run is damaged.
    """
    stored = StoredWithGaps(*read_run_lazily(run_dir, by_stage=False))
    stored.gaps_ns_by_slot = read_request_gaps(run_dir)
    return stored


def read_request_gaps(run_dir: Path) -> Gaps | None:
    """Return the inter-chunk latencies of each request, or None if they were not kept.

    An inter-chunk latency is the time between two chunks of a streamed response, called a gap for
    short. The keys of the result are the slots of the requests: their positions in the schedule.

    A run that was killed has no Parquet file yet. Then the latencies come from the files that its
    workers appended to, and are those of the requests that had ended.
    """
    blocks = iterate_stored_gaps(run_dir)
    if blocks is None:
        return None

    gaps_ns_by_slot: dict[int, NDArray[np.int64]] = {}
    for block in blocks:
        gaps_of_requests = block.each()  # pairs of a slot and the latencies of its request
        gaps_ns_by_slot.update(gaps_of_requests)

    return gaps_ns_by_slot
