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

    from numpy.typing import NDArray

    from loadgen.core.results.manifest import RunManifest

Unit = Literal["ns", "us", "ms", "s"]
NS = {"ns": 1, "us": 1e3, "ms": 1e6, "s": 1e9}
"""Nanoseconds per unit."""

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
    each_gap: Mapping[int, NDArray[np.int64]] | None = None,
) -> Any:
    """Return a pyarrow table with a row per request.

    Args:
        manifest: The manifest of the run.
        rows: Its records.
        texts: The texts that the records refer to.
        unit: The unit of latencies and times, which is part of the name of a column (`ttft_ms`).
        each_gap: The inter-chunk latencies of each request by its slot, for a column of lists. None
            if they were not kept.

    Returns:
        A table whose first columns are FIRST_COLUMNS. A value that a request does not have is null.
    """
    import pyarrow as pa

    columns: dict[str, Any] = {}
    if manifest.stages:
        names = [stage.name or str(index) for index, stage in enumerate(manifest.stages)]
        columns["stage"] = pa.array([names[index] for index in rows["stage"]])
    columns |= _metric_columns(rows, unit)
    for name, column in _record_columns(rows, texts, unit).items():
        columns.setdefault(name, column)
    if each_gap is not None:
        columns[f"inter_chunk_{unit}"] = _gap_column(rows, each_gap, unit)
    first = [name.format(unit=unit) for name in FIRST_COLUMNS]
    order = [name for name in first if name in columns]
    order += [name for name in columns if name not in order]
    return pa.table({name: columns[name] for name in order})


def _metric_columns(rows: NDArray[np.void], unit: Unit) -> dict[str, Any]:
    """Return the metrics that have a value per request."""
    import pyarrow as pa

    records = Columns(rows)
    columns = {}
    for definition in METRICS.shown_in("requests"):
        values = records.measure(definition.name)
        is_time = definition.unit == "ms"
        name = f"{definition.name}_{unit}" if is_time else definition.field
        # Values of another unit than ms are millionths of it, as ns are of a ms.
        converted = _in_unit(values, unit if is_time else "ms")
        columns[name] = pa.array(converted, mask=values == UNDEFINED)
    return columns


def _record_columns(rows: NDArray[np.void], texts: list[str], unit: Unit) -> dict[str, Any]:
    """Return the fields of the records, with times in the unit."""
    import pyarrow as pa

    table = to_table(rows, texts)
    columns = {}
    for name in table.column_names:
        if not name.endswith("_ns"):
            columns[name] = table[name]
            continue
        times_ns = np.ascontiguousarray(rows[name])
        is_missing = table[name].is_null().to_numpy()
        columns[f"{name.removesuffix('ns')}{unit}"] = pa.array(
            _in_unit(times_ns, unit), mask=is_missing
        )
    return columns


def _gap_column(
    rows: NDArray[np.void], each_gap: Mapping[int, NDArray[np.int64]], unit: Unit
) -> Any:
    """Return the list of the inter-chunk latencies of each request, null where it has none."""
    import pyarrow as pa

    lists = []
    for slot in rows["slot"].tolist():
        gaps_ns = each_gap.get(slot)
        lists.append(None if gaps_ns is None else _in_unit(gaps_ns, unit).tolist())
    return pa.array(lists, pa.list_(pa.int64() if unit == "ns" else pa.float64()))


def _in_unit(values_ns: NDArray[np.int64], unit: Unit) -> NDArray[Any]:
    """Return times in a unit: integers in ns, and floats in another unit."""
    return values_ns if unit == "ns" else values_ns / NS[unit]
