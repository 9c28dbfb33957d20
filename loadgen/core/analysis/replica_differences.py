"""Compare the nodes of a rack: variance of a latency between them, and nodes that stand out.

Pure. The ok requests of the steady-state window are divided into cells, one per node and block of
time. A node is what the targets file calls one, else a target, or a replica of a simulated rack.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import reduce
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from loadgen.core.metrics.columns import UNDEFINED, Columns, JoinedColumns, as_selection
from loadgen.core.metrics.replica_keys import index_keys, replica_keys, replica_name
from loadgen.core.metrics.sections import BetweenNodes, OutlierNode, VarianceTable
from loadgen.core.metrics.windows import Span
from loadgen.core.results.manifest import RunManifest, TargetFacts, are_interchangeable
from loadgen.core.stats.intervals import LEVEL
from loadgen.core.stats.quantiles import block_slices
from loadgen.core.stats.variance_components import (
    VarianceComponents,
    estimate_components,
    find_outliers,
)

METRICS = ("ttft", "tpot", "e2e")
BLOCK_COUNTS = (20, 10, 5, 2)
"""Numbers of blocks of time. The largest that leaves MIN_PER_CELL requests in each cell is used."""
SHORT_BLOCKS = BLOCK_COUNTS[0]
"""The steady-state window is divided into so many blocks. Neighbours are joined to make fewer."""
OUTSIDE_WINDOW = -1
"""The block of a request that is not scheduled in the steady-state window."""
NOT_COMPARED = -1
"""The node of a request that is not compared, because its node has too few requests in the
steady-state window, or because the request is outside of this window."""
MIN_PER_CELL = 5
MIN_PER_NODE = MIN_PER_CELL * BLOCK_COUNTS[-1]
MAX_OUTLIER_SHARE = 0.1
"""The share of the nodes that may stand out. If more did, the others would be no reference."""
MIN_CHANGE = 0.01
"""Smaller relative differences from the other nodes are not reported."""


class _ClientErrors(NamedTuple):
    """What the client may have added to a latency, by sending or reading late.

    Attributes:
        metrics: Names of metrics of a request.
        fields: Names of fields of its record.
    """

    metrics: tuple[str, ...]
    fields: tuple[str, ...] = ()


CLIENT_ERRORS = {
    "ttft": _ClientErrors(metrics=("send_lag", "stamp_error")),
    "tpot": _ClientErrors(metrics=("tpot_error",)),
    "e2e": _ClientErrors(metrics=("send_lag",), fields=("last_token_error_ns",)),
}
"""The errors of each of METRICS."""


class _Nodes(NamedTuple):
    """The nodes that are compared.

    `kind` is node, target or replica, and `index_of_request` has the index of the node in `names`.
    """

    kind: str
    names: list[str]
    index_of_request: NDArray[np.int64]


class _ComparedNodes(NamedTuple):
    """The nodes that are compared, with the node and the block of time of each ok request.

    Attributes:
        names: The nodes that are compared.
        left_out: The names of the nodes that have too few requests.
        node_of_request: The node of each request as an index of `names`. It is NOT_COMPARED for a
            request of another node, or outside the steady-state window.
        short_block_of_request: The block of time of each request, of SHORT_BLOCKS blocks, or
            OUTSIDE_WINDOW.
    """

    names: list[str]
    left_out: tuple[str, ...]
    node_of_request: NDArray[np.int32]
    short_block_of_request: NDArray[np.int8]


class _Cells(NamedTuple):
    """A table of nodes x blocks of time, each cell of which holds one or more values.

    The cells are numbered node by node: with 5 blocks, node 0 has the cells 0 to 4, and node 1 the
    cells 5 to 9.

    Attributes:
        cell_of_value: The number of the cell of each value.
        counts: The number of values of each cell, nodes x blocks.
    """

    cell_of_value: NDArray[np.int32]
    counts: NDArray[np.int64]

    @property
    def block_count(self) -> int:
        """The number of blocks of time."""
        return int(self.counts.shape[1])

    def mean_of_cells(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the mean of the values of each cell, nodes x blocks."""
        sums = np.bincount(self.cell_of_value, weights=values, minlength=self.counts.size)
        means: NDArray[np.float64] = sums.reshape(self.counts.shape) / self.counts
        return means


