"""The gaps between the output events of each request of a stored run, where `--keep gaps` kept them. IO."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from loadgen.core.results import gaps
from loadgen.core.results.gaps import RequestGaps
from loadgen.core.results.parquet import unreadable
from loadgen.core.results.store import Stored, read_lightly

Gaps = Mapping[int, NDArray[np.int64]]
"""Slot -> the gaps of its request in order, ns. A request without a gap is not there."""


class StoredWithGaps(Stored):
    """A stored run, and the gaps of each request. None: they were not kept."""

    each_gap: Gaps | None


def read(folder: Path) -> StoredWithGaps:
    """As `store.read_lightly`, its rows in the order of the file. Raises UserError, also for a damaged file of gaps."""
    stored = StoredWithGaps(*read_lightly(folder, by_stage=False))
    stored.each_gap = of_each(folder)
    return stored


def of_each(folder: Path) -> Gaps | None:
    """Of a run that was killed, those of the requests that had ended."""
    is_whole = (folder / gaps.FILE).is_file()
    if not is_whole and not any(folder.glob("spool/w*.events")):
        return None
    groups = _groups(folder / gaps.FILE) if is_whole else gaps.spooled(folder)
    return {slot: of_request for group in groups for slot, of_request in group.each()}


def _groups(file: Path) -> Iterator[RequestGaps]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(file) as groups:
            for number in range(groups.num_row_groups):
                table = groups.read_row_group(number, columns=["slot", "inter_chunk_ns"])
                listed = table["inter_chunk_ns"].combine_chunks()
                counts = listed.value_lengths().to_numpy()
                yield RequestGaps(table["slot"].to_numpy(), counts, listed.flatten().to_numpy())
    except (pa.ArrowException, OSError, KeyError, AttributeError) as error:
        raise unreadable("gaps", error, file, "copy it again") from None
