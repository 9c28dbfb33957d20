"""Read the stored times between output events of each request, which `--keep gaps` wrote. IO."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from loadgen.core.results import gaps
from loadgen.core.results.gaps import RequestGaps
from loadgen.core.results.parquet import unreadable

if TYPE_CHECKING:
    import pyarrow as pa


def iterate_stored_gaps(run_dir: Path) -> Iterator[RequestGaps] | None:
    """Return an iterator over the stored times between output events, None if none are stored.

    Each item has the times of some of the requests of the run. A run that was killed or that has
    just ended has no Parquet file yet, so the files that its worker processes wrote are read.

    Raises:
        UserError: The file is damaged. This is raised during the iteration.
    """
    parquet_file = run_dir / gaps.FILE
    if parquet_file.is_file():
        return _read_row_groups(parquet_file)

    has_worker_files = any(run_dir.glob("spool/w*.events"))
    if has_worker_files:
        return gaps.read_event_files(run_dir)
    return None


def _read_row_groups(parquet_file: Path) -> Iterator[RequestGaps]:
    """Yield the times between output events in a Parquet file, one row group after the other.

    Only one row group is in memory at a time, so the file may be larger than memory.

    Raises:
        UserError: The file is damaged.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    damage_errors = (
        pa.ArrowException,  # the content is damaged
        OSError,  # the file is cut off
        KeyError,  # a column is missing
        AttributeError,  # a column has no lists
    )
    try:
        with pq.ParquetFile(parquet_file) as reader:
            for group_index in range(reader.num_row_groups):
                table = reader.read_row_group(group_index, columns=["slot", "inter_chunk_ns"])
                yield _convert_to_request_gaps(table)
    except damage_errors as error:
        raise unreadable(
            content="gaps", error=error, path=parquet_file, hint="copy it again"
        ) from None


def _convert_to_request_gaps(table: pa.Table) -> RequestGaps:
    """Convert a table that has a list of times in each row, one row for each request.

    The result has the times of all requests in one array, and the number of times of each request.
    """
    lists = table["inter_chunk_ns"].combine_chunks()
    return RequestGaps(
        slots=table["slot"].to_numpy(),
        counts=lists.value_lengths().to_numpy(),
        values=lists.flatten().to_numpy(),
    )
