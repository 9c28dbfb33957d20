"""Writes the records of a run as CSV."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from loadgen.core.metrics.summary import Summary
    from loadgen.core.results.store import Stored

_BLOCK_ROWS = 131_072  # rows that become text together: about 40 MB of CSV


def write(
    summary: Summary,  # noqa: ARG001 - the signature of `FormatRow.write`
    stored: Stored,
    block_rows: int = _BLOCK_ROWS,
) -> Iterator[bytes]:
    """Yield the parts of a CSV file with the columns of `Result.frame()`, times in ms.

    A missing value is an empty field. The gaps between the events of a request are a JSON list. The
    last column, `simulated`, is true if a simulated server answered the request.
    """
    import pyarrow as pa
    from pyarrow import csv

    from loadgen.runs.request_table import request_table

    targets = stored.manifest.targets
    each_gap = getattr(stored, "each_gap", None)
    for first in range(0, max(len(stored.rows), 1), block_rows):
        rows = stored.rows[first : first + block_rows]
        table = request_table(stored.manifest, rows, stored.texts, "ms", each_gap)
        is_simulated = [targets[number].simulated for number in rows["target"].tolist()]
        table = table.append_column("simulated", pa.array(is_simulated, pa.bool_()))
        columns = [_to_text(column) for column in table.columns]
        buffer = io.BytesIO()
        csv.write_csv(
            pa.table(columns, names=table.column_names),
            buffer,
            csv.WriteOptions(include_header=first == 0),
        )
        yield buffer.getvalue()


def _to_text(column: Any) -> Any:
    """Return a column of a pyarrow table with lists as JSON and dictionary values as strings."""
    import pyarrow as pa

    if pa.types.is_list(column.type):
        lists = [None if gaps is None else json.dumps(gaps) for gaps in column.to_pylist()]
        return pa.array(lists, pa.string())
    if pa.types.is_dictionary(column.type):
        return column.cast(pa.string())
    return column
