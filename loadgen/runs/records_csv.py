"""Writes the records of a run as CSV."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from numpy.typing import NDArray

    from loadgen.core.metrics.summary import Summary
    from loadgen.core.results.store import Stored

_BLOCK_ROWS = 131_072
"""So many rows become text together: about 40 MB of CSV."""


def write_csv(
    summary: Summary,  # noqa: ARG001 - every exporter takes it (`FormatRow.write`), CSV ignores it
    stored: Stored,
    block_rows: int = _BLOCK_ROWS,
) -> Iterator[bytes]:
    """Yield the parts of a CSV file with a line per request, after a first line of column names.

    The columns are those of `Result.frame()`, with times in ms. A missing value is an empty field,
    and the gaps between the events of a request are a JSON list. The last column, `simulated`, is
    true if a simulated server answered the request. A run may have more records than fit into
    memory as text, so `block_rows` of them are converted at a time.
    """
    from pyarrow import csv

    # A run without records is one empty block, which still yields the line of column names.
    block_starts = range(0, len(stored.rows), block_rows) or [0]
    for first_row in block_starts:
        block = stored.rows[first_row : first_row + block_rows]
        buffer = io.BytesIO()
        options = csv.WriteOptions(include_header=first_row == 0)
        csv.write_csv(_build_csv_table(stored, block), buffer, options)
        yield buffer.getvalue()


def _build_csv_table(stored: Stored, rows: NDArray[np.void]) -> pa.Table:
    """Return some records of a run as a pyarrow table for a CSV file.

    CSV has no lists, so these are JSON texts. Inter-chunk latencies are a column if the run was
    read together with them.
    """
    import pyarrow as pa

    from loadgen.runs.request_gaps import StoredWithGaps
    from loadgen.runs.request_table import request_table

    gaps_ns_by_slot = stored.gaps_ns_by_slot if isinstance(stored, StoredWithGaps) else None
    table = request_table(
        stored.manifest, rows, stored.texts, unit="ms", gaps_ns_by_slot=gaps_ns_by_slot
    )
    targets = stored.manifest.targets
    is_simulated = [targets[number].simulated for number in rows["target"].tolist()]
    table = table.append_column("simulated", pa.array(is_simulated, pa.bool_()))
    columns = [_convert_for_csv(column) for column in table.columns]

    return pa.table(columns, names=table.column_names)


def _convert_for_csv(column: pa.ChunkedArray) -> pa.ChunkedArray | pa.Array:
    """Return a column with its lists as JSON, and dictionary-encoded values as strings."""
    import pyarrow as pa

    if pa.types.is_list(column.type):
        texts = [None if values is None else json.dumps(values) for values in column.to_pylist()]
        return pa.array(texts, pa.string())

    if pa.types.is_dictionary(column.type):
        return column.cast(pa.string())

    return column