class _Comparison(NamedTuple):
    """The comparison of the nodes by one metric.

    Attributes:
        variances: The components of the variance of the metric.
        outliers: The nodes that stand out.
        block_count: The number of blocks of time that the steady-state window was divided into.
    """

    variances: VarianceTable
    outliers: list[OutlierNode]
    block_count: int


def compare_nodes(
    measured_stages: Sequence[Columns], steady: Span, manifest: RunManifest
) -> BetweenNodes:
    """Compare the latencies of the nodes of a run in the steady-state window.

    A node is a machine, a target or a replica. The result is empty for a run with one node, and
    only has a reason if nodes cannot be compared.

    Args:
        measured_stages: The records of each measured stage.
        steady: The steady-state window.
        manifest: The manifest of the run.
    """
    if not are_interchangeable(manifest.targets):
        return BetweenNodes(
            reason="the targets serve different steps of the tasks, so they cannot be compared"
        )

    # The columns are not kept in memory, because a run may have millions of requests.
    requests = JoinedColumns(measured_stages, only_ok=True, keeps_columns=False)
    nodes = _assign_nodes(requests, manifest)
    if len(nodes.names) < 2:
        return BetweenNodes()

    # Without a steady-state window, there are no requests to compare.
    if steady.start_s is None or steady.end_s is None or not steady.duration_s:
        reason = "at no time was the load only that of measured requests"
        return BetweenNodes(nodes=len(nodes.names), reason=reason)

    short_blocks = _assign_short_blocks(requests["due_ns"], steady.start_s, steady.end_s)
    compared = _select_nodes(nodes, short_blocks)
    return _compare_selected(requests, nodes, compared)


def _compare_selected(
    requests: JoinedColumns, nodes: _Nodes, compared: _ComparedNodes
) -> BetweenNodes:
    """Return how the latencies of the compared nodes differ, or why they cannot be compared.

    The comparison needs two nodes, each with MIN_PER_CELL requests in each block of time.

    Args:
        requests: The ok requests of the run.
        nodes: All nodes of the run.
        compared: The nodes that have enough requests in the steady-state window.
    """
    if len(compared.names) < 2:
        # The result does not list the nodes with too few requests, as they are all or all but one.
        reason = (
            f"fewer than two {nodes.kind}s have {MIN_PER_NODE} ok requests in the steady-state "
            "window"
        )
        return BetweenNodes(nodes=len(nodes.names), reason=reason)

    comparisons = _compare_metrics(requests, compared)
    if not comparisons:
        reason = (
            f"too few requests: each {nodes.kind} needs {MIN_PER_CELL} in each of "
            f"{BLOCK_COUNTS[-1]} blocks of time"
        )
        return BetweenNodes(nodes=len(nodes.names), left_out=compared.left_out, reason=reason)

    return _summarize_comparisons(comparisons, nodes.kind, compared)


def _summarize_comparisons(
    comparisons: Sequence[_Comparison], node_kind: str, compared: _ComparedNodes
) -> BetweenNodes:
    """Return the differences between nodes for the summary of a run.

    Args:
        comparisons: The comparison of the nodes by each metric.
        node_kind: What a node is, such as "replica".
        compared: The compared nodes, and those with too few requests.
    """
    largest_block_count = max(comparison.block_count for comparison in comparisons)
    all_outliers = [node for comparison in comparisons for node in comparison.outliers]

    return BetweenNodes(
        # The nodes.
        node_kind=node_kind,
        nodes=len(compared.names),
        left_out=compared.left_out,
        # The comparisons.
        blocks=largest_block_count,
        variances=tuple(comparison.variances for comparison in comparisons),
        outliers=tuple(all_outliers),
        reason="",  # there is no reason not to compare the nodes
    )


