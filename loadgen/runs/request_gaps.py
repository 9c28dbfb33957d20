"""Reads the inter-chunk latencies of each request of a stored run, if `--keep gaps` kept them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from loadgen.core.results import gaps
from loadgen.core.results.gaps import RequestGaps
from loadgen.core.results.parquet import unreadable
from loadgen.core.results.store import Stored, read_run_lazily

Gaps = Mapping[int, NDArray[np.int64]]
"""The inter-chunk latencies of each request in order (ns), by slot."""


class StoredWithGaps(Stored):
    """A stored run with the inter-chunk latencies of each request; None if they were not kept."""

    each_gap: Gaps | None


def read(folder: Path) -> StoredWithGaps:
    """Return a stored run with its records in the order of the file.

    Raises UserError if a file of the run is damaged.
    """
    stored = StoredWithGaps(*read_run_lazily(folder, by_stage=False))
    stored.each_gap = read_each_gap(folder)
    return stored


def read_each_gap(folder: Path) -> Gaps | None:
    """Return the inter-chunk latencies of each request, or None if they were not kept.

    Of a run that was killed, these are the latencies of the requests that had ended.
    """
    file = folder / gaps.FILE
    is_complete = file.is_file()
    if not is_complete and not any(folder.glob("spool/w*.events")):
        return None
    groups = _read_groups(file) if is_complete else gaps.read_event_files(folder)
    return {slot: request_gaps for group in groups for slot, request_gaps in group.each()}


def _read_groups(file: Path) -> Iterator[RequestGaps]:
    """Yield the row groups of the Parquet file. Raises UserError if it is damaged."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(file) as groups:
            for number in range(groups.num_row_groups):
                table = groups.read_row_group(number, columns=["slot", "inter_chunk_ns"])
                lists = table["inter_chunk_ns"].combine_chunks()
                counts = lists.value_lengths().to_numpy()
                yield RequestGaps(table["slot"].to_numpy(), counts, lists.flatten().to_numpy())
    except (pa.ArrowException, OSError, KeyError, AttributeError) as error:
        raise unreadable("gaps", error, file, "copy it again") from None
