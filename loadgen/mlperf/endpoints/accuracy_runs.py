"""Describes the accuracy runs that a curve needs (section 4.3), for the plan and the check. Pure.

loadgen does not score the data sets of MLPerf Endpoints: the reference client runs and scores them.
"""

from __future__ import annotations

from loadgen.mlperf.endpoints.points import Curve, CurvePoint
from loadgen.mlperf.endpoints.rules import EndpointsBenchmark

REFERENCE_COMMAND = "inference-endpoint benchmark from-config --config config.yaml --mode both"
"""The command of the reference client for a performance run and the accuracy run after it."""


def find_accuracy_points(curve: Curve) -> list[CurvePoint]:
    """Return the points that need an accuracy run: one of each region, and the Offline run."""
    return [point for point in curve.points if point.needs_accuracy]


def describe_accuracy_points(curve: Curve) -> str:
    """Return the names of the measurement points that need an accuracy run, as text.

    The result for the scenario Offline comes from a run of its own, or from the point at the
    highest concurrency if the submitter chose ("elected") it. In this case, the accuracy run of the
    point counts for Offline too.
    """
    points = find_accuracy_points(curve)
    all_names = ", ".join(point.name for point in points)
    for point in points:
        if point.offline == "elected":
            return f"{all_names}; that of {point.name} also counts for Offline"
    return all_names


def describe_accuracy_loads(curve: Curve) -> str:
    """Return how many queries each accuracy run has in flight: as many as its performance run."""
    loads = []
    for point in find_accuracy_points(curve):
        in_flight = "all queries" if point.is_offline_run else f"{point.concurrency:,}"
        loads.append(f"{point.name}: {in_flight}")
    return ", ".join(loads) + " in flight"


def describe_required_scores(benchmark: EndpointsBenchmark) -> str:
    """Return the least score of each metric: 99 % of that of the reference."""
    return ", ".join(
        f"{metric} {least_score:.4f}" for metric, least_score in benchmark.required_accuracy.items()
    )


def describe_reference_run(benchmark: EndpointsBenchmark) -> str:
    """Return how the reference client runs the accuracy data sets."""
    if benchmark.reference_client is None:
        return "The reference client runs and scores them with --mode both."
    return (
        f"The reference client runs and scores them: {REFERENCE_COMMAND}. "
        "loadgen mlperf endpoints check --package writes config.yaml for each point."
    )