def without_metrics(differences: BetweenNodes, withheld: Collection[str]) -> BetweenNodes:
    """Return the differences between nodes without the withheld metrics."""
    variances = tuple(row for row in differences.variances if row.metric not in withheld)
    outliers = tuple(node for node in differences.outliers if node.metric not in withheld)
    return msgspec.structs.replace(differences, variances=variances, outliers=outliers)


def _assign_nodes(requests: JoinedColumns, manifest: RunManifest) -> _Nodes:
    """Return the nodes of a run, and the node of each request.

    Requests are sent to targets. Targets with the same `node` name are one node, and a target
    without such a name is a node by itself. If that makes only one node, its replicas are compared
    as if they were nodes.
    """
    # For example, the targets a, b and c are on the nodes x, x and y.
    node_name_of_target = [
        _node_name(target, target_index) for target_index, target in enumerate(manifest.targets)
    ]
    node_names = list(dict.fromkeys(node_name_of_target))  # x, y
    if len(node_names) < 2:
        return _assign_replicas(requests, manifest)

    node_index_of_target = np.array([node_names.index(name) for name in node_name_of_target])
    node_index_of_request = node_index_of_target[requests["target"]]

    has_named_nodes = any(target.node for target in manifest.targets)
    kind = "node" if has_named_nodes else "target"
    return _Nodes(kind, node_names, node_index_of_request)


def _node_name(target: TargetFacts, target_index: int) -> str:
    """Return the node of a target, or the name, URL or index of the target if it has none."""
    return target.node or target.name or target.url or str(target_index)


def _assign_replicas(requests: JoinedColumns, manifest: RunManifest) -> _Nodes:
    """Return the replicas of a run as nodes, and the replica of each request."""
    replicas = index_keys(replica_keys(requests))
    names = [replica_name(key, manifest) for key in replicas.unique_keys.tolist()]
    return _Nodes("replica", names, replicas.key_index)


def _assign_short_blocks(
    due_ns: NDArray[np.int64], start_s: float, end_s: float
) -> NDArray[np.int8]:
    """Return the block of time in which each request is scheduled, or OUTSIDE_WINDOW.

    The window from `start_s` to `end_s` is divided into SHORT_BLOCKS blocks of equal length. In a
    window from 100 s to 120 s with 20 blocks, a request at 103.5 s is in block 3.

    Args:
        due_ns: The scheduled time of each request.
        start_s: The start of the window.
        end_s: The end of the window, which is not part of it.
    """
    last_block = SHORT_BLOCKS - 1
    block_of_request = np.empty(len(due_ns), np.int8)

    # A run may have millions of requests, so they are processed slice by slice.
    for rows in block_slices(len(due_ns)):
        due_s = due_ns[rows] / 1e9
        is_inside = (due_s >= start_s) & (due_s < end_s)

        fraction_of_window = (due_s - start_s) / (end_s - start_s)
        blocks = np.floor(fraction_of_window * SHORT_BLOCKS)
        blocks_in_window = np.minimum(blocks, last_block)  # a fraction may be rounded up to 1
        block_of_request[rows] = np.where(is_inside, blocks_in_window, OUTSIDE_WINDOW)

    return block_of_request


