"""Differences between replicas or nodes: the variance table and outliers, as rows and sentences.

Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from loadgen.core import format
from loadgen.figures import metric_label

if TYPE_CHECKING:
    from loadgen.core.metrics.sections import BetweenNodes, OutlierNode

MIN_UNITS_FOR_OUTLIERS = 3
"""Of two replicas, it is not possible to say which one differs from the usual."""


def variance_head(differences: BetweenNodes) -> tuple[str, ...]:
    """Return the heads of `variance_rows`, which name what is compared: replicas or nodes.

    The columns are the components of a two-way analysis of variance: between the replicas, over
    time, the interaction of both, and within a replica. SD is the standard deviation.
    """
    unit = differences.node_kind
    return (
        "variance (SD, ms)",
        "steady mean, ms",
        f"between {unit}s",
        "over time",
        f"{unit} x time",
        f"within {unit}",
    )


def variance_rows(differences: BetweenNodes) -> list[tuple[str, ...]]:
    """Return a row for each latency with its mean and the components of its variance.

    The components are those of a two-way analysis of variance: between replicas, over time, the
    interaction of both (how differently replicas change over time), and within a replica. A cell
    has the fraction of the total variance, and the standard deviation in ms: `25.0 % (1.20)`.
    """
    rows: list[tuple[str, ...]] = []
    for variance in differences.variances:
        between_replicas = _component_cell(variance.between_share, variance.between_ms)
        over_time = _component_cell(variance.time_share, variance.time_ms)
        interaction = _component_cell(variance.own_time_share, variance.own_time_ms)
        within_replica = _component_cell(variance.within_share, variance.within_ms)
        rows.append(
            (
                metric_label(variance.metric),
                format.milliseconds(variance.mean_ms),
                between_replicas,
                over_time,
                interaction,
                within_replica,
            )
        )

    return rows


def _component_cell(fraction: float, standard_deviation_ms: float) -> str:
    """Return a component of variance as a cell, such as `25.0 % (1.20)`."""
    return f"{format.percent(fraction)} ({format.milliseconds(standard_deviation_ms)})"


def describe_outliers(differences: BetweenNodes) -> list[str]:
    """Return which replicas or nodes are outliers and by how much, or that there are none.

    The list is empty if they could not be compared, since there is nothing to report then.
    """
    unit = differences.node_kind  # "replica" or "node", or "" if they could not be compared
    unit_count = differences.nodes
    if not unit:
        return []

    if differences.outliers:
        sentences = [_describe_outlier(outlier) for outlier in differences.outliers]
    elif unit_count < MIN_UNITS_FOR_OUTLIERS:
        # At least two are needed for a comparison, so there are exactly two.
        sentences = [f"Two {unit}s are too few to find an outlier."]
    else:
        confidence = f"{differences.level * 100:g} % confidence"
        sentences = [f"No outlier {unit} ({unit_count} {unit}s, {confidence})."]

    uncompared_names = differences.left_out
    if uncompared_names:
        sentences.append(f"Too few responses to compare: {', '.join(uncompared_names)}.")

    return sentences


def _describe_outlier(outlier: OutlierNode) -> str:
    """Return by how much the latency of a replica differs from the mean of the other replicas."""
    direction = "above" if outlier.change > 0 else "below"
    return (
        f"{outlier.name} is an outlier: {metric_label(outlier.metric)} "
        f"{format.milliseconds(outlier.mean_ms)} ms, {format.percent(abs(outlier.change))} "
        f"{direction} the mean of the others ({format.milliseconds(outlier.others_ms)} ms)."
    )
