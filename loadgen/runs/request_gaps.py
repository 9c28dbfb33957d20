"""Reads the inter-chunk latencies of each request of a stored run, if `--keep gaps` kept them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from loadgen.core.results import gaps
from loadgen.core.results.gaps import RequestGaps
from loadgen.core.results.parquet import unreadable
from loadgen.core.results.store import Stored, read_run_lazily

if TYPE_CHECKING:
    import pyarrow as pa

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
    parquet_file = run_dir / gaps.FILE
    blocks: Iterable[RequestGaps]
    if parquet_file.is_file():
        blocks = _read_row_groups(parquet_file)
    elif any(run_dir.glob("spool/w*.events")):
        blocks = gaps.read_event_files(run_dir)
    else:
        return None

    gaps_ns_by_slot: dict[int, NDArray[np.int64]] = {}
    for block in blocks:
        gaps_of_requests = block.each()  # pairs of a slot and the latencies of its request
        gaps_ns_by_slot.update(gaps_of_requests)

    return gaps_ns_by_slot


def _read_row_groups(parquet_file: Path) -> Iterator[RequestGaps]:
    """Yield the inter-chunk latencies of the requests in each row group of a Parquet file.

    One row group is decoded at a time, so that the file may be larger than memory.

    Raises UserError if the file is damaged.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    # pyarrow raises the first two for a damaged file. The others are raised if a column is missing
    # (KeyError) or has no lists (AttributeError).
    damage_errors = (pa.ArrowException, OSError, KeyError, AttributeError)
    try:
        with pq.ParquetFile(parquet_file) as reader:
            for number in range(reader.num_row_groups):
                table = reader.read_row_group(number, columns=["slot", "inter_chunk_ns"])
                yield _convert_to_request_gaps(table)
    except damage_errors as error:
        raise unreadable("gaps", error, parquet_file, "copy it again") from None


def _convert_to_request_gaps(table: pa.Table) -> RequestGaps:
    """Return the latencies in a table with a row for each request, which has a list of them.

    The result has the values of all lists in one array, and the length of each list.
    """
    lists = table["inter_chunk_ns"].combine_chunks()
    return RequestGaps(
        slots=table["slot"].to_numpy(),
        counts=lists.value_lengths().to_numpy(),
        values=lists.flatten().to_numpy(),
    )