def _select_nodes(nodes: _Nodes, block_of_request: NDArray[np.int8]) -> _ComparedNodes:
    """Return the nodes that have MIN_PER_NODE requests in the steady-state window.

    Args:
        nodes: All nodes, with the node of each request.
        block_of_request: The block of time of each request, or OUTSIDE_WINDOW.
    """
    is_in_window = block_of_request != OUTSIDE_WINDOW
    nodes_in_window = nodes.index_of_request[as_selection(is_in_window)]
    request_count_of_node = np.bincount(nodes_in_window, minlength=len(nodes.names))
    is_compared = request_count_of_node >= MIN_PER_NODE

    # The compared nodes are numbered without gaps, as indexes of the list of their names.
    new_index_of_node = _number_without_gaps(is_compared)
    node_of_request = new_index_of_node[nodes.index_of_request]
    node_of_request[~is_in_window] = NOT_COMPARED

    return _ComparedNodes(
        names=[nodes.names[index] for index in np.flatnonzero(is_compared)],
        left_out=tuple(nodes.names[index] for index in np.flatnonzero(~is_compared)),
        node_of_request=node_of_request,
        short_block_of_request=block_of_request,
    )


def _number_without_gaps(is_compared: NDArray[np.bool_]) -> NDArray[np.int32]:
    """Return the numbers 0, 1, 2 and so on for the compared nodes, and NOT_COMPARED for others.

    If the second of three nodes is not compared, the result is [0, NOT_COMPARED, 1].
    """
    numbers = np.full(len(is_compared), NOT_COMPARED, np.int32)
    numbers[is_compared] = np.arange(np.count_nonzero(is_compared))
    return numbers


def _compare_metrics(requests: JoinedColumns, compared: _ComparedNodes) -> list[_Comparison]:
    """Return the comparison of the nodes by each metric that has enough values."""
    comparisons = [_compare_metric(metric, requests, compared) for metric in METRICS]
    return [comparison for comparison in comparisons if comparison is not None]


class _MetricValues(NamedTuple):
    """The values of a metric of the compared requests, one for each that has a value.

    Attributes:
        has_value: Which of all ok requests are compared and have a value.
        values_ms: The values, in ms.
        node_of_value: The node of each value, as an index of the compared nodes.
        short_block_of_value: The block of time of each value, of SHORT_BLOCKS blocks.
    """

    has_value: NDArray[np.bool_]
    values_ms: NDArray[np.float64]
    node_of_value: NDArray[np.int32]
    short_block_of_value: NDArray[np.int8]


def _compare_metric(
    metric: str, requests: JoinedColumns, compared: _ComparedNodes
) -> _Comparison | None:
    """Return how a latency metric differs between nodes, or None if there are too few values.

    A cell has the values of one node in one block of time. The variance of the metric and the nodes
    that stand out are computed from the means of the cells.

    Args:
        metric: The metric, one of METRICS.
        requests: The ok requests of the run.
        compared: The nodes that are compared.
    """
    values = _read_values(metric, requests, compared)
    cells = _divide_into_cells(values, node_count=len(compared.names))
    if cells is None:
        return None

    # The variance within cells, between nodes, and over time.
    cell_means_ms = cells.mean_of_cells(values.values_ms)
    variance_within = _measure_variance_within(cells, values.values_ms, cell_means_ms)
    components = estimate_components(cell_means_ms, cells.counts, variance_within)

    # The nodes that stand out, unless the client may be the cause.
    node_means_ms = cell_means_ms.mean(axis=1)
    candidates = _find_outliers(metric, node_means_ms, compared.names)
    outliers: list[OutlierNode] = []
    if candidates:
        client_errors_ms = _client_errors(requests, metric)[values.has_value] / 1e6
        client_error_of_cells_ms = cells.mean_of_cells(client_errors_ms)
        outliers = _select_beyond_client_error(candidates, client_error_of_cells_ms, compared.names)

    return _Comparison(
        variances=_variance_table(metric, components),
        outliers=outliers,
        block_count=cells.block_count,
    )


