"""One row per request with its metrics, for notebooks and CSV: a chosen unit, names, and nulls.

Pure. The metrics are those of `loadgen.figures`, and the other columns those of `record.FIELDS`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from loadgen.core.metrics.columns import UNDEFINED, Columns
from loadgen.core.results.parquet import to_table
from loadgen.figures import METRICS

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pyarrow as pa
    from numpy.typing import NDArray

    from loadgen.core.results.manifest import RunManifest

Unit = Literal["ns", "us", "ms", "s"]
NS_PER_UNIT = {"ns": 1, "us": 1e3, "ms": 1e6, "s": 1e9}

MILLIONTHS_PER_UNIT = 1e6
"""Metrics that are no times are stored as integers too, in millionths of their unit."""

FIRST_COLUMNS = (
    "slot",
    "stage",
    "status",
    "kind",
    "due_{unit}",
    "ttft_{unit}",
    "tpot_{unit}",
    "e2e_{unit}",
    "max_gap_{unit}",
    "input_tokens",
    "output_tokens",
    "cached_tokens",
)
"""The columns that matter most, which come first."""


def request_table(
    manifest: RunManifest,
    rows: NDArray[np.void],
    texts: list[str],
    unit: Unit,
    gaps_ns_by_slot: Mapping[int, NDArray[np.int64]] | None = None,
) -> pa.Table:
    """Return a pyarrow table with a row per request, for notebooks and CSV.

    Args:
        manifest: The plan of the run, which has the names of its stages.
        rows: The records of the requests.
        texts: The texts that the records refer to by their indices, such as error messages.
        unit: The unit of latencies and times, which is part of the name of a column (`ttft_ms`).
        gaps_ns_by_slot: The inter-chunk latencies of each request by its slot, which is its number
            in the schedule, for a column of lists. None if they were not kept.

    Returns:
        A table whose first columns are FIRST_COLUMNS. A value that a request does not have is null.
    """
    columns = _stage_column(manifest, rows) | _metric_columns(rows, unit)

    # The name of the stage, for example, has the same column name as its number in the records. The
    # name is more useful, so the columns from the records do not replace the others.
    for name, column in _record_columns(rows, texts, unit).items():
        columns.setdefault(name, column)

    if gaps_ns_by_slot is not None:
        columns[f"inter_chunk_{unit}"] = _gap_column(rows, gaps_ns_by_slot, unit)

    return _order_columns(columns, unit)


def _stage_column(
    manifest: RunManifest, rows: NDArray[np.void]
) -> dict[str, pa.Array | pa.ChunkedArray]:
    """Return the column of the name of the stage of each request, or none for a run without any.

    A stage without a name is called by its number, from 0.
    """
    import pyarrow as pa

    if not manifest.stages:
        return {}
    names = [stage.name or str(index) for index, stage in enumerate(manifest.stages)]
    return {"stage": pa.array([names[index] for index in rows["stage"]])}


def _order_columns(columns: Mapping[str, pa.Array | pa.ChunkedArray], unit: Unit) -> pa.Table:
    """Return a table of the columns, with FIRST_COLUMNS first, then metrics, then other fields."""
    import pyarrow as pa

    first_names = [name.format(unit=unit) for name in FIRST_COLUMNS]
    ordered_names = [name for name in first_names if name in columns]
    ordered_names += [name for name in columns if name not in ordered_names]
    return pa.table({name: columns[name] for name in ordered_names})


def _metric_columns(rows: NDArray[np.void], unit: Unit) -> dict[str, pa.Array | pa.ChunkedArray]:
    """Return a column for each metric that has a value per request, by its name.

    Times are in `unit`, which is part of the name. An undefined value is null.
    """
    import pyarrow as pa

    records = Columns(rows)
    columns = {}
    for definition in METRICS.shown_in("requests"):
        values = records.measure(definition.name)
        is_undefined = values == UNDEFINED

        if definition.unit == "ms":
            name = f"{definition.name}_{unit}"
            column = _convert_ns(values, unit)
        else:
            name = definition.field
            column = values / MILLIONTHS_PER_UNIT

        columns[name] = pa.array(column, mask=is_undefined)

    return columns


def _record_columns(
    rows: NDArray[np.void], texts: list[str], unit: Unit
) -> dict[str, pa.Array | pa.ChunkedArray]:
    """Return a column for each field of the records, with times in `unit` instead of ns.

    The name of a column with times ends with the unit: `due_ns` becomes `due_ms`.
    """
    import pyarrow as pa

    table = to_table(rows, texts)
    columns = {}
    for name in table.column_names:
        if not name.endswith("_ns"):
            columns[name] = table[name]
            continue

        # A time that is missing is negative in the records and null in the table.
        is_missing = table[name].is_null().to_numpy()
        times = _convert_ns(np.ascontiguousarray(rows[name]), unit)
        name_with_unit = f"{name.removesuffix('_ns')}_{unit}"
        columns[name_with_unit] = pa.array(times, mask=is_missing)

    return columns


def _gap_column(
    rows: NDArray[np.void], gaps_ns_by_slot: Mapping[int, NDArray[np.int64]], unit: Unit
) -> pa.Array:
    """Return a column with a list of inter-chunk latencies per request, null where it has none.

    An inter-chunk latency is the gap between two chunks of a response. A request is identified by
    its slot, its position in the schedule of the run.
    """
    import pyarrow as pa

    gaps_by_row = []
    for slot in rows["slot"].tolist():
        gaps_ns = gaps_ns_by_slot.get(slot)
        gaps_by_row.append(None if gaps_ns is None else _convert_ns(gaps_ns, unit).tolist())

    value_type = pa.int64() if unit == "ns" else pa.float64()
    return pa.array(gaps_by_row, pa.list_(value_type))


def _convert_ns(values_ns: NDArray[np.int64], unit: Unit) -> NDArray[Any]:
    """Return times in a unit: integers in ns, and floats in another unit."""
    return values_ns if unit == "ns" else values_ns / NS_PER_UNIT[unit]
