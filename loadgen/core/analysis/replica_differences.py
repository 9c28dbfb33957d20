"""Compare the nodes of a rack: variance of a latency between them, and nodes that stand out.

Pure. The ok requests of the steady-state window are divided into cells, one per node and block of
time. A node is what the targets file calls one, else a target, or a replica of a simulated rack.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

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
from loadgen.core.stats.variance_components import VarianceComponents

METRICS = ("ttft", "tpot", "e2e")
BLOCK_COUNTS = (20, 10, 5, 2)
"""Numbers of blocks of time. The largest that leaves MIN_PER_CELL requests in each cell is used."""
MIN_PER_CELL = 5
MIN_PER_NODE = MIN_PER_CELL * BLOCK_COUNTS[-1]
MAX_OUTLIER_SHARE = 0.1
"""The share of the nodes that may stand out. If more did, the others would be no reference."""
MIN_CHANGE = 0.01
"""Smaller relative differences from the other nodes are not reported."""
CLIENT_ERRORS = {
    "ttft": ("send_lag", "stamp_error"),
    "tpot": ("tpot_error",),
    "e2e": ("send_lag", "last_token_error_ns"),
}
"""What the client may have added to each metric, by sending or reading late."""


class _Nodes(NamedTuple):
    """The nodes that are compared.

    `kind` is node, target or replica, and `index_of_request` has the index of the node in `names`.
    """

    kind: str
    names: list[str]
    index_of_request: NDArray[np.int64]


class _Selection(NamedTuple):
    """The requests that are compared, with the node and the block of time of each.

    Attributes:
        rows: Which requests are scheduled in the steady-state window.
        node: The node of each of them as an index in `names`, -1 if it has too few requests.
        block: The block of time of each of them, if there are BLOCK_COUNTS[0] blocks.
        names: The nodes that are compared.
        left_out: The nodes that have too few requests.
    """

    rows: NDArray[np.bool_] | slice
    node: NDArray[np.int32]
    block: NDArray[np.int8]
    names: list[str]
    left_out: tuple[str, ...]


class _Cells(NamedTuple):
    """The mean and the number of values of each cell (nodes x blocks), and their inner variance."""

    means: NDArray[np.float64]
    counts: NDArray[np.int64]
    variance_within: float


class _Comparison(NamedTuple):
    """The nodes compared by one metric, in so many blocks of time."""

    variances: VarianceTable
    outliers: list[OutlierNode]
    block_count: int


def compare_nodes(measured: Sequence[Columns], steady: Span, manifest: RunManifest) -> BetweenNodes:
    """Compare the latencies of the nodes of a run in the steady-state window.

    The result has variance components and outliers of each metric, or in `why` the reason why
    nodes cannot be compared.

    Args:
        measured: The measured records, by stage.
        steady: The steady-state window.
        manifest: The manifest of the run.
    """
    if not are_interchangeable(manifest.targets):
        return BetweenNodes(
            why="the targets serve different steps of the tasks, so they cannot be compared"
        )
    requests = JoinedColumns(measured, only_ok=True, keeps_columns=False)
    nodes = _assign_nodes(requests, manifest)
    node_count = len(nodes.names)
    if node_count < 2:
        return BetweenNodes()
    if steady.start_s is None or steady.end_s is None or not steady.duration_s:
        why = "at no time was the load only that of measured requests"
        return BetweenNodes(nodes=node_count, why=why)
    block = _assign_blocks(requests["due_ns"], steady.start_s, steady.end_s)
    selection = _select_requests(nodes, block)
    if len(selection.names) < 2:
        why = (
            f"fewer than two {nodes.kind}s have {MIN_PER_NODE} ok requests in the steady-state "
            "window"
        )
        return BetweenNodes(nodes=node_count, why=why)
    comparisons = _compare_metrics(requests, selection)
    if not comparisons:
        why = (
            f"too few requests: each {nodes.kind} needs {MIN_PER_CELL} in each of "
            f"{BLOCK_COUNTS[-1]} blocks of time"
        )
        return BetweenNodes(nodes=node_count, silent=selection.left_out, why=why)
    return BetweenNodes(
        compared=nodes.kind,
        nodes=len(selection.names),
        blocks=max(comparison.block_count for comparison in comparisons),
        variances=tuple(comparison.variances for comparison in comparisons),
        outliers=tuple(node for comparison in comparisons for node in comparison.outliers),
        silent=selection.left_out,
        why="",
    )


def without_metrics(differences: BetweenNodes, unsound: Collection[str]) -> BetweenNodes:
    """Return the differences without those of metrics that the run does not report."""
    return msgspec.structs.replace(
        differences,
        variances=tuple(row for row in differences.variances if row.metric not in unsound),
        outliers=tuple(node for node in differences.outliers if node.metric not in unsound),
    )


def _assign_nodes(requests: JoinedColumns, manifest: RunManifest) -> _Nodes:
    """Return the nodes of a run. If all targets are one node, its replicas are compared."""
    targets = manifest.targets
    node_of_target = [
        target.node or target.name or target.url or str(index)
        for index, target in enumerate(targets)
    ]
    names = list(dict.fromkeys(node_of_target))
    if len(names) > 1:
        index_of_target = np.array([names.index(name) for name in node_of_target])
        kind = "node" if any(target.node for target in targets) else "target"
        return _Nodes(kind, names, index_of_target[requests["target"]])
    keys, index_of_request = number_keys(replica_keys(requests))
    names = [replica_name(key, manifest) for key in keys.tolist()]
    return _Nodes("replica", names, index_of_request)


def _assign_blocks(due_ns: NDArray[np.int64], start_s: float, end_s: float) -> NDArray[np.int8]:
    """Return the block of time in which each request is scheduled, -1 outside of the window.

    The window is divided into BLOCK_COUNTS[0] blocks. The requests are processed in slices, because
    a run may have millions.
    """
    shortest_blocks = BLOCK_COUNTS[0]
    block = np.empty(len(due_ns), np.int8)
    for rows in block_slices(len(due_ns)):
        due_s = due_ns[rows] / 1e9
        fraction = (due_s - start_s) / (end_s - start_s)
        is_inside = (due_s >= start_s) & (due_s < end_s)
        number = np.minimum(fraction * shortest_blocks, shortest_blocks - 1)
        block[rows] = np.where(is_inside, number, -1)
    return block


def _select_requests(nodes: _Nodes, block: NDArray[np.int8]) -> _Selection:
    """Return the requests in the window, with the nodes that have enough of them.

    Args:
        nodes: All nodes, with the node of each request.
        block: The block of time of each request, -1 outside of the window.
    """
    rows = as_selection(block >= 0)
    node_of_request = nodes.index_of_request[rows]
    counts = np.bincount(node_of_request, minlength=len(nodes.names))
    has_enough = counts >= MIN_PER_NODE
    compared = np.flatnonzero(has_enough)
    new_index = np.full(len(nodes.names), -1, np.int32)
    new_index[compared] = np.arange(len(compared))
    return _Selection(
        rows=rows,
        node=new_index[node_of_request],
        block=block[rows],
        names=[nodes.names[index] for index in compared],
        left_out=tuple(nodes.names[index] for index in np.flatnonzero(~has_enough)),
    )


def _compare_metrics(requests: JoinedColumns, selection: _Selection) -> list[_Comparison]:
    """Return the comparison of the nodes by each metric that has enough values."""
    comparisons = [_compare_metric(metric, requests, selection) for metric in METRICS]
    return [comparison for comparison in comparisons if comparison is not None]


def _compare_metric(
    metric: str, requests: JoinedColumns, selection: _Selection
) -> _Comparison | None:
    """Return the variance components and the outliers of a metric, or None for too few values.

    A node is no outlier if the errors of the client may explain its difference from the others.
    """
    values_ns = requests.measure(metric)[selection.rows]
    has_value = as_selection((values_ns != UNDEFINED) & (selection.node >= 0))
    values_ms = values_ns[has_value] / 1e6
    del values_ns  # frees memory before the cells are made
    cells = _make_cells(selection, has_value, values_ms)
    if cells is None:
        return None
    components = variance_components.estimate_components(*cells)
    outliers = _find_outliers(metric, cells.means.mean(axis=1), selection.names)
    if outliers:
        errors_ms = _client_errors(requests, metric)[selection.rows][has_value] / 1e6
        error_cells = _make_cells(selection, has_value, errors_ms) or cells
        outliers = _drop_client_errors(outliers, error_cells, selection.names)
    block_count = cells.means.shape[1]
    return _Comparison(_variance_table(metric, components), outliers, block_count)


def _make_cells(
    selection: _Selection,
    has_value: NDArray[np.bool_] | slice,
    values: NDArray[np.float64],
) -> _Cells | None:
    """Return the mean of each cell of node and block, and the variance inside of the cells.

    The largest number of blocks is used that leaves MIN_PER_CELL values in each cell. Returns None
    if even two blocks of time leave too few. `values` is overwritten, because another copy would be
    as long as the run has requests.

    Args:
        selection: The requests that are compared.
        has_value: Which of them have a value.
        values: Their values.
    """
    node = selection.node[has_value]
    shortest_block = selection.block[has_value]
    node_count = len(selection.names)
    for block_count in BLOCK_COUNTS:
        cell_count = node_count * block_count
        shortest_per_block = BLOCK_COUNTS[0] // block_count
        cell = node * block_count + shortest_block // shortest_per_block
        counts = np.bincount(cell, minlength=cell_count)
        if counts.min() < MIN_PER_CELL:
            continue
        means = np.bincount(cell, weights=values, minlength=cell_count) / counts
        for rows in block_slices(len(values)):
            values[rows] = (means[cell[rows]] - values[rows]) ** 2
        variance_within = float(values.sum()) / (len(values) - cell_count)
        shape = (node_count, block_count)
        return _Cells(means.reshape(shape), counts.reshape(shape), variance_within)
    return None


def _variance_table(metric: str, components: VarianceComponents) -> VarianceTable:
    """Return the components as standard deviations and as fractions of the variance."""

    def share(variance: float) -> float:
        return variance / components.total if components.total else 0.0

    return VarianceTable(
        metric=metric,
        mean_ms=components.mean,
        between_ms=components.between**0.5,
        time_ms=components.time**0.5,
        own_time_ms=components.own_time**0.5,
        within_ms=components.within**0.5,
        between_share=share(components.between),
        time_share=share(components.time),
        own_time_share=share(components.own_time),
        within_share=share(components.within),
    )


def _client_errors(requests: JoinedColumns, metric: str) -> NDArray[np.int64]:
    """Return how much the client may have added to a metric of each request, in ns."""
    total = np.zeros(1, np.int64)
    for name in CLIENT_ERRORS[metric]:
        errors_ns = requests[name] if name.endswith("_ns") else requests.measure(name)
        total = total + np.maximum(errors_ns, 0)
    return total


def _find_outliers(
    metric: str, means_ms: NDArray[np.float64], names: Sequence[str]
) -> list[OutlierNode]:
    """Return the nodes whose mean of a metric differs from that of the other nodes.

    They are found by the generalized ESD test, at a level corrected for the number of metrics
    (Bonferroni), so that LEVEL holds for all metrics. Differences below MIN_CHANGE are negligible.

    Args:
        metric: The metric.
        means_ms: The mean of each node.
        names: The names of the nodes.
    """
    level = 1 - (1 - LEVEL) / len(METRICS)
    max_outliers = max(1, int(len(names) * MAX_OUTLIER_SHARE))
    indexes = variance_components.find_outliers(means_ms, max_outliers, level)
    others_ms = float(np.delete(means_ms, indexes).mean())
    if not others_ms:
        return []
    outliers = []
    for index in indexes:
        mean_ms = float(means_ms[index])
        change = mean_ms / others_ms - 1
        if abs(change) >= MIN_CHANGE:
            outlier = OutlierNode(
                name=names[index],
                metric=metric,
                mean_ms=mean_ms,
                others_ms=others_ms,
                change=change,
            )
            outliers.append(outlier)
    return outliers


def _drop_client_errors(
    outliers: Sequence[OutlierNode], errors: _Cells, names: Sequence[str]
) -> list[OutlierNode]:
    """Return the outliers whose difference is larger than what the client may have added.

    The client may have added to the node itself, or on average to the other nodes.

    Args:
        outliers: The outliers.
        errors: The cells of what the client may have added to each request.
        names: The names of the nodes.
    """
    error_of_node_ms = errors.means.mean(axis=1)
    mean_error_ms = error_of_node_ms.mean()
    thresholds_ms = np.maximum(error_of_node_ms, mean_error_ms)
    threshold_of_node_ms = dict(zip(names, thresholds_ms, strict=True))
    return [
        node
        for node in outliers
        if abs(node.mean_ms - node.others_ms) > threshold_of_node_ms[node.name]
    ]