def _read_values(metric: str, requests: JoinedColumns, compared: _ComparedNodes) -> _MetricValues:
    """Return the values of a metric, of all compared requests that have one.

    Args:
        metric: The metric, one of METRICS.
        requests: The ok requests of the run.
        compared: The compared nodes, with the node and the block of time of each request.
    """
    latencies_ns = requests.measure(metric)
    is_compared = compared.node_of_request != NOT_COMPARED
    has_value = is_compared & (latencies_ns != UNDEFINED)

    return _MetricValues(
        has_value=has_value,
        values_ms=latencies_ns[has_value] / 1e6,
        node_of_value=compared.node_of_request[has_value],
        short_block_of_value=compared.short_block_of_request[has_value],
    )


def _divide_into_cells(values: _MetricValues, node_count: int) -> _Cells | None:
    """Divide values into cells, one for each node and block of time.

    The steady-state window is divided into as many blocks as possible, of BLOCK_COUNTS, such that
    each cell has at least MIN_PER_CELL values. Return None if not even the smallest number of
    blocks leaves so many.
    """
    # BLOCK_COUNTS begins with the largest number.
    for block_count in BLOCK_COUNTS:
        cells = _form_cells(values, node_count, block_count)
        if cells.counts.min() >= MIN_PER_CELL:
            return cells
    return None


def _form_cells(values: _MetricValues, node_count: int, block_count: int) -> _Cells:
    """Divide values into cells, one for each node and block of time.

    A block consists of several short blocks: with 20 short blocks and 5 blocks, the short blocks 0
    to 3 are block 0. The cells are numbered node by node: node 0 then has the cells 0 to 4, and
    node 1 the cells 5 to 9.

    Args:
        values: The values, with the node and the short block of each.
        node_count: The number of nodes.
        block_count: The number of blocks, a divisor of SHORT_BLOCKS.
    """
    short_blocks_per_block = SHORT_BLOCKS // block_count
    block_of_value = values.short_block_of_value // short_blocks_per_block
    cell_of_value = values.node_of_value * block_count + block_of_value

    # The counts of all cells, in the order of their numbers, become a table of nodes x blocks.
    counts = np.bincount(cell_of_value, minlength=node_count * block_count)
    return _Cells(cell_of_value, counts=counts.reshape(node_count, block_count))


def _measure_variance_within(
    cells: _Cells, values: NDArray[np.float64], cell_means: NDArray[np.float64]
) -> float:
    """Return the pooled variance of the values around the means of their cells.

    Args:
        cells: The cell of each value.
        values: The values. They are overwritten to save memory, because there may be millions.
        cell_means: The mean of each cell, nodes x blocks.
    """
    mean_by_cell_number = cell_means.ravel()

    # The squared deviations replace the values, slice by slice.
    for rows in block_slices(len(values)):
        cell_numbers = cells.cell_of_value[rows]
        deviations = mean_by_cell_number[cell_numbers] - values[rows]
        values[rows] = deviations**2
    squared_deviations = values

    # Each mean of a cell takes one degree of freedom.
    sum_of_squares = float(squared_deviations.sum())
    degrees_of_freedom = len(values) - cell_means.size
    return sum_of_squares / degrees_of_freedom


def _variance_table(metric: str, components: VarianceComponents) -> VarianceTable:
    """Return how much a metric varies between nodes and over time, for the summary of a run.

    The variance of a value is the sum of four variances. The fields `..._ms` are their square
    roots, which are standard deviations, and the fields `..._share` are their shares of the sum.

    Args:
        metric: The metric.
        components: The variances, in square milliseconds.
    """
    total = components.total
    return VarianceTable(
        metric=metric,
        mean_ms=components.mean,
        # The variance between the means of the nodes.
        between_ms=components.between_parts**0.5,
        between_share=_share_of_variance(components.between_parts, total),
        # The variance over time that all nodes have in common.
        time_ms=components.over_time**0.5,
        time_share=_share_of_variance(components.over_time, total),
        # The variance over time of single nodes, which is called the interaction.
        own_time_ms=components.interaction**0.5,
        own_time_share=_share_of_variance(components.interaction, total),
        # The variance of the values of one node in one block of time.
        within_ms=components.within_cells**0.5,
        within_share=_share_of_variance(components.within_cells, total),
    )


