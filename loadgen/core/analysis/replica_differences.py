"""How much of the variance of a latency lies between the nodes of a rack, and which node stands out. Pure.

The ok requests of the steady window are put into cells, one per node and block of time. A node is what the targets
file calls one; else a target; of a simulated rack a replica.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from loadgen.core.metrics.columns import UNDEFINED, Columns, JoinedColumns, as_selection
from loadgen.core.metrics.replica_keys import number_keys, replica_keys, replica_name
from loadgen.core.metrics.sections import BetweenNodes, OutlierNode, VarianceTable
from loadgen.core.metrics.windows import Span
from loadgen.core.results.manifest import RunManifest, are_interchangeable
from loadgen.core.stats import variance_components
from loadgen.core.stats.intervals import LEVEL
from loadgen.core.stats.quantiles import block_slices

METRICS = ("ttft", "tpot", "e2e")
BLOCKS = (20, 10, 5, 2)  # of time: as many as leave FEWEST requests in each cell
FEWEST = 5
ODD_SHARE = 0.1  # of the nodes that may stand out; of more, the others are no measure
LEAST_CHANGE = 0.01  # of the mean of the others: a smaller difference is not worth a name


def of_rows(measured: Sequence[Columns], steady: Span, manifest: RunManifest) -> BetweenNodes:
    """Compare the nodes of the measured rows of a run."""
    if not are_interchangeable(manifest.targets):
        return BetweenNodes(why="the targets serve different steps of the tasks")
    requests = JoinedColumns(measured, ok=True, keep=False)
    unit, names, of_row = _units(requests, manifest)
    if len(names) < 2:
        return BetweenNodes()
    if steady.start_s is None or steady.end_s is None or not steady.duration_s:
        why = "there is no time at which the load was only that of measured requests"
        return BetweenNodes(nodes=len(names), why=why)
    due_ns = requests["due_ns"]
    times = np.empty(
        len(due_ns), np.int8
    )  # which of the shortest blocks each is due in; -1: in none
    for rows in block_slices(len(due_ns)):
        due_s = due_ns[rows] / 1e9
        share = (due_s - steady.start_s) / steady.duration_s
        in_steady = (due_s >= steady.start_s) & (due_s < steady.end_s)
        times[rows] = np.where(in_steady, np.minimum(share * BLOCKS[0], BLOCKS[0] - 1), -1)
    inside = as_selection(times >= 0)
    of_row, times = of_row[inside], times[inside]
    counted = np.bincount(of_row, minlength=len(names))
    spoken = [i for i in range(len(names)) if counted[i] >= FEWEST * BLOCKS[-1]]
    silent = tuple(names[i] for i in range(len(names)) if i not in spoken)
    if len(spoken) < 2:
        why = f"fewer than two {unit}s have {FEWEST * BLOCKS[-1]} ok requests in the steady window"
        return BetweenNodes(nodes=len(names), why=why)
    place = np.full(len(names), -1, np.int32)
    place[spoken] = np.arange(len(spoken))
    part = place[of_row]
    del of_row
    tables, odd, blocks_used = [], [], 0
    for metric in METRICS:
        values_ns = requests.measure(metric)[inside]
        own = as_selection((values_ns != UNDEFINED) & (part >= 0))
        values = values_ns[own] / 1e6
        del values_ns
        cells = _cells(part[own], times[own], values, len(spoken))
        if cells is None:
            continue
        means, counts, within = cells
        blocks_used = max(blocks_used, means.shape[1])
        tables.append(
            _table(metric, variance_components.estimate_components(means, counts, within))
        )
        found = _odd(metric, means.mean(axis=1), [names[i] for i in spoken])
        if found:  # by more than the load generator may have added to it, or to the others
            added = _cells(
                part[own], times[own], _added(requests, metric)[inside][own] / 1e6, len(spoken)
            )
            own_ms = (added or cells)[0].mean(axis=1)
            least_ms = dict(
                zip((names[i] for i in spoken), np.maximum(own_ms, own_ms.mean()), strict=True)
            )
            odd += [one for one in found if abs(one.mean_ms - one.others_ms) > least_ms[one.name]]
    if not tables:
        why = f"too few requests: {FEWEST} per {unit} in each of {BLOCKS[-1]} stretches of time are needed"
        return BetweenNodes(nodes=len(names), silent=silent, why=why)
    return BetweenNodes(
        compared=unit,
        nodes=len(spoken),
        blocks=blocks_used,
        variances=tuple(tables),
        outliers=tuple(odd),
        silent=silent,
        why="",
    )


def without(found: BetweenNodes, unsound: Collection[str]) -> BetweenNodes:
    """Without the metrics that the run withholds."""
    variances, odd = (
        tuple(one for one in of if one.metric not in unsound)
        for of in (found.variances, found.outliers)
    )
    return msgspec.structs.replace(found, variances=variances, outliers=odd)


def _units(
    requests: JoinedColumns, manifest: RunManifest
) -> tuple[str, list[str], NDArray[np.int64]]:
    """What is compared, the names of all of them, and the number of the one of each row."""
    targets = manifest.targets
    nodes = [target.node or target.name or target.url or str(i) for i, target in enumerate(targets)]
    if len(set(nodes)) > 1:
        names = list(dict.fromkeys(nodes))
        number = np.array([names.index(node) for node in nodes])
        unit = "node" if any(target.node for target in targets) else "target"
        return unit, names, number[requests["target"]]
    keys, of_row = number_keys(replica_keys(requests))
    return "replica", [replica_name(key, manifest) for key in keys.tolist()], of_row


def _cells(
    part: NDArray[np.int32], times: NDArray[np.int8], values: NDArray[np.float64], parts: int
) -> tuple[NDArray[np.float64], NDArray[np.int64], float] | None:
    """Means and counts of parts x blocks, and the variance inside of cells; None where even two blocks are too many.

    `times`: of the shortest blocks, of which longer ones are made. The values are used up.
    """
    for blocks in BLOCKS:
        cell = part * blocks + times // (BLOCKS[0] // blocks)
        counts = np.bincount(cell, minlength=parts * blocks)
        if counts.min() >= FEWEST:
            means = np.bincount(cell, weights=values, minlength=parts * blocks) / counts
            for rows in block_slices(
                len(values)
            ):  # in place: each copy is as long as the run has requests
                values[rows] = (means[cell[rows]] - values[rows]) ** 2
            within = float(values.sum()) / (len(values) - parts * blocks)
            return means.reshape(parts, blocks), counts.reshape(parts, blocks), within
    return None


def _table(metric: str, found: variance_components.VarianceComponents) -> VarianceTable:
    variances = {name: getattr(found, name) for name in ("between", "time", "own_time", "within")}
    return VarianceTable(
        metric=metric,
        mean_ms=found.mean,
        **{f"{name}_ms": value**0.5 for name, value in variances.items()},
        **{
            f"{name}_share": value / found.total if found.total else 0.0
            for name, value in variances.items()
        },
    )


ERRORS = {
    "ttft": ("send_lag", "stamp_error"),
    "tpot": ("tpot_error",),
    "e2e": ("send_lag", "last_token_error_ns"),
}
"""Metric -> what the load generator may have added to it: it sent late, or read late."""


def _added(requests: JoinedColumns, metric: str) -> NDArray[np.int64]:
    columns = (
        requests[name] if name.endswith("_ns") else requests.measure(name)
        for name in ERRORS[metric]
    )
    return sum((np.maximum(each, 0) for each in columns), np.zeros(1, np.int64))


def _odd(metric: str, means: NDArray[np.float64], names: Sequence[str]) -> list[OutlierNode]:
    level = 1 - (1 - LEVEL) / len(METRICS)  # Bonferroni: all metrics together keep the confidence
    places = variance_components.find_outliers(means, max(1, int(len(names) * ODD_SHARE)), level)
    others = float(np.delete(means, places).mean())
    changes = {i: float(means[i]) / others - 1 for i in places if others}
    return [
        OutlierNode(
            name=names[i], metric=metric, mean_ms=float(means[i]), others_ms=others, change=change
        )
        for i, change in changes.items()
        if abs(change) >= LEAST_CHANGE
    ]
