"""One row per request with its figures, as people want it in a notebook: chosen unit, names instead of numbers, nulls.

Pure. The definitions are those of `loadgen.figures`; the other columns are those of `record.FIELDS`.
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


def request_table(
    manifest: RunManifest,
    rows: NDArray[np.void],
    texts: list[str],
    unit: Unit,
    each_gap: Mapping[int, NDArray[np.int64]] | None = None,
) -> Any:
    """A pyarrow Table: figures and instants in `unit` (`ttft_ms`, `due_ms`), null where a request has none; with
    `each_gap` also a list of its gaps, `inter_chunk_ms`.
    """
    import pyarrow as pa

    table = to_table(rows, texts)
    columns = Columns(rows)
    named: dict[str, Any] = {name: table[name] for name in ("slot", "status", "kind")}
    if manifest.stages:
        stages = [stage.name or str(number) for number, stage in enumerate(manifest.stages)]
        named["stage"] = pa.array([stages[number] for number in rows["stage"]])
    for row in METRICS.shown_in("requests"):
        values, is_time = columns.measure(row.name), row.unit == "ms"
        name = f"{row.name}_{unit}" if is_time else row.field
        named[name] = pa.array(
            _in_unit(values, unit if is_time else "ms"), mask=values == UNDEFINED
        )
    for name in table.column_names:
        if not name.endswith("_ns"):
            named.setdefault(name, table[name])
            continue
        column = f"{name.removesuffix('ns')}{unit}"
        if column not in named:
            known = np.ascontiguousarray(rows[name])
            absent = table[name].is_null().to_numpy()
            named[column] = pa.array(_in_unit(known, unit), mask=absent)
    if each_gap is not None:
        kept = map(each_gap.get, rows["slot"].tolist())
        named[f"inter_chunk_{unit}"] = pa.array(
            [None if gaps is None else _in_unit(gaps, unit).tolist() for gaps in kept],
            pa.list_(pa.int64() if unit == "ns" else pa.float64()),
        )
    return pa.table(named)


def _in_unit(values_ns: Any, unit: Unit) -> Any:
    return values_ns if unit == "ns" else values_ns / NS[unit]