def _share_of_variance(variance: float, total: float) -> float:
    """Return the share of a variance in the total variance, 0 if all values are equal."""
    return variance / total if total else 0.0


def _client_errors(requests: JoinedColumns, metric: str) -> NDArray[np.int64]:
    """Return how much the client may have added to a latency of each request, in ns.

    Several errors of the client are added. A negative error is not known, and counts as 0.
    """
    known_errors_ns = (np.maximum(errors_ns, 0) for errors_ns in _read_errors(requests, metric))
    return reduce(np.add, known_errors_ns)


def _read_errors(requests: JoinedColumns, metric: str) -> Iterator[NDArray[np.int64]]:
    """Yield each error of a latency, for all requests in ns. One at a time takes less memory."""
    names = CLIENT_ERRORS[metric]
    for name in names.metrics:
        yield requests.measure(name)
    for name in names.fields:
        yield requests[name]


def _find_outliers(
    metric: str, means_ms: NDArray[np.float64], names: Sequence[str]
) -> list[OutlierNode]:
    """Return the nodes whose mean of a metric clearly differs from that of the other nodes.

    The test is the generalized ESD test. Relative differences below MIN_CHANGE are left out.

    Args:
        metric: The metric.
        means_ms: The mean of each node.
        names: The names of the nodes.
    """
    max_outliers = max(1, int(len(names) * MAX_OUTLIER_SHARE))
    level = _level_of_each_metric()  # stricter, because several metrics are tested
    outlier_indexes = find_outliers(means_ms, max_outliers, level)

    means_of_others_ms = np.delete(means_ms, outlier_indexes)
    mean_of_others_ms = float(means_of_others_ms.mean())
    if mean_of_others_ms == 0:
        return []  # a relative difference from 0 is not defined

    outliers = []
    for index in outlier_indexes:
        mean_ms = float(means_ms[index])
        relative_difference = mean_ms / mean_of_others_ms - 1
        if abs(relative_difference) < MIN_CHANGE:
            continue

        outlier = OutlierNode(
            name=names[index],
            metric=metric,
            mean_ms=mean_ms,
            others_ms=mean_of_others_ms,
            change=relative_difference,
        )
        outliers.append(outlier)

    return outliers


def _level_of_each_metric() -> float:
    """Return the confidence level for one metric, so that all metrics together have LEVEL.

    By Bonferroni's correction, 3 metrics with a common level of 0.95 are each tested at
    1 - 0.05 / 3 = 0.983.
    """
    error_probability = 1 - LEVEL
    return 1 - error_probability / len(METRICS)


def _select_beyond_client_error(
    outliers: Sequence[OutlierNode],
    client_error_of_cells_ms: NDArray[np.float64],
    names: Sequence[str],
) -> list[OutlierNode]:
    """Return the outliers whose difference is larger than what the client may have added.

    An outlier is a node whose mean latency differs from that of the other nodes. The client may
    have added to the latencies of this node, or to those of all nodes. The larger error counts. If
    it is 4 ms, an outlier that differs by 3 ms is left out.

    Args:
        outliers: The outliers.
        client_error_of_cells_ms: How much the client may have added to a latency on average, nodes
            x blocks of time.
        names: The names of the nodes.
    """
    client_error_of_node_ms = client_error_of_cells_ms.mean(axis=1)
    client_error_of_all_ms = client_error_of_node_ms.mean()
    largest_error_ms = np.maximum(client_error_of_node_ms, client_error_of_all_ms)
    largest_error_by_name_ms = dict(zip(names, largest_error_ms, strict=True))

    return [
        outlier
        for outlier in outliers
        if abs(outlier.mean_ms - outlier.others_ms) > largest_error_by_name_ms[outlier.name]
    ]
